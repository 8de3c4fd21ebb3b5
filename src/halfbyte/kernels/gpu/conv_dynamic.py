"""y = x * W, a convolution of activations that are quantized on the fly (`compute="int8"`), as `conv_reference.py` has it.

    y[m, n] = sum over blocks of  sx * (sw * sum(qx * qw) + o * sum(qx))        o: what a weight's zero adds

A first kernel reads x once and finds the greatest magnitude of each pixel's channels, block by block of the weight where
`activation` is "block" and blocks lie inside a tap; elsewhere a patch has one scale, and the greatest of its pixels' magnitudes is its
own. The second gathers patches as `conv.py`, quantizes them in registers, and multiplies integers.

Arithmetic: scales and codes are those of the reference, bit by bit; integer sums are exact, and become float32 once a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.activations import round_product
from halfbyte.kernels.gpu.conv import Config, Convolution, Static, finish, padded_channels, patches, reach, words_of
from halfbyte.kernels.gpu.conv import supports as supports_float
from halfbyte.kernels.problem import Activation, Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK
from halfbyte.machine import Gpu

_PIXELS = 16


def supports(problem: Convolution, activation: Activation, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if reason := supports_float(problem, gpu):
        return reason
    geo = convolution.gpu_geometry(problem.sizes)
    if activation not in ("block", "row"):
        return f"activations are quantized without an offset, not by {activation!r}"
    if min(geo.block, geo.k) > LONGEST_BLOCK:
        return f"sums of {geo.block} products may overflow an int32"
    return None


def configs(problem: Convolution, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first."""
    geo = convolution.gpu_geometry(problem.sizes)
    step = 128 if geo.format.bits == 4 else 64 if geo.block_rows == 1 else min(64, geo.padded)
    if padded_channels(problem.sizes) < 16 and geo.format.bits == 8:
        step = 32
    ptx = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    return (Config(64, 32 if geo.format.bits == 4 else 64, step, 1 if gpu.backend == "hip" else 3, 4, 1, False, ptx),)


