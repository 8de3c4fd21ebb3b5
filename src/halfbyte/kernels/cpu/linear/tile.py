"""The micro-kernel: a tile of R rows of activations times one panel of 32 rows of weights, over all of K.

    y[i, n] = sum over blocks b of  scale[n, b] * sum over k in b of (q[n, k] - point[n, b]) * x[i, k]  + offset[n, b] * sum(x[i, b])

Weights are read in the order of `layouts/cpu_tiles.py` and unpacked in registers for each tile: no unpacked copy exists.
Activations were written by `activations.py` in the order that the tile reads them. A block along K is a record of each:

    weights      | unit 0 | unit 1 | ... | scales, zeros, pair sums of 32 rows | next block ...
                                          ^ weight_meta
    activations  | unit 0 | unit 1 | ... | R scales | R corrections | R sums | R offsets | next block ...  | (end of the last)
                                          ^ act_meta, 4 bytes each                                          ^ act_end
    outputs      row_offset: the first of the panel's 32 rows that this tile computes

A unit is 8 or 32 k of all rows. `narrow_accumulators`: int8 products are summed in int16, and a block's correction is added to
the int32 sums at its end instead of being what they begin at.

Arithmetic. int8: products are summed in int32, exactly, for each block; the sum becomes float32 (exact below 2^24), has its
point's share taken off, is multiplied by the activation's scale, and is added to the output with one fused multiply-add by
the weight's scale. `folded`: the sum is that of stored codes, q + 8, and one fused multiply-add scales it and takes 8 times the
scaled sum of the block's activations off, which was rounded when they were laid out. float: products of the codes and float32
activations are summed by fused multiply-adds for each block, then scaled as above. bf16: as float, with pairs of bfloat16 products
summed by the CPU's dot-product instruction.

All of K is done in one pass, so an output is written once, with its bias and what there is of a residual added, and clamped, or put
through GELU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from halfbyte.formats.spec import codebook, zero_size
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elements import element_of
from halfbyte.kernels.cpu.codegen.gelu import gelu
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA, Int8Unit
from halfbyte.kernels.cpu.codegen.kernel import function
from halfbyte.kernels.cpu.linear.biased import HIGHEST_CODE
from halfbyte.kernels.cpu.linear.block_end import BlockEnd
from halfbyte.kernels.cpu.linear.packed_planes import PackedBitsUnit
from halfbyte.kernels.cpu.linear.prefetch import Prefetcher, SharingPrefetcher
from halfbyte.kernels.cpu.linear.sparse import SparseUnit
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ROUND, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, data_bytes, tail_bytes

_FEW_ROWS = 8  # of a tile that waits for memory


@function(*["ptr"] * 5, *["i64"] * 4)
def build(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, columns, ahead, tile_index, tile_count).

    ahead, tile_index, tile_count: as for `prefetch.Prefetcher`
    """
    tile = (RequantizingTile if spec.out == "i8" else Tile)(spec, isa, f)
    sides = PANEL // (isa.lanes * spec.vectors)
    if spec.panels > 1 or (sides > 1 and not tile.in_registers):
        tile.emit_parts(sides)
    elif sides > 1:
        for side in f.loop(sides):
            tile.emit(side * (isa.lanes * spec.vectors))
    else:
        tile.emit(f.value("i64", 0))


@dataclass(frozen=True, slots=True)
class Part:
    """What a tile computes at a time."""

    number: Value  # how many parts are before it
    weights: Value  # bytes to its panel
    row_offset: Value  # its first row of the panel
    column: Value  # its first output


