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


class _DeviceScratch:
    """The scratch buffers of one device, by the stream that launches or by (stream, CUDA graph).

    Attributes:
        workspaces, codes_workspaces: The largest one of at most _MOST_CACHED_BYTES that each stream has asked for.
        locks: All 0 between launches, of each stream.
        graph_locks: Of each graph.
        free_locks: Of graphs that were released.
        lock_arena: Locks that no graph has had.
        double_buffers: Two buffers of a stream or graph, the one that was returned last at the end.
        free_double_buffers: Of graphs that were released.
        buffer_arena: Memory for double buffers that no graph has had.
        arena_bytes: All that `buffer_arena` has had, at most _MOST_GRAPH_BYTES.
    """

    def __init__(self) -> None:
        self.workspaces: dict[int, Tensor] = {}
        self.codes_workspaces: dict[int, Tensor] = {}
        self.locks: dict[int, Tensor] = {}
        self.graph_locks: dict[tuple[int, int], Tensor] = {}
        self.free_locks: list[Tensor] = []
        self.lock_arena: Tensor | None = None
        self.double_buffers: dict[tuple[int, int], list[Tensor]] = {}
        self.free_double_buffers: list[list[Tensor]] = []
        self.buffer_arena: Tensor | None = None
        self.arena_bytes = 0


# Scratch buffers by the index of the device (-1: the CPU), until the process ends: each stream, of which torch has a fixed number, and each
# live graph has one of each kind. Nothing invalidates them: their content is unknown to each launch, and locks are 0 between launches.
# Threads that launch on one stream at the same time would share buffers, as they would on any other memory: they must synchronize.
_devices: dict[int, _DeviceScratch] = {}


def _scratch_of(index: int) -> _DeviceScratch:
    scratch = _devices.get(index)
    return _devices.setdefault(index, _DeviceScratch()) if scratch is None else scratch


def workspace(device: torch.device, nbytes: int) -> Tensor:
    """Return uint8 [at least nbytes] of unknown content, aligned to 256 bytes. The next launch on the same stream may write to it."""
    index, stream, graph = _where(device)
    return _workspace_of(_scratch_of(index).workspaces, stream, graph, device, nbytes)


def codes_workspace(device: torch.device, nbytes: int) -> Tensor:
    """Return a second workspace, for the codes of a sparse weight with its zeros: the launch that reads them may need one itself."""
    index, stream, graph = _where(device)
    return _workspace_of(_scratch_of(index).codes_workspaces, stream, graph, device, nbytes)


def _workspace_of(by_stream: dict[int, Tensor], stream: int, graph: int, device: torch.device, nbytes: int) -> Tensor:
    if graph or nbytes > _MOST_CACHED_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    buffer = by_stream.get(stream)
    if buffer is None or buffer.numel() < nbytes:
        buffer = by_stream[stream] = _lasting(torch.uint8, max(_LEAST_BYTES, _power_of_two(nbytes)), device)
    return buffer


def locks(device: torch.device, n: int) -> Tensor:
    """Return int32 [at least n], all 0. Kernels reset what they change; some are sums that a program polls (`skinny_hopper.py`)."""
    index, stream, graph = _where(device)
    scratch = _scratch_of(index)
    if graph:
        return _locks_of_graph(scratch, device, n, (stream, graph))
    buffer = scratch.locks.get(stream)
    if buffer is None or buffer.numel() < n:
        buffer = scratch.locks[stream] = _lasting(torch.int32, max(_LEAST_LOCKS, _power_of_two(n)), device)
    if index >= 0 and (scratch.lock_arena is None or scratch.lock_arena.numel() < _ARENA_LOCKS // 2):
        scratch.lock_arena = _lasting(torch.int32, _ARENA_LOCKS, device)
    return buffer


def _locks_of_graph(scratch: _DeviceScratch, device: torch.device, n: int, graph: tuple[int, int]) -> Tensor:
    buffer = scratch.graph_locks.get(graph)
    if buffer is None or buffer.numel() < n:
        if (freed := _take(scratch.free_locks, lambda free: free.numel() >= n)) is not None:
            scratch.graph_locks[graph] = freed
            return freed
        size, arena = max(_LEAST_GRAPH_LOCKS, _power_of_two(n)), scratch.lock_arena
        if arena is None or arena.numel() < size:  # each replay of the graph sets them to 0
            return torch.zeros(n, dtype=torch.int32, device=device)
        buffer, scratch.lock_arena = arena[:size], arena[size:]
        scratch.graph_locks[graph] = buffer
    return buffer


def double_buffer(device: torch.device, nbytes: int) -> Tensor:
    """Return one of two buffers in turn, uint8 [at least nbytes] of unknown content, aligned to 256 bytes.

    Kernel A writes to it and B reads that, C and D do so with the other buffer. C may write before B has ended: no kernel uses that buffer
    any more, if readers wait for the kernel before them before they let the next one start, and writers do before they end (gdc_wait).
    """
    index, stream, graph = _where(device)
    scratch, key = _scratch_of(index), (stream, graph)
    buffers = scratch.double_buffers.get(key)
    size, arena = round_up(nbytes, _BUFFER_ALIGNMENT), scratch.buffer_arena
    if buffers is None or buffers[0].numel() < nbytes:
        if graph and (freed := _take(scratch.free_double_buffers, lambda free: free[0].numel() >= nbytes)) is not None:
            buffers = scratch.double_buffers[key] = freed
            buffers.reverse()
            return buffers[1]
        if graph and arena is not None and arena.numel() >= 2 * size:
            memory, scratch.buffer_arena = arena[: 2 * size], arena[2 * size :]
        elif graph or nbytes > _MOST_CACHED_BYTES:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            memory[:1].zero_()  # a kernel without programmatic dependent launch: those before it have ended then
            return memory
        else:
            memory = _lasting(torch.uint8, 2 * size, device)
        buffers = scratch.double_buffers[key] = list(memory.view(2, size))
    has_room = scratch.arena_bytes + 4 * size <= _MOST_GRAPH_BYTES
    if index >= 0 and not graph and (arena is None or arena.numel() < 2 * size) and has_room:
        scratch.arena_bytes += 4 * size
        scratch.buffer_arena = _lasting(torch.uint8, 4 * size, device)
    buffers.reverse()
    return buffers[1]


def owner(device: torch.device) -> Owner:
    """Return the owner of locks and double buffers that are asked for now: while a graph is captured, that graph."""
    return _where(device)


def release(graph: Owner) -> None:
    """Give the locks and double buffers of a graph to others. The graph is gone, and none of its kernels runs any more."""
    scratch, owner_key = _scratch_of(graph[0]), graph[1:]
    if (locks := scratch.graph_locks.pop(owner_key, None)) is not None:
        scratch.free_locks.append(locks)
    if (buffers := scratch.double_buffers.pop(owner_key, None)) is not None:
        scratch.free_double_buffers.append(buffers)


def _take(free: list[_Free], fits: Callable[[_Free], bool]) -> _Free | None:
    """Remove the first that fits from a list, and return it."""
    index = next((i for i, one in enumerate(free) if fits(one)), None)
    return None if index is None else free.pop(index)


def _lasting(dtype: torch.dtype, n: int, device: torch.device) -> Tensor:
    """Return zeros [n], ready on the current stream, in memory that belongs to no graph whatever this thread is capturing."""
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
    """Return the index of the device, its current stream, and the graph that the stream is captured into; 0 for none."""
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
    """Return the id of the graph that `stream` is being captured into; no two graphs have the same."""
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
