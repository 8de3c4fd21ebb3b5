"""Plans the GGUF file of a model: `plan`, called by export_checkpoint.py, decides on the name, type and shape of each tensor.

Each weight gets the ggml type that holds its codes and scales unchanged (`choose`); one that no type holds is dequantized, and the report
says why. Metadata come from config.py, the tokenizer's from vocabulary.py.
"""

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
_BLOCK = 32  # weights of the shortest block of ggml
# ggml's number of a tensor type -> llama.cpp's llama_ftype of a file in which most weights have it; of K-quants in sizes S, M, L that of M.
_FILE_TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 6: 8, 7: 9, 8: 7, 10: 10, 11: 12, 12: 15, 13: 17, 14: 18, 20: 25, 23: 30, 30: 32}
_FILE_TYPES |= {35: 37, 39: 38, 40: 39}


@dataclass(frozen=True)
class Export:
    """The contents of a file to write.

    Attributes:
        metadata: Keys and values without those of the tokenizer.
        types: Name of a tensor in the file -> ggml's number of its type, and its shape.
        items: What is read, converted and written.
        vocabulary: Rows of the embedding.
    """

    metadata: dict[str, Value]
    types: dict[str, tuple[int, tuple[int, ...]]]
    items: list[ExportItem]
    vocabulary: int


def plan(model: StoredModel) -> tuple[Export, list[str]]:
    """Return the GGUF file for a model, and notes for the report. Weights are read whose format alone does not tell which type holds them.

    Raises:
        CheckpointError: GGUF is not written for the model's architecture, or has no name for one of its tensors.
    """
    planner = _Planner(model)
    for name in model.weights:
        planner.add_weight(name)
    orders = {order_name(name) for name in model.weights}
    for name in model.plain:
        if name not in orders:
            planner.add_plain(name)
    return planner.finished()


