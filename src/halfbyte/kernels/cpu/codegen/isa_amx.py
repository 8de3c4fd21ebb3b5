"""x86-64 with AMX: products of 16 x 64 by 64 x 16 bytes, or of half as many bfloat16, in one instruction (Intel, from Sapphire Rapids on).

`AMXInt8` computes few rows of int8 activations, and float32, like AVX-512. Its `matrix`, an `AMXTiles`, computes the others, by the tiles
of `linear/amx.py` and `conv/amx.py`. Both read the same packed weights.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import sys
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from halfbyte.kernels.cpu.codegen import tuning as tunings
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512BF16, affine_nibbles
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.layouts.cpu_tiles import Geometry

ROWS, COLUMN_BYTES = 16, 64  # of the largest tile register
_FEATURES = "+amx-tile,+amx-int8,+amx-bf16,+fast-dpwssd"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux: arch_prctl(2), Documentation/arch/x86/xstate.rst


class Register(NamedTuple):
    """The shape that a tile register is given: bytes of a row, and rows."""

    column_bytes: int
    rows: int


@functools.cache
def refusal() -> str | None:
    """Return why this process may not use tile registers; None if it may. Linux is asked for permission once, for all threads."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "this operating system is not known to save the tile registers of AMX"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        return f"the kernel does not let this process use the tile registers of AMX ({os.strerror(ctypes.get_errno())})"
    return None


class AMXTiles(AVX512BF16):
    """What `linear/amx.py` needs: tile registers, by number, and unpacking. Unit weights are the codes of 4 bits, and u of 8."""

    name = "amx_int8"
    needs: ClassVar[frozenset[str]] = AVX512BF16.needs | {"amx-tile", "amx-int8", "amx-bf16", "gfni"}
    features = _FEATURES

    def __init__(self) -> None:
        super().__init__("intel")
        self.spreads, self.tuning = False, tunings.AMX_TILES

    def missing(self) -> str | None:
        return super().missing() or refusal()

    def unit(self, geo: Geometry, inner: Inner) -> int:
        """Return the elements of a row of activations in a tile register: the greatest power of two that divides every block."""
        return math.gcd(geo.padded, geo.last_padded, COLUMN_BYTES if inner == "int8" else COLUMN_BYTES // 2)

    def correction(self, bits: int, signed: bool) -> int:
        return 0 if bits == 4 else super().correction(bits, signed)

    def narrow_accumulators(self, bits: int) -> bool:
        return False

    def nibbles(self, stored: Value, signed: bool) -> list[Value]:
        """Return the low and the high 4-bit codes of 64 bytes with two each, as signed bytes."""
        return affine_nibbles(stored, signed=signed)

    def byte_sums(self, f: Function, acc: Value, four: Value, signed: bool) -> Value:
        """Return acc + the sum of the four bytes in each lane."""
        ones = f.value(self.quads, 1)
        return self.dot(f, acc, ones, four.bits(self.ints), 8) if signed else self.dot(f, acc, four, ones.bits(self.ints), 8)

    # Tile registers

    def configure(self, f: Function, registers: Sequence[Register]) -> None:
        """Emit the configuration of the shapes of registers 0, 1, …; all become zero."""
        palette = bytearray(64)  # as LDTILECFG reads it (Intel SDM): palette 1, then bytes of a row and rows of each register
        palette[0] = 1
        for i, register in enumerate(registers):
            palette[16 + 2 * i : 18 + 2 * i] = register.column_bytes.to_bytes(2, "little")
            palette[48 + i] = register.rows
        memory = f.alloca("<64 x i8>", 1, 64)
        memory.store(f.constant("<64 x i8>", list(palette)), align=64)
        f.call("void", "llvm.x86.ldtilecfg", memory)

    def release(self, f: Function) -> None:
        f.call("void", "llvm.x86.tilerelease")

    def tile_zero(self, f: Function, register: int) -> None:
        f.call("void", "llvm.x86.tilezero", f.value("i8", register))

    def tile_load(self, f: Function, register: int, at: Value, stride: Value | int) -> None:
        f.call("void", "llvm.x86.tileloadd64", f.value("i8", register), at, f.value("i64", stride))

    def tile_store(self, f: Function, register: int, at: Value, stride: int) -> None:
        f.call("void", "llvm.x86.tilestored64", f.value("i8", register), at, f.value("i64", stride))

    def tile_product(self, f: Function, total: int, a: int, weights: int) -> None:
        """Emit total += a · weights of signed bytes; four along K are side by side in each column of weights. All are register numbers."""
        f.call("void", "llvm.x86.tdpbssd", *(f.value("i8", register) for register in (total, a, weights)))

    def tile_unsigned_product(self, f: Function, total: int, a: int, weights: int) -> None:
        """Emit `tile_product` for unsigned weights."""
        f.call("void", "llvm.x86.tdpbsud", *(f.value("i8", register) for register in (total, a, weights)))

    def tile_bf16_product(self, f: Function, total: int, a: int, weights: int) -> None:
        """Emit `tile_product` for bfloat16, of which two along K are side by side, summed in float32."""
        f.call("void", "llvm.x86.tdpbf16ps", *(f.value("i8", register) for register in (total, a, weights)))


class AMXInt8(AVX512BF16):
    """AVX-512, and AMX from `matrix_rows` rows on."""

    name = "amx_int8"
    needs = AMXTiles.needs
    features = _FEATURES
    matrix = AMXTiles()

    def __init__(self) -> None:
        super().__init__("intel")
        # Sparse weights and codes of 5 or 6 bits are not unpacked for tile registers.
        self.spreads, self.reads_packed_bits, self.tuning = False, False, tunings.AMX

    def missing(self) -> str | None:
        return super().missing() or refusal()
