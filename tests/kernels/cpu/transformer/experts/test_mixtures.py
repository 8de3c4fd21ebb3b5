"""Mixtures of experts in one call on a CPU: against float64, and against what their parts give."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.formats import Codes
from halfbyte.kernels import crossing
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.step_sequence import PRODUCT, StepSequence
from halfbyte.kernels.cpu.transformer.experts import plan as experts_plan
from halfbyte.kernels.cpu.transformer.experts import steps as experts
from halfbyte.ops.grouped import grouped_linear
from halfbyte.ops.transformer.experts import Clamped, Experts, Mixture, SharedExpert
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import TensorAddresses, Weight

ROUNDING = 2.0**-24
Biases = tuple[Tensor | None, Tensor | None]


def stacks(fmt: str, experts: int, k: int, inner: int, compute: str) -> tuple[list[Codes], list[Weight]]:
    """Gates and what they are for, and down."""
    sizes = (experts, 2 * inner, k), (experts, k, inner)
    codes = [ops.quantize(torch.randn(size) / size[2] ** 0.5, fmt) for size in sizes]
    return codes, [Weight(ops.pack(one), None, compute, "block") for one in codes]


class Sum:
    """A sum in float64, and what the absolute values of all that enters it come to: a kernel's rounding is a part of that."""

    def __init__(self, y: Tensor, size: Tensor) -> None:
        self.y, self.size = y, size

    @classmethod
    def gated(cls, gate_up: Tensor, down: Tensor, x: Tensor, biases: Biases = (None, None), clamped: Clamped | None = None) -> Sum:
        """down · (silu(gate) * up) + bias of a row; the slope of silu is 1.1 at most. Or of clamped gates, whose slope is as much."""
        first, last = (None if bias is None else bias.double() for bias in biases)
        both, sizes = gate_up @ x, gate_up.abs() @ x.abs()
        if first is not None:
            both, sizes = both + first, sizes + first.abs()
        if clamped is None:
            (gate, up), (gates, ups) = both.chunk(2), sizes.chunk(2)
            inner = torch.nn.functional.silu(gate)
        else:
            gate, up = both[::2].clamp(max=clamped.limit), both[1::2].clamp(-clamped.limit, clamped.limit) + 1
            gates, ups = sizes[::2], sizes[1::2] + 1
            inner = gate * torch.sigmoid(clamped.alpha * gate)
        y, size = down @ (inner * up), down.abs() @ (1.1 * gates * up.abs() + inner.abs() * ups + (inner * up).abs())
        return cls(y, size) if last is None else cls(y + last, size + last.abs())


def halved(h: Tensor, half: Experts, codes: list[Codes], common: list[Codes] | None) -> Sum:
    """What an `Experts` gives for rows h."""
    stack = [one.dequantize().double() for one in codes]
    x, norm = h.double(), half.pre_norm
    x = x - x.mean(-1, keepdim=True) if norm.layer_norm else x
    x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (norm.weight.double() + norm.unit_offset)
    x = x if norm.bias is None else x + norm.bias.double()
    router = half.router.double()
    y, size = h.double().clone(), h.double().abs()
    for r, row in enumerate(x):
        logits = router @ row + (0 if half.router_bias is None else half.router_bias.double())
        wrong = 2 * ROUNDING * (len(row) + 8) * float((router.abs() @ row.abs()).max())  # of a logit, generously
        steepest = 0.5 if half.scores else 2  # what scores change by with two logits
        scores = {"": logits, "sigmoid": logits.sigmoid(), "softmax": logits.softmax(0)}[half.scores]
        others = scores if half.correction_bias is None else scores + half.correction_bias
        chosen = others.topk(half.top_k).indices
        least = float(others[chosen].min())
        others = others.clone()
        others[chosen] = -torch.inf
        assert len(logits) == half.top_k or least - float(others.max()) > steepest * wrong, "a tie: take another seed"
        shares = scores if half.scores else logits.softmax(0)
        weights = half.scaling_factor * shares[chosen] / (shares[chosen].sum() if half.norm_topk else 1)
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            up_bias, down_bias = (None if weight.bias is None else weight.bias[e] for weight in (half.gate_up, half.down_proj))
            one = Sum.gated(stack[0][e], stack[1][e], row, (up_bias, down_bias), half.clamped)
            y[r] += weight * one.y
            size[r] += weight * (one.size + 2 * wrong / ROUNDING / (len(row) + 8) * one.y.abs())
        if half.shared_expert is not None and common is not None:
            gate_up, down = (one.dequantize().double() for one in common)
            one, gate = Sum.gated(gate_up, down, row), half.shared_expert.gate
            y[r] += one.y if gate is None else torch.sigmoid(gate.double() @ row) * one.y
            size[r] += one.size + one.y.abs()
    return Sum(y, size)