def launch(
    problem: Convolution, activation: Activation, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue
) -> None:
    """x [B, H, W, C] in memory, weight of layout "gpu_tiles", out [M, Co]; bias [Co] and residual [M, Co] in the epilogue."""
    sizes, window, geo = problem.sizes, problem.window, convolution.gpu_geometry(problem.sizes)
    whole = geo.block_rows == 1
    blockwise = activation == "block" and not whole
    channels, of_x, pixels = padded_channels(sizes), x.shape[3] // sizes.groups, problem.batch * problem.image[0] * problem.image[1]
    block = geo.block if blockwise else of_x
    blocks = -(-of_x // block)
    ranges = launcher.workspace(out.device, 4 * sizes.groups * blocks * pixels).view(torch.int32)
    launcher.run(
        _ranges,
        (-(-pixels // _PIXELS), blocks, sizes.groups),
        x,
        ranges,
        pixels,
        x.shape[3],
        of_x,
        block,
        PIXELS=_PIXELS,
        CHANNELS=min(128, triton.next_power_of_2(block)),
        num_warps=4,
    )
    static = Static(
        config=config,
        bits=geo.format.bits,
        zero=geo.format.zero,
        mode="dynamic",
        taps=sizes.taps,
        kernel_w=sizes.kernel[1],
        whole=whole,
        channels=channels,
        block=channels if whole else geo.block,
        padded=channels if whole else geo.padded,
        real=of_x != channels or (not whole and geo.block != geo.padded),
        bounded=True,
        fill=False,
        clamp=epilogue.clamps,
    )
    views = gpu_tiles.views(weight[: geo.nbytes], geo)
    top, _, left, _ = window.padding
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
        (geo.n_padded, geo.k_padded, geo.nbytes, -(-sizes.taps * channels // static.record), geo.padded),
        (*problem.image, *problem.out, x.shape[3], of_x),
        (*window.stride, top, left, *window.dilation),
        (epilogue.low, epilogue.high),
        pixels,
        blocks,
        static,
        BLOCKWISE=blockwise,
        num_warps=config.warps,
    )


@triton.jit(do_not_specialize=["pixels"])
def _ranges(x, ranges, pixels, pixel, channels, block, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """The greatest magnitude, as bits, of each pixel's channels in block program_id(1) of group program_id(2)."""
    rp = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    first = tl.program_id(1) * block
    xp = x + rp.to(tl.int64)[:, None] * pixel + tl.program_id(2) * channels
    most = tl.zeros([PIXELS], tl.int32)
    for start in range(0, block, CHANNELS):
        i = start + tl.arange(0, CHANNELS)
        c = first + i
        real = (rp < pixels)[:, None] & ((i < block) & (c < channels))[None, :]
        values = tl.load(xp + c[None, :], mask=real, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    at = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * pixels + rp
    tl.store(ranges + at, most, mask=rp < pixels)


@triton.jit
def _scales(most):
    """Scale and inverse of what has the greatest magnitude `most`, as `reference.quantize_activation` has them."""
    reach = most.to(tl.float32, bitcast=True)
    scale = reach * 0.007874015718698502  # the float32 nearest to 1/127
    inverse = tl.div_rn(tl.full(reach.shape, 127.0, tl.float32), tl.where(reach > 0, reach, float("inf")))
    good = (most < 0x7F800000) & (scale < float("inf"))
    return tl.where(good, scale, float("nan")), tl.where(good & (inverse < float("inf")), inverse, 0.0)


@triton.jit
def _range_at(ranges, y0, x0, tap, image, window, S: tl.constexpr):
    """What the pixel under `tap` of each patch has; 0 outside of the image."""
    iy = y0 + tap // S.kernel_w * window[4]
    ix = x0 + tap % S.kernel_w * window[5]
    inside = (iy >= 0) & (iy < image[0]) & (ix >= 0) & (ix < image[1]) & (tap < S.taps)
    return tl.load(ranges + (iy * image[1] + ix), mask=inside, other=0)


@triton.jit
def _codes(values, inverse):
    """int8 [STEP, block_m]; what is not finite has a scale of NaN, and any code."""
    values = values.to(tl.float32)
    values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    codes = round_product(values, tl.broadcast_to(inverse[None, :], values.shape))
    return tl.minimum(tl.maximum(codes, -127), 127).to(tl.int8)


@triton.jit
def _fold(total, p, s, z, sums, S: tl.constexpr):
    """total + integers p [block_n, block_m] of stored codes times the weight's scale, and the term of its zero."""
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


@triton.jit(do_not_specialize=["M", "pixels"])
def _dynamic(
    x, ranges, weight, out, added, M, N, packed, image, window, bounds, pixels, blocks, S: tl.constexpr, BLOCKWISE: tl.constexpr
):  # fmt: skip
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    STEP: tl.constexpr = S.step
    PIECES: tl.constexpr = S.record // S.step
    TAPS: tl.constexpr = S.taps
    n_padded, k_padded, group_bytes, steps, padded = packed
    height, width, ho, wo, pixel, channels = image
    group = tl.program_id(2)
    tiles_n = tl.cdiv(N, BN)
    pn = tl.program_id(0) % tiles_n
    pm = tl.program_id(0) // tiles_n
    rn = pn * BN + tl.arange(0, BN)
    rm = pm * BM + tl.arange(0, BM)
    rni = tl.minimum(rn, n_padded - 1)
    m = tl.minimum(rm, M - 1)
    b = (m // (ho * wo)).to(tl.int64)
    y0 = m // wo % ho * window[0] - window[2]
    x0 = m % wo * window[1] - window[3]
    xp = x + b[None, :] * (height * width * pixel) + group * channels
    ranges += group.to(tl.int64) * blocks * pixels + b * (height * width)
    reached = y0
    if S.bitwise:
        reached = reach(y0, x0, height, width, window, S)
    codes = (weight[0].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[0].dtype)
    scale = (weight[1].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[1].dtype)
    zero = scale
    if S.zero != "none":
        zero = (weight[2].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[2].dtype)
    if S.bits == 4:
        panel = tl.minimum(pn * (BN // 64) + tl.arange(0, BN // 64), n_padded // 64 - 1).to(tl.int64)[:, None] * (k_padded // 128)
        wp = codes + panel * 2048 + tl.arange(0, 2048)[None, :]
    else:
        wp = codes + rni[:, None].to(tl.int64) * k_padded + tl.arange(0, S.record)[None, :]
    most = tl.zeros([BM], tl.int32)
    if not BLOCKWISE:
        for tap in range(TAPS):
            most = tl.maximum(most, _range_at(ranges, y0, x0, tap, image, window, S))
    of_patch, inverse = _scales(most)
    total = tl.zeros([BN, BM], tl.float32)
    acc = tl.zeros([BN, BM], tl.int32)
    sums = tl.zeros([BM], tl.float32)
    for t in tl.range(0, steps, num_stages=S.stages):
        w = tl.load(wp + t * S.apart)
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
                of_x, inverse = _scales(_range_at(place, y0, x0, tap, image, window, S))
            xq = _codes(patches(xp, x, y0, x0, reached, piece, image, window, S, STEP), inverse)
            if S.whole:
                acc = tl.dot(q, xq, acc, out_dtype=tl.int32)
                if S.zero != "none":
                    sums += tl.sum(xq.to(tl.int32), axis=0).to(tl.float32)
            else:
                at = piece * STEP // padded * n_padded + rni
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
    if S.whole:
        s = tl.load(scale + rni)
        z = s
        if S.zero != "none":
            z = tl.load(zero + rni)
        total = _fold(total, acc, s, z, sums, S)
    if not BLOCKWISE:
        total *= of_patch[None, :]
    finish(total, out, added, rn, rm, M, N, group, bounds, S)
