"""y [M, N] = x [M, K] . W^T on Hopper's integer tensor cores (W8A8, W4A8), for many rows: TMA, warp specialization, a persistent grid.

The products, their arithmetic and the order of the operands are those of `gemm_int8.py`; an x with an offset is left to it.

A program computes tiles of 128 rows of the weight by BM rows of x, one after the other. One warp keeps STAGES records (128 k) of
both operands on their way to shared memory; two warpgroups multiply 64 rows of the weight each. Eight nibbles go from shared
memory through three instructions into the registers that `wgmma` reads.

Where blocks are scaled, each record's sum C of integers becomes a float in its own time, while the other warpgroup's wgmma runs.
I2F has a sixteenth of the rate of additions, so it is not used: the sum starts at the bits of 1.5 * 2^23, which is then a float
1.5 * 2^23 + C as long as |C| < 2^22. That holds for blocks of 128: 127 * 128 * 128 < 2^21.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfbyte.kernels.gpu import activations, gemm_int8
from halfbyte.kernels.gpu.activations import Quantized
from halfbyte.kernels.gpu.epilogue import Epilogue, finish
from halfbyte.kernels.gpu.launch import run, workspace
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_LEAST_M = 65  # fewer rows do not fill a tile: gemm_int8.py reads the weight as fast, with more programs
_MAGIC = gl.constexpr(12582912.0)
_MAGIC_BITS = gl.constexpr(0x4B400000)
_HALVES = gl.constexpr(gemm_int8._HALVES.value)
_PLANES = gl.constexpr(gemm_int8._PLANES.value)


@dataclass(frozen=True)
class Config:
    """Tiles of 128 rows of the weight by block_m of x, `stages` records in flight, `group` tiles along M together in the L2 cache."""

    block_m: int
    stages: int
    group: int
    programs: int


def supports(problem: Problem, gpu: Gpu) -> str | None:
    if reason := gemm_int8.supports(problem, gpu):
        return reason
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    if problem.m < _LEAST_M:
        return f"{problem.m} rows do not fill its tiles: from {_LEAST_M} on"
    plan = activations.plan(problem)
    if plan.with_offset:
        return "an x with an offset takes the sums of the weight's codes, which it does not read"
    if not plan.whole and plan.padded > gpu_tiles.RECORD:
        return f"blocks of {plan.padded} are longer than the {gpu_tiles.RECORD} whose sums are exact as float32"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    plan = activations.plan(problem)
    block_m = 256 if plan.whole and problem.m > 1024 else 128
    weight = 128 * 128 * problem.format.bits // 8
    stages = min(8, (gpu.shared - (4 << 10)) // (block_m * 128 + weight))
    tiles = -(-problem.m // block_m) * -(-problem.n // 128)
    return (Config(block_m, stages, 8, min(gpu.sms, tiles)),)


def beside(problem: Problem, config: Config) -> int:
    return 0


def launch(
    problem: Problem,
    config: Config,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
) -> None:
    """x [M, K], codes, scale and zero as `gpu_tiles.views` gives them, out [M, N]."""
    plan = activations.plan(problem)
    memory = workspace(out.device, plan.nbytes)
    quantized = activations.quantize_activation(x, plan, memory)
    multiply(problem, config, quantized, codes, scale, zero, out, epilogue, memory)


def multiply(
    problem: Problem,
    config: Config,
    x: Quantized,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor,
) -> None:
    """The product alone."""
    plan, geo = x.plan, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    rows = codes.view(torch.int8).view(-1, 128) if problem.format.bits == 4 else codes
    box = [32 if problem.format.bits == 4 else 128, 128]
    run(
        _gemm,
        (config.programs,),
        TensorDescriptor.from_tensor(x.q, [config.block_m, 128], layout),
        TensorDescriptor.from_tensor(rows, box, layout),
        x.scale,
        x.sums,
        scale,
        scale if zero is None else zero,
        out,
        epilogue.bias,
        epilogue.residual,
        epilogue.low,
        epilogue.high,
        plan.m,
        problem.n,
        geo.n_padded,
        geo.records,
        BITS=problem.format.bits,
        ZERO=gemm_int8._ZEROS[problem.format.zero],
        WHOLE=plan.whole,
        ROW=plan.whole_row,
        G=plan.granule,
        BM=config.block_m,
        STAGES=config.stages,
        GROUP=config.group,
        CLAMP=epilogue.clamps,
        num_warps=4,
    )


@gluon.jit
def _tile(tile, M, N, BM: gl.constexpr, GROUP: gl.constexpr):
    """Tiles in an order in which GROUP tiles along M follow each other for each tile along N."""
    tiles_n = gl.cdiv(N, 128)
    tiles_m = gl.cdiv(M, BM)
    width = GROUP * tiles_n
    first = (tile // width) * GROUP
    size = gl.minimum(tiles_m - first, GROUP)
    return first + (tile % width) % size, (tile % width) // size


@gluon.jit
def _produce(xd, wd, xs, ws, full, empty, M, N, R, BITS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    tiles = gl.cdiv(N, 128) * gl.cdiv(M, BM)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = _tile(tile, M, N, BM, GROUP)
        for r in range(R):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BM * 128 + 128 * 16 * BITS)
            tma.async_copy_global_to_shared(xd, [pm * BM, r * 128], full.index(stage), xs.index(stage))
            if BITS == 4:
                panel = pn * 2
                tma.async_copy_global_to_shared(wd, [(panel * R + r) * 32, 0], full.index(stage), ws.index(stage).slice(0, 32, dim=0))
                tma.async_copy_global_to_shared(wd, [((panel + 1) * R + r) * 32, 0], full.index(stage), ws.index(stage).slice(32, 32, dim=0))
            else:
                tma.async_copy_global_to_shared(wd, [pn * 128, r * 128], full.index(stage), ws.index(stage))
            step += 1


@gluon.jit
def _halves(ws, HALF: gl.constexpr, OPERAND: gl.constexpr):
    """A record of a panel -> 16 * (u - 8) of its low and of its high nibbles, [64, 64] each, as wgmma takes them from registers."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    b = ws.slice(HALF * 32, 32, dim=0).load(LANES)
    b = b.reshape([2, 4, 8, 4, 2, 2, 4]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([64, 64])
    b = gl.convert_layout(b, OPERAND, assert_trivial=True)
    return gl.inline_asm_elementwise(_HALVES, "=r,=r,r", [b], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def _fold(acc, p, s, z, sa, sm, BITS: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr):
    """`gemm_int8.fold` of integers that start at the bits of 1.5 * 2^23."""
    v = p.to(gl.float32, bitcast=True) - _MAGIC
    if ZERO != 0:
        point = (z.to(gl.float32) - 8) * 16 if BITS == 4 else z.to(gl.float32) - 128
        if ZERO == 2:
            point = gl.full_like(point, -128)
        v -= gl.expand_dims(point, 1) * gl.expand_dims(sm, 0)
    v *= gl.expand_dims(s.to(gl.float32), 1)
    if ZERO == 2:
        v += gl.expand_dims(z.to(gl.float32) * (16 if BITS == 4 else 1), 1) * gl.expand_dims(sm, 0)
    if ROW:
        return acc + v
    else:
        return acc + v * gl.expand_dims(sa, 0)


@gluon.jit
def _consume(
    xs, ws, full, empty, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
    HALF: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, WHOLE: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM if BM < 128 else 128, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    tiles = gl.cdiv(N, 128) * gl.cdiv(M, BM)
    start = gl.full([64, BM], 0 if WHOLE else _MAGIC_BITS, gl.int32, layout=MMA)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = _tile(tile, M, N, BM, GROUP)
        first_n = pn * 128 + HALF * 64
        rn = gl.minimum(first_n + gl.arange(0, 64, layout=ROWS), NP - 1)
        rm = gl.minimum(pm * BM + gl.arange(0, BM, layout=COLUMNS), M - 1)
        acc = start
        if not WHOLE:
            total = gl.zeros([64, BM], gl.float32, layout=MMA)
            s = gl.load(scale + rn)
            z = s
            if ZERO != 0:
                z = gl.load(zero + rn)
        for r in range(R):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            xt = xs.index(stage)
            before = acc if WHOLE else start
            if BITS == 4:
                w0, w1 = _halves(ws.index(stage), HALF, OPERAND)
                p = warpgroup_mma(w0, xt.slice(0, 64, dim=1).permute([1, 0]), before, is_async=True)
                p = warpgroup_mma(w1, xt.slice(64, 64, dim=1).permute([1, 0]), p, is_async=True)
            else:
                p = warpgroup_mma(ws.index(stage).slice(HALF * 64, 64, dim=0), xt.permute([1, 0]), before, is_async=True)
            if not WHOLE:
                # The scales of x are needed after the wgmma, those of the weight one record later.
                a = s
                if not ROW:
                    a = gl.load(sa + r * M + rm)
                m = a
                if ZERO != 0:
                    m = gl.load(sums + r * M + rm)
                following = gl.minimum(r + 1, R - 1) * NP
                next_s = gl.load(scale + following + rn)
                next_z = next_s
                if ZERO != 0:
                    next_z = gl.load(zero + following + rn)
            acc = warpgroup_mma_wait(0, deps=[p])
            mbarrier.arrive(empty.index(stage), count=1)
            if not WHOLE:
                total = _fold(total, acc, s, z, a, m, BITS, ZERO, ROW)
                s = next_s
                z = next_z
            step += 1
        if WHOLE:
            total = acc.to(gl.float32)
            if ZERO != 0:
                z = gl.load(zero + rn).to(gl.float32)
                point = (z - 8) * 16 if BITS == 4 else z - 128
                if ZERO == 2:
                    point = gl.full_like(point, -128)
                m = gl.load(sums + rm)
                total -= gl.expand_dims(point, 1) * gl.expand_dims(m, 0)
            total *= gl.expand_dims(gl.load(scale + rn).to(gl.float32), 1)
            if ZERO == 2:
                total += gl.expand_dims(z * (16 if BITS == 4 else 1), 1) * gl.expand_dims(m, 0)
        if BITS == 4:
            total *= 0.0625
        if ROW:
            total *= gl.expand_dims(gl.load(sa + rm), 0)
        _write(total, out, bias, residual, first_n, pm * BM, M, N, low, high, BM, CLAMP)


@gluon.jit
def _write(total, out, bias, residual, first_n, first_m, M, N, low, high, BM: gl.constexpr, CLAMP: gl.constexpr):
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    rn = first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    rm = first_m + gl.arange(0, BM, layout=gl.SliceLayout(0, OUT))
    dtype: gl.constexpr = out.dtype.element_ty
    mask = gl.expand_dims(rn < N, 1) & gl.expand_dims(rm < M, 0)
    at = gl.expand_dims(rm, 0).to(gl.int64) * N + gl.expand_dims(rn, 1)
    if bias is None and residual is None and not CLAMP:
        y = gl.convert_layout(total.to(dtype), OUT)
    else:
        y = finish(gl.convert_layout(total, OUT), (bias, residual), rn, rm, N, low, high, CLAMP, dtype, mask)
    gl.store(out + at, y, mask=mask)


@gluon.jit(do_not_specialize=["M"])
def _gemm(
    xd, wd, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
    BITS: gl.constexpr, ZERO: gl.constexpr, WHOLE: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, 128], xd.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES, 16 * BITS, 128], wd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (xs, ws, full, empty, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
                        0, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP)),
            (_consume, (xs, ws, full, empty, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
                        1, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP)),
            (_produce, (xd, wd, xs, ws, full, empty, M, N, R, BITS, BM, STAGES, GROUP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
