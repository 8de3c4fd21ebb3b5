"""Kernels that a CPU computes, which are started and replayed as Triton's are: a replay calls their launcher with addresses."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.gpu.runtime import launch, scratch, tape
from halfbyte.ops import replay

DEVICE = torch.device("cpu", 0)


class Kernel:
    """y = x + addend, of n float32 numbers.

    Attributes:
        started: How often `launch.run` started it.
        launched: The addresses and numbers of each replay.
    """

    __name__ = "simulated"

    def __init__(self, **memory: int) -> None:
        self.started, self.launched = 0, list[tuple[Any, ...]]()
        self.signature = inspect.signature(lambda x, y, n, addend, memory=None, BLOCK=1: None)
        sizes = {"global_scratch_size": 0, "profile_scratch_size": 0, **memory}
        self._run = SimpleNamespace(**sizes, launch_cooperative_grid=False, launch_pdl=False, launch=self._launch)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self._start

    def _start(self, x: Tensor, y: Tensor, n: int, addend: float, memory: Tensor | None = None, **options: Any) -> Any:
        self.started += 1
        self._compute(x.data_ptr(), y.data_ptr(), n, addend)
        return SimpleNamespace(run=self._run, function=77, packed_metadata=(4, 1, 0), name=self.__name__)

    def _launch(self, *args: Any) -> None:
        self.launched.append(args)
        self._compute(*args[-6:-2])

    @staticmethod
    def _compute(x: int, y: int, n: int, addend: float) -> None:
        source, target = (torch.frombuffer((ctypes.c_float * n).from_address(address), dtype=torch.float32) for address in (x, y))
        torch.add(source, addend, out=target)

    def add(self, x: Tensor, y: Tensor, addend: float = 1.0, memory: Tensor | None = None) -> None:
        launch.run(self, (5,), x, y, x.numel(), addend, memory)


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tapes replay on the CPU."""
    monkeypatch.setattr(tape, "empty", lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype))
    monkeypatch.setattr(tape, "why_not_replayed", lambda _: None)
    monkeypatch.setattr(scratch, "current_stream", lambda _: 9)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    replay.tapes.clear()
