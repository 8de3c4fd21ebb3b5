"""Models of one kind written as another: code for code, or said in the report where that cannot be; killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from halfbyte.checkpoint import convert, describe, export, load, load_tensors, save
from halfbyte.checkpoint.native.saving import with_separate_head
from halfbyte.cli import main
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.formats import Codes
from halfbyte.integrations.transformers.gguf import load_gguf
from halfbyte.nn.config import Config
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.modules.quantized import QuantLinear

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
TINY = Path(__file__).parents[3] / "models" / "tiny-llama"
KINDS = ("gguf", "awq", "gptq", "compressed-tensors", "halfbyte")


def make(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, vocab_size=96, max_position_embeddings=64, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model, and what it is quantized: float, tied, and by the name of each format."""
    root = tmp_path_factory.mktemp("models")
    make().save_pretrained(root / "float")
    make(tied=True).save_pretrained(root / "tied")
    (root / "float" / "tokenizer_config.json").write_text("{}")
    for name in ("q4_0", "int4_g32_zp", "int4_g64", "int8_channel_bf16", "q8_0", "q4_1"):
        convert(root / "float", root / name, name)
    convert(root / "tied", root / "tied-q4_0", "q4_0")
    return root


def place(folder: Path, kind: str) -> Path:
    return folder / ("m.gguf" if kind == "gguf" else kind)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model((torch.arange(48)[None] * 7) % 96).logits.float()
    return found


def linears(tensors: dict[str, Codes | Tensor]) -> dict[str, Codes]:
    return {name: value for name, value in tensors.items() if isinstance(value, Codes) and "proj" in name}


def same_codes(a: Codes, b: Codes) -> bool:
    first, second = a.tensors(), b.tensors()
    return a.shape == b.shape and first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# What stays what it is


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["q4_0", "tied-q4_0"])
def test_every_kind_holds_the_same_codes(source: str, kind: str, folders: Path, tmp_path: Path) -> None:
    report = export(folders / source, place(tmp_path, kind), kind)
    actual, reference = load_tensors(folders / source), load_tensors(place(tmp_path, kind))
    codes, others = linears(actual), linears(reference)
    assert codes.keys() == others.keys()
    assert len(codes) == 14
    assert all(same_codes(codes[name], others[name]) for name in codes)
    quantized = {row.name for row in report.quantized}
    assert {name.removesuffix(".weight") for name in codes} <= quantized
    plain = {name: value for name, value in actual.items() if isinstance(value, Tensor)}
    assert all(torch.equal(value, reference[name].to(value.dtype)) for name, value in plain.items())  # type: ignore[union-attr,arg-type]
    expected = load(folders / source)  # a GGUF file does not say what a model computes in
    model = load_gguf(tmp_path / "m.gguf", dtype=torch.bfloat16)[0] if kind == "gguf" else load(place(tmp_path, kind))
    # Only an output head that became bfloat16 may round otherwise: each weight by 2^-9, 64 of them in a sum.
    kept = reference["lm_head.weight"].__class__ is actual["lm_head.weight"].__class__
    assert torch.allclose(logits(model), logits(expected), rtol=0, atol=0.0 if kept else 0.02)
    assert describe(place(tmp_path, kind)).quantized
    # And back.
    export(place(tmp_path, kind), tmp_path / "back", "halfbyte")
    again = linears(load_tensors(tmp_path / "back"))
    assert all(same_codes(codes[name], again[name]) for name in codes)


def test_config_ties_no_head_that_the_files_have(folders: Path, tmp_path: Path) -> None:
    """vLLM ties by config.json alone, and by a family's default where that says nothing."""

    def tied(folder: str) -> object:
        return json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"]

    model = make()
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "float", state_dict=model.state_dict())
    convert(tmp_path / "float", tmp_path / "codes", "q8_0")
    save(load(tmp_path / "codes"), tmp_path / "saved")
    assert tied("codes") is False
    path = tmp_path / "codes" / "config.json"  # as earlier versions wrote it
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    export(tmp_path / "codes", tmp_path / "gptq", "gptq")
    export(folders / "tied-q4_0", tmp_path / "tied", "gptq")
    assert (tied("float"), tied("saved"), tied("gptq"), tied("tied")) == (True, False, False, True)
    assert with_separate_head({"text_config": {"a": 1}}, {"lm_head.weight"}) == {
        "text_config": {"a": 1, "tie_word_embeddings": False},
        "tie_word_embeddings": False,
    }
    for config, names in (({"is_encoder_decoder": True}, {"lm_head.weight"}), ({}, {"lm_head.weight"}), ({"a": 1}, {"head"})):
        assert with_separate_head(config, names) == config


