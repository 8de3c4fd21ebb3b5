"""Convolutions on the CPU by the tiles of linear layers, for all weights and images; `dispatch/cpu_conv.py` takes them last.

    y[m, co] = sum over taps, ci of  w[co, tap, ci] * x[pixel under tap of output m, ci]

`ConvKernel` plans calls. Images of codes with one scale for all of a patch go to `direct_call.py`, which reads patches where they lie.
Others are gathered (`patches.py`): a thread copies the patches of some outputs, a chunk that stays in its caches, in the order that tiles
read, and multiplies them by some panels of weights. No im2col matrix exists, and the arithmetic is that of `linear/tile.py`.

`ImageConvKernel` quantizes images with one scale each (`activation="image"`) and convolves their codes in one native call.

Images and outputs are channels_last.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import pack_integer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.conv import direct_call, patches
from halfbyte.kernels.cpu.conv.amx import MatrixConvKernel
from halfbyte.kernels.cpu.conv.direct import DIRECT, power_of_two
from halfbyte.kernels.cpu.conv.patches import CONV, LEAST_UNIT, GatherSpec
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, parts_of
from halfbyte.kernels.cpu.conv.winograd.winograd_call import WinogradScalingKernel
from halfbyte.kernels.cpu.linear.linear import CALL, LinearKernel, pack_call
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.cpu.quantize import images
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.kernels.cpu.steps import phases_of
from halfbyte.kernels.problem import Activation, Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter

# Bytes of a chunk's patches: at most _CHUNK_BYTES, so that they stay in a core's caches; otherwise so many that a panel's weights are worth
# loading for them, those of _LEAST_ROWS patches and _LEAST_BYTES.
_LEAST_BYTES, _LEAST_ROWS = 1 << 15, 48
_CHUNK_BYTES = 1 << 18
_ITEMS_A_THREAD = 3
_PLAIN_ROWS_BYTES = 10 << 10  # of patches as plain rows (`patches.py`), which are to stay in the first-level cache
_MOST_UNIT_BYTES = 128  # that a row function reads at a time, beyond the end of a plain row, too
_ALIGNED = 64  # bytes
_NO_SCALES = torch.empty(0, dtype=torch.float32, device="cpu")  # for `PlannedConv.table`, which asks whether there are any


class ConvKernel(PlannedConv):
    """The compiled convolution of one weight, activation dtype and arithmetic, for images of any size.

    Conditions that the caller has checked: x is [B, C, H, W] with channels_last strides, not empty, in the dtype; `weights` are the
    packed matrices of all channel groups, one after the other, at a multiple of 64; a bias is contiguous float32 [Co] (for int8, the
    requantization tables of the groups).

    Attributes:
        linear: The product of patches [M, K] with the matrix of a channel group.
    """

    scales_at = DIRECT.offset("scales")

    def __init__(self, sizes: Filter, dtype: torch.dtype, inner: Inner, activation: Activation, *, out: torch.dtype | None = None) -> None:
        """Compile nothing yet.

        Args:
            sizes: Of the filter.
            dtype: Of images.
            inner: What products are made of.
            activation: How floating-point images are quantized for products in int8.
            out: For images of codes with one scale each: dtype of the result, of weights with one block along K. None: `dtype`.
        """
        super().__init__()
        self.sizes, self.isa = sizes, current()
        self.linear = LinearKernel(sizes.matrix_format, sizes.out // sizes.groups, sizes.k, dtype, inner, activation, zeroed=True)
        self.dtype, self.result = dtype, out or dtype
        halves = self.result == torch.float16 and not self.isa.half_conversions
        self.out_dtype = torch.float32 if halves else self.result
        self.no_bias = torch.zeros(sizes.out, dtype=torch.float32, device="cpu")

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        linear = self.linear.for_rows(math.prod(geo.outputs))
        on_matrix_unit = linear is not self.linear and linear.unit >= LEAST_UNIT  # with short units it is slower than dot products
        scales_codes = self.result != self.dtype
        if scales_codes or (self.dtype == torch.int8 and not on_matrix_unit and linear.geometry.blocks == 1):
            return direct_call.plan(self.linear, self.sizes, geo, threads, self.out_dtype, outside)
        return self._plan_patches(geo, linear, threads)

    def _plan_patches(self, geo: ConvGeometry, linear: LinearKernel, threads: int) -> Plan:
        """Return the plan of a convolution that gathers patches; `linear` multiplies them."""
        sizes, element, weight = self.sizes, self.dtype.itemsize, linear.geometry
        (height, width), m = geo.image, math.prod(geo.outputs)
        pixel_bytes, out_bytes = geo.channels * element, linear.out_dtype.itemsize

        # How a patch is copied: whole lines of the kernel where their taps are adjacent in the image and in the row, else tap by tap.
        tap_bytes, tap_stride = sizes.channels * element, sizes.padded * element
        copies_lines = geo.window.dilation[1] == 1 and sizes.groups == 1 and tap_bytes == tap_stride
        runs, run_bytes = (1, tap_bytes * sizes.kernel[1]) if copies_lines else (sizes.kernel[1], tap_bytes)
        if self.dtype == torch.int8 and weight.blocks == 1 and linear.unit >= LEAST_UNIT and tap_bytes % linear.unit == 0:
            spec = GatherSpec(linear.unit, linear.isa.correction(sizes.format.bits, signed=True))
        else:
            spec = GatherSpec(0, 0, *(power_of_two(size, 4 * self.isa.lanes) for size in (run_bytes, tap_bytes)))

        # How the work is cut: chunks of row tiles, times parts of the panels, of each channel group.
        fields = linear.fields(m)
        tiles, tile_rows = fields["tiles"] + fields["lesser_tiles"], fields["tile_rows"]
        wanted_bytes = min(_CHUNK_BYTES, max(_LEAST_BYTES, _LEAST_ROWS * linear.row_bytes))
        chunks = -(-tiles // max(1, wanted_bytes // (tile_rows * linear.row_bytes)))
        chunk_tiles = -(-tiles // chunks)
        chunks = -(-tiles // chunk_tiles)
        part_panels = -(-weight.panels // parts_of(weight.panels, threads, _ITEMS_A_THREAD, chunks * sizes.groups))
        parts = -(-weight.panels // part_panels)
        items = sizes.groups * chunks * parts

        # A thread's memory: a chunk's row tiles, then plain rows.
        tiles_bytes = round_up(chunk_tiles * tile_rows * linear.row_bytes, _ALIGNED)
        row_stride = round_up(sizes.k * element + _MOST_UNIT_BYTES, _ALIGNED)
        row_capacity = max(1, min(tile_rows, _PLAIN_ROWS_BYTES // row_stride))
        thread_bytes = tiles_bytes + row_capacity * row_stride
        fields |= {
            "out_stride": sizes.out * out_bytes,
            "part_panels": part_panels,
            "thread_bytes": thread_bytes,
            "rows_offset": tiles_bytes,
            "row_stride": row_stride,
            "row_capacity": row_capacity,
            "items": items,
            "parts": parts,
            "chunks": chunks,
            "chunk_tiles": chunk_tiles,
            "group_bytes": tap_bytes,
            "group_weights": weight.nbytes,
            "group_bias": 3 * fields["table_stride"] if linear.out_dtype == torch.int8 else 4 * weight.n,
            "group_out": weight.n * out_bytes,
            "image_bytes": height * width * pixel_bytes,
            "line_bytes": width * pixel_bytes,
            "pixel_bytes": pixel_bytes,
            "tap_bytes": tap_bytes,
            "tap_stride": tap_stride,
            "runs": runs,
            "run_bytes": run_bytes,
            "run_stride": run_bytes if copies_lines else tap_stride,
        }
        return Plan(CONV, compiled(patches.build, spec, self.isa), fields, items, sizes.channels, thread_bytes)


class ImageConvKernel:
    """The convolution of floating-point images that are quantized with one scale each, in one native call.

    Attributes:
        codes: The convolution of their codes, to floating point.
    """

    def __init__(self, codes: PlannedConv) -> None:
        self.codes = codes

    def __call__(
        self, x: Tensor, window: Window, weights: Tensor, bias: Tensor | None, low: float, high: float, *, residual: Tensor | None = None
    ) -> Tensor:
        """Return the convolution [B, Co, Ho, Wo] of x with channels_last strides, in x's dtype; the arguments are `PlannedConv`'s."""
        has_residual = residual is not None and self.codes.specializes_residual
        key = self.codes.number, x.dtype, x.shape, window.numbers, weights.shape, runtime.threads(), has_residual
        plan: _ImagePlan | None = PLANS.convolution.get(key)
        if plan is None:
            plan = PLANS.convolution[key] = _ImagePlan(self.codes, x, window, weights, has_residual=has_residual)
        return plan.run(x, weights, bias, low, high, residual)


class ImageRearrangedKernel(ImageConvKernel):
    """An `ImageConvKernel` whose kernel of codes has weights in a form of its own (`planned.RearrangedWeights`)."""

    def __init__(self, codes: MatrixConvKernel | WinogradScalingKernel) -> None:
        super().__init__(codes)
        self.form, self.weights_of = codes.form, codes.weights_of


class _ImagePlan:
    """The quantization of images of one size and the convolution of their codes, as one native call."""

    def __init__(self, kernel: PlannedConv, x: Tensor, window: Window, weights: Tensor, *, has_residual: bool) -> None:
        codes = torch.empty(x.shape, dtype=torch.int8, device="meta")
        self._kernel, conv = kernel, kernel.prepare(codes, window, 0, weights, has_residual=has_residual)
        quantize = images.prepare(len(x), x[0].numel(), x.dtype)
        threads, (_, channels, height, width) = max(conv.threads, quantize.threads), conv.out_shape
        self._shape, self._strides = conv.out_shape, (height * width * channels, 1, width * channels, channels)
        # Scratch memory of a call: codes, scales, and that of the convolution for all threads.
        sizes = x.numel(), 4 * len(x), threads * (conv.scratch_bytes // conv.threads)
        self._codes_at, self._scales_at, self._scratch_at, self._bytes = accumulate((round_up(n, _ALIGNED) for n in sizes), initial=0)
        self._quantizing, self._convolving = phases_of(quantize.buffer), phases_of(conv.buffer)
        self._sequence = StepSequence([*self._quantizing, *self._convolving], threads)
        self._alive = conv, quantize  # the arguments point to their tensors

    def run(self, x: Tensor, weights: Tensor, bias: Tensor | None, low: float, high: float, residual: Tensor | None) -> Tensor:
        """Compute y in x's dtype. The arguments are those of `ImageConvKernel`."""
        kernel = self._kernel
        out = torch.empty_strided(self._shape, self._strides, dtype=kernel.out_dtype, device="cpu")
        _memory, start = PLANS.memory(self._bytes)
        codes, scales = start + self._codes_at, start + self._scales_at
        for block in self._quantizing:
            images.pack_tensors(block, images.TENSORS, x.data_ptr(), codes, scales)
        residual_offset = 0
        if residual is not None:
            residual = residual.to(kernel.out_dtype)
            residual_offset = residual.data_ptr() - out.data_ptr()
        table = kernel.table(bias, _NO_SCALES)
        addresses = weights.data_ptr(), 0 if table is None else table.data_ptr(), out.data_ptr(), residual_offset
        for block in self._convolving:
            pack_call(block, CALL, 0, codes, 0, start + self._scratch_at, *addresses, low, high)
            pack_integer(block, kernel.scales_at, scales)
        self._sequence.run()
        return out if out.dtype == kernel.result else out.to(kernel.result)
