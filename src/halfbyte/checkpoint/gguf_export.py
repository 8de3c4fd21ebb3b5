"""What becomes of a model's weights in a GGUF file: which of ggml's types holds each with its numbers unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halfbyte.checkpoint.gguf_config import to_metadata
from halfbyte.checkpoint.gguf_model import take_rows
from halfbyte.checkpoint.gguf_names import ARCHITECTURES, Architecture
from halfbyte.checkpoint.manifest import Weight
from halfbyte.checkpoint.opened import Opened, order_name
from halfbyte.checkpoint.pieces import Piece, dequantized, kept
from halfbyte.errors import CheckpointError
from halfbyte.formats import ggml
from halfbyte.formats.blocks import to_blocks
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import as_format
from halfbyte.io.gguf import Value, plain_number
from halfbyte.io.tensors import Spec
from halfbyte.nn.report import Row

_BLOCK = 32
_CHUNK = 1 << 20  # weights that are encoded at a time
# llama.cpp's enum llama_ftype, by the type that most weights have.
_FILE_TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 8: 7, 6: 8, 30: 32}


@dataclass(frozen=True)
class Export:
    """What a file will hold. `types`: name -> (ggml's number, shape); `vocabulary`: rows of the embedding."""

    metadata: dict[str, Value]
    types: dict[str, tuple[int, tuple[int, ...]]]
    pieces: list[Piece]
    vocabulary: int


def plan(model: Opened) -> tuple[Export, list[str]]:
    """What a model becomes in a GGUF file, and what a person should know about it. Nothing is read but scales that are not float16."""
    metadata, tensors = to_metadata(model.config)
    architecture = ARCHITECTURES[str(metadata["general.architecture"])]
    key = f"{metadata['general.architecture']}.attention.head_count"
    heads, kv_heads = int(str(metadata[key])), int(str(metadata[f"{key}_kv"]))
    types: dict[str, tuple[int, tuple[int, ...]]] = {}
    pieces: list[Piece] = []
    elements: Counter[int] = Counter()
    for name, weight in model.weights.items():
        target = _name(architecture, name)
        rows = architecture.rows(target, heads, kv_heads, weight.shape[0])
        kind = choose(weight, order_name(name) in model.plain, partial(model.codes, name))
        if kind in ggml.NUMBERS:
            number = ggml.NUMBERS[kind]
            width = ggml.TYPES[number].row_bytes(weight.shape[-1])
            spec = Spec(torch.uint8, (weight.shape[0], width))
            pieces.append(kept(model, name, {target: spec}, partial(_encoded, target, kind, rows)))
        else:
            number = plain_number(weight.dtype)
            pieces.append(dequantized(model, name, kind, target, None if rows is None else partial(_permuted, rows)))
        types[target] = number, weight.shape
        elements[number] += weight.shape[0] * weight.shape[1]
    orders = {order_name(name) for name in model.weights}
    for name, spec in model.plain.items():
        if name in orders:
            continue
        target = _name(architecture, name)
        dtype = torch.float32 if len(spec.shape) < 2 else spec.dtype
        plus = 1.0 if architecture.plus_one and architecture.is_norm(target) else 0.0
        rows = architecture.rows(target, heads, kv_heads, spec.shape[0] if spec.shape else 0)
        types[target] = plain_number(dtype), spec.shape
        new = Spec(dtype, spec.shape)
        row = Row(name, "tensor", spec.shape, None, "as it is", model.nbytes.get(name, 0), new.nbytes)
        pieces.append(Piece({target: new}, partial(_plain, model, name, target, dtype, plus, rows), row))
        if len(spec.shape) == 2:
            elements[plain_number(dtype)] += spec.shape[0] * spec.shape[1]
    for target, tensor in tensors.items():
        types[target] = plain_number(tensor.dtype), tuple(tensor.shape)
        pieces.append(Piece({target: Spec(tensor.dtype, tuple(tensor.shape))}, partial(dict, {target: tensor})))
    file_type = _FILE_TYPES.get(elements.most_common(1)[0][0]) if elements else None
    if file_type is not None:
        metadata["general.file_type"] = file_type
    if "token_embd.weight" not in types:
        raise CheckpointError(f"{model.path} has no embedding: GGUF is written for language models")
    unsure = [name for name in model.tied if architecture.to_gguf(name) != "output.weight"]
    notes = [f"not written, for they are tied: {', '.join(unsure)}"] if unsure else []
    return Export(metadata, types, pieces, types["token_embd.weight"][1][0]), notes


def _name(architecture: Architecture, name: str) -> str:
    target = architecture.to_gguf(name)
    if target is None:
        raise CheckpointError(f"GGUF has no name for {name} in a {architecture.model}: this model cannot be written as GGUF")
    return target


def _encoded(target: str, kind: str, rows: Tensor | None, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
    return {target: blocks(kind, codes if rows is None else take_rows(codes, rows))}


def _permuted(rows: Tensor, tensor: Tensor) -> Tensor:
    return tensor[rows]


def _plain(model: Opened, name: str, target: str, dtype: torch.dtype, plus: float, rows: Tensor | None) -> dict[str, Tensor]:
    tensor = model.tensor(name)
    if rows is not None:
        tensor = tensor[rows]
    return {target: (tensor.float() + plus if plus else tensor).to(dtype)}


def choose(weight: Weight, ordered: bool, read: Callable[[], Codes]) -> str:
    """ggml's type for a weight, or why none holds it: a sentence with a space in it.

    q4_0 and q8_0 hold symmetric codes, q4_1 those with offsets, q5_0 those with points as q - point; a block longer than 32 is several
    with the same scale. Scales are float16: others are looked at, with `read`.
    """
    fmt, k = weight.format, weight.shape[-1]
    if ordered:
        return "its columns are in activation order, which GGUF does not have"
    if k % _BLOCK or fmt.block_size(k) % _BLOCK:
        return f"blocks of {fmt.block_size(k)} in rows of {k} are no multiples of 32"
    if fmt.zero == "none":
        kind = "q4_0" if fmt.bits == 4 else "q8_0"
    elif fmt.bits == 8:
        return f"GGUF has no 8-bit codes with {'points' if fmt.zero == 'point' else 'offsets'}"
    else:
        kind = "q5_0" if fmt.zero == "point" else "q4_1"
    if fmt.scale != torch.float16:
        codes = read()
        for numbers in (codes.scale, codes.zero):
            if numbers is not None and numbers.is_floating_point() and not torch.equal(numbers.half().to(numbers.dtype), numbers):
                return f"its {fmt.scale} scales do not fit float16"
    return kind


def blocks(kind: str, codes: Codes) -> Tensor:
    """The blocks of a weight, uint8 [N, bytes], for the type that `choose` chose."""
    n, k = codes.shape
    number, block = ggml.NUMBERS[kind], codes.format.block_size(k)
    out = torch.empty(n, ggml.TYPES[number].row_bytes(k), dtype=torch.uint8)
    scale = codes.scale.expand(n, 1) if codes.format.block == "tensor" else codes.scale
    zero = codes.zero if codes.zero is None or codes.format.block != "tensor" else codes.zero.expand(n, 1)
    step = max(1, _CHUNK // max(1, k))
    for first in range(0, n, step):
        part = slice(first, min(n, first + step))
        scales = scale[part].half().repeat_interleave(block // _BLOCK, dim=1)[:, : k // _BLOCK]
        points = None if zero is None else zero[part].repeat_interleave(block // _BLOCK, dim=1)[:, : k // _BLOCK]
        shape = (scales.shape[0], k)
        if kind == "q5_0":
            assert points is not None
            unsigned = Codes(codes.format, shape, codes.data[part], scale[part], zero[part] if zero is not None else None)
            values = unsigned.values() - points.repeat_interleave(_BLOCK, dim=1)
            out[part] = ggml.encode_q5_0(Codes.from_values(as_format("int8_g32"), values, scales))
        else:
            offsets = None if points is None else points.half()
            out[part] = to_blocks(Codes(as_format(kind), shape, codes.data[part], scales, offsets))
    return out
