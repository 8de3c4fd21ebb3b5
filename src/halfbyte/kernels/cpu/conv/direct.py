"""The code of convolutions of int8 codes without im2col: tiles of a linear layer read the codes of each patch where they lie.

    acc[m, co] = sum over kh, runs, i of  w[co, kh, run, i] * q[patch offset of m + kh * line_step + run * run_step + i]

m is a pixel of the output, and a run is what is adjacent in memory of a patch's line: the codes of all its taps, or of one tap where taps
are not adjacent (dilation, channel groups). Tiles read codes in one of three places:

    the image            where nothing is padded, and no read reaches behind it
    copied lines         a thread copies the lines of the image that a strip of outputs needs, with padding around
    gathered patches     where runs are no multiple of 8 codes, as in stems of 3 channels: patches are copied from copied lines, one behind
                         the other, each as one run, which takes a few loads and stores

`direct_call.py` plans calls and fills in the arguments `DIRECT`. `StripLoops` emits the loops: threads draw items, a strip of an image's
output lines times some panels of a channel group's outputs, and copy and gather what an item needs, unless their last item had the same.
Then a tile function (`build_tile`) multiplies R outputs by a panel; `arranged.py` and `unsigned.py` have others. Where padding is 0 to the
tiles, the outputs near the upper and lower border of an image skip the lines of the kernel in the padding (`Band`).

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
from halfbyte.kernels.cpu.linear.epilogue import INITIAL_SUM
from halfbyte.kernels.cpu.linear.tile import RequantizingTile, Tile
from halfbyte.kernels.cpu.linear.tile_spec import TileSpec
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

DIRECT = LINEAR.extended(
    # items: strips of lines of all images x channel groups x parts of `part_panels` panels; outputs of a strip
    *("items", "parts", "part_panels", "groups", "strips", "strip_lines", "strip_outputs"),
    "prefetches",  # 1: the first tiles of a strip prefetch the next panel's weights
    *("group_bytes", "group_weights", "group_bias", "group_out"),  # bytes from one channel group to the next
    "scales",  # for floating-point outputs: one of each image
    # a thread's memory: copied lines, then gathered patches, sums of pixels, initial sums of outputs
    *("thread_bytes", "patches_at", "pixel_sums_at", "sums_at"),
    # images: lines and pixels, `top` of the padding, bytes
    *("height", "out_height", "out_width", "stride_h", "top", "image_bytes", "line_bytes"),
    # copied lines of a strip: how many, bytes of each, codes that are copied from the image and those of the padding to their left
    *("copied_lines", "copied_line_bytes", "copied_codes", "left_codes"),
    "outside",  # address of a vector of padding
    # patches: address of the offset of each of a strip's outputs from the first one's, in bytes; lines, runs of a line, bytes between them,
    # codes of a run, and of a gathered patch with its padding
    *("patch_offsets", "patch_lines", "line_step", "runs", "run_step", "run_codes", "gathered_codes"),
    # patches as tiles read them, as one run where they are gathered: offsets of the outputs; runs of a line; units of a run
    *("read_offsets", "read_runs", "read_units"),
    *("bands", "band_count"),  # `Band`s of a strip
    "lane_offsets",  # for `arranged.py`
    "unread_pairs",  # the share, in pair sums, of what pads a row of weights and is not read
    # sums of pixels, or of gathered patches: how many, codes of each in bytes, the mask of their last vector, bytes from one to the next
    *("pixels", "pixel_bytes", "pixel_mask", "pixel_step"),
    # where a patch's pixels lie, in pixels: from an output to the next, and to that of the next line; taps of a line, from a tap to the
    # next, and from a line to the next
    *("pixel_stride", "pixel_line", "taps", "tap_step", "tap_line_step"),
)
RowSums = Literal["none", "lines", "single"]
SLACK = 128  # bytes behind each array of a thread's memory that whole vectors may reach into
PREFETCH_SHARES = 4  # tiles of a strip that prefetch the next panel's weights, a share each
_ITEMS_A_THREAD = 4  # most items of a strip find what the first one copied
_MOST_STRIP_OUTPUTS = 1 << 13
_LEAST_STRIP_OUTPUTS = 1 << 8  # which share what is loaded of the weights
_MOST_STRIP_BYTES = 1 << 18  # of copied lines and gathered patches, which are to stay in a cache


class Band(NamedTuple):
    """Adjacent outputs of a strip that read the same lines of the kernel, as generated code reads them: int64 each.

    Attributes:
        first, stop: The outputs `first` … `stop` - 1.
        first_line, stop_line: Lines of the kernel that are multiplied: those inside of the image.
        rows, function: Outputs of a tile, and the address of its function.
    """

    first: int
    stop: int
    first_line: int
    stop_line: int
    rows: int
    function: int

    @classmethod
    def load(cls, band: Value, *fields: str) -> list[Value]:
        """Emit the loads of fields of the band at this address."""
        return [band.load("i64", 8 * cls._fields.index(field), 8) for field in fields]

    @classmethod
    def call(cls, f: Function, band: Value, *arguments: Value) -> None:
        """Emit the call of its tile function."""
        f.call_pointer(band.load("ptr", 8 * cls._fields.index("function"), 8), *arguments)


class Strips(NamedTuple):
    """How the work is cut into items: strips of lines, times parts of the panels of outputs.

    Attributes:
        number, lines: Strips of an image, and lines of outputs of each; the last strip may overlap the one before.
        parts, part_panels: Parts of the panels, and panels of each.
        items: Strips of all images and channel groups, times parts.
    """

    number: int
    lines: int
    parts: int
    part_panels: int
    items: int

    @classmethod
    def of(cls, out: tuple[int, int, int], sizes: Filter, panels: int, threads: int, strip_bytes: Callable[[int], int]) -> Strips:
        """Return the strips of outputs [B, Ho, Wo] on so many threads; a strip of so many lines takes strip_bytes(lines) of memory."""
        batch, height, width = out
        fitting = (n for n in range(height, 0, -1) if strip_bytes(n) <= _MOST_STRIP_BYTES and n * width <= _MOST_STRIP_OUTPUTS)
        lines = next(fitting, 1)
        if threads > 1:
            wanted_items = threads * _ITEMS_A_THREAD
            fewest = -(-batch * height * sizes.groups // wanted_items)
            if fewest * width < _LEAST_STRIP_OUTPUTS:  # then several threads copy the same strip, each for some panels
                fewest = -(-batch * height * sizes.groups * panels // wanted_items)
            lines = max(1, min(lines, fewest))
        number = -(-height // lines)
        part_panels = -(-panels // parts_of(panels, threads, _ITEMS_A_THREAD, batch * number * sizes.groups))
        parts = -(-panels // part_panels)
        return cls(number, -(-height // number), parts, part_panels, batch * number * sizes.groups * parts)

    def fields(self) -> dict[str, int]:
        """Return the arguments of the same names."""
        return {
            "strips": self.number,
            "strip_lines": self.lines,
            "parts": self.parts,
            "part_panels": self.part_panels,
            "items": self.items,
        }


def power_of_two(size: int, most: int) -> int:
    """Return the largest one that is at most `size` and `most`."""
    return 1 << (max(1, min(size, most)).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class StripSpec:
    """What the loops around the tiles are compiled for.

    Attributes:
        copy_step: Bytes of a line that are copied at a time, a power of two that is at most a line; 0: tiles read the image itself.
        gather_step: Bytes of a run that are copied at a time where patches are gathered; else 0.
        gather_lines: Lines of a gathered patch, if they are few and each is one run of at most `gather_step` bytes; else 0.
        bits: Bits of a weight's code.
        sums_codes: Accumulators begin at a sum of the patch's codes (`ISA.row_start`).
        paired: Tiles take products of sums (`ISA.multiplies_sums`).
        code_bytes: Bytes of a code as tiles read it: in copied lines, or in gathered patches.
        unit: Codes of a gathered patch that are laid out at a time.
        row_sums: How the sum of a patch's codes follows from those of pixels: "none": it is that of one pixel, or was summed as a whole;
            "lines": adjacent outputs have adjacent pixels, so that vectors of sums are added; "single": by outputs.
        masks_tail: Memory behind a pixel's codes may be read, so that its last vector is masked.
        tail: Otherwise, codes of a pixel behind its last whole vector, a multiple of 8.
        columns: Outputs of a tile.
        adds_128: Codes are copied with 128 added, as unsigned bytes.
    """

    copy_step: int
    gather_step: int
    gather_lines: int
    bits: int
    sums_codes: bool
    paired: bool
    code_bytes: int
    unit: int
    row_sums: RowSums
    masks_tail: bool
    tail: int = 0
    columns: int = PANEL
    adds_128: bool = False


@phase
def build(spec: StripSpec, isa: ISA, f: Function) -> None:
    """Emit the loops; their arguments are a DIRECT block, the thread and the number of threads."""
    StripLoops(spec, isa, f).emit()


class StripLoops(Emitter):
    """Emits the loops around the tiles; `amx.py` and `upsampled_conv.py` derive from it.

    Attributes:
        columns: Outputs of a panel, as tiles take them.
        lines, patches, pixel_sums, sums: Addresses of the thread's arrays: copied lines, gathered patches, sums of pixels, initial sums.
    """

    block = DIRECT
    spec: StripSpec

    def __init__(self, spec: StripSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, thread, _ = f.parameters
        self.columns = spec.columns
        self.lines = self.pointer("scratch") + thread * self.get("thread_bytes")
        self.patches, self.pixel_sums, self.sums = (self.lines + self.get(f"{array}_at") for array in ("patches", "pixel_sums", "sums"))

    def emit(self) -> None:
        f, get, spec = self.f, self.get, self.spec
        parts, groups, strips, part_panels = get("parts"), get("groups"), get("strips"), get("part_panels")
        counter, panels = self.args + DIRECT.offset("counter"), (get("n") + (self.columns - 1)) // self.columns
        # What the thread's memory holds: the lines of a strip, and the patches or sums of a strip and channel group.
        copied_strip, gathered = f.variable(f.value("i64", -1)), f.variable(f.value("i64", -1))
        for item in f.draw_items(counter, get("items")):
            part, strip_and_group = item % parts, item // parts
            group, strip = strip_and_group % groups, strip_and_group // groups
            b, number = strip // strips, strip % strips
            oy = f.umin(number * get("strip_lines"), get("out_height") - get("strip_lines"))
            image = self.pointer("x") + b * get("image_bytes")
            top = oy * get("stride_h") - get("top")
            if spec.copy_step:
                is_new = copied_strip.value.differs(strip)
                with f.when(is_new):
                    self._copy_lines(image, top)
                    copied_strip.value = strip
                first_patch = self.lines + group * get("group_bytes")
            else:
                first_patch = image + top * get("line_bytes") + group * get("group_bytes")
            is_new = gathered.value.differs(strip_and_group)
            read_from = self.patches if spec.gather_step else first_patch
            with f.when(is_new):
                if spec.gather_step:
                    self._gather_patches(first_patch)
                if spec.sums_codes:
                    self._sum_patches(read_from)
                gathered.value = strip_and_group
            of_part = part * part_panels, f.umin(part * part_panels + part_panels, panels)
            out = self.pointer("out") + (b * get("out_height") + oy) * get("out_width") * get("out_stride") + group * get("group_out")
            weights, table = self.pointer("weights") + group * get("group_weights"), self.pointer("bias") + group * get("group_bias")
            self._multiply(of_part, read_from, out, weights, table, self.pointer("scales") + b * 4)

    def _multiply(self, panels: tuple[Value, Value], read_from: Value, out: Value, weights: Value, table: Value, scale: Value) -> None:
        """Compute a strip's outputs of some panels, tile by tile.

        Args:
            panels: The first panel, and the end.
            read_from: Address of the first output's patch, as tiles read it: in the image, in copied lines, or gathered.
            out, weights, table: Addresses of outputs, weights and biases (or the requantization table) of the channel group's first panel.
            scale: Address of the image's scale.
        """
        f, get = self.f, self.get
        for p in f.loop(panels[1], panels[0]):
            columns = f.umin(get("n") - p * self.columns, f.value("i64", self.columns))
            share, has_next = get("panel_bytes") // PREFETCH_SHARES, (p + 1 < panels[1]).select(get("prefetches"), 0)
            panel = weights + p * get("panel_bytes"), table + p * (4 * self.columns), out + p * get("out_bytes") * self.columns
            tile = f.variable(f.value("i64", 0))
            for b in f.loop(get("band_count")):
                band = self.pointer("bands") + b * (8 * len(Band._fields))
                first, stop, rows = Band.load(band, "first", "stop", "rows")
                for t in f.loop((stop - first + (rows - 1)) // rows):
                    m = f.umin(first + t * rows, stop - rows)  # the last tile may overlap the one before
                    offsets, sums = self.pointer("read_offsets") + m * 8, self.sums + m * 4
                    pointers = panel[0], read_from, offsets, sums, panel[2] + m * get("out_stride"), panel[1], scale, band
                    prefetched = (tile.value < PREFETCH_SHARES).select(has_next, 0) * (get("panel_bytes") + tile.value * share)
                    Band.call(f, band, self.args, *pointers, columns, prefetched)
                    tile.value = tile.value + 1

    def _line_of_image(self, line: Value) -> Value:
        """Return which line of the image a copied one is, counted from the strip's first."""
        return line

    def _copy_lines(self, image: Value, top: Value) -> None:
        """Copy the lines of the image that a strip needs, from line `top` on, with the padding around."""
        f, get, spec = self.f, self.get, self.spec
        size, left, line_bytes = get("copied_codes"), get("left_codes"), get("copied_line_bytes")
        code_bytes = 1 if spec.gather_step else spec.code_bytes  # gathering lays codes out as tiles read them
        codes, last = vector("i8", spec.copy_step), size - spec.copy_step

        def laid_out(codes: Value) -> Value:
            if spec.adds_128:
                return codes ^ 0x80
            return codes if code_bytes == 1 else self.isa.laid_out(codes, 8)

        outside = laid_out(self.pointer("outside").load(codes))
        for line in f.loop(get("copied_lines")):
            to, y = self.lines + line * line_bytes, top + self._line_of_image(line)
            is_inside = y.below(get("height"))  # unsigned: negative lines are not
            with f.when(is_inside):
                for at in f.loop(left, step=spec.copy_step):  # stores may reach beyond: what comes after is written later
                    to.store(outside, at * code_bytes)
                source, middle = image + y * get("line_bytes"), to + left * code_bytes
                for at in f.loop(last, step=spec.copy_step):
                    middle.store(laid_out(source.load(codes, at)), at * code_bytes)
                middle.store(laid_out(source.load(codes, last)), last * code_bytes)
            padding_starts = is_inside.select((left + size) * code_bytes, f.value("i64", 0))
            for at in f.loop(line_bytes, start=padding_starts, step=spec.copy_step * code_bytes):
                to.store(outside, at)

    def _gather_patches(self, first_patch: Value) -> None:
        """Copy the patches of a strip one behind the other. What pads a patch is any number: it meets weights that are 0."""
        f, get, step, widens = self.f, self.get, self.spec.gather_step, self.spec.code_bytes > 1
        bytes_, run_codes, codes = vector("i8", step), get("run_codes"), get("gathered_codes")
        patch = f.variable(self.patches)
        for m in f.loop(get("strip_outputs")):
            to = f.variable(patch.value + codes if widens else patch.value)  # bytes first, in the second half of what they become
            source = first_patch + (self.pointer("patch_offsets") + m * 8).load("i64", 0, 8)
            if self.spec.gather_lines:
                for n in range(self.spec.gather_lines):
                    (to.value + run_codes * n).store((source + get("line_step") * n).load(bytes_))
            else:
                at = f.variable(to.value)
                for line in f.loop(get("patch_lines")):
                    for run in f.loop(get("runs")):
                        codes_of_run = source + line * get("line_step") + run * get("run_step")
                        for byte in f.loop(run_codes, step=step):
                            at.value.store(codes_of_run.load(bytes_, byte), byte)
                        at.value = at.value + run_codes
            if widens:
                unit = vector("i8", self.spec.unit)
                for code in f.loop(codes, step=self.spec.unit):
                    patch.value.store(self.isa.laid_out(to.value.load(unit, code), 8), code * self.spec.code_bytes)
            patch.value = patch.value + codes * self.spec.code_bytes

    # Sums of codes, at which accumulators begin

    def _sum_patches(self, read_from: Value) -> None:
        """Store what the accumulators of each output of a strip begin at: first for single pixels, then for patches of them."""
        f, get, isa, row_sums = self.f, self.get, self.isa, self.spec.row_sums
        to = self.sums if row_sums == "none" else self.pixel_sums
        count, step, lanes = get("pixels"), get("pixel_step"), isa.lanes
        partial_sums = f.alloca(isa.ints, lanes, 64)  # of as many pixels as a vector has lanes
        whole = count // lanes * lanes
        for p in f.loop(whole, step=lanes):
            for i in f.loop(lanes):
                (partial_sums + i * (4 * lanes)).store(self._pixel_sum(read_from + (p + i) * step), 0, 4 * lanes)
            totals = [partial_sums.load(isa.ints, i * (4 * lanes), 4 * lanes) for i in range(lanes)]
            (to + p * 4).store(isa.row_start(_sum_of_each(totals), self.spec.bits, self.spec.paired), 0, 4)
        for p in f.loop(count, start=whole):
            initial_sum = to + p * 4
            total = self._pixel_sum(read_from + p * step).reduce("add")
            initial_sum.store(isa.row_start(total, self.spec.bits, self.spec.paired), 0, 4)
        match row_sums:
            case "none":
                return
            case "lines":
                self._add_pixel_sums(isa.lanes)
            case "single":
                self._add_pixel_sums(1)
            case _:
                raise unreachable(row_sums, "the sums of pixels,")

    def _add_pixel_sums(self, lanes: int) -> None:
        """Store the sums of each output's pixels, of so many adjacent outputs at a time."""
        f, get, sums = self.f, self.get, vector("i32", lanes)
        width = get("out_width")
        for y in f.loop(get("strip_lines")):
            for x0 in f.loop(width, step=lanes):
                x = f.umin(x0, width - lanes)  # the last vector may overlap the one before
                pixel = self.pixel_sums + (y * get("pixel_line") + x * get("pixel_stride")) * 4
                total = f.variable(f.value(sums, 0))
                for line in f.loop(get("patch_lines")):
                    for tap in f.loop(get("taps")):
                        at = (line * get("tap_line_step") + tap * get("tap_step")) * 4
                        total.value = total.value + pixel.load(sums, at, 4)
                (self.sums + (y * width + x) * 4).store(total.value, 0, 4)

    def _pixel_sum(self, codes: Value) -> Value:
        """Return a vector whose lanes' sum is that of the codes of a pixel, or of a gathered patch, at an address."""
        f, isa, size, tail = self.f, self.isa, self.get("pixel_bytes"), self.spec.tail
        total, register_bytes = f.variable(f.value(isa.ints, 0)), 4 * isa.lanes
        whole = size // register_bytes * register_bytes
        for at in f.loop(whole, step=register_bytes):
            total.value = self._plus(total.value, codes.load(isa.quads, at))
        if self.spec.masks_tail:
            with f.when(whole.differs(size)):
                mask = self.pointer("pixel_mask").load(isa.quads)
                total.value = self._plus(total.value, codes.load(isa.quads, whole) & mask)
            return total.value
        for part in (32, 16, 8):  # of the tail, the largest last in memory
            if tail & part:
                kind = vector("i8", part)
                loaded = codes.load(kind, whole + tail % part)
                padded = loaded.shuffle([*range(part), *[part] * (register_bytes - part)], f.value(kind, 0))  # with zeros
                total.value = self._plus(total.value, padded)
        return total.value

    def _plus(self, total: Value, codes: Value) -> Value:
        isa, f = self.isa, self.f
        return isa.code_sum(f, total, codes, self.spec.bits, self.spec.paired)


