"""Rope and attention of many tokens of each sequence, for prefills (decoder/gpu_layer.py).

Plain functions, no custom ops: under torch.compile a layer computes prompts otherwise. On NVIDIA GPUs each is one kernel, or two, whose
launches are replayed where only addresses differ (`replay.py`); elsewhere the formula of attend.py in torch's operations. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.errors import ArgumentError
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.layer_kinds import PROJECTIONS, ROPE_INTERLEAVED, num_kv_projections
from halfbyte.kernels.problem import AttentionProblem
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.cuda import on
from halfbyte.ops.replay import replayed
from halfbyte.ops.transformer.attend import attention_in_torch, norm_whole_on_gpu, projected_in_torch, why_not_normed_on_gpu
from halfbyte.ops.transformer.sublayers import Heads


def why_not_many(heads: Heads, dtype: torch.dtype, here: Gpu) -> str | None:
    """Return why a GPU computes `apply_rope` and `attend_many` for such heads in torch's operations; None if by kernels."""
    width = heads.num_heads * heads.head_dim if heads.qk_norm_whole and heads.qk_norm else None
    choice = choose(AttentionProblem("prefill", 1, 1, heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, norm_width=width), here)
    return None if choice.taken is not None else choice.reasons["attend_many"]


def apply_rope(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads
) -> Tensor:
    """Compute queries [B, t, H, D] with norms and rope, and write keys and values, likewise, to a cache.

    Args:
        qkv: [B, t, (H + 2 Hkv) * D]: queries, keys and values, one head after the other, as far as `heads.projections` has them.
        rotary: Cosines and sines of the positions, each [B or 1, t, R], or [B or 1, t, R / 2] where the second half is the same; None: no
            rope.
        keys, values: [B, Hkv, S, D] of qkv's dtype, written from index `length` on; not with projections "q".
        length: int64, one number; None: 0.
        heads: The heads.

    Returns:
        The queries; NaN on a GPU where S is too small.

    Raises:
        ArgumentError: Shapes, dtypes or settings do not fit.
    """
    _check_rope(qkv, rotary, keys, values, length, heads)
    is_contiguous = keys.stride() == values.stride() and all(t.stride(-1) == 1 for t in (keys, *(rotary or ())))
    here = gpu(qkv.get_device()) if qkv.is_cuda and qkv.numel() and is_contiguous else None
    if here is None or why_not_many(heads, qkv.dtype, here) is not None or why_not_normed_on_gpu(heads.qk_norm) is not None:
        return _apply_rope_in_torch(qkv, rotary, keys, values, length, heads)
    from halfbyte.kernels.gpu.transformer import rope as kernel

    rows, written = qkv.contiguous().view(-1, qkv.shape[2]), num_kv_projections(heads.projections)
    how = 0 if rotary is None else heads.rotary_width, heads.rope_interleaved, heads.norm_after_rope, written, heads.v_norm

    def launch() -> Tensor:
        queries = output(qkv.new_empty((*qkv.shape[:2], heads.num_heads, heads.head_dim)))
        normed, norms = norm_whole_on_gpu(rows, heads)
        kernel.launch(here, normed, rotary, queries, (keys, values), length, norms, *how)
        return queries

    (q_norm, k_norm), settings = heads.qk_norm or (None, None), None if heads.qk_norm is None else heads.qk_norm[0][1:3]
    weights = None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight
    operands = rows, *(rotary or (None, None)), keys, values, length, *weights
    with on(qkv):
        return replayed(launch, operands, "rope", qkv.shape[:2], heads.num_heads, heads.num_kv_heads, heads.qk_norm_whole, *how, settings)


def _check_rope(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads
) -> None:
    """Raise ArgumentError where arguments of `apply_rope` do not fit."""
    shape = keys.shape[0], heads.num_kv_heads, keys.shape[2] if keys.dim() == 4 else -1, heads.head_dim
    fits = (
        heads.rope_interleaved in ROPE_INTERLEAVED
        and heads.projections in PROJECTIONS
        and not (heads.qk_norm_whole and heads.norm_after_rope)
        and not (heads.v_norm and (heads.qk_norm is None or heads.qk_norm_whole))
        and keys.shape == values.shape == shape
        and keys.dtype == values.dtype == qkv.dtype
        and qkv.dim() == 3
        and len(qkv) == len(keys)
        and qkv.shape[2] == heads.outputs
        and _is_length(length)
    )
    if fits and rotary is not None:
        cos, sin = rotary
        fits = cos.dim() == 3 and cos.shape == sin.shape and heads.accepts_rope_of(cos.shape[-1]) and heads.rotary_width <= heads.head_dim
        fits = fits and cos.shape[0] in (1, len(qkv)) and cos.shape[1] == qkv.shape[1]
    if fits and heads.qk_norm is not None:
        counts = (heads.num_heads, heads.num_kv_heads) if heads.qk_norm_whole else (1, 1)
        fits = all(norm.weight.shape == (count * heads.head_dim,) for norm, count in zip(heads.qk_norm, counts, strict=True))
    if not fits:
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (qkv, keys, values, *(rotary or ()), length) if t is not None)
        raise ArgumentError(
            f"apply_rope takes qkv [B, T, (H + 2 Hkv) * D], keys and values [B, Hkv, S, D] of its type, cosines and sines [B, T, R], "
            f"R <= D, and one int64, got {got} for {heads.num_heads} and {heads.num_kv_heads} heads of {heads.head_dim}"
        )


