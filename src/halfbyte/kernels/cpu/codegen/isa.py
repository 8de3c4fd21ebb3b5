"""What the code generators ask of an instruction set, and its generic implementation: plain vectors that any LLVM target runs.

An `ISA` has the number of float lanes of a register, flags of which optional methods are implemented, and methods that emit: a unit of
products of bytes (`int8_unit`, for most classes a matter of `dot`), float weights from stored bytes (`float_codes`), and conversions to and
from 16-bit floats. Its `tuning` says what is fast. Compiling for an ISA needs no such machine; `missing` guards running it.

Words of the methods: a vector of `stored` bytes has 4 bytes of each of `lanes` outputs, that is 4 codes of 8 bits or 8 of 4 bits. `unit
weights` are these codes as products take them, one vector for each `step` of 32 bits of a row's activations. The three types of a register:
`floats`, `ints` (an int32 in each lane), and `shorts` and `quads` (two int16 and four bytes in each of these).

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
    """A unit of an int8 tile: `k` elements of `rows` rows of activations times `vectors` vectors of outputs.

    Attributes:
        rows, vectors, k: Sizes.
        bits: Bits of a code.
        paired: Products of sums are taken (`ISA.multiplies_sums`).
        table: Codebook of which stored codes are 4-bit indices; empty: they are codes.
        steps: Yields the unit weights of each step from the unit's address, in place of `ISA.unit_steps`; None: that does.
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
    """The generic instruction set: 128-bit vectors in LLVM's own operations, right on every little-endian target.

    Attributes:
        name: As HALFBYTE_ISA spells it.
        arch: As in Machine; "" stands for this machine's.
        needs: LLVM's names of what the CPU must have.
        cpu, features, code_model: What LLVM compiles for.
        attributes: Of each function.
        lanes: Floats of a vector register.
        register: Class of registers that accumulators are pinned to (`Function.pinned`); "": they are not pinned.
        tuning: The numbers that it is fast with.
        half_conversions: There are instructions for float <-> float16.
        sums_shorts: `dot_shorts` is implemented.
        narrows: `narrowed` is implemented.
        mixed_dot: `dot` multiplies unsigned by signed bytes.
        multiplies_sums: Tiles take products of sums where the layout has pair sums (`AVX2`): `pair_sum` is implemented.
        bf16_dot: The `bf16_` methods are implemented.
        lane_products: Products of bytes that one `product` sums into each lane.
        matrix: The instruction set of a matrix unit, for products of bfloat16, and those of bytes from `Tuning.matrix_rows` rows on.
        reads_packed_bits: Codes of 5 and 6 bits can be put together from their planes.
        spreads: `spread_kept` is implemented, which the layout of 2:4 sparse weights needs.
    """

    name = "generic"
    arch = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    cpu = ""
    features = ""
    attributes = ""
    code_model = "jitdefault"
    lanes = 4
    register = ""
    tuning = Tuning()
    half_conversions = False
    sums_shorts = False
    narrows = False
    mixed_dot = False
    multiplies_sums = False
    bf16_dot = False
    lane_products = 4
    matrix: ClassVar[ISA | None] = None
    reads_packed_bits = True
    spreads = False

    @property
    def triple(self) -> str:
        from llvmlite import binding

        if self.arch and self.arch != machine().arch:
            return f"{self.arch}-unknown-linux-gnu"
        return str(binding.get_process_triple())

    def missing(self) -> str | None:
        """Return why this machine can't run code for this ISA; None if it can."""
        if self.arch and self.arch != machine().arch:
            return f"it is for {self.arch}, and this machine is {machine().arch}"
        lacking = sorted(self.needs - machine().features)
        return f"the CPU lacks {', '.join(lacking)}" if lacking else None

    def _lacks(self, method: str) -> UnsupportedError:
        """Return the error for an optional method whose flag is set in a class that does not implement it."""
        return UnsupportedError(f"the instruction set {self.name} has no {method}, which kernels ask of it: this is a fault in halfbyte")

    def pause(self, f: Function) -> None:
        """Emit a hint for a loop that waits: the core's other hardware thread goes first."""
        if (self.arch or machine().arch) == "x86_64":
            f.call("void", "llvm.x86.sse2.pause")

    def unit(self, geo: Geometry, inner: Inner) -> int:
        """Return the elements of K that a tile takes at a time."""
        return geo.unit

    def for_rows(self, m: int, inner: Inner) -> ISA:
        """Return the instruction set whose tiles compute M rows: this one, or that of its matrix unit."""
        # Sums of bfloat16 products differ between the two: the matrix unit computes all, so that a row does not depend on the others.
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
        """Return the element `at` bytes behind the address `a` in laid-out activations, in every lane."""
        return a.load(element, at, bytes_of(element)).splat(self.lanes)

    def pinned(self, f: Function, acc: Value) -> Value:
        """Return an accumulator, pinned to a register where the instruction set wants that (`Function.pinned`)."""
        return f.pinned(acc, self.register) if self.register and bytes_of(acc.type) == 4 * self.lanes else acc

    def settled(self, f: Function, total: Value) -> Value:
        """Return a block's sum, computed before what follows: LLVM may put off the last products, and keep their operands on the stack."""
        return total

    def stored(self, rows: Value, vectors: int) -> Iterator[Value]:
        """Yield vectors of one row of the layout's data at `rows`, 4 bytes of each output."""
        size = 4 * self.lanes
        return (rows.load(self.quads, v * size, size) for v in range(vectors))

    # Integer products. Unit weights differ from the codes by a constant:
    # sum(code * a) = sum(unit weight * a) + correction * sum(a), where code is q if signed, else u.

    def correction(self, bits: int, signed: bool) -> int:
        """Return what a code is more than its unit weight."""
        return -(1 << (bits - 1)) if signed else 0

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        """Return the unit weights of a vector of stored codes, one vector for each step."""
        if bits == 8:
            return [stored]
        return [stored & 15, (stored.bits(self.shorts) >> 4).bits(stored.type) & 15]

    def table_weights(self, stored: Value, table: tuple[int, ...]) -> list[Value]:
        """Return the `unit_weights` of 8 bits of a vector of stored indices in a codebook."""
        codes = [code - self.correction(8, signed=True) for code in table]
        return [self.looked_up(nibbles, codes) for nibbles in self.unit_weights(stored, 4)]

    def weights_of(self, stored: Value, unit: Int8Unit) -> list[Value]:
        """Return the unit weights of a vector of stored codes or indices."""
        return self.table_weights(stored, unit.table) if unit.table else self.unit_weights(stored, unit.bits)

    def looked_up(self, indices: Value, table: Sequence[int]) -> Value:
        """Return the bytes of a table of 16 that bytes below 16 are the indices of."""
        found = [indices.fn.value(indices.type, code) for code in table]
        for bit in (1, 2, 4, 8):
            odd = (indices & bit).equals(bit)
            found = [odd.select(second, first) for first, second in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    def steps(self, row: Value, unit: Int8Unit) -> Iterator[tuple[Value, ...]]:
        """Yield the unit weights of one row of the layout's data, step by step, one vector of each vector of outputs."""
        by_vector = [self.weights_of(s, unit) for s in self.stored(row, unit.vectors)]
        return zip(*by_vector, strict=True)

    def unit_steps(self, weights: Value, unit: Int8Unit) -> Iterator[tuple[Value, ...]]:
        """Yield the unit weights of a unit at the address `weights`, as `steps` does."""
        if unit.steps is not None:
            return unit.steps(weights)
        rows = (weights + t * PANEL * 4 for t in range(unit.k * unit.stored_bits // 32))
        return itertools.chain.from_iterable(self.steps(row, unit) for row in rows)

    def activation_bytes(self, inner: Inner, bits: int) -> int:
        """Return the bytes of one activation as tiles read it, for weights of `bits`."""
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
        """Return int8 activations, whole quads of them as integers of any width, in the type and order that tiles read."""
        return codes.to("i8")

    def code_sum(self, f: Function, total: Value, codes: Value, bits: int, paired: bool) -> Value:
        """Return `total` plus what a vector of laid-out activations adds to it; `row_start` takes the sum of its lanes."""
        return self.widen(f, self.dot(f, self.start(f, total, 8), f.value(self.quads, 1), codes.bits(self.quads), 8), total, 8)

    def pair_sum(self, total: Value, codes: Value) -> Value:
        """Return `total` plus twice the products of neighbours among a unit of laid-out activations, for `multiplies_sums`."""
        raise self._lacks("pair_sum")

    def row_start(self, total: Value, bits: int, paired: bool) -> Value:
        """Return what accumulators of a row begin at, for signed weights. `total`: sum of the lanes of `code_sum`."""
        return total * self.correction(bits, signed=True)

    def ones(self, f: Function, bits: int) -> Value:
        """Return the activations of a step that are all 1."""
        return f.value("i32", 0x01010101).splat(self.lanes)

    def narrow_accumulators(self, bits: int) -> bool:
        """Return whether a unit (at most 32 k) has accumulators of its own, which `widen` adds to the block's int32 totals."""
        return bits == 4  # eight steps of 4-bit weights fit an int16 (8 * 2 * 15 * 128 = 30720)

    def start(self, f: Function, total: Value, bits: int) -> Value:
        """Return the accumulator before the first step of a unit. `total`: the block's int32 total."""
        return f.value(self.shorts, 0) if self.narrow_accumulators(bits) else total

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        """Return acc + the products of the unit weights of a step with its activations, 32 bits of `laid_out` codes in each lane of a."""
        w, x = weights.bits(self.shorts), a.bits(self.shorts)
        even, odd = (w & 255) * (x << 8).shift_signed(8), (w >> 8) * x.shift_signed(8)  # each fits: 255 * 128 < 2^15
        return acc + even + odd if bits == 4 else acc + self._pair_sums(even) + self._pair_sums(odd)

    def _pair_sums(self, products: Value) -> Value:
        both = products.bits(self.ints)
        return (both << 16).shift_signed(16) + both.shift_signed(16)

    def product(self, f: Function, acc: Value, weights: Value, a: Value) -> Value:
        """Return acc + the products that most of the work with 4-bit weights consists of: `probe.py` measures their rate."""
        return self.dot(f, acc, weights, a, 4)

    def dot_shorts(self, f: Function, acc: Value, a: Value, b: Value) -> Value:
        """Return acc + the two products of int16 in each int32 lane."""
        raise self._lacks("dot_shorts")

    def picked(self, f: Function, codes: Value, picks: Value) -> Value:
        """Shuffle the bytes within each 16 by the indices in `picks`; 0 where the highest bit of an index is set."""
        raise self._lacks("picked")

    def kept_codes(self, stored: Value, bits: int) -> list[Value]:
        """Return the codes that 32 stored bytes of a 2:4 sparse weight keep of each 4 k, a byte each."""
        return [stored] if bits == 8 else [stored & 15, (stored.bits("<16 x i16>") >> 4).bits(stored.type) & 15]

    def spread_kept(self, f: Function, kept: Value, mask: Value, zeros: Value) -> Value:
        """Return 64 bytes: the 32 kept codes in their order where the bit of `mask`, an i64, is 1, and those of `zeros` elsewhere."""
        raise self._lacks("spread_kept")

    def narrowed(self, f: Function, reals: Sequence[Value]) -> Value:
        """Return four vectors of floats that are at most 127 as bytes, rounded to nearest, ties to even; less than -128 becomes -128."""
        raise self._lacks("narrowed")

    def bf16_order(self) -> tuple[tuple[int, int], ...]:
        """Return which two of eight k are a pair of bfloat16, for each of the vectors of `bf16_codes`."""
        raise self._lacks("bf16_order")

    def bf16_codes(self, f: Function, stored: Value, signed: bool, table: tuple[int, ...] = ()) -> list[Value]:
        """Return a vector of stored 4-bit codes, or indices in a table, as pairs of bfloat16 for each of `bf16_order`, exactly."""
        raise self._lacks("bf16_codes")

    def bf16_pairs(self, f: Function, first: Value, second: Value) -> Value:
        """float, float -> int32 lanes: both rounded to bfloat16, the first one in the low half; for `bf16_dot`."""
        raise self._lacks("bf16_pairs")

    def bf16_multiply(self, f: Function, acc: Value, weights: Value, a: Value) -> Value:
        """Return acc + the two products of bfloat16 in each lane."""
        raise self._lacks("bf16_multiply")

    def byte_products(self, f: Function, unsigned: Value, signed: Value) -> Value:
        """Return sums of two products of bytes in each int16, saturated."""
        raise self._lacks("byte_products")

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        """Return the block's int32 total after a unit: `total` before it, and the unit's accumulator."""
        return total + self._pair_sums(acc) if self.narrow_accumulators(bits) else acc

    def transposed_accumulators(self, unit: Int8Unit, totals: list[Value]) -> list[Value]:
        """Return a block's int32 totals (row by row, a vector each) in the order that `int8_unit` takes, or these in the plain one."""
        return totals

    def int8_unit(
        self, f: Function, unit: Int8Unit, weights: Value, a: Sequence[Value], totals: list[Value], weight_sums: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Multiply one unit.

        Args:
            f: Emits the instructions.
            unit: Its sizes.
            weights: Address of the unit's data at the tile's first output.
            a: Address of each row's activations.
            totals: The block's int32 totals, in the order of `transposed_accumulators`.
            weight_sums: Totals of one more row, whose activations are all 1, a vector each; or none.

        Returns:
            The new totals and weight sums.
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
        """Yield (k, the k-th codes as floats, exactly) of a vector of stored codes; each is emitted when it is asked for."""
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
        """Return the `float_codes` of stored codes or indices."""
        return self.float_table(f, stored, unit.table) if unit.table else self.float_codes(f, stored, unit.bits, signed)

    def float_table(self, f: Function, stored: Value, table: tuple[int, ...]) -> Iterator[tuple[int, Value]]:
        """Yield the `float_codes` of stored indices in a codebook."""
        for first, indices in zip((0, 4), (stored & 15, (stored.bits(self.shorts) >> 4).bits(stored.type) & 15), strict=True):
            for k, code in self.float_codes(f, self.looked_up(indices, [code + 128 for code in table]), 8, signed=True):
                yield first + k, code

    def to_float(self, raw: Value, kind: Kind) -> Value:
        """Return lanes of `kind`, as they are stored, as floats, exactly."""
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
        """Return floats as lanes of `kind`, rounded to nearest even; NaN stays NaN. f16 needs `half_conversions`."""
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
