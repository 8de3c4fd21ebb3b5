"""The steps of a decoder layer for one token of each sequence, where they differ from plain layers: the custom ops
`halfbyte::normed_linear` and `halfbyte::attend`; `norms.py` has norms by themselves.

A language model's step for one token is a chain of short kernels. On NVIDIA GPUs each of these ops is one to three kernels, where they
support it, that start while the previous one is still running; elsewhere the same formula in torch's operations.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.layer_kinds import (
    GATES,
    PROJECTIONS,
    ROPE_INTERLEAVED,
    GateFunction,
    Projections,
    RopeInterleaved,
    gate_in_torch,
    is_interleaved,
    key_value_heads,
)
from halfbyte.kernels.problem import AttentionProblem, Epilogue, NormedProblem, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.records import from_codes, scales_of, to_codes
from halfbyte.machine import gpu
from halfbyte.ops.checks import check_bias, check_linear
from halfbyte.ops.cuda import on
from halfbyte.ops.registration import OPS
from halfbyte.ops.replay import replayed
from halfbyte.ops.tensors import aligned
from halfbyte.ops.transformer.norms import check_norm, norm_in_torch, norm_on_gpu, normed, rms_parts, wide_norm
from halfbyte.ops.transformer.sublayers import Heads, Norm

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "normed_linear(Tensor x, Tensor? norm, float eps, bool unit_offset, Tensor weight, Tensor? bias, str format, int n, int k, str gates, "
    "bool gated, float factor) -> Tensor"
)
_library.define(
    "attend(Tensor qkv, Tensor? cos, Tensor? sin, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) length, Tensor? mask, "
    "Tensor(d!)? key_scales, Tensor(e!)? value_scales, "
    "Tensor? q_norm, Tensor? k_norm, float eps, bool unit_offset, Tensor? sinks, float scale, int rotary_dim, str rope_interleaved, "
    "bool norm_after_rope, str projections, bool v_norm, float factor, int advance, float? cap) -> Tensor"
)


def normed_linear(
    x: Tensor,
    norm: Norm | None,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    gates: GateFunction | Literal[""] = "",
    gated: bool = True,
    factor: float = 1.0,
) -> Tensor:
    """(x / sqrt(mean(x², over the last dimension) + eps) * norm) · dequantize(packed)ᵀ + bias, x [..., K] -> [..., N] in x's dtype.

    norm   an RMS norm (Zhang and Sennrich, 2019), its weight [K] of x's dtype, or a layer norm, which is `normed` before the product;
           None: x as it is
    bias   [N] or None
    gates  f, as in `layer_kinds.py`: the first half of the N outputs are gates for the second:
           factor * f(y[..., : N / 2]) * y[..., N / 2 :], [..., N / 2]
    gated  False: there are no gates, the result is factor * f(y), [..., N]

    No gradients. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    n, k = packed.shape
    if norm is not None and norm.layer_norm:
        x, norm = normed(x, norm), None
    weight, eps, unit_offset = rms_parts(norm)
    settings = packed.name, n, k, gates, gated, factor
    return OPS.normed_linear.default(x, weight, eps, unit_offset, packed.data, bias, *settings)  # type: ignore[no-any-return]


