"""Whole models that commands load: those of transformers, and UNets of diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import nn


def load_whole(path: Path, device: str = "cpu") -> nn.Module:
    """The quantized model in a folder or file, in evaluation mode."""
    from halfbyte.checkpoint.loading import load

    config = path / "config.json"
    if config.is_file() and str(json.loads(config.read_text(encoding="utf-8")).get("_class_name", "")).startswith("UNet"):
        import diffusers

        return cast("nn.Module", diffusers.AutoModel.from_pretrained(str(path)).to(device).eval())
    return load(path, device).eval()
