"""Weights that their format cannot hold: their modules stay in floating point, the report says why, and strict=True refuses them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import make_decoder
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import halfbyte as hb
from halfbyte.cli.main import main
from halfbyte.errors import FormatError
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule
from halfbyte.nn.training.fake_quantized import FakeQuantized

WHY = r"lm_head.weight: its largest value is [\d.e-]+, for which the float16 scales of q8_0 are too coarse"
IDS = torch.randint(0, 99, (2, 48), generator=torch.Generator().manual_seed(0))


def llama(**settings: Any) -> Any:
    """One whose head has just been initialised, with numbers for which float16 scales of 8 bits are subnormal."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = make_decoder("Llama", **sizes, **settings).eval()
    nn.init.normal_(model.lm_head.weight, std=1e-4)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("model")
    llama().save_pretrained(built)
    return built


def reason_of(found: hb.Report, name: str = "lm_head") -> str:
    row = next(row for row in found.rows if row.name.removesuffix(".weight") == name)
    assert row.format is None
    return str(row.reason)


def check(model: Any) -> None:
    """All is quantized but the head, which is as it was."""
    assert type(model.lm_head) is nn.Linear
    assert torch.equal(model.lm_head.weight, llama().lm_head.weight)
    assert all(isinstance(model.get_submodule(name), QuantModule) for name in ("model.embed_tokens", "model.layers.0.mlp.down_proj"))
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("method", ["absmax", "mse", "hqq"])
def test_quantize(method: str) -> None:
    model = hb.quantize_(llama(), hb.Config("q8_0", method=method))
    check(model)
    assert hb.report(model).kept
    assert re.match(WHY, reason_of(hb.report(model)))
    hb.quantize_(model, hb.Config("q8_0", method=method))  # nothing changes
    check(model)


def test_its_advice_works() -> None:
    model = hb.quantize_(llama(), hb.Config("q8_0", overrides={"lm_head": "int8_g32_bf16"}))
    assert str(model.lm_head.packed.codes_format) == "int8_g32_bf16"
    check(hb.quantize_(llama(), hb.Config("q8_0", skip=["lm_head"])))


@pytest.mark.parametrize("method", ["gptq", "awq", "mse"])
def test_with_calibration(method: str) -> None:
    """AWQ may scale the weight, and divides what is before it by the same numbers."""
    model, name = llama(), "model.layers.0.mlp.up_proj"
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(1e-4)
    expected = model(IDS).logits
    hb.quantize_(model, hb.Config("q8_0", method=method), IDS)
    assert type(model.get_submodule(name)) is nn.Linear
    assert reason_of(hb.report(model), name).startswith(f"{name}.weight: its largest value")
    assert (model(IDS).logits - expected).norm() < 0.05 * expected.norm()
    with pytest.raises(FormatError, match="too coarse"):
        hb.quantize_(llama(), hb.Config("q8_0", method=method, strict=True), IDS)


def test_strict() -> None:
    model = llama()
    with pytest.raises(FormatError, match=WHY):
        hb.quantize_(model, hb.Config("q8_0", strict=True))
    assert not any(isinstance(module, QuantModule) for module in model.modules())


def test_a_model_in_which_nothing_fits_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1e-5)
    with pytest.raises(FormatError, match=r"^0\.weight: its largest value"):
        hb.quantize_(model, "q8_0")


def test_a_shared_weight_stays_under_all_names() -> None:
    model = llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    hb.quantize_(model, "q8_0")
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "too coarse" in reason_of(hb.report(model), "model.embed_tokens")


def test_from_pretrained(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=hb.HalfbyteConfig("q8_0"))
    check(model)
    assert "too coarse" in reason_of(hb.report(model))
    model.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    check(again)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.raises(FormatError, match=WHY):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=hb.HalfbyteConfig("q8_0", strict=True))


def test_from_pretrained_in_another_dtype(folder: Path) -> None:
    config = hb.HalfbyteConfig("q8_0")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.bfloat16


def test_convert(folder: Path, tmp_path: Path) -> None:
    done = []
    report = hb.convert(folder, tmp_path / "small", "q8_0", progress=lambda *args: done.append(args))
    assert "too coarse" in reason_of(report)
    assert done[-1][0] == done[-1][1]
    check(model := hb.load(tmp_path / "small"))
    hb.save(hb.quantize_(llama(), "q8_0"), tmp_path / "other")
    assert torch.equal(hb.load(tmp_path / "other")(IDS).logits, model(IDS).logits)
    with pytest.raises(FormatError, match=WHY):
        hb.convert(folder, tmp_path / "strict", hb.Config("q8_0", strict=True))
    assert not (tmp_path / "strict").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "small"]


