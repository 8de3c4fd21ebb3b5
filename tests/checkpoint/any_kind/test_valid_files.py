"""Valid files that are not damaged: read, or named with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.checkpoint import convert, describe, export, load, load_tensors, save
from halfbyte.errors import CheckpointError
from halfbyte.io import gguf
from halfbyte.nn.convert import quantize_
from halfbyte.nn.modules.quantized import QuantEmbedding

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
EMBEDDING, UP = "model.embed_tokens", "model.layers.0.mlp.up_proj"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=32, max_position_embeddings=16, tie_word_embeddings=False)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    llama().save_pretrained(root / "float")
    convert(root / "float", root / "halfbyte", "int4_g32_zp")
    for kind in ("awq", "gptq", "compressed-tensors"):
        export(root / "halfbyte", root / kind, kind)
    return root


def rewritten(source: Path, target: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    """A folder with these tensors, whose quantization_config says something else."""
    shutil.copytree(source, target)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    if settings:
        config["quantization_config"] = config.get("quantization_config", {}) | settings
    (target / "config.json").write_text(json.dumps(config))
    return target


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(12)[None]).logits.float()
    return found


def packed(weight: Tensor, bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' parts of a symmetric weight in groups of 32, and the values that they stand for."""
    n, k = weight.shape
    groups = weight.float().reshape(n, k // 32, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).half()
    codes = (groups / scale.float()).round()
    unsigned = codes.reshape(n, k).to(torch.int64) + 2 ** (bits - 1)
    each = 32 // bits
    words = sum(unsigned.reshape(n, k // each, each)[..., i] << (bits * i) for i in range(each))
    assert isinstance(words, Tensor)
    parts = {"weight_packed": words.to(torch.int32), "weight_scale": scale[..., 0], "weight_shape": torch.tensor([n, k])}
    return parts, (codes * scale.float()).reshape(n, k)


def group(bits: int, *targets: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"targets": list(targets), "weights": weights, "input_activations": None}


# compressed-tensors


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
@pytest.mark.parametrize("target", ["Embedding", "re:.*embed_tokens$", "Module"])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_other_classes_than_linear(bits: int, target: str, prefix: str, folders: Path, tmp_path: Path) -> None:
    """Linears of 4 bits beside an embedding of its own, which a class or a base class names."""
    tensors = load_file(folders / "compressed-tensors" / "model.safetensors")
    parts, values = packed(load_file(folders / "float" / "model.safetensors")[f"{EMBEDDING}.weight"], bits)
    del tensors[f"{EMBEDDING}.weight"]
    tensors |= {f"{EMBEDDING}.{part}": tensor for part, tensor in parts.items()}
    tensors = {f"{prefix}{name}" if name.startswith("model.") or prefix == "module." else name: t for name, t in tensors.items()}
    groups = {"group_0": group(4, "Linear"), "group_1": group(bits, target)}
    folder = rewritten(folders / "compressed-tensors", tmp_path / "m", tensors, config_groups=groups)
    model = load(folder)
    embedding = model.get_submodule(EMBEDDING)
    assert isinstance(embedding, QuantEmbedding)
    assert torch.equal(embedding(torch.arange(32)), values.to(embedding.dtype))
    assert not describe(folder).notes


def test_bits_are_those_of_the_tensor(folders: Path, tmp_path: Path) -> None:
    tensors = load_file(folders / "compressed-tensors" / "model.safetensors")
    folder = rewritten(folders / "compressed-tensors", tmp_path / "8", tensors, config_groups={"g": group(8, "Linear")})
    assert torch.equal(logits(load(folder)), logits(load(folders / "compressed-tensors")))
    assert any("config.json says 8 bits" in note and "its tensor has 4, which are used" in note for note in describe(folder).notes)
    tensors[f"{UP}.weight_packed"] = torch.zeros(64, 3, dtype=torch.int32)
    folder = rewritten(folders / "compressed-tensors", tmp_path / "3", tensors, config_groups={"g": group(4, "Linear")})
    with pytest.raises(CheckpointError, match=r"packed in 4 bits of type 'int', its tensor in 3: halfbyte reads integers of 4 and 8 bits"):
        load(folder)


@pytest.mark.parametrize("groups", [None, {}, []])
def test_folders_whose_caches_alone_are_quantized(groups: object, folders: Path, tmp_path: Path) -> None:
    tensors = load_file(folders / "float" / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.{part}_scale": torch.tensor([0.03]) for i in range(2) for part in "kv"}
    settings = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": groups, "kv_cache_scheme": {"num_bits": 8}}
    folder = rewritten(folders / "float", tmp_path / "m", tensors, **settings)
    assert torch.equal(logits(load(folder)), logits(llama()))
    assert any("4 scales and zero points of them are not used" in note for note in describe(folder).notes)


@pytest.mark.parametrize(
    ("form", "suffixes"),
    [
        ("sparse-24-bitmask", ("weight.compressed", "weight.bitmask", "weight.shape")),
        ("sparse-bitmask", ("weight.compressed", "weight.bitmask", "weight.row_offsets")),
        ("marlin-24", ("weight_packed", "meta", "scale_packed")),
    ],
)
def test_sparse_layouts_are_named(form: str, suffixes: tuple[str, ...], folders: Path, tmp_path: Path) -> None:
    tensors = load_file(folders / "float" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        del tensors[name]
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": torch.zeros(2, 32, dtype=torch.int32) for suffix in suffixes}
    said = {"format": form} if form == "marlin-24" else {"sparsity_config": {"format": form}}
    folder = rewritten(folders / "float", tmp_path / "m", tensors, quant_method="compressed-tensors", **said)
    with pytest.raises(CheckpointError, match=rf"in the sparse layout {form}, which halfbyte does not read: take the float model") as e:
        load(folder)
    assert "damaged" not in str(e.value)


# GGUF


@pytest.mark.parametrize(
    ("kind", "architecture", "message"),
    [
        ("adapter", "llama", "a LoRA adapter, not a model: name the GGUF file of the model that it belongs to, into which"),
        ("imatrix", "", "an importance matrix, which guides llama.cpp's quantization, not a model: name the GGUF file of the model"),
        ("mmproj", "clip", "the image or audio encoder of a model, not a model: name the GGUF file of the model itself"),
        ("", "controlvector", "a control vector, not a model"),
        ("vocab", "llama", "a vocabulary, not a model"),
    ],
)
def test_gguf_files_that_hold_no_model(kind: str, architecture: str, message: str, tmp_path: Path) -> None:
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", architecture)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")


# Names that wrappers of a model leave


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("kind", ["float", "awq", "gptq", "compressed-tensors"])
def test_names_with_the_prefix_of_a_wrapper(kind: str, prefix: str, folders: Path, tmp_path: Path) -> None:
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(folders / kind / "model.safetensors").items()}
    folder = rewritten(folders / kind, tmp_path / "m", tensors)
    fmt = "q8_0" if kind == "float" else None
    assert torch.equal(logits(load(folder, format=fmt)), logits(load(folders / kind, format=fmt)))


def test_names_without_an_architecture_stay(folders: Path, tmp_path: Path) -> None:
    tensors = {f"module.{name}": tensor for name, tensor in load_file(folders / "float" / "model.safetensors").items()}
    folder = rewritten(folders / "float", tmp_path / "m", tensors)
    (folder / "config.json").unlink()
    convert(folder, tmp_path / "c", "q8_0")
    assert f"module.{UP}.weight" in load_tensors(tmp_path / "c")


def test_wrapped_models_are_saved_without_the_wrapper(tmp_path: Path) -> None:
    model = quantize_(llama(), "q8_0")
    expected = logits(model)
    compiled: Any = torch.compile(model, backend="eager")
    wrappers = {"compiled": compiled, "parallel": nn.DataParallel(model), "both": nn.DataParallel(compiled)}
    for name, wrapped in wrappers.items():
        save(wrapped, tmp_path / name)
        assert torch.equal(logits(load(tmp_path / name)), expected)
        into: Any = torch.compile(llama(), backend="eager") if name == "compiled" else nn.DataParallel(llama())
        assert load(tmp_path / name, model=into) is into
        assert torch.equal(logits(getattr(into, "_orig_mod", None) or into.module), expected)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    save(model, tmp_path / "layer")
    assert torch.equal(logits(load(tmp_path / "layer")), expected)


# What is said of settings that other projects write


@pytest.mark.parametrize(
    ("kind", "settings", "tensors", "message"),
    [
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            {},
            "checkpoint_format 'marlin', halfbyte reads gptq, gptq_v2: convert it with GPTQModel",
        ),
        ("gptq", {"is_marlin_format": True, "checkpoint_format": None}, {}, "checkpoint_format 'marlin', halfbyte reads"),
        ("gptq", {}, {f"{UP}.qweight": torch.zeros(2, 4, 64, dtype=torch.int32)}, "halfbyte reads matrices: start from the float model"),
        ("gptq", {}, {f"{UP}.scales": torch.ones(1, 64).to(torch.float8_e4m3fn)}, "halfbyte reads scales of float16, bfloat16 and float32"),
    ],
)
def test_forms_that_are_not_read(
    kind: str, settings: dict[str, Any], tensors: dict[str, Tensor], message: str, folders: Path, tmp_path: Path
) -> None:
    folder = rewritten(folders / kind, tmp_path / "m", load_file(folders / kind / "model.safetensors") | tensors, **settings)
    with pytest.raises(CheckpointError, match=message) as e:
        load(folder)
    assert "damaged" not in str(e.value)


def test_counts_of_what_was_trained(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "float", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    more = {"num_parameters": 7 * 10**9, "n_train_tokens": 10**12, "n_positions": 1 << 24}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | more))
    assert load(tmp_path / "m", format="q8_0")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"num_experts": 1 << 24}))
    with pytest.raises(CheckpointError, match="num_experts: 16777216, over 2097152: the file is damaged"):
        load(tmp_path / "m", format="q8_0")


def test_numbers_for_each_layer_of_a_gguf_file(folders: Path, tmp_path: Path) -> None:
    convert(folders / "float", tmp_path / "h", "q4_0")
    export(tmp_path / "h", tmp_path / "m.gguf", "gguf")
    file = gguf.read_header(tmp_path / "m.gguf")
    tensors = {name: (entry.kind, entry.shape) for name, entry in file.entries.items()}
    raw = (tmp_path / "m.gguf").read_bytes()
    for heads in ([2, 2], [2, 4]):
        writer = gguf.Writer(tmp_path / f"{heads[1]}.gguf", {**file.metadata, "llama.attention.head_count": heads}, tensors)
        for name, entry in file.entries.items():
            data = bytearray(raw[entry.place.offset : entry.place.offset + entry.place.spec.nbytes])
            writer.write(name, torch.frombuffer(data, dtype=entry.place.spec.dtype).reshape(entry.place.spec.shape))
        writer.finish()
    assert torch.equal(logits(load(tmp_path / "2.gguf")), logits(load(tmp_path / "m.gguf")))
    with pytest.raises(CheckpointError, match=r"says \[2, 4\] for llama.attention.head_count, halfbyte reads one number for all layers"):
        load(tmp_path / "4.gguf")
