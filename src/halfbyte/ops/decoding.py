"""The steps of a decoder layer for one token of each sequence, where they differ from plain layers: the custom ops
`halfbyte::normed_linear` and `halfbyte::attend`.

A language model's step for one token is a chain of short kernels. On NVIDIA GPUs each of these ops is one to three kernels, where they
support it, that start while the previous one is still running; elsewhere the same formula in torch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.dispatch.gpu import choose_gpu, triton_trouble
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.checks import check_bias, check_linear
from halfbyte.ops.cuda import on
from halfbyte.ops.library import OPS
from halfbyte.ops.tensors import aligned

_START = 1.5e-6  # seconds that an additional kernel takes in a chain of kernels that start early
_BANDWIDTH = 1e12  # bytes per second, assumed for a GPU that does not report it
_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "normed_linear(Tensor x, Tensor norm, float eps, Tensor weight, Tensor? bias, str format, int n, int k, bool gated) -> Tensor"
)
_library.define(
    "attend(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) length, Tensor? mask, Tensor? q_norm, "
    "Tensor? k_norm, float eps, float scale, int advance) -> Tensor"
)


def normed_linear(x: Tensor, norm: Tensor, eps: float, packed: Packed, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """(x / sqrt(mean(x², over the last dimension) + eps) * norm) · dequantize(packed)ᵀ + bias, x [..., K] -> [..., N] in x's dtype.

    norm   [K] of x's dtype: the weight of an RMS norm (Zhang and Sennrich, 2019)
    bias   [N] or None
    gated  the first half of the N outputs are gates for the second: silu(y[..., : N / 2]) * y[..., N / 2 :], [..., N / 2]

    No gradients. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    n, k = packed.shape
    return OPS.normed_linear.default(x, norm, eps, packed.data, bias, packed.name, n, k, gated)  # type: ignore[no-any-return]


def attend(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    advance: int = 1,
) -> Tensor:
    """Appends one new token of each sequence to a cache of fixed size, and computes its attention to the cache: y [B, H * D].

    qkv           [B, (H + 2 Hkv) * D]: queries, keys and values of the token, one head after the other, without positions
    rotary        cosines and sines of its position, each [B or 1, D] (Su et al., RoFormer, 2021: the halves of a head are rotated)
    keys, values  [B, Hkv, T, D]: written at `length`
    length        int64, one number: the tokens in the cache; `advance`, 1 or 0, is added
    mask          bool [B or 1, T]: which of the tokens may be seen; None: all
    norms         weights [D] of the RMS norms of each head's queries and keys, before the rotation, and eps; None: no norms

    No gradients. Where the cache is full the result is NaN on a GPU. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    return OPS.attend.default(qkv, *rotary, keys, values, length, mask, q_norm, k_norm, eps, scale, advance)  # type: ignore[no-any-return]


# The norm


def _check_norm(x: Tensor, weight: Tensor) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        got = f"x {list(x.shape)} of {x.dtype}, norm {list(weight.shape)} of {weight.dtype}"
        raise ArgumentError(f"a norm takes x [..., K] and its weight [K] of one dtype, got {got}: convert them")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In torch's operations."""
    _check_norm(x, weight)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check_norm(x, weight)
    here = gpu(x.get_device())
    if not x.numel() or why_not_norm(x.shape[-1], here) is not None:
        return _rms_norm(x, weight, eps)
    from halfbyte.kernels.gpu import norm as kernel

    z = x.contiguous()
    out = torch.empty_like(z)
    with on(x):
        kernel.launch(here, z.view(-1, z.shape[-1]), weight.contiguous(), eps, out.view(-1, z.shape[-1]))
    return out


def why_not_norm(k: int, here: Gpu) -> str | None:
    """Why norms of K columns are computed by torch's operations on a GPU; None if by `kernels/gpu/norm.py`."""
    if (trouble := triton_trouble()) is not None:
        return trouble
    from halfbyte.kernels.gpu import norm

    if here.backend != "cuda":
        return f"the kernels start early on NVIDIA GPUs only, not on {here.name}"
    return f"a norm of {k} columns is more than the {norm.MOST} that a block's registers hold" if k > norm.MOST else None


# normed_linear


def _check_normed(x: Tensor, norm: Tensor, n: int, k: int, gated: bool) -> None:
    _check_norm(x, norm)
    if x.shape[-1] != k:
        raise ArgumentError(f"a weight [{n}, {k}] takes x [..., {k}], got {list(x.shape)}: the last dimensions must agree")
    if gated and n % 2:
        raise ArgumentError(f"half of {n} outputs cannot be gates of the others: their number is even")


def _normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, gated: bool) -> Tensor:
    """In torch's operations: the norm in float32, rounded once."""
    _check_normed(x, norm, n, k, gated)
    z = _rms_norm(x, norm, eps)
    infinite = float("inf")
    y: Tensor = OPS.linear.default(z, weight, bias, None, format, n, k, "float", "block", -infinite, infinite)
    if not gated:
        return y
    gate, up = y.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


