"""The threads of quantizers on CPUs.

A search for scales is thousands of short operations, and each operation of torch waits for the last of its threads: for milliseconds where
other programs compete for the cores, which is many times what it computes. So pieces of a weight get threads of their own, which wait for
each other only at their end, and operations inside them have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def at_most(threads: int) -> Iterator[None]:
    """A context in which torch's operations on a CPU have at most so many threads, and one where that is 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, max(1, threads)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def each(work: Callable[[T], R], pieces: Iterable[T], device: torch.device) -> Iterator[R]:
    """`work` of each piece, in order, without gradients: on a CPU of as many at a time as torch has threads, one for each."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    rest = iter(pieces)
    while some := list(islice(rest, threads)):
        if len(some) == 1:
            yield work(some[0])
            continue
        with at_most(1), ThreadPoolExecutor(len(some)) as pool:  # new threads have as many for their operations as this one
            done = list(pool.map(torch.no_grad()(work), some))
        yield from done
