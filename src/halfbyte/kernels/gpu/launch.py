"""The one door to the GPU: `run` starts a kernel, `workspace`, `locks` and `turns` give it memory beside its operands.

Whatever goes through `run` can be recorded: `recording` collects the launches of a block of code, so that they can be
compiled ahead of time for a GPU that is not there, or made again without Python's share of the work (`relaunch.py`). `compiling`
compiles the kernels of a block side by side: a launch compiles its own while everything else waits.

Kernels that split K meet in a workspace and count arrivals in locks. Two launches that may overlap must not share either,
so there is one of each for every stream. A graph may be replayed on any stream later: while it is captured, workspaces come
from its own memory, and locks are a piece of memory that nobody else is given until `release` tells that the graph is gone.
torch.compile runs what it will capture once before, with the allocations of that thread in the graphs' memory, where nothing may outlive
the run: what is kept is allocated by another one.

A kernel that writes before the one before it has ended takes memory of `turns`: a workspace, or a graph's own memory, may be what another
is still reading.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from subprocess import CalledProcessError
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu, gpu, machine


class Call(NamedTuple):
    """One launch: `kernel[grid](*args, **options)`. `compiled` is what Triton made of it, None where nothing was run."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    compiled: Any


class _Recorder(NamedTuple):
    calls: list[Call]
    dry: bool


_MOST_THREADS = 16  # that compile

_Free = TypeVar("_Free")
_recorder: ContextVar[_Recorder | None] = ContextVar("_recorder", default=None)
_compiles: ContextVar[bool] = ContextVar("_compiles", default=False)


def starts_early(gpu: Gpu) -> bool:
    """Whether a kernel may start before the one before it has ended (programmatic dependent launch): from Hopper on."""
    return gpu.backend == "cuda" and gpu.capability >= (9, 0) and not triton.knobs.runtime.interpret


def early_after(x: Tensor) -> bool:
    """Whether a kernel that reads x may."""
    return x.is_cuda and starts_early(gpu(x.get_device()))


def run(kernel: Any, grid: tuple[int, ...], *args: Any, early: bool = False, **options: Any) -> None:
    """`kernel[grid](*args, **options)`. Every kernel of this room is started by this; options are constexprs and num_warps and the like.

    early  it may start before the kernel before it has ended, for whose results it waits itself (gdc_wait)

    Raises KernelError where Triton cannot compile the kernel for this GPU, or the GPU has not the shared memory for it; UnsupportedError
    where there is no C compiler, by which Triton makes what launches a kernel.
    """
    if hasattr(kernel, "fn"):  # Triton's, not torch's own
        options.setdefault("enable_fp_fusion", True)  # Triton 3.9 warns where it is not said, and will change what it is then
    if early:
        options["launch_pdl"] = True  # which other backends than NVIDIA's do not know
    if _compiles.get():
        if hasattr(kernel, "warmup"):  # torch's own are there already
            kernel.warmup(*args, grid=grid, **options)
        return
    recorder = _recorder.get()
    compiled = None
    if recorder is None or not recorder.dry:
        try:
            compiled = kernel[grid](*args, **options)
        except Exception as error:
            if isinstance(error, CalledProcessError) or "C compiler" in str(error):
                what = f"Triton makes what launches its kernels by a C compiler, which fails here ({error})"
                raise UnsupportedError(f"{what}: install gcc and Python's headers (python3-dev), or use the CPU") from error
            if not type(error).__module__.startswith("triton.") and "PassManager" not in str(error):
                raise
            raise KernelError(f"{kernel.__name__} does not compile for this GPU ({type(error).__name__}: {error})") from error
    if recorder is not None:
        recorder.calls.append(Call(kernel, grid, args, options, compiled))


