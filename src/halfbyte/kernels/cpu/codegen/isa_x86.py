"""x86-64: AVX2, AVX-512 and their dot products. The names are Intel's; AMD's CPUs have the same instructions."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from halfbyte.errors import lookup
from halfbyte.kernels.cpu.codegen import tuning as tunings
from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA, Int8Unit
from halfbyte.kernels.cpu.codegen.tuning import Core
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.layouts.cpu_tiles import PANEL
from halfbyte.machine import machine

_AVX512_NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})
_SPREADING = frozenset({"avx512vbmi", "avx512vbmi2"})  # all from Ice Lake and Zen 4 on
_CURRENT = 4  # rounding mode of intrinsics (_MM_FROUND_CUR_DIRECTION): as MXCSR has it
_WHOLE_REGISTERS = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'  # or LLVM splits them on CPUs whose default is 256


class _X86(ISA):
    """What all of them share: registers of 256 bits, of 512 in classes with 16 lanes, and lookups and packing of bytes."""

    arch = "x86_64"
    lanes = 8
    cpu = "haswell"
    needs: ClassVar[frozenset[str]] = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"})
    half_conversions = True
    register = "v"
    narrows = True

    def looked_up(self, indices: Value, table: Sequence[int]) -> Value:
        """Return the entries by vpshufb, which looks up in each 16 bytes."""
        f, size = indices.fn, lanes_of(indices.type)
        name = "avx512.pshuf.b.512" if size == 64 else "avx2.pshuf.b"
        return f.call(indices.type, f"llvm.x86.{name}", f.constant(indices.type, [*table] * (size // 16)), indices)

    def narrowed(self, f: Function, reals: Sequence[Value]) -> Value:
        """Return the bytes by six instructions for four vectors, where each alone takes three."""
        # `packed_codes` packs each 128 bits of the registers apart: there is a quad of each vector, side by side.
        quads = packed_codes(f, reals).bits(self.ints)
        return quads.shuffle([4 * part + v for v in range(4) for part in range(self.lanes // 4)]).bits(self.quads)

    def float_codes(self, f: Function, stored: Value, bits: int, signed: bool) -> Iterator[tuple[int, Value]]:
        if bits == 4 and self.lanes == 16:
            return self.float_table(f, stored, _codes(signed))
        return super().float_codes(f, stored, bits, signed)

    def float_table(self, f: Function, stored: Value, table: tuple[int, ...]) -> Iterator[tuple[int, Value]]:
        """Yield the codes by a lookup of each nibble: with 16 lanes vpermps reads the low four bits of each."""
        if self.lanes < 16:
            yield from super().float_table(f, stored, table)
            return
        numbers = f.constant(self.floats, [float(code) for code in table])
        words = stored.bits(self.ints)
        for s in range(8):
            yield (s >> 1) + 4 * (s & 1), f.call(self.floats, "llvm.x86.avx512.permvar.sf.512", numbers, words >> (4 * s))


class AVX2(_X86):
    """256 bits without dot-product instructions.

    4-bit weights: `vpmaddubsw` sums two products of bytes in an int16, exactly.

    8-bit weights: two products of bytes need 17 bits, so factors are int16 and `vpmaddwd` sums two products in an int32. Activations are
    laid out as int16, of each quad the even k before the odd ones, so that a mask and a shift unpack the weights. Where the layout has
    sums of pairs there is one multiplication for two products (S. Winograd, "A new algorithm for inner product", 1968):

        w0*a0 + w1*a1 = (a0 + w1) * (a1 + w0) - a0*a1 - w0*w1

    a0*a1 is summed when activations are laid out, w0*w1 is in the layout. It takes as many instructions as two multiplications and two
    additions, but multipliers are on two of Zen's four ports, where additions delay them.
    All is exact modulo 2^32, and the result has less than 32 bits.
    """

    name = "avx2"
    tuning = tunings.AVX2
    multiplies_sums = True

    def activation_bytes(self, inner: Inner, bits: int) -> int:
        return 2 if inner == "int8" and bits == 8 else super().activation_bytes(inner, bits)

    def laid_out(self, codes: Value, bits: int) -> Value:
        if bits == 4:
            return super().laid_out(codes, bits)
        quads = range(0, lanes_of(codes.type), 4)
        return codes.to("i16").shuffle([at + k for at in quads for k in (0, 2, 1, 3)])

    def code_sum(self, f: Function, total: Value, codes: Value, bits: int, paired: bool) -> Value:
        if bits == 4:
            return self.widen(f, self.byte_products(f, f.value(self.quads, 1), codes.bits(self.quads)), total, bits)
        if not paired:
            return self.dot(f, total, self.ones(f, bits).bits(self.shorts), codes, bits)
        shorts = codes.bits(self.shorts)
        return total + self._products(f, shorts, _neighbours(shorts) + 256)  # each pair twice, and 2 * 128 times each code

    def row_start(self, total: Value, bits: int, paired: bool) -> Value:
        return total.shift_signed(1) * -1 if paired else super().row_start(total, bits, paired)

    def pair_sum(self, total: Value, codes: Value) -> Value:
        count, width = lanes_of(codes.type), 2 * self.lanes
        for at in range(0, count, width):
            lanes = [min(i, count) for i in range(at, at + width)]  # a short unit is padded with zeros
            part = codes.shuffle(lanes, codes.fn.value(codes.type, 0))
            total = total + self._products(total.fn, part, _neighbours(part))
        return total

    def ones(self, f: Function, bits: int) -> Value:
        return super().ones(f, bits) if bits == 4 else f.value("i32", 0x00010001).splat(self.lanes)

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        if bits == 4:
            return super().unit_weights(stored, bits)
        both = stored.bits(self.shorts)
        return [both & 255, both >> 8]  # u of k = 0 and 2, and of 1 and 3

    def steps(self, row: Value, unit: Int8Unit) -> Iterator[tuple[Value, ...]]:
        if unit.table:
            codes = [code + 128 for code in unit.table]
            for step in super().steps(row, replace(unit, bits=4, table=())):
                both = [self.looked_up(indices, codes).bits(self.shorts) for indices in step]
                yield tuple(pair & 255 for pair in both)
                yield tuple(pair >> 8 for pair in both)
            return
        # A step loads the stored bytes anew: the 16 registers are for accumulators.
        if unit.bits == 4:
            low = row.fn.value(self.quads, 15)
            yield tuple(stored & low for stored in self.stored(row, unit.vectors))
            yield tuple((stored.bits(self.shorts) >> 4).bits(self.quads) & low for stored in self.stored(row, unit.vectors))
            return
        mask = row.fn.pinned(row.fn.value(self.shorts, 255), self.register)
        yield tuple(stored.bits(self.shorts) & mask for stored in self.stored(row, unit.vectors))
        yield tuple(stored.bits(self.shorts) >> 8 for stored in self.stored(row, unit.vectors))

    def int8_unit(
        self, f: Function, unit: Int8Unit, weights: Value, a: Sequence[Value], totals: list[Value], weight_sums: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        if not unit.paired:
            return super().int8_unit(f, unit, weights, a, totals, weight_sums)
        accs, sums, ones = list(totals), list(weight_sums), self.ones(f, 8).bits(self.shorts)
        at_once = 2  # vectors whose weights fit in registers with 8 accumulators
        for t, first in itertools.product(range(unit.k // 4), range(0, unit.vectors, at_once)):
            mask = f.pinned(f.value(self.shorts, 255), self.register)
            stored = [s.bits(self.shorts) for s in self.stored(weights + (t * PANEL * 4 + first * 4 * self.lanes), at_once)]
            quads = [(both & mask, both >> 8) for both in stored]
            for i, row in enumerate(a):
                even, odd = (self.spread(row, "i32", 8 * t + at).bits(self.shorts) for at in (0, 4))
                sums_of_two = [(odd + even_w, even + odd_w) for even_w, odd_w in quads]
                for v, factors in enumerate(sums_of_two):
                    n = i * unit.vectors + first + v
                    accs[n] = self.pinned(f, accs[n] + self._products(f, *factors))
            for v, (even_w, odd_w) in enumerate(quads if sums else ()):
                sums[first + v] = sums[first + v] + self._products(f, even_w + odd_w, ones)
            f.fence()
        return accs, sums

    # Eight steps of 4-bit weights fit an int16 (8 * 2 * 15 * 128 = 30720). Two products of bytes do not: 8-bit weights and their
    # activations are multiplied as int16, which takes as many multiplications (two for 32 products) as bytes that are then widened.

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        if bits == 4:
            return acc + self.byte_products(f, weights, a.bits(self.quads))
        return acc + self._products(f, weights, a.bits(self.shorts))

    def dot_shorts(self, f: Function, acc: Value, a: Value, b: Value) -> Value:
        return acc + self._products(f, a.bits(self.shorts), b.bits(self.shorts))

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        return total + self._products(f, acc, f.value(self.shorts, 1)) if self.narrow_accumulators(bits) else acc

    def picked(self, f: Function, codes: Value, picks: Value) -> Value:
        return f.call(self.quads, "llvm.x86.avx2.pshuf.b", codes, picks)

    def byte_products(self, f: Function, unsigned: Value, signed: Value) -> Value:
        return f.call(self.shorts, "llvm.x86.avx2.pmadd.ub.sw", unsigned, signed)

    def _products(self, f: Function, a: Value, b: Value) -> Value:
        """Return the int32 sums of two products of int16 each."""
        return f.call(self.ints, "llvm.x86.avx2.pmadd.wd", a, b)


def _neighbours(shorts: Value) -> Value:
    """Swap the two pairs of int16 activations within each quad, which are laid out even k first, odd k second."""
    return shorts.shuffle([at + k for at in range(0, lanes_of(shorts.type), 4) for k in (2, 3, 0, 1)])


class AVX512(AVX2):
    """512 bits without dot-product instructions, as AVX2."""

    name = "avx512"
    lanes = 16
    cpu = "skylake-avx512"
    needs = AVX2.needs | _AVX512_NEEDS
    attributes = _WHOLE_REGISTERS
    tuning = tunings.AVX512

    def byte_products(self, f: Function, unsigned: Value, signed: Value) -> Value:
        return f.call(self.shorts, "llvm.x86.avx512.pmaddubs.w.512", unsigned, signed)

    def _products(self, f: Function, a: Value, b: Value) -> Value:
        return f.call(self.ints, "llvm.x86.avx512.pmaddw.d.512", a, b)


class AVXVNNI(_X86):
    """256 bits with `vpdpbusd`: four products of unsigned and signed bytes summed into each int32 lane."""

    name = "avx_vnni"
    features = "+avxvnni,+fast-dpwssd"
    needs = _X86.needs | {"avxvnni"}
    tuning = tunings.AVX_VNNI
    sums_shorts = True
    mixed_dot = True

    def narrow_accumulators(self, bits: int) -> bool:
        return False

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        return dot_of_bytes(f, acc, weights, a)

    def dot_shorts(self, f: Function, acc: Value, a: Value, b: Value) -> Value:
        return f.call(self.ints, f"llvm.x86.avx512.vpdpwssd.{32 * self.lanes}", acc, a.bits(self.ints), b.bits(self.ints))


class AVX512VNNI(AVXVNNI):
    """512 bits with `vpdpbusd`. Intel's CPUs, where masks and shifts take slots that dot products could have, unpack by one affine map of
    bits a vector (GFNI, which all but the first of them have).

    Attributes:
        core: Whose tuning it has.
        affine: 4-bit codes are unpacked by affine maps of bits.
    """

    name = "avx512_vnni"
    lanes = 16
    cpu = "cascadelake"
    features = "+fast-dpwssd"  # or LLVM makes two instructions of one
    needs = AVX512.needs | {"avx512vnni"}
    attributes = _WHOLE_REGISTERS
    register = ""

    def __init__(self, core: Core | None = None) -> None:
        """Take a core's tuning and features; None: those of this machine."""
        self.core = core or core_at_hand()
        self.tuning = lookup(tunings.AVX512_VNNI, self.core, "the core")
        has = machine().features if core is None else _SPREADING | {"gfni"}
        self.affine = self.core == "intel" and "gfni" in has
        if self.affine:
            self.features = f"{self.features},+gfni".lstrip(",")
        elif self.core == "intel":
            self.tuning = tunings.CASCADE_LAKE
        self.spreads = has >= _SPREADING
        if self.spreads:
            self.features += "".join(f",+{feature}" for feature in sorted(_SPREADING))

    def settled(self, f: Function, total: Value) -> Value:
        return f.pinned(total, "v")

    def short_products(self, f: Function, a: Value, b: Value) -> Value:
        """Return the sum of two products of int16 in each int32 lane."""
        return f.call(self.ints, "llvm.x86.avx512.pmaddw.d.512", a.bits(self.shorts), b.bits(self.shorts))

    def exponent(self, f: Function, x: Value) -> Value:
        """Return floor(log2 |x|) as a float; infinite where x is."""
        return self._masked(f, self.floats, "getexp.ps", x)

    def nearest(self, f: Function, x: Value) -> Value:
        """Return the nearest int32; -2^31 where x is out of their range, or NaN."""
        return self._masked(f, self.ints, "cvtps2dq", x)

    def times_power(self, f: Function, x: Value, exponent: Value) -> Value:
        """Return x * 2^exponent."""
        return self._masked(f, self.floats, "scalef.ps", x, exponent)

    def _masked(self, f: Function, kind: str, name: str, *operands: Value) -> Value:
        """Return the result of an intrinsic of AVX-512 on all lanes, in the current rounding mode."""
        return f.call(kind, f"llvm.x86.avx512.mask.{name}.512", *operands, f.value(kind, 0), f.value("i16", -1), f.value("i32", _CURRENT))

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        if bits == 8 or not self.affine:
            return super().unit_weights(stored, bits)
        return affine_nibbles(stored, signed=False)

    def table_weights(self, stored: Value, table: tuple[int, ...]) -> list[Value]:
        if not self.spreads:
            return super().table_weights(stored, table)
        # vpermb reads six bits of each byte: the table stands four times, and the other bits of the byte do not matter.
        f, high = stored.fn, (stored.bits(self.shorts) >> 4).bits(stored.type)
        codes = f.constant(stored.type, [code + 128 for code in table] * 4)
        return [f.call(stored.type, "llvm.x86.avx512.permvar.qi.512", codes, indices) for indices in (stored, high)]

    def kept_codes(self, stored: Value, bits: int) -> list[Value]:
        return super().kept_codes(stored, bits) if bits == 8 or not self.affine else affine_nibbles(stored, signed=False)

    def spread_kept(self, f: Function, kept: Value, mask: Value, zeros: Value) -> Value:
        low = kept.shuffle([*range(32), *[-1] * 32])
        return f.call(self.quads, "llvm.x86.avx512.mask.expand.v64i8", low, zeros, mask.bits("<64 x i1>"))


