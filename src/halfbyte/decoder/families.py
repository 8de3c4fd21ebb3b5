"""Model families: where each has its parts, and which variant of a decoder it computes.

One entry of FAMILIES describes a family completely, by the names that config.json, checkpoints and transformers' modules use. `build.py`
reads a specification from it and a checkpoint; `integrations` finds the same parts in live modules. A layer computes

    h = x + m * post_norm(o_proj(attention(qkv(norm(x)))))
    y = h + m * post_norm(down_proj(act(gate) * up)),  gate, up = gate_up(norm(h))

with m the residual multiplier; or experts in place of the MLP. With `parallel_residual` the MLP reads norm(x), without `gated` it is
down_proj(act(up)). A family belongs into the table if its layers compute this and nothing else.
"""

from __future__ import annotations

from typing import Any

from halfbyte.decoder.family import SLIDING, Family, FullAttentionSize, KVSharing, MoEFamily, PerLayerEmbedding, RopeLayers


def _by_scalar(config: Any, head_dim: int) -> float:
    return float(float(config.query_pre_attn_scalar) ** -0.5)


def _by_multiplier(config: Any, head_dim: int) -> float:
    return float(config.attention_multiplier)


_QK_NORM = "q_norm", "k_norm"
_SANDWICH = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
_POST_ONLY = None, "post_attention_layernorm", None, "post_feedforward_layernorm"
_PARALLEL = "input_layernorm", None, "input_layernorm", None
_GLM4_NORMS = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
_CORRECTION = "e_score_correction_bias"
_GLM_MOE = MoEFamily(
    scores="sigmoid",
    correction=f"gate.{_CORRECTION}",
    scaling_factor="routed_scaling_factor",
    groups="num_group",
    shared=("shared_experts", None),
    names_in_files=((f".mlp.{_CORRECTION}", f".mlp.gate.{_CORRECTION}"),),  # of EXAONE
)
_MIXTRAL_NAMES = (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")
_GRANITE_MOE_NAMES = (
    (".block_sparse_moe.input_linear.", ".block_sparse_moe.experts.gate_up_proj."),
    (".block_sparse_moe.output_linear.", ".block_sparse_moe.experts.down_proj."),
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),
)
# Layers without a window have no rope, but where no layer has one.
_EXAONE_ROPE = RopeLayers(
    ("sliding_window", "is_sliding"),
    lambda window, slides: window is None or slides,
    lambda config, index: config.sliding_window is None or config.layer_types[index] == SLIDING,
)
_COHERE2_ROPE = RopeLayers(
    ("sliding_window",), lambda window: window is not None, lambda config, index: bool(config.layer_types[index] == SLIDING)
)
_SMOLLM3_ROPE = RopeLayers(("use_rope",), bool, lambda config, index: bool(config.no_rope_layers[index]))
_GEMMA: dict[str, Any] = {
    "unit_offset": True,
    "norms": _SANDWICH,
    "activation": "hidden_activation",
    "default_activation": "gelu_pytorch_tanh",
    "sliding_window": "layer_types",
    "attention_scale": _by_scalar,
    "sqrt_embedding": True,
    "logits_softcap": "final_logit_softcapping",
    "tie_word_embeddings": True,
}
_GLM: dict[str, Any] = {"gate_up": ("gate_up_proj",), "partial_rotary": True, "rope_interleaved": "half"}
_COHERE: dict[str, Any] = {
    "layer_norm": True,
    "norm_eps": "layer_norm_eps",
    "parallel_residual": True,
    "norms": _PARALLEL,
    "rope_interleaved": "repeated",
    "logits_multiplier": "logit_scale",
    "tie_word_embeddings": True,
}
_GRANITE: dict[str, Any] = {
    "residual_multiplier": "residual_multiplier",
    "attention_scale": _by_multiplier,
    "embedding_multiplier": "embedding_multiplier",
    "logits_divisor": "logits_scaling",
}

_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_HEAD_DIM_128 = (("head_dim", 128),)
_SCALED_ROPE = ("rope_scaling", "")  # by values that only transformers has, where config.json does not say

