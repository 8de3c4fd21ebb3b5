"""Grouped linear layers of experts: y[p] = x[p // top_k] · W[id[p]]ᵀ + bias[id[p]] for all pairs p of a token and an expert, in one launch.

Weight: E matrices [N, K] in `layouts/gpu_tiles.py`, one after the other (`layouts/experts.py`). x is [P / top_k, K]: `top_k` consecutive
pairs read the same row. Tiles, configs and arithmetic are those of `linear/skinny.py`; rows of the same expert are multiplied together. The
number of rows per expert stays on the device, so that the host never synchronizes:

    sorted    a small kernel sorts the pairs by expert and writes a `TileSchedule`, whose unused entries are marked as empty
    direct    with few pairs per expert each pair is a tile of its own, without sorting

An id outside of [0, E) gives a row of NaN. Fastest where `skinny` is: where the time is spent on reading weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import grouped_ordering
from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.linear import skinny, skinny_config, skinny_tile
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu

MOST_COLUMNS = 64
_COUNT_CHUNK = 1024  # ids that `_sort` counts at a time where nothing was counted before
_SORT_BLOCK = 128  # ids that are sorted at a time
_MOST_PROGRAMS = 128  # of `_sort`
# Thread blocks of _LARGE_BANDS per multiprocessor from which large tiles are faster, if they have more than 8 columns: from times of six
# shapes of experts in q4_0 and q8_0 on an H200.
_ENOUGH_BLOCKS, _LARGE_BANDS = 1.5, 8
_DIRECT = 3  # experts for each pair from which pairs are not sorted: few have an expert in common
_MANY_ROWS = 64  # pairs for each expert from which products are half of the work, and wide tiles are faster


class TileSchedule(NamedTuple):
    """Tiles of rows that have the same expert, as int32 in the device's scratch buffer. Kernels index it by the number of a tile.

    Attributes:
        order: [P or more] The pairs, sorted by expert; pairs whose id is not an expert's come last, as those of expert E. -1: padding.
        expert: [tiles] Its expert; -1 for unused entries.
        start: [tiles] Its first row in `order`.
        rows: [tiles] Its number of rows.
        expert_ends: [E + 1] The end of each expert's rows in `order`.
        counters: [3 + counters_per_tile * tiles] The number of tiles in use, and zeroed counters for the kernel that reads the schedule.
    """

    order: Value
    expert: Value
    start: Value
    rows: Value
    expert_ends: Value
    counters: Value


@dataclass(frozen=True)
class Config:
    """The config of a tile, and whether pairs are sorted by expert first."""

    tile: skinny_config.Config
    sort: bool


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "grouped_linear":
        return f"it multiplies experts, not {problem.op}"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    pairs, experts = problem.m, problem.experts
    active = min(pairs, experts)
    if _DIRECT * pairs <= experts:
        return tuple(Config(tile, False) for tile in _tile_configs(problem, gpu, 1, pairs))
    # A weight is read once per tile: with tiles 1.5 times as wide as the mean number of rows, most experts have one. Rules and limits come
    # from measurements on an H100.
    columns = max(2, triton.next_power_of_2(-(-3 * pairs // (2 * experts))))
    columns = min(columns, 32 if pairs < _MANY_ROWS * experts else MOST_COLUMNS)
    candidates = []
    for size in (columns, 2 * columns, columns // 2):
        if 1 <= size <= MOST_COLUMNS:
            candidates += [Config(tile, True) for tile in _tile_configs(problem, gpu, size, active * -(-pairs // (active * size)))]
    return tuple(candidates)


def _tile_configs(problem: Problem, gpu: Gpu, columns: int, tiles: int) -> list[skinny_config.Config]:
    """Return the configs of `skinny` for `columns` rows and a weight that has the rows of the weights of all `tiles`."""
    linear = replace(problem, op="linear", compute="float", m=columns, n=problem.n * tiles, experts=1)
    candidates = list(dict.fromkeys(replace(config, split=1) for config in skinny_config.configs(linear, gpu)))
    if columns <= 8 or -(-problem.n // (_LARGE_BANDS * skinny_config.BAND)) * tiles < _ENOUGH_BLOCKS * gpu.sms:
        return candidates
    # Large tiles first; with 8 bits those with few K slabs a step.
    return sorted(candidates, key=lambda config: (-config.bands, config.records if problem.format.bits == 8 else 0))


def gated(problem: Problem, config: Config) -> Config | None:
    """Return `config` as a gated epilogue needs it; None where the shape does not allow it."""
    tile = skinny.gated(replace(problem, op="linear", compute="float", experts=1), config.tile)
    return None if tile is None else replace(config, tile=tile)


def launch(
    problem: Problem, config: Config, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor, bias: Tensor | None, gates: str = ""
) -> None:
    """Launch the grouped product.

    Args:
        problem: Its `m` is the number of pairs P.
        config: One of `configs`; with `gates` one that `gated` returned.
        x: [P / top_k, K], unit stride along K.
        weight: uint8 [E * bytes of a matrix].
        ids: [P] int32 or int64.
        out: [P, N], or [P, N / 2] with `gates`.
        bias: [E, N]; None with `gates`.
        gates: A gate function of `layer_kinds.py`.
    """
    pairs, experts, n, k = problem.m, problem.experts, problem.n, problem.k
    geo = gpu_tiles.geometry(problem.format, (n, k))
    codes, scale, zero = gpu_tiles.views(weight, geo)  # of the first expert
    expert_strides = tuple(geo.nbytes // (t.element_size() if t is not None else 1) for t in (codes, scale, zero))
    columns = config.tile.columns
    static, part_slabs = skinny_config.compiled_for(replace(problem, op="linear", compute="float"), config.tile, clamps=False)
    static = replace(static, gates=gates)
    schedule = tile_schedule(ids, experts, columns) if config.sort else None
    tiles = pairs if schedule is None else len(schedule.expert)
    launcher.run(
        _grouped,
        (tiles * -(-n // static.outputs),),
        x,
        (codes, scale, zero),
        ids,
        schedule,
        out,
        bias,
        pairs,
        experts,
        tiles,
        pairs // max(1, x.shape[0]),
        expert_strides,
        n,
        k,
        x.stride(0),
        part_slabs,
        static,
        num_warps=config.tile.warps,
        early=config.tile.pdl,
    )


def tile_schedule(
    ids: Tensor,
    experts: int,
    columns: int,
    min_columns: int | None = None,
    align: int = 1,
    counters_per_tile: int = 0,
    balanced: bool = False,
) -> TileSchedule:
    """Sort pairs by expert on the device, and cut each expert's rows into tiles of at most `columns`.

    Args:
        ids: [P] The expert of each pair.
        experts: E.
        columns: Rows of a tile.
        min_columns: An expert's last tile is halved until it is just wide enough, down to this width, and narrow tiles come last. None:
            all tiles have the same width and are in the order of experts.
        align: Each expert's rows begin at a multiple of it.
        counters_per_tile: Zeroed counters behind the first three.
        balanced: An expert's tiles differ by `min_columns` at most, instead of all being full but for the last.
    """
    pairs = ids.numel()
    groups = min(pairs, experts + 1)  # experts that may have rows
    tiles = (pairs + groups * (columns - 1)) // columns
    blocks = -(-pairs // _SORT_BLOCK)
    blocks_per_program = -(-blocks // _MOST_PROGRAMS)
    programs = -(-blocks // blocks_per_program)
    bins = max(32, triton.next_power_of_2(experts + 1))
    two_passes = pairs > 2 * _COUNT_CHUNK
    offsets = [0]  # of the arrays, at multiples of 16 bytes, for which the kernels are compiled
    length = pairs + (align - 1) * (experts + 1)
    lengths = (length, tiles, tiles, tiles, experts + 1, 3 + counters_per_tile * tiles, programs * bins if two_passes else 1)
    for size in lengths:
        offsets.append(offsets[-1] + round_up(size, 4))
    memory = workspace(ids.device, 4 * offsets[-1]).view(torch.int32)
    *arrays, counts = (memory[offset : offset + size] for offset, size in zip(offsets, lengths, strict=False))
    schedule = TileSchedule(*arrays)
    if two_passes:
        launcher.run(_count, (programs,), ids, counts, pairs, experts, blocks_per_program, BINS=bins, BLOCK=_SORT_BLOCK, num_warps=4)
    launcher.run(
        _sort,
        (programs,),
        ids,
        schedule,
        counts if two_passes else None,
        pairs,
        experts,
        tiles,
        blocks_per_program,
        length,
        2 + counters_per_tile * tiles,
        BINS=bins,
        CHUNK=min(_COUNT_CHUNK, max(128, triton.next_power_of_2(pairs))),
        BLOCK=_SORT_BLOCK,
        COLUMNS=columns,
        MIN_COLUMNS=min_columns or columns,
        BALANCED=balanced,
        ALIGN=align,
        num_warps=4,
    )
    return schedule


@triton.jit(do_not_specialize=["pairs", "experts", "blocks_per_program"])
def _count(ids, counts, pairs, experts, blocks_per_program, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[program, expert] = how many of the program's pairs the expert has."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BINS,), tl.int32)
    for block in range(blocks_per_program):
        pair = (tl.program_id(0) * blocks_per_program + block) * BLOCK + lane
        total += tl.histogram(_expert_of(ids, pair, pairs, experts), BINS, mask=pair < pairs)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), total)


@triton.jit(do_not_specialize=["pairs", "experts", "tiles", "blocks_per_program", "length", "counters"])
def _sort(
    ids, schedule, counts, pairs, experts, tiles, blocks_per_program, length, counters,
    BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, MIN_COLUMNS: tl.constexpr, BALANCED: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the program's pairs to their places in `schedule.order`, and a share of the tiles."""
    ROWS: tl.constexpr = max(1, min(32, 8192 // BINS))  # tiles, or rows of `counts`, at a time
    p = tl.program_id(0)
    start = p * blocks_per_program * BLOCK
    bins = tl.arange(0, BINS)
    rows = tl.arange(0, ROWS)
    # Pairs of each expert: all, and those of the programs before this one.
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    if counts is None:
        for chunk in range(0, pairs, CHUNK):
            pair = chunk + tl.arange(0, CHUNK)
            e = _expert_of(ids, pair, pairs, experts)
            total += tl.histogram(e, BINS, mask=pair < pairs)
            before += tl.histogram(e, BINS, mask=pair < tl.minimum(start, pairs))
    else:
        for chunk in range(0, tl.num_programs(0), ROWS):
            program = (chunk + rows)[:, None]
            some = tl.load(counts + program * BINS + bins[None, :], mask=program < tl.num_programs(0), other=0)
            total += tl.sum(some, 0)
            before += tl.sum(tl.where(program < p, some, 0), 0)
    aligned = (total + (ALIGN - 1)) // ALIGN * ALIGN
    expert_start = tl.cumsum(aligned, 0) - aligned
    target = expert_start + before
    lane = tl.arange(0, BLOCK)
    for block in range(blocks_per_program):
        first = start + block * BLOCK
        e = _expert_of(ids, first + lane, pairs, experts)
        same_before = (e[:, None] == _expert_of(ids, first + lane, pairs, experts)[None, :]) & (lane[None, :] < lane[:, None])
        inside = first + lane < pairs
        tl.store(schedule.order + tl.gather(target, e, 0) + tl.sum(same_before.to(tl.int32), 1), first + lane, mask=inside)
        target += tl.histogram(e, BINS, mask=inside)
    used = _write_tiles(schedule, total, expert_start, 0, tiles, BINS, ROWS, COLUMNS, COLUMNS, MIN_COLUMNS, BALANCED)
    for tile in range(p * ROWS, tiles, tl.num_programs(0) * ROWS):
        unused = tile + rows
        tl.store(schedule.expert + unused, tl.zeros_like(unused) - 1, mask=(unused >= used) & (unused < tiles))
    for zero in range(p * BLOCK, counters, tl.num_programs(0) * BLOCK):
        tl.store(schedule.counters + 1 + zero + lane, tl.zeros_like(lane), mask=zero + lane < counters)
    if p == 0:
        for gap in tl.static_range(ALIGN - 1):  # padding between experts, and behind the last one
            tl.store(schedule.order + expert_start + total + gap, tl.zeros_like(bins) - 1, mask=total + gap < aligned)
            padding = tl.sum(aligned, 0) + gap * BINS + bins
            tl.store(schedule.order + padding, tl.zeros_like(bins) - 1, mask=padding < length)
        tl.store(schedule.expert_ends + bins, expert_start + total, mask=bins <= experts)
        tl.store(schedule.counters, used)


@triton.jit
def _write_tiles(
    schedule, total, expert_start, used, tiles,
    BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, MIN_COLUMNS: tl.constexpr, BALANCED: tl.constexpr,
):  # fmt: skip
    """Write tiles of WIDTH rows, then narrower ones, from tile `used` on. Returns the number of tiles in use."""
    NARROWER: tl.constexpr = WIDTH - MIN_COLUMNS if BALANCED else WIDTH // 2
    # For each expert: tiles of this width, and rows in wider ones.
    if BALANCED:
        steps = (total + (MIN_COLUMNS - 1)) // MIN_COLUMNS
        count = tl.maximum((total + (COLUMNS - 1)) // COLUMNS, 1)
        wider = steps % count  # tiles, by one step
        width = steps // count * MIN_COLUMNS  # of the other tiles
        of_width = tl.where(width == WIDTH, count - wider, tl.where(width == NARROWER, wider, 0))
        rows_before = tl.where(width == WIDTH, wider * (WIDTH + MIN_COLUMNS), 0)
    else:
        rest = total % COLUMNS
        of_width = ((rest > (NARROWER if WIDTH > MIN_COLUMNS else 0)) & (rest <= WIDTH)).to(tl.int32)
        rows_before = total - rest
        if WIDTH == COLUMNS:
            of_width += total // COLUMNS
            rows_before = tl.zeros_like(total)
    ends = used + tl.cumsum(of_width, 0)
    end = used + tl.sum(of_width, 0)
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        tile = first + tl.arange(0, ROWS)
        inside = (tile >= used) & (tile < end)
        e = tl.minimum(tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1), BINS - 1)
        row = tl.gather(rows_before, e, 0) + (tile - tl.gather(ends - of_width, e, 0)) * WIDTH
        tl.store(schedule.expert + tile, e, mask=inside)
        tl.store(schedule.start + tile, tl.gather(expert_start, e, 0) + row, mask=inside)
        tl.store(schedule.rows + tile, tl.minimum(tl.gather(total, e, 0) - row, WIDTH), mask=inside)
    if WIDTH > MIN_COLUMNS:
        end = _write_tiles(schedule, total, expert_start, end, tiles, BINS, ROWS, COLUMNS, NARROWER, MIN_COLUMNS, BALANCED)
    return end


@triton.jit
def _expert_of(ids, pair, pairs, experts):
    """Return the expert of each pair as int32, `experts` where the id is not an expert's."""
    e = tl.load(ids + pair, mask=pair < pairs, other=0)
    return tl.where((e >= 0) & (e < experts), e, experts).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "experts", "tiles", "top_k", "part_slabs"])
