"""3 x 3 convolutions of codes with stride 1 by minimal filtering: int8 -> int8, exactly, with a quarter of the multiplications.

    576 * y = A^T [sum over ci of (G w G^T) * (B^T x B)] A       F(4x4, 3x3): 36 products for 16 outputs, where there are 144

(S. Winograd, "Arithmetic complexity of computations", 1980; A. Lavin and S. Gray, "Fast algorithms for convolutional neural networks",
2016.) The matrices are multiplied by what makes them integers, 24 for each dimension. Products are of int16: some instruction sets have
no others that are exact, and for those that make twice as many products of codes in the same time there are still fewer. Weights are
transformed beforehand, and take 8 bytes for each code then.

Arithmetic. |x| <= 128 and |w| <= 128, so |B^T x B| <= 12800 and |G w G^T| <= 6272 fit int16. Sums are exact modulo 2^32. What is left
of them after a multiplication by the inverse of 9 modulo 2^32 and a shift by 6 is y, exactly, where |y| < 2^25, which `transformed`
makes sure of. Then as `tile.RequantizingTile`.

Threads draw items: a run of tiles of 4 x 4 outputs times a part of the columns of outputs. An item's tiles of the image are transformed
into the thread's own memory, unless the item before had the same; for each column all products, tile by tile, are made there, too, and
transformed into outputs. Tiles that reach beyond the image are first copied, with what stands for 0 around.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu import runtime
from halfbyte.kernels.cpu.arguments import LINEAR, Block
from halfbyte.kernels.cpu.ir import Function, Value, vector
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kernel import Emitter, arguments, compiled, phase
from halfbyte.kernels.cpu.linear import WORK_A_THREAD
from halfbyte.kernels.cpu.planned import CodesConv, ConvCall
from halfbyte.kernels.cpu.tile import ROUND
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL

T = TypeVar("T", int, Value)

WINOGRAD = Block(
    (
        *LINEAR.fields,
        # items: runs of tiles x parts of the columns
        *("items", "parts", "tiles", "run", "columns", "channels"),
        # a thread's memory: products of a run, a tile of the image or of outputs; before them the transformed image, a plane a position
        *("thread_bytes", "plane_bytes", "products_at", "image_tile_at", "out_tile_at"),
        # the image and the outputs
        *("height", "width", "out_height", "out_width", "tiles_high", "tiles_wide", "top", "left"),
        *("image_bytes", "line_bytes", "pixel_bytes", "out_line_bytes", "outside"),
    ),
    LINEAR.floats,
)
M, SIZE = 4, 6  # outputs of a tile and pixels under it, each way
WEIGHTS = ((6, 0, 0), (-1, -1, -1), (-1, 1, -1), (1, 2, 4), (1, -2, 4), (0, 0, 3))  # G
SHIFT, INVERSE = 6, pow(9, -1, 1 << 32)  # 576 = 2^6 * 9
POSITIONS = SIZE**2
_RUN_BYTES = 3 << 16  # of a run's transformed image and products, which are to stay in a core's second-level cache, unless it were short
_ITEMS_A_THREAD = 4
_GROUP_COST = 0.5  # of beginning and ending a group's products, in tiles
_LEAST_GROUPS = 4  # of tiles in a run, which share what is loaded of the weights
# A cycle of a core: bytes of weights from the third-level cache; and cycles for a position of a tile's image or outputs.
_WEIGHT_BYTES, _PIXEL_CYCLES, _OUTPUT_CYCLES = 8, 0.18, 0.37


def pixels(x: Sequence[T]) -> list[T]:
    """B^T x of six pixels."""
    a, b, c, d = x[4] - (x[2] << 2), x[3] - (x[1] << 2), x[4] - x[2], (x[3] - x[1]) << 1
    return [((x[0] - x[2]) << 2) + c, a + b, a - b, c + d, c - d, ((x[1] - x[3]) << 2) + (x[5] - x[3])]


def outputs(p: Sequence[T]) -> list[T]:
    """A^T p of six products, four numbers."""
    near, far, across, beyond = (p[1] + p[2]) << 2, p[3] + p[4], (p[1] - p[2]) << 2, p[3] - p[4]
    return [p[0] + near + far, across + (beyond << 1), near + (far << 2), across + ((beyond + p[5]) << 3)]


def transformed(codes: Codes, sizes: Filter) -> Tensor | None:
    """The weights as the kernel reads them, int16 [columns, 36, Ci / 2, 2 * lanes, 2]; None where y may be too large for it."""
    w = codes.values().reshape(sizes.out, 3, 3, sizes.channels).to(torch.int32)
    if 128 * int(w.abs().sum((1, 2, 3), dtype=torch.int64).max()) >= 1 << 31 - SHIFT:
        return None
    g = torch.tensor(WEIGHTS, dtype=torch.float32, device="cpu")
    made = torch.einsum("ai,bj,oijc->aboc", g, g, w.float()).to(torch.int16).flatten(0, 1)  # small integers: exact
    column = 2 * current().lanes
    columns = -(-sizes.out // column)
    made = torch.nn.functional.pad(made, (0, 0, 0, columns * column - sizes.out))
    return made.view(-1, columns, column, sizes.channels // 2, 2).permute(1, 0, 3, 2, 4).contiguous()


def group_of(tiles: int, isa: ISA) -> int:
    """How many tiles are multiplied together, so that the last such group of a layer is nearly full."""
    most = isa.direct_tile[0]
    return min(range(most, most // 2, -1), key=lambda n: -(-tiles // n) * (n + _GROUP_COST))


@dataclass(frozen=True, slots=True)
class WinogradSpec:
    """rows: tiles that are multiplied together."""

    rows: int


@phase
def build(spec: WinogradSpec, isa: ISA, f: Function) -> None:
    _Winograd(spec, isa, f).emit()


class _Winograd(Emitter):
    block = WINOGRAD

    def __init__(self, spec: WinogradSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.rows, (_, number, _) = spec.rows, f.parameters
        self.width = 2 * isa.lanes  # channels of a vector of int16, and outputs of a column
        self.image = self.pointer("scratch") + number * self.get("thread_bytes")
        self.products, self.image_tile, self.out_tile = (self.image + self.get(f"{at}_at") for at in ("products", "image_tile", "out_tile"))
        self.buffer = f.alloca(isa.ints, POSITIONS, 64)

    def emit(self) -> None:
        f, get = self.f, self.get
        counter, parts, columns = self.args + WINOGRAD.offset("counter"), get("parts"), get("columns")
        there = f.variable(f.value("i64", -1))
        for item in f.draw_items(counter, get("items")):
            part, run = item % parts, item // parts
            first = run * get("run")
            count = f.umin(get("run"), get("tiles") - first)
            with f.when(there.value.differs(run)):
                for t in f.loop(count):
                    self._image(first + t, t)
                there.value = run
            for column in f.loop((part + 1) * columns // parts, part * columns // parts):
                self._multiply(column, (count + (self.rows - 1)) // self.rows)
                for t in f.loop(count):
                    self._outputs(first + t, t, column)

    def _place(self, tile: Value) -> tuple[Value, Value, Value]:
        """A tile's image, and its first output's line and place in that."""
        wide, high = self.get("tiles_wide"), self.get("tiles_high")
        return tile // wide // high, tile // wide % high * M, tile % wide * M

    # The image

    def _image(self, tile: Value, t: Value) -> None:
        """Transforms the pixels under a tile."""
        f, get, rows = self.f, self.get, self.rows
        b, y, x = self._place(tile)
        y, x, pixel, line, channels = y - get("top"), x - get("left"), get("pixel_bytes"), get("line_bytes"), get("channels")
        image = self.pointer("x") + b * get("image_bytes")
        inside = self._within(y, x) & self._within(y + (SIZE - 1), x + (SIZE - 1))
        with f.when(inside.equals(0)):
            to, outside = f.variable(self.image_tile), self.pointer("outside")
            for h in f.loop(SIZE):
                for w in f.loop(SIZE):
                    source = self._within(y + h, x + w).select(image + (y + h) * line + (x + w) * pixel, outside)
                    for c in f.loop(channels, step=self.width):
                        to.value.store(source.load(vector("i8", self.width), c), c)
                    to.value = to.value + channels
        start = inside.select(image + y * line + x * pixel, self.image_tile)
        line, pixel = inside.select(line, channels * SIZE), inside.select(pixel, channels)
        row_bytes = 2 * self.width
        plane = self.get("plane_bytes")
        row = self.image + t // rows * (channels * (2 * rows)) + t % rows * row_bytes
        kind = vector("i8", self.width)
        for c in f.loop(channels, step=self.width):
            for i in range(SIZE):
                at = start + line * i + c
                for j, value in enumerate(pixels([at.load(kind, pixel * j).to("i16") for j in range(SIZE)])):
                    self.buffer.store(value, (i * SIZE + j) * row_bytes, row_bytes)
                f.fence()
            place = row + c * (2 * rows)
            for j in range(SIZE):
                lines = [self.buffer.load(self.isa.shorts, (i * SIZE + j) * row_bytes, row_bytes) for i in range(SIZE)]
                for i, value in enumerate(pixels(lines)):
                    place.store(value, plane * (i * SIZE + j), row_bytes)
                f.fence()

    def _within(self, y: Value, x: Value) -> Value:
        """Whether a pixel lies in the image."""
        return y.below(self.get("height")) & x.below(self.get("width"))

    # Products

    def _multiply(self, column: Value, groups: Value) -> None:
        """Sums over the channels, for each position and tile, of a column of outputs."""
        f, isa, rows = self.f, self.isa, self.rows
        channels, record = self.get("channels"), POSITIONS * self.width * 4
        size = 4 * isa.lanes
        matrix = channels * (2 * self.width)
        for p in f.loop(POSITIONS):
            weights = self.pointer("weights") + (column * POSITIONS + p) * matrix
            tiles, to = f.variable(self.image + p * self.get("plane_bytes")), f.variable(self.products + p * (4 * self.width))
            for group in f.loop(groups):
                sums = [f.variable(f.value(isa.ints, 0)) for _ in range(2 * rows)]
                at, w = f.variable(tiles.value), f.variable(weights)
                for c in f.loop(channels, step=self.width):
                    with f.when((c // self.width % groups).equals(group)):  # the next position's, which lie behind these, all the time
                        self._ask_for(w.value + matrix)
                    values = [s.value for s in sums]
                    for pair in range(self.width // 2):
                        both = [w.value.load(isa.shorts, (2 * pair + v) * size, size) for v in range(2)]
                        for i in range(rows):
                            a = at.value.load("i32", 2 * self.width * i + 4 * pair, 4).splat(isa.lanes)
                            for v, factor in enumerate(both):
                                n = 2 * i + v
                                values[n] = isa.pinned(f, isa.dot_shorts(f, values[n], factor, a))
                        f.fence()
                    for s, value in zip(sums, values, strict=True):
                        s.value = value
                    at.value = at.value + 2 * self.width * rows
                    w.value = w.value + 2 * size * (self.width // 2)
                for n, s in enumerate(sums):
                    to.value.store(s.value, n // 2 * record + n % 2 * size, size)
                tiles.value = tiles.value + channels * (2 * rows)
                to.value = to.value + record * rows

    def _ask_for(self, weights: Value) -> None:
        for line in range(0, 2 * self.width * self.width, 64):
            self.f.prefetch(weights + line, 2)

    # Outputs

    def _outputs(self, tile: Value, t: Value, column: Value) -> None:
        """Transforms a tile's sums, requantizes them, and writes what lies inside."""
        f, get, width = self.f, self.get, self.width
        b, y, x = self._place(tile)
        stride, line = get("out_stride"), get("out_line_bytes")
        out = self.pointer("out") + (b * get("out_height") + y) * line + x * stride + column * width
        high, wide, some = f.umin(get("out_height") - y, f.value("i64", M)), f.umin(get("out_width") - x, f.value("i64", M)), get("n")
        some = f.umin(some - column * width, f.value("i64", width))
        whole = high.equals(M) & wide.equals(M) & some.equals(width)
        to = whole.select(out, self.out_tile)
        steps = whole.select(line, f.value("i64", M * width)), whole.select(stride, f.value("i64", width))
        sums, table = self.products + t * (POSITIONS * width * 4), self.pointer("bias") + column * (4 * width)
        for v in f.loop(2):
            self._requantize(sums + v * (4 * self.isa.lanes), table + v * (4 * self.isa.lanes), to + v * self.isa.lanes, steps)
        with f.when(whole.equals(0)):
            for i in f.loop(high):
                for j in f.loop(wide):
                    for n in f.loop(some):
                        (out + i * line + j * stride + n).store((self.out_tile + (i * M + j) * width + n).load("i8"))

    def _requantize(self, sums: Value, table: Value, to: Value, steps: tuple[Value, Value]) -> None:
        """One vector of outputs of a tile's pixels, whose lines and pixels lie so many bytes apart."""
        f, isa, size = self.f, self.isa, 4 * self.isa.lanes
        for i in range(SIZE):
            line = [sums.load(isa.ints, (i * SIZE + j) * (4 * self.width), size) for j in range(SIZE)]
            for j, value in enumerate(outputs(line)):
                self.buffer.store(value, (i * M + j) * size, size)
            f.fence()
        offset, multiplier, start = (
            (table + self.get("table_stride") * row).load(kind, 0, 4) for row, kind in enumerate((isa.floats, isa.floats, isa.ints))
        )
        low, high = (bound.splat(isa.lanes) for bound in WINOGRAD.load_floats(self.args, "clamp"))
        for j in range(M):
            column = [self.buffer.load(isa.ints, (i * M + j) * size, size) for i in range(SIZE)]
            reals = []
            for value in outputs(column):
                exact = (value * INVERSE).shift_signed(SHIFT)
                reals.append(f.fma((exact + start).to("float"), multiplier, offset).max_or(low).min_or(high))
            codes = isa.narrowed(f, reals) if isa.narrows else None
            for i, real in enumerate(reals):
                here = to + steps[0] * i + steps[1] * j
                if codes is None:
                    here.store((real + ROUND).bits(isa.ints).to("i8"))
                else:
                    here.store(codes.shuffle(range(i * isa.lanes, (i + 1) * isa.lanes)))
            f.fence()


