"""Calls of `direct.py` are planned: where codes are read, what a thread's memory holds, what the code is compiled for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu import runtime
from halfbyte.kernels.cpu.conv import direct
from halfbyte.kernels.cpu.conv.arrange import LANE
from halfbyte.kernels.cpu.conv.direct import DIRECT, SLACK, Band, LinesSpec, Strips, power_of_two
from halfbyte.kernels.cpu.conv.planned import CodesConv, ConvCall, tile_rows
from halfbyte.kernels.cpu.ir import Module
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear import KINDS, WORK_A_THREAD, LinearKernel
from halfbyte.kernels.cpu.tile import TileSpec
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

_TILE_COST = 0.4  # of beginning and ending a tile, in rows
_LEAST_STEP = 16  # codes that a tile takes at a time where it reads an image: some instruction sets load so many, and nothing lies behind
_MANY_BYTES = 1 << 19  # of weights, which are not in a core's second-level cache when they are due
_FEW_LINES = 8  # of a patch, whose loads and stores are written out


class OwnTiles(NamedTuple):
    """Tiles that read codes as they lie in an image, in lanes of 16 (of a run: the last one ends with it), and have weights of their own.

    build        as `direct.build_tile`; they need no sums
    panel_bytes  of the weights of `columns` outputs
    run, unit    of tiles that read unsigned codes, from lines that are copied, and not in lanes: codes of a run, with what pads
                 it, and codes taken at a time; else 0
    """

    build: Callable[[TileSpec, ISA], Module]
    panel_bytes: int
    columns: int
    run: int = 0
    unit: int = 0


def line_run(sizes: Filter, window: Window) -> int:
    """Codes of a patch that lie side by side in a line of the image."""
    joined = window.dilation[1] == 1 and sizes.groups == 1  # the taps of a line lie side by side
    return sizes.kernel[1] * sizes.channels if joined else sizes.channels


def _written(sizes: Filter, own: OwnTiles | None = None) -> bool:
    return sizes.channels % 8 != 0 and (own is None or not own.run)


def run_of(sizes: Filter, window: Window) -> int:
    """Codes of a patch that lie side by side where tiles read them: in a line of the image, or in a patch that is written out."""
    return sizes.k if _written(sizes) else line_run(sizes, window)


@dataclass(frozen=True, slots=True)
class _Walk:
    """How the codes of a patch are read: in the image itself, in lines of it that are copied, or where patches are written out from these.

    in_image     nothing is copied
    runs, run    of codes that lie side by side in a line of a patch: how many, and how long
    step         codes that tiles take at a time
    row          codes of a patch that is written out, with what pads it; 0: none is
    laid_out     bytes of a code as tiles read it
    copied       bytes of a code in the lines, of the image or copied
    line, pixel  bytes of these
    near_width   pixels of a line that its outputs need
    down, reach  lines from one line of outputs to the next, and lines of a patch
    """

    in_image: bool
    runs: int
    run: int
    step: int
    row: int
    laid_out: int
    copied: int
    line: int
    pixel: int
    near_width: int
    down: int
    reach: int

    @classmethod
    def of(cls, linear: LinearKernel, sizes: Filter, window: Window, image: Sequence[int], own: OwnTiles | None) -> _Walk:
        """Of images [C, H, W]."""
        channels, height, width = image
        ho, wo = window.out_size((height, width), sizes.kernel)
        (kh, kw), (sh, sw), (dh, dw) = sizes.kernel, window.stride, window.dilation
        top, _, left, _ = window.padding
        run = line_run(sizes, window)
        runs = kw * sizes.channels // run
        step, padded = math.gcd(run, 32), linear.geometry.padded
        near_width, reach = (wo - 1) * sw + (kw - 1) * dw + 1, (kh - 1) * dh + 1
        inside = (ho - 1) * sh - top + reach <= height and near_width - left <= width
        laid_out = 1 if own is not None else linear.isa.activation_bytes("int8", sizes.format.bits)
        unsigned = own is not None and own.run > 0
        in_image = top == left == 0 and inside and not unsigned and (step if own is None else run) >= _LEAST_STEP and laid_out == 1
        written = _written(sizes, own)
        copied = 1 if written else laid_out
        if own is not None and own.run:
            run, step = own.run, own.unit
        return cls(
            in_image,
            runs,
            run,
            step=math.gcd(padded, 32) if written else step,
            row=padded if written else 0,
            laid_out=laid_out,
            copied=copied,
            line=(width if in_image else near_width) * channels * copied,
            pixel=channels * copied,
            near_width=near_width,
            down=sh,
            reach=reach,
        )

    @property
    def patch(self) -> int:
        """Bytes of one that is written out."""
        return self.row * self.laid_out

    def near_lines(self, lines: int) -> int:
        """Lines of the image that so many lines of outputs need."""
        return (lines - 1) * self.down + self.reach

    def strip_bytes(self, lines: int, out_width: int) -> int:
        """Memory for so many lines of outputs."""
        return lines * out_width * self.patch + (0 if self.in_image else self.near_lines(lines) * self.line)


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


def _lines_spec(
    walk: _Walk, linear: LinearKernel, sizes: Filter, copied_codes: int, sums: str, columns: int, *, started: bool, unsigned: bool
) -> LinesSpec:
    isa, bits, kh = linear.isa, sizes.format.bits, sizes.kernel[0]
    at_once = min(32, 1 << (walk.run - 1).bit_length()) if walk.row else 0
    few_lines = walk.runs == 1 and walk.run <= at_once and kh <= _FEW_LINES
    return LinesSpec(
        copied=0 if walk.in_image else power_of_two(copied_codes, 4 * isa.lanes) if copied_codes else 8,
        patches=at_once,
        lines=kh if few_lines else 0,
        bits=bits,
        started=started and (linear.paired or isa.correction(bits, signed=True) != 0),
        paired=linear.paired and started,
        width=walk.laid_out,
        unit=walk.step,
        sums=sums,
        masked=not walk.in_image,
        tail=(walk.patch or sizes.channels) % (4 * isa.lanes) if walk.in_image else 0,
        columns=columns,
        unsigned=unsigned,
    )


def _lane_places(walk: _Walk, sizes: Filter, line_step: int, tap_step: int) -> Tensor:
    """Where a patch's lanes begin, in bytes behind its place."""
    if walk.row:
        starts, run = [0], sizes.k
    else:
        starts, run = [line * line_step + tap * tap_step for line in range(sizes.kernel[0]) for tap in range(walk.runs)], walk.run
    return torch.tensor([start + min(at, max(0, run - LANE)) for start in starts for at in range(0, run, LANE)], device="cpu")


