"""64-bit RISC-V: with the vector extension V 1.0, and without it."""

from __future__ import annotations

from typing import ClassVar

from halfbyte.kernels.cpu.codegen import tuning as tunings
from halfbyte.kernels.cpu.codegen.ir import Function, Value, is_float, vector
from halfbyte.kernels.cpu.codegen.isa import ISA


class RV64GC(ISA):
    """Scalar registers alone: LLVM takes the generic path's vectors apart. Right, but slow."""

    name = "rv64gc"
    arch = "riscv64"
    features = "+m,+a,+f,+d,+c"
    tuning = tunings.RV64GC
    code_model = "medium"  # relative to the program counter: the code may lie anywhere


class RVV(RV64GC):
    """Pairs of vector registers, which have 128 bits or more each. Products of int16 are summed in int16 (4-bit weights) or int32."""

    name = "rvv"
    needs: ClassVar[frozenset[str]] = frozenset({"v"})
    features = RV64GC.features + ",+v"
    lanes = 8
    tuning = tunings.RVV
    register = "^vr"

    def pinned(self, f: Function, acc: Value) -> Value:
        return acc if is_float(acc.type) else super().pinned(f, acc)  # LLVM 22 fails on floats here

    def narrow_accumulators(self, bits: int) -> bool:
        return True

    def start(self, f: Function, total: Value, bits: int) -> Value:
        return f.value(vector("i16" if bits == 4 else "i32", 2 * self.lanes), 0)

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        if bits == 4:
            return super().dot(f, acc, weights, a, bits)
        w, x = weights.bits(self.shorts), a.bits(self.shorts)
        acc = acc + (w & 255).to("i32") * (x << 8).shift_signed(8).to("i32")
        return acc + (w >> 8).to("i32") * x.shift_signed(8).to("i32")

    def widen(self, f: Function, acc: Value, total: Value, bits: int) -> Value:
        if bits == 4:
            return super().widen(f, acc, total, bits)
        even, odd = (acc.shuffle(range(i, 2 * self.lanes, 2)) for i in (0, 1))
        return total + even + odd
