"""Linear layers of experts: stacked weights and `grouped_linear` on the CPU, against the reference."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_codes

import halfbyte as hb
from halfbyte.errors import ArgumentError, FormatError
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.linear import linear as linear_file
from halfbyte.layouts import experts, gpu_tiles
from halfbyte.ops import grouped

E, N, K = 5, 37, 72
NAMES = (
    "q4_0",
    "q4_1",
    "q8_0",
    "int4_g128",
    "int4_g20_zp",
    "int8_g48_offset",
    "int4_channel_zp",
    "int8_channel",
    "int4_tensor",
    "int8_tensor",
)
FORMATS = tuple(map(as_format, NAMES))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ids_of(*shape: int, count: int = E) -> torch.Tensor:
    return torch.randint(0, count, shape)


def check(codes: hb.Codes, x: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, **how: str) -> None:
    y = hb.grouped_linear(x, hb.pack(codes), ids, bias, **how)
    assert y.dtype == x.dtype
    expected = reference.grouped_linear(x, codes, ids, bias, **how)
    assert y.shape == expected.shape == (*ids.shape, codes.shape[1])
    assert reference.agrees(y, expected, reference.grouped_error_bound(x, codes, ids, bias, **how)).all()


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_format(fmt: hb.Format, compute: str) -> None:
    dtype = DTYPES[fmt.bits % 3]
    codes, bias = random_codes(fmt, (E, N, K)), torch.randn(E, N)
    check(codes, torch.randn(11, K).to(dtype), ids_of(11), bias, compute=compute)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_shared_rows_and_rows_of_their_own(dtype: torch.dtype, tokens: int) -> None:
    codes = random_codes(as_format("q4_0"), (E, N, K))
    for x in (torch.randn(tokens, K), torch.randn(tokens, 3, K)):
        check(codes, x.to(dtype), ids_of(tokens, 3), None, compute="float")
        check(codes, x.to(dtype), ids_of(tokens, 3).int(), torch.randn(E, N).to(dtype), compute="int8", activation="row_offset")


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 70), st.integers(1, 150)),
    tokens=st.integers(0, 9),
    top=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=25, deadline=None)
def test_any_sizes(sizes: tuple[int, int, int], tokens: int, top: int, seed: int) -> None:
    torch.manual_seed(seed)
    codes = random_codes(as_format(("q4_1", "int8_channel_zp", "int4_g20")[seed % 3]), sizes)
    check(codes, torch.randn(tokens, sizes[2]), ids_of(tokens, top, count=sizes[0]), None, compute=("float", "int8")[seed % 2])


def test_one_hot_rows_give_the_weights_of_each_expert() -> None:
    codes = random_codes(as_format("int4_g128_zp"), (E, N, K))
    ids = torch.arange(E).repeat_interleave(K)
    y = hb.grouped_linear(torch.eye(K).repeat(E, 1), hb.pack(codes), ids, compute="float")
    assert torch.equal(y.view(E, K, N), codes.dequantize().transpose(1, 2))


@pytest.mark.parametrize("how", [{"compute": "float"}, {"compute": "int8"}, {"compute": "int8", "activation": "row_offset"}], ids=str)
@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "int8_channel", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_row_that_is_no_number_stays_alone(fmt: str, how: dict[str, str], rows: int) -> None:
    """Of rows that share an expert, and of those of others, whether one tile multiplies them or several."""
    codes = random_codes(as_format(fmt), (E, N, K))
    packed, x, ids, bias = hb.pack(codes), torch.randn(rows, K), ids_of(rows, 2), torch.randn(E, N)
    expected = hb.grouped_linear(x, packed, ids, bias, **how)
    assert expected.isfinite().all()
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[rows // 2, K - 1] = bad
        y = hb.grouped_linear(broken, packed, ids, bias, **how)
        others = torch.arange(rows) != rows // 2
        assert torch.equal(y[others], expected[others])
        assert not y[rows // 2].isfinite().any()


@pytest.mark.parametrize("compute", ["float", "int8"])
def test_an_expert_that_is_no_number_is_in_its_rows_alone(compute: str) -> None:
    """A scale that is NaN is in one column of the rows that have this expert."""
    codes = random_codes(as_format("q8_0"), (E, N, K))
    x, ids = torch.randn(12, K), ids_of(12)
    ids[:3] = torch.tensor([2, 0, 2])
    expected = hb.grouped_linear(x, hb.pack(codes), ids, compute=compute)
    codes.scale[2, 7, 1] = torch.nan
    y = hb.grouped_linear(x, hb.pack(codes), ids, compute=compute)
    where = torch.zeros(12, N, dtype=torch.bool)
    where[ids == 2, 7] = True
    assert torch.equal(y.isnan(), where)
    assert torch.equal(y[~where], expected[~where])


def test_the_same_bits_as_one_expert_alone() -> None:
    """However many rows and experts share a call, rows are computed as `linear` computes them."""
    codes = random_codes(as_format("q4_0"), (E, N, K))
    x, ids = torch.randn(200, K), ids_of(200)
    y = hb.grouped_linear(x, hb.pack(codes), ids)
    for e in range(E):
        assert torch.equal(y[ids == e], hb.linear(x[ids == e], hb.pack(codes.select(e))))


def test_more_rows_than_a_pass_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_file, "ROWS_A_PASS", 7)
    codes = random_codes(as_format("q8_0"), (E, N, K))
    check(codes, torch.randn(60, K), ids_of(60), torch.randn(E, N), compute="int8")
    check(codes, torch.randn(5, K), torch.arange(5), None, compute="float")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_file, "WORK_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        codes = random_codes(as_format("int4_g128"), (E, 200, 256))
        check(codes, torch.randn(9, 256), ids_of(9, 2), None, compute="int8")
    finally:
        torch.set_num_threads(before)


def test_rows_that_lie_apart_and_a_bias_of_another_type() -> None:
    codes = random_codes(as_format("q4_0"), (E, N, K))
    x = torch.randn(6, K + 3)[:, 2:-1]
    check(codes, x, ids_of(6), torch.randn(N, E, dtype=torch.float64).T, compute="float")


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_stacked_codes_are_packed_and_unpacked(fmt: hb.Format) -> None:
    for sizes in ((E, N, K), (1, 1, 1), (0, 3, 8))[: 2 if fmt.block == "tensor" else 3]:  # of nothing, one scale for all is lost
        codes = random_codes(fmt, sizes)
        packed = hb.pack(codes)
        assert (packed.shape, packed.layout) == (sizes, "stacked_cpu_tiles")
        there = experts.pack(codes, gpu_tiles.pack, gpu_tiles.NAME)
        for back in (hb.unpack(packed), experts.unpack(there, gpu_tiles.unpack)):
            assert (back.format, back.shape) == (fmt, sizes)
            assert all(torch.equal(a, b) for a, b in zip(back.tensors().values(), codes.tensors().values(), strict=True))
        assert torch.equal(hb.dequantize(packed), codes.dequantize())


def test_a_stack_is_its_matrices() -> None:
    codes = random_codes(as_format("q4_1"), (E, N, K))
    packed = hb.pack(codes)
    for e, matrix in enumerate(experts.matrices(packed)):
        assert torch.equal(matrix.data, hb.pack(codes.select(e)).data)
        assert matrix.data.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()
    with pytest.raises(FormatError, match="begins with stacked_"):
        experts.matrices(hb.pack(codes.select(0)))


def test_nothing_to_do() -> None:
    codes, bias = random_codes(as_format("q4_0"), (E, N, K)), torch.randn(E, N)
    assert hb.grouped_linear(torch.randn(0, K), hb.pack(codes), ids_of(0, 2), bias).shape == (0, 2, N)
    none = hb.pack(random_codes(as_format("q4_0"), (E, N, 0)))
    assert torch.equal(hb.grouped_linear(torch.randn(3, 0), none, torch.tensor([4, 0, 4]), bias), bias[[4, 0, 4]])


def test_gradients_flow_to_x() -> None:
    codes = random_codes(as_format("q4_0"), (E, N, K))
    packed, weight = hb.pack(codes), codes.dequantize()
    for shape, ids in (((7, K), ids_of(7)), ((7, K), ids_of(7, 3)), ((7, 3, K), ids_of(7, 3))):
        x = torch.randn(shape, requires_grad=True)
        y = hb.grouped_linear(x, packed, ids, compute="float")
        dy = torch.randn_like(y)
        y.backward(dy)
        expected = torch.einsum("...n,...nk->...k", dy.double(), weight.double()[ids])
        expected = expected.sum(1) if len(shape) < ids.dim() + 1 else expected
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_the_operation_compiles_whole() -> None:
    packed = hb.pack(random_codes(as_format("q4_0"), (E, N, K)))

    def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return hb.grouped_linear(x * 2, packed, ids).sum(1)

    x, ids = torch.randn(4, K), ids_of(4, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids), layer(x, ids))
    assert hb.grouped_linear(torch.empty(4, K, device="meta"), packed, torch.empty(4, 2, device="meta", dtype=torch.long)).shape == (
        4,
        2,
        N,
    )
    arguments = (x, packed.data, ids, torch.randn(E, N), packed.name, E, N, K, "auto", "block")
    torch.library.opcheck(torch.ops.halfbyte.grouped_linear.default, arguments)


X, IDS = torch.randn(4, K), torch.tensor([0, 1, 4, 2])


@pytest.mark.parametrize(
    ("x", "ids", "how", "sentence"),
    [
        (X, IDS + 1, {}, "expert ids lie in 0 … 4, got 1 … 5"),
        (X, IDS - 1, {}, "expert ids lie in 0 … 4, got -1 … 3"),
        (X, IDS.float(), {}, "int64 or int32 on the CPU, like x, got torch.float32"),
        (X[:, 1:], IDS, {}, rf"take x [M, {K}] with ids [M] or [M, T], or x [M, T, {K}] with ids [M, T], got x [4, {K - 1}] and ids [4]"),
        (X[:3], IDS, {}, "flatten the tokens"),
        (X.expand(2, 4, K), IDS.expand(2, 4, 4), {}, "flatten the tokens"),
        (X.double(), IDS, {}, "float32, bfloat16 or float16, got torch.float64"),
        (X, IDS, {"compute": "fast"}, "unknown compute 'fast'"),
        (X, IDS, {"activation": "fast"}, "unknown activation scaling 'fast'"),
        (X, IDS, {"bias": torch.randn(N)}, f"floating point [{E}, {N}] on the CPU, got torch.float32 [{N}]"),
    ],
)
def test_errors(x: torch.Tensor, ids: torch.Tensor, how: dict[str, object], sentence: str) -> None:
    packed = hb.pack(random_codes(as_format("q4_0"), (E, N, K)))
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        hb.grouped_linear(x, packed, ids, **how)  # type: ignore[arg-type]


def test_one_matrix_is_for_linear_and_a_stack_is_not() -> None:
    codes = random_codes(as_format("q4_0"), (E, N, K))
    with pytest.raises(ArgumentError, match=re.escape(f"takes stacked weights [E, N, K], got one of shape [{N}, {K}]: use linear")):
        hb.grouped_linear(X, hb.pack(codes.select(0)), IDS)
    with pytest.raises(ArgumentError, match=re.escape("takes a weight [N, K]")):
        hb.linear(X, hb.pack(codes))
    wrong = hb.Packed(codes.format, (E + 1, N, K), "stacked_cpu_tiles", hb.pack(codes).data)
    with pytest.raises(FormatError, match="packed bytes on the CPU"):
        hb.grouped_linear(X, wrong, IDS)


def test_only_rows_of_known_experts_have_gradients() -> None:
    """On a GPU an id may be invalid; the backward pass is the same there and here."""
    packed = hb.pack(random_codes(as_format("q4_0"), (E, N, K)))
    ids = torch.tensor([0, E, 2, -1])

    class Context:
        saved_tensors = packed.data, ids
        settings, shared = grouped._Settings(packed.name, E, N, K, "float", "block"), False
        needs_input_grad, bias_dtype = (True, False, False, True), torch.float32

    grad_x = grouped._GroupedLinear.backward(Context(), torch.ones(4, N))[0]
    assert grad_x is not None
    assert torch.equal(grad_x.any(1), torch.tensor([True, False, True, False]))