# By the name of the family's package in transformers.models.
FAMILIES: dict[str, Family] = {
    "arcee": Family("ArceeDecoderLayer", "ArceeForCausalLM", gate_up=("up_proj",), gated=False, default_activation="relu2"),
    "cohere": Family(
        "CohereDecoderLayer", "CohereForCausalLM", **_COHERE, unsupported=("use_qk_norm",), defaults=(("rope_theta", 500_000.0),)
    ),
    "cohere2": Family(
        "Cohere2DecoderLayer",
        "Cohere2ForCausalLM",
        **_COHERE,
        sliding_window="layer_types",
        rope_layers=_COHERE2_ROPE,
        defaults=(("sliding_window_pattern", 4),),
    ),
    "cwm": Family("CwmDecoderLayer", "CwmForCausalLM", sliding_window="layer_types", defaults=(*_HEAD_DIM_128, _SCALED_ROPE)),
    "dots1": Family(
        "Dots1DecoderLayer", "Dots1ForCausalLM", qk_norm=_QK_NORM, moe=_GLM_MOE, sliding_window="layer_types", router_output=True
    ),
    "ernie4_5": Family(
        "Ernie4_5DecoderLayer",
        "Ernie4_5ForCausalLM",
        rope_interleaved="half",
        tie_word_embeddings=True,
        defaults=(*_HEAD_DIM_128, ("rope_theta", 500_000.0)),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeDecoderLayer",
        "Ernie4_5_MoeForCausalLM",
        rope_interleaved="half",
        moe=MoEFamily(
            norm_topk=None,
            scores="softmax",
            correction=f"gate.moe_statics.{_CORRECTION}",
            shared=("shared_experts", None),
            top_k="moe_k",
            names_in_files=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
        ),
        tie_word_embeddings=True,
        router_output=True,
        defaults=(("rope_theta", 500_000.0),),
    ),
    "exaone4": Family(
        "Exaone4DecoderLayer",
        "Exaone4ForCausalLM",
        norms=_POST_ONLY,
        qk_norm=_QK_NORM,
        rope_layers=_EXAONE_ROPE,
        sliding_window="layer_types",
    ),
    "exaone_moe": Family(
        "ExaoneMoeDecoderLayer",
        "ExaoneMoeForCausalLM",
        qk_norm=_QK_NORM,
        rope_layers=_EXAONE_ROPE,
        sliding_window="layer_types",
        moe=_GLM_MOE,
        router_output=True,
    ),
    "gemma": Family(
        "GemmaDecoderLayer",
        "GemmaForCausalLM",
        default_activation="gelu_pytorch_tanh",
        unit_offset=True,
        sqrt_embedding=True,
        tie_word_embeddings=True,
        defaults=(("head_dim", 256),),
    ),
    "gemma2": Family(
        "Gemma2DecoderLayer",
        "Gemma2ForCausalLM",
        **_GEMMA,
        softcap="attn_logit_softcapping",
        defaults=(("head_dim", 256), ("sliding_window_pattern", 2), ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)),
    ),
    "gemma3": Family(
        "Gemma3DecoderLayer",
        "Gemma3ForCausalLM",
        **_GEMMA,
        qk_norm=_QK_NORM,
        rope_per_type=True,
        defaults=(("head_dim", 256), ("sliding_window_pattern", 6), ("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    ),
    "gemma4": Family(
        "Gemma4TextDecoderLayer",
        "Gemma4ForCausalLM",
        **{**_GEMMA, "unit_offset": False, "attention_scale": lambda config, head_dim: 1.0},
        qk_norm=_QK_NORM,
        v_norm="v_norm",
        rope_per_type=True,
        kv_sharing=KVSharing(),
        values_are_keys="attention_k_eq_v",
        full_attention_sizes=(
            FullAttentionSize("head_dim", "global_head_dim"),
            FullAttentionSize("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v"),
        ),
        full_attention_last=True,
        per_layer_input=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
        per_layer_embedding=PerLayerEmbedding(),
        layer_scalar="layer_scalar",
        output_class="Gemma4CausalLMOutputWithPast",
        unsupported=("enable_moe_block",),
        defaults=(
            ("head_dim", 256),
            ("global_head_dim", 512),
            ("sliding_window", 512),
            ("sliding_window_pattern", 6),
            ("hidden_size_per_layer_input", 256),
            ("rope_parameters", _GEMMA4_ROPE),
            ("attention_k_eq_v", False),
        ),
    ),
    "glm": Family("GlmDecoderLayer", "GlmForCausalLM", **_GLM, defaults=(*_HEAD_DIM_128, ("partial_rotary_factor", 0.5))),
    "glm4": Family(
        "Glm4DecoderLayer", "Glm4ForCausalLM", **_GLM, norms=_GLM4_NORMS, defaults=(*_HEAD_DIM_128, ("partial_rotary_factor", 0.5))
    ),
    "glm4_moe": Family(
        "Glm4MoeDecoderLayer",
        "Glm4MoeForCausalLM",
        qk_norm=_QK_NORM,
        partial_rotary=True,
        moe=_GLM_MOE,
        router_output=True,
        defaults=(("partial_rotary_factor", 0.5),),
    ),
    "glm4v_moe": Family("Glm4vMoeTextDecoderLayer", partial_rotary=True, moe=_GLM_MOE, mrope=True),
    "gpt_oss": Family(
        "GptOssDecoderLayer",
        "GptOssForCausalLM",
        sinks="sinks",
        sliding_window="layer_types",
        moe=MoEFamily("router", router_bias=True, norm_topk=None, inputs_first=True),
        router_output=True,
        defaults=(("head_dim", 64), ("sliding_window_pattern", 2), _SCALED_ROPE),
    ),
    "granite": Family("GraniteDecoderLayer", "GraniteForCausalLM", **_GRANITE),
    "granitemoe": Family(
        "GraniteMoeDecoderLayer",
        "GraniteMoeForCausalLM",
        **_GRANITE,
        mlp="block_sparse_moe",
        moe=MoEFamily("router", norm_topk=None, names_in_files=_GRANITE_MOE_NAMES),
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridDecoderLayer",
        "GraniteMoeHybridForCausalLM",
        **_GRANITE,
        mlp="shared_mlp",
        gate_up=("input_linear",),
        down_proj="output_linear",
        unsupported=("num_local_experts",),
        required=(("position_embedding_type", "rope"),),
    ),
    "helium": Family(
        "HeliumDecoderLayer", "HeliumForCausalLM", rope_interleaved="half", defaults=(*_HEAD_DIM_128, ("rope_theta", 100_000.0))
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1DecoderLayer", "HunYuanDenseV1ForCausalLM", qk_norm=("query_layernorm", "key_layernorm"), norm_after_rope=True
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1DecoderLayer",
        "HunYuanMoEV1ForCausalLM",
        qk_norm=("query_layernorm", "key_layernorm"),
        norm_after_rope=True,
        moe=MoEFamily(norm_topk=None, router_weight="wg.weight", shared=("shared_mlp", None), top_k="moe_topk"),
    ),
    "hy_v3": Family(
        "HYV3DecoderLayer",
        "HYV3ForCausalLM",
        qk_norm=_QK_NORM,
        moe=MoEFamily(
            norm_topk=None,
            scores="sigmoid",
            correction=_CORRECTION,
            scaling_factor="router_scaling_factor",
            shared=("shared_experts", None),
            names_in_files=(
                (".mlp.expert_bias", f".mlp.{_CORRECTION}"),
                (".mlp.router.gate.", ".mlp.gate."),
                (".mlp.shared_mlp.", ".mlp.shared_experts."),
            ),
        ),
        router_output=True,
        defaults=(*_HEAD_DIM_128, ("rope_theta", 11_158_840.0)),
    ),
    "hyperclovax": Family(
        "HyperCLOVAXDecoderLayer",
        "HyperCLOVAXForCausalLM",
        residual_multiplier="residual_multiplier",
        attention_scale=_by_multiplier,
        embedding_multiplier="embedding_multiplier",
        logits_multiplier="logits_scaling",
        unsupported=("use_post_norm",),
    ),
    "jais2": Family(
        "Jais2DecoderLayer",
        "Jais2ForCausalLM",
        gate_up=("up_proj",),
        gated=False,
        default_activation="relu2",
        layer_norm=True,
        norm_eps="layer_norm_eps",
    ),
    "llama": Family("LlamaDecoderLayer", "LlamaForCausalLM"),
    "mellum": Family(
        "MellumDecoderLayer",
        "MellumForCausalLM",
        qk_norm=_QK_NORM,
        moe=MoEFamily(),
        sliding_window="layer_types",
        rope_per_type=True,
        router_output=True,
        defaults=(*_HEAD_DIM_128, ("rope_theta", 500_000.0), ("rope_local_base_freq", 10_000.0)),
    ),
    "minimax_m2": Family(
        "MiniMaxM2DecoderLayer",
        "MiniMaxM2ForCausalLM",
        qk_norm=_QK_NORM,
        qk_norm_whole=True,
        partial_rotary=True,
        moe=MoEFamily(norm_topk=None, scores="sigmoid", correction=_CORRECTION, names_in_files=_MIXTRAL_NAMES),
        router_output=True,
        defaults=(*_HEAD_DIM_128, ("rope_theta", 5_000_000.0)),
    ),
    "ministral": Family("MinistralDecoderLayer", "MinistralForCausalLM", sliding_window="layer_types"),
    "ministral3": Family(
        "Ministral3DecoderLayer",
        "Ministral3ForCausalLM",
        sliding_window="all",
        query_scale_from="original_max_position_embeddings",
        defaults=(*_HEAD_DIM_128, _SCALED_ROPE),
    ),
    "mistral": Family("MistralDecoderLayer", "MistralForCausalLM", sliding_window="all", defaults=(("sliding_window", 4096),)),
    "mixtral": Family(
        "MixtralDecoderLayer",
        "MixtralForCausalLM",
        sliding_window="all",
        moe=MoEFamily(norm_topk=None, names_in_files=_MIXTRAL_NAMES),
        router_output=True,
        defaults=(("rope_theta", 1_000_000.0),),
    ),
    "nemotron": Family(
        "NemotronDecoderLayer",
        "NemotronForCausalLM",
        gate_up=("up_proj",),
        gated=False,
        default_activation="relu2",
        layer_norm=True,
        norm_eps="norm_eps",
        unit_offset=True,
        partial_rotary=True,
        defaults=(("partial_rotary_factor", 0.5),),
    ),
    "olmo2": Family("Olmo2DecoderLayer", "Olmo2ForCausalLM", norms=_POST_ONLY, qk_norm=_QK_NORM, qk_norm_whole=True),
    "olmo3": Family(
        "Olmo3DecoderLayer",
        "Olmo3ForCausalLM",
        norms=_POST_ONLY,
        qk_norm=_QK_NORM,
        qk_norm_whole=True,
        sliding_window="layer_types",
        rope_per_type=True,
        defaults=(("sliding_window_pattern", 4), ("rope_theta", 500_000.0)),
    ),
    "olmoe": Family(
        "OlmoeDecoderLayer",
        "OlmoeForCausalLM",
        qk_norm=_QK_NORM,
        qk_norm_whole=True,
        moe=MoEFamily(),
        router_output=True,
        unsupported=("clip_qkv",),
    ),
    "phi": Family(
        "PhiDecoderLayer",
        "PhiForCausalLM",
        o_proj="dense",
        gate_up=("fc1",),
        gated=False,
        default_activation="gelu_new",
        down_proj="fc2",
        final_norm="final_layernorm",
        layer_norm=True,
        norm_eps="layer_norm_eps",
        parallel_residual=True,
        norms=_PARALLEL,
        partial_rotary=True,
        unsupported=("qk_layernorm",),
        defaults=(("partial_rotary_factor", 0.5),),
    ),
    "phi3": Family(
        "Phi3DecoderLayer",
        "Phi3ForCausalLM",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        partial_rotary=True,
        sliding_window="all",
    ),
    "qwen2": Family("Qwen2DecoderLayer", "Qwen2ForCausalLM", sliding_window="layer_types"),
    "qwen2_5_vl": Family("Qwen2_5_VLDecoderLayer", sliding_window="layer_types", mrope=True),
    "qwen2_moe": Family(
        "Qwen2MoeDecoderLayer",
        "Qwen2MoeForCausalLM",
        moe=MoEFamily(shared=("shared_expert", "shared_expert_gate")),
        sliding_window="layer_types",
        router_output=True,
    ),
    "qwen2_vl": Family("Qwen2VLDecoderLayer", sliding_window="layer_types", mrope=True),
    "qwen3": Family("Qwen3DecoderLayer", "Qwen3ForCausalLM", qk_norm=_QK_NORM, sliding_window="layer_types", defaults=_HEAD_DIM_128),
    "qwen3_moe": Family(
        "Qwen3MoeDecoderLayer", "Qwen3MoeForCausalLM", qk_norm=_QK_NORM, moe=MoEFamily(), sliding_window="all", router_output=True
    ),
    "qwen3_vl": Family("Qwen3VLTextDecoderLayer", qk_norm=_QK_NORM, mrope=True),
    "qwen3_vl_moe": Family("Qwen3VLMoeTextDecoderLayer", qk_norm=_QK_NORM, moe=MoEFamily(norm_topk=None), mrope=True),
    "seed_oss": Family("SeedOssDecoderLayer", "SeedOssForCausalLM", defaults=_HEAD_DIM_128),
    "smollm3": Family(
        "SmolLM3DecoderLayer",
        "SmolLM3ForCausalLM",
        rope_layers=_SMOLLM3_ROPE,
        sliding_window="layer_types",
        tie_word_embeddings=True,
        defaults=(("rope_theta", 2_000_000.0),),
    ),
    "solar_open": Family(
        "SolarOpenDecoderLayer",
        "SolarOpenForCausalLM",
        partial_rotary=True,
        moe=_GLM_MOE,
        router_output=True,
        defaults=(*_HEAD_DIM_128, ("rope_theta", 1_000_000.0)),
    ),
    "stablelm": Family(
        "StableLmDecoderLayer",
        "StableLmForCausalLM",
        layer_norm=True,
        norm_eps="layer_norm_eps",
        partial_rotary=True,
        unsupported=("use_parallel_residual", "qk_layernorm"),
        defaults=(("partial_rotary_factor", 0.25),),
    ),
    "starcoder2": Family(
        "Starcoder2DecoderLayer",
        "Starcoder2ForCausalLM",
        gate_up=("c_fc",),
        gated=False,
        default_activation="gelu_pytorch_tanh",
        down_proj="c_proj",
        layer_norm=True,
        norm_eps="norm_epsilon",
        sliding_window="all",
        tie_word_embeddings=True,
    ),
    "vaultgemma": Family(
        "VaultGemmaDecoderLayer",
        "VaultGemmaForCausalLM",
        **{**_GEMMA, "norms": ("input_layernorm", None, "pre_feedforward_layernorm", None)},
        softcap="attn_logit_softcapping",
        defaults=(("head_dim", 256), ("sliding_window_pattern", 2), ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)),
    ),
}


def family_of_layer(name: str) -> Family | None:
    """Find the family of a class of decoder layers.

    Args:
        name: Its name within transformers.models, such as "llama.modeling_llama.LlamaDecoderLayer".

    Returns:
        The family, or None where the class is in no family.
    """
    return _LAYERS.get(name)


def family_of_model(name: str) -> Family | None:
    """Find the family of a class of causal language models, named as in `family_of_layer`."""
    return _MODELS.get(name)


_LAYERS = {f"{package}.modeling_{package}.{family.layer_class}": family for package, family in FAMILIES.items()}
_MODELS = {f"{package}.modeling_{package}.{family.model_class}": family for package, family in FAMILIES.items() if family.model_class}
