"""Models that commands load as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfbyte as hb
from halfbyte.cli.shared.models import load_whole


def test_a_unet_is_loaded_by_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8}
    unet = diffusers.UNet2DModel(**sizes, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
    hb.quantize_(unet, "q8_0").save_pretrained(tmp_path / "unet")
    assert type(load_whole(tmp_path / "unet")).__name__ == "UNet2DModel"
    assert any(isinstance(module, hb.QuantModule) for module in load_whole(tmp_path / "unet").modules())
