"""Depthwise convolution on the CPU: each channel by itself, a vector of channels in the lanes.

    y[m, c] = sum over taps of  w[tap, c] * x[pixel under tap of output m, c]

Threads draw lines of the output; a few neighbouring outputs share each load of a weight. Weights are made numbers beforehand:
there are as many as taps, once a channel, and each is used for every pixel. Images and outputs are channels_last; outside of an
image lie zeros (or the code that means zero).

Arithmetic. float: weights and activations as float32, one fused multiply-add a tap. int8: sums in int32, exactly, then
`clamp(round(fma(float(start + sum), multiplier, offset)))` as in `tile.RequantizingTile`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu import jit, runtime
from halfbyte.kernels.cpu.arguments import LINEAR, Block
from halfbyte.kernels.cpu.ir import Function, Module, Value, vector
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.linear import KINDS, WORK_A_THREAD
from halfbyte.kernels.cpu.tile import ROUND
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter

DEPTHWISE = Block(
    (
        *LINEAR.fields[:4],
        *("x", "weights", "bias", "out", "residual", "clamp"),
        *("channels", "lines", "height", "width", "out_height", "out_width", "stride_h", "stride_w", "top", "left"),
        *("dilation_h", "dilation_w", "kernel_h", "kernel_w", "outside"),
    ),
    frozenset({"clamp"}),
)
_TOGETHER = 4  # neighbouring outputs that share a weight


@dataclass(frozen=True, slots=True)
class DepthwiseSpec:
    """kind: of the image, "f32", "bf16", "f16" or "i8"; lanes: channels side by side; together: outputs side by side."""

    kind: str
    lanes: int
    together: int

    @property
    def name(self) -> str:
        return f"depthwise_{self.kind}_{self.lanes}x{self.together}"


def build(spec: DepthwiseSpec, isa: ISA) -> Module:
    """A module with one phase: spec.name(arguments, thread, threads)."""
    module = Module(isa.attributes)
    f = module.function(spec.name, ["ptr", "i64", "i64"])
    _Lines(spec, isa, f).emit()
    return module


class _Lines:
    def __init__(self, spec: DepthwiseSpec, isa: ISA, f: Function) -> None:
        self.spec, self.isa, self.f = spec, isa, f
        self.args = f.parameters[0]
        self.integer = spec.kind == "i8"
        self.element = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1}[spec.kind]
        self.sum_type = vector("i32" if self.integer else "float", spec.lanes)

    def get(self, name: str) -> Value:
        return DEPTHWISE.load(self.args, name)

    def pointer(self, name: str) -> Value:
        return DEPTHWISE.load(self.args, name, "ptr")

    def emit(self) -> None:
        f, spec, counter = self.f, self.spec, self.args + DEPTHWISE.offset("counter")
        channels, width = self.get("channels"), self.get("out_width")
        for line in f.draw(lambda: f.fetch_add(counter), self.get("lines")):
            y, b = line % self.get("out_height"), line // self.get("out_height")
            image = self.pointer("x") + b * self.get("height") * self.get("width") * channels * self.element
            top = y * self.get("stride_h") - self.get("top")
            for start in f.loop(channels, step=spec.lanes):
                c = f.umin(start, channels - spec.lanes)  # the last vector may overlap the one before
                for x in f.loop(width, step=spec.together):
                    first = f.umin(x, width - spec.together)
                    self._outputs(image, top, first, c, (line * width + first) * channels + c)

    def _outputs(self, image: Value, top: Value, first: Value, c: Value, at: Value) -> None:
        f, spec = self.f, self.spec
        lefts = [(first + i) * self.get("stride_w") - self.get("left") for i in range(spec.together)]
        sums = [f.variable(f.value(self.sum_type, 0)) for _ in lefts]
        pixel = self.get("channels") * self.element
        weight = f.variable(self.pointer("weights") + c * 4)
        for kh in f.loop(self.get("kernel_h")):
            iy = top + kh * self.get("dilation_h")
            line = image + iy * self.get("width") * pixel + c * self.element
            inside_line = _below(f, iy, self.get("height"))
            for kw in f.loop(self.get("kernel_w")):
                w = weight.value.load(self.sum_type, 0, 4)
                for left, total in zip(lefts, sums, strict=True):
                    ix = left + kw * self.get("dilation_w")
                    there = inside_line & _below(f, ix, self.get("width"))
                    x = self._load(there.select(line + ix * pixel, self.pointer("outside")))
                    total.value = total.value + w * x if self.integer else f.fma(w, x, total.value)
                weight.value = weight.value + self.get("channels") * 4
        for i, total in enumerate(sums):
            self._write(total.value, c, at + self.get("channels") * i)

    def _load(self, x: Value) -> Value:
        lanes = self.spec.lanes
        if self.integer:
            return x.load(vector("i8", lanes)).to("i32")
        return self.isa.to_float(x.load(vector("float" if self.spec.kind == "f32" else "i16", lanes), 0, self.element), self.spec.kind)

    def _write(self, total: Value, c: Value, at: Value) -> None:
        f, lanes = self.f, self.spec.lanes
        floats = vector("float", lanes)
        low, high = ((self.args + DEPTHWISE.offset("clamp")).load("float", half, 4).splat(lanes) for half in (0, 4))
        out, bias = self.pointer("out") + at * self.element, self.pointer("bias") + c * 4
        if self.integer:
            row = self.get("channels") * 4
            offset, multiplier = bias.load(floats, 0, 4), (bias + row).load(floats, 0, 4)
            total = total + (bias + row * 2).load(self.sum_type, 0, 4)
            value = f.fma(total.to("float"), multiplier, offset).max_or(low).min_or(high)
            out.store((value + ROUND).bits(self.sum_type).to("i8"), 0, 1)
            return
        result = f.variable(total + bias.load(floats, 0, 4))
        residual = self.get("residual")
        with f.when(residual.equals(0).equals(0)):
            result.value = result.value + self._load(out + residual)
        value = result.value.max_or(low).min_or(high)
        out.store(self.isa.from_float(value, self.spec.kind), 0, self.element)


def _below(f: Function, a: Value, b: Value) -> Value:
    """Unsigned, so that what is negative is not below."""
    return f.emit("i1", f"icmp ult i64 {a.name}, {b.name}")


def taps(codes: Codes, sizes: Filter, *, integer: bool) -> Tensor:
    """What the kernel multiplies by, [taps, C]: the dequantized weight in float32, or its codes in int32."""
    numbers = codes.values().to(torch.int32) if integer else codes.dequantize()
    return numbers.reshape(sizes.out, sizes.taps).T.contiguous()


class DepthwiseKernel:
    """The compiled depthwise convolution of one weight and activation dtype, for images of any size.

    Conditions that the caller has checked: x is [B, C, H, W] with channels_last strides, not empty, in the dtype; `weights` is what
    `taps` made; a bias is contiguous float32 [C] (for int8 a table [3, C], as `tile.RequantizingTile` has it).
    """

    def __init__(self, sizes: Filter, dtype: torch.dtype) -> None:
        self.sizes, self.isa, self.dtype = sizes, current(), dtype
        self.inner_dtype = torch.float32 if dtype == torch.float16 and not self.isa.half_conversions else dtype
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
    ) -> Tensor:
        """x -> [B, C, Ho, Wo] with channels_last strides; `residual` and `outside` as for `ConvKernel`."""
        x = x.to(self.inner_dtype)
        batch, channels, height, width = x.shape
        ho, wo = window.out_size((height, width), self.sizes.kernel)
        out = torch.empty((batch, channels, ho, wo), dtype=x.dtype, memory_format=torch.channels_last)
        lanes = self.isa.lanes if channels >= self.isa.lanes else 1
        spec = DepthwiseSpec(KINDS[x.dtype], lanes, _TOGETHER if wo >= _TOGETHER else 1)
        edge = torch.full((channels,), outside, dtype=x.dtype)
        if residual is not None:
            residual = residual.to(x.dtype)
        block = DEPTHWISE.buffer(
            {
                "first_phase": _phase(spec, self.isa),
                "openmp": runtime.openmp_address(),
                "x": x.data_ptr(),
                "weights": weights.data_ptr(),
                "bias": (self.no_bias if bias is None else bias).data_ptr(),
                "out": out.data_ptr(),
                "residual": 0 if residual is None else residual.data_ptr() - out.data_ptr(),
                "clamp": (low, high),
                "channels": channels,
                "lines": batch * ho,
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
                "kernel_h": self.sizes.kernel[0],
                "kernel_w": self.sizes.kernel[1],
                "outside": edge.data_ptr(),
            }
        )
        threads = max(1, min(runtime.threads(), out.numel() * self.sizes.taps * 8 // WORK_A_THREAD, batch * ho))
        runtime.runner()(ctypes.addressof(block), threads)
        return out.to(self.dtype)


@functools.cache
def _phase(spec: DepthwiseSpec, isa: ISA) -> int:
    return jit.load(spec.name, functools.partial(build, spec), isa)[spec.name]
