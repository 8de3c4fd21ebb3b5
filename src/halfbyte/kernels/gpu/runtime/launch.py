"""Starts kernels: every kernel of `kernels/gpu` is launched by `run`.

`recording` collects the launches of a block of code, so that they can be compiled ahead of time for another GPU, or replayed without the
host overhead of Triton's launcher (`tape.py`). `compiling` compiles the kernels of a block side by side instead of launching them.

Triton is imported by the functions that need it: ops on all devices import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import gt
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.kernels.gpu.values import Value
from halfbyte.machine import Gpu, gpu, machine

_MOST_THREADS = 16  # that compile
_LONGEST_GRID = (1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1  # programs along each dimension (CUDA C++ Programming Guide)


class Launch(NamedTuple):
    """One launch: `kernel[grid](*args, **options)`. `compiled` is Triton's compiled kernel, None for other kernels and dry runs."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[object, ...]
    options: dict[str, object]
    compiled: Value


@dataclass(slots=True)
class Recording:
    """The launches of a block of code.

    Attributes:
        dry: Whether launches are recorded only, not made, so that tensors may be on the meta device.
        launches: In order.
        buffers: The tensors that were allocated for kernels to write (`output`).
        why_not_replayed: The reason why other kernels than those of `launches` ran, too; None where no op has told one.
    """

    dry: bool = False
    launches: list[Launch] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    why_not_replayed: str | None = None


_recording: ContextVar[Recording | None] = ContextVar("_recording", default=None)
_compiles: ContextVar[bool] = ContextVar("_compiles", default=False)


def starts_early(gpu: Gpu) -> bool:
    """Whether a kernel may start before the one before it has ended (programmatic dependent launch): from Hopper on."""
    if gpu.backend != "cuda" or gpu.capability < (9, 0):
        return False
    import triton

    return not triton.knobs.runtime.interpret


def early_after(x: Tensor) -> bool:
    """Whether a kernel that reads x may."""
    return x.is_cuda and starts_early(gpu(x.get_device()))


def flat_grid(rows: int, columns: int) -> tuple[int]:
    """Return the grid of rows * columns programs that `arithmetic.row_and_column` tells apart, for columns that may exceed 65 535."""
    return (rows * columns,)


def run(kernel: Any, grid: tuple[int, ...], *args: object, early: bool = False, **options: object) -> None:
    """Launch `kernel[grid](*args, **options)`.

    Args:
        kernel: One of Triton's or Gluon's, or torch's in the same form.
        grid: The number of programs, up to three dimensions.
        args: The kernel's arguments.
        early: Whether it may start before the kernel before it has ended, for whose results it waits itself (gdc_wait).
        options: constexprs, num_warps and the like.

    Raises:
        KernelError: Triton cannot compile the kernel for this GPU, the GPU has not the shared memory for it, or the grid is too long.
        UnsupportedError: There is no C compiler, which Triton compiles its launcher by.
    """
    if hasattr(kernel, "fn"):  # Triton's, not torch's own
        options.setdefault("enable_fp_fusion", True)  # Triton 3.9 warns where it is not said, and will change its default
    if any(map(gt, grid, _LONGEST_GRID)):
        raise KernelError(f"{kernel.__name__} would run as {grid} programs, of at most {_LONGEST_GRID}: split the tensors")
    if early:
        options["launch_pdl"] = True  # unknown to other backends than NVIDIA's
    if _compiles.get():
        if hasattr(kernel, "warmup"):  # torch's own are compiled already
            kernel.warmup(*args, grid=grid, **options)
        return
    recording = _recording.get()
    compiled = None
    if recording is None or not recording.dry:
        try:
            compiled = kernel[grid](*args, **options)
        except Exception as error:
            if isinstance(error, CalledProcessError) or "C compiler" in str(error):
                what = f"Triton compiles the launcher of its kernels by a C compiler, which fails here ({error})"
                raise UnsupportedError(f"{what}: install gcc and Python's headers (python3-dev), or use the CPU") from error
            if not type(error).__module__.startswith("triton.") and "PassManager" not in str(error):
                raise
            raise KernelError(f"{kernel.__name__} does not compile for this GPU ({type(error).__name__}: {_innermost(error)})") from error
    if recording is not None:
        recording.launches.append(Launch(kernel, grid, args, options, compiled))


def _innermost(error: BaseException) -> BaseException:
    """The error of the function in which Triton found it: those of its callers only show where they call it."""
    return error if error.__cause__ is None else _innermost(error.__cause__)


@contextmanager
def recording(*, dry: bool = False) -> Iterator[Recording]:
    """Record the launches that the block makes on this thread, within an outer recording instead of it."""
    current = Recording(dry)
    token = _recording.set(current)
    try:
        yield current
    finally:
        _recording.reset(token)


# The recording that is under way on this thread, or None. (A function in C: ops call it each time.)
current_recording: Callable[[], Recording | None] = _recording.get


def output(tensor: Tensor) -> Tensor:
    """Return a tensor that was allocated for kernels to write, and add it to the buffers of the recording under way."""
    recording = _recording.get()
    if recording is not None:
        recording.buffers.append(tensor)
    return tensor


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """A block on this thread whose kernels are compiled, by as many threads as there are cores, and loaded on `device`, the current one,
    but not launched. A kernel that does not compile raises its error when it is launched."""
    import triton

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
    """Whether this is within `compiling`, where results are undefined and launches must not be recorded."""
    return _compiles.get()


class _Loading:
    """An executor for Triton's functions that compile: they also compile the launcher in C, and load the kernel."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool, self._device = pool, device

    def submit(self, compile: Callable[[], object]) -> object:
        return self._pool.submit(self._loaded, compile)

    def _loaded(self, compile: Callable[[], Value]) -> object:
        compiled = compile()
        with torch.cuda.device(self._device):
            assert compiled.run is not None
        return compiled
