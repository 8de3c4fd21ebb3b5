"""Decoder layers of transformers' families, as `ops.decoder` computes them on a CPU: where each family has its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.integrations.shortened import name_in_transformers


@dataclass(frozen=True, slots=True)
class Routed:
    """An mlp whose `experts` are chosen by its `gate`.

    normalized  the attribute of the gate that says whether weights add up to 1; None: they do
    shared      the expert that all tokens share, and its gate, if there is one
    """

    normalized: str | None = "norm_topk_prob"
    shared: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """The parts of a decoder layer, by their names.

    qkv, head_norms  of its self_attn: queries, keys and values, in one or in three; norms of the heads of queries and keys, if any
    gates            of its mlp: gates and what they multiply, in one or in two
    norms            of the layer: before attention, and before the mlp
    routed           of an mlp that has experts; of the same family there may be layers without
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gates: tuple[str, ...] = ("gate_proj", "up_proj")
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    head_norms: tuple[str, str] | None = None
    routed: Routed | None = None


# By the names of their layers in transformers.models.
FAMILIES = {
    "llama.modeling_llama.LlamaDecoderLayer": Family(),
    "mistral.modeling_mistral.MistralDecoderLayer": Family(),
    "qwen2.modeling_qwen2.Qwen2DecoderLayer": Family(),
    "qwen3.modeling_qwen3.Qwen3DecoderLayer": Family(head_norms=("q_norm", "k_norm")),
    "mixtral.modeling_mixtral.MixtralDecoderLayer": Family(routed=Routed(normalized=None)),
    "qwen2_moe.modeling_qwen2_moe.Qwen2MoeDecoderLayer": Family(routed=Routed(shared=("shared_expert", "shared_expert_gate"))),
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer": Family(head_norms=("q_norm", "k_norm"), routed=Routed()),
}


def family_of(layer: Any) -> Family | None:
    """That of a decoder layer, shortened or not; None where it is none of FAMILIES."""
    return FAMILIES.get(name_in_transformers(layer))


def known(layer: Any) -> Family:
    """That of a layer which is one of FAMILIES."""
    family = family_of(layer)
    assert family is not None
    return family
