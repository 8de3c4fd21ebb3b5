"""The metadata of a GGUF file <-> config.json of transformers.

Sources: llama.cpp, gguf-py/gguf/constants.py (names of keys), src/llama-model.cpp (what they mean and their defaults)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.gguf_names import Architecture, of_config, of_file
from halfbyte.checkpoint.gguf_tokenizer import end_tokens
from halfbyte.errors import CheckpointError
from halfbyte.io.gguf import Value
from halfbyte.layouts.base import round_up

Metadata = Mapping[str, Value]
# Key of the metadata, without the architecture's name -> (key of config.json, its type, whether it is required).
_KEYS: dict[str, tuple[str, type, bool]] = {
    "context_length": ("max_position_embeddings", int, True),
    "embedding_length": ("hidden_size", int, True),
    "block_count": ("num_hidden_layers", int, True),
    "feed_forward_length": ("intermediate_size", int, True),
    "attention.head_count": ("num_attention_heads", int, True),
    "attention.head_count_kv": ("num_key_value_heads", int, False),
    "attention.key_length": ("head_dim", int, False),
    "attention.sliding_window": ("sliding_window", int, False),
    "attn_logit_softcapping": ("attn_logit_softcapping", float, False),
    "final_logit_softcapping": ("final_logit_softcapping", float, False),
}
_WINDOW = "sliding_window"
_KV = "attention.head_count_kv"
_LATENT = ("key_length_mla", "key_length", "value_length_mla", "value_length", "kv_lora_rank", "q_lora_rank")
_ALSO = {"num_experts": "num_local_experts"}  # the name in other versions of transformers
_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
# Settings of a model's config that no file has.
_YARN_OF: dict[str, dict[str, Any]] = {"mistral3": {"mscale": 1.0, "llama_4_scaling_beta": 0.0}, "gpt-oss": {"truncate": False}}
_ROPE_BASE = 10_000.0
_MOST_LAYERS = 10_000  # for which a list of layer types is made
# No file says whether some layers have sliding-window attention: llama.cpp recognizes these models by their number of layers.
_WINDOWED_BY_DEPTH = {"exaone4": (64,)}
# No file has the scale of attention either: llama.cpp recognizes the models with another one by their number of layers.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


def to_config(metadata: Metadata, names: Sequence[str], read: Callable[[str], Tensor]) -> dict[str, Any]:
    """config.json for a file with this metadata and tensors of these names; `read` reads one that is not quantized."""
    architecture = of_file(metadata)
    name = architecture.name
    config: dict[str, Any] = {"architectures": [architecture.model], "model_type": architecture.types[0]}
    if (layers := _LAYERS.get(name)) is not None:
        own, metadata = layers(name, metadata, names)
        config |= own
    for key, (mine, kind, needed) in _keys(architecture).items():
        if (value := _number(metadata, f"{name}.{key}", kind, needed)) is not None:
            config[mine] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    heads = max(1, config["num_attention_heads"])
    rotated = _number(metadata, f"{name}.rope.dimension_count", int, needed=False)
    config.setdefault("head_dim", rotated if rotated and name == "llama" else config["hidden_size"] // heads)
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocabulary = _number(metadata, f"{name}.vocab_size", int, needed=False)
    config["vocab_size"] = vocabulary or (len(tokens) if isinstance(tokens, Sequence) else 0)
    for key, mine in _TOKENS.items():
        config[mine] = _number(metadata, key, int, needed=False)
    if last := end_tokens(metadata):
        config["eos_token_id"] = last if len(last) > 1 else last[0]
    config["tie_word_embeddings"] = "output.weight" not in names
    present = {mine: tensor if "." in tensor else f"{tensor}.bias" for mine, tensor in architecture.biases.items()}
    config |= {mine: f"blk.0.{tensor}" in names for mine, tensor in present.items()} | dict(architecture.settings)
    if name in ("gemma2", "gemma3"):
        by_width = (name, config["num_hidden_layers"]) in _SCALED_BY_WIDTH
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if by_width else config["head_dim"]
    if not architecture.windowed or (name in _WINDOWED_BY_DEPTH and config["num_hidden_layers"] not in _WINDOWED_BY_DEPTH[name]):
        config[_WINDOW] = None
        if name == "exaone4":
            config["layer_types"] = ["full_attention"] * min(config["num_hidden_layers"], _MOST_LAYERS)
    if architecture.experts is not None:
        inner = config.get("intermediate_size", 0)
        config |= _routed(architecture, metadata) if architecture.routed else _experts(architecture, metadata, inner)
        config |= dict.fromkeys(("attention_bias", "qkv_bias"), "blk.0.attn_q.bias" in names)
    config["num_hidden_layers"] -= drafts(metadata)
    if name == "deepseek2":
        config |= _latent(metadata, config)
    if "linear_num_value_heads" in config:
        config |= _linear(name, metadata, config)
    if name == "gpt2":
        return config | {"n_inner": config["intermediate_size"]}
    base = _number(metadata, f"{name}.rope.freq_base", float, needed=False) or _ROPE_BASE
    rope = {"rope_theta": base, **_rope_scaling(name, metadata, names, read, base, config["head_dim"])}
    if local := _local_base(architecture, metadata, base):
        rope = {"full_attention": {"rope_type": "default", **rope}, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    elif architecture.partial and rotated:
        rope["partial_rotary_factor"] = rotated / config["head_dim"]
        if name == "phi3" and (original := rope.get("original_max_position_embeddings")) is not None:
            config["original_max_position_embeddings"] = original
    config["rope_parameters"] = rope if local else {"rope_type": "default", **rope}
    return config


def _by_layer(metadata: Metadata, key: str) -> Sequence[Any]:
    found = metadata.get(key)
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(type(each) in (int, bool) for each in found) or not any(found):
        raise CheckpointError(f"the GGUF file says {short(found)} for {key}, a number for each layer: it is damaged")
    return found


def _lfm2_layers(name: str, metadata: Metadata, names: Sequence[str]) -> tuple[dict[str, Any], Metadata]:
    """What config.json says of LFM2's layers, and the metadata with one number of key heads, which in the file is 0 where a layer has a
    convolution for attention."""
    kv = f"{name}.{_KV}"
    heads = _by_layer(metadata, kv)
    kinds = ["full_attention" if count else "conv" for count in heads]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}, {**metadata, kv: max(heads)}


def _gemma3n_layers(name: str, metadata: Metadata, names: Sequence[str]) -> tuple[dict[str, Any], Metadata]:
    """The same of Gemma 3n's. llama.cpp, too, takes layers for sparse, and their other sizes, as they are in both models that there are."""
    inner, kinds, tokens = f"{name}.feed_forward_length", f"{name}.attention.sliding_window_pattern", metadata.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"vocab_size_per_layer_input": len(tokens) if isinstance(tokens, Sequence) else 0}
    if isinstance(metadata.get(kinds), Sequence):
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in _by_layer(metadata, kinds)]
    if isinstance(metadata.get(inner), Sequence):
        if len(widths := set(_by_layer(metadata, inner))) > 1:
            raise CheckpointError(f"the GGUF file has MLPs of {len(widths)} widths, llama.cpp and halfbyte read one: use its safetensors")
        metadata = {**metadata, inner: widths.pop()}
    return config, metadata


