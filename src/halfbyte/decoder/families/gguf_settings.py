"""What GGUF files of several families have in common, and settings that they express in a way of their own: functions for
`GGUF.implied`, `read_layers`, `read_config` and `write_config`.

Source: llama.cpp, src/llama-model.cpp, and its converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from halfbyte.decoder.family import GGUF, SLIDING, Config
from halfbyte.errors import CheckpointError
from halfbyte.layouts.base import round_up

if TYPE_CHECKING:
    from halfbyte.io.gguf import Value
    from halfbyte.io.gguf_metadata import Metadata

Layers = tuple[dict[str, object], Mapping[str, int]]
_KV, _INNER = "attention.head_count_kv", "feed_forward_length"
_WINDOWS, _FULL = "attention.sliding_window_pattern", "full_attention"
_LATENT = ("key_length_mla", "key_length", "value_length_mla", "value_length", "kv_lora_rank", "q_lora_rank")
MOST_LAYERS = 10_000  # for which a list of layer types is made


# Sizes of mixtures of experts: keys of the metadata, and of config.json
COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
EXPERTS = {**COUNTS, "expert_feed_forward_length": "moe_intermediate_size"}
SHARED_EXPERT = {**EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
ERNIE_EXPERTS = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "moe_num_shared_experts",
    "leading_dense_block_count": "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
}
# Settings that follow from whether layers have biases, or that do not differ, and numbers.
BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
QKV_BIAS = {"attention_bias": "attn_q"}
NO_BIASES = dict.fromkeys(BIASES, False)
ATTENTION_SCALE = {"attention.scale": "attention_multiplier"}
PER_LAYER_SIZES = {
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
}
IMAGES: dict[str, Any] = {"written": False, "note": "the model in the file also takes images; this is its language model"}


# Attention


def expert_size(config: Config) -> dict[str, Value]:
    """Return the size of experts as llama.cpp reads it where files of other experts have it in feed_forward_length alone."""
    return {"expert_feed_forward_length": int(config["intermediate_size"])}


def query_scalar(layers: int) -> Callable[[Config], dict[str, object]]:
    """No file has the scale of attention: llama.cpp recognizes the model of another one by its number of `layers`."""

    def implied(config: Config) -> dict[str, object]:
        width = config["hidden_size"] // max(1, config["num_attention_heads"])
        return {"query_pre_attn_scalar": width if config["num_hidden_layers"] == layers else config.get("head_dim") or width}

    return implied


def window_by_depth(layers: int) -> Callable[[Config], dict[str, object]]:
    """No file says whether layers have a sliding window: llama.cpp recognizes the model with three of four by its number of `layers`."""

    def implied(config: Config) -> dict[str, object]:
        slides = config["num_hidden_layers"] == layers
        kinds = [SLIDING if slides and use else _FULL for use in every_fourth_is_0(config)]
        return {"layer_types": kinds} if slides else {"layer_types": kinds, "sliding_window": None}

    return implied


def every_fourth_is_0(config: Config) -> list[int]:
    """1 for each layer, 0 for each fourth."""
    return [int((i + 1) % 4 != 0) for i in range(min(config["num_hidden_layers"], MOST_LAYERS))]


def original_positions(metadata: Metadata, config: Config) -> dict[str, object]:
    """Phi 3 has the number of positions before scaling in config.json itself, too."""
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings") if "partial_rotary_factor" in rope else None
    return {} if original is None else {"original_max_position_embeddings": original}


def latent_attention(metadata: Metadata, config: Config) -> dict[str, object]:
    """Sizes of latent attention (DeepSeek-V2), and its yarn, whose `mscale` is there a tenth."""
    given = {key: metadata.number(f"attention.{key}", needed=False) for key in _LATENT}
    rotated = metadata.number("rope.dimension_count")
    # Files from before 2025 have the lengths of heads under the names that other models have.
    length, value = given["key_length_mla"] or given["key_length"], given["value_length_mla"] or given["value_length"]
    if length is None or value is None or given["kv_lora_rank"] is None or length <= rotated:
        raise CheckpointError(f"the GGUF file says {length}, {value}, {given['kv_lora_rank']} for sizes of latent attention: it is damaged")
    rope = config["rope_parameters"]
    if rope.get("mscale_all_dim"):
        rope = rope | dict.fromkeys(("mscale", "mscale_all_dim"), rope["mscale_all_dim"] / 0.1)
    return {
        "q_lora_rank": given["q_lora_rank"],
        "kv_lora_rank": given["kv_lora_rank"],
        "qk_nope_head_dim": length - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "head_dim": rotated,
        "num_key_value_heads": config["num_attention_heads"],
        "rope_parameters": rope,
    }


def deepseek2(metadata: Metadata, config: Config) -> dict[str, object]:
    """Latent attention, and how experts are chosen, which follows from the number of their groups."""
    return latent_attention(metadata, config) | {"topk_method": "greedy" if config["n_group"] == 1 else "group_limited_greedy"}


# Layers that are not attention


def linear_attention(metadata: Metadata, config: Config) -> dict[str, object]:
    """Gated delta nets in place of attention, but in every `full_attention_interval`-th layer."""
    every = metadata.number("full_attention_interval", needed=False) or 4
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    inner = metadata.number("ssm.inner_size")
    if min(every, inner, keys, values) < 1 or values % keys or inner % values:
        raise CheckpointError(f"the GGUF file has {keys} key heads and {values} value heads of {inner} in all: it is damaged")
    layers = range(min(config["num_hidden_layers"], MOST_LAYERS))
    kinds = ["linear_attention" if (i + 1) % every else _FULL for i in layers]
    return {"layer_types": kinds, "linear_value_head_dim": inner // values}


def mamba_layers(metadata: Metadata, names: Sequence[str]) -> Layers:
    """Mamba 2 in place of attention where the number of key heads is 0 (Granite 4)."""
    inner, heads = metadata.number("ssm.inner_size"), metadata.by_layer(_KV)
    shared = metadata.number("expert_shared_feed_forward_length", needed=False)
    width, count = metadata.number("embedding_length"), metadata.number("ssm.time_step_rank")
    if min(inner, width, count) < 1 or inner % width or inner % count:
        raise CheckpointError(f"the GGUF file has {count} heads of Mamba of {inner} in all, for {width} inputs: it is damaged")
    config = {
        "layer_types": ["attention" if each else "mamba" for each in heads],
        "mamba_expand": inner // width,
        "mamba_d_head": inner // count,
        "shared_intermediate_size": shared or metadata.number(_INNER),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") is True else "nope",
    }
    return config, {_KV: max(heads)}


def convolution_layers(metadata: Metadata, names: Sequence[str]) -> Layers:
    """Convolutions in place of attention where the number of key heads is 0 (LFM2)."""
    heads = metadata.by_layer(_KV)
    return {"layer_types": [_FULL if count else "conv" for count in heads], "block_auto_adjust_ff_dim": False}, {_KV: max(heads)}


def convolution_metadata(config: Config) -> dict[str, Value]:
    """The inverse, and the width of the MLP, which config.json may give before it is adjusted."""
    inner, layers = int(config.get("block_ff_dim") or config["intermediate_size"]), int(config["num_hidden_layers"])
    if config.get("block_auto_adjust_ff_dim", True):
        factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), int(config.get("block_multiple_of", 256))
        inner = int(2 * inner / 3) if factor is None else int(factor * int(2 * inner / 3))
        inner = round_up(inner, multiple)
    full = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or [_FULL if full is None or i in full else "conv" for i in range(layers)]
    return {_KV: [int(config["num_key_value_heads"]) if kind == _FULL else 0 for kind in kinds], _INNER: inner}


# Layers of different sizes


def gemma3n_layers(metadata: Metadata, names: Sequence[str]) -> Layers:
    """llama.cpp, too, takes for granted which layers are sparse, and their other sizes, as they are in both models that there are."""
    config: dict[str, object] = {"vocab_size_per_layer_input": metadata.token_count}
    if isinstance(metadata.get(_WINDOWS), Sequence):
        config["layer_types"] = _types_by_window(metadata)
    if not isinstance(metadata.get(_INNER), Sequence):
        return config, {}
    if len(widths := set(metadata.by_layer(_INNER))) > 1:
        raise CheckpointError(f"the GGUF file has MLPs of {len(widths)} widths, llama.cpp and halfbyte read one: use its safetensors")
    return config, {_INNER: widths.pop()}


def gemma4_layers(metadata: Metadata, names: Sequence[str]) -> Layers:
    """Where the metadata have a list, it has one value for layers with a window and another for the others, or one for the layers with
    keys of their own and twice as much for those after."""
    kinds, numbers = _types_by_window(metadata), dict[str, int]()
    whole = kinds.index(_FULL) if _FULL in kinds else 0
    config: dict[str, object] = {
        "layer_types": kinds,
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in names,
        "vocab_size_per_layer_input": metadata.token_count,
    }
    if isinstance(metadata.get(_INNER), Sequence):
        widths = metadata.by_layer(_INNER)
        config["use_double_wide_mlp"], numbers[_INNER] = max(widths) > min(widths), min(widths)
    if isinstance(metadata.get(_KV), Sequence):
        heads = metadata.by_layer(_KV)
        config["num_global_key_value_heads"] = heads[min(whole, len(heads) - 1)]
        numbers[_KV] = next((count for count, kind in zip(heads, kinds, strict=False) if kind == SLIDING), heads[0])
    return config, numbers


def _types_by_window(metadata: Metadata) -> list[str]:
    return [SLIDING if window else _FULL for window in metadata.by_layer(_WINDOWS)]


def gpt2(metadata: Metadata, config: Config) -> dict[str, object]:
    """Its name of the width of MLPs."""
    return {"n_inner": config["intermediate_size"]}


# Families of which there are files with and without experts

GRANITE_HYBRID = GGUF(
    "granitehybrid",
    row_order="interleaved",
    numbers=ATTENTION_SCALE,
    sizes={
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    },
    parameters={"ssm_dt.bias": "mamba.dt_bias", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D"},
    tensors={
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
        "ffn_up": None,
    },
    joined={"shared_mlp.input_linear.weight": ("ffn_gate", "ffn_up")},
    settings={"num_local_experts": 0},
    read_layers=mamba_layers,
    written=False,
)
_GRANITE_EXPERTS = {"ffn_down": None, "ffn_gate_inp": "block_sparse_moe.router", "ffn_down_shexp": "shared_mlp.output_linear"}
GRANITE_HYBRID_EXPERTS = replace(
    GRANITE_HYBRID,
    tensors={**GRANITE_HYBRID.tensors, **_GRANITE_EXPERTS},
    joined={"shared_mlp.input_linear.weight": ("ffn_gate_shexp", "ffn_up_shexp")},
    settings={},
    experts=LOCAL_EXPERTS,
    experts_module="block_sparse_moe.experts",
    normalized=True,
)
GEMMA4 = GGUF(
    "gemma4",
    "gemma4_text",
    **IMAGES,
    sizes={**PER_LAYER_SIZES, "attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim"},
    local_rope_base=1e4,
    read_layers=gemma4_layers,
    merges_by_index=True,
)
GEMMA4_EXPERTS = replace(
    GEMMA4,
    tensors={
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    parameters={"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"},
    settings={"enable_moe_block": True},
    experts={**EXPERTS, "expert_used_count": "top_k_experts"},
    experts_module="experts",
    normalized=True,
)
