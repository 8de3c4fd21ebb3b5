"""One token of each sequence attends to its cache: rotary positions, the cache's new entry and attention in one kernel.

    q, k, v = qkv [B, (H + 2 Hkv) * D], heads after heads;   q, k: x -> x * cos + (-x[D/2:], x[:D/2]) * sin     (Su et al., RoFormer, 2021)
    keys[b, h, length], values[b, h, length] = k, v;   y [B, H * D] = softmax(scale * q · keysᵀ) · values over 0 … length where mask is true

keys, values [B, Hkv, T, D] are a cache of fixed size, `length` tokens of which are there; each query head reads the key head of its group
of H / Hkv. The last block to finish adds `advance` to length. The tokens of a key head are shared by `splits` blocks, each with a sum and a
maximum of its own (Dao et al., Flash-Decoding, 2023), which meet in a workspace; the last to arrive adds them up, always in one order.

Arithmetic: float32 throughout, with sums instead of the matrix units' products, which would round scores; keys are rounded to the cache's
type as they enter it. Where the cache is full already the result is NaN, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.machine import Gpu

_LOG2E = 1.4426950408889634
_TILE = 4096  # numbers of the largest product that is summed at once, by 128 threads
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Static:
    """What the kernel is compiled for. `group`, `half` and `parts` are `heads` of a key head, `dim` / 2 and `splits`, up to powers of two;
    `tokens` are read at a time."""

    dim: int
    half: int
    heads: int
    group: int
    splits: int
    parts: int
    tokens: int
    pdl: bool


def supports(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str | None:
    """Why this is not for the kernel, or None."""
    if dtype not in _DTYPES:
        return f"it computes in {', '.join(map(str, _DTYPES))}, not {dtype}"
    if kv_heads < 1 or heads % kv_heads or dim % 2:
        return f"{heads} heads of {dim} do not share {kv_heads} key heads, or have no two halves"
    if _TILE // (triton.next_power_of_2(heads // kv_heads) * triton.next_power_of_2(dim // 2)) < 4:
        return f"{heads // kv_heads} heads of {dim} for each key head are too many for a block's registers"
    return None


def static(batch: int, heads: int, kv_heads: int, size: int, dim: int, gpu: Gpu) -> Static:
    """For caches of `size` tokens: as many blocks as fill the GPU, each with at least as many tokens as it reads at a time."""
    group, half = triton.next_power_of_2(heads // kv_heads), triton.next_power_of_2(dim // 2)
    tokens = min(32, _TILE // (group * half))
    most = min(32, 2 * _TILE // (group * half))  # whose sums the last block reads at once
    wanted = max(1, min(most, -(-size // tokens), round(1.2 * gpu.sms / (batch * kv_heads))))
    pdl = gpu.backend == "cuda" and gpu.capability >= (9, 0) and not triton.knobs.runtime.interpret
    return Static(dim, half, heads // kv_heads, group, wanted, triton.next_power_of_2(wanted), tokens, pdl)


def launch(
    gpu: Gpu,
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    length: Tensor,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    advance: int = 1,
) -> None:
    """
    qkv     [B, (H + 2 Hkv) * D], out [B, H * D], contiguous
    rotary  cosines and sines [B or 1, D] of the positions, the last dimension contiguous
    cache   keys and values [B, Hkv, T, D], contiguous, of qkv's type; `length` int64, one number, of the same cache
    mask    bool [B or 1, T], the last dimension contiguous; None: all true
    """
    batch, kv_heads, size, dim = cache[0].shape
    heads = out.shape[1] // dim
    s = static(batch, heads, kv_heads, size, dim, gpu)
    programs = batch * kv_heads
    sums = programs * s.splits * s.group * 2 * s.half
    scratch = launcher.workspace(out.device, 4 * (sums + 2 * programs * s.splits * s.group)).view(torch.float32)
    strides = (*(t.stride(0) if t.shape[0] > 1 else 0 for t in rotary), mask.stride(0) if mask is not None and mask.shape[0] > 1 else 0)
    launcher.run(
        _attend,
        (programs, s.splits),
        qkv,
        rotary,
        cache,
        length,
        None if mask is None else mask.view(torch.uint8),
        out,
        (scratch, scratch[sums:], launcher.locks(out.device, programs + 1)),
        kv_heads,
        size,
        strides,
        scale * _LOG2E,
        advance,
        s,
        num_warps=4,
        **({"launch_pdl": True} if s.pdl else {}),
    )


@triton.jit(do_not_specialize=["advance"])
def _attend(qkv, rotary, cache, length, mask, out, scratch, kv_heads, size, strides, scale, advance, S: tl.constexpr):
    DIM: tl.constexpr = S.dim
    HALF: tl.constexpr = S.half
    GROUP: tl.constexpr = S.group
    HEADS: tl.constexpr = S.heads
    TOKENS: tl.constexpr = S.tokens
    if S.pdl:
        gdc_launch_dependents()
    program = tl.program_id(0)
    batch, head = program // kv_heads, program % kv_heads
    i = tl.arange(0, HALF)
    g = tl.arange(0, GROUP)
    inside = i < DIM // 2
    mine = (g < HEADS)[:, None] & inside[None, :]
    width = (HEADS + 2) * kv_heads * DIM
    if S.pdl:
        gdc_wait()
    now = tl.load(length).to(tl.int32)
    cos0, cos1 = _halves(rotary[0] + batch * strides[0] + i, inside, DIM)
    sin0, sin1 = _halves(rotary[1] + batch * strides[1] + i, inside, DIM)
    row = qkv + batch.to(tl.int64) * width
    q0, q1 = _halves(row + (head * HEADS + g[:, None]) * DIM + i[None, :], mine, DIM)
    q0, q1 = _turned(q0, q1, cos0[None, :], cos1[None, :], sin0[None, :], sin1[None, :])
    q0, q1 = q0 * scale, q1 * scale
    new = row + (HEADS * kv_heads + head) * DIM + i
    k0, k1 = _halves(new, inside, DIM)
    k0, k1 = _turned(k0, k1, cos0, cos1, sin0, sin1)
    v0, v1 = _halves(new + kv_heads * DIM, inside, DIM)
    # What is attended to is what the cache will hold.
    dtype: tl.constexpr = cache[0].dtype.element_ty
    k0, k1 = k0.to(dtype).to(tl.float32), k1.to(dtype).to(tl.float32)
    first = program.to(tl.int64) * size * DIM
    per = tl.cdiv(tl.cdiv(tl.minimum(now + 1, size), S.splits), TOKENS) * TOKENS
    start = tl.program_id(1) * per
    end = tl.minimum(start + per, tl.minimum(now + 1, size))
    most = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    sum0, sum1 = tl.zeros((GROUP, HALF), tl.float32), tl.zeros((GROUP, HALF), tl.float32)
    for step in range(start, end, TOKENS):
        t = step + tl.arange(0, TOKENS)
        known = (t < tl.minimum(now, end))[:, None] & inside[None, :]
        is_new = (t == now)[:, None]
        at = first + t[:, None] * DIM + i[None, :]
        old0, old1 = _halves(cache[0] + at, known, DIM)
        old2, old3 = _halves(cache[1] + at, known, DIM)
        old0, old1 = tl.where(is_new, k0[None, :], old0), tl.where(is_new, k1[None, :], old1)
        old2, old3 = tl.where(is_new, v0[None, :], old2), tl.where(is_new, v1[None, :], old3)
        seen = t < end
        if mask is not None:
            seen &= tl.load(mask + batch * strides[2] + t, mask=seen, other=0) != 0
        scores = tl.sum(q0[:, None, :] * old0[None, :, :] + q1[:, None, :] * old1[None, :, :], axis=2)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1))  # a NaN comes back by the weights
        base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen so far
        weights = tl.exp2(scores - base[:, None])
        less = tl.exp2(most - base)
        total = total * less + tl.sum(weights, axis=1)
        sum0 = sum0 * less[:, None] + tl.sum(weights[:, :, None] * old2[None, :, :], axis=1)
        sum1 = sum1 * less[:, None] + tl.sum(weights[:, :, None] * old3[None, :, :], axis=1)
        most = larger
    if (start <= now) & (now < end):
        at = first + now * DIM + i
        tl.store(cache[0] + at, k0.to(dtype), mask=inside)
        tl.store(cache[0] + at + DIM // 2, k1.to(dtype), mask=inside)
        tl.store(cache[1] + at, v0.to(dtype), mask=inside)
        tl.store(cache[1] + at + DIM // 2, v1.to(dtype), mask=inside)
    part = program * S.splits + tl.program_id(1)
    at = (part * GROUP + g[:, None]) * (2 * HALF) + i[None, :]
    tl.store(scratch[0] + at, sum0)
    tl.store(scratch[0] + at + HALF, sum1)
    tl.store(scratch[1] + (2 * part) * GROUP + g, most)
    tl.store(scratch[1] + (2 * part + 1) * GROUP + g, total)
    tl.debug_barrier()  # what this block wrote comes before its arrival
    if tl.atomic_add(scratch[2] + program, 1, sem="acq_rel") == S.splits - 1:
        to = out + (batch.to(tl.int64) * kv_heads + head) * (HEADS * DIM) + g[:, None] * DIM + i[None, :]
        _add_up(scratch, program, to, mine, now < size, S)
        tl.store(scratch[2] + program, 0)
        # All blocks of a head have read the length before its last one comes here.
        if tl.atomic_add(scratch[2] + tl.num_programs(0), 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(scratch[2] + tl.num_programs(0), 0)
            tl.store(length, now.to(tl.int64) + advance)


@triton.jit
def _halves(at, inside, DIM: tl.constexpr):
    """float32: what lies there, and half a head on."""
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _turned(x0, x1, cos0, cos1, sin0, sin1):
    return x0 * cos0 - x1 * sin0, x1 * cos1 + x0 * sin1


@triton.jit
def _add_up(scratch, program, to, mine, fits, S: tl.constexpr):
    """The softmax of all parts of a head, from the sums and maxima of each."""
    GROUP: tl.constexpr = S.group
    HALF: tl.constexpr = S.half
    p = tl.arange(0, S.parts)
    part = program * S.splits + p
    there = (p < S.splits)[:, None]
    g = tl.arange(0, GROUP)[None, :]
    most = tl.load(scratch[1] + (2 * part[:, None]) * GROUP + g, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(scratch[1] + (2 * part[:, None] + 1) * GROUP + g, mask=there, other=0.0, cache_modifier=".cg")
    at = (part[:, None, None] * GROUP + tl.arange(0, GROUP)[None, :, None]) * (2 * HALF) + tl.arange(0, HALF)[None, None, :]
    sum0 = tl.load(scratch[0] + at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
    sum1 = tl.load(scratch[0] + at + HALF, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
    largest = tl.max(most, axis=0)
    weights = tl.exp2(most - tl.where(largest == float("-inf"), 0.0, largest)[None, :])
    all_of_it = tl.sum(total * weights, axis=0)[:, None]
    y0 = tl.sum(sum0 * weights[:, :, None], axis=0) / all_of_it
    y1 = tl.sum(sum1 * weights[:, :, None], axis=0) / all_of_it
    tl.store(to, tl.where(fits, y0, float("nan")).to(to.dtype.element_ty), mask=mine)
    tl.store(to + S.dim // 2, tl.where(fits, y1, float("nan")).to(to.dtype.element_ty), mask=mine)