def _gemma4_layers(name: str, metadata: Metadata, names: Sequence[str]) -> tuple[dict[str, Any], Metadata]:
    """The same of Gemma 4's. Where the metadata have a list, it has one value for layers with a window and another for the others, or one
    for the layers with keys of their own and twice as much for those after."""
    windows, kv, inner = _by_layer(metadata, f"{name}.attention.sliding_window_pattern"), f"{name}.{_KV}", f"{name}.feed_forward_length"
    whole, tokens = next((i for i, window in enumerate(windows) if not window), 0), metadata.get("tokenizer.ggml.tokens")
    config = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in names,
        "vocab_size_per_layer_input": len(tokens) if isinstance(tokens, Sequence) else 0,
    }
    if isinstance(metadata.get(inner), Sequence):
        widths = _by_layer(metadata, inner)
        config["use_double_wide_mlp"], metadata = max(widths) > min(widths), {**metadata, inner: min(widths)}
    if isinstance(metadata.get(kv), Sequence):
        heads = _by_layer(metadata, kv)
        config["num_global_key_value_heads"] = heads[min(whole, len(heads) - 1)]
        metadata = {**metadata, kv: next((count for count, window in zip(heads, windows, strict=False) if window), heads[0])}
    return config, metadata


def _granite_layers(name: str, metadata: Metadata, names: Sequence[str]) -> tuple[dict[str, Any], Metadata]:
    """The same of Granite 4's, which have Mamba 2 where the number of key heads is 0."""
    kv, inner = f"{name}.{_KV}", _number(metadata, f"{name}.ssm.inner_size", int, needed=True)
    heads, shared = _by_layer(metadata, kv), _number(metadata, f"{name}.expert_shared_feed_forward_length", int, needed=False)
    width, count = (_number(metadata, f"{name}.{key}", int, needed=True) for key in ("embedding_length", "ssm.time_step_rank"))
    if min(inner, width, count) < 1 or inner % width or inner % count:
        raise CheckpointError(f"the GGUF file has {count} heads of Mamba of {inner} in all, for {width} inputs: it is damaged")
    config = {
        "layer_types": ["attention" if each else "mamba" for each in heads],
        "mamba_expand": inner // width,
        "mamba_d_head": inner // count,
        "shared_intermediate_size": shared or _number(metadata, f"{name}.feed_forward_length", int, needed=True),
        "position_embedding_type": "rope" if metadata.get(f"{name}.rope.scaling.finetuned") is True else "nope",
    }
    return config, {**metadata, kv: max(heads)}


