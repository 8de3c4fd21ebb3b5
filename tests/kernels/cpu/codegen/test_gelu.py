"""GELU, its tanh approximation and tanh in the kernels against float64."""

import math

import pytest
import torch
from support import RUNNABLE, elementwise

from halfbyte.kernels.cpu.codegen.elementary import GELU_BOUND, gelu, gelu_tanh, tanh
from halfbyte.kernels.cpu.codegen.isa import ISA

TINY = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_the_error_is_within_its_bound(isa: ISA) -> None:
    steps = torch.arange(-(1 << 17), 1 << 17) / 2.0**14  # -8 … 8
    sizes = torch.logspace(-38, 38, 1 << 13)
    x = torch.cat((steps, sizes, -sizes, torch.tensor([5.6, -5.6, 0.0, -0.0]).repeat(4)))
    y = elementwise(lambda v: gelu(v.fn, v), torch.float32, x, isa=isa)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    assert bool(((y.double() - exact).abs() <= GELU_BOUND * x.double().abs() + TINY).all())


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_what_is_not_finite(isa: ISA) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]).repeat(4)
    assert elementwise(lambda v: gelu(v.fn, v), torch.float32, x, isa=isa)[:4].nan_to_num(7.0).tolist() == [
        7.0,
        torch.finfo().max,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_tanh_and_the_approximation_by_it(isa: ISA) -> None:
    steps = torch.arange(-(1 << 17), 1 << 17) / 2.0**12  # -32 … 32
    x = torch.cat((steps, torch.tensor([1e30, -1e30, 0.0, -0.0]).repeat(4)))
    y = elementwise(lambda v: tanh(v.fn, v), torch.float32, x, isa=isa)
    assert bool(((y.double() - x.double().tanh()).abs() <= 2.0**-22).all())
    y = elementwise(lambda v: gelu_tanh(v.fn, v), torch.float32, x, isa=isa)
    doubles = x.double()
    exact = doubles * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (doubles + 0.044715 * doubles**3))  # without 1 + tanh, which cancels
    # Three roundings of the exponent 2 u, each of 2^-24 of at most 88, move exp(-2 u), and with it the result, by 88 * 3 * 2^-24 at most,
    # and the other operations by a few units; farther left exp(87) or exp(88) stands for what is larger.
    assert bool(((y.double() - exact).abs() <= (264 + 8) * 2.0**-24 * exact.abs() + math.exp(-87) * doubles.abs() + TINY).all())
