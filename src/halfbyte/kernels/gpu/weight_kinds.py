"""What kernels decode of a weight's format: the kind of its zero, the dtype of its scales, and its codebook.

What is not listed here is an error before anything is compiled: a branch in a kernel would take it for its last case.
"""

from __future__ import annotations

import torch

from halfbyte.errors import lookup
from halfbyte.formats.spec import Format, Zero

_ZEROS: dict[Zero, int] = {"none": 0, "point": 1, "offset": 2}  # their numbers in kernels
_SCALES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_CODEBOOKS = {"": False, "fp4": True}  # whether codes are decoded as 4-bit floats, e2m1


def zero_of(fmt: Format) -> Zero:
    """The kind of a format's zero. Raises UnsupportedError for a zero, or a scale, that kernels do not decode."""
    lookup(_SCALES, fmt.scale, "the dtype of scales on a GPU,")
    lookup(_ZEROS, fmt.zero, "the zero of a format on a GPU,")
    return fmt.zero


def zero_number(fmt: Format) -> int:
    """The same as kernels number it."""
    return _ZEROS[zero_of(fmt)]


def has_floats(fmt: Format) -> bool:
    """Whether codes are 4-bit floats. Raises UnsupportedError for another codebook, whose codes a GPU has as integers of 8 bits."""
    return lookup(_CODEBOOKS, fmt.family if fmt.codebook else "", "the codebook on a GPU,")
