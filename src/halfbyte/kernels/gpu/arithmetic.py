"""Arithmetic that kernels share, in registers; and what Triton's interpreter, which tests run kernels in, has to do otherwise."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 has a spacing of 1 there
MAGIC_BITS = tl.constexpr(0x4B400000)
LOG2E = tl.constexpr(1.4426950408889634)
GROUP = tl.constexpr(8)  # tiles along M that follow each other: see `in_groups`


@triton.jit
def round_product(x, y):
    """The integer nearest to the exact product of two float32, ties to even, as int32; right where it lies within 2^22."""
    if INTERPRETED:  # whose fma rounds twice
        exact = x.to(tl.float64) * y.to(tl.float64)
        return ((exact + 6755399441055744.0) - 6755399441055744.0).to(tl.int32)
    else:
        return tl.fma(x, y, tl.full(x.shape, MAGIC, tl.float32)).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def scale_of(reach, middle, good):
    """What turns numbers within `reach` of `middle` into int8, as `reference.quantize_activation` has it: scale, inverse and offset. The
    scale is NaN where `good` does not hold or what comes out is not finite."""
    scale = reach * 0.007874015718698502  # the float32 nearest to 1/127
    inverse = tl.div_rn(tl.full(reach.shape, 127.0, tl.float32), tl.where(reach > 0, reach, float("inf")))
    good = good & (scale < float("inf")) & (tl.abs(middle) < float("inf"))
    scale = tl.where(good, scale, float("nan"))
    offset = tl.where(good, middle, 0.0)
    return scale, tl.where(good & (inverse < float("inf")), inverse, 0.0), offset


@triton.jit
def fma(x, factor, addend):
    """x * factor + addend in float32, rounded once; factor and addend broadcast to x."""
    factor = tl.full(x.shape, 0.0, tl.float32) + factor
    addend = tl.full(x.shape, 0.0, tl.float32) + addend
    if INTERPRETED:  # whose fma rounds twice
        return (x.to(tl.float64) * factor.to(tl.float64) + addend.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, factor, addend)


@triton.jit
def dot(w, x, acc):
    """acc + w · x, in float32; float32 operands are not cut."""
    if INTERPRETED:  # which multiplies bfloat16 wrongly
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    elif x.dtype == tl.float32:
        return tl.dot(w, x, acc, input_precision="ieee")
    else:
        return tl.dot(w, x, acc)


@triton.jit
def clamped(total, low, high):
    """A NaN stays."""
    total = tl.maximum(total, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(total, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def added(code, other, numbers, LEADS: tl.constexpr):
    """Codes to be written, of codes and others in int8, as `problem.Addition` has it."""
    first = code if LEADS else other
    second = other if LEADS else code
    total = fma(second.to(tl.float32), numbers[1], fma(first.to(tl.float32), numbers[0], numbers[2]))
    return ((tl.minimum(tl.maximum(total, numbers[3]), numbers[4]) + MAGIC) - MAGIC).to(tl.int8)


@triton.jit
def requantization(table, rn, row):
    """Of outputs rn: constant, multiplier and start (its bits), the rows of the table."""
    return tl.load(table + rn), tl.load(table + row + rn), tl.load(table + 2 * row + rn)


@triton.jit
def requantized(acc, told, low, high, BITS: tl.constexpr):
    """int8 clamp(rne(multiplier * (acc + start) + constant)) with what `requantization` tells."""
    total = acc >> 4 if BITS == 4 else acc
    total += told[2].to(tl.int32, bitcast=True)[:, None]
    constant = tl.broadcast_to(told[0][:, None], total.shape)
    multiplier = tl.broadcast_to(told[1][:, None], total.shape)
    y = tl.fma(total.to(tl.float32), multiplier, constant)
    y = tl.minimum(tl.maximum(y, low), high)
    return ((y + MAGIC) - MAGIC).to(tl.int8)


@triton.jit
def in_groups(number, tiles_m, tiles_n):
    """Where tile `number` is along M and N: GROUP tiles along M follow each other for each tile along N, so that both operands are found
    in the cache again."""
    width = GROUP * tiles_n
    first = number // width * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + number % width % size, number % width // size


# Programs (p, 0 …) that share the K of tile p: each leaves its sums, and the last to arrive adds up in order, so that results do not vary.


@triton.jit
def leave(sums, place, apart, lock):
    """Writes the sums of program_id(1) to `place`, the programs `apart` from each other -> how many had arrived before."""
    tl.store(place + tl.program_id(1) * apart, sums)
    tl.debug_barrier()  # what this block wrote comes before its arrival
    return tl.atomic_add(lock, 1, sem="acq_rel")


@triton.jit
def collect(like, place, apart, AT_ONCE: tl.constexpr = 1):
    """For the last to arrive, which then sets the lock to 0 again: what all have left. AT_ONCE are on their way to registers."""
    total = tl.zeros_like(like)
    for i in tl.range(tl.num_programs(1), loop_unroll_factor=AT_ONCE):
        total += tl.load(place + i * apart, cache_modifier=".cg")
    return total
