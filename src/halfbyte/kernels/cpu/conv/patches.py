"""Code generator of the convolution that gathers patches (im2col) into a thread's scratch memory, chunk by chunk, and multiplies them.

`gathered.py` plans a call and fills in the arguments `CONV`; `linear/driver.py` multiplies. A patch is what the kernel covers for one
output pixel: Kh * Kw taps of the channels of one channel group, a row [K] of the product. Images are channels_last. For each item that a
thread draws, the code computes

    out[rows of a chunk of row tiles, outputs of some panels] = patches [rows, K] · weightsᵀ + bias

and gathers the patches only if the thread's previous item had others. There are two ways to write a patch into its row tile:

    _TileWriter   stores int8 codes, unit by unit, directly in the tile's order (`linear/activations.py`), and their sum
    _RowWriter    stores the patch as a plain row [K], which a row function of `linear/activations.py` then converts. Rows are collected
                  before they are converted: a vector load of bytes that narrower stores have just written would stall.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Value, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, phase
from halfbyte.kernels.cpu.linear import driver
from halfbyte.kernels.cpu.linear.block_end import CORRECTION
from halfbyte.layouts.cpu_tiles import PANEL

CONV = LINEAR.extended(
    # scratch memory of a thread: row tiles, and from `rows_offset` on `row_capacity` plain rows (`_RowWriter`)
    *("thread_bytes", "rows_offset", "row_stride", "row_capacity"),
    # items: channel groups x chunks of `chunk_tiles` row tiles x parts of `part_panels` panels
    *("items", "parts", "part_panels", "chunk_tiles"),
    # bytes from one channel group to the next
    *("group_bytes", "group_weights", "group_bias", "group_out"),
    # `ConvGeometry.fields` in pixels (`top`, `left`: padding), and bytes from one image, line and pixel to the next
    *("height", "width", "out_height", "out_width", "stride_h", "stride_w", "top", "left", "dilation_h", "dilation_w"),
    *("kernel_h", "kernel_w", "image_bytes", "line_bytes", "pixel_bytes"),
    # bytes of a tap in the image and from one to the next in a plain row; `outside`: address of the tap in the padding
    *("tap_bytes", "tap_stride", "outside"),
    # the same of a run, the adjacent taps of a line of the kernel that are copied at once where no padding is covered
    *("runs", "run_bytes", "run_stride"),
)

LEAST_UNIT = 32  # codes of a unit from which `_TileWriter` is used; blocks shorter than that have units of 8 codes


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """What the code is compiled for.

    Attributes:
        unit: Codes of a row that are adjacent in a tile, for `_TileWriter`: x is int8, `tap_bytes` is a multiple of `unit`, and K is one
            block. 0: `_RowWriter`.
        correction: `ISA.correction` of signed weights, with `unit`.
        run_step: Bytes of a run that are copied at a time, without `unit`: a power of two, at most `run_bytes`.
        tap_step: The same of a tap.
    """

    unit: int
    correction: int = 0
    run_step: int = 1
    tap_step: int = 1


@phase
def build(spec: GatherSpec, isa: ISA, f: Function) -> None:
    _Convolution(spec, isa, f).emit()


class _Convolution(Emitter):
    """Emits `build`'s function."""

    block = CONV
    spec: GatherSpec

    def __init__(self, spec: GatherSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, _ = f.parameters
        # The output pixel whose patch is gathered next, and the offset of its image in bytes.
        self.out_x, self.out_y, self.image_offset = (f.variable(f.value(kind, 0)) for kind in ("i64", "i64", "i64"))
        self.tiles = self.pointer("scratch") + self.thread * self.get("thread_bytes")
        self.row_buffer, self.pending_rows = self.tiles + self.get("rows_offset"), f.variable(f.value("i64", 0))

    def emit(self) -> None:
        f, get = self.f, self.get
        if not self.spec.unit:
            self._clear_row_buffer()
        parts, chunks, part_panels = get("parts"), get("chunks"), get("part_panels")
        counter, tile_rows, full_tiles = self.args + CONV.offset("counter"), get("tile_rows"), get("tiles")
        panels = (get("n") + (PANEL - 1)) // PANEL
        gathered = f.variable(f.value("i64", -1))  # the `patches_index` that the thread's tiles hold
        for item in f.draw(lambda: f.fetch_add(counter), get("items")):
            part, patches_index = item % parts, item // parts
            chunk, group = patches_index % chunks, patches_index // chunks
            first_tile = chunk * get("chunk_tiles")
            stop_tile = f.umin(first_tile + get("chunk_tiles"), full_tiles + get("lesser_tiles"))
            first_row = first_tile * tile_rows - (first_tile - f.umin(first_tile, full_tiles))
            is_new = gathered.value.differs(patches_index)
            with f.when(is_new):
                self._gather_chunk(self.pointer("x") + group * get("group_bytes"), first_tile, stop_tile, first_row)
                gathered.value = patches_index
            out = self.pointer("out") + group * get("group_out") + first_row * get("out_stride")
            weights, bias = self.pointer("weights") + group * get("group_weights"), self.pointer("bias")
            bias = bias.is_null().select(bias, bias + group * get("group_bias"))
            of_part = part * part_panels, f.umin(part * part_panels + part_panels, panels)
            driver.multiply(f, self.args, (first_tile, stop_tile), of_part, self.tiles, out, weights, bias)

    def _clear_row_buffer(self) -> None:
        """Store 0 in all plain rows: what pads their taps and ends is never written later."""
        for offset in self.f.loop(self.get("thread_bytes") - self.get("rows_offset"), step=64):
            self.row_buffer.store(self.f.value("<64 x i8>", 0), offset)

    def _gather_chunk(self, x: Value, first_tile: Value, stop_tile: Value, first_row: Value) -> None:
        """Write the patches of row tiles first_tile … stop_tile - 1, the first of row `first_row`; `x`: a channel group of the images."""
        f, get = self.f, self.get
        tile_rows, full_tiles = get("tile_rows"), get("tiles")
        out_line = first_row // get("out_width")
        self.out_x.value, self.out_y.value = first_row % get("out_width"), out_line % get("out_height")
        self.image_offset.value = out_line // get("out_height") * get("image_bytes")
        tile = f.variable(self.tiles)
        for t in f.loop(stop_tile, first_tile):
            rows = t.below(full_tiles).select(tile_rows, tile_rows - 1)
            for row in f.loop(rows):
                self._write_patch(x + self.image_offset.value, tile.value, rows, row)
                self._advance()
                if not self.spec.unit:
                    self._convert_pending(tile.value, rows, row + 1)
            tile.value = tile.value + rows * get("row_bytes")

    def _advance(self) -> None:
        """Go to the next output pixel: along a line, from line to line, from image to image."""
        f, get = self.f, self.get
        self.out_x.value = self.out_x.value + 1
        line_ends = self.out_x.value.equals(get("out_width"))
        with f.when(line_ends):
            self.out_x.value = f.value("i64", 0)
            self.out_y.value = self.out_y.value + 1
        image_ends = self.out_y.value.equals(get("out_height"))
        with f.when(image_ends):
            self.out_y.value = f.value("i64", 0)
            self.image_offset.value = self.image_offset.value + get("image_bytes")

    def _convert_pending(self, tile: Value, rows: Value, stop: Value) -> None:
        """Count one more plain row, and convert all into rows … `stop` - 1 of a tile of `rows` rows if the buffer or the tile is full."""
        f, get, pending = self.f, self.get, self.pending_rows
        pending.value = pending.value + 1
        is_full = pending.value.equals(get("row_capacity")) | stop.equals(rows)
        with f.when(is_full):
            for j in f.loop(pending.value):
                source, row = self.row_buffer + j * get("row_stride"), stop - pending.value + j
                f.call_pointer(self.pointer("row_function"), self.args, source, tile, rows, row)
            pending.value = f.value("i64", 0)

    def _write_patch(self, image: Value, tile: Value, rows: Value, row: Value) -> None:
        """Write the patch of the next output pixel as row `row` of a tile of `rows` rows."""
        f, get = self.f, self.get
        top = self.out_y.value * get("stride_h") - get("top")
        left = self.out_x.value * get("stride_w") - get("left")
        reach_h, reach_w = (get("kernel_h") - 1) * get("dilation_h"), (get("kernel_w") - 1) * get("dilation_w")
        covers_no_padding = self._is_inside(top, left) & self._is_inside(top + reach_h, left + reach_w)
        writer: _PatchWriter
        if self.spec.unit:
            writer = _TileWriter(self, tile, rows, row)
        else:
            writer = _RowWriter(f, self.row_buffer + self.pending_rows.value * get("row_stride"))
        with f.when(covers_no_padding):
            self._copy_runs(writer, image, top, left)
        with f.when(covers_no_padding.equals(0)):
            self._copy_taps(writer, image, top, left)
        writer.end()

    def _copy_runs(self, writer: _PatchWriter, image: Value, top: Value, left: Value) -> None:
        """Copy a patch that covers no padding: `runs` from each line."""
        f, get = self.f, self.get
        start = image + top * get("line_bytes") + left * get("pixel_bytes")
        writer.begin()
        for kh in f.loop(get("kernel_h")):
            line = start + kh * get("dilation_h") * get("line_bytes")
            for run in f.loop(get("runs")):
                source = line + run * get("dilation_w") * get("pixel_bytes")
                writer.copy(source, get("run_bytes"), get("run_stride"), self.spec.run_step)

    def _copy_taps(self, writer: _PatchWriter, image: Value, top: Value, left: Value) -> None:
        """Copy a patch tap by tap, from `outside` where a tap lies in the padding."""
        f, get = self.f, self.get
        writer.begin()
        for kh in f.loop(get("kernel_h")):
            y = top + kh * get("dilation_h")
            for kw in f.loop(get("kernel_w")):
                x = left + kw * get("dilation_w")
                pixel = image + y * get("line_bytes") + x * get("pixel_bytes")
                source = self._is_inside(y, x).select(pixel, self.pointer("outside"))
                writer.copy(source, get("tap_bytes"), get("tap_stride"), self.spec.tap_step)

    def _is_inside(self, y: Value, x: Value) -> Value:
        """Return whether a pixel lies in the image; negative coordinates do not, as `below` compares unsigned."""
        return y.below(self.get("height")) & x.below(self.get("width"))


class _PatchWriter(Protocol):
    """Emits the stores of one patch: `begin` once on each path of the code, `copy` for each run or tap in the order of K, then `end`."""

    def begin(self) -> None:
        """Go to the start of the patch."""

    def copy(self, source: Value, size: Value, stride: Value, step: int) -> None:
        """Store `size` bytes of the image, `step` at a time; in a plain row the next ones follow after `stride` bytes."""

    def end(self) -> None:
        """Finish the patch."""


class _RowWriter:
    """Stores a patch as a plain row [K] at `start`."""

    def __init__(self, f: Function, start: Value) -> None:
        self.f, self.start = f, start
        self.target = f.variable(start)

    def begin(self) -> None:
        self.target.value = self.start

    def copy(self, source: Value, size: Value, stride: Value, step: int) -> None:
        """Store exactly `size` >= `step` bytes: the last vector overlaps the one before where `size` is no multiple of `step`."""
        f, kind, last = self.f, vector("i8", step), size - step
        for offset in f.loop(last, step=step):
            self.target.value.store(source.load(kind, offset), offset)
        self.target.value.store(source.load(kind, last), last)
        self.target.value = self.target.value + stride

    def end(self) -> None:
        """Do nothing: `_convert_pending` follows."""


class _TileWriter:
    """Stores a patch of codes in row `row` of a tile, and `correction` times the sum of its codes in its field CORRECTION.

    The units of the tile's rows alternate, and the fields of its single block follow: unit u is at (u * rows + row) * unit, CORRECTION at
    units * rows * unit + (CORRECTION * rows + row) * 4.
    """

    def __init__(self, convolution: _Convolution, tile: Value, rows: Value, row: Value) -> None:
        self.f, self.isa, self.correction = convolution.f, convolution.isa, convolution.spec.correction
        self.tile, self.rows, self.row, self.units = tile, rows, row, CONV.load(convolution.args, "units")
        self.unit = convolution.spec.unit
        self.unit_stride = rows * self.unit
        self.target = self.f.variable(tile)
        self.sums = self.f.variable(self.f.value(self.isa.ints, 0))

    def begin(self) -> None:
        self.target.value = self.tile + self.row * self.unit
        self.sums.value = self.f.value(self.isa.ints, 0)

    def copy(self, source: Value, size: Value, _stride: Value, _step: int) -> None:
        f, quads, register_bytes = self.f, self.isa.quads, 4 * self.isa.lanes
        ones, vector_bytes = f.value(quads, 1), min(register_bytes, self.unit)
        for offset in f.loop(size, step=self.unit):
            total = self.sums.value
            for at in range(0, self.unit, vector_bytes):
                kind = vector("i8", vector_bytes)
                codes = source.load(kind, offset + at)
                self.target.value.store(codes, at)
                if self.correction:
                    is_whole = vector_bytes == register_bytes
                    padded = codes if is_whole else codes.shuffle(range(register_bytes), f.value(kind, 0))  # with zeros
                    total = self.isa.dot(f, total, ones, padded, 8)
            self.sums.value = total
            self.target.value = self.target.value + self.unit_stride

    def end(self) -> None:
        assert CORRECTION == 1, "the address below is that of the second field"
        field = self.tile + self.units * self.unit_stride + (self.rows + self.row) * 4
        field.store(self.sums.value.reduce("add") * self.correction, 0, 4)
