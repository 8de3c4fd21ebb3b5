"""--gpu-memory, --cpu-experts, --gpu-layers and --gpu-context of the commands, without a GPU."""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from commands import Run
from language_model import make_mixture

from halfbyte.cli import chat, generate, serve
from halfbyte.cli import eval as evaluate
from halfbyte.cli.shared import eval_models
from halfbyte.errors import ArgumentError
from halfbyte.language import model as opening


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("model") / "mixture")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands take the CPU for a GPU."""

    def settle(args: Any) -> None:
        args.device, args.dtype = "cuda", "float32"

    for command in (generate, chat, evaluate, serve):
        monkeypatch.setattr(command, "settle_device", settle)
    for command in (generate, eval_models, serve):
        monkeypatch.setattr(command, "waking", lambda device: nullcontext())
    monkeypatch.setattr(opening, "find_gpu", lambda name: torch.device("cpu"))
    monkeypatch.setattr("halfbyte.cli.generate._peak", lambda device: None)


def test_generate(run: Run, folder: Path, gpu: None) -> None:
    """The same text, and where the model is."""
    asked = ("generate", folder, "--prompt", "the quick brown fox", "--max-new-tokens", 9)
    whole = run(*asked, "--gpu-memory", "1GB", "--json").json
    assert (whole["plan"]["experts_on_cpu"], whole["plan"]["cpu_bytes"]) == (0, 0)
    for arguments, count in ((("--cpu-experts", 1), 1), (("--cpu-experts", -1, "--gpu-context", 100), 2)):
        split = run(*asked, *arguments, "--json").json
        assert split["text"] == whole["text"]
        assert split["plan"]["experts_on_cpu"] == count
        assert split["plan"]["cpu_bytes"] > 0
    assert split["plan"]["context"] == 100
    assert "on the CPU: the routed experts of layer 0," in run(*asked, "--cpu-experts", 1).err


def test_explain(run: Run, folder: Path) -> None:
    """For a GPU that is not here: the plan, each op's device, and the estimated time of a token."""
    asked = ("explain", folder, "--device", "sm_90")
    text = run(*asked, "--cpu-experts", 1).out
    assert "on the GPU: " in text
    assert "on the CPU: the routed experts of layer 0," in text
    assert "CPU memory " in text
    assert "GPU memory 4.5 TB/s and link 25.0 GB/s assumed, as the GPU is not here\n" in text
    assert re.search(r"\nexpected of a token: .* \(GPU .*, CPU .*, crossings 5.00 us\)\n", text)
    assert re.search(r"\nexpected of a prompt of 512 tokens: .* with experts computed on the CPU, .* where they cross to the GPU", text)
    assert text.count(" on the CPU  ") == 3
    found = run(*asked, "--gpu-memory", "1 GB", "--json").json
    assert found["plan"]["experts_on_cpu"] == 0
    assert found["plan"]["token_seconds"] > 0
    assert found["plan"]["streamed_seconds"] is None
    assert set(found["plan"]["gpu"]) == {"weights", "cache", "workspace", "prefix"}
    assert not found["plan"]["rates"]["measured"]
    devices = {op["device"] for group in run(*asked, "--cpu-experts", 2, "--json").json["groups"] for op in group["ops"]}
    assert devices == {"cpu", "cuda"}
    assert "plan" not in run(*asked, "--json").json


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu-memory", "much"), "GPU memory is a number of bytes above 0 or a text such as '12 GB', got 'much'"),
        (("--gpu-memory", "-3GB"), "GPU memory is a number of bytes above 0"),
        (("--gpu-memory", "2 MB"), "the model needs at least"),
        (("--cpu-experts", "3"), "cpu_experts is 0 to 2"),
        (("--gpu-layers", "3"), "gpu_layers is 0 to 2"),
        (("--cpu-experts", "1", "--gpu-context", "0"), "context is a number of at least 1, got 0"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str, run: Run, folder: Path, gpu: None) -> None:
    code, out, err = run("generate", folder, "--prompt", "a", *(f"{arguments[0]}={arguments[1]}", *arguments[2:]))
    assert (code, out) == (2, "")
    assert said in err
    assert err.splitlines()[-1].startswith("halfbyte: error")


