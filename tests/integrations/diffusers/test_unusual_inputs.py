"""Inputs that diffusion models rarely get: a right answer, or one sentence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

import tiny_diffusers
from diffusers import DDIMScheduler, PipelineQuantizationConfig, StableDiffusionPipeline
from test_diffusers_gguf import MODELS, output
from test_video_vaes import floats_of, wan
from tiny_diffusers import noise
from transformers import CLIPTextConfig, CLIPTextModel

import halfbyte as hb
from halfbyte.errors import ArgumentError

STEP, PROMPT = torch.tensor(3), torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", params=["float", "int8"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A quantized UNet, and diffusers' layers with the same weights."""
    small = hb.optimize_(hb.quantize_(tiny_diffusers.unet(), hb.Config("q8_0", compute=request.param)))
    return small, floats_of(small)


def distance(found: Tensor, want: Tensor) -> float:
    return float((found.float() - want.float()).norm() / want.float().norm())


def test_dtypes_that_are_mixed(pair: tuple[Any, Any]) -> None:
    small, floats = pair
    # bfloat16 rounds each of some 30 layers by 2^-9; int8 activations by 2^-8 of the largest of 32.
    assert distance(noise(small, dtype=torch.bfloat16), noise(floats)) < 0.05  # bfloat16 latents, float32 scales and norms
    with torch.autocast("cpu", torch.bfloat16):
        assert distance(noise(small), noise(floats)) < 0.05
    assert distance(noise(copy.deepcopy(small).half(), dtype=torch.float16), noise(floats)) < 0.05
    with pytest.raises(ArgumentError, match=r"linear takes activations of float32, bfloat16 or float16, got torch\.float64: convert them"):
        noise(small, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):  # torch's norms say it, as they do in float models
        noise(copy.deepcopy(small).bfloat16(), dtype=torch.float32)


@pytest.mark.parametrize("size", [(7, 9), (1, 1), (1, 8)])
def test_odd_latents(pair: tuple[Any, Any], size: tuple[int, int]) -> None:
    small, floats = pair
    for memory_format in (torch.contiguous_format, torch.channels_last):
        latents = torch.randn(2, 4, *size, generator=torch.Generator().manual_seed(5)).contiguous(memory_format=memory_format)
        with torch.no_grad():
            found, want = (model(latents, STEP, PROMPT.expand(2, -1, -1)).sample for model in (small, floats))
        # int8 activations; next to them keys, values and weights of attention are rounded to bfloat16, by 2^-9 each; 1e-5 without.
        assert distance(found, want) < 0.03 + 2**-8


def test_inputs_of_other_widths(pair: tuple[Any, Any]) -> None:
    small, _ = pair
    with pytest.raises(ArgumentError, match=r"a convolution with a weight of 4 input channels takes \[B, 4, H, W\], got \[1, 3, 8, 8\]"):
        small(torch.randn(1, 3, 8, 8), STEP, PROMPT)
    with pytest.raises(ArgumentError, match=r"a weight of shape \[\d+, 32\] takes activations \[\.\.\., 32\], got \[1, 5, 31\]"):
        small(torch.randn(1, 4, 8, 8), STEP, PROMPT[..., 1:])


@pytest.mark.parametrize("name", MODELS)
def test_no_latents_fail_as_in_diffusers(name: str) -> None:
    torch.manual_seed(0)
    model, _, call = MODELS[name]()
    small: Any = hb.optimize_(hb.quantize_(copy.deepcopy(model.eval()), "q8_0"))
    call = {key: value[:0] if isinstance(value, Tensor) and value.dim() and "_ids" not in key else value for key, value in call.items()}
    for one in (model, small):  # heads are split by a view whose -1 an empty tensor leaves open
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            output(one, call)


@torch.no_grad()
@pytest.mark.parametrize("size", [(1, 3, 1, 16, 16), (1, 3, 3, 18, 22), (2, 3, 5, 16, 16)])
def test_videos_of_any_length_and_memory_format(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    small = hb.quantize_(wan().eval(), hb.Config("int8_channel", compute="float"))
    floats: Any = floats_of(small)
    x = torch.randn(size)
    want = floats.encode(x).latent_dist.mode()
    for memory_format in (torch.contiguous_format, torch.channels_last_3d):
        found = small.encode(x.contiguous(memory_format=memory_format)).latent_dist.mode()  # type: ignore[operator,union-attr]
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_text_encoder_stays_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    parts = {"text_encoder": CLIPTextModel(CLIPTextConfig(**settings)), "unet": tiny_diffusers.unet(), "vae": tiny_diffusers.vae()}
    others = dict.fromkeys(("tokenizer", "safety_checker", "feature_extractor"))
    StableDiffusionPipeline(
        **parts, **others, scheduler=DDIMScheduler(steps_offset=1, clip_sample=False), requires_safety_checker=False
    ).save_pretrained(tmp_path / "float")
    config = PipelineQuantizationConfig(quant_mapping={name: hb.HalfbyteConfig("q8_0") for name in ("unet", "vae")})
    pipe: Any = StableDiffusionPipeline.from_pretrained(tmp_path / "float", quantization_config=config, dtype=torch.bfloat16, **others)
    pipe.save_pretrained(tmp_path / "small")
    pipe.set_progress_bar_config(disable=True)
    again: Any = StableDiffusionPipeline.from_pretrained(tmp_path / "small", dtype=torch.bfloat16, **others)
    again.set_progress_bar_config(disable=True)
    pictures = []
    for one in (pipe, again):
        assert not any(isinstance(module, hb.QuantModule) for module in one.text_encoder.modules())
        assert all(any(isinstance(module, hb.QuantModule) for module in part.modules()) for part in (one.unet, one.vae))
        prompt = one.text_encoder(torch.tensor([[1, 2, 3]])).last_hidden_state
        how = {"prompt_embeds": prompt, "negative_prompt_embeds": prompt, "num_inference_steps": 2, "output_type": "pt"}
        pictures.append(one(**how, generator=torch.Generator().manual_seed(0), height=16, width=16).images)
    assert torch.equal(*pictures)
    assert isinstance(pipe.text_encoder, nn.Module)
