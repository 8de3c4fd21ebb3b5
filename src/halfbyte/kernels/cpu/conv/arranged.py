"""Convolutions of int8 codes by products of bytes, exact (`arrange.py`), where other exact products are of int16 (AVX2): int8 -> int8.

    acc[m, co] = correction[co] + sum over chunks c, slots j of  v[co, c, j] * (x[m, lane[c]] ^ xor_mask[c])[shuffle[c, j]]

The loops are those of `direct.py`. A chunk is 16 codes of the image, where they lie: one load, one xor and one shuffle of bytes put them
into the order of the tile's outputs, four further shuffles make vectors of each four of them.

    weights = for each tile's outputs: numbers of chunks with 2, 1, 0 coupled halves, lane of the first | corrections | chunks
    chunk   = weights of 4 quads | xor_mask | shuffle | lane of the next          each in whole vectors

Weights are kept in this second form, made at the first call, of 1.4 bytes for each code. Where the order would take more than a quarter
more chunks than there are lanes, `direct.py` does it.

Arithmetic: that of `tile.RequantizingTile`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.ir import Function, Value, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.conv import arrange
from halfbyte.kernels.cpu.conv.arrange import LANE
from halfbyte.kernels.cpu.conv.direct import DIRECT, RequantizingDirectTile, tile_function
from halfbyte.kernels.cpu.conv.direct_call import RearrangedTile, RearrangedWeightsKernel, has_exact_byte_sums, tile_run, tile_width
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import TileSpec
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

_HEAD = 128  # bytes before the chunks
_COUNTS, _FIRST, _CORRECTIONS = 0, 24, 64


class _Chunk(NamedTuple):
    """Offsets in a chunk, behind the weights of four quads, and its size, in bytes.

    Attributes:
        xor_mask: What the lane's codes are combined with.
        shuffle: The code of the lane for each slot.
        next_lane: Number of the next chunk's lane.
        size: Of the chunk.
    """

    xor_mask: int
    shuffle: int
    next_lane: int
    size: int

    @classmethod
    def of(cls, isa: ISA) -> _Chunk:
        vector, weights = 4 * isa.lanes, LANE * tile_width(isa)
        return cls(weights, weights + vector, weights + 2 * vector, weights + 3 * vector)


@tile_function
def build_tile(spec: TileSpec, isa: ISA, f: Function) -> None:
    """`direct.build_tile` for arranged weights; it does not read sums and scale."""
    _ArrangedTile(spec, isa, f).emit(f.value("i64", 0))


class _ArrangedTile(RequantizingDirectTile):
    """R outputs of an image times the weights of a group of columns."""

    def emit(self, row_offset: Value) -> None:
        isa, f, record = self.isa, self.f, self.weights
        patches = self._patches()
        starts = [self._initial_sum(row_offset, v) for v in range(self.vectors)]
        starts = [start + record.load(isa.ints, _CORRECTIONS + v * 4 * isa.lanes, 4) for v, start in enumerate(starts)]
        totals = [f.variable(start) for start in starts * self.rows]
        self.ones = f.pinned(f.value(isa.shorts, 1), isa.register)
        chunk, place = f.variable(record + _HEAD), f.variable(self._place(record, _FIRST))
        for number, coupled_halves in enumerate(arrange.COUPLED_HALVES):
            for _ in f.loop(record.load("i64", _COUNTS + 8 * number, 8)):
                here = [patch + place.value for patch in patches]
                place.value = self._place(chunk.value, _Chunk.of(isa).next_lane)  # now, since it takes a while
                values = self._products(here, chunk.value, [total.value for total in totals], coupled_halves)
                for total, value in zip(totals, values, strict=True):
                    total.value = value
                chunk.value = chunk.value + _Chunk.of(isa).size
        self._finish([total.value for total in totals], record, row_offset)
        self._write(row_offset)

    def _place(self, chunk: Value, at: int) -> Value:
        """Offset of a lane from an output's place in the image, in bytes; the lane's number lies at chunk + at."""
        return (DIRECT.load(self.args, "lane_offsets", "ptr") + chunk.load("i64", at, 8) * 8).load("i64", 0, 8)

    def _products(self, rows: list[Value], chunk: Value, totals: list[Value], coupled_halves: int) -> list[Value]:
        """The totals plus the products of a chunk, in whose first `coupled_halves` halves two pairs are added as int16."""
        isa, f, at, out = self.isa, self.f, _Chunk.of(self.isa), list(totals)
        size, lane = 4 * isa.lanes, vector("i8", LANE)
        everywhere = list(range(LANE)) * (size // LANE)
        xor_mask, shuffle = (chunk.load(isa.quads, part, size) for part in (at.xor_mask, at.shuffle))
        for i, row in enumerate(rows):
            codes = row.load(lane).shuffle(everywhere)
            slots = isa.picked(f, codes ^ xor_mask, shuffle).bits(isa.ints)
            for half in range(2):
                products = []
                for quad in (2 * half, 2 * half + 1):
                    four = slots.shuffle([i // 4 * 4 + quad for i in range(isa.lanes)]).bits(isa.quads)
                    weights = [chunk.load(isa.quads, (quad * self.vectors + v) * size, size) for v in range(self.vectors)]
                    products.append([isa.byte_products(f, four, w) for w in weights])
                for v in range(self.vectors):
                    n = i * self.vectors + v
                    for sums in [products[0][v] + products[1][v]] if half < coupled_halves else [products[0][v], products[1][v]]:
                        out[n] = isa.pinned(f, isa.dot_shorts(f, out[n], sums, self.ones))
                f.fence()
        return out


def supports(sizes: Filter, isa: ISA) -> bool:
    """Whether `ArrangedConvKernel` takes int8 images and weights of these sizes."""
    return isa.tuning.arranged_conv and has_exact_byte_sums(sizes)


class ArrangedConvKernel(RearrangedWeightsKernel):
    """Has weights of bytes in their own order, which are made at the first call."""

    def __init__(self, sizes: Filter, window: Window, linear: LinearKernel) -> None:
        super().__init__(sizes, window, linear)
        self.run = tile_run(sizes, window)
        self.form = f"arranged in runs of {self.run}"

    def weights_of(self, codes: Codes) -> Tensor | None:
        """The weights as the kernel reads them, uint8 [groups of the convolution, tiles' outputs, bytes]; None where they are too many."""
        sizes, width = self.sizes, tile_width(self.isa)
        n = sizes.out // sizes.groups
        columns = round_up(n, PANEL)
        w = torch.zeros(sizes.groups, columns, sizes.k // self.run, self.run, dtype=torch.int8, device="cpu")
        w[:, :n] = codes.values().reshape(sizes.groups, n, -1, self.run)
        lanes = sizes.k // self.run * -(-self.run // LANE)
        arranged_weights = arrange.arrange(_lanes(w).view(-1, width, lanes, LANE))
        if int(arranged_weights.counts.sum()) > max(1.25 * lanes, lanes + 1) * len(arranged_weights.counts):
            return None
        head = torch.zeros(len(arranged_weights.counts), _HEAD // 4, dtype=torch.int32, device="cpu")
        head[:, : 2 * 4] = torch.cat((arranged_weights.counts, arranged_weights.lanes[:, :1]), 1).view(torch.int32)
        head[:, _CORRECTIONS // 4 :][:, :width] = arranged_weights.corrections
        copies = 4 * self.isa.lanes // LANE
        masks = (part.repeat(1, 1, copies) for part in (arranged_weights.xor_mask, arranged_weights.shuffle))
        next_lanes = torch.nn.functional.pad(arranged_weights.lanes[:, 1:], (0, 1))
        next_lanes = torch.nn.functional.pad(next_lanes.unsqueeze(-1), (0, 4 * self.isa.lanes // 8 - 1))
        chunks = torch.cat([part.flatten(2).view(torch.uint8) for part in (arranged_weights.weights, *masks, next_lanes)], 2)
        return torch.cat((head.view(torch.uint8), chunks.flatten(1)), 1).view(sizes.groups, columns // width, -1)

    def tile(self, panel_bytes: int) -> RearrangedTile:
        return RearrangedTile(build_tile, panel_bytes, tile_width(self.isa))


def _lanes(runs: Tensor) -> Tensor:
    """int8 [..., runs, codes] -> [..., lanes, 16]. A run of 16 or more ends with its last lane, which may overlap another: 0 there."""
    rest = runs.shape[-1] % LANE
    if not rest:
        return runs
    if runs.shape[-1] < LANE:
        return torch.nn.functional.pad(runs, (0, LANE - rest))
    return torch.cat((runs[..., :-rest], torch.nn.functional.pad(runs[..., -rest:], (LANE - rest, 0))), -1)
