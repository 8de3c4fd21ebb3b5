"""Depthwise convolution of int8 codes by products of unsigned codes with signed weights, four lines at once: int8 -> int8.

    acc[oy, ox, c] = sum over kw, kh of  w[kh, kw, c] * (q[oy * stride_h + kh, ox * stride_w + kw, c] + 128)  -  128 * sum(w[c])

One dot product of four bytes computes a column of the filter, for a channel in each lane. Its operand is a quad: the codes of a channel in
a column of four pixels, one above the other; instructions that interleave the bytes of four lines make quads of 4 * lanes channels at once.
With vertical stride 1 the same quads serve two lines of outputs: for the second one the weights are one byte higher in theirs. Quads are
reused from output to output along a line, which needs one new column, or two with stride 2.

    weights, for each block of channels    int32 [channel]  corrections -128 * sum(w[c])
                                           int8 [filter column, line of outputs, channel, 4]  quads

Bytes are interleaved within each 128 bits. So vector v of a block's four has channel 16 * p + 4 * v + i in lane 4 * p + i, and weights are
in this order; the instructions that narrow sums to bytes restore that of memory. A block is as many channels as a register has bytes, or 32
or 16; the last one may overlap the one before.

Threads draw items: some lines of outputs times a block. Arithmetic: that of `depthwise.py`. `dispatch/cpu_conv.py` prefers it to that one.
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
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter

DEPTHWISE_DOT = OPERANDS.extended(
    # items: groups of `lines` lines of outputs x blocks of channels, whose weights have `block_bytes`
    *("items", "groups_of_image", "lines", "blocks", "block_bytes"),
    *("channels", "height", "width", "out_height", "out_width", "stride_h", "top", "left"),
    "outside",  # address of a block's codes in the padding
)
_QUAD = 4  # bytes
_BLOCKS = 64, 32, 16  # channels
_MOST_KERNEL_HEIGHT, _MOST_KERNEL_WIDTH = 3, 3  # a line more is no quad with a second line of outputs; more columns do not fit registers
_ITEMS_A_THREAD = 4
_LEAST_LINES = 4  # of an item, which share the block's requantization table
_OFFSET, _MULTIPLIER, _INITIAL_SUM = range(3)  # rows of the requantization table


@dataclass(frozen=True, slots=True)
class DepthwiseDotSpec:
    """What the code is compiled for.

    Attributes:
        block: Channels that are computed together.
        out_lines: Lines of outputs that are computed together, 1 or 2.
        kernel_height, kernel_width: Of the filter.
        stride: The horizontal one.
    """

    block: int
    out_lines: int
    kernel_height: int
    kernel_width: int
    stride: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's weights: its corrections and its quads."""
        return 4 * self.block + _QUAD * self.block * self.out_lines * self.kernel_width


