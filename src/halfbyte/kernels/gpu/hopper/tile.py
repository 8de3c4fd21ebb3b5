"""A tile of a product with a weight in 4 or 8 bits on Hopper, y[m, n] = sum over k of x[m, k] * w[n, k]: block_m rows of x by 2 * `rows`
rows of the weight, w being dequantized on the way from shared memory to wgmma.

`kernels/gpu/linear/gemm_hopper.py` and `kernels/gpu/experts/grouped_hopper.py` build kernels from it: a persistent program has three roles.

    producer warp    `load_stage`, for each stage of each tile: TMA loads x, codes, scales and zeros into the `Ring`
    warpgroup 0      `multiply_slabs`, for each tile: dequantize a plane, start its wgmma, dequantize the next one, …; then write y
    warpgroup 1      the same for the next `rows` rows of the weight

    K:    |<------------- K slab, 128: a record of `layouts/gpu_tiles.py` ------------->|
          |    plane 0, 32    |      plane 1      |      plane 2      |      plane 3      |     w [rows, 32] · xᵀ [32, block_m]
          |                    stage of a tile with block_m <= 128                        |
          |           stage, block_m > 128        |                 stage                 |     of x; in 4 bits they share one of codes

The warpgroups never synchronize with each other: while one waits for its wgmma, or writes its part of y, the other one's products keep
the tensor cores busy. y leaves by TMA, too, through stages that the producer keeps free for it (`reserve_store_stages`).

Arithmetic: the weight is dequantized to x's type (`weights.py`), sums are float32. With one block along K its scale multiplies the sums.
Weights from subnormal codes, and their sums, are 2**-24 times as large (products below 2**-102 may be lost); the end multiplies by 2**24.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.hopper.epilogue import sums_layout
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, reinterpret
from halfbyte.kernels.gpu.hopper.ring import barriers, descriptor, next_stage
from halfbyte.kernels.gpu.hopper.weights import SUBNORMAL_SCALE, dequantize_plane, dequantize_two_planes, load_block_params, load_codes
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_of
from halfbyte.layouts import gpu_tiles

# A branch that ptxas can't replace by predicated instructions: over a loop that is never entered, as $1 is not negative. Without a branch
# ptxas moves the dequantization of the next planes, which is to overlap with wgmma, behind the wait for wgmma.
FENCE = gl.constexpr(
    "{.reg .pred p; setp.lt.s32 p, $1, 0; @!p bra.uni skip; again: nanosleep.u32 20; @p bra.uni again; skip: mov.b32 $0, $1;}"
)


class Operands(NamedTuple):
    """TMA descriptors of the operands; None for scales and zeros that the kernel does not read."""

    x: Value
    weight: Value
    scale: Value
    zero: Value


class Ring(NamedTuple):
    """Shared memory of the stages, and a barrier for each that is full and each that is empty.

    Attributes:
        x: [stages, block_m, stage_k]
        weight: [weight_stages, …] Codes.
        scale: [scale_slots * blocks_per_slab * 2, rows] Scales of both warpgroups' rows.
        zero: The same for zeros.
        full: [stages] The producer arrives.
        empty: [stages] Both consumers arrive.
    """

    x: Value
    weight: Value
    scale: Value
    zero: Value
    full: Value
    empty: Value


class XBoxes(NamedTuple):
    """A tile's first row of x, and how many TMA boxes of x, at least 1, have rows inside of it."""

    row: Value
    boxes: Value


class WeightOffset(NamedTuple):
    """Where a weight begins among several: in lines of 128 bytes, and in matrices of scales."""

    lines: Value
    matrix: Value


