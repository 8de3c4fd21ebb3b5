"""Max pooling and average pooling of int8 images on the CPU, for networks on int8 codes.

    max      y[b, c, oy, ox] = max over kh, kw inside of the image of  x[b, c, oy*stride - pad + kh*dilation, ox*stride - pad + kw*dilation]
    average  y[b, c, oy, ox] = round(sum over kh, kw of (x[…] - zero) / (Kh * Kw)) + zero        where nothing is padded

The sum of an average is exact in int32; as float32 it is divided, and rounded to the nearest integer, ties to even. Images and results are
channels_last; threads share the lines of outputs. `ops/conv/pool.py` calls `pool`, or takes a `step` of a native program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Block
from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase
from halfbyte.kernels.cpu.conv.direct import power_of_two
from halfbyte.kernels.cpu.conv.planned import ConvGeometry
from halfbyte.kernels.cpu.linear.tile_spec import ROUND
from halfbyte.kernels.cpu.plan_cache import PLANS, Call
from halfbyte.kernels.cpu.steps import ProgramStep
from halfbyte.kernels.problem import Window

POOL = Block(
    *("x", "out", "lines", "channels"),
    *("height", "width", "out_height", "out_width", "kernel_h", "kernel_w"),
    *("stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w", "zero"),
)
_TENSORS = POOL.offset("x")
_pack_tensors = POOL.struct("x", "out").pack_into


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What the kernel is compiled for.

    Attributes:
        channels: Channels of a vector.
        averages: It computes averages; otherwise maxima.
    """

    channels: int
    averages: bool = False


@phase
def build(spec: PoolSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a POOL block, its thread and the number of threads."""
    args = f.parameters[0]

    def get(name: str) -> Value:
        return POOL.load(args, name)

    codes, sums = vector("i8", spec.channels), vector("i32", spec.channels)
    channels, out_width, lines = get("channels"), get("out_width"), get("lines")
    line_bytes = get("width") * channels
    for line in f.share(lines):
        y = line % get("out_height") * get("stride_h") - get("top")
        image = POOL.load(args, "x", "ptr") + line // get("out_height") * (get("height") * line_bytes)
        for ox in f.loop(out_width):
            x, out = ox * get("stride_w") - get("left"), POOL.load(args, "out", "ptr") + (line * out_width + ox) * channels
            for first in f.loop(channels, step=spec.channels):
                c = f.umin(first, channels - spec.channels)  # the last vector may overlap the one before
                result = f.variable(f.value(sums, 0) if spec.averages else f.value(codes, -128))
                for kh in f.loop(get("kernel_h")):
                    iy = y + kh * get("dilation_h")
                    with f.when(iy.below(get("height"))):  # unsigned: negative coordinates are not
                        for kw in f.loop(get("kernel_w")):
                            ix = x + kw * get("dilation_w")
                            with f.when(ix.below(get("width"))):
                                pixel = (image + iy * line_bytes + ix * channels + c).load(codes)
                                if spec.averages:
                                    result.value = result.value + pixel.to("i32")
                                else:
                                    result.value = (pixel > result.value).select(pixel, result.value)
                (out + c).store(_mean(f, result.value, get("kernel_h") * get("kernel_w"), get("zero")) if spec.averages else result.value)


def _mean(f: Function, total: Value, count: Value, zero: Value) -> Value:
    """Return the codes of means, which lie between the least and the largest code that was summed, so that they need no clamp.

    Args:
        f: Emits the instructions.
        total: Sums of codes, a vector of int32.
        count: How many codes were summed.
        zero: The code that means 0.
    """
    lanes = lanes_of(total.type)
    real = (total - (count * zero).to("i32").splat(lanes)).to("float") / count.to("float").splat(lanes)
    return ((real + ROUND).bits(total.type) + zero.to("i32").splat(lanes)).to("i8")


def pool(x: Tensor, kernel: tuple[int, int], window: Window, out_size: tuple[int, int], zero: int | None = None) -> Tensor:
    """Pool images.

    Args:
        x: int8 [B, C, H, W], channels_last and not empty.
        kernel: Height and width of the window.
        window: Its stride, padding and dilation. Padding below and to the right is ignored: `out_size` says how far the window goes.
        out_size: Ho and Wo.
        zero: For average pooling, where nothing may be padded, the code that means 0; None: max pooling.

    Returns:
        int8 [B, C, Ho, Wo], channels_last.
    """
    batch, channels, _, _ = x.shape
    out = torch.empty((batch, channels, *out_size), dtype=torch.int8, memory_format=torch.channels_last, device="cpu")
    key = x.shape, kernel, window, out_size, zero, runtime.threads()
    call = PLANS.pool.get(key)
    if call is None:
        call = PLANS.pool[key] = _prepare(x.shape, kernel, window, out_size, zero)
    _pack_tensors(call.buffer, _TENSORS, x.data_ptr(), out.data_ptr())
    runtime.runner()(call.address, call.threads)
    return out


def step(x: Tensor, kernel: tuple[int, int], window: Window, out_size: tuple[int, int], zero: int | None = None) -> ProgramStep:
    """Return `pool` of images of x's sizes as a step of a native program."""
    call = _prepare(x.shape, kernel, window, out_size, zero)
    return ProgramStep(call.buffer, call.threads, x.shape[0] * x.shape[1] * out_size[0] * out_size[1], (_TENSORS,), POOL.offset("out"))


def _prepare(shape: Sequence[int], kernel: tuple[int, int], window: Window, out_size: tuple[int, int], zero: int | None) -> Call:
    """Return the call for images of this shape, but for the addresses of x and the result; the other arguments are those of `pool`."""
    assert zero is None or window.padding == (0, 0, 0, 0), f"a mean counts all pixels of the window, got padding={window.padding}"
    batch, channels, height, width = shape
    reach = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out_size, window.stride, kernel, window.dilation, strict=True)]
    assert zero is None or (reach[0] <= height and reach[1] <= width), f"a mean counts all pixels of the window, which reach to {reach}"
    isa, lines = current(), batch * out_size[0]
    geo = ConvGeometry(batch, channels, (height, width), channels, out_size, kernel, window, kernel[0] * kernel[1] * channels)
    spec = PoolSpec(power_of_two(channels, 4 * isa.lanes), zero is not None)
    buffer = arguments(POOL, compiled(build, spec, isa), geo.fields() | {"lines": lines, "zero": zero or 0})
    return Call.of(buffer, min(geo.threads(), lines))
