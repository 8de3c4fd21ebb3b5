"""The end of a block along K: its sums of products are scaled and added to a tile's totals, R rows i by V vectors of outputs n.

    total[i, n] += a[i] * scale[n] * (sum[i, n] - point[n] * code_sum[i])  +  offset[n] * a[i] * code_sum[i]

    sum[i, n] = sum over k of q[n, k] * x[i, k], of weight codes and activation codes      accumulators of `tile.py` or `amx.py`
    a[i], code_sum[i] = sum over k of x[i, k]                                              written by `activations.py` behind the block
    scale[n], and point[n] or offset[n]                                                    behind the block's codes in the panel

Activations with an offset o[i] add o[i] * scale[n] * sum over k of (q[n, k] - point[n]). Float activations have no a, and the sum of x for
code_sum; so do int8 ones, as a[i] * code_sum[i], where the weight has offsets. `tile.py` says what is rounded. `BlockEnd` is the base class
of all tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from halfbyte.errors import unreachable
from halfbyte.formats.spec import Format
from halfbyte.kernels.cpu.codegen.elements import element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.linear.tile_spec import ROUND, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL

HIGHEST_CODE = 15  # of 4 bits
SCALE, CORRECTION, SUM, OFFSET = range(4)  # the fields of activations behind each block, `FIELDS` in all


def biasable(fmt: Format, block: int) -> bool:
    """Return whether `BlockSum` "biased" is exact: ROUND + a block's sum of products is a float, ROUND times a scale, too; and sums of
    activations are int16."""
    largest = 1 << (fmt.code_bits - 1) if fmt.signed else (1 << fmt.bits) - 1
    fits = block * largest * 127 <= 1 << 22 and (fmt.zero != "point" or block * 127 < 1 << 15)
    return fmt.scale == torch.float16 and fits


def correction_point(isa: ISA, bits: int, zero: str, biased: bool) -> int:
    """Return the zero point that the corrections of biased sums subtract; 0: none.

    With HIGHEST_CODE, codes plus HIGHEST_CODE - point are unsigned bytes: tiles need not subtract points from sums.
    """
    return HIGHEST_CODE if biased and zero == "point" and bits == 4 and isa.tuning.expansion is not None else 0


class Record(NamedTuple):
    """The addresses of a block, or of one of its units, for the outputs from row `row_offset` of a panel on.

    weights, activations   the codes or numbers that are multiplied; `units` of them in a block
    weight_meta, act_meta  what is behind those of the block: scales, zeros and pair sums of 32 rows; `FIELDS` of R rows
    """

    weights: Value
    activations: Value
    weight_meta: Value
    act_meta: Value
    units: Value
    row_offset: Value


class BlockEnd:
    """Adds blocks' sums to totals, which are in registers, or in memory (`scratch`): row by row, a vector each.

    Attributes:
        scaled_rows, scaled_vectors: The part of the tile whose sums `_scale` adds.
    """

    spec: TileSpec
    isa: ISA
    f: Function
    in_registers: bool
    totals: list[Variable]
    scratch: Value
    scaled_rows: range
    scaled_vectors: range

    @property
    def scale_bytes(self) -> int:
        return element_of(self.spec.weight.scale).size

    @property
    def rows(self) -> int:
        return self.spec.schedule.rows

    @property
    def vectors(self) -> int:
        return self.spec.schedule.vectors

    @property
    def integer(self) -> bool:
        """Whether products are of int8 codes, whose sums are int32."""
        return self.spec.activation.inner == "int8"

    def _total(self, n: int) -> Value:
        size = self.isa.lanes * 4
        return self.totals[n].value if self.in_registers else self.scratch.load(self.isa.floats, n * size, size)

    def _set_total(self, n: int, value: Value) -> None:
        size = self.isa.lanes * 4
        if self.in_registers:
            self.totals[n].value = value
        else:
            self.scratch.store(value, n * size, size)

    def _scales(self, weight_meta: Value, row_offset: Value, v: int, at: int = 0) -> Value:
        """Scales (or offsets, `at` bytes further) of one vector of outputs, as they are stored."""
        kind = vector(element_of(self.spec.weight.scale).stored, self.isa.lanes)
        return (weight_meta + row_offset * self.scale_bytes).load(kind, at + v * self.isa.lanes * self.scale_bytes, self.scale_bytes)

    def _zero(self, weight_meta: Value, row_offset: Value, v: int) -> Value | None:
        """Points or offsets of one vector of outputs; None where the sums need none."""
        weight, lanes, after_scales = self.spec.weight, self.isa.lanes, PANEL * self.scale_bytes
        match weight.zero:
            case "none":
                return None
            case "offset":
                return self.isa.to_float(self._scales(weight_meta, row_offset, v, after_scales), weight.scale)
            case "point" if weight.subtracts_points:
                return None
            case "point":
                point = (weight_meta + row_offset).load(vector("i8", lanes), after_scales + v * lanes).to("i32", unsigned=True)
                return point if self.spec.activation.block_sum == "biased" else point.to("float")
            case _:
                raise unreachable(weight.zero, "the zero of a format")

    def _rounding_term(self, weight_meta: Value, row_offset: Value, v: int, scale: Value) -> Value:
        """-ROUND * scale: removes the bias of sums that were multiplied by the scale."""
        return scale * -ROUND

    def _field(self, act_meta: Value, which: int, row: int, kind: str) -> Value:
        """A row's SCALE, CORRECTION, SUM or OFFSET, in every lane."""
        return act_meta.load(kind, 4 * (which * self.rows + row), 4).splat(self.isa.lanes)

    def _scale(self, total: Callable[[int], Value], record: Record, weight_sums: list[Value]) -> None:
        """Scale the block's sums, of which total(n) is the n-th, and add them to the outputs."""
        weight, act_meta = self.spec.weight, record.act_meta
        at = record.weight_meta, record.row_offset
        scales = [self.isa.to_float(self._scales(*at, v), weight.scale) for v in range(self.vectors)]
        zeros = [self._zero(*at, v) for v in range(self.vectors)]
        block_sum = self.spec.activation.block_sum
        match block_sum:
            case "biased":
                rounding_terms = [self._rounding_term(*at, v, scale) for v, scale in enumerate(scales)]
                self._scale_biased(total, act_meta, scales, rounding_terms, zeros)
            case "bracketed":
                self._scale_bracketed(total, act_meta, scales, zeros)
            case "plain" | "folded":
                code_sums = [self._code_sum(s, z, record.units) for s, z in zip(weight_sums, zeros, strict=bool(weight_sums))]
                self._scale_plain(total, act_meta, scales, zeros, code_sums, folded=block_sum == "folded")
            case _:
                raise unreachable(block_sum, "the conversion of a block's sum,")

    def _scale_plain(
        self,
        total: Callable[[int], Value],
        act_meta: Value,
        scales: list[Value],
        zeros: list[Value | None],
        code_sums: list[Value],
        *,
        folded: bool,
    ) -> None:
        """`_scale` by a conversion of integer sums and fused multiply-adds.

        Args:
            total: The sum of products with a number.
            act_meta: Address of the rows' fields.
            scales, zeros: Of the weight, by vectors.
            code_sums: Of the weight's codes less their points, where activations have an offset; else none.
            folded: CORRECTION is a float, which is added to the scaled sum.
        """
        zero_kind, f = self.spec.weight.zero, self.f
        for i in self.scaled_rows:
            scale = self._field(act_meta, SCALE, i, "float") if self.integer and not self.spec.scaled_at_end else None
            total_x = self._field(act_meta, SUM, i, "float") if zero_kind != "none" else None
            correction = self._field(act_meta, CORRECTION, i, "float") if folded else None
            for v in self.scaled_vectors:
                x, zero = total(i * self.vectors + v), zeros[v]
                if self.integer:
                    x = x.to("float")
                    if zero_kind == "point" and zero is not None and total_x is not None:
                        x = f.fma(f.value(x.type, -0.0) - zero, total_x, x)
                if scale is not None:
                    more = code_sums[v] * self._field(act_meta, OFFSET, i, "float") if code_sums else correction
                    x = x * scale if more is None else f.fma(x, scale, more)
                n, out = i * self.vectors + v, self._total(i * self.vectors + v)
                if zero_kind == "offset" and zero is not None and total_x is not None:
                    out = f.fma(zero, total_x, out)
                self._set_total(n, f.fma(x, scales[v], out))
            f.fence()

    def _scale_bracketed(self, total: Callable[[int], Value], act_meta: Value, scales: list[Value], offsets: list[Value | None]) -> None:
        """`_scale` with the activation's scale applied last. An offset times a sum of codes is exact: they have 11 and 12 bits."""
        f = self.f
        for i in self.scaled_rows:
            scale = None if self.spec.scaled_at_end else self._field(act_meta, SCALE, i, "float")
            codes = self._field(act_meta, SUM, i, "float")
            for v in self.scaled_vectors:
                n, offset = i * self.vectors + v, offsets[v]
                assert offset is not None
                x = f.fma(total(n).to("float"), scales[v], offset * codes)
                self._set_total(n, self._total(n) + x if scale is None else f.fma(x, scale, self._total(n)))
            f.fence()

    def _scale_biased(
        self, total: Callable[[int], Value], act_meta: Value, scales: list[Value], rounding_terms: list[Value], zeros: list[Value | None]
    ) -> None:
        """`_scale` by two fused multiply-adds. The first, (ROUND + sum) * scale - ROUND * scale, has an exact rounding term.

        Zero points are subtracted from the integer sums before: a sum of activations is an int16 paired with a 0.
        """
        weight, isa, f = self.spec.weight, self.isa, self.f
        subtracted, points = correction_point(isa, weight.bits, weight.zero, True), list[Value]()
        if weight.zero == "point":
            points = [zero * -1 + subtracted for zero in zeros if zero is not None]
        for i in self.scaled_rows:
            scale = self._field(act_meta, SCALE, i, "float")
            total_x = self._field(act_meta, SUM, i, "i32" if points else "float") if weight.zero != "none" else None
            for v in self.scaled_vectors:
                n = i * self.vectors + v
                x, out, zero = total(n), self._total(n), zeros[v]
                if total_x is not None and points:
                    x = isa.dot_shorts(f, x, points[v], total_x)
                elif total_x is not None and zero is not None:
                    out = f.fma(zero, total_x, out)
                self._set_total(n, f.fma(f.fma(x.bits(isa.floats), scales[v], rounding_terms[v]), scale, out))
            f.fence()

    def _code_sum(self, unit_sum: Value, zero: Value | None, units: Value) -> Value:
        """Sum of the block's weight codes, points subtracted, as float: what an offset of the activations multiplies."""
        weight = self.spec.weight
        count = units * self.spec.activation.unit
        correction = count * self.isa.correction(weight.bits, weight.signed)
        total = (unit_sum + correction.to("i32").splat(self.isa.lanes)).to("float")
        if weight.zero == "point" and zero is not None:  # elements that pad a block hold the point itself
            return self.f.fma(self.f.value(total.type, -0.0) - zero, count.to("float").splat(self.isa.lanes), total)
        return total
