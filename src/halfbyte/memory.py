"""Where a CPU model's time goes that no kernel sees: memory that is given back to the system after each layer, and asked for again."""

from __future__ import annotations

import ctypes
import sys

# <malloc.h> of glibc, and its largest int: no block is so large, no heap so empty.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets this process keep memory that it frees, for what it allocates next. True if the C library can do that (glibc can).

    glibc takes large blocks from the system one by one and gives them back when they are freed, and torch allocates each layer's output
    anew. Every page is then mapped and cleared again in every layer, which for a batch of sentences takes as long as the products.
    The price: until it ends, the process holds the most memory that it ever needed. It changes the whole process, so a program asks
    for it, and no library should. See mallopt(3); jemalloc and tcmalloc do much the same.
    """
    mallopt = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(parameter, _NEVER) == 1 for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
