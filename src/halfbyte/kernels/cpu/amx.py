"""The micro-kernel of matrix units (AMX): up to 32 rows of activations times a panel, with the arithmetic of `tile.py`.

Three walks over a panel go side by side, so that none waits for another: 4-bit weights are unpacked to int8 or bfloat16 into a
small ring of memory, some units of k before they are multiplied (8-bit weights are multiplied where they lie); and the sums of a
block, which leave the unit through memory, are scaled and added to the outputs some blocks after they were multiplied.
"""

from __future__ import annotations

import functools

from halfbyte.kernels.cpu.arguments import LINEAR
from halfbyte.kernels.cpu.ir import Function, Value, Variable
from halfbyte.kernels.cpu.isa_amx import COLUMN_BYTES, ROWS, AMXTiles, Register
from halfbyte.kernels.cpu.kernel import function
from halfbyte.kernels.cpu.tile import FIELDS, ROUND_BITS, RequantizingTile, Tile, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL

_FIRST_A, _FIRST_W = 4, 6  # tile registers: 0 … 3 are totals


@function(*["ptr"] * 5, *["i64"] * 4)
def build(spec: TileSpec, isa: AMXTiles, f: Function) -> None:
    """As `tile.build`."""
    tile = (_RequantizingMatrixTile if spec.out == "i8" else MatrixTile)(spec, isa, f)
    tile.configure()
    for part in f.loop(PANEL // (isa.lanes * spec.vectors)):
        tile.emit(part * (isa.lanes * spec.vectors))
    isa.release(f)


class MatrixTile(Tile):
    isa: AMXTiles

    def __init__(self, spec: TileSpec, isa: AMXTiles, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.asks = f.parameters[-2].equals(0)  # the first row tile does
        self.sum_type = isa.ints if spec.inner == "int8" else isa.floats
        half = spec.rows if spec.rows <= ROWS else (spec.rows + 1) // 2
        self.parts = [(start, min(half, spec.rows - start)) for start in range(0, spec.rows, half)]  # (first row, rows) of each A
        # Sums of blocks, and of their weights where activations have an offset; as many as are multiplied before one is scaled, and one.
        self.block_bytes = 64 * (self.count + spec.vectors * spec.shifted)
        self.ahead = isa.blocks_ahead if spec.inner == "int8" else isa.float_blocks_ahead
        self.sums = f.alloca("i8", _power_of_two(self.ahead) * self.block_bytes, 64)
        self.unpacked_bytes = self.row_unit_bytes * isa.lanes * spec.vectors
        self.ring = f.alloca("i8", _power_of_two(isa.units_ahead) * self.unpacked_bytes if self.int8.stored_bits == 4 else 1, 64)
        blocks, units, last = (LINEAR.load(self.args, field) for field in ("blocks", "units", "last_units"))
        self.blocks, self.units, self.last_units = blocks, units, last
        self.corrected = isa.correction(spec.bits, spec.signed) != 0
        self.start: Value | None = None  # a row of what sums begin at
        if spec.biased and not self.corrected:
            self.start = f.alloca(isa.ints, 1, 64)
            self.start.store(f.value(isa.ints, ROUND_BITS), align=64)
        self.all_units = (blocks - 1) * units + last

    def configure(self) -> None:
        spec, shapes = self.spec, [Register(COLUMN_BYTES, ROWS)] * 8
        for i, (_, rows) in enumerate(self.parts):
            shapes[_FIRST_A + i] = Register(self.row_unit_bytes, rows)
            for v in range(spec.vectors):
                shapes[i * spec.vectors + v] = Register(COLUMN_BYTES, rows)
        for v in range(spec.vectors):
            shapes[_FIRST_W + v] = Register(COLUMN_BYTES, self.row_unit_bytes // 4)
        self.isa.configure(self.f, shapes)

    def emit(self, first: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        self._begin(first)
        unpacking = _Unpacking(self, first) if self.int8.stored_bits == 4 else None
        ahead = f.variable(self.weights), f.variable(self.activations)
        behind = f.variable(self.weights), f.variable(self.activations)

        def record(walk: tuple[Variable, Variable], b: Value) -> tuple[Value, Value, Value]:
            """Units of block b, where its scales and its fields lie; the walk goes on to the next one."""
            w, a = walk
            n = f.value("i64", 1) if spec.single else (b + 1).equals(self.blocks).select(self.last_units, self.units)
            tail, fields = w.value + n * self.unit_bytes, a.value + n * (spec.rows * self.row_unit_bytes)
            w.value, a.value = tail + self.tail_bytes, fields + 4 * FIELDS * spec.rows
            return n, tail, fields

        def multiply(b: Value) -> None:
            w, a = (at.value for at in ahead)
            n, _, _ = record(ahead, b)
            self._multiply(w, a, n, first, self._slot(b), unpacking)

        if unpacking is not None:
            for _ in f.loop(isa.units_ahead):
                unpacking.step()
        for b in f.loop(f.umin(self.blocks, f.value("i64", self.ahead))):
            multiply(b)
        for b in f.loop(self.blocks):
            with f.when(b + self.ahead < self.blocks):
                multiply(b + self.ahead)
            n, tail, fields = record(behind, b)
            slot = self._slot(b)
            weight_sums = [slot.load(isa.ints, (self.count + v) * 64, 64) for v in range(spec.vectors * spec.shifted)]
            self._scale(functools.partial(self._sum, slot, fields, tail, first), fields, tail, first, weight_sums, n)
        self._end(first, behind[1].value)

    def _slot(self, b: Value) -> Value:
        """Where the sums of block b lie until they are scaled."""
        return self.sums + (b & _power_of_two(self.ahead) - 1) * self.block_bytes

    def _sum(self, slot: Value, fields: Value, tail: Value, first: Value, n: int) -> Value:
        spec, f, (row, v) = self.spec, self.f, divmod(n, self.spec.vectors)
        total = slot.load(self.sum_type, n * 64, 64)
        if spec.inner == "int8":
            return total + self._field(fields, 1, row, "i32") if self.corrected else total
        zero = self._zero(tail, first, v) if spec.zero == "point" else None
        return total if zero is None else f.fma(f.value(zero.type, -0.0) - zero, self._field(fields, 2, row, "float"), total)

    def _multiply(self, w: Value, a: Value, units: Value, first: Value, to: Value, unpacking: _Unpacking | None) -> None:
        """The sums of one block."""
        spec, isa, f = self.spec, self.isa, self.f
        product = isa.tile_bf16_product if spec.inner == "bf16" else isa.tile_product if spec.bits == 4 else isa.tile_unsigned_product
        weight_sums = [f.variable(f.value(isa.ints, 0)) for _ in range(spec.vectors * spec.shifted)]
        totals = [(i, v) for i in range(len(self.parts)) for v in range(spec.vectors)]
        for n in range(len(totals)):
            if self.start is None:
                isa.tile_zero(f, n)
            else:
                isa.tile_load(f, n, self.start, 0)
        for u in f.loop(units):
            if unpacking is not None:
                unpacking.step()
                weights, stride = unpacking.taken(), 64 * spec.vectors
            else:
                weights, stride = w + u * self.unit_bytes + first * 4, 4 * PANEL
                self.ask_for(w + u * self.unit_bytes)
            for v in range(spec.vectors):
                isa.tile_load(f, _FIRST_W + v, weights + v * 64, stride)
            for i, (start, _) in enumerate(self.parts):
                isa.tile_load(f, _FIRST_A + i, a + u * (spec.rows * self.row_unit_bytes) + start * self.row_unit_bytes, self.row_unit_bytes)
                for v in range(spec.vectors):
                    product(f, i * spec.vectors + v, _FIRST_A + i, _FIRST_W + v)
            for v, total in enumerate(weight_sums):
                for quad in range(spec.unit // 4):
                    four = weights.load(isa.quads, quad * stride + v * 64, 64)
                    total.value = isa.byte_sums(f, total.value, four, signed=spec.bits == 4)
        for n, (i, v) in enumerate(totals):
            isa.tile_store(f, n, to + (self.parts[i][0] * spec.vectors + v) * 64, 64 * spec.vectors)
        for v, total in enumerate(weight_sums):
            to.store(total.value, (self.count + v) * 64, 64)

    def ask_for(self, unit: Value) -> None:
        """Ask for the memory that the stream of weights comes to some time after this unit."""
        f = self.f
        with f.when(self.asks):
            for line in range(0, self.unit_bytes + (self.tail_bytes if self.spec.single else 0), 64):
                f.prefetch(unit + (self.isa.ahead + line))


class _RequantizingMatrixTile(MatrixTile, RequantizingTile):
    def _total_sum(self, n: int, block_sum: Value) -> Value:
        return self._total(n).bits(self.isa.ints) + block_sum


class _Unpacking:
    """The walk that unpacks 4-bit weights into the tile's ring."""

    def __init__(self, tile: MatrixTile, first: Value) -> None:
        f = tile.f
        self.tile, self.first = tile, first
        self.source, self.left = f.variable(tile.weights), f.variable(tile.units)
        self.done, self.used = f.variable(f.value("i64", 0)), f.variable(f.value("i64", 0))

    def step(self) -> None:
        """The next unit, if there is one."""
        tile, f, done = self.tile, self.tile.f, self.done.value
        with f.when(done < tile.all_units):
            unit, to = self.source.value, self._slot(done)
            tile.ask_for(unit)
            self._unpack(unit + self.first * 4, to)
            left = self.left.value - 1
            ends = left.equals(0)
            self.source.value = unit + (ends.select(f.value("i64", tile.tail_bytes), 0) + tile.unit_bytes)
            self.left.value = ends.select(tile.units, left)
            self.done.value = done + 1

    def taken(self) -> Value:
        """Where the unit lies that comes after the one that was taken last."""
        number = self.used.value
        self.used.value = number + 1
        return self._slot(number)

    def _slot(self, number: Value) -> Value:
        return self.tile.ring + (number & _power_of_two(self.tile.isa.units_ahead) - 1) * self.tile.unpacked_bytes

    def _unpack(self, stored: Value, to: Value) -> None:
        """The codes of four k (or two, as bfloat16) of an output side by side, as tile registers have them in their columns."""
        spec, isa, f = self.tile.spec, self.tile.isa, self.tile.f
        for row in range(spec.unit // 8):
            for v in range(spec.vectors):
                bytes_ = stored.load(isa.quads, row * 4 * PANEL + v * 64, 64)
                if spec.inner == "bf16":
                    codes = isa.bf16_codes(f, bytes_, spec.signed, self.tile.int8.table)
                else:
                    codes = isa.table_weights(bytes_, self.tile.int8.table) if spec.table else isa.nibbles(bytes_, spec.signed)
                for i, code in enumerate(codes):
                    to.store(code, ((row * len(codes) + i) * spec.vectors + v) * 64, 64)


def _power_of_two(n: int) -> int:
    """The least one above n."""
    return 1 << n.bit_length()
