"""Model families whose layers only transformers computes, such as those with linear attention, multi-head latent attention or AltUp.

halfbyte reads their GGUF files into transformers' models, and writes some. An entry says how tensors, metadata and config.json correspond
(`decoder.family.Family`, `GGUF`): names of tensors and metadata in GGUF are llama.cpp's and come first, transformers' second. A family
moves to decoders.py when `halfbyte.decoder` computes its layers.
"""

from __future__ import annotations

from typing import Any

from halfbyte.decoder.families import gguf_settings as gguf
from halfbyte.decoder.family import GGUF, Family, MoEFamily

_QK_NORM = "q_norm", "k_norm"  # modules of self_attn
_MOE_WITH_SHARED_EXPERT = MoEFamily(shared=("shared_expert", "shared_expert_gate"))

# Linear attention by gated delta nets (Yang and others, arXiv:2412.06464). Files of Qwen3.5 have one tensor for each of transformers'
# projections. Qwen3-Next has two fused projections in transformers, and two such tensors in its older files alone.
_DELTA_NET = {"ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj"}
_DELTA_NET_SEPARATE = {
    **_DELTA_NET,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_DELTA_NET_GGUF: dict[str, Any] = {
    "mlp_norm": "post_attention_norm",
    "parameters": {"ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log"},
    "sizes": {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    "sliding_window": False,
    "read_config": gguf.linear_attention,
}
_DELTA_NET_FAMILY: dict[str, Any] = {"unit_offset": True, "partial_rotary": True, "qk_norm": _QK_NORM}

# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values from low-rank projections a, then b.
_LATENT_ATTENTION: dict[str, Any] = {
    "tensors": {
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
    },
    "experts": gguf.ROUTED,
    "written": False,
}
# Parameters of the activation xIELU and their shapes (Apertus; Huang and Schlag, arXiv:2411.13010).
_XIELU: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
# Alternating updates and learned augmented residual layers (Gemma 3n; arXiv:2301.13310, arXiv:2411.07501).
_ALTUP = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}

# Short convolutions in place of attention in most layers (LFM2).
_LFM2: dict[str, Any] = {
    "qk_norm": ("q_layernorm", "k_layernorm"),
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    "gate_up": ("w1", "w3"),
    "down_proj": "w2",
    "norms": ("operator_norm", None, "ffn_norm", None),
    "final_norm": "embedding_norm",
    "norm_eps": "norm_eps",
}
_LFM2_GGUF: dict[str, Any] = {
    "outer": {"token_embd_norm": "model.embedding_norm"},
    "tensors": {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
    "sizes": {"shortconv.l_cache": "conv_L_cache"},
    "read_layers": gguf.convolution_layers,
}

# Families by the name of their package in transformers.models.
OTHERS: dict[str, Family] = {
    "apertus": Family(
        "Apertus",
        qk_norm=_QK_NORM,
        norms=("attention_layernorm", None, "feedforward_layernorm", None),
        gate_up=("up_proj",),
        gated=False,
        gguf=GGUF(
            "apertus",
            settings={"hidden_act": "xielu", "attention_bias": False},
            lists={f"xielu.{part}": (f"mlp.act_fn.{part}", shape) for part, shape in _XIELU.items()},
            written=False,
        ),
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        qkv=(),
        moe=MoEFamily(shared=("shared_experts", None)),
        gguf=GGUF("deepseek2", **_LATENT_ATTENTION, read_config=gguf.deepseek2),
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        qkv=(),
        moe=MoEFamily(correction="gate.e_score_correction_bias", shared=("shared_experts", None)),
        gguf=GGUF("deepseek2", **_LATENT_ATTENTION, read_config=gguf.latent_attention, known_by={"expert_gating_func": 2}),
    ),
    "gemma3n": Family(
        "Gemma3n",
        layer_class="Gemma3nTextDecoderLayer",
        qk_norm=_QK_NORM,
        norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        rope_per_type=True,
        kv_sharing=True,
        per_layer_input=True,
        gguf=GGUF(
            "gemma3n",
            "gemma3n_text",
            **gguf.IMAGES,
            tensors=_ALTUP,
            parameters={"altup_correct_scale.weight": "altup.correct_output_scale"},
            stacks={"altup_proj.weight": "model.altup_projections", "altup_unembd_proj.weight": "model.altup_unembed_projections"},
            sizes=gguf.PER_LAYER_SIZES,
            local_rope_base=1e4,
            read_layers=gguf.gemma3n_layers,
            merges_by_index=True,
        ),
    ),
    "gpt2": Family(
        "GPT2",
        layer_class="GPT2Block",
        model_class="GPT2LMHeadModel",
        qkv=("c_attn",),
        o_proj="c_proj",
        gate_up=("c_fc",),
        gated=False,
        down_proj="c_proj",
        norms=("ln_1", None, "ln_2", None),
        final_norm="ln_f",
        norm_eps="layer_norm_epsilon",
        layer_norm=True,
        gguf=GGUF(
            "gpt2",
            outer={"token_embd": "transformer.wte", "position_embd": "transformer.wpe"},
            layers="transformer.h",
            attention="attn",
            inputs_first=True,
            read_config=gguf.gpt2,
            written=False,
        ),
    ),
    "lfm2": Family("Lfm2", **_LFM2, gguf=GGUF("lfm2", **_LFM2_GGUF, settings={"conv_bias": False}, write_config=gguf.convolution_metadata)),
    "lfm2_moe": Family(
        "Lfm2Moe",
        **_LFM2,
        moe=MoEFamily(correction="expert_bias"),
        gguf=GGUF(
            "lfm2moe",
            **_LFM2_GGUF,
            experts={**gguf.EXPERTS, "leading_dense_block_count": "num_dense_layers"},
            settings={"conv_bias": False, "use_expert_bias": True},
            normalized=True,
            written=False,
        ),
    ),
    "qwen3_5": Family(
        "Qwen3_5",
        **_DELTA_NET_FAMILY,
        gguf=GGUF("qwen35", "qwen3_5_text", **gguf.IMAGES, **_DELTA_NET_GGUF, tensors=_DELTA_NET_SEPARATE, row_order="tiled"),
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        **_DELTA_NET_FAMILY,
        moe=_MOE_WITH_SHARED_EXPERT,
        gguf=GGUF(
            "qwen35moe",
            "qwen3_5_moe_text",
            **gguf.IMAGES,
            **_DELTA_NET_GGUF,
            tensors=_DELTA_NET_SEPARATE,
            row_order="tiled",
            experts=gguf.SHARED_EXPERT,
            normalized=True,
        ),
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        **_DELTA_NET_FAMILY,
        moe=_MOE_WITH_SHARED_EXPERT,
        gguf=GGUF(
            "qwen3next",
            **_DELTA_NET_GGUF,
            tensors={**_DELTA_NET, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
            joined={"linear_attn.in_proj_qkvz.weight": ("attn_qkv", "attn_gate")},
            row_order="separate",
            experts=gguf.SHARED_EXPERT,
            normalized=True,
            written=False,
        ),
    ),
}
