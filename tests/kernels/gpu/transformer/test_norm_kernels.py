"""Norms of rows by kernels of their own, and norms that are added, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float_support import UNIT
from torch import Tensor

from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.transformer import attend, norm, rope
from halfbyte.machine import Gpu

F, H, B = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5


@pytest.fixture
def where(gpu: Gpu, device: torch.device, interpreted: bool) -> tuple[Gpu, torch.device, bool]:
    return gpu, device, interpreted


def normed(x: Tensor, factor: Tensor, unit_offset: bool) -> Tensor:
    """In float64."""
    wide = x.double()
    return wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * (factor.double() + unit_offset)


def bound(y: Tensor, dtype: torch.dtype, interpreted: bool) -> Tensor:
    """The mean of k squares is off by a rounding for each sum of a tree, and the result by a few more and that of its type."""
    unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)  # the interpreter cuts where a GPU rounds
    return (unit + 2.0**-19) * y.abs() + 1e-7


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("m", "k", "dtype"), [(1, 4096, B), (3, 300, H), (2, 1, F), (1, 5000, F)])
def test_a_norm(m: int, k: int, dtype: torch.dtype, unit_offset: bool, where: Any) -> None:
    gpu, device, interpreted = where
    x, factor = (torch.randn(m, k) * 3).to(dtype), (1 + torch.randn(k) / 4).to(dtype)
    out = torch.full((m, k), torch.nan, dtype=dtype, device=device)
    norm.launch(gpu, x.to(device), (factor.to(device), EPS, unit_offset), out)
    expected = normed(x, factor, unit_offset)
    assert bool(((out.cpu().double() - expected).abs() <= bound(expected, dtype, interpreted)).all())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("m", "k", "dtype"), [(1, 4096, B), (3, 300, H), (2, 1, F), (1, 5000, F)])
def test_a_layer_norm(m: int, k: int, dtype: torch.dtype, unit_offset: bool, shifted: bool, where: Any) -> None:
    """What is far from 0 loses its mean: as many bits as that is larger than the deviation, of a float32's 24; the sum of the factor's
    product and the shift is rounded where these are large, and may be small."""
    gpu, device, interpreted = where
    x, factor = (torch.randn(m, k) * 3 + 20).to(dtype), (1 + torch.randn(k) / 4).to(dtype)
    shift = torch.randn(k).to(dtype) if shifted else None
    out = torch.full((m, k), torch.nan, dtype=dtype, device=device)
    bias = None if shift is None else shift.to(device)
    norm.launch(gpu, x.to(device), (factor.to(device), EPS, unit_offset), out, layer_norm=True, bias=bias)
    difference = x.double() - x.double().mean(1, keepdim=True)
    root = (difference.square().mean(1, keepdim=True) + EPS).rsqrt()
    part = difference * root * (factor.double() + unit_offset)
    expected = part if shift is None else part + shift.double()
    # The mean is off by some roundings of a number of 20 in a tree of sums, and so is each difference.
    error = 2.0**-19 * 20 * root * (factor.double() + unit_offset).abs() + 2.0**-19 * part.abs()
    assert bool(((out.cpu().double() - expected).abs() <= bound(expected, dtype, interpreted) + error).all())


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("m", "widths", "dtype"), [(1, (512, 128, 128), B), (3, (60, 20, 20), H), (2, (8, 8, 8), F)])
def test_norms_of_parts_of_a_row(m: int, widths: tuple[int, int, int], dtype: torch.dtype, unit_offset: bool, where: Any) -> None:
    gpu, device, interpreted = where
    x, factors = (torch.randn(m, sum(widths)) * 3).to(dtype), [(1 + torch.randn(k) / 4).to(dtype) for k in widths[:2]]
    out = torch.full_like(x, torch.nan, device=device)
    first, second = ((factor.to(device), EPS, unit_offset) for factor in factors)
    norm.launch_sections(gpu, x.to(device), (first, second), out)
    *parts, rest = x.split(widths, 1)
    found = out.cpu().split(widths, 1)
    for y, part, factor in zip(found[:2], parts, factors, strict=True):
        expected = normed(part, factor, unit_offset)
        assert bool(((y.double() - expected).abs() <= bound(expected, dtype, interpreted)).all())
    assert torch.equal(found[2], rest)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("m", "k", "dtype"), [(1, 2560, B), (3, 300, H), (2, 1, F)])
def test_a_norm_that_is_added(m: int, k: int, dtype: torch.dtype, unit_offset: bool, where: Any) -> None:
    """And the norm of the sum, as it is rounded; a factor of the sum."""
    gpu, device, interpreted = where
    x, residual = ((torch.randn(m, k) * 3).to(dtype) for _ in range(2))
    factors = [(1 + torch.randn(k) / 4).to(dtype) for _ in range(2)]
    first, second = ((factor.to(device), EPS, unit_offset) for factor in factors)
    for then, scale in ((False, None), (True, None), (True, torch.tensor([-0.375], dtype=dtype))):
        h, z = (torch.full((m, k), torch.nan, dtype=dtype, device=device) for _ in range(2))
        of_sum = None if scale is None else scale.to(device)
        norm.launch_added(gpu, x.to(device), first, residual.to(device), h, (second, z) if then else None, of_sum)
        part = normed(x, factors[0], unit_offset)
        expected = (part + residual.double()) * (1.0 if scale is None else float(scale))
        # The sum is rounded where its parts are large, and may be small.
        error = bound(expected, dtype, interpreted) + 2.0**-19 * part.abs() + 2.0**-23 * residual.double().abs()
        assert bool(((h.cpu().double() - expected).abs() <= error).all())
        if then:
            expected = normed(h.cpu(), factors[1], unit_offset)
            assert bool(((z.cpu().double() - expected).abs() <= bound(expected, dtype, interpreted)).all())
        else:
            assert bool(z.isnan().all())


UNLIKE = {
    "strides": ((torch.ones(16, 2)[:, 0], EPS, False), "weights must be contiguous and of one dtype"),
    "dtype": ((torch.ones(16, dtype=H), EPS, False), "weights must be contiguous and of one dtype"),
    "eps": ((torch.ones(16), 1e-6, False), "eps and unit_offset must be equal"),
    "unit_offset": ((torch.ones(16), EPS, True), "eps and unit_offset must be equal"),
}


@pytest.mark.parametrize("kernel", ["rope", "attend", "sections"])
@pytest.mark.parametrize(("of_keys", "reason"), UNLIKE.values(), ids=[*UNLIKE])
def test_two_norms_that_one_kernel_cannot_apply(of_keys: norm.Norm, reason: str, kernel: str, where: Any) -> None:
    """Two query heads and a key head of 16 elements; the kernels read both weights alike, and have one eps."""
    gpu, device, _ = where
    weight, *settings = of_keys
    there = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device).copy_(weight)  # `to` keeps no gaps
    norms = (torch.ones(16, device=device), EPS, False), (there, *settings)
    qkv, cache = torch.ones(1, 64, device=device), (torch.zeros(1, 1, 4, 16, device=device), torch.zeros(1, 1, 4, 16, device=device))
    length = torch.zeros(1, dtype=torch.int64, device=device)
    launches = {
        "rope": lambda: rope.launch(gpu, qkv, None, torch.empty(1, 1, 2, 16, device=device), cache, length, norms),
        "attend": lambda: attend.launch(gpu, qkv, None, cache, length, None, torch.empty(1, 32, device=device), 1.0, 1, norms),
        "sections": lambda: norm.launch_sections(gpu, qkv, norms, torch.empty_like(qkv)),
    }
    with pytest.raises(KernelError, match=reason):
        launches[kernel]()
