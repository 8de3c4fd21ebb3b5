"""The weight of a convolution as codes and as the matrix that kernels multiply.

weight [Co, Ci/groups, Kh, Kw]   as in torch; a 1-D convolution has Kh = 1
codes  [Co, Kh*Kw, Ci/groups]    for formats with blocks, which run along the channels of one tap (kernel position)
       [Co, Kh*Kw*Ci/groups]     for formats with one scale per channel or tensor
matrix [Co, Kh*Kw*Ci']           the packed weight: a patch of the input, taps row by row with the channels of a tap together, times
                                 this matrix is the output. Ci' is Ci/groups padded to whole blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfbyte.bounded import Bounded
from halfbyte.errors import ArgumentError, FormatError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.spec import Format
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import CALLS, Packed, round_up

CANONICAL = "canonical"  # the layout of weights that kernels do not read as a matrix


def channels_last(weight: Tensor, fmt: Format) -> Tensor:
    """A float weight [Co, Ci/groups, *kernel] in the order and shape of its codes, ready for a quantizer."""
    if weight.dim() not in (3, 4):
        raise ArgumentError(f"the weight of a convolution is [Co, Ci/groups, Kh, Kw] or [Co, Ci/groups, Kw], got {list(weight.shape)}")
    out, channels, *kernel = weight.shape
    taps = math.prod(kernel)
    return weight.movedim(1, -1).reshape((out, taps, channels) if isinstance(fmt.block, int) else (out, taps * channels))


def channels_first(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """The inverse: numbers in the order of the codes -> [Co, Ci/groups, *kernel]."""
    return weight.reshape(weight.shape[0], *kernel, -1).movedim(-1, 1)


@dataclass(frozen=True, slots=True)
class Filter:
    """Sizes of a convolution's weight.

    Attributes:
        format: The format of the codes.
        out: Output channels Co.
        channels: Input channels of a group, Ci / groups.
        kernel: (Kh, Kw).
    """

    format: Format
    out: int
    channels: int
    kernel: tuple[int, int]
    groups: int = 1

    def __post_init__(self) -> None:
        if self.format.codebook:
            raise FormatError(f"convolutions take integer codes, not those of a table, got {self.format}: use int8_channel or int4_g32")
        if self.groups < 1 or self.out % self.groups:
            raise ArgumentError(f"groups divide the {self.out} output channels, got groups={self.groups}")
        if min(self.kernel) < 1 or min(self.out, self.channels) < 0:
            raise ArgumentError(f"a kernel is at least 1 x 1 and channels are not negative, got {self}")

    @property
    def numbers(self) -> tuple[int, ...]:
        """(Co, Ci / groups, Kh, Kw, groups)"""
        return (self.out, self.channels, *self.kernel, self.groups)

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved separately with one kernel."""
        return self.channels == 1 and self.groups == self.out

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return (self.out, self.taps, self.channels) if isinstance(self.format.block, int) else (self.out, self.taps * self.channels)

    @property
    def padded(self) -> int:
        """Ci': channels of a tap, padded to whole blocks."""
        if not isinstance(self.format.block, int):
            return self.channels
        block = self.format.block_size(self.channels)
        return round_up(self.channels, block)

    @property
    def k(self) -> int:
        return self.taps * self.padded

    @property
    def matrix_format(self) -> Format:
        """The format whose blocks on the matrix are those of the codes."""
        fmt = self.format
        if not isinstance(fmt.block, int) or fmt.block == fmt.block_size(self.channels):
            return fmt
        return Format(fmt.bits, fmt.block_size(self.channels), fmt.zero, fmt.scale)


