"""The specification of a decoder-only language model, or of layers of an encoder: weights and what is computed with them, for any device.

    x      = embedding_multiplier * embedding[ids]                         [B, t, K]
    x      = layer(x)                                                      for each layer: attention, then MLP or experts
    logits = f(lm_head(norm(x)))                                           [B, t, N]

`build.py` makes a specification from a checkpoint, `lower_cpu.py` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from halfbyte.decoder.rope import Rope
from halfbyte.errors import ArgumentError
from halfbyte.kernels.layer_kinds import LogitsFunction
from halfbyte.layouts.base import Packed
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.sublayers import MLP, Attention, Norm, PerLayerInput
from halfbyte.ops.transformer.weights import Weight
from halfbyte.ops.transformer.whole_model_decode import PerLayerInputs

Logits = tuple[LogitsFunction, float] | None  # a function of the logits and its constant


@dataclass(frozen=True, eq=False, slots=True)
class LayerSpec:
    """A layer of a decoder, or of an encoder.

    Attributes:
        attention: Projections, heads and norms of attention, with its residual connection.
        mlp: The MLP, or the mixture of experts, with its norms and its residual connection.
        rope: Index of its rotary embedding in `DecoderSpec.ropes`.
        sliding_window: How many tokens a token attends to, itself the last; None: all before it.
        kv_source: Index of the earlier layer whose keys and values it attends to; None: its own.
        per_layer_input: What it does with its per-layer input, after the MLP; None: it has none.
        bidirectional: Whether a token attends to all tokens, also to those behind it, as in encoders.
        position_bias: Whether a bias, which all layers have in common, is added to attention scores (MPNet).
    """

    attention: Attention
    mlp: MLP | Experts
    rope: int
    sliding_window: int | None
    kv_source: int | None = None
    per_layer_input: PerLayerInput | None = None
    bidirectional: bool = False
    position_bias: bool = False

    def check(self) -> None:
        """Raise ArgumentError for tensors that do not fit together."""
        self.attention.check()
        self.mlp.check()
        if self.mlp.k != (k := self.attention.o_proj.packed.shape[0]):
            raise ArgumentError(f"attention and MLP of a layer have one width, got {k} and {self.mlp.k}")
        if self.per_layer_input is not None:
            self.per_layer_input.check(k)


@dataclass(frozen=True, eq=False, slots=True)
class DecoderSpec:
    """A decoder-only language model.

    Attributes:
        embedding: Table of N rows of K elements, packed or in floating point.
        embedding_multiplier: Factor of its rows.
        layers: One after the other.
        norm: The norm after the last layer.
        lm_head: The output embedding [N, K], packed or in floating point.
        logits: Function of the logits y and its constant c: "over", y / c; "times", y * c; "cap", c * tanh(y / c); None: none.
        ropes: Rotary embeddings that layers use.
        max_positions: Positions that the model was made for; None where config.json does not say.
        lm_head_bias: Bias [N] of an output embedding in floating point; a packed one has its own.
        per_layer_inputs: What the per-layer inputs of all layers are computed from; None: they have none.
    """

    embedding: Packed | Tensor
    embedding_multiplier: float
    layers: tuple[LayerSpec, ...]
    norm: Norm
    lm_head: Weight | Tensor
    logits: Logits
    ropes: tuple[Rope, ...]
    max_positions: int | None
    lm_head_bias: Tensor | None = None
    per_layer_inputs: PerLayerInputs | None = None

    @property
    def vocabulary(self) -> int:
        """Number of rows N of the embedding: ids lie in 0 … N - 1."""
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        """K"""
        return self.embedding.shape[1]

    @property
    def rope_switch(self) -> int | None:
        """Length beyond which frequencies of all tokens of a sequence are other ones ("longrope"); None: there is none."""
        return min((rope.switch for rope in self.ropes if rope.switch is not None), default=None)

    def has_long_rope(self, length: int) -> bool:
        """Whether rope takes the frequencies of long sequences in a sequence of a length."""
        return self.rope_switch is not None and length > self.rope_switch

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, a tied embedding counted once."""
        tensors = tensors_of(self)
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def parts_of(part: object) -> Iterator[object]:
    """Yield a part of a specification, and all that it consists of: norms, weights, tensors, numbers, …"""
    yield part
    inner = [getattr(part, one.name) for one in fields(part)] if isinstance(part, DecoderSpec | LayerSpec) else part
    for one in inner if isinstance(inner, list | tuple) else ():
        yield from parts_of(one)


def tensors_of(part: object) -> list[Tensor]:
    """Return the tensors of a part of a specification, packed weights as bytes."""
    parts = (one.data if isinstance(one, Packed) else one for one in parts_of(part))
    return [one for one in parts if isinstance(one, Tensor)]
