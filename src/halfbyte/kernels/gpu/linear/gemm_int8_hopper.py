"""y [M, N] = x [M, K] · Wᵀ on Hopper's integer tensor cores (W8A8, W4A8), for many rows: TMA, warp specialization, a persistent grid.

The products, their arithmetic and the order of the operands are those of `gemm_int8.py`, which alone computes an x with an offset.

A program computes tiles of 64 * panels rows of the weight by block_m rows of x, one after the other (`hopper/int8_tile.py`). The weight's
first stages are loaded before the kernel that quantizes x has ended. Eight nibbles go from shared memory through three instructions into
the registers that wgmma reads. Where tiles are few and K is long, several programs share a tile (split-K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.arithmetic import grouped_ordering
from halfbyte.kernels.gpu.hopper.epilogue import Outputs
from halfbyte.kernels.gpu.hopper.gluon_compat import FEWER_REGISTERS
from halfbyte.kernels.gpu.hopper.int8_tile import (
    Operands,
    Static,
    Target,
    WeightOffset,
    allocate_ring,
    load_tile,
    load_weight,
    load_x_and_scales,
    multiply_tile,
)
from halfbyte.kernels.gpu.hopper.ring import Shape, descriptor, why_not_hopper, worker_registers
from halfbyte.kernels.gpu.linear import gemm_int8
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.quantize.activations import Quantized
from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.kernels.gpu.runtime.scratch import locks
from halfbyte.kernels.gpu.weight_kinds import zero_of
from halfbyte.kernels.problem import LOW_RANK, Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_LEAST_M, _LEAST_SCALED = 9, 17  # fewer rows do not fill a tile; for blocks gemm_int8.py has more programs
_LEAST_SHARE = 16  # K slabs of a program that shares a tile
_REDUCTION_US = 4.5  # to add up the sums of programs that share a tile, on an H200


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight, a warpgroup each (1 or 2), by `block_m` of x, and `stages` K slabs in flight.

    With `early` the weight is loaded while x is quantized. Tiles of 256 rows of x may be halved in the last wave (`_halves_rest`).
    """

    block_m: int
    stages: int
    programs: int
    panels: int = 2
    early: bool = False


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if reason := gemm_int8.supports(problem, gpu) or why_not_hopper(gpu):
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
    """Return configs, the best guess first: by the time of all waves of tiles."""
    fmt, candidates, times = problem.format, [], _slab_us(problem, activations.plan(problem).whole)
    geo = gpu_tiles.geometry(fmt, (problem.n, problem.k))
    for (block_m, panels), us in times.items():
        rows = -(-problem.m // block_m)
        tiles = rows * -(-problem.n // (64 * panels))
        waves = -(-tiles // gpu.sms)
        stages = min(8, (gpu.shared - (32 << 10)) // compiled_for(problem, Config(block_m, 1, 1, panels), clamp=False).stage_bytes)
        # Programs that start one after the other load the same weights at different times.
        early = rows == 1 or rows * geo.nbytes <= 2 * gpu.l2
        candidates.append((waves * geo.records * us, Config(block_m, stages, -(-tiles // waves), panels, early)))
        if block_m == 256 and _halves_rest(tiles, gpu.sms):
            halved_us = (waves - 1) * us + times[128, panels]
            candidates.append((halved_us * geo.records, Config(block_m, stages, gpu.sms, panels, early)))
        for split in (2, 4):
            if block_m < 256 and tiles * split <= gpu.sms and geo.records >= _LEAST_SHARE * split:
                # Bytes of a tile are in rows along K: programs that share it read twice as many places of the memory at once.
                share_us = -(-geo.records // split) * us * (1.5 if fmt.bits == 8 else 1.0)
                candidates.append((share_us + _REDUCTION_US, Config(block_m, stages, tiles * split, panels, early)))
    return tuple(config for _, config in sorted(candidates, key=lambda pair: pair[0]))


def _halves_rest(tiles: int, programs: int) -> bool:
    """Return whether each tile of an incomplete last wave is halved for two programs."""
    return tiles > programs and 0 < 2 * (tiles % programs) <= programs


def _chained(problem: Problem) -> bool:
    """Return whether sums of blocks may lose what chains lose (`hopper/int8_sums.py`)."""
    plan, fmt = activations.plan(problem), problem.format
    return plan.whole_row and not plan.whole and fmt.scale == torch.float16 and problem.dtype != torch.float32


def _slab_us(problem: Problem, whole: bool) -> dict[tuple[int, int], float]:
    """Return the microseconds of a K slab by tile (rows of x, panels) on an H200."""
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
    """Return what the kernel is compiled for."""
    plan, fmt = activations.plan(problem), problem.format
    return Static(
        bits=fmt.bits,
        zero=zero_of(fmt),
        scale_bytes=fmt.scale.itemsize,
        whole=plan.whole,
        row_scale=plan.whole_row,
        block_m=config.block_m,
        panels=config.panels,
        stages=config.stages,
        chained=_chained(problem),
        early=config.early,
        clamp=clamp,
    )


def _tile_count(problem: Problem, config: Config) -> int:
    return -(-problem.m // config.block_m) * -(-problem.n // (64 * config.panels))


def _sharers(problem: Problem, config: Config) -> int:
    """Return how many programs share each tile."""
    return max(1, config.programs // _tile_count(problem, config))


def _workspace_bytes(problem: Problem, config: Config) -> int:
    """Return the bytes of memory for the partial sums of programs that share tiles."""
    shared = _sharers(problem, config) > 1
    return 4 * config.programs * 64 * config.panels * config.block_m if shared else 0


def multiply(
    problem: Problem, config: Config, x: Quantized, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue, memory: Tensor
) -> None:
    """Launch the product of a quantized x."""
    geo, tiles = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), _tile_count(problem, config)
    static = replace(
        compiled_for(problem, config, clamp=epilogue.clamps),
        split=_sharers(problem, config),
        halve_rest=config.block_m == 256 and _halves_rest(tiles, config.programs),
        low_rank=epilogue.low_rank is not None,
    )
    rows = weight.codes.view(torch.int8).view(-1, 128) if static.bits == 4 else weight.codes
    scratch = None
    if static.split > 1:
        scratch = memory.view(torch.int32 if static.whole else torch.float32), locks(out.device, config.panels * tiles)
    # 8 bits in tiles of few rows of x are bound by the L2 cache, of which programs that start one after the other profit less.
    starts_early = config.early or not static.whole or static.bits == 4 or config.block_m == 256
    by_tma = epilogue.residual is None and out.itemsize == 2 and problem.n % 8 == 0 and out.data_ptr() % 16 == 0
    run(
        _gemm,
        (config.programs,),
        descriptor(x.q, [min(config.block_m, 128), 128]),
        descriptor(rows, [8 * static.bits, 128]),
        None if static.whole or static.row_scale else descriptor(x.scale, [1, config.block_m], flat=True),
        None if static.whole or x.sums is None else descriptor(x.sums, [1, config.block_m], flat=True),
        None if static.whole else descriptor(weight.scale.view(-1, 64), [1, 64], flat=True),
        descriptor(out, [static.epilogue_rows, 64]) if by_tma else None,
        *_low_rank_operands(problem, config, epilogue.low_rank),
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


def why_no_low_rank(problem: Problem, config: Config, branches: int) -> str | None:
    """Return the reason why this kernel does not add `branches` of low rank, each of an equal part of the weight's rows, or None."""
    if problem.format.bits != 4 or not activations.plan(problem).whole or problem.dtype == torch.float32:
        return "it adds them to 4 bits with a scale for each row of both operands, in 16 bits"
    if _sharers(problem, config) > 1 or problem.n % (branches * 64 * config.panels):
        return "programs share a tile, or branches do"
    return None


def _low_rank_operands(
    problem: Problem, config: Config, low_rank: tuple[Tensor, Tensor] | None
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, int | None]:
    if low_rank is None:
        return None, None, None
    inner, outer = low_rank
    if reason := why_no_low_rank(problem, config, branches := inner.shape[1] // LOW_RANK):
        raise KernelError(f"gemm_int8_hopper adds no product of low rank here: {reason}")
    rows = min(config.block_m, 128)
    return descriptor(inner.view(torch.int8), [rows, 128]), descriptor(outer, [64, LOW_RANK]), problem.n // branches


launch = activations.quantizing_launch(multiply, _workspace_bytes, early=not triton.knobs.runtime.interpret)


# The kernel. `S` is a Static, `operands` Operands, `ring` a Ring, `shape` a Shape, `outputs` Outputs.


@gluon.jit
def _count_tiles(shape, S: gl.constexpr):
    """Return how many tiles there are along M and along N, and how many are multiplied whole."""
    tiles_m = gl.cdiv(shape.m, S.block_m)
    tiles_n = gl.cdiv(shape.n, 64 * S.panels)
    whole = tiles_m * tiles_n
    if S.halve_rest:
        whole -= whole % gl.num_programs(0)
    return tiles_m, tiles_n, whole


@gluon.jit
def _half_tile(shape, S: gl.constexpr):
    """Return the half of a tile of the last wave that this program multiplies: whether it has one, its first row of x, its place along
    N."""
    tiles_m, tiles_n, whole = _count_tiles(shape, S)
    pm, pn = grouped_ordering(gl.minimum(whole + gl.program_id(0) // 2, tiles_m * tiles_n - 1), tiles_m, tiles_n)
    first = pm * S.block_m + gl.program_id(0) % 2 * (S.block_m // 2)
    return gl.program_id(0) < 2 * (tiles_m * tiles_n - whole), first, pn


@gluon.jit
def _slabs_of_program(shape, S: gl.constexpr):
    """Return the first K slab of its tiles that this program multiplies, and how many."""
    first = gl.program_id(0) % S.split * shape.k_slabs // S.split
    return first, (gl.program_id(0) % S.split + 1) * shape.k_slabs // S.split - first


@gluon.jit
def _produce(operands, ring, shape, S: gl.constexpr):
    """The producer warp: load the stages of all tiles of this program."""
    tiles_m, tiles_n, whole = _count_tiles(shape, S)
    tile = gl.program_id(0) // S.split
    pm, pn = grouped_ordering(tile, tiles_m, tiles_n)
    first, count = _slabs_of_program(shape, S)
    loaded = gl.minimum(count, S.stages)
    if not S.early:
        gdc_wait()
    for r in range(loaded):
        load_weight(operands, ring, 0, pn, first + r, r, shape, S)
    gdc_wait()
    for r in range(loaded):
        load_x_and_scales(operands, ring, 0, pm * S.block_m, pn, first + r, r, shape, S)
    stage = gl.where(loaded == S.stages, 0, loaded)
    phase = gl.where(loaded == S.stages, 0, 1)
    # Not `for`: Triton 3.6 would take a variable that only bounds a loop inside of it for dead, and keep its first value.
    while tile < whole:
        pm, pn = grouped_ordering(tile, tiles_m, tiles_n)
        stage, phase = load_tile(
            operands, WeightOffset(0, 0), ring, pm * S.block_m, pn, first + loaded, first + count, stage, phase, shape, S
        )  # fmt: skip
        loaded -= loaded
        tile += gl.num_programs(0) // S.split
    if S.halve_rest:
        HALVED: gl.constexpr = S.narrower
        has_half, m, pn = _half_tile(shape, S)
        if has_half:
            load_tile(operands, WeightOffset(0, 0), ring, m, pn, 0, shape.k_slabs, stage, phase, shape, HALVED)


@gluon.jit
def _consume(ring, staging, x_params, w_params, outputs, scratch, shape, PANEL: gl.constexpr, S: gl.constexpr):
    """A consumer warpgroup: multiply its panel of all tiles of this program, and write y."""
    tiles_m, tiles_n, whole = _count_tiles(shape, S)
    target = Target(outputs, staging.index(PANEL), None, shape)
    stage = 0
    phase = 0
    first, count = _slabs_of_program(shape, S)
    gdc_wait()
    for tile in range(gl.program_id(0) // S.split, whole, gl.num_programs(0) // S.split):
        pm, pn = grouped_ordering(tile, tiles_m, tiles_n)
        n = (pn * S.panels + PANEL) * 64
        stage, phase = multiply_tile(
            ring, x_params, w_params, target, scratch, tile, pm * S.block_m, n, first, count, stage, phase, PANEL, S
        )  # fmt: skip
    if S.halve_rest:
        HALVED: gl.constexpr = S.narrower
        has_half, m, pn = _half_tile(shape, S)
        if has_half:
            n = (pn * S.panels + PANEL) * 64
            multiply_tile(ring, x_params, w_params, target, scratch, 0, m, n, 0, shape.k_slabs, stage, phase, PANEL, HALVED)
    if outputs.y_tma is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _gemm(
    xd, wd, ad, md, sd, yd, inner, outer, branch_rows, x_params, w_params, out, added, scratch, M, N, n_padded, k_slabs, bounds,
    S: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    PANELS: gl.constexpr = S.panels
    ROWS: gl.constexpr = S.epilogue_rows
    REGISTERS: gl.constexpr = worker_registers(S.registers, 24 if FEWER_REGISTERS else 40)
    operands = Operands(xd, wd, ad, md, sd, inner, outer, branch_rows)
    ring = allocate_ring(operands, S)
    staging = ring.x  # a placeholder that is never written
    if yd is not None:
        staging = gl.allocate_shared_memory(yd.dtype, [PANELS, ROWS, 64], yd.layout)
    shape = Shape(M, N, n_padded, k_slabs)
    outputs = Outputs(out, yd, added[0], added[1], bounds[0], bounds[1])
    if PANELS == 1:
        gl.warp_specialize(
            [
                (_consume, (ring, staging, x_params, w_params, outputs, scratch, shape, 0, S)),
                (_produce, (operands, ring, shape, S)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, staging, x_params, w_params, outputs, scratch, shape, 0, S)),
                (_consume, (ring, staging, x_params, w_params, outputs, scratch, shape, 1, S)),
                (_produce, (operands, ring, shape, S)),
            ],
            [4, 1],
            REGISTERS,
        )
