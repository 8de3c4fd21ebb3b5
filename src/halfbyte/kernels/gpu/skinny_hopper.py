"""y [M, N] = x [M, K] · Wᵀ with few rows M, or few N, on Hopper: TMA, a persistent grid, weights through registers into mma.

Weight: the words or bytes of `layouts/gpu_tiles.py`, with zero points or without. Yᵀ = W · Xᵀ, as `skinny.py` has it.

One warp keeps `stages` stages of both operands and of the scales on their way to shared memory, so that as much is on its way while
weights become floats. Four partitions of four warps take the stages from there: each multiplies one of the tile's panels, 64 rows, and
where a tile has fewer than four, one of the stage's parts of K; those meet in shared memory. Partitions wait for nobody but the stage, so
that one's waits lie under the others' work.

All programs multiply the same number of steps, so that no multiprocessor waits for another (Osama et al., Stream-K, 2023). Where a
cut goes through a tile, sums meet in a workspace, and the last to arrive adds them in a fixed order.

Of more than 64 rows each 64 are multiplied by programs of their own, where all have room at once. TMA never reads rows that are not there:
a tile's second half, and the last tile, begin as early as it takes (`_apart`).

With two partitions and half of the stages, two programs have room on a multiprocessor: one reads while the other begins or ends. Each
takes whole tiles then. It gains where these fill most of the room, and nearly as much in the last round as in the others.

What a partition does with a stage, and its arithmetic: `skinny_hopper_tile.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.hopper import as_held, as_summed, barriers, next_stage, not_hopper
from halfbyte.kernels.gpu.hopper_weights import high_bytes
from halfbyte.kernels.gpu.skinny_hopper_tile import LIFT, ROWS, Static, add_record
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_WIDEST = 64  # tile of x, in rows
_BESIDE = 10 << 10  # bytes of shared memory beside the stages
_MEETING_US = 2.2  # that it takes programs to add up the sums of a tile which they share, on an H200; twice where one shares two
# With more rows than a tile of x has: microseconds of a record of 64 rows of the weight, by panels, and of all else; 8 bits take longer.
# Fitted to 144 times of q4_0 on an H200, 17 shapes.
_MANY_RECORD_US, _MANY_REST_US, _OF_BYTES = {1: 0.255, 2: 0.22, 4: 0.29}, 3.3, 1.3


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight by `columns` of x; `stages` in flight, in each of which a partition has `each` records.
    With two partitions for four a program takes half of a multiprocessor. `programs` share the tiles of the same rows of x."""

    columns: int
    panels: int
    each: int
    stages: int
    programs: int
    partitions: int = 4


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    most = _WIDEST * (1 if problem.sparse else max(1, gpu.sms // geo.panels))  # with which each tile has a program
    if reason := refused(problem, gpu, most):
        return reason
    scaled = compiled_for(problem, Config(_columns(problem.m), 1, 1, 1, 1), clamp=False).scaled
    if problem.dtype == torch.float32 or (scaled and problem.dtype == torch.float16 != problem.format.scale):
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    return None


def refused(problem: Problem, gpu: Gpu, most: int) -> str | None:
    """What integers are refused for, too."""
    if reason := not_hopper(gpu):
        return reason
    if problem.format.zero == "offset":
        return f"it takes points off codes, and {problem.format} has offsets"
    if problem.m > most:
        return f"it multiplies {most} rows of x at most where N is {problem.n}, and there are {problem.m}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if geo.panels * geo.records * gpu.sms >= 1 << 31:
        return f"it counts steps in 32 bits, and there are {geo.panels} x {geo.records} for each multiprocessor"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first, from measurements on an H200."""
    words = problem.format.bits == 4
    if problem.m <= 16:
        tiles = [(1, 2), (2, 2), (4, 2), (1, 1), (2, 1), (4, 1), (4, 4)] if words else [(1, 1), (2, 1), (4, 1), (1, 2)]  # panels, each
    elif problem.m <= 32:
        tiles = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)] if words or problem.sparse else [(2, 1), (1, 1), (4, 1), (4, 2)]
    else:
        tiles = [(2, 1), (4, 1), (4, 2), (1, 1)]
        if problem.sparse and problem.n < 128 * gpu.sms:
            tiles.insert(0, tiles.pop())
    if problem.m > _WIDEST:
        every = [config for panels, each in tiles for config in _configs(problem, gpu, panels, each, 0.0) if config.stages > 1]
        return tuple(sorted(dict.fromkeys(every), key=lambda config: seconds(problem, config) or 0.0)[:6])
    many = problem.n >= 8 * 64 * gpu.sms  # panels: large tiles leave no program without one, and equal shares have one cut in several
    if many:
        tiles.sort(key=lambda tile: tile[0] != 4)
    found = [_configs(problem, gpu, panels, each, 1.0 if many else _MEETING_US) for panels, each in tiles]
    if problem.compute == "float" and not problem.sparse and (many or (problem.m <= 16 and 64 * gpu.sms < problem.n <= 2 * 64 * gpu.sms)):
        half = _configs(problem, gpu, 2 if many else 1, 1 if many or not words else 2, 0.0, partitions=2)
        found.insert(0, half)
    best, others = [of_tile[0] for of_tile in found], [config for of_tile in found for config in of_tile[1:]]
    return tuple(dict.fromkeys(config for config in best + others if config.stages > 1))


def seconds(problem: Problem, config: Config) -> float | None:
    """With more rows of x than a tile has; None with fewer, where it is reading that takes time."""
    if problem.m <= _WIDEST:
        return None
    tiles, programs = -(-problem.n // (64 * config.panels)), config.programs
    share = config.panels * tiles * gpu_tiles.geometry(problem.format, (problem.n, problem.k)).records / programs
    us = share * _MANY_RECORD_US[config.panels] * (_OF_BYTES if problem.format.bits == 8 else 1.0)
    meeting = 0.0 if tiles % programs == 0 else 0.45 + 0.6 * (programs // tiles) if programs % tiles == 0 else 4.2
    return 1e-6 * (_MANY_REST_US + us + meeting)


def _configs(problem: Problem, gpu: Gpu, panels: int, each: int, meeting_us: float, partitions: int = 4) -> list[Config]:
    """Numbers of programs for a tile, the best first: by the records of 64 rows that each multiplies, and whether programs share tiles."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    columns = _columns(problem.m)
    static = compiled_for(problem, Config(columns, panels, each, 1, 1, partitions), clamp=False)
    together = 4 // partitions  # programs on a multiprocessor
    room = (gpu.shared - (together - 1) * 1024 - _BESIDE) // together
    stages = min(12, (room - (partitions - panels) * 256 * columns) // static.stage_bytes)
    tiles, steps, most = -(-problem.n // static.rows), -(-geo.records // static.depth), gpu.sms // _row_tiles(problem.m)
    whole = -(-tiles // -(-tiles // (together * most)))
    if partitions == 2:
        return [Config(columns, panels, each, stages, whole, partitions)]
    # Of integers as measured on an H200 with 16 to 64 rows.
    record_us = (0.015 + 0.00035 * columns) * static.bits if static.integers else 0.10 + 0.0016 * columns
    met_us = 3 * meeting_us if static.integers else meeting_us

    def us(programs: int) -> float:
        meeting = 0.0 if tiles % programs == 0 else met_us if programs % tiles == 0 else 2 * met_us
        return panels * tiles * geo.records / programs * record_us + meeting

    alike = tiles * max(1, min(most // tiles, steps))  # for each tile as many
    programs = sorted({count for count in (whole, alike, min(most, tiles * steps)) if count <= most}, key=us)
    return [Config(columns, panels, each, stages, count) for count in programs]


def _columns(m: int) -> int:
    return next((size for size in (8, 16, 32) if m <= size), _WIDEST)


def _row_tiles(m: int) -> int:
    return -(-m // _WIDEST)


def gated(problem: Problem, config: Config, gpu: Gpu) -> Config | None:
    """`config` as gates need it: whole tiles of two panels of them and two of what they gate, for about half of the multiprocessors or
    more; None where the shape or the format has no such."""
    short = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD
    if problem.m > _WIDEST or problem.n % (4 * gpu_tiles.PANEL) or short or config.panels != 4:
        return None
    if 9 * problem.n < 4 * 4 * gpu_tiles.PANEL * gpu.sms:
        return None
    static = compiled_for(problem, config, clamp=False, gates="silu")
    stages = min(config.stages, (gpu.shared - _BESIDE - 2 * 256 * config.columns) // static.stage_bytes)
    return replace(config, stages=stages, programs=min(config.programs, problem.n // static.rows)) if stages > 1 else None


def compiled_for(problem: Problem, config: Config, *, clamp: bool, gates: str = "") -> Static:
    """Of floats, or of integers: as the problem computes."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    groups = max(1, gpu_tiles.RECORD // geo.padded)
    floats = problem.compute == "float" and not problem.sparse
    together = config.columns >= (16 if groups == 1 else 32) and not problem.sparse
    fewer = (groups > 1 and geo.format.bits == 8) or (together and groups * config.columns > 32)  # scales of weights than of sums
    return Static(
        columns=config.columns,
        panels=config.panels,
        each=config.each,
        stages=config.stages,
        bits=geo.format.bits,
        groups=groups,
        wide=1 if geo.block_rows == 1 else max(1, geo.padded // gpu_tiles.RECORD),
        whole=geo.block_rows == 1,
        point=geo.format.zero == "point",
        scale_bytes=geo.format.scale.itemsize,
        together=together,
        scaled=floats and geo.block_rows > 1 and fewer,
        lifted=floats and geo.format.code_bits == 4 and problem.dtype == torch.bfloat16,
        integers=problem.compute == "int8",
        clamp=clamp,
        partitions=config.partitions,
        table=bool(geo.format.table),
        gates=gates,
        sparse=problem.sparse,
        paired=problem.paired,
    )


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] (unit stride along K) times the weight whose sections are codes and scale -> out [M, N], contiguous."""
    if x.data_ptr() % 16 or x.stride(0) % 8:  # which TMA can't read
        x = x.clone(memory_format=torch.contiguous_format)
    static = compiled_for(problem, config, clamp=epilogue.clamps, gates=epilogue.gates)
    memory = launcher.workspace(out.device, 0 if epilogue.gates else beside(problem, config))
    multiply(problem, config, static, (x, None), (codes, scale, zero), out, epilogue, memory)


def beside(problem: Problem, config: Config) -> int:
    """Bytes of memory where the sums of programs that share tiles meet; 0 where none do."""
    shared = config.partitions == 4 and -(-problem.n // (64 * config.panels)) % config.programs != 0
    return 8 * config.programs * 64 * config.panels * config.columns * _row_tiles(problem.m) if shared else 0


def multiply(
    problem: Problem,
    config: Config,
    static: Static,
    x: tuple[Tensor, Tensor | None],
    weight: tuple[Tensor, Tensor, Tensor | None],
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor,
) -> None:
    """The same with `beside(problem, config)` bytes of memory; integers have scales of the rows of x besides."""
    (rows, row_scale), (codes, scale, zero) = x, weight
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    scratch, units = None, -(-problem.n // static.rows)
    if not static.gated and beside(problem, config):
        sums = memory.view(torch.int32 if static.integers else torch.float32)
        scratch = sums, launcher.locks(out.device, units * static.panels * _row_tiles(problem.m))
        units *= -(-geo.records // static.depth)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32 if static.sparse else 16 if static.bits == 4 else 8, rank=2)
    positions = None
    if static.sparse:
        quads, pairs = codes.view(-1, 32).split([geo.panels * geo.records * 4 * geo.format.bits, geo.panels * geo.records * 8])
        read = TensorDescriptor.from_tensor(quads, [4 * geo.format.bits * static.depth, 32], layout)
        positions = TensorDescriptor.from_tensor(pairs, [8 * static.depth, 32], layout)
    elif static.bits == 4:
        read = TensorDescriptor.from_tensor(codes.view(-1, 64), [32 * static.depth, 64], layout)
    else:
        read = TensorDescriptor.from_tensor(codes, [64, 128], layout)
    launcher.run(
        _skinny,
        (config.programs, _row_tiles(problem.m)),
        _rows(rows, static),
        _apart(problem.m, static.columns // 2),
        read,
        positions,
        None if static.whole else _tails(scale, static),
        None if zero is None else _tails(zero, static),
        (scale, row_scale),
        out,
        (epilogue.bias, epilogue.residual),
        scratch,
        divmod(units, config.programs),
        problem.m,
        problem.n,
        geo.n_padded,
        geo.records,
        (epilogue.low, epilogue.high, epilogue.factor),
        static,
        num_warps=4,
        launch_pdl=True,
        maxnreg=80 if static.partitions == 2 else None,
    )


def _rows(x: Tensor, static: Static) -> TensorDescriptor:
    """Rows in pieces of 128 bytes, those of a stage at once: half of a tile's, and the others, which are `_apart` from these."""
    piece, half = 128 // x.element_size(), static.columns // 2
    if x.shape[1] % piece:
        x = functional.pad(x, (0, -x.shape[1] % piece))
    (m, k), stride, apart = x.shape, x.stride(0), _apart(len(x), half)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=4)
    shape = [k // piece, 2, m - apart, piece] if m > half else [k // piece, 1, m, piece]
    return TensorDescriptor(x, shape, [piece, apart * stride, stride, 1], [static.pieces, 2, half, piece], layout)


def _apart(m: int, half: int) -> int:
    """Rows between the halves of a tile of x. Where M does not fill it, some of them are in both: TMA takes longer to fill rows that are
    not there than to read others."""
    return min(half, m - half) if m > half else half


def _tails(of_blocks: Tensor, static: Static) -> TensorDescriptor:
    """Scales or points, those of a stage at once."""
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * of_blocks.element_size(), rank=2)
    box = [1, static.rows // 2] if static.gated else [static.blocks, static.rows]
    return TensorDescriptor.from_tensor(of_blocks, box, flat)


# The kernel. `S` is a Static; `sizes` is (rows, N, N padded, records of a row, steps of a tile), and `rows` is (M without the rows in front
# of the tile of x, `_apart`, how many of the tile's first rows another one writes).


@gluon.jit
def _share(share, sizes, scratch):
    """The first tile and step that this program takes, and the number of steps: share[0] tiles, or steps where a tile is several programs',
    and one more for the first share[1] programs."""
    me = gl.program_id(0)
    first = me * share[0] + gl.minimum(me, share[1])
    count = share[0] + (me < share[1]).to(gl.int32)
    if scratch is None:
        return first, 0, count * sizes[4]
    else:
        return first // sizes[4], first % sizes[4], count


@gluon.jit
def _owner(step, share):
    """The program that takes a step."""
    larger = share[1] * (share[0] + 1)
    return gl.where(step < larger, step // (share[0] + 1), share[1] + (step - larger) // share[0])


@gluon.jit
def _following(pn, t, sizes):
    """The step after step t of tile pn."""
    last = t + 1 == sizes[4]
    return gl.where(last, pn + 1, pn), gl.where(last, 0, t + 1)


@gluon.jit
def _panel(pn, p, sizes, S: gl.constexpr):
    """The weight's panel that is the p-th of tile pn."""
    HALF: gl.constexpr = S.panels // 2
    if S.gated:
        return pn * HALF + p % HALF + p // HALF * (sizes[1] // (2 * ROWS))
    else:
        return pn * S.panels + p


@gluon.jit
def _load_weight(wd, pd, tails, buffers, full, pn, t, stage, sizes, S: gl.constexpr):
    """The weight's half of a stage, its scales and points, and how many bytes are to come in all. Beyond the last record of a row there is
    the next one's, or nothing: x has zeros there."""
    PANELS: gl.constexpr = S.panels
    DEPTH: gl.constexpr = S.depth
    BLOCKS: gl.constexpr = S.blocks
    ws = buffers[1]
    bar = full.index(stage)
    mbarrier.expect(bar, S.stage_bytes)
    for p in gl.static_range(PANELS):
        panel = _panel(pn, p, sizes, S)
        if S.bits == 4 or S.sparse:
            first = panel * sizes[3] + t * DEPTH
            _load_lines(wd, ws, first, bar, stage, p, 4 * S.bits if S.sparse else 32, S)
            if S.sparse:
                _load_lines(pd, buffers[4], first, bar, stage, p, 8, S)
        else:
            for j in gl.static_range(DEPTH):
                place = ws.index(stage * DEPTH + j).slice(p * ROWS, ROWS, dim=0)
                tma.async_copy_global_to_shared(wd, [panel * ROWS, (t * DEPTH + j) * 128], bar, place)
    for i in gl.static_range(2):
        if tails[i] is not None:
            block = 0 if S.whole else t * DEPTH // S.wide * S.groups
            if S.gated:
                for j in gl.static_range(BLOCKS):
                    for h in gl.static_range(2):
                        to = buffers[2 + i].index(stage * BLOCKS + j).slice(h * (S.rows // 2), S.rows // 2, dim=1)
                        tma.async_copy_global_to_shared(tails[i], [block + j, _panel(pn, h * (PANELS // 2), sizes, S) * ROWS], bar, to)
            else:
                to = buffers[2 + i].index(stage * S.blocks)
                to = to._reinterpret(to.dtype, [S.blocks, S.rows], to.layout)
                tma.async_copy_global_to_shared(tails[i], [block, pn * S.rows], bar, to)


@gluon.jit
def _load_lines(read, buffer, first, bar, stage, PANEL: gl.constexpr, LINES: gl.constexpr, S: gl.constexpr):
    """Of 128 bytes, so many a record."""
    place = buffer.index(stage).slice(PANEL * LINES * S.depth, LINES * S.depth, dim=0)
    tma.async_copy_global_to_shared(read, [first * LINES, 0], bar, place)


@gluon.jit
def _load_x(xd, buffers, full, row, t, stage, S: gl.constexpr):
    """The other half."""
    to = buffers[0].index(stage * S.pieces)._reinterpret(xd.dtype, xd.block_shape, xd.layout)
    tma.async_copy_global_to_shared(xd, [t * S.pieces, 0, row, 0], full.index(stage), to)


@gluon.jit
def _produce(sent, S: gl.constexpr):
    xd, row, wd, pd, tails, buffers, full, empty, scratch, share, sizes = sent
    STAGES: gl.constexpr = S.stages
    pn, t, steps = _share(share, sizes, scratch)
    first = gl.minimum(steps, STAGES)
    of_x = t
    for i in range(first):  # the weight, before the kernel before has ended
        _load_weight(wd, pd, tails, buffers, full, pn, t, i, sizes, S)
        pn, t = _following(pn, t, sizes)
    gdc_wait()
    for i in range(first):
        _load_x(xd, buffers, full, row, of_x, i, S)
        _pn, of_x = _following(pn, of_x, sizes)
    stage = 0
    phase = 0
    for _ in range(first, steps):
        mbarrier.wait(empty.index(stage), phase)
        _load_weight(wd, pd, tails, buffers, full, pn, t, stage, sizes, S)
        _load_x(xd, buffers, full, row, t, stage, S)
        pn, t = _following(pn, t, sizes)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(read, NUMBER: gl.constexpr, S: gl.constexpr):
    """Partition NUMBER."""
    buffers, sums, full, empty, met, scales, out, added, scratch, share, sizes, bounds = read
    PANELS: gl.constexpr = S.panels
    PANEL: gl.constexpr = NUMBER % PANELS
    EACH: gl.constexpr = S.each
    FIRST: gl.constexpr = NUMBER // PANELS * EACH  # record of the stage
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    MMA: gl.constexpr = S.sums
    high = high_bytes(out.dtype.element_ty) if S.bits == 8 and S.together else 0
    pn, t, steps = _share(share, sizes, scratch)
    stage = 0
    phase = 0
    turn = 0
    gdc_wait()
    while steps > 0:
        count = gl.minimum(sizes[4] - t, steps)
        acc = gl.zeros([ROWS, COLUMNS], gl.int32 if S.integers else gl.float32, layout=MMA)
        for i in range(count):
            mbarrier.wait(full.index(stage), phase)
            for j in gl.static_range(EACH):
                acc = add_record(acc, buffers, stage, t + i, high, PANEL, FIRST + j, S)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        if FIRST > 0:
            mbarrier.wait(met.index(PANELS + PANEL), (turn & 1) ^ 1)
            sums.index(NUMBER - PANELS).store(as_held(acc))
            mbarrier.arrive(met.index(PANEL), count=1)
        else:
            if S.parts > 1:
                mbarrier.wait(met.index(PANEL), turn & 1)
                acc = _with_parts(acc, sums, PANEL, S)
                mbarrier.arrive(met.index(PANELS + PANEL), count=1)
            ready = count == sizes[4]
            if scratch is not None:
                if count < sizes[4]:
                    acc, ready = _meet(acc, pn, scratch, share, sizes, PANEL, S)
            row = _panel(pn, PANEL, sizes, S) * ROWS
            if S.gated:
                half = (sizes[0], sizes[1] // 2)
                if PANEL >= PANELS // 2:
                    mbarrier.wait(met.index(PANELS + PANEL), (turn & 1) ^ 1)
                    sums.index(PANEL - PANELS // 2).store(as_held(_scaled(acc, scales, row, sizes, S)))
                    mbarrier.arrive(met.index(PANEL), count=1)
                else:
                    mbarrier.wait(met.index(PANELS // 2 + PANEL), turn & 1)
                    acc = _scaled(acc, scales, row, sizes, S)
                    held = sums.index(PANEL).load(as_held(acc).type.layout)
                    mbarrier.arrive(met.index(PANELS + PANELS // 2 + PANEL), count=1)
                    up = gl.convert_layout(as_summed(held, ROWS), acc.type.layout, assert_trivial=True)
                    GATES: gl.constexpr = S.gates
                    _write(with_gates(acc, up, bounds[2], GATES), out, added, row, half, bounds, S)
            elif ready:
                _write(_scaled(acc, scales, row, sizes, S), out, added, row, sizes, bounds, S)
        steps -= count
        pn += 1
        t = 0
        turn += 1


@gluon.jit
def _with_parts(acc, sums, PANEL: gl.constexpr, S: gl.constexpr):
    """acc + what the partitions of the panel's other parts of K have left."""
    PARTS: gl.constexpr = S.parts
    held = as_held(acc)
    for j in gl.static_range(PARTS - 1):
        held += sums.index(j * S.panels + PANEL).load(held.type.layout)
    return gl.convert_layout(as_summed(held, ROWS), acc.type.layout, assert_trivial=True)


@gluon.jit
def _meet(acc, pn, scratch, share, sizes, PANEL: gl.constexpr, S: gl.constexpr):
    """What to do with the sums of a part of a tile's steps: of the programs that share the tile, the last to come adds all up.

    Returns the panel's sums, and whether these are they.
    """
    held = as_held(acc)
    LANES: gl.constexpr = held.type.layout
    COLUMNS: gl.constexpr = S.columns
    AWAY: gl.constexpr = S.rows * COLUMNS
    leader = _owner(pn * sizes[4], share)
    others = _owner((pn + 1) * sizes[4] - 1, share) - leader
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
        acc = gl.convert_layout(as_summed(held, ROWS), acc.type.layout, assert_trivial=True)
        gl.store(lock, 0)
    return acc, ready


@gluon.jit
def _scaled(total, scales, first, sizes, S: gl.constexpr):
    """Sums of the rows of the weight from `first` on in float32, with the scales that all of a row or a column have in common."""
    MMA: gl.constexpr = total.type.layout
    total = total.to(gl.float32)
    if S.lifted:
        total *= LIFT
    if S.whole:
        row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        total *= gl.expand_dims(gl.load(scales[0] + gl.minimum(row, sizes[2] - 1)).to(gl.float32), 1)
    if S.integers:
        if S.bits == 4:
            total *= 0.0625
        total *= gl.expand_dims(gl.load(scales[1] + _rows_of_x(sizes[0], gl.SliceLayout(0, MMA), S)), 0)
    return total


@gluon.jit
def _rows_of_x(rows, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Of a tile's columns."""
    HALF: gl.constexpr = S.columns // 2
    column = gl.arange(0, S.columns, layout=LAYOUT)
    return gl.where(column < HALF, column, column - HALF + rows[1])


@gluon.jit
def _write(total, out, added, first, sizes, bounds, S: gl.constexpr):
    MMA: gl.constexpr = total.type.layout
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    DTYPE: gl.constexpr = out.dtype.element_ty
    rn = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    rm = _rows_of_x(sizes[0], gl.SliceLayout(0, OUT), S)
    mask = gl.expand_dims(rn < sizes[1], 1) & gl.expand_dims((rm >= sizes[0][2]) & (rm < sizes[0][0]), 0)
    at = gl.expand_dims(rm, 0).to(gl.int64) * sizes[1] + gl.expand_dims(rn, 1)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if added[1] is not None:
        total += gl.convert_layout(gl.load(added[1] + at, mask=mask, other=0.0), MMA).to(gl.float32)
    y = finish(total, (added[0], None), row, None, sizes[1], bounds[0], bounds[1], S.clamp, DTYPE, None)
    gl.store(out + at, gl.convert_layout(y, OUT), mask=mask)


@gluon.jit(do_not_specialize=["apart", "share", "M", "records"])
def _skinny(xd, apart, wd, pd, sd, zd, scales, out, added, scratch, share, M, N, n_padded, records, bounds, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    DEPTH: gl.constexpr = S.depth
    PANELS: gl.constexpr = S.panels
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    gdc_launch_dependents()
    XS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=xd.dtype.primitive_bitwidth, rank=2)
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES * S.pieces, S.columns, xd.block_shape[3]], XS)
    positions = xs  # what is not there is not read
    if S.sparse:
        ws = gl.allocate_shared_memory(gl.int32, [STAGES, 16 * S.bits * S.each, 32], wd.layout)
        positions = gl.allocate_shared_memory(gl.int32, [STAGES, 32 * S.each, 32], pd.layout)
    elif S.bits == 4:
        ws = gl.allocate_shared_memory(wd.dtype, [STAGES, 32 * S.partitions * S.each, 64], wd.layout)
    else:
        ws = gl.allocate_shared_memory(wd.dtype, [STAGES * DEPTH, S.rows, 128], wd.layout)
    buffers = (xs, ws)
    tails = (sd, zd)
    for i in gl.static_range(2):
        of_blocks = xs
        if tails[i] is not None:
            of_blocks = gl.allocate_shared_memory(tails[i].dtype, [STAGES * S.blocks, 1, S.rows], tails[i].layout)
        buffers += (of_blocks,)  # type: ignore[assignment]
    buffers += (positions,)  # type: ignore[assignment]
    sums = xs
    if S.parts > 1 or S.gated:
        OTHERS: gl.constexpr = PANELS // 2 if S.gated else S.partitions - PANELS
        sums = gl.allocate_shared_memory(gl.int32 if S.integers else gl.float32, [OTHERS, S.columns // 8, 512], PLAIN)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, S.partitions)
    met = full  # none that nobody waits for: the compiler would give its memory to sums on their way to be written
    if S.parts > 1 or S.gated:
        met = gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(PANELS):
            mbarrier.init(met.index(i), count=max(1, S.parts - 1))
            mbarrier.init(met.index(PANELS + i), count=1)
    fence_async_shared()
    first = gl.program_id(1) * S.columns  # row of x; where rows are left that do not fill a tile, it begins with some of the one before
    row = gl.minimum(first, gl.maximum(M - S.columns, 0))
    at = row.to(gl.int64) * N
    out += at
    if added[1] is not None:
        added = (added[0], added[1] + at)
    if scratch is not None:
        tiles = gl.program_id(1) * gl.cdiv(N, S.rows)
        scratch = (scratch[0] + first.to(gl.int64) * (gl.num_programs(0) * 2 * S.rows), scratch[1] + tiles * PANELS)
    sizes = ((M - row, apart, first - row), N, n_padded, records, gl.cdiv(records, DEPTH))
    # Of one panel the first partition adds up and writes the sums of all, for which integers take registers of the others.
    FIRST: gl.constexpr = S.integers and PANELS == 1
    REGISTERS: gl.constexpr = 96 if FIRST else 112
    read = (buffers, sums, full, empty, met, scales, out, added, scratch, share, sizes, bounds)
    sent = (xd, row, wd, pd, tails, buffers, full, empty, scratch, share, sizes)
    if S.partitions == 2:
        gl.warp_specialize([(_consume, (read, 0, S)), (_consume, (read, 1, S)), (_produce, (sent, S))], [4, 1], [104, 24])
    else:
        gl.warp_specialize(
            [(_consume, (read, 0, S)), (_consume, (read, 1, S)), (_consume, (read, 2, S)), (_consume, (read, 3, S)), (_produce, (sent, S))],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24 if FIRST else 32],
        )
