"""What settings of the C library do to a process, each in one of its own: there is no way back; and caches, which forget what they must."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from halfbyte import memory
from halfbyte.bounded import Bounded, by_object, by_tensor, count_write
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


def run(how: str, program: str = PROGRAM) -> tuple[bool, int]:
    done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
    asked, number = done.stdout.split()
    return asked == "True", int(number)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_is_taken_again() -> None:
    asked, faults = run("ask")
    assert asked
    _, usual = run("no")
    assert faults < usual / 10


# Memory in MB after a thread that lives on has freed 32 MB of small blocks, where a large one, freed before, lets glibc keep as much.
THREAD = """
import mmap, sys, threading
from halfbyte.memory import return_freed_memory, share_one_heap

def use():
    bytearray(1 << 24)
    blocks = [bytearray(b"x") * (1 << 16) for _ in range(512)]
    del blocks
    freed.set()
    end.wait()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE / 1e6

asked = sys.argv[1] == "ask" and share_one_heap()
freed, end = threading.Event(), threading.Event()
before, thread = resident(), threading.Thread(target=use)
thread.start()
freed.wait()
return_freed_memory()
print(asked, int(resident() - before))
end.set()
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_memory_that_threads_have_freed_goes_back() -> None:
    asked, more = run("ask", THREAD)
    assert asked
    assert more < 8
    assert run("no", THREAD)[1] > 16, "the C library returns it anyway: this setting is of no more use"


def test_a_system_that_can_not_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert memory.keep_freed_memory() is memory.share_one_heap() is False
    memory.return_freed_memory()  # musl and macOS have no malloc_trim
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


@torch.inference_mode()
def test_writes_to_an_inference_tensor_are_those_that_are_counted() -> None:
    total = by_tensor(lambda tensor: float(tensor.sum()))
    x = torch.ones(3)
    assert total(x) == 3
    x.add_(1)
    count_write(x)
    assert total(x) == 6
