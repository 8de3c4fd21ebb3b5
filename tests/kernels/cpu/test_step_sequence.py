"""Steps of chains that change each element in place, against float64."""

import ctypes

import pytest
import torch
from support import RUNNABLE

from halfbyte.kernels.cpu import step_sequence
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.step_sequence import EACH, NORM, Step

EPS = 2.0**-24
EXACT = {"times": lambda x, c: x * c, "over": lambda x, c: x / c, "cap": lambda x, c: c * torch.tanh(x / c)}


@pytest.mark.parametrize("function", EACH)
@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_elements_in_place(function: str, isa: ISA) -> None:
    torch.manual_seed(1)
    for count, threads, constant in ((1, 1, 30.0), (7, 2, 0.3), (16, 3, 7.0), (47, 2, 2.5), (1000, 3, 30.0), (0, 2, 1.0)):
        memory = torch.randn(count + 2) * 20
        x = memory[1:-1]
        if count > 40:
            x[11], x[45] = torch.nan, torch.inf
        ends, wanted = memory[[0, -1]].clone(), EXACT[function](x.double(), torch.tensor(constant).double())
        block = arguments(NORM, compiled(step_sequence.build, Step(function), isa), {"x": x.data_ptr(), "k": count, "eps": (0.0, constant)})
        runtime.runner()(ctypes.addressof(block), threads)
        assert torch.equal(memory[[0, -1]], ends)
        assert torch.equal(x.isnan(), wanted.isnan())
        # One rounding; of a cap that of the quotient, which moves tanh by less than itself, tanh's error and the product's rounding.
        bound = EPS * wanted.abs() if function != "cap" else constant * (2.0**-22 + 2 * EPS)
        there = wanted.isfinite()
        assert bool(((x.double() - wanted).abs() <= bound + 1e-30)[there].all())
        assert torch.equal(x[~there & ~wanted.isnan()].double(), wanted[~there & ~wanted.isnan()])
