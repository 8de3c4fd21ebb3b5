"""Caches forget what they must, and nothing else."""

from __future__ import annotations

import gc

import torch

from halfbyte.bounded import Bounded, by_object, by_tensor


class Thing:
    """An object without a hash or an equality of its own."""


def test_a_full_dict_drops_all_others() -> None:
    numbers = Bounded[int, int](2)
    numbers[1] = numbers[2] = 0
    numbers[2] = 5
    assert numbers == {1: 0, 2: 5}
    numbers[3] = 7
    assert numbers == {3: 7}


def test_a_result_is_of_one_object_while_it_lives() -> None:
    calls = []

    @by_object()
    def count(thing: Thing, start: int) -> int:
        calls.append(start)
        return start + len(calls)

    first, second = Thing(), Thing()
    assert [count(first, 10), count(first, 20), count(second, 30)] == [11, 11, 32]
    before = id(first)
    del first
    gc.collect()
    others = [Thing() for _ in range(20)]  # one of them most likely has the id of the first
    assert count(next((one for one in others if id(one) == before), others[0]), 40) == 43


def test_none_is_a_result() -> None:
    calls = []
    once = by_object()(calls.append)
    thing = Thing()
    once(thing)
    once(thing)
    assert calls == [thing]


def test_a_stale_result_is_computed_again() -> None:
    current = by_object(lambda result, size: result[0] == size)(lambda thing, size: (size, object()))
    thing = Thing()
    result = current(thing, 3)
    assert current(thing, 3) is result
    assert current(thing, 4) is not result
    assert current(thing, 4)[0] == 4


def test_a_result_of_a_tensor_that_was_written_to_is_computed_again() -> None:
    total = by_tensor(lambda tensor: float(tensor.sum()))
    x = torch.ones(3)
    assert total(x) == 3
    x.add_(1)
    assert total(x) == 6
