"""GGUF files of UNets (SD 1.5, SDXL) as city96's tool writes them: the names of the original code without their prefix, and tensors whose
rows are no multiple of 256 in rows of 256."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

import tiny_diffusers
from diffusers import UNet2DConditionModel
from diffusers.loaders import single_file_model
from tiny_diffusers import noise, renamed

import halfbyte as hb
from halfbyte.errors import CheckpointError
from halfbyte.formats import ggml
from halfbyte.formats.ggml_encoding import encode
from halfbyte.formats.spec import as_format
from halfbyte.io import gguf

WIDTH = 96  # neither the rows of Linears nor those of convolutions are multiples of 256
BLOCKS = {
    "conv_in": "input_blocks.0.0",
    "down_blocks.0.resnets.0": "input_blocks.1.0",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op",
    "down_blocks.1.resnets.0": "input_blocks.3.0",
    "down_blocks.1.attentions.0": "input_blocks.3.1",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "up_blocks.0.resnets.0": "output_blocks.0.0",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.resnets.1": "output_blocks.1.0",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.1.2.conv",
    "up_blocks.1.resnets.0": "output_blocks.2.0",
    "up_blocks.1.resnets.1": "output_blocks.3.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
RESNETS = {
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
}


def ldm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in renamed(state, BLOCKS).items():
        if ".transformer_blocks." not in name and "proj_" not in name:
            name = renamed({name: tensor}, RESNETS).popitem()[0]
            if ".0.norm" in name or "middle_block.2.norm" in name:  # of a resnet: an attention is the second
                name = name.replace("norm1", "in_layers.0").replace("norm2", "out_layers.0")
        found[name] = tensor
    return found


def write(path: Path, state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Writes the tensors as the tool does; returns the values that the file holds."""
    block, data, shapes, stored = ggml.TYPES[ggml.NUMBERS[kind]], {}, {}, {}
    metadata: dict[str, Any] = {"general.architecture": "sd1"}
    for name, tensor in state.items():
        rows = tensor
        if tensor.dim() > 1 and tensor.numel() % 256 == 0 and tensor.shape[-1] % 256:
            metadata[f"comfy.gguf.orig_shape.{name}"] = list(tensor.shape)
            rows = tensor.reshape(-1, 256)
        if tensor.dim() > 1 and rows.shape[-1] % block.weights == 0 and not name.startswith(("input_blocks.0", "out.")):
            codes = hb.quantize(rows, block.format)
            shapes[name], data[name] = (ggml.NUMBERS[kind], tuple(rows.shape)), encode(block, codes)
            stored[name] = codes.dequantize().reshape(tensor.shape)
        else:  # in float16
            shapes[name], data[name] = (1, tuple(rows.shape)), rows.half()
            stored[name] = rows.half().float().reshape(tensor.shape)
    writer = gguf.Writer(path, metadata, shapes)
    for name, tensor in data.items():
        writer.write(name, tensor.contiguous())
    writer.finish()
    return stored


def built(folder: Path, kind: str) -> tuple[Path, UNet2DConditionModel]:
    """A file, and the float model with the values in it."""
    model = tiny_diffusers.unet(width=WIDTH)
    model.save_config(folder / "config")
    state = ldm(model.state_dict())
    names = dict(zip(state, model.state_dict(), strict=True))
    stored = write(folder / "unet.gguf", state, kind)
    model.load_state_dict({names[name]: tensor for name, tensor in stored.items()})
    return folder / "unet.gguf", model.eval()


def opened(file: Path, *formats: str, **settings: Any) -> Any:
    config = hb.HalfbyteConfig(*formats, compute="float", **settings)
    return UNet2DConditionModel.from_single_file(str(file), config=str(file.parent / "config"), quantization_config=config)


asks = "maybe_update_state_dict" in inspect.getsource(single_file_model)
in_new_versions = pytest.mark.skipif(not asks, reason="this version does not ask the quantizer for the names of a file's tensors")


@in_new_versions
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q5_1"])
def test_a_reshaped_unet(kind: str, tmp_path: Path) -> None:
    file, model = built(tmp_path, kind)
    small = opened(file)
    linears = {name: module for name, module in small.named_modules() if isinstance(module, hb.QuantLinear)}
    floats = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears.keys() == floats  # also those that are [36, 256] in the file
    for name, tensor in model.state_dict().items():
        module = small.get_submodule(name.rpartition(".")[0])
        found = module.weight.clone() if name.endswith(".weight") else module.get_parameter(name.rpartition(".")[2])
        assert torch.equal(found, tensor), name  # codes are not rounded again
    assert "its blocks in the file are not along its inputs: name a format to round it again" in str(hb.report(small))
    torch.testing.assert_close(noise(small), noise(model), rtol=1e-4, atol=1e-4)
    small.save_pretrained(tmp_path / "small")
    assert torch.equal(noise(UNet2DConditionModel.from_pretrained(tmp_path / "small")), noise(small))


@in_new_versions
def test_convolutions_are_rounded_to_a_format_that_is_named(tmp_path: Path) -> None:
    file, model = built(tmp_path, "q8_0")
    small = opened(file, "int8_channel")
    layer = small.get_submodule("mid_block.resnets.0.conv1")
    want = hb.quantize_(nn.Sequential(copy.deepcopy(model.get_submodule("mid_block.resnets.0.conv1"))), "int8_channel")
    assert torch.equal(layer.weight.clone(), want.get_submodule("0").weight.clone())  # type: ignore[operator,union-attr]
    assert small.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q").packed.codes_format == as_format("q8_0")
    assert float((noise(small) - noise(model)).norm() / noise(model).norm()) < 0.05  # 8 bits twice


def test_another_model(tmp_path: Path) -> None:
    file, _ = built(tmp_path, "q8_0")
    tiny_diffusers.unet(width=64).save_config(tmp_path / "config")
    with pytest.raises(CheckpointError, match=r"in the GGUF file, and \[.*\] in the model: pass config=|cannot read .*'sd1'"):
        opened(file)
