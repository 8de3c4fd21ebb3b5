"""y = x * W, a convolution of activations that are quantized on the fly (`compute="int8"`), as `conv_reference.py` has it.

    y[m, n] = sum over blocks of  sx * (sw * sum(qx * qw) + o * sum(qx)) + ox * sum(w)

o is what a weight's zero adds, ox the offset of x under "block_offset" and "row_offset", elsewhere 0. A first kernel reads x once and
finds the range of each pixel's channels (the greatest magnitude, or both ends), block by block of the weight where `activation` is
"block" or "block_offset" and blocks lie inside a tap; elsewhere a patch has one scale, and the range of its pixels together is its own.
The second gathers patches as `implicit_gemm.py`, quantizes them in registers, and multiplies integers. Where x has an offset it also sums
the weight's codes, again in each tile: that costs less than another launch. As the reference has it, the zeros around an image and those
that fill a tap's last block are quantized too; those that fill the layout are masked.

Arithmetic: scales and codes are those of the reference, bit by bit; integer sums are exact, and become float32 once a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import round_product, scale_of
from halfbyte.kernels.gpu.conv.implicit_gemm import supports as supports_float
from halfbyte.kernels.gpu.conv.tile import (
    Config,
    finish,
    padded_channels,
    patches,
    places,
    rows_and_patches,
    static_of,
    weight_at,
    words_of,
)
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.problem import ConvProblem, Epilogue, scaling_of
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK
from halfbyte.machine import Gpu

_PIXELS = 16


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if reason := supports_float(problem, gpu):
        return reason
    geo = convolution.gpu_geometry(problem.sizes)
    if min(geo.block, geo.k) > LONGEST_BLOCK:
        return f"sums of {geo.block} products may overflow an int32"
    return None


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    geo = convolution.gpu_geometry(problem.sizes)
    step = 128 if geo.format.bits == 4 else 64 if geo.block_rows == 1 else min(64, geo.padded)
    if padded_channels(problem.sizes) < 16 and geo.format.bits == 8:
        step = 32
    ptx = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    block_m, warps = 32 if geo.format.bits == 4 else 64, 4
    if scaling_of(problem.activation).with_offset and geo.block_rows > 1:  # what is kept of each block takes registers
        block_m //= 2
        if geo.format.bits == 8 and gpu.backend == "cuda":
            warps = 8
    return (Config(64, block_m, step, 1 if gpu.backend == "hip" else 3, warps, 1, ptx),)


def launch(problem: ConvProblem, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M,
    Co]."""
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    whole_row, with_offset = scaling_of(problem.activation)
    blockwise = not whole_row and geo.block_rows > 1
    pixels = problem.batch * problem.image[0] * problem.image[1]
    block = geo.block if blockwise else sizes.padded
    blocks = sizes.padded // block
    count = sizes.groups * blocks * pixels  # of ranges, and of their other ends
    ranges = workspace(out.device, (2 if with_offset else 1) * 4 * count).view(torch.int32)
    launcher.run(
        _ranges,
        (-(-pixels // _PIXELS), blocks, sizes.groups),
        x,
        ranges,
        count,
        pixels,
        x.shape[3],
        sizes.channels,
        block,
        PIXELS=_PIXELS,
        CHANNELS=min(128, triton.next_power_of_2(block)),
        WITH_OFFSET=with_offset,
        num_warps=4,
    )
    static = static_of(problem, config, x, "dynamic", fill=False, clamp=epilogue.clamps)
    views = gpu_tiles.views(weight[: geo.nbytes], geo)
    image, window = places(problem, x)
    launcher.run(
        _dynamic,
        (-(-problem.n // config.block_n) * -(-problem.m // config.block_m), 1, sizes.groups),
        x,
        ranges,
        tuple(views),
        out,
        (epilogue.bias, epilogue.residual),
        problem.m,
        problem.n,
        (geo.n_padded, geo.k_padded, geo.nbytes, -(-sizes.taps * static.channels // static.slab_k)),
        image,
        window,
        (epilogue.low, epilogue.high),
        (pixels, blocks, count, sizes.channels),
        static,
        BLOCKWISE=blockwise,
        WITH_OFFSET=with_offset,
        num_warps=config.warps,
    )


@triton.jit(do_not_specialize=["count", "pixels"])
def _ranges(
    x, ranges, count, pixels, pixel, channels, block, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WITH_OFFSET: tl.constexpr
):  # fmt: skip
    """Write the range of each pixel's channels in block program_id(1) of group program_id(2), as bits: the greatest magnitude, or with
    offsets the least and, `count` further on, the greatest value; NaN where one is not finite. What fills the last block is 0."""
    rp = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    first = tl.program_id(1) * block
    xp = x + rp.to(tl.int64)[:, None] * pixel + tl.program_id(2) * channels
    most = tl.zeros([PIXELS], tl.int32)
    low = tl.full([PIXELS], float("inf"), tl.float32)
    high = tl.full([PIXELS], float("-inf"), tl.float32)
    for start in range(0, block, CHANNELS):
        i = start + tl.arange(0, CHANNELS)
        c = first + i
        real = (rp < pixels)[:, None] & ((i < block) & (c < channels))[None, :]
        values = tl.load(xp + c[None, :], mask=real, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
        if WITH_OFFSET:
            low = tl.minimum(low, tl.min(tl.where((i < block)[None, :], values, float("inf")), axis=1))
            high = tl.maximum(high, tl.max(tl.where((i < block)[None, :], values, float("-inf")), axis=1))
    at = ranges + (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * pixels + rp
    if WITH_OFFSET:
        low = tl.where(most < 0x7F800000, low, float("nan"))
        tl.store(at, low.to(tl.int32, bitcast=True), mask=rp < pixels)
        tl.store(at + count, high.to(tl.int32, bitcast=True), mask=rp < pixels)
    else:
        tl.store(at, most, mask=rp < pixels)


@triton.jit
def _range_at(ranges, count, y0, x0, tap, image, window, S: tl.constexpr, WITH_OFFSET: tl.constexpr):
    """Return both ends of the range of the pixel under `tap` of each patch; 0 outside of the image."""
    iy = y0 + tap // S.kernel_w * window[4]
    ix = x0 + tap % S.kernel_w * window[5]
    inside = (iy >= 0) & (iy < image[0]) & (ix >= 0) & (ix < image[1]) & (tap < S.taps)
    at = ranges + (iy * image[1] + ix)
    low = tl.load(at, mask=inside, other=0)
    high = low
    if WITH_OFFSET:
        high = tl.load(at + count, mask=inside, other=0)
    return low, high


@triton.jit
def _scales(low, high, WITH_OFFSET: tl.constexpr):
    """Return scale, inverse and offset of a range of `_range_at`."""
    a = low.to(tl.float32, bitcast=True)
    if WITH_OFFSET:
        b = high.to(tl.float32, bitcast=True)
        return scale_of((b - a) * 0.5, (a + b) * 0.5, tl.abs(a) < float("inf"))
    else:
        return scale_of(a, tl.zeros_like(a), low < 0x7F800000)


@triton.jit
def _wider(low, high, more_low, more_high, WITH_OFFSET: tl.constexpr):
    """Return the union of two ranges."""
    if WITH_OFFSET:
        a, b = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        a = tl.minimum(a, more_low.to(tl.float32, bitcast=True), propagate_nan=tl.PropagateNan.ALL)
        b = tl.maximum(b, more_high.to(tl.float32, bitcast=True))
        return a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    else:
        most = tl.maximum(low, more_low)
        return most, most


@triton.jit
def _exist(step, channels, S: tl.constexpr, STEP: tl.constexpr):
    """Return which columns step * STEP … the reference has, too: [STEP]."""
    k = step * STEP + tl.arange(0, STEP)
    p = k % S.channels
    if S.whole:
        return (k < S.taps * S.channels) & (p < channels)
    else:
        return (k < S.taps * S.channels) & (p % S.padded < S.block)


@triton.jit
def _codes(values, inverse, offset, exist, WITH_OFFSET: tl.constexpr):
    """Return codes int8 [STEP, block_m]; values that are not finite have a scale of NaN, and any code."""
    values = values.to(tl.float32)
    values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    if WITH_OFFSET:
        values = tl.where(exist[:, None], values - offset[None, :], 0.0)
    codes = round_product(values, tl.broadcast_to(inverse[None, :], values.shape))
    return tl.minimum(tl.maximum(codes, -127), 127).to(tl.int8)


@triton.jit
def _sum_of(q, count, s, z, S: tl.constexpr):
    """Return the sum of `count` elements of the weight, [block_n], from that of their stored codes q (int32)."""
    BASE: tl.constexpr = 8 if S.bits == 4 else 128
    if S.zero == "point":
        q += (BASE - z.to(tl.int32)) * count
    elif S.zero == "offset":
        q += BASE * count
    total = q.to(tl.float32) * s.to(tl.float32)
    if S.zero == "offset":
        total += z.to(tl.float32) * count
    return total


@triton.jit
def _fold(total, p, s, z, sums, S: tl.constexpr):
    """Return total + integers p [block_n, block_m] of stored codes times the weight's scale, and the term of its zero."""
    BASE: tl.constexpr = 8 if S.bits == 4 else 128
    v = p.to(tl.float32)
    if S.zero == "point":
        v -= (z.to(tl.float32) - BASE)[:, None] * sums[None, :]
    elif S.zero == "offset":
        v += BASE * sums[None, :]
    v *= s.to(tl.float32)[:, None]
    if S.zero == "offset":
        v += z.to(tl.float32)[:, None] * sums[None, :]
    return total + v


@triton.jit(do_not_specialize=["M"])
def _dynamic(
    x, ranges, weight, out, added, M, N, packed, image, window, bounds, sizes,
    S: tl.constexpr, BLOCKWISE: tl.constexpr, WITH_OFFSET: tl.constexpr,
):  # fmt: skip
    """The kernel. sizes: pixels, blocks of one, the number of all ranges, and a group's channels without padding."""
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    STEP: tl.constexpr = S.step
    PIECES: tl.constexpr = S.slab_k // S.step
    TAPS: tl.constexpr = S.taps
    n_padded, _k_padded, _group_bytes, steps = packed
    height, width, _ho, _wo, pixel, channels = image
    group = tl.program_id(2)
    pn, rn, rni, rm, b, y0, x0, reached = rows_and_patches(M, N, n_padded, image, window, S)
    xp = x + b[None, :] * (height * width * pixel) + group * channels
    pixels, blocks, count, real_channels = sizes
    ranges += group.to(tl.int64) * blocks * pixels + b * (height * width)
    wp, scale, zero = weight_at(weight, group, pn, rni, packed, S)
    low, high = _range_at(ranges, count, y0, x0, 0, image, window, S, WITH_OFFSET)
    if not BLOCKWISE:
        for tap in range(1, TAPS):
            more_low, more_high = _range_at(ranges, count, y0, x0, tap, image, window, S, WITH_OFFSET)
            low, high = _wider(low, high, more_low, more_high, WITH_OFFSET)
    of_patch, inverse, offset = _scales(low, high, WITH_OFFSET)
    total = tl.zeros([BN, BM], tl.float32)
    acc = tl.zeros([BN, BM], tl.int32)
    sums = tl.zeros([BM], tl.float32)
    codes = tl.zeros([BN], tl.int32)
    weights = tl.zeros([BN], tl.float32)
    for t in tl.range(0, steps, num_stages=S.stages):
        w = tl.load(wp + t * S.slab_stride)
        if S.bits == 4:
            w = words_of(w, S)
        for j in tl.static_range(PIECES):
            piece = t * PIECES + j
            q = w
            if S.bits == 4:
                q = ((w >> 4 * j & 15) - 8).to(tl.int8)
            of_x = of_patch
            if BLOCKWISE:
                tap = piece * STEP // S.channels
                place = ranges + (piece * STEP % S.channels // S.padded).to(tl.int64) * pixels
                low, high = _range_at(place, count, y0, x0, tap, image, window, S, WITH_OFFSET)
                of_x, inverse, offset = _scales(low, high, WITH_OFFSET)
            exist = rn
            q_sum = codes
            if WITH_OFFSET:
                exist = _exist(piece, real_channels, S, STEP)
                q_sum = tl.sum(tl.where(exist[None, :], q.to(tl.int32), 0), axis=1)
            xq = _codes(patches(xp, x, y0, x0, reached, piece, image, window, S, STEP), inverse, offset, exist, WITH_OFFSET)
            if S.whole:
                acc = tl.dot(q, xq, acc, out_dtype=tl.int32)
                if S.zero != "none":
                    sums += tl.sum(xq.to(tl.int32), axis=0).to(tl.float32)
                if WITH_OFFSET:
                    codes += q_sum
            else:
                at = piece * STEP // S.padded * n_padded + rni
                p = tl.dot(q, xq, out_dtype=tl.int32)
                s = tl.load(scale + at)
                z = s
                if S.zero != "none":
                    z = tl.load(zero + at)
                    sums = tl.sum(xq.to(tl.int32), axis=0).to(tl.float32)
                if BLOCKWISE:
                    total += _fold(tl.zeros_like(total), p, s, z, sums, S) * of_x[None, :]
                else:
                    total = _fold(total, p, s, z, sums, S)
                if WITH_OFFSET:
                    weights_here = _sum_of(q_sum, tl.sum(exist.to(tl.int32)), s, z, S)
                    if BLOCKWISE:
                        total += weights_here[:, None] * offset[None, :]
                    else:
                        weights += weights_here
    if S.whole:
        s = tl.load(scale + rni)
        z = s
        if S.zero != "none":
            z = tl.load(zero + rni)
        total = _fold(total, acc, s, z, sums, S)
        if WITH_OFFSET:
            weights = _sum_of(codes, real_channels * TAPS, s, z, S)
    if not BLOCKWISE:
        total *= of_patch[None, :]
        if WITH_OFFSET:
            total += weights[:, None] * offset[None, :]
    finish(total, out, added, rn, rm, M, N, group, bounds, S)
