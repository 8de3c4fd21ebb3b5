"""What a decoder layer computes in a prefill apart from its products and norms: rope, attention, gates.

Plain functions: under torch.compile a layer takes other steps. On NVIDIA GPUs each is one kernel, or two, whose launches are replayed where
only addresses differ (`replay.py`); elsewhere the same formula in torch's operations. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.layers import why_not_norm
from halfbyte.errors import ArgumentError
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.layer_kinds import PROJECTIONS, ROPE_INTERLEAVED, GateFunction, key_value_heads
from halfbyte.kernels.problem import AttentionProblem
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.cuda import on
from halfbyte.ops.replay import replayed
from halfbyte.ops.transformer.decode_ops import activated_in_torch, activated_on_gpu, parted_in_torch, placed_in_torch
from halfbyte.ops.transformer.norms import wide_norm
from halfbyte.ops.transformer.sublayers import Heads, Norm


def why_not_many(heads: Heads, dtype: torch.dtype, here: Gpu) -> str | None:
    """Why a GPU computes `apply_rope` and `attend_many` for such heads in torch's operations; None if by kernels."""
    width = heads.num_heads * heads.head_dim if heads.qk_norm_whole and heads.qk_norm else None
    choice = choose(AttentionProblem("prefill", 1, 1, heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, norm_width=width), here)
    return None if choice.taken is not None else choice.reasons["attend_many"]


# Gates


def activated(y: Tensor, gates: GateFunction, factor: float = 1.0, *, gated: bool = True, multiplier: Tensor | None = None) -> Tensor:
    """factor * f(y[..., : N / 2]) * y[..., N / 2 :], or factor * f(y) where it is not `gated`; `gates` names f, as in `layer_kinds.py`.

    multiplier: for y that is not gated, the other factor, of y's shape and dtype, with contiguous rows.
    """
    if multiplier is not None and (gated or multiplier.shape != y.shape or multiplier.dtype != y.dtype):
        got = f"{multiplier.dtype} {list(multiplier.shape)}{' for gated y' if gated else ''}"
        raise ArgumentError(f"`multiplier` must have y's shape and dtype, {y.dtype} {list(y.shape)}, where y is not gated; got {got}")
    here = gpu(y.get_device()) if y.is_cuda and y.numel() and y.is_contiguous() else None
    if here is None or why_not_norm(1, here) is not None:
        return activated_in_torch(y, gates, factor, gated=gated, multiplier=multiplier)
    with on(y):
        return activated_on_gpu(y, gates, factor, gated=gated, multiplier=multiplier)


# Positions


