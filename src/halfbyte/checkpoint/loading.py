"""A checkpoint on disk to a model in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.checkpoint.architecture import load_generation_config, skeleton
from halfbyte.checkpoint.folder import complete
from halfbyte.checkpoint.manifest import Manifest, Weight, dtype_named, read_manifest
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.codes import Codes
from halfbyte.io.safetensors import Reader
from halfbyte.io.tensors import checksum
from halfbyte.layouts.base import Packed
from halfbyte.nn.convert import candidates, own_tensors
from halfbyte.nn.modules import QuantModule, kind_of, quantized_form
from halfbyte.nn.report import Report, Row


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: every name, shape and dtype in it has been checked, no tensor has been read.

    config  config.json without the section
    """

    folder: Path
    config: dict[str, Any]
    manifest: Manifest
    reader: Reader

    def plain(self, name: str) -> Tensor:
        """A tensor that is not quantized."""
        return self._read(name, self.manifest.plain[name])

    def _read(self, name: str, crc32: int) -> Tensor:
        tensor = self.reader.read(name)
        if checksum(tensor) != crc32:
            path = self.reader.places[name].path
            raise CheckpointError(f"{path}: the bytes of {name} are not those that were written: the file is damaged")
        return tensor

    def codes(self, name: str) -> Codes:
        """A quantized weight."""
        weight = self.manifest.weights[name]
        try:
            parts = {part: self._read(f"{name}.{part}", crc32) for part, crc32 in weight.crc32.items()}
            codes = Codes.from_tensors(weight.format, weight.shape, parts)
            codes.check_values()
        except FormatError as e:
            raise CheckpointError(f"{self.folder}: {name}: {e}") from e
        return codes

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Of all weights and plain tensors."""
        yield from (weight.shape for weight in self.manifest.weights.values())
        yield from (self.reader.spec(name).shape for name in self.manifest.plain)

    def names(self) -> Iterator[tuple[str, str]]:
        """(name, the name that it is stored under) of everything, ties included."""
        yield from ((name, name) for name in (*self.manifest.weights, *self.manifest.plain))
        yield from self.manifest.tied.items()


def open_checkpoint(dir: str | PathLike[str]) -> Checkpoint:
    """Reads config.json and the headers of the files, and checks that they fit together."""
    folder = Path(dir)
    config, manifest = read_manifest(folder)
    complete(folder, manifest)
    reader = Reader([folder / name for name in manifest.files])
    parts = {part: spec for name, weight in manifest.weights.items() for part, spec in weight.stored(name).items()}
    if odd := reader.places.keys() ^ (parts.keys() | manifest.plain.keys()):
        raise CheckpointError(f"{folder}: {min(odd)} is in only one of the files and config.json: the checkpoint is damaged")
    for name, spec in parts.items():
        if (got := reader.spec(name)) != spec:
            says = f"config.json makes it {spec.dtype} {list(spec.shape)}"
            raise CheckpointError(f"{folder}: {name} is {got.dtype} {list(got.shape)}, {says}: the checkpoint is damaged")
    return Checkpoint(folder, config, manifest, reader)


def load_tensors(dir: str | PathLike[str]) -> dict[str, Codes | Tensor]:
    """Everything in a checkpoint, by the names of the model's parameters and buffers. Tied names have one and the same value."""
    checkpoint = open_checkpoint(dir)
    tensors: dict[str, Codes | Tensor] = {name: checkpoint.codes(name) for name in checkpoint.manifest.weights}
    tensors |= {name: checkpoint.plain(name) for name in checkpoint.manifest.plain}
    return tensors | {name: tensors[owner] for name, owner in checkpoint.manifest.tied.items()}


def describe(dir: str | PathLike[str]) -> Report:
    """What is in a checkpoint, from its headers alone."""
    checkpoint = open_checkpoint(dir)
    rows = []
    for name, owner in checkpoint.names():
        tied_to = None if owner == name else owner
        if weight := checkpoint.manifest.weights.get(owner):
            name, tied_to = name.removesuffix(".weight"), tied_to and tied_to.removesuffix(".weight")
            before, after = weight.float_bytes, weight.stored_bytes
            row = Row(name, weight.kind, weight.shape, weight.format, None, before, after, weight.error, tied_to)
        else:
            spec = checkpoint.reader.spec(owner)
            row = Row(name, "tensor", spec.shape, None, "stored as it is", spec.nbytes, spec.nbytes, None, tied_to)
        rows.append(row if tied_to is None else replace(row, bytes_before=0, bytes_after=0))
    return Report(tuple(rows))