_LAYERS = {"granitehybrid": _granite_layers, "lfm2": _lfm2_layers, "lfm2moe": _lfm2_layers}
_LAYERS |= {"gemma3n": _gemma3n_layers, "gemma4": _gemma4_layers}


def _lfm2_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    """The inverse, and the width of the MLP, which config.json may give before it is adjusted."""
    inner, layers = int(config.get("block_ff_dim") or config["intermediate_size"]), int(config["num_hidden_layers"])
    if config.get("block_auto_adjust_ff_dim", True):
        factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), int(config.get("block_multiple_of", 256))
        inner = int(2 * inner / 3) if factor is None else int(factor * int(2 * inner / 3))
        inner = round_up(inner, multiple)
    full = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or ["full_attention" if full is None or i in full else "conv" for i in range(layers)]
    heads = [int(config["num_key_value_heads"]) if kind == "full_attention" else 0 for kind in kinds]
    return {f"lfm2.{_KV}": heads, "lfm2.feed_forward_length": inner}


def _local_base(architecture: Architecture, metadata: Metadata, base: float) -> float | None:
    """The base of rotary positions in layers with sliding-window attention, if they have their own; it is never scaled."""
    if architecture.types == ("olmo3",):
        return base
    if architecture.name not in ("gemma3", "gemma3n", "gemma4"):
        return None
    return _number(metadata, f"{architecture.name}.rope.freq_base_swa", float, needed=False) or _ROPE_BASE


def _keys(architecture: Architecture) -> dict[str, tuple[str, type, bool]]:
    """_KEYS and those of one architecture."""
    key, mine = architecture.epsilon
    own: dict[str, tuple[str, type, bool]] = {**_KEYS, key: (mine, float, True)}
    own |= {key: (mine, float, True) for key, mine in architecture.keys.items()}
    if "expert_feed_forward_length" in (architecture.experts or {}):
        own["feed_forward_length"] = ("intermediate_size", int, False)  # not where all layers have experts
    return own | {key: (mine, int, True) for key, mine in architecture.sizes.items()}


