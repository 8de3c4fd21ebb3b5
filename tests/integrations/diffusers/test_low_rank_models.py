"""Diffusion transformers whose outliers are products of low rank: calibrated with latents and prompts, saved, loaded, offloaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

from test_diffusers_gguf import flux, output

import halfbyte as hb
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules.low_rank import LowRankLinear

CONFIG = hb.Config("int4_g64", low_rank=8, compute="int8")


def built(*, calibrated: bool) -> tuple[Any, Any, dict[str, Any]]:
    """A float transformer with outliers, its quantized form and the arguments of a call."""
    torch.manual_seed(0)
    model, _, call = flux()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight[:, 5] *= 20
    return model, hb.quantize_(copy.deepcopy(model.eval()), CONFIG, [call] if calibrated else None), call


@pytest.mark.parametrize("calibrated", [False, True])
def test_nearer_than_without(calibrated: bool, tmp_path: Path) -> None:
    model, small, call = built(calibrated=calibrated)
    layer = small.get_submodule("transformer_blocks.0.attn.to_q")
    assert isinstance(layer, LowRankLinear)
    assert (layer.input_scale is not None) == calibrated
    want = output(model, call)
    plain: Any = hb.quantize_(copy.deepcopy(model), hb.Config("int4_g64", compute="int8"))
    errors = [float((output(one, call) - want).norm() / want.norm()) for one in (plain, small)]
    assert errors[1] < errors[0] / 2  # steps of 4 bits are ten times as small, but x is rounded to 8 bits in both; see test_low_rank_linear
    small.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(output(again, call), output(small, call))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in small.state_dict().items())
    again.save_pretrained(tmp_path / "again")
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_offloaded_in_groups(kind: str) -> None:
    _, small, call = built(calibrated=True)
    want, cpu = output(small, call), torch.device("cpu")
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    small.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=kind, **blocks)
    assert torch.equal(output(small, call), want)


@pytest.mark.parametrize("calibrated", [False, True])
def test_fused(calibrated: bool, tmp_path: Path) -> None:
    """Layers whose inputs have scales of their own have different inputs, and stay alone."""
    model, small, call = built(calibrated=calibrated)
    want, state = output(small, call), {name: tensor.clone() for name, tensor in small.state_dict().items()}
    hb.optimize_(small)
    assert ("computed together: to_q+to_k+to_v" in str(hb.report(small))) != calibrated
    assert isinstance(small.get_submodule("transformer_blocks.0.attn.to_q.residual"), FusedLinear) != calibrated
    # Branches are added after the rounding to float32, not before, by which a code of the next activations may become its neighbour.
    assert float((output(small, call) - want).norm() / want.norm()) < 2e-3
    small.save_pretrained(tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in type(model).from_pretrained(tmp_path).state_dict().items())


def test_float_again_and_compiled(tmp_path: Path) -> None:
    model, small, call = built(calibrated=True)
    want = output(small, call)
    hb.optimize_(small)
    torch.compiler.reset()  # torch keeps eight graphs of a forward
    small.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(small, call), want, rtol=1e-3, atol=1e-3)
    _, small, _ = built(calibrated=True)
    small.save_pretrained(tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small")
    again.dequantize()
    again.save_pretrained(tmp_path / "float")
    assert type(model).from_pretrained(tmp_path / "float").state_dict().keys() == model.state_dict().keys()


def test_while_loading_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="low_rank takes a float model that is in memory"):
        hb.HalfbyteConfig(CONFIG)
    model, small, _ = built(calibrated=False)
    small.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text("utf-8")
    for damage in ('"low_rank": -1', '"low_rank": "8"'):
        config.write_text(text.replace('"low_rank": 8', damage), "utf-8")
        with pytest.raises(CheckpointError, match="a low_rank is a whole number"):
            type(model).from_pretrained(tmp_path)
