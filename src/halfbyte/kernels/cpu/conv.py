"""Convolution on the CPU: patches of the image are gathered where the linear tiles read them, a cacheful at a time.

    y[m, co] = sum over taps, ci of  w[co, tap, ci] * x[pixel under tap of output m, ci]

The image and the output have their channels together (channels_last). Threads draw items: a chunk of row tiles times some panels
of a group's outputs. An item's patches are gathered into the thread's own memory (unless the item before had the same), first
one after the other as rows of K elements, then by the row functions of `activations.py`, as a linear layer's. No im2col matrix
exists, and the arithmetic is that of `tile.py`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu import driver, jit, runtime
from halfbyte.kernels.cpu.arguments import LINEAR, Block
from halfbyte.kernels.cpu.ir import Function, Module, Value, vector
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.linear import CALL, WORK_A_THREAD, LinearKernel, pack_call
from halfbyte.kernels.cpu.tile import Inner
from halfbyte.kernels.problem import Activation, Window
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

CONV = Block(
    (
        *LINEAR.fields,
        # a thread's memory: its patches in the order of tiles, and one patch as a row
        *("thread_bytes", "row_at"),
        # items: groups of channels x chunks of row tiles x parts of the panels
        *("items", "parts", "chunks", "chunk_tiles"),
        *("group_bytes", "group_weights", "group_bias", "group_out"),
        # the image and the way of the kernel over it, in elements and bytes
        *("height", "width", "out_height", "out_width", "stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w"),
        *("kernel_h", "kernel_w", "image_bytes", "line_bytes", "pixel_bytes"),
        # a tap's channels in the image and in a row; `outside`: what stands for a pixel outside of the image
        *("tap_bytes", "tap_stride", "outside"),
        # where the whole kernel lies inside: pieces of a line that are copied at once
        *("pieces", "piece_bytes", "piece_stride"),
    ),
    LINEAR.floats,
)

_CHUNK_BYTES = 1 << 18  # patches that stay in a core's second-level cache while all panels pass
_ITEMS_A_THREAD = 3
_KEPT_CALLS = 1024


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """What the gathering of patches is compiled for.

    inside, border   bytes that are copied at a time from inside of the image and at its border: powers of two, at most what is copied
    """

    inside: int
    border: int

    @property
    def name(self) -> str:
        return f"conv_{self.inside}_{self.border}"


def build(spec: GatherSpec, isa: ISA) -> Module:
    """A module with the one phase of a convolution: spec.name(arguments, thread, threads)."""
    module = Module(isa.attributes)
    f = module.function(spec.name, ["ptr", "i64", "i64"])
    args, thread, _ = f.parameters
    patches = CONV.load(args, "scratch", "ptr") + thread * CONV.load(args, "thread_bytes")
    parts, chunks, group = (CONV.load(args, name) for name in ("parts", "chunks", "group"))
    counter = args + CONV.offset("counter")
    big, count = CONV.load(args, "tile_rows"), CONV.load(args, "tiles")
    tiles = count + CONV.load(args, "lesser_tiles")
    panels = (CONV.load(args, "n") + (PANEL - 1)) // PANEL
    row = patches + CONV.load(args, "row_at")
    for at in f.loop(CONV.load(args, "thread_bytes") - CONV.load(args, "row_at"), step=64):  # what pads a tap or a row is never written
        row.store(f.value("<64 x i8>", 0), at)
    gathered = f.variable(f.value("i64", -1))
    for item in f.draw(lambda: f.fetch_add(counter), CONV.load(args, "items")):
        part, place = item % parts, item // parts
        chunk, g = place % chunks, place // chunks
        first = chunk * CONV.load(args, "chunk_tiles")
        stop = f.umin(first + CONV.load(args, "chunk_tiles"), tiles)
        row = first * big - (first - f.umin(first, count))
        new = gathered.value.equals(place).equals(0)
        with f.when(new):
            _gather(spec, f, args, patches, g, (first, stop), row)
            gathered.value = place
        out = CONV.load(args, "out", "ptr") + g * CONV.load(args, "group_out") + row * CONV.load(args, "out_stride")
        weights = CONV.load(args, "weights", "ptr") + g * CONV.load(args, "group_weights")
        bias = CONV.load(args, "bias", "ptr")
        bias = f.emit("i1", f"icmp eq ptr {bias.name}, null").select(bias, bias + g * CONV.load(args, "group_bias"))
        driver.multiply(f, args, (first, stop), (part * group, f.umin(part * group + group, panels)), patches, out, weights, bias)
    return module


def _gather(spec: GatherSpec, f: Function, args: Value, patches: Value, g: Value, tiles: tuple[Value, Value], first_row: Value) -> None:
    """The patches of some row tiles into `patches`."""
    big, count, row_bytes = CONV.load(args, "tile_rows"), CONV.load(args, "tiles"), CONV.load(args, "row_bytes")
    function, image = CONV.load(args, "row_function", "ptr"), CONV.load(args, "x", "ptr") + g * CONV.load(args, "group_bytes")
    as_row = patches + CONV.load(args, "row_at")
    row = f.variable(first_row)
    tile = f.variable(patches)
    for t in f.loop(tiles[1], tiles[0]):
        rows = f.emit("i1", f"icmp ult i64 {t.name}, {count.name}").select(big, big - 1)
        for i in f.loop(rows):
            _patch(spec, f, args, image, row.value, as_row)
            f.call_pointer(function, args, as_row, tile.value, rows, i)
            row.value = row.value + 1
        tile.value = tile.value + rows * row_bytes


def _patch(spec: GatherSpec, f: Function, args: Value, image: Value, m: Value, to: Value) -> None:
    """The patch of output m as a row of K elements at `to`."""
    get = functools.partial(CONV.load, args)
    x, line = m % get("out_width"), m // get("out_width")
    y, b = line % get("out_height"), line // get("out_height")
    top, left = y * get("stride_h") - get("top"), x * get("stride_w") - get("left")
    image = image + b * get("image_bytes")
    reach_h, reach_w = (get("kernel_h") - 1) * get("dilation_h"), (get("kernel_w") - 1) * get("dilation_w")
    # Unsigned: what is negative is larger than any size.
    inside = _below(f, top, get("height")) & _below(f, left, get("width"))
    inside = inside & _below(f, top + reach_h, get("height")) & _below(f, left + reach_w, get("width"))
    with f.when(inside):
        start = image + top * get("line_bytes") + left * get("pixel_bytes")
        at = f.variable(to)
        for kh in f.loop(get("kernel_h")):
            line_start = start + kh * get("dilation_h") * get("line_bytes")
            for piece in f.loop(get("pieces")):
                _copy(f, line_start + piece * get("dilation_w") * get("pixel_bytes"), at.value, get("piece_bytes"), spec.inside)
                at.value = at.value + get("piece_stride")
    with f.when(inside.equals(0)):
        at = f.variable(to)
        for kh in f.loop(get("kernel_h")):
            iy = top + kh * get("dilation_h")
            for kw in f.loop(get("kernel_w")):
                ix = left + kw * get("dilation_w")
                there = _below(f, iy, get("height")) & _below(f, ix, get("width"))
                pixel = image + iy * get("line_bytes") + ix * get("pixel_bytes")
                _copy(f, there.select(pixel, CONV.load(args, "outside", "ptr")), at.value, get("tap_bytes"), spec.border)
                at.value = at.value + get("tap_stride")


def _below(f: Function, a: Value, b: Value) -> Value:
    return f.emit("i1", f"icmp ult i64 {a.name}, {b.name}")


def _copy(f: Function, source: Value, to: Value, size: Value, step: int) -> None:
    """`size` bytes, at least `step`, no more and no less: the last `step` of them may be copied twice."""
    kind = vector("i8", step)
    last = size - step
    for at in f.loop(last, step=step):
        to.store(source.load(kind, at), at)
    to.store(source.load(kind, last), last)


def _step(size: int, most: int) -> int:
    """The largest power of two that is at most `size` and `most`."""
    return 1 << (max(1, min(size, most)).bit_length() - 1)


class _Call(NamedTuple):
    """What a thread keeps for calls of one kernel with one size of images: the arguments, all but those of the call filled in."""

    buffer: ctypes.Array[ctypes.c_char]
    out_shape: tuple[int, int, int, int]
    memory: int
    threads: int
    outside: Tensor


class _Kept(threading.local):
    """Each Python thread has its own arguments, so that calls may run side by side."""

    def __init__(self) -> None:
        self.calls: dict[tuple[Any, ...], _Call] = {}


_kept = _Kept()


class ConvKernel:
    """The compiled convolution of one weight, activation dtype and arithmetic, for images of any size.

    Conditions that the caller has checked: x is [B, C, H, W] with channels_last strides, not empty, in the dtype; `weights` is the
    address of `groups` packed matrices, one after the other; a bias is contiguous float32 [Co] (for int8, the tables of the groups).
    """

    def __init__(self, sizes: Filter, dtype: torch.dtype, inner: Inner, activation: Activation) -> None:
        self.sizes, self.isa = sizes, current()
        self.linear = LinearKernel(sizes.matrix_format, sizes.out // sizes.groups, sizes.k, dtype, inner, activation, zeroed=True)
        self.dtype = dtype

    def __call__(
        self,
        x: Tensor,
        window: Window,
        weights: int,
        bias: Tensor | None,
        low: float,
        high: float,
        *,
        residual: Tensor | None = None,
        outside: int = 0,
    ) -> Tensor:
        """x -> [B, Co, Ho, Wo] with channels_last strides.

        residual   added before the clamp: of the output's shape and strides, in x's dtype
        outside    the code of what lies outside of an int8 image
        """
        key = self.linear.number, tuple(x.shape), window, outside, runtime.threads()
        call = _kept.calls.get(key)
        if call is None:
            if len(_kept.calls) >= _KEPT_CALLS:
                _kept.calls.clear()
            call = _kept.calls[key] = self._prepare(x, window, outside)
        out = torch.empty(call.out_shape, dtype=self.linear.out_dtype, memory_format=torch.channels_last)
        memory = torch.empty(call.memory + 64, dtype=torch.uint8)
        table = 0 if bias is None else bias.data_ptr()
        if residual is not None:
            residual = residual.to(out.dtype)
        apart = 0 if residual is None else residual.data_ptr() - out.data_ptr()  # the strides of both are the same
        scratch = memory.data_ptr() + 63 & ~63
        pack_call(call.buffer, CALL, 0, x.data_ptr(), 0, scratch, weights, table, out.data_ptr(), apart, low, high)
        self.linear.run(ctypes.addressof(call.buffer), call.threads)
        return out if out.dtype == self.dtype else out.to(self.dtype)

    def _prepare(self, x: Tensor, window: Window, outside: int) -> _Call:
        sizes, linear, element = self.sizes, self.linear, self.dtype.itemsize
        batch, channels, height, width = x.shape
        ho, wo = window.out_size((height, width), sizes.kernel)
        geo, m, pixel = linear.geometry, batch * ho * wo, channels * element
        tap, stride = sizes.channels * element, sizes.padded * element
        whole_lines = window.dilation[1] == 1 and sizes.groups == 1 and tap == stride
        pieces, piece = (1, tap * sizes.kernel[1]) if whole_lines else (sizes.kernel[1], tap)
        spec = GatherSpec(_step(piece, 4 * self.isa.lanes), _step(tap, 4 * self.isa.lanes))
        fields = linear.fields(m)
        tiles, rows = fields["tiles"] + fields["lesser_tiles"], fields["tile_rows"]
        chunks = -(-tiles // max(1, _CHUNK_BYTES // (rows * linear.row_bytes)))
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
                "first_phase": jit.load(spec.name, functools.partial(build, spec), self.isa)[spec.name],
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
        return _Call(buffer, (batch, sizes.out, ho, wo), threads * thread_bytes, threads, edge)
