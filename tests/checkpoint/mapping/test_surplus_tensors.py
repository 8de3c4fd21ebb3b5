"""Tensors that files hold beyond those that config.json makes the model have: used, known not to matter, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from halfbyte.checkpoint import convert, describe, export, load
from halfbyte.errors import CheckpointError
from halfbyte.integrations.transformers.quantizer import HalfbyteConfig
from halfbyte.nn.report import report

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.1.mlp"
KINDS = ("float", "awq", "gptq", "compressed-tensors", "saved")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    config = LlamaConfig(**SMALL, vocab_size=32, max_position_embeddings=16, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(root / "float")
    convert(root / "float", root / "halfbyte", "int4_g32_zp")
    for kind in ("awq", "gptq", "compressed-tensors"):
        export(root / "halfbyte", root / kind, kind)
    quantized = AutoModelForCausalLM.from_pretrained(root / "float", quantization_config=HalfbyteConfig("int4_g32_zp"))
    quantized.save_pretrained(root / "saved")
    return root


def extended(source: Path, target: Path, settings: dict[str, Any] | None = None, **tensors: Tensor) -> Path:
    """A copy with more tensors, whose config.json says something else."""
    shutil.copytree(source, target)
    save_file(load_file(source / "model.safetensors") | tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | (settings or {})))
    return target


def opened(folder: Path) -> Any:
    return load(folder, format="q8_0" if folder.name.startswith("float") else None)


@pytest.mark.parametrize("kind", KINDS)
def test_biases_of_modules_without_one(kind: str, folders: Path, tmp_path: Path) -> None:
    surplus = {f"{ATTENTION}.o_proj.bias": torch.full((32,), 0.5), f"{MLP}.up_proj.bias": torch.zeros(64)}
    folder = extended(folders / kind, tmp_path / f"{kind}-1", **surplus)
    with pytest.raises(CheckpointError, match=r"the files have model\.layers\.0\.self_attn\.o_proj\.bias, for which the Linear of Llama"):
        opened(folder)
    # The remedy: what config.json says of it.
    if kind in ("float", "saved"):
        others = {f"model.layers.{i}.self_attn.{p}_proj.bias": torch.ones(16 if p in "kv" else 32) for i in (0, 1) for p in "qkvo"}
        model = opened(extended(folders / kind, tmp_path / f"{kind}-2", {"attention_bias": True}, **others))
        assert bool((model.get_parameter(f"{ATTENTION}.o_proj.bias") == 1).all())
    surplus[f"{ATTENTION}.o_proj.bias"].zero_()
    model = opened(extended(folders / kind, tmp_path / f"{kind}-3", **surplus))
    assert any("2 tensors of the files are left out" in note and "a bias of zeros" in note for note in report(model).notes)


def test_converting_and_exporting_refuse_them_too(folders: Path, tmp_path: Path) -> None:
    surplus = {f"{ATTENTION}.o_proj.bias": torch.full((32,), 0.5)}
    for write, kind in ((lambda *paths: convert(*paths, "q8_0"), "float"), (lambda *paths: export(*paths, "gptq"), "awq")):
        folder = extended(folders / kind, tmp_path / kind, **surplus)
        with pytest.raises(CheckpointError, match=r"o_proj\.bias, for which the Linear of LlamaForCausalLM has no place"):
            write(folder, tmp_path / "to")
        assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (f"{ATTENTION}.q_norm.weight", "LlamaAttention"),  # Qwen 3's
        (f"{MLP}.up_proj.pre_quant_scale", "Linear"),  # Model Optimizer's AWQ
        ("model.layers.1.post_feedforward_layernorm.weight", "LlamaDecoderLayer"),  # OLMo 2's
    ],
)
@pytest.mark.parametrize("kind", ["float", "awq"])
def test_parts_that_a_module_does_not_have(kind: str, name: str, at: str, folders: Path, tmp_path: Path) -> None:
    folder = extended(folders / kind, tmp_path / kind, **{name: torch.ones(32), f"{name}2": torch.ones(32)})
    with pytest.raises(CheckpointError, match=rf"the files have {name} and 1 more, for which the {at} of LlamaForCausalLM has no place"):
        opened(folder)


def test_what_does_not_matter(folders: Path, tmp_path: Path) -> None:
    reasons = {
        f"{ATTENTION}.rotary_emb.inv_freq": "the model computes it",
        f"{ATTENTION}.k_scale": "activations and caches are not quantized statically",
        f"{MLP}.up_proj.input_scale": "activations and caches are not quantized statically",
        "model.layers.2.mlp.up_proj.weight": "LlamaForCausalLM does not have it",  # a layer that predicts further tokens
        "visual.proj.weight": "LlamaForCausalLM does not have it",
    }
    folder = extended(folders / "gptq", tmp_path / "gptq", **{name: torch.ones(32) for name in reasons})
    rows = {row.name: row.reason for row in describe(folder).rows}
    assert {name: rows[name] for name in reasons} == {name: f"left out: {reason}" for name, reason in reasons.items()}
    notes = report(load(folder)).notes
    assert any("2 tensors of the files are left out" in note and "does not have it" in note for note in notes)


def test_masks_of_old(tmp_path: Path) -> None:
    """GPT-2 had a causal mask called bias."""
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32, n_positions=16)).save_pretrained(tmp_path / "float")
    old = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16).tril(), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert load(extended(tmp_path / "float", tmp_path / "old", **old), format="q8_0")


def test_a_weight_that_is_there_twice(folders: Path, tmp_path: Path) -> None:
    weight = torch.ones(64, 32)
    for kind in ("awq", "gptq", "compressed-tensors", "saved"):
        folder = extended(folders / kind, tmp_path / kind, **{f"{MLP}.up_proj.weight": weight})
        with pytest.raises(CheckpointError, match=rf"the files hold {MLP}.up_proj.weight twice, in two ways"):
            load(folder)
    norm = load_file(folders / "float" / "model.safetensors")["model.norm.weight"]
    assert load(extended(folders / "float", tmp_path / "same", **{"norm.weight": norm}), format="q8_0")
    folder = extended(folders / "float", tmp_path / "other", **{"norm.weight": norm + 1})
    with pytest.raises(
        CheckpointError, match=r"the files have both .*norm\.weight and .*norm\.weight for model\.norm\.weight, which differ"
    ):
        load(folder, format="q8_0")
