"""GGUF files as models of transformers, ready to generate: llama, mistral, qwen2, qwen3, phi3, gemma, gemma2, gemma3."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.checkpoint import gguf_tokenizer
from halfbyte.checkpoint.gguf_model import open_gguf
from halfbyte.checkpoint.loading import fill


def load_gguf(path: str | PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    """(model, tokenizer) from a GGUF file, with the codes and scales that are in it.

    dtype  that the model computes in; without one that of the file's matrices which are not quantized, or else float32

    The tokenizer is one of transformers, or None where the file has none. Raises CheckpointError for a file that is damaged, cut short,
    or holds a model of another architecture.
    """
    source = Path(path)
    model = fill(open_gguf(source, dtype), device)
    tokenizer = gguf_tokenizer.load(source)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and tokenizer is not None:
        for key in ("bos", "eos", "pad"):
            if (token := getattr(tokenizer, f"{key}_token_id", None)) is not None:
                setattr(generation, f"{key}_token_id", token)
    return model, tokenizer
