"""Tiny models of diffusers with random weights, a pipeline of them, and their tensors under the names that GGUF files have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMPipeline, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from torch import Tensor

import halfbyte as hb
from halfbyte.formats import ggml, ggml_encoding
from halfbyte.io import gguf


def unet(seed: int = 0, width: int = 32) -> UNet2DConditionModel:
    """A UNet with one block with attention."""
    torch.manual_seed(seed)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(width, width),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()


def vae() -> AutoencoderKL:
    """A VAE without attention, which in diffusers takes no empty batch."""
    torch.manual_seed(1)
    kinds = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",), "mid_block_add_attention": False}
    return AutoencoderKL(block_out_channels=(32,), latent_channels=4, norm_num_groups=8, sample_size=8, **kinds).eval()


def pipeline() -> DDPMPipeline:
    """A pipeline of one model, which needs no tokenizer."""
    torch.manual_seed(2)
    kinds = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    model = UNet2DModel(sample_size=8, block_out_channels=(32,), layers_per_block=1, norm_num_groups=8, **kinds)
    return DDPMPipeline(unet=model.eval(), scheduler=DDPMScheduler(clip_sample=False))


@torch.no_grad()
def picture(pipe: Any) -> Tensor:
    """What a pipeline draws from one seed, in two steps."""
    pipe.set_progress_bar_config(disable=True)
    return torch.from_numpy(pipe(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images)


@torch.no_grad()
def noise(model: Any, size: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float32) -> Tensor:
    """What a UNet predicts for two latents."""
    generator = torch.Generator().manual_seed(3)
    latents, prompt = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 4, *size), (2, 5, 32)))
    found: Tensor = model(latents, torch.tensor(3), prompt).sample
    return found


def write_gguf(path: Path, architecture: str, tensors: Mapping[str, Tensor], types: Sequence[str]) -> dict[str, Tensor]:
    """Writes matrices in the types of ggml in turn, other tensors in float32; returns the values that the file holds."""
    kinds, stored, data, following = {}, {}, {}, cycle(types)
    for name, tensor in tensors.items():
        kind = next(following) if tensor.dim() == 2 else "bf16"
        block = ggml.TYPES[ggml.NUMBERS[kind]].weights if kind != "bf16" else 1
        if tensor.dim() != 2 or not name.endswith("weight") or tensor.shape[1] % block:
            kinds[name], data[name], stored[name] = 0, tensor, tensor
        elif kind == "bf16":
            kinds[name], data[name] = 30, tensor.bfloat16()
            stored[name] = data[name].float()
        else:
            kinds[name] = ggml.NUMBERS[kind]
            codes = hb.quantize(tensor, ggml.TYPES[kinds[name]].format)
            data[name], stored[name] = ggml_encoding.encode(ggml.TYPES[kinds[name]], codes), codes.dequantize()
    shapes = {name: (kinds[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = gguf.Writer(path, {"general.architecture": architecture}, shapes)
    for name, tensor in data.items():
        writer.write(name, tensor.contiguous())
    writer.finish()
    return stored


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under other names: each part that `names` has is replaced, in its order."""
    found = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def joined(state: dict[str, Tensor], parts: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Tensors of which some are the rows of several: name -> the names of these."""
    found = dict(state)
    for name, sources in parts.items():
        for key in ("weight", "bias"):
            found[f"{name}.{key}"] = torch.cat([found.pop(f"{source}.{key}") for source in sources])
    return found


def swapped(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Tensors of which some have their halves exchanged: files have shift and scale, diffusers scale and shift."""
    return {name: torch.cat(tensor.chunk(2)[::-1]) if name.startswith(names) else tensor for name, tensor in state.items()}
