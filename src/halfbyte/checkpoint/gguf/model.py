"""A GGUF file as a model: its tensors as `Entries` by transformers' names, its metadata as a config.json.

`names.py` says which tensors of the file are which of the model, `orders.py` in which order their rows are, `config.py` reads the metadata.
Most tensors are one in the file and one in the model. The others are stacks of experts and joined matrices, which transformers has as one
tensor and the file as several; keys and values of latent attention; stacks outside of layers, several tensors in transformers; and
parameters that are lists in the metadata. Codes stay codes wherever one format holds them in the model's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, Entry, Quantized, dequantize_weight
from halfbyte.checkpoint.gguf.config import mtp_layers, to_config
from halfbyte.checkpoint.gguf.names import Architecture, architecture_of_file, is_depthwise_kernel, is_ignorable, layer_of
from halfbyte.decoder.family import SHARED_KV_LAYERS, Config
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.formats.sharding import input_unit, take
from halfbyte.io import gguf
from halfbyte.io.tensors import TensorSpec

_MXFP4 = "GGUF mxfp4"  # as `Quantized.stored_as` has it
_LATENTS = ("attn_k_b.weight", "attn_v_b.weight")  # of files that have keys and values from latents as two tensors
_HALVES = (torch.bfloat16, torch.float16)


def read_file(file: gguf.File, dtype: torch.dtype | None = None, *, half_scales: bool = False) -> tuple[dict[str, Any], Entries]:
    """Return config.json and the tensors of a GGUF file whose header has been read; no data are read.

    Args:
        file: The header.
        dtype: Of the model's computation; None: that of the file's unquantized matrices, or else float32.
        half_scales: Whether scales that are float32 otherwise are rounded to float16.

    Raises:
        CheckpointError: The file holds no model that halfbyte knows, or tensors that it does not have.
    """
    file = replace(file, entries={name: replace(entry, half=half_scales) for name, entry in file.entries.items()})
    config = to_config(file.metadata, list(file.entries), partial(_read_vector, file))
    halves = [e.spec.dtype for e in file.entries.values() if e.blocks is None and len(e.shape) > 1 and e.spec.dtype in _HALVES]
    dtype = dtype or next(iter(halves), torch.float32)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if mtp_layers(file.metadata):
        layers = config["num_hidden_layers"]
        file = replace(file, entries={name: entry for name, entry in file.entries.items() if layer_of(name) < layers})
    return config, _FileReader(file, architecture_of_file(file.metadata), config, dtype).read_entries()


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file and its factor, which nvfp4 has: one number, or one for each expert."""

    entry: gguf.Entry
    factor: gguf.Entry | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.entry.place.spec.nbytes

    @property
    def quantized(self) -> Quantized | None:
        if (blocks := self.entry.blocks) is None:
            return None
        fmt = blocks.format if self.factor is None else blocks.format.with_scale(torch.float32)
        return Quantized(fmt, f"GGUF {blocks.name}")

    def read(self) -> Codes | Tensor:
        """Read the codes, or the numbers of a tensor that is not quantized, times the factor."""
        from halfbyte.kernels.cpu.quantize.extract import extract

        value = gguf.read(self.entry, extract)
        if self.factor is None:
            return value
        factor = _read_numbers(self.factor).float().reshape(-1, *(1 for _ in self.entry.shape[1:]))
        if isinstance(value, Tensor):
            return value.float() * factor
        assert self.quantized is not None
        tensors = {name: part if name == "data" else part.float() * factor for name, part in value.tensors().items()}
        return Codes.from_tensors(self.quantized.format, value.shape, tensors)


