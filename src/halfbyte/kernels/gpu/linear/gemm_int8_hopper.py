"""y [M, N] = x [M, K] . W^T on Hopper's integer tensor cores (W8A8, W4A8), for many rows: TMA, warp specialization, a persistent grid.

The products, their arithmetic and the order of the operands are those of `gemm_int8.py`; an x with an offset is left to it.

A program computes tiles of 64 * PANELS rows of the weight by BM rows of x, one after the other. One warp keeps STAGES records
(128 k) of both operands, and the scales of their blocks, on their way to shared memory, the weight's first before the kernel that
quantizes x has ended; each of PANELS warpgroups multiplies 64 rows of the weight by all rows of x. Eight nibbles go from shared memory
through three instructions into the registers that `wgmma` reads. Where tiles are few and K is long, several programs share a tile, each a
part of its records: their sums meet in a workspace, and the last to come adds them up, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import in_groups
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, async_store, thread_barrier
from halfbyte.kernels.gpu.hopper.int8_tile import Static, scaled, sum_blocks, sum_whole
from halfbyte.kernels.gpu.hopper.stages import as_held, as_summed, barriers, next_stage, not_hopper, of_second
from halfbyte.kernels.gpu.linear import gemm_int8
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.quantize.activations import Quantized
from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.kernels.gpu.runtime.scratch import locks
from halfbyte.kernels.gpu.weight_kinds import zero_number
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_LEAST_M, _LEAST_SCALED = 9, 17  # fewer rows do not fill a tile; of blocks gemm_int8.py has more programs
_LEAST_SHARE = 16  # records of a program that shares a tile
_MEETING_US = 4.5  # that it takes programs to add up the sums of a tile, on an H200


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight, a warpgroup each (1 or 2), by block_m of x, `stages` records in flight;
    `early`: the weight is on its way while x is quantized. Of tiles of 256 rows of x those left over may be halved (`_halves`)."""

    block_m: int
    stages: int
    programs: int
    panels: int = 2
    early: bool = False


