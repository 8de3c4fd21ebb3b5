"""Decoder layers of transformers' families, as `ops.decoder` computes them on a CPU: where each has its parts, and what they do.

    h = x + factor * norm(o(attention(qkv(norm(x)))))
    y = h + factor * norm(down(f(gate) * up)),  gate, up = gate_up(norm(h))

A family is in the table if its layer and attention compute this and nothing else; not those with other rotary positions (GLM, ERNIE,
Helium and Cohere turn pairs of neighbours) or without gates (Arcee).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.integrations.shortened import name_in_transformers

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # of configs: as `ops.decoder.Dense` has them


@dataclass(frozen=True, slots=True)
class Routed:
    """An mlp whose `experts` are chosen by its `gate`.

    normalized  the attribute of the gate that says whether weights add up to 1; None: they do
    shared      the expert that all tokens share, and its gate, if there is one
    gate        the gate's name
    biased      whether it has a bias
    """

    normalized: str | None = "norm_topk_prob"
    shared: tuple[str, str] | None = None
    gate: str = "gate"
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The parts of a decoder layer, by their names.

    qkv         of its self_attn: queries, keys and values, in one or in three
    gates       of its mlp: gates and what they multiply, in one or in two
    norms       of the layer: before attention, after it, before the mlp, after it; None where there is none
    head_norms  of its self_attn: of queries and keys, if any
    rows        whether these are of all heads of a token together
    plus_one    whether norms multiply by 1 + weight
    activation  the attribute of the config that names the function of gates
    factor      the attribute of the layer that has the factor of what is added, if any
    cap         the attribute of its self_attn that has the cap of scores, if any
    sinks       the attribute of its self_attn that has the sinks of scores, if any
    positions   the attribute of its self_attn that tells whether queries and keys are turned, if there is one
    partial     whether a part of each head is turned, as much as the config says
    routed      of an mlp that has experts; of the same family there may be layers without
    without     attributes of the config that have to be None or False: with them a layer computes something else
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gates: tuple[str, ...] = ("gate_proj", "up_proj")
    norms: tuple[str | None, str | None, str | None, str | None] = ("input_layernorm", None, "post_attention_layernorm", None)
    head_norms: tuple[str, str] | None = None
    rows: bool = False
    plus_one: bool = False
    activation: str = "hidden_act"
    factor: str | None = None
    cap: str | None = None
    sinks: str | None = None
    positions: str | None = None
    partial: bool = False
    routed: Routed | None = None
    without: tuple[str, ...] = ()


_LLAMA = Family()
_HEAD_NORMS = "q_norm", "k_norm"
_FOUR = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
_AFTER = None, "post_attention_layernorm", None, "post_feedforward_layernorm"
_GEMMA = {"plus_one": True, "norms": _FOUR, "activation": "hidden_activation"}

# By the names of their layers in transformers.models.
FAMILIES = {
    "llama.modeling_llama.LlamaDecoderLayer": _LLAMA,
    "mistral.modeling_mistral.MistralDecoderLayer": _LLAMA,
    "ministral.modeling_ministral.MinistralDecoderLayer": _LLAMA,
    "qwen2.modeling_qwen2.Qwen2DecoderLayer": _LLAMA,
    "qwen3.modeling_qwen3.Qwen3DecoderLayer": Family(head_norms=_HEAD_NORMS),
    "seed_oss.modeling_seed_oss.SeedOssDecoderLayer": _LLAMA,
    "phi3.modeling_phi3.Phi3DecoderLayer": Family(qkv=("qkv_proj",), gates=("gate_up_proj",), partial=True),
    "gemma.modeling_gemma.GemmaDecoderLayer": Family(plus_one=True),
    "gemma2.modeling_gemma2.Gemma2DecoderLayer": Family(**_GEMMA, cap="attn_logit_softcapping"),  # type: ignore[arg-type]
    "gemma3.modeling_gemma3.Gemma3DecoderLayer": Family(**_GEMMA, head_norms=_HEAD_NORMS),  # type: ignore[arg-type]
    "granite.modeling_granite.GraniteDecoderLayer": Family(factor="residual_multiplier"),
    "smollm3.modeling_smollm3.SmolLM3DecoderLayer": Family(positions="use_rope"),
    "olmo2.modeling_olmo2.Olmo2DecoderLayer": Family(norms=_AFTER, head_norms=_HEAD_NORMS, rows=True),
    "olmo3.modeling_olmo3.Olmo3DecoderLayer": Family(norms=_AFTER, head_norms=_HEAD_NORMS, rows=True),
    "olmoe.modeling_olmoe.OlmoeDecoderLayer": Family(head_norms=_HEAD_NORMS, rows=True, routed=Routed(), without=("clip_qkv",)),
    "mixtral.modeling_mixtral.MixtralDecoderLayer": Family(routed=Routed(normalized=None)),
    "gpt_oss.modeling_gpt_oss.GptOssDecoderLayer": Family(sinks="sinks", routed=Routed(None, gate="router", biased=True)),
    "qwen2_moe.modeling_qwen2_moe.Qwen2MoeDecoderLayer": Family(routed=Routed(shared=("shared_expert", "shared_expert_gate"))),
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer": Family(head_norms=_HEAD_NORMS, routed=Routed()),
}
NAMES = sorted(name.rpartition(".")[2] for name in FAMILIES)


def family_of(layer: Any) -> Family | None:
    """That of a decoder layer, shortened or not; None where it is none of FAMILIES."""
    return FAMILIES.get(name_in_transformers(layer))


def known(layer: Any) -> Family:
    """That of a layer which is one of FAMILIES."""
    family = family_of(layer)
    assert family is not None
    return family


def other(layer: Any) -> str | None:
    """The attribute of the config with which a layer of a known family computes something else, or None."""
    config = layer.self_attn.config
    return next((name for name in known(layer).without if not any(getattr(config, name) is value for value in (None, False))), None)


def turned(layer: Any) -> int:
    """Elements of a head that have positions."""
    family, attention = known(layer), layer.self_attn
    if family.positions is not None and not getattr(attention, family.positions):
        return 0
    dim: int = attention.head_dim
    rope = getattr(attention.config, "rope_parameters", None) or {}
    return int(dim * rope.get("partial_rotary_factor", 1.0)) if family.partial else dim
