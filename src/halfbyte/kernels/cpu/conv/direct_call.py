"""Plans convolutions of codes for `direct.py`: how patches are read, what a thread's memory holds, and what the code is compiled for.

`plan` is called by `gathered.ConvKernel`, and by `RearrangedWeightsKernel` for the tiles of `arranged.py` and `unsigned.py`. `amx.py` and
`upsampled_conv.py` share its arguments.
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
from halfbyte.kernels.cpu.conv.direct import DIRECT, SLACK, Band, RowSums, Strips, StripSpec, power_of_two
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, tile_rows
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import Schedule, TileSpec
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK, PANEL

TILE_COST = 0.4  # of beginning and ending a tile, in rows
_LEAST_UNIT = 16  # codes that a tile reads of an image at a time: some instruction sets load so many, and there is nothing behind an image
_MANY_BYTES = 1 << 19  # of weights, which are not in a core's second-level cache when they are needed
_EDGE = 64  # codes of padding that `outside` points to: a whole vector
_MOST_GATHER_LINES = 8  # of a patch, whose loads and stores are unrolled


class RearrangedTile(NamedTuple):
    """A tile with weights in an order of its own, which needs no sums of activations.

    Attributes:
        build: Emits its function, as `direct.build_tile` does.
        panel_bytes: Bytes of the weights of `columns` outputs.
        columns: Outputs of a tile.
        padded_run, unit: For unsigned codes in copied lines (`unsigned.py`): codes of a run with its padding, and codes that are read at a
            time. 0: codes are signed and are read in lanes of 16, of which the last one of a run ends with it (`arranged.py`).
    """

    build: Callable[[TileSpec, ISA], Module]
    panel_bytes: int
    columns: int
    padded_run: int = 0
    unit: int = 0

    @property
    def is_unsigned(self) -> bool:
        return self.padded_run > 0


def tile_width(isa: ISA) -> int:
    """Return the outputs of a tile with rearranged weights."""
    return isa.lanes * isa.tuning.conv_tile[1]


def has_exact_byte_sums(sizes: Filter) -> bool:
    """Return whether weights are bytes with one scale for all of a patch, and int32 holds the sums of its products."""
    fmt = sizes.format
    return fmt.bits == 8 and fmt.zero == "none" and not isinstance(fmt.block, int) and sizes.k <= LONGEST_BLOCK


def line_run(sizes: Filter, window: Window) -> int:
    """Return the codes of a patch that are adjacent in a line of the image: those of all taps of a line, or of one tap."""
    taps_are_adjacent = window.dilation[1] == 1 and sizes.groups == 1
    return sizes.kernel[1] * sizes.channels if taps_are_adjacent else sizes.channels


def _gathers(sizes: Filter, rearranged: RearrangedTile | None = None) -> bool:
    """Return whether patches are gathered, so that all their codes are adjacent."""
    return sizes.channels % 8 != 0 and (rearranged is None or not rearranged.is_unsigned)


def tile_run(sizes: Filter, window: Window) -> int:
    """Return the codes of a patch that are adjacent where tiles read them: in a line of the image, or in a gathered patch."""
    return sizes.k if _gathers(sizes) else line_run(sizes, window)


@dataclass(frozen=True, slots=True)
class _Patches:
    """Where the codes of patches lie, and how they are read: in the image itself, in copied lines, or in patches gathered from those.

    Attributes:
        sizes, window: Of the convolution.
        in_image: Nothing is copied.
        runs, run: Runs of adjacent codes in a line of a patch, and codes of each.
        unit: Codes that tiles read at a time.
        gathered_codes: Codes of a gathered patch, with its padding; 0: patches are not gathered.
        code_bytes: Bytes of a code as tiles read it.
        line_code_bytes: Bytes of a code in the lines, of the image or copied.
        needed_pixels: Pixels of a line that a line of outputs needs, with those of the padding.
        line_pixels: Pixels of a line, of the image or copied.
    """

    sizes: Filter
    window: Window
    in_image: bool
    runs: int
    run: int
    unit: int
    gathered_codes: int
    code_bytes: int
    line_code_bytes: int
    needed_pixels: int
    line_pixels: int

    @classmethod
    def of(cls, linear: LinearKernel, sizes: Filter, geo: ConvGeometry, rearranged: RearrangedTile | None) -> _Patches:
        (height, width), (out_height, out_width), window = geo.image, geo.out, geo.window
        (kh, kw), (sh, sw), (dh, dw), (top, _, left, _) = sizes.kernel, window.stride, window.dilation, window.padding
        is_unsigned = rearranged is not None and rearranged.is_unsigned
        run = line_run(sizes, window)
        runs, unit = kw * sizes.channels // run, math.gcd(run, 32)
        code_bytes = 1 if rearranged is not None else linear.isa.activation_bytes("int8", sizes.format.bits)

        needed_pixels = (out_width - 1) * sw + (kw - 1) * dw + 1
        needs_no_padding = top == left == 0 and (out_height - 1) * sh + (kh - 1) * dh < height and needed_pixels <= width
        reads_enough = (unit if rearranged is None else run) >= _LEAST_UNIT
        in_image = needs_no_padding and not is_unsigned and reads_enough and code_bytes == 1
        gathered_codes = linear.geometry.padded if _gathers(sizes, rearranged) else 0
        if rearranged is not None and is_unsigned:
            run, unit = rearranged.padded_run, rearranged.unit
        return cls(
            sizes,
            window,
            in_image,
            runs,
            run,
            unit=math.gcd(gathered_codes, 32) if gathered_codes else unit,
            gathered_codes=gathered_codes,
            code_bytes=code_bytes,
            line_code_bytes=1 if gathered_codes else code_bytes,
            needed_pixels=needed_pixels,
            line_pixels=width if in_image else needed_pixels,
        )

    @property
    def group_bytes(self) -> int:
        """Bytes of a pixel's codes in a channel group."""
        return self.sizes.channels * self.line_code_bytes

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel in a line."""
        return self.sizes.groups * self.group_bytes

    @property
    def line_bytes(self) -> int:
        """Bytes of a line."""
        return self.line_pixels * self.pixel_bytes

    @property
    def line_step(self) -> int:
        """Bytes from a line of a patch to the next."""
        return self.window.dilation[0] * self.line_bytes

    @property
    def run_step(self) -> int:
        """Bytes from a run to the next one of a line."""
        return self.window.dilation[1] * self.pixel_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a gathered patch; 0: patches are not gathered."""
        return self.gathered_codes * self.code_bytes

    def lines(self, out_lines: int) -> int:
        """Return the lines of the image that so many lines of outputs need."""
        return (out_lines - 1) * self.window.stride[0] + (self.sizes.kernel[0] - 1) * self.window.dilation[0] + 1

    def strip_bytes(self, out_lines: int, out_width: int) -> int:
        """Return the memory that copies for so many lines of outputs take."""
        return out_lines * out_width * self.gathered_bytes + (0 if self.in_image else self.lines(out_lines) * self.line_bytes)

    def offsets(self, out_lines: int, out_width: int) -> Tensor:
        """Return the byte offsets of the patches of so many lines of outputs from the first one, in lines."""
        y, x = torch.meshgrid(torch.arange(out_lines, device="cpu"), torch.arange(out_width, device="cpu"), indexing="ij")
        return (y * (self.window.stride[0] * self.line_bytes) + x * (self.window.stride[1] * self.pixel_bytes)).flatten()

    def lane_offsets(self) -> Tensor:
        """Return the byte offset of each lane of 16 codes from the beginning of a patch; the last one of a longer run ends with it."""
        if self.gathered_codes:
            starts, run = [0], self.sizes.k
        else:
            run = self.run
            starts = [line * self.line_step + tap * self.run_step for line in range(self.sizes.kernel[0]) for tap in range(self.runs)]
        return torch.tensor([start + min(at, max(0, run - LANE)) for start in starts for at in range(0, run, LANE)], device="cpu")

    def fields(self) -> dict[str, int]:
        """Return the arguments for the lines and runs of a patch, and for those that tiles read: a gathered patch is one run."""
        return {
            "group_bytes": self.group_bytes,
            "patch_lines": self.sizes.kernel[0],
            "line_step": self.line_step,
            "runs": self.runs,
            "run_step": self.run_step,
            "run_codes": self.run,
            "gathered_codes": self.gathered_codes,
            "read_runs": 1 if self.gathered_codes else self.runs,
            "read_units": (self.gathered_codes or self.run) // self.unit,
        }

    def sum_fields(self, out_lines: int, outputs: int) -> dict[str, int]:
        """Return the arguments for sums of a strip: of gathered patches, or of pixels, and where a patch's pixels lie."""
        (sh, sw), (dh, dw) = self.window.stride, self.window.dilation
        return {
            "pixels": outputs if self.gathered_codes else self.lines(out_lines) * self.line_pixels,
            "pixel_bytes": self.gathered_bytes or self.group_bytes,
            "pixel_step": self.gathered_bytes or self.pixel_bytes,
            "pixel_stride": sw,
            "pixel_line": sh * self.line_pixels,
            "taps": self.sizes.kernel[1],
            "tap_step": dw,
            "tap_line_step": dh * self.line_pixels,
        }


