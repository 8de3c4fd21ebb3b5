"""Mistakes that users make: each is answered in one sentence, and nothing has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.errors import ArgumentError


def model(**more: nn.Module) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for name, module in more.items():
        made.add_module(name, module)
    return made


def formats(quantized: nn.Module) -> list[str]:
    return [str(row.format) for row in hb.report(quantized).rows]


# Quantizing again


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("q4_0", "q8_0", r"0 is quantized already, and stays q4_0 where q8_0 is asked for \(and 1 more are alike\), and nothing is left"),
        ("q4_0", hb.Config("q4_0", overrides={"2": "q8_0"}), "2 is quantized already, and stays q4_0 where q8_0 is asked for, and nothing"),
        ("int8_channel", hb.Config("int8_channel", activations="static", calibration=[torch.zeros(1, 64)]), 'not "static", and nothing'),
        ("q4_0", hb.Config("q4_0", skip=["nope"]), "the skip pattern 'nope' matches no module"),
    ],
)
def test_quantizing_again_in_another_format_is_refused(first: str, second: Any, message: str) -> None:
    quantized = hb.quantize_(model(), first)
    before = formats(quantized)
    with pytest.raises(ArgumentError, match=message):
        hb.quantize_(quantized, second)
    assert formats(quantized) == before


@pytest.mark.parametrize("config", [hb.Config("q4_0"), hb.Config("q4_0", overrides={"0": "q8_0"}), hb.Config("q4_0", skip=["2"])])
def test_quantizing_again_in_the_same_format_changes_nothing(config: hb.Config) -> None:
    quantized = hb.quantize_(model(stem=nn.Conv2d(3, 32, 3), body=nn.Conv2d(32, 32, 3), ids=nn.Embedding(9, 32)), config)
    before, modules = str(hb.report(quantized)), list(quantized.modules())
    assert hb.quantize_(quantized, config) is quantized
    assert str(hb.report(quantized)) == before
    assert list(quantized.modules()) == modules


def test_what_is_left_of_a_model_is_quantized_and_the_rest_reported() -> None:
    quantized = hb.quantize_(model(), hb.Config("q4_0", skip=["2"]))
    hb.quantize_(quantized, "q8_0")
    assert formats(quantized) == ["q4_0", "q8_0"]
    assert hb.report(quantized).notes == ("0 is quantized already, and stays q4_0 where q8_0 is asked for",)


def test_a_network_on_codes_is_quantized_once() -> None:
    config = hb.Config("int8_channel", activations="static", calibration=[torch.randn(4, 64)])
    quantized = hb.quantize_(model().eval(), config)
    assert hb.quantize_(quantized, config) is quantized
    with pytest.raises(ArgumentError, match="0 is quantized already, and stays int8_channel where int8_tensor"):
        hb.quantize_(quantized, "int8_tensor")


# Saving


@pytest.mark.parametrize("scales", ["dynamic", "learned"])
def test_a_model_in_training_for_its_codes_is_not_saved(scales: str, tmp_path: Path) -> None:
    prepared = hb.prepare_qat_(model(), "int4_g32", scales=scales)
    with pytest.raises(ArgumentError, match="0 is in training for its quantized form: call convert_qat_ first"):
        hb.save(prepared, tmp_path / "it")
    assert not (tmp_path / "it").exists()
    hb.save(hb.convert_qat_(prepared), tmp_path / "it")
    assert (tmp_path / "it" / "config.json").is_file()
