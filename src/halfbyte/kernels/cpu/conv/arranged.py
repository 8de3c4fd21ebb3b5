"""Convolutions of int8 codes on AVX2 by products of bytes that are exact, in an order of the weights that `arrange.py` finds: int8 -> int8.

    acc[m, co] = correction[co] + sum over chunks c, slots j of  v[co, c, j] * (q[m, lane[c]] ^ xor_mask[c])[shuffle[c, j]]

`vpmaddubsw` multiplies pairs of bytes and saturates their sum to int16, so weights are reordered and negated until it never does; without
that the exact products of AVX2 are those of int16, half as many an instruction. Loops and patches are those of `direct.py`. A lane is 16
adjacent codes of a patch, and a chunk is what multiplies a lane, or half of one: one load, one xor and one shuffle of bytes put the lane's
codes into the order of a tile's outputs; four further shuffles make a vector of each quad of slots.

    weights, for each tile's outputs    head      int64 [3] chunks with 2, 1, 0 coupled halves; int64 lane of the first chunk
                                                  at 64: int32 [outputs] corrections
                                        chunks    int8 [4 quads, outputs, 4] | xor_mask | shuffle | lane of the next chunk
                                                                              each in whole vectors

Weights take about 1.4 bytes for each code; they are computed at the first call and cached. Where the order would take more than a quarter
more chunks than there are lanes, `weights_of` declines, and `direct.py` convolves.

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

_HEAD_BYTES = 128
_COUNTS, _FIRST_LANE, _CORRECTIONS = 0, 24, 64  # offsets in the head
_MOST_CHUNKS = 1.25  # for each lane


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
        register_bytes, weights = 4 * isa.lanes, LANE * tile_width(isa)
        return cls(weights, weights + register_bytes, weights + 2 * register_bytes, weights + 3 * register_bytes)


@tile_function
def build_tile(spec: TileSpec, isa: ISA, f: Function) -> None:
    """Emit `direct.build_tile` for arranged weights; the function does not read the parameters `sums` and `scale`, nor the lines of the
    band, and does not prefetch."""
    _ArrangedTile(spec, isa, f).emit(f.value("i64", 0))


class _ArrangedTile(RequantizingDirectTile):
    """Emits a tile of R outputs of an image times all outputs of a panel of arranged weights."""

    def emit(self, row_offset: Value) -> None:
        isa, f, head = self.isa, self.f, self.weights
        patches = self._patches()
        starts = [self._initial_sum(row_offset, v) for v in range(self.vectors)]
        starts = [start + head.load(isa.ints, _CORRECTIONS + v * 4 * isa.lanes, 4) for v, start in enumerate(starts)]
        accumulators = [f.variable(start) for start in starts * self.rows]
        self.ones = f.pinned(f.value(isa.shorts, 1), isa.register)
        chunk, lane_offset = f.variable(head + _HEAD_BYTES), f.variable(self._lane_offset(head, _FIRST_LANE))
        for n, coupled_halves in enumerate(arrange.COUPLED_HALVES):
            for _ in f.loop(head.load("i64", _COUNTS + 8 * n, 8)):
                lanes = [patch + lane_offset.value for patch in patches]
                lane_offset.value = self._lane_offset(chunk.value, _Chunk.of(isa).next_lane)  # now, since two dependent loads take a while
                totals = self._multiply_chunk(lanes, chunk.value, [total.value for total in accumulators], coupled_halves)
                for accumulator, total in zip(accumulators, totals, strict=True):
                    accumulator.value = total
                chunk.value = chunk.value + _Chunk.of(isa).size
        self._finish([total.value for total in accumulators], head, row_offset)
        self._write(row_offset)

    def _lane_offset(self, address: Value, at: int) -> Value:
        """Return the offset in bytes, from the beginning of a patch, of the lane whose number lies at `address` + `at`."""
        return (DIRECT.load(self.args, "lane_offsets", "ptr") + address.load("i64", at, 8) * 8).load("i64", 0, 8)

    def _multiply_chunk(self, lanes: list[Value], chunk: Value, totals: list[Value], coupled_halves: int) -> list[Value]:
        """Return the totals plus the products of a chunk.

        Args:
            lanes: Address of each row's lane.
            chunk: Address of the chunk.
            totals: Sums of R rows of V vectors.
            coupled_halves: In so many halves of the chunk, the first ones, sums of two pairs are added as int16.
        """
        isa, f, offsets, out = self.isa, self.f, _Chunk.of(self.isa), list(totals)
        size = 4 * isa.lanes
        to_all_lanes = list(range(LANE)) * (size // LANE)
        xor_mask, shuffle = (chunk.load(isa.quads, offset, size) for offset in (offsets.xor_mask, offsets.shuffle))
        for row, address in enumerate(lanes):
            codes = address.load(vector("i8", LANE)).shuffle(to_all_lanes)
            slots = isa.picked(f, codes ^ xor_mask, shuffle).bits(isa.ints)
            for half in range(2):
                products = []  # of the half's two quads
                for quad in (2 * half, 2 * half + 1):
                    quad_to_all = slots.shuffle([i // 4 * 4 + quad for i in range(isa.lanes)]).bits(isa.quads)
                    weights = [chunk.load(isa.quads, (quad * self.vectors + v) * size, size) for v in range(self.vectors)]
                    products.append([isa.byte_products(f, quad_to_all, w) for w in weights])
                for v in range(self.vectors):
                    n, (first, second) = row * self.vectors + v, (products[0][v], products[1][v])
                    for sums in [first + second] if half < coupled_halves else [first, second]:
                        out[n] = isa.pinned(f, isa.dot_shorts(f, out[n], sums, self.ones))
                f.fence()
        return out


def supports(sizes: Filter, isa: ISA) -> bool:
    """Return whether `ArrangedConvKernel` takes int8 images and weights of these sizes."""
    return isa.tuning.arranged_conv and has_exact_byte_sums(sizes)


class ArrangedConvKernel(RearrangedWeightsKernel):
    """The compiled convolution of int8 images by arranged weights; conditions as of `RearrangedWeightsKernel`."""

    def __init__(self, sizes: Filter, window: Window, linear: LinearKernel) -> None:
        super().__init__(sizes, window, linear)
        self.run = tile_run(sizes, window)
        self.form = f"arranged in runs of {self.run}"

    def weights_of(self, codes: Codes) -> Tensor | None:
        """Return the weights as the kernel reads them, uint8 [channel groups, tiles' outputs, bytes]; None where they are too many."""
        sizes, width = self.sizes, tile_width(self.isa)
        n, runs = sizes.out // sizes.groups, sizes.k // self.run
        columns = round_up(n, PANEL)
        w = torch.zeros(sizes.groups, columns, runs, self.run, dtype=torch.int8, device="cpu")
        w[:, :n] = codes.values().reshape(sizes.groups, n, -1, self.run)
        lanes = runs * -(-self.run // LANE)
        arranged = arrange.arrange(_lanes(w).view(-1, width, lanes, LANE))
        tiles = len(arranged.counts)
        if int(arranged.counts.sum()) > max(_MOST_CHUNKS * lanes, lanes + 1) * tiles:
            return None
        head = torch.zeros(tiles, _HEAD_BYTES // 4, dtype=torch.int32, device="cpu")
        head[:, : _FIRST_LANE // 4 + 2] = torch.cat((arranged.counts, arranged.lanes[:, :1]), 1).view(torch.int32)
        head[:, _CORRECTIONS // 4 :][:, :width] = arranged.corrections
        register_bytes = 4 * self.isa.lanes
        masks = (mask.repeat(1, 1, register_bytes // LANE) for mask in (arranged.xor_mask, arranged.shuffle))
        next_lanes = torch.nn.functional.pad(arranged.lanes[:, 1:], (0, 1))
        next_lanes = torch.nn.functional.pad(next_lanes.unsqueeze(-1), (0, register_bytes // 8 - 1))
        chunks = torch.cat([part.flatten(2).view(torch.uint8) for part in (arranged.weights, *masks, next_lanes)], 2)
        return torch.cat((head.view(torch.uint8), chunks.flatten(1)), 1).view(sizes.groups, columns // width, -1)

    def tile(self, panel_bytes: int) -> RearrangedTile:
        return RearrangedTile(build_tile, panel_bytes, tile_width(self.isa))


def _lanes(runs: Tensor) -> Tensor:
    """Return runs [..., runs, codes] as lanes [..., lanes, 16], int8. The last lane of a run of 16 or more ends with it: where it overlaps
    the lane before, its weights are 0."""
    rest = runs.shape[-1] % LANE
    if not rest:
        return runs
    if runs.shape[-1] < LANE:
        return torch.nn.functional.pad(runs, (0, LANE - rest))
    return torch.cat((runs[..., :-rest], torch.nn.functional.pad(runs[..., -rest:], (LANE - rest, 0))), -1)