def _is_length(length: Tensor | None) -> bool:
    return length is None or (length.numel() == 1 and length.dtype == torch.int64)


def _apply_rope_in_torch(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads
) -> Tensor:
    """Compute `apply_rope` in torch's operations, and in float32 like the kernel."""
    q, k, v = projected_in_torch(qkv, rotary, heads)
    if heads.projections != "q":
        places = torch.arange(qkv.shape[1], device=qkv.device) + (0 if length is None else length)
        keys.index_copy_(2, places, k.transpose(1, 2).to(keys.dtype))
        values.index_copy_(2, places, v.transpose(1, 2).to(values.dtype))
    return q.to(qkv.dtype)


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
    softcap: float | None = None,
) -> Tensor:
    """Compute factor * softmax(scale * queries · keysᵀ) · values.

    Args:
        queries: [B, t, H, D].
        keys, values: [B, Hkv, S, D] of that dtype; each key head is for H / Hkv query heads.
        length: int64, one number: query i sees keys up to length + i, and no key behind length + t - 1 is read; None: 0.
        mask: bool [B or 1, t, S]: which keys each query sees, in place of that; None: by `length`.
        scale: Factor of scores, more than 0.
        factor: Of the result.
        sinks: [H]: each head's attention sink, a score that adds to the softmax denominator alone; None: no sinks.
        softcap: Scores s are softcap * tanh(s / softcap); None: as they are.

    Returns:
        [B, t, H * D] in the dtype of queries; 0 for a query that sees no key.

    Raises:
        ArgumentError: Shapes, dtypes or settings do not fit.
    """
    _check_attend(queries, keys, values, length, mask, scale, sinks)
    batch, tokens, heads, dim = queries.shape
    contiguous = all(t.stride(-1) == 1 for t in (keys, values, mask) if t is not None)
    here = gpu(queries.get_device()) if queries.is_cuda and queries.numel() and keys.numel() and contiguous else None
    if here is None or softcap is not None or why_not_many(Heads(heads, keys.shape[1], dim, scale), queries.dtype, here) is not None:
        return _attend_many_in_torch(queries, keys, values, length, mask, scale, factor, sinks, softcap)
    from halfbyte.kernels.gpu.transformer import attend_many as kernel

    queries, sinks = queries.contiguous(), None if sinks is None else sinks.contiguous()

    def launch() -> Tensor:
        out = output(queries.new_empty((batch, tokens, heads * dim)))
        kernel.launch(here, queries, keys, values, length, mask, out, scale, factor, sinks)
        return out

    with on(queries):
        return replayed(launch, (queries, keys, values, length, mask, sinks), "attend_many", scale, factor)


def _check_attend(
    queries: Tensor, keys: Tensor, values: Tensor, length: Tensor | None, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> None:
    """Raise ArgumentError where arguments of `attend_many` do not fit."""
    fits = queries.dim() == keys.dim() == 4 and keys.shape == values.shape and queries.dtype == keys.dtype == values.dtype
    if fits:
        batch, tokens, heads, dim = queries.shape
        fits = keys.shape[0] == batch and keys.shape[3] == dim and keys.shape[1] > 0 and heads % keys.shape[1] == 0 and scale > 0
        if mask is not None:
            fits = fits and mask.dtype == torch.bool and mask.dim() == 3 and mask.shape[0] in (1, batch)
            fits = fits and mask.shape[1:] == (tokens, keys.shape[2])
        fits = fits and _is_length(length) and (sinks is None or sinks.shape == (heads,))
    if not fits:
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (queries, keys, values, length, mask, sinks) if t is not None)
        raise ArgumentError(
            f"attend_many takes queries [B, T, H, D], keys and values [B, Hkv, S, D] of one type, one int64, a mask bool [B, T, S], "
            f"sinks [H] and a scale above 0, got {got}, {scale}"
        )


def _attend_many_in_torch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    scale: float,
    factor: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Compute `attend_many` in torch's operations, and in float32."""
    key = torch.arange(keys.shape[2], device=keys.device)
    last = torch.arange(queries.shape[1], device=keys.device) + (0 if length is None else length)
    visible = (key <= last[:, None])[None]
    if mask is not None:
        visible = mask if length is None else mask & (key <= last[-1:])  # what a cache has behind the new tokens may be anything
    y = attention_in_torch(queries, keys, values, visible, scale, factor=factor, sinks=sinks, softcap=softcap)
    return y.to(queries.dtype)
