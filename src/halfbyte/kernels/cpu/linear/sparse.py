"""2:4 sparse weights: unpacked in registers for tiles and rows, and packed.

    dense[16 rows x 4 k] = expand(codes kept[16 rows x 2], places[64 bits]), the code of 0 elsewhere

The bytes are those of `layouts/cpu_tiles.py`, layout `cpu_tiles_2_4`. What comes of them are the dense layout's own elements, so that the
arithmetic, and every bit of a result, is that of `tile.py` with the dense weight. Fewer bytes of memory are read, 3 or 5 bits a weight
for 4 or 8, and more instructions unpack them: it is faster where memory limits a product, with few rows of activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import PACK_SPARSE
from halfbyte.kernels.cpu.codegen.ir import Function, Value, mangled
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import PANEL, SPARSE_UNIT, data_bytes
from halfbyte.layouts.sparse import GROUP, KEPT, why_not_sparse

_ROWS = 16  # of a vector
_KEPT = PANEL * KEPT  # bytes of codes for each step of 8 k of 4 bits, or of 4 k of 8
_PLACES = PANEL // 2  # bytes of places for each 4 k
_ELEMENTS_A_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class SparseUnit:
    """32 k of the rows from `row_offset` on of a panel whose data for them lie at `at`.

    zeros   what stands for 0 in each byte, a vector for each 16 rows
    """

    isa: ISA
    bits: int
    at: Value
    row_offset: Value
    zeros: Sequence[Value]

    @classmethod
    def of(cls, isa: ISA, bits: int, at: Value, row_offset: Value, points: Value | None, vectors: int) -> SparseUnit:
        """With the zeros that `zeros_of` makes of the points."""
        return cls(isa, bits, at, row_offset, zeros_of(isa, at.fn, bits, points, vectors))

    def _row(self, t: int) -> Iterator[list[Value]]:
        """The t-th row of stored codes: of each vector its elements, 4 k after 4 k."""
        each = 8 // self.bits  # steps of 4 k
        places = self.at + (self.row_offset >> 1) + SPARSE_UNIT * self.bits // 32 * _KEPT
        for v, zeros in enumerate(self.zeros):
            stored = (self.at + self.row_offset * KEPT).load("<32 x i8>", t * _KEPT + v * _ROWS * KEPT, 32)
            masks = (places.load("i64", (t * each + s) * _PLACES + v * _ROWS // 2, 8) for s in range(each))
            kept = self.isa.kept_codes(stored, self.bits)
            yield [self.isa.spread_kept(stored.fn, codes, mask, zeros) for codes, mask in zip(kept, masks, strict=True)]

    def steps(self) -> Iterator[tuple[Value, ...]]:
        """The elements of each 4 k, as `ISA.unit_weights` gives them: a vector for each 16 rows."""
        for t in range(SPARSE_UNIT * self.bits // 32):
            yield from zip(*self._row(t), strict=True)

    def stored(self, t: int) -> Iterator[Value]:
        """The t-th row of the dense layout's data, as `ISA.stored` gives it."""
        for steps in self._row(t):
            yield steps[0] if self.bits == 8 else steps[0] | (steps[1].bits(self.isa.ints) << 4).bits(steps[0].type)


