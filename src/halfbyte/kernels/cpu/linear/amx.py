"""The micro-kernel of matrix units (AMX): up to 32 rows of activations times a panel of 32 outputs, with the arithmetic of `tile.py`.

`linear.LinearKernel.fields` compiles it in the place of `tile.build`. The tile registers of a tile of R rows, in one or two parts of at
most 16 rows:

    registers 0 … 3   sums [16 rows, 16 outputs] of part i and vector v in register i * vectors + v
    registers 4, 5    activations [16 rows, a unit of k] of each part
    registers 6, 7    weights [a unit of k, 16 outputs] of each vector

A row of a register has COLUMN_BYTES = 64 bytes, as a vector of 16 outputs has. Weights of 4 bits are unpacked to int8 or bfloat16 into a
small ring buffer (`_Unpacker`), `Tuning.units_ahead` units of k before they are multiplied; those of 8 bits are multiplied where they lie.
The sums of a block leave the registers through memory, from which they are scaled. They are stored between the first products of the next
block, since a store that waits for its product stalls other products. This memory is kept small: it shares the first-level cache with the
activations and weights.
"""

from __future__ import annotations

import functools

from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa_amx import COLUMN_BYTES, ROWS, AMXTiles, Register
from halfbyte.kernels.cpu.codegen.kernel import function
from halfbyte.kernels.cpu.linear.block_end import CORRECTION, SUM, Record
from halfbyte.kernels.cpu.linear.tile import RequantizingTile, Tile
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ROUND_BITS, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL

_FIRST_A, _FIRST_W = 4, 6  # tile registers of activations and of weights