def test_convert_with_calibration(folder: Path, tmp_path: Path) -> None:
    report = hb.convert(folder, tmp_path / "small", hb.Config("q8_0", method="gptq"), IDS)
    assert "too coarse" in reason_of(report)
    check(hb.load(tmp_path / "small"))
    with pytest.raises(FormatError, match=WHY):
        hb.convert(folder, tmp_path / "strict", hb.Config("q8_0", method="gptq", strict=True), IDS)


def test_load(folder: Path) -> None:
    check(model := hb.load(folder, format="q8_0"))
    assert "too coarse" in reason_of(hb.report(model))
    with pytest.raises(FormatError, match=WHY):
        hb.load(folder, format=hb.Config("q8_0", strict=True))


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(folder), str(tmp_path / "small"), "--format", "q8_0", "--quiet"]
    assert main([*command, "--strict"]) == 2
    assert "too coarse" in capsys.readouterr().err
    assert main(command) == 0
    check(hb.load(tmp_path / "small"))


def test_networks_on_codes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    nn.init.normal_(model[3].weight, std=1e-5)
    images, config = [torch.randn(2, 3, 8, 8)], {"activations": "static", "method": "absmax"}
    with pytest.raises(FormatError, match=r"^3\.weight: its largest"):
        hb.quantize_(model, hb.Config("int8_channel_f16", **config, strict=True), images)
    expected = model(images[0]).detach()
    hb.quantize_(model, hb.Config("int8_channel_f16", **config), images)
    assert "too coarse" in reason_of(hb.report(model), "3")
    assert torch.allclose(model(images[0]), expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_sensitivities_are_measured_all_the_same() -> None:
    config = hb.Config.auto(llama(), 12, IDS, formats=["q8_0", "int8_g32_bf16"])
    model = hb.quantize_(llama(), config)
    assert isinstance(model.model.layers[0].mlp.down_proj, QuantModule)


def test_stacks_of_experts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model, name = make_decoder("Mixtral", **sizes, num_local_experts=4).eval(), "model.layers.0.mlp.experts.down_proj"
    with torch.no_grad():
        model.get_parameter(name).mul_(1e-4)
        model.save_pretrained(tmp_path)
        expected = model(IDS).logits
        read = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=hb.HalfbyteConfig("q8_0"))
        for built in (read, hb.load(tmp_path, format="q8_0"), hb.quantize_(model, "q8_0")):
            assert "too coarse" in reason_of(hb.report(built), name)
            assert isinstance(built.get_submodule("model.layers.0.mlp.experts.gate_up_proj"), QuantModule)
            assert (built(IDS).logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("scales", ["dynamic", "learned"])
def test_training(scales: str) -> None:
    model = hb.prepare_qat_(llama(), "q8_0" if scales == "dynamic" else "int8_g32", scales=scales)
    assert type(model.lm_head) is nn.Linear
    assert "too coarse" in reason_of(hb.report(model))
    model(IDS).logits.square().sum().backward()
    check(hb.convert_qat_(model))
    assert "too coarse" in reason_of(hb.report(model))
    strict = llama()
    with pytest.raises(FormatError, match="too coarse"):
        hb.prepare_qat_(strict, hb.Config("q8_0", strict=True))
    assert type(strict.lm_head) is type(strict.model.layers[0].mlp.up_proj) is nn.Linear
    alone = nn.Sequential(nn.Linear(64, 8))
    nn.init.normal_(alone[0].weight, std=1e-5)
    with pytest.raises(FormatError, match=r"^0\.weight: its largest value"):
        hb.prepare_qat_(alone, "q8_0")


@pytest.mark.parametrize("strict", [False, True])
def test_weights_that_no_longer_fit_after_training(strict: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 32), Conv1D(8, 32), nn.Linear(8, 64))
    hb.prepare_qat_(model, hb.Config("q8_0", strict=strict))
    with torch.no_grad():
        for layer in model[:2]:
            layer.weight.mul_(1e-4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if strict:
        with pytest.raises(FormatError, match=r"0\.weight: its largest value"):
            hb.convert_qat_(model)
        assert isinstance(model[2], FakeQuantized)
        return
    hb.convert_qat_(model)
    assert [type(layer) for layer in model] == [nn.Linear, Conv1D, QuantLinear]
    assert "too coarse" in reason_of(hb.report(model), "0")
    twin = nn.Sequential(nn.Linear(64, 32), Conv1D(8, 32))
    twin.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("2")})
    x = torch.randn(3, 64)
    assert torch.equal(model[:2](x), twin(x))
    assert model[1].state_dict().keys() == twin[1].state_dict().keys()
