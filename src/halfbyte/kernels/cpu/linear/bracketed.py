"""Tiles of many rows whose blocks have offsets: scale and offset are multiplied at once, as two integers.

    y[i, n] += a[i] * (scale[n] * sums[i, n] + offset[n] * codes[i])          the bracket is rounded once

For each output there is a power of two of which its scales and offsets are integers, most often; products of codes less 8, and the sum of
the activations' codes, fit int16, too. So the bracket is one instruction that sums products of pairs (`vpmaddwd`) and a conversion, not a
multiplication and a fused multiply-add; totals are multiplied by the power at the end. That pays where conversions take other ports than
products: Zen 5.

Accumulators begin at  codes * 2^16 - 8 * codes + 2^15:  when the block ends their high half is `codes` and the low one the sum of products
of codes less 8, plus 2^15, which is an int16 once its highest bit is flipped.

The integers of a panel are made once for all row tiles, and lie in memory meanwhile:

    i64: not 0 if a total of the last tile is not finite | padding to 64 bytes
    the powers' exponents (float32) of all outputs
    for each block, for each output:  scale | offset + 8 * scale     (int16 each)

Where some scale or offset of a panel is no such integer, its outputs are those of plain tiles, and so are those of tiles whose totals
overflow before they are multiplied by the power. Results are the same, bit for bit, unless they are subnormal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Value, mangled, vector
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512VNNI
from halfbyte.kernels.cpu.codegen.kernel import Emitter, function
from halfbyte.kernels.cpu.linear.block_end import OFFSET, SCALE, BlockEnd, Record
from halfbyte.kernels.cpu.linear.tile import Tile
from halfbyte.kernels.cpu.linear.tile_spec import TileSpec
from halfbyte.layouts.cpu_tiles import PANEL, Geometry

MOST_BLOCKS = 512  # of a panel whose integers fit in the memory for them
CENTER, SIGN_BIT = 8, 1 << 15  # what is taken off codes, and the bit that makes an int16 of a sum
_BLOCK_BYTES, _EXPONENTS, _INTEGERS = 4 * PANEL, 64, 64 + 4 * PANEL
_SCALE_BITS = 10  # the least scale of an output is 2^10 or more: float16 has 11 bits
_LEAST = 2.0**-24  # above 0 in float16


def fits(geo: Geometry) -> bool:
    """Whether products of a block's codes less CENTER sum to int16, and sums of activations times an offset are exact as float32."""
    fmt = geo.format
    return fmt.zero == "offset" and fmt.code_bits == 4 and fmt.scale == torch.float16 and CENTER * 127 * geo.padded < SIGN_BIT


@function(*["ptr"] * 6, *["i64"] * 4)
def build(spec: TileSpec, isa: AVX512VNNI, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, integers, columns, ahead, tile_index, tile_count), as in `tile.build`."""
    BracketingTile(spec, isa, f).emit(f.value("i64", 0))


class BracketingTile(Tile):
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
            scale = None if self.spec.scaled_at_end else self._field(record.act_meta, SCALE, i, "float")
            for v in self.scaled_vectors:
                n = i * self.vectors + v
                bracket = isa.short_products(f, sum_of(n) ^ SIGN_BIT, integers.load(isa.ints, v * size, size)).to("float")
                self._set_total(n, self._total(n) + bracket if scale is None else f.fma(bracket, scale, self._total(n)))
            f.fence()

    def _finish_outputs(self, row_offset: Value, act_end: Value) -> None:
        isa, f, size = self.isa, self.f, 4 * self.isa.lanes
        least = f.value(isa.floats, 0.0)
        for n in range(self.count):
            total = self._total(n)
            least = least + total * 0.0  # NaN where one is not finite
            exponents = (self.memory + _EXPONENTS).load(isa.floats, n % self.vectors * size, size)
            self._set_total(n, isa.times_power(f, total, exponents))
        self.memory.store((least.bits(isa.ints) << 1).reduce("or").to("i64"))
        super()._finish_outputs(row_offset, act_end)


@function(*["ptr"] * 5, *["i64"] * 3, "ptr")
def build_panel(spec: TileSpec, isa: AVX512VNNI, f: Function) -> None:
    """A function of (arguments, weights, activations, out, bias, columns, first tile, behind the last, following), of which `following` are
    the weights that are read after this panel's."""
    _Panel(spec, isa, f).emit()


