"""Activations, one row at a time, into the order that `tile.py` reads: quantized to int8, or as floats.

    symmetric, over a block (or the whole row):  scale = amax * (1/127),  q = round(x * (127 / amax))
    with an offset:                              offset = (lo + hi) / 2,  scale and q as above for x - offset

Each step is float32, rounded to nearest; x * (127 / amax) is rounded to an integer once, ties to even. Where amax is 0, or
so small that 127 / amax overflows, every q is 0. A NaN or infinity, also where lo + hi or hi - lo overflows, makes the scale NaN
and with it the row's results.
`kernels/reference.py` has the same steps, and the codes are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from halfbyte.errors import UnsupportedError, unreachable
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, bytes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, function
from halfbyte.kernels.cpu.linear.block_end import CORRECTION, OFFSET, SCALE, SUM
from halfbyte.kernels.cpu.linear.bracketed import CENTER, SIGN_BIT
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ROUND, ROUND_BITS, ActivationSpec

_TOGETHER = 16  # blocks whose scales are found at once
_ONE_BITS = 0x3F800000  # of 1.0
_AHEAD = 4096  # bytes: from where the memory that a row is read from is asked for


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the conversion of a row is compiled for.

    source      "f32", "bf16" or "f16", or "i8": already quantized, to be copied
    activation  what tiles read
    bits        of a weight's code
    paired      tiles make products of sums
    by_row      one scale is for the whole row
    correction  what the sum of a block's codes is multiplied by for the int32 accumulators (`ISA.correction`)
    sums        what `sum` holds for each block: "none", "codes" (sum of q), "values" (sum of x as the kernel sees it)
    zeroed      behind a row lie zeros up to a whole unit, and no other unit is short: all may be read whole
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
    """A function of (arguments, x, tile, rows of the tile, which of them)."""
    _row_of(spec)(spec, isa, f).emit()


def _row_of(spec: RowSpec) -> type[_Row]:
    if spec.source == "i8":
        return _CopiedRow
    match spec.activation.inner:
        case "int8":
            return _Int8Row
        case "float" | "bf16":
            return _FloatRow
        case _:
            raise unreachable(spec.activation.inner, "the layout of activations for products of")


class _Row(Emitter):
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
        self.buffer = f.alloca(self.raw_type, 1, 64)

    def blocks(self, first: Value | None = None, count: Value | None = None) -> Iterator[tuple[Value, Value, Value, Value, Value]]:
        """For each block, or `count` from `first` on: its x, its real elements, its units, and where this row's data and the record's
        fields lie."""
        f, spec = self.f, self.spec
        blocks, units, last_units, block, last = map(self.get, ("blocks", "units", "last_units", "block", "last"))
        first, stop = (f.value("i64", 0), blocks) if first is None or count is None else (first, first + count)
        record_bytes = self.rows * (units * self.unit_bytes + 4 * FIELDS)
        x, record = f.variable(self.x + first * block * self.element_bytes), f.variable(self.tile + first * record_bytes)
        for b in f.loop(stop, first):
            ends = (b + 1).equals(blocks)
            real = ends.select(last, block)
            n = f.value("i64", 1) if spec.activation.one_unit else ends.select(last_units, units)
            act_meta = record.value + n * self.rows * self.unit_bytes
            yield x.value, real, n, record.value + self.row * self.unit_bytes, act_meta
            x.value = x.value + block * self.element_bytes
            record.value = act_meta + self.rows * (4 * FIELDS)

    def emit(self) -> None:
        raise NotImplementedError

    def chunk(self, x: Value, left: Value) -> Value:
        """A unit of x as stored; where only `left` elements are left, the others are zero and not read."""
        f, n = self.f, self.spec.activation.unit
        if self.spec.zeroed:
            return x.load(self.raw_type)
        short = left < n
        with f.when(short):
            self.buffer.store(f.value(self.raw_type, 0), align=64)
            for i in f.loop(left):
                at = i * self.element_bytes
                self.buffer.store(x.load(self.element, at), at)
        return short.select(self.buffer, x).load(self.raw_type)

    def units(self, x: Value, real: Value, n: Value | int) -> Iterator[tuple[Value, Value, Value]]:
        """(index, elements left, x as stored) of each unit of a block."""
        f, unit = self.f, self.spec.activation.unit
        loop = iter([f.value("i64", 0)]) if self.spec.activation.one_unit and isinstance(n, Value) and not self.spec.by_row else f.loop(n)
        for u in loop:
            left = real - u * unit
            yield u, left, self.chunk(x + u * (unit * self.element_bytes), left)

    def store(self, codes: Value, data: Value, u: Value) -> Value:
        """A unit of codes to its place; what was stored."""
        laid_out = self.isa.laid_out(codes, self.spec.bits)
        (data + u * self.rows * self.unit_bytes).store(laid_out)
        return laid_out

    def field(self, act_meta: Value, which: int, value: Value) -> None:
        at = (self.rows * which + self.row) * 4
        act_meta.store(value, at, 4)


class _CodeSums:
    """Sums of a block's codes, and what its accumulators begin at."""

    def __init__(self, row: _Row) -> None:
        f, self.isa, self.correction = row.f, row.isa, row.spec.correction
        self.codes = f.variable(f.value(row.ints, 0))
        self.pair_sums = f.variable(f.value(row.isa.ints, 0)) if row.spec.paired else None

    def add(self, laid_out: Value, codes: Value) -> None:
        self.codes.value = self.codes.value + codes
        if self.pair_sums is not None:
            self.pair_sums.value = self.isa.pair_sum(self.pair_sums.value, laid_out)

    def found(self) -> tuple[Value, Value]:
        codes = self.codes.value.reduce("add")
        start = codes * self.correction
        return codes, start if self.pair_sums is None else start - self.pair_sums.value.reduce("add").shift_signed(1)


