"""y [M, N] = x [M, K] . W^T on integer tensor cores (W8A8, W4A8): any M, N, K and block, x quantized on the way.

Of a block of K_i elements, with q the codes, s scales and o offsets (o = -s * point where the weight has points)

    C = sum(qA * qB) in int32      y += sA*sB*C + sA*oB*sum(qA) + oA*sB*sum(qB) + K_i*oA*oB

the four terms of `reference.linear`. x and W in the order of `quantize/activations.py` and `layouts/gpu_tiles.py`.

Y^T = W X^T, so that the weight is the register operand of an mma. A register w holds eight nibbles u; `(w << 4 ^ 0x80808080) &
0xf0f0f0f0` are four int8 of 16 * (u - 8), and the same of w without the shift the four others: three instructions for eight
weights, the 16 is divided out at the end (exactly). Blocks shorter than 128 collect their bytes by a PRMT first. The instruction
multiplies 32 of K: blocks of 16 are multiplied in pairs, twice, with the other one's x as 0.

Arithmetic: integer sums are exact. Where x and W have one block each, that sum is all; otherwise each block's sum becomes float32
and is scaled into a float32 sum. I2F has a sixteenth of the rate of additions, so for blocks of up to 128 it is not used: the sum C
starts at the bits of 1.5 * 2^23, and its own bits are then the float 1.5 * 2^23 + C, as |C| <= 127 * 128 * 128 < 2^22. K may be
split over programs; the last to arrive adds up in order, so that results do not vary.

It wins for small M; on Hopper `gemm_int8_hopper.py` takes over where x fills its tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import MAGIC, MAGIC_BITS, requantization, requantized, store_partial, sum_partials
from halfbyte.kernels.gpu.decode import HALVES
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.quantize.activations import Plan, Quantized, aligned
from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.kernels.gpu.runtime.scratch import locks
from halfbyte.kernels.gpu.weight_kinds import zero_number
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_FEW_ROWS = 16  # rows of x up to which the time is spent on reading the weight
_LEAST_SLABS = 8  # K is split further while each program has at least so many K slabs,
_MOST_SPLIT = 16  # and over fewer programs than these


@dataclass(frozen=True)
class Config:
    """How a program computes its tile.

    Attributes:
        block_m: Rows of x.
        block_n: Rows of the weight.
        records: K slabs of 128 that are multiplied at a time.
        split: Programs that share the K of a tile.
        stages: Steps in flight through shared memory.
        warps: Of a program.
        asm: Whether codes are converted by PTX instructions (NVIDIA).
    """

    block_m: int
    block_n: int
    records: int
    split: int
    stages: int
    warps: int
    asm: bool = True


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "linear" or problem.compute != "int8":
        return f"it multiplies integers of a linear layer, not {problem.op} in {problem.compute}"
    if problem.m < 1 or problem.n < 1 or problem.k < 1:
        return f"there is nothing to multiply: m={problem.m}, n={problem.n}, k={problem.k}"
    return activations.supports(problem)


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return one config: the best guess."""
    plan = activations.plan(problem)
    m, slabs = problem.m, plan.k_padded // gpu_tiles.RECORD
    block_m = max(_least_block_m(plan), min(_most_block_m(plan), triton.next_power_of_2(m)))
    block_n = 64 if block_m <= 64 else 128
    tiles = -(-problem.n // block_n) * -(-m // block_m)
    wanted_programs = _programs_per_sm(plan) * gpu.sms
    split = 1
    while tiles * split < wanted_programs and slabs >= _LEAST_SLABS * split and split < _MOST_SPLIT:
        split *= 2
    step_slabs = 2 if plan.whole and block_m <= 64 and slabs % 2 == 0 else 1
    stages = 4 if gpu.shared > 120 << 10 or block_m < 128 else 3
    if gpu.backend == "hip":
        stages = 1  # Triton 3.6's pipeliner for AMD fails on a load that two dots take
    asm = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    return (Config(block_m, block_n, step_slabs, split, stages, 4 if block_m <= 64 else 8, asm),)


def _programs_per_sm(plan: Plan) -> float:
    """Return the programs per multiprocessor that K is split for: one keeps it reading; where blocks are scaled, several hide each other's
    latency."""
    if plan.whole:
        return 0.95 if plan.m <= _FEW_ROWS else 1.0
    return 3.5 if plan.m <= _FEW_ROWS else 1.5


def _most_block_m(plan: Plan) -> int:
    """Return the largest block_m that fits in registers. Scales of a K slab's blocks are loaded ahead: the more there are, the fewer
    rows."""
    if plan.whole:
        return 128
    if plan.granule == gpu_tiles.RECORD:
        return 64
    return 16 if plan.granule == 16 or (plan.with_offset and not plan.whole_row) else 32


def _least_block_m(plan: Plan) -> int:
    return 8 if plan.granule == gpu_tiles.RECORD else 16


def _tiles(problem: Problem, config: Config) -> int:
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n)


