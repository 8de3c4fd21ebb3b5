"""The largest code under each place of a window, or their mean: pools of int8 images.

    y[b, c, oy, ox] = max over kh, kw that lie inside of the image of  x[b, c, oy*stride - pad + kh*dilation, ox*stride - pad + kw*dilation]
    y[b, c, oy, ox] = round(sum over kh, kw of (x[…] - zero) / (Kh * Kw)) + zero        where nothing is padded

A mean is exact but for its one rounding, ties to even. Images and results have their channels together (channels_last). Threads share the
lines of outputs.
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
        together: Channels of a vector.
        averages: It computes means; otherwise the largest codes.
    """

    together: int
    averages: bool = False


@phase
def build(spec: PoolSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a POOL block, its thread and the number of threads. Threads share the lines of outputs."""
    args = f.parameters[0]

    def get(name: str) -> Value:
        return POOL.load(args, name)

    together = spec.together
    kind, ints = vector("i8", together), vector("i32", together)
    channels, out_width, lines = get("channels"), get("out_width"), get("lines")
    line_bytes = get("width") * channels
    for line in f.share(lines):
        y = line % get("out_height") * get("stride_h") - get("top")
        image = POOL.load(args, "x", "ptr") + line // get("out_height") * (get("height") * line_bytes)
        for ox in f.loop(out_width):
            x, out = ox * get("stride_w") - get("left"), POOL.load(args, "out", "ptr") + (line * out_width + ox) * channels
            for c0 in f.loop(channels, step=together):
                c = f.umin(c0, channels - together)  # the last ones may overlap those before
                found = f.variable(f.value(ints, 0) if spec.averages else f.value(kind, -128))
                for kh in f.loop(get("kernel_h")):
                    iy = y + kh * get("dilation_h")
                    with f.when(iy.below(get("height"))):
                        for kw in f.loop(get("kernel_w")):
                            ix = x + kw * get("dilation_w")
                            with f.when(ix.below(get("width"))):
                                codes = (image + iy * line_bytes + ix * channels + c).load(kind)
                                if spec.averages:
                                    found.value = found.value + codes.to("i32")
                                else:
                                    found.value = (codes > found.value).select(codes, found.value)
                (out + c).store(_mean(f, found.value, get("kernel_h") * get("kernel_w"), get("zero")) if spec.averages else found.value)


def _mean(f: Function, total: Value, count: Value, zero: Value) -> Value:
    """Codes; their mean lies between the least and the largest of them."""
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
        zero: The code that means 0, for means, where nothing may be padded; None: the largest codes.

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
    """`pool` of images of these sizes."""
    call = _prepare(x.shape, kernel, window, out_size, zero)
    return ProgramStep(call.buffer, call.threads, x.shape[0] * x.shape[1] * out_size[0] * out_size[1], (_TENSORS,), POOL.offset("out"))


def _prepare(shape: Sequence[int], kernel: tuple[int, int], window: Window, out_size: tuple[int, int], zero: int | None) -> Call:
    assert zero is None or window.padding == (0, 0, 0, 0), f"a mean counts all pixels of the window, got padding={window.padding}"
    batch, channels, height, width = shape
    isa, lines = current(), batch * out_size[0]
    geo = ConvGeometry(batch, channels, (height, width), channels, out_size, kernel, window, kernel[0] * kernel[1] * channels)
    spec = PoolSpec(power_of_two(channels, 4 * isa.lanes), zero is not None)
    buffer = arguments(POOL, compiled(build, spec, isa), geo.fields() | {"lines": lines, "zero": zero or 0})
    return Call.of(buffer, min(geo.threads(), lines))
