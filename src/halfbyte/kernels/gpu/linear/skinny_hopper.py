"""y [M, N] = x [M, K] · Wᵀ with few rows M, or few N, on Hopper: TMA, a persistent grid, weights through registers into mma.

Weight: the words or bytes of `layouts/gpu_tiles.py`, with zero points or without. Yᵀ = W · Xᵀ, as `skinny.py` has it.

One warp keeps `stages` stages of both operands and of the scales on their way to shared memory, so that as much is on its way while
weights become floats. Four partitions of four warps take the stages from there: each multiplies one of the tile's panels, 64 rows, and
where a tile has fewer than four, one of the stage's parts of K; those meet in shared memory. Partitions wait for nobody but the stage, so
that one's waits lie under the others' work.

All programs multiply the same number of steps, so that no multiprocessor waits for another (Osama et al., Stream-K, 2023). Where a
cut goes through a tile, sums meet in a workspace, and the last to arrive adds them in a fixed order. Where each tile has as many programs,
its last one waits for the others' sums themselves, which takes less time: words are not 0 once they are there (`_wait_for`). It waits
for programs that began before it, so that these never wait for a multiprocessor that it has.

Of more than 64 rows each 64 are multiplied by programs of their own, where all have room at once. Of more than 4, TMA reads none that are
not there: a tile's second half, and the last tile, begin as early as it takes (`_apart`).

With two partitions and half of the stages, two programs have room on a multiprocessor: one reads while the other begins or ends. Each
takes whole tiles then. It gains where these fill most of the room, and nearly as much in the last round as in the others.

What a partition does with a stage, and its arithmetic: `hopper/skinny_tile.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, reinterpret, thread_barrier
from halfbyte.kernels.gpu.hopper.skinny_tile import LIFT, ROWS, Static, add_record
from halfbyte.kernels.gpu.hopper.stages import as_held, as_summed, barriers, next_stage
from halfbyte.kernels.gpu.hopper.weights import high_bytes
from halfbyte.kernels.gpu.linear import skinny_hopper_config
from halfbyte.kernels.gpu.linear.skinny_hopper_config import Config, beside, compiled_for, programs_of_tile, row_tiles
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import locks, workspace
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles

supports, configs, seconds = skinny_hopper_config.supports, skinny_hopper_config.configs, skinny_hopper_config.seconds


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] (unit stride along K) times the weight whose sections are codes and scale -> out [M, N], contiguous."""
    if x.data_ptr() % 16 or x.stride(0) % 8:  # which TMA can't read
        x = x.clone(memory_format=torch.contiguous_format)
    static = compiled_for(problem, config, clamp=epilogue.clamps, gates=epilogue.gates)
    memory = workspace(out.device, 0 if epilogue.gates else beside(problem, config))
    multiply(problem, config, static, (x, None), (codes, scale, zero), out, epilogue, memory)


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
    tiles, steps, rows_of_tiles = -(-problem.n // static.rows), -(-geo.records // static.depth), row_tiles(problem, config)
    scratch: tuple[Tensor, ...] | None = None
    share, together = divmod(tiles, config.programs), 0
    if not static.gated and (together := programs_of_tile(problem, config)) > 1:
        waited_for = (config.programs - tiles) * static.rows * config.columns * rows_of_tiles
        scratch, share = (locks(out.device, waited_for),), divmod(steps, together)
    elif not static.gated and beside(problem, config):
        sums = memory.view(torch.int32 if static.integers else torch.float32)
        scratch = sums, locks(out.device, tiles * static.panels * rows_of_tiles)
        share = divmod(tiles * steps, config.programs)
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
        (config.programs, rows_of_tiles),
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
        (*share, together),
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
def _share(share, sizes, scratch, S: gl.constexpr):
    """The first tile and step that this program takes, and the number of steps: share[0] tiles, or steps where a tile is several programs',
    and one more for the first share[1] programs: of all, or of the share[2] of a tile."""
    me = gl.program_id(0)
    if scratch is None:
        first, count = _piece(me, share)
        return first, 0, count * sizes[4]
    elif S.others > 0:
        first, count = _piece(me % share[2], share)
        return me // share[2], first, count
    else:
        first, count = _piece(me, share)
        return first // sizes[4], first % sizes[4], count


@gluon.jit
def _piece(i, share):
    """Where the i-th begins, and how much it has."""
    return i * share[0] + gl.minimum(i, share[1]), share[0] + (i < share[1]).to(gl.int32)


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
                async_load(wd, [panel * ROWS, (t * DEPTH + j) * 128], bar, place)
    for i in gl.static_range(2):
        if tails[i] is not None:
            block = 0 if S.whole else t * DEPTH // S.wide * S.groups
            if S.gated:
                for j in gl.static_range(BLOCKS):
                    for h in gl.static_range(2):
                        to = buffers[2 + i].index(stage * BLOCKS + j).slice(h * (S.rows // 2), S.rows // 2, dim=1)
                        async_load(tails[i], [block + j, _panel(pn, h * (PANELS // 2), sizes, S) * ROWS], bar, to)
            else:
                of_blocks = buffers[2 + i]
                to = reinterpret(of_blocks, of_blocks.dtype, [S.stages, S.blocks, S.rows], of_blocks.layout).index(stage)
                async_load(tails[i], [block, pn * S.rows], bar, to)


@gluon.jit
def _load_lines(read, buffer, first, bar, stage, PANEL: gl.constexpr, LINES: gl.constexpr, S: gl.constexpr):
    """Of 128 bytes, so many a record."""
    place = buffer.index(stage).slice(PANEL * LINES * S.depth, LINES * S.depth, dim=0)
    async_load(read, [first * LINES, 0], bar, place)


@gluon.jit
def _load_x(xd, buffers, full, row, t, stage, S: gl.constexpr):
    """The other half."""
    to = reinterpret(buffers[0], xd.dtype, [S.stages] + xd.block_shape, xd.layout).index(stage)  # noqa: RUF005
    async_load(xd, [t * S.pieces, 0, row, 0], full.index(stage), to)


@gluon.jit
def _produce(sent, S: gl.constexpr):
    xd, row, wd, pd, tails, buffers, full, empty, scratch, share, sizes = sent
    STAGES: gl.constexpr = S.stages
    pn, t, steps = _share(share, sizes, scratch, S)
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
    pn, t, steps = _share(share, sizes, scratch, S)
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
    """What to do with the sums of a part of a tile's steps: one of the programs that share the tile adds all up.

    Returns the panel's sums, and whether these are they.
    """
    held = as_held(acc)
    LANES: gl.constexpr = held.type.layout
    AWAY: gl.constexpr = S.rows * S.columns
    if S.others > 0:
        others = share[2] - 1
        me = gl.program_id(0) % share[2]
        place = scratch[0] + pn.to(gl.int64) * (others * AWAY) + PANEL * ROWS * S.columns
    else:
        leader = _owner(pn * sizes[4], share)
        others = _owner((pn + 1) * sizes[4] - 1, share) - leader
        me = gl.program_id(0) - leader
        # A program has two places: one for the end of a tile, one for the beginning of another (the leader's part).
        place = scratch[0] + leader.to(gl.int64) * (2 * AWAY) + PANEL * ROWS * S.columns
    place += gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, LANES)), 0)
    piece = gl.expand_dims(gl.arange(0, S.columns // 8, layout=gl.SliceLayout(1, LANES)), 1) * 512
    if S.others > 0:
        ready = me == others
        if ready:
            held += _wait_for(place, others, held, S)
            acc = gl.convert_layout(as_summed(held, ROWS), acc.type.layout, assert_trivial=True)
        else:
            _leave(place + piece + me * AWAY, held)
    else:
        lock = scratch[1] + pn * S.panels + PANEL
        place += piece
        gl.store(place + gl.where(me == 0, 1, 2 * me) * AWAY, held)
        thread_barrier()  # what this partition wrote comes before its arrival
        ready = gl.atomic_add(lock, 1, sem="acq_rel") == others
        if ready:
            held = gl.load(place + AWAY, cache_modifier=".cg")
            for j in range(1, others + 1):
                held += gl.load(place + 2 * j * AWAY, cache_modifier=".cg")
            acc = gl.convert_layout(as_summed(held, ROWS), acc.type.layout, assert_trivial=True)
            gl.store(lock, 0)
    return acc, ready


@gluon.jit
def _none_is(DTYPE: gl.constexpr):
    """Bits that no sum has: of a NaN that arithmetic does not make, of the least integer."""
    NONE: gl.constexpr = -(2**31) if DTYPE == gl.int32 else -1
    return NONE


@gluon.jit
def _leave(place, sums):
    """Leaves words for `_wait_for`, none of which is 0."""
    bits = sums.to(gl.int32, bitcast=True)
    none = _none_is(sums.dtype)
    gl.store(place, gl.where(bits == none, bits ^ 1, bits) ^ none)


@gluon.jit
def _wait_for(place, others, like, S: gl.constexpr):
    """What the sums add up to that the `others` leave, as `like` has its own; they are read together. 0 is there again afterwards.

    place  [1, 512], where the first of them leaves its sums
    """
    LANES: gl.constexpr = like.type.layout
    NONE: gl.constexpr = _none_is(like.dtype)
    PIECES: gl.constexpr = like.shape[0]
    MOST: gl.constexpr = S.others
    piece = gl.expand_dims(gl.arange(0, MOST * PIECES, layout=gl.SliceLayout(1, LANES)), 1)
    place += piece // PIECES * (S.rows * S.columns) + piece % PIECES * 512
    there = piece // PIECES < others
    bits = gl.load(place, mask=there, other=NONE, volatile=True)
    while gl.max(gl.max((bits == 0).to(gl.int32), 0), 0) > 0:  # of a lane's words first
        bits = gl.load(place, mask=there, other=NONE, volatile=True)
    gl.store(place, gl.zeros_like(bits), mask=there)
    words = (bits ^ NONE).to(like.dtype, bitcast=True).reshape([MOST, PIECES, 512])
    return gl.convert_layout(gl.sum(words, 0), LANES, assert_trivial=True)


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
        tiles = gl.cdiv(N, S.rows)
        if S.others > 0:
            scratch = (scratch[0] + first.to(gl.int64) * ((gl.num_programs(0) - tiles) * S.rows),)
        else:
            places = first.to(gl.int64) * (gl.num_programs(0) * 2 * S.rows)
            scratch = (scratch[0] + places, scratch[1] + gl.program_id(1) * tiles * PANELS)
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
