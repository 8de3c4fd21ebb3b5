"""Decoder layers: what one consists of, and one native call that computes one or more of them on a CPU.

A layer is described by `Attention`, a feed-forward part (`MLP` here, `Experts` in experts.py) and perhaps a `PerLayerInput`, which are
tuples of weights, norms and settings: decoder/ builds them, and GPU steps read them too. `DecoderLayer` checks that they fit together,
takes their addresses (`native`), and `run_layers` starts kernels/cpu/transformer/decoder.py. whole_model_decode.py runs all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.kernels.layer_kinds import GATES, PROJECTIONS, GateFunction, Projections, RopeInterleaved, key_value_heads
from halfbyte.layouts.records import record_bytes
from halfbyte.ops.checks import FLOATS, device_name
from halfbyte.ops.transformer.unrounded import rounded, unrounded
from halfbyte.ops.transformer.weights import TensorAddresses, Weight, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer import attention_sublayer, feed_forward, per_layer, sublayers

MOST_SEQUENCES = 64
_CACHE_DTYPES = (*FLOATS, torch.int8)
_NORMED_SUM = "it has norms of sums with the residual, which are for encoders"


class Norm(NamedTuple):
    """RMSNorm: y = x / sqrt(mean(x²) + eps) * weight; or LayerNorm.

    Attributes:
        weight: [K]
        eps: Added to the mean of squares, or to the variance.
        unit_offset: Whether x is multiplied by 1 + weight (Gemma).
        layer_norm: Whether it is a LayerNorm.
        bias: [K], of a LayerNorm alone; None: 0.
    """

    weight: Tensor
    eps: float
    unit_offset: bool = False
    layer_norm: bool = False
    bias: Tensor | None = None


class Heads(NamedTuple):
    """The heads of attention.

    Attributes:
        num_heads: Number of query heads, H.
        num_kv_heads: Number of key-value heads, Hkv.
        head_dim: Elements of a head, D.
        scale: Factor of attention scores.
        qk_norm: Norms of queries and of keys, of one kind: weights [D].
        qk_norm_whole: Whether these are over all heads of a token together: weights [H * D] and [Hkv * D] (OLMo 2).
        rotary_dim: Number of elements of a head that rope rotates, the first ones, R; None: D; 0: no rope.
        softcap: Scores are softcap * tanh(score / softcap), unless it is None.
        sinks: Attention sinks [H]: logits that only add to the sum of exponentials (gpt-oss).
        rope_interleaved: "": rope rotates elements i and i + R / 2; "half", "repeated": elements 2 i and 2 i + 1, by tables of R / 2
            columns, or of R, each of which stands twice.
        norm_after_rope: Whether norms, of single heads, follow rope (Hunyuan).
        projections: "qkv"; "qk": values are what keys are computed from, before norm and rope; "q": keys and values, also of the same
            tokens, are those of another layer (Gemma 4).
        v_norm: Whether values have a norm, too, without a weight and with the eps of those of queries (Gemma 4).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qk_norm: tuple[Norm, Norm] | None = None
    qk_norm_whole: bool = False
    rotary_dim: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    rope_interleaved: RopeInterleaved = ""
    norm_after_rope: bool = False
    projections: Projections = "qkv"
    v_norm: bool = False

    @property
    def outputs(self) -> int:
        """Number of outputs of the projections for a token."""
        return (self.num_heads + key_value_heads(self.projections) * self.num_kv_heads) * self.head_dim

    @property
    def rotary_width(self) -> int:
        """R"""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def accepts_rope_of(self, width: int) -> bool:
        """Whether a token's row of cosines, and of sines, may have so many elements."""
        return self.rotary_width in (0, width) or (width == self.rotary_width // 2 and self.rope_interleaved != "repeated")


class Attention(NamedTuple):
    """The attention half of a layer: h = x + residual_multiplier * post_norm(o_proj(attention(qkv(pre_norm(x)))))

    Attributes:
        qkv: [(H + 2 Hkv) * D, K]: queries, keys and values, one head after the other, as far as `heads.projections` has them; or their rows
            in up to three weights.
        o_proj: [K, H * D]
        pre_norm, post_norm: Norms of x and of the output of `o_proj`; None: none.
        heads: The heads.
        residual_multiplier: 1 where there is a `post_norm`.
        residual_norm: Norm of h; encoders alone have one (BERT).
    """

    qkv: tuple[Weight, ...]
    o_proj: Weight
    pre_norm: Norm | None
    heads: Heads
    post_norm: Norm | None = None
    residual_multiplier: float = 1.0
    residual_norm: Norm | None = None

    def why_not(self) -> str | None:
        """Return why `DecoderLayer` does not support these weights; None if it does."""
        from halfbyte.kernels.cpu.transformer import attend

        heads, reason = self.heads, why_not_packed([weight.packed for weight in (*self.qkv, self.o_proj)])
        if self.residual_norm is not None:
            return _NORMED_SUM
        if heads.qk_norm is not None and heads.qk_norm[0].layer_norm:
            return "the norms of its heads are layer norms"
        if heads.qk_norm_whole and heads.norm_after_rope:
            return "norms of all its heads together come after positions"
        if heads.v_norm and (heads.qk_norm is None or heads.qk_norm_whole):
            return "its values have a norm, its queries have none, or one of all heads together"
        return (
            reason
            or attend.supports(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.rotary_dim)
            or _why_not_residual(self.post_norm, self.residual_multiplier)
        )

    def check(self) -> None:
        """Raise ArgumentError for tensors that do not fit together."""
        heads, k = self.heads, self.qkv[0].packed.shape[1]
        weights = [*self.qkv, self.o_proj]
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(heads.outputs, k), (k, heads.num_heads * heads.head_dim)]
        *qkv_shapes, o_proj_shape = shapes
        fused = [(sum(n for n, _ in qkv_shapes), k), o_proj_shape]
        fits = all(columns == k for _, columns in qkv_shapes) and fused == expected and heads.projections in PROJECTIONS
        query_heads, kv_heads = (heads.num_heads, heads.num_kv_heads) if heads.qk_norm_whole else (1, 1)
        norms_of = zip(heads.qk_norm or (), (query_heads, kv_heads), strict=False)
        qk_norms = [(norm.weight, count * heads.head_dim) for norm, count in norms_of]
        sinks = [] if heads.sinks is None else [(heads.sinks, heads.num_heads)]
        vectors = [*_norms(k, self.pre_norm, self.post_norm), *qk_norms, *sinks, *_biases(weights)]
        _check(fits, "attention", shapes, expected, vectors, self.o_proj.packed.device)

    def native(self, tensors: TensorAddresses) -> attention_sublayer.Attention:
        """Return the same by the addresses of its tensors, which `tensors` keeps alive."""
        from halfbyte.kernels.cpu.transformer import attention_sublayer

        heads = self.heads
        qk_norm = None if heads.qk_norm is None else (native_norm(tensors, heads.qk_norm[0]), native_norm(tensors, heads.qk_norm[1]))
        sinks = 0 if heads.sinks is None else tensors.as_float32(heads.sinks)
        changed = {"qk_norm": qk_norm, "rotary_dim": heads.rotary_width, "sinks": sinks}  # the other fields are the same
        native_heads = attention_sublayer.Heads(**heads._asdict() | changed)
        pre_norm, post_norm = _native_norms(tensors, self.pre_norm, self.post_norm)
        qkv = tuple(map(tensors.product, self.qkv))
        return attention_sublayer.Attention(qkv, tensors.product(self.o_proj), pre_norm, post_norm, self.residual_multiplier, native_heads)