def zeros_of(isa: ISA, f: Function, bits: int, points: Value | None, vectors: int) -> list[Value]:
    """What stands for 0: of signed codes a constant, else the points, a byte each at this address."""
    if points is None:
        return [f.value(isa.quads, 1 << (bits - 1))] * vectors
    return [points.load("<16 x i8>", v * _ROWS).shuffle([i // GROUP for i in range(GROUP * _ROWS)]) for v in range(vectors)]


def eight(f: Function, bits: int, at: Value, group: Value, lane: Value, point: Value | None) -> Value:
    """Eight k of one row as the dense layout stores them, <8 x i32>: the group-th of the unit at `at`."""
    codes = at + lane * KEPT + group * (_KEPT * bits // 4)
    both = [codes.load("i16", s * _KEPT * (bits == 8)).to("i32", unsigned=True) for s in (0, 1)]  # first and second, of each 4 k
    if bits == 4:
        both = [both[0] & 0x0F0F, (both[0] >> 4) & 0x0F0F]
    first, second = (((both[0] >> bit) & 255 | ((both[1] >> bit) & 255) << 8) for bit in (0, 8))
    places = at + (lane >> 1) + group * (2 * _PLACES) + SPARSE_UNIT * bits // 32 * _KEPT
    low, high = (places.load("i8", s * _PLACES).to("i32", unsigned=True) >> ((lane & 1) * 4).to("i32") & 15 for s in (0, 1))
    mask, halves = (low | high << 4).splat(8), f.constant("<8 x i32>", [0] * 4 + [8] * 4)
    here, before = ([number << GROUP * half for half in (0, 1) for number in numbers] for numbers in ((1, 2, 4, 8), (0, 1, 3, 7)))
    picked = [(number.splat(8) >> halves) & 255 for number in (first, second)]
    kept = (mask & f.constant(mask.type, before)).equals(0).select(*picked)
    zero = f.value(mask.type, 1 << (bits - 1)) if point is None else point
    return (mask & f.constant(mask.type, here)).equals(0).select(zero, kept)


@dataclass(frozen=True, slots=True)
class PackSparseSpec:
    """From the dense layout to that of sparse weights, or `back`: bits of a code; bytes of a scale; whether there are points; bytes behind
    the data of a dense record and of a sparse one."""

    back: bool
    bits: int
    scale_bytes: int
    points: bool
    dense_tail: int
    sparse_tail: int


@phase
def build(spec: PackSparseSpec, isa: ISA, f: Function) -> None:
    """Each thread takes whole panels."""
    args, thread, threads = f.parameters
    panels, blocks, names = PACK_SPARSE.load(args, "panels"), PACK_SPARSE.load(args, "blocks"), ("dense", "sparse")
    units_bytes, tails = (
        [data_bytes(spec.bits, SPARSE_UNIT, sparse=sparse) for sparse in (False, True)],
        (spec.dense_tail, spec.sparse_tail),
    )
    for p in f.loop((thread + 1) * panels // threads, thread * panels // threads):
        both = [f.variable(PACK_SPARSE.load(args, name, "ptr") + p * PACK_SPARSE.load(args, f"{name}_bytes")) for name in names]
        for b in f.loop(blocks):
            units = (b + 1).equals(blocks).select(PACK_SPARSE.load(args, "last_units"), PACK_SPARSE.load(args, "units"))
            points = both[spec.back].value + units * units_bytes[spec.back] + PANEL * spec.scale_bytes if spec.points else None
            zeros = zeros_of(isa, f, spec.bits, points, PANEL // _ROWS)
            for _ in f.loop(units):
                dense, sparse = (at.value for at in both)
                unit = SparseUnit(isa, spec.bits, sparse, f.value("i64", 0), zeros)
                for t in range(SPARSE_UNIT * spec.bits // 32):
                    row = dense + t * 4 * PANEL
                    if not spec.back:
                        _compress(spec, isa, row, sparse, t, zeros)
                        continue
                    for v, codes in enumerate(unit.stored(t)):
                        row.store(codes, 4 * _ROWS * v, 64)
                for at, size in zip(both, units_bytes, strict=True):
                    at.value = at.value + size
            for i in f.loop(spec.sparse_tail, step=64):
                (both[not spec.back].value + i).store((both[spec.back].value + i).load("<64 x i8>"))
            for at, size in zip(both, tails, strict=True):
                at.value = at.value + size


def _compress(spec: PackSparseSpec, isa: ISA, row: Value, unit: Value, t: int, zeros: Sequence[Value]) -> None:
    """The t-th row of a unit's data."""
    f, each = row.fn, 8 // spec.bits
    for v, stored in enumerate(isa.stored(row, len(zeros))):
        packed = []
        for s, codes in enumerate(isa.unit_weights(stored, spec.bits)):
            places = _two(codes.differs(zeros[v]).bits("i64"))
            unit.store(places, SPARSE_UNIT * spec.bits // 32 * _KEPT + (t * each + s) * _PLACES + v * _ROWS // 2, 8)
            name = f"llvm.x86.avx512.mask.compress.{mangled(codes.type)}"
            packed.append(f.call(codes.type, name, codes, f.value(codes.type, 0), places.bits("<64 x i1>")).shuffle(range(32)))
        both = packed[0] if each == 1 else packed[0] | (packed[1].bits("<8 x i32>") << 4).bits(packed[0].type)
        unit.store(both, t * _KEPT + v * _ROWS * KEPT, 32)


def _two(mask: Value) -> Value:
    """The mask with its lowest zeros set until each 4 bits, of which at most two are, have two."""
    ones = 0x1111111111111111
    for _ in range(KEPT):
        pair_counts = (mask & 5 * ones) + ((mask >> 1) & 5 * ones)
        counts = (pair_counts & 3 * ones) + ((pair_counts >> 2) & 3 * ones)
        fewer = ((counts >> 1 | counts >> 2) & ones ^ ones) * 15
        mask = mask | (mask ^ -1) & (mask + ones) & fewer
    return mask


def why_not(codes: Codes) -> str | None:
    """Why `codes` are not packed as 2:4 sparse ones here; None if they are."""
    return why_no_layout(codes.format, math.prod(codes.shape[:-1]), codes.shape[-1], current()) or why_not_sparse(codes)


def why_no_layout(fmt: Format, n: int, k: int, isa: ISA) -> str | None:
    """Why a 2:4 sparse weight [n, k] is packed as any other for `isa`; None if it isn't."""
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
    """The same weight in the layout of sparse ones. The caller asks `why_not` first."""
    return _moved(dense, cpu_tiles.SPARSE)


def unpack(sparse: Packed) -> Packed:
    """The same weight in the dense layout, without sums of pairs."""
    return _moved(sparse, cpu_tiles.NAME)


def _moved(packed: Packed, layout: str) -> Packed:
    fmt, back = packed.format, layout == cpu_tiles.NAME
    dense, sparse = geometries = [cpu_tiles.geometry(fmt, packed.shape, sparse=sparse) for sparse in (False, True)]
    out = cpu_tiles.allocate(geometries[not back].nbytes)
    addresses = [data.data_ptr() for data in ((out, packed.data) if back else (packed.data, out))]
    fields = dict(zip(("dense", "sparse"), addresses, strict=True)) | {"panels": dense.panels, "blocks": dense.blocks}
    fields |= {"units": dense.padded // SPARSE_UNIT, "last_units": dense.last_padded // SPARSE_UNIT}
    fields |= {"dense_bytes": dense.panel_bytes, "sparse_bytes": sparse.panel_bytes}
    spec = PackSparseSpec(back, fmt.bits, dense.scale_bytes, fmt.zero == "point", dense.tail_bytes, sparse.tail_bytes)
    block = arguments(PACK_SPARSE, compiled(build, spec, current()), fields)
    runtime.run(block.raw, dense.n * dense.k // _ELEMENTS_A_THREAD)
    return Packed(fmt, packed.shape, layout, out)
