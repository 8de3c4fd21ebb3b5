"""The micro-kernel of matrix units (AMX): up to 32 rows of activations times a panel of weights that is unpacked to int8 or bfloat16.

The arithmetic is that of `tile.py`; sums of a block leave the unit through memory, are scaled from there and added to the outputs.
While the sums of one block are scaled, the unit already multiplies the next one.

An unpacked panel has the panel's records, each with data of 8 or 16 bits whatever the format:

    int8    for each 4 k 128 bytes as in `layouts/cpu_tiles.py`, signed
    bf16    for each 2 k 128 bytes, codes of two k for each of the 32 outputs; the k in the order of `AVX512BF16.bf16_pairs`
    then, where activations have an offset, 32 int32 sums of them; then scales, zeros and padding as they were
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from halfbyte.kernels.cpu.arguments import LINEAR
from halfbyte.kernels.cpu.ir import Function, Module, Value, Variable
from halfbyte.kernels.cpu.isa_amx import COLUMN_BYTES, ROWS, AMXTiles, Register
from halfbyte.kernels.cpu.tile import FIELDS, PREFETCH_BYTES, Inner, RequantizingTile, Tile, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, Geometry

SUMS_BYTES = 4 * PANEL
_FIRST_A, _FIRST_W = 4, 6  # tile registers: 0 … 3 are totals


@dataclass(frozen=True, slots=True)
class UnpackSpec:
    """`inner`, `unit`, `shifted` as in TileSpec; `tail_bytes` as in Geometry. "bf16" is for 4 bits."""

    inner: Inner
    bits: int
    signed: bool
    unit: int
    shifted: bool
    tail_bytes: int

    @property
    def name(self) -> str:
        codes = f"{self.inner}_w{self.bits}{'s' if self.signed else 'u'}"
        return f"unpack_{codes}_u{self.unit}{'_sums' if self.shifted else ''}_t{self.tail_bytes}"


def unpacked_bytes(geo: Geometry, inner: Inner, shifted: bool) -> int:
    """Of a panel."""
    elements = PANEL * ((geo.blocks - 1) * geo.padded + geo.last_padded)
    return elements * (1 if inner == "int8" else 2) + geo.blocks * (geo.tail_bytes + shifted * SUMS_BYTES)


def build_unpack(spec: UnpackSpec, isa: AMXTiles) -> Module:
    """A module with one function: spec.name(arguments, packed panel, unpacked panel)."""
    module = Module(isa.attributes)
    f = module.function(spec.name, ["ptr"] * 3)
    args, packed, unpacked = f.parameters
    blocks, units, last = (LINEAR.load(args, field) for field in ("blocks", "units", "last_units"))
    source, to = f.variable(packed), f.variable(unpacked)
    vectors = PANEL // isa.lanes
    for b in f.loop(blocks):
        n = (b + 1).equals(blocks).select(last, units)
        sums = [f.variable(f.value(isa.ints, 0)) for _ in range(vectors if spec.shifted else 0)]
        for _ in f.loop(n):
            for _row in range(spec.unit * spec.bits // 32):
                f.prefetch(source.value + PREFETCH_BYTES)
                f.prefetch(source.value + (PREFETCH_BYTES + 64))
                for v in range(vectors):
                    stored = source.value.load(isa.quads, v * 64, 64)
                    codes = _unpacked(spec, isa, f, stored)
                    for i, code in enumerate(codes):
                        to.value.store(code, (i * vectors + v) * 64, 64)
                        if sums:
                            sums[v].value = isa.byte_sums(f, sums[v].value, code)
                source.value = source.value + 4 * PANEL
                to.value = to.value + 4 * PANEL * len(codes)
        for v, total in enumerate(sums):
            to.value.store(total.value, v * 64, 64)
        to.value = to.value + len(sums) * 64
        for at in range(0, spec.tail_bytes, 64):
            to.value.store(source.value.load(isa.quads, at, 64), at, 64)
        source.value, to.value = source.value + spec.tail_bytes, to.value + spec.tail_bytes
    return module


def _unpacked(spec: UnpackSpec, isa: AMXTiles, f: Function, stored: Value) -> list[Value]:
    """Four bytes of each output as they are stored -> what a tile register has in its rows."""
    if spec.inner == "bf16":
        return isa.bf16_codes(f, stored, spec.signed)
    return isa.nibbles(f, stored, spec.signed) if spec.bits == 4 else [stored ^ 128]


def build(spec: TileSpec, isa: AMXTiles) -> Module:
    """As `tile.build`, for unpacked panels. `prefetch`, above 1, is where packed weights begin that this tile asks for."""
    module = Module(isa.attributes)
    f = module.function(spec.name, ["ptr"] * 5 + ["i64", "i64"])
    tile = (_RequantizingMatrixTile if spec.out == "i8" else MatrixTile)(spec, isa, f)
    tile.configure()
    for part in f.loop(PANEL // (isa.lanes * spec.vectors)):
        tile.emit(part * (isa.lanes * spec.vectors))
    isa.release(f)
    return module


class MatrixTile(Tile):
    isa: AMXTiles

    def __init__(self, spec: TileSpec, isa: AMXTiles, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.unit_bytes = PANEL * spec.unit * spec.activation_bytes
        self.row_bytes = spec.unit * spec.activation_bytes
        self.sum_type = isa.ints if spec.inner == "int8" else isa.floats
        half = spec.rows if spec.rows <= ROWS else (spec.rows + 1) // 2
        self.parts = [(start, min(half, spec.rows - start)) for start in range(0, spec.rows, half)]  # (first row, rows) of each A
        self.slots = 1 << isa.blocks_ahead.bit_length()  # more than are multiplied before one is scaled
        self.sums = f.alloca(isa.ints, self.slots * self.count, 64)

        self.ahead = f.variable(f.emit("ptr", f"inttoptr i64 {self.prefetching.name} to ptr"))
        self.lines = (self.prefetching > 1).select(LINEAR.load(self.args, "ahead_lines"), 0)

    def configure(self) -> None:
        spec, shapes = self.spec, [Register(COLUMN_BYTES, ROWS)] * 8
        for i, (_, rows) in enumerate(self.parts):
            shapes[_FIRST_A + i] = Register(self.row_bytes, rows)
            for v in range(spec.vectors):
                shapes[i * spec.vectors + v] = Register(COLUMN_BYTES, rows)
        for v in range(spec.vectors):
            shapes[_FIRST_W + v] = Register(COLUMN_BYTES, self.row_bytes // 4)
        self.isa.configure(self.f, shapes)

    def emit(self, first: Value) -> None:
        spec, f = self.spec, self.f
        self._begin(first)
        blocks, units, last = (LINEAR.load(self.args, field) for field in ("blocks", "units", "last_units"))

        def record(w: Variable, a: Variable, b: Value) -> tuple[Value, Value, Value]:
            """Units of block b, and its fields and scales; w and a go on to the next one."""
            n = f.value("i64", 1) if spec.single else (b + 1).equals(blocks).select(last, units)
            fields, after = a.value + n * (spec.rows * self.row_bytes), w.value + n * self.unit_bytes
            w.value = after + (self.tail_bytes + (SUMS_BYTES if spec.shifted else 0))
            a.value = fields + 4 * FIELDS * spec.rows
            return n, fields, after

        # Two walks over the blocks: one multiplies, the other scales what the first has done some blocks ago.
        ahead, behind = ([f.variable(self.weights), f.variable(self.activations)] for _ in range(2))

        def multiply(b: Value) -> None:
            at = ahead[0].value, ahead[1].value
            n, _, _ = record(*ahead, b)
            self._multiply(*at, n, first, self._slot(b))

        for b in f.loop(f.umin(blocks, f.value("i64", self.isa.blocks_ahead))):
            multiply(b)
        for b in f.loop(blocks):
            with f.when(b + self.isa.blocks_ahead < blocks):
                multiply(b + self.isa.blocks_ahead)
            n, fields, after = record(*behind, b)
            tail = after + SUMS_BYTES if spec.shifted else after
            weight_sums = [(after + first * 4).load(self.isa.ints, v * 64, 64) for v in range(spec.vectors if spec.shifted else 0)]
            self._scale(functools.partial(self._sum, self._slot(b), fields, tail, first), fields, tail, first, weight_sums, n)
        self._end(first, behind[1].value)

    def _slot(self, b: Value) -> Value:
        """Where the sums of block b lie until they are scaled."""
        return self.sums + (b & self.slots - 1) * (64 * self.count)

    def _sum(self, sums: Value, fields: Value, tail: Value, first: Value, n: int) -> Value:
        spec, f, (row, v) = self.spec, self.f, divmod(n, self.spec.vectors)
        total = sums.load(self.sum_type, n * 64, 64)
        if spec.inner == "int8":
            corrected = self.isa.correction(spec.bits, spec.signed) != 0
            return total + self._field(fields, 1, row, "i32") if corrected else total
        zero = self._zero(tail, first, v) if spec.zero == "point" else None
        return total if zero is None else f.fma(f.value(zero.type, -0.0) - zero, self._field(fields, 2, row, "float"), total)

    def _multiply(self, w: Value, a: Value, units: Value, first: Value, to: Value) -> None:
        """The sums of one block."""
        spec, isa, f = self.spec, self.isa, self.f
        product = isa.tile_product if spec.inner == "int8" else isa.tile_bf16_product
        totals = [(i, v) for i in range(len(self.parts)) for v in range(spec.vectors)]
        for n in range(len(totals)):
            isa.tile_zero(f, n)
        for u in f.loop(units):
            for _ in f.loop(self.lines):
                f.prefetch(self.ahead.value, locality=2)
                self.ahead.value = self.ahead.value + 64
            if isa.near:
                for line in range(0, self.unit_bytes * spec.vectors // 2, 64):
                    f.prefetch(w + u * self.unit_bytes + first * 4 + (isa.near * self.unit_bytes + line * 2 // spec.vectors))
                for line in range(0, spec.rows * self.row_bytes, 64):
                    f.prefetch(a + u * (spec.rows * self.row_bytes) + (isa.near * spec.rows * self.row_bytes + line))
            rows = a + u * (spec.rows * self.row_bytes)
            for v in range(spec.vectors):
                isa.tile_load(f, _FIRST_W + v, w + u * self.unit_bytes + first * 4 + v * 64, 4 * PANEL)
            for i, (start, _) in enumerate(self.parts):
                isa.tile_load(f, _FIRST_A + i, rows + start * self.row_bytes, self.row_bytes)
                for v in range(spec.vectors):
                    product(f, i * spec.vectors + v, _FIRST_A + i, _FIRST_W + v)
        for n, (i, v) in enumerate(totals):
            isa.tile_store(f, n, to + (self.parts[i][0] * spec.vectors + v) * 64, 64 * spec.vectors)


class _RequantizingMatrixTile(MatrixTile, RequantizingTile):
    """Unit weights are the codes, so that there is nothing to correct."""

    def _total_sum(self, n: int, block_sum: Value) -> Value:
        return self._total(n).bits(self.isa.ints) + block_sum
