"""Decoder layers on a CPU: a native call computes norms, rope, attention and the MLP of one or more layers."""

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
    from halfbyte.kernels.cpu.transformer import attention_half, feed_forward, halves, per_layer

MOST_SEQUENCES = 64
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
        """Why `DecoderLayer` does not support these weights; None if it does."""
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
            or _why_not_added(self.post_norm, self.residual_multiplier)
        )

    def check(self) -> None:
        """Raises ArgumentError for tensors that do not fit together."""
        heads, k = self.heads, self.qkv[0].packed.shape[1]
        weights = [*self.qkv, self.o_proj]
        both = heads.outputs
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(both, k), (k, heads.num_heads * heads.head_dim)]
        joined = [(sum(n for n, _ in shapes[:-1]), k), shapes[-1]] if {c for _, c in shapes[:-1]} == {k} else shapes
        widths = (
            (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim)
            if heads.qk_norm_whole
            else (heads.head_dim, heads.head_dim)
        )
        of_heads = [(norm.weight, width) for norm, width in zip(heads.qk_norm or (), widths, strict=False)]
        sinks = [] if heads.sinks is None else [(heads.sinks, heads.num_heads)]
        small = [*_norms(k, self.pre_norm, self.post_norm), *of_heads, *sinks, *_biases(weights)]
        _check(joined == expected and heads.projections in PROJECTIONS, "attention", shapes, expected, small, self.o_proj.packed.device)

    def inner(self, tensors: TensorAddresses) -> attention_half.Attention:
        from halfbyte.kernels.cpu.transformer import attention_half

        heads = self.heads
        qk_norm = None if heads.qk_norm is None else (norm_of(tensors, heads.qk_norm[0]), norm_of(tensors, heads.qk_norm[1]))
        sinks = 0 if heads.sinks is None else tensors.as_float32(heads.sinks)
        changed = {"qk_norm": qk_norm, "rotary_dim": heads.rotary_width, "sinks": sinks}  # the other fields are the same
        of_heads = attention_half.Heads(**heads._asdict() | changed)
        before, after = (None if norm is None else norm_of(tensors, norm) for norm in (self.pre_norm, self.post_norm))
        qkv = tuple(map(tensors.product, self.qkv))
        return attention_half.Attention(qkv, tensors.product(self.o_proj), before, after, self.residual_multiplier, of_heads)


class FeedForward(Protocol):
    """The second half of a layer, from h to y, both with `k` elements a row."""

    @property
    def k(self) -> int: ...

    @property
    def most_rows(self) -> int | None:
        """The largest number of rows for which one native call is faster; None: no limit."""

    def why_not(self) -> str | None:
        """Why `DecoderLayer` does not support these weights; None if it does."""

    def check(self) -> None:
        """Raises ArgumentError for tensors that do not fit together."""

    def inner(self, tensors: TensorAddresses) -> halves.FeedForward:
        """The same by the addresses of tensors, which these keep alive."""


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
        return _why_not_added(self.post_norm, self.residual_multiplier)

    def check(self) -> None:
        """Raises ArgumentError for tensors that do not fit together."""
        weights, k = [self.gate_up, self.down_proj], self.gate_up.packed.shape[1]
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(self.inner_width * (2 if self.gated else 1), k), (k, self.inner_width)]
        small = [*_norms(k, self.pre_norm, self.post_norm), *_biases(weights), *_scales(self.layer_scale)]
        _check(shapes == expected, "feed-forward", shapes, expected, small, self.down_proj.packed.device)

    def inner(self, tensors: TensorAddresses) -> feed_forward.MLP:
        from halfbyte.kernels.cpu.transformer import feed_forward

        before, after = (None if norm is None else norm_of(tensors, norm) for norm in (self.pre_norm, self.post_norm))
        how = (
            self.residual_multiplier,
            self.gate_function,
            self.gated,
            self.parallel_residual,
            0 if self.layer_scale is None else tensors.as_float32(self.layer_scale),
        )
        return feed_forward.MLP(tensors.product(self.gate_up), tensors.product(self.down_proj), before, after, *how)


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
        """Why `DecoderLayer` does not support these weights; None if it does."""
        from halfbyte.kernels.cpu import step_sequence
        from halfbyte.layouts.cpu_tiles import PANEL

        if (reason := why_not_packed([self.gate.packed, self.projection.packed])) is not None:
            return reason
        if self.width % PANEL:
            return f"a layer's own input of {self.width} elements is not whole panels of {PANEL}"
        if self.activation not in step_sequence.GATES:
            return f"its activation is {self.activation}, not {' or '.join(step_sequence.GATES)}"
        return _why_not_added(self.post_norm, 1.0)

    def check(self, k: int) -> None:
        """Raises ArgumentError for tensors that do not fit together, or not to a layer of that width."""
        weights = [self.gate, self.projection]
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(self.width, k), (k, self.width)]
        small = [*_norms(k, self.post_norm), *_biases(weights), *_scales(self.layer_scale)]
        _check(shapes == expected, "last", shapes, expected, small, self.gate.packed.device)

    def inner(self, tensors: TensorAddresses) -> per_layer.PerLayerInput:
        from halfbyte.kernels.cpu.transformer import per_layer

        products = tensors.product(self.gate), tensors.product(self.projection)
        scale = 0 if self.layer_scale is None else tensors.as_float32(self.layer_scale)
        return per_layer.PerLayerInput(*products, norm_of(tensors, self.post_norm), self.activation, scale)


