"""Grouped linear layers of experts (`grouped.py`) on Hopper with many rows per expert: the tiles of `hopper/tile.py` in a `TileSchedule`.

Two gather warps copy rows of x into the order of their experts, so that TMA reads the rows of an expert as a box, while the consumers
multiply: first the chunks of K that all early tiles begin with. A box may reach into the next expert's rows, whose sums are masked. An
expert has as few tiles as possible, all about as wide, in steps of 64 rows: a narrow tile dequantizes as many weights as a wide one. The
schedule is written on the device, wide tiles first, so that the host never synchronizes. A program takes the next tile when it has room (an
atomic counter), so that all end at about the same time; its producer warp publishes the tile to the consumers in shared memory.

Weight: the words or bytes of `layouts/gpu_tiles.py`, E matrices one after the other. Arithmetic: that of `hopper/tile.py`. An id outside of
[0, E) gives a row of NaN.

Fastest from some 16 rows per expert on, where a dequantized weight serves a whole tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import grouped_ordering
from halfbyte.kernels.gpu.experts import grouped
from halfbyte.kernels.gpu.hopper.epilogue import OUT, QUARTERS, Outputs, quarters_of, write_rows
from halfbyte.kernels.gpu.hopper.gluon_compat import FEWER_REGISTERS, thread_barrier
from halfbyte.kernels.gpu.hopper.ring import Shape, descriptor
from halfbyte.kernels.gpu.hopper.tile import (
    Operands,
    WeightOffset,
    XBoxes,
    allocate_ring,
    codes_descriptor,
    load_stage,
    multiply_slabs,
    scale_descriptors,
)
from halfbyte.kernels.gpu.hopper.weights import high_bytes
from halfbyte.kernels.gpu.linear import gemm_hopper
from halfbyte.kernels.gpu.linear.gemm_hopper import Config, compiled_for, most_stages
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

# Layout of the shared memory [4 * stages, 1] through which `publish_tile` hands a tile to the consumers.
PUBLISHED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_ROWS = 64  # of the weight per warpgroup
_LEAST_ROWS = {4: 16, 8: 12}  # per expert on average, by bits
NARROWEST = gl.constexpr(64)  # rows of x of a tile, and of a part that the gather warps copy
CHUNK = gl.constexpr(256)  # elements along K that the gather warps copy together
# Microseconds of a K slab of tiles of 64, 128, … rows of x in stages for the widest of them, by bits; and of the rest of a tile per 64
# rows, by the widest. Fitted to times of some shapes on an H200.
_SLAB_US = {
    4: {256: (0.67, 0.84, 1.12, 1.36), 128: (0.54, 0.76), 64: (0.54,)},
    8: {256: (0.79, 0.97, 1.23, 1.47), 128: (0.72, 0.94), 64: (0.72,)},
}
_REST_US = {256: 1.25, 128: 0.95, 64: 0.95}


class Tile(NamedTuple):
    """A tile of the schedule.

    Attributes:
        expert: Its expert.
        start: Its first row among those sorted by expert.
        rows: Their number; 0: the schedule has no such tile.
        pn: Its place along N.
    """

    expert: Value
    start: Value
    rows: Value
    pn: Value


class Gather(NamedTuple):
    """What the gather warps copy: row i of `sorted_x` [P, K] is row order[i] // top_k of x."""

    x: Value
    sorted_x: Value
    x_stride: Value
    top_k: Value
    k: Value


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "grouped_linear":
        return f"it multiplies experts, not {problem.op}"
    if problem.m < (least := _LEAST_ROWS[problem.format.bits]) * problem.experts:
        return f"{problem.m} rows for {problem.experts} experts do not fill its tiles: from {least} an expert on"
    return gemm_hopper.supports(replace(problem, op="linear", compute="float", experts=1), gpu)


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first: by the time of all tiles, if experts have somewhat more or fewer rows than the mean."""
    mean, geo = problem.m / problem.experts, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    candidates = []
    for block_m, slab_us in _SLAB_US[problem.format.bits].items():
        tile_us = [geo.records * us + (i + 1) * _REST_US[block_m] for i, us in enumerate(slab_us)]
        us = sum(_expert_us(round(mean + i * mean**0.5), tile_us) for i in (-1.5, -0.5, 0.5, 1.5))
        candidates.append((us, Config(_ROWS, block_m, most_stages(geo, _ROWS, block_m, gpu), gpu.sms)))
    return tuple(config for _, config in sorted(candidates, key=lambda pair: pair[0]))


def _expert_us(rows: int, tile_us: list[float]) -> float:
    """Return the microseconds of all tiles of an expert with `rows` rows, whose widths differ by one step at most."""
    steps = -(-rows // 64)
    tiles = -(-steps // len(tile_us))
    width, wider = divmod(steps, tiles)
    return (tiles - wider) * tile_us[width - 1] + wider * tile_us[width % len(tile_us)]


def launch(problem: Problem, config: Config, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """Launch the grouped product; arguments as in `grouped.launch`."""
    experts, n, k = problem.experts, problem.n, problem.k
    geo = gpu_tiles.geometry(problem.format, (n, k))
    first = gpu_tiles.views(weight[: geo.nbytes], geo)
    scale = _of_all_experts(first.scale, experts, geo.nbytes)
    zero = None if first.zero is None else _of_all_experts(first.zero, experts, geo.nbytes)
    chunks = -(-k // CHUNK.value)
    schedule = grouped.tile_schedule(ids, experts, config.block_m, NARROWEST.value, counters_per_tile=chunks + 1, balanced=True)
    sorted_x = output(torch.empty(problem.m, k, dtype=x.dtype, device=x.device))
    static = compiled_for(problem, config, clamp=False)
    if static.bits == 4:
        codes = codes_descriptor(weight.view(torch.int16), static)
    else:  # rows of twice their length, as an expert may begin anywhere in one
        shape, strides = [(experts - 1) * geo.nbytes // geo.k_padded + geo.n_padded, 2 * geo.k_padded], [geo.k_padded, 1]
        codes = descriptor(weight.view(torch.int8), [static.block_n, static.stage_k], shape=shape, strides=strides)
    launcher.run(
        _grouped,
        (config.programs,),
        descriptor(sorted_x, [NARROWEST.value, static.stage_k]),
        codes,
        *scale_descriptors(scale, zero, static),
        weight[geo.scale_offset :].view(geo.format.scale),  # of the first expert, and so on
        geo.nbytes // 128,
        schedule,
        Gather(x, sorted_x, x.stride(0), problem.m // len(x), k),
        out,
        bias,
        experts,
        Shape(0, n, geo.n_padded, geo.records),
        static,
        num_warps=4,
        early=True,
    )


def _of_all_experts(section: Tensor, experts: int, nbytes: int) -> Tensor:
    """Return a section of the first of `experts` matrices of `nbytes` bytes as that of all, [experts, block rows, N padded]."""
    return section.as_strided((experts, *section.shape), (nbytes // section.element_size(), *section.stride()))


# Parts of the tile schedule that `grouped_int8_hopper.py` uses, too.


@gluon.jit
def with_width_of(work: gl.constexpr, args, rows, S: gl.constexpr):
    """Return work(*args, S) for the narrowest S whose tiles hold `rows` rows of x."""
    NARROWER: gl.constexpr = S.narrower
    if S.block_m > NARROWEST:
        if rows <= NARROWER.block_m:
            result = with_width_of(work, args, rows, NARROWER)
        else:
            result = work(*args, S)
    else:
        result = work(*args, S)
    return result


@gluon.jit
def tile_at(number, schedule, shape, WIDTH: gl.constexpr):
    """Return the `Tile` with this number, for tiles of WIDTH rows of the weight, and its place along M."""
    tiles = gl.load(schedule.counters)
    width = gl.cdiv(shape.n, WIDTH)
    pm, pn = grouped_ordering(gl.minimum(number, tiles * width - 1), tiles, width)
    rows = gl.load(schedule.rows + pm, mask=number < tiles * width, other=0)
    return Tile(gl.load(schedule.expert + pm), gl.load(schedule.start + pm), rows, pn), pm


@gluon.jit
def next_tile(schedule):
    """Return the number of the next tile that no program has taken. A program's first tile is the one with its own number."""
    return gl.num_programs(0) + gl.atomic_add(schedule.counters + 1, 1, sem="relaxed")


