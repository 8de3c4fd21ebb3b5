"""Attention of a decode step, one new token of each sequence: rope, the KV cache's new entry and attention in two kernels.

    q, k, v = qkv [B, (H + 2 Hkv) * D], heads after heads;   q, k: x -> x * cos + (-x[R/2:], x[:R/2]) * sin     (Su et al., RoFormer, 2021)
    (or q, k, of which v is made, too, before anything else; or q alone, where `length` tokens are in the cache with the new one: Gemma 4)
    in the first R elements of D, or of adjacent elements: x[2 i], x[2 i + 1] -> x * cos + (-x[2 i + 1], x[2 i]) * sin; before that, where
    there are norms: x -> x / sqrt(mean(x²) + eps) * weight, or * (1 + weight), of each head alone (RMS norm: Zhang and Sennrich, 2019);
    v may have one without a weight
    keys[b, h, length], values[b, h, length] = k, v;   y [B, H * D] = factor * softmax(scale * q · keysᵀ) · values where mask is true, or
    of scale * q · keysᵀ + mask; a head may have a sink, a score that adds nothing but to the sum of exponentials (gpt-oss)

keys, values [B, Hkv, T, D] are a cache of fixed size. `length` tokens of it are there, and the new one's place is after them. Each query
head reads the key head of its group of H / Hkv. The tokens of a key head are dealt out in tiles to `splits` blocks, each with a sum and a
maximum of its own (Dao et al., Flash-Decoding, 2023). The second kernel adds them up, and `advance` to length: to start it early takes less
time than to find out, in the first, which block is the last.

Where a block has a tile or two, what takes time is one memory access that waits for another. So which tile it has first does not depend
on the length: it is on its way to the L2 cache before the kernel before has ended, and is read together with everything else. Where many
sequences or long ones give it more tiles (`stages` > 1), what takes time is memory itself: tiles are copied to shared memory while those
before them are multiplied, and the new token comes last, from registers.

Arithmetic: the matrix units multiply queries and weights of the softmax in two pieces of the cache's type (float32: as they are), and sum
in float32; keys are rounded to the cache's type as they enter it. Or the cache has int8 codes and their scales (`kv_codes.py`): the new
token's are computed here, and the matrix units multiply scale * code, queries and weights, each rounded once to qkv's type. There tiles are
always streamed. Where the cache is full already the result is NaN, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import LOG2E, dot
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.gpu.transformer.attend_token import new_token, norm_factors, rotated_with, store_token
from halfbyte.kernels.gpu.transformer.kv_codes import LEAST_WIDE, decoded, magic_bits, quarters, tiled, whole
from halfbyte.kernels.gpu.transformer.norm import Norm, pair_arguments
from halfbyte.kernels.layer_kinds import RopeInterleaved, is_interleaved
from halfbyte.layouts.records import BLOCK, scales_of
from halfbyte.machine import Gpu

_MOST = 4096  # elements of a key head's result (query heads * dim) in registers of 128 threads
_MOST_OF_WIDE = 8192  # in those of 256 threads, of heads wider than 256, whose tiles have few tokens
_MOST_SPLITS = 64
_BLOCKS_PER_SM = 1.2  # thread blocks that key heads are split into, with tiles in registers
_FEW_TILES = 2  # of a thread block, which are loaded to registers
_STREAMED = (64, 4, 3)  # tokens, warps and stages if there are more
_RESIDENT_STREAMED = 2  # thread blocks of streamed tiles that a multiprocessor has room for
# Microseconds of a streamed tile when memory, or latency, is the limit, and of the start and end of a wave of thread blocks.
_TILE_READ_US, _TILE_LATENCY_US, _WAVE_US = 1.4, 2.0, 2.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for.

    Attributes:
        dim, wide: Elements of a head, and the next power of two.
        heads, rows: Query heads for each key head, and the rows that matrix instructions take for them.
        tokens: Of a tile.
        warps: Of a thread block.
        stages: `stages` - 1 tiles are in flight through shared memory; 1: one tile, in registers.
        pdl: It starts before the preceding kernel has ended (programmatic dependent launch).
        rotary_dim, rope_interleaved, norm_after_rope, others, v_norm: As in `How`.
        unit_offset: Norms multiply by 1 + weight.
        short: Rope's tables have R / 2 columns.
        added: The mask is added to scores; otherwise it is boolean.
        codes: The cache has codes and scales.
    """

    dim: int
    wide: int
    heads: int
    rows: int
    tokens: int
    warps: int
    stages: int
    pdl: bool
    rotary_dim: int
    unit_offset: bool = False
    rope_interleaved: RopeInterleaved = ""
    short: bool = False
    added: bool = False
    norm_after_rope: bool = False
    others: int = 2
    v_norm: bool = False
    codes: bool = False

    @property
    def scales(self) -> int:
        """Scales of a head in the cache."""
        return scales_of(self.dim)

    @property
    def groups(self) -> int:
        """`scales` up to a power of two."""
        return self.wide // BLOCK

    @property
    def neighbours(self) -> bool:
        """Whether rope rotates adjacent elements."""
        return is_interleaved(self.rope_interleaved)

    @property
    def group(self) -> int:
        """`heads` up to a power of two."""
        return int(triton.next_power_of_2(self.heads))


