"""Threads: any number of them gives the same bits; Python threads, forks, and the pool for where torch brings no OpenMP."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import encoder_parts
import pytest
import torch
from samples import random_codes
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats import as_format
from halfbyte.kernels.cpu.codegen import jit, kernel, runtime
from halfbyte.kernels.cpu.codegen.arguments import Block
from halfbyte.kernels.cpu.codegen.ir import Module
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.transformer import encoder
from halfbyte.kernels.problem import Activation, Compute
from halfbyte.layouts.cpu_tiles import pack

N, K = 260, 512  # nine panels; 16 rows are work for eight threads
POOLS = ("openmp", "own")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)
    clear()


def clear() -> None:
    """As if the process had just begun."""
    for cached in (runtime.runner, runtime.openmp_address, runtime._forced_threads):
        cached.cache_clear()


@pytest.fixture
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels run on torch's OpenMP threads or on the pool that stands in for them."""
    if request.param == "own":
        monkeypatch.setattr(runtime, "_openmp_table", lambda: None)
    elif runtime._openmp_table() is None:
        pytest.skip("torch brings another OpenMP runtime here")
    clear()
    return request.param


pools = pytest.mark.parametrize("pool", POOLS, indirect=True)


CODES = random_codes(as_format("q4_0"), (N, K))
PACKED = pack(CODES)


def product(compute: Compute = "int8", activation: Activation = "block") -> Callable[[Tensor], Tensor]:
    kernel = LinearKernel(PACKED.format, N, K, torch.float32, compute, activation)
    return lambda x: kernel(x, PACKED.data.data_ptr(), None, -torch.inf, torch.inf)


@pools
def test_any_number_of_threads_gives_the_same_bits(pool: str) -> None:
    run, x = product(), torch.randn(16, K)
    torch.set_num_threads(1)
    wanted = run(x)
    assert wanted.abs().min() > 0
    for count in (2, 1, 8, 3, 2):
        torch.set_num_threads(count)
        for _ in range(3):
            assert torch.equal(run(x), wanted)


