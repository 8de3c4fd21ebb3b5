"""A weight arranged for one kind of kernel. `pack` makes it from Codes, `unpack` is the exact inverse."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.bounded import Bounded
from halfbyte.formats.spec import Format

CALLS = 64  # that a weight keeps


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


class Section(NamedTuple):
    """A part of a packed matrix: `strips` runs of bytes, one after the other, each of which holds numbers of all rows in their order.

    So the strip of a taller matrix is those of its parts, one after the other (`layouts/experts.py`).

    Attributes:
        start: Offset of the first strip, in bytes.
        strips: How many there are: one for codes, one for each block along K for scales and zeros of GPUs.
        strip_bytes: Bytes of one.
    """

    start: int
    strips: int
    strip_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """A quantized weight in the byte order that the kernels of a device read; `unpack` returns its Codes.

    Attributes:
        format: Of the codes as kernels read them.
        shape: Logical shape [N, K], or [E, N, K] of stacked experts (see `layouts/experts.py`).
        layout: Name of the byte order, which the module of that name in this package defines.
        data: uint8, one dimension.
        sparse: Whether zeros are to be left out, as `pack` was told: on other devices, too.
        source_format: The format of the Codes, where `format` is another (see `dispatch/packed.py`).
        name: The format's name, cached: computing it takes longer than a small kernel, and torch.compile of torch 2.8 cannot trace it.
        calls: What the operations keep, so that repeated calls take less time.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> packed.shape, packed.layout
        ((8, 32), 'cpu_tiles')
    """

    format: Format
    shape: tuple[int, ...]
    layout: str
    data: Tensor
    sparse: bool | None = None
    source_format: Format | None = None
    name: str = field(default="", kw_only=True)
    calls: Bounded[Hashable, Any] = field(init=False, repr=False, default_factory=lambda: Bounded(CALLS))

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", str(self.format))

    def __repr__(self) -> str:
        name = self.name if self.source_format is None else f"{self.source_format} as {self.name}"
        return f"Packed({name}, {list(self.shape)}, {self.layout} on {self.data.device})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.format, self.shape, self.layout, self.data, self.sparse, self.source_format)

    @property
    def codes_format(self) -> Format:
        """The format of the Codes that were packed, which `unpack` returns and files hold."""
        return self.source_format or self.format

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device
