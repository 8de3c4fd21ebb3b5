"""Damaged and hostile files: one clear error or the right answer, nothing else."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.checkpoint import convert, load, load_tensors, save
from halfbyte.errors import ArgumentError, CheckpointError, HalfbyteError
from halfbyte.formats.codes import Codes
from halfbyte.io.safetensors import Reader, Writer, read_header
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_

FILES = ("config.json", "model.safetensors")
NUMBERS = (None, True, -1, 0, 1.5, 1 << 70, float("inf"))
WEIRD: tuple[Any, ...] = (*NUMBERS, "", "x" * 99, "../../etc/passwd", "/etc/passwd", "\ud800", [], [[]], {}, {"a": {}})


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Embedding(3, 6), nn.LayerNorm(4), nn.Linear(8, 2))


def tiny_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=16, **sizes)).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint") / "m"
    model = quantize_(network(), Config("int4_g4_zp", overrides={"3": "q8_0"}))
    model[2].weight = model[2].bias  # type: ignore[index,operator,union-attr,assignment]  # something tied
    save(model, folder)
    return folder


def as_lists(folder: Path) -> dict[str, list[tuple[str, list[Any]]]]:
    """Everything in a checkpoint, comparable."""
    result = {}
    for name, value in load_tensors(folder).items():
        tensors = value.tensors().values() if isinstance(value, Codes) else [value]
        result[name] = [(str(t.dtype), t.tolist()) for t in tensors]
    return result


def outcome(act: Callable[[], object]) -> object:
    """What an action gives, or the HalfbyteError that it raises, whose message is one line. Nothing else may be raised."""
    try:
        return act()
    except HalfbyteError as e:
        message = str(e)
    assert 0 < len(message) < 2000
    assert "\n" not in message
    return None


# Damaged files


@given(data=st.data())
def test_changed_bytes_are_noticed_or_do_not_matter(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    file = folder / data.draw(st.sampled_from(FILES))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["change", "cut", "insert", "remove"])):
        case "change":
            content[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del content[at:]
        case "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        case "remove":
            del content[at : at + data.draw(st.integers(1, 20))]
    file.write_bytes(content)
    found = outcome(lambda: as_lists(folder))
    assert found is None or found == as_lists(saved)
    model = network()
    if outcome(lambda: load(folder, model=model)) is None:
        assert [type(module) for module in model] == [nn.Linear, nn.Embedding, nn.LayerNorm, nn.Linear]  # type: ignore[arg-type,union-attr]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON tree."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def with_value(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.copy(tree)
    changed[path[0]] = with_value(tree[path[0]], path[1:], value)
    return changed


def test_any_value_in_the_section_may_be_nonsense(saved: Path, tmp_path: Path) -> None:
    good = as_lists(saved)
    config = json.loads((saved / "config.json").read_text())
    shutil.copytree(saved, tmp_path / "m")
    for path in places(config):
        for value in WEIRD:
            (tmp_path / "m" / "config.json").write_text(json.dumps(with_value(config, path, value)))
            found = outcome(lambda: as_lists(tmp_path / "m"))
            assert found is None or found == good, (path, value)


def test_any_value_in_the_header_may_be_nonsense(saved: Path, tmp_path: Path) -> None:
    good = as_lists(saved)
    shutil.copytree(saved, tmp_path / "m")
    content = (saved / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for path in places(header):
        for value in WEIRD:
            text = json.dumps(with_value(header, path, value)).encode()
            (tmp_path / "m" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
            found = outcome(lambda: as_lists(tmp_path / "m"))
            assert found is None or found == good, (path, value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "not a safetensors file or is truncated"),
        (b"{}x", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a":' * 50_000, "is not JSON"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "is nested in more than 100 levels"),
        (b'{"a":' + b"[" * 99 + b"]" * 99 + b"}", "has no description"),
        (b"[]", "holds a JSON list"),
        (b'{"a": 1}', "has no description"),
        (b'{"a": {"dtype": "F4", "shape": [], "data_offsets": [0, 4]}}', "has dtype 'F4'"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "not a list of sizes"),
        (b'{"a": {"dtype": "F32", "shape": [1e9], "data_offsets": [0, 4]}}', "not a list of sizes"),
        (b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}', "not a list of sizes"),
        (b'{"a": {"dtype": "F32", "shape": [0, 4611686018427387904, 9], "data_offsets": [0, 0]}}', "not a list of sizes"),
        (b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}', "takes 4000000000000"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "begins at byte"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}', "has -4 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "its header describes"),
        (b'{"a": {"dtype":"U8", "shape":[4], "data_offsets":[0, 4]}, "b": {"dtype": "U8", "shape": [], "data_offsets":[3, 4]}}', "begins"),
        (b'{"a": {"dtype":"U8", "shape":[4], "data_offsets":[0, 4]}, "a": {"dtype": "U8", "shape": [], "data_offsets":[0, 1]}}', "twice"),
    ],
)
def test_headers_that_break_a_rule(header: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4) if header else b"\0" * 5)
    with pytest.raises(CheckpointError, match=message):
        read_header(file)
    with pytest.raises(CheckpointError):
        convert(file, tmp_path / "q", "q8_0")


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="or is truncated"):
        read_header(tmp_path / "x.safetensors")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1000)}, file)
    reader = Reader([file])
    os.truncate(file, 500)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        reader.read("a")
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        reader.read("a")


def test_zero_size_and_scalar_tensors(tmp_path: Path) -> None:
    tensors = {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "none.weight": torch.empty(4, 0), "flag": torch.tensor([True])}
    tensors["x.weight"] = torch.ones(4, 3)
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "q", "q4_0")
    loaded = load_tensors(tmp_path / "q")
    assert all(isinstance(t := loaded[name], Tensor) and torch.equal(t, tensor) for name, tensor in tensors.items() if name != "x.weight")


def test_every_dtype_that_is_written_is_read(tmp_path: Path) -> None:
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
    kinds += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).T.to(kind) for kind in kinds}
    writer = Writer(tmp_path, "model", {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    reader, other = Reader([tmp_path / "model.safetensors"]), safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        for found in (reader.read(name), other[name]):
            assert found.dtype == tensor.dtype
            assert torch.equal(found.double(), tensor.double())
        assert torch.equal(reader.read(name, torch.float32), tensor.float())


def test_a_writer_is_told_the_truth(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "model", {"a": TensorSpec(torch.float32, (2, 3)), "b": TensorSpec(torch.float32, (1,))})
    with pytest.raises(ArgumentError, match=r"a was announced as torch.float32 \[2, 3\], got torch.float32 \[3, 2\]"):
        writer.write("a", torch.zeros(3, 2))
    writer.write("a", torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="1 announced tensors were not written, the first is b"):
        writer.finish()


# Hostile folders


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors", "..\\secret.safetensors"])
def test_paths_do_not_lead_out_of_the_folder(name: str, saved: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "secret.safetensors")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError, match="is not the plain name of a safetensors file"):
        convert(tmp_path / "m", tmp_path / "q", "q8_0")
    config = json.loads((saved / "config.json").read_text())
    config["halfbyte"]["files"] = [name]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is not the plain name of a safetensors file"):
        load_tensors(tmp_path / "m")


def test_loading_moves_nothing_out_of_the_folder(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    config["halfbyte"]["staging"] = ".halfbyte-00000000"
    (folder / "config.json").write_text(json.dumps(config))
    staged = folder / ".halfbyte-00000000"
    for name in ("tokenizer.json", "link/evil", "model.safetensors", "config.json", "sub/fine"):
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_text("staged")
    (tmp_path / "outside").mkdir()
    (folder / "link").symlink_to(tmp_path / "outside")
    assert as_lists(folder) == as_lists(saved)
    assert (folder / "tokenizer.json").read_text() == (folder / "sub" / "fine").read_text() == "staged"
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"a":' * 100_000, '{"halfbyte": 1e999999}', "9" * 10_000])
def test_config_files_that_are_none(text: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        load_tensors(tmp_path / "m")
    with pytest.raises(CheckpointError, match="is not overwritten"):
        save(network(), tmp_path / "m")


def test_what_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*missing"):
        load(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="is neither a folder nor a GGUF file: name"):
        load(saved / "config.json")
    (tmp_path / "config.json").write_text("{}")
    shutil.copy(next(saved.glob("*.safetensors")), tmp_path)
    with pytest.raises(CheckpointError, match="not quantized by halfbyte, convert"):
        load(tmp_path)
    section = {"halfbyte": {"version": 2}}
    (tmp_path / "config.json").write_text(json.dumps(section))
    with pytest.raises(CheckpointError, match="version 2, this halfbyte reads 1"):
        load(tmp_path)


def test_any_value_in_the_config_of_a_model_may_be_nonsense(tmp_path: Path) -> None:
    model = quantize_(tiny_llama(), "q8_0")
    save(model, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))  # an allocation that is out of all measure fails
    try:
        for name in config.keys() - {"halfbyte"}:
            for value in (*WEIRD, 10**9, -(10**9), 10**6):
                path.write_text(json.dumps({**config, name: value}))
                outcome(lambda: load(tmp_path / "m"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
