"""Pages of memory: asking the system for huge ones, and keeping the C library from returning freed ones after each layer."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# <malloc.h> of glibc, and its largest int: no block is so large, no heap so empty.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1
_HUGE_PAGE, _MADV_HUGEPAGE = 1 << 21, 14  # Linux on x86-64 and most of 64-bit Arm
_REGION, _LINE = 1 << 28, 64  # bytes


def in_huge_pages(memory: Tensor) -> Tensor:
    """`memory`, just allocated, whose pages the system is asked to make huge (Linux; elsewhere nothing happens).

    A page fault then maps 2 MB instead of 4 KB, and there are fewer translations of addresses. No more memory is taken:
    huge pages that would reach beyond the tensor are not requested.
    """
    first = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE * _HUGE_PAGE - first
    if size > 0:
        _advise()(first, size, _MADV_HUGEPAGE)  # what fails changes nothing
    return memory


class _Region:
    """Memory in huge pages, handed out in parts from front to back."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # where the kernel has none
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.taken = -ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) % _HUGE_PAGE

    def take(self, size: int) -> ctypes.Array[ctypes.c_char] | None:
        start, stop = self.taken, self.taken + size
        if stop > len(self.memory):
            return None
        self.taken = -(-stop // _LINE) * _LINE
        part = (ctypes.c_char * size).from_buffer(self.memory, start)
        weakref.finalize(part, _give_back, self.memory, start, stop).atexit = False
        return part


def _give_back(memory: mmap.mmap, start: int, stop: int) -> None:
    """Return the whole pages between two addresses to the system; the mapping itself ends when no part of `memory` is in use any more."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)


class _Thread(threading.local):
    region: _Region | None = None


class _Allocator:
    """The blocks of memory that `side_by_side` returned and that are in use, and the region that each thread takes the next ones from.

    Nothing is cached that could become stale: both say what memory is in use.

    blocks  by address: `joined` finds that several tensors fill neighbouring blocks. A block leaves with its last reference
    thread  one region of _REGION bytes for each thread, so that its blocks follow each other, and so that threads need no lock
    """

    def __init__(self) -> None:
        self.blocks = weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_char]]()
        self.thread = _Thread()

    def allocate(self, size: int) -> ctypes.Array[ctypes.c_char] | None:
        block = self._block(size)
        if block is not None:
            self.blocks[ctypes.addressof(block)] = block
        return block

    def _block(self, size: int) -> ctypes.Array[ctypes.c_char] | None:
        if size > _REGION:
            return _Region(size).take(size)
        block = None if self.thread.region is None else self.thread.region.take(size)
        if block is None:
            # Frees what earlier weights were made from: it lies unused in the C library's heap, and this region does not come from there.
            return_freed_memory()
            self.thread.region = _Region(_REGION)
            block = self.thread.region.take(size)
        return block


_allocator = _Allocator()


def side_by_side(size: int) -> ctypes.Array[ctypes.c_char] | None:
    """`size` zero bytes, aligned to 64, right behind those that this thread asked for last. None where that is not known to help.

    On Linux huge pages then hold many small tensors whole. Allocated one by one, each tensor has ordinary pages at both ends, where a huge
    page would be shared with others.
    """
    if sys.platform != "linux" or not size:
        return None
    return _allocator.allocate(size)


def joined(parts: Sequence[Tensor]) -> ctypes.Array[ctypes.c_char] | None:
    """The memory of several tensors as one block, if each fills what one call of `side_by_side` returned and they follow each other without
    gaps; else None."""
    memory = [_allocator.blocks.get(part.data_ptr()) for part in parts]
    at = parts[0].data_ptr()
    for part, tensor in zip(memory, parts, strict=True):
        if part is None or tensor.data_ptr() != at or len(part) != tensor.nbytes:
            return None
        at += len(part)
    whole = (ctypes.c_char * sum(part.nbytes for part in parts)).from_address(parts[0].data_ptr())
    whole.parts = memory  # type: ignore[attr-defined]  # which are freed with their last reference
    return whole


@functools.cache
def _advise() -> Callable[[int, int, int], object]:
    """madvise(2), or nothing where it is not Linux."""
    if sys.platform != "linux":
        return lambda *_: None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def return_freed_memory() -> None:
    """Return the pages of the C library's heap that nothing uses to the system, those between blocks that are in use, too.

    Nothing happens where the C library is not glibc. It takes 10 to 80 ms for 100 MB, and page faults follow.
    """
    if sys.platform != "win32":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)


def keep_freed_memory() -> bool:
    """Let this process reuse memory that it has freed instead of returning it to the system.

    glibc maps each large block separately and unmaps it when it is freed, and torch allocates each layer's output anew. Every page is then
    mapped and cleared again in every layer, which for a batch of sentences takes as long as the matrix products. The price: the process
    keeps its peak memory until it ends. The setting affects the whole process, so it is for programs to call, not for libraries. See
    mallopt(3); jemalloc and tcmalloc behave similarly.

    Returns:
        Whether the C library can (glibc can).

    Example:
        >>> isinstance(hb.keep_freed_memory(), bool)
        True
    """
    return all(_mallopt(parameter, _NEVER) for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def share_one_heap() -> bool:
    """Let the threads of this process that start from now on allocate from the C library's main heap.

    glibc gives threads heaps of their own, and `return_freed_memory` cannot return the free memory at the end of these: up to 64 MB of each
    stay (malloc_trim shortens the main heap alone). The setting affects the whole process, so it is for programs to call.

    Returns:
        Whether the C library can (glibc can).
    """
    return _mallopt(_M_ARENA_MAX, 1)


def _mallopt(parameter: int, value: int) -> bool:
    """Call mallopt(3). Returns whether it has succeeded: not every C library has it."""
    mallopt = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1


def peak_memory() -> int | None:
    """The peak memory of this process in bytes; None where the system does not report it."""
    return _reported("/proc/self/status", "VmHWM:")


def available_memory() -> int | None:
    """Bytes of main memory that programs can take without swapping; None where the system does not report it."""
    return _reported("/proc/meminfo", "MemAvailable:")


def _reported(path: str, key: str) -> int | None:
    """The bytes of a line "key: n kB" of a file of Linux."""
    try:
        with open(path, encoding="ascii") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith(key)), None)
    except OSError:
        return None


def size_text(count: int) -> str:
    """A human-readable number of bytes, in powers of 1000: "90.9 MB"."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
