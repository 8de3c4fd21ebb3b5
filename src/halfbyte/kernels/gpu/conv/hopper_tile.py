"""The persistent kernel of `hopper.py`, which says what it computes and launches `convolve`.

`convolve` allocates shared memory and starts three partitions of warps. `_produce`, one warp, loads boxes of x, the weight and residuals by
TMA into a ring of pipeline stages; `_consume`, two warpgroups, multiplies a stage by wgmma and writes y with the epilogues of
`hopper_write.py`. A warpgroup has half of a tile's sums: 64 outputs by all pixels, all outputs by half of the pixels, or 64 pixels by all
outputs (`Static.direct`).

Arguments that the functions share:

    S          a `Static`
    grid       tiles along outputs, images, rows and columns of y; a tile's index counts outputs fastest, then columns, rows and images
    image, window   `Image` and `Taps` of `hopper_write.py`
    bounds     `Epilogue.numbers`: the clamp of y, then scales, offset and clamp of the addition, if there is one
    table      of codes: float32 [4 or 4 + taps, table_stride], of which rows 0 to 2 are the constant, the multiplier and the integer that
               is added to the sums of each output, and row 4 + tap the integer to add where that tap is outside of the image; floats: None
    full       barriers [stages]: a stage has been loaded; empty: both warpgroups have read it
    slot_full  barriers [slots]: a residual has been loaded to a slot; slot_free: y has been stored from it
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.conv.hopper_write import (
    GROUP,
    Place,
    Requantization,
    Slots,
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
        outputs: Outputs of a tile.
        images, height, width: Images, rows and columns of a tile's box of y.
        stages: Pipeline stages of the ring.
        kernel_w: Width of the convolution's kernel.
        dilation: Dilation along columns.
        taps: Taps of the convolution's kernel.
        steps_per_tap: Steps of K in a tap, each of `channels`.
        channels: Channels of a step.
        resident: The whole weight stays in shared memory.
        sweep: A stage has the box of x for all taps of a row of the kernel, one buffer [images, channels] per column; `height` is 1 then.
        direct: A warpgroup multiplies 64 pixels by all outputs, not outputs by pixels.
        padding_terms: Sums of pixels with taps outside of the image need the terms of these taps from `table`.
        clamp: Whether y is clamped.
        codes_first: Whether this kernel's codes are the first tensor of an `Addition`.
        outputs_divisor: The number of outputs is passed divided by this.
        stride: Stride of the convolution, 1 or 2.
        slots: Slots in shared memory, of 64 outputs by 128 pixels, to which TMA loads residuals and from which it stores y; 0: none.
        registers: Registers per thread of the second warpgroup, and of the producer.
    """

    outputs: int
    images: int
    height: int
    width: int
    stages: int
    kernel_w: int
    dilation: int
    taps: int
    steps_per_tap: int
    channels: int
    resident: bool
    sweep: bool
    direct: bool
    padding_terms: bool
    clamp: bool
    codes_first: bool
    outputs_divisor: int
    stride: int
    slots: int
    registers: tuple[int, int]

    @property
    def taps_per_stage(self) -> int:
        return self.kernel_w if self.sweep else 1

    @property
    def halo(self) -> int:
        """Columns of x in a stage beyond those of y."""
        return (self.kernel_w - 1) * self.dilation if self.sweep else 0

    @property
    def columns_per_load(self) -> int:
        """Columns of x that one TMA load takes: with `sweep` the widest that divides both the box and its halo."""
        return math.gcd(self.width, self.halo) if self.sweep else self.width

    @property
    def buffers(self) -> int:
        """Buffers of x in a stage: with `sweep` one per column, otherwise one."""
        return self.width + self.halo if self.sweep else 1

    @property
    def buffer_pixels(self) -> int:
        """Pixels in a buffer of x."""
        return self.images if self.sweep else self.pixels

    @property
    def steps(self) -> int:
        """Stages that are loaded for a tile."""
        return self.taps // self.taps_per_stage * self.steps_per_tap

    @property
    def weight_buffers(self) -> int:
        """Buffers [outputs, channels] of the weight in shared memory."""
        return self.taps * self.steps_per_tap if self.resident else self.stages * self.taps_per_stage

    @property
    def pixels(self) -> int:
        """Pixels of a tile."""
        return self.images * self.height * self.width

    @property
    def half(self) -> tuple[int, int, int]:
        """Images, rows and columns of half of a tile's pixels, which one warpgroup stores through a slot."""
        if self.images > 1 and not self.sweep:
            return self.images // 2, self.height, self.width
        return (self.images, self.height // 2, self.width) if self.height > 1 else (self.images, 1, self.width // 2)

    @property
    def columns(self) -> int:
        """Columns of a warpgroup's sums, which have 64 rows: outputs with `direct`, otherwise pixels."""
        return self.outputs if self.direct else self.pixels * self.outputs // 128


@gluon.jit
def convolve(
    x_desc, weight_desc, table, y_desc, residual_desc, out, added, outputs, grid, image, window, bounds, table_stride, S: gl.constexpr
):
    """Compute the tiles program_id(0), program_id(0) + programs, … of y.

    x_desc, weight_desc    TMA descriptors of x and of the weight [outputs, K], in the shapes and boxes that `hopper.launch` makes
    y_desc, residual_desc  of out and of the residual, for halves of a tile; None without slots
    out                    [pixels, outputs], added: bias [outputs] and residual [pixels, outputs], each a pointer or None
    outputs                number of outputs / S.outputs_divisor
    """
    N = outputs * S.outputs_divisor  # the compiler derives from the factor how many elements a store may have
    STAGES: gl.constexpr = S.stages
    if table is not None:
        gdc_launch_dependents()
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=x_desc.layout.swizzle_byte_width, element_bitwidth=x_desc.layout.element_bitwidth, rank=2
    )
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * S.buffers, S.buffer_pixels, S.channels], SWIZZLED)
    weight_smem = gl.allocate_shared_memory(x_desc.dtype, [S.weight_buffers, S.outputs, S.channels], SWIZZLED)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    # Placeholders are barriers and buffers that are used anyway. The compiler would place y's memory over barriers for which no thread
    # waits, and might write these back later.
    weight_loaded = full
    slot_smem = x_smem
    slot_full = full
    slot_free = full
    if S.resident:
        weight_loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(weight_loaded, count=1)
    if S.slots:
        SLOT: gl.constexpr = gl.NVMMASharedLayout(y_desc.layout.swizzle_byte_width, y_desc.layout.element_bitwidth, rank=2)
        slot_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * S.slots, 64, 64], SLOT)
        slot_full = barriers(S.slots, 1)
        slot_free = barriers(S.slots, 2)
    fence_async_shared()
    gdc_wait()
    if table is None:  # from here on the next launch may write its weight (`scratch.double_buffer`)
        gdc_launch_dependents()
    smem = (x_smem, weight_smem, slot_smem)
    ring = (full, empty, weight_loaded, slot_full, slot_free)
    consumer_args = (smem, ring, table, y_desc, out, added, N, grid, image, window, bounds, table_stride)
    gl.warp_specialize(
        [
            (_consume, (consumer_args, 0, S)),
            (_consume, (consumer_args, 1, S)),
            (_produce, (x_desc, weight_desc, residual_desc, smem, ring, grid, window, S)),
        ],
        [4, 1],
        S.registers,
    )


