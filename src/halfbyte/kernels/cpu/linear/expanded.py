"""Tiles of many rows whose codes are expanded once, from 4 bits to bytes, for all row tiles of a panel: unpacking them in each tile takes
instructions that products could have. `linear.py` plans them (`Tuning.expansion`), and `driver.py` calls `build_panel`'s function for each
panel:

    for rows in parts of at most PARTIAL_ROWS rows:
      for blocks in chunks of K whose records stay in the first-level cache:
        for columns of the panel, a tile's width at a time:
          first row tile      ExpandingTile: reads packed codes, multiplies, and writes records between its products
          other row tiles     ExpandedTile: read the records

    record = for each 4 k: 4 bytes of each output, k = 0 … 3 | scales | -ROUND * scales | zeros       float32, the latter two if needed

Totals of a chunk that is not the last of K are stored in memory until the next chunk. Where block sums are "biased", zero points are
subtracted from codes when these are expanded, and records have none.

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

PARTIAL_ROWS = 256  # rows whose totals are stored between chunks of K; more rows are computed in several parts
_LINE = 64  # bytes
_FIRST, _LAST = 1, 2  # bits of `stage`: the chunk of K in which totals begin, and the one after which outputs are written


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """What the loop of row tiles over a panel is compiled for.

    Attributes:
        weight: How the weight is stored.
        unit: Elements of K that tiles take at a time.
        vectors: Vectors of outputs of a tile.
        subtracts_points: Zero points are subtracted from codes when these are expanded.
        has_rounding_terms: Records have -ROUND * scale of each scale; where blocks are single units, recomputing it is no slower.
    """

    weight: WeightSpec
    unit: int
    vectors: int
    subtracts_points: bool
    has_rounding_terms: bool

    @classmethod
    def of(cls, spec: TileSpec) -> PanelSpec:
        weight, activation, biased = spec.weight, spec.activation, spec.activation.block_sum == "biased"
        return cls(weight, activation.unit, spec.schedule.vectors, biased and weight.zero == "point", biased and not activation.one_unit)

    @property
    def zeros(self) -> Zero:
        """The zeros that records have."""
        return "none" if self.subtracts_points else self.weight.zero

    def record_bytes(self, isa: ISA, padded: int) -> int:
        """Return the bytes of a record of `padded` elements."""
        return isa.lanes * self.vectors * (padded + 4 * (1 + self.has_rounding_terms + (self.zeros != "none")))


def packed_meta(weight: WeightSpec) -> int:
    """Return the bytes behind a block's codes in the packed weight."""
    size = element_of(weight.scale).size
    return tail_bytes(size, zero_size(weight.zero, size), pair_sums=False)


