"""Models in one call beside the same as transformers computes them, and how their results are compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.integrations.transformers.decoder import cpu_run, stack
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.decoder.token_step import TokenStep
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.fused import fuse_


def model_pair(model: Any) -> tuple[Any, Any]:
    """A quantized model: (as transformers computes it, in one call)"""
    fuse_(model)
    short = replace_forwards_(copy.deepcopy(model))
    assert is_compiled_stack(short.model)
    return model, short


def close(found: Tensor, expected: Tensor) -> bool:
    """Up to the order of sums in float32 in two or three layers of some hundred products each, which the norms between them may enlarge."""
    found, expected = found.float(), expected.float()
    return found.shape == expected.shape and float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def native_calls(monkeypatch: pytest.MonkeyPatch, *, steps: bool = True) -> list[tuple[int, int, int]]:
    """(sequences, tokens, layers) of each native call from now on; without `steps` none of them is a decode step of a whole stack."""
    found: list[tuple[int, int, int]] = []
    run, step = cpu_run.run_layers, TokenStep.__call__

    def counting(layers: Any, x: Tensor, *args: Any) -> Any:
        found.append((*x.shape[:2], len(layers)))  # type: ignore[arg-type]
        return run(layers, x, *args)

    def counting_steps(self: TokenStep, ids: Tensor, *args: Any) -> Tensor | None:
        y = step(self, ids, *args) if steps else None
        found.extend([(*ids.shape, self.count)] * (y is not None))  # type: ignore[list-item]
        return y

    monkeypatch.setattr(cpu_run, "run_layers", counting)
    monkeypatch.setattr(TokenStep, "__call__", counting_steps)
    return found


def layer_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each layer of compiled stacks that is computed from now on, whether it is a native call, or transformers'; without decode steps of
    whole stacks."""
    found: list[bool] = []
    run, by_transformers = cpu_run.run_layers, cpu_run.Run._by_transformers

    def counting(layers: Any, *args: Any) -> Any:
        found.extend([True] * len(layers))
        return run(layers, *args)

    def counting_others(self: Any, *args: Any) -> Tensor:
        found.append(False)
        return by_transformers(self, *args)

    monkeypatch.setattr(cpu_run, "run_layers", counting)
    monkeypatch.setattr(cpu_run.Run, "_by_transformers", counting_others)
    monkeypatch.setattr(TokenStep, "__call__", lambda *_: None)
    return found


def step_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a stack from now on that its compiled forward understands, whether it is one decode step of the whole stack."""
    found: list[bool] = []
    run, step = stack._run, TokenStep.__call__
    steps: list[bool] = []

    def counting_steps(*args: Any) -> Tensor | None:
        y = step(*args)
        steps.append(y is not None)
        return y

    def counting(module: Any, call: dict[str, Any]) -> Any:
        steps.clear()
        y = run(module, call)
        found.append(any(steps))
        return y

    monkeypatch.setattr(TokenStep, "__call__", counting_steps)
    monkeypatch.setattr(stack, "_run", counting)
    return found


class Shifted(torch.nn.Module):
    """What a norm may be replaced by."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x) + 1
        return y