class How(NamedTuple):
    """The variants of attention in different model families.

    Attributes:
        factor: What the result is multiplied by.
        rotary_dim: Elements of a head that rope rotates, R; None: as many as the tables have columns.
        rope_interleaved: Which elements rope rotates together. "": i and i + R / 2; "half" and "repeated": 2 i and 2 i + 1, where the
            first R / 2 columns of the tables are used, or R, which have each value twice.
        sinks: [H], contiguous: attention sinks, the score of each head that belongs to no token; None: there are none.
        norm_after_rope: Norms follow rope.
        others: Tensors in `qkv` in addition to queries: 2, keys and values; 1, keys, which are the values, too; 0, none: the new token is
            in the cache already.
        v_norm: Values have an RMSNorm, without a weight, with the eps of the queries' norm.
    """

    factor: float = 1.0
    rotary_dim: int | None = None
    rope_interleaved: RopeInterleaved = ""
    sinks: Tensor | None = None
    norm_after_rope: bool = False
    others: int = 2
    v_norm: bool = False


def supports(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, codes: bool = False) -> str | None:
    """Return the reason why the kernel does not support these sizes, or None. codes: the cache has them."""
    if dtype not in _DTYPES:
        return f"it computes in {', '.join(map(str, _DTYPES))}, not {dtype}"
    if kv_heads < 1 or heads % kv_heads or dim % 2:
        return f"{heads} heads of {dim} do not share {kv_heads} key heads, or have no two halves"
    if codes and dim % 4:
        return f"the codes of heads of {dim} are not whole words of four"
    if _rows(heads // kv_heads) * _wide(dim) > (_MOST if _wide(dim) <= 256 else _MOST_OF_WIDE):
        return f"{heads // kv_heads} heads of {dim} for each key head are too many for a block's registers"
    return None


def _rows(heads: int) -> int:
    return max(16, int(triton.next_power_of_2(heads)))


def _wide(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def static(
    batch: int, heads: int, kv_heads: int, size: int, dim: int, dtype: torch.dtype, gpu: Gpu, *, codes: bool = False
) -> tuple[Static, int]:
    """Return what the kernel is compiled for with caches of `size` tokens, and the thread blocks that share a key head (an argument, so
    that not each size of a cache has its own kernel): as many as fill the GPU, each with a tile or more."""
    if codes:
        wide, rows = max(LEAST_WIDE, _wide(dim)), _rows(heads // kv_heads)
        tile, splits = tiled(batch * kv_heads, rows, wide, size, dtype, gpu)
        streamed = Static(dim, wide, heads // kv_heads, rows, tile.tokens, tile.warps, tile.stages, launcher.starts_early(gpu), dim)
        return replace(streamed, codes=True), splits
    group, wide, programs = heads // kv_heads, _wide(dim), batch * kv_heads
    tokens = 64 if dtype != torch.float32 and wide <= 128 else 16
    tiles = -(-size // tokens)
    splits = max(1, min(_MOST_SPLITS, tiles, round(_BLOCKS_PER_SM * gpu.sms / programs)))
    many = tokens == 64 or _rows(group) * wide > _MOST
    few = Static(dim, wide, group, _rows(group), tokens, 8 if many else 4, 1, launcher.starts_early(gpu), dim)
    if tiles <= _FEW_TILES * splits or tokens < 64:
        return few, splits
    tokens, warps, stages = _STREAMED
    tiles = -(-size // tokens)
    splits = min(range(1, min(_MOST_SPLITS, tiles) + 1), key=lambda n: _us(n, programs, tiles, gpu.sms))
    return replace(few, tokens=tokens, warps=warps, stages=stages), splits


def _us(splits: int, programs: int, tiles: int, sms: int) -> float:
    """Estimate the microseconds of streamed tiles with a full cache: the tiles of the multiprocessor that has the most, limited by memory,
    or those of a thread block in each wave, limited by latency; and the start and end of each wave."""
    waves = -(-programs * splits // (_RESIDENT_STREAMED * sms))
    block_tiles = -(-tiles // splits)
    return max(_TILE_READ_US * -(-programs * splits // sms) * block_tiles, _TILE_LATENCY_US * waves * block_tiles) + _WAVE_US * waves


def launch(
    gpu: Gpu,
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, ...],
    length: Tensor,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    advance: int = 1,
    norms: tuple[Norm, Norm] | None = None,
    how: How = How(),  # noqa: B008
) -> None:
    """Write the result of attention to `out`, the new token to the cache, and length + advance to `length`.

    Args:
        gpu: Where.
        qkv: [B, (H + others * Hkv) * D], contiguous; others = 2 unless `how` says differently.
        rotary: Cosines and sines [B or 1, R or R / 2] of the positions, the last dimension contiguous; None: there is no rope.
        cache: Keys and values [B, Hkv, T, D], contiguous, of qkv's dtype; or their codes, int8, and then scales of keys and of values,
            bfloat16 [B, Hkv, T, ceil(D / 32)].
        length: int64 [1]: tokens in the cache.
        mask: [B or 1, T], the last dimension contiguous: bool, or floating point, which is added to scores; None: all are visible.
        out: [B, H * D], contiguous.
        scale: Of scores.
        advance: What is added to `length`.
        norms: Of queries and of keys, weights [D], as `norm.pair_arguments` takes them; None: there are none.
        how: The model family's variant.
    """
    batch, kv_heads, size, dim = cache[0].shape
    heads = out.shape[1] // dim
    s, splits = static(batch, heads, kv_heads, size, dim, qkv.dtype, gpu, codes=len(cache) == 4)
    width = 0 if rotary is None else rotary[0].shape[1]
    rotary_dim = width if how.rotary_dim is None or rotary is None else how.rotary_dim
    s = replace(
        s,
        rotary_dim=rotary_dim,
        rope_interleaved=how.rope_interleaved,
        short=width < rotary_dim,
        added=mask is not None and mask.is_floating_point(),
    )
    s = replace(s, unit_offset=norms is not None and norms[0][2], norm_after_rope=how.norm_after_rope, others=how.others, v_norm=how.v_norm)
    programs = batch * kv_heads
    sums = programs * splits * s.group * s.wide
    scratch = workspace(out.device, 4 * (sums + 2 * programs * splits * s.group)).view(torch.float32)
    partials = scratch, scratch[sums:]
    strides = (
        *(t.stride(0) if t.shape[0] > 1 else 0 for t in rotary or (out, out)),
        mask.stride(0) if mask is not None and mask.shape[0] > 1 else 0,
    )
    launcher.run(
        _attend,
        (programs, splits),
        qkv,
        rotary,
        cache,
        length,
        mask if mask is None or s.added else mask.view(torch.uint8),
        partials,
        kv_heads,
        size,
        strides,
        scale * LOG2E.value,
        None if norms is None else pair_arguments(norms),
        s,
        num_warps=s.warps,
        early=s.pdl,
    )
    most = int(triton.next_power_of_2(splits))
    warps = 2 if most * s.wide <= 4096 else 4 if most * s.wide <= 8192 else 8  # all parts of a head are in registers at once
    sinks = None if how.sinks is None else (how.sinks, kv_heads)
    numbers = splits, advance, how.factor
    launcher.run(_add_up, (programs, s.heads), partials, length, out, sinks, *numbers, most, s, num_warps=warps, early=s.pdl)


# The kernels. `S` is a Static; `d` are the elements of a head with padding, and `half` for each of them the one that rope rotates with it;
# `first` is the number of a key head's first token in the cache, `t` are tokens of this key head.


@triton.jit
def _attend(qkv, rotary, cache, length, mask, scratch, kv_heads, size, strides, scale, norms, S: tl.constexpr):
    """Block program_id(1) of key head program_id(0): its share of the tokens, and the new token if that is in it.

    rotary   cosines and sines, or None; `strides` are those of batches of both, and of `mask`
    scratch  where the block's sums go, then its largest scores and sums of weights
    scale    of scores, times log2 of e
    norms    weights of queries and of keys, and eps; or None
    """
    HEADS: tl.constexpr = S.heads
    TOKENS: tl.constexpr = S.tokens
    ROWS: tl.constexpr = S.rows
    WIDE: tl.constexpr = S.wide
    STAGES: tl.constexpr = S.stages
    if S.pdl:
        gdc_launch_dependents()
    program = tl.program_id(0)
    batch, head = program // kv_heads, program % kv_heads
    first = program.to(tl.int64) * size  # of the key head's tokens
    FLOAT: tl.constexpr = qkv.dtype.element_ty
    start = tl.program_id(1) * TOKENS
    splits = tl.num_programs(1)
    d = tl.arange(0, WIDE)
    g = tl.arange(0, ROWS)
    inside = d < S.dim
    half = rotated_with(d, S)
    factors = None, None  # of queries, and of keys
    if norms is not None:
        factors = norm_factors(norms[0], d, half, S), norm_factors(norms[1], d, half, S)
    if S.pdl:
        if S.stages == 1:
            _prefetch(cache, first, start, size, S)
        else:  # how many tokens are there may have changed since: this only says what to fetch
            cached = tl.minimum(tl.load(length, volatile=True).to(tl.int32), size)
            for i in tl.static_range(STAGES):
                _prefetch(cache, first, start + i * TOKENS * splits, cached, S)
        gdc_wait()
    now = tl.load(length).to(tl.int32)  # the new token
    if S.others == 0:
        now -= 1
    fits = now < size
    row_mask = batch * strides[2]
    if S.stages == 1:
        keys, values = _tile(cache, first, start + tl.arange(0, TOKENS), size, S)
        visible = _visible(mask, row_mask, start + tl.arange(0, TOKENS), size, S)
    head_mask = (g < HEADS)[:, None] & inside[None, :]
    q, k, v, codes = new_token(qkv, rotary, batch, head, kv_heads, strides, d, half, head_mask, norms, factors, scale, S)
    q0, q1 = _pieces(q, FLOAT)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.where(fits, tl.zeros((ROWS,), tl.float32), float("nan"))  # and so is the result
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    if S.stages == 1:
        end = tl.minimum(now + 1, size)
        last = start
        for step in range(start, end, TOKENS * splits):
            last = step
            t = step + tl.arange(0, TOKENS)
            # Memory behind the last token is undefined.
            if S.others > 0:
                new_here = t == now
                keys_now = tl.where(new_here[:, None], k[None, :], keys)
                values_now = tl.where(new_here[:, None], v[None, :], tl.where((t < now)[:, None], values, 0.0))
            else:
                keys_now, values_now = keys, tl.where((t <= now)[:, None], values, 0.0)
            visible_now = _and_only(visible, t <= now, S)
            keys, values = _tile(cache, first, t + TOKENS * splits, end, S)
            visible = _visible(mask, row_mask, t + TOKENS * splits, end, S)
            most, total, sums = _add_tile(q0, q1, keys_now, values_now, visible_now, most, total, sums, S)
        has_new_token = (last <= now) & (now < last + TOKENS)
    else:
        has_new_token = tl.program_id(1) == 0
        if S.others > 0:  # the new token first, so that the loop, which does not read it, need not keep it
            sees = fits & has_new_token
            score = tl.sum(q * k.to(tl.float32)[None, :], axis=1)
            if mask is not None:
                new_mask = tl.load(mask + row_mask + tl.minimum(now, size - 1))
                if S.added:
                    score += _to_add(new_mask)
                else:
                    sees &= new_mask != 0
            most, total = tl.where(sees, score, most), tl.where(sees, 1.0, total)
            sums = tl.where(sees, v.to(tl.float32)[None, :], sums)
            if fits & has_new_token:
                store_token(cache, first + now, d, k, v, codes, S)
        end = tl.minimum(now if S.others > 0 else now + 1, size)
        visible = _visible(mask, row_mask, start + tl.arange(0, TOKENS), end, S)
        if S.codes:
            magic, q0, sums = magic_bits(), quarters(q0), quarters(sums)
        for step in tl.range(start, end, TOKENS * splits, num_stages=S.stages):
            t = step + tl.arange(0, TOKENS)
            if S.codes:
                keys, values = _decoded_tile(cache, first, t, end, magic, FLOAT, S)
            else:
                keys, values = _tile(cache, first, t, end, S)
            visible_now, visible = visible, _visible(mask, row_mask, t + TOKENS * splits, end, S)
            most, total, sums = _add_tile(q0, q1, keys, values, visible_now, most, total, sums, S)
        if S.codes:
            sums = whole(sums)
    if S.others > 0 and S.stages == 1:
        if fits & has_new_token:
            store_token(cache, first + now, d, k, v, codes, S)
    partial = (program * splits + tl.program_id(1)) * S.group
    tl.store(scratch[0] + (partial + g[:, None]) * WIDE + d[None, :], sums, mask=head_mask)
    tl.store(scratch[1] + 2 * partial + g, most, mask=g < S.group)
    tl.store(scratch[1] + 2 * partial + S.group + g, total, mask=g < S.group)


@triton.jit
def _add_tile(q0, q1, keys, values, visible, most, total, sums, S: tl.constexpr):
    """Return the largest score, the sum of the weights and the weighted sum of the values, with a tile's visible tokens added. With
    codes, queries, keys, values and sums are `quarters`."""
    ROWS: tl.constexpr = S.rows
    TOKENS: tl.constexpr = S.tokens
    scores = tl.zeros((ROWS, TOKENS), tl.float32)
    if S.codes:
        for i in tl.static_range(4):
            scores = dot(q0[i], tl.trans(keys[i]), scores)
    else:
        scores = _product(q0, q1, tl.trans(keys), scores)
    if S.added:
        scores = tl.where(visible[None, :] == float("-inf"), float("-inf"), scores + visible[None, :])
    else:
        scores = tl.where(visible[None, :], scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, axis=1))  # a NaN comes back by the weights
    base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen so far
    weights = tl.exp2(scores - base[:, None])
    less = tl.exp2(most - base)
    total = total * less + tl.sum(weights, axis=1)
    if S.codes:
        w = weights.to(values[0].dtype)
        s0 = dot(w, values[0], sums[0] * less[:, None])
        s1 = dot(w, values[1], sums[1] * less[:, None])
        s2 = dot(w, values[2], sums[2] * less[:, None])
        s3 = dot(w, values[3], sums[3] * less[:, None])
        return larger, total, (s0, s1, s2, s3)
    else:
        w0, w1 = _pieces(weights, keys.dtype)
        return larger, total, _product(w0, w1, values, sums * less[:, None])


@triton.jit
def _prefetch(cache, first, start, end, S: tl.constexpr):
    """Prefetch a tile's keys and values before `end` to the L2 cache. Nothing is read, so they may still be written."""
    PIECE: tl.constexpr = 32 // (cache[0].dtype.element_ty.primitive_bitwidth // 8)  # a sector of the cache's memory
    i = start * S.dim + tl.arange(0, S.tokens * S.wide // PIECE) * PIECE
    i = tl.maximum(tl.minimum(i, end * S.dim - 1), 0)
    _to_l2(cache[0] + first * S.dim + i)
    _to_l2(cache[1] + first * S.dim + i)
    if S.codes:
        j = start * S.scales + tl.arange(0, S.tokens * S.groups // 16) * 16
        j = tl.maximum(tl.minimum(j, end * S.scales - 1), 0)
        _to_l2(cache[2] + first * S.scales + j)
        _to_l2(cache[3] + first * S.scales + j)


@triton.jit
def _to_l2(pointers):
    tl.inline_asm_elementwise(
        "{prefetch.global.L2 [$1]; mov.b32 $0, 0;}", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _tile(cache, first, t, end, S: tl.constexpr):
    """Load keys, values [tokens, wide] before `end`."""
    d = tl.arange(0, S.wide)
    inside_tile = (t < end)[:, None] & (d < S.dim)[None, :]
    at = first * S.dim + (t[:, None] * S.dim + d[None, :])
    return tl.load(cache[0] + at, mask=inside_tile, other=0.0), tl.load(cache[1] + at, mask=inside_tile, other=0.0)


@triton.jit
def _decoded_tile(cache, first, t, end, magic, dtype: tl.constexpr, S: tl.constexpr):
    """Load a tile of a cache of codes, as `quarters`."""
    word, group = tl.arange(0, S.wide // 4), tl.arange(0, S.groups)
    inside_tile = (t < end)[:, None] & (word < S.dim // 4)[None, :]
    at = first * (S.dim // 4) + (t[:, None] * (S.dim // 4) + word[None, :])
    keys, values = cache[0].to(tl.pointer_type(tl.int32), bitcast=True), cache[1].to(tl.pointer_type(tl.int32), bitcast=True)
    keys, values = tl.load(keys + at, mask=inside_tile, other=0), tl.load(values + at, mask=inside_tile, other=0)
    inside_tile = (t < end)[:, None] & (group < S.scales)[None, :]
    at = first * S.scales + (t[:, None] * S.scales + group[None, :])
    of_keys, of_values = tl.load(cache[2] + at, mask=inside_tile, other=0.0), tl.load(cache[3] + at, mask=inside_tile, other=0.0)
    return decoded(keys, of_keys, magic, dtype), decoded(values, of_values, magic, dtype)


@triton.jit
def _visible(mask, row, t, end, S: tl.constexpr):
    """Return which tokens are visible; where masks are `added`, the addend of the scores times log2 of e, -inf for tokens out of bounds."""
    if mask is None:
        return t < end
    elif S.added:
        return tl.where(t < end, _to_add(tl.load(mask + row + t, mask=t < end, other=0.0)), float("-inf"))
    else:
        return tl.load(mask + row + t, mask=t < end, other=0) != 0


@triton.jit
def _to_add(number):
    """Return a mask's number times log2 of e, finite also for the least float32."""
    number = number.to(tl.float32)
    return tl.where(number < -1e38, -1e38, number) * LOG2E


@triton.jit
def _and_only(visible, tokens, S: tl.constexpr):
    """Restrict what `_visible` returned to these tokens."""
    if S.added:
        return tl.where(tokens, visible, float("-inf"))
    else:
        return visible & tokens


@triton.jit
def _pieces(x, dtype: tl.constexpr):
    """Return x float32 as the sum of two numbers of `dtype`; float32: x and a placeholder."""
    if dtype == tl.float32:
        return x, x
    else:
        large = x.to(dtype)
        return large, (x - large.to(tl.float32)).to(dtype)


@triton.jit
def _product(a0, a1, b, total):
    total = dot(a0, b, total)
    if a1.dtype != tl.float32:
        total += dot(a1, b, tl.zeros_like(total))  # in parallel with the other product
    return total


@triton.jit(do_not_specialize=["splits", "advance"])
def _add_up(scratch, length, out, sinks, splits, advance, factor, MOST: tl.constexpr, S: tl.constexpr):
    """The softmax of all parts of a query head, from the sums and maxima of each. MOST: `splits` up to a power of two; sinks: where they
    are, and how many key heads there are, or None."""
    if S.pdl:
        gdc_launch_dependents()
    program, head = tl.program_id(0), tl.program_id(1)
    p, d = tl.arange(0, MOST), tl.arange(0, S.wide)
    partial = (program * splits + p) * S.group
    has_sums, inside = p < splits, d < S.dim
    if S.pdl:
        gdc_wait()
    sums = tl.load(scratch[0] + (partial + head)[:, None] * S.wide + d[None, :], mask=has_sums[:, None] & inside[None, :], other=0.0)
    most = tl.load(scratch[1] + 2 * partial + head, mask=has_sums, other=float("-inf"))
    total = tl.load(scratch[1] + 2 * partial + S.group + head, mask=has_sums, other=0.0)
    largest = tl.max(most, axis=0)
    if sinks is not None:
        sink = tl.load(sinks[0] + program % sinks[1] * S.heads + head).to(tl.float32) * LOG2E
        largest = tl.maximum(largest, sink)
    weights = tl.exp2(most - tl.where(largest == float("-inf"), 0.0, largest))
    y = tl.sum(sums * weights[:, None], axis=0)
    whole = tl.sum(total * weights, axis=0)
    if sinks is not None:
        whole += tl.exp2(sink - largest)
    y = y / whole * factor
    to = out + program.to(tl.int64) * (S.heads * S.dim) + head * S.dim + d
    tl.store(to, y.to(out.dtype.element_ty), mask=inside)
    if (program == 0) & (head == 0):
        tl.store(length, tl.load(length) + advance)
