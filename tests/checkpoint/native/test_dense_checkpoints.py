"""Checkpoints of codes of 5 and 6 bits, which are dense in the files."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from samples import random_codes
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import halfbyte as hb
from halfbyte.checkpoint import describe
from halfbyte.checkpoint.native.checkpoint_model import Checkpoint
from halfbyte.dispatch.packed import packed_format
from halfbyte.errors import CheckpointError
from halfbyte.formats import Codes, as_format
from halfbyte.formats.dense import to_dense
from halfbyte.formats.sharding import take
from halfbyte.io import gguf
from halfbyte.ops import functions
from halfbyte.ops.functions import join

FORMATS = ("int5_g32_offset", "int6_g16")
LLAMA = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=False)).eval()


def same(a: Codes, b: Codes) -> bool:
    actual, expected = a.tensors(), b.tensors()
    return (a.format, a.shape) == (b.format, b.shape) and all(torch.equal(actual[part], expected[part]) for part in actual)


def edit(folder: Path, change: Callable[[str, dict[str, Any]], object]) -> None:
    """`change` gets the name of each quantized module, and what config.json says of it, in both places."""
    config = json.loads((folder / "config.json").read_text())
    weights = config.get("halfbyte", {"weights": {}})["weights"]
    for name, entry in (*weights.items(), *config["quantization_config"]["modules"].items()):
        change(name.removesuffix(".weight"), entry)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", FORMATS)
def test_convert_writes_them_dense(name: str, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    hb.convert(tmp_path / "float", tmp_path / "q", hb.Config(name, embedding=None))
    weight = "model.layers.0.mlp.up_proj.weight"
    wanted = hb.quantize(model.get_parameter(weight), name)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "q" / "model.safetensors")[f"{weight}.data"], to_dense(wanted)["data"])
    assert describe(tmp_path / "q").bits_per_weight == pytest.approx({"int5_g32_offset": 6, "int6_g16": 7}[name])
    assert same(hb.load_tensors(tmp_path / "q")[weight], wanted)
    hb.export(tmp_path / "q", tmp_path / "again", "halfbyte")
    assert same(hb.load_tensors(tmp_path / "again")[weight], wanted)


def test_other_numbers_of_bits_are_refused(tmp_path: Path) -> None:
    hb.save(hb.quantize_(nn.Sequential(nn.Linear(64, 8)), "q8_0"), tmp_path / "m")
    for bits in (7, 8, 6.0, "6", None):
        edit(tmp_path / "m", lambda _, entry, bits=bits: entry.update(format="int6_g32", bits=bits))
        with pytest.raises(CheckpointError, match="int6_g32 take 6 bits in files, got"):
            hb.load_tensors(tmp_path / "m")


def test_save_pretrained(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    config = hb.HalfbyteConfig("int6_g16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    model.save_pretrained(tmp_path / "q")
    codes = model.model.layers[0].mlp.up_proj.codes()
    stored = safetensors.torch.load_file(tmp_path / "q" / "model.safetensors")
    assert torch.equal(stored["model.layers.0.mlp.up_proj.weight.data"], to_dense(codes)["data"])
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path / "q"), hb.load(tmp_path / "q")):
        assert same(loaded.model.layers[0].mlp.up_proj.codes(), codes)


@pytest.fixture
def bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose kernels read neither codes of 5 and 6 bits nor iq4, as those of GPUs do not."""
    monkeypatch.setattr(functions, "packed_format", lambda fmt, *, on_cpu: packed_format(fmt, on_cpu=False))


LIMITED = ("int5_g32_offset", "int6_g16", "iq4_nl")


@pytest.mark.usefixtures("bytes_alone")
@pytest.mark.parametrize("name", LIMITED)
def test_a_weight_is_what_it_was_packed_from(name: str) -> None:
    for shape in ((40, 64), (3, 40, 64)):
        codes = random_codes(as_format(name), shape)
        packed = hb.pack(codes)
        assert (str(packed.format).split("_")[0], str(packed.codes_format)) == ("int8", name)
        assert str(packed).startswith(f"Packed({name} as int8_g")
        assert same(hb.unpack(packed), codes)
        assert same(hb.unpack(copy.deepcopy(packed)), codes)
    parts = [hb.pack(codes) for codes in (codes.select(0), codes.select(1))]
    assert same(hb.unpack(join(parts)), Codes.joined([codes.select(0), codes.select(1)], torch.cat))


