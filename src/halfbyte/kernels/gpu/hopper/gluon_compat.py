"""What Gluon has in different ways in Triton 3.6 to 3.9; kernels for Hopper take it from here.

Since 3.8 a view by `reinterpret(buffer, dtype, shape, layout)` is as large as `buffer`, which is no slice, and a slice begins at a multiple
of its size. A view of several places of a buffer is therefore an element of a view of the whole buffer. What begins anywhere else needs
LARGER_VIEWS.
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_SHARED = gl.shared_memory_descriptor
reinterpret = _SHARED.reinterpret if hasattr(_SHARED, "reinterpret") else _SHARED._reinterpret  # since 3.9
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # since 3.8
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # since 3.8
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # since 3.7
# Since 3.7 Triton has ptxas allocate registers by a simpler method (--regAllocOptLevel=2), which spills parts of a thread's index that all
# warps compute, where one of them has few registers to spare. With it kernels load less at a time, or give the producer more registers.
FEWER_REGISTERS = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))
LARGER_VIEWS = not hasattr(tma, "async_load")  # before 3.8 a view may go on beyond what it is a view of