def run(half: Experts, h: Tensor, threads: int) -> Tensor:
    tensors, out = TensorAddresses(), torch.full_like(h, torch.nan)
    half.check()
    assert half.why_not() is None
    tensors.refresh()
    plan: Any = half.native(tensors).plan(len(h), threads, h.data_ptr())
    plan.set_addresses(out.data_ptr())
    for _ in range(2):  # the second one finds the memory as the first one left it
        StepSequence(plan.blocks, threads).run()
    return out


CASES = [
    # E, T, K, I, rows, of the shared expert
    (4, 2, 64, 32, 1, 0),
    (2, 1, 72, 64, 3, 0),
    (16, 4, 130, 96, 5, 0),
    (64, 8, 96, 32, 8, 0),
    (7, 7, 33, 32, 2, 64),
    (9, 3, 100, 64, 1, 32),
]


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0", "int4_g128_zp", "int4_g20_zp", "int8_channel", "int6_g16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_half_against_float64(fmt: str, case: tuple[int, ...]) -> None:
    experts, chosen, k, inner, rows, common = case
    torch.manual_seed(5)
    codes, weights = stacks(fmt, experts, k, inner, "float")
    shared, of_all = None, None
    if common:
        of_all = [ops.quantize(torch.randn(size) / size[1] ** 0.5, fmt) for size in ((2 * common, k), (k, common))]
        shared = SharedExpert(*(Weight(ops.pack(one), None, "float", "block") for one in of_all), torch.randn(k) / k**0.5)
    before, h = Norm(torch.rand(k) + 0.5, 1e-5), torch.randn(rows, k)
    for normalized, threads in ((True, 2), (False, 1), (True, 3)):
        half = Experts(weights[0], weights[1], 3 * torch.randn(experts, k) / k**0.5, chosen, normalized, before, shared)
        expected = halved(h, half, codes, of_all)
        # Each product is rounded in each of its terms, and once for each element of the sums that it enters, in all.
        bound = ROUNDING * (2 * k + 2 * inner + 2 * common + 64) * expected.size
        assert ((run(half, h, threads) - expected.y).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["unit_offset", "layer_norm"])
def test_norms_of_other_kinds(kind: str, rows: int) -> None:
    """With a shared expert, whose products have their own norm of the same rows."""
    k, inner = 96, 64
    torch.manual_seed(13)
    codes, weights = stacks("q8_0", 6, k, inner, "float")
    of_all = [ops.quantize(torch.randn(size) / size[1] ** 0.5, "q8_0") for size in ((2 * inner, k), (k, inner))]
    shared = SharedExpert(*(Weight(ops.pack(one), None, "float", "block") for one in of_all), torch.randn(k) / k**0.5)
    norm = Norm(torch.rand(k) + 0.5, 1e-5, unit_offset=kind == "unit_offset")
    if kind == "layer_norm":
        norm = norm._replace(layer_norm=True, bias=torch.randn(k))
    half, h = Experts(*weights, 3 * torch.randn(6, k) / k**0.5, 2, True, norm, shared), torch.randn(rows, k) + 1
    expected = halved(h, half, codes, of_all)
    # As in `test_a_half_against_float64`; the mean that is subtracted adds a rounding of its own.
    bound = ROUNDING * (3 * k + 4 * inner + 64) * expected.size
    assert ((run(half, h, 2) - expected.y).abs() <= bound).all()


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_and_corrections(scores: str, case: tuple[int, ...]) -> None:
    """A correction decides on the choice, not on weights; what all rows share has no gate."""
    experts, chosen, k, inner, rows, common = case
    torch.manual_seed(13)
    codes, weights = stacks("q8_0", experts, k, inner, "float")
    shared, of_all = None, None
    if common:
        of_all = [ops.quantize(torch.randn(size) / size[1] ** 0.5, "q8_0") for size in ((2 * common, k), (k, common))]
        shared = SharedExpert(*(Weight(ops.pack(one), None, "float", "block") for one in of_all), None)
    before, h, router = Norm(torch.rand(k) + 0.5, 1e-5), torch.randn(rows, k), 3 * torch.randn(experts, k) / k**0.5
    for normalized, threads, correction in ((True, 2, torch.randn(experts)), (False, 1, torch.randn(experts)), (True, 3, None)):
        half = Experts(*weights, router, chosen, normalized, before, shared, scores=scores, correction_bias=correction, scaling_factor=2.5)
        expected = halved(h, half, codes, of_all)
        bound = ROUNDING * (2 * k + 2 * inner + 2 * common + 64) * expected.size
        assert ((run(half, h, threads) - expected.y).abs() <= bound).all()


