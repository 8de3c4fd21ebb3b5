"""A weight arranged for one kind of kernel. `pack` makes it from Codes, `unpack` is the exact inverse."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.formats.spec import Format


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """The same numbers as the Codes it was made from, in the order of `layout`.

    shape   logical shape [..., N, K]
    layout  name of the byte order, as the file of that layout in this room defines it
    data    uint8, one dimension
    name    the format's, spelled once: looking it up costs more than a small kernel
    """

    format: Format
    shape: tuple[int, ...]
    layout: str
    data: Tensor
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.format))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device