def supports(problem: Problem, gpu: Gpu) -> str | None:
    if reason := gemm_int8.supports(problem, gpu) or not_hopper(gpu):
        return reason
    plan = activations.plan(problem)
    if problem.m < (least := _LEAST_M if plan.whole else _LEAST_SCALED):
        return f"{problem.m} rows do not fill its tiles: from {least} on"
    if plan.with_offset:
        return "an x with an offset takes the sums of the weight's codes, which it does not read"
    if not plan.whole and plan.padded != gpu_tiles.RECORD:
        return f"blocks are {gpu_tiles.RECORD} elements, whose sums are exact as float32 and long enough to scale each, not {plan.padded}"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first: the least time of all waves of tiles."""
    fmt, found, times = problem.format, [], _record_us(problem, activations.plan(problem).whole)
    geo = gpu_tiles.geometry(fmt, (problem.n, problem.k))
    for (block_m, panels), us in times.items():
        rows = -(-problem.m // block_m)
        tiles = rows * -(-problem.n // (64 * panels))
        waves = -(-tiles // gpu.sms)
        stages = min(8, (gpu.shared - (32 << 10)) // compiled_for(problem, Config(block_m, 1, 1, panels), clamp=False).stage_bytes)
        # Programs that start one after the other ask for the same weights at different times.
        early = rows == 1 or rows * geo.nbytes <= 2 * gpu.l2
        found.append((waves * geo.records * us, Config(block_m, stages, -(-tiles // waves), panels, early)))
        if block_m == 256 and _halves(tiles, gpu.sms):
            halved_us = (waves - 1) * us + times[128, panels]
            found.append((halved_us * geo.records, Config(block_m, stages, gpu.sms, panels, early)))
        for split in (2, 4):
            if block_m < 256 and tiles * split <= gpu.sms and geo.records >= _LEAST_SHARE * split:
                # Bytes of a tile lie in rows of K: programs that share it read twice as many places of the memory at once.
                share_us = -(-geo.records // split) * us * (1.5 if fmt.bits == 8 else 1.0)
                found.append((share_us + _MEETING_US, Config(block_m, stages, tiles * split, panels, early)))
    return tuple(config for _, config in sorted(found, key=lambda pair: pair[0]))


def _halves(tiles: int, programs: int) -> bool:
    """Whether each of the tiles that are left over when all programs have had as many is halved, for two programs."""
    return tiles > programs and 0 < 2 * (tiles % programs) <= programs


def _chained(problem: Problem) -> bool:
    """Whether sums of blocks may lose what chains make them lose (`hopper/int8_tile.py`)."""
    plan, fmt = activations.plan(problem), problem.format
    return plan.whole_row and not plan.whole and fmt.scale == torch.float16 and problem.dtype != torch.float32


def _record_us(problem: Problem, whole: bool) -> dict[tuple[int, int], float]:
    """Microseconds of a record of a tile (rows of x, panels) on an H200."""
    bits = problem.format.bits
    if problem.m <= 32:
        return {(16 if problem.m <= 16 and whole else 32, panels): us for panels, us in ((1, 0.20), (2, 0.26))}
    if problem.m <= 64:
        return {(64, 1): 0.20, (64, 2): 0.26, (32, 1): 0.198, (32, 2): 0.196 if bits == 4 and whole else 0.206}
    if not whole:
        return {(128, 2): 0.50, (64, 2): 0.330, (128, 1): 0.28, (64, 1): 0.20}
    if bits == 4:
        return {(256, 2): 0.684, (128, 2): 0.375, (64, 2): 0.24, (128, 1): 0.26}
    return {(256, 2): 0.720, (128, 2): 0.367, (64, 2): 0.228, (128, 1): 0.24}


def compiled_for(problem: Problem, config: Config, *, clamp: bool) -> Static:
    plan, fmt = activations.plan(problem), problem.format
    return Static(
        bits=fmt.bits,
        zero=zero_number(fmt),
        scale_bytes=fmt.scale.itemsize,
        whole=plan.whole,
        row=plan.whole_row,
        block_m=config.block_m,
        panels=config.panels,
        stages=config.stages,
        chained=_chained(problem),
        early=config.early,
        clamp=clamp,
    )


def _tiles_of(problem: Problem, config: Config) -> int:
    return -(-problem.m // config.block_m) * -(-problem.n // (64 * config.panels))


def _sharers(problem: Problem, config: Config) -> int:
    """How many programs share each tile."""
    return max(1, config.programs // _tiles_of(problem, config))


def _beside(problem: Problem, config: Config) -> int:
    """Bytes of memory where the sums of programs that share tiles meet."""
    shared = _sharers(problem, config) > 1
    return 4 * config.programs * 64 * config.panels * config.block_m if shared else 0


def multiply(
    problem: Problem, config: Config, x: Quantized, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue, memory: Tensor
) -> None:
    """The product alone."""
    geo, tiles = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _tiles_of(problem, config)
    static = replace(
        compiled_for(problem, config, clamp=epilogue.clamps),
        split=_sharers(problem, config),
        halves=config.block_m == 256 and _halves(tiles, config.programs),
    )
    rows = weight.codes.view(torch.int8).view(-1, 128) if static.bits == 4 else weight.codes
    scratch = None
    if static.split > 1:
        scratch = memory.view(torch.int32 if static.whole else torch.float32), locks(out.device, config.panels * tiles)
    # Bytes in tiles of few rows of x are bound by the cache: programs that start one after the other find less in it.
    starts_early = config.early or not static.whole or static.bits == 4 or config.block_m == 256
    by_tma = epilogue.residual is None and out.itemsize == 2 and problem.n % 8 == 0 and out.data_ptr() % 16 == 0
    run(
        _gemm,
        (config.programs,),
        descriptor(x.q, min(config.block_m, 128), 128),
        descriptor(rows, 8 * static.bits, 128),
        None if static.whole or static.row else descriptor(x.scale, 1, config.block_m),
        None if static.whole or x.sums is None else descriptor(x.sums, 1, config.block_m),
        None if static.whole else descriptor(weight.scale.view(-1, 64), 1, 64),
        descriptor(out, static.part, 64) if by_tma else None,
        (x.scale, x.sums),
        (weight.scale, weight.zero),
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
        maxnreg=static.registers,
        early=starts_early,
    )


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of tiles of a matrix; rows of 128 bytes are swizzled, as wgmma reads them; not the single ones of scales."""
    swizzled = rows > 1 and columns * matrix.itemsize == 128
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128 if swizzled else 0, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


