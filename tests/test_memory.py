"""What keep_freed_memory does to a process; each runs in one of its own, since there is no way back."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from types import SimpleNamespace

import pytest

from halfbyte import memory
from halfbyte.layouts import cpu_tiles

# Page faults of a pass through three layers' worth of memory: the median of some, because a kept heap may still grow by a block
# in a pass or two, when small objects have come to lie in a hole that was large enough before.
PROGRAM = """
import resource, statistics, sys
import torch
from halfbyte.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << size) for size in (24, 22, 23)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

asked = sys.argv[1] == "ask" and keep_freed_memory()
print(asked, int(statistics.median(faults() for _ in range(15))))
"""


def run(how: str) -> tuple[bool, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    asked, faults = done.stdout.split()
    return asked == "True", int(faults)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_is_taken_again() -> None:
    asked, faults = run("ask")
    assert asked
    _, usual = run("no")
    assert faults < usual / 10


def test_a_system_that_can_not_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert memory.keep_freed_memory() is False
    monkeypatch.setattr(memory, "sys", SimpleNamespace(platform="win32"))
    assert memory.keep_freed_memory() is False


@pytest.mark.skipif(sys.platform != "linux", reason="others do not say which pages are huge")
def test_weights_lie_side_by_side_and_their_pages_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_allocator", memory._Allocator())
    before, weight, after = (cpu_tiles.allocate(size).fill_(1) for size in (100, 9 * mmap.PAGESIZE, 100))
    start = before.data_ptr() % (1 << 21)
    assert (start, weight.data_ptr() - before.data_ptr(), after.data_ptr() - weight.data_ptr()) == (0, 128, 9 * mmap.PAGESIZE)
    assert weight.untyped_storage().nbytes() == weight.numel()  # a copy, or a file of it, has nothing else
    region = memory._allocator.thread.region
    assert region is not None
    del weight
    assert region.memory[: 1 << 22].count(1) < 100 + 2 * mmap.PAGESIZE + 100
    assert int(before.sum() + after.sum()) == 200
    assert cpu_tiles.allocate(memory._REGION + 1).numel() == memory._REGION + 1  # a region of its own
    assert memory._allocator.thread.region is region
