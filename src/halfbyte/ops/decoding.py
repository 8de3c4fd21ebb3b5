"""The steps of a decoder layer for one token of each sequence, where they differ from plain layers: the custom ops
`halfbyte::normed_linear` and `halfbyte::attend`.

A language model's step for one token is a chain of short kernels. Each of these ops is one or two of them on an NVIDIA GPU, where it fits,
that start while the one before is still running; and the same formula in torch's operations everywhere else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.dispatch.gpu import choose_gpu_linear, triton_trouble
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.checks import check_bias, check_linear
from halfbyte.ops.cuda import aligned, on
from halfbyte.ops.library import OPS

_MOST_ROWS = 8
_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "normed_linear(Tensor x, Tensor norm, float eps, Tensor weight, Tensor? bias, str format, int n, int k, bool gated) -> Tensor"
)
_library.define(
    "attend(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) length, Tensor? mask, float scale, "
    "int advance) -> Tensor"
)


def normed_linear(x: Tensor, norm: Tensor, eps: float, packed: Packed, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """(x / sqrt(mean(x², over the last dimension) + eps) * norm) · dequantize(packed)ᵀ + bias, x [..., K] -> [..., N] in x's dtype.

    norm   [K] of x's dtype: the weight of an RMS norm (Zhang and Sennrich, 2019)
    bias   [N] or None
    gated  the first half of the N outputs are gates of the second: silu(y[..., : N / 2]) * y[..., N / 2 :], [..., N / 2]

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
    advance: int = 1,
) -> Tensor:
    """One new token of each sequence enters a cache of fixed size and attends to what is in it: y [B, H * D].

    qkv           [B, (H + 2 Hkv) * D]: queries, keys and values of the token, heads after heads, without positions
    rotary        cosines and sines of its position, each [B or 1, D] (Su et al., RoFormer, 2021: halves of a head are turned together)
    keys, values  [B, Hkv, T, D]: written at `length`
    length        int64, one number: the tokens that are there; `advance` is added, 1 or 0
    mask          bool [B or 1, T]: which of the tokens may be seen; None: all

    No gradients. Where the cache is full the result is NaN on a GPU. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    return OPS.attend.default(qkv, *rotary, keys, values, length, mask, scale, advance)  # type: ignore[no-any-return]


# normed_linear


def _check_normed(x: Tensor, norm: Tensor, n: int, k: int, gated: bool) -> None:
    if x.dim() == 0 or x.shape[-1] != k or norm.shape != (k,) or norm.dtype != x.dtype:
        got = f"x {list(x.shape)} of {x.dtype}, norm {list(norm.shape)} of {norm.dtype}"
        raise ArgumentError(f"a weight [{n}, {k}] with a norm takes x [..., {k}] and norm [{k}] of one dtype, got {got}: convert them")
    if gated and n % 2:
        raise ArgumentError(f"half of {n} outputs cannot be gates of the others: their number is even")


def _normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, gated: bool) -> Tensor:
    """In torch's operations: the norm in float32, rounded once."""
    _check_normed(x, norm, n, k, gated)
    wide = x.float()
    z = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()).to(x.dtype)
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
    plan = normed_plan(format, rows, n, k, x.dtype, here, gated=gated, biased=bias is not None)
    if isinstance(plan, str):
        return _normed(x, norm, eps, weight, bias, format, n, k, gated)
    from halfbyte.kernels.gpu import norm as norm_kernel
    from halfbyte.kernels.gpu import skinny

    check_linear(x, weight, format, n, k, "block", -float("inf"), float("inf"))
    if bias is not None:
        check_bias(bias, n, x.device)
    problem, config = plan
    out = torch.empty((*x.shape[:-1], n // 2 if gated else n), dtype=x.dtype, device=x.device)
    views = gpu_tiles.views(aligned(weight), gpu_tiles.geometry(problem.format, (n, k)))
    with on(x):
        before, inside = norm.contiguous(), skinny.takes_norm(config)
        z = x.contiguous().view(rows, k)
        if not inside:
            y = torch.empty_like(z)
            norm_kernel.launch(here, z, before, eps, y)
            z = y
        epilogue = Epilogue(bias, gated=gated)
        skinny.launch(problem, config, z, *views, out.view(rows, -1), epilogue, (before, eps) if inside else None)
    return out


def normed_plan(
    format: str, rows: int, n: int, k: int, dtype: torch.dtype, here: Gpu, *, gated: bool = False, biased: bool = False
) -> tuple[Problem, Any] | str:
    """The problem that `normed_linear` gives to `kernels/gpu/skinny.py`, and its config; or why torch's operations are taken instead."""
    if gated and biased:
        return "gates with a bias are not in the kernel"
    if (trouble := triton_trouble()) is not None:
        return trouble
    return _plan(format, rows, n, k, dtype, gated, here)


@lru_cache(maxsize=1024)
def _plan(format: str, rows: int, n: int, k: int, dtype: torch.dtype, gated: bool, here: Gpu) -> tuple[Problem, Any] | str:
    from halfbyte.kernels.gpu import norm, skinny

    if here.backend != "cuda":
        return f"the kernel starts early on NVIDIA GPUs only, not on {here.name}"
    if not n or not 0 < rows <= _MOST_ROWS:
        return f"it is for 1 to {_MOST_ROWS} rows of 1 or more outputs, not {rows} of {n}"
    if k > norm.MOST:
        return f"a norm of {k} columns is more than the {norm.MOST} that a block's registers hold"
    problem = Problem("linear", rows, n, k, as_format(format), dtype)
    choice = choose_gpu_linear(problem, here)
    if choice.taken is None:
        return "no kernel solves this product"
    if choice.taken.candidate.home != "skinny":
        return f"{choice.taken.candidate.name} is faster here, and takes no norm"
    if not gated:
        return problem, choice.taken.config
    options = (choice.taken, *choice.others)
    fitting = (skinny.gated(problem, o.config) for o in options if o.candidate.home == "skinny")
    config = next((config for config in fitting if config is not None), None)
    return f"the halves of {n} outputs are no whole panels" if config is None else (problem, config)


# attend


def _check_attend(qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor | None) -> int:
    """The number of query heads."""
    fits = keys.dim() == 4 and keys.shape == values.shape and keys.dtype == values.dtype == qkv.dtype and qkv.dim() == 2
    if fits:
        batch, kv_heads, size, dim = keys.shape
        heads = qkv.shape[1] // dim - 2 * kv_heads
        fits = qkv.shape == (batch, (heads + 2 * kv_heads) * dim) and heads > 0 and heads % kv_heads == 0 and dim % 2 == 0
        fits &= all(t.dim() == 2 and t.shape[0] in (1, batch) and t.shape[1] == dim for t in (cos, sin))
        fits &= mask is None or (mask.dtype == torch.bool and mask.dim() == 2 and mask.shape[0] in (1, batch) and mask.shape[1] == size)
        fits &= length.numel() == 1 and length.dtype == torch.int64
        if fits:
            return heads
    got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (qkv, cos, sin, keys, values, length, *(() if mask is None else (mask,))))
    raise ArgumentError(
        f"attend takes qkv [B, (H + 2 Hkv) * D], cosines and sines [B, D], a cache [B, Hkv, T, D] of qkv's type, one int64 and a mask "
        f"bool [B, T], got {got}"
    )


def _attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor | None, scale: float, advance: int
) -> Tensor:
    """In torch's operations, and in float32 as the kernel."""
    heads = _check_attend(qkv, cos, sin, keys, values, length, mask)
    batch, kv_heads, size, dim = keys.shape
    x = qkv.view(batch, heads + 2 * kv_heads, dim).float()
    turned = x * cos.float()[:, None] + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin.float()[:, None]
    at = length.view(1)
    keys.index_copy_(2, at, turned[:, heads : heads + kv_heads, None].to(keys.dtype))
    values.index_copy_(2, at, x[:, heads + kv_heads :, None].to(values.dtype))
    seen = torch.arange(size, device=keys.device)[None] <= at
    if mask is not None:
        seen = seen & mask
    length.add_(advance)
    q = turned[:, :heads].view(batch, kv_heads, -1, dim) * scale
    scores = (q @ keys.float().transpose(2, 3)).masked_fill(~seen[:, None, None], -torch.inf)
    # What is not there yet may be anything.
    there = values.float().masked_fill(~seen[:, None, :, None], 0)
    return (scores.softmax(-1) @ there).to(qkv.dtype).view(batch, heads * dim)


