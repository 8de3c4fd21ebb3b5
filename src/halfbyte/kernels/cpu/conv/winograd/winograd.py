"""The code of 3 x 3 convolutions by minimal filtering (`transforms.py`): int8 -> int8, or floating point of images with one scale each.

    576 * y = A^T [ sum over ci of (G g G^T) * (B^T d B) ] A

`winograd_call.py` plans calls and fills in the arguments `WINOGRAD`. Threads draw items: a chunk of consecutive tiles (`tiling.py`) times
some blocks of 2 lanes output channels. For each item a thread

    1. transforms the pixels under the chunk's tiles, unless its last item had the same chunk     `_transform_input`
    2. for each block, multiplies: at each position, a matrix product over input channels         `_multiply`
    3. transforms the sums of each tile into outputs                                              `_write_outputs`

in memory of its own (a tile's index is its number in the chunk):

    planes           int16 [position, group of tiles, Ci / 2 lanes, tile of the group, 2 lanes]     a plane for each position
    products         int32 [tile, position, 2 lanes]                                                of one block
    input tile       int8 [pixel, Ci]              a copy of the pixels under a tile that reaches beyond the image, with padding
    output tile      [4, 4, 2 lanes]               the outputs of a tile that reaches beyond the image's, before those that exist are copied

Weights are those of `transforms.transformed_weights`; behind them, for floating-point outputs, lie the weight's scales, float32 [Co].

Arithmetic. Sums are exact. Then that of `tile.RequantizingTile`, or, bit for bit, that of `direct.py` for floating-point outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elementary import rounded_codes
from halfbyte.kernels.cpu.codegen.elements import element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, phase
from halfbyte.kernels.cpu.conv.winograd.tiling import SHAPES, PositionClass, TileShape, WinogradSpec
from halfbyte.kernels.cpu.conv.winograd.transforms import CLASSES, INVERSE_OF_9, ORDER, OUTPUTS, PIXELS, POSITIONS, SHIFT

WINOGRAD = LINEAR.extended(
    # items: chunks of `chunk_tiles` tiles x parts of the blocks of output channels
    *("items", "parts", "chunk_tiles", "out_blocks", "channels"),
    # a thread's memory: its bytes, and where its arrays begin; planes are at 0
    *("thread_bytes", "products_at", "input_tile_at", "output_tile_at"),
    # for each of CLASSES: where its planes begin, bytes of each, the first tile that has its positions, and the end
    *(f"{field}_{n}" for n in range(len(CLASSES)) for field in ("planes_at", "plane_bytes", "class_start", "class_stop")),
    # the images and the outputs, in pixels; full tiles of an image; padding
    *("height", "width", "out_height", "out_width", "tile_rows_of_image", "tile_columns_of_image", "top", "left"),
    *(f"shape_start_{n}" for n in range(len(SHAPES))),  # the first tile of each of SHAPES
    *("image_bytes", "line_bytes", "pixel_bytes", "out_line_bytes", "outside"),
    *("scales", "scales_at"),  # for floating-point outputs: of each image, and bytes from the weights to theirs
)
_PREFETCH_AHEAD = 8192  # bytes of weights, which come from the third-level cache where they are many


@phase
def build(spec: WinogradSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a WINOGRAD block, its thread and the number of threads."""
    _Winograd(spec, isa, f).emit()


class _Range(NamedTuple):
    """Consecutive tiles: the first, and how many."""

    start: Value
    number: Value


class _Pixels(NamedTuple):
    """Pixels in memory: the address of the first one, and bytes between lines and between pixels."""

    address: Value
    line_bytes: Value
    pixel_bytes: Value

    def pixel(self, row: int, column: int) -> Value:
        return self.address + self.line_bytes * row + self.pixel_bytes * column


