"""Tiles of many rows whose codes are expanded once, 4 bits to bytes: unpacking takes instructions that products could have.

Some blocks of some outputs of a panel at a time, as many as stay in the first-level cache: the first row tile expands their codes between
its products, the others read what it wrote, and sums that are not finished wait in memory. On Zen 3, with codes expanded before the first
tile, medians of whole products in turn, with 48 to 512 rows: 3 to 13 % faster in twelve of fourteen cases, 3 % slower in one, 32 % faster
in one. The best of each, where no other thread of the core takes its share of the decoder: 3 % slower to 8 % faster, and 19 % in one.

    record = for each 4 k: 4 bytes of each output, k = 0 … 3 | numbers, float32

Where sums of blocks are `biased`, points are taken off the codes when these are expanded.

The arithmetic is that of `tile.py`, number by number: an output does not depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from halfbyte.errors import unreachable
from halfbyte.formats.spec import Zero, zero_size
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elements import element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, function
from halfbyte.kernels.cpu.linear.block_end import HIGHEST_CODE, Record
from halfbyte.kernels.cpu.linear.packed_planes import PackedBitsUnit
from halfbyte.kernels.cpu.linear.sparse import SparseUnit, zero_codes
from halfbyte.kernels.cpu.linear.tile import PanelSlice, Tile
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ROUND, TileSpec, WeightSpec
from halfbyte.layouts.cpu_tiles import PANEL, data_bytes, tail_bytes

WAITING_ROWS = 256  # whose sums wait; more pass one after the other
_LINE = 64  # bytes
_FIRST, _LAST = 1, 2  # the call of a tile that begins the sums, and the one that writes outputs


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """What the passing of row tiles over a panel is compiled for.

    unit, vectors       of the tiles
    subtracts_points    points are subtracted from codes when these are expanded
    has_rounding_terms  each scale is stored with its -ROUND * scale; where blocks are single units, recomputing it is no slower
    """

    weight: WeightSpec
    unit: int
    vectors: int
    subtracts_points: bool
    has_rounding_terms: bool

    @classmethod
    def of(cls, spec: TileSpec) -> PanelSpec:
        weight, activation, biased = spec.weight, spec.activation, spec.activation.block_sum == "biased"
        return cls(weight, activation.unit, spec.schedule.vectors, biased and weight.zero == "point", biased and not activation.single)

    @property
    def zeros(self) -> Zero:
        """What records have of them."""
        return "none" if self.subtracts_points else self.weight.zero

    def record_bytes(self, isa: ISA, padded: int) -> int:
        """Bytes of a record of `padded` elements."""
        return isa.lanes * self.vectors * (padded + 4 * (1 + self.has_rounding_terms + (self.zeros != "none")))


def packed_meta(weight: WeightSpec) -> int:
    """Bytes behind the codes of a block as it is stored."""
    size = element_of(weight.scale).size
    return tail_bytes(size, zero_size(weight.zero, size), pair_sums=False)


@function(*["ptr"] * 8, *["i64"] * 6)
def build(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, records, activations, out, bias, sums, asked, packed, column of the panel, columns, blocks, units of the
    last, _FIRST and _LAST, lines).

    With each unit so many lines of memory are asked for, the first of them as far behind `asked` as its packed codes are behind those
    of the first unit. A tile that `expands` writes the records from the packed codes."""
    (ExpandingTile if spec.schedule.expands else ExpandedTile)(spec, isa, f).emit(f.value("i64", 0))


