"""Folders with low-precision floating-point weights: 8-bit floats with scales (DeepSeek, Qwen and many others), MXFP4 (gpt-oss), NVFP4
(Model Optimizer, compressed-tensors), and bitsandbytes.

4-bit floats and bitsandbytes' 8-bit integers become codes. 8-bit floats, nf4 and fp4 are not multiples of one step: they are
dequantized as they are read, which reports mention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, Entry, Quantized, joined, plain_entries
from halfbyte.checkpoint.foreign.tensors import Parts, modules_of, weights_of
from halfbyte.checkpoint.mapping.left_out import RUN_TIME
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.io.safetensors import Reader
from halfbyte.io.tensors import TensorSpec
from halfbyte.io.weights import bitsandbytes, float4, float8

# The names of the scales of an 8-bit floating-point weight.
_SCALES = ("{name}_scale_inv", "{name}_scale", "{module}.scale")
_MX = ("_blocks", "_scales")


def plain_or_float8(reader: Reader, names: Iterable[str] | None, dtype: torch.dtype, block: tuple[int, int] | None = None) -> Entries:
    """The tensors of these names, or all: 8-bit floats that have scales dequantized to `dtype`, others as they are."""
    rest = dict.fromkeys(reader.places if names is None else names)
    entries: dict[str, Entry] = {}
    forms: Counter[str] = Counter()
    for name in [name for name in rest if reader.spec(name).dtype in float8.DTYPES]:
        module = name.rpartition(".")[0]
        scale = next((full for end in _SCALES if (full := end.format(name=name, module=module)) in rest), None)
        if scale is None:
            continue
        entries[name] = _float8_entry(Parts(reader, name, {"weight": name, "scale": scale}), block, dtype)
        forms["8-bit floats"] += 1
        del rest[name]
        rest.pop(scale, None)
    dropped = [name for name in rest if entries and RUN_TIME.fullmatch(name)]
    return Entries(
        joined(entries, plain_entries(reader, [name for name in rest if name not in dropped])), notes(forms, len(dropped)), reader
    )


def _float8_entry(parts: Parts, block: tuple[int, int] | None, dtype: torch.dtype) -> Entry:
    spec, scale = parts.spec("weight"), parts.spec("scale")
    rectangle = float8.rectangle(spec.shape, scale.shape, scale.dtype, block, parts.module)
    each = "" if rectangle == spec.shape[-2:] else " for each {} x {}".format(*rectangle)
    return parts.entry(
        TensorSpec(dtype, spec.shape),
        lambda wanted: float8.read(parts.read("weight"), parts.read("scale"), rectangle, wanted or dtype, parts.module),
        stored_as=f"{str(spec.dtype).removeprefix('torch.')}, one scale{each}",
    )


def notes(forms: Mapping[str, int], dropped: int) -> list[str]:
    """Notes for the report about dequantized weights, by their form, and about unused scales of activations."""
    found = [f"{count} weights are {form}, dequantized as they are read: pass a format to load or quantize to keep the model small"
             for form, count in forms.items()]  # fmt: skip
    return found + ([f"activations are not quantized: {dropped} scales for them are not used"] if dropped else [])


def fp8(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    """float8 weights as DeepSeek and Qwen (quant_method fp8), FBGEMM (fbgemm_fp8) and AutoFP8 write them."""
    return plain_or_float8(reader, None, dtype, block_of(settings.get("weight_block_size")))


def block_of(value: object) -> tuple[int, int] | None:
    """Rows and columns that share a scale, if a config gives them."""
    sound = isinstance(value, list) and len(value) == 2 and all(type(size) is int and 0 < size < 1 << 31 for size in value)
    return (value[0], value[1]) if sound and isinstance(value, list) else None


def modelopt(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    """NVIDIA's Model Optimizer: FP8 and NVFP4."""
    packed, rest = modules_of(reader, ("weight", "weight_scale", "weight_scale_2"), None, lambda spec: spec.dtype == torch.uint8)
    others = plain_or_float8(reader, [name for name in rest if not (packed and RUN_TIME.fullmatch(name))], dtype)
    return Entries(joined(others.entries, weights_of(packed, lambda parts: float4_entry(parts, dtype))), others.notes)


