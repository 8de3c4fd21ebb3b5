"""Float weights to codes, with the arithmetic of `quantizers/absmax.py` bit for bit, in one pass at the speed of memory.

A program takes some blocks as a tile [blocks, elements]: their extremes, their grid, their codes. Compiled without fused
multiply-adds: every step is one float32 operation, as that module's text has it. A NaN, an infinity or a scale that overflows
raises a flag; the slow path then finds the place and names it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.kernels.gpu.activations import MAGIC
from halfbyte.kernels.gpu.launch import run

_TILE = 4096
_LONGEST = 32768  # elements of a block, which one program holds in registers
_ZEROS = {"none": 0, "point": 1, "offset": 2}
_FAMILIES = {"int": 0, "ggml": 1, "inferllm": 2}


def supports(weight: Tensor, fmt: Format) -> str | None:
    """Why `quantize` can't take this weight; None if it can."""
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it takes float32, bfloat16 or float16, not {weight.dtype}"
    if fmt.block == "tensor":
        return "one scale for a whole tensor takes two passes over it"
    block = fmt.block_size(weight.shape[-1]) if weight.dim() else 1
    if block > _LONGEST:
        return f"a block of {block} elements is longer than the {_LONGEST} that a program holds"
    if fmt.bits == 4 and block % 2 and block < weight.shape[-1]:
        return f"the nibbles of a byte would belong to two blocks of {block}"
    return None


