"""Plans convolutions of codes for `direct.py`: where codes are read, what a thread's memory holds, and what the code is compiled for.

`plan` is called by `gathered.ConvKernel`, and by `RearrangedWeightsKernel` for the tiles of `arranged.py` and `unsigned.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen.elements import kind_of
from halfbyte.kernels.cpu.codegen.ir import Module
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.conv import direct
from halfbyte.kernels.cpu.conv.arrange import LANE
from halfbyte.kernels.cpu.conv.direct import DIRECT, SLACK, Band, LinesSpec, Strips, power_of_two
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, tile_rows
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import Schedule, TileSpec
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK, PANEL

TILE_COST = 0.4  # of beginning and ending a tile, in rows
_LEAST_STEP = 16  # codes that a tile takes at a time where it reads an image: some instruction sets load so many, and nothing lies behind
_MANY_BYTES = 1 << 19  # of weights, which are not in a core's second-level cache when they are due
_EDGE = 64  # codes of an edge: a whole vector
_FEW_LINES = 8  # of a patch, whose loads and stores are written out


class TileSizes(NamedTuple):
    """Tiles with weights of their own, which need no sums of activations. They read codes where they lie in an image.

    Attributes:
        build: Emits a tile, as `direct.build_tile` does.
        panel_bytes: Bytes of the weights of `columns` outputs.
        columns: Outputs of a tile.
        run, unit: For unsigned codes (`unsigned.py`), in lines that are copied: codes of a run with its padding, and codes that are taken
            at a time. 0: codes are read in lanes of 16, of which the last one of a run ends with it (`arranged.py`).
    """

    build: Callable[[TileSpec, ISA], Module]
    panel_bytes: int
    columns: int
    run: int = 0
    unit: int = 0


def tile_width(isa: ISA) -> int:
    """Return the outputs of a tile with weights of its own."""
    return isa.lanes * isa.tuning.conv_tile[1]


def whole_bytes(sizes: Filter) -> bool:
    """Whether weights are bytes with one scale for all of a patch, whose sums int32 holds."""
    fmt = sizes.format
    return fmt.bits == 8 and fmt.zero == "none" and not isinstance(fmt.block, int) and sizes.k <= LONGEST_BLOCK


def line_run(sizes: Filter, window: Window) -> int:
    """Codes of a patch that lie side by side in a line of the image."""
    joined = window.dilation[1] == 1 and sizes.groups == 1  # the taps of a line lie side by side
    return sizes.kernel[1] * sizes.channels if joined else sizes.channels


def _written(sizes: Filter, tile_sizes: TileSizes | None = None) -> bool:
    """Return whether patches are written out, so that their codes are adjacent."""
    return sizes.channels % 8 != 0 and (tile_sizes is None or not tile_sizes.run)


def run_of(sizes: Filter, window: Window) -> int:
    """Codes of a patch that lie side by side where tiles read them: in a line of the image, or in a patch that is written out."""
    return sizes.k if _written(sizes) else line_run(sizes, window)


@dataclass(frozen=True, slots=True)
class _Walk:
    """How the codes of a patch are read: in the image itself, in copied lines of it, or in patches that are written out from copied lines.

    Attributes:
        sizes, window: Of the convolution.
        in_image: Nothing is copied.
        runs, run: Runs of adjacent codes in a line of a patch, and codes of each.
        step: Codes that tiles take at a time.
        row: Codes of a patch that is written out, with its padding; 0: patches are not written out.
        laid_out: Bytes of a code as tiles read it.
        copied: Bytes of a code in the lines, of the image or copied.
        near_width: Pixels of the image that a line of outputs needs.
        line_pixels: Pixels of a line.
    """

    sizes: Filter
    window: Window
    in_image: bool
    runs: int
    run: int
    step: int
    row: int
    laid_out: int
    copied: int
    near_width: int
    line_pixels: int

    @classmethod
    def of(cls, linear: LinearKernel, sizes: Filter, geo: ConvGeometry, tile_sizes: TileSizes | None) -> _Walk:
        (height, width), (ho, wo), window = geo.image, geo.out, geo.window
        (kh, kw), (sh, sw), (dh, dw), (top, _, left, _) = sizes.kernel, window.stride, window.dilation, window.padding
        run = line_run(sizes, window)
        runs, step = kw * sizes.channels // run, math.gcd(run, 32)
        near_width = (wo - 1) * sw + (kw - 1) * dw + 1
        inside = (ho - 1) * sh - top + (kh - 1) * dh < height and near_width - left <= width
        laid_out = 1 if tile_sizes is not None else linear.isa.activation_bytes("int8", sizes.format.bits)
        unsigned = tile_sizes is not None and tile_sizes.run > 0
        in_image = top == left == 0 and inside and not unsigned and (step if tile_sizes is None else run) >= _LEAST_STEP and laid_out == 1
        row = linear.geometry.padded if _written(sizes, tile_sizes) else 0
        if tile_sizes is not None and tile_sizes.run:
            run, step = tile_sizes.run, tile_sizes.unit
        return cls(
            sizes,
            window,
            in_image,
            runs,
            run,
            step=math.gcd(row, 32) if row else step,
            row=row,
            laid_out=laid_out,
            copied=1 if row else laid_out,
            near_width=near_width,
            line_pixels=width if in_image else near_width,
        )

    @property
    def group_bytes(self) -> int:
        """Bytes of a pixel's codes in a group."""
        return self.sizes.channels * self.copied

    @property
    def pixel(self) -> int:
        """Bytes of a pixel, as it is read."""
        return self.sizes.groups * self.group_bytes

    @property
    def line(self) -> int:
        """Bytes of a line, as it is read."""
        return self.line_pixels * self.pixel

    @property
    def line_step(self) -> int:
        """Bytes from a line of the kernel to the next."""
        return self.window.dilation[0] * self.line

    @property
    def run_step(self) -> int:
        """Bytes from a run to the next one of a line."""
        return self.window.dilation[1] * self.pixel

    @property
    def patch(self) -> int:
        """Bytes of a patch that is written out; 0 where none is."""
        return self.row * self.laid_out

    @property
    def summed(self) -> int:
        """Bytes of what is summed at a time: of a patch that is written out, or of a pixel."""
        return self.patch or self.group_bytes

    def near_lines(self, lines: int) -> int:
        """Lines of the image that so many lines of outputs need."""
        return (lines - 1) * self.window.stride[0] + (self.sizes.kernel[0] - 1) * self.window.dilation[0] + 1

    def strip_bytes(self, lines: int, out_width: int) -> int:
        """Memory for so many lines of outputs."""
        return lines * out_width * self.patch + (0 if self.in_image else self.near_lines(lines) * self.line)

    def places(self, lines: int, out_width: int) -> Tensor:
        """Byte offsets of so many lines of outputs from the first."""
        y, x = torch.meshgrid(torch.arange(lines, device="cpu"), torch.arange(out_width, device="cpu"), indexing="ij")
        return (y * (self.window.stride[0] * self.line) + x * (self.window.stride[1] * self.pixel)).flatten()

    def lane_places(self) -> Tensor:
        """Where a patch's lanes begin, in bytes behind its place."""
        if self.row:
            starts, run = [0], self.sizes.k
        else:
            run = self.run
            starts = [line * self.line_step + tap * self.run_step for line in range(self.sizes.kernel[0]) for tap in range(self.runs)]
        return torch.tensor([start + min(at, max(0, run - LANE)) for start in starts for at in range(0, run, LANE)], device="cpu")

    def fields(self) -> dict[str, int]:
        """The lines of a patch and their runs, and how tiles walk over them: a patch that is written out is one run."""
        return {
            "group_bytes": self.group_bytes,
            "lines": self.sizes.kernel[0],
            "line_step": self.line_step,
            "runs": self.runs,
            "run_step": self.run_step,
            "run_codes": self.run,
            "row_codes": self.row,
            "walk_runs": 1 if self.row else self.runs,
            "walk_steps": (self.row or self.run) // self.step,
        }

    def sum_fields(self, lines: int, rows: int) -> dict[str, int]:
        """What is summed of a strip of so many lines, of `rows` outputs, and where a patch's pixels lie."""
        (sh, sw), (dh, dw) = self.window.stride, self.window.dilation
        return {
            "pixels": rows if self.row else self.near_lines(lines) * self.line_pixels,
            "pixel_bytes": self.summed,
            "pixel_step": self.patch or self.pixel,
            "pixel_stride": sw,
            "pixel_line": sh * self.line_pixels,
            "taps": self.sizes.kernel[1],
            "tap_step": dw,
            "tap_line_step": dh * self.line_pixels,
        }


