"""3-D and transposed convolutions by one call of the op for images, `halfbyte::conv2d`.

    3-D          the frames of a video are images of the batch, and the inputs under the kernel's taps along time are gathered as channels
                 of each frame
    transposed   outputs whose index has the same remainder by the stride are an ordinary convolution; all of them are computed as output
                 channels of one, and interleaved

`layouts/folding.py` rearranges weights in the same way. Sums over all taps stay in float32 within the kernel, and bias, residual and clamp
are fused as for images. All the rest is views and copies of torch, so that the op's derivatives and tracing are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
GATHERED_BYTES = 1 << 28  # of frames with their taps as channels, above which a video is computed in pieces


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
    """How a kernel moves along each dimension.

    sides  how many zeros are added before and after the input. Where a number is negative, so many inputs are left out.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    sides: tuple[Sides, ...]


def movement_of(layer: Layer, *, zeros: str | tuple[int, ...]) -> Movement:
    """How the kernel of a 3-D convolution moves; `zeros` is the part of its padding that is zeros."""
    return Movement(layer.stride, layer.dilation, sides_of(layer, zeros))


def pad_by_mode(x: Tensor, layer: Layer) -> Tensor:
    """Pad x [B, C, *size] or [C, *size] as the layer's padding_mode, which is not "zeros", says.

    Raises:
        ArgumentError: The input is smaller than the padding that it is to fill.
    """
    sides, mode = sides_of(layer, layer.padding), layer.padding_mode
    unbatched = x.dim() == len(sides) + 1
    images = x[None] if unbatched else x
    beyond = max((max(pair) - size for pair, size in zip(sides, images.shape[2:], strict=False)), default=0)
    allowed = {"replicate": math.inf, "circular": 0, "reflect": -1}[mode]  # "reflect" leaves out the edge itself
    if images.dim() != len(sides) + 2 or beyond > allowed:
        than = "of at least" if mode == "circular" else "greater than"
        raise ArgumentError(f"padding_mode {mode!r} takes [B, C, *size] with sizes {than} its padding {layer.padding}, got {list(x.shape)}")
    padded = functional.pad(images, [size for pair in reversed(sides) for size in pair], mode=mode)
    return padded[0] if unbatched else padded


class Epilogue(NamedTuple):
    """What the op for images does besides the sums, and how; as in `ops.conv.functions.conv2d`."""

    bias: Tensor | None
    compute: str
    activation: str
    clamp: tuple[float, float] | None = None

    def convolve(self, images: Tensor, packed: PackedConv, window: _Window, residual: Tensor | None) -> Tensor:
        stride, padding, dilation = window
        return conv2d(
            images,
            packed,
            self.bias,
            stride,
            padding,
            dilation,
            residual=residual,
            compute=self.compute,
            activation=self.activation,
            clamp=self.clamp,
            channels_last=True,
        )


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


