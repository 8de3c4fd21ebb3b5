"""What dispatch is asked for the product of experts on a GPU: all that the op was given. A CPU is in its place; nothing is launched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from halfbyte.dispatch import choose
from halfbyte.kernels.problem import Activation, Problem
from halfbyte.machine import GPUS
from halfbyte.ops import cuda, grouped, replay


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("compute", ["int8", "float"])
def test_settings_reach_dispatch(compute: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []

    def run_first(*_: object) -> None: ...

    def replayed(steps: Callable[[], Tensor], *_: object) -> Tensor:
        return steps()

    monkeypatch.setattr(choose, "choose", lambda problem, here: asked.append(problem))
    monkeypatch.setattr("halfbyte.machine.gpu", lambda index: GPUS["sm_90"])
    monkeypatch.setattr(cuda, "run_first", run_first)
    monkeypatch.setattr(cuda, "on", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(replay, "replayed", replayed)
    settings: Any = grouped._Settings("int4_g32", 4, 64, 32, compute, activation)
    x, ids, weight = torch.ones(6, 32, dtype=torch.float16), torch.zeros(6, dtype=torch.int64), torch.zeros(64, dtype=torch.uint8)
    grouped._on_gpu(x, ids, settings)(x, weight, None)
    [problem] = asked
    assert (problem.compute, problem.activation, problem.experts) == (compute, activation, 4)
    assert (problem.m, problem.n, problem.k, str(problem.format), problem.dtype) == (6, 64, 32, "int4_g32", torch.float16)
