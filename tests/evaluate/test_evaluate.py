"""evaluate.py against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ArgumentError
from halfbyte.evaluate import compare_embeddings, compare_outputs, merge_outputs, pool


def _axes(*rows: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_a_model_agrees_with_itself() -> None:
    embeddings = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    quality = compare_embeddings(embeddings, embeddings)
    assert (quality.n, quality.queries, quality.top1, quality.top10) == (40, 40, 1.0, 1.0)
    assert quality.mean_cosine == pytest.approx(1, abs=1e-12)
    assert quality.min_cosine == pytest.approx(1, abs=1e-12)


def test_cosine_by_hand() -> None:
    quality = compare_embeddings(_axes((1, 0), (0, 2)), _axes((3, 3), (0, 1)))
    assert quality.min_cosine == pytest.approx(math.sqrt(0.5), abs=1e-12)
    assert quality.mean_cosine == pytest.approx((1 + math.sqrt(0.5)) / 2, abs=1e-12)


def test_agreement_by_hand() -> None:
    # Twelve rows at growing angles from the query: the reference finds 0..9, nearest first.
    angles = [0.1 * (i + 1) for i in range(12)]
    reference = _axes(*((math.cos(a), math.sin(a)) for a in angles))
    query = _axes((1, 0))
    # The candidate exchanges row 0 with row 10: it finds 10, 1, ..., 9, which is nine of the reference's ten.
    candidate = reference.clone()
    candidate[[0, 10]] = candidate[[10, 0]]
    quality = compare_embeddings(reference, candidate, (query, query))
    assert (quality.queries, quality.top1) == (1, 0.0)
    assert quality.top10 == pytest.approx(0.9)


def test_a_row_is_not_its_own_neighbour() -> None:
    reference = _axes((1, 0), (1, 0.1), (0, 1))
    candidate = _axes((1, 0), (0, 1), (1, 0.1))
    # Row 0 finds row 1 in the reference and row 2 in the candidate; row 1 finds 0 and 2; row 2 finds 1 and 0.
    assert compare_embeddings(reference, candidate).top1 == 0.0
    assert compare_embeddings(reference, candidate).top10 == 1.0


def test_equal_rows_are_found_in_their_order() -> None:
    reference = torch.ones(50, 4)
    assert compare_embeddings(reference, reference.clone(), (torch.ones(1, 4), torch.ones(1, 4))).top10 == 1.0


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 300), seed=st.integers(0, 2**31), scale=st.sampled_from([1e-200, 1e-3, 1.0, 1e200]))
def test_scale_does_not_matter(n: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    quality = compare_embeddings(reference, reference * scale)
    assert quality.min_cosine == pytest.approx(1, abs=1e-12)
    assert 0 <= quality.top1 <= 1
    assert 0 <= quality.top10 <= 1


@pytest.mark.parametrize(
    ("reference", "candidate", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 5), r"same shape"),
        (torch.zeros(3), torch.zeros(3), r"same shape"),
        (torch.zeros(0, 4), torch.zeros(0, 4), r"at least 1"),
        (torch.ones(1, 4), torch.ones(1, 4), r"at least 2"),
        (torch.ones(3, 4), torch.tensor([[1.0] * 4, [math.nan] * 4, [1.0] * 4]), r"candidate are not finite.*row 1"),
    ],
)
def test_bad_embeddings(reference: torch.Tensor, candidate: torch.Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        compare_embeddings(reference, candidate)


def test_queries_of_another_width() -> None:
    with pytest.raises(ArgumentError, match="width"):
        compare_embeddings(torch.ones(3, 4), torch.ones(3, 4), (torch.ones(2, 5), torch.ones(2, 5)))


def test_outputs_by_hand() -> None:
    reference = torch.tensor([[[1.0, 0.0], [0.0, 4.0]]])
    candidate = torch.tensor([[[1.0, 0.0], [3.0, 3.0]]])
    quality = compare_outputs(reference, candidate)
    assert quality.n == 2
    assert quality.max_relative == pytest.approx(3 / 4)
    halves = [compare_outputs(reference[:, rows], candidate[:, rows]) for rows in (slice(0, 1), slice(1, 2))]
    assert merge_outputs(halves) == quality
    assert quality.min_cosine == pytest.approx(math.sqrt(0.5))
    assert quality.same_argmax == 0.5
    assert compare_outputs(torch.zeros(1, 2), torch.zeros(1, 2)).max_relative == 0
    with pytest.raises(ArgumentError, match="same shape"):
        compare_outputs(reference, candidate[0])


def test_padding_does_not_count() -> None:
    hidden = torch.tensor([[[3.0, 4.0], [math.pi, 99.0]]])
    assert torch.allclose(pool(hidden, torch.tensor([[1, 0]])), torch.tensor([[0.6, 0.8]]))