class _Memory(NamedTuple):
    """What a thread has: copied lines, then patches, sums of pixels and sums of outputs; in bytes, all of it last."""

    patches_at: int
    pixel_sums_at: int
    sums_at: int
    thread_bytes: int

    @classmethod
    def of(cls, walk: _Walk, lines: int, rows: int, pixel_sums: int) -> _Memory:
        """For a strip of so many lines, of `rows` outputs."""
        patches_at = 0 if walk.in_image else walk.near_lines(lines) * walk.line + SLACK + 63 & ~63
        pixel_sums_at = patches_at + (rows * walk.patch + SLACK + 63 & ~63 if walk.row else 0)
        sums_at = pixel_sums_at + (pixel_sums * 4 + 63 & ~63)
        return cls(patches_at, pixel_sums_at, sums_at, sums_at + (rows * 4 + 63 & ~63))


def _lines_spec(walk: _Walk, linear: LinearKernel, tile_sizes: TileSizes | None, copied_codes: int, out_width: int) -> LinesSpec:
    isa, sizes, (kh, _) = linear.isa, walk.sizes, walk.sizes.kernel
    at_once = min(32, 1 << (walk.run - 1).bit_length()) if walk.row else 0
    few_lines = walk.runs == 1 and walk.run <= at_once and kh <= _FEW_LINES
    alone = tile_sizes is not None or walk.row > 0 or (sizes.taps == 1 and walk.window.stride == (1, 1))  # a row's sum is that of one pixel
    return LinesSpec(
        copied=0 if walk.in_image else power_of_two(copied_codes, 4 * isa.lanes) if copied_codes else 8,
        patches=at_once,
        lines=kh if few_lines else 0,
        bits=sizes.format.bits,
        started=tile_sizes is None and (linear.paired or isa.correction(sizes.format.bits, signed=True) != 0),
        paired=tile_sizes is None and linear.paired,
        width=walk.laid_out,
        unit=walk.step,
        sums="none" if alone else "lines" if walk.window.stride[1] == 1 and out_width >= isa.lanes else "single",
        masked=not walk.in_image,
        tail=(walk.patch or sizes.channels) % (4 * isa.lanes) if walk.in_image else 0,
        columns=PANEL if tile_sizes is None else tile_sizes.columns,
        unsigned=tile_sizes is not None and tile_sizes.run > 0,
    )


