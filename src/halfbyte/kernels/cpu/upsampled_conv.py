"""Convolutions of int8 images that are enlarged twice by nearest neighbours, without the enlarged image: 3 x 3, stride 1, padding 1.

    T[r, s, p]            = sum over ci of  w[co, r, s, ci] * x[p, ci]                            for each pixel p; 0 outside of the image
    acc[2 i + a, 2 j + b] = sum over r, s of  T[r, s, (i + (a + r - 1) // 2, j + (b + s - 1) // 2)]

An output's nine taps read four pixels of x, each several times. The product T of a tap with a pixel is computed once instead of four
times, and added to four outputs as integers: `acc` is that of the convolution of the enlarged image, and so is the output, bit for bit.

`ops/conv/upsampled.py` calls `UpsampledConvKernel`. Threads draw items as in `direct.py`: a strip of an image's lines times some panels of
outputs. For each panel a thread computes T of the strip's lines, and of one more at either end, in memory of its own (`_multiply_taps`),
and adds up its outputs (`_write_outputs`). Tiles are those of `direct.py`: the nine taps are nine lines of a kernel, at distance 0, and
each has a `Band` of its own with the pixels that it is multiplied with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import compiled, phase
from halfbyte.kernels.cpu.conv.direct import DIRECT, SLACK, Band, DirectTile, StripLoops, StripSpec, power_of_two, tile_function
from halfbyte.kernels.cpu.conv.direct_call import TILE_COST, group_fields, image_fields
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, parts_of, tile_rows
from halfbyte.kernels.cpu.linear.tile_spec import Schedule, TileSpec
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import PANEL

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.conv.gathered import ConvKernel

UPSAMPLED = DIRECT.extended(
    *("taps_at", "tap_bytes"),  # in a thread's memory: where T is, and bytes of a tap there
    "width",  # pixels of a line of x
    "result_stride",  # bytes from a pixel of the output to the next
    "scales_at",  # bytes from a panel's weights to its scales
)
_PIXEL_BYTES = 4 * PANEL  # of T, of a tap and pixel
_TAPS = 9
_STEP = 16  # codes of a pixel, of which there are multiples
_STRIP_BYTES = 640 << 10  # of T, which is to stay in the second-level cache
_ITEMS_A_THREAD = 4
_EDGE = 64  # codes outside of the image: a whole vector


def why_not(codes: ConvKernel, window: Window) -> str | None:
    """Return why a convolution of codes to floating point does not read a smaller image; None if it does."""
    sizes, linear = codes.sizes, codes.linear
    moves = window.stride, window.dilation, tuple(window.padding)
    if sizes.kernel != (3, 3) or sizes.groups != 1 or moves != ((1, 1), (1, 1), (1, 1, 1, 1)):
        return "it takes 3 x 3 kernels, stride, dilation and padding 1, and no groups"
    if codes.result == torch.int8 or codes.out_dtype != codes.result or codes.dtype != torch.int8 or linear.geometry.blocks != 1:
        return "it takes codes with one scale for each image, and writes floating point"
    if linear.paired or sizes.channels % _STEP or sizes.out % linear.isa.lanes:
        return f"{sizes.channels} channels are no multiple of {_STEP}, {sizes.out} of {linear.isa.lanes}, or products are paired"
    return None


@dataclass(frozen=True, slots=True)
class UpsampledSpec(StripSpec):
    """What the loops are compiled for.

    Attributes:
        out, scale: Element types of the outputs, and of the weight's scales.
    """

    out: Kind = "f32"
    scale: Kind = "f32"


@phase
def build(spec: UpsampledSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are an UPSAMPLED block, its thread and the number of threads."""
    _Upsampled(spec, isa, f).emit()


