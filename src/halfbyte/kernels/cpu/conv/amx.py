"""Convolution of int8 codes on matrix units (AMX), whose tile registers are loaded from the image where the codes lie.

    acc[m, co] = sum over units u, i of  w[co, u, i] * q[offset of output m + unit_offsets[u] + i]          i < 64

A unit is 64 adjacent codes under the kernel: of one of its lines, or of one tap where taps are not adjacent (dilation, channel groups).
What a unit reads beyond the end of a line or tap meets weights of 0.

A tile register takes 16 rows of 64 bytes at a constant distance. So a tile is up to 32 outputs whose codes are `row_step` bytes apart:
consecutive outputs of a line, and of the next lines, with each line of outputs taken to be as long as a line in memory. The outputs between
two lines are computed, too, and overwritten by those of the next line. Codes are read
    in the image itself      where nothing is padded, the vertical stride is 1 and units are full, as for most kernels of 1 x 1;
    in copied lines          of a strip of outputs, with their padding, by the loops of `direct.py`. With a vertical stride, lines of
                             equal number modulo the stride are adjacent (`_CopiedLines`);
    in interleaved lines     with vertical stride 2, where a line of the kernel takes at most half a unit, as in stems: pairs of copied
                             lines are interleaved pixel by pixel, so that one unit has two lines of the kernel.

The sums of 32 outputs x 32 columns are in four tile registers. While they are summed, those of the tile before become outputs, some rows
with each unit: vector and matrix instructions take different ports of a core (`_Pending`).

Weights have a form of their own, computed at the first call (`Units.weights`): a signed byte for each code, so that no sums of activations
are needed. Arithmetic: that of `direct.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.elementary import rounded_codes
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_amx import COLUMN_BYTES, ROWS, AMXTiles, Register
from halfbyte.kernels.cpu.codegen.kernel import compiled, phase
from halfbyte.kernels.cpu.conv.direct import DIRECT, SLACK, StripLoops, Strips, StripSpec, power_of_two
from halfbyte.kernels.cpu.conv.direct_call import group_fields, image_fields
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, tile_rows
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

MATRIX = DIRECT.extended(
    # address of the offset of each unit's codes from an output's; bytes from an output's to the next one's; address of the line of the
    # image that each copied one is, from a strip's first on
    *("unit_offsets", "row_step", "copied_from"),
    # rows of the pending tile that are written with each unit, but for so many first ones
    *("rows_a_unit", "waiting_units"),
)
UNIT = COLUMN_BYTES  # codes
_VECTORS = 2  # of columns
_FIRST_A, _FIRST_W = 4, 6  # tile registers of activations and of weights; 0 … 3 have sums
_TILE_COST = 1  # of beginning a tile, in rows
_PREFETCH_AHEAD = 8192  # bytes of weights, in a panel's first tile
_WAITING_UNITS = 2  # before the first pending row is written: what a tile register stored cannot be loaded at once
_MOST_PADDING = 4  # products with those of padded units and panels, to those without: up to there it is faster than vectors
_LEAST_OUTPUTS = 9


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """What the kernel is compiled for.

    Attributes:
        copy_step: Bytes that are copied at a time; 0: tiles read the image itself.
        interleaved_channels: Channels of a pixel, where pairs of lines are interleaved; else 0.
        rows: Outputs of a tile, at most 32.
        out: Element type of outputs: "i8", or "f32", "bf16" or "f16" for images with one scale each.
        residual: Outputs have a residual added.
    """

    copy_step: int
    interleaved_channels: int
    rows: int
    out: Kind
    residual: bool


@phase
def build(spec: MatrixSpec, isa: AMXTiles, f: Function) -> None:
    """Emit the kernel; its arguments are a MATRIX block, its thread and the number of threads."""
    _Matrix(spec, isa, f).emit()


class _Pending(NamedTuple):
    """A tile whose sums are in memory, and become outputs while the next one is multiplied.

    Attributes:
        rows: Outputs of the tile; 0 before the first one.
        out: Address of the panel's first column in the strip's first output.
        offsets: Address of the offsets of the tile's outputs from there, in bytes.
        table: Address of the panel's biases, or of its requantization table.
        scales: Address of the panel's weight scales.
        image_scale: Address of the image's scale.
        columns: Outputs of the weight from the panel's first column on, at most PANEL.
    """

    rows: Variable
    out: Variable
    offsets: Variable
    table: Variable
    scales: Variable
    image_scale: Variable
    columns: Variable


class _Matrix(StripLoops):
    """Emits the kernel: the loops of `StripLoops`, with tiles of matrix products.

    Attributes:
        matrix: The specification; `spec` is that of the loops.
        parts: First row and number of rows of each half of a tile, which has a tile register of activations.
        sums: Memory of the sums of the pending tile, int32 [rows, PANEL].
        pending: The pending tile.
        partial_row: Memory of a row of outputs of an incomplete panel.
        low, high: The clamp, in all lanes.
    """

    block = MATRIX
    isa: AMXTiles

    def __init__(self, spec: MatrixSpec, isa: AMXTiles, f: Function) -> None:
        loops = StripSpec(
            copy_step=spec.copy_step,
            gather_step=0,
            gather_lines=0,
            bits=8,
            sums_codes=False,
            paired=False,
            code_bytes=1,
            unit=UNIT,
            row_sums="none",
            masks_tail=False,
        )
        super().__init__(loops, isa, f)
        self.matrix, self.integer = spec, spec.out == "i8"
        _, self.element, self.out_bytes = element_of(spec.out)
        half = spec.rows if spec.rows <= ROWS else (spec.rows + 1) // 2
        self.parts = [(start, min(half, spec.rows - start)) for start in range(0, spec.rows, half)]
        self.sums = f.alloca("i8", spec.rows * 4 * PANEL, 64)
        rows, (out, offsets, table, scales, image_scale) = f.variable(f.value("i64", 0)), (f.variable(self.args) for _ in range(5))
        self.pending = _Pending(rows, out, offsets, table, scales, image_scale, f.variable(f.value("i64", PANEL)))
        self.partial_row = f.alloca("i8", PANEL * self.out_bytes, 64)
        self.low, self.high = (bound.splat(isa.lanes) for bound in MATRIX.load_floats(self.args, "clamp"))

    def emit(self) -> None:
        shapes = [Register(COLUMN_BYTES, ROWS)] * 8
        for i, (_, rows) in enumerate(self.parts):
            shapes[_FIRST_A + i] = Register(COLUMN_BYTES, rows)
            for v in range(_VECTORS):
                shapes[i * _VECTORS + v] = Register(COLUMN_BYTES, rows)
        self.isa.configure(self.f, shapes)
        super().emit()
        self._write_outputs(self.f.value("i64", 0), self.pending.rows.value)
        self.isa.release(self.f)

    def _copy_lines(self, image: Value, top: Value) -> None:
        super()._copy_lines(image, top)
        if not self.matrix.interleaved_channels:
            return
        f, channels, size, kind = self.f, self.matrix.interleaved_channels, self.get("copied_line_bytes"), vector("i8", UNIT)
        pixels = UNIT // (2 * channels)  # at a time
        picks = [b // channels % 2 * UNIT + b // (2 * channels) * channels + b % channels for b in range(2 * channels * pixels)]
        picks += [0] * (UNIT - len(picks))  # overwritten by what comes next
        for pair in f.loop(self.get("copied_lines") // 2):
            lines, to = self.lines + pair * 2 * size, self.patches + pair * 2 * size
            for at in f.loop(size, step=pixels * channels):
                first, second = (lines + at).load(kind), (lines + size + at).load(kind)
                to.store(first.shuffle(picks, second), at * 2)

    def _line_of_image(self, line: Value) -> Value:
        return (self.pointer("copied_from") + line * 8).load("i64", 0, 8)

    def _multiply(self, panels: tuple[Value, Value], read_from: Value, out: Value, weights: Value, table: Value, scale: Value) -> None:
        f, get = self.f, self.get
        rows, read_from = get("strip_outputs"), self.patches if self.matrix.interleaved_channels else read_from
        for p in f.loop(panels[1], panels[0]):
            panel, at = weights + p * get("panel_bytes"), table + p * (4 * PANEL)
            for t in f.loop((rows + (self.matrix.rows - 1)) // self.matrix.rows):
                m = f.umin(t * self.matrix.rows, rows - self.matrix.rows)  # the last tile may overlap the one before
                self._tile(read_from + m * get("row_step"), panel, at, t.equals(0), p.equals(panels[0]))
                to, offsets = out + p * (PANEL * self.out_bytes), self.pointer("patch_offsets") + m * 8
                scales = panel + (get("panel_bytes") - 4 * PANEL)
                columns = f.umin(get("n") - p * PANEL, f.value("i64", PANEL))
                tile = f.value("i64", self.matrix.rows), to, offsets, at, scales, scale, columns
                for variable, value in zip(self.pending, tile, strict=True):
                    variable.value = value

    def _tile(self, image: Value, weights: Value, table: Value, new_weights: Value, new_image: Value) -> None:
        """Sum the products of a tile, while the sums of the pending one become outputs.

        Args:
            image: Address of the codes of the tile's first output.
            weights, table: Addresses of the panel's weights, and of its biases or table.
            new_weights, new_image: Whether they are read for the first time: the next ones are prefetched then.
        """
        f, isa, get = self.f, self.isa, self.get
        step, rows_a_unit, waiting, left = get("row_step"), get("rows_a_unit"), get("waiting_units"), self.pending.rows.value
        start = table + get("table_stride") * 2
        for i in range(len(self.parts)):
            for v in range(_VECTORS):
                if self.integer:
                    isa.tile_load(f, i * _VECTORS + v, start + v * 64, 0)  # the same in all rows
                else:
                    isa.tile_zero(f, i * _VECTORS + v)
        for u in f.loop(get("units")):
            w, a = weights + u * (UNIT * PANEL), image + (self.pointer("unit_offsets") + u * 8).load("i64", 0, 8)
            with f.when(new_weights):
                for line in range(0, UNIT * PANEL, 64):
                    f.prefetch(w + (_PREFETCH_AHEAD + line))
            if not self.spec.copy_step:
                with f.when(new_image):
                    for row in range(self.matrix.rows):
                        f.prefetch(a + step * (self.matrix.rows + row))
            for v in range(_VECTORS):
                isa.tile_load(f, _FIRST_W + v, w + v * (ROWS * COLUMN_BYTES), COLUMN_BYTES)
            for i, (first, _) in enumerate(self.parts):
                isa.tile_load(f, _FIRST_A + i, a + step * first, step)
                for v in range(_VECTORS):
                    isa.tile_product(f, i * _VECTORS + v, _FIRST_A + i, _FIRST_W + v)
            with f.when(u > waiting - 1):
                done = (u - waiting) * rows_a_unit
                self._write_outputs(f.umin(done, left), f.umin(done + rows_a_unit, left))
        for i, (first, _) in enumerate(self.parts):
            for v in range(_VECTORS):
                isa.tile_store(f, i * _VECTORS + v, self.sums + (first * 4 * PANEL + v * 64), 4 * PANEL)

    def _write_outputs(self, first: Value, stop: Value) -> None:
        """Write the outputs of rows first … stop - 1 of the pending tile."""
        f, isa, integer = self.f, self.isa, self.integer
        out, offsets, table, scales, image_scale, columns = (variable.value for variable in self.pending[1:])
        whole = columns.equals(PANEL)
        stride = self.get("table_stride")
        with f.when(first < stop):
            if integer:
                factors = [[(table + stride * row).load(isa.floats, v * 64, 4) for row in (0, 1)] for v in range(_VECTORS)]
            else:
                of_image = image_scale.load("float", 0, 4).splat(isa.lanes)
                factors = [[table.load(isa.floats, v * 64, 4), scales.load(isa.floats, v * 64, 4) * of_image] for v in range(_VECTORS)]
            for r in f.loop(stop, first):
                to, sums = out + (offsets + r * 8).load("i64", 0, 8), self.sums + r * (4 * PANEL)
                dest = whole.select(to, self.partial_row)
                residual = self._residual(to, whole, columns) if self.matrix.residual else None
                for v, (offset, multiplier) in enumerate(factors):
                    total = sums.load(isa.ints, v * 64, 64).to("float")
                    at = v * isa.lanes * self.out_bytes
                    if integer:
                        value = f.fma(total, multiplier, offset).max_keeping_nan(self.low).min_keeping_nan(self.high)
                        dest.store(rounded_codes(value), at)
                        continue
                    value = total * multiplier + offset
                    if residual is not None:
                        value = value + isa.to_float(residual.load(vector(self.element, isa.lanes), at), self.matrix.out)
                    dest.store(isa.from_float(value.max_keeping_nan(self.low).min_keeping_nan(self.high), self.matrix.out), at)
                with f.when(whole.equals(0)):
                    self._copy_columns(self.partial_row, to, columns)

    def _residual(self, to: Value, whole: Value, columns: Value) -> Value:
        """Return the address of the residual of a row of outputs at `to`; that of an incomplete panel is copied to whole vectors first."""
        source = to + self.get("residual")
        with self.f.when(whole.equals(0)):
            self._copy_columns(source, self.partial_row, columns)
        return whole.select(source, self.partial_row)

    def _copy_columns(self, source: Value, to: Value, columns: Value) -> None:
        for c in self.f.loop(columns):
            at = c * self.out_bytes
            (to + at).store((source + at).load(self.element, 0, 1), 0, 1)


@dataclass(frozen=True, slots=True)
class Units:
    """How the codes under a kernel are cut into units.

    Attributes:
        lines: Lines of units: those of the kernel, or pairs of them where lines are interleaved.
        runs: Runs of adjacent codes in a line: one, or one for each tap.
        run: Codes of a run.
        interleaved: Lines of the image that are interleaved to one, 2; or 1.
    """

    lines: int
    runs: int
    run: int
    interleaved: int

    @classmethod
    def of(cls, sizes: Filter, window: Window) -> Units:
        (kh, kw), channels = sizes.kernel, sizes.channels
        if window.dilation[1] > 1 or sizes.groups > 1:
            return cls(kh, kw, channels, 1)
        interleaved = 2 if kh > 1 and window.stride[0] == 2 and window.dilation[0] == 1 and 2 * kw * channels <= UNIT else 1
        return cls(-(-kh // interleaved), 1, kw * channels * interleaved, interleaved)

    @property
    def units_of_run(self) -> int:
        return -(-self.run // UNIT)

    @property
    def number(self) -> int:
        return self.lines * self.runs * self.units_of_run

    def weights(self, codes: Codes, sizes: Filter) -> Tensor:
        """Return the weights as the kernel reads them: for each group and panel int8 [units, 2, 16, 16, 4], and 32 float32 scales."""
        n, (kh, kw) = sizes.out // sizes.groups, sizes.kernel
        panels = -(-n // PANEL)
        more = panels * PANEL - n
        w = codes.values().to(torch.int8).view(sizes.groups, n, kh, kw, sizes.channels)
        w = torch.nn.functional.pad(w, (0, 0, 0, 0, 0, self.lines * self.interleaved - kh, 0, more))
        w = w.view(sizes.groups, panels * PANEL, self.lines, self.interleaved, kw, sizes.channels).transpose(3, 4)
        w = w.reshape(sizes.groups, panels * PANEL, self.lines * self.runs, self.run)
        w = torch.nn.functional.pad(w, (0, self.units_of_run * UNIT - self.run))
        w = w.view(sizes.groups, panels, _VECTORS, ROWS, self.number, COLUMN_BYTES // 4, 4)
        scales = codes.scale.reshape(-1).float().expand(sizes.out).reshape(sizes.groups, n)
        scales = torch.nn.functional.pad(scales, (0, more)).view(sizes.groups, panels, PANEL)
        laid_out = torch.cat((w.permute(0, 1, 4, 2, 5, 3, 6).flatten(2), scales.view(torch.int8)), dim=2).flatten()
        aligned = torch.empty(laid_out.numel() + 64, dtype=torch.int8, device="cpu")
        return aligned[-aligned.data_ptr() % 64 :][: laid_out.numel()].copy_(laid_out)


@dataclass(frozen=True, slots=True)
class _CopiedLines:
    """The order in which a thread copies the lines of the image that units are read from.

    Lines of equal number modulo the vertical stride (of one phase) are adjacent, so that those of adjacent outputs are, too. Where lines
    are interleaved, all are in their order.

    Attributes:
        units: How the kernel is cut.
        stride: The vertical one.
        lines_of: For each line of units its phase, and its distance from the phase's first line, in lines.
        reach: For each phase the largest such distance.
    """

    units: Units
    stride: int
    lines_of: tuple[tuple[int, int], ...]
    reach: dict[int, int]

    @classmethod
    def of(cls, units: Units, window: Window) -> _CopiedLines:
        stride, step = window.stride[0], window.dilation[0]
        phases = 1 if units.interleaved > 1 else stride
        lines_of = tuple((k * step % phases, k * step // phases) for k in range(units.lines))
        return cls(units, stride, lines_of, {phase: max(down for p, down in lines_of if p == phase) for phase, _ in lines_of})

    def lines(self, outputs: int) -> list[int]:
        """Return the numbers of the lines of the image, from a strip's first on, that so many lines of outputs need."""
        if self.units.interleaved > 1:
            step_down = self.stride // self.units.interleaved  # from line to line of outputs, in interleaved lines
            return list(range(self.units.interleaved * (outputs * step_down + self.units.lines - 1)))
        return [phase + self.stride * j for phase in self.reach for j in range(outputs + self.reach[phase])]

    def unit_offsets(self, outputs: int, line_bytes: int, tap_step: int) -> list[int]:
        """Return the offset of each unit's codes from an output's place, in bytes.

        Args:
            outputs: Lines of outputs of a strip.
            line_bytes, tap_step: Bytes of a copied line, and from a tap to the next.
        """
        starts = dict(zip(self.reach, itertools.accumulate((outputs + down for down in self.reach.values()), initial=0), strict=False))
        return [
            (starts[phase] + down) * line_bytes * self.units.interleaved + tap * tap_step + c
            for phase, down in self.lines_of
            for tap in range(self.units.runs)
            for c in range(0, self.units.run, UNIT)
        ]


