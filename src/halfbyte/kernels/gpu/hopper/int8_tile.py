"""A tile of rows of x by rows of the weight on Hopper's integer tensor cores: the tile of `linear/gemm_int8_hopper.py` and
`experts/grouped_int8_hopper.py`.

A producer warp loads K slabs (128 of K) of both operands, and the scales of their blocks, into a ring of stages; each consumer warpgroup
multiplies a panel of 64 rows of the weight by all rows of x (`int8_sums.py`). Programs that share a tile leave their sums in a workspace,
and the last to arrive adds them up in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.hopper.epilogue import sums_layout
from halfbyte.kernels.gpu.hopper.gluon_compat import FEWER_REGISTERS, async_load, async_store, reinterpret, thread_barrier
from halfbyte.kernels.gpu.hopper.int8_sums import scale_sums, sum_blocks, sum_whole
from halfbyte.kernels.gpu.hopper.reduction import pack_sums, unpack_sums
from halfbyte.kernels.gpu.hopper.ring import barriers, next_stage
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.problem import LOW_RANK

RANK = gl.constexpr(LOW_RANK)  # B fits in the stage of a panel of 4 bits
_INNER = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_OUTER = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


class Operands(NamedTuple):
    """TMA descriptors of the operands; None for those that the kernel does not read.

    Attributes:
        x: int8 codes.
        weight: int8 codes, or bytes of two.
        x_scale: Scales of the blocks of x.
        x_sums: Sums of the codes of the blocks of x.
        weight_scale: Scales of the blocks of the weight, in rows of 64.
        inner: Bytes of x A^T of all branches of low rank, in the place of a K slab of x.
        outer: B of all branches, one after the other.
        branch_rows: Rows of the weight that a branch has, whole tiles.
    """

    x: Value
    weight: Value
    x_scale: Value
    x_sums: Value
    weight_scale: Value
    inner: Value
    outer: Value
    branch_rows: Value


class Ring(NamedTuple):
    """Shared memory of the stages, named as in Operands, and a barrier for each stage that is full and each that is empty."""

    x: Value
    weight: Value
    x_scale: Value
    x_sums: Value
    weight_scale: Value
    full: Value
    empty: Value


class WeightOffset(NamedTuple):
    """Where a weight begins among several: in rows of the descriptors of the weight (4 bits) and of its scales."""

    lines: Value
    scale_row: Value


class RowOrder(NamedTuple):
    """Rows of y for rows of x: order[i] for i < end. y is NaN unless `valid`."""

    order: Value
    end: Value
    valid: Value


class Target(NamedTuple):
    """Where y is written.

    Attributes:
        outputs: `epilogue.Outputs`.
        staging: Shared memory from which TMA writes y, if outputs.y_tma is not None.
        order: `RowOrder`; None: rows of y are those of x.
        shape: `ring.Shape`.
    """

    outputs: Value
    staging: Value
    order: Value
    shape: Value


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for.

    Attributes:
        bits: Of a code of the weight.
        zero: Kind of the weight's zero.
        scale_bytes: Of a scale of the weight.
        whole: A product is one sum of integers.
        row_scale: A row of x has one scale.
        block_m: Rows of x per tile.
        panels: Panels of 64 rows of the weight per tile, a warpgroup each (1 or 2).
        stages: Stages of the ring.
        chained: Four blocks' integers are summed without a new start (`int8_sums.py`).
        early: The weight is loaded before x is quantized.
        clamp: Whether y is clamped.
        split: Programs that share a tile.
        halve_rest: Tiles of the last wave are halved.
        stage_rows: Rows of x that fit in a stage, if more than block_m.
        low_rank: A branch of low rank is added to the sums: a stage after the K slabs has its operands.
    """

    bits: int
    zero: Zero
    scale_bytes: int
    whole: bool
    row_scale: bool
    block_m: int
    panels: int
    stages: int
    chained: bool
    early: bool
    clamp: bool
    split: int = 1
    halve_rest: bool = False
    stage_rows: int = 0
    low_rank: bool = False

    @property
    def narrower(self) -> Static:
        """For tiles of half as many rows of x, in the same stages."""
        return replace(self, block_m=self.block_m // 2, stage_rows=self.stage_rows or self.block_m)

    @property
    def epilogue_rows(self) -> int:
        """Rows of x per epilogue: half of a tile's where blocks are scaled, and where the registers hold no more."""
        return self.block_m if self.whole and self.block_m < 256 else self.block_m // 2

    @property
    def mma_rows(self) -> int:
        """Rows of x per wgmma."""
        return self.block_m if self.whole else self.epilogue_rows

    @property
    def overlapped(self) -> bool:
        """Whether products of two K slabs may run at once: in large tiles the other warpgroup's suffice."""
        return self.block_m * self.panels <= (256 if self.bits == 4 else 128)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a K slab of both operands, and of its scales and sums."""
        total = 128 * self.block_m + 1024 * self.bits * self.panels
        if not self.whole:
            per_row = 4 * ((not self.row_scale) + (self.zero != "none"))
            total += per_row * (self.stage_rows or self.block_m) + self.scale_bytes * 64 * self.panels
        return total

    @property
    def registers(self) -> int | None:
        """Average per thread: few enough that the kernel that quantizes the next x starts during this one; None where sums take all."""
        if self.zero != "none" and not self.whole:
            return None
        return 168 if self.panels == 1 or self.low_rank else 136 if self.whole and not FEWER_REGISTERS else 144

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """Layout of sums; n is a power of two, and 128 is the largest for which Triton 3.6 multiplies integers."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(self.mma_rows, 128), 32])

    @property
    def operand(self) -> gl.DotOperandLayout:
        """Layout of the weight in registers."""
        return gl.DotOperandLayout(0, self.sums, 4)


# Device functions. `S` is a Static, `operands` Operands, `ring` a Ring, `shape` a Shape. `x_params` are pointers to the scales of the rows
# of x and to the sums of their codes, `w_params` to the scales and zeros of the weight.


@gluon.jit
def allocate_ring(operands, S: gl.constexpr):
    """Allocate the `Ring`."""
    STAGES: gl.constexpr = S.stages
    PANELS: gl.constexpr = S.panels
    BM: gl.constexpr = S.block_m
    LINES: gl.constexpr = 8 * S.bits
    x = gl.allocate_shared_memory(gl.int8, [STAGES, BM, 128], operands.x.layout)
    weight = gl.allocate_shared_memory(gl.int8, [STAGES * PANELS, LINES, 128], operands.weight.layout)
    x_scale = x  # a placeholder that is never read
    x_sums = x
    weight_scale = x
    if operands.x_scale is not None:
        x_scale = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], operands.x_scale.layout)
    if operands.x_sums is not None:
        x_sums = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], operands.x_sums.layout)
    if operands.weight_scale is not None:
        weight_scale = gl.allocate_shared_memory(operands.weight_scale.dtype, [STAGES * PANELS, 1, 64], operands.weight_scale.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, PANELS)
    fence_async_shared()
    return Ring(x, weight, x_scale, x_sums, weight_scale, full, empty)