class AVX512BF16(AVX512VNNI):
    """AVX-512 with `vdpbf16ps`: products of bfloat16 pairs summed in float32."""

    name = "avx512_bf16"
    cpu = "cooperlake"
    needs = AVX512VNNI.needs | {"avx512bf16"}
    bf16_dot = True

    def bf16_order(self) -> tuple[tuple[int, int], ...]:
        """Return the two k that each shift of a lane of eight nibbles has in its low and its high half."""
        return ((0, 2), (4, 6), (1, 3), (5, 7))

    def bf16_codes(self, f: Function, stored: Value, signed: bool, table: tuple[int, ...] = ()) -> list[Value]:
        values = [float(code) for code in table or _codes(signed)] * 2  # vpermw reads five bits: the table stands twice
        numbers = f.constant("<32 x i16>", [struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values])
        words = stored.bits("<32 x i16>")
        return [f.call("<32 x i16>", "llvm.x86.avx512.permvar.hi.512", numbers, words >> (4 * s)) for s in range(4)]

    def bf16_pairs(self, f: Function, first: Value, second: Value) -> Value:
        halves = f.call("<32 x bfloat>", "llvm.x86.avx512bf16.cvtne2ps2bf16.512", second, first).bits("<32 x i16>")
        return halves.shuffle([i // 2 + 16 * (i % 2) for i in range(32)]).bits(self.ints)

    def bf16_multiply(self, f: Function, acc: Value, weights: Value, pair: Value) -> Value:
        both = [v.bits("<32 x bfloat>") for v in (weights, pair)]
        return f.call(self.floats, "llvm.x86.avx512bf16.dpbf16ps.512", acc, *both)


def core_at_hand() -> Core:
    """Return the core whose tuning this machine has: Zen 5's for AMD's CPUs that are not Zen 4."""
    here = machine()
    return "intel" if here.vendor == "Intel" else "zen4" if here.llvm_cpu == "znver4" else "zen5"


def dot_of_bytes(f: Function, acc: Value, unsigned: Value, signed: Value) -> Value:
    """Return acc + the products of `vpdpbusd`, of vectors as wide as `acc`. Bytes are passed as int32, which LLVM up to 20 requires."""
    ints = acc.type
    return f.call(ints, f"llvm.x86.avx512.vpdpbusd.{32 * lanes_of(ints)}", acc, unsigned.bits(ints), signed.bits(ints))


def affine_nibbles(stored: Value, *, signed: bool) -> list[Value]:
    """Return the low and the high codes of bytes with two each, as bytes, u, or u - 8 if `signed`: by an affine map of bits each."""
    f, out, size = stored.fn, [], lanes_of(stored.type)
    for first in (0, 4):
        matrix, inverted = nibble_map(first, signed)
        table = f.constant(f"<{size // 8} x i64>", [matrix] * (size // 8)).bits(stored.type)
        out.append(f.call(stored.type, f"llvm.x86.vgf2p8affineqb.{8 * size}", stored, table, f.value("i8", inverted)))
    return out


def nibble_map(first: int, signed: bool) -> tuple[int, int]:
    """Return the map of a byte to its four bits from `first` on, as u or u - 8: a matrix of bits, and the bits that are inverted after it.

    Bit i of the result is bit first + i; if signed, the inverse of the last one from there on. The matrix has the row for bit i in
    byte 7 - i (Intel SDM, GF2P8AFFINEQB).
    """
    rows = [1 << (first + min(i, 3)) if i < 4 or signed else 0 for i in range(8)]
    return sum(row << 8 * (7 - i) for i, row in enumerate(rows)), -8 if signed else 0


def packed_codes(f: Function, reals: Sequence[Value]) -> Value:
    """Return four vectors of floats as bytes, as `ISA.narrowed` does, in the order of the pack instructions.

    Each 128 bits of the result have the bytes of the first vector's 128 bits there, then those of the second vector's, and so on.
    """
    lanes = lanes_of(reals[0].type)
    ints, shorts, quads = vector("i32", lanes), vector("i16", 2 * lanes), vector("i8", 4 * lanes)
    if lanes == 16:
        every, current = f.value("i16", -1), f.value("i32", _CURRENT)
        whole = [f.call(ints, "llvm.x86.avx512.mask.cvtps2dq.512", real, f.value(ints, 0), every, current) for real in reals]
        to_shorts, to_bytes = "llvm.x86.avx512.packssdw.512", "llvm.x86.avx512.packsswb.512"
    else:
        convert = "llvm.x86.avx.cvt.ps2dq.256" if lanes == 8 else "llvm.x86.sse2.cvtps2dq"
        whole = [f.call(ints, convert, real) for real in reals]
        family, number = ("avx2", "") if lanes == 8 else ("sse2", ".128")
        to_shorts, to_bytes = (f"llvm.x86.{family}.pack{kind}{number}" for kind in ("ssdw", "sswb"))
    return f.call(quads, to_bytes, *(f.call(shorts, to_shorts, *whole[at : at + 2]) for at in (0, 2)))


def _codes(signed: bool) -> tuple[int, ...]:
    """Return the 4-bit codes in the order of the nibbles that they are stored as."""
    return tuple(range(-8, 8) if signed else range(16))