def quantize(weight: Tensor, fmt: Format) -> Codes | None:
    """`quantizers.absmax.absmax(weight, fmt)`, fast; None where a value or a scale is not finite. The caller asks `supports` first."""
    *lead, k = weight.shape
    device = weight.device
    data = torch.empty(
        (*lead, (k + 1) // 2 if fmt.bits == 4 else k), dtype=torch.int8 if fmt.bits == 8 and fmt.signed else torch.uint8, device=device
    )
    scale = torch.empty(fmt.scale_shape(tuple(weight.shape)), dtype=fmt.scale, device=device)
    zero = None if fmt.zero == "none" else torch.empty_like(scale, dtype=torch.uint8 if fmt.zero == "point" else fmt.scale)
    if weight.numel():
        flat = weight.reshape(-1, k)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        failed = torch.zeros(1, dtype=torch.int32, device=device)
        block = fmt.block_size(k)
        width = max(16, triton.next_power_of_2(block))
        blocks = -(-k // block)
        held = min(max(1, _TILE // width), triton.next_power_of_2(blocks))
        run(
            _quantize,
            (len(flat), -(-blocks // held)),
            flat,
            data,
            scale,
            zero,
            failed,
            k,
            flat.stride(0),
            data.shape[-1],
            block,
            (block + 1) // 2,
            blocks,
            HELD=held,
            WIDTH=width,
            BITS=fmt.bits,
            ZERO=_ZEROS[fmt.zero],
            FAMILY=_FAMILIES[fmt.family],
            num_warps=max(1, min(16, held * width // 512)),
            enable_fp_fusion=False,
        )
        if int(failed):
            return None
    return Codes(fmt, tuple(weight.shape), data, scale, zero)


@triton.jit
def _to_even(v):
    """The nearest integer, ties to even, of |v| < 2^22."""
    return (v + MAGIC) - MAGIC


@triton.jit
def _inverse(x):
    """1 / x, or 0 where that is not finite."""
    inverse = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.where(tl.abs(inverse) < float("inf"), inverse, 0.0)


@triton.jit
def _quantize(
    x, data, scale, zero, failed, k, stride, data_stride, block, half_block, blocks,
    HELD: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, FAMILY: tl.constexpr,
):  # fmt: skip
    Q_MAX: tl.constexpr = (1 << BITS) - 1 if ZERO != 0 else (1 << BITS - 1) - 1
    Q_MIN: tl.constexpr = 0 if ZERO != 0 else -(1 << BITS - 1)
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1) * HELD + tl.arange(0, HELD)
    inside = which < blocks
    number = row * blocks + which
    first = which * block
    i = tl.arange(0, WIDTH)
    real = inside[:, None] & (i < block)[None, :] & (first[:, None] + i[None, :] < k)
    v = tl.load(x + row * stride + first[:, None] + i[None, :], mask=real, other=0.0).to(tl.float32)
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    top = tl.full([HELD], Q_MAX, tl.float32)
    lo = tl.zeros([HELD], tl.float32)
    if ZERO == 0:
        exact = tl.div_rn(most.to(tl.float32, bitcast=True), top)
        if FAMILY == 1 and BITS == 4:  # ggml's q4_0: the value of the first of the greatest magnitudes becomes -8
            at = tl.min(tl.where(real & (v.to(tl.int32, bitcast=True) & 0x7FFFFFFF == most[:, None]), i[None, :], WIDTH), axis=1)
            exact = tl.sum(tl.where(i[None, :] == at[:, None], v, 0.0), axis=1) * -0.125
    else:
        lo = tl.min(tl.where(real, v, float("inf")), axis=1) + 0.0
        hi = tl.max(tl.where(real, v, float("-inf")), axis=1) + 0.0
        if ZERO == 1:
            lo = tl.minimum(lo, 0.0)
            hi = tl.maximum(hi, 0.0)
        exact = tl.div_rn(hi - lo, top)
    kind = scale.dtype.element_ty
    stored = exact.to(kind)
    wrong = (most >= 0x7F800000) | ~(tl.abs(stored.to(tl.float32)) < float("inf"))
    if FAMILY == 0:  # codes come from the scale as it is stored, elsewhere from the exact one
        inverse = _inverse(stored.to(tl.float32))
    elif FAMILY == 1 and BITS == 4 and ZERO == 0:
        inverse = tl.where(exact == 0, 0.0, tl.div_rn(tl.full([HELD], 1.0, tl.float32), exact))
    else:
        inverse = _inverse(exact)
    tl.store(scale + number, stored, mask=inside)
    if ZERO == 1:
        point = tl.minimum(tl.maximum(_to_even(tl.minimum(-lo * inverse, 1024.0)), 0.0), Q_MAX)
        tl.store(zero + number, point.to(tl.uint8), mask=inside)
    if ZERO == 2:
        offset = lo.to(kind)
        wrong |= ~(tl.abs(offset.to(tl.float32)) < float("inf"))
        tl.store(zero + number, offset, mask=inside)
        v = v - (offset.to(tl.float32) if FAMILY == 0 else lo)[:, None]
    tl.store(failed + tl.zeros([HELD], tl.int32), 1, mask=wrong & inside)
    v = v * inverse[:, None]
    if FAMILY == 0:
        q = _to_even(tl.minimum(tl.maximum(v, -1024.0), 1024.0)).to(tl.int32)
        if ZERO == 1:
            q += point[:, None].to(tl.int32)
    elif FAMILY == 1 and BITS == 4:
        v = v + (8.5 if ZERO == 0 else 0.5)
        v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
        q = tl.minimum(tl.maximum(v, -1024.0), 1024.0).to(tl.int32) + Q_MIN
    else:
        v = tl.minimum(tl.maximum(v, -1024.0), 1024.0)
        q = v.to(tl.int32)
        rest = v - q.to(tl.float32)
        q += (rest >= 0.5).to(tl.int32) - (rest <= -0.5).to(tl.int32)
    q = tl.minimum(tl.maximum(q, Q_MIN), Q_MAX)
    if BITS == 8:
        tl.store(data + row * data_stride + first[:, None] + i[None, :], q.to(data.dtype.element_ty), mask=real)
    else:
        q = tl.where(real, q - Q_MIN, 0)
        even, odd = tl.split(tl.reshape(q, (HELD, WIDTH // 2, 2)))
        j = (which * half_block)[:, None] + tl.arange(0, WIDTH // 2)[None, :]
        written = inside[:, None] & (tl.arange(0, WIDTH // 2) < half_block)[None, :] & (j < data_stride)
        tl.store(data + row * data_stride + j, (even | odd << 4).to(tl.uint8), mask=written)
