"""The tile of a convolution as implicit GEMM, shared by the kernels `implicit_gemm.py` and `dynamic.py` (and in part `few.py`).

A tile is [block_n rows of the weight, block_m patches] of one group. A patch is what one output pixel is computed from; K runs over (tap,
channel), where a tap is one position of the filter. Host: `Config`, `Static` and `compiled_for` (constants), `shapes` (arguments). Device:
`rows_and_patches` locates the tile, `weight_at` its codes, `patches` loads columns of K of its patches, `finish` writes y.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.arithmetic import clamped
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.gpu.weight_kinds import zero_of
from halfbyte.kernels.problem import ConvProblem
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter


@dataclass(frozen=True)
class Config:
    """How a program computes its tile.

    Attributes:
        block_n: Rows of the weight.
        block_m: Patches.
        step: Columns of K that are multiplied at a time.
        stages: Steps in flight through shared memory.
        warps: Of a program.
        split: Programs that share the K of a tile.
        ptx: Whether codes are converted by PTX instructions (NVIDIA).
        selects_address: Outside of the image, the address of the padding value is selected before the load; otherwise the loaded value is
            replaced by it (Triton's passes for AMD do not support pointers that are selected).
        pdl: Whether it starts before the preceding kernel has ended, and lets the next one do so (programmatic dependent launch).
    """

    block_n: int
    block_m: int
    step: int
    stages: int
    warps: int
    split: int = 1
    ptx: bool = True
    selects_address: bool = True
    pdl: bool = False


Mode = Literal["int8", "image", "sums", "weights", "exact", "dynamic"]  # the arithmetic, as `Static` says


@dataclass(frozen=True, kw_only=True)
class Static(CompileTime, Config):
    """What the kernel is compiled for, in addition to Config.

    Attributes:
        step: As in Config, but 32 for integers times 4 bits, whose nibbles are multiplied one plane of 32 columns after the other.
        split: 2: programs share K; 1: they do not.
        bits, zero: Of the weight.
        mode: The arithmetic. Of `implicit_gemm.py`, x int8: "int8" requantizes the sums to codes, "image" multiplies them by scales. x
            floating point: "sums" multiplies the sums by the scale; "weights" dequantizes the weight to x's dtype; "exact" dequantizes it
            in float32, if x or the scale has its range. Of `dynamic.py`: "dynamic".
        taps: Positions of the filter.
        kernel_w: Taps of a row of the filter.
        per_channel: Whether there is one scale per output channel, not one for each block of K.
        channels: Input channels of a tap in the weight, with all padding.
        block, padded: Elements of a quantization block without and with padding; without blocks both are `channels`.
        masks_channels: Whether some of the weight's channels are padding that x does not have: they are not loaded, and are 0.
        pads_image: Whether patches may reach beyond the image.
        masks_patches: Whether `pads_image`, or the last step reaches beyond K.
        pixel_stride: Elements from one pixel of x to the next if there is one group and 16 does not divide them, so that the compiler sees
            which power of two does; 0: they are an argument.
        outside_from_table: Whether elements outside of the image are in_zero, read from the table; otherwise they are 0.
        clamp: Whether y is clamped.
        codes_first: Whether this kernel's codes are the first tensor of an `Addition`.
    """

    bits: int
    zero: Zero
    mode: Mode
    taps: int
    kernel_w: int
    per_channel: bool
    channels: int
    block: int
    padded: int
    masks_channels: bool
    pads_image: bool
    masks_patches: bool
    pixel_stride: int
    outside_from_table: bool
    clamp: bool
    codes_first: bool

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
    def has_tap_mask(self) -> bool:
        """Whether a patch's taps inside of the image are bits of an int32 (`_tap_mask`)."""
        return self.masks_patches and self.taps < 32

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
        return 1 if self.per_channel else max(1, self.slab_k // self.padded)

    @property
    def step_blocks(self) -> int:
        """The same, of a step of K."""
        return 1 if self.per_channel else max(1, self.step // self.padded)


def padded_channels(sizes: Filter) -> int:
    """Return the input channels of a tap in the packed weight, with all padding."""
    geo, padded = convolution.gpu_geometry(sizes), convolution.padded_for_gpu(sizes)
    if not isinstance(sizes.format.block, int):
        return padded.channels
    return padded.padded // geo.block * geo.padded


def compiled_for(
    problem: ConvProblem, config: Config, x: Tensor, mode: Mode, *, clamp: bool, outside_from_table: bool = False, codes_first: bool = False
) -> Static:
    """Return what a kernel that reads x [B, H, W, C], whose channels may be padded already, is compiled for."""
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    bits, per_channel, channels = geo.format.bits, geo.block_rows == 1, padded_channels(sizes)
    block, padded = (channels, channels) if per_channel or mode in ("int8", "image") else (geo.block, geo.padded)
    slab_k = 128 if bits == 4 else config.step
    step = 32 if mode in ("int8", "image", "dynamic") and bits == 4 else config.step
    pads_image = any(problem.window.padding)
    return Static(
        **vars(replace(config, step=step, split=min(2, config.split))),
        bits=bits,
        zero=zero_of(geo.format),
        mode=mode,
        taps=sizes.taps,
        kernel_w=sizes.kernel[1],
        per_channel=per_channel,
        channels=channels,
        block=block,
        padded=padded,
        masks_channels=(x.shape[3] // sizes.groups != channels and not problem.overlap) or block != padded,
        pads_image=pads_image,
        masks_patches=pads_image or sizes.taps * channels % slab_k != 0,
        pixel_stride=x.shape[3] if sizes.groups == 1 and x.shape[3] % 16 else 0,
        outside_from_table=outside_from_table,
        clamp=clamp,
        codes_first=codes_first,
    )


class ImageShape(NamedTuple):
    """Height and width of x and of y, elements of a pixel of x, and those of a group in it."""

    height: Value
    width: Value
    out_height: Value
    out_width: Value
    pixel_stride: Value
    group_channels: Value


class WindowShape(NamedTuple):
    """Strides, padding above and on the left, dilations; in pixels."""

    stride_y: Value
    stride_x: Value
    top: Value
    left: Value
    dilation_y: Value
    dilation_x: Value


class PackedShape(NamedTuple):
    """Sizes of a group's weight matrix: rows and K with padding, bytes, and K slabs."""

    n_padded: Value
    k_padded: Value
    group_bytes: Value
    k_slabs: Value


def shapes(problem: ConvProblem, x: Tensor) -> tuple[ImageShape, WindowShape]:
    """Return the kernels' arguments `image` and `window`."""
    window, channels = problem.window, x.shape[3]
    top, _, left, _ = window.padding
    image = ImageShape(*problem.image, *problem.out, channels, channels // problem.sizes.groups)
    return image, WindowShape(*window.stride, top, left, *window.dilation)


def packed_shape(problem: ConvProblem, static: Static) -> PackedShape:
    """Return the kernels' argument `packed`."""
    geo = convolution.gpu_geometry(problem.sizes)
    return PackedShape(geo.n_padded, geo.k_padded, geo.nbytes, -(-static.taps * static.channels // static.slab_k))


# Device functions. `S` is a Static.


@triton.jit
def rows_and_patches(M, N, n_padded, image, window, S: tl.constexpr):
    """Return this program's tile as (pn, rn, rn_stored, rm, b, y0, x0, tap_mask).

    pn, rn       its number along N, and its rows of the weight
    rn_stored    the same, those beyond the last one replaced by it, so that they can be loaded
    rm           its patches, the rows of y
    b, y0, x0    each patch's image (int64), and the row and column of x under its first tap
    tap_mask     which taps of each patch are inside of the image (`_tap_mask`), if S.has_tap_mask

    Rows and patches outside of y are computed from the last one's data, and not written.
    """
    tiles_n = tl.cdiv(N, S.block_n)
    pn = tl.program_id(0) % tiles_n
    pm = tl.program_id(0) // tiles_n
    rn = pn * S.block_n + tl.arange(0, S.block_n)
    rm = pm * S.block_m + tl.arange(0, S.block_m)
    rn_stored = tl.minimum(rn, n_padded - 1)
    m = tl.minimum(rm, M - 1)
    row = m // image.out_width
    b = row // image.out_height
    y0 = (row - b * image.out_height) * window.stride_y - window.top
    x0 = (m - row * image.out_width) * window.stride_x - window.left
    tap_mask = y0
    if S.has_tap_mask:
        tap_mask = _tap_mask(y0, x0, image, window, S)
    return pn, rn, rn_stored, rm, b.to(tl.int64), y0, x0, tap_mask


@triton.jit
def pixel_stride(image, S: tl.constexpr):
    """Return the elements from one pixel of x to the next."""
    if S.pixel_stride > 0:
        stride: tl.constexpr = S.pixel_stride  # Triton from 3.8 on returns no field of a constant
        return stride
    else:
        return image.pixel_stride


@triton.jit
def weight_at(weight, group, pn, rn_stored, packed, S: tl.constexpr):
    """Return pointers to the first K slab of the tile's codes, and to the group's scales and zeros; without zeros to scales again.

    `weight`: codes, scales and zeros of the first group, the latter may be None.
    """
    n_padded, k_padded, group_bytes, _k_slabs = packed
    codes = (weight[0].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[0].dtype)
    scale = (weight[1].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[1].dtype)
    zero = scale
    if S.zero != "none":
        zero = (weight[2].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[2].dtype)
    if S.bits == 4:
        panel = tl.minimum(pn * (S.block_n // 64) + tl.arange(0, S.block_n // 64), n_padded // 64 - 1).to(tl.int64)[:, None]
        wp = codes + panel * (k_padded // 128) * 2048 + tl.arange(0, 2048)[None, :]
    else:
        wp = codes + rn_stored[:, None].to(tl.int64) * k_padded + tl.arange(0, S.slab_k)[None, :]
    return wp, scale, zero


@triton.jit
def _tap_mask(y0, x0, image, window, S: tl.constexpr):
    """Return int32 [block_m], whose bit t says whether tap t of a patch is inside of the image."""
    TAPS: tl.constexpr = S.taps
    bits = tl.zeros_like(y0)
    for tap in tl.static_range(TAPS):
        iy = y0 + tap // S.kernel_w * window.dilation_y
        ix = x0 + tap % S.kernel_w * window.dilation_x
        bits |= ((iy >= 0) & (iy < image.height) & (ix >= 0) & (ix < image.width)).to(tl.int32) << tap
    return bits


@triton.jit
def patches(x, outside, y0, x0, tap_mask, step, image, window, S: tl.constexpr, STEP: tl.constexpr):
    """Load columns step * STEP … of the patches, [STEP, block_m].

    x        pointers to each patch's image, and the group's first channel in it
    outside  pointer to the value of elements outside of the image, if S.outside_from_table
    """
    if S.taps == 1 and S.channels % STEP != 0 and not (S.pads_image or S.masks_channels):  # only the end of K is masked
        p = step * STEP + tl.arange(0, STEP)
        at = (y0 * image.width + x0) * pixel_stride(image, S)
        return tl.load(x + (at[None, :] + p[:, None]), mask=(p < S.channels)[:, None], other=0)
    else:
        return _patches(x, outside, y0, x0, tap_mask, step, image, window, S, STEP)


@triton.jit
def _patches(x, outside, y0, x0, tap_mask, step, image, window, S: tl.constexpr, STEP: tl.constexpr):
    height, width = image.height, image.width
    pixel = pixel_stride(image, S)
    i = tl.arange(0, STEP)
    if S.channels % STEP == 0:  # inside one tap
        PIECES: tl.constexpr = S.channels // STEP
        tap = step // PIECES
        p = step % PIECES * STEP + i
        ky = tap // S.kernel_w * window.dilation_y
        kx = tap % S.kernel_w * window.dilation_x
        at = ((y0 * width + x0) * pixel)[None, :] + (ky * width + kx) * pixel
        if S.has_tap_mask:
            inside = (tap_mask >> tap & 1 != 0)[None, :]  # no bit is set of taps beyond the last one
        else:
            iy = y0 + ky
            if S.taps * S.channels % S.slab_k != 0:
                iy = tl.where(tap < S.taps, iy, -1)
            ix = x0 + kx
            inside = ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width))[None, :]
        exists = p >= 0
    else:
        k = step * STEP + i
        tap = k // S.channels
        p = k % S.channels
        iy = y0[None, :] + (tap // S.kernel_w * window.dilation_y)[:, None]
        ix = x0[None, :] + (tap % S.kernel_w * window.dilation_x)[:, None]
        exists = tap < S.taps
        inside = (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width) & exists[:, None]
        at = (iy * width + ix) * pixel
    c = p
    if S.block != S.padded:
        within = p % S.padded
        c = p // S.padded * S.block + within
        exists = exists & (within < S.block)
    pointers = x + (at + c[:, None])
    if S.masks_channels:
        exists = exists & (c < image.group_channels)
        if S.outside_from_table and S.selects_address:
            pointers = tl.where(inside, pointers, outside + i[:, None])
            return tl.load(pointers, mask=exists[:, None] | (inside ^ True), other=0)
        elif S.outside_from_table:
            return tl.where(inside, tl.load(pointers, mask=inside & exists[:, None], other=0), tl.load(outside))
        else:
            return tl.load(pointers, mask=inside & exists[:, None], other=0)
    elif S.masks_patches:
        if S.outside_from_table and S.selects_address:
            return tl.load(tl.where(inside, pointers, outside + i[:, None]))
        elif S.outside_from_table:
            return tl.where(inside, tl.load(pointers, mask=inside, other=0), tl.load(outside))
        else:
            return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def of_patches(rows, k, inside, S: tl.constexpr):
    """Load columns k of patches where `inside` holds, as `linear/skinny_tile.py` does for `few.py`.

    `rows`: pointers to each patch's first pixel, its row and column; an ImageShape and a WindowShape. `S` is a `few.Static`.
    """
    first, y0, x0, image, window = rows
    tap = k // S.channels
    y = tap // S.kernel_w * window.dilation_y
    x = tap % S.kernel_w * window.dilation_x
    if S.pads_image:
        inside = inside & (y0 + y >= 0) & (y0 + y < image.height) & (x0 + x >= 0) & (x0 + x < image.width)
    return tl.load(first + ((y * image.width + x) * image.pixel_stride + k % S.channels), mask=inside, other=0.0)


@triton.jit
def words_of(codes, S: tl.constexpr):
    """Return words (four nibbles each) of a K slab [block_n / 64, 2048] as [block_n, 32], in the order of K."""
    words = tl.reshape(codes, (S.block_n // 64, 2, 4, 8, 4, 2, 2, 2))  # panel, kt, nt, row, k4, khalf, rowhalf, k
    return tl.reshape(tl.permute(words, (0, 2, 6, 3, 1, 5, 4, 7)), (S.block_n, 32))


@triton.jit
def output_at(rn, rm, M, N, group):
    """Return the positions of outputs rn of a group and patches rm in y [M, Co], and the mask of those that are inside."""
    at = rm[None, :].to(tl.int64) * (N * tl.num_programs(2)) + (group * N + rn)[:, None]
    return at, (rn < N)[:, None] & (rm < M)[None, :]


@triton.jit
def finish(total, out, added, rn, rm, M, N, group, bounds, S: tl.constexpr):
    """Write y = clamp(total + bias + residual) of a tile [len(rn), len(rm)] to out [M, Co]; `added` is (bias, residual), either may be
    None."""
    bias, residual = added
    at, mask = output_at(rn, rm, M, N, group)
    if bias is not None:
        total += tl.load(bias + group * N + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if S.clamp:
        total = clamped(total, bounds[0], bounds[1])
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
