"""Models in one call beside the same as transformers computes them, and how their results are compared."""

from __future__ import annotations

import copy
from typing import Any

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
    """Up to the order of sums in float32 in two layers of some hundred products each, which the norms between them may enlarge."""
    return found.shape == expected.shape and float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
