"""Convolution on the CPU: patches of the image are gathered where the linear tiles read them, a cacheful at a time.

    y[m, co] = sum over taps, ci of  w[co, tap, ci] * x[pixel under tap of output m, ci]

The image and the output have their channels together (channels_last). No im2col matrix exists, and the arithmetic is that of
`linear/tile.py`. Here calls are planned; the code that gathers is made in `patches.py`. Codes with one scale for all of a patch need no
patches: `direct.py`.
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

# Patches that are gathered at a time: so few that they stay near, so many that a panel's weights are worth loading for them.
_LEAST_BYTES, _LEAST_ROWS = 1 << 15, 48
_CHUNK_BYTES = 1 << 18
_ITEMS_A_THREAD = 3
_ROWS_BYTES = 10 << 10  # of patches as rows, which are to stay in the first-level cache
_ALIGNED = 64  # bytes
_NO_SCALES = torch.empty(0, dtype=torch.float32, device="cpu")  # for `PlannedConv.table`, which asks whether there are any


class ConvKernel(PlannedConv):
    """The compiled convolution of one weight, activation dtype and arithmetic, for images of any size.

    Conditions that the caller has checked: x is [B, C, H, W] with channels_last strides, not empty, in the dtype; `weights` are the
    packed matrices of all groups, one after the other, at a multiple of 64; a bias is contiguous float32 [Co] (for int8, the tables
    of the groups).

    out   for codes alone: what the result is made of, if it is not codes; one block along K
    """

    scales_at = DIRECT.offset("scales")

    def __init__(self, sizes: Filter, dtype: torch.dtype, inner: Inner, activation: Activation, *, out: torch.dtype | None = None) -> None:
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
        if self.result != self.dtype or (self.dtype == torch.int8 and not on_matrix_unit and linear.geometry.blocks == 1):
            return direct_call.plan(self.linear, self.sizes, geo, threads, self.out_dtype, outside)
        return self._with_patches(geo, linear, threads)

    def _with_patches(self, geo: ConvGeometry, linear: LinearKernel, threads: int) -> Plan:
        sizes, element, weight = self.sizes, self.dtype.itemsize, linear.geometry
        (height, width), m = geo.image, math.prod(geo.outputs)
        pixel = geo.channels * element
        tap, stride = sizes.channels * element, sizes.padded * element
        whole_lines = geo.window.dilation[1] == 1 and sizes.groups == 1 and tap == stride
        runs, run = (1, tap * sizes.kernel[1]) if whole_lines else (sizes.kernel[1], tap)
        most_copied = 4 * self.isa.lanes
        if self.dtype == torch.int8 and weight.blocks == 1 and linear.unit >= LEAST_UNIT and tap % linear.unit == 0:
            spec = GatherSpec(linear.unit, linear.isa.correction(sizes.format.bits, signed=True))
        else:
            spec = GatherSpec(0, 0, power_of_two(run, most_copied), power_of_two(tap, most_copied))
        fields = linear.fields(m)
        tiles, rows = fields["tiles"] + fields["lesser_tiles"], fields["tile_rows"]
        chunks = -(-tiles // max(1, min(_CHUNK_BYTES, max(_LEAST_BYTES, _LEAST_ROWS * linear.row_bytes)) // (rows * linear.row_bytes)))
        chunk = -(-tiles // chunks)
        chunks = -(-tiles // chunk)
        part_panels = -(-weight.panels // parts_of(weight.panels, threads, _ITEMS_A_THREAD, chunks * sizes.groups))
        parts = -(-weight.panels // part_panels)
        items = sizes.groups * chunks * parts
        tile_bytes = chunk * rows * linear.row_bytes + 63 & ~63
        row_stride = sizes.k * element + 191 & ~63  # a unit is at most 128 bytes
        row_capacity = max(1, min(rows, _ROWS_BYTES // row_stride))
        thread_bytes = tile_bytes + row_capacity * row_stride
        out_bytes = linear.out_dtype.itemsize
        fields |= {
            "out_stride": sizes.out * out_bytes,
            "part_panels": part_panels,
            "thread_bytes": thread_bytes,
            "rows_offset": tile_bytes,
            "row_stride": row_stride,
            "row_capacity": row_capacity,
            "items": items,
            "parts": parts,
            "chunks": chunks,
            "chunk_tiles": chunk,
            "group_bytes": tap,
            "group_weights": weight.nbytes,
            "group_bias": 3 * fields["table_stride"] if linear.out_dtype == torch.int8 else 4 * weight.n,
            "group_out": weight.n * out_bytes,
            "image_bytes": height * width * pixel,
            "line_bytes": width * pixel,
            "pixel_bytes": pixel,
            "tap_bytes": tap,
            "tap_stride": stride,
            "runs": runs,
            "run_bytes": run,
            "run_stride": run if whole_lines else stride,
        }
        return Plan(CONV, compiled(patches.build, spec, self.isa), fields, items, sizes.channels, thread_bytes)


class ImageConvKernel:
    """The convolution of images that are quantized with one scale each: float -> codes -> float. `codes` is the one of their codes."""

    def __init__(self, codes: PlannedConv) -> None:
        self.codes = codes

    def __call__(
        self, x: Tensor, window: Window, weights: Tensor, bias: Tensor | None, low: float, high: float, *, residual: Tensor | None = None
    ) -> Tensor:
        """x -> [B, Co, Ho, Wo] with channels_last strides and in x's dtype."""
        has_residual = residual is not None and self.codes.specializes_residual
        key = self.codes.number, x.dtype, x.shape, window.numbers, weights.shape, runtime.threads(), has_residual
        plan: _ImagePlan | None = PLANS.convolution.get(key)
        if plan is None:
            plan = PLANS.convolution[key] = _ImagePlan(self.codes, x, window, weights, has_residual=has_residual)
        return plan.run(x, weights, bias, low, high, residual)


