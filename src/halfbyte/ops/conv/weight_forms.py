"""Weights of convolutions in the forms that some kernels read, derived once from the packed bytes that the custom ops are given."""

from __future__ import annotations

import weakref

from torch import Tensor

from halfbyte.bounded import writes_to

# Forms of a weight by the id of the tensor of its packed bytes. An entry leaves with its tensor and is replaced once that has other memory
# or was written to; a weight has a few forms at most. Threads may derive one form twice; the later one stays. (WeakTensorKeyDictionary,
# which hashes tensors in Python, takes as long as a small kernel.)
_forms: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], dict[str, Tensor | None]]] = {}


def forms_of(weight: Tensor) -> dict[str, Tensor | None]:
    """The forms of a weight by their names, to be completed by the caller; None: the kernel of this form does not take these weights."""
    key = id(weight)
    entry = _forms.get(key)
    if entry is None or entry[0]() is not weight or entry[1] != state_of(weight):
        entry = _forms[key] = weakref.ref(weight, lambda _: _forms.pop(key, None)), state_of(weight), {}
    return entry[2]


def state_of(weight: Tensor) -> tuple[int, int]:
    """A value that changes when a tensor gets other memory or is written to."""
    return weight.data_ptr(), writes_to(weight)
