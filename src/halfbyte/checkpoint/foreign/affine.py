"""Folders of HQQ and torchao: codes with a scale and a zero for each block. See io/weights/hqq.py and io/weights/torchao.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import torch

from halfbyte.checkpoint.entries import Entries, Entry, Quantized, joined, plain_entries
from halfbyte.checkpoint.foreign.floats import notes
from halfbyte.checkpoint.foreign.tensors import Parts, modules_of, weights_of
from halfbyte.errors import CheckpointError
from halfbyte.formats.spec import Format
from halfbyte.io.safetensors import Reader, parse_json
from halfbyte.io.tensors import TensorSpec
from halfbyte.io.weights import float8, hqq, torchao, zero_points

_NUMBERS = ("W_q", "scale", "zero")
# Other tensors that hqq stores for a weight: its settings, and what its own classes need.
_SETTINGS = (
    "nbits", "group_size", "axis", "shape", "channel_wise", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero",
    "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "optimize", "round_zero",
)  # fmt: skip
_INT8, _INTX, _FLOAT8 = "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"
_PART = "_weight_"
_LARGEST = 1 << 20  # bytes of a description in a file's metadata


def of_hqq(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    """HQQ: weights with groups along the inputs keep their codes, those with groups along the outputs (axis 0) become floats."""
    modules, rest = modules_of(reader, (*_NUMBERS, *_SETTINGS))
    entries = weights_of(modules, lambda parts: _hqq_entry(parts, dtype))
    floats = sum(entry.quantized is None for entry in entries.values())
    return Entries(joined(entries, plain_entries(reader, rest)), notes({"codes in groups along the outputs": floats} if floats else {}, 0))


def _hqq_entry(parts: Parts, dtype: torch.dtype) -> Entry:
    bits, group, axis, shape = _hqq_settings(parts)
    numbers, how = parts.only(_NUMBERS), (bits, group, shape, parts.module)
    if axis == 0:
        return numbers.entry(
            TensorSpec(dtype, shape),
            lambda wanted: hqq.read_floats(numbers.tensors(), *how, dtype=wanted or dtype),
            stored_as="HQQ, groups along the outputs",
        )
    blocks = (shape[0] * (shape[1] // (group or shape[1])), 1)
    found = parts.only(("scale", "zero")).tensors()
    scale, zero = (zero_points.take(found, part, zero_points.SCALES, blocks, parts.module) for part in ("scale", "zero"))
    quantized = Quantized(hqq.format_of(scale, zero, bits, group), "HQQ")
    return numbers.entry(TensorSpec(dtype, shape), lambda _: hqq.read(numbers.tensors(), *how), quantized)


def _hqq_settings(parts: Parts) -> tuple[int, int | None, int, tuple[int, int]]:
    """Bits, group size (None: a row), axis and shape of a weight."""
    name = parts.module

    def numbers(part: str) -> list[Any]:
        if part not in parts or parts.spec(part).nbytes > 64:
            return []
        found: list[Any] = parts.read(part).flatten().tolist()
        return found

    def number(part: str, default: int) -> int:
        found = numbers(part)
        return int(found[0]) if len(found) == 1 and found[0] == found[0] // 1 else default

    bits, axis, shape, group = number("nbits", 0), number("axis", -1), numbers("shape"), number("group_size", 0)
    if bits not in hqq.BITS or axis not in (0, 1) or len(shape) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in shape):
        what = f"nbits {bits}, axis {axis} and shape {short(shape)}"
        raise CheckpointError(f"{name} says {what}: halfbyte reads HQQ of {', '.join(map(str, hqq.BITS))} bits with axis 0 or 1")
    if number("quant_scale", 0) or number("quant_zero", 0) or "scale" not in parts or "zero" not in parts:
        raise CheckpointError(
            f"{name} has scales or zeros that are quantized themselves, which halfbyte does not read: dequantize it with hqq"
        )
    n, k = shape
    if not number("channel_wise", 1) or group < 0 or (group and (k % group if axis == 1 else (n * k) % group)):
        raise CheckpointError(
            f"{name} of shape {shape} has groups of {group or 'all'}, which do not divide its rows: dequantize it with hqq"
        )
    return bits, group or None, axis, (n, k)


def of_torchao(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    """torchao's tensors in safetensors, as transformers saves them since 5.0: unpacked integers and 8-bit floats."""
    modules, rest = modules_of(reader, tuple(f"{_PART}{part}" for part in torchao.PARTS))
    entries = weights_of(modules, lambda parts: _torchao_entry(parts, dtype))
    if odd := next((name for name in rest if name.rpartition(".")[2].startswith(_PART)), None):
        raise CheckpointError(f"{odd} belongs to a weight of torchao in a form that halfbyte does not read: start from the float model")
    floats = sum(entry.quantized is None for entry in entries.values())
    return Entries(joined(entries, plain_entries(reader, rest)), notes({"8-bit floats": floats} if floats else {}, 0))