def _weight_sums_bytes(problem: Problem) -> int:
    plan, geo = activations.plan(problem), gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    return aligned(4 * plan.granules * geo.n_padded) if plan.with_offset else 0


def workspace_bytes(problem: Problem, config: Config) -> int:
    """Bytes that `multiply` needs: sums of the weight where x has an offset, partial sums where K is split."""
    partials = 4 * config.split * _tiles(problem, config) * config.block_m * config.block_n if config.split > 1 else 0
    return _weight_sums_bytes(problem) + partials


def multiply(
    problem: Problem,
    config: Config,
    x: Quantized,
    weight: gpu_tiles.Views,
    out: Tensor,
    epilogue: Epilogue,
    memory: Tensor,
    table: Tensor | None = None,
) -> None:
    """The product alone, with `workspace_bytes(problem, config)` bytes of `memory`; with qlinear's table [3, at least N] to int8."""
    plan, geo = x.plan, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    tiles, split = _tiles(problem, config), config.split > 1
    codes, scale, zero = weight.codes.view(torch.int8), weight.scale, weight.zero
    wsums = None
    if plan.with_offset:
        wsums = memory[: 4 * plan.granules * geo.n_padded].view(torch.float32)
        run(
            _weight_sums,
            (geo.panels, geo.records),
            codes,
            scale,
            zero,
            wsums,
            problem.k,
            geo.n_padded,
            geo.records,
            max(1, geo.padded // plan.granule),
            plan.block,
            plan.padded,
            BITS=problem.format.bits,
            ZERO=zero_number(problem.format),
            G=plan.granule,
        )
    partials = memory[_weight_sums_bytes(problem) :].view(torch.int32 if plan.whole else torch.float32) if split else None
    run(
        _gemm,
        (tiles, config.split),
        x.q,
        x.scale,
        x.sums,
        x.offset,
        codes,
        scale,
        zero,
        wsums,
        table,
        out,
        epilogue.bias,
        epilogue.residual,
        epilogue.low,
        epilogue.high,
        partials,
        locks(out.device, tiles) if split else None,
        plan.m,
        plan.columns,
        problem.n,
        geo.n_padded,
        geo.records,
        max(1, geo.padded // plan.granule),
        plan.granules if plan.whole_row else plan.padded // plan.granule,
        0 if table is None else table.shape[1],
        BITS=problem.format.bits,
        ZERO=zero_number(problem.format),
        WITH_OFFSET=plan.with_offset,
        WHOLE=plan.whole,
        ROW=plan.whole_row,
        G=plan.granule,
        FOLD=1 if plan.whole else max(1, plan.padded // gpu_tiles.RECORD),
        BM=config.block_m,
        BN=config.block_n,
        SLABS=config.records,
        STAGES=config.stages,
        SPLIT=split,
        CLAMP=epilogue.clamps,
        ASM=config.asm,
        num_warps=config.warps,
    )


launch = activations.quantizing_launch(multiply, workspace_bytes)


# The registers of a lane: khalf 0 of rowhalf 0 and 1, khalf 1 of both. Out: planes 0 to 3 of rowhalf 0 and 1 each.
PLANES = tl.constexpr(
    "{.reg .b32 e, o, t;"
    + "".join(
        f"prmt.b32 e, ${8 + half}, ${10 + half}, 0x6420; prmt.b32 o, ${8 + half}, ${10 + half}, 0x7531;"
        f"shl.b32 t, e, 4; lop3.b32 ${half}, t, 0x80808080, 0xf0f0f0f0, 0x28; lop3.b32 ${2 + half}, e, 0x80808080, 0xf0f0f0f0, 0x28;"
        f"shl.b32 t, o, 4; lop3.b32 ${4 + half}, t, 0x80808080, 0xf0f0f0f0, 0x28; lop3.b32 ${6 + half}, o, 0x80808080, 0xf0f0f0f0, 0x28;"
        for half in (0, 1)
    )
    + "}"
)


@triton.jit
def halves(codes, BN: tl.constexpr, SLABS: tl.constexpr, ASM: tl.constexpr):
    """Bytes [BN / 64, RECORDS * 4096] of records -> 16 * (u - 8) of their low and of their high nibbles, int8 [BN, 64 * RECORDS] each."""
    b = tl.reshape(codes, (BN // 64, SLABS, 2, 4, 8, 4, 2, 2, 4))  # panel, record, kt, nt, row, k4, khalf, rowhalf, byte
    b = tl.permute(b, (0, 3, 7, 4, 1, 2, 6, 5, 8))
    b = tl.reshape(b, (BN, 64 * SLABS))
    if ASM:
        return tl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
    else:
        u = b.to(tl.int32)
        return ((u << 4 ^ 0x80) & 0xF0).to(tl.int8), ((u ^ 0x80) & 0xF0).to(tl.int8)


@triton.jit
def planes(words, BN: tl.constexpr, ASM: tl.constexpr):
    """Words [BN / 64, 2048] of a record -> 16 * (u - 8) of k = 0 … 31, 32 … 63, 64 … 95 and 96 … 127, int8 [BN, 32] each."""
    if ASM:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            PLANES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words], dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=8
        )
    else:
        w = tl.permute(tl.reshape(words, (BN * 4, 2, 2, 2)), (0, 2, 1, 3))  # khalf, rowhalf, k -> rowhalf, khalf, k
        u = tl.reshape(w, words.shape).to(tl.int32)
        p0 = ((u << 4 ^ 0x80) & 0xF0).to(tl.int8)
        p1 = ((u ^ 0x80) & 0xF0).to(tl.int8)
        p2 = ((u >> 4 ^ 0x80) & 0xF0).to(tl.int8)
        p3 = ((u >> 8 ^ 0x80) & 0xF0).to(tl.int8)
    return _operand(p0, BN), _operand(p1, BN), _operand(p2, BN), _operand(p3, BN)


@triton.jit
def _operand(plane, BN: tl.constexpr):
    p = tl.reshape(plane, (BN // 64, 2, 4, 8, 4, 2, 4))  # panel, kt, nt, row, k4, rowhalf, byte
    return tl.reshape(tl.permute(p, (0, 2, 5, 3, 1, 4, 6)), (BN, 32))


@triton.jit
def fold(acc, p, s, z, sa, sm, oa, ws, BITS: tl.constexpr, FLAGS: tl.constexpr, BIASED: tl.constexpr):
    """acc + the integers p [BN, BM] of a block, scaled; 16 times too large for 4 bits. BIASED: they start at the bits of 1.5 * 2^23.

    s, z    scale and zero of the weight [BN]; ws the sum of its elements
    sa, oa  scale and offset of x [BM] (not where the row has one of each); sm the sum of its codes
    """
    ZERO: tl.constexpr = FLAGS[0]
    v = p.to(tl.float32, bitcast=True) - MAGIC if BIASED else p.to(tl.float32)
    if ZERO != 0:  # from u - 8 or u - 128 to u - point, in exact integers
        point = z.to(tl.float32) if ZERO == 1 else tl.zeros(z.shape, tl.float32)
        point = (point - 8) * 16 if BITS == 4 else point - 128
        v -= point[:, None] * sm[None, :]
    v *= s.to(tl.float32)[:, None]
    if ZERO == 2:
        v += (z.to(tl.float32) * (16 if BITS == 4 else 1))[:, None] * sm[None, :]
    if FLAGS[2]:
        acc += v
    else:
        acc += v * sa[None, :]
        if FLAGS[1]:
            acc += (ws * (16 if BITS == 4 else 1))[:, None] * oa[None, :]
    return acc


@triton.jit
def at_end(v, sa, oa, ws, BITS: tl.constexpr, WITH_OFFSET: tl.constexpr, ROW: tl.constexpr):
    """The sum of all folds: what is left to multiply by, and the offset's term, where the row has one scale and one offset."""
    if BITS == 4:
        v *= 0.0625
    if ROW:
        v *= sa[None, :]
        if WITH_OFFSET:
            v += ws[:, None] * oa[None, :]
    return v


@triton.jit
def _fetch(w, x, i, w_every, a_every, NP, MP, rn, rm, ZERO: tl.constexpr, WITH_OFFSET: tl.constexpr, ROW: tl.constexpr):
    """Load what granule i needs: scale and zero of the weight, scale, sums and offset of x, sums of the weight. A value that the format
    does not have is a copy of another."""
    at = i // w_every * NP + rn
    s = tl.load(w[0] + at)
    z = s
    if ZERO != 0:
        z = tl.load(w[1] + at)
    sa = s
    if not ROW:
        sa = tl.load(x[0] + i // a_every * MP + rm)
    sm = sa
    if ZERO != 0:
        sm = tl.load(x[1] + i * MP + rm)
    oa = sa
    ws = s
    if WITH_OFFSET and not ROW:
        ws = tl.load(w[2] + i * NP + rn)
        oa = tl.load(x[2] + i // a_every * MP + rm)
    return s, z, sa, sm, oa, ws


@triton.jit
def _fetch_slab(w, x, t, w_every, a_every, NP, MP, rn, rm, PIECES: tl.constexpr, FLAGS: tl.constexpr):
    """Return the same for each granule of record t."""
    fetched = ()
    for j in tl.static_range(PIECES):
        fetched += (_fetch(w, x, t * PIECES + j, w_every, a_every, NP, MP, rn, rm, FLAGS[0], FLAGS[1], FLAGS[2]),)  # type: ignore[assignment]
    return fetched


@triton.jit
def _product(
    acc, wp, xp, t, PIECE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, SLABS: tl.constexpr, ASM: tl.constexpr
):
    """acc + the integers of records t and after of 4 bits, or of piece PIECE of record t of 8 bits."""
    if BITS == 4:
        w0, w1 = halves(tl.load(wp + t * 4096), BN, SLABS, ASM)
        acc = tl.dot(w0, tl.load(xp + t * 128), acc, out_dtype=tl.int32)
        return tl.dot(w1, tl.load(xp + t * 128 + 64), acc, out_dtype=tl.int32)
    else:
        at = t * 128 + PIECE * G
        return tl.dot(tl.load(wp + at), tl.load(xp + at), acc, out_dtype=tl.int32)


@triton.jit(do_not_specialize=["M"])
def _gemm(
    x, sa, sums, oa, codes, scale, zero, wsums, table, out, bias, residual, low, high, partials, locks,
    M, MP, N, NP, R, w_every, a_every, table_row,
    BITS: tl.constexpr, ZERO: tl.constexpr, WITH_OFFSET: tl.constexpr, WHOLE: tl.constexpr, ROW: tl.constexpr,
    G: tl.constexpr, FOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SLABS: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, CLAMP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """With a `table`, of `ops.requantization_table`, the result is int8."""
    tiles_m = tl.cdiv(M, BM)
    pm = tl.program_id(0) % tiles_m
    pn = tl.program_id(0) // tiles_m
    # What lies outside is computed from the last row's data and not written.
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rmi = tl.minimum(rm, M - 1)
    rni = tl.minimum(rn, NP - 1)
    first, end = 0, R
    if SPLIT:
        share = tl.cdiv(R // SLABS, tl.num_programs(1)) * SLABS
        first = tl.program_id(1) * share
        end = tl.minimum(first + share, R)
    xp = x + rmi[None, :].to(tl.int64) * (R * 128)
    if BITS == 4:
        panel = tl.minimum(pn * (BN // 64) + tl.arange(0, BN // 64), NP // 64 - 1).to(tl.int64)[:, None] * R
        if G == 128:
            wp = codes + panel * 4096 + tl.arange(0, 4096 * SLABS)[None, :]
            kx = tl.arange(0, 64 * SLABS)
            xp += (kx // 64 * 128 + kx % 64)[:, None]
        else:
            wp = codes.to(tl.pointer_type(tl.int16)) + panel * 2048 + tl.arange(0, 2048)[None, :]
            xp += tl.arange(0, 32)[:, None]
    else:
        WIDE: tl.constexpr = 32 if G == 16 else G * SLABS
        wp = codes + rni[:, None].to(tl.int64) * (R * 128) + tl.arange(0, WIDE)[None, :]
        xp += tl.arange(0, WIDE)[:, None]
    w = (scale, zero, wsums)
    a = (sa, sums, oa)
    PIECES: tl.constexpr = 128 // G
    FLAGS: tl.constexpr = (ZERO, WITH_OFFSET, ROW)
    start = tl.full([BN, BM], 0 if WHOLE or FOLD > 1 else MAGIC_BITS, tl.int32)
    acc = start if WHOLE else tl.zeros([BN, BM], tl.float32)
    if WHOLE:
        for t in tl.range(first, end, SLABS, num_stages=STAGES):
            acc = _product(acc, wp, xp, t, 0, BITS, G, BN, SLABS, ASM)
    else:
        p = start
        sm = tl.zeros([BM], tl.float32)
        ws = tl.zeros([BN], tl.float32)
        f = _fetch_slab(w, a, first, w_every, a_every, NP, MP, rni, rm, PIECES, FLAGS)
        for t in tl.range(first, end, num_stages=STAGES):
            # The next record's scales are fetched while this one is multiplied: they are too short for Triton to copy ahead.
            following = _fetch_slab(w, a, tl.minimum(t + 1, R - 1), w_every, a_every, NP, MP, rni, rm, PIECES, FLAGS)
            if FOLD > 1:
                p = _product(p, wp, xp, t, 0, BITS, G, BN, 1, ASM)
                if ZERO != 0:
                    sm += f[0][3]
                if WITH_OFFSET and not ROW:
                    ws += f[0][5]
                if (t + 1) % FOLD == 0 or t + 1 == end:
                    acc = fold(acc, p, f[0][0], f[0][1], f[0][2], sm, f[0][4], ws, BITS, FLAGS, False)
                    p = start
                    sm = tl.zeros([BM], tl.float32)
                    ws = tl.zeros([BN], tl.float32)
            elif G == 16:
                q = planes(tl.load(wp + t * 2048), BN, ASM) if BITS == 4 else (0,)
                for j in tl.static_range(4):  # the instruction multiplies 32 of K: x of one of two blocks, and zeros
                    w32 = q[j] if BITS == 4 else tl.load(wp + t * 128 + 32 * j)
                    x32 = tl.load(xp + t * 128 + 32 * j)
                    for half in tl.static_range(2):
                        p = tl.dot(w32, tl.where(tl.arange(0, 32)[:, None] // 16 == half, x32, 0), start, out_dtype=tl.int32)
                        g = f[2 * j + half]
                        acc = fold(acc, p, g[0], g[1], g[2], g[3], g[4], g[5], BITS, FLAGS, True)
            elif BITS == 4 and G < 128:
                q = planes(tl.load(wp + t * 2048), BN, ASM)
                for j in tl.static_range(0, 4, G // 32):
                    p = tl.dot(q[j], tl.load(xp + t * 128 + 32 * j), start, out_dtype=tl.int32)
                    if G == 64:
                        p = tl.dot(q[j + 1], tl.load(xp + t * 128 + 32 * j + 32), p, out_dtype=tl.int32)
                    g = f[j * 32 // G]
                    acc = fold(acc, p, g[0], g[1], g[2], g[3], g[4], g[5], BITS, FLAGS, True)
            else:
                for j in tl.static_range(PIECES):
                    p = _product(start, wp, xp, t, j, BITS, G, BN, 1, ASM)
                    acc = fold(acc, p, f[j][0], f[j][1], f[j][2], f[j][3], f[j][4], f[j][5], BITS, FLAGS, True)
            f = following
    if SPLIT:
        # Results of a program that has nothing to add are zeros.
        place = tl.program_id(0).to(tl.int64) * (BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        slot_stride = tl.num_programs(0).to(tl.int64) * (BN * BM)
        if store_partial(acc, partials + place, slot_stride, locks + tl.program_id(0)) != tl.num_programs(1) - 1:
            return
        acc = sum_partials(acc, partials + place, slot_stride)
        tl.store(locks + tl.program_id(0), 0)
    if table is not None:
        y = requantized(acc, requantization(table, tl.minimum(rn, N - 1), table_row), low, high, BITS)
        tl.store(out + rm[None, :].to(tl.int64) * N + rn[:, None], y, mask=(rn < N)[:, None] & (rm < M)[None, :])
        return
    if ROW:
        row_scale = tl.load(sa + rm)
        row_offset = row_scale
        ws = tl.zeros([BN], tl.float32)
        if WITH_OFFSET:
            row_offset = tl.load(oa + rm)
            for i in range(R * PIECES):
                ws += tl.load(wsums + i * NP + rni)
        if WHOLE:
            s = tl.load(scale + rni)
            z = s
            sm = row_scale
            if ZERO != 0:
                z = tl.load(zero + rni)
                sm = tl.load(sums + rm)
            total = fold(tl.zeros([BN, BM], tl.float32), acc, s, z, row_scale, sm, row_offset, ws, BITS, FLAGS, False)
        else:
            total = acc
        total = at_end(total, row_scale, row_offset, ws, BITS, WITH_OFFSET, ROW)
    else:
        total = at_end(acc, acc, acc, acc, BITS, WITH_OFFSET, ROW)
    write(total, out, (bias, residual), rn, rm, M, N, low, high, CLAMP)


@triton.jit
def _weight_sums(codes, scale, zero, sums, K, NP, R, w_every, block, padded, BITS: tl.constexpr, ZERO: tl.constexpr, G: tl.constexpr):
    """sums [granules, N padded]: of the weight's elements, scale * (sum(q) - point * count) or scale * sum(q) + offset * count."""
    panel = tl.program_id(0)
    r = tl.program_id(1)
    rn = panel * 64 + tl.arange(0, 64)
    for j in tl.static_range(128 // G):
        i = r * (128 // G) + j
        start = i * G
        within = start % padded
        count = tl.minimum(block - within, K - start // padded * block - within)
        count = tl.minimum(tl.maximum(count, 0), G).to(tl.float32)
        at = i // w_every * NP + rn
        s = tl.load(scale + at).to(tl.float32)
        if BITS == 4:
            # kt, nt, row, k4, khalf, rowhalf, k; padding is u = 8 or, with a zero, u = 0
            place = (panel.to(tl.int64) * R + r) * 2048 + tl.arange(0, 2048)
            words = tl.load(codes.to(tl.pointer_type(tl.int16)) + place).to(tl.int32)
            words = tl.permute(tl.reshape(words, (2, 4, 8, 4, 2, 2, 2)), (1, 5, 2, 0, 3, 4, 6))
            words = tl.reshape(words, (64, 32))
            total = tl.zeros([64], tl.int32)
            for plane in tl.static_range(j * G // 32, ((j + 1) * G + 31) // 32):
                u = words >> 4 * plane & 15
                u = u - 8 if ZERO == 0 else u
                if G == 16:
                    u = tl.where(tl.arange(0, 32)[None, :] // 16 == j % 2, u, 0)
                total += tl.sum(u, axis=1)
        else:
            place = rn[:, None].to(tl.int64) * (R * 128) + start + tl.arange(0, G)[None, :]
            u = tl.load(codes + place).to(tl.int32)
            total = tl.sum(u if ZERO == 0 else u + 128, axis=1)
        if ZERO == 1:
            value = (total.to(tl.float32) - tl.load(zero + at).to(tl.float32) * count) * s
        elif ZERO == 2:
            value = total.to(tl.float32) * s + tl.load(zero + at).to(tl.float32) * count
        else:
            value = total.to(tl.float32) * s
        tl.store(sums + i * NP + rn, value)
