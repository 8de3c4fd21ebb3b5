"""Depthwise convolution on the CPU: each channel by itself, a vector of channels in the lanes.

    y[b, oy, ox, c] = sum over kh, kw of  w[kh, kw, c] * x[b, iy, ix, c]
    iy = oy * stride_h - top + kh * dilation_h,    ix = ox * stride_w - left + kw * dilation_w

Images and outputs are channels_last; outside of an image lies 0, or the code that means 0. Weights are [Kh * Kw, C], float32, or for images
of int8 codes as int32 (`layouts.convolution.taps`). For these the argument `bias` is the requantization table [3, C]: offsets,
multipliers and initial sums, as `tile.RequantizingTile` has it.

Threads draw lines of the output. Some adjacent outputs of a line are computed together, for a vector of channels: they share each load of a
weight and, where the filter and its stride are small, each load of a pixel.

Arithmetic. float: weights and activations as float32, one fused multiply-add a tap. int8: exact sums of products of codes, in int32 where
the CPU has a dot product of int16, else as float32, which holds those of up to MOST_TAPS taps; then
`clamp(round(fma(float(initial sum + sum), multiplier, offset)))`.

`dispatch/cpu_conv.py` takes `DepthwiseKernel` for all depthwise convolutions but those of `depthwise_dot.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import UnsupportedError
from halfbyte.kernels.cpu.codegen.arguments import OPERANDS
from halfbyte.kernels.cpu.codegen.elementary import rounded_codes
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, compiled, phase
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv
from halfbyte.layouts.convolution import Filter

DEPTHWISE = OPERANDS.extended(
    # lines: of all outputs, B * Ho; the other sizes in pixels, `top` and `left` of the padding
    *("channels", "lines", "height", "width", "out_height", "out_width", "stride_h", "stride_w", "top", "left"),
    *("dilation_h", "dilation_w", "kernel_h", "kernel_w"),
    "outside",  # address of a pixel of padding
    *(
        "first_inside",
        "stop_inside",
    ),  # outputs of a line, first_inside … stop_inside - 1, whose taps lie neither left nor right of the image
)
_MOST_OUTPUTS = 8  # adjacent outputs that are computed together; the next line for ISAs with 32 registers
_MOST_OUTPUTS_OF_32_REGISTERS = 14
_LANES_OF_32_REGISTERS = 16  # AVX-512
_MOST_SHARED_STRIDE = 2  # horizontal strides up to which adjacent outputs share loads of pixels
_MOST_UNROLLED_WIDTH = 7  # of a filter
MOST_TAPS = 1024  # 2^10 * 2^7 * 2^7 = 2^24: sums of so many products of codes are exact in float32
_MOST_TAPS_WITH_INITIAL_SUM = 512  # those of so many products and an initial sum, which is the sum of as many products


@dataclass(frozen=True, slots=True)
class DepthwiseSpec:
    """What the code is compiled for.

    Attributes:
        kind: Element type of the image: "f32", "bf16", "f16" or "i8".
        lanes: Channels of a vector.
        outputs: Adjacent outputs of a line that are computed together.
        kernel_width: Columns of the filter, if its lines are unrolled; 0: any number.
        shared_stride: Horizontal stride, if outputs share the pixels that they load; 0: any, and each output loads its own.
        starts_with_initial_sum: For codes: sums begin at the initial sum; otherwise that is added to them at the end.
    """

    kind: Kind
    lanes: int
    outputs: int
    kernel_width: int
    shared_stride: int
    starts_with_initial_sum: bool


@phase
def build(spec: DepthwiseSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a DEPTHWISE block, its thread and the number of threads."""
    _Depthwise(spec, isa, f).emit()


