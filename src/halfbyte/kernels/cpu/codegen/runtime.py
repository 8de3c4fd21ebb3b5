"""Runs generated code on threads: of torch's OpenMP pool, or of a thread pool.

A kernel is one or two phases, each a function phase(arguments, thread, threads) that does its share of the work. Every thread has finished
the first phase before any begins the second. `runner()` is the one native entry: all kernels are started by it.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from halfbyte import env
from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current

_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")  # the table at `openmp_address`
_THREAD_NUM, _NUM_THREADS, _BARRIER = 1, 2, 3  # places in it
_PROCESS = os.getpid()  # which imported this: another one is a forked child
T = TypeVar("T")
S = TypeVar("S")


def _after_fork() -> None:
    # An OpenMP pool does not live on in a forked child: GOMP_parallel would wait for threads that do not exist. So would torch's own
    # operations, which arrange what kernels read.
    torch.set_num_threads(1)
    runner.cache_clear()
    _forced_threads.cache_clear()


def build(isa: ISA) -> Module:
    """Return a module with run(arguments, threads), which runs both phases in an OpenMP region, or in the caller's thread alone."""
    module = Module(isa.attributes)
    region = module.function("region", ["ptr"])
    args = region.parameters[0]  # of any kernel: the header is the same as LINEAR's
    functions = LINEAR.load(args, "openmp", "ptr")
    number, count = (region.emit("i32", f"call i32 {functions.load('ptr', 8 * i).name}()").to("i64") for i in (_THREAD_NUM, _NUM_THREADS))
    second = LINEAR.load(args, "second_phase", "ptr")
    region.call_pointer(LINEAR.load(args, "first_phase", "ptr"), args, number, count)
    with region.when(second.is_null().equals(0)):
        region.call_pointer(functions.load("ptr", 8 * _BARRIER))
        region.call_pointer(second, args, number, count)
    run = module.function("run", ["ptr", "i64"])
    args, threads = run.parameters
    alone = threads.equals(1)
    with run.when(alone):
        run.call_pointer(LINEAR.load(args, "first_phase", "ptr"), args, run.value("i64", 0), threads)
        second = LINEAR.load(args, "second_phase", "ptr")
        with run.when(second.is_null().equals(0)):
            run.call_pointer(second, args, run.value("i64", 0), threads)
    with run.when(alone.equals(0)):
        parallel = LINEAR.load(args, "openmp", "ptr").load("ptr")
        run.call_pointer(parallel, Value(run, "ptr", "@region"), args, threads.to("i32"), run.value("i32", 0))
    return module


@functools.cache
def _torch_cpu() -> ctypes.CDLL:
    """Open libtorch_cpu. A symbol is looked up in its dependencies, too: other packages may bring OpenMP runtimes of their own."""
    names = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib"}
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / names.get(sys.platform, "torch_cpu.dll")))


@functools.cache
def _openmp_table() -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the addresses of torch's own OpenMP functions; None where torch brings another runtime."""
    try:
        torch_cpu = _torch_cpu()
        return (ctypes.c_void_p * 4)(*(ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p).value for name in _OPENMP))
    except (OSError, AttributeError):
        return None


def name() -> str:
    """Return which threads run kernels, for people."""
    return "OpenMP threads of torch" if _openmp_table() is not None else "a thread pool of halfbyte's own"


@functools.cache
def openmp_address() -> int:
    """Return the address of the table of OpenMP's functions; 0: there is none."""
    table = _openmp_table()
    return 0 if table is None else ctypes.addressof(table)


def _is_forked() -> bool:
    return os.getpid() != _PROCESS


@functools.cache
def _forced_threads() -> int | None:
    """Return 1 in a forked child, else HALFBYTE_THREADS, which is read once."""
    return 1 if _is_forked() else env.threads()


_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("halfbyte_alone", default=False)  # in a thread of `each`


def threads() -> int:
    """Return the threads that a large kernel runs on: HALFBYTE_THREADS, else as many as torch uses; 1 in a thread of `each`."""
    return 1 if _alone.get() else _forced_threads() or torch.get_num_threads()


def useful_threads(work: int, work_a_thread: int) -> int:
    """Return the number of available threads that are worth waking, at least one: one for each `work_a_thread` of the work."""
    return max(1, min(threads(), work // work_a_thread))


def _work_alone() -> None:
    """Make torch's operations in this thread compute without other threads: OpenMP's number of threads is each caller's own."""
    torch.get_num_threads()  # which sets this thread's number when it is first called
    with suppress(OSError, AttributeError):
        _torch_cpu().omp_set_num_threads(1)


def _run_alone(work: Callable[[T], S], item: T) -> S:
    _alone.set(True)  # in the copy of the context that this runs in
    return work(item)


def each(work: Callable[[T], S], items: Sequence[T]) -> list[S]:
    """Call `work` for each item, on as many threads as there are, each of which computes alone.

    Many small kernels take less time so than one after the other on all threads, since OpenMP's threads spin between them. The first
    exception is raised when all calls that have begun are done; calls that have not begun are cancelled.
    """
    count = min(threads(), len(items))
    if count <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count, thread_name_prefix="halfbyte", initializer=_work_alone) as pool:
        futures = [pool.submit(contextvars.copy_context().run, _run_alone, work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@functools.cache
def runner() -> Callable[[int, int], None]:
    """Return run(address of the arguments, threads), which blocks until all phases are done. The GIL is free meanwhile."""
    phase_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    if _openmp_table() is not None or _is_forked():
        address = jit.load("runtime", build, current())["run"]
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="halfbyte")
    lock = threading.Lock()

    def run(arguments: int, count: int) -> None:
        phases = [phase_type(address) for address in (ctypes.c_int64 * 2).from_address(arguments) if address]
        if count == 1:  # without the pool: its threads do not live on in a forked child
            for phase in phases:
                phase(arguments, 0, 1)
            return
        with lock:  # else the phases of two calls could deadlock, each with some of the pool's threads
            for phase in phases:
                list(pool.map(lambda t, p=phase: p(arguments, t, count), range(count)))

    return run


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
