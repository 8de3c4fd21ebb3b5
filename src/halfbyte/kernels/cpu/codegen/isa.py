"""What the kernels ask of an instruction set, and the plain vectors that any LLVM target runs.

An ISA says how many float lanes a register has, which optional operations there are, and how three things are done: a unit of products
of bytes (`int8_unit`, which for most is a matter of `dot`), `float_codes` (stored bytes to float weights), and conversions to and from
half-width floats. Which of that is fast says its `tuning`. Compiling for an ISA needs no such machine; `missing` guards running it.

Bytes are little-endian throughout: a layout's four bytes are read as one integer. Big-endian machines are not supported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from halfbyte.errors import KernelError, UnsupportedError, unreachable
from halfbyte.kernels.cpu.codegen.elements import Kind
from halfbyte.kernels.cpu.codegen.ir import Function, Value, bytes_of, lanes_of, vector
from halfbyte.kernels.cpu.codegen.tuning import Tuning
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.layouts.cpu_tiles import PANEL, Geometry
from halfbyte.machine import machine


@dataclass(frozen=True, slots=True)
class Int8Unit:
    """A step of an int8 tile: `k` elements of `rows` rows of activations times `vectors` vectors of outputs in `bits`.

    bits     of a code; stored ones that are indices in a `table` of such have 4
    paired   products of sums (`ISA.multiplies_sums`) are made
    steps    from the unit's address the unit weights of each step, where the layout's data are not unpacked for them
    """

    rows: int
    vectors: int
    bits: int
    k: int
    paired: bool = False
    table: tuple[int, ...] = ()
    steps: Callable[[Value], Iterator[tuple[Value, ...]]] | None = None

    @property
    def stored_bits(self) -> int:
        return 4 if self.table else self.bits


class ISA:
    """The generic path: 128-bit vectors in LLVM's own operations, right on every little-endian target."""

    name = "generic"
    arch = ""  # as in Machine; "" stands for the one at hand
    needs: ClassVar[frozenset[str]] = frozenset()  # LLVM's names of what the CPU must have
    cpu = ""
    features = ""
    attributes = ""  # of each function
    code_model = "jitdefault"
    lanes = 4
    register = ""  # as for Function.pinned, where accumulators are to be pinned
    tuning = Tuning()
    # What the CPU has, and with it which of the optional methods
    half_conversions = False  # instructions for float <-> float16
    sums_shorts = False  # `dot_shorts`
    narrows = False  # `narrowed`
    mixed_dot = False  # `dot` multiplies bytes, of which one is unsigned and the other signed
    multiplies_sums = False  # products of sums where the layout has sums of pairs: see `AVX2`
    bf16_dot = False  # sums of products of bfloat16 pairs in float32
    lane_products = 4  # products of bytes that one `product` sums into each lane
    matrix: ClassVar[ISA | None] = None  # the tiles of a matrix unit: products of bfloat16, and those of bytes from `matrix_rows` rows on
    reads_packed_bits = True  # puts codes of 5 and 6 bits together from their planes
    spreads = False  # `spread_kept`, which the layout of 2:4 sparse weights is for

    @property
    def triple(self) -> str:
        from llvmlite import binding

        if self.arch and self.arch != machine().arch:
            return f"{self.arch}-unknown-linux-gnu"
        return str(binding.get_process_triple())

    def missing(self) -> str | None:
        """Why this machine can't run code for this ISA; None if it can."""
        if self.arch and self.arch != machine().arch:
            return f"it is for {self.arch}, and this machine is {machine().arch}"
        lacking = sorted(self.needs - machine().features)
        return f"the CPU lacks {', '.join(lacking)}" if lacking else None

    def _lacks(self, method: str) -> UnsupportedError:
        """The error for a method that a class has to implement which says that it can do it."""
        return UnsupportedError(f"the instruction set {self.name} has no {method}, which kernels ask of it: this is a fault in halfbyte")

    def pause(self, f: Function) -> None:
        """Leave the core to its other thread for a moment, in a loop that waits."""
        if (self.arch or machine().arch) == "x86_64":
            f.call("void", "llvm.x86.sse2.pause")

    def unit(self, geo: Geometry, inner: Inner) -> int:
        """Elements of K that a tile takes at a time."""
        return geo.unit

    def taking(self, m: int, inner: Inner) -> ISA:
        """The instruction set whose tiles M rows go through: this one, or its unit for products of matrices."""
        # Sums of bfloat16 products depend on the unit that makes them: one does all, so that a row does not depend on the others.
        first = self.tuning.matrix_rows if inner == "int8" else 1
        return self.matrix if self.matrix is not None and inner != "float" and m >= first else self

    @property
    def floats(self) -> str:
        return vector("float", self.lanes)

    @property
    def ints(self) -> str:
        return vector("i32", self.lanes)

    @property
    def shorts(self) -> str:
        """Two int16 in each 32-bit lane."""
        return vector("i16", 2 * self.lanes)

    @property
    def quads(self) -> str:
        """Four bytes in each 32-bit lane."""
        return vector("i8", 4 * self.lanes)

    def spread(self, a: Value, element: str, at: int) -> Value:
        """The element at byte `at` of one of the tile's records of activations, in every lane."""
        return a.load(element, at, bytes_of(element)).splat(self.lanes)

    def pinned(self, f: Function, acc: Value) -> Value:
        return f.pinned(acc, self.register) if self.register and bytes_of(acc.type) == 4 * self.lanes else acc

    def settled(self, f: Function, total: Value) -> Value:
        """A block's sum, computed before what follows: LLVM would put the last products off, and their operands on the stack."""
        return total

    def stored(self, rows: Value, vectors: int) -> Iterator[Value]:
        """One row of the layout's data, 4 bytes of each output: a vector of quads each."""
        size = 4 * self.lanes
        return (rows.load(self.quads, v * size, size) for v in range(vectors))

    # Integer products. A kernel multiplies "unit weights", which differ from the codes by a constant:
    # sum(code * a) = sum(unit weight * a) + correction * sum(a), where code is q if signed, else u.

    def correction(self, bits: int, signed: bool) -> int:
        return -(1 << (bits - 1)) if signed else 0

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        """Stored bytes (quads) -> unit weights for each step, which takes 32 bits of a row's activations."""
        if bits == 8:
            return [stored]
        return [stored & 15, (stored.bits(self.shorts) >> 4).bits(stored.type) & 15]

    def table_weights(self, stored: Value, table: tuple[int, ...]) -> list[Value]:
        """`unit_weights` of 8 bits for indices in a codebook."""
        codes = [code - self.correction(8, signed=True) for code in table]
        return [self.looked_up(nibbles, codes) for nibbles in self.unit_weights(stored, 4)]

    def weights_of(self, stored: Value, unit: Int8Unit) -> list[Value]:
        return self.table_weights(stored, unit.table) if unit.table else self.unit_weights(stored, unit.bits)

    def looked_up(self, indices: Value, table: Sequence[int]) -> Value:
        """Bytes below 16 -> those of the table that they number."""
        found = [indices.fn.value(indices.type, code) for code in table]
        for bit in (1, 2, 4, 8):
            odd = (indices & bit).equals(bit)
            found = [odd.select(second, first) for first, second in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    def steps(self, row: Value, unit: Int8Unit) -> Iterator[tuple[Value, ...]]:
        """The unit weights of one row of the layout's data, step by step: a vector each."""
        by_vector = [self.weights_of(s, unit) for s in self.stored(row, unit.vectors)]
        return zip(*by_vector, strict=True)

    def unit_steps(self, weights: Value, unit: Int8Unit) -> Iterator[tuple[Value, ...]]:
        """The unit weights of a unit, step by step: a vector each."""
        if unit.steps is not None:
            return unit.steps(weights)
        rows = (weights + t * PANEL * 4 for t in range(unit.k * unit.stored_bits // 32))
        return itertools.chain.from_iterable(self.steps(row, unit) for row in rows)

    def activation_bytes(self, inner: Inner, bits: int) -> int:
        """Bytes of one activation as tiles read it, for weights of `bits`."""
        match inner:
            case "int8":
                return 1
            case "bf16":
                return 2
            case "float":
                return 4
            case _:
                raise unreachable(inner, "the size of activations for products of")

    def laid_out(self, codes: Value, bits: int) -> Value:
        """Whole quads of int8 activations in the order that tiles read, given as integers of any width."""
        return codes.to("i8")

    def code_sum(self, f: Function, total: Value, codes: Value, bits: int, paired: bool) -> Value:
        """`total` and what a vector of laid-out activations adds to it, for `row_start`."""
        return self.widen(f, self.dot(f, self.start(f, total, 8), f.value(self.quads, 1), codes.bits(self.quads), 8), total, 8)

    def pair_sum(self, total: Value, codes: Value) -> Value:
        """`total` and twice the products of neighbours among a unit of laid-out activations, for `multiplies_sums`."""
        raise self._lacks("pair_sum")

    def row_start(self, total: Value, bits: int, paired: bool) -> Value:
        """What accumulators of a row begin at, for signed weights, from the lanes' sum of `code_sum`."""
        return total * self.correction(bits, signed=True)

    def ones(self, f: Function, bits: int) -> Value:
        """A step's activations that are all 1."""
        return f.value("i32", 0x01010101).splat(self.lanes)

    def narrow_accumulators(self, bits: int) -> bool:
        """Whether a unit (at most 32 k) has accumulators of its own, which `widen` adds to the block's int32 totals."""
        return bits == 4  # eight steps of 4-bit weights fit an int16 (8 * 2 * 15 * 128 = 30720)

    def start(self, f: Function, total: Value, bits: int) -> Value:
        """The accumulator of a unit at its beginning."""
        return f.value(self.shorts, 0) if self.narrow_accumulators(bits) else total

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        """acc + products of the unit weights of a step with its activations `a`, 32 bits of `laid_out` codes in each lane."""
        w, x = weights.bits(self.shorts), a.bits(self.shorts)
        even, odd = (w & 255) * (x << 8).shift_signed(8), (w >> 8) * x.shift_signed(8)  # each fits: 255 * 128 < 2^15
        return acc + even + odd if bits == 4 else acc + self._pair_sums(even) + self._pair_sums(odd)

    def _pair_sums(self, products: Value) -> Value:
        both = products.bits(self.ints)
        return (both << 16).shift_signed(16) + both.shift_signed(16)

    def product(self, f: Function, acc: Value, weights: Value, a: Value) -> Value:
        """What most of the work with 4-bit weights is made of, for the measure of the machine's peak."""
        return self.dot(f, acc, weights, a, 4)

    def dot_shorts(self, f: Function, acc: Value, a: Value, b: Value) -> Value:
        """acc + the two products of int16 in each int32 lane."""
        raise self._lacks("dot_shorts")

    def picked(self, f: Function, codes: Value, picks: Value) -> Value:
        """Shuffle the bytes within each 16 by the indices in `picks`; 0 where the highest bit of an index is set."""
        raise self._lacks("picked")

    def kept_codes(self, stored: Value, bits: int) -> list[Value]:
        """32 stored bytes of a 2:4 sparse weight -> the codes kept of each 4 k, a byte each."""
        return [stored] if bits == 8 else [stored & 15, (stored.bits("<16 x i16>") >> 4).bits(stored.type) & 15]

    def spread_kept(self, f: Function, kept: Value, places: Value, zeros: Value) -> Value:
        """The 32 codes in those of 64 bytes whose bit of `places`, an i64, is 1; what `zeros` has in the others."""
        raise self._lacks("spread_kept")

    def narrowed(self, f: Function, reals: Sequence[Value]) -> Value:
        """Four vectors of floats that are at most 127 as bytes, rounded to the nearest, ties to even; less than -128 becomes that."""
        raise self._lacks("narrowed")

    def bf16_order(self) -> tuple[tuple[int, int], ...]:
        """Which two of eight k are a pair of bfloat16, for each of the vectors that `bf16_codes` gives; for `bf16_dot`."""
        raise self._lacks("bf16_order")

    def bf16_codes(self, f: Function, stored: Value, signed: bool, table: tuple[int, ...] = ()) -> list[Value]:
        """Stored 4-bit codes (quads), or indices in a table of them -> pairs of bfloat16 weights for each of `bf16_order`, exactly."""
        raise self._lacks("bf16_codes")

    def bf16_pairs(self, f: Function, first: Value, second: Value) -> Value:
        """float, float -> int32 lanes: both rounded to bfloat16, the first one in the low half; for `bf16_dot`."""
        raise self._lacks("bf16_pairs")

    def bf16_multiply(self, f: Function, acc: Value, weights: Value, a: Value) -> Value:
        """acc + the two products of bfloat16 in each lane."""
        raise self._lacks("bf16_multiply")

    def byte_products(self, f: Function, unsigned: Value, signed: Value) -> Value:
        """Two products of bytes in each int16, summed; where the sum is none, the nearest."""
        raise self._lacks("byte_products")

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        """The block's int32 total after a unit whose accumulator is `acc`."""
        return total + self._pair_sums(acc) if self.narrow_accumulators(bits) else acc

    def transposed_accumulators(self, unit: Int8Unit, totals: list[Value]) -> list[Value]:
        """A block's int32 totals (row by row, a vector each) to the form in which `int8_unit` keeps them, and back again."""
        return totals

    def int8_unit(
        self, f: Function, unit: Int8Unit, weights: Value, a: Sequence[Value], totals: list[Value], weight_sums: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """The totals after one unit; `weight_sums` (a vector each, or none) are those of one more row, which is all ones.

        weights, a   address of the unit's data at the tile's first output, and of each row's activations
        """
        accs = [self.start(f, t, unit.bits) for t in totals]
        sums = [self.start(f, t, unit.bits) for t in weight_sums]
        ones = self.ones(f, unit.bits)
        for at, step in enumerate(self.unit_steps(weights, unit)):
            for i in range(unit.rows):
                x = self.spread(a[i], "i32", 4 * at)
                for v, w in enumerate(step):
                    n = i * unit.vectors + v
                    accs[n] = self.pinned(f, self.dot(f, accs[n], w, x, unit.bits))
            sums = [self.dot(f, acc, w, ones, unit.bits) for acc, w in zip(sums, step, strict=bool(sums))]
            f.fence()
        widened = [self.widen(f, acc, t, unit.bits) for acc, t in zip(accs, totals, strict=True)]
        return widened, [self.widen(f, acc, t, unit.bits) for acc, t in zip(sums, weight_sums, strict=True)]

    # Floating point

    def float_codes(self, f: Function, stored: Value, bits: int, signed: bool) -> Iterator[tuple[int, Value]]:
        """Stored bytes (quads) -> (k within them, codes as floats in each lane), exactly; each made when it is asked for."""
        words = stored.bits(self.ints)
        if signed:  # from excess to two's complement; the sign is extended below
            words = words ^ (0x88888888 if bits == 4 else 0x80808080)
        for s in range(32 // bits):
            k = s if bits == 8 else (s >> 1) + 4 * (s & 1)
            if signed:
                field = (words << (32 - bits * (s + 1))).shift_signed(32 - bits)
            else:
                field = (words >> (bits * s)) & ((1 << bits) - 1)
            yield k, field.to("float")

    def float_weights(self, f: Function, stored: Value, unit: Int8Unit, signed: bool) -> Iterator[tuple[int, Value]]:
        return self.float_table(f, stored, unit.table) if unit.table else self.float_codes(f, stored, unit.bits, signed)

    def float_table(self, f: Function, stored: Value, table: tuple[int, ...]) -> Iterator[tuple[int, Value]]:
        """`float_codes` for indices in a codebook."""
        for first, indices in zip((0, 4), (stored & 15, (stored.bits(self.shorts) >> 4).bits(stored.type) & 15), strict=True):
            for k, code in self.float_codes(f, self.looked_up(indices, [code + 128 for code in table]), 8, signed=True):
                yield first + k, code

    def to_float(self, raw: Value, kind: Kind) -> Value:
        """Lanes of `kind`, as they are stored -> float, exactly."""
        match kind:
            case "f32":
                return raw
            case "bf16":
                return (raw.to("i32", unsigned=True) << 16).bits(vector("float", lanes_of(raw.type)))
            case "f16":
                return self._half_to_float(raw)
            case "i8":
                return raw.to("i32").to("float")
            case _:
                raise unreachable(kind, "the conversion to float32 of")

    def _half_to_float(self, raw: Value) -> Value:
        if self.half_conversions:
            return raw.bits(vector("half", lanes_of(raw.type))).to("float")
        bits = raw.to("i32", unsigned=True)
        # The exponent moves from bias 15 to 127 by a multiplication, which is right for subnormal halves too.
        magnitude = ((bits & 0x7FFF) << 13).bits(vector("float", lanes_of(raw.type))) * 2.0**112
        infinite = (bits & 0x7C00).equals(0x7C00)
        out = infinite.select((bits & 0x3FF) << 13 | 0x7F800000, magnitude.bits(bits.type))
        return (out | (bits & 0x8000) << 16).bits(magnitude.type)

    def from_float(self, value: Value, kind: Kind) -> Value:
        """float -> lanes of `kind`, rounded to nearest even; NaN stays NaN. f16 needs `half_conversions`."""
        match kind:
            case "f32":
                return value
            case "f16":
                return value.to("half").bits(vector("i16", lanes_of(value.type)))
            case "bf16":
                return self._float_to_bfloat(value)
            case "i8":
                raise KernelError("float32 is converted to int8 with a scale, by the kernel that has one: this is a fault in halfbyte")
            case _:
                raise unreachable(kind, "the conversion from float32 to")

    def _float_to_bfloat(self, value: Value) -> Value:
        bits = value.bits(vector("i32", lanes_of(value.type)))
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return (nan.select(bits | 0x400000, rounded) >> 16).to("i16")
