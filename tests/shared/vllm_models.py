"""Tiny models with random weights as vLLM serves them on a CPU: heads of 32, vocabularies that it pads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file

import halfbyte as hb

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256}
SIZES |= {"num_hidden_layers": 2, "vocab_size": 99, "max_position_embeddings": 256, "initializer_range": 0.2, **TOKENS}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
ROPES = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 5e5), ("sliding_attention", 1e4))}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}


class Served(NamedTuple):
    """A model and how it is quantized; `settings` of its config besides SIZES."""

    kind: str
    config: hb.Config
    settings: Mapping[str, Any] = MappingProxyType({})


def float_compute(fmt: str, **settings: Any) -> hb.Config:
    """Activations in floating point, so that results differ from transformers' by rounding alone."""
    return hb.Config(fmt, compute="float", **settings)


# As llama.cpp mixes them in files called Q4_K_M: 6 bits for values and half of the down projections, 4 or 5 for the rest.
Q4_K_M = {"*v_proj": "int6_g16", "*layers.0.mlp.down_proj": "int6_g16", "*k_proj": "int5_g32_offset", "*": "int4_g32_offset"}
MODELS: dict[str, Served] = {
    "llama, q4_0, tied": Served("Llama", float_compute("q4_0"), {"tie_word_embeddings": True}),
    "llama, q8_0, a bias": Served("Llama", float_compute("q8_0"), {"attention_bias": True, "tie_word_embeddings": False}),
    "llama, zero points, the head in floating point": Served(
        "Llama", float_compute("int4_g64_zp", skip=("lm_head",)), {"tie_word_embeddings": False}
    ),
    "llama, a scale for each channel": Served("Llama", float_compute("int8_channel")),
    "llama, a scale for each tensor": Served("Llama", float_compute("int8_tensor")),
    "llama, values in floating point": Served("Llama", float_compute("q4_0", skip=("*v_proj", "*0.mlp.up_proj"))),
    "llama, mixed formats": Served("Llama", float_compute("q4_0", overrides=Q4_K_M), {"tie_word_embeddings": False}),
    "phi3, layers fused in the checkpoint": Served("Phi3", float_compute("int8_tensor", overrides={"*down_proj": "int4_g32"})),
    "qwen3": Served("Qwen3", float_compute("int4_g32"), {"tie_word_embeddings": True}),
    "gemma3": Served("Gemma3Text", float_compute("q4_0"), {"query_pre_attn_scalar": 32, "rope_parameters": ROPES, **MIXED}),
    "qwen3 with experts": Served("Qwen3Moe", float_compute("q4_0"), EXPERTS),
    "qwen3 with experts, a scale for each channel": Served("Qwen3Moe", float_compute("int8_channel"), EXPERTS),
}


def make_float(served: Served) -> Any:
    """The model before it is quantized."""
    torch.manual_seed(0)
    settings = {key: value for key, value in (SIZES | served.settings).items() if (served.kind, key) != ("Phi3", "head_dim")}
    config = getattr(transformers, f"{served.kind}Config")(**settings)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model.eval()


def make_served(name: str, folder: Path) -> Path:
    """Writes the model of MODELS called `name` to `folder`, and returns it."""
    served = MODELS[name]
    hb.save(hb.quantize_(make_float(served), served.config), folder)
    return folder


# Checkpoints of other projects -> the format in halfbyte that `export` writes them from. A head stays in floating point.
FOREIGN = {
    "awq": ("awq", float_compute("int4_g64_zp", skip=("lm_head", "*embed_tokens"))),
    "gptq": ("gptq", float_compute("int4_g64", skip=("lm_head", "*embed_tokens"))),
    "compressed-tensors": ("compressed-tensors", float_compute("int4_g64", skip=("lm_head", "*embed_tokens"))),
    "compressed-tensors, zero points": ("compressed-tensors", float_compute("int4_g32_zp", skip=("lm_head", "*embed_tokens"))),
}


def make_foreign(name: str, folder: Path) -> Path:
    """Writes the checkpoint of FOREIGN called `name` to `folder`, and returns it."""
    kind, config = FOREIGN[name]
    model = make_float(Served("Llama", config, {"tie_word_embeddings": False}))
    hb.save(hb.quantize_(model, config), folder.with_name(f"{folder.name}-halfbyte"))
    hb.export(folder.with_name(f"{folder.name}-halfbyte"), folder, kind)
    return folder


def make_w8a8(folder: Path, *, symmetric: bool) -> Path:
    """Writes a compressed-tensors checkpoint with int8 weights and int8 activations, which are quantized for each row as they come."""
    model = make_float(Served("Llama", float_compute("int8_channel"), {"tie_word_embeddings": False}))
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes = hb.quantize(tensors.pop(name), "int8_channel")
        tensors |= {name: codes.data, f"{name}_scale": codes.scale}
    model.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "token", "dynamic": True},
            }
        },
    }
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
