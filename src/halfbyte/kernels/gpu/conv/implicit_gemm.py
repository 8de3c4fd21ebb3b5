"""Convolution on a GPU as implicit GEMM: y = x * W as a product of patches that are never written out.

    y[m, n] = sum over tap, c of  w[n, tap, c] * x[pixel(m) + tap, c]        m = (image, row, column) of y; x and y channels_last

W is the matrix of `layouts/convolution.py` in the order of `layouts/gpu_tiles.py`, one for each group. K runs over (tap, channel):
columns k of patches are gathered by pointers, 16 bytes at a time, asynchronously and several pipeline stages ahead (`tile.py`, `patches`).
A program computes a tile of Yᵀ = W · Xᵀ: so weights are the A operand, which tensor cores take from the registers that codes are decoded
in.

    float    x float16, bfloat16 or float32; weights are dequantized to x's dtype. Padding outside of the image is 0
    int8     x int8, `table` of `ops.conv.cuda`: exact sums, requantized as `qlinear.py` has it. Padding is in_zero, which is read from the
             table, so that no correction is needed
    image    x int8 of images that have a scale each (`image.py`), y floating point: exact sums, times both scales. Padding is 0

Arithmetic: with one scale per channel the matrix unit sums (q - point) * x in float32, and the sum is multiplied by the scale. Otherwise a
weight is rounded to x's dtype: the scale, then the product or the fused multiply-add. K may be split over programs (split-K): the last to
arrive adds the partial sums in order, so that results do not vary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import decode
from halfbyte.kernels.gpu.arithmetic import added as add_codes
from halfbyte.kernels.gpu.arithmetic import dot, requantization, requantized, store_partial, sum_partials
from halfbyte.kernels.gpu.conv.tile import (
    Config,
    Mode,
    compiled_for,
    finish,
    output_at,
    packed_shape,
    padded_channels,
    patches,
    pixel_stride,
    rows_and_patches,
    shapes,
    weight_at,
    words_of,
)
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import locks, workspace
from halfbyte.kernels.problem import LONGEST_INTEGER_SUM, ConvProblem, Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import Gpu

_MOST_ELEMENTS = 1 << 31  # of an image, whose offsets are int32
_MOST_OUTPUTS = (1 << 31) - 128  # pixels of y, whose numbers are int32, those of the last tile, too, which may have 128
_MOST_GROUPS = (1 << 16) - 1  # the third dimension of a grid


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    sizes = problem.sizes
    if not problem.m or not sizes.out or not sizes.k:
        return "there is nothing to multiply"
    pixel = problem.overlap or convolution.gpu_image_channels(sizes)
    if problem.image[0] * problem.image[1] * pixel >= _MOST_ELEMENTS:
        return f"an image of {problem.image[0]} x {problem.image[1]} x {pixel} has 2^31 elements or more"
    if problem.m > _MOST_OUTPUTS:
        return f"{problem.m} pixels of the output are more than the {_MOST_OUTPUTS} that are counted in int32"
    if sizes.groups > _MOST_GROUPS:
        return f"{sizes.groups} groups are more than the {_MOST_GROUPS} of a grid's third dimension"
    if problem.dtype == torch.int8 and (sizes.format.zero != "none" or isinstance(sizes.format.block, int)):
        return f"integers take symmetric weights with one scale per channel or tensor, not {sizes.format}"
    if problem.dtype == torch.int8 and sizes.k > LONGEST_INTEGER_SUM:
        return f"sums of {sizes.k} products may overflow an int32"
    return None


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return the config to launch with: a tuple of one, as tuning may try several. Its numbers were measured on an H100."""
    bits, integer, float32 = problem.sizes.format.bits, problem.dtype == torch.int8, problem.dtype == torch.float32
    step = _k_step(problem)
    block_n, block_m = _block(problem, gpu)
    if -(-problem.n // 64) * -(-problem.m // 64) * problem.sizes.groups <= gpu.sms:  # fewer tiles of 64 x 64 than multiprocessors
        block_n, block_m = 64, 32
        thin_tiles = -(-problem.n // 64) * -(-problem.m // 16) * problem.sizes.groups
        # Tiles of 16 where they take two waves at most: then no programs share K.
        if bits == 8 and not float32 and not _has_few_channels(problem) and gpu.sms < 2 * thin_tiles <= 2 * gpu.sms:
            per_channel = convolution.gpu_geometry(problem.sizes).block_rows == 1
            block_m, step = 16, 128 if per_channel and padded_channels(problem.sizes) % 128 == 0 else step
    tiles = -(-problem.n // block_n) * -(-problem.m // block_m) * problem.sizes.groups
    split = _split(problem, gpu, tiles, step)
    ptx = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    stages = 1 if gpu.backend == "hip" else 2 if float32 else 4 if gpu.shared > 120 << 10 else 3
    warps = 8 if block_n * block_m >= 128 * 128 else 4
    # To start early took longer with floats, and with integers in more blocks (H100).
    early = integer and 2 * tiles * split <= gpu.sms and launcher.starts_early(gpu)
    return (Config(block_n, block_m, step, stages, warps, split, ptx, gpu.backend == "cuda", early),)


def _has_few_channels(problem: ConvProblem) -> bool:
    """Return whether patches are gathered in pieces of less than 16 bytes, which takes registers."""
    return padded_channels(problem.sizes) < 16


def _k_step(problem: ConvProblem) -> int:
    """Return the columns of K that a step of the loop multiplies."""
    geo, bits = convolution.gpu_geometry(problem.sizes), problem.sizes.format.bits
    channels, largest = padded_channels(problem.sizes), 32 if problem.dtype == torch.float32 else 128 if problem.dtype == torch.int8 else 64
    if bits == 4:
        return 128
    if _has_few_channels(problem):
        return 32
    step = largest if geo.block_rows == 1 else min(largest, max(32, geo.padded))
    while step > 32 and channels % step and (channels >= 32 or problem.sizes.taps == 1):  # so that a step is inside of one tap
        step //= 2
    return step


def _block(problem: ConvProblem, gpu: Gpu) -> tuple[int, int]:
    """Return the outputs and pixels of a tile (block_n, block_m) for problems with enough tiles to fill the GPU."""
    bits, float32, few_channels = problem.sizes.format.bits, problem.dtype == torch.float32, _has_few_channels(problem)
    if float32 or (few_channels and bits == 4):
        return 64, 32
    block_n = 64 if problem.n <= 64 else 128
    block_m = 128 if block_n * problem.m > 64 * 128 * gpu.sms and not few_channels else 64
    short = convolution.gpu_geometry(problem.sizes).blocks_a_record > 4  # whose scales take registers
    if bits == 4 and problem.dtype != torch.int8 and (gpu.capability < (9, 0) or short):
        block_n = 64
    return block_n, block_m


def _split(problem: ConvProblem, gpu: Gpu, tiles: int, step: int) -> int:
    """Return the number of programs that share the K of a tile. Split-K takes time, which pays off sooner where 4-bit weights are
    dequantized."""
    steps = convolution.gpu_geometry(problem.sizes).k_padded // step
    dequantizes = problem.sizes.format.bits == 4 and problem.dtype != torch.int8
    least_steps, most_programs = (6, 2 * gpu.sms) if dequantizes else (16, gpu.sms)
    split = 1
    while 2 * tiles * split <= most_programs and steps >= least_steps * split and split < 16:
        split *= 2
    return split


def _mode(geo: gpu_tiles.Geometry, dtype: torch.dtype) -> Mode:
    """Return the arithmetic of floating-point x, see `Mode`."""
    if geo.block_rows == 1 and geo.format.zero != "offset":
        return "sums"
    return "exact" if dtype == torch.float32 or (dtype == torch.float16 and geo.format.scale != dtype) else "weights"


def workspace_bytes(problem: ConvProblem, config: Config) -> int:
    """Return the bytes for partial sums of programs that share K."""
    return 4 * config.split * _tiles(problem, config) * problem.sizes.groups * config.block_n * config.block_m if config.split > 1 else 0


def _tiles(problem: ConvProblem, config: Config) -> int:
    """Return the tiles of one group."""
    return -(-problem.n // config.block_n) * -(-problem.m // config.block_m)


def launch(
    problem: ConvProblem,
    config: Config,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    images: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M, Co],
    the epilogue's table, of codes, [groups, 4 + taps, at least Co/groups].

    images: of x int8 with floating-point out, the images' scales, float32 [B], and `workspace_bytes(problem, config)` of memory.
    """
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    n, integer = problem.n, x.dtype == torch.int8
    table, memory = (epilogue.table, None) if images is None else images
    tiles = _tiles(problem, config)
    mode = _mode(geo, problem.dtype)
    if integer:
        mode = "image" if epilogue.table is None else "int8"
    static = compiled_for(
        problem,
        config,
        x,
        mode,
        clamp=epilogue.clamps,
        outside_from_table=epilogue.outside != 0,
        codes_first=epilogue.codes_first,
    )
    scratch: tuple[Tensor, Tensor] | None = None
    if config.split > 1:
        memory = workspace(out.device, workspace_bytes(problem, config)) if memory is None else memory
        sums = memory.view(torch.int32 if integer else torch.float32)
        scratch = sums, locks(out.device, tiles * sizes.groups)
    image, window = shapes(problem, x)
    table_strides = (table.stride(1), table.stride(0)) if table is not None and mode == "int8" else (0, 0)  # of rows, and of groups
    launcher.run(
        _conv,
        (tiles, config.split, sizes.groups),
        x,
        tuple(gpu_tiles.views(weight[: geo.nbytes], geo)),
        table,
        out,
        (epilogue.bias, epilogue.residual),
        scratch,
        problem.m,
        n,
        packed_shape(problem, static),
        image,
        window,
        epilogue.numbers,
        table_strides,
        static,
        num_warps=config.warps,
        early=config.pdl,
    )


# The kernel. `S` is a Static, all that it is compiled for.


@triton.jit
def _load_params(values, t, rn, n_padded, S: tl.constexpr):
    """Load scales (or zeros) of step t: [block_n, groups]."""
    first = 0 if S.per_channel else t * S.slab_k // S.padded
    at = (first + tl.arange(0, S.groups))[None, :]
    return tl.load(values + at * n_padded + rn[:, None])


@triton.jit
def _weights(codes, scale, zero, DTYPE: tl.constexpr, S: tl.constexpr):
    """Return loaded codes as the A operand [block_n, slab_k], in "sums" without its scale."""
    if S.bits == 4:
        values = decode.nibbles(words_of(codes, S)[:, None, :], DTYPE, S.ptx)
    else:
        values = decode.int8_values(codes, DTYPE, S.ptx)
    if S.zero == "point":
        values = decode.minus(values, _spread(zero, S), S.bits, S.ptx)
    elif S.zero == "offset":
        values = decode.minus(values, _spread(tl.full((S.block_n, S.groups), 0, tl.int16), S), S.bits, S.ptx)
    elif S.bits == 4 or DTYPE == tl.float16:
        values = decode.minus(values, None, S.bits, S.ptx)
    if S.mode == "weights":
        scale = _spread(scale, S).to(DTYPE)
        offset = tl.full(scale.shape, -0.0, tl.float32).to(DTYPE)
        if S.zero == "offset":
            offset = _spread(zero, S).to(DTYPE)
        values = decode.fma(values, scale, offset, S.ptx)
    return _joined(values, S)


@triton.jit
def _weights_exact(codes, scale, zero, S: tl.constexpr):
    """Return loaded codes as weights in float32."""
    if S.bits == 4:
        values = (words_of(codes, S).to(tl.int32)[:, None, :] >> (tl.arange(0, 4) * 4)[None, :, None]) & 15
        least = 8
    else:
        values = codes.to(tl.int32) + 128
        least = 128
    if S.zero == "none":
        values -= least
    elif S.zero == "point":
        values -= _spread(zero, S).to(tl.int32)
    values = values.to(tl.float32)
    if S.mode == "exact":
        values *= _spread(scale, S).to(tl.float32)
        if S.zero == "offset":
            values += _spread(zero, S).to(tl.float32)
    return _joined(values, S)


@triton.jit
def _joined(values, S: tl.constexpr):
    if S.bits == 4:
        return tl.reshape(values, (S.block_n, 128))
    else:
        return values


@triton.jit
def _spread(values, S: tl.constexpr):
    """Broadcast [block_n, groups] to weights: 8 bits [block_n, 1]; 4 bits [block_n, planes or 1, 1]. Blocks of 16: to each weight."""
    if S.groups > 1 and S.padded == 16:
        each = tl.broadcast_to(values[:, :, None], (S.block_n, S.groups, 16))
        return tl.reshape(each, (S.block_n, S.slab_k) if S.bits == 8 else (S.block_n, 4, 32))
    elif S.bits == 8:
        return values
    elif S.groups == 1:
        return values[:, :, None]
    else:
        EACH: tl.constexpr = S.slab_k // 32 // S.groups
        wide = tl.broadcast_to(values[:, :, None], (S.block_n, S.groups, EACH))
        return tl.reshape(wide, (S.block_n, S.slab_k // 32))[:, :, None]


@triton.jit(do_not_specialize=["M"])
def _conv(x, weight, table, out, added, scratch, M, N, packed, image, window, bounds, table_strides, S: tl.constexpr):
    """Compute a tile [BN outputs, BM pixels] of a group, or a part of its K: program ids are (tile, part of K, group).

    added: bias and residual; scratch: partial sums and locks of split-K; packed, image, window: a PackedShape, ImageShape and WindowShape;
    bounds: `Epilogue.numbers`; table_strides: of a row and of a group of `table`.
    """
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    tl.static_assert(S.integer or S.scaled or S.mode == "sums", "a mode that has no code")
    if S.pdl:
        gdc_launch_dependents()
    n_padded, steps = packed.n_padded, packed.k_slabs
    row_stride, group_stride = table_strides
    group = tl.program_id(2)
    pn, rn, rn_stored, rm, b, y0, x0, tap_mask = rows_and_patches(M, N, n_padded, image, window, S)
    xp = x + b[None, :] * (image.height * image.width * pixel_stride(image, S))
    if S.pixel_stride == 0:
        xp += group * image.group_channels
    outside = x
    if S.outside_from_table:
        outside = (table + group * group_stride + 3 * row_stride).to(tl.pointer_type(tl.int8))  # in_zero, in each element of row 3
    first, end = 0, steps
    if S.split > 1:
        share = tl.cdiv(steps, tl.num_programs(1))
        first = tl.program_id(1) * share
        end = tl.minimum(first + share, steps)
    wp, scale, zero = weight_at(weight, group, pn, rn_stored, packed, S)
    # Loads of the epilogue are issued before the products.
    requant = rn
    if S.mode == "int8":
        requant = requantization(table + group * group_stride, tl.minimum(rn, N - 1), row_stride)
    elif S.sums_scaled:
        requant = tl.load(scale + rn_stored)
    if S.pdl:
        gdc_wait()
    if S.integer:
        acc = tl.zeros([BN, BM], tl.int32)
        for t in tl.range(first, end, num_stages=S.stages):
            w = tl.load(wp + t * S.slab_stride)
            if S.bits == 4:
                words = words_of(w, S)
                for j in tl.static_range(4):
                    q = ((words >> 4 * j & 15) - 8).to(tl.int8)
                    acc = tl.dot(q, patches(xp, outside, y0, x0, tap_mask, t * 4 + j, image, window, S, 32), acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(w, patches(xp, outside, y0, x0, tap_mask, t, image, window, S, S.step), acc, out_dtype=tl.int32)
    else:
        acc = tl.zeros([BN, BM], tl.float32)
        s = rn
        z = rn
        if S.scaled:
            s = _load_params(scale, first, rn_stored, n_padded, S)
        if S.zero != "none":
            z = _load_params(zero, first, rn_stored, n_padded, S)
        for t in tl.range(first, end, num_stages=S.stages):
            # The next step's scales are fetched while this one is multiplied: they are too short for Triton to copy ahead.
            s_next = s
            z_next = z
            if not S.per_channel:
                s_next = _load_params(scale, tl.minimum(t + 1, steps - 1), rn_stored, n_padded, S)
                if S.zero != "none":
                    z_next = _load_params(zero, tl.minimum(t + 1, steps - 1), rn_stored, n_padded, S)
            w = tl.load(wp + t * S.slab_stride)
            xs = patches(xp, outside, y0, x0, tap_mask, t, image, window, S, S.step)
            if x.dtype.element_ty == tl.float32 or S.mode == "exact":
                acc = dot(_weights_exact(w, s, z, S).to(xs.dtype), xs, acc)
            else:
                acc = dot(_weights(w, s, z, xs.dtype, S), xs, acc)
            s = s_next
            z = z_next
    if S.split > 1:
        tile = group * tl.num_programs(0) + tl.program_id(0)
        place = scratch[0] + tile.to(tl.int64) * (BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        slot_stride = (tl.num_programs(2) * tl.num_programs(0)).to(tl.int64) * (BN * BM)
        if store_partial(acc, place, slot_stride, scratch[1] + tile) != tl.num_programs(1) - 1:
            return
        acc = sum_partials(acc, place, slot_stride)
        tl.store(scratch[1] + tile, 0)
    if S.mode == "int8":
        y = requantized(acc, requant, bounds[0], bounds[1], 8)
        at, mask = output_at(rn, rm, M, N, group)
        if added[1] is not None:
            y = add_codes(y, tl.load(added[1] + at, mask=mask, other=0), bounds[2:], S.codes_first)
        tl.store(out + at, y, mask=mask)
    else:
        if S.mode == "sums":
            acc *= requant.to(tl.float32)[:, None]
        elif S.mode == "image":
            acc = acc.to(tl.float32) * (requant.to(tl.float32)[:, None] * tl.load(table + b)[None, :])
        finish(acc, out, added, rn, rm, M, N, group, bounds, S)
