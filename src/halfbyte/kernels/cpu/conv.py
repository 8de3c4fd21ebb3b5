"""Convolution on the CPU: patches of the image are gathered where the linear tiles read them, a cacheful at a time.

    y[m, co] = sum over taps, ci of  w[co, tap, ci] * x[pixel under tap of output m, ci]

The image and the output have their channels together (channels_last). No im2col matrix exists, and the arithmetic is that of
`tile.py`. Here calls are planned; the code that gathers is made in `patches.py`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu import direct, elementwise, jit, patches, runtime
from halfbyte.kernels.cpu.conv_amx import MatrixConvKernel
from halfbyte.kernels.cpu.direct import DIRECT, SLACK, LinesSpec, Strips, power_of_two
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kept import ConvCall, Kept
from halfbyte.kernels.cpu.linear import CALL, KINDS, WORK_A_THREAD, LinearKernel, pack_call, thread
from halfbyte.kernels.cpu.patches import CONV, LEAST_UNIT, GatherSpec
from halfbyte.kernels.cpu.tile import Inner
from halfbyte.kernels.problem import Activation, Combination, Window
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.convolution import Filter

# Patches that are gathered at a time: so few that they stay near, so many that a panel's weights are worth loading for them.
_LEAST_BYTES, _LEAST_ROWS = 1 << 15, 48
_CHUNK_BYTES = 1 << 18
_ITEMS_A_THREAD = 3
_TILE_COST = 0.4  # of beginning and ending a tile, in rows
_LEAST_STEP = 16  # codes that a tile takes at a time where it reads an image: some instruction sets load so many, and nothing lies behind
_OVERFLOWS = 2.0**128 - 2.0**103  # from here on a double becomes an infinite float32
_PART = struct.unpack("f", struct.pack("f", 1 / 127))[0]
_FEW_LINES = 8  # of a patch, whose loads and stores are written out


_kept = Kept[ConvCall]()
_SCALES = DIRECT.offset("scales")
_pack_scales = DIRECT.struct("scales", "scales").pack_into


class ConvKernel:
    """The compiled convolution of one weight, activation dtype and arithmetic, for images of any size.

    Conditions that the caller has checked: x is [B, C, H, W] with channels_last strides, not empty, in the dtype; `weights` are the
    packed matrices of all groups, one after the other, at a multiple of 64; a bias is contiguous float32 [Co] (for int8, the tables
    of the groups).

    out   for codes alone: what the result is made of, if it is not codes; one block along K
    """

    def __init__(self, sizes: Filter, dtype: torch.dtype, inner: Inner, activation: Activation, *, out: torch.dtype | None = None) -> None:
        self.sizes, self.isa = sizes, current()
        self.linear = LinearKernel(sizes.matrix_format, sizes.out // sizes.groups, sizes.k, dtype, inner, activation, zeroed=True)
        self.dtype, self.result = dtype, out or dtype
        halves = self.result == torch.float16 and not self.isa.half_conversions
        self.out_dtype = torch.float32 if halves else self.result
        self.no_bias = torch.zeros(sizes.out)

    def __call__(
        self,
        x: Tensor,
        window: Window,
        weights: Tensor,
        bias: Tensor | None,
        low: float,
        high: float,
        *,
        residual: Tensor | None = None,
        outside: int = 0,
        scales: Tensor | None = None,
    ) -> Tensor:
        """x -> [B, Co, Ho, Wo] with channels_last strides.

        residual   added before the clamp: of the output's shape and strides, in x's dtype
        outside    the code of what lies outside of an int8 image
        scales     of each image, float32 [B], where codes become floating point
        """
        key = self.linear.number, x.shape, window.numbers, outside, runtime.threads()
        call = _kept.plans.get(key) or _kept.get(key, lambda: self._prepare(x, window, outside))
        out = torch.empty(call.out_shape, dtype=self.out_dtype, memory_format=torch.channels_last)
        _memory, scratch = thread.memory(call.memory)
        table = 0 if bias is None else bias.data_ptr()
        if residual is not None:
            residual = residual.to(out.dtype)
        apart = 0 if residual is None else residual.data_ptr() - out.data_ptr()  # the strides of both are the same
        if scales is not None:
            table = (self.no_bias if bias is None else bias).data_ptr()
            _pack_scales(call.buffer, _SCALES, scales.data_ptr())
        pack_call(call.buffer, CALL, 0, x.data_ptr(), 0, scratch, weights.data_ptr(), table, out.data_ptr(), apart, low, high)
        self.linear.run(call.address, call.threads)
        return out if out.dtype == self.result else out.to(self.result)

    def _prepare(self, x: Tensor, window: Window, outside: int) -> ConvCall:
        batch, _, height, width = x.shape
        ho, wo = window.out_size((height, width), self.sizes.kernel)
        linear = self.linear.taking(batch * ho * wo)
        on_matrix_unit = linear is not self.linear and linear.unit >= LEAST_UNIT  # with short units it is slower than dot products
        if self.result != self.dtype or (self.dtype == torch.int8 and not on_matrix_unit and linear.geometry.blocks == 1):
            return self._without_patches(x, window, outside)
        return self._with_patches(x, window, outside)

    def _without_patches(self, x: Tensor, window: Window, outside: int) -> ConvCall:
        """The plan of `direct.py`."""
        sizes, linear, isa, geo = self.sizes, self.linear, self.isa, self.linear.geometry
        batch, channels, height, width = x.shape
        ho, wo = window.out_size((height, width), sizes.kernel)
        (kh, kw), (sh, sw), (dh, dw) = sizes.kernel, window.stride, window.dilation
        top, _, left, _ = window.padding
        joined = dw == 1 and sizes.groups == 1  # the taps of a line lie side by side
        runs, run = (1, kw * channels) if joined else (kw, sizes.channels)
        step = math.gcd(run, 32)
        inside = (ho - 1) * sh - top + (kh - 1) * dh < height and (wo - 1) * sw - left + (kw - 1) * dw < width
        wide = isa.activation_bytes("int8", sizes.format.bits)
        image_itself = top == left == 0 and inside and step >= _LEAST_STEP and wide == 1
        patches = sizes.channels % 8 != 0
        near_width = (wo - 1) * sw + (kw - 1) * dw + 1
        line = (width if image_itself else near_width) * channels
        row = geo.padded if patches else 0
        step = math.gcd(geo.padded, 32) if patches else step

        patch_bytes = row * wide
        wide = 1 if patches else wide  # from here on: bytes of a code in the lines
        line *= wide
        pixel = channels * wide

        def strip_bytes(lines: int) -> int:
            return lines * wo * patch_bytes + (0 if image_itself else ((lines - 1) * sh + (kh - 1) * dh + 1) * line)

        most = max(1, min(runtime.threads(), batch * ho * wo * sizes.out * sizes.k // WORK_A_THREAD))
        strips = Strips.of((batch, ho, wo), sizes, geo.panels, most, strip_bytes)
        lines = strips.lines
        m = lines * wo
        most_rows, vectors = isa.direct_tile
        rows = min(range(min(m, most_rows), min(m, most_rows) * 2 // 3, -1), key=lambda n: -(-m // n) * (n + _TILE_COST))
        tile_spec = replace(linear.tile_spec, rows=rows, vectors=vectors, unit=step, single=False, out=KINDS[self.out_dtype])
        tile_name = direct.name_of(tile_spec)
        tile = jit.load(tile_name, functools.partial(direct.build_tile, tile_spec), isa)[tile_name]
        left_pixels = min(left, near_width)
        copied = min(width, near_width - left_pixels) * channels
        at_once = min(32, 1 << (run - 1).bit_length()) if patches else 0
        few_lines = runs == 1 and run <= at_once and kh <= _FEW_LINES
        alone = patches or (sizes.taps == 1 and window.stride == (1, 1))
        spec = LinesSpec(
            0 if image_itself else power_of_two(copied, 4 * isa.lanes) if copied else 8,
            at_once,
            kh if few_lines else 0,
            sizes.format.bits,
            linear.paired or isa.correction(sizes.format.bits, signed=True) != 0,
            linear.paired,
            isa.activation_bytes("int8", sizes.format.bits),
            step,
            "none" if alone else "lines" if sw == 1 and wo >= isa.lanes else "single",
            not image_itself,
        )
        phase = jit.load(spec.name, functools.partial(direct.build, spec), isa)[spec.name]
        y, x_ = torch.meshgrid(torch.arange(lines), torch.arange(wo), indexing="ij")
        places = (y * (sh * line) + x_ * (sw * pixel)).flatten()
        walk_places = torch.arange(m) * patch_bytes if patches else places
        near_lines = (lines - 1) * sh + (kh - 1) * dh + 1
        patches_at = 0 if image_itself else near_lines * line + SLACK + 63 & ~63
        pixel_sums_at = patches_at + (m * patch_bytes + SLACK + 63 & ~63 if patches else 0)
        pixels = m if patches else near_lines * (line // pixel)
        sums_at = pixel_sums_at + (0 if alone else pixels * 4 + 63 & ~63)
        thread_bytes = sums_at + (m * 4 + 63 & ~63)
        threads = min(most, strips.items)
        mask = torch.zeros(64, dtype=torch.int8)  # of the last, partial vector of a pixel
        pixel_bytes = patch_bytes if patches else sizes.channels * wide  # of a group
        mask[: pixel_bytes % (4 * isa.lanes)] = -1
        edge, out_bytes = torch.full((64,), outside, dtype=torch.int8), self.out_dtype.itemsize
        fields = {
            **strips.fields(),
            "first_phase": phase,
            "openmp": runtime.openmp_address(),
            "n": geo.n,
            "panel_bytes": geo.panel_bytes,
            "out_stride": sizes.out * out_bytes,
            "out_bytes": out_bytes,
            "table_stride": 4 * cpu_tiles.PANEL * geo.panels,
            "tile_function": tile,
            "tile_rows": rows,
            "row_codes": row,
            "groups": sizes.groups,
            "rows": m,
            "group_bytes": sizes.channels * wide,
            "group_weights": geo.nbytes,
            "group_bias": 12 * cpu_tiles.PANEL * geo.panels if self.out_dtype == torch.int8 else 4 * geo.n,
            "group_out": geo.n * out_bytes,
            "thread_bytes": thread_bytes,
            "patches_at": patches_at,
            "pixel_sums_at": pixel_sums_at,
            "sums_at": sums_at,
            "height": height if copied else 0,  # 0: nothing of a line is seen
            "out_height": ho,
            "out_width": wo,
            "stride_h": sh,
            "top": top,
            "image_bytes": height * width * channels,
            "line_bytes": width * channels,
            "near_lines": near_lines,
            "near_line_bytes": line,
            "copied_codes": copied,
            "left_codes": left_pixels * channels,
            "outside": edge.data_ptr(),
            "places": places.data_ptr(),
            "walk_places": walk_places.data_ptr(),
            "lines": kh,
            "line_step": dh * line,
            "runs": runs,
            "run_step": dw * pixel,
            "run_codes": run,
            "walk_lines": 1 if patches else kh,
            "walk_line_step": dh * line,
            "walk_runs": 1 if patches else runs,
            "walk_run_step": dw * pixel,
            "walk_steps": (row if patches else run) // step,
            "left_pairs": 0 if patches else (geo.padded - sizes.k) // 2 * 128**2,
            "pixels": pixels,
            "pixel_bytes": pixel_bytes,
            "pixel_mask": mask.data_ptr(),
            "pixel_step": patch_bytes if patches else pixel,
            "pixel_stride": sw,
            "pixel_line": sh * line // pixel,
            "taps": kw,
            "tap_step": dw,
            "tap_line_step": dh * line // pixel,
        }
        buffer = DIRECT.buffer(fields)
        return ConvCall(
            buffer, ctypes.addressof(buffer), (batch, sizes.out, ho, wo), threads * thread_bytes, threads, (edge, places, walk_places, mask)
        )

    def _with_patches(self, x: Tensor, window: Window, outside: int) -> ConvCall:
        sizes, element = self.sizes, self.dtype.itemsize
        batch, channels, height, width = x.shape
        ho, wo = window.out_size((height, width), sizes.kernel)
        m, pixel = batch * ho * wo, channels * element
        linear = self.linear.taking(m)
        geo = linear.geometry
        tap, stride = sizes.channels * element, sizes.padded * element
        whole_lines = window.dilation[1] == 1 and sizes.groups == 1 and tap == stride
        pieces, piece = (1, tap * sizes.kernel[1]) if whole_lines else (sizes.kernel[1], tap)
        most_copied = 4 * self.isa.lanes
        if x.dtype == torch.int8 and geo.blocks == 1 and linear.unit >= LEAST_UNIT and tap % linear.unit == 0:
            spec = GatherSpec(linear.unit, linear.isa.correction(sizes.format.bits, signed=True))
        else:
            spec = GatherSpec(0, 0, power_of_two(piece, most_copied), power_of_two(tap, most_copied))
        fields = linear.fields(m)
        tiles, rows = fields["tiles"] + fields["lesser_tiles"], fields["tile_rows"]
        chunks = -(-tiles // max(1, min(_CHUNK_BYTES, max(_LEAST_BYTES, _LEAST_ROWS * linear.row_bytes)) // (rows * linear.row_bytes)))
        chunk = -(-tiles // chunks)
        chunks = -(-tiles // chunk)
        most = max(1, min(runtime.threads(), m * sizes.out * sizes.k // WORK_A_THREAD))
        parts = max(1, min(geo.panels, -(-most * _ITEMS_A_THREAD // (chunks * sizes.groups)))) if most > 1 else 1
        group = -(-geo.panels // parts)
        parts = -(-geo.panels // group)
        items = sizes.groups * chunks * parts
        threads = min(most, items)
        tile_bytes = chunk * rows * linear.row_bytes + 63 & ~63
        thread_bytes = tile_bytes + (sizes.k * element + 191 & ~63)  # a unit is at most 128 bytes
        edge = torch.full((sizes.channels,), outside, dtype=self.dtype)
        out_bytes = linear.out_dtype.itemsize
        buffer = CONV.buffer(
            fields
            | {
                "first_phase": jit.load(spec.name, functools.partial(patches.build, spec), self.isa)[spec.name],
                "out_stride": sizes.out * out_bytes,
                "group": group,
                "thread_bytes": thread_bytes,
                "row_at": tile_bytes,
                "items": items,
                "parts": parts,
                "chunks": chunks,
                "chunk_tiles": chunk,
                "group_bytes": tap,
                "group_weights": geo.nbytes,
                "group_bias": 3 * fields["table_stride"] if linear.out_dtype == torch.int8 else 4 * geo.n,
                "group_out": geo.n * out_bytes,
                "height": height,
                "width": width,
                "out_height": ho,
                "out_width": wo,
                "stride_h": window.stride[0],
                "stride_w": window.stride[1],
                "top": window.padding[0],
                "left": window.padding[2],
                "dilation_h": window.dilation[0],
                "dilation_w": window.dilation[1],
                "kernel_h": sizes.kernel[0],
                "kernel_w": sizes.kernel[1],
                "image_bytes": height * width * pixel,
                "line_bytes": width * pixel,
                "pixel_bytes": pixel,
                "tap_bytes": tap,
                "tap_stride": stride,
                "outside": edge.data_ptr(),
                "pieces": pieces,
                "piece_bytes": piece,
                "piece_stride": piece if whole_lines else stride,
            }
        )
        return ConvCall(buffer, ctypes.addressof(buffer), (batch, sizes.out, ho, wo), threads * thread_bytes, threads, (edge,))


class ImageConvKernel:
    """The convolution of images that are quantized with one scale each: float -> codes -> float. `codes` is the one of their codes."""

    def __init__(self, codes: ConvKernel | MatrixConvKernel) -> None:
        self.codes = codes

    @property
    def form(self) -> str:
        """As that of the kernel of codes, and so is `weights_of`."""
        assert isinstance(self.codes, MatrixConvKernel)
        return self.codes.form

    def weights_of(self, codes: Codes) -> Tensor:
        assert isinstance(self.codes, MatrixConvKernel)
        return self.codes.weights_of(codes)

    def __call__(
        self, x: Tensor, window: Window, weights: Tensor, bias: Tensor | None, low: float, high: float, *, residual: Tensor | None = None
    ) -> Tensor:
        """x -> [B, Co, Ho, Wo] with channels_last strides and in x's dtype."""
        q, scales = quantize_images(x)
        return self.codes(q, window, weights, bias, low, high, residual=residual, scales=scales)


