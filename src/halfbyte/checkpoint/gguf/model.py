"""A GGUF file as a model: its tensors by transformers' names, its metadata as a config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
_LATENTS = ("attn_k_b.weight", "attn_v_b.weight")  # projections of latent attention's keys and values, in files that have them apart
_HALVES = (torch.bfloat16, torch.float16)


def read_file(file: gguf.File, dtype: torch.dtype | None = None, *, half: bool = False) -> tuple[dict[str, Any], Entries]:
    """Return config.json and the tensors of a GGUF file whose header has been read; no data are read.

    Args:
        file: The header.
        dtype: Of the model's computation; None: that of the file's unquantized matrices, or else float32.
        half: Whether scales that are float32 otherwise are rounded to float16.

    Raises:
        CheckpointError: The file holds no model that halfbyte knows, or tensors that it does not have.
    """
    file = replace(file, entries={name: replace(entry, half=half) for name, entry in file.entries.items()})
    config = to_config(file.metadata, list(file.entries), partial(_plain, file))
    architecture = architecture_of_file(file.metadata)
    halves = [e.spec.dtype for e in file.entries.values() if e.blocks is None and len(e.shape) > 1 and e.spec.dtype in _HALVES]
    dtype = dtype or next(iter(halves), torch.float32)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if mtp_layers(file.metadata):
        layers = config["num_hidden_layers"]
        file = replace(file, entries={name: entry for name, entry in file.entries.items() if layer_of(name) < layers})
    entries, notes = _stacks(file, architecture, config, dtype)
    if architecture.gguf.note:
        notes.append(architecture.gguf.note)
    entries |= _of_lists(file, architecture, config["num_hidden_layers"]) | _of_latents(file, config, dtype)
    entries |= _of_outer_stacks(file, architecture, config["hidden_size"], dtype)
    # Layers that reuse keys and values of earlier ones may have unused ones of their own in the file.
    sharing = config["num_hidden_layers"] - (config.get(SHARED_KV_LAYERS, 0) if architecture.family.kv_sharing else 0)
    factors = {f"{name.removesuffix('weight')}scale" for name in file.entries if name.endswith(".weight")}
    for name in file.entries:
        if architecture.is_in_stack(name) or name.endswith(_LATENTS) or name in architecture.gguf.stacks:
            continue
        if layer_of(name) >= sharing and (".attn_k" in name or ".attn_v." in name):
            continue
        if (target := architecture.to_transformers(name)) is not None:
            entries[target] = _entry(file, architecture, config, name, target, dtype)
        elif not is_ignorable(name) and name not in factors:
            raise CheckpointError(f"{file.path} has {short(name)}, which {architecture.model} does not have: use its safetensors")
    return config, Entries(entries, notes)


def _entry(file: gguf.File, architecture: Architecture, config: Mapping[str, object], name: str, target: str, dtype: torch.dtype) -> Entry:
    """Return the entry of a tensor that is one tensor both in the file, called `name`, and in the model, called `target`."""
    stored = file.entries[name]
    shape = _shape_in_model(architecture, name, target, stored.shape)
    if architecture.gguf.inputs_first and len(shape) == 2 and stored.blocks is None and layer_of(name) >= 0:
        return Entry(TensorSpec(stored.spec.dtype, shape[::-1]), stored.place.spec.nbytes, partial(_read_transposed, stored))
    spec = TensorSpec(dtype, shape) if stored.blocks else replace(stored.spec, shape=shape)
    tensor = _Tensor(stored, _factor(file, architecture, name))
    order = partial(_order, architecture, config, name, shape)
    read = partial(_read, tensor, shape, order, architecture.change(name))
    return Entry(spec, stored.place.spec.nbytes, read, tensor.quantized)


def _shape_in_model(architecture: Architecture, name: str, target: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of transformers' tensor for a tensor of the file with this shape; the elements are the same."""
    if architecture.experts and name.endswith("shexp.weight") and len(shape) == 1:  # the gate of the shared expert: a matrix of one row
        return (1, *shape)
    if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):  # in some files of two dimensions
        return (math.prod(shape),)
    if "moe_statics" in target:
        return (1, *shape)
    if is_depthwise_kernel(name) and len(shape) == 2:
        return (shape[0], 1, shape[1])
    return shape


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file and its factor, which nvfp4 has: one, or one for each expert."""

    entry: gguf.Entry
    factor: gguf.Entry | None

    @property
    def quantized(self) -> Quantized | None:
        if (blocks := self.entry.blocks) is None:
            return None
        fmt = blocks.format if self.factor is None else blocks.format.with_scale(torch.float32)
        return Quantized(fmt, f"GGUF {blocks.name}")

    def read(self) -> Codes | Tensor:
        from halfbyte.kernels.cpu.quantize.extract import extract

        value = gguf.read(self.entry, extract)
        if self.factor is None:
            return value
        factor = _numbers(self.factor).float().reshape(-1, *(1 for _ in self.entry.shape[1:]))
        if isinstance(value, Tensor):
            return value.float() * factor
        assert self.quantized is not None
        tensors = {name: part if name == "data" else part.float() * factor for name, part in value.tensors().items()}
        return Codes.from_tensors(self.quantized.format, value.shape, tensors)


def _factor(file: gguf.File, architecture: Architecture, name: str) -> gguf.Entry | None:
    """The factor of a tensor, if the file has one that is not a parameter of the model."""
    scale = f"{name.removesuffix('weight')}scale"
    factor = file.entries.get(scale)
    if factor is None or not name.endswith(".weight") or architecture.to_transformers(scale) is not None:
        return None
    shape = file.entries[name].shape
    if factor.blocks is not None or math.prod(factor.shape) not in (1, shape[0] if len(shape) > 2 else 1):
        raise CheckpointError(f"{file.path}: the scale of {name} is neither a number nor one for each expert: the file is damaged")
    return factor


def _stacks(
    file: gguf.File, architecture: Architecture, config: Mapping[str, object], dtype: torch.dtype
) -> tuple[dict[str, Entry], list[str]]:
    """The stacks of experts and joined matrices, by transformers' names, and notes for the report. Those whose parts have one type keep
    their codes."""
    entries: dict[str, Entry] = {}
    mixed: list[str] = []
    for name, first in file.entries.items():
        if (found := architecture.stack(name)) is None or found[1][0] != name:
            continue
        target, names = found
        tensors = [_Tensor(file.entries[each], _factor(file, architecture, each)) for each in names if each in file.entries]
        parts = [tensor.entry for tensor in tensors]
        dimensions, what = (3, "stacks of experts") if ".experts." in target else (2, "matrices")
        others = {(len(part.shape), *part.shape[:-2], *part.shape[-1:]) for part in parts}
        if len(parts) < len(names) or others != {(dimensions, *first.shape[:-2], first.shape[-1])}:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise CheckpointError(f"{file.path}: {' and '.join(names)} are {shapes}, not matching {what}: the file is damaged")
        shape = (*first.shape[:-2], sum(part.shape[-2] for part in parts), first.shape[-1])
        if architecture.inputs_first_experts:
            entries |= _transposed(file, target, names, tensors, dtype)
            continue
        same_kind = all(part.kind == first.kind for part in parts) and len({tensor.quantized for tensor in tensors}) == 1
        quantized = tensors[0].quantized if same_kind else None
        spec = TensorSpec(dtype if any(part.blocks for part in parts) else first.spec.dtype, shape)
        if not same_kind and any(part.blocks for part in parts):
            mixed.append(f"{target} ({', '.join(gguf.kind_name(part.kind) for part in parts)})")
        nbytes = sum(part.place.spec.nbytes for part in parts)
        order = partial(_order, architecture, config, name, shape)
        entries[target] = Entry(spec, nbytes, partial(_read_stack, tensors, order, quantized is not None), quantized)
    return entries, [f"dequantized because their parts have several types: {', '.join(mixed)}"] if mixed else []


def _transposed(file: gguf.File, target: str, names: Sequence[str], tensors: Sequence[_Tensor], dtype: torch.dtype) -> dict[str, Entry]:
    """Stacks of experts [E, N, K] with biases in the layout of transformers' gpt-oss: [E, K, N] and [E, N], rows of gate and up
    interleaved."""
    parts = [tensor.entry for tensor in tensors]
    biases = [file.entries.get(f"{name.removesuffix('weight')}bias") for name in names]
    fitting = [bias for bias, part in zip(biases, parts, strict=True) if bias and not bias.blocks and bias.shape == part.shape[:2]]
    if len(fitting) < len(parts) or len({part.shape for part in parts}) > 1:
        raise CheckpointError(f"{file.path}: {' and '.join(names)} have no matching biases, or different shapes: the file is damaged")
    (experts, n, k), count = parts[0].shape, len(parts)
    first, same_form = tensors[0].quantized, len({tensor.quantized for tensor in tensors}) == 1
    quantized = replace(first, transposed=True, from_floats=first.stored_as == _MXFP4) if first is not None and same_form else None

    def read(wanted: torch.dtype | None) -> Codes | Tensor:
        values = [tensor.read() for tensor in tensors]
        if quantized is not None:
            codes = [value for value in values if isinstance(value, Codes)]
            return Codes.joined(codes, lambda parts: torch.stack(parts, dim=2).flatten(1, 2))
        out = torch.empty(experts, k, n * count, dtype=wanted or dtype, device="cpu")
        for i in range(experts):
            for j, value in enumerate(values):
                out[i, :, j::count] = (value[i] if isinstance(value, Tensor) else dequantize_weight(value.select(i), out.dtype)).T
        return out

    def read_bias(wanted: torch.dtype | None) -> Tensor:
        return torch.stack([_numbers(bias) for bias in fitting], dim=-1).flatten(1).to(wanted or dtype)

    form = next((tensor.quantized.stored_as for tensor in tensors if tensor.quantized is not None), None)
    nbytes, bias_bytes = (sum(each.place.spec.nbytes for each in found) for found in (parts, fitting))
    return {
        target: Entry(TensorSpec(dtype, (experts, k, n * count)), nbytes, read, quantized, None if quantized else form),
        f"{target}_bias": Entry(TensorSpec(dtype, (experts, n * count)), bias_bytes, read_bias),
    }


def _of_latents(file: gguf.File, config: Config, dtype: torch.dtype) -> dict[str, Entry]:
    """Keys and values from latents, `kv_b_proj` [heads * (key + value), rank] in transformers, of files that have them apart: keys
    [heads, rank, key] and values [heads, value, rank]. No format of codes holds both, so that they are read as floats."""
    entries = {}
    for name, keys in file.entries.items():
        if not name.endswith(_LATENTS[0]):
            continue
        values = file.entries.get(name.replace(*_LATENTS))
        heads, key, value = config["num_attention_heads"], config.get("qk_nope_head_dim", 0), config.get("v_head_dim", 0)
        rank = config.get("kv_lora_rank", 0)
        if values is None or keys.shape != (heads, rank, key) or values.shape != (heads, value, rank):
            raise CheckpointError(f"{file.path}: {name} and its values are not {heads} heads of latent attention: the file is damaged")
        spec, tensors = TensorSpec(dtype, (heads * (key + value), rank)), (_Tensor(keys, None), _Tensor(values, None))
        nbytes = keys.place.spec.nbytes + values.place.spec.nbytes
        form = f"GGUF {keys.blocks.name}" if keys.blocks else None
        target = f"model.layers.{layer_of(name)}.self_attn.kv_b_proj.weight"
        entries[target] = Entry(spec, nbytes, partial(_read_latents, *tensors, dtype), None, form)
    return entries


def _read_latents(keys: _Tensor, values: _Tensor, dtype: torch.dtype, wanted: torch.dtype | None) -> Tensor:
    parts = [dequantize_weight(part, dtype) if isinstance(part, Codes) else part for part in (keys.read(), values.read())]
    return torch.cat([parts[0].mT, parts[1]], dim=1).flatten(0, 1).to(wanted or dtype)


def _of_outer_stacks(file: gguf.File, architecture: Architecture, width: int, dtype: torch.dtype) -> dict[str, Entry]:
    """Stacks of matrices [width, width] outside of layers, which are modules of their own in transformers."""
    entries = {}
    for name, target in architecture.gguf.stacks.items():
        if (stack := file.entries.get(name)) is None:
            continue
        if stack.shape[1:] != (width, width):
            raise CheckpointError(f"{file.path}: {name} is {list(stack.shape)}, not matrices of {width} inputs: the file is damaged")
        tensor, spec = _Tensor(stack, None), TensorSpec(dtype if stack.blocks else stack.spec.dtype, (width, width))
        for i in range(stack.shape[0]):
            nbytes = stack.place.spec.nbytes // stack.shape[0]
            entries[f"{target}.{i}.weight"] = Entry(spec, nbytes, partial(_read_one, tensor, i), tensor.quantized)
    return entries


def _read_one(stack: _Tensor, index: int, dtype: torch.dtype | None) -> Codes | Tensor:
    value = stack.read()
    return value.select(index) if isinstance(value, Codes) else _cast(value[index], dtype)


def _of_lists(file: gguf.File, architecture: Architecture, layers: int) -> dict[str, Entry]:
    """Parameters of layers that are lists in the metadata."""
    entries = {}
    for key, (target, shape) in architecture.gguf.lists.items():
        numbers = file.metadata.get(key)
        if not isinstance(numbers, Sequence) or len(numbers) != layers or not all(type(n) is float for n in numbers):
            raise CheckpointError(f"{file.path} says {short(numbers)} for {key}, a number for each layer: the file is damaged")
        for layer, number in enumerate(numbers):
            tensor = torch.full(shape, number, device="cpu")
            entries[f"{architecture.gguf.layers}.{layer}.{target}"] = Entry(TensorSpec(tensor.dtype, shape), 4, partial(_cast, tensor))
    return entries


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype or tensor.dtype)


def _numbers(entry: gguf.Entry) -> Tensor:
    """A tensor that is not quantized."""
    value = gguf.read(entry)
    assert isinstance(value, Tensor)
    return value


def _read_transposed(entry: gguf.Entry, dtype: torch.dtype | None) -> Tensor:
    return _cast(_numbers(entry).T, dtype)


def _plain(file: gguf.File, name: str) -> Tensor:
    if file.entries[name].blocks is not None or len(file.entries[name].shape) != 1:
        raise CheckpointError(f"{file.path}: {name} is not a list of numbers: the file is damaged")
    return _numbers(file.entries[name])


def _order(architecture: Architecture, config: Mapping[str, object], name: str, shape: tuple[int, ...]) -> tuple[Tensor | None, bool]:
    """The place in the file of each row of transformers' tensor, None where it is the same; or of each column."""
    columns = name.endswith("ssm_out.weight")  # whose inputs are what others have as rows
    order = architecture.rows(name, config, shape[-1 if columns else 0] if shape else 0)
    return None if order is None else order.argsort(), columns


