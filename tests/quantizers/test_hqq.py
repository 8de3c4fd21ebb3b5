"""Half-quadratic quantization: its objective falls, and what it gains where its paper says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.formats import Codes, as_format
from halfbyte.quantizers import absmax, hqq
from halfbyte.quantizers.hqq import shrink

FORMATS = ("int4_g128", "q4_0", "int4_g64_zp", "int4_g64_offset", "q4_1", "int8_channel", "int4_tensor_offset")


def heavy_tailed(n: int = 32, k: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(n, k, generator=generator)
    return torch.where(torch.rand(n, k, generator=generator) < 0.01, 4 * w, w) / 30


def norms(codes: Codes, w: Tensor) -> Tensor:
    """sum(|error|^0.7) of each block, float64."""
    size = codes.format.block_size(w.shape[1]) if codes.format.block != "tensor" else w.numel()
    return (codes.dequantize(torch.float64) - w.double()).abs().pow(0.7).reshape(-1, size).sum(-1)


@pytest.mark.parametrize("name", FORMATS)
def test_the_objective_falls_in_every_block(name: str) -> None:
    w, fmt = heavy_tailed(), as_format(name)
    before, after = norms(absmax(w, fmt), w), norms(hqq(w, fmt), w)
    # 2^-20: the quantizer compares sums of float32 powers. An error of a float32 unit has a power of 0.7 that does not vanish:
    # (2^-24 * 0.13)^0.7 a weight.
    assert bool((after <= before * (1 + 2**-20) + w.shape[1] * 2e-6).all())
    assert float(after.sum()) < 0.995 * float(before.sum())


def test_rounds_of_the_splitting_lower_its_own_objective() -> None:
    """With beta fixed, each half step can only lower |e|^p + beta/2 (e - v)^2; the threshold is the paper's approximation of the first."""
    v, beta = torch.linspace(-3, 3, 601, dtype=torch.float64), 10.0
    e = shrink(v, beta)

    def split(e: Tensor) -> Tensor:
        return e.abs().pow(0.7) + beta / 2 * (e - v).square()

    # It is one step from v towards the minimum: better than e = v wherever it does not stop at 0, and better than 0 for large v.
    moved = e != 0
    assert bool((split(e) < split(v))[moved & (v.abs() > 0.5)].all())
    assert bool((split(e) < split(torch.zeros_like(v)))[v.abs() > 0.7].all())
    assert not e[v.abs() < 0.1 ** (1 / 1.3)].any()  # |v| < |v|^-0.3 / 10
    assert torch.equal(shrink(-v, beta), -e)


def test_a_grid_with_a_zero_moves_it() -> None:
    """Most weights a constant off the grid of the two extremes: least squares of absmax's codes cannot see it, a norm below 1 does."""
    w = torch.full((1, 64), 0.53)
    w[0, 0], w[0, 1] = 0.0, 15.0
    fmt = as_format("int4_g64_offset_f32")
    plain, found = absmax(w, fmt).dequantize(), hqq(w, fmt).dequantize()
    assert float((plain - w)[0, 2:].abs().max()) > 0.4
    assert float((found - w)[0, 2:].abs().max()) < 0.05
