"""What a decoder layer does to many tokens of each sequence, as in prompts, beside its products: norms, positions, attention and gates.

Plain functions: under torch.compile a layer takes other steps. On NVIDIA GPUs each is one kernel, or two, whose launches are replayed where
only addresses differ (`replay.py`), as a prompt is a few hundred of them and Triton's own launcher takes the host longer than most take the
GPU; elsewhere the same formula in torch's operations. No gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.dispatch.gpu import triton_trouble
from halfbyte.errors import ArgumentError
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.cuda import on
from halfbyte.ops.decoder import Heads, Norm
from halfbyte.ops.decoding import rms_norm, why_not_norm, wide_norm
from halfbyte.ops.replay import Replays

_replays = Replays()


def _run(launch: Callable[[], object], operands: Sequence[Tensor | None], *settings: Hashable) -> None:
    """Makes launches that depend on nothing but the operands' shapes, types and addresses, and on the settings."""

    def start() -> Callable[[], object]:
        launch()
        return launch

    if any(t is not None and t.data_ptr() % 16 for t in operands):
        launch()
        return
    alike = (None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in operands)
    _replays.run((*settings, *alike), start, operands)  # type: ignore[arg-type]


def why_not_many(heads: Heads, dtype: torch.dtype, here: Gpu) -> str | None:
    """Why a GPU computes `turn` and `attend_many` for such heads in torch's operations; None if by kernels."""
    if (trouble := triton_trouble()) is not None:
        return trouble
    if here.backend != "cuda":
        return f"the kernels start early on NVIDIA GPUs only, not on {here.name}"
    from halfbyte.kernels.gpu import attend_many as kernel

    normed = heads.query * heads.dim if heads.rows and heads.norms else None
    return kernel.supports(heads.query, heads.key, heads.dim, dtype) or (None if normed is None else why_not_norm(normed, here))


# Norms and gates


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The RMS norm of x [..., K], in float32, rounded once."""
    here = _here(x, norm.weight, columns=x.shape[-1])
    if here is None:
        return rms_norm(x, norm)
    from halfbyte.kernels.gpu import norm as kernel

    out = torch.empty_like(x)
    rows = x.view(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    with on(x):
        _run(lambda: kernel.launch(here, rows[0], norm[:3], rows[1]), (x, norm.weight, out), "norm", norm.eps, norm.plus_one)
    return out


def added_normed(x: Tensor, residual: Tensor, norm: Norm, then: Norm | None = None) -> tuple[Tensor, Tensor | None]:
    """h = residual + norm(x), rounded to x's type, and then(h), if there is a norm `then`, of the same kind (`plus_one`)."""
    weight = None if then is None else then.weight
    here = _here(x, residual, norm.weight, weight, columns=x.shape[-1])
    if here is None:
        h = (wide_norm(x.float(), norm) + residual.float()).to(x.dtype)
        return h, None if then is None else rms_norm(h, then)
    from halfbyte.kernels.gpu import norm as kernel

    h, z = torch.empty_like(x), None if then is None else torch.empty_like(x)

    def launch() -> None:
        flat, other, out = (t.view(-1, x.shape[-1]) for t in (x, residual, h))
        following = None if then is None or z is None else (then[:3], z.view(-1, x.shape[-1]))
        kernel.launch_added(here, flat, norm[:3], other, out, following)

    operands, of_then = (x, norm.weight, residual, h, weight, z), None if then is None else then.eps
    with on(x):
        _run(launch, operands, "added", norm.eps, norm.plus_one, of_then)
    return h, z