def filter_of(codes: Codes, kernel: Sequence[int], groups: int = 1) -> Filter:
    """The sizes of `codes`, whose kernel has the sizes `kernel`: (Kh, Kw) or (Kw,). Raises FormatError where they don't fit."""
    kh, kw = (1, *kernel)[-2:]
    taps, fmt = kh * kw, codes.format
    last = codes.shape[-1]
    blocks = isinstance(fmt.block, int)
    if len(codes.shape) != (3 if blocks else 2) or (codes.shape[1] != taps if blocks else last % taps):
        wanted = f"[Co, {taps}, Ci]" if blocks else f"[Co, a multiple of {taps}]"
        raise FormatError(f"{fmt} codes of a {kh} x {kw} kernel have shape {wanted}, got {list(codes.shape)}: use quantize_conv")
    return Filter(fmt, codes.shape[0], last if blocks else last // taps, (kh, kw), groups)


def to_matrix(codes: Codes, sizes: Filter) -> Codes:
    """codes -> matrix [Co, K]: the same numbers, channels padded with the code of 0 (with a float offset: q = 0)."""
    if len(codes.shape) == 2:
        return codes
    fmt, more = sizes.matrix_format, sizes.padded - sizes.channels
    values = _with_more(codes.values(), codes, more)
    flat = [None if t is None else t.reshape(sizes.out, -1) for t in (codes.scale, codes.zero)]
    assert flat[0] is not None
    return Codes.from_values(fmt, values.reshape(sizes.out, sizes.k), flat[0], flat[1])


def _with_more(values: Tensor, codes: Codes, more: int) -> Tensor:
    """Values of `codes` [Co, taps, channels], channels padded with the code of 0: the last zero point of each tap, if any."""
    if not more:
        return values
    zero = None if codes.format.zero == "offset" else codes.zero
    fill = values.new_zeros(()) if zero is None else zero.reshape(zero.shape[0], -1, zero.shape[-1])[..., -1:].to(values.dtype)
    return torch.cat((values, fill.expand(*values.shape[:-1], more)), dim=-1)


def from_matrix(matrix: Codes, sizes: Filter) -> Codes:
    """The exact inverse of `to_matrix`."""
    if not isinstance(sizes.format.block, int):
        return replace(matrix, format=sizes.format)
    values = matrix.values().reshape(sizes.out, sizes.taps, sizes.padded)[..., : sizes.channels]
    shape = sizes.format.scale_shape(sizes.codes_shape)
    zero = None if matrix.zero is None else matrix.zero.reshape(shape)
    return Codes.from_values(sizes.format, values, matrix.scale.reshape(shape), zero)


@dataclass(frozen=True, eq=False, slots=True)
class PackedConv:
    """The weight of a convolution in the byte order that a device's kernels read; `unpack` returns its Codes.

    Attributes:
        sizes: The format, channels, kernel and groups.
        layout: "cpu_tiles", "gpu_tiles": the matrix of each group, one after the other; "canonical": the codes' own tensors.
        data: uint8, one dimension.
        name: Of the format and the sizes, cached: computing them takes longer than a small kernel.
        numbers: See `name`.
        calls: What the operations keep, so that repeated calls take less time.

    Example:
        >>> packed = hb.pack_conv(hb.quantize_conv(torch.randn(8, 32, 3, 3), "q8_0"), 3)
        >>> hb.dequantize(packed).shape
        torch.Size([8, 32, 3, 3])
    """

    sizes: Filter
    layout: str
    data: Tensor
    name: str = field(default="", kw_only=True)
    numbers: tuple[int, ...] = field(default=(), kw_only=True)
    calls: Bounded[Hashable, Any] = field(init=False, repr=False, default_factory=lambda: Bounded(CALLS))

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", str(self.sizes.format))
            object.__setattr__(self, "numbers", self.sizes.numbers)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.sizes, self.layout, self.data)

    def __repr__(self) -> str:
        groups = f", {self.sizes.groups} groups" if self.sizes.groups > 1 else ""
        return f"PackedConv({self.name}, {list(self.shape)}{groups}, {self.layout} on {self.data.device})"

    @property
    def format(self) -> Format:
        return self.sizes.format

    @property
    def codes_format(self) -> Format:
        """The format of the codes; convolutions are stored in the same format on all devices."""
        return self.sizes.format

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[Co, Ci/groups, Kh, Kw]"""
        return (self.sizes.out, self.sizes.channels, *self.sizes.kernel)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device


def groups_of(codes: Codes, sizes: Filter) -> list[Codes]:
    """The matrix of each group, [Co/groups, K]."""
    matrix, n = to_matrix(codes, sizes), sizes.out // sizes.groups
    return [matrix.select(slice(g * n, (g + 1) * n)) for g in range(sizes.groups)]


def join_groups(parts: Sequence[Codes], sizes: Filter) -> Codes:
    """The inverse of `groups_of`."""
    return from_matrix(Codes.joined(parts, torch.cat), sizes)


def unpack(packed: PackedConv) -> Codes:
    """The Codes that `packed` was made from."""
    sizes = packed.sizes
    if packed.layout == CANONICAL:
        return from_canonical_bytes(packed.data, sizes)
    if packed.layout == gpu_tiles.NAME:
        return _unpack_gpu(packed)
    shape, fmt = (sizes.out // sizes.groups, sizes.k), sizes.matrix_format
    parts = [cpu_tiles.unpack(Packed(fmt, shape, cpu_tiles.NAME, data)) for data in packed.data.chunk(sizes.groups)]
    return join_groups(parts, sizes)


def dequantize(packed: PackedConv, dtype: torch.dtype) -> Tensor:
    """The weight that `packed` represents, [Co, Ci/groups, Kh, Kw]."""
    return channels_first(unpack(packed).dequantize(dtype), packed.sizes.kernel)


def canonical_bytes(codes: Codes) -> Tensor:
    """The codes' tensors one after the other, as bytes."""
    return torch.cat([t.contiguous().view(torch.uint8).flatten() for t in codes.tensors().values()])


