"""y [P, N]: y[p] = x[p / share] · W[id[p]]ᵀ + bias[id[p]], the linear layers of experts, for all pairs p of a token and an expert at once.

Weight: E matrices [N, K] in `layouts/gpu_tiles.py`, one after the other (`layouts/experts.py`). x [P / share, K]: `share` pairs that
follow each other have one row. Tiles, configs and arithmetic are those of `skinny.py`; rows of x that meet the same expert are computed
together. Where the ids say that, nobody but the device knows how many rows an expert has, so that the host never waits:

    sorted    a first small launch orders the pairs by expert and cuts each expert's into tiles of `columns`: a table with as many
              entries as there may be at most, those that are left over empty
    direct    with few pairs for the number of experts, each pair is a tile: nothing to sort

An id that is not an expert's gives a row of NaN. It wins as `skinny` does: where reading weights is most of the work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import in_groups
from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.linear import skinny, skinny_config, skinny_tile
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu

MOST_COLUMNS = 64
_CHUNK = 1024  # ids that are counted together
_PART = 128  # and put in order together
_MOST_PROGRAMS = 128


@dataclass(frozen=True)
class Config:
    """How one tile is computed, and whether pairs are sorted first."""

    tile: skinny_config.Config
    sort: bool


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "grouped_linear":
        return f"it multiplies experts, not {problem.op}"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first."""
    pairs, experts = problem.m, problem.experts
    active = min(pairs, experts)
    if 3 * pairs <= experts:
        return tuple(Config(tile, False) for tile in _tiles(problem, gpu, 1, pairs))
    # A weight is read once for each of its tiles: half as many again as the mean leaves most experts with one. That matters less where
    # there are so many rows that products are half of the work. Rules and limits come from measurements on an H100.
    columns = max(2, triton.next_power_of_2(-(-3 * pairs // (2 * experts))))
    columns = min(columns, 32 if pairs < 64 * experts else MOST_COLUMNS)
    found = []
    for size in (columns, 2 * columns, columns // 2):
        if 1 <= size <= MOST_COLUMNS:
            found += [Config(tile, True) for tile in _tiles(problem, gpu, size, active * -(-pairs // (active * size)))]
    return tuple(found)


def _tiles(problem: Problem, gpu: Gpu, columns: int, count: int) -> list[skinny_config.Config]:
    """What `skinny` does with `columns` rows and a weight as high as those of `count` tiles are together."""
    alike = replace(problem, op="linear", compute="float", m=columns, n=problem.n * count, experts=1)
    found = list(dict.fromkeys(replace(config, split=1) for config in skinny.configs(alike, gpu)))
    # Rules from times of an H200, six shapes of experts in q4_0 and q8_0.
    many = -(-problem.n // (8 * skinny_config.BAND)) * count >= 1.5 * gpu.sms
    fewer = problem.format.bits == 8  # records at once
    return sorted(found, key=lambda config: (-config.bands, config.records if fewer else 0)) if columns > 8 and many else found


def gated(problem: Problem, config: Config) -> Config | None:
    """`config` as gates need it; None where the shape is not for them."""
    tile = skinny.gated(replace(problem, op="linear", compute="float", experts=1), config.tile)
    return None if tile is None else replace(config, tile=tile)


def launch(
    problem: Problem, config: Config, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor, bias: Tensor | None, gates: str = ""
) -> None:
    """x [P / share, K] (unit stride along K), weight uint8 [E * bytes of a matrix], ids [P] int32 or int64, bias [E, N] -> out [P, N].

    gates  as in `layer_kinds.py`, without a bias and with a config that `gated` gave: out [P, N / 2]
    """
    pairs, experts, n, k = problem.m, problem.experts, problem.n, problem.k
    geo = gpu_tiles.geometry(problem.format, (n, k))
    codes, scale, zero = gpu_tiles.views(weight, geo)  # of the first expert
    steps = tuple(geo.nbytes // (t.element_size() if t is not None else 1) for t in (codes, scale, zero))
    columns = config.tile.columns
    static, per = skinny_config.compiled_for(replace(problem, op="linear", compute="float"), config.tile, clamps=False)
    static = replace(static, gates=gates)
    table = sorted_by_expert(ids, experts, columns) if config.sort else None
    blocks = pairs if table is None else len(table[1])
    launcher.run(
        _grouped,
        (blocks * -(-n // static.outputs),),
        x,
        (codes, scale, zero),
        ids,
        table,
        out,
        bias,
        pairs,
        experts,
        blocks,
        pairs // max(1, x.shape[0]),
        steps,
        n,
        k,
        x.stride(0),
        per,
        static,
        num_warps=config.tile.warps,
        early=config.tile.pdl,
    )


def sorted_by_expert(
    ids: Tensor, experts: int, columns: int, least: int | None = None, align: int = 1, marks: int = 0, even: bool = False
) -> tuple[Tensor, ...]:
    """int32 in the device's scratch memory: the pairs in the order of their experts, [P] or more; for each tile its expert (-1: none), its
    first of these, and their number; where each expert's end, [E + 1]; how many tiles there are, and zeros: two, and `marks`
    for each that there may be. Pairs of ids that are no expert's come last, as those of one more.

    least   an expert's last tile is half as wide as others, or a quarter, …, where that holds its pairs, but as wide as this; and narrow
            tiles come after wide ones. None: all are alike, in the order of experts
    even    an expert's tiles are about as wide as each other instead, in steps of `least`
    align   each expert's pairs begin at a multiple of it: what is between is -1
    """
    pairs = ids.numel()
    filled = min(pairs, experts + 1)
    blocks = (pairs + filled * (columns - 1)) // columns
    parts = -(-pairs // _PART)
    each = -(-parts // _MOST_PROGRAMS)
    programs = -(-parts // each)
    bins = max(32, triton.next_power_of_2(experts + 1))
    several = pairs > 2 * _CHUNK
    starts = [0]  # of the parts, at multiples of 16 bytes, for which the kernels are compiled
    length = pairs + (align - 1) * (experts + 1)
    lengths = (length, blocks, blocks, blocks, experts + 1, 3 + marks * blocks, programs * bins if several else 1)
    for size in lengths:
        starts.append(starts[-1] + round_up(size, 4))
    memory = workspace(ids.device, 4 * starts[-1]).view(torch.int32)
    table = tuple(memory[start : start + size] for start, size in zip(starts, lengths, strict=False))
    if several:
        launcher.run(_count, (programs,), ids, table[6], pairs, experts, each, BINS=bins, PART=_PART, num_warps=4)
    launcher.run(
        _sort,
        (programs,),
        ids,
        table[:6],
        table[6] if several else None,
        pairs,
        experts,
        blocks,
        each,
        length,
        2 + marks * blocks,
        BINS=bins,
        CHUNK=min(_CHUNK, max(128, triton.next_power_of_2(pairs))),
        PART=_PART,
        COLUMNS=columns,
        LEAST=least or columns,
        EVEN=even,
        ALIGN=align,
        num_warps=4,
    )
    return table[:6]


@triton.jit(do_not_specialize=["pairs", "experts", "each"])
def _count(ids, counts, pairs, experts, each, BINS: tl.constexpr, PART: tl.constexpr):
    """How many of a program's pairs each expert has."""
    i = tl.arange(0, PART)
    total = tl.zeros((BINS,), tl.int32)
    for part in range(each):
        at = (tl.program_id(0) * each + part) * PART + i
        total += tl.histogram(_expert(ids, at, pairs, experts), BINS, mask=at < pairs)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), total)


@triton.jit(do_not_specialize=["pairs", "experts", "blocks", "each", "length", "zeros"])
def _sort(
    ids, table, counted, pairs, experts, blocks, each, length, zeros,
    BINS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, LEAST: tl.constexpr, EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """A program's pairs to their places, and some of the tiles."""
    ROWS: tl.constexpr = max(1, min(32, 8192 // BINS))  # of a table with as many columns as bins
    p = tl.program_id(0)
    start = p * each * PART
    bins = tl.arange(0, BINS)
    rows = tl.arange(0, ROWS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    if counted is None:
        for chunk in range(0, pairs, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            e = _expert(ids, at, pairs, experts)
            total += tl.histogram(e, BINS, mask=at < pairs)
            before += tl.histogram(e, BINS, mask=at < tl.minimum(start, pairs))
    else:
        for chunk in range(0, tl.num_programs(0), ROWS):
            row = (chunk + rows)[:, None]
            some = tl.load(counted + row * BINS + bins[None, :], mask=row < tl.num_programs(0), other=0)
            total += tl.sum(some, 0)
            before += tl.sum(tl.where(row < p, some, 0), 0)
    aligned = (total + (ALIGN - 1)) // ALIGN * ALIGN
    first = tl.cumsum(aligned, 0) - aligned
    to = first + before
    i = tl.arange(0, PART)
    for part in range(each):
        at = start + part * PART
        e = _expert(ids, at + i, pairs, experts)
        alike = (e[:, None] == _expert(ids, at + i, pairs, experts)[None, :]) & (i[None, :] < i[:, None])
        inside = at + i < pairs
        tl.store(table[0] + tl.gather(to, e, 0) + tl.sum(alike.to(tl.int32), 1), at + i, mask=inside)
        to += tl.histogram(e, BINS, mask=inside)
    used = _list(table, total, first, 0, blocks, BINS, ROWS, COLUMNS, COLUMNS, LEAST, EVEN)
    for tile in range(p * ROWS, blocks, tl.num_programs(0) * ROWS):
        at = tile + rows
        tl.store(table[1] + at, tl.zeros_like(at) - 1, mask=(at >= used) & (at < blocks))
    for zero in range(p * PART, zeros, tl.num_programs(0) * PART):
        tl.store(table[5] + 1 + zero + i, tl.zeros_like(i), mask=zero + i < zeros)
    if p == 0:
        for gap in tl.static_range(ALIGN - 1):
            tl.store(table[0] + first + total + gap, tl.zeros_like(bins) - 1, mask=total + gap < aligned)
            behind = tl.sum(aligned, 0) + gap * BINS + bins
            tl.store(table[0] + behind, tl.zeros_like(bins) - 1, mask=behind < length)
        tl.store(table[4] + bins, first + total, mask=bins <= experts)
        tl.store(table[5], used)


@triton.jit
def _list(
    table, total, first, used, blocks,
    BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, LEAST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Tiles of WIDTH pairs and narrower ones, from tile `used` on; the tile after them."""
    NARROWER: tl.constexpr = WIDTH - LEAST if EVEN else WIDTH // 2
    if EVEN:
        steps = (total + (LEAST - 1)) // LEAST
        count = tl.maximum((total + (COLUMNS - 1)) // COLUMNS, 1)
        wider = steps % count  # tiles, by one step
        width = steps // count * LEAST  # of the others
        tiles = tl.where(width == WIDTH, count - wider, tl.where(width == NARROWER, wider, 0))
        before = tl.where(width == WIDTH, wider * (WIDTH + LEAST), 0)
    else:
        rest = total % COLUMNS
        tiles = ((rest > (NARROWER if WIDTH > LEAST else 0)) & (rest <= WIDTH)).to(tl.int32)
        before = total - rest
        if WIDTH == COLUMNS:
            tiles += total // COLUMNS
            before = tl.zeros_like(total)
    ends = used + tl.cumsum(tiles, 0)
    after = used + tl.sum(tiles, 0)
    for tile in range(tl.program_id(0) * ROWS, after, tl.num_programs(0) * ROWS):
        at = tile + tl.arange(0, ROWS)
        inside = (at >= used) & (at < after)
        e = tl.minimum(tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1), BINS - 1)
        done = tl.gather(before, e, 0) + (at - tl.gather(ends - tiles, e, 0)) * WIDTH
        tl.store(table[1] + at, e, mask=inside)
        tl.store(table[2] + at, tl.gather(first, e, 0) + done, mask=inside)
        tl.store(table[3] + at, tl.minimum(tl.gather(total, e, 0) - done, WIDTH), mask=inside)
    if WIDTH > LEAST:
        after = _list(table, total, first, after, blocks, BINS, ROWS, COLUMNS, NARROWER, LEAST, EVEN)
    return after


@triton.jit
def _expert(ids, at, pairs, experts):
    """int32: the expert of each pair, `experts` where it is none."""
    e = tl.load(ids + at, mask=at < pairs, other=0)
    return tl.where((e >= 0) & (e < experts), e, experts).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "experts", "blocks", "share", "per"])
def _grouped(x, weight, ids, table, out, bias, pairs, experts, blocks, share, steps, N, K, stride, per, S: tl.constexpr):
    COLUMNS: tl.constexpr = S.columns
    OUTPUTS: tl.constexpr = S.outputs
    if S.pdl:
        gdc_launch_dependents()
        gdc_wait()
    pm, pn = in_groups(tl.program_id(0), blocks, tl.cdiv(N, OUTPUTS))
    column = tl.arange(0, S.width) % COLUMNS
    own = tl.arange(0, COLUMNS)
    if table is None:
        rows = tl.zeros_like(column) + pm
        rm = own + pm
        e = _expert(ids, pm, pairs, experts)
    else:
        e = tl.load(table[1] + pm)
        if e < 0:
            return
        order = table[0] + tl.load(table[2] + pm)
        count = tl.load(table[3] + pm)
        rows = tl.load(order + tl.minimum(column, count - 1))
        rm = tl.load(order + own, mask=own < count, other=pairs)
    at = tl.minimum(e, experts - 1).to(tl.int64)
    if weight[2] is None:
        mine = (weight[0] + at * steps[0], weight[1] + at * steps[1], None)
    else:
        mine = (weight[0] + at * steps[0], weight[1] + at * steps[1], weight[2] + at * steps[2])
    added = (None, None)
    if bias is not None:
        added = (bias + at * N, None)
    total = skinny_tile.sums(x, rows // share, mine, N, K, stride, per, 0, pn, None, None, S)
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
