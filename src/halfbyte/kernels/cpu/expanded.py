"""Tiles of many rows whose codes were expanded before, 4 bits to bytes: unpacking takes instructions that products could have.

Some blocks of some outputs of a panel at a time, as many as stay in the first-level cache: their codes are expanded once, all row
tiles pass over them, and sums that are not finished wait in memory. On Zen 3, medians of whole products in turn, with 48 to 512 rows: 3 to
13 % faster in twelve of fourteen cases, 3 % slower in one, 32 % faster in one. The best of each, where no other thread of the core takes
its share of the decoder: 3 % slower to 8 % faster, and 19 % in one.

    record = for each 4 k: 4 bytes of each output, k = 0 … 3 | numbers, float32

Where sums of blocks are `biased`, points are taken off the codes when these are expanded.

The arithmetic is that of `tile.py`, number by number: an output does not depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfbyte.kernels.cpu.arguments import LINEAR
from halfbyte.kernels.cpu.ir import Function, Value, vector
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.kernel import Emitter, function
from halfbyte.kernels.cpu.tile import FIELDS, HIGHEST_CODE, ROUND, Part, Tile, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, tail_bytes

WAITING_ROWS = 256  # whose sums wait; more pass one after the other
_LINE = 64  # bytes
_FIRST, _LAST = 1, 2  # the call of a tile that begins the sums, and the one that writes outputs


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """What the passing of row tiles over a panel is compiled for: fields of TileSpec, vectors of a tile, and what records have.

    points_off   points are taken off codes
    lifts        beside each scale there is what takes ROUND off; where blocks are single units, making it anew is no slower
    """

    bits: int
    scale: str
    zero: str
    unit: int
    vectors: int
    points_off: bool
    lifts: bool

    @classmethod
    def of(cls, spec: TileSpec) -> PanelSpec:
        points_off = spec.biased and spec.zero == "point"
        return cls(spec.bits, spec.scale, spec.zero, spec.unit, spec.vectors, points_off, spec.biased and not spec.single)

    @property
    def zeros(self) -> str:
        """What records have of them."""
        return "none" if self.points_off else self.zero

    def record_bytes(self, isa: ISA, padded: int) -> int:
        """Of a block of `padded` elements."""
        return isa.lanes * self.vectors * (padded + 4 * (1 + self.lifts + (self.zeros != "none")))


def packed_tail(scale: str, zero: str) -> int:
    """Bytes behind the codes of a block as it is stored."""
    size = 4 if scale == "f32" else 2
    return tail_bytes(size, {"none": 0, "point": 1, "offset": size}[zero], pairs=False)


@function(*["ptr"] * 7, *["i64"] * 5)
def build(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, sums, asked, columns, blocks, units of the last, _FIRST and _LAST, lines).

    With each unit so many lines of memory are asked for, the first of them as far behind `asked` as its packed codes are behind those
    of the first unit."""
    ExpandedTile(spec, isa, f).emit(f.value("i64", 0))