@pytest.mark.usefixtures("bytes_alone")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LIMITED)
def test_a_model_is_saved_as_what_it_was_loaded_from(name: str, fused: bool, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    config = hb.Config(name, embedding=None)
    hb.convert(tmp_path / "float", tmp_path / "q", config)
    before = hb.load_tensors(tmp_path / "q")
    model = hb.load(tmp_path / "q")
    if fused:
        hb.fuse_(model)
    report = hb.report(model)
    assert {str(row.format) for row in report.quantized} == {name}
    note = f"{name} is int8_g[0-9a-z_]+ in memory, which this device reads instead: codes of 9 of 9 weights take 8 bits there"
    assert re.search(note, str(report))
    assert f"format={name}" in str(model)
    hb.save(model, tmp_path / "again")
    after = hb.load_tensors(tmp_path / "again")
    assert all(same(after[key], codes) for key, codes in before.items() if isinstance(codes, Codes))
    for folder in ("q", "again"):
        written = json.loads((tmp_path / folder / "config.json").read_text())
        weights, modules = written["halfbyte"]["weights"], written["quantization_config"]["modules"]
        bits = None if name == "iq4_nl" else int(name[3])
        assert all((entry["format"], entry.get("bits")) == (name, bits) for entry in (*weights.values(), *modules.values()))
    assert hb.quantize_(model, config) is model  # it is as asked


@pytest.mark.usefixtures("bytes_alone")
@pytest.mark.parametrize("name", LIMITED)
def test_transformers_saves_a_model_as_what_it_was_loaded_from(name: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(name))
    model.save_pretrained(tmp_path / "q")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    again.save_pretrained(tmp_path / "again")
    first, second = (safetensors.torch.load_file(tmp_path / folder / "model.safetensors") for folder in ("q", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    wanted = hb.quantize(LlamaForCausalLM.from_pretrained(tmp_path / "float").model.layers[0].mlp.up_proj.weight, name)
    for part, tensor in to_dense(wanted).items():
        assert torch.equal(first[f"model.layers.0.mlp.up_proj.weight.{part}"], tensor)


@pytest.mark.parametrize("name", LIMITED)
def test_a_state_is_the_same_on_every_device(name: str, request: pytest.FixtureRequest) -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return hb.quantize_(nn.Sequential(nn.Linear(64, 40)), name)

    state = built().state_dict()
    request.getfixturevalue("bytes_alone")
    there = built()
    assert state.keys() == there.state_dict().keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in there.state_dict().items())
    there.load_state_dict(state)
    codes = there.get_submodule("0").codes()
    assert (str(codes.format), torch.equal(codes.data, state["0.weight.data"])) == (name, True)


@pytest.mark.parametrize(("dim", "ranges"), [(0, ((1, 3), (5, 6))), (1, ((0, 32), (64, 70))), (1, ((16, 70),))])
def test_a_part_is_read(dim: int, ranges: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 70)
    safetensors.torch.save_file({"a.weight": weight}, tmp_path / "float.safetensors")
    hb.convert(tmp_path / "float.safetensors", tmp_path / "q", "int6_g16")
    assert same(Checkpoint(tmp_path / "q").part_of_codes("a.weight", dim, ranges), take(hb.quantize(weight, "int6_g16"), dim, ranges))


def test_a_gguf_file_becomes_a_folder_and_a_file_again(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    hb.convert(tmp_path / "float", tmp_path / "q", "int5_g32")
    hb.export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    file = gguf.read_header(tmp_path / "m.gguf")
    written = gguf.read(file.entries["blk.0.ffn_up.weight"])
    stored = hb.load_tensors(tmp_path / "q")["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(written, Codes)
    assert isinstance(stored, Codes)
    assert same(written, stored)
    hb.export(tmp_path / "m.gguf", tmp_path / "again", "halfbyte")
    assert same(hb.load_tensors(tmp_path / "again")["model.layers.0.mlp.up_proj.weight"], written)
