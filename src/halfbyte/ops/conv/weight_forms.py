"""Weights of convolutions in the forms that some kernels read, derived once from the packed bytes that the custom ops are given."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.bounded import writes_to
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter

# Forms of a weight by the id of the tensor of its packed bytes. An entry leaves with its tensor and is replaced once that has other memory
# or was written to; a weight has a few forms at most. Threads may derive one form twice; the later one stays. (WeakTensorKeyDictionary,
# which hashes tensors in Python, takes as long as a small kernel.)
_forms: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], dict[str, Tensor | None]]] = {}


def forms_of(weight: Tensor) -> dict[str, Tensor | None]:
    """The forms of a weight by their names, as `derived` completes them."""
    key = id(weight)
    entry = _forms.get(key)
    if entry is None or entry[0]() is not weight or entry[1] != state_of(weight):
        entry = _forms[key] = weakref.ref(weight, lambda _: _forms.pop(key, None)), state_of(weight), {}
    return entry[2]


def derived(weight: Tensor, form: str, derive: Callable[[], Tensor | None]) -> Tensor | None:
    """The form of a weight of this name, which derive() returns once; None: the kernel of this form does not take these weights."""
    forms = forms_of(weight)
    if form in forms:
        return forms[form]
    tensor = derive()
    if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):  # else its memory belongs to the graph
        forms[form] = tensor
    return tensor


def taps_of(weight: Tensor, sizes: Filter, *, integer: bool) -> Tensor:
    """`convolution.taps` of a depthwise weight in canonical bytes."""
    form = "integer taps" if integer else "taps"
    taps = derived(weight, form, lambda: convolution.taps(convolution.from_canonical_bytes(weight, sizes), sizes, integer=integer))
    assert taps is not None
    return taps


def state_of(weight: Tensor) -> tuple[int, int]:
    """A value that changes when a tensor gets other memory or is written to."""
    return weight.data_ptr(), writes_to(weight)
