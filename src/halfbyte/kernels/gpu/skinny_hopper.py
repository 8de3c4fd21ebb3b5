"""y [M, N] = x [M, K] · Wᵀ with few rows M on Hopper: TMA, a persistent grid, weights through registers into mma.

Weight: the words or bytes of `layouts/gpu_tiles.py`, codes without zeros. Yᵀ = W · Xᵀ, as `skinny.py` has it.

One warp keeps `stages` stages of both operands and of the scales on their way to shared memory, so that as much is on its way while
weights become floats. Four partitions of four warps take the stages from there: each multiplies one of the tile's panels, 64 rows, and
where a tile has fewer than four, one of the stage's parts of K; those meet in shared memory. Partitions wait for nobody but the stage, so
that one's waits lie under the others' work.

All programs multiply the same number of steps, so that no multiprocessor waits for another (Osama et al., Stream-K, 2023). Where a
cut goes through a tile, sums meet in a workspace, and the last to arrive adds them in a fixed order.

4 bits: nibble planes as `hopper_tile.py` makes them; the sums of each block are float32 and multiplied by its scale ("sums" of
`skinny_tile.py`). 8 bits: a lane multiplies the 32 bytes of a row that follow each other, in any order of k that x has too. Scales
of blocks of 32 and 64 are multiplied with the weight in x's type: all weights of a lane have the same one.

Integers (`skinny_int8_hopper.py`): int8 rows of x, one block each, times the codes; sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.decode import BYTES_BF16, BYTES_F16
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.gemm_int8 import HALVES
from halfbyte.kernels.gpu.hopper_tile import PLANES_BF16, PLANES_F16, fma
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

ROWS = gl.constexpr(64)  # of the weight, that a partition multiplies
_PARTITIONS = gl.constexpr(4)
_MOST_M = 32
_BESIDE = 10 << 10  # bytes of shared memory beside the stages
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of blocks that follow each other


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight by `columns` of x; `stages` in flight, in each of which a partition has `each` records."""

    columns: int
    panels: int
    each: int
    stages: int
    programs: int


@dataclass(frozen=True)
class Static:
    """What the kernel is compiled for."""

    columns: int
    panels: int
    each: int
    stages: int
    bits: int
    groups: int  # blocks in a record
    wide: int  # records in a block
    whole: bool  # one block along K
    scale_bytes: int
    integers: bool
    clamp: bool

    @property
    def parts(self) -> int:
        """Parts of K of a stage."""
        return 4 // self.panels

    @property
    def depth(self) -> int:
        """Records of a stage."""
        return self.parts * self.each

    @property
    def rows(self) -> int:
        return 64 * self.panels

    @property
    def stage_bytes(self) -> int:
        scales = 0 if self.whole else self.groups * self.depth * self.rows * self.scale_bytes
        return 4096 * self.bits * self.each + (128 if self.integers else 256) * self.columns * self.depth + scales


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if reason := refused(problem, gpu, _MOST_M):
        return reason
    scaled = geo.format.bits == 8 and geo.padded < gpu_tiles.RECORD  # in x's type
    if problem.dtype == torch.float32 or (scaled and problem.dtype == torch.float16 != problem.format.scale):
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    return None


