"""Families of decoders: where each has its parts, which variant of a decoder it computes, and what its GGUF files are like.

One entry of FAMILIES describes a family completely, by the names that config.json, checkpoints and transformers' modules use. `build.py`
reads a specification from it and a checkpoint; `integrations` finds the same parts in live modules; `checkpoint` reads and writes GGUF
files. A layer computes

    h = x + m * post_norm(o_proj(attention(qkv(norm(x)))))
    y = h + m * post_norm(down_proj(act(gate) * up)),  gate, up = gate_up(norm(h))

with m the residual multiplier; or experts in place of the MLP. With `parallel_residual` the MLP reads norm(x), without `gated` it is
down_proj(act(up)). A family belongs into the table if its layers compute this and nothing else.
"""

from __future__ import annotations

from typing import Any

from halfbyte.decoder.families import gguf_settings as gguf
from halfbyte.decoder.family import GGUF, SLIDING, Family, FullAttentionSize, ModelConfig, MoEFamily, RopeLayers


def _by_scalar(config: ModelConfig, head_dim: int) -> float:
    return float(float(config.query_pre_attn_scalar) ** -0.5)


def _by_multiplier(config: ModelConfig, head_dim: int) -> float:
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
_RELU2: dict[str, Any] = {"gate_up": ("up_proj",), "gated": False, "default_activation": "relu2"}
_LAYER_NORM: dict[str, Any] = {"layer_norm": True, "norm_eps": "layer_norm_eps"}
_GLM: dict[str, Any] = {"gate_up": ("gate_up_proj",), "partial_rotary": True, "rope_interleaved": "half"}
_COHERE: dict[str, Any] = {
    **_LAYER_NORM,
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
_HALF_ROTARY = (("partial_rotary_factor", 0.5),)
_GEMMA2_DEFAULTS = ("head_dim", 256), ("sliding_window_pattern", 2), ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)
_CLAMPED_GATES = ("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)
_SCALED_ROPE = ("rope_scaling", "")  # by values that only transformers has, where config.json does not say

# Families by the name of their package in transformers.models.
FAMILIES: dict[str, Family] = {
    "arcee": Family("Arcee", **_RELU2, gguf=GGUF("arcee", row_order="interleaved", settings={**gguf.NO_BIASES, "hidden_act": "relu2"})),
    "cohere": Family(
        "Cohere",
        **_COHERE,
        unsupported=("use_qk_norm",),
        defaults=(("rope_theta", 500_000.0),),
        gguf=GGUF("command-r", settings={"attention_bias": False, "use_qk_norm": False}),
    ),
    "cohere2": Family(
        "Cohere2",
        **_COHERE,
        sliding_window="layer_types",
        rope_layers=_COHERE2_ROPE,
        defaults=(("sliding_window_pattern", 4),),
        gguf=GGUF("cohere2", settings={"attention_bias": False}),
    ),
    "cwm": Family("Cwm", sliding_window="layer_types", defaults=(*_HEAD_DIM_128, ("rope_theta", 1_000_000.0), _SCALED_ROPE)),
    "dots1": Family(
        "Dots1",
        qk_norm=_QK_NORM,
        moe=_GLM_MOE,
        sliding_window="layer_types",
        gguf=GGUF("dots1", experts=gguf.ROUTED, written=False),
    ),
    "ernie4_5": Family(
        "Ernie4_5",
        rope_interleaved="half",
        tie_word_embeddings=True,
        defaults=(*_HEAD_DIM_128, ("rope_theta", 500_000.0)),
        gguf=GGUF("ernie4_5", settings={"use_bias": False}),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_Moe",
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
        defaults=(("rope_theta", 500_000.0),),
        gguf=GGUF("ernie4_5-moe", settings={"use_bias": False}, written=False, experts=gguf.ERNIE_EXPERTS),
    ),
    "exaone4": Family(
        "Exaone4",
        norms=_POST_ONLY,
        qk_norm=_QK_NORM,
        rope_layers=_EXAONE_ROPE,
        sliding_window="layer_types",
        gguf=GGUF("exaone4", implied=gguf.window_by_depth(64)),
    ),
    "exaone_moe": Family("ExaoneMoe", qk_norm=_QK_NORM, rope_layers=_EXAONE_ROPE, sliding_window="layer_types", moe=_GLM_MOE),
    "flint": Family(
        "Flint",
        qk_norm=_QK_NORM,
        sinks="sinks",
        sliding_window="layer_types",
        rope_layers=_COHERE2_ROPE,
        moe=MoEFamily(scores="sigmoid", shared=("shared_expert", None)),
        defaults=_HEAD_DIM_128,
    ),
    "gemma": Family(
        "Gemma",
        default_activation="gelu_pytorch_tanh",
        unit_offset=True,
        sqrt_embedding=True,
        tie_word_embeddings=True,
        defaults=(("head_dim", 256),),
        gguf=GGUF("gemma", merges_by_index=True),
    ),
    "gemma2": Family(
        "Gemma2",
        **_GEMMA,
        softcap="attn_logit_softcapping",
        defaults=_GEMMA2_DEFAULTS,
        gguf=GGUF("gemma2", implied=gguf.query_scalar(46), merges_by_index=True),
    ),
    "gemma3": Family(
        "Gemma3",
        **_GEMMA,
        qk_norm=_QK_NORM,
        rope_per_type=True,
        defaults=(("head_dim", 256), ("sliding_window_pattern", 6), ("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
        gguf=GGUF("gemma3", "gemma3_text", implied=gguf.query_scalar(62), local_rope_base=1e4, merges_by_index=True),
    ),
    "gemma4": Family(
        "Gemma4",
        layer_class="Gemma4TextDecoderLayer",
        **{**_GEMMA, "unit_offset": False, "attention_scale": lambda config, head_dim: 1.0},
        qk_norm=_QK_NORM,
        v_norm="v_norm",
        rope_per_type=True,
        kv_sharing=True,
        values_are_keys="attention_k_eq_v",
        full_attention_sizes=(
            FullAttentionSize("head_dim", "global_head_dim"),
            FullAttentionSize("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v"),
        ),
        full_attention_last=True,
        per_layer_input=True,
        layer_scalar="layer_scalar",
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
        gguf=gguf.GEMMA4,
        other_gguf=(gguf.GEMMA4_EXPERTS,),
    ),
    "glm": Family("Glm", **_GLM, defaults=_HEAD_DIM_128 + _HALF_ROTARY),
    "glm4": Family("Glm4", **_GLM, norms=_GLM4_NORMS, defaults=_HEAD_DIM_128 + _HALF_ROTARY, gguf=GGUF("glm4", biases=gguf.QKV_BIAS)),
    "glm4_moe": Family(
        "Glm4Moe",
        qk_norm=_QK_NORM,
        partial_rotary=True,
        moe=_GLM_MOE,
        defaults=_HALF_ROTARY,
        gguf=GGUF(
            "glm4moe", mlp_norm="post_attention_norm", experts=gguf.ROUTED, biases={"use_qk_norm": "attn_q_norm.weight"}, written=False
        ),
    ),
    "glm4v_moe": Family("Glm4vMoeText", model_class=None, partial_rotary=True, moe=_GLM_MOE, mrope=True),
    "gpt_oss": Family(
        "GptOss",
        sinks="sinks",
        sliding_window="layer_types",
        moe=MoEFamily("router", router_bias=True, norm_topk=None, inputs_first=True, clamped=("swiglu_alpha", "swiglu_limit")),
        defaults=(("head_dim", 64), ("sliding_window_pattern", 2), ("rope_theta", 150_000.0), *_CLAMPED_GATES, _SCALED_ROPE),
        gguf=GGUF(
            "gpt-oss",
            mlp_norm="post_attention_norm",
            experts=gguf.LOCAL_EXPERTS,
            untied=True,
            yarn={"truncate": False},
            write_config=gguf.expert_size,
        ),
    ),
    "granite": Family(
        "Granite", **_GRANITE, gguf=GGUF("granite", row_order="interleaved", numbers=gguf.ATTENTION_SCALE, biases=gguf.BIASES)
    ),
    "granitemoe": Family(
        "GraniteMoe",
        **_GRANITE,
        mlp="block_sparse_moe",
        moe=MoEFamily("router", norm_topk=None, names_in_files=_GRANITE_MOE_NAMES),
        gguf=GGUF("granitemoe", row_order="interleaved", numbers=gguf.ATTENTION_SCALE, experts=gguf.LOCAL_EXPERTS),
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        **_GRANITE,
        mlp="shared_mlp",
        gate_up=("input_linear",),
        down_proj="output_linear",
        unsupported=("num_local_experts",),
        required=(("position_embedding_type", "rope"),),
        gguf=gguf.GRANITE_HYBRID,
        other_gguf=(gguf.GRANITE_HYBRID_EXPERTS,),
    ),
    "helium": Family("Helium", rope_interleaved="half", defaults=(*_HEAD_DIM_128, ("rope_theta", 100_000.0))),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1",
        qk_norm=("query_layernorm", "key_layernorm"),
        norm_after_rope=True,
        gguf=GGUF("hunyuan-dense", rope_alpha=True, settings={"attention_bias": False}),
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1",
        qk_norm=("query_layernorm", "key_layernorm"),
        norm_after_rope=True,
        moe=MoEFamily(norm_topk=None, router_weight="wg.weight", shared=("shared_mlp", None), top_k="moe_topk"),
    ),
    "hy_v3": Family(
        "HYV3",
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
        defaults=(*_HEAD_DIM_128, ("rope_theta", 11_158_840.0)),
    ),
    "hyperclovax": Family(
        "HyperCLOVAX",
        residual_multiplier="residual_multiplier",
        attention_scale=_by_multiplier,
        embedding_multiplier="embedding_multiplier",
        logits_multiplier="logits_scaling",
        unsupported=("use_post_norm",),
    ),
    "jais2": Family("Jais2", **_RELU2, **_LAYER_NORM),
    "llama": Family(
        "Llama",
        gguf=GGUF("llama", row_order="interleaved", biases=gguf.BIASES),
        other_gguf=(GGUF("exaone", written=False), GGUF("internlm2", row_order="interleaved", written=False)),
    ),
    "mellum": Family(
        "Mellum",
        qk_norm=_QK_NORM,
        moe=MoEFamily(),
        sliding_window="layer_types",
        rope_per_type=True,
        defaults=(*_HEAD_DIM_128, ("rope_theta", 500_000.0), ("rope_local_base_freq", 10_000.0)),
    ),
    "minimax_m2": Family(
        "MiniMaxM2",
        qk_norm=_QK_NORM,
        qk_norm_whole=True,
        partial_rotary=True,
        moe=MoEFamily(norm_topk=None, scores="sigmoid", correction=_CORRECTION, names_in_files=_MIXTRAL_NAMES),
        defaults=(*_HEAD_DIM_128, ("rope_theta", 5_000_000.0)),
        gguf=GGUF("minimax-m2", experts=gguf.LOCAL_EXPERTS, written=False),
    ),
    "ministral": Family("Ministral", sliding_window="layer_types"),
    "ministral3": Family(
        "Ministral3",
        sliding_window="all",
        query_scale_from="original_max_position_embeddings",
        defaults=(*_HEAD_DIM_128, _SCALED_ROPE),
        gguf=GGUF("mistral3", row_order="interleaved", yarn={"mscale": 1.0, "llama_4_scaling_beta": 0.0}),
    ),
    "mistral": Family(
        "Mistral",
        sliding_window="all",
        defaults=(("sliding_window", 4096),),
        gguf=GGUF("llama", row_order="interleaved", known_by={"attention.sliding_window": None}),
    ),
    "mixtral": Family(
        "Mixtral",
        sliding_window="all",
        moe=MoEFamily(norm_topk=None, names_in_files=_MIXTRAL_NAMES),
        defaults=(("rope_theta", 1_000_000.0),),
        gguf=GGUF("llama", row_order="interleaved", experts=gguf.LOCAL_EXPERTS),
    ),
    "nemotron": Family(
        "Nemotron",
        **_RELU2,
        layer_norm=True,
        norm_eps="norm_eps",
        unit_offset=True,
        partial_rotary=True,
        defaults=_HALF_ROTARY,
        gguf=GGUF("nemotron", biases=gguf.BIASES, settings={"hidden_act": "relu2"}),
    ),
    "olmo2": Family("Olmo2", norms=_POST_ONLY, qk_norm=_QK_NORM, qk_norm_whole=True, gguf=GGUF("olmo2")),
    "olmo3": Family(
        "Olmo3",
        norms=_POST_ONLY,
        qk_norm=_QK_NORM,
        qk_norm_whole=True,
        sliding_window="layer_types",
        rope_per_type=True,
        defaults=(("sliding_window_pattern", 4), ("rope_theta", 500_000.0)),
        gguf=GGUF("olmo2", known_by={"attention.sliding_window": None}, settings={"attention_bias": False}),
    ),
    "olmoe": Family(
        "Olmoe",
        qk_norm=_QK_NORM,
        qk_norm_whole=True,
        moe=MoEFamily(),
        unsupported=("clip_qkv",),
        gguf=GGUF("olmoe", experts=gguf.COUNTS, untied=True),
    ),
    "phi": Family(
        "Phi",
        o_proj="dense",
        gate_up=("fc1",),
        gated=False,
        default_activation="gelu_new",
        down_proj="fc2",
        final_norm="final_layernorm",
        **_LAYER_NORM,
        parallel_residual=True,
        norms=_PARALLEL,
        partial_rotary=True,
        unsupported=("qk_layernorm",),
        defaults=_HALF_ROTARY,
        gguf=GGUF("phi2", settings={"qk_layernorm": False, "hidden_act": "gelu_new"}),
    ),
    "phi3": Family(
        "Phi3",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        partial_rotary=True,
        sliding_window="all",
        gguf=GGUF("phi3", read_config=gguf.original_positions),
    ),
    "qwen2": Family(
        "Qwen2",
        sliding_window="layer_types",
        gguf=GGUF("qwen2", sliding_window=False),
        other_gguf=(GGUF("qwen2vl", **gguf.IMAGES, sliding_window=False),),
    ),
    "qwen2_5_vl": Family("Qwen2_5_VL", model_class=None, sliding_window="layer_types", mrope=True),
    "qwen2_moe": Family(
        "Qwen2Moe",
        moe=MoEFamily(shared=("shared_expert", "shared_expert_gate")),
        sliding_window="layer_types",
        gguf=GGUF("qwen2moe", experts=gguf.SHARED_EXPERT, untied=True, sliding_window=False),
    ),
    "qwen2_vl": Family("Qwen2VL", model_class=None, sliding_window="layer_types", mrope=True),
    "qwen3": Family(
        "Qwen3",
        qk_norm=_QK_NORM,
        sliding_window="layer_types",
        defaults=_HEAD_DIM_128,
        gguf=GGUF("qwen3", sliding_window=False),
        other_gguf=(GGUF("qwen3vl", **gguf.IMAGES, sliding_window=False),),
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        qk_norm=_QK_NORM,
        moe=MoEFamily(),
        sliding_window="all",
        gguf=GGUF("qwen3moe", experts=gguf.EXPERTS, normalized=True, sliding_window=False),
        other_gguf=(GGUF("qwen3vlmoe", **gguf.IMAGES, sliding_window=False, experts=gguf.EXPERTS, normalized=True),),
    ),
    "qwen3_vl": Family("Qwen3VLText", model_class=None, qk_norm=_QK_NORM, mrope=True),
    "qwen3_vl_moe": Family("Qwen3VLMoeText", model_class=None, qk_norm=_QK_NORM, moe=MoEFamily(norm_topk=None), mrope=True),
    "seed_oss": Family(
        "SeedOss",
        defaults=_HEAD_DIM_128,
        gguf=GGUF(
            "seed_oss", mlp_norm="post_attention_norm", biases=gguf.QKV_BIAS, settings={"mlp_bias": False, "attention_out_bias": False}
        ),
    ),
    "smollm3": Family(
        "SmolLM3",
        rope_layers=_SMOLLM3_ROPE,
        sliding_window="layer_types",
        tie_word_embeddings=True,
        defaults=(("rope_theta", 2_000_000.0),),
        gguf=GGUF(
            "smollm3",
            row_order="interleaved",
            sliding_window=False,
            settings={**gguf.NO_BIASES, "no_rope_layer_interval": 4, "use_sliding_window": False},
            implied=lambda config: {"no_rope_layers": gguf.every_fourth_is_0(config)},
        ),
    ),
    "solar_open": Family("SolarOpen", partial_rotary=True, moe=_GLM_MOE, defaults=(*_HEAD_DIM_128, ("rope_theta", 1_000_000.0))),
    "stablelm": Family(
        "StableLm",
        **_LAYER_NORM,
        partial_rotary=True,
        unsupported=("use_parallel_residual", "qk_layernorm"),
        defaults=(("partial_rotary_factor", 0.25),),
        gguf=GGUF("stablelm", biases={"use_qkv_bias": "attn_q"}, settings={"qk_layernorm": False, "use_parallel_residual": False}),
    ),
    "starcoder2": Family(
        "Starcoder2",
        gate_up=("c_fc",),
        gated=False,
        default_activation="gelu_pytorch_tanh",
        down_proj="c_proj",
        layer_norm=True,
        norm_eps="norm_epsilon",
        sliding_window="all",
        tie_word_embeddings=True,
        gguf=GGUF("starcoder2", settings={"use_bias": True}),
    ),
    "vaultgemma": Family(
        "VaultGemma",
        **{**_GEMMA, "norms": ("input_layernorm", None, "pre_feedforward_layernorm", None)},
        softcap="attn_logit_softcapping",
        defaults=_GEMMA2_DEFAULTS,
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