class _Panel(Emitter, BlockEnd):
    block = LINEAR
    isa: AVX512VNNI

    def emit(self) -> None:
        f = self.f
        _, weights, activations, out, bias, columns, first, stop, following = f.parameters
        memory = f.alloca("i8", _INTEGERS + MOST_BLOCKS * _BLOCK_BYTES, 64)
        whole = self._integers(weights, memory)
        big, count, row_bytes, out_stride = map(self.get, ("tile_rows", "tiles", "row_bytes", "out_stride"))
        asking = stop - f.umin(self.get("prefetching_tiles"), stop - first)  # from this tile on they share the prefetch
        ahead = weights.distance(following)
        row = f.variable(f.value("i64", 0))
        for t in f.loop(stop, first):
            larger, asks = t.below(count), t > asking - 1
            pointers = self.args, weights, activations + row.value * row_bytes, out + row.value * out_stride, bias
            numbers = columns, ahead, t - asks.select(asking, first), asks.select(stop - asking, 0)
            memory.store(f.value("i64", 1))
            with f.when(whole):
                tile = larger.select(self.pointer("bracketing_tile_function"), self.pointer("bracketing_lesser_tile_function"))
                f.call_pointer(tile, *pointers, memory, *numbers)
            with f.when(memory.load("i64").differs(0)):
                tile = larger.select(self.pointer("tile_function"), self.pointer("lesser_tile_function"))
                f.call_pointer(tile, *pointers, *numbers)
            row.value = row.value + larger.select(big, big - 1)

    def _integers(self, weights: Value, memory: Value) -> Value:
        """Writes the exponents and integers of a panel; whether all are right."""
        isa, f, size = self.isa, self.f, 4 * self.isa.lanes
        # The order of float16 without their signs is that of integers; 0 is the greatest of them less 1.
        halves = vector("i16", PANEL)
        least = f.variable(f.value(halves, -1))
        for _, weight_meta in self._weight_metas(weights):
            scales = (weight_meta.load(halves) & 0x7FFF) - 1
            least.value = f.call(halves, f"llvm.umin.{mangled(halves)}", least.value, scales)
        powers = []
        for v in range(self.vectors):
            scale = isa.to_float((least.value + 1).shuffle(range(v * isa.lanes, (v + 1) * isa.lanes)), "f16")
            exponent = isa.exponent(f, scale.max_keeping_nan(_LEAST)) - _SCALE_BITS
            (memory + _EXPONENTS).store(exponent, v * size, size)
            powers.append(isa.times_power(f, f.value(isa.floats, 1.0), exponent * -1.0))
        inexact, overflow = (f.variable(f.value(isa.ints, 0)) for _ in range(2))
        for b, weight_meta in self._weight_metas(weights):
            for v, power in enumerate(powers):
                numbers = [self._number(weight_meta, v, which) * power for which in (0, 1)]
                scale, offset = (isa.nearest(f, number) for number in numbers)
                far = offset + scale * CENTER
                for number, integer in zip(numbers, (scale, offset), strict=True):
                    inexact.value = inexact.value | (integer.to("float") - number).bits(isa.ints)
                for integer in (scale, far):
                    overflow.value = overflow.value | (integer ^ integer.shift_signed(31))
                (memory + b * _BLOCK_BYTES).store(far << 16 | scale & 0xFFFF, _INTEGERS + v * size, size)
        return (inexact.value << 1 | overflow.value >> 15).reduce("or").equals(0)

    def _weight_metas(self, weights: Value) -> Iterator[tuple[Value, Value]]:
        """The number of each block, and where its scales lie."""
        blocks, unit_bytes = self.get("blocks"), self.spec.activation.unit * PANEL // 2
        at = self.f.variable(weights)
        for b in self.f.loop(blocks):
            weight_meta = at.value + (b + 1).equals(blocks).select(self.get("last_units"), self.get("units")) * unit_bytes
            yield b, weight_meta
            at.value = weight_meta + 2 * PANEL * self.scale_bytes

    def _number(self, weight_meta: Value, v: int, which: int) -> Value:
        """Scales, or offsets, of one vector of outputs."""
        return self.isa.to_float(
            self._scales(weight_meta, self.f.value("i64", 0), v, which * PANEL * self.scale_bytes), self.spec.weight.scale
        )
