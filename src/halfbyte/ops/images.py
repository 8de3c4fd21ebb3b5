"""What the convolutions of all devices share: sizes written as numbers, shapes of results, the order of images in memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter


def from_numbers(format: str, numbers: Sequence[int], moves: Sequence[int]) -> tuple[Filter, Window]:
    """What the custom ops are given in place of a Filter and a Window."""
    out, channels, kh, kw, groups = numbers
    return Filter(as_format(format), out, channels, (kh, kw), groups), Window.from_numbers(moves)


def depthwise(sizes: Filter) -> bool:
    """Each channel is convolved with one kernel of its own."""
    return sizes.channels == 1 and sizes.groups == sizes.out


def out_shape(x: Tensor, sizes: Filter, window: Window) -> tuple[int, int, int, int]:
    """[B, Co, Ho, Wo]"""
    channels = sizes.channels * sizes.groups
    if x.dim() != 4 or x.shape[1] != channels:
        raise ArgumentError(f"a convolution with a weight of {channels} input channels takes [B, {channels}, H, W], got {list(x.shape)}")
    return (x.shape[0], sizes.out, *window.out_size((x.shape[2], x.shape[3]), sizes.kernel))


def channels_last(x: Tensor) -> Tensor:
    """[B, C, H, W] with exactly the strides of channels_last; torch leaves those of sizes of 1 open."""
    _, c, h, w = x.shape
    if x.stride() == (h * w * c, 1, w * c, c):
        return x
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