@pytest.mark.parametrize(
    ("source", "kind", "kept"),
    [
        ("int4_g32_zp", "awq", True),
        ("int4_g32_zp", "gptq", True),
        ("int4_g32_zp", "compressed-tensors", True),
        ("int4_g64", "gptq", True),
        ("q8_0", "gptq", True),
        ("int8_channel_bf16", "compressed-tensors", True),
        ("q4_1", "gguf", True),
        ("q8_0", "gguf", True),
        ("q8_0", "compressed-tensors", True),
    ],
)
def test_formats_that_a_kind_holds(source: str, kind: str, kept: bool, folders: Path, tmp_path: Path) -> None:
    export(folders / source, place(tmp_path, kind), kind)
    codes, others = linears(load_tensors(folders / source)), linears(load_tensors(place(tmp_path, kind)))
    fits = {name for name, value in codes.items() if value.shape[1] % value.format.block_size(value.shape[1]) == 0}
    assert fits <= others.keys()
    assert fits
    assert all(same_codes(codes[name], others[name]) for name in fits)


@pytest.mark.parametrize(("source", "numbers"), [("int4_g64", "q4_0"), ("int4_g32_zp", "int5_g32")])
def test_gguf_holds_longer_blocks_and_points_exactly(source: str, numbers: str, folders: Path, tmp_path: Path) -> None:
    """As several blocks with one scale, and as q5_0 with q - point."""
    export(folders / source, tmp_path / "m.gguf", "gguf")
    actual, expected = load_tensors(folders / source), load_tensors(tmp_path / "m.gguf")
    for name, codes in linears(actual).items():
        other = expected[name]
        assert isinstance(other, Codes)
        assert str(other.format) == numbers
        assert torch.equal(other.dequantize(torch.float64), codes.dequantize(torch.float64))


def test_what_a_kind_does_not_hold_is_said(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no weight of .* can be written as awq: it has 8 bits"):
        export(folders / "q8_0", tmp_path / "awq", "awq")
    with pytest.raises(ArgumentError, match="offsets"):
        export(folders / "q4_1", tmp_path / "gptq", "gptq")
    with pytest.raises(ArgumentError, match="none is quantized, quantize the model first"):
        export(folders / "float", tmp_path / "gptq", "gptq")
    convert(folders / "float", tmp_path / "mixed", Config("q4_0", overrides={"*.down_proj": "q8_0", "*.up_proj": "q4_1"}))
    report = export(tmp_path / "mixed", tmp_path / "gptq", "gptq")
    reasons = {row.name: row.reason or "" for row in report.kept}
    assert "one format, and most weights have another" in reasons["model.layers.0.mlp.down_proj.weight"]
    assert "offsets, not integer zero points" in reasons["model.layers.1.mlp.up_proj.weight"]
    settings = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert any("down_proj" in pattern for pattern in settings["dynamic"])
    assert isinstance(load(tmp_path / "gptq").get_submodule("model.layers.0.mlp.gate_proj"), QuantLinear)
    report = export(tmp_path / "mixed", tmp_path / "ct", "compressed-tensors")
    assert {row.name for row in report.kept if "dequantized" in (row.reason or "")} >= {"model.layers.0.mlp.up_proj.weight"}
    groups = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) == 2
    formats = {str(module.packed.format) for module in load(tmp_path / "ct").modules() if isinstance(module, QuantLinear)}
    assert formats == {"int4_g32", "int8_g32"}


