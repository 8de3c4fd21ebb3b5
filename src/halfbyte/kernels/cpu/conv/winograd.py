"""3 x 3 convolutions of codes with stride 1 by minimal filtering: int8 -> int8, or floating point of images that were quantized with one
scale each. Sums are exact, with a quarter of the multiplications.

    576 * y = A^T [sum over ci of (G w G^T) * (B^T x B)] A       F(4x4, 3x3): 36 products for 16 outputs, where there are 144

Where one or two lines or columns of outputs are left over, their tiles are short: F(2, 3) along that side, which takes four of the six
positions, with the same weights. 14 x 14 outputs take 484 products of each pair of channels so, not 576.

(S. Winograd, "Arithmetic complexity of computations", 1980; A. Lavin and S. Gray, "Fast algorithms for convolutional neural networks",
2016.) The matrices are multiplied by what makes them integers, 24 for each dimension. Products are of int16: some instruction sets have
no others that are exact, and for those that make twice as many products of codes in the same time there are still fewer. Weights are
transformed beforehand, and take 8 bytes for each code then.

Arithmetic. |x| <= 128 and |w| <= 128, so |B^T x B| <= 12800 and |G w G^T| <= 6272 fit int16. Sums are exact modulo 2^32. What is left
of them after a multiplication by the inverse of 9 modulo 2^32 and a shift by 6 is y, exactly, where |y| < 2^25, which `transformed`
makes sure of. Then as `tile.RequantizingTile`, or, bit for bit, as `direct.py` has it for floating-point outputs.

Threads draw items: a run of tiles times a part of the columns of outputs. An item's tiles of the image are transformed
into the thread's own memory, unless the item before had the same; for each column all products, tile by tile, are made there, too, and
transformed into outputs. Tiles that reach beyond the image are first copied, with what stands for 0 around.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elementary import rounded_codes
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, compiled, phase
from halfbyte.kernels.cpu.conv.planned import ConvGeometry, Plan, PlannedConv, parts_of
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import PANEL, allocate

T = TypeVar("T", int, Value)

WINOGRAD = LINEAR.extended(
    # items: runs of tiles x parts of the columns
    *("items", "parts", "run", "columns", "channels"),
    # a thread's memory: products of a run, a tile of the image or of outputs; before them the transformed image, a plane a position
    *("thread_bytes", "products_at", "image_tile_at", "out_tile_at"),
    *(f"{field}_{n}" for n in range(4) for field in ("planes_at", "plane_bytes", "class_start", "class_stop")),  # of `CLASSES`
    # the image and the outputs
    *("height", "width", "out_height", "out_width", "tiles_high", "tiles_wide", "top", "left"),
    *(f"kind_{n}" for n in range(4)),  # where the tiles of each of `KINDS` begin among all
    *("image_bytes", "line_bytes", "pixel_bytes", "out_line_bytes", "outside"),
    *("scales", "scales_at"),  # of each image, and bytes from the weights to those of the outputs, for floating-point outputs
)
M, SIZE = 4, 6  # outputs of a tile and pixels under it, each way
SHORT = 2  # outputs of a short tile
NEAR = 0, 1, 2, 5  # positions of a short tile
WEIGHTS = ((6, 0, 0), (-1, -1, -1), (-1, 1, -1), (1, 2, 4), (1, -2, 4), (0, 0, 3))  # G
SHIFT, INVERSE = 6, pow(9, -1, 1 << 32)  # 576 = 2^6 * 9
POSITIONS = SIZE**2
KINDS = ((1, 0), (0, 0), (0, 1), (1, 1))  # in the order of tiles: whether they are short down and across
# Positions with the same tiles are one class: those of the first have all; others lack tiles that are short across, down, either way.
CLASSES = [
    [(i, j) for i in range(SIZE) for j in range(SIZE) if (i not in NEAR, j not in NEAR) == far]
    for far in itertools.product((False, True), repeat=2)
]
ORDER = {position: n for n, position in enumerate(itertools.chain(*CLASSES))}  # of weights, planes and products
_RUN_BYTES = 3 << 16  # of a run's transformed image and products, which are to stay in a core's second-level cache, unless it were short
_ITEMS_A_THREAD = 4
_GROUP_COST = 0.5  # of beginning and ending a group's products, in tiles
_LEAST_GROUPS = 4  # of tiles in a run, which share what is loaded of the weights, unless fewer have `Winograd.tiles`
_NEAR_BYTES = 1 << 19  # of weights that stay in the second-level cache
_AHEAD = 8192  # bytes of weights, which come from the third-level cache where they are many
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


def few_pixels(x: Sequence[T]) -> list[T]:
    """B^T x of the four pixels under a short tile."""
    a, b = x[1] + x[2], x[1] - x[2]
    return [x[0] - x[2], a - (a << 2), (b << 2) - b, (x[3] - x[1]) << 1]


def few_outputs(p: Sequence[T]) -> list[T]:
    """A^T p of four products, two numbers."""
    return [(p[0] + p[1] + p[2]) << 2, (p[1] - p[2] + p[3]) << 2]


class Side(NamedTuple):
    """One side of a tile: its outputs, the pixels under it, and its positions, among all six."""

    outputs: int
    pixels: int
    positions: tuple[int, ...]
    of_pixels: Callable[[Sequence[Value]], list[Value]]
    of_products: Callable[[Sequence[Value]], list[Value]]


SIDES = Side(M, SIZE, tuple(range(SIZE)), pixels, outputs), Side(SHORT, SHORT + 2, NEAR, few_pixels, few_outputs)


def transformed(codes: Codes, sizes: Filter) -> Tensor | None:
    """The weights as the kernel reads them, int16 [columns, 36, Ci / 2, 2 * lanes, 2]; None where y may be too large for it."""
    w = codes.values().reshape(sizes.out, 3, 3, sizes.channels).to(torch.int32)
    if 128 * int(w.abs().sum((1, 2, 3), dtype=torch.int64).max()) >= 1 << 31 - SHIFT:
        return None
    g = torch.tensor(WEIGHTS, dtype=torch.float32, device="cpu")
    products = torch.einsum("ai,bj,oijc->aboc", g, g, w.float()).to(torch.int16)  # small integers: exact
    products = torch.stack([products[position] for position in ORDER])
    column = 2 * current().lanes
    columns = -(-sizes.out // column)
    products = torch.nn.functional.pad(products, (0, 0, 0, columns * column - sizes.out))
    products = products.view(-1, columns, column, sizes.channels // 2, 2).permute(1, 0, 3, 2, 4)
    return allocate(2 * products.numel()).view(torch.int16).view(products.shape).copy_(products)


def group_of(tiles: int, isa: ISA) -> int:
    """How many tiles are multiplied together, so that the last such group of a layer is nearly full."""
    most = isa.tuning.conv_tile[0]
    return min(range(most, most // 2, -1), key=lambda n: -(-tiles // n) * (n + _GROUP_COST))


class Tiles(NamedTuple):
    """For outputs [B, Ho, Wo]: whole tiles of an image down and across, and whether partial tiles follow."""

    images: int
    high: int
    wide: int
    short: tuple[bool, bool]

    @classmethod
    def of(cls, out: tuple[int, int, int]) -> Tiles:
        batch, *sides = out
        short = [0 < side % M <= SHORT for side in sides]
        high, wide = (side // M if few else -(-side // M) for side, few in zip(sides, short, strict=True))
        return cls(batch, high, wide, (short[0], short[1]))

    @property
    def kinds(self) -> list[int]:
        """How many there are of each of `KINDS`."""
        sides = (self.high, int(self.short[0])), (self.wide, int(self.short[1]))
        return [self.images * sides[0][down] * sides[1][across] for down, across in KINDS]

    @property
    def classes(self) -> list[tuple[int, int]]:
        """The first tile and the one behind the last of each of `CLASSES`."""
        starts = list(itertools.accumulate(self.kinds, initial=0))
        return [(starts[0], starts[4]), (starts[0], starts[2]), (starts[1], starts[3]), (starts[1], starts[2])]


@dataclass(frozen=True, slots=True)
class Class:
    """Positions with the same tiles: `count` of them, from `first` on; `rows` tiles are multiplied together."""

    first: int
    count: int
    rows: int


@dataclass(frozen=True, slots=True)
class WinogradSpec:
    """What the code is compiled for.

    Attributes:
        classes: As `CLASSES`; one of all positions where there are no short tiles.
        down, across: Whether there are tiles that are short in this direction.
        out: Element type of the outputs.
        residual: Floating-point outputs have a residual added.
    """

    classes: tuple[Class, ...]
    down: bool = False
    across: bool = False
    out: Kind = "i8"
    residual: bool = False

    @classmethod
    def of(cls, tiles: Tiles, isa: ISA, out: Kind = "i8", *, residual: bool = False) -> WinogradSpec:
        counts = [len(some) for some in CLASSES] if any(tiles.short) else [POSITIONS]
        classes = (
            Class(sum(counts[:n]), count, group_of(stop - start, isa))
            for n, (count, (start, stop)) in enumerate(zip(counts, tiles.classes, strict=False))
        )
        return cls(tuple(classes), *tiles.short, out, residual)


@phase
def build(spec: WinogradSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a WINOGRAD block, its thread and the number of threads."""
    _Winograd(spec, isa, f).emit()