def _normed_cuda(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, gated: bool
) -> Tensor:
    _check_normed(x, norm, n, k, gated)
    rows = x.numel() // k if k else 0
    here = gpu(x.get_device())
    geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
    problem = Problem("linear", rows, n, k, geo.format, x.dtype, sparse=geo.sparse)
    plan = normed_plan(problem, here, gated=gated, biased=bias is not None)
    if isinstance(plan, str):
        return _normed(x, norm, eps, weight, bias, format, n, k, gated)
    from halfbyte.kernels.gpu import gates, skinny, skinny_hopper

    check_linear(x, weight, format, n, k, "block", -float("inf"), float("inf"))
    if bias is not None:
        check_bias(bias, n, x.device)
    out = torch.empty((*x.shape[:-1], n // 2 if gated else n), dtype=x.dtype, device=x.device)
    with on(x):
        z = (x.contiguous() if plan.norm_inside else _rms_norm_cuda(x, norm, eps)).view(rows, k)
        if plan.config is not None:
            views = gpu_tiles.views(aligned(weight), geo)
            epilogue, y = Epilogue(bias, gated=gated), out.view(rows, -1)
            if plan.kernel == "skinny":
                inside = (norm.contiguous(), eps) if plan.norm_inside else None
                skinny.launch(plan.problem, plan.config, z, *views, y, epilogue, inside)
            else:
                skinny_hopper.launch(plan.problem, plan.config, z, *views, y, epilogue)
        else:
            infinite = float("inf")
            product: Tensor = OPS.linear.default(z, weight, bias, None, format, n, k, "float", "block", -infinite, infinite)
            if not gated:
                return product.view(out.shape)
            gates.launch(here, product, out.view(rows, -1))
    return out


@dataclass(frozen=True, slots=True)
class NormedPlan:
    """How `normed_linear` is computed: with a `config`, by that `kernel` of kernels/gpu, gates included; otherwise the product by the
    kernel of a plain linear layer, and the gates by a separate one. A norm outside of the product has a separate kernel before it."""

    problem: Problem
    kernel: str
    config: Any
    norm_inside: bool


def normed_plan(problem: Problem, here: Gpu, *, gated: bool = False, biased: bool = False) -> NormedPlan | str:
    """The plan of `normed_linear` on a GPU; or why torch's operations compute everything but the product."""
    if (reason := why_not_norm(problem.k, here)) is not None:
        return reason
    return _plan(problem, gated, biased, here)


@lru_cache(maxsize=1024)
def _plan(problem: Problem, gated: bool, biased: bool, here: Gpu) -> NormedPlan | str:
    from halfbyte.kernels.gpu import skinny, skinny_hopper

    rows, n, dtype = problem.m, problem.n, problem.dtype
    if not n or not rows:
        return f"{rows} rows of {n} outputs are nothing to compute"
    choice = choose_gpu(problem, here)
    if choice.taken is None:
        return "no kernel solves this product"
    # The time of separate kernels for what `skinny` includes, the norm of one row and gates: starts, and for gates another read and write.
    separate = 2 if gated and rows == 1 else 1
    longest = choice.taken.seconds + separate * _START + gated * 1.5 * rows * n * dtype.itemsize / (here.bandwidth or _BANDWIDTH)
    direct = [o for o in choice.options if o.candidate.sparse == problem.sparse and o.seconds <= longest]
    options = [o for o in direct if o.candidate.home == "skinny"]
    if not gated:
        config = next((o.config for o in options if o is choice.taken or skinny.takes_norm(o.config)), None)
        return NormedPlan(problem, "skinny", config, config is not None and skinny.takes_norm(config))
    if choice.taken.candidate.home == "skinny_hopper" and not biased:
        alike = (o.config for o in direct if o.candidate.home == "skinny_hopper")
        best = next((found for config in alike if (found := skinny_hopper.gated(problem, config, here))), None)
        if best is not None:
            return NormedPlan(problem, "skinny_hopper", best, False)
    gates = (skinny.gated(problem, o.config) for o in options)
    # Configs whose warps share K come last: with gates they take a third longer than the product alone (4 and 8 rows, on an H100).
    fitting = sorted((config for config in gates if config is not None), key=lambda config: config.batch > 1)
    config = fitting[0] if fitting and not biased else None
    return NormedPlan(problem, "skinny", config, config is not None and skinny.takes_norm(config))


# attend


class _Token(NamedTuple):
    """The arguments of the op `attend`."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    length: Tensor
    mask: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    scale: float
    advance: int

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors whose last dimension must be contiguous."""
        return tuple(t for t in (self.cos, self.sin, self.mask, self.q_norm, self.k_norm) if t is not None)

    def heads(self) -> int:
        """The number of query heads. Raises ArgumentError where shapes or dtypes do not fit."""
        qkv, keys, mask = self.qkv, self.keys, self.mask
        fits = keys.dim() == 4 and keys.shape == self.values.shape and keys.dtype == self.values.dtype == qkv.dtype and qkv.dim() == 2
        if fits:
            batch, kv_heads, size, dim = keys.shape
            heads = qkv.shape[1] // dim - 2 * kv_heads
            fits = qkv.shape == (batch, (heads + 2 * kv_heads) * dim) and heads > 0 and heads % kv_heads == 0 and dim % 2 == 0
            fits &= all(t.dim() == 2 and t.shape[0] in (1, batch) and t.shape[1] == dim for t in (self.cos, self.sin))
            fits &= mask is None or (mask.dtype == torch.bool and mask.dim() == 2 and mask.shape[0] in (1, batch) and mask.shape[1] == size)
            fits &= self.length.numel() == 1 and self.length.dtype == torch.int64
            fits &= (self.q_norm is None) == (self.k_norm is None) and all(
                t is None or t.shape == (dim,) for t in (self.q_norm, self.k_norm)
            )
            if fits:
                return heads
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (qkv, self.cos, self.sin, keys, self.values, self.length, *self.rows[2:]))
        raise ArgumentError(
            f"attend takes qkv [B, (H + 2 Hkv) * D], cosines and sines [B, D], a cache [B, Hkv, T, D] of qkv's type, one int64, a mask "
            f"bool [B, T] and norms [D], got {got}"
        )


def _attend(*args: Any) -> Tensor:
    """In torch's operations, and in float32 like the kernel."""
    token = _Token(*args)
    heads = token.heads()
    qkv, keys, values = token.qkv, token.keys, token.values
    batch, kv_heads, size, dim = keys.shape
    x = qkv.view(batch, heads + 2 * kv_heads, dim).float()
    q, k, v = x.split((heads, kv_heads, kv_heads), 1)
    if token.q_norm is not None and token.k_norm is not None:
        q, k = (
            t * torch.rsqrt(t.square().mean(-1, keepdim=True) + token.eps) * norm.float()
            for t, norm in ((q, token.q_norm), (k, token.k_norm))
        )
    x = torch.cat((q, k), 1)
    cos, sin = token.cos.float()[:, None], token.sin.float()[:, None]
    q, k = (x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin).split((heads, kv_heads), 1)
    at = token.length.view(1)
    keys.index_copy_(2, at, k[:, :, None].to(keys.dtype))
    values.index_copy_(2, at, v[:, :, None].to(values.dtype))
    seen = torch.arange(size, device=keys.device)[None] <= at
    if token.mask is not None:
        seen = seen & token.mask
    token.length.add_(token.advance)
    q = q.view(batch, kv_heads, -1, dim) * token.scale
    scores = (q @ keys.float().transpose(2, 3)).masked_fill(~seen[:, None, None], -torch.inf)
    # Unused entries of the cache may hold anything, NaN included.
    there = values.float().masked_fill(~seen[:, None, :, None], 0)
    y: Tensor = scores.softmax(-1) @ there
    return y.to(qkv.dtype).view(batch, heads * dim)


def _attend_cuda(*args: Any) -> Tensor:
    token = _Token(*args)
    qkv, keys, values = token.qkv, token.keys, token.values
    heads = token.heads()
    contiguous = all(t.is_contiguous() for t in (qkv, keys, values)) and all(t.stride(-1) == 1 for t in token.rows)
    here = gpu(qkv.get_device())
    if not contiguous or why_not_attend(heads, keys.shape[1], keys.shape[3], qkv.dtype, here) is not None:
        return _attend(*args)
    from halfbyte.kernels.gpu import attend as kernel

    out = torch.empty((qkv.shape[0], heads * keys.shape[3]), dtype=qkv.dtype, device=qkv.device)
    norms = None if token.q_norm is None or token.k_norm is None else (token.q_norm, token.k_norm, token.eps)
    rotary, cache = (token.cos, token.sin), (keys, values)
    with on(qkv):
        kernel.launch(here, qkv, rotary, cache, token.length, token.mask, out, token.scale, token.advance, norms)
    return out


def why_not_attend(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, here: Gpu) -> str | None:
    """Why `attend` uses torch's operations for contiguous tensors of these sizes; None if `kernels/gpu/attend.py` computes it."""
    if (trouble := triton_trouble()) is not None:
        return trouble
    if here.backend != "cuda":
        return f"the kernel starts early on NVIDIA GPUs only, not on {here.name}"
    from halfbyte.kernels.gpu import attend as kernel

    return kernel.supports(heads, kv_heads, dim, dtype)


def _attend_fake(*args: Any) -> Tensor:
    token = _Token(*args)
    return token.qkv.new_empty((token.qkv.shape[0], token.heads() * token.keys.shape[3]))


def _normed_fake(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, gated: bool
) -> Tensor:
    _check_normed(x, norm, n, k, gated)
    return x.new_empty((*x.shape[:-1], n // 2 if gated else n))


_library.impl("normed_linear", _normed, "CPU")
_library.impl("normed_linear", _normed_cuda, "CUDA")
_library.impl("attend", _attend, "CPU")
_library.impl("attend", _attend_cuda, "CUDA")
torch.library.register_fake("halfbyte::normed_linear", _normed_fake, lib=_library)
torch.library.register_fake("halfbyte::attend", _attend_fake, lib=_library)
