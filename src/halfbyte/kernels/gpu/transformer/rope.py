"""Queries, keys and values of many tokens as attention takes them: norms of heads, rotary positions and the cache's new entries.

    qkv [B * T, (H + 2 Hkv) * D], heads after heads  ->  queries [B, T, H, D];  keys, values [B, Hkv, S, D] at length ... length + T

Queries and keys, where there are norms: x -> x / sqrt(mean(x²) + eps) * weight, or * (1 + weight), of each head alone (RMS norm: Zhang and
Sennrich, 2019); then of the first R elements of a head pairs (a, b) -> (a * cos - b * sin, b * cos + a * sin) (Su et al., RoFormer, 2021).
The elements of a pair are R / 2 apart, or neighbours. Or norms come after that (Hunyuan). Values are copied; or they have a norm without a
weight, or are what keys are made of; or there are queries alone (Gemma 4).

Arithmetic: float32, rounded once. A block takes some heads of one token, and each thread both elements of its pairs. Where new tokens do
not fit into `keys` all queries are NaN, and nothing is written outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.transformer.norm import Norm, pair_arguments
from halfbyte.kernels.layer_kinds import RopeInterleaved, is_interleaved
from halfbyte.machine import Gpu

_ELEMENTS = 1024  # of a block


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for.

    Attributes:
        heads: Of a thread block.
        dim: Elements of a head.
        rotary_dim: Elements of a head that rope rotates, the first ones.
        wide, unrotated: Pairs that rope rotates, and elements that it does not, rounded up to powers of two.
        neighbours: The elements of a pair are adjacent; otherwise they are R / 2 apart.
        short_tables: Only the first R / 2 columns of the tables are read, one for each pair.
        unit_offset: Norms multiply by 1 + weight.
        norm_after_rope: Norms follow rope.
        pdl: It starts before the preceding kernel has ended (programmatic dependent launch).
        others: Tensors in a row in addition to queries: 2, keys and values; 1, keys, which are the values, too; 0, none.
        v_norm: Values have an RMSNorm, without a weight.
    """

    heads: int
    dim: int
    rotary_dim: int
    wide: int
    unrotated: int
    neighbours: bool
    short_tables: bool
    unit_offset: bool
    norm_after_rope: bool
    pdl: bool
    others: int
    v_norm: bool