class _Int8Row(_Row):
    def emit(self) -> None:
        f, spec = self.f, self.spec
        if spec.by_row or spec.activation.has_offset:
            whole = None
            if spec.by_row:
                k = self.get("k")
                whole = self._range(self.x, k, (k + (spec.activation.unit - 1)) // spec.activation.unit)
            for block in self.blocks():
                self._block(*block, *(whole if whole is not None else self._range(*block[:3])))
            return
        # The scales of several blocks at once: one block's are a long chain of operations, and one division takes as long as many.
        extents, scales, inverses = (f.alloca(vector(kind, _TOGETHER), 1, 64) for kind in ("i32", "float", "float"))
        extents.store(f.value(vector("i32", _TOGETHER), _ONE_BITS), align=64)  # of fewer: dividing what lies there by chance may take long
        blocks = self.get("blocks")
        for first in f.loop(blocks, step=_TOGETHER):
            count = f.umin(blocks - first, f.value("i64", _TOGETHER))
            at = f.variable(f.value("i64", 0))
            for x, real, n, _, _ in self.blocks(first, count):
                (extents + at.value).store(self._extent(x, real, n), align=4)
                at.value = at.value + 4
            bits = extents.load(vector("i32", _TOGETHER), 0, 64)
            scale, inverse = self._scale(bits.bits(vector("float", _TOGETHER)), bits < 0x7F800000)
            scales.store(scale, align=64)
            inverses.store(inverse, align=64)
            at.value = f.value("i64", 0)
            for block in self.blocks(first, count):
                self._block(*block, (scales + at.value).load("float", 0, 4), (inverses + at.value).load("float", 0, 4), None)
                at.value = at.value + 4

    def _block(
        self, x: Value, real: Value, n: Value, data: Value, act_meta: Value, scale: Value, inverse: Value, offset: Value | None
    ) -> None:
        f, spec, sums = self.f, self.spec, _CodeSums(self)
        for u, left, raw in self.units(x, real, n):
            q = self._codes(self.isa.to_float(raw, spec.source), left, inverse, offset)
            sums.add(self.store(q, data, u), q)
        codes, start = sums.found()
        self.field(act_meta, SCALE, scale)
        match block_sum := spec.activation.block_sum:
            case "plain" | "bracketed":
                correction = start
            case "folded":
                correction = start.to("float") * scale
            case "biased":
                correction = start + ROUND_BITS
            case _:
                raise unreachable(block_sum, "the conversion of a block's sum,")
        self.field(act_meta, CORRECTION, correction)
        match spec.sums:
            case "none":
                pass
            case "codes":
                self.field(act_meta, SUM, codes & 0xFFFF if block_sum == "biased" else codes.to("float"))
            case "values":
                values = codes.to("float") * scale
                self.field(act_meta, SUM, values if offset is None else f.fma(real.to("float"), offset, values))
            case _:
                raise unreachable(spec.sums, "the sums of activations,")
        if block_sum == "bracketed":
            self.field(act_meta, OFFSET, codes * ((1 << 16) - CENTER) + SIGN_BIT)
        if offset is not None:
            self.field(act_meta, OFFSET, offset)

    def _extent(self, x: Value, real: Value, n: Value) -> Value:
        """The bits of the largest magnitude of `real` elements from x on: the order of integers is the same, and NaN is the largest."""
        size = self.f.variable(self.f.value(self.ints, 0))
        for u, _, raw in self.units(x, real, n):
            for line in range(0, bytes_of(self.raw_type), 64):
                self.f.prefetch(x + u * bytes_of(self.raw_type) + (_AHEAD + line))
            size.value = self._greater(size.value, self.isa.to_float(raw, self.spec.source))
        return size.value.reduce("umax")

    def _greater(self, size: Value, x: Value) -> Value:
        return self.f.call(self.ints, f"llvm.umax.v{self.spec.activation.unit}i32", size, x.bits(self.ints) & 0x7FFFFFFF)

    def _scale(self, extent: Value, finite: Value) -> tuple[Value, Value]:
        """Scales of extents, and their inverses."""
        inverse = self.f.value(extent.type, 127.0) / extent
        inverse = (inverse < float("inf")).select(inverse, 0.0)
        return finite.select(extent * (1 / 127), float("nan")), finite.select(inverse, 0.0)

    def _codes(self, x: Value, left: Value, inverse: Value, offset: Value | None) -> Value:
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

    def _range(self, x: Value, real: Value, n: Value) -> tuple[Value, Value, Value | None]:
        """Scale, its inverse and the offset of `real` elements from x on."""
        f, spec = self.f, self.spec
        if not spec.activation.has_offset:
            bits = self._extent(x, real, n)
            return *self._scale(bits.bits("float"), bits < 0x7F800000), None
        size = f.variable(f.value(self.ints, 0))
        low, high = (f.variable(f.value(self.floats, v)) for v in (float("inf"), float("-inf")))
        for _, left, raw in self.units(x, real, n):
            v = self.isa.to_float(raw, spec.source)
            size.value = self._greater(size.value, v)
            inside = f.constant(self.ints, range(spec.activation.unit)) < left.to("i32").splat(spec.activation.unit)
            low.value = inside.select(v, float("inf")).min_keeping_nan(low.value)
            high.value = inside.select(v, float("-inf")).max_keeping_nan(high.value)
        lo, hi = low.value.fold(Value.min_keeping_nan), high.value.fold(Value.max_keeping_nan)
        extent, offset = (hi - lo) * 0.5, (lo + hi) * 0.5
        finite = size.value.reduce("umax") < 0x7F800000
        finite = finite & (extent < float("inf")) & (offset < float("inf")) & (offset > float("-inf"))  # either may overflow
        return *self._scale(extent, finite), offset


class _CopiedRow(_Row):
    """Codes that are there already: only the sums for the accumulators are needed."""

    def emit(self) -> None:
        for x, real, n, data, act_meta in self.blocks():
            sums = _CodeSums(self)
            for u, _, codes in self.units(x, real, n):
                sums.add(self.store(codes, data, u), codes.to("i32"))
            self.field(act_meta, CORRECTION, sums.found()[1])


class _FloatRow(_Row):
    def emit(self) -> None:
        f, spec = self.f, self.spec
        for x, real, n, data, act_meta in self.blocks():
            total = f.variable(f.value(self.floats, 0.0))
            for u, _, raw in self.units(x, real, n):
                if spec.activation.inner == "bf16":
                    if spec.source != "bf16":
                        raise UnsupportedError(f"products of bfloat16 take activations of bfloat16, got {spec.source}: use compute='int8'")
                    pair_sums = self.isa.bf16_order()
                    order = [8 * g + k for g in range(spec.activation.unit // 8) for pair in pair_sums for k in pair]
                    (data + u * self.rows * self.unit_bytes).store(raw.shuffle(order))
                else:
                    (data + u * self.rows * self.unit_bytes).store(self.isa.to_float(raw, spec.source))
                if spec.sums != "none":
                    total.value = total.value + self.isa.to_float(raw, spec.source)
            if spec.sums != "none":
                self.field(act_meta, SUM, total.value.fold(lambda a, b: a + b))