@pytest.mark.parametrize("fmt", ["q4_0", "mxfp4", "int8_channel"])
@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_gates_that_are_clamped_and_biases(fmt: str, case: tuple[int, ...]) -> None:
    """Of gpt-oss: of some of the gates and of what they are for the limit counts."""
    experts, chosen, k, inner, rows, _ = case
    torch.manual_seed(11)
    codes, (up, down) = stacks(fmt, experts, k, inner, "float")
    up, down = up._replace(bias=torch.randn(experts, 2 * inner)), down._replace(bias=torch.randn(experts, k))
    before, h = Norm(torch.rand(k) + 0.5, 1e-5), torch.randn(rows, k)
    router, bias = 3 * torch.randn(experts, k) / k**0.5, 2 * torch.randn(experts)
    for threads in (1, 2, 3):
        half = Experts(up, down, router, chosen, True, before, None, bias, Clamped(1.702, 1.2))
        expected = halved(h, half, codes, None)
        assert ((run(half, h, threads) - expected.y).abs() <= ROUNDING * (2 * k + 2 * inner + 64) * expected.size).all()


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("clamped", [None, Clamped(1.7, 7.0)])
def test_an_expert_whose_logit_is_no_number(normalized: bool, clamped: Clamped | None) -> None:
    """It is the largest, as torch's topk has it: all weights of the rows are NaN then."""
    _, weights = stacks("q4_0", 8, 64, 32, "int8")
    for at in (0, 3, 7):
        for chosen, rows in ((1, 1), (3, 4), (8, 2)):
            router = torch.randn(8, 64)
            router[at, 5] = torch.nan
            half = Experts(*weights, router, chosen, normalized, Norm(torch.ones(64), 1e-6), clamped=clamped)
            assert run(half, torch.randn(rows, 64), 2).isnan().all()
            bias = torch.zeros(8)
            bias[at] = torch.nan
            half = half._replace(router=torch.randn(8, 64), router_bias=bias)
            for scores in ("", "sigmoid", "softmax"):
                assert run(half._replace(scores=scores), torch.randn(rows, 64), 2).isnan().all()


def test_gates_that_are_no_numbers() -> None:
    """Limits keep NaN, and leave nothing of what is infinite."""
    _, weights = stacks("q8_0", 4, 32, 32, "float")
    x, ids, shares = torch.randn(4, 32), torch.tensor([[0], [1], [2], [3]]), torch.ones(4, 1)
    up, down = weights
    biases = torch.zeros(4, 64)
    plain = Mixture(up._replace(bias=biases), down, Clamped(1.7, 7.0))(x, ids, shares)
    biases[0, 6], biases[1, 7], biases[2, 6], biases[2, 9] = torch.nan, torch.nan, torch.inf, -torch.inf
    y = Mixture(up._replace(bias=biases), down, Clamped(1.7, 7.0))(x, ids, shares)
    assert y[:2].isnan().all()
    assert y[2].isfinite().all()
    assert not torch.equal(y[2], plain[2])
    assert torch.equal(y[3], plain[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_of_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    codes, weights = stacks("q4_0", 12, 70, 32, "float")
    router = (3 * torch.randn(12, 70) / 70**0.5).to(dtype)
    half = Experts(weights[0], weights[1], router, 3, True, Norm(torch.rand(70).to(dtype), 1e-6))
    h = torch.randn(3, 70)
    expected = halved(h, half, codes, None)
    assert ((run(half, h, 2) - expected.y).abs() <= ROUNDING * (2 * 70 + 64 + 64) * expected.size).all()


def test_of_equal_logits_the_first() -> None:
    """All of a row's are equal, and each expert gives another number."""
    codes, weights = stacks("q8_0", 6, 32, 32, "float")
    half = Experts(weights[0], weights[1], torch.zeros(6, 32), 2, True, Norm(torch.ones(32), 1e-6))
    h = torch.randn(1, 32)
    x = (h.double() * (h.double().square().mean() + 1e-6).rsqrt())[0]
    both = [Sum.gated(*(one.dequantize().double()[e] for one in codes), x) for e in (0, 1)]
    y, size = h[0] + sum(one.y for one in both) / 2, h[0].abs() + sum(one.size for one in both)
    assert ((run(half, h, 2)[0] - y).abs() <= ROUNDING * 200 * size).all()


def test_rows_that_are_no_numbers_stay_alone() -> None:
    _, weights = stacks("q4_0", 8, 64, 32, "int8")
    half = Experts(weights[0], weights[1], torch.randn(8, 64), 3, True, Norm(torch.ones(64), 1e-6))
    h = torch.randn(4, 64)
    expected = run(half, h, 2)
    h[1, 3], h[3, 0] = torch.nan, torch.inf
    y = run(half, h, 2)
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
    assert y[[1, 3]].isnan().all()


def test_the_same_bits_however_many_threads_and_rows() -> None:
    torch.manual_seed(8)
    _, weights = stacks("q4_0", 8, 96, 64, "int8")
    half = Experts(weights[0], weights[1], torch.randn(8, 96), 3, True, Norm(torch.rand(96), 1e-6))
    h = torch.randn(6, 96)
    expected = torch.cat([run(half, row, 1) for row in h.split(1)])
    for threads in (1, 2, 5):
        assert torch.equal(run(half, h, threads), expected)


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 150), st.integers(1, 3)),
    tokens=st.integers(1, 9),
    top=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=20, deadline=None)
