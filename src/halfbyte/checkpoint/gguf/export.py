"""A model's weights in a GGUF file: the choice of ggml types that hold them with their numbers unchanged, and the encoding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halfbyte.checkpoint.export_items import ExportItem, dequantized, kept
from halfbyte.checkpoint.gguf.config import to_metadata
from halfbyte.checkpoint.gguf.names import Architecture, architecture_of_config, is_depthwise_kernel, is_router
from halfbyte.checkpoint.native.manifest import Weight
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import CheckpointError
from halfbyte.formats import ggml, ggml_encoding
from halfbyte.formats.codes import Codes
from halfbyte.io.gguf import Value, kind_name, plain_number
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.report import Row

_IN_FLOATS = "llama.cpp computes it in float32"
_BLOCK = 32
# llama.cpp's enum llama_ftype, by the type that most weights have. Of K-quants the middle one: it tells what the other weights are.
_FILE_TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 6: 8, 7: 9, 8: 7, 10: 10, 11: 12, 12: 15, 13: 17, 14: 18, 20: 25, 23: 30, 30: 32}
_FILE_TYPES |= {35: 37, 39: 38, 40: 39}


@dataclass(frozen=True)
class Export:
    """The contents of a file to write. `types`: name -> (ggml's number, shape); `vocabulary`: rows of the embedding."""

    metadata: dict[str, Value]
    types: dict[str, tuple[int, tuple[int, ...]]]
    items: list[ExportItem]
    vocabulary: int


def plan(model: StoredModel) -> tuple[Export, list[str]]:
    """The GGUF file for a model, and notes for the report. Weights are read whose format alone does not tell which type holds them."""
    metadata, tensors = to_metadata(model.config)
    architecture = architecture_of_config(model.config)
    key = f"{architecture.name}.attention.head_count"
    config = {**model.config, "num_key_value_heads": metadata[f"{key}_kv"]}
    types: dict[str, tuple[int, tuple[int, ...]]] = {}
    items: list[ExportItem] = []
    elements: Counter[int] = Counter()
    for name, weight in model.weights.items():
        place = _place(architecture, name, weight.shape, config)
        kind = _IN_FLOATS if place.in_floats else choose(weight, order_name(name) in model.plain, partial(model.codes, name))
        if kind in ggml.NUMBERS:
            number = ggml.NUMBERS[kind]
            spec = TensorSpec(torch.uint8, (*place.shape[:-1], ggml.TYPES[number].row_bytes(place.shape[-1])))
            items.append(kept(model, name, dict.fromkeys(place.names, spec), partial(_encoded, place, kind)))
        else:
            spec = TensorSpec(torch.float32 if place.in_floats else weight.dtype, place.shape)
            number = plain_number(spec.dtype)
            items.append(dequantized(model, name, kind, dict.fromkeys(place.names, spec), place.cut))
        types |= dict.fromkeys(place.names, (number, place.shape))
        elements[number] += math.prod(weight.shape)
    orders = {order_name(name) for name in model.weights}
    for name, spec in model.plain.items():
        if name in orders:
            continue
        transposes = architecture.is_inputs_first(name)
        shape = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]) if transposes else spec.shape
        place = _place(architecture, name, shape, config)
        new = TensorSpec(torch.float32 if len(spec.shape) < 2 or place.in_floats else spec.dtype, place.shape)
        plus = 1.0 if architecture.has_unit_offset(place.names[0]) else 0.0
        types |= dict.fromkeys(place.names, (plain_number(new.dtype), new.shape))
        row = Row(name, "tensor", spec.shape, None, "as it is", model.nbytes(name), len(place.names) * new.nbytes)
        items.append(ExportItem(dict.fromkeys(place.names, new), partial(_plain, model, name, place, new.dtype, plus, transposes), row))
        if len(spec.shape) > 1:
            elements[plain_number(new.dtype)] += math.prod(spec.shape)
    for target, tensor in tensors.items():
        types[target] = plain_number(tensor.dtype), tuple(tensor.shape)
        items.append(ExportItem({target: TensorSpec(tensor.dtype, tuple(tensor.shape))}, partial(dict, {target: tensor})))
    file_type = _FILE_TYPES.get(elements.most_common(1)[0][0]) if elements else None
    if file_type is not None:
        metadata["general.file_type"] = file_type
    if "token_embd.weight" not in types:
        raise CheckpointError(f"{model.path} has no embedding: GGUF is written for language models")
    unsure = [name for name in model.tied if architecture.to_gguf(name) != ("output.weight",)]
    notes = [f"not written because they are tied: {', '.join(unsure)}"] if unsure else []
    counts = Counter(kind_name(number) for number, _ in types.values())
    notes.append(f"tensors in the file: {', '.join(f'{count} of {name}' for name, count in counts.most_common())}")
    return Export(metadata, types, items, types["token_embd.weight"][1][0]), notes


