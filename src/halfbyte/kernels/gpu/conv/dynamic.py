"""y = x * W, a convolution of activations that are quantized on the fly (`compute="int8"`), as `conv_reference.py` defines it.

    y[m, n] = sum over blocks of  sx * (sw * sum(qx * qw) + o * sum(qx)) + ox * sum(w)

sx and ox are scale and offset of x (ox = 0 but under "block_offset" and "row_offset"), sw the scale of the weight, o what its zero adds.

    block scales   ("block", "block_offset", if the weight has several blocks) x has a scale for each quantization block of the weight,
                   all inside one tap, and each pixel
    patch scales   (otherwise) x has a scale for each patch, from the range of all its pixels

Two launches: `_ranges` reads x once and writes the range of each pixel's channels (the greatest magnitude; with offsets the minimum and the
maximum), for each block or for all channels. `_dynamic` gathers patches as `implicit_gemm.py` does, quantizes them in registers and
multiplies integers. With offsets it also sums the weight's codes, again in each tile, which takes less time than another launch. As in the
reference, the zeros around an image and the padding of a tap's last block are quantized as values of x; further padding, of the layout, is
masked.

Arithmetic: scales and codes are those of the reference, bit by bit; integer sums are exact, and become float32 once per block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import round_product, scale_of
from halfbyte.kernels.gpu.conv.implicit_gemm import supports as supports_float
from halfbyte.kernels.gpu.conv.tile import (
    Config,
    compiled_for,
    finish,
    packed_shape,
    padded_channels,
    patches,
    rows_and_patches,
    shapes,
    weight_at,
    words_of,
)
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.problem import ConvProblem, Epilogue, scaling_of
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK
from halfbyte.machine import Gpu

_PIXELS = 16  # of which a program of `_ranges` reads a block
_MOST_PIXELS = (1 << 31) - _PIXELS  # of all images, whose numbers are int32, the last program's masked ones, too
_MOST_CHANNELS = 128  # that it reads at a time
_MOST_BLOCKS = (1 << 16) - 1  # of a pixel: the second dimension of its grid
_INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32; magnitudes are compared as these integers, NaN being the largest
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


class RangeShape(NamedTuple):
    """Sizes of the ranges, int32 [1, or with offsets 2; groups; blocks of a pixel; pixels of all images] of float32's bits.

    Attributes:
        pixels, blocks: As above.
        count: groups * blocks * pixels: the distance from a minimum to its maximum.
        channels: Those of a group, without padding.
    """

    pixels: Value
    blocks: Value
    count: Value
    channels: Value


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if reason := supports_float(problem, gpu):
        return reason
    geo = convolution.gpu_geometry(problem.sizes)
    if min(geo.block, geo.k) > LONGEST_BLOCK:
        return f"sums of {geo.block} products may overflow an int32"
    if (pixels := problem.batch * problem.image[0] * problem.image[1]) > _MOST_PIXELS:
        return f"{pixels} pixels of the images are more than the {_MOST_PIXELS} that are counted in int32"
    if (blocks := problem.sizes.padded // geo.block) > _MOST_BLOCKS and _has_block_scales(problem):
        return f"{blocks} blocks of a pixel's channels are more than the {_MOST_BLOCKS} of a grid's second dimension"
    return None


def _has_block_scales(problem: ConvProblem) -> bool:
    """Return whether x has a scale for each block of the weight, not for each patch."""
    return not scaling_of(problem.activation).whole_row and convolution.gpu_geometry(problem.sizes).block_rows > 1


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return one config, the best one of those that were measured."""
    geo = convolution.gpu_geometry(problem.sizes)
    step = 128 if geo.format.bits == 4 else 64 if geo.block_rows == 1 else min(64, max(32, geo.padded))
    if padded_channels(problem.sizes) < 16 and geo.format.bits == 8:
        step = 32
    ptx = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    block_m, warps = 32 if geo.format.bits == 4 else 64, 4
    if scaling_of(problem.activation).with_offset and geo.block_rows > 1:  # offsets of blocks and sums of weights take registers
        block_m //= 2
        if geo.format.bits == 8 and gpu.backend == "cuda":
            warps = 8
    elif geo.blocks_a_record > 4:  # two products for a step
        block_m //= 2
    return (Config(64, block_m, step, 1 if gpu.backend == "hip" else 3, warps, 1, ptx),)


