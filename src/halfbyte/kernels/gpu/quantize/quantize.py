"""Quantize float weights on a GPU: [..., K] -> codes, scales and zeros, bit for bit those of `quantizers/absmax.py`, whose equations
these are.

`ops.quantize` calls it, and `absmax.py` for what `supports` refuses. A program quantizes a tile [blocks, elements]: extremes of the blocks,
then scales and zeros, then codes. Memory limits the speed as long as an element takes some twenty instructions at most. So the kernel is
compiled without fused multiply-adds, each step is one float32 operation of `absmax.py`, and some give the same bits with fewer
instructions:

    clamping to integers    commutes with rounding, so that it comes before
    round to even           v + 1.5 * 2^23 has the integer in its lowest bits
    round away from zero    trunc(v + 0.49999997 * sign(v)), a sum that is rounded

A NaN, an infinity or a scale that overflows sets a flag. `quantize` then returns None, and the caller quantizes by `absmax.py`, which finds
the element and names it in its error.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.kernels.gpu.arithmetic import INTERPRETED, MAGIC, row_and_column
from halfbyte.kernels.gpu.runtime.launch import flat_grid, run
from halfbyte.kernels.gpu.weight_kinds import zero_number

_TILE = 4096  # elements of a program
_ELEMENTS_PER_WARP = 1024  # with fewer, work per block takes longer than work per element
_LONGEST_ROW = (1 << 31) - (1 << 15)  # elements, whose offsets in a row are int32 up to the end of the last program's tile
_LONGEST_BLOCK = 32768  # elements: a program holds its blocks in registers
_FAMILIES = {"int": 0, "ggml": 1, "inferllm": 2}  # rules of `Format.family` as the kernel numbers them


def supports(weight: Tensor, fmt: Format) -> str | None:
    """Return the reason why `quantize` cannot quantize this weight, or None."""
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it takes float32, bfloat16 or float16, not {weight.dtype}"
    if fmt.family not in _FAMILIES:
        return f"it has no code for formats of {fmt.family}"
    if fmt.block == "tensor":
        return "one scale for a whole tensor takes two passes over it"
    if weight.dim() and weight.shape[-1] >= _LONGEST_ROW:
        return f"a row of {weight.shape[-1]} elements has 2^31 or more, but for a block"
    block = fmt.block_size(weight.shape[-1]) if weight.dim() else 1
    if block > _LONGEST_BLOCK:
        return f"a block of {block} elements is longer than the {_LONGEST_BLOCK} that a program holds"
    if fmt.bits == 4 and block % 2 and block < weight.shape[-1]:
        return f"the nibbles of a byte would belong to two blocks of {block}"
    return None


def quantize(weight: Tensor, fmt: Format) -> Codes | None:
    """Quantize a weight as `quantizers.absmax.absmax` does.

    Args:
        weight: [..., K], for which `supports` returns None.
        fmt: The format.

    Returns:
        The codes; None where a value, a scale or an offset is not finite. This waits for the GPU.
    """
    *lead, k = weight.shape
    device = weight.device
    row_bytes = (k + 1) // 2 if fmt.bits == 4 else k
    data = torch.empty((*lead, row_bytes), dtype=torch.int8 if fmt.bits == 8 and fmt.signed else torch.uint8, device=device)
    scale = torch.empty(fmt.scale_shape(tuple(weight.shape)), dtype=fmt.scale, device=device)
    zero = None if fmt.zero_dtype is None else torch.empty_like(scale, dtype=fmt.zero_dtype)
    if weight.numel():
        flat = weight.reshape(-1, k)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        failed = torch.zeros(1, dtype=torch.int32, device=device)
        block = fmt.block_size(k)
        width = max(16, triton.next_power_of_2(block))
        blocks = -(-k // block)
        blocks_per_program = min(max(1, _TILE // width), triton.next_power_of_2(blocks))
        run(
            _quantize,
            flat_grid(len(flat), -(-blocks // blocks_per_program)),
            flat,
            data,
            scale,
            zero,
            failed,
            k,
            flat.stride(0),
            row_bytes,
            block,
            (block + 1) // 2,
            blocks,
            BLOCKS=blocks_per_program,
            WIDTH=width,
            BITS=fmt.bits,
            ZERO=zero_number(fmt),
            FAMILY=_FAMILIES[fmt.family],
            FULL=block == width and k % block == 0,
            EVEN=block % 2 == 0 and k % 2 == 0,
            num_warps=max(1, min(16, blocks_per_program * width // _ELEMENTS_PER_WARP)),
            enable_fp_fusion=False,
        )
        if int(failed):
            return None
    return Codes(fmt, tuple(weight.shape), data, scale, zero)


@triton.jit
def _quantize(
    x, data, scale, zero, failed, k, stride, row_bytes, block, block_bytes, blocks,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, FAMILY: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCKS blocks of a row, from block column * BLOCKS on (`row_and_column`), in a tile of WIDTH elements a block.

    x, stride           rows [k], `stride` elements apart
    data, row_bytes     codes: bytes or nibbles; bytes of a row
    scale, zero         [rows, blocks]; zero is None with ZERO == 0
    failed              int32 [1], set to 1 where a value, a scale or an offset is not finite
    block, block_bytes  elements of a block, and bytes of their nibbles
    blocks              blocks of a row
    ZERO                the kind of zero, as `weight_kinds.zero_number`: 0 none, 1 zero points, 2 offsets
    FAMILY              the rounding, a number of `_FAMILIES`
    FULL                blocks fill the tile's width
    EVEN                each byte has two nibbles of one block
    """
    tl.static_assert(FAMILY < 3, "a family whose rounding has no code for GPUs")
    tl.static_assert(ZERO < 3, "a zero that has no code for GPUs")
    IS_INT: tl.constexpr = FAMILY == 0
    IS_GGML_4: tl.constexpr = FAMILY == 1 and BITS == 4
    Q_MAX: tl.constexpr = (1 << BITS) - 1 if ZERO != 0 else (1 << BITS - 1) - 1
    Q_MIN: tl.constexpr = 0 if ZERO != 0 else -(1 << BITS - 1)
    SHIFT: tl.constexpr = -Q_MIN if BITS == 4 else 0  # nibbles are stored without a sign
    row, column = row_and_column(tl.cdiv(blocks, BLOCKS))
    row = row.to(tl.int64)
    block_in_row = column * BLOCKS + tl.arange(0, BLOCKS)
    inside = block_in_row < blocks
    scale_at = row * blocks + block_in_row
    first = block_in_row * block
    i = tl.arange(0, WIDTH)
    exists = inside[:, None] & (i < block)[None, :] & (first[:, None] + i[None, :] < k)
    v = tl.load(x + row * stride + first[:, None] + i[None, :], mask=exists, other=0.0).to(tl.float32)

    # The exact scale of each block, from its extremes
    low = tl.zeros([BLOCKS], tl.float32)
    if ZERO == 0:
        magnitude = _maximum_of_rows(tl.abs(v))
        exact = tl.div_rn(magnitude, tl.full([BLOCKS], Q_MAX, tl.float32))
        if IS_GGML_4:  # ggml's q4_0: the first value of the greatest magnitude becomes -8
            position_and_sign = 2 * i[None, :] + (v.to(tl.int32, bitcast=True) >> 31 & 1)
            peak = tl.abs(v) == magnitude[:, None]
            negative = tl.min(tl.where(peak if FULL else peak & exists, position_and_sign, 2 * WIDTH), axis=1) & 1
            exact = tl.where(negative == 1, magnitude, -magnitude) * 0.125
    else:
        low = _minimum_of_rows(v if FULL else tl.where(exists, v, float("inf"))) + 0.0
        high = _maximum_of_rows(v if FULL else tl.where(exists, v, float("-inf"))) + 0.0
        magnitude = _maximum(tl.abs(low), tl.abs(high))
        if ZERO == 1:
            low = tl.minimum(low, 0.0)
            high = tl.maximum(high, 0.0)
        exact = tl.div_rn(high - low, tl.full([BLOCKS], Q_MAX, tl.float32))

    # Scales and zeros as they are stored
    SCALE: tl.constexpr = scale.dtype.element_ty
    stored = exact.to(SCALE)
    not_finite = ~(magnitude < float("inf")) | ~(tl.abs(stored.to(tl.float32)) < float("inf"))
    tl.store(scale + scale_at, stored, mask=inside)
    # The "int" family computes codes from the stored scale and offset, the others from the exact ones.
    inverse = _inverse(stored.to(tl.float32) if IS_INT else exact)
    if ZERO == 1:
        point = tl.minimum(tl.maximum((tl.minimum(-low * inverse, 1024.0) + MAGIC) - MAGIC, 0.0), Q_MAX)
        tl.store(zero + scale_at, point.to(tl.uint8), mask=inside)
    if ZERO == 2:
        if IS_INT:  # a block of both signs whose scale vanishes becomes zeros
            low = tl.where((inverse == 0) & (low < 0) & (-low < exact * Q_MAX), 0.0, low)
        offset = low.to(SCALE)
        not_finite |= ~(tl.abs(offset.to(tl.float32)) < float("inf"))
        tl.store(zero + scale_at, offset, mask=inside)
        v = v - (offset.to(tl.float32) if IS_INT else low)[:, None]
    tl.store(failed + tl.zeros([BLOCKS], tl.int32), 1, mask=not_finite & inside)

    # Codes u, of which the lowest byte or nibble is stored
    v = v * inverse[:, None]
    if IS_GGML_4:
        half = tl.full([BLOCKS], 0.5, tl.float32)
        if ZERO == 0:  # a reciprocal that overflows, of a scale that is not zero, makes -8 of all
            half = tl.where((inverse == 0) & (exact != 0), 0.0, 8.5)
        u = tl.minimum((v + half[:, None]).to(tl.int32), 15)
    elif IS_INT and ZERO == 1:
        v = tl.minimum(tl.maximum(v, -point[:, None]), (Q_MAX - point)[:, None])
        u = (v + MAGIC).to(tl.int32, bitcast=True) + point.to(tl.int32)[:, None]
    else:
        v = tl.minimum(tl.maximum(v, Q_MIN), Q_MAX)
        u = (v + (MAGIC + SHIFT)).to(tl.int32, bitcast=True) if IS_INT else _round_away(v) + SHIFT
    if BITS == 8:
        tl.store(data + row * row_bytes + first[:, None] + i[None, :], u.to(data.dtype.element_ty), mask=exists)
    else:
        if not EVEN:
            u = tl.where(exists, u, 0)
        even, odd = tl.split(tl.reshape(u, (BLOCKS, WIDTH // 2, 2)))
        byte = (block_in_row * block_bytes)[:, None] + tl.arange(0, WIDTH // 2)[None, :]
        written = inside[:, None] & (tl.arange(0, WIDTH // 2) < block_bytes)[None, :] & (byte < row_bytes)
        tl.store(data + row * row_bytes + byte, (even & 15 | odd << 4).to(tl.uint8), mask=written)


@triton.jit
def _maximum(a, b):
    """Return the greater of two numbers; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):
    """Return the lesser of two numbers; NaN if one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum_of_rows(v):
    """Return the minimum along the last dimension; NaN if there is one."""
    if INTERPRETED:  # where such a reduction takes seconds
        return tl.min(v, axis=1) + tl.sum(tl.where(tl.abs(v) >= 0, 0.0, v), axis=1)
    else:
        return tl.reduce(v, 1, _minimum)


@triton.jit
def _maximum_of_rows(v):
    """Return the maximum along the last dimension; NaN if there is one."""
    if INTERPRETED:
        return tl.max(v, axis=1) + tl.sum(tl.where(tl.abs(v) >= 0, 0.0, v), axis=1)
    else:
        return tl.reduce(v, 1, _maximum)


@triton.jit
def _inverse(x):
    """Return 1 / x, or 0 where that is not finite."""
    inverse = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.where(tl.abs(inverse) < float("inf"), inverse, 0.0)


@triton.jit
def _round_away(v):
    """Return the nearest integer, ties away from zero, as int32."""
    almost_half = v.to(tl.int32, bitcast=True) & -0x80000000 | 0x3EFFFFFF
    return (v + almost_half.to(tl.float32, bitcast=True)).to(tl.int32)
