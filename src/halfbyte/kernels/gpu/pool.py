"""The largest number under each place of a window, or the mean of codes: pools of images in int8, the former also in 16 bits.

    y[b, c, oy, ox] = max over kh, kw that lie inside of the image of  x[b, c, oy*stride - pad + kh*dilation, ox*stride - pad + kw*dilation]
    y[b, c, oy, ox] = round(sum over kh, kw of (x[…] - zero) / (Kh * Kw)) + zero        where nothing is padded

A NaN under a window is its largest number. A mean is exact but for its division and its one rounding, ties to even, as
`kernels/cpu/pool.py` has it. Images and results have their channels together (channels_last).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import MAGIC
from halfbyte.kernels.gpu.launch import early_after, run
from halfbyte.kernels.problem import Window

_CHANNELS = 64  # of a program
_UNROLLED = 16  # places of a window, whose codes are on their way together
_PLACES = 64  # that a program looks at together: outputs, of a mean places of the window


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
        (*kernel, *window.stride, top, left, *window.dilation),
        0 if zero is None else zero,
        CHANNELS=_CHANNELS,
        PLACES=_PLACES,
        SMALL=kernel[0] * kernel[1] if kernel[0] * kernel[1] <= _UNROLLED else 0,
        EARLY=early,
        num_warps=4,
        early=early,
    )
    return out


@triton.jit
def _first(m, sizes, window):
    """Image, row and column of x where the window of output m begins."""
    _channels, _height, _width, ho, wo = sizes
    row = m // wo
    b = row // ho
    return b.to(tl.int64), (row - b * ho) * window[2] - window[4], (m - row * wo) * window[3] - window[5]


@triton.jit
def _largest(
    x, out, outputs, sizes, window, zero, CHANNELS: tl.constexpr, PLACES: tl.constexpr, SMALL: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    channels, _height, _width, _ho, _wo = sizes
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    b, y0, x0 = _first(tl.minimum(m, outputs - 1), sizes, window)
    real = (c < channels)[None, :]
    least: tl.constexpr = -128 if x.dtype.element_ty == tl.int8 else float("-inf")
    largest = tl.full((PLACES, CHANNELS), least, x.dtype.element_ty)
    if SMALL:
        for place in tl.static_range(SMALL):
            seen = _seen(x, place, b, y0, x0, c, real, sizes, window, least)
            largest = tl.maximum(largest, seen, propagate_nan=tl.PropagateNan.ALL)
    else:
        for place in range(window[0] * window[1]):
            seen = _seen(x, place, b, y0, x0, c, real, sizes, window, least)
            largest = tl.maximum(largest, seen, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + (m.to(tl.int64)[:, None] * channels + c[None, :]), largest, mask=(m < outputs)[:, None] & real)


@triton.jit
def _seen(x, place, b, y0, x0, c, real, sizes, window, least: tl.constexpr):
    """Of a place of the window; `least` where it is outside."""
    iy = y0 + place // window[1] * window[6]
    ix = x0 + place % window[1] * window[7]
    inside = ((iy >= 0) & (iy < sizes[1]) & (ix >= 0) & (ix < sizes[2]))[:, None] & real
    at = ((b * sizes[1] + iy) * sizes[2] + ix) * sizes[0]
    numbers = tl.load(x + (at[:, None] + c[None, :]), mask=inside, other=0)
    return tl.where(inside, numbers, least)  # of four bytes that are read together, `other` is put into one


@triton.jit
def _mean(
    x, out, outputs, sizes, window, zero, CHANNELS: tl.constexpr, PLACES: tl.constexpr, SMALL: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    channels, height, width, _ho, _wo = sizes
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    b, y0, x0 = _first(m, sizes, window)
    count = window[0] * window[1]
    total = tl.zeros((CHANNELS,), tl.int32)
    for first in range(0, count, PLACES):
        place = first + tl.arange(0, PLACES)
        at = ((b * height + y0 + place // window[1] * window[6]) * width + x0 + place % window[1] * window[7]) * channels
        codes = tl.load(x + (at[:, None] + c[None, :]), mask=(place < count)[:, None] & (c < channels)[None, :], other=0)
        total += tl.sum(codes.to(tl.int32), axis=0)
    mean = tl.div_rn((total - count * zero).to(tl.float32), tl.zeros((CHANNELS,), tl.float32) + count)
    y = tl.minimum(tl.maximum((mean + MAGIC) - MAGIC + zero, -128.0), 127.0)
    tl.store(out + m.to(tl.int64) * channels + c, y.to(tl.int8), mask=c < channels)
