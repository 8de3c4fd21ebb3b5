"""Convolutions as modules: swapped, reported, saved, loaded, traced."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.checkpoint import export
from halfbyte.errors import ArgumentError, CheckpointError, HalfbyteError, UnsupportedError
from halfbyte.nn.modules.conv import QuantConv1d, QuantConv2d
from halfbyte.nn.modules.quantized import QuantModule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, 1, 1, groups=32),
        nn.Conv2d(32, 64, 1, bias=False),
        nn.Conv2d(64, 64, 3, padding="same", dilation=2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 17, 15, generator=torch.Generator().manual_seed(1))


def floats_of(model: nn.Module, like: nn.Module) -> nn.Module:
    """`like` with the dequantized weights of `model`."""
    out = copy.deepcopy(like)
    for name, module in model.named_modules():
        if isinstance(module, QuantModule):
            out.get_submodule(name).weight.data = hb.dequantize(module.packed).view_as(out.get_submodule(name).weight)
    return out


@pytest.mark.parametrize("format", ["int8_channel", "q4_0", "int4_g32_zp"])
def test_a_network_computes_with_its_dequantized_weights(format: str) -> None:
    model = network()
    quantized = hb.quantize_(copy.deepcopy(model), hb.Config(format, compute="float"))
    assert all(isinstance(quantized[i], QuantConv2d) for i in (0, 2, 3, 4))
    x = images()
    torch.testing.assert_close(quantized(x), floats_of(quantized, model)(x), rtol=1e-4, atol=1e-4)


def test_narrow_convolutions_take_a_scale_a_channel_unless_told_otherwise() -> None:
    def formats(config: hb.Config) -> list[str]:
        return [str(row.format) for row in hb.report(hb.quantize_(network(), config)).rows]

    assert formats(hb.Config("q4_0")) == ["int8_channel", "int8_channel", "q4_0", "q4_0", "q4_0"]
    assert formats(hb.Config("int4_channel")) == ["int4_channel"] * 5
    assert formats(hb.Config("q4_0", overrides={"0": "q8_0"}))[0] == "q8_0"


@pytest.mark.parametrize("format", ["int8_channel", "q8_0"])
def test_images_that_are_quantized_once(format: str, tmp_path: Path) -> None:
    model = network()
    quantized = hb.quantize_(copy.deepcopy(model), hb.Config(format, activation="image"))
    assert quantized[4].activation == ("image" if format == "int8_channel" else "row")
    assert quantized[7].activation == "row"
    x = images()
    with torch.no_grad():
        wanted = floats_of(quantized, model)(x)
        assert float((quantized(x) - wanted).norm() / wanted.norm()) < 0.02
    hb.save(quantized, tmp_path / "a")
    assert torch.equal(hb.load(tmp_path / "a", model=network())(x), quantized(x))


def test_the_report_counts_what_is_stored() -> None:
    report = hb.report(hb.quantize_(network(), "q4_0"))
    row = report.rows[3]
    assert (row.name, row.kind, row.shape) == ("4", "Conv2d", (64, 32, 3, 3))
    assert row.bytes_after == 64 * 9 * 18 + 64 * 4  # a block of 18 bytes a tap, and the bias
    assert row.bits_per_weight == 4.5
    assert row.error is not None
    assert 0.01 < row.error < 0.2


@pytest.mark.parametrize("format", ["int8_channel", "q4_1", "int8_tensor"])
def test_what_is_saved_loads_as_it_was(format: str, tmp_path: Path) -> None:
    quantized, x = hb.quantize_(network(), format), images()
    hb.save(quantized, tmp_path / "a")
    loaded = hb.load(tmp_path / "a", model=network())
    assert torch.equal(loaded(x), quantized(x))
    again = hb.quantize_(network(), format)
    again.load_state_dict(quantized.state_dict())
    assert torch.equal(again(x), quantized(x))


def test_a_kernel_of_another_size_does_not_load(tmp_path: Path) -> None:
    hb.save(hb.quantize_(network(), "q4_0"), tmp_path / "a")
    other = network()
    other[4] = nn.Conv2d(64, 64, 5, padding=2, groups=2)
    with pytest.raises(CheckpointError, match=r"4\.weight"):
        hb.load(tmp_path / "a", model=other)


@pytest.mark.parametrize(("kind", "format"), [("awq", "int4_g32_zp"), ("gptq", "int4_g32"), ("compressed-tensors", "int8_channel")])
def test_other_kinds_of_folders_get_the_weight_as_the_float_model_has_it(kind: str, format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    lines = nn.Sequential(nn.Conv1d(64, 32, 5), nn.Conv1d(32, 32, 3, groups=32)).eval()
    model = nn.ModuleDict({"image": network(), "lines": lines, "linear": nn.Linear(64, 64)})
    quantized = hb.quantize_(copy.deepcopy(model), hb.Config(format, skip=["image.7"]))
    hb.save(quantized, tmp_path / "a")
    report = export(tmp_path / "a", tmp_path / "b", kind)
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as file:
        for name, module in quantized.named_modules():
            if isinstance(module, QuantConv2d):
                floats = model.get_submodule(name).weight
                wanted = hb.dequantize(module.packed).view_as(floats)
                assert torch.equal(file.get_tensor(f"{name}.weight"), wanted), name
    rows = {row.name: row for row in report.rows}
    assert rows["image.4.weight"].shape == (64, 32, 3, 3)
    assert "only linear layers" in (rows["image.4.weight"].reason or "")


def test_a_network_without_linear_layers_is_refused_by_kinds_that_hold_no_others(tmp_path: Path) -> None:
    hb.save(hb.quantize_(nn.Sequential(nn.Conv2d(32, 32, 3)), "int4_g32_zp"), tmp_path / "a")
    with pytest.raises(ArgumentError, match="only linear layers are quantized there"):
        export(tmp_path / "a", tmp_path / "b", "awq")
    with pytest.raises(HalfbyteError, match="GGUF"):
        export(tmp_path / "a", tmp_path / "b.gguf", "gguf")
    codes = hb.Config("int8_channel", activations="static")
    hb.save(hb.quantize_(network(), codes, images()), tmp_path / "c")
    with pytest.raises(ArgumentError, match="network on int8 codes, which gptq cannot hold"):
        export(tmp_path / "c", tmp_path / "b", "gptq")
    export(tmp_path / "c", tmp_path / "d", "halfbyte")
    assert torch.equal(hb.load(tmp_path / "d", model=network())(images()), hb.load(tmp_path / "c", model=network())(images()))


def test_a_checkpoint_that_does_not_name_the_kernel_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"image": nn.Conv2d(32, 32, 3), "linear": nn.Linear(64, 64)})
    hb.save(hb.quantize_(model, "int4_g32"), tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    for wrong in (None, [3, 4], [9], "3"):
        entry = config["halfbyte"]["weights"]["image.weight"]
        entry.pop("kernel", None)
        if wrong is not None:
            entry["kernel"] = wrong
        (tmp_path / "a" / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"the kernel of 'image\.weight' is the sizes of a Conv2d's"):
            export(tmp_path / "a", tmp_path / "b", "gptq")
        assert not (tmp_path / "b").exists()


def test_lines() -> None:
    torch.manual_seed(0)
    for layer in (nn.Conv1d(6, 8, 5, 2, 2), nn.Conv1d(8, 8, 3, padding="same", groups=8)):
        model = nn.Sequential(layer)
        quantized = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", compute="float"))
        assert isinstance(quantized[0], QuantConv1d)
        x = torch.randn(2, layer.in_channels, 20)
        torch.testing.assert_close(quantized(x), floats_of(quantized, model)(x), rtol=1e-4, atol=1e-4)


def test_compiled_and_moved() -> None:
    quantized, x = hb.quantize_(network(), "q4_0"), images()
    wanted = quantized(x)
    torch.testing.assert_close(torch.compile(quantized, fullgraph=True, backend="aot_eager")(x), wanted)
    half = copy.deepcopy(quantized).bfloat16()
    assert half[0].weight.dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), wanted, rtol=0.1, atol=0.05)


def test_norms_are_folded() -> None:
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        first = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.BatchNorm2d(16)
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4))

    model = block()
    for _ in range(3):
        model(torch.randn(8, 3, 3, 3) * 3 + 1)
    model.eval()
    x = torch.randn(2, 3, 3, 3)
    wanted = model(x)
    assert hb.fold_batch_norms_(model) is model
    assert hb.report(model).notes == ("1 and 1 more: folded into the layer before",)
    assert isinstance(model[1], nn.Identity)
    assert isinstance(model[6], nn.Identity)
    assert isinstance(model[3], nn.BatchNorm2d)
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"model\.eval"):
        hb.fold_batch_norms_(block())


@pytest.mark.parametrize("change", [nn.utils.weight_norm, nn.utils.parametrizations.spectral_norm, lambda layer: layer])
def test_what_does_more_than_its_class_is_not_folded(change: Callable[[nn.Module], nn.Module]) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = change(nn.Conv2d(3, 8, 3)), nn.BatchNorm2d(8)
            self.last, self.rows = nn.Linear(4, 6), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.first(x)) + nn.functional.conv2d(x, self.first.weight)
            return self.rows(self.last(y.flatten(2)))

    model, hooked = Reading().eval(), nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    for module in (model.norm, model.rows, hooked[1]):
        module.running_var.uniform_(0.5, 2)
    hooked[0].register_forward_hook(lambda _, inputs, output: -output)
    for network in (model, hooked):
        x = torch.randn(2, 3, 4, 4)
        wanted = network(x)
        assert torch.equal(hb.fold_batch_norms_(network)(x), wanted)


def test_torch_func_differentiates_convolutions() -> None:
    model, x = hb.quantize_(nn.Sequential(nn.Conv2d(3, 16, 3)), "int8_channel"), torch.randn(2, 3, 5, 5, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: model(x).sum())(x), wanted)


def test_a_model_that_decides_as_it_runs_is_not_folded() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) if x.sum() > 0 else x

    model = Branching().eval()
    with pytest.raises(UnsupportedError, match="cannot be traced"):
        hb.fold_batch_norms_(model)
    model.norm = nn.Identity()
    assert hb.fold_batch_norms_(model) is model, "there is nothing to fold"
