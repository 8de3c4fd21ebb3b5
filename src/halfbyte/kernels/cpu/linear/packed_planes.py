"""Codes of 5 and 6 bits, put together in registers from the two planes in which `layouts/cpu_tiles.py` stores them.

What comes of them are the bytes of 8-bit codes, so that the arithmetic, and every bit of a result, is that of `tile.py` with these. Fewer
bytes of memory are read, 5 or 6 bits a code for 8, and a vector of codes takes four or five instructions more: it is faster where memory
limits a product, with few rows of activations.
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
    """A unit of k of the outputs from `row_offset` on of a panel whose data for it lie at `at`: codes of `bits` bits."""

    isa: ISA
    bits: int
    signed: bool
    unit: int
    at: Value
    row_offset: Value
    vectors: int

    def stored(self, t: int) -> Iterator[Value]:
        """The t-th 4 k as the layout of 8-bit codes has them, a vector of quads each."""
        isa, groups, row = self.isa, plane_groups(self.bits), self.at + self.row_offset * 4
        to = 4 - t % groups * (self.bits - 4)  # where bits go to: bit 4
        lows = isa.stored(row + t // 2 * _GROUP, self.vectors)
        highs = isa.stored(row + (self.unit // 8 + t // groups) * _GROUP, self.vectors)
        for low, high in zip(lows, highs, strict=True):
            low, high = (value.bits(isa.shorts) for value in (low, high))  # there are no shifts of bytes
            low, high = low >> t % 2 * 4, high << to if to > 0 else high >> -to
            yield (low.bits(isa.quads) & 15 | high.bits(isa.quads) & _mask(self.bits)) + above(self.bits, self.signed)

    def steps(self) -> Iterator[tuple[Value, ...]]:
        """Unit weights of 8 bits, as `ISA.steps` gives them."""
        for t in range(self.unit // 4):
            yield from zip(*(self.isa.unit_weights(stored, 8) for stored in self.stored(t)), strict=True)


def eight_codes(f: Function, bits: int, signed: bool, unit: int, data: Value, group: Value, lane: Value) -> Value:
    """Eight k of one row as 8-bit codes are stored, <8 x i32>: the group-th of a block whose data lie at `data`."""
    a_unit, pairs = unit // 8, plane_groups(bits) // 2  # eights of a unit, and of a byte of the second plane
    at, inside = data + group // a_unit * (unit * bits // 32 * _GROUP) + lane * 4, group % a_unit
    low = at.load("i32", inside * _GROUP).splat(8)
    high = at.load("i32", (inside // pairs + a_unit) * _GROUP) >> (inside % pairs * (2 * (bits - 4))).to("i32")
    codes = low >> f.constant(low.type, [8 * (k % 4) + k // 4 * 4 for k in range(8)]) & 15
    highs = high.splat(8) >> f.constant(low.type, [8 * (k % 4) + k // 4 * (bits - 4) for k in range(8)])
    return (codes | highs << 4 & _mask(bits)) + above(bits, signed)


def eight_to_planes(bits: int, signed: bool, words: list[Value], place: int) -> tuple[Value, Value]:
    """Codes of eight k of one row, two words of bytes -> a word of the first plane, and what they add to one of the second at `place`."""
    ones = 0x01010101
    codes = [word & ones * ((1 << bits) - 1) for word in words]
    if signed:
        codes = [word ^ ones << bits - 1 for word in codes]
    low, next_low = (word & ones * 15 for word in codes)
    high, next_high = (word >> 4 & ones * ((1 << bits - 4) - 1) for word in codes)
    return low | next_low << 4, (high | next_high << bits - 4) << place * 2 * (bits - 4)


def above(bits: int, signed: bool) -> int:
    """What the byte of an 8-bit code is above that of the same code in fewer bits."""
    return 128 - (1 << bits - 1) if signed else 0


def _mask(bits: int) -> int:
    return (1 << bits) - 16