def _reordered(value: Codes | Tensor, order: Tensor | None, columns: bool) -> Codes | Tensor:
    if order is None:
        return value
    if not columns:
        return value.select(order) if isinstance(value, Codes) else value[order]
    if isinstance(value, Tensor):
        return value[:, order]
    unit = input_unit(value.format)
    starts = order[::unit].tolist()
    if not torch.equal(order, torch.tensor([start + i for start in starts for i in range(unit)], device="cpu")):
        raise CheckpointError(f"the file has {value.format} codes, whose columns are not reordered within a block: use its safetensors")
    return take(value, -1, tuple((start, start + unit) for start in starts))


def _read(
    tensor: _Tensor,
    shape: tuple[int, ...],
    order: Callable[[], tuple[Tensor | None, bool]],
    change: Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype | None,
) -> Codes | Tensor:
    """A tensor with its rows or columns in transformers' order."""
    value = _reordered(tensor.read().reshape(shape), *order())
    if isinstance(value, Codes):
        return value
    return _cast(value if change is None else change(value.float()), dtype)


def _read_stack(
    parts: Sequence[_Tensor], order: Callable[[], tuple[Tensor | None, bool]], keep: bool, dtype: torch.dtype | None
) -> Codes | Tensor:
    """Concatenate stacks of experts or matrices along N: [E, N1, K], [E, N2, K] -> [E, N1 + N2, K]; as codes if `keep`."""
    values = [part.read() for part in parts]
    codes = [value for value in values if isinstance(value, Codes)]
    if keep and len(codes) == len(values):
        return _reordered(Codes.joined(codes, partial(torch.cat, dim=-2)), *order())
    plain = [dequantize_weight(value, dtype or torch.float32) if isinstance(value, Codes) else _cast(value, dtype) for value in values]
    return _reordered(torch.cat(plain, dim=-2), *order())
