"""The largest code under each place of a window: pools of int8 images.

    y[b, c, oy, ox] = max over kh, kw that lie inside of the image of  x[b, c, oy*stride - pad + kh*dilation, ox*stride - pad + kw*dilation]

Images and results have their channels together (channels_last). Threads share the lines of outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu import jit, runtime
from halfbyte.kernels.cpu.arguments import LINEAR, Block
from halfbyte.kernels.cpu.direct import power_of_two
from halfbyte.kernels.cpu.ir import Function, Module, Value, vector
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kept import Kept
from halfbyte.kernels.problem import Window

POOL = Block(
    (
        *(*LINEAR.fields[:4], "x", "out", "lines", "channels"),
        *("height", "width", "out_height", "out_width", "kernel_h", "kernel_w"),
        *("stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w"),
    )
)
_TENSORS = POOL.offset("x")
_pack_tensors = POOL.struct("x", "out").pack_into
_WORK_A_THREAD = 1 << 18  # codes read


def name_of(together: int) -> str:
    return f"max_pool_{together}"


def build(together: int, isa: ISA) -> Module:
    """A module with one phase: name_of(together)(arguments, thread, threads), which takes so many channels at a time."""
    module = Module(isa.attributes)
    f = module.function(name_of(together), ["ptr", "i64", "i64"])
    args, thread, threads = f.parameters

    def get(name: str) -> Value:
        return POOL.load(args, name)

    kind, channels, out_width, lines = vector("i8", together), get("channels"), get("out_width"), get("lines")
    line_bytes = get("width") * channels
    for line in f.loop((thread + 1) * lines // threads, start=thread * lines // threads):
        y = line % get("out_height") * get("stride_h") - get("top")
        image = POOL.load(args, "x", "ptr") + line // get("out_height") * (get("height") * line_bytes)
        for ox in f.loop(out_width):
            x, out = ox * get("stride_w") - get("left"), POOL.load(args, "out", "ptr") + (line * out_width + ox) * channels
            for c0 in f.loop(channels, step=together):
                c = f.umin(c0, channels - together)  # the last ones may overlap those before
                largest = f.variable(f.value(kind, -128))
                for kh in f.loop(get("kernel_h")):
                    iy = y + kh * get("dilation_h")
                    with f.when(_below(f, iy, get("height"))):
                        for kw in f.loop(get("kernel_w")):
                            ix = x + kw * get("dilation_w")
                            with f.when(_below(f, ix, get("width"))):
                                codes = (image + iy * line_bytes + ix * channels + c).load(kind)
                                largest.value = (codes > largest.value).select(codes, largest.value)
                (out + c).store(largest.value)
    return module


def _below(f: Function, a: Value, size: Value) -> Value:
    """Unsigned, so that what is negative is not."""
    return f.emit("i1", f"icmp ult i64 {a.name}, {size.name}")


class _Call(NamedTuple):
    """What a thread keeps for calls of one kind and size: the arguments, all but the tensors filled in."""

    buffer: ctypes.Array[ctypes.c_char]
    address: int
    threads: int


_kept = Kept[_Call]()


def max_pool(x: Tensor, kernel: tuple[int, int], window: Window, out_size: tuple[int, int]) -> Tensor:
    """int8 [B, C, H, W], channels_last and not empty -> [B, C, *out_size], channels_last.

    window   its padding below and to the right is not looked at: `out_size` says how far the kernel goes
    """
    batch, channels, _, _ = x.shape
    out = torch.empty((batch, channels, *out_size), dtype=torch.int8, memory_format=torch.channels_last)
    key = x.shape, kernel, window, out_size, runtime.threads()
    call = _kept.plans.get(key) or _kept.get(key, lambda: _prepare(x.shape, kernel, window, out_size))
    _pack_tensors(call.buffer, _TENSORS, x.data_ptr(), out.data_ptr())
    runtime.runner()(call.address, call.threads)
    return out


def _prepare(shape: Sequence[int], kernel: tuple[int, int], window: Window, out_size: tuple[int, int]) -> _Call:
    batch, channels, height, width = shape
    together, isa = power_of_two(channels, 4 * current().lanes), current()
    name, lines = name_of(together), batch * out_size[0]
    buffer = POOL.buffer(
        {
            "first_phase": jit.load(name, functools.partial(build, together), isa)[name],
            "openmp": runtime.openmp_address(),
            "lines": lines,
            "channels": channels,
            "height": height,
            "width": width,
            "out_height": out_size[0],
            "out_width": out_size[1],
            "kernel_h": kernel[0],
            "kernel_w": kernel[1],
            "stride_h": window.stride[0],
            "stride_w": window.stride[1],
            "top": window.padding[0],
            "left": window.padding[2],
            "dilation_h": window.dilation[0],
            "dilation_w": window.dilation[1],
        }
    )
    codes = lines * out_size[1] * kernel[0] * kernel[1] * channels
    return _Call(buffer, ctypes.addressof(buffer), max(1, min(runtime.threads(), codes // _WORK_A_THREAD, lines)))
