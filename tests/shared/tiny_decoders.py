"""Tiny decoders of transformers' families, with random weights and the settings in which families differ from Llama.

KINDS     configs of models of three layers, by family
MIXTURES  functions that make models with experts
CASES     functions that make a model for each family of `halfbyte.decoder.families`, by the name of its decoder layer
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from language_model import make_decoder
from torch import nn


def make_config(kind: str, **settings: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**settings)


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
SIZES |= {"num_hidden_layers": 3, "vocab_size": 99, "initializer_range": 0.2, **TOKENS}
WITHOUT = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"hidden_size": 96}  # heads of 16
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
ROPES = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 5e5), ("sliding_attention", 1e4))}
GEMMA = {**SIZES, "query_pre_attn_scalar": 10}
GEMMA4 = {**SIZES, "global_head_dim": 24, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 1.5, "num_hidden_layers": 4}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 99}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(8)]}
LONGROPE |= {"long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 70}
GLM = {**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 2.5}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 100, "llama_4_scaling_beta": 0.7}
KINDS: dict[str, Callable[[], Any]] = {
    "gemma": partial(make_config, "Gemma", **SIZES),
    "gemma2": partial(make_config, "Gemma2", **GEMMA, **MIXED, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "gemma2 without caps": partial(make_config, "Gemma2", **GEMMA, **MIXED, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": partial(make_config, "Gemma3Text", **GEMMA, **MIXED, rope_parameters=ROPES, final_logit_softcapping=1.5),
    "gemma4": partial(make_config, "Gemma4Text", **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4, inputs of layers' own": partial(
        make_config, "Gemma4Text", **GEMMA4 | PER_LAYER, num_kv_shared_layers=2, use_double_wide_mlp=True
    ),
    "gemma4, inputs of layers' own, no keys in common": partial(make_config, "Gemma4Text", **GEMMA4 | PER_LAYER),
    "granite": partial(
        make_config,
        "Granite",
        **WITHOUT,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        embedding_multiplier=7.0,
        logits_scaling=3.0,
    ),
    "granite4": partial(
        make_config,
        "GraniteMoeHybrid",
        **WITHOUT,
        num_local_experts=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        mamba_n_heads=8,
        layer_types=["attention"] * 3,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        embedding_multiplier=7.0,
        logits_scaling=3.0,
    ),
    "arcee": partial(make_config, "Arcee", **SIZES),
    "hyperclovax": partial(
        make_config,
        "HyperCLOVAX",
        **WITHOUT,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        embedding_multiplier=7.0,
        logits_scaling=0.4,
        use_post_norm=False,
    ),
    "cohere": partial(make_config, "Cohere", **WITHOUT, logit_scale=0.3),
    "cohere2": partial(make_config, "Cohere2", **SIZES, **MIXED, logit_scale=0.3),
    "jais2": partial(make_config, "Jais2", **SIZES),
    "nemotron": partial(make_config, "Nemotron", **SIZES),
    "stablelm": partial(make_config, "StableLm", **WITHOUT | {"num_attention_heads": 3, "num_key_value_heads": 1}, use_qkv_bias=True),
    "starcoder2": partial(make_config, "Starcoder2", **WITHOUT, sliding_window=9),
    "cwm": partial(make_config, "Cwm", **SIZES, **MIXED),
    "dots1": partial(make_config, "Dots1", **GLM, **MIXED, n_routed_experts=8, n_shared_experts=1),
    "ernie4_5": partial(make_config, "Ernie4_5", **SIZES, use_bias=True),
    "exaone4": partial(make_config, "Exaone4", **SIZES, **MIXED),
    "exaone_moe": partial(make_config, "ExaoneMoe", **GLM, **MIXED, mlp_layer_types=["dense", "sparse", "sparse"]),
    "glm4": partial(make_config, "Glm4", **SIZES),
    "mellum": partial(
        make_config, "Mellum", **SIZES, **MIXED, rope_parameters=ROPES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64
    ),
    "gpt_oss": partial(make_config, "GptOss", **SIZES, **MIXED, num_local_experts=8, num_experts_per_tok=3),
    "hunyuan_v1_dense": partial(make_config, "HunYuanDenseV1", **SIZES),
    "helium": partial(make_config, "Helium", **SIZES | {"hidden_size": 96}),
    "olmoe": partial(make_config, "Olmoe", **WITHOUT, num_experts=8, num_experts_per_tok=3),
    "ministral": partial(make_config, "Ministral", **SIZES, **MIXED),
    "ministral3": lambda: transformers.Ministral3Config(**SIZES, rope_parameters=YARN),
    "olmo2": partial(make_config, "Olmo2", **WITHOUT),
    "olmo3": partial(make_config, "Olmo3", **WITHOUT, **MIXED),
    "phi3": partial(make_config, "Phi3", **WITHOUT),
    "phi3, far texts": lambda: transformers.Phi3Config(
        **WITHOUT, original_max_position_embeddings=70, max_position_embeddings=200, rope_parameters=LONGROPE
    ),
    "phi3, a part of each head, a window": partial(
        make_config,
        "Phi3",
        **WITHOUT | {"num_attention_heads": 3, "num_key_value_heads": 1},
        partial_rotary_factor=0.75,
        sliding_window=7,
    ),
    "seed_oss": partial(make_config, "SeedOss", **SIZES),
    "vaultgemma": partial(make_config, "VaultGemma", **GEMMA, **MIXED, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "smollm3": partial(make_config, "SmolLM3", **SIZES, no_rope_layers=[1, 0, 1]),
    "smollm3, windows, no positions first": partial(
        make_config, "SmolLM3", **SIZES, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=5
    ),
}

MIXTURE_SIZES: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 96}
SPARSE = {**MIXTURE_SIZES, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
FLINT = {**SPARSE, **MIXED, "head_dim": 24, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0], "num_hidden_layers": 3}
GPT_OSS = {**MIXTURE_SIZES, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64}
SCORED = {
    **MIXTURE_SIZES,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "head_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GLM_MOE = {**SCORED, "n_routed_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.5}
ALL_FULL = {"layer_types": ["full_attention"] * 2}
MIXTURES: dict[str, Callable[..., Any]] = {
    "mixtral": partial(make_decoder, "Mixtral", **MIXTURE_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "granite": partial(
        make_decoder,
        "GraniteMoe",
        **MIXTURE_SIZES | {"intermediate_size": 64},
        num_local_experts=8,
        num_experts_per_tok=3,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        embedding_multiplier=7.0,
        logits_scaling=3.0,
    ),
    "qwen2": partial(make_decoder, "Qwen2Moe", **SPARSE, shared_expert_intermediate_size=32),
    "qwen3": partial(make_decoder, "Qwen3Moe", **SPARSE, head_dim=16, norm_topk_prob=True),
    "qwen3, one layer without experts": partial(
        make_decoder, "Qwen3Moe", **SPARSE, head_dim=16, num_hidden_layers=3, norm_topk_prob=False, mlp_only_layers=[1]
    ),
    "olmoe": partial(make_decoder, "Olmoe", **SPARSE | {"intermediate_size": 64}, pad_token_id=0, eos_token_id=2),
    "gpt-oss": partial(make_decoder, "GptOss", **GPT_OSS, **ALL_FULL, pad_token_id=0, eos_token_id=2),
    "glm4": partial(make_decoder, "Glm4Moe", **GLM_MOE | {"head_dim": 32}, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True),
    "glm4, without norms of heads": partial(make_decoder, "Glm4Moe", **GLM_MOE | {"head_dim": 32}, first_k_dense_replace=0),
    "dots1": partial(make_decoder, "Dots1", **GLM_MOE, **ALL_FULL, norm_topk_prob=False),
    "solar_open": partial(make_decoder, "SolarOpen", **GLM_MOE),
    "exaone": partial(
        make_decoder, "ExaoneMoe", **SCORED, **ALL_FULL, num_experts=8, mlp_layer_types=["dense", "sparse"], routed_scaling_factor=2.5
    ),
    "hunyuan": partial(
        make_decoder,
        "HunYuanMoEV1",
        **MIXTURE_SIZES | {"intermediate_size": 64, "head_dim": 24},
        num_experts=8,
        moe_topk=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "minimax_m2": partial(make_decoder, "MiniMaxM2", **SCORED | {"head_dim": 32, "intermediate_size": 64}, num_local_experts=8),
    "hy_v3": partial(make_decoder, "HYV3", **SCORED, num_local_experts=8, router_scaling_factor=2.0, mlp_layer_types=["dense", "sparse"]),
    "ernie4_5": partial(
        make_decoder, "Ernie4_5_Moe", **MIXTURE_SIZES, moe_num_experts=8, moe_k=3, moe_intermediate_size=64, moe_num_shared_experts=2
    ),
}


def from_kind(kind: str) -> Any:
    # Gemma 2's attention: older versions of transformers have another default, which leaves the cap out.
    attention = {"attn_implementation": "eager"} if kind.startswith(("gemma2", "vaultgemma")) else {}
    return transformers.AutoModelForCausalLM.from_config(KINDS[kind](), **attention)  # type: ignore[no-untyped-call]


def vary_(model: nn.Module) -> None:
    """Sets norms, biases, sinks and scalars, which are initialized to zeros and ones, to random values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in ("norm", "bias", "sinks", "scalar")):
            nn.init.normal_(tensor, 0.5, 0.3)


