"""float32 sums [rows, block_m] of many rows of x with a weight in 4 or 8 bits on Hopper: the tile that `gemm_hopper.py` and
`grouped_hopper.py` are made of.

One warp keeps records (128 k; of large tiles half a record) of both operands on their way to shared memory; two warpgroups multiply `rows`
rows of the weight each by `block_m` rows of x. A plane of a record (32 k), of large tiles two, becomes floating point while the wgmma of
those before it run, and one warpgroup's waits lie under the other's products. They never wait for each other, so that one multiplies
while the other ends its tile: it puts the sums into a stage of the ring that the first warp has kept free, from where TMA writes them.

Arithmetic: the weight is made in x's type (`weights.py`), sums are float32. One scale a row of the weight is
multiplied with the sums. Lifted weights and sums are 2**-24 times as much (products below 2**-102 may be lost), which the end makes good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, async_store, reinterpret
from halfbyte.kernels.gpu.hopper.stages import barriers, next_stage
from halfbyte.kernels.gpu.hopper.weights import LIFT, as_weights, codes_at, tails_at, two_planes
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_of
from halfbyte.layouts import gpu_tiles

PIECES = gl.constexpr(4)  # of columns, written one after the other
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1]))  # of what lanes write
# A branch that the compiler can't make predicates of, over a loop that is never entered ($1 is not negative).
FENCE = gl.constexpr(
    "{.reg .pred p; setp.lt.s32 p, $1, 0; @!p bra.uni skip; again: nanosleep.u32 20; @p bra.uni again; skip: mov.b32 $0, $1;}"
)


def parts_of(block_m: int) -> int:
    """Stages that a record takes: two where few whole ones fit."""
    return 2 if block_m > 128 else 1


@gluon.constexpr_function
def _sums_layout(width):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for."""

    rows: int
    block_m: int
    stages: int
    bits: int
    groups: int  # blocks in a record
    wide: int  # records in a block
    whole: bool  # one block along K: its scale is multiplied with the sums
    zero: Zero
    clamp: bool
    sent: bool = False  # tiles are written by TMA, from stages of x
    lifted: bool = False  # one instruction scales two codes and takes their point off or adds their offset, in bfloat16
    table: bool = False  # codes are 4-bit floats
    paired: bool = False  # codes are bytes in pairs (`layouts/gpu_tiles.py`)
    registers: int | None = None  # of a thread on the average: fewer than all let the kernel that makes the next x start beside
    room: int = 0  # rows of x that a stage has room for, where they are more than block_m

    @property
    def lifts_once(self) -> bool:
        """What planes are lifted by is the same for a whole record, and kept for it."""
        return self.lifted and self.groups == 1 and not self.whole

    @property
    def narrower(self) -> Static:
        """For tiles of 64 rows of x fewer, in the same stages."""
        return replace(self, block_m=self.block_m - 64, room=self.room or self.block_m)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the tensors that hold a tile's sums, which are powers of two."""
        return (128, 64) if self.block_m == 192 else (self.block_m,)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first column of each."""
        return tuple(sum(self.widths[:i]) for i in range(len(self.widths)))

    @property
    def operand(self) -> gl.DotOperandLayout:
        """Of planes of the weight, as they are made."""
        return gl.DotOperandLayout(0, _sums_layout(self.widths[0]), 2)

    @property
    def parts(self) -> int:
        """Stages that a record takes."""
        return parts_of(self.room or self.block_m)

    @property
    def weights(self) -> int:
        """Stages of the weight: of 4 bits, whole records."""
        return -(-self.stages // self.each)

    @property
    def tails(self) -> int:
        """Places of a record's scales and zeros. They come with its first stage of x: where that is half of it, one more is needed."""
        return self.stages // self.parts + self.parts - 1

    @property
    def each(self) -> int:
        """Stages of x that a stage of the weight serves."""
        return self.parts if self.bits == 4 else 1

    @property
    def block_n(self) -> int:
        """Rows of the weight that a stage holds."""
        return 2 * self.rows

    @property
    def width(self) -> int:
        """Elements along K of a stage."""
        return gpu_tiles.RECORD // self.parts

    @property
    def places(self) -> int:
        """Stages that a tile fills which TMA writes: one for each warpgroup, or one for both. A whole number of records."""
        return 2 * self.rows // self.width

    @property
    def beside(self) -> int:
        """Warpgroups that share such a stage."""
        return self.width // self.rows


