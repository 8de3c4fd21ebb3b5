"""What is around the layers of a live decoder stack, as a specification has it: embedding, ropes, per-layer inputs, output embedding.

`stack.py` makes a `CpuModel` of it, whose decode step `token_step.py` takes, or a `GpuModel`, which `generate` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.decoder.family import PER_LAYER_INPUTS, Family
from halfbyte.decoder.rope import Rope
from halfbyte.decoder.spec import DecoderSpec, LayerSpec, Logits, tensors_of
from halfbyte.integrations.transformers.decoder.live_layer import norm_of, weight_of
from halfbyte.integrations.transformers.optimize.hooked import watched
from halfbyte.layouts.base import Packed
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear
from halfbyte.nn.modules.scaled import Factor, factor_of
from halfbyte.nn.parallel.parallelize import part_of
from halfbyte.ops.transformer.weights import Weight
from halfbyte.ops.transformer.whole_model_decode import PerLayerInputs

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


class _LiveRope(Rope):
    """Cosines and sines of a live stack, all of a head's, in the type of activations."""

    def __init__(self, stack: Part, kind: str, x: Tensor, *, mrope: bool) -> None:
        self._rotary, self._kinds, self._mrope = stack.rotary_emb, [kind] if kind else [], mrope
        self._x, self.switch = x.new_empty(0), longrope_switch(stack)
        cos, _ = self.tables(0, 1, 1)
        super().__init__(torch.zeros(cos.shape[-1] // 2, dtype=torch.float32, device="cpu"), switch=self.switch)

    def tables(self, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, stop, device=self._x.device)[None]
        if self.switch is not None:  # the furthest position decides for all
            far = positions.new_full((1, 1), self.switch)
            positions = torch.cat((positions, far), 1) if length > self.switch else positions.clamp(max=self.switch - 1)
        cos, sin = self._rotary(self._x, positions[None].expand(3, -1, -1) if self._mrope else positions, *self._kinds)
        return cos[:, : stop - start], sin[:, : stop - start]


def longrope_switch(stack: Part) -> int | None:
    """Length of a text from which on frequencies of all tokens are other ones ("longrope"); None: there is none."""
    is_longrope = stack.rotary_emb.rope_type == "longrope"
    return stack.config.rope_parameters["original_max_position_embeddings"] if is_longrope else None


class Head(NamedTuple):
    """An output embedding, and its bias where it is in floating point."""

    weight: Weight | Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, head: torch.nn.Module) -> Head | None:
        """The output embedding that a module is; None if it is another module, has a hook or a part of the weight."""
        if part_of(head) is not None or watched(head) or "forward" in vars(head):
            return None
        if type(head) is QuantLinear:
            return cls(weight_of(head), None)
        return cls(head.weight.detach(), head.bias) if type(head) is torch.nn.Linear else None

    def is_same(self, other: Head) -> bool:
        """Whether both read the same memory in the same way."""
        tensors, others = tensors_of(self), tensors_of(other)
        same = [(t.data_ptr(), t.shape, t.dtype) for t in tensors] == [(t.data_ptr(), t.shape, t.dtype) for t in others]
        if isinstance(self.weight, Weight) and isinstance(other.weight, Weight):
            return same and self.weight.packed.name == other.weight.packed.name and self.weight[2:] == other.weight[2:]
        return same and type(self.weight) is type(other.weight)


def decoder_spec(
    stack: Part,
    family: Family,
    layers: Sequence[LayerSpec],
    ropes: Sequence[str],
    head: Head | None,
    logits: Logits,
) -> DecoderSpec | str:
    """The specification of a model, or why it has none.

    Args:
        stack: The module of transformers.
        family: Its family.
        layers: Specifications of its layers.
        ropes: Type of layers that have each rotary embedding; "" where all have the same.
        head: The output embedding; None: one without rows, of a stack by itself.
        logits: Function of the logits.
    """
    per_layer = layers[0].per_layer_input is not None
    if (reason := why_no_ends(stack, family, per_layer=per_layer)) is not None:
        return reason
    norm = getattr(stack, family.final_norm)
    if not type(norm).__module__.startswith(("torch.", "transformers.")):
        return "its last norm was replaced"
    dtype = norm.weight.dtype
    table, factor = _table(stack.embed_tokens, dtype)
    if family.embedding_multiplier is not None:
        factor *= getattr(stack, family.embedding_multiplier)
    return DecoderSpec(
        table,
        factor,
        tuple(layers),
        norm_of(norm, family),
        norm.weight.new_empty(0, norm.weight.shape[0]) if head is None else head.weight,
        logits,
        tuple([_LiveRope(stack, kind, norm.weight, mrope=family.mrope) for kind in ropes]),
        None,
        None if head is None else head.bias,
        per_layer_inputs_of(stack, family, dtype) if per_layer else None,
    )


def per_layer_inputs_of(stack: Part, family: Family, dtype: torch.dtype) -> PerLayerInputs:
    """What the per-layer inputs of a stack that has them are computed from."""
    embedding, projection, norm = _per_layer_parts(stack)
    assert isinstance(projection, QuantLinear)
    scales = stack.per_layer_model_projection_scale, stack.per_layer_input_scale
    return PerLayerInputs(*_table(embedding, dtype), weight_of(projection), scales[0], norm_of(norm, family), scales[1])


def _table(embedding: Part, dtype: torch.dtype) -> tuple[Packed | Tensor, float]:
    """An embedding's table and the factor of its rows."""
    scale = _scale(embedding)
    factor = 1.0 if scale is None else float(scale.to(dtype)) if isinstance(scale, Tensor) else scale
    return embedding.packed if isinstance(embedding, QuantEmbedding) else embedding.weight.detach(), factor


def _scale(embedding: Any) -> Factor | None:
    """The factor of an embedding's rows, if it has one."""
    return embedding.embed_scale if type(embedding) is QuantEmbedding else factor_of(embedding)


def _per_layer_parts(stack: Part) -> tuple[Part, torch.nn.Module, Part]:
    """The table, the projection and the norm from which per-layer inputs are computed."""
    table, projection, norm = (getattr(stack, name) for name in PER_LAYER_INPUTS)
    return table, projection, norm


def why_no_ends(stack: Part, family: Family, *, per_layer: bool) -> str | None:
    """Why what is around the layers of a stack has no specification; None if it has one."""
    norm, rotary = getattr(stack, family.final_norm), stack.rotary_emb
    ropes = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    if any("dynamic" in rope for rope in ropes) or (isinstance(rotary.rope_type, dict) and "longrope" in ropes):
        return "frequencies of its rope depend on the length of the text"
    tables, parts = [stack.embed_tokens], [stack.embed_tokens]
    if per_layer:
        per_layer_inputs, projection, per_layer_norm = _per_layer_parts(stack)
        if type(projection) is not QuantLinear or not type(per_layer_norm).__module__.startswith("transformers."):
            return "its per-layer inputs are not projected by a quantized linear layer and an RMS norm"
        tables.append(per_layer_inputs)
        parts += per_layer_inputs, projection
    if not all(_is_table(one, norm.weight.dtype) for one in tables):
        return "its embedding does more than looking rows up, or in another dtype"
    if any(part_of(part) is not None for part in parts):
        return "its embedding is distributed over processes"
    if any(watched(part) or "forward" in vars(part) for part in stack.modules() if part is not stack):
        return "a part has a hook, or its forward was replaced"
    return None


def _is_table(embedding: object, dtype: torch.dtype) -> bool:
    """Whether nothing but rows of a table in that dtype, times a factor, come out of an embedding."""
    if type(embedding) is torch.nn.Embedding or (isinstance(embedding, torch.nn.Embedding) and factor_of(embedding) is not None):
        return embedding.max_norm is None and embedding.weight.dtype == dtype
    return type(embedding) is QuantEmbedding and embedding.dtype == dtype
