"""Steps of chains that change each element in place, and norms, against float64."""

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


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_norms(layer_norm: bool, unit_offset: bool, isa: ISA) -> None:
    """Each kind of norm with and without a unit offset: Gemma has RMSNorms with one, Nemotron LayerNorms."""
    torch.manual_seed(2)
    for rows, k, threads in ((1, 5, 1), (3, 64, 2), (5, 131, 2)):
        x, weight, shift = torch.randn(rows, k) + 0.5, torch.randn(k), torch.randn(k)
        out = torch.full_like(x, torch.nan)
        vectors: dict[str, int | tuple[float, float]] = {"weight": weight.data_ptr(), "shift": shift.data_ptr(), "eps": (1e-5, 0.0)}
        sizes = {"x_stride": 4 * k, "out_stride": 4 * k, "rows": rows, "k": k}
        step = Step("norm", layer_norm=layer_norm, unit_offset=unit_offset)
        block = arguments(
            NORM, compiled(step_sequence.build, step, isa), {"x": x.data_ptr(), "out": out.data_ptr(), **sizes, **vectors}
        )  # fmt: skip
        runtime.runner()(ctypes.addressof(block), threads)
        factor = weight.double() + unit_offset
        if layer_norm:
            wanted = torch.nn.functional.layer_norm(x.double(), (k,), factor, shift.double(), 1e-5)
        else:
            wanted = torch.nn.functional.rms_norm(x.double(), (k,), factor, 1e-5)
        root = (x.double() - x.double().mean(1, keepdim=True) * layer_norm).square().mean(1, keepdim=True).add(1e-5).rsqrt()
        sizes_of_terms = (x.abs() + x.abs().mean(1, keepdim=True)).double() * root * factor.abs() + shift.double().abs() * layer_norm
        # At most k steps of the mean and of the squares round, and a few behind them.
        assert bool(((out.double() - wanted).abs() <= (2 * k + 16) * EPS * sizes_of_terms).all())


def test_a_layer_norm_adds_no_residual() -> None:
    with pytest.raises(AssertionError, match="bias"):
        Step("norm", layer_norm=True, added=True)