class ExpandedTile(Tile):
    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        args, weights, activations, out, bias, sums, asked, columns, self.count_blocks, self.last_units, self.stage, lines = f.parameters
        self.panel = PanelSpec.of(spec)
        floats = replace(spec, scale="f32", zero=self.panel.zeros)
        super().__init__(floats, isa, f, (args, weights, activations, out, bias, columns))
        self.asked, self.lines, self.packed_tail = f.variable(asked), lines, packed_tail(spec.scale, spec.zero)
        self.sums = sums
        if not self.in_registers:
            self.scratch = sums
        self.width = isa.lanes * spec.vectors
        self.unit_bytes = self.width * spec.unit
        self.tail_bytes = self.panel.record_bytes(isa, 0)
        self.int8 = replace(self.int8, expanded=True)

    def emit(self, first: Value) -> None:
        f, size = self.f, 4 * self.isa.lanes
        begins, ends = (self.stage & _FIRST).equals(_FIRST), (self.stage & _LAST).equals(_LAST)
        with f.when(ends):
            self._ask_for_outputs(first)
        with f.when(begins):
            self._begin(first)
        if self.in_registers:
            with f.when(begins.equals(0)):
                for n, total in enumerate(self.totals):
                    total.value = self.sums.load(self.isa.floats, n * size, size)
        part = Part(first, first, first, first)
        behind = self._blocks(lambda: iter([part]), self.count_blocks, self.last_units)
        with f.when(ends):
            self._end(first, behind)
        if self.in_registers:
            with f.when(ends.equals(0)):
                for n, total in enumerate(self.totals):
                    self.sums.store(total.value, n * size, size)

    def _block(self, w: Value, a: Value, tail: Value, fields: Value, units: Value, first: Value) -> None:
        if self.spec.single:
            self._ask_for_next_activations(a, self.spec.rows * (self.row_unit_bytes + 4 * FIELDS))
        super()._block(w, a, tail, fields, units, first)
        self.asked.value = self.asked.value + self.packed_tail

    def _unit(self, w: Value, a: Value, first: Value, sums: list[Value]) -> list[Value]:
        asked = self.asked.value
        for line in self.f.loop(self.lines):
            self.f.prefetch(asked + line * _LINE)
        self.asked.value = asked + PANEL * self.spec.unit * self.spec.bits // 8
        if not self.spec.single and self.isa.asks_in_turn:
            self._ask_for_next_activations(a, self.spec.rows * self.row_unit_bytes)
        return super()._unit(w, a, first, sums)

    def _ask_for_next_activations(self, a: Value, size: int) -> None:
        """For those that the next tile reads where this one reads so many bytes from `a` on."""
        for line in range(0, size, _LINE):
            self.f.prefetch(a + LINEAR.load(self.args, "row_bytes") * self.spec.rows + line)

    def _zero(self, tail: Value, first: Value, v: int) -> Value | None:
        return None if self.spec.zero == "none" else self._lanes(tail, first, v, 4 * self.width * (1 + self.panel.lifts))

    def _lift(self, tail: Value, first: Value, v: int, scale: Value) -> Value:
        return self._lanes(tail, first, v, 4 * self.width) if self.panel.lifts else super()._lift(tail, first, v, scale)


@function(*["ptr"] * 5, *["i64"] * 3, "ptr")
def build_panel(spec: PanelSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, columns, first tile, behind the last, following).

    `following`: the weights that are read after this panel's."""
    _Panel(spec, isa, f).emit()