def supports(sizes: Filter, window: Window, isa: ISA) -> bool:
    """Whether `WinogradKernel` takes int8 images and weights of these sizes."""
    dense = window.stride == window.dilation == (1, 1)
    plain = sizes.format.bits == 8 and sizes.kernel == (3, 3) and sizes.groups == 1
    return isa.minimal is not None and plain and dense and sizes.channels % (2 * isa.lanes) == 0


def pays(sizes: Filter, out: tuple[int, int, int], isa: ISA) -> bool:
    """Whether it takes fewer cycles than `direct.py`, for outputs [B, Ho, Wo]."""
    assert isa.minimal is not None
    directly, by_this = isa.minimal
    batch, height, width = out
    matrix, tiles = sizes.out * sizes.channels, batch * -(-height // M) * -(-width // M)
    group = group_of(tiles, isa)
    products = POSITIONS * -(-tiles // group) * group * matrix
    ends = tiles * POSITIONS * (sizes.channels * _PIXEL_CYCLES + sizes.out * _OUTPUT_CYCLES)
    cycles = products / by_this + ends + 2 * POSITIONS * matrix / _WEIGHT_BYTES
    return cycles < batch * height * width * 9 * matrix / directly


class WinogradKernel(CodesConv):
    """The compiled convolution of int8 images of any size.

    Conditions that the caller has checked: `supports`; x is int8 [B, C, H, W] with channels_last strides, not empty; `weights` is what
    `weights_of` made; `table` [3, N] as `tile.RequantizingTile` has it, N padded to whole panels.
    """

    form = "minimal filtering"

    def __init__(self, sizes: Filter) -> None:
        super().__init__()
        self.sizes, self.isa = sizes, current()

    def weights_of(self, codes: Codes) -> Tensor | None:
        """The weights as the kernel reads them; None where sums may be too large for it."""
        return transformed(codes, self.sizes)

    def prepare(self, x: Tensor, window: Window, outside: int, weights: Tensor, *_: bool) -> ConvCall:
        sizes, column = self.sizes, 2 * self.isa.lanes
        batch, channels, height, width = x.shape
        ho, wo = window.out_size((height, width), sizes.kernel)
        high, wide, columns = -(-ho // M), -(-wo // M), -(-sizes.out // column)
        tiles = batch * high * wide
        rows = group_of(tiles, self.isa)
        groups = -(-tiles // rows)
        most = max(1, min(runtime.threads(), batch * ho * wo * sizes.out * sizes.k // WORK_A_THREAD))
        runs = -(-groups // max(_LEAST_GROUPS, _RUN_BYTES // (POSITIONS * rows * (2 * channels + 4 * column))))
        if most > 1:
            runs = max(runs, min(most * _ITEMS_A_THREAD, groups // _LEAST_GROUPS))
        run = -(-groups // runs) * rows
        runs = -(-tiles // run)
        parts = max(1, min(columns, -(-most * _ITEMS_A_THREAD // runs))) if most > 1 else 1
        plane = run * channels * 2 + 64  # or all planes would have the same places in the first-level cache
        products_at = POSITIONS * plane
        image_tile_at = products_at + run * POSITIONS * column * 4
        out_tile_at = image_tile_at + (POSITIONS * channels + 63 & ~63)
        thread_bytes = out_tile_at + M * M * column
        edge = torch.full((channels,), outside, dtype=torch.int8, device="cpu")
        items = runs * parts
        threads = min(most, items)
        fields = {
            **WINOGRAD.known(window.sizes((height, width), (ho, wo), sizes.kernel)),
            "n": sizes.out,
            "out_stride": sizes.out,
            "table_stride": 4 * PANEL * -(-sizes.out // PANEL),
            "items": items,
            "parts": parts,
            "tiles": tiles,
            "run": run,
            "columns": columns,
            "channels": channels,
            "thread_bytes": thread_bytes,
            "plane_bytes": plane,
            "products_at": products_at,
            "image_tile_at": image_tile_at,
            "out_tile_at": out_tile_at,
            "tiles_high": high,
            "tiles_wide": wide,
            "image_bytes": height * width * channels,
            "line_bytes": width * channels,
            "pixel_bytes": channels,
            "out_line_bytes": wo * sizes.out,
            "outside": edge.data_ptr(),
        }
        buffer = arguments(WINOGRAD, compiled(build, WinogradSpec(rows), self.isa), fields)
        return ConvCall(buffer, ctypes.addressof(buffer), (batch, sizes.out, ho, wo), threads * thread_bytes, threads, (edge,))
