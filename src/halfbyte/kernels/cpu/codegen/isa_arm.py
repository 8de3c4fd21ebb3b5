"""64-bit Arm: NEON, its dot products of bytes (Armv8.2 dotprod), its products of 2 x 8 matrices (i8mm), and longer vectors (SVE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from halfbyte.kernels.cpu.codegen import tuning as tunings
from halfbyte.kernels.cpu.codegen.ir import Function, Value, bytes_of, lanes_of, mangled
from halfbyte.kernels.cpu.codegen.isa import ISA, Int8Unit
from halfbyte.layouts.cpu_tiles import PANEL
from halfbyte.machine import machine


class Neon(ISA):
    """128 bits; products of bytes are summed in int16 (`smlal`), those of 8-bit weights in int32 pairs (`sadalp`)."""

    name = "neon"
    arch = "aarch64"
    needs: ClassVar[frozenset[str]] = frozenset({"neon"})
    features = "+neon"
    half_conversions = True
    register = "w"
    tuning = tunings.NEON

    def spread(self, a: Value, element: str, at: int) -> Value:
        # Products take a lane of a register as an operand for free: load all 16 bytes. Beyond a short unit they are still the record's.
        size = bytes_of(element)
        lanes = 16 // size
        return a.load(f"<{lanes} x {element}>", at & ~15, size).shuffle([at % 16 // size] * self.lanes)

    def correction(self, bits: int, signed: bool) -> int:
        if bits == 4:
            return super().correction(bits, signed)
        return 0 if signed else 128  # both factors are signed: the unit weight of 8 bits is u - 128

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        return [stored ^ 128] if bits == 8 else [stored & 15, stored >> 4]

    def table_weights(self, stored: Value, table: tuple[int, ...]) -> list[Value]:
        return [self.looked_up(indices, table) for indices in self.unit_weights(stored, 4)]

    def looked_up(self, indices: Value, table: Sequence[int]) -> Value:
        if lanes_of(indices.type) != 16:
            return super().looked_up(indices, table)
        return indices.fn.call(indices.type, "llvm.aarch64.neon.tbl1.v16i8", indices.fn.constant(indices.type, table), indices)

    def narrow_accumulators(self, bits: int) -> bool:
        return True

    def start(self, f: Function, total: Value, bits: int) -> Value:
        # Eight steps of 4-bit weights fit an int16 (8 * 15 * 128 = 15360).
        return f.value("<16 x i16>" if bits == 4 else "<8 x i32>", 0)

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        products = weights.to("i16") * a.bits(self.quads).to("i16")
        return acc + products if bits == 4 else acc + self._widened_pairs(f, products)

    def pinned(self, f: Function, acc: Value) -> Value:
        if bytes_of(acc.type) <= 4 * self.lanes:
            return super().pinned(f, acc)
        count = lanes_of(acc.type) // 2
        low, high = (super(Neon, self).pinned(f, acc.shuffle(range(h, h + count))) for h in (0, count))
        return low.shuffle(range(2 * count), high)

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        pairs = self._widened_pairs(f, acc) if bits == 4 else acc
        return total + f.call(self.ints, "llvm.aarch64.neon.addp.v4i32", pairs.shuffle(range(4)), pairs.shuffle(range(4, 8)))

    def _widened_pairs(self, f: Function, shorts: Value) -> Value:
        """Return the sums of two neighbours each: <16 x i16> -> <8 x i32>."""
        halves = [shorts.shuffle(range(h, h + 8)) for h in (0, 8)]
        low, high = (f.call(self.ints, "llvm.aarch64.neon.saddlp.v4i32.v8i16", half) for half in halves)
        return low.shuffle(range(8), high)


class NeonDotprod(Neon):
    """NEON with `sdot`: four products of signed bytes summed into each int32 lane."""

    name = "neon_dotprod"
    needs = Neon.needs | {"dotprod"}
    tuning = tunings.NEON_DOTPROD
    features = "+neon,+dotprod"

    def narrow_accumulators(self, bits: int) -> bool:
        return False

    def start(self, f: Function, total: Value, bits: int) -> Value:
        return total

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        return f.call(self.ints, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, weights, a.bits(self.quads))

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        return acc


class NeonI8mm(NeonDotprod):
    """NEON with `smmla`: two rows of eight signed bytes times two outputs of eight, summed into the 2 x 2 lanes of a register.

    Two rows have, for each vector of four outputs, two accumulators, in the order of `transposed_accumulators`: in place of the first row's
    that of outputs 0 and 1, in place of the second row's that of outputs 2 and 3, each with the first row in its low half and the second in
    its high half. The last of an odd number of rows is summed by `sdot`.
    """

    name = "neon_i8mm"
    needs = NeonDotprod.needs | {"i8mm"}
    features = "+neon,+dotprod,+i8mm"
    lane_products = 8
    tuning = tunings.NEON_I8MM
    reads_packed_bits = False  # products take codes of eight k together

    def product(self, f: Function, acc: Value, weights: Value, a: Value) -> Value:
        return f.call(self.ints, "llvm.aarch64.neon.smmla.v4i32.v16i8", acc, a.bits(self.quads), weights)

    def transposed_accumulators(self, unit: Int8Unit, totals: list[Value]) -> list[Value]:
        out = list(totals)
        for first, second in self._accumulator_pairs(unit):
            out[first] = totals[first].shuffle((0, 1, 4, 5), totals[second])
            out[second] = totals[first].shuffle((2, 3, 6, 7), totals[second])
        return out

    def _accumulator_pairs(self, unit: Int8Unit) -> list[tuple[int, int]]:
        """Return the numbers of the accumulators of two rows and one vector, for all pairs of rows."""
        rows = range(0, unit.rows - 1, 2)
        return [(i * unit.vectors + v, (i + 1) * unit.vectors + v) for i in rows for v in range(unit.vectors)]

    def int8_unit(
        self, f: Function, unit: Int8Unit, weights: Value, a: Sequence[Value], totals: list[Value], weight_sums: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        accs, sums = list(totals), list(weight_sums)
        ones = f.value("i32", 0x01010101).splat(self.lanes)
        for g in range(unit.k // 8):
            steps = list(zip(*(self._eight(weights, g, v, unit) for v in range(unit.vectors)), strict=True))
            operands = [(low.shuffle(_ZIP_LOW, high), low.shuffle(_ZIP_HIGH, high)) for low, high in zip(*steps, strict=True)]
            for n, (first, second) in enumerate(self._accumulator_pairs(unit)):
                i, v = n // unit.vectors * 2, n % unit.vectors
                top, bottom = (a[i + j].load("<8 x i8>", 8 * g, 8) for j in (0, 1))
                rows = top.shuffle(range(16), bottom)
                for acc, operand in zip((first, second), operands[v], strict=True):
                    accs[acc] = self.product(f, accs[acc], operand, rows)
            for s, step in enumerate(steps):
                if unit.rows % 2:
                    four = self.spread(a[-1], "i32", 8 * g + 4 * s)
                    at = (unit.rows - 1) * unit.vectors
                    accs[at:] = [self.dot(f, acc, w, four, unit.bits) for acc, w in zip(accs[at:], step, strict=True)]
                sums = [self.dot(f, acc, w, ones, unit.bits) for acc, w in zip(sums, step, strict=bool(sums))]
            accs = [self.pinned(f, acc) for acc in accs]  # else LLVM puts off the products of rows, and keeps their operands on the stack
            f.fence()
        return accs, sums

    def _eight(self, weights: Value, g: int, v: int, unit: Int8Unit) -> list[Value]:
        """Return the unit weights of the g-th eight k of the v-th four outputs: the first four k and the last."""
        rows = 8 * unit.stored_bits // 32
        stored = [weights.load(self.quads, (g * rows + r) * PANEL * 4 + v * 16, 16) for r in range(rows)]
        return [w for quads in stored for w in self.weights_of(quads, unit)]


_ZIP_LOW = [*range(4), *range(16, 20), *range(4, 8), *range(20, 24)]  # outputs 0 and 1, eight k each
_ZIP_HIGH = [*range(8, 12), *range(24, 28), *range(12, 16), *range(28, 32)]


class SVE(NeonDotprod):
    """`sdot` on scalable vectors of a length that is fixed when the code is compiled: LLVM keeps fixed vectors of that length in them."""

    def __init__(self, bits: int) -> None:
        self.name = f"sve{bits}"
        self.lanes = bits // 32
        self.attributes = f"vscale_range({bits // 128},{bits // 128})"
        self.tuning = tunings.sve(self.lanes)

    needs = NeonDotprod.needs | {"sve"}
    features = "+neon,+dotprod,+sve"
    register = ""  # inline assembly takes no fixed vectors of more than 128 bits

    def missing(self) -> str | None:
        bits = 32 * self.lanes
        return super().missing() or (None if f"sve{bits}" in machine().features else f"its vectors are not {bits} bits long")

    def spread(self, a: Value, element: str, at: int) -> Value:
        return ISA.spread(self, a, element, at)  # a load that repeats; a lane of another part of the register is not for free

    def looked_up(self, indices: Value, table: Sequence[int]) -> Value:
        f = indices.fn
        if indices.type != self.quads:
            return super().looked_up(indices, table)
        codes = f.constant(self.quads, [*table] * (self.lanes // 4))
        found = f.call(_BYTES, "llvm.aarch64.sve.tbl.nxv16i8", *(self._scalable(f, v) for v in (codes, indices)))
        return f.call(self.quads, f"llvm.vector.extract.{mangled(self.quads)}.nxv16i8", found, f.value("i64", 0))

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        scalable = [self._scalable(f, v) for v in (acc, weights, a.bits(self.quads))]
        total = f.call(_TOTALS, "llvm.aarch64.sve.sdot.nxv4i32", *scalable)
        return f.call(self.ints, f"llvm.vector.extract.{mangled(self.ints)}.nxv4i32", total, f.value("i64", 0))

    def _scalable(self, f: Function, fixed: Value) -> Value:
        type_, name = (_TOTALS, "nxv4i32") if fixed.type == self.ints else (_BYTES, "nxv16i8")
        return f.call(type_, f"llvm.vector.insert.{name}.{mangled(fixed.type)}", Value(f, type_, "poison"), fixed, f.value("i64", 0))


_TOTALS, _BYTES = "<vscale x 4 x i32>", "<vscale x 16 x i8>"