def test_integer_activations_go_along(folders: Path, tmp_path: Path) -> None:
    convert(folders / "float", tmp_path / "q", Config("int8_channel_bf16", compute="int8", activation="row"))
    export(tmp_path / "q", tmp_path / "ct", "compressed-tensors")
    settings = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "int-quantized"
    assert settings["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    model = load(tmp_path / "ct")
    settings_of = {(module.compute, module.activation) for module in model.modules() if isinstance(module, QuantLinear)}
    assert settings_of == {("int8", "row")}
    assert torch.equal(logits(model), logits(load(tmp_path / "q")))


def test_places_that_are_taken(folders: Path, tmp_path: Path) -> None:
    place(tmp_path, "gguf").touch()
    for kind in KINDS:
        with pytest.raises(ArgumentError, match="exists: choose another place"):
            export(folders / "q4_0", place(tmp_path, "gguf") if kind == "gguf" else folders / "float", kind)
    place(tmp_path, "gguf").unlink()
    with pytest.raises(ArgumentError, match="models are converted to"):
        export(folders / "q4_0", tmp_path / "x", "onnx")
    with pytest.raises(ArgumentError, match="export_onnx writes such files"):
        export(folders / "q4_0", tmp_path / "x.onnx")
    with pytest.raises(ArgumentError, match=r"the name x does not tell what to write, .*: say halfbyte, gguf, .* by --to"):
        export(folders / "q4_0", tmp_path / "x")
    with pytest.raises(CheckpointError, match="there is no"):
        export(tmp_path / "nothing", tmp_path / "x.gguf", "gguf")
    for name in ("x", "llama-3.2"):
        with pytest.raises(ArgumentError, match=rf"by its suffix, which {name} lacks: write {name}\.gguf$"):
            export(folders / "q4_0", tmp_path / name, "gguf")
    for name in ("x.gguf", "x.safetensors", "x.onnx"):
        with pytest.raises(ArgumentError, match=r"has the name of a file, and a folder is written: leave \."):
            export(folders / "q4_0", tmp_path / name, "halfbyte")
        with pytest.raises(ArgumentError, match=r"has the name of a file, and a folder is written: leave \."):
            save(load(folders / "q4_0"), tmp_path / name)
    export(folders / "q4_0", tmp_path / "m.gguf")
    with pytest.raises(ArgumentError, match="only models in folders"):
        export(tmp_path / "m.gguf", tmp_path / "n.gguf", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


# Activation order


def test_activation_order(folders: Path, tmp_path: Path) -> None:
    """A GPTQ folder whose inputs are in disorder: loaded, saved, converted, and always the same product."""
    export(folders / "int4_g32_zp", tmp_path / "gptq", "gptq")
    from safetensors.torch import load_file, save_file

    file = tmp_path / "gptq" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name][torch.randperm(len(tensors[name]))].contiguous()
    save_file(tensors, file, {"format": "pt"})
    model: Any = load(tmp_path / "gptq")
    linear = model.model.layers[0].self_attn.q_proj
    assert isinstance(linear, PermutedLinear)
    x = torch.randn(5, 64)
    weight = linear.weight.float()
    parts = {part: tensors[f"model.layers.0.self_attn.q_proj.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
    k = torch.arange(64)
    q = (parts["qweight"][k // 8].T >> 4 * (k % 8)) & 15
    z = torch.stack([(parts["qzeros"][:, n // 8] >> 4 * (n % 8)) & 15 for n in range(64)])[:, parts["g_idx"].long()]
    definition = (q - z) * parts["scales"].T[:, parts["g_idx"].long()].float()
    assert torch.equal(weight, definition.bfloat16().float())
    linear.compute = "float"
    assert torch.allclose(linear(x), x @ definition.T, rtol=1e-5, atol=1e-5)
    linear.compute = "auto"
    expected = logits(model)
    # Saved and loaded, converted and loaded: the same columns in the same order.
    export(tmp_path / "gptq", tmp_path / "halfbyte", "halfbyte")
    assert torch.equal(logits(load(tmp_path / "halfbyte")), expected)
    export(tmp_path / "halfbyte", tmp_path / "again", "gptq")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(tensors[name], again[name]) for name in tensors if "proj" in name)
    export(tmp_path / "halfbyte", tmp_path / "ct", "compressed-tensors")
    assert torch.equal(logits(load(tmp_path / "ct")), expected)
    with pytest.raises(ArgumentError, match="activation order, which AWQ does not have"):
        export(tmp_path / "halfbyte", tmp_path / "awq", "awq")
    report = export(tmp_path / "halfbyte", tmp_path / "m.gguf", "gguf")
    assert any("activation order, which GGUF does not have" in (row.reason or "") for row in report.kept)


# Killed and resumed


_KILLED = """
import os, signal, sys
from halfbyte.checkpoint import export

calls = 0
def tell(done, total, name):
    global calls
    calls += 1
    if calls == 8:
        os.kill(os.getpid(), signal.SIGKILL)

export(*sys.argv[1:], tell, shard_bytes=20000)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
@pytest.mark.parametrize("kind", ["gguf", "gptq"])  # halfbyte: test_quantizing_is_resumed
def test_a_conversion_that_was_killed_is_resumed(kind: str, folders: Path, tmp_path: Path) -> None:
    target = place(tmp_path, kind)
    command = [sys.executable, "-c", _KILLED, str(folders / "q4_0"), str(target), kind]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not target.exists()
    left = next(tmp_path.glob(".*halfbyte-*"))
    done = len((left / "journal").read_text().splitlines()) - 1
    assert done >= 8
    told: list[int] = []
    report = export(folders / "q4_0", target, kind, lambda done, total, name: told.append(done), resume=True, shard_bytes=20000)
    assert any(note.startswith("resumed: ") and int(note.split()[1]) == done for note in report.notes)
    assert told == sorted(told)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    export(folders / "q4_0", place(tmp_path / "whole", kind), kind, shard_bytes=20000)
    written = [target] if target.is_file() else sorted(target.rglob("*.safetensors"))
    for path in written:
        other = place(tmp_path / "whole", kind) / ("" if target.is_file() else path.name)
        assert path.read_bytes() == Path(os.path.normpath(other)).read_bytes()


def test_quantizing_is_resumed(folders: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folders / "float", tmp_path / "m", "q4_0", progress=stop, resume=True)
    left = next(tmp_path.glob(".m.halfbyte-*"))
    done = (left / "journal").read_text().count("\n") - 1
    assert done > 10
    report = convert(folders / "float", tmp_path / "m", "q4_0", resume=True)
    assert any(note.startswith(f"resumed: {done} tensors") for note in report.notes)
    actual, expected = load_tensors(tmp_path / "m"), load_tensors(folders / "q4_0")
    assert actual.keys() == expected.keys()
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == (folders / "q4_0" / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_is_resumed_must_be_the_same(folders: Path, tmp_path: Path) -> None:
    """Another source, a damaged tensor, a cut journal: what does not fit is written again."""

    class StopError(BaseException):
        pass

    def stop(done: int, total: int, name: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    def interrupted(source: str) -> Path:
        with pytest.raises(KeyboardInterrupt):
            export(folders / source, tmp_path / "m", "halfbyte", stop, resume=True, shard_bytes=20000)
        return next(tmp_path.glob(".m.halfbyte-*"))

    interrupted("q4_0")
    report = export(folders / "q8_0", tmp_path / "m", "halfbyte", resume=True)
    assert not any("resumed" in note for note in report.notes)
    assert load_tensors(tmp_path / "m").keys() == load_tensors(folders / "q8_0").keys()
    for path in sorted((tmp_path / "m").iterdir()):
        path.unlink()
    (tmp_path / "m").rmdir()
    left = interrupted("q4_0")
    shard = max(left.glob("*00001-of-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with open(left / "journal", "ab") as journal:  # as a power failure may leave it, and a killed writer
        journal.write(b"\0\0\0\0\0\0\0\0\0\0\n" + b'0000000g "a"\n' + b"00000000 [1]\n" + b"00000000 {\n" + b"\xff\n" + b"\n" + b"0000")
    report = export(folders / "q4_0", tmp_path / "m", "halfbyte", resume=True, shard_bytes=20000)
    assert any("resumed" in note for note in report.notes)
    actual, expected = load_tensors(tmp_path / "m"), load_tensors(folders / "q4_0")
    assert all(same_codes(actual[name], value) for name, value in expected.items() if isinstance(value, Codes))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="exists"):
        export(folders / "q4_0", tmp_path / "m", "halfbyte", resume=True)


def test_what_fails_leaves_no_trace(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.io.tensors import TensorWriter

    calls = 0

    def full(self: TensorWriter, name: str, tensor: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(28, "No space left on device")
        original(self, name, tensor)

    original = TensorWriter.write
    monkeypatch.setattr(TensorWriter, "write", full)
    for kind in KINDS:
        calls = 0
        with pytest.raises(CheckpointError, match=r"No space left on device.*free some space"):
            export(folders / "q4_0", place(tmp_path, kind), kind)
    assert list(tmp_path.iterdir()) == []


# Memory

_PEAK = """
import sys
from halfbyte.checkpoint import export
small, source, target, kind = sys.argv[1:]
def bytes_of(field):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])
export(small, target.replace("m.gguf", "s.gguf") if kind == "gguf" else target + "-small", kind)  # imports, kernels
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = bytes_of("VmRSS")
export(source, target, kind)
print(bytes_of("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory(folders: Path, tmp_path: Path) -> None:
    """At most 1.2 x (what is written + the largest tensor, in the dtype of the model)."""
    config = LlamaConfig(**{**SMALL, "hidden_size": 1024, "num_hidden_layers": 1}, vocab_size=1 << 15, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "q", "int4_g32_zp")
    largest = 2 * 1024 * (1 << 15)
    # glibc's heap keeps what is freed between what is not, more or less of it by chance: what is large is mapped by itself, and given back.
    mapped = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for kind in ("gguf", "gptq"):
        target = place(tmp_path, kind)
        arguments = [str(folders / "int4_g32_zp"), str(tmp_path / "q"), str(target), kind]
        told = subprocess.run([sys.executable, "-c", _PEAK, *arguments], check=True, capture_output=True, text=True, env=mapped).stdout
        written = target.stat().st_size if target.is_file() else sum(path.stat().st_size for path in target.glob("*.safetensors"))
        assert int(told) <= 1.2 * (written + largest), kind


# The command line


def test_the_command(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folders / "q4_0"), str(tmp_path / "m.gguf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == "gguf"
    assert main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "q"), "--to", "halfbyte", "--json", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == "halfbyte"
    assert main(["inspect", str(tmp_path / "m.gguf"), "--json"]) == 0
    rows = {row["name"]: row["format"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["model.layers.0.mlp.up_proj.weight"] == "q4_0"
    assert main(["convert", str(folders / "q8_0"), str(tmp_path / "x"), "--to", "awq"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "layer.onnx").write_bytes(b"x")
    assert main(["convert", str(folders / "q8_0"), str(tmp_path / "x"), "--to", "onnx"]) == 2
    assert main(["convert", str(tmp_path / "layer.onnx"), str(tmp_path / "x"), "--to", "halfbyte"]) == 2
    said = capsys.readouterr().err
    assert "DST writes a file called *.onnx" in said
    assert "onnx.import_linear reads one layer" in said
    assert said.count("\n") == 2
    export(folders / "q4_0", tmp_path / "gptq", "gptq")
    assert main(["inspect", str(tmp_path / "gptq"), "--against", str(folders / "float"), "--json"]) == 0
    errors = {row["name"]: row["error"] for row in json.loads(capsys.readouterr().out)["rows"] if row["error"] is not None}
    assert len(errors) == 15
    assert all(0 < error < 0.2 for error in errors.values())


# A trained model


@pytest.mark.parametrize("fmt", ["q4_0", "int4_g64_zp"])
def test_a_trained_model_says_the_same_in_every_form(fmt: str, tmp_path: Path) -> None:
    """Its embedding, which is its head too, stays as it is: then every kind of file holds all of it, and not one bit differs."""
    if not (TINY / "model.safetensors").exists():
        pytest.skip("models/tiny-llama is not there")
    convert(TINY, tmp_path / "q", Config(fmt, skip=["model.embed_tokens", "lm_head"]))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = (TINY.parent.parent / "examples" / "tiny-llama" / "heldout.txt").read_text(encoding="utf-8")[:1000]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :128]
    with torch.no_grad():
        model: Any = load(tmp_path / "q")
        expected = model(ids).logits
        said = model.generate(ids[:, :16], max_new_tokens=12, do_sample=False, pad_token_id=0)
        # GGUF holds codes with points in blocks of another size, by which activations are quantized otherwise.
        for kind in KINDS if fmt == "q4_0" else KINDS[1:]:
            export(tmp_path / "q", place(tmp_path, kind), kind)
            other: Any
            if kind == "gguf":
                other, its_tokenizer = load_gguf(tmp_path / "m.gguf", dtype=torch.bfloat16)
                assert its_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
            else:
                other = load(place(tmp_path, kind))
            assert torch.equal(other(ids).logits, expected), kind
            assert torch.equal(other.generate(ids[:, :16], max_new_tokens=12, do_sample=False, pad_token_id=0), said), kind


@pytest.mark.parametrize("kind", ["halfbyte", "awq"])
def test_a_folder_that_appears_meanwhile_is_not_replaced(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Another process creates the folder after `export` has looked: it stays as it is."""
    export(folders / "q8_0", tmp_path / "m", "halfbyte")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    monkeypatch.setattr("halfbyte.checkpoint.export_checkpoint.lexists", lambda path: False)
    with pytest.raises(ArgumentError, match="exists: choose another place"):
        export(folders / "int4_g32_zp", tmp_path / "m", kind)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir() if path.is_file()} == before
