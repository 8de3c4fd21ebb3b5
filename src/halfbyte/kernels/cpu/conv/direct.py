"""Convolution of codes without patches: the tiles read each output's taps where they lie in the image.

    acc[m, co] = sum over kh, runs of codes  w[co, kh, …] * x[image + place of output m + kh * line + …]

Threads draw items: a strip of an image's output lines times some panels of a group's outputs. A strip's lines of the image are first
copied into the thread's own memory, with what stands for 0 at their ends and above and below (not where nothing is padded). Then a
tile's rows are R outputs, wherever they lie: each has its place, and from there all walk the same way over the kernel's lines. Where
the codes of a walk come in runs that are not a multiple of 8, as in stems of 3 channels, patches are written one behind the other first,
which is a matter of a few loads and stores, and the walk is one run. Lines of the kernel that lie outside of a small image are left out
where what stands for 0 is 0 as tiles read it.

Arithmetic. int8 outputs: that of `tile.RequantizingTile`. Floating point, of images that were quantized with one scale each:

    y = clamp(float(acc) * (scale of the image * scale[co]) + bias + residual)      acc exact in int32, each step rounded once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfbyte.errors import unreachable
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, function, phase
from halfbyte.kernels.cpu.conv.planned import parts_of
from halfbyte.kernels.cpu.linear.tile import RequantizingTile, Tile
from halfbyte.kernels.cpu.linear.tile_spec import TileSpec
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

DIRECT = LINEAR.extended(
    # items: strips of lines x groups of channels x parts of `group` panels
    *("items", "parts", "group", "groups", "strips", "strip_lines", "rows"),
    "asks",  # 1: while the first rows of a strip are multiplied by a panel's weights, those of the next panel are asked for
    *("group_bytes", "group_weights", "group_bias", "group_out", "scales"),  # scales: one of each image, for floating-point outputs
    # a thread's memory: the lines of a strip, patches where they are written out, sums of each pixel and of each row
    *("thread_bytes", "patches_at", "pixel_sums_at", "sums_at"),
    # the image, and its lines where they are copied: bytes of a line there, of what is copied, of what stands for 0 to its left
    *("height", "out_height", "out_width", "stride_h", "top", "image_bytes", "line_bytes"),
    *("near_lines", "near_line_bytes", "copied_codes", "left_codes", "outside"),
    # a patch: places of a strip's outputs, lines, runs of a line, codes of a run and of a patch that is written out
    *("places", "lines", "line_step", "runs", "run_step", "run_codes", "row_codes"),
    *("walk_places", "walk_runs", "walk_steps"),  # how tiles walk over it: one that is written out is one run
    *("bands", "band_count"),  # `Band`s of a strip
    "lane_places",  # for `arranged.py`
    "left_pairs",  # the share, in sums of pairs, of what pads a row of weights and is not walked over
    # what is summed: pixels (or patches), their bytes and those from one to the next; and where a patch's pixels lie, in pixels
    *("pixels", "pixel_bytes", "pixel_mask", "pixel_step", "pixel_stride", "pixel_line", "taps", "tap_step", "tap_line_step"),
)
PixelSums = Literal["none", "lines", "single"]
SLACK = 128  # bytes behind each part of a thread's memory that whole vectors may reach into
SHARES = 4  # tiles of a strip that ask for the next panel's weights, each for one share
_ITEMS_A_THREAD = 4  # what an item copies, the next one of the same strip finds
_STRIP_OUTPUTS = 1 << 13
_LEAST_OUTPUTS = 1 << 8  # of a strip, which share what is loaded of the weights
_STRIP_BYTES = 1 << 18  # of an image's lines, or of patches, that a thread has at hand


class Band(NamedTuple):
    """Adjacent outputs of a strip that read the same lines of the kernel, as generated code reads them: int64 each.

    Attributes:
        first, stop: The outputs `first` … `stop` - 1.
        first_line, stop_line: Lines of the walk that are multiplied: those inside of the image.
        rows, function: Rows of a tile, and the address of its function.
    """

    first: int
    stop: int
    first_line: int
    stop_line: int
    rows: int
    function: int

    @classmethod
    def load(cls, band: Value, *fields: str) -> list[Value]:
        return [band.load("i64", 8 * cls._fields.index(field), 8) for field in fields]

    @classmethod
    def call(cls, f: Function, band: Value, *arguments: Value) -> None:
        f.call_pointer(band.load("ptr", 8 * cls._fields.index("function"), 8), *arguments)


class Strips(NamedTuple):
    """How the work is cut into items: strips of lines, times parts of the panels of outputs.

    Attributes:
        number, lines: Strips of an image, and lines of outputs of each; the last strip may overlap the one before.
        parts, group: Parts of the panels, and panels of each.
        items: Strips of all images and channel groups, times parts.
    """

    number: int
    lines: int
    parts: int
    group: int
    items: int

    @classmethod
    def of(cls, out: tuple[int, int, int], sizes: Filter, panels: int, threads: int, strip_bytes: Callable[[int], int]) -> Strips:
        """For outputs [B, Ho, Wo] on so many threads; a strip of so many lines takes strip_bytes(lines) of memory."""
        batch, height, width = out
        lines = next((n for n in range(height, 0, -1) if strip_bytes(n) <= _STRIP_BYTES and n * width <= _STRIP_OUTPUTS), 1)
        wanted = threads * _ITEMS_A_THREAD if threads > 1 else 1
        if threads > 1:
            fewest = -(-batch * height * sizes.groups // wanted)
            if fewest * width < _LEAST_OUTPUTS:  # then threads share strips, and each copies them
                fewest = -(-batch * height * sizes.groups * panels // wanted)
            lines = max(1, min(lines, fewest))
        number = -(-height // lines)
        group = -(-panels // parts_of(panels, threads, _ITEMS_A_THREAD, batch * number * sizes.groups))
        parts = -(-panels // group)
        return cls(number, -(-height // number), parts, group, batch * number * sizes.groups * parts)

    def fields(self) -> dict[str, int]:
        return {"strips": self.number, "strip_lines": self.lines, "parts": self.parts, "group": self.group, "items": self.items}


def power_of_two(size: int, most: int) -> int:
    """The largest one that is at most `size` and `most`."""
    return 1 << (max(1, min(size, most)).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class LinesSpec:
    """What the loops around the tiles are compiled for.

    Attributes:
        copied: Bytes that are copied at a time, a power of two that is at most a line; 0: tiles read the image itself.
        patches: Bytes that are written at a time where patches are written out; else 0.
        lines: Lines of a patch that is written out, if they are few and each is one run of at most `patches` bytes; else 0.
        bits: Bits of a weight's code.
        started: Accumulators begin at a sum of the patch's codes (`ISA.row_start`).
        paired: Tiles take products of sums (`ISA.multiplies_sums`).
        width: Bytes of an activation as tiles read it: in copied lines, or in patches that are written out.
        unit: Activations of a patch that are laid out at a time, where patches are written out.
        sums: How the sum of a row follows from sums of pixels: "none": it is that of one pixel; "lines": adjacent outputs have adjacent
            pixels, so that whole vectors are added; "single": one row at a time.
        masked: Memory behind a pixel's codes may be read, so that its last vector is masked.
        tail: Otherwise, codes of a pixel behind its last whole vector, a multiple of 8.
        columns: Outputs of a tile.
        unsigned: Codes are copied with 128 added.
    """

    copied: int
    patches: int
    lines: int
    bits: int
    started: bool
    paired: bool
    width: int
    unit: int
    sums: PixelSums
    masked: bool
    tail: int = 0
    columns: int = PANEL
    unsigned: bool = False


@phase
def build(spec: LinesSpec, isa: ISA, f: Function) -> None:
    """Emit the loops; their arguments are a DIRECT block, the thread and the number of threads."""
    Lines(spec, isa, f).emit()


class Lines(Emitter):
    """The loops around the tiles: items are drawn, and their lines copied."""

    block = DIRECT
    spec: LinesSpec

    def __init__(self, spec: LinesSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, _ = f.parameters
        self.columns = spec.columns
        self.near = self.pointer("scratch") + self.thread * self.get("thread_bytes")
        self.patches, self.pixel_sums, self.sums = (self.near + self.get(f"{part}_at") for part in ("patches", "pixel_sums", "sums"))

    def emit(self) -> None:
        f, get, spec = self.f, self.get, self.spec
        parts, groups, strips, group = get("parts"), get("groups"), get("strips"), get("group")
        counter, panels = self.args + DIRECT.offset("counter"), (get("n") + (self.columns - 1)) // self.columns
        copied, gathered = f.variable(f.value("i64", -1)), f.variable(f.value("i64", -1))
        for item in f.draw_items(counter, get("items")):
            part, place = item % parts, item // parts
            g, strip = place % groups, place // groups
            b, number = strip // strips, strip % strips
            y = f.umin(number * get("strip_lines"), get("out_height") - get("strip_lines"))
            image = self.pointer("x") + b * get("image_bytes")
            top = y * get("stride_h") - get("top")
            if spec.copied:
                new = copied.value.differs(strip)
                with f.when(new):
                    self._copy(image, top)
                    copied.value = strip
                start = self.near + g * get("group_bytes")
            else:
                start = image + top * get("line_bytes") + g * get("group_bytes")
            new = gathered.value.differs(place)
            walked = self.patches if spec.patches else start
            with f.when(new):
                if spec.patches:
                    self._gather(start)
                if spec.started:
                    self._sum(walked)
                gathered.value = place
            first, stop = part * group, f.umin(part * group + group, panels)
            out = self.pointer("out") + (b * get("out_height") + y) * get("out_width") * get("out_stride") + g * get("group_out")
            weights, table = self.pointer("weights") + g * get("group_weights"), self.pointer("bias") + g * get("group_bias")
            self._multiply((first, stop), walked, out, weights, table, self.pointer("scales") + b * 4)

    def _multiply(self, panels: tuple[Value, Value], walked: Value, out: Value, weights: Value, table: Value, scale: Value) -> None:
        """Compute a strip's outputs of some panels, tile by tile.

        Args:
            panels: The first panel, and the end.
            walked: Address from which tiles walk: of the strip in the image or in the thread's copy, or of the patches.
            out, weights, table: Addresses of outputs, weights and biases (or the table) of panel 0.
            scale: Address of the image's scale.
        """
        f, get = self.f, self.get
        for p in f.loop(panels[1], panels[0]):
            columns = f.umin(get("n") - p * self.columns, f.value("i64", self.columns))
            share, more = get("panel_bytes") // SHARES, (p + 1 < panels[1]).select(get("asks"), 0)
            at = weights + p * get("panel_bytes"), table + p * (4 * self.columns), out + p * get("out_bytes") * self.columns
            tile = f.variable(f.value("i64", 0))
            for b in f.loop(get("band_count")):
                band = self.pointer("bands") + b * (8 * len(Band._fields))
                first, stop, rows = Band.load(band, "first", "stop", "rows")
                for t in f.loop((stop - first + (rows - 1)) // rows):
                    m = f.umin(first + t * rows, stop - rows)  # the last tile may overlap the one before
                    places, sums = self.pointer("walk_places") + m * 8, self.sums + m * 4
                    pointers = at[0], walked, places, sums, at[2] + m * get("out_stride"), at[1], scale, band
                    asked = (tile.value < SHARES).select(more, 0) * (get("panel_bytes") + tile.value * share)
                    Band.call(f, band, self.args, *pointers, columns, asked)
                    tile.value = tile.value + 1

    def _near(self, line: Value) -> Value:
        """Which line of the image, from a strip's first on, is that one in the thread's memory."""
        return line

    def _copy(self, image: Value, top: Value) -> None:
        """The lines of a strip from line `top` of the image on, with what lies outside."""
        f, get, spec = self.f, self.get, self.spec
        size, left, line_bytes, width = get("copied_codes"), get("left_codes"), get("near_line_bytes"), 1 if spec.patches else spec.width
        kind, last = vector("i8", spec.copied), size - spec.copied

        def laid_out(codes: Value) -> Value:
            if spec.unsigned:
                return codes ^ 0x80
            return codes if width == 1 else self.isa.laid_out(codes, 8)

        outside = laid_out(self.pointer("outside").load(kind))
        for line in f.loop(get("near_lines")):
            to, y = self.near + line * line_bytes, top + self._near(line)
            inside = y.below(get("height"))
            with f.when(inside):
                for at in f.loop(left, step=spec.copied):  # stores may reach beyond: what comes after is written later
                    to.store(outside, at * width)
                source, middle = image + y * get("line_bytes"), to + left * width
                for at in f.loop(last, step=spec.copied):
                    middle.store(laid_out(source.load(kind, at)), at * width)
                middle.store(laid_out(source.load(kind, last)), last * width)
            start = inside.select((left + size) * width, f.value("i64", 0))
            for at in f.loop(line_bytes, start=start, step=spec.copied * width):
                to.store(outside, at)

    def _gather(self, start: Value) -> None:
        """Patches, one behind the other. What pads a patch is any number: it meets weights that are 0."""
        f, get, width, wide = self.f, self.get, self.spec.patches, self.spec.width > 1
        kind, size, codes = vector("i8", width), get("run_codes"), get("row_codes")
        row = f.variable(self.patches)
        for m in f.loop(get("rows")):
            to = f.variable(row.value + codes if wide else row.value)  # bytes first, in the second half of what they become
            source = start + (self.pointer("places") + m * 8).load("i64", 0, 8)
            if self.spec.lines:
                for n in range(self.spec.lines):
                    (to.value + size * n).store((source + get("line_step") * n).load(kind))
            else:
                at = f.variable(to.value)
                for line in f.loop(get("lines")):
                    for run in f.loop(get("runs")):
                        piece = source + line * get("line_step") + run * get("run_step")
                        for byte in f.loop(size, step=width):
                            at.value.store(piece.load(kind, byte), byte)
                        at.value = at.value + size
            if wide:
                unit = vector("i8", self.spec.unit)
                for code in f.loop(codes, step=self.spec.unit):
                    row.value.store(self.isa.laid_out(to.value.load(unit, code), 8), code * self.spec.width)
            row.value = row.value + codes * self.spec.width

    def _sum(self, start: Value) -> None:
        """What the accumulators of each row begin at: sums of pixels, and of them sums of patches."""
        f, get, isa, kind = self.f, self.get, self.isa, self.spec.sums
        single = self.sums if kind == "none" else self.pixel_sums
        count, step, vectors = get("pixels"), get("pixel_step"), isa.lanes
        buffer = f.alloca(isa.ints, vectors, 64)
        whole = count // vectors * vectors
        for p in f.loop(whole, step=vectors):
            for i in f.loop(vectors):
                (buffer + i * (4 * isa.lanes)).store(self._pixel(start + (p + i) * step), 0, 4 * isa.lanes)
            totals = [buffer.load(isa.ints, i * (4 * isa.lanes), 4 * isa.lanes) for i in range(vectors)]
            (single + p * 4).store(isa.row_start(_sum_of_each(totals), self.spec.bits, self.spec.paired), 0, 4)
        for p in f.loop(count, start=whole):
            (single + p * 4).store(isa.row_start(self._pixel(start + p * step).reduce("add"), self.spec.bits, self.spec.paired), 0, 4)
        match kind:
            case "none":
                return
            case "lines":
                lanes = isa.lanes
            case "single":
                lanes = 1
            case _:
                raise unreachable(kind, "the sums of pixels,")
        width = get("out_width")
        for y in f.loop(get("strip_lines")):
            for x0 in f.loop(width, step=lanes):
                x = f.umin(x0, width - lanes)  # the last vector may overlap the one before
                pixel = self.pixel_sums + (y * get("pixel_line") + x * get("pixel_stride")) * 4
                total = f.variable(f.value(vector("i32", lanes), 0))
                for line in f.loop(get("lines")):
                    for tap in f.loop(get("taps")):
                        at = (line * get("tap_line_step") + tap * get("tap_step")) * 4
                        total.value = total.value + pixel.load(vector("i32", lanes), at, 4)
                (self.sums + (y * width + x) * 4).store(total.value, 0, 4)

    def _pixel(self, codes: Value) -> Value:
        """A vector whose lanes' sum is that of a pixel's codes."""
        f, isa, size = self.f, self.isa, self.get("pixel_bytes")
        total, width = f.variable(f.value(isa.ints, 0)), 4 * isa.lanes
        whole = size // width * width
        for at in f.loop(whole, step=width):
            total.value = self._plus(total.value, codes.load(isa.quads, at))
        if self.spec.masked:
            with f.when(whole.differs(size)):
                mask = self.pointer("pixel_mask").load(isa.quads)
                total.value = self._plus(total.value, codes.load(isa.quads, whole) & mask)
            return total.value
        for some in (32, 16, 8):
            if self.spec.tail & some:
                kind = vector("i8", some)
                part = codes.load(kind, whole + self.spec.tail % some)
                total.value = self._plus(total.value, part.shuffle([*range(some), *[some] * (width - some)], f.value(kind, 0)))
        return total.value

    def _plus(self, total: Value, codes: Value) -> Value:
        isa, f = self.isa, self.f
        return isa.code_sum(f, total, codes, self.spec.bits, self.spec.paired)


def _sum_of_each(vectors: Sequence[Value]) -> Value:
    """The sums of the lanes of as many vectors as each has lanes, in order."""
    n = len(vectors)
    while len(vectors) > 1:  # lanes of two side by side, then neighbours added: half as many vectors, whose lanes are half as many parts
        pairs = zip(vectors[0::2], vectors[1::2], strict=True)
        vectors = [a.shuffle(range(0, 2 * n, 2), b) + a.shuffle(range(1, 2 * n, 2), b) for a, b in pairs]
    return vectors[0]


tile_function = function(*["ptr"] * 9, *["i64"] * 2)


@tile_function
def build_tile(spec: TileSpec, isa: ISA, f: Function) -> None:
    """A function of (arguments, weights, image, places, sums, out, bias or table, scale, `Band`, columns, ahead).

    ahead   bytes from weights to the share of the next ones that is asked for; 0: of those that are there, which is faster than a branch
    """
    tile = (RequantizingDirectTile if spec.out == "i8" else DirectTile)(spec, isa, f)
    passes = PANEL // (isa.lanes * spec.schedule.vectors)
    if passes == 1:
        tile.emit(f.value("i64", 0))
    else:
        for part in f.loop(passes):
            tile.emit(part * (isa.lanes * spec.schedule.vectors))


class DirectTile(Tile):
    """R outputs of an image times a panel of weights."""

    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        self.image, self.places, self.sums, out, bias, self.scale, self.band, columns, self.ahead = f.parameters[2:]
        super().__init__(spec, isa, f, (*f.parameters[:2], self.image, out, bias, columns))
        self.in_registers = False
        self.asks = True  # for the next weights

    def emit(self, first: Value) -> None:
        spec, isa, f = self.spec, self.isa, self.f
        columns = [self._column_start(first, v) for v in range(self.vectors)]
        tail = self.weights + (LINEAR.load(self.args, "panel_bytes") - self.meta_bytes)
        if self.paired:
            left = DIRECT.load(self.args, "left_pairs").to("i32").splat(isa.lanes)
            columns = [column - (self._pair_sums(tail, first, v) - left) for v, column in enumerate(columns)]
        if isa.correction(spec.weight.bits, signed=True):
            starts = [self.sums.load("i32", 4 * i, 4).splat(isa.lanes) for i in range(self.rows)]
            totals = [column + start for start in starts for column in columns]
        else:
            totals = columns * self.rows
        kept = [f.variable(total) for total in isa.transposed_accumulators(self.int8, totals)]
        rows = [self.image + self.places.load("i64", 8 * i, 8) for i in range(self.rows)]

        self._walk(kept, self.weights + first * 4, rows)
        self._finish(isa.transposed_accumulators(self.int8, [k.value for k in kept]), tail, first)
        self._write(first)

    def _walk(self, kept: list[Variable], weights: Value, rows: list[Value]) -> None:
        """Adds all products to the totals. `weights` are those of the kernel's first line, rows the outputs' places."""
        f = self.f
        line_step, runs, run_step, steps = (DIRECT.load(self.args, name) for name in ("line_step", "walk_runs", "run_step", "walk_steps"))
        first, stop = Band.load(self.band, "first_line", "stop_line")
        w, asked = f.variable(weights + first * runs * steps * self.unit_bytes), f.variable(weights + self.ahead)
        for line in f.loop(stop, first):
            for run in f.loop(runs):
                at = f.variable(line * line_step + run * run_step)
                for _ in f.loop(steps):
                    new = self._multiplied(w.value, [row + at.value for row in rows], [k.value for k in kept])
                    if self.asks:
                        for byte in range(0, self.unit_bytes // SHARES, 64):
                            f.prefetch(asked.value + byte, 2)
                        asked.value = asked.value + self.unit_bytes // SHARES
                    for k, total in zip(kept, new, strict=True):
                        k.value = total
                    w.value = w.value + self.unit_bytes
                    at.value = at.value + self.row_unit_bytes

    def _multiplied(self, weights: Value, rows: list[Value], totals: list[Value]) -> list[Value]:
        return self.isa.int8_unit(self.f, self.int8, weights, rows, totals, [])[0]

    def _column_start(self, first: Value, v: int) -> Value:
        return self.f.value(self.isa.ints, 0)

    def _finish(self, sums: list[Value], tail: Value, first: Value) -> None:
        """Codes' sums to the totals that are written."""
        scale = self.scale.load("float", 0, 4).splat(self.isa.lanes)
        scales = [self.isa.to_float(self._scales(tail, first, v), self.spec.weight.scale) * scale for v in range(self.vectors)]
        for n, total in enumerate(sums):
            self._set_total(n, total.to("float") * scales[n % self.vectors])


class RequantizingDirectTile(DirectTile, RequantizingTile):
    def _column_start(self, first: Value, v: int) -> Value:
        return self._column(2, first, v, self.isa.ints)

    def _finish(self, sums: list[Value], tail: Value, first: Value) -> None:
        for n, total in enumerate(sums):
            self._set_total(n, total.bits(self.isa.floats))
