"""Pools of codes on the GPU: what torch's pools of the same numbers give."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from aot import Job, compile_all
from torch import nn

from halfbyte.kernels.gpu.conv.pool import pool
from halfbyte.kernels.gpu.runtime.launch import starts_early
from halfbyte.kernels.problem import Window
from halfbyte.machine import Gpu


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


def launch(gpu: Gpu, dtype: str, kernel: int, dilation: int, zero: int | None) -> None:
    """What a pool launches on `gpu`, for images without memory."""
    x = torch.empty(2, 64, 32, 32, dtype=getattr(torch, dtype), device="meta").contiguous(memory_format=torch.channels_last)
    with mock.patch("halfbyte.kernels.gpu.conv.pool.early_after", return_value=starts_early(gpu)):
        pool(x, (kernel, kernel), Window(dilation=(dilation, dilation)), (4, 4), zero)


CASES = [("int8", 3, 1, None), ("int8", 5, 2, None), ("float16", 3, 1, None), ("bfloat16", 3, 2, None), ("int8", 7, 1, -9)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_pools_compile(arch: str) -> None:
    names = ("dtype", "kernel", "dilation", "zero")
    jobs = [Job(f"{__file__}:launch", arch, dict(zip(names, case, strict=True)), wanted="resources") for case in CASES]
    for (binary,), (dtype, _, _, zero) in zip(compile_all(jobs), CASES, strict=True):
        assert binary.spills == 0 or arch == "sm_80", binary.options  # there float16 spills 24 bytes
        if arch == "sm_90" and zero is None:
            assert {"int8": "max.s16x2", "float16": "max.NaN.f16x2", "bfloat16": "max.NaN.bf16x2"}[dtype] in binary.ptx
