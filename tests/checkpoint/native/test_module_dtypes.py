"""Modules that stay in float32 in a half-precision model, as their class or the user says, do so on every way to a file and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import halfbyte as hb
from halfbyte.nn.modules.quantized import QuantModule

FORMAT = hb.Config("q8_0", compute="float")
IDS = torch.arange(2, 10)[None]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}


def t5() -> Any:
    sizes = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes))


def blip2() -> Any:
    vision = {**SIZES, "image_size": 4, "patch_size": 2}
    text = {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32, "model_type": "opt", "max_position_embeddings": 32}
    qformer = {**SIZES, "encoder_hidden_size": 32, "max_position_embeddings": 16}
    config = Blip2Config(vision_config=vision, qformer_config=qformer, text_config=text, num_query_tokens=4, image_token_index=1)
    return Blip2ForConditionalGeneration(config)


def glm() -> Any:
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1}
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(**SIZES, **experts, topk_group=1, num_key_value_heads=2, head_dim=16, max_position_embeddings=32)
    )


MODELS: dict[str, tuple[Callable[[], Any], torch.dtype, str]] = {
    "t5": (t5, torch.float16, "DenseReluDense.wo"),
    "blip2": (blip2, torch.float16, "qformer"),
    "glm4_moe": (glm, torch.bfloat16, "e_score_correction_bias"),  # in float32 in every half-precision model
}


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Of all quantized modules, parameters and persistent buffers."""
    found = {name: tensor.dtype for name, tensor in model.state_dict().items() if tensor.is_floating_point() and ".weight." not in name}
    return found | {name: module.dtype for name, module in model.named_modules() if isinstance(module, QuantModule)}


def output(model: Any) -> Tensor:
    more = {"decoder_input_ids": IDS} if isinstance(model, T5ForConditionalGeneration) else {}
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS, **more).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_what_a_class_keeps_in_float32(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, dtype, kept = MODELS[name]
    make().to(dtype).save_pretrained(tmp_path / "f")
    cls = type(make())
    want = hb.quantize_(cls.from_pretrained(tmp_path / "f"), FORMAT)
    assert {want_dtype for module, want_dtype in dtypes(want).items() if kept in module} == {torch.float32}
    assert dtype in dtypes(want).values()
    ways = {
        "from_pretrained": cls.from_pretrained(tmp_path / "f", quantization_config=hb.HalfbyteConfig(FORMAT)),
        "load(format=)": hb.load(tmp_path / "f", format=FORMAT),
    }
    hb.save(want, tmp_path / "s")
    want.save_pretrained(tmp_path / "p")
    hb.convert(tmp_path / "f", tmp_path / "c", FORMAT)
    ways["p from_pretrained"] = cls.from_pretrained(tmp_path / "p", dtype=dtype)
    for folder in "psc" if name != "blip2" else "sc":  # transformers' save_pretrained says that a BLIP-2 of this kind is all in float32
        ways[f"{folder} from_pretrained"] = cls.from_pretrained(tmp_path / folder)
    for folder in "sc":
        ways[f"{folder} load"] = hb.load(tmp_path / folder)
    for way, model in ways.items():
        assert dtypes(model) == dtypes(want), way
        if name != "blip2":  # which takes images
            assert torch.equal(output(model), output(want)), way


def test_what_the_user_keeps_in_float32(tmp_path: Path) -> None:
    """transformers does not know of it: the files say it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)).to(torch.bfloat16)
    model.model.layers[1].mlp.float()
    hb.quantize_(model, FORMAT)
    model.save_pretrained(tmp_path / "p")
    hb.save(model, tmp_path / "s")
    loaded = [hb.load(tmp_path / "s"), *(LlamaForCausalLM.from_pretrained(tmp_path / folder) for folder in "ps")]
    for again in loaded:
        assert dtypes(again) == dtypes(model)
        assert again.model.layers[1].mlp.up_proj.dtype == torch.float32
        assert again.model.layers[0].mlp.up_proj.dtype == torch.bfloat16
    in_float32 = LlamaForCausalLM.from_pretrained(tmp_path / "p", dtype=torch.float32)
    assert {*dtypes(in_float32).values()} == {torch.float32}
    in_half = LlamaForCausalLM.from_pretrained(tmp_path / "p", dtype=torch.float16)
    assert in_half.model.layers[0].mlp.up_proj.dtype == torch.float16


def test_a_dtype_that_is_none(tmp_path: Path) -> None:
    from halfbyte.checkpoint.native.quantization_config import parse
    from halfbyte.errors import CheckpointError

    entry = {"format": "q4_0", "shape": [4, 32], "dtype": "int8"}
    with pytest.raises(CheckpointError, match="a dtype is one of float32, bfloat16, float16, got 'int8'"):
        parse({"version": 1, "modules": {"a": entry}})
