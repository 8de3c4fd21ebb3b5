"""diffusers: a model and a pipeline are quantized while they load, saved, offloaded, compiled; a GGUF file is read; LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_diffusers
import torch
from diffusers import AutoencoderKLWan, DDPMPipeline, PipelineQuantizationConfig, QwenImageTransformer2DModel, UNet2DConditionModel
from peft import LoraConfig
from tiny_diffusers import noise, picture

import halfbyte as hb


@pytest.mark.parametrize("fmt", ["q4_0", "int8_channel"])
def test_a_model_is_quantized_saved_and_loaded(fmt: str, tmp_path: Path) -> None:
    tiny_diffusers.unet().save_pretrained(tmp_path / "float")
    how = {"torch_dtype": torch.bfloat16, "device_map": "cpu"}
    model = UNet2DConditionModel.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(fmt), **how)
    model.save_pretrained(tmp_path / "small")
    again = UNet2DConditionModel.from_pretrained(tmp_path / "small", **how)
    assert torch.equal(noise(again, dtype=torch.bfloat16), noise(model, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_offloaded(kind: str) -> None:
    model = hb.quantize_(tiny_diffusers.unet(), hb.Config("q8_0", compute="float"))
    want = noise(model)
    cpu, blocks = torch.device("cpu"), {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=kind, **blocks)
    assert torch.equal(noise(model), want)


def test_adapted_and_compiled() -> None:
    model = hb.quantize_(tiny_diffusers.unet(), hb.Config("q8_0", compute="float"))
    want = noise(model)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))  # B begins with zeros
    torch.testing.assert_close(noise(model), want, rtol=0, atol=0)
    model.fuse_lora()
    model.unload_lora()
    torch.testing.assert_close(noise(model), want, rtol=1e-2, atol=1e-2)  # merged weights are rounded again
    want = noise(model)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert torch.equal(noise(model), want)


def test_pipelines(tmp_path: Path) -> None:
    tiny_diffusers.pipeline().save_pretrained(tmp_path / "float")
    settings = PipelineQuantizationConfig(quant_backend="halfbyte", quant_kwargs={"format": "q8_0"})
    pipe = DDPMPipeline.from_pretrained(tmp_path / "float", quantization_config=settings)
    pipe.enable_model_cpu_offload(device="cpu")
    want = picture(pipe)
    pipe.save_pretrained(tmp_path / "small")
    assert torch.equal(picture(DDPMPipeline.from_pretrained(tmp_path / "small")), want)


def test_a_gguf_file(tmp_path: Path) -> None:
    sizes = {"in_channels": 16, "out_channels": 4, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 32}
    model = QwenImageTransformer2DModel(patch_size=2, num_layers=1, axes_dims_rope=(8, 12, 12), **sizes)
    model.save_config(tmp_path)
    stored = tiny_diffusers.write_gguf(tmp_path / "m.gguf", "qwen_image", model.state_dict(), ["q8_0", "q4_0", "iq4_nl", "bf16"])
    how = {"config": str(tmp_path), "quantization_config": hb.HalfbyteConfig()}
    quantized = QwenImageTransformer2DModel.from_single_file(str(tmp_path / "m.gguf"), **how)
    layers = {name: module for name, module in quantized.named_modules() if isinstance(module, hb.QuantLinear)}
    assert len(layers) > 10
    assert all(torch.equal(module.weight.clone(), stored[f"{name}.weight"]) for name, module in layers.items())


@torch.no_grad()
def test_causal_convolutions() -> None:
    sizes = {"base_dim": 16, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]}
    vae = AutoencoderKLWan(**sizes, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).eval()
    video = torch.randn(1, 3, 5, 16, 16)
    want = vae.decode(vae.encode(video).latent_dist.mode()).sample
    hb.quantize_(vae, hb.Config("int8_channel", compute="float"))
    assert not [row for row in hb.report(vae).kept if row.kind.endswith("Conv3d")]
    found = vae.decode(vae.encode(video).latent_dist.mode()).sample
    assert (found - want).norm() < 0.05 * want.norm()


def test_fused_and_with_a_low_rank_branch(tmp_path: Path) -> None:
    model = tiny_diffusers.unet()
    want = noise(model)
    hb.optimize_(hb.quantize_(model, hb.Config("q8_0", compute="float")))
    assert "computed together: to_q+to_k+to_v" in str(hb.report(model))
    assert (noise(model) - want).norm() < 0.05 * want.norm()
    small = hb.quantize_(tiny_diffusers.unet(), hb.Config("int4_g32", low_rank=8, compute="int8"))
    small.save_pretrained(tmp_path)
    assert torch.equal(noise(UNet2DConditionModel.from_pretrained(tmp_path)), noise(small))


def test_an_adapter_of_convolutions() -> None:
    model = hb.quantize_(tiny_diffusers.unet(), hb.Config("q8_0", compute="float"))
    want = noise(model)
    model.add_adapter(LoraConfig(r=2, target_modules=["conv1"]))  # B begins with zeros
    torch.testing.assert_close(noise(model), want, rtol=0, atol=0)
    model.fuse_lora()
    model.unload_lora()
    torch.testing.assert_close(noise(model), want, rtol=1e-2, atol=1e-2)
