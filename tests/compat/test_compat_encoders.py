"""Every encoder layer of `halfbyte.integrations.transformers.encoder.encoding` with the installed versions: quantized, fused and optimized
models compute what transformers computes, with padding, and from every loader."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_encoders import CASES, inputs, make_encoder, states
from torch import Tensor

import halfbyte as hb
from halfbyte.decoder.families.encoders import EMBEDDING_LAYERS, ENCODER_STACKS, ENCODERS
from halfbyte.integrations.transformers.encoder import encoder_stack
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward, name_in_transformers
from halfbyte.nn.modules.quantized import QuantModule

# By compute, as in test_compat_families.py.
TOLERANCES = {"float": 1e-4, "int8": 0.03}
LENGTHS = ((1,), (9,), (9, 4, 1), (5, 5))  # of the sequences of a batch


class Models(NamedTuple):
    plain: Any  # quantized, in transformers' own code
    fused: Any
    optimized: Any


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=TOLERANCES, scope="module")
def compute(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(case: str, compute: str) -> Models:
    torch.manual_seed(7)
    plain = hb.quantize_(make_encoder(case), hb.Config("q4_0", compute=compute))
    return Models(plain, hb.fuse_(copy.deepcopy(plain)), hb.optimize_(copy.deepcopy(plain)))


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    error = float((found - expected).norm() / expected.norm())
    assert error <= tolerance, f"hidden states are off by {error:.2%}"  # NaN is not <= either


def test_every_layer_has_a_case() -> None:
    assert set(CASES) == {name.partition(".")[0] for name in ENCODERS}
    assert set(CASES) >= {name.partition(".")[0] for name in EMBEDDING_LAYERS}


def test_modules_are_replaced(case: str, models: Models) -> None:
    replaced = [name_in_transformers(module) for module in models.optimized.modules() if isinstance(module, ReplacedForward)]
    known = ENCODER_STACKS | EMBEDDING_LAYERS
    wanted = [name_in_transformers(module) for module in models.plain.modules() if name_in_transformers(module) in known]
    assert replaced == wanted, str(hb.report(models.optimized))
    assert len(wanted) == 1 + any(name.startswith(f"{case}.") for name in EMBEDDING_LAYERS)


def test_hidden_states(compute: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers in one call: an argument that a new version passes and halfbyte does not know sends calls to transformers' code."""
    layers: list[int] = []
    run = encoder_stack.run_layers
    monkeypatch.setattr(encoder_stack, "run_layers", lambda computed, *args: (layers.append(len(computed)), run(computed, *args))[1])
    for lengths in LENGTHS:
        given = inputs(models.plain, *lengths)
        expected = states(models.plain, given)
        assert not layers
        for model in (models.fused, models.optimized):
            assert_near(states(model, given), expected, TOLERANCES[compute])
        assert layers == [3]
        layers.clear()


def test_loaders(case: str, tmp_path: Path) -> None:
    """From a saved model, from transformers' save_pretrained, and quantized while they are read from float weights."""
    torch.manual_seed(7)
    model, config = make_encoder(case), hb.Config("q4_0", compute="float")
    model.save_pretrained(tmp_path / "float")
    quantized = hb.quantize_(copy.deepcopy(model), config)
    hb.save(quantized, tmp_path / "saved")
    quantized.save_pretrained(tmp_path / "pretrained")
    kind = type(model)
    others: dict[str, Any] = {}
    if case == "whisper":  # which is a part of transformers' models, so that its config.json names none of them
        others["load, saved"] = hb.load(tmp_path / "saved", model=kind(model.config))
    else:
        hb.convert(tmp_path / "float", tmp_path / "converted", config)
        others |= {f"load, {folder}": hb.load(tmp_path / folder) for folder in ("saved", "converted")}
    names = {name for name, module in quantized.named_modules() if isinstance(module, QuantModule)}
    given = inputs(quantized, 9, 4)
    expected = states(quantized, given)
    for place, loaded in {
        **others,
        "from_pretrained, saved": kind.from_pretrained(tmp_path / "saved"),
        "from_pretrained, pretrained": kind.from_pretrained(tmp_path / "pretrained"),
        "from_pretrained, float": kind.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(config)),
    }.items():
        assert {name for name, module in loaded.named_modules() if isinstance(module, QuantModule)} == names, place
        assert_near(states(loaded.eval(), given), expected, 1e-6)
