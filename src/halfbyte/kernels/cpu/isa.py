"""What the kernels ask of an instruction set: one class each, from the plain vectors that any LLVM target runs upwards.

An ISA says how many float lanes a register has, which tiles keep their accumulators in registers, and how three things
are done: `dot` (four products of bytes summed into each int32 lane), `float_codes` (stored bytes to float weights), and
conversions to and from half-width floats. Compiling for an ISA needs no such machine; `missing` guards running it.
"""

from __future__ import annotations

import functools
import struct
from typing import ClassVar

from halfbyte import env
from halfbyte.errors import KernelError
from halfbyte.kernels.cpu.ir import Function, Value, lanes_of, vector
from halfbyte.machine import machine


class ISA:
    """The generic path: 128-bit vectors in LLVM's own operations, right on every target."""

    name = "generic"
    lanes = 4
    vector_bits = 0
    cpu = ""
    features = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    half_conversions = False  # has instructions for float <-> float16
    bf16_dot = False  # sums products of bfloat16 pairs in float32

    @property
    def triple(self) -> str:
        from llvmlite import binding

        return str(binding.get_process_triple())

    def missing(self) -> str | None:
        """Why this machine can't run code for this ISA; None if it can."""
        lacking = sorted(self.needs - machine().features)
        return f"the CPU lacks {', '.join(lacking)}" if lacking else None

    def tile(self, m: int, compute: str) -> tuple[int, int]:
        """Most rows of a tile and how many vectors of outputs it has side by side, for M rows of activations."""
        return (1, 8) if m == 1 else (2, 4)

    @property
    def floats(self) -> str:
        return vector("float", self.lanes)

    @property
    def ints(self) -> str:
        return vector("i32", self.lanes)

    @property
    def quads(self) -> str:
        """Four bytes in each 32-bit lane."""
        return vector("i8", 4 * self.lanes)

    # Integer dot products. A kernel multiplies "unit weights", which differ from the codes by a constant:
    # sum(code * a) = sum(unit weight * a) + correction * sum(a), where code is q if signed, else u.

    def correction(self, bits: int, signed: bool) -> int:
        return -(1 << (bits - 1)) if signed else 0

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        """Stored bytes (quads) -> unit weights for each step of four k: two steps for 4 bits, one for 8."""
        if bits == 8:
            return [stored]
        return [stored & 15, (stored.bits(vector("i16", 2 * self.lanes)) >> 4).bits(stored.type) & 15]

    def start(self, f: Function, total: Value, bits: int) -> Value:
        """The accumulator of a unit (at most 32 k), begun from or beside the block's int32 `total`."""
        return total

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int, full_range: bool = False) -> Value:
        """acc + products of `weights` with the four signed bytes `a` (the same i32 in every lane); -128 only if `full_range`."""
        w = weights.bits(self.ints)
        for j in range(4):
            acc = acc + ((w >> (8 * j)) & 255) * (a << (24 - 8 * j)).shift_signed(24)
        return acc

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        """The block's int32 total after a unit whose accumulator is `acc`."""
        return acc

    # Floating point

    def float_codes(self, f: Function, stored: Value, bits: int, signed: bool) -> list[tuple[int, Value]]:
        """Stored bytes (quads) -> (k within them, codes as floats in each lane), exactly."""
        words = stored.bits(self.ints)
        if signed:  # from excess to two's complement; the sign is extended below
            words = words ^ (0x88888888 if bits == 4 else 0x80808080)
        codes = []
        for s in range(32 // bits):
            k = s if bits == 8 else (s >> 1) + 4 * (s & 1)
            if signed:
                field = (words << (32 - bits * (s + 1))).shift_signed(32 - bits)
            else:
                field = (words >> (bits * s)) & ((1 << bits) - 1)
            codes.append((k, field.to("float")))
        return codes

    def to_float(self, raw: Value, kind: str) -> Value:
        """Lanes of `kind` (i16 for f16 and bf16, float for f32) -> float, exactly."""
        if kind == "f32":
            return raw
        if kind == "bf16":
            return (raw.to("i32", unsigned=True) << 16).bits(vector("float", lanes_of(raw.type)))
        if self.half_conversions:
            return raw.bits(vector("half", lanes_of(raw.type))).to("float")
        bits = raw.to("i32", unsigned=True)
        # The exponent moves from bias 15 to 127 by a multiplication, which is right for subnormal halves too.
        magnitude = ((bits & 0x7FFF) << 13).bits(vector("float", lanes_of(raw.type))) * 2.0**112
        infinite = (bits & 0x7C00).equals(0x7C00)
        out = infinite.select((bits & 0x3FF) << 13 | 0x7F800000, magnitude.bits(bits.type))
        return (out | (bits & 0x8000) << 16).bits(magnitude.type)

    def from_float(self, value: Value, kind: str) -> Value:
        """float -> lanes of `kind`, rounded to nearest even; NaN stays NaN. f16 needs `half_conversions`."""
        if kind == "f32":
            return value
        if kind == "f16":
            return value.to("half").bits(vector("i16", lanes_of(value.type)))
        bits = value.bits(vector("i32", lanes_of(value.type)))
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return (nan.select(bits | 0x400000, rounded) >> 16).to("i16")


class AVX2(ISA):
    """256 bits without dot-product instructions: `vpmaddubsw` sums two products of bytes in an int16."""

    name = "avx2"
    lanes = 8
    cpu = "haswell"
    needs = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"})
    half_conversions = True

    def tile(self, m: int, compute: str) -> tuple[int, int]:
        if m <= 2:
            return m, 4
        return (4, 2) if compute == "int8" else (6, 2)

    def correction(self, bits: int, signed: bool) -> int:
        if bits == 4:
            return super().correction(bits, signed)
        return 0 if signed else 128  # the unit weight of 8 bits is u - 128

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        return [stored ^ 128] if bits == 8 else super().unit_weights(stored, bits)

    def start(self, f: Function, total: Value, bits: int) -> Value:
        # Eight steps of 4-bit weights fit an int16 (8 * 2 * 15 * 127 = 30480), two products of 8-bit ones just fit.
        return f.value("<16 x i16>", 0) if bits == 4 else total

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int, full_range: bool = False) -> Value:
        if bits == 4:
            return acc + f.call("<16 x i16>", "llvm.x86.avx2.pmadd.ub.sw", weights, a.bits(self.quads))
        if full_range:  # -(-128) and -128 * -128 * 2 overflow below: even and odd bytes as int16 instead
            w, x = weights.bits("<16 x i16>"), a.bits("<16 x i16>")
            for left, right in (((w << 8).shift_signed(8), (x << 8).shift_signed(8)), (w.shift_signed(8), x.shift_signed(8))):
                acc = acc + f.call(self.ints, "llvm.x86.avx2.pmadd.wd", left, right)
            return acc
        a = a.bits(self.quads)
        size = f.call(self.quads, "llvm.abs.v32i8", weights, f.value("i1", 0))  # unsigned, at most 128
        signed = f.call(self.quads, "llvm.x86.avx2.psign.b", a, weights)  # a with the weight's sign
        pairs = f.call("<16 x i16>", "llvm.x86.avx2.pmadd.ub.sw", size, signed)
        return acc + f.call(self.ints, "llvm.x86.avx2.pmadd.wd", pairs, f.value("<16 x i16>", 1))

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        if bits == 8:
            return acc
        return total + f.call(self.ints, "llvm.x86.avx2.pmadd.wd", acc, f.value("<16 x i16>", 1))