def _grouped(
    x, weight, ids, schedule, out, bias, pairs, experts, tiles, top_k, expert_strides, N, K, stride, part_slabs, S: tl.constexpr
):  # fmt: skip
    """One tile: rows of an expert by S.outputs rows of its weight. `weight` has the sections of expert 0."""
    COLUMNS: tl.constexpr = S.columns
    OUTPUTS: tl.constexpr = S.outputs
    if S.pdl:
        gdc_launch_dependents()
        gdc_wait()
    pm, pn = grouped_ordering(tl.program_id(0), tiles, tl.cdiv(N, OUTPUTS))
    column = tl.arange(0, S.width) % COLUMNS
    output_column = tl.arange(0, COLUMNS)
    if schedule is None:
        rows = tl.zeros_like(column) + pm
        rm = output_column + pm
        e = _expert_of(ids, pm, pairs, experts)
    else:
        e = tl.load(schedule.expert + pm)
        if e < 0:
            return
        order = schedule.order + tl.load(schedule.start + pm)
        count = tl.load(schedule.rows + pm)
        rows = tl.load(order + tl.minimum(column, count - 1))
        rm = tl.load(order + output_column, mask=output_column < count, other=pairs)
    expert = tl.minimum(e, experts - 1).to(tl.int64)
    if weight[2] is None:
        sections = (weight[0] + expert * expert_strides[0], weight[1] + expert * expert_strides[1], None)
    else:
        sections = (
            weight[0] + expert * expert_strides[0],
            weight[1] + expert * expert_strides[1],
            weight[2] + expert * expert_strides[2],
        )
    added = (None, None)
    if bias is not None:
        added = (bias + expert * N, None)
    total = skinny_tile.tile_sums(x, rows // top_k, sections, N, K, stride, part_slabs, 0, pn, None, None, S)
    total = tl.where(e < experts, total, float("nan"))
    if S.gated:
        HALF: tl.constexpr = S.outputs // 2
        GATES: tl.constexpr = S.gates
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, COLUMNS)), (1, 2, 0)))
        rn = pn * HALF + tl.arange(0, HALF)
        write(with_gates(gate, up, 1.0, GATES), out, added, rn, rm, pairs, N // 2, 0.0, 0.0, False)
    else:
        rn = pn * OUTPUTS + tl.arange(0, OUTPUTS)
        write(total, out, added, rn, rm, pairs, N, 0.0, 0.0, False)
