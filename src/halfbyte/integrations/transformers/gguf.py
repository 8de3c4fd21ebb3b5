"""GGUF files as models of transformers, ready to generate; docs/engineering/other-files.md names the architectures."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import nn

from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.gguf.model import read_file
from halfbyte.checkpoint.loading import fill
from halfbyte.checkpoint.planned_model import PlannedModel, without_calibration
from halfbyte.checkpoint.sharded_loading import Sharding, device_of
from halfbyte.checkpoint.sources import open_floats
from halfbyte.errors import ArgumentError, CheckpointError, model_path, not_there
from halfbyte.formats.spec import Format
from halfbyte.io.files import is_folder, is_there
from halfbyte.io.gguf import read_header
from halfbyte.nn.config import Config, as_config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase


def load_gguf(
    path: str | PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    format: Config | Format | str | None = None,
    mesh: DeviceMesh | None = None,
    half_scales: bool = False,
) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    """Load a model and its tokenizer from a GGUF file, with the codes and scales of the file.

    The tokenizer is one of transformers, or None where the file has none.

    Args:
        path: The file.
        device: As for `load`.
        dtype: Of the model's computation; by default that of the file's unquantized matrices, or else float32.
        format: To which a floating-point file is quantized; see `load`.
        mesh: Of processes that share the model; see `load`.
        half_scales: Round scales and offsets to float16 where they would be float32, as those of K-quants: by at most 2^-11 of each. That
            takes less memory and time (docs/engineering/other-files.md); the command line does it.

    Returns:
        (model, tokenizer); the tokenizer is one of transformers, or None where the file has none.

    Raises:
        CheckpointError: The file is damaged, truncated, or holds a model of an unsupported architecture.

    Example:
        >>> hb.load_gguf(folder / "missing.gguf")
        Traceback (most recent call last):
        ...
        halfbyte.errors.CheckpointError: ...
    """
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentError(f"a model computes in float32, bfloat16 or float16, got {dtype!r}: pass dtype=torch.bfloat16")
    source = model_path(path)
    if not is_there(source):
        raise not_there(source, "a .gguf file")
    if is_folder(source):
        raise CheckpointError(f"{source} is a folder, load_gguf opens a .gguf file: name the file, or open the folder by load")
    sharding = None if mesh is None else Sharding(mesh)
    if format is None:
        stored = PlannedModel(source, *read_file(read_header(source), dtype, half_scales=half_scales))
    else:
        stored = PlannedModel(source, *open_floats(source, dtype), without_calibration(as_config(format)))
    model = fill(stored, device_of(mesh, device), sharding=sharding)
    return model, gguf_tokenizer.load(source)