def _sum_of_each(vectors: Sequence[Value]) -> Value:
    """Return the sum of the lanes of each vector, in order; there are as many vectors as each has lanes."""
    n = len(vectors)
    while len(vectors) > 1:  # add adjacent lanes of two vectors into one: half as many vectors, with half as many lanes for each sum
        pairs = zip(vectors[0::2], vectors[1::2], strict=True)
        vectors = [a.shuffle(range(0, 2 * n, 2), b) + a.shuffle(range(1, 2 * n, 2), b) for a, b in pairs]
    return vectors[0]


tile_function = function(*["ptr"] * 9, *["i64"] * 2)


@tile_function
def build_tile(spec: TileSpec, isa: ISA, f: Function) -> None:
    """Emit a function of (arguments, weights, read_from, offsets, sums, out, bias, scale, band, columns, prefetched).

    arguments          block of DIRECT
    weights            packed bytes of the panel
    read_from, offsets, sums   the strip's first patch; the offsets of the tile's R outputs from there; what their accumulators begin at
    out, bias          the tile's first output, and the panel's bias or requantization table
    scale              that of the image
    band               a `Band`
    columns            outputs of the panel that the weight has; the others pad it
    prefetched         bytes from the weights to the share of the next panel that is prefetched; 0: of this panel, faster than a branch
    """
    tile = (RequantizingDirectTile if spec.out == "i8" else DirectTile)(spec, isa, f)
    width = isa.lanes * spec.schedule.vectors
    slices = PANEL // width
    if slices == 1:
        tile.emit(f.value("i64", 0))
    else:
        for n in f.loop(slices):
            tile.emit(n * width)


