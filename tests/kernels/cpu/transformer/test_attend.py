"""Attention of new tokens to a cache, and the exponentials that it and SiLU take, against float64."""

import itertools

import pytest
import torch
from attention import CASES, attended, check, native
from support import RUNNABLE, elementwise

from halfbyte.kernels.cpu.codegen.elementary import EXP_BOUND, exp, relu_squared, silu
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.step_sequence import shares
from halfbyte.kernels.cpu.transformer.attend import AttendSpec, supports

ISAS = [isa for isa in RUNNABLE if isa.arch]


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_the_error_of_exponentials_is_within_its_bound(isa: ISA) -> None:
    x = torch.cat((torch.arange(-87 << 9, 88 << 9) / 2.0**9, torch.zeros(8), torch.logspace(-38, 1, 1 << 12)))
    x = x[: len(x) // 16 * 16]
    found, exact = elementwise(lambda v: exp(v.fn, v), torch.float32, x, isa=isa).double(), x.double().exp()
    assert bool(((found - exact).abs() <= EXP_BOUND * exact).all())
    # A quotient and a sum more, each rounded: 3 * 2^-24; subnormal results are rounded to 2^-149.
    gates = torch.cat((x, -x))
    found, exact = elementwise(lambda v: silu(v.fn, v), torch.float32, gates, isa=isa).double(), torch.nn.functional.silu(gates.double())
    assert bool(((found - exact).abs() <= (EXP_BOUND + 2.0**-22) * exact.abs() + 2.0**-149).all())


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_exponentials_of_what_is_not_finite(isa: ISA) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -88.0]).repeat(4)
    found = elementwise(lambda v: exp(v.fn, v), torch.float32, x, isa=isa)[:4]
    assert bool(found[0].isnan())
    assert found[1] > 1e38
    assert found[2:].tolist() == [0, 0]
    gates = elementwise(lambda v: silu(v.fn, v), torch.float32, x, isa=isa)[:4]
    assert bool(gates[0].isnan())
    assert gates[1] == torch.inf
    assert abs(float(gates[3])) < 1e-35


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_squared_relu(isa: ISA) -> None:
    x = torch.cat((torch.randn(1022) * 100, torch.tensor([0.0, 1e30])))
    found, exact = elementwise(lambda v: relu_squared(v.fn, v), torch.float32, x, isa=isa), torch.relu(x.double()).square()
    assert found[-1] == torch.inf
    assert bool(((found.double() - exact).abs() <= 2.0**-24 * exact)[:-1].all())
    ends = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]).repeat(4)
    found = elementwise(lambda v: relu_squared(v.fn, v), torch.float32, ends, isa=isa)
    assert bool(found[0].isnan())
    assert found[1:4].tolist() == [torch.inf, 0, 0]


@pytest.mark.parametrize("isa", ISAS or RUNNABLE, ids=lambda isa: isa.name)
def test_attention_is_that_of_float64(isa: ISA) -> None:
    for number, case in enumerate(CASES):
        if isa.half_conversions or "f16" not in case:
            check(number, case, native(isa, 1 + number % 2))


def test_one_token_gets_its_own_value_exactly() -> None:
    spec, dim = AttendSpec(16, 2, "f32", normed=False, masked=False), 16
    qkv, rope = torch.randn(1, 1, 4 * dim), torch.ones(1, 1, dim)
    cache = torch.full((1, 1, 1, dim), torch.nan), torch.full((1, 1, 1, dim), torch.nan)
    y = attended(native(current(), 1), spec, qkv, (rope, rope * 0), cache, 0, None, None)
    assert torch.equal(y.view(2, dim), qkv[0, 0, -dim:].expand(2, dim))


def test_what_may_not_be_seen() -> None:
    spec, dim, length = AttendSpec(16, 1, "f32", normed=False, masked=True), 16, 40
    qkv, rope = torch.randn(2, 1, 3 * dim), torch.ones(2, 1, dim)
    keys, values = torch.randn(2, 1, length + 1, dim), torch.randn(2, 1, length + 1, dim)
    keys[0, 0, 3] = torch.nan
    mask = torch.ones(2, 1, length + 1, dtype=torch.bool)
    mask[0, 0, 3] = False
    mask[1] = False
    y = attended(native(current(), 2), spec, qkv, (rope, rope * 0), (keys, values), length, mask, None)
    assert bool(y[0].isfinite().all()), "a NaN that is masked"
    assert bool((y[1] == 0).all()), "nothing to see, as torch has it"
    mask[0, 0, 3] = True
    y = attended(native(current(), 2), spec, qkv, (rope, rope * 0), (keys, values), length, mask, None)
    assert bool(y[0].isnan().all()), "a NaN that is not"


@pytest.mark.parametrize("length", [0, 40])
def test_sinks(length: int) -> None:
    """One that outweighs everything leaves nothing, one of -inf changes nothing, NaN stays in its head; with nothing to see y is 0."""
    dim = 16
    qkv, rope = torch.randn(1, 1, 6 * dim), torch.ones(1, 1, dim)
    kept = torch.randn(2, 1, 1, length + 1, dim)
    none = torch.zeros(1, 1, length + 1, dtype=torch.bool)

    def y(sinks: torch.Tensor | None, mask: torch.Tensor | None = None) -> torch.Tensor:
        spec = AttendSpec(dim, 4, "f32", normed=False, masked=mask is not None, sinks=sinks is not None)
        return attended(native(current(), 1), spec, qkv, (rope, rope * 0), (kept[0], kept[1]), length, mask, None, sinks).view(4, dim)

    plain, found = y(None), y(torch.tensor([1e30, -torch.inf, torch.nan, -1e30]))
    assert bool((found[0] == 0).all())
    assert torch.equal(found[[1, 3]], plain[[1, 3]])
    assert bool(found[2].isnan().all())
    assert bool((y(torch.tensor([0.0, -torch.inf, 3.0, -1e38]), none) == 0).all())


def test_heads_that_are_not_computed_here() -> None:
    assert supports(24, 8, 64) is None
    assert "not a multiple of 8" in (supports(24, 8, 20) or "")
    assert "are not 1 to 16 for each" in (supports(34, 2, 64) or "")
    assert "are not 1 to 16 for each" in (supports(5, 2, 64) or "")


def test_shares_are_all_panels_in_ever_smaller_groups() -> None:
    for panels, threads in itertools.product((0, 1, 2, 3, 48, 80, 1000), (1, 2, 7, 64)):
        cut = shares(panels, threads)
        sizes = [b - a for a, b in itertools.pairwise(cut)]
        assert cut[0] == 0
        assert cut[-1] == panels
        assert sizes == sorted(sizes, reverse=True)
        assert 0 not in sizes
        assert len(sizes) >= min(panels, threads)
