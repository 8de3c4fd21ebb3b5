"""1-D and 3-D convolutions by the op for images, `halfbyte::conv2d`.

    1-D   lines are images of height 1
    3-D   frames of a video are images of the batch; what lies under the kernel's taps along time is gathered as channels of each frame

`layouts/folding.py` rearranges weights in the same way; transposed.py does the rest of transposed convolutions. Sums over all taps stay in
float32 within the kernel, and bias, residual and clamp are fused as for images. The rest is views and copies of torch, so that the op's
derivatives and tracing are enough. Called by the modules of nn/modules/conv.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.errors import ArgumentError
from halfbyte.layouts.convolution import PackedConv
from halfbyte.layouts.folding import Fold
from halfbyte.ops.conv.functions import conv2d
from halfbyte.ops.conv.images import ConvLayer, channels_last

_Value = TypeVar("_Value")
Sides = tuple[int, int]  # before and after
_Window = tuple[Sides, tuple[Sides, Sides], Sides]  # stride, padding and dilation of images
GATHERED_BYTES = 1 << 28  # a video whose frames take more, with their taps as channels, is computed in pieces


def sides_of(layer: ConvLayer, padding: str | tuple[int, ...]) -> tuple[Sides, ...]:
    """Return the padding of a layer's inputs before and after, along each dimension."""
    if padding == "valid":
        return ((0, 0),) * len(layer.kernel_size)
    if isinstance(padding, str):  # "same"; torch refuses other words
        reach = [(taps - 1) * step for taps, step in zip(layer.kernel_size, layer.dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in reach)
    return tuple((size, size) for size in padding)


def fold_of(layer: ConvLayer, *, transposed: bool = False) -> Fold:
    """Return how a layer's weight becomes one of images."""
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

    sides  zeros before and after the input; where a number is negative, so many inputs are left out
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    sides: tuple[Sides, ...]


def movement_of(layer: ConvLayer, *, zeros: str | tuple[int, ...]) -> Movement:
    """Return how the kernel of a convolution moves; `zeros` is the part of its padding that is zeros."""
    return Movement(layer.stride, layer.dilation, sides_of(layer, zeros))


def pad_by_mode(x: Tensor, layer: ConvLayer) -> Tensor:
    """Pad x [B, C, *size] or [C, *size] by the layer's padding_mode, which is not "zeros".

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


class Conv2dSettings(NamedTuple):
    """How the op for images computes, as in `ops.conv.functions.conv2d`."""

    bias: Tensor | None
    compute: str
    activation: str
    clamp: tuple[float, float] | None = None

    def convolve(self, images: Tensor, packed: PackedConv, window: _Window, residual: Tensor | None) -> Tensor:
        """[B, C, H, W] -> [B, Co, Ho, Wo], channels_last."""
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
    """Return the sizes of the result for inputs [*size]. Raise ArgumentError where the kernel is larger than the padded input."""
    reach = tuple((taps - 1) * dilation + 1 for taps, dilation in zip(fold.steps, move.dilation, strict=True))
    room = [length + sum(sides) - over for length, sides, over in zip(size, move.sides, reach, strict=True)]
    if min(room) < 0:
        raise ArgumentError(
            f"a kernel that reaches over {' x '.join(map(str, reach))} takes an input at least as large, got "
            f"{' x '.join(map(str, size))} with padding {move.sides}"
        )
    return tuple(length // stride + 1 for length, stride in zip(room, move.stride, strict=True))


def convolve(x: Tensor, packed: PackedConv, fold: Fold, move: Movement, settings: Conv2dSettings, residual: Tensor | None = None) -> Tensor:
    """Compute an ordinary convolution in one to three dimensions with a folded weight.

    Args:
        x: [B, C, *size].
        packed: The weight, as `fold` rearranges it.
        fold: How.
        move: Stride, dilation and zeros along each dimension.
        settings: Bias, clamp and how the op computes.
        residual: Added before the clamp, of the result's shape.

    Returns:
        [B, Co, *out], channels together in memory.

    Raises:
        ArgumentError: x has other dimensions or channels, or is smaller than the kernel.
    """
    dims, folded = len(fold.kernel), fold.folded
    channels = packed.sizes.groups * packed.sizes.channels // fold.channels
    if x.dim() != dims + 2 or x.shape[1] != channels:
        shape = ", ".join(["B", str(channels), *(["L"] if dims == 1 else ["D", "H", "W"][-dims:])])
        raise ArgumentError(f"a convolution with a weight of {channels} input channels takes [{shape}], got {list(x.shape)}")
    out_size(x.shape[2:], fold, move)  # raises for a kernel that is too large
    sides = list(move.sides)
    for i in range(dims):
        if i < folded or min(sides[i]) < 0:  # the op for images adds the other zeros itself
            x, sides[i] = _cropped(x, 2 + i, sides[i], padded=i < folded)
    window = _height_width(move.stride[folded:], 1), _height_width(sides[folded:], (0, 0)), _height_width(move.dilation[folded:], 1)
    if dims == 3:
        return _convolve_video(x, packed, fold, move, window, settings, residual)
    if fold.depthwise and fold.phases:
        x = _repeat_channels(x, fold)
    if dims == 2:
        return settings.convolve(x, packed, window, residual)
    lines = None if residual is None else residual.unsqueeze(-2)
    return settings.convolve(x.unsqueeze(-2), packed, window, lines).squeeze(-2)


def _repeat_channels(x: Tensor, fold: Fold) -> Tensor:
    """[B, C, …] -> [B, phases * C, …]: each phase of a depthwise transposed convolution has channels of its own."""
    return x.repeat(1, math.prod(fold.phases), *(1,) * (x.dim() - 2))


def _convolve_video(
    x: Tensor, packed: PackedConv, fold: Fold, move: Movement, window: _Window, settings: Conv2dSettings, residual: Tensor | None
) -> Tensor:
    """Convolve x [B, C, D, H, W], padded along time, frame by frame -> [B, Co, *out]; in pieces where the taps take much memory."""
    frames = _with_taps(x, fold, move)
    if fold.depthwise and fold.phases:
        frames = _repeat_channels(frames, fold)
    pieces = 1
    if frames.numel() > x.numel() and not torch.compiler.is_compiling():  # a traced graph is for other sizes, too
        gathered = frames.numel() * frames.element_size()
        pieces = max(1, min(frames.shape[2], -(-gathered // GATHERED_BYTES)))
    run = partial(_convolve_frames, packed=packed, fold=fold, window=window, settings=settings)
    if pieces == 1:
        return run(frames, residual)
    residuals = [None] * pieces if residual is None else residual.tensor_split(pieces, 2)
    return torch.cat([run(*piece) for piece in zip(frames.tensor_split(pieces, 2), residuals, strict=True)], 2)


def _with_taps(x: Tensor, fold: Fold, move: Movement) -> Tensor:
    """Gather what lies under the taps of the folded dimensions: [B, C, *size] -> [B, C, *size, *taps], a view."""
    if fold.steps[0] > move.stride[0] and x.stride(1) != 1:  # each frame is read several times
        x = channels_last(x)
    for i in range(fold.folded):
        x = x.unfold(2 + i, (fold.steps[i] - 1) * move.dilation[i] + 1, move.stride[i])[..., :: move.dilation[i]]
    return x


def _convolve_frames(
    frames: Tensor, residual: Tensor | None, *, packed: PackedConv, fold: Fold, window: _Window, settings: Conv2dSettings
) -> Tensor:
    """Convolve frames [B, C, T, H, W, *taps] as images -> [B, Co, T, *out]."""
    taps = math.prod(fold.steps[: fold.folded]) if fold.depthwise else 1
    multiply = settings.convolve if taps == 1 else partial(_sum_of_taps, settings, taps)
    images = _images(frames, 1 if fold.depthwise else packed.sizes.groups)
    y = multiply(images, packed, window, None if residual is None else _images(residual, 1))
    videos: Tensor = y.unflatten(0, (frames.shape[0], frames.shape[2]))
    return videos.movedim(1, 2)


def _sum_of_taps(
    settings: Conv2dSettings, taps: int, images: Tensor, packed: PackedConv, window: _Window, residual: Tensor | None
) -> Tensor:
    """Compute a depthwise convolution in 3-D: each tap along time has channels of its own, and results are added in float32."""
    products = Conv2dSettings(None, settings.compute, settings.activation).convolve(images.float(), packed, window, None)
    y: Tensor = products.permute(0, 2, 3, 1).unflatten(-1, (taps, -1)).sum(-2).permute(0, 3, 1, 2)
    if settings.bias is not None:
        y = y + settings.bias.float().view(-1, 1, 1)
    if residual is not None:
        y = y + residual
    return (y if settings.clamp is None else y.clamp(*settings.clamp)).to(images.dtype)


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


def _height_width(values: Sequence[_Value], default: _Value) -> tuple[_Value, _Value]:
    """Return a setting for the height and width of images, from those of up to two dimensions."""
    height, width = (default, default, *values)[-2:]
    return height, width


def _images(x: Tensor, groups: int) -> Tensor:
    """[B, C, T, H, W, *taps] -> [B * T, groups * taps * C / groups, H, W], channels_last"""
    b, c, t, h, w, *taps = x.shape
    parts: Tensor = x.unflatten(1, (groups, c // groups))
    rows = parts.permute(0, 3, 4, 5, 1, *range(6, parts.dim()), 2).reshape(b * t, h, w, math.prod(taps) * c)
    return rows.permute(0, 3, 1, 2)
