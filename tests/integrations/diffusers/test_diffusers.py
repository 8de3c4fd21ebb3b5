"""diffusers: models and pipelines are quantized while they load, saved, offloaded, compiled, and get adapters."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

import tiny_diffusers
from diffusers import AutoencoderKL, DDPMPipeline, PipelineQuantizationConfig, UNet2DConditionModel
from diffusers.quantizers import auto
from peft import LoraConfig, get_peft_model_state_dict
from tiny_diffusers import noise, picture

import halfbyte as hb
from halfbyte.errors import ArgumentError, CheckpointError, FormatError, UnsupportedError
from halfbyte.integrations.diffusers import api, offloading, quantizer, single_file, untested
from halfbyte.nn.dequantized import dequantize_

FILE = "diffusion_pytorch_model.safetensors"
ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
MODULES = api, offloading, quantizer, single_file, untested


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float UNet."""
    path = tmp_path_factory.mktemp("unet")
    tiny_diffusers.unet().save_pretrained(path)
    return path


def loaded(folder: Path, config: hb.HalfbyteConfig | None = None, **settings: Any) -> Any:
    return UNet2DConditionModel.from_pretrained(folder, quantization_config=config, **settings)


def quantized(folder: Path, **settings: Any) -> Any:
    return loaded(folder, hb.HalfbyteConfig("q8_0", compute="float"), **settings)


def count(model: nn.Module) -> int:
    return sum(isinstance(module, hb.QuantModule) for module in model.modules())


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


# While loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [{}, {"device_map": "cpu"}], ids=["plain", "map"])
def test_a_model_is_quantized_while_it_loads(folder: Path, dtype: torch.dtype, where: dict[str, str]) -> None:
    model = quantized(folder, torch_dtype=dtype, **where)
    other = hb.quantize_(loaded(folder, torch_dtype=dtype), hb.Config("q8_0", compute="float"))
    assert same(model, other)
    assert count(model) == len(hb.report(model).quantized)
    assert torch.equal(noise(model, dtype=dtype), noise(other, dtype=dtype))
    # The oracle: diffusers' modules with the dequantized weights, whose sums are of another order.
    dequantize_(other)
    found, want = noise(model, dtype=dtype).float(), noise(other, dtype=dtype).float()
    assert (found - want).norm() < (1e-5 if dtype == torch.float32 else 3e-2) * want.norm()