class FeedForward(Protocol):
    """What follows attention in a layer: from h to y, both with `k` elements a row."""

    @property
    def k(self) -> int: ...

    @property
    def most_rows(self) -> int | None:
        """The largest number of rows for which one native call is faster; None: no limit."""

    def why_not(self) -> str | None:
        """Return why `DecoderLayer` does not support these weights; None if it does."""

    def check(self) -> None:
        """Raise ArgumentError for tensors that do not fit together."""

    def native(self, tensors: TensorAddresses) -> sublayers.FeedForward:
        """Return the same by the addresses of its tensors, which `tensors` keeps alive."""


class MLP(NamedTuple):
    """The MLP half of a layer: y = h + residual_multiplier * post_norm(down_proj(f(gate) * up)),  gate, up = gate_up(pre_norm(h))

    Attributes:
        gate_up: [2 I, K]: gate, then up; [I, K] where it is not gated.
        down_proj: [K, I]
        pre_norm, post_norm: Norms of h and of the output of `down_proj`; None: none.
        residual_multiplier: 1 where there is a `post_norm`.
        activation: f, as in `layer_kinds.py`; "gelu", the exact one, in encoders.
        gated: Whether f(gate) is multiplied by up; otherwise it is f(up), with `gate_up` of up alone.
        parallel_residual: Whether it reads x, as attention does, in place of h: y = h + ... pre_norm(x) ...
        layer_scale: [1]: Factor of y, where there is a `post_norm` (Gemma 4); None: none.
        residual_norm: Norm of y; encoders alone have one (BERT).
    """

    gate_up: Weight
    down_proj: Weight
    pre_norm: Norm | None
    post_norm: Norm | None = None
    residual_multiplier: float = 1.0
    activation: GateFunction | Literal["gelu"] = "silu"
    gated: bool = True
    parallel_residual: bool = False
    layer_scale: Tensor | None = None
    residual_norm: Norm | None = None

    @property
    def inner_width(self) -> int:
        """I"""
        return self.gate_up.packed.shape[0] // (2 if self.gated else 1)

    @property
    def gate_function(self) -> GateFunction:
        """f in a decoder's layer. Raises ArgumentError for that of encoders."""
        if self.activation == "gelu":
            raise ArgumentError(f"the activation of a decoder layer is one of {', '.join(GATES)}, got gelu")
        return self.activation

    @property
    def k(self) -> int:
        return self.down_proj.packed.shape[0]

    @property
    def most_rows(self) -> None:
        return None

    def why_not(self) -> str | None:
        from halfbyte.kernels.cpu import step_sequence
        from halfbyte.layouts.cpu_tiles import PANEL

        if (reason := why_not_packed([self.gate_up.packed, self.down_proj.packed])) is not None:
            return reason
        if self.inner_width % PANEL:
            return f"{self.inner_width} gates are not whole panels of {PANEL}"
        if self.activation not in step_sequence.GATES:
            return f"its activation is {self.activation}, not {' or '.join(step_sequence.GATES)}"
        if self.residual_norm is not None:
            return _NORMED_SUM
        if self.layer_scale is not None and self.post_norm is None:
            return "what it gives is multiplied by a number without a norm before"
        return _why_not_residual(self.post_norm, self.residual_multiplier)

    def check(self) -> None:
        """Raise ArgumentError for tensors that do not fit together."""
        weights, k = [self.gate_up, self.down_proj], self.gate_up.packed.shape[1]
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(self.inner_width * (2 if self.gated else 1), k), (k, self.inner_width)]
        vectors = [*_norms(k, self.pre_norm, self.post_norm), *_biases(weights), *_scales(self.layer_scale)]
        _check(shapes == expected, "feed-forward", shapes, expected, vectors, self.down_proj.packed.device)

    def native(self, tensors: TensorAddresses) -> feed_forward.MLP:
        from halfbyte.kernels.cpu.transformer import feed_forward

        return feed_forward.MLP(
            tensors.product(self.gate_up),
            tensors.product(self.down_proj),
            *_native_norms(tensors, self.pre_norm, self.post_norm),
            self.residual_multiplier,
            self.gate_function,
            self.gated,
            self.parallel_residual,
            0 if self.layer_scale is None else tensors.as_float32(self.layer_scale),
        )