def multimodal_config(kind: str, **text: Any) -> Any:
    """Of a text model within a model of images."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1] if kind == "Glm4vMoe" else [4, 2, 2]}
    width = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    return getattr(transformers, f"{kind}Config")(
        text_config={**WITHOUT, **width, "rope_parameters": rope, **text},
        vision_config={"depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48},
    )


def _multimodal(kind: str, **text: Any) -> Any:
    return getattr(transformers, f"{kind}ForConditionalGeneration")(multimodal_config(kind, **text))


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
_GLM4V = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
CASES: dict[str, Callable[[], Any]] = {
    "ArceeDecoderLayer": partial(from_kind, "arcee"),
    "Cohere2DecoderLayer": partial(from_kind, "cohere2"),
    "CohereDecoderLayer": partial(from_kind, "cohere"),
    "CwmDecoderLayer": partial(from_kind, "cwm"),
    "Dots1DecoderLayer": partial(from_kind, "dots1"),
    "Ernie4_5DecoderLayer": partial(from_kind, "ernie4_5"),
    "Ernie4_5_MoeDecoderLayer": MIXTURES["ernie4_5"],
    "Exaone4DecoderLayer": partial(from_kind, "exaone4"),
    "ExaoneMoeDecoderLayer": partial(from_kind, "exaone_moe"),
    "FlintDecoderLayer": partial(make_decoder, "Flint", **FLINT),
    "Gemma2DecoderLayer": partial(from_kind, "gemma2"),
    "Gemma2DecoderLayer, no caps": partial(from_kind, "gemma2 without caps"),
    "Gemma3DecoderLayer": partial(from_kind, "gemma3"),
    "Gemma4TextDecoderLayer": partial(from_kind, "gemma4"),
    "Gemma4TextDecoderLayer, shared keys": partial(from_kind, "gemma4, inputs of layers' own"),
    "GemmaDecoderLayer": partial(from_kind, "gemma"),
    "Glm4DecoderLayer": partial(from_kind, "glm4"),
    "Glm4MoeDecoderLayer": MIXTURES["glm4"],
    "Glm4vMoeTextDecoderLayer": partial(_multimodal, "Glm4vMoe", **_GLM4V),
    "GlmDecoderLayer": partial(make_decoder, "Glm", **SIZES),
    "GptOssDecoderLayer": partial(from_kind, "gpt_oss"),
    "GraniteDecoderLayer": partial(from_kind, "granite"),
    "GraniteMoeDecoderLayer": MIXTURES["granite"],
    "GraniteMoeHybridDecoderLayer": partial(from_kind, "granite4"),
    "HYV3DecoderLayer": MIXTURES["hy_v3"],
    "HeliumDecoderLayer": partial(from_kind, "helium"),
    "HunYuanMoEV1DecoderLayer": MIXTURES["hunyuan"],
    "HyperCLOVAXDecoderLayer": partial(from_kind, "hyperclovax"),
    "HunYuanDenseV1DecoderLayer": partial(from_kind, "hunyuan_v1_dense"),
    "Jais2DecoderLayer": partial(from_kind, "jais2"),
    "LlamaDecoderLayer": partial(make_decoder, "Llama", **SIZES),
    "MellumDecoderLayer": partial(from_kind, "mellum"),
    "MiniMaxM2DecoderLayer": MIXTURES["minimax_m2"],
    "Ministral3DecoderLayer": partial(from_kind, "ministral3"),
    "MinistralDecoderLayer": partial(from_kind, "ministral"),
    "MistralDecoderLayer": partial(make_decoder, "Mistral", **SIZES, sliding_window=9),
    "MixtralDecoderLayer": MIXTURES["mixtral"],
    "NemotronDecoderLayer": partial(from_kind, "nemotron"),
    "Olmo2DecoderLayer": partial(from_kind, "olmo2"),
    "Olmo3DecoderLayer": partial(from_kind, "olmo3"),
    "OlmoeDecoderLayer": partial(from_kind, "olmoe"),
    "Phi3DecoderLayer": partial(from_kind, "phi3"),
    "Phi3DecoderLayer, longrope": partial(from_kind, "phi3, far texts"),
    "Phi3DecoderLayer, partial, a window": partial(from_kind, "phi3, a part of each head, a window"),
    "PhiDecoderLayer": partial(make_decoder, "Phi", **WITHOUT | {"num_attention_heads": 3, "num_key_value_heads": 1}),
    "Qwen2DecoderLayer": partial(make_decoder, "Qwen2", **WITHOUT),
    "Qwen2MoeDecoderLayer": MIXTURES["qwen2"],
    "Qwen2VLDecoderLayer": partial(_multimodal, "Qwen2VL"),
    "Qwen2_5_VLDecoderLayer": partial(_multimodal, "Qwen2_5_VL"),
    "Qwen3DecoderLayer": partial(make_decoder, "Qwen3", **SIZES),
    "Qwen3MoeDecoderLayer": MIXTURES["qwen3, one layer without experts"],
    "Qwen3VLMoeTextDecoderLayer": partial(_multimodal, "Qwen3VLMoe", head_dim=16, **EXPERTS),
    "Qwen3VLTextDecoderLayer": partial(_multimodal, "Qwen3VL", head_dim=16),
    "SeedOssDecoderLayer": partial(from_kind, "seed_oss"),
    "SmolLM3DecoderLayer": partial(from_kind, "smollm3, windows, no positions first"),
    "SolarOpenDecoderLayer": MIXTURES["solar_open"],
    "StableLmDecoderLayer": partial(from_kind, "stablelm"),
    "Starcoder2DecoderLayer": partial(from_kind, "starcoder2"),
    "VaultGemmaDecoderLayer": partial(from_kind, "vaultgemma"),
}
