"""Tiles of many rows of int8 activations times 4-bit weights with offsets: scale and offset are multiplied at once, as two integers.

    y[i, n] += a[i] * (scale[n] * sum[i, n] + offset[n] * code_sum[i])          the bracket is rounded once

For each output there is, most often, a power of two of which all its scales and offsets are multiples by an int16. The sum of products of
codes less 8, and the sum of the activations' codes, fit int16, too. So the bracket is one instruction that sums two products of int16
(`vpmaddwd`) and a conversion, not a multiplication and a fused multiply-add; totals are multiplied by the power at the end. That pays where
conversions take other ports than products: Zen 5.

Accumulators begin at  code_sum * 2^16 - 8 * code_sum + 2^15  (`activations.py` writes it): when the block ends, their high half is code_sum
and the low one the sum of products of codes less 8, plus 2^15, which is an int16 once its highest bit is flipped.

`linear.py` plans these tiles (`Tuning.bracketed_rows`); `driver.py` calls `build_panel`'s function for each panel. It computes the integers
of the panel once for all row tiles, in memory:

    i64: not 0 if a total of the last tile is not finite | padding to 64 bytes
    the powers' exponents (float32) of all outputs
    for each block, for each output:  scale | offset + 8 * scale     (int16 each)

Where a scale or offset of a panel is no such integer, plain tiles compute its outputs, and so they do after a tile whose totals overflow
before they are multiplied by the power. Results are the same, bit for bit, unless they are subnormal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Value, mangled, vector
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512VNNI
from halfbyte.kernels.cpu.codegen.kernel import Emitter, function
from halfbyte.kernels.cpu.linear.block_end import LARGEST_ACT, OFFSET, SCALE, BlockEnd, Record
from halfbyte.kernels.cpu.linear.tile import Tile
from halfbyte.kernels.cpu.linear.tile_spec import TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, Geometry

MOST_BLOCKS = 512  # of a panel whose integers fit in the memory for them
CENTER, SIGN_BIT = 8, 1 << 15  # subtracted from codes; flips the sign of an int16
_BLOCK_BYTES, _EXPONENTS, _INTEGERS = 4 * PANEL, 64, 64 + 4 * PANEL  # integers of a block; offsets of exponents and of integers
_SCALE_BITS = 10  # the least scale of an output becomes an integer of 2^10 or more: float16 has 11 bits
_LEAST_FLOAT16 = 2.0**-24  # above 0


def fits(geo: Geometry) -> bool:
    """Return whether products of a block's codes less CENTER sum to int16, and sums of activations times an offset are exact as float32."""
    fmt = geo.format
    return fmt.zero == "offset" and fmt.code_bits == 4 and fmt.scale == torch.float16 and CENTER * LARGEST_ACT * geo.padded < SIGN_BIT


@function(*["ptr"] * 6, *["i64"] * 4)
def build(spec: TileSpec, isa: AVX512VNNI, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, memory, columns, ahead, tile_index, tile_count), as `tile.build`'s.

    memory: of the panel's integers, above.
    """
    BracketingTile(spec, isa, f).emit(f.value("i64", 0))


class BracketingTile(Tile):
    """A tile of all 32 outputs of a panel, whose integers are in memory."""

    isa: AVX512VNNI

    def __init__(self, spec: TileSpec, isa: AVX512VNNI, f: Function) -> None:
        *pointers, self.memory, columns, ahead, tile_index, tile_count = f.parameters
        super().__init__(spec, isa, f, (*pointers, columns, ahead, tile_index, tile_count))
        self.integers = f.variable(self.memory + _INTEGERS)

    def _initial_sums(self, block: Record) -> list[Value]:
        return [self._field(block.act_meta, OFFSET, i, "i32") for i in range(self.rows) for _ in range(self.vectors)]

    def _add_scaled(self, sum_of: Callable[[int], Value], record: Record, weight_sums: list[Value]) -> None:
        isa, f, integers, size = self.isa, self.f, self.integers.value, 4 * self.isa.lanes
        self.integers.value = integers + _BLOCK_BYTES
        for i in self.scaled_rows:
            act_scale = None if self.spec.scaled_at_end else self._field(record.act_meta, SCALE, i, "float")
            for v in self.scaled_vectors:
                n = i * self.vectors + v
                bracket = isa.short_products(f, sum_of(n) ^ SIGN_BIT, integers.load(isa.ints, v * size, size)).to("float")
                self._set_total(n, self._total(n) + bracket if act_scale is None else f.fma(bracket, act_scale, self._total(n)))
            f.fence()

    def _finish_outputs(self, row_offset: Value, act_end: Value) -> None:
        isa, f, size = self.isa, self.f, 4 * self.isa.lanes
        zero_or_nan = f.value(isa.floats, 0.0)
        for n in range(self.count):
            total = self._total(n)
            zero_or_nan = zero_or_nan + total * 0.0  # NaN where a total is not finite
            exponents = (self.memory + _EXPONENTS).load(isa.floats, n % self.vectors * size, size)
            self._set_total(n, isa.times_power(f, total, exponents))
        self.memory.store((zero_or_nan.bits(isa.ints) << 1).reduce("or").to("i64"))
        super()._finish_outputs(row_offset, act_end)


@function(*["ptr"] * 5, *["i64"] * 3, "ptr")
def build_panel(spec: TileSpec, isa: AVX512VNNI, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, columns, first_tile, stop, following), as `expanded.build_panel`'s."""
    _Panel(spec, isa, f).emit()


