"""A model's weights in a GGUF file: the choice of ggml types that hold them with their numbers unchanged, and the encoding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.export_items import ExportItem, dequantized, kept
from halfbyte.checkpoint.gguf_config import to_metadata
from halfbyte.checkpoint.gguf_names import Architecture, convolves, of_config, routes
from halfbyte.checkpoint.manifest import Weight
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import CheckpointError
from halfbyte.formats import ggml
from halfbyte.formats.blocks import to_blocks
from halfbyte.formats.codes import Codes, unpack_nibbles
from halfbyte.formats.spec import as_format
from halfbyte.io.gguf import Value, plain_number
from halfbyte.io.tensors import Spec
from halfbyte.nn.report import Row

_IN_FLOATS = "llama.cpp computes it in float32"
_BLOCK = 32
_CHUNK = 1 << 20  # weights that are encoded at a time
# llama.cpp's enum llama_ftype, by the type that most weights have.
_FILE_TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 8: 7, 6: 8, 30: 32}


@dataclass(frozen=True)
class Export:
    """The contents of a file to write. `types`: name -> (ggml's number, shape); `vocabulary`: rows of the embedding."""

    metadata: dict[str, Value]
    types: dict[str, tuple[int, tuple[int, ...]]]
    items: list[ExportItem]
    vocabulary: int


def plan(model: StoredModel) -> tuple[Export, list[str]]:
    """The GGUF file for a model, and notes for the report. Only scales that are not float16 are read."""
    metadata, tensors = to_metadata(model.config)
    architecture = of_config(model.config)
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
            spec = Spec(torch.uint8, (*place.shape[:-1], ggml.TYPES[number].row_bytes(place.shape[-1])))
            items.append(kept(model, name, dict.fromkeys(place.names, spec), partial(_encoded, place, kind)))
        else:
            spec = Spec(torch.float32 if place.in_floats else weight.dtype, place.shape)
            number = plain_number(spec.dtype)
            items.append(dequantized(model, name, kind, dict.fromkeys(place.names, spec), place.cut))
        types |= dict.fromkeys(place.names, (number, place.shape))
        elements[number] += math.prod(weight.shape)
    orders = {order_name(name) for name in model.weights}
    for name, spec in model.plain.items():
        if name in orders:
            continue
        place = _place(architecture, name, spec.shape, config)
        new = Spec(torch.float32 if len(spec.shape) < 2 or place.in_floats else spec.dtype, place.shape)
        plus = 1.0 if architecture.plus_one and architecture.is_norm(place.names[0]) else 0.0
        types |= dict.fromkeys(place.names, (plain_number(new.dtype), new.shape))
        row = Row(name, "tensor", spec.shape, None, "as it is", model.nbytes(name), len(place.names) * new.nbytes)
        items.append(ExportItem(dict.fromkeys(place.names, new), partial(_plain, model, name, place, new.dtype, plus), row))
        if len(spec.shape) > 1:
            elements[plain_number(new.dtype)] += math.prod(spec.shape)
    for target, tensor in tensors.items():
        types[target] = plain_number(tensor.dtype), tuple(tensor.shape)
        items.append(ExportItem({target: Spec(tensor.dtype, tuple(tensor.shape))}, partial(dict, {target: tensor})))
    file_type = _FILE_TYPES.get(elements.most_common(1)[0][0]) if elements else None
    if file_type is not None:
        metadata["general.file_type"] = file_type
    if "token_embd.weight" not in types:
        raise CheckpointError(f"{model.path} has no embedding: GGUF is written for language models")
    unsure = [name for name in model.tied if architecture.to_gguf(name) != ("output.weight",)]
    notes = [f"not written because they are tied: {', '.join(unsure)}"] if unsure else []
    return Export(metadata, types, items, types["token_embd.weight"][1][0]), notes


@dataclass(frozen=True, eq=False)
class _Place:
    """The place of a model's tensor in a file.

    names  of the tensors there: one, or several among which the rows of each expert are divided equally
    shape  of each
    rows   the row of the model's tensor for each row of the file's; None where they are the same
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: Tensor | None

    @property
    def in_floats(self) -> bool:
        """Whether llama.cpp wants it in float32."""
        return routes(self.names[0]) or convolves(self.names[0])

    def cut(self, tensor: Tensor) -> dict[str, Tensor]:
        """Splits numbers or blocks into the tensors of the file."""
        tensor = tensor if self.rows is None else tensor[self.rows]
        parts = tensor.chunk(len(self.names), dim=1) if len(self.names) > 1 else (tensor.reshape(*self.shape[:-1], -1),)
        return dict(zip(self.names, parts, strict=True))


def _place(architecture: Architecture, name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> _Place:
    names = architecture.to_gguf(name)
    if not names:
        raise CheckpointError(f"GGUF has no name for {name} in a {architecture.model}: this model cannot be written as GGUF")
    rows = architecture.rows(names[0], config, shape[0] if shape else 0)
    if len(names) > 1:
        shape = (shape[0], shape[1] // len(names), *shape[2:])
    elif routes(names[0]) and shape[0] == 1:  # the gate of the shared expert has one dimension
        shape = shape[1:]
    elif convolves(names[0]) and len(shape) == 3:
        shape = (shape[0], shape[2])
    return _Place(names, shape, rows)


def _encoded(place: _Place, kind: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
    return place.cut(blocks(kind, codes))


def _plain(model: StoredModel, name: str, place: _Place, dtype: torch.dtype, plus: float) -> dict[str, Tensor]:
    tensor = model.tensor(name)
    return {target: part.to(dtype) for target, part in place.cut(tensor.float() + plus if plus else tensor).items()}


def choose(weight: Weight, ordered: bool, read: Callable[[], Codes]) -> str:
    """ggml's type for a weight, or the reason why none holds it (recognizable by its spaces).

    q4_0, q5_0 and q8_0 hold symmetric codes, q4_1 those with offsets, q5_0 also those with zero points, as q - point; a block longer than
    32 becomes several with the same scale. Scales are float16; those of another dtype are read with `read` and checked.
    """
    fmt, k = weight.format.integers, weight.shape[-1]
    if ordered:
        return "its columns are in activation order, which GGUF does not have"
    if k % _BLOCK or fmt.block_size(k) % _BLOCK:
        return f"blocks of {fmt.block_size(k)} in rows of {k} are not multiples of 32"
    if fmt.zero == "none":
        kind = "q5_0" if weight.format.tight == 5 else "q4_0" if fmt.bits == 4 else "q8_0"
    elif fmt.bits == 8:
        return f"GGUF has no 8-bit codes with {'zero points' if fmt.zero == 'point' else 'offsets'}"
    else:
        kind = "q5_0" if fmt.zero == "point" else "q4_1"
    if fmt.scale != torch.float16:
        codes = read()
        for numbers in (codes.scale, codes.zero):
            if numbers is not None and numbers.is_floating_point() and not torch.equal(numbers.half().to(numbers.dtype), numbers):
                return f"its {fmt.scale} scales do not fit float16"
    return kind


def blocks(kind: str, codes: Codes) -> Tensor:
    """The blocks of a weight, uint8 [..., N, bytes], for the type that `choose` chose."""
    codes = codes.integers()
    n, k = codes.rows, codes.shape[-1]
    number, block = ggml.NUMBERS[kind], codes.format.block_size(k)
    out = torch.empty(n, ggml.TYPES[number].row_bytes(k), dtype=torch.uint8, device="cpu")
    data, *numbers = (codes.data.reshape(n, -1), codes.scale, codes.zero)
    single = codes.format.block == "tensor"
    scale, zero = (None if t is None else t.expand(n, 1) if single else t.reshape(n, -1) for t in numbers)
    assert scale is not None
    step = max(1, _CHUNK // max(1, k))
    for first in range(0, n, step):
        part = slice(first, min(n, first + step))
        scales = scale[part].half().repeat_interleave(block // _BLOCK, dim=1)[:, : k // _BLOCK]
        points = None if zero is None else zero[part].repeat_interleave(block // _BLOCK, dim=1)[:, : k // _BLOCK]
        shape = (scales.shape[0], k)
        if kind == "q5_0":
            values = data[part]
            if points is not None:
                values = unpack_nibbles(values, k).to(torch.int16) - points.repeat_interleave(_BLOCK, dim=1)
            out[part] = ggml.encode_q5_0(Codes.from_values(as_format("int8_g32"), values, scales))
        else:
            offsets = None if points is None else points.half()
            out[part] = to_blocks(Codes(as_format(kind), shape, data[part], scales, offsets))
    return out.reshape(*codes.shape[:-1], -1)