def load(dir: str | PathLike[str], device: torch.device | str = "cpu", model: nn.Module | None = None) -> nn.Module:
    """The model in the folder `dir`, its weights packed for `device`.

    model   a module of the right architecture, in floating point (on the meta device, if you like) or quantized: it is filled
            in place and returned. Without one, config.json names an architecture of transformers, which is built, and is
            returned in evaluation mode.

    Parameters and buffers that are not quantized take the dtypes of the checkpoint. At no time is there more in memory than
    the model and one tensor. Raises CheckpointError where anything is missing, superfluous, damaged or of another shape;
    a `model` that was passed has not changed then.
    """
    checkpoint = open_checkpoint(dir)
    if model is None:
        model = skeleton(checkpoint.config, _dtype(checkpoint), checkpoint.shapes())
        load_generation_config(model, checkpoint.folder)
    owners = _fit(checkpoint, model)
    packed = {name: ops.pack(checkpoint.codes(name), device) for name in checkpoint.manifest.weights}
    plain = {name: checkpoint.plain(name).to(device) for name in checkpoint.manifest.plain}
    _fill(model, owners, packed, plain, checkpoint.manifest.weights)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model


def _fit(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str]:
    """For each parameter and buffer of the model, the name that it is stored under; raises CheckpointError if one does not fit."""
    weights, folder = checkpoint.manifest.weights, checkpoint.folder
    reasons = {candidate.name: candidate.reason for candidate in candidates(model, without_data=True)}
    owners = dict(checkpoint.names())
    same: dict[int, str] = {}  # tensor of the model -> the name that it is stored under
    places: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        places |= {f"{dot}{name}": tensor for name, tensor in own_tensors(module)}
        if isinstance(module, QuantModule):
            places[f"{dot}weight"] = module.packed_data
        owner = owners.get(f"{dot}weight", "")
        if (weight := weights.get(owner)) is None:
            continue
        if reason := reasons.get(prefix):
            raise CheckpointError(f"{dot}weight of {folder} cannot be loaded into the model's {type(module).__name__}: {reason}")
        fits = (weight.kind,) if owner == f"{dot}weight" else ("Linear", "Embedding")
        if kind_of(module) not in fits or module.weight.shape != weight.shape:
            raise CheckpointError(
                f"{dot}weight is a {weight.kind} {list(weight.shape)} in {folder}, "
                f"in the model {type(module).__name__} {list(module.weight.shape)}: pass the model that was saved"
            )
    for name, owner in owners.items():
        if name not in places:
            raise CheckpointError(f"the model has no place for {name} of {folder}: pass the model that was saved")
        if owner not in weights and (got := checkpoint.reader.spec(owner).shape) != (want := tuple(places[name].shape)):
            raise CheckpointError(f"{name} is {list(got)} in {folder}, {list(want)} in the model: pass the model that was saved")
        same.setdefault(id(places[name]), owner)
    for name, tensor in places.items():
        if name not in owners and id(tensor) not in same:
            raise CheckpointError(f"{folder} has no {name}, which the model has: pass the model that was saved")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in places:
            raise CheckpointError(f"the buffer {name} is in no file and has no data in the model: build its module off the meta device")
    return {name: owners.get(name) or same[id(tensor)] for name, tensor in places.items()}


def _fill(
    model: nn.Module, owners: Mapping[str, str], packed: Mapping[str, Packed], plain: Mapping[str, Tensor], weights: Mapping[str, Weight]
) -> None:
    """Puts everything in its place; `owners` is what `_fit` found."""
    made: dict[int, QuantModule] = {}
    for prefix, module in list(model.named_modules(remove_duplicate=False)):
        owner = owners.get(f"{prefix}.weight", "")
        if weight := weights.get(owner):
            if id(module) not in made:
                settings = (weight.dtype, weight.compute, weight.activation, weight.error)
                made[id(module)] = quantized_form(module, packed[owner], *settings)
            model.set_submodule(prefix, made[id(module)])
    parameters: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, old in list(own_tensors(module)):
            owner = owners[f"{prefix}.{name}" if prefix else name]
            value = plain[owner]
            if isinstance(old, nn.Parameter):
                trainable = old.requires_grad and value.is_floating_point()
                value = parameters.setdefault(owner, nn.Parameter(value, requires_grad=trainable))
            setattr(module, name, value)


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that the model was built in: what config.json says, or else that of its first floating tensor."""
    named = dtype_named(checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype")))
    floats = (spec.dtype for name in checkpoint.manifest.plain if (spec := checkpoint.reader.spec(name)).dtype.is_floating_point)
    return named or next((weight.dtype for weight in checkpoint.manifest.weights.values()), None) or next(floats, torch.float32)
