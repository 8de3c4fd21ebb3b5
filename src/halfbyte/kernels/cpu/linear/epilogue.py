"""The epilogue of a tile: converts totals of R rows i by V vectors of outputs n to outputs, in float32 until these are stored.

    y[i, n] = clamp(total[i, n] + bias[n] + residual[i, n])                              `Epilogue`
    y[i, n] = gelu(total[i, n] + bias[n]) * residual[i, n]                               with GELU; residual: the up half of GEGLU, or none
    o[i, n] = clamp(round(fma(float(total[i, n]), multiplier[n], offset[n])))            `RequantizingEpilogue`: int8, ties to even

`BlockEnd` (`block_end.py`) computed the totals, and `Tile` (`tile.py`) calls `_write` after the last block of K. Outputs of a panel beyond
`columns`, which pad the weight, are not touched. The field `residual` of LINEAR is the distance of the residual from the output in bytes;
0: there is none.
"""

from __future__ import annotations

import itertools

from halfbyte.errors import unreachable
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elementary import gelu, gelu_tanh, rounded_codes
from halfbyte.kernels.cpu.codegen.elements import element_of
from halfbyte.kernels.cpu.codegen.ir import Value, vector
from halfbyte.kernels.cpu.linear.block_end import BlockEnd

REQUANTIZING_OFFSET, MULTIPLIER, INITIAL_SUM = range(3)  # rows of the table of `RequantizingEpilogue`
_LINE = 64  # bytes of a cache line