@dataclass(frozen=True, eq=False)
class _Place:
    """The place of a model's tensor in a file.

    Attributes:
        names: One name, or the names of several tensors among which the rows of each expert are divided equally.
        shape: The shape of each of these tensors.
        rows: The row of the model's tensor for each row of the file's; None where they are the same.
        interleaved: Whether the rows of an expert go to the tensors in turn, not in consecutive parts.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: Tensor | None
    interleaved: bool = False

    @property
    def in_floats(self) -> bool:
        """Whether llama.cpp wants it in float32."""
        return is_router(self.names[0]) or is_depthwise_kernel(self.names[0]) or self.names[0].endswith("_exps.bias")

    def cut(self, tensor: Tensor) -> dict[str, Tensor]:
        """Split numbers or blocks into the tensors of the file."""
        tensor = tensor if self.rows is None else tensor[self.rows]
        count = len(self.names)
        parts = tensor.chunk(count, dim=1) if count > 1 else (tensor.reshape(*self.shape[:-1], -1),)
        if self.interleaved:
            parts = tuple(tensor[:, i::count].contiguous() for i in range(count))
        return dict(zip(self.names, parts, strict=True))


def _place(architecture: Architecture, name: str, shape: tuple[int, ...], config: Mapping[str, object]) -> _Place:
    names = architecture.to_gguf(name)
    if not names:
        raise CheckpointError(f"GGUF has no name for {name} in a {architecture.model}: this model cannot be written as GGUF")
    rows = architecture.rows(names[0], config, shape[0] if shape else 0)
    if len(names) > 1:
        shape = (shape[0], shape[1] // len(names), *shape[2:])
    elif is_router(names[0]) and shape[0] == 1:  # the gate of the shared expert has one dimension
        shape = shape[1:]
    elif is_depthwise_kernel(names[0]) and len(shape) == 3:
        shape = (shape[0], shape[2])
    return _Place(names, shape, rows, architecture.inputs_first_experts and len(names) > 1)


def _encoded(place: _Place, kind: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
    return place.cut(ggml_encoding.encode(ggml.TYPES[ggml.NUMBERS[kind]], codes))


def _plain(model: StoredModel, name: str, place: _Place, dtype: torch.dtype, plus: float, transposes: bool) -> dict[str, Tensor]:
    tensor = model.tensor(name).mT.contiguous() if transposes else model.tensor(name)
    return {target: part.to(dtype) for target, part in place.cut(tensor.float() + plus if plus else tensor).items()}


def choose(weight: Weight, ordered: bool, read: Callable[[], Codes]) -> str:
    """ggml's type for a weight, or the reason why none holds it (recognizable by its spaces).

    A block that is longer than the type's becomes several with the same scale, and codes with a zero point are written as q - point. Where
    the format alone does not tell whether a type holds the weight, it is read with `read` and tried.
    """
    fmt, k = weight.format, weight.shape[-1]
    if ordered:
        return "its columns are in activation order, which GGUF does not have"
    kinds = ggml_encoding.candidates(fmt, k)
    if not kinds:
        if fmt.zero != "none" and fmt.stored_bits > 4 + (fmt.zero == "offset"):
            return f"GGUF has no {fmt.stored_bits}-bit codes with {'zero points' if fmt.zero == 'point' else 'offsets'}"
        if k % _BLOCK:
            return f"rows of {k} are not multiples of {_BLOCK}"
        return f"blocks of {fmt.block_size(k)} in rows of {k} fit no type of GGUF"
    codes: Codes | None = None
    for kind in kinds:
        if ggml_encoding.is_certain(kind, fmt):
            return kind.name
        codes = codes or read()
        if ggml_encoding.holds(kind, codes):
            return kind.name
    names, dtype = ", ".join(kind.name for kind in kinds), str(fmt.scale).removeprefix("torch.")
    return f"its {dtype} scales are not such as {names} would have"