def test_several_processes(run: Run, folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallel GPUs each have a part of every layer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    run("generate", folder, "--prompt", "a", "--cpu-experts", 1).refuses(
        "runs in several processes, where a GPU and the CPU do not share a model"
    )
    monkeypatch.delenv("WORLD_SIZE")
    run("generate", folder, "--prompt", "a", "--cpu-experts", 1, "--compile").refuses("runs with transformers, where a GPU")


def test_eval(run: Run, folder: Path, gpu: None, tmp_path: Path) -> None:
    """The same perplexity up to the order of float32 sums; the plan is for windows of --context tokens."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 12)
    asked = ("eval", folder, "--text", text, "--context", 48, "--cache", "int8")
    whole = run(*asked, "--gpu-memory", "1GB", "--json").json["models"]
    split = run(*asked, "--cpu-experts", 1, "--json").json["models"]
    assert len(whole) == len(split) == 2
    for one, other in zip(whole, split, strict=True):
        assert other["perplexity"] == pytest.approx(one["perplexity"], rel=1e-4)
        assert other["tokens"] == one["tokens"] > 100
    assert "KV cache of 48 tokens" in run(*asked, "--cpu-experts", 1).err
    run(*asked, "--cpu-experts", 1, "--format", "q4_0").refuses("place one model, got --format or --against for others")


def test_chat(run: Run, folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run("chat", folder, "--cpu-experts", 3).refuses("cpu_experts is 0 to 2")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    copy = folder.with_name("chats")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    tokenizer["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    answers = []
    for arguments in (("--gpu-memory", "1GB"), ("--cpu-experts", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO("the quick\nred hen\n"))
        code, out, err = run("chat", copy, "--max-new-tokens", 5, *arguments)
        assert code == 0, err
        answers.append(out)
    assert answers[0] == answers[1]
    assert "on the CPU: the routed experts of layers 0-1" in err


def test_serve(run: Run, folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is for the sequences of --parallel and the bytes of --prefix-cache."""
    server = pytest.importorskip("halfbyte.serve.server")
    models = []
    monkeypatch.setattr(server, "Serving", lambda settings, language, sentences: models.append((settings, language.model)))
    monkeypatch.setattr(server, "run", lambda *_: None)
    arguments = ("--parallel", 3, "--prefix-cache", 20, "--gpu-context", 100, "--port", 0)
    assert run("serve", folder, "--cpu-experts", 1, *arguments).code == 0
    ((settings, model),) = models
    assert (model.plan.placement.experts, model.plan.request.sequences) == (1, 3)
    assert model.plan.gpu.prefix == model.plan.request.prefix_bytes == settings.prefix_bytes == 20 * 10**6
    assert "KV cache of 100 tokens of 3 sequences" in str(model.plan)
    assert "prefix cache 20.0 MB" in str(model.plan)
    assert model.most_sequences == 3
    model.batch(3, prefix_bytes=settings.prefix_bytes)
    with pytest.raises(ArgumentError, match=r"20\.0 MB are planned for KV caches of earlier sequences, got prefix_bytes=30000000: open"):
        model.batch(3, prefix_bytes=30 * 10**6)


def test_what_is_no_language_model(run: Run, tmp_path: Path) -> None:
    run("explain", "--gpu-memory", "1GB").refuses("are for a language model, got a shape: leave them out")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    (tmp_path / "text.txt").write_text("a\nb")
    run("explain", tmp_path, "--cpu-experts", 1).refuses("are for a language model, got ")
    run("serve", tmp_path, "--cpu-experts", 1, "--port", 0).refuses("are for a language model, got ")
    lines = ("--text", tmp_path / "text.txt")
    run("eval", tmp_path, "--against", tmp_path, *lines, "--cpu-experts", 1).refuses("are for a language model, got ")


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("explain",)])
def test_without_a_gpu(command: tuple[str, ...], run: Run, folder: Path) -> None:
    name, *others = command
    run(name, folder, *others, "--device", "cpu", "--gpu-memory", "1GB").refuses("are for a GPU, got --device cpu: leave them out")


def test_json_is_one_document(run: Run, folder: Path, gpu: None) -> None:
    assert json.loads(run("generate", folder, "--prompt", "a", "--cpu-experts", 1, "--max-new-tokens", 2, "--json").out)["plan"]
