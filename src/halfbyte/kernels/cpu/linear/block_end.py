"""The end of a block along K: its sums are scaled and added to the outputs.

    y[i, n] += scale[n] * a[i] * (sums[i, n] - point[n] * codes[i])  + offset[n] * a[i] * codes[i]

a are the scales of the activations, codes the sums of their codes. `tile.py` says what is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

from halfbyte.kernels.cpu.codegen.elements import element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.linear.biased import highest_point
from halfbyte.kernels.cpu.linear.tile_spec import ROUND, TileSpec
from halfbyte.layouts.cpu_tiles import PANEL


class BlockEnd:
    """Totals are in registers, or in memory (`scratch`): row by row, a vector each."""

    spec: TileSpec
    isa: ISA
    f: Function
    in_registers: bool
    totals: list[Variable]
    scratch: Value
    scaled_rows: range  # of the sums that `_scale` takes
    scaled_vectors: range

    @property
    def scale_bytes(self) -> int:
        return element_of(self.spec.scale).size

    def _total(self, n: int) -> Value:
        size = self.isa.lanes * 4
        return self.totals[n].value if self.in_registers else self.scratch.load(self.isa.floats, n * size, size)

    def _set_total(self, n: int, value: Value) -> None:
        size = self.isa.lanes * 4
        if self.in_registers:
            self.totals[n].value = value
        else:
            self.scratch.store(value, n * size, size)

    def _lanes(self, weight_meta: Value, row_offset: Value, v: int, at: int = 0) -> Value:
        """Scales (or offsets, `at` bytes further) of one vector of rows, as they are stored."""
        kind = vector(element_of(self.spec.scale).stored, self.isa.lanes)
        return (weight_meta + row_offset * self.scale_bytes).load(kind, at + v * self.isa.lanes * self.scale_bytes, self.scale_bytes)

    def _zero(self, weight_meta: Value, row_offset: Value, v: int) -> Value | None:
        spec, lanes = self.spec, self.isa.lanes
        if spec.zero == "none" or spec.points_off:
            return None
        after = PANEL * self.scale_bytes
        if spec.zero == "offset":
            return self.isa.to_float(self._lanes(weight_meta, row_offset, v, after), spec.scale)
        point = (weight_meta + row_offset).load(vector("i8", lanes), after + v * lanes).to("i32", unsigned=True)
        return point if spec.biased else point.to("float")

    def _rounding_term(self, weight_meta: Value, row_offset: Value, v: int, scale: Value) -> Value:
        """-ROUND * scale: removes the bias of sums that were multiplied by the scale."""
        return scale * -ROUND

    def _field(self, act_meta: Value, which: int, row: int, kind: str) -> Value:
        """A row's scale, correction, sum or offset, in every lane."""
        return act_meta.load(kind, 4 * (which * self.spec.rows + row), 4).splat(self.isa.lanes)

    def _scale(
        self, total: Callable[[int], Value], act_meta: Value, weight_meta: Value, row_offset: Value, weight_sums: list[Value], units: Value
    ) -> None:
        """Scale the block's sums, of which total(n) is the n-th, and add them to the outputs."""
        spec, isa, f = self.spec, self.isa, self.f
        scales = [isa.to_float(self._lanes(weight_meta, row_offset, v), spec.scale) for v in range(spec.vectors)]
        zeros = [self._zero(weight_meta, row_offset, v) for v in range(spec.vectors)]
        if spec.biased:
            rounding_terms = [self._rounding_term(weight_meta, row_offset, v, scale) for v, scale in enumerate(scales)]
            self._scale_biased(total, act_meta, scales, rounding_terms, zeros)
            return
        if spec.bracketed:
            self._scale_bracketed(total, act_meta, scales, zeros)
            return
        code_sums = [self._code_sum(s, z, units) for s, z in zip(weight_sums, zeros, strict=bool(weight_sums))]
        for i in self.scaled_rows:
            scale = self._field(act_meta, 0, i, "float") if spec.inner == "int8" and not spec.by_row else None
            total_x = self._field(act_meta, 2, i, "float") if spec.zero != "none" else None
            correction = self._field(act_meta, 1, i, "float") if spec.folded else None
            for v in self.scaled_vectors:
                x, zero = total(i * spec.vectors + v), zeros[v]
                if spec.inner == "int8":
                    x = x.to("float")
                    if spec.zero == "point" and zero is not None and total_x is not None:
                        x = f.fma(f.value(x.type, -0.0) - zero, total_x, x)
                if scale is not None:
                    more = code_sums[v] * self._field(act_meta, 3, i, "float") if spec.shifted else correction
                    x = x * scale if more is None else f.fma(x, scale, more)
                n, out = i * spec.vectors + v, self._total(i * spec.vectors + v)
                if spec.zero == "offset" and zero is not None and total_x is not None:
                    out = f.fma(zero, total_x, out)
                self._set_total(n, f.fma(x, scales[v], out))
            f.fence()

    def _scale_bracketed(self, total: Callable[[int], Value], act_meta: Value, scales: list[Value], offsets: list[Value | None]) -> None:
        """`_scale` with the activation's scale applied last. An offset times a sum of codes is exact: they have 11 and 12 bits."""
        spec, f = self.spec, self.f
        for i in self.scaled_rows:
            scale = None if spec.by_row else self._field(act_meta, 0, i, "float")
            codes = self._field(act_meta, 2, i, "float")
            for v in self.scaled_vectors:
                n, offset = i * spec.vectors + v, offsets[v]
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
        spec, isa, f = self.spec, self.isa, self.f
        highest, points = highest_point(isa, spec.bits, spec.zero, spec.biased), list[Value]()
        if spec.zero == "point":
            points = [zero * -1 + highest for zero in zeros if zero is not None]
        for i in self.scaled_rows:
            scale = self._field(act_meta, 0, i, "float")
            total_x = self._field(act_meta, 2, i, "i32" if points else "float") if spec.zero != "none" else None
            for v in self.scaled_vectors:
                n = i * spec.vectors + v
                x, out, zero = total(n), self._total(n), zeros[v]
                if total_x is not None and points:
                    x = isa.dot_shorts(f, x, points[v], total_x)
                elif total_x is not None and zero is not None:
                    out = f.fma(zero, total_x, out)
                self._set_total(n, f.fma(f.fma(x.bits(isa.floats), scales[v], rounding_terms[v]), scale, out))
            f.fence()

    def _code_sum(self, unit_sum: Value, zero: Value | None, units: Value) -> Value:
        """Sum of the block's weight codes, points taken off, as float: what an offset of the activations multiplies."""
        spec = self.spec
        count = units * spec.unit
        correction = count * self.isa.correction(spec.bits, spec.signed)
        total = (unit_sum + correction.to("i32").splat(self.isa.lanes)).to("float")
        if spec.zero == "point" and zero is not None:  # elements that pad a block hold the point itself
            return self.f.fma(self.f.value(total.type, -0.0) - zero, count.to("float").splat(self.isa.lanes), total)
        return total