class PerLayerInput(NamedTuple):
    """What a layer does last with its per-layer input e (Gemma 4): y = layer_scale * (h + post_norm(projection(f(gate(h)) * e)))

    Attributes:
        gate: [P, K], P the elements of e.
        projection: [K, P]
        post_norm: Norm of the output of `projection`.
        activation: f, as in `layer_kinds.py`.
        layer_scale: [1], or None: 1.
    """

    gate: Weight
    projection: Weight
    post_norm: Norm
    activation: GateFunction = "gelu_tanh"
    layer_scale: Tensor | None = None

    @property
    def width(self) -> int:
        """P"""
        return self.gate.packed.shape[0]

    def why_not(self) -> str | None:
        """Return why `DecoderLayer` does not support these weights; None if it does."""
        from halfbyte.kernels.cpu import step_sequence
        from halfbyte.layouts.cpu_tiles import PANEL

        if (reason := why_not_packed([self.gate.packed, self.projection.packed])) is not None:
            return reason
        if self.width % PANEL:
            return f"a layer's own input of {self.width} elements is not whole panels of {PANEL}"
        if self.activation not in step_sequence.GATES:
            return f"its activation is {self.activation}, not {' or '.join(step_sequence.GATES)}"
        return _why_not_residual(self.post_norm, 1.0)

    def check(self, k: int) -> None:
        """Raise ArgumentError for tensors that do not fit together, or not to a layer of that width."""
        weights = [self.gate, self.projection]
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(self.width, k), (k, self.width)]
        vectors = [*_norms(k, self.post_norm), *_biases(weights), *_scales(self.layer_scale)]
        _check(shapes == expected, "last", shapes, expected, vectors, self.gate.packed.device)

    def native(self, tensors: TensorAddresses) -> per_layer.PerLayerInput:
        from halfbyte.kernels.cpu.transformer import per_layer

        products = tensors.product(self.gate), tensors.product(self.projection)
        scale = 0 if self.layer_scale is None else tensors.as_float32(self.layer_scale)
        return per_layer.PerLayerInput(*products, native_norm(tensors, self.post_norm), self.activation, scale)