class ExpandedTile(Tile):
    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        args, weights, activations, out, bias, sums, asked, packed, column, columns, *counts = f.parameters
        self.count_blocks, self.last_units, self.stage, self.lines = counts
        self.panel = PanelSpec.of(spec)
        floats = replace(spec, weight=replace(spec.weight, scale="f32", zero=self.panel.zeros))
        super().__init__(floats, isa, f, (args, weights, activations, out, bias, columns))
        self.asked, self.packed_meta = f.variable(asked), packed_meta(spec.weight)
        self.sums, self.packed, self.column = sums, packed, column
        if not self.in_registers:
            self.scratch = sums
        self.width = isa.lanes * self.vectors
        self.unit_bytes, self.packed_unit = self.width * spec.activation.unit, self.unit_bytes
        self.meta_bytes = self.panel.record_bytes(isa, 0)
        self.int8 = replace(self.int8, steps=self._steps)

    def emit(self, row_offset: Value) -> None:
        f, size = self.f, 4 * self.isa.lanes
        begins, ends = (self.stage & _FIRST).equals(_FIRST), (self.stage & _LAST).equals(_LAST)
        with f.when(ends):
            self._prefetch_outputs(row_offset)
        with f.when(begins):
            self._begin(row_offset)
        if self.in_registers:
            with f.when(begins.equals(0)):
                for n, total in enumerate(self.totals):
                    total.value = self.sums.load(self.isa.floats, n * size, size)
        part = PanelSlice(row_offset, row_offset, row_offset, row_offset)
        act_end = self._blocks(lambda: iter([part]), self.count_blocks, self.last_units)
        with f.when(ends):
            self._end(row_offset, act_end)
        if self.in_registers:
            with f.when(ends.equals(0)):
                for n, total in enumerate(self.totals):
                    self.sums.store(total.value, n * size, size)

    def _block(self, block: Record) -> None:
        if self.spec.activation.single:
            self._prefetch_next_activations(block.activations, self.rows * (self.row_unit_bytes + 4 * FIELDS))
        super()._block(block)
        self.asked.value = self.asked.value + self.packed_meta

    def _unit(self, unit: Record, sums: list[Value]) -> list[Value]:
        asked = self.asked.value
        for line in self.f.loop(self.lines):
            self.f.prefetch(asked + line * _LINE)
        self.asked.value = asked + self.packed_unit
        if not self.spec.activation.single and self.isa.tuning.prefetching.sharing_tiles:
            self._prefetch_next_activations(unit.activations, self.rows * self.row_unit_bytes)
        return super()._unit(unit, sums)

    def _steps(self, records: Value) -> Iterator[tuple[Value, ...]]:
        return (tuple(self.isa.stored(records + k * self.width, self.vectors)) for k in range(0, self.spec.activation.unit, 4))

    def _prefetch_next_activations(self, a: Value, size: int) -> None:
        """For those that the next tile reads where this one reads so many bytes from `a` on."""
        for line in range(0, size, _LINE):
            self.f.prefetch(a + LINEAR.load(self.args, "row_bytes") * self.rows + line)

    def _zero(self, weight_meta: Value, row_offset: Value, v: int) -> Value | None:
        return (
            None
            if self.spec.weight.zero == "none"
            else self._scales(weight_meta, row_offset, v, 4 * self.width * (1 + self.panel.has_rounding_terms))
        )

    def _rounding_term(self, weight_meta: Value, row_offset: Value, v: int, scale: Value) -> Value:
        return (
            self._scales(weight_meta, row_offset, v, 4 * self.width)
            if self.panel.has_rounding_terms
            else super()._rounding_term(weight_meta, row_offset, v, scale)
        )


