"""Dynamic quantization of activations: x [M, K] -> int8 codes, scales, offsets and sums, bit for bit those of
`reference.quantize_activation`, in one pass. Integer kernels call `quantize_activation`, or have a `launch` from `quantizing_launch`.

    q               int8 [M with padding, K padded]: the codes, padded as the weight's blocks are (layouts/gpu_tiles.py), 0 in the padding
                    along K
    scale, offset   float32 [groups, M with padding]: a group is a block of the weight, or the whole row
    sums            float32 [granules or 1, M with padding]: sums of codes (exact integers), only for a weight that has zeros

A granule is the smallest piece of the padded K that belongs to one block: 16, 32, 64 or 128 elements. There is a sum for each granule if x
or the weight has several blocks, otherwise one for the row.

Order of the codes along K (`Plan.order`): that in which kernels multiply the codes of the weight, so that the operands of an integer mma
agree. Except "plain" it follows from how nibbles are unpacked from 32-bit registers, with (khalf, rowhalf, k) of `gpu_tiles.py`:

    "plain"    bytes: K's own
    "planes"   4 bits, granules of 128: the low nibbles of a register (khalf) are k = 0, 64, 1, 65 (+ 2*k4 + 8*khalf + 16*kt), the high ones
               32 more: position 64*high + 32*kt + 16*khalf + 4*k4 + 2*k + upper  holds  64*upper + 32*high + 16*kt + 8*khalf + 2*k4 + k
    "pairs"    4 bits, granules of 16 to 64, and paired bytes: bytes of both khalves are collected first (PRMT), so that a plane of 32
               stays together: position 32*plane + 16*kt + 4*k4 + 2*khalf + k  holds  32*plane + 16*kt + 8*khalf + 2*k4 + k

Arithmetic: fma(x, inverse, 1.5 * 2^23) rounds the exact product to an integer, ties to even. Magnitudes are compared as bits, so that NaN
and infinities are the greatest ones.
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
from halfbyte.kernels.gpu.arithmetic import fma, round_product, row_and_column, scale_of
from halfbyte.kernels.gpu.runtime import launch
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.gpu.weight_kinds import zero_of
from halfbyte.kernels.problem import Epilogue, Problem, scaling_of
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import piece

Order = Literal["planes", "pairs", "plain"]  # of codes along K, as in the text above
_TILE = 4096  # elements that a program loads at a time
_SMALL_TILE = 1024  # the same if there are fewer than _FEW_ROWS and groups of one granule: more programs
_FEW_ROWS = 64
_MOST_CHUNKS = 8  # such loads of a program, all of which stay in registers
_LONGEST_SUM = 131072  # 127 * 128 * 131072 < 2^31
_LARGEST_TILE = 256  # rows of x that a kernel reads at a time
_ALIGNMENT = 256  # bytes
_INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class Plan:
    """Sizes and byte offsets of m quantized rows in one piece of memory.

    Attributes:
        m, k: Of x.
        k_padded: K with all padding of the weight's layout.
        granule: Elements of a granule, with padding.
        block: Elements of a block of the weight, or of a piece of it whose products are summed in int32.
        padded: The same with padding.
        whole_row: The row has one scale.
        whole: x and the weight have one block each: a product is one sum of integers.
        summed: The weight has zeros, for which sums of codes are needed.
        with_offset: x has offsets.
        order: Of codes along K, as in the text of this file.
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
    order: Order

    @cached_property
    def columns(self) -> int:
        """M with padding, whose contents are undefined: a kernel's tile may read beyond the last row. (TMA takes longer to zero-fill rows
        out of bounds than to read them.)"""
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
        """Byte offsets of scales, sums and offsets, which follow the codes, and the end of all."""
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
    """Return how x of an int8 `problem` is quantized. Raises UnsupportedError for a zero that kernels do not decode."""
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
    """Quantize x into `memory`, and return its sections.

    Args:
        x: [m, k] float32, float16 or bfloat16, unit stride along k; with `order` the rows that it names.
        plan: Of the problem.
        memory: uint8 [at least plan.nbytes].
        order: int32 [m]; row i of the result is row order[i] // share of x, or undefined if order[i] is -1. None: row i is that of x.
        share: Entries of `order` that share a row of x.
        early: Start before the preceding kernel has ended, and let the next one do so: from Hopper on.
    """
    out = views(plan, memory)
    _run(x, plan, out.q, out.scale, out.sums, out.offset, order=order, share=share, early=early)
    return out


def round_activation(x: Tensor, plan: Plan, out: Tensor, *, early: bool = False) -> None:
    """Quantize x [m, k] as `quantize_activation`, dequantize it, and write out [m, k], contiguous."""
    _run(x, plan, floats=out, early=early)