class _Memory(NamedTuple):
    """A thread's memory: copied lines, then gathered patches, sums of pixels and initial sums of outputs; in bytes, all of it last."""

    patches_at: int
    pixel_sums_at: int
    sums_at: int
    thread_bytes: int

    @classmethod
    def of(cls, patches: _Patches, out_lines: int, outputs: int, pixel_sums: int) -> _Memory:
        """Return the memory for a strip of so many lines and outputs."""
        patches_at = 0 if patches.in_image else round_up(patches.lines(out_lines) * patches.line_bytes + SLACK, 64)
        pixel_sums_at = patches_at + (round_up(outputs * patches.gathered_bytes + SLACK, 64) if patches.gathered_codes else 0)
        sums_at = pixel_sums_at + round_up(pixel_sums * 4, 64)
        return cls(patches_at, pixel_sums_at, sums_at, sums_at + round_up(outputs * 4, 64))


def _strip_spec(patches: _Patches, linear: LinearKernel, rearranged: RearrangedTile | None, copied_codes: int, out_width: int) -> StripSpec:
    """Return what the loops around the tiles are compiled for."""
    isa, sizes, bits = linear.isa, patches.sizes, patches.sizes.format.bits
    register_bytes, stride = 4 * isa.lanes, patches.window.stride
    copy_step = power_of_two(copied_codes, register_bytes) if copied_codes else 8
    gather_step = min(32, 1 << (patches.run - 1).bit_length()) if patches.gathered_codes else 0
    unrolls_lines = patches.runs == 1 and patches.run <= gather_step and sizes.kernel[0] <= _MOST_GATHER_LINES
    row_sums: RowSums = "lines" if stride[1] == 1 and out_width >= isa.lanes else "single"
    if rearranged is not None or patches.gathered_codes or (sizes.taps == 1 and stride == (1, 1)):
        row_sums = "none"
    return StripSpec(
        copy_step=0 if patches.in_image else copy_step,
        gather_step=gather_step,
        gather_lines=sizes.kernel[0] if unrolls_lines else 0,
        bits=bits,
        sums_codes=rearranged is None and (linear.paired or isa.correction(bits, signed=True) != 0),
        paired=rearranged is None and linear.paired,
        code_bytes=patches.code_bytes,
        unit=patches.unit,
        row_sums=row_sums,
        masks_tail=not patches.in_image,
        tail=(patches.gathered_bytes or sizes.channels) % register_bytes if patches.in_image else 0,
        columns=PANEL if rearranged is None else rearranged.columns,
        adds_128=rearranged is not None and rearranged.is_unsigned,
    )