def whole(geo: gpu_tiles.Geometry) -> bool:
    """`Static.whole` of a weight."""
    return geo.block_rows == 1 and geo.format.zero != "offset"


def of_weight(geo: gpu_tiles.Geometry) -> dict[str, Any]:
    """What a Static has from the weight."""
    return {
        "bits": geo.format.bits,
        "groups": geo.blocks_a_record,
        "wide": geo.records_a_block,
        "whole": whole(geo),
        "zero": zero_of(geo.format),
        "table": has_floats(geo.format),
    }


def tails_read(scale: Tensor, zero: Tensor | None, static: Static) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """How TMA reads scales and zeros [matrices, block rows, N padded]: those of a record of a tile at once."""

    def read(of_blocks: Tensor) -> TensorDescriptor:
        flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * of_blocks.element_size(), rank=3)
        return TensorDescriptor.from_tensor(of_blocks, [1, static.groups, 2 * static.rows], flat)

    return None if static.whole else read(scale), None if zero is None else read(zero)


# Device functions. `S` is a Static; `sizes` is (M, N, N padded, records of a tile); `read` is what TMA reads (x, weight, scales, zeros),
# `buffers` where to.


@gluon.jit
def ring(read, S: gl.constexpr):
    """Shared memory for `stages` stages of x and of the weight, and the barriers that say which are full and which are free."""
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    STAGES: gl.constexpr = S.stages
    GROUPS: gl.constexpr = S.groups
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    xs = gl.allocate_shared_memory(read[0].dtype, [STAGES, BM, S.width], read[0].layout)
    ws = gl.allocate_shared_memory(read[1].dtype, [S.weights, ROWS * S.bits // 4, 64 if S.bits == 4 else S.width], read[1].layout)
    buffers = (xs, ws)
    for i in gl.static_range(2, 4):
        of_blocks = xs  # what is not there is not read
        if read[i] is not None:
            of_blocks = gl.allocate_shared_memory(read[i].dtype, [S.tails * GROUPS * 2, ROWS], FLAT)
        buffers += (of_blocks,)  # type: ignore[assignment]
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    fence_async_shared()
    return buffers, full, empty


@gluon.jit
def load_stage(read, buffers, full, empty, rows, matrix, pn, r, step, sizes, S: gl.constexpr):
    """Stage r of a tile on its way to shared memory, the `step`th in all; rows: its first of x, and how many boxes of x have rows at all;
    `matrix` is how many times 128 bytes are in front of the weight, and how many matrices of scales."""
    mbarrier.wait(empty.index(step % S.stages), ((step // S.stages) & 1) ^ 1)
    load_weight(read, buffers, full, rows[1], matrix, pn, r, step, sizes, S)
    load_x(read[0], buffers[0], full, rows, r, step, S)


@gluon.jit
def load_weight(read, buffers, full, boxes, matrix, pn, r, step, sizes, S: gl.constexpr):
    """The weight's half of it, and how many bytes are to come in all."""
    if S.parts == 1:
        _load_weight(read, buffers, full, boxes, matrix, pn, r, step, sizes, True, True, S)
    elif r % 2 == 0:
        _load_weight(read, buffers, full, boxes, matrix, pn, r, step, sizes, S.bits == 8, True, S)
    else:  # words come with the last of their stages of x: with the first, another record would still be read where they go
        _load_weight(read, buffers, full, boxes, matrix, pn, r, step, sizes, True, False, S)


@gluon.jit
def _load_weight(read, buffers, full, boxes, matrix, pn, r, step, sizes, CODES: gl.constexpr, TAILS: gl.constexpr, S: gl.constexpr):
    PANELS: gl.constexpr = S.rows // 32
    GROUPS: gl.constexpr = S.groups
    BOX: gl.constexpr = read[0].block_shape[0]
    BOXES: gl.constexpr = S.block_m // BOX
    CODE_BYTES: gl.constexpr = S.block_n * (S.width if S.bits == 8 else 64) if CODES else 0
    SCALE: gl.constexpr = 0 if read[2] is None else read[2].dtype.primitive_bitwidth // 8
    ZERO: gl.constexpr = 0 if read[3] is None else read[3].dtype.primitive_bitwidth // 8
    TAIL_BYTES: gl.constexpr = GROUPS * S.block_n * (SCALE + ZERO) if TAILS else 0
    bar = full.index(step % S.stages)
    for i in gl.static_range(1, BOXES + 1):  # it takes constants
        mine = boxes == i if BOXES > 1 else True
        mbarrier.expect(bar, 2 * i * BOX * S.width + CODE_BYTES + TAIL_BYTES, pred=mine)
    if CODES:
        to = weight_stage(buffers[1], step, S)
        if S.bits == 8:
            row, column = matrix[0] // sizes[3] + pn * S.block_n, matrix[0] % sizes[3] * 128 + r * S.width
            async_load(read[1], [row, column], bar, to)
        else:
            for p in gl.static_range(PANELS):
                row = matrix[0] + ((pn * PANELS + p) * sizes[3] + r // S.each) * 32
                async_load(read[1], [row, 0], bar, to.slice(p * 32, 32, dim=0))
    for i in gl.static_range(2, 4 if TAILS else 2):
        if read[i] is not None:
            boxes = reinterpret(buffers[i], read[i].dtype, [S.tails, 1, GROUPS, 2 * S.rows], read[i].layout)
            to = boxes.index(step // S.parts % S.tails)
            async_load(read[i], [matrix[1], r // S.parts // S.wide * GROUPS, pn * S.block_n], bar, to)


@gluon.jit
def load_x(xd, xs, full, rows, r, step, S: gl.constexpr):
    """The other half, but for boxes that have no rows: what was there before is multiplied, and not written. (TMA takes longer to fill rows
    that are not there than to read others.)"""
    BOX: gl.constexpr = xd.block_shape[0]
    BOXES: gl.constexpr = S.block_m // BOX
    stage = step % S.stages
    for i in gl.static_range(BOXES):
        to = xs.index(stage).slice(i * BOX, BOX, dim=0)
        there = i < rows[1] if BOXES > 1 else True
        async_load(xd, [rows[0] + i * BOX, r * S.width], full.index(stage), to, pred=there)


@gluon.jit
def weight_stage(ws, step, S: gl.constexpr):
    """Shared memory of the weight's record or half of one that belongs to a stage of x."""
    return ws.index(step // S.each % S.weights)


@gluon.jit
def keep_free(full, empty, step, S: gl.constexpr):
    """The places of a tile's sums: the stages from `step` on, with nothing to come."""
    PLACES: gl.constexpr = S.places
    for i in gl.static_range(PLACES):
        stage = (step + i) % S.stages
        mbarrier.wait(empty.index(stage), (((step + i) // S.stages) & 1) ^ 1)
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _zeros(SUMS: gl.constexpr, S: gl.constexpr):
    ROWS: gl.constexpr = S.rows
    WIDTH: gl.constexpr = S.widths[SUMS]
    return gl.zeros([ROWS, WIDTH], gl.float32, layout=_sums_layout(WIDTH))


@gluon.jit
def _multiplied(w, xs, stage, acc, PLANE: gl.constexpr, S: gl.constexpr):
    """acc + plane PLANE of the weight by its columns of xᵀ [32, block_m], for each of a tile's sums."""
    found = ()
    for i in gl.static_range(len(S.widths)):
        rows = xs.index(stage)
        if S.room > 0:
            rows = rows.slice(S.starts[i], S.widths[i], dim=0)
        columns = rows.slice(PLANE * 32 % S.width, 32, dim=1).permute([1, 0])
        operand = gl.convert_layout(w, gl.DotOperandLayout(0, _sums_layout(S.widths[i]), 2), assert_trivial=True)
        found += (warpgroup_mma(operand, columns, acc[i], is_async=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def sums(buffers, full, empty, owed, scale, first_n, count, step, high, sizes, HALF: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """float32 [rows, width] for each of `S.widths`, of `count` records whose stages begin with `step`; and the step after them.

    scale   where those of whole rows stand, of which the tile's begin with first_n: read at once, as that takes longer than what is left
            to do when the products are there
    owed    if S.sent: 1 if a tile was before, whose places in front of `step` are given back when TMA has read them
    """
    xs, ws, _ss, _zs = buffers
    OPERAND: gl.constexpr = S.operand
    ROWS: gl.constexpr = S.rows
    STAGES: gl.constexpr = S.stages
    BESIDE: gl.constexpr = S.beside
    ONE: gl.constexpr = S.parts == 1
    SUMS: gl.constexpr = len(S.widths)
    acc = ()
    for i in gl.static_range(SUMS):
        acc += (_zeros(i, S),)  # type: ignore[assignment]
    factor = gl.full([ROWS], LIFT if S.lifted else 1.0, gl.float32, layout=gl.SliceLayout(1, OPERAND.parent))
    if S.whole:
        row = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OPERAND.parent))
        factor *= gl.load(scale + gl.minimum(row, sizes[2] - 1)).to(gl.float32)
    stage, phase = step % STAGES, (step // STAGES) & 1
    mbarrier.wait(full.index(stage), phase)
    if ONE:
        now = tails_at(buffers, stage, HALF, OPERAND, DTYPE, S)
        codes = codes_at(ws.index(stage), 0, HALF, OPERAND, S)
        w0 = as_weights(codes, high, now, 0, OPERAND, DTYPE, S)
    else:
        mbarrier.wait(full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
        now = tails_at(buffers, step // 2 % S.tails, HALF, OPERAND, DTYPE, S)
        w0, w1 = two_planes(weight_stage(ws, step, S), high, now, 0, HALF, OPERAND, DTYPE, S)
    if S.sent:  # TMA has read the tile before
        tma.store_wait(0)
        mbarrier.arrive(empty.index((step + STAGES - S.places + HALF // BESIDE) % STAGES), count=2 // BESIDE, pred=owed > 0)
    for r in range(count):
        more = r + 1 < count
        if ONE:
            second = stage
            following, its_phase = next_stage(stage, phase, STAGES)
        else:
            last = step + 1  # of the stages of this record
            next_step = last + gl.where(more, 1, 0)
            far_step = next_step + gl.where(more, 1, 0)
            stage, second = step % STAGES, last % STAGES
            following, its_phase = next_step % STAGES, (next_step // STAGES) & 1
            ahead, phase_ahead = far_step % STAGES, (far_step // STAGES) & 1
        # While planes are multiplied the next are made. What follows a wgmma waits until its operand was taken, so that it is mostly the
        # other warpgroup whose products lie over this one's work. Where products are short, planes are made one by one between them.
        if ONE and S.bits == 8:
            codes = codes_at(ws.index(stage), 1, HALF, OPERAND, S)
        a = _multiplied(w0, xs, stage, acc, 0, S)
        if ONE:
            w1 = as_weights(codes, high, now, 1, OPERAND, DTYPE, S)
        a = _multiplied(w1, xs, stage, a, 1, S)
        if ONE:
            if S.bits == 8:
                codes = codes_at(ws.index(stage), 2, HALF, OPERAND, S)
            w2 = as_weights(codes, high, now, 2, OPERAND, DTYPE, S)
            if S.bits == 8:
                codes = codes_at(ws.index(stage), 3, HALF, OPERAND, S)
        else:
            w2, w3 = two_planes(weight_stage(ws, last, S), high, now, 2, HALF, OPERAND, DTYPE, S)
        a = _multiplied(w2, xs, second, a, 2, S)
        if ONE:
            w3 = as_weights(codes, high, now, 3, OPERAND, DTYPE, S)
        a = _multiplied(w3, xs, second, a, 3, S)
        a = warpgroup_mma_wait(2 * SUMS, deps=a + (w0, w1))[:SUMS]  # noqa: RUF005
        if not ONE:
            mbarrier.arrive(empty.index(stage), count=1)
        # After the last record of a tile something is made of what is there, and not used.
        mbarrier.wait(full.index(following), its_phase, pred=more | (not ONE))
        if S.each == 2:  # the words come with the second half
            mbarrier.wait(full.index(ahead), phase_ahead)
        if ONE:
            after = tails_at(buffers, following, HALF, OPERAND, DTYPE, S)
            codes = codes_at(ws.index(following), 0, HALF, OPERAND, S)
            w0 = as_weights(codes, high, after, 0, OPERAND, DTYPE, S)
        else:
            after = tails_at(buffers, next_step // 2 % S.tails, HALF, OPERAND, DTYPE, S)
            w0, w1 = two_planes(weight_stage(ws, next_step, S), high, after, 0, HALF, OPERAND, DTYPE, S)
        # The compiler does not move what was made over a branch: one that looks for the second half of the next record, or for nothing.
        if ONE:
            gl.inline_asm_elementwise(FENCE, "=r,r", [high], dtype=gl.int32, is_pure=False, pack=1)
        else:
            mbarrier.wait(full.index(ahead), phase_ahead)
        acc = warpgroup_mma_wait(0, deps=a + (w2, w3))[:SUMS]  # noqa: RUF005
        mbarrier.arrive(empty.index(second), count=1)
        now = after
        step += S.parts
        if ONE:
            stage, phase = following, its_phase
    total = ()
    for i in gl.static_range(SUMS):
        one = acc[i]  # type: ignore[var-annotated]
        if S.lifted or S.whole:
            one *= gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, _sums_layout(S.widths[i])), assert_trivial=True), 1)
        total += (one,)  # type: ignore[assignment]
    return total, step


@gluon.jit
def pieces_of(total, S: gl.constexpr):
    """The columns of sums in four parts: what is written from fewer registers leaves more of them for addresses."""
    left, right = _halves(total, S)
    return _halves(left, S) + _halves(right, S)


@gluon.jit
def _halves(total, S: gl.constexpr):
    WIDTH: gl.constexpr = total.shape[1] // 2
    MMA: gl.constexpr = _sums_layout(WIDTH)
    left, right = total.reshape([S.rows, 2, WIDTH]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, MMA, assert_trivial=True), gl.convert_layout(right, MMA, assert_trivial=True)


@gluon.jit
def write_tile(total, out, added, first_n, first_m, places, sizes, bounds, S: gl.constexpr):
    """Sums [rows, columns] as they come out of the matrix unit into `out`.

    places  None: rows of `out` follow each other; or their numbers, -1 for none

    Only 16 bits go from lane to lane, so that the shared memory that this takes fits beside the ring.
    """
    ROWS: gl.constexpr = S.rows
    WIDTH: gl.constexpr = total.shape[1]
    MMA: gl.constexpr = total.type.layout
    DTYPE: gl.constexpr = out.dtype.element_ty
    rn = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    if places is None:
        rm = first_m + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
        inside = rm < sizes[0]
    else:
        rm = places
        inside = rm >= 0
    mask = gl.expand_dims(rn < sizes[1], 1) & gl.expand_dims(inside, 0)
    at = gl.expand_dims(rm, 0).to(gl.int64) * sizes[1] + gl.expand_dims(rn, 1)
    row = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if added[1] is not None:
        total += gl.convert_layout(gl.load(added[1] + at, mask=mask, other=0.0), MMA).to(gl.float32)
    y = finish(total, (added[0], None), row, None, sizes[1], bounds[0], bounds[1], S.clamp, DTYPE, None)
    gl.store(out + at, gl.convert_layout(y, OUT), mask=mask)


@gluon.jit
def send_tile(acc, yd, bias, place, first_n, first_m, sizes, bounds, HALF: gl.constexpr, S: gl.constexpr):
    """A warpgroup's sums by TMA, from a stage of x."""
    ROWS: gl.constexpr = S.rows
    MMA: gl.constexpr = acc.type.layout
    row = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    y = finish(acc, (bias, None), row, None, sizes[1], bounds[0], bounds[1], S.clamp, yd.dtype, None)
    place = place.slice(HALF % S.beside * ROWS, ROWS, dim=1)
    place.permute([1, 0]).store(y)
    fence_async_shared()
    async_store(yd, [first_m, first_n], place)
