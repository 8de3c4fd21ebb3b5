"""Names of tensors and modules between halfbyte's checkpoints and vLLM's layers."""

from __future__ import annotations

import pytest

from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.formats import as_format
from halfbyte.integrations.vllm.names import RENAMED, QuantizedModules

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def module(fmt: str, *shape: int) -> Module:
    return Module(as_format(fmt), shape or (64, 32))


def renamed(name: str) -> str | None:
    """As vLLM's WeightsMapper applies the patterns: one after the other."""
    for pattern, replacement in RENAMED.items():
        if pattern.search(name):
            if replacement is None:
                return None
            name = pattern.sub(replacement, name)
    return name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight.data", "model.layers.0.self_attn.q_proj.weight_data"),
        ("model.embed_tokens.weight.scale", "model.embed_tokens.weight_scale"),
        ("lm_head.weight.zero", "lm_head.weight_zero"),
        ("model.layers.0.mlp.experts.gate_up_proj.weight.data", "model.layers.0.mlp.experts.gate_up_proj_data"),
        ("experts.down_proj.weight.scale", "experts.down_proj_scale"),
        ("model.layers.0.mlp.experts.down_proj.weight", None),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.0.self_attn.q_proj.input_order", "model.layers.0.self_attn.q_proj.input_order"),
        ("model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.experts.3.down_proj.weight"),
        ("model.layers.0.self_attn.q_proj.weight_data", "model.layers.0.self_attn.q_proj.weight_data"),
    ],
)
def test_tensors(name: str, expected: str | None) -> None:
    assert renamed(name) == expected


def test_a_layer_is_one_module() -> None:
    modules = QuantizedModules({"model.layers.0.mlp.down_proj": module("q4_0")})
    assert modules.of_layer("model.layers.0.mlp.down_proj", FUSED) == (module("q4_0"),)
    assert modules.of_layer("model.layers.1.mlp.down_proj", FUSED) == ()


@pytest.mark.parametrize("fused", [FUSED, {}], ids=["the model says", "the model does not say"])
def test_a_fused_layer_is_several(fused: dict[str, list[str]]) -> None:
    modules = QuantizedModules({"a.q_proj": module("q4_0"), "a.v_proj": module("int6_g16"), "b.k_proj": module("q8_0")})
    assert modules.of_layer("a.qkv_proj", fused) == (module("q4_0"), None, module("int6_g16"))
    assert modules.of_layer("b.qkv_proj", fused) == (None, module("q8_0"), None)
    assert modules.of_layer("c.qkv_proj", fused) == ()


def test_a_fused_layer_of_the_checkpoint() -> None:
    modules = QuantizedModules({"a.qkv_proj": module("int8_tensor")})
    assert modules.of_layer("a.qkv_proj", FUSED) == (module("int8_tensor"),)


def test_experts_are_two_stacks() -> None:
    up, down = module("q4_0", 8, 128, 32), module("q8_0", 8, 32, 64)
    modules = QuantizedModules({"a.experts.gate_up_proj": up, "a.experts.down_proj": down, "b.experts.down_proj": down})
    assert modules.of_experts("a.experts") == (up, down)
    assert modules.of_experts("c.experts") is None
    with pytest.raises(LookupError):
        modules.of_experts("b.experts")


def test_an_embedding_without_a_prefix() -> None:
    modules = QuantizedModules({"model.embed_tokens": module("q8_0", 99, 32), "model.other.embed_tokens": module("q8_0", 40, 32)})
    assert modules.of_embedding("model.embed_tokens", 99, 32) == module("q8_0", 99, 32)
    assert modules.of_embedding("", 99, 32) == module("q8_0", 99, 32)
    assert modules.of_embedding("", 99, 64) is None
    assert modules.of_embedding("lm_head", 99, 32) is None


def test_two_embeddings_of_one_shape_are_not_guessed() -> None:
    modules = QuantizedModules({"a.embed_tokens": module("q8_0", 99, 32), "b.embed_tokens": module("q4_0", 99, 32)})
    assert modules.of_embedding("", 99, 32) is None


def test_a_model_renames_modules() -> None:
    modules = QuantizedModules({"model.language_model.embed_tokens": module("q8_0", 99, 32)})
    modules.rename(lambda named: {name.replace("model.language_model", "language_model.model"): one for name, one in named.items()})
    assert modules.of_embedding("language_model.model.embed_tokens", 99, 32) == module("q8_0", 99, 32)