def refused(problem: Problem, gpu: Gpu, most: int) -> str | None:
    """What integers are refused for, too."""
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    if problem.format.zero != "none":
        return f"it reads codes and scales, and {problem.format} has zeros"
    if problem.m > most:
        return f"a tile has {most} rows of x at most, and there are {problem.m}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if geo.panels * geo.records * gpu.sms >= 1 << 31:
        return f"it counts steps in 32 bits, and there are {geo.panels} x {geo.records} for each multiprocessor"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first. From measurements on an H100: programs that share no tile, or each tile among as many, save 2 us. More
    bytes are read as fast as by all multiprocessors only."""
    even, shared = ((1, 1), (1, 2), (2, 1), (4, 1), (4, 2)), ((1, 1), (1, 2), (2, 1), (4, 1))
    found = [_config(problem, gpu, panels, each, even=True) for panels, each in even]
    others = [_config(problem, gpu, panels, each, even=False) for panels, each in shared]
    found = [found[0], *others[:3], *found[2:]] if problem.format.bits == 8 else [*found, others[3]]
    return tuple(dict.fromkeys(config for config in found if config.stages > 1))[:6]


def _config(problem: Problem, gpu: Gpu, panels: int, each: int, *, even: bool) -> Config:
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    columns = next((size for size in (8, 16, 32) if problem.m <= size), 64)
    static = compiled_for(problem, Config(columns, panels, each, 1, 1), clamp=False)
    stages = min(12, (gpu.shared - _BESIDE - (4 - panels) * 256 * columns) // static.stage_bytes)
    tiles, steps = -(-problem.n // static.rows), -(-geo.records // static.depth)
    programs = min(gpu.sms, tiles * steps)
    if even:
        cut = tiles * min(gpu.sms // tiles, steps) if tiles <= gpu.sms else -(-tiles // -(-tiles // gpu.sms))
        programs = cut if cut >= 0.8 * gpu.sms else programs
    return Config(columns, panels, each, stages, programs)


def compiled_for(problem: Problem, config: Config, *, clamp: bool) -> Static:
    """Of floats, or of integers: as the problem computes."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    return Static(
        columns=config.columns,
        panels=config.panels,
        each=config.each,
        stages=config.stages,
        bits=geo.format.bits,
        groups=max(1, gpu_tiles.RECORD // geo.padded),
        wide=max(1, geo.padded // gpu_tiles.RECORD),
        whole=geo.block_rows == 1,
        scale_bytes=geo.format.scale.itemsize,
        integers=problem.compute == "int8",
        clamp=clamp,
    )


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] (unit stride along K) times the weight whose sections are codes and scale -> out [M, N], contiguous."""
    if x.data_ptr() % 16 or x.stride(0) % 8:  # which TMA can't read
        x = x.clone(memory_format=torch.contiguous_format)
    static = compiled_for(problem, config, clamp=epilogue.clamps)
    memory = launcher.workspace(out.device, beside(static, config))
    multiply(problem, config, static, x, None, codes, scale, out, epilogue, memory)


def beside(static: Static, config: Config) -> int:
    """Bytes of memory where the sums of programs that share tiles meet."""
    return 8 * config.programs * static.rows * config.columns


def multiply(
    problem: Problem,
    config: Config,
    static: Static,
    x: Tensor,
    x_scale: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor,
) -> None:
    """The same with `beside(static, config)` bytes of memory; integers have scales of the rows of x."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    words = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bytes_ = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * static.scale_bytes, rank=2)
    if static.bits == 4:
        weight = TensorDescriptor.from_tensor(codes.view(-1, 64), [32 * static.depth, 64], words)
    else:
        weight = TensorDescriptor.from_tensor(codes, [static.rows, 128], bytes_)
    launcher.run(
        _skinny,
        (config.programs,),
        TensorDescriptor.from_tensor(x, [static.columns, 128], bytes_ if static.integers else words),
        weight,
        None if static.whole else TensorDescriptor.from_tensor(scale, [1, static.rows], flat),
        (scale, x_scale),
        out,
        (epilogue.bias, epilogue.residual),
        (memory.view(torch.int32 if static.integers else torch.float32), launcher.locks(out.device, geo.panels + 3)),
        problem.m,
        problem.n,
        geo.n_padded,
        geo.records,
        (epilogue.low, epilogue.high),
        static,
        num_warps=4,
        launch_pdl=True,
    )


# The kernel. `S` is a Static; `sizes` is (M, N, N padded, records of a row, steps of a tile).


@gluon.jit
def _share(sizes, S: gl.constexpr):
    """The first of all tiles' steps that this program takes, and the first after them."""
    steps = gl.cdiv(sizes[1], S.rows) * sizes[4]
    return gl.program_id(0) * steps // gl.num_programs(0), (gl.program_id(0) + 1) * steps // gl.num_programs(0)


@gluon.jit
def _following(pn, t, sizes):
    """The step after step t of tile pn."""
    last = t + 1 == sizes[4]
    return gl.where(last, pn + 1, pn), gl.where(last, 0, t + 1)


