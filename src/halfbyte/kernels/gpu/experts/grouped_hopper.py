"""y [P, N] as in `grouped.py`, on Hopper with many rows an expert: the tiles of `hopper/tile.py`, one after the other of a list.

Rows of x are put in the order of their experts, so that TMA reads those of one expert as a box; what of the next expert is in the box is
computed and not written. Two warps of each program do that while others multiply: what several tiles begin with, then what follows. An
expert has as few tiles as may be, which are all about as wide, in steps of 64 rows: a narrow one makes as many weights as a wide one. The
list of tiles (expert, first row, how many) is made on the device, as `grouped.py` makes it, the wide ones first. It says how many there
are: the host never waits. A program that has room takes the next one, so that all end at about the same time: the warp that loads finds
out which, and tells the others. Rows of y are written where they belong.

Weight: the words or bytes of `layouts/gpu_tiles.py`, matrices one after the other. Arithmetic: that of `hopper/tile.py`. An id that is no
expert's gives a row of NaN.

It wins from some 16 rows an expert on, where a weight that is made once serves a whole tile.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import in_groups
from halfbyte.kernels.gpu.experts import grouped
from halfbyte.kernels.gpu.hopper.gluon_compat import thread_barrier
from halfbyte.kernels.gpu.hopper.tile import OUT, PIECES, load_stage, pieces_of, ring, sums, tails_read, write_tile
from halfbyte.kernels.gpu.hopper.weights import high_bytes
from halfbyte.kernels.gpu.linear import gemm_hopper
from halfbyte.kernels.gpu.linear.gemm_hopper import Config, compiled_for, most_stages
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

TOLD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of shared memory [4 times the stages, 1] for what `tell` tells
_ROWS = 64  # of the weight, for each of two warpgroups
_LEAST_ROWS = {4: 16, 8: 12}  # of an expert on the average, by bits
NARROWEST = gl.constexpr(64)  # rows of x of a tile
CHUNK = gl.constexpr(256)  # elements of rows of x that are put in order together
# Microseconds of a record of tiles of 64, 128, … rows of x in stages for the widest of them, by bits, and of what else 64 rows take of a
# tile, by the widest: what fits the times of some shapes on an H200.
_RECORD_US = {
    4: {256: (0.67, 0.84, 1.12, 1.36), 128: (0.54, 0.76), 64: (0.54,)},
    8: {256: (0.79, 0.97, 1.23, 1.47), 128: (0.72, 0.94), 64: (0.72,)},
}
_REST_US = {256: 1.25, 128: 0.95, 64: 0.95}


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "grouped_linear":
        return f"it multiplies experts, not {problem.op}"
    if problem.m < (least := _LEAST_ROWS[problem.format.bits]) * problem.experts:
        return f"{problem.m} rows for {problem.experts} experts do not fill its tiles: from {least} an expert on"
    return gemm_hopper.supports(replace(problem, op="linear", compute="float", experts=1), gpu)


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first: the least time of all tiles, experts having some more and fewer rows than the mean."""
    mean, geo = problem.m / problem.experts, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    found = []
    for block_m, record_us in _RECORD_US[problem.format.bits].items():
        tile_us = [geo.records * us + (i + 1) * _REST_US[block_m] for i, us in enumerate(record_us)]
        us = sum(_us(round(mean + i * mean**0.5), tile_us) for i in (-1.5, -0.5, 0.5, 1.5))
        found.append((us, Config(_ROWS, block_m, most_stages(geo, _ROWS, block_m, gpu), gpu.sms)))
    return tuple(config for _, config in sorted(found, key=lambda pair: pair[0]))


