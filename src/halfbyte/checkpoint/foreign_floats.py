"""Folders with low-precision floating-point weights: 8-bit floats with scales (DeepSeek, Qwen and many others), MXFP4 (gpt-oss), NVFP4
(Model Optimizer, compressed-tensors), and bitsandbytes.

4-bit floats and bitsandbytes' 8-bit integers become codes. 8-bit floats, nf4 and fp4 are not multiples of one step: they are
dequantized as they are read, which reports mention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, Entry, Quantized, plain_entries
from halfbyte.checkpoint.foreign_tensors import modules_of, nbytes_of, read_parts
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.io import bitsandbytes, float4, float8
from halfbyte.io.safetensors import Reader
from halfbyte.io.tensors import Spec

# The names of the scales of an 8-bit floating-point weight.
_SCALES = ("{name}_scale_inv", "{name}_scale", "{module}.scale")
# Scales of activations and of caches, which are not used.
_OTHERS = ("input_scale", "input_scale_ub", "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")
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
        spec, its = reader.spec(name), reader.spec(scale)
        rows, columns = float8.rectangle(spec.shape, its.shape, its.dtype, block, name)
        whole = (rows, columns) == spec.shape[-2:]
        form = f"{str(spec.dtype).removeprefix('torch.')}, one scale" + ("" if whole else f" for each {rows} x {columns}")

        def read(wanted: torch.dtype | None, name: str = name, scale: str = scale, block: tuple[int, int] = (rows, columns)) -> Tensor:
            return float8.read(reader.read(name), reader.read(scale), block, wanted or dtype, name)

        entries[name] = Entry(Spec(dtype, spec.shape), spec.nbytes + its.nbytes, read, form=form)
        forms["8-bit floats"] += 1
        del rest[name]
        rest.pop(scale, None)
    dropped = [name for name in rest if entries and name.endswith(_OTHERS)]
    return Entries(entries | plain_entries(reader, [name for name in rest if name not in dropped]), notes(forms, len(dropped)), reader)


def notes(forms: Mapping[str, int], dropped: int) -> list[str]:
    """Notes for the report about dequantized weights, by their form, and about unused scales of activations."""
    found = [f"{count} weights are {form}, dequantized as they are read: pass a format to load or quantize to keep the model small"
             for form, count in forms.items()]  # fmt: skip
    return found + ([f"activations are not quantized: {dropped} scales for them are not used"] if dropped else [])


def fp8(reader: Reader, settings: dict[str, Any], dtype: torch.dtype) -> Entries:
    """As DeepSeek and Qwen write it (quant_method fp8), FBGEMM (fbgemm_fp8) and AutoFP8."""
    return plain_or_float8(reader, None, dtype, block_of(settings.get("weight_block_size")))


def block_of(value: object) -> tuple[int, int] | None:
    """Rows and columns that share a scale, if a config gives them."""
    sound = isinstance(value, list) and len(value) == 2 and all(type(size) is int and 0 < size < 1 << 31 for size in value)
    return (value[0], value[1]) if sound and isinstance(value, list) else None


def modelopt(reader: Reader, settings: dict[str, Any], dtype: torch.dtype) -> Entries:
    """NVIDIA's Model Optimizer: FP8 and NVFP4."""
    packed, rest = modules_of(reader, ("weight", "weight_scale", "weight_scale_2"), None, lambda spec: spec.dtype == torch.uint8)
    others = plain_or_float8(reader, [name for name in rest if not (packed and name.endswith(_OTHERS))], dtype)
    return Entries(
        {**others.entries, **{f"{n}.weight": float4_entry(reader, n, parts, dtype) for n, parts in packed.items()}}, others.notes
    )


def float4_entry(reader: Reader, name: str, parts: Mapping[str, str], dtype: torch.dtype) -> Entry:
    """A weight in 4-bit floats, as compressed-tensors (weight_packed, weight_global_scale) and Model Optimizer hold it."""
    data = "weight_packed" if "weight_packed" in parts else "weight"
    factor = next((part for part in ("weight_global_scale", "weight_scale_2") if part in parts), None)
    if "weight_scale" not in parts:
        raise CheckpointError(f"{name} has no weight_scale: the checkpoint is damaged")
    spec, scale = reader.spec(parts[data]), reader.spec(parts["weight_scale"])
    fmt, dtypes = (float4.MX, (torch.uint8, torch.float8_e8m0fnu)) if factor is None else (float4.NV, (torch.float8_e4m3fn,))
    shape = float4.shape_of(_empty(spec), _empty(scale), fmt, dtypes, name)

    def read(wanted: torch.dtype | None) -> Any:
        found = read_parts(reader, parts)
        if factor is None:
            return float4.read_mx(found[data], found["weight_scale"], name)
        return float4.read_nv(found[data], found["weight_scale"], found[factor], name, divide=factor == "weight_global_scale")

    form = "MXFP4" if factor is None else "NVFP4"
    return Entry(Spec(dtype, shape), nbytes_of(reader, parts), read, Quantized(fmt, form))


