"""The kernel of `hopper.py`: one warp asks TMA for operands, two warpgroups multiply them; what they do with sums is in
`hopper_write.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.conv.hopper_write import GROUP, half_of, others_of, pieces_of, send, send_codes, turned, write, write_codes
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, reinterpret
from halfbyte.kernels.gpu.hopper.stages import barriers
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for. step: channels of a step, parts: steps of a tap; dilation: of columns; unit: divides the number of
    outputs; leads: of an Addition. direct: warpgroups multiply 64 pixels by outputs, or else 64 outputs by pixels. places: of 64 outputs of
    all pixels, for what TMA brings to be added, or 0; registers: of a thread that multiplies, and of one that does not."""

    rows: int
    images: int
    height: int
    width: int
    stages: int
    kernel_w: int
    dilation: int
    taps: int
    parts: int
    step: int
    resident: bool
    sweep: bool
    direct: bool
    bounded: bool
    clamp: bool
    leads: bool
    unit: int
    stride: int
    places: int
    registers: tuple[int, int]

    @property
    def together(self) -> int:
        """Taps of a stage."""
        return self.kernel_w if self.sweep else 1

    @property
    def halo(self) -> int:
        """Columns of x beyond those of y that a stage has."""
        return (self.kernel_w - 1) * self.dilation if self.sweep else 0

    @property
    def piece(self) -> int:
        """Columns that are read at once."""
        return math.gcd(self.width, self.halo) if self.sweep else self.width

    @property
    def buffers(self) -> int:
        """That a stage of x has: one, or one for each column."""
        return self.width + self.halo if self.sweep else 1

    @property
    def lines(self) -> int:
        """Of shared memory in a buffer of x."""
        return self.images if self.sweep else self.pixels

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return self.taps // self.together * self.parts

    @property
    def kept(self) -> int:
        """Pieces of the weight in shared memory."""
        return self.taps * self.parts if self.resident else self.stages * self.together

    @property
    def pixels(self) -> int:
        return self.images * self.height * self.width

    @property
    def half(self) -> tuple[int, int, int]:
        """Images, rows and columns of the pixels of a warpgroup that has half of them."""
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
    """First output, image, row and column of a tile."""
    pn = tile % grid[0]
    rest = tile // grid[0]
    px = rest % grid[3]
    rest = rest // grid[3]
    return pn * S.rows, rest // grid[2] * S.images, rest % grid[2] * S.height, px * S.width


@gluon.jit
def _fetch_x(xd, xs, full, stage, t, b, y, x, window, S: gl.constexpr):
    """Step t of x on its way to a stage."""
    COLUMNS: gl.constexpr = S.buffers // S.piece if S.sweep else 1
    BOX: gl.constexpr = xd.block_shape
    tap = t // S.parts * S.together
    part = t % S.parts * S.step
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
        at = (right & 1) * (S.parts * S.step) + part
        async_load(xd, [b, y + (down >> 1), down & 1, x + (right >> 1), at], full.index(stage), to)
    else:
        to = reinterpret(xs.index(stage), xd.dtype, BOX, xd.layout)
        async_load(xd, [b, iy, ix, part], full.index(stage), to)


