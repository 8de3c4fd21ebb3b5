"""The micro-kernel: a tile of R rows of activations times one panel of 32 rows of weights, over all of K.

    y[i, n] = sum over blocks b of  scale[n, b] * sum over k in b of (q[n, k] - point[n, b]) * x[i, k]  + offset[n, b] * sum(x[i, b])

`build` makes the function that `driver.py` calls for each tile of the outputs. `Tile.emit` writes its code, for V vectors of outputs from
row `row_offset` of the panel on:

    totals = 0                         Tile._initialize_totals     R x V vectors of float, in registers or memory
    for each block of K:               Tile._multiply_blocks       one record of the weights, one of the activations
        accumulators = initial sums    Tile._initial_sums          R x V vectors of int32 (or float)
        for each unit of K:            Tile._multiply_unit         unpack V vectors of codes in registers, multiply them with R rows
        totals += scaled sums          BlockEnd._add_scaled
    outputs = totals + bias …          Epilogue._write

Weights are read in the order of `layouts/cpu_tiles.py`; no unpacked copy exists. `activations.py` wrote the activations in the order that
the tile reads them:

    weights      | unit 0 | unit 1 | ... | scales, zeros, pair sums of 32 rows | next block ...
                                          ^ weight_meta
    activations  | unit 0 | unit 1 | ... | R scales | R corrections | R sums | R offsets | next block ...  | (end of the last)
                                          ^ act_meta, 4 bytes each                                          ^ act_end

A unit is 8 or 32 k of all rows.

Arithmetic. int8: products are summed in int32, exactly, for each block; the sum becomes float32 (exact below 2^24), has its
point's share subtracted, is multiplied by the activation's scale, and is added to the total with one fused multiply-add by
the weight's scale. `BlockSum` "folded": the sum is that of stored codes, q + 8, and one fused multiply-add scales it and subtracts 8 times
the scaled sum of the block's activations, which was rounded when they were laid out. float: products of the codes and float32
activations are summed by fused multiply-adds for each block, then scaled as above. bf16: as float, with pairs of bfloat16 products
summed by the CPU's dot-product instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from halfbyte.errors import unreachable
from halfbyte.formats.spec import codebook, zero_size
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA, Int8Unit
from halfbyte.kernels.cpu.codegen.kernel import function
from halfbyte.kernels.cpu.linear.block_end import CORRECTION, HIGHEST_CODE, SCALE, SUM, Record
from halfbyte.kernels.cpu.linear.epilogue import INITIAL_SUM, Epilogue, RequantizingEpilogue
from halfbyte.kernels.cpu.linear.packed_planes import PackedBitsUnit
from halfbyte.kernels.cpu.linear.prefetch import Prefetcher, SharingPrefetcher
from halfbyte.kernels.cpu.linear.sparse import SparseUnit
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, data_bytes, tail_bytes

_MEMORY_BOUND_ROWS = 8  # tiles of at most so many rows wait for memory, not for products


@function(*["ptr"] * 5, *["i64"] * 4)
def build(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, columns, ahead, tile_index, tile_count).

    arguments                      block of LINEAR
    weights, activations           packed bytes of the first panel, and of the tile's R rows
    out, bias                      the tile's first output, in rows `out_stride` bytes apart, and its bias
    columns                        outputs of the tile's panels that the weight has; the others pad it
    ahead, tile_index, tile_count  as for `prefetch.Prefetcher`
    """
    tile = (RequantizingTile if spec.out == "i8" else Tile)(spec, isa, f)
    width = isa.lanes * spec.schedule.vectors
    slices = PANEL // width
    assert PANEL % width == 0 == slices & (slices - 1), f"a panel of {PANEL} is not 2^n slices of {width} outputs"
    if spec.schedule.panels > 1 or (slices > 1 and not tile.in_registers):
        tile.emit_interleaved(slices)
    elif slices > 1:
        for n in f.loop(slices):
            tile.emit(n * width)
    else:
        tile.emit(f.value("i64", 0))


@dataclass(frozen=True, slots=True)
class PanelSlice:
    """V vectors of the outputs of one panel, among several slices that are computed in turn along K.

    Attributes:
        index: Number among these slices.
        panel_offset: Bytes from the first panel's weights to those of its panel.
        row_offset: Its first output in the panel.
        column: Its first output among those of all panels.
    """

    index: Value
    panel_offset: Value
    row_offset: Value
    column: Value


