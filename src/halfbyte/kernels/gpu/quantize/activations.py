"""Dynamic quantization of activations for integer products: x [M, K] -> int8 codes, scales, offsets and sums, by one kernel.

    code = clamp(round((x - offset) / scale), -127, 127),   x ~ scale * code + offset

bit for bit as `reference.quantize_activation` computes them. Integer kernels have a `launch` from `quantizing_launch`, or call
`quantize_activation`; kernels in floating point that round activations as integer ones do call `round_activation`.

    q               int8 [M padded, K padded]: codes. K is padded as the weight's blocks are (layouts/gpu_tiles.py), with codes of 0
    scale, offset   float32 [groups, M padded]: a group, which has one scale, is a block of the weight or the whole row
    sums            float32 [granules or 1, M padded]: sums of codes, exact integers, for weights with zeros only

A granule is the unit in which the kernel reads a row: 16, 32, 64 or 128 elements of the padded K, all of one block. There is a sum for each
granule, or one for the row if x and the weight have one block each.

`Plan.order` is the order of codes along K. It is the one in which kernels unpack the weight's codes from 32-bit registers, so that the
operands of an integer mma agree; (khalf, k4, k) as in `gpu_tiles.py`, kt counts 16 elements:

    "plain"    bytes: as K
    "planes"   4 bits, granules of 128: the low nibbles of a register (khalf) are k = 0, 64, 1, 65 (+ 2*k4 + 8*khalf + 16*kt), the high ones
               32 more: position 64*high + 32*kt + 16*khalf + 4*k4 + 2*k + upper  holds  64*upper + 32*high + 16*kt + 8*khalf + 2*k4 + k
    "pairs"    4 bits, granules of 16 to 64, and paired bytes: bytes of both khalves are collected first (PRMT), so that a plane of 32
               stays together: position 32*plane + 16*kt + 4*k4 + 2*khalf + k  holds  32*plane + 16*kt + 8*khalf + 2*k4 + k

Arithmetic: fma(x, 1 / scale, 1.5 * 2^23) rounds the exact product to an integer, ties to even. Magnitudes are compared as bits, so that NaN
and infinities are the greatest ones: a row or block that has one gets a scale of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

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
_CHUNK = 4096  # elements that a program loads at a time
_SMALL_CHUNK = 1024  # the same for fewer than _FEW_ROWS rows with groups of one granule: more programs
_FEW_ROWS = 64
_MOST_CHUNKS = 8  # chunks of a program, all of which stay in registers
_LONGEST_SUM = 131072  # elements whose products fit in an int32 sum: 127 * 128 * 131072 < 2^31
_LARGEST_TILE = 256  # rows of x that an integer kernel reads at a time
_ALIGNMENT = 256  # bytes
_INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class Plan:
    """Sizes and byte offsets of m quantized rows in one piece of memory.

    Attributes:
        m, k: Shape of x.
        k_padded: K with all padding of the weight's layout.
        granule: Elements of a granule, with padding.
        block: Elements of a block of the weight, or of a piece of it that is short enough to sum its products in int32.
        padded: `block` with padding.
        whole_row: The row has one scale.
        whole: x and the weight have one block each: an output is one sum of integer products.
        with_sums: The weight has zeros, so that kernels need the sums of codes.
        with_offset: x has offsets.
        order: Order of codes along K, as the docstring of this file defines it.
    """

    m: int
    k: int
    k_padded: int
    granule: int
    block: int
    padded: int
    whole_row: bool
    whole: bool
    with_sums: bool
    with_offset: bool
    order: Order

    @cached_property
    def m_padded(self) -> int:
        """M up to a multiple of the largest tile. Kernels read the padding, which is undefined: TMA would take longer to zero-fill it."""
        return round_up(self.m, _LARGEST_TILE)

    @cached_property
    def granules(self) -> int:
        return self.k_padded // self.granule

    @cached_property
    def groups(self) -> int:
        return 1 if self.whole_row else -(-self.k_padded // self.padded)

    @cached_property
    def sum_groups(self) -> int:
        return 0 if not self.with_sums else 1 if self.whole else self.granules

    @cached_property
    def offsets(self) -> tuple[int, int, int, int]:
        """Byte offsets of scales, sums and offsets, which follow the codes, and the end of all."""
        at, offsets = aligned(self.m_padded * self.k_padded), []
        for count in (self.groups, self.sum_groups, self.groups if self.with_offset else 0):
            offsets.append(at)
            at += aligned(4 * count * self.m_padded)
        return offsets[0], offsets[1], offsets[2], at

    @cached_property
    def nbytes(self) -> int:
        return self.offsets[3]


@dataclass(frozen=True)
class Quantized:
    """Quantized rows, as the docstring of this file specifies them; sums and offset are None where the plan has none."""

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
        with_sums=zero_of(problem.format) != "none",
        with_offset=with_offset,
        order=_order(problem, whole_slabs=whole or padded >= gpu_tiles.RECORD),
    )


def _order(problem: Problem, *, whole_slabs: bool) -> Order:
    """Return the order of codes; whole_slabs: granules are whole K slabs of 128 elements."""
    if problem.format.bits == 4:
        return "planes" if whole_slabs else "pairs"
    return "pairs" if problem.paired else "plain"


def supports(problem: Problem) -> str | None:
    """Return the reason why `problem`'s activations cannot be quantized for a weight in gpu_tiles, or None."""
    block = problem.format.block_size(problem.k)
    if piece(block, problem.k) < block and piece(block, problem.k) % gpu_tiles.RECORD:
        return f"blocks of {block} would be summed in pieces of {piece(block, problem.k)}, not whole K slabs of {gpu_tiles.RECORD}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    granules, rows = geo.k_padded // min(geo.padded, gpu_tiles.RECORD), max(round_up(problem.m, _LARGEST_TILE), geo.n_padded)
    if granules * rows >= 1 << 31:
        return f"offsets of scales and sums are int32, and {granules} granules of {rows} rows have 2^31 or more"
    return None


