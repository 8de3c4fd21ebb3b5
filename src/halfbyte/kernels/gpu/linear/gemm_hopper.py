"""y [M, N] = x [M, K] · Wᵀ with many rows M on Hopper: TMA, weights from registers into wgmma, a persistent grid.

Weight: the words or bytes of `layouts/gpu_tiles.py`. Computes Yᵀ = W · Xᵀ in the tiles of `hopper/tile.py`, with its arithmetic.

Each program multiplies the same number of whole tiles, then an equal share of the K slabs of the remaining ones (`hopper/stream_k.py`). The
partial sums of a tile that is cut are reduced in a workspace, in a fixed order (`hopper/reduction.py`). TMA writes a tile from the stages
of its last slabs of x, while the next one is multiplied; with a residual, or an N that TMA cannot write, threads do.

Fastest in 4 bits from about 128 rows on (H100). Per K slab, 64 rows by 256 of x take the least time per product: the larger a tile is along
M, the less often a weight is dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.hopper.epilogue import QUARTERS, Outputs, quarters_of, send_tile, write_rows
from halfbyte.kernels.gpu.hopper.gluon_compat import FEWER_REGISTERS
from halfbyte.kernels.gpu.hopper.reduction import reduce_tile, sharers_of_tile
from halfbyte.kernels.gpu.hopper.ring import Shape, descriptor, why_not_hopper, worker_registers
from halfbyte.kernels.gpu.hopper.stream_k import divisors_of, segment_at, share_of_program
from halfbyte.kernels.gpu.hopper.tile import (
    Operands,
    Static,
    WeightOffset,
    XBoxes,
    allocate_ring,
    codes_descriptor,
    load_stage,
    load_weight,
    load_x,
    multiply_slabs,
    of_weight,
    one_block,
    reserve_store_stages,
    scale_descriptors,
    stages_per_slab,
)
from halfbyte.kernels.gpu.hopper.weights import high_bytes
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import locks, workspace
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

# Microseconds of a K slab of a tile (rows per warpgroup, rows of x), by bits; of the start of a program, and the end of a tile of 64 x 256.
# Fitted, like those of reductions in `seconds`, to 702 times of q4_0 on an H200: 28 shapes of layers of models, 65 to 2048 rows; those of
# 8 bits to some ten of q8_0.
SLAB_US = {
    4: {(64, 256): 1.30, (64, 128): 0.68, (64, 64): 0.54, (128, 128): 1.38, (128, 64): 1.00},
    8: {(64, 256): 1.32, (64, 128): 0.72, (64, 64): 0.63, (64, 32): 0.58, (128, 128): 1.45, (128, 64): 1.10},
}
_START_US, _END_US = 1.65, 1.3
RESERVED_BYTES = 4352  # of shared memory outside of the stages
_BOXES = 4  # TMA boxes of x in a tile; one where more would spill registers
_LEAST_M = {4: 64, 8: 16}  # fewer rows do not fill a tile: skinny.py reads the weight as fast


@dataclass(frozen=True)
class Config:
    """Tiles of 2 * `rows` rows of the weight by `block_m` of x, and `stages` K slabs in flight, or half slabs (`tile.stages_per_slab`)."""

    rows: int
    block_m: int
    stages: int
    programs: int


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    if reason := why_not_hopper(gpu):
        return reason
    geo, least = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _LEAST_M[problem.format.bits]
    scaled = not one_block(geo) and problem.dtype == torch.float16 and problem.format.scale != torch.float16
    if problem.dtype == torch.float32 or scaled:
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if problem.m < least:
        return f"{problem.m} rows do not fill its tiles: from {least} on"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    return None


def subnormal_codes(problem: Problem) -> bool:
    """Return `Static.subnormal`: whether no scale can overflow, nor a zero point's product with one, which is rounded."""
    fmt, geo = problem.format, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    small = fmt.scale == torch.float16 and (fmt.zero != "point" or fmt.bits == 4)
    return problem.dtype == torch.bfloat16 and (one_block(geo) or small) and not fmt.codebook


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    candidates: list[Config] = []
    for rows, block_m in SLAB_US[problem.format.bits]:
        tiles = -(-problem.n // (2 * rows)) * -(-problem.m // block_m)
        waves = -(-tiles // gpu.sms)
        whole = -(-tiles // waves)
        split = tiles * max(1, min(gpu.sms // tiles, geo.records // 8))
        stages, counts = most_stages(geo, rows, block_m, gpu), {whole, gpu.sms if waves > 1 else split, min(gpu.sms, tiles * geo.records)}
        candidates += [Config(rows, block_m, stages, programs) for programs in counts]
    return tuple(sorted(candidates, key=lambda config: seconds(problem, config))[:6])


def seconds(problem: Problem, config: Config) -> float:
    """Estimate the time of the longest share, where reading does not take longer."""
    geo, tiles, programs = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _count_tiles(problem, config), config.programs
    slabs, size = geo.records, config.rows * config.block_m / (64 * 256)
    us = _START_US + -(-tiles * slabs // programs) * SLAB_US[problem.format.bits][config.rows, config.block_m]
    us += -(-tiles // programs) * size * _END_US
    if tiles % programs == 0:
        reduction = 0.0
    elif programs % tiles == 0:
        reduction = 2.1 * (1 + size) + 0.5 * (programs // tiles - 1)
    else:  # shares begin anywhere along K: the longer it is, the less of x and of the weight the cache holds
        reduction = 3.3 * (1 + 1.9 * size) + 1.05 * (1 + size) * max(0.0, slabs / 32 - 1)
    return 1e-6 * (us + reduction)


def most_stages(geo: gpu_tiles.Geometry, rows: int, block_m: int, gpu: Gpu) -> int:
    """Return how many stages fit in shared memory with the barriers and what threads write y through."""
    parts, zero_bytes = stages_per_slab(block_m), 0 if geo.zero_dtype is None else geo.zero_dtype.itemsize
    scales = 2 * rows * geo.blocks_a_record * (geo.format.scale.itemsize + zero_bytes)
    slab = 256 * block_m + 32 * geo.format.bits * rows + scales
    return min(2 * geo.format.bits, (gpu.shared - RESERVED_BYTES - (parts - 1) * scales) * parts // slab)


def compiled_for(problem: Problem, config: Config, *, clamp: bool) -> Static:
    """Return what the kernel is compiled for."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    return Static(
        rows=config.rows,
        block_m=config.block_m,
        stages=config.stages,
        clamp=clamp,
        subnormal=subnormal_codes(problem),
        paired=problem.paired,
        **of_weight(geo),
    )


def workspace_bytes(problem: Problem, config: Config) -> int:
    """Return the bytes of memory for partial sums of tiles that programs share."""
    return 16 * config.programs * config.rows * config.block_m if _count_tiles(problem, config) % config.programs else 0


def _count_tiles(problem: Problem, config: Config) -> int:
    return -(-problem.n // (2 * config.rows)) * -(-problem.m // config.block_m)


def launch(
    problem: Problem,
    config: Config,
    x: Tensor,
    weight: gpu_tiles.Views,
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor | None = None,
    registers: int | None = None,
) -> None:
    """Launch the product of x [M or more, K] (unit stride along K) and the weight's sections; out is [M, N], contiguous.

    Args:
        memory: `workspace_bytes(problem, config)` of it; None: that of the device.
        registers: The average per thread.
    """
    codes, scale, zero = weight
    nbytes = workspace_bytes(problem, config)
    if x.data_ptr() % 16 or x.stride(0) % 8:  # TMA needs this alignment
        x = x.clone(memory_format=torch.contiguous_format)
    geo, static = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), compiled_for(problem, config, clamp=epilogue.clamps)
    static = replace(static, tma_store=_can_tma_store(problem, static, out, epilogue), registers=registers)
    scratch: tuple[Tensor, Tensor] | None = None
    if nbytes:
        memory = workspace(out.device, nbytes) if memory is None else memory
        scratch = memory.view(torch.float32), locks(out.device, 4 * _count_tiles(problem, config))
    launcher.run(
        _gemm,
        (config.programs,),
        descriptor(x, [config.block_m // (_BOXES if registers is None else 1), static.stage_k]),
        codes_descriptor(codes, static),
        *scale_descriptors(scale[None], None if zero is None else zero[None], static),
        scale,
        descriptor(out, [config.block_m, static.rows]) if static.tma_store else None,
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


def _can_tma_store(problem: Problem, static: Static, out: Tensor, epilogue: Epilogue) -> bool:
    """Return whether TMA can write the tiles."""
    fits = static.rows <= static.stage_k and static.stages > static.stages_per_slab + static.store_stages
    return fits and epilogue.residual is None and problem.n % 8 == 0 and out.data_ptr() % 16 == 0


# The kernel. `S` is a Static, `operands` Operands, `ring` a Ring, `shape` a Shape, `outputs` Outputs.


@gluon.jit
def _x_boxes(pm, xd, shape, S: gl.constexpr):
    """Return the `XBoxes` of the tiles with this index along M."""
    BOX: gl.constexpr = xd.block_shape[0]
    return XBoxes(pm * S.block_m, gl.minimum(gl.cdiv(shape.m - pm * S.block_m, BOX), S.block_m // BOX))


@gluon.jit
def _produce(operands, ring, shape, S: gl.constexpr):
    """The producer warp: load the stages of all segments of this program."""
    STAGES: gl.constexpr = S.stages
    share = share_of_program(shape, S)
    divisors = divisors_of(shape, S)
    at = share.start - share.start
    segment = segment_at(at, share, divisors, shape)
    step = gl.minimum(segment.count * S.stages_per_slab, STAGES)
    boxes = _x_boxes(segment.pm, operands.x, shape, S)
    for i in range(step):  # the weight, before the previous kernel has ended
        load_weight(operands, ring, boxes.boxes, WeightOffset(0, 0), segment.pn, segment.first * S.stages_per_slab + i, i, shape, S)
    gdc_wait()
    for i in range(step):
        load_x(operands.x, ring, boxes, segment.first * S.stages_per_slab + i, i, S)
    loaded = step
    while at < share.end:
        segment = segment_at(at, share, divisors, shape)
        boxes = _x_boxes(segment.pm, operands.x, shape, S)
        for r in range(segment.first * S.stages_per_slab + loaded, (segment.first + segment.count) * S.stages_per_slab):
            load_stage(operands, ring, boxes, WeightOffset(0, 0), segment.pn, r, step, shape, S)
            step += 1
        loaded = loaded - loaded
        at += segment.count
        if S.tma_store:
            reserve_store_stages(ring, step, S)
            step += S.store_stages


@gluon.jit
def _consume(ring, scale, outputs, scratch, shape, HALF: gl.constexpr, S: gl.constexpr):
    """A consumer warpgroup: multiply its half of all segments of this program, reduce those of tiles that are cut, and write y."""
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    DTYPE: gl.constexpr = outputs.y.dtype.element_ty
    high = high_bytes(DTYPE)
    step = 0
    stored = 0
    share = share_of_program(shape, S)
    divisors = divisors_of(shape, S)
    at = share.start - share.start
    tile, pm, pn, _first, count = segment_at(at, share, divisors, shape)
    gdc_wait()
    while at < share.end:
        if scratch is not None:  # divisions take long: before the first slabs have arrived
            sharing = sharers_of_tile(tile - share.whole_tiles * gl.num_programs(0), gl.maximum(share.rest, 1), shape)
        this_tile, first_n, first_m, slabs = tile, (pn * 2 + HALF) * ROWS, pm * BM, count
        acc, step = multiply_slabs(ring, stored, scale, first_n, count, step, high, shape, HALF, DTYPE, S)
        acc = acc[0]
        at += count
        tile, pm, pn, _first, count = segment_at(gl.minimum(at, share.end - 1), share, divisors, shape)
        if scratch is not None:
            if slabs < shape.k_slabs:
                reduce_tile(acc, outputs, first_n, first_m, this_tile, sharing, at < share.end, scratch, shape, HALF, S)
        if S.tma_store:
            stage = step + HALF // S.store_sharers
            mbarrier.wait(ring.full.index(stage % S.stages), (stage // S.stages) & 1)
            if slabs == shape.k_slabs:
                send_tile(acc, outputs, ring.x.index(stage % S.stages), first_n, first_m, shape, HALF, S)
            step += S.store_stages
            stored = 1
        elif slabs == shape.k_slabs:
            _write(acc, outputs, first_n, first_m, shape, S)
    if S.tma_store:
        tma.store_wait(0)


@gluon.jit
def _write(acc, outputs, first_n, first_m, shape, S: gl.constexpr):
    quarters = quarters_of(acc)
    for i in gl.static_range(QUARTERS):
        write_rows(quarters[i], outputs, first_n, first_m + i * (S.block_m // QUARTERS), None, shape, S)


@gluon.jit(do_not_specialize=["M"])
def _gemm(xd, wd, sd, zd, scale, yd, out, added, scratch, M, N, n_padded, k_slabs, bounds, S: gl.constexpr):
    gdc_launch_dependents()
    REGISTERS: gl.constexpr = worker_registers(S.registers, 56 if FEWER_REGISTERS and S.rows * S.block_m <= 4096 else 40)
    operands = Operands(xd, wd, sd, zd)
    ring = allocate_ring(operands, S)
    shape = Shape(M, N, n_padded, k_slabs)
    outputs = Outputs(out, yd, added[0], added[1], bounds[0], bounds[1])
    gl.warp_specialize(
        [
            (_consume, (ring, scale, outputs, scratch, shape, 0, S)),
            (_consume, (ring, scale, outputs, scratch, shape, 1, S)),
            (_produce, (operands, ring, shape, S)),
        ],
        [4, 1],
        REGISTERS,
    )
