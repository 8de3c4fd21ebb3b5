"""The kernel of `hopper.py`: a producer warp loads operands by TMA, two consumer warpgroups multiply them; their epilogue is in
`hopper_write.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.conv.hopper_write import (
    GROUP,
    half_of,
    load_residual,
    pieces_of,
    send,
    send_codes,
    transposed_sums,
    write,
    write_codes,
)
from halfbyte.kernels.gpu.hopper.epilogue import sums_layout
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, reinterpret
from halfbyte.kernels.gpu.hopper.ring import barriers
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for.

    Attributes:
        rows: Outputs per tile.
        images: Of a tile's box, like height and width.
        height: See images.
        width: See images.
        stages: Stages of the ring.
        kernel_w: Width of the kernel.
        dilation: Of columns.
        taps: Taps of the kernel.
        steps_per_tap: Steps of K per tap.
        step: Channels per step.
        resident: The weight stays in shared memory.
        sweep: A stage serves all taps of a row of the kernel.
        direct: Warpgroups multiply 64 pixels by outputs instead of 64 outputs by pixels.
        bounded: Taps may be outside of the image.
        clamp: Whether y is clamped.
        codes_first: Whether this kernel's codes are the first tensor of an `Addition`.
        unit: Divides the number of outputs.
        stride: Of the convolution.
        slots: Slots in shared memory, of 64 outputs of all pixels, for a residual that TMA loads; 0: none.
        registers: Per thread of a consumer, and of the producer.
    """

    rows: int
    images: int
    height: int
    width: int
    stages: int
    kernel_w: int
    dilation: int
    taps: int
    steps_per_tap: int
    step: int
    resident: bool
    sweep: bool
    direct: bool
    bounded: bool
    clamp: bool
    codes_first: bool
    unit: int
    stride: int
    slots: int
    registers: tuple[int, int]

    @property
    def taps_per_stage(self) -> int:
        """Taps that a stage serves."""
        return self.kernel_w if self.sweep else 1

    @property
    def halo(self) -> int:
        """Columns of x in a stage beyond those of y."""
        return (self.kernel_w - 1) * self.dilation if self.sweep else 0

    @property
    def piece(self) -> int:
        """Columns that are loaded at once."""
        return math.gcd(self.width, self.halo) if self.sweep else self.width

    @property
    def buffers(self) -> int:
        """Buffers of a stage of x: one, or one per column."""
        return self.width + self.halo if self.sweep else 1

    @property
    def lines(self) -> int:
        """Pixels in a buffer of x."""
        return self.images if self.sweep else self.pixels

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return self.taps // self.taps_per_stage * self.steps_per_tap

    @property
    def weight_pieces(self) -> int:
        """Pieces of the weight in shared memory."""
        return self.taps * self.steps_per_tap if self.resident else self.stages * self.taps_per_stage

    @property
    def pixels(self) -> int:
        """Pixels of a tile."""
        return self.images * self.height * self.width

    @property
    def half(self) -> tuple[int, int, int]:
        """Images, rows and columns of a warpgroup's half of the pixels."""
        if self.images > 1 and not self.sweep:
            return self.images // 2, self.height, self.width
        return (self.images, self.height // 2, self.width) if self.height > 1 else (self.images, 1, self.width // 2)

    @property
    def columns(self) -> int:
        """Pixels, or outputs, that a warpgroup multiplies by 64 of the others."""
        return self.rows if self.direct else self.pixels * self.rows // 128


# The kernel. `S` is a Static; `grid` counts tiles along outputs, images, rows and columns.


@gluon.jit
def _tile(tile, grid, S: gl.constexpr):
    """Return the first output, image, row and column of a tile."""
    pn = tile % grid[0]
    rest = tile // grid[0]
    px = rest % grid[3]
    rest = rest // grid[3]
    return pn * S.rows, rest // grid[2] * S.images, rest % grid[2] * S.height, px * S.width


@gluon.jit
def _fetch_x(xd, xs, full, stage, t, b, y, x, window, S: gl.constexpr):
    """Load step t of x."""
    COLUMNS: gl.constexpr = S.buffers // S.piece if S.sweep else 1
    BOX: gl.constexpr = xd.block_shape
    tap = t // S.steps_per_tap * S.taps_per_stage
    part = t % S.steps_per_tap * S.step
    down = tap // S.kernel_w * window[2] - window[0]
    right = tap % S.kernel_w * window[3] - window[1]
    iy = y + down
    ix = x + right
    if S.sweep:
        for i in gl.static_range(COLUMNS):
            to = reinterpret(xs.index(stage * S.buffers + i * S.piece), xd.dtype, BOX, xd.layout)  # LARGER_VIEWS
            async_load(xd, [iy, ix + i * S.piece, b, part], full.index(stage), to)
    elif S.stride == 2:
        to = reinterpret(xs.index(stage), xd.dtype, BOX, xd.layout)
        at = (right & 1) * (S.steps_per_tap * S.step) + part
        async_load(xd, [b, y + (down >> 1), down & 1, x + (right >> 1), at], full.index(stage), to)
    else:
        to = reinterpret(xs.index(stage), xd.dtype, BOX, xd.layout)
        async_load(xd, [b, iy, ix, part], full.index(stage), to)


@gluon.jit
def _fetch_w(wd, ws, arrived, buffer, n, k, S: gl.constexpr):
    """Load columns k … of rows n … of the weight."""
    PART: gl.constexpr = wd.block_shape
    to = ws.index(buffer)
    if S.direct:
        async_load(wd, [n // GROUP, 0, 0, 0, k], arrived, reinterpret(to, wd.dtype, PART, wd.layout))
    else:
        async_load(wd, [n, k], arrived, to)


@gluon.jit
def _produce(xd, wd, rd, xs, ws, ys, full, empty, loaded, added_ready, added_read, grid, window, S: gl.constexpr):
    """The producer warp: load the stages, and residuals, of all tiles of this program."""
    STAGES: gl.constexpr = S.stages
    STEPS: gl.constexpr = S.steps
    TAPS_PER_STAGE: gl.constexpr = S.taps_per_stage
    PIECES: gl.constexpr = S.weight_pieces
    WEIGHTS: gl.constexpr = 0 if S.resident else S.rows * S.taps_per_stage
    BYTES: gl.constexpr = xd.dtype.primitive_bitwidth // 8 * (S.step * S.lines * S.buffers + WEIGHTS * S.step)
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.expect(loaded, PIECES * S.rows * S.step * (xd.dtype.primitive_bitwidth // 8))
        for t in range(PIECES):
            _fetch_w(wd, ws, loaded, t, 0, t * S.step, S)
    step = 0
    slot_step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_n, b, y, x = _tile(tile, grid, S)
        for t in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch_x(xd, xs, full, stage, t, b, y, x, window, S)
            if not S.resident:
                for i in gl.static_range(TAPS_PER_STAGE):
                    at = (t // S.steps_per_tap * TAPS_PER_STAGE + i) * (S.steps_per_tap * S.step) + t % S.steps_per_tap * S.step
                    _fetch_w(wd, ws, full.index(stage), stage * TAPS_PER_STAGE + i, first_n, at, S)
            step += 1
        if S.slots:
            for g in range(S.rows // 64):
                slot = slot_step % S.slots
                mbarrier.wait(added_read.index(slot), ((slot_step // S.slots) & 1) ^ 1)
                mbarrier.expect(added_ready.index(slot), 2 * 64 * 64 * (xd.dtype.primitive_bitwidth // 8))
                for i in gl.static_range(2):
                    to = reinterpret(ys.index(2 * slot + i), rd.dtype, rd.block_shape, rd.layout)
                    async_load(rd, half_of((first_n + 64 * g, b, y, x), i, S), added_ready.index(slot), to)
                slot_step += 1


@gluon.jit
def _operands(xs, ws, stage, t, TAP: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """Return a warpgroup's operands of tap TAP of a stage: weight [64, k] and x [k, columns]; or x [64, k] and weight [k, columns]."""
    COLUMNS: gl.constexpr = S.columns
    w = ws.index(
        (t // S.steps_per_tap * S.taps_per_stage + TAP) * S.steps_per_tap + t % S.steps_per_tap
        if S.resident
        else stage * S.taps_per_stage + TAP
    )
    if S.sweep:
        xt = reinterpret(xs.index(stage * S.buffers + TAP * S.dilation), xs.dtype, [S.pixels, S.step], xs.layout)  # LARGER_VIEWS
    else:
        xt = xs.index(stage)
    if S.direct:
        return xt.slice(W * 64, 64, dim=0), w.permute([1, 0])
    elif S.rows == 128:
        return w.slice(W * 64, 64, dim=0), xt.permute([1, 0])
    else:
        return w, xt.slice(W * COLUMNS, COLUMNS, dim=0).permute([1, 0])


@gluon.jit
def _consume(args, W: gl.constexpr, S: gl.constexpr):
    """A consumer warpgroup: multiply its half of all tiles of this program, and write y."""
    xs, ws, ys, full, empty, loaded, added_ready, added_read, table, yd, out, added, N, grid, image, window, bounds, row = args
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    TAPS_PER_STAGE: gl.constexpr = S.taps_per_stage
    TAPS: gl.constexpr = S.taps if S.bounded else 0
    INTEGER: gl.constexpr = table is not None
    # Triton has no instruction of 256 columns for integers.
    MMA: gl.constexpr = sums_layout(128 if INTEGER and COLUMNS > 128 else COLUMNS, 32 if INTEGER else 16)
    WIDTH: gl.constexpr = COLUMNS if COLUMNS < 64 else 64
    PIECE_WIDTH: gl.constexpr = GROUP if S.direct else WIDTH
    PIECE: gl.constexpr = sums_layout(WIDTH, 32)
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.wait(loaded, 0)
    step = 0
    slot_step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        requant = ()
        if INTEGER:  # loaded before the products
            rn = gl.minimum(_piece(tile, 0, W, grid, S)[0] + gl.arange(0, 64, layout=gl.SliceLayout(1, PIECE)), N - 1)
            requant = (rn, gl.load(table + rn), gl.load(table + row + rn))  # type: ignore[assignment]
            requant += (gl.load(table + 2 * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
            for tap in gl.static_range(TAPS):
                requant += (gl.load(table + (4 + tap) * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
        acc = gl.zeros([64, COLUMNS], gl.int32 if INTEGER else gl.float32, layout=MMA)
        for t in range(S.steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            for i in gl.static_range(TAPS_PER_STAGE):
                left, right = _operands(xs, ws, stage, t, i, W, S)
                acc = warpgroup_mma(left, right, acc, is_async=True)
            acc = warpgroup_mma_wait(TAPS_PER_STAGE, deps=[acc])  # for the step before
            if t > 0:
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        pieces = pieces_of(acc, PIECE_WIDTH)
        if S.slots:
            at = _piece(tile, 0, W, grid, S)
            if INTEGER:
                slot_step = send_codes(
                    acc, table, requant, yd, ys, added_ready, added_read, slot_step, at, image, window, bounds, row, W, S
                )
            else:
                slot_step = send(pieces, yd, ys, added[0], added_ready, added_read, slot_step, N, at, bounds, W, S)
        for i in gl.static_range(0 if S.slots else COLUMNS // PIECE_WIDTH):
            at = _piece(tile, i * PIECE_WIDTH, W, grid, S)
            residual = None
            if added[1] is not None:
                residual = load_residual(added[1], N, at, image, WIDTH, S)
            sums = pieces[i]
            if S.direct:
                sums = transposed_sums(sums)
            if INTEGER:
                write_codes(sums, table, requant, out, residual, N, at, image, window, bounds, row, S)
            else:
                write(sums, out, added[0], residual, N, at, image, bounds, S)
    if S.slots:
        tma.store_wait(0)


@gluon.jit
def _piece(tile, column, W: gl.constexpr, grid, S: gl.constexpr):
    """Return where a piece of a warpgroup's sums belongs: first output, first pixel, and the tile's image, row and column."""
    first_n, b, y, x = _tile(tile, grid, S)
    if S.direct:
        return first_n + column, W * 64, b, y, x
    elif S.rows == 128:
        return first_n + W * 64, column, b, y, x
    else:
        return first_n, W * S.columns + column, b, y, x


@gluon.jit
def convolve(xd, wd, table, yd, rd, out, added, units, grid, image, window, bounds, row, S: gl.constexpr):
    """The kernel; `hopper.launch` says what its arguments are. `units` * S.unit are the outputs, `grid` counts tiles along outputs, images,
    rows and columns, `image` is batch, height and width of x, and of y, `row` the elements of a row of `table`."""
    N = units * S.unit  # what divides it decides how many numbers are written at once
    STAGES: gl.constexpr = S.stages
    if table is not None:
        gdc_launch_dependents()
    LINES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=xd.layout.swizzle_byte_width, element_bitwidth=xd.layout.element_bitwidth, rank=2
    )
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES * S.buffers, S.lines, S.step], LINES)
    ws = gl.allocate_shared_memory(xd.dtype, [S.weight_pieces, S.rows, S.step], LINES)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    # Not barriers without a waiting thread: the compiler would overlap their memory with y's, and might write them back later.
    loaded = full
    ys = xs
    added_ready = full
    added_read = full
    if S.resident:
        loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(loaded, count=1)
    if S.slots:
        HALVES: gl.constexpr = gl.NVMMASharedLayout(yd.layout.swizzle_byte_width, yd.layout.element_bitwidth, rank=2)
        ys = gl.allocate_shared_memory(xd.dtype, [2 * S.slots, 64, 64], HALVES)
        added_ready = barriers(S.slots, 1)
        added_read = barriers(S.slots, 2)
    fence_async_shared()
    gdc_wait()
    if table is None:  # the next one may write its weight from here on (`scratch.double_buffer`)
        gdc_launch_dependents()
    args = (xs, ws, ys, full, empty, loaded, added_ready, added_read, table, yd, out, added, N, grid, image, window, bounds, row)
    gl.warp_specialize(
        [
            (_consume, (args, 0, S)),
            (_consume, (args, 1, S)),
            (_produce, (xd, wd, rd, xs, ws, ys, full, empty, loaded, added_ready, added_read, grid, window, S)),
        ],
        [4, 1],
        S.registers,
    )