def _empty(spec: Spec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def mxfp4(reader: Reader, settings: dict[str, Any], dtype: torch.dtype) -> Entries:
    """gpt-oss: stacks of experts as `<name>_blocks` uint8 [E, N, K/32, 16] and `<name>_scales` uint8 [E, N, K/32]; in floats [E, K, N]."""
    entries: dict[str, Entry] = {}
    rest = dict.fromkeys(reader.places)
    for blocks in [name for name in rest if name.endswith(_MX[0])]:
        name = blocks.removesuffix(_MX[0])
        scales = f"{name}{_MX[1]}"
        if scales not in rest:
            raise CheckpointError(f"there is {blocks}, but no {scales}: the checkpoint is damaged")
        shape, its = reader.spec(blocks).shape, reader.spec(scales).shape
        if len(shape) != 4 or shape[3] != 16 or its != shape[:3] or reader.spec(blocks).dtype != torch.uint8:
            what = f"{blocks} is {list(shape)} and {scales} {list(its)}"
            raise CheckpointError(f"{what}, not blocks of 32 weights with a scale each: the checkpoint is damaged")

        def read(wanted: torch.dtype | None, blocks: str = blocks, scales: str = scales, name: str = name) -> Codes:
            return float4.read_mx(reader.read(blocks).flatten(2), reader.read(scales), name)

        size = reader.spec(blocks).nbytes + reader.spec(scales).nbytes
        quantized = Quantized(float4.MX, "MXFP4", transposed=True, floats=True)
        entries[name] = Entry(Spec(dtype, (shape[0], 32 * shape[2], shape[1])), size, read, quantized)
        del rest[blocks], rest[scales]
    return Entries(entries | plain_entries(reader, rest))


def bnb(reader: Reader, settings: dict[str, Any], dtype: torch.dtype) -> Entries:
    """bitsandbytes, 4 and 8 bits."""
    eights, rest = modules_of(reader, bitsandbytes.EIGHT)
    entries: dict[str, Entry] = {}
    for name, parts in eights.items():
        if "weight" not in parts or len(shape := reader.spec(parts["weight"]).shape) != 2:
            raise CheckpointError(f"{name} has an SCB, but its weight is missing or not a matrix: the checkpoint is damaged")

        def read(wanted: torch.dtype | None, name: str = name, parts: Mapping[str, str] = parts) -> Any:
            return bitsandbytes.read_eight(read_parts(reader, parts), name)

        quantized = Quantized(bitsandbytes.CHANNEL, "bitsandbytes, 8 bits")
        entries[f"{name}.weight"] = Entry(Spec(dtype, shape), nbytes_of(reader, parts), read, quantized)
    forms: Counter[str] = Counter()
    for kind, part in bitsandbytes.STATES.items():
        fours, rest = modules_of(reader, (part, *bitsandbytes.NUMBERS), rest)
        for name, parts in fours.items():  # the name of the weight itself, to which those of its parts are appended
            if name not in rest:
                raise CheckpointError(f"there is {name}.{part}, but no {name}: the checkpoint is damaged")
            rest.remove(name)
            entries[name] = _four(reader, name, {**parts, "weight": name}, parts[part], kind, dtype)
            forms[kind] += 1
    return Entries(entries | plain_entries(reader, rest), notes(forms, 0))


def _four(reader: Reader, name: str, parts: Mapping[str, str], state_name: str, kind: str, dtype: torch.dtype) -> Entry:
    state = bitsandbytes.State.of(reader.read(state_name), name)
    tensors = {part: full for part, full in parts.items() if full != state_name}

    def read(wanted: torch.dtype | None) -> Tensor:
        return bitsandbytes.read_four(read_parts(reader, tensors), state, wanted or dtype, name)

    if 2 * reader.spec(name).nbytes not in (state.count, state.count + 1):
        raise CheckpointError(f"{name} has {reader.spec(name).nbytes} bytes for {list(state.shape)} of 4 bits: the checkpoint is damaged")
    return Entry(Spec(dtype, state.shape), nbytes_of(reader, parts), read, form=f"bitsandbytes {kind}, a scale for each {state.block}")