launch = activations.first(multiply, _beside, early=not triton.knobs.runtime.interpret)


# The kernel. `S` is a Static; `sizes` is (M, N, N padded, records of a row).


@gluon.jit
def ring(xd, wd, ad, md, sd, S: gl.constexpr):
    """Shared memory for `stages` records of both operands and of what scales them, and barriers that say which are full and which free."""
    STAGES: gl.constexpr = S.stages
    PANELS: gl.constexpr = S.panels
    BM: gl.constexpr = S.block_m
    LINES: gl.constexpr = 8 * S.bits
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, 128], xd.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES * PANELS, LINES, 128], wd.layout)
    a = xs  # what is not there is not read
    m = xs
    s = xs
    if ad is not None:
        a = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], ad.layout)
    if md is not None:
        m = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], md.layout)
    if sd is not None:
        s = gl.allocate_shared_memory(sd.dtype, [STAGES * PANELS, 1, 64], sd.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, PANELS)
    fence_async_shared()
    return (xs, ws, a, m, s), full, empty


@gluon.jit
def load_tile(xd, wd, ad, md, sd, before, buffers, full, empty, first_m, pn, first, end, stage, phase, sizes, S: gl.constexpr):
    """Records first … end - 1 of the rows of x from first_m on and of tile pn of the weight; the stage after them. `before`: where the
    weight begins, in rows of wd (4 bits) and of sd."""
    for r in range(first, end):
        mbarrier.wait(empty.index(stage), phase)
        _load_weight(wd, buffers[1], full, before[0], pn, r, stage, sizes, S)
        _load_rest(xd, ad, md, sd, buffers, full, before[1], first_m, pn, r, stage, sizes, S)
        stage, phase = next_stage(stage, phase, S.stages)
    return stage, phase


@gluon.jit
def _load_weight(wd, ws, full, before, pn, r, stage, sizes, S: gl.constexpr):
    """Record r of the weight, and how many bytes are to come with it in all."""
    PANELS: gl.constexpr = S.panels
    bar = full.index(stage)
    mbarrier.expect(bar, S.stage_bytes)
    for p in gl.static_range(PANELS):
        panel = pn * PANELS + p
        if S.bits == 4:
            async_load(wd, [before + (panel * sizes[3] + r) * 32, 0], bar, ws.index(stage * PANELS + p))
        else:
            async_load(wd, [panel * 64, r * 128], bar, ws.index(stage * PANELS + p))


