"""y [M, N] = x [M, K] · Wᵀ with many rows M on Hopper: TMA, weights from registers into wgmma, a persistent grid.

Weight: the words or bytes of `layouts/gpu_tiles.py`. Yᵀ = W · Xᵀ, in the tiles of `hopper/tile.py`, with its arithmetic.

Programs multiply the same number of whole tiles, in turn, so that what is multiplied at one time lies together; the records of the tiles
that are left over are cut into equal shares (Osama et al., Stream-K, 2023), so that no multiprocessor waits for another. Where a cut
goes through a tile, sums meet in a workspace; each program adds up some of the columns, in a fixed order. TMA writes a tile from where its
last records of x were, while the next one is multiplied; with a residual, or an N that it cannot write, lanes do.

4 bits win from about 128 rows on (H100). Per record, 64 rows by 256 of x take the least time for each product: the larger the tile along M,
the less often a weight is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import GROUP
from halfbyte.kernels.gpu.hopper.gluon_compat import thread_barrier
from halfbyte.kernels.gpu.hopper.stages import as_held, as_summed, not_hopper, of_second
from halfbyte.kernels.gpu.hopper.tile import (
    PIECES,
    Static,
    keep_free,
    load_stage,
    load_weight,
    load_x,
    of_weight,
    parts_of,
    pieces_of,
    ring,
    send_tile,
    sums,
    tails_read,
    whole,
    write_tile,
)
from halfbyte.kernels.gpu.hopper.weights import high_bytes
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import locks, workspace
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

# Microseconds of a record of a tile (rows of each warpgroup, rows of x), by bits; of what begins a program, and ends a tile of 64 x 256.
# Fitted, as those of sums that meet are, to 702 times of q4_0 on an H200: 28 shapes of layers of models, 65 to 2048 rows; those of 8 bits
# to some ten of q8_0.
RECORD_US = {
    4: {(64, 256): 1.30, (64, 128): 0.68, (64, 64): 0.54, (128, 128): 1.38, (128, 64): 1.00},
    8: {(64, 256): 1.32, (64, 128): 0.72, (64, 64): 0.63, (64, 32): 0.58, (128, 128): 1.45, (128, 64): 1.10},
}
_START_US, _END_US = 1.65, 1.3
BESIDE = 4352  # bytes of shared memory beside the stages
_MOST = gl.constexpr(2**31 - 1)
_BOXES = 4  # of rows of x in a tile, which TMA reads one by one; one where that would spill registers
_PATIENCE = gl.constexpr(256)  # looks at a lock, each a trip to the L2 cache
_LEAST_M = {4: 64, 8: 16}  # fewer rows do not fill a tile: skinny.py reads the weight as fast


@dataclass(frozen=True)
class Config:
    """Tiles of 2 * rows of the weight by block_m of x, `stages` records or halves of them in flight (`Static.parts`)."""

    rows: int
    block_m: int
    stages: int
    programs: int


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    if reason := not_hopper(gpu):
        return reason
    geo, least = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _LEAST_M[problem.format.bits]
    scaled = not whole(geo) and problem.dtype == torch.float16 and problem.format.scale != torch.float16
    if problem.dtype == torch.float32 or scaled:
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if problem.m < least:
        return f"{problem.m} rows do not fill its tiles: from {least} on"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    return None


def lifted(problem: Problem) -> bool:
    """`Static.lifted`: where no scale can be too large for it, nor a point's product with one, which is rounded."""
    fmt, geo = problem.format, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    small = fmt.scale == torch.float16 and (fmt.zero != "point" or fmt.bits == 4)
    return problem.dtype == torch.bfloat16 and (whole(geo) or small) and not fmt.codebook


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    records = geo.records
    found: list[Config] = []
    for rows, block_m in RECORD_US[problem.format.bits]:
        tiles = -(-problem.n // (2 * rows)) * -(-problem.m // block_m)
        waves = -(-tiles // gpu.sms)
        whole = -(-tiles // waves)
        split = tiles * max(1, min(gpu.sms // tiles, records // 8))
        stages, counts = most_stages(geo, rows, block_m, gpu), {whole, gpu.sms if waves > 1 else split, min(gpu.sms, tiles * records)}
        found += [Config(rows, block_m, stages, programs) for programs in counts]
    return tuple(sorted(found, key=lambda config: seconds(problem, config))[:6])


def seconds(problem: Problem, config: Config) -> float:
    """Of the longest share, where reading does not take longer."""
    geo, tiles, programs = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _tiles(problem, config), config.programs
    records, size = geo.records, config.rows * config.block_m / (64 * 256)
    us = _START_US + -(-tiles * records // programs) * RECORD_US[problem.format.bits][config.rows, config.block_m]
    us += -(-tiles // programs) * size * _END_US
    if tiles % programs == 0:
        meeting = 0.0
    elif programs % tiles == 0:
        meeting = 2.1 * (1 + size) + 0.5 * (programs // tiles - 1)
    else:  # shares begin anywhere along K: the longer it is, the less of x and of the weight is found in the cache
        meeting = 3.3 * (1 + 1.9 * size) + 1.05 * (1 + size) * max(0.0, records / 32 - 1)
    return 1e-6 * (us + meeting)


def most_stages(geo: gpu_tiles.Geometry, rows: int, block_m: int, gpu: Gpu) -> int:
    """That fit beside barriers and what is written by lanes."""
    parts, zero_bytes = parts_of(block_m), 0 if geo.zero_dtype is None else geo.zero_dtype.itemsize
    tails = 2 * rows * geo.blocks_a_record * (geo.format.scale.itemsize + zero_bytes)
    record = 256 * block_m + 32 * geo.format.bits * rows + tails
    return min(2 * geo.format.bits, (gpu.shared - BESIDE - (parts - 1) * tails) * parts // record)


def compiled_for(problem: Problem, config: Config, *, clamp: bool) -> Static:
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    return Static(
        rows=config.rows,
        block_m=config.block_m,
        stages=config.stages,
        clamp=clamp,
        lifted=lifted(problem),
        paired=problem.paired,
        **of_weight(geo),
    )


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] (unit stride along K) times the weight whose sections are codes, scale, zero -> out [M, N], contiguous."""
    nbytes = beside(problem, config)
    memory = workspace(out.device, nbytes) if nbytes else None
    multiply(problem, config, x, gpu_tiles.Views(codes, scale, zero), out, epilogue, memory)


def beside(problem: Problem, config: Config) -> int:
    """Bytes of memory where the sums of programs that share tiles meet."""
    return 16 * config.programs * config.rows * config.block_m if _tiles(problem, config) % config.programs else 0


def _tiles(problem: Problem, config: Config) -> int:
    return -(-problem.n // (2 * config.rows)) * -(-problem.m // config.block_m)


def multiply(
    problem: Problem,
    config: Config,
    x: Tensor,
    views: gpu_tiles.Views,
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor | None,
    registers: int | None = None,
) -> None:
    """The same of x [M or more, K], with `beside(problem, config)` bytes of memory and so many registers for a thread on the average."""
    codes, scale, zero = views
    if x.data_ptr() % 16 or x.stride(0) % 8:  # which TMA can't read
        x = x.clone(memory_format=torch.contiguous_format)
    geo, static = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), compiled_for(problem, config, clamp=epilogue.clamps)
    static = replace(static, sent=_sent(problem, static, out, epilogue), registers=registers)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if geo.format.bits == 4:
        weight = TensorDescriptor.from_tensor(codes.view(-1, 64), [32, 64], layout)
    else:
        of_bytes = gl.NVMMASharedLayout(swizzle_byte_width=static.width, element_bitwidth=8, rank=2)
        weight = TensorDescriptor.from_tensor(codes, [static.block_n, static.width], of_bytes)
    yd = TensorDescriptor.from_tensor(out, [config.block_m, static.rows], layout) if static.sent else None
    scratch: tuple[Tensor, Tensor] | None = None
    if memory is not None and beside(problem, config):
        scratch = memory.view(torch.float32), locks(out.device, 4 * _tiles(problem, config))
    launcher.run(
        _gemm,
        (config.programs,),
        TensorDescriptor.from_tensor(x, [config.block_m // (_BOXES if registers is None else 1), static.width], layout),
        weight,
        *tails_read(scale[None], None if zero is None else zero[None], static),
        scale,
        yd,
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
        maxnreg=registers,
        early=True,
    )


def _sent(problem: Problem, static: Static, out: Tensor, epilogue: Epilogue) -> bool:
    """Whether TMA can write the tiles."""
    fits = static.rows <= static.width and static.stages > static.parts + static.places
    return fits and epilogue.residual is None and problem.n % 8 == 0 and out.data_ptr() % 16 == 0


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
    sharers = _sharers(rest, sizes)
    start = gl.minimum(gl.program_id(0), sharers) * rest // sharers
    end = gl.minimum(gl.program_id(0) + 1, sharers) * rest // sharers
    return whole * sizes[3] + end - start, whole, start, rest


@gluon.jit
def _sharers(rest, sizes):
    """How many programs have a part of what is left over: a whole number of them each tile, where that leaves few idle."""
    most = gl.maximum(gl.minimum(rest, gl.num_programs(0)), 1)
    tiles = gl.maximum(rest // sizes[3], 1)
    even = gl.minimum(gl.num_programs(0) // tiles, sizes[3]) * tiles
    return gl.where((rest > 0) & (8 * even >= 7 * most), even, most)


@gluon.jit
def _divided(n, by, inverse):
    """n // by with `inverse` = _MOST // by: a division takes many times as long, and multiplications wait for it between two tiles."""
    q = gl.umulhi(n + n, inverse)
    return gl.where(n - q * by >= by, q + 1, q)


@gluon.jit
def _order(sizes, S: gl.constexpr):
    """What `_segment` divides by, and inverses: of a tile's records, of a group's tiles, of the tiles along M of the last group."""
    tiles_m = gl.cdiv(sizes[0], S.block_m)
    width = GROUP * gl.cdiv(sizes[1], 2 * S.rows)
    return _MOST // sizes[3], width, _MOST // width, tiles_m, _MOST // gl.maximum(tiles_m % GROUP, 1)


@gluon.jit
def _segment(at, end, whole, start, order, sizes, S: gl.constexpr):
    """The tile of this program's record `at`, where it is along M and N, and what of its records are in front of record `end`.

    GROUP tiles along M follow each other for each tile along N, so that both operands are found in the cache again.
    """
    inside = at < whole * sizes[3]
    record = gl.where(inside, at, start + at - whole * sizes[3])
    number = _divided(record, sizes[3], order[0])
    tile = gl.where(inside, number * gl.num_programs(0) + gl.program_id(0), whole * gl.num_programs(0) + number)
    first = record - number * sizes[3]
    count = gl.minimum(sizes[3] - first, end - at)
    group = _divided(tile, order[1], order[2])
    within = tile - group * order[1]
    size = gl.minimum(order[3] - group * GROUP, GROUP)
    pn = _divided(within, size, gl.where(size == GROUP, _MOST // GROUP, order[4]))
    return tile, group * GROUP + within - pn * size, pn, first, count


@gluon.jit
def _rows(pm, xd, sizes, S: gl.constexpr):
    """A tile's first row of x, and how many boxes of x have rows."""
    BOX: gl.constexpr = xd.block_shape[0]
    return pm * S.block_m, gl.minimum(gl.cdiv(sizes[0] - pm * S.block_m, BOX), S.block_m // BOX)


@gluon.jit
def _produce(read, buffers, full, empty, sizes, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    end, whole, start, _rest = _share(sizes, S)
    order = _order(sizes, S)
    at = start - start
    _tile, pm, pn, first, count = _segment(at, end, whole, start, order, sizes, S)
    step = gl.minimum(count * S.parts, STAGES)
    rows = _rows(pm, read[0], sizes, S)
    for i in range(step):  # the weight, before the kernel before has ended
        load_weight(read, buffers, full, rows[1], (0, 0), pn, first * S.parts + i, i, sizes, S)
    gdc_wait()
    for i in range(step):
        load_x(read[0], buffers[0], full, rows, first * S.parts + i, i, S)
    done = step
    while at < end:
        _tile, pm, pn, first, count = _segment(at, end, whole, start, order, sizes, S)
        rows = _rows(pm, read[0], sizes, S)
        for r in range(first * S.parts + done, (first + count) * S.parts):
            load_stage(read, buffers, full, empty, rows, (0, 0), pn, r, step, sizes, S)
            step += 1
        done = done - done
        at += count
        if S.sent:
            keep_free(full, empty, step, S)
            step += S.places


@gluon.jit
def _consume(buffers, full, empty, scale, yd, out, added, scratch, sizes, bounds, HALF: gl.constexpr, S: gl.constexpr):
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    DTYPE: gl.constexpr = out.dtype.element_ty
    high = high_bytes(DTYPE)
    step = 0
    owed = 0
    end, whole, start, rest = _share(sizes, S)
    order = _order(sizes, S)
    at = start - start
    tile, pm, pn, _first, count = _segment(at, end, whole, start, order, sizes, S)
    gdc_wait()
    while at < end:
        if scratch is not None:  # divisions take long: before the first records are there
            sharing = _sharing(tile - whole * gl.num_programs(0), gl.maximum(rest, 1), sizes)
        before, first_n, first_m, done = tile, (pn * 2 + HALF) * ROWS, pm * BM, count
        acc, step = sums(buffers, full, empty, owed, scale, first_n, count, step, high, sizes, HALF, DTYPE, S)
        acc = acc[0]
        at += count
        tile, pm, pn, _first, count = _segment(gl.minimum(at, end - 1), end, whole, start, order, sizes, S)
        if scratch is not None:
            if done < sizes[3]:
                _meet(acc, out, added, first_n, first_m, before, sharing, at < end, scratch, sizes, bounds, HALF, S)
        if S.sent:
            place = step + HALF // S.beside
            mbarrier.wait(full.index(place % S.stages), (place // S.stages) & 1)
            if done == sizes[3]:
                send_tile(acc, yd, added[0], buffers[0].index(place % S.stages), first_n, first_m, sizes, bounds, HALF, S)
            step += S.places
            owed = 1
        elif done == sizes[3]:
            _write(acc, out, added, first_n, first_m, sizes, bounds, S)
    if S.sent:
        tma.store_wait(0)


@gluon.jit
def _write(acc, out, added, first_n, first_m, sizes, bounds, S: gl.constexpr):
    pieces = pieces_of(acc, S)
    for i in gl.static_range(PIECES):
        write_tile(pieces[i], out, added, first_n, first_m + i * (S.block_m // PIECES), None, sizes, bounds, S)


@gluon.jit
def _sharing(number, rest, sizes):
    """Of the programs that share a tile the first, and how many others there are: `number` counts the tiles that are left over, `rest`
    their records."""
    sharers = _sharers(rest, sizes)
    record = number * sizes[3]
    leader = ((record + 1) * sharers - 1) // rest  # the program that has the tile's first record
    return leader, ((record + sizes[3]) * sharers - 1) // rest - leader


@gluon.jit
def _meet(acc, out, added, first_n, first_m, tile, sharing, busy, scratch, sizes, bounds, HALF: gl.constexpr, S: gl.constexpr):
    """Sums of a part of a tile's records -> `out`, with those of the programs that share the tile (`_sharing`): each adds up some of its
    columns.

    A program that is not `busy` with more waits for the others' sums, but for a while only: then it leaves its columns to the last to
    come. It may be that others cannot begin before it ends.
    """
    leader, others = sharing
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    WIDTH: gl.constexpr = BM // PIECES
    TOGETHER: gl.constexpr = 2 if ROWS * BM <= 8192 else 1  # pieces whose sums are on their way: as many as there are registers for
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    me = gl.program_id(0) - leader
    adding = gl.minimum(others + 1, PIECES)  # programs that do
    # A program has two places: one for the end of a tile, one for the beginning of another (the leader's part).
    away: gl.constexpr = 2 * ROWS * BM
    place = scratch[0] + (leader.to(gl.int64) * 4 + HALF) * (ROWS * BM)
    place += gl.expand_dims(gl.arange(0, ROWS * WIDTH // 512, layout=gl.SliceLayout(1, LANES)), 1) * 512
    place += gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, LANES)), 0)
    own = place + gl.where(me == 0, 1, 2 * me) * away
    pieces = pieces_of(acc, S)
    for i in gl.static_range(PIECES):
        gl.store(own + i * (ROWS * WIDTH), as_held(pieces[i]), mask=busy | (i * adding // PIECES != me))
    thread_barrier()  # what this warpgroup wrote comes before what it says
    # How many have written, and from bit 16 on whose columns are left to the last of them.
    lock = scratch[1] + (tile * 2 + HALF) * 2
    mark = gl.where(me < adding, 1 << (16 + gl.minimum(me, PIECES)), 0)
    seen = gl.atomic_add(lock, gl.where(busy, mark, 0) + 1, sem="acq_rel")
    there = seen + 1
    if (mark > 0) & (not busy):
        polls = 0
        while (there % (1 << 16) <= others) & (polls < _PATIENCE):
            # An atomic operation is one for all warps: they must not differ in what they see. What is read after it is read past the first
            # cache, so that it is as new.
            there = gl.atomic_add(lock, 0, sem="relaxed")
            polls += 1
        if there % (1 << 16) <= others:
            for i in gl.static_range(PIECES):
                gl.store(own + i * (ROWS * WIDTH), as_held(pieces[i]), mask=i * adding // PIECES == me)
            thread_barrier()
            there = gl.atomic_add(lock, mark, sem="acq_rel")
    thread_barrier()
    for i in gl.static_range(0, PIECES, TOGETHER):
        one = _adds(i, me, adding, others, there, seen)
        two = _adds(i + TOGETHER - 1, me, adding, others, there, seen)
        if one | two:
            left, right = gl.zeros_like(as_held(pieces[i])), gl.zeros_like(as_held(pieces[i + TOGETHER - 1]))
            for j in range(0, others + 1, 2):
                left = _plus(left, as_held(pieces[i]), place + i * (ROWS * WIDTH), away, j, me, others, one)
                if TOGETHER == 2:
                    right = _plus(right, as_held(pieces[i + 1]), place + (i + 1) * (ROWS * WIDTH), away, j, me, others, two)
            if one:
                total = gl.convert_layout(as_summed(left, ROWS), pieces[i].type.layout, assert_trivial=True)
                write_tile(total, out, added, first_n, first_m + i * WIDTH, None, sizes, bounds, S)
            if TOGETHER == 2:
                if two:
                    total = gl.convert_layout(as_summed(right, ROWS), pieces[i].type.layout, assert_trivial=True)
                    write_tile(total, out, added, first_n, first_m + (i + 1) * WIDTH, None, sizes, bounds, S)
    if gl.atomic_add(lock + 1, 1, sem="relaxed") == others:  # nobody looks any more
        gl.store(lock, 0)
        gl.store(lock + 1, 0)


@gluon.jit
def _adds(piece, me, adding, others, there, seen):
    """Whether a program adds up this piece of the columns: its own, or as the last one what was left to it."""
    owner = piece * adding // PIECES
    mine = (owner == me) & (there % (1 << 16) > others)
    return mine | ((seen % (1 << 16) == others) & ((seen >> (16 + owner)) % 2 == 1))


@gluon.jit
def _plus(total, held, place, away, j, me, others, wanted):
    """total + the sums of programs j and j + 1, of which `held` are this one's."""
    one = gl.load(place + gl.where(j == 0, 1, 2 * j) * away, mask=(j != me) & wanted, other=0.0, cache_modifier=".cg")
    two = gl.load(place + (2 * j + 2) * away, mask=(j < others) & (j + 1 != me) & wanted, other=0.0, cache_modifier=".cg")
    return total + gl.where(j == me, held, one) + gl.where(j + 1 == me, held, two)


@gluon.jit(do_not_specialize=["M"])
def _gemm(xd, wd, sd, zd, scale, yd, out, added, scratch, M, N, n_padded, records, bounds, S: gl.constexpr):
    gdc_launch_dependents()
    OTHERS: gl.constexpr = [of_second(S.registers), 40]
    read = (xd, wd, sd, zd)
    buffers, full, empty = ring(read, S)
    sizes = (M, N, n_padded, records)
    gl.warp_specialize(
        [
            (_consume, (buffers, full, empty, scale, yd, out, added, scratch, sizes, bounds, 0, S)),
            (_consume, (buffers, full, empty, scale, yd, out, added, scratch, sizes, bounds, 1, S)),
            (_produce, (read, buffers, full, empty, sizes, S)),
        ],
        [4, 1],
        OTHERS,
    )