class Tile(BlockEnd):
    def __init__(self, spec: TileSpec, isa: ISA, f: Function, parameters: Sequence[Value] | None = None) -> None:
        self.spec, self.isa, self.f = spec, isa, f
        self.args, self.weights, self.activations, self.out, self.bias, self.columns, *ahead = parameters or f.parameters
        zero_bytes = zero_size(spec.zero, self.scale_bytes)
        self.paired = spec.inner == "int8" and spec.pair_sums and isa.multiplies_sums
        self.int8 = Int8Unit(spec.rows, spec.vectors, spec.bits, spec.unit, self.paired, codebook(spec.table))
        self.unit_bytes = data_bytes(spec.packed_bits or self.int8.stored_bits, spec.unit, sparse=spec.sparse)
        self.tail_bytes = tail_bytes(self.scale_bytes, zero_bytes, pair_sums=spec.pair_sums)
        self.pair_sums_at = PANEL * (self.scale_bytes + zero_bytes)  # in the tail
        record = self.unit_bytes + self.tail_bytes if spec.single and spec.rows <= _FEW_ROWS else 0
        size = LINEAR.load(self.args, "panel_bytes")
        self.prefetcher = Prefetcher(isa, f, size, spec.panels, spec.shares_prefetch, record, spec.near, *ahead) if ahead else None
        if self.prefetcher and spec.shares_prefetch and isa.tuning.prefetching.contiguous and self.unit_bytes == PANEL * spec.unit:
            self.prefetcher = SharingPrefetcher(isa, f, size, spec.near, self.weights, *ahead)
        self.count = spec.rows * spec.vectors
        self.row_unit_bytes = spec.unit * isa.activation_bytes(spec.inner, spec.bits)
        self.in_registers = self.count <= isa.tuning.register_totals
        self.narrow_accumulators = spec.inner == "int8" and isa.narrow_accumulators(spec.bits)
        self.accumulators: Value | None = None
        self.scratch = f.alloca(isa.floats, self.count, 4 * isa.lanes)
        self.totals: list[Variable] = []
        self.out_element = element_of(spec.out).stored
        self.row_scale = [f.alloca("float", 1, 4) for _ in range(spec.rows)] if spec.by_row else []
        self.scaled_rows, self.scaled_vectors = range(spec.rows), range(spec.vectors)  # of the sums that `_scale` takes

    @property
    def out_bytes(self) -> int:
        return element_of(self.spec.out).size

    def emit(self, row_offset: Value) -> None:
        """Emit the outputs from row `row_offset` of the panel on."""
        self._ask_for_outputs(row_offset)
        self._begin(row_offset)
        part = Part(self.f.value("i64", 0), self.f.value("i64", 0), row_offset, row_offset)
        act_end = self._blocks(lambda: iter([part]), LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        self._end(row_offset, act_end)

    def emit_parts(self, sides: int) -> None:
        """All outputs of each panel, which takes so many tiles, in turn: so that weights are read once, and all the time."""
        f, isa = self.f, self.isa
        width, size = isa.lanes * self.spec.vectors, 4 * isa.lanes * self.count
        parts = sides * self.spec.panels
        totals = f.alloca(isa.floats, self.count * parts, 4 * isa.lanes)
        if self.spec.panels > 1:
            self.accumulators = f.alloca(isa.ints, (self.count + self.spec.vectors * self.spec.shifted) * parts, 4 * isa.lanes)
        panels = (self.columns + (PANEL - 1)) // PANEL if self.spec.panels > 1 else f.value("i64", 1)
        self.in_registers = False

        def each() -> Iterator[Part]:
            for n in f.loop(panels * sides):
                side, panel = n & (sides - 1), n // sides
                self.scratch = totals + n * size
                if self.prefetcher is not None and sides > 1:
                    self.prefetcher.side = side, sides
                yield Part(n, panel * LINEAR.load(self.args, "panel_bytes"), side * width, n * width)

        for part in each():
            self._begin(part.column)
        act_end = self._blocks(each, LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        for part in each():
            self._end(part.column, act_end)

    def _blocks(self, parts: Callable[[], Iterator[Part]], blocks: Value, last: Value) -> Value:
        """Adds the products of so many blocks to the totals, where the last has `last` units; the end of their activations.

        `parts()` are what each block is multiplied with.
        """
        spec, f = self.spec, self.f
        units = LINEAR.load(self.args, "units")
        w, a = f.variable(self.weights), f.variable(self.activations)
        done = f.variable(f.value("i64", 0))
        for b in f.loop(blocks):
            n = f.value("i64", 1) if spec.single else (b + 1).equals(blocks).select(last, units)
            weights, activations = w.value, a.value
            weight_meta, act_meta = weights + n * self.unit_bytes, activations + n * (spec.rows * self.row_unit_bytes)
            if self.prefetcher is not None:
                self.prefetcher.begin_block(b, blocks, done.value)
                if spec.single:
                    self.prefetcher.begin_unit()
                done.value = done.value + n * self.unit_bytes + self.tail_bytes
            if spec.single or self.accumulators is None:
                for part in parts():
                    self._block(weights + part.weights, activations, weight_meta + part.weights, act_meta, n, part.row_offset)
            else:
                self._block_by_units(parts, weights, activations, weight_meta, act_meta, n, self.accumulators)
            w.value = weight_meta + self.tail_bytes
            a.value = act_meta + 4 * FIELDS * spec.rows
        return a.value

    def _block_by_units(
        self, parts: Callable[[], Iterator[Part]], w: Value, a: Value, weight_meta: Value, act_meta: Value, units: Value, sums: Value
    ) -> None:
        """`_block` for each of the parts, interleaved unit by unit. `sums`: memory for their accumulators."""
        spec, f, size = self.spec, self.f, 4 * self.isa.lanes
        count = self.count + spec.vectors * spec.shifted
        kind = self.isa.ints if spec.inner == "int8" else self.isa.floats

        def saved(part: Part) -> Value:
            return sums + part.number * (count * size)

        def save(part: Part, values: list[Value]) -> None:
            for n, value in enumerate(values):
                saved(part).store(value, n * size, size)

        def values(part: Part) -> list[Value]:
            return [saved(part).load(kind, n * size, size) for n in range(count)]

        for part in parts():
            save(part, self._block_start(weight_meta + part.weights, act_meta, part.row_offset))
        for u in f.loop(units):
            if self.prefetcher is not None:
                self.prefetcher.begin_unit()
            at, activations = w + u * self.unit_bytes, a + u * (spec.rows * self.row_unit_bytes)
            for part in parts():
                save(part, self._unit(at + part.weights, activations, weight_meta + part.weights, part.row_offset, values(part)))
        for part in parts():
            self._block_end(values(part), weight_meta + part.weights, act_meta, units, part.row_offset)

    def _begin(self, row_offset: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        if self.in_registers:
            self.totals = [f.variable(f.value(isa.floats, 0.0)) for _ in range(self.count)]
        for i in range(self.count):
            self._set_total(i, self._initial(row_offset, i % spec.vectors))

    def _end(self, row_offset: Value, act_end: Value) -> None:
        """`act_end` the last record of activations."""
        spec = self.spec
        if spec.by_row:  # every record holds the row's scale; the last one is nearest
            act_meta = act_end + -(4 * FIELDS * spec.rows)
            for i, slot in enumerate(self.row_scale):
                slot.store(act_meta.load("float", 4 * i, 4), align=4)
        self._write(row_offset)

    def _initial(self, row_offset: Value, v: int) -> Value:
        return self.f.value(self.isa.floats, 0.0)

    def _ask_for_outputs(self, row_offset: Value) -> None:
        """Lines of outputs that are not near hold up what is stored after them."""
        stride, size = LINEAR.load(self.args, "out_stride"), self.isa.lanes * self.spec.vectors * self.out_bytes
        for row, at in itertools.product(range(self.spec.rows), range(0, size, 64)):
            self.f.prefetch(self.out + row_offset * self.out_bytes + stride * row + at)

    # One block along K

    def _block(self, w: Value, a: Value, weight_meta: Value, act_meta: Value, units: Value, row_offset: Value) -> None:
        """`weight_meta` and `act_meta`: what is behind the block's weights and activations."""
        spec, f = self.spec, self.f
        start = self._block_start(weight_meta, act_meta, row_offset)
        if spec.single:
            sums = self._unit(w, a, weight_meta, row_offset, start)
            if self.int8.steps is not None:
                sums = [self.isa.settled(f, total) for total in sums]
        else:
            accumulators = [f.variable(v) for v in start]
            for u in f.loop(units):
                if self.prefetcher is not None:
                    self.prefetcher.begin_unit()
                at = w + u * self.unit_bytes, a + u * (spec.rows * self.row_unit_bytes)
                for k, v in zip(accumulators, self._unit(*at, weight_meta, row_offset, [k.value for k in accumulators]), strict=True):
                    k.value = v
            sums = [k.value for k in accumulators]
        self._block_end(sums, weight_meta, act_meta, units, row_offset)

    def _block_start(self, weight_meta: Value, act_meta: Value, row_offset: Value) -> list[Value]:
        """What a block's accumulators, and the sums of weights behind them, begin at."""
        spec, isa, f = self.spec, self.isa, self.f
        start = [f.value(isa.ints, 0)] * self.count if self.narrow_accumulators else self._start(act_meta, weight_meta, row_offset)
        if spec.inner == "int8":
            start = isa.transposed_accumulators(self.int8, start)
        return [*start, *[f.value(isa.ints, 0)] * (spec.vectors * spec.shifted)]

    def _block_end(self, sums: list[Value], weight_meta: Value, act_meta: Value, units: Value, row_offset: Value) -> None:
        totals, weight_sums = sums[: self.count], sums[self.count :]
        if self.prefetcher is not None and not self.spec.single:
            self.prefetcher.issue(weight_meta, self.tail_bytes)
        if self.spec.inner == "int8":
            totals = self.isa.transposed_accumulators(self.int8, totals)
        if (
            self.narrow_accumulators and not self.spec.folded
        ):  # now, so that it takes no registers meanwhile; for the same reason scales come late
            totals = [total + s for total, s in zip(totals, self._start(act_meta, weight_meta, row_offset), strict=True)]
        self._scale(totals.__getitem__, act_meta, weight_meta, row_offset, weight_sums, units)

    def _pair_sums(self, weight_meta: Value, row_offset: Value, v: int) -> Value:
        """The sums of pairs of one vector of rows."""
        return (weight_meta + row_offset * 4).load(self.isa.ints, self.pair_sums_at + v * self.isa.lanes * 4, 4)

    def _start(self, act_meta: Value, weight_meta: Value, row_offset: Value) -> list[Value]:
        """What the block's accumulators begin at."""
        spec, f = self.spec, self.f
        if spec.inner == "int8":  # what turns unit weights into codes, and products of sums into those of their parts: for free here
            starts = [self._field(act_meta, 1, i, "i32") for i in range(spec.rows) for _ in range(spec.vectors)]
            pair_sums = [self._pair_sums(weight_meta, row_offset, v) for v in range(spec.vectors)] if self.paired else []
            return [start - pair_sums[n % spec.vectors] for n, start in enumerate(starts)] if pair_sums else starts
        if spec.zero != "point":
            return [f.value(self.isa.floats, 0.0)] * self.count
        sums = [self._field(act_meta, 2, i, "float") for i in range(spec.rows)]
        zeros = [self._zero(weight_meta, row_offset, v) for v in range(spec.vectors)]
        return [f.value(self.isa.floats, -0.0) - zero * s for s in sums for zero in zeros if zero is not None]

    def _unit(self, w: Value, a: Value, weight_meta: Value, row_offset: Value, sums: list[Value]) -> list[Value]:
        """One unit of k: new accumulators, and new sums of weights where activations have an offset. `weight_meta`: of its block."""
        spec, f = self.spec, self.f
        if self.prefetcher is not None:
            self.prefetcher.issue(w, self.unit_bytes + (self.tail_bytes if spec.single else 0))
        rows = w + row_offset * 4
        points = weight_meta + row_offset + PANEL * self.scale_bytes if spec.zero == "point" else None
        unit: SparseUnit | PackedBitsUnit | None = (
            SparseUnit.of(self.isa, spec.bits, w, row_offset, points, spec.vectors) if spec.sparse else None
        )
        unit = PackedBitsUnit(self.isa, spec.packed_bits, spec.signed, spec.unit, w, row_offset, spec.vectors) if spec.packed_bits else unit
        if spec.vectors == 1:  # products read activations themselves: an address with an index makes one instruction two on Intel's CPUs
            a = f.pinned(a, "r")
        if spec.inner == "int8":
            activations = [a + i * self.row_unit_bytes for i in range(spec.rows)]
            int8 = self.int8 if unit is None or self.int8.steps else replace(self.int8, steps=lambda _: unit.steps())
            if spec.points_off and points is not None:
                left = [self._left_of_point(points, v) for v in range(spec.vectors)]
                int8 = replace(int8, steps=lambda at: self._codes_without_points(at, left))
            new, new_sums = self.isa.int8_unit(f, int8, rows, activations, sums[: self.count], sums[self.count :])
            return [*new, *new_sums]
        step, row_k = self._bf16_row if spec.inner == "bf16" else self._float_row, 32 // self.int8.stored_bits
        for t in range(spec.unit // row_k):
            stored = self.isa.stored(rows + t * PANEL * 4, spec.vectors) if unit is None else unit.stored(t)
            sums = step(stored, a + t * row_k * self.row_unit_bytes // spec.unit, sums)
            f.fence()
        return sums

    def _left_of_point(self, points: Value, v: int) -> Value:
        """HIGHEST_CODE - point in each byte of a vector of outputs: what is added to unsigned codes, which stay unsigned."""
        isa = self.isa
        quads = points.load(vector("i8", isa.lanes), v * isa.lanes, 1).shuffle([n // 4 for n in range(4 * isa.lanes)])
        return self.f.value(isa.quads, HIGHEST_CODE) - quads

    def _codes_without_points(self, rows: Value, left: Sequence[Value]) -> Iterator[tuple[Value, ...]]:
        for step in self.isa.unit_steps(rows, replace(self.int8, steps=None)):
            yield tuple(code + less for code, less in zip(step, left, strict=True))

    def _float_row(self, stored: Iterable[Value], a: Value, totals: list[Value]) -> list[Value]:
        spec, isa, f = self.spec, self.isa, self.f
        by_vector = [isa.float_weights(f, s, self.int8, spec.signed) for s in stored]
        out = list(totals)
        for parts in zip(*by_vector, strict=True):
            for i in range(spec.rows):
                x = isa.spread(a, "float", 4 * (i * spec.unit + parts[0][0]))
                for v, (_, code) in enumerate(parts):
                    out[i * spec.vectors + v] = isa.pinned(f, f.fma(code, x, out[i * spec.vectors + v]))
            f.fence()
        return out

    def _bf16_row(self, stored: Iterable[Value], a: Value, totals: list[Value]) -> list[Value]:
        spec, isa, f = self.spec, self.isa, self.f
        by_vector = [isa.bf16_codes(f, s, spec.signed, self.int8.table) for s in stored]
        out = list(totals)
        for s, codes in enumerate(zip(*by_vector, strict=True)):
            for i in range(spec.rows):
                pair = a.load("i32", 2 * i * spec.unit + 4 * s, 4).splat(isa.lanes)
                for v, code in enumerate(codes):
                    out[i * spec.vectors + v] = isa.bf16_multiply(f, out[i * spec.vectors + v], code, pair)
        return out

    # The outputs

    def _write(self, row_offset: Value) -> None:
        """Add the bias and a residual, clamp, convert and store; a panel's columns beyond `columns` are not touched."""
        spec, isa, f = self.spec, self.isa, self.f
        for n in range(self.count):
            by = self.row_scale[n // spec.vectors].load("float", align=4).splat(isa.lanes) if spec.by_row else None
            self.scratch.store(self._total(n) if by is None else self._total(n) * by, n * isa.lanes * 4, isa.lanes * 4)
        residual = LINEAR.load(self.args, "residual")
        plain = residual.equals(0)
        inside = (self.columns - row_offset) > isa.lanes * spec.vectors - 1
        with f.when(inside & plain):
            self._write_whole(row_offset, None)
        with f.when(inside & plain.equals(0)):
            self._write_whole(row_offset, residual)
        with f.when(inside.equals(0)):
            self._write_some(row_offset, residual)

    def _write_whole(self, row_offset: Value, residual: Value | None) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        stride, (low, high) = LINEAR.load(self.args, "out_stride"), (bound.splat(isa.lanes) for bound in self._clamp())
        for n in range(self.count):
            row, column = n // spec.vectors, n % spec.vectors * isa.lanes
            to = self.out + stride * row + row_offset * self.out_bytes
            bias = (self.bias + row_offset * 4).load(isa.floats, column * 4, 4)
            value = self.scratch.load(isa.floats, n * isa.lanes * 4, isa.lanes * 4) + bias
            if residual is not None:
                raw = (to + residual).load(vector(self.out_element, isa.lanes), column * self.out_bytes, self.out_bytes)
                value = value + isa.to_float(raw, spec.out)
            to.store(isa.from_float(self._finished(value, low, high), spec.out), column * self.out_bytes, self.out_bytes)
            f.fence()

    def _write_some(self, row_offset: Value, residual: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        stride, (low, high) = LINEAR.load(self.args, "out_stride"), self._clamp()
        some = (self.columns - row_offset).max_or(0)
        for row in range(spec.rows):
            for c in f.loop(some):
                to = self.out + stride * row + (c + row_offset) * self.out_bytes
                value = self.scratch.load("float", c * 4 + row * spec.vectors * isa.lanes * 4, 4)
                value = value + self.bias.load("float", (c + row_offset) * 4, 4)
                # Where there is none, this reads the output's own memory, and what it finds there is not taken.
                other = isa.to_float((to + residual).load(self.out_element, 0, self.out_bytes), spec.out)
                value = self._finished(residual.equals(0).select(value, value + other), low, high)
                to.store(isa.from_float(value, spec.out), 0, self.out_bytes)

    def _finished(self, value: Value, low: Value, high: Value) -> Value:
        return gelu(self.f, value) if self.spec.gelu else value.max_or(low).min_or(high)

    def _clamp(self) -> tuple[Value, Value]:
        return LINEAR.load_floats(self.args, "clamp")


class RequantizingTile(Tile):
    """int8 in, int8 out: o = clamp(round(fma(float(start + sum(q * x)), multiplier, offset))), ties to even.

    `bias` is a table [3, N] of 4-byte numbers, N padded to whole panels: offset (float), multiplier (float), start (int32).
    """

    def _column(self, row: int, row_offset: Value, v: int, kind: str) -> Value:
        table = self.bias + LINEAR.load(self.args, "table_stride") * row + row_offset * 4
        return table.load(kind, v * self.isa.lanes * 4, 4)

    def _initial(self, row_offset: Value, v: int) -> Value:
        return self._column(2, row_offset, v, self.isa.ints).bits(self.isa.floats)  # int32 sums in the place of float totals

    def _start(self, act_meta: Value, weight_meta: Value, row_offset: Value) -> list[Value]:
        corrections = super()._start(act_meta, weight_meta, row_offset)
        return [self._total(n).bits(self.isa.ints) + c for n, c in enumerate(corrections)]

    def _scale(
        self, total: Callable[[int], Value], act_meta: Value, weight_meta: Value, row_offset: Value, weight_sums: list[Value], units: Value
    ) -> None:
        for n in (i * self.spec.vectors + v for i in self.scaled_rows for v in self.scaled_vectors):
            self._set_total(n, self._total_sum(n, total(n)).bits(self.isa.floats))

    def _total_sum(self, n: int, block_sum: Value) -> Value:
        return block_sum  # the block's accumulators began at the sum so far

    def _write(self, row_offset: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        width, stride = spec.vectors * isa.lanes, LINEAR.load(self.args, "out_stride")
        some = f.umin((self.columns - row_offset).max_or(0), f.value("i64", width))
        with f.when(some.equals(width)):
            self._write_codes(self.out + row_offset, stride, row_offset)
        with f.when(some < width):
            codes = f.alloca("i8", self.count * isa.lanes, 64)
            self._write_codes(codes, f.value("i64", width), row_offset)
            for size in (1 << n for n in reversed(range((width - 1).bit_length()))):
                with f.when((some & size).equals(size)):
                    at = some & -2 * size  # what larger pieces have taken
                    for i in range(spec.rows):
                        (self.out + row_offset + stride * i + at).store(codes.load(vector("i8", size), at + i * width, 1))

    def _write_codes(self, to: Value, stride: Value, row_offset: Value) -> None:
        """All codes of the tile; rows lie `stride` bytes apart."""
        spec, isa, f = self.spec, self.isa, self.f
        low, high = (bound.splat(isa.lanes) for bound in self._clamp())
        columns = [[self._column(row, row_offset, v, isa.floats) for row in (0, 1)] for v in range(spec.vectors)]

        def real(i: int, v: int) -> Value:
            offset, multiplier = columns[v]
            return f.fma(self._total(i * spec.vectors + v).bits(isa.ints).to("float"), multiplier, offset).min_or(high)

        if not isa.narrows or 4 % spec.vectors:
            for v, i in itertools.product(range(spec.vectors), range(spec.rows)):
                (to + stride * i).store((real(i, v).max_or(low) + ROUND).bits(isa.ints).to("i8"), v * isa.lanes)
            return
        least, together, width = self._clamp()[0].to("i8").splat(4 * isa.lanes), 4 // spec.vectors, spec.vectors * isa.lanes
        for start in range(0, spec.rows, together):
            some = [min(start + i, spec.rows - 1) for i in range(together)]
            codes = isa.narrowed(f, [real(i, v) for i in some for v in range(spec.vectors)]).max_or(least)
            for at, i in enumerate(some):
                (to + stride * i).store(codes.shuffle(range(at * width, (at + 1) * width)))
            f.fence()
