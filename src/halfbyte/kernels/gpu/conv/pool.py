"""The largest number under each place of a window, or the mean of codes: pools of images in int8, the former also in 16 bits.

    y[b, c, oy, ox] = max over kh, kw that lie inside of the image of  x[b, c, oy*stride - pad + kh*dilation, ox*stride - pad + kw*dilation]
    y[b, c, oy, ox] = round(sum over kh, kw of (x[…] - zero) / (Kh * Kw)) + zero        where nothing is padded

A NaN under a window is its largest number. A mean is exact but for its division and its one rounding, ties to even, as
`kernels/cpu/conv/pool.py` has it. Images and results have their channels together (channels_last).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import MAGIC
from halfbyte.kernels.gpu.runtime.launch import early_after, run
from halfbyte.kernels.problem import Window

_CHANNELS = 64  # of a program
UNROLLED = tl.constexpr(16)  # places of a window, whose codes are on their way together
_PLACES = 64  # that a program looks at together: outputs, of a mean places of the window

# The elementwise maximum of two words of four codes: by halves, whose upper byte decides.
_OF_BYTES = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 8;
    shl.b32 b, $2, 8;
    max.s16x2 a, a, b;
    max.s16x2 b, $1, $2;
    prmt.b32 $0, a, b, 0x7351;
}""")


def pool(x: Tensor, kernel: tuple[int, int], window: Window, out_size: tuple[int, int], zero: int | None = None) -> Tensor:
    """int8, float16 or bfloat16 [B, C, H, W], channels_last and not empty -> [B, C, *out_size], channels_last.

    window   its padding below and to the right is not looked at: `out_size` says how far the kernel goes
    zero     of a mean, the code that means 0
    """
    batch, channels, height, width = x.shape
    out = torch.empty((batch, channels, *out_size), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    top, _, left, _ = window.padding
    outputs, early = batch * out_size[0] * out_size[1], early_after(x)
    run(
        _largest if zero is None else _mean,
        (-(-outputs // _PLACES) if zero is None else outputs, -(-channels // _CHANNELS)),
        x,
        out,
        outputs,
        (channels, height, width, *out_size),
        (*window.stride, top, left, *window.dilation, *kernel),
        0 if zero is None else zero,
        TALL=kernel[0] if zero is None else 0,
        WIDE=kernel[1] if zero is None else 0,
        CHANNELS=_CHANNELS,
        PLACES=_PLACES,
        DENSE=window.dilation == (1, 1),
        HOPPER=early,
        num_warps=4,
        early=early,
    )
    return out


@triton.jit
def _first(m, sizes, window):
    """Return image, row and column of x where the window of output m begins."""
    _channels, _height, _width, ho, wo = sizes
    row = m // wo
    b = row // ho
    return b.to(tl.int64), (row - b * ho) * window[0] - window[2], (m - row * wo) * window[1] - window[3]


@triton.jit
def _largest(
    x, out, outputs, sizes, window, zero,
    TALL: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    channels, height, width, _ho, _wo = sizes
    if HOPPER:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    b, y0, x0 = _first(tl.minimum(m, outputs - 1), sizes, window)
    real = (c < channels)[None, :]
    least: tl.constexpr = -128 if x.dtype.element_ty == tl.int8 else float("-inf")
    largest = tl.full((PLACES, CHANNELS), least, x.dtype.element_ty)
    xp = x + (b * (height * width * channels))[:, None] + c[None, :]
    if TALL * WIDE <= UNROLLED:
        for place in tl.static_range(TALL * WIDE):
            largest = _larger(largest, _load_window(xp, place, y0, x0, real, sizes, window, least, WIDE, DENSE), HOPPER)
    else:
        for place in range(TALL * WIDE):
            largest = _larger(largest, _load_window(xp, place, y0, x0, real, sizes, window, least, WIDE, DENSE), HOPPER)
    tl.store(out + (m.to(tl.int64)[:, None] * channels + c[None, :]), largest, mask=(m < outputs)[:, None] & real)


@triton.jit
def _load_window(xp, place, y0, x0, real, sizes, window, least: tl.constexpr, WIDE: tl.constexpr, DENSE: tl.constexpr):
    """Load an element of the window; if it is outside of the image, the nearest one inside (DENSE: there is one), or `least`."""
    channels, height, width, _ho, _wo = sizes
    iy = y0 + place // WIDE * window[4]
    ix = x0 + place % WIDE * window[5]
    if DENSE:
        iy = tl.minimum(tl.maximum(iy, 0), height - 1)
        ix = tl.minimum(tl.maximum(ix, 0), width - 1)
        return tl.load(xp + ((iy * width + ix) * channels)[:, None], mask=real, other=0)
    else:
        inside = ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width))[:, None] & real
        numbers = tl.load(xp + ((iy * width + ix) * channels)[:, None], mask=inside, other=0)
        return tl.where(inside, numbers, least)  # of four bytes that are read together, `other` is put into one


@triton.jit
def _larger(a, b, HOPPER: tl.constexpr):
    """Return the larger of each pair; NaN is the largest."""
    if HOPPER and a.dtype == tl.int8:
        return tl.inline_asm_elementwise(_OF_BYTES, "=r,r,r", [a, b], dtype=tl.int8, is_pure=True, pack=4)
    elif HOPPER and a.dtype == tl.float16:
        return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2)
    elif HOPPER:
        return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _mean(
    x, out, outputs, sizes, window, zero,
    TALL: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    channels, height, width, _ho, _wo = sizes
    if HOPPER:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    b, y0, x0 = _first(m, sizes, window)
    count = window[6] * window[7]
    total = tl.zeros((CHANNELS,), tl.int32)
    for first in range(0, count, PLACES):
        place = first + tl.arange(0, PLACES)
        at = ((b * height + y0 + place // window[7] * window[4]) * width + x0 + place % window[7] * window[5]) * channels
        codes = tl.load(x + (at[:, None] + c[None, :]), mask=(place < count)[:, None] & (c < channels)[None, :], other=0)
        total += tl.sum(codes.to(tl.int32), axis=0)
    mean = tl.div_rn((total - count * zero).to(tl.float32), tl.zeros((CHANNELS,), tl.float32) + count)
    y = tl.minimum(tl.maximum((mean + MAGIC) - MAGIC + zero, -128.0), 127.0)
    tl.store(out + m.to(tl.int64) * channels + c, y.to(tl.int8), mask=c < channels)
