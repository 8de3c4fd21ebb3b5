"""y = x * w where each channel has a kernel of its own (depthwise): a sum of products for each output, no matrix.

    y[m, c] = sum over tap of  w[tap, c] * x[pixel(m) + tap, c]        m = (image, row, column) of y; x and y channels_last

w is `taps`: float32 dequantized weights, or int32 codes for int8 x. Bound by memory, if each number is made a float or an int32 once
for all of its products: a program computes a strip, `rows` rows of y by some neighbouring vectors of (column, channels), from the top
down. A thread has the weights of its channels in registers, reads each row of x once for each column of taps, and adds it to the sums
of all rows of y that it belongs to (where rows are next to each other: without stride and dilation from top to bottom). Further rows
are on their way meanwhile. Vectors are 16 bytes (int8: 8) where the number of channels allows it, and what they are of needs no padding.

Arithmetic: fused multiply-adds in float32, in the order of taps; or int32 sums, requantized as `qlinear.py` has it. Outside of the
image lies 0, or in_zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import MAGIC, clamped
from halfbyte.kernels.gpu.conv_tile import Convolution
from halfbyte.kernels.gpu.launch import run
from halfbyte.kernels.problem import Epilogue

_VECTORS = 128  # of a program, one a thread
_ROWS = 16  # of a strip at most: two rows more are read than written
_PROGRAMS = 2048  # so many at least, if there is as much to do
_STAGES = 5  # rows of x on their way, and the one that is read
_HELD = 9  # taps whose weights fit the registers


def launch(problem: Convolution, x: Tensor, taps: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """x [B, H, W, C] in memory, taps float32 [Kh * Kw, C], out [M, C]."""
    _start(problem, x, taps, None, out, epilogue, 0)


def launch_integer(problem: Convolution, x: Tensor, taps: Tensor, table: Tensor, out: Tensor, in_zero: int, clamp: tuple[int, int]) -> None:
    """The same of int8: taps int32 [Kh * Kw, C], table [1, 4 + taps, at least C]."""
    _start(problem, x, taps, table, out, Epilogue(None, None, float(clamp[0]), float(clamp[1])), in_zero)


def _start(problem: Convolution, x: Tensor, taps: Tensor, table: Tensor | None, out: Tensor, epilogue: Epilogue, in_zero: int) -> None:
    window, channels, (ho, wo) = problem.window, problem.sizes.out, problem.out
    width = min(channels & -channels, 4 if x.element_size() == 4 else 8)
    line = wo * channels // width
    vectors = min(_VECTORS, triton.next_power_of_2(line))
    blocks = -(-line // vectors)
    most = min(_ROWS, ho, max(1, problem.batch * blocks * ho // _PROGRAMS))
    strips = -(-ho // most)
    run(
        _depthwise,
        (blocks * strips * problem.batch,),
        x,
        taps,
        table,
        out,
        (epilogue.bias, epilogue.residual),
        channels // width,
        (blocks, strips, -(-ho // strips)),
        (*problem.image, ho, wo),
        (*window.stride, window.padding[0], window.padding[2], *window.dilation),
        (epilogue.low, epilogue.high),
        in_zero,
        0 if table is None else table.shape[2],
        KH=problem.sizes.kernel[0],
        KW=problem.sizes.kernel[1],
        CLAMP=epilogue.clamps,
        SLIDES=window.stride[0] == window.dilation[0] == 1,
        HELD=problem.sizes.taps <= _HELD,
        VECTORS=vectors,
        WIDTH=width,
        FILL=in_zero != 0,
        STAGES=_STAGES,
        num_warps=max(1, vectors // 32),
    )


@triton.jit(do_not_specialize=["outside"])
def _depthwise(
    x, taps, table, out, added, Q, grid, image, window, bounds, outside, row,
    KH: tl.constexpr, KW: tl.constexpr, CLAMP: tl.constexpr, SLIDES: tl.constexpr, HELD: tl.constexpr,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Q vectors are a pixel. `grid` is (blocks of vectors, strips, rows of a strip)."""
    height, width, ho, wo = image
    b = (tl.program_id(0) // (grid[0] * grid[1])).to(tl.int64)
    v = tl.program_id(0) % grid[0] * VECTORS + tl.arange(0, VECTORS)
    first = tl.program_id(0) // grid[0] % grid[1] * grid[2]
    end = tl.minimum(first + grid[2], ho)
    real = v < wo * Q
    column = tl.minimum(v, wo * Q - 1)  # what lies outside is computed from the last one's data and not written
    channel = (column % Q * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    x0 = column // Q * window[1] - window[3]
    weights = ()  # type: tuple[object, ...]
    if HELD:
        for tap in tl.static_range(KH * KW):
            weights += (tl.load(taps + tap * (Q * WIDTH) + channel),)
    else:
        weights += (taps + channel,)
    numbers = ()  # type: tuple[object, ...]  # of each channel, for the end
    if table is not None:
        for i in tl.static_range(3):
            numbers += (tl.load(table + i * row + channel),)
    elif added[0] is not None:
        numbers += (tl.load(added[0] + channel).to(tl.float32),)
    image_x = x + b * (height * width * Q * WIDTH)
    line = (b * ho * wo * (Q * WIDTH) + v * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    pitch = wo * Q * WIDTH
    zero = tl.zeros([VECTORS, WIDTH], taps.dtype.element_ty)
    if SLIDES:
        sums = ()  # type: tuple[object, ...]  # of the rows of y that the next row of x belongs to, from the top
        for _ in tl.static_range(KH):
            sums += (zero,)
        for oy in tl.range(first - (KH - 1), end, num_stages=STAGES):
            now = _line(image_x, oy + KH - 1 - window[2], x0, channel, image, window, outside, Q, KW, WIDTH, FILL)
            moved = ()  # type: tuple[object, ...]
            for j in tl.static_range(KH):
                moved += (_added(sums[j], now, weights, KH - 1 - j, Q, KW, WIDTH, HELD),)
            if oy >= first:
                at = line + oy * pitch
                _finish(moved[0], out, added, at, real, numbers, bounds, CLAMP, table is not None)
            sums = moved[1:] + (zero,)  # noqa: RUF005
    else:
        for oy in range(first, end):
            total = zero
            for ky in tl.static_range(KH):
                iy = oy * window[0] + ky * window[4] - window[2]
                seen = _line(image_x, iy, x0, channel, image, window, outside, Q, KW, WIDTH, FILL)
                total = _added(total, seen, weights, ky, Q, KW, WIDTH, HELD)
            at = line + oy * pitch
            _finish(total, out, added, at, real, numbers, bounds, CLAMP, table is not None)


@triton.jit
def _line(x, iy, x0, channel, image, window, outside, Q, KW: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr):
    """What each column of taps sees of row iy of an image, as it is stored."""
    height, width, _ho, _wo = image
    start = x + iy.to(tl.int64) * (width * Q * WIDTH)
    inside = (iy >= 0) & (iy < height)
    found = ()  # type: tuple[object, ...]
    for kx in tl.static_range(KW):
        ix = x0 + kx * window[5]
        mask = inside & (ix >= 0) & (ix < width)
        place = start + ((ix * (Q * WIDTH))[:, None] + channel)
        if FILL:
            found += (tl.load(place, mask=mask[:, None], other=outside),)
        else:
            found += (tl.load(place, mask=mask[:, None], other=0),)
    return found


@triton.jit
def _added(total, seen, weights, ky, Q, KW: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr):
    """total + row ky of taps of what they see."""
    for kx in tl.static_range(KW):
        if HELD:
            w = weights[ky * KW + kx]
        else:
            w = tl.load(weights[0] + (ky * KW + kx) * (Q * WIDTH))
        total += seen[kx].to(total.dtype) * w
    return total


@triton.jit
def _finish(total, out, added, at, real, numbers, bounds, CLAMP: tl.constexpr, INTEGER: tl.constexpr):
    mask = real[:, None]
    if INTEGER:  # as `requantized` does it, of channels that lie along vectors
        y = tl.fma((total + numbers[2].to(tl.int32, bitcast=True)).to(tl.float32), numbers[1], numbers[0])
        y = tl.minimum(tl.maximum(y, bounds[0]), bounds[1])
        total = (y + MAGIC) - MAGIC
    else:
        if added[0] is not None:
            total += numbers[0]
        if added[1] is not None:
            total += tl.load(added[1] + at, mask=mask, other=0.0).to(tl.float32)
        if CLAMP:
            total = clamped(total, bounds[0], bounds[1])
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
