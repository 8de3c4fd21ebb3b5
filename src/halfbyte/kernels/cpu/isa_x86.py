"""x86-64: AVX2, AVX-512 and their dot products. The names are Intel's; AMD's CPUs have the same instructions."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import ClassVar

from halfbyte.kernels.cpu.ir import Function, Value
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.machine import machine

_AVX512_NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})
_LONG_BLOCK = 512  # elements: from here on it does not matter what a block's end costs
_WHOLE_REGISTERS = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'  # or LLVM splits them on CPUs whose default is 256


class AVX2(ISA):
    """256 bits without dot-product instructions: `vpmaddubsw` sums two products of bytes in an int16."""

    name = "avx2"
    arch = "x86_64"
    lanes = 8
    cpu = "haswell"
    needs: ClassVar[frozenset[str]] = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"})
    half_conversions = True
    register_totals = 4
    register = "v"
    direct_tile = (4, 2)

    def tile(self, m: int, compute: str, bits: int = 4, block: int = 32) -> tuple[int, int]:
        if m <= 2:
            return m, 4
        return (4, 2) if compute == "int8" else (6, 2)

    def correction(self, bits: int, signed: bool) -> int:
        if bits == 4:
            return super().correction(bits, signed)
        return 0 if signed else 128  # the unit weight of 8 bits is u - 128

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        return [stored ^ 128] if bits == 8 else super().unit_weights(stored, bits)

    # Eight steps of 4-bit weights fit an int16 (8 * 2 * 15 * 128 = 30720), two products of 8-bit ones just fit if none is -128 * -128.

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int, full_range: bool = False) -> Value:
        if bits == 4:
            return acc + self._byte_products(f, weights, a.bits(self.quads))
        if full_range:  # -(-128) and -128 * -128 * 2 overflow below: even and odd bytes as int16 instead
            w, x = weights.bits(self.shorts), a.bits(self.shorts)
            for left, right in (((w << 8).shift_signed(8), (x << 8).shift_signed(8)), (w.shift_signed(8), x.shift_signed(8))):
                acc = acc + self._products(f, left, right)
            return acc
        size = f.call(self.quads, f"llvm.abs.v{4 * self.lanes}i8", weights, f.value("i1", 0))  # unsigned, at most 128
        pairs = self._byte_products(f, size, self._with_sign(f, a.bits(self.quads), weights))
        return acc + self._products(f, pairs, f.value(self.shorts, 1))

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        return total + self._products(f, acc, f.value(self.shorts, 1)) if self.apart(bits) else acc

    def _byte_products(self, f: Function, unsigned: Value, signed: Value) -> Value:
        """int16 sums of two products each."""
        return f.call(self.shorts, "llvm.x86.avx2.pmadd.ub.sw", unsigned, signed)

    def _products(self, f: Function, a: Value, b: Value) -> Value:
        """int32 sums of two products of int16 each."""
        return f.call(self.ints, "llvm.x86.avx2.pmadd.wd", a, b)

    def _with_sign(self, f: Function, a: Value, of: Value) -> Value:
        """a, negated where `of` is negative; what it is where `of` is 0 does not matter."""
        return f.call(self.quads, "llvm.x86.avx2.psign.b", a, of)


class AVX512(AVX2):
    """512 bits without dot-product instructions, as AVX2. There is no `vpsignb`: a blend takes a or -a."""

    name = "avx512"
    lanes = 16
    cpu = "skylake-avx512"
    needs = AVX2.needs | _AVX512_NEEDS
    attributes = _WHOLE_REGISTERS
    register_totals = 12
    direct_tile = (6, 2)

    def tile(self, m: int, compute: str, bits: int = 4, block: int = 32) -> tuple[int, int]:
        return min(m, 6), 2

    def _byte_products(self, f: Function, unsigned: Value, signed: Value) -> Value:
        return f.call(self.shorts, "llvm.x86.avx512.pmaddubs.w.512", unsigned, signed)

    def _products(self, f: Function, a: Value, b: Value) -> Value:
        return f.call(self.ints, "llvm.x86.avx512.pmaddw.d.512", a, b)

    def _with_sign(self, f: Function, a: Value, of: Value) -> Value:
        return (of < 0).select(f.value(a.type, 0) - a, a)

    def float_codes(self, f: Function, stored: Value, bits: int, signed: bool) -> Iterator[tuple[int, Value]]:
        return _looked_up(self, f, stored, signed) if bits == 4 else super().float_codes(f, stored, bits, signed)


class AVXVNNI(ISA):
    """256 bits with `vpdpbusd`: four products of unsigned and signed bytes summed into each int32 lane."""

    name = "avx_vnni"
    arch = "x86_64"
    lanes = 8
    cpu = "haswell"
    features = "+avxvnni,+fast-dpwssd"
    needs: ClassVar[frozenset[str]] = AVX2.needs | {"avxvnni"}
    half_conversions = True
    register_totals = 4
    register = "v"
    direct_tile = (5, 2)
    sums_shorts = True

    def tile(self, m: int, compute: str, bits: int = 4, block: int = 32) -> tuple[int, int]:
        if m <= 2:
            return m, 4
        return min(m, 5 if compute == "int8" else 6), 2

    def apart(self, bits: int) -> bool:
        return False

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int, full_range: bool = False) -> Value:
        return f.call(self.ints, f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", acc, weights, a.bits(self.quads))

    def dot_shorts(self, f: Function, acc: Value, a: Value, b: Value) -> Value:
        return f.call(self.ints, f"llvm.x86.avx512.vpdpwssd.{32 * self.lanes}", acc, a.bits(self.shorts), b.bits(self.shorts))


class AVX512VNNI(AVXVNNI):
    """512 bits with `vpdpbusd`.

    On Intel's CPUs masks and shifts take slots that dot products could have, so that it pays to unpack by one affine map of bits a
    vector (GFNI, which all but the first of them have), and to have more rows share what is unpacked, with totals in memory. On AMD's
    the former are free and stores are not.
    """

    name = "avx512_vnni"
    lanes = 16
    cpu = "cascadelake"
    features = "+fast-dpwssd"  # or LLVM makes two instructions of one
    needs = AVX512.needs | {"avx512vnni"}
    attributes = _WHOLE_REGISTERS
    register = ""
    register_totals = 12
    direct_tile = (12, 2)

    def __init__(self, intel: bool | None = None) -> None:
        self.intel = machine().vendor == "Intel" if intel is None else intel
        self.affine = self.intel and (intel is not None or "gfni" in machine().features)
        if self.affine:
            self.features = f"{self.features},+gfni".lstrip(",")

    def tile(self, m: int, compute: str, bits: int = 4, block: int = 32) -> tuple[int, int]:
        if compute != "int8":
            return min(m, 6), 2
        if block >= _LONG_BLOCK:
            return min(m, 10), 2
        return (m if m <= 8 else 8 if self.intel else 6), 2

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        if bits == 8 or not self.affine:
            return super().unit_weights(stored, bits)
        return affine_nibbles(stored, signed=False)

    def float_codes(self, f: Function, stored: Value, bits: int, signed: bool) -> Iterator[tuple[int, Value]]:
        return _looked_up(self, f, stored, signed) if bits == 4 else super().float_codes(f, stored, bits, signed)


class AVX512BF16(AVX512VNNI):
    """AVX-512 with `vdpbf16ps`: products of bfloat16 pairs summed in float32."""

    name = "avx512_bf16"
    cpu = "cooperlake"
    needs = AVX512VNNI.needs | {"avx512bf16"}
    bf16_dot = True

    # The two k that each shift of a lane of eight nibbles delivers, in its low and its high half.
    bf16_pairs = ((0, 2), (4, 6), (1, 3), (5, 7))

    def bf16_codes(self, f: Function, stored: Value, signed: bool) -> list[Value]:
        """Stored 4-bit codes (quads) -> pairs of bfloat16 weights for each of `bf16_pairs`, exactly."""
        values = [float(i - 8 if signed else i) for i in range(16)] * 2  # vpermw reads five bits: the table stands twice
        table = f.constant("<32 x i16>", [struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values])
        words = stored.bits("<32 x i16>")
        return [f.call("<32 x i16>", "llvm.x86.avx512.permvar.hi.512", table, words >> (4 * s)) for s in range(4)]

    def bf16_multiply(self, f: Function, acc: Value, weights: Value, pair: Value) -> Value:
        both = [v.bits("<32 x bfloat>") for v in (weights, pair)]
        return f.call(self.floats, "llvm.x86.avx512bf16.dpbf16ps.512", acc, *both)


def affine_nibbles(stored: Value, *, signed: bool) -> list[Value]:
    """64 bytes with two codes each -> the low codes and the high ones as bytes, u, or u - 8 if `signed`: an affine map of bits each."""
    f, out = stored.fn, []
    for first in (0, 4):
        matrix, inverted = nibble_map(first, signed)
        table = f.constant("<8 x i64>", [matrix] * 8).bits(stored.type)
        out.append(f.call(stored.type, "llvm.x86.vgf2p8affineqb.512", stored, table, f.value("i8", inverted)))
    return out


def nibble_map(first: int, signed: bool) -> tuple[int, int]:
    """The map of a byte to its four bits from `first` on, as u or u - 8: a matrix of bits, and the bits that are inverted after it.

    Bit i of the result is bit first + i; if signed, the inverse of the last one from there on. The matrix has the row for bit i in
    byte 7 - i (Intel SDM, GF2P8AFFINEQB).
    """
    rows = [1 << (first + min(i, 3)) if i < 4 or signed else 0 for i in range(8)]
    return sum(row << 8 * (7 - i) for i, row in enumerate(rows)), -8 if signed else 0


def _looked_up(isa: ISA, f: Function, stored: Value, signed: bool) -> Iterator[tuple[int, Value]]:
    """`ISA.float_codes` of 4-bit codes, one lookup a nibble: vpermps reads the low four bits of each lane."""
    table = f.constant(isa.floats, [float(i - 8 if signed else i) for i in range(16)])
    words = stored.bits(isa.ints)
    for s in range(8):
        yield (s >> 1) + 4 * (s & 1), f.call(isa.floats, "llvm.x86.avx512.permvar.sf.512", table, words >> (4 * s))