class _Depthwise(Emitter):
    """Emits the kernel.

    Attributes:
        of_codes: Whether images are int8.
        element_bytes: Size of an element of the image and of the output.
        floats, ints: Types of a vector of channels.
        sums_integers: Whether products of codes are summed in int32, by the dot product of int16.
        sum_type: Type of the sums: `ints` or `floats`.
    """

    block = DEPTHWISE
    spec: DepthwiseSpec

    def __init__(self, spec: DepthwiseSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.of_codes = spec.kind == "i8"
        self.element_bytes = element_of(spec.kind).size
        self.floats, self.ints = vector("float", spec.lanes), vector("i32", spec.lanes)
        self.sums_integers = self.of_codes and isa.sums_shorts and spec.lanes == isa.lanes
        self.sum_type = self.ints if self.sums_integers else self.floats

    def emit(self) -> None:
        f, spec, counter = self.f, self.spec, self.args + DEPTHWISE.offset("counter")
        channels, out_width = self.get("channels"), self.get("out_width")
        first_inside, stop_inside = self.get("first_inside"), self.get("stop_inside")
        for line in f.draw_items(counter, self.get("lines")):
            oy, b = line % self.get("out_height"), line // self.get("out_height")
            image = self.pointer("x") + b * self.get("height") * self.get("width") * channels * self.element_bytes
            y = oy * self.get("stride_h") - self.get("top")
            for first_channel in f.loop(channels, step=spec.lanes):
                c = f.umin(first_channel, channels - spec.lanes)  # the last vector may overlap the one before
                out = line * out_width * channels + c
                for first_output in f.loop(out_width, step=spec.outputs):
                    ox = f.umin(first_output, out_width - spec.outputs)  # the last ones may overlap those before
                    are_inside = (ox >= first_inside) & (stop_inside - spec.outputs >= ox)
                    with f.when(are_inside):
                        self._compute(image, y, ox, c, out, are_inside=True)
                    with f.when(are_inside.equals(0)):
                        self._compute(image, y, ox, c, out, are_inside=False)

    def _compute(self, image: Value, y: Value, ox: Value, c: Value, out_line: Value, *, are_inside: bool) -> None:
        """Compute adjacent outputs of a line for a vector of channels.

        Args:
            image: Address of the image.
            y: Line of the image under the filter's first line; it may lie outside.
            ox: Column of the first output.
            c: First channel of the vector.
            out_line: Index in `out` of the vector's element in the line's first output.
            are_inside: Whether no tap of these outputs lies left or right of the image.
        """
        f, spec = self.f, self.spec
        initial = f.value(self.sum_type, 0)
        if spec.starts_with_initial_sum:
            initial = (self.pointer("bias") + (self.get("channels") * 8 + c * 4)).load(self.ints, 0, 4)  # row 2 of the table
            initial = initial if self.sums_integers else initial.to("float")
        sums = [f.variable(initial) for _ in range(spec.outputs)]
        x = ox * self.get("stride_w") - self.get("left")
        channels = self.get("channels")
        weights = f.variable(self.pointer("weights") + c * 4)
        for kh in f.loop(self.get("kernel_h")):
            iy = y + kh * self.get("dilation_h")
            is_in_image = iy.below(self.get("height"))  # unsigned: negative lines are not
            # A line above or below of the image is one of which all pixels are at one address.
            pixel_step = is_in_image.select(channels * self.element_bytes, 0)
            line = image + iy * self.get("width") * channels * self.element_bytes
            line = is_in_image.select(line, self.pointer("outside")) + c * self.element_bytes
            first_pixel = line + x * pixel_step

            def pixel(column: Value | int, first_pixel: Value = first_pixel, pixel_step: Value = pixel_step) -> Value:
                """Return the address of the pixel so many columns to the right of the first output's first one."""
                address = first_pixel + pixel_step * column
                if are_inside:
                    return address
                return (x + column).below(self.get("width")).select(address, self.pointer("outside") + c * self.element_bytes)

            if spec.shared_stride:
                self._add_shared_line(pixel, weights.value, sums)
                weights.value = weights.value + channels * (4 * spec.kernel_width)
            else:
                for kw in range(spec.kernel_width) if spec.kernel_width else f.loop(self.get("kernel_w")):
                    weight = self._weight(weights.value)
                    for i, total in enumerate(sums):
                        column = self.get("dilation_w") * kw + self.get("stride_w") * i
                        total.value = self._add_product(weight, self._pixel(pixel(column)), total.value)
                    weights.value = weights.value + channels * 4
        for i, total in enumerate(sums):
            self._write(total.value, c, out_line + (ox + i) * channels)

    def _add_shared_line(self, pixel: Callable[[int], Value], weights: Value, sums: list[Variable]) -> None:
        """Add the products of a line of the filter to the sums; each pixel is loaded once, for all outputs that it belongs to.

        Args:
            pixel: Returns the address of a pixel, by its column from the first output's first one.
            weights: Address of the line's weights.
            sums: Those of the outputs.
        """
        spec, tap_bytes = self.spec, self.get("channels") * 4
        taps = [self._weight(weights + tap_bytes * kw) for kw in range(spec.kernel_width)]
        for column in range((spec.outputs - 1) * spec.shared_stride + spec.kernel_width):
            taps_of_outputs = ((i, column - i * spec.shared_stride) for i in range(spec.outputs))
            uses = [(i, kw) for i, kw in taps_of_outputs if 0 <= kw < spec.kernel_width]
            if not uses:  # a stride larger than the filter leaves pixels out
                continue
            value = self._pixel(pixel(column))
            for i, kw in uses:
                sums[i].value = self._add_product(taps[kw], value, sums[i].value)

    def _weight(self, address: Value) -> Value:
        """Load a vector of weights."""
        if not self.of_codes:
            return address.load(self.floats, 0, 4)
        codes = address.load(self.ints, 0, 4)
        # The lower half is the code as int16. The upper half would multiply the upper half of the pixel's code, its sign, and becomes 0.
        return codes & 0xFFFF if self.sums_integers else codes.to("float")

    def _pixel(self, address: Value) -> Value:
        """Load a vector of a pixel, or of the residual, in the type that is multiplied or added."""
        lanes = self.spec.lanes
        if self.of_codes:
            codes = address.load(vector("i8", lanes)).to("i32")
            return codes if self.sums_integers else codes.to("float")
        stored = address.load(vector(element_of(self.spec.kind).stored, lanes), 0, self.element_bytes)
        return self.isa.to_float(stored, self.spec.kind)

    def _add_product(self, weight: Value, x: Value, total: Value) -> Value:
        return self.isa.dot_shorts(self.f, total, weight, x) if self.sums_integers else self.f.fma(weight, x, total)

    def _write(self, total: Value, c: Value, index: Value) -> None:
        """Write a vector of an output.

        Args:
            total: The sums of its products.
            c: Its first channel.
            index: Index of its first element in `out`.
        """
        f, lanes = self.f, self.spec.lanes
        low, high = (bound.splat(lanes) for bound in DEPTHWISE.load_floats(self.args, "clamp"))
        out, bias = self.pointer("out") + index * self.element_bytes, self.pointer("bias") + c * 4
        if self.of_codes:
            row_bytes = self.get("channels") * 4
            offset, multiplier = bias.load(self.floats, 0, 4), (bias + row_bytes).load(self.floats, 0, 4)
            if not self.spec.starts_with_initial_sum:
                total = total.to("i32") + (bias + row_bytes * 2).load(self.ints, 0, 4)
            value = f.fma(total.to("float"), multiplier, offset).max_keeping_nan(low).min_keeping_nan(high)
            out.store(rounded_codes(value), 0, 1)
            return
        result = f.variable(total + bias.load(self.floats, 0, 4))
        residual = self.get("residual")
        with f.when(residual.differs(0)):
            result.value = result.value + self._pixel(out + residual)
        value = result.value.max_keeping_nan(low).min_keeping_nan(high)
        out.store(self.isa.from_float(value, self.spec.kind), 0, self.element_bytes)


class DepthwiseKernel(PlannedConv):
    """The compiled depthwise convolution of one weight and activation dtype, for images of any size.

    Conditions that the caller has checked: x is [B, C, H, W] with channels_last strides, not empty, in the dtype; `weights` is what
    `layouts.convolution.taps` returned; a bias is contiguous float32 [C] (for int8 the requantization table [3, C]).
    """

    cost = 8

    def __init__(self, sizes: Filter, dtype: torch.dtype) -> None:
        if dtype == torch.int8 and sizes.taps > MOST_TAPS:
            kernel = f"{sizes.kernel[0]} x {sizes.kernel[1]}"
            raise UnsupportedError(f"a depthwise kernel of int8 has at most {MOST_TAPS} taps, got {kernel}: convolve floats instead")
        super().__init__()
        self.sizes, self.isa, self.result = sizes, current(), dtype
        self.dtype = self.out_dtype = torch.float32 if dtype == torch.float16 and not self.isa.half_conversions else dtype
        self.no_bias = torch.zeros(sizes.out, dtype=torch.float32, device="cpu")

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        kernel_width, stride, dilation, left = geo.kernel[1], geo.window.stride[1], geo.window.dilation[1], geo.window.padding[2]
        width, out_width, lines = geo.image[1], geo.out[1], geo.batch * geo.out[0]
        most_outputs = _MOST_OUTPUTS_OF_32_REGISTERS if self.isa.lanes >= _LANES_OF_32_REGISTERS else _MOST_OUTPUTS
        shares_pixels = kernel_width <= _MOST_UNROLLED_WIDTH and stride <= _MOST_SHARED_STRIDE and dilation == 1
        spec = DepthwiseSpec(
            kind_of(self.dtype),
            lanes=self.isa.lanes if geo.channels >= self.isa.lanes else 1,
            outputs=-(-out_width // -(-out_width // most_outputs)),  # in as few groups, of equal sizes
            kernel_width=kernel_width if kernel_width <= _MOST_UNROLLED_WIDTH else 0,
            shared_stride=stride if shares_pixels else 0,
            starts_with_initial_sum=self.dtype == torch.int8 and self.sizes.taps <= _MOST_TAPS_WITH_INITIAL_SUM,
        )
        last_inside = (width - 1 - (kernel_width - 1) * dilation + left) // stride  # negative where the filter is wider than the image
        fields = {"lines": lines, "first_inside": -(-left // stride), "stop_inside": max(0, last_inside + 1)}
        return Plan(DEPTHWISE, compiled(build, spec, self.isa), fields, items=lines, edge=geo.channels)
