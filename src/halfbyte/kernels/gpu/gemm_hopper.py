"""y [M, N] = x [M, K] · Wᵀ with many rows M on Hopper: TMA, weights from registers into wgmma, a persistent grid.

Weight: the words or bytes of `layouts/gpu_tiles.py`. Yᵀ = W · Xᵀ, in the tiles of `hopper_tile.py`, with its arithmetic.

Programs multiply the same number of whole tiles; the records of the tiles that are left over are cut into equal shares (Osama et al.,
Stream-K, 2023), so that no multiprocessor waits for another. Where a cut goes through a tile, sums meet in a workspace: who comes last
adds them, in a fixed order.

4 bits win from about 128 rows on (H100). Per record, 64 rows by 256 of x take the least time for each product: the larger the tile along M,
the less often a weight is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.arithmetic import in_groups
from halfbyte.kernels.gpu.hopper_tile import HIGH_BYTES, PIECES, Static, load_stage, pieces_of, ring, sums, write_tile
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

# Microseconds of a record of a tile (rows of each warpgroup, rows of x) on an H100, by bits, and of the rest of a program's life.
RECORD_US = {
    4: {(64, 256): 1.35, (64, 128): 0.82, (64, 64): 0.63, (128, 128): 1.47, (128, 64): 1.04},
    8: {(64, 256): 1.40, (64, 128): 0.93, (64, 64): 0.80, (64, 32): 0.70, (128, 128): 1.80, (128, 64): 1.40},
}
_START_US = 3.0
_LEAST_M = {4: 64, 8: 16}  # fewer rows do not fill a tile: skinny.py reads the weight as fast


@dataclass(frozen=True)
class Config:
    """Tiles of 2 * rows of the weight by block_m of x, `stages` records (8 bits: halves of them) in flight, `group` tiles along M together
    in the L2 cache."""

    rows: int
    block_m: int
    stages: int
    group: int
    programs: int


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    geo, least = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _LEAST_M[problem.format.bits]
    scaled = not whole(geo) and problem.dtype == torch.float16 and problem.format.scale != torch.float16
    if problem.dtype == torch.float32 or scaled:
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if problem.m < least:
        return f"{problem.m} rows do not fill its tiles: from {least} on"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    return None


def whole(geo: gpu_tiles.Geometry) -> bool:
    return geo.block_rows == 1 and geo.format.zero != "offset"


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first: the least time of the longest share."""
    records, bits = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).records, problem.format.bits
    found = []
    for (rows, block_m), record_us in RECORD_US[bits].items():
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
    static = Static(
        rows=config.rows,
        block_m=config.block_m,
        stages=config.stages,
        group=config.group,
        bits=geo.format.bits,
        groups=max(1, gpu_tiles.RECORD // geo.padded),
        wide=max(1, geo.padded // gpu_tiles.RECORD),
        whole=whole(geo),
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


# The kernel. `S` is a Static; `sizes` is (M, N, N padded, records of a tile).


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
    BM: gl.constexpr = S.block_m
    step = 0
    end, whole, start, _rest = _share(sizes, S)
    at = start - start
    while at < end:
        _tile, pm, pn, first, count = _segment(at, end, whole, start, sizes, S)
        for r in range(first * S.parts, (first + count) * S.parts):
            load_stage(xd, wd, tails, xs, ws, full, empty, pm * BM, 0, pn, r, step, sizes, S)
            step += 1
        at += count


@gluon.jit
def _consume(xs, ws, full, empty, tails, out, added, scratch, sizes, bounds, HALF: gl.constexpr, S: gl.constexpr):
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DTYPE: gl.constexpr = out.dtype.element_ty
    step = 0
    HIGH: gl.constexpr = 0x64646464 if DTYPE == gl.float16 else 0x43434343
    high = gl.inline_asm_elementwise(HIGH_BYTES, "=r,r", [gl.to_tensor(HIGH)], dtype=gl.int32, is_pure=False, pack=1)
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
        acc, step = sums(xs, ws, full, empty, tails, rn, first, count, step, high, sizes, HALF, OPERAND, DTYPE, S)
        if count == sizes[3]:
            pieces = pieces_of(acc, S)
            for i in gl.static_range(PIECES):
                write_tile(pieces[i], tails[0], out, added, first_n, pm * BM + i * (BM // PIECES), None, sizes, bounds, S)
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
            pieces = pieces_of(part, S)
            for p in gl.static_range(PIECES):
                column = first_m + piece * WIDTH + p * (WIDTH // PIECES)
                write_tile(pieces[p], scale, out, added, first_n, column, None, sizes, bounds, S)
            gl.store(lock, 0)


@gluon.jit
def _local(first, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Where the sums of `WIDTH` columns are in a part."""
    row = gl.arange(0, S.rows, layout=gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(row, 1) * S.block_m + gl.expand_dims(column, 0)


@gluon.jit(do_not_specialize=["M"])
def _gemm(xd, wd, tails, out, added, scratch, M, N, n_padded, records, bounds, S: gl.constexpr):
    gdc_launch_dependents()
    xs, ws, full, empty = ring(xd, wd, S)
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
