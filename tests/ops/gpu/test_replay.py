"""The cache of tapes: what is recorded when, and what is replayed. Kernels are computed by the CPU, on a machine with a GPU, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_kernels import Kernel, simulate
from torch import Tensor

from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.gpu.runtime import launch, scratch, tape
from halfbyte.kernels.gpu.runtime.launch import current_recording, output
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops import cuda, replay
from halfbyte.ops.replay import key_of, replayed, tapes, why_not_recorded


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    simulate(monkeypatch)
    return Kernel()


def op(kernel: Kernel, x: Tensor, *settings: str) -> Tensor:
    """x + 1"""

    def steps() -> Tensor:
        y = output(torch.empty_like(x))
        kernel.add(x, y)
        return y

    return replayed(steps, (x, None), "add", *settings)


def layer(kernel: Kernel, x: Tensor, kind: str = "", weight: Tensor | None = None) -> Tensor:
    """x + 2 as a row; with an operation of torch's between, with a tensor that is not told, or with a result that torch allocates."""

    def steps() -> list[Tensor]:
        assert current_recording() is not None or tapes[key].why_not_replayed
        first, second = torch.empty_like(x), output(torch.empty_like(x))
        kernel.add(x, first if kind == "a tensor that is not told" else output(first))
        if kind == "torch":
            first.mul_(2)
        kernel.add(first, second)
        return [(second.clone() if kind == "a result of torch's" else second).view(1, -1)]

    key = key_of((x,), "layer", kind)
    (y,) = replayed(steps, (x,), "layer", kind, constants=(weight,), verify=True)
    return y


def test_an_op_is_launched_then_recorded_then_replayed(kernel: Kernel) -> None:
    for _ in range(5):
        x = torch.randn(3, 8)
        assert torch.equal(op(kernel, x), x + 1)
    assert kernel.started == 2
    assert len(kernel.launched) == 3


def test_keys_tell_launches_apart(kernel: Kernel) -> None:
    """By what they are, by settings, and by operands' shapes, strides and dtypes."""
    x = torch.zeros(8, 4)
    elsewhere: Any = SimpleNamespace(shape=x.shape, stride=x.stride, dtype=x.dtype, get_device=lambda: 1)
    kinds = [x, torch.zeros(4, 8), torch.zeros(4, 8).t(), x.bool(), elsewhere]
    keys = {key_of((each, None), "add") for each in kinds}
    keys |= {key_of((x, x), "add"), key_of((None, x), "add"), key_of((x, None), "gates"), key_of((x, None), "add", 1.0)}
    assert len(keys) == 9
    assert key_of((x, None), "add") == key_of((torch.ones(8, 4), None), "add")
    for _ in range(3):
        op(kernel, x, "a")
        op(kernel, x, "b")
    assert kernel.started == 4
    assert len(tapes) == 2


@pytest.mark.parametrize(
    ("kind", "started", "reason"),
    [
        ("", 4, None),
        ("torch", 10, "not written by these launches alone"),
        ("a tensor that is not told", 10, "no operand, no buffer and no scratch buffer"),
        ("a result of torch's", 10, "a result is no tensor"),
    ],
)
def test_a_layer_is_replayed_or_why_not(kind: str, started: int, reason: str | None, kernel: Kernel) -> None:
    """Results are right in each call. What is bound is tried in memory full of NaN, and replayed from then on."""
    for _ in range(5):
        x = torch.randn(3, 8)
        assert torch.equal(layer(kernel, x, kind), ((x + 1) * (2 if kind == "torch" else 1) + 1).view(1, -1))
    assert kernel.started == started
    (found,) = tapes.values()
    assert (found.replay is None) == (found.why_not_replayed is not None) == (kind != "")
    assert reason is None or reason in str(found.why_not_replayed)
    assert current_recording() is None


def test_what_a_layer_changes_is_taken_back_before_it_is_tried(kernel: Kernel) -> None:
    """As the length of a cache is."""
    length = torch.zeros(4)

    def steps() -> list[Tensor]:
        first = output(torch.empty_like(length))
        kernel.add(length, first)
        kernel.add(length, length)
        return [first]

    for times in range(1, 6):
        (first,) = replayed(steps, (length,), "step", undo=lambda: length.sub_(1), verify=True)
        assert first.tolist() == length.tolist() == [times] * 4
    assert kernel.started == 4
    assert len(kernel.launched) == 2 * 4