@phase
def build(spec: DepthwiseDotSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a DEPTHWISE_DOT block, its thread and the number of threads."""
    _DepthwiseDot(spec, isa, f).emit()


class _DepthwiseDot(Emitter):
    """Emits the kernel.

    Attributes:
        lanes: Channels of a vector of int32, of which a block has four.
        bytes, ints, floats: Types of a block's codes, or of a vector of quads; of a vector of sums, and of real numbers.
        table: Memory of a block's requantization table in the order of its vectors, int32 or float32 [3, 4, lanes].
    """

    block = DEPTHWISE_DOT
    spec: DepthwiseDotSpec

    def __init__(self, spec: DepthwiseDotSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.lanes = spec.block // 4
        self.bytes, self.ints, self.floats = vector("i8", spec.block), vector("i32", self.lanes), vector("float", self.lanes)

    def emit(self) -> None:
        f, spec, get = self.f, self.spec, self.get
        blocks, groups, lines, out_height = get("blocks"), get("groups_of_image"), get("lines"), get("out_height")
        self.table = f.alloca(self.ints, 3 * 4, 64)
        for item in f.draw_items(self.args + DEPTHWISE_DOT.offset("counter"), get("items")):
            block, place = item % blocks, item // blocks
            image, first_line = place // groups, place % groups * lines
            c = f.umin(block * spec.block, get("channels") - spec.block)
            corrections = self.pointer("weights") + block * get("block_bytes")
            self._load_table(corrections, c)
            for line in f.loop(f.umin(first_line + lines, out_height), start=first_line, step=spec.out_lines):
                oy = f.umin(line, out_height - spec.out_lines)  # the last ones may overlap those before
                self._compute_lines(image, oy, c, corrections + 4 * spec.block)

    def _table_entry(self, row: int, v: int) -> int:
        """Return the offset of vector v of a row of `table`."""
        return (4 * row + v) * 4 * self.lanes

    def _load_table(self, corrections: Value, c: Value) -> None:
        """Copy the table of a block's channels, from channel c on, to `table`, with the corrections added to the initial sums."""
        rows = self.pointer("bias") + c * 4
        for row, v in itertools.product(range(3), range(4)):
            parts = [
                (rows + self.get("channels") * (4 * row)).load("<4 x i32>", 4 * (16 * part + 4 * v), 4) for part in range(self.lanes // 4)
            ]
            while len(parts) > 1:  # concatenate them
                parts = [a.shuffle(range(2 * lanes_of(a.type)), b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            value = parts[0]
            if row == _INITIAL_SUM:
                value = value + corrections.load(self.ints, self._table_entry(0, v), 4)
            self.table.store(value, self._table_entry(row, v), 4 * self.lanes)

    def _compute_lines(self, image: Value, oy: Value, c: Value, weights: Value) -> None:
        """Compute `out_lines` lines of outputs of a block.

        Args:
            image: The number of the image.
            oy: The first line of outputs.
            c: The block's first channel.
            weights: Address of the block's quads.
        """
        f, spec, get = self.f, self.spec, self.get
        channels, width, outside = get("channels"), get("width"), self.pointer("outside")
        y = oy * get("stride_h") - get("top")
        line_bytes = width * channels
        start = self.pointer("x") + image * get("height") * line_bytes + c
        lines = []  # of the image: address, and bytes from a pixel to the next; above and below of it all pixels are at one address
        for i in range(spec.kernel_height + spec.out_lines - 1):
            is_inside = (y + i).below(get("height"))  # unsigned: negative lines are not
            lines.append((is_inside.select(start + (y + i) * line_bytes, outside), is_inside.select(channels, f.value("i64", 0))))

        def quads_of(x: Value) -> list[Value]:
            """Load the four vectors of quads of column x, of unsigned codes."""
            is_inside = x.below(width)
            pixels = [is_inside.select(line + x * pixel_bytes, outside).load(self.bytes) ^ 0x80 for line, pixel_bytes in lines]
            pixels += [pixels[-1]] * (_QUAD - len(pixels))  # their weights are 0
            return _interleaved(pixels)

        left = get("left")
        new_columns = min(spec.stride, spec.kernel_width)  # of the filter's, from output to output
        reused = [[f.variable(quads) for quads in quads_of(f.value("i64", n) - left)] for n in range(spec.kernel_width - new_columns)]
        out = self.pointer("out") + (image * get("out_height") + oy) * get("out_width") * channels + c
        low_bound, high_bound = DEPTHWISE_DOT.load_floats(self.args, "clamp")
        low, high = low_bound.to("i8").splat(spec.block), high_bound.splat(self.lanes)
        for ox in f.loop(get("out_width")):
            x = ox * spec.stride - left
            columns = [[variable.value for variable in column] for column in reused]
            columns += [quads_of(x + n) for n in range(spec.kernel_width - new_columns, spec.kernel_width)]
            for out_line in range(spec.out_lines):
                sums = [self.table.load(self.ints, self._table_entry(_INITIAL_SUM, v), 4 * self.lanes) for v in range(4)]
                for kw, column in enumerate(columns):
                    for v in range(4):
                        factor = weights.load(self.bytes, ((kw * spec.out_lines + out_line) * 4 + v) * spec.block, 4)
                        sums[v] = dot_of_bytes(f, sums[v], column[v], factor)
                # The lower bound is applied to bytes: packing saturates at -128.
                codes = packed_codes(f, [self._real(v, total).min_keeping_nan(high) for v, total in enumerate(sums)])
                (out + (get("out_width") * out_line + ox) * channels).store((codes > low).select(codes, low))
            for variables, values in zip(reused, columns[new_columns:], strict=True):
                for variable, value in zip(variables, values, strict=True):
                    variable.value = value

    def _real(self, v: int, total: Value) -> Value:
        """Return the real numbers of sums of vector v, in units of the output's scale."""
        offset, multiplier = (self.table.load(self.floats, self._table_entry(row, v), 4 * self.lanes) for row in (_OFFSET, _MULTIPLIER))
        return self.f.fma(total.to("float"), multiplier, offset)


def _interleaved(lines: Sequence[Value]) -> list[Value]:
    """Return four vectors of quads, each with a byte of each of four lines: in the order of the instructions, see the file's docstring."""
    size = lanes_of(lines[0].type)

    def unpacked(a: Value, b: Value, width: int, upper: int) -> Value:
        """Interleave elements of `width` bytes of the lower or upper halves of each 128 bits of a and b (punpckl…, punpckh…)."""
        n = 16 // width
        picks = [part * n + upper * n // 2 + i // 2 + (i % 2) * (size // width) for part in range(size // 16) for i in range(n)]
        return a.shuffle(picks, b)

    shorts = vector("i16", size // 2)
    quads = []
    for upper_bytes in range(2):
        first_two, last_two = (unpacked(lines[n], lines[n + 1], 1, upper_bytes).bits(shorts) for n in (0, 2))
        quads += [unpacked(first_two, last_two, 2, upper_shorts).bits(vector("i8", size)) for upper_shorts in range(2)]
    return quads


def supports(sizes: Filter, window: Window, isa: ISA) -> bool:
    """Return whether `DepthwiseDotKernel` takes int8 images of these sizes."""
    small = sizes.kernel[0] <= _MOST_KERNEL_HEIGHT and sizes.kernel[1] <= _MOST_KERNEL_WIDTH and sizes.out >= _BLOCKS[-1]
    return isa.mixed_dot and sizes.format.bits == 8 and small and window.dilation == (1, 1) and window.stride[1] <= _MOST_KERNEL_WIDTH


class DepthwiseDotKernel(PlannedConv):
    """The compiled depthwise convolution of int8 images of any size.

    Conditions that the caller has checked: `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights` is what
    `weights_of` returned; `table` [3, C] as `tile.RequantizingTile` has it.
    """

    cost = 4

    def __init__(self, sizes: Filter, window: Window, out_height: int) -> None:
        super().__init__()
        self.sizes, self.isa = sizes, current()
        block = next(size for size in _BLOCKS if size <= min(4 * self.isa.lanes, sizes.out))
        out_lines = 2 if window.stride[0] == 1 and out_height > 1 else 1
        self.spec = DepthwiseDotSpec(block, out_lines, *sizes.kernel, window.stride[1])
        self.form = f"quads of {block} channels for {out_lines} lines"

    def weights_of(self, codes: Codes) -> Tensor:
        """Return the weights as the kernel reads them, uint8 [blocks, bytes]."""
        spec, channels = self.spec, self.sizes.out
        w = codes.values().reshape(channels, spec.kernel_height, spec.kernel_width).to(torch.int8)
        corrections = w.sum((1, 2), dtype=torch.int32) * -128
        blocks = []
        for block_start in range(0, channels, spec.block):
            start = min(block_start, channels - spec.block)
            # channel 16 * p + 4 * v + i of a block, in the order v, p, i
            order = torch.arange(start, start + spec.block, device="cpu").view(-1, 4, 4).transpose(0, 1).flatten()
            quads = torch.zeros(spec.kernel_width, spec.out_lines, spec.block, _QUAD, dtype=torch.int8, device="cpu")
            for line in range(spec.out_lines):
                quads[:, line, :, line : line + spec.kernel_height] = w[order].permute(2, 0, 1)
            blocks.append(torch.cat((corrections[order].view(torch.uint8), quads.flatten().view(torch.uint8))))
        return torch.stack(blocks)

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        spec, height = self.spec, geo.out[0]
        blocks = -(-geo.channels // spec.block)
        lines = max(_LEAST_LINES, -(-height // parts_of(height, threads, _ITEMS_A_THREAD, geo.batch * blocks)))
        lines = round_up(lines, spec.out_lines)
        groups = -(-height // lines)
        items = geo.batch * groups * blocks
        fields = {"items": items, "groups_of_image": groups, "lines": lines, "blocks": blocks, "block_bytes": spec.block_bytes}
        return Plan(DEPTHWISE_DOT, compiled(build, spec, self.isa), fields, items, edge=spec.block)
