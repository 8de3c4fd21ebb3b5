"""Builds the specification of a decoder layer, from a checkpoint (`build.py`) or from a live module
(`integrations/transformers/decoder/live_layer.py`).

Both are a `LayerSource`: tensors by the names that the family has for them, and the settings that no tensor tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from halfbyte.decoder.family import PER_LAYER_MODULES, Family, MoEFamily
from halfbyte.decoder.spec import LayerSpec
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.layer_kinds import GateFunction, Projections
from halfbyte.ops.transformer.experts import Clamped, Experts, SharedExpert
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm, PerLayerInput
from halfbyte.ops.transformer.weights import Weight


class LayerSource(Protocol):
    """A decoder layer: its tensors, by the names of modules within the layer, and its settings.

    All methods raise UnsupportedError for what is missing, not quantized, or computed otherwise than the family says.
    """

    family: Family
    residual_multiplier: float

    @property
    def activation(self) -> GateFunction:
        """The activation function of its MLP, as kernels name it."""

    @property
    def projections(self) -> Projections:
        """Which of queries, keys and values it has projections of, as `Heads.projections`."""

    def heads(self, qkv: Sequence[Weight], o_proj: Weight) -> Heads:
        """Return the heads that the layer computes with these projections: their numbers and sizes, scale, softcap and rope."""

    def router_settings(self, moe: MoEFamily) -> tuple[int, bool, float]:
        """Return `top_k`, `norm_topk` and the scaling factor of the mixture of experts."""

    def has_experts(self) -> bool:
        """Whether its MLP is a mixture of experts."""

    def has_per_layer_input(self) -> bool:
        """Whether it has a per-layer input."""

    def has(self, name: str) -> bool:
        """Whether the layer has a module of that name."""

    def linear(self, names: Sequence[str]) -> Weight:
        """Return the weight of linear layers, joined along N."""

    def qkv(self, names: Sequence[str]) -> tuple[Weight, ...]:
        """Return the weights of queries, keys and values, joined where their formats are the same."""

    def experts(self, name: str) -> tuple[Weight, Weight, Clamped | None]:
        """Return the weights of all experts in a module, [E, 2 I, K] and [E, K, I], and their gates, where these are not SiLU."""

    def norm(self, name: str, size: int | None = None) -> Norm:
        """Return a norm, of `size` elements; None: of as many as hidden states have."""

    def tensor(self, name: str, size: int | None = None) -> Tensor:
        """Return a tensor in floating point, a vector where it has a `size`."""


def joined(names: Sequence[str]) -> str:
    """Return the names of linear layers of one product, such as gate_proj+up_proj."""
    return "+".join([name.rpartition(".")[2] for name in names])


def build_layer(source: LayerSource, rope: int, sliding_window: int | None, kv_source: int | None) -> LayerSpec:
    """Build the specification of a layer.

    Args:
        source: The layer.
        rope, sliding_window, kv_source: As in `LayerSpec`.

    Raises:
        UnsupportedError: The layer is not what its family says, or not quantized.
    """
    family = source.family
    pre_attention, post_attention, pre_mlp, post_mlp = [None if name is None else source.norm(name) for name in family.norms]
    attention = _attention(source, pre_attention, post_attention)
    if family.moe is not None and source.has_experts():
        if pre_mlp is None or post_mlp is not None:
            raise UnsupportedError("its experts have a norm after them, or none before")
        return LayerSpec(attention, _experts(source, family.moe, pre_mlp), rope, sliding_window, kv_source)
    gate_up = source.linear([f"{family.mlp}.{name}" for name in family.gate_up])
    down = source.linear([f"{family.mlp}.{family.down_proj}"])
    scale = None if family.layer_scalar is None else source.tensor(family.layer_scalar, 1)
    per_layer = _per_layer_input(source, scale)
    mlp = MLP(
        gate_up,
        down,
        pre_norm=pre_mlp,
        post_norm=post_mlp,
        residual_multiplier=source.residual_multiplier,
        activation=source.activation,
        gated=family.gated,
        parallel_residual=family.parallel_residual,
        layer_scale=scale if per_layer is None else None,
    )
    return LayerSpec(attention, mlp, rope, sliding_window, kv_source, per_layer)


def _attention(source: LayerSource, before: Norm | None, after: Norm | None) -> Attention:
    family, projections = source.family, source.projections
    names = family.qkv[: len(projections)]
    qkv = source.qkv([f"self_attn.{name}" for name in names])
    o_proj = source.linear([f"self_attn.{family.o_proj}"])
    heads = source.heads(qkv, o_proj)._replace(projections=projections)
    heads = heads._replace(
        qk_norm=_qk_norm(source, heads),
        qk_norm_whole=family.qk_norm_whole,
        sinks=None if family.sinks is None else source.tensor(f"self_attn.{family.sinks}", heads.num_heads),
        norm_after_rope=family.norm_after_rope,
        v_norm=family.v_norm is not None and projections != "q",
    )
    return Attention(qkv, o_proj, before, heads, after, source.residual_multiplier)


def _qk_norm(source: LayerSource, heads: Heads) -> tuple[Norm, Norm] | None:
    """The norms of queries and of keys, which some configs of a family leave out."""
    names = source.family.qk_norm
    if names is None or not source.has(f"self_attn.{names[0]}"):
        return None
    query, key = (heads.num_heads, heads.num_kv_heads) if source.family.qk_norm_whole else (1, 1)
    of_queries = source.norm(f"self_attn.{names[0]}", heads.head_dim * query)
    if heads.projections == "q":
        return of_queries, of_queries
    return of_queries, source.norm(f"self_attn.{names[1]}", heads.head_dim * key)


def _per_layer_input(source: LayerSource, scale: Tensor | None) -> PerLayerInput | None:
    """What a layer does with its per-layer input, with the factor of its output; None where it has none."""
    if not source.family.per_layer_input or not source.has_per_layer_input():
        return None
    names = PER_LAYER_MODULES
    gate, projection = source.linear([names[0]]), source.linear([names[1]])
    return PerLayerInput(gate, projection, source.norm(names[2]), source.activation, scale)


def _experts(source: LayerSource, moe: MoEFamily, before: Norm) -> Experts:
    mlp, (top_k, norm_topk, scaling_factor) = source.family.mlp, source.router_settings(moe)
    gate_up_stack, down_stack, clamped = source.experts(f"{mlp}.experts")
    router = source.tensor(f"{mlp}.{moe.router}.{moe.router_weight}")
    shared = None
    if moe.shared is not None:
        expert, gate = moe.shared
        gate_up = source.linear([f"{mlp}.{expert}.gate_proj", f"{mlp}.{expert}.up_proj"])
        row = None if gate is None else source.tensor(f"{mlp}.{gate}.weight").reshape(-1).to(router.dtype)
        shared = SharedExpert(gate_up, source.linear([f"{mlp}.{expert}.down_proj"]), row)
    return Experts(
        gate_up_stack,
        down_stack,
        router=router,
        top_k=top_k,
        norm_topk=norm_topk,
        pre_norm=before,
        shared_expert=shared,
        router_bias=source.tensor(f"{mlp}.{moe.router}.bias") if moe.router_bias else None,
        clamped=clamped,
        scores=moe.scores,
        correction_bias=None if moe.correction is None else source.tensor(f"{mlp}.{moe.correction}").flatten(),
        scaling_factor=source.residual_multiplier * scaling_factor,
    )
