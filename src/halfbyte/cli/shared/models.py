"""Whole models that commands load: those of transformers, and UNets of diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import nn


def load_whole(path: Path, device: str = "cpu") -> nn.Module:
    """The quantized model in a folder or file, in evaluation mode."""
    from halfbyte.checkpoint.loading import load
    from halfbyte.io.files import is_file
    from halfbyte.io.safetensors import load_json

    config = path / "config.json"
    if is_file(config) and str(load_json(config).get("_class_name", "")).startswith("UNet"):
        import diffusers

        return cast("nn.Module", diffusers.AutoModel.from_pretrained(str(path)).to(device).eval())
    return load(path, device).eval()