def attend(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    mask: Tensor | None,
    heads: Heads,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    factor: float = 1.0,
    advance: int = 1,
) -> Tensor:
    """Appends one new token of each sequence to a cache of fixed size, and computes its attention to the cache: y [B, H * D].

    qkv           [B, (H + 2 Hkv) * D]: queries, keys and values of the token, one head after the other, without positions; or what `heads`
                  say that is made: of queries alone nothing is appended
    rotary        cosines and sines of its position, each [B or 1, R] (Su et al., RoFormer, 2021: the halves of the first R elements of a
                  head are rotated, or adjacent ones, where `heads.rope_interleaved` says so: by R / 2 or R columns), or
                  of R / 2 numbers where the other half is the same; None: nothing is
    keys, values  [B, Hkv, T, D]: written at `length`; or their codes, int8 (layouts/records.py)
    length        int64, one number: the tokens in the cache, with the new one where nothing is appended; `advance`, 1 or 0, is added
    mask          [B or 1, T]: bool: which of the tokens may be seen; floating point: what is added to scores; None: all may be seen
    heads         the factor and the soft cap of scores, sinks, interleaving; how many heads there are follows from qkv and the cache, as a
                  process may have a part of them. Norms, if any, are RMS norms, before the rotation unless `heads` say that it is first,
                  which differ in nothing but their weights: [D] of each head, or, before the rotation, [H * D] and [Hkv * D] of all heads
                  together
    scales        of keys and of values that are codes, bfloat16 [B, Hkv, T, ceil(D / 32)]; None: these are floats of qkv's type
    factor        of the result

    No gradients. Where the cache is full the result is NaN on a GPU. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    cos, sin = (None, None) if rotary is None else rotary
    norms = heads.qk_norm
    (q_norm, eps, unit_offset), k_norm = rms_parts(norms and norms[0]), None if norms is None else norms[1].weight
    of_heads = heads.scale, heads.rotary_width, heads.rope_interleaved, heads.norm_after_rope, heads.projections, heads.v_norm
    settings = eps, unit_offset, heads.sinks, *of_heads, factor, advance, heads.softcap
    of_codes = (None, None) if scales is None else scales
    return OPS.attend.default(qkv, cos, sin, keys, values, length, mask, *of_codes, q_norm, k_norm, *settings)  # type: ignore[no-any-return]


# normed_linear


class _Normed(NamedTuple):
    """The arguments of the op `normed_linear`."""

    x: Tensor
    norm: Tensor | None
    eps: float
    unit_offset: bool
    weight: Tensor
    bias: Tensor | None
    format: str
    n: int
    k: int
    gates: GateFunction | Literal[""]
    gated: bool
    factor: float

    @property
    def rms_norm(self) -> Norm | None:
        return None if self.norm is None else Norm(self.norm, self.eps, self.unit_offset)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return *self.x.shape[:-1], self.n // 2 if self.gates and self.gated else self.n

    def check(self) -> None:
        """Raise ArgumentError where shapes or dtypes do not fit."""
        x, n, k = self.x, self.n, self.k
        if self.norm is not None:
            check_norm(x, self.norm)
        if x.dim() == 0 or x.shape[-1] != k:
            raise ArgumentError(f"a weight [{n}, {k}] takes x [..., {k}], got {list(x.shape)}: the last dimensions must agree")
        if self.gates not in ("", *GATES):
            raise ArgumentError(f"gates are one of {', '.join(GATES)}, got {self.gates!r}")
        if self.gates and self.gated and n % 2:
            raise ArgumentError(f"half of {n} outputs cannot be gates of the others: their number is even")

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] times the weight, with the bias."""
        settings = self.format, self.n, self.k, "float", "block", None, None
        return OPS.linear.default(x, self.weight, self.bias, None, *settings)  # type: ignore[no-any-return]


def _normed(*args: *_Normed) -> Tensor:
    """In torch's operations: the norm in float32, rounded once."""
    of = _Normed(*args)
    of.check()
    y = of.product(of.x if of.rms_norm is None else norm_in_torch(of.x, of.rms_norm))
    return activated_in_torch(y, of.gates, of.factor, gated=of.gated) if of.gates else y