@gluon.jit
def _tile_origin(tile, grid, S: gl.constexpr):
    """Return the first output, image, row and column of a tile."""
    output_tile = tile % grid[0]
    box = tile // grid[0]
    column_tile = box % grid[3]
    box = box // grid[3]
    return output_tile * S.outputs, box // grid[2] * S.images, box % grid[2] * S.height, column_tile * S.width


# The producer warp


@gluon.jit
def _produce(x_desc, weight_desc, residual_desc, smem, ring, grid, window, S: gl.constexpr):
    """Load the stages and the residuals of all tiles of this program, and first the weight if it is resident."""
    x_smem, weight_smem, slot_smem = smem
    full, empty, weight_loaded, slot_full, slot_free = ring
    STAGES: gl.constexpr = S.stages
    STEPS: gl.constexpr = S.steps
    TAPS_PER_STAGE: gl.constexpr = S.taps_per_stage
    WEIGHT_BUFFERS: gl.constexpr = S.weight_buffers
    ITEMSIZE: gl.constexpr = x_desc.dtype.primitive_bitwidth // 8
    WEIGHT_ROWS: gl.constexpr = 0 if S.resident else S.outputs * S.taps_per_stage
    STAGE_BYTES: gl.constexpr = ITEMSIZE * (S.channels * S.buffer_pixels * S.buffers + WEIGHT_ROWS * S.channels)
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.expect(weight_loaded, WEIGHT_BUFFERS * S.outputs * S.channels * ITEMSIZE)
        for t in range(WEIGHT_BUFFERS):
            _load_weight(weight_desc, weight_smem, weight_loaded, t, 0, t * S.channels, S)
    step = 0
    slot_step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, b, y, x = _tile_origin(tile, grid, S)
        for t in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), STAGE_BYTES)
            _load_x(x_desc, x_smem, full, stage, t, b, y, x, window, S)
            if not S.resident:
                for i in gl.static_range(TAPS_PER_STAGE):
                    tap_k = (t // S.steps_per_tap * TAPS_PER_STAGE + i) * (S.steps_per_tap * S.channels)
                    k = tap_k + t % S.steps_per_tap * S.channels
                    _load_weight(weight_desc, weight_smem, full.index(stage), stage * TAPS_PER_STAGE + i, n, k, S)
            step += 1
        if S.slots:
            for g in range(S.outputs // 64):
                slot = slot_step % S.slots
                mbarrier.wait(slot_free.index(slot), ((slot_step // S.slots) & 1) ^ 1)
                mbarrier.expect(slot_full.index(slot), 2 * 64 * 64 * ITEMSIZE)
                for i in gl.static_range(2):
                    target = reinterpret(
                        slot_smem.index(2 * slot + i), residual_desc.dtype, residual_desc.block_shape, residual_desc.layout
                    )
                    async_load(residual_desc, half_of(n + 64 * g, b, y, x, i, S), slot_full.index(slot), target)
                slot_step += 1


@gluon.jit
def _load_x(x_desc, x_smem, full, stage, t, b, y, x, window, S: gl.constexpr):
    """Load what step t of a tile reads of x: the tile's box from image b, row y and column x on, moved by the step's first tap."""
    BOX: gl.constexpr = x_desc.block_shape
    LOADS: gl.constexpr = S.buffers // S.columns_per_load if S.sweep else 1
    tap = t // S.steps_per_tap * S.taps_per_stage
    channel = t % S.steps_per_tap * S.channels
    down = tap // S.kernel_w * window.dilation_y - window.top
    right = tap % S.kernel_w * window.dilation_x - window.left
    iy = y + down
    ix = x + right
    if S.sweep:
        for i in gl.static_range(LOADS):
            first_buffer = x_smem.index(stage * S.buffers + i * S.columns_per_load)
            target = reinterpret(first_buffer, x_desc.dtype, BOX, x_desc.layout)  # LARGER_VIEWS
            async_load(x_desc, [iy, ix + i * S.columns_per_load, b, channel], full.index(stage), target)
    elif S.stride == 2:  # x is [image, row / 2, row % 2, column / 2, column % 2 and channel]
        target = reinterpret(x_smem.index(stage), x_desc.dtype, BOX, x_desc.layout)
        odd_channel = (right & 1) * (S.steps_per_tap * S.channels) + channel
        async_load(x_desc, [b, y + (down >> 1), down & 1, x + (right >> 1), odd_channel], full.index(stage), target)
    else:
        target = reinterpret(x_smem.index(stage), x_desc.dtype, BOX, x_desc.layout)
        async_load(x_desc, [b, iy, ix, channel], full.index(stage), target)


@gluon.jit
def _load_weight(weight_desc, weight_smem, barrier, buffer, n, k, S: gl.constexpr):
    """Load a step's columns of the weight, from k on, of a tile's rows, from n on."""
    BOX: gl.constexpr = weight_desc.block_shape
    target = weight_smem.index(buffer)
    if S.direct:
        async_load(weight_desc, [n // GROUP, 0, 0, 0, k], barrier, reinterpret(target, weight_desc.dtype, BOX, weight_desc.layout))
    else:
        async_load(weight_desc, [n, k], barrier, target)


# The consumer warpgroups, of which W is the index


@gluon.jit
def _consume(args, W: gl.constexpr, S: gl.constexpr):
    """Multiply a warpgroup's half of all tiles of this program, and write y."""
    smem, ring, table, y_desc, out, added, N, grid, image, window, bounds, table_stride = args
    x_smem, weight_smem, slot_smem = smem
    full, empty, weight_loaded, slot_full, slot_free = ring
    slots = Slots(slot_smem, slot_full, slot_free)
    bias, residual = added
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    TAPS_PER_STAGE: gl.constexpr = S.taps_per_stage
    PADDING_TAPS: gl.constexpr = S.taps if S.padding_terms else 0
    INTEGER: gl.constexpr = table is not None
    # Triton has no instruction of 256 columns for integers.
    MMA: gl.constexpr = sums_layout(128 if INTEGER and COLUMNS > 128 else COLUMNS, 32 if INTEGER else 16)
    # Sums are written in pieces of PIECE_WIDTH columns.
    WIDTH: gl.constexpr = COLUMNS if COLUMNS < 64 else 64
    PIECE_WIDTH: gl.constexpr = GROUP if S.direct else WIDTH
    PIECE: gl.constexpr = sums_layout(WIDTH, 32)
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.wait(weight_loaded, 0)
    step = 0
    slot_step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        if INTEGER:  # loaded before the products
            rn = gl.minimum(_place_of(tile, 0, W, grid, S).output + gl.arange(0, 64, layout=gl.SliceLayout(1, PIECE)), N - 1)
            constant = gl.load(table + rn)
            multiplier = gl.load(table + table_stride + rn)
            addend = gl.load(table + 2 * table_stride + rn).to(gl.int32, bitcast=True)
            padding_terms = ()
            for tap in gl.static_range(PADDING_TAPS):
                padding_terms += (gl.load(table + (4 + tap) * table_stride + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
            requant = Requantization(rn, constant, multiplier, addend, padding_terms)
        acc = gl.zeros([64, COLUMNS], gl.int32 if INTEGER else gl.float32, layout=MMA)
        for t in range(S.steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            for i in gl.static_range(TAPS_PER_STAGE):
                left, right = _operands(x_smem, weight_smem, stage, t, i, W, S)
                acc = warpgroup_mma(left, right, acc, is_async=True)
            acc = warpgroup_mma_wait(TAPS_PER_STAGE, deps=[acc])  # only this step's products are in flight: the previous stage was read
            if t > 0:
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        pieces = pieces_of(acc, PIECE_WIDTH)
        if S.slots:
            at = _place_of(tile, 0, W, grid, S)
            if INTEGER:
                slot_step = send_codes(acc, table, requant, y_desc, slots, slot_step, at, image, window, bounds, table_stride, W, S)
            else:
                slot_step = send(pieces, y_desc, slots, bias, slot_step, N, at, bounds, W, S)
        for i in gl.static_range(0 if S.slots else COLUMNS // PIECE_WIDTH):
            at = _place_of(tile, i * PIECE_WIDTH, W, grid, S)
            piece_residual = None
            if residual is not None:
                piece_residual = load_residual(residual, N, at, image, WIDTH, S)
            sums = pieces[i]
            if S.direct:
                sums = transposed_sums(sums)
            if INTEGER:
                write_codes(sums, table, requant, out, piece_residual, N, at, image, window, bounds, table_stride, S)
            else:
                write(sums, out, bias, piece_residual, N, at, image, bounds, S)
    if S.slots:
        tma.store_wait(0)


@gluon.jit
def _operands(x_smem, weight_smem, stage, t, TAP: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """Return a warpgroup's operands for tap TAP of a stage: weight [64, k] and x [k, columns], with `direct` x [64, k] and weight
    [k, columns]."""
    COLUMNS: gl.constexpr = S.columns
    w = weight_smem.index(
        (t // S.steps_per_tap * S.taps_per_stage + TAP) * S.steps_per_tap + t % S.steps_per_tap
        if S.resident
        else stage * S.taps_per_stage + TAP
    )
    if S.sweep:
        first_buffer = x_smem.index(stage * S.buffers + TAP * S.dilation)
        x = reinterpret(first_buffer, x_smem.dtype, [S.pixels, S.channels], x_smem.layout)  # LARGER_VIEWS
    else:
        x = x_smem.index(stage)
    if S.direct:
        return x.slice(W * 64, 64, dim=0), w.permute([1, 0])
    elif S.outputs == 128:
        return w.slice(W * 64, 64, dim=0), x.permute([1, 0])
    else:
        gl.static_assert(S.outputs == 64, "tiles that two warpgroups do not share")
        return w, x.slice(W * COLUMNS, COLUMNS, dim=0).permute([1, 0])


@gluon.jit
def _place_of(tile, column, W: gl.constexpr, grid, S: gl.constexpr):
    """Return the `Place` of columns `column` and on of a warpgroup's sums."""
    n, b, y, x = _tile_origin(tile, grid, S)
    if S.direct:
        return Place(n + column, W * 64, b, y, x)
    elif S.outputs == 128:
        return Place(n + W * 64, column, b, y, x)
    else:
        return Place(n, W * S.columns + column, b, y, x)