def launch(
    gpu: Gpu,
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    queries: Tensor,
    cache: tuple[Tensor, Tensor],
    length: Tensor | None,
    norms: tuple[Norm, Norm] | None = None,
    rotary_dim: int = 0,
    rope_interleaved: RopeInterleaved = "",
    norm_after_rope: bool = False,
    others: int = 2,
    v_norm: bool = False,
) -> None:
    """Write queries, and keys and values to the cache.

    Args:
        gpu: Where.
        qkv: [B * T, (H + others * Hkv) * D], contiguous.
        rotary: Cosines and sines [B or 1, T, R], or their first R / 2, the last dimension contiguous; None: there is no rope.
        queries: [B, T, H, D], contiguous: written.
        cache: Keys and values [B, Hkv, S, D] of qkv's dtype, the last dimension contiguous, both with the same strides: written from
            `length` on.
        length: int64 [1], the tokens in the cache; None: 0.
        norms: Of queries and of keys, weights [D], as `norm.pair_arguments` takes them; None: there are none.
        rotary_dim: R; 0: no rope.
        rope_interleaved, norm_after_rope, v_norm: As in `ops.transformer.sublayers.Heads`.
        others: As in Static.
    """
    batch, tokens, heads, dim = queries.shape
    kv_heads, size = cache[0].shape[1:3]
    unrotated = dim - rotary_dim
    s = Static(
        max(1, _ELEMENTS // triton.next_power_of_2(dim)),
        dim,
        rotary_dim,
        triton.next_power_of_2(max(rotary_dim // 2, 1)),
        triton.next_power_of_2(max(unrotated, 1)),
        is_interleaved(rope_interleaved),
        rope_interleaved == "half" or (rotary is not None and rotary[0].shape[2] < rotary_dim),
        norms is not None and norms[0][2],
        norm_after_rope,
        launcher.starts_early(gpu),
        others,
        v_norm,
    )
    of_queries, of_keys = -(-heads // s.heads), -(-kv_heads // s.heads)
    tables = [] if rotary is None else [(t.stride(0) if t.shape[0] > 1 else 0, t.stride(1)) for t in rotary]
    launcher.run(
        _rope,
        (batch * tokens, of_queries + (2 * of_keys if others else 0)),
        qkv,
        None if rotary is None else (*rotary, *tables[0], *tables[1]),
        queries,
        cache,
        cache[0].stride()[:3],
        length,
        None if norms is None else pair_arguments(norms),
        (tokens, heads, kv_heads, size),
        s,
        num_warps=4,
        early=s.pdl,
    )


@triton.jit
def _rope(qkv, rotary, queries, cache, strides, length, norms, sizes, S: tl.constexpr):
    HEADS: tl.constexpr = S.heads
    DIM: tl.constexpr = S.dim
    ROTARY_DIM: tl.constexpr = S.rotary_dim
    STEP: tl.constexpr = 2 if S.neighbours else 1
    if S.pdl:
        gdc_launch_dependents()
        gdc_wait()
    tokens, heads, kv_heads, size = sizes[0], sizes[1], sizes[2], sizes[3]
    row, head_block = tl.program_id(0), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    of_queries, of_keys = tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    # Which of the three this block takes, and from where: queries, keys or values.
    kind = tl.where(head_block < of_queries, 0, tl.where(head_block < of_queries + of_keys, 1, 2))
    h = (head_block - tl.where(kind == 0, 0, of_queries + (kind - 1) * of_keys)) * HEADS + tl.arange(0, HEADS)
    count = tl.where(kind == 0, heads, kv_heads)
    before = tl.where(kind == 0, 0, heads + (kind - 1) * kv_heads * (S.others == 2))
    place = token
    if length is not None:
        place += tl.load(length).to(tl.int32)
    fits = place + tokens - token <= size
    is_head = h < count
    source = qkv + row.to(tl.int64) * ((heads + S.others * kv_heads) * DIM) + (before + h) * DIM
    written = is_head & (fits | (kind == 0))
    of_cache = batch.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + place.to(tl.int64) * strides[2]
    offset = tl.where(kind == 0, row.to(tl.int64) * (heads * DIM) + h * DIM, of_cache)
    target = tl.where(kind == 0, queries, tl.where(kind == 1, cache[0], cache[1]))
    i = tl.arange(0, S.wide)
    first, second = i * STEP, i * STEP + (1 if S.neighbours else ROTARY_DIM // 2)
    inside = (i < ROTARY_DIM // 2)[None, :] & is_head[:, None]
    to = inside & written[:, None]
    beyond = ROTARY_DIM + tl.arange(0, S.unrotated)
    rest = (beyond < DIM)[None, :] & is_head[:, None]
    r = tl.load(source[:, None] + beyond[None, :], mask=rest, other=0.0)
    a = tl.load(source[:, None] + first[None, :], mask=inside, other=0.0)
    b = tl.load(source[:, None] + second[None, :], mask=inside, other=0.0)
    if kind < 2:
        x, y, z = a.to(tl.float32), b.to(tl.float32), r.to(tl.float32)
        if norms is not None and not S.norm_after_rope:
            x, y, z = _normed(x, y, z, norms, kind, first, second, beyond, i < ROTARY_DIM // 2, S)
        if rotary is not None:
            at_first = i if S.short_tables else first
            at_second = i if S.short_tables else second
            cos, sin = rotary[0] + batch.to(tl.int64) * rotary[2], rotary[1] + batch.to(tl.int64) * rotary[4]
            cos, sin = cos + token.to(tl.int64) * rotary[3], sin + token.to(tl.int64) * rotary[5]
            c0 = tl.load(cos + at_first, mask=i < ROTARY_DIM // 2, other=1.0).to(tl.float32)[None, :]
            s0 = tl.load(sin + at_first, mask=i < ROTARY_DIM // 2, other=0.0).to(tl.float32)[None, :]
            c1 = tl.load(cos + at_second, mask=i < ROTARY_DIM // 2, other=1.0).to(tl.float32)[None, :]
            s1 = tl.load(sin + at_second, mask=i < ROTARY_DIM // 2, other=0.0).to(tl.float32)[None, :]
            x, y = x * c0 - y * s0, y * c1 + x * s1
        if norms is not None and S.norm_after_rope:
            x, y, z = _normed(x, y, z, norms, kind, first, second, beyond, i < ROTARY_DIM // 2, S)
        if not fits:
            x, y, z = x * float("nan"), y * float("nan"), z * float("nan")
        a, b, r = x.to(a.dtype), y.to(a.dtype), z.to(a.dtype)
    elif S.v_norm:
        x, y, z = a.to(tl.float32), b.to(tl.float32), r.to(tl.float32)
        root = _root(x, y, z, norms[2], S)
        a, b, r = (x * root).to(a.dtype), (y * root).to(a.dtype), (z * root).to(a.dtype)
    tl.store(target + offset[:, None] + first[None, :], a, mask=to)
    tl.store(target + offset[:, None] + second[None, :], b, mask=to)
    tl.store(target + offset[:, None] + beyond[None, :], r, mask=rest & written[:, None])


@triton.jit
def _normed(x, y, z, norms, kind, first, second, beyond, inside, S: tl.constexpr):
    """The elements of pairs, and those beyond, of some heads."""
    weight = tl.where(kind == 0, norms[0], norms[1])
    root = _root(x, y, z, norms[2], S)
    x = x * root * _factor(weight, first, inside, S)
    y = y * root * _factor(weight, second, inside, S)
    return x, y, z * root * _factor(weight, beyond, beyond < S.dim, S)


@triton.jit
def _root(x, y, z, eps, S: tl.constexpr):
    squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1) + tl.sum(z * z, axis=1)
    return tl.rsqrt(squares / S.dim + eps)[:, None]


@triton.jit
def _factor(weight, i, inside, S: tl.constexpr):
    factor = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    return (factor + 1 if S.unit_offset else factor)[None, :]
