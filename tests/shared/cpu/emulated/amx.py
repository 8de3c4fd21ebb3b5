"""AMX without AMX: the tile registers are memory, and what acts on them is written out, so that `kernels/cpu/linear/amx.py` runs on any
x86."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_amx import COLUMN_BYTES, ROWS, AMXTiles, Register
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX2, AVXVNNI

BF16_ORDER = ((0, 2), (4, 6), (1, 3), (5, 7))  # as `ISA.bf16_order`


class EmulatedTiles(AMXTiles):
    name, cpu, features, attributes, needs = "amx_emulated", "haswell", "", "", AVX2.needs
    narrows = False

    def __init__(self) -> None:
        super().__init__()
        self.features = ""
        self._registers: WeakKeyDictionary[Function, list[tuple[Register, Value]]] = WeakKeyDictionary()

    def missing(self) -> str | None:
        return AVX2().missing()

    def nibbles(self, stored: Value, signed: bool) -> list[Value]:
        codes = [stored & 15, (stored.bits(self.shorts) >> 4).bits(stored.type) & 15]
        return [code - 8 for code in codes] if signed else codes

    def looked_up(self, indices: Value, table: Sequence[int]) -> Value:
        return ISA.looked_up(self, indices, table)

    def unit_weights(self, stored: Value, bits: int) -> list[Value]:
        return ISA.unit_weights(self, stored, bits)

    def byte_sums(self, f: Function, acc: Value, four: Value, signed: bool) -> Value:
        for shift in (24, 16, 8, 0):
            top = four.bits(self.ints) << shift
            acc = acc + (top.shift_signed(24) if signed else top >> 24)
        return acc

    def dot_shorts(self, f: Function, acc: Value, a: Value, b: Value) -> Value:
        pairs = ((x.bits(self.ints) << 16, x.bits(self.ints)) for x in (a, b))
        (low, high), (other_low, other_high) = ([half.shift_signed(16) for half in pair] for pair in pairs)
        return acc + low * other_low + high * other_high

    def configure(self, f: Function, registers: Sequence[Register]) -> None:
        assert len(registers) == 8
        assert all(0 < r.rows <= ROWS and 0 < r.column_bytes <= COLUMN_BYTES for r in registers)
        self._registers[f] = [(register, f.alloca("i8", ROWS * COLUMN_BYTES, 64)) for register in registers]

    def release(self, f: Function) -> None:
        pass

    def tile_zero(self, f: Function, register: int) -> None:
        for row in f.loop(ROWS):
            (self._registers[f][register][1] + row * COLUMN_BYTES).store(f.value("<64 x i8>", 0))

    def tile_load(self, f: Function, register: int, at: Value, stride: Value | int) -> None:
        shape, memory = self._registers[f][register]
        self._copy(f, shape, at, stride, memory, COLUMN_BYTES)

    def tile_store(self, f: Function, register: int, at: Value, stride: int) -> None:
        shape, memory = self._registers[f][register]
        self._copy(f, shape, memory, COLUMN_BYTES, at, stride)

    def _copy(self, f: Function, shape: Register, source: Value, source_stride: Value | int, to: Value, stride: int) -> None:
        for row in f.loop(shape.rows):
            for column in f.loop(shape.column_bytes):
                (to + row * stride + column).store((source + row * source_stride + column).load("i8"))

    def bf16_codes(self, f: Function, stored: Value, signed: bool, table: tuple[int, ...] = ()) -> list[Value]:
        out = []
        for k, _ in BF16_ORDER:  # the second one is in the upper half of each lane
            shift = 8 * (k % 4) + k // 4 * 4
            pair = [(stored.bits(self.ints) >> (shift + at)) & 15 for at in (0, 16)]
            pair = [ISA.looked_up(self, code, table) if table else code - (8 if signed else 0) for code in pair]
            low, high = (code.to("float").bits(self.ints) >> 16 for code in pair)
            out.append((low | high << 16).bits("<32 x i16>"))
        return out

    def tile_product(self, f: Function, total: int, a: int, weights: int) -> None:
        def step(acc: Value, left: Value, right: Value) -> Value:
            four, others = (at.load("<4 x i8>").to("i32") for at in (left, right))
            return acc + (four * others).reduce("add")

        self._product(f, total, a, weights, "i32", step)

    def tile_unsigned_product(self, f: Function, total: int, a: int, weights: int) -> None:
        def step(acc: Value, left: Value, right: Value) -> Value:
            four, others = left.load("<4 x i8>").to("i32"), right.load("<4 x i8>").to("i32", unsigned=True)
            return acc + (four * others).reduce("add")

        self._product(f, total, a, weights, "i32", step)

    def tile_bf16_product(self, f: Function, total: int, a: int, weights: int) -> None:
        def step(acc: Value, left: Value, right: Value) -> Value:
            for k in (0, 2):
                x, y = (self.to_float(at.load("i16", k), "bf16") for at in (left, right))
                acc = f.fma(x, y, acc)
            return acc

        self._product(f, total, a, weights, "float", step)

    def _product(self, f: Function, total: int, a: int, weights: int, kind: str, step: Callable[[Value, Value, Value], Value]) -> None:
        (total_shape, sums), (a_shape, left), (w_shape, right) = (self._registers[f][n] for n in (total, a, weights))
        assert a_shape.column_bytes == 4 * w_shape.rows  # or the CPU raises an exception
        assert total_shape == Register(w_shape.column_bytes, a_shape.rows)
        for row in f.loop(a_shape.rows):
            for quad in f.loop(w_shape.rows):
                for column in f.loop(w_shape.column_bytes // 4):
                    at = sums + row * COLUMN_BYTES + column * 4
                    operands = left + row * COLUMN_BYTES + quad * 4, right + quad * COLUMN_BYTES + column * 4
                    at.store(step(at.load(kind), *operands))


class EmulatedDotProducts(AVXVNNI):
    """Dot products made of products of int16: like all CPUs with AMX, they sum products of bytes in int32."""

    name, features, needs = "avx_vnni_emulated", "", AVX2.needs

    def dot(self, f: Function, acc: Value, weights: Value, a: Value, bits: int) -> Value:
        w, x = weights.bits(self.shorts), a.bits(self.shorts)
        acc = self.dot_shorts(f, acc, w & 255, (x << 8).shift_signed(8))
        return self.dot_shorts(f, acc, w >> 8, x.shift_signed(8))

    def dot_shorts(self, f: Function, acc: Value, a: Value, b: Value) -> Value:
        return acc + f.call(self.ints, "llvm.x86.avx2.pmadd.wd", a.bits(self.shorts), b.bits(self.shorts))


class EmulatedAMX(EmulatedDotProducts):
    """Dot products for few rows, emulated tiles from `matrix_rows` rows on."""

    name = "avx_vnni_and_amx_emulated"
    matrix = EmulatedTiles()
    tuning = replace(AVXVNNI.tuning, matrix_rows=3)

    def bf16_order(self) -> tuple[tuple[int, int], ...]:
        return BF16_ORDER
