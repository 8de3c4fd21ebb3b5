"""The new token of a decode step, for `attend.py`: its queries, key and value out of qkv, with norms and rope, and the cache's new entry.

`S` is an `attend.Static`; `d` are the elements of a head with padding, and `half` for each of them the one that rope rotates with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.gpu.transformer.kv_codes import encoded


@triton.jit
def rotated_with(d, S: tl.constexpr):
    """Return the other element of each element's pair; elements that rope does not rotate are returned themselves."""
    ROTARY_DIM: tl.constexpr = S.rotary_dim
    rotates = d < ROTARY_DIM
    if S.neighbours:
        return tl.where(rotates, d ^ 1, d)
    else:
        return tl.where(rotates, tl.where(d < ROTARY_DIM // 2, d + ROTARY_DIM // 2, d - ROTARY_DIM // 2), d)


@triton.jit
def norm_factors(weight, d, half, S: tl.constexpr):
    """Load what a norm multiplies elements `d` and `half` by, in float32."""
    factor = tl.load(weight + d, mask=d < S.dim, other=0.0).to(tl.float32)
    factor_half = tl.load(weight + half, mask=d < S.dim, other=0.0).to(tl.float32)
    if S.unit_offset:
        factor, factor_half = factor + 1, factor_half + 1
    return factor, factor_half


@triton.jit
def new_token(qkv, rotary, batch, head, kv_heads, strides, d, half, head_mask, norms, factors, scale, S: tl.constexpr):
    """Return the new token's queries [rows, wide] of a key head in float32, times `scale`, its key and value [wide], and codes.

    All have norms and rope. Key and value are what the cache will hold, in qkv's type; with S.codes the last result is the codes of both,
    then their scales. Without S.others there are queries alone.

    Args:
        strides: Distances of batches of cosines and of sines.
        norms: Weights of queries and of keys, and eps; or None.
        factors: `norm_factors` of queries and of keys, or None for each.
    """
    DIM: tl.constexpr = S.dim
    HEADS: tl.constexpr = S.heads
    FLOAT: tl.constexpr = qkv.dtype.element_ty
    inside = d < DIM
    g = tl.arange(0, S.rows)
    row = qkv + batch.to(tl.int64) * ((HEADS + S.others) * kv_heads * DIM)
    at = row + (head * HEADS + g[:, None]) * DIM
    new = row + (HEADS * kv_heads + head) * DIM
    # All loads are issued before the first result is used.
    q = tl.load(at + d[None, :], mask=head_mask, other=0.0)
    q_half = tl.load(at + half[None, :], mask=head_mask, other=0.0)
    k, v, codes = q, q, (q, q, q, q)  # placeholders, which are never read
    if S.others > 0:
        k = tl.load(new + d, mask=inside, other=0.0)
        k_half = tl.load(new + half, mask=inside, other=0.0)
        v = tl.load(new + kv_heads * DIM + d, mask=inside, other=0.0) if S.others == 2 else k
    cos, sin = _rotation(rotary, batch, strides, d, S)
    eps = 0.0 if norms is None else norms[2]
    q = _normed_and_rotated(q, q_half, factors[0], eps, cos, sin, S) * scale
    if S.others > 0:
        if S.v_norm:
            v = v.to(tl.float32)
            v = (v * _inverse_rms(v, eps, S)).to(FLOAT)
        k = _normed_and_rotated(k, k_half, factors[1], eps, cos, sin, S).to(FLOAT)
        if S.codes:
            k_codes, k_scales, k = encoded(k.to(tl.float32), d, S.groups)
            v_codes, v_scales, v = encoded(v.to(tl.float32), d, S.groups)
            k, v, codes = k.to(FLOAT), v.to(FLOAT), (k_codes, v_codes, k_scales, v_scales)
    return q, k, v, codes


@triton.jit
def _normed_and_rotated(x, x_half, factors, eps, cos, sin, S: tl.constexpr):
    """Return x [wide] or [rows, wide] with its norm, unless `factors` is None, and rope, in float32; rope rotates `x_half` with x."""
    x, x_half = x.to(tl.float32), x_half.to(tl.float32)
    if factors is not None and not S.norm_after_rope:
        inverse = _inverse_rms(x, eps, S)
        x, x_half = x * inverse * factors[0], x_half * inverse * factors[1]
    x = x * cos + x_half * sin
    if factors is not None and S.norm_after_rope:
        x = x * _inverse_rms(x, eps, S) * factors[0]
    return x


@triton.jit
def _inverse_rms(x, eps, S: tl.constexpr):
    """Return 1 / sqrt(mean(x²) + eps) over the last dimension, which stays as one of size 1."""
    return tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) / S.dim + eps)


@triton.jit
def _rotation(rotary, batch, strides, d, S: tl.constexpr):
    """Return what rope multiplies elements `d` and their `half` by, float32 [wide]: cosines, and sines with their signs; 1 and 0 for
    elements that it does not rotate."""
    ROTARY_DIM: tl.constexpr = S.rotary_dim
    if ROTARY_DIM > 0:
        rotates = d < ROTARY_DIM
        if S.rope_interleaved == "half":
            entry = d // 2
        elif S.short:
            entry = tl.where(d < ROTARY_DIM // 2, d, d - ROTARY_DIM // 2)
        else:
            entry = d
        cos = tl.load(rotary[0] + batch * strides[0] + entry, mask=rotates, other=1.0)
        sin = tl.load(rotary[1] + batch * strides[1] + entry, mask=rotates, other=0.0)
        first_of_two = d % 2 == 0 if S.neighbours else d < ROTARY_DIM // 2
        return cos.to(tl.float32), tl.where(first_of_two, -1.0, 1.0) * sin.to(tl.float32)
    else:
        return tl.full((S.wide,), 1.0, tl.float32), tl.full((S.wide,), 0.0, tl.float32)  # tl.zeros takes no attribute of S


@triton.jit
def store_token(cache, token, d, key, value, codes, S: tl.constexpr):
    """Store the new token in the cache; `token` is its number there, counted over all key heads."""
    to = token * S.dim + d
    if S.codes:
        tl.store(cache[0] + to, codes[0], mask=d < S.dim)
        tl.store(cache[1] + to, codes[1], mask=d < S.dim)
        group = tl.arange(0, S.groups)
        of_scales = token * S.scales + group
        tl.store(cache[2] + of_scales, codes[2].to(tl.bfloat16), mask=group < S.scales)
        tl.store(cache[3] + of_scales, codes[3].to(tl.bfloat16), mask=group < S.scales)
    else:
        tl.store(cache[0] + to, key, mask=d < S.dim)
        tl.store(cache[1] + to, value, mask=d < S.dim)