class _Winograd(Emitter):
    """Emits the kernel.

    Attributes:
        classes: Those of the specification, with their numbers.
        shapes: Indices of those of SHAPES that occur.
        out_block: Output channels of a block, and input channels of a vector of int16.
        planes, products, input_tile, output_tile: Addresses of the thread's arrays.
        buffer: Memory of a tile's vectors between the transforms of its two axes.
        stored, element_bytes: LLVM type and size of an output.
    """

    block = WINOGRAD
    spec: WinogradSpec

    def __init__(self, spec: WinogradSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, thread, _ = f.parameters
        self.classes = list(enumerate(spec.classes))
        self.shapes = [
            n
            for n, shape in enumerate(SHAPES)
            if shape.short_vertically <= spec.short_vertically and shape.short_horizontally <= spec.short_horizontally
        ]
        self.out_block = 2 * isa.lanes
        self.planes = self.pointer("scratch") + thread * self.get("thread_bytes")
        self.products, self.input_tile, self.output_tile = (
            self.planes + self.get(f"{array}_at") for array in ("products", "input_tile", "output_tile")
        )
        self.buffer = f.alloca(isa.ints, POSITIONS, 64)
        _, self.stored, self.element_bytes = element_of(spec.out)

    def emit(self) -> None:
        f, get = self.f, self.get
        counter, parts, out_blocks = self.args + WINOGRAD.offset("counter"), get("parts"), get("out_blocks")
        transformed = f.variable(f.value("i64", -1))  # the chunk that the thread's planes hold
        for item in f.draw_items(counter, get("items")):
            part, chunk = item % parts, item // parts
            first = chunk * get("chunk_tiles")
            stop = f.umin(first + get("chunk_tiles"), get("tiles"))
            of_classes = [self._overlap(first, stop, get(f"class_start_{n}"), get(f"class_stop_{n}")) for n, _ in self.classes]
            with f.when(transformed.value.differs(chunk)):
                for shape in self.shapes:
                    for tile in self._tiles(shape, first, stop):
                        self._transform_input(shape, tile, [tile - tiles.start for tiles in of_classes])
                transformed.value = chunk
            for block in f.loop((part + 1) * out_blocks // parts, part * out_blocks // parts):
                weights = f.variable(self.pointer("weights") + block * get("channels") * (POSITIONS * 2 * self.out_block))
                for (n, positions), tiles in zip(self.classes, of_classes, strict=True):
                    products = self._products_of(tiles.start - first)
                    self._multiply(n, positions, weights, products, (tiles.number + (positions.group - 1)) // positions.group)
                for shape in self.shapes:
                    for tile in self._tiles(shape, first, stop):
                        self._write_outputs(shape, tile, self._products_of(tile - first), block)

    # Tiles

    def _overlap(self, first: Value, stop: Value, start: Value, end: Value) -> _Range:
        """Return the tiles that are both in first … stop - 1 and in start … end - 1, maybe none."""
        start, end = first.below(start).select(start, first), self.f.umin(stop, end)
        return _Range(start, start.below(end).select(end - start, 0))

    def _tiles(self, shape: int, first: Value, stop: Value) -> Iterator[Value]:
        """Emit a loop over the tiles first … stop - 1 that have this shape, an index of SHAPES."""
        end = self.get(f"shape_start_{shape + 1}") if shape + 1 < len(SHAPES) else self.get("tiles")
        start, count = self._overlap(first, stop, self.get(f"shape_start_{shape}"), end)
        return self.f.loop(start + count, start)

    def _products_of(self, tile: Value) -> Value:
        """Return the address of the products of a tile, by its number in the chunk."""
        return self.products + tile * (POSITIONS * self.out_block * 4)

    def _place(self, shape: int, tile: Value) -> tuple[Value, Value, Value]:
        """Return a tile's image, and the row and column of its first output there."""
        rows_of_image, columns_of_image = self.get("tile_rows_of_image"), self.get("tile_columns_of_image")
        one, zero, (short_vertically, short_horizontally) = self.f.value("i64", 1), self.f.value("i64", 0), SHAPES[shape]
        n = tile - self.get(f"shape_start_{shape}")
        # Short tiles are the row or column of tiles behind the full ones.
        rows, columns = one if short_vertically else rows_of_image, one if short_horizontally else columns_of_image
        first_row, first_column = rows_of_image if short_vertically else zero, columns_of_image if short_horizontally else zero
        return n // columns // rows, (first_row + n // columns % rows) * OUTPUTS, (first_column + n % columns) * OUTPUTS

    def _is_inside(self, y: Value, x: Value) -> Value:
        """Return whether a pixel lies in the image; negative coordinates do not, as `below` compares unsigned."""
        return y.below(self.get("height")) & x.below(self.get("width"))

    # 1. Images

    def _transform_input(self, shape: int, tile: Value, in_classes: Sequence[Value]) -> None:
        """Transform the pixels under a tile, and store them in the planes.

        Args:
            shape: Of the tile, an index of SHAPES.
            tile: Its number among all tiles.
            in_classes: Its number among the chunk's tiles of each class.
        """
        f, get = self.f, self.get
        b, y, x = self._place(shape, tile)
        y, x, pixel_bytes, line_bytes, channels = y - get("top"), x - get("left"), get("pixel_bytes"), get("line_bytes"), get("channels")
        image = self.pointer("x") + b * get("image_bytes")
        vertical, horizontal = SHAPES[shape].vertical, SHAPES[shape].horizontal
        inside = self._is_inside(y, x) & self._is_inside(y + (vertical.pixels - 1), x + (horizontal.pixels - 1))
        with f.when(inside.equals(0)):
            self._copy_input(SHAPES[shape], _Pixels(image, line_bytes, pixel_bytes), y, x, channels)
        start = inside.select(image + y * line_bytes + x * pixel_bytes, self.input_tile)
        line_bytes = inside.select(line_bytes, channels * horizontal.pixels)
        pixel_bytes = inside.select(pixel_bytes, channels)
        vector_bytes = 2 * self.out_block
        places = [  # of the tile in each class's first plane
            self.planes
            + get(f"planes_at_{n}")
            + tile // positions.group * (channels * (2 * positions.group))
            + tile % positions.group * vector_bytes
            for (n, positions), tile in zip(self.classes, in_classes, strict=True)
        ]
        plane_bytes = [get(f"plane_bytes_{n}") for n, _ in self.classes]
        codes = vector("i8", self.out_block)
        for c in f.loop(channels, step=self.out_block):
            for i in range(vertical.pixels):
                line = start + line_bytes * i + c
                pixels = [line.load(codes, pixel_bytes * j).to("i16") for j in range(horizontal.pixels)]
                for j, value in enumerate(horizontal.input_transform(pixels)):
                    self.buffer.store(value, (i * PIXELS + j) * vector_bytes, vector_bytes)
                f.fence()
            for j, column in enumerate(horizontal.positions):
                lines = [self.buffer.load(self.isa.shorts, (i * PIXELS + j) * vector_bytes, vector_bytes) for i in range(vertical.pixels)]
                for row, value in zip(vertical.positions, vertical.input_transform(lines), strict=True):
                    n, positions = self._class_of(row, column)
                    first_plane = places[n] + c * (2 * positions.group)
                    first_plane.store(value, plane_bytes[n] * (ORDER[row, column] - positions.first), vector_bytes)
                f.fence()

    def _class_of(self, row: int, column: int) -> tuple[int, PositionClass]:
        """Return the class of a position, and its number."""
        return next((n, positions) for n, positions in self.classes if ORDER[row, column] < positions.first + positions.count)

    def _copy_input(self, shape: TileShape, image: _Pixels, y: Value, x: Value, channels: Value) -> None:
        """Copy the pixels under a tile, from (y, x) of an image on, to the input tile, and what stands for 0 where they lie outside."""
        f, (start, line_bytes, pixel_bytes) = self.f, image
        to, outside = f.variable(self.input_tile), self.pointer("outside")
        for h in f.loop(shape.vertical.pixels):
            for w in f.loop(shape.horizontal.pixels):
                source = self._is_inside(y + h, x + w).select(start + (y + h) * line_bytes + (x + w) * pixel_bytes, outside)
                for c in f.loop(channels, step=self.out_block):
                    to.value.store(source.load(vector("i8", self.out_block), c), c)
                to.value = to.value + channels

    # 2. Products

    def _multiply(self, n: int, positions: PositionClass, weights: Variable, products: Value, groups: Value) -> None:
        """Sum the products over the input channels for a block of output channels, at each position of a class.

        Args:
            n, positions: The class.
            weights: Address of the block's weights for its first position; those behind its last one at the end.
            products: Address of the products of the chunk's first tile that has the positions.
            groups: Groups of such tiles.
        """
        f, isa, tiles_at_once = self.f, self.isa, positions.group
        channels, tile_bytes = self.get("channels"), POSITIONS * self.out_block * 4
        size = 4 * isa.lanes
        matrix_bytes = channels * (2 * self.out_block)
        # Weights ahead are prefetched evenly: in two groups of tiles by half in each, in a single group all of them.
        is_single = groups.equals(1)
        step, stride = is_single.select(f.value("i64", 2 * size), size), is_single.select(f.value("i64", size), 0)
        planes = self.planes + self.get(f"planes_at_{n}")
        for position in f.loop(positions.count):
            tiles = f.variable(planes + position * self.get(f"plane_bytes_{n}"))
            to = f.variable(products + (position + positions.first) * (4 * self.out_block))
            for group in f.loop(groups):
                sums = [f.variable(f.value(isa.ints, 0)) for _ in range(2 * tiles_at_once)]
                image, w = f.variable(tiles.value), f.variable(weights.value)
                prefetched = f.variable(weights.value + _PREFETCH_AHEAD + group % 2 * (matrix_bytes // 2))
                for _ in f.loop(channels, step=self.out_block):
                    values = [s.value for s in sums]
                    for pair in range(self.out_block // 2):  # of input channels
                        factors = [w.value.load(isa.shorts, (2 * pair + v) * size, size) for v in range(2)]
                        f.prefetch(prefetched.value)
                        f.prefetch(prefetched.value + stride)
                        prefetched.value = prefetched.value + step
                        for tile in range(tiles_at_once):
                            codes = image.value.load("i32", 2 * self.out_block * tile + 4 * pair, 4).splat(isa.lanes)
                            for v, factor in enumerate(factors):
                                values[2 * tile + v] = isa.pinned(f, isa.dot_shorts(f, values[2 * tile + v], factor, codes))
                        f.fence()
                    for s, value in zip(sums, values, strict=True):
                        s.value = value
                    image.value = image.value + 2 * self.out_block * tiles_at_once
                    w.value = w.value + 2 * size * (self.out_block // 2)
                for i, s in enumerate(sums):
                    to.value.store(s.value, i // 2 * tile_bytes + i % 2 * size, size)
                tiles.value = tiles.value + channels * (2 * tiles_at_once)
                to.value = to.value + tile_bytes * tiles_at_once
            weights.value = weights.value + matrix_bytes

    # 3. Outputs

    def _write_outputs(self, shape: int, tile: Value, products: Value, block: Value) -> None:
        """Write the outputs of a tile for a block of output channels.

        Args:
            shape: Of the tile, an index of SHAPES.
            tile: Its number among all tiles.
            products: Address of its products.
            block: The number of the block.
        """
        f, get, out_block, element_bytes = self.f, self.get, self.out_block, self.element_bytes
        b, y, x = self._place(shape, tile)
        vertical, horizontal = SHAPES[shape].vertical, SHAPES[shape].horizontal
        stride, line = get("out_stride"), get("out_line_bytes")
        out = self.pointer("out") + (b * get("out_height") + y) * line + x * stride + block * (out_block * element_bytes)
        high = f.umin(get("out_height") - y, f.value("i64", vertical.outputs))
        wide = f.umin(get("out_width") - x, f.value("i64", horizontal.outputs))
        channels = f.umin(get("n") - block * out_block, f.value("i64", out_block))
        is_whole = high.equals(vertical.outputs) & wide.equals(horizontal.outputs) & channels.equals(out_block)
        to = _Pixels(
            is_whole.select(out, self.output_tile),
            is_whole.select(line, f.value("i64", OUTPUTS * out_block * element_bytes)),
            is_whole.select(stride, f.value("i64", out_block * element_bytes)),
        )

        def outputs() -> Iterator[tuple[Value, Value]]:
            """Emit loops over the outputs that exist; yield the address of each one, and of its place in the output tile."""
            for i in f.loop(high):
                for j in f.loop(wide):
                    for c in f.loop(channels):
                        output = out + i * line + j * stride + c * element_bytes
                        yield output, self.output_tile + ((i * OUTPUTS + j) * out_block + c) * element_bytes

        residual = None
        if self.spec.residual:
            residual = is_whole.select(get("residual"), 0)  # in the output tile residuals lie where outputs are written
            with f.when(is_whole.equals(0)):
                residual_offset = get("residual")
                for output, of_tile in outputs():
                    of_tile.store((output + residual_offset).load(self.stored, 0, element_bytes), 0, element_bytes)
        table = self.pointer("bias") + block * (4 * out_block)
        for v in f.loop(2):
            offset = v * (4 * self.isa.lanes)
            half = to._replace(address=to.address + v * (self.isa.lanes * element_bytes))
            if self.spec.out == "i8":
                self._requantize(SHAPES[shape], products + offset, table + offset, half)
            else:
                scales = self.pointer("weights") + get("scales_at") + block * (4 * out_block) + offset
                scale = (self.pointer("scales") + b * 4).load("float", 0, 4).splat(self.isa.lanes) * scales.load(self.isa.floats, 0, 4)
                self._scale(SHAPES[shape], products + offset, scale, table + offset, half, residual)
        with f.when(is_whole.equals(0)):
            for output, of_tile in outputs():
                output.store(of_tile.load(self.stored, 0, element_bytes), 0, element_bytes)

    def _sums_by_column(self, shape: TileShape, products: Value) -> Iterator[tuple[int, list[Value]]]:
        """Emit the transform of a tile's products, a vector of channels, and yield each column of the tile with the sums y of its rows."""
        f, isa, size, (vertical, horizontal) = self.f, self.isa, 4 * self.isa.lanes, (shape.vertical, shape.horizontal)
        for i, row in enumerate(vertical.positions):
            line = [products.load(isa.ints, ORDER[row, column] * (4 * self.out_block), size) for column in horizontal.positions]
            for j, value in enumerate(horizontal.output_transform(line)):
                self.buffer.store(value, (i * OUTPUTS + j) * size, size)
            f.fence()
        for j in range(horizontal.outputs):
            column = [self.buffer.load(isa.ints, (i * OUTPUTS + j) * size, size) for i in range(len(vertical.positions))]
            yield j, [(value * INVERSE_OF_9).shift_signed(SHIFT) for value in vertical.output_transform(column)]
            f.fence()

    def _requantize(self, shape: TileShape, products: Value, table: Value, to: _Pixels) -> None:
        """Write a vector of output channels of each pixel of a tile as codes.

        Args:
            shape: The tile's.
            products: Address of the vector's products.
            table: Address of its offsets in the requantization table.
            to: Where outputs are written.
        """
        f, isa = self.f, self.isa
        offset, multiplier, start = (
            (table + self.get("table_stride") * row).load(kind, 0, 4) for row, kind in enumerate((isa.floats, isa.floats, isa.ints))
        )
        low, high = (bound.splat(isa.lanes) for bound in WINOGRAD.load_floats(self.args, "clamp"))
        for j, sums in self._sums_by_column(shape, products):
            reals = [f.fma((y + start).to("float"), multiplier, offset).max_keeping_nan(low).min_keeping_nan(high) for y in sums]
            codes = isa.narrowed(f, [reals[i % len(reals)] for i in range(4)]) if isa.narrows else None
            for i, real in enumerate(reals):
                pixel = to.pixel(i, j)
                if codes is None:
                    pixel.store(rounded_codes(real))
                else:
                    pixel.store(codes.shuffle(range(i * isa.lanes, (i + 1) * isa.lanes)))

    def _scale(self, shape: TileShape, products: Value, scale: Value, bias: Value, to: _Pixels, residual: Value | None) -> None:
        """Write a vector of output channels of each pixel of a tile in floating point.

        Args:
            shape, products, to: As of `_requantize`.
            scale: The products of the image's scale and the weight's, a vector.
            bias: Address of the vector's biases.
            residual: Bytes from an output to its residual; None: there is none.
        """
        isa, kind = self.isa, self.spec.out
        biases = bias.load(isa.floats, 0, 4)
        low, high = (bound.splat(isa.lanes) for bound in WINOGRAD.load_floats(self.args, "clamp"))
        for j, sums in self._sums_by_column(shape, products):
            for i, y in enumerate(sums):
                pixel = to.pixel(i, j)
                value = y.to("float") * scale + biases
                if residual is not None:
                    stored = (pixel + residual).load(vector(self.stored, isa.lanes), 0, self.element_bytes)
                    value = value + isa.to_float(stored, kind)
                pixel.store(isa.from_float(value.max_keeping_nan(low).min_keeping_nan(high), kind), 0, self.element_bytes)
