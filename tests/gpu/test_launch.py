"""Launching: scratch memory for each stream and graph, recorded launches, and launches made again with other addresses."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from contextlib import nullcontext
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from aot import Job, compile_all
from triton.backends.compiler import GPUTarget

from halfbyte.bounded import Bounded
from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.kernels.gpu import compile_time, launch, relaunch, skinny_hopper_tile
from halfbyte.kernels.gpu.clock import graph_times
from halfbyte.machine import Gpu
from halfbyte.ops import cuda
from halfbyte.ops.replay import Replays


@triton.jit
def add(x, y, pair, n, addend, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(x + i, mask=mask) + addend
    if pair[0] is not None:
        total += tl.load(pair[0] + i, mask=mask)
    tl.store(y + i, total, mask=mask)


def test_run_and_record(device: torch.device) -> None:
    x, y = torch.arange(10, device=device), torch.zeros(10, dtype=torch.int64, device=device)
    launch.run(add, (2,), x, y, (None, None), 10, 3, BLOCK=8)
    assert torch.equal(y, x + 3)
    with launch.recording() as calls:
        launch.run(add, (2,), x, y, (x, None), 10, 1, BLOCK=8)
    assert torch.equal(y, 2 * x + 1)
    assert [call.grid for call in calls] == [(2,)]
    with launch.recording(dry=True) as calls:
        launch.run(add, (2,), x, y, (None, None), 10, 9, BLOCK=8, num_warps=2)
    assert torch.equal(y, 2 * x + 1)
    assert calls[0].options == {"BLOCK": 8, "num_warps": 2, "enable_fp_fusion": True}
    launch.run(add, (2,), x, y, (None, None), 10, 0, BLOCK=8)
    assert len(calls) == 1


def test_what_does_not_compile_is_a_kernel_error(device: torch.device) -> None:
    class Fails:
        __name__ = "fails"

        def __init__(self, error: Exception) -> None:
            self.error = error

        def __getitem__(self, grid: object) -> Any:
            raise self.error

    for error in (triton.runtime.errors.OutOfResources(300000, 200000, "shared memory"), RuntimeError("PassManager::run failed")):
        with pytest.raises(KernelError, match="fails does not compile for this GPU"):
            launch.run(Fails(error), (1,))
    for error in (RuntimeError("Failed to find C compiler. Please specify via CC"), CalledProcessError(1, ["/usr/bin/gcc"])):
        with pytest.raises(UnsupportedError, match="install gcc and Python's headers"):
            launch.run(Fails(error), (1,))
    with pytest.raises(RuntimeError, match="illegal"):
        launch.run(Fails(RuntimeError("CUDA error: an illegal memory access")), (1,))


def test_scratch_memory_grows_and_locks_are_zero(device: torch.device) -> None:
    small = launch.locks(device, 3)
    assert launch.locks(device, 5) is small
    large = launch.locks(device, small.numel() + 1)
    assert large.numel() > small.numel()
    assert not large.any()
    assert launch.locks(device, 1) is large
    memory = launch.workspace(device, 1 << 20)
    assert memory.dtype == torch.uint8
    assert memory.numel() >= 1 << 20
    assert memory.data_ptr() % 64 == 0
    assert launch.workspace(device, launch._MOST_KEPT + 1) is not launch.workspace(device, launch._MOST_KEPT + 1)


def test_two_places_take_turns(device: torch.device) -> None:
    first, second, third = (launch.turns(device, 1000) for _ in range(3))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    assert launch.turns(device, 0).data_ptr() == third.data_ptr()
    assert abs(first.data_ptr() - second.data_ptr()) >= third.numel()
    larger = launch.turns(device, third.numel() + 1)
    assert larger.numel() > third.numel()
    assert launch.turns(device, launch._MOST_KEPT + 1).numel() > launch._MOST_KEPT
    assert launch.turns(device, 0).data_ptr() == larger.data_ptr()


class FakeLauncher:
    """Takes what Triton 3.6's launcher in C takes, and keeps it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False

    def launch(self, *args: Any) -> None:
        self.seen.append(args)


def recorded(run: FakeLauncher, *args: Any, **options: Any) -> launch.Call:
    compiled = SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 0), name="add")
    kernel = SimpleNamespace(signature=__import__("inspect").signature(add.fn))
    return launch.Call(kernel, (5,), args, options, compiled)


