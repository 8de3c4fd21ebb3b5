"""Memory that is pinned where it is: whole pages, each once, and none that stays pinned."""

import gc
from itertools import pairwise
from mmap import PAGESIZE
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.decoder.offload.pinned import page_ranges, pin
from halfbyte.errors import UnsupportedError

GPU = torch.device("cuda", 0)


@given(st.lists(st.tuples(st.integers(0, 40000), st.integers(0, 20000)), max_size=8))
def test_ranges_are_whole_pages_of_which_each_is_in_one(spans: list[tuple[int, int]]) -> None:
    memory = torch.empty(60000, dtype=torch.uint8)
    parts = [memory[start : start + size] for start, size in spans]
    ranges = page_ranges(parts)
    assert all(first % PAGESIZE == end % PAGESIZE == 0 and first < end for first, end in ranges)
    assert all(end <= after for (_, end), (after, _) in pairwise(ranges))
    for part in parts:
        within = [first <= part.data_ptr() and part.data_ptr() + part.nbytes <= end for first, end in ranges]
        assert sum(within) == 1 or not part.nbytes


class Runtime(SimpleNamespace):
    """CUDA's runtime, which refuses the last of three ranges, and perhaps a flag."""

    def __init__(self, *refused: int) -> None:
        self.pinned, self.refused = list[int](), refused

    def cudaHostRegister(self, first: int, _size: int, flags: int) -> int:
        if len(self.pinned) == 2 or flags in self.refused:
            return 2
        self.pinned.append(first)
        return 0

    def cudaHostUnregister(self, first: int) -> None:
        self.pinned.remove(first)

    cudaError = staticmethod(int)
    cudaGetErrorString = staticmethod(lambda code: f"out of memory, {code}")


@pytest.mark.parametrize("refused", [(), (8,), (0,)])
def test_memory_that_cannot_be_pinned(refused: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems may not know memory that is only read; what was pinned before is not any more."""
    runtime, memory = Runtime(*refused), torch.empty(16 * PAGESIZE, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # the launch that takes the error
    parts = [memory[i * 4 * PAGESIZE :][:PAGESIZE] for i in range(3)]
    with pytest.raises(UnsupportedError, match=r"main memory of .* cannot be pinned \(out of memory, 2\)"):
        pin(parts, GPU)
    gc.collect()
    assert not runtime.pinned
    kept = pin(parts[:2], GPU)
    assert [first for first, _ in kept.ranges] == runtime.pinned
    del kept
    assert not runtime.pinned
    assert pin(parts, torch.device("cpu")).ranges == ()