def _run(
    x: Tensor,
    plan: Plan,
    q: Tensor | None = None,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    floats: Tensor | None = None,
    order: Tensor | None = None,
    share: int = 1,
    early: bool = False,
) -> None:
    """Launch `_quantize`, which writes sections that are not None, or `floats` instead of them."""
    # A program has several groups of one granule each (`single`), or all granules of one group.
    single = not plan.whole_row and plan.padded == plan.granule
    group = plan.granules if single or plan.whole_row else plan.padded // plan.granule
    if single and plan.m < _FEW_ROWS:
        tile = _SMALL_TILE
    else:
        tile = max(_TILE, triton.next_power_of_2(group * plan.granule) // _MOST_CHUNKS)
    granules_per_step = min(tile // plan.granule, triton.next_power_of_2(group))
    programs = -(-plan.granules // granules_per_step) if single else plan.groups
    gaps = (None, None) if plan.block == plan.padded else (plan.block, plan.padded)
    launch.run(
        _quantize,
        launch.flat_grid(plan.m, programs),
        x,
        order,
        q,
        scale,
        sums,
        offset,
        floats,
        programs,
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


def quantizing_launch(multiply: Callable[..., None], workspace_bytes: Callable[..., int], *, early: bool = False) -> Callable[..., None]:
    """Return the `launch` of a kernel's file, which quantizes x and calls multiply(problem, config, Quantized, weight, out, epilogue,
    memory) with `workspace_bytes(problem, config)` bytes of memory; `early` as in `quantize_activation`."""

    def launch_both(problem: Problem, config: Any, x: Tensor | Quantized, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue) -> None:
        """x [M, K] or its codes, the weight's sections, out [M, N]."""
        if isinstance(x, Quantized):
            multiply(problem, config, x, weight, out, epilogue, workspace(out.device, workspace_bytes(problem, config)))
            return
        x_plan = plan(problem)
        memory = workspace(out.device, x_plan.nbytes + workspace_bytes(problem, config))
        quantized = quantize_activation(x, x_plan, memory, early=early)
        multiply(problem, config, quantized, weight, out, epilogue, memory[x_plan.nbytes :])

    return launch_both


def arrange(q: Tensor, plan: Plan, memory: Tensor) -> Quantized:
    """Write int8 codes [m, k] in the order of the plan; its other sections stay undefined.

    Raises KernelError for a plan of activations that have offsets or a scale for each block, which codes have not.
    """
    if not plan.whole_row or plan.with_offset:
        raise KernelError(f"codes that are arranged have one scale per row and no offset, got {plan}")
    out = views(plan, memory)
    _run(q, plan, out.q)
    return out


# Kernels


@triton.jit
def _columns(HALF: tl.constexpr, G: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the elements [G / 2] of one of the two halves in which a granule is read: contiguous ones, or every other 8 for "pairs"."""
    e = tl.arange(0, G // 2)
    if INTERLEAVED:
        return e // 8 * 16 + 8 * HALF + e % 8
    else:
        return G // 2 * HALF + e


@triton.jit
def _words(c0, c1, GRANULES: tl.constexpr, G: tl.constexpr, ORDER: tl.constexpr):
    """Return the codes of both halves, int32 [GRANULES, G / 2] each, in the order ORDER, as int32 words [GRANULES, G / 4] of four codes:
    two consecutive ones of each half.

    They are packed to words because Triton 3.6 permutes bytes twice where it converts the layout of an int8 tensor within a warp.
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
    """Return elements `column` of granules: values float32 [len(granule), len(column)], the mask of those that are not padding, and their
    positions in the row. `block` and `padded` are None if blocks have no padding."""
    start = granule * G
    exists = (granule < end)[:, None]
    if padded is None:
        at = start[:, None] + column[None, :]
    else:
        within = (start % padded)[:, None] + column[None, :]
        at = (start // padded)[:, None] * block + within
        exists &= within < block
    exists &= at < k
    return tl.load(x + at, mask=exists, other=0.0).to(tl.float32), exists, at


@triton.jit
def _extremes(v0, v1, exists0, exists1, WITH_OFFSET: tl.constexpr):
    """Return for each granule the greatest magnitude as bits, and the minimum and maximum (without offsets that magnitude)."""
    magnitude = tl.max(tl.maximum(v0.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS, v1.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS), axis=1)
    low = magnitude.to(tl.float32, bitcast=True)
    high = low
    if WITH_OFFSET:
        low = tl.min(tl.minimum(tl.where(exists0, v0, float("inf")), tl.where(exists1, v1, float("inf"))), axis=1)
        high = tl.max(tl.maximum(tl.where(exists0, v0, float("-inf")), tl.where(exists1, v1, float("-inf"))), axis=1)
    return magnitude, low, high


@triton.jit
def _codes(v, exists, step, middle, inverse, WITH_OFFSET: tl.constexpr):
    """Return codes int32 of v. A step of NaN gives 0. Without an offset none exceeds 127, and padding is 0 already."""
    good = (step < float("inf"))[:, None]
    if WITH_OFFSET:
        v = tl.where(exists & good, v - middle[:, None], 0.0)
        c = round_product(v, tl.broadcast_to(inverse[:, None], v.shape))
        return tl.minimum(tl.maximum(c, -127), 127)
    else:
        return round_product(tl.where(good, v, 0.0), tl.broadcast_to(inverse[:, None], v.shape))


@triton.jit
def _write(out, at, exists, c, step, middle):
    """Write dequantized codes."""
    tl.store(out + at, fma(c.to(tl.float32), step[:, None], middle[:, None]).to(out.dtype.element_ty), mask=exists)


@triton.jit
def _quantize(
    x, order, q, scale, sums, offset, floats, programs, columns, share, k, granules, stride, block, padded, group,
    G: tl.constexpr, GRANULES: tl.constexpr, CHUNKS: tl.constexpr, SINGLE: tl.constexpr,
    WITH_OFFSET: tl.constexpr, WHOLE: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row, part = row_and_column(programs)
    row, first = row.to(tl.int64), part * group
    if PDL:
        gdc_wait()
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
    loaded = ()  # type: Any
    magnitude = tl.zeros([GRANULES], tl.int32)
    low = tl.full([GRANULES], float("inf"), tl.float32)
    high = -low
    for chunk in tl.static_range(CHUNKS):
        left = _read(x, g + chunk * GRANULES, end, k, block, padded, column0, G)
        right = _read(x, g + chunk * GRANULES, end, k, block, padded, column1, G)
        chunk_magnitude, chunk_low, chunk_high = _extremes(left[0], right[0], left[1], right[1], WITH_OFFSET)
        magnitude = tl.maximum(magnitude, chunk_magnitude)
        low = tl.minimum(low, chunk_low)
        high = tl.maximum(high, chunk_high)
        loaded += ((left, right),)
    if not SINGLE:
        magnitude = tl.zeros_like(magnitude) + tl.max(magnitude, axis=0)
        if WITH_OFFSET:
            low = tl.zeros_like(low) + tl.min(low, axis=0)
            high = tl.zeros_like(high) + tl.max(high, axis=0)
    if WITH_OFFSET:
        empty = low > high
        low = tl.where(empty, 0.0, low)
        high = tl.where(empty, 0.0, high)
        middle = (low + high) * 0.5
        reach = (high - low) * 0.5
    else:
        middle = tl.zeros_like(magnitude).to(tl.float32)
        reach = magnitude.to(tl.float32, bitcast=True)
    step, inverse, middle = scale_of(reach, middle, magnitude < _INFINITY_BITS)
    if x.dtype.element_ty == tl.int8:  # x is codes, which `arrange` only reorders
        inverse = tl.full(inverse.shape, 1.0, tl.float32)
    if floats is not None:
        floats += row * k
    elif SINGLE:
        tl.store(scale + g * columns + row, step, mask=g < end)
        if WITH_OFFSET:
            tl.store(offset + g * columns + row, middle, mask=g < end)
    elif scale is not None:
        at = part * columns + row + tl.zeros_like(g)
        tl.store(scale + at, step, mask=g == first)
        if WITH_OFFSET:
            tl.store(offset + at, middle, mask=g == first)
    total = tl.zeros([GRANULES], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        gc = g + chunk * GRANULES
        v0, exists0, at0 = loaded[chunk][0]
        v1, exists1, at1 = loaded[chunk][1]
        c0 = _codes(v0, exists0, step, middle, inverse, WITH_OFFSET)
        c1 = _codes(v1, exists1, step, middle, inverse, WITH_OFFSET)
        if floats is not None:
            _write(floats, at0, exists0, c0, step, middle)
            _write(floats, at1, exists1, c1, step, middle)
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
                word_pointers = q.to(tl.pointer_type(tl.int32), bitcast=True) + granule * (G // 4) + tl.arange(0, G // 4)[None, :]
                tl.store(word_pointers, words, mask=inside)
    if WHOLE and sums is not None:
        tl.store(sums + row, tl.sum(total, axis=0).to(tl.float32))
