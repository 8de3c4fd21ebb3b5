"""How the outputs of a batch of images are cut into tiles, and what follows for the code (`WinogradSpec`).

A full tile has 4 x 4 outputs. Where one or two rows, or columns, of outputs are left over, their tiles are short along that axis: F(2, 3),
which takes four of the six positions. So 14 x 14 outputs take 484 products of each pair of channels, not 576. Where three are left over,
a full tile reaches beyond the outputs.

Tiles have one order: those of each of SHAPES, by image, row and column. Short tiles lack positions, so a position has a range of tiles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from halfbyte.kernels.cpu.codegen.elements import Kind
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.conv.winograd.transforms import CLASSES, FULL_AXIS, OUTPUTS, POSITIONS, SHORT_AXIS, SHORT_OUTPUTS, Axis

_GROUP_COST = 0.5  # of beginning and ending the products of a group of tiles, in tiles


class TileShape(NamedTuple):
    """Whether tiles are short along the vertical and the horizontal axis."""

    short_vertically: bool
    short_horizontally: bool

    @property
    def vertical(self) -> Axis:
        return SHORT_AXIS if self.short_vertically else FULL_AXIS

    @property
    def horizontal(self) -> Axis:
        return SHORT_AXIS if self.short_horizontally else FULL_AXIS


# In an order in which the tiles that have the positions of each class are adjacent.
SHAPES = TileShape(True, False), TileShape(False, False), TileShape(False, True), TileShape(True, True)
_SHAPES_OF_CLASSES = (0, 4), (0, 2), (1, 3), (1, 2)  # for each of CLASSES the first of SHAPES that has its positions, and the end


class Tiles(NamedTuple):
    """The tiles of outputs [B, Ho, Wo].

    Attributes:
        images: B.
        rows, columns: Full tiles of an image vertically and horizontally.
        short: Whether a row of tiles follows that are short vertically, and a column of tiles that are short horizontally.
    """

    images: int
    rows: int
    columns: int
    short: tuple[bool, bool]

    @classmethod
    def of(cls, out: tuple[int, int, int]) -> Tiles:
        batch, *sides = out
        short = [0 < side % OUTPUTS <= SHORT_OUTPUTS for side in sides]
        rows, columns = (side // OUTPUTS if is_short else -(-side // OUTPUTS) for side, is_short in zip(sides, short, strict=True))
        return cls(batch, rows, columns, (short[0], short[1]))

    @property
    def counts(self) -> list[int]:
        """The number of tiles of each of SHAPES."""
        rows, columns = (self.rows, int(self.short[0])), (self.columns, int(self.short[1]))
        return [self.images * rows[shape.short_vertically] * columns[shape.short_horizontally] for shape in SHAPES]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """For each of CLASSES the first tile that has its positions, and the end."""
        starts = list(itertools.accumulate(self.counts, initial=0))
        return [(starts[first], starts[stop]) for first, stop in _SHAPES_OF_CLASSES]


def group_size(tiles: int, isa: ISA) -> int:
    """Return how many tiles are multiplied together in registers, so that the last such group of so many tiles is nearly full."""
    most = isa.tuning.conv_tile[0]
    return min(range(most, most // 2, -1), key=lambda n: -(-tiles // n) * (n + _GROUP_COST))


@dataclass(frozen=True, slots=True)
class PositionClass:
    """Adjacent positions, in the ORDER, that the same tiles have.

    Attributes:
        first, count: The first of the positions, and how many there are.
        group: Tiles that are multiplied together.
    """

    first: int
    count: int
    group: int


@dataclass(frozen=True, slots=True)
class WinogradSpec:
    """What the code is compiled for.

    Attributes:
        classes: Those of CLASSES; one of all positions where there are no short tiles.
        short_vertically, short_horizontally: Whether there are tiles that are short along this axis.
        out: Element type of the outputs.
        residual: Whether a residual is added to outputs, which are floating point then.
    """

    classes: tuple[PositionClass, ...]
    short_vertically: bool = False
    short_horizontally: bool = False
    out: Kind = "i8"
    residual: bool = False

    @classmethod
    def of(cls, tiles: Tiles, isa: ISA, out: Kind = "i8", *, residual: bool = False) -> WinogradSpec:
        counts = [len(positions) for positions in CLASSES] if any(tiles.short) else [POSITIONS]
        classes = (
            PositionClass(sum(counts[:n]), count, group_size(stop - start, isa))
            for n, (count, (start, stop)) in enumerate(zip(counts, tiles.ranges, strict=False))  # one or all four of them
        )
        return cls(tuple(classes), *tiles.short, out, residual)
