"""Convolutions of int8 codes by products of unsigned codes with signed weights: int8 -> int8.

    acc[m, co] = sum over kh, runs, i of  w[co, kh, run, i] * (q[patch offset of m + kh * line_step + run * run_step + i] + 128)
                 - 128 * sum(w[co])

Loops and patches are those of `direct.py`: 128 is added while lines are copied, so that what it adds to an output depends on the weights
alone, and no sums of codes are needed. Two kinds of layers gain (`supports`):

- Stems, whose pixels have few channels. `direct.py` gathers their patches, so that runs of 21 codes become one of 147, and sums each. Here
  tiles read the runs in copied lines, with weights of 0 for what pads a run to whole quads of codes.
- Small images behind a ReLU, where -128 stands for 0, in the padding as well. With 128 added that is 0, so lines of the kernel in the
  padding need no products: a tenth of all with 3 x 3 on 7 x 7 pixels.

    weights, for each tile's outputs    int32 [outputs]  corrections -128 * sum(w[co])
                                        int8 [kh, run, quad, outputs, 4]

Weights take a little more than a byte for each code; they are computed at the first call and cached.

Arithmetic: that of `tile.RequantizingTile`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.conv.direct import RequantizingDirectTile, tile_function
from halfbyte.kernels.cpu.conv.direct_call import (
    RearrangedTile,
    RearrangedWeightsKernel,
    has_exact_byte_sums,
    line_run,
    lines_inside,
    tile_width,
)
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import TileSpec
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

_QUAD = 4  # codes that one dot product multiplies
_MOST_QUADS = 8  # of a unit, whose products are unrolled
_LEAST_SKIPPED = 1 / 16  # of all products, for which rearranged weights are worth their memory
_MOST_PADDING = 1.2  # codes of a run with its padding, to those without


def _unit_of(run: int) -> int:
    """Return how many codes of a run, which is whole quads, a tile reads at a time: as many as divide it."""
    quads = run // _QUAD
    return _QUAD * max(n for n in range(1, _MOST_QUADS + 1) if quads % n == 0)


@tile_function
def build_tile(spec: TileSpec, isa: ISA, f: Function) -> None:
    """Emit `direct.build_tile` for unsigned codes; the function does not read the parameters `sums` and `scale`."""
    _UnsignedTile(spec, isa, f).emit(f.value("i64", 0))


class _UnsignedTile(RequantizingDirectTile):
    """Emits a tile of R outputs of an image times all outputs of a panel of rearranged weights."""

    def emit(self, row_offset: Value) -> None:
        spec, isa, f, size = self.spec, self.isa, self.f, 4 * self.isa.lanes
        unit = spec.activation.unit
        self.prefetches = unit == _QUAD * _MOST_QUADS  # stems have few weights, and short runs
        self.unit_bytes, self.row_unit_bytes = unit * self.vectors * isa.lanes, unit
        patches = self._patches()
        starts = [self._initial_sum(row_offset, v) + self.weights.load(isa.ints, v * size, size) for v in range(self.vectors)]
        accumulators = [f.variable(start) for start in starts * self.rows]
        self._add_products(accumulators, self.weights + size * self.vectors, patches)
        self._finish([total.value for total in accumulators], self.weights, row_offset)
        self._write(row_offset)

    def _multiply_unit_of(self, weights: Value, codes: list[Value], totals: list[Value]) -> list[Value]:
        spec, isa, f, size = self.spec, self.isa, self.f, 4 * self.isa.lanes
        sums = list(totals)
        for quad in range(spec.activation.unit // _QUAD):
            factors = [weights.load(isa.quads, (quad * self.vectors + v) * size, size) for v in range(self.vectors)]
            for i, row in enumerate(codes):
                quad_of_row = isa.spread(row, "i32", _QUAD * quad).bits(isa.quads)
                for v, factor in enumerate(factors):
                    n = i * self.vectors + v
                    sums[n] = isa.pinned(f, isa.dot(f, sums[n], quad_of_row, factor, spec.weight.bits))
            f.fence()
        return sums


def supports(sizes: Filter, window: Window, out_height: int, outside: int, isa: ISA) -> bool:
    """Return whether `UnsignedConvKernel` takes int8 images and weights of these sizes, and is faster than other kernels.

    Args:
        sizes, window: Of the filter.
        out_height: Lines of outputs.
        outside: The code of padding.
        isa: The instruction set.
    """
    run = line_run(sizes, window)
    is_stem = sizes.channels % 8 != 0
    skips_lines = outside == -128 and _skipped(sizes, window, out_height) >= _LEAST_SKIPPED
    has_little_padding = round_up(run, _QUAD) <= _MOST_PADDING * run
    return isa.mixed_dot and has_exact_byte_sums(sizes) and (is_stem or skips_lines) and has_little_padding


def _skipped(sizes: Filter, window: Window, out_height: int) -> float:
    """Return the part of all products that belongs to lines of the kernel in the padding; 0 with a vertical stride, where it is small."""
    kernel = sizes.kernel[0]
    if window.stride[0] > 1:
        return 0
    height = out_height + (kernel - 1) * window.dilation[0] - sum(window.padding[:2])
    inside = lines_inside(window, kernel, height, out_height)
    return 1 - sum(max(0, stop - first) for first, stop in inside) / (out_height * kernel)


class UnsignedConvKernel(RearrangedWeightsKernel):
    """The compiled convolution of int8 images by unsigned codes; conditions as of `RearrangedWeightsKernel`."""

    def __init__(self, sizes: Filter, window: Window, linear: LinearKernel) -> None:
        super().__init__(sizes, window, linear)
        self.run = line_run(sizes, window)
        self.padded_run = round_up(self.run, _QUAD)
        self.form = f"runs of {self.run} in quads"

    def weights_of(self, codes: Codes) -> Tensor:
        """Return the weights as the kernel reads them, uint8 [channel groups, tiles' outputs, bytes]."""
        sizes, width, n = self.sizes, tile_width(self.isa), self.sizes.out // self.sizes.groups
        columns = round_up(n, PANEL)
        w = torch.zeros(sizes.groups, columns, sizes.k // self.run, self.padded_run, dtype=torch.int8, device="cpu")
        w[:, :n, :, : self.run] = codes.values().reshape(sizes.groups, n, -1, self.run)
        quads = w.view(sizes.groups, columns // width, width, -1, _QUAD).transpose(2, 3).flatten(2)
        corrections = w.sum((2, 3), dtype=torch.int32).mul_(-128).view(sizes.groups, columns // width, width)
        return torch.cat((corrections.view(torch.uint8), quads.contiguous().view(torch.uint8)), 2)

    def tile(self, panel_bytes: int) -> RearrangedTile:
        return RearrangedTile(build_tile, panel_bytes, tile_width(self.isa), self.padded_run, _unit_of(self.padded_run))
