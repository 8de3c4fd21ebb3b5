"""x [M, K] -> int8 codes, scales, offsets and sums, as `reference.quantize_activation` makes them, bit for bit, in one pass.

    q                       int8 [M with padding, K padded]: the codes, padded as the weight's blocks are (layouts/gpu_tiles.py), 0 in the
                            padding along K
    scale, offset           float32 [groups, M with padding]: a group is a block of the weight, or the whole row
    sums                    float32 [granules or 1, M with padding], of the codes: exact integers; where the weight has a zero

A granule is the least piece of the padded K that belongs to one block: 32, 64 or 128 elements. Sums are of each granule
where x or the weight has several blocks, else of the row.

Order of the codes: for weights of 8 bits that of their bytes, K's own or that of paired ones (the second below). For 4 bits that in which
kernels get nibbles out of 32-bit registers, so that the operands of one integer mma agree (the words of a lane are khalf, rowhalf, k: see
gpu_tiles):

    granules of 128   the low nibbles of a register (khalf) are k = 0, 64, 1, 65 (+ 2*k4 + 8*khalf + 16*kt), the high ones 32 more:
                      position 64*high + 32*kt + 16*khalf + 4*k4 + 2*k + upper  holds  64*upper + 32*high + 16*kt + 8*khalf + 2*k4 + k
    32 and 64         bytes of both khalves are collected first (PRMT), so that a plane of 32 stays together, as paired bytes do:
                      position 32*plane + 16*kt + 4*k4 + 2*khalf + k  holds  32*plane + 16*kt + 8*khalf + 2*k4 + k

Arithmetic: fma(x, inverse, 1.5 * 2^23) rounds the exact product to an integer, ties to even. NaN and infinities are seen as
bits: they are the greatest magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.arithmetic import fma, round_product, scale_of
from halfbyte.kernels.gpu.runtime import launch
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.gpu.weight_kinds import zero_of
from halfbyte.kernels.problem import Epilogue, Problem, scaling_of
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import piece

Order = Literal["planes", "pairs", "plain"]  # of codes of x, as in the text above
_TILE, _MOST_TILES = 4096, 8  # elements that a program reads together, and how often: all stay in registers
_LONGEST_SUM = 131072  # 127 * 128 * 131072 < 2^31
_LARGEST_TILE = 256  # rows
_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Plan:
    """Sizes and byte offsets of m quantized rows in one piece of memory.

    granule    padded elements that belong to one block
    block      elements of a block of the weight, or of a piece whose products are summed in int32; `padded` with its padding
    whole_row  the row has one scale
    whole      x and the weight have one block: a product is one sum of integers
    summed     the weight has a zero, which takes sums of codes
    """

    m: int
    k: int
    k_padded: int
    granule: int
    block: int
    padded: int
    whole_row: bool
    whole: bool
    summed: bool
    with_offset: bool
    order: Order  # see the text of this file

    @cached_property
    def columns(self) -> int:
        """M with padding, which is undefined: a kernel's tile may read beyond the last row. (TMA takes longer to fill rows that are not
        there than to read others.)"""
        return round_up(self.m, _LARGEST_TILE)

    @cached_property
    def granules(self) -> int:
        return self.k_padded // self.granule

    @cached_property
    def groups(self) -> int:
        return 1 if self.whole_row else -(-self.k_padded // self.padded)

    @cached_property
    def sum_groups(self) -> int:
        return 0 if not self.summed else 1 if self.whole else self.granules

    @cached_property
    def offsets(self) -> tuple[int, int, int, int]:
        """Where scales, sums and offsets begin after the codes, and where all ends, in bytes."""
        at, offsets = aligned(self.columns * self.k_padded), []
        for count in (self.groups, self.sum_groups, self.groups if self.with_offset else 0):
            offsets.append(at)
            at += aligned(4 * count * self.columns)
        return offsets[0], offsets[1], offsets[2], at

    @cached_property
    def nbytes(self) -> int:
        return self.offsets[3]


@dataclass(frozen=True)
class Quantized:
    """Quantized rows: q int8 [M with padding, K padded], scale float32 [groups, M with padding], sums and offset float32 or None."""

    plan: Plan
    q: Tensor
    scale: Tensor
    sums: Tensor | None
    offset: Tensor | None


def aligned(nbytes: int) -> int:
    """Round bytes up to where the next section of the memory may begin."""
    return round_up(nbytes, _ALIGNMENT)


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    whole_row, with_offset = scaling_of(problem.activation)
    block, padded = geo.block, geo.padded
    if piece(block, problem.k) < block:
        block = padded = piece(block, problem.k)
    whole = geo.blocks == 1 and problem.k <= _LONGEST_SUM and (whole_row or block == problem.k)
    return Plan(
        m=problem.m,
        k=problem.k,
        k_padded=geo.k_padded,
        granule=gpu_tiles.RECORD if whole else min(padded, gpu_tiles.RECORD),
        block=problem.k if whole else block,
        padded=geo.k_padded if whole else padded,
        whole_row=whole_row or whole,
        whole=whole,
        summed=zero_of(problem.format) != "none",
        with_offset=with_offset,
        order=_order(problem, whole or padded >= gpu_tiles.RECORD),
    )


def _order(problem: Problem, records: bool) -> Order:
    """Return the order of codes, in granules of whole K slabs or shorter ones."""
    if problem.format.bits == 4:
        return "planes" if records else "pairs"
    return "pairs" if problem.paired else "plain"


def supports(problem: Problem) -> str | None:
    """Return the reason why `problem`'s activations cannot be quantized for a weight in gpu_tiles, or None."""
    block = problem.format.block_size(problem.k)
    if piece(block, problem.k) < block and piece(block, problem.k) % gpu_tiles.RECORD:
        return f"blocks of {block} would be summed in pieces of {piece(block, problem.k)}, not whole records of {gpu_tiles.RECORD}"
    return None


