"""Chains of steps by one call: launches are simulated here by additions, on a CPU. (On a GPU: tests/gpu/test_gpu_families.py.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.made import is_noted, keep
from halfbyte.ops import replay

pytest.importorskip("triton", reason="Triton is not installed", exc_type=ImportError)

from halfbyte.kernels.gpu import launch, relaunch


class Device:
    """Launches and recorded chains, by the addresses of tensors."""

    def __init__(self) -> None:
        self.plainly: list[bool] = []  # of each chain that was run step by step
        self.calls: list[tuple[Tensor, Tensor]] | None = None
        self.alive: dict[int, Tensor] = {}

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(shape, stride, dtype=dtype)
        self.alive[made.data_ptr()] = made
        return made

    def add_one(self, x: Tensor, y: Tensor) -> None:
        torch.add(x, 1, out=y)
        if self.calls is not None:
            self.calls.append((x, y))

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        self.calls = []
        yield self.calls
        self.calls = None

    def bind(self, calls: Sequence[tuple[Tensor, Tensor]], operands: Sequence[Tensor | None], _: Any) -> Callable[..., None] | str:
        places = {t.data_ptr(): i for i, t in enumerate(operands) if t is not None}
        if any(t.data_ptr() not in places for pair in calls for t in pair):
            return "a kernel was given a tensor of its own"
        pairs = [(places[x.data_ptr()], places[y.data_ptr()]) for x, y in calls]

        def again(*addresses: int) -> None:
            for x, y in pairs:
                self.add_one(self.alive[addresses[x]], self.alive[addresses[y]])

        return again


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(replay, "empty", found.empty)
    monkeypatch.setattr(replay, "_wholes", replay.Bounded(8))
    monkeypatch.setattr(replay, "_failed", replay.Bounded(8))
    monkeypatch.setattr(relaunch, "broken", lambda _: None)
    monkeypatch.setattr(relaunch, "bind", found.bind)
    monkeypatch.setattr(launch, "recording", found.recording)
    monkeypatch.setattr(launch, "is_compiling", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def chain(device: Device, x: Tensor, kind: str = "") -> Callable[[], list[Tensor]]:
    """x + 2 as a row; with a product of torch's between, with a tensor that is not told, or with a result that torch makes."""

    def steps() -> list[Tensor]:
        device.plainly.append(is_noted())
        first, second = (device.empty(tuple(x.shape), x.stride(), x.dtype) for _ in range(2))
        device.add_one(x, first if kind == "a tensor of its own" else keep(first))
        if kind == "torch":
            first.mul_(2)
        device.add_one(first, keep(second))
        return [(second.clone() if kind == "a result of torch" else second).view(1, -1)]

    return steps


@pytest.mark.parametrize(
    ("kind", "plainly"),
    [
        ("", [True, True]),
        ("torch", [True, True, False, False, False]),
        ("a tensor of its own", [True, True, True, False, False]),
        ("a result of torch", [True, True, True, False, False]),
    ],
)
def test_a_chain_by_one_call(kind: str, plainly: list[bool], device: Device) -> None:
    """Recorded the second time, tried, and made by one call from then on; or never, where there was more than launches."""
    for _ in range(5):
        x = torch.randn(3, 8)
        device.alive[x.data_ptr()] = x
        (made,) = replay.whole("key", chain(device, x, kind), (x,))
        assert torch.equal(made, ((x + 1) * (2 if kind == "torch" else 1) + 1).view(1, -1))
    assert device.plainly == plainly
    assert (replay._wholes.get("key") is not None) == (kind == "")
    assert not is_noted()


def test_what_a_chain_changes_is_taken_back_before_it_is_tried(device: Device) -> None:
    """As the length of a cache is."""
    length = torch.zeros(2)
    device.alive[length.data_ptr()] = length

    def steps() -> list[Tensor]:
        first = keep(device.empty((2,), (1,), torch.float32))
        device.add_one(length, first)
        device.add_one(length, length)
        return [first]

    for times in range(1, 6):
        (made,) = replay.whole("key", steps, (length,), undo=lambda: length.sub_(1))
        assert made.tolist() == length.tolist() == [times, times]
    assert replay._wholes["key"] is not None


def test_other_chains_are_apart(device: Device) -> None:
    for key in ("a", "b"):
        for _ in range(3):
            x = torch.randn(2, 4)
            device.alive[x.data_ptr()] = x
            replay.whole(key, chain(device, x), (x,))
    assert device.plainly == [True] * 4
    assert all(replay._wholes[key] is not None for key in ("a", "b"))


def test_the_reach_of_tensors() -> None:
    """Of one that repeats rows only what it has."""
    rows = torch.zeros(3, 8, dtype=torch.bfloat16)
    start = rows.data_ptr()
    assert relaunch.reach(rows) == (start, start + 48)
    assert relaunch.reach(rows[:1].expand(100, 8)) == (start, start + 16)
    assert relaunch.reach(rows[:, 2:4]) == (start + 4, start + 4 + 2 * 16 + 4)
    first, behind = relaunch.reach(rows[:0])
    assert first == behind
