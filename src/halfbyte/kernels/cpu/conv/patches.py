"""The generated code of a convolution: patches of an image are gathered where the linear tiles read them, and multiplied.

Threads draw items: a chunk of row tiles times some panels of a group's outputs. An item's patches are gathered into the thread's
own memory, unless the item before had the same. `direct`: codes go straight to their places, a unit at a time, with their
sum. Otherwise patches are first laid out as rows of K elements, which a row function of `linear/activations.py` then converts: several,
since what was just stored piece by piece can't be loaded at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Block
from halfbyte.kernels.cpu.codegen.ir import Function, Value, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, phase
from halfbyte.kernels.cpu.linear import driver
from halfbyte.layouts.cpu_tiles import PANEL

CONV = Block(
    (
        *LINEAR.fields,
        # a thread's memory: its patches in the order of tiles, and so many as rows
        *("thread_bytes", "rows_at", "row_stride", "row_count"),
        # items: groups of channels x chunks of row tiles x parts of `group` panels
        *("items", "parts", "group", "chunks", "chunk_tiles"),
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

LEAST_UNIT = 32  # codes that are worth a way of their own: short blocks come in units of 8


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """What the gathering of patches is compiled for.

    direct      codes that a tile reads of one row before those of the next row come: where images are int8, taps whole units of
                so many, and one scale is for all of K; else 0
    correction  for `direct`: what the sum of a patch's codes is multiplied by for the int32 accumulators (`ISA.correction`)
    inside, border   else: bytes that are copied at a time from inside of the image and at its border, powers of two that are at
                most what is copied
    """

    direct: int
    correction: int = 0
    inside: int = 1
    border: int = 1


@phase
def build(spec: GatherSpec, isa: ISA, f: Function) -> None:
    _Phase(spec, isa, f).emit()


class _Phase(Emitter):
    block = CONV
    spec: GatherSpec

    def __init__(self, spec: GatherSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, _ = f.parameters
        self.x, self.y, self.image = (f.variable(f.value(kind, 0)) for kind in ("i64", "i64", "i64"))  # of the next output
        self.patches = self.pointer("scratch") + self.thread * self.get("thread_bytes")
        self.as_rows, self.kept = self.patches + self.get("rows_at"), f.variable(f.value("i64", 0))

    def emit(self) -> None:
        f, get = self.f, self.get
        if not self.spec.direct:
            for at in f.loop(get("thread_bytes") - get("rows_at"), step=64):  # what pads a tap or a row is never written
                self.as_rows.store(f.value("<64 x i8>", 0), at)
        parts, chunks, group = get("parts"), get("chunks"), get("group")
        counter, big, count = self.args + CONV.offset("counter"), get("tile_rows"), get("tiles")
        panels = (get("n") + (PANEL - 1)) // PANEL
        gathered = f.variable(f.value("i64", -1))
        for item in f.draw(lambda: f.fetch_add(counter), get("items")):
            part, place = item % parts, item // parts
            chunk, g = place % chunks, place // chunks
            first = chunk * get("chunk_tiles")
            stop = f.umin(first + get("chunk_tiles"), count + get("lesser_tiles"))
            row = first * big - (first - f.umin(first, count))
            new = gathered.value.differs(place)
            with f.when(new):
                self._gather(self.pointer("x") + g * get("group_bytes"), first, stop, row)
                gathered.value = place
            out = self.pointer("out") + g * get("group_out") + row * get("out_stride")
            weights, bias = self.pointer("weights") + g * get("group_weights"), self.pointer("bias")
            bias = bias.is_null().select(bias, bias + g * get("group_bias"))
            driver.multiply(
                f, self.args, (first, stop), (part * group, f.umin(part * group + group, panels)), self.patches, out, weights, bias
            )

    def _gather(self, image: Value, first: Value, stop: Value, row: Value) -> None:
        """The patches of row tiles first … stop - 1, whose first row is `row`."""
        f, get = self.f, self.get
        big, count = get("tile_rows"), get("tiles")
        line = row // get("out_width")
        self.x.value, self.y.value = row % get("out_width"), line % get("out_height")
        self.image.value = line // get("out_height") * get("image_bytes")
        tile = f.variable(self.patches)
        for t in f.loop(stop, first):
            rows = t.below(count).select(big, big - 1)
            for i in f.loop(rows):
                self._patch(image + self.image.value, tile.value, rows, i)
                self._next()
                if not self.spec.direct:
                    self._convert(tile.value, rows, i + 1)
            tile.value = tile.value + rows * get("row_bytes")

    def _convert(self, tile: Value, rows: Value, stop: Value) -> None:
        """Puts the patches that lie as rows, the last of `stop` of a tile's, into it, where there is no room for more or it is full."""
        f, get, kept = self.f, self.get, self.kept
        kept.value = kept.value + 1
        full = kept.value.equals(get("row_count")) | stop.equals(rows)
        with f.when(full):
            for j in f.loop(kept.value):
                row, i = self.as_rows + j * get("row_stride"), stop - kept.value + j
                f.call_pointer(self.pointer("row_function"), self.args, row, tile, rows, i)
            kept.value = f.value("i64", 0)

    def _next(self) -> None:
        """To the next output: along a line, from line to line, from image to image."""
        f, get = self.f, self.get
        self.x.value = self.x.value + 1
        line_ends = self.x.value.equals(get("out_width"))
        with f.when(line_ends):
            self.x.value = f.value("i64", 0)
            self.y.value = self.y.value + 1
        image_ends = self.y.value.equals(get("out_height"))
        with f.when(image_ends):
            self.y.value = f.value("i64", 0)
            self.image.value = self.image.value + get("image_bytes")

    def _patch(self, image: Value, tile: Value, rows: Value, i: Value) -> None:
        """The patch of the next output into row i of a tile."""
        f, get = self.f, self.get
        top = self.y.value * get("stride_h") - get("top")
        left = self.x.value * get("stride_w") - get("left")
        reach_h, reach_w = (get("kernel_h") - 1) * get("dilation_h"), (get("kernel_w") - 1) * get("dilation_w")
        inside = self._within(top, left) & self._within(top + reach_h, left + reach_w)
        place = _Direct(self, tile, rows, i) if self.spec.direct else _AsRow(f, self.as_rows + self.kept.value * get("row_stride"))
        with f.when(inside):
            start = image + top * get("line_bytes") + left * get("pixel_bytes")
            place.begin()
            for kh in f.loop(get("kernel_h")):
                line = start + kh * get("dilation_h") * get("line_bytes")
                for piece in f.loop(get("pieces")):
                    at = line + piece * get("dilation_w") * get("pixel_bytes")
                    place.copy(at, get("piece_bytes"), get("piece_stride"), self.spec.inside)
        with f.when(inside.equals(0)):
            place.begin()
            for kh in f.loop(get("kernel_h")):
                y = top + kh * get("dilation_h")
                for kw in f.loop(get("kernel_w")):
                    x = left + kw * get("dilation_w")
                    pixel = image + y * get("line_bytes") + x * get("pixel_bytes")
                    source = self._within(y, x).select(pixel, self.pointer("outside"))
                    place.copy(source, get("tap_bytes"), get("tap_stride"), self.spec.border)
        place.end()

    def _within(self, y: Value, x: Value) -> Value:
        """Whether a pixel lies in the image."""
        return y.below(self.get("height")) & x.below(self.get("width"))


