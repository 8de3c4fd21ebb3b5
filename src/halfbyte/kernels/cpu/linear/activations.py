"""Lays out activations for `tile.py`, one row at a time: quantizes them to int8, or converts them to floats.

    x [K] in memory -> | units of block 0 | SCALE CORRECTION SUM OFFSET | units of block 1 | …      rows of a tile interleaved

`driver.py` calls `build`'s function for each row; `tile.py` draws the order, and `block_end.py` says what the four fields are for.

    symmetric, over a block (or the whole row):  scale = amax * (1/127),  q = round(x * (127 / amax))
    with an offset:                              offset = (lo + hi) / 2,  scale and q as above for x - offset

amax, lo and hi: largest magnitude, least and greatest of the block's (or row's) x. Each step is float32, rounded to nearest;
x * (127 / amax) is rounded to an integer once, ties to even. Where amax is 0, or so small that 127 / amax overflows, every q is 0. A NaN or
infinity, also where lo + hi or hi - lo overflows, makes the scale NaN and with it the row's results. `kernels/reference.py` has the same
steps, and the codes are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfbyte.errors import UnsupportedError, unreachable
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, bytes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, function
from halfbyte.kernels.cpu.linear.block_end import CORRECTION, OFFSET, SCALE, SUM
from halfbyte.kernels.cpu.linear.bracketed import CENTER, SIGN_BIT
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ROUND, ROUND_BITS, ActivationSpec

_SCALES_AT_ONCE = 16  # blocks whose scales are computed at once
_ONE_BITS = 0x3F800000  # of the float 1.0
_INFINITY_BITS = 0x7F800000  # of the float infinity; those of larger integers are NaN
_MAGNITUDE_BITS = 0x7FFFFFFF  # of a float, without its sign
_PREFETCH_DISTANCE = 4096  # bytes ahead in a row


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the conversion of a row is compiled for.

    Attributes:
        source: Type of x: "f32", "bf16" or "f16"; "i8": codes, which are copied.
        activation: What tiles read.
        bits: Bits of a weight's code.
        paired: Tiles take products of sums (`ISA.multiplies_sums`).
        by_row: The whole row has one scale.
        correction: Factor of the sum of a block's codes in CORRECTION (`ISA.correction`, `block_end.correction_point`).
        sums: SUM of a block: "none", "codes", the sum of q, or "values", that of x as it was rounded.
        zeroed: Zeros follow the row up to a whole unit, and no other unit is partial: all may be read whole.
    """

    source: Kind
    activation: ActivationSpec
    bits: int
    paired: bool
    by_row: bool
    correction: int
    sums: Literal["none", "codes", "values"]
    zeroed: bool = False


