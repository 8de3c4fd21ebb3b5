"""Pages of memory: huge ones, and the C library's returning of pages to the system after each layer, to request them again."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# <malloc.h> of glibc, and its largest int: no block is so large, no heap so empty.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_HUGE_PAGE, _MADV_HUGEPAGE = 1 << 21, 14  # Linux on x86-64 and most of 64-bit Arm


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


@functools.cache
def _advise() -> Callable[[int, int, int], object]:
    """madvise(2), or nothing where it is not Linux."""
    if sys.platform != "linux":
        return lambda *_: None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def keep_freed_memory() -> bool:
    """Lets this process reuse memory that it has freed instead of returning it to the system. True if the C library can (glibc can).

    glibc maps each large block separately and unmaps it when it is freed, and torch allocates each layer's output anew. Every page
    is then mapped and cleared again in every layer, which for a batch of sentences takes as long as the matrix products.
    The price: the process keeps its peak memory until it ends. The setting affects the whole process, so it is for programs to
    call, not for libraries. See mallopt(3); jemalloc and tcmalloc behave similarly.
    """
    mallopt = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(parameter, _NEVER) == 1 for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
