"""y [M, N] = x [M, K] . W^T on Hopper's integer tensor cores (W8A8, W4A8), for many rows: TMA, warp specialization, a persistent grid.

The products, their arithmetic and the order of the operands are those of `gemm_int8.py`; an x with an offset is left to it.

A program computes tiles of 64 * PANELS rows of the weight by BM rows of x, one after the other. One warp keeps STAGES records
(128 k) of both operands, and the scales of their blocks, on their way to shared memory, the weight's first before the kernel that
quantizes x has ended; each of PANELS warpgroups multiplies 64 rows of the weight by all rows of x. Eight nibbles go from shared memory
through three instructions into the registers that `wgmma` reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import activations, gemm_int8
from halfbyte.kernels.gpu.activations import ZEROS, Quantized
from halfbyte.kernels.gpu.arithmetic import INTERPRETED, MAGIC_BITS, in_groups
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.int8_hopper_tile import UP, add_chain, add_records, next_stage, scaled, sum_blocks, sum_whole
from halfbyte.kernels.gpu.launch import run
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_LEAST_M, _LEAST_SCALED = 9, 17  # fewer rows do not fill a tile; of blocks gemm_int8.py has more programs


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight, a warpgroup each (1 or 2), by block_m of x, `stages` records in flight, `group` tiles
    along M together in the L2 cache; `unroll` records of scaled blocks overlap (4: are one chain); `early`: the weight is on its way while
    x is quantized."""

    block_m: int
    stages: int
    group: int
    programs: int
    panels: int = 2
    unroll: int = 1
    early: bool = False


def supports(problem: Problem, gpu: Gpu) -> str | None:
    if reason := gemm_int8.supports(problem, gpu):
        return reason
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    plan = activations.plan(problem)
    if problem.m < (least := _LEAST_M if plan.whole else _LEAST_SCALED):
        return f"{problem.m} rows do not fill its tiles: from {least} on"
    if plan.with_offset:
        return "an x with an offset takes the sums of the weight's codes, which it does not read"
    if not plan.whole and plan.padded > gpu_tiles.RECORD:
        return f"blocks of {plan.padded} are longer than the {gpu_tiles.RECORD} whose sums are exact as float32"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first: the least time of all waves of tiles."""
    plan, fmt, found = activations.plan(problem), problem.format, []
    fits = gpu_tiles.geometry(fmt, (problem.n, problem.k)).nbytes <= gpu.l2
    if chains(problem):
        unroll = 4
    else:  # two records of a tile and all that scales them fit the registers here; 8 bits were faster without
        unroll = 2 if fmt.bits == 4 and fmt.zero == "none" and plan.whole_row else 1
    for (block_m, panels), us in _record_us(problem, plan.whole).items():
        rows = -(-problem.m // block_m)
        tiles = rows * -(-problem.n // (64 * panels))
        waves = -(-tiles // gpu.sms)
        stages = min(8, (gpu.shared - (32 << 10)) // _stage_bytes(problem, block_m, panels))
        # Programs that start one after the other ask for the same weights at different times.
        early = rows == 1 or (rows == 2 and fits)
        found.append((waves * us, Config(block_m, stages, 8, -(-tiles // waves), panels, unroll, early)))
    return tuple(config for _, config in sorted(found, key=lambda pair: pair[0]))


def chains(problem: Problem) -> bool:
    """Whether sums of blocks may lose what `add_chain` makes them lose."""
    plan, fmt = activations.plan(problem), problem.format
    return plan.whole_row and plan.granule == gpu_tiles.RECORD and fmt.scale == torch.float16 and problem.dtype != torch.float32


def _record_us(problem: Problem, whole: bool) -> dict[tuple[int, int], float]:
    """Microseconds of a record of a tile (rows of x, panels) on an H200; of few rows as they relate."""
    bits = problem.format.bits
    if problem.m <= 32:
        return {(16 if problem.m <= 16 and whole else 32, panels): us for panels, us in ((1, 1.0), (2, 1.3))}
    if problem.m <= 64:
        return {(64, 1): 1.0, (64, 2): 1.3, (32, 2): 0.98 if bits == 4 and whole else 1.03}
    if not whole:
        return {(128, 2): 0.518, (64, 2): 0.330, (128, 1): 0.307, (64, 1): 0.20}
    if bits == 4:
        return {(256, 2): 0.684, (128, 2): 0.387, (64, 2): 0.254, (128, 1): 0.28}
    return {(256, 2): 0.720, (128, 2): 0.367, (64, 2): 0.228, (128, 1): 0.24}


def _stage_bytes(problem: Problem, block_m: int, panels: int) -> int:
    """Bytes of a record of both operands, and of the scales and sums of its blocks."""
    plan, fmt = activations.plan(problem), problem.format
    total = 128 * block_m + 1024 * fmt.bits * panels
    if not plan.whole:
        of_row = 4 * ((not plan.whole_row) + (fmt.zero != "none"))
        total += 128 // plan.granule * (of_row * block_m + fmt.scale.itemsize * 64 * panels)
    return total


def multiply(
    problem: Problem, config: Config, x: Quantized, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue, memory: Tensor
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
        **({"launch_pdl": True} if config.early else {}),
    )


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of tiles of a matrix; rows of 128 bytes are swizzled, as wgmma reads them."""
    width = columns * matrix.itemsize
    operand = matrix.dtype == torch.int8 and width == 128
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128 if operand else 0, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


launch = activations.first(multiply, lambda problem, config: 0, early=lambda config: config.early and not INTERPRETED)


