"""y = x * w where each channel has a kernel of its own (depthwise): a sum of products for each output, no matrix.

    y[m, c] = sum over tap of  w[tap, c] * x[pixel(m) + tap, c]        m = (image, row, column) of y; x and y channels_last

w is `taps`: float32 dequantized weights, or int32 codes for int8 x. Bound by memory: x is read once from it and from the caches for
the other taps.

Arithmetic: fused multiply-adds in float32, in the order of taps; or int32 sums, requantized as `qlinear.py` has it. Outside of the
image lies 0, or in_zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import clamped, requantized
from halfbyte.kernels.gpu.conv_tile import Convolution
from halfbyte.kernels.gpu.launch import run
from halfbyte.kernels.problem import Epilogue

_ROWS, _CHANNELS = 32, 64


def launch(problem: Convolution, x: Tensor, taps: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """x [B, H, W, C] in memory, taps float32 [Kh * Kw, C], out [M, C]."""
    _start(problem, x, taps, None, out, epilogue, 0)


def launch_integer(problem: Convolution, x: Tensor, taps: Tensor, table: Tensor, out: Tensor, in_zero: int, clamp: tuple[int, int]) -> None:
    """The same of int8: taps int32 [Kh * Kw, C], table [1, 4 + taps, at least C]."""
    _start(problem, x, taps, table, out, Epilogue(None, None, float(clamp[0]), float(clamp[1])), in_zero)


def _start(problem: Convolution, x: Tensor, taps: Tensor, table: Tensor | None, out: Tensor, epilogue: Epilogue, in_zero: int) -> None:
    window, channels = problem.window, problem.sizes.out
    held = min(_CHANNELS, triton.next_power_of_2(channels))
    run(
        _depthwise,
        (-(-problem.m // _ROWS), -(-channels // held)),
        x,
        taps,
        table,
        out,
        (epilogue.bias, epilogue.residual),
        problem.m,
        channels,
        (*problem.image, *problem.out),
        (*window.stride, window.padding[0], window.padding[2], *window.dilation),
        (epilogue.low, epilogue.high),
        in_zero,
        0 if table is None else table.shape[2],
        KH=problem.sizes.kernel[0],
        KW=problem.sizes.kernel[1],
        CLAMP=epilogue.clamps,
        ROWS=_ROWS,
        CHANNELS=held,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["M", "outside"])
def _depthwise(
    x, taps, table, out, added, M, C, image, window, bounds, outside, row,
    KH: tl.constexpr, KW: tl.constexpr, CLAMP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    height, width, ho, wo = image
    rm = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rc = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    y0 = rm // wo % ho * window[0] - window[2]
    x0 = rm % wo * window[1] - window[3]
    start = x + (rm // (ho * wo)).to(tl.int64)[:, None] * (height * width * C) + rc[None, :]
    real = (rm < M)[:, None] & (rc < C)[None, :]
    acc = tl.zeros([ROWS, CHANNELS], taps.dtype.element_ty)
    for ky in tl.static_range(KH):
        for kx in tl.static_range(KW):
            iy = y0 + ky * window[4]
            ix = x0 + kx * window[5]
            inside = real & ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width))[:, None]
            w = tl.load(taps + (ky * KW + kx) * C + rc, mask=rc < C, other=0)
            if table is not None:
                values = tl.load(start + ((iy * width + ix) * C)[:, None], mask=inside, other=0).to(tl.int32)
                acc += tl.where(inside, values, outside) * w[None, :]
            else:
                acc += tl.load(start + ((iy * width + ix) * C)[:, None], mask=inside, other=0.0).to(tl.float32) * w[None, :]
    at = rm[:, None].to(tl.int64) * C + rc[None, :]
    if table is not None:
        y = requantized(tl.trans(acc), table, tl.minimum(rc, C - 1), row, bounds[0], bounds[1], 8)
        tl.store(out + at, tl.trans(y), mask=real)
    else:
        if added[0] is not None:
            acc += tl.load(added[0] + rc, mask=rc < C, other=0.0).to(tl.float32)[None, :]
        if added[1] is not None:
            acc += tl.load(added[1] + at, mask=real, other=0.0).to(tl.float32)
        if CLAMP:
            acc = clamped(acc, bounds[0], bounds[1])
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=real)
