"""Sums [64, columns] of a panel of the weight and a few rows of x on Hopper, a K slab (128 of K) at a time: what a partition of
`linear/skinny_hopper.py` does with a stage in shared memory.

4 bits: nibble planes as in `weights.py`; a zero point is subtracted with the planes' magic constant. 8 bits: a thread multiplies 32
consecutive bytes of a row, in any order of k that x has, too.

With up to 8 rows of x each warp has its own mma, and x goes through registers. With more (with blocks of up to 64: more than 16) the four
warps of a partition share a wgmma, which reads x from shared memory: otherwise x and the products take longer than memory.

Arithmetic: the sums of each block are float32 and multiplied by its scale ("sums" of `linear/skinny_tile.py`). Where a slab has more sums
of blocks than weights, for 8 bits in blocks of 32 and 64, and in blocks of 16, the weight is multiplied by its scale in x's type
("weights"). 4 bits in bfloat16 are read as subnormal numbers (`weights.py`): codes take a third of the shifts and are 2**-8 times as
large, which the end corrects.

Integers (`linear/skinny_int8_hopper.py`): int8 rows of x with one block each, times the codes; sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.decode import BYTES_BF16, BYTES_F16
from halfbyte.kernels.gpu.hopper.gluon_compat import reinterpret
from halfbyte.kernels.gpu.hopper.sparse_tile import WIDE, add_sparse
from halfbyte.kernels.gpu.hopper.weights import (
    convert_plane,
    fma,
    load_bytes,
    load_nibbles,
    load_words,
    negated_point,
    subtract_zero,
)
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.values import Value

ROWS = gl.constexpr(64)  # of the weight, of a panel
SUBNORMAL_SCALE = gl.constexpr(2.0**8)  # by which sums of subnormal codes are too small: 2**133 would not fit bfloat16
_PIECES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of scales and zeros of consecutive blocks


class Operands(NamedTuple):
    """TMA descriptors of the operands; None for those that the kernel does not read. `metadata`: positions of a 2:4 sparse weight."""

    x: Value
    weight: Value
    scale: Value
    zero: Value
    metadata: Value


class Ring(NamedTuple):
    """Shared memory of the stages, named as in Operands, and a barrier for each stage that is full and each that is empty."""

    x: Value
    weight: Value
    scale: Value
    zero: Value
    metadata: Value
    full: Value
    empty: Value


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for.

    Attributes:
        columns: Rows of x per tile.
        panels: Panels of 64 rows of the weight per tile.
        slabs: K slabs of a partition in a stage.
        stages: Stages of the ring.
        bits: Of a code.
        blocks_per_slab: Quantization blocks in a K slab of a row.
        slabs_per_block: K slabs in a block.
        one_block: One block along K, whose scale multiplies the sums.
        zero: Kind of zero: points or none.
        scale_bytes: Of a scale.
        use_wgmma: wgmma instead of mma.
        scaled: The scale multiplies the weight, not the sums.
        subnormal: bfloat16 codes are read as subnormal numbers.
        integers: int8 rows of x.
        clamp: Whether y is clamped.
        partitions: Of four warps.
        float_codes: Codes are 4-bit floats.
        gates: A gate function: half of a tile's panels are of the up projection.
        sparse: 2:4 (`layouts/gpu_sparse.py`).
        paired: Codes are bytes in pairs (`layouts/gpu_tiles.py`).
        polled: The most programs whose sums a tile's last program polls for, rounded up to a power of two; 0: none.
    """

    columns: int
    panels: int
    slabs: int
    stages: int
    bits: int
    blocks_per_slab: int
    slabs_per_block: int
    one_block: bool
    zero: Zero
    scale_bytes: int
    use_wgmma: bool
    scaled: bool
    subnormal: bool
    integers: bool
    clamp: bool
    partitions: int
    float_codes: bool
    gates: str = ""
    sparse: bool = False
    paired: bool = False
    polled: int = 0

    @property
    def has_points(self) -> bool:
        """Whether codes have zero points."""
        return self.zero == "point"

    @property
    def gated(self) -> bool:
        """Whether the epilogue is gated."""
        return self.gates != ""

    @property
    def k_parts(self) -> int:
        """Parts of K of a stage, for a partition each."""
        return self.partitions // self.panels

    @property
    def stage_slabs(self) -> int:
        """K slabs of a stage."""
        return self.k_parts * self.slabs

    @property
    def x_pieces(self) -> int:
        """Pieces of 128 bytes of a row of x in a stage."""
        return self.stage_slabs if self.integers else 2 * self.stage_slabs

    @property
    def rows(self) -> int:
        """Rows of the weight per tile."""
        return 64 * self.panels

    @property
    def stage_blocks(self) -> int:
        """Blocks whose scales and zeros a stage has room for."""
        return self.stage_slabs * self.blocks_per_slab

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        params = self.has_points + (0 if self.one_block else self.scale_bytes)
        weight = 1024 * self.partitions * (self.bits // 2 + 1 if self.sparse else self.bits) * self.slabs
        return weight + (128 if self.integers else 256) * self.columns * self.stage_slabs + params * self.stage_blocks * self.rows

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """Layout of the sums, the same registers for mma and wgmma."""
        shape = [16, self.columns, 32 if self.integers else 16] if self.use_wgmma else [16, 8]
        warps = [2, 2] if self.sparse and self.columns >= WIDE else [4, 1]
        return gl.NVMMADistributedLayout(version=[3 if self.use_wgmma else 2, 0], warps_per_cta=warps, instr_shape=shape)


@gluon.constexpr_function
def _byte_layout(groups):
    """Return the layout of bytes [64 rows, blocks, rest of a K slab]: 32 consecutive ones per thread."""
    size = 128 // groups
    k = [[0, (1 << i) // size, (1 << i) % size] for i in range(7)]
    return gl.DistributedLinearLayout(
        [*k[:5], [8, 0, 0]], [*k[5:], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, groups, size]
    )


@gluon.constexpr_function
def _flat_byte_layout():
    """Return `_byte_layout` for [64 rows, 128]."""
    lane = [[0, 1 << i] for i in range(5)]
    return gl.DistributedLinearLayout([*lane, [8, 0]], [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128])


@gluon.constexpr_function
def _x_layout(columns):
    """Return the layout of the elements of x [half of a K slab, columns, 64] that these bytes multiply, the same in all warps."""
    registers = [[0, 0, 1 << i] for i in range(5)] + [[0, 8 << i, 0] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 32], [1, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0], [0, 0, 0]], [], [2, columns, 64])


@gluon.jit
def add_slab(acc, ring, stage, t, high, PANEL: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Return acc + the products of K slab SLAB of a stage, which is step t of its tile; `high` is from `weights.high_bytes`."""
    xs, ws, ss, zs, _metadata, _full, _empty = ring
    first = stage * S.x_pieces + SLAB * (S.x_pieces // S.stage_slabs)  # piece of x
    if S.one_block:
        block = stage * S.stage_blocks
    elif S.slabs_per_block > 1:  # a stage's blocks begin with that of its first slab
        block = stage * S.stage_blocks + ((t * S.stage_slabs + SLAB) // S.slabs_per_block - t * S.stage_slabs // S.slabs_per_block)
    else:
        block = stage * S.stage_blocks + SLAB * S.blocks_per_slab
    if S.sparse:
        return add_sparse(acc, ring, stage, first, block, PANEL, SLAB, S)
    elif S.integers:
        return _add_integers(acc, xs.index(first), ws, stage, PANEL, SLAB, S)
    elif S.bits == 4 or S.use_wgmma:
        return _add_planes(acc, xs, first, ws, (ss, zs), stage, block, high, PANEL, SLAB, S)
    else:
        return _add_bytes(acc, xs, first, ws, (ss, zs), stage, block, PANEL, SLAB, S)


@gluon.jit
def _load_param(s, block, PANEL: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the scales or zero points of a block [64, 1]."""
    return s.index(block).slice(PANEL * ROWS, ROWS, dim=1).permute([1, 0]).load(LAYOUT)


@gluon.jit
def _load_plane_param(s, block, G: gl.constexpr, PANEL: gl.constexpr, OPERAND: gl.constexpr, S: gl.constexpr):
    """Load those of the planes that have block G of a K slab, [64, 1]; of plane G with blocks of 16, one for each half: [64, 32]."""
    if S.blocks_per_slab <= 4:
        return _load_param(s, block + G, PANEL, OPERAND)
    else:
        second = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, OPERAND)) & 16, 0) != 0
        first = _load_param(s, block + 2 * G, PANEL, OPERAND)
        return gl.where(second, _load_param(s, block + 2 * G + 1, PANEL, OPERAND), first)


