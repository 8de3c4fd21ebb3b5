"""The products against the float64 reference, for every kind of format, dtype, compute and activation scaling, at any shape."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_codes
from support import RUNNABLE, activations, examples, pairwise, run_linear, tile_spec
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.formats import Codes, Format, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.linear import linear, tile
from halfbyte.kernels.cpu.linear.epilogue import Epilogue
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Activation, Compute, Problem
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.cpu_tiles import pack


@dataclasses.dataclass(frozen=True)
class Case:
    """What a kernel is compiled for; shapes are free. `isa` is the index in RUNNABLE: the best first."""

    bits: int
    zero: str
    block: int | str
    scale: torch.dtype
    dtype: torch.dtype
    way: str
    isa: int = 0

    @property
    def format(self) -> Format:
        return Format(self.bits, self.block, self.zero, self.scale)

    @property
    def compute(self) -> Compute:
        return "float" if self.way == "float" else "int8"

    @property
    def activation(self) -> Activation:
        return "block" if self.way == "float" else self.way

    def __str__(self) -> str:
        return f"{self.format}-{str(self.dtype)[6:]}-{self.way}-{RUNNABLE[self.isa].name}"

    def kernel(self, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> LinearKernel:
        isa = RUNNABLE[self.isa]
        monkeypatch.setenv("HALFBYTE_ISA", isa.name)
        problem = Problem("linear", 1, n, k, self.format, self.dtype, self.compute)
        inner = choose(problem, isa).options[0].candidate.inner
        return LinearKernel(self.format, n, k, self.dtype, inner, self.activation)


# The three that a kernel's arithmetic depends on most meet in all combinations: bits and zero are one dimension.
KINDS = list(itertools.product((4, 8), ("none", "point", "offset")))
SCALES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = ("float", "block", "row", "block_offset", "row_offset")
BLOCKS = (32, 128, 20, 33, 300, "channel", "tensor")  # units of 32 and 8, one unit a block and several, padded and not
CASES = [Case(*kind, *rest) for kind, *rest in pairwise(KINDS, BLOCKS, SCALES, DTYPES, WAYS, range(len(RUNNABLE)))]
CASES += [  # products of bfloat16 pairs, where the CPU has them
    Case(4, zero, block, torch.float16, torch.bfloat16, "float", i)
    for i, isa in enumerate(RUNNABLE)
    for zero, block in (("none", 32), ("point", "channel"), ("offset", 20))
    if isa.bf16_dot
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads share even the smallest product, so that every test is one of sharing."""
    monkeypatch.setattr(linear, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)
    yield
    PLANS.linear.clear()


def test_the_cases_cover_each_pair() -> None:
    assert len(CASES) < 80
    fields = [f.name for f in dataclasses.fields(Case)]
    for a, b in itertools.combinations(fields, 2):
        values = [{getattr(case, name) for case in CASES} for name in (a, b)]
        assert {(getattr(case, a), getattr(case, b)) for case in CASES} == set(itertools.product(*values))


def check(
    kernel: LinearKernel,
    case: Case,
    x: Tensor,
    codes: Codes,
    bias: Tensor | None,
    clamp: tuple[float, float] | None,
    residual: Tensor | None = None,
) -> Tensor:
    y = run_linear(kernel, x, pack(codes), bias, clamp or (-torch.inf, torch.inf), residual)
    wanted = reference.linear(x, codes, bias, case.compute, case.activation, clamp, residual)
    error = reference.error_bound(x, codes, bias, case.compute, case.activation, residual)
    assert bool(reference.agrees(y, wanted, error).all())
    return y


