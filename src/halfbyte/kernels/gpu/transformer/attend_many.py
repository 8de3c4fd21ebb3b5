"""Attention of many tokens of each sequence, in one pass over keys and values (Dao, FlashAttention-2, 2023).

    y [B, T, H * D] = factor * softmax(scale * q · keysᵀ) · values      queries [B, T, H, D], keys and values [B, Hkv, S, D]

Query t sees key s where s <= length + t, or, if there is a mask [B or 1, T, S], where that says so. Each query head reads the key head of
its group of H / Hkv. A head's attention sink is a score that belongs to no token: it adds to the softmax denominator alone (gpt-oss).

A thread block computes a tile of queries of one head; tiles that see most keys start first. If there is a mask, a first kernel flags the
pieces of keys of which each tile of queries sees any. A tile reads from its first to its last flagged piece, so that a sliding window
costs as much as it is wide.

Arithmetic: products of the tensors' type, sums in float32; weights of the softmax are rounded to that type, the largest of a row being 1.
A query that sees no key gets 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import LOG2E, dot, row_and_column
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.gpu.values import Value
from halfbyte.machine import Gpu

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 512
_PIECE = 256  # keys of a piece, whose mask a thread block of the first kernel reads


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for.

    Attributes:
        dim, wide: Elements of a head, and the next power of two.
        rows, columns: Queries and keys of a tile.
        warps: Of a thread block.
        stages: Tiles of keys and values in flight.
        pdl: It starts before the preceding kernel has ended (programmatic dependent launch).
        piece: Keys of a piece.
    """

    dim: int
    wide: int
    rows: int
    columns: int
    warps: int
    stages: int
    pdl: bool
    piece: int = _PIECE


class Mask(NamedTuple):
    """A mask, and the flags of pieces.

    Attributes:
        visible: uint8 [B or 1, T, S], not 0 where a query sees a key.
        batch_stride, row_stride: Elements from one batch and query to the next; 0 batches if all have one mask.
        flags: uint8 [B or 1, tiles of queries, pieces], not 0 where a tile sees any key of a piece.
        flags_batch_stride: Flags from one batch to the next; 0 if all have one mask.
        pieces: Pieces of the keys.
    """

    visible: Value
    batch_stride: Value
    row_stride: Value
    flags: Value
    flags_batch_stride: Value
    pieces: Value


