"""FIFOs, devices and names that the system does not take, wherever a path is named: one sentence, at once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import halfbyte as hb
from halfbyte.checkpoint.loading import describe
from halfbyte.cli import main
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.integrations.transformers.gguf import load_gguf
from halfbyte.integrations.transformers.text import open_tokenizer
from halfbyte.io import files
from halfbyte.io.onnx import import_linear

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
SECONDS = 20  # after which a test that waits for a FIFO or reads a device without end fails


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    def late(*_: object) -> None:
        raise BaseException("it waits, or reads without end")  # which no handler of errors takes for one

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A halfbyte checkpoint."""
    folder = tmp_path_factory.mktemp("paths") / "saved"
    hb.save(hb.quantize_(nn.Sequential(nn.Linear(64, 64)), "q4_0"), folder)
    return folder


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model."""
    folder = tmp_path_factory.mktemp("paths") / "floats"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What the command line says in one line, with exit code 2."""
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    notes, _, error = err.rpartition("halfbyte: error: ")
    assert notes.count("\n") == notes.count("transformers runs this model")  # before the error nothing but why transformers is used
    assert error.count("\n") == 1
    return err


LONG = "x" * 5000
READ = (
    "inspect {}",
    "generate {} --prompt a",
    "chat {}",
    "explain {}",
    "quantize {} out --format q4_0",
    "convert {} out.gguf",
    "eval {} --text t",
)
TEXT = ("eval f --text {}", "eval f --lambada-like {}", "quantize f out --format q4_0 --method gptq --calibration {}")


@pytest.mark.parametrize("command", [*READ, *TEXT])
@pytest.mark.parametrize("kind", ["fifo", "device", "long", "nothing"])
def test_every_command_refuses_them(
    command: str, kind: str, fifo: Path, floats: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(floats, "f")
    Path("t").write_text("a text")
    name = {"fifo": str(fifo), "device": os.devnull, "long": LONG, "nothing": ""}[kind]
    said = refused(capsys, *(part.format(name) for part in command.split()))
    words = {
        "fifo": "is a FIFO",
        "device": "is a character device",
        "long": "File name too long: name another path",
        "nothing": "write . for",
    }
    assert words[kind] in said
    assert len(said) < 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "fifo", "t"]


@pytest.mark.parametrize("command", ["quantize f {} --format q4_0", "convert f {} --to halfbyte", "inspect f --against {}"])
@pytest.mark.parametrize("name", ["", LONG])
def test_what_is_written_or_compared_is_named(
    command: str, name: str, floats: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(floats, "f")
    assert len(refused(capsys, *(part.format(name) for part in command.split()))) < 1000
    assert os.listdir(tmp_path) == ["f"]


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "load": hb.load,
    "load_tensors": hb.load_tensors,
    "describe": describe,
    "load_gguf": load_gguf,
    "import_linear": import_linear,
    "convert": lambda path: hb.convert(path, "never-written", "q4_0"),
    "save": lambda path: hb.save(hb.quantize_(nn.Sequential(nn.Linear(64, 64)), "q4_0"), path),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_refuses_them(function: str, fifo: Path) -> None:
    if function == "import_linear":
        pytest.importorskip("onnx")
    for name in (fifo, os.devnull, LONG, "", "a\0b"):
        with pytest.raises(HalfbyteError) as error:
            FUNCTIONS[function](name)
        assert ": " in str(error.value)
        assert len(str(error.value)) < 1000
    assert not Path("never-written").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint_is_a_fifo(name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(saved, tmp_path / "m")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for function in (hb.load_tensors, lambda path: hb.load(path, model=nn.Sequential(nn.Linear(64, 64))), describe):
        with pytest.raises(CheckpointError, match=f"{name} is a FIFO"):
            function(folder)
    assert f"{name} is a FIFO" in refused(capsys, "inspect", folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "quantize_config.json", "more/added.json", "part.safetensors"]
)
def test_a_file_beside_the_weights_is_a_fifo(name: str, floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(floats, tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is a FIFO"):  # which would not be copied
        hb.convert(folder, tmp_path / "out", "q4_0")
    assert not (tmp_path / "out").exists()
    if "/" not in name:  # transformers reads the folder
        assert f"{name} is a FIFO" in refused(capsys, "generate", folder, "--prompt", "a")
        with pytest.raises(CheckpointError, match="is a FIFO"):
            open_tokenizer(folder)


@pytest.mark.parametrize("path", ["", "config.json"])
def test_a_folder_or_file_that_may_not_be_read(
    path: str, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's answer to a user who is not root."""
    stat = os.stat

    def denied(place: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(place).startswith(str(saved / path)):
            raise PermissionError(13, "Permission denied", str(place))
        return stat(place, *args, **kwargs)

    monkeypatch.setattr(files.os, "stat", denied)
    with pytest.raises(CheckpointError, match="Permission denied: let this user read it"):
        hb.load_tensors(saved)
    assert "let this user read it" in refused(capsys, "inspect", saved)


def test_a_folder_that_cannot_be_listed(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(floats, tmp_path / "m")
    listed = Path.iterdir

    def denied(self: Path) -> Iterator[Path]:
        if self == folder / "more":
            raise PermissionError(13, "Permission denied", str(self))
        return listed(self)

    (folder / "more").mkdir()
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointError, match="more: Permission denied: let this user read it"):  # its files would not be copied
        hb.convert(folder, tmp_path / "out", "q4_0")


def test_regular_files_are_opened_and_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("b", "a", "folder/c", ".hidden"):
        (tmp_path / name).write_bytes(b"text")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "dead").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)  # not followed
    with files.open_unbuffered(tmp_path / "link") as file:
        assert file.read() == b"text"
    with pytest.raises(IsADirectoryError):
        files.open_file(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in files.files_below(tmp_path)] == ["a", "b", "folder/c", "link"]
    assert [path.name for path in files.paths_in(tmp_path)] == [".hidden", "a", "b", "folder", "link", "loop"]
    is_there = {name: (files.is_file(tmp_path / name), files.is_folder(tmp_path / name)) for name in ("a", "link", "folder", "dead", "a/b")}
    unused = (False, False)
    assert is_there == {"a": (True, False), "link": (True, False), "folder": (False, True), "dead": unused, "a/b": unused}


def test_a_checkpoint_of_links_is_read(saved: Path, tmp_path: Path) -> None:
    for path in saved.iterdir():  # as in the cache of the Hugging Face Hub
        (tmp_path / path.name).symlink_to(path)
    assert hb.load_tensors(tmp_path).keys() == hb.load_tensors(saved).keys()