class ImageRearrangedKernel(ImageConvKernel):
    """The same where the kernel of their codes has weights in a form of its own."""

    def __init__(self, codes: MatrixConvKernel | WinogradScalingKernel) -> None:
        super().__init__(codes)
        self.form, self.weights_of = codes.form, codes.weights_of


class _ImagePlan:
    """The quantization of images of one size and the convolution of their codes, as one native call."""

    def __init__(self, kernel: PlannedConv, x: Tensor, window: Window, weights: Tensor, *, has_residual: bool) -> None:
        like = torch.empty(x.shape, dtype=torch.int8, device="meta")
        self._kernel, conv = kernel, kernel.prepare(like, window, 0, weights, has_residual=has_residual)
        quantize = images.prepare(len(x), x[0].numel(), x.dtype)
        threads, (_, channels, height, width) = max(conv.threads, quantize.threads), conv.out_shape
        self._shape, self._strides = conv.out_shape, (height * width * channels, 1, width * channels, channels)
        sizes = x.numel(), 4 * len(x), threads * (conv.scratch_bytes // conv.threads)
        self._codes, self._scales, self._scratch, self._bytes = accumulate((round_up(size, _ALIGNED) for size in sizes), initial=0)
        self._quantizing, self._convolving = phases_of(quantize.buffer), phases_of(conv.buffer)
        self._sequence = StepSequence([*self._quantizing, *self._convolving], threads)
        self._alive = conv, quantize

    def run(self, x: Tensor, weights: Tensor, bias: Tensor | None, low: float, high: float, residual: Tensor | None) -> Tensor:
        """Compute y in x's dtype. The arguments are those of `ImageConvKernel`."""
        kernel = self._kernel
        out = torch.empty_strided(self._shape, self._strides, dtype=kernel.out_dtype, device="cpu")
        _memory, start = PLANS.memory(self._bytes)
        codes, scales = start + self._codes, start + self._scales
        for block in self._quantizing:
            images.pack_tensors(block, images.TENSORS, x.data_ptr(), codes, scales)
        to_residual = 0
        if residual is not None:
            residual = residual.to(kernel.out_dtype)
            to_residual = residual.data_ptr() - out.data_ptr()
        table = kernel.table(bias, _NO_SCALES)
        addresses = weights.data_ptr(), 0 if table is None else table.data_ptr(), out.data_ptr(), to_residual
        for block in self._convolving:
            pack_call(block, CALL, 0, codes, 0, start + self._scratch, *addresses, low, high)
            pack_integer(block, kernel.scales_at, scales)
        self._sequence.run()
        return out if out.dtype == kernel.result else out.to(kernel.result)
