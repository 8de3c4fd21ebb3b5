"""The blocks of memory through which Python hands arguments to generated code: one table a family of kernels.

Python writes a block with one `struct` call; generated code reads a field at the offset that its name has here. Every field
is 8 bytes but for the two halves of `clamp`. The header is the same for all: `runtime.py` reads it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from halfbyte.kernels.cpu.ir import Value

_HEADER = ("first_phase", "second_phase", "counter", "openmp")


@dataclass(frozen=True, slots=True)
class Block:
    """The fields of one kind of call. `floats` are pairs of float32 that share 8 bytes."""

    fields: tuple[str, ...]
    floats: frozenset[str] = frozenset()

    @property
    def format(self) -> struct.Struct:
        return struct.Struct("<" + "".join("2f" if f in self.floats else "q" for f in self.fields))

    def load(self, args: Value, field: str, type_: str = "i64") -> Value:
        return args.load(type_, 8 * self.fields.index(field), 8)

    def address(self, args: Value, field: str) -> Value:
        return args + 8 * self.fields.index(field)


LINEAR = Block(
    (
        *_HEADER,
        # sizes along K: records, their real elements and their units, for all but the last record and for it
        "k",
        "blocks",
        "block",
        "last",
        "units",
        "last_units",
        # activations [M, K] and where they are put for the tiles
        "x",
        "x_stride",
        "row_function",
        "scratch",
        "row_bytes",
        # row tiles: `tiles` of `tile_rows` rows, then `lesser_tiles` with one row less
        "m",
        "tile_rows",
        "tiles",
        "lesser_tiles",
        "tile_function",
        "lesser_tile_function",
        # weights and outputs; `zeros` stands for a bias where there is none
        "n",
        "weights",
        "panel_bytes",
        "group",
        "bias",
        "zeros",
        "out",
        "out_stride",
        "out_bytes",
        "clamp",
        "table_stride",  # qlinear alone: bytes between the rows of its table
    ),
    frozenset({"clamp"}),
)

DEQUANTIZE = Block((*_HEADER, "weights", "panel_bytes", "blocks", "block", "last", "units", "last_units", "ids", "rows", "out", "out_stride"))

QUANTIZE = Block((*_HEADER, "weight", "stride", "rows", "k", "block", "blocks", "data", "data_stride", "scale", "zero", "scratch", "failed"))