def launch(problem: ConvProblem, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M,
    Co]."""
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    with_offset, block_scales = scaling_of(problem.activation).with_offset, _has_block_scales(problem)
    pixels = problem.batch * problem.image[0] * problem.image[1]
    block = geo.block if block_scales else sizes.padded
    blocks = sizes.padded // block
    range_shape = RangeShape(pixels, blocks, sizes.groups * blocks * pixels, sizes.channels)
    ranges = workspace(out.device, (2 if with_offset else 1) * 4 * range_shape.count).view(torch.int32)
    launcher.run(
        _ranges,
        (-(-pixels // _PIXELS), blocks, sizes.groups),
        x,
        ranges,
        range_shape.count,
        pixels,
        x.shape[3],
        sizes.channels,
        block,
        PIXELS=_PIXELS,
        CHANNELS=min(_MOST_CHANNELS, triton.next_power_of_2(block)),
        WITH_OFFSET=with_offset,
        num_warps=4,
    )
    static = compiled_for(problem, config, x, "dynamic", clamp=epilogue.clamps)
    views = gpu_tiles.views(weight[: geo.nbytes], geo)
    image, window = shapes(problem, x)
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
        packed_shape(problem, static),
        image,
        window,
        (epilogue.low, epilogue.high),
        range_shape,
        static,
        BLOCK_SCALES=block_scales,
        WITH_OFFSET=with_offset,
        num_warps=config.warps,
    )


@triton.jit(do_not_specialize=["count", "pixels"])
def _ranges(
    x, ranges, count, pixels, pixel_stride, channels, block, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WITH_OFFSET: tl.constexpr
):  # fmt: skip
    """Write the range of PIXELS pixels' channels in block program_id(1) of group program_id(2), as a RangeShape says: the greatest
    magnitude, or with offsets the minimum and, `count` further on, the maximum. Padding of the last block counts as 0. If an element is
    infinite or NaN, so is the magnitude, and the minimum is NaN."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    first_channel = tl.program_id(1) * block
    xp = x + pixel.to(tl.int64)[:, None] * pixel_stride + tl.program_id(2) * channels
    magnitude = tl.zeros([PIXELS], tl.int32)
    low = tl.full([PIXELS], float("inf"), tl.float32)
    high = tl.full([PIXELS], float("-inf"), tl.float32)
    for start in range(0, block, CHANNELS):
        i = start + tl.arange(0, CHANNELS)
        c = first_channel + i
        inside = (pixel < pixels)[:, None] & ((i < block) & (c < channels))[None, :]
        values = tl.load(xp + c[None, :], mask=inside, other=0.0).to(tl.float32)
        magnitude = tl.maximum(magnitude, tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS, axis=1))
        if WITH_OFFSET:
            low = tl.minimum(low, tl.min(tl.where((i < block)[None, :], values, float("inf")), axis=1))
            high = tl.maximum(high, tl.max(tl.where((i < block)[None, :], values, float("-inf")), axis=1))
    at = ranges + (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * pixels + pixel
    if WITH_OFFSET:
        low = tl.where(magnitude < _INFINITY_BITS, low, float("nan"))
        tl.store(at, low.to(tl.int32, bitcast=True), mask=pixel < pixels)
        tl.store(at + count, high.to(tl.int32, bitcast=True), mask=pixel < pixels)
    else:
        tl.store(at, magnitude, mask=pixel < pixels)


@triton.jit
def _range_at(ranges, count, y0, x0, tap, image, window, S: tl.constexpr, WITH_OFFSET: tl.constexpr):
    """Return the range (minimum, maximum) of the pixel under `tap` of each patch, as bits; 0 outside of the image. Without offsets both are
    the greatest magnitude."""
    iy = y0 + tap // S.kernel_w * window.dilation_y
    ix = x0 + tap % S.kernel_w * window.dilation_x
    inside = (iy >= 0) & (iy < image.height) & (ix >= 0) & (ix < image.width) & (tap < S.taps)
    at = ranges + (iy * image.width + ix)
    low = tl.load(at, mask=inside, other=0)
    high = low
    if WITH_OFFSET:
        high = tl.load(at + count, mask=inside, other=0)
    return low, high


@triton.jit
def _scales(low, high, WITH_OFFSET: tl.constexpr):
    """Return scale, its inverse, and offset with which values of such a range are quantized; a scale of NaN for one that is not finite."""
    a = low.to(tl.float32, bitcast=True)
    if WITH_OFFSET:
        b = high.to(tl.float32, bitcast=True)
        return scale_of((b - a) * 0.5, (a + b) * 0.5, tl.abs(a) < float("inf"))
    else:
        return scale_of(a, tl.zeros_like(a), low < _INFINITY_BITS)


@triton.jit
def _union(low, high, more_low, more_high, WITH_OFFSET: tl.constexpr):
    """Return the union of two ranges of `_range_at`."""
    if WITH_OFFSET:
        a, b = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        a = tl.minimum(a, more_low.to(tl.float32, bitcast=True), propagate_nan=tl.PropagateNan.ALL)
        b = tl.maximum(b, more_high.to(tl.float32, bitcast=True))
        return a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    else:
        magnitude = tl.maximum(low, more_low)
        return magnitude, magnitude


@triton.jit
def _in_reference(step, channels, S: tl.constexpr, STEP: tl.constexpr):
    """Return the mask [STEP] of columns step * STEP … that the reference has, too: not those of the layout's padding."""
    k = step * STEP + tl.arange(0, STEP)
    p = k % S.channels
    if S.per_channel:
        return (k < S.taps * S.channels) & (p < channels)
    else:
        return (k < S.taps * S.channels) & (p % S.padded < S.block)


@triton.jit
def _in_block(i, S: tl.constexpr):
    """Return the mask of a step's columns that are in its i-th block."""
    return tl.arange(0, S.step) // S.padded == i


@triton.jit
def _codes(values, inverse, offset, in_reference, WITH_OFFSET: tl.constexpr):
    """Return codes int8 [STEP, block_m]; 0 with offsets where not `in_reference`. The code of a value that is not finite does not matter:
    its scale is NaN."""
    values = values.to(tl.float32)
    values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    if WITH_OFFSET:
        values = tl.where(in_reference[:, None], values - offset[None, :], 0.0)
    codes = round_product(values, tl.broadcast_to(inverse[None, :], values.shape))
    return tl.minimum(tl.maximum(codes, -127), 127).to(tl.int8)


@triton.jit
def _weight_sum(q_sum, count, scale, zero, S: tl.constexpr):
    """Return the sum of `count` elements of the dequantized weight, [block_n], from that of their stored codes (int32); see `_fold`."""
    BASE: tl.constexpr = 8 if S.bits == 4 else 128
    if S.zero == "point":
        q_sum += (BASE - zero.to(tl.int32)) * count
    elif S.zero == "offset":
        q_sum += BASE * count
    total = q_sum.to(tl.float32) * scale.to(tl.float32)
    if S.zero == "offset":
        total += zero.to(tl.float32) * count
    return total


@triton.jit
def _fold(total, products, scale, zero, x_sums, S: tl.constexpr):
    """Return total + the products of the dequantized weight and codes of x, in float32.

    With stored codes q and u = q + BASE, a weight is q * scale, (u - zero) * scale with a point, or u * scale + zero with an offset.
    `products` [block_n, block_m] are integer sums of q times codes of x, `x_sums` [block_m] sums of codes of x.
    """
    BASE: tl.constexpr = 8 if S.bits == 4 else 128
    v = products.to(tl.float32)
    if S.zero == "point":
        v -= (zero.to(tl.float32) - BASE)[:, None] * x_sums[None, :]
    elif S.zero == "offset":
        v += BASE * x_sums[None, :]
    v *= scale.to(tl.float32)[:, None]
    if S.zero == "offset":
        v += zero.to(tl.float32)[:, None] * x_sums[None, :]
    return total + v


@triton.jit(do_not_specialize=["M"])
def _dynamic(
    x, ranges, weight, out, added, M, N, packed, image, window, bounds, range_shape,
    S: tl.constexpr, BLOCK_SCALES: tl.constexpr, WITH_OFFSET: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a group: program ids are (tile, 0, group); arguments as in `implicit_gemm._conv`, and the ranges of x."""
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    STEP: tl.constexpr = S.step
    PIECES: tl.constexpr = S.slab_k // S.step
    BLOCKS: tl.constexpr = S.step_blocks
    TAPS: tl.constexpr = S.taps
    group = tl.program_id(2)
    pn, rn, rn_stored, rm, b, y0, x0, tap_mask = rows_and_patches(M, N, packed.n_padded, image, window, S)
    xp = x + b[None, :] * (image.height * image.width * image.pixel_stride) + group * image.group_channels
    pixels, blocks, count, channels = range_shape
    ranges += group.to(tl.int64) * blocks * pixels + b * (image.height * image.width)
    wp, scales, zeros = weight_at(weight, group, pn, rn_stored, packed, S)
    low, high = _range_at(ranges, count, y0, x0, 0, image, window, S, WITH_OFFSET)
    if not BLOCK_SCALES:
        for tap in range(1, TAPS):
            more_low, more_high = _range_at(ranges, count, y0, x0, tap, image, window, S, WITH_OFFSET)
            low, high = _union(low, high, more_low, more_high, WITH_OFFSET)
    patch_scale, inverse, offset = _scales(low, high, WITH_OFFSET)
    total = tl.zeros([BN, BM], tl.float32)
    acc = tl.zeros([BN, BM], tl.int32)
    x_sums = tl.zeros([BM], tl.float32)
    q_sums = tl.zeros([BN], tl.int32)
    weight_sums = tl.zeros([BN], tl.float32)
    for t in tl.range(0, packed.k_slabs, num_stages=S.stages):
        w = tl.load(wp + t * S.slab_stride)
        if S.bits == 4:
            w = words_of(w, S)
        for j in tl.static_range(PIECES):
            piece = t * PIECES + j
            q = w
            if S.bits == 4:
                q = ((w >> 4 * j & 15) - 8).to(tl.int8)
            for i in tl.static_range(BLOCKS):  # of which integer products have no fewer columns than a step: the others' codes of x are 0
                start = piece * STEP + i * S.padded
                x_scale = patch_scale
                if BLOCK_SCALES:
                    tap = start // S.channels
                    block_ranges = ranges + (start % S.channels // S.padded).to(tl.int64) * pixels
                    low, high = _range_at(block_ranges, count, y0, x0, tap, image, window, S, WITH_OFFSET)
                    x_scale, inverse, offset = _scales(low, high, WITH_OFFSET)
                in_reference = rn  # a placeholder, as q_sum
                q_sum = q_sums
                if WITH_OFFSET:
                    in_reference = _in_reference(piece, channels, S, STEP)
                    if BLOCKS > 1:
                        in_reference = in_reference & _in_block(i, S)
                    q_sum = tl.sum(tl.where(in_reference[None, :], q.to(tl.int32), 0), axis=1)
                if i == 0:
                    values = patches(xp, x, y0, x0, tap_mask, piece, image, window, S, STEP)
                qx = _codes(values, inverse, offset, in_reference, WITH_OFFSET)
                if BLOCKS > 1:
                    qx = tl.where(_in_block(i, S)[:, None], qx, 0)
                if S.per_channel:
                    acc = tl.dot(q, qx, acc, out_dtype=tl.int32)
                    if S.zero != "none":
                        x_sums += tl.sum(qx.to(tl.int32), axis=0).to(tl.float32)
                    if WITH_OFFSET:
                        q_sums += q_sum
                else:
                    at = start // S.padded * packed.n_padded + rn_stored
                    products = tl.dot(q, qx, out_dtype=tl.int32)
                    scale = tl.load(scales + at)
                    zero = scale
                    if S.zero != "none":
                        zero = tl.load(zeros + at)
                        x_sums = tl.sum(qx.to(tl.int32), axis=0).to(tl.float32)
                    if BLOCK_SCALES:
                        total += _fold(tl.zeros_like(total), products, scale, zero, x_sums, S) * x_scale[None, :]
                    else:
                        total = _fold(total, products, scale, zero, x_sums, S)
                    if WITH_OFFSET:
                        weight_sum = _weight_sum(q_sum, tl.sum(in_reference.to(tl.int32)), scale, zero, S)
                        if BLOCK_SCALES:
                            total += weight_sum[:, None] * offset[None, :]
                        else:
                            weight_sums += weight_sum
    if S.per_channel:
        scale = tl.load(scales + rn_stored)
        zero = scale
        if S.zero != "none":
            zero = tl.load(zeros + rn_stored)
        total = _fold(total, acc, scale, zero, x_sums, S)
        if WITH_OFFSET:
            weight_sums = _weight_sum(q_sums, channels * TAPS, scale, zero, S)
    if not BLOCK_SCALES:
        total *= patch_scale[None, :]
        if WITH_OFFSET:
            total += weight_sums[:, None] * offset[None, :]
    finish(total, out, added, rn, rm, M, N, group, bounds, S)