def views(plan: Plan, memory: Tensor) -> Quantized:
    """Return the sections of `memory`, uint8 [at least plan.nbytes]."""
    at_scale, at_sums, at_offset, _ = plan.offsets

    def section(start: int, groups: int) -> Tensor:
        return memory[start:][: 4 * groups * plan.m_padded].view(torch.float32).view(groups, plan.m_padded)

    q = memory[: plan.m_padded * plan.k_padded].view(torch.int8).view(plan.m_padded, plan.k_padded)
    sums = section(at_sums, plan.sum_groups) if plan.with_sums else None
    offset = section(at_offset, plan.groups) if plan.with_offset else None
    return Quantized(plan, q, section(at_scale, plan.groups), sums, offset)


def quantized(plan: Plan, q: Tensor, scale: Tensor) -> Quantized:
    """Return rows that something else has quantized, q int8 [m, k] with scale float32 [m], as `launch` of integer kernels takes them for x.

    Raises:
        KernelError: The plan has padding, another order than that of K, more scales, sums or offsets.
    """
    if not plan.whole or plan.with_sums or plan.with_offset or plan.order != "plain" or (plan.m_padded, plan.k_padded) != q.shape:
        raise KernelError(f"rows of codes are whole tiles with one scale each, in the order of K, got {list(q.shape)} for {plan}")
    return Quantized(plan, q, scale.reshape(1, -1), None, None)


def quantize_activation(
    x: Tensor, plan: Plan, memory: Tensor, *, order: Tensor | None = None, share: int = 1, early: bool = False
) -> Quantized:  # fmt: skip
    """Quantize x into `memory`, and return its sections.

    Args:
        x: [m, k] float32, float16 or bfloat16, unit stride along k; with `order` the rows that it names.
        plan: The plan of the problem.
        memory: uint8 [at least plan.nbytes].
        order: int32 [m]; row i of the result is row order[i] // share of x, or undefined if order[i] is -1. None: row i is that of x.
        share: Entries of `order` that share a row of x.
        early: Start before the preceding kernel has ended, and let the next one do so: from Hopper on.
    """
    out = views(plan, memory)
    _launch(x, plan, q=out.q, scale=out.scale, sums=out.sums, offset=out.offset, order=order, share=share, early=early)
    return out


def round_activation(x: Tensor, plan: Plan, out: Tensor, *, early: bool = False) -> None:
    """Quantize x [m, k] as `quantize_activation`, dequantize it, and write out [m, k], contiguous."""
    _launch(x, plan, floats=out, early=early)


def arrange(q: Tensor, plan: Plan, memory: Tensor) -> Quantized:
    """Write int8 codes [m, k] to `memory` in the order of the plan; all other sections stay undefined.

    Raises:
        KernelError: The plan has offsets or a scale for each block, which such codes do not have.
    """
    if not plan.whole_row or plan.with_offset:
        raise KernelError(f"codes that are arranged have one scale per row and no offset, got {plan}")
    out = views(plan, memory)
    _launch(q, plan, q=out.q)
    return out


