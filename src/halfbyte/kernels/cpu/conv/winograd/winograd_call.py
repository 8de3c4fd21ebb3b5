"""Plans 3 x 3 convolutions by minimal filtering for `winograd.py`: the kernels that `dispatch/cpu_conv.py` chooses from, and when they pay.

A call's tiles are cut into chunks. A chunk's transformed images and products stay in a core's second-level cache, and it has enough groups
of tiles for the weights that each of them loads. Threads draw chunks, or parts of a chunk's output channels where chunks are few.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.elements import Kind, kind_of
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.codegen.tuning import Winograd
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, parts_of
from halfbyte.kernels.cpu.conv.winograd import winograd
from halfbyte.kernels.cpu.conv.winograd.tiling import Tiles, WinogradSpec, group_size
from halfbyte.kernels.cpu.conv.winograd.transforms import CLASSES, OUTPUTS, POSITIONS, transformed_weights
from halfbyte.kernels.cpu.conv.winograd.winograd import WINOGRAD
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL, allocate

_CHUNK_BYTES = 3 << 16  # of a chunk's transformed images and products
_LEAST_GROUPS = 4  # of tiles in a chunk, unless fewer have `Winograd.tiles`
_ITEMS_A_THREAD = 4
_L2_WEIGHT_BYTES = 1 << 19  # weights up to this size stay in the second-level cache
_LINE_BYTES = 64  # behind each plane, or all of them would have the same places in the first-level cache
# Cycles of a core, as measured: for a position of a tile's image, by channels, and of its outputs; and bytes of weights that come from the
# third-level cache in one.
_INPUT_CYCLES, _OUTPUT_CYCLES, _L3_BYTES_A_CYCLE = 0.18, 0.37, 8


def supports(sizes: Filter, window: Window, isa: ISA) -> bool:
    """Return whether `WinogradKernel` takes int8 images and weights of these sizes."""
    dense = window.stride == window.dilation == (1, 1)
    plain = sizes.format.bits == 8 and sizes.kernel == (3, 3) and sizes.groups == 1
    return isa.tuning.winograd is not None and plain and dense and sizes.channels % (2 * isa.lanes) == 0


def weight_bytes(sizes: Filter) -> int:
    """Return the bytes of the transformed weights."""
    return 2 * POSITIONS * sizes.out * sizes.channels


def pays(sizes: Filter, out: tuple[int, int, int], isa: ISA) -> bool:
    """Return whether it takes fewer cycles than `direct.py`, for outputs [B, Ho, Wo]."""
    tuning, (batch, height, width), tiles = _tuning(isa), out, Tiles.of(out)
    weights = sizes.out * sizes.channels  # for a position or tap
    counts = [stop - start for start, stop in tiles.ranges]
    full_groups = [round_up(count, group_size(count, isa)) for count in counts]
    # Positions of all tiles, with those that fill the last groups and without.
    multiplied, transformed = (sum(n * len(positions) for n, positions in zip(of, CLASSES, strict=True)) for of in (full_groups, counts))
    cycles = max(multiplied * weights / tuning.rate, 2 * POSITIONS * weights / _L3_BYTES_A_CYCLE)  # while weights come
    cycles += transformed * (sizes.channels * _INPUT_CYCLES + sizes.out * _OUTPUT_CYCLES)
    return cycles < batch * height * width * 9 * weights / tuning.direct_rate


def _tuning(isa: ISA) -> Winograd:
    tuning = isa.tuning.winograd
    assert tuning is not None, f"{isa.name} has no minimal filtering: `supports` says so"
    return tuning


class _Chunks(NamedTuple):
    """How the work is cut into items: chunks of tiles, times parts of the blocks of output channels.

    Attributes:
        tiles: Of a chunk; the last one may have fewer.
        number: Of chunks.
        parts: Of the blocks.
    """

    tiles: int
    number: int
    parts: int

    @classmethod
    def of(cls, tiles: int, group: int, channels: int, out_block: int, blocks: int, enough_tiles: int, threads: int) -> _Chunks:
        """Return the chunks of so many tiles.

        Args:
            tiles: All of them.
            group: Tiles that are multiplied together.
            channels: Input channels.
            out_block, blocks: Output channels of a block, and blocks.
            enough_tiles: Tiles of a chunk for which loading the weights is worth while.
            threads: That draw the items.
        """
        groups, least = -(-tiles // group), min(_LEAST_GROUPS, -(-enough_tiles // group))
        group_bytes = POSITIONS * group * (2 * channels + 4 * out_block)
        number = -(-groups // max(least, _CHUNK_BYTES // group_bytes))
        if threads > 1:
            number = max(number, min(threads * _ITEMS_A_THREAD, groups // least))
        chunk = -(-groups // number) * group
        number = -(-tiles // chunk)
        return cls(chunk, number, parts_of(blocks, threads, _ITEMS_A_THREAD, number))


class _Memory(NamedTuple):
    """A thread's memory, in bytes: planes of each of the classes of positions, products, the input tile and the output tile.

    Attributes:
        plane_bytes: Of a plane of each class.
        planes_at: Where the planes of each class begin.
        products_at, input_tile_at, output_tile_at: Where the other arrays begin.
        nbytes: Of all.
    """

    plane_bytes: list[int]
    planes_at: list[int]
    products_at: int
    input_tile_at: int
    output_tile_at: int
    nbytes: int

    @classmethod
    def of(cls, spec: WinogradSpec, tiles: Tiles, chunk: int, channels: int, out_block: int, element: int) -> _Memory:
        """Return the memory for chunks of so many tiles, and outputs of `element` bytes."""
        classes = spec.classes
        counts = [min(chunk, stop - start) for start, stop in tiles.ranges[: len(classes)]]
        plane_bytes = [
            round_up(count, positions.group) * channels * 2 + _LINE_BYTES for positions, count in zip(classes, counts, strict=True)
        ]
        all_bytes = (positions.count * plane for positions, plane in zip(classes, plane_bytes, strict=True))
        *planes_at, products_at = itertools.accumulate(all_bytes, initial=0)
        # The last group of a class's tiles may reach behind the chunk.
        tiles_with_products = chunk + max(positions.group for positions in classes)
        input_tile_at = products_at + tiles_with_products * POSITIONS * out_block * 4
        output_tile_at = input_tile_at + round_up(POSITIONS * channels, 64)
        nbytes = output_tile_at + OUTPUTS * OUTPUTS * out_block * element
        return cls(plane_bytes, planes_at, products_at, input_tile_at, output_tile_at, nbytes)


class WinogradKernel(PlannedConv):
    """The compiled convolution of int8 images of any size.

    Conditions that the caller has checked: `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights` is what
    `weights_of` returned; `table` [3, N] as `tile.RequantizingTile` has it, N padded to whole panels.
    """

    form = "minimal filtering"
    out_kind: Kind = "i8"

    def __init__(self, sizes: Filter) -> None:
        super().__init__()
        self.sizes, self.isa = sizes, current()

    def weights_of(self, codes: Codes) -> Tensor | None:
        """Return the weights as the kernel reads them; None where sums may be too large for it."""
        return transformed_weights(codes, self.sizes)

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        sizes, isa, channels, (height, width) = self.sizes, self.isa, geo.channels, geo.image
        out_block, element = 2 * isa.lanes, self.out_dtype.itemsize
        blocks = -(-sizes.out // out_block)
        tiles = Tiles.of(geo.outputs)
        spec = WinogradSpec.of(tiles, isa, self.out_kind, residual=has_residual)
        count = sum(tiles.counts)
        enough_tiles = _tuning(isa).tiles[weights.nbytes <= _L2_WEIGHT_BYTES]
        chunks = _Chunks.of(count, spec.classes[0].group, channels, out_block, blocks, enough_tiles, threads)
        memory = _Memory.of(spec, tiles, chunks.tiles, channels, out_block, element)
        items = chunks.number * chunks.parts
        fields = {
            "n": sizes.out,
            "out_stride": sizes.out * element,
            "table_stride": 4 * PANEL * -(-sizes.out // PANEL),
            "items": items,
            "parts": chunks.parts,
            "tiles": count,
            "chunk_tiles": chunks.tiles,
            "out_blocks": blocks,
            "thread_bytes": memory.nbytes,
            "products_at": memory.products_at,
            "input_tile_at": memory.input_tile_at,
            "output_tile_at": memory.output_tile_at,
            "tile_rows_of_image": tiles.rows,
            "tile_columns_of_image": tiles.columns,
            "image_bytes": height * width * channels,
            "line_bytes": width * channels,
            "pixel_bytes": channels,
            "out_line_bytes": geo.out[1] * sizes.out * element,
            "scales_at": 2 * POSITIONS * blocks * out_block * channels,
        }
        for n, (start, stop) in enumerate(tiles.ranges[: len(spec.classes)]):
            fields |= {f"plane_bytes_{n}": memory.plane_bytes[n], f"planes_at_{n}": memory.planes_at[n]}
            fields |= {f"class_start_{n}": start, f"class_stop_{n}": stop}
        fields |= {f"shape_start_{n}": start for n, start in enumerate(itertools.accumulate(tiles.counts[:-1], initial=0))}
        return Plan(WINOGRAD, compiled(winograd.build, spec, isa), fields, items, channels, memory.nbytes)


class WinogradScalingKernel(WinogradKernel):
    """The compiled convolution of codes with one scale for each image, to floating-point outputs.

    Conditions in addition to those of `WinogradKernel`: output channels are a multiple of 2 lanes; a bias is contiguous float32 [Co].
    """

    form = "minimal filtering, with scales"
    scales_at = WINOGRAD.offset("scales")
    specializes_residual = True

    def __init__(self, sizes: Filter, out: torch.dtype) -> None:
        super().__init__(sizes)
        self.out_dtype = self.result = out
        self.out_kind = kind_of(out)
        self.no_bias = torch.zeros(sizes.out, dtype=torch.float32, device="cpu")

    def weights_of(self, codes: Codes) -> Tensor | None:
        """Return `transformed_weights`, and the scales of the outputs behind them, int16; None where sums may be too large."""
        transformed = transformed_weights(codes, self.sizes)
        if transformed is None:
            return None
        scales = codes.scale.reshape(-1).float().expand(self.sizes.out).contiguous().view(torch.int16)
        count = transformed.numel()
        weights = allocate(2 * (count + len(scales))).view(torch.int16)
        weights[:count], weights[count:] = transformed.flatten(), scales
        return weights
