"""The micro-kernel: a tile of R rows of activations times one panel of 32 rows of weights, over all of K.

    y[i, n] = sum over blocks b of  scale[n, b] * sum over k in b of (q[n, k] - point[n, b]) * x[i, k]  + offset[n, b] * sum(x[i, b])

Called by `driver.py` for each tile of the outputs. A panel's outputs are V vectors at a time, from row `row_offset` of the panel on:

    for each block of K:          Tile._blocks       one record of the weights, one of the activations
        accumulators = start      Tile._start        R x V vectors of int32 (or float)
        for each unit of k:       Tile._unit         unpack V vectors of codes in registers, multiply them with each of R rows
        totals += scaled sums     BlockEnd._scale    R x V vectors of float, in registers or memory
    outputs = totals + bias …     Epilogue._write

Weights are read in the order of `layouts/cpu_tiles.py`; no unpacked copy exists. `activations.py` wrote the activations in the order that
the tile reads them:

    weights      | unit 0 | unit 1 | ... | scales, zeros, pair sums of 32 rows | next block ...
                                          ^ weight_meta
    activations  | unit 0 | unit 1 | ... | R scales | R corrections | R sums | R offsets | next block ...  | (end of the last)
                                          ^ act_meta, 4 bytes each                                          ^ act_end

A unit is 8 or 32 k of all rows.

Arithmetic. int8: products are summed in int32, exactly, for each block; the sum becomes float32 (exact below 2^24), has its
point's share subtracted, is multiplied by the activation's scale, and is added to the output with one fused multiply-add by
the weight's scale. `folded`: the sum is that of stored codes, q + 8, and one fused multiply-add scales it and subtracts 8 times the
scaled sum of the block's activations, which was rounded when they were laid out. float: products of the codes and float32
activations are summed by fused multiply-adds for each block, then scaled as above. bf16: as float, with pairs of bfloat16 products
summed by the CPU's dot-product instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from halfbyte.errors import unreachable
from halfbyte.formats.spec import codebook, zero_size
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA, Int8Unit
from halfbyte.kernels.cpu.codegen.kernel import function
from halfbyte.kernels.cpu.linear.block_end import CORRECTION, HIGHEST_CODE, SCALE, SUM, Record
from halfbyte.kernels.cpu.linear.epilogue import Epilogue, RequantizingEpilogue
from halfbyte.kernels.cpu.linear.packed_planes import PackedBitsUnit
from halfbyte.kernels.cpu.linear.prefetch import Prefetcher, SharingPrefetcher
from halfbyte.kernels.cpu.linear.sparse import SparseUnit
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, data_bytes, tail_bytes

_FEW_ROWS = 8  # of a tile that waits for memory


@function(*["ptr"] * 5, *["i64"] * 4)
def build(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, columns, ahead, tile_index, tile_count).

    columns                        outputs of the panel, or of the panels that the tile takes, that the weight has
    ahead, tile_index, tile_count  as for `prefetch.Prefetcher`
    """
    tile = (RequantizingTile if spec.out == "i8" else Tile)(spec, isa, f)
    width = isa.lanes * spec.schedule.vectors
    slices = PANEL // width
    if spec.schedule.panels > 1 or (slices > 1 and not tile.in_registers):
        tile.emit_interleaved(slices)
    elif slices > 1:
        for n in f.loop(slices):
            tile.emit(n * width)
    else:
        tile.emit(f.value("i64", 0))


@dataclass(frozen=True, slots=True)
class PanelSlice:
    """V vectors of the outputs of one panel, among several that are computed in turn.

    index         among these
    panel_offset  bytes from the first panel's weights to those of its panel
    row_offset    its first output in the panel
    column        its first output among those of all panels
    """

    index: Value
    panel_offset: Value
    row_offset: Value
    column: Value