class _FileReader:
    """Builds the entries of a file.

    Args:
        file: The header.
        architecture: Of its model.
        config: config.json of the model.
        dtype: Of weights that are quantized in the file, when they are read in floating point.
    """

    def __init__(self, file: gguf.File, architecture: Architecture, config: Config, dtype: torch.dtype) -> None:
        self._file, self._architecture, self._config, self._dtype = file, architecture, config, dtype

    def read_entries(self) -> Entries:
        """Return the entries of all tensors of the model that the file has, and notes for the report."""
        architecture, names = self._architecture, self._file.entries
        stacks, notes = self._stacks()
        if architecture.gguf.note:
            notes.append(architecture.gguf.note)
        entries = stacks | self._metadata_parameters() | self._latent_projections() | self._outer_matrices()
        # Layers that reuse keys and values of earlier ones may have unused ones of their own in the file.
        sharing = self._config["num_hidden_layers"] - (self._config.get(SHARED_KV_LAYERS, 0) if architecture.family.kv_sharing else 0)
        factors = {_factor_name(name) for name in names if name.endswith(".weight")}
        for name in names:
            if architecture.is_in_stack(name) or name.endswith(_LATENTS) or name in architecture.gguf.stacks:
                continue
            if layer_of(name) >= sharing and (".attn_k" in name or ".attn_v." in name):
                continue
            if (target := architecture.to_transformers(name)) is not None:
                entries[target] = self._single(name, target)
            elif not is_ignorable(name) and name not in factors:
                raise CheckpointError(f"{self._file.path} has {short(name)}, which {architecture.model} does not have: use its safetensors")
        return Entries(entries, notes)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {what}: the file is damaged")

    def _tensor(self, name: str) -> _Tensor:
        """Return a tensor with its factor, if the file has one that is not a parameter of the model."""
        entry = self._file.entries[name]
        factor = self._file.entries.get(_factor_name(name))
        if factor is None or not name.endswith(".weight") or self._architecture.to_transformers(_factor_name(name)) is not None:
            return _Tensor(entry)
        if factor.blocks is not None or math.prod(factor.shape) not in (1, entry.shape[0] if len(entry.shape) > 2 else 1):
            raise self._damaged(f"the scale of {name} is neither a number nor one for each expert")
        return _Tensor(entry, factor)

    def _in_order(self, name: str, value: Codes | Tensor) -> Codes | Tensor:
        """Return the value of a tensor, by llama.cpp's name, with its rows in transformers' order; of ssm_out the columns, whose inputs are
        what other tensors have as rows."""
        columns, shape = name.endswith("ssm_out.weight"), tuple(value.shape)
        rows = self._architecture.row_order(name, self._config, shape[-1 if columns else 0] if shape else 0)
        if rows is None:
            return value
        order = rows.argsort()  # the place in the file of each row of transformers' tensor
        if not columns:
            return value.select(order) if isinstance(value, Codes) else value[order]
        if isinstance(value, Tensor):
            return value[:, order]
        unit = input_unit(value.format)
        starts = order[::unit].tolist()
        if not torch.equal(order, torch.tensor([start + i for start in starts for i in range(unit)], device="cpu")):
            raise CheckpointError(f"the file has {value.format} codes, whose columns are not reordered within a block: use its safetensors")
        return take(value, -1, tuple((start, start + unit) for start in starts))

    # Tensors that are one in the file, called `name`, and one in the model, called `target`

    def _single(self, name: str, target: str) -> Entry:
        architecture, tensor = self._architecture, _Tensor(self._file.entries[name])
        entry, shape = tensor.entry, _shape_in_model(architecture, name, target, tensor.entry.shape)
        if architecture.gguf.inputs_first and len(shape) == 2 and entry.blocks is None and layer_of(name) >= 0:
            return Entry(TensorSpec(entry.spec.dtype, shape[::-1]), tensor.nbytes, lambda dtype: _cast(_read_numbers(entry).T, dtype))
        tensor, change = self._tensor(name), architecture.value_conversion(name)

        def read(dtype: torch.dtype | None) -> Codes | Tensor:
            value = self._in_order(name, tensor.read().reshape(shape))
            if isinstance(value, Codes):
                return value
            return _cast(value if change is None else change(value.float()), dtype)

        spec = TensorSpec(self._dtype, shape) if entry.blocks else replace(entry.spec, shape=shape)
        return Entry(spec, tensor.nbytes, read, tensor.quantized)

    # Stacks of experts [E, N, K] and joined matrices [N, K], whose parts are tensors of the file with rows of their own

    def _stacks(self) -> tuple[dict[str, Entry], list[str]]:
        """Return the entries of stacks and joined matrices, and notes for the report."""
        entries: dict[str, Entry] = {}
        mixed: list[str] = []
        for name, first in self._file.entries.items():
            if (stack := self._architecture.stack_of(name)) is None or stack.parts[0] != name:
                continue
            tensors = [self._tensor(part) for part in stack.parts if part in self._file.entries]
            parts = [tensor.entry for tensor in tensors]
            dimensions, what = (3, "stacks of experts") if ".experts." in stack.target else (2, "matrices")
            sizes = {(len(part.shape), *part.shape[:-2], *part.shape[-1:]) for part in parts}  # all but N
            if len(parts) < len(stack.parts) or sizes != {(dimensions, *first.shape[:-2], first.shape[-1])}:
                shapes = ", ".join(str(list(part.shape)) for part in parts)
                raise self._damaged(f"{' and '.join(stack.parts)} are {shapes}, not matching {what}")
            if self._architecture.inputs_first_experts:
                entries |= self._inputs_first_stack(stack.target, stack.parts, tensors)
                continue
            entries[stack.target] = entry = self._joined(name, tensors)
            if entry.quantized is None and any(part.blocks for part in parts):
                mixed.append(f"{stack.target} ({', '.join(gguf.kind_name(part.kind) for part in parts)})")
        return entries, [f"dequantized because their parts have several types: {', '.join(mixed)}"] if mixed else []

    def _joined(self, name: str, tensors: Sequence[_Tensor]) -> Entry:
        """Return the entry of parts [..., N1, K], [..., N2, K], concatenated along N: codes if all have one format. `name`: the first's."""
        parts = [tensor.entry for tensor in tensors]
        same_kind = len({part.kind for part in parts}) == 1 and len({tensor.quantized for tensor in tensors}) == 1
        quantized = tensors[0].quantized if same_kind else None

        def read(dtype: torch.dtype | None) -> Codes | Tensor:
            values = [tensor.read() for tensor in tensors]
            codes = [value for value in values if isinstance(value, Codes)]
            if quantized is not None and len(codes) == len(values):
                return self._in_order(name, Codes.joined(codes, partial(torch.cat, dim=-2)))
            floats = [
                dequantize_weight(value, dtype or torch.float32) if isinstance(value, Codes) else _cast(value, dtype) for value in values
            ]
            return self._in_order(name, torch.cat(floats, dim=-2))

        first = parts[0]
        shape = (*first.shape[:-2], sum(part.shape[-2] for part in parts), first.shape[-1])
        spec = TensorSpec(self._dtype if any(part.blocks for part in parts) else first.spec.dtype, shape)
        return Entry(spec, sum(tensor.nbytes for tensor in tensors), read, quantized)

    def _inputs_first_stack(self, target: str, names: Sequence[str], tensors: Sequence[_Tensor]) -> dict[str, Entry]:
        """Return a stack and its biases as gpt-oss has them in transformers, from parts [E, N, K] and [E, N] of the file called `names`.

        With P parts they are [E, K, P N] and [E, P N], and the rows of the parts (gate and up) are interleaved.
        """
        parts = [tensor.entry for tensor in tensors]
        found = [self._file.entries.get(f"{name.removesuffix('weight')}bias") for name in names]
        biases = [bias for bias, part in zip(found, parts, strict=True) if bias and not bias.blocks and bias.shape == part.shape[:2]]
        if len(biases) < len(parts) or len({part.shape for part in parts}) > 1:
            raise self._damaged(f"{' and '.join(names)} have no matching biases, or different shapes")
        (experts, n, k), count = parts[0].shape, len(parts)
        first, same_format = tensors[0].quantized, len({tensor.quantized for tensor in tensors}) == 1
        quantized = replace(first, transposed=True, from_floats=first.stored_as == _MXFP4) if first is not None and same_format else None

        def read(dtype: torch.dtype | None) -> Codes | Tensor:
            values = [tensor.read() for tensor in tensors]
            if quantized is not None:
                codes = [value for value in values if isinstance(value, Codes)]
                return Codes.joined(codes, lambda parts: torch.stack(parts, dim=2).flatten(1, 2))
            out = torch.empty(experts, k, n * count, dtype=dtype or self._dtype, device="cpu")
            for i in range(experts):
                for j, value in enumerate(values):
                    out[i, :, j::count] = (value[i] if isinstance(value, Tensor) else dequantize_weight(value.select(i), out.dtype)).T
            return out

        def read_biases(dtype: torch.dtype | None) -> Tensor:
            return torch.stack([_read_numbers(bias) for bias in biases], dim=-1).flatten(1).to(dtype or self._dtype)

        stored_as = next((tensor.quantized.stored_as for tensor in tensors if tensor.quantized is not None), None)
        spec, bias_spec = TensorSpec(self._dtype, (experts, k, n * count)), TensorSpec(self._dtype, (experts, n * count))
        nbytes, bias_bytes = sum(tensor.nbytes for tensor in tensors), sum(bias.place.spec.nbytes for bias in biases)
        return {
            target: Entry(spec, nbytes, read, quantized, None if quantized else stored_as),
            f"{target}_bias": Entry(bias_spec, bias_bytes, read_biases),
        }

    # Other tensors

    def _latent_projections(self) -> dict[str, Entry]:
        """Return `kv_b_proj` [heads * (key + value), rank] of latent attention, of files that have it as keys [heads, rank, key] and values
        [heads, value, rank]. No format of codes holds both, so that they are read as floats."""
        entries, config = {}, self._config
        for name, keys_entry in self._file.entries.items():
            if not name.endswith(_LATENTS[0]):
                continue
            values_entry = self._file.entries.get(name.replace(*_LATENTS))
            heads, key, value = config["num_attention_heads"], config.get("qk_nope_head_dim", 0), config.get("v_head_dim", 0)
            rank = config.get("kv_lora_rank", 0)
            if values_entry is None or keys_entry.shape != (heads, rank, key) or values_entry.shape != (heads, value, rank):
                raise self._damaged(f"{name} and its values are not {heads} heads of latent attention")
            tensors = _Tensor(keys_entry), _Tensor(values_entry)
            spec, nbytes = TensorSpec(self._dtype, (heads * (key + value), rank)), sum(tensor.nbytes for tensor in tensors)
            stored_as = f"GGUF {keys_entry.blocks.name}" if keys_entry.blocks else None
            read = partial(_read_latents, *tensors, self._dtype)
            entries[f"model.layers.{layer_of(name)}.self_attn.kv_b_proj.weight"] = Entry(spec, nbytes, read, None, stored_as)
        return entries

    def _outer_matrices(self) -> dict[str, Entry]:
        """Return the matrices of stacks [count, width, width] outside of layers, which are modules of their own in transformers."""
        entries, width = {}, self._config["hidden_size"]
        for name, target in self._architecture.gguf.stacks.items():
            if (stack := self._file.entries.get(name)) is None:
                continue
            if stack.shape[1:] != (width, width):
                raise self._damaged(f"{name} is {list(stack.shape)}, not matrices of {width} inputs")
            tensor, spec = _Tensor(stack), TensorSpec(self._dtype if stack.blocks else stack.spec.dtype, (width, width))
            for i in range(stack.shape[0]):
                read = partial(_read_one, tensor, i)
                entries[f"{target}.{i}.weight"] = Entry(spec, tensor.nbytes // stack.shape[0], read, tensor.quantized)
        return entries

    def _metadata_parameters(self) -> dict[str, Entry]:
        """Return the parameters of layers that are lists in the metadata, with a number for each layer."""
        entries, layers = {}, self._config["num_hidden_layers"]
        for key, (target, shape) in self._architecture.gguf.lists.items():
            numbers = self._file.metadata.get(key)
            if not isinstance(numbers, Sequence) or len(numbers) != layers or not all(type(n) is float for n in numbers):
                raise CheckpointError(f"{self._file.path} says {short(numbers)} for {key}, a number for each layer: the file is damaged")
            for layer, number in enumerate(numbers):
                tensor = torch.full(shape, number, device="cpu")
                name = f"{self._architecture.gguf.layers}.{layer}.{target}"
                entries[name] = Entry(TensorSpec(tensor.dtype, shape), 4, partial(_cast, tensor))
        return entries


def _factor_name(name: str) -> str:
    """Return the name of the factor of a weight."""
    return f"{name.removesuffix('weight')}scale"


def _shape_in_model(architecture: Architecture, name: str, target: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of transformers' tensor for a tensor of the file with this shape; the elements are the same."""
    if architecture.expert_keys and name.endswith("shexp.weight") and len(shape) == 1:  # the gate of the shared expert: a matrix of one row
        return (1, *shape)
    if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):  # in some files of two dimensions
        return (math.prod(shape),)
    if "moe_statics" in target:
        return (1, *shape)
    if is_depthwise_kernel(name) and len(shape) == 2:
        return (shape[0], 1, shape[1])
    return shape


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype or tensor.dtype)