def stages_per_slab(block_m: int) -> int:
    """Return how many stages a K slab takes: two where few whole ones fit in shared memory."""
    return 2 if block_m > 128 else 1


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for.

    Attributes:
        rows: Rows of the weight per warpgroup.
        block_m: Rows of x per tile.
        stages: Stages of the ring.
        bits: Bits of a code.
        blocks_per_slab: Quantization blocks in a K slab of a row.
        slabs_per_block: K slabs in a block.
        one_block: One block along K, whose scale multiplies the sums.
        zero: Kind of zero.
        clamp: Whether y is clamped.
        tma_store: Whether TMA writes y, from stages of x.
        subnormal: Codes are read as subnormal numbers in bfloat16: one instruction scales two and subtracts their zero point or adds the
            offset.
        float_codes: Codes are 4-bit floats.
        paired: Codes are bytes in pairs (`layouts/gpu_tiles.py`).
        registers: Average per thread; None: all. Fewer let the kernel that prepares the next x start during this one.
        stage_rows: Rows of x that fit in a stage, where these are more than block_m (`narrower`); 0: block_m.
    """

    rows: int
    block_m: int
    stages: int
    bits: int
    blocks_per_slab: int
    slabs_per_block: int
    one_block: bool
    zero: Zero
    clamp: bool
    tma_store: bool = False
    subnormal: bool = False
    float_codes: bool = False
    paired: bool = False
    registers: int | None = None
    stage_rows: int = 0

    @property
    def subnormal_once(self) -> bool:
        """Whether a whole slab has the same factors for subnormal codes, which then stay in registers."""
        return self.subnormal and self.blocks_per_slab == 1 and not self.one_block

    @property
    def narrower(self) -> Static:
        """The same with tiles of 64 rows of x fewer, in stages of the same size: for the rows that are left after whole tiles."""
        return replace(self, block_m=self.block_m - 64, stage_rows=self.stage_rows or self.block_m)

    @property
    def sum_widths(self) -> tuple[int, ...]:
        """Columns of the tensors of sums, which must be powers of two: block_m is one, or 192 = 128 + 64."""
        return (128, 64) if self.block_m == 192 else (self.block_m,)

    @property
    def sum_starts(self) -> tuple[int, ...]:
        """The first column of each."""
        return tuple(sum(self.sum_widths[:i]) for i in range(len(self.sum_widths)))

    @property
    def operand(self) -> gl.DotOperandLayout:
        """Layout of a plane of the weight."""
        return gl.DotOperandLayout(0, sums_layout(self.sum_widths[0]), 2)

    @property
    def stages_per_slab(self) -> int:
        """Stages that a K slab takes."""
        return stages_per_slab(self.stage_rows or self.block_m)

    @property
    def weight_stages(self) -> int:
        """Stages of the weight, which in 4 bits hold whole slabs."""
        return -(-self.stages // self.stages_per_weight)

    @property
    def scale_slots(self) -> int:
        """Slots for a slab's scales and zeros: as many as slabs in the ring, and one more where slabs are halved.

        They arrive with a slab's first half, when the ring may still hold the second half of the oldest slab.
        """
        return self.stages // self.stages_per_slab + self.stages_per_slab - 1

    @property
    def stages_per_weight(self) -> int:
        """Stages of x that a stage of the weight serves."""
        return self.stages_per_slab if self.bits == 4 else 1

    @property
    def block_n(self) -> int:
        """Rows of the weight in a stage."""
        return 2 * self.rows

    @property
    def stage_k(self) -> int:
        """Elements along K in a stage."""
        return gpu_tiles.RECORD // self.stages_per_slab

    @property
    def store_stages(self) -> int:
        """Stages that a tile of y takes on its way to TMA: [block_m, 2 * rows] in stages of [block_m, stage_k]."""
        return 2 * self.rows // self.stage_k

    @property
    def store_sharers(self) -> int:
        """Warpgroups whose parts of y, [block_m, rows], are in one stage: 1 or 2."""
        return self.stage_k // self.rows


def one_block(geo: gpu_tiles.Geometry) -> bool:
    """Return whether a weight has one block along K, whose scale can multiply the sums (`Static.one_block`)."""
    return geo.block_rows == 1 and geo.format.zero != "offset"


class WeightFields(TypedDict):
    """The fields of `Static` that the weight decides."""

    bits: int
    blocks_per_slab: int
    slabs_per_block: int
    one_block: bool
    zero: Zero
    float_codes: bool


def of_weight(geo: gpu_tiles.Geometry) -> WeightFields:
    """Return the fields of `Static` that the weight decides; a record of its layout is a K slab here."""
    return {
        "bits": geo.format.bits,
        "blocks_per_slab": geo.blocks_a_record,
        "slabs_per_block": geo.records_a_block,
        "one_block": one_block(geo),
        "zero": zero_of(geo.format),
        "float_codes": has_floats(geo.format),
    }


def codes_descriptor(codes: Tensor, static: Static) -> TensorDescriptor:
    """Return a TMA descriptor of codes: 4 bits in lines of 128 bytes, a panel of a K slab; bytes [N padded, K padded], those of a stage."""
    return descriptor(codes.view(-1, 64), [32, 64]) if static.bits == 4 else descriptor(codes, [static.block_n, static.stage_k])


def scale_descriptors(scale: Tensor, zero: Tensor | None, static: Static) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return TMA descriptors of scales and zeros [matrices, block rows, N padded], in boxes of a K slab of a tile."""
    box = [1, static.blocks_per_slab, 2 * static.rows]
    of_scale = None if static.one_block else descriptor(scale, box, flat=True)
    return of_scale, None if zero is None else descriptor(zero, box, flat=True)


