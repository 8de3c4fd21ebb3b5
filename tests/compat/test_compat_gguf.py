"""GGUF files of every architecture that halfbyte writes: a model that goes to a file and back computes what it computed before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from language_model import FloatTensors, make_tokenizer
from torch import Tensor

import halfbyte as hb
from halfbyte.checkpoint.gguf.names import ARCHITECTURES, Architecture
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.config import find_family
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.nn.modules.experts import QuantExperts
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule

WRITTEN = {architecture.model.removesuffix("ForCausalLM"): architecture for architecture in ARCHITECTURES if architecture.gguf.written}
CONFIG = hb.Config("q4_0", compute="float")
IDS = torch.arange(2, 46).view(2, 22)  # longer than windows of 16 tokens
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
# Settings without which a file cannot hold a config, or in which families differ.
SETTINGS: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"logit_scale": 0.25, "sliding_window": 16},
    "Exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "Gemma2": {"sliding_window": 16, "attn_implementation": "eager"},  # with its cap of scores
    "Gemma3": {"sliding_window": 16},
    "Granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "HunYuanDenseV1": {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 32},
    "Ministral3": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    "Mistral": {"sliding_window": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Nemotron": {"attention_bias": True, "mlp_bias": True},
    "Olmo3": {"sliding_window": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {"sliding_window": None},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True},
    "StableLm": {"use_qkv_bias": True, "num_attention_heads": 2, "num_key_value_heads": 1},  # rope rotates 8 elements
}
# Nemotron's norms are stored plus one, which rounds them in float32; the rotary base of HunYuan's is a product, and rounded.
ROUNDED = ("Nemotron", "HunYuanDenseV1")


@torch.no_grad()
def logits(model: Any, attention: str) -> Tensor:
    model.set_attn_implementation(attention)  # a file tells neither this nor `compute`
    for module in model.modules():
        if isinstance(module, QuantLinear | QuantExperts):
            module.compute = CONFIG.compute
    found: Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


@pytest.fixture(params=WRITTEN)
def built(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    """The name of an architecture, and a model of it, which is in the folder "float", too."""
    architecture: Architecture = WRITTEN[request.param]
    settings, tokenizer = {**SIZES, **SETTINGS.get(request.param, {})}, make_tokenizer()
    kind: Any = getattr(transformers, architecture.model)
    torch.manual_seed(5)
    model = kind(kind.config_class(**settings, vocab_size=len(tokenizer))).eval()
    assert model.config.model_type == architecture.model_type
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "float")
    tokenizer.save_pretrained(tmp_path / "float")
    return request.param, model


def test_files(built: tuple[str, Any], tmp_path: Path) -> None:
    """Of quantized and of float weights, opened by every loader, and a folder again."""
    name, model = built
    # The same codes and kernels: at most a router's float32 sums have another order, some 2^-22 of the logits.
    attention, tolerance = model.config._attn_implementation, 1e-4 if name in ROUNDED else 1e-6
    quantized = hb.quantize_(copy.deepcopy(model), CONFIG)
    hb.save(quantized, tmp_path / "quantized")
    hb.export(tmp_path / "float", tmp_path / "float.gguf")
    hb.export(tmp_path / "quantized", tmp_path / "quantized.gguf")
    hb.export(tmp_path / "quantized.gguf", tmp_path / "again", "halfbyte")
    expected = logits(quantized, attention)
    assert float((logits(model, attention) - expected).norm() / expected.norm()) > 0.05
    for place, other in {
        "load": hb.load(tmp_path / "quantized.gguf"),
        "load_gguf": hb.load_gguf(tmp_path / "quantized.gguf")[0],
        "load, a folder again": hb.load(tmp_path / "again"),
        "from_pretrained, a folder again": type(model).from_pretrained(tmp_path / "again"),
        "load, float": hb.load(tmp_path / "float.gguf", format=CONFIG),
        "load_gguf, float": hb.load_gguf(tmp_path / "float.gguf", format=CONFIG)[0],
    }.items():
        assert type(other) is type(model), place
        assert any(isinstance(module, QuantModule) for module in other.modules()), place
        found = logits(other, attention)
        error = float((found - expected).norm() / expected.norm())
        assert error <= tolerance, f"{place}: logits are off by {error:.2%}"
    if find_family(model.config.to_dict()) is not None:
        config, tensors = open_checkpoint(tmp_path / "quantized.gguf")
        native = CpuModel(build_spec(config, FloatTensors(tensors)))
        ids, expected = IDS[:, : native.spec.max_positions], expected[:, : native.spec.max_positions]
        found = torch.stack([native.prefill(row, Cache(native.spec), every=True) for row in ids.tolist()])
        assert float((found - expected).norm() / expected.norm()) < 1e-4  # other orders of sums
