"""The types of elements in memory: what specifications call them, and what LLVM IR loads and stores.

One more is a line of `ELEMENTS` and its conversions, `ISA.to_float` and `ISA.from_float`; what it is for (scales: `formats/spec.py`,
activations: `ops/checks.py`) is decided elsewhere.
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
    """Raises UnsupportedError for a kind that no kernel can read."""
    return lookup(ELEMENTS, kind, "the element type")


def kind_of(dtype: torch.dtype) -> Kind:
    """The name that specifications have for a dtype. Raises UnsupportedError for a dtype that no kernel can read."""
    return lookup(KINDS, dtype, "the element type")
