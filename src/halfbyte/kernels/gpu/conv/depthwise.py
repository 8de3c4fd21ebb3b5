"""y = x * w where each channel has a kernel of its own (depthwise): a sum of products for each output, no matrix.

    y[m, c] = sum over tap of  w[tap, c] * x[pixel(m) + tap, c]        m = (image, row, column) of y; x and y channels_last

w is `taps`: float32 dequantized weights, or int32 codes for int8 x. Bound by memory, if each number is made a float or an int32 once
for all of its products: a program computes a strip, `rows` rows of y by some neighbouring vectors of (column, channels), from the top
down. A thread has the weights of its channels in registers, reads each row of x once for each column of taps, and adds it to the sums
of all rows of y that it belongs to (where rows are next to each other: without stride and dilation from top to bottom). Further rows
are on their way meanwhile. Vectors are 16 bytes (int8: 8) where the number of channels allows it, and what they are of needs no padding.

Codes are multiplied by fours (DP4A): three columns of a row of x, a channel of each, go into one word, with that of their weights.

Arithmetic: fused multiply-adds in float32, in the order of taps; or int32 sums, requantized as `qlinear.py` has it. Outside of the
image lies 0, or in_zero: threads whose column is outside read a row of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import MAGIC, clamped
from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.kernels.problem import ConvProblem, Epilogue
from halfbyte.machine import Gpu

_VECTORS = 64
_ROWS = 32  # of a strip at most: two rows more are read than written
_LEAST_ROWS = 4  # as a program's weights take as long to read as some rows
_PROGRAMS = 2  # of a multiprocessor at least, if there is as much to do
_STAGES = 5
_SEPARATE_ROWS, _SEPARATE_STAGES = 7, 3  # where rows of y share none of x, or few
_MOST_REGISTER_TAPS = 9  # taps whose weights fit the registers

# Three columns of four channels: bytes a, b, c -> words (a, b, c, anything).
_ACROSS = tl.constexpr(
    "{.reg .b32 s, t; prmt.b32 s, $4, $5, 0x5140; prmt.b32 t, $4, $5, 0x7362;"
    "prmt.b32 $0, s, $6, 0x4410; prmt.b32 $1, s, $6, 0x5532; prmt.b32 $2, t, $6, 0x6610; prmt.b32 $3, t, $6, 0x7732;}"
)
_DOT = tl.constexpr("dp4a.s32.s32 $0, $1, $2, $3;")


@dataclass(frozen=True)
class Config:
    """Programs of `vectors`, one per thread, and strips of `rows` rows of y; `stages` rows of x are in flight or read. `ptx`: inline
    PTX."""

    vectors: int
    rows: int
    stages: int
    ptx: bool = True


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return the best guess: strips as high as leaves all multiprocessors enough to do."""
    ho, line = problem.out[0], problem.out[1] * problem.sizes.out // _width(problem)
    slides = problem.window.stride[0] == problem.window.dilation[0] == 1
    vectors = min(_VECTORS, triton.next_power_of_2(line))
    enough = max(_LEAST_ROWS, problem.batch * -(-line // vectors) * ho // (_PROGRAMS * gpu.sms))
    most = min(_ROWS if slides else _SEPARATE_ROWS, ho, enough)
    stages = _STAGES if slides else 1 if problem.dtype == torch.int8 else _SEPARATE_STAGES  # of codes, words are made first
    ptx = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    return (Config(vectors, -(-ho // -(-ho // most)), stages, ptx),)


def _width(problem: ConvProblem) -> int:
    """Return the channels of a vector."""
    channels = problem.sizes.out
    return min(channels & -channels, 4 if problem.dtype == torch.float32 else 8)


def launch(problem: ConvProblem, config: Config, x: Tensor, taps: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and taps [Kh * Kw, C], float32, or int32 of codes; out is [M, C], the epilogue's
    table, of codes, [1, 4 + taps, at least C]."""
    table = epilogue.table
    window, channels, (ho, wo), width = problem.window, problem.sizes.out, problem.out, _width(problem)
    blocks = -(-(wo * channels // width) // config.vectors)
    strips = -(-ho // config.rows)
    run(
        _depthwise,
        (blocks * strips * problem.batch,),
        x,
        taps,
        table,
        out,
        (epilogue.bias, epilogue.residual),
        channels // width,
        (blocks, strips, config.rows),
        (*problem.image, ho, wo),
        (*window.stride, window.padding[0], window.padding[2], *window.dilation),
        (epilogue.low, epilogue.high),
        epilogue.outside,
        0 if table is None else table.shape[2],
        KH=problem.sizes.kernel[0],
        KW=problem.sizes.kernel[1],
        WIDE=max(math.prod(problem.image), ho * wo) * channels >= 1 << 31,
        CLAMP=epilogue.clamps,
        SLIDES=window.stride[0] == window.dilation[0] == 1,
        IN_REGISTERS=problem.sizes.taps <= _MOST_REGISTER_TAPS,
        VECTORS=config.vectors,
        WIDTH=width,
        FILL=epilogue.outside != 0,
        STAGES=config.stages,
        PTX=config.ptx,
        DOTS=config.ptx and table is not None and width >= 4,
        num_warps=max(1, config.vectors // 32),
    )


@triton.jit(do_not_specialize=["outside"])
def _depthwise(
    x, taps, table, out, added, Q, grid, image, window, bounds, outside, row,
    KH: tl.constexpr, KW: tl.constexpr, WIDE: tl.constexpr, CLAMP: tl.constexpr, SLIDES: tl.constexpr, IN_REGISTERS: tl.constexpr,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Q vectors are a pixel. `grid` is (blocks of vectors, strips, rows of a strip). WIDE: an image has 2^31 elements or more."""
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
    if IN_REGISTERS:
        for ky in tl.static_range(KH):
            weights += _row_of_weights(taps + channel, ky, Q, KW, WIDTH, DOTS)
    else:
        weights += (taps + channel,)
    if FILL and PTX:
        outside = (table + 3 * row).to(tl.pointer_type(tl.int8))
    numbers = ()  # type: tuple[object, ...]  # of each channel, for the end
    if table is not None:
        for i in tl.static_range(3):
            numbers += (tl.load(table + i * row + channel),)
    elif added[0] is not None:
        numbers += (tl.load(added[0] + channel).to(tl.float32),)
    if WIDE:
        image_x = x + b * height * width * (Q * WIDTH)
    else:
        image_x = x + b * (height * width * Q * WIDTH)
    line = (b * ho * wo * (Q * WIDTH) + v * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    pitch = wo * Q * WIDTH
    zero = tl.zeros([VECTORS, WIDTH], taps.dtype.element_ty)
    if SLIDES:
        sums = ()  # type: tuple[object, ...]  # of the rows of y that the next row of x belongs to, from the top
        for _ in tl.static_range(KH):
            sums += (zero,)
        for oy in tl.range(first - (KH - 1), end, num_stages=STAGES):
            values = _line(image_x, oy + KH - 1 - window[2], x0, channel, image, window, outside, Q, KW, WIDTH, FILL, PTX, DOTS)
            moved = ()  # type: tuple[object, ...]
            for j in tl.static_range(KH):
                moved += (_added(sums[j], values, weights, KH - 1 - j, Q, KW, WIDTH, IN_REGISTERS, DOTS),)
            if oy >= first:
                at = line + (tl.cast(oy, tl.int64) if WIDE else oy) * pitch
                _finish(moved[0], out, added, at, real, numbers, bounds, CLAMP, table is not None)
            sums = moved[1:] + (zero,)  # noqa: RUF005
    else:
        for oy in tl.range(first, end, num_stages=STAGES):
            total = zero
            for ky in tl.static_range(KH):
                iy = oy * window[0] + ky * window[4] - window[2]
                values = _line(image_x, iy, x0, channel, image, window, outside, Q, KW, WIDTH, FILL, PTX, DOTS)
                total = _added(total, values, weights, ky, Q, KW, WIDTH, IN_REGISTERS, DOTS)
            at = line + (tl.cast(oy, tl.int64) if WIDE else oy) * pitch
            _finish(total, out, added, at, real, numbers, bounds, CLAMP, table is not None)


@triton.jit
def _line(
    x, iy, x0, channel, image, window, outside, Q,
    KW: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr, PTX: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Load what each column of taps multiplies of row iy of an image; with DOTS words of three columns."""
    height, width, _ho, _wo = image
    start = x + iy.to(tl.int64) * (width * Q * WIDTH)
    inside = (iy >= 0) & (iy < height)
    vectors = ()  # type: tuple[object, ...]
    for kx in tl.static_range(KW):
        ix = x0 + kx * window[5]
        mask = inside & (ix >= 0) & (ix < width)
        place = start + ((ix * (Q * WIDTH))[:, None] + channel)
        if FILL and PTX:
            vectors += (tl.load(tl.where(mask[:, None], place, outside + tl.arange(0, WIDTH)[None, :])),)
        elif FILL:
            vectors += (tl.load(place, mask=mask[:, None], other=outside),)
        else:
            vectors += (tl.load(place, mask=mask[:, None], other=0),)
    if DOTS:
        words = ()  # type: tuple[object, ...]
        for i in tl.static_range(0, KW, 3):
            words += (_across(vectors[i], vectors[min(i + 1, KW - 1)], vectors[min(i + 2, KW - 1)]),)
        return words
    else:
        return vectors


@triton.jit
def _across(a, b, c):
    """Return int8 [VECTORS, WIDTH] of three columns as the bytes of int32, from the lowest up; the highest is undefined."""
    return tl.inline_asm_elementwise(_ACROSS, "=r,=r,=r,=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def _row_of_weights(taps, ky, Q, KW: tl.constexpr, WIDTH: tl.constexpr, DOTS: tl.constexpr):
    """Return row ky of taps, in the order of `_line`."""
    vectors = ()  # type: tuple[object, ...]
    if DOTS:
        for i in tl.static_range(0, KW, 3):
            word = tl.load(taps + (ky * KW + i) * (Q * WIDTH)) & 255
            for j in tl.static_range(1, min(3, KW - i)):
                word |= (tl.load(taps + (ky * KW + i + j) * (Q * WIDTH)) & 255) << 8 * j
            vectors += (word,)
    else:
        for kx in tl.static_range(KW):
            vectors += (tl.load(taps + (ky * KW + kx) * (Q * WIDTH)),)
    return vectors


@triton.jit
def _added(total, values, weights, ky, Q, KW: tl.constexpr, WIDTH: tl.constexpr, IN_REGISTERS: tl.constexpr, DOTS: tl.constexpr):
    """Return total + row ky of taps times `values`."""
    COUNT: tl.constexpr = (KW + 2) // 3 if DOTS else KW
    row = weights
    FIRST: tl.constexpr = ky * COUNT if IN_REGISTERS else 0
    if not IN_REGISTERS:
        row = _row_of_weights(weights[0], ky, Q, KW, WIDTH, DOTS)
    for i in tl.static_range(COUNT):
        if DOTS:
            asked = [values[i], row[FIRST + i], total]
            total = tl.inline_asm_elementwise(_DOT, "=r,r,r,r", asked, dtype=tl.int32, is_pure=True, pack=1)
        else:
            total += values[i].to(total.dtype) * row[FIRST + i]
    return total


@triton.jit
def _finish(total, out, added, at, real, numbers, bounds, CLAMP: tl.constexpr, INTEGER: tl.constexpr):
    mask = real[:, None]
    if INTEGER:  # as `requantized` does it, of channels that lie along vectors
        y = tl.fma((total + numbers[2].to(tl.int32, bitcast=True)).to(tl.float32), numbers[1], numbers[0])
        y = tl.minimum(tl.maximum(y, bounds[0]), bounds[1])
        total = (y + MAGIC).to(tl.int32, bitcast=True)  # the low byte is the integer
    else:
        if added[0] is not None:
            total += numbers[0]
        if added[1] is not None:
            total += tl.load(added[1] + at, mask=mask, other=0.0).to(tl.float32)
        if CLAMP:
            total = clamped(total, bounds[0], bounds[1])
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