@gluon.jit
def _load_weight(wd, ws, full, pn, r, stage, R, BITS: gl.constexpr, PANELS: gl.constexpr, STAGE_BYTES: gl.constexpr):
    """Record r of a tile of the weight, and how many bytes are to come with it in all."""
    bar = full.index(stage)
    mbarrier.expect(bar, STAGE_BYTES)
    for p in gl.static_range(PANELS):
        panel = pn * PANELS + p
        if BITS == 4:
            tma.async_copy_global_to_shared(wd, [(panel * R + r) * 32, 0], bar, ws.index(stage * PANELS + p))
        else:
            tma.async_copy_global_to_shared(wd, [panel * 64, r * 128], bar, ws.index(stage * PANELS + p))


@gluon.jit
def _load_rest(xd, ad, md, sd, buffers, full, first_m, pn, r, stage, PANELS: gl.constexpr, PIECES: gl.constexpr):
    """Of record r the rows of x from first_m on, and what scales both."""
    xs, _, a, m, s, _ = buffers
    bar = full.index(stage)
    tma.async_copy_global_to_shared(xd, [first_m, r * 128], bar, xs.index(stage))
    for j in gl.static_range(PIECES):
        row = r * PIECES + j
        if ad is not None:
            tma.async_copy_global_to_shared(ad, [row, first_m], bar, a.index(stage * PIECES + j))
        if md is not None:
            tma.async_copy_global_to_shared(md, [row, first_m], bar, m.index(stage * PIECES + j))
        for p in gl.static_range(PANELS):
            if sd is not None:
                at = (stage * PANELS + p) * PIECES + j
                tma.async_copy_global_to_shared(sd, [row, (pn * PANELS + p) * 64], bar, s.index(at))


@gluon.jit
def _produce(
    xd, wd, ad, md, sd, buffers, full, empty, M, N, R,
    BITS: gl.constexpr, BM: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, STAGE_BYTES: gl.constexpr,
    GROUP: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = gl.cdiv(M, BM), gl.cdiv(N, 64 * PANELS)
    pm, pn = in_groups(gl.program_id(0), tiles_m, tiles_n, GROUP)
    ahead = gl.minimum(R, STAGES)
    for r in range(ahead):  # the weight, before the kernel before has ended
        _load_weight(wd, buffers[1], full, pn, r, r, R, BITS, PANELS, STAGE_BYTES)
    gdc_wait()
    for r in range(ahead):
        _load_rest(xd, ad, md, sd, buffers, full, pm * BM, pn, r, r, PANELS, PIECES)
    stage = gl.where(ahead == STAGES, 0, ahead)
    phase = gl.where(ahead == STAGES, 0, 1)
    tile = gl.program_id(0)
    # Not `for`: Triton 3.6 would take a variable that only bounds a loop inside of it for dead, and keep its first value.
    while tile < tiles_m * tiles_n:
        pm, pn = in_groups(tile, tiles_m, tiles_n, GROUP)
        for r in range(ahead, R):
            mbarrier.wait(empty.index(stage), phase)
            _load_weight(wd, buffers[1], full, pn, r, stage, R, BITS, PANELS, STAGE_BYTES)
            _load_rest(xd, ad, md, sd, buffers, full, pm * BM, pn, r, stage, PANELS, PIECES)
            stage, phase = next_stage(stage, phase, STAGES)
        ahead -= ahead
        tile += gl.num_programs(0)


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
    gdc_wait()
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pm, pn = in_groups(tile, gl.cdiv(M, BM), gl.cdiv(N, 64 * PANELS), GROUP)
        n = (pn * PANELS + W) * 64
        m = pm * BM
        to = (out, bias, residual, low, high, M, N)
        own = (sa, sums, scale, zero)
        if WHOLE:
            acc, stage, phase = sum_whole(buffers, full, empty, stage, phase, R, first, W, BITS, PANELS, STAGES, OPERAND)
            if COUNT == PART:
                _finish(acc, own, to, n, m, NP, BITS, ZERO, True, True, CLAMP)
            else:
                left, right = gl.split(acc.reshape([64, 2, PART]).permute([0, 2, 1]))
                _finish(left, own, to, n, m, NP, BITS, ZERO, True, True, CLAMP)
                _finish(right, own, to, n, m + PART, NP, BITS, ZERO, True, True, CLAMP)
        else:
            zeros = (zero, gl.minimum(n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), NP - 1), NP)
            if UNROLL == 4:
                left = gl.zeros_like(first).to(gl.float32)
                right = left
                whole = R // UNROLL * UNROLL
                for r in range(0, whole, UNROLL):
                    left, right, stage, phase = add_chain(
                        buffers, full, empty, stage, phase, r, left, right, zeros, W, BITS, ZERO, PANELS, STAGES, OPERAND, UNROLL
                    )
                for r in range(whole, R):
                    left, right, stage, phase = add_chain(
                        buffers, full, empty, stage, phase, r, left, right, zeros, W, BITS, ZERO, PANELS, STAGES, OPERAND, 1
                    )
                left *= UP
                right *= UP
            elif G == 128:
                left = gl.zeros_like(first).to(gl.float32)
                right = left
                whole = R // UNROLL * UNROLL
                for r in range(0, whole, UNROLL):
                    left, right, stage, phase = add_records(
                        buffers, full, empty, stage, phase, r, left, right, zeros, W, BITS, ZERO, ROW, PANELS, STAGES, OPERAND, UNROLL
                    )
                if UNROLL > 1:
                    for r in range(whole, R):
                        left, right, stage, phase = add_records(
                            buffers, full, empty, stage, phase, r, left, right, zeros, W, BITS, ZERO, ROW, PANELS, STAGES, OPERAND, 1
                        )
            else:
                left, right, stage, phase = sum_blocks(
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
        total = scaled(total.to(gl.float32), s, z, m, BITS, ZERO)
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
    gdc_launch_dependents()
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
