"""Max pooling of images in int8, float16 or bfloat16, and average pooling of int8 codes without padding.

    max      y[b, c, oy, ox] = max over kh, kw inside of the image of  x[b, c, oy*stride - pad + kh*dilation, ox*stride - pad + kw*dilation]
    average  y[b, c, oy, ox] = round(sum over kh, kw of (x[…] - zero) / (Kh * Kw)) + zero

The maximum of a window with a NaN is NaN. An average is that of `kernels/cpu/conv/pool.py`: the sum is exact, then it is converted to
float32 (exact up to 2^24), divided, and rounded to the nearest integer, ties to even. Images and results are channels_last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import MAGIC, row_and_column
from halfbyte.kernels.gpu.runtime.launch import early_after, flat_grid, run
from halfbyte.kernels.problem import Window

_CHANNELS = 64  # of a program
UNROLLED = tl.constexpr(16)  # elements of a window up to which its loads are unrolled, so that they are in flight together
_PLACES = 64  # outputs of a program that computes maxima; elements of the window in a step of one that computes an average

# The maximum of each of four int8 in a word. max.s16x2 compares two 16-bit numbers, and the upper byte decides all comparisons but those
# of equal upper bytes, of which either may be taken. Once the bytes 1 and 3 are the upper ones, once, moved up by 8 bits, 0 and 2; prmt
# takes the upper bytes of both results: 1 and 3 of a, which become bytes 0 and 2, and 5 and 7 (those of b), which become 1 and 3.
_OF_BYTES = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 8;
    shl.b32 b, $2, 8;
    max.s16x2 a, a, b;
    max.s16x2 b, $1, $2;
    prmt.b32 $0, a, b, 0x7351;
}""")


