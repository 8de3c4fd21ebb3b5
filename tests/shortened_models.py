"""Models in one call beside the same as transformers computes them, and how their results are compared."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.integrations.decoding import is_short, shorten_
from halfbyte.nn.fused import fuse_


def beside(model: Any) -> tuple[Any, Any]:
    """A quantized model: (as transformers computes it, in one call)"""
    fuse_(model)
    short = shorten_(copy.deepcopy(model))
    assert all(map(is_short, short.model.layers))
    return model, short


def close(found: Tensor, expected: Tensor) -> bool:
    """Up to the order of sums in float32 in two or three layers of some hundred products each, which the norms between them may enlarge."""
    found, expected = found.float(), expected.float()
    return found.shape == expected.shape and float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def done(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[bool]:
    """Of each call of that function from now on, whether it computed something and did not leave it to transformers by None."""
    found: list[bool] = []
    plain = getattr(module, name)

    def noting(*args: Any) -> Tensor | None:
        y: Tensor | None = plain(*args)
        found.append(y is not None)
        return y

    monkeypatch.setattr(module, name, noting)
    return found


class Shifted(torch.nn.Module):
    """What a norm may be replaced by."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x) + 1
        return y