SliceLoop: TypeAlias = Callable[[], Iterator[PanelSlice]]  # emits a loop, or nothing around a single slice; its body is that of the `for`


class Tile(Epilogue):
    """Emits the code of a tile of `spec.schedule.rows` rows by `vectors` vectors of outputs; subclasses replace single steps of it.

    Attributes:
        args, weights, activations, out, bias, columns: Parameters of the function, as `build` has them.
        int8: What `ISA.int8_unit` multiplies at a time.
        paired: Products of sums are taken, and pair sums subtracted (`ISA.multiplies_sums`).
        unit_bytes, meta_bytes: Of a unit, and of a block's metadata, of 32 rows of weights.
        row_unit_bytes: Of a unit of one row of activations.
        prefetcher: None: the caller prefetches.
        count: Vectors of totals, R * V, row by row.
        in_registers: Totals are `totals`, in registers; else they are in `scratch`.
        narrow_accumulators: Products of a unit are summed in int16. Accumulators of a block then begin at 0, and its correction is added at
            its end.
        saved_accumulators: Memory for the accumulators of all slices, where these are interleaved unit by unit; else None.
    """

    def __init__(self, spec: TileSpec, isa: ISA, f: Function, parameters: Sequence[Value] | None = None) -> None:
        """Prepare to emit.

        Args:
            spec: What the tile is compiled for.
            isa: Emits the instructions.
            f: The function.
            parameters: Those of `build`, all or the first six, where they are not the parameters of `f`. Without the last three nothing is
                prefetched.
        """
        weight, activation, schedule = spec.weight, spec.activation, spec.schedule
        self.spec, self.isa, self.f = spec, isa, f
        self.args, self.weights, self.activations, self.out, self.bias, self.columns, *prefetch = parameters or f.parameters
        zero_bytes = zero_size(weight.zero, self.scale_bytes)
        self.paired = self.integer and weight.pair_sums and isa.multiplies_sums
        self.int8 = Int8Unit(schedule.rows, schedule.vectors, weight.bits, activation.unit, self.paired, codebook(weight.codebook))
        self.unit_bytes = data_bytes(weight.stored_bits, activation.unit, sparse=weight.sparse)
        self.meta_bytes = tail_bytes(self.scale_bytes, zero_bytes, pair_sums=weight.pair_sums)
        self.pair_sums_offset = PANEL * (self.scale_bytes + zero_bytes)  # in the metadata
        self.row_unit_bytes = activation.unit * isa.activation_bytes(activation.inner, weight.bits)
        self.panel_bytes = LINEAR.load(self.args, "panel_bytes")
        self.prefetcher = self._prefetcher(*prefetch) if prefetch else None
        self.count = schedule.rows * schedule.vectors
        self.in_registers = self.count <= isa.tuning.register_totals
        self.scratch = f.alloca(isa.floats, self.count, 4 * isa.lanes)
        self.totals: list[Variable] = []
        self.narrow_accumulators = self.integer and isa.narrow_accumulators(weight.bits)
        self.saved_accumulators: Value | None = None
        self.row_scales = [f.alloca("float", 1, 4) for _ in range(schedule.rows)] if spec.scaled_at_end else []
        self.scaled_rows, self.scaled_vectors = range(schedule.rows), range(schedule.vectors)

    def _prefetcher(self, ahead: Value, tile_index: Value, tile_count: Value) -> Prefetcher:
        isa, f, schedule, activation = self.isa, self.f, self.spec.schedule, self.spec.activation
        record_bytes = self.unit_bytes + self.meta_bytes if activation.one_unit and schedule.rows <= _MEMORY_BOUND_ROWS else 0
        numbers = ahead, tile_index, tile_count
        strided = Prefetcher(isa, f, self.panel_bytes, schedule.panels, schedule.shares_prefetch, record_bytes, schedule.locality, *numbers)
        if schedule.shares_prefetch and isa.tuning.prefetching.contiguous and self.unit_bytes == PANEL * activation.unit:
            return SharingPrefetcher(isa, f, self.panel_bytes, schedule.locality, self.weights, *numbers)
        return strided

    def emit(self, row_offset: Value) -> None:
        """Emit the V vectors of outputs from row `row_offset` of the panel on."""
        self._prefetch_outputs(row_offset)
        self._initialize_totals(row_offset)
        only = PanelSlice(self.f.value("i64", 0), self.f.value("i64", 0), row_offset, row_offset)
        act_end = self._multiply_blocks(lambda: iter([only]), LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        self._finish_outputs(row_offset, act_end)

    def emit_interleaved(self, slices: int) -> None:
        """Emit all outputs of each panel, cut into so many slices, in turn along K: weights are read once, as several streams."""
        f, isa, panels = self.f, self.isa, self.spec.schedule.panels
        width, totals_bytes = isa.lanes * self.vectors, 4 * isa.lanes * self.count
        most_slices = slices * panels
        totals = f.alloca(isa.floats, self.count * most_slices, 4 * isa.lanes)
        if panels > 1:
            self.saved_accumulators = f.alloca(isa.ints, self._accumulator_count * most_slices, 4 * isa.lanes)
        panel_count = (self.columns + (PANEL - 1)) // PANEL if panels > 1 else f.value("i64", 1)
        self.in_registers = False

        def each_slice() -> Iterator[PanelSlice]:
            """Emit a loop over the slices, in which `scratch` has the totals of one, and the prefetcher takes its share."""
            for n in f.loop(panel_count * slices):
                slice_index, panel = n & (slices - 1), n // slices
                self.scratch = totals + n * totals_bytes
                if self.prefetcher is not None and slices > 1:
                    self.prefetcher.slice = slice_index, slices
                yield PanelSlice(n, panel * LINEAR.load(self.args, "panel_bytes"), slice_index * width, n * width)

        for piece in each_slice():
            self._initialize_totals(piece.column)
        act_end = self._multiply_blocks(each_slice, LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        for piece in each_slice():
            self._finish_outputs(piece.column, act_end)

    def _initialize_totals(self, row_offset: Value) -> None:
        if self.in_registers:
            self.totals = [self.f.variable(self.f.value(self.isa.floats, 0.0)) for _ in range(self.count)]
        for i in range(self.count):
            self._set_total(i, self._initial_total(row_offset, i % self.vectors))

    def _initial_total(self, row_offset: Value, v: int) -> Value:
        return self.f.value(self.isa.floats, 0.0)

    def _finish_outputs(self, row_offset: Value, act_end: Value) -> None:
        """Write the outputs. `act_end`: address behind the tile's activations."""
        if self.spec.scaled_at_end:  # every block's metadata holds the row's scale; the last one is nearest
            act_meta = act_end + -(4 * FIELDS * self.rows)
            for i, slot in enumerate(self.row_scales):
                slot.store(act_meta.load("float", 4 * (SCALE * self.rows + i), 4), align=4)
        self._write(row_offset)

    # Blocks along K

    def _multiply_blocks(self, each_slice: SliceLoop, blocks: Value, last_units: Value) -> Value:
        """Add the products of so many blocks to the totals of all slices.

        Args:
            each_slice: The slices.
            blocks: Their number.
            last_units: Units of the last one; the others have `units` of LINEAR.

        Returns:
            The address behind the activations.
        """
        f, one_unit, row_bytes = self.f, self.spec.activation.one_unit, self.rows * self.row_unit_bytes
        full_units = LINEAR.load(self.args, "units")
        w, a = f.variable(self.weights), f.variable(self.activations)
        done = f.variable(f.value("i64", 0))  # bytes of the panel that were read
        for b in f.loop(blocks):
            units = f.value("i64", 1) if one_unit else (b + 1).equals(blocks).select(last_units, full_units)
            weights, activations = w.value, a.value
            weight_meta, act_meta = weights + units * self.unit_bytes, activations + units * row_bytes
            if self.prefetcher is not None:
                self.prefetcher.begin_block(b, blocks, done.value)
                if one_unit:
                    self.prefetcher.begin_unit()
                done.value = done.value + units * self.unit_bytes + self.meta_bytes
            if one_unit or self.saved_accumulators is None:
                for piece in each_slice():
                    at, meta_at = weights + piece.panel_offset, weight_meta + piece.panel_offset
                    self._multiply_block(Record(at, activations, meta_at, act_meta, units, piece.row_offset))
            else:
                first_panel = Record(weights, activations, weight_meta, act_meta, units, f.value("i64", 0))
                self._multiply_block_interleaved(each_slice, first_panel, self.saved_accumulators)
            w.value = weight_meta + self.meta_bytes
            a.value = act_meta + 4 * FIELDS * self.rows
        return a.value

    def _multiply_block(self, block: Record) -> None:
        """Add the products of a block to the totals of one slice."""
        activation, f = self.spec.activation, self.f
        initial = self._initial_accumulators(block)
        if activation.one_unit:
            sums = self._multiply_unit(block, initial)
            if self.int8.steps is not None:
                sums = [self.isa.settled(f, total) for total in sums]
        else:
            accumulators = [f.variable(v) for v in initial]
            for u in f.loop(block.units):
                if self.prefetcher is not None:
                    self.prefetcher.begin_unit()
                sums = self._multiply_unit(self._unit_record(block, u), [acc.value for acc in accumulators])
                for acc, total in zip(accumulators, sums, strict=True):
                    acc.value = total
            sums = [acc.value for acc in accumulators]
        self._finish_block(sums, block)

    def _unit_record(self, block: Record, u: Value) -> Record:
        """Return the record of the u-th unit of a block."""
        weights = block.weights + u * self.unit_bytes
        return block._replace(weights=weights, activations=block.activations + u * (self.rows * self.row_unit_bytes))

    def _multiply_block_interleaved(self, each_slice: SliceLoop, block: Record, saved: Value) -> None:
        """Like `_multiply_block` for each slice, interleaved unit by unit.

        Args:
            each_slice: The slices.
            block: Of the first panel.
            saved: Memory for the accumulators of all slices.
        """
        f, size, count = self.f, 4 * self.isa.lanes, self._accumulator_count
        kind = self.isa.ints if self.integer else self.isa.floats

        def in_slice(piece: PanelSlice, record: Record) -> Record:
            meta = record.weight_meta + piece.panel_offset
            return record._replace(weight_meta=meta, row_offset=piece.row_offset)

        def save(piece: PanelSlice, accumulators: list[Value]) -> None:
            for n, value in enumerate(accumulators):
                (saved + piece.index * (count * size)).store(value, n * size, size)

        def restore(piece: PanelSlice) -> list[Value]:
            return [(saved + piece.index * (count * size)).load(kind, n * size, size) for n in range(count)]

        for piece in each_slice():
            save(piece, self._initial_accumulators(in_slice(piece, block)))
        for u in f.loop(block.units):
            if self.prefetcher is not None:
                self.prefetcher.begin_unit()
            unit = self._unit_record(block, u)
            for piece in each_slice():
                record = in_slice(piece, unit._replace(weights=unit.weights + piece.panel_offset))
                save(piece, self._multiply_unit(record, restore(piece)))
        for piece in each_slice():
            self._finish_block(restore(piece), in_slice(piece, block))

    # One block: initial accumulators, products of its units, end

    @property
    def _accumulator_count(self) -> int:
        """Vectors of sums of a block: of products, and of the weight's codes where activations have an offset."""
        return self.count + self.vectors * self.spec.activation.has_offset

    def _initial_accumulators(self, block: Record) -> list[Value]:
        """Return the accumulators of a block before its first unit, in the order that `ISA.int8_unit` wants."""
        isa, zero = self.isa, self.f.value(self.isa.ints, 0)
        initial = [zero] * self.count if self.narrow_accumulators else self._initial_sums(block)
        if self.integer:
            initial = isa.transposed_accumulators(self.int8, initial)
        return [*initial, *[self.f.value(isa.ints, 0)] * (self._accumulator_count - self.count)]

    def _initial_sums(self, block: Record) -> list[Value]:
        """Return what a block's products are added to, R * V vectors: corrections, or float activations' shares of zero points."""
        f, at = self.f, (block.weight_meta, block.row_offset)
        if self.integer:  # corrections turn unit weights into codes, and products of sums into those of their parts: for free here
            corrections = [self._field(block.act_meta, CORRECTION, i, "i32") for i in range(self.rows) for _ in range(self.vectors)]
            pair_sums = [self._pair_sums(*at, v) for v in range(self.vectors)] if self.paired else []
            return [each - pair_sums[n % self.vectors] for n, each in enumerate(corrections)] if pair_sums else corrections
        if self.spec.weight.zero != "point":
            return [f.value(self.isa.floats, 0.0)] * self.count
        act_sums = [self._field(block.act_meta, SUM, i, "float") for i in range(self.rows)]
        points = [self._zero(*at, v) for v in range(self.vectors)]
        return [f.value(self.isa.floats, -0.0) - point * s for s in act_sums for point in points if point is not None]

    def _pair_sums(self, weight_meta: Value, row_offset: Value, v: int) -> Value:
        """Return the pair sums of one vector of outputs."""
        return (weight_meta + row_offset * 4).load(self.isa.ints, self.pair_sums_offset + v * self.isa.lanes * 4, 4)

    def _finish_block(self, accumulators: list[Value], block: Record) -> None:
        """Add a block's accumulators, after its last unit, to the totals."""
        sums, weight_sums = accumulators[: self.count], accumulators[self.count :]
        if self.prefetcher is not None and not self.spec.activation.one_unit:
            self.prefetcher.issue(block.weight_meta, self.meta_bytes)
        if self.integer:
            sums = self.isa.transposed_accumulators(self.int8, sums)
        if self.narrow_accumulators and self.spec.activation.block_sum != "folded":
            # Corrections are loaded only now, so that they take no registers meanwhile; for the same reason scales come late.
            sums = [total + s for total, s in zip(sums, self._initial_sums(block), strict=True)]
        self._add_scaled(sums.__getitem__, block, weight_sums)

    # One unit

    def _multiply_unit(self, unit: Record, accumulators: list[Value]) -> list[Value]:
        """Return the accumulators after one unit of K."""
        activation, f = self.spec.activation, self.f
        if self.prefetcher is not None:
            self.prefetcher.issue(unit.weights, self.unit_bytes + (self.meta_bytes if activation.one_unit else 0))
        rows = unit.weights + unit.row_offset * 4
        points = unit.weight_meta + unit.row_offset + PANEL * self.scale_bytes if self.spec.weight.zero == "point" else None
        converter = self._converter(unit, points)
        a = unit.activations
        if self.vectors == 1:  # products read activations themselves: an address with an index makes one instruction two on Intel's CPUs
            a = f.pinned(a, "r")
        match activation.inner:
            case "int8":
                return self._int8_products(rows, a, points, converter, accumulators)
            case "float":
                products = self._float_products
            case "bf16":
                products = self._bf16_products
            case _:
                raise unreachable(activation.inner, "the layout of activations for products of")
        row_k = 32 // self.int8.stored_bits  # k of a row of the layout's data, 4 bytes of each output
        for t in range(activation.unit // row_k):
            stored = self.isa.stored(rows + t * PANEL * 4, self.vectors) if converter is None else converter.stored(t)
            accumulators = products(stored, a + t * row_k * self.row_unit_bytes // activation.unit, accumulators)
            f.fence()
        return accumulators

    def _converter(self, unit: Record, points: Value | None) -> SparseUnit | PackedBitsUnit | None:
        """Return what converts the unit's stored bytes to those of the dense layout of 4 or 8 bits; None: they are in it."""
        weight = self.spec.weight
        sparse = SparseUnit.of(self.isa, weight.bits, unit.weights, unit.row_offset, points, self.vectors) if weight.sparse else None
        if weight.packed_bits:
            size = self.spec.activation.unit
            return PackedBitsUnit(self.isa, weight.packed_bits, weight.signed, size, unit.weights, unit.row_offset, self.vectors)
        return sparse

    def _int8_products(
        self, rows: Value, a: Value, points: Value | None, converter: SparseUnit | PackedBitsUnit | None, accumulators: list[Value]
    ) -> list[Value]:
        """Return the accumulators after a unit of int8 products.

        Args:
            rows: Address of the unit's codes at the slice's first output.
            a: Address of the unit's activations.
            points: Address of the outputs' zero points, if the weight has such.
            converter: As of `_converter`.
            accumulators: Of products, then of the weight's codes where activations have an offset.
        """
        activations = [a + i * self.row_unit_bytes for i in range(self.rows)]
        int8 = self.int8 if converter is None or self.int8.steps else replace(self.int8, steps=lambda _: converter.steps())
        if self.spec.weight.subtracts_points and points is not None:
            complements = [self._point_complement(points, v) for v in range(self.vectors)]
            int8 = replace(int8, steps=lambda at: self._steps_without_points(at, complements))
        sums, weight_sums = accumulators[: self.count], accumulators[self.count :]
        sums, weight_sums = self.isa.int8_unit(self.f, int8, rows, activations, sums, weight_sums)
        return [*sums, *weight_sums]

    def _point_complement(self, points: Value, v: int) -> Value:
        """Return HIGHEST_CODE - point in each byte of a vector of outputs: added to unsigned codes, which stay unsigned."""
        isa = self.isa
        quads = points.load(vector("i8", isa.lanes), v * isa.lanes, 1).shuffle([n // 4 for n in range(4 * isa.lanes)])
        return self.f.value(isa.quads, HIGHEST_CODE) - quads

    def _steps_without_points(self, rows: Value, complements: Sequence[Value]) -> Iterator[tuple[Value, ...]]:
        """Yield the codes of each step, plus the complements of their points: HIGHEST_CODE more than code - point."""
        for step in self.isa.unit_steps(rows, replace(self.int8, steps=None)):
            yield tuple(code + complement for code, complement in zip(step, complements, strict=True))

    def _float_products(self, stored: Iterable[Value], a: Value, sums: list[Value]) -> list[Value]:
        """Return the sums after one row of the layout's data, of V vectors as they are stored."""
        isa, f, unit = self.isa, self.f, self.spec.activation.unit
        by_vector = [isa.float_weights(f, s, self.int8, self.spec.weight.signed) for s in stored]
        out = list(sums)
        for codes in zip(*by_vector, strict=True):
            for i in range(self.rows):
                x = isa.spread(a, "float", 4 * (i * unit + codes[0][0]))
                for v, (_, code) in enumerate(codes):
                    out[i * self.vectors + v] = isa.pinned(f, f.fma(code, x, out[i * self.vectors + v]))
            f.fence()
        return out

    def _bf16_products(self, stored: Iterable[Value], a: Value, sums: list[Value]) -> list[Value]:
        """Return the sums after one row of the layout's data, by dot products of bfloat16 pairs."""
        isa, f, unit = self.isa, self.f, self.spec.activation.unit
        by_vector = [isa.bf16_codes(f, s, self.spec.weight.signed, self.int8.table) for s in stored]
        out = list(sums)
        for s, codes in enumerate(zip(*by_vector, strict=True)):
            for i in range(self.rows):
                pair = a.load("i32", 2 * i * unit + 4 * s, 4).splat(isa.lanes)
                for v, code in enumerate(codes):
                    out[i * self.vectors + v] = isa.bf16_multiply(f, out[i * self.vectors + v], code, pair)
        return out


class RequantizingTile(RequantizingEpilogue, Tile):
    """A tile of int8 in, int8 out: o = clamp(round(fma(float(initial + sum(q * x)), multiplier, offset))), ties to even.

    Totals are the int32 sums, held as vectors of float bits; the accumulators of a block begin at the totals so far.
    """

    def _initial_total(self, row_offset: Value, v: int) -> Value:
        return self._column(INITIAL_SUM, row_offset, v, self.isa.ints).bits(self.isa.floats)

    def _initial_sums(self, block: Record) -> list[Value]:
        corrections = super()._initial_sums(block)
        return [self._total(n).bits(self.isa.ints) + correction for n, correction in enumerate(corrections)]

    def _add_scaled(self, sum_of: Callable[[int], Value], record: Record, weight_sums: list[Value]) -> None:
        for n in (i * self.vectors + v for i in self.scaled_rows for v in self.scaled_vectors):
            self._set_total(n, self._new_total(n, sum_of(n)).bits(self.isa.floats))

    def _new_total(self, n: int, block_sum: Value) -> Value:
        """Return the n-th total after a block; here the block's sum includes the total before."""
        return block_sum
