"""Many tokens attend to what is known: one pass over keys and values (Dao, FlashAttention-2, 2023).

    y [B, T, H * D] = factor * softmax(scale * q · keysᵀ) · values      queries [B, T, H, D], keys and values [B, Hkv, S, D]

Query t sees key s where s <= length + t, or where a mask [B or 1, T, S] says so, which then tells all. Each query head reads the key head
of its group of H / Hkv. A head's sink is a score that belongs to no token: it adds to the sum of exponentials and nothing else
(gpt-oss). A block takes a tile of queries of one head, those that see most first. Of a mask a first kernel finds between which keys each
tile of queries sees any, so that a window costs what it is wide.

Arithmetic: products of the tensors' type, sums in float32; weights of the softmax are rounded to that type, the largest of a row being 1.
A query that sees nothing gets 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import LOG2E, dot, row_and_column
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.machine import Gpu

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 512
_PIECE = 256  # keys whose mask a block of the first kernel reads


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for: tiles of `rows` queries and `columns` keys; `wide` is `dim` up to a power of two."""

    dim: int
    wide: int
    rows: int
    columns: int
    warps: int
    stages: int
    pdl: bool
    piece: int = _PIECE


def supports(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str | None:
    """Why this is not for the kernel, or None."""
    if dtype not in _DTYPES:
        return f"it computes in {' and '.join(map(str, _DTYPES))}, not {dtype}"
    if kv_heads < 1 or heads % kv_heads:
        return f"{heads} heads do not share {kv_heads} key heads"
    return f"heads of {dim} are wider than {_WIDEST}" if dim > _WIDEST else None


def static(batch: int, tokens: int, heads: int, dim: int, gpu: Gpu) -> Static:
    wide = max(16, triton.next_power_of_2(dim))
    hopper = gpu.backend == "cuda" and gpu.capability == (9, 0)  # its matrix units read both operands from shared memory
    few = tokens <= 64 or batch * heads * -(-tokens // 128) <= gpu.sms
    rows = 64 if few or (wide > 128 and not hopper) else 128
    large = gpu.shared >= 200 << 10
    columns, stages = (64, 3 if wide <= 128 else 2) if large else (64 if wide <= 64 else 32, 2)
    warps = 8 if rows == 128 or wide > 128 else 4
    if wide > 256:  # of the tiles that were compiled the largest one without spills, on all architectures
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
    """
    queries       [B, T, H, D], out [B, T, H * D], contiguous
    keys, values  [B, Hkv, S, D] of the same type, the last dimension contiguous
    length        int64, one number; None: 0
    mask          bool [B or 1, T, S], the last dimension contiguous; None: causal
    sinks         [H], of any float type; None: there are none
    """
    batch, tokens, heads, dim = queries.shape
    kv_heads, size = keys.shape[1:3]
    s = static(batch, tokens, heads, dim, gpu)
    tiles = -(-tokens // s.rows)
    mask_info = None
    if mask is not None:
        pieces = -(-size // _PIECE)
        stride = mask.stride(0) if mask.shape[0] > 1 else 0
        flags = workspace(out.device, mask.shape[0] * tiles * pieces)
        visible, beyond = mask.view(torch.uint8), (tiles * pieces if mask.shape[0] > 1 else 0)
        grid = launcher.flat_grid(mask.shape[0] * tiles, pieces)
        launcher.run(_find, grid, visible, stride, mask.stride(1), flags, tokens, size, s.rows, _PIECE, s.pdl, num_warps=4, early=s.pdl)
        mask_info = visible, stride, mask.stride(1), flags, beyond, pieces
    launcher.run(
        _attend,
        launcher.flat_grid(tiles, batch * heads),
        queries,
        keys,
        values,
        (*keys.stride()[:3], *values.stride()[:3]),
        length,
        mask_info,
        sinks,
        out,
        (tokens, heads, heads // kv_heads, size),
        (scale * LOG2E.value, factor),
        1 if mask_info is None else int(triton.next_power_of_2(mask_info[5])),
        s,
        num_warps=s.warps,
        num_stages=s.stages,
        early=s.pdl,
    )


@triton.jit
def _find(mask, of_batch, of_row, flags, tokens, size, ROWS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr):
    """Whether a tile of queries sees any of a piece of the keys."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pieces, tiles = tl.cdiv(size, PIECE), tl.cdiv(tokens, ROWS)
    place = tl.program_id(0)
    tile, piece, batch = place // pieces % tiles, place % pieces, place // pieces // tiles
    t, k = tile * ROWS + tl.arange(0, ROWS), piece * PIECE + tl.arange(0, PIECE)
    row = mask + batch.to(tl.int64) * of_batch + t.to(tl.int64) * of_row
    visible = tl.load(row[:, None] + k[None, :], mask=(t < tokens)[:, None] & (k < size)[None, :], other=0)
    tl.store(flags + place, tl.max(tl.max(visible, axis=1), axis=0))


@triton.jit
def _attend(queries, keys, values, strides, length, mask_info, sinks, out, sizes, factors, PIECES: tl.constexpr, S: tl.constexpr):
    ROWS: tl.constexpr = S.rows
    COLUMNS: tl.constexpr = S.columns
    WIDE: tl.constexpr = S.wide
    if S.pdl:
        gdc_launch_dependents()
        gdc_wait()
    tokens, heads, group, size = sizes[0], sizes[1], sizes[2], sizes[3]
    tiles = tl.cdiv(tokens, ROWS)
    tile, sequence = row_and_column(tl.num_programs(0) // tiles)  # a sequence's head
    tile, batch, head = tiles - 1 - tile, sequence // heads, sequence % heads
    t, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    at = ((batch.to(tl.int64) * tokens + t) * heads + head) * S.dim
    inside = (t < tokens)[:, None] & (d < S.dim)[None, :]
    q = tl.load(queries + at[:, None] + d[None, :], mask=inside, other=0.0)
    key = keys + batch.to(tl.int64) * strides[0] + (head // group).to(tl.int64) * strides[1]
    value = values + batch.to(tl.int64) * strides[3] + (head // group).to(tl.int64) * strides[4]
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:
        most = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    first = 0
    if length is not None:
        first = tl.load(length).to(tl.int32)
    if mask_info is None or length is not None:
        size = tl.minimum(size, first + tokens)  # what a cache has behind may be anything
    if mask_info is None:
        end = tl.minimum(first + (tile + 1) * ROWS, size)
        whole = tl.minimum(first + tile * ROWS + 1, size) // COLUMNS * COLUMNS  # keys that all queries of the tile see
        for start in tl.range(0, whole, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            most, total, sums = _add(q, key, value, strides, k, size, None, factors[0], most, total, sums, S)
        for start in tl.range(whole, end, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            visible = (k[None, :] <= first + t[:, None]) & (k < size)[None, :]
            most, total, sums = _add(q, key, value, strides, k, size, visible, factors[0], most, total, sums, S)
    else:
        piece = tl.arange(0, PIECES)
        flags = mask_info[3] + batch * mask_info[4] + tile * mask_info[5]
        sees = tl.load(flags + piece, mask=piece < mask_info[5], other=0) != 0
        begin = tl.min(tl.where(sees, piece, PIECES), axis=0) * S.piece
        end = tl.minimum((tl.max(tl.where(sees, piece, -1), axis=0) + 1) * S.piece, size)
        row = mask_info[0] + batch.to(tl.int64) * mask_info[1] + (tile * ROWS).to(tl.int64) * mask_info[2]
        for start in tl.range(begin, end, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            in_mask = (t < tokens)[:, None] & (k < size)[None, :]
            visible = tl.load(row + (tl.arange(0, ROWS).to(tl.int64) * mask_info[2])[:, None] + k[None, :], mask=in_mask, other=0) != 0
            most, total, sums = _add(q, key, value, strides, k, size, visible, factors[0], most, total, sums, S)
    y = sums * (factors[1] / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(out + at[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add(q, key, value, strides, k, size, visible, scale, most, total, sums, S: tl.constexpr):
    """The largest score, the sum of the weights and the weighted sum of the values, with the keys k, of which `seen` are (None: all)."""
    ROWS: tl.constexpr = S.rows
    COLUMNS: tl.constexpr = S.columns
    d = tl.arange(0, S.wide)
    places_of_keys, places_of_values = key + k.to(tl.int64) * strides[2], value + k.to(tl.int64) * strides[5]
    if visible is None and S.dim == S.wide:
        keys = tl.load(places_of_keys[:, None] + d[None, :])
        values = tl.load(places_of_values[:, None] + d[None, :])
    else:
        inside = (k < size)[:, None] & (d < S.dim)[None, :]
        keys = tl.load(places_of_keys[:, None] + d[None, :], mask=inside, other=0.0)
        values = tl.load(places_of_values[:, None] + d[None, :], mask=inside, other=0.0)
    scores = dot(q, tl.trans(keys), tl.zeros((ROWS, COLUMNS), tl.float32))
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, axis=1) * scale)  # a NaN comes back by the weights
    base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen so far
    weights = tl.exp2(scores * scale - base[:, None])
    less = tl.exp2(most - base)
    total = total * less + tl.sum(weights, axis=1)
    return larger, total, dot(weights.to(values.dtype), values, sums * less[:, None])