def from_canonical_bytes(data: Tensor, sizes: Filter) -> Codes:
    """The inverse of `canonical_bytes`."""
    tensors, at = {}, 0
    for name, (dtype, shape) in stored_tensors(sizes.format, sizes.codes_shape).items():
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = data[at : at + size].clone().view(dtype).view(shape)
        at += size
    return Codes.from_tensors(sizes.format, sizes.codes_shape, tensors)


# GPUs: the channels of a tap are padded, so that patches are read 16 bytes at a time


def padded_for_gpu(sizes: Filter) -> Filter:
    """Sizes of the weight that GPUs multiply. In formats without blocks a tap is padded to 4, 8 or a multiple of 16 channels (blocks are
    padded by the layout itself), unless the kernel is a single tap, whose weight is that of a linear layer."""
    if isinstance(sizes.format.block, int) or (sizes.taps == 1 and sizes.groups == 1):
        return sizes
    channels = sizes.channels
    return replace(sizes, channels=4 if channels <= 4 else 8 if channels <= 8 else round_up(channels, 16))


def gpu_image_channels(sizes: Filter) -> int:
    """Channels of the image that GPUs' kernels read: few are padded as the weight's are, so that several taps fit 16 bytes."""
    channels = padded_for_gpu(sizes).channels
    return channels if sizes.groups == 1 and channels <= 16 else sizes.channels * sizes.groups


@functools.lru_cache(maxsize=4096)
def gpu_geometry(sizes: Filter) -> gpu_tiles.Geometry:
    """The geometry of one group's matrix."""
    padded = padded_for_gpu(sizes)
    return gpu_tiles.geometry(padded.matrix_format, (padded.out // padded.groups, padded.k))


def pack_gpu(codes: Codes, sizes: Filter) -> PackedConv:
    """Layout "gpu_tiles", on the device of the codes."""
    padded = padded_for_gpu(sizes)
    if padded != sizes:
        codes = _with_channels(codes, sizes, padded.channels)
    parts = [gpu_tiles.pack(part).data for part in groups_of(codes, padded)]
    return PackedConv(sizes, gpu_tiles.NAME, parts[0] if len(parts) == 1 else torch.cat(parts))


def _unpack_gpu(packed: PackedConv) -> Codes:
    sizes, padded = packed.sizes, padded_for_gpu(packed.sizes)
    shape, fmt = (padded.out // padded.groups, padded.k), padded.matrix_format
    parts = [gpu_tiles.unpack(Packed(fmt, shape, gpu_tiles.NAME, data)) for data in packed.data.chunk(padded.groups)]
    codes = join_groups(parts, padded)
    return codes if padded == sizes else _with_channels(codes, padded, sizes.channels)


def _with_channels(codes: Codes, sizes: Filter, channels: int) -> Codes:
    """Codes [Co, taps * Ci] padded with the code of 0 (with an offset, q = 0) or cut to so many channels per tap."""
    values = codes.values().reshape(sizes.out, sizes.taps, sizes.channels)
    values = _with_more(values[..., :channels], codes, max(0, channels - sizes.channels))
    return Codes.from_values(codes.format, values.reshape(sizes.out, -1), codes.scale, codes.zero)


def taps(codes: Codes, sizes: Filter, *, integer: bool) -> Tensor:
    """Return what kernels of depthwise convolutions multiply by, [Kh * Kw, C]: the codes as int32 if `integer`, else float32 weights."""
    numbers = codes.values().to(torch.int32) if integer else codes.dequantize(torch.float32)
    return numbers.reshape(sizes.out, sizes.taps).T.contiguous()