class DecoderLayer:
    """y = feed_forward(attention(x)), or attention(x) alone; or per_layer(feed_forward(attention(x)), e) with a per-layer input e

    Everything between the products is float32.

    Args:
        attention: Computed first.
        feed_forward: An MLP or mixture of experts; None: the layer is attention alone.
        per_layer: What a layer with a per-layer input does last; with a `feed_forward` only.

    Attributes:
        k: Elements of a row of x and y.
        most_rows: As for FeedForward.
        per_layer_width: P, the elements of a per-layer input; None: there is none.

    Raises:
        ArgumentError: Weights do not fit together, or `why_not` refuses them.
    """

    def __init__(self, attention: Attention, feed_forward: FeedForward | None, per_layer: PerLayerInput | None = None) -> None:
        from halfbyte.kernels.cpu.transformer import decoder

        attention.check()
        self.heads, self.k = attention.heads, attention.o_proj.packed.shape[0]
        self.most_rows = None if feed_forward is None else feed_forward.most_rows
        self.per_layer_width = None if per_layer is None else per_layer.width
        if feed_forward is not None:
            feed_forward.check()
            if feed_forward.k != self.k:
                raise ArgumentError(f"the halves of a decoder layer have one width, got {self.k} and {feed_forward.k}")
        if per_layer is not None:
            per_layer.check(self.k)
            if feed_forward is None:
                raise ArgumentError("a layer with an input of its own has a feed-forward half, got none: pass it")
        if (reason := why_not(attention, feed_forward, per_layer)) is not None:
            raise ArgumentError(f"this layer is not computed in one call: {reason}")
        self.tensors = tensors = TensorAddresses()
        self.native = decoder.Layer(
            attention.native(tensors),
            None if feed_forward is None else feed_forward.native(tensors),
            None if per_layer is None else per_layer.native(tensors),
        )

    @property
    def rotary(self) -> int:
        """R, the elements of a head that rope rotates."""
        return self.native.rotary

    def accepts_rope_of(self, width: int) -> bool:
        """Whether a token's row of cosines, and of sines, may have so many elements."""
        return self.heads.accepts_rope_of(width)

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        length: int,
        mask: Tensor | None = None,
        per_layer_input: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer for new tokens, which enter the cache at `length`. No gradients.

        Args:
            x: [B, t, K], B at most MOST_SEQUENCES.
            rotary: Cosines and sines of the positions, each [B or 1, t, R / 2]; or of R elements, the first half once more behind it, or
                each twice where `Heads.rope_interleaved` is "repeated"; of any number where R is 0.
            keys, values: [B, Hkv, T, D] of one type, T >= length + t; those of the new tokens are written, unless the layer reuses
                another one's. Int8 ones hold the records of `layouts/records.py` in place of D elements.
            length: Tokens in the cache.
            mask: bool [B or 1, 1, t or 1, T or more]: which tokens of the cache may be seen, in addition to the causal mask.
            per_layer_input: [B, t, P], if the layer has one.

        Returns:
            y [B, t, K]
        """
        return run_layers((self,), x, rotary, [(keys, values, length)], mask, per_layer_input)[0]

    def check(self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, length: int, mask: Tensor | None) -> None:
        """Raise ArgumentError for arguments that a call does not take."""
        if self._fits(x, rotary, keys, values, length) and (mask is None or _fits_mask(mask, x, length)):
            return
        tensors = (x, *rotary, keys, values, *(() if mask is None else (mask,)))
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)
        raise ArgumentError(
            f"this layer takes on the CPU x [B, t, {self.k}] with B in 1 … {MOST_SEQUENCES} and t > 0, cosines and sines "
            f"[B, t, {self.rotary}], a cache [B, {self.heads.num_kv_heads}, T, {self.heads.head_dim}] with room for t tokens from "
            f"{length} on and a mask bool [B, 1, t, T], got {got}"
        )

    def _fits(self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, length: int) -> bool:
        if x.dim() != 3 or keys.dim() != 4 or not (x.is_cpu and keys.is_cpu and values.is_cpu):
            return False
        (b, t, k), size, heads = x.shape, keys.shape[2], self.heads
        if k != self.k or x.dtype not in FLOATS or not 0 < b <= MOST_SEQUENCES or t == 0:
            return False
        width = heads.head_dim if keys.dtype != torch.int8 else record_bytes(heads.head_dim)
        if keys.dtype not in _CACHE_DTYPES or keys.shape != (b, heads.num_kv_heads, size, width) or not 0 <= length <= size - t:
            return False
        if values.dtype != keys.dtype or values.shape != keys.shape or keys.stride(3) != 1 or values.stride(3) != 1:
            return False
        cos, sin = rotary
        if cos.shape != sin.shape or cos.dim() != 3 or not (cos.is_cpu and sin.is_cpu):
            return False
        return cos.shape[0] in (1, b) and cos.shape[1] == t and self.accepts_rope_of(cos.shape[2])


def _fits_mask(mask: Tensor, x: Tensor, length: int) -> bool:
    b, t, _ = x.shape
    if mask.dtype != torch.bool or not mask.is_cpu or mask.dim() != 4:
        return False
    return mask.shape[0] in (1, b) and mask.shape[1] == 1 and mask.shape[2] in (1, t) and mask.shape[3] >= length + t


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    entries: Sequence[tuple[Tensor, Tensor, int]],
    mask: Tensor | None,
    per_layer_input: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs of consecutive layers.

    Args:
        layers: The first one reads x, each other one the output before it.
        x, rotary, mask: As for a call of a layer.
        entries: Keys, values and length for each layer.
        per_layer_input: As for a call of a layer; for a single layer only.
    """
    for layer, entry in zip(layers, entries, strict=True):
        layer.check(x, rotary, *entry, mask)
        _check_per_layer_input(layer, x, per_layer_input, len(layers))
    from halfbyte.kernels.cpu.transformer import decoder

    cos, sin = (t if t.dtype == torch.float32 and t.is_contiguous() else t.float().contiguous() for t in rotary)
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    for layer in layers:
        layer.tensors.refresh()
    native, cache = [layer.native for layer in layers], [decoder.Entry(*entry) for entry in entries]
    rows = None if per_layer_input is None else _in_rows(per_layer_input)
    return rounded(decoder.run(native, unrounded(x), (cos, sin), cache, mask, rows), x.dtype)