class DirectTile(Tile):
    """Emits a tile of R outputs of an image times a panel of weights, to floating point.

    Attributes:
        read_from, offsets, sums, scale, band, prefetched: Parameters of the function, as `build_tile` has them.
        prefetches: Whether it prefetches weights.
    """

    def __init__(self, spec: TileSpec, isa: ISA, f: Function) -> None:
        self.read_from, self.offsets, self.sums, out, bias, self.scale, self.band, columns, self.prefetched = f.parameters[2:]
        super().__init__(spec, isa, f, (*f.parameters[:2], self.read_from, out, bias, columns))
        self.in_registers = False
        self.prefetches = True

    def emit(self, row_offset: Value) -> None:
        """Emit the tile for V vectors of outputs from row `row_offset` of the panel on."""
        spec, isa, f = self.spec, self.isa, self.f
        columns = [self._initial_sum(row_offset, v) for v in range(self.vectors)]
        meta = self.weights + (LINEAR.load(self.args, "panel_bytes") - self.meta_bytes)
        if self.paired:
            unread = DIRECT.load(self.args, "unread_pairs").to("i32").splat(isa.lanes)
            columns = [column - (self._pair_sums(meta, row_offset, v) - unread) for v, column in enumerate(columns)]
        if isa.correction(spec.weight.bits, signed=True):
            rows = [self.sums.load("i32", 4 * i, 4).splat(isa.lanes) for i in range(self.rows)]
            totals = [column + row for row in rows for column in columns]
        else:
            totals = columns * self.rows
        accumulators = [f.variable(total) for total in isa.transposed_accumulators(self.int8, totals)]
        patches = self._patches()
        self._add_products(accumulators, self.weights + row_offset * 4, patches)
        self._finish(isa.transposed_accumulators(self.int8, [total.value for total in accumulators]), meta, row_offset)
        self._write(row_offset)

    def _patches(self) -> list[Value]:
        """Return the addresses of the outputs' patches."""
        return [self.read_from + self.offsets.load("i64", 8 * i, 8) for i in range(self.rows)]

    def _add_products(self, accumulators: list[Variable], weights: Value, patches: list[Value]) -> None:
        """Add the products of all runs of a band's lines; `weights` are those of the kernel's first line."""
        f = self.f
        line_step, runs, run_step, units = (DIRECT.load(self.args, name) for name in ("line_step", "read_runs", "run_step", "read_units"))
        first, stop = Band.load(self.band, "first_line", "stop_line")
        w, prefetched = f.variable(weights + first * runs * units * self.unit_bytes), f.variable(weights + self.prefetched)
        for line in f.loop(stop, first):
            for run in f.loop(runs):
                at = f.variable(line * line_step + run * run_step)
                for _ in f.loop(units):
                    totals = self._multiply_unit_of(
                        w.value, [patch + at.value for patch in patches], [total.value for total in accumulators]
                    )
                    if self.prefetches:
                        for byte in range(0, self.unit_bytes // PREFETCH_SHARES, 64):
                            f.prefetch(prefetched.value + byte, 2)
                        prefetched.value = prefetched.value + self.unit_bytes // PREFETCH_SHARES
                    for accumulator, total in zip(accumulators, totals, strict=True):
                        accumulator.value = total
                    w.value = w.value + self.unit_bytes
                    at.value = at.value + self.row_unit_bytes

    def _multiply_unit_of(self, weights: Value, codes: list[Value], totals: list[Value]) -> list[Value]:
        """Return the totals plus the products of a unit of weights and of the codes at each row's address."""
        return self.isa.int8_unit(self.f, self.int8, weights, codes, totals, [])[0]

    def _initial_sum(self, row_offset: Value, v: int) -> Value:
        """Return what the sums of vector v of outputs begin at, for all rows."""
        return self.f.value(self.isa.ints, 0)

    def _finish(self, sums: list[Value], meta: Value, row_offset: Value) -> None:
        """Set the totals that `Epilogue._write` reads, from the exact sums; `meta` is the address of the panel's scales."""
        scale = self.scale.load("float", 0, 4).splat(self.isa.lanes)
        scales = [self.isa.to_float(self._scales(meta, row_offset, v), self.spec.weight.scale) * scale for v in range(self.vectors)]
        for n, total in enumerate(sums):
            self._set_total(n, total.to("float") * scales[n % self.vectors])


class RequantizingDirectTile(DirectTile, RequantizingTile):
    """Emits such a tile to int8 codes."""

    def _initial_sum(self, row_offset: Value, v: int) -> Value:
        return self._column(INITIAL_SUM, row_offset, v, self.isa.ints)

    def _finish(self, sums: list[Value], meta: Value, row_offset: Value) -> None:
        for n, total in enumerate(sums):
            self._set_total(n, total.bits(self.isa.floats))
