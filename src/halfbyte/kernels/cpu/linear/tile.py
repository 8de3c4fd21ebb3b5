"""The micro-kernel: a tile of R rows of activations times one panel of 32 rows of weights, over all of K.

    y[i, n] = sum over blocks b of  scale[n, b] * sum over k in b of (q[n, k] - point[n, b]) * x[i, k]  + offset[n, b] * sum(x[i, b])

Weights are read in the order of `layouts/cpu_tiles.py` and unpacked in registers for each tile: no unpacked copy exists.
Activations were written by `activations.py` in the order that the tile reads them, for each block along K:

    for each unit of 8 or 32 k: R rows of that unit | R scales | R corrections | R sums | R offsets   (4 bytes each)

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
from halfbyte.kernels.cpu.linear.prefetch import Prefetcher, SharingPrefetcher
from halfbyte.kernels.cpu.linear.sparse import SparseUnit
from halfbyte.kernels.cpu.linear.tight import TightUnit
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ROUND, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, data_bytes, tail_bytes

_FEW_ROWS = 8  # of a tile that waits for memory


@function(*["ptr"] * 5, *["i64"] * 4)
def build(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, columns, ahead, turn, turns).

    ahead, turn, turns   as `prefetch.Prefetcher` has them
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
    first: Value  # its first row of the panel
    column: Value  # its first output


class Tile(BlockEnd):
    def __init__(self, spec: TileSpec, isa: ISA, f: Function, parameters: Sequence[Value] | None = None) -> None:
        self.spec, self.isa, self.f = spec, isa, f
        self.args, self.weights, self.activations, self.out, self.bias, self.columns, *ahead = parameters or f.parameters
        zero_bytes = zero_size(spec.zero, self.scale_bytes)
        self.paired = spec.inner == "int8" and spec.pairs and isa.multiplies_sums
        self.int8 = Int8Unit(spec.rows, spec.vectors, spec.bits, spec.unit, self.paired, codebook(spec.table))
        self.unit_bytes = data_bytes(spec.packed_bits or self.int8.stored_bits, spec.unit, sparse=spec.sparse)
        self.tail_bytes = tail_bytes(self.scale_bytes, zero_bytes, pairs=spec.pairs)
        self.pairs_at = PANEL * (self.scale_bytes + zero_bytes)  # in the tail
        record = self.unit_bytes + self.tail_bytes if spec.single and spec.rows <= _FEW_ROWS else 0
        size = LINEAR.load(self.args, "panel_bytes")
        self.prefetcher = Prefetcher(isa, f, size, spec.panels, spec.in_turn, record, spec.near, *ahead) if ahead else None
        if self.prefetcher and spec.in_turn and isa.asks_for_shares and self.unit_bytes == PANEL * spec.unit:
            self.prefetcher = SharingPrefetcher(isa, f, size, spec.near, self.weights, *ahead)
        self.count = spec.rows * spec.vectors
        self.row_unit_bytes = spec.unit * isa.activation_bytes(spec.inner, spec.bits)
        self.in_registers = self.count <= isa.register_totals
        self.apart = spec.inner == "int8" and isa.apart(spec.bits)
        self.accumulators: Value | None = None
        self.scratch = f.alloca(isa.floats, self.count, 4 * isa.lanes)
        self.totals: list[Variable] = []
        self.out_element = element_of(spec.out).stored
        self.row_scale = [f.alloca("float", 1, 4) for _ in range(spec.rows)] if spec.by_row else []
        self.scaled_rows, self.scaled_vectors = range(spec.rows), range(spec.vectors)  # of the sums that `_scale` takes

    @property
    def out_bytes(self) -> int:
        return element_of(self.spec.out).size

    def emit(self, first: Value) -> None:
        """The outputs from row `first` of the panel on."""
        self._ask_for_outputs(first)
        self._begin(first)
        part = Part(self.f.value("i64", 0), self.f.value("i64", 0), first, first)
        behind = self._blocks(lambda: iter([part]), LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        self._end(first, behind)

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
        behind = self._blocks(each, LINEAR.load(self.args, "blocks"), LINEAR.load(self.args, "last_units"))
        for part in each():
            self._end(part.column, behind)

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
            tail, fields = weights + n * self.unit_bytes, activations + n * (spec.rows * self.row_unit_bytes)
            if self.prefetcher is not None:
                self.prefetcher.begin_block(b, blocks, done.value)
                if spec.single:
                    self.prefetcher.begin_unit()
                done.value = done.value + n * self.unit_bytes + self.tail_bytes
            if spec.single or self.accumulators is None:
                for part in parts():
                    self._block(weights + part.weights, activations, tail + part.weights, fields, n, part.first)
            else:
                self._block_by_units(parts, weights, activations, tail, fields, n, self.accumulators)
            w.value = tail + self.tail_bytes
            a.value = fields + 4 * FIELDS * spec.rows
        return a.value

    def _block_by_units(
        self, parts: Callable[[], Iterator[Part]], w: Value, a: Value, tail: Value, fields: Value, units: Value, sums: Value
    ) -> None:
        """As `_block` for each of the parts, which take turns after each unit. `sums`: memory for their accumulators."""
        spec, f, size = self.spec, self.f, 4 * self.isa.lanes
        count = self.count + spec.vectors * spec.shifted
        kind = self.isa.ints if spec.inner == "int8" else self.isa.floats

        def kept(part: Part) -> Value:
            return sums + part.number * (count * size)

        def keep(part: Part, values: list[Value]) -> None:
            for n, value in enumerate(values):
                kept(part).store(value, n * size, size)

        def values(part: Part) -> list[Value]:
            return [kept(part).load(kind, n * size, size) for n in range(count)]

        for part in parts():
            keep(part, self._block_start(tail + part.weights, fields, part.first))
        for u in f.loop(units):
            if self.prefetcher is not None:
                self.prefetcher.begin_unit()
            at, activations = w + u * self.unit_bytes, a + u * (spec.rows * self.row_unit_bytes)
            for part in parts():
                keep(part, self._unit(at + part.weights, activations, tail + part.weights, part.first, values(part)))
        for part in parts():
            self._block_end(values(part), tail + part.weights, fields, units, part.first)

    def _begin(self, first: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        if self.in_registers:
            self.totals = [f.variable(f.value(isa.floats, 0.0)) for _ in range(self.count)]
        for i in range(self.count):
            self._set_total(i, self._initial(first, i % spec.vectors))

    def _end(self, first: Value, behind: Value) -> None:
        """`behind` the last record of activations."""
        spec = self.spec
        if spec.by_row:  # every record holds the row's scale; the last one is nearest
            fields = behind + -(4 * FIELDS * spec.rows)
            for i, slot in enumerate(self.row_scale):
                slot.store(fields.load("float", 4 * i, 4), align=4)
        self._write(first)

    def _initial(self, first: Value, v: int) -> Value:
        return self.f.value(self.isa.floats, 0.0)

    def _ask_for_outputs(self, first: Value) -> None:
        """Lines of outputs that are not near hold up what is stored after them."""
        stride, size = LINEAR.load(self.args, "out_stride"), self.isa.lanes * self.spec.vectors * self.out_bytes
        for row, at in itertools.product(range(self.spec.rows), range(0, size, 64)):
            self.f.prefetch(self.out + first * self.out_bytes + stride * row + at)

    # One block along K

    def _block(self, w: Value, a: Value, tail: Value, fields: Value, units: Value, first: Value) -> None:
        """`tail` and `fields`: what is behind the block's weights and activations."""
        spec, f = self.spec, self.f
        start = self._block_start(tail, fields, first)
        if spec.single:
            sums = self._unit(w, a, tail, first, start)
            if self.int8.steps is not None:
                sums = [self.isa.settled(f, total) for total in sums]
        else:
            kept = [f.variable(v) for v in start]
            for u in f.loop(units):
                if self.prefetcher is not None:
                    self.prefetcher.begin_unit()
                at = w + u * self.unit_bytes, a + u * (spec.rows * self.row_unit_bytes)
                for k, v in zip(kept, self._unit(*at, tail, first, [k.value for k in kept]), strict=True):
                    k.value = v
            sums = [k.value for k in kept]
        self._block_end(sums, tail, fields, units, first)

    def _block_start(self, tail: Value, fields: Value, first: Value) -> list[Value]:
        """What a block's accumulators, and the sums of weights behind them, begin at."""
        spec, isa, f = self.spec, self.isa, self.f
        start = [f.value(isa.ints, 0)] * self.count if self.apart else self._start(fields, tail, first)
        if spec.inner == "int8":
            start = isa.turned(self.int8, start)
        return [*start, *[f.value(isa.ints, 0)] * (spec.vectors * spec.shifted)]

    def _block_end(self, sums: list[Value], tail: Value, fields: Value, units: Value, first: Value) -> None:
        totals, weight_sums = sums[: self.count], sums[self.count :]
        if self.prefetcher is not None and not self.spec.single:
            self.prefetcher.issue(tail, self.tail_bytes)
        if self.spec.inner == "int8":
            totals = self.isa.turned(self.int8, totals)
        if self.apart and not self.spec.folded:  # now, so that it takes no registers meanwhile; for the same reason scales come late
            totals = [total + s for total, s in zip(totals, self._start(fields, tail, first), strict=True)]
        self._scale(totals.__getitem__, fields, tail, first, weight_sums, units)

    def _pairs(self, tail: Value, first: Value, v: int) -> Value:
        """The sums of pairs of one vector of rows."""
        return (tail + first * 4).load(self.isa.ints, self.pairs_at + v * self.isa.lanes * 4, 4)

    def _start(self, fields: Value, tail: Value, first: Value) -> list[Value]:
        """What the block's accumulators begin at."""
        spec, f = self.spec, self.f
        if spec.inner == "int8":  # what turns unit weights into codes, and products of sums into those of their parts: for free here
            starts = [self._field(fields, 1, i, "i32") for i in range(spec.rows) for _ in range(spec.vectors)]
            pairs = [self._pairs(tail, first, v) for v in range(spec.vectors)] if self.paired else []
            return [start - pairs[n % spec.vectors] for n, start in enumerate(starts)] if pairs else starts
        if spec.zero != "point":
            return [f.value(self.isa.floats, 0.0)] * self.count
        sums = [self._field(fields, 2, i, "float") for i in range(spec.rows)]
        zeros = [self._zero(tail, first, v) for v in range(spec.vectors)]
        return [f.value(self.isa.floats, -0.0) - zero * s for s in sums for zero in zeros if zero is not None]

    def _unit(self, w: Value, a: Value, tail: Value, first: Value, sums: list[Value]) -> list[Value]:
        """One unit of k: new accumulators, and new sums of weights where activations have an offset. `tail`: of its block."""
        spec, f = self.spec, self.f
        if self.prefetcher is not None:
            self.prefetcher.issue(w, self.unit_bytes + (self.tail_bytes if spec.single else 0))
        rows = w + first * 4
        points = tail + first + PANEL * self.scale_bytes if spec.zero == "point" else None
        unit: SparseUnit | TightUnit | None = SparseUnit.of(self.isa, spec.bits, w, first, points, spec.vectors) if spec.sparse else None
        unit = TightUnit(self.isa, spec.packed_bits, spec.signed, spec.unit, w, first, spec.vectors) if spec.packed_bits else unit
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

    def _write(self, first: Value) -> None:
        """Add the bias and a residual, clamp, convert and store; a panel's columns beyond `columns` are not touched."""
        spec, isa, f = self.spec, self.isa, self.f
        for n in range(self.count):
            by = self.row_scale[n // spec.vectors].load("float", align=4).splat(isa.lanes) if spec.by_row else None
            self.scratch.store(self._total(n) if by is None else self._total(n) * by, n * isa.lanes * 4, isa.lanes * 4)
        residual = LINEAR.load(self.args, "residual")
        plain = residual.equals(0)
        inside = (self.columns - first) > isa.lanes * spec.vectors - 1
        with f.when(inside & plain):
            self._write_whole(first, None)
        with f.when(inside & plain.equals(0)):
            self._write_whole(first, residual)
        with f.when(inside.equals(0)):
            self._write_some(first, residual)

    def _write_whole(self, first: Value, residual: Value | None) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        stride, (low, high) = LINEAR.load(self.args, "out_stride"), (bound.splat(isa.lanes) for bound in self._clamp())
        for n in range(self.count):
            row, column = n // spec.vectors, n % spec.vectors * isa.lanes
            to = self.out + stride * row + first * self.out_bytes
            bias = (self.bias + first * 4).load(isa.floats, column * 4, 4)
            value = self.scratch.load(isa.floats, n * isa.lanes * 4, isa.lanes * 4) + bias
            if residual is not None:
                raw = (to + residual).load(vector(self.out_element, isa.lanes), column * self.out_bytes, self.out_bytes)
                value = value + isa.to_float(raw, spec.out)
            to.store(isa.from_float(self._finished(value, low, high), spec.out), column * self.out_bytes, self.out_bytes)
            f.fence()

    def _write_some(self, first: Value, residual: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        stride, (low, high) = LINEAR.load(self.args, "out_stride"), self._clamp()
        some = (self.columns - first).max_or(0)
        for row in range(spec.rows):
            for c in f.loop(some):
                to = self.out + stride * row + (c + first) * self.out_bytes
                value = self.scratch.load("float", c * 4 + row * spec.vectors * isa.lanes * 4, 4)
                value = value + self.bias.load("float", (c + first) * 4, 4)
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

    def _column(self, row: int, first: Value, v: int, kind: str) -> Value:
        table = self.bias + LINEAR.load(self.args, "table_stride") * row + first * 4
        return table.load(kind, v * self.isa.lanes * 4, 4)

    def _initial(self, first: Value, v: int) -> Value:
        return self._column(2, first, v, self.isa.ints).bits(self.isa.floats)  # int32 sums in the place of float totals

    def _start(self, fields: Value, tail: Value, first: Value) -> list[Value]:
        corrections = super()._start(fields, tail, first)
        return [self._total(n).bits(self.isa.ints) + c for n, c in enumerate(corrections)]

    def _scale(
        self, total: Callable[[int], Value], fields: Value, tail: Value, first: Value, weight_sums: list[Value], units: Value
    ) -> None:
        for n in (i * self.spec.vectors + v for i in self.scaled_rows for v in self.scaled_vectors):
            self._set_total(n, self._total_sum(n, total(n)).bits(self.isa.floats))

    def _total_sum(self, n: int, block_sum: Value) -> Value:
        return block_sum  # the block's accumulators began at the sum so far

    def _write(self, first: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        width, stride = spec.vectors * isa.lanes, LINEAR.load(self.args, "out_stride")
        some = f.umin((self.columns - first).max_or(0), f.value("i64", width))
        with f.when(some.equals(width)):
            self._write_codes(self.out + first, stride, first)
        with f.when(some < width):
            codes = f.alloca("i8", self.count * isa.lanes, 64)
            self._write_codes(codes, f.value("i64", width), first)
            for size in (1 << n for n in reversed(range((width - 1).bit_length()))):
                with f.when((some & size).equals(size)):
                    at = some & -2 * size  # what larger pieces have taken
                    for i in range(spec.rows):
                        (self.out + first + stride * i + at).store(codes.load(vector("i8", size), at + i * width, 1))

    def _write_codes(self, to: Value, stride: Value, first: Value) -> None:
        """All codes of the tile; rows lie `stride` bytes apart."""
        spec, isa, f = self.spec, self.isa, self.f
        low, high = (bound.splat(isa.lanes) for bound in self._clamp())
        columns = [[self._column(row, first, v, isa.floats) for row in (0, 1)] for v in range(spec.vectors)]

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