@pytest.mark.parametrize("fmt", ["q4_0", "int5_g32", "int8_channel"])
def test_codes_are_the_same_after_saving(folder: Path, fmt: str, tmp_path: Path) -> None:
    model = loaded(folder, hb.HalfbyteConfig(fmt, compute="float"), torch_dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    for name in ("whole", "parts"):
        again = loaded(tmp_path / name, torch_dtype=torch.bfloat16)
        assert same(again, model)
        assert torch.equal(noise(again, dtype=torch.bfloat16), noise(model, dtype=torch.bfloat16))
        assert count(again) == count(model)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()
    assert (load_file(tmp_path / "whole" / FILE)[f"{ATTENTION}.weight.data"].shape[1] == 20) == (fmt == "int5_g32")  # 5 bits each of 32


def test_what_quantize_has_quantized_is_saved_too(tmp_path: Path) -> None:
    model = hb.quantize_(tiny_diffusers.vae(), hb.Config("q8_0", skip=["decoder.*"]))
    model.save_pretrained(tmp_path)
    again = AutoencoderKL.from_pretrained(tmp_path)
    assert same(again, model)
    assert isinstance(again.decoder.conv_in, nn.Conv2d)
    hb.quantize_(again, "int8_channel")  # what was left; the config describes the model that is saved
    again.save_pretrained(tmp_path)
    assert same(AutoencoderKL.from_pretrained(tmp_path), again)


def test_a_model_becomes_float_again(folder: Path, tmp_path: Path) -> None:
    model = quantized(folder)
    want = noise(model)
    model.dequantize()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert count(loaded(tmp_path)) == 0
    torch.testing.assert_close(noise(loaded(tmp_path)), want, rtol=1e-4, atol=1e-4)


def test_modules_that_compute_in_float32_stay_float(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UNet2DConditionModel, "_keep_in_fp32_modules", ["time_embedding"])
    model = quantized(folder, torch_dtype=torch.bfloat16)
    assert model.time_embedding.linear_1.weight.dtype == torch.float32
    assert "time_embedding.linear_1" in str(hb.report(model))
    assert "computes it in float32" in str(hb.report(model))
    monkeypatch.setattr(UNet2DConditionModel, "_keep_in_fp32_modules", [name for name, _ in model.named_children()])
    with pytest.raises(
        ArgumentError, match=r"nothing to quantize in UNet2DConditionModel: \S+ stays as it is \(UNet.* computes it in float32\)"
    ):
        quantized(folder, torch_dtype=torch.bfloat16)
    assert count(loaded(folder, torch_dtype=torch.bfloat16)) == 0


def test_a_pipeline_is_quantized_by_component(tmp_path: Path) -> None:
    pipe = tiny_diffusers.pipeline()
    pipe.save_pretrained(tmp_path / "float")
    want = picture(pipe)
    config = hb.HalfbyteConfig("q8_0")
    by_name = PipelineQuantizationConfig(quant_mapping={"unet": config})
    by_method = PipelineQuantizationConfig(quant_backend="halfbyte", quant_kwargs={"format": "q8_0"}, components_to_quantize=["unet"])
    pictures = []
    for number, settings in enumerate((by_name, by_method)):
        small = DDPMPipeline.from_pretrained(tmp_path / "float", quantization_config=settings)
        assert count(small.unet) > 10
        pictures.append(picture(small))
        assert 0 < (pictures[-1] - want).abs().max() < 0.1  # of pixels from 0 to 1
        small.save_pretrained(tmp_path / str(number))
        assert torch.equal(picture(DDPMPipeline.from_pretrained(tmp_path / str(number))), pictures[-1])
    assert torch.equal(*pictures)


# Running


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 1)])
def test_latents_of_any_size_and_memory_format(folder: Path, size: tuple[int, int]) -> None:
    model = quantized(folder)
    found = noise(model, size)
    want = noise(copy.deepcopy(model).dequantize(), size)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(noise(model.to(memory_format=torch.channels_last), size), want, rtol=1e-4, atol=1e-4)


def test_a_model_changes_its_dtype(folder: Path) -> None:
    model = quantized(folder)
    assert torch.equal(noise(model.to(torch.bfloat16), dtype=torch.bfloat16), noise(quantized(folder).bfloat16(), dtype=torch.bfloat16))
    assert noise(model.half(), dtype=torch.float16).dtype == torch.float16


def test_a_vae_takes_no_images() -> None:
    vae = hb.quantize_(tiny_diffusers.vae(), "q8_0")
    with torch.no_grad():
        assert vae.decode(torch.zeros(0, 4, 8, 8)).sample.shape == (0, 3, 8, 8)


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_group_offloading(folder: Path, kind: str, on_disk: bool, tmp_path: Path) -> None:
    model = quantized(folder)
    want, state = noise(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    place = {"offload_to_disk_path": str(tmp_path / "disk")} if on_disk else {}
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=kind, **blocks, **place)
    layer = model.get_submodule(ATTENTION)
    assert layer.packed_for == cpu
    if kind == "leaf_level":
        assert layer._diffusers_hook.get_hook("group_offloading") is not None  # a leaf of its own
    assert torch.equal(noise(model), want)
    assert torch.equal(noise(model), want)
    if not on_disk:
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_weight_that_is_packed_for_another_device_is_refused() -> None:
    layer: Any = hb.quantize_(nn.Sequential(nn.Linear(64, 32)), "q8_0")[0]
    layer.keep_layout_of(torch.device("cpu"))
    x, want = torch.ones(1, 64), layer(torch.ones(1, 64))
    layer.packed_data.data = layer.packed_data.data.clone()  # as group offloading moves it
    assert torch.equal(layer(x), want)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.keep_layout_of(torch.device("cpu"))  # again, as when adapters are loaded
    layer.packed_for = torch.device("cuda")
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())  # saved wherever its bytes are
    assert str(hb.report(nn.Sequential(layer))).count("q8_0") >= 1
    with pytest.raises(ArgumentError, match=r"a QuantLinear is packed for cuda, as group offloading asked, and its weight is on cpu: call"):
        layer(x)
    layer.keep_layout_of(torch.device("cpu"))
    assert torch.equal(layer(x), want)


