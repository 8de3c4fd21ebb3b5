"""Common to convolutions on all devices: decoding of sizes, validation of arguments, the memory layout of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import stored_tensors
from halfbyte.formats.spec import as_format
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter
from halfbyte.ops import checks
from halfbyte.ops.checks import check_bias, check_clamp, check_residual
from halfbyte.ops.tensors import empty_sum

ACTIVATIONS = (*checks.ACTIVATIONS, "image")
Shape = tuple[int, int, int, int]


class ConvLayer(Protocol):
    """The settings of a convolution, quantized or not, by torch's names."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    in_channels: int
    out_channels: int

    @property
    def padding_mode(self) -> str: ...


def from_numbers(format: str, filter_numbers: Sequence[int], window_numbers: Sequence[int]) -> tuple[Filter, Window]:
    """The Filter and Window from the numbers that custom ops take instead."""
    return filter_from_numbers(format, filter_numbers), Window.from_numbers(window_numbers)


def filter_from_numbers(format: str, filter_numbers: Sequence[int]) -> Filter:
    out, channels, kh, kw, groups = filter_numbers
    return Filter(as_format(format), out, channels, (kh, kw), groups)


def canonical_nbytes(sizes: Filter) -> int:
    """Bytes of the weight in layout "canonical"."""
    return sum(math.prod(size) * dtype.itemsize for dtype, size in stored_tensors(sizes.format, sizes.codes_shape).values())


def out_shape(x: Tensor, sizes: Filter, window: Window) -> Shape:
    """[B, Co, Ho, Wo]"""
    channels = sizes.channels * sizes.groups
    if x.dim() != 4 or x.shape[1] != channels:
        raise ArgumentError(f"a convolution with a weight of {channels} input channels takes [B, {channels}, H, W], got {list(x.shape)}")
    return (x.shape[0], sizes.out, *window.out_size((x.shape[2], x.shape[3]), sizes.kernel))


def check_conv2d(x: Tensor, bias: Tensor | None, residual: Tensor | None, shape: Shape, low: float, high: float) -> None:
    """Check everything but the weight and the arguments of a plan; `shape`: of the result."""
    check_clamp(low, high)
    if bias is not None:
        check_bias(bias, shape[1], x.device)
    if residual is not None:
        check_residual(residual, x, shape)


def check_codes(x: Tensor) -> None:
    if x.dtype != torch.int8:
        raise ArgumentError(f"qconv2d takes int8 images, got {x.dtype}: quantize them first")


def empty_result(x: Tensor, bias: Tensor | None, residual: Tensor | None, shape: Shape, low: float, high: float) -> Tensor:
    """`conv2d` where a size is 0: bias and residual only."""
    total = empty_sum(x, shape, None if bias is None else bias.view(1, -1, 1, 1), residual)
    return channels_last(total.clamp_(low, high).to(x.dtype))


def is_channels_last(x: Tensor) -> bool:
    """Whether torch's own convolution gives a channels_last result for x [B, C, H, W] or [B, C, D, H, W]: by the order of its strides, as
    `Tensor::suggest_memory_format` decides. Where sizes of 1 leave the order open, as in [B, C, 1, 1], it does not."""
    if x.dim() not in (4, 5):
        return False
    shape, strides, least = x.shape, x.stride(), 0
    for dim in (1, *range(x.dim() - 1, 1, -1)):
        if shape[dim] == 0 or strides[dim] < least or strides[1] == 0:
            return False
        least = strides[dim] * shape[dim]
    return shape[0] != 0 and strides[0] >= least != strides[1]


def in_memory_format_of(y: Tensor, x: Tensor | None) -> Tensor:
    """y, the result of a convolution of x, in the memory format that torch gives it: channels_last where x is, or contiguous (x None: of
    lines, [B, C, L])."""
    if x is not None and is_channels_last(x):
        return channels_last(y) if y.dim() == x.dim() else y
    return _contiguous(y)


def channels_last(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] or videos [B, C, D, H, W] with exactly the strides of channels_last, also within torch.vmap, where
    `x.contiguous(memory_format=torch.channels_last)` fails."""
    if x.dim() == 4:
        _, c, h, w = x.shape
        if x.stride() == (h * w * c, 1, w * c, c):
            return x
    return _contiguous(x.movedim(1, -1)).movedim(-1, 1)


def _contiguous(x: Tensor) -> Tensor:
    """Return x with exactly the strides of its shape: contiguous() leaves those of sizes of 1, by which torch tells formats apart."""
    return x.contiguous().view(-1).view(x.shape)
