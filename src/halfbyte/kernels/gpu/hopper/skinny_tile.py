"""Sums [64, columns] of a panel of the weight and a few rows of x on Hopper, a record (128 k) at a time: what a partition of
`skinny_hopper.py` does with a stage that is in shared memory.

4 bits: nibble planes as `weights.py` makes them; a zero point comes off with the planes' constant. 8 bits: a lane multiplies the 32
bytes of a row that follow each other, in any order of k that x has too.

With up to 8 rows of x each warp has a product of its own, and x goes through registers. With more (with blocks of 32 and 64: more than
16) the four warps of a partition take one together, wgmma, which reads x where it is: else x and the products take longer than memory.

Arithmetic: the sums of each block are float32 and multiplied by its scale ("sums" of `linear/skinny_tile.py`). Where the sums of a record's
blocks are more than its weights, and for 8 bits in blocks of 32 and 64, the weight is multiplied by its scale in x's type ("weights"). 4
bits in bfloat16 are "lifted" (`weights.py`): codes take a third of the shifts and come out 2**-8 times as large, which the end makes good.

Integers (`skinny_int8_hopper.py`): int8 rows of x, one block each, times the codes; sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from halfbyte.kernels.gpu.decode import BYTES_BF16, BYTES_F16, E2M1_BF16, E2M1_F16
from halfbyte.kernels.gpu.hopper.gluon_compat import reinterpret
from halfbyte.kernels.gpu.hopper.sparse_tile import WIDE, add_sparse
from halfbyte.kernels.gpu.hopper.stages import fma
from halfbyte.kernels.gpu.hopper.weights import PLANES_F16, PLANES_TINY, bytes_as, lanes_of_bytes, negative, shared_bytes
from halfbyte.kernels.gpu.linear.gemm_int8 import HALVES
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime

ROWS = gl.constexpr(64)  # of the weight, that a partition multiplies
LIFT = gl.constexpr(2.0**8)  # by which sums of lifted codes are too small: 2**133, which would make up for all, is no bfloat16
_PIECES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of scales and zeros of blocks that follow each other


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for."""

    columns: int
    panels: int
    each: int
    stages: int
    bits: int
    groups: int  # blocks in a record
    wide: int  # records in a block
    whole: bool  # one block along K: its scale is multiplied with the sums
    point: bool  # codes have zero points
    scale_bytes: int
    together: bool  # wgmma
    scaled: bool  # the weight is multiplied by its scale, not the sums
    lifted: bool
    integers: bool
    clamp: bool
    partitions: int
    table: bool  # codes are 4-bit floats
    gates: str = ""  # half of a tile's panels are gates of the others: `epilogue.gated`
    sparse: bool = False  # 2:4, in `layouts/gpu_sparse.py`
    paired: bool = False  # codes are bytes in pairs (`layouts/gpu_tiles.py`)
    others: int = 0  # as many programs' sums, or up to half as many less, a tile's last program waits for

    @property
    def gated(self) -> bool:
        return self.gates != ""

    @property
    def parts(self) -> int:
        """Parts of K of a stage."""
        return self.partitions // self.panels

    @property
    def depth(self) -> int:
        """Records of a stage."""
        return self.parts * self.each

    @property
    def pieces(self) -> int:
        """Pieces of 128 bytes of a row of x in a stage."""
        return self.depth if self.integers else 2 * self.depth

    @property
    def rows(self) -> int:
        return 64 * self.panels

    @property
    def blocks(self) -> int:
        """Blocks whose scales and zeros a stage has: as many as there may be."""
        return self.depth * self.groups

    @property
    def stage_bytes(self) -> int:
        tails = self.point + (0 if self.whole else self.scale_bytes)
        weight = 1024 * self.partitions * (self.bits // 2 + 1 if self.sparse else self.bits) * self.each
        return weight + (128 if self.integers else 256) * self.columns * self.depth + tails * self.blocks * self.rows

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """Where the sums are: in the same registers, whichever instruction makes them."""
        shape = [16, self.columns, 32 if self.integers else 16] if self.together else [16, 8]
        warps = [2, 2] if self.sparse and self.columns >= WIDE else [4, 1]
        return gl.NVMMADistributedLayout(version=[3 if self.together else 2, 0], warps_per_cta=warps, instr_shape=shape)


@gluon.constexpr_function
def _of_weight(groups):
    """Where the bytes of [64 rows, groups, rest of a record] are: 32 that follow each other in a lane."""
    further = [[0, 0, 32 << i] if i < 3 - groups.bit_length() else [0, 1 << i - 3 + groups.bit_length(), 0] for i in range(2)]
    lane = [[0, 0, 1 << i] for i in range(5)]
    return gl.DistributedLinearLayout(
        [*lane, [8, 0, 0]], [*further, [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, groups, 128 // groups]
    )


@gluon.constexpr_function
def _flat_of_weight():
    lane = [[0, 1 << i] for i in range(5)]
    return gl.DistributedLinearLayout([*lane, [8, 0]], [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128])


@gluon.constexpr_function
def _of_x(columns):
    """Where the elements of [half of a record, columns, 64] are that these are multiplied with, the same in all warps."""
    registers = [[0, 0, 1 << i] for i in range(5)] + [[0, 8 << i, 0] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 32], [1, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0], [0, 0, 0]], [], [2, columns, 64])


@gluon.jit
def add_record(acc, buffers, stage, t, high, PANEL: gl.constexpr, PART: gl.constexpr, S: gl.constexpr):
    """acc + the products of record PART of the stage, which is step t of its tile. high: `hopper_weights.high_bytes`."""
    xs, ws, ss, zs, _ = buffers
    first = stage * S.pieces + PART * (S.pieces // S.depth)  # piece of x
    if S.whole:
        block = stage * S.blocks
    elif S.wide > 1:  # the blocks of a stage begin with that of its first record
        block = stage * S.blocks + ((t * S.depth + PART) // S.wide - t * S.depth // S.wide)
    else:
        block = stage * S.blocks + PART * S.groups
    if S.sparse:
        return add_sparse(acc, buffers, stage, first, block, PANEL, PART, S)
    elif S.integers:
        return _add_integers(acc, xs.index(first), ws, stage, PANEL, PART, S)
    elif S.bits == 4 or S.together:
        return _add_planes(acc, xs, first, ws, (ss, zs), stage, block, high, PANEL, PART, S)
    else:
        return _add_bytes(acc, xs, first, ws, (ss, zs), stage, block, PANEL, PART, S)


@gluon.jit
def _tail(s, block, PANEL: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales or points of a block [64, 1]."""
    return s.index(block).slice(PANEL * ROWS, ROWS, dim=1).permute([1, 0]).load(LAYOUT)


@gluon.jit
def _tails(s, block, PANEL: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Those of the blocks of a record [64, groups, 1]."""
    records = reinterpret(s, s.dtype, [S.stages * S.blocks // S.groups, S.groups, S.rows], _FLAT)
    blocks = records.index(block // S.groups)
    return gl.expand_dims(blocks.slice(PANEL * ROWS, ROWS, dim=1).permute([1, 0]).load(gl.SliceLayout(2, LAYOUT)), 2)


@gluon.jit
def _codes(ws, stage, PLANE: gl.constexpr, PANEL: gl.constexpr, PART: gl.constexpr, OPERAND: gl.constexpr, S: gl.constexpr):
    """The words of a record as they lie in an operand [64, 32], or the bytes of one of its planes, by fours or twos [64, 8 or 16]."""
    if S.bits == 4:
        LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        words = ws.index(stage).slice((PANEL * S.depth + PART) * 32, 32, dim=0).load(LANES)
        # kt, nt, row, k4, khalf, rowhalf, k
        words = words.reshape([2, 4, 8, 4, 2, 2, 2]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([ROWS, 32])
        return gl.convert_layout(words, OPERAND, assert_trivial=True)
    else:
        NUMBER: gl.constexpr = 8 if S.paired else 16
        bytes_ = ws.index(stage * S.depth + PART)
        bytes_ = reinterpret(bytes_, gl.int32 if S.paired else gl.int16, [S.rows, 4 * NUMBER], shared_bytes(128, S.paired))
        return bytes_.slice(PANEL * ROWS, ROWS, dim=0).slice(PLANE * NUMBER, NUMBER, dim=1).load(lanes_of_bytes(ROWS, S.paired))


@gluon.jit
def _plane(codes, points, high, PLANE: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Plane PLANE of the words, or its bytes, as u - point in DTYPE."""
    if S.bits == 8:
        u = bytes_as(codes, high, OPERAND, DTYPE, False, S.paired)
    else:
        FLOATS: gl.constexpr = E2M1_F16 if DTYPE == gl.float16 else E2M1_BF16
        TEXTS: gl.constexpr = FLOATS if S.table else PLANES_TINY if S.lifted else PLANES_F16
        u = gl.inline_asm_elementwise(TEXTS[PLANE], "=r,r", [codes], dtype=gl.int16, is_pure=True, pack=2).to(DTYPE, bitcast=True)
    ODD: gl.constexpr = PLANE % 2 == 1 and S.bits == 4
    SIGNED: gl.constexpr = S.bits == 8 and DTYPE == gl.bfloat16  # u - 128 already
    # Lifted codes read as 2**-133 times themselves, or 2**-129 times.
    TIMES: gl.constexpr = 2.0 ** (129 if ODD else 133) / LIFT if S.lifted else 0.0625 if ODD else 1.0
    if S.point:
        if S.lifted:
            constant = (points.to(gl.float32) * (-1.0 / LIFT)).to(DTYPE)
        else:
            constant = (128 - points).to(gl.float32).to(DTYPE) if SIGNED else negative(points, ODD, DTYPE)
    else:
        LEAST: gl.constexpr = 8.0 / LIFT if S.lifted else (64.0 if ODD else 1024.0) + (8.0 if S.bits == 4 else 128.0)
        constant = gl.full([ROWS, 1], -LEAST, DTYPE, layout=OPERAND)
    if (SIGNED and not S.point) or S.table:
        return u
    else:
        return fma(u, gl.full([ROWS, 1], TIMES, DTYPE, layout=OPERAND), constant)


@gluon.jit
def _add_planes(acc, xs, first, ws, tails, stage, block, high, PANEL: gl.constexpr, PART: gl.constexpr, S: gl.constexpr):
    """Of 4 bits, and of 8 together: 32 k at a time."""
    MMA: gl.constexpr = acc.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DTYPE: gl.constexpr = xs.dtype
    GROUPS: gl.constexpr = S.groups
    EACH: gl.constexpr = 4 // GROUPS  # planes of a block
    SUMS: gl.constexpr = not S.whole and not S.scaled
    codes = _codes(ws, stage, 0, PANEL, PART, OPERAND, S)
    part = acc
    made = ()
    for g in gl.static_range(GROUPS):
        points = codes
        if S.point:
            points = _tail(tails[1], block + g, PANEL, OPERAND).to(gl.int16)
        if S.scaled:
            scale = _tail(tails[0], block + g, PANEL, OPERAND).to(DTYPE)
        if SUMS:
            part = gl.zeros_like(acc)
        for p in gl.static_range(EACH):
            if S.bits == 8 and g * EACH + p > 0:
                codes = _codes(ws, stage, g * EACH + p, PANEL, PART, OPERAND, S)
            w = _plane(codes, points, high, g * EACH + p, OPERAND, DTYPE, S)
            if S.scaled:
                w = fma(w, scale, gl.full([ROWS, 1], -0.0, DTYPE, layout=OPERAND))
            x = xs.index(first + (g * EACH + p) // 2).slice((g * EACH + p) % 2 * 32, 32, dim=1).permute([1, 0])
            if S.together:
                part = warpgroup_mma(w, x, part, is_async=True)
                made += (w,)  # type: ignore[assignment]
            else:
                part = mma_v2(w, x.load(gl.DotOperandLayout(1, MMA, 2)), part)
        if SUMS:
            if S.together:
                part = warpgroup_mma_wait(0, deps=(part,) + made)[0]  # noqa: RUF005
                made = ()
            acc += part * _tail(tails[0], block + g, PANEL, MMA).to(gl.float32)
    if SUMS:
        return acc
    elif S.together:
        return warpgroup_mma_wait(0, deps=(part,) + made)[0]  # noqa: RUF005
    else:
        return part


@gluon.jit
def _add_bytes(acc, xs, first, ws, tails, stage, block, PANEL: gl.constexpr, PART: gl.constexpr, S: gl.constexpr):
    """8 bits."""
    MMA: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = S.columns
    GROUPS: gl.constexpr = S.groups
    DTYPE: gl.constexpr = xs.dtype
    BLOCKS: gl.constexpr = _of_weight(GROUPS)
    q = ws.index(stage * S.depth + PART).slice(PANEL * ROWS, ROWS, dim=0).load(_flat_of_weight())
    if DTYPE == gl.float16:
        w = gl.inline_asm_elementwise(BYTES_F16, "=r,=r,r", [q], dtype=gl.float16, is_pure=True, pack=4)
    else:
        w = gl.inline_asm_elementwise(BYTES_BF16, "=r,=r,r", [q], dtype=gl.bfloat16, is_pure=True, pack=4)
    w = gl.convert_layout(w.reshape([ROWS, GROUPS, 128 // GROUPS]), BLOCKS, assert_trivial=True)
    one = gl.full([ROWS, 1, 1], 1.0, DTYPE, layout=BLOCKS)
    if S.point:
        points = _tails(tails[1], block, PANEL, BLOCKS, S).to(gl.int16)
        w = fma(w, one, negative(points, False, DTYPE) if DTYPE == gl.float16 else (128 - points).to(gl.float32).to(DTYPE))
    elif DTYPE == gl.float16:
        w = fma(w, one, gl.full([ROWS, 1, 1], -1152.0, DTYPE, layout=BLOCKS))
    if S.scaled:
        w = fma(w, _tails(tails[0], block, PANEL, BLOCKS, S).to(DTYPE), gl.full([ROWS, 1, 1], -0.0, DTYPE, layout=BLOCKS))
    # An instruction's k in a lane are two pairs: lane (k4), 16 bytes, four of them, pair, element -> instruction, pair, k4, element.
    if S.paired:  # khalf comes behind k4 of the layout, which are the upper bit of four, and pair
        w = w.reshape([ROWS, 4, 2, 4, 2, 2]).permute([0, 1, 2, 4, 3, 5])
    w = w.reshape([ROWS, 4, 2, 4, 2, 2]).permute([0, 2, 3, 4, 1, 5]).reshape([ROWS, 128])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
    x = reinterpret(xs, DTYPE, [S.stages * S.depth, 2, COLUMNS, 64], _PIECES).index(first // 2).load(_of_x(COLUMNS)).permute([1, 0, 2])
    x = x.reshape([COLUMNS, 4, 2, 4, 2, 2]).permute([2, 3, 4, 1, 5, 0]).reshape([128, COLUMNS])
    x = gl.convert_layout(x, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    if S.whole or S.scaled:
        return mma_v2(w, x, acc)
    else:
        return acc + mma_v2(w, x, gl.zeros_like(acc)) * _tail(tails[0], block, PANEL, MMA).to(gl.float32)


@gluon.jit
def _add_integers(acc, xs, ws, stage, PANEL: gl.constexpr, PART: gl.constexpr, S: gl.constexpr):
    """Integers; of 4 bits 16 times as much."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
    if S.bits == 4:
        LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        lines = reinterpret(ws.index(stage), gl.int8, [32 * S.partitions * S.each, 128], BYTES)
        b = lines.slice((PANEL * S.depth + PART) * 32, 32, dim=0).load(LANES)
        b = b.reshape([2, 4, 8, 4, 2, 2, 4]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([ROWS, 64])
        b = gl.convert_layout(b, OPERAND, assert_trivial=True)
        w = gl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    else:
        q = ws.index(stage * S.depth + PART).slice(PANEL * ROWS, ROWS, dim=0)
    for i in gl.static_range(2):
        x = xs.slice(i * 64, 64, dim=1).permute([1, 0])
        if S.together:
            part = w[i] if S.bits == 4 else q.slice(i * 64, 64, dim=1)
            acc = warpgroup_mma(part, x, acc, is_async=True)
        else:
            part = w[i] if S.bits == 4 else q.slice(i * 64, 64, dim=1).load(OPERAND)
            acc = mma_v2(part, x.load(gl.DotOperandLayout(1, acc.type.layout, 4)), acc)
    if S.together:
        return warpgroup_mma_wait(0, deps=(acc,))
    else:
        return acc