def test_what_a_graph_kept_is_given_to_another(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    index, graphs = 99, (41, 42, 43)
    monkeypatch.setitem(launch._arenas, index, torch.zeros(1 << 12, dtype=torch.int32, device=device))
    monkeypatch.setitem(launch._left_turns, index, torch.zeros(8 * launch._PLACE, dtype=torch.uint8, device=device))
    kept = []
    for graph in graphs:
        monkeypatch.setattr(launch, "_where", lambda device, graph=graph: (index, 1, graph))
        kept.append([launch.locks(device, 5), *(launch.turns(device, 100) for _ in range(2))])
        if graph == graphs[1]:
            launch.release((index, 1, graphs[0]))
    addresses = [{tensor.data_ptr() for tensor in tensors} for tensors in kept]
    assert addresses[0] == addresses[2]
    assert not addresses[0] & addresses[1]
    for graph in graphs:
        launch.release((index, 1, graph))
    assert launch.locks(device, 600).data_ptr() not in addresses[0] | addresses[1], "what was kept is too small"


def test_graphs_find_locks_while_others_need_them_too(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    index = 99
    monkeypatch.setitem(launch._arenas, index, torch.zeros(1 << 12, dtype=torch.int32, device=device))
    for turn in range(3):  # a launch comes before its graph
        monkeypatch.setattr(launch, "_where", lambda device: (index, 1, 0))
        assert launch.locks(device, 5).numel() >= 5
        monkeypatch.setattr(launch, "_where", lambda device, turn=turn: (index, 1, 50 + turn))
        mine = launch.locks(device, launch._ARENA // 2 + 1)
        assert not mine.any()
        assert (index, 1, 50 + turn) in launch._graph_locks, "memory of a graph's own is set to 0 each time"
    for turn in range(3):
        launch.release((index, 1, 50 + turn))


def test_addresses_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_stream", lambda index: 9)
    run, device = FakeLauncher(), torch.device("cpu", 0)
    x, y, bias = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    memory = launch.workspace(device, 64)
    call = recorded(run, x[4:], y, (bias, None), 10, 1.5, BLOCK=8, num_warps=4)
    later = recorded(run, memory[32:], y, (None, None), 10, 2.5, BLOCK=8)
    replay = relaunch.bind([call, later], (x, y, bias, None), device)
    assert not isinstance(replay, str)
    replay(1000, 2000, 3000, 0)
    head = (5, 1, 1, 9, 77, False, False, None, None, (4, 1, 0), None, None, None)
    assert run.seen[0] == (*head, 1016, 2000, (3000, None), 10, 1.5, 8)
    assert run.seen[1] == (*head, memory.data_ptr() + 32, 2000, (None, None), 10, 2.5, 8)


def test_tensor_descriptors_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_stream", lambda index: 9)
    run, x, y = FakeLauncher(), torch.zeros(8, 16), torch.zeros(8)
    described = SimpleNamespace(base=x[2:], shape=[6, 16], strides=(16, 1), block_shape=[2, 16], padding="zero")
    replay = relaunch.bind([recorded(run, described, y, (None, None), 10, 1, BLOCK=8)], (x, y), torch.device("cpu", 0))
    assert not isinstance(replay, str)
    replay(4096, 2000)
    [made] = [value for value in run.seen[0] if hasattr(value, "base")]
    assert made.base.data_ptr() == 4096 + 2 * 64
    assert (list(made.shape), tuple(made.strides), made.padding) == ([6, 16], (16, 1), "zero")


def test_the_launcher_is_called_as_triton_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the class that the installed version has for it, whose function in C is replaced by one that keeps its arguments."""
    monkeypatch.setattr(launch, "current_stream", lambda index: 9)
    monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace(utils=None))
    run: Any = object.__new__(importlib.import_module("triton.backends.nvidia.driver").CudaLauncher)
    fake = FakeLauncher()
    vars(run).update(vars(fake), launch=fake.launch, gsan_enabled=False, num_ctas=1, global_scratch_align=1, profile_scratch_align=1)
    if "kernel_signature" in inspect.getsource(type(run)):
        run.arg_annotations, run.kernel_signature = ["an annotation"], b"a signature"
    x, y, bias, device = torch.zeros(64), torch.zeros(64), torch.zeros(64), torch.device("cpu", 0)
    call = recorded(run, x[4:], y, (bias, None), 10, 1.5, BLOCK=8, num_warps=4)
    run(5, 1, 1, 9, call.compiled.function, call.compiled.packed_metadata, None, None, None, *call.args, 8)
    replay = relaunch.bind([call], (x, y, bias), device)
    assert not isinstance(replay, str)
    replay(x.data_ptr(), y.data_ptr(), bias.data_ptr())
    theirs, ours = fake.seen

    def addresses(value: Any) -> Any:
        return tuple(map(addresses, value)) if isinstance(value, tuple) else value.data_ptr() if hasattr(value, "data_ptr") else value

    assert ours == addresses(theirs)


def test_descriptors_have_what_triton_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_stream", lambda index: 9)
    unpack: Any = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
    run, x, y = FakeLauncher(), torch.zeros(8, 16), torch.zeros(8)
    described = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor(x, [2, 16])
    replay = relaunch.bind([recorded(run, described, y, (None, None), 10, 1, BLOCK=8)], (x, y), torch.device("cpu", 0))
    assert not isinstance(replay, str)
    replay(x.data_ptr(), y.data_ptr())
    [made] = [value for value in run.seen[0] if hasattr(value, "base")]
    nothing = [None] * (len(inspect.signature(unpack).parameters) - 1)
    (base, *ours), (tensor, *theirs) = (unpack(each, *nothing) for each in (made, described))
    assert (base.data_ptr(), ours) == (tensor.data_ptr(), theirs)


def test_what_cannot_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu", 0)
    x, y = torch.zeros(8), torch.zeros(8)
    reason = relaunch.bind([recorded(FakeLauncher(), x, y, (torch.zeros(8), None), 10, 1, BLOCK=8)], (x, y), device)
    assert isinstance(reason, str)
    assert "of its own" in reason
    scratch = FakeLauncher()
    scratch.global_scratch_size = 1
    reason = relaunch.bind([recorded(scratch, x, y, (None, None), 10, 1, BLOCK=8)], (x, y), device)
    assert isinstance(reason, str)
    assert "allocates" in reason


def test_a_call_is_not_made_again_with_operands_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU stand for some on the current GPU, which is number -1."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(cuda, "empty", lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype))
    seen: list[Any] = []
    again = cuda._again(lambda *addresses: seen.append(addresses), (2, 3), -1)
    x, weight, bias, elsewhere = (
        torch.zeros(2, 8),
        torch.zeros(64),
        torch.zeros(3),
        SimpleNamespace(data_ptr=lambda: 16, get_device=lambda: 1),
    )
    assert again(x, weight, bias, None) is not None
    assert seen[0][0] == x.data_ptr()
    assert again(x, elsewhere, bias, None) is None  # type: ignore[arg-type]
    assert again(x, weight, elsewhere, None) is None  # type: ignore[arg-type]
    assert again(x, weight, None, elsewhere) is None  # type: ignore[arg-type]
    assert len(seen) == 1


def test_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is recorded once, replayed with other addresses, and not recorded while a graph is captured or where operands overlap."""
    capturing, replayed = [True], list[Any]()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(relaunch, "broken", lambda device: None)
    monkeypatch.setattr(relaunch, "bind", lambda calls, operands, device: lambda *addresses: replayed.append(addresses))
    x, y, replays, runs = torch.zeros(8), torch.zeros(8), Replays(), list[str]()

    def start(replayable: bool) -> Any:
        runs.append("run")
        return (lambda: runs.append("again")) if replayable else None

    replays.run("key", lambda: start(True), (x, y))
    capturing[0] = False
    replays.run("key", lambda: start(True), (x, x[4:]))
    assert runs == ["run", "run"]
    for _ in range(2):
        replays.run("other", lambda: start(False), (x, y))
    assert runs == ["run"] * 4
    replays.run("key", lambda: start(True), (x, None, y))
    replays.run("key", lambda: start(True), (y, None, x))
    assert runs == ["run"] * 5 + ["again"]
    assert replayed == [(y.data_ptr(), 0, x.data_ptr())]


def test_bounded() -> None:
    kept = Bounded[int, str](2)
    for i in (1, 2, 2, 1, 3):
        kept[i] = "it"
    assert list(kept) == [3]


def launch_compiled(gpu: Gpu) -> None:
    """Compiles two kernels side by side for a GPU that is not there, in a process without Triton's interpreter."""
    loaded: list[str] = []

    def load(name: str, *_: object) -> tuple[int, ...]:
        loaded.append(name)
        return 1, 2, 3, 0, 1024

    driver = SimpleNamespace(
        launcher_cls=lambda *_: print,
        utils=SimpleNamespace(load_binary=load, get_device_properties=lambda _: {"max_shared_mem": gpu.shared}),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
    )
    triton.runtime.driver.set_active(driver)  # to the end of this process, which only compiles
    own, torch.cuda.device = torch.cuda.device, lambda _: nullcontext()  # type: ignore[assignment, misc]
    try:
        x = torch.zeros(8, device="meta")
        with launch.compiling(torch.device("cuda", 0)):
            for block in (8, 8, 16):
                assert launch.is_compiling()
                launch.run(add, (1,), x, x, (None, None), 8, 3, BLOCK=block)
            launch.run(object(), (1,), x)  # one of torch's
        assert not launch.is_compiling()
        assert loaded == ["add", "add"]
    finally:
        torch.cuda.device = own  # type: ignore[misc]
    launch.run(add, (1,), x, x, (None, None), 8, 3, BLOCK=8)


def test_kernels_are_compiled_side_by_side() -> None:
    assert [binary.kernel for binary in compile_all([Job("tests/gpu/test_launch.py:launch_compiled", "sm_90", wanted="resources")])[0]] == [
        "add"
    ]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_made_again_on_the_gpu(device: torch.device) -> None:
    assert relaunch.broken(device) is None
    x, y, bias = torch.arange(100, device=device), torch.zeros(100, dtype=torch.int64, device=device), torch.ones(100, device=device).long()
    with launch.recording() as calls:
        launch.run(add, (13,), x, y, (bias, None), 100, 3, BLOCK=8)
    replay = relaunch.bind(calls, (x, y, bias), device)
    assert not isinstance(replay, str)
    others = [torch.randint(0, 99, (100,), device=device) for _ in range(3)]
    replay(*(t.data_ptr() for t in others))
    assert torch.equal(others[1], others[0] + others[2] + 3)


@needs_gpu
def test_graphs_that_are_timed_leave_nothing_behind(device: torch.device) -> None:
    x, left = torch.ones(8, device=device), []
    for _ in range(2):
        graph_times({"locks": [lambda: x.add_(launch.locks(device, 5000)[:8])] * 2}, rounds=1)
        left.append([arena.numel() for arena in launch._arenas.values()])
    assert left[0] == left[1]


@needs_gpu
def test_what_was_compiled_before_is_not_compiled_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, compiled = torch.arange(10, device=device), torch.zeros(10, dtype=torch.int64, device=device), list[Any]()
    with launch.compiling(device):
        launch.run(add, (1,), x, y, (None, None), 10, 3, BLOCK=32, num_warps=8)
    assert not y.any()
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what))
    launch.run(add, (1,), x, y, (None, None), 10, 3, BLOCK=32, num_warps=8)
    assert torch.equal(y, x + 3)
    assert not compiled


@needs_gpu
def test_a_changed_interface_is_found_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("another number of arguments")

    monkeypatch.setattr(relaunch._Source, "launch", nonsense)
    reason = relaunch._try(device)
    assert reason is not None
    assert "another number of arguments" in reason


@needs_gpu
def test_each_stream_and_each_graph_has_its_own(device: torch.device) -> None:
    here = launch.locks(device, 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert launch.locks(device, 1).data_ptr() != here.data_ptr()
    addresses, graphs = [], []
    for _ in range(2):
        graph, something = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        with torch.cuda.graph(graph):
            something.add_(1)
            first, second = launch.locks(device, 1), launch.locks(device, 1)
            more = launch.locks(device, first.numel() + 1)
        assert first.data_ptr() == second.data_ptr()
        assert more.data_ptr() not in (first.data_ptr(), here.data_ptr())
        assert not first.any()
        assert not more.any()
        addresses.append(first.data_ptr())
        graphs.append(graph)
    assert addresses[0] != addresses[1]
    assert launch.locks(device, 1) is here
    place = launch.turns(device, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        something.add_(1)
        found = [launch.turns(device, size) for size in (1000, 1000, 1000, 2 * place.numel())]
    assert found[0].data_ptr() == found[2].data_ptr() != found[1].data_ptr()
    assert place.data_ptr() not in [one.data_ptr() for one in found]
    assert found[3].numel() == 2 * place.numel()


def test_compiled_kernels_on_disk_are_found_by_what_their_constants_make_of_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton knows the kernel's source and the fields alone."""
    static = skinny_hopper_tile.Static(8, 1, 1, 2, 4, 1, 1, False, False, 2, False, False, True, False, False, 4, False)
    key = static.cache_key
    assert key.startswith(str(static))
    assert key != dataclasses.replace(static, stages=3).cache_key
    source = inspect.getsource(skinny_hopper_tile)
    monkeypatch.setattr(compile_time, "getsource", lambda module: source.replace("32 if self.integers else 16", "16"))
    compile_time._digest.cache_clear()
    assert static.cache_key != key
    compile_time._digest.cache_clear()
    for path in Path(compile_time.__file__).parent.glob("*.py"):
        kind = getattr(importlib.import_module(f"halfbyte.kernels.gpu.{path.stem}"), "Static", compile_time.CompileTime)
        assert issubclass(kind, compile_time.CompileTime), path
