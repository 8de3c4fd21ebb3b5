"""What a kernel is asked to do: one `Problem`, which fixes all that the choice of a kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import Format

Op = Literal["linear", "qlinear", "embedding", "dequantize"]
Compute = Literal["float", "int8"]
Activation = Literal["block", "row", "block_offset", "row_offset"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One operation on a weight [n, k] in `format`.

    op          "linear": x [m, k] -> [m, n];  "qlinear": int8 x -> int8, requantized;  "embedding": m rows of the weight;
                "dequantize": all of them
    dtype       of the activations and of the result: float32, bfloat16 or float16; int8 for "qlinear"
    compute     "float": the weight is dequantized in registers;  "int8": activations are quantized on the fly
    activation  how, for "int8": a scale for each block of the weight along K or for the row; symmetric or with an offset
    """

    op: Op
    m: int
    n: int
    k: int
    format: Format
    dtype: torch.dtype
    compute: Compute = "float"
    activation: Activation = "block"

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 0:
            raise ArgumentError(f"m, n and k are sizes of at least 0, got m={self.m}, n={self.n}, k={self.k}")
