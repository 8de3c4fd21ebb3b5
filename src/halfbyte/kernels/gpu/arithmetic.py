"""Arithmetic in registers that kernels share, and its substitutes in Triton's interpreter, in which tests run kernels."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 has a spacing of 1 there
MAGIC_BITS = tl.constexpr(0x4B400000)
LOG2E = tl.constexpr(1.4426950408889634)
GROUP = tl.constexpr(8)  # consecutive tiles along M: see `grouped_ordering`


@triton.jit
def row_and_column(columns):
    """Return the row and the column of this program of a `launch.flat_grid` of so many columns."""
    program = tl.program_id(0)
    row = program // columns
    return row, program - row * columns


@triton.jit
def round_product(x, y):
    """Return the integer nearest to the exact product of two float32, ties to even, as int32; exact if it is within 2^22."""
    if INTERPRETED:  # its fma rounds twice
        exact = x.to(tl.float64) * y.to(tl.float64)
        return ((exact + 6755399441055744.0) - 6755399441055744.0).to(tl.int32)
    else:
        return tl.fma(x, y, tl.full(x.shape, MAGIC, tl.float32)).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def scale_of(reach, middle, good):
    """Return scale, inverse and offset that quantize numbers within `reach` of `middle` to int8, as `reference.quantize_activation`.

    The scale is NaN unless `good`, or if it is not finite.
    """
    scale = reach * 0.007874015718698502  # the float32 nearest to 1/127
    inverse = tl.div_rn(tl.full(reach.shape, 127.0, tl.float32), tl.where(reach > 0, reach, float("inf")))
    good = good & (scale < float("inf")) & (tl.abs(middle) < float("inf"))
    scale = tl.where(good, scale, float("nan"))
    offset = tl.where(good, middle, 0.0)
    return scale, tl.where(good & (inverse < float("inf")), inverse, 0.0), offset


@triton.jit
def fma(x, factor, addend):
    """Return x * factor + addend in float32, rounded once; factor and addend broadcast to x."""
    factor = tl.full(x.shape, 0.0, tl.float32) + factor
    addend = tl.full(x.shape, 0.0, tl.float32) + addend
    if INTERPRETED:  # its fma rounds twice
        return (x.to(tl.float64) * factor.to(tl.float64) + addend.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, factor, addend)


@triton.jit
def dot(w, x, acc):
    """Return acc + w · x in float32; float32 operands are not truncated."""
    if INTERPRETED:  # it multiplies bfloat16 wrongly
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    elif x.dtype == tl.float32:
        return tl.dot(w, x, acc, input_precision="ieee")
    else:
        return tl.dot(w, x, acc)


@triton.jit
def clamped(total, low, high):
    """Clamp total to [low, high]; NaN stays NaN."""
    total = tl.maximum(total, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(total, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def added(code, other, numbers, CODES_FIRST: tl.constexpr):
    """Return the codes of the sum of two tensors of int8 codes, as in `problem.Addition`."""
    first = code if CODES_FIRST else other
    second = other if CODES_FIRST else code
    total = fma(second.to(tl.float32), numbers[1], fma(first.to(tl.float32), numbers[0], numbers[2]))
    return ((tl.minimum(tl.maximum(total, numbers[3]), numbers[4]) + MAGIC) - MAGIC).to(tl.int8)


@triton.jit
def requantization(table, rn, row):
    """Load constant, multiplier and start (its bits) of outputs rn, the rows of the table."""
    return tl.load(table + rn), tl.load(table + row + rn), tl.load(table + 2 * row + rn)


@triton.jit
def requantized(acc, requant, low, high, BITS: tl.constexpr):
    """Return int8 clamp(rne(multiplier * (acc + start) + constant)) with what `requantization` loaded."""
    total = acc >> 4 if BITS == 4 else acc
    total += requant[2].to(tl.int32, bitcast=True)[:, None]
    constant = tl.broadcast_to(requant[0][:, None], total.shape)
    multiplier = tl.broadcast_to(requant[1][:, None], total.shape)
    y = tl.fma(total.to(tl.float32), multiplier, constant)
    y = tl.minimum(tl.maximum(y, low), high)
    return ((y + MAGIC) - MAGIC).to(tl.int8)


@triton.jit
def grouped_ordering(number, tiles_m, tiles_n):
    """Return the indices along M and N of tile `number`. GROUP tiles along M follow each other for each tile along N, so that the
    operands of tiles that run at the same time are found in the L2 cache."""
    group_tiles = GROUP * tiles_n
    first_m = number // group_tiles * GROUP
    group_size = tl.minimum(tiles_m - first_m, GROUP)
    return first_m + number % group_tiles % group_size, number % group_tiles // group_size


# Split-K: programs (p, 0 …) share the K of tile p; each stores its sums, and the last to arrive adds them up in order, deterministically.


@triton.jit
def store_partial(sums, slot, slot_stride, lock):
    """Store the sums of program_id(1) in its slot, and return how many programs had arrived before."""
    tl.store(slot + tl.program_id(1) * slot_stride, sums)
    tl.debug_barrier()  # orders this program's stores before its arrival
    return tl.atomic_add(lock, 1, sem="acq_rel")


@triton.jit
def sum_partials(like, slot, slot_stride, UNROLL: tl.constexpr = 1):
    """Return the sum of all programs' sums, for the last to arrive, which then resets the counter. UNROLL loads are in flight."""
    total = tl.zeros_like(like)
    for i in tl.range(tl.num_programs(1), loop_unroll_factor=UNROLL):
        total += tl.load(slot + i * slot_stride, cache_modifier=".cg")
    return total
