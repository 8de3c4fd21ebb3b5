"""The parts of a transformer layer: norms, heads, attention, MLP, per-layer input.

They are tuples of weights and settings, which decoder/ builds from checkpoints and live models. `DecoderLayer` (decoder.py) and
`EncoderLayer` (encoder.py) compute them by native calls on a CPU, decoder/gpu_layer.py by kernels on a GPU. `Experts` (experts.py) stands
in the place of an MLP.

Each part has three methods for decoder layers on a CPU: `why_not` says what has no kernel, `check` raises for tensors that do not fit
together, `native` gives kernels/cpu/transformer the same part with addresses in place of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.kernels.layer_kinds import GATES, PROJECTIONS, GateFunction, Projections, RopeInterleaved, num_kv_projections
from halfbyte.ops.checks import device_name
from halfbyte.ops.transformer.weights import TensorAddresses, Weight, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer import attention_sublayer, feed_forward, per_layer, sublayers

_RESIDUAL_NORM = "it has norms after its residual connections, which only encoder layers have"


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
        return (self.num_heads + num_kv_projections(self.projections) * self.num_kv_heads) * self.head_dim

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
            return _RESIDUAL_NORM
        if heads.qk_norm is not None and heads.qk_norm[0].layer_norm:
            return "the norms of its heads are layer norms"
        if heads.qk_norm_whole and heads.norm_after_rope:
            return "norms over all its heads together come after rope"
        if heads.v_norm and (heads.qk_norm is None or heads.qk_norm_whole):
            return "its values have a norm, but its queries have none, or one over all heads together"
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
            return _RESIDUAL_NORM
        if self.layer_scale is not None and self.post_norm is None:
            return "it has a layer scale without a norm of its MLP's output"
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
            return f"the {self.width} elements of its per-layer input are no multiple of {PANEL}"
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
        return "the norm of its attention's or MLP's output is a LayerNorm"
    both = post_norm is not None and residual_multiplier != 1
    return f"the output of its attention or MLP has a norm and a residual multiplier of {residual_multiplier}" if both else None


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