def test_constants_are_operands_without_a_part_in_the_key(kernel: Kernel) -> None:
    weights = [torch.full((8,), float(i)) for i in range(4)]

    def steps(weight: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            y = output(torch.empty_like(weight))
            kernel.add(weight, y)
            return y

        return run

    for weight in weights:
        assert torch.equal(replayed(steps(weight), (torch.zeros(4),), "constant", constants=(weight,)), weight + 1)
    assert kernel.started == 2


def test_ops_within_a_recording_are_part_of_it(kernel: Kernel) -> None:
    """They are launched, neither replayed nor recorded by themselves, whether they have a tape or not."""

    def steps() -> Tensor:
        return op(kernel, op(kernel, x))

    x = torch.randn(8)
    for _ in range(3):
        op(kernel, x)
    started = kernel.started
    for _ in range(4):
        x = torch.randn(8)
        assert torch.equal(replayed(steps, (x,), "two"), x + 1 + 1)
    assert kernel.started == started + 4
    assert tapes[key_of((x,), "two")].length == 2


def test_a_reason_of_an_op_ends_recording_at_once(kernel: Kernel) -> None:
    def steps() -> Tensor:
        if (recording := current_recording()) is not None:
            recording.why_not_replayed = "torch multiplies"
            recorded.append(True)
        return op(kernel, x)

    recorded = list[bool]()
    for _ in range(4):
        x = torch.randn(8)
        assert torch.equal(replayed(steps, (x,), "product"), x + 1)
    assert recorded == [True]
    assert tapes[key_of((x,), "product")].why_not_replayed == "torch multiplies"
    assert tapes[key_of((x, None), "add")].replay is not None, "ops of what is not replayed are replayed by themselves"


def test_scratch_buffers_that_grow_are_recorded_once_more(kernel: Kernel) -> None:
    def steps() -> Tensor:
        y = output(torch.empty_like(x))
        kernel.add(x, y, memory=first)
        return y

    x, first = torch.randn(8), scratch.workspace(torch.device("cpu"), 64)
    replayed(steps, (x,), "scratch")
    grown = scratch.workspace(torch.device("cpu"), 2 * first.numel())  # by another op, after the kernel took its own
    replayed(steps, (x,), "scratch")
    assert tapes[key_of((x,), "scratch")].why_not_replayed is None
    first = grown
    replayed(steps, (x,), "scratch")
    assert torch.equal(replayed(steps, (x,), "scratch"), x + 1)
    assert kernel.started == 3
    assert kernel.launched[-1][-2] == grown.data_ptr()


def test_what_is_not_recorded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(100)
    x = memory[: 16 * 4].view(4, 16)
    shifted = torch.zeros(17)[1:]
    assert why_not_recorded((x, None, memory[64:80])) is None
    assert "overlap" in str(why_not_recorded((x, memory[60:70])))
    assert "aligned" in str(why_not_recorded((x, shifted)))
    with launch.recording():
        assert "another recording" in str(why_not_recorded((x,)))
    with monkeypatch.context() as patch:
        patch.setattr(replay, "is_compiling", lambda: True)
        assert "compiled" in str(why_not_recorded((x,)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert "graph" in str(why_not_recorded((x,)))
        for _ in range(3):
            op(kernel, x)
    assert kernel.started == 3
    assert not tapes


def test_operands_that_are_not_aligned_are_launched(kernel: Kernel) -> None:
    """Also where there is a replay for aligned ones."""
    for _ in range(3):
        op(kernel, torch.randn(16))
    x = torch.randn(17)[1:]
    assert torch.equal(op(kernel, x), x + 1)
    assert (kernel.started, len(kernel.launched)) == (3, 1)
    op(kernel, torch.randn(16))
    assert (kernel.started, len(kernel.launched)) == (3, 2)


def test_an_error_leaves_no_recording_behind(kernel: Kernel) -> None:
    def fails() -> Tensor:
        op(kernel, x)
        raise ValueError("no")

    x = torch.randn(8)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            replayed(fails, (x,), "fails")
    assert current_recording() is None
    assert tapes[key_of((x,), "fails")].replay is None


def test_nothing_is_recorded_where_the_private_interface_has_changed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "why_not_replayed", lambda _: "Triton 9 is not used as halfbyte expects")
    for _ in range(4):
        op(kernel, torch.randn(8))
    assert kernel.started == 4
    assert [each.why_not_replayed for each in tapes.values()] == ["Triton 9 is not used as halfbyte expects"]


def test_the_cache_is_bounded_by_launches(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer counts as its launches, and what is seen once as one."""
    monkeypatch.setattr(replay, "MOST_LAUNCHES", 5)
    x = torch.randn(3, 8)
    for _ in range(2):
        layer(kernel, x)
    for name in ("a", "b", "c"):
        op(kernel, x, name)
    assert len(tapes) == 4
    op(kernel, x, "d")
    assert list(tapes) == [key_of((x, None), "add", "d")]
    for _ in range(2):
        assert torch.equal(op(kernel, x, "d"), x + 1)
    assert len(kernel.launched) == 2 + 1, "the layer's trial, and the last"


def frames_of(run: Callable[[], object]) -> list[str]:
    """The Python functions of this package that a call enters, generated ones among them."""
    names = list[str]()

    def profile(frame: Any, event: str, _: object) -> None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event == "call" and name != "<listcomp>" and (file == "<string>" or "halfbyte" in Path(file).parts):
            names.append(name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def test_the_host_overhead_of_a_replay(kernel: Kernel) -> None:
    """One look-up and the generated function."""
    x = torch.randn(8)
    for _ in range(3):
        op(kernel, x)
    assert frames_of(lambda: op(kernel, x)) == ["replayed", "replay"]


def test_linear_layers(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight caches the replays of its calls, all weights of a kind share a tape, and operands may lie anywhere."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(cuda, "check_linear", lambda *_: None)
    monkeypatch.setattr(cuda, "_run", lambda _problem, x, weight, out, _ends: kernel.add(x, out, memory=weight[0]))
    packed = [Packed(as_format("q4_0"), (64, 64), gpu_tiles.NAME, torch.zeros(18 * 128, dtype=torch.uint8)) for _ in range(2)]
    current, how = [-1], ("float", "block", -inf, inf)

    def call(x: Tensor, index: int = 0) -> Tensor:
        y = cuda.packed_linear(x, packed[index], None, None, *how)
        assert torch.equal(y, x + 1)
        assert y.is_contiguous()
        return y

    for _ in range(3):
        call(torch.randn(2, 64))
    assert (kernel.started, len(packed[0].calls)) == (2, 1)
    assert frames_of(lambda: call(torch.randn(2, 64))) == ["packed_linear", "replay"]
    call(torch.randn(2, 64), 1)
    assert (kernel.started, len(packed[1].calls)) == (2, 1)
    assert kernel.launched[-1][-2] == packed[1].data.data_ptr()
    call(torch.randn(64, 2).t())
    call(torch.randn(2 * 64 + 1)[1:].view(2, 64))
    assert kernel.started == 2, "copies are replayed with"
    current[0], launched = 1, len(kernel.launched)
    (again,) = packed[0].calls.values()
    assert again(torch.randn(2, 64), packed[0].data, None, None) is None
    assert len(kernel.launched) == launched, "another device is current"


def test_the_first_kernel_that_runs(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel launched before it failed is not replayed, nor is one that does more than launch."""
    failures, x, y, other = list[str](), torch.randn(8), torch.empty(8), torch.zeros(8)
    monkeypatch.setattr(cuda, "report_failure", lambda _problem, _gpu, option, reason: failures.append(f"{option.config}: {reason}"))

    def fails(*_: Any) -> None:
        kernel.add(x, other)
        raise KernelError("too large")

    def option(name: str, start: Callable[..., None], *, replayable: bool = True) -> Any:
        return SimpleNamespace(candidate=SimpleNamespace(name=name, launch=start, replayable=replayable), config=name)

    def runs(_problem: Any, _config: Any, source: Tensor, out: Tensor) -> None:
        kernel.add(source, out)

    def choice(options: list[Any]) -> Any:
        return SimpleNamespace(problem="a problem", options=options)

    gpu: Any = SimpleNamespace(name="a GPU")
    for replayable in (True, False):
        options = [option("one", fails), option("two", runs, replayable=replayable), option("three", fails)]
        with launch.recording() as recording, pytest.warns(UserWarning, match="one one is skipped: too large"):
            cuda.run_first(choice(options), gpu, (x, y))
        assert torch.equal(y, x + 1)
        assert [each.args[1] is y for each in recording.launches] == [True]
        assert recording.why_not_replayed == (None if replayable else "the kernel two is not replayable")
    assert failures == ["one: too large"] * 2
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(UnsupportedError, match="no kernel on a GPU runs a problem"):
        cuda.run_first(choice([option("one", fails)]), gpu, (x, y))
