"""Convolutions of int8 codes by products of unsigned codes with signed weights: int8 -> int8.

    acc[m, co] = sum over kh, runs of codes  w[co, kh, …] * (x[image + place of output m + kh * line + …] + 128)  -  128 * sum(w[co])

The loops are those of `direct.py`; 128 is added while lines are copied, so that what it adds to each output depends on the weights alone.
Two kinds of layers gain:

- Stems, whose taps have few channels. `direct.py` writes their patches out one by one, so that runs of 21 codes become one of 147, and sums
  each. Here tiles read the runs where they lie, with weights of 0 for what pads a run to whole quads.
- Small images behind a ReLU, where -128 stands for 0, outside of the image as well. That becomes 0, so lines of the kernel that lie
  outside need no products: of 3 x 3 on 7 x 7 pixels that is a tenth of all.

    weights = for each tile's outputs: corrections | of each quad of codes, four weights for each output

Weights are kept in this second form, made at the first call, of a little more than a byte for each code.

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

_MOST_QUADS = 8  # whose products are written out
_LEAST_LEFT_OUT = 1 / 16  # of all products, for which other weights are worth their memory
_MOST_PADDED = 1.2  # times the codes of a patch


def _unit(run: int) -> int:
    """Codes that a tile takes at a time."""
    return 4 * max(n for n in range(1, _MOST_QUADS + 1) if run // 4 % n == 0)


@tile_function
def build_tile(spec: TileSpec, isa: ISA, f: Function) -> None:
    """`direct.build_tile` for unsigned activations; it does not read sums and scale."""
    _UnsignedTile(spec, isa, f).emit(f.value("i64", 0))


class _UnsignedTile(RequantizingDirectTile):
    """R outputs of an image times the weights of a group of columns."""

    def emit(self, row_offset: Value) -> None:
        spec, isa, f, size = self.spec, self.isa, self.f, 4 * self.isa.lanes
        unit = spec.activation.unit
        self.prefetches = unit == 4 * _MOST_QUADS  # stems have few weights, and short runs
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
        for quad in range(spec.activation.unit // 4):
            vectors = [weights.load(isa.quads, (quad * self.vectors + v) * size, size) for v in range(self.vectors)]
            for i, row in enumerate(codes):
                four = isa.spread(row, "i32", 4 * quad).bits(isa.quads)
                for v, weight in enumerate(vectors):
                    n = i * self.vectors + v
                    sums[n] = isa.pinned(f, isa.dot(f, sums[n], four, weight, spec.weight.bits))
            f.fence()
        return sums


def supports(sizes: Filter, window: Window, out_height: int, outside: int, isa: ISA) -> bool:
    """Whether `UnsignedConvKernel` takes int8 images and weights of these sizes, and is faster than other ways."""
    run = line_run(sizes, window)
    worth = sizes.channels % 8 != 0 or (outside == -128 and _left_out(sizes, window, out_height) >= _LEAST_LEFT_OUT)
    return isa.mixed_dot and has_exact_byte_sums(sizes) and worth and round_up(run, 4) <= _MOST_PADDED * run


def _left_out(sizes: Filter, window: Window, out_height: int) -> float:
    """The part of all products that belongs to lines outside of the image, at stride 1; else 0."""
    kernel = sizes.kernel[0]
    if window.stride[0] > 1:
        return 0
    height = out_height - 1 - sum(window.padding[:2]) + (kernel - 1) * window.dilation[0] + 1
    inside = lines_inside(window, kernel, height, out_height)
    return 1 - sum(max(0, stop - first) for first, stop in inside) / (out_height * kernel)


class UnsignedConvKernel(RearrangedWeightsKernel):
    """Has signed weights in whole quads, which are made at the first call."""

    def __init__(self, sizes: Filter, window: Window, linear: LinearKernel) -> None:
        super().__init__(sizes, window, linear)
        self.run = line_run(sizes, window)
        self.padded = round_up(self.run, 4)
        self.form = f"runs of {self.run} in quads"

    def weights_of(self, codes: Codes) -> Tensor:
        """The weights as the kernel reads them, uint8 [groups of the convolution, tiles' outputs, bytes]."""
        sizes, width, n = self.sizes, tile_width(self.isa), self.sizes.out // self.sizes.groups
        columns = round_up(n, PANEL)
        w = torch.zeros(sizes.groups, columns, sizes.k // self.run, self.padded, dtype=torch.int8, device="cpu")
        w[:, :n, :, : self.run] = codes.values().reshape(sizes.groups, n, -1, self.run)
        quads = w.view(sizes.groups, columns // width, width, -1, 4).transpose(2, 3).flatten(2)
        corrections = w.sum((2, 3), dtype=torch.int32).mul_(-128).view(sizes.groups, columns // width, width)
        return torch.cat((corrections.view(torch.uint8), quads.contiguous().view(torch.uint8)), 2)

    def tile(self, panel_bytes: int) -> RearrangedTile:
        return RearrangedTile(build_tile, panel_bytes, tile_width(self.isa), self.padded, _unit(self.padded))