def convolve(x: Tensor, packed: PackedConv, fold: Fold, move: Movement, epilogue: Epilogue, residual: Tensor | None = None) -> Tensor:
    """Compute an ordinary convolution in one to three dimensions with a folded weight.

    Args:
        x: [B, C, *size].
        packed: The weight, as `fold` rearranges it.
        fold: How.
        move: Stride, dilation and zeros along each dimension.
        epilogue: Bias, clamp and how the op computes.
        residual: Added before the clamp, of the result's shape.

    Returns:
        [B, Co, *out], channels together in memory.

    Raises:
        ArgumentError: x has other dimensions or channels, or is smaller than the kernel.
    """
    n, folded = len(fold.kernel), fold.folded
    inputs = packed.sizes.groups * packed.sizes.channels // fold.channels
    if x.dim() != n + 2 or x.shape[1] != inputs:
        shape = ", ".join(["B", str(inputs), *(["L"] if n == 1 else ["D", "H", "W"][-n:])])
        raise ArgumentError(f"a convolution with a weight of {inputs} input channels takes [{shape}], got {list(x.shape)}")
    out_size(x.shape[2:], fold, move)  # refuses a kernel that is too large
    sides = list(move.sides)
    for i in range(n):
        if i < folded or min(sides[i]) < 0:  # the op for images adds the other zeros itself
            x, sides[i] = _cropped(x, 2 + i, sides[i], padded=i < folded)
    before = x.numel()
    x = _with_taps(x, fold, move)
    window = _two(move.stride[folded:], 1), _two(sides[folded:], (0, 0)), _two(move.dilation[folded:], 1)
    if fold.depthwise and fold.phases:
        x = x.repeat(1, math.prod(fold.phases), *(1,) * (x.dim() - 2))
    if n == 1:
        lines = None if residual is None else residual.unsqueeze(-2)
        return epilogue.convolve(x.unsqueeze(-2), packed, window, lines).squeeze(-2)
    if n == 2:
        return epilogue.convolve(x, packed, window, residual)
    pieces, gathered = 1, x.numel() * x.element_size()
    if x.numel() > before and not torch.compiler.is_compiling():  # a traced graph is for other sizes, too
        pieces = max(1, min(x.shape[2], -(-gathered // GATHERED_BYTES)))
    run = partial(_of_frames, packed=packed, fold=fold, window=window, epilogue=epilogue)
    if pieces == 1:
        return run(x, residual)
    residuals = [None] * pieces if residual is None else residual.tensor_split(pieces, 2)
    return torch.cat([run(*pair) for pair in zip(x.tensor_split(pieces, 2), residuals, strict=True)], 2)


def _with_taps(x: Tensor, fold: Fold, move: Movement) -> Tensor:
    """Gather what lies under the taps of the folded dimensions: [B, C, *size] -> [B, C, *size, *taps], a view."""
    if fold.folded and fold.steps[0] > move.stride[0] and x.stride(1) != 1:  # each frame is read several times
        x = x.contiguous(memory_format=torch.channels_last_3d)
    for i in range(fold.folded):
        x = x.unfold(2 + i, (fold.steps[i] - 1) * move.dilation[i] + 1, move.stride[i])[..., :: move.dilation[i]]
    return x


def _of_frames(frames: Tensor, residual: Tensor | None, *, packed: PackedConv, fold: Fold, window: _Window, epilogue: Epilogue) -> Tensor:
    """Convolve frames [B, C, T, H, W, *taps] as images -> [B, Co, T, *out]."""
    taps = math.prod(fold.steps[: fold.folded]) if fold.depthwise else 1
    multiply = epilogue.convolve if taps == 1 else partial(_sum_of_taps, epilogue, taps)
    images = _images(frames, 1 if fold.depthwise else packed.sizes.groups)
    y = multiply(images, packed, window, None if residual is None else _images(residual, 1))
    videos: Tensor = y.unflatten(0, (frames.shape[0], frames.shape[2]))
    return videos.movedim(1, 2)


def _sum_of_taps(epilogue: Epilogue, taps: int, images: Tensor, packed: PackedConv, window: _Window, residual: Tensor | None) -> Tensor:
    """A depthwise convolution in 3-D: each tap along time has channels of its own, and results are added in float32."""
    of_taps = Epilogue(None, epilogue.compute, epilogue.activation).convolve(images.float(), packed, window, None)
    y: Tensor = of_taps.permute(0, 2, 3, 1).unflatten(-1, (taps, -1)).sum(-2).permute(0, 3, 1, 2)
    for term in (None if epilogue.bias is None else epilogue.bias.float().view(-1, 1, 1), residual):
        y = y if term is None else y + term
    return (y if epilogue.clamp is None else y.clamp(*epilogue.clamp)).to(images.dtype)


def _cropped(x: Tensor, dim: int, sides: Sides, *, padded: bool) -> tuple[Tensor, Sides]:
    """Leave out inputs where sides are negative, and add zeros if `padded`.

    A negative side may reach beyond all inputs into the zeros of the other one: of 2 inputs with sides (5, -3), the last 3 of 7 are left
    out, which are both inputs and a zero, so that 4 zeros remain.

    Returns:
        x, and the zeros that are still to be added before and after it.
    """
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
    """One dimension of a transposed convolution as an ordinary one of all phases.

    Tap k = m + phases * j of phase m adds to outputs o with o + padding = i * stride + k * dilation. With
    (shift, residue) = divmod(m * dilation, stride), result number q - shift of the ordinary convolution of phase m is
    output o = residue + stride * q - padding. With stride 2, kernel 3, dilation 1 and padding 1 there are two phases: taps 0 and 2 (m = 0,
    residue 0) give outputs 1, 3, 5, …, and tap 1 (m = 1, residue 1) gives outputs 0, 2, 4, ….

    sides   zeros before and after the input of the ordinary convolution; negative: inputs that are left out
    rows    how many q there are for each residue
    skip    interleaved results before the first output
    out     the size of the output
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
        first, last = padding[0] // stride, (padding[0] + out - 1) // stride  # q of the first and of the last output
        reach = (steps - 1) * (dilation // math.gcd(stride, dilation))  # of the kernel of one phase
        sides = reach + _largest_shift(phases, dilation, stride) - first, last - (size - 1)
        return cls(stride, dilation, phases, sides, last - first + 1, padding[0] - first * stride, out)

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """The phase of each residue that has one, and where its results begin."""
        largest = _largest_shift(self.phases, self.dilation, self.stride)
        found = ((m, *divmod(m * self.dilation, self.stride)) for m in range(self.phases))
        return {residue: (m, largest - shift) for m, shift, residue in found}


def _largest_shift(phases: int, dilation: int, stride: int) -> int:
    """The shift of the last phase: so much earlier the ordinary convolution begins, for its results."""
    return (phases - 1) * dilation // stride


def transposed_size(size: Sequence[int], layer: Layer, output_padding: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a transposed convolution's result. Raises ArgumentError where one is less than 1."""
    numbers = zip(size, layer.stride, sides_of(layer, layer.padding), layer.dilation, layer.kernel_size, output_padding, strict=True)
    out = tuple((n - 1) * stride - sum(sides) + dilation * (taps - 1) + extra + 1 for n, stride, sides, dilation, taps, extra in numbers)
    if min(out) < 1:
        raise ArgumentError(f"a transposed convolution of {list(size)} with padding {layer.padding} has no result, got sizes {list(out)}")
    return out


def convolve_transposed(
    x: Tensor, packed: PackedConv, fold: Fold, layer: Layer, output_padding: Sequence[int], epilogue: Epilogue, *, channels_last: bool
) -> Tensor:
    """Compute a transposed convolution of x [B, C, *size] with a folded weight -> [B, Co, *out].

    Raises:
        ArgumentError: x has other dimensions or channels, or the result would be empty.
    """
    if x.dim() != len(fold.kernel) + 2:
        raise ArgumentError(f"a transposed convolution in {len(fold.kernel)} dimensions takes [B, C, *size], got {list(x.shape)}")
    groups, bias = 1 if fold.depthwise else fold.groups, epilogue.bias
    out = transposed_size(x.shape[2:], layer, output_padding)
    numbers = zip(x.shape[2:], fold.steps, fold.phases, layer.stride, layer.dilation, sides_of(layer, layer.padding), out, strict=True)
    axes = [_Axis.of(*sizes) for sizes in numbers]
    if bias is not None:
        of_phases = bias.view(groups, 1, -1).expand(-1, math.prod(fold.phases), -1).reshape(-1)
        epilogue = epilogue._replace(bias=of_phases)
    dilation = tuple(axis.dilation // math.gcd(axis.stride, axis.dilation) for axis in axes)
    move = Movement((1,) * len(axes), dilation, tuple(axis.sides for axis in axes))
    y = convolve(x, packed, fold, move, epilogue)
    empty = y.new_zeros(packed.sizes.out // fold.outputs) if bias is None else bias.to(y.dtype)
    if epilogue.clamp is not None:
        empty = empty.clamp(*epilogue.clamp)
    return _interleaved(y, axes, empty.view(groups, -1), channels_last=channels_last)


def _interleaved(y: Tensor, axes: Sequence[_Axis], empty: Tensor, *, channels_last: bool) -> Tensor:
    """Interleave the results of all phases, [B, groups * phases * Co / groups, *size] -> [B, Co, *out].

    One axis after the other, its phases, a dimension of their own, become a dimension of residues behind that of its results. `empty`
    [groups, Co / groups] is the value of outputs that no tap reaches.
    """
    n, (groups, outputs) = len(axes), empty.shape
    y = y.unflatten(1, (groups, *(axis.phases for axis in axes), outputs))
    for i, axis in enumerate(axes):  # y: [B, groups, *phases from this axis on, Co / groups, *(rows, stride) before it, size, …]
        dim, places = 2 + n + i, axis.places
        if axis.phases == axis.stride and axis.dilation == 1:
            y = y.movedim(2, dim + 1)
            continue
        blank = empty.view(1, groups, *(1,) * (n - 1 - i), outputs, *(1,) * (n + i))
        of_residues = {residue: y.select(2, phase).narrow(dim, start, axis.rows) for residue, (phase, start) in places.items()}
        shape = next(iter(of_residues.values())).shape
        y = torch.stack([of_residues.get(residue, blank.expand(shape)) for residue in range(axis.stride)], dim + 1)
    sizes = [axis.rows * axis.stride for axis in axes]
    if channels_last:
        y = y.permute(0, *range(3, y.dim()), 1, 2).reshape(y.shape[0], *sizes, groups * outputs).movedim(-1, 1)
    else:
        y = y.reshape(y.shape[0], groups * outputs, *sizes)
    for i, axis in enumerate(axes):
        y = y.narrow(2 + i, axis.skip, axis.out)
    return y