class _Winograd(Emitter):
    block = WINOGRAD

    def __init__(self, spec: WinogradSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, number, _ = f.parameters
        self.classes = list(enumerate(spec.classes))
        self.kinds = [n for n, (down, across) in enumerate(KINDS) if down <= spec.down and across <= spec.across]
        self.width = 2 * isa.lanes  # channels of a vector of int16, and outputs of a column
        self.image = self.pointer("scratch") + number * self.get("thread_bytes")
        self.products, self.image_tile, self.out_tile = (self.image + self.get(f"{at}_at") for at in ("products", "image_tile", "out_tile"))
        self.buffer = f.alloca(isa.ints, POSITIONS, 64)
        _, self.stored, self.element = element_of(spec.out)

    def emit(self) -> None:
        f, get = self.f, self.get
        counter, parts, columns = self.args + WINOGRAD.offset("counter"), get("parts"), get("columns")
        there = f.variable(f.value("i64", -1))
        for item in f.draw_items(counter, get("items")):
            part, run = item % parts, item // parts
            first = run * get("run")
            stop = f.umin(first + get("run"), get("tiles"))
            some = [self._range(first, stop, get(f"class_start_{n}"), get(f"class_stop_{n}")) for n, _ in self.classes]
            with f.when(there.value.differs(run)):
                for kind in self.kinds:
                    for t in self._tiles(kind, first, stop):
                        self._image(kind, t, [t - start for start, _ in some])
                there.value = run
            for column in f.loop((part + 1) * columns // parts, part * columns // parts):
                weights = f.variable(self.pointer("weights") + column * get("channels") * (POSITIONS * 2 * self.width))
                for (n, c), (start, count) in zip(self.classes, some, strict=True):
                    self._multiply(n, c, weights, self._record(start - first), (count + (c.rows - 1)) // c.rows)
                for kind in self.kinds:
                    for t in self._tiles(kind, first, stop):
                        self._outputs(kind, t, self._record(t - first), column)

    def _range(self, first: Value, stop: Value, start: Value, end: Value) -> tuple[Value, Value]:
        """What lies in both ranges: where it begins, and how many there are."""
        start, end = first.below(start).select(start, first), self.f.umin(stop, end)
        return start, start.below(end).select(end - start, 0)

    def _tiles(self, kind: int, first: Value, stop: Value) -> Iterator[Value]:
        end = self.get(f"kind_{kind + 1}") if kind + 1 < len(KINDS) else self.get("tiles")
        start, count = self._range(first, stop, self.get(f"kind_{kind}"), end)
        return self.f.loop(start + count, start)

    def _record(self, tile: Value) -> Value:
        """The products of a run's tile."""
        return self.products + tile * (POSITIONS * self.width * 4)

    def _place(self, kind: int, tile: Value) -> tuple[Value, Value, Value]:
        """A tile's image, and its first output's line and place in that."""
        high, wide = self.get("tiles_high"), self.get("tiles_wide")
        one, zero, (down, across) = self.f.value("i64", 1), self.f.value("i64", 0), KINDS[kind]
        n, rows, columns = tile - self.get(f"kind_{kind}"), one if down else high, one if across else wide
        y, x = high if down else zero, wide if across else zero
        return n // columns // rows, (y + n // columns % rows) * M, (x + n % columns) * M

    # The image

    def _image(self, kind: int, tile: Value, rows: Sequence[Value]) -> None:
        """Transform the pixels under a tile, and store them in the planes.

        Args:
            kind: Of the tile, an index in KINDS.
            tile: Its number among all tiles.
            rows: Its number among the tiles of each class in the run.
        """
        f, get = self.f, self.get
        b, y, x = self._place(kind, tile)
        down, across = (SIDES[short] for short in KINDS[kind])
        y, x, pixel, line, channels = y - get("top"), x - get("left"), get("pixel_bytes"), get("line_bytes"), get("channels")
        image = self.pointer("x") + b * get("image_bytes")
        inside = self._within(y, x) & self._within(y + (down.pixels - 1), x + (across.pixels - 1))
        with f.when(inside.equals(0)):
            to, outside = f.variable(self.image_tile), self.pointer("outside")
            for h in f.loop(down.pixels):
                for w in f.loop(across.pixels):
                    source = self._within(y + h, x + w).select(image + (y + h) * line + (x + w) * pixel, outside)
                    for c in f.loop(channels, step=self.width):
                        to.value.store(source.load(vector("i8", self.width), c), c)
                    to.value = to.value + channels
        start = inside.select(image + y * line + x * pixel, self.image_tile)
        line, pixel = inside.select(line, channels * across.pixels), inside.select(pixel, channels)
        row_bytes = 2 * self.width
        places = [
            self.image + get(f"planes_at_{n}") + row // c.rows * (channels * (2 * c.rows)) + row % c.rows * row_bytes
            for (n, c), row in zip(self.classes, rows, strict=True)
        ]
        planes = [get(f"plane_bytes_{n}") for n, _ in self.classes]
        codes = vector("i8", self.width)
        for at in f.loop(channels, step=self.width):
            for i in range(down.pixels):
                here = start + line * i + at
                for j, value in enumerate(across.of_pixels([here.load(codes, pixel * j).to("i16") for j in range(across.pixels)])):
                    self.buffer.store(value, (i * SIZE + j) * row_bytes, row_bytes)
                f.fence()
            for j, position in enumerate(across.positions):
                lines = [self.buffer.load(self.isa.shorts, (i * SIZE + j) * row_bytes, row_bytes) for i in range(down.pixels)]
                for i, value in zip(down.positions, down.of_pixels(lines), strict=True):
                    n, some = next((n, c) for n, c in self.classes if ORDER[i, position] < c.first + c.count)
                    (places[n] + at * (2 * some.rows)).store(value, planes[n] * (ORDER[i, position] - some.first), row_bytes)
                f.fence()

    def _within(self, y: Value, x: Value) -> Value:
        """Whether a pixel lies in the image."""
        return y.below(self.get("height")) & x.below(self.get("width"))

    # Products

    def _multiply(self, n: int, some: Class, weights: Variable, products: Value, groups: Value) -> None:
        """Sums over the channels, for each position and tile of a class, of a column of outputs; `weights` moves to the next class."""
        f, isa, rows = self.f, self.isa, some.rows
        channels, record = self.get("channels"), POSITIONS * self.width * 4
        size = 4 * isa.lanes
        matrix = channels * (2 * self.width)
        # What comes from far is asked for evenly: two groups of tiles ask for half of it each.
        alone = groups.equals(1)
        step, stride = alone.select(f.value("i64", 2 * size), size), alone.select(f.value("i64", size), 0)
        planes = self.image + self.get(f"planes_at_{n}")
        for p in f.loop(some.count):
            tiles = f.variable(planes + p * self.get(f"plane_bytes_{n}"))
            to = f.variable(products + (p + some.first) * (4 * self.width))
            for group in f.loop(groups):
                sums = [f.variable(f.value(isa.ints, 0)) for _ in range(2 * rows)]
                at, w = f.variable(tiles.value), f.variable(weights.value)
                asked = f.variable(weights.value + _AHEAD + group % 2 * (matrix // 2))
                for _ in f.loop(channels, step=self.width):
                    values = [s.value for s in sums]
                    for pair in range(self.width // 2):
                        both = [w.value.load(isa.shorts, (2 * pair + v) * size, size) for v in range(2)]
                        f.prefetch(asked.value)
                        f.prefetch(asked.value + stride)
                        asked.value = asked.value + step
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
            weights.value = weights.value + matrix

    # Outputs

    def _outputs(self, kind: int, tile: Value, products: Value, column: Value) -> None:
        """Transforms a tile's sums, makes outputs of them, and writes what lies inside."""
        f, get, width, size = self.f, self.get, self.width, self.element
        b, y, x = self._place(kind, tile)
        down, across = (SIDES[short] for short in KINDS[kind])
        stride, line = get("out_stride"), get("out_line_bytes")
        out = self.pointer("out") + (b * get("out_height") + y) * line + x * stride + column * (width * size)
        high = f.umin(get("out_height") - y, f.value("i64", down.outputs))
        wide = f.umin(get("out_width") - x, f.value("i64", across.outputs))
        some = f.umin(get("n") - column * width, f.value("i64", width))
        whole = high.equals(down.outputs) & wide.equals(across.outputs) & some.equals(width)
        to = whole.select(out, self.out_tile)
        steps = whole.select(line, f.value("i64", M * width * size)), whole.select(stride, f.value("i64", width * size))

        def copy(from_image: Value | None) -> None:
            """What lies inside, from the tile to the outputs, or from so many bytes behind these to the tile."""
            for i in f.loop(high):
                for j in f.loop(wide):
                    for n in f.loop(some):
                        inside, of_tile = out + i * line + j * stride + n * size, self.out_tile + ((i * M + j) * width + n) * size
                        if from_image is None:
                            inside.store(of_tile.load(self.stored, 0, size), 0, size)
                        else:
                            of_tile.store((inside + from_image).load(self.stored, 0, size), 0, size)

        residual = None
        if self.spec.residual:
            residual = whole.select(get("residual"), 0)
            with f.when(whole.equals(0)):
                copy(get("residual"))
        table = self.pointer("bias") + column * (4 * width)
        for v in f.loop(2):
            lanes = v * (4 * self.isa.lanes)
            at = to + v * (self.isa.lanes * size)
            if self.spec.out == "i8":
                self._requantize(down, across, products + lanes, table + lanes, at, steps)
            else:
                scales = self.pointer("weights") + get("scales_at") + column * (4 * width) + lanes
                scale = (self.pointer("scales") + b * 4).load("float", 0, 4).splat(self.isa.lanes) * scales.load(self.isa.floats, 0, 4)
                self._scale(down, across, products + lanes, scale, table + lanes, at, steps, residual)
        with f.when(whole.equals(0)):
            copy(None)

    def _exact(self, down: Side, across: Side, sums: Value) -> Iterator[tuple[int, list[Value]]]:
        """The sums y of a tile's pixels, a column of the tile at a time."""
        f, isa, size = self.f, self.isa, 4 * self.isa.lanes
        for i, position in enumerate(down.positions):
            line = [sums.load(isa.ints, ORDER[position, j] * (4 * self.width), size) for j in across.positions]
            for j, value in enumerate(across.of_products(line)):
                self.buffer.store(value, (i * M + j) * size, size)
            f.fence()
        for j in range(across.outputs):
            column = [self.buffer.load(isa.ints, (i * M + j) * size, size) for i in range(len(down.positions))]
            yield j, [(value * INVERSE).shift_signed(SHIFT) for value in down.of_products(column)]
            f.fence()

    def _requantize(self, down: Side, across: Side, sums: Value, table: Value, to: Value, steps: tuple[Value, Value]) -> None:
        """Write one vector of outputs, as codes, of each pixel of a tile.

        Args:
            down, across: The tile's sides.
            sums: Address of the vector's sums of products.
            table: Address of the vector's offsets in the requantization table.
            to: Address of the outputs.
            steps: Bytes from a line of outputs to the next, and from a pixel to the next.
        """
        f, isa = self.f, self.isa
        offset, multiplier, start = (
            (table + self.get("table_stride") * row).load(kind, 0, 4) for row, kind in enumerate((isa.floats, isa.floats, isa.ints))
        )
        low, high = (bound.splat(isa.lanes) for bound in WINOGRAD.load_floats(self.args, "clamp"))
        for j, column in self._exact(down, across, sums):
            reals = [f.fma((exact + start).to("float"), multiplier, offset).max_keeping_nan(low).min_keeping_nan(high) for exact in column]
            codes = isa.narrowed(f, [reals[i % len(reals)] for i in range(4)]) if isa.narrows else None
            for i, real in enumerate(reals):
                here = to + steps[0] * i + steps[1] * j
                if codes is None:
                    here.store(rounded_codes(real))
                else:
                    here.store(codes.shuffle(range(i * isa.lanes, (i + 1) * isa.lanes)))

    def _scale(
        self,
        down: Side,
        across: Side,
        sums: Value,
        scale: Value,
        bias: Value,
        to: Value,
        steps: tuple[Value, Value],
        residual: Value | None,
    ) -> None:
        """Write one vector of floating-point outputs of each pixel of a tile.

        Args:
            down, across, sums, to, steps: As of `_requantize`.
            scale: The product of the image's scale and the weight's, a vector.
            bias: Address of the vector's biases.
            residual: Bytes from an output to its residual; None: there is none.
        """
        isa, kind = self.isa, self.spec.out
        biases = bias.load(isa.floats, 0, 4)
        low, high = (bound.splat(isa.lanes) for bound in WINOGRAD.load_floats(self.args, "clamp"))
        for j, column in self._exact(down, across, sums):
            for i, exact in enumerate(column):
                here = to + steps[0] * i + steps[1] * j
                value = exact.to("float") * scale + biases
                if residual is not None:
                    raw = (here + residual).load(vector(self.stored, isa.lanes), 0, self.element)
                    value = value + isa.to_float(raw, kind)
                here.store(isa.from_float(value.max_keeping_nan(low).min_keeping_nan(high), kind), 0, self.element)


def supports(sizes: Filter, window: Window, isa: ISA) -> bool:
    """Whether `WinogradKernel` takes int8 images and weights of these sizes."""
    dense = window.stride == window.dilation == (1, 1)
    plain = sizes.format.bits == 8 and sizes.kernel == (3, 3) and sizes.groups == 1
    return isa.tuning.winograd is not None and plain and dense and sizes.channels % (2 * isa.lanes) == 0


def weight_bytes(sizes: Filter) -> int:
    """Bytes of the transformed weights."""
    return 2 * POSITIONS * sizes.out * sizes.channels


def pays(sizes: Filter, out: tuple[int, int, int], isa: ISA) -> bool:
    """Whether it takes fewer cycles than `direct.py`, for outputs [B, Ho, Wo]."""
    rates = isa.tuning.winograd
    assert rates is not None
    batch, height, width = out
    matrix, tiles = sizes.out * sizes.channels, Tiles.of(out)
    counts = [stop - start for start, stop in tiles.classes]
    whole_groups = [round_up(count, group_of(count, isa)) for count in counts]
    products, ends = (sum(n * len(some) for n, some in zip(of, CLASSES, strict=True)) for of in (whole_groups, counts))
    multiplied = max(products * matrix / rates.rate, 2 * POSITIONS * matrix / _WEIGHT_BYTES)  # while weights come
    cycles = multiplied + ends * (sizes.channels * _PIXEL_CYCLES + sizes.out * _OUTPUT_CYCLES)
    return cycles < batch * height * width * 9 * matrix / rates.direct_rate


class WinogradKernel(PlannedConv):
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

    out_kind: Kind = "i8"

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        sizes, column, channels = self.sizes, 2 * self.isa.lanes, geo.channels
        of, columns = Tiles.of(geo.outputs), -(-sizes.out // column)
        spec, tiles = WinogradSpec.of(of, self.isa, self.out_kind, residual=has_residual), sum(of.kinds)
        rows = spec.classes[0].rows
        groups = -(-tiles // rows)
        assert self.isa.tuning.winograd is not None
        enough = self.isa.tuning.winograd.tiles[weights.nbytes <= _NEAR_BYTES]
        least = min(_LEAST_GROUPS, -(-enough // rows))
        runs = -(-groups // max(least, _RUN_BYTES // (POSITIONS * rows * (2 * channels + 4 * column))))
        if threads > 1:
            runs = max(runs, min(threads * _ITEMS_A_THREAD, groups // least))
        run = -(-groups // runs) * rows
        runs = -(-tiles // run)
        parts = parts_of(columns, threads, _ITEMS_A_THREAD, runs)
        # 64 bytes behind each plane, or all of them would have the same places in the first-level cache.
        planes = [
            round_up(min(run, stop - start), some.rows) * channels * 2 + 64
            for some, (start, stop) in zip(spec.classes, of.classes, strict=False)
        ]
        planes_at = list(itertools.accumulate((some.count * plane for some, plane in zip(spec.classes, planes, strict=True)), initial=0))
        products_at = planes_at.pop()
        image_tile_at = products_at + (run + max(some.rows for some in spec.classes)) * POSITIONS * column * 4
        out_tile_at = image_tile_at + (POSITIONS * channels + 63 & ~63)
        element = self.out_dtype.itemsize
        thread_bytes = out_tile_at + M * M * column * element
        (height, width), items = geo.image, runs * parts
        fields = {
            "n": sizes.out,
            "out_stride": sizes.out * element,
            "table_stride": 4 * PANEL * -(-sizes.out // PANEL),
            "items": items,
            "parts": parts,
            "tiles": tiles,
            "run": run,
            "columns": columns,
            "thread_bytes": thread_bytes,
            "products_at": products_at,
            "image_tile_at": image_tile_at,
            "out_tile_at": out_tile_at,
            "tiles_high": of.high,
            "tiles_wide": of.wide,
            "image_bytes": height * width * channels,
            "line_bytes": width * channels,
            "pixel_bytes": channels,
            "out_line_bytes": geo.out[1] * sizes.out * element,
            "scales_at": 2 * POSITIONS * columns * column * channels,
        }
        for n, (plane, at, (start, stop)) in enumerate(zip(planes, planes_at, of.classes, strict=False)):
            fields |= {f"plane_bytes_{n}": plane, f"planes_at_{n}": at, f"class_start_{n}": start, f"class_stop_{n}": stop}
        fields |= {f"kind_{n}": start for n, start in enumerate(itertools.accumulate(of.kinds[:-1], initial=0))}
        return Plan(WINOGRAD, compiled(build, spec, self.isa), fields, items, channels, thread_bytes)


class WinogradScalingKernel(WinogradKernel):
    """The same of codes with one scale for each image, to floating-point outputs, of which there are whole columns; bias: float32 [Co]."""

    form = "minimal filtering, with scales"
    scales_at = WINOGRAD.offset("scales")
    specializes_residual = True

    def __init__(self, sizes: Filter, out: torch.dtype) -> None:
        super().__init__(sizes)
        self.out_dtype = self.result = out
        self.out_kind = kind_of(out)
        self.no_bias = torch.zeros(sizes.out, dtype=torch.float32, device="cpu")

    def weights_of(self, codes: Codes) -> Tensor | None:
        """`transformed`, and the scales of the outputs behind it, int16; None where sums may be too large."""
        products = transformed(codes, self.sizes)
        if products is None:
            return None
        scales = codes.scale.reshape(-1).float().expand(self.sizes.out).contiguous().view(torch.int16)
        count = products.numel()
        weights = allocate(2 * (count + len(scales))).view(torch.int16)
        weights[:count], weights[count:] = products.flatten(), scales
        return weights
