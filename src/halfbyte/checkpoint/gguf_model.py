"""A GGUF file as a model: its tensors by transformers' names, its metadata as a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, Entry, Quantized, floats
from halfbyte.checkpoint.gguf_config import to_config
from halfbyte.checkpoint.gguf_names import Architecture, of_file
from halfbyte.checkpoint.opened import Opened, open_entries
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes, stored_tensors
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
    architecture = of_file(file.metadata)
    halves = [e.spec.dtype for e in file.entries.values() if e.blocks is None and len(e.shape) > 1 and e.spec.dtype in _HALVES]
    dtype = dtype or next(iter(halves), torch.float32)
    config["dtype"] = str(dtype).removeprefix("torch.")
    entries, notes = _stacks(file, architecture, dtype)
    unused: list[str] = []
    for name, entry in file.entries.items():
        if architecture.stack(name) is not None:
            continue
        target = architecture.to_transformers(name)
        if target is None:
            if name not in _IN_CONFIG:
                unused.append(name)
            continue
        rows = architecture.rows(name, config["num_attention_heads"], config["num_key_value_heads"], entry.shape[0] if entry.shape else 0)
        back = None if rows is None else rows.argsort()
        minus = 1.0 if architecture.plus_one and architecture.is_norm(name) else 0.0
        # The gate of the shared expert is a matrix of one row, and in the file a list.
        shape = (1, *entry.shape) if architecture.experts and name.endswith("shexp.weight") and len(entry.shape) == 1 else entry.shape
        spec = Spec(dtype, shape) if entry.blocks else replace(entry.spec, shape=shape)
        entries[target] = Entry(spec, entry.place.spec.nbytes, partial(_read, entry, shape, back, minus), _quantized(entry))
    if unused:
        notes.append(f"left out, for transformers has no use for them: {', '.join(unused[:20])}")
    return open_entries(file.path, config, Entries(entries, notes))


def _quantized(entry: gguf.Entry) -> Quantized | None:
    return None if entry.blocks is None else Quantized(entry.blocks.format, f"GGUF {entry.blocks.name}")


def _stacks(file: gguf.File, architecture: Architecture, dtype: torch.dtype) -> tuple[dict[str, Entry], list[str]]:
    """The stacks of experts, by transformers' names, and what a person should know about them. Those whose parts are of one type keep
    their codes."""
    entries: dict[str, Entry] = {}
    mixed: list[str] = []
    for name, first in file.entries.items():
        if (found := architecture.stack(name)) is None or found[1][0] != name:
            continue
        target, names = found
        parts = [file.entries[each] for each in names if each in file.entries]
        if len(parts) < len(names) or any(len(p.shape) != 3 or p.shape[::2] != first.shape[::2] for p in parts):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise CheckpointError(f"{file.path}: {' and '.join(names)} are {shapes}, no stacks of experts that fit: the file is damaged")
        shape = (first.shape[0], sum(part.shape[1] for part in parts), first.shape[2])
        alike = all(part.kind == first.kind for part in parts)
        quantized = _quantized(first) if alike else None
        spec = Spec(dtype if any(part.blocks for part in parts) else first.spec.dtype, shape)
        if not alike and any(part.blocks for part in parts):
            mixed.append(f"{target} ({', '.join(gguf.kind_name(part.kind) for part in parts)})")
        nbytes = sum(part.place.spec.nbytes for part in parts)
        entries[target] = Entry(spec, nbytes, partial(_read_stack, parts, quantized is not None), quantized)
    return entries, [f"dequantized, for their parts are of several types: {', '.join(mixed)}"] if mixed else []


_HALVES = (torch.bfloat16, torch.float16)


def _plain(file: gguf.File, name: str) -> Tensor:
    if file.entries[name].blocks is not None or len(file.entries[name].shape) != 1:
        raise CheckpointError(f"{file.path}: {name} is not a list of numbers: the file is damaged")
    tensor = gguf.read(file.entries[name])
    assert isinstance(tensor, Tensor)
    return tensor


def _read(entry: gguf.Entry, shape: tuple[int, ...], rows: Tensor | None, minus: float, dtype: torch.dtype | None) -> Codes | Tensor:
    """A tensor with its rows in transformers' order."""
    value = gguf.read(entry)
    if isinstance(value, Codes):
        value = value if value.shape == shape else _reshaped(value, shape)
        return value if rows is None else take_rows(value, rows)
    value = value.reshape(shape)
    if rows is not None:
        value = value[rows]
    if minus:
        value = value.float() - minus
    return value if dtype is None else value.to(dtype)


def _read_stack(parts: Sequence[gguf.Entry], keep: bool, dtype: torch.dtype | None) -> Codes | Tensor:
    """Stacks of experts below each other: [E, N1, K], [E, N2, K] -> [E, N1 + N2, K]; as codes where they are to be kept."""
    values = [gguf.read(part) for part in parts]
    codes = [value for value in values if isinstance(value, Codes)]
    if keep and len(codes) == len(values):
        shape = (codes[0].shape[0], sum(each.shape[1] for each in codes), codes[0].shape[2])
        tensors = {name: torch.cat([each.tensors()[name] for each in codes], dim=1) for name in codes[0].tensors()}
        return Codes.from_tensors(codes[0].format, shape, tensors)
    plain = [floats(value, dtype or torch.float32) if isinstance(value, Codes) else value.to(dtype or value.dtype) for value in values]
    return torch.cat(plain, dim=1)


def _reshaped(codes: Codes, shape: tuple[int, ...]) -> Codes:
    """Codes in a shape with the same last size."""
    stored = stored_tensors(codes.format, shape)
    return Codes.from_tensors(codes.format, shape, {name: tensor.reshape(stored[name][1]) for name, tensor in codes.tensors().items()})


def take_rows(codes: Codes, rows: Tensor) -> Codes:
    """Some rows of codes [N, K], in some order."""
    shape = (len(rows), *codes.shape[1:])
    return Codes.from_tensors(codes.format, shape, {name: tensor[rows.to(tensor.device)] for name, tensor in codes.tensors().items()})
