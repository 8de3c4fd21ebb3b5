"""Scratch buffers: memory of kernels that is no operand. Workspaces hold partial sums, locks count arrivals of programs.

Two launches that may overlap must not share either, so there is one of each for every stream. A CUDA graph may be replayed on any stream
later: while it is captured, workspaces come from its own memory, and locks are set aside for that graph alone until `release` says that
the graph is gone. torch.compile runs what it will capture once before, with this thread's allocations in the graphs' memory, where nothing
may outlive the run: buffers that are cached are allocated by another thread.

A kernel that writes before the kernel before it has ended (programmatic dependent launch) takes a double buffer: that kernel may still read
a workspace, or a graph's own memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from halfbyte.errors import KernelError
from halfbyte.layouts.base import round_up

_LEAST_BYTES = 1 << 16
_MOST_CACHED_BYTES = 1 << 26
_LEAST_LOCKS = 1 << 16
_LEAST_GRAPH_LOCKS = 1 << 8  # tuning captures a graph for each config
_ARENA_LOCKS = 1 << 23  # for the graphs of one device
_BUFFER_ALIGNMENT = 1 << 18  # the size of a double buffer is a multiple of it
_MOST_GRAPH_BYTES = 1 << 27  # double buffers for the graphs of one device

Owner = tuple[int, int, int]  # device, stream, and the id of the CUDA graph or 0

_Free = TypeVar("_Free")
_workspaces: dict[tuple[int, int], Tensor] = {}  # by device and stream
_codes_workspaces: dict[tuple[int, int], Tensor] = {}
_locks: dict[tuple[int, int], Tensor] = {}
_graph_locks: dict[Owner, Tensor] = {}
_free_locks: dict[int, list[Tensor]] = {}  # of graphs that are gone, by device
_lock_arenas: dict[int, Tensor] = {}  # locks that no graph has had, by device
_double_buffers: dict[Owner, list[Tensor]] = {}  # two buffers, the one that was returned last behind
_free_double_buffers: dict[int, list[list[Tensor]]] = {}  # of graphs that are gone, by device
_buffer_arenas: dict[int, Tensor] = {}  # memory for double buffers that no graph has had, by device
_arena_bytes: dict[int, int] = {}  # all that there was of it, by device


def workspace(device: torch.device, nbytes: int) -> Tensor:
    """uint8 [at least nbytes] of unknown content, aligned to 256 bytes. The next launch on the same stream may write to it."""
    return _workspace_of(_workspaces, device, nbytes)


def codes_workspace(device: torch.device, nbytes: int) -> Tensor:
    """A second workspace, for the codes of a sparse weight with its zeros: the launch that reads them may need a workspace itself."""
    return _workspace_of(_codes_workspaces, device, nbytes)


def _workspace_of(by_stream: dict[tuple[int, int], Tensor], device: torch.device, nbytes: int) -> Tensor:
    index, stream, graph = _where(device)
    if graph or nbytes > _MOST_CACHED_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    buffer = by_stream.get((index, stream))
    if buffer is None or buffer.numel() < nbytes:
        buffer = by_stream[index, stream] = _lasting(torch.uint8, max(_LEAST_BYTES, _power_of_two(nbytes)), device)
    return buffer


def locks(device: torch.device, n: int) -> Tensor:
    """int32 [at least n], all 0. Kernels that change them leave 0 behind. Some are sums that a program waits for (`skinny_hopper.py`)."""
    index, stream, graph = _where(device)
    if graph:
        return _locks_of_graph(device, n, (index, stream, graph))
    buffer = _locks.get((index, stream))
    if buffer is None or buffer.numel() < n:
        buffer = _locks[index, stream] = _lasting(torch.int32, max(_LEAST_LOCKS, _power_of_two(n)), device)
    if index >= 0 and (index not in _lock_arenas or _lock_arenas[index].numel() < _ARENA_LOCKS // 2):
        _lock_arenas[index] = _lasting(torch.int32, _ARENA_LOCKS, device)
    return buffer


def _locks_of_graph(device: torch.device, n: int, graph: Owner) -> Tensor:
    buffer = _graph_locks.get(graph)
    if buffer is None or buffer.numel() < n:
        if (freed := _take(_free_locks.get(graph[0], []), lambda free: free.numel() >= n)) is not None:
            _graph_locks[graph] = freed
            return freed
        size, arena = max(_LEAST_GRAPH_LOCKS, _power_of_two(n)), _lock_arenas.get(graph[0])
        if arena is None or arena.numel() < size:  # setting them to 0 becomes a step of the graph, each time
            return torch.zeros(n, dtype=torch.int32, device=device)
        buffer, _lock_arenas[graph[0]] = arena[:size], arena[size:]
        _graph_locks[graph] = buffer
    return buffer


def double_buffer(device: torch.device, nbytes: int) -> Tensor:
    """uint8 [at least nbytes] of unknown content, aligned to 256 bytes: of two buffers each time the other one; for 0 the last one again.

    Kernel A writes to it and B reads that, C and D do so with the other buffer. C may write before B has ended: no kernel uses that buffer
    any more, if readers wait for the kernel before them before they let the next one start, and writers do before they end (gdc_wait).
    """
    index, _, graph = owned = _where(device)
    buffers = _double_buffers.get(owned)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device) if buffers is None else buffers[1]
    size = round_up(nbytes, _BUFFER_ALIGNMENT)
    arena, allocated = _buffer_arenas.get(index), _arena_bytes.get(index, 0)
    if buffers is None or buffers[0].numel() < nbytes:
        if graph and (freed := _take(_free_double_buffers.get(index, []), lambda free: free[0].numel() >= nbytes)) is not None:
            buffers = _double_buffers[owned] = freed
            buffers.reverse()
            return buffers[1]
        if graph and arena is not None and arena.numel() >= 2 * size:
            memory, _buffer_arenas[index] = arena[: 2 * size], arena[2 * size :]
        elif graph or nbytes > _MOST_CACHED_BYTES:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            memory[:1].zero_()  # by a kernel that lets none start early: all kernels before it have ended then
            return memory
        else:
            memory = _lasting(torch.uint8, 2 * size, device)
        buffers = _double_buffers[owned] = list(memory.view(2, size))
    if index >= 0 and not graph and (arena is None or arena.numel() < 2 * size) and allocated + 4 * size <= _MOST_GRAPH_BYTES:
        _arena_bytes[index], _buffer_arenas[index] = allocated + 4 * size, _lasting(torch.uint8, 4 * size, device)
    buffers.reverse()
    return buffers[1]


def owner(device: torch.device) -> Owner:
    """The owner of locks and double buffers that are asked for now: while a graph is captured, that graph."""
    return _where(device)


def release(graph: Owner) -> None:
    """Give the locks and double buffers of a graph to others. The graph is gone, and none of its kernels runs any more."""
    if (locks := _graph_locks.pop(graph, None)) is not None:
        _free_locks.setdefault(graph[0], []).append(locks)
    if (buffers := _double_buffers.pop(graph, None)) is not None:
        _free_double_buffers.setdefault(graph[0], []).append(buffers)


def _take(free: list[_Free], fits: Callable[[_Free], bool]) -> _Free | None:
    """Remove the first that fits from a list, and return it."""
    index = next((i for i, one in enumerate(free) if fits(one)), None)
    return None if index is None else free.pop(index)


def _lasting(dtype: torch.dtype, n: int, device: torch.device) -> Tensor:
    """Zeros [n], ready on the current stream, in memory that belongs to no graph whatever this thread is capturing."""
    if device.type != "cuda":
        return torch.zeros(n, dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device)

    def allocate() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(n, dtype=dtype, device=device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _where(device: torch.device) -> Owner:
    """The index of the device, its current stream, and the graph that the stream is captured into; 0 for none."""
    if device.type != "cuda":
        return -1, 0, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = current_stream(index)
    return index, stream, _capture(stream) if torch.cuda.is_current_stream_capturing() else 0


def _public_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The private name takes 0.1 us, the public one 7.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def _capture(stream: int) -> int:
    """The id of the graph that `stream` is being captured into; none is given twice."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    unwanted = ctypes.c_void_p()
    failed = _capture_info()(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), unwanted, unwanted, unwanted)
    if failed:
        raise KernelError(
            f"the driver answered {failed} when asked for the graph that is being captured: capture without halfbyte's layers"
        )
    return number.value


@cache
def _capture_info() -> Callable[..., int]:
    if torch.version.hip is not None:
        return ctypes.CDLL("libamdhip64.so").hipStreamGetCaptureInfo_v2
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