def quantizing_launch(multiply: Callable[..., None], workspace_bytes: Callable[..., int], *, early: bool = False) -> Callable[..., None]:
    """Return the `launch` of an integer kernel's file: it quantizes x, or takes it quantized, and multiplies.

    Args:
        multiply: multiply(problem, config, Quantized, weight, out, epilogue, memory) launches the product.
        workspace_bytes: workspace_bytes(problem, config) is how much `memory` the product needs.
        early: As in `quantize_activation`.
    """

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


# The kernel and its launch


class _Tiling(NamedTuple):
    """How the groups of a row are dealt out to programs.

    Attributes:
        per_granule: Each granule has a scale, and a program quantizes several; otherwise a program quantizes one group.
        programs: Programs of a row.
        granules: Granules of a program.
        chunk: Granules that it loads at a time, a power of two.
        chunks: Loads of a program.
    """

    per_granule: bool
    programs: int
    granules: int
    chunk: int
    chunks: int


def _tiling(plan: Plan) -> _Tiling:
    """Return the tiling for rows of a plan."""
    per_granule = not plan.whole_row and plan.padded == plan.granule
    granules = plan.granules if per_granule or plan.whole_row else plan.padded // plan.granule
    elements = max(_CHUNK, triton.next_power_of_2(granules * plan.granule) // _MOST_CHUNKS)
    if per_granule and plan.m < _FEW_ROWS:
        elements = _SMALL_CHUNK
    chunk = min(elements // plan.granule, triton.next_power_of_2(granules))
    if per_granule:
        return _Tiling(True, -(-granules // chunk), chunk, chunk, 1)
    return _Tiling(False, plan.groups, granules, chunk, -(-granules // chunk))


def _launch(
    x: Tensor,
    plan: Plan,
    *,
    q: Tensor | None = None,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
    offset: Tensor | None = None,
    floats: Tensor | None = None,
    order: Tensor | None = None,
    share: int = 1,
    early: bool = False,
) -> None:
    """Launch `_quantize`. It writes the sections that are not None; or `floats` alone, the dequantized codes [m, k]."""
    tiling = _tiling(plan)
    block, padded = (None, None) if plan.block == plan.padded else (plan.block, plan.padded)
    elements_per_warp = 512 if plan.m < 1024 or floats is not None else 1024
    launch.run(
        _quantize,
        launch.flat_grid(plan.m, tiling.programs),
        x,
        order,
        q,
        scale,
        sums,
        offset,
        floats,
        tiling.programs,
        plan.m_padded,
        share,
        plan.k,
        plan.granules,
        x.stride(0),
        block,
        padded,
        tiling.granules,
        G=plan.granule,
        CHUNK=tiling.chunk,
        CHUNKS=tiling.chunks,
        PER_GRANULE=tiling.per_granule,
        WITH_OFFSET=plan.with_offset,
        WHOLE=plan.whole,
        ORDER=plan.order,
        PDL=early,
        num_warps=max(1, min(16, tiling.chunk * plan.granule // elements_per_warp)),
        early=early,
    )


@triton.jit
def _quantize(
    x, order, q, scale, sums, offset, floats, programs, m_padded, share, k, row_granules, stride, block, padded, program_granules,
    G: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PER_GRANULE: tl.constexpr,
    WITH_OFFSET: tl.constexpr, WHOLE: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize granules part * program_granules and on of a row (`row_and_column`): one group, or with PER_GRANULE as many.

    x, order, share              rows of `stride` elements, and which of them, as in `quantize_activation`
    q, scale, sums, offset       sections of the result, None where they are not written
    floats                       [m, k], written instead of them; None: they are
    block, padded                elements of a block without and with padding; None if blocks have no padding
    G, CHUNK, CHUNKS             elements of a granule, granules of a chunk, chunks of a program
    WITH_OFFSET, WHOLE, ORDER    as in `Plan`
    """
    if PDL:
        gdc_launch_dependents()
    row, part = row_and_column(programs)
    row, first = row.to(tl.int64), part * program_granules
    if PDL:
        gdc_wait()
    end = tl.minimum(first + program_granules, row_granules)
    source = row
    if order is not None:
        entry = tl.load(order + row)
        if entry < 0:
            return
        source = (entry // share).to(tl.int64)
    x += source * stride
    g = first + tl.arange(0, CHUNK)  # granules of the first chunk
    # Granules are read as two halves, of which codes are packed to words.
    INTERLEAVED: tl.constexpr = ORDER == "pairs" and floats is None
    column0 = _half_columns(0, G, INTERLEAVED)
    column1 = _half_columns(1, G, INTERLEAVED)

    # Load all chunks, and find the extremes of each granule, then of the group.
    chunks = ()  # type: Any
    magnitude = tl.zeros([CHUNK], tl.int32)
    low = tl.full([CHUNK], float("inf"), tl.float32)
    high = -low
    for chunk in tl.static_range(CHUNKS):
        v0, exists0, at0 = _load(x, g + chunk * CHUNK, end, k, block, padded, column0, G)
        v1, exists1, at1 = _load(x, g + chunk * CHUNK, end, k, block, padded, column1, G)
        chunk_magnitude, chunk_low, chunk_high = _extremes(v0, v1, exists0, exists1, WITH_OFFSET)
        magnitude = tl.maximum(magnitude, chunk_magnitude)
        low = tl.minimum(low, chunk_low)
        high = tl.maximum(high, chunk_high)
        chunks += ((v0, exists0, at0, v1, exists1, at1),)
    if not PER_GRANULE:
        magnitude = tl.zeros_like(magnitude) + tl.max(magnitude, axis=0)
        if WITH_OFFSET:
            low = tl.zeros_like(low) + tl.min(low, axis=0)
            high = tl.zeros_like(high) + tl.max(high, axis=0)

    # Scales and offsets, equal in all granules of a group.
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
    elif PER_GRANULE:
        tl.store(scale + g * m_padded + row, step, mask=g < end)
        if WITH_OFFSET:
            tl.store(offset + g * m_padded + row, middle, mask=g < end)
    elif scale is not None:
        at = part * m_padded + row + tl.zeros_like(g)
        tl.store(scale + at, step, mask=g == first)
        if WITH_OFFSET:
            tl.store(offset + at, middle, mask=g == first)

    # Codes of all chunks and their sums.
    row_sum = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        chunk_granules = g + chunk * CHUNK
        v0, exists0, at0, v1, exists1, at1 = chunks[chunk]
        c0 = _codes(v0, exists0, step, middle, inverse, WITH_OFFSET)
        c1 = _codes(v1, exists1, step, middle, inverse, WITH_OFFSET)
        if floats is not None:
            _store_dequantized(floats, at0, exists0, c0, step, middle)
            _store_dequantized(floats, at1, exists1, c1, step, middle)
        else:
            if sums is not None:
                granule_sums = tl.sum(c0 + c1, axis=1)
                row_sum += granule_sums
                if not WHOLE:
                    tl.store(sums + chunk_granules * m_padded + row, granule_sums.to(tl.float32), mask=chunk_granules < end)
            inside = (chunk_granules < end)[:, None]
            granule = row * row_granules + chunk_granules[:, None]  # counted over all rows
            if ORDER == "plain":
                tl.store(q + granule * G + column0[None, :], c0.to(tl.int8), mask=inside)
                tl.store(q + granule * G + column1[None, :], c1.to(tl.int8), mask=inside)
            else:
                words = _words(c0, c1, CHUNK, G, ORDER)
                word_pointers = q.to(tl.pointer_type(tl.int32), bitcast=True) + granule * (G // 4) + tl.arange(0, G // 4)[None, :]
                tl.store(word_pointers, words, mask=inside)
    if WHOLE and sums is not None:
        tl.store(sums + row, tl.sum(row_sum, axis=0).to(tl.float32))


@triton.jit
def _half_columns(HALF: tl.constexpr, G: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the elements [G / 2] of half HALF of a granule: contiguous ones, or every other 8 for "pairs"."""
    e = tl.arange(0, G // 2)
    if INTERLEAVED:
        return e // 8 * 16 + 8 * HALF + e % 8
    else:
        return G // 2 * HALF + e


@triton.jit
def _load(x, granule, end, k, block, padded, column, G: tl.constexpr):
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
def _words(c0, c1, CHUNK: tl.constexpr, G: tl.constexpr, ORDER: tl.constexpr):
    """Return the codes of both halves, int32 [CHUNK, G / 2] each, in the order ORDER, as int32 words [CHUNK, G / 4] of four codes: two
    consecutive ones of each half.

    They are packed to words because Triton 3.6 permutes bytes twice where it converts the layout of an int8 tensor within a warp.
    """
    a0, b0 = tl.split(tl.reshape(c0 & 255, (CHUNK, G // 4, 2)))
    a1, b1 = tl.split(tl.reshape(c1 & 255, (CHUNK, G // 4, 2)))
    if ORDER == "pairs":
        return a0 | b0 << 8 | a1 << 16 | b1 << 24
    else:
        tl.static_assert(ORDER == "planes", "an order that has no code")
        return a0 | a1 << 8 | b0 << 16 | b1 << 24


@triton.jit
def _store_dequantized(out, at, exists, c, step, middle):
    """Store step * c + middle in the dtype of `out`."""
    tl.store(out + at, fma(c.to(tl.float32), step[:, None], middle[:, None]).to(out.dtype.element_ty), mask=exists)
