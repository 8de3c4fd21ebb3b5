"""y [M, N] = x [M, K] . W^T on Hopper's integer tensor cores (W8A8, W4A8), for many rows: TMA, warp specialization, a persistent grid.

The products, their arithmetic and the order of the operands are those of `gemm_int8.py`; an x with an offset is left to it.

A program computes tiles of 128 rows of the weight by BM rows of x, one after the other. One warp keeps STAGES records (128 k) of
both operands on their way to shared memory; warpgroups multiply 64 rows of the weight each, two by all of BM or four by half of
it. Eight nibbles go from shared memory through three instructions into the registers that `wgmma` reads.

Where blocks are scaled, the integers of a record (of each block of it, if those are shorter) become floats while other warpgroups'
wgmma run, as `gemm_int8.py` has it: without I2F. With a scale of 11 bits s, fma(1.5 * 2^23 + C, s, -1.5 * 2^23 * s) is s * C,
rounded once: the product in front is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
from halfbyte.kernels.gpu.activations import ZEROS, Quantized
from halfbyte.kernels.gpu.arithmetic import MAGIC, MAGIC_BITS, in_groups
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.gemm_int8 import HALVES, PLANES
from halfbyte.kernels.gpu.launch import run
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_LEAST_M = 65  # fewer rows do not fill a tile: gemm_int8.py reads the weight as fast, with more programs


@dataclass(frozen=True)
class Config:
    """Tiles of 128 rows of the weight by block_m of x, `stages` records in flight, `group` tiles along M together in the L2 cache;
    `consumers` (2 or 4) warpgroups multiply and scale."""

    block_m: int
    stages: int
    group: int
    programs: int
    consumers: int


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
    weight = 128 * 128 * problem.format.bits // 8

    def cost(block_m: int) -> float:
        """Time of all waves: a tile takes as long as its rows, and a little more, the more weight it reads."""
        tiles = -(-problem.m // block_m) * -(-problem.n // 128)
        return -(-tiles // gpu.sms) * (block_m + weight / 700)

    sizes = (128, 64, 256) if plan.whole else (128, 64) if plan.granule == gpu_tiles.RECORD else (64,)
    block_m = min(sizes, key=lambda size: cost(size) * (1 if size == 128 else 1.05))
    stages = min(8, (gpu.shared - (32 << 10)) // (block_m * 128 + weight))
    tiles = -(-problem.m // block_m) * -(-problem.n // 128)
    # Four warpgroups hide more of each other's waits, where what they keep fits their registers.
    crowded = problem.format.zero != "none" or (problem.format.bits == 4 and not plan.whole_row)
    return (Config(block_m, stages, 8, min(gpu.sms, tiles), 2 if plan.whole or crowded else 4),)


def beside(problem: Problem, config: Config) -> int:
    return 0


def multiply(
    problem: Problem,
    config: Config,
    x: Quantized,
    weight: gpu_tiles.Views,
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor,
) -> None:
    """The product alone."""
    plan, geo = x.plan, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    rows = weight.codes.view(torch.int8).view(-1, 128) if problem.format.bits == 4 else weight.codes
    box = [32 if problem.format.bits == 4 else 128, 128]
    run(
        _gemm,
        (config.programs,),
        TensorDescriptor.from_tensor(x.q, [config.block_m, 128], layout),
        TensorDescriptor.from_tensor(rows, box, layout),
        x.scale,
        x.sums,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        out,
        epilogue.bias,
        epilogue.residual,
        epilogue.low,
        epilogue.high,
        plan.m,
        plan.columns,
        problem.n,
        geo.n_padded,
        geo.records,
        BITS=problem.format.bits,
        ZERO=ZEROS[problem.format.zero],
        WHOLE=plan.whole,
        ROW=plan.whole_row,
        G=plan.granule,
        BM=config.block_m,
        STAGES=config.stages,
        GROUP=config.group,
        CONSUMERS=config.consumers,
        CLAMP=epilogue.clamps,
        num_warps=4,
    )


launch = activations.first(multiply, beside)


@gluon.jit
def _produce(xd, wd, xs, ws, full, empty, M, N, R, BITS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    tiles = gl.cdiv(N, 128) * gl.cdiv(M, BM)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = in_groups(tile, gl.cdiv(M, BM), gl.cdiv(N, 128), GROUP)
        for r in range(R):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BM * 128 + 128 * 16 * BITS)
            tma.async_copy_global_to_shared(xd, [pm * BM, r * 128], full.index(stage), xs.index(stage))
            if BITS == 4:
                panel = pn * 2
                tma.async_copy_global_to_shared(wd, [(panel * R + r) * 32, 0], full.index(stage), ws.index(stage).slice(0, 32, dim=0))
                tma.async_copy_global_to_shared(
                    wd, [((panel + 1) * R + r) * 32, 0], full.index(stage), ws.index(stage).slice(32, 32, dim=0)
                )
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
    return gl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def _planes(ws, HALF: gl.constexpr, OPERAND: gl.constexpr):
    """A record of a panel -> 16 * (u - 8) of its four planes of 32 k, [64, 32] each."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    words = ws.slice(HALF * 32, 32, dim=0).load(LANES)
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        PLANES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words], dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=8
    )
    return _operand(p0, OPERAND), _operand(p1, OPERAND), _operand(p2, OPERAND), _operand(p3, OPERAND)


