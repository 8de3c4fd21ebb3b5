"""How quantizers traverse a weight: in pieces that fit the caches, whatever the format's blocks are.

A weight [..., N, K] is flattened to rows [R, K]. A *piece* is a few of its rows as blocks, float32 [r, nb, B]; a short last
block of a row is padded with copies of the row's last element, which changes neither its minimum nor its maximum.
A *group* is the list of row slices whose grids are chosen together: one slice, or all of them for a format with one scale
per tensor, whose pieces are [1, 1, r * K].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes, nibbles, pack_nibbles
from halfbyte.formats.spec import Format
from halfbyte.quantizers.check import check_finite, check_weight, overflow

_CHUNK = 1 << 18  # elements of a piece: 1 MB in float32, so that a quantizer's temporaries stay in the L2 or L3 cache


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """The values that the codes of each block represent. Every tensor is [r, nb].

    Attributes:
        scale: In the format's scale dtype, as stored.
        zero: Zero points (uint8) or offsets (scale dtype), as stored; None where the format has none.
        inverse: float32, the factor of a weight when it is encoded: 1 / scale, or 0.
        start: float32, subtracted from a weight before (formats with an offset).
    """

    scale: Tensor
    zero: Tensor | None
    inverse: Tensor
    start: Tensor | None = None

    def where(self, take: Tensor, other: Grid) -> Grid:
        """This grid's blocks where `take` (bool [r, nb]), the other's elsewhere."""

        def pick(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            return None if a is None or b is None else torch.where(take, a, b)

        scale, inverse = torch.where(take, self.scale, other.scale), torch.where(take, self.inverse, other.inverse)
        return Grid(scale, pick(self.zero, other.zero), inverse, pick(self.start, other.start))


def as_blocks(rows: Tensor, fmt: Format) -> Tensor:
    """Row slice [r, K] -> piece [r, nb, B], contiguous float32 (a view where it can be)."""
    rows = rows.float().contiguous()  # so that the order of summation does not depend on the strides
    if fmt.block == "tensor":
        return rows.reshape(1, 1, -1)
    size = fmt.block_size(rows.shape[-1])
    short = -rows.shape[-1] % size
    if short:
        rows = torch.cat((rows, rows[:, -1:].expand(-1, short)), dim=-1)
    return rows.reshape(rows.shape[0], -1, size)


def groups(rows: Tensor, fmt: Format) -> Iterator[list[Tensor]]:
    """Rows [R, K] as groups of row slices."""
    slices = list(rows.split(max(1, _CHUNK // max(1, rows.shape[-1])))) if rows.numel() else []
    if fmt.block == "tensor" and slices:
        yield slices
    else:
        yield from ([piece] for piece in slices)


class Builder:
    """Collects the codes of a weight, group by group in order, into preallocated tensors."""

    def __init__(self, weight: Tensor, fmt: Format, name: str) -> None:
        check_weight(weight, name)
        self.weight, self.fmt, self.name = weight, fmt, name
        self.rows = weight.detach().reshape(-1, weight.shape[-1]) if weight.numel() else weight.new_empty(0, weight.shape[-1])
        stored = Codes.zeros(fmt, tuple(self.rows.shape), weight.device)
        self.data, self.scale, self.zero = stored.data, stored.scale, stored.zero
        self._row = 0  # the next to be added
        self._begun = 0  # the first of the group that the loop over the groups is at

    def __iter__(self) -> Iterator[list[Tensor]]:
        for group in groups(self.rows, self.fmt):
            yield group
            self._begun += sum(map(len, group))

    def add(self, group: list[Tensor], grid: Grid, codes: Iterator[Tensor]) -> None:
        """Stores a group's grid and, piece by piece, its codes (float32 integers [r, nb, B])."""
        fmt, first = self.fmt, self._row
        at = slice(None) if fmt.block == "tensor" else slice(first, first + len(group[0]))
        self.scale[at] = grid.scale
        if self.zero is not None and grid.zero is not None:
            self.zero[at] = grid.zero
        for rows, piece in zip(group, codes, strict=True):
            q = piece.reshape(len(rows), -1)[:, : rows.shape[-1]]
            out = self.data[self._row : self._row + len(rows)]
            out.copy_(q if fmt.bits == 8 else pack_nibbles(nibbles(fmt, q)))
            self._row += len(rows)

    def check(self, what: str, exact: Tensor, stored: Tensor) -> None:
        """Raise unless every `stored` value ([r, nb]) of the group that the loop is at is finite; `exact` holds the values before
        rounding."""
        if bool(torch.isfinite(stored).all()):
            return
        check_finite(self.weight, self.name)  # a NaN or Inf in the weight is the more likely cause, with the clearer message
        row, block = (int(i) for i in (~torch.isfinite(stored)).nonzero()[0])
        place = "the whole tensor" if self.fmt.block == "tensor" else f"row {self._begun + row}, block {block}"
        raise overflow(self.fmt, self.name, what, place, float(exact[row, block]))

    def codes(self) -> Codes:
        shape = tuple(self.weight.shape)
        sizes = self.fmt.scale_shape(shape)
        zero = None if self.zero is None else self.zero.reshape(sizes)
        return Codes(self.fmt, shape, self.data.reshape(*shape[:-1], self.data.shape[-1]), self.scale.reshape(sizes), zero)