def gated(y: Tensor, gates: str, factor: float = 1.0) -> Tensor:
    """factor * f(y[..., : N / 2]) * y[..., N / 2 :], f being "silu" or "gelu_tanh"."""
    here = _here(y)
    if here is None:
        gate, up = y.float().chunk(2, -1)
        active = functional.silu(gate) if gates == "silu" else functional.gelu(gate, approximate="tanh")
        return (active * up * factor).to(y.dtype)
    from halfbyte.kernels.gpu import gates as kernel

    out = y.new_empty((*y.shape[:-1], y.shape[-1] // 2))
    rows = y.view(-1, y.shape[-1]), out.view(-1, out.shape[-1])
    with on(y):
        _run(lambda: kernel.launch(here, *rows, gates, factor), (y, out), "gates", gates, factor)
    return out


def _here(x: Tensor, *others: Tensor | None, columns: int = 1) -> Gpu | None:
    """The GPU whose kernels compute norms of so many columns, and gates; None: torch's operations do."""
    if not x.is_cuda or not x.numel() or not all(t.is_contiguous() for t in (x, *others) if t is not None):
        return None
    here = gpu(x.get_device())
    return here if why_not_norm(columns, here) is None else None


# Positions


def turn(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads) -> Tensor:
    """Queries [B, T, H, D] of qkv [B, T, (H + 2 Hkv) * D], heads after heads, with the norms and positions of `heads`; keys and values are
    written to `keys` and `values` [B, Hkv, S, D] from `length` on.

    rotary  cosines and sines of the positions, each [B or 1, T, R], or R / 2 where `heads.pairs` is "once"; None: none
    length  int64, one number; None: 0

    Where S is too small all queries are NaN on a GPU. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    _check_turn(qkv, rotary, keys, values, length, heads)
    if not qkv.is_cuda or not qkv.numel() or why_not_many(heads, qkv.dtype, gpu(qkv.get_device())) is not None:
        return _turn(qkv, rotary, keys, values, length, heads)
    if keys.stride() != values.stride() or any(t.stride(-1) != 1 for t in (keys, *(rotary or ()))):
        return _turn(qkv, rotary, keys, values, length, heads)
    from halfbyte.kernels.gpu import norm
    from halfbyte.kernels.gpu import turn as kernel

    here, flat = gpu(qkv.get_device()), qkv.contiguous().view(-1, qkv.shape[2])
    queries = qkv.new_empty((*qkv.shape[:2], heads.query, heads.dim))
    norms = None if heads.norms is None else (heads.norms[0][:3], heads.norms[1][:3])
    beside = torch.empty_like(flat) if norms is not None and heads.rows else None

    def launch() -> None:
        if beside is not None and norms is not None:
            norm.launch_parts(here, flat, norms, beside)
            kernel.launch(here, beside, rotary, queries, (keys, values), length, None, heads.pairs)
        else:
            kernel.launch(here, flat, rotary, queries, (keys, values), length, norms, heads.pairs)

    weights, settings = (None, None) if norms is None else (norms[0][0], norms[1][0]), None if norms is None else norms[0][1:]
    operands = (flat, *(rotary or (None, None)), keys, values, length, *weights, queries, beside)
    with on(qkv):
        _run(launch, operands, "turn", heads.query, heads.key, heads.pairs, settings)
    return queries


def _check_turn(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads
) -> None:
    shape, width = (keys.shape[0], heads.key, keys.shape[2], heads.dim), (heads.query + 2 * heads.key) * heads.dim
    fits = keys.shape == values.shape == shape and keys.dtype == values.dtype == qkv.dtype and qkv.dim() == 3
    fits = fits and len(qkv) == len(keys) and qkv.shape[2] == width and heads.pairs in ("", "once", "twice")
    fits = fits and (length is None or (length.numel() == 1 and length.dtype == torch.int64))
    if fits and rotary is not None:
        cos, sin = rotary
        turned = cos.shape[-1] * (2 if heads.pairs == "once" else 1)
        fits = cos.dim() == 3 and cos.shape == sin.shape and turned <= heads.dim and turned % 2 == 0
        fits = fits and cos.shape[0] in (1, len(qkv)) and cos.shape[1] == qkv.shape[1]
    if fits and heads.norms is not None:
        of_all = (heads.query * heads.dim, heads.key * heads.dim) if heads.rows else (heads.dim, heads.dim)
        fits = all(norm.weight.shape == (size,) for norm, size in zip(heads.norms, of_all, strict=True))
    if not fits:
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (qkv, keys, values, *(rotary or ()), length) if t is not None)
        raise ArgumentError(
            f"turn takes qkv [B, T, (H + 2 Hkv) * D], keys and values [B, Hkv, S, D] of its type, cosines and sines [B, T, R], R <= D, and "
            f"one int64, got {got} for {heads.query} and {heads.key} heads of {heads.dim}"
        )


def _turn(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, length: Tensor | None, heads: Heads) -> Tensor:
    """In torch's operations, and in float32 like the kernel."""
    tokens = qkv.shape[1]
    q, k, v = qkv.view(*qkv.shape[:2], -1, heads.dim).float().split((heads.query, heads.key, heads.key), 2)
    if heads.norms is not None:
        q, k = (wide_norm(t.flatten(2) if heads.rows else t, norm).view(t.shape) for t, norm in zip((q, k), heads.norms, strict=True))
    if rotary is not None:
        cos, sin = (t.float().unsqueeze(2) for t in rotary)
        q, k = (_rotated(t, cos, sin, heads.pairs) for t in (q, k))
    places = torch.arange(tokens, device=qkv.device) + (0 if length is None else length)
    keys.index_copy_(2, places, k.transpose(1, 2).to(keys.dtype))
    values.index_copy_(2, places, v.transpose(1, 2).to(values.dtype))
    return q.to(qkv.dtype)  # type: ignore[no-any-return]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    if pairs == "once":
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    part, rest = x.tensor_split([cos.shape[-1]], -1)
    if pairs:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat((part * cos + turned * sin, rest), -1)


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
) -> Tensor:
    """factor * softmax(scale * q · keysᵀ) · values, [B, T, H * D].

    queries       [B, T, H, D]
    keys, values  [B, Hkv, S, D] of that type; each key head is for H / Hkv query heads
    length        int64, one number: query t sees keys up to length + t, and no key behind length + T - 1 is read; None: 0
    mask          bool [B or 1, T, S]: which keys each query sees, in place of that; None: by `length`
    scale         more than 0
    sinks         [H]: a score of what each head sees beside keys, which adds nothing but to the sum of exponentials; None: there are none

    A query that sees nothing gets 0. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    _check_attend(queries, keys, values, length, mask, scale, sinks)
    batch, tokens, heads, dim = queries.shape
    contiguous = all(t.stride(-1) == 1 for t in (keys, values, mask) if t is not None)
    here = gpu(queries.get_device()) if queries.is_cuda and queries.numel() and contiguous else None
    if here is None or why_not_many(Heads(heads, keys.shape[1], dim, scale), queries.dtype, here) is not None:
        return _attend_many(queries, keys, values, length, mask, scale, factor, sinks)
    from halfbyte.kernels.gpu import attend_many as kernel

    queries, out = queries.contiguous(), queries.new_empty((batch, tokens, heads * dim))

    def launch() -> None:
        kernel.launch(here, queries, keys, values, length, mask, out, scale, factor, sinks)

    with on(queries):
        _run(launch, (queries, keys, values, length, mask, sinks, out), "attend", scale, factor)
    return out


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