@cases
def test_products_are_those_of_the_reference(case: Case) -> None:
    clamps = st.sampled_from([None, (0.0, torch.inf), (0.0, 6.0), (-3.0, 0.1)])
    # Tiles are compiled for each number of rows: every fourth, another four for the next case.
    rows = st.sampled_from(range(1 + CASES.index(case) % 4, 21, 4))

    @settings(max_examples=examples(RUNNABLE[case.isa], 10))
    @given(rows, st.integers(1, 100), st.integers(1, 700), st.booleans(), clamps, st.integers(0, 3), st.integers(0, 2**16))
    def sweep(m: int, n: int, k: int, with_bias: bool, clamp: tuple[float, float] | None, stride: int, seed: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            kernel = case.kernel(n, k, patch)
            codes = random_codes(case.format, (n, k), seed)
            bias = torch.randn(n) if with_bias else None
            x = activations(m, k, case.dtype, seed, stride)
            residual = activations(m, n, case.dtype, seed + 1) if seed % 3 == 0 else None
            y = check(kernel, case, x, codes, bias, clamp, residual)
            patch.setattr(runtime, "threads", lambda: 1)
            assert torch.equal(run_linear(kernel, x, pack(codes), bias, clamp or (-torch.inf, torch.inf), residual), y)

    sweep()


OF_CODEBOOKS = [("mxfp4", "block", 5), ("fp4_g20", "float", 3), ("iq4_channel", "row", 30), ("iq4_nl", "row_offset", 1)]


@pytest.mark.parametrize(("isa", "name", "way", "m"), [(isa, *case) for i, isa in enumerate(RUNNABLE) for case in OF_CODEBOOKS[i % 2 :: 2]])
def test_codes_of_a_table_are_multiplied_as_the_integers_that_they_are(name: str, way: str, m: int, isa: ISA) -> None:
    n, k = 37, 160
    codes = random_codes(as_format(name), (n, k))
    x, bias = activations(m, k, torch.float32, m), torch.randn(n)
    inner, activation = ("float", "block") if way == "float" else ("int8", way)
    y, of_integers = (
        run_linear(LinearKernel(each.format, n, k, x.dtype, inner, activation, isa=isa), x, pack(each), bias)
        for each in (codes, codes.integers())
    )
    # Integer sums are exact; those of floats are in another order.
    error = 0 if inner == "int8" else 2 * reference.error_bound(x, codes, bias)
    assert bool(((y.double() - of_integers.double()).abs() <= error).all())
    ways = inner, activation
    assert bool(reference.agrees(y, reference.linear(x, codes, bias, *ways), reference.error_bound(x, codes, bias, *ways)).all())


@cases
def test_one_hot_activations_give_the_weight_exactly(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 37, 45
    kernel, codes = case.kernel(n, k, monkeypatch), random_codes(case.format, (n, k))
    # float: 1 * w. The kernel rounds q * scale + offset once, and so does dequantize() (but for its float64, which is exact or nearly so).
    # int8: 127 is quantized to 127 with a scale of exactly 1: 127 * fl(1/127) lies within half a unit of 1. (With an offset: 127 with
    # offset and reach 63.5 and scale 1/2.) Integer sums are exact, also times 1 or 1/2, and one fused multiply-add by the weight's
    # scale rounds once. But 127 * offset is a rounding of its own, unless the offset has few bits, as in f16 and bf16, and so is
    # 127 * q * scale where sums are biased: of 8 bits it has 26.
    hot = 1.0 if case.compute == "float" else 127.0
    y = run_linear(kernel, (hot * torch.eye(k)).to(case.dtype), pack(codes))
    wanted = (hot * codes.dequantize(torch.float64)).float().T
    twice = case.scale == torch.float32 or (case.bits == 8 and kernel.tile_spec.activation.block_sum == "biased")
    if case.compute == "int8" and case.zero == "offset" and twice:
        error = torch.finfo(case.dtype).eps * (wanted.abs() + 127 * codes.zero.abs().max())
        assert bool(((y.double() - wanted).abs() <= error).all())
    else:
        assert torch.equal(y, wanted.to(case.dtype))


@cases
def test_a_row_with_nan_or_infinity_touches_no_other(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k = 9, 40, 333
    kernel, codes = case.kernel(n, k, monkeypatch), random_codes(case.format, (n, k))
    packed, x = pack(codes), torch.randn(m, k).to(case.dtype)
    clean = run_linear(kernel, x, packed, clamp=(-5, 5))
    for row, column, bad in ((0, 0, torch.nan), (4, 332, torch.inf), (8, 150, -torch.inf), (5, 320, torch.nan)):
        dirty = x.clone()
        dirty[row, column] = bad
        y = run_linear(kernel, dirty, packed, clamp=(-5, 5))
        others = torch.arange(m) != row
        assert torch.equal(y[others], clean[others])
        if case.compute == "int8" or math.isnan(bad):
            assert bool(y[row].isnan().all())  # a clamp keeps NaN
        else:  # infinite where all goes well, NaN where inf - inf occurs on the way
            assert not bool(run_linear(kernel, dirty, packed)[row].isfinite().any())


# What follows needs a few kernels only: three for the best instruction set, two for each other, in turn.
FEW = [
    Case(bits, zero, block, torch.float16, dtype, way, isa)
    for isa in range(len(RUNNABLE))
    for number, (bits, zero, block, dtype, way) in enumerate(
        (
            (4, "none", 32, torch.float32, "block"),
            (4, "point", 128, torch.bfloat16, "float"),
            (8, "offset", 20, torch.float16, "row"),
        )
    )
    if isa == 0 or number != isa % 3
]
few = pytest.mark.parametrize("case", FEW, ids=str)


@few
def test_a_row_does_not_depend_on_how_many_there_are(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 35, 70
    kernel, codes = case.kernel(n, k, monkeypatch), random_codes(case.format, (n, k))
    x, packed = activations(40, k, case.dtype, 0), pack(codes)
    alone = torch.cat([run_linear(kernel, row, packed) for row in x.split(1)])
    check(kernel, case, x, codes, None, None)
    for m in (*range(1, 21), 39, 40):
        assert torch.equal(run_linear(kernel, x[:m], packed), alone[:m])


@few
def test_k_of_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for m, n in ((1, 1), (3, 33), (20, 64)):
        kernel, codes = case.kernel(n, 1, monkeypatch), random_codes(case.format, (n, 1))
        check(kernel, case, activations(m, 1, case.dtype, m), codes, torch.randn(n), None)


@few
def test_many_rows_go_through_in_passes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 5, 40
    kernel, codes = case.kernel(n, k, monkeypatch), random_codes(case.format, (n, k))
    x, packed = activations(4097, k, case.dtype, 0, stride=3), pack(codes)
    whole = kernel(x, packed.data.data_ptr(), None, -torch.inf, torch.inf)
    wanted, error = reference.linear(x, codes, None, case.compute, case.activation), reference.error_bound(x, codes, None, case.compute)
    assert bool(reference.agrees(whole, wanted, error).all())
    residual = torch.randn(4097, n).to(case.dtype)
    added = kernel(x, packed.data.data_ptr(), None, -1.0, 1.0, residual)
    for rows in (1, 7, 1000, 5000):
        monkeypatch.setattr(linear, "ROWS_A_PASS", rows)
        assert torch.equal(kernel(x[:1011], packed.data.data_ptr(), None, -torch.inf, torch.inf), whole[:1011])
        assert torch.equal(kernel(x[:1011], packed.data.data_ptr(), None, -1.0, 1.0, residual[:1011]), added[:1011])


@few
def test_a_residual_is_added_before_the_clamp(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k = 11, 75, 64  # whole panels, and outputs that end within a vector
    kernel, codes = case.kernel(n, k, monkeypatch), random_codes(case.format, (n, k))
    x, bias, residual = torch.randn(m, k).to(case.dtype), torch.randn(n), (torch.randn(m, n) * 30).to(case.dtype)
    check(kernel, case, x, codes, bias, (-2.0, 40.0), residual)
    # x = 0: nothing but the residual comes out, as it is.
    assert torch.equal(run_linear(kernel, torch.zeros_like(x), pack(codes), residual=residual), residual)
    residual[3, 70] = torch.nan
    y = run_linear(kernel, torch.zeros_like(x), pack(codes), clamp=(-1, 1), residual=residual)
    assert y.isnan().nonzero().tolist() == [[3, 70]]


@pytest.mark.parametrize("threads", [1, 3, 4])
@few
def test_groups_of_panels_are_shared_by_any_number_of_threads(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 32 * 21 + 5, 64
    codes = random_codes(case.format, (n, k))
    packed, x = pack(codes), torch.randn(9, k).to(case.dtype)
    wanted = run_linear(case.kernel(n, k, monkeypatch), x, packed)
    monkeypatch.setattr(runtime, "threads", lambda: threads)
    for size in (1, 10**9):  # a panel at a time, and all that a thread's share allows
        monkeypatch.setattr(linear, "_GROUP_BYTES", size)
        monkeypatch.setattr(linear, "_READ_ONCE_BYTES", size)
        assert torch.equal(run_linear(case.kernel(n, k, monkeypatch), x, packed), wanted)


@few
def test_panels_at_once_are_as_one_at_a_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 32 * 17 + 5, 150
    monkeypatch.setattr(runtime, "threads", lambda: 1)
    packed, bias = pack(random_codes(case.format, (n, k))), torch.randn(n)
    tuning = type(RUNNABLE[case.isa].tuning)
    tile = tuning.tile
    for m in (1, 2, 5):
        x, residual = activations(m, k, case.dtype, m), torch.randn(m, n).to(case.dtype)
        results = []
        for panels in (1, 3, 4):  # groups end with two panels and with one, whose outputs end within a vector
            monkeypatch.setattr(tuning, "tile", lambda *a, panels=panels, **options: tile(*a, **options)._replace(panels=panels))
            kernel = case.kernel(n, k, monkeypatch)
            results.append([run_linear(kernel, x, packed, b, (-9.0, 9.0), r) for b in (None, bias) for r in (None, residual)])
        assert all(torch.equal(a, b) for one in results[1:] for a, b in zip(results[0], one, strict=True))


@pytest.mark.parametrize(("kind", "way", "isa"), pairwise(KINDS, ("block", "row_offset"), range(len(RUNNABLE))))
def test_the_largest_sums_do_not_overflow(kind: tuple[int, str], way: str, isa: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits, zero = kind
    n, k = 3, 2 * cpu_tiles.LONGEST_BLOCK + 40  # records of the greatest length and a short one
    case = Case(bits, zero, "channel", torch.float32, torch.float32, way, isa)
    kernel, fmt = case.kernel(n, k, monkeypatch), case.format
    values = torch.full((n, k), fmt.q_max)
    values[1] = fmt.q_min
    values[2, ::2] = fmt.q_min
    points, offsets = torch.tensor([[0], [fmt.q_max], [7]], dtype=torch.uint8), torch.tensor([[0.5], [-1.0], [3.0]])
    codes = Codes.from_values(fmt, values, torch.full((n, 1), 0.01), {"none": None, "point": points, "offset": offsets}[zero])
    x = torch.ones(4, k)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 1::2] = -1
    check(kernel, case, x, codes, None, None)


@pytest.mark.parametrize("block", [200, 96, 97, "channel", "tensor"])
def test_blocks_longer_than_a_record(block: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tiles, "LONGEST_BLOCK", 64)
    n, k = 35, 203
    for way in WAYS:
        case = Case(4, "point", block, torch.float16, torch.float32, way)
        check(case.kernel(n, k, monkeypatch), case, activations(5, k, torch.float32, 1), random_codes(case.format, (n, k)), None, None)


@few
def test_huge_tiny_and_zero_activations(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 33, 90
    kernel, codes = case.kernel(n, k, monkeypatch), random_codes(case.format, (n, k))
    info = torch.finfo(case.dtype)
    for size in (info.max, info.max / 1000, info.smallest_normal, info.smallest_normal * info.eps, 0.0):
        check(kernel, case, (torch.randn(4, k).clamp(-1, 1) * size).to(case.dtype), codes, None, None)


def test_the_epilogue_finishes_each_vector_with_and_without_a_residual_and_each_output(monkeypatch: pytest.MonkeyPatch) -> None:
    finished, finish = list[object](), Epilogue._activated
    monkeypatch.setattr(Epilogue, "_activated", lambda *arguments: finished.append(1) or finish(*arguments))
    rows, vectors = 3, 2
    tile.build(tile_spec("int8", 4, "none", (32, True), rows, vectors), RUNNABLE[0])
    assert len(finished) == 2 * rows * vectors + rows  # the last ones in a loop over the outputs of a row that the weight has