class _AsRow:
    """A patch as a row of K elements."""

    def __init__(self, f: Function, start: Value) -> None:
        self.f, self.start = f, start
        self.at = f.variable(start)

    def begin(self) -> None:
        self.at.value = self.start

    def copy(self, source: Value, size: Value, stride: Value, step: int) -> None:
        """`size` bytes, at least `step`, no more and no less: the last `step` of them may be copied twice."""
        f, kind, last = self.f, vector("i8", step), size - step
        for at in f.loop(last, step=step):
            self.at.value.store(source.load(kind, at), at)
        self.at.value.store(source.load(kind, last), last)
        self.at.value = self.at.value + stride

    def end(self) -> None:
        """Nothing is left to do."""


class _Direct:
    """A patch of codes as units among those of the tile's other rows, and the correction by their sum in its field."""

    def __init__(self, phase: _Phase, tile: Value, rows: Value, i: Value) -> None:
        self.f, self.isa, self.correction = phase.f, phase.isa, phase.spec.correction
        self.tile, self.rows, self.i, self.units = tile, rows, i, CONV.load(phase.args, "units")
        self.unit = phase.spec.direct
        self.step = rows * self.unit
        self.at = self.f.variable(tile)
        self.sums = self.f.variable(self.f.value(self.isa.ints, 0))

    def begin(self) -> None:
        self.at.value = self.tile + self.i * self.unit
        self.sums.value = self.f.value(self.isa.ints, 0)

    def copy(self, source: Value, size: Value, _stride: Value, _step: int) -> None:
        f, quads, width = self.f, self.isa.quads, 4 * self.isa.lanes
        ones, together = f.value(quads, 1), min(width, self.unit)
        for at in f.loop(size, step=self.unit):
            total = self.sums.value
            for part in range(0, self.unit, together):
                kind = vector("i8", together)
                codes = source.load(kind, at + part)
                self.at.value.store(codes, part)
                if self.correction:
                    wide = codes if width == together else codes.shuffle(range(width), f.value(kind, 0))  # padded with zeros
                    total = self.isa.dot(f, total, ones, wide, 8)
            self.sums.value = total
            self.at.value = self.at.value + self.step

    def end(self) -> None:
        field = self.tile + self.units * self.step + (self.rows + self.i) * 4  # the second field, see linear/tile.py
        field.store(self.sums.value.reduce("add") * self.correction, 0, 4)
