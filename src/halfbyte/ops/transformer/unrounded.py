"""Outputs of layers before they were rounded to 16 bits, for the layer that reads them next.

Layers that are called one by one, by transformers, then compute the same as in one native call, which keeps hidden states in float32.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# The float32 output of a layer by the 16-bit tensor that it returned: one for each that is alive. Weak keys are compared by identity.
_unrounded: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def unrounded(x: Tensor) -> Tensor:
    """Return x in float32, contiguous: before it was rounded, if a layer returned it and it was not written to since."""
    exact = _unrounded.get(x) if x.dtype != torch.float32 else None
    return exact if exact is not None and torch.equal(exact.to(x.dtype), x) else x.float().contiguous()


def rounded(outputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Round the float32 outputs of consecutive layers to `dtype`; `unrounded` finds the last one again, which the next layer reads."""
    results = tuple(y.to(dtype) for y in outputs)
    if dtype != torch.float32:
        _unrounded[results[-1]] = outputs[-1]
    return results
