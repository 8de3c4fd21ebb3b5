"""int8 in, int8 out: equal to the reference, but next to a tie within the kernel's error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_codes
from support import RUNNABLE, examples, run_linear
from torch import Tensor

from halfbyte import ops
from halfbyte.formats import Codes, Format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.linear import linear
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK, pack

isas = pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)


def run(isa: ISA, x: Tensor, packed: Packed, bias: Tensor | None, clamp: tuple[int, int], **scales: float) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFBYTE_ISA", isa.name)
        kernel = LinearKernel(packed.format, *packed.shape, torch.int8, "int8", "block")
        return run_linear(kernel, x, packed, ops.requantization_table(packed, bias, **scales), clamp)


@isas
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scope", ["channel", "tensor"])
def test_products_are_those_of_the_reference(isa: ISA, bits: int, scope: str) -> None:
    clamps = st.sampled_from([(-128, 127), (0, 127), (-20, 33), (5, 5)])
    zeros = st.integers(-128, 127)

    @settings(max_examples=examples(isa, 25))
    @given(st.integers(1, 20), st.integers(1, 100), st.integers(1, 400), clamps, zeros, zeros, st.booleans(), st.integers(0, 2**16))
    def sweep(m: int, n: int, k: int, clamp: tuple[int, int], in_zero: int, out_zero: int, with_bias: bool, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        codes = random_codes(Format(bits, scope, "none", (torch.float32, torch.float16)[seed % 2]), (n, k), seed)
        x = torch.randint(-128, 128, (m, k + 2), dtype=torch.int8, generator=rng)[:, :k]
        bias = torch.randn(n, generator=rng) * 10 if with_bias else None
        scales = {"in_scale": 0.02, "in_zero": in_zero, "out_scale": 0.003 * k**0.5 * 2**bits, "out_zero": out_zero}
        wanted = reference.qlinear(x, codes, bias, **scales, clamp=clamp)
        assert bool(wanted.agrees(run(isa, x, pack(codes), bias, clamp, **scales)).all())

    sweep()


@isas
@pytest.mark.parametrize("bits", [4, 8])
def test_one_hot_rows_give_the_codes_and_ties_go_to_even(isa: ISA, bits: int) -> None:
    k = 41
    codes = random_codes(Format(bits, "channel", "none", torch.float32), (37, k))
    codes.scale.fill_(1)
    eye = torch.eye(k, dtype=torch.int8)
    same = {"in_scale": 1.0, "in_zero": 0, "out_scale": 1.0, "out_zero": 0}
    assert torch.equal(run(isa, eye, pack(codes), None, (-128, 127), **same), codes.values().T.to(torch.int8))
    assert torch.equal(run(isa, -eye, pack(codes), None, (-128, 127), **same), (-codes.values().T).clamp(max=127).to(torch.int8))
    least = run(isa, eye * -128, pack(codes), None, (-128, 127), **same)
    assert torch.equal(least, (codes.values().T * -128).clamp(-128, 127).to(torch.int8))
    halves = run(isa, eye, pack(codes), None, (-128, 127), **{**same, "out_scale": 2.0})
    assert torch.equal(halves, torch.round(codes.values().T / 2).to(torch.int8))


@isas
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [LONGEST_BLOCK + 40, 65535])
def test_the_largest_sums(isa: ISA, bits: int, k: int) -> None:
    fmt = Format(bits, "channel", "none", torch.float32)
    values = torch.full((3, k), fmt.q_min)
    values[1] = fmt.q_max
    values[2, ::2] = fmt.q_max
    codes = Codes.from_values(fmt, values, torch.full((3, 1), 1e-3))
    x = torch.full((4, k), -128, dtype=torch.int8)
    x[1] = 127
    x[2, ::2] = 127
    scales = {"in_scale": 0.01, "in_zero": 127, "out_scale": k * 2**bits * 1e-5, "out_zero": 3}
    wanted = reference.qlinear(x, codes, None, **scales)
    assert bool(wanted.agrees(run(isa, x, pack(codes), None, (-128, 127), **scales)).all())
    assert len(set(wanted.q.flatten().tolist())) > 4