class _Panel(Emitter):
    block = LINEAR
    spec: PanelSpec

    def __init__(self, spec: PanelSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.weights, self.activations, self.out, self.bias, self.columns, self.first, self.stop, self.following = f.parameters
        self.width = isa.lanes * spec.vectors
        self.scale_bytes = 4 if spec.scale == "f32" else 2
        self.units, self.blocks = self.get("units"), self.get("blocks")
        self.unit_bytes, self.tail_bytes = PANEL * spec.unit * spec.bits // 8, packed_tail(spec.scale, spec.zero)
        self.packed_bytes = self.units * self.unit_bytes + self.tail_bytes
        self.records = f.alloca("i8", max(isa.expanded_bytes, spec.record_bytes(isa, isa.expanded_longest)), 64)
        self.sums = f.alloca("float", WAITING_ROWS * PANEL, 64)

    def emit(self) -> None:
        f, most = self.f, self.get("expanded_blocks")
        tiles = self.stop - self.first
        at_once = f.value("i64", WAITING_ROWS) // self.get("tile_rows")
        parts = (tiles + at_once - 1) // at_once
        chunks = (self.blocks + (most - 1)) // most
        for part in f.loop(parts):
            some = self.first + part * tiles // parts, self.first + (part + 1) * tiles // parts
            for c in f.loop(chunks):  # outside: activations that one side has read are near when the other comes
                start, stop = c * self.blocks // chunks, (c + 1) * self.blocks // chunks
                for side in f.loop((self.columns + (self.width - 1)) // self.width):
                    self._chunk(some, side * self.width, start, stop)

    def _chunk(self, tiles: tuple[Value, Value], column: Value, start: Value, stop: Value) -> None:
        """Blocks start … stop - 1 of the outputs from `column` on."""
        spec, f = self.spec, self.f
        ends = stop.equals(self.blocks)
        last_units = ends.select(self.get("last_units"), self.units)
        self._expand(column, start, stop - start, last_units)
        stage = ends.select(f.value("i64", _LAST), 0) + start.equals(0).select(f.value("i64", _FIRST), 0)
        big, count, row_bytes, out_stride = map(self.get, ("tile_rows", "tiles", "row_bytes", "out_stride"))
        full, lesser = map(self.pointer, ("tile_function", "lesser_tile_function"))
        block_bytes = self.units * spec.unit + 4 * FIELDS  # of a row's activations
        out, bias = self.out + column * self.get("out_bytes"), self.bias + column * 4

        def rows_before(tile: Value) -> Value:
            return tile * big - (tile - f.umin(tile, count))

        asked = ends.select(self.following, self.weights + stop * self.packed_bytes)
        lines, shares = (self.unit_bytes + self.tail_bytes) // _LINE, tiles[1] - tiles[0]
        row, sums = f.variable(rows_before(tiles[0]) - rows_before(self.first)), f.variable(self.sums + column * (4 * WAITING_ROWS))
        for t in f.loop(tiles[1], tiles[0]):
            larger = t.below(count)
            rows = larger.select(big, big - 1)
            a = self.activations + row.value * row_bytes + start * rows * block_bytes
            to = out + row.value * out_stride
            share = t - tiles[0]
            before = share * lines // shares  # each tile asks for its share of each unit: at once they would keep it waiting
            numbers = self.columns - column, stop - start, last_units, stage, (share + 1) * lines // shares - before
            pointers = self.records, a, to, bias, sums.value, asked + before * _LINE
            f.call_pointer(larger.select(full, lesser), self.args, *pointers, *numbers)
            row.value = row.value + rows
            sums.value = sums.value + rows * (4 * self.width)

    def _expand(self, column: Value, start: Value, blocks: Value, last_units: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        w, to = f.variable(self.weights + start * self.packed_bytes), f.variable(self.records)
        for b in f.loop(blocks):
            units = (b + 1).equals(blocks).select(last_units, self.units)
            tail, floats = w.value + units * self.unit_bytes, to.value + units * (self.width * spec.unit)
            left = self._left_of_points(tail, column) if spec.points_off else None
            step = 32 // spec.bits  # k in each 32 bits as they are stored
            for t in f.loop(units * (spec.unit // step)):
                at = w.value + t * (4 * PANEL) + column * 4
                stored = isa.stored(at, spec.vectors)
                for v, steps in enumerate(zip(*(isa.unit_weights(s, spec.bits) for s in stored), strict=True)):
                    for n, code in enumerate(steps):
                        codes = code if left is None else code + left[n]
                        (to.value + t * (step * self.width)).store(codes, (v * spec.vectors + n) * 4 * isa.lanes, 64 if n == 0 else 32)
            self._expand_tail(tail, floats, column)
            w.value, to.value = tail + self.tail_bytes, floats + spec.record_bytes(isa, 0)

    def _left_of_points(self, tail: Value, column: Value) -> list[Value]:
        """HIGHEST_CODE - point in each byte of an output, a vector each: what is added to unsigned codes."""
        spec, isa = self.spec, self.isa
        at, parts = tail + column, range(spec.vectors)
        points = [at.load(vector("i8", isa.lanes), PANEL * self.scale_bytes + v * isa.lanes) for v in parts]
        return [((p.to("i32", unsigned=True) * -1 + HIGHEST_CODE) * 0x01010101).bits(isa.quads) for p in points]

    def _expand_tail(self, tail: Value, to: Value, column: Value) -> None:
        spec, isa = self.spec, self.isa
        raw = vector("float" if spec.scale == "f32" else "i16", self.width)
        scales = isa.to_float((tail + column * self.scale_bytes).load(raw, 0, self.scale_bytes), spec.scale)
        numbers = [scales]
        if spec.lifts:
            numbers.append(scales * -ROUND)
        if spec.zeros == "offset":
            zeros = (tail + column * self.scale_bytes).load(raw, PANEL * self.scale_bytes, self.scale_bytes)
            numbers.append(isa.to_float(zeros, spec.scale))
        elif spec.zeros == "point":
            points = (tail + column).load(vector("i8", self.width), PANEL * self.scale_bytes)
            numbers.append(points.to("i32", unsigned=True).to("float"))
        for n, number in enumerate(numbers):
            to.store(number, n * 4 * self.width, 64)
