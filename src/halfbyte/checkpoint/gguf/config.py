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

from halfbyte.checkpoint.gguf.names import Architecture, of_config, of_file
from halfbyte.checkpoint.gguf.tokenizer import end_tokens
from halfbyte.decoder.family import GGUF, SLIDING, Config
from halfbyte.errors import CheckpointError
from halfbyte.io.gguf import Value
from halfbyte.io.gguf_metadata import Metadata

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
_ALSO = {"num_experts": "num_local_experts"}  # the name in other versions of transformers
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
_ROPE_BASE = 10_000.0
_FULL = "full_attention"
_NOT_ROTATED = 1e30  # factor of rotary frequencies


def to_config(values: Mapping[str, Value], names: Sequence[str], read: Callable[[str], Tensor]) -> dict[str, Any]:
    """config.json for a file with these values of metadata and tensors of these names; `read` reads one that is not quantized."""
    architecture, metadata = of_file(values), Metadata(values)
    family, gguf = architecture.family, architecture.gguf
    config: dict[str, Any] = {"architectures": [architecture.model], "model_type": architecture.model_type}
    if gguf.read_layers is not None:
        of_layers, numbers = gguf.read_layers(metadata, names)
        config, metadata = config | of_layers, metadata.replace(numbers)
    for key, (config_key, kind, needed) in _keys(architecture).items():
        if (value := metadata.number(key, kind, needed=needed)) is not None:
            config[config_key] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    rotary_dim = metadata.number("rope.dimension_count", needed=False)
    whole = rotary_dim if not family.partial_rotary else None
    config.setdefault("head_dim", whole or config["hidden_size"] // max(1, config["num_attention_heads"]))
    if config["head_dim"] < 1:
        raise CheckpointError(f"the GGUF file makes heads of {config['head_dim']} elements: it is damaged")
    config["vocab_size"] = metadata.number("vocab_size", needed=False) or metadata.token_count
    tokenizer = Metadata(values, "tokenizer.ggml")
    config |= {config_key: tokenizer.number(token, needed=False) for token, config_key in _TOKENS.items()}
    if last := end_tokens(values):
        config["eos_token_id"] = last if len(last) > 1 else last[0]
    config["tie_word_embeddings"] = "output.weight" not in names
    present = {config_key: tensor if "." in tensor else f"{tensor}.bias" for config_key, tensor in gguf.biases.items()}
    config |= {config_key: f"blk.0.{tensor}" in names for config_key, tensor in present.items()}
    config |= {**gguf.settings, **gguf.implied(config)}
    if not gguf.sliding_window:
        config["sliding_window"] = None
    if architecture.experts is not None:
        inner = config.get("intermediate_size", 0)
        config |= _routed(architecture, metadata) if "n_group" in architecture.experts.values() else _experts(architecture, metadata, inner)
        config |= dict.fromkeys(("attention_bias", "qkv_bias"), "blk.0.attn_q.bias" in names)
    config["num_hidden_layers"] -= drafts(values)
    if "position_embd" not in architecture.outer_modules:
        config["rope_parameters"] = _rope(architecture, metadata, names, read, config["head_dim"], rotary_dim)
    return config | (gguf.read_config(metadata, config) if gguf.read_config else {})


def _keys(architecture: Architecture) -> dict[str, tuple[str, type, bool]]:
    """_KEYS and those of one architecture."""
    key, config_key = architecture.epsilon
    keys: dict[str, tuple[str, type, bool]] = {**_KEYS, key: (config_key, float, True)}
    keys |= {key: (config_key, float, True) for key, config_key in architecture.numbers.items()}
    if "expert_feed_forward_length" in (architecture.experts or {}):
        keys["feed_forward_length"] = ("intermediate_size", int, False)  # not where all layers have experts
    return keys | {key: (config_key, int, True) for key, config_key in architecture.gguf.sizes.items()}


def _experts(architecture: Architecture, metadata: Metadata, inner: int) -> dict[str, object]:
    """The settings of experts in a config.json; `inner` is the file's feed_forward_length."""
    config = dict[str, Any]()
    for key, config_key in (architecture.experts or {}).items():
        config[config_key] = metadata.number(key, needed="count" in key)
    used = max(1, config.get("num_experts_per_tok", 1))
    # In older files the sizes of experts follow from the tensors only.
    for config_key, size in (("moe_intermediate_size", inner // used), ("shared_expert_intermediate_size", inner)):
        if config_key in config and config[config_key] is None:
            config[config_key] = size
    if (scale := metadata.number("expert_weights_scale", float, needed=False)) not in (None, 0.0, 1.0):
        raise CheckpointError(f"the GGUF file multiplies the weights of experts by {scale}, which {architecture.model} does not")
    every = {"decoder_sparse_step": 1, "mlp_only_layers": []} if "moe_intermediate_size" in config else {}
    return config | every | {"norm_topk_prob": architecture.normalized}


def _routed(architecture: Architecture, metadata: Metadata) -> dict[str, object]:
    """The settings of experts in a config.json where the file has all of them."""
    most = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    experts = (architecture.experts or {}).items()
    config = {config_key: metadata.number(key, needed=key in most) for key, config_key in experts}
    groups, used = config.pop("n_group") or 1, config.pop("topk_group") or 1
    config = {key: value or 0 for key, value in config.items()} | {"n_group": groups, "topk_group": used}
    normalized, scale = metadata.get("expert_weights_norm") is True, metadata.number("expert_weights_scale", float, needed=False)
    return config | {"norm_topk_prob": normalized, "routed_scaling_factor": scale or 1.0}


def drafts(values: Mapping[str, Value]) -> int:
    """How many layers of a file, the last ones, predict further tokens; transformers' models do not have them."""
    return int(Metadata(values).number("nextn_predict_layers", needed=False) or 0)


def _rope(
    architecture: Architecture,
    metadata: Metadata,
    names: Sequence[str],
    read: Callable[[str], Tensor],
    head_dim: int,
    rotary_dim: int | None,
) -> dict[str, object]:
    """The rope_parameters of a config.json."""
    base = metadata.number("rope.freq_base", float, needed=False) or _ROPE_BASE
    rope = {"rope_type": "default", "rope_theta": base, **_rope_scaling(architecture.gguf, metadata, names, read, base, head_dim)}
    if architecture.family.rope_per_type:  # that of layers with a window is never scaled
        default_base = architecture.gguf.local_rope_base
        local = base if default_base is None else metadata.number("rope.freq_base_swa", float, needed=False) or default_base
        return {_FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": local}}
    if architecture.family.partial_rotary and rotary_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    return rope


def _rope_scaling(
    gguf: GGUF, metadata: Metadata, names: Sequence[str], read: Callable[[str], Tensor], base: float, head_dim: int
) -> dict[str, object]:
    """The rope_scaling of a config.json, if positions are scaled."""
    factors = read("rope_freqs.weight").double() if "rope_freqs.weight" in names else None
    if factors is not None and bool((factors >= _NOT_ROTATED).any()) and bool(((factors == 1) | (factors >= _NOT_ROTATED)).all()):
        return {"rope_type": "proportional", "partial_rotary_factor": float((factors == 1).double().mean())}
    if factors is not None and not bool((factors == 1).all()):
        return _llama3(factors, base, head_dim)
    original = metadata.number("rope.scaling.original_context_length", needed=False)
    if "rope_factors_long.weight" in names and "rope_factors_short.weight" in names:
        lists = {f"{which}_factor": read(f"rope_factors_{which}.weight").tolist() for which in ("long", "short")}
        return {"rope_type": "longrope", **lists, "original_max_position_embeddings": original}
    kind, factor = metadata.get("rope.scaling.type"), metadata.number("rope.scaling.factor", float, needed=False)
    if kind in (None, "none") or not factor:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        found = {config_key: metadata.number(key, float, needed=False) for key, config_key in _YARN.items()}
        yarn = {"factor": factor, "original_max_position_embeddings": original} | {k: v for k, v in found.items() if v is not None}
        return {"rope_type": "yarn", **gguf.yarn, **yarn}
    raise CheckpointError(f"the GGUF file scales positions in the way {short(kind)}, which halfbyte does not read: use its safetensors")


def llama3_factors(rope: Config, base: float, head_dim: int) -> Tensor:
    """The factors by which llama.cpp divides rotary frequencies: transformers' rope_type llama3 (modeling_rope_utils.py), float64
    [head_dim / 2]."""
    inverse = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    length = 2 * math.pi / inverse
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = (original / length - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(length < original / high, 1.0, torch.where(length > original / low, factor, between))


def _llama3(factors: Tensor, base: float, head_dim: int) -> dict[str, object]:
    """The settings that give these factors. All models use Llama's own, except for the original context length."""
    for original in (8192, 4096, 16384, 32768, 2048, 32):
        rope = {**_LLAMA3, "factor": float(factors.max()), "original_max_position_embeddings": original}
        wanted = llama3_factors(rope, base, head_dim)
        if wanted.shape == factors.shape and torch.allclose(wanted, factors, rtol=1e-5):
            return rope
    raise CheckpointError("the GGUF file divides rotary frequencies by factors that are not Llama 3's: use its safetensors")


def to_metadata(config: Config) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """The metadata of a GGUF file for the model of a config.json, and the tensors that belong to it."""
    architecture = of_config(config)
    name, gguf = architecture.name, architecture.gguf
    out: dict[str, Value] = {"general.architecture": name, "general.quantization_version": 2}
    if isinstance(title := config.get("_name_or_path"), str) and title:
        out["general.name"] = title.rstrip("/").rpartition("/")[2]
    keys = _keys(architecture) | {key: (config_key, int, True) for key, config_key in (architecture.experts or {}).items()}
    for key, (config_key, kind, needed) in keys.items():
        value = config.get(config_key, config.get(_ALSO.get(config_key, config_key)))
        if value is None and needed:
            raise CheckpointError(f"config.json has no {config_key}, which GGUF needs")
        if value is not None:
            out[f"{name}.{key}"] = kind(value)
    if reason := _no_place(architecture, config):
        raise CheckpointError(f"GGUF has no place for a {architecture.model} {reason}")
    if gguf.write_config is not None:
        out |= {f"{name}.{key}": value for key, value in gguf.write_config(config).items()}
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    out.setdefault(f"{name}.attention.head_count_kv", heads)
    out |= {f"{name}.attention.key_length": head_dim, f"{name}.attention.value_length": head_dim}
    out[f"{name}.vocab_size"] = int(config["vocab_size"])
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get(_FULL, rope)
    base = float(rope.get("rope_theta") or config.get("rope_theta") or _ROPE_BASE)
    if gguf.rope_alpha and rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        # transformers' ntk_alpha, which does not depend on the length.
        base, rope = base * float(rope["alpha"]) ** (head_dim / (head_dim - 2)), {}
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    out |= {f"{name}.rope.freq_base": base, f"{name}.rope.dimension_count": int(head_dim * partial)}
    return out, _scaled(gguf, out, rope, base, head_dim)


def _no_place(architecture: Architecture, config: Config) -> str | None:
    """The property of a model that GGUF's metadata cannot express, or None."""
    gguf, family = architecture.gguf, architecture.family
    implied = {**gguf.settings, **gguf.implied(config)}
    if isinstance(pattern := dict(family.defaults).get("sliding_window_pattern"), int):
        implied["layer_types"] = [SLIDING if (i + 1) % pattern else _FULL for i, _ in enumerate(config.get("layer_types") or ())]
    for key, value in implied.items():
        got = config.get(key, value)
        if got != value and not (got is None and isinstance(value, list)):
            return f"with {key} {short(got)}, llama.cpp computes {short(value)}"
    rope = config.get("rope_parameters") or {}
    if family.rope_per_type and (local := rope.get(SLIDING)) is not None:
        base = gguf.local_rope_base or rope[_FULL]["rope_theta"]
        if (local.get("rope_type", "default"), local.get("rope_theta")) != ("default", base):
            return f"whose sliding-window layers have rope_parameters {short(local)}, llama.cpp computes rope_theta {base:g}"
    if "mscale" in gguf.yarn and (rope.get("rope_type"), rope.get("mscale")) != ("yarn", gguf.yarn["mscale"]):
        return f"whose rope is not scaled by yarn with mscale {gguf.yarn['mscale']}"
    if architecture.experts is None:
        return None
    norms = "norm_topk_prob" in config and bool(config["norm_topk_prob"]) != architecture.normalized
    reasons = {
        f"with norm_topk_prob {config.get('norm_topk_prob')}": norms,
        "some of whose layers have no experts": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        "that clips queries, keys and values": config.get("clip_qkv") is not None,
        "whose head is tied to its embedding": gguf.untied and bool(config.get("tie_word_embeddings")),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _scaled(gguf: GGUF, out: dict[str, Value], rope: Config, base: float, head_dim: int) -> dict[str, Tensor]:
    """Add the metadata of scaled positions to `out`; return the tensors that describe the scaling."""
    name, kind = gguf.architecture, rope.get("rope_type", rope.get("type", "default"))
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
        if "mscale" not in gguf.yarn and (odd := next(iter(given), None)):
            raise CheckpointError(f"GGUF has no scaling of positions like yarn with {odd}")
        out |= {f"{name}.{key}": float(rope[config_key]) for key, config_key in _YARN.items() if rope.get(config_key) is not None}
    return {}