def quantize_images(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of images [B, C, H, W] with channels_last strides and the scale of each, float32 [B].

    scale = amax * (1/127), codes = round(fl(x * fl(127 / amax))) with the largest magnitude of the image. The scale of an image with a
    NaN or infinity is NaN.
    """
    if len(x) == 1:
        return _quantize_image(x)
    flat = x.permute(0, 2, 3, 1).flatten(1)
    largest = torch.maximum(flat.amax(1), -flat.amin(1)).float()  # many times as fast as a norm
    inverse = torch.full_like(largest, 127) / largest  # rounded once, as 127 / largest is not
    finite = largest < torch.inf  # not NaN either
    inverse = torch.where(finite & (inverse < torch.inf), inverse, 0)
    _, c, h, w = x.shape
    q = torch.mul(flat, inverse.unsqueeze(1)).round_().to(torch.int8).view(-1, h, w, c).permute(0, 3, 1, 2)
    return q, torch.where(finite, largest * torch.full_like(largest, 1 / 127), torch.nan)


def _quantize_image(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_images` of a single one, whose numbers are Python's: tensors of one element cost more than they hold."""
    low, high = torch.aminmax(x.permute(0, 2, 3, 1))  # as it lies in memory: 10 to 30 times as fast
    largest = max(float(high), -float(low))
    finite = largest < math.inf  # not NaN either
    inverse = 127 / largest if finite and largest else 0.0  # a quotient of float32, rounded to double, is rounded to float32 as if at once
    q = elementwise.combine(x, Combination(torch.int8, inverse if inverse < _OVERFLOWS else 0.0, low=-127, high=127))
    return q, torch.tensor([largest * _PART if finite else math.nan], dtype=torch.float32)