class AVX512VNNI(ISA):
    """512 bits with `vpdpbusd`: four products of unsigned and signed bytes summed into each int32 lane."""

    name = "avx512_vnni"
    lanes = 16
    vector_bits = 512
    cpu = "cascadelake"
    needs = AVX2.needs | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512vnni"}
    half_conversions = True

    def tile(self, m: int, compute: str) -> tuple[int, int]:
        if compute == "int8":
            return (m if m <= 8 else 6), 2
        return (min(m, 6), 2)

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int, full_range: bool = False) -> Value:
        return f.call(self.ints, "llvm.x86.avx512.vpdpbusd.512", acc, weights, a.bits(self.quads))

    def float_codes(self, f: Function, stored: Value, bits: int, signed: bool) -> list[tuple[int, Value]]:
        if bits == 8:
            return super().float_codes(f, stored, bits, signed)
        # One lookup a nibble: vpermps reads the low four bits of each lane.
        table = f.constant(self.floats, [float(i - 8 if signed else i) for i in range(16)])
        words = stored.bits(self.ints)
        order = [(s >> 1) + 4 * (s & 1) for s in range(8)]
        return [(k, f.call(self.floats, "llvm.x86.avx512.permvar.sf.512", table, words >> (4 * s))) for s, k in enumerate(order)]


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


ISAS: tuple[ISA, ...] = (AVX512BF16(), AVX512VNNI(), AVX2(), ISA())  # best first


@functools.cache
def _named(name: str | None) -> ISA:
    if name is None:
        return next(isa for isa in ISAS if isa.missing() is None)
    isa = next(i for i in ISAS if i.name == name)
    if reason := isa.missing():
        raise KernelError(f"HALFBYTE_ISA asks for {name}, but {reason}; unset it to let halfbyte choose")
    return isa


def current() -> ISA:
    """The ISA that kernels are compiled for: the best that this CPU has, or what HALFBYTE_ISA says."""
    return _named(env.isa())
