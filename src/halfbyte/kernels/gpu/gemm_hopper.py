"""y [M, N] = x [M, K] · Wᵀ with many rows M on Hopper: TMA, weights from registers into wgmma, a persistent grid.

Weight: the words or bytes of `layouts/gpu_tiles.py`. Yᵀ = W · Xᵀ: one warp keeps records (128 k; of bytes half a record) of both operands
on their way to shared memory; two warpgroups multiply `rows` rows of the weight each by `block_m` rows of x. Half a record (two
planes) becomes floating point while the wgmma of the half before it runs, and one warpgroup's waits lie under the other's products.

    4 bits   a lane reads 16 bytes, and three instructions make two weights of them: LOP3, a fused multiply-add that takes off point
             and constant, one that multiplies by the scale
    8 bits   a lane reads the two bytes that are next to each other in wgmma's register (x, which has their order along K, is not ours
             to change): 8 rows by 16 bytes a warp, from all banks once. PRMT makes them float16, PRMT and two LOP3 bfloat16

Programs multiply the same number of whole tiles; the records of the tiles that are left over are cut into equal shares (Osama et al.,
Stream-K, 2023), so that no multiprocessor waits for another. Where a cut goes through a tile, sums meet in a workspace: who comes last
adds them, in a fixed order.

Arithmetic: the weight is made in x's type as `skinny.py` makes it ("weights"), sums are float32. One scale a row of the weight is
multiplied with the sums.

4 bits win from about 128 rows on (H100). Per record, 64 rows by 256 of x take the least time for each product: the larger the tile along M,
the less often a weight is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.arithmetic import in_groups
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

# Microseconds of a record of a tile (rows of each warpgroup, rows of x) on an H100, by bits, and of the rest of a program's life.
_RECORD_US = {
    4: {(64, 256): 1.35, (64, 128): 0.82, (64, 64): 0.63, (128, 128): 1.47, (128, 64): 1.04},
    8: {(64, 256): 1.40, (64, 128): 0.93, (64, 64): 0.80, (64, 32): 0.70, (128, 128): 1.80, (128, 64): 1.40},
}
_START_US = 3.0
_PIECES = gl.constexpr(4)  # of columns, written one after the other
_LEAST_M = {4: 64, 8: 16}  # fewer rows do not fill a tile: skinny.py reads the weight as fast


def _plane_text(shift: int, mask: str, magic: str) -> str:
    return f"{{.reg .b32 t; shr.b32 t, $1, {shift}; lop3.b32 $0, t, {mask}, {magic}, 0xea;}}"


_TWOS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
# Two bytes of a register and a constant -> two numbers, as decode.py makes them of four.
_TWO_F16 = gl.constexpr("{.reg .b32 t; cvt.u32.u16 t, $1; prmt.b32 t, t, $2, 0x4140; xor.b32 $0, t, 0x00800080;}")
_TWO_BF16 = gl.constexpr(
    "{.reg .b32 t, m, s, n; mov.b32 n, 0xbf80bf80; cvt.u32.u16 t, $1; prmt.b32 t, t, $2, 0x4140;"
    "and.b32 m, t, 0xff7fff7f; and.b32 s, t, 0xff80ff80; fma.rn.bf16x2 $0, s, n, m;}"
)
# The constant, of which the compiler does not know that it is one: else it would write it into a register again for each use.
_HIGH_BYTES = gl.constexpr("{.reg .b32 t; mov.u32 t, %smid; shr.u32 t, t, 24; add.u32 $0, t, $1;}")
_PLANES_F16 = gl.constexpr(tuple(_plane_text(j // 2 * 8, ("0x000f000f", "0x00f000f0")[j % 2], "0x64006400") for j in range(4)))
_PLANES_BF16 = gl.constexpr(tuple(_plane_text(4 * j, "0x000f000f", "0x43004300") for j in range(4)))


@dataclass(frozen=True)
class Config:
    """Tiles of 2 * rows of the weight by block_m of x, `stages` records (8 bits: halves of them) in flight, `group` tiles along M together
    in the L2 cache."""

    rows: int
    block_m: int
    stages: int
    group: int
    programs: int


@dataclass(frozen=True)
class _Static:
    rows: int
    block_m: int
    stages: int
    group: int
    bits: int
    groups: int  # blocks in a record
    wide: int  # records in a block
    whole: bool  # one block along K: its scale is multiplied with the sums
    zero: str
    clamp: bool

    @property
    def parts(self) -> int:
        """Stages that a record takes."""
        return self.bits // 4

    @property
    def pairs(self) -> gl.DistributedLinearLayout:
        """Of the pairs of bytes [rows, 16] that a lane's registers of an operand hold."""
        further = [[64, 0]] if self.rows == 128 else []
        lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout([[8, 0], [0, 4], [0, 8], *further], lanes, [[16, 0], [32, 0]], [], [self.rows, 16])

    @property
    def width(self) -> int:
        """Elements along K of a stage."""
        return gpu_tiles.RECORD // self.parts

    @property
    def meetings(self) -> int:
        """Pieces of a tile's columns, each of which the last of the programs to leave its part adds up."""
        return max(1, self.block_m // 64)


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    geo, least = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _LEAST_M[problem.format.bits]
    scaled = not _whole(geo) and problem.dtype == torch.float16 and problem.format.scale != torch.float16
    if problem.dtype == torch.float32 or scaled:
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if problem.m < least:
        return f"{problem.m} rows do not fill its tiles: from {least} on"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    return None


def _whole(geo: gpu_tiles.Geometry) -> bool:
    return geo.block_rows == 1 and geo.format.zero != "offset"


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first: the least time of the longest share."""
    records, bits = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).records, problem.format.bits
    found = []
    for (rows, block_m), record_us in _RECORD_US[bits].items():
        tiles = -(-problem.n // (2 * rows)) * -(-problem.m // block_m)
        stages = (gpu.shared - (8 << 10)) // (256 * block_m * 4 // bits + 128 * rows)
        waves = -(-tiles // gpu.sms)
        whole = -(-tiles // waves)
        shared = gpu.sms if waves > 1 else tiles * max(1, min(gpu.sms // tiles, records // 8))
        for programs in {whole, shared}:
            us = _START_US + -(-tiles * records // programs) * record_us
            if tiles % programs:  # programs meet, and what they read of x is not what others read at that time
                meeting = 0.5 + 13.5 * rows * block_m / (64 * 256)
                us = us + meeting if waves == 1 else 1.12 * us + 2 * meeting
            found.append((us, Config(rows, block_m, min(2 * bits, stages), 8, programs)))
    return tuple(config for _, config in sorted(found, key=lambda pair: pair[0])[:6])


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] (unit stride along K) times the weight whose sections are codes, scale, zero -> out [M, N], contiguous."""
    nbytes = beside(problem, config)
    memory = launcher.workspace(out.device, nbytes) if nbytes else None
    multiply(problem, config, x, gpu_tiles.Views(codes, scale, zero), out, epilogue, memory)


def beside(problem: Problem, config: Config) -> int:
    """Bytes of memory where the sums of programs that share tiles meet."""
    return 16 * config.programs * config.rows * config.block_m if _tiles(problem, config) % config.programs else 0


def _tiles(problem: Problem, config: Config) -> int:
    return -(-problem.n // (2 * config.rows)) * -(-problem.m // config.block_m)


def multiply(
    problem: Problem, config: Config, x: Tensor, views: gpu_tiles.Views, out: Tensor, epilogue: Epilogue, memory: Tensor | None
) -> None:
    """The same with `beside(problem, config)` bytes of memory."""
    codes, scale, zero = views
    if x.data_ptr() % 16 or x.stride(0) % 8:  # which TMA can't read
        x = x.clone(memory_format=torch.contiguous_format)
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if geo.format.bits == 4:
        weight = TensorDescriptor.from_tensor(codes.view(-1, 64), [32, 64], layout)
    else:
        of_bytes = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
        weight = TensorDescriptor.from_tensor(codes, [2 * config.rows, 64], of_bytes)
    static = _Static(
        rows=config.rows,
        block_m=config.block_m,
        stages=config.stages,
        group=config.group,
        bits=geo.format.bits,
        groups=max(1, gpu_tiles.RECORD // geo.padded),
        wide=max(1, geo.padded // gpu_tiles.RECORD),
        whole=_whole(geo),
        zero=geo.format.zero,
        clamp=epilogue.clamps,
    )
    scratch: tuple[Tensor, Tensor] | None = None
    if memory is not None and beside(problem, config):
        scratch = memory.view(torch.float32), launcher.locks(out.device, 2 * static.meetings * _tiles(problem, config))
    launcher.run(
        _gemm,
        (config.programs,),
        TensorDescriptor.from_tensor(x, [config.block_m, static.width], layout),
        weight,
        (scale, scale if zero is None else zero),
        out,
        (epilogue.bias, epilogue.residual),
        scratch,
        problem.m,
        problem.n,
        geo.n_padded,
        geo.records,
        (epilogue.low, epilogue.high),
        static,
        num_warps=4,
        launch_pdl=True,
    )


# The kernel. `S` is a _Static; `sizes` is (M, N, N padded, records of a tile).


@gluon.jit
def _share(sizes, S: gl.constexpr):
    """What this program multiplies: whole tiles, and after them a part of the records of the tiles that are left over.

    How many records that is, how many whole tiles, the first record of the part, and the records of all tiles that are left over.
    """
    ROWS: gl.constexpr = S.rows
    tiles = gl.cdiv(sizes[1], 2 * ROWS) * gl.cdiv(sizes[0], S.block_m)
    whole = tiles // gl.num_programs(0)
    rest = (tiles - whole * gl.num_programs(0)) * sizes[3]
    sharers = _sharers(rest)
    start = gl.minimum(gl.program_id(0), sharers) * rest // sharers
    end = gl.minimum(gl.program_id(0) + 1, sharers) * rest // sharers
    return whole * sizes[3] + end - start, whole, start, rest


@gluon.jit
def _sharers(rest):
    """How many programs have a part of what is left over."""
    return gl.maximum(gl.minimum(rest, gl.num_programs(0)), 1)


@gluon.jit
def _segment(at, end, whole, start, sizes, S: gl.constexpr):
    """The tile of this program's record `at`, where it is along M and N, and what of its records are in front of record `end`."""
    ROWS: gl.constexpr = S.rows
    inside = at < whole * sizes[3]
    record = gl.where(inside, at, start + at - whole * sizes[3])
    tile = record // sizes[3] + whole * gl.where(inside, gl.program_id(0), gl.num_programs(0))
    first = record % sizes[3]
    count = gl.minimum(sizes[3] - first, end - at)
    pm, pn = in_groups(tile, gl.cdiv(sizes[0], S.block_m), gl.cdiv(sizes[1], 2 * ROWS), S.group)
    return tile, pm, pn, first, count


@gluon.jit
def _produce(xd, wd, tails, xs, ws, full, empty, sizes, S: gl.constexpr):
    PANELS: gl.constexpr = S.rows // 32
    BM: gl.constexpr = S.block_m
    STAGES: gl.constexpr = S.stages
    step = 0
    end, whole, start, _rest = _share(sizes, S)
    at = start - start
    while at < end:
        _tile, pm, pn, first, count = _segment(at, end, whole, start, sizes, S)
        for r in range(first * S.parts, (first + count) * S.parts):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BM * S.width * 2 + S.rows * 128)
            tma.async_copy_global_to_shared(xd, [pm * BM, r * S.width], full.index(stage), xs.index(stage))
            if S.bits == 4:
                for p in gl.static_range(PANELS):
                    row = ((pn * PANELS + p) * sizes[3] + r) * 32
                    tma.async_copy_global_to_shared(wd, [row, 0], full.index(stage), ws.index(stage).slice(p * 32, 32, dim=0))
            else:
                tma.async_copy_global_to_shared(wd, [pn * S.rows * 2, r * S.width], full.index(stage), ws.index(stage))
            if not S.whole:
                _fetch(tails, pn, r // S.parts, sizes, S)
            step += 1
        at += count


@gluon.jit
def _fetch(tails, pn, r, sizes, S: gl.constexpr):
    """Scales and zeros of a record on their way to the L2 cache: consumers read them one record ahead, which is less than memory takes."""
    GROUPS: gl.constexpr = S.groups
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    EACH: gl.constexpr = 256 // tails[0].dtype.element_ty.primitive_bitwidth  # in the 32 bytes that come at least
    row = pn * (2 * S.rows) + gl.minimum(gl.arange(0, 32, layout=LANES) * EACH, 2 * S.rows - 1)
    row = gl.minimum(row, sizes[2] - 1)
    for g in gl.static_range(GROUPS):
        at = (r // S.wide * GROUPS + g).to(gl.int64) * sizes[2] + row
        _prefetch(tails[0] + at)
        if S.zero != "none":
            _prefetch(tails[1] + at)


@gluon.jit
def _prefetch(pointers):
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fma(a, b, c):
    if a.dtype == gl.float16:
        return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.float16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _negative(point, ODD: gl.constexpr, DTYPE: gl.constexpr):
    """What `_fma` adds to take point and magic constant off."""
    if DTYPE == gl.bfloat16:
        return (point | 0x4300 | -0x8000).to(DTYPE, bitcast=True)
    elif ODD:
        return (point << 4 | 0x5400 | -0x8000).to(DTYPE, bitcast=True)
    else:
        return (point | 0x6400 | -0x8000).to(DTYPE, bitcast=True)


@gluon.jit
def _weights(plane, tails, PLANE: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """A plane with its magic constant -> the weight in DTYPE."""
    ROWS: gl.constexpr = S.rows
    GROUPS: gl.constexpr = S.groups
    LAYOUT: gl.constexpr = plane.type.layout
    ODD: gl.constexpr = PLANE % 2 == 1 and DTYPE == gl.float16 and S.bits == 4
    SIGNED: gl.constexpr = S.bits == 8 and DTYPE == gl.bfloat16  # bytes have no constant then: they are u - 128
    G: gl.constexpr = PLANE // (4 // GROUPS)
    factor = gl.full([ROWS, 32], 0.0625 if ODD else 1.0, DTYPE, layout=LAYOUT)
    if S.zero == "point":
        point = gl.expand_dims(tails[GROUPS + G].to(gl.int16), 1)
        zero = (128 - point).to(gl.float32).to(DTYPE) if SIGNED else _negative(point, ODD, DTYPE)
    else:
        BASE: gl.constexpr = -128.0 if SIGNED else 64.0 if ODD else 1024.0 if DTYPE == gl.float16 else 128.0
        POINT: gl.constexpr = 0.0 if S.zero == "offset" else 8.0 if S.bits == 4 else 128.0
        zero = gl.full([ROWS, 1], -BASE - POINT, DTYPE, layout=LAYOUT)
    q = plane
    if not SIGNED or S.zero != "none":
        q = _fma(plane, factor, zero)
    if not S.whole:
        offset = gl.full([ROWS, 1], -0.0, DTYPE, layout=LAYOUT)
        if S.zero == "offset":
            offset = gl.expand_dims(tails[GROUPS + G].to(DTYPE), 1)
        q = _fma(q, gl.expand_dims(tails[G].to(DTYPE), 1), offset)
    return q


@gluon.jit
def _codes(ws, PLANE: gl.constexpr, HALF: gl.constexpr, OPERAND: gl.constexpr, S: gl.constexpr):
    """The words of a record in shared memory, or the bytes of one of its planes, as they lie in an operand [rows, 32]."""
    ROWS: gl.constexpr = S.rows
    if S.bits == 8:  # by twos: [rows, 16]
        twos = ws._reinterpret(gl.int16, [2 * ROWS, 32], _TWOS)
        return twos.slice(HALF * ROWS, ROWS, dim=0).slice(PLANE % 2 * 16, 16, dim=1).load(S.pairs)
    else:
        PANELS: gl.constexpr = S.rows // 64
        LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        words = ws.slice(HALF * 32 * PANELS, 32 * PANELS, dim=0).load(LANES)
        words = words.reshape([PANELS, 2, 4, 8, 4, 2, 2, 2]).permute([0, 2, 6, 3, 1, 5, 4, 7]).reshape([ROWS, 32])
        return gl.convert_layout(words, OPERAND, assert_trivial=True)


@gluon.jit
def _plane(codes, high, tails, PLANE: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Plane PLANE of the words, or its bytes, as weights in DTYPE."""
    if S.bits == 8:
        TWO: gl.constexpr = _TWO_F16 if DTYPE == gl.float16 else _TWO_BF16
        both = gl.inline_asm_elementwise(TWO, "=r,h,r", [codes, high], dtype=gl.int32, is_pure=True, pack=1)
        u = gl.join(both.to(gl.int16), (both >> 16).to(gl.int16)).reshape([S.rows, 32]).to(DTYPE, bitcast=True)
        u = gl.convert_layout(u, OPERAND, assert_trivial=True)
    elif DTYPE == gl.float16:
        u = gl.inline_asm_elementwise(_PLANES_F16[PLANE], "=r,r", [codes], dtype=gl.float16, is_pure=True, pack=2)
    else:
        u = gl.inline_asm_elementwise(_PLANES_BF16[PLANE], "=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=2)
    return _weights(u, tails, PLANE, DTYPE, S)


@gluon.jit
def _two_planes(ws, high, tails, FIRST: gl.constexpr, HALF: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Planes FIRST and FIRST + 1 of the record in shared memory, or of its half, as weights in DTYPE."""
    first = _codes(ws, FIRST, HALF, OPERAND, S)
    second = first
    if S.bits == 8:
        second = _codes(ws, FIRST + 1, HALF, OPERAND, S)
    return _plane(first, high, tails, FIRST, OPERAND, DTYPE, S), _plane(second, high, tails, FIRST + 1, OPERAND, DTYPE, S)


@gluon.jit
def _tails(tails, r, rn, sizes, S: gl.constexpr):
    """Scales of the groups of record r, then their zeros (or the scales again, which nothing reads)."""
    GROUPS: gl.constexpr = S.groups
    found = ()
    for i in gl.static_range(2):
        row = tails[i if S.zero != "none" else 0] + (r // S.wide * GROUPS).to(gl.int64) * sizes[2]
        for _ in gl.static_range(GROUPS):
            found += (gl.load(row + rn),)  # type: ignore[assignment]
            row += sizes[2]
    return found


@gluon.jit
def _columns(xs, step, PLANE: gl.constexpr, S: gl.constexpr):
    """What plane PLANE of the weight is multiplied with: xᵀ [32, block_m], of the stage of `step`."""
    return xs.index(step % S.stages).slice(PLANE * 32 % S.width, 32, dim=1).permute([1, 0])


@gluon.jit
def _sums(
    xs,
    ws,
    full,
    empty,
    tails,
    rn,
    first,
    count,
    step,
    high,
    sizes,
    HALF: gl.constexpr,
    OPERAND: gl.constexpr,
    DTYPE: gl.constexpr,
    S: gl.constexpr,
):
    """float32 [rows, block_m] of `count` records from `first` on, whose stages begin with `step`; and the step after them."""
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    STAGES: gl.constexpr = S.stages
    MMA: gl.constexpr = OPERAND.parent
    acc = gl.zeros([ROWS, BM], gl.float32, layout=MMA)
    now = _tails(tails, first, rn, sizes, S)
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    if S.bits == 8:
        mbarrier.wait(full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
    w0, w1 = _two_planes(ws.index(step % STAGES), high, now, 0, HALF, OPERAND, DTYPE, S)
    for r in range(count):
        last = step + S.parts - 1  # of the stages of this record
        following = last + gl.where(r + 1 < count, 1, 0)
        after = _tails(tails, first + gl.minimum(r + 1, count - 1), rn, sizes, S)
        # While two planes are multiplied the next two are made. What follows a wgmma waits until its operand was taken, so that it is
        # the other warpgroup whose products lie over this one's work.
        a = warpgroup_mma(w0, _columns(xs, step, 0, S), acc, is_async=True)
        a = warpgroup_mma(w1, _columns(xs, step, 1, S), a, is_async=True)
        w2, w3 = _two_planes(ws.index(last % STAGES), high, now, 2, HALF, OPERAND, DTYPE, S)
        a = warpgroup_mma(w2, _columns(xs, last, 2, S), a, is_async=True)
        a = warpgroup_mma(w3, _columns(xs, last, 3, S), a, is_async=True)
        a, w0, w1 = warpgroup_mma_wait(2, deps=[a, w0, w1])
        if S.bits == 8:
            mbarrier.arrive(empty.index(step % STAGES), count=1)
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        w0, w1 = _two_planes(ws.index(following % STAGES), high, after, 0, HALF, OPERAND, DTYPE, S)
        # This looks for the second half of the next record, and is a branch, over which the compiler does not move what was made.
        ahead = following + gl.where(r + 1 < count, S.parts - 1, 0)
        mbarrier.wait(full.index(ahead % STAGES), (ahead // STAGES) & 1)
        acc, w2, w3 = warpgroup_mma_wait(0, deps=[a, w2, w3])
        mbarrier.arrive(empty.index(last % STAGES), count=1)
        now = after
        step += S.parts
    return acc, step


@gluon.jit
def _consume(xs, ws, full, empty, tails, out, added, scratch, sizes, bounds, HALF: gl.constexpr, S: gl.constexpr):
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DTYPE: gl.constexpr = out.dtype.element_ty
    step = 0
    HIGH: gl.constexpr = 0x64646464 if DTYPE == gl.float16 else 0x43434343
    high = gl.inline_asm_elementwise(_HIGH_BYTES, "=r,r", [gl.to_tensor(HIGH)], dtype=gl.int32, is_pure=False, pack=1)
    end, whole, start, rest = _share(sizes, S)
    at = start - start
    while at < end:
        tile, pm, pn, first, count = _segment(at, end, whole, start, sizes, S)
        first_n = (pn * 2 + HALF) * ROWS
        rn = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OPERAND))
        if ROWS == 64:  # a panel is there as a whole, or not at all
            rn += gl.minimum(first_n, sizes[2] - ROWS)
        else:
            rn = gl.minimum(first_n + rn, sizes[2] - 1)
        acc, step = _sums(xs, ws, full, empty, tails, rn, first, count, step, high, sizes, HALF, OPERAND, DTYPE, S)
        if count == sizes[3]:
            pieces = _pieces(acc, S)
            for i in gl.static_range(_PIECES):
                _write(pieces[i], tails[0], out, added, first_n, pm * BM + i * (BM // _PIECES), sizes, bounds, S)
        elif scratch is not None:
            number = tile - whole * gl.num_programs(0)
            _meet(acc, tile, number, rest, tails[0], out, added, scratch, first_n, pm * BM, sizes, bounds, HALF, S)
        at += count


@gluon.jit
def _meet(acc, tile, number, rest, scale, out, added, scratch, first_n, first_m, sizes, bounds, HALF: gl.constexpr, S: gl.constexpr):
    """What to do with the sums of a part of a tile's records: of the programs that share the tile, the last to come adds all up and writes.

    `number` counts the tiles that are left over, `rest` their records.
    Each piece of the columns has a last of its own. Programs come to the pieces in different orders, so that they share this work too.
    """
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    MEETINGS: gl.constexpr = S.meetings
    WIDTH: gl.constexpr = BM // MEETINGS
    MMA: gl.constexpr = acc.type.layout
    PIECE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    sharers = _sharers(rest)
    record = number * sizes[3]
    leader = ((record + 1) * sharers - 1) // rest  # the program that has the tile's first record
    others = ((record + sizes[3]) * sharers - 1) // rest - leader
    # A program has two places: one for the end of a tile, one for the beginning of another (the leader's part).
    mine = gl.program_id(0).to(gl.int64) * 2 + gl.where(gl.program_id(0) == leader, 1, 0)
    there = scratch[0] + (leader.to(gl.int64) * 2 * 2 + HALF) * (ROWS * BM)
    away: gl.constexpr = 2 * ROWS * BM
    gl.store(scratch[0] + (mine * 2 + HALF) * (ROWS * BM) + _local(0, BM, MMA, S), acc)
    gl.thread_barrier()  # what this warpgroup wrote comes before its arrival
    for i in range(MEETINGS):
        piece = (gl.program_id(0) - leader + 1 + i) % MEETINGS
        lock = scratch[1] + (tile * 2 + HALF) * MEETINGS + piece
        if gl.atomic_add(lock, 1, sem="acq_rel") == others:
            local = there + _local(piece * WIDTH, WIDTH, PIECE, S)
            part = gl.load(local + away, cache_modifier=".cg")
            for j in range(1, others + 1):
                part += gl.load(local + 2 * j * away, cache_modifier=".cg")
            pieces = _pieces(part, S)
            for p in gl.static_range(_PIECES):
                column = first_m + piece * WIDTH + p * (WIDTH // _PIECES)
                _write(pieces[p], scale, out, added, first_n, column, sizes, bounds, S)
            gl.store(lock, 0)


@gluon.jit
def _pieces(total, S: gl.constexpr):
    """The columns of a tile in four parts: what is written from fewer registers leaves more of them for addresses."""
    left, right = _halves(total, S)
    return _halves(left, S) + _halves(right, S)


@gluon.jit
def _halves(total, S: gl.constexpr):
    WIDTH: gl.constexpr = total.shape[1] // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    left, right = total.reshape([S.rows, 2, WIDTH]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, MMA, assert_trivial=True), gl.convert_layout(right, MMA, assert_trivial=True)


@gluon.jit
def _local(first, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Where the sums of `WIDTH` columns are in a part."""
    row = gl.arange(0, S.rows, layout=gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(row, 1) * S.block_m + gl.expand_dims(column, 0)


@gluon.jit
def _write(total, scale, out, added, first_n, first_m, sizes, bounds, S: gl.constexpr):
    """Sums [rows, columns] as they come out of the matrix unit into `out`.

    Only 16 bits go from lane to lane, so that the shared memory that this takes fits beside the ring.
    """
    ROWS: gl.constexpr = S.rows
    WIDTH: gl.constexpr = total.shape[1]
    MMA: gl.constexpr = total.type.layout
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    DTYPE: gl.constexpr = out.dtype.element_ty
    rn = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    rm = first_m + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
    mask = gl.expand_dims(rn < sizes[1], 1) & gl.expand_dims(rm < sizes[0], 0)
    at = gl.expand_dims(rm, 0).to(gl.int64) * sizes[1] + gl.expand_dims(rn, 1)
    row = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if S.whole:
        total *= gl.expand_dims(gl.load(scale + gl.minimum(row, sizes[2] - 1)).to(gl.float32), 1)
    if added[1] is not None:
        total += gl.convert_layout(gl.load(added[1] + at, mask=mask, other=0.0), MMA).to(gl.float32)
    y = finish(total, (added[0], None), row, None, sizes[1], bounds[0], bounds[1], S.clamp, DTYPE, None)
    gl.store(out + at, gl.convert_layout(y, OUT), mask=mask)


@gluon.jit(do_not_specialize=["M"])
def _gemm(xd, wd, tails, out, added, scratch, M, N, n_padded, records, bounds, S: gl.constexpr):
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    STAGES: gl.constexpr = S.stages
    gdc_launch_dependents()
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES, BM, S.width], xd.layout)
    ws = gl.allocate_shared_memory(wd.dtype, [STAGES, ROWS * S.parts, 64], wd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gdc_wait()
    sizes = (M, N, n_padded, records)
    gl.warp_specialize(
        [
            (_consume, (xs, ws, full, empty, tails, out, added, scratch, sizes, bounds, 0, S)),
            (_consume, (xs, ws, full, empty, tails, out, added, scratch, sizes, bounds, 1, S)),
            (_produce, (xd, wd, tails, xs, ws, full, empty, sizes, S)),
        ],
        [4, 1],
        [232, 40],
    )