@gluon.jit
def _after(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and how often the stages were filled, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load_weight(wd, sd, buffers, full, pn, t, stage, sizes, S: gl.constexpr):
    """The weight's half of a stage and its scales, and how many bytes are to come in all. Beyond the last record of a row there is the next
    one's, or nothing: x has zeros there."""
    GROUPS: gl.constexpr = S.groups
    PANELS: gl.constexpr = S.panels
    DEPTH: gl.constexpr = S.depth
    ws, ss = buffers[1], buffers[2]
    bar = full.index(stage)
    mbarrier.expect(bar, S.stage_bytes)
    if S.bits == 4:
        for p in gl.static_range(PANELS):
            place = ws.index(stage).slice(p * 32 * DEPTH, 32 * DEPTH, dim=0)
            tma.async_copy_global_to_shared(wd, [((pn * PANELS + p) * sizes[3] + t * DEPTH) * 32, 0], bar, place)
    else:
        for j in gl.static_range(DEPTH):
            tma.async_copy_global_to_shared(wd, [pn * S.rows, (t * DEPTH + j) * 128], bar, ws.index(stage * DEPTH + j))
    if not S.whole:
        for j in gl.static_range(DEPTH):
            for g in gl.static_range(GROUPS):
                at = [(t * DEPTH + j) // S.wide * GROUPS + g, pn * S.rows]
                tma.async_copy_global_to_shared(sd, at, bar, ss.index((stage * DEPTH + j) * GROUPS + g))


@gluon.jit
def _load_x(xd, buffers, full, t, stage, S: gl.constexpr):
    """The other half."""
    DEPTH: gl.constexpr = S.depth
    for j in gl.static_range(DEPTH):
        tma.async_copy_global_to_shared(xd, [0, (t * DEPTH + j) * 128], full.index(stage), buffers[0].index(stage * DEPTH + j))


@gluon.jit
def _produce(xd, wd, sd, buffers, full, empty, sizes, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    start, end = _share(sizes, S)
    first = gl.minimum(end - start, STAGES)
    pn = start // sizes[4]
    t = start - pn * sizes[4]
    of_x = t
    for i in range(first):  # the weight, before the kernel before has ended
        _load_weight(wd, sd, buffers, full, pn, t, i, sizes, S)
        pn, t = _following(pn, t, sizes)
    gdc_wait()
    for i in range(first):
        _load_x(xd, buffers, full, of_x, i, S)
        _pn, of_x = _following(pn, of_x, sizes)
    stage = 0
    phase = 0
    for _ in range(first, end - start):
        mbarrier.wait(empty.index(stage), phase)
        _load_weight(wd, sd, buffers, full, pn, t, stage, sizes, S)
        _load_x(xd, buffers, full, t, stage, S)
        pn, t = _following(pn, t, sizes)
        stage, phase = _after(stage, phase, STAGES)


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
    """Where the elements of [columns, record] are that these are multiplied with, the same in all warps."""
    registers = [[0, 1 << i] for i in range(5)] + [[8 << i, 0] for i in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [], [columns, 128])


@gluon.jit
def _plane(words, PLANE: gl.constexpr, DTYPE: gl.constexpr):
    """Plane PLANE of words as u - 8 in DTYPE."""
    LAYOUT: gl.constexpr = words.type.layout
    if DTYPE == gl.float16:
        ODD: gl.constexpr = PLANE % 2 == 1
        u = gl.inline_asm_elementwise(PLANES_F16[PLANE], "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)
        factor = gl.full([ROWS, 32], 0.0625 if ODD else 1.0, DTYPE, layout=LAYOUT)
        return fma(u, factor, gl.full([ROWS, 32], -72.0 if ODD else -1032.0, DTYPE, layout=LAYOUT))
    else:
        u = gl.inline_asm_elementwise(PLANES_BF16[PLANE], "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
        return fma(u, gl.full([ROWS, 32], 1.0, DTYPE, layout=LAYOUT), gl.full([ROWS, 32], -136.0, DTYPE, layout=LAYOUT))


@gluon.jit
def _add_words(acc, xs, ws, ss, stage, PANEL: gl.constexpr, PART: gl.constexpr, S: gl.constexpr):
    """acc + the products of record PART of the stage, 4 bits."""
    MMA: gl.constexpr = acc.type.layout
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    GROUPS: gl.constexpr = S.groups
    EACH: gl.constexpr = 4 // GROUPS  # planes of a block
    words = ws.index(stage).slice((PANEL * S.depth + PART) * 32, 32, dim=0).load(LANES)
    words = words.reshape([2, 4, 8, 4, 2, 2, 2]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([ROWS, 32])  # kt, nt, row, k4, khalf, rowhalf, k
    words = gl.convert_layout(words, OPERAND, assert_trivial=True)
    for g in gl.static_range(GROUPS):
        part = acc
        if not S.whole:
            part = gl.zeros_like(acc)
        for p in gl.static_range(EACH):
            w = _plane(words, g * EACH + p, xs.dtype)
            x = xs.slice((g * EACH + p) * 32, 32, dim=1).permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2))
            part = mma_v2(w, x, part)
        if S.whole:
            acc = part
        else:
            acc += part * _scale(ss.index((stage * S.depth + PART) * GROUPS + g), PANEL, MMA)
    return acc


@gluon.jit
def _scale(s, PANEL: gl.constexpr, MMA: gl.constexpr):
    return s.slice(PANEL * ROWS, ROWS, dim=1).permute([1, 0]).load(MMA).to(gl.float32)


@gluon.jit
def _add_bytes(acc, xs, ws, ss, stage, PANEL: gl.constexpr, PART: gl.constexpr, S: gl.constexpr):
    """The same for 8 bits."""
    MMA: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = S.columns
    GROUPS: gl.constexpr = S.groups
    DTYPE: gl.constexpr = xs.dtype
    q = ws.index(stage * S.depth + PART).slice(PANEL * ROWS, ROWS, dim=0).load(_flat_of_weight())
    if DTYPE == gl.float16:
        w = gl.inline_asm_elementwise(BYTES_F16, "=r,=r,r", [q], dtype=gl.float16, is_pure=True, pack=4)
        one = gl.full([ROWS, 128], 1.0, DTYPE, layout=w.type.layout)
        w = fma(w, one, gl.full([ROWS, 128], -1152.0, DTYPE, layout=w.type.layout))
    else:
        w = gl.inline_asm_elementwise(BYTES_BF16, "=r,=r,r", [q], dtype=gl.bfloat16, is_pure=True, pack=4)
    if GROUPS > 1:
        BLOCKS: gl.constexpr = _of_weight(GROUPS)
        w = gl.convert_layout(w.reshape([ROWS, GROUPS, 128 // GROUPS]), BLOCKS, assert_trivial=True)
        s = ss.index((stage * S.depth + PART) * GROUPS)._reinterpret(ss.dtype, [GROUPS, S.rows], _SCALES)
        s = s.slice(PANEL * ROWS, ROWS, dim=1).permute([1, 0]).load(gl.SliceLayout(2, BLOCKS)).to(DTYPE)
        w = fma(w, gl.expand_dims(s, 2), gl.full([ROWS, GROUPS, 128 // GROUPS], -0.0, DTYPE, layout=BLOCKS))
    # An instruction's k in a lane are two pairs: lane (k4), 16 bytes, four of them, pair, element -> instruction, pair, k4, element.
    w = w.reshape([ROWS, 4, 2, 4, 2, 2]).permute([0, 2, 3, 4, 1, 5]).reshape([ROWS, 128])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
    x = xs.load(_of_x(COLUMNS)).reshape([COLUMNS, 4, 2, 4, 2, 2]).permute([2, 3, 4, 1, 5, 0]).reshape([128, COLUMNS])
    x = gl.convert_layout(x, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    if S.whole or GROUPS > 1:
        return mma_v2(w, x, acc)
    else:
        return acc + mma_v2(w, x, gl.zeros_like(acc)) * _scale(ss.index(stage * S.depth + PART), PANEL, MMA)


@gluon.jit
def _add_integers(acc, xs, ws, stage, PANEL: gl.constexpr, PART: gl.constexpr, S: gl.constexpr):
    """acc + the integers of record PART of the stage; of 4 bits 16 times as much."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
    X: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 4)
    if S.bits == 4:
        LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        b = ws.index(stage).slice((PANEL * S.depth + PART) * 32, 32, dim=0)._reinterpret(gl.int8, [32, 128], BYTES).load(LANES)
        b = b.reshape([2, 4, 8, 4, 2, 2, 4]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([ROWS, 64])
        b = gl.convert_layout(b, OPERAND, assert_trivial=True)
        w = gl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
        for i in gl.static_range(2):
            acc = mma_v2(w[i], xs.slice(i * 64, 64, dim=1).permute([1, 0]).load(X), acc)
    else:
        q = ws.index(stage * S.depth + PART).slice(PANEL * ROWS, ROWS, dim=0)
        for i in gl.static_range(2):
            acc = mma_v2(q.slice(i * 64, 64, dim=1).load(OPERAND), xs.slice(i * 64, 64, dim=1).permute([1, 0]).load(X), acc)
    return acc


@gluon.jit
def _consume(buffers, full, empty, met, scales, out, added, scratch, sizes, bounds, NUMBER: gl.constexpr, S: gl.constexpr):
    """Partition NUMBER."""
    xs, ws, ss, sums = buffers
    PANELS: gl.constexpr = S.panels
    PANEL: gl.constexpr = NUMBER % PANELS
    EACH: gl.constexpr = S.each
    FIRST: gl.constexpr = NUMBER // PANELS * EACH  # record of the stage
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    at, end = _share(sizes, S)
    stage = 0
    phase = 0
    turn = 0
    gdc_wait()
    while at < end:
        pn = at // sizes[4]
        count = gl.minimum((pn + 1) * sizes[4], end) - at
        acc = gl.zeros([ROWS, COLUMNS], gl.int32 if S.integers else gl.float32, layout=MMA)
        for _ in range(count):
            mbarrier.wait(full.index(stage), phase)
            for i in gl.static_range(EACH):
                x = xs.index(stage * S.depth + (FIRST + i))
                if S.integers:
                    acc = _add_integers(acc, x, ws, stage, PANEL, FIRST + i, S)
                elif S.bits == 4:
                    acc = _add_words(acc, x, ws, ss, stage, PANEL, FIRST + i, S)
                else:
                    acc = _add_bytes(acc, x, ws, ss, stage, PANEL, FIRST + i, S)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = _after(stage, phase, STAGES)
        if FIRST > 0:
            mbarrier.wait(met.index(PANELS + PANEL), (turn & 1) ^ 1)
            sums.index(NUMBER - PANELS).store(_as_held(acc, S))
            mbarrier.arrive(met.index(PANEL), count=1)
        else:
            if S.parts > 1:
                mbarrier.wait(met.index(PANEL), turn & 1)
                acc = _with_parts(acc, sums, PANEL, S)
                mbarrier.arrive(met.index(PANELS + PANEL), count=1)
            ready = count == sizes[4]
            if count < sizes[4]:
                acc, ready = _meet(acc, pn, scratch, sizes, PANEL, S)
            if ready:
                _write(acc, scales, out, added, (pn * PANELS + PANEL) * ROWS, sizes, bounds, S)
        at += count
        turn += 1


@gluon.jit
def _with_parts(acc, sums, PANEL: gl.constexpr, S: gl.constexpr):
    """acc + what the partitions of the panel's other parts of K have left."""
    PARTS: gl.constexpr = S.parts
    held = _as_held(acc, S)
    for j in gl.static_range(PARTS - 1):
        held += sums.index(j * S.panels + PANEL).load(held.type.layout)
    return gl.convert_layout(_as_summed(held, S), acc.type.layout, assert_trivial=True)


@gluon.jit
def _meet(acc, pn, scratch, sizes, PANEL: gl.constexpr, S: gl.constexpr):
    """What to do with the sums of a part of a tile's steps: of the programs that share the tile, the last to come adds all up.

    Returns the panel's sums, and whether these are they.
    """
    held = _as_held(acc, S)
    LANES: gl.constexpr = held.type.layout
    COLUMNS: gl.constexpr = S.columns
    AWAY: gl.constexpr = S.rows * COLUMNS
    programs = gl.num_programs(0)
    steps = gl.cdiv(sizes[1], S.rows) * sizes[4]
    leader = ((pn * sizes[4] + 1) * programs - 1) // steps  # the program that has the tile's first step
    others = ((pn + 1) * sizes[4] * programs - 1) // steps - leader
    me = gl.program_id(0) - leader
    # A program has two places: one for the end of a tile, one for the beginning of another (the leader's part).
    place = scratch[0] + leader.to(gl.int64) * (2 * AWAY) + PANEL * ROWS * COLUMNS
    place += gl.expand_dims(gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(1, LANES)), 1) * 512
    place += gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, LANES)), 0)
    lock = scratch[1] + pn * S.panels + PANEL
    gl.store(place + gl.where(me == 0, 1, 2 * me) * AWAY, held)
    gl.thread_barrier()  # what this partition wrote comes before its arrival
    ready = gl.atomic_add(lock, 1, sem="acq_rel") == others
    if ready:
        held = gl.load(place + AWAY, cache_modifier=".cg")
        for j in range(1, others + 1):
            held += gl.load(place + 2 * j * AWAY, cache_modifier=".cg")
        acc = gl.convert_layout(_as_summed(held, S), acc.type.layout, assert_trivial=True)
        gl.store(lock, 0)
    return acc, ready


@gluon.jit
def _as_held(acc, S: gl.constexpr):
    """Sums [64, columns] -> [., 512], four that one lane holds after the other: what is written and read 16 bytes at a time."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    held = acc.reshape([4, 2, 8, S.columns // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([S.columns // 8, 512])
    return gl.convert_layout(held, LANES, assert_trivial=True)


@gluon.jit
def _as_summed(held, S: gl.constexpr):
    """The inverse."""
    return held.reshape([S.columns // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, S.columns])


@gluon.jit
def _write(total, scales, out, added, first, sizes, bounds, S: gl.constexpr):
    COLUMNS: gl.constexpr = S.columns
    MMA: gl.constexpr = total.type.layout
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    DTYPE: gl.constexpr = out.dtype.element_ty
    rn = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    rm = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    mask = gl.expand_dims(rn < sizes[1], 1) & gl.expand_dims(rm < sizes[0], 0)
    at = gl.expand_dims(rm, 0).to(gl.int64) * sizes[1] + gl.expand_dims(rn, 1)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    total = total.to(gl.float32)
    if S.whole:
        total *= gl.expand_dims(gl.load(scales[0] + gl.minimum(row, sizes[2] - 1)).to(gl.float32), 1)
    if S.integers:
        if S.bits == 4:
            total *= 0.0625
        total *= gl.expand_dims(gl.load(scales[1] + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))), 0)
    if added[1] is not None:
        total += gl.convert_layout(gl.load(added[1] + at, mask=mask, other=0.0), MMA).to(gl.float32)
    y = finish(total, (added[0], None), row, None, sizes[1], bounds[0], bounds[1], S.clamp, DTYPE, None)
    gl.store(out + at, gl.convert_layout(y, OUT), mask=mask)


@gluon.jit(do_not_specialize=["M", "records"])
def _skinny(xd, wd, sd, scales, out, added, scratch, M, N, n_padded, records, bounds, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    DEPTH: gl.constexpr = S.depth
    PANELS: gl.constexpr = S.panels
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    gdc_launch_dependents()
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES * DEPTH, S.columns, 128], xd.layout)
    if S.bits == 4:
        ws = gl.allocate_shared_memory(wd.dtype, [STAGES, 128 * S.each, 64], wd.layout)
    else:
        ws = gl.allocate_shared_memory(wd.dtype, [STAGES * DEPTH, S.rows, 128], wd.layout)
    ss = xs  # what is not there is not read
    sums = xs
    if not S.whole:
        ss = gl.allocate_shared_memory(sd.dtype, [STAGES * DEPTH * S.groups, 1, S.rows], sd.layout)
    if S.parts > 1:
        sums = gl.allocate_shared_memory(gl.int32 if S.integers else gl.float32, [_PARTITIONS - PANELS, S.columns // 8, 512], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_PARTITIONS)
    for i in gl.static_range(PANELS):
        mbarrier.init(met.index(i), count=max(1, S.parts - 1))
        mbarrier.init(met.index(PANELS + i), count=1)
    fence_async_shared()
    sizes = (M, N, n_padded, records, gl.cdiv(records, DEPTH))
    buffers = (xs, ws, ss, sums)
    gl.warp_specialize(
        [
            (_consume, (buffers, full, empty, met, scales, out, added, scratch, sizes, bounds, 0, S)),
            (_consume, (buffers, full, empty, met, scales, out, added, scratch, sizes, bounds, 1, S)),
            (_consume, (buffers, full, empty, met, scales, out, added, scratch, sizes, bounds, 2, S)),
            (_consume, (buffers, full, empty, met, scales, out, added, scratch, sizes, bounds, 3, S)),
            (_produce, (xd, wd, sd, buffers, full, empty, sizes, S)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 40],
    )
