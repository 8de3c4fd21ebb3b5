"""What `gemm_int8_hopper.py` and `grouped_int8_hopper.py` do with a record of a tile in shared memory: weights to registers, products,
and their sums, which are scaled block by block.

Where blocks are scaled, the integers of one half of the rows of x become floats while the wgmma of the other half run (and those of
other warpgroups), as `gemm_int8.py` has it: without I2F. With a scale of 11 bits s, fma(1.5 * 2^23 + C, s, -1.5 * 2^23 * s) is
s * C, rounded once: the product in front is exact.

What bounds them is instructions. Where a row of x has one scale, four blocks are a chain: their integers C_i, |C_i| < 2^21, are added up
without a new start, A_i = 2^23 + C_1 + ... + C_i, and sum(s_i * C_i) = sum(A_i * (s_i - s_(i+1))) - 2^23 * s_1 with s_5 = 0: one
instruction for each, and no start but the first. The bits of a nonnegative integer p < 2^24 are the float p * 2^-149, so sums are kept
as 2^-38 of themselves, and those under 2^-88 lose bits. float32 sums beside 2^24 * s_i lose what `reference.error_bound` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from halfbyte.kernels.gpu.arithmetic import MAGIC
from halfbyte.kernels.gpu.hopper.stages import next_stage
from halfbyte.kernels.gpu.linear.gemm_int8 import HALVES
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime

_FROM_BITS, _ABOVE = gl.constexpr(2.0**111), gl.constexpr(2.0**-15)  # 2^(149 - 38), 2^(23 - 38)
_DOWN, _UP = gl.constexpr(2.0**-38), gl.constexpr(2.0**38)


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for; `Config` has the meanings of some."""

    bits: int
    zero: int  # a `weight_kinds.zero_number`
    scale_bytes: int
    whole: bool  # a product is one sum of integers
    row: bool  # a row of x has one scale
    block_m: int
    panels: int
    stages: int
    chained: bool  # blocks of four records are a chain
    early: bool
    clamp: bool
    split: int = 1  # programs that share a tile
    halves: bool = False  # of the tiles left over
    room: int = 0  # rows of x that a stage has room for, where they are more than block_m

    @property
    def narrower(self) -> Static:
        """For tiles of half as many rows of x, in the same stages."""
        return replace(self, block_m=self.block_m // 2, room=self.room or self.block_m)

    @property
    def part(self) -> int:
        """Rows of x whose sums are finished together: half of a tile's where blocks are scaled, and where the registers hold no more."""
        return self.block_m if self.whole and self.block_m < 256 else self.block_m // 2

    @property
    def columns(self) -> int:
        """Rows of x that are multiplied together."""
        return self.block_m if self.whole else self.part

    @property
    def ahead(self) -> bool:
        """Whether products of two records may run at once: in large tiles those of the other warpgroup are enough."""
        return self.block_m * self.panels <= (256 if self.bits == 4 else 128)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a record of both operands, and of what scales it."""
        total = 128 * self.block_m + 1024 * self.bits * self.panels
        if not self.whole:
            of_row = 4 * ((not self.row) + (self.zero != 0))
            total += of_row * (self.room or self.block_m) + self.scale_bytes * 64 * self.panels
        return total

    @property
    def registers(self) -> int | None:
        """Of a thread on the average: as few as let the kernel that quantizes the next x start beside; None where sums take all."""
        if self.zero != 0 and not self.whole:
            return None
        return 168 if self.panels == 1 else 136 if self.whole else 144

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """Where the sums are; of powers of two, n = 128 is the most by which Triton 3.6 multiplies integers."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(self.columns, 128), 32])

    @property
    def operand(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.sums, 4)


@gluon.jit
def _weight(ws, S: gl.constexpr):
    """A panel's record as wgmma takes it: bytes where they are, and of 4 bits in registers 16 * (u - 8), of the low and of the high nibbles
    [64, 64] each."""
    if S.bits == 4:
        OPERAND: gl.constexpr = S.operand
        LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        b = ws.load(LANES).reshape([2, 4, 8, 4, 2, 2, 4]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([64, 64])
        b = gl.convert_layout(b, OPERAND, assert_trivial=True)
        return gl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    else:
        return ws


@gluon.jit
def _fresh(like, S: gl.constexpr):
    """Where a block's integers start: at 2^23, or the bits of 1.5 * 2^23. Each time of its own: what two wgmma have in common the compiler
    computes once and copies, and lets the second wait for the first."""
    TEXT: gl.constexpr = "mov.b32 $0, 0x00800000;" if S.chained else "mov.b32 $0, 0x4B400000;"
    return gl.inline_asm_elementwise(TEXT, "=r,f", [like], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _start(xt, w, acc, S: gl.constexpr):
    """Starts acc + the integers of a record of some rows of x; w is what `_weight` gave."""
    if S.bits == 8:
        return warpgroup_mma(w, xt.permute([1, 0]), acc, is_async=True)
    else:
        acc = warpgroup_mma(w[0], xt.slice(0, 64, dim=1).permute([1, 0]), acc, is_async=True)
        return warpgroup_mma(w[1], xt.slice(64, 64, dim=1).permute([1, 0]), acc, is_async=True)


@gluon.jit
def sum_whole(buffers, full, empty, stage, phase, R, W: gl.constexpr, S: gl.constexpr):
    """Integers of R records."""
    COLUMNS: gl.constexpr = S.columns
    MMA: gl.constexpr = S.sums
    acc = gl.zeros([64, COLUMNS], gl.int32, layout=MMA)
    single = R
    if S.ahead and S.bits == 4:  # the next record's weights go to registers while one is multiplied
        for _ in range(R // 2):
            acc = _add_whole(buffers, full, stage, phase, acc, W, S)
            done = empty.index(stage)
            stage, phase = next_stage(stage, phase, S.stages)
            acc = _add_whole(buffers, full, stage, phase, acc, W, S)
            acc = warpgroup_mma_wait(2, deps=[acc])
            mbarrier.arrive(done, count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, S.stages)
        single = R % 2
    if S.ahead and S.bits == 8:  # the next record's products start before one's have ended
        for r in range(R):
            acc = _add_whole(buffers, full, stage, phase, acc, W, S)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # Triton 3.6 would keep a variable for the stage before at its first value.
            mbarrier.arrive(empty.index(gl.where(stage == 0, S.stages, stage) - 1), count=1, pred=r > 0)
            stage, phase = next_stage(stage, phase, S.stages)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(stage == 0, S.stages, stage) - 1), count=1)
    else:
        for _ in range(single):
            acc = _add_whole(buffers, full, stage, phase, acc, W, S)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, S.stages)
    return acc, stage, phase


@gluon.jit
def _add_whole(buffers, full, stage, phase, acc, W: gl.constexpr, S: gl.constexpr):
    """acc + the products of the record of a stage, which run on."""
    xt = buffers[0].index(stage)
    if S.room > 0:
        xt = xt.slice(0, S.block_m, dim=0)
    mbarrier.wait(full.index(stage), phase)
    return _start(xt, _weight(buffers[1].index(stage * S.panels + W), S), acc, S)


@gluon.jit
def sum_blocks(buffers, full, empty, stage, phase, first, count, zeros, W: gl.constexpr, S: gl.constexpr):
    """Scaled sums of the blocks of `count` records from `first` on, in two halves of the rows of x: while one's wgmma run, the other's
    integers become floats."""
    PART: gl.constexpr = S.part
    MMA: gl.constexpr = S.sums
    left = gl.zeros([64, PART], gl.float32, layout=MMA)
    right = left
    end = first + count
    if S.chained:
        whole = first + count // 4 * 4
        for r in range(first, whole, 4):
            left, right, stage, phase = _add_chain(buffers, full, empty, stage, phase, r, left, right, zeros, W, 4, S)
        for r in range(whole, end):
            left, right, stage, phase = _add_chain(buffers, full, empty, stage, phase, r, left, right, zeros, W, 1, S)
    else:
        for r in range(first, end):
            left, right, stage, phase = _add_record(buffers, full, empty, stage, phase, r, left, right, zeros, W, S)
    if S.chained:
        left *= _UP
        right *= _UP
    return left, right, stage, phase


@gluon.jit
def _release(bar, READ: gl.constexpr):
    """A buffer may be filled again. Where scales or sums of x were READ from it late, TMA writes there only after that: without a fence a
    load may still be on its way, on an H200 once in some thousand tiles of 64 rows."""
    if READ:
        fence_async_shared()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _add_record(buffers, full, empty, stage, phase, r, left, right, zeros, W: gl.constexpr, S: gl.constexpr):
    """Adds a record: before the integers of one half become floats, the wgmma of the other have started."""
    xs, ws, a, m, s = buffers
    HALF: gl.constexpr = S.part
    GROUPS: gl.constexpr = 2 if S.bits == 4 else 1  # of wgmma, a half
    LATE: gl.constexpr = S.zero != 0 or not S.row
    mbarrier.wait(full.index(stage), phase)
    w = _weight(ws.index(stage * S.panels + W), S)
    pl = _start(xs.index(stage).slice(0, HALF, dim=0), w, _fresh(left, S), S)
    pr = _start(xs.index(stage).slice(HALF, HALF, dim=0), w, _fresh(left, S), S)
    of_w = _of_weight(s.index(stage * S.panels + W), zeros, r, S)
    of_l = _of_x(a.index(stage), m.index(stage), of_w[0], 0, S)
    of_r = _of_x(a.index(stage), m.index(stage), of_w[0], HALF, S)
    pl = warpgroup_mma_wait(GROUPS, deps=[pl])
    left = _fold(left, pl, of_w, of_l, S)
    pr = warpgroup_mma_wait(0, deps=[pr])
    _release(empty.index(stage), LATE)
    right = _fold(right, pr, of_w, of_r, S)
    stage, phase = next_stage(stage, phase, S.stages)
    return left, right, stage, phase


@gluon.jit
def _add_chain(
    buffers, full, empty, stage, phase, r, left, right, zeros, W: gl.constexpr, COUNT: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """As `_add_record`, COUNT <= 4 of them as one chain, and as 2^-38 of themselves. The next record's wgmma start, too. (Around a loop
    ptxas would have them wait for each other.)"""
    xs, ws, _, m, s = buffers
    HALF: gl.constexpr = S.part
    GROUPS: gl.constexpr = 2 if S.bits == 4 else 1  # of wgmma, a half and a record
    LATE: gl.constexpr = S.zero != 0
    MMA: gl.constexpr = S.sums
    mbarrier.wait(full.index(stage), phase)
    w = _weight(ws.index(stage * S.panels + W), S)
    pl = _start(xs.index(stage).slice(0, HALF, dim=0), w, _fresh(left, S), S)
    pr = _start(xs.index(stage).slice(HALF, HALF, dim=0), w, _fresh(left, S), S)
    scale, shift = _scale_and_shift(s.index(stage * S.panels + W), zeros, r, S)
    left -= scale * _ABOVE
    right -= scale * _ABOVE
    for i in gl.static_range(COUNT):
        if LATE:  # while the products run
            left = gl.fma(shift, m.index(stage).slice(0, HALF, dim=1).load(MMA), left)
            right = gl.fma(shift, m.index(stage).slice(HALF, HALF, dim=1).load(MMA), right)
        done = empty.index(stage)
        stage, phase = next_stage(stage, phase, S.stages)
        if i + 1 < COUNT:
            mbarrier.wait(full.index(stage), phase)
            w = _weight(ws.index(stage * S.panels + W), S)
            scale_after, shift_after = _scale_and_shift(s.index(stage * S.panels + W), zeros, r + i + 1, S)
            step = (scale - scale_after) * _FROM_BITS
            pl = warpgroup_mma_wait(GROUPS, deps=[pl])
            left = _step(left, pl, step)
            pl = _start(xs.index(stage).slice(0, HALF, dim=0), w, pl, S)
            pr = warpgroup_mma_wait(GROUPS, deps=[pr])
            _release(done, LATE)
            right = _step(right, pr, step)
            pr = _start(xs.index(stage).slice(HALF, HALF, dim=0), w, pr, S)
            scale = scale_after
            shift = shift_after
        else:
            step = scale * _FROM_BITS
            pl = warpgroup_mma_wait(GROUPS, deps=[pl])
            left = _step(left, pl, step)
            pr = warpgroup_mma_wait(0, deps=[pr])
            _release(done, LATE)
            right = _step(right, pr, step)
    return left, right, stage, phase


@gluon.jit
def _scale_and_shift(s, zeros, row, S: gl.constexpr):
    """Of a record: its scale, and what its zero takes from each sum of codes of x, as 2^-38 of themselves."""
    scale, zero = _of_weight(s, zeros, row, S)
    scale = scale.to(gl.float32)
    shift = scale
    if S.zero == 1:
        shift = (8 - zero.to(gl.float32)) * 16 * scale if S.bits == 4 else (128 - zero.to(gl.float32)) * scale
    elif S.zero == 2:
        shift = (8 * scale + zero.to(gl.float32)) * 16 if S.bits == 4 else 128 * scale + zero.to(gl.float32)
    return scale, shift * _DOWN


@gluon.jit
def _step(total, p, step):
    """Integers p that start at 2^23 times the steps of their scales."""
    return _ordered(gl.fma(p.to(gl.float32, bitcast=True), step, total))


@gluon.jit
def _ordered(total):
    """No instruction, but an order: the integers that were added are read before the next wgmma starts, and takes their registers."""
    return gl.inline_asm_elementwise("// done", "=f,0", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _of_weight(s, zeros, row, S: gl.constexpr):
    """Scale and zero (where there is one) of a record, which is `row` of the zeros: [64, 1]."""
    MMA: gl.constexpr = S.sums
    of_scale = s.permute([1, 0]).load(MMA)
    of_zero = of_scale
    if S.zero != 0:  # lines of 64 bytes are none that TMA writes
        of_zero = gl.expand_dims(gl.load(zeros[0] + row * zeros[2] + zeros[1]), 1)
    return of_scale, of_zero


@gluon.jit
def _of_x(a, m, other, FIRST: gl.constexpr, S: gl.constexpr):
    """A record's scale and sums of half of the rows: [1, part]; `other` where they are not needed."""
    PART: gl.constexpr = S.part
    MMA: gl.constexpr = S.sums
    of_scale = other
    if not S.row:
        of_scale = a.slice(FIRST, PART, dim=1).load(MMA)
    of_sums = of_scale
    if S.zero != 0:
        of_sums = m.slice(FIRST, PART, dim=1).load(MMA)
    return of_scale, of_sums


@gluon.jit
def _fold(total, p, w, x, S: gl.constexpr):
    """`gemm_int8.fold` of integers p that start at the bits of 1.5 * 2^23; w and x are what `_of_weight` and `_of_x` gave."""
    v = p.to(gl.float32, bitcast=True)
    s = w[0].to(gl.float32)
    if S.zero == 0 and w[0].dtype == gl.float16:
        v = gl.fma(v, s, s * -MAGIC)
    else:
        v = scaled(v - MAGIC, s, w[1], x[1], S)
    if S.row:
        total += v
    else:
        total += v * x[0]
    return _ordered(total)


@gluon.jit
def scaled(v, s, z, m, S: gl.constexpr):
    """Sums v of 16 * (u - 8) or u - 128 times the codes of x, as floats, times the weight's scale, and its zero's term."""
    if S.zero != 0:
        point = gl.full_like(s, 0) if S.zero == 2 else z.to(gl.float32)
        point = (point - 8) * 16 if S.bits == 4 else point - 128
        v -= point * m
    v *= s
    if S.zero == 2:
        v += z.to(gl.float32) * (16 if S.bits == 4 else 1) * m
    return v