def pool(x: Tensor, kernel: tuple[int, int], window: Window, out_size: tuple[int, int], zero: int | None = None) -> Tensor:
    """Launch max pooling (`zero` is None) or average pooling.

    Args:
        x: int8, or for max pooling float16 or bfloat16, [B, C, H, W], channels_last and not empty. An image has less than 2^31 elements
            (`ops/conv/pool.py` checks that), as offsets within one are int32.
        kernel: Kh and Kw.
        window: Stride, padding and dilation. Its padding below and to the right is not read: `out_size` says how far the kernel goes.
            Average pooling must not reach into padding: all that it reads is counted.
        out_size: Ho and Wo.
        zero: For average pooling, the code that means 0.

    Returns:
        [B, C, Ho, Wo] of the type of x, channels_last.
    """
    batch, channels, height, width = x.shape
    out = torch.empty((batch, channels, *out_size), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    top, _, left, _ = window.padding
    outputs, early = batch * out_size[0] * out_size[1], early_after(x)
    run(
        _largest if zero is None else _mean,
        flat_grid(-(-outputs // _PLACES) if zero is None else outputs, -(-channels // _CHANNELS)),
        x,
        out,
        outputs,
        (channels, height, width, *out_size),
        (*window.stride, top, left, *window.dilation, *kernel),
        0 if zero is None else zero,
        KERNEL_H=kernel[0] if zero is None else 0,  # an average's loop is not unrolled: one program for all kernels
        KERNEL_W=kernel[1] if zero is None else 0,
        CHANNELS=_CHANNELS,
        PLACES=_PLACES,
        DENSE=window.dilation == (1, 1),
        HOPPER=early,
        num_warps=4,
        early=early,
    )
    return out


@triton.jit
def _window_origin(m, sizes, window):
    """Return the index of the image, and the row and column of x where the window of output m begins, which may lie in the padding."""
    _channels, _height, _width, ho, wo = sizes
    stride_y, stride_x, top, left, _dilation_y, _dilation_x, _kernel_h, _kernel_w = window
    row = m // wo
    b = row // ho
    return b.to(tl.int64), (row - b * ho) * stride_y - top, (m - row * wo) * stride_x - left


@triton.jit
def _largest(
    x, out, outputs, sizes, window, zero,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    channels, height, width, _ho, _wo = sizes
    if HOPPER:
        gdc_launch_dependents()
        gdc_wait()
    row, column = row_and_column(tl.cdiv(channels, CHANNELS))
    m = row * PLACES + tl.arange(0, PLACES)
    c = column * CHANNELS + tl.arange(0, CHANNELS)
    b, y0, x0 = _window_origin(tl.minimum(m, outputs - 1), sizes, window)
    valid = (c < channels)[None, :]
    least: tl.constexpr = -128 if x.dtype.element_ty == tl.int8 else float("-inf")
    largest = tl.full((PLACES, CHANNELS), least, x.dtype.element_ty)
    base = x + (b * (height * width * channels))[:, None] + c[None, :]
    if KERNEL_H * KERNEL_W <= UNROLLED:
        for place in tl.static_range(KERNEL_H * KERNEL_W):
            largest = _larger(largest, _load_window(base, place, y0, x0, valid, sizes, window, least, KERNEL_W, DENSE), HOPPER)
    else:
        for place in range(KERNEL_H * KERNEL_W):
            largest = _larger(largest, _load_window(base, place, y0, x0, valid, sizes, window, least, KERNEL_W, DENSE), HOPPER)
    tl.store(out + (m.to(tl.int64)[:, None] * channels + c[None, :]), largest, mask=(m < outputs)[:, None] & valid)


@triton.jit
def _load_window(base, place, y0, x0, valid, sizes, window, least: tl.constexpr, KERNEL_W: tl.constexpr, DENSE: tl.constexpr):
    """Load an element of each window, or what does not change the maximum where it lies outside of the image.

    DENSE: dilation is 1, so that the image's pixel that is nearest to an element outside belongs to the same window: it is loaded again.
    """
    channels, height, width, _ho, _wo = sizes
    _stride_y, _stride_x, _top, _left, dilation_y, dilation_x, _kernel_h, _kernel_w = window
    iy = y0 + place // KERNEL_W * dilation_y
    ix = x0 + place % KERNEL_W * dilation_x
    if DENSE:
        iy = tl.minimum(tl.maximum(iy, 0), height - 1)
        ix = tl.minimum(tl.maximum(ix, 0), width - 1)
        return tl.load(base + ((iy * width + ix) * channels)[:, None], mask=valid, other=0)
    else:
        inside = ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width))[:, None] & valid
        numbers = tl.load(base + ((iy * width + ix) * channels)[:, None], mask=inside, other=0)
        return tl.where(inside, numbers, least)  # not `other=least`, of which Triton fills one of four int8 that it loads together


@triton.jit
def _larger(a, b, HOPPER: tl.constexpr):
    """Return the larger of each pair; NaN is the largest. With HOPPER in one instruction for two or four of them."""
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
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    channels, height, width, _ho, _wo = sizes
    if HOPPER:
        gdc_launch_dependents()
        gdc_wait()
    m, column = row_and_column(tl.cdiv(channels, CHANNELS))
    c = column * CHANNELS + tl.arange(0, CHANNELS)
    b, y0, x0 = _window_origin(m, sizes, window)
    _stride_y, _stride_x, _top, _left, dilation_y, dilation_x, kernel_h, kernel_w = window
    count = kernel_h * kernel_w
    total = tl.zeros((CHANNELS,), tl.int32)
    for first in range(0, count, PLACES):
        place = first + tl.arange(0, PLACES)
        at = ((b * height + y0 + place // kernel_w * dilation_y) * width + x0 + place % kernel_w * dilation_x) * channels
        codes = tl.load(x + (at[:, None] + c[None, :]), mask=(place < count)[:, None] & (c < channels)[None, :], other=0)
        total += tl.sum(codes.to(tl.int32), axis=0)
    mean = tl.div_rn((total - count * zero).to(tl.float32), tl.zeros((CHANNELS,), tl.float32) + count)
    # Adding and subtracting MAGIC rounds to the nearest integer, ties to even.
    y = tl.minimum(tl.maximum((mean + MAGIC) - MAGIC + zero, -128.0), 127.0)
    tl.store(out + m.to(tl.int64) * channels + c, y.to(tl.int8), mask=c < channels)