def lines_inside(window: Window, kernel: int, height: int, out: int) -> list[tuple[int, int]]:
    """For each line of outputs the range [first, stop) of kernel lines inside of the image."""
    step = window.dilation[0]
    tops = [y * window.stride[0] - window.padding[0] for y in range(out)]
    return [(min(kernel, max(0, -(top // step))), max(0, min(kernel, -((top - height) // step)))) for top in tops]


def _lines_walked(walk: _Walk, spec: LinesSpec, strips: Strips, height: int, outside: int, *, by_lines: bool) -> list[tuple[int, int]]:
    """`lines_inside` of a strip's lines: those of the walk, without those outside, where tiles go line by line and read 0."""
    kernel = 1 if walk.row else walk.sizes.kernel[0]
    if by_lines and not walk.row and not spec.paired and strips.number == 1 and outside == (-128 if spec.unsigned else 0):
        return lines_inside(walk.window, kernel, height, strips.lines)
    return [(0, kernel)] * strips.lines


def _bands(lines: Sequence[tuple[int, int]], width: int, most: int, function: Callable[[int], int]) -> Tensor:
    """The `Band`s of a strip, of whose lines each takes so many of the kernel's; the largest first, as the first tiles ask for what comes
    next. function(rows) is the address of a tile's, of at most `most` rows."""
    bands, y = [], 0
    for (first, stop), same_taps in itertools.groupby(lines):
        m = len(list(same_taps)) * width
        rows = tile_rows(m, most, TILE_COST)
        bands.append(Band(y, y + m, first, max(first, stop), rows, function(rows)))
        y += m
    return torch.tensor(sorted(bands, key=lambda band: band.first - band.stop), dtype=torch.int64, device="cpu")


def group_fields(sizes: Filter, out_dtype: torch.dtype, panels: int, panel_bytes: int, *, padded_bias: bool) -> dict[str, int]:
    """The weights of a group, so many panels of so many bytes, its table (for codes) or bias, padded to whole panels or not, and output."""
    n, out_bytes = sizes.out // sizes.groups, out_dtype.itemsize
    stride = 4 * round_up(n, PANEL)
    return {
        "n": n,
        "groups": sizes.groups,
        "panel_bytes": panel_bytes,
        "group_weights": panels * panel_bytes,
        "table_stride": stride,
        "group_bias": 3 * stride if out_dtype == torch.int8 else stride if padded_bias else 4 * n,
        "out_stride": sizes.out * out_bytes,
        "group_out": n * out_bytes,
    }


def image_fields(geo: ConvGeometry, near_width: int, lines: int, line: int) -> dict[str, int]:
    """An image, and what a strip needs of it: so many lines of `line` bytes, of which outputs need `near_width` pixels."""
    height, width = geo.image
    left = min(geo.window.padding[2], near_width)
    copied = min(width, near_width - left) * geo.channels
    return {
        "height": height if copied else 0,  # 0: nothing of a line is seen
        "image_bytes": height * width * geo.channels,
        "line_bytes": width * geo.channels,
        "near_lines": lines,
        "near_line_bytes": line,
        "copied_codes": copied,
        "left_codes": left * geo.channels,
    }


def plan(
    linear: LinearKernel,
    sizes: Filter,
    geo: ConvGeometry,
    threads: int,
    out_dtype: torch.dtype,
    outside: int,
    tile_sizes: TileSizes | None = None,
) -> Plan:
    """Return the plan of a convolution of codes by the tiles of `direct.py`, or by others.

    Args:
        linear: The product with the same matrix.
        sizes, geo: Of the filter, and of the images.
        threads: Most threads.
        out_dtype: Of the outputs.
        outside: The code of padding.
        tile_sizes: Tiles with weights of their own; None: those of `direct.build_tile`.
    """
    isa, weight, wo = linear.isa, linear.geometry, geo.out[1]
    walk = _Walk.of(linear, sizes, geo, tile_sizes)
    columns, panel_bytes = (PANEL, weight.panel_bytes) if tile_sizes is None else (tile_sizes.columns, tile_sizes.panel_bytes)
    panels = weight.panels * (PANEL // columns)
    strips = Strips.of(geo.outputs, sizes, panels, threads, lambda lines: walk.strip_bytes(lines, wo))
    lines, rows = strips.lines, strips.lines * wo

    near = image_fields(geo, walk.near_width, walk.near_lines(lines), walk.line)
    spec = _lines_spec(walk, linear, tile_sizes, near["copied_codes"], wo)
    sums = walk.sum_fields(lines, rows)
    memory = _Memory.of(walk, lines, rows, 0 if spec.sums == "none" else sums["pixels"])

    laid_out = replace(linear.tile_spec.activation, unit=walk.step, one_unit=False)
    tile = replace(linear.tile_spec, activation=laid_out, out=kind_of(out_dtype))
    build = direct.build_tile if tile_sizes is None else tile_sizes.build
    walked = _lines_walked(walk, spec, strips, geo.image[0], outside, by_lines=tile_sizes is None or spec.unsigned)
    most_rows, vectors = isa.tuning.conv_tile
    bands = _bands(walked, wo, most_rows, lambda rows: compiled(build, replace(tile, schedule=Schedule(rows, vectors)), isa))
    places, lane_places = walk.places(lines, wo), walk.lane_places()
    walk_places = torch.arange(rows, device="cpu") * walk.patch if walk.row else places
    mask = torch.zeros(64, dtype=torch.int8, device="cpu")  # of the last, partial vector of a pixel
    mask[: walk.summed % (4 * isa.lanes)] = -1
    fields = {
        **strips.fields(),
        **memory._asdict(),
        **group_fields(sizes, out_dtype, panels, panel_bytes, padded_bias=False),
        **near,
        **walk.fields(),
        **sums,
        "rows": rows,
        "asks": int(panels * panel_bytes >= _MANY_BYTES),
        "out_bytes": out_dtype.itemsize,
        "left_pairs": 0 if walk.row else (weight.padded - sizes.k) // 2 * 128**2,
        "bands": bands.data_ptr(),
        "band_count": len(bands),
        "places": places.data_ptr(),
        "walk_places": walk_places.data_ptr(),
        "lane_places": lane_places.data_ptr(),
        "pixel_mask": mask.data_ptr(),
    }
    tensors = places, walk_places, mask, lane_places, bands
    return Plan(DIRECT, compiled(direct.build, spec, isa), fields, strips.items, _EDGE, memory.thread_bytes, tensors)


class RearrangedWeightsKernel(PlannedConv):
    """The compiled convolution of int8 images of any size by tiles that have weights of their own.

    Conditions that the caller has checked: the file's `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights`
    is what `weights_of` made; `table` is the tables of the groups.

    linear   the kernel of the same matrix
    """

    def __init__(self, sizes: Filter, window: Window, linear: LinearKernel) -> None:
        super().__init__()
        self.sizes, self.isa, self.linear = sizes, current(), linear

    def tiles(self, panel_bytes: int) -> TileSizes:
        """What multiplies; `panel_bytes` of weights for each tile's outputs."""
        raise NotImplementedError

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        return plan(self.linear, self.sizes, geo, threads, torch.int8, outside, self.tiles(weights.shape[2]))