@pools
def test_calls_from_many_python_threads_at_once(pool: str) -> None:
    torch.set_num_threads(2)
    run = product()
    inputs = [torch.randn(m, K) for m in (16, 5, 1, 33, 16, 8, 2, 70)]
    wanted = [run(x) for x in inputs]
    start, wrong = threading.Barrier(len(inputs)), []

    def work(i: int) -> None:
        start.wait()
        wrong.extend(not torch.equal(run(inputs[i]), wanted[i]) for _ in range(30))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert wrong == [False] * 30 * len(inputs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pools
def test_a_forked_child_computes_too(pool: str) -> None:
    torch.set_num_threads(2)
    run, x = product(), torch.randn(16, K)
    wanted = run(x)  # the parent's threads are up
    exact = x.double() @ CODES.dequantize(torch.float64).T

    def child() -> bool:
        # With what the parent compiled, with an M that is new to it, and with a kernel that was not compiled yet.
        known = torch.equal(run(x), wanted) and torch.equal(run(x[:3]), wanted[:3])
        new = product("float")(x)
        torch.randn(1 << 20).exp()  # and what torch does beside it
        return known and bool((new - exact).abs().max() < 1e-3) and runtime.threads() == 1

    assert exit_status(child) == 0
    assert torch.equal(run(x), wanted)
    assert runtime.threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pools
def test_a_forked_child_runs_whole_layers(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "WORK_A_THREAD", 1)
    torch.set_num_threads(2)
    layer, _, _ = encoder_parts.layer_of(encoder_parts.codes_of("q8_0"), "int8", before=False)
    few, many = torch.randn(1, 9, encoder_parts.SIZES["k"]), torch.randn(8, 5, encoder_parts.SIZES["k"])
    wanted = layer(few), layer(many)  # threads side by side in each step, and in steps of their own
    assert exit_status(lambda: torch.equal(layer(few), wanted[0]) and torch.equal(layer(many), wanted[1])) == 0
    assert torch.equal(layer(many), wanted[1])


def exit_status(child: Callable[[], bool]) -> int:
    """0 where child() holds in a fork of this process; minus the signal's number where it crashes or takes over half a minute."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = 0 if child() else 1
        finally:
            os._exit(status)
    for _ in range(300):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_during_a_compilation_leaves_no_lock_behind() -> None:
    compiling, stop = threading.Event(), threading.Event()

    def hold() -> None:
        with jit._lock:
            compiling.set()
            stop.wait(0.3)

    worker = threading.Thread(target=hold)
    worker.start()
    compiling.wait(10)
    assert exit_status(lambda: jit._lock.acquire(timeout=5)) == 0
    stop.set()
    worker.join(10)


@pools
@pytest.mark.parametrize("count", [1, 2, 8])
def test_no_thread_begins_the_second_phase_before_all_have_ended_the_first(pool: str, count: int) -> None:
    torch.set_num_threads(count)
    block = Block("ended", "seen")
    module = Module()
    first = module.function("first", ["ptr", "i64", "i64"])
    args, thread, _ = first.parameters
    some = first.alloca("i64", 1, 8)
    for i in first.loop(thread * 100000):  # the later its number, the longer a thread takes
        some.store(i)
        first.fence()
    ended = block.load(args, "ended", "ptr")
    first.emit("i64", f"atomicrmw add ptr {ended.name}, i64 1 seq_cst")
    second = module.function("second", ["ptr", "i64", "i64"])
    args, thread, threads = second.parameters
    ended, seen = (block.load(args, field, "ptr") for field in ("ended", "seen"))
    (seen + thread * 16).store(ended.load("i64"))
    (seen + thread * 16).store(threads, 8)
    addresses = jit.load("phases", lambda _: module, current())
    ended_count, table = torch.zeros(1, dtype=torch.int64), torch.zeros(8, 2, dtype=torch.int64)
    fields = {"second_phase": addresses["second"], "ended": ended_count.data_ptr(), "seen": table.data_ptr()}
    kernel.run(kernel.arguments(block, addresses["first"], fields), 8)
    assert table.tolist() == [[count, count]] * count + [[0, 0]] * (8 - count)


def test_halfbyte_threads_beats_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    assert runtime.threads() == 2
    monkeypatch.setenv("HALFBYTE_THREADS", "3")
    clear()
    assert runtime.threads() == 3
    run, x = product(), torch.randn(16, K)
    wanted = run(x)
    monkeypatch.setenv("HALFBYTE_THREADS", "1")
    clear()
    assert torch.equal(run(x), wanted)
    monkeypatch.setenv("HALFBYTE_THREADS", "none")
    clear()
    with pytest.raises(ArgumentError, match="HALFBYTE_THREADS is 'none'"):
        runtime.threads()


def test_the_pool_has_a_name_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_openmp_table", lambda: None)
    assert runtime.name() == "a thread pool of halfbyte's own"
    monkeypatch.setattr(runtime, "_openmp_table", object)
    assert runtime.name() == "OpenMP threads of torch"


def test_calls_side_by_side_compute_alone() -> None:
    """Each thread of `each` has one thread for kernels and torch's operations; results are in order; the caller keeps its threads."""
    torch.set_num_threads(3)
    assert runtime.each(lambda i: (i, runtime.threads(), torch.get_num_threads()), range(40)) == [(i, 1, 1) for i in range(40)]
    assert runtime.threads() == torch.get_num_threads() == 3


def test_the_first_error_of_calls_side_by_side_ends_them() -> None:
    torch.set_num_threads(2)
    done: list[int] = []

    def work(i: int) -> None:
        if i == 1:
            raise ArgumentError("no")
        time.sleep(0.001)
        done.append(i)

    with pytest.raises(ArgumentError, match="no"):
        runtime.each(work, range(1000))
    assert len(done) < 1000


def test_one_call_runs_in_the_thread_that_asks() -> None:
    assert runtime.each(lambda _: threading.get_ident(), [0]) == [threading.get_ident()]