def supports(sizes: Filter, window: Window, out: tuple[int, int, int], isa: ISA) -> bool:
    """Return whether `MatrixConvKernel` takes weights of these sizes, for outputs [B, Ho, Wo], and is faster than `direct.py`."""
    fmt, n = sizes.format, sizes.out // sizes.groups
    if isa.matrix is None or fmt.bits != 8 or fmt.zero != "none" or isinstance(fmt.block, int) or out[0] * out[1] * out[2] < _LEAST_OUTPUTS:
        return False
    return Units.of(sizes, window).number * UNIT * round_up(n, PANEL) <= _MOST_PADDING * sizes.k * n


class MatrixConvKernel(PlannedConv):
    """The compiled convolution of int8 images of any size.

    Conditions that the caller has checked: `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights` is what
    `weights_of` returned; `bias` is the tables of the groups, or, for floating-point outputs, contiguous float32 [Co].
    """

    scales_at = MATRIX.offset("scales")
    specializes_residual = True

    def __init__(self, sizes: Filter, window: Window, isa: AMXTiles, out: torch.dtype = torch.int8) -> None:
        super().__init__()
        self.sizes, self.isa = sizes, isa
        self.out_dtype = self.result = out
        self.units = Units.of(sizes, window)
        self.form = f"units of {self.units}"
        self.n = sizes.out // sizes.groups
        self.panels = -(-self.n // PANEL)

    def weights_of(self, codes: Codes) -> Tensor:
        """Return the weights as the kernel reads them; kernels of one `form` have the same."""
        return self.units.weights(codes, self.sizes)

    def table(self, bias: Tensor | None, scales: Tensor | None) -> Tensor | None:
        """Return a bias that is padded to whole panels for each group; for int8 outputs the tables, as they are."""
        if scales is None or (bias is not None and self.n % PANEL == 0):
            return bias
        if bias is None:
            return torch.zeros(self.sizes.groups * self.panels * PANEL, dtype=torch.float32, device="cpu")
        return torch.nn.functional.pad(bias.view(self.sizes.groups, self.n), (0, self.panels * PANEL - self.n))

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        sizes, units, window, channels = self.sizes, self.units, geo.window, geo.channels
        (height, width), (ho, wo) = geo.image, geo.out
        (kh, kw), (sh, sw), (dh, dw), (top, _, left, _) = geo.kernel, window.stride, window.dilation, window.padding
        line_pixels = round_up((wo - 1) * sw + (kw - 1) * dw + 1, sw)
        inside = (ho - 1) * sh - top + (kh - 1) * dh < height
        in_image = top == left == 0 and inside and sh == 1 and line_pixels == width and units.run % UNIT == 0
        copies = 0 if in_image else units.interleaved  # of a line: as it is, and interleaved
        line_bytes, copied = line_pixels * channels, _CopiedLines.of(units, window)
        strips = Strips.of(geo.outputs, sizes, self.panels, threads, lambda n: copies * len(copied.lines(n)) * line_bytes)

        copied_from = torch.tensor(copied.lines(strips.lines), device="cpu")
        image = image_fields(geo, line_pixels, len(copied_from), line_bytes)
        copied_bytes = round_up(len(copied_from) * line_bytes + SLACK, 64)
        pitch = line_pixels // sw  # outputs from a line to the next, with those between them
        m = (strips.lines - 1) * pitch + wo
        rows = tile_rows(m, 2 * ROWS, _TILE_COST)
        index = torch.arange(m, device="cpu")
        # An output between two lines is written to the next line's first one, before that is.
        out_offsets = (index // pitch * wo + (index % pitch).clamp(max=wo)) * (sizes.out * self.out_dtype.itemsize)
        unit_offsets = torch.tensor(copied.unit_offsets(strips.lines, line_bytes, dw * channels), device="cpu")
        waiting = min(_WAITING_UNITS, len(unit_offsets) // 3)
        panel_bytes = len(unit_offsets) * UNIT * PANEL + 4 * PANEL
        fields = {
            **strips.fields(),
            **group_fields(sizes, self.out_dtype, self.panels, panel_bytes, padded_bias=True),
            **image,
            "strip_outputs": m,
            "group_bytes": sizes.channels,
            "thread_bytes": copies * copied_bytes,
            "patches_at": copied_bytes,
            "patch_offsets": out_offsets.data_ptr(),
            "units": len(unit_offsets),
            "unit_offsets": unit_offsets.data_ptr(),
            "row_step": sw * channels * units.interleaved,
            "copied_from": copied_from.data_ptr(),
            "rows_a_unit": -(-rows // (len(unit_offsets) - waiting)),
            "waiting_units": waiting,
        }
        step = 0 if in_image else power_of_two(image["copied_codes"] or UNIT, UNIT)
        spec = MatrixSpec(step, channels if units.interleaved > 1 else 0, rows, kind_of(self.out_dtype), has_residual)
        tensors = out_offsets, copied_from, unit_offsets
        return Plan(MATRIX, compiled(build, spec, self.isa), fields, strips.items, UNIT, copies * copied_bytes, tensors)
