"""Decoder layers of transformers' families, as `ops.decoder` computes them on a CPU: where each has its parts, and what they do.

    h = x + factor * norm(o(attention(qkv(norm(x)))))
    y = h + factor * norm(down(f(gate) * up)),  gate, up = gate_up(norm(h))
    y = scale * (y + norm(projection(f(gate(y)) * e)))                          where a layer has an input e of its own

or norm(x) there, in parallel layers, and down(f(up)) where there are no gates. A family is in the table if its layer and attention compute
this and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.integrations.shortened import name_in_transformers

# Of configs: as `ops.decoder.Dense` has them.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu2": "relu2"}


@dataclass(frozen=True, slots=True)
class Routed:
    """An mlp whose `experts` are chosen by its `gate`.

    normalized  the attribute of the gate that says whether weights add up to 1; None: they do
    shared      the expert that all tokens share, and its gate, if there is one
    gate        the gate's name
    biased      whether it has a bias
    scores      what experts are chosen by and weighed by, as in `ops.experts.Experts`
    correction  of the mlp: what is added to scores, for the choice alone
    factor      the attribute of the gate that has the factor of weights, if any
    groups      the attribute of the gate that has the number of groups in which experts are chosen, if any, which has to be 1
    """

    normalized: str | None = "norm_topk_prob"
    shared: tuple[str, str | None] | None = None
    gate: str = "gate"
    biased: bool = False
    scores: str = ""
    correction: str | None = None
    factor: str | None = None
    groups: str | None = None


class Sharing(NamedTuple):
    """Keys and values that layers have in common, of attributes of self_attn.

    borrows  whether those of an earlier layer are read
    lends    whether its own are read by others
    kind     what these layers have in common, and the key in `shared_kv_states`
    modes    of the config: of each layer, whether it is one that "store"s or one that "reuse"s them
    last     of the config: how many layers reuse them, the last ones, where transformers has no `modes`: those of the last of their kind
             before
    """

    borrows: str = "is_kv_shared_layer"
    lends: str = "store_full_length_kv"
    kind: str = "layer_type"
    modes: str = "kv_sharing_modes"
    last: str = "num_kv_shared_layers"


class Positions(NamedTuple):
    """Which layers turn queries and keys: those of whose self_attn these attributes' values say so."""

    attributes: tuple[str, ...]
    turns: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Family:
    """The parts of a decoder layer, by their names.

    qkv         of its self_attn: queries, keys and values, in one or in three
    o           of its self_attn: what comes after attention
    mlp         of the layer: the other half
    gates       of its mlp: gates and what they multiply, in one or in two; what comes first where there are none
    gated       whether there are gates
    down        of its mlp: what comes last
    parallel    whether the mlp reads what attention reads
    norms       of the layer: before attention, after it, before the mlp, after it; None where there is none
    head_norms  of its self_attn: of queries and keys, if it has any
    rows        whether these are of all heads of a token together
    turned_first  whether they come after positions
    plus_one    whether norms multiply by 1 + weight
    centred     whether norms are layer norms
    activation  the attribute of the config that names the function of gates
    factor      the attribute of the layer that has the factor of what is added, if any
    cap         the attribute of its self_attn that has the cap of scores, if any
    sinks       the attribute of its self_attn that has the sinks of scores, if any
    positions   which of its layers turn queries and keys, if not all
    partial     whether a part of each head is turned, as much as the config says
    pairs       which elements are turned together, and by which tables, as in `ops.decoder.Heads`
    near        the entry of the config's `rope_parameters` that has the position from which on queries have a factor, if any
    values_norm  of its self_attn: the norm of values, which has no weight, if there is one
    sharing     how some of its layers read keys and values of earlier ones, if they do
    per_layer   of the layer, where it has an input of its own: the gate, the projection and the norm
    scale       the buffer of the layer that has the factor of its output, if any
    routed      of an mlp that has experts; of the same family there may be layers without
    without     attributes of the config that have to be None, False or the number 0: with them a layer computes something else
    needs       attributes of the config, and what they have to be
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    mlp: str = "mlp"
    gates: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    down: str = "down_proj"
    parallel: bool = False
    norms: tuple[str | None, str | None, str | None, str | None] = ("input_layernorm", None, "post_attention_layernorm", None)
    head_norms: tuple[str, str] | None = None
    rows: bool = False
    turned_first: bool = False
    plus_one: bool = False
    centred: bool = False
    activation: str = "hidden_act"
    factor: str | None = None
    cap: str | None = None
    sinks: str | None = None
    positions: Positions | None = None
    partial: bool = False
    pairs: str = ""
    near: str | None = None
    values_norm: str | None = None
    sharing: Sharing | None = None
    per_layer: tuple[str, str, str] | None = None
    scale: str | None = None
    routed: Routed | None = None
    without: tuple[str, ...] = ()
    needs: tuple[tuple[str, object], ...] = ()


_LLAMA = Family()
_HEAD_NORMS = "q_norm", "k_norm"
_FOUR = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
_AFTER = None, "post_attention_layernorm", None, "post_feedforward_layernorm"
_HALF = {"gates": ("gate_up_proj",), "partial": True, "pairs": "once"}
_GLM4 = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
_BOTH = "input_layernorm", None, "input_layernorm", None
_COHERE = {"centred": True, "parallel": True, "norms": _BOTH, "pairs": "twice"}
_EXAONE = Positions(("sliding_window", "is_sliding"), lambda window, slides: window is None or slides)
_WINDOWED = Positions(("sliding_window",), lambda window: window is not None)
_CORRECTION = "e_score_correction_bias"
_GLM_ROUTED = Routed(
    shared=("shared_experts", None),
    scores="sigmoid",
    correction=f"gate.{_CORRECTION}",
    factor="routed_scaling_factor",
    groups="num_group",
)
_GEMMA = {"plus_one": True, "norms": _FOUR, "activation": "hidden_activation"}
_GEMMA4 = Family(
    norms=_FOUR,
    head_norms=_HEAD_NORMS,
    activation="hidden_activation",
    values_norm="v_norm",
    sharing=Sharing(),
    per_layer=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
    scale="layer_scalar",
    without=("enable_moe_block",),
)

# By the names of their layers in transformers.models.
FAMILIES = {
    "llama.modeling_llama.LlamaDecoderLayer": _LLAMA,
    "cwm.modeling_cwm.CwmDecoderLayer": _LLAMA,
    "mistral.modeling_mistral.MistralDecoderLayer": _LLAMA,
    "ministral.modeling_ministral.MinistralDecoderLayer": _LLAMA,
    "ministral3.modeling_ministral3.Ministral3DecoderLayer": Family(near="original_max_position_embeddings"),
    "qwen2.modeling_qwen2.Qwen2DecoderLayer": _LLAMA,
    "qwen2_vl.modeling_qwen2_vl.Qwen2VLDecoderLayer": _LLAMA,
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLDecoderLayer": _LLAMA,
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextDecoderLayer": Family(head_norms=_HEAD_NORMS),
    "qwen3.modeling_qwen3.Qwen3DecoderLayer": Family(head_norms=_HEAD_NORMS),
    "seed_oss.modeling_seed_oss.SeedOssDecoderLayer": _LLAMA,
    "phi3.modeling_phi3.Phi3DecoderLayer": Family(qkv=("qkv_proj",), gates=("gate_up_proj",), partial=True),
    "gemma.modeling_gemma.GemmaDecoderLayer": Family(plus_one=True),
    "gemma2.modeling_gemma2.Gemma2DecoderLayer": Family(**_GEMMA, cap="attn_logit_softcapping"),  # type: ignore[arg-type]
    "gemma3.modeling_gemma3.Gemma3DecoderLayer": Family(**_GEMMA, head_norms=_HEAD_NORMS),  # type: ignore[arg-type]
    "gemma4.modeling_gemma4.Gemma4TextDecoderLayer": _GEMMA4,
    "granite.modeling_granite.GraniteDecoderLayer": Family(factor="residual_multiplier"),
    "granitemoe.modeling_granitemoe.GraniteMoeDecoderLayer": Family(
        mlp="block_sparse_moe", factor="residual_multiplier", routed=Routed(None, gate="router")
    ),
    "granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridDecoderLayer": Family(
        mlp="shared_mlp",
        gates=("input_linear",),
        down="output_linear",
        factor="residual_multiplier",
        without=("num_local_experts",),
        needs=(("position_embedding_type", "rope"),),
    ),
    "smollm3.modeling_smollm3.SmolLM3DecoderLayer": Family(positions=Positions(("use_rope",), bool)),
    "glm.modeling_glm.GlmDecoderLayer": Family(**_HALF),  # type: ignore[arg-type]
    "glm4.modeling_glm4.Glm4DecoderLayer": Family(**_HALF, norms=_GLM4),  # type: ignore[arg-type]
    "ernie4_5.modeling_ernie4_5.Ernie4_5DecoderLayer": Family(pairs="once"),
    "hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1DecoderLayer": Family(
        head_norms=("query_layernorm", "key_layernorm"), turned_first=True
    ),
    "helium.modeling_helium.HeliumDecoderLayer": Family(pairs="once"),
    "exaone4.modeling_exaone4.Exaone4DecoderLayer": Family(norms=_AFTER, head_norms=_HEAD_NORMS, positions=_EXAONE),
    "cohere.modeling_cohere.CohereDecoderLayer": Family(**_COHERE, without=("use_qk_norm",)),  # type: ignore[arg-type]
    "cohere2.modeling_cohere2.Cohere2DecoderLayer": Family(**_COHERE, positions=_WINDOWED),  # type: ignore[arg-type]
    "arcee.modeling_arcee.ArceeDecoderLayer": Family(gates=("up_proj",), gated=False),
    "jais2.modeling_jais2.Jais2DecoderLayer": Family(gates=("up_proj",), gated=False, centred=True),
    "nemotron.modeling_nemotron.NemotronDecoderLayer": Family(gates=("up_proj",), gated=False, centred=True, plus_one=True, partial=True),
    "phi.modeling_phi.PhiDecoderLayer": Family(
        o="dense",
        gates=("fc1",),
        gated=False,
        down="fc2",
        centred=True,
        parallel=True,
        norms=_BOTH,
        partial=True,
        without=("qk_layernorm",),
    ),
    "stablelm.modeling_stablelm.StableLmDecoderLayer": Family(
        centred=True, partial=True, without=("use_parallel_residual", "qk_layernorm")
    ),
    "starcoder2.modeling_starcoder2.Starcoder2DecoderLayer": Family(gates=("c_fc",), gated=False, down="c_proj", centred=True),
    "olmo2.modeling_olmo2.Olmo2DecoderLayer": Family(norms=_AFTER, head_norms=_HEAD_NORMS, rows=True),
    "olmo3.modeling_olmo3.Olmo3DecoderLayer": Family(norms=_AFTER, head_norms=_HEAD_NORMS, rows=True),
    "olmoe.modeling_olmoe.OlmoeDecoderLayer": Family(head_norms=_HEAD_NORMS, rows=True, routed=Routed(), without=("clip_qkv",)),
    "mixtral.modeling_mixtral.MixtralDecoderLayer": Family(routed=Routed(normalized=None)),
    "gpt_oss.modeling_gpt_oss.GptOssDecoderLayer": Family(sinks="sinks", routed=Routed(None, gate="router", biased=True)),
    "qwen2_moe.modeling_qwen2_moe.Qwen2MoeDecoderLayer": Family(routed=Routed(shared=("shared_expert", "shared_expert_gate"))),
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextDecoderLayer": Family(head_norms=_HEAD_NORMS, routed=Routed(None)),
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer": Family(head_norms=_HEAD_NORMS, routed=Routed()),
    "mellum.modeling_mellum.MellumDecoderLayer": Family(head_norms=_HEAD_NORMS, routed=Routed()),
    "glm4v_moe.modeling_glm4v_moe.Glm4vMoeTextDecoderLayer": Family(partial=True, routed=_GLM_ROUTED),
    "glm4_moe.modeling_glm4_moe.Glm4MoeDecoderLayer": Family(head_norms=_HEAD_NORMS, partial=True, routed=_GLM_ROUTED),
    "dots1.modeling_dots1.Dots1DecoderLayer": Family(head_norms=_HEAD_NORMS, routed=_GLM_ROUTED),
    "solar_open.modeling_solar_open.SolarOpenDecoderLayer": Family(partial=True, routed=_GLM_ROUTED),
    "exaone_moe.modeling_exaone_moe.ExaoneMoeDecoderLayer": Family(head_norms=_HEAD_NORMS, positions=_EXAONE, routed=_GLM_ROUTED),
    "minimax_m2.modeling_minimax_m2.MiniMaxM2DecoderLayer": Family(
        head_norms=_HEAD_NORMS, rows=True, partial=True, routed=Routed(None, scores="sigmoid", correction=_CORRECTION)
    ),
    "hy_v3.modeling_hy_v3.HYV3DecoderLayer": Family(
        head_norms=_HEAD_NORMS,
        routed=Routed(None, ("shared_experts", None), scores="sigmoid", correction=_CORRECTION, factor="router_scaling_factor"),
    ),
    "ernie4_5_moe.modeling_ernie4_5_moe.Ernie4_5_MoeDecoderLayer": Family(
        pairs="once",
        routed=Routed(None, ("shared_experts", None), scores="softmax", correction=f"gate.moe_statics.{_CORRECTION}"),
    ),
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
    """The attribute of the config with which a layer of a known family computes something else, and its value; or None."""
    config, family = layer.self_attn.config, known(layer)
    wrong = [name for name in family.without if not _is_nothing(getattr(config, name))]
    wrong += [name for name, value in family.needs if getattr(config, name) != value]
    return f"{wrong[0]} = {getattr(config, wrong[0])!r}" if wrong else None


def _is_nothing(value: object) -> bool:
    return value is None or value is False or (type(value) is int and value == 0)


def mlp_of(layer: Any) -> Any:
    """What comes after its attention."""
    return getattr(layer, known(layer).mlp)


def added_by(layer: Any) -> float:
    """The factor of what its halves add."""
    name = known(layer).factor
    return 1.0 if name is None else float(getattr(layer, name))


def made_of(layer: Any) -> str:
    """What it makes of its input, as `ops.decoder.Heads` has it: some configs of a family leave out values, or keys and values."""
    names = known(layer).qkv
    return "qkv" if len(names) == 1 else "qkv"[: sum(getattr(layer.self_attn, name, None) is not None for name in names)]


def per_layer_of(layer: Any) -> tuple[Any, Any, Any] | None:
    """The gate, the projection and the norm of its own input, if it has one."""
    names = known(layer).per_layer
    if names is None or not hasattr(layer, names[0]):
        return None
    gate, projection, norm = (getattr(layer, name) for name in names)
    return gate, projection, norm


def borrows(layer: Any) -> bool:
    """Whether it reads keys and values of an earlier layer."""
    sharing = known(layer).sharing
    return sharing is not None and bool(getattr(layer.self_attn, sharing.borrows))


def lends(layer: Any) -> bool:
    """Whether others may read its keys and values."""
    sharing = known(layer).sharing
    return sharing is not None and bool(getattr(layer.self_attn, sharing.lends))


def shared_as(layer: Any) -> str | None:
    """The key in `shared_kv_states` of what it reads, or of what others read."""
    sharing = known(layer).sharing
    return None if sharing is None else getattr(layer.self_attn, sharing.kind)


def lender(layer: Any) -> int | None:
    """The index of the layer whose keys and values it reads; None where it is none."""
    sharing, attention = known(layer).sharing, layer.self_attn
    if sharing is None:
        return None
    kinds, modes, own = attention.config.layer_types, getattr(attention.config, sharing.modes, None), shared_as(layer)
    if modes is None:
        others = len(kinds) - getattr(attention.config, sharing.last)
        return next((i for i in reversed(range(others)) if kinds[i] == own), None)
    found = (i for i, (kind, mode) in enumerate(zip(kinds, modes, strict=True)) if kind == own and mode == "store")
    return next(found, None)


def nearest(layer: Any) -> int | None:
    """The position from which on queries have a factor; None where they have none."""
    near = known(layer).near
    return None if near is None else int(layer.self_attn.config.rope_parameters[near])


def is_near(layer: Any, positions: Tensor | None) -> bool:
    """Whether queries of a layer on a CPU have no factor at these positions."""
    most = nearest(layer)
    if most is None:
        return True
    return positions is not None and not torch.compiler.is_compiling() and int(positions.max()) < most


def turned(layer: Any) -> int:
    """Elements of a head that have positions."""
    family, attention = known(layer), layer.self_attn
    where = family.positions
    if where is not None and not where.turns(*(getattr(attention, name) for name in where.attributes)):
        return 0
    dim: int = attention.head_dim
    rope = getattr(attention.config, "rope_parameters", None) or {}
    return int(dim * rope.get("partial_rotary_factor", 1.0)) if family.partial else dim