def views(plan: Plan, memory: Tensor) -> Quantized:
    """Return the sections of `memory`, uint8 [at least plan.nbytes]."""
    at_scale, at_sums, at_offset, _ = plan.offsets

    def section(start: int, groups: int) -> Tensor:
        return memory[start:][: 4 * groups * plan.columns].view(torch.float32).view(groups, plan.columns)

    q = memory[: plan.columns * plan.k_padded].view(torch.int8).view(plan.columns, plan.k_padded)
    sums = section(at_sums, plan.sum_groups) if plan.summed else None
    offset = section(at_offset, plan.groups) if plan.with_offset else None
    return Quantized(plan, q, section(at_scale, plan.groups), sums, offset)


def quantized(plan: Plan, q: Tensor, scale: Tensor) -> Quantized:
    """Rows that something else has quantized, as `launch` of the products takes them in place of x: q int8 [m, k], scale float32 [m].

    Raises KernelError where kernels would read beyond them, or another order than that of K.
    """
    if not plan.whole or plan.summed or plan.with_offset or plan.order != "plain" or (plan.columns, plan.k_padded) != q.shape:
        raise KernelError(f"rows of codes are whole tiles with one scale each, in the order of K, got {list(q.shape)} for {plan}")
    return Quantized(plan, q, scale.reshape(1, -1), None, None)


def quantize_activation(
    x: Tensor, plan: Plan, memory: Tensor, *, order: Tensor | None = None, share: int = 1, early: bool = False
) -> Quantized:  # fmt: skip
    """x [m, k] (float32, float16 or bfloat16, unit stride along k) into `memory`, uint8 [at least plan.nbytes].

    order   int32 [m]: row i is row order[i] // share of x; none where that is -1
    early   start before the kernel before has ended, and let the next one do so: from Hopper on
    """
    out = views(plan, memory)
    _run(x, plan, (order, share), (out.q, out.scale, out.sums, out.offset), None, early)
    return out


def round_activation(x: Tensor, plan: Plan, out: Tensor, *, early: bool = False) -> None:
    """Quantize x [m, k] as `quantize_activation`, dequantize it, and write out [m, k], contiguous."""
    _run(x, plan, (None, 1), (None, None, None, None), out, early)


