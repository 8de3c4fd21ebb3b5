"""y [M, N] = x [M, K] . W^T on Hopper's integer tensor cores (W8A8, W4A8), for many rows: TMA, warp specialization, a persistent grid.

The products, their arithmetic and the order of the operands are those of `gemm_int8.py`; an x with an offset is left to it.

A program computes tiles of 64 * PANELS rows of the weight by BM rows of x, one after the other. One warp keeps STAGES records
(128 k) of both operands, and the scales of their blocks, on their way to shared memory; each of PANELS warpgroups multiplies 64 rows
of the weight by all rows of x. Eight nibbles go from shared memory through three instructions into the registers that `wgmma` reads.

Where blocks are scaled, the integers of one half of the rows of x become floats while the wgmma of the other half run (and those of
other warpgroups), as `gemm_int8.py` has it: without I2F. With a scale of 11 bits s, fma(1.5 * 2^23 + C, s, -1.5 * 2^23 * s) is
s * C, rounded once: the product in front is exact.

In blocks of 32 there is one such step for each wgmma, so what bounds them is instructions. There one wgmma more, of constants, starts
the sum at 32 * -128 * -128 = 2^19 >= |C|, which no instruction has to write into 32 registers: the bits of a nonnegative integer p
are the float p * 2^-149. So sums are kept as 2^-38 of themselves, and those under 2^-88 lose bits.
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

# Microseconds of a record of a tile (rows of x, panels) on an H200, by bits; of scaled blocks (0) as they relate.
_RECORD_US = {
    4: {(256, 2): 0.684, (128, 2): 0.387, (64, 2): 0.254},
    8: {(256, 2): 0.720, (128, 2): 0.367, (64, 2): 0.228},
    0: {(128, 2): 0.580, (64, 2): 0.380},
}
_LEAST_M = 17  # fewer rows do not fill a tile: gemm_int8.py reads the weight as fast, with more programs
_FROM_BITS, _START, _UP = gl.constexpr(2.0**111), gl.constexpr(2.0**-19), gl.constexpr(2.0**38)  # 2^(149 - 38), 2^(19 - 38)


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight, a warpgroup each (1 or 2), by block_m of x, `stages` records in flight, `group` tiles
    along M together in the L2 cache; `unroll` records of scaled blocks overlap."""

    block_m: int
    stages: int
    group: int
    programs: int
    panels: int = 2
    unroll: int = 1


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
    """The best guess first: the least time of all waves of tiles."""
    plan, fmt, found = activations.plan(problem), problem.format, []
    record_us = _RECORD_US[fmt.bits if plan.whole else 0]
    if problem.m <= 64:  # one tile of rows
        block_m = 32 if problem.m <= 32 else 64
        record_us = {(block_m, 1): 1.0, (block_m, 2): 1.3}  # as they relate
    # Two records of a tile and all that scales them fit the registers here; 8 bits were faster without.
    unroll = 2 if fmt.bits == 4 and fmt.zero == "none" and plan.whole_row else 1
    for (block_m, panels), us in record_us.items():
        tiles = -(-problem.m // block_m) * -(-problem.n // (64 * panels))
        stages = min(8, (gpu.shared - (32 << 10)) // _stage_bytes(problem, block_m, panels))
        found.append((-(-tiles // gpu.sms) * us, Config(block_m, stages, 8, min(gpu.sms, tiles), panels, unroll)))
    return tuple(config for _, config in sorted(found, key=lambda pair: pair[0]))


def _stage_bytes(problem: Problem, block_m: int, panels: int) -> int:
    """Bytes of a record of both operands, and of the scales and sums of its blocks."""
    plan, fmt = activations.plan(problem), problem.format
    total = 128 * block_m + 1024 * fmt.bits * panels
    if not plan.whole:
        of_row = 4 * ((not plan.whole_row) + (fmt.zero != "none"))
        total += 128 // plan.granule * (of_row * block_m + fmt.scale.itemsize * 64 * panels)
    return total


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
    plan, geo, fmt = x.plan, gpu_tiles.geometry(problem.format, (problem.n, problem.k)), problem.format
    rows = weight.codes.view(torch.int8).view(-1, 128) if fmt.bits == 4 else weight.codes
    scaled = not plan.whole
    run(
        _gemm,
        (config.programs,),
        _descriptor(x.q, config.block_m, 128),
        _descriptor(rows, 8 * fmt.bits, 128),
        _descriptor(x.scale, 1, config.block_m) if scaled and not plan.whole_row else None,
        _descriptor(x.sums, 1, config.block_m) if scaled and weight.zero is not None else None,
        _descriptor(weight.scale, 1, 64) if scaled else None,
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
        problem.n,
        geo.n_padded,
        geo.records,
        BITS=fmt.bits,
        ZERO=ZEROS[fmt.zero],
        WHOLE=plan.whole,
        ROW=plan.whole_row,
        G=plan.granule,
        BM=config.block_m,
        PANELS=config.panels,
        STAGES=config.stages,
        STAGE_BYTES=_stage_bytes(problem, config.block_m, config.panels),
        GROUP=config.group,
        UNROLL=config.unroll,
        CLAMP=epilogue.clamps,
        num_warps=4,
    )


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of tiles of a matrix; rows of 128 bytes are swizzled, as wgmma reads them."""
    width = columns * matrix.itemsize
    operand = matrix.dtype == torch.int8 and width == 128
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128 if operand else 0, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


launch = activations.first(multiply, lambda problem, config: 0)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The buffer after this one, and how often the buffers were filled, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _produce(
    xd, wd, ad, md, sd, buffers, full, empty, M, N, R,
    BITS: gl.constexpr, BM: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, STAGE_BYTES: gl.constexpr,
    GROUP: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    xs, ws, a, m, s, _ = buffers
    tiles = gl.cdiv(N, 64 * PANELS) * gl.cdiv(M, BM)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = in_groups(tile, gl.cdiv(M, BM), gl.cdiv(N, 64 * PANELS), GROUP)
        for r in range(R):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, STAGE_BYTES)
            tma.async_copy_global_to_shared(xd, [pm * BM, r * 128], bar, xs.index(stage))
            for p in gl.static_range(PANELS):
                panel = pn * PANELS + p
                if BITS == 4:
                    tma.async_copy_global_to_shared(wd, [(panel * R + r) * 32, 0], bar, ws.index(stage * PANELS + p))
                else:
                    tma.async_copy_global_to_shared(wd, [panel * 64, r * 128], bar, ws.index(stage * PANELS + p))
            for j in gl.static_range(PIECES):
                row = r * PIECES + j
                if ad is not None:
                    tma.async_copy_global_to_shared(ad, [row, pm * BM], bar, a.index(stage * PIECES + j))
                if md is not None:
                    tma.async_copy_global_to_shared(md, [row, pm * BM], bar, m.index(stage * PIECES + j))
                for p in gl.static_range(PANELS):
                    if sd is not None:
                        at = (stage * PANELS + p) * PIECES + j
                        tma.async_copy_global_to_shared(sd, [row, (pn * PANELS + p) * 64], bar, s.index(at))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _weight(ws, BITS: gl.constexpr, G: gl.constexpr, OPERAND: gl.constexpr):
    """A panel's record in registers, as wgmma takes it: of 8 bits its granules, of 4 bits 16 * (u - 8), of the low and of the high
    nibbles [64, 64] each, or for short blocks of its four planes of 32 k [64, 32]."""
    if BITS == 4 and G == 128:
        LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        b = ws.load(LANES).reshape([2, 4, 8, 4, 2, 2, 4]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([64, 64])
        b = gl.convert_layout(b, OPERAND, assert_trivial=True)
        return gl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    elif BITS == 4:
        WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            PLANES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [ws._reinterpret(gl.int16, [32, 64], WORDS).load(PAIRS)],
            dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=8,
        )  # fmt: skip
        return _plane(p0, OPERAND), _plane(p1, OPERAND), _plane(p2, OPERAND), _plane(p3, OPERAND)
    elif G == 128:
        return (ws.load(OPERAND),)
    elif G == 64:
        return _columns(ws, 0, 64, OPERAND), _columns(ws, 64, 64, OPERAND)
    else:
        return _columns(ws, 0, 32, OPERAND), _columns(ws, 32, 32, OPERAND), _columns(ws, 64, 32, OPERAND), _columns(ws, 96, 32, OPERAND)


@gluon.jit
def _columns(ws, FIRST: gl.constexpr, COUNT: gl.constexpr, OPERAND: gl.constexpr):
    return ws.slice(FIRST, COUNT, dim=1).load(OPERAND)


@gluon.jit
def _plane(plane, OPERAND: gl.constexpr):
    p = plane.reshape([2, 4, 8, 4, 2, 4]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 32])
    return gl.convert_layout(p, OPERAND, assert_trivial=True)


@gluon.jit
def _fresh(like, BIASED: gl.constexpr):
    """Where a block's integers start. Each time of its own: what two wgmma have in common the compiler computes once and copies, and
    lets the second wait for the first."""
    if BIASED:
        return gl.inline_asm_elementwise("// any", "=r,f", [like], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return gl.inline_asm_elementwise("mov.b32 $0, 0x4B400000;", "=r,f", [like], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _start(xt, w, acc, bias, J: gl.constexpr, BITS: gl.constexpr, G: gl.constexpr, BIASED: gl.constexpr):
    """Starts acc, or 2^19 where BIASED, + the integers of granule J of a record of some rows of x; w is what `_weight` gave."""
    if BIASED:
        acc = warpgroup_mma(bias[0], bias[1], acc, use_acc=False, is_async=True)
    if BITS == 8 or G == 32:
        return warpgroup_mma(w[J], xt.slice(J * G, G, dim=1).permute([1, 0]), acc, is_async=True)
    else:
        acc = warpgroup_mma(w[2 * J], xt.slice(G * J, G // 2, dim=1).permute([1, 0]), acc, is_async=True)
        return warpgroup_mma(w[2 * J + 1], xt.slice(G * J + G // 2, G // 2, dim=1).permute([1, 0]), acc, is_async=True)


@gluon.jit
def _sum_whole(
    buffers, full, empty, stage, phase, R, acc,
    W: gl.constexpr, BITS: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Integers of all of K."""
    xs, ws = buffers[0], buffers[1]
    for _ in range(R):
        mbarrier.wait(full.index(stage), phase)
        xt = xs.index(stage)
        if BITS == 4:
            acc = _start(xt, _weight(ws.index(stage * PANELS + W), BITS, 128, OPERAND), acc, (), 0, BITS, 128, False)
        else:  # from shared memory, as one reads it
            acc = warpgroup_mma(ws.index(stage * PANELS + W), xt.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _sum_blocks(
    buffers, full, empty, stage, phase, R, first, zeros,
    W: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr, OPERAND: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """Scaled sums of blocks of 32 or 64, in two halves of the rows of x: while one's wgmma run, the other's integers become floats."""
    xs, ws, a, m, s, constant = buffers
    HALF: gl.constexpr = first.shape[1]
    MMA: gl.constexpr = first.type.layout
    PIECES: gl.constexpr = 128 // G
    GROUPS: gl.constexpr = 2 if BIASED or (BITS == 4 and G > 32) else 1  # of wgmma, a half and a granule
    bias = (gl.full([64, 32], -128, gl.int8, layout=OPERAND), constant.slice(0, HALF, dim=0).slice(0, 32, dim=1).permute([1, 0]))
    left = gl.zeros_like(first).to(gl.float32)
    right = left
    for r in range(R):
        mbarrier.wait(full.index(stage), phase)
        xl = xs.index(stage).slice(0, HALF, dim=0)
        xr = xs.index(stage).slice(HALF, HALF, dim=0)
        w = _weight(ws.index(stage * PANELS + W), BITS, G, OPERAND)
        pl = _start(xl, w, _fresh(left, BIASED), bias, 0, BITS, G, BIASED)
        pr = _start(xr, w, _fresh(left, BIASED), bias, 0, BITS, G, BIASED)
        for j in gl.static_range(PIECES):
            of_w = _of_weight(s.index((stage * PANELS + W) * PIECES + j), zeros, r * PIECES + j, MMA, ZERO)
            of_l = _of_x(a.index(stage * PIECES + j), m.index(stage * PIECES + j), of_w[0], 0, HALF, MMA, ZERO, ROW)
            of_r = _of_x(a.index(stage * PIECES + j), m.index(stage * PIECES + j), of_w[0], HALF, HALF, MMA, ZERO, ROW)
            pl = warpgroup_mma_wait(GROUPS, deps=[pl])
            left = _fold(left, pl, of_w, of_l, BITS, ZERO, ROW, BIASED)
            if j + 1 < PIECES:
                pl = _start(xl, w, pl if BIASED else _fresh(left, BIASED), bias, j + 1, BITS, G, BIASED)
                pr = warpgroup_mma_wait(GROUPS, deps=[pr])
                right = _fold(right, pr, of_w, of_r, BITS, ZERO, ROW, BIASED)
                pr = _start(xr, w, pr if BIASED else _fresh(left, BIASED), bias, j + 1, BITS, G, BIASED)
            else:
                pr = warpgroup_mma_wait(0, deps=[pr])
                mbarrier.arrive(empty.index(stage), count=1)
                right = _fold(right, pr, of_w, of_r, BITS, ZERO, ROW, BIASED)
        stage, phase = _next(stage, phase, STAGES)
    if BIASED:
        left *= _UP
        right *= _UP
    return left, right, stage, phase


@gluon.jit
def _records(
    buffers, full, empty, stage, phase, r, left, right, zeros,
    W: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr, OPERAND: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Adds COUNT records, blocks of their own, in two halves of the rows of x: before the integers of one half become floats, the wgmma
    of the other have started, the next record's too. (Around a loop ptxas would have them wait for each other.)"""
    xs, ws, a, m, s, _ = buffers
    HALF: gl.constexpr = left.shape[1]
    MMA: gl.constexpr = left.type.layout
    GROUPS: gl.constexpr = 2 if BITS == 4 else 1  # of wgmma, a half and a record
    mbarrier.wait(full.index(stage), phase)
    w = _weight(ws.index(stage * PANELS + W), BITS, 128, OPERAND)
    pl = _start(xs.index(stage).slice(0, HALF, dim=0), w, _fresh(left, False), (), 0, BITS, 128, False)
    pr = _start(xs.index(stage).slice(HALF, HALF, dim=0), w, _fresh(left, False), (), 0, BITS, 128, False)
    for i in gl.static_range(COUNT):
        of_w = _of_weight(s.index(stage * PANELS + W), zeros, r + i, MMA, ZERO)
        of_l = _of_x(a.index(stage), m.index(stage), of_w[0], 0, HALF, MMA, ZERO, ROW)
        of_r = _of_x(a.index(stage), m.index(stage), of_w[0], HALF, HALF, MMA, ZERO, ROW)
        done = empty.index(stage)
        stage, phase = _next(stage, phase, STAGES)
        if i + 1 < COUNT:
            mbarrier.wait(full.index(stage), phase)
            w = _weight(ws.index(stage * PANELS + W), BITS, 128, OPERAND)
            pl = warpgroup_mma_wait(GROUPS, deps=[pl])
            left = _fold(left, pl, of_w, of_l, BITS, ZERO, ROW, False)
            pl = _start(xs.index(stage).slice(0, HALF, dim=0), w, _fresh(left, False), (), 0, BITS, 128, False)
            pr = warpgroup_mma_wait(GROUPS, deps=[pr])
            mbarrier.arrive(done, count=1)
            right = _fold(right, pr, of_w, of_r, BITS, ZERO, ROW, False)
            pr = _start(xs.index(stage).slice(HALF, HALF, dim=0), w, _fresh(left, False), (), 0, BITS, 128, False)
        else:
            pl = warpgroup_mma_wait(GROUPS, deps=[pl])
            left = _fold(left, pl, of_w, of_l, BITS, ZERO, ROW, False)
            pr = warpgroup_mma_wait(0, deps=[pr])
            mbarrier.arrive(done, count=1)
            right = _fold(right, pr, of_w, of_r, BITS, ZERO, ROW, False)
    return left, right, stage, phase


@gluon.jit
def _of_weight(s, zeros, row, MMA: gl.constexpr, ZERO: gl.constexpr):
    """Scale and zero (where there is one) of a granule, which is `row` of the zeros: [64, 1]."""
    of_scale = s.permute([1, 0]).load(MMA)
    of_zero = of_scale
    if ZERO != 0:  # lines of 64 bytes are none that TMA writes
        of_zero = gl.expand_dims(gl.load(zeros[0] + row * zeros[2] + zeros[1]), 1)
    return of_scale, of_zero


@gluon.jit
def _of_x(a, m, other, FIRST: gl.constexpr, COUNT: gl.constexpr, MMA: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr):
    """Scale and sums of a granule of COUNT rows: [1, COUNT]; `other` where they are not needed."""
    of_scale = other
    if not ROW:
        of_scale = a.slice(FIRST, COUNT, dim=1).load(MMA)
    of_sums = of_scale
    if ZERO != 0:
        of_sums = m.slice(FIRST, COUNT, dim=1).load(MMA)
    return of_scale, of_sums


@gluon.jit
def _fold(total, p, w, x, BITS: gl.constexpr, ZERO: gl.constexpr, ROW: gl.constexpr, BIASED: gl.constexpr):
    """`gemm_int8.fold` of integers p that start at the bits of 1.5 * 2^23, or BIASED at 2^19, when total is 2^-38 of what it stands
    for; w and x are what `_of_weight` and `_of_x` gave."""
    v = p.to(gl.float32, bitcast=True)
    s = w[0].to(gl.float32)
    if BIASED:
        v = gl.fma(v, s * _FROM_BITS, s * -_START)
    elif ZERO == 0 and w[0].dtype == gl.float16:
        v = gl.fma(v, s, s * -MAGIC)
    else:
        v = _scaled(v - MAGIC, s, w[1], x[1], BITS, ZERO)
    if ROW:
        total += v
    else:
        total += v * x[0]
    # No instruction, but an order: p is read before the next wgmma starts, which then takes its registers.
    return gl.inline_asm_elementwise("// done", "=f,0", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _scaled(v, s, z, m, BITS: gl.constexpr, ZERO: gl.constexpr):
    """Sums v of 16 * (u - 8) or u - 128 times the codes of x, as floats, times the weight's scale, and its zero's term."""
    if ZERO != 0:
        point = gl.full_like(s, 0) if ZERO == 2 else z.to(gl.float32)
        point = (point - 8) * 16 if BITS == 4 else point - 128
        v -= point * m
    v *= s
    if ZERO == 2:
        v += z.to(gl.float32) * (16 if BITS == 4 else 1) * m
    return v


@gluon.jit
def _consume(
    buffers, full, empty, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
    W: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, WHOLE: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CLAMP: gl.constexpr,
    UNROLL: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: panel W of the tile by all of its rows of x."""
    # Two sums of parts of the rows: in turn where blocks are scaled; else so that what finishes them fits the registers.
    PART: gl.constexpr = BM if WHOLE and BM < 256 else BM // 2
    COUNT: gl.constexpr = BM if WHOLE else PART
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(COUNT, 128), 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    tiles = gl.cdiv(N, 64 * PANELS) * gl.cdiv(M, BM)
    first = gl.full([64, COUNT], 0 if WHOLE else MAGIC_BITS, gl.int32, layout=MMA)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = in_groups(tile, gl.cdiv(M, BM), gl.cdiv(N, 64 * PANELS), GROUP)
        n = (pn * PANELS + W) * 64
        m = pm * BM
        to = (out, bias, residual, low, high, M, N)
        own = (sa, sums, scale, zero)
        if WHOLE:
            acc, stage, phase = _sum_whole(buffers, full, empty, stage, phase, R, first, W, BITS, PANELS, STAGES, OPERAND)
            if COUNT == PART:
                _finish(acc, own, to, n, m, NP, BITS, ZERO, True, True, CLAMP)
            else:
                left, right = gl.split(acc.reshape([64, 2, PART]).permute([0, 2, 1]))
                _finish(left, own, to, n, m, NP, BITS, ZERO, True, True, CLAMP)
                _finish(right, own, to, n, m + PART, NP, BITS, ZERO, True, True, CLAMP)
        else:
            zeros = (zero, gl.minimum(n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), NP - 1), NP)
            if G == 128:
                left = gl.zeros_like(first).to(gl.float32)
                right = left
                whole = R // UNROLL * UNROLL
                for r in range(0, whole, UNROLL):
                    left, right, stage, phase = _records(
                        buffers, full, empty, stage, phase, r, left, right, zeros, W, BITS, ZERO, ROW, PANELS, STAGES, OPERAND, UNROLL
                    )
                if UNROLL > 1:
                    for r in range(whole, R):
                        left, right, stage, phase = _records(
                            buffers, full, empty, stage, phase, r, left, right, zeros, W, BITS, ZERO, ROW, PANELS, STAGES, OPERAND, 1
                        )
            else:
                left, right, stage, phase = _sum_blocks(
                    buffers, full, empty, stage, phase, R, first, zeros, W, BITS, ZERO, ROW, G, PANELS, STAGES, OPERAND, BIASED
                )  # fmt: skip
            _finish(left, own, to, n, m, NP, BITS, ZERO, False, ROW, CLAMP)
            _finish(right, own, to, n, m + PART, NP, BITS, ZERO, False, ROW, CLAMP)


@gluon.jit
def _finish(
    total, own, to, first_n, first_m, NP,
    BITS: gl.constexpr, ZERO: gl.constexpr, WHOLE: gl.constexpr, ROW: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """Integers of all of K, or scaled sums of blocks, [64, BM] -> y."""
    sa, sums, scale, zero = own
    out, bias, residual, low, high, M, N = to
    BM: gl.constexpr = total.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 32])
    total = gl.convert_layout(total, MMA, assert_trivial=True)
    rm = first_m + gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    if WHOLE:
        rn = gl.minimum(first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), NP - 1)
        s = gl.expand_dims(gl.load(scale + rn).to(gl.float32), 1)
        z = s
        m = s
        if ZERO != 0:
            z = gl.expand_dims(gl.load(zero + rn), 1)
            m = gl.expand_dims(gl.load(sums + rm), 0)
        total = _scaled(total.to(gl.float32), s, z, m, BITS, ZERO)
    if BITS == 4:
        total *= 0.0625
    if ROW:
        total *= gl.expand_dims(gl.load(sa + rm), 0)
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
    xd, wd, ad, md, sd, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
    BITS: gl.constexpr, ZERO: gl.constexpr, WHOLE: gl.constexpr, ROW: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, STAGE_BYTES: gl.constexpr, GROUP: gl.constexpr, CLAMP: gl.constexpr,
    UNROLL: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = 128 // G
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BM, 128], xd.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES * PANELS, 8 * BITS, 128], wd.layout)
    a = xs  # what is not there is not read
    m = xs
    s = xs
    if ad is not None:
        a = gl.allocate_shared_memory(gl.float32, [STAGES * PIECES, 1, BM], ad.layout)
    if md is not None:
        m = gl.allocate_shared_memory(gl.float32, [STAGES * PIECES, 1, BM], md.layout)
    if sd is not None:
        s = gl.allocate_shared_memory(scale.dtype.element_ty, [STAGES * PANELS * PIECES, 1, 64], sd.layout)
    constant = xs.index(0)
    BIASED: gl.constexpr = not WHOLE and G == 32 and ZERO == 0 and scale.dtype.element_ty == gl.float16
    if BIASED:
        constant = gl.allocate_shared_memory(gl.int8, [BM, 32], gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=8, rank=2))
        constant.store(gl.full([BM, 32], -128, gl.int8, layout=gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])))
    buffers = (xs, ws, a, m, s, constant)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PANELS)
    fence_async_shared()
    if PANELS == 1:
        gl.warp_specialize(
            [
                (_consume, (buffers, full, empty, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
                            0, BITS, ZERO, WHOLE, ROW, G, BM, PANELS, STAGES, GROUP, CLAMP, UNROLL, BIASED)),
                (_produce, (xd, wd, ad, md, sd, buffers, full, empty, M, N, R, BITS, BM, PANELS, STAGES, STAGE_BYTES, GROUP, PIECES)),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, full, empty, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
                            0, BITS, ZERO, WHOLE, ROW, G, BM, PANELS, STAGES, GROUP, CLAMP, UNROLL, BIASED)),
                (_consume, (buffers, full, empty, sa, sums, scale, zero, out, bias, residual, low, high, M, N, NP, R,
                            1, BITS, ZERO, WHOLE, ROW, G, BM, PANELS, STAGES, GROUP, CLAMP, UNROLL, BIASED)),
                (_produce, (xd, wd, ad, md, sd, buffers, full, empty, M, N, R, BITS, BM, PANELS, STAGES, STAGE_BYTES, GROUP, PIECES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
