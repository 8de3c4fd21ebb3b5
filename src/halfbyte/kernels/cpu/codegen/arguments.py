"""The blocks of memory through which Python passes arguments to generated code: a `Block` names the fields of a family of kernels.

Python writes a block with one `struct` call; generated code loads a field from the offset that its name has here. Fields are int64, or
addresses, or pairs of float32. All begin with the same header, which `runtime.py` reads:

    first_phase, second_phase   addresses of functions (arguments, thread, threads); 0: there is no second phase
    openmp                      `runtime.openmp_address`
    counter                     0 before the call; threads draw work from it
"""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Iterable, Mapping

from halfbyte.kernels.cpu.codegen.ir import Value

Buffer = ctypes.Array[ctypes.c_char]
pack_integer = struct.Struct("<q").pack_into  # (buffer, offset of a field, its value)
_pack_floats = struct.Struct("<2f").pack_into
_HEADER = ("first_phase", "second_phase", "openmp", "counter")


class Block:
    """The fields of one kind of call, of 8 bytes each, behind the header that all kinds share.

    Attributes:
        fields: Their names, those of the header first.
        floats: Those which are pairs of float32.
        nbytes: Bytes of all.
    """

    def __init__(self, *fields: str, floats: Iterable[str] = ()) -> None:
        self.fields, self.floats = (*_HEADER, *fields), frozenset(floats)
        if repeated := [name for name, count in Counter(self.fields).items() if count > 1]:
            raise ValueError(f"the fields of a block have different names, got {', '.join(repeated)} twice: use the one that is there")
        self.nbytes = 8 * len(self.fields)
        self._offsets = {name: 8 * i for i, name in enumerate(self.fields)}

    def extended(self, *fields: str, floats: Iterable[str] = ()) -> Block:
        """Return a block with the fields of this one, and then these."""
        return Block(*self.fields[len(_HEADER) :], *fields, floats=self.floats.union(floats))

    def struct(self, first: str | None = None, last: str | None = None) -> struct.Struct:
        """Return the struct of all fields, or of those from `first` to `last`."""
        start = 0 if first is None else self.fields.index(first)
        stop = len(self.fields) if last is None else self.fields.index(last) + 1
        return struct.Struct("<" + "".join("2f" if f in self.floats else "q" for f in self.fields[start:stop]))

    def buffer(self, values: Mapping[str, int | tuple[float, float]]) -> Buffer:
        """Return a block with these values, and 0 in all other fields."""
        buffer = ctypes.create_string_buffer(self.nbytes)
        for name, value in values.items():
            if name in self.floats:
                _pack_floats(buffer, self._offsets[name], *value)  # type: ignore[misc]  # an integer raises TypeError
            else:
                pack_integer(buffer, self._offsets[name], value)  # a pair of floats raises struct.error
        return buffer

    def offset(self, field: str) -> int:
        """Return the offset of a field in bytes."""
        return self._offsets[field]

    def load(self, args: Value, field: str, type_: str = "i64") -> Value:
        """Emit the load of a field of the block at `args`: an integer, or an address with type "ptr"."""
        assert field not in self.floats, f"{field} is a pair of floats: use load_floats()"
        return args.load(type_, self.offset(field), 8)

    def load_floats(self, args: Value, field: str) -> tuple[Value, Value]:
        """Emit the loads of a field's two floats."""
        assert field in self.floats, f"{field} is no pair of floats: use load()"
        first, second = ((args + self.offset(field)).load("float", at, 4) for at in (0, 4))
        return first, second

    def known(self, values: Mapping[str, int]) -> dict[str, int]:
        """Return the values that the block has fields for."""
        return {field: value for field, value in values.items() if field in self.fields}


# What changes from call to call of a product or convolution: activations [M, K], memory of their tiles, weights, bias, outputs;
# `residual`: bytes from an output to its residual, 0 for none.
OPERANDS = Block("x", "x_stride", "scratch", "weights", "bias", "out", "residual", "clamp", floats=["clamp"])

LINEAR = OPERANDS.extended(
    # sizes along K: records, their real elements and their units, for all but the last record and for it
    *("k", "blocks", "block", "last", "units", "last_units"),
    # row tiles: `tiles` of `tile_rows` rows, then `lesser_tiles` with one row less
    *("m", "row_bytes", "row_function", "tile_rows", "tiles", "lesser_tiles", "tile_function", "lesser_tile_function"),
    "panel_function",  # loops over all row tiles of a panel (`expanded.py`, `bracketed.py`); 0: `driver.multiply` does
    *("expanding_tile_function", "expanding_lesser_tile_function", "expanded_blocks"),
    *("bracketing_tile_function", "bracketing_lesser_tile_function"),
    "chunks",  # of row tiles
    *("n", "panel_bytes", "panel_groups"),
    "panels_per_tile",  # panels that one call of a tile takes; 0 stands for 1
    "panels_per_pass",  # panels that all row tiles pass over before the next ones
    "prefetching_tiles",  # so many of the row tiles, the last ones, share the prefetch of the next panel
    "zeros",  # stands for a bias where there is none
    *("out_stride", "out_bytes"),
    "table_stride",  # qlinear alone: bytes between the rows of its table
)

# blocks of LINEAR, one behind the other
GROUPED = Block("blocks", "count")

DEQUANTIZE = Block("weights", "panel_bytes", "blocks", "block", "last", "units", "last_units", "ids", "rows", "out", "out_stride")

QUANTIZE = Block("weight", "stride", "rows", "k", "block", "blocks", "data", "data_stride", "scale", "zero", "scratch", "failed")

PROBE = Block("buffer", "out", "size")

PACK = Block(
    *("data", "data_stride", "rows", "scale", "zero", "scale_stride"),
    *("out", "panel_bytes", "blocks", "groups", "padded_groups", "last_groups", "last_padded_groups"),  # groups: of eight k
)

EXTRACT = Block("data", "out", "blocks")

PACK_SPARSE = Block("dense", "sparse", "panels", "blocks", "units", "last_units", "dense_bytes", "sparse_bytes")
