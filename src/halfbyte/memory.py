"""An option of the C library's allocator: without it, memory is returned to the system after each layer and requested again."""

from __future__ import annotations

import ctypes
import sys

# <malloc.h> of glibc, and its largest int: no block is so large, no heap so empty.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1


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
