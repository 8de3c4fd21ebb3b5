"""3-D and transposed convolutions as modules: in networks, saved, loaded, exported, and in what else looks at kinds of layers."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.checkpoint import export
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.kinds import FLOAT_MODULES
from halfbyte.nn.modules.quantized import QuantModule


class VideoBlock(nn.Module):
    """A residual block of a video VAE with causal convolutions, and its upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(4, 32, (1, 2, 2), (1, 2, 2))
        self.first, self.norm = nn.Conv3d(32, 32, 3, padding=(0, 1, 1)), nn.GroupNorm(4, 32)
        self.second, self.mixed = nn.Conv3d(32, 32, (3, 1, 1), bias=False), nn.Conv3d(32, 48, 1, padding_mode="replicate")
        self.frames, self.up = nn.ConvTranspose3d(48, 16, (2, 1, 1), (2, 1, 1)), nn.ConvTranspose3d(16, 3, 4, (1, 2, 2), (1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        h = self.second(nn.functional.pad(torch.relu(self.norm(self.first(nn.functional.pad(x, (0, 0, 0, 0, 2, 0))))), (0, 0, 0, 0, 2, 0)))
        return self.up(torch.nn.functional.silu(self.frames(self.mixed(h + x))))


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.relu, self.out = nn.ConvTranspose2d(32, 32, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False)
        self.lines = nn.ConvTranspose1d(3, 3, 4, 4, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.relu(self.up(self.middle(self.down(x)))))
        return y + self.lines(y.flatten(2)).view(*y.shape[:3], -1)[..., : y.shape[3]]


MODELS = {"video": (VideoBlock, (1, 4, 3, 8, 6)), "unet": (SmallUNet, (2, 3, 16, 12))}
models = pytest.mark.parametrize("name", MODELS)


def example(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind().eval(), torch.randn(shape)


def floats_of(quantized: nn.Module, like: nn.Module) -> nn.Module:
    """`like` with the dequantized weights."""
    floats = copy.deepcopy(like)
    for name, module in quantized.named_modules():
        if isinstance(module, QuantModule):
            floats.get_submodule(name).weight.data = module.weight.clone()
    return floats


@models
@torch.no_grad()
def test_networks(name: str) -> None:
    model, x = example(name)
    quantized = hb.quantize_(copy.deepcopy(model), hb.Config("q8_0", compute="float"))
    assert {type(m) for m in quantized.modules() if next(m.parameters(False), None) is not None}.isdisjoint(FLOAT_MODULES)
    torch.testing.assert_close(quantized(x), floats_of(quantized, model)(x), rtol=1e-4, atol=1e-4)
    wanted = model(x)
    assert float((quantized(x) - wanted).norm() / wanted.norm()) < 0.02
    with_sums = hb.fuse_(copy.deepcopy(quantized))
    torch.testing.assert_close(with_sums(x), quantized(x), rtol=1e-4, atol=1e-4)
    for row in hb.report(quantized).rows:
        layer = model.get_submodule(row.name)
        assert row.kind == type(layer).__name__
        if row.format is not None:
            assert row.shape == tuple(layer.weight.shape)
            assert row.error is not None
            assert row.error < 0.02


@models
@pytest.mark.parametrize("format", ["int8_channel", "q8_0", "int4_g32_zp"])
@torch.no_grad()
def test_saved_and_loaded(name: str, format: str, tmp_path: Path) -> None:
    model, x = example(name)
    quantized = hb.quantize_(copy.deepcopy(model), format)
    wanted = quantized(x)
    hb.save(quantized, tmp_path / "a")
    assert torch.equal(hb.load(tmp_path / "a", model=copy.deepcopy(model))(x), wanted)
    again = hb.quantize_(copy.deepcopy(model), format)
    again.load_state_dict(quantized.state_dict())
    assert torch.equal(again(x), wanted)
    assert torch.equal(copy.deepcopy(quantized)(x), wanted)
    half = copy.deepcopy(quantized).bfloat16()
    torch.testing.assert_close(half(x.bfloat16()).float(), wanted, rtol=0.1, atol=0.05)


@models
@torch.no_grad()
def test_exported_and_dequantized_weights_are_arranged_as_the_float_models(name: str, tmp_path: Path) -> None:
    model, x = example(name)
    model = nn.ModuleDict({"net": model, "linear": nn.Linear(64, 64)})
    quantized = hb.quantize_(copy.deepcopy(model), "int4_g32")
    hb.save(quantized, tmp_path / "a")
    export(tmp_path / "a", tmp_path / "b", "gptq")
    convolutions = {f"{name}.weight": m for name, m in quantized["net"].named_modules(prefix="net") if isinstance(m, QuantModule)}
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as file:
        for key, module in convolutions.items():
            assert torch.equal(file.get_tensor(key), module.weight.clone()), key
            assert tuple(module.weight.shape) == tuple(model.get_parameter(key).shape)
    wanted = floats_of(quantized, model)["net"](x)
    dequantize_(quantized)
    assert not any(isinstance(module, QuantModule) for module in quantized.modules())
    assert torch.equal(quantized["net"](x), wanted)


@pytest.mark.parametrize(
    "wrong",
    [{"kernel": [3, 3]}, {"kernel": [4, 3, 3]}, {"folded": 2}, {"folded": 0}, {"phases": [1, 1, 1]}, {"groups": 5, "depthwise": True}],
)
def test_a_damaged_arrangement_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv3d(32, 4, 3))
    hb.save(hb.quantize_(copy.deepcopy(model), "q8_0"), tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["halfbyte"]["weights"]["0.weight"] |= wrong
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"damaged|pass the model that was saved"):
        hb.load(tmp_path / "a", model=model)


def test_a_layer_that_moves_otherwise_does_not_load(tmp_path: Path) -> None:
    hb.save(hb.quantize_(nn.Sequential(nn.ConvTranspose2d(32, 8, 4, 2)), "q8_0"), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        hb.load(tmp_path / "a", model=nn.Sequential(nn.ConvTranspose2d(32, 8, 4, 4)))


def test_the_report_tells_of_zeros() -> None:
    model = hb.quantize_(nn.Sequential(nn.ConvTranspose2d(16, 8, 3, 2), nn.ConvTranspose2d(8, 8, 4, 2)), "int8_channel")
    (note,) = hb.report(model).notes
    assert note == "0: 44% of the packed weight are zeros, as the stride (2, 2) does not divide the kernel (3, 3)"


def test_zeros_must_be_codes() -> None:
    layer = nn.ConvTranspose2d(48, 8, 3, 2)
    hb.quantize_(nn.Sequential(copy.deepcopy(layer)), hb.Config("int4_g32_zp"))
    with pytest.raises(FormatError, match="no code is exactly 0"):
        hb.quantize_(nn.Sequential(copy.deepcopy(layer)), hb.Config("q4_1"))
    model = hb.quantize_(nn.Sequential(layer, nn.Conv2d(8, 8, 3)), hb.Config("q4_1"))
    assert "use a format without an offset" in (hb.report(model).rows[0].reason or "")


def test_patches_are_wide_enough_for_blocks() -> None:
    model = nn.Sequential(
        nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), nn.Conv3d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(16, 4, 2, 2)
    )
    formats = [str(row.format) for row in hb.report(hb.quantize_(model, "q4_0")).rows]
    assert formats == ["q4_0", "int8_channel", "int8_channel", "q4_0"]


def test_training_leaves_them_in_floating_point_and_says_so() -> None:
    model = hb.prepare_qat_(nn.Sequential(nn.Conv3d(16, 4, 1), nn.ConvTranspose3d(4, 4, 2), nn.Conv2d(16, 4, 1)), "int8_channel")
    notes = hb.report(model).notes
    assert [note for note in notes if "is not trained" in note] == [
        f"{i} is not trained for int8_channel: quantize_ does the rest after convert_qat_" for i in (0, 1)
    ]


@torch.no_grad()
def test_pruned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(16, 4, 3), nn.ConvTranspose3d(4, 8, 2, 2))
    hb.prune_(model, "2:4")
    for layer in model:
        assert int((layer.weight == 0).sum()) == layer.weight.numel() // 2


@torch.no_grad()
def test_norms_are_folded() -> None:
    torch.manual_seed(0)
    layers = nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ConvTranspose3d(8, 4, 2, bias=False), nn.BatchNorm3d(4)
    model = nn.Sequential(*layers, nn.ConvTranspose3d(4, 4, 2, groups=2), nn.BatchNorm3d(4))
    x = torch.randn(4, 3, 4, 4, 4) + 1
    for _ in range(3):
        model(x)
    wanted = model.eval()(x)
    torch.testing.assert_close(hb.fold_batch_norms_(model)(x), wanted, rtol=1e-4, atol=1e-5)
    assert [type(layer) for layer in model[1::2]] == [nn.Identity, nn.Identity, nn.BatchNorm3d], "the last has groups"


@torch.no_grad()
def test_networks_on_codes_leave_them_in_floating_point_and_say_so() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.ConvTranspose2d(32, 8, 2, 2), nn.Conv2d(8, 3, 3)).eval(),
        torch.randn(2, 3, 9, 9),
    )
    wanted = model(x)
    network = hb.quantize_(model, hb.Config("int8_channel", activations="static"), [x])
    assert "2 (ConvTranspose2d) runs in floating point" in hb.report(network).notes
    assert float((network(x) - wanted).norm() / wanted.norm()) < 0.1