# Device functions. `S` is a Static, `operands` Operands, `ring` a Ring, `shape` a Shape.


@gluon.jit
def allocate_ring(operands, S: gl.constexpr):
    """Allocate the `Ring`. Where tiles of several widths share it, S is the Static of the widest."""
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    STAGES: gl.constexpr = S.stages
    SLOTS: gl.constexpr = S.scale_slots * S.blocks_per_slab * 2
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = gl.allocate_shared_memory(operands.x.dtype, [STAGES, BM, S.stage_k], operands.x.layout)
    WEIGHT: gl.constexpr = [S.weight_stages, ROWS * S.bits // 4, 64 if S.bits == 4 else S.stage_k]
    weight = gl.allocate_shared_memory(operands.weight.dtype, WEIGHT, operands.weight.layout)
    scale = x  # Triton wants a value in each field: these two are not read where operands.scale and .zero are None
    zero = x
    if operands.scale is not None:
        scale = gl.allocate_shared_memory(operands.scale.dtype, [SLOTS, ROWS], FLAT)
    if operands.zero is not None:
        zero = gl.allocate_shared_memory(operands.zero.dtype, [SLOTS, ROWS], FLAT)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    fence_async_shared()
    return Ring(x, weight, scale, zero, full, empty)


# The producer.


@gluon.jit
def load_stage(operands, ring, x_boxes, offset, pn, r, step, shape, S: gl.constexpr):
    """Load stage r of a tile into the ring, as soon as its place is empty.

    Args:
        operands: `Operands`.
        ring: `Ring`.
        x_boxes: `XBoxes` of the tile.
        offset: `WeightOffset`.
        pn: Index of the tile along N.
        r: Number of the stage within the tile: `S.stages_per_slab` for each of `shape.k_slabs`.
        step: Number of the stage, counted over all tiles of this program.
        shape: Sizes of the product (`ring.Shape`).
    """
    mbarrier.wait(ring.empty.index(step % S.stages), ((step // S.stages) & 1) ^ 1)
    load_weight(operands, ring, x_boxes.boxes, offset, pn, r, step, shape, S)
    load_x(operands.x, ring, x_boxes, r, step, S)


@gluon.jit
def load_weight(operands, ring, boxes, offset, pn, r, step, shape, S: gl.constexpr):
    """Load the weight of stage r, and expect the bytes of the whole stage, with so many boxes of x. Arguments are as for `load_stage`."""
    if S.stages_per_slab == 1:
        _load_weight(operands, ring, boxes, offset, pn, r, step, shape, True, True, S)
    elif r % 2 == 0:
        _load_weight(operands, ring, boxes, offset, pn, r, step, shape, S.bits == 8, True, S)
    else:  # 4 bits come with the slab's last stage of x: with its first, consumers would still read another slab there
        _load_weight(operands, ring, boxes, offset, pn, r, step, shape, True, False, S)


@gluon.jit
def _load_weight(operands, ring, boxes, offset, pn, r, step, shape, CODES: gl.constexpr, PARAMS: gl.constexpr, S: gl.constexpr):
    """Load codes if CODES, scales and zeros if PARAMS."""
    BLOCKS: gl.constexpr = S.blocks_per_slab
    BOX: gl.constexpr = operands.x.block_shape[0]
    BOXES: gl.constexpr = S.block_m // BOX
    CODE_BYTES: gl.constexpr = S.block_n * (S.stage_k if S.bits == 8 else 64) if CODES else 0
    SCALE: gl.constexpr = 0 if operands.scale is None else operands.scale.dtype.primitive_bitwidth // 8
    ZERO: gl.constexpr = 0 if operands.zero is None else operands.zero.dtype.primitive_bitwidth // 8
    PARAM_BYTES: gl.constexpr = BLOCKS * S.block_n * (SCALE + ZERO) if PARAMS else 0
    bar = ring.full.index(step % S.stages)
    for i in gl.static_range(1, BOXES + 1):  # expect takes constants only
        wanted = boxes == i if BOXES > 1 else True
        mbarrier.expect(bar, 2 * i * BOX * S.stage_k + CODE_BYTES + PARAM_BYTES, pred=wanted)
    if CODES:
        _load_codes(operands.weight, weight_stage(ring, step, S), offset, pn, r, bar, shape, S)
    if PARAMS:
        if operands.scale is not None:
            _load_params(operands.scale, ring.scale, offset, pn, r, step, bar, S)
        if operands.zero is not None:
            _load_params(operands.zero, ring.zero, offset, pn, r, step, bar, S)


@gluon.jit
def _load_codes(weight, stage, offset, pn, r, bar, shape, S: gl.constexpr):
    PANELS: gl.constexpr = S.rows // 32
    if S.bits == 8:
        # A row of the descriptor is a row of all its slabs of 128 bytes. An expert's weight begins at any line, thus in mid-row, too.
        row = offset.lines // shape.k_slabs + pn * S.block_n
        column = offset.lines % shape.k_slabs * 128 + r * S.stage_k
        async_load(weight, [row, column], bar, stage)
    else:
        for p in gl.static_range(PANELS):
            row = offset.lines + ((pn * PANELS + p) * shape.k_slabs + r // S.stages_per_weight) * 32
            async_load(weight, [row, 0], bar, stage.slice(p * 32, 32, dim=0))


@gluon.jit
def _load_params(params, buffer, offset, pn, r, step, bar, S: gl.constexpr):
    """Load the scales, or the zeros, of the K slab of stage r into its slot."""
    BLOCKS: gl.constexpr = S.blocks_per_slab
    slots = reinterpret(buffer, params.dtype, [S.scale_slots, 1, BLOCKS, 2 * S.rows], params.layout)
    slot = slots.index(step // S.stages_per_slab % S.scale_slots)
    async_load(params, [offset.matrix, r // S.stages_per_slab // S.slabs_per_block * BLOCKS, pn * S.block_n], bar, slot)


@gluon.jit
def load_x(xd, ring, x_boxes, r, step, S: gl.constexpr):
    """Load x of stage r, except boxes that are wholly out of bounds: stale data there is multiplied, and its sums are masked. (TMA takes
    longer to zero-fill rows than to read them.)"""
    BOX: gl.constexpr = xd.block_shape[0]
    BOXES: gl.constexpr = S.block_m // BOX
    stage = step % S.stages
    for i in gl.static_range(BOXES):
        to = ring.x.index(stage).slice(i * BOX, BOX, dim=0)
        inside = i < x_boxes.boxes if BOXES > 1 else True
        async_load(xd, [x_boxes.row + i * BOX, r * S.stage_k], ring.full.index(stage), to, pred=inside)


@gluon.jit
def weight_stage(ring, step, S: gl.constexpr):
    """Return the weight's slab, or half of one, that belongs to a stage of x."""
    return ring.weight.index(step // S.stages_per_weight % S.weight_stages)


@gluon.jit
def reserve_store_stages(ring, step, S: gl.constexpr):
    """Wait until the stages for y, from `step` on, are empty, and hand them to the consumers."""
    STORE_STAGES: gl.constexpr = S.store_stages
    for i in gl.static_range(STORE_STAGES):
        stage = (step + i) % S.stages
        mbarrier.wait(ring.empty.index(stage), (((step + i) // S.stages) & 1) ^ 1)
        mbarrier.arrive(ring.full.index(stage), count=1)


# The consumers.


@gluon.jit
def multiply_slabs(ring, stored, scale, first_n, count, step, high, shape, HALF: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Multiply `count` K slabs whose stages begin with `step`.

    Args:
        ring: The `Ring`.
        stored: With S.tma_store: 1 if a tile came before, whose stages in front of `step` are released once TMA has read them.
        scale: With S.one_block: pointer to the scales, loaded before the products, as that takes longer than the rest of the tile.
        first_n: The warpgroup's first row of the weight.
        count: K slabs, at least 1.
        step: Number of the first stage, counted over all tiles of this program.
        high: What `high_bytes` returned.
        shape: Sizes of the product (`ring.Shape`).
        HALF: Which of the two warpgroups this is.
        DTYPE: Type of x.

    Returns:
        float32 [rows, width] for each of `S.sum_widths`, and the step after the slabs.
    """
    OPERAND: gl.constexpr = S.operand
    ROWS: gl.constexpr = S.rows
    acc = ()
    for i in gl.static_range(len(S.sum_widths)):
        acc += (_zero_sums(i, S),)  # type: ignore[assignment]
    factor = gl.full([ROWS], SUBNORMAL_SCALE if S.subnormal else 1.0, gl.float32, layout=gl.SliceLayout(1, OPERAND.parent))
    if S.one_block:
        row = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OPERAND.parent))
        factor *= gl.load(scale + gl.minimum(row, shape.n_padded - 1)).to(gl.float32)
    if S.stages_per_slab == 1:
        acc, step = _multiply_whole(ring, stored, acc, count, step, high, HALF, DTYPE, S)
    else:
        acc, step = _multiply_halved(ring, stored, acc, count, step, high, HALF, DTYPE, S)
    total = ()
    for i in gl.static_range(len(S.sum_widths)):
        scaled = acc[i]
        if S.subnormal or S.one_block:
            of_rows = gl.convert_layout(factor, gl.SliceLayout(1, sums_layout(S.sum_widths[i])), assert_trivial=True)
            scaled *= gl.expand_dims(of_rows, 1)
        total += (scaled,)  # type: ignore[assignment]
    return total, step


# Both ways to multiply dequantize planes while the ones before them are multiplied. Instructions after a wgmma wait until it has read its
# operand, so that it is mostly the other warpgroup's products that overlap. The planes of a slab's first half are dequantized at the end of
# the slab before; after a tile's last slab those of whatever the stage holds are, and not used. While wgmma runs, the planes that it reads
# are dependencies of the wait for it, so that their registers are kept.


@gluon.jit
def _multiply_whole(ring, stored, acc, count, step, high, HALF: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """`multiply_slabs` where a stage is a slab: its products are short, so planes are interleaved one by one. Returns acc and step."""
    OPERAND: gl.constexpr = S.operand
    SUMS: gl.constexpr = len(S.sum_widths)
    stage, phase = step % S.stages, (step // S.stages) & 1
    mbarrier.wait(ring.full.index(stage), phase)
    params = load_block_params(ring, stage, HALF, OPERAND, DTYPE, S)
    codes = load_codes(ring.weight.index(stage), 0, HALF, OPERAND, S)
    w0 = dequantize_plane(codes, high, params, 0, OPERAND, DTYPE, S)
    _release_stored(ring, stored, step, HALF, S)
    for r in range(count):
        more = r + 1 < count
        following, following_phase = next_stage(stage, phase, S.stages)
        if S.bits == 8:  # the words of a plane; in 4 bits those of plane 0 are of all planes
            codes = load_codes(ring.weight.index(stage), 1, HALF, OPERAND, S)
        products = _multiply_plane(w0, ring, stage, acc, 0, S)
        w1 = dequantize_plane(codes, high, params, 1, OPERAND, DTYPE, S)
        products = _multiply_plane(w1, ring, stage, products, 1, S)
        if S.bits == 8:
            codes = load_codes(ring.weight.index(stage), 2, HALF, OPERAND, S)
        w2 = dequantize_plane(codes, high, params, 2, OPERAND, DTYPE, S)
        if S.bits == 8:
            codes = load_codes(ring.weight.index(stage), 3, HALF, OPERAND, S)
        products = _multiply_plane(w2, ring, stage, products, 2, S)
        w3 = dequantize_plane(codes, high, params, 3, OPERAND, DTYPE, S)
        products = _multiply_plane(w3, ring, stage, products, 3, S)
        products = warpgroup_mma_wait(2 * SUMS, deps=products + (w0, w1))[:SUMS]  # noqa: RUF005  # those of w2 and w3 go on
        mbarrier.wait(ring.full.index(following), following_phase, pred=more)
        following_params = load_block_params(ring, following, HALF, OPERAND, DTYPE, S)
        codes = load_codes(ring.weight.index(following), 0, HALF, OPERAND, S)
        w0 = dequantize_plane(codes, high, following_params, 0, OPERAND, DTYPE, S)
        gl.inline_asm_elementwise(FENCE, "=r,r", [high], dtype=gl.int32, is_pure=False, pack=1)
        acc = warpgroup_mma_wait(0, deps=products + (w2, w3))[:SUMS]  # noqa: RUF005
        mbarrier.arrive(ring.empty.index(stage), count=1)
        params = following_params
        step += 1
        stage, phase = following, following_phase
    return acc, step


@gluon.jit
def _multiply_halved(ring, stored, acc, count, step, high, HALF: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """`multiply_slabs` where a stage is half a slab: planes are dequantized by two. Returns acc and the next step.

    In 4 bits both halves' codes are in one stage of the weight, which arrives with the second one of x.
    """
    OPERAND: gl.constexpr = S.operand
    SUMS: gl.constexpr = len(S.sum_widths)
    mbarrier.wait(ring.full.index(step % S.stages), (step // S.stages) & 1)
    mbarrier.wait(ring.full.index((step + 1) % S.stages), ((step + 1) // S.stages) & 1)
    params = load_block_params(ring, step // 2 % S.scale_slots, HALF, OPERAND, DTYPE, S)
    w0, w1 = dequantize_two_planes(weight_stage(ring, step, S), high, params, 0, HALF, OPERAND, DTYPE, S)
    _release_stored(ring, stored, step, HALF, S)
    for r in range(count):
        more = r + 1 < count
        second_step = step + 1  # of this slab; behind a tile's last slab, the next one is that half itself, which has arrived
        next_step = second_step + gl.where(more, 1, 0)
        next_second_step = next_step + gl.where(more, 1, 0)
        first, second = step % S.stages, second_step % S.stages
        next_first, next_first_phase = next_step % S.stages, (next_step // S.stages) & 1
        next_second, next_second_phase = next_second_step % S.stages, (next_second_step // S.stages) & 1
        products = _multiply_plane(w0, ring, first, acc, 0, S)
        products = _multiply_plane(w1, ring, first, products, 1, S)
        w2, w3 = dequantize_two_planes(weight_stage(ring, second_step, S), high, params, 2, HALF, OPERAND, DTYPE, S)
        products = _multiply_plane(w2, ring, second, products, 2, S)
        products = _multiply_plane(w3, ring, second, products, 3, S)
        products = warpgroup_mma_wait(2 * SUMS, deps=products + (w0, w1))[:SUMS]  # noqa: RUF005  # those of w2 and w3 go on
        mbarrier.arrive(ring.empty.index(first), count=1)
        mbarrier.wait(ring.full.index(next_first), next_first_phase)
        if S.bits == 4:
            mbarrier.wait(ring.full.index(next_second), next_second_phase)
        next_params = load_block_params(ring, next_step // 2 % S.scale_slots, HALF, OPERAND, DTYPE, S)
        w0, w1 = dequantize_two_planes(weight_stage(ring, next_step, S), high, next_params, 0, HALF, OPERAND, DTYPE, S)
        # In 4 bits it has arrived: the wait is a branch, over which the compiler does not move dequantization, as FENCE.
        mbarrier.wait(ring.full.index(next_second), next_second_phase)
        acc = warpgroup_mma_wait(0, deps=products + (w2, w3))[:SUMS]  # noqa: RUF005
        mbarrier.arrive(ring.empty.index(second), count=1)
        params = next_params
        step += 2
    return acc, step


@gluon.jit
def _release_stored(ring, stored, step, HALF: gl.constexpr, S: gl.constexpr):
    """With S.tma_store, release this warpgroup's stage of the tile before, if there was one, once TMA has read it."""
    SHARERS: gl.constexpr = S.store_sharers
    if S.tma_store:
        tma.store_wait(0)
        mbarrier.arrive(
            ring.empty.index((step + S.stages - S.store_stages + HALF // SHARERS) % S.stages), count=2 // SHARERS, pred=stored > 0
        )


@gluon.jit
def _zero_sums(INDEX: gl.constexpr, S: gl.constexpr):
    ROWS: gl.constexpr = S.rows
    WIDTH: gl.constexpr = S.sum_widths[INDEX]
    return gl.zeros([ROWS, WIDTH], gl.float32, layout=sums_layout(WIDTH))


@gluon.jit
def _multiply_plane(w, ring, stage, acc, PLANE: gl.constexpr, S: gl.constexpr):
    """Start the wgmma of acc + w · xᵀ for plane PLANE, w [rows, 32] and xᵀ [32, width], for each tensor of sums."""
    sums = ()
    for i in gl.static_range(len(S.sum_widths)):
        rows = ring.x.index(stage)
        if S.stage_rows > 0:
            rows = rows.slice(S.sum_starts[i], S.sum_widths[i], dim=0)
        columns = rows.slice(PLANE * 32 % S.stage_k, 32, dim=1).permute([1, 0])
        operand = gl.convert_layout(w, gl.DotOperandLayout(0, sums_layout(S.sum_widths[i]), 2), assert_trivial=True)
        sums += (warpgroup_mma(operand, columns, acc[i], is_async=True),)  # type: ignore[assignment]
    return sums