def _attend_cuda(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor | None, scale: float, advance: int
) -> Tensor:
    heads = _check_attend(qkv, cos, sin, keys, values, length, mask)
    contiguous = all(t.is_contiguous() for t in (qkv, keys, values)) and all(t.stride(-1) == 1 for t in (cos, sin, *_present(mask)))
    here = gpu(qkv.get_device())
    if not contiguous or why_not_attend(heads, keys.shape[1], keys.shape[3], qkv.dtype, here) is not None:
        return _attend(qkv, cos, sin, keys, values, length, mask, scale, advance)
    from halfbyte.kernels.gpu import attend as kernel

    out = torch.empty((qkv.shape[0], heads * keys.shape[3]), dtype=qkv.dtype, device=qkv.device)
    with on(qkv):
        kernel.launch(here, qkv, (cos, sin), (keys, values), length, mask, out, scale, advance)
    return out


def why_not_attend(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, here: Gpu) -> str | None:
    """Why `attend` takes torch's operations on contiguous tensors of these sizes; None where `kernels/gpu/attend.py` computes it."""
    if (trouble := triton_trouble()) is not None:
        return trouble
    if here.backend != "cuda":
        return f"the kernel starts early on NVIDIA GPUs only, not on {here.name}"
    from halfbyte.kernels.gpu import attend as kernel

    return kernel.supports(heads, kv_heads, dim, dtype)


def _present(mask: Tensor | None) -> tuple[Tensor, ...]:
    return () if mask is None else (mask,)


def _attend_fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor | None, scale: float, advance: int
) -> Tensor:
    heads = _check_attend(qkv, cos, sin, keys, values, length, mask)
    return qkv.new_empty((qkv.shape[0], heads * keys.shape[3]))


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
