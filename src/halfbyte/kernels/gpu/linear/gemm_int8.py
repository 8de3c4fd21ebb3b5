"""y [M, N] = x [M, K] . W^T on integer tensor cores (W8A8, W4A8): any M, N, K and block, x quantized on the way.

Of a block of K_i elements, with q the codes, s scales and o offsets (o = -s * point where the weight has points)

    C = sum(qA * qB) in int32      y += sA*sB*C + sA*oB*sum(qA) + oA*sB*sum(qB) + K_i*oA*oB

the four terms of `reference.linear`. x and W in the order of `quantize/activations.py` and `layouts/gpu_tiles.py`.

Flow: `launch` quantizes x (`activations.quantizing_launch`), `multiply` starts `_gemm`. That computes a tile: `_tile_pointers`,
`_sum_slabs` (which adds K slab by K slab by `_add_products` or `_add_slab`), the reduction of split-K, and `_finish_rows`.

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

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.arithmetic import MAGIC, MAGIC_BITS, requantization, requantized, store_partial, sum_partials
from halfbyte.kernels.gpu.decode import HALVES
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.quantize import activations, dequantize
from halfbyte.kernels.gpu.quantize.activations import Plan, Quantized, aligned
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.kernels.gpu.runtime.scratch import locks
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.gpu.weight_kinds import zero_of
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


@dataclass(frozen=True, kw_only=True)
class Static(CompileTime, Config):
    """What the kernel is compiled for, in addition to Config.

    Attributes:
        split: 2: programs share K; 1: they do not.
        bits, zero: Of the weight.
        with_offset, whole, whole_row, granule: As in `activations.Plan`.
        slabs_per_sum: K slabs whose products are summed in int32 before they are scaled; 1 for shorter blocks.
        clamp: Whether y is clamped.
    """

    bits: int
    zero: Zero
    with_offset: bool
    whole: bool
    whole_row: bool
    granule: int
    slabs_per_sum: int
    clamp: bool

    @property
    def block_offsets(self) -> bool:
        """Whether each block of x has an offset, not the row."""
        return self.with_offset and not self.whole_row

    @property
    def pieces(self) -> int:
        """Granules of a K slab."""
        return gpu_tiles.RECORD // self.granule


class ActivationPointers(NamedTuple):
    """Sections of the quantized x (`activations.Quantized`); None for missing ones."""

    q: Value
    scale: Value
    sums: Value
    offset: Value


class WeightPointers(NamedTuple):
    """Sections of the weight, and, where x has an offset, sums of its elements (`dequantize.write_sums`); None for missing ones."""

    codes: Value
    scale: Value
    zero: Value
    sums: Value


class Shape(NamedTuple):
    """Sizes of the product.

    Attributes:
        columns: M with padding: the distance of rows of the sections of x.
        n: N.
        n_padded: N with padding.
        k_slabs: K slabs of a row.
        per_weight_block: Granules of a block of the weight.
        per_x_scale: Granules that have the same scale of x.
    """

    columns: Value
    n: Value
    n_padded: Value
    k_slabs: Value
    per_weight_block: Value
    per_x_scale: Value


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
    """Return the smallest block_m that configs have."""
    return 8 if plan.granule == gpu_tiles.RECORD else 16


def _tiles(problem: Problem, config: Config) -> int:
    """Return the number of tiles of y."""
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n)


def _weight_sums_bytes(problem: Problem) -> int:
    """Return the bytes of the sums of the weight's granules, which offsets of x multiply."""
    plan, geo = activations.plan(problem), gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    return aligned(4 * plan.granules * geo.n_padded) if plan.with_offset else 0