def test_given_ids_and_weights(sizes: tuple[int, int, int], tokens: int, top: int, seed: int) -> None:
    """An expert may come twice."""
    torch.manual_seed(seed)
    experts, k, panels = sizes
    name = ("q4_0", "int8_channel_zp", "int4_g20")[seed % 3]
    codes, weights = stacks(name, experts, k, 32 * panels, "float")
    biases = torch.randn(experts, 64 * panels), torch.randn(experts, k)
    biased = seed % 2 == 1
    clamped = Clamped(1.7, 0.8) if seed % 4 > 1 else None
    mixture = Mixture(*(w._replace(bias=b if biased else None) for w, b in zip(weights, biases, strict=True)), clamped)
    x, ids, shares = torch.randn(tokens, k), torch.randint(experts, (tokens, top)), torch.rand(tokens, top)
    expected, size = torch.zeros(tokens, k).double(), torch.zeros(tokens, k).double()
    up, down = (one.dequantize().double() for one in codes)
    for r in range(tokens):
        for e, share in zip(ids[r].tolist(), shares[r], strict=True):
            row = x[r].double()
            one = Sum.gated(up[e], down[e], row, (biases[0][e], biases[1][e]) if biased else (None, None), clamped)
            expected[r] += share * one.y
            size[r] += share * one.size
    for ids_of in (ids, ids.int()):
        y = mixture(x, ids_of, shares)
        assert ((y - expected).abs() <= ROUNDING * (2 * k + 64 * panels + 64) * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_as_by_grouped_linear(dtype: torch.dtype) -> None:
    """A code that flips moves an output by 1/127 of the largest activation times a weight, of which there are few; results are rounded."""
    torch.manual_seed(9)
    _, weights = stacks("q4_0", 8, 128, 64, "int8")
    x, ids, shares = torch.randn(5, 128).to(dtype), torch.randint(8, (5, 3)), torch.rand(5, 3)
    y = Mixture(*weights)(x, ids, shares)
    assert y.dtype == dtype
    gate, up = grouped_linear(x.float(), weights[0].packed, ids, compute="int8").chunk(2, -1)
    inner = grouped_linear(torch.nn.functional.silu(gate) * up, weights[1].packed, ids, compute="int8")
    expected = (inner * shares.unsqueeze(-1)).sum(1)
    allowed = 2e-3 + {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert float((y.float() - expected).norm()) <= allowed * float(expected.norm())


def test_what_is_refused() -> None:
    _, (up, down) = stacks("q4_0", 4, 64, 32, "auto")
    mixture, x, ids = Mixture(up, down), torch.randn(2, 64), torch.tensor([[0, 3], [1, 2]])
    with pytest.raises(ArgumentError, match=re.escape("expert ids lie in 0 … 3, got 0 … 4")):
        mixture(x, ids + torch.tensor([0, 1]), torch.ones(2, 2))
    with pytest.raises(ArgumentError, match=r"these experts take on the CPU x \[M, 64\]"):
        mixture(x[:, 1:], ids, torch.ones(2, 2))
    with pytest.raises(ArgumentError, match=r"these experts take on the CPU x \[M, 64\]"):
        mixture(x, ids, torch.ones(2, 1))
    with pytest.raises(ArgumentError, match=r"experts have stacks \[E, 2 I, K\] and \[E, K, I\]"):
        Mixture(down, up)
    _, odd = stacks("q4_0", 4, 64, 40, "auto")
    assert Mixture(*odd).for_few_rows(ids) is None, "40 gates are not whole panels of 32"
    norm = Norm(torch.ones(64), 1e-6)
    for half in (Experts(up, down, torch.ones(3, 64), 2, True, norm), Experts(up, down, torch.ones(4, 64), 5, True, norm)):
        with pytest.raises(ArgumentError, match="a row chooses 1 to 4 of 4 experts by a router"):
            half.check()
    half = Experts(up, down, torch.ones(4, 64), 2, True, norm)
    with pytest.raises(ArgumentError, match="a row chooses 1 to 4 of 4 experts by a router"):
        half._replace(scores="sigmoid", correction_bias=torch.ones(3)).check()
    for wrong in (half._replace(scores="tanh"), half._replace(correction_bias=torch.ones(4))):
        with pytest.raises(ArgumentError, match="scores are '' or 'sigmoid' or 'softmax', and what has a correction has scores, got"):
            wrong.check()


def test_threads_of_a_pool_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread: steps run one after the other, as a process that was forked has it."""
    torch.manual_seed(10)
    _, weights = stacks("q4_0", 4, 64, 32, "int8")
    x, ids, shares = torch.randn(3, 64), torch.randint(4, (3, 2)), torch.rand(3, 2)
    expected = Mixture(*weights)(x, ids, shares)
    monkeypatch.setattr(experts_plan, "WORK_A_THREAD", 1)
    for threads in (1, 2):
        monkeypatch.setattr(runtime, "threads", lambda threads=threads: threads)
        assert torch.equal(Mixture(*weights)(x, ids, shares), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "clamped"), [(1, None), (1, Clamped(1.7, 7.0)), (4, None)])
def test_rows_that_another_device_stores(rows: int, clamped: Clamped | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call waits for the word that rows are there, and says when y is: again and again, bit for bit as when all is given at once."""
    torch.manual_seed(11)
    monkeypatch.setattr(experts_plan, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: threads)
    _, weights = stacks("q4_0", 6, 64, 96, "int8")
    mixture, flags = Mixture(*weights, clamped), torch.zeros(crossing.WORDS, dtype=torch.int64)
    x, ids, shares, y = torch.zeros(rows, 64), torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 2), torch.empty(rows, 64)
    for number in range(1, 5):
        given, chosen, of_given = torch.randn(rows, 64), torch.randint(6, (rows, 2)), torch.rand(rows, 2)
        x.fill_(torch.nan)
        y.fill_(torch.nan)
        call = threading.Thread(target=mixture.serve, args=(x, ids, shares, y, flags))
        call.start()
        time.sleep(0.01)
        assert call.is_alive()
        assert int(flags[crossing.DONE]) == number - 1
        for target, source in ((x, given), (ids, chosen), (shares, of_given)):
            target.copy_(source)
        flags[crossing.READY] = number
        call.join(10)
        assert not call.is_alive()
        assert torch.equal(y, mixture(given, chosen, of_given))
        assert [int(flags[word]) for word in (crossing.DONE, crossing.FAILED, crossing.ARRIVED)] == [number, 0, 0]


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_never_come(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait ends, all others of this crossing with it, and FAILED says so."""
    monkeypatch.setattr(experts_plan, "_MOST_POLLS", 1000)
    _, weights = stacks("q4_0", 4, 64, 32, "int8")
    flags, ids = torch.zeros(crossing.WORDS, dtype=torch.int64), torch.zeros(rows, 2, dtype=torch.int64)
    Mixture(*weights).serve(torch.zeros(rows, 64), ids, torch.zeros(rows, 2), torch.empty(rows, 64), flags)
    assert int(flags[crossing.FAILED]) == 1
    assert int(flags[crossing.DONE]) == int(flags[crossing.READY])


def test_blocks_of_arguments_are_complete() -> None:
    """Each field of a product has its place before those of experts, as phases of both read them."""
    assert experts.EXPERTS.fields[: len(PRODUCT.fields)] == PRODUCT.fields
    assert {"down", "flags", "polls"} < set(experts.EXPERTS.fields)