@function(*["ptr"] * 8, *["i64"] * 6)
def build(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of one row tile over a chunk of K, with the parameters

    arguments       block of LINEAR
    records         memory of the chunk's records, which an ExpandingTile writes and an ExpandedTile reads
    activations     of the tile's rows, from the first block on
    out, bias       of the tile's outputs
    partial_totals  memory of the totals between chunks
    prefetch        address of the packed weights that are read next
    packed          packed codes of the first block, which an ExpandingTile reads
    column          first output in the panel
    columns         outputs of the weight from there on
    blocks          number of blocks
    last_units      units of the last one
    stage           _FIRST, _LAST, both or neither
    prefetch_lines  lines to be prefetched with each unit, at `prefetch` plus the distance of its packed codes from the first ones
    """
    (ExpandingTile if spec.schedule.expands else ExpandedTile)(spec, isa, f).emit(f.value("i64", 0))


class ExpandedTile(Tile):
    """A row tile over a chunk of K that reads records: to `Tile` these are a weight of 8-bit codes with float32 scales and zeros."""

    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        args, records, activations, out, bias, partial_totals, prefetch, packed, column, columns, *counts = f.parameters
        self.block_count, self.last_units, self.stage, self.prefetch_lines = counts
        self.panel = PanelSpec.of(spec)
        record_spec = replace(spec, weight=replace(spec.weight, scale="f32", zero=self.panel.zeros))
        super().__init__(record_spec, isa, f, (args, records, activations, out, bias, columns))
        self.prefetch_at, self.packed_meta = f.variable(prefetch), packed_meta(spec.weight)
        self.partial_totals, self.packed, self.column = partial_totals, packed, column
        if not self.in_registers:
            self.scratch = partial_totals
        self.width = isa.lanes * self.vectors
        self.unit_bytes, self.packed_unit = self.width * spec.activation.unit, self.unit_bytes  # in records, and packed
        self.meta_bytes = self.panel.record_bytes(isa, 0)
        self.int8 = replace(self.int8, steps=self._steps)

    def emit(self, row_offset: Value) -> None:
        f, size = self.f, 4 * self.isa.lanes
        is_first, is_last = (self.stage & _FIRST).equals(_FIRST), (self.stage & _LAST).equals(_LAST)
        with f.when(is_last):
            self._prefetch_outputs(row_offset)
        with f.when(is_first):
            self._initialize_totals(row_offset)
        if self.in_registers:
            with f.when(is_first.equals(0)):
                for n, total in enumerate(self.totals):
                    total.value = self.partial_totals.load(self.isa.floats, n * size, size)
        only = PanelSlice(row_offset, row_offset, row_offset, row_offset)
        act_end = self._multiply_blocks(lambda: iter([only]), self.block_count, self.last_units)
        with f.when(is_last):
            self._finish_outputs(row_offset, act_end)
        if self.in_registers:
            with f.when(is_last.equals(0)):
                for n, total in enumerate(self.totals):
                    self.partial_totals.store(total.value, n * size, size)

    def _multiply_block(self, block: Record) -> None:
        if self.spec.activation.one_unit:
            self._prefetch_next_activations(block.activations, self.rows * (self.row_unit_bytes + 4 * FIELDS))
        super()._multiply_block(block)
        self.prefetch_at.value = self.prefetch_at.value + self.packed_meta

    def _multiply_unit(self, unit: Record, sums: list[Value]) -> list[Value]:
        prefetch_at = self.prefetch_at.value
        for line in self.f.loop(self.prefetch_lines):
            self.f.prefetch(prefetch_at + line * _LINE)
        self.prefetch_at.value = prefetch_at + self.packed_unit
        if not self.spec.activation.one_unit and self.isa.tuning.prefetching.sharing_tiles:
            self._prefetch_next_activations(unit.activations, self.rows * self.row_unit_bytes)
        return super()._multiply_unit(unit, sums)

    def _steps(self, records: Value) -> Iterator[tuple[Value, ...]]:
        return (tuple(self.isa.stored(records + k * self.width, self.vectors)) for k in range(0, self.spec.activation.unit, 4))

    def _prefetch_next_activations(self, a: Value, size: int) -> None:
        """Prefetch the activations that the next tile reads when this one reads `size` bytes at `a`."""
        for line in range(0, size, _LINE):
            self.f.prefetch(a + LINEAR.load(self.args, "row_bytes") * self.rows + line)

    def _zero(self, weight_meta: Value, row_offset: Value, v: int) -> Value | None:
        if self.spec.weight.zero == "none":
            return None
        return self._scales(weight_meta, row_offset, v, 4 * self.width * (1 + self.panel.has_rounding_terms))

    def _rounding_term(self, weight_meta: Value, row_offset: Value, v: int, scale: Value) -> Value:
        if not self.panel.has_rounding_terms:
            return super()._rounding_term(weight_meta, row_offset, v, scale)
        return self._scales(weight_meta, row_offset, v, 4 * self.width)


class ExpandingTile(ExpandedTile):
    """The first row tile: reads packed codes, and writes the records that the other tiles read."""

    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.packed_at, self.scale, self.scale_size = f.variable(self.packed), spec.weight.scale, element_of(spec.weight.scale).size

    def _multiply_block(self, block: Record) -> None:
        meta = self.packed_at.value + block.units * self.packed_unit
        self._expand_weight_meta(meta, block.weight_meta)
        if self.spec.weight.sparse:
            points = meta + self.column + PANEL * self.scale_size if self.panel.weight.zero == "point" else None
            self.zeros = zero_codes(self.isa, self.f, self.spec.weight.bits, points, self.vectors)
        self.complements = self._point_complements(meta) if self.panel.subtracts_points else None
        super()._multiply_block(block)
        self.packed_at.value = self.packed_at.value + self.packed_meta

    def _steps(self, records: Value) -> Iterator[tuple[Value, ...]]:
        """Yield the codes of each 4 k, and store them in the unit's `records`."""
        weight, isa, at, size = self.spec.weight, self.isa, self.packed_at.value, 4 * self.isa.lanes
        self.packed_at.value = at + self.packed_unit
        if weight.sparse:
            steps = SparseUnit(isa, weight.bits, at, self.column, self.zeros).steps()
        elif weight.packed_bits:
            unit = self.spec.activation.unit
            steps = PackedBitsUnit(isa, weight.packed_bits, weight.signed, unit, at, self.column, self.vectors).steps()
        else:
            steps = isa.unit_steps(at + self.column * 4, replace(self.int8, steps=None))
        for step in steps:
            codes = step
            if self.complements is not None:
                codes = tuple(code + complement for code, complement in zip(step, self.complements, strict=True))
            for v, code in enumerate(codes):
                records.store(code, v * size, size)
            records = records + size * self.vectors
            yield codes

    def _point_complements(self, weight_meta: Value) -> list[Value]:
        """Return HIGHEST_CODE - point in each byte of an output, a vector each: added to unsigned codes, which stay unsigned."""
        isa, at = self.isa, weight_meta + self.column + PANEL * self.scale_size
        points = [at.load(vector("i8", isa.lanes), v * isa.lanes) for v in range(self.vectors)]
        return [((p.to("i32", unsigned=True) * -1 + HIGHEST_CODE) * 0x01010101).bits(isa.quads) for p in points]

    def _expand_weight_meta(self, weight_meta: Value, to: Value) -> None:
        """Convert a block's scales and zeros, and store them behind its codes in the record."""
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
    """A function of (arguments, weights, activations, out, bias, columns, first_tile, stop, following).

    It computes the row tiles first_tile … stop - 1 of one panel. `following`: address of the weights that are read after this panel's.
    """
    _Panel(spec, isa, f).emit()


class _Panel(Emitter):
    """Emits `build_panel`'s function."""

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
        self.partial_totals = f.alloca("float", PARTIAL_ROWS * PANEL, 64)

    def emit(self) -> None:
        f, most_blocks = self.f, self.get("expanded_blocks")
        tiles = self.stop - self.first_tile
        most_tiles = f.value("i64", PARTIAL_ROWS) // self.get("tile_rows")
        parts = (tiles + most_tiles - 1) // most_tiles
        chunks = (self.blocks + (most_blocks - 1)) // most_blocks
        for part in f.loop(parts):
            part_tiles = self.first_tile + part * tiles // parts, self.first_tile + (part + 1) * tiles // parts
            for c in f.loop(chunks):  # outside of columns: each slice of these finds the chunk's activations in the cache
                start, stop = c * self.blocks // chunks, (c + 1) * self.blocks // chunks
                for slice_ in f.loop((self.columns + (self.width - 1)) // self.width):
                    self._chunk(part_tiles, slice_ * self.width, start, stop)

    def _chunk(self, tiles: tuple[Value, Value], column: Value, start: Value, stop: Value) -> None:
        """Emit the calls of the row tiles tiles[0] … tiles[1] - 1, over the blocks start … stop - 1, of the outputs from `column` on."""
        spec, f = self.spec, self.f
        is_last = stop.equals(self.blocks)
        last_units = is_last.select(self.get("last_units"), self.units)
        stage = is_last.select(f.value("i64", _LAST), 0) + start.equals(0).select(f.value("i64", _FIRST), 0)
        big, count, row_bytes, out_stride = map(self.get, ("tile_rows", "tiles", "row_bytes", "out_stride"))
        functions = [[self.pointer(f"{kind}{size}tile_function") for size in ("", "lesser_")] for kind in ("", "expanding_")]
        block_bytes = self.units * spec.unit + 4 * FIELDS  # of a row's activations
        out, bias = self.out + column * self.get("out_bytes"), self.bias + column * 4

        def rows_before(tile: Value) -> Value:
            """Return the rows of all tiles before this one: the first `count` of them have `big` rows, the others one less."""
            return tile * big - (tile - f.umin(tile, count))

        prefetch = is_last.select(self.following, self.weights + stop * self.packed_bytes)
        lines, count_here = (self.unit_bytes + self.tail_bytes) // _LINE, tiles[1] - tiles[0]
        row = f.variable(rows_before(tiles[0]) - rows_before(self.first_tile))
        partial_totals = f.variable(self.partial_totals + column * (4 * PARTIAL_ROWS))
        for t in f.loop(tiles[1], tiles[0]):
            larger = t.below(count)
            rows = larger.select(big, big - 1)
            a = self.activations + row.value * row_bytes + start * rows * block_bytes
            to = out + row.value * out_stride
            index = t - tiles[0]
            first_line = index * lines // count_here  # of the tile's share of each unit: all lines at once would stall it
            numbers = column, self.columns - column, stop - start, last_units, stage, (index + 1) * lines // count_here - first_line
            pointers = (
                self.records,
                a,
                to,
                bias,
                partial_totals.value,
                prefetch + first_line * _LINE,
                self.weights + start * self.packed_bytes,
            )
            reading, expanding = (larger.select(*sizes) for sizes in functions)
            f.call_pointer(index.equals(0).select(expanding, reading), self.args, *pointers, *numbers)
            row.value = row.value + rows
            partial_totals.value = partial_totals.value + rows * (4 * self.width)