class _Upsampled(StripLoops):
    """Emits the kernel.

    A thread's memory: copied lines of a strip; sums of their pixels; T as int32 [tap, line, pixel, PANEL].
    """

    block = UPSAMPLED
    spec: UpsampledSpec

    def emit(self) -> None:
        f, get = self.f, self.get
        parts, strips, part_panels, lines = get("parts"), get("strips"), get("part_panels"), get("strip_lines")
        panels = (get("n") + (PANEL - 1)) // PANEL
        copied = f.variable(f.value("i64", -1))
        for item in f.draw_items(self.args + DIRECT.offset("counter"), get("items")):
            part, strip = item % parts, item // parts
            b, number = strip // strips, strip % strips
            y = f.umin(number * lines, get("height") - lines)
            new = copied.value.differs(strip)
            with f.when(new):
                self._copy_lines(self.pointer("x") + b * get("image_bytes"), y - 1)
                if self.spec.sums_codes:
                    self._sum_patches(self.lines)
                copied.value = strip
            out = self.pointer("out") + (b * get("out_height") + y * 2) * get("out_width") * get("result_stride")
            scale = (self.pointer("scales") + b * 4).load("float", 0, 4)
            for p in f.loop(f.umin(part * part_panels + part_panels, panels), part * part_panels):
                weights = self.pointer("weights") + p * get("panel_bytes")
                self._multiply_taps(weights)
                columns = f.umin(get("n") - p * PANEL, f.value("i64", PANEL))
                for first in f.loop(columns, step=self.isa.lanes):
                    self._write_outputs(p * PANEL + first, first, out, weights, scale)

    def _multiply_taps(self, weights: Value) -> None:
        """Compute T of a strip's lines for the panel at `weights`."""
        f, get, zero = self.f, self.get, self.f.value("i64", 0)
        for b in f.loop(get("band_count")):
            band = self.pointer("bands") + b * (8 * len(Band._fields))
            first, stop, rows = Band.load(band, "first", "stop", "rows")
            to = self.lines + get("taps_at") + b * get("tap_bytes")
            for t in f.loop((stop - first + (rows - 1)) // rows):
                m = f.umin(first + t * rows, stop - rows)  # the last tile may overlap the one before
                offsets, sums, bias = self.pointer("read_offsets") + m * 8, self.sums + m * 4, self.pointer("bias")
                pointers = weights, self.lines, offsets, sums, to + m * _PIXEL_BYTES, bias, self.pointer("scales"), band
                Band.call(f, band, self.args, *pointers, f.value("i64", PANEL), zero)

    def _write_outputs(self, column: Value, first: Value, out: Value, weights: Value, image_scale: Value) -> None:
        """Add up a vector of output channels for all of a strip's pixels, of each of which there are four outputs.

        Args:
            column, first: The vector's first output channel, and the same in its panel.
            out: Address of the strip's first output.
            weights: Address of the panel.
            image_scale: The image's scale.
        """
        f, get, isa, spec = self.f, self.get, self.isa, self.spec
        scale_element = element_of(spec.scale)
        raw = (weights + get("scales_at") + first * scale_element.size).load(vector(scale_element.stored, isa.lanes), 0, scale_element.size)
        scale = isa.to_float(raw, spec.scale) * image_scale.splat(isa.lanes)
        bias = (self.pointer("bias") + column * 4).load(isa.floats, 0, 4)
        low, high = (bound.splat(isa.lanes) for bound in DIRECT.load_floats(self.args, "clamp"))
        width, stride, tap_bytes, zeros = get("width"), get("result_stride"), get("tap_bytes"), self.pointer("zeros")
        size = element_of(spec.out).size
        taps = self.lines + get("taps_at") + first * 4
        for y in f.loop(get("strip_lines")):
            for x in f.loop(width):
                at, has_left, has_right = taps + (y * width + x) * _PIXEL_BYTES, x > 0, (x + 1) < width

                def row_sums(r: int, line: int, at: Value = at, has_left: Value = has_left, has_right: Value = has_right) -> list[Value]:
                    """Return the sums of T[r, s] over s for the outputs b = 0 and 1, at a line of x: 0 is the one above the pixel."""
                    left, middle, right = (at + tap_bytes * (3 * r + s) + width * (line * _PIXEL_BYTES) for s in range(3))
                    center = middle.load(isa.ints, 0, 4)
                    outer_left, outer_right = has_left.select(left + -_PIXEL_BYTES, zeros), has_right.select(right + _PIXEL_BYTES, zeros)
                    return [
                        outer_left.load(isa.ints, 0, 4) + center + right.load(isa.ints, 0, 4),
                        left.load(isa.ints, 0, 4) + center + outer_right.load(isa.ints, 0, 4),
                    ]

                # Outputs a = 0, 1 read with r = 0 the line above and that of the pixel, with r = 2 that of the pixel and the line below.
                upper, middle, lower = (row_sums(0, 0), row_sums(0, 1)), row_sums(1, 1), (row_sums(2, 1), row_sums(2, 2))
                to = out + (y * 2 * get("out_width") + x * 2) * stride + column * size
                for a, b in itertools.product(range(2), range(2)):
                    total = (upper[a][b] + middle[b] + lower[a][b]).to("float") * scale + bias
                    value = isa.from_float(total.max_keeping_nan(low).min_keeping_nan(high), spec.out)
                    (to + get("out_width") * (stride * a) + stride * b).store(value, 0, size)


@tile_function
def build_tile(spec: TileSpec, isa: ISA, f: Function) -> None:
    """Emit `direct.build_tile` with another end: the function writes int32 sums, PANEL of each row."""
    width = isa.lanes * spec.schedule.vectors
    for part in f.loop(PANEL // width):
        _TapTile(spec, isa, f).emit(part * width)


class _TapTile(DirectTile):
    """Emits a tile of R pixels times a panel of weights of one tap, to sums T."""

    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.prefetches = False

    def _finish(self, sums: list[Value], tail: Value, first: Value) -> None:
        for n, total in enumerate(sums):
            row, v = divmod(n, self.vectors)
            (self.out + first * 4).store(total, row * _PIXEL_BYTES + v * self.isa.lanes * 4, 4)

    def _write(self, row_offset: Value) -> None:
        pass  # `_finish` has written


class UpsampledConvKernel(PlannedConv):
    """The compiled convolution of enlarged images of any size, as those of `codes`; the caller has checked `why_not`."""

    scales_at = DIRECT.offset("scales")

    def __init__(self, codes: ConvKernel) -> None:
        super().__init__()
        self.sizes, self._codes = codes.sizes, codes
        self.dtype, self.result, self.out_dtype = codes.dtype, codes.result, codes.out_dtype

    def table(self, bias: Tensor | None, scales: Tensor | None) -> Tensor | None:
        return self._codes.table(bias, scales)

    def geometry(self, shape: Sequence[int], window: Window) -> ConvGeometry:
        geo = super().geometry(shape, window)
        return replace(geo, out=(2 * geo.image[0], 2 * geo.image[1]), products=geo.products // 4)

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        linear, sizes, (height, width) = self._codes.linear, self.sizes, geo.image
        isa, weight = linear.isa, linear.geometry
        step, code = _STEP if sizes.channels % 32 else 32, isa.activation_bytes("int8", sizes.format.bits)
        # Taps are multiplied with lines + 1, lines, and lines + 1 lines: 3 * (3 * lines + 2) in all.
        most_lines = (_STRIP_BYTES // (3 * width * _PIXEL_BYTES) - 2) // 3
        number = -(-height // max(1, min(height, most_lines)))
        lines = -(-height // number)
        parts = parts_of(weight.panels, threads, _ITEMS_A_THREAD, geo.batch * number)
        part_panels = -(-weight.panels // parts)
        parts = -(-weight.panels // part_panels)
        pixels, pixel_bytes = (lines + 2) * width, sizes.channels * code
        lines_fields = image_fields(replace(geo, window=Window()), width, lines + 2, width * pixel_bytes)  # nothing to the left of a line
        spec = UpsampledSpec(
            copy_step=power_of_two(lines_fields["copied_codes"], 4 * isa.lanes),
            gather_step=0,
            gather_lines=0,
            bits=sizes.format.bits,
            sums_codes=isa.correction(sizes.format.bits, signed=True) != 0,
            paired=False,
            code_bytes=code,
            unit=step,
            row_sums="none",
            masks_tail=True,
            out=kind_of(self.out_dtype),
            scale=linear.tile_spec.weight.scale,
        )
        offsets, mask = torch.arange(pixels, device="cpu") * pixel_bytes, torch.zeros(64, dtype=torch.int8, device="cpu")
        mask[: pixel_bytes % (4 * isa.lanes)] = -1
        bands, zeros = self._bands(lines, width, step), torch.zeros(PANEL, dtype=torch.int32, device="cpu")
        sums_at = round_up(pixels * pixel_bytes + SLACK, 64)
        taps_at = sums_at + round_up(pixels * 4, 64)
        thread_bytes = taps_at + _TAPS * pixels * _PIXEL_BYTES
        fields = {
            **group_fields(sizes, self.out_dtype, weight.panels, weight.panel_bytes, padded_bias=False),
            **lines_fields,
            "strips": number,
            "strip_lines": lines,
            "parts": parts,
            "part_panels": part_panels,
            "items": geo.batch * number * parts,
            "read_runs": 1,  # each tap is a line, at no distance from the one before
            "read_units": sizes.channels // step,
            "pixels": pixels,
            "pixel_bytes": pixel_bytes,
            "pixel_step": pixel_bytes,
            "pixel_mask": mask.data_ptr(),
            "sums_at": sums_at,
            "taps_at": taps_at,
            "tap_bytes": pixels * _PIXEL_BYTES,
            "thread_bytes": thread_bytes,
            "bands": bands.data_ptr(),
            "band_count": len(bands),
            "read_offsets": offsets.data_ptr(),
            "width": width,
            "result_stride": sizes.out * self.out_dtype.itemsize,
            "zeros": zeros.data_ptr(),
            "scales_at": weight.panel_bytes - weight.tail_bytes,
        }
        tensors = offsets, mask, bands, zeros
        return Plan(UPSAMPLED, compiled(build, spec, isa), fields, fields["items"], _EDGE, thread_bytes, tensors)

    def _bands(self, lines: int, width: int, step: int) -> Tensor:
        """Return the `Band` of each tap, int64 [9, fields]: the pixels of a strip's lines that it is multiplied with.

        Taps of the kernel's first line are multiplied with the strip's lines and the one above, those of the middle line with the strip's
        lines, those of the last line with these and the one below.

        Args:
            lines: Of a strip.
            width: Pixels of a line.
            step: Codes that tiles read at a time.
        """
        linear, (most_rows, vectors) = self._codes.linear, self._codes.linear.isa.tuning.conv_tile
        activation, bands = replace(linear.tile_spec.activation, unit=step, one_unit=False), []
        for tap in range(_TAPS):
            first, stop = ((0, lines + 1), (1, lines + 1), (1, lines + 2))[tap // 3]
            rows = tile_rows((stop - first) * width, most_rows, TILE_COST)
            tile = replace(linear.tile_spec, activation=activation, schedule=Schedule(rows, vectors), out="f32")
            bands.append(Band(first * width, stop * width, tap, tap + 1, rows, compiled(build_tile, tile, linear.isa)))
        return torch.tensor(bands, dtype=torch.int64, device="cpu")