class Epilogue(BlockEnd):
    """Floating-point outputs.

    Attributes:
        args, out, bias, columns: Of the tile's call, as `tile.build` has them.
        count: Vectors of totals, R * V.
        row_scales: Memory for a scale of each row that totals are multiplied by (`TileSpec.scaled_at_end`); else empty.
    """

    args: Value
    out: Value
    bias: Value
    columns: Value
    count: int
    row_scales: list[Value]

    @property
    def out_bytes(self) -> int:
        return element_of(self.spec.out).size

    def _prefetch_outputs(self, row_offset: Value) -> None:
        """Prefetch the tile's lines of outputs: a store that misses the cache holds up the stores after it."""
        stride, size = LINEAR.load(self.args, "out_stride"), self.isa.lanes * self.vectors * self.out_bytes
        for row, at in itertools.product(range(self.rows), range(0, size, _LINE)):
            self.f.prefetch(self.out + row_offset * self.out_bytes + stride * row + at)

    def _write(self, row_offset: Value) -> None:
        """Write the outputs from row `row_offset` of the panel on, whole vectors if none of them pads the weight."""
        isa, f = self.isa, self.f
        for n in range(self.count):
            scale = self.row_scales[n // self.vectors].load("float", align=4).splat(isa.lanes) if self.row_scales else None
            self.scratch.store(self._total(n) if scale is None else self._total(n) * scale, n * isa.lanes * 4, isa.lanes * 4)
        residual = LINEAR.load(self.args, "residual")
        no_residual = residual.equals(0)
        inside = (self.columns - row_offset) > isa.lanes * self.vectors - 1
        with f.when(inside & no_residual):
            self._write_vectors(row_offset, None)
        with f.when(inside & no_residual.equals(0)):
            self._write_vectors(row_offset, residual)
        with f.when(inside.equals(0)):
            self._write_elements(row_offset, residual)

    def _write_vectors(self, row_offset: Value, residual: Value | None) -> None:
        """Write all outputs of the tile. `residual`: bytes from an output to its residual; None: there is none."""
        isa, f, kind, stored = self.isa, self.f, self.spec.out, element_of(self.spec.out).stored
        stride, (low, high) = LINEAR.load(self.args, "out_stride"), (bound.splat(isa.lanes) for bound in self._clamp())
        for n in range(self.count):
            row, column = n // self.vectors, n % self.vectors * isa.lanes
            to = self.out + stride * row + row_offset * self.out_bytes
            bias = (self.bias + row_offset * 4).load(isa.floats, column * 4, 4)
            value = self.scratch.load(isa.floats, n * isa.lanes * 4, isa.lanes * 4) + bias
            residual_value = None
            if residual is not None:
                raw = (to + residual).load(vector(stored, isa.lanes), column * self.out_bytes, self.out_bytes)
                residual_value = isa.to_float(raw, kind)
            if residual_value is not None and not self.spec.gelu:
                value = value + residual_value
            value = self._activated(value, low, high)
            if residual_value is not None and self.spec.gelu:
                value = value * residual_value
            to.store(isa.from_float(value, kind), column * self.out_bytes, self.out_bytes)
            f.fence()

    def _write_elements(self, row_offset: Value, residual: Value) -> None:
        """Write the outputs of a tile that reaches beyond `columns`, one by one, after the vectors of totals were stored to `scratch`."""
        isa, f, kind, stored = self.isa, self.f, self.spec.out, element_of(self.spec.out).stored
        stride, (low, high) = LINEAR.load(self.args, "out_stride"), self._clamp()
        inside = (self.columns - row_offset).max_keeping_nan(0)
        for row in range(self.rows):
            for c in f.loop(inside):
                to = self.out + stride * row + (c + row_offset) * self.out_bytes
                value = self.scratch.load("float", c * 4 + row * self.vectors * isa.lanes * 4, 4)
                value = value + self.bias.load("float", (c + row_offset) * 4, 4)
                # Without a residual this reads the output's own memory, and does not use what it finds there.
                residual_value = isa.to_float((to + residual).load(stored, 0, self.out_bytes), kind)
                if self.spec.gelu:
                    value = self._activated(value, low, high)
                    value = residual.equals(0).select(value, value * residual_value)
                else:
                    value = self._activated(residual.equals(0).select(value, value + residual_value), low, high)
                to.store(isa.from_float(value, kind), 0, self.out_bytes)

    def _activated(self, value: Value, low: Value, high: Value) -> Value:
        """Return gelu(value), or clamp(value) without GELU: the bounds are infinite with it."""
        match self.spec.gelu:
            case "":
                return value.max_keeping_nan(low).min_keeping_nan(high)
            case "none":
                return gelu(self.f, value)
            case "tanh":
                return gelu_tanh(self.f, value)
            case _:
                raise unreachable(self.spec.gelu, "the GELU of a product")

    def _clamp(self) -> tuple[Value, Value]:
        """Return the least and the greatest output, float."""
        return LINEAR.load_floats(self.args, "clamp")


class RequantizingEpilogue(Epilogue):
    """int8 outputs: totals are int32 sums, held as vectors of float bits.

    `bias` is a table [3, N] of 4-byte numbers, N padded to whole panels, whose rows lie `table_stride` bytes apart: REQUANTIZING_OFFSET and
    MULTIPLIER (float32), and INITIAL_SUM (int32).
    """

    def _column(self, table_row: int, row_offset: Value, v: int, kind: str) -> Value:
        """Return one vector of outputs of a row of the table, of LLVM's type `kind`."""
        table = self.bias + LINEAR.load(self.args, "table_stride") * table_row + row_offset * 4
        return table.load(kind, v * self.isa.lanes * 4, 4)

    def _write(self, row_offset: Value) -> None:
        """Write whole tiles directly, others to memory, from which rows are copied in pieces of 2^n bytes."""
        isa, f = self.isa, self.f
        width, stride = self.vectors * isa.lanes, LINEAR.load(self.args, "out_stride")
        inside = f.umin((self.columns - row_offset).max_keeping_nan(0), f.value("i64", width))
        with f.when(inside.equals(width)):
            self._write_codes(self.out + row_offset, stride, row_offset)
        with f.when(inside < width):
            codes = f.alloca("i8", self.count * isa.lanes, 64)
            self._write_codes(codes, f.value("i64", width), row_offset)
            for size in (1 << n for n in reversed(range((width - 1).bit_length()))):
                with f.when((inside & size).equals(size)):
                    at = inside & -2 * size  # the larger pieces, which are written already
                    for i in range(self.rows):
                        (self.out + row_offset + stride * i + at).store(codes.load(vector("i8", size), at + i * width, 1))

    def _write_codes(self, to: Value, stride: Value, row_offset: Value) -> None:
        """Store all codes of the tile at `to`, in rows that lie `stride` bytes apart."""
        isa, f = self.isa, self.f
        low, high = (bound.splat(isa.lanes) for bound in self._clamp())
        affine = [[self._column(row, row_offset, v, isa.floats) for row in (REQUANTIZING_OFFSET, MULTIPLIER)] for v in range(self.vectors)]

        def below_high(i: int, v: int) -> Value:
            """Return outputs of row i before they are rounded, clamped from above only."""
            offset, multiplier = affine[v]
            return f.fma(self._total(i * self.vectors + v).bits(isa.ints).to("float"), multiplier, offset).min_keeping_nan(high)

        if not isa.narrows or 4 % self.vectors:
            for v, i in itertools.product(range(self.vectors), range(self.rows)):
                (to + stride * i).store(rounded_codes(below_high(i, v).max_keeping_nan(low)), v * isa.lanes)
            return
        # Four vectors are narrowed together: those of several rows, the last of which is repeated where there are fewer.
        least, rows_together, width = self._clamp()[0].to("i8").splat(4 * isa.lanes), 4 // self.vectors, self.vectors * isa.lanes
        for start in range(0, self.rows, rows_together):
            rows = [min(start + i, self.rows - 1) for i in range(rows_together)]
            codes = isa.narrowed(f, [below_high(i, v) for i in rows for v in range(self.vectors)]).max_keeping_nan(least)
            for at, i in enumerate(rows):
                (to + stride * i).store(codes.shuffle(range(at * width, (at + 1) * width)))
            f.fence()
