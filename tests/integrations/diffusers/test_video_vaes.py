"""Video VAEs of diffusers, whose causal convolutions are subclasses of torch's: quantized, each with its own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers import AutoencoderKLCogVideoX, AutoencoderKLQwenImage, AutoencoderKLWan

import halfbyte as hb
from halfbyte.nn.dequantized import dequantize_

VAES, SIZES = "diffusers.models.autoencoders.autoencoder_kl_", (16, 8, 3)
# Class -> its module, the arguments of its constructor, and of its call after the input. Not all versions have all of them.
CLASSES: dict[str, tuple[str, tuple[object, ...], dict[str, Any]]] = {
    "WanCausalConv3d": (f"{VAES}wan", (*SIZES, 1, 1), {}),
    "QwenImageCausalConv3d": (f"{VAES}qwenimage", (*SIZES, 1, 1), {"cache_x": torch.ones(1, 16, 2, 6, 6)}),
    "QwenImage21CausalConv3d": (f"{VAES}qwenimage21", (*SIZES, 1, 1), {}),
    "EasyAnimateCausalConv3d": (f"{VAES}magvit", SIZES, {}),
    "CosmosCausalConv3d": (f"{VAES}cosmos", SIZES, {}),
    "CogVideoXSafeConv3d": (f"{VAES}cogvideox", SIZES, {}),
    "KVAESafeConv3d": (f"{VAES}kvae_video", SIZES, {"write_to": torch.empty(1, 8, 1, 4, 4)}),
    "Kandinsky6SRSafeConv3d": ("diffusers.models.autoencoders.autoencoder_kandinsky6_sr", SIZES, {}),
    "Kandinsky6SRLatentUpscalerConv3d": ("diffusers.models.latent_upscaler.latent_upscaler_kandinsky6_sr", SIZES, {}),
}


def class_named(name: str, module: str) -> type[nn.Module]:
    found = getattr(pytest.importorskip(module, reason="not in this version"), name, None)
    if found is None:
        pytest.skip("not in this version")
    return found  # type: ignore[no-any-return]


def floats_of(small: nn.Module) -> nn.Module:
    """The model with diffusers' own convolutions and the dequantized weights."""
    floats = copy.deepcopy(small)
    dequantize_(floats)
    return floats


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_each_class(name: str, dtype: torch.dtype) -> None:
    module, sizes, settings = CLASSES[name]
    torch.manual_seed(0)
    model = nn.Sequential(class_named(name, module)(*sizes)).to(dtype)
    small: Any = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", compute="float"))
    floats: Any = floats_of(small)
    assert isinstance(small[0], hb.QuantModule)
    assert type(floats[0]) is type(model[0])
    x = torch.randn(1, 16, 1 if "Image21" in name else 3, 6, 6).to(dtype)
    settings = {key: value.to(dtype) for key, value in settings.items()}
    for _ in range(2):  # the second call with what the first one kept, where it keeps frames
        found, want, exact = (one[0](x, **copy.deepcopy(settings)).float() for one in (small, floats, model))
        assert found.shape == want.shape
        # Sums of 432 products in float32 in another order, or one rounding to bfloat16 each.
        tolerance = 1e-4 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
        assert float((found - exact).norm() / exact.norm()) < 0.02  # 8 bits


def test_one_that_reads_its_weight_stays_float() -> None:
    kind = class_named("MiniMaxH3VideoCausalConv3d", f"{VAES}minimax_h3")
    model: Any = hb.quantize_(nn.Sequential(kind(*SIZES), nn.Conv3d(16, 8, 1)), "int8_channel")
    assert type(model[0]) is kind
    assert "MiniMaxH3VideoCausalConv3d has a forward of its own, which reads its weight" in str(hb.report(model))


def wan() -> Any:
    return AutoencoderKLWan(
        base_dim=16, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )


def qwen() -> Any:
    return AutoencoderKLQwenImage(
        base_dim=16, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )


def cog() -> Any:
    down, up = ("CogVideoXDownBlock3D",) * 2, ("CogVideoXUpBlock3D",) * 2
    sizes = {"block_out_channels": (32, 32), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 8}
    return AutoencoderKLCogVideoX(down_block_types=down, up_block_types=up, sample_height=16, sample_width=16, **sizes)


@torch.no_grad()
@pytest.mark.parametrize("build", [wan, qwen, cog])
def test_a_whole_vae(build: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(1, 3, 5, 16, 16)
    small: Any = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", compute="float"))
    left = [row for row in hb.report(small).kept if row.kind.endswith("Conv3d")]
    assert not left
    floats: Any = floats_of(small)

    def through(vae: Any) -> tuple[Tensor, Tensor]:
        latent = vae.encode(x).latent_dist.mode()
        return latent, vae.decode(latent).sample

    for found, want, exact in zip(through(small), through(floats), through(model), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)  # some ten layers one after the other
        assert float((found - exact).norm() / exact.norm()) < 0.1
    small.save_pretrained(tmp_path / "small")
    model.save_pretrained(tmp_path / "float")
    again = type(model).from_pretrained(tmp_path / "small")
    while_loading = type(model).from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig("int8_channel", compute="float"))
    for other in (again, while_loading):
        assert all(torch.equal(*pair) for pair in zip(through(other), through(small), strict=True))
