"""3-D and transposed convolutions, by one call of the 2-D op: `layouts/folding.py` says how their weights become one of images.

Taps along time are gathered as channels of each frame, and frames are images of the batch, so sums over all taps stay in float32 within
the kernel, and bias, residual and clamp are fused as they are in 2-D. All of it is views and copies of torch around `halfbyte::conv2d`,
which has derivatives and is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.errors import ArgumentError
from halfbyte.layouts.convolution import PackedConv
from halfbyte.layouts.folding import Fold
from halfbyte.ops.conv.functions import conv2d

_Value = TypeVar("_Value")
Sides = tuple[int, int]
_Window = tuple[Sides, tuple[Sides, Sides], Sides]  # stride, padding and dilation of images
GATHERED_BYTES = 1 << 28  # the most memory of frames with their taps as channels at a time


class Layer(Protocol):
    """What a convolution, quantized or not, says of itself."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    in_channels: int
    out_channels: int

    @property
    def padding_mode(self) -> str: ...


def sides_of(layer: Layer, padding: str | tuple[int, ...]) -> tuple[Sides, ...]:
    """The padding of a layer's inputs before and after each dimension."""
    if padding == "valid":
        return ((0, 0),) * len(layer.kernel_size)
    if isinstance(padding, str):  # "same"; torch refuses other words
        reach = [(taps - 1) * step for taps, step in zip(layer.kernel_size, layer.dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in reach)
    return tuple((size, size) for size in padding)


def fold_of(layer: Layer, *, transposed: bool = False) -> Fold:
    """How a layer's weight becomes one of images."""
    return Fold.of(
        tuple(layer.kernel_size),
        tuple(layer.stride),
        tuple(layer.dilation),
        channels=(layer.in_channels, layer.out_channels),
        groups=layer.groups,
        padded=any(map(any, sides_of(layer, layer.padding))),
        transposed=transposed,
    )


class Movement(NamedTuple):
    """How a kernel moves: along each dimension its stride and dilation, and how many zeros there are before and after; where these are
    negative, so many inputs are left out."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    sides: tuple[Sides, ...]


def movement_of(layer: Layer, *, zeros: str | tuple[int, ...]) -> Movement:
    """How the kernel of a 3-D convolution moves. zeros: its padding with zeros."""
    return Movement(layer.stride, layer.dilation, sides_of(layer, zeros))


def repeated(x: Tensor, layer: Layer) -> Tensor:
    """x [B, C, *size] or [C, *size], padded with its own values, as the layer's padding_mode says."""
    sides, mode = sides_of(layer, layer.padding), layer.padding_mode
    if x.dim() == len(sides) + 1:
        return repeated(x[None], layer)[0]
    most = max((max(pair) - size for pair, size in zip(sides, x.shape[2:], strict=False)), default=0)
    if x.dim() != len(sides) + 2 or (mode != "replicate" and most > (0 if mode == "circular" else -1)):
        than = "of at least" if mode == "circular" else "greater than"
        raise ArgumentError(f"padding_mode {mode!r} takes [B, C, *size] with sizes {than} its padding {layer.padding}, got {list(x.shape)}")
    return functional.pad(x, [size for pair in reversed(sides) for size in pair], mode=mode)


class Epilogue(NamedTuple):
    """What the 2-D op does besides the sums."""

    bias: Tensor | None
    compute: str
    activation: str
    clamp: tuple[float, float] | None = None
    residual: Tensor | None = None

    def convolve(self, images: Tensor, packed: PackedConv, window: _Window, residual: Tensor | None) -> Tensor:
        settings = {
            "residual": residual,
            "compute": self.compute,
            "activation": self.activation,
            "clamp": self.clamp,
            "channels_last": True,
        }
        return conv2d(images, packed, self.bias, *window, **settings)  # type: ignore[arg-type]


def out_size(size: Sequence[int], fold: Fold, move: Movement) -> tuple[int, ...]:
    """The sizes of a result of inputs [*size]. Raises ArgumentError where the kernel is larger than the padded input."""
    reach = tuple((taps - 1) * dilation + 1 for taps, dilation in zip(fold.steps, move.dilation, strict=True))
    room = [length + sum(sides) - over for length, sides, over in zip(size, move.sides, reach, strict=True)]
    if min(room) < 0:
        raise ArgumentError(
            f"a kernel that reaches over {' x '.join(map(str, reach))} takes an input at least as large, got "
            f"{' x '.join(map(str, size))} with padding {move.sides}"
        )
    return tuple(length // stride + 1 for length, stride in zip(room, move.stride, strict=True))


def convolve(x: Tensor, packed: PackedConv, fold: Fold, move: Movement, epilogue: Epilogue) -> Tensor:
    """The ordinary convolution of x [B, C, *size] with a folded weight -> [B, Co, *size], channels together in memory."""
    n, folded = len(fold.kernel), fold.folded
    inputs = packed.sizes.groups * packed.sizes.channels // fold.channels
    if x.dim() != n + 2 or x.shape[1] != inputs:
        raise ArgumentError(
            f"a convolution with a weight of {inputs} input channels takes [B, {inputs}{', D' * (n > 2)}{', H' * (n > 1)}, "
            f"{'W' if n > 1 else 'L'}], got {list(x.shape)}"
        )
    out_size(x.shape[2:], fold, move)  # refuses a kernel that is too large
    sides = list(move.sides)
    for i in range(n):
        if i < folded or min(sides[i]) < 0:
            x, sides[i] = _with_sides(x, 2 + i, sides[i], padded=i < folded)
    if folded and fold.steps[0] > move.stride[0] and x.stride(1) != 1:  # each frame is copied several times
        x = x.contiguous(memory_format=torch.channels_last_3d)
    numbers = x.numel()
    for i in range(folded):
        x = x.unfold(2 + i, (fold.steps[i] - 1) * move.dilation[i] + 1, move.stride[i])[..., :: move.dilation[i]]
    window = _two(move.stride[folded:], 1), _two(sides[folded:], (0, 0)), _two(move.dilation[folded:], 1)
    if fold.depthwise and fold.phases:
        x = x.repeat(1, math.prod(fold.phases), *(1,) * (x.dim() - 2))
    if n < 3:
        flat: Callable[[Tensor], Tensor] = (lambda images: images.unsqueeze(-2)) if n == 1 else lambda images: images
        residual = None if epilogue.residual is None else flat(epilogue.residual)
        y = epilogue.convolve(flat(x), packed, window, residual)
        return y.squeeze(-2) if n == 1 else y

    def run(frames: Tensor, residual: Tensor | None) -> Tensor:
        more, groups = None if residual is None else _images(residual, 1), 1 if fold.depthwise else packed.sizes.groups
        taps = math.prod(fold.steps[:folded]) if fold.depthwise else 1
        multiply = epilogue.convolve if taps == 1 else partial(_sum_of_taps, epilogue, taps)
        y = multiply(_images(frames, groups), packed, window, more)
        videos: Tensor = y.unflatten(0, (frames.shape[0], frames.shape[2]))
        return videos.movedim(1, 2)

    gathered, pieces = x.numel() * x.element_size(), 1
    if not torch.compiler.is_compiling() and x.numel() > numbers:
        pieces = max(1, min(x.shape[2], -(-gathered // GATHERED_BYTES)))
    if pieces == 1:
        return run(x, epilogue.residual)
    residuals = [None] * pieces if epilogue.residual is None else epilogue.residual.tensor_split(pieces, 2)
    return torch.cat([run(*pair) for pair in zip(x.tensor_split(pieces, 2), residuals, strict=True)], 2)


def _sum_of_taps(epilogue: Epilogue, taps: int, images: Tensor, packed: PackedConv, window: _Window, residual: Tensor | None) -> Tensor:
    """A depthwise convolution whose channels are taps of the same ones: sums in float32."""
    each = Epilogue(None, epilogue.compute, epilogue.activation).convolve(images.float(), packed, window, None)
    y: Tensor = each.permute(0, 2, 3, 1).unflatten(-1, (taps, -1)).sum(-2).permute(0, 3, 1, 2)
    for term in (None if epilogue.bias is None else epilogue.bias.float().view(-1, 1, 1), residual):
        y = y if term is None else y + term
    return (y if epilogue.clamp is None else y.clamp(*epilogue.clamp)).to(images.dtype)


def _with_sides(x: Tensor, dim: int, sides: Sides, *, padded: bool) -> tuple[Tensor, Sides]:
    """x without what negative sides leave out, and the zeros that are still to be added; `padded`: which are added."""
    size, (before, after) = x.shape[dim], sides
    first, end = min(max(-before, 0), size), size + min(after, 0)
    total = size + before + after
    x = x.narrow(dim, first, max(end - first, 0))
    before = min(max(before, 0), total)
    after = total - before - x.shape[dim]
    if padded and (before or after):
        x, before, after = functional.pad(x, (*(0, 0) * (x.dim() - 1 - dim), before, after)), 0, 0
    return x, (before, after)


def _two(values: Sequence[_Value], default: _Value) -> tuple[_Value, _Value]:
    """Values for the height and width of images, from those of one or two dimensions, or none."""
    height, width = (default, default, *values)[-2:]
    return height, width


def _images(x: Tensor, groups: int) -> Tensor:
    """[B, C, T, H, W, *taps] -> [B * T, groups * taps * C / groups, H, W], channels_last"""
    b, c, t, h, w, *taps = x.shape
    parts: Tensor = x.unflatten(1, (groups, c // groups))
    rows = parts.permute(0, 3, 4, 5, 1, *range(6, parts.dim()), 2).reshape(b * t, h, w, math.prod(taps) * c)
    return rows.permute(0, 3, 1, 2)


# Transposed convolutions


class _Axis(NamedTuple):
    """One dimension of a transposed convolution. Output o + padding = residue + stride * q of phase m is result q - shift of the ordinary
    convolution, (shift, residue) = divmod(m * dilation, stride).

    before  zeros before the input
    rows    how many q there are
    skip, out  outputs before the first, and how many there are then
    """

    stride: int
    dilation: int
    phases: int
    sides: Sides
    rows: int
    skip: int
    out: int

    @classmethod
    def of(cls, size: int, steps: int, phases: int, stride: int, dilation: int, padding: Sides, out: int) -> _Axis:
        skip = padding[0]
        first, last = skip // stride, (skip + out - 1) // stride
        most = (phases - 1) * dilation // stride
        reach = (steps - 1) * (dilation // math.gcd(stride, dilation))
        sides = reach + most - first, last - (size - 1)
        return cls(stride, dilation, phases, sides, last - first + 1, skip - first * stride, out)

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """For each residue that has one its phase, and where its results begin."""
        most = (self.phases - 1) * self.dilation // self.stride
        found = ((m, *divmod(m * self.dilation, self.stride)) for m in range(self.phases))
        return {residue: (m, most - shift) for m, shift, residue in found}


def transposed_size(size: Sequence[int], layer: Layer, more: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a transposed convolution's result. Raises ArgumentError where one is less than 1."""
    numbers = zip(size, layer.stride, sides_of(layer, layer.padding), layer.dilation, layer.kernel_size, more, strict=True)
    out = tuple((n - 1) * stride - sum(sides) + dilation * (taps - 1) + extra + 1 for n, stride, sides, dilation, taps, extra in numbers)
    if min(out) < 1:
        raise ArgumentError(f"a transposed convolution of {list(size)} with padding {layer.padding} has no result, got sizes {list(out)}")
    return out


def convolve_transposed(
    x: Tensor, packed: PackedConv, fold: Fold, layer: Layer, more: Sequence[int], epilogue: Epilogue, *, channels_last: bool
) -> Tensor:
    """The transposed convolution of x [B, C, *size] with a folded weight -> [B, Co, *size]. more: output_padding."""
    groups, bias = 1 if fold.depthwise else fold.groups, epilogue.bias
    out = transposed_size(x.shape[2:], layer, more)
    numbers = zip(x.shape[2:], fold.steps, fold.phases, layer.stride, layer.dilation, sides_of(layer, layer.padding), out, strict=True)
    axes = [_Axis.of(*sizes) for sizes in numbers]
    if bias is not None:
        each = bias.view(groups, 1, -1).expand(-1, math.prod(fold.phases), -1).reshape(-1)
        epilogue = Epilogue(each, epilogue.compute, epilogue.activation, epilogue.clamp)
    dilation = tuple(axis.dilation // math.gcd(axis.stride, axis.dilation) for axis in axes)
    move = Movement((1,) * len(axes), dilation, tuple(axis.sides for axis in axes))
    y = convolve(x, packed, fold, move, epilogue)
    empty = y.new_zeros(packed.sizes.out // fold.outputs) if bias is None else bias.to(y.dtype)
    if epilogue.clamp is not None:
        empty = empty.clamp(*epilogue.clamp)
    return _interleaved(y, axes, empty.view(groups, -1), channels_last=channels_last)


def _interleaved(y: Tensor, axes: Sequence[_Axis], empty: Tensor, *, channels_last: bool) -> Tensor:
    """y [B, groups * phases * Co / groups, *size], the results of all phases -> [B, Co, *out]; `empty` [groups, Co / groups]: outputs that
    no tap reaches."""
    n, (groups, outputs) = len(axes), empty.shape
    y = y.unflatten(1, (groups, *(axis.phases for axis in axes), outputs))
    for i, axis in enumerate(axes):  # y: [B, groups, *phases from this axis on, Co / groups, *(rows, stride) before it, size, …]
        dim, places = 2 + n + i, axis.places
        if axis.phases == axis.stride and axis.dilation == 1:
            y = y.movedim(2, dim + 1)
            continue
        blank = empty.view(1, groups, *(1,) * (n - 1 - i), outputs, *(1,) * (n + i))
        results = [None if r not in places else y.select(2, places[r][0]).narrow(dim, places[r][1], axis.rows) for r in range(axis.stride)]
        shape = next(row for row in results if row is not None).shape
        y = torch.stack([blank.expand(shape) if row is None else row for row in results], dim + 1)
    sizes = [axis.rows * axis.stride for axis in axes]
    if channels_last:
        y = y.permute(0, *range(3, y.dim()), 1, 2).reshape(y.shape[0], *sizes, groups * outputs).movedim(-1, 1)
    else:
        y = y.reshape(y.shape[0], groups * outputs, *sizes)
    for i, axis in enumerate(axes):
        y = y.narrow(2 + i, axis.skip, axis.out)
    return y