@gluon.jit
def publish_tile(published, full, empty, tile, stage, phase):
    """Hand a tile to the consumers with its first stage; after the last tile, complete that stage without loads."""
    mbarrier.wait(empty.index(stage), phase)
    for i in gl.static_range(4):
        published.index(stage * 4 + i).store(gl.full([1], tile[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    thread_barrier()
    mbarrier.arrive(full.index(stage), count=1, pred=tile.rows == 0)


@gluon.jit
def receive_tile(published, full, stage, phase):
    """Return the `Tile` that `publish_tile` wrote."""
    mbarrier.wait(full.index(stage), phase)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    expert = gl.sum(published.index(stage * 4).load(LANES), 0)
    start = gl.sum(published.index(stage * 4 + 1).load(LANES), 0)
    rows = gl.sum(published.index(stage * 4 + 2).load(LANES), 0)
    pn = gl.sum(published.index(stage * 4 + 3).load(LANES), 0)
    return Tile(expert, start, rows, pn)


# Gathering x. Counters of the schedule: number of tiles, next tile, next part to gather; then for each tile the parts that are ready of
# each chunk of K, and of all chunks. `S` is a tile.Static, `chunks` the number of chunks of K.


@gluon.jit
def _ready_counts(pm, chunks):
    """Return where the counts of ready parts of the tiles at pm are among the counters: one for each chunk, and one for all."""
    return 3 + pm * (chunks + 1)


@gluon.jit
def _wait_until(counter, least):
    """Poll a counter until it is at least `least`, and return it. TMA loads after it see what was stored before."""
    value = gl.atomic_add(counter, 0, sem="acquire")
    while value < least:
        value = gl.atomic_add(counter, 0, sem="acquire")
    return _proxy_fence(value)


@gluon.jit
def _proxy_fence(value):
    """Order global memory accesses of threads and of TMA; returns `value`."""
    return gl.inline_asm_elementwise("fence.proxy.async.global;", "=r,0", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gather_rows(schedule, gather, chunks, S: gl.constexpr):
    """The gather warps: copy parts of NARROWEST rows by CHUNK elements of x until none is left, in the order in which tiles need them."""
    ROWS: gl.constexpr = 16
    PARTS: gl.constexpr = S.block_m // NARROWEST
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    tiles = gl.load(schedule.counters)
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LANES))
    number = gl.atomic_add(schedule.counters + 2, 1, sem="relaxed")
    while number < tiles * chunks * PARTS:
        pm, chunk = grouped_ordering(number // PARTS, tiles, chunks)
        skipped = number % PARTS * NARROWEST
        count = gl.minimum(gl.load(schedule.rows + pm) - skipped, NARROWEST)
        start = gl.load(schedule.start + pm) + skipped
        column = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LANES))
        pair = gl.load(schedule.order + start + lane, mask=lane < count, other=0)
        for r in range(0, count, ROWS):
            # A value that the compiler does not know: otherwise it would keep 64-bit offsets of each row in registers.
            row = gl.inline_asm_elementwise("", "=r,0", [r], dtype=gl.int32, is_pure=False, pack=1) + lane
            mask = gl.expand_dims(row < count, 1) & gl.expand_dims(column < gather.k, 0)
            from_row = (pair // gather.top_k).to(gl.int64) * gather.x_stride
            values = gl.load(gather.x + gl.expand_dims(from_row, 1) + gl.expand_dims(column, 0), mask=mask, other=0.0)
            pair = gl.load(schedule.order + start + ROWS + row, mask=row + ROWS < count, other=0)
            to = gather.sorted_x + gl.expand_dims((start + row).to(gl.int64) * gather.k, 1) + gl.expand_dims(column, 0)
            gl.store(to, values, mask=mask)
        if count > 0:
            counts = schedule.counters + 3 + pm * (chunks + 1)  # `_ready_counts`
            one = _proxy_fence(count - count + 1)
            thread_barrier()
            gl.atomic_add(counts + chunk, one, sem="release")
            gl.atomic_add(counts + chunks, one, sem="release")
        number = gl.atomic_add(schedule.counters + 2, 1, sem="relaxed")


# The kernel. `expert_stride` is the distance of matrices in lines of 128 bytes, `shape` a Shape without M.


@gluon.jit
def _gathered_tile(number, schedule, chunks, shape, S: gl.constexpr):
    """Return the `Tile` with this number, where its counts of ready parts are, and whether all of its rows are gathered."""
    tile, pm = tile_at(number, schedule, shape, 2 * S.rows)
    counts = _ready_counts(pm, chunks)
    ready = _wait_until(schedule.counters + counts + chunks, 0) == gl.cdiv(tile.rows, NARROWEST) * chunks
    return tile, counts, ready.to(gl.int32)


@gluon.jit
def _produce(operands, expert_stride, schedule, chunks, published, ring, experts, shape, S: gl.constexpr):
    """The producer warp: take tiles, publish them, and load their stages."""
    step = 0
    tile, counts, ready = _gathered_tile(gl.program_id(0), schedule, chunks, shape, S)
    publish_tile(published, ring.full, ring.empty, tile, 0, 1)
    while tile.rows > 0:
        matrix = gl.minimum(tile.expert, experts - 1)
        offset = WeightOffset(matrix * expert_stride, matrix)
        step, tile, counts, ready = with_width_of(
            _load_tile, (operands, ring, tile, counts, ready, offset, schedule, chunks, step, shape), tile.rows, S
        )  # fmt: skip
        publish_tile(published, ring.full, ring.empty, tile, step % S.stages, ((step // S.stages) & 1) ^ 1)


@gluon.jit
def _load_tile(operands, ring, tile, counts, ready, offset, schedule, chunks, step, shape, S: gl.constexpr):
    """Load a tile. Returns the step after it and the next tile, which is taken halfway, when the stages are full."""
    STAGES_PER_CHUNK: gl.constexpr = CHUNK // S.stage_k
    BOXES: gl.constexpr = S.block_m // NARROWEST
    steps = shape.k_slabs * S.stages_per_slab
    following, following_counts, following_ready = tile, counts, ready
    for r in range(steps):
        if (r % STAGES_PER_CHUNK == 0) & (ready == 0):
            _wait_until(schedule.counters + counts + r // STAGES_PER_CHUNK, gl.cdiv(tile.rows, NARROWEST))
        load_stage(operands, ring, XBoxes(tile.start, BOXES), offset, tile.pn, r, step + r, shape, S)
        if r == steps // 2:
            following, following_counts, following_ready = _gathered_tile(next_tile(schedule), schedule, chunks, shape, S)
    return step + steps, following, following_counts, following_ready


@gluon.jit
def _consume(published, ring, scale, expert_stride, schedule, out, bias, experts, shape, HALF: gl.constexpr, S: gl.constexpr):
    """A consumer warpgroup: multiply its half of the published tiles, and write y."""
    step = 0
    tile = receive_tile(published, ring.full, 0, 0)
    while tile.rows > 0:
        matrix = gl.minimum(tile.expert, experts - 1)
        expert_bias = None
        if bias is not None:
            expert_bias = bias + matrix.to(gl.int64) * shape.n
        outputs = Outputs(out, None, expert_bias, None, 0.0, 0.0)
        expert_scale = scale + matrix.to(gl.int64) * expert_stride * (1024 // scale.dtype.element_ty.primitive_bitwidth)
        order, valid = schedule.order + tile.start, tile.expert < experts
        # The tuple is not assigned to a variable, which would not keep HALF a constexpr.
        step = with_width_of(
            _multiply_tile, (ring, expert_scale, outputs, order, tile.rows, valid, tile.pn, step, shape, HALF), tile.rows, S
        )  # fmt: skip
        tile = receive_tile(published, ring.full, step % S.stages, (step // S.stages) & 1)


@gluon.jit
def _multiply_tile(ring, scale, outputs, order, rows, valid, pn, step, shape, HALF: gl.constexpr, S: gl.constexpr):
    """Multiply a warpgroup's half of a tile, and write it, NaN unless `valid`. Returns the step after it."""
    DTYPE: gl.constexpr = outputs.y.dtype.element_ty
    first_n = (pn * 2 + HALF) * S.rows
    QUARTERS_OF_ALL: gl.constexpr = len(S.sum_widths) * QUARTERS
    EARLY: gl.constexpr = 1 if FEWER_REGISTERS and S.block_m > 128 else QUARTERS_OF_ALL
    row_ids = ()  # loaded before the products, like scales, or before the quarter before is written
    for i in gl.static_range(EARLY):
        row_ids += (_row_ids(order, rows, i, S),)  # type: ignore[assignment]
    high = high_bytes(DTYPE)
    acc, step = multiply_slabs(ring, 0, scale, first_n, shape.k_slabs, step, high, shape, HALF, DTYPE, S)
    quarters = ()
    for i in gl.static_range(len(S.sum_widths)):
        quarters += quarters_of(acc[i])
    for i in gl.static_range(QUARTERS_OF_ALL):
        if i + EARLY < QUARTERS_OF_ALL:
            row_ids += (_row_ids(order, rows, i + EARLY, S),)  # type: ignore[assignment]
        y = gl.where(valid, quarters[i], float("nan"))
        write_rows(y, outputs, first_n, 0, row_ids[i], shape, S)
    return step


@gluon.jit
def _row_ids(order, rows, QUARTER: gl.constexpr, S: gl.constexpr):
    """Return the rows of y of a quarter of a tensor of sums, -1 for none."""
    SUMS: gl.constexpr = QUARTER // QUARTERS
    WIDTH: gl.constexpr = S.sum_widths[SUMS] // QUARTERS
    at = S.sum_starts[SUMS] + QUARTER % QUARTERS * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
    return gl.load(order + at, mask=at < rows, other=-1)


@gluon.jit(do_not_specialize=["experts"])
def _grouped(xd, wd, sd, zd, scale, expert_stride, schedule, gather, out, bias, experts, shape, S: gl.constexpr):
    gdc_launch_dependents()
    operands = Operands(xd, wd, sd, zd)
    ring = allocate_ring(operands, S)
    published = gl.allocate_shared_memory(gl.int32, [S.stages * 4, 1], PUBLISHED)
    chunks = gl.cdiv(gather.k, CHUNK)
    gdc_wait()
    gl.warp_specialize(
        [
            (_consume, (published, ring, scale, expert_stride, schedule, out, bias, experts, shape, 0, S)),
            (_consume, (published, ring, scale, expert_stride, schedule, out, bias, experts, shape, 1, S)),
            (_produce, (operands, expert_stride, schedule, chunks, published, ring, experts, shape, S)),
            (_gather_rows, (schedule, gather, chunks, S)),
        ],
        [4, 1, 2],
        [200, 104, 104] if S.block_m <= 128 else [216, 72, 72] if FEWER_REGISTERS else [224, 56, 56],
    )