def _us(rows: int, tile_us: list[float]) -> float:
    """Microseconds of all tiles of an expert with so many rows, which are as wide as each other but for one step."""
    steps = -(-rows // 64)
    tiles = -(-steps // len(tile_us))
    width, wider = divmod(steps, tiles)
    return (tiles - wider) * tile_us[width - 1] + wider * tile_us[width % len(tile_us)]


def launch(problem: Problem, config: Config, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """As `grouped.launch`."""
    experts, n, k = problem.experts, problem.n, problem.k
    geo = gpu_tiles.geometry(problem.format, (n, k))
    first = gpu_tiles.views(weight[: geo.nbytes], geo)
    scale, zero = _of_all(first.scale, experts, geo.nbytes), None if first.zero is None else _of_all(first.zero, experts, geo.nbytes)
    table = grouped.sorted_by_expert(ids, experts, config.block_m, NARROWEST.value, marks=-(-k // CHUNK.value) + 1, even=True)
    rows = output(torch.empty(problem.m, k, dtype=x.dtype, device=x.device))
    layout, static = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2), compiled_for(problem, config, clamp=False)
    if geo.format.bits == 4:
        codes = TensorDescriptor.from_tensor(weight.view(torch.int16).view(-1, 64), [32, 64], layout)
    else:  # rows of twice their length, as an expert may begin anywhere in one
        shape, strides = [(experts - 1) * geo.nbytes // geo.k_padded + geo.n_padded, 2 * geo.k_padded], [geo.k_padded, 1]
        of_bytes = replace(layout, swizzle_byte_width=static.width, element_bitwidth=8)
        codes = TensorDescriptor(weight.view(torch.int8), shape, strides, [static.block_n, static.width], of_bytes)
    launcher.run(
        _grouped,
        (config.programs,),
        TensorDescriptor.from_tensor(rows, [NARROWEST.value, static.width], layout),
        codes,
        *tails_read(scale, zero, static),
        weight[geo.scale_offset :].view(geo.format.scale),  # of the first expert, and so on
        geo.nbytes // 128,
        table,
        (x, rows, x.stride(0), problem.m // len(x), k),
        out,
        bias,
        experts,
        (0, n, geo.n_padded, geo.records),
        static,
        num_warps=4,
        early=True,
    )


def _of_all(part: Tensor, experts: int, nbytes: int) -> Tensor:
    """A section of the first of matrices of so many bytes -> [experts, block rows, N padded], that section of each."""
    return part.as_strided((experts, *part.shape), (nbytes // part.element_size(), *part.stride()))


@gluon.jit
def as_narrow(work: gl.constexpr, args, count, S: gl.constexpr):
    """work(*args, S) for as narrow a tile as holds `count` rows of x."""
    NARROWER: gl.constexpr = S.narrower
    if S.block_m > NARROWEST:
        if count <= NARROWER.block_m:
            found = as_narrow(work, args, count, NARROWER)
        else:
            found = work(*args, S)
    else:
        found = work(*args, S)
    return found


@gluon.jit
def tile_of(number, table, sizes, WIDTH: gl.constexpr):
    """A tile's expert, its first row among those in the order of experts, how many there are (0: there is no such tile), its place along N
    in WIDTH rows of the weight, and along M."""
    tiles = gl.load(table[5])
    width = gl.cdiv(sizes[1], WIDTH)
    pm, pn = in_groups(gl.minimum(number, tiles * width - 1), tiles, width)
    count = gl.load(table[3] + pm, mask=number < tiles * width, other=0)
    return gl.load(table[1] + pm), gl.load(table[2] + pm), count, pn, pm


@gluon.jit
def untaken(table):
    """The number of a tile that no program has taken. Its own is a program's first."""
    return gl.num_programs(0) + gl.atomic_add(table[5] + 1, 1, sem="relaxed")


@gluon.jit
def tell(told, full, empty, tile, stage, phase):
    """What of a tile those that multiply must know, with its first stage."""
    mbarrier.wait(empty.index(stage), phase)
    for i in gl.static_range(4):
        told.index(stage * 4 + i).store(gl.full([1], tile[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    thread_barrier()
    mbarrier.arrive(full.index(stage), count=1, pred=tile[2] == 0)


@gluon.jit
def learn(told, full, stage, phase):
    """What was told."""
    mbarrier.wait(full.index(stage), phase)
    tile = ()
    for i in gl.static_range(4):
        tile += (gl.sum(told.index(stage * 4 + i).load(gl.BlockedLayout([1], [32], [4], [0])), 0),)  # type: ignore[assignment]
    return tile


# `S` is a hopper_tile.Static; `sizes` is (unused, N, N padded, records of a tile); matrices are `away` rows of words from each other.


@gluon.jit
def _produce(read, away, table, chunks, told, buffers, full, empty, experts, sizes, S: gl.constexpr):
    step = 0
    tile = _tile(gl.program_id(0), table, chunks, sizes, S)
    tell(told, full, empty, tile, 0, 1)
    while tile[2] > 0:
        matrix = gl.minimum(tile[0], experts - 1)
        step, tile = as_narrow(_load, (read, buffers, full, empty, tile, (matrix * away, matrix), table, chunks, step, sizes), tile[2], S)
        tell(told, full, empty, tile, step % S.stages, ((step // S.stages) & 1) ^ 1)


@gluon.jit
def _tile(number, table, chunks, sizes, S: gl.constexpr):
    """`tile_of`, where its marks are, and whether all of its rows are in place."""
    e, first, count, pn, pm = tile_of(number, table, sizes, 2 * S.rows)
    marks = 3 + pm * (chunks + 1)
    there = _passed(table[5] + marks + chunks, 0) == gl.cdiv(count, NARROWEST) * chunks
    return e, first, count, pn, marks, there.to(gl.int32)


@gluon.jit
def _passed(mark, least):
    """What stands there, as soon as it is `least`. TMA then reads what was written before."""
    there = gl.atomic_add(mark, 0, sem="acquire")
    while there < least:
        there = gl.atomic_add(mark, 0, sem="acquire")
    return _fenced(there)


@gluon.jit
def _fenced(value):
    """Between what lanes and what TMA do to global memory."""
    return gl.inline_asm_elementwise("fence.proxy.async.global;", "=r,0", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gather(table, gathering, chunks, S: gl.constexpr):
    """Rows of x to their places in the order of experts, NARROWEST by CHUNK, as long as there are any, in the order in which tiles need
    them. `marks` of a tile count for each chunk of K, and behind that for all, how many of these parts are there."""
    x, rows, stride, share, k = gathering
    ROWS: gl.constexpr = 16
    PARTS: gl.constexpr = S.block_m // NARROWEST
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    tiles = gl.load(table[5])
    own = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LANES))
    number = gl.atomic_add(table[5] + 2, 1, sem="relaxed")
    while number < tiles * chunks * PARTS:
        pm, chunk = in_groups(number // PARTS, tiles, chunks)
        before = number % PARTS * NARROWEST
        count = gl.minimum(gl.load(table[3] + pm) - before, NARROWEST)
        first = gl.load(table[2] + pm) + before
        column = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LANES))
        wanted = gl.load(table[0] + first + own, mask=own < count, other=0)
        for r in range(0, count, ROWS):
            mask = gl.expand_dims(own + r < count, 1) & gl.expand_dims(column < k, 0)
            some = gl.load(x + gl.expand_dims((wanted // share).to(gl.int64) * stride, 1) + gl.expand_dims(column, 0), mask=mask, other=0.0)
            wanted = gl.load(table[0] + first + r + ROWS + own, mask=own + r + ROWS < count, other=0)
            gl.store(rows + gl.expand_dims((first + r + own).to(gl.int64) * k, 1) + gl.expand_dims(column, 0), some, mask=mask)
        if count > 0:
            marks = table[5] + 3 + pm * (chunks + 1)
            one = _fenced(count - count + 1)
            thread_barrier()
            gl.atomic_add(marks + chunk, one, sem="release")
            gl.atomic_add(marks + chunks, one, sem="release")
        number = gl.atomic_add(table[5] + 2, 1, sem="relaxed")


@gluon.jit
def _load(read, buffers, full, empty, tile, matrix, table, chunks, step, sizes, S: gl.constexpr):
    """A tile on its way to shared memory; the step after it, and the next tile. That is looked for halfway, when the stages are full."""
    EACH: gl.constexpr = CHUNK // S.width
    BOXES: gl.constexpr = S.block_m // NARROWEST
    _e, first, count, pn, marks, there = tile
    steps = sizes[3] * S.parts
    following = tile
    for r in range(steps):
        if (r % EACH == 0) & (there == 0):
            _passed(table[5] + marks + r // EACH, gl.cdiv(count, NARROWEST))
        load_stage(read, buffers, full, empty, (first, BOXES), matrix, pn, r, step + r, sizes, S)
        if r == steps // 2:
            following = _tile(untaken(table), table, chunks, sizes, S)
    return step + steps, following


@gluon.jit
def _consume(told, buffers, full, empty, scale, away, table, out, bias, experts, sizes, HALF: gl.constexpr, S: gl.constexpr):
    step = 0
    e, first, count, pn = learn(told, full, 0, 0)
    while count > 0:
        at = gl.minimum(e, experts - 1)
        added = (None, None)
        if bias is not None:
            added = (bias + at.to(gl.int64) * sizes[1], None)
        to = (table[0] + first, count)
        of_expert = scale + at.to(gl.int64) * away * (1024 // scale.dtype.element_ty.primitive_bitwidth)
        step = as_narrow(_multiply, (buffers, full, empty, of_expert, out, added, to, e < experts, pn, step, sizes, HALF), count, S)
        e, first, count, pn = learn(told, full, step % S.stages, (step // S.stages) & 1)


@gluon.jit
def _multiply(buffers, full, empty, scale, out, added, to, known, pn, step, sizes, HALF: gl.constexpr, S: gl.constexpr):
    """A warpgroup's half of it; the step after it."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    first_n = (pn * 2 + HALF) * S.rows
    places = ()  # read at once, as scales are
    for i in gl.static_range(len(S.widths) * PIECES):
        places += (_places(to, i, S),)  # type: ignore[assignment]
    high = high_bytes(DTYPE)
    acc, step = sums(buffers, full, empty, 0, scale, first_n, sizes[3], step, high, sizes, HALF, DTYPE, S)
    pieces = ()
    for i in gl.static_range(len(S.widths)):
        pieces += pieces_of(acc[i], S)
    for i in gl.static_range(len(S.widths) * PIECES):
        y = gl.where(known, pieces[i], float("nan"))
        write_tile(y, out, added, first_n, 0, places[i], sizes, (0.0, 0.0), S)
    return step


@gluon.jit
def _places(to, PIECE: gl.constexpr, S: gl.constexpr):
    """The rows of y of a piece of a tile's columns, -1 for none."""
    SUMS: gl.constexpr = PIECE // PIECES
    WIDTH: gl.constexpr = S.widths[SUMS] // PIECES
    at = S.starts[SUMS] + PIECE % PIECES * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
    return gl.load(to[0] + at, mask=at < to[1], other=-1)


@gluon.jit(do_not_specialize=["experts"])
def _grouped(xd, wd, sd, zd, scale, away, table, gathering, out, bias, experts, sizes, S: gl.constexpr):
    gdc_launch_dependents()
    read = (xd, wd, sd, zd)
    buffers, full, empty = ring(read, S)
    told = gl.allocate_shared_memory(gl.int32, [S.stages * 4, 1], TOLD)
    chunks = gl.cdiv(gathering[4], CHUNK)
    gdc_wait()
    gl.warp_specialize(
        [
            (_consume, (told, buffers, full, empty, scale, away, table, out, bias, experts, sizes, 0, S)),
            (_consume, (told, buffers, full, empty, scale, away, table, out, bias, experts, sizes, 1, S)),
            (_produce, (read, away, table, chunks, told, buffers, full, empty, experts, sizes, S)),
            (_gather, (table, gathering, chunks, S)),
        ],
        [4, 1, 2],
        [224, 56, 56] if S.block_m > 128 else [200, 104, 104],
    )