def compiled_for(problem: Problem, config: Config, *, clamp: bool) -> Static:
    """Return what the kernel is compiled for."""
    plan = activations.plan(problem)
    return Static(
        **vars(replace(config, split=min(2, config.split))),
        bits=problem.format.bits,
        zero=zero_of(problem.format),
        with_offset=plan.with_offset,
        whole=plan.whole,
        whole_row=plan.whole_row,
        granule=plan.granule,
        slabs_per_sum=1 if plan.whole else max(1, plan.padded // gpu_tiles.RECORD),
        clamp=clamp,
    )


def workspace_bytes(problem: Problem, config: Config) -> int:
    """Return the bytes that `multiply` needs: sums of the weight where x has an offset, partial sums where K is split."""
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
    """Launch the product of a quantized x, with `workspace_bytes(problem, config)` bytes of memory; with qlinear's table [3, at least N]
    y is int8."""
    plan, geo = x.plan, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    tiles, static = _tiles(problem, config), compiled_for(problem, config, clamp=epilogue.clamps)
    codes, scale, zero = weight.codes.view(torch.int8), weight.scale, weight.zero
    per_weight_block = max(1, geo.padded // plan.granule)
    per_x_scale = plan.granules if plan.whole_row else plan.padded // plan.granule
    weight_sums = None
    if plan.with_offset:
        weight_sums = memory[: 4 * plan.granules * geo.n_padded].view(torch.float32)
        dequantize.write_sums(weight, geo, plan.granule, (plan.block, plan.padded), weight_sums)
    scratch: tuple[Tensor, Tensor] | None = None
    if config.split > 1:
        sums = memory[_weight_sums_bytes(problem) :].view(torch.int32 if plan.whole else torch.float32)
        scratch = sums, locks(out.device, tiles)
    run(
        _gemm,
        (tiles, config.split),
        ActivationPointers(x.q, x.scale, x.sums, x.offset),
        WeightPointers(codes, scale, zero, weight_sums),
        table,
        out,
        (epilogue.bias, epilogue.residual),
        (epilogue.low, epilogue.high),
        scratch,
        plan.m,
        Shape(plan.m_padded, problem.n, geo.n_padded, geo.records, per_weight_block, per_x_scale),
        0 if table is None else table.shape[1],
        static,
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
    """Return the low and the high nibbles of K slabs, bytes [BN / 64, SLABS * 4096], as 16 * (u - 8), int8 [BN, 64 * SLABS] each."""
    b = tl.reshape(codes, (BN // 64, SLABS, 2, 4, 8, 4, 2, 2, 4))  # panel, slab, kt, nt, row, k4, khalf, rowhalf, byte
    b = tl.permute(b, (0, 3, 7, 4, 1, 2, 6, 5, 8))
    b = tl.reshape(b, (BN, 64 * SLABS))
    if ASM:
        return tl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
    else:
        u = b.to(tl.int32)
        return ((u << 4 ^ 0x80) & 0xF0).to(tl.int8), ((u ^ 0x80) & 0xF0).to(tl.int8)


@triton.jit
def planes(words, BN: tl.constexpr, ASM: tl.constexpr):
    """Return the nibbles of a K slab, words [BN / 64, 2048], as 16 * (u - 8) of k = 0 … 31, 32 … 63, 64 … 95 and 96 … 127, int8 [BN, 32]
    each."""
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
    """Return a plane's elements in the order of the weight's rows, [BN, 32]."""
    p = tl.reshape(plane, (BN // 64, 2, 4, 8, 4, 2, 4))  # panel, kt, nt, row, k4, rowhalf, byte
    return tl.reshape(tl.permute(p, (0, 2, 5, 3, 1, 4, 6)), (BN, 32))


# Device functions. `S` is a Static.


@triton.jit
def _add_scaled(acc, p, params, S: tl.constexpr, BIASED: tl.constexpr):
    """Return acc + the integers p [block_n, block_m] of a block, scaled; of 4 bits 16 times too large.

    params: as of `_load_params`.
    BIASED: integers start at the bits of 1.5 * 2^23.
    """
    scale, zero, x_scale, x_sums, x_offset, weight_sums = params
    v = p.to(tl.float32, bitcast=True) - MAGIC if BIASED else p.to(tl.float32)
    if S.zero != "none":  # from u - 8 or u - 128 to u - point, in exact integers
        point = zero.to(tl.float32) if S.zero == "point" else tl.zeros(zero.shape, tl.float32)
        point = (point - 8) * 16 if S.bits == 4 else point - 128
        v -= point[:, None] * x_sums[None, :]
    v *= scale.to(tl.float32)[:, None]
    if S.zero == "offset":
        v += (zero.to(tl.float32) * (16 if S.bits == 4 else 1))[:, None] * x_sums[None, :]
    if S.whole_row:
        acc += v
    else:
        acc += v * x_scale[None, :]
        if S.with_offset:
            acc += (weight_sums * (16 if S.bits == 4 else 1))[:, None] * x_offset[None, :]
    return acc


@triton.jit
def _load_params(x, weight, i, shape, rn, rm, S: tl.constexpr):
    """Load what the integers of granule i are scaled by: scale and zero of the weight, [block_n]; scale of x, sums of its codes, and its
    offset, [block_m]; sums of the weight's elements, [block_n]. Placeholders stand for those that formats do not have, or whole rows have
    one of."""
    at = i // shape.per_weight_block * shape.n_padded + rn
    scale = tl.load(weight.scale + at)
    zero = scale
    if S.zero != "none":
        zero = tl.load(weight.zero + at)
    x_scale = scale
    if not S.whole_row:
        x_scale = tl.load(x.scale + i // shape.per_x_scale * shape.columns + rm)
    x_sums = x_scale
    if S.zero != "none":
        x_sums = tl.load(x.sums + i * shape.columns + rm)
    x_offset = x_scale
    weight_sums = scale
    if S.block_offsets:
        weight_sums = tl.load(weight.sums + i * shape.n_padded + rn)
        x_offset = tl.load(x.offset + i // shape.per_x_scale * shape.columns + rm)
    return scale, zero, x_scale, x_sums, x_offset, weight_sums


@triton.jit
def _load_slab_params(x, weight, t, shape, rn, rm, S: tl.constexpr):
    """Return `_load_params` of each granule of K slab t."""
    PIECES: tl.constexpr = S.pieces
    loaded = ()
    for j in tl.static_range(PIECES):
        loaded += (_load_params(x, weight, t * PIECES + j, shape, rn, rm, S),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _add_products(acc, wp, xp, t, PIECE: tl.constexpr, SLABS: tl.constexpr, S: tl.constexpr):
    """Return acc + the integers of SLABS K slabs from t on of 4 bits, or of piece PIECE of slab t of 8 bits."""
    if S.bits == 4:
        low, high = halves(tl.load(wp + t * 4096), S.block_n, SLABS, S.asm)
        acc = tl.dot(low, tl.load(xp + t * 128), acc, out_dtype=tl.int32)
        return tl.dot(high, tl.load(xp + t * 128 + 64), acc, out_dtype=tl.int32)
    else:
        at = t * 128 + PIECE * S.granule
        return tl.dot(tl.load(wp + at), tl.load(xp + at), acc, out_dtype=tl.int32)


@triton.jit
def _add_slab(acc, wp, xp, t, params, start, S: tl.constexpr):
    """Return acc + K slab t, whose blocks are no longer than it; the integers of each begin with `start`. `params` are those of its
    granules."""
    G: tl.constexpr = S.granule
    PIECES: tl.constexpr = S.pieces
    if G == 16:
        q = planes(tl.load(wp + t * 2048), S.block_n, S.asm) if S.bits == 4 else (0,)
        for j in tl.static_range(4):  # the instruction multiplies 32 of K: x of one of two blocks, and zeros
            w32 = q[j] if S.bits == 4 else tl.load(wp + t * 128 + 32 * j)
            x32 = tl.load(xp + t * 128 + 32 * j)
            for half in tl.static_range(2):
                p = tl.dot(w32, tl.where(tl.arange(0, 32)[:, None] // 16 == half, x32, 0), start, out_dtype=tl.int32)
                acc = _add_scaled(acc, p, params[2 * j + half], S, True)
    elif S.bits == 4 and G < 128:
        q = planes(tl.load(wp + t * 2048), S.block_n, S.asm)
        for j in tl.static_range(0, 4, G // 32):
            p = tl.dot(q[j], tl.load(xp + t * 128 + 32 * j), start, out_dtype=tl.int32)
            if G == 64:
                p = tl.dot(q[j + 1], tl.load(xp + t * 128 + 32 * j + 32), p, out_dtype=tl.int32)
            acc = _add_scaled(acc, p, params[j * 32 // G], S, True)
    else:
        for j in tl.static_range(PIECES):
            acc = _add_scaled(acc, _add_products(start, wp, xp, t, j, 1, S), params[j], S, True)
    return acc


@triton.jit
def _tile_pointers(x, weight, pn, rn, rm, shape, S: tl.constexpr):
    """Return pointers to a tile's codes of the weight and of x, of the first K slab."""
    BN: tl.constexpr = S.block_n
    SLABS: tl.constexpr = S.records
    xp = x.q + rm[None, :].to(tl.int64) * (shape.k_slabs * 128)
    if S.bits == 4:
        panel = tl.minimum(pn * (BN // 64) + tl.arange(0, BN // 64), shape.n_padded // 64 - 1).to(tl.int64)[:, None] * shape.k_slabs
        if S.granule == 128:
            wp = weight.codes + panel * 4096 + tl.arange(0, 4096 * SLABS)[None, :]
            kx = tl.arange(0, 64 * SLABS)
            xp += (kx // 64 * 128 + kx % 64)[:, None]
        else:
            wp = weight.codes.to(tl.pointer_type(tl.int16)) + panel * 2048 + tl.arange(0, 2048)[None, :]
            xp += tl.arange(0, 32)[:, None]
    else:
        WIDE: tl.constexpr = 32 if S.granule == 16 else S.granule * SLABS
        wp = weight.codes + rn[:, None].to(tl.int64) * (shape.k_slabs * 128) + tl.arange(0, WIDE)[None, :]
        xp += tl.arange(0, WIDE)[:, None]
    return wp, xp


@triton.jit
def _sum_slabs(x, weight, wp, xp, first, end, shape, rn, rm, S: tl.constexpr):
    """Return the sums [block_n, block_m] of K slabs first … end - 1: int32 if S.whole, else float32, scaled."""
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    SLABS: tl.constexpr = S.records
    start = tl.full([BN, BM], 0 if S.whole or S.slabs_per_sum > 1 else MAGIC_BITS, tl.int32)
    acc = start if S.whole else tl.zeros([BN, BM], tl.float32)
    if S.whole:
        for t in tl.range(first, end, SLABS, num_stages=S.stages):
            acc = _add_products(acc, wp, xp, t, 0, SLABS, S)
    else:
        p = start
        x_sums = tl.zeros([BM], tl.float32)
        weight_sums = tl.zeros([BN], tl.float32)
        params = _load_slab_params(x, weight, first, shape, rn, rm, S)
        for t in tl.range(first, end, num_stages=S.stages):
            # The next slab's scales are fetched while this one is multiplied: they are too short for Triton to copy ahead.
            following = _load_slab_params(x, weight, tl.minimum(t + 1, shape.k_slabs - 1), shape, rn, rm, S)
            if S.slabs_per_sum > 1:
                p = _add_products(p, wp, xp, t, 0, 1, S)
                scale, zero, x_scale, slab_x_sums, x_offset, slab_weight_sums = params[0]
                if S.zero != "none":
                    x_sums += slab_x_sums
                if S.block_offsets:
                    weight_sums += slab_weight_sums
                if (t + 1) % S.slabs_per_sum == 0 or t + 1 == end:
                    acc = _add_scaled(acc, p, (scale, zero, x_scale, x_sums, x_offset, weight_sums), S, False)
                    p = start
                    x_sums = tl.zeros([BM], tl.float32)
                    weight_sums = tl.zeros([BN], tl.float32)
            else:
                acc = _add_slab(acc, wp, xp, t, params, start, S)
            params = following
    return acc


@triton.jit
def _finish_rows(acc, x, weight, shape, rn, rm, S: tl.constexpr):
    """Return the sums over all of K as float32 products: multiplied by what whole rows and channels have one of, less the 16 of 4 bits."""
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    total = acc
    if S.whole_row:
        row_scale = tl.load(x.scale + rm)
        row_offset = row_scale
        weight_sums = tl.zeros([BN], tl.float32)
        if S.with_offset:
            row_offset = tl.load(x.offset + rm)
            for i in range(shape.k_slabs * S.pieces):
                weight_sums += tl.load(weight.sums + i * shape.n_padded + rn)
        if S.whole:
            scale = tl.load(weight.scale + rn)
            zero = scale
            x_sums = row_scale
            if S.zero != "none":
                zero = tl.load(weight.zero + rn)
                x_sums = tl.load(x.sums + rm)
            params = (scale, zero, row_scale, x_sums, row_offset, weight_sums)
            total = _add_scaled(tl.zeros([BN, BM], tl.float32), acc, params, S, False)
    if S.bits == 4:
        total *= 0.0625
    if S.whole_row:
        total *= row_scale[None, :]
        if S.with_offset:
            total += weight_sums[:, None] * row_offset[None, :]
    return total


@triton.jit(do_not_specialize=["M"])
def _gemm(x, weight, table, out, added, bounds, scratch, M, shape, table_row, S: tl.constexpr):
    """Compute tile program_id(0), or the share of its K that program_id(1) has.

    x, weight  ActivationPointers, WeightPointers
    table      of `ops.requantization_table`, for y in int8; or None
    added      bias and residual; each may be None
    bounds     of the clamp
    scratch    partial sums and locks; None: one program has all of K
    table_row  elements of a row of the table
    """
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    tiles_m = tl.cdiv(M, BM)
    pm = tl.program_id(0) % tiles_m
    pn = tl.program_id(0) // tiles_m
    # Out-of-bounds rows are computed from the last row's data, and not written.
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rm_read = tl.minimum(rm, M - 1)
    rn_read = tl.minimum(rn, shape.n_padded - 1)
    first, end = 0, shape.k_slabs
    if S.split > 1:
        share = tl.cdiv(shape.k_slabs // S.records, tl.num_programs(1)) * S.records
        first = tl.program_id(1) * share
        end = tl.minimum(first + share, shape.k_slabs)
    wp, xp = _tile_pointers(x, weight, pn, rn_read, rm_read, shape, S)
    acc = _sum_slabs(x, weight, wp, xp, first, end, shape, rn_read, rm, S)
    if S.split > 1:
        # A program without K slabs stores zeros.
        place = tl.program_id(0).to(tl.int64) * (BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        slot_stride = tl.num_programs(0).to(tl.int64) * (BN * BM)
        lock = scratch[1] + tl.program_id(0)
        if store_partial(acc, scratch[0] + place, slot_stride, lock) != tl.num_programs(1) - 1:
            return
        acc = sum_partials(acc, scratch[0] + place, slot_stride)
        tl.store(lock, 0)
    if table is not None:
        y = requantized(acc, requantization(table, tl.minimum(rn, shape.n - 1), table_row), bounds[0], bounds[1], S.bits)
        tl.store(out + rm[None, :].to(tl.int64) * shape.n + rn[:, None], y, mask=(rn < shape.n)[:, None] & (rm < M)[None, :])
        return
    write(_finish_rows(acc, x, weight, shape, rn_read, rm, S), out, added, rn, rm, M, shape.n, bounds[0], bounds[1], S.clamp)
