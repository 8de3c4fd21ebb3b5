"""Sums of tensors with scales on the GPU: the same bits as on the CPU."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.gpu.conv import elementwise as on_gpu
from halfbyte.kernels.problem import Combination


def expected(
    a: torch.Tensor, b: torch.Tensor | None, scales: tuple[float, float], offset: float, clamp: tuple[float, float]
) -> torch.Tensor:
    """float32; a product and a sum of float32 are nearly always exact in float64, and rounded once."""
    factors = torch.tensor(scales, dtype=torch.float32).double().tolist()
    total = (a.double() * factors[0] + float(torch.tensor(offset, dtype=torch.float32))).float()
    if b is not None:
        total = (b.double() * factors[1] + total.double()).float()
    return total.clamp(*clamp)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_combine(dtype: torch.dtype, two: bool, device: torch.device) -> None:
    a = torch.randint(-128, 128, (3, 1111), dtype=torch.int8)
    b = torch.randn(3, 1111) * 10 if two else None
    clamp = (-100.0, 90.0)
    y = on_gpu.combine(a.to(device), Combination(dtype, 0.37, -3.5, 0.21, *clamp), None if b is None else b.to(device))
    real = expected(a, b, (0.37, 0.21), -3.5, clamp)
    assert torch.equal(y.cpu(), real.round().to(dtype) if dtype == torch.int8 else real.to(dtype))


def test_nan(device: torch.device) -> None:
    a = torch.tensor([torch.nan, 1.0]).to(device)
    assert on_gpu.combine(a, Combination(torch.int8, 1.0, low=-128.0, high=127.0)).tolist() == [-128, 1]
    assert on_gpu.combine(a, Combination(torch.float32, 1.0, low=0.0, high=6.0)).isnan().tolist() == [True, False]
