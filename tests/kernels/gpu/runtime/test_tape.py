"""Tapes: recorded launches are bound to addresses, and replayed. (The cache of tapes: test_replay.py.)"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from simulated_kernels import Kernel, simulate
from torch import Tensor
from triton_kernels import add

from halfbyte.kernels.gpu.runtime import launch, scratch, tape


class FakeLauncher:
    """Takes the arguments of Triton 3.6's launcher in C."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False

    def launch(self, *args: Any) -> None:
        self.launched.append(args)


def recorded(run: FakeLauncher, *args: Any, **options: Any) -> launch.Launch:
    compiled = SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 0), name="add")
    kernel = SimpleNamespace(signature=inspect.signature(add.fn))
    return launch.Launch(kernel, (5,), args, options, compiled)


def bound(*launches: launch.Launch, operands: tuple[Tensor | None, ...], **how: Any) -> tape.Replay:
    return tape.bind(launch.Recording(launches=list(launches)), operands, [], torch.device("cpu", 0), **how)


def at(address: int, device: int = -1) -> Any:
    """An operand that lies elsewhere."""
    return SimpleNamespace(data_ptr=lambda: address, get_device=lambda: device)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scratch, "current_stream", lambda index: 9)
    return 9


@pytest.mark.usefixtures("stream")
def test_addresses_are_filled_in() -> None:
    run, x, y, bias = FakeLauncher(), torch.zeros(64), torch.zeros(64), torch.zeros(64)
    memory = scratch.workspace(torch.device("cpu", 0), 64)
    first = recorded(run, x[4:], y, (bias, None), 10, 1.5, BLOCK=8, num_warps=4)
    second = recorded(run, memory[32:], y, (None, None), 10, 2.5, BLOCK=8)
    replay = bound(first, second, operands=(x, y, bias, None))
    assert replay(at(1600), at(3200), at(4800), None) == []
    head = (5, 1, 1, 9, 77, False, False, None, None, (4, 1, 0), None, None, None)
    assert run.launched[0] == (*head, 1616, 3200, (4800, None), 10, 1.5, 8)
    assert run.launched[1] == (*head, memory.data_ptr() + 32, 3200, (None, None), 10, 2.5, 8)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@pytest.mark.usefixtures("stream")
def test_addresses_in_named_tuples_are_filled_in() -> None:
    run, x, y, z = FakeLauncher(), torch.zeros(8), torch.zeros(8), torch.zeros(8)
    replay = bound(recorded(run, x, y, Pair(z, None), 8, 1, BLOCK=8), operands=(x, y, z))
    replay(at(4096), at(8192), at(16384))
    pairs = [value for value in run.launched[0] if isinstance(value, tuple) and len(value) == 2]
    assert (16384, None) in pairs


@pytest.mark.usefixtures("stream")
def test_operands_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are not aligned, as kernels are compiled for it; and a weight on another device than it was, or than the current one."""
    current = [-1]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    run, x, y, unused = FakeLauncher(), torch.zeros(64), torch.zeros(64), torch.zeros(64)
    each = recorded(run, x, y, (None, None), 10, 1.5, BLOCK=8)
    replay = bound(each, operands=(x, y, unused))
    assert replay(at(1600), at(3204), at(4800)) is None
    assert replay(at(1604), at(3200), at(4800)) is None
    assert replay(at(1600), at(3200), at(4802, 1)) == [], "no kernel takes it"
    replay = bound(each, operands=(x, y), weight=1)
    assert replay(at(1600), at(3200)) == []
    assert replay(at(1600), at(3200, 0)) is None
    current[0] = 0
    assert replay(at(1600), at(3200)) is None
    assert len(run.launched) == 2


@pytest.mark.usefixtures("stream")
def test_tensor_descriptors_are_allocated_for_each_replay() -> None:
    run, x, y = FakeLauncher(), torch.zeros(8, 16), torch.zeros(8)
    described = SimpleNamespace(base=x[2:], shape=[6, 16], strides=(16, 1), block_shape=[2, 16], padding="zero")
    replay = bound(recorded(run, described, y, (None, None), 10, 1, BLOCK=8), operands=(x, y))
    replay(at(4096), at(3200))
    [descriptor] = [value for value in run.launched[0] if hasattr(value, "base")]
    assert descriptor.base.data_ptr() == 4096 + 2 * 64
    assert (list(descriptor.shape), tuple(descriptor.strides), descriptor.padding) == ([6, 16], (16, 1), "zero")


@pytest.mark.usefixtures("stream")
def test_the_launcher_is_called_as_triton_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the class that the installed version has for it, whose function in C is replaced by one that keeps its arguments."""
    monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace(utils=None))
    run: Any = object.__new__(importlib.import_module("triton.backends.nvidia.driver").CudaLauncher)
    fake = FakeLauncher()
    vars(run).update(vars(fake), launch=fake.launch, gsan_enabled=False, num_ctas=1, global_scratch_align=1, profile_scratch_align=1)
    if "kernel_signature" in inspect.getsource(type(run)):
        run.arg_annotations, run.kernel_signature = ["an annotation"], b"a signature"
    x, y, bias = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    each = recorded(run, x[4:], y, (bias, None), 10, 1.5, BLOCK=8, num_warps=4)
    run(5, 1, 1, 9, each.compiled.function, each.compiled.packed_metadata, None, None, None, *each.args, 8)
    bound(each, operands=(x, y, bias))(x, y, bias)
    expected, ours = fake.launched

    def addresses(value: Any) -> Any:
        return tuple(map(addresses, value)) if isinstance(value, tuple) else value.data_ptr() if hasattr(value, "data_ptr") else value

    assert ours == addresses(expected)


