"""Depthwise convolution of int8 codes by products of unsigned codes with signed weights, four lines at once: int8 -> int8.

    acc[y, x, c] = sum over kw, kh of  w[kh, kw, c] * (q[y*stride + kh, x*stride + kw, c] + 128)  -  128 * sum(w[c])

Of a column of up to four pixels, one above the other, instructions that interleave bytes make quads, a channel in each lane: one product
of quads does a column of the kernel for a lane's channel. With stride 1 the same quads serve two lines of outputs, whose weights stand
one place lower for the second. They go on from output to output: a new column for each, or two with stride 2.

    weights = for each block of channels: corrections | for each column of the kernel and line of outputs, quads of all channels

Bytes are interleaved within 128 bits, so vector v of a block has channels 16 * part + 4 * v + i, and the instructions that narrow sums
bring them back in order. A block is as many channels as a register has bytes, or 32 or 16; the last one may overlap the one before.

Threads draw items: some lines of outputs times a block. Arithmetic: that of `depthwise.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.arguments import OPERANDS
from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_x86 import dot_of_bytes, packed_codes
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, compiled, phase
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, parts_of
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter

COLUMNS = OPERANDS.extended(
    # items: groups of `lines` lines of outputs x blocks of channels
    *("items", "groups_of_image", "lines", "blocks", "block_bytes"),
    *("channels", "height", "width", "out_height", "out_width", "stride_h", "top", "left", "outside"),
)
_MOST_HIGH, _MOST_WIDE = 3, 3  # of a kernel: more columns of quads are not in registers
_ITEMS_A_THREAD = 4
_LEAST_LINES = 4  # of an item, which share what is laid out for a block


@dataclass(frozen=True, slots=True)
class ColumnsSpec:
    """What the kernel is compiled for: `block` channels at a time, `rows` lines of outputs, kernels of so many lines and columns."""

    block: int
    rows: int
    high: int
    wide: int
    stride: int

    @property
    def block_bytes(self) -> int:
        """Bytes of its weights."""
        return 4 * self.block * (1 + self.rows * self.wide)


@phase
def build(spec: ColumnsSpec, isa: ISA, f: Function) -> None:
    _Columns(spec, isa, f).emit()


class _Columns(Emitter):
    block = COLUMNS
    spec: ColumnsSpec

    def __init__(self, spec: ColumnsSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.lanes = spec.block // 4
        self.bytes, self.ints, self.floats = vector("i8", spec.block), vector("i32", self.lanes), vector("float", self.lanes)

    def emit(self) -> None:
        f, spec, get = self.f, self.spec, self.get
        blocks, groups, lines, high = get("blocks"), get("groups_of_image"), get("lines"), get("out_height")
        self.table = f.alloca(self.ints, 3 * 4, 64)
        for item in f.draw_items(self.args + COLUMNS.offset("counter"), get("items")):
            block, place = item % blocks, item // blocks
            image, first = place // groups, place % groups * lines
            c = f.umin(block * spec.block, get("channels") - spec.block)
            weights = self.pointer("weights") + block * get("block_bytes")
            self._lay_out(weights, c)
            for y in f.loop(f.umin(first + lines, high), start=first, step=spec.rows):
                self._lines(image, f.umin(y, high - spec.rows), c, weights + 4 * spec.block)

    def _lay_out(self, corrections: Value, c: Value) -> None:
        """Offsets, multipliers and starts of a block's channels in the order of its vectors."""
        size = 4 * self.lanes
        rows = self.pointer("bias") + c * 4
        for row, v in itertools.product(range(3), range(4)):
            parts = [
                (rows + self.get("channels") * (4 * row)).load("<4 x i32>", 4 * (16 * part + 4 * v), 4) for part in range(self.lanes // 4)
            ]
            while len(parts) > 1:
                parts = [a.shuffle(range(2 * lanes_of(a.type)), b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            value = parts[0]
            if row == 2:
                value = value + corrections.load(self.ints, v * size, 4)
            self.table.store(value, (4 * row + v) * size, size)

    def _lines(self, image: Value, y: Value, c: Value, weights: Value) -> None:
        """`rows` lines of outputs from line y on."""
        f, spec, get = self.f, self.spec, self.get
        channels, width, outside = get("channels"), get("width"), self.pointer("outside")
        top = y * get("stride_h") - get("top")
        line_bytes = width * channels
        start = self.pointer("x") + image * get("height") * line_bytes + c
        lines = []
        for r in range(spec.high + spec.rows - 1):
            inside = (top + r).below(get("height"))
            lines.append((inside.select(start + (top + r) * line_bytes, outside), inside.select(channels, f.value("i64", 0))))

        def quads(x: Value) -> list[Value]:
            """The codes of column x."""
            there = x.below(width)
            pixels = [there.select(line + x * step, outside).load(self.bytes) ^ 0x80 for line, step in lines]
            pixels += [pixels[-1]] * (4 - len(pixels))  # their weights are 0
            return _quads(pixels)

        left = get("left")
        new = min(spec.stride, spec.wide)
        kept = [[f.variable(q) for q in quads(f.value("i64", n) - left)] for n in range(spec.wide - new)]
        out = self.pointer("out") + (image * get("out_height") + y) * get("out_width") * channels + c
        least, most = COLUMNS.load_floats(self.args, "clamp")
        low, high = least.to("i8").splat(spec.block), most.splat(self.lanes)
        for x in f.loop(get("out_width")):
            at = x * spec.stride - left
            columns = [[q.value for q in column] for column in kept] + [quads(at + n) for n in range(spec.wide - new, spec.wide)]
            for row in range(spec.rows):
                sums = [self.table.load(self.ints, (8 + v) * 4 * self.lanes, 4 * self.lanes) for v in range(4)]
                for w, column in enumerate(columns):
                    for v in range(4):
                        factor = weights.load(self.bytes, ((w * spec.rows + row) * 4 + v) * spec.block, 4)
                        sums[v] = dot_of_bytes(f, sums[v], column[v], factor)
                codes = packed_codes(f, [self._real(v, total).min_keeping_nan(high) for v, total in enumerate(sums)])
                (out + (get("out_width") * row + x) * channels).store((codes > low).select(codes, low))
            for variables, following in zip(kept, columns[new:], strict=True):
                for variable, value in zip(variables, following, strict=True):
                    variable.value = value

    def _real(self, v: int, total: Value) -> Value:
        size = 4 * self.lanes
        offset, multiplier = (self.table.load(self.floats, (4 * row + v) * size, size) for row in (0, 1))
        return self.f.fma(total.to("float"), multiplier, offset)


def _quads(lines: Sequence[Value]) -> list[Value]:
    """Four vectors of bytes -> four of quads with a byte of each, as the instructions for each 128 bits have them."""
    size = lanes_of(lines[0].type)

    def half(a: Value, b: Value, width: int, upper: int) -> Value:
        """The lower or upper halves of 128 bits of a and b, elements of `width` bytes in turn."""
        n = 16 // width
        picks = [part * n + upper * n // 2 + i // 2 + (i % 2) * (size // width) for part in range(size // 16) for i in range(n)]
        return a.shuffle(picks, b)

    shorts = vector("i16", size // 2)
    out = []
    for upper in range(2):
        a, b = (half(lines[n], lines[n + 1], 1, upper).bits(shorts) for n in (0, 2))
        out += [half(a, b, 2, part).bits(vector("i8", size)) for part in range(2)]
    return out


def supports(sizes: Filter, window: Window, isa: ISA) -> bool:
    """Whether `DepthwiseDotKernel` takes int8 images of these sizes."""
    small = sizes.kernel[0] <= _MOST_HIGH and sizes.kernel[1] <= _MOST_WIDE and sizes.out >= 16
    return isa.mixed_dot and sizes.format.bits == 8 and small and window.dilation == (1, 1) and window.stride[1] <= _MOST_WIDE


class DepthwiseDotKernel(PlannedConv):
    """The compiled depthwise convolution of int8 images of any size.

    Conditions that the caller has checked: `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights` is what
    `weights_of` made; `table` [3, C] as `tile.RequantizingTile` has it.
    """

    cost = 4

    def __init__(self, sizes: Filter, window: Window, out_height: int) -> None:
        super().__init__()
        self.sizes, self.isa = sizes, current()
        block = next(size for size in (64, 32, 16) if size <= min(4 * self.isa.lanes, sizes.out))
        rows = 2 if window.stride[0] == 1 and out_height > 1 else 1
        self.spec = ColumnsSpec(block, rows, *sizes.kernel, window.stride[1])
        self.form = f"quads of {block} channels for {rows} lines"

    def weights_of(self, codes: Codes) -> Tensor:
        """The weights as the kernel reads them, uint8 [blocks, bytes]."""
        spec, channels = self.spec, self.sizes.out
        w = codes.values().reshape(channels, spec.high, spec.wide).to(torch.int8)
        corrections = w.sum((1, 2), dtype=torch.int32) * -128
        starts = [min(at, channels - spec.block) for at in range(0, channels, spec.block)]
        laid_out = []
        for at in starts:
            # channel 16 * part + 4 * v + i of a block, in the order v, part, i
            order = torch.arange(at, at + spec.block, device="cpu").view(-1, 4, 4).transpose(0, 1).flatten()
            quads = torch.zeros(spec.wide, spec.rows, spec.block, 4, dtype=torch.int8, device="cpu")
            for row in range(spec.rows):
                quads[:, row, :, row : row + spec.high] = w[order].permute(2, 0, 1)
            laid_out.append(torch.cat((corrections[order].view(torch.uint8), quads.flatten().view(torch.uint8))))
        return torch.stack(laid_out)

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        spec, height = self.spec, geo.out[0]
        blocks = -(-geo.channels // spec.block)
        lines = max(_LEAST_LINES, -(-height // parts_of(height, threads, _ITEMS_A_THREAD, geo.batch * blocks)))
        lines += lines % spec.rows
        groups = -(-height // lines)
        items = geo.batch * groups * blocks
        fields = {"items": items, "groups_of_image": groups, "lines": lines, "blocks": blocks, "block_bytes": spec.block_bytes}
        return Plan(COLUMNS, compiled(build, spec, self.isa), fields, items, edge=spec.block)
