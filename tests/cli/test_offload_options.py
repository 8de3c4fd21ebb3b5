"""--gpu-memory, --cpu-experts, --gpu-layers and --gpu-context of the commands, without a GPU."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from commands import Run
from language_model import make_mixture

from halfbyte.cli import generate
from halfbyte.language import model as opening


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("model") / "mixture")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands take the CPU for a GPU."""

    def settle(args: Any) -> None:
        args.device, args.dtype = "cuda", "float32"

    monkeypatch.setattr(generate, "settle_device", settle)
    monkeypatch.setattr(generate, "waking", lambda device: nullcontext())
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
    assert "expected from bytes and operations over these: a token: " in text
    assert re.search(r"; a prompt of 512 tokens: .* with experts computed on the CPU, .* with experts streamed to the GPU, which is ", text)
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


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("explain",)])
def test_without_a_gpu(command: tuple[str, ...], run: Run, folder: Path) -> None:
    name, *others = command
    run(name, folder, *others, "--device", "cpu", "--gpu-memory", "1GB").refuses("are for a GPU, got --device cpu: leave them out")


def test_json_is_one_document(run: Run, folder: Path, gpu: None) -> None:
    assert json.loads(run("generate", folder, "--prompt", "a", "--cpu-experts", 1, "--max-new-tokens", 2, "--json").out)["plan"]