@gluon.jit
def _load_rest(xd, ad, md, sd, buffers, full, before, first_m, pn, r, stage, sizes, S: gl.constexpr):
    """Record r of x, and what scales both; 64 of the weight's scales are a row of sd."""
    xs, _, a, m, s = buffers
    PANELS: gl.constexpr = S.panels
    BOX: gl.constexpr = xd.block_shape[0]
    bar = full.index(stage)
    for i in gl.static_range(S.block_m // BOX):
        async_load(xd, [first_m + i * BOX, r * 128], bar, xs.index(stage).slice(i * BOX, BOX, dim=0))
    if ad is not None:
        async_load(ad, [r, first_m], bar, a.index(stage))
    if md is not None:
        async_load(md, [r, first_m], bar, m.index(stage))
    for p in gl.static_range(PANELS):
        if sd is not None:
            row = before + r * (sizes[2] // 64) + pn * PANELS + p
            async_load(sd, [row, 0], bar, s.index(stage * PANELS + p))


@gluon.jit
def multiply_tile(buffers, full, empty, of_x, of_w, to, scratch, tile, m, n, first, count, stage, phase, W: gl.constexpr, S: gl.constexpr):
    """Warpgroup W: a tile's rows of x, from m on, by 64 rows of the weight, from n on, in `count` records from `first` on; the stage
    after them. `scratch`: where programs that share tile `tile` leave their sums; `to`: of `_finish_tile`."""
    PART: gl.constexpr = S.part
    MMA: gl.constexpr = S.sums
    sizes = to[5]
    rn = gl.minimum(n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), sizes[2] - 1)
    # What the sums will be multiplied by is on its way while products are added up.
    if PART == S.block_m:
        by_x = (_row_scale(of_x, m, S),)
    else:
        by_x = (_row_scale(of_x, m, S), _row_scale(of_x, m + PART, S))  # type: ignore[assignment]
    by_w = of_w[0]
    if S.whole:
        by_w = gl.expand_dims(gl.load(of_w[0] + rn).to(gl.float32), 1)
        acc, stage, phase = sum_whole(buffers, full, empty, stage, phase, count, W, S)
        if PART == S.block_m:
            pieces = (acc,)
        else:
            pieces = gl.split(acc.reshape([64, 2, PART]).permute([0, 2, 1]))
    else:
        left, right, stage, phase = sum_blocks(buffers, full, empty, stage, phase, first, count, (of_w[1], rn, sizes[2]), W, S)
        pieces = (left, right)  # type: ignore[assignment]
    ready = True
    if S.split > 1:
        ready = _leave(pieces, scratch, tile, W, S)
    if ready:
        for i in gl.static_range(S.block_m // PART):
            total = pieces[i]
            if S.split > 1:
                total = _add_up(scratch, tile, i, W, S)
            _finish_tile(total, by_x[i], by_w, of_x, of_w, rn, to, n, m + i * PART, S)
    return stage, phase


@gluon.jit
def _place(scratch, tile, W: gl.constexpr, S: gl.constexpr):
    """Where the first program of those that share a tile leaves the first sums of warpgroup W, and how far away the next one's are."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    SIZE: gl.constexpr = 64 * S.block_m
    place = scratch[0] + tile * (S.split * S.panels * SIZE) + W * SIZE
    place += gl.expand_dims(gl.arange(0, S.part // 8, layout=gl.SliceLayout(1, LANES)), 1) * 512
    return place + gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, LANES)), 0), S.panels * SIZE


@gluon.jit
def _leave(pieces, scratch, tile, W: gl.constexpr, S: gl.constexpr):
    """Leaves the sums of a program for the last to come of those that share its tile. Returns whether it is that one."""
    place, away = _place(scratch, tile, W, S)
    place += gl.program_id(0) % S.split * away
    PIECES: gl.constexpr = S.block_m // S.part
    for i in gl.static_range(PIECES):
        gl.store(place + i * (64 * S.part), as_held(gl.convert_layout(pieces[i], S.sums, assert_trivial=True)))
    thread_barrier()  # what this warpgroup wrote comes before what it says
    lock = scratch[1] + tile * S.panels + W
    last = gl.atomic_add(lock, 1, sem="acq_rel") == S.split - 1
    if last:
        gl.store(lock, 0)
    return last


@gluon.jit
def _add_up(scratch, tile, PIECE: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """Piece PIECE of the sums of all programs that share a tile."""
    SPLIT: gl.constexpr = S.split
    place, away = _place(scratch, tile, W, S)
    place += PIECE * (64 * S.part)
    total = gl.load(place, cache_modifier=".cg")
    for j in gl.static_range(1, SPLIT):
        total += gl.load(place + j * away, cache_modifier=".cg")
    return as_summed(total, 64)


@gluon.jit
def _row_scale(of_x, first, S: gl.constexpr):
    """The scales of the rows of x from `first` on whose sums are finished together, [part]: one or two a thread until they are wanted."""
    PART: gl.constexpr = S.part
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if S.row:
        return gl.load(of_x[0] + first + gl.arange(0, PART, layout=LINE))
    else:
        return of_x[0]


@gluon.jit
def _finish_tile(total, by_x, by_w, of_x, of_w, rn, to, first_n, first_m, S: gl.constexpr):
    """Integers of all of K, or scaled sums of blocks, [64, part] -> y.

    to   descriptor of y and shared memory for it, or None; y, and None or where its rows' numbers stand, how many there are, and whether
         y is not NaN; bias and residual; sizes; bounds
    """
    yd, place, out, places, added, sizes, bounds = to
    PART: gl.constexpr = S.part
    MMA: gl.constexpr = S.sums
    DTYPE: gl.constexpr = out.dtype.element_ty
    total = gl.convert_layout(total, MMA, assert_trivial=True)
    if S.whole:
        z = by_w
        m = by_w
        if S.zero != 0:
            z = gl.expand_dims(gl.load(of_w[1] + rn), 1)
            m = gl.expand_dims(gl.load(of_x[1] + first_m + gl.arange(0, PART, layout=gl.SliceLayout(0, MMA))), 0)
        total = scaled(total.to(gl.float32), by_w, z, m, S)
    if S.row:
        total *= gl.expand_dims(gl.convert_layout(by_x, gl.SliceLayout(0, MMA)), 0) * (0.0625 if S.bits == 4 else 1.0)
    elif S.bits == 4:
        total *= 0.0625
    if yd is not None:
        row = first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        y = finish(total, (added[0], None), row, None, sizes[1], bounds[0], bounds[1], S.clamp, DTYPE, None)
        tma.store_wait(0)
        thread_barrier()  # what was there before is on its way
        place.permute([1, 0]).store(y)
        fence_async_shared()
        async_store(yd, [first_m, first_n], place)
    else:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        rn = first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
        rm = first_m + gl.arange(0, PART, layout=gl.SliceLayout(0, OUT))
        if places is None:
            inside = rm < sizes[0]
        else:
            inside = rm < places[1]
            rm = gl.load(places[0] + rm, mask=inside, other=0)
            total = gl.where(places[2], total, float("nan"))
        mask = gl.expand_dims(rn < sizes[1], 1) & gl.expand_dims(inside, 0)
        at = gl.expand_dims(rm, 0).to(gl.int64) * sizes[1] + gl.expand_dims(rn, 1)
        y = finish(gl.convert_layout(total, OUT), added, rn, rm, sizes[1], bounds[0], bounds[1], S.clamp, DTYPE, mask)
        gl.store(out + at, y, mask=mask)


@gluon.jit
def _tiles(sizes, S: gl.constexpr):
    """How many there are along M and along N, and how many of all programs multiply whole."""
    tiles_m = gl.cdiv(sizes[0], S.block_m)
    tiles_n = gl.cdiv(sizes[1], 64 * S.panels)
    whole = tiles_m * tiles_n
    if S.halves:
        whole -= whole % gl.num_programs(0)
    return tiles_m, tiles_n, whole


@gluon.jit
def _half(sizes, S: gl.constexpr):
    """The half of a tile left over that this program multiplies: whether there is one, its first row of x, and its place along N."""
    tiles_m, tiles_n, whole = _tiles(sizes, S)
    pm, pn = in_groups(gl.minimum(whole + gl.program_id(0) // 2, tiles_m * tiles_n - 1), tiles_m, tiles_n)
    first = pm * S.block_m + gl.program_id(0) % 2 * (S.block_m // 2)
    return gl.program_id(0) < 2 * (tiles_m * tiles_n - whole), first, pn


@gluon.jit
def _part(sizes, S: gl.constexpr):
    """Of the records of its tiles the first that this program multiplies, and how many."""
    first = gl.program_id(0) % S.split * sizes[3] // S.split
    return first, (gl.program_id(0) % S.split + 1) * sizes[3] // S.split - first


@gluon.jit
def _produce(xd, wd, ad, md, sd, buffers, full, empty, sizes, S: gl.constexpr):
    tiles_m, tiles_n, whole = _tiles(sizes, S)
    tile = gl.program_id(0) // S.split
    pm, pn = in_groups(tile, tiles_m, tiles_n)
    first, count = _part(sizes, S)
    ahead = gl.minimum(count, S.stages)
    if not S.early:
        gdc_wait()
    for r in range(ahead):
        _load_weight(wd, buffers[1], full, 0, pn, first + r, r, sizes, S)
    gdc_wait()
    for r in range(ahead):
        _load_rest(xd, ad, md, sd, buffers, full, 0, pm * S.block_m, pn, first + r, r, sizes, S)
    stage = gl.where(ahead == S.stages, 0, ahead)
    phase = gl.where(ahead == S.stages, 0, 1)
    # Not `for`: Triton 3.6 would take a variable that only bounds a loop inside of it for dead, and keep its first value.
    while tile < whole:
        pm, pn = in_groups(tile, tiles_m, tiles_n)
        stage, phase = load_tile(
            xd, wd, ad, md, sd, (0, 0), buffers, full, empty, pm * S.block_m, pn, first + ahead, first + count, stage, phase, sizes, S
        )
        ahead -= ahead
        tile += gl.num_programs(0) // S.split
    if S.halves:
        HALVED: gl.constexpr = S.narrower
        there, m, pn = _half(sizes, S)
        if there:
            load_tile(xd, wd, ad, md, sd, (0, 0), buffers, full, empty, m, pn, 0, sizes[3], stage, phase, sizes, HALVED)


@gluon.jit
def _consume(buffers, full, empty, yd, ys, of_x, of_w, out, added, scratch, sizes, bounds, W: gl.constexpr, S: gl.constexpr):
    tiles_m, tiles_n, whole = _tiles(sizes, S)
    to = (yd, ys.index(W), out, None, added, sizes, bounds)
    stage = 0
    phase = 0
    first, count = _part(sizes, S)
    gdc_wait()
    for tile in range(gl.program_id(0) // S.split, whole, gl.num_programs(0) // S.split):
        pm, pn = in_groups(tile, tiles_m, tiles_n)
        n = (pn * S.panels + W) * 64
        stage, phase = multiply_tile(
            buffers, full, empty, of_x, of_w, to, scratch, tile, pm * S.block_m, n, first, count, stage, phase, W, S
        )  # fmt: skip
    if S.halves:
        HALVED: gl.constexpr = S.narrower
        there, m, pn = _half(sizes, S)
        if there:
            n = (pn * S.panels + W) * 64
            multiply_tile(buffers, full, empty, of_x, of_w, to, scratch, 0, m, n, 0, sizes[3], stage, phase, W, HALVED)
    if yd is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _gemm(xd, wd, ad, md, sd, yd, of_x, of_w, out, added, scratch, M, N, n_padded, records, bounds, S: gl.constexpr):
    gdc_launch_dependents()
    PANELS: gl.constexpr = S.panels
    PART: gl.constexpr = S.part
    OTHERS: gl.constexpr = [of_second(S.registers), 40]
    buffers, full, empty = ring(xd, wd, ad, md, sd, S)
    ys = buffers[0]  # what is not there is not written
    if yd is not None:
        ys = gl.allocate_shared_memory(yd.dtype, [PANELS, PART, 64], yd.layout)
    sizes = (M, N, n_padded, records)
    if PANELS == 1:
        gl.warp_specialize(
            [
                (_consume, (buffers, full, empty, yd, ys, of_x, of_w, out, added, scratch, sizes, bounds, 0, S)),
                (_produce, (xd, wd, ad, md, sd, buffers, full, empty, sizes, S)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, full, empty, yd, ys, of_x, of_w, out, added, scratch, sizes, bounds, 0, S)),
                (_consume, (buffers, full, empty, yd, ys, of_x, of_w, out, added, scratch, sizes, bounds, 1, S)),
                (_produce, (xd, wd, ad, md, sd, buffers, full, empty, sizes, S)),
            ],
            [4, 1],
            OTHERS,
        )
