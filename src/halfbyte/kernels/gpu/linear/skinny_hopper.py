"""y [M, N] = x [M, K] · Wᵀ with few rows M, or few N, on Hopper: TMA, a persistent grid, weights through registers into mma.

Weight: the words or bytes of `layouts/gpu_tiles.py`, with zero points or without. Computes Yᵀ = W · Xᵀ, like `skinny.py`.

One producer warp loads `stages` stages of both operands and of the scales, so that loads are in flight while weights are dequantized. Four
partitions of four warps consume the stages: each multiplies one of the tile's panels of 64 rows and, where a tile has fewer than four, one
of the stage's parts of K, which are summed through shared memory. Partitions synchronize only on the stage's barriers, so that one's waits
are covered by the others' work.

All programs multiply the same number of steps (Osama et al., Stream-K, 2023). Where a cut goes through a tile, partial sums go through a
workspace, and the last program to arrive adds them up in a fixed order. Where each tile has as many programs, its last program polls for
the others' sums instead, which takes less time: they are written non-zero, so that a non-zero word has arrived (`hopper/reduction.py`). It
waits for programs with lower numbers only, which therefore never wait for its multiprocessor.

With more than 64 rows each 64 are multiplied by programs of their own, if all fit at once. With more than 4 the TMA boxes are moved instead
of clipped: a tile's second half, and the last tile, begin early enough that no row is out of bounds (`_half_stride`).

With two partitions and half of the stages, two programs fit on a multiprocessor: one loads while the other begins or ends. Each has whole
tiles then. It gains where these fill most of the GPU, and nearly as much in the last wave as in the others.

What a partition does with a stage, and its arithmetic: `hopper/skinny_tile.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.hopper.epilogue import Outputs, store_masked
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, reinterpret, thread_barrier
from halfbyte.kernels.gpu.hopper.reduction import pack_sums, poll_sums, send_sums, unpack_sums
from halfbyte.kernels.gpu.hopper.ring import barriers, descriptor, next_stage
from halfbyte.kernels.gpu.hopper.skinny_tile import ROWS, SUBNORMAL_SCALE, Operands, Ring, Static, add_slab
from halfbyte.kernels.gpu.hopper.weights import high_bytes
from halfbyte.kernels.gpu.linear import skinny_hopper_config
from halfbyte.kernels.gpu.linear.skinny_hopper_config import Config, compiled_for, programs_of_tile, row_tiles, workspace_bytes
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import locks, workspace
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles

supports, configs, seconds = skinny_hopper_config.supports, skinny_hopper_config.configs, skinny_hopper_config.seconds


class Rows(NamedTuple):
    """Rows of x of a tile.

    Attributes:
        count: Rows of x from the tile's first one on.
        half_stride: Rows between the tile's halves (`_half_stride`).
        skipped: How many of the first rows another tile writes.
    """

    count: Value
    half_stride: Value
    skipped: Value


class Shape(NamedTuple):
    """Sizes of the product: `Rows`, N, N padded, K slabs of a row, and steps (stages) of a tile."""

    rows: Value
    n: Value
    n_padded: Value
    k_slabs: Value
    steps: Value


class Share(NamedTuple):
    """Shares of the programs: `base` tiles, or steps if programs share tiles, and one more for the first `longer` programs: of all, or of
    the `programs_of_tile` programs that each tile has."""

    base: Value
    longer: Value
    programs_of_tile: Value


def launch(problem: Problem, config: Config, x: Tensor, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the product of x [M, K] (unit stride along K) and the weight's sections; out is [M, N], contiguous."""
    if x.data_ptr() % 16 or x.stride(0) % 8:  # TMA needs this alignment
        x = x.clone(memory_format=torch.contiguous_format)
    static = compiled_for(problem, config, clamp=epilogue.clamps, gates=epilogue.gates)
    memory = workspace(out.device, 0 if epilogue.gates else workspace_bytes(problem, config))
    multiply(problem, config, static, (x, None), weight, out, epilogue, memory)