def _experts(architecture: Architecture, metadata: Metadata, inner: int) -> dict[str, Any]:
    """The settings of experts in a config.json; `inner` is the file's feed_forward_length."""
    name, config = architecture.name, dict[str, Any]()
    for key, mine in (architecture.experts or {}).items():
        config[mine] = _number(metadata, f"{name}.{key}", int, needed="count" in key)
    used = max(1, config.get("num_experts_per_tok", 1))
    # In older files the sizes of experts follow from the tensors only.
    for mine, size in (("moe_intermediate_size", inner // used), ("shared_expert_intermediate_size", inner)):
        if mine in config and config[mine] is None:
            config[mine] = size
    if (scale := _number(metadata, f"{name}.expert_weights_scale", float, needed=False)) not in (None, 0.0, 1.0):
        raise CheckpointError(f"the GGUF file multiplies the weights of experts by {scale}, which {architecture.model} does not")
    every = {"decoder_sparse_step": 1, "mlp_only_layers": []} if "moe_intermediate_size" in config else {}
    return config | every | {"norm_topk_prob": architecture.normed}


def _routed(architecture: Architecture, metadata: Metadata) -> dict[str, Any]:
    """The settings of experts in a config.json where the file has all of them."""
    name, most = architecture.name, ("expert_count", "expert_used_count", "expert_feed_forward_length")
    config = {mine: _number(metadata, f"{name}.{key}", int, needed=key in most) for key, mine in (architecture.experts or {}).items()}
    groups, used = config.pop("n_group") or 1, config.pop("topk_group") or 1
    config = {key: value or 0 for key, value in config.items()} | {"n_group": groups, "topk_group": used}
    if architecture.model == "DeepseekV2ForCausalLM":
        config["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    scale = _number(metadata, f"{name}.expert_weights_scale", float, needed=False)
    return config | {"norm_topk_prob": metadata.get(f"{name}.expert_weights_norm") is True, "routed_scaling_factor": scale or 1.0}


def _latent(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of latent attention in a config.json."""
    given = {key: _number(metadata, f"deepseek2.attention.{key}", int, needed=False) for key in _LATENT}
    rotated = _number(metadata, "deepseek2.rope.dimension_count", int, needed=True)
    # Files from before 2025 have the lengths of heads under the names that other models have.
    length, value = given["key_length_mla"] or given["key_length"], given["value_length_mla"] or given["value_length"]
    if length is None or value is None or given["kv_lora_rank"] is None or length <= rotated:
        raise CheckpointError(f"the GGUF file says {length}, {value}, {given['kv_lora_rank']} for sizes of latent attention: it is damaged")
    return {
        "q_lora_rank": given["q_lora_rank"],
        "kv_lora_rank": given["kv_lora_rank"],
        "qk_nope_head_dim": length - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "head_dim": rotated,
        "num_key_value_heads": config["num_attention_heads"],
    }


def _linear(name: str, metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of linear attention in a config.json."""
    every = _number(metadata, f"{name}.full_attention_interval", int, needed=False) or 4
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    inner = _number(metadata, f"{name}.ssm.inner_size", int, needed=True)
    if min(every, inner, keys, values) < 1 or values % keys or inner % values:
        raise CheckpointError(f"the GGUF file has {keys} key heads and {values} value heads of {inner} in all: it is damaged")
    layers = range(min(config["num_hidden_layers"], _MOST_LAYERS))
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    return {"layer_types": kinds, "linear_value_head_dim": inner // values}


def drafts(metadata: Metadata) -> int:
    """How many layers of a file, the last ones, predict further tokens; transformers' models do not have them."""
    return int(_number(metadata, f"{metadata.get('general.architecture')}.nextn_predict_layers", int, needed=False) or 0)


def _number(metadata: Metadata, key: str, kind: type, needed: bool) -> Any:
    value = metadata.get(key)
    if value is None and not needed:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:  # one for each layer
        if any(each != value[0] for each in value):
            what = f"the GGUF file says {short(list(value[:8]))} for {key}"
            raise CheckpointError(f"{what}, halfbyte reads one number for all layers there: use its safetensors")
        value = value[0]
    sound = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if not sound or not isinstance(value, int | float) or abs(value) > 1 << 40:
        what = "has no" if value is None else f"says {short(value)} for"
        raise CheckpointError(f"the GGUF file {what} {key}, a number: it is damaged or not a language model")
    return kind(value)


def _rope_scaling(
    name: str, metadata: Metadata, names: Sequence[str], read: Callable[[str], Tensor], base: float, head_dim: int
) -> dict[str, Any]:
    """The rope_scaling of a config.json, if positions are scaled."""
    factors = read("rope_freqs.weight").double() if "rope_freqs.weight" in names else None
    if factors is not None and name == "gemma4":  # of 1, and of 1e30 for what is not rotated
        return {"rope_type": "proportional", "partial_rotary_factor": float((factors == 1).double().mean())}
    if factors is not None and not bool((factors == 1).all()):
        return _llama3(factors, base, head_dim)
    original = _number(metadata, f"{name}.rope.scaling.original_context_length", int, needed=False)
    if "rope_factors_long.weight" in names and "rope_factors_short.weight" in names:
        lists = {f"{which}_factor": read(f"rope_factors_{which}.weight").tolist() for which in ("long", "short")}
        return {"rope_type": "longrope", **lists, "original_max_position_embeddings": original}
    kind, factor = metadata.get(f"{name}.rope.scaling.type"), _number(metadata, f"{name}.rope.scaling.factor", float, needed=False)
    if kind in (None, "none") or not factor:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        found = {mine: _number(metadata, f"{name}.{key}", float, needed=False) for key, mine in _YARN.items()}
        if name == "deepseek2" and found["mscale_all_dim"]:  # there it is a tenth, and mscale is the same
            found["mscale"] = found["mscale_all_dim"] = found["mscale_all_dim"] / 0.1
        yarn = {"factor": factor, "original_max_position_embeddings": original} | {k: v for k, v in found.items() if v is not None}
        return {"rope_type": "yarn", **_YARN_OF.get(name, {}), **yarn}
    raise CheckpointError(f"the GGUF file scales positions in the way {short(kind)}, which halfbyte does not read: use its safetensors")


def llama3_factors(rope: Mapping[str, Any], base: float, head_dim: int) -> Tensor:
    """The factors by which llama.cpp divides rotary frequencies: transformers' rope_type llama3 (modeling_rope_utils.py), float64
    [head_dim / 2]."""
    inverse = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    length = 2 * math.pi / inverse
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = (original / length - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(length < original / high, 1.0, torch.where(length > original / low, factor, between))


def _llama3(factors: Tensor, base: float, head_dim: int) -> dict[str, Any]:
    """The settings that give these factors. All models use Llama's own, except for the original context length."""
    for original in (8192, 4096, 16384, 32768, 2048, 32):
        rope = {**_LLAMA3, "factor": float(factors.max()), "original_max_position_embeddings": original}
        wanted = llama3_factors(rope, base, head_dim)
        if wanted.shape == factors.shape and torch.allclose(wanted, factors, rtol=1e-5):
            return rope
    raise CheckpointError("the GGUF file divides rotary frequencies by factors that are not Llama 3's: use its safetensors")


def to_metadata(config: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """The metadata of a GGUF file for the model of a config.json, and the tensors that belong to it."""
    architecture = of_config(config)
    name = architecture.name
    if reason := _no_place(architecture, config):
        raise CheckpointError(f"GGUF has no place for a {architecture.model} {reason}")
    out: dict[str, Value] = {"general.architecture": name, "general.quantization_version": 2}
    if isinstance(title := config.get("_name_or_path"), str) and title:
        out["general.name"] = title.rstrip("/").rpartition("/")[2]
    keys = _keys(architecture) | {key: (theirs, int, True) for key, theirs in (architecture.experts or {}).items()}
    for key, (theirs, kind, needed) in keys.items():
        value = config.get(theirs, config.get(_ALSO.get(theirs, theirs)))
        if value is None and needed:
            raise CheckpointError(f"config.json has no {theirs}, which GGUF needs")
        if value is not None:
            out[f"{name}.{key}"] = kind(value)
    if name == "lfm2":
        out |= _lfm2_metadata(config)
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    out.setdefault(f"{name}.attention.head_count_kv", heads)
    out |= {f"{name}.attention.key_length": head_dim, f"{name}.attention.value_length": head_dim}
    out[f"{name}.vocab_size"] = int(config["vocab_size"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    base = float(rope.get("rope_theta") or config.get("rope_theta") or _ROPE_BASE)
    if name == "hunyuan-dense" and rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        # transformers' ntk_alpha, which does not depend on the length.
        base, rope = base * float(rope["alpha"]) ** (head_dim / (head_dim - 2)), {}
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    out |= {f"{name}.rope.freq_base": base, f"{name}.rope.dimension_count": int(head_dim * partial)}
    return out, _scaled(name, out, rope, base, head_dim)


def _no_place(architecture: Architecture, config: Mapping[str, Any]) -> str | None:
    """The property of a model that GGUF's metadata cannot express, or None."""
    if (odd := next((key for key, value in architecture.settings.items() if config.get(key, value) != value), None)) is not None:
        return f"with {odd} {config[odd]}"
    rope = config.get("rope_parameters") or {}
    if architecture.name == "mistral3" and (rope.get("rope_type"), rope.get("mscale")) != ("yarn", 1.0):
        return "whose positions are not scaled by yarn with mscale 1"
    layers = range(int(config.get("num_hidden_layers") or 0))
    if architecture.name == "smollm3" and config.get("no_rope_layers") not in (None, [int((i + 1) % 4 != 0) for i in layers]):
        return "whose layers without rotary positions are not every fourth"
    if architecture.types == ("olmo3",):
        local, usual = rope.get("sliding_attention", {}), ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in layers]
        if config.get(_WINDOW) is None or config.get("layer_types") not in (None, usual):
            return "whose pattern of sliding-window layers is not three of four"
        if local.get("rope_type", "default") != "default" or local.get("rope_theta") != rope.get("full_attention", {}).get("rope_theta"):
            return "whose sliding-window layers have their own rotary positions"
    depths = _WINDOWED_BY_DEPTH.get(architecture.name)
    if depths is not None and (config.get(_WINDOW) is not None) != (len(layers) in depths):
        return f"of {len(layers)} layers with sliding_window {config.get(_WINDOW)}"
    if architecture.experts is None:
        return None
    norms = "norm_topk_prob" in config and bool(config["norm_topk_prob"]) != architecture.normed
    reasons = {
        f"with norm_topk_prob {config.get('norm_topk_prob')}": norms,
        "some of whose layers have no experts": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        "that clips queries, keys and values": config.get("clip_qkv") is not None,
        "whose head is tied to its embedding": architecture.untied and bool(config.get("tie_word_embeddings")),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _scaled(name: str, out: dict[str, Value], rope: Mapping[str, Any], base: float, head_dim: int) -> dict[str, Tensor]:
    """Adds the metadata of scaled positions to `out`; returns the tensors that describe the scaling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind == "llama3":
        return {"rope_freqs.weight": llama3_factors(rope, base, head_dim).float()}
    if kind not in ("linear", "yarn", "longrope"):
        raise CheckpointError(f"GGUF has no scaling of positions like {short(kind)}")
    if original := rope.get("original_max_position_embeddings"):
        out[f"{name}.rope.scaling.original_context_length"] = int(original)
    if kind == "longrope":
        return {
            f"rope_factors_{which}.weight": torch.tensor(rope[f"{which}_factor"], dtype=torch.float32, device="cpu")
            for which in ("long", "short")
        }
    out |= {f"{name}.rope.scaling.type": kind, f"{name}.rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        usual = 0.1 * math.log(float(rope["factor"])) + 1
        given = {key: rope.get(key) for key in ("mscale", "mscale_all_dim", "attention_factor") if rope.get(key)}
        if math.isclose(float(given.get("attention_factor") or 0), usual, rel_tol=1e-6):
            del given["attention_factor"]
        if name != "mistral3" and (odd := next(iter(given), None)):
            raise CheckpointError(f"GGUF has no scaling of positions like yarn with {odd}")
        out |= {f"{name}.{key}": float(rope[theirs]) for key, theirs in _YARN.items() if rope.get(theirs) is not None}
    return {}