class ExpandingTile(ExpandedTile):
    """The first row tile that passes: between its products it writes the records that the others read."""

    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.at, self.scale, self.scale_size = f.variable(self.packed), spec.weight.scale, element_of(spec.weight.scale).size

    def _block(self, block: Record) -> None:
        packed = self.at.value + block.units * self.packed_unit
        self._expand_weight_meta(packed, block.weight_meta)
        if self.spec.weight.sparse:
            points = packed + self.column + PANEL * self.scale_size if self.panel.weight.zero == "point" else None
            self.zeros = zero_codes(self.isa, self.f, self.spec.weight.bits, points, self.vectors)
        self.left = self._left_of_points(packed) if self.panel.subtracts_points else None
        super()._block(block)
        self.at.value = self.at.value + self.packed_meta

    def _steps(self, records: Value) -> Iterator[tuple[Value, ...]]:
        weight, isa, at, size = self.spec.weight, self.isa, self.at.value, 4 * self.isa.lanes
        self.at.value = at + self.packed_unit
        if weight.sparse:
            steps = SparseUnit(isa, weight.bits, at, self.column, self.zeros).steps()
        elif weight.packed_bits:
            unit = self.spec.activation.unit
            steps = PackedBitsUnit(isa, weight.packed_bits, weight.signed, unit, at, self.column, self.vectors).steps()
        else:
            steps = isa.unit_steps(at + self.column * 4, replace(self.int8, steps=None))
        for step in steps:
            codes = step if self.left is None else tuple(code + left for code, left in zip(step, self.left, strict=True))
            for v, code in enumerate(codes):
                records.store(code, v * size, size)
            records = records + size * self.vectors
            yield codes

    def _left_of_points(self, weight_meta: Value) -> list[Value]:
        """HIGHEST_CODE - point in each byte of an output, a vector each: what is added to unsigned codes."""
        isa, at = self.isa, weight_meta + self.column + PANEL * self.scale_size
        points = [at.load(vector("i8", isa.lanes), v * isa.lanes) for v in range(self.vectors)]
        return [((p.to("i32", unsigned=True) * -1 + HIGHEST_CODE) * 0x01010101).bits(isa.quads) for p in points]

    def _expand_weight_meta(self, weight_meta: Value, to: Value) -> None:
        isa, at, after_scales = self.isa, weight_meta + self.column * self.scale_size, PANEL * self.scale_size
        raw = vector(element_of(self.scale).stored, self.width)
        scales = isa.to_float(at.load(raw, 0, self.scale_size), self.scale)
        numbers = [scales]
        if self.panel.has_rounding_terms:
            numbers.append(scales * -ROUND)
        match self.panel.zeros:
            case "none":
                pass
            case "offset":
                numbers.append(isa.to_float(at.load(raw, after_scales, self.scale_size), self.scale))
            case "point":
                points = (weight_meta + self.column).load(vector("i8", self.width), after_scales)
                numbers.append(points.to("i32", unsigned=True).to("float"))
            case _:
                raise unreachable(self.panel.zeros, "the zero of a format")
        for n, number in enumerate(numbers):
            to.store(number, n * 4 * self.width, 64)


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
        _, self.weights, self.activations, self.out, self.bias, self.columns, self.first_tile, self.stop, self.following = f.parameters
        self.width = isa.lanes * spec.vectors
        self.units, self.blocks = self.get("units"), self.get("blocks")
        self.unit_bytes = data_bytes(spec.weight.stored_bits, spec.unit, sparse=spec.weight.sparse)
        self.tail_bytes = packed_meta(spec.weight)
        self.packed_bytes = self.units * self.unit_bytes + self.tail_bytes
        expansion = isa.tuning.expansion
        assert expansion is not None
        self.records = f.alloca("i8", max(expansion.record_bytes, spec.record_bytes(isa, expansion.longest_block)), 64)
        self.sums = f.alloca("float", WAITING_ROWS * PANEL, 64)

    def emit(self) -> None:
        f, most = self.f, self.get("expanded_blocks")
        tiles = self.stop - self.first_tile
        at_once = f.value("i64", WAITING_ROWS) // self.get("tile_rows")
        parts = (tiles + at_once - 1) // at_once
        chunks = (self.blocks + (most - 1)) // most
        for part in f.loop(parts):
            some = self.first_tile + part * tiles // parts, self.first_tile + (part + 1) * tiles // parts
            for c in f.loop(chunks):  # outside: activations that one side has read are near when the other comes
                start, stop = c * self.blocks // chunks, (c + 1) * self.blocks // chunks
                for side in f.loop((self.columns + (self.width - 1)) // self.width):
                    self._chunk(some, side * self.width, start, stop)

    def _chunk(self, tiles: tuple[Value, Value], column: Value, start: Value, stop: Value) -> None:
        """Blocks start … stop - 1 of the outputs from `column` on."""
        spec, f = self.spec, self.f
        ends = stop.equals(self.blocks)
        last_units = ends.select(self.get("last_units"), self.units)
        stage = ends.select(f.value("i64", _LAST), 0) + start.equals(0).select(f.value("i64", _FIRST), 0)
        big, count, row_bytes, out_stride = map(self.get, ("tile_rows", "tiles", "row_bytes", "out_stride"))
        functions = [[self.pointer(f"{kind}{size}tile_function") for size in ("", "lesser_")] for kind in ("", "expanding_")]
        block_bytes = self.units * spec.unit + 4 * FIELDS  # of a row's activations
        out, bias = self.out + column * self.get("out_bytes"), self.bias + column * 4

        def rows_before(tile: Value) -> Value:
            return tile * big - (tile - f.umin(tile, count))

        asked = ends.select(self.following, self.weights + stop * self.packed_bytes)
        lines, shares = (self.unit_bytes + self.tail_bytes) // _LINE, tiles[1] - tiles[0]
        row, sums = f.variable(rows_before(tiles[0]) - rows_before(self.first_tile)), f.variable(self.sums + column * (4 * WAITING_ROWS))
        for t in f.loop(tiles[1], tiles[0]):
            larger = t.below(count)
            rows = larger.select(big, big - 1)
            a = self.activations + row.value * row_bytes + start * rows * block_bytes
            to = out + row.value * out_stride
            share = t - tiles[0]
            before = share * lines // shares  # each tile asks for its share of each unit: at once they would keep it waiting
            numbers = column, self.columns - column, stop - start, last_units, stage, (share + 1) * lines // shares - before
            pointers = self.records, a, to, bias, sums.value, asked + before * _LINE, self.weights + start * self.packed_bytes
            reading, expanding = (larger.select(*sizes) for sizes in functions)
            f.call_pointer(share.equals(0).select(expanding, reading), self.args, *pointers, *numbers)
            row.value = row.value + rows
            sums.value = sums.value + rows * (4 * self.width)
