"""Formats under a budget: never over it, and as good as trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import ArgumentError
from halfbyte.quantizers.mixed import allocate

choice = st.tuples(st.integers(1, 50), st.integers(0, 1000).map(float))
layers = st.lists(st.lists(choice, min_size=1, max_size=4), min_size=1, max_size=5)


@given(layers, st.integers(0, 250))
def test_the_best_of_all_that_fit(rows: list[list[tuple[int, float]]], budget: int) -> None:
    sizes, losses = [[s for s, _ in row] for row in rows], [[x for _, x in row] for row in rows]
    if budget < sum(map(min, sizes)):
        with pytest.raises(ArgumentError, match="the budget is"):
            allocate(sizes, losses, budget)
        return
    chosen = allocate(sizes, losses, budget)
    every = itertools.product(*(range(len(row)) for row in rows))
    fitting = [c for c in every if sum(s[i] for s, i in zip(sizes, c, strict=True)) <= budget]
    assert tuple(chosen) in fitting
    # Budgets below 10 000 bytes are not rounded: the answer is exact.
    assert sum(x[i] for x, i in zip(losses, chosen, strict=True)) == min(sum(x[i] for x, i in zip(losses, c, strict=True)) for c in fitting)


def test_large_budgets_are_rounded_to_the_safe_side() -> None:
    sizes = [[1_000_003 * (i + 1), 2_000_001 * (i + 1), 4_000_037 * (i + 1)] for i in range(50)]
    losses = [[9.0 * (i + 1), 3.0, 0.5] for i in range(50)]
    budget = 3 * sum(row[0] for row in sizes)
    chosen = allocate(sizes, losses, budget)
    spent = sum(row[i] for row, i in zip(sizes, chosen, strict=True))
    assert budget * 0.99 < spent <= budget
