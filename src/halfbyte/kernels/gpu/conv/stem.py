"""Convolutions of images of few channels (stems), as convolutions whose taps are whole lines of the kernel.

    x'[b, y, x, c]    the image with its padding, and channels c padded to C' = 4 or 8         [B, rows, strides * stride, C']
    piece[b, y, ox] = x'[b, y, ox * stride … ox * stride + columns), all channels              columns * C' elements, a multiple of 32
    y[m, n]         = sum over kh, p of  w'[n, kh, p] * piece[b, oy * stride + kh * dilation, ox][p]

A piece is contiguous in memory, and adjacent pieces overlap. w' is 0 for columns behind the kernel's. So 7 x 7 taps of 3 channels become 7
of 32, no tap needs a check of the image's bounds, and the kernel is that of all convolutions (`implicit_gemm.py`): to it a `Stem` is a
convolution with kernels [Kh, 1] of "pixels" that overlap.

`dispatch/gpu_conv.as_read` asks `stem_of` first, `ops/conv/cuda.py` prepares the operands: `weight_of` once, `write` at each call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.formats.codes import Codes
from halfbyte.kernels.gpu.runtime.launch import early_after, run
from halfbyte.kernels.problem import ConvProblem, Window
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import PackedConv

_PIECE_STEP = 32  # elements, of which pieces are multiples
_LONGEST_PIECE = 128
_BLOCK = 512  # pixels of x' that a program writes


@dataclass(frozen=True, kw_only=True)
class Stem(ConvProblem):
    """The convolution of pieces: `sizes` has a channel for each element of a piece, `image` is rows x strides of x'.

    Attributes:
        out_width: Columns of y, fewer than strides of x', as a piece may take several.
        original: The convolution that it computes.
    """

    out_width: int
    original: ConvProblem

    @property
    def out(self) -> tuple[int, int]:
        return super().out[0], self.out_width

    @property
    def channels(self) -> int:
        """C': channels of x'."""
        return convolution.padded_for_gpu(self.original.sizes).channels

    @property
    def overlap(self) -> int:
        """Elements from one piece to the next: a stride of x'."""
        return self.original.window.stride[1] * self.channels

    @property
    def flat(self) -> Stem:
        return self


def stem_of(problem: ConvProblem) -> Stem | None:
    """Return `problem` as a `Stem`; None unless channels are few, lines short, and the weight has bytes and one scale per channel."""
    sizes, window = problem.sizes, problem.window
    channels = convolution.padded_for_gpu(sizes).channels
    if channels > 8 or sizes.groups > 1 or sizes.format.bits != 8 or sizes.format.zero != "none" or isinstance(sizes.format.block, int):
        return None
    piece = round_up(sizes.kernel[1] * channels, _PIECE_STEP)
    if window.dilation[1] > 1 or piece > _LONGEST_PIECE:
        return None
    (out_height, out_width), (stride_y, stride_x), top = problem.out, window.stride, window.padding[0]
    strides = -(-((out_width - 1) * stride_x + piece // channels) // stride_x)
    rows = max((out_height - 1) * stride_y + (sizes.kernel[0] - 1) * window.dilation[0] + 1, top + 1)
    if problem.batch * rows * strides * stride_x > (1 << 31) - _BLOCK:  # pixels of x', and masked ones, have int32 numbers
        return None
    of_pieces = replace(sizes, channels=piece, kernel=(sizes.kernel[0], 1))
    down = Window((stride_y, 1), (0, 0, 0, 0), (window.dilation[0], 1))
    changed = {"sizes": of_pieces, "window": down, "image": (rows, strides)}
    return Stem(**vars(problem) | changed, out_width=out_width, original=problem)


def weight_of(weight: Tensor, stem: Stem) -> Tensor:
    """Return w' in layout "gpu_tiles", from the weight in this layout; both are uint8."""
    sizes, piece = stem.original.sizes, stem.sizes.channels
    codes = convolution.unpack(PackedConv(sizes, gpu_tiles.NAME, weight))
    values = torch.zeros(sizes.out, sizes.kernel[0], piece // stem.channels, stem.channels, dtype=torch.int8, device=weight.device)
    values[:, :, : sizes.kernel[1], : sizes.channels] = codes.data.view(sizes.out, *sizes.kernel, sizes.channels)
    stem_codes = Codes(codes.format, (sizes.out, sizes.kernel[0] * piece), values.view(sizes.out, -1), codes.scale)
    return convolution.pack_gpu(stem_codes, stem.sizes).data


def memory_for(stem: Stem, x: Tensor) -> Tensor:
    """Return empty memory for x' [B, rows, strides, overlap]."""
    return x.new_empty(stem.batch, *stem.image, stem.overlap)


def write(stem: Stem, x: Tensor, out: Tensor, outside: int) -> None:
    """Write x'.

    Args:
        stem: The convolution.
        x: [B, C, H, W] with any strides.
        out: `memory_for(stem, x)`.
        outside: The code of padding, if x is int8; floats are padded with 0.
    """
    if sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)) >= 1 << 31:
        x = x.contiguous()  # offsets within an image are int32
    columns = stem.image[1] * stem.overlap // stem.channels
    pixels, early = stem.batch * stem.image[0] * columns, early_after(x)
    top, _, left, _ = stem.original.window.padding
    run(
        _pad,
        (-(-pixels // _BLOCK),),
        x,
        out,
        pixels,
        x.stride(),
        (x.shape[1], *stem.original.image),
        (stem.image[0], columns),
        (top, left),
        outside,
        CHANNELS=stem.channels,
        BLOCK=_BLOCK,
        EARLY=early,
        num_warps=4,
        early=early,
    )


@triton.jit
def _pad(x, out, pixels, strides, size, padded_size, padding, outside, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Write pixels of x' [B, rows, columns, CHANNELS]; `size` is (channels, height, width) of x, `padded_size` (rows, columns)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    channels, height, width = size
    rows, columns = padded_size
    top, left = padding
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = i // columns
    b = line // rows
    y = line - b * rows - top
    column = i - line * columns - left
    c = tl.arange(0, CHANNELS)
    inside = ((y >= 0) & (y < height) & (column >= 0) & (column < width))[:, None] & (c < channels)[None, :]
    at = (b.to(tl.int64) * strides[0] + y * strides[2] + column * strides[3])[:, None] + (c * strides[1])[None, :]
    values = tl.load(x + at, mask=inside, other=0)
    if values.dtype == tl.int8:
        values = tl.where(inside, values, (tl.zeros((BLOCK, CHANNELS), tl.int32) + outside).to(tl.int8))
    tl.store(out + (i.to(tl.int64)[:, None] * CHANNELS + c[None, :]), values, mask=(i < pixels)[:, None])