def _read_numbers(entry: gguf.Entry) -> Tensor:
    """Read a tensor that is not quantized."""
    value = gguf.read(entry)
    assert isinstance(value, Tensor)
    return value


def _read_vector(file: gguf.File, name: str) -> Tensor:
    """Read a tensor of one dimension for `to_config`."""
    if file.entries[name].blocks is not None or len(file.entries[name].shape) != 1:
        raise CheckpointError(f"{file.path}: {name} is not a list of numbers: the file is damaged")
    return _read_numbers(file.entries[name])


def _read_latents(keys: _Tensor, values: _Tensor, file_dtype: torch.dtype, dtype: torch.dtype | None) -> Tensor:
    """Read kv_b_proj in `dtype`, by default `file_dtype`, in which codes are dequantized."""
    parts = [dequantize_weight(part, file_dtype) if isinstance(part, Codes) else part for part in (keys.read(), values.read())]
    return torch.cat([parts[0].mT, parts[1]], dim=1).flatten(0, 1).to(dtype or file_dtype)


def _read_one(stack: _Tensor, index: int, dtype: torch.dtype | None) -> Codes | Tensor:
    """Read one matrix of a stack."""
    value = stack.read()
    return value.select(index) if isinstance(value, Codes) else _cast(value[index], dtype)