@function(*["ptr"] * 3, *["i64"] * 2)
def build(spec: RowSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, x, tile, rows, row).

    arguments  block of LINEAR
    x          address of the row
    tile       address of the laid-out tile
    rows, row  rows of the tile, and which of them x is
    """
    _emitter(spec)(spec, isa, f).emit()


def _emitter(spec: RowSpec) -> type[_Row]:
    if spec.source == "i8":
        return _CopiedRow
    match spec.activation.inner:
        case "int8":
            return _Int8Row
        case "float" | "bf16":
            return _FloatRow
        case _:
            raise unreachable(spec.activation.inner, "the layout of activations for products of")


class _RowBlock(NamedTuple):
    """A block of the row.

    Attributes:
        x: Address of its elements.
        elements: Their number, without padding.
        units: Number of its units.
        data: Address of the row's first unit in the tile.
        act_meta: Address of the block's fields, those of all rows of the tile.
    """

    x: Value
    elements: Value
    units: Value
    data: Value
    act_meta: Value


class _Row(Emitter):
    """Emits `build`'s function: what all kinds of rows share."""

    block = LINEAR
    spec: RowSpec

    def __init__(self, spec: RowSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.x, self.tile, self.rows, self.row = f.parameters
        self.element = element_of(spec.source).stored
        self.raw_type = vector(self.element, spec.activation.unit)
        self.floats, self.ints = vector("float", spec.activation.unit), vector("i32", spec.activation.unit)
        self.element_bytes = bytes_of(self.raw_type) // spec.activation.unit
        self.unit_bytes = spec.activation.unit * isa.activation_bytes(spec.activation.inner, spec.bits)
        self.padded_unit = f.alloca(self.raw_type, 1, 64)  # a partial unit, with zeros behind it

    def blocks(self, first: Value | None = None, count: Value | None = None) -> Iterator[_RowBlock]:
        """Emit a loop over all blocks, or over `count` from `first` on."""
        f, spec = self.f, self.spec
        blocks, units, last_units, block, last = map(self.get, ("blocks", "units", "last_units", "block", "last"))
        first, stop = (f.value("i64", 0), blocks) if first is None or count is None else (first, first + count)
        record_bytes = self.rows * (units * self.unit_bytes + 4 * FIELDS)
        x, record = f.variable(self.x + first * block * self.element_bytes), f.variable(self.tile + first * record_bytes)
        for b in f.loop(stop, first):
            is_last = (b + 1).equals(blocks)
            elements = is_last.select(last, block)
            n = f.value("i64", 1) if spec.activation.one_unit else is_last.select(last_units, units)
            act_meta = record.value + n * self.rows * self.unit_bytes
            yield _RowBlock(x.value, elements, n, record.value + self.row * self.unit_bytes, act_meta)
            x.value = x.value + block * self.element_bytes
            record.value = act_meta + self.rows * (4 * FIELDS)

    def emit(self) -> None:
        raise NotImplementedError

    def chunk(self, x: Value, left: Value) -> Value:
        """Return a unit of x as stored; of a partial one, with `left` elements, the others are zero and not read."""
        f, n = self.f, self.spec.activation.unit
        if self.spec.zeroed:
            return x.load(self.raw_type)
        is_partial = left < n
        with f.when(is_partial):
            self.padded_unit.store(f.value(self.raw_type, 0), align=64)
            for i in f.loop(left):
                at = i * self.element_bytes
                self.padded_unit.store(x.load(self.element, at), at)
        return is_partial.select(self.padded_unit, x).load(self.raw_type)

    def units(self, x: Value, elements: Value, n: Value | int) -> Iterator[tuple[Value, Value, Value]]:
        """Emit a loop over n units that begin at x, and yield the number of each, the elements from it on, and the unit as stored."""
        f, unit = self.f, self.spec.activation.unit
        loop = iter([f.value("i64", 0)]) if self.spec.activation.one_unit and isinstance(n, Value) and not self.spec.by_row else f.loop(n)
        for u in loop:
            left = elements - u * unit
            yield u, left, self.chunk(x + u * (unit * self.element_bytes), left)

    def store(self, codes: Value, data: Value, u: Value) -> Value:
        """Store the u-th unit of codes of a block, whose data begin at `data`, and return what was stored."""
        laid_out = self.isa.laid_out(codes, self.spec.bits)
        (data + u * self.rows * self.unit_bytes).store(laid_out)
        return laid_out

    def set_field(self, act_meta: Value, field: int, value: Value) -> None:
        """Store a block's SCALE, CORRECTION, SUM or OFFSET."""
        at = (self.rows * field + self.row) * 4
        act_meta.store(value, at, 4)


class _CodeSums:
    """The sum of a block's codes, and the correction that its accumulators begin at."""

    def __init__(self, row: _Row) -> None:
        f, self.isa, self.correction = row.f, row.isa, row.spec.correction
        self.codes = f.variable(f.value(row.ints, 0))
        self.pair_sums = f.variable(f.value(row.isa.ints, 0)) if row.spec.paired else None

    def add(self, laid_out: Value, codes: Value) -> None:
        """Add a unit, of which `codes` are integers and `laid_out` the bytes that are stored."""
        self.codes.value = self.codes.value + codes
        if self.pair_sums is not None:
            self.pair_sums.value = self.isa.pair_sum(self.pair_sums.value, laid_out)

    def finish(self) -> tuple[Value, Value]:
        """Return the sum of the codes and the correction, less the pair sums of the activations."""
        codes = self.codes.value.reduce("add")
        correction = codes * self.correction
        return codes, correction if self.pair_sums is None else correction - self.pair_sums.value.reduce("add").shift_signed(1)


class _Int8Row(_Row):
    """Floats that are quantized to int8."""

    def emit(self) -> None:
        f, spec = self.f, self.spec
        if spec.by_row or spec.activation.has_offset:
            row_range = None
            if spec.by_row:
                k = self.get("k")
                row_range = self._range(self.x, k, (k + (spec.activation.unit - 1)) // spec.activation.unit)
            for block in self.blocks():
                self._block(block, *(row_range if row_range is not None else self._range(block.x, block.elements, block.units)))
            return
        # The scales of several blocks at once: that of one is a long chain of operations, and one division takes as long as many.
        extents, scales, inverses = (f.alloca(vector(kind, _SCALES_AT_ONCE), 1, 64) for kind in ("i32", "float", "float"))
        extents.store(
            f.value(vector("i32", _SCALES_AT_ONCE), _ONE_BITS), align=64
        )  # where there are fewer blocks: dividing whatever memory holds may take long
        blocks = self.get("blocks")
        for first in f.loop(blocks, step=_SCALES_AT_ONCE):
            count = f.umin(blocks - first, f.value("i64", _SCALES_AT_ONCE))
            at = f.variable(f.value("i64", 0))
            for block in self.blocks(first, count):
                (extents + at.value).store(self._extent(block.x, block.elements, block.units), align=4)
                at.value = at.value + 4
            bits = extents.load(vector("i32", _SCALES_AT_ONCE), 0, 64)
            scale, inverse = self._scale(bits.bits(vector("float", _SCALES_AT_ONCE)), bits < _INFINITY_BITS)
            scales.store(scale, align=64)
            inverses.store(inverse, align=64)
            at.value = f.value("i64", 0)
            for block in self.blocks(first, count):
                self._block(block, (scales + at.value).load("float", 0, 4), (inverses + at.value).load("float", 0, 4), None)
                at.value = at.value + 4

    def _block(self, block: _RowBlock, scale: Value, inverse: Value, offset: Value | None) -> None:
        """Store the codes and fields of a block. `inverse`: 127 / amax; `offset`: None without."""
        f, spec, sums, act_meta = self.f, self.spec, _CodeSums(self), block.act_meta
        for u, left, raw in self.units(block.x, block.elements, block.units):
            q = self._codes(self.isa.to_float(raw, spec.source), left, inverse, offset)
            sums.add(self.store(q, block.data, u), q)
        codes, start = sums.finish()
        self.set_field(act_meta, SCALE, scale)
        match block_sum := spec.activation.block_sum:
            case "plain" | "bracketed":
                correction = start
            case "folded":
                correction = start.to("float") * scale
            case "biased":
                correction = start + ROUND_BITS
            case _:
                raise unreachable(block_sum, "the conversion of a block's sum,")
        self.set_field(act_meta, CORRECTION, correction)
        match spec.sums:
            case "none":
                pass
            case "codes":
                self.set_field(act_meta, SUM, codes & 0xFFFF if block_sum == "biased" else codes.to("float"))
            case "values":
                values = codes.to("float") * scale
                self.set_field(act_meta, SUM, values if offset is None else f.fma(block.elements.to("float"), offset, values))
            case _:
                raise unreachable(spec.sums, "the sums of activations,")
        if block_sum == "bracketed":
            self.set_field(act_meta, OFFSET, codes * ((1 << 16) - CENTER) + SIGN_BIT)
        if offset is not None:
            self.set_field(act_meta, OFFSET, offset)

    def _extent(self, x: Value, elements: Value, n: Value) -> Value:
        """Return the bits of the largest magnitude of so many elements, in n units: as integers, where NaN is the largest."""
        extent = self.f.variable(self.f.value(self.ints, 0))
        for u, _, raw in self.units(x, elements, n):
            for line in range(0, bytes_of(self.raw_type), 64):
                self.f.prefetch(x + u * bytes_of(self.raw_type) + (_PREFETCH_DISTANCE + line))
            extent.value = self._larger(extent.value, self.isa.to_float(raw, self.spec.source))
        return extent.value.reduce("umax")

    def _larger(self, extent: Value, x: Value) -> Value:
        """Return the greater of the bits of magnitudes and those of |x|."""
        return self.f.call(self.ints, f"llvm.umax.v{self.spec.activation.unit}i32", extent, x.bits(self.ints) & _MAGNITUDE_BITS)

    def _scale(self, extent: Value, finite: Value) -> tuple[Value, Value]:
        """Return the scales of blocks of these largest magnitudes, and their inverses; NaN and 0 where not `finite`."""
        inverse = self.f.value(extent.type, 127.0) / extent
        inverse = (inverse < float("inf")).select(inverse, 0.0)
        return finite.select(extent * (1 / 127), float("nan")), finite.select(inverse, 0.0)

    def _codes(self, x: Value, left: Value, inverse: Value, offset: Value | None) -> Value:
        """Return the int32 codes of a unit, 0 beyond `left` elements."""
        f, unit = self.f, self.spec.activation.unit
        if offset is not None:
            x = x - offset.splat(unit)
        q = f.fma(x, inverse.splat(unit), f.value(self.floats, ROUND)).bits(self.ints) - ROUND_BITS
        if offset is None:
            return q
        # x - offset may be rounded to just beyond the half range; what pads a unit must be 0, not -offset.
        q = q.max_keeping_nan(-127).min_keeping_nan(127)
        inside = f.constant(self.ints, range(unit)) < left.to("i32").splat(unit)
        return inside.select(q, 0)

    def _range(self, x: Value, elements: Value, n: Value) -> tuple[Value, Value, Value | None]:
        """Return the scale, its inverse and the offset of so many elements, in n units."""
        f, spec = self.f, self.spec
        if not spec.activation.has_offset:
            bits = self._extent(x, elements, n)
            return *self._scale(bits.bits("float"), bits < _INFINITY_BITS), None
        largest = f.variable(f.value(self.ints, 0))
        low, high = (f.variable(f.value(self.floats, v)) for v in (float("inf"), float("-inf")))
        for _, left, raw in self.units(x, elements, n):
            v = self.isa.to_float(raw, spec.source)
            largest.value = self._larger(largest.value, v)
            inside = f.constant(self.ints, range(spec.activation.unit)) < left.to("i32").splat(spec.activation.unit)
            low.value = inside.select(v, float("inf")).min_keeping_nan(low.value)
            high.value = inside.select(v, float("-inf")).max_keeping_nan(high.value)
        lo, hi = low.value.fold(Value.min_keeping_nan), high.value.fold(Value.max_keeping_nan)
        extent, offset = (hi - lo) * 0.5, (lo + hi) * 0.5
        finite = largest.value.reduce("umax") < _INFINITY_BITS
        finite = finite & (extent < float("inf")) & (offset < float("inf")) & (offset > float("-inf"))  # either may overflow
        return *self._scale(extent, finite), offset


class _CopiedRow(_Row):
    """int8 codes, which are copied; of the fields, only CORRECTION is stored."""

    def emit(self) -> None:
        for block in self.blocks():
            sums = _CodeSums(self)
            for u, _, codes in self.units(block.x, block.elements, block.units):
                sums.add(self.store(codes, block.data, u), codes.to("i32"))
            self.set_field(block.act_meta, CORRECTION, sums.finish()[1])


class _FloatRow(_Row):
    """Floats for products of float32 or bfloat16; of the fields, only SUM is stored."""

    def emit(self) -> None:
        f, spec = self.f, self.spec
        for block in self.blocks():
            total = f.variable(f.value(self.floats, 0.0))
            for u, _, raw in self.units(block.x, block.elements, block.units):
                if spec.activation.inner == "bf16":
                    if spec.source != "bf16":
                        raise UnsupportedError(f"products of bfloat16 take activations of bfloat16, got {spec.source}: use compute='int8'")
                    pairs = self.isa.bf16_order()
                    order = [8 * g + k for g in range(spec.activation.unit // 8) for pair in pairs for k in pair]
                    (block.data + u * self.rows * self.unit_bytes).store(raw.shuffle(order))
                else:
                    (block.data + u * self.rows * self.unit_bytes).store(self.isa.to_float(raw, spec.source))
                if spec.sums != "none":
                    total.value = total.value + self.isa.to_float(raw, spec.source)
            if spec.sums != "none":
                self.set_field(block.act_meta, SUM, total.value.fold(lambda a, b: a + b))