def apply_rope(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads
) -> Tensor:
    """Queries [B, T, H, D] of qkv [B, T, (H + 2 Hkv) * D], heads after heads, with the norms and positions of `heads`; keys and values are
    written to `keys` and `values` [B, Hkv, S, D] from `length` on; where `heads` say that queries alone are made, nothing is.

    rotary  cosines and sines of the positions, each [B or 1, T, R], or their first R / 2, where these are for a pair each; None: none
    length  int64, one number; None: 0

    Where S is too small all queries are NaN on a GPU. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    _check_rope(qkv, rotary, keys, values, length, heads)
    if not qkv.is_cuda or not qkv.numel() or why_not_many(heads, qkv.dtype, gpu(qkv.get_device())) is not None:
        return _apply_rope(qkv, rotary, keys, values, length, heads)
    if keys.stride() != values.stride() or any(t.stride(-1) != 1 for t in (keys, *(rotary or ()))):
        return _apply_rope(qkv, rotary, keys, values, length, heads)
    from halfbyte.kernels.gpu.transformer import norm
    from halfbyte.kernels.gpu.transformer import rope as kernel

    here, flat = gpu(qkv.get_device()), qkv.contiguous().view(-1, qkv.shape[2])
    norms = None if heads.qk_norm is None else (heads.qk_norm[0][:3], heads.qk_norm[1][:3])
    how = (
        0 if rotary is None else heads.rotary_width,
        heads.rope_interleaved,
        heads.norm_after_rope,
        key_value_heads(heads.projections),
        heads.v_norm,
    )

    def steps() -> Tensor:
        queries = output(qkv.new_empty((*qkv.shape[:2], heads.num_heads, heads.head_dim)))
        read, within = flat, norms
        if norms is not None and heads.qk_norm_whole:
            read, within = output(torch.empty_like(flat)), None
            norm.launch_sections(here, flat, norms, read)
        kernel.launch(here, read, rotary, queries, (keys, values), length, within, *how)
        return queries

    weights, settings = (None, None) if norms is None else (norms[0][0], norms[1][0]), None if norms is None else norms[0][1:]
    operands = flat, *(rotary or (None, None)), keys, values, length, *weights
    with on(qkv):
        return replayed(steps, operands, "rope", qkv.shape[:2], heads.num_heads, heads.num_kv_heads, heads.qk_norm_whole, *how, settings)


def _check_rope(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads
) -> None:
    shape, width = (keys.shape[0], heads.num_kv_heads, keys.shape[2], heads.head_dim), heads.outputs
    fits = keys.shape == values.shape == shape and keys.dtype == values.dtype == qkv.dtype and qkv.dim() == 3
    fits = fits and len(qkv) == len(keys) and qkv.shape[2] == width and heads.rope_interleaved in ROPE_INTERLEAVED
    fits = fits and not (heads.qk_norm_whole and heads.norm_after_rope) and heads.projections in PROJECTIONS
    fits = fits and not (heads.v_norm and (heads.qk_norm is None or heads.qk_norm_whole))
    fits = fits and (length is None or (length.numel() == 1 and length.dtype == torch.int64))
    if fits and rotary is not None:
        cos, sin = rotary
        fits = cos.dim() == 3 and cos.shape == sin.shape and heads.accepts_rope_of(cos.shape[-1]) and heads.rotary_width <= heads.head_dim
        fits = fits and cos.shape[0] in (1, len(qkv)) and cos.shape[1] == qkv.shape[1]
    if fits and heads.qk_norm is not None:
        of_all = (
            (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim)
            if heads.qk_norm_whole
            else (heads.head_dim, heads.head_dim)
        )
        fits = all(norm.weight.shape == (size,) for norm, size in zip(heads.qk_norm, of_all, strict=True))
    if not fits:
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (qkv, keys, values, *(rotary or ()), length) if t is not None)
        raise ArgumentError(
            f"apply_rope takes qkv [B, T, (H + 2 Hkv) * D], keys and values [B, Hkv, S, D] of its type, cosines and sines [B, T, R], "
            f"R <= D, and one int64, got {got} for {heads.num_heads} and {heads.num_kv_heads} heads of {heads.head_dim}"
        )


def _apply_rope(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads
) -> Tensor:
    """In torch's operations, and in float32 like the kernel."""
    tokens = qkv.shape[1]
    q, k, v = parted_in_torch(qkv.view(*qkv.shape[:2], -1, heads.head_dim).float(), heads.num_heads, heads.num_kv_heads, heads.projections)
    if heads.v_norm and heads.qk_norm is not None:
        v = wide_norm(v, Norm(torch.ones_like(v[0, 0, 0]), heads.qk_norm[0].eps))
    tables = None if rotary is None else (rotary[0].float().unsqueeze(2), rotary[1].float().unsqueeze(2))
    q, k = placed_in_torch(
        q, k, heads.qk_norm, tables, heads.rotary_width, heads.rope_interleaved, heads.norm_after_rope, rows=heads.qk_norm_whole
    )
    if heads.projections == "q":
        return q.to(qkv.dtype)
    places = torch.arange(tokens, device=qkv.device) + (0 if length is None else length)
    keys.index_copy_(2, places, k.transpose(1, 2).to(keys.dtype))
    values.index_copy_(2, places, v.transpose(1, 2).to(values.dtype))
    return q.to(qkv.dtype)


# Attention