def lines_inside(window: Window, kernel: int, height: int, out: int) -> list[tuple[int, int]]:
    """Return for each of `out` lines of outputs the range [first, stop) of the kernel's lines inside of the image."""
    step = window.dilation[0]
    tops = [y * window.stride[0] - window.padding[0] for y in range(out)]
    return [(min(kernel, max(0, -(top // step))), max(0, min(kernel, -((top - height) // step)))) for top in tops]


def _lines_to_multiply(patches: _Patches, spec: StripSpec, strips: Strips, height: int, outside: int) -> list[tuple[int, int]]:
    """Return for each line of a strip the range of the kernel's lines that tiles multiply.

    Lines in the padding are left out if tiles read line by line, the padding is 0 to them, and each image is a single strip.
    """
    kernel = 1 if patches.gathered_codes else patches.sizes.kernel[0]
    padding_is_zero = outside == (-128 if spec.adds_128 else 0)
    if patches.gathered_codes or spec.paired or strips.number > 1 or not padding_is_zero:
        return [(0, kernel)] * strips.lines
    return lines_inside(patches.window, kernel, height, strips.lines)


def _bands(lines: Sequence[tuple[int, int]], width: int, most_rows: int, function: Callable[[int], int]) -> Tensor:
    """Return the `Band`s of a strip, int64 [bands, fields]; the largest first, as the first tiles prefetch the next weights.

    Args:
        lines: For each of its lines the range of the kernel's lines that are multiplied.
        width: Outputs of a line.
        most_rows: Outputs of a tile at most.
        function: Returns the address of the function of tiles of so many outputs.
    """
    bands, first_output = [], 0
    for (first, stop), same_lines in itertools.groupby(lines):
        outputs = len(list(same_lines)) * width
        rows = tile_rows(outputs, most_rows, TILE_COST)
        bands.append(Band(first_output, first_output + outputs, first, max(first, stop), rows, function(rows)))
        first_output += outputs
    return torch.tensor(sorted(bands, key=lambda band: band.first - band.stop), dtype=torch.int64, device="cpu")


def group_fields(sizes: Filter, out_dtype: torch.dtype, panels: int, panel_bytes: int, *, padded_bias: bool) -> dict[str, int]:
    """Return the arguments for a channel group's weights, bias and outputs.

    Args:
        sizes: Of the filter.
        out_dtype: Of the outputs.
        panels, panel_bytes: Panels of a group, and bytes of each.
        padded_bias: Whether a bias is padded to whole panels in each group; requantization tables are.
    """
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


def image_fields(geo: ConvGeometry, needed_pixels: int, lines: int, line_bytes: int) -> dict[str, int]:
    """Return the arguments for images, and for what a strip copies of one: lines of `needed_pixels`, which take `line_bytes` there."""
    height, width = geo.image
    left = min(geo.window.padding[2], needed_pixels)
    copied = min(width, needed_pixels - left) * geo.channels
    return {
        "height": height if copied else 0,  # 0: all pixels that are needed are padding
        "image_bytes": height * width * geo.channels,
        "line_bytes": width * geo.channels,
        "copied_lines": lines,
        "copied_line_bytes": line_bytes,
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
    rearranged: RearrangedTile | None = None,
) -> Plan:
    """Return the plan of a convolution of codes by the tiles of `direct.py`, or by others.

    Args:
        linear: The product with the same matrix.
        sizes, geo: Of the filter, and of the images.
        threads: Most threads.
        out_dtype: Of the outputs.
        outside: The code of padding.
        rearranged: Tiles with rearranged weights; None: those of `direct.build_tile`.
    """
    isa, weight, out_width = linear.isa, linear.geometry, geo.out[1]
    build, columns, panel_bytes = direct.build_tile, PANEL, weight.panel_bytes
    if rearranged is not None:
        build, columns, panel_bytes = rearranged.build, rearranged.columns, rearranged.panel_bytes
    panels = weight.panels * (PANEL // columns)

    patches = _Patches.of(linear, sizes, geo, rearranged)
    strips = Strips.of(geo.outputs, sizes, panels, threads, lambda lines: patches.strip_bytes(lines, out_width))
    lines, outputs = strips.lines, strips.lines * out_width
    images = image_fields(geo, patches.needed_pixels, patches.lines(lines), patches.line_bytes)
    spec = _strip_spec(patches, linear, rearranged, images["copied_codes"], out_width)
    sums = patches.sum_fields(lines, outputs)
    memory = _Memory.of(patches, lines, outputs, 0 if spec.row_sums == "none" else sums["pixels"])

    activation = replace(linear.tile_spec.activation, unit=patches.unit, one_unit=False)
    tile = replace(linear.tile_spec, activation=activation, out=kind_of(out_dtype))
    to_multiply = [(0, 1 if patches.gathered_codes else sizes.kernel[0])] * lines  # `arranged.py` reads whole patches
    if rearranged is None or rearranged.is_unsigned:
        to_multiply = _lines_to_multiply(patches, spec, strips, geo.image[0], outside)
    most_rows, vectors = isa.tuning.conv_tile
    bands = _bands(to_multiply, out_width, most_rows, lambda rows: compiled(build, replace(tile, schedule=Schedule(rows, vectors)), isa))
    patch_offsets, lane_offsets = patches.offsets(lines, out_width), patches.lane_offsets()
    read_offsets = torch.arange(outputs, device="cpu") * patches.gathered_bytes if patches.gathered_codes else patch_offsets
    mask = torch.zeros(_EDGE, dtype=torch.int8, device="cpu")  # of the last, partial vector of what is summed
    mask[: sums["pixel_bytes"] % (4 * isa.lanes)] = -1
    fields = {
        **strips.fields(),
        **memory._asdict(),
        **group_fields(sizes, out_dtype, panels, panel_bytes, padded_bias=False),
        **images,
        **patches.fields(),
        **sums,
        "strip_outputs": outputs,
        "prefetches": int(panels * panel_bytes >= _MANY_BYTES),
        "out_bytes": out_dtype.itemsize,
        "unread_pairs": 0 if patches.gathered_codes else (weight.padded - sizes.k) // 2 * 128**2,
        "bands": bands.data_ptr(),
        "band_count": len(bands),
        "patch_offsets": patch_offsets.data_ptr(),
        "read_offsets": read_offsets.data_ptr(),
        "lane_offsets": lane_offsets.data_ptr(),
        "pixel_mask": mask.data_ptr(),
    }
    tensors = patch_offsets, read_offsets, mask, lane_offsets, bands
    return Plan(DIRECT, compiled(direct.build, spec, isa), fields, strips.items, _EDGE, memory.thread_bytes, tensors)


class RearrangedWeightsKernel(PlannedConv):
    """The compiled convolution of int8 images of any size by tiles with rearranged weights, for `arranged.py` and `unsigned.py`.

    Conditions that the caller has checked: the file's `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights`
    is what `weights_of` returned; `table` is the requantization tables of the channel groups.

    Attributes:
        linear: The kernel of the product with the same matrix.
    """

    def __init__(self, sizes: Filter, window: Window, linear: LinearKernel) -> None:
        super().__init__()
        self.sizes, self.isa, self.linear = sizes, current(), linear

    def tile(self, panel_bytes: int) -> RearrangedTile:
        """Return the tile that multiplies by `panel_bytes` of weights for each of its outputs' panels."""
        raise NotImplementedError

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        return plan(self.linear, self.sizes, geo, threads, torch.int8, outside, self.tile(weights.shape[2]))
