"""The types of elements in memory: their names in specifications, and what LLVM IR loads and stores.

A new type is a line of `ELEMENTS` and its conversions, `ISA.to_float` and `ISA.from_float`. Where it may be used is decided elsewhere: for
scales in `formats/spec.py`, for activations in `ops/checks.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from halfbyte.errors import lookup

Kind = Literal["f32", "bf16", "f16", "i8"]


class Element(NamedTuple):
    """An element as it is stored: its torch dtype, the LLVM type that is loaded, and its bytes."""

    dtype: torch.dtype
    stored: str
    size: int


ELEMENTS: dict[Kind, Element] = {
    "f32": Element(torch.float32, "float", 4),
    "bf16": Element(torch.bfloat16, "i16", 2),
    "f16": Element(torch.float16, "i16", 2),
    "i8": Element(torch.int8, "i8", 1),
}
KINDS: dict[torch.dtype, Kind] = {element.dtype: kind for kind, element in ELEMENTS.items()}


def element_of(kind: Kind) -> Element:
    """Return the element of a kind. Raise UnsupportedError for a kind that no kernel reads."""
    return lookup(ELEMENTS, kind, "the element type")


def kind_of(dtype: torch.dtype) -> Kind:
    """Return the kind of a dtype. Raise UnsupportedError for a dtype that no kernel reads."""
    return lookup(KINDS, dtype, "the element type")