@pytest.mark.usefixtures("stream")
def test_descriptors_have_what_triton_reads() -> None:
    unpack: Any = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
    run, x, y = FakeLauncher(), torch.zeros(8, 16), torch.zeros(8)
    described = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor(x, [2, 16])
    bound(recorded(run, described, y, (None, None), 10, 1, BLOCK=8), operands=(x, y))(x, y)
    [descriptor] = [value for value in run.launched[0] if hasattr(value, "base")]
    unused = [None] * (len(inspect.signature(unpack).parameters) - 1)
    (base, *ours), (tensor, *expected) = (unpack(each, *unused) for each in (descriptor, described))
    assert (base.data_ptr(), ours) == (tensor.data_ptr(), expected)


def test_why_launches_cannot_be_bound() -> None:
    x, y, run = torch.zeros(8), torch.zeros(8), FakeLauncher()
    with pytest.raises(tape.NotReplayableError, match="no operand, no buffer and no scratch buffer"):
        bound(recorded(run, x, y, (torch.zeros(8), None), 10, 1, BLOCK=8), operands=(x, y))
    with pytest.raises(tape.NotReplayableError, match="a kernel of torch's"):
        bound(recorded(run, x, y, (None, None), 10, 1, BLOCK=8)._replace(compiled=None), operands=(x, y))
    run.global_scratch_size = 1
    with pytest.raises(tape.NotReplayableError, match="add needs memory that Triton allocates"):
        bound(recorded(run, x, y, (None, None), 10, 1, BLOCK=8), operands=(x, y))


def test_buffers_are_allocated_for_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are the tensors that kernels wrote, or views of them; what is neither read nor returned is not allocated."""
    simulate(monkeypatch)
    kernel, x, allocated = Kernel(), torch.randn(2, 8), list[Any]()
    monkeypatch.setattr(tape, "empty", lambda *kind: allocated.append(kind) or torch.empty_strided(*kind[:2], dtype=kind[2]))
    first, second, unused = torch.empty(2, 8), torch.empty(8, 2).t(), torch.empty(4)
    with launch.recording() as recording:
        for buffer in (first, second, unused):
            launch.output(buffer)
        kernel.add(x, first)
        kernel.add(first, second)
    device = torch.device("cpu", 0)
    replay = tape.bind(recording, (x,), [first, second.t().view(4, 4)], device)
    other = torch.randn(2, 8)
    (one, two), _ = (replay(other) for _ in range(2))
    assert torch.equal(one, other + 1)
    assert torch.equal(two, (other + 1 + 1).view(4, 4))
    assert allocated == 2 * [((2, 8), (8, 1), torch.float32), ((2, 8), (1, 2), torch.float32)]
    assert torch.equal(tape.bind(recording, (x,), first, device)(other), other + 1), "a tensor, as it was recorded"
    for result in (first.view(torch.int32), first[1:], torch.zeros(0), x):
        with pytest.raises(tape.NotReplayableError, match="a result is no tensor that was allocated"):
            tape.bind(recording, (x,), result, device)


def test_the_reach_of_tensors() -> None:
    """Of one that repeats rows only what it has."""
    rows = torch.zeros(3, 8, dtype=torch.bfloat16)
    start = rows.data_ptr()
    assert tape.reach(rows) == (start, start + 48)
    assert tape.reach(rows[:1].expand(100, 8)) == (start, start + 16)
    assert tape.reach(rows[:, 2:4]) == (start + 4, start + 4 + 2 * 16 + 4)
    first, end = tape.reach(rows[:0])
    assert first == end


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_replayed_on_the_gpu(device: torch.device) -> None:
    assert tape.why_not_replayed(device) is None
    x, y, bias = torch.arange(100, device=device), torch.zeros(100, dtype=torch.int64, device=device), torch.ones(100, device=device).long()
    with launch.recording() as recording:
        launch.run(add, (13,), x, launch.output(y), (bias, None), 100, 3, BLOCK=8)
    replay = tape.bind(recording, (x, bias), y, device, weight=1)
    others = [torch.randint(0, 99, (100,), device=device) for _ in range(2)]
    again = replay(*others)
    assert torch.equal(again, others[0] + others[1] + 3)
    assert torch.equal(replay(x, bias), y)
    assert torch.equal(again, others[0] + others[1] + 3), "each replay has memory of its own"
    assert replay(others[0], others[1][1:]) is None
    assert replay(others[0], torch.zeros(100, dtype=torch.int64)) is None


@needs_gpu
def test_a_changed_interface_is_found_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("another number of arguments")

    monkeypatch.setattr(tape._Source, "launch", nonsense)
    reason = tape._try(device)
    assert reason is not None
    assert "another number of arguments" in reason