@gluon.jit
def load_tile(operands, offset, ring, first_m, pn, first, end, stage, phase, shape, S: gl.constexpr):
    """Load K slabs first … end - 1 of the rows of x from first_m on and of tile pn of the weight. Returns the stage and phase after
    them."""
    for r in range(first, end):
        mbarrier.wait(ring.empty.index(stage), phase)
        load_weight(operands, ring, offset.lines, pn, r, stage, shape, S)
        load_x_and_scales(operands, ring, offset.scale_row, first_m, pn, r, stage, shape, S)
        stage, phase = next_stage(stage, phase, S.stages)
    if S.low_rank:
        mbarrier.wait(ring.empty.index(stage), phase)
        _load_low_rank(operands, ring, first_m, pn, stage, S)
        stage, phase = next_stage(stage, phase, S.stages)
    return stage, phase


@gluon.jit
def _load_low_rank(operands, ring, first_m, pn, stage, S: gl.constexpr):
    """Load x A^T and B of a tile: as many bytes as a K slab of 4 bits has."""
    PANELS: gl.constexpr = S.panels
    BOX: gl.constexpr = operands.inner.block_shape[0]
    bar = ring.full.index(stage)
    mbarrier.expect(bar, S.stage_bytes)
    column = pn * (64 * PANELS) // operands.branch_rows * (2 * RANK)
    for i in gl.static_range(S.block_m // BOX):
        async_load(operands.inner, [first_m + i * BOX, column], bar, ring.x.index(stage).slice(i * BOX, BOX, dim=0))
    outer = reinterpret(ring.weight, operands.outer.dtype, [S.stages * PANELS, 64, RANK], _OUTER)
    for p in gl.static_range(PANELS):
        async_load(operands.outer, [(pn * PANELS + p) * 64, 0], bar, outer.index(stage * PANELS + p))


@gluon.jit
def _add_low_rank(total, ring, stage, PANEL: gl.constexpr, INDEX: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return total + B (x A^T)^T of the INDEX-th rows of x of a tile."""
    ROWS: gl.constexpr = S.epilogue_rows
    SUMS: gl.constexpr = sums_layout(ROWS)
    STAGE_ROWS: gl.constexpr = S.stage_rows if S.stage_rows > 0 else S.block_m
    inner = reinterpret(ring.x, DTYPE, [S.stages, STAGE_ROWS, 64], _INNER).index(stage)
    inner = inner.slice(INDEX * ROWS, ROWS, dim=0).slice(0, RANK, dim=1)
    outer = reinterpret(ring.weight, DTYPE, [S.stages * S.panels, 64, RANK], _OUTER).index(stage * S.panels + PANEL)
    total = gl.convert_layout(total, SUMS, assert_trivial=True)
    total = warpgroup_mma(outer, inner.permute([1, 0]), total, is_async=True)
    return gl.convert_layout(warpgroup_mma_wait(0, deps=[total]), S.sums, assert_trivial=True)


@gluon.jit
def load_weight(operands, ring, first_line, pn, r, stage, shape, S: gl.constexpr):
    """Load K slab r of the weight, and expect the bytes of the whole stage."""
    PANELS: gl.constexpr = S.panels
    bar = ring.full.index(stage)
    mbarrier.expect(bar, S.stage_bytes)
    for p in gl.static_range(PANELS):
        panel = pn * PANELS + p
        if S.bits == 4:
            async_load(operands.weight, [first_line + (panel * shape.k_slabs + r) * 32, 0], bar, ring.weight.index(stage * PANELS + p))
        else:
            async_load(operands.weight, [panel * 64, r * 128], bar, ring.weight.index(stage * PANELS + p))


@gluon.jit
def load_x_and_scales(operands, ring, first_scale_row, first_m, pn, r, stage, shape, S: gl.constexpr):
    """Load K slab r of x, and the scales and sums of both operands."""
    PANELS: gl.constexpr = S.panels
    BOX: gl.constexpr = operands.x.block_shape[0]
    bar = ring.full.index(stage)
    for i in gl.static_range(S.block_m // BOX):
        async_load(operands.x, [first_m + i * BOX, r * 128], bar, ring.x.index(stage).slice(i * BOX, BOX, dim=0))
    if operands.x_scale is not None:
        async_load(operands.x_scale, [r, first_m], bar, ring.x_scale.index(stage))
    if operands.x_sums is not None:
        async_load(operands.x_sums, [r, first_m], bar, ring.x_sums.index(stage))
    for p in gl.static_range(PANELS):
        if operands.weight_scale is not None:
            row = first_scale_row + r * (shape.n_padded // 64) + pn * PANELS + p
            async_load(operands.weight_scale, [row, 0], bar, ring.weight_scale.index(stage * PANELS + p))


@gluon.jit
def multiply_tile(
    ring, x_params, w_params, target, scratch, tile, m, n, first, count, stage, phase, PANEL: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Multiply a warpgroup's panel of a tile, and write y.

    Args:
        target: `Target`.
        scratch: If S.split > 1: workspace and arrival counters of programs that share tile `tile`.
        m: First row of x.
        n: First row of the weight.
        first: First K slab.
        count: Number of K slabs.
        stage: Stage of the first, like `phase`.

    Returns:
        The stage and phase after them.
    """
    ROWS: gl.constexpr = S.epilogue_rows
    MMA: gl.constexpr = S.sums
    rn = gl.minimum(n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), target.shape.n_padded - 1)
    # Factors of the sums are loaded before the products.
    if ROWS == S.block_m:
        by_x = (_row_scales(x_params, m, S),)
    else:
        by_x = (_row_scales(x_params, m, S), _row_scales(x_params, m + ROWS, S))  # type: ignore[assignment]
    by_w = w_params[0]
    if S.whole:
        by_w = gl.expand_dims(gl.load(w_params[0] + rn).to(gl.float32), 1)
        acc, stage, phase = sum_whole(ring, stage, phase, count, PANEL, S)
        if ROWS == S.block_m:
            sums = (acc,)
        else:
            sums = gl.split(acc.reshape([64, 2, ROWS]).permute([0, 2, 1]))
    else:
        left, right, stage, phase = sum_blocks(ring, stage, phase, first, count, (w_params[1], rn, target.shape.n_padded), PANEL, S)
        sums = (left, right)  # type: ignore[assignment]
    finishes = True
    if S.split > 1:
        finishes = _leave_sums(sums, scratch, tile, PANEL, S)
    if S.low_rank:
        mbarrier.wait(ring.full.index(stage), phase)
    if finishes:
        for i in gl.static_range(S.block_m // ROWS):
            total = sums[i]
            if S.split > 1:
                total = _add_up(scratch, tile, i, PANEL, S)
            _write_sums(total, by_x[i], by_w, x_params, w_params, rn, target, n, m + i * ROWS, ring, stage, PANEL, i, S)
    if S.low_rank:
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, S.stages)
    return stage, phase


@gluon.jit
def _slots_of(scratch, tile, PANEL: gl.constexpr, S: gl.constexpr):
    """Return where the first program that shares a tile leaves its first sums of a panel, and the distance to the next program's."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    SIZE: gl.constexpr = 64 * S.block_m
    slot = scratch[0] + tile * (S.split * S.panels * SIZE) + PANEL * SIZE
    slot += gl.expand_dims(gl.arange(0, S.epilogue_rows // 8, layout=gl.SliceLayout(1, LANES)), 1) * 512
    return slot + gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, LANES)), 0), S.panels * SIZE


@gluon.jit
def _leave_sums(sums, scratch, tile, PANEL: gl.constexpr, S: gl.constexpr):
    """Store a program's sums for the last to arrive of those that share its tile. Returns whether it is the last."""
    slot, slot_stride = _slots_of(scratch, tile, PANEL, S)
    slot += gl.program_id(0) % S.split * slot_stride
    COUNT: gl.constexpr = S.block_m // S.epilogue_rows
    for i in gl.static_range(COUNT):
        gl.store(slot + i * (64 * S.epilogue_rows), pack_sums(gl.convert_layout(sums[i], S.sums, assert_trivial=True)))
    thread_barrier()  # orders this warpgroup's stores before its arrival
    counter = scratch[1] + tile * S.panels + PANEL
    last = gl.atomic_add(counter, 1, sem="acq_rel") == S.split - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _add_up(scratch, tile, INDEX: gl.constexpr, PANEL: gl.constexpr, S: gl.constexpr):
    """Return the INDEX-th sums of a tile, of all programs that share it."""
    SPLIT: gl.constexpr = S.split
    slot, slot_stride = _slots_of(scratch, tile, PANEL, S)
    slot += INDEX * (64 * S.epilogue_rows)
    total = gl.load(slot, cache_modifier=".cg")
    for j in gl.static_range(1, SPLIT):
        total += gl.load(slot + j * slot_stride, cache_modifier=".cg")
    return unpack_sums(total, 64)


@gluon.jit
def _row_scales(x_params, first, S: gl.constexpr):
    """Load the scales of the rows of x of an epilogue, one or two per thread until they are used."""
    ROWS: gl.constexpr = S.epilogue_rows
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if S.row_scale:
        return gl.load(x_params[0] + first + gl.arange(0, ROWS, layout=LINE))
    else:
        return x_params[0]


@gluon.jit
def _write_sums(
    total, by_x, by_w, x_params, w_params, rn, target, first_n, first_m, ring, stage,
    PANEL: gl.constexpr, INDEX: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Scale integers of all of K, or scaled sums of blocks, [64, epilogue_rows], and write y."""
    outputs, staging, order, shape = target
    ROWS: gl.constexpr = S.epilogue_rows
    MMA: gl.constexpr = S.sums
    DTYPE: gl.constexpr = outputs.y.dtype.element_ty
    total = gl.convert_layout(total, MMA, assert_trivial=True)
    if S.whole:
        z = by_w
        m = by_w
        if S.zero != "none":
            z = gl.expand_dims(gl.load(w_params[1] + rn), 1)
            m = gl.expand_dims(gl.load(x_params[1] + first_m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))), 0)
        total = scale_sums(total.to(gl.float32), by_w, z, m, S)
    if S.row_scale:
        total *= gl.expand_dims(gl.convert_layout(by_x, gl.SliceLayout(0, MMA)), 0) * (0.0625 if S.bits == 4 else 1.0)
    elif S.bits == 4:
        total *= 0.0625
    if S.low_rank:
        total = _add_low_rank(total, ring, stage, PANEL, INDEX, DTYPE, S)
    if outputs.y_tma is not None:
        row = first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        y = finish(total, (outputs.bias, None), row, None, shape.n, outputs.low, outputs.high, S.clamp, DTYPE, None)
        tma.store_wait(0)
        thread_barrier()  # TMA has read the previous tile
        staging.permute([1, 0]).store(y)
        fence_async_shared()
        async_store(outputs.y_tma, [first_m, first_n], staging)
    else:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        rn = first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
        rm = first_m + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
        if order is None:
            inside = rm < shape.m
        else:
            inside = rm < order.end
            rm = gl.load(order.order + rm, mask=inside, other=0)
            total = gl.where(order.valid, total, float("nan"))
        mask = gl.expand_dims(rn < shape.n, 1) & gl.expand_dims(inside, 0)
        at = gl.expand_dims(rm, 0).to(gl.int64) * shape.n + gl.expand_dims(rn, 1)
        added = (outputs.bias, outputs.residual)
        y = finish(gl.convert_layout(total, OUT), added, rn, rm, shape.n, outputs.low, outputs.high, S.clamp, DTYPE, mask)
        gl.store(outputs.y + at, y, mask=mask)