def attend_many(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    scale: float,
    *,
    factor: float = 1.0,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """factor * softmax(scale * q · keysᵀ) · values, [B, T, H * D].

    queries       [B, T, H, D]
    keys, values  [B, Hkv, S, D] of that type; each key head is for H / Hkv query heads
    length        int64, one number: query t sees keys up to length + t, and no key behind length + T - 1 is read; None: 0
    mask          bool [B or 1, T, S]: which keys each query sees, in place of that; None: by `length`
    scale         more than 0
    sinks         [H]: each head's attention sink, a score that adds to the softmax denominator alone; None: no sinks
    cap           scores s are cap * tanh(s / cap); None: as they are

    A query that sees nothing gets 0. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    _check_attend(queries, keys, values, length, mask, scale, sinks)
    batch, tokens, heads, dim = queries.shape
    contiguous = all(t.stride(-1) == 1 for t in (keys, values, mask) if t is not None)
    here = gpu(queries.get_device()) if queries.is_cuda and queries.numel() and contiguous else None
    if here is None or cap is not None or why_not_many(Heads(heads, keys.shape[1], dim, scale), queries.dtype, here) is not None:
        return _attend_many(queries, keys, values, length, mask, scale, factor, sinks, cap)
    from halfbyte.kernels.gpu.transformer import attend_many as kernel

    queries = queries.contiguous()

    def steps() -> Tensor:
        out = output(queries.new_empty((batch, tokens, heads * dim)))
        kernel.launch(here, queries, keys, values, length, mask, out, scale, factor, sinks)
        return out

    with on(queries):
        return replayed(steps, (queries, keys, values, length, mask, sinks), "attend_many", scale, factor)


def _check_attend(
    queries: Tensor, keys: Tensor, values: Tensor, length: Tensor | None, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> None:
    fits = queries.dim() == keys.dim() == 4 and keys.shape == values.shape and queries.dtype == keys.dtype == values.dtype
    if fits:
        batch, tokens, heads, dim = queries.shape
        fits = keys.shape[0] == batch and keys.shape[3] == dim and keys.shape[1] > 0 and heads % keys.shape[1] == 0 and scale > 0
        fits = fits and (length is None or (length.numel() == 1 and length.dtype == torch.int64))
        if mask is not None:
            fits = fits and mask.dtype == torch.bool and mask.dim() == 3 and mask.shape[0] in (1, batch)
            fits = fits and mask.shape[1:] == (tokens, keys.shape[2])
        fits = fits and (sinks is None or sinks.shape == (heads,))
    if not fits:
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (queries, keys, values, length, mask, sinks) if t is not None)
        raise ArgumentError(
            f"attend_many takes queries [B, T, H, D], keys and values [B, Hkv, S, D] of one type, one int64, a mask bool [B, T, S], "
            f"sinks [H] and a scale above 0, got {got}, {scale}"
        )


def _attend_many(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    scale: float,
    factor: float,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """In torch's operations, and in float32."""
    batch, tokens, heads, dim = queries.shape
    kv_heads, size = keys.shape[1:3]
    key = torch.arange(size, device=keys.device)
    last = torch.arange(tokens, device=keys.device) + (0 if length is None else length)
    seen = (key <= last[:, None])[None] if mask is None else mask
    if length is not None or mask is None:  # what a cache has behind may be anything
        there = (key <= last[-1:])[:, None]
        keys, values = keys.masked_fill(~there, 0), values.masked_fill(~there, 0)
        seen = seen & there[:, 0]
    q = queries.float().view(batch, tokens, kv_heads, -1, dim)
    scores = torch.einsum("btkgd,bksd->bkgts", q, keys.float()) * scale
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    sink = None if sinks is None else sinks.float().view(1, kv_heads, -1, 1, 1)
    largest = scores.amax(-1, keepdim=True)
    largest = largest if sink is None else largest.maximum(sink)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else (sink - largest).exp())
    weights = weights / total.masked_fill(total == 0, 1)
    y: Tensor = torch.einsum("bkgts,bksd->btkgd", weights, values.float()) * factor
    return y.to(queries.dtype).reshape(batch, tokens, heads * dim)
