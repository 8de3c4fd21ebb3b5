"""Codes of 5 and 6 bits on CPUs: put together in registers from the two planes in which `layouts/cpu_tiles.py` stores them.

    unit of k = | plane of low 4 bits: a nibble of each code | plane of the other 1 or 2 bits: codes of 8 or 4 groups share a byte |
    byte      = low | high << 4, plus what the byte of an 8-bit code has more      `above`: signed codes are stored plus 2^(bits - 1)

That yields the bytes of 8-bit codes, so that the arithmetic, and every bit of a result, is that of `tile.py` with these. Fewer bytes of
memory are read, 5 or 6 bits a code for 8, and a vector of codes takes four or five instructions more: it is faster where memory limits a
product, with few rows of activations.

`PackedBitsUnit` is for `tile.py` and `expanded.py`, `eight_codes` for `quantize/dequantize.py`, `eight_to_planes` for `quantize/pack.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.layouts.cpu_tiles import PANEL, plane_groups

_GROUP = 4 * PANEL  # bytes of a group: 4 of each output


@dataclass(frozen=True, slots=True)
class PackedBitsUnit:
    """A unit of k of some outputs of a panel, a vector for each `isa.lanes` outputs.

    Attributes:
        isa: Emits the instructions.
        bits: Bits of a code, 5 or 6.
        signed: Codes are signed.
        unit: Elements of the unit.
        at: Address of the panel's unit.
        row_offset: The first output in the panel.
        vectors: How many.
    """

    isa: ISA
    bits: int
    signed: bool
    unit: int
    at: Value
    row_offset: Value
    vectors: int

    def stored(self, t: int) -> Iterator[Value]:
        """Yield the t-th 4 k as the layout of 8-bit codes has them, for each vector."""
        isa, groups, row = self.isa, plane_groups(self.bits), self.at + self.row_offset * 4
        to = 4 - t % groups * (self.bits - 4)  # the shift that moves this group's high bits to bit 4
        lows = isa.stored(row + t // 2 * _GROUP, self.vectors)
        highs = isa.stored(row + (self.unit // 8 + t // groups) * _GROUP, self.vectors)
        for low, high in zip(lows, highs, strict=True):
            low, high = (value.bits(isa.shorts) for value in (low, high))  # there are no shifts of bytes
            low, high = low >> t % 2 * 4, high << to if to > 0 else high >> -to
            yield (low.bits(isa.quads) & 15 | high.bits(isa.quads) & _mask(self.bits)) + above(self.bits, self.signed)

    def steps(self) -> Iterator[tuple[Value, ...]]:
        """Yield the codes of each 4 k, as `ISA.unit_steps` yields 8-bit ones."""
        for t in range(self.unit // 4):
            yield from zip(*(self.isa.unit_weights(stored, 8) for stored in self.stored(t)), strict=True)


def eight_codes(f: Function, bits: int, signed: bool, unit: int, data: Value, group: Value, lane: Value) -> Value:
    """Return eight k of one row as 8-bit codes are stored, <8 x i32>.

    Args:
        f: Emits the instructions.
        bits, signed, unit: As of PackedBitsUnit.
        data: Address of the block.
        group: Which eight of the block.
        lane: The row in the panel.
    """
    a_unit, pairs = unit // 8, plane_groups(bits) // 2  # eights of a unit, and of a byte of the second plane
    at, inside = data + group // a_unit * (unit * bits // 32 * _GROUP) + lane * 4, group % a_unit
    low = at.load("i32", inside * _GROUP).splat(8)
    high = at.load("i32", (inside // pairs + a_unit) * _GROUP) >> (inside % pairs * (2 * (bits - 4))).to("i32")
    codes = low >> f.constant(low.type, [8 * (k % 4) + k // 4 * 4 for k in range(8)]) & 15
    highs = high.splat(8) >> f.constant(low.type, [8 * (k % 4) + k // 4 * (bits - 4) for k in range(8)])
    return (codes | highs << 4 & _mask(bits)) + above(bits, signed)


def eight_to_planes(bits: int, signed: bool, words: list[Value], place: int) -> tuple[Value, Value]:
    """Return a word of the first plane, and the bits for a word of the second plane at `place`, from eight codes of one row, two words of
    bytes."""
    ones = 0x01010101
    codes = [word & ones * ((1 << bits) - 1) for word in words]
    if signed:
        codes = [word ^ ones << bits - 1 for word in codes]
    low, next_low = (word & ones * 15 for word in codes)
    high, next_high = (word >> 4 & ones * ((1 << bits - 4) - 1) for word in codes)
    return low | next_low << 4, (high | next_high << bits - 4) << place * 2 * (bits - 4)


def above(bits: int, signed: bool) -> int:
    """Return what the stored byte of an 8-bit code is more than that of the same code in `bits` bits."""
    return 128 - (1 << bits - 1) if signed else 0


def _mask(bits: int) -> int:
    return (1 << bits) - 16
