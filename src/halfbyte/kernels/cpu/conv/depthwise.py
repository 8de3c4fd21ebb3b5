"""Depthwise convolution on the CPU: each channel by itself, a vector of channels in the lanes.

    y[m, c] = sum over taps of  w[tap, c] * x[pixel under tap of output m, c]

Threads draw lines of the output. A few adjacent outputs are computed together: they share each load of a weight and, where the kernel and
its stride are small, each load of a pixel. Weights are dequantized once, when the kernel's form of them is computed (`layouts.convolution.
taps`). Images and outputs are channels_last; padding is 0, or the code that means 0.

Arithmetic. float: weights and activations as float32, one fused multiply-add a tap. int8: exact sums of products of codes, in int32 where
an instruction does so, else as float32, which holds them up to MOST_TAPS; then
`clamp(round(fma(float(start + sum), multiplier, offset)))` as in `tile.RequantizingTile`.
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
    *("channels", "lines", "height", "width", "out_height", "out_width", "stride_h", "stride_w", "top", "left"),
    *("dilation_h", "dilation_w", "kernel_h", "kernel_w", "outside", "first_inside", "stop_inside"),
)
_TOGETHER = 8  # neighbouring outputs that share a weight, at most; with many registers _MORE_TOGETHER
_MORE_TOGETHER = 14
_MANY_REGISTERS = 16  # lanes: AVX-512 has 32 registers
_SHARED_STRIDE = 2  # up to which neighbours share pixels that are loaded once
_WIDEST = 7  # kernel whose line is written out
MOST_TAPS = 1024  # 2^10 * 2^7 * 2^7 = 2^24: so many products of codes have a sum that float32 holds
_TAPS_AND_START = 512  # so many products of codes and the start, which is a sum of as many products


@dataclass(frozen=True, slots=True)
class DepthwiseSpec:
    """What the kernel is compiled for.

    Attributes:
        kind: Element type of the image: "f32", "bf16", "f16" or "i8".
        lanes: Channels of a vector.
        together: Adjacent outputs of a line that are computed together.
        width: Of the kernel; 0: any.
        stride: Horizontal stride, where outputs share the pixels that they load; 0: any, and each output loads its own.
        started: Sums of codes begin at the third row of the table; else that is added at the end.
    """

    kind: Kind
    lanes: int
    together: int
    width: int
    stride: int
    started: bool


@phase
def build(spec: DepthwiseSpec, isa: ISA, f: Function) -> None:
    _Lines(spec, isa, f).emit()


class _Lines(Emitter):
    block = DEPTHWISE
    spec: DepthwiseSpec

    def __init__(self, spec: DepthwiseSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.integer = spec.kind == "i8"
        self.element = element_of(spec.kind).size
        self.floats, self.ints = vector("float", spec.lanes), vector("i32", spec.lanes)
        self.whole = self.integer and isa.sums_shorts and spec.lanes == isa.lanes
        self.sums = self.ints if self.whole else self.floats

    def emit(self) -> None:
        f, spec, counter = self.f, self.spec, self.args + DEPTHWISE.offset("counter")
        channels, width = self.get("channels"), self.get("out_width")
        first, stop = self.get("first_inside"), self.get("stop_inside")  # outputs whose taps lie inside, left and right
        for line in f.draw_items(counter, self.get("lines")):
            y, b = line % self.get("out_height"), line // self.get("out_height")
            image = self.pointer("x") + b * self.get("height") * self.get("width") * channels * self.element
            top = y * self.get("stride_h") - self.get("top")
            for start in f.loop(channels, step=spec.lanes):
                c = f.umin(start, channels - spec.lanes)  # the last vector may overlap the one before
                out = line * width * channels + c
                for x in f.loop(width, step=spec.together):
                    x = f.umin(x, width - spec.together)  # the last ones may overlap those before
                    inside = (x >= first) & (stop - spec.together >= x)
                    with f.when(inside):
                        self._outputs(image, top, x, c, out, inside=True)
                    with f.when(inside.equals(0)):
                        self._outputs(image, top, x, c, out, inside=False)

    def _outputs(self, image: Value, top: Value, first: Value, c: Value, at: Value, *, inside: bool) -> None:
        """Compute adjacent outputs of a line.

        Args:
            image: Address of the image.
            top: Line of the image under the kernel's first line; it may lie outside.
            first: Column of the first output.
            c: First channel of the vector.
            at: Index of the first output's element in `out`.
            inside: No tap lies left or right of the image.
        """
        f, spec = self.f, self.spec
        begin = f.value(self.sums, 0)
        if spec.started:
            begin = (self.pointer("bias") + (self.get("channels") * 8 + c * 4)).load(self.ints, 0, 4)
            begin = begin if self.whole else begin.to("float")
        sums = [f.variable(begin) for _ in range(spec.together)]
        left = first * self.get("stride_w") - self.get("left")
        channels = self.get("channels")
        weight = f.variable(self.pointer("weights") + c * 4)
        for kh in f.loop(self.get("kernel_h")):
            iy = top + kh * self.get("dilation_h")
            there = iy.below(self.get("height"))
            # Above and below of the image each pixel is the same one.
            step = there.select(channels * self.element, 0)
            line = there.select(image + iy * self.get("width") * channels * self.element, self.pointer("outside")) + c * self.element
            start = line + left * step

            def pixel(x: Value | int, start: Value = start, step: Value = step) -> Value:
                """Address of the pixel `x` columns to the right of the first."""
                source = start + step * x
                if inside:
                    return source
                return (left + x).below(self.get("width")).select(source, self.pointer("outside") + c * self.element)

            if spec.stride:
                self._shared_taps(pixel, weight.value, sums)
                weight.value = weight.value + channels * (4 * spec.width)
            else:
                for kw in range(spec.width) if spec.width else f.loop(self.get("kernel_w")):
                    w = self._weight(weight.value)
                    for i, total in enumerate(sums):
                        x = self.get("dilation_w") * kw + self.get("stride_w") * i
                        total.value = self._product(w, self._load(pixel(x)), total.value)
                    weight.value = weight.value + channels * 4
        for i, total in enumerate(sums):
            self._write(total.value, c, at + (first + i) * channels)

    def _shared_taps(self, pixel: Callable[[int], Value], weights: Value, sums: list[Variable]) -> None:
        """A line of the kernel: each pixel is loaded once, for all outputs that it has a part in."""
        spec, pixel_stride = self.spec, self.get("channels") * 4
        taps = [self._weight(weights + pixel_stride * kw) for kw in range(spec.width)]
        for x in range((spec.together - 1) * spec.stride + spec.width):
            uses = [(i, x - i * spec.stride) for i in range(spec.together) if 0 <= x - i * spec.stride < spec.width]
            value = self._load(pixel(x)) if uses else None
            for i, kw in uses:
                assert value is not None
                sums[i].value = self._product(taps[kw], value, sums[i].value)

    def _weight(self, weights: Value) -> Value:
        if not self.integer:
            return weights.load(self.floats, 0, 4)
        codes = weights.load(self.ints, 0, 4)
        return codes & 0xFFFF if self.whole else codes.to("float")  # the upper half multiplies that of a pixel's code: its sign

    def _product(self, weight: Value, x: Value, total: Value) -> Value:
        return self.isa.dot_shorts(self.f, total, weight, x) if self.whole else self.f.fma(weight, x, total)

    def _load(self, x: Value) -> Value:
        lanes = self.spec.lanes
        if self.integer:
            codes = x.load(vector("i8", lanes)).to("i32")
            return codes if self.whole else codes.to("float")
        return self.isa.to_float(x.load(vector(element_of(self.spec.kind).stored, lanes), 0, self.element), self.spec.kind)

    def _write(self, total: Value, c: Value, at: Value) -> None:
        f, lanes = self.f, self.spec.lanes
        low, high = (bound.splat(lanes) for bound in DEPTHWISE.load_floats(self.args, "clamp"))
        out, bias = self.pointer("out") + at * self.element, self.pointer("bias") + c * 4
        if self.integer:
            row = self.get("channels") * 4
            offset, multiplier = bias.load(self.floats, 0, 4), (bias + row).load(self.floats, 0, 4)
            if not self.spec.started:
                total = total.to("i32") + (bias + row * 2).load(self.ints, 0, 4)
            value = f.fma(total.to("float"), multiplier, offset).max_keeping_nan(low).min_keeping_nan(high)
            out.store(rounded_codes(value), 0, 1)
            return
        result = f.variable(total + bias.load(self.floats, 0, 4))
        residual = self.get("residual")
        with f.when(residual.differs(0)):
            result.value = result.value + self._load(out + residual)
        value = result.value.max_keeping_nan(low).min_keeping_nan(high)
        out.store(self.isa.from_float(value, self.spec.kind), 0, self.element)


class DepthwiseKernel(PlannedConv):
    """The compiled depthwise convolution of one weight and activation dtype, for images of any size.

    Conditions that the caller has checked: x is [B, C, H, W] with channels_last strides, not empty, in the dtype; `weights` is what
    `layouts.convolution.taps` returned; a bias is contiguous float32 [C] (for int8 a table [3, C], as `tile.RequantizingTile` has it).
    """

    cost = 8

    def __init__(self, sizes: Filter, dtype: torch.dtype) -> None:
        if dtype == torch.int8 and sizes.taps > MOST_TAPS:
            raise UnsupportedError(f"a depthwise kernel of int8 has at most {MOST_TAPS} taps, got {sizes.kernel[0]} x {sizes.kernel[1]}")
        super().__init__()
        self.sizes, self.isa, self.result = sizes, current(), dtype
        self.dtype = self.out_dtype = torch.float32 if dtype == torch.float16 and not self.isa.half_conversions else dtype
        self.no_bias = torch.zeros(sizes.out, dtype=torch.float32, device="cpu")

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        lanes = self.isa.lanes if geo.channels >= self.isa.lanes else 1
        kw, stride, left, dilation = geo.kernel[1], geo.window.stride[1], geo.window.padding[2], geo.window.dilation[1]
        width, wo = geo.image[1], geo.out[1]
        most = _MORE_TOGETHER if self.isa.lanes >= _MANY_REGISTERS else _TOGETHER
        shares = kw <= _WIDEST and stride <= _SHARED_STRIDE and dilation == 1
        spec = DepthwiseSpec(
            kind_of(self.dtype),
            lanes,
            together=-(-wo // -(-wo // most)),
            width=kw if kw <= _WIDEST else 0,
            stride=stride if shares else 0,
            started=self.dtype == torch.int8 and self.sizes.taps <= _TAPS_AND_START,
        )
        lines = geo.batch * geo.out[0]
        first_inside, stop_inside = -(-left // stride), max(0, (width - 1 - (kw - 1) * dilation + left) // stride + 1)
        fields = {"lines": lines, "first_inside": first_inside, "stop_inside": stop_inside}
        return Plan(DEPTHWISE, compiled(build, spec, self.isa), fields, items=lines, edge=geo.channels)