def _check_per_layer_input(layer: DecoderLayer, x: Tensor, per_layer_input: Tensor | None, layers: int) -> None:
    wanted = None if layer.per_layer_width is None else (*x.shape[:2], layer.per_layer_width)
    got = None if per_layer_input is None else tuple(per_layer_input.shape)
    if got != wanted or (per_layer_input is not None and (layers > 1 or not per_layer_input.is_cpu)):
        raise ArgumentError(f"a layer with an input of its own takes it on the CPU, and alone: {wanted}, got {got} for {layers}")


def _in_rows(per_layer_input: Tensor) -> Tensor:
    """Return [B, t, P] in float32, each row of P elements contiguous and all rows equally far apart."""
    wide = per_layer_input.float()
    return wide if wide.stride(2) == 1 and wide.stride(0) == wide.stride(1) * wide.shape[1] else wide.contiguous()


def why_not(attention: Attention, feed_forward: FeedForward | None, per_layer: PerLayerInput | None = None) -> str | None:
    """Return why `DecoderLayer` does not support these weights; None if it does."""
    reasons = (part.why_not() for part in (attention, feed_forward, per_layer) if part is not None)
    return next((reason for reason in reasons if reason is not None), None)


def native_norm(tensors: TensorAddresses, norm: Norm) -> sublayers.Norm:
    """Return a norm by the addresses of its tensors."""
    from halfbyte.kernels.cpu.transformer import sublayers

    bias = 0
    if norm.layer_norm:
        bias = tensors.as_float32(torch.zeros(norm.weight.shape, dtype=torch.float32, device="cpu") if norm.bias is None else norm.bias)
    return sublayers.Norm(tensors.as_float32(norm.weight), norm.eps, norm.unit_offset, norm.layer_norm, bias)