def test_model_offload(tmp_path: Path) -> None:
    pipe = tiny_diffusers.pipeline()
    hb.quantize_(pipe.unet, "q8_0")
    want = picture(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(picture(pipe), want)


# Adapters


def adapter(folder: Path, targets: list[str], width: int = 32) -> Path:
    """A LoRA file of random numbers."""
    model = tiny_diffusers.unet(width=width)
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    file = folder / "lora.safetensors"
    save_file({f"unet.{name}": tensor for name, tensor in get_peft_model_state_dict(model).items()}, file)
    return file


@pytest.mark.filterwarnings("ignore:merging rounds the sums:UserWarning")
def test_lora(folder: Path, tmp_path: Path) -> None:
    file = adapter(tmp_path, ["to_q", "to_v", "proj_in", "conv1", "conv_shortcut", "downsamplers.0.conv"])
    model = loaded(folder, hb.HalfbyteConfig("q8_0", compute="float", skip=["*.proj_in"]))
    oracle = copy.deepcopy(model).dequantize()
    want = noise(model)
    for one in (model, oracle):
        one.load_lora_adapter(load_file(file), prefix="unet")
    adapted = noise(model)
    assert (adapted - want).norm() > 0.01 * want.norm()
    torch.testing.assert_close(adapted, noise(oracle), rtol=1e-3, atol=1e-3)
    with pytest.raises(UnsupportedError, match=r"saved without adapters, and .* has one: save the adapter by save_lora_adapter, or merge"):
        model.save_pretrained(tmp_path / "adapted")
    for one in (model, oracle):
        one.fuse_lora()
    # The sum of the weights is rounded to 8 bits again: an error of 2^-8 of a block's largest weight at most, in some layers of many.
    assert (noise(model) - noise(oracle)).norm() < 0.05 * want.norm()
    model.unfuse_lora()
    torch.testing.assert_close(noise(model), adapted, rtol=1e-4, atol=1e-4)  # float layers are rounded, quantized ones restored
    model.fuse_lora()
    merged = noise(model)
    model.unload_lora()
    assert torch.equal(noise(model), merged)
    model.save_pretrained(tmp_path / "merged")
    assert torch.equal(noise(loaded(tmp_path / "merged")), merged)
    other = quantized(folder)
    other.load_lora_adapter(load_file(adapter(tmp_path, ["to_q"])), prefix="unet")
    other.unload_lora()
    assert same(other, quantized(folder))


def test_lora_for_other_models(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for .*conv1\.lora_A.*\[2, 64, 3, 3\].*\[2, 32, 3, 3\]"):
        quantized(folder).load_lora_adapter(load_file(adapter(tmp_path, ["conv1"], width=64)), prefix="unet")
    with pytest.raises(RuntimeError, match=r"size mismatch for .*to_q\.lora_A.*\[2, 64\].*\[2, 32\]"):
        quantized(folder).load_lora_adapter(load_file(adapter(tmp_path, ["to_q"], width=64)), prefix="unet")


# Bad input


def test_without_halfbyte_it_fails_loudly(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(folder).save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "halfbyte")
    with pytest.raises(ValueError, match="Unknown quantization type, got halfbyte"):
        loaded(tmp_path)


def test_a_component_that_is_quantized_twice(folder: Path, tmp_path: Path) -> None:
    model = quantized(folder)
    assert hb.quantize_(model, hb.Config("q8_0", compute="float")) is model
    with pytest.raises(ArgumentError, match=r"time_embedding\.linear_1 is quantized already, and stays q8_0 where int4_g32"):
        hb.quantize_(model, hb.Config("int4_g32", compute="float"))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="quantization_config` from the model will be used"):
        assert same(loaded(tmp_path, hb.HalfbyteConfig("int4_g32")), model)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (hb.HalfbyteConfig(), ArgumentError, r"HalfbyteConfig\(\) without a format reads GGUF files, and this model is float: write"),
        (hb.HalfbyteConfig("q8_0", skip=["nothing.*"]), ArgumentError, r"'nothing\.\*' matches no module"),
        (
            hb.HalfbyteConfig("q8_0", skip=["*"]),
            ArgumentError,
            r"nothing to quantize in UNet2DConditionModel: conv_in stays as it is \(skip pa",
        ),
    ],
)
def test_configs_that_cannot_be(folder: Path, config: hb.HalfbyteConfig, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loaded(folder, config)


def test_offload_to_the_disk_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"packed weights cannot be offloaded to the disk, the device_map of conv_in: map it"):
        quantized(folder, device_map={"conv_in": "disk", "": "cpu"}, offload_folder=tmp_path)