@gluon.jit
def _operand(plane, OPERAND: gl.constexpr):
    p = plane.reshape([2, 4, 8, 4, 2, 4]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 32])
    return gl.convert_layout(p, OPERAND, assert_trivial=True)


@gluon.jit
def _fold(total, p, w, x, BITS: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr):
    """`gemm_int8.fold` of integers p that start at the bits of 1.5 * 2^23; w and x are what `_of_weight` and `_of_x` gave."""
    v = p.to(gl.float32, bitcast=True)
    s = w[0].to(gl.float32)
    if ZERO == 0 and w[0].dtype == gl.float16:
        # 1.5 * 2^23 times a scale of 11 bits is exact (and no overflow), and so is the subtraction in front of the rounding.
        v = gl.fma(v, gl.expand_dims(s, 1), gl.expand_dims(s * -MAGIC, 1))
    else:
        v -= MAGIC
        v = _scaled(v, s, w[1], x[1], BITS, ZERO)
    if ROW:
        return total + v
    else:
        return total + v * gl.expand_dims(x[0], 0)


@gluon.jit
def _scaled(v, s, z, m, BITS: gl.constexpr, ZERO: gl.constexpr):
    """Sums v of 16 * (u - 8) or u - 128 times the codes of x, as floats, times the weight's scale, and its zero's term."""
    if ZERO != 0:
        point = gl.full_like(s, 0) if ZERO == 2 else z.to(gl.float32)
        point = (point - 8) * 16 if BITS == 4 else point - 128
        v -= gl.expand_dims(point, 1) * gl.expand_dims(m, 0)
    v *= gl.expand_dims(s, 1)
    if ZERO == 2:
        v += gl.expand_dims(z.to(gl.float32) * (16 if BITS == 4 else 1), 1) * gl.expand_dims(m, 0)
    return v


@gluon.jit
def _of_weight(scales, i, rn, NP, ZERO: gl.constexpr):
    """Scale and zero (where there is one) of granule i."""
    s = gl.load(scales[0] + i * NP + rn)
    z = s
    if ZERO != 0:
        z = gl.load(scales[1] + i * NP + rn)
    return s, z


@gluon.jit
def _of_x(scales, i, other, rm, MP, ZERO: gl.constexpr, ROW: gl.constexpr):
    """Scale and sums of granule i; `other` where they are not needed."""
    a = other
    if not ROW:
        a = gl.load(scales[2] + i * MP + rm)
    m = a
    if ZERO != 0:
        m = gl.load(scales[3] + i * MP + rm)
    return a, m


@gluon.jit
def _sum_whole(xs, ws, full, empty, step, R, start, W: gl.constexpr, BITS: gl.constexpr, STAGES: gl.constexpr, OPERAND: gl.constexpr):
    """Integers of all of K."""
    acc = start
    for _ in range(R):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        acc = _record(_rows(xs.index(stage), W, start.shape[1]), _weight(ws.index(stage), W % 2, BITS, OPERAND), acc, BITS)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return acc


@gluon.jit
def _record(xt, w, acc, BITS: gl.constexpr):
    """Starts acc + the integers of a record; w is what `_weight` gave."""
    if BITS == 4:
        acc = warpgroup_mma(w[0], xt.slice(0, 64, dim=1).permute([1, 0]), acc, is_async=True)
        return warpgroup_mma(w[1], xt.slice(64, 64, dim=1).permute([1, 0]), acc, is_async=True)
    else:
        return warpgroup_mma(w[0], xt.permute([1, 0]), acc, is_async=True)


