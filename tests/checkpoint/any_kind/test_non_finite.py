"""Values that are not finite in tensors that are not quantized, and headers whose types are not those of the data."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import halfbyte as hb
from halfbyte.checkpoint import convert, export, load, load_tensors, save
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.integrations.transformers.quantizer import HalfbyteConfig
from halfbyte.io.gguf import read_header
from halfbyte.quantizers.check import non_finite

NORM, HEADER_NORM = "model.norm.weight", "blk.0.ffn_norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, tie_word_embeddings=False, **sizes))
    model.save_pretrained(root / "float")
    convert(root / "float", root / "halfbyte", "int4_g32_zp")
    for kind in ("awq", "gptq", "compressed-tensors"):
        export(root / "halfbyte", root / kind, kind)
    convert(root / "float", root / "q4_0", "q4_0")
    export(root / "q4_0", root / "m.gguf", "gguf")
    config = HalfbyteConfig("q4_0")
    AutoModelForCausalLM.from_pretrained(root / "float", quantization_config=config).save_pretrained(root / "saved")
    return root


def with_value(source: Path, target: Path, value: float) -> Path:
    """A copy whose last norm holds `value` once; its checksum, where there is one, is right."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[NORM].view(-1)[3] = value
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    if "halfbyte" in config:
        config["halfbyte"]["plain"][NORM] = zlib.crc32(tensors[NORM].numpy().tobytes())
        (target / "config.json").write_text(json.dumps(config))
    return target


def test_what_is_said_of_a_tensor() -> None:
    inf = float("inf")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert non_finite(torch.full((3, 70000), torch.finfo(dtype).max, dtype=dtype), "w") is None  # their sum would overflow
    assert non_finite(torch.empty(0), "w") is None
    assert non_finite(torch.ones(3).to(torch.float8_e5m2), "w") is None
    assert non_finite(torch.tensor([[1.0, -inf]]), "w") == "w [1, 2] holds 1 NaN or infinite value, the first (-inf) at [0, 1]"
    assert non_finite(torch.tensor([1.0, -inf]), "w", infinities=True) is None
    found = non_finite(torch.tensor([inf, float("nan"), -inf]), "w", infinities=True)
    assert found == "w [3] holds 1 NaN value, the first (nan) at [1]"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["float", "halfbyte", "awq", "gptq", "compressed-tensors"])
def test_a_norm_that_is_not_finite(kind: str, value: float, folders: Path, tmp_path: Path) -> None:
    folder = with_value(folders / kind, tmp_path / "m", value)
    message = rf"{NORM} \[32\] holds 1 NaN or infinite value, the first \({value}\) at \[3\]: the file is damaged"
    with pytest.raises(CheckpointError, match=message):
        load(folder, format="q8_0" if kind == "float" else None)
    if kind == "float":
        with pytest.raises(CheckpointError, match=message):
            convert(folder, tmp_path / "c", "q8_0")
        assert not (tmp_path / "c").exists()
        with pytest.raises(CheckpointError, match=f"{NORM} .* holds 1 NaN or infinite value"):
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q8_0"))
    elif kind == "awq":
        with pytest.raises(CheckpointError, match=message):
            export(folder, tmp_path / "e", "gptq")
        assert not (tmp_path / "e").exists()


def test_transformers_loads_the_same_files(folders: Path, tmp_path: Path) -> None:
    folder = with_value(folders / "saved", tmp_path / "m", float("nan"))
    with pytest.raises(CheckpointError, match=f"{NORM} .* holds 1 NaN or infinite value"):
        load(folder)
    with pytest.raises(CheckpointError, match=f"{NORM} .* holds 1 NaN or infinite value"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_norm_in_a_gguf_file(folders: Path, tmp_path: Path) -> None:
    data = bytearray((folders / "m.gguf").read_bytes())
    norm = load_tensors(folders / "m.gguf")[NORM]
    assert isinstance(norm, Tensor)
    at = data.rindex(norm.numpy().tobytes())  # all norms are ones: any of them will do
    data[at : at + 4] = b"\0\0\xc0\x7f"
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"norm.weight \[32\] holds 1 NaN or infinite value, the first \(nan\) at \[0\]"):
        load(tmp_path / "m.gguf")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))


def test_masks_hold_infinities(tmp_path: Path) -> None:
    model = hb.quantize_(Masked(), "q8_0")
    save(model, tmp_path / "m")
    again = load(tmp_path / "m", model=Masked())
    assert torch.equal(again.get_buffer("mask"), model.get_buffer("mask"))
    assert torch.equal(load_tensors(tmp_path / "m")["mask"], model.get_buffer("mask"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("linear.bias", "inf"), ("linear.bias", "nan"), ("mask", "nan")])
def test_what_load_would_refuse_is_not_saved(name: str, value: str, tmp_path: Path) -> None:
    model = hb.quantize_(Masked(), "q8_0")
    tensors: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    tensors[name].data.view(-1)[1] = float(value)
    with pytest.raises(ArgumentError, match=f"{name} .* holds 1 NaN .*: repair the model before saving it"):
        save(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_gguf_header_with_another_type(where: str, folders: Path, tmp_path: Path) -> None:
    """A type of fewer bytes leaves some that belong to no tensor: q4_0 for a norm, int8 for the last of the file."""
    data = bytearray((folders / "m.gguf").read_bytes())
    entries = read_header(folders / "m.gguf").entries
    name = max(entries, key=lambda n: entries[n].place.offset) if where == "behind" else HEADER_NORM
    at = data.index(name.encode()) + len(name)
    dimensions = int.from_bytes(data[at : at + 4], "little")
    data[at + 4 + 8 * dimensions] = 24 if entries[name].blocks is None and where == "behind" else 2
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"\d+ bytes {where} .* belong to no tensor: the file is damaged"):
        load(tmp_path / "m.gguf")