def multiply(
    problem: Problem,
    config: Config,
    static: Static,
    x: tuple[Tensor, Tensor | None],
    weight: gpu_tiles.Views,
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor,
) -> None:
    """Launch the product with `workspace_bytes(problem, config)` of memory; x is rows, and of integers their scales."""
    (rows, row_scale), (codes, scale, zero) = x, weight
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    tiles, steps, rows_of_tiles = -(-problem.n // static.rows), -(-geo.records // static.stage_slabs), row_tiles(problem, config)
    scratch: tuple[Tensor, ...] | None = None
    share, sharing = divmod(tiles, config.programs), 0
    if not static.gated and (sharing := programs_of_tile(problem, config)) > 1:
        polled = (config.programs - tiles) * static.rows * config.columns * rows_of_tiles
        scratch, share = (locks(out.device, polled),), divmod(steps, sharing)
    elif not static.gated and workspace_bytes(problem, config):
        sums = memory.view(torch.int32 if static.integers else torch.float32)
        scratch = sums, locks(out.device, tiles * static.panels * rows_of_tiles)
        share = divmod(tiles * steps, config.programs)
    metadata = None
    if static.sparse:
        quads, pairs = codes.view(-1, 32).split([geo.panels * geo.records * 4 * geo.format.bits, geo.panels * geo.records * 8])
        lines = descriptor(quads, [4 * geo.format.bits * static.stage_slabs, 32])
        metadata = descriptor(pairs, [8 * static.stage_slabs, 32])
    elif static.bits == 4:
        lines = descriptor(codes.view(-1, 64), [32 * static.stage_slabs, 64])
    else:
        lines = descriptor(codes, [64, 128])
    launcher.run(
        _skinny,
        (config.programs, rows_of_tiles),
        _x_descriptor(rows, static),
        _half_stride(problem.m, static.columns // 2),
        lines,
        metadata,
        None if static.one_block else _scale_descriptor(scale, static),
        None if zero is None else _scale_descriptor(zero, static),
        (scale, row_scale),
        out,
        (epilogue.bias, epilogue.residual),
        scratch,
        (*share, sharing),
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


def _x_descriptor(x: Tensor, static: Static) -> TensorDescriptor:
    """Return a TMA descriptor of rows in pieces of 128 bytes, those of a stage at once: half of a tile's rows, and the others
    `_half_stride` rows later."""
    piece, half = 128 // x.element_size(), static.columns // 2
    if x.shape[1] % piece:
        x = functional.pad(x, (0, -x.shape[1] % piece))
    (m, k), stride, half_stride = x.shape, x.stride(0), _half_stride(len(x), half)
    shape = [k // piece, 2, m - half_stride, piece] if m > half else [k // piece, 1, m, piece]
    return descriptor(x, [static.x_pieces, 2, half, piece], shape=shape, strides=[piece, half_stride * stride, stride, 1])


def _half_stride(m: int, half: int) -> int:
    """Return the rows between the halves of a tile of x. Where M does not fill it, both have some of the rows: TMA takes longer to
    zero-fill rows that are out of bounds than to read others."""
    return min(half, m - half) if m > half else half


def _scale_descriptor(of_blocks: Tensor, static: Static) -> TensorDescriptor:
    """Return a TMA descriptor of scales or zero points, those of a stage at once."""
    return descriptor(of_blocks, [1, static.rows // 2] if static.gated else [static.stage_blocks, static.rows], flat=True)


# The kernel. `S` is a Static, `operands` Operands, `ring` a Ring, `shape` a Shape, `share` a Share.


@gluon.jit
def _first_step(share, shape, scratch, S: gl.constexpr):
    """Return this program's first tile, its first step there, and the number of its steps."""
    program = gl.program_id(0)
    if scratch is None:
        first, count = _share_of(program, share)
        return first, 0, count * shape.steps
    elif S.polled > 0:
        first, count = _share_of(program % share.programs_of_tile, share)
        return program // share.programs_of_tile, first, count
    else:
        first, count = _share_of(program, share)
        return first // shape.steps, first % shape.steps, count


@gluon.jit
def _share_of(i, share):
    """Return where the i-th share begins, and its size."""
    return i * share.base + gl.minimum(i, share.longer), share.base + (i < share.longer).to(gl.int32)


@gluon.jit
def _program_of(step, share):
    """Return the program whose share has a step."""
    larger = share.longer * (share.base + 1)
    return gl.where(step < larger, step // (share.base + 1), share.longer + (step - larger) // share.base)


@gluon.jit
def _next_step(pn, t, shape):
    """Return tile and step after step t of tile pn."""
    last = t + 1 == shape.steps
    return gl.where(last, pn + 1, pn), gl.where(last, 0, t + 1)


@gluon.jit
def _panel(pn, p, shape, S: gl.constexpr):
    """Return the weight's panel that is the p-th of tile pn; with gates the second half of a tile is from the up projection."""
    HALF: gl.constexpr = S.panels // 2
    if S.gated:
        return pn * HALF + p % HALF + p // HALF * (shape.n // (2 * ROWS))
    else:
        return pn * S.panels + p


@gluon.jit
def _load_weight(operands, ring, pn, t, stage, shape, S: gl.constexpr):
    """Load the weight of a stage, its scales and zero points, and expect the bytes of the whole stage. Beyond the last K slab of a row it
    loads the next row's, or nothing: x is zero there."""
    PANELS: gl.constexpr = S.panels
    SLABS: gl.constexpr = S.stage_slabs
    BLOCKS: gl.constexpr = S.stage_blocks
    bar = ring.full.index(stage)
    mbarrier.expect(bar, S.stage_bytes)
    for p in gl.static_range(PANELS):
        panel = _panel(pn, p, shape, S)
        if S.bits == 4 or S.sparse:
            first = panel * shape.k_slabs + t * SLABS
            _load_lines(operands.weight, ring.weight, first, bar, stage, p, 4 * S.bits if S.sparse else 32, S)
            if S.sparse:
                _load_lines(operands.metadata, ring.metadata, first, bar, stage, p, 8, S)
        else:
            for j in gl.static_range(SLABS):
                to = ring.weight.index(stage * SLABS + j).slice(p * ROWS, ROWS, dim=0)
                async_load(operands.weight, [panel * ROWS, (t * SLABS + j) * 128], bar, to)
    for i in gl.static_range(2, 4):  # scale and zero
        if operands[i] is not None:
            block = 0 if S.one_block else t * SLABS // S.slabs_per_block * S.blocks_per_slab
            if S.gated:
                for j in gl.static_range(BLOCKS):
                    for h in gl.static_range(2):
                        to = ring[i].index(stage * BLOCKS + j).slice(h * (S.rows // 2), S.rows // 2, dim=1)
                        async_load(operands[i], [block + j, _panel(pn, h * (PANELS // 2), shape, S) * ROWS], bar, to)
            else:
                of_blocks = ring[i]
                to = reinterpret(of_blocks, of_blocks.dtype, [S.stages, S.stage_blocks, S.rows], of_blocks.layout).index(stage)
                async_load(operands[i], [block, pn * S.rows], bar, to)


@gluon.jit
def _load_lines(descriptor, buffer, first, bar, stage, PANEL: gl.constexpr, LINES: gl.constexpr, S: gl.constexpr):
    """Load a panel whose K slabs have LINES lines of 128 bytes each."""
    to = buffer.index(stage).slice(PANEL * LINES * S.stage_slabs, LINES * S.stage_slabs, dim=0)
    async_load(descriptor, [first * LINES, 0], bar, to)


@gluon.jit
def _load_x(operands, ring, row, t, stage, S: gl.constexpr):
    """Load x of a stage."""
    to = reinterpret(ring.x, operands.x.dtype, [S.stages] + operands.x.block_shape, operands.x.layout).index(stage)  # noqa: RUF005
    async_load(operands.x, [t * S.x_pieces, 0, row, 0], ring.full.index(stage), to)


@gluon.jit
def _produce(operands, ring, row, scratch, share, shape, S: gl.constexpr):
    """The producer warp: load the stages of all steps of this program."""
    STAGES: gl.constexpr = S.stages
    pn, t, steps = _first_step(share, shape, scratch, S)
    first = gl.minimum(steps, STAGES)
    t_of_x = t
    for i in range(first):  # the weight, before the previous kernel has ended
        _load_weight(operands, ring, pn, t, i, shape, S)
        pn, t = _next_step(pn, t, shape)
    gdc_wait()
    for i in range(first):
        _load_x(operands, ring, row, t_of_x, i, S)
        _pn, t_of_x = _next_step(pn, t_of_x, shape)
    stage = 0
    phase = 0
    for _ in range(first, steps):
        mbarrier.wait(ring.empty.index(stage), phase)
        _load_weight(operands, ring, pn, t, stage, shape, S)
        _load_x(operands, ring, row, t, stage, S)
        pn, t = _next_step(pn, t, shape)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(
    ring, exchange, ready, scales, outputs, factor, scratch, share, shape, PARTITION: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """A partition: multiply its panel and its part of K, reduce, and write y.

    Args:
        exchange: Shared memory through which partitions of the same tile exchange sums.
        ready: Barriers: for each panel one that `exchange` is full, then one that it is empty.
        scales: Pointers to the weight's scales and to those of rows of x, which multiply the sums.
        factor: Of gates.
    """
    PANELS: gl.constexpr = S.panels
    PANEL: gl.constexpr = PARTITION % PANELS
    EACH: gl.constexpr = S.slabs
    FIRST: gl.constexpr = PARTITION // PANELS * EACH  # K slab of the stage
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    MMA: gl.constexpr = S.sums
    high = high_bytes(outputs.y.dtype.element_ty) if S.bits == 8 and S.use_wgmma else 0
    pn, t, steps = _first_step(share, shape, scratch, S)
    stage = 0
    phase = 0
    number = 0  # of the tile, whose parity is the phase of `ready`
    gdc_wait()
    while steps > 0:
        count = gl.minimum(shape.steps - t, steps)
        acc = gl.zeros([ROWS, COLUMNS], gl.int32 if S.integers else gl.float32, layout=MMA)
        for i in range(count):
            mbarrier.wait(ring.full.index(stage), phase)
            for j in gl.static_range(EACH):
                acc = add_slab(acc, ring, stage, t + i, high, PANEL, FIRST + j, S)
            mbarrier.arrive(ring.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        if FIRST > 0:  # leaves its part of K to the panel's first partition
            mbarrier.wait(ready.index(PANELS + PANEL), (number & 1) ^ 1)
            exchange.index(PARTITION - PANELS).store(pack_sums(acc))
            mbarrier.arrive(ready.index(PANEL), count=1)
        else:
            if S.k_parts > 1:
                mbarrier.wait(ready.index(PANEL), number & 1)
                acc = _add_parts(acc, exchange, PANEL, S)
                mbarrier.arrive(ready.index(PANELS + PANEL), count=1)
            complete = count == shape.steps
            if scratch is not None:
                if count < shape.steps:
                    acc, complete = _reduce_tile(acc, pn, scratch, share, shape, PANEL, S)
            row = _panel(pn, PANEL, shape, S) * ROWS
            if S.gated:
                if PANEL >= PANELS // 2:
                    mbarrier.wait(ready.index(PANELS + PANEL), (number & 1) ^ 1)
                    exchange.index(PANEL - PANELS // 2).store(pack_sums(_scale_sums(acc, scales, row, shape, S)))
                    mbarrier.arrive(ready.index(PANEL), count=1)
                else:
                    mbarrier.wait(ready.index(PANELS // 2 + PANEL), number & 1)
                    acc = _scale_sums(acc, scales, row, shape, S)
                    packed = exchange.index(PANEL).load(pack_sums(acc).type.layout)
                    mbarrier.arrive(ready.index(PANELS + PANELS // 2 + PANEL), count=1)
                    up = gl.convert_layout(unpack_sums(packed, ROWS), acc.type.layout, assert_trivial=True)
                    GATES: gl.constexpr = S.gates
                    _write(with_gates(acc, up, factor, GATES), outputs, row, shape.rows, shape.n // 2, S)
            elif complete:
                _write(_scale_sums(acc, scales, row, shape, S), outputs, row, shape.rows, shape.n, S)
        steps -= count
        pn += 1
        t = 0
        number += 1


@gluon.jit
def _add_parts(acc, exchange, PANEL: gl.constexpr, S: gl.constexpr):
    """Return acc + the sums of the panel's other parts of K."""
    K_PARTS: gl.constexpr = S.k_parts
    packed = pack_sums(acc)
    for j in gl.static_range(K_PARTS - 1):
        packed += exchange.index(j * S.panels + PANEL).load(packed.type.layout)
    return gl.convert_layout(unpack_sums(packed, ROWS), acc.type.layout, assert_trivial=True)


@gluon.jit
def _reduce_tile(acc, pn, scratch, share, shape, PANEL: gl.constexpr, S: gl.constexpr):
    """Reduce the partial sums of the programs that share a tile in one of them.

    Returns the panel's sums, and whether this program has the complete ones.
    """
    packed = pack_sums(acc)
    LANES: gl.constexpr = packed.type.layout
    SLOT_STRIDE: gl.constexpr = S.rows * S.columns
    if S.polled > 0:
        others = share.programs_of_tile - 1
        rank = gl.program_id(0) % share.programs_of_tile
        slot = scratch[0] + pn.to(gl.int64) * (others * SLOT_STRIDE) + PANEL * ROWS * S.columns
    else:
        leader = _program_of(pn * shape.steps, share)
        others = _program_of((pn + 1) * shape.steps - 1, share) - leader
        rank = gl.program_id(0) - leader
        # A program has two slots: one for the end of a tile, one for the beginning of another (the leader's).
        slot = scratch[0] + leader.to(gl.int64) * (2 * SLOT_STRIDE) + PANEL * ROWS * S.columns
    slot += gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, LANES)), 0)
    piece = gl.expand_dims(gl.arange(0, S.columns // 8, layout=gl.SliceLayout(1, LANES)), 1) * 512
    if S.polled > 0:
        complete = rank == others
        if complete:
            packed += poll_sums(slot, others, packed, SLOT_STRIDE, S.polled)
            acc = gl.convert_layout(unpack_sums(packed, ROWS), acc.type.layout, assert_trivial=True)
        else:
            send_sums(slot + piece + rank * SLOT_STRIDE, packed)
    else:
        counter = scratch[1] + pn * S.panels + PANEL
        slot += piece
        gl.store(slot + gl.where(rank == 0, 1, 2 * rank) * SLOT_STRIDE, packed)
        thread_barrier()  # orders this partition's stores before its arrival
        complete = gl.atomic_add(counter, 1, sem="acq_rel") == others
        if complete:
            packed = gl.load(slot + SLOT_STRIDE, cache_modifier=".cg")
            for j in range(1, others + 1):
                packed += gl.load(slot + 2 * j * SLOT_STRIDE, cache_modifier=".cg")
            acc = gl.convert_layout(unpack_sums(packed, ROWS), acc.type.layout, assert_trivial=True)
            gl.store(counter, 0)
    return acc, complete


@gluon.jit
def _scale_sums(total, scales, first, shape, S: gl.constexpr):
    """Return sums of the rows of the weight from `first` on in float32, times the scales of whole rows and columns."""
    MMA: gl.constexpr = total.type.layout
    total = total.to(gl.float32)
    if S.subnormal:
        total *= SUBNORMAL_SCALE
    if S.one_block:
        row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        total *= gl.expand_dims(gl.load(scales[0] + gl.minimum(row, shape.n_padded - 1)).to(gl.float32), 1)
    if S.integers:
        if S.bits == 4:
            total *= 0.0625
        total *= gl.expand_dims(gl.load(scales[1] + _rows_of_x(shape.rows, gl.SliceLayout(0, MMA), S)), 0)
    return total


@gluon.jit
def _rows_of_x(rows, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Return the rows of x of a tile's columns."""
    HALF: gl.constexpr = S.columns // 2
    column = gl.arange(0, S.columns, layout=LAYOUT)
    return gl.where(column < HALF, column, column - HALF + rows.half_stride)


@gluon.jit
def _write(total, outputs, first, rows, N, S: gl.constexpr):
    """Write y of the rows of the weight from `first` on; it has N columns."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    rn = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    rm = _rows_of_x(rows, gl.SliceLayout(0, OUT), S)
    mask = gl.expand_dims(rn < N, 1) & gl.expand_dims((rm >= rows.skipped) & (rm < rows.count), 0)
    at = gl.expand_dims(rm, 0).to(gl.int64) * N + gl.expand_dims(rn, 1)
    store_masked(total, outputs, first, at, mask, N, OUT, S)


@gluon.jit
def _allocate_ring(operands, S: gl.constexpr):
    """Allocate the `Ring`."""
    STAGES: gl.constexpr = S.stages
    XS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=operands.x.dtype.primitive_bitwidth, rank=2)
    x = gl.allocate_shared_memory(operands.x.dtype, [STAGES * S.x_pieces, S.columns, operands.x.block_shape[3]], XS)
    metadata = x  # a placeholder that is never read
    if S.sparse:
        weight = gl.allocate_shared_memory(gl.int32, [STAGES, 16 * S.bits * S.slabs, 32], operands.weight.layout)
        metadata = gl.allocate_shared_memory(gl.int32, [STAGES, 32 * S.slabs, 32], operands.metadata.layout)
    elif S.bits == 4:
        weight = gl.allocate_shared_memory(operands.weight.dtype, [STAGES, 32 * S.partitions * S.slabs, 64], operands.weight.layout)
    else:
        weight = gl.allocate_shared_memory(operands.weight.dtype, [STAGES * S.stage_slabs, S.rows, 128], operands.weight.layout)
    scale = x
    zero = x
    if operands.scale is not None:
        scale = gl.allocate_shared_memory(operands.scale.dtype, [STAGES * S.stage_blocks, 1, S.rows], operands.scale.layout)
    if operands.zero is not None:
        zero = gl.allocate_shared_memory(operands.zero.dtype, [STAGES * S.stage_blocks, 1, S.rows], operands.zero.layout)
    return x, weight, scale, zero, metadata


@gluon.jit(do_not_specialize=["half_stride", "share", "M", "k_slabs"])
def _skinny(
    xd, half_stride, wd, pd, sd, zd, scales, out, added, scratch, share, M, N, n_padded, k_slabs, bounds, S: gl.constexpr
):  # fmt: skip
    STAGES: gl.constexpr = S.stages
    PANELS: gl.constexpr = S.panels
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    gdc_launch_dependents()
    operands = Operands(xd, wd, sd, zd, pd)
    share = Share(share[0], share[1], share[2])  # here, as Triton specializes a NamedTuple in spite of do_not_specialize
    x, weight, scale, zero, metadata = _allocate_ring(operands, S)
    exchange = x
    if S.k_parts > 1 or S.gated:
        OTHERS: gl.constexpr = PANELS // 2 if S.gated else S.partitions - PANELS
        exchange = gl.allocate_shared_memory(gl.int32 if S.integers else gl.float32, [OTHERS, S.columns // 8, 512], PLAIN)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, S.partitions)
    ready = full  # not barriers without a waiting thread: the compiler would overlap their memory with y's
    if S.k_parts > 1 or S.gated:
        ready = gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(PANELS):
            mbarrier.init(ready.index(i), count=max(1, S.k_parts - 1))
            mbarrier.init(ready.index(PANELS + i), count=1)
    fence_async_shared()
    ring = Ring(x, weight, scale, zero, metadata, full, empty)
    # The last tile of rows begins early enough to be full: it skips those that the tile before writes.
    first = gl.program_id(1) * S.columns
    row = gl.minimum(first, gl.maximum(M - S.columns, 0))
    at = row.to(gl.int64) * N
    out += at
    residual = added[1]
    if added[1] is not None:
        residual = added[1] + at
    if scratch is not None:
        tiles = gl.cdiv(N, S.rows)
        if S.polled > 0:
            scratch = (scratch[0] + first.to(gl.int64) * ((gl.num_programs(0) - tiles) * S.rows),)
        else:
            slots = first.to(gl.int64) * (gl.num_programs(0) * 2 * S.rows)
            scratch = (scratch[0] + slots, scratch[1] + gl.program_id(1) * tiles * PANELS)
    shape = Shape(Rows(M - row, half_stride, first - row), N, n_padded, k_slabs, gl.cdiv(k_slabs, S.stage_slabs))
    outputs = Outputs(out, None, added[0], residual, bounds[0], bounds[1])
    factor = bounds[2]
    # With one panel the first partition adds up and writes the sums of all, for which integers take registers of the others.
    FIRST: gl.constexpr = S.integers and PANELS == 1
    REGISTERS: gl.constexpr = 96 if FIRST else 112
    if S.partitions == 2:
        gl.warp_specialize(
            [
                (_consume, (ring, exchange, ready, scales, outputs, factor, scratch, share, shape, 0, S)),
                (_consume, (ring, exchange, ready, scales, outputs, factor, scratch, share, shape, 1, S)),
                (_produce, (operands, ring, row, scratch, share, shape, S)),
            ],
            [4, 1],
            [104, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, exchange, ready, scales, outputs, factor, scratch, share, shape, 0, S)),
                (_consume, (ring, exchange, ready, scales, outputs, factor, scratch, share, shape, 1, S)),
                (_consume, (ring, exchange, ready, scales, outputs, factor, scratch, share, shape, 2, S)),
                (_consume, (ring, exchange, ready, scales, outputs, factor, scratch, share, shape, 3, S)),
                (_produce, (operands, ring, row, scratch, share, shape, S)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24 if FIRST else 32],
        )