class DecoderLayer:
    """y = feed_forward(attention(x)), or attention(x) alone; or per_layer(feed_forward(attention(x)), e) with an input e of its own

    Everything between the products is float32. Raises ArgumentError for weights that do not fit together or that `why_not` refuses.
    """

    def __init__(self, attention: Attention, feed_forward: FeedForward | None, per_layer: PerLayerInput | None = None) -> None:
        from halfbyte.kernels.cpu.transformer import decoder

        second = feed_forward
        attention.check()
        self.heads, self.k, self.most_rows = attention.heads, attention.o_proj.packed.shape[0], None if second is None else second.most_rows
        if second is not None:
            second.check()
            if second.k != self.k:
                raise ArgumentError(f"the halves of a decoder layer have one width, got {self.k} and {second.k}")
        if per_layer is not None:
            per_layer.check(self.k)
            if second is None:
                raise ArgumentError("a layer with an input of its own has a feed-forward half, got none: pass it")
        if (reason := why_not(attention, second, per_layer)) is not None:
            raise ArgumentError(f"this layer is not computed in one call: {reason}")
        self.tensors = TensorAddresses()
        of_second = None if second is None else second.inner(self.tensors)
        self.per_layer_width = None if per_layer is None else per_layer.width
        of_third = None if per_layer is None else per_layer.inner(self.tensors)
        self.inner = decoder.Layer(attention.inner(self.tensors), of_second, of_third)

    @property
    def rotary(self) -> int:
        """R, the elements of a head that have positions."""
        return self.inner.rotary

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
        """Tokens x [B, t, K], appended to the cache at `length` -> y [B, t, K]; B is at most MOST_SEQUENCES. No gradients.

        rotary        cosines and sines of the positions, each [B or 1, t, R / 2], R the elements of a head that have positions; or of R
                      elements, the first half once more behind it, or each twice where `Heads` say so; of any number where R is 0
        keys, values  [B, Hkv, T, D] of one type, T >= length + t; those of the tokens are written, or, where the layer makes none, are
                      there; int8 ones hold the records of `layouts/records.py` in the place of D elements
        mask          bool [B or 1, 1, t or 1, T or more]: which tokens of the cache may be seen, in addition to the causal mask
        per_layer_input  [B, t, P]: the layer's own input, if it has one
        """
        return run_layers((self,), x, rotary, [(keys, values, length)], mask, per_layer_input)[0]

    def check(self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, length: int, mask: Tensor | None) -> None:
        """Raises ArgumentError for what a call does not take."""
        heads = self.heads
        fits = x.dim() == 3 and keys.dim() == 4 and keys.shape == values.shape and keys.dtype == values.dtype
        fits = fits and keys.dtype in (*FLOATS, torch.int8)
        if fits:
            b, t, k = x.shape
            size, width = keys.shape[2], heads.head_dim if keys.dtype != torch.int8 else record_bytes(heads.head_dim)
            fits = k == self.k and 0 < b <= MOST_SEQUENCES and t > 0
            fits = fits and keys.shape == (b, heads.num_kv_heads, size, width) and 0 <= length <= size - t
            fits = fits and keys.stride(3) == 1 and values.stride(3) == 1 and x.dtype in FLOATS
            fits = fits and all(r.dim() == 3 and r.shape[0] in (1, b) and r.shape[1] == t for r in rotary)
            fits = fits and self.accepts_rope_of(rotary[0].shape[2])
            fits = fits and rotary[0].shape == rotary[1].shape and x.is_cpu and keys.is_cpu and values.is_cpu
        if fits and mask is not None:
            fits = mask.dtype == torch.bool and mask.is_cpu and mask.dim() == 4 and mask.shape[0] in (1, b) and mask.shape[1] == 1
            fits = fits and mask.shape[2] in (1, t) and mask.shape[3] >= length + t
        if not fits:
            got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, *rotary, keys, values, *(() if mask is None else (mask,))))
            raise ArgumentError(
                f"this layer takes on the CPU x [B, t, {self.k}] with B in 1 … {MOST_SEQUENCES} and t > 0, cosines and sines "
                f"[B, t, {self.rotary}], a cache [B, {heads.num_kv_heads}, T, {heads.head_dim}] with room for t tokens from {length} on "
                f"and a mask bool [B, 1, t, T], got {got}"
            )


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    entries: Sequence[tuple[Tensor, Tensor, int]],
    mask: Tensor | None,
    per_layer_input: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs of the layers, one after the other.

    Args:
        layers: Compute the first one from x, each other one from the output before it.
        x, rotary, mask: As for a call of a layer.
        entries: Keys, values and length for each layer.
        per_layer_input: Of a layer that is alone.
    """
    for layer, entry in zip(layers, entries, strict=True):
        layer.check(x, rotary, *entry, mask)
        wanted = None if layer.per_layer_width is None else (*x.shape[:2], layer.per_layer_width)
        if (None if per_layer_input is None else tuple(per_layer_input.shape)) != wanted or (
            per_layer_input is not None and (len(layers) > 1 or not per_layer_input.is_cpu)
        ):
            got = None if per_layer_input is None else list(per_layer_input.shape)
            raise ArgumentError(f"a layer with an input of its own takes it on the CPU, and alone: {wanted}, got {got} for {len(layers)}")
    from halfbyte.kernels.cpu.transformer import decoder

    cos, sin = (t if t.dtype == torch.float32 and t.is_contiguous() else t.float().contiguous() for t in rotary)
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    for layer in layers:
        layer.tensors.refresh()
    inner, places = [layer.inner for layer in layers], [decoder.Entry(*entry) for entry in entries]
    return rounded(
        decoder.run(inner, unrounded(x), (cos, sin), places, mask, None if per_layer_input is None else in_rows(per_layer_input)), x.dtype
    )


def in_rows(per_layer_input: Tensor) -> Tensor:
    """[B, t, P] as float32 whose rows of P elements, contiguous ones, lie equally far apart."""
    wide = per_layer_input.float()
    return wide if wide.stride(2) == 1 and wide.stride(0) == wide.stride(1) * wide.shape[1] else wide.contiguous()


def why_not(attention: Attention, feed_forward: FeedForward | None, per_layer: PerLayerInput | None = None) -> str | None:
    """Why `DecoderLayer` does not support these weights; None if it does."""
    more = (half.why_not() for half in (feed_forward, per_layer) if half is not None)
    return attention.why_not() or next((reason for reason in more if reason is not None), None)


def norm_of(tensors: TensorAddresses, norm: Norm) -> halves.Norm:
    """The layer by the addresses of its tensors."""
    from halfbyte.kernels.cpu.transformer import halves

    shift = 0
    if norm.layer_norm:
        shift = tensors.as_float32(torch.zeros(norm.weight.shape, dtype=torch.float32, device="cpu") if norm.bias is None else norm.bias)
    return halves.Norm(tensors.as_float32(norm.weight), norm.eps, norm.unit_offset, norm.layer_norm, shift)


def _norms(k: int, *norms: Norm | None) -> list[tuple[Tensor, int]]:
    return [(tensor, k) for norm in norms if norm is not None for tensor in (norm.weight, norm.bias) if tensor is not None]


def _scales(scale: Tensor | None) -> list[tuple[Tensor, int]]:
    return [] if scale is None else [(scale, 1)]


def _why_not_added(after: Norm | None, factor: float) -> str | None:
    if after is not None and after.layer_norm:
        return "the norm of what it adds is a layer norm"
    return f"what it adds has a norm and a factor of {factor}" if after is not None and factor != 1 else None


def _biases(weights: Sequence[Weight]) -> list[tuple[Tensor, int]]:
    """With the elements that they have to have."""
    return [(weight.bias, weight.packed.shape[0]) for weight in weights if weight.bias is not None]


def _check(
    fits: bool,
    what: str,
    shapes: Sequence[tuple[int, ...]],
    expected: Sequence[tuple[int, ...]],
    small: Sequence[tuple[Tensor, int]],
    device: torch.device,
) -> None:
    """small: norms and biases, and of how many elements they are to be."""
    if not fits or any(tensor.shape != (size,) or tensor.device != device for tensor, size in small):
        sizes, got = [size for _, size in small], [list(tensor.shape) for tensor, _ in small]
        raise ArgumentError(
            f"the {what} half of a decoder layer takes weights {list(expected)} and norms and biases of {sizes} elements on "
            f"{device_name(device.type)}, got {list(shapes)} and {got}"
        )