@function(*["ptr"] * 5, *["i64"] * 4)
def build(spec: TileSpec, isa: AMXTiles, f: Function) -> None:
    """`tile.build` on matrix units."""
    tile = (_RequantizingMatrixTile if spec.out == "i8" else MatrixTile)(spec, isa, f)
    tile.configure()
    for part in f.loop(PANEL // (isa.lanes * tile.vectors)):
        tile.emit(part * (isa.lanes * tile.vectors))
    isa.release(f)


class MatrixTile(Tile):
    """A tile of `spec.schedule.rows` rows, at most 2 * ROWS, by V vectors of 16 outputs.

    Attributes:
        parts: The rows of each part.
        sum_type: LLVM's type of a vector of sums.
        sums: Memory of `sum_slots` blocks' sums, of `block_bytes` each, until these are scaled.
        ring: Ring buffer of units of unpacked weights, of `unpacked_bytes` each.
        is_corrected: Sums of unit weights differ from sums of codes (`ISA.correction`).
        initial_row: Memory of a row of what sums begin at; None: 0.
    """

    isa: AMXTiles

    def __init__(self, spec: TileSpec, isa: AMXTiles, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.prefetches_near = f.parameters[-2].equals(0)  # tile_index: the first row tile of a panel prefetches its weights
        self.sum_type = isa.ints if self.integer else isa.floats
        part_rows = self.rows if self.rows <= ROWS else (self.rows + 1) // 2
        self.parts = [range(start, min(start + part_rows, self.rows)) for start in range(0, self.rows, part_rows)]
        self.block_bytes = COLUMN_BYTES * self._accumulator_count
        # Sums of weight codes, where activations have an offset, are stored before the sums of the previous block are scaled.
        self.sum_slots = 1 + spec.activation.has_offset
        self.sums = f.alloca("i8", self.sum_slots * self.block_bytes, 64)
        self.unpacked_bytes = self.row_unit_bytes * isa.lanes * self.vectors
        self.ring = f.alloca("i8", _power_above(isa.tuning.units_ahead) * self.unpacked_bytes if self.int8.stored_bits == 4 else 1, 64)
        self.blocks, self.units, self.last_units = (LINEAR.load(self.args, field) for field in ("blocks", "units", "last_units"))
        self.is_corrected = isa.correction(spec.weight.bits, spec.weight.signed) != 0
        self.initial_row: Value | None = None
        if spec.activation.block_sum == "biased" and not self.is_corrected:
            self.initial_row = f.alloca(isa.ints, 1, 64)
            self.initial_row.store(f.value(isa.ints, ROUND_BITS), align=64)
        self.all_units = (self.blocks - 1) * self.units + self.last_units
        self.scratch = f.pinned(self.scratch, "r")  # an unknown address: else LLVM keeps all totals in registers, and spills them

    def configure(self) -> None:
        """Emit the configuration of the tile registers."""
        shapes = [Register(COLUMN_BYTES, ROWS)] * 8
        for i, rows in enumerate(self.parts):
            shapes[_FIRST_A + i] = Register(self.row_unit_bytes, len(rows))
            for v in range(self.vectors):
                shapes[i * self.vectors + v] = Register(COLUMN_BYTES, len(rows))
        for v in range(self.vectors):
            shapes[_FIRST_W + v] = Register(COLUMN_BYTES, self.row_unit_bytes // 4)
        self.isa.configure(self.f, shapes)

    def emit(self, row_offset: Value) -> None:
        """Emit the V vectors of outputs from row `row_offset` of the panel on. Block b - 1 is scaled after the products of block b."""
        isa, f = self.isa, self.f
        self._prefetch_outputs(row_offset)
        self._initialize_totals(row_offset)
        unpacker = _Unpacker(self, row_offset) if self.int8.stored_bits == 4 else None
        if unpacker is not None:
            for _ in f.loop(isa.tuning.units_ahead):
                unpacker.unpack_next()
        for b in f.loop(self.blocks + 1):
            with f.when(b < self.blocks):
                self._multiply(b, row_offset, unpacker)
            with f.when(b.equals(self.blocks)):
                for n in range(len(self.parts) * self.vectors):
                    self._store(n, b - 1)
            with f.when(b > 0):
                for rows in self.parts:
                    self._scale_part(rows, b - 1, row_offset)
        self._finish_outputs(row_offset, self._record(self.blocks - 1, row_offset).act_meta + 4 * FIELDS * self.rows)

    def _record(self, b: Value, row_offset: Value) -> Record:
        """Return the addresses of block b; `weights` is that of the whole panel's codes, whatever the row offset."""
        f, row_bytes = self.f, self.rows * self.row_unit_bytes
        n = f.value("i64", 1) if self.spec.activation.one_unit else (b + 1).equals(self.blocks).select(self.last_units, self.units)
        w = self.weights + b * (self.units * self.unit_bytes + self.meta_bytes)
        a = self.activations + b * (self.units * row_bytes + 4 * FIELDS * self.rows)
        return Record(w, a, w + n * self.unit_bytes, a + n * row_bytes, n, row_offset)

    def _slot(self, b: Value) -> Value:
        """Return the address of the sums of block b until they are scaled."""
        return self.sums + (b & self.sum_slots - 1) * self.block_bytes

    def _store(self, n: int, b: Value) -> None:
        """Store the sums in tile register n as those of block b."""
        i, v = divmod(n, self.vectors)
        self.isa.tile_store(self.f, n, self._slot(b) + (self.parts[i].start * self.vectors + v) * COLUMN_BYTES, COLUMN_BYTES * self.vectors)

    def _multiply(self, b: Value, row_offset: Value, unpacker: _Unpacker | None) -> None:
        """Multiply block b. The sums of the previous block are stored between its first products, each before its register is used.

        Args:
            b: Number of the block.
            row_offset: First output in the panel.
            unpacker: Of 4-bit weights; None: weights have 8 bits, and are unsigned bytes.
        """
        activation, four_bits, isa, f = self.spec.activation, self.spec.weight.bits == 4, self.isa, self.f
        assert activation.inner != "float", "matrix units multiply int8 and bfloat16"
        product = isa.tile_bf16_product if not self.integer else isa.tile_product if four_bits else isa.tile_unsigned_product
        weight_sums = [f.variable(f.value(isa.ints, 0)) for _ in range(self._accumulator_count - self.count)]
        block = self._record(b, row_offset)

        def multiply_unit(u: Value, begins: bool) -> None:
            if unpacker is not None:
                unpacker.unpack_next()
                weights, stride = unpacker.take_next(), COLUMN_BYTES * self.vectors
            else:
                weights, stride = block.weights + u * self.unit_bytes + row_offset * 4, 4 * PANEL
                self.prefetch(block.weights + u * self.unit_bytes)
            for i, rows in enumerate(self.parts):
                at = block.activations + u * (self.rows * self.row_unit_bytes) + rows.start * self.row_unit_bytes
                isa.tile_load(f, _FIRST_A + i, at, self.row_unit_bytes)
                for v in range(self.vectors):
                    n = i * self.vectors + v
                    if i == 0:
                        isa.tile_load(f, _FIRST_W + v, weights + v * COLUMN_BYTES, stride)
                    if begins:
                        self._store(n, b - 1)
                        if self.initial_row is None:
                            isa.tile_zero(f, n)
                        else:
                            isa.tile_load(f, n, self.initial_row, 0)
                    product(f, n, _FIRST_A + i, _FIRST_W + v)
            for v, total in enumerate(weight_sums):
                for quad in range(activation.unit // 4):
                    four = weights.load(isa.quads, quad * stride + v * COLUMN_BYTES, 64)
                    total.value = isa.byte_sums(f, total.value, four, signed=four_bits)

        multiply_unit(f.value("i64", 0), True)
        if not activation.one_unit:
            for u in f.loop(block.units, 1):
                multiply_unit(u, False)
        for v, total in enumerate(weight_sums):
            self._slot(b).store(total.value, (self.count + v) * COLUMN_BYTES, 64)

    def _scale_part(self, rows: range, b: Value, row_offset: Value) -> None:
        """Scale the sums of these rows in block b and add them to the totals, 16 x 16 outputs at a time."""
        block, slot = self._record(b, row_offset), self._slot(b)
        weight_sums = [slot.load(self.isa.ints, n * COLUMN_BYTES, 64) for n in range(self.count, self._accumulator_count)]
        for v in range(self.vectors):
            self.scaled_rows, self.scaled_vectors = rows, range(v, v + 1)
            self._add_scaled(functools.partial(self._sum, slot, block), block, weight_sums)

    def _sum(self, slot: Value, block: Record, n: int) -> Value:
        """Return the n-th vector of a block's sums, with the correction or zero points that `Tile._initial_sums` begins with."""
        f, (row, v) = self.f, divmod(n, self.vectors)
        total = slot.load(self.sum_type, n * COLUMN_BYTES, 64)
        if self.integer:
            return total + self._field(block.act_meta, CORRECTION, row, "i32") if self.is_corrected else total
        zero = self._zero(block.weight_meta, block.row_offset, v) if self.spec.weight.zero == "point" else None
        return total if zero is None else f.fma(f.value(zero.type, -0.0) - zero, self._field(block.act_meta, SUM, row, "float"), total)

    def prefetch(self, unit: Value) -> None:
        """Prefetch the weights that follow this unit at the tuning's distance."""
        f = self.f
        with f.when(self.prefetches_near):
            for line in range(0, self.unit_bytes + (self.meta_bytes if self.spec.activation.one_unit else 0), 64):
                f.prefetch(unit + (self.isa.tuning.prefetching.distance + line))


class _RequantizingMatrixTile(MatrixTile, RequantizingTile):
    def _new_total(self, n: int, block_sum: Value) -> Value:
        return self._total(n).bits(self.isa.ints) + block_sum


class _Unpacker:
    """Unpacks the 4-bit weights of a tile, unit by unit over all blocks of K, into the tile's ring.

    Attributes:
        source: Address of the next unit.
        left: Units of its block from it on.
        done, used: Units that were unpacked, and that were taken.
    """

    def __init__(self, tile: MatrixTile, row_offset: Value) -> None:
        f = tile.f
        self.tile, self.row_offset = tile, row_offset
        self.source, self.left = f.variable(tile.weights), f.variable(tile.units)
        self.done, self.used = f.variable(f.value("i64", 0)), f.variable(f.value("i64", 0))

    def unpack_next(self) -> None:
        """Unpack the next unit, if there is one."""
        tile, f, done = self.tile, self.tile.f, self.done.value
        with f.when(done < tile.all_units):
            unit, to = self.source.value, self._slot(done)
            tile.prefetch(unit)
            self._unpack(unit + self.row_offset * 4, to)
            left = self.left.value - 1
            ends = left.equals(0)
            self.source.value = unit + (ends.select(f.value("i64", tile.meta_bytes), 0) + tile.unit_bytes)
            self.left.value = ends.select(tile.units, left)
            self.done.value = done + 1

    def take_next(self) -> Value:
        """Return the address of the first unit that was not taken yet."""
        number = self.used.value
        self.used.value = number + 1
        return self._slot(number)

    def _slot(self, number: Value) -> Value:
        return self.tile.ring + (number & _power_above(self.tile.isa.tuning.units_ahead) - 1) * self.tile.unpacked_bytes

    def _unpack(self, stored: Value, to: Value) -> None:
        """Store the codes of four k (or two, as bfloat16) of an output side by side, as tile registers have them in their columns."""
        isa, f, weight, vectors = self.tile.isa, self.tile.f, self.tile.spec.weight, self.tile.vectors
        for row in range(self.tile.spec.activation.unit // 8):
            for v in range(vectors):
                bytes_ = stored.load(isa.quads, row * 4 * PANEL + v * COLUMN_BYTES, 64)
                if not self.tile.integer:
                    codes = isa.bf16_codes(f, bytes_, weight.signed, self.tile.int8.table)
                else:
                    codes = isa.table_weights(bytes_, self.tile.int8.table) if weight.codebook else isa.nibbles(bytes_, weight.signed)
                for i, code in enumerate(codes):
                    to.store(code, ((row * len(codes) + i) * vectors + v) * COLUMN_BYTES, 64)


def _power_above(n: int) -> int:
    """Return the least power of two above n."""
    return 1 << n.bit_length()