def lines_inside(window: Window, kernel: int, height: int, out: int) -> list[tuple[int, int]]:
    """Of each line of outputs the lines of the kernel that lie inside of the image: the first, and the one behind the last."""
    step = window.dilation[0]
    tops = [y * window.stride[0] - window.padding[0] for y in range(out)]
    return [(min(kernel, max(0, -(top // step))), max(0, min(kernel, -((top - height) // step)))) for top in tops]


def _bands(lines: Sequence[tuple[int, int]], width: int, most: int, function: Callable[[int], int]) -> Tensor:
    """The `Band`s of a strip, of whose lines each takes so many of the kernel's; the largest first, as the first tiles ask for what comes
    next. function(rows) is the address of a tile's, of at most `most` rows."""
    bands, y = [], 0
    for (first, stop), alike in itertools.groupby(lines):
        m = len(list(alike)) * width
        rows = tile_rows(m, most, _TILE_COST)
        bands.append(Band(y, y + m, first, max(first, stop), rows, function(rows)))
        y += m
    return torch.tensor(sorted(bands, key=lambda band: band.first - band.stop), dtype=torch.int64, device="cpu")


def plan(
    linear: LinearKernel,
    sizes: Filter,
    window: Window,
    shape: Sequence[int],
    out_dtype: torch.dtype,
    outside: int,
    own: OwnTiles | None = None,
) -> ConvCall:
    """The call for images of a shape [B, C, H, W]. `outside` is the code of what lies outside of them."""
    isa, geo, (batch, channels, height, width) = linear.isa, linear.geometry, shape
    ho, wo = window.out_size((height, width), sizes.kernel)
    (kh, kw), (sh, sw), (dh, dw) = sizes.kernel, window.stride, window.dilation
    walk, left = _Walk.of(linear, sizes, window, shape[1:], own), window.padding[2]
    written, unsigned = walk.row > 0, own is not None and own.run > 0
    most = max(1, min(runtime.threads(), batch * ho * wo * sizes.out * sizes.k // WORK_A_THREAD))
    columns, panel_bytes = (PANEL, geo.panel_bytes) if own is None else (own.columns, own.panel_bytes)
    panels = geo.panels * (PANEL // columns)
    strips = Strips.of((batch, ho, wo), sizes, panels, most, lambda lines: walk.strip_bytes(lines, wo))
    lines, threads = strips.lines, min(most, strips.items)
    m, near_lines, line, pixel = lines * wo, walk.near_lines(lines), walk.line, walk.pixel
    left_pixels = min(left, walk.near_width)
    copied_codes = min(width, walk.near_width - left_pixels) * channels
    alone = own is not None or written or (sizes.taps == 1 and window.stride == (1, 1))  # a row's sum is that of one pixel
    sums = "none" if alone else "lines" if sw == 1 and wo >= isa.lanes else "single"
    spec = _lines_spec(walk, linear, sizes, copied_codes, sums, columns, started=own is None, unsigned=unsigned)
    tile_spec = replace(linear.tile_spec, vectors=isa.direct_tile[1], unit=walk.step, single=False, out=KINDS[out_dtype])
    build = direct.build_tile if own is None else own.build
    by_lines = not written and not spec.paired and (own is None or unsigned) and strips.number == 1
    nothing = outside == (-128 if unsigned else 0)  # what lies outside, as tiles read it
    taken = lines_inside(window, kh, height, ho) if by_lines and nothing else [(0, 1 if written else kh)] * lines
    bands = _bands(taken, wo, isa.direct_tile[0], lambda rows: compiled(build, replace(tile_spec, rows=rows), isa))
    pixels = m if written else near_lines * (line // pixel)
    memory = _Memory.of(walk, lines, m, 0 if alone else pixels)
    y, x = torch.meshgrid(torch.arange(lines, device="cpu"), torch.arange(wo, device="cpu"), indexing="ij")
    places = (y * (sh * line) + x * (sw * pixel)).flatten()
    walk_places = torch.arange(m, device="cpu") * walk.patch if written else places
    mask = torch.zeros(64, dtype=torch.int8, device="cpu")  # of the last, partial vector of a pixel
    pixel_bytes = walk.patch if written else sizes.channels * walk.copied  # of a group
    mask[: pixel_bytes % (4 * isa.lanes)] = -1
    lane_places = _lane_places(walk, sizes, dh * line, dw * pixel)
    edge, out_bytes = torch.full((64,), outside, dtype=torch.int8, device="cpu"), out_dtype.itemsize
    fields = {
        **strips.fields(),
        **memory._asdict(),
        "n": geo.n,
        "panel_bytes": panel_bytes,
        "asks": int(panels * panel_bytes >= _MANY_BYTES),
        "lane_places": lane_places.data_ptr(),
        "out_stride": sizes.out * out_bytes,
        "out_bytes": out_bytes,
        "table_stride": 4 * PANEL * geo.panels,
        "bands": bands.data_ptr(),
        "band_count": len(bands),
        "row_codes": walk.row,
        "groups": sizes.groups,
        "rows": m,
        "group_bytes": sizes.channels * walk.copied,
        "group_weights": panels * panel_bytes,
        "group_bias": 12 * PANEL * geo.panels if out_dtype == torch.int8 else 4 * geo.n,
        "group_out": geo.n * out_bytes,
        "height": height if copied_codes else 0,  # 0: nothing of a line is seen
        "out_height": ho,
        "out_width": wo,
        "stride_h": sh,
        "top": window.padding[0],
        "image_bytes": height * width * channels,
        "line_bytes": width * channels,
        "near_lines": near_lines,
        "near_line_bytes": line,
        "copied_codes": copied_codes,
        "left_codes": left_pixels * channels,
        "outside": edge.data_ptr(),
        "places": places.data_ptr(),
        "walk_places": walk_places.data_ptr(),
        "lines": kh,
        "line_step": dh * line,
        "runs": walk.runs,
        "run_step": dw * pixel,
        "run_codes": walk.run,
        "walk_line_step": dh * line,
        "walk_runs": 1 if written else walk.runs,
        "walk_run_step": dw * pixel,
        "walk_steps": (walk.row if written else walk.run) // walk.step,
        "left_pairs": 0 if written else (geo.padded - sizes.k) // 2 * 128**2,
        "pixels": pixels,
        "pixel_bytes": pixel_bytes,
        "pixel_mask": mask.data_ptr(),
        "pixel_step": walk.patch if written else pixel,
        "pixel_stride": sw,
        "pixel_line": sh * line // pixel,
        "taps": kw,
        "tap_step": dw,
        "tap_line_step": dh * line // pixel,
    }
    buffer = arguments(DIRECT, compiled(direct.build, spec, isa), fields)
    kept = edge, places, walk_places, mask, lane_places, bands
    return ConvCall.of(buffer, (batch, sizes.out, ho, wo), threads * memory.thread_bytes, threads, kept)


class OwnWeightsKernel(CodesConv):
    """The compiled convolution of int8 images of any size by tiles that have weights of their own.

    Conditions that the caller has checked: the file's `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights`
    is what `weights_of` made; `table` is the tables of the groups.

    linear   the kernel of the same matrix
    """

    def __init__(self, sizes: Filter, window: Window, linear: LinearKernel) -> None:
        super().__init__()
        self.sizes, self.isa, self.linear = sizes, current(), linear

    def tiles(self, panel_bytes: int) -> OwnTiles:
        """What multiplies; `panel_bytes` of weights for each tile's outputs."""
        raise NotImplementedError

    def prepare(self, x: Tensor, window: Window, outside: int, weights: Tensor, *_: bool) -> ConvCall:
        return plan(self.linear, self.sizes, window, x.shape, torch.int8, outside, self.tiles(weights.shape[2]))
