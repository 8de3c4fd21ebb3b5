"""Decode attention: one new token of each sequence attends to a KV cache of fixed size. The custom op `halfbyte::attend`.

Called by decode steps (decoder/gpu_layer.py) with the fused output of the q, k and v projections. The op applies the norms of queries, keys
and values and rope, appends the new keys and values to the cache, and computes attention. On an NVIDIA GPU two or three kernels do that
(kernels/gpu/transformer/attend.py); where they do not support the heads, and on other devices, the functions `…_in_torch` at the end of
this file do. Prefill (prefill_ops.py) uses these functions, too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.errors import ArgumentError
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.layer_kinds import PROJECTIONS, ROPE_INTERLEAVED, Projections, RopeInterleaved, is_interleaved, num_kv_projections
from halfbyte.kernels.problem import AttentionProblem
from halfbyte.layouts.records import from_codes, scales_of, to_codes
from halfbyte.machine import gpu
from halfbyte.ops.cuda import on
from halfbyte.ops.registration import OPS
from halfbyte.ops.replay import replayed
from halfbyte.ops.transformer.norms import rms_parts, wide_norm
from halfbyte.ops.transformer.sublayers import Heads, Norm

_NormParts = tuple[Tensor, float, bool]  # weight, eps and unit_offset of an RMSNorm, as GPU kernels take them

_library = torch.library.Library("halfbyte", "FRAGMENT")
# Saved exported programs contain these names of arguments: they must not change.
_library.define(
    "attend(Tensor qkv, Tensor? cos, Tensor? sin, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) length, Tensor? mask, "
    "Tensor(d!)? key_scales, Tensor(e!)? value_scales, "
    "Tensor? q_norm, Tensor? k_norm, float eps, bool unit_offset, Tensor? sinks, float scale, int rotary_dim, str rope_interleaved, "
    "bool norm_after_rope, str projections, bool v_norm, float factor, int advance, float? cap) -> Tensor"
)


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
    """Compute y [B, H * D] = factor * attention of one new token of each sequence, and append its keys and values to the cache.

    No gradients flow.

    Args:
        qkv: [B, (H + 2 Hkv) * D]: the token's queries, keys and values before norms and rope, head by head. With `heads.projections` "qk"
            it has no values, with "q" neither keys nor values.
        rotary: Cosines and sines of the token's position, each [B or 1, R]; or [B or 1, R / 2] if the halves of a row are equal; None:
            no rope.
        keys, values: The cache, [B, Hkv, T, D] in qkv's dtype, or int8 codes (layouts/records.py). Index `length` is written.
        length: int64, one element: number of tokens in the cache. With projections "q", which write nothing, it counts the new token.
        mask: [B or 1, T]: bool, which tokens of the cache are visible, or floating point, which is added to scores; None: all are visible.
        heads: Settings of attention. `num_heads` and `num_kv_heads` are ignored: qkv and the cache have fewer heads under tensor
            parallelism. Norms must be RMSNorms with one eps and one `unit_offset`.
        scales: If the cache has codes: scales of keys and of values, bfloat16 [B, Hkv, T, ceil(D / 32)].
        factor: Factor of the result.
        advance: 0 or 1: what is added to `length`. With projections "q" 0.

    Returns:
        y in qkv's dtype; on a GPU NaN if the cache is full.

    Raises:
        ArgumentError: Shapes, dtypes or settings do not fit.
    """
    cos, sin = (None, None) if rotary is None else rotary
    (q_norm, eps, unit_offset), (k_norm, *k_settings) = (rms_parts(norm) for norm in heads.qk_norm or (None, None))
    if k_settings != [eps, unit_offset]:
        raise ArgumentError(f"the norms of queries and keys have one eps and one unit_offset, got {[eps, unit_offset]} and {k_settings}")
    attention_settings = heads.scale, heads.rotary_width, heads.rope_interleaved, heads.norm_after_rope, heads.projections, heads.v_norm
    settings = eps, unit_offset, heads.sinks, *attention_settings, factor, advance, heads.softcap
    key_scales, value_scales = (None, None) if scales is None else scales
    tensors = qkv, cos, sin, keys, values, length, mask, key_scales, value_scales, q_norm, k_norm
    return OPS.attend.default(*tensors, *settings)  # type: ignore[no-any-return]


class _Arguments(NamedTuple):
    """The arguments of the op `attend`, in the order of its schema."""

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
    softcap: float | None

    @property
    def strided(self) -> tuple[Tensor, ...]:
        """The tensors of which kernels require only the last dimension to be contiguous."""
        return tuple(t for t in (self.cos, self.sin, self.mask, self.q_norm, self.k_norm, self.sinks) if t is not None)

    @property
    def rotary(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines."""
        return None if self.cos is None or self.sin is None else (self.cos, self.sin)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales of an int8 cache; empty for a floating-point one."""
        return () if self.key_scales is None or self.value_scales is None else (self.key_scales, self.value_scales)

    @property
    def kv_projections(self) -> int:
        """How many of keys and values are in qkv: 2; 1, as values are the keys before norm and rope; 0, as nothing is written."""
        return num_kv_projections(self.projections)

    @property
    def qk_norm_whole(self) -> bool:
        """Whether the norms of queries and keys are over all heads together: weights [H * D] and [Hkv * D]."""
        return self.q_norm is not None and len(self.q_norm) != self.keys.shape[3]

    @property
    def num_heads(self) -> int:
        """H, the query heads in qkv."""
        return self.qkv.shape[1] // self.keys.shape[3] - self.kv_projections * self.keys.shape[1]

    @property
    def heads(self) -> Heads:
        """`Heads` with the numbers of heads that qkv and the cache have; only after `check`."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = Norm(self.q_norm, self.eps, self.unit_offset), Norm(self.k_norm, self.eps, self.unit_offset)
        return Heads(
            self.num_heads,
            self.keys.shape[1],
            self.keys.shape[3],
            self.scale,
            qk_norm=norms,
            qk_norm_whole=self.qk_norm_whole,
            rotary_dim=self.rotary_dim,
            softcap=self.softcap,
            sinks=self.sinks,
            rope_interleaved=self.rope_interleaved,
            norm_after_rope=self.norm_after_rope,
            projections=self.projections,
            v_norm=self.v_norm,
        )

    def check(self) -> None:
        """Raise ArgumentError where shapes, dtypes or settings do not fit."""
        # The order matters: each check relies on those before it.
        for part, fits in (("cache", self._fits_cache), ("heads", self._fits_heads), ("rope", self._fits_rope), ("mask", self._fits_mask)):
            if not fits():
                tensors = (self.qkv, self.keys, self.values, *self.scales, self.length, *self.strided)
                got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)
                raise ArgumentError(
                    f"attend takes qkv [B, (H + {self.kv_projections} Hkv) * D], a cache [B, Hkv, T, D] of qkv's type, or int8 with "
                    f"scales, one int64, cosines and sines [B, R], R <= D, a mask [B, T], bool or floating point, norms [D] or of all "
                    f"heads and sinks [H], got {got}, of which the {part} does not fit"
                )

    def _fits_cache(self) -> bool:
        keys, values, scales = self.keys, self.values, self.scales
        return (
            self.projections in PROJECTIONS
            and keys.dim() == 4
            and keys.shape == values.shape
            and keys.dtype == values.dtype == (torch.int8 if scales else self.qkv.dtype)
            and (self.key_scales is None) == (self.value_scales is None)
            and all(t.shape == (*keys.shape[:3], scales_of(keys.shape[3])) and t.dtype == torch.bfloat16 for t in scales)
            and self.length.numel() == 1
            and self.length.dtype == torch.int64
            and (self.kv_projections > 0 or self.advance == 0)
        )

    def _fits_heads(self) -> bool:
        batch, kv_heads, _, dim = self.keys.shape
        if self.qkv.dim() != 2 or dim == 0 or dim % 2 or kv_heads == 0:
            return False
        heads = self.num_heads
        widths = [None if norm is None else tuple(norm.shape) for norm in (self.q_norm, self.k_norm)]
        return (
            heads > 0
            and heads % kv_heads == 0
            and self.qkv.shape == (batch, (heads + self.kv_projections * kv_heads) * dim)
            and widths in ([None, None], [(dim,), (dim,)], [(heads * dim,), (kv_heads * dim,)])
            and not (self.qk_norm_whole and self.norm_after_rope)
            and not (self.v_norm and (self.q_norm is None or self.qk_norm_whole))
            and (self.sinks is None or (self.sinks.shape == (heads,) and self.sinks.is_floating_point()))
        )

    def _fits_rope(self) -> bool:
        if self.rope_interleaved not in ROPE_INTERLEAVED or (self.cos is None) != (self.sin is None):
            return False
        if self.cos is None or self.sin is None:
            return True
        r = self.rotary_dim
        columns = (r,) if self.rope_interleaved == "repeated" else (r, r // 2)
        return (
            self.cos.dim() == 2
            and self.cos.shape == self.sin.shape
            and self.cos.shape[0] in (1, len(self.qkv))
            and self.cos.shape[1] in columns
            and r % 2 == 0
            and 0 < r <= self.keys.shape[3]
        )

    def _fits_mask(self) -> bool:
        mask = self.mask
        if mask is None:
            return True
        is_mask_dtype = mask.dtype == torch.bool or mask.is_floating_point()
        return is_mask_dtype and mask.dim() == 2 and mask.shape[0] in (1, len(self.qkv)) and mask.shape[1] == self.keys.shape[2]


def _attend_in_torch(*args: *_Arguments) -> Tensor:
    """Compute the op in torch's operations, in float32 as the kernels do."""
    a = _Arguments(*args)
    a.check()
    heads, keys, values = a.heads, a.keys, a.values
    rotary = None if a.rotary is None else (a.rotary[0][:, None], a.rotary[1][:, None])
    q, k, v = projected_in_torch(a.qkv[:, None], rotary, heads)
    index = a.length.view(1) - (0 if a.kv_projections else 1)  # of the new token in the cache
    if a.kv_projections:
        for buffer, scales, new in ((keys, a.key_scales, k), (values, a.value_scales, v)):
            token = new.transpose(1, 2).to(a.qkv.dtype)
            if scales is None:
                buffer.index_copy_(2, index, token)
            else:
                codes, token_scales = to_codes(token)
                buffer.index_copy_(2, index, codes)
                scales.index_copy_(2, index, token_scales)
    if a.key_scales is not None and a.value_scales is not None:
        keys, values = from_codes(keys, a.key_scales, a.qkv.dtype), from_codes(values, a.value_scales, a.qkv.dtype)
    visible, bias = (torch.arange(keys.shape[2], device=keys.device) <= index)[None, None], None
    if a.mask is not None and a.mask.dtype == torch.bool:
        visible = visible & a.mask[:, None]
    elif a.mask is not None:
        bias = a.mask.float()[:, None]
    a.length.add_(a.advance)
    y = attention_in_torch(q, keys, values, visible, a.scale, factor=a.factor, sinks=a.sinks, softcap=a.softcap, bias=bias)
    return y[:, 0].to(a.qkv.dtype)


def _attend_on_gpu(*args: *_Arguments) -> Tensor:
    """Compute the op by GPU kernels if they support the arguments, else in torch's operations."""
    a = _Arguments(*args)
    a.check()
    qkv, keys, values = a.qkv, a.keys, a.values
    is_contiguous = all(t.is_contiguous() for t in (qkv, keys, values, *a.scales)) and all(t.stride(-1) == 1 for t in a.strided)
    here, heads = gpu(qkv.get_device()), a.heads
    batch, kv_heads, _, dim = keys.shape
    width = heads.num_heads * dim
    cache: Literal["float", "int8"] = "int8" if a.scales else "float"
    problem = AttentionProblem(
        "decode",
        batch,
        1,  # new tokens of a sequence
        heads.num_heads,
        kv_heads,
        dim,
        qkv.dtype,
        cache,
        norm_width=width if a.qk_norm_whole else None,
        softcap=a.softcap is not None,
    )
    if not is_contiguous or choose(problem, here).taken is None or why_not_normed_on_gpu(heads.qk_norm) is not None:
        return _attend_in_torch(*args)
    from halfbyte.kernels.gpu.transformer import attend as kernel

    variant = kernel.How(
        factor=a.factor,
        rotary_dim=a.rotary_dim,
        rope_interleaved=a.rope_interleaved,
        sinks=a.sinks,
        norm_after_rope=a.norm_after_rope,
        others=a.kv_projections,
        v_norm=a.v_norm,
    )

    def launch() -> Tensor:
        out = output(torch.empty((batch, width), dtype=qkv.dtype, device=qkv.device))
        normed, norms = norm_whole_on_gpu(qkv, heads)
        buffers = keys, values, *a.scales
        kernel.launch(here, normed, a.rotary, buffers, a.length, a.mask, out, a.scale, a.advance, norms, variant)
        return out

    # A replay replaces the addresses of tensors; settings are part of the key of recorded launches.
    tensors, settings = [t for t in args if t is None or isinstance(t, Tensor)], [t for t in args if not isinstance(t, Tensor)]
    with on(qkv):
        return replayed(launch, tensors, "attend", *settings)


def why_not_normed_on_gpu(qk_norm: tuple[Norm, Norm] | None) -> str | None:
    """Return why GPU kernels do not apply these norms of queries and keys, or None."""
    from halfbyte.kernels.gpu.transformer import norm

    if qk_norm is None:
        return None
    if any(each.layer_norm for each in qk_norm):
        return "they apply RMSNorms, not LayerNorms"
    return norm.why_not_pair((qk_norm[0][:3], qk_norm[1][:3]))


def norm_whole_on_gpu(qkv: Tensor, heads: Heads) -> tuple[Tensor, tuple[_NormParts, _NormParts] | None]:
    """Apply norms over all heads together to the queries and keys of qkv [M, (H + 2 Hkv) * D], by a kernel, if `heads.qk_norm_whole`.

    Returns:
        qkv, or its normed copy; and the norms per head of queries and keys that the caller's kernel must apply, or None if there are none.
    """
    if heads.qk_norm is None:
        return qkv, None
    norms = heads.qk_norm[0][:3], heads.qk_norm[1][:3]
    if not heads.qk_norm_whole:
        return qkv, norms
    from halfbyte.kernels.gpu.transformer import norm

    normed = output(torch.empty_like(qkv))
    norm.launch_sections(gpu(qkv.get_device()), qkv, norms, normed)
    return normed, None


def _attend_fake(*args: *_Arguments) -> Tensor:
    """Check the arguments, and return an empty y."""
    a = _Arguments(*args)
    a.check()
    return a.qkv.new_empty((a.qkv.shape[0], a.num_heads * a.keys.shape[3]))


_library.impl("attend", _attend_in_torch, "CPU")
_library.impl("attend", _attend_on_gpu, "CUDA")
torch.library.register_fake("halfbyte::attend", _attend_fake, lib=_library)


# Reference formulas in torch's operations, also of prefill: t tokens of each sequence


def projected_in_torch(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output of the projections into queries, keys and values, and apply their norms and rope, in float32.

    Args:
        qkv: [B, t, (H + 2 Hkv) * D]: what `heads.projections` names.
        rotary: Cosines and sines [B or 1, t, R or R / 2]; None: no rope.
        heads: Numbers of heads, norms and the kind of rope.

    Returns:
        Queries [B, t, H, D], keys and values [B, t, Hkv, D]. With projections "q" keys and values are placeholders.
    """
    x = qkv.float().unflatten(-1, (-1, heads.head_dim))
    q, *rest = x.split((heads.num_heads, *(heads.num_kv_heads,) * num_kv_projections(heads.projections)), -2)
    k, v = (rest[0], rest[-1]) if rest else (q[..., : heads.num_kv_heads, :],) * 2
    if heads.v_norm and heads.qk_norm is not None:
        v = wide_norm(v, Norm(torch.ones_like(v[0, 0, 0]), heads.qk_norm[0].eps))
    tables = None if rotary is None else (rotary[0].float().unsqueeze(2), rotary[1].float().unsqueeze(2))

    def rotated(x: Tensor) -> Tensor:
        return x if tables is None else rope_in_torch(x, *tables, heads.rotary_width, heads.rope_interleaved)

    def normed(x: Tensor, norm: Norm) -> Tensor:
        return wide_norm(x.flatten(-2), norm).view(x.shape) if heads.qk_norm_whole else wide_norm(x, norm)

    if heads.qk_norm is None:
        return rotated(q), rotated(k), v
    if heads.norm_after_rope:
        return normed(rotated(q), heads.qk_norm[0]), normed(rotated(k), heads.qk_norm[1]), v
    return rotated(normed(q, heads.qk_norm[0])), rotated(normed(k, heads.qk_norm[1])), v


def rope_in_torch(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, rope_interleaved: RopeInterleaved) -> Tensor:
    """Apply rope to the first R = `rotary_dim` elements of x [..., D]: x * cos + orthogonal(x) * sin.

    `cos` and `sin` are [..., R], or [..., R / 2] with one column for both elements of a pair. `orthogonal` maps the pair (a, b) to (-b, a);
    pairs are adjacent elements if `rope_interleaved`, else elements i and i + R / 2.
    """
    rotated, half = x[..., :rotary_dim], rotary_dim // 2
    if rope_interleaved == "half":
        cos, sin = (t[..., :half].repeat_interleave(2, -1) for t in (cos, sin))
    elif cos.shape[-1] < rotary_dim:
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
    if is_interleaved(rope_interleaved):
        orthogonal = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    else:
        orthogonal = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
    return torch.cat((rotated * cos + orthogonal * sin, x[..., rotary_dim:]), -1)


def attention_in_torch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    *,
    factor: float = 1.0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute factor * softmax(softcap * tanh(scale * q · kᵀ / softcap) + bias) · v, float32 [B, t, H * D].

    Args:
        queries: [B, t, H, D].
        keys, values: [B, Hkv, S, D]; H / Hkv query heads share a key head. Entries that no query sees may hold anything, NaN included.
        visible: bool [B or 1, t, S]: which keys each query sees. With t > 1 the result of a query that sees none is 0.
        scale: Factor of scores.
        factor: Factor of the result.
        sinks: [H]: logits that only add to the denominator of the softmax; None: no sinks.
        softcap: Soft cap of scores; None: scores are not capped.
        bias: [B or 1, t, S], float32, added to scores; None: 0.
    """
    batch, tokens, heads, dim = queries.shape
    kv_heads, size = keys.shape[1:3]
    rows = batch, kv_heads, heads // kv_heads, tokens  # one row of scores for each query
    q = (queries.float() * scale).view(batch, tokens, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    scores = (q.reshape(batch, kv_heads, -1, dim) @ keys.float().transpose(2, 3)).view(*rows, size)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias[:, None, None]
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, kv_heads, -1, 1, 1).expand(*rows, 1)), -1)
    weights = scores.softmax(-1)[..., :size]
    if tokens > 1 and sinks is None:
        weights = weights.masked_fill(~visible[:, None, None], 0)  # they are NaN if a query sees no key
    is_used = visible[:, 0] if tokens == 1 else visible.any(1)
    values = values.float().masked_fill(~is_used[:, None, :, None], 0)
    y: Tensor = (weights.flatten(2, 3) @ values * factor).view(*rows, dim)
    return y.permute(0, 3, 1, 2, 4).reshape(batch, tokens, heads * dim)