def _native_norms(
    tensors: TensorAddresses, pre_norm: Norm | None, post_norm: Norm | None
) -> tuple[sublayers.Norm | None, sublayers.Norm | None]:
    before, after = (None if norm is None else native_norm(tensors, norm) for norm in (pre_norm, post_norm))
    return before, after


# Vectors of a layer, each with the number of elements that it must have


def _norms(k: int, *norms: Norm | None) -> list[tuple[Tensor, int]]:
    return [(tensor, k) for norm in norms if norm is not None for tensor in (norm.weight, norm.bias) if tensor is not None]


def _scales(scale: Tensor | None) -> list[tuple[Tensor, int]]:
    return [] if scale is None else [(scale, 1)]


def _biases(weights: Sequence[Weight]) -> list[tuple[Tensor, int]]:
    return [(weight.bias, weight.packed.shape[0]) for weight in weights if weight.bias is not None]


def _why_not_residual(post_norm: Norm | None, residual_multiplier: float) -> str | None:
    """Return why no kernel adds an output with this norm and multiplier to the residual; None if one does."""
    if post_norm is not None and post_norm.layer_norm:
        return "the norm of what it adds is a layer norm"
    both = post_norm is not None and residual_multiplier != 1
    return f"what it adds has a norm and a factor of {residual_multiplier}" if both else None


def _check(
    fits: bool,
    what: str,
    shapes: Sequence[tuple[int, ...]],
    expected: Sequence[tuple[int, ...]],
    vectors: Sequence[tuple[Tensor, int]],
    device: torch.device,
) -> None:
    """Raise ArgumentError unless weights fit together, and vectors have their sizes and are on their device."""
    if not fits or any(tensor.shape != (size,) or tensor.device != device for tensor, size in vectors):
        sizes, got = [size for _, size in vectors], [list(tensor.shape) for tensor, _ in vectors]
        raise ArgumentError(
            f"the {what} half of a decoder layer takes weights {list(expected)} and norms and biases of {sizes} elements on "
            f"{device_name(device.type)}, got {list(shapes)} and {got}"
        )