def activated_on_gpu(y: Tensor, gates: GateFunction, factor: float, *, gated: bool, multiplier: Tensor | None = None) -> Tensor:
    """`activated` by a kernel, of contiguous y on the current device."""
    from halfbyte.kernels.gpu.transformer import gates as kernel

    other = None if multiplier is None else multiplier.view(-1, multiplier.shape[-1])

    def steps() -> Tensor:
        out = output(y.new_empty((*y.shape[:-1], y.shape[-1] // 2 if gated else y.shape[-1])))
        rows = y.view(-1, y.shape[-1]), out.view(-1, out.shape[-1])
        kernel.launch(gpu(y.get_device()), *rows, gates, factor, gated=gated, multiplier=other)
        return out

    return replayed(steps, (y, other), "gates", gates, factor, gated)


def activated_in_torch(y: Tensor, gates: GateFunction, factor: float, *, gated: bool, multiplier: Tensor | None = None) -> Tensor:
    """Apply the gate function in float32, rounded once; `multiplier` is the other factor where `y` has no up projection."""
    gate, up = y.float().chunk(2, -1) if gated else (y.float(), None if multiplier is None else multiplier.float())
    active = gate_in_torch(gate, gates)
    return (active * factor if up is None else active * up * factor).to(y.dtype)


def _normed_cuda(*args: *_Normed) -> Tensor:
    of = _Normed(*args)
    of.check()
    x, n, k, gates, gated, factor, norm = of.x, of.n, of.k, of.gates, of.gated, of.factor, of.rms_norm
    if norm is None and not gates:
        return of.product(x)
    rows = x.numel() // k if k else 0
    here = gpu(x.get_device())
    geo = gpu_tiles.geometry_of(as_format(of.format), n, k, of.weight.numel())
    problem = Problem("linear", rows, n, k, geo.format, x.dtype, sparse=geo.sparse, paired=geo.paired)
    choice = choose(NormedProblem(problem, norm is not None, bool(gates) and gated, of.bias is not None), here)
    if choice.taken is None:
        return _normed(*args)
    candidate, config = choice.taken.candidate, choice.taken.config
    check_linear(x, of.weight, of.format, n, k, "block", -float("inf"), float("inf"))
    if of.bias is not None:
        check_bias(of.bias, n, x.device)
    within = gates if gated and candidate.home else ""  # what the product has
    inside = None if norm is None or not candidate.takes_norm(choice.problem, config) else (norm.weight.contiguous(), *norm[1:3])
    with on(x):
        z = x.contiguous() if norm is None or inside is not None else norm_on_gpu(x, norm)
        z = z.view(rows, k)
        if candidate.home:
            weight, bias = aligned(of.weight), None if of.bias is None else of.bias.contiguous()

            def multiply() -> Tensor:
                out = output(x.new_empty(rows, of.shape[-1] if within else n))
                views, epilogue = gpu_tiles.views(weight, geo), Epilogue(bias, gates=within, factor=factor)
                candidate.launch(choice.problem, config, z, views, out, epilogue, *([] if inside is None else [inside]))
                return out

            operands = z, weight, bias, inside and inside[0]
            y = replayed(multiply, operands, "normed_linear", choice.problem, config, within, factor, inside and inside[1:])
        else:
            y = of.product(z)
        if gates and not within:
            y = activated_on_gpu(y, gates, factor, gated=gated)
    return y.view(of.shape)


# attend


class _Token(NamedTuple):
    """The arguments of the op `attend`."""

    qkv: Tensor
    cos: Tensor | None
    sin: Tensor | None
    keys: Tensor
    values: Tensor
    length: Tensor
    mask: Tensor | None
    key_scales: Tensor | None
    value_scales: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    unit_offset: bool
    sinks: Tensor | None
    scale: float
    rotary_dim: int
    rope_interleaved: RopeInterleaved
    norm_after_rope: bool
    projections: Projections
    v_norm: bool
    factor: float
    advance: int
    cap: float | None = None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors whose last dimension must be contiguous."""
        return tuple(t for t in (self.cos, self.sin, self.mask, self.q_norm, self.k_norm, self.sinks) if t is not None)

    @property
    def norms(self) -> tuple[Norm, Norm] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return Norm(self.q_norm, self.eps, self.unit_offset), Norm(self.k_norm, self.eps, self.unit_offset)

    @property
    def rotary(self) -> tuple[Tensor, Tensor] | None:
        return None if self.cos is None or self.sin is None else (self.cos, self.sin)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales of an int8 cache; empty for a floating-point one."""
        return () if self.key_scales is None or self.value_scales is None else (self.key_scales, self.value_scales)

    @property
    def others(self) -> int:
        """How many of keys and values are made."""
        return key_value_heads(self.projections)

    @property
    def of_all_heads(self) -> bool:
        """Whether there are norms, of all heads together."""
        return self.q_norm is not None and len(self.q_norm) != self.keys.shape[3]

    def heads(self) -> int:
        """The number of query heads. Raises ArgumentError where shapes or dtypes do not fit."""
        qkv, keys, mask = self.qkv, self.keys, self.mask
        kind = torch.int8 if self.scales else qkv.dtype
        fits = keys.dim() == 4 and keys.shape == self.values.shape and keys.dtype == self.values.dtype == kind and qkv.dim() == 2
        fits = fits and (self.key_scales is None) == (self.value_scales is None)
        fits = fits and all(t.shape == (*keys.shape[:3], scales_of(keys.shape[3])) and t.dtype == torch.bfloat16 for t in self.scales)
        if fits:
            batch, kv_heads, size, dim = keys.shape
            others = self.others * kv_heads
            heads = qkv.shape[1] // dim - others
            fits = qkv.shape == (batch, (heads + others) * dim) and heads > 0 and heads % kv_heads == 0 and dim % 2 == 0
            fits &= self.rope_interleaved in ROPE_INTERLEAVED and not (self.norm_after_rope and self.of_all_heads)
            fits &= self.projections in PROJECTIONS and (self.others > 0 or self.advance == 0)
            fits &= not self.v_norm or (self.q_norm is not None and not self.of_all_heads)
            rotary, norms = (self.cos, self.sin), (self.q_norm, self.k_norm)
            if fits and self.rotary is not None:
                fits = all(t.dim() == 2 and t.shape[0] in (1, batch) for t in self.rotary) and self.rotary_dim % 2 == 0
                fits &= 0 < self.rotary_dim <= dim
                fits &= self.rotary[0].shape[1] in (
                    [self.rotary_dim] if self.rope_interleaved == "repeated" else [self.rotary_dim, self.rotary_dim // 2]
                )
                fits &= self.rotary[0].shape == self.rotary[1].shape
            fits &= (rotary[0] is None) == (rotary[1] is None)
            fits &= mask is None or (mask.dim() == 2 and mask.shape[0] in (1, batch) and mask.shape[1] == size)
            fits &= mask is None or mask.dtype == torch.bool or mask.is_floating_point()
            fits &= self.sinks is None or (self.sinks.shape == (heads,) and self.sinks.is_floating_point())
            fits &= self.length.numel() == 1 and self.length.dtype == torch.int64
            fits &= (norms[0] is None) == (norms[1] is None)
            widths = [None if t is None else tuple(t.shape) for t in norms]
            fits &= widths in ([None, None], [(dim,), (dim,)], [(heads * dim,), (kv_heads * dim,)])
            if fits:
                return heads
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (qkv, keys, self.values, *self.scales, self.length, *self.rows))
        raise ArgumentError(
            f"attend takes qkv [B, (H + {self.others} Hkv) * D], a cache [B, Hkv, T, D] of qkv's type, or int8 with scales, one int64, "
            f"cosines and sines [B, R], R <= D, a mask [B, T], bool or floating point, norms [D] or of all heads and sinks [H], got {got}"
        )


def _attend(*args: *_Token) -> Tensor:
    """In torch's operations, and in float32 like the kernel."""
    token = _Token(*args)
    heads = token.heads()
    qkv, keys, values = token.qkv, token.keys, token.values
    batch, kv_heads, size, dim = keys.shape
    x = qkv.view(batch, heads + token.others * kv_heads, dim).float()
    q, k, v = parted_in_torch(x, heads, kv_heads, token.projections)
    if token.v_norm:
        v = wide_norm(v, Norm(torch.ones_like(v[0, 0]), token.eps))
    rotary = None if token.rotary is None else (token.rotary[0].float()[:, None], token.rotary[1].float()[:, None])
    rope = token.rotary_dim, token.rope_interleaved, token.norm_after_rope
    q, k = placed_in_torch(q, k, token.norms, rotary, *rope, rows=token.of_all_heads)
    at = token.length.view(1) - (0 if token.others else 1)
    if token.others:
        for part, new in zip(((keys, token.key_scales), (values, token.value_scales)), (k, v), strict=True):
            entries = (new.to(qkv.dtype),) if part[1] is None else to_codes(new.to(qkv.dtype))
            for tensor, entry in zip(part, entries, strict=False):
                assert tensor is not None
                tensor.index_copy_(2, at, entry[:, :, None])
    if token.key_scales is not None and token.value_scales is not None:
        keys, values = from_codes(keys, token.key_scales, qkv.dtype), from_codes(values, token.value_scales, qkv.dtype)
    tokens = torch.arange(size, device=keys.device)[None]
    seen, mask = tokens <= at, token.mask
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    token.length.add_(token.advance)
    q = q.view(batch, kv_heads, -1, dim) * token.scale
    scores = q @ keys.float().transpose(2, 3)
    if token.cap is not None:
        scores = (scores / token.cap).tanh() * token.cap
    if mask is not None and mask.is_floating_point():
        scores = scores + mask.float()[:, None, None]
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if token.sinks is not None:
        scores = torch.cat((scores, token.sinks.float().view(1, kv_heads, -1, 1).expand(batch, -1, -1, -1)), -1)
    # Unused entries of the cache may hold anything, NaN included.
    there = values.float().masked_fill(~seen[:, None, :, None], 0)
    y: Tensor = scores.softmax(-1)[..., :size] @ there * token.factor
    return y.to(qkv.dtype).view(batch, heads * dim)


def parted_in_torch(x: Tensor, heads: int, kv_heads: int, projections: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of x [..., heads, D]; keys stand for values that are made of them, queries for what is not made."""
    parts = x.split((heads, *(kv_heads,) * key_value_heads(projections)), -2)
    return parts[0], parts[1 if len(parts) > 1 else 0][..., :kv_heads, :], parts[-1][..., :kv_heads, :]


def placed_in_torch(
    q: Tensor,
    k: Tensor,
    norms: tuple[Norm, Norm] | None,
    rotary: tuple[Tensor, Tensor] | None,
    rotary_dim: int,
    rope_interleaved: RopeInterleaved,
    norm_after_rope: bool,
    *,
    rows: bool,
) -> tuple[Tensor, Tensor]:
    """q [..., H, D] and k [..., Hkv, D] with the norms and positions that `ops.transformer.sublayers.Heads` has."""

    def rotated(x: Tensor) -> Tensor:
        return x if rotary is None else rope_in_torch(x, *rotary, rotary_dim, rope_interleaved)

    if norms is None:
        return rotated(q), rotated(k)
    if norm_after_rope:
        q, k = rotated(q), rotated(k)
    q, k = (wide_norm(t.flatten(-2) if rows else t, norm).view(t.shape) for t, norm in zip((q, k), norms, strict=True))
    return (q, k) if norm_after_rope else (rotated(q), rotated(k))


def rope_in_torch(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, rope_interleaved: RopeInterleaved) -> Tensor:
    """Apply rope to the first elements of x [..., D], `rotary_dim`, by tables [..., R] or of the first R / 2."""
    part, half = x[..., :rotary_dim], rotary_dim // 2
    if rope_interleaved == "half":
        cos, sin = (t[..., :half].repeat_interleave(2, -1) for t in (cos, sin))
    elif cos.shape[-1] < rotary_dim:
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
    if is_interleaved(rope_interleaved):
        other = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-part[..., half:], part[..., :half]), -1)
    return torch.cat((part * cos + other * sin, x[..., rotary_dim:]), -1)


def _attend_cuda(*args: *_Token) -> Tensor:
    token = _Token(*args)
    qkv, keys, values = token.qkv, token.keys, token.values
    heads = token.heads()
    contiguous = all(t.is_contiguous() for t in (qkv, keys, values, *token.scales)) and all(t.stride(-1) == 1 for t in token.rows)
    here = gpu(qkv.get_device())
    widest = heads * keys.shape[3] if token.of_all_heads else None
    batch, kv_heads, _, dim = keys.shape
    cache: Literal["float", "int8"] = "int8" if token.scales else "float"
    softcap = token.cap is not None
    problem = AttentionProblem("decode", batch, 1, heads, kv_heads, dim, qkv.dtype, cache, norm_width=widest, softcap=softcap)
    if not contiguous or choose(problem, here).taken is None:
        return _attend(*args)
    from halfbyte.kernels.gpu.transformer import attend as kernel
    from halfbyte.kernels.gpu.transformer import norm

    norms = None if token.norms is None else (token.norms[0][:3], token.norms[1][:3])

    def steps() -> Tensor:
        out = output(torch.empty((qkv.shape[0], heads * keys.shape[3]), dtype=qkv.dtype, device=qkv.device))
        read, within = qkv, norms
        if norms is not None and token.of_all_heads:
            read, within = output(torch.empty_like(qkv)), None
            norm.launch_sections(here, qkv, norms, read)
        of_heads = token.rotary_dim, token.rope_interleaved, token.sinks, token.norm_after_rope, token.others, token.v_norm
        how = kernel.How(token.factor, *of_heads)
        entries = keys, values, *token.scales
        kernel.launch(here, read, token.rotary, entries, token.length, token.mask, out, token.scale, token.advance, within, how)
        return out

    tensors, settings = [t for t in args if t is None or isinstance(t, Tensor)], [t for t in args if not isinstance(t, Tensor)]
    with on(qkv):
        return replayed(steps, tensors, "attend", *settings)


def _attend_fake(*args: *_Token) -> Tensor:
    token = _Token(*args)
    return token.qkv.new_empty((token.qkv.shape[0], token.heads() * token.keys.shape[3]))


def _normed_fake(*args: *_Normed) -> Tensor:
    of = _Normed(*args)
    of.check()
    return of.x.new_empty(of.shape)


_library.impl("normed_linear", _normed, "CPU")
_library.impl("normed_linear", _normed_cuda, "CUDA")
_library.impl("attend", _attend, "CPU")
_library.impl("attend", _attend_cuda, "CUDA")
torch.library.register_fake("halfbyte::normed_linear", _normed_fake, lib=_library)
torch.library.register_fake("halfbyte::attend", _attend_fake, lib=_library)
