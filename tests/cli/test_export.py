"""`halfbyte export` and `halfbyte convert --to onnx`: what they pass on, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.cli import export, main
from halfbyte.deploy import onnx_model, program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    target = tmp_path_factory.mktemp("models") / "bert"
    hb.quantize_(BertModel(config).eval(), "q8_0").save_pretrained(target)
    return target


def test_export(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    monkeypatch.setattr(program, "export_program", lambda model, out, **settings: calls.append((model, out, settings)))
    assert main(["export", str(folder), str(tmp_path / "out"), "--context", "64", "--json"]) == 0
    [(model, out, settings)] = calls
    assert isinstance(model, nn.Module)
    assert not model.training
    assert (out, settings) == (tmp_path / "out", {"context": 64})
    assert json.loads(capsys.readouterr().out) == {"model": str(folder), "out": str(tmp_path / "out")}
    assert export.run.__module__ == "halfbyte.cli.export"


def test_onnx(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")
    assert main(["convert", str(folder), str(tmp_path / "m.onnx"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
    for arguments, said in (
        ([str(tmp_path / "m.onnx")], "exists: choose another place"),
        ([str(tmp_path / "m"), "--to", "onnx"], "DST writes a file called *.onnx"),
        ([str(tmp_path / "n.onnx"), "--resume"], "--resume continues"),
    ):
        assert main(["convert", str(folder), *arguments]) == 2
        assert said in capsys.readouterr().err


def test_notes_of_onnx_are_printed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_model, "export_onnx", lambda model, path: ["batch up to 63: the forward takes another branch"])
    assert main(["convert", str(folder), str(tmp_path / "m.onnx")]) == 0
    assert capsys.readouterr().out.startswith("batch up to 63: the forward takes another branch\nwritten to ")
