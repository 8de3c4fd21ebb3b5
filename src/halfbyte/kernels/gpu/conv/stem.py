"""Images of few channels (stems): a row of the kernel is read as one tap.

    piece[b, y, ox] = x'[b, y, ox*stride … ox*stride + columns), all channels        columns * channels': a multiple of 32
    y[m, n] = sum over kh, p of  w'[n, kh, p] * piece[b, oy*stride + kh*dilation, ox, p]

x' is the image with what stands for 0 around it and its channels padded to 4 or 8, where a piece is one run of memory, and pieces overlap.
w' has 0 for columns behind the kernel's. So 7 x 7 taps of 3 channels become 7 of 32, no tap needs a check of the image's bounds, and the
kernel is that of all convolutions (`implicit_gemm.py`).
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

_PIECE = 32  # elements, of which pieces are multiples
_LONGEST = 128
_BLOCK = 512  # pixels of x' that a program writes


@dataclass(frozen=True, kw_only=True)
class Stem(ConvProblem):
    """A convolution of pieces: an image of x' has rows x strides pixels, each the `overlap` elements from one piece to the next.

    wide    columns of y
    of      what it computes
    """

    wide: int
    of: ConvProblem

    @property
    def out(self) -> tuple[int, int]:
        return super().out[0], self.wide

    @property
    def overlap(self) -> int:
        return self.of.window.stride[1] * convolution.padded_for_gpu(self.of.sizes).channels

    @property
    def flat(self) -> Stem:
        return self


def stem_of(problem: ConvProblem) -> Stem | None:
    """`problem` with pieces for taps, where its taps are short enough, and its weight has bytes and one scale for each channel."""
    sizes, window = problem.sizes, problem.window
    channels = convolution.padded_for_gpu(sizes).channels
    if channels > 8 or sizes.groups > 1 or sizes.format.bits != 8 or sizes.format.zero != "none" or isinstance(sizes.format.block, int):
        return None
    piece = round_up(sizes.kernel[1] * channels, _PIECE)
    if window.dilation[1] > 1 or piece > _LONGEST:
        return None
    (rows, wide), (down, right), top, dilation = problem.out, window.stride, window.padding[0], window.dilation[0]
    width = -(-((wide - 1) * right + piece // channels) // right)  # in strides
    image = max((rows - 1) * down + (sizes.kernel[0] - 1) * dilation + 1, top + 1), width
    if problem.batch * image[0] * width * right >= 1 << 31:
        return None
    of_pieces = replace(sizes, channels=piece, kernel=(sizes.kernel[0], 1))
    window = Window((down, 1), (0, 0, 0, 0), (dilation, 1))
    return Stem(**vars(problem) | {"sizes": of_pieces, "window": window, "image": image}, wide=wide, of=problem)


def weight_of(weight: Tensor, stem: Stem) -> Tensor:
    """The bytes of layout "gpu_tiles" of w', from those of the weight."""
    sizes = stem.of.sizes
    codes = convolution.unpack(PackedConv(sizes, gpu_tiles.NAME, weight))
    channels, piece = convolution.padded_for_gpu(sizes).channels, stem.sizes.channels
    values = torch.zeros(sizes.out, sizes.kernel[0], piece // channels, channels, dtype=torch.int8, device=weight.device)
    values[:, :, : sizes.kernel[1], : sizes.channels] = codes.data.view(sizes.out, *sizes.kernel, sizes.channels)
    stem_codes = Codes(codes.format, (sizes.out, sizes.kernel[0] * piece), values.view(sizes.out, -1), codes.scale)
    return convolution.pack_gpu(stem_codes, stem.sizes).data


def memory_for(stem: Stem, x: Tensor) -> Tensor:
    """Return empty memory for x' [B, rows, strides, overlap]."""
    return x.new_empty(stem.batch, *stem.image, stem.overlap)


def write(stem: Stem, x: Tensor, out: Tensor, outside: int) -> None:
    """x [B, C, H, W], laid out in any way -> x', with `outside` around integers (floats: 0)."""
    channels = convolution.padded_for_gpu(stem.of.sizes).channels
    columns = stem.image[1] * stem.overlap // channels
    pixels, early = stem.batch * stem.image[0] * columns, early_after(x)
    top, _, left, _ = stem.of.window.padding
    run(
        _padded,
        (-(-pixels // _BLOCK),),
        x,
        out,
        pixels,
        x.stride(),
        (x.shape[1], *stem.of.image, stem.image[0], columns, top, left),  # of x, of x', and between them
        outside,
        CHANNELS=channels,
        BLOCK=_BLOCK,
        EARLY=early,
        num_warps=4,
        early=early,
    )


@triton.jit
def _padded(x, out, pixels, strides, sizes, outside, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = i // sizes[4]
    b = row // sizes[3]
    iy = row - b * sizes[3] - sizes[5]
    ix = i - row * sizes[4] - sizes[6]
    c = tl.arange(0, CHANNELS)
    inside = ((iy >= 0) & (iy < sizes[1]) & (ix >= 0) & (ix < sizes[2]))[:, None] & (c < sizes[0])[None, :]
    at = (b.to(tl.int64) * strides[0] + iy * strides[2] + ix * strides[3])[:, None] + (c * strides[1])[None, :]
    values = tl.load(x + at, mask=inside, other=0)
    if values.dtype == tl.int8:
        values = tl.where(inside, values, (tl.zeros((BLOCK, CHANNELS), tl.int32) + outside).to(tl.int8))
    tl.store(out + (i.to(tl.int64)[:, None] * CHANNELS + c[None, :]), values, mask=(i < pixels)[:, None])
