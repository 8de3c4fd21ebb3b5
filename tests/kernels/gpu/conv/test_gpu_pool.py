"""Pools of codes on the GPU: what torch's pools of the same numbers give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfbyte.kernels.gpu.conv.pool import pool
from halfbyte.kernels.problem import Window


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dilation"),
    [
        (64, (3, 3), (2, 2), (1, 1), (1, 1)),
        (72, (2, 3), (1, 2), (0, 1), (2, 1)),
        (5, (5, 4), (4, 1), (2, 2), (1, 1)),
    ],
)
def test_largest(
    channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    device: torch.device,
) -> None:
    x = codes(2, channels, 9, 11).clamp(max=-2)  # less than what must not come from outside
    expected = nn.functional.max_pool2d(x.double(), kernel, stride, padding, dilation)
    window = Window(stride, (padding[0], padding[0], padding[1], padding[1]), dilation)
    y = pool(x.to(device), kernel, window, tuple(expected.shape[2:]))  # type: ignore[arg-type]
    assert torch.equal(y.cpu().double(), expected)
    assert y.is_contiguous(memory_format=torch.channels_last)
    floats = x.half() / 7
    floats[1, 2, 3, 4] = torch.nan
    y = pool(floats.to(device), kernel, window, tuple(expected.shape[2:]))  # type: ignore[arg-type]
    wanted = nn.functional.max_pool2d(floats.double(), kernel, stride, padding, dilation)
    assert torch.equal(y.cpu().double().nan_to_num(99), wanted.nan_to_num(99))


@pytest.mark.parametrize("size", [(7, 7), (9, 11)])
def test_mean(size: tuple[int, int], device: torch.device) -> None:
    x, zero = codes(3, 72, *size), -9
    mean = (x.double() - zero).mean((2, 3), keepdim=True)  # far from a tie, or one in both types
    y = pool(x.to(device), size, Window(), (1, 1), zero)
    assert torch.equal(y.cpu().double(), (mean.float().round() + zero).double())