def _run(
    x: Tensor, plan: Plan, source: tuple[Tensor | None, int], sections: tuple[Tensor | None, ...], floats: Tensor | None, early: bool
) -> None:
    order, share = source
    single = not plan.whole_row and plan.padded == plan.granule
    # Granules of one program: some whole groups of one granule, or all of one group's.
    group = plan.granules if single or plan.whole_row else plan.padded // plan.granule
    tile = 1024 if single and plan.m < 64 else max(_TILE, triton.next_power_of_2(group * plan.granule) // _MOST_TILES)
    granules_per_step = min(tile // plan.granule, triton.next_power_of_2(group))
    programs = -(-plan.granules // granules_per_step) if single else plan.groups
    gaps = (None, None) if plan.block == plan.padded else (plan.block, plan.padded)
    launch.run(
        _quantize,
        (plan.m, programs),
        x,
        order,
        *sections,
        floats,
        plan.columns,
        share,
        plan.k,
        plan.granules,
        x.stride(0),
        *gaps,
        granules_per_step if single else group,
        G=plan.granule,
        GRANULES=granules_per_step,
        CHUNKS=1 if single else -(-group // granules_per_step),
        SINGLE=single,
        WITH_OFFSET=plan.with_offset,
        WHOLE=plan.whole,
        ORDER=plan.order,
        PDL=early,
        num_warps=max(1, min(16, granules_per_step * plan.granule // (512 if plan.m < 1024 or floats is not None else 1024))),
        early=early,
    )


def first(multiply: Callable[..., None], extra_bytes: Callable[..., int], *, early: bool = False) -> Callable[..., None]:
    """A kernel file's `launch`, which quantizes x and calls multiply(problem, config, Quantized, weight, out, epilogue, memory) with
    `extra_bytes(problem, config)` bytes of memory of its own; early as in `quantize_activation`."""

    def launch_both(
        problem: Problem, config: Any, x: Tensor | Quantized, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue
    ) -> None:
        """x [M, K] or its codes, the weight's sections, out [M, N]."""
        if isinstance(x, Quantized):
            multiply(problem, config, x, weight, out, epilogue, workspace(out.device, extra_bytes(problem, config)))
            return
        x_plan = plan(problem)
        memory = workspace(out.device, x_plan.nbytes + extra_bytes(problem, config))
        quantized = quantize_activation(x, x_plan, memory, early=early)
        multiply(problem, config, quantized, weight, out, epilogue, memory[x_plan.nbytes :])

    return launch_both


def arrange(q: Tensor, plan: Plan, memory: Tensor) -> Quantized:
    """Write int8 codes [m, k] in the order of the plan; its other sections stay undefined."""
    out = views(plan, memory)
    _run(q, plan, (None, 1), (out.q, None, None, None), None, False)
    return out


# Kernels


@triton.jit
def _columns(HALF: tl.constexpr, G: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The elements of one of the two halves in which a granule is read: its own, or every other 8, as "pairs" needs them: [G / 2]."""
    e = tl.arange(0, G // 2)
    if INTERLEAVED:
        return e // 8 * 16 + 8 * HALF + e % 8
    else:
        return G // 2 * HALF + e


@triton.jit
def _words(c0, c1, GRANULES: tl.constexpr, G: tl.constexpr, ORDER: tl.constexpr):
    """The codes of both halves, int32 [GRANULES, G / 2] each, in the order of this module's text: int32 words [GRANULES, G / 4] of four
    codes, two consecutive ones of each half.

    Words, as Triton 3.6 permutes bytes twice where it converts the layout of an int8 tensor within a warp.
    """
    a0, b0 = tl.split(tl.reshape(c0 & 255, (GRANULES, G // 4, 2)))
    a1, b1 = tl.split(tl.reshape(c1 & 255, (GRANULES, G // 4, 2)))
    if ORDER == "pairs":
        return a0 | b0 << 8 | a1 << 16 | b1 << 24
    else:
        tl.static_assert(ORDER == "planes", "an order that has no code")
        return a0 | a1 << 8 | b0 << 16 | b1 << 24


@triton.jit
def _read(x, granule, end, k, block, padded, column, G: tl.constexpr):
    """Some elements of some granules: values float32 [len(granule), len(column)], which of them exist, and where. `padded` is None where
    blocks have no padding."""
    start = granule * G
    real = (granule < end)[:, None]
    if padded is None:
        at = start[:, None] + column[None, :]
    else:
        within = (start % padded)[:, None] + column[None, :]
        at = (start // padded)[:, None] * block + within
        real &= within < block
    real &= at < k
    return tl.load(x + at, mask=real, other=0.0).to(tl.float32), real, at


@triton.jit
def _extremes(v0, v1, real0, real1, WITH_OFFSET: tl.constexpr):
    """Return for each granule the greatest magnitude as bits, and the least and the greatest value."""
    most = tl.max(tl.maximum(v0.to(tl.int32, bitcast=True) & 0x7FFFFFFF, v1.to(tl.int32, bitcast=True) & 0x7FFFFFFF), axis=1)
    lo = most.to(tl.float32, bitcast=True)
    hi = lo
    if WITH_OFFSET:
        lo = tl.min(tl.minimum(tl.where(real0, v0, float("inf")), tl.where(real1, v1, float("inf"))), axis=1)
        hi = tl.max(tl.maximum(tl.where(real0, v0, float("-inf")), tl.where(real1, v1, float("-inf"))), axis=1)
    return most, lo, hi


@triton.jit
def _codes(v, real, step, middle, inverse, WITH_OFFSET: tl.constexpr):
    """Return codes. A step of NaN gives zeros. Without an offset none exceeds 127, and padding is 0 already."""
    good = (step < float("inf"))[:, None]
    if WITH_OFFSET:
        v = tl.where(real & good, v - middle[:, None], 0.0)
        c = round_product(v, tl.broadcast_to(inverse[:, None], v.shape))
        return tl.minimum(tl.maximum(c, -127), 127)
    else:
        return round_product(tl.where(good, v, 0.0), tl.broadcast_to(inverse[:, None], v.shape))


@triton.jit
def _write(out, at, real, c, step, middle):
    """Write codes as floats."""
    tl.store(out + at, fma(c.to(tl.float32), step[:, None], middle[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit
def _quantize(
    x, order, q, scale, sums, offset, floats, columns, share, k, granules, stride, block, padded, group,
    G: tl.constexpr, GRANULES: tl.constexpr, CHUNKS: tl.constexpr, SINGLE: tl.constexpr,
    WITH_OFFSET: tl.constexpr, WHOLE: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    end = tl.minimum(first + group, granules)
    source = row
    if order is not None:
        pair = tl.load(order + row)
        if pair < 0:
            return
        source = (pair // share).to(tl.int64)
    x += source * stride
    g = first + tl.arange(0, GRANULES)
    INTERLEAVED: tl.constexpr = ORDER == "pairs" and floats is None
    column0 = _columns(0, G, INTERLEAVED)
    column1 = _columns(1, G, INTERLEAVED)
    read = ()  # type: Any
    most = tl.zeros([GRANULES], tl.int32)
    lo = tl.full([GRANULES], float("inf"), tl.float32)
    hi = -lo
    for chunk in tl.static_range(CHUNKS):
        left = _read(x, g + chunk * GRANULES, end, k, block, padded, column0, G)
        right = _read(x, g + chunk * GRANULES, end, k, block, padded, column1, G)
        more, lower, higher = _extremes(left[0], right[0], left[1], right[1], WITH_OFFSET)
        most = tl.maximum(most, more)
        lo = tl.minimum(lo, lower)
        hi = tl.maximum(hi, higher)
        read += ((left, right),)
    if not SINGLE:
        most = tl.zeros_like(most) + tl.max(most, axis=0)
        if WITH_OFFSET:
            lo = tl.zeros_like(lo) + tl.min(lo, axis=0)
            hi = tl.zeros_like(hi) + tl.max(hi, axis=0)
    if WITH_OFFSET:
        empty = lo > hi
        lo = tl.where(empty, 0.0, lo)
        hi = tl.where(empty, 0.0, hi)
        middle = (lo + hi) * 0.5
        reach = (hi - lo) * 0.5
    else:
        middle = tl.zeros_like(most).to(tl.float32)
        reach = most.to(tl.float32, bitcast=True)
    step, inverse, middle = scale_of(reach, middle, most < 0x7F800000)
    if x.dtype.element_ty == tl.int8:  # codes that are there already
        inverse = tl.full(inverse.shape, 1.0, tl.float32)
    if floats is not None:
        floats += row * k
    elif SINGLE:
        tl.store(scale + g * columns + row, step, mask=g < end)
        if WITH_OFFSET:
            tl.store(offset + g * columns + row, middle, mask=g < end)
    elif scale is not None:
        here = tl.program_id(1) * columns + row + tl.zeros_like(g)
        tl.store(scale + here, step, mask=g == first)
        if WITH_OFFSET:
            tl.store(offset + here, middle, mask=g == first)
    total = tl.zeros([GRANULES], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        gc = g + chunk * GRANULES
        v0, real0, at0 = read[chunk][0]
        v1, real1, at1 = read[chunk][1]
        c0 = _codes(v0, real0, step, middle, inverse, WITH_OFFSET)
        c1 = _codes(v1, real1, step, middle, inverse, WITH_OFFSET)
        if floats is not None:
            _write(floats, at0, real0, c0, step, middle)
            _write(floats, at1, real1, c1, step, middle)
        else:
            if sums is not None:
                section = tl.sum(c0 + c1, axis=1)
                total += section
                if not WHOLE:
                    tl.store(sums + gc * columns + row, section.to(tl.float32), mask=gc < end)
            inside = (gc < end)[:, None]
            granule = row * granules + gc[:, None]
            if ORDER == "plain":
                tl.store(q + granule * G + column0[None, :], c0.to(tl.int8), mask=inside)
                tl.store(q + granule * G + column1[None, :], c1.to(tl.int8), mask=inside)
            else:
                words = _words(c0, c1, GRANULES, G, ORDER)
                to = q.to(tl.pointer_type(tl.int32), bitcast=True) + granule * (G // 4) + tl.arange(0, G // 4)[None, :]
                tl.store(to, words, mask=inside)
    if WHOLE and sums is not None:
        tl.store(sums + row, tl.sum(total, axis=0).to(tl.float32))
