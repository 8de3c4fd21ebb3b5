"""What a tile of a convolution is, for the kernels that make products of patches: `implicit_gemm.py` and `dynamic.py`.

A tile is [block_n rows of the weight, block_m patches] of one group; K runs over (tap, channel). Here are what such a kernel is compiled
for, where the tile's patches and its part of the weight lie, how patches are read, and how sums are written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.arithmetic import clamped
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.weight_kinds import zero_of
from halfbyte.kernels.problem import ConvProblem
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter


@dataclass(frozen=True)
class Config:
    """block_n rows of the weight by block_m patches a program, `step` of K at a time; K split over `split` programs. `ptx`: inline PTX.
    `chosen`: where a patch leaves the image its address is chosen, elsewhere what was read (Triton's passes for AMD know no such address).
    `pdl`: it starts before the kernel before has ended, and lets the next one do so.
    """

    block_n: int
    block_m: int
    step: int
    stages: int
    warps: int
    split: int = 1
    ptx: bool = True
    chosen: bool = True
    pdl: bool = False


Mode = Literal["int8", "image", "sums", "weights", "exact", "dynamic"]  # how products are made, as `Static` says


@dataclass(frozen=True, kw_only=True)
class Static(CompileTime, Config):
    """What the kernel is compiled for.

    step      of x: 4 bits of the integer way are multiplied plane by plane
    whole     one scale per channel
    channels, block, padded   of a tap: with all padding; elements of a block without and with its padding (channels: no blocks)
    real      channels that x has are fewer, or blocks are padded: their number is looked at
    bounded   patches may reach beyond the image, or steps beyond K
    edges     the former
    pixel     elements from one to the next, of one group, if 16 does not divide them: the compiler sees what does; else 0
    fill      they then read the table's last row
    leads     of an Addition
    mode      of `implicit_gemm.py`: "int8" and "image" of int8 x; "sums": the scale is multiplied by the sums; "weights": made in x's type;
              "exact": in float32, where x or the scale has its range. Of `dynamic.py`: "dynamic"
    """

    bits: int
    zero: Zero
    mode: Mode
    taps: int
    kernel_w: int
    whole: bool
    channels: int
    block: int
    padded: int
    real: bool
    bounded: bool
    edges: bool
    pixel: int
    fill: bool
    clamp: bool
    leads: bool

    @property
    def integer(self) -> bool:
        """Whether x is int8."""
        return self.mode in ("int8", "image")

    @property
    def slab_k(self) -> int:
        """Elements along K of a slab of the weight."""
        return 128 if self.bits == 4 else self.step

    @property
    def slab_stride(self) -> int:
        """Distance of slabs: words, bytes, or elements."""
        return 2048 if self.bits == 4 else self.slab_k

    @property
    def bitwise(self) -> bool:
        """Whether taps outside of the image are looked up in a bit mask."""
        return self.bounded and self.taps < 32

    @property
    def scaled(self) -> bool:
        """Whether the scale multiplies the weights."""
        return self.mode in ("weights", "exact")

    @property
    def sums_scaled(self) -> bool:
        """Whether the scale multiplies the sums."""
        return self.mode in ("sums", "image")

    @property
    def groups(self) -> int:
        """Blocks that a step of the weight touches."""
        return max(1, self.slab_k // self.padded)


def padded_channels(sizes: Filter) -> int:
    """Return the channels of a tap, with all padding."""
    geo, padded = convolution.gpu_geometry(sizes), convolution.padded_for_gpu(sizes)
    if not isinstance(sizes.format.block, int):
        return padded.channels
    return padded.padded // geo.block * geo.padded


def static_of(problem: ConvProblem, config: Config, x: Tensor, mode: Mode, *, fill: bool, clamp: bool, leads: bool = False) -> Static:
    """Return what a kernel that reads x [B, H, W, C], whose channels may be padded already, is compiled for."""
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    bits, zero, whole, channels = geo.format.bits, zero_of(geo.format), geo.block_rows == 1, padded_channels(sizes)
    block, padded = (channels, channels) if whole or mode in ("int8", "image") else (geo.block, geo.padded)
    slab_k = 128 if bits == 4 else config.step
    step = 32 if mode in ("int8", "image", "dynamic") and bits == 4 else config.step
    return Static(
        **vars(replace(config, step=step, split=min(2, config.split))),
        bits=bits,
        zero=zero,
        mode=mode,
        taps=sizes.taps,
        kernel_w=sizes.kernel[1],
        whole=whole,
        channels=channels,
        block=block,
        padded=padded,
        real=(x.shape[3] // sizes.groups != channels and not problem.overlap) or block != padded,
        bounded=any(problem.window.padding) or sizes.taps * channels % slab_k != 0,
        edges=any(problem.window.padding),
        pixel=x.shape[3] if sizes.groups == 1 and x.shape[3] % 16 else 0,
        fill=fill,
        clamp=clamp,
        leads=leads,
    )


def places(problem: ConvProblem, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The kernels' `image` (height and width of x and of y, elements of a pixel of x, those of a group) and `window` (stride, what is
    padded above and on the left, dilation)."""
    window, channels = problem.window, x.shape[3]
    top, _, left, _ = window.padding
    return (*problem.image, *problem.out, channels, channels // problem.sizes.groups), (*window.stride, top, left, *window.dilation)


# Device functions. `S` is a Static.


@triton.jit
def rows_and_patches(M, N, n_padded, image, window, S: tl.constexpr):
    """Return this program's tile: its number along N; rows of the weight, and those of them that are in memory; patches; their image
    (int64), row and column of x, and which taps of them are inside of the image. What lies outside of y is computed from the last
    patch's data and not written."""
    height, width, ho, wo, _pixel, _channels = image
    tiles_n = tl.cdiv(N, S.block_n)
    pn = tl.program_id(0) % tiles_n
    pm = tl.program_id(0) // tiles_n
    rn = pn * S.block_n + tl.arange(0, S.block_n)
    rm = pm * S.block_m + tl.arange(0, S.block_m)
    rni = tl.minimum(rn, n_padded - 1)
    m = tl.minimum(rm, M - 1)
    row = m // wo
    b = row // ho
    y0 = (row - b * ho) * window[0] - window[2]
    x0 = (m - row * wo) * window[1] - window[3]
    reached = y0
    if S.bitwise:
        reached = reach(y0, x0, height, width, window, S)
    return pn, rn, rni, rm, b.to(tl.int64), y0, x0, reached


@triton.jit
def distance(image, S: tl.constexpr):
    """Return the elements from one pixel of x to the next."""
    if S.pixel > 0:
        pixel: tl.constexpr = S.pixel  # Triton from 3.8 on returns no field of a constant
        return pixel
    else:
        return image[4]


@triton.jit
def weight_at(weight, group, pn, rni, packed, S: tl.constexpr):
    """Return pointers to the first slab of the tile's codes, and to the group's scales and zeros, or placeholders."""
    n_padded, k_padded, group_bytes, _steps = packed
    codes = (weight[0].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[0].dtype)
    scale = (weight[1].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[1].dtype)
    zero = scale
    if S.zero != "none":
        zero = (weight[2].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[2].dtype)
    if S.bits == 4:
        panel = tl.minimum(pn * (S.block_n // 64) + tl.arange(0, S.block_n // 64), n_padded // 64 - 1).to(tl.int64)[:, None]
        wp = codes + panel * (k_padded // 128) * 2048 + tl.arange(0, 2048)[None, :]
    else:
        wp = codes + rni[:, None].to(tl.int64) * k_padded + tl.arange(0, S.slab_k)[None, :]
    return wp, scale, zero


@triton.jit
def reach(y0, x0, height, width, window, S: tl.constexpr):
    """Return which taps of each patch are inside of the image, as bits: [block_m]."""
    TAPS: tl.constexpr = S.taps
    bits = tl.zeros_like(y0)
    for tap in tl.static_range(TAPS):
        iy = y0 + tap // S.kernel_w * window[4]
        ix = x0 + tap % S.kernel_w * window[5]
        bits |= ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)).to(tl.int32) << tap
    return bits


@triton.jit
def patches(x, fill, y0, x0, reached, step, image, window, S: tl.constexpr, STEP: tl.constexpr):
    """Load columns step * STEP … of the patches, [STEP, block_m]."""
    if S.taps == 1 and S.channels % STEP != 0 and not (S.edges or S.real):  # nothing to look for but the end
        p = step * STEP + tl.arange(0, STEP)
        at = (y0 * image[1] + x0) * distance(image, S)
        return tl.load(x + (at[None, :] + p[:, None]), mask=(p < S.channels)[:, None], other=0)
    else:
        return _patches(x, fill, y0, x0, reached, step, image, window, S, STEP)


@triton.jit
def _patches(x, fill, y0, x0, reached, step, image, window, S: tl.constexpr, STEP: tl.constexpr):
    height, width, _ho, _wo, _pixel, channels = image
    pixel = distance(image, S)
    i = tl.arange(0, STEP)
    if S.channels % STEP == 0:  # inside one tap
        PIECES: tl.constexpr = S.channels // STEP
        tap = step // PIECES
        p = step % PIECES * STEP + i
        ky = tap // S.kernel_w * window[4]
        kx = tap % S.kernel_w * window[5]
        at = ((y0 * width + x0) * pixel)[None, :] + (ky * width + kx) * pixel
        if S.bitwise:
            inside = (reached >> tap & 1 != 0)[None, :]  # none of those taps that there are not
        else:
            iy = y0 + ky
            if S.taps * S.channels % S.slab_k != 0:
                iy = tl.where(tap < S.taps, iy, -1)
            ix = x0 + kx
            inside = ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width))[None, :]
        real = p >= 0
    else:
        k = step * STEP + i
        tap = k // S.channels
        p = k % S.channels
        iy = y0[None, :] + (tap // S.kernel_w * window[4])[:, None]
        ix = x0[None, :] + (tap % S.kernel_w * window[5])[:, None]
        real = tap < S.taps
        inside = (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width) & real[:, None]
        at = (iy * width + ix) * pixel
    c = p
    if S.block != S.padded:
        within = p % S.padded
        c = p // S.padded * S.block + within
        real = real & (within < S.block)
    pointers = x + (at + c[:, None])
    if S.real:
        real = real & (c < channels)
        if S.fill and S.chosen:
            pointers = tl.where(inside, pointers, fill + i[:, None])
            return tl.load(pointers, mask=real[:, None] | (inside ^ True), other=0)
        elif S.fill:
            return tl.where(inside, tl.load(pointers, mask=inside & real[:, None], other=0), tl.load(fill))
        else:
            return tl.load(pointers, mask=inside & real[:, None], other=0)
    elif S.bounded:
        if S.fill and S.chosen:
            return tl.load(tl.where(inside, pointers, fill + i[:, None]))
        elif S.fill:
            return tl.where(inside, tl.load(pointers, mask=inside, other=0), tl.load(fill))
        else:
            return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def of_patches(places, k, inside, S: tl.constexpr):
    """Columns k of patches, where `inside` holds. places: of each patch, its first pixel's pointer, row and column; `image` and `window`.
    S: a `conv_few.Static`."""
    first, y0, x0, image, window = places
    tap = k // S.channels
    y = tap // S.kernel_w * window[4]
    x = tap % S.kernel_w * window[5]
    if S.bounded:
        inside = inside & (y0 + y >= 0) & (y0 + y < image[0]) & (x0 + x >= 0) & (x0 + x < image[1])
    return tl.load(first + ((y * image[1] + x) * image[4] + k % S.channels), mask=inside, other=0.0)


@triton.jit
def words_of(codes, S: tl.constexpr):
    """Return words of a slab [block_n / 64, 2048] as [block_n, 32], in the order of K."""
    words = tl.reshape(codes, (S.block_n // 64, 2, 4, 8, 4, 2, 2, 2))  # panel, kt, nt, row, k4, khalf, rowhalf, k
    return tl.reshape(tl.permute(words, (0, 2, 6, 3, 1, 5, 4, 7)), (S.block_n, 32))


@triton.jit
def of_y(rn, rm, M, N, group):
    """Return the positions of outputs rn of a group and patches rm in y [M, Co], and which are inside."""
    at = rm[None, :].to(tl.int64) * (N * tl.num_programs(2)) + (group * N + rn)[:, None]
    return at, (rn < N)[:, None] & (rm < M)[None, :]


@triton.jit
def finish(total, out, added, rn, rm, M, N, group, bounds, S: tl.constexpr):
    """Write y = clamp(total + bias + residual) of a tile [len(rn), len(rm)] to out [M, Co]."""
    at, mask = of_y(rn, rm, M, N, group)
    if added[0] is not None:
        total += tl.load(added[0] + group * N + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    if added[1] is not None:
        total += tl.load(added[1] + at, mask=mask, other=0.0).to(tl.float32)
    if S.clamp:
        total = clamped(total, bounds[0], bounds[1])
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