def supports(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel does not support these heads, or None."""
    if dtype not in _DTYPES:
        return f"it computes in {' and '.join(map(str, _DTYPES))}, not {dtype}"
    if kv_heads < 1 or heads % kv_heads:
        return f"{heads} heads do not share {kv_heads} key heads"
    return f"heads of {dim} are wider than {_WIDEST}" if dim > _WIDEST else None


def static(batch: int, tokens: int, heads: int, dim: int, gpu: Gpu) -> Static:
    """Return what the kernel is compiled for."""
    wide = max(16, triton.next_power_of_2(dim))
    hopper = gpu.backend == "cuda" and gpu.capability == (9, 0)  # its matrix units read both operands from shared memory
    few = tokens <= 64 or batch * heads * -(-tokens // 128) <= gpu.sms
    rows = 64 if few or (wide > 128 and not hopper) else 128
    large = gpu.shared >= 200 << 10
    columns, stages = (64, 3 if wide <= 128 else 2) if large else (64 if wide <= 64 else 32, 2)
    warps = 8 if rows == 128 or wide > 128 else 4
    if wide > 256:  # the largest tile that compiles without spills on all architectures
        rows, columns, stages = 32, 32, 2
    return Static(dim, wide, rows, columns, warps, stages, launcher.starts_early(gpu))


def launch(
    gpu: Gpu,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    factor: float = 1.0,
    sinks: Tensor | None = None,
) -> None:
    """Launch attention; there is at least one key.

    Args:
        gpu: Where.
        queries: [B, T, H, D], contiguous.
        keys, values: [B, Hkv, S, D] of the same type, the last dimension contiguous.
        length: int64 [1]: tokens in the cache before these; None: 0.
        mask: bool [B or 1, T, S], the last dimension contiguous; None: causal.
        out: [B, T, H * D], contiguous.
        scale: Of scores.
        factor: Of the result.
        sinks: [H] of any float type, contiguous; None: there are none.
    """
    batch, tokens, heads, dim = queries.shape
    kv_heads, size = keys.shape[1:3]
    s = static(batch, tokens, heads, dim, gpu)
    tiles, pieces, mask_and_flags = -(-tokens // s.rows), -(-size // _PIECE), None
    if mask is not None:
        masks, visible = len(mask), mask.view(torch.uint8)
        flags = workspace(out.device, masks * tiles * pieces)
        batch_stride, flags_batch_stride = (mask.stride(0), tiles * pieces) if masks > 1 else (0, 0)
        mask_and_flags = Mask(visible, batch_stride, mask.stride(1), flags, flags_batch_stride, pieces)
        find_arguments = visible, batch_stride, mask.stride(1), flags, tokens, size, s.rows, _PIECE, s.pdl
        launcher.run(_find, launcher.flat_grid(masks * tiles, pieces), *find_arguments, num_warps=4, early=s.pdl)
    launcher.run(
        _attend,
        launcher.flat_grid(tiles, batch * heads),
        queries,
        keys,
        values,
        (keys.stride()[:3], values.stride()[:3]),
        length,
        mask_and_flags,
        sinks,
        out,
        (tokens, heads, heads // kv_heads, size),
        (scale * LOG2E.value, factor),
        1 if mask is None else int(triton.next_power_of_2(pieces)),
        s,
        num_warps=s.warps,
        num_stages=s.stages,
        early=s.pdl,
    )


@triton.jit
def _find(mask, batch_stride, row_stride, flags, tokens, size, ROWS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr):
    """Flag piece program_id(0), counted over batches, tiles of queries and pieces, if its tile sees any of its keys."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pieces, tiles = tl.cdiv(size, PIECE), tl.cdiv(tokens, ROWS)
    flag = tl.program_id(0)
    tile, piece, batch = flag // pieces % tiles, flag % pieces, flag // pieces // tiles
    t, k = tile * ROWS + tl.arange(0, ROWS), piece * PIECE + tl.arange(0, PIECE)
    row = mask + batch.to(tl.int64) * batch_stride + t.to(tl.int64) * row_stride
    visible = tl.load(row[:, None] + k[None, :], mask=(t < tokens)[:, None] & (k < size)[None, :], other=0)
    tl.store(flags + flag, tl.max(tl.max(visible, axis=1), axis=0))


@triton.jit
def _attend(queries, keys, values, strides, length, mask, sinks, out, sizes, factors, PIECES: tl.constexpr, S: tl.constexpr):
    """Compute a tile of queries of one head.

    strides  of batches, heads and tokens: of keys, then of values
    mask     a `Mask`, or None
    sizes    tokens of a batch, query heads, query heads of each key head, and keys
    factors  of scores, times log2 of e, and of the result
    PIECES   pieces of the keys, up to a power of two
    S        a `Static`
    """
    ROWS: tl.constexpr = S.rows
    COLUMNS: tl.constexpr = S.columns
    WIDE: tl.constexpr = S.wide
    if S.pdl:
        gdc_launch_dependents()
        gdc_wait()
    tokens, heads, group, size = sizes
    key_batch, key_head, _ = strides[0]
    value_batch, value_head, _ = strides[1]
    tiles = tl.cdiv(tokens, ROWS)
    number, batch_head = row_and_column(tl.num_programs(0) // tiles)
    tile, batch, head = tiles - 1 - number, batch_head // heads, batch_head % heads
    t, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    at = ((batch.to(tl.int64) * tokens + t) * heads + head) * S.dim
    inside = (t < tokens)[:, None] & (d < S.dim)[None, :]
    q = tl.load(queries + at[:, None] + d[None, :], mask=inside, other=0.0)
    keys += batch.to(tl.int64) * key_batch + (head // group).to(tl.int64) * key_head
    values += batch.to(tl.int64) * value_batch + (head // group).to(tl.int64) * value_head
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:
        most = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    first = 0
    if length is not None:
        first = tl.load(length).to(tl.int32)
    if mask is None or length is not None:
        size = tl.minimum(size, first + tokens)  # the cache's memory behind the new tokens is undefined
    if mask is None:
        end = tl.minimum(first + (tile + 1) * ROWS, size)
        seen_by_all = tl.minimum(first + tile * ROWS + 1, size) // COLUMNS * COLUMNS
        for start in tl.range(0, seen_by_all, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            most, total, sums = _add_tile(q, keys, values, strides, k, size, None, factors[0], most, total, sums, S)
        for start in tl.range(seen_by_all, end, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            visible = (k[None, :] <= first + t[:, None]) & (k < size)[None, :]
            most, total, sums = _add_tile(q, keys, values, strides, k, size, visible, factors[0], most, total, sums, S)
    else:
        piece = tl.arange(0, PIECES)
        flags = mask.flags + batch * mask.flags_batch_stride + tile * mask.pieces
        sees = tl.load(flags + piece, mask=piece < mask.pieces, other=0) != 0
        begin = tl.min(tl.where(sees, piece, PIECES), axis=0) * S.piece
        end = tl.minimum((tl.max(tl.where(sees, piece, -1), axis=0) + 1) * S.piece, size)
        row = mask.visible + batch.to(tl.int64) * mask.batch_stride + (tile * ROWS).to(tl.int64) * mask.row_stride
        for start in tl.range(begin, end, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            in_mask = (t < tokens)[:, None] & (k < size)[None, :]
            visible = tl.load(row + (tl.arange(0, ROWS).to(tl.int64) * mask.row_stride)[:, None] + k[None, :], mask=in_mask, other=0) != 0
            most, total, sums = _add_tile(q, keys, values, strides, k, size, visible, factors[0], most, total, sums, S)
    y = sums * (factors[1] / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(out + at[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_tile(q, keys, values, strides, k, size, visible, scale, most, total, sums, S: tl.constexpr):
    """Return the largest score, the sum of the weights and the weighted sum of the values, with keys `k` added.

    keys, values  pointers to the first key and value of the head
    visible       which keys each query sees; None: all
    """
    ROWS: tl.constexpr = S.rows
    COLUMNS: tl.constexpr = S.columns
    d = tl.arange(0, S.wide)
    key_rows, value_rows = keys + k.to(tl.int64) * strides[0][2], values + k.to(tl.int64) * strides[1][2]
    if visible is None and S.dim == S.wide:
        key_tile = tl.load(key_rows[:, None] + d[None, :])
        value_tile = tl.load(value_rows[:, None] + d[None, :])
    else:
        inside = (k < size)[:, None] & (d < S.dim)[None, :]
        key_tile = tl.load(key_rows[:, None] + d[None, :], mask=inside, other=0.0)
        value_tile = tl.load(value_rows[:, None] + d[None, :], mask=inside, other=0.0)
    scores = dot(q, tl.trans(key_tile), tl.zeros((ROWS, COLUMNS), tl.float32))
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, axis=1) * scale)  # ignores NaN, which the weights have
    base = tl.where(larger == float("-inf"), 0.0, larger)  # no key was visible so far
    weights = tl.exp2(scores * scale - base[:, None])
    less = tl.exp2(most - base)
    total = total * less + tl.sum(weights, axis=1)
    return larger, total, dot(weights.to(value_tile.dtype), value_tile, sums * less[:, None])
