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
    """x in float32, contiguous: what it was before it was rounded, if a layer returned it and it was not written to since."""
    before = _unrounded.get(x) if x.dtype != torch.float32 else None
    return x.float().contiguous() if before is None or not torch.equal(before.to(x.dtype), x) else before


def rounded(outputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Round the outputs of layers, float32, to `dtype`; the last one, which the next layer reads, is known to `unrounded`."""
    results = tuple(y.to(dtype) for y in outputs)
    if dtype != torch.float32:
        _unrounded[results[-1]] = outputs[-1]
    return results
