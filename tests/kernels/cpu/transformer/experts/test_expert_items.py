"""Mixtures of experts for many rows on a CPU, in which each thread computes experts of its own: against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_mixtures import ROUNDING, Sum
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.transformer.experts import items as expert_items
from halfbyte.ops.grouped import grouped_linear
from halfbyte.ops.transformer.experts import Clamped, Mixture, many_rows
from halfbyte.ops.transformer.weights import Weight

EXPERTS = 7


def stack(n: int, k: int, fmt: str, compute: str, *, biased: bool = False) -> tuple[Tensor, Weight]:
    """The weights in float64, and packed."""
    codes = ops.quantize(torch.randn(EXPERTS, n, k) / k**0.5, fmt)
    bias = torch.randn(EXPERTS, n) if biased else None
    return codes.dequantize(torch.float64), Weight(ops.pack(codes), bias, compute, "block")


def routed(m: int, top_k: int, spread: float) -> tuple[Tensor, Tensor]:
    """Ids and weights: most rows choose the same experts if `spread` is small."""
    chances = torch.softmax(torch.randn(EXPERTS) / spread, 0).clamp_min(1e-4)
    return torch.multinomial(chances.expand(m, EXPERTS), top_k), torch.rand(m, top_k)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("k", "inner", "fmt", "clamped"),
    [
        (96, 64, "q8_0", None),
        (64, 40, "q4_0", None),  # gates are not whole panels
        (70, 21, "int4_channel", None),  # nor whole vectors
        (96, 64, "int4_g32_offset_f32", Clamped(1.702, 7.0)),
        (64, 24, "q8_0", Clamped(1.702, 7.0)),
    ],
)
def test_against_float64(k: int, inner: int, fmt: str, clamped: Clamped | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one expert and of many, with biases, in several calls."""
    torch.manual_seed(k + inner + threads)
    monkeypatch.setattr(runtime, "threads", lambda: threads)
    monkeypatch.setattr(expert_items, "_PRODUCTS_BYTES", 4 * k * 3 * 40)  # 40 rows a call
    (up_matrices, up), (down_matrices, down) = stack(2 * inner, k, fmt, "float", biased=True), stack(k, inner, fmt, "float", biased=True)
    for m, spread in ((1, 1.0), (45, 0.2), (133, 3.0)):
        x, (ids, weights) = torch.randn(m, k), routed(m, 3, spread)
        y = many_rows(up, down, x, ids, weights, clamped)
        assert y.dtype == torch.float32
        for row in range(m):
            wanted, size = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
            for e, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
                assert up.bias is not None
                assert down.bias is not None
                one = Sum.gated(up_matrices[e], down_matrices[e], x[row].double(), (up.bias[e], down.bias[e]), clamped)
                wanted, size = wanted + weight * one.y, size + weight * one.size
            # Sums of up to 2 k, 2 inner and 3 terms; gates and scales add a few roundings.
            assert bool(((y[row] - wanted).abs() <= (2 * k + 2 * inner + 20) * ROUNDING * size).all())


@pytest.mark.parametrize("fmt", ["q4_0", "int8_channel", "mxfp4"])
def test_int8_gives_what_products_of_experts_give(fmt: str) -> None:
    """The same codes of activations for the first product. In between float32 sums may move codes of the second one by one."""
    torch.manual_seed(5)
    k, inner = 128, 64
    (_, up), (_, down) = stack(2 * inner, k, fmt, "int8"), stack(k, inner, fmt, "int8")
    x, (ids, weights) = torch.randn(150, k), routed(150, 2, 1.0)
    both = grouped_linear(x, up.packed, ids, compute="int8")
    gate, linear = both.chunk(2, -1)
    y = (grouped_linear(torch.nn.functional.silu(gate) * linear, down.packed, ids, compute="int8") * weights.unsqueeze(-1)).sum(1)
    assert (many_rows(up, down, x, ids, weights) - y).norm() <= 3e-3 * y.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    (_, up), (_, down) = stack(128, 96, "q8_0", "float"), stack(96, 64, "q8_0", "float")
    mixture, x, (ids, weights) = Mixture(up, down), torch.randn(80, 96, dtype=dtype), routed(80, 2, 1.0)
    y = mixture(x, ids.int(), weights)
    assert y.dtype == dtype
    assert torch.equal(y, mixture(x.float(), ids, weights).to(dtype))
    by_few = torch.cat(
        [mixture(*(part.contiguous() for part in rows)) for rows in zip(x.split(16), ids.split(16), weights.split(16), strict=True)]
    )
    assert torch.allclose(y.float(), by_few.float(), atol=float(by_few.float().abs().max()) * max(torch.finfo(dtype).eps, 1e-5))
    with pytest.raises(ArgumentError, match=r"expert ids lie in 0 … 6, got 0 … 7"):
        mixture(x, torch.full_like(ids, 7).index_fill(0, torch.tensor([0]), 0), weights)


def test_no_more_rows_in_an_item_than_asked_for() -> None:
    items = expert_items._items(torch.tensor([0, 5, 64, 0, 131]).numpy(), 64)
    assert items.rows.sum() == 200
    assert sorted(zip(items.starts.tolist(), items.rows.tolist(), items.experts.tolist(), strict=True)) == [
        (0, 5, 1), (5, 64, 2), (69, 44, 4), (113, 44, 4), (157, 43, 4),
    ]  # fmt: skip
    assert items.rows.tolist() == [64, 44, 44, 43, 5]


@pytest.mark.parametrize("clamped", [None, Clamped(1.702, 7.0)])
@pytest.mark.parametrize("inner", [1, 3, 7, 9])
@pytest.mark.parametrize("k", [1, 33])
def test_experts_narrower_than_a_vector(k: int, inner: int, clamped: Clamped | None) -> None:
    """Gates of a row, which are computed in whole vectors, leave the next row as it is."""
    torch.manual_seed(inner + k)
    (up_matrices, up), (down_matrices, down) = stack(2 * inner, k, "q8_0", "float"), stack(k, inner, "q8_0", "float")
    x, (ids, weights) = torch.randn(60, k), routed(60, 2, 1.0)
    y = many_rows(up, down, x, ids, weights, clamped)
    for row in range(len(x)):
        terms = [Sum.gated(up_matrices[e], down_matrices[e], x[row].double(), (None, None), clamped) for e in ids[row].tolist()]
        factors = weights[row].double()
        wanted = sum(factor * term.y for factor, term in zip(factors, terms, strict=True))
        size = sum(factor * term.size for factor, term in zip(factors, terms, strict=True))
        assert bool(((y[row] - wanted).abs() <= (2 * k + 2 * inner + 20) * ROUNDING * size).all())


def test_integers_have_64_bits_where_c_long_has_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows before numpy 2, whose integers are of 32 bits if no type is named: kernels read 64."""

    arange = np.arange
    monkeypatch.setattr(np, "arange", lambda *args, dtype=np.int32: arange(*args, dtype=dtype))
    order, product_rows, counts = expert_items._sorted(np.array([2, 0, 2, 1], dtype=np.int64))
    assert (order.tolist(), product_rows.tolist(), counts.tolist()) == ([1, 3, 0, 2], [2, 0, 3, 1], [1, 1, 2])
    for array in (order, product_rows, counts, *expert_items._items(counts, 1)):
        assert array.dtype == np.int64