@gluon.jit
def _load_params(s, block, PANEL: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Load those of the blocks of a K slab [64, blocks, 1]."""
    records = reinterpret(s, s.dtype, [S.stages * S.stage_blocks // S.blocks_per_slab, S.blocks_per_slab, S.rows], _FLAT)
    blocks = records.index(block // S.blocks_per_slab)
    return gl.expand_dims(blocks.slice(PANEL * ROWS, ROWS, dim=1).permute([1, 0]).load(gl.SliceLayout(2, LAYOUT)), 2)


@gluon.jit
def _load_codes(ws, stage, PLANE: gl.constexpr, PANEL: gl.constexpr, SLAB: gl.constexpr, OPERAND: gl.constexpr, S: gl.constexpr):
    """Load the words of a panel's K slab in operand order [64, 32]; of 8 bits the bytes of plane PLANE (`weights.load_bytes`)."""
    if S.bits == 4:
        return load_words(ws.index(stage).slice((PANEL * S.stage_slabs + SLAB) * 32, 32, dim=0), OPERAND)
    else:
        return load_bytes(ws.index(stage * S.stage_slabs + SLAB), PLANE, PANEL, ROWS, S.paired)


@gluon.jit
def _dequantize_plane(codes, points, high, PLANE: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return plane PLANE of the loaded codes as u - zero point in DTYPE; with S.subnormal divided by SUBNORMAL_SCALE."""
    u = convert_plane(codes, high, PLANE, OPERAND, DTYPE, S)
    if S.subnormal:  # 2**-133 times the integer, or 2**-129 times
        TIMES: gl.constexpr = 2.0 ** (129 if PLANE % 2 == 1 else 133) / SUBNORMAL_SCALE
        constant = gl.full([ROWS, 1], -8.0 / SUBNORMAL_SCALE, DTYPE, layout=OPERAND)
        if S.has_points:
            constant = (points.to(gl.float32) * (-1.0 / SUBNORMAL_SCALE)).to(DTYPE)
        return fma(u, gl.full([ROWS, 1], TIMES, DTYPE, layout=OPERAND), constant)
    else:
        return subtract_zero(u, points, PLANE, S)


@gluon.jit
def _add_planes(acc, xs, first, ws, params, stage, block, high, PANEL: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Return acc + a K slab, 32 of K at a time: 4 bits, and 8 bits with wgmma."""
    MMA: gl.constexpr = acc.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DTYPE: gl.constexpr = xs.dtype
    BLOCKS: gl.constexpr = min(S.blocks_per_slab, 4)  # or pairs of blocks of 16
    PLANES: gl.constexpr = 4 // BLOCKS  # planes of a block
    SCALE_SUMS: gl.constexpr = not S.one_block and not S.scaled
    codes = _load_codes(ws, stage, 0, PANEL, SLAB, OPERAND, S)
    part = acc
    operands = ()
    for g in gl.static_range(BLOCKS):
        points = codes
        if S.has_points:
            points = _load_plane_param(params[1], block, g, PANEL, OPERAND, S).to(gl.int16)
        if S.scaled:
            scale = _load_plane_param(params[0], block, g, PANEL, OPERAND, S).to(DTYPE)
        if SCALE_SUMS:
            part = gl.zeros_like(acc)
        for p in gl.static_range(PLANES):
            if S.bits == 8 and g * PLANES + p > 0:
                codes = _load_codes(ws, stage, g * PLANES + p, PANEL, SLAB, OPERAND, S)
            w = _dequantize_plane(codes, points, high, g * PLANES + p, OPERAND, DTYPE, S)
            if S.scaled:
                w = fma(w, scale, gl.full([ROWS, 1], -0.0, DTYPE, layout=OPERAND))
            x = xs.index(first + (g * PLANES + p) // 2).slice((g * PLANES + p) % 2 * 32, 32, dim=1).permute([1, 0])
            if S.use_wgmma:
                part = warpgroup_mma(w, x, part, is_async=True)
                operands += (w,)  # type: ignore[assignment]
            else:
                part = mma_v2(w, x.load(gl.DotOperandLayout(1, MMA, 2)), part)
        if SCALE_SUMS:
            if S.use_wgmma:
                part = warpgroup_mma_wait(0, deps=(part,) + operands)[0]  # noqa: RUF005
                operands = ()
            acc += part * _load_param(params[0], block + g, PANEL, MMA).to(gl.float32)
    if SCALE_SUMS:
        return acc
    elif S.use_wgmma:
        return warpgroup_mma_wait(0, deps=(part,) + operands)[0]  # noqa: RUF005
    else:
        return part


@gluon.jit
def _add_bytes(acc, xs, first, ws, params, stage, block, PANEL: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Return acc + a K slab of 8 bits, with mma."""
    MMA: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = S.columns
    BLOCKS: gl.constexpr = S.blocks_per_slab
    DTYPE: gl.constexpr = xs.dtype
    BYTES: gl.constexpr = _byte_layout(BLOCKS)
    q = ws.index(stage * S.stage_slabs + SLAB).slice(PANEL * ROWS, ROWS, dim=0).load(_flat_byte_layout())
    if DTYPE == gl.float16:
        w = gl.inline_asm_elementwise(BYTES_F16, "=r,=r,r", [q], dtype=gl.float16, is_pure=True, pack=4)
    else:
        w = gl.inline_asm_elementwise(BYTES_BF16, "=r,=r,r", [q], dtype=gl.bfloat16, is_pure=True, pack=4)
    w = gl.convert_layout(w.reshape([ROWS, BLOCKS, 128 // BLOCKS]), BYTES, assert_trivial=True)
    one = gl.full([ROWS, 1, 1], 1.0, DTYPE, layout=BYTES)
    if S.has_points:
        points = _load_params(params[1], block, PANEL, BYTES, S).to(gl.int16)
        w = fma(w, one, negated_point(points, False, DTYPE) if DTYPE == gl.float16 else (128 - points).to(gl.float32).to(DTYPE))
    elif DTYPE == gl.float16:
        w = fma(w, one, gl.full([ROWS, 1, 1], -1152.0, DTYPE, layout=BYTES))
    if S.scaled:
        w = fma(w, _load_params(params[0], block, PANEL, BYTES, S).to(DTYPE), gl.full([ROWS, 1, 1], -0.0, DTYPE, layout=BYTES))
    # An mma's k in a thread are two pairs: lane (k4), 16 bytes, four of them, pair, element -> instruction, pair, k4, element.
    if S.paired:  # khalf comes after k4 of the layout, which are the upper bit of four, and pair
        w = w.reshape([ROWS, 4, 2, 4, 2, 2]).permute([0, 1, 2, 4, 3, 5])
    w = w.reshape([ROWS, 4, 2, 4, 2, 2]).permute([0, 2, 3, 4, 1, 5]).reshape([ROWS, 128])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
    x = (
        reinterpret(xs, DTYPE, [S.stages * S.stage_slabs, 2, COLUMNS, 64], _PIECES)
        .index(first // 2)
        .load(_x_layout(COLUMNS))
        .permute([1, 0, 2])
    )
    x = x.reshape([COLUMNS, 4, 2, 4, 2, 2]).permute([2, 3, 4, 1, 5, 0]).reshape([128, COLUMNS])
    x = gl.convert_layout(x, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    if S.one_block or S.scaled:
        return mma_v2(w, x, acc)
    else:
        return acc + mma_v2(w, x, gl.zeros_like(acc)) * _load_param(params[0], block, PANEL, MMA).to(gl.float32)


@gluon.jit
def _add_integers(acc, xs, ws, stage, PANEL: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Return acc + a K slab of integers; of 4 bits 16 times as much."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
    if S.bits == 4:
        BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        lines = reinterpret(ws.index(stage), gl.int8, [32 * S.partitions * S.slabs, 128], BYTES)
        w = load_nibbles(lines.slice((PANEL * S.stage_slabs + SLAB) * 32, 32, dim=0), OPERAND)
    else:
        q = ws.index(stage * S.stage_slabs + SLAB).slice(PANEL * ROWS, ROWS, dim=0)
    for i in gl.static_range(2):
        x = xs.slice(i * 64, 64, dim=1).permute([1, 0])
        if S.use_wgmma:
            part = w[i] if S.bits == 4 else q.slice(i * 64, 64, dim=1)
            acc = warpgroup_mma(part, x, acc, is_async=True)
        else:
            part = w[i] if S.bits == 4 else q.slice(i * 64, 64, dim=1).load(OPERAND)
            acc = mma_v2(part, x.load(gl.DotOperandLayout(1, acc.type.layout, 4)), acc)
    if S.use_wgmma:
        return warpgroup_mma_wait(0, deps=(acc,))
    else:
        return acc