def test_weights_that_a_format_cannot_hold(tmp_path: Path) -> None:
    model = tiny_diffusers.unet()
    nn.init.constant_(model.get_submodule(ATTENTION).weight, 1e38)
    model.save_pretrained(tmp_path)
    kept = quantized(tmp_path)
    assert isinstance(kept.get_submodule(ATTENTION), nn.Linear)
    assert ATTENTION in {row.name for row in hb.report(kept).rows if row.reason}
    with pytest.raises(FormatError, match=ATTENTION):
        loaded(tmp_path, hb.HalfbyteConfig("q8_0", strict=True))


@pytest.mark.parametrize("damage", ["missing", "bias", "scale", "float", "nan", "name", "shape"])
def test_damaged_files(folder: Path, damage: str, tmp_path: Path) -> None:
    quantized(folder).save_pretrained(tmp_path)
    state, config = load_file(tmp_path / FILE), json.loads((tmp_path / "config.json").read_text("utf-8"))
    modules, scale = config["quantization_config"]["modules"], f"{ATTENTION}.weight.scale"
    messages = {
        "missing": rf"no file has {ATTENTION}\.weight\.scale, which the quantized model needs",
        "bias": r"no file has conv_in\.bias, which",
        "scale": rf"{ATTENTION}\.weight: the scale of q8_0 codes of shape \[32, 32\]",
        "float": rf"no file has {ATTENTION}\.weight\.data",
        "nan": r"conv_norm_out\.weight .* NaN",
        "name": r"UNet2DConditionModel has no other, which is quantized in the files: use the diffusers that saved them",
        "shape": rf"{ATTENTION}\.weight is \[32, 64\] in the files, \[32, 32\] in the model",
    }
    match damage:
        case "missing":
            del state[scale]
        case "bias":
            del state["conv_in.bias"]
        case "scale":
            state[scale] = state[scale][:-1].clone()
        case "float":
            del state[f"{ATTENTION}.weight.data"], state[scale]
            state[f"{ATTENTION}.weight"] = torch.zeros(32, 32)
        case "nan":
            state["conv_norm_out.weight"][0] = torch.nan
        case "name":
            modules["other"] = modules[ATTENTION]
        case "shape":
            modules[ATTENTION]["shape"] = [32, 64]
    save_file(state, tmp_path / FILE, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(CheckpointError, match=messages[damage]):
        loaded(tmp_path)


# Registration

PROGRAM = """
import sys
import halfbyte as hb
assert "diffusers" not in sys.modules
import diffusers.hooks
from diffusers import PipelineQuantizationConfig
PipelineQuantizationConfig(quant_backend="halfbyte", quant_kwargs={"format": "q8_0"})
from diffusers.hooks import group_offloading
assert hb.QuantModule in group_offloading._GO_LC_SUPPORTED_PYTORCH_LAYERS
"""


def test_any_order_of_imports() -> None:
    """Group offloading first, which imports the quantizers while halfbyte changes it; models last."""
    done = subprocess.run([sys.executable, "-W", "error:::halfbyte", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_untested_versions_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(folder).save_pretrained(tmp_path)
    for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
        monkeypatch.setitem(getattr(auto, name), "halfbyte", None)
    untested.refuse(auto, "diffusers 9.0 is newer than 0.42, the newest version tested")
    for load in (lambda: quantized(folder), lambda: loaded(tmp_path)):
        with pytest.raises(UnsupportedError, match=r"diffusers 9\.0 is newer .*: install diffusers 0\.41 to 0\.42, or load the float"):
            load()
