"""A GGUF file as a model: its tensors by transformers' names, its metadata as a config."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, Entry, Quantized
from halfbyte.checkpoint.gguf_config import to_config
from halfbyte.checkpoint.gguf_names import ARCHITECTURES
from halfbyte.checkpoint.opened import Opened, open_entries
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.io import gguf
from halfbyte.io.tensors import Spec

# Tensors that a config says in its own way.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def open_gguf(path: Path, dtype: torch.dtype | None = None) -> Opened:
    """The model in a GGUF file.

    dtype  that it computes in; without one that of the file's matrices which are not quantized, or else float32
    """
    return open_file(gguf.read_header(path), dtype)


def open_file(file: gguf.File, dtype: torch.dtype | None = None) -> Opened:
    """The model in a GGUF file whose header has been read."""
    if (parts := file.metadata.get("split.count", 0)) not in (0, 1):
        raise CheckpointError(f"{file.path} is one of {parts} files: merge them with llama-gguf-split --merge")
    config = to_config(file.metadata, list(file.entries), partial(_plain, file))
    architecture = ARCHITECTURES[str(file.metadata["general.architecture"])]
    halves = [e.spec.dtype for e in file.entries.values() if e.blocks is None and len(e.shape) > 1 and e.spec.dtype in _HALVES]
    dtype = dtype or next(iter(halves), torch.float32)
    config["dtype"] = str(dtype).removeprefix("torch.")
    entries: dict[str, Entry] = {}
    unused: list[str] = []
    for name, entry in file.entries.items():
        target = architecture.to_transformers(name)
        if target is None:
            if name not in _IN_CONFIG:
                unused.append(name)
            continue
        rows = architecture.rows(name, config["num_attention_heads"], config["num_key_value_heads"], entry.shape[0] if entry.shape else 0)
        back = None if rows is None else rows.argsort()
        minus = 1.0 if architecture.plus_one and architecture.is_norm(name) else 0.0
        quantized = entry.blocks and Quantized(entry.blocks.format, f"GGUF {entry.blocks.name}")
        spec = Spec(dtype, entry.shape) if entry.blocks else entry.spec
        entries[target] = Entry(spec, entry.place.spec.nbytes, partial(_read, entry, back, minus), quantized or None)
    notes = [f"left out, for transformers has no use for them: {', '.join(unused[:20])}"] if unused else []
    return open_entries(file.path, config, Entries(entries, notes))


_HALVES = (torch.bfloat16, torch.float16)


def _plain(file: gguf.File, name: str) -> Tensor:
    if file.entries[name].blocks is not None or len(file.entries[name].shape) != 1:
        raise CheckpointError(f"{file.path}: {name} is not a list of numbers: the file is damaged")
    tensor = gguf.read(file.entries[name])
    assert isinstance(tensor, Tensor)
    return tensor


def _read(entry: gguf.Entry, rows: Tensor | None, minus: float, dtype: torch.dtype | None) -> Codes | Tensor:
    """A tensor with its rows in transformers' order."""
    value = gguf.read(entry)
    if isinstance(value, Codes):
        return value if rows is None else take_rows(value, rows)
    if rows is not None:
        value = value[rows]
    if minus:
        value = value.float() - minus
    return value if dtype is None else value.to(dtype)


def take_rows(codes: Codes, rows: Tensor) -> Codes:
    """Some rows of codes [N, K], in some order."""
    shape = (len(rows), *codes.shape[1:])
    return Codes.from_tensors(codes.format, shape, {name: tensor[rows.to(tensor.device)] for name, tensor in codes.tensors().items()})