class Tile(Epilogue):
    def __init__(self, spec: TileSpec, isa: ISA, f: Function, parameters: Sequence[Value] | None = None) -> None:
        weight, activation, schedule = spec.weight, spec.activation, spec.schedule
        self.spec, self.isa, self.f = spec, isa, f
        self.args, self.weights, self.activations, self.out, self.bias, self.columns, *ahead = parameters or f.parameters
        # Bytes of a unit and of the metadata behind a block, of 32 rows of weights and of one row of activations
        zero_bytes = zero_size(weight.zero, self.scale_bytes)
        self.paired = self.integer and weight.pair_sums and isa.multiplies_sums
        self.int8 = Int8Unit(schedule.rows, schedule.vectors, weight.bits, activation.unit, self.paired, codebook(weight.codebook))
        self.unit_bytes = data_bytes(weight.stored_bits, activation.unit, sparse=weight.sparse)
        self.meta_bytes = tail_bytes(self.scale_bytes, zero_bytes, pair_sums=weight.pair_sums)
        self.pair_sums_at = PANEL * (self.scale_bytes + zero_bytes)  # in the metadata
        self.row_unit_bytes = activation.unit * isa.activation_bytes(activation.inner, weight.bits)
        self.panel_bytes = LINEAR.load(self.args, "panel_bytes")
        self.prefetcher = self._prefetcher(*ahead) if ahead else None
        # Totals, row by row, V vectors each
        self.count = schedule.rows * schedule.vectors
        self.in_registers = self.count <= isa.tuning.register_totals
        self.scratch = f.alloca(isa.floats, self.count, 4 * isa.lanes)
        self.totals: list[Variable] = []
        # int8 products of a unit are summed in int16, and a block's correction is added at its end, not what its accumulators begin at
        self.narrow_accumulators = self.integer and isa.narrow_accumulators(weight.bits)
        self.saved_accumulators: Value | None = None  # memory for those of all slices, where they are interleaved unit by unit
        self.row_scale = [f.alloca("float", 1, 4) for _ in range(schedule.rows)] if spec.scaled_at_end else []
        self.scaled_rows, self.scaled_vectors = range(schedule.rows), range(schedule.vectors)

    def _prefetcher(self, ahead: Value, tile_index: Value, tile_count: Value) -> Prefetcher:
        isa, f, schedule, activation = self.isa, self.f, self.spec.schedule, self.spec.activation
        record_bytes = self.unit_bytes + self.meta_bytes if activation.one_unit and schedule.rows <= _FEW_ROWS else 0
        numbers = ahead, tile_index, tile_count
        plain = Prefetcher(isa, f, self.panel_bytes, schedule.panels, schedule.shares_prefetch, record_bytes, schedule.locality, *numbers)
        if schedule.shares_prefetch and isa.tuning.prefetching.contiguous and self.unit_bytes == PANEL * activation.unit:
            return SharingPrefetcher(isa, f, self.panel_bytes, schedule.locality, self.weights, *numbers)
        return plain

    def emit(self, row_offset: Value) -> None:
        """Emit the V vectors of outputs from row `row_offset` of the panel on."""
        self._prefetch_outputs(row_offset)
        self._begin(row_offset)
        whole = PanelSlice(self.f.value("i64", 0), self.f.value("i64", 0), row_offset, row_offset)
        act_end = self._blocks(lambda: iter([whole]), LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        self._end(row_offset, act_end)

    def emit_interleaved(self, slices: int) -> None:
        """Emit all outputs of each panel, of so many slices, in turn along K: weights are read once, as several streams."""
        f, isa, panels = self.f, self.isa, self.spec.schedule.panels
        width, size = isa.lanes * self.vectors, 4 * isa.lanes * self.count
        most = slices * panels
        totals = f.alloca(isa.floats, self.count * most, 4 * isa.lanes)
        if panels > 1:
            self.saved_accumulators = f.alloca(isa.ints, self._accumulators * most, 4 * isa.lanes)
        panels_here = (self.columns + (PANEL - 1)) // PANEL if panels > 1 else f.value("i64", 1)
        self.in_registers = False

        def each() -> Iterator[PanelSlice]:
            """The slices, with the tile's state set to each."""
            for n in f.loop(panels_here * slices):
                place, panel = n & (slices - 1), n // slices
                self.scratch = totals + n * size
                if self.prefetcher is not None and slices > 1:
                    self.prefetcher.side = place, slices
                yield PanelSlice(n, panel * LINEAR.load(self.args, "panel_bytes"), place * width, n * width)

        for part in each():
            self._begin(part.column)
        act_end = self._blocks(each, LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        for part in each():
            self._end(part.column, act_end)

    def _begin(self, row_offset: Value) -> None:
        if self.in_registers:
            self.totals = [self.f.variable(self.f.value(self.isa.floats, 0.0)) for _ in range(self.count)]
        for i in range(self.count):
            self._set_total(i, self._initial(row_offset, i % self.vectors))

    def _initial(self, row_offset: Value, v: int) -> Value:
        return self.f.value(self.isa.floats, 0.0)

    def _end(self, row_offset: Value, act_end: Value) -> None:
        """`act_end`: the end of the activations."""
        if self.spec.scaled_at_end:  # every block's metadata holds the row's scale; the last one is nearest
            act_meta = act_end + -(4 * FIELDS * self.rows)
            for i, slot in enumerate(self.row_scale):
                slot.store(act_meta.load("float", 4 * (SCALE * self.rows + i), 4), align=4)
        self._write(row_offset)

    # Blocks along K

    def _blocks(self, slices: Callable[[], Iterator[PanelSlice]], blocks: Value, last: Value) -> Value:
        """Add the products of so many blocks to the totals of all slices, where the last block has `last` units; the end of the
        activations."""
        f, one_unit, row_bytes = self.f, self.spec.activation.one_unit, self.rows * self.row_unit_bytes
        units = LINEAR.load(self.args, "units")
        w, a = f.variable(self.weights), f.variable(self.activations)
        done = f.variable(f.value("i64", 0))
        for b in f.loop(blocks):
            n = f.value("i64", 1) if one_unit else (b + 1).equals(blocks).select(last, units)
            weights, activations = w.value, a.value
            weight_meta, act_meta = weights + n * self.unit_bytes, activations + n * row_bytes
            if self.prefetcher is not None:
                self.prefetcher.begin_block(b, blocks, done.value)
                if one_unit:
                    self.prefetcher.begin_unit()
                done.value = done.value + n * self.unit_bytes + self.meta_bytes
            if one_unit or self.saved_accumulators is None:
                for part in slices():
                    at, meta_at = weights + part.panel_offset, weight_meta + part.panel_offset
                    self._block(Record(at, activations, meta_at, act_meta, n, part.row_offset))
            else:
                whole = Record(weights, activations, weight_meta, act_meta, n, f.value("i64", 0))
                self._interleaved_block(slices, whole, self.saved_accumulators)
            w.value = weight_meta + self.meta_bytes
            a.value = act_meta + 4 * FIELDS * self.rows
        return a.value

    def _block(self, block: Record) -> None:
        activation, f = self.spec.activation, self.f
        start = self._block_start(block)
        if activation.one_unit:
            sums = self._unit(block, start)
            if self.int8.steps is not None:
                sums = [self.isa.settled(f, total) for total in sums]
        else:
            accumulators = [f.variable(v) for v in start]
            for u in f.loop(block.units):
                if self.prefetcher is not None:
                    self.prefetcher.begin_unit()
                sums = self._unit(self._unit_of(block, u), [k.value for k in accumulators])
                for k, v in zip(accumulators, sums, strict=True):
                    k.value = v
            sums = [k.value for k in accumulators]
        self._block_end(sums, block)

    def _unit_of(self, block: Record, u: Value) -> Record:
        """The record of the u-th unit of a block."""
        weights = block.weights + u * self.unit_bytes
        return block._replace(weights=weights, activations=block.activations + u * (self.rows * self.row_unit_bytes))

    def _interleaved_block(self, slices: Callable[[], Iterator[PanelSlice]], block: Record, saved: Value) -> None:
        """`_block` for each of the slices, interleaved unit by unit. `saved`: memory for their accumulators."""
        f, size, count = self.f, 4 * self.isa.lanes, self._accumulators
        kind = self.isa.ints if self.integer else self.isa.floats

        def of(part: PanelSlice, record: Record) -> Record:
            meta = record.weight_meta + part.panel_offset
            return record._replace(weight_meta=meta, row_offset=part.row_offset)

        def save(part: PanelSlice, values: list[Value]) -> None:
            for n, value in enumerate(values):
                (saved + part.index * (count * size)).store(value, n * size, size)

        def values(part: PanelSlice) -> list[Value]:
            return [(saved + part.index * (count * size)).load(kind, n * size, size) for n in range(count)]

        for part in slices():
            save(part, self._block_start(of(part, block)))
        for u in f.loop(block.units):
            if self.prefetcher is not None:
                self.prefetcher.begin_unit()
            unit = self._unit_of(block, u)
            for part in slices():
                record = of(part, unit._replace(weights=unit.weights + part.panel_offset))
                save(part, self._unit(record, values(part)))
        for part in slices():
            self._block_end(values(part), of(part, block))

    # One block: accumulators begin, units of k are added, and their sums end

    @property
    def _accumulators(self) -> int:
        """Vectors of sums of a block: of products, and of the weight's codes where activations have an offset."""
        return self.count + self.vectors * self.spec.activation.has_offset

    def _block_start(self, block: Record) -> list[Value]:
        """The initial accumulators of a block, in the order that `ISA.int8_unit` wants."""
        isa, zero = self.isa, self.f.value(self.isa.ints, 0)
        start = [zero] * self.count if self.narrow_accumulators else self._start(block)
        if self.integer:
            start = isa.transposed_accumulators(self.int8, start)
        return [*start, *[self.f.value(isa.ints, 0)] * (self._accumulators - self.count)]

    def _start(self, block: Record) -> list[Value]:
        """The sums that products are added to."""
        f, at = self.f, (block.weight_meta, block.row_offset)
        if self.integer:  # corrections turn unit weights into codes, and products of sums into those of their parts: for free here
            starts = [self._field(block.act_meta, CORRECTION, i, "i32") for i in range(self.rows) for _ in range(self.vectors)]
            pair_sums = [self._pair_sums(*at, v) for v in range(self.vectors)] if self.paired else []
            return [start - pair_sums[n % self.vectors] for n, start in enumerate(starts)] if pair_sums else starts
        if self.spec.weight.zero != "point":
            return [f.value(self.isa.floats, 0.0)] * self.count
        sums = [self._field(block.act_meta, SUM, i, "float") for i in range(self.rows)]
        points = [self._zero(*at, v) for v in range(self.vectors)]
        return [f.value(self.isa.floats, -0.0) - point * s for s in sums for point in points if point is not None]

    def _pair_sums(self, weight_meta: Value, row_offset: Value, v: int) -> Value:
        """The sums of pairs of one vector of outputs."""
        return (weight_meta + row_offset * 4).load(self.isa.ints, self.pair_sums_at + v * self.isa.lanes * 4, 4)

    def _block_end(self, sums: list[Value], block: Record) -> None:
        totals, weight_sums = sums[: self.count], sums[self.count :]
        if self.prefetcher is not None and not self.spec.activation.one_unit:
            self.prefetcher.issue(block.weight_meta, self.meta_bytes)
        if self.integer:
            totals = self.isa.transposed_accumulators(self.int8, totals)
        if self.narrow_accumulators and self.spec.activation.block_sum != "folded":
            # Corrections are loaded only now, so that they take no registers meanwhile; for the same reason scales come late.
            totals = [total + s for total, s in zip(totals, self._start(block), strict=True)]
        self._scale(totals.__getitem__, block, weight_sums)

    def _unit(self, unit: Record, sums: list[Value]) -> list[Value]:
        """One unit of k: new accumulators, and new sums of weights where activations have an offset."""
        activation, f = self.spec.activation, self.f
        if self.prefetcher is not None:
            self.prefetcher.issue(unit.weights, self.unit_bytes + (self.meta_bytes if activation.one_unit else 0))
        rows = unit.weights + unit.row_offset * 4
        points = unit.weight_meta + unit.row_offset + PANEL * self.scale_bytes if self.spec.weight.zero == "point" else None
        unpacked = self._unpacked(unit, points)
        a = unit.activations
        if self.vectors == 1:  # products read activations themselves: an address with an index makes one instruction two on Intel's CPUs
            a = f.pinned(a, "r")
        match activation.inner:
            case "int8":
                return self._int8_products(rows, a, points, unpacked, sums)
            case "float":
                step = self._float_row
            case "bf16":
                step = self._bf16_row
            case _:
                raise unreachable(activation.inner, "the layout of activations for products of")
        row_k = 32 // self.int8.stored_bits
        for t in range(activation.unit // row_k):
            stored = self.isa.stored(rows + t * PANEL * 4, self.vectors) if unpacked is None else unpacked.stored(t)
            sums = step(stored, a + t * row_k * self.row_unit_bytes // activation.unit, sums)
            f.fence()
        return sums

    def _unpacked(self, unit: Record, points: Value | None) -> SparseUnit | PackedBitsUnit | None:
        """A unit whose stored bytes are first converted to those of the dense layout, or of 8-bit codes; else None."""
        weight = self.spec.weight
        sparse = SparseUnit.of(self.isa, weight.bits, unit.weights, unit.row_offset, points, self.vectors) if weight.sparse else None
        if weight.packed_bits:
            size = self.spec.activation.unit
            return PackedBitsUnit(self.isa, weight.packed_bits, weight.signed, size, unit.weights, unit.row_offset, self.vectors)
        return sparse

    def _int8_products(
        self, rows: Value, a: Value, points: Value | None, unpacked: SparseUnit | PackedBitsUnit | None, sums: list[Value]
    ) -> list[Value]:
        activations = [a + i * self.row_unit_bytes for i in range(self.rows)]
        int8 = self.int8 if unpacked is None or self.int8.steps else replace(self.int8, steps=lambda _: unpacked.steps())
        if self.spec.weight.subtracts_points and points is not None:
            left = [self._left_of_point(points, v) for v in range(self.vectors)]
            int8 = replace(int8, steps=lambda at: self._codes_without_points(at, left))
        totals, weight_sums = self.isa.int8_unit(self.f, int8, rows, activations, sums[: self.count], sums[self.count :])
        return [*totals, *weight_sums]

    def _left_of_point(self, points: Value, v: int) -> Value:
        """HIGHEST_CODE - point in each byte of a vector of outputs: what is added to unsigned codes, which stay unsigned."""
        isa = self.isa
        quads = points.load(vector("i8", isa.lanes), v * isa.lanes, 1).shuffle([n // 4 for n in range(4 * isa.lanes)])
        return self.f.value(isa.quads, HIGHEST_CODE) - quads

    def _codes_without_points(self, rows: Value, left: Sequence[Value]) -> Iterator[tuple[Value, ...]]:
        for step in self.isa.unit_steps(rows, replace(self.int8, steps=None)):
            yield tuple(code + less for code, less in zip(step, left, strict=True))

    def _float_row(self, stored: Iterable[Value], a: Value, totals: list[Value]) -> list[Value]:
        """The totals after one row of the layout's data, V vectors as they are stored."""
        isa, f, unit = self.isa, self.f, self.spec.activation.unit
        by_vector = [isa.float_weights(f, s, self.int8, self.spec.weight.signed) for s in stored]
        out = list(totals)
        for codes in zip(*by_vector, strict=True):
            for i in range(self.rows):
                x = isa.spread(a, "float", 4 * (i * unit + codes[0][0]))
                for v, (_, code) in enumerate(codes):
                    out[i * self.vectors + v] = isa.pinned(f, f.fma(code, x, out[i * self.vectors + v]))
            f.fence()
        return out

    def _bf16_row(self, stored: Iterable[Value], a: Value, totals: list[Value]) -> list[Value]:
        isa, f, unit = self.isa, self.f, self.spec.activation.unit
        by_vector = [isa.bf16_codes(f, s, self.spec.weight.signed, self.int8.table) for s in stored]
        out = list(totals)
        for s, codes in enumerate(zip(*by_vector, strict=True)):
            for i in range(self.rows):
                pair = a.load("i32", 2 * i * unit + 4 * s, 4).splat(isa.lanes)
                for v, code in enumerate(codes):
                    out[i * self.vectors + v] = isa.bf16_multiply(f, out[i * self.vectors + v], code, pair)
        return out


class RequantizingTile(RequantizingEpilogue, Tile):
    """int8 in, int8 out: o = clamp(round(fma(float(start + sum(q * x)), multiplier, offset))), ties to even."""

    def _initial(self, row_offset: Value, v: int) -> Value:
        return self._column(2, row_offset, v, self.isa.ints).bits(self.isa.floats)  # int32 sums in the place of float totals

    def _start(self, block: Record) -> list[Value]:
        corrections = super()._start(block)
        return [self._total(n).bits(self.isa.ints) + c for n, c in enumerate(corrections)]

    def _scale(self, total: Callable[[int], Value], record: Record, weight_sums: list[Value]) -> None:
        for n in (i * self.vectors + v for i in self.scaled_rows for v in self.scaled_vectors):
            self._set_total(n, self._total_sum(n, total(n)).bits(self.isa.floats))

    def _total_sum(self, n: int, block_sum: Value) -> Value:
        return block_sum  # the block's accumulators began at the sum so far
