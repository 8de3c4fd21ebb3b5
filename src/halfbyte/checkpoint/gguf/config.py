"""The metadata of a GGUF file <-> config.json of transformers: `to_config` for model.py, which reads files, `to_metadata` for export.py.

What families have in common is here; what is particular to one is in its entry `GGUF` of the table of families. Ropes are in rope.py.

Sources: llama.cpp, gguf-py/gguf/constants.py (names of keys), src/llama-model.cpp (what they mean and their defaults)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any, NamedTuple

from torch import Tensor

from halfbyte.checkpoint.gguf.names import Architecture, architecture_of_config, architecture_of_file
from halfbyte.checkpoint.gguf.rope import FULL, read_rope, write_rope
from halfbyte.checkpoint.gguf.tokenizer import end_tokens
from halfbyte.decoder.family import SLIDING, Config
from halfbyte.errors import CheckpointError
from halfbyte.io.gguf import Value
from halfbyte.io.gguf_metadata import Metadata


class _Key(NamedTuple):
    """A number in config.json, for a key of the metadata.

    Attributes:
        config_key: Its key in config.json.
        kind: int or float.
        required: Whether each file, and each config.json that is written to a file, must have it.
    """

    config_key: str
    kind: type
    required: bool


# Keys of the metadata, without the architecture's name.
_KEYS = {
    "context_length": _Key("max_position_embeddings", int, required=True),
    "embedding_length": _Key("hidden_size", int, required=True),
    "block_count": _Key("num_hidden_layers", int, required=True),
    "feed_forward_length": _Key("intermediate_size", int, required=True),
    "attention.head_count": _Key("num_attention_heads", int, required=True),
    "attention.head_count_kv": _Key("num_key_value_heads", int, required=False),
    "attention.key_length": _Key("head_dim", int, required=False),
    "attention.sliding_window": _Key("sliding_window", int, required=False),
    "attn_logit_softcapping": _Key("attn_logit_softcapping", float, required=False),
    "final_logit_softcapping": _Key("final_logit_softcapping", float, required=False),
}
_EXPERT_COUNTS = ("expert_count", "expert_used_count")
_OTHER_CONFIG_KEYS = {"num_experts": "num_local_experts"}  # keys of config.json in other versions of transformers
# Keys of config.json, by those of the metadata under tokenizer.ggml.
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def to_config(values: Mapping[str, Value], names: Sequence[str], read: Callable[[str], Tensor]) -> dict[str, Any]:
    """Derive config.json from a GGUF file.

    Args:
        values: The metadata.
        names: The tensors of the file, by llama.cpp's names.
        read: Reads one of them, which is not quantized.

    Raises:
        CheckpointError: The file holds no model that halfbyte reads, lacks a number, or is damaged.
    """
    architecture, metadata = architecture_of_file(values), Metadata(values)
    gguf = architecture.gguf
    config: dict[str, Any] = {"architectures": [architecture.model], "model_type": architecture.model_type}
    if gguf.read_layers is not None:
        layer_settings, numbers = gguf.read_layers(metadata, names)
        config, metadata = config | layer_settings, metadata.replace(numbers)
    for name, key in _keys(architecture).items():
        if (value := metadata.number(name, key.kind, needed=key.required)) is not None:
            config[key.config_key] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", _default_head_dim(architecture, metadata, config))
    if config["head_dim"] < 1:
        raise CheckpointError(f"the GGUF file makes heads of {config['head_dim']} elements: it is damaged")
    config |= _vocabulary_settings(values, metadata)
    config |= _settings_by_tensors(architecture, names)
    config |= {**gguf.settings, **gguf.implied(config)}
    if not gguf.sliding_window:
        config["sliding_window"] = None
    if architecture.expert_keys is not None:
        config |= _read_experts(architecture, architecture.expert_keys, metadata, config.get("intermediate_size", 0))
        config |= dict.fromkeys(("attention_bias", "qkv_bias"), "blk.0.attn_q.bias" in names)
    config["num_hidden_layers"] -= mtp_layers(values)
    if "position_embd" not in architecture.outer_modules:
        config["rope_parameters"] = read_rope(architecture, metadata, names, read, config["head_dim"])
    return config | (gguf.read_config(metadata, config) if gguf.read_config else {})


def _keys(architecture: Architecture) -> dict[str, _Key]:
    """Return `_KEYS` and the keys that an architecture has besides, or with another config_key."""
    epsilon, config_key = architecture.eps_keys
    keys = {**_KEYS, epsilon: _Key(config_key, float, required=True)}
    keys |= {name: _Key(config_key, float, required=True) for name, config_key in architecture.multiplier_keys.items()}
    if "expert_feed_forward_length" in (architecture.expert_keys or {}):  # files have no other width where all layers have experts
        keys["feed_forward_length"] = _Key("intermediate_size", int, required=False)
    return keys | {name: _Key(config_key, int, required=True) for name, config_key in architecture.gguf.sizes.items()}


def _default_head_dim(architecture: Architecture, metadata: Metadata, config: Config) -> int:
    """Return the elements of a head where a file does not have them: what rope rotates, if that is always the whole head."""
    rotary_dim: int | None = metadata.number("rope.dimension_count", needed=False)
    whole_head = None if architecture.family.partial_rotary else rotary_dim
    return whole_head or config["hidden_size"] // max(1, config["num_attention_heads"])


def _vocabulary_settings(values: Mapping[str, Value], metadata: Metadata) -> dict[str, object]:
    """Return the size of the vocabulary and the ids of special tokens."""
    tokenizer = Metadata(values, "tokenizer.ggml")
    config: dict[str, object] = {"vocab_size": metadata.number("vocab_size", needed=False) or metadata.token_count}
    config |= {config_key: tokenizer.number(key, needed=False) for key, config_key in _TOKENS.items()}
    if ends := end_tokens(values):
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return config


def _settings_by_tensors(architecture: Architecture, names: Sequence[str]) -> dict[str, object]:
    """Return the settings that follow from which tensors a file has: tied embeddings, and biases by those of the first layer."""
    config: dict[str, object] = {"tie_word_embeddings": "output.weight" not in names}
    for config_key, tensor in architecture.gguf.biases.items():
        config[config_key] = f"blk.0.{tensor if '.' in tensor else f'{tensor}.bias'}" in names
    return config


def _read_experts(architecture: Architecture, experts: Mapping[str, str], metadata: Metadata, inner: int) -> dict[str, object]:
    """Return the settings of a mixture of experts.

    Args:
        architecture: Of the model.
        experts: Keys of the metadata, and of config.json.
        metadata: Of the file.
        inner: The feed_forward_length of the file, 0 if it has none.
    """
    if "n_group" in experts.values():
        return _read_grouped_experts(experts, metadata)
    config: dict[str, Any] = {config_key: metadata.number(key, needed="count" in key) for key, config_key in experts.items()}
    # Older files do not have these widths: feed_forward_length is that of all experts of a token.
    used = max(1, config.get("num_experts_per_tok", 1))
    for config_key, width in (("moe_intermediate_size", inner // used), ("shared_expert_intermediate_size", inner)):
        if config_key in config and config[config_key] is None:
            config[config_key] = width
    if (scale := metadata.number("expert_weights_scale", float, needed=False)) not in (None, 0.0, 1.0):
        raise CheckpointError(f"the GGUF file multiplies the weights of experts by {scale}, which {architecture.model} does not")
    if "moe_intermediate_size" in config:  # each layer has experts
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return config | {"norm_topk_prob": architecture.norm_topk}


def _read_grouped_experts(experts: Mapping[str, str], metadata: Metadata) -> dict[str, object]:
    """Return the settings of experts that are chosen by groups (DeepSeek-V3, GLM 4), of which files have all."""
    required = (*_EXPERT_COUNTS, "expert_feed_forward_length")
    config = {config_key: metadata.number(key, needed=key in required) or 0 for key, config_key in experts.items()}
    config |= {key: config[key] or 1 for key in ("n_group", "topk_group")}  # files of models without groups have none, or 0
    scale = metadata.number("expert_weights_scale", float, needed=False)
    return config | {"norm_topk_prob": metadata.get("expert_weights_norm") is True, "routed_scaling_factor": scale or 1.0}


def mtp_layers(values: Mapping[str, Value]) -> int:
    """Return how many layers of a file, the last ones, are for multi-token prediction; models of transformers do not have them.

    Raises:
        CheckpointError: The number is negative, or that of all layers.
    """
    metadata = Metadata(values)
    count = int(metadata.number("nextn_predict_layers", needed=False) or 0)
    if count and not 0 < count < metadata.number("block_count"):
        raise CheckpointError(f"the GGUF file says that {count} layers are for multi-token prediction, fewer than all are: it is damaged")
    return count


def to_metadata(config: Config) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """Return the metadata of a GGUF file for the model of a config.json, and the tensors of its rope.

    Raises:
        CheckpointError: config.json lacks a number, or llama.cpp would compute something else.
    """
    architecture = architecture_of_config(config)
    gguf = architecture.gguf
    numbers: dict[str, Value] = {}  # by keys without the architecture's name
    experts = {name: _Key(config_key, int, required=True) for name, config_key in (architecture.expert_keys or {}).items()}
    for name, key in (_keys(architecture) | experts).items():
        value = config.get(key.config_key, config.get(_OTHER_CONFIG_KEYS.get(key.config_key, key.config_key)))
        if value is None and key.required:
            raise CheckpointError(f"config.json has no {key.config_key}, which GGUF needs")
        if value is not None:
            numbers[name] = key.kind(value)
    if reason := _why_not_written(architecture, config):
        raise CheckpointError(f"GGUF has no place for a {architecture.model} {reason}")
    if gguf.write_config is not None:
        numbers |= gguf.write_config(config)
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    numbers.setdefault("attention.head_count_kv", heads)
    numbers |= {"attention.key_length": head_dim, "attention.value_length": head_dim, "vocab_size": int(config["vocab_size"])}
    rope, tensors = write_rope(architecture, config, head_dim)
    metadata: dict[str, Value] = {"general.architecture": architecture.name, "general.quantization_version": 2}
    if isinstance(title := config.get("_name_or_path"), str) and title:
        metadata["general.name"] = title.rstrip("/").rpartition("/")[2]
    return metadata | {f"{architecture.name}.{name}": value for name, value in (numbers | rope).items()}, tensors


def _why_not_written(architecture: Architecture, config: Config) -> str | None:
    """Return the property of a model that GGUF's metadata cannot express, as the end of a sentence; None where there is none."""
    gguf, family = architecture.gguf, architecture.family
    implied = {**gguf.settings, **gguf.implied(config)}
    if isinstance(pattern := dict(family.defaults).get("sliding_window_pattern"), int):
        implied["layer_types"] = [SLIDING if (i + 1) % pattern else FULL for i, _ in enumerate(config.get("layer_types") or ())]
    for key, value in implied.items():
        got = config.get(key, value)
        if got != value and not (got is None and isinstance(value, list)):
            return f"with {key} {short(got)}, llama.cpp computes {short(value)}"
    rope = config.get("rope_parameters") or {}
    if family.rope_per_type and (local := rope.get(SLIDING)) is not None:
        base = gguf.local_rope_base or rope[FULL]["rope_theta"]
        if (local.get("rope_type", "default"), local.get("rope_theta")) != ("default", base):
            return f"whose sliding-window layers have rope_parameters {short(local)}, llama.cpp computes rope_theta {base:g}"
    if "mscale" in gguf.yarn and (rope.get("rope_type"), rope.get("mscale")) != ("yarn", gguf.yarn["mscale"]):
        return f"whose rope is not scaled by yarn with mscale {gguf.yarn['mscale']}"
    if architecture.expert_keys is None:
        return None
    other_norm_topk = "norm_topk_prob" in config and bool(config["norm_topk_prob"]) != architecture.norm_topk
    reasons = {
        f"with norm_topk_prob {config.get('norm_topk_prob')}": other_norm_topk,
        "some of whose layers have no experts": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        "that clips queries, keys and values": config.get("clip_qkv") is not None,
        "whose head is tied to its embedding": gguf.untied and bool(config.get("tie_word_embeddings")),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
