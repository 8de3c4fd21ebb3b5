"""2:4 sparse weights on CPUs: unpacked in registers for tiles and for single rows, and converted from and to the dense layout.

    dense[row, 4 g + j] = the next kept code of (row, g) if bit j of mask[row, g] is 1, else the code of 0      j = 0 … 3

for groups g of 4 k. The layout is `cpu_tiles_2_4` of `layouts/cpu_tiles.py`; of a panel's 32 rows a unit of 32 k is

    line 0 | line 1 | … | masks of group 0 | … | of group 7
    a line, 64 bytes:   two kept codes of each row, of one group (8 bits), or of two (4 bits, the second one in high nibbles)
    masks, 16 bytes:    4 bits of each row

One instruction expands the codes of 16 rows by 64 bits of masks (AVX-512 VBMI2, `ISA.spread_kept`). It yields the elements of the dense
layout, so that the arithmetic, and every bit of a result, is that of `tile.py` with the dense weight. A weight takes 3 or 5 bits of memory
in place of 4 or 8, and more instructions: it is faster where memory limits a product, with few rows of activations.

`SparseUnit` is for `tile.py` and `expanded.py`, `eight_codes` for `quantize/dequantize.py`, `pack` and `unpack` for `ops/functions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.kernels.cpu.codegen.arguments import PACK_SPARSE
from halfbyte.kernels.cpu.codegen.ir import Function, Value, mangled
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase, run
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import PANEL, SPARSE_UNIT, data_bytes
from halfbyte.layouts.sparse import GROUP, KEPT, why_not_sparse

_ROWS = 16  # of a vector
_LINE = PANEL * KEPT  # bytes
_MASKS = PANEL * GROUP // 8  # bytes of the masks of a group
_ELEMENTS_A_THREAD = 1 << 18


def _lines(bits: int) -> int:
    """Return the number of lines of a unit."""
    return SPARSE_UNIT * bits // 32


def _groups(bits: int) -> int:
    """Return the number of groups whose codes are in a line."""
    return 8 // bits


@dataclass(frozen=True, slots=True)
class SparseUnit:
    """32 k of some rows of a panel, a vector for each 16 rows.

    Attributes:
        isa: Emits the instructions.
        bits: Bits of a code.
        at: Address of the panel's unit.
        row_offset: The first row in the panel.
        zeros: The code of 0 in each byte, for each vector.
    """

    isa: ISA
    bits: int
    at: Value
    row_offset: Value
    zeros: Sequence[Value]

    @classmethod
    def of(cls, isa: ISA, bits: int, at: Value, row_offset: Value, points: Value | None, vectors: int) -> SparseUnit:
        """Return a unit with `zero_codes` of the points."""
        return cls(isa, bits, at, row_offset, zero_codes(isa, at.fn, bits, points, vectors))

    def _expanded(self, line: int) -> Iterator[list[Value]]:
        """Yield for each vector the dense elements of the groups of a line."""
        groups = _groups(self.bits)
        masks_at = self.at + (self.row_offset >> 1) + _lines(self.bits) * _LINE
        for v, zeros in enumerate(self.zeros):
            stored = (self.at + self.row_offset * KEPT).load("<32 x i8>", line * _LINE + v * _ROWS * KEPT, 32)
            masks = (masks_at.load("i64", (line * groups + g) * _MASKS + v * _ROWS // 2, 8) for g in range(groups))
            kept = self.isa.kept_codes(stored, self.bits)
            yield [self.isa.spread_kept(stored.fn, codes, mask, zeros) for codes, mask in zip(kept, masks, strict=True)]

    def steps(self) -> Iterator[tuple[Value, ...]]:
        """Yield the elements of each 4 k, as `ISA.unit_weights` returns them, one for each vector."""
        for line in range(_lines(self.bits)):
            yield from zip(*self._expanded(line), strict=True)

    def stored(self, line: int) -> Iterator[Value]:
        """Yield the bytes that the dense layout has for the groups of a line, as `ISA.stored` returns them, for each vector."""
        for groups in self._expanded(line):
            yield groups[0] if self.bits == 8 else groups[0] | (groups[1].bits(self.isa.ints) << 4).bits(groups[0].type)


def zero_codes(isa: ISA, f: Function, bits: int, points: Value | None, vectors: int) -> list[Value]:
    """Return the code of 0 in each byte of 4 k, for each vector of 16 rows.

    Args:
        isa, f: Emit the instructions.
        bits: Bits of a code.
        points: Address of the rows' zero points, a byte each; None: codes are signed.
        vectors: How many.
    """
    if points is None:
        return [f.value(isa.quads, 1 << (bits - 1))] * vectors
    return [points.load("<16 x i8>", v * _ROWS).shuffle([i // GROUP for i in range(GROUP * _ROWS)]) for v in range(vectors)]


def eight_codes(f: Function, bits: int, at: Value, eighth: Value, row: Value, point: Value | None) -> Value:
    """Return eight k of one row as the dense layout stores them, <8 x i32>, without vectors of 64 bytes.

    Args:
        f: Emits the instructions.
        bits: Bits of a code.
        at: Address of the panel's unit.
        eighth: Which eight of its 32 k, 0 … 3.
        row: In the panel.
        point: The row's zero point in each lane; None: codes are signed.
    """
    codes = at + row * KEPT + eighth * (_LINE * bits // 4)
    of_groups = [codes.load("i16", g * _LINE * (bits == 8)).to("i32", unsigned=True) for g in (0, 1)]
    if bits == 4:
        of_groups = [of_groups[0] & 0x0F0F, (of_groups[0] >> 4) & 0x0F0F]
    first, second = (((of_groups[0] >> bit) & 255 | ((of_groups[1] >> bit) & 255) << 8) for bit in (0, 8))  # kept ones, of both groups
    masks = at + (row >> 1) + eighth * (2 * _MASKS) + _lines(bits) * _LINE
    low, high = (masks.load("i8", g * _MASKS).to("i32", unsigned=True) >> ((row & 1) * 4).to("i32") & 15 for g in (0, 1))
    mask, group_bit = (low | high << 4).splat(8), f.constant("<8 x i32>", [0] * 4 + [8] * 4)
    code_bit, earlier_bits = ([number << GROUP * g for g in (0, 1) for number in numbers] for numbers in ((1, 2, 4, 8), (0, 1, 3, 7)))
    candidates = [(number.splat(8) >> group_bit) & 255 for number in (first, second)]
    kept = (mask & f.constant(mask.type, earlier_bits)).equals(0).select(*candidates)
    zero = f.value(mask.type, 1 << (bits - 1)) if point is None else point
    return (mask & f.constant(mask.type, code_bit)).equals(0).select(zero, kept)


# Conversion of whole weights


@dataclass(frozen=True, slots=True)
class ConvertSpec:
    """A conversion between the dense layout and the sparse one.

    Attributes:
        to_dense: The direction.
        bits: Bits of a code.
        scale_bytes: Bytes of a scale.
        points: Whether there are zero points.
        dense_tail, sparse_tail: Bytes behind the data of a record, scales and zeros first.
    """

    to_dense: bool
    bits: int
    scale_bytes: int
    points: bool
    dense_tail: int
    sparse_tail: int


@phase
def build(spec: ConvertSpec, isa: ISA, f: Function) -> None:
    """Convert the panels of PACK_SPARSE's arguments; threads take whole ones."""
    args = f.parameters[0]
    panels, blocks = PACK_SPARSE.load(args, "panels"), PACK_SPARSE.load(args, "blocks")
    layouts, tails = ("dense", "sparse"), (spec.dense_tail, spec.sparse_tail)
    source, target = (1, 0) if spec.to_dense else (0, 1)
    unit_bytes = [data_bytes(spec.bits, SPARSE_UNIT, sparse=layout == "sparse") for layout in layouts]
    for p in f.share(panels):
        places = [f.variable(PACK_SPARSE.load(args, layout, "ptr") + p * PACK_SPARSE.load(args, f"{layout}_bytes")) for layout in layouts]
        for b in f.loop(blocks):
            units = (b + 1).equals(blocks).select(PACK_SPARSE.load(args, "last_units"), PACK_SPARSE.load(args, "units"))
            points = places[source].value + units * unit_bytes[source] + PANEL * spec.scale_bytes if spec.points else None
            zeros = zero_codes(isa, f, spec.bits, points, PANEL // _ROWS)
            for _ in f.loop(units):
                dense, sparse = (place.value for place in places)
                _convert_unit(spec, isa, dense, sparse, zeros)
                for place, size in zip(places, unit_bytes, strict=True):
                    place.value = place.value + size
            for i in f.loop(spec.sparse_tail, step=64):  # the dense tail may be longer, by sums of pairs, which come last
                (places[target].value + i).store((places[source].value + i).load("<64 x i8>"))
            for place, size in zip(places, tails, strict=True):
                place.value = place.value + size


def _convert_unit(spec: ConvertSpec, isa: ISA, dense: Value, sparse: Value, zeros: Sequence[Value]) -> None:
    unit = SparseUnit(isa, spec.bits, sparse, dense.fn.value("i64", 0), zeros)
    for line in range(_lines(spec.bits)):
        row = dense + line * 4 * PANEL
        if not spec.to_dense:
            _compress_line(spec, isa, row, sparse, line, zeros)
            continue
        for v, codes in enumerate(unit.stored(line)):
            row.store(codes, 4 * _ROWS * v, 64)


def _compress_line(spec: ConvertSpec, isa: ISA, row: Value, unit: Value, line: int, zeros: Sequence[Value]) -> None:
    """Store a line and its masks from a row of the dense layout's data."""
    f, groups = row.fn, _groups(spec.bits)
    for v, stored in enumerate(isa.stored(row, len(zeros))):
        packed = []
        for g, codes in enumerate(isa.unit_weights(stored, spec.bits)):
            mask = _filled_mask(codes.differs(zeros[v]).bits("i64"))
            unit.store(mask, _lines(spec.bits) * _LINE + (line * groups + g) * _MASKS + v * _ROWS // 2, 8)
            name = f"llvm.x86.avx512.mask.compress.{mangled(codes.type)}"
            packed.append(f.call(codes.type, name, codes, f.value(codes.type, 0), mask.bits("<64 x i1>")).shuffle(range(32)))
        kept = packed[0] if groups == 1 else packed[0] | (packed[1].bits("<8 x i32>") << 4).bits(packed[0].type)
        unit.store(kept, line * _LINE + v * _ROWS * KEPT, 32)


def _filled_mask(mask: Value) -> Value:
    """Return the mask of nonzero codes, at most KEPT of each 4 bits, with the lowest other bits set until there are KEPT."""
    ones = 0x1111111111111111
    for _ in range(KEPT):
        pair_counts = (mask & 5 * ones) + ((mask >> 1) & 5 * ones)
        counts = (pair_counts & 3 * ones) + ((pair_counts >> 2) & 3 * ones)
        fewer = ((counts >> 1 | counts >> 2) & ones ^ ones) * 15
        mask = mask | (mask ^ -1) & (mask + ones) & fewer
    return mask


def why_not(codes: Codes) -> str | None:
    """Return why `codes` are not packed as 2:4 sparse ones here; None if they are."""
    return why_no_layout(codes.format, math.prod(codes.shape[:-1]), codes.shape[-1], current()) or why_not_sparse(codes)


def why_no_layout(fmt: Format, n: int, k: int, isa: ISA) -> str | None:
    """Return why a 2:4 sparse weight [n, k] is packed as any other for `isa`; None if it is packed as a sparse one."""
    if not isa.spreads:
        return f"{isa.name} has no kernels here for 2:4 sparse weights, which need AVX-512 VBMI2 without AMX"
    if fmt.codebook:
        return "codes of a table are packed with their zeros"
    if fmt.zero == "offset":
        return "formats with float offsets have no code that means 0"
    if cpu_tiles.sparse_bytes(fmt, n, k) is None:
        return f"blocks of 2:4 sparse weights are multiples of {SPARSE_UNIT} or longer than 256"
    return None


def pack(dense: Packed) -> Packed:
    """Return the same weight in the layout of sparse ones. The caller checks `why_not` first: with more than two nonzero codes of a group
    the result would lack some."""
    return _converted(dense, cpu_tiles.SPARSE)


def unpack(sparse: Packed) -> Packed:
    """Return the same weight in the dense layout; sums of pairs, if it has any, are not filled in."""
    return _converted(sparse, cpu_tiles.NAME)


def _converted(packed: Packed, layout: str) -> Packed:
    fmt, to_dense = packed.format, layout == cpu_tiles.NAME
    assert packed.layout == (cpu_tiles.SPARSE if to_dense else cpu_tiles.NAME), f"converts to {layout}, got {packed.layout}"
    dense, sparse = (cpu_tiles.geometry(fmt, packed.shape, sparse=is_sparse) for is_sparse in (False, True))
    out = cpu_tiles.allocate((dense if to_dense else sparse).nbytes)
    dense_data, sparse_data = (out, packed.data) if to_dense else (packed.data, out)
    fields = {
        "dense": dense_data.data_ptr(),
        "sparse": sparse_data.data_ptr(),
        "panels": dense.panels,
        "blocks": dense.blocks,
        "units": dense.padded // SPARSE_UNIT,
        "last_units": dense.last_padded // SPARSE_UNIT,
        "dense_bytes": dense.panel_bytes,
        "sparse_bytes": sparse.panel_bytes,
    }
    spec = ConvertSpec(to_dense, fmt.bits, dense.scale_bytes, fmt.zero == "point", dense.tail_bytes, sparse.tail_bytes)
    run(arguments(PACK_SPARSE, compiled(build, spec, current()), fields), dense.n * dense.k // _ELEMENTS_A_THREAD)
    return Packed(fmt, packed.shape, layout, out)