@gluon.jit
def _fetch_w(wd, ws, arrived, buffer, n, k, S: gl.constexpr):
    """Of the weight, columns k … of rows n …"""
    PART: gl.constexpr = wd.block_shape
    to = ws.index(buffer)
    if S.direct:
        async_load(wd, [n // GROUP, 0, 0, 0, k], arrived, reinterpret(to, wd.dtype, PART, wd.layout))
    else:
        async_load(wd, [n, k], arrived, to)


@gluon.jit
def _produce(xd, wd, rd, xs, ws, ys, full, empty, loaded, given, taken, grid, window, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    STEPS: gl.constexpr = S.steps
    TOGETHER: gl.constexpr = S.together
    KEPT: gl.constexpr = S.kept
    WEIGHTS: gl.constexpr = 0 if S.resident else S.rows * S.together
    BYTES: gl.constexpr = xd.dtype.primitive_bitwidth // 8 * (S.step * S.lines * S.buffers + WEIGHTS * S.step)
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.expect(loaded, KEPT * S.rows * S.step * (xd.dtype.primitive_bitwidth // 8))
        for t in range(KEPT):
            _fetch_w(wd, ws, loaded, t, 0, t * S.step, S)
    step = 0
    adding = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_n, b, y, x = _tile(tile, grid, S)
        for t in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch_x(xd, xs, full, stage, t, b, y, x, window, S)
            if not S.resident:
                for i in gl.static_range(TOGETHER):
                    at = (t // S.parts * TOGETHER + i) * (S.parts * S.step) + t % S.parts * S.step
                    _fetch_w(wd, ws, full.index(stage), stage * TOGETHER + i, first_n, at, S)
            step += 1
        if S.places:
            for g in range(S.rows // 64):
                place = adding % S.places
                mbarrier.wait(taken.index(place), ((adding // S.places) & 1) ^ 1)
                mbarrier.expect(given.index(place), 2 * 64 * 64 * (xd.dtype.primitive_bitwidth // 8))
                for i in gl.static_range(2):
                    to = reinterpret(ys.index(2 * place + i), rd.dtype, rd.block_shape, rd.layout)
                    async_load(rd, half_of((first_n + 64 * g, b, y, x), i, S), given.index(place), to)
                adding += 1


@gluon.jit
def _operands(xs, ws, stage, t, TAP: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """What a warpgroup multiplies of the TAPth tap of a stage: of the weight [64, k], of x [k, columns]; or of x [64, k], of the
    weight [k, columns]."""
    COLUMNS: gl.constexpr = S.columns
    w = ws.index((t // S.parts * S.together + TAP) * S.parts + t % S.parts if S.resident else stage * S.together + TAP)
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
def _consume(held, W: gl.constexpr, S: gl.constexpr):
    xs, ws, ys, full, empty, loaded, given, taken, table, yd, out, added, N, grid, image, window, bounds, row = held
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    TOGETHER: gl.constexpr = S.together
    TOLD: gl.constexpr = S.taps if S.bounded else 0
    INTEGER: gl.constexpr = table is not None
    # Triton has no instruction of 256 columns for integers.
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128 if INTEGER and COLUMNS > 128 else COLUMNS, 32 if INTEGER else 16]
    )
    WIDTH: gl.constexpr = COLUMNS if COLUMNS < 64 else 64
    AT_ONCE: gl.constexpr = GROUP if S.direct else WIDTH
    PIECE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.wait(loaded, 0)
    step = 0
    adding = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        told = ()
        if INTEGER:  # on its way while there is nothing to multiply yet
            rn = gl.minimum(_piece(tile, 0, W, grid, S)[0] + gl.arange(0, 64, layout=gl.SliceLayout(1, PIECE)), N - 1)
            told = (rn, gl.load(table + rn), gl.load(table + row + rn))  # type: ignore[assignment]
            told += (gl.load(table + 2 * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
            for tap in gl.static_range(TOLD):
                told += (gl.load(table + (4 + tap) * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
        acc = gl.zeros([64, COLUMNS], gl.int32 if INTEGER else gl.float32, layout=MMA)
        for t in range(S.steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            for i in gl.static_range(TOGETHER):
                left, right = _operands(xs, ws, stage, t, i, W, S)
                acc = warpgroup_mma(left, right, acc, is_async=True)
            acc = warpgroup_mma_wait(TOGETHER, deps=[acc])  # for the step before
            if t > 0:
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        pieces = pieces_of(acc, AT_ONCE)
        if S.places:
            at = _piece(tile, 0, W, grid, S)
            if INTEGER:
                adding = send_codes(acc, table, told, yd, ys, given, taken, adding, at, image, window, bounds, row, W, S)
            else:
                adding = send(pieces, yd, ys, added[0], given, taken, adding, N, at, bounds, W, S)
        for i in gl.static_range(0 if S.places else COLUMNS // AT_ONCE):
            at = _piece(tile, i * AT_ONCE, W, grid, S)
            other = None
            if added[1] is not None:
                other = others_of(added[1], N, at, image, WIDTH, S)
            sums = pieces[i]
            if S.direct:
                sums = turned(sums)
            if INTEGER:
                write_codes(sums, table, told, out, other, N, at, image, window, bounds, row, S)
            else:
                write(sums, out, added[0], other, N, at, image, bounds, S)
    if S.places:
        tma.store_wait(0)


@gluon.jit
def _piece(tile, column, W: gl.constexpr, grid, S: gl.constexpr):
    """Where a piece of a warpgroup's sums, from a column on, belongs: first output, first pixel, and the tile's image, row and column."""
    first_n, b, y, x = _tile(tile, grid, S)
    if S.direct:
        return first_n + column, W * 64, b, y, x
    elif S.rows == 128:
        return first_n + W * 64, column, b, y, x
    else:
        return first_n, W * S.columns + column, b, y, x


@gluon.jit
def convolve(xd, wd, table, yd, rd, out, added, units, grid, image, window, bounds, row, S: gl.constexpr):
    N = units * S.unit  # what divides it decides how many numbers are written at once
    STAGES: gl.constexpr = S.stages
    if table is not None:
        gdc_launch_dependents()
    LINES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=xd.layout.swizzle_byte_width, element_bitwidth=xd.layout.element_bitwidth, rank=2
    )
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES * S.buffers, S.lines, S.step], LINES)
    ws = gl.allocate_shared_memory(xd.dtype, [S.kept, S.rows, S.step], LINES)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    # A barrier that nobody looks at would share its memory with sums on their way through it, and may be written back later.
    loaded = full
    ys = xs
    given = full
    taken = full
    if S.resident:
        loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(loaded, count=1)
    if S.places:
        HALVES: gl.constexpr = gl.NVMMASharedLayout(yd.layout.swizzle_byte_width, yd.layout.element_bitwidth, rank=2)
        ys = gl.allocate_shared_memory(xd.dtype, [2 * S.places, 64, 64], HALVES)
        given = barriers(S.places, 1)
        taken = barriers(S.places, 2)
    fence_async_shared()
    gdc_wait()
    if table is None:  # the next one may write a weight from here on, as `scratch.double_buffer` has it
        gdc_launch_dependents()
    held = (xs, ws, ys, full, empty, loaded, given, taken, table, yd, out, added, N, grid, image, window, bounds, row)
    gl.warp_specialize(
        [
            (_consume, (held, 0, S)),
            (_consume, (held, 1, S)),
            (_produce, (xd, wd, rd, xs, ws, ys, full, empty, loaded, given, taken, grid, window, S)),
        ],
        [4, 1],
        S.registers,
    )
