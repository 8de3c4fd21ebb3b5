"""The end of a block along K: scales its sums of products and adds them to a tile's totals, of R rows i by V vectors of outputs n.

    total[i, n] += a[i] * scale[n] * (sum[i, n] - point[n] * code_sum[i])  +  offset[n] * a[i] * code_sum[i]

    sum[i, n] = sum over k of q[n, k] * x[i, k], of weight codes and activation codes      accumulators of `tile.py` or `amx.py`
    a[i]: activation scale; code_sum[i] = sum over k of x[i, k]                            written by `activations.py` behind the block
    scale[n], and point[n] or offset[n]                                                    behind the block's codes in the panel

int8 activations with an offset o[i] add o[i] * scale[n] * sum over k of (q[n, k] - point[n]). Float activations have no a, and SUM is the
sum of x; for weights with offsets SUM is a[i] * code_sum[i], but in sums that are "bracketed" or scaled at the end. `tile.py` says what is
rounded. `BlockEnd` is the base class of all tiles; `TileSpec.activation.block_sum` chooses one of its three ways.
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
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ROUND, ROUND_RANGE, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL

HIGHEST_CODE = 15  # of 4 bits
LARGEST_ACT = 127  # int8 activations are -127 … 127
SCALE, CORRECTION, SUM, OFFSET = range(FIELDS)  # the fields of activations behind each block


def biasable(fmt: Format, block: int) -> bool:
    """Return whether `BlockSum` "biased" is exact for blocks of so many elements.

    It is if ROUND + a block's sum of products is a float, ROUND times a scale, too, and sums of activations that meet points are int16.
    """
    largest = 1 << (fmt.code_bits - 1) if fmt.signed else (1 << fmt.bits) - 1
    sum_fits = block * largest * LARGEST_ACT <= ROUND_RANGE and (fmt.zero != "point" or block * LARGEST_ACT < 1 << 15)
    return fmt.scale == torch.float16 and sum_fits


def correction_point(isa: ISA, bits: int, zero: str, biased: bool) -> int:
    """Return the zero point that the corrections of biased sums subtract; 0: none.

    With HIGHEST_CODE, codes plus HIGHEST_CODE - point are unsigned bytes: tiles need not subtract points from sums.
    """
    return HIGHEST_CODE if biased and zero == "point" and bits == 4 and isa.tuning.expansion is not None else 0


class Record(NamedTuple):
    """The addresses of a block, or of one of its units, for the outputs from row `row_offset` of a panel on.

    Attributes:
        weights, activations: The unit's codes, or those of the block's first unit.
        weight_meta: The block's scales, zeros and pair sums of 32 rows.
        act_meta: The block's `FIELDS` of R rows.
        units: Units of the block.
        row_offset: First output in the panel.
    """

    weights: Value
    activations: Value
    weight_meta: Value
    act_meta: Value
    units: Value
    row_offset: Value


class BlockEnd:
    """Adds blocks' sums to totals.

    Attributes:
        spec, isa, f: What the tile is compiled for, what emits its instructions, and where to.
        in_registers: Totals are in `totals`; else in memory, `scratch`. Both have R * V vectors, row by row.
        scaled_rows, scaled_vectors: The part of the tile whose sums `_add_scaled` adds.
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

    def _scales(self, weight_meta: Value, row_offset: Value, v: int, offset: int = 0) -> Value:
        """Return the scales of one vector of outputs as they are stored, or the numbers of their type `offset` bytes further."""
        kind = vector(element_of(self.spec.weight.scale).stored, self.isa.lanes)
        return (weight_meta + row_offset * self.scale_bytes).load(kind, offset + v * self.isa.lanes * self.scale_bytes, self.scale_bytes)

    def _zero(self, weight_meta: Value, row_offset: Value, v: int) -> Value | None:
        """Return the points (float, or int32 where sums are "biased") or offsets (float) of one vector of outputs; None: sums need none."""
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
        """Return -ROUND * scale: what removes ROUND from "biased" sums that were multiplied by the scale."""
        return scale * -ROUND

    def _field(self, act_meta: Value, field: int, row: int, kind: str) -> Value:
        """Return a row's SCALE, CORRECTION, SUM or OFFSET, of LLVM's type `kind`, in every lane."""
        return act_meta.load(kind, 4 * (field * self.rows + row), 4).splat(self.isa.lanes)

    def _add_scaled(self, sum_of: Callable[[int], Value], record: Record, weight_sums: list[Value]) -> None:
        """Scale a block's sums and add them to the totals.

        Args:
            sum_of: Returns the n-th vector of the sums: n = row * V + v.
            record: The block.
            weight_sums: Sums of the weight's codes, a vector each, where activations have an offset; else none.
        """
        weight, act_meta = self.spec.weight, record.act_meta
        at = record.weight_meta, record.row_offset
        scales = [self.isa.to_float(self._scales(*at, v), weight.scale) for v in range(self.vectors)]
        zeros = [self._zero(*at, v) for v in range(self.vectors)]
        block_sum = self.spec.activation.block_sum
        match block_sum:
            case "biased":
                rounding_terms = [self._rounding_term(*at, v, scale) for v, scale in enumerate(scales)]
                self._add_biased(sum_of, act_meta, scales, rounding_terms, zeros)
            case "bracketed":
                self._add_bracketed(sum_of, act_meta, scales, zeros)
            case "plain" | "folded":
                code_sums = [self._code_sum(s, z, record.units) for s, z in zip(weight_sums, zeros, strict=bool(weight_sums))]
                self._add_plain(sum_of, act_meta, scales, zeros, code_sums, folded=block_sum == "folded")
            case _:
                raise unreachable(block_sum, "the conversion of a block's sum,")

    def _add_plain(
        self,
        sum_of: Callable[[int], Value],
        act_meta: Value,
        scales: list[Value],
        zeros: list[Value | None],
        code_sums: list[Value],
        *,
        folded: bool,
    ) -> None:
        """Add sums that are "plain" or `folded`: integers become floats, points are subtracted, and fused multiply-adds scale.

        Args:
            sum_of: As of `_add_scaled`.
            act_meta: Address of the rows' fields.
            scales, zeros: Of the weight, by vectors.
            code_sums: As `_code_sum` returns them, by vectors, where activations have an offset; else none.
            folded: CORRECTION is a float, which is added to the scaled sum.
        """
        zero_kind, f = self.spec.weight.zero, self.f
        for i in self.scaled_rows:
            act_scale = self._field(act_meta, SCALE, i, "float") if self.integer and not self.spec.scaled_at_end else None
            act_sum = self._field(act_meta, SUM, i, "float") if zero_kind != "none" else None
            correction = self._field(act_meta, CORRECTION, i, "float") if folded else None
            for v in self.scaled_vectors:
                block_sum, zero = sum_of(i * self.vectors + v), zeros[v]
                if self.integer:
                    block_sum = block_sum.to("float")
                    if zero_kind == "point" and zero is not None and act_sum is not None:
                        block_sum = f.fma(f.value(block_sum.type, -0.0) - zero, act_sum, block_sum)
                if act_scale is not None:
                    addend = code_sums[v] * self._field(act_meta, OFFSET, i, "float") if code_sums else correction
                    block_sum = block_sum * act_scale if addend is None else f.fma(block_sum, act_scale, addend)
                n, total = i * self.vectors + v, self._total(i * self.vectors + v)
                if zero_kind == "offset" and zero is not None and act_sum is not None:
                    total = f.fma(zero, act_sum, total)
                self._set_total(n, f.fma(block_sum, scales[v], total))
            f.fence()

    def _add_bracketed(self, sum_of: Callable[[int], Value], act_meta: Value, scales: list[Value], offsets: list[Value | None]) -> None:
        """Add a[i] * (scale[n] * sum + offset[n] * code_sum[i]). The second product is exact: its factors have 11 and 12 bits."""
        f = self.f
        for i in self.scaled_rows:
            act_scale = None if self.spec.scaled_at_end else self._field(act_meta, SCALE, i, "float")
            code_sum = self._field(act_meta, SUM, i, "float")
            for v in self.scaled_vectors:
                n, offset = i * self.vectors + v, offsets[v]
                assert offset is not None, "blocks are bracketed where weights have offsets"
                bracket = f.fma(sum_of(n).to("float"), scales[v], offset * code_sum)
                self._set_total(n, self._total(n) + bracket if act_scale is None else f.fma(bracket, act_scale, self._total(n)))
            f.fence()

    def _add_biased(
        self, sum_of: Callable[[int], Value], act_meta: Value, scales: list[Value], rounding_terms: list[Value], zeros: list[Value | None]
    ) -> None:
        """Add sums that are the bits of the floats ROUND + sum, by two fused multiply-adds.

        The first one, (ROUND + sum) * scale - ROUND * scale, has an exact last term. Zero points are subtracted from the integer sums
        before: SUM is an int16 paired with a 0, for `ISA.dot_shorts`.
        """
        weight, isa, f = self.spec.weight, self.isa, self.f
        subtracted, points = correction_point(isa, weight.bits, weight.zero, True), list[Value]()
        if weight.zero == "point":
            points = [zero * -1 + subtracted for zero in zeros if zero is not None]
        for i in self.scaled_rows:
            act_scale = self._field(act_meta, SCALE, i, "float")
            act_sum = self._field(act_meta, SUM, i, "i32" if points else "float") if weight.zero != "none" else None
            for v in self.scaled_vectors:
                n = i * self.vectors + v
                block_sum, total, zero = sum_of(n), self._total(n), zeros[v]
                if act_sum is not None and points:
                    block_sum = isa.dot_shorts(f, block_sum, points[v], act_sum)
                elif act_sum is not None and zero is not None:
                    total = f.fma(zero, act_sum, total)
                self._set_total(n, f.fma(f.fma(block_sum.bits(isa.floats), scales[v], rounding_terms[v]), act_scale, total))
            f.fence()

    def _code_sum(self, weight_sum: Value, zero: Value | None, units: Value) -> Value:
        """Return the float sum of a block's weight codes less their points, which an offset of the activations multiplies.

        Args:
            weight_sum: Sum of the unit weights (`ISA.unit_weights`).
            zero: Points, if the weight has such.
            units: Units of the block.
        """
        weight = self.spec.weight
        count = units * self.spec.activation.unit
        correction = count * self.isa.correction(weight.bits, weight.signed)
        code_sum = (weight_sum + correction.to("i32").splat(self.isa.lanes)).to("float")
        if weight.zero == "point" and zero is not None:  # elements that pad a block hold the point itself
            return self.f.fma(self.f.value(code_sum.type, -0.0) - zero, count.to("float").splat(self.isa.lanes), code_sum)
        return code_sum