class _Panel(Emitter, BlockEnd):
    """Emits `build_panel`'s function; of BlockEnd it takes the place of scales and offsets."""

    block = LINEAR
    isa: AVX512VNNI

    def emit(self) -> None:
        f = self.f
        _, weights, activations, out, bias, columns, first_tile, stop, following = f.parameters
        memory = f.alloca("i8", _INTEGERS + MOST_BLOCKS * _BLOCK_BYTES, 64)
        are_integers = self._store_integers(weights, memory)
        big, count, row_bytes, out_stride = map(self.get, ("tile_rows", "tiles", "row_bytes", "out_stride"))
        first_sharing = stop - f.umin(self.get("prefetching_tiles"), stop - first_tile)
        ahead = weights.distance(following)
        row = f.variable(f.value("i64", 0))
        for t in f.loop(stop, first_tile):
            larger, shares = t.below(count), t > first_sharing - 1
            pointers = self.args, weights, activations + row.value * row_bytes, out + row.value * out_stride, bias
            numbers = columns, ahead, t - shares.select(first_sharing, first_tile), shares.select(stop - first_sharing, 0)
            memory.store(f.value("i64", 1))  # as if a total were not finite: a plain tile computes the outputs
            with f.when(are_integers):
                tile = larger.select(self.pointer("bracketing_tile_function"), self.pointer("bracketing_lesser_tile_function"))
                f.call_pointer(tile, *pointers, memory, *numbers)
            with f.when(memory.load("i64").differs(0)):
                tile = larger.select(self.pointer("tile_function"), self.pointer("lesser_tile_function"))
                f.call_pointer(tile, *pointers, *numbers)
            row.value = row.value + larger.select(big, big - 1)

    def _store_integers(self, weights: Value, memory: Value) -> Value:
        """Store the exponents and integers of a panel; return whether all scales and offsets are these integers times the powers."""
        isa, f, size = self.isa, self.f, 4 * self.isa.lanes
        # The bits of float16 without signs are ordered like the numbers; less 1, those of 0 are the greatest, and never the least scale.
        float16_bits = vector("i16", PANEL)
        least = f.variable(f.value(float16_bits, -1))
        for _, weight_meta in self._weight_metas(weights):
            scales = (weight_meta.load(float16_bits) & 0x7FFF) - 1
            least.value = f.call(float16_bits, f"llvm.umin.{mangled(float16_bits)}", least.value, scales)
        powers = []
        for v in range(self.vectors):
            scale = isa.to_float((least.value + 1).shuffle(range(v * isa.lanes, (v + 1) * isa.lanes)), "f16")
            exponent = isa.exponent(f, scale.max_keeping_nan(_LEAST_FLOAT16)) - _SCALE_BITS
            (memory + _EXPONENTS).store(exponent, v * size, size)
            powers.append(isa.times_power(f, f.value(isa.floats, 1.0), exponent * -1.0))
        inexact, overflow = (f.variable(f.value(isa.ints, 0)) for _ in range(2))
        for b, weight_meta in self._weight_metas(weights):
            for v, power in enumerate(powers):
                reals = [real * power for real in self._scale_and_offset(weight_meta, v)]
                scale, offset = (isa.nearest(f, real) for real in reals)
                centered = offset + scale * CENTER  # what code_sum is multiplied by
                for real, integer in zip(reals, (scale, offset), strict=True):
                    inexact.value = inexact.value | (integer.to("float") - real).bits(isa.ints)
                for integer in (scale, centered):
                    overflow.value = overflow.value | (integer ^ integer.shift_signed(31))
                (memory + b * _BLOCK_BYTES).store(centered << 16 | scale & 0xFFFF, _INTEGERS + v * size, size)
        return (inexact.value << 1 | overflow.value >> 15).reduce("or").equals(0)

    def _weight_metas(self, weights: Value) -> Iterator[tuple[Value, Value]]:
        """Emit a loop over the blocks, and yield the number of each and the address of its scales."""
        blocks, unit_bytes = self.get("blocks"), self.spec.activation.unit * PANEL // 2
        at = self.f.variable(weights)
        for b in self.f.loop(blocks):
            weight_meta = at.value + (b + 1).equals(blocks).select(self.get("last_units"), self.get("units")) * unit_bytes
            yield b, weight_meta
            at.value = weight_meta + 2 * PANEL * self.scale_bytes

    def _scale_and_offset(self, weight_meta: Value, v: int) -> Iterator[Value]:
        """Yield the scales, then the offsets, of one vector of outputs."""
        for offset in (0, PANEL * self.scale_bytes):
            yield self.isa.to_float(self._scales(weight_meta, self.f.value("i64", 0), v, offset), self.spec.weight.scale)