@gluon.jit
def _weight(wt, HALF: gl.constexpr, BITS: gl.constexpr, OPERAND: gl.constexpr):
    """The weight's operand of a record, in registers or in shared memory."""
    if BITS == 4:
        return _halves(wt, HALF, OPERAND)
    else:
        return (wt.slice(HALF * 64, 64, dim=0),)


@gluon.jit
def _sum_records(
    xs, ws, full, empty, step, R, start, scales, rn, rm, NP, MP,
    W: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr, STAGES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Scaled sums of blocks of a record each."""
    total = gl.zeros_like(start).to(gl.float32)
    w = _of_weight(scales, 0, rn, NP, ZERO)
    for r in range(R):
        # Scales come from afar: those of the weight, which others may not have read before, a record ahead.
        x = _of_x(scales, r, w[0], rm, MP, ZERO, ROW)
        following = _of_weight(scales, gl.minimum(r + 1, R - 1), rn, NP, ZERO)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        p = _record(_rows(xs.index(stage), W, start.shape[1]), _weight(ws.index(stage), W % 2, BITS, OPERAND), start, BITS)
        p = warpgroup_mma_wait(0, deps=[p])
        mbarrier.arrive(empty.index(stage), count=1)
        total = _fold(total, p, w, x, BITS, ZERO, ROW)
        w = following
        step += 1
    return total


@gluon.jit
def _piece(xt, w, start, J: gl.constexpr, BITS: gl.constexpr, G: gl.constexpr):
    """Starts the integers of granule J of a record."""
    if BITS == 8:
        return warpgroup_mma(w[0].slice(J * G, G, dim=1), xt.slice(J * G, G, dim=1).permute([1, 0]), start, is_async=True)
    elif G == 64:
        p = warpgroup_mma(w[2 * J], xt.slice(64 * J, 32, dim=1).permute([1, 0]), start, is_async=True)
        return warpgroup_mma(w[2 * J + 1], xt.slice(64 * J + 32, 32, dim=1).permute([1, 0]), p, is_async=True)
    else:
        return warpgroup_mma(w[J], xt.slice(32 * J, 32, dim=1).permute([1, 0]), start, is_async=True)


@gluon.jit
def _rows(xt, W: gl.constexpr, COUNT: gl.constexpr):
    """The rows of x that warpgroup W multiplies."""
    return xt.slice(W // 2 * COUNT, COUNT, dim=0)


@gluon.jit
def _sum_pieces(
    xs, ws, full, empty, step, R, start, scales, rn, rm, NP, MP,
    W: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Scaled sums of blocks of 32 or 64."""
    PIECES: gl.constexpr = 128 // G
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    total = gl.zeros_like(start).to(gl.float32)
    for r in range(R):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        xt = _rows(xs.index(stage), W, start.shape[1])
        if BITS == 4:
            q = _planes(ws.index(stage)._reinterpret(gl.int16, [64, 64], WORDS), W % 2, OPERAND)
        else:
            q = _weight(ws.index(stage), W % 2, BITS, OPERAND)
        for j in gl.static_range(PIECES):
            p = _piece(xt, q, start, j, BITS, G)
            w = _of_weight(scales, r * PIECES + j, rn, NP, ZERO)
            x = _of_x(scales, r * PIECES + j, w[0], rm, MP, ZERO, ROW)
            p = warpgroup_mma_wait(0, deps=[p])
            if j + 1 == PIECES:
                mbarrier.arrive(empty.index(stage), count=1)
            total = _fold(total, p, w, x, BITS, ZERO, ROW)
        step += 1
    return total


@gluon.jit
def _consume(
    xs, ws, full, empty, scales, out, bias, residual, low, high, M, MP, N, NP, R,
    W: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, WHOLE: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CLAMP: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: panel W % 2 of the tile, and part W // 2 of its rows of x."""
    COLUMNS: gl.constexpr = BM * 2 // CONSUMERS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS if COLUMNS < 128 else 128, 32]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    tiles = gl.cdiv(N, 128) * gl.cdiv(M, BM)
    start = gl.full([64, COLUMNS], 0 if WHOLE else MAGIC_BITS, gl.int32, layout=MMA)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = in_groups(tile, gl.cdiv(M, BM), gl.cdiv(N, 128), GROUP)
        first_n = pn * 128 + W % 2 * 64
        first_m = pm * BM + W // 2 * COLUMNS
        to = (out, bias, residual, low, high, M, N)
        if WHOLE:
            acc = _sum_whole(xs, ws, full, empty, step, R, start, W, BITS, STAGES, OPERAND)
            if COLUMNS == 256:  # in two halves, so that what they are multiplied by fits the registers
                left, right = gl.split(acc.reshape([64, 2, 128]).permute([0, 2, 1]))
                _finish_whole(left, scales, to, first_n, first_m, NP, MP, BITS, ZERO, 128, CLAMP)
                _finish_whole(right, scales, to, first_n, first_m + 128, NP, MP, BITS, ZERO, 128, CLAMP)
            else:
                _finish_whole(acc, scales, to, first_n, first_m, NP, MP, BITS, ZERO, COLUMNS, CLAMP)
        else:
            rn = gl.minimum(first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), NP - 1)
            rm = first_m + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
            if G == 128:
                total = _sum_records(xs, ws, full, empty, step, R, start, scales, rn, rm, NP, MP, W, BITS, ZERO, ROW, STAGES, OPERAND)
            else:
                total = _sum_pieces(xs, ws, full, empty, step, R, start, scales, rn, rm, NP, MP, W, BITS, ZERO, ROW, G, STAGES, OPERAND)
            if BITS == 4:
                total *= 0.0625
            if ROW:
                total *= gl.expand_dims(gl.load(scales[2] + rm), 0)
            _write(total, to, first_n, first_m, COLUMNS, CLAMP)
        step += R


@gluon.jit
def _finish_whole(
    acc, scales, to, first_n, first_m, NP, MP, BITS: gl.constexpr, ZERO: gl.constexpr, BM: gl.constexpr, CLAMP: gl.constexpr
):  # fmt: skip
    """Integers of all of K [64, BM] -> y."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 32])
    acc = gl.convert_layout(acc, MMA, assert_trivial=True)
    rn = gl.minimum(first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), NP - 1)
    rm = first_m + gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    s, z = _of_weight(scales, 0, rn, NP, ZERO)
    a, m = _of_x(scales, 0, s, rm, MP, ZERO, False)
    total = _scaled(acc.to(gl.float32), s.to(gl.float32), z, m, BITS, ZERO)
    if BITS == 4:
        a *= 0.0625
    _write(total * gl.expand_dims(a, 0), to, first_n, first_m, BM, CLAMP)


@gluon.jit
def _write(total, to, first_n, first_m, BM: gl.constexpr, CLAMP: gl.constexpr):
    out, bias, residual, low, high, M, N = to
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
    xd, wd, sa, sums, scale, zero, out, bias, residual, low, high, M, MP, N, NP, R,
    BITS: gl.constexpr, ZERO: gl.constexpr, WHOLE: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CLAMP: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, 128], xd.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES, 16 * BITS, 128], wd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    scales = (scale, zero, sa, sums)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (xs, ws, full, empty, scales, out, bias, residual, low, high, M, MP, N, NP, R,
                            0, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP, 2)),
                (_consume, (xs, ws, full, empty, scales, out, bias, residual, low, high, M, MP, N, NP, R,
                            1, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP, 2)),
                (_produce, (xd, wd, xs, ws, full, empty, M, N, R, BITS, BM, STAGES, GROUP)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (xs, ws, full, empty, scales, out, bias, residual, low, high, M, MP, N, NP, R,
                            0, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP, 4)),
                (_consume, (xs, ws, full, empty, scales, out, bias, residual, low, high, M, MP, N, NP, R,
                            1, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP, 4)),
                (_consume, (xs, ws, full, empty, scales, out, bias, residual, low, high, M, MP, N, NP, R,
                            2, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP, 4)),
                (_consume, (xs, ws, full, empty, scales, out, bias, residual, low, high, M, MP, N, NP, R,
                            3, BITS, ZERO, WHOLE, ROW, G, BM, STAGES, GROUP, CLAMP, 4)),
                (_produce, (xd, wd, xs, ws, full, empty, M, N, R, BITS, BM, STAGES, GROUP)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )  # fmt: skip