def float4_entry(parts: Parts, dtype: torch.dtype) -> Entry:
    """A weight in 4-bit floats, as compressed-tensors (weight_packed, weight_global_scale) and Model Optimizer hold it."""
    data = "weight_packed" if "weight_packed" in parts else "weight"
    factor = next((part for part in ("weight_global_scale", "weight_scale_2") if part in parts), None)
    spec, scale, name = parts.spec(data), parts.spec("weight_scale"), parts.module
    fmt, dtypes = (float4.MX, (torch.uint8, torch.float8_e8m0fnu)) if factor is None else (float4.NV, (torch.float8_e4m3fn,))
    shape = float4.shape_of(_empty(spec), _empty(scale), fmt, dtypes, name)

    def read(wanted: torch.dtype | None) -> Codes:
        found = parts.tensors()
        if factor is None:
            return float4.read_mx(found[data], found["weight_scale"], name)
        return float4.read_nv(found[data], found["weight_scale"], found[factor], name, divide=factor == "weight_global_scale")

    form = "MXFP4" if factor is None else "NVFP4"
    return parts.entry(TensorSpec(dtype, shape), read, Quantized(fmt, form))


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def mxfp4(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    """gpt-oss: stacks of experts as `<name>_blocks` uint8 [E, N, K/32, 16] and `<name>_scales` uint8 [E, N, K/32]; in floats [E, K, N]."""
    entries: dict[str, Entry] = {}
    rest = dict.fromkeys(reader.places)
    for blocks in [name for name in rest if name.endswith(_MX[0])]:
        name = blocks.removesuffix(_MX[0])
        scales = f"{name}{_MX[1]}"
        if scales not in rest:
            raise CheckpointError(f"there is {blocks}, but no {scales}: the checkpoint is damaged")
        entries[name] = _mxfp4_entry(Parts(reader, name, {"blocks": blocks, "scales": scales}), dtype)
        del rest[blocks], rest[scales]
    return Entries(joined(entries, plain_entries(reader, rest)))


def _mxfp4_entry(parts: Parts, dtype: torch.dtype) -> Entry:
    blocks, scales = parts.spec("blocks"), parts.spec("scales")
    shape = blocks.shape
    if len(shape) != 4 or shape[3] != 16 or scales.shape != shape[:3] or blocks.dtype != torch.uint8:
        what = f"{parts.names['blocks']} is {list(shape)} and {parts.names['scales']} {list(scales.shape)}"
        raise CheckpointError(f"{what}, not blocks of 32 weights with a scale each: the checkpoint is damaged")
    return parts.entry(
        TensorSpec(dtype, (shape[0], 32 * shape[2], shape[1])),
        lambda _: float4.read_mx(parts.read("blocks").flatten(2), parts.read("scales"), parts.module),
        Quantized(float4.MX, "MXFP4", transposed=True, from_floats=True),
    )


def bnb(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    """bitsandbytes, 4 and 8 bits."""
    eights, rest = modules_of(reader, bitsandbytes.EIGHT)
    entries = weights_of(eights, lambda parts: _eight(parts, dtype))
    forms: Counter[str] = Counter()
    for kind, part in bitsandbytes.STATES.items():
        fours, rest = modules_of(reader, (part, *bitsandbytes.NUMBERS), rest)
        for name, parts in fours.items():  # the name of the weight itself, to which those of its parts are appended
            if name not in rest:
                raise CheckpointError(f"there is {name}.{part}, but no {name}: the checkpoint is damaged")
            rest.remove(name)
            entries[name] = _four(replace(parts, names={**parts.names, "weight": name}), part, kind, dtype)
            forms[kind] += 1
    return Entries(joined(entries, plain_entries(reader, rest)), notes(forms, 0))


def _eight(parts: Parts, dtype: torch.dtype) -> Entry:
    if "weight" not in parts or len(shape := parts.spec("weight").shape) != 2:
        raise CheckpointError(f"{parts.module} has an SCB, but its weight is missing or not a matrix: the checkpoint is damaged")
    quantized = Quantized(bitsandbytes.CHANNEL, "bitsandbytes, 8 bits")
    return parts.entry(TensorSpec(dtype, shape), lambda _: bitsandbytes.read_eight(parts.tensors(), parts.module), quantized)


def _four(parts: Parts, state_part: str, kind: str, dtype: torch.dtype) -> Entry:
    name, stored = parts.module, parts.spec("weight")
    state = bitsandbytes.State.of(parts.read(state_part), name)
    if 2 * stored.nbytes not in (state.count, state.count + 1):
        raise CheckpointError(f"{name} has {stored.nbytes} bytes for {list(state.shape)} of 4 bits: the checkpoint is damaged")
    numbers = parts.only(part for part in parts.names if part != state_part)
    return parts.entry(
        TensorSpec(dtype, state.shape),
        lambda wanted: bitsandbytes.read_four(numbers.tensors(), state, wanted or dtype, name),
        stored_as=f"bitsandbytes {kind}, a scale for each {state.block}",
    )