@contextmanager
def recording(*, dry: bool = False) -> Iterator[list[Call]]:
    """The launches that the block makes on this thread; `dry` ones are not made at all, so that tensors may be on the meta device."""
    calls: list[Call] = []
    token = _recorder.set(_Recorder(calls, dry))
    try:
        yield calls
    finally:
        _recorder.reset(token)


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """A block on this thread whose launches are not made: their kernels are compiled by as many threads as there are cores, and are ready
    on `device`, the current one, when the block ends. What does not compile says so when it is launched."""
    token = _compiles.set(True)
    try:
        with (
            ThreadPoolExecutor(min(_MOST_THREADS, machine().cores)) as pool,
            triton.AsyncCompileMode(_Loading(pool, device), ignore_errors=True),
        ):
            yield
    finally:
        _compiles.reset(token)


def is_compiling() -> bool:
    """Whether this is within `compiling`: results are undefined, and no launches may be kept."""
    return _compiles.get()


class _Loading:
    """An executor for Triton's functions that compile: they also make the launcher, by a C compiler, and load the kernel."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool, self._device = pool, device

    def submit(self, compile: Callable[[], Any]) -> Any:
        return self._pool.submit(self._loaded, compile)

    def _loaded(self, compile: Callable[[], Any]) -> Any:
        compiled = compile()
        with torch.cuda.device(self._device):
            assert compiled.run is not None
        return compiled


# Memory

_LEAST_BYTES = 1 << 16
_MOST_KEPT = 1 << 26
_LEAST_LOCKS = 1 << 16
_LEAST_OF_GRAPH = 1 << 8  # tuning captures a graph for each config
_ARENA = 1 << 23  # locks, for the graphs of one device
_PLACE = 1 << 18  # bytes of which a place of turns has a multiple
_MOST_OF_GRAPHS = 1 << 27  # bytes of turns, for the graphs of one device

Owner = tuple[int, int, int]  # device, stream and graph

_workspaces: dict[tuple[int, int], Tensor] = {}  # by device and stream
_spread_codes: dict[tuple[int, int], Tensor] = {}
_locks: dict[tuple[int, int], Tensor] = {}
_graph_locks: dict[Owner, Tensor] = {}
_arenas: dict[int, Tensor] = {}  # what is left for graphs, by device
_turns: dict[Owner, list[Tensor]] = {}  # two places, the one that was given last behind
_left_turns: dict[int, Tensor] = {}  # for graphs, by device
_given_turns: dict[int, int] = {}  # bytes of turns that there were for graphs, by device
_free_locks: dict[int, list[Tensor]] = {}  # of graphs that are gone, by device
_free_turns: dict[int, list[list[Tensor]]] = {}


def workspace(device: torch.device, nbytes: int) -> Tensor:
    """uint8 [at least nbytes] of unknown content, aligned to 256 bytes. The next launch on the same stream may write to it."""
    return _kept(_workspaces, device, nbytes)


def spread_codes(device: torch.device, nbytes: int) -> Tensor:
    """The same, other memory: for codes that the next launch reads, which may have a workspace."""
    return _kept(_spread_codes, device, nbytes)


def _kept(by_stream: dict[tuple[int, int], Tensor], device: torch.device, nbytes: int) -> Tensor:
    index, stream, graph = _where(device)
    if graph or nbytes > _MOST_KEPT:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = by_stream.get((index, stream))
    if found is None or found.numel() < nbytes:
        found = by_stream[index, stream] = _lasting(torch.uint8, max(_LEAST_BYTES, _power_of_two(nbytes)), device)
    return found


def locks(device: torch.device, n: int) -> Tensor:
    """int32 [at least n], all 0. Kernels that change them leave 0 behind. Some are sums that a program waits for (`skinny_hopper.py`)."""
    index, stream, graph = _where(device)
    if graph:
        return _locks_of_graph(device, n, (index, stream, graph))
    found = _locks.get((index, stream))
    if found is None or found.numel() < n:
        found = _locks[index, stream] = _lasting(torch.int32, max(_LEAST_LOCKS, _power_of_two(n)), device)
    if index >= 0 and (index not in _arenas or _arenas[index].numel() < _ARENA // 2):
        _arenas[index] = _lasting(torch.int32, _ARENA, device)
    return found


def turns(device: torch.device, nbytes: int) -> Tensor:
    """uint8 [at least nbytes] of unknown content, aligned to 256 bytes; of two places each time the other one; for 0 the last one again.

    Kernel A writes to it and B reads that, C and D do so with the other place. C may write before B has ended: nobody uses that place any
    more, if readers wait for the kernel before them before they let the next one start, and writers do before they end (gdc_wait).
    """
    index, _, graph = key = _where(device)
    found = _turns.get(key)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device) if found is None else found[1]
    size = round_up(nbytes, _PLACE)
    left, given = _left_turns.get(index), _given_turns.get(index, 0)
    if found is None or found[0].numel() < nbytes:
        if graph and (again := _first(_free_turns.get(index, []), lambda free: free[0].numel() >= nbytes)) is not None:
            found = _turns[key] = again
            found.reverse()
            return found[1]
        if graph and left is not None and left.numel() >= 2 * size:
            places, _left_turns[index] = left[: 2 * size], left[2 * size :]
        elif graph or nbytes > _MOST_KEPT:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            memory[:1].zero_()  # by a kernel that lets none start early: whatever came before it has ended then
            return memory
        else:
            places = _lasting(torch.uint8, 2 * size, device)
        found = _turns[key] = list(places.view(2, size))
    if index >= 0 and not graph and (left is None or left.numel() < 2 * size) and given + 4 * size <= _MOST_OF_GRAPHS:
        _given_turns[index], _left_turns[index] = given + 4 * size, _lasting(torch.uint8, 4 * size, device)
    found.reverse()
    return found[1]


def _lasting(dtype: torch.dtype, n: int, device: torch.device) -> Tensor:
    """Zeros [n], ready on the current stream, in memory that belongs to no graph whatever this thread is doing."""
    if device.type != "cuda":
        return torch.zeros(n, dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device)

    def make() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(n, dtype=dtype, device=device)

    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


def _locks_of_graph(device: torch.device, n: int, key: Owner) -> Tensor:
    found = _graph_locks.get(key)
    if found is None or found.numel() < n:
        if (again := _first(_free_locks.get(key[0], []), lambda free: free.numel() >= n)) is not None:
            _graph_locks[key] = again
            return again
        size, left = max(_LEAST_OF_GRAPH, _power_of_two(n)), _arenas.get(key[0])
        if left is None or left.numel() < size:  # setting them to 0 becomes a step of the graph, each time
            return torch.zeros(n, dtype=torch.int32, device=device)
        found, _arenas[key[0]] = left[:size], left[size:]
        _graph_locks[key] = found
    return found


def _first(free: list[_Free], fits: Callable[[_Free], bool]) -> _Free | None:
    """Takes the first that fits out of a list."""
    index = next((i for i, one in enumerate(free) if fits(one)), None)
    return None if index is None else free.pop(index)


def owner(device: torch.device) -> Owner:
    """Who keeps locks and turns now: while a graph is captured, that graph."""
    return _where(device)


def release(graph: Owner) -> None:
    """Gives what a graph kept to others. The graph is gone, and nothing of it runs any more."""
    if (locks := _graph_locks.pop(graph, None)) is not None:
        _free_locks.setdefault(graph[0], []).append(locks)
    if (places := _turns.pop(graph, None)) is not None:
        _free_turns.setdefault(graph[0], []).append(places)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _where(device: torch.device) -> tuple[int, int, int]:
    """Index of the device, its current stream, and the graph that this is captured into; 0 for none."""
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
def _capture_info() -> Any:
    if torch.version.hip is not None:
        return ctypes.CDLL("libamdhip64.so").hipStreamGetCaptureInfo_v2
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