def _torchao_entry(parts: Parts, dtype: torch.dtype) -> Entry:
    name, parts = parts.module, replace(parts, names={part.removeprefix(_PART): full for part, full in parts.names.items()})
    kind, about = _described(parts.reader, f"{name}.weight")
    shape = parts.spec("qdata").shape
    if kind not in (_INT8, _INTX, _FLOAT8) or "scale" not in parts or len(shape) != 2:
        what = f"{name} is {short(kind)} {list(shape)}"
        raise CheckpointError(
            f"{what}: of torchao halfbyte reads matrices that are {_INT8}, {_INTX} or {_FLOAT8}, start from the float model"
        )
    n, k = shape
    scale = parts.spec("scale")
    if kind == _FLOAT8:
        float8.rectangle(shape, scale.shape, scale.dtype, None, name)
        return parts.entry(
            TensorSpec(dtype, shape),
            lambda wanted: float8.read(parts.read("qdata"), parts.read("scale"), None, wanted or dtype, name),
            stored_as="float8_e4m3fn of torchao",
        )
    blocks = scale.shape[1] if len(scale.shape) == 2 else 0
    if not blocks or k % blocks:
        raise CheckpointError(
            f"{name} of shape {list(shape)} has scales {list(scale.shape)}, halfbyte reads [N, blocks] that divide its rows: "
            "start from the float model"
        )
    bits = 8 if kind == _INT8 else _bits_of(about, name)
    symmetric = bool((torchao.zeros(parts.only(["zero_point"]).tensors(), (n, blocks), name) == 0).all())
    fmt = Format(bits, k // blocks if blocks > 1 else "channel", "none" if symmetric else "point", parts.scale_dtype("scale"))
    compute, activation = _activation(about)
    quantized = Quantized(fmt, "torchao", compute=compute, activation=activation)
    return parts.entry(TensorSpec(dtype, shape), lambda _: torchao.read(parts.tensors(), bits, (n, k), blocks, name), quantized)


def _described(reader: Reader, name: str) -> tuple[str, Mapping[str, object]]:
    """The class of a tensor and its attributes, from the metadata of the files."""
    text = reader.metadata.get(name, "")
    if not isinstance(text, str) or not 0 < len(text) < _LARGEST:
        raise CheckpointError(f"no file describes {name} of torchao: save the model again with transformers 5 or newer")
    found = parse_json(text.encode(errors="replace"), f"the description of {name}")
    about = found.get("_data")
    return str(found.get("_type")), about if isinstance(about, dict) else {}


def _bits_of(about: Mapping[str, object], name: str) -> int:
    """4 or 8: the bits of codes that hold the integers of a dtype such as int4 or int3."""
    target = about.get("target_dtype")
    said = target.get("_data") if isinstance(target, dict) else None
    bits = int(said[3:]) if isinstance(said, str) and said[:3] == "int" and said[3:] in tuple("12345678") else 0
    if not bits:
        raise CheckpointError(f"{name} holds {short(said)}: of torchao halfbyte reads integers of 1 to 8 bits, start from the float model")
    return 4 if bits <= 4 else 8


def _activation(about: Mapping[str, object]) -> tuple[str, str]:
    """The compute of a weight: with activations quantized to 8 bits per row, or "auto" where they are not mentioned."""
    if about.get("activation_quantization") == "int8_asym_per_token":
        return "int8", "row_offset"
    inputs = about.get("act_quant_kwargs")
    inputs = inputs.get("_data") if isinstance(inputs, dict) else None
    if not isinstance(inputs, dict):
        return "auto", "block"
    mapping = inputs.get("mapping_type")
    symmetric = not isinstance(mapping, dict) or mapping.get("_data") == "SYMMETRIC"
    return "int8", "row" if symmetric else "row_offset"