class _Planner:
    """Collects the tensors of a file."""

    def __init__(self, model: StoredModel) -> None:
        self._model = model
        self._metadata, self._computed = to_metadata(model.config)
        self._architecture = architecture_of_config(model.config)
        kv_heads = self._metadata[f"{self._architecture.name}.attention.head_count_kv"]
        self._config = {**model.config, "num_key_value_heads": kv_heads}
        self._types: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._items: list[ExportItem] = []
        self._elements: Counter[int] = Counter()  # by the number of the type, of matrices alone

    def add_weight(self, name: str) -> None:
        """Add a quantized weight: as codes where a type holds them, otherwise in floating point."""
        model, weight = self._model, self._model.weights[name]
        place = _place(self._architecture, name, weight.shape, self._config)
        kind = _IN_FLOATS if place.in_floats else choose(weight, order_name(name) in model.plain, partial(model.codes, name))
        if isinstance(kind, ggml.BlockType):
            number = ggml.NUMBERS[kind.name]
            spec = TensorSpec(torch.uint8, (*place.shape[:-1], kind.row_bytes(place.shape[-1])))
            encode = partial(ggml_encoding.encode, kind)
            self._items.append(kept(model, name, dict.fromkeys(place.names, spec), lambda codes, order: place.cut(encode(codes))))
        else:
            spec = TensorSpec(torch.float32 if place.in_floats else weight.dtype, place.shape)
            number = plain_number(spec.dtype)
            self._items.append(dequantized(model, name, kind, dict.fromkeys(place.names, spec), place.cut))
        self._types |= dict.fromkeys(place.names, (number, place.shape))
        self._elements[number] += math.prod(weight.shape)

    def add_plain(self, name: str) -> None:
        """Add a tensor that is not quantized: in float32 if it has one dimension, as llama.cpp wants it, otherwise in its dtype."""
        model, spec = self._model, self._model.plain[name]
        transposes = self._architecture.is_inputs_first(name)
        shape = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]) if transposes else spec.shape
        place = _place(self._architecture, name, shape, self._config)
        target_spec = TensorSpec(torch.float32 if len(spec.shape) < 2 or place.in_floats else spec.dtype, place.shape)
        offset = 1.0 if self._architecture.has_unit_offset(place.names[0]) else 0.0

        def make() -> dict[str, Tensor]:
            tensor = model.tensor(name).mT.contiguous() if transposes else model.tensor(name)
            return {target: part.to(target_spec.dtype) for target, part in place.cut(tensor.float() + offset if offset else tensor).items()}

        row = Row(name, "tensor", spec.shape, None, "as it is", model.nbytes(name), len(place.names) * target_spec.nbytes)
        self._items.append(ExportItem(dict.fromkeys(place.names, target_spec), make, row))
        number = plain_number(target_spec.dtype)
        self._types |= dict.fromkeys(place.names, (number, target_spec.shape))
        if len(spec.shape) > 1:
            self._elements[number] += math.prod(spec.shape)

    def finished(self) -> tuple[Export, list[str]]:
        """Return the whole file, with tensors that llama.cpp wants and transformers computes, and notes for the report."""
        model, types = self._model, self._types
        for target, tensor in self._computed.items():
            types[target] = plain_number(tensor.dtype), tuple(tensor.shape)
            spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
            self._items.append(ExportItem({target: spec}, partial(dict, {target: tensor})))
        file_type = _FILE_TYPES.get(self._elements.most_common(1)[0][0]) if self._elements else None
        if file_type is not None:
            self._metadata["general.file_type"] = file_type
        if "token_embd.weight" not in types:
            raise CheckpointError(f"{model.path} has no embedding: GGUF is written for language models")
        omitted = [name for name in model.tied if self._architecture.to_gguf(name) != ("output.weight",)]
        notes = [f"not written because they are tied: {', '.join(omitted)}"] if omitted else []
        counts = Counter(kind_name(number) for number, _ in types.values())
        notes.append(f"tensors in the file: {', '.join(f'{count} of {name}' for name, count in counts.most_common())}")
        return Export(self._metadata, types, self._items, types["token_embd.weight"][1][0]), notes


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
        """Split a tensor of the model, of numbers or of encoded blocks [..., bytes of a row], into the tensors of the file."""
        tensor = tensor if self.rows is None else tensor[self.rows]
        count = len(self.names)
        if self.interleaved:
            parts = tuple(tensor[:, i::count].contiguous() for i in range(count))
        else:
            parts = tensor.chunk(count, dim=1) if count > 1 else (tensor.reshape(*self.shape[:-1], -1),)
        return dict(zip(self.names, parts, strict=True))


def _place(architecture: Architecture, name: str, shape: tuple[int, ...], config: Mapping[str, object]) -> _Place:
    """Return the place of transformers' tensor `name`, which has `shape`, outputs first. Raise CheckpointError if files have none."""
    names = architecture.to_gguf(name)
    if not names:
        raise CheckpointError(f"GGUF has no name for {name} in a {architecture.model}: this model cannot be written as GGUF")
    rows = architecture.row_order(names[0], config, shape[0] if shape else 0)
    if len(names) > 1:
        shape = (shape[0], shape[1] // len(names), *shape[2:])
    elif is_router(names[0]) and shape[0] == 1:  # the gate of the shared expert has one dimension
        shape = shape[1:]
    elif is_depthwise_kernel(names[0]) and len(shape) == 3:
        shape = (shape[0], shape[2])
    return _Place(names, shape, rows, architecture.inputs_first_experts and len(names) > 1)


def choose(weight: Weight, ordered: bool, read: Callable[[], Codes]) -> ggml.BlockType | str:
    """Return ggml's type for a weight, or the reason why none holds it.

    A block that is longer than the type's becomes several with the same scale, and codes with a zero point are written as q - point.

    Args:
        weight: The weight.
        ordered: Whether its columns have an order of their own.
        read: Reads its codes, where the format alone does not tell whether a type holds them.
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
            return kind
        codes = codes or read()
        if ggml_encoding.holds(kind, codes):
            return kind
    names, dtype = ", ".join(kind.name for kind in kinds), str(fmt.scale).removeprefix("torch.")
    return f"its {dtype} scales are not such as {names} would have"
