"""Folders that other projects quantized: AWQ, GPTQ, compressed-tensors, transformers with halfbyte, and those of
affine.py and floats.py. Their codes are used as they are: no weight is quantized again.

`quantization_config` in config.json names the project. Its settings of single modules are checked against the tensors, which take
precedence. Older folders of AWQ and GPTQ have it in a separate file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, cast

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, Entry, Quantized, ReadColumnOrder, joined, plain_entries
from halfbyte.checkpoint.files import AWQ_SETTINGS, GPTQ_SETTINGS, MODELOPT_SETTINGS
from halfbyte.checkpoint.foreign.affine import of_hqq, of_torchao
from halfbyte.checkpoint.foreign.floats import block_of, bnb, float4_entry, fp8, modelopt, mxfp4, plain_or_float8
from halfbyte.checkpoint.foreign.tensors import Parts, modules_of, weights_of
from halfbyte.checkpoint.mapping.architecture import module_classes
from halfbyte.checkpoint.mapping.left_out import CACHE_PARTS
from halfbyte.checkpoint.native import quantization_config
from halfbyte.checkpoint.native.quantization_config import dtype_of
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.dense import from_dense
from halfbyte.formats.spec import Format
from halfbyte.io.files import is_file
from halfbyte.io.safetensors import Reader, load_json
from halfbyte.io.tensors import TensorSpec
from halfbyte.io.weights import awq, compressed_tensors, gptq, zero_points
from halfbyte.nn.described import ORDER
from halfbyte.nn.modules.quantized import guard

_FLOAT4 = ("weight_packed", "weight_scale", "weight_global_scale")
# Parts of compressed-tensors' layouts of 2:4 sparse weights: sparse-24-bitmask and sparse-bitmask, marlin-24.
_SPARSE = (".compressed", ".bitmask", ".row_offsets", ".scale_packed", ".meta")
# Tensors of a compressed-tensors module besides its weight: scales of activations and caches.
_ACTIVATION_PARTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "weight_observer", "input_global_scale")
_GPTQ_FORMS = ("gptq", "gptq_v2")
_LONGEST_PATTERN = 1 << 16  # characters
_PATTERN_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escaped one, or a set of them
_PATTERN_FLAGS = re.compile(r"\A\(\?[aimsu]+\)")
_PATTERN_GROUP = re.compile(r"\(\?(?:[:>]|P<\w+>|[aimsu-]+:)")  # the beginning of one that is not a plain "("
_PATTERN_LOOK = re.compile(r"\(\?<?[=!]")  # the beginning of a condition on what follows or precedes
_PATTERN_TOKEN = re.compile(r"[(\0|]|[^(\0|](?:[*+?{][?+]?)?", re.DOTALL)
_MOST_STEPS = 1 << 24  # in which a pattern is matched: a fraction of a second
_MOST_POINTS = 1 << 22  # zero points that are read to determine a version
# The remedy for folders whose tensors only their project's own classes can interpret.
_ELSEWHERE = "dequantize it with transformers and {0} (model.dequantize(), save_pretrained), or start from the float model"
_REMEDIES = {name: _ELSEWHERE.format(name) for name in ("quanto", "quark", "auto-round", "eetq", "aqlm", "vptq", "higgs")}


def settings_of(folder: Path, config: Mapping[str, object]) -> object:
    """The quantization_config of a folder with this config.json, or the settings file of an older folder; None where it has neither."""
    if (settings := config.get(quantization_config.SETTINGS)) is not None:
        return settings
    if is_file(folder / GPTQ_SETTINGS):  # AutoGPTQ also stores AWQ models, and then says so
        return {"quant_method": "gptq", **load_json(folder / GPTQ_SETTINGS)}
    if is_file(folder / MODELOPT_SETTINGS):
        return {"quant_method": "modelopt"}
    if not is_file(folder / AWQ_SETTINGS):
        return None
    found = load_json(folder / AWQ_SETTINGS)
    renamed = {"w_bit": "bits", "q_group_size": "group_size"}
    return {"quant_method": "awq", **{renamed.get(name, name): value for name, value in found.items()}}


def read_folder(reader: Reader, config: Mapping[str, Any]) -> Entries:
    """The tensors of a folder whose config.json has a quantization_config; raises CheckpointError for an unknown project."""
    settings = config[quantization_config.SETTINGS]
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    known: dict[str, Callable[[Reader, dict[str, object], torch.dtype], Entries]] = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": partial(_compressed_tensors, config=config),
        "compressed_tensors": partial(_compressed_tensors, config=config),
        quantization_config.METHOD: _halfbyte,
        "fp8": fp8,
        "fbgemm_fp8": fp8,
        "mxfp4": mxfp4,
        "modelopt": modelopt,
        "modelopt_fp4": modelopt,
        "bitsandbytes": bnb,
        "hqq": of_hqq,
        "torchao": of_torchao,
    }
    if method is None and isinstance(settings, dict) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"  # as written before 2023
    if method == "auto-round":  # writes folders in the layouts of other projects
        method = next((name for name in ("gptq", "awq") if name in str(settings.get("packing_format"))), method)
    if not isinstance(method, str) or method not in known:
        remedy = _REMEDIES.get(str(method), "start from the float model")
        raise CheckpointError(f"config.json says quant_method {short(method)}, halfbyte reads {', '.join(known)}: {remedy}")
    dtype = dtype_of(config) or torch.float16
    return known[method](reader, settings, dtype)


def read_plain(reader: Reader, config: Mapping[str, object]) -> Entries:
    """The tensors of a folder without a quantization_config; 8-bit floats are recognized by their scales."""
    dtype = dtype_of(config)
    usual = (spec.dtype for spec in reader.specs().values() if spec.dtype in zero_points.SCALES and len(spec.shape) > 1)
    return plain_or_float8(reader, None, dtype or next(usual, torch.bfloat16))


def _awq(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        what = f"{short(bits)} bits in AWQ's version {short(version)}"
        raise CheckpointError(f"config.json says {what}, halfbyte reads 4 bits in version gemm: convert it with AutoAWQ")
    group = _group_size(settings)
    modules, rest = modules_of(reader, awq.PARTS)
    if scaled := next((name for name in rest if name.endswith(".scales") and len(reader.spec(name).shape) == 1), None):
        raise CheckpointError(f"{scaled} divides an activation function, which halfbyte does not: start from the float model")

    def entry(parts: Parts) -> Entry:
        k, words = _words_shape(parts)
        fmt = _points_format(parts, 4, group, 8 * words, zero_points.middle(4))
        return parts.entry(
            TensorSpec(dtype, (8 * words, k)), lambda _: awq.read(parts.tensors(), group, parts.module), Quantized(fmt, "AWQ")
        )

    return Entries(joined(weights_of(modules, entry), plain_entries(reader, rest)))


def _gptq(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    bits, _ = _of_module(settings, "")
    form = settings.get("checkpoint_format") or ("marlin" if settings.get("is_marlin_format") is True else "gptq")
    if form not in _GPTQ_FORMS:
        what = f"config.json says checkpoint_format {short(form)}, halfbyte reads {', '.join(_GPTQ_FORMS)}"
        raise CheckpointError(f"{what}: convert it with GPTQModel, or start from the float model")
    claimed = 2 if settings.get("checkpoint_format") == "gptq_v2" else 1
    modules, rest = modules_of(reader, gptq.PARTS)
    version = _judge(modules, bits, bool(settings.get("sym", False)), claimed)

    def entry(parts: Parts) -> Entry:
        bits, group = _of_module(settings, parts.module)
        words, n = _words_shape(parts)
        k = words * 32 // bits
        fmt = _points_format(parts, bits, group, n, zero_points.middle(bits) - (version == 1))
        order = _order(parts, "g_idx", k, zero_points.block_of(group, k))
        quantized = Quantized(fmt, "GPTQ", order)
        return parts.entry(
            TensorSpec(dtype, (n, k)), lambda _: gptq.read(parts.tensors(), bits, group, version, parts.module)[0], quantized
        )

    lies = f"config.json says GPTQ version {claimed}, the zero points are those of version {version}, which is used"
    return Entries(joined(weights_of(modules, entry), plain_entries(reader, rest)), [lies] if version != claimed else [])


def _of_module(settings: Mapping[str, object], name: str) -> tuple[int, int]:
    """Bits and block size of a module, which patterns under `dynamic` may override."""
    module_settings = dict(settings)
    dynamic = settings.get("dynamic")
    for pattern, changes in dynamic.items() if isinstance(dynamic, dict) and name else ():
        if not pattern.startswith("-:") and isinstance(changes, dict) and _matches(pattern.removeprefix("+:"), name):
            module_settings |= changes
            break
    exact = settings.get("extra_config")  # AutoRound's, by name
    if isinstance(exact, dict) and isinstance(exact.get(name), dict):
        module_settings |= exact[name]
    bits = module_settings.get("bits")
    if bits not in (4, 8):
        raise CheckpointError(f"config.json says {short(bits)} bits, halfbyte reads GPTQ of 4 and 8: start from the float model")
    return int(bits), _group_size(module_settings)


def _order(parts: Parts, part: str, k: int, block: int) -> ReadColumnOrder | None:
    """A function that reads the order of a weight's columns; None where it is that of the inputs."""
    if part not in parts:
        return None

    def read() -> Tensor | None:
        g_idx = zero_points.take({part: parts.read(part)}, part, (torch.int32, torch.int64), (k,), parts.module)
        unused = bool((g_idx == -1).all())  # how compressed-tensors marks that there is none
        return None if unused else gptq.order_of(g_idx, block, parts.module)

    return None if read() is None else cast(ReadColumnOrder, read)


def _compressed_tensors(reader: Reader, settings: dict[str, object], dtype: torch.dtype, config: Mapping[str, object]) -> Entries:
    groups = settings.get("config_groups") or {}  # none, where only caches are quantized, or weights are only sparse
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(
            f"the config_groups of quantization_config are {short(groups)}, not an object of objects: the checkpoint is damaged"
        )
    if (place := _online_transform(settings.get("transform_config"))) is not None:
        raise CheckpointError(f"its transform_config changes values at {short(place)} as the model runs, which halfbyte does not read: "
                              "start from the float model")  # fmt: skip
    _check_dense(reader, settings)
    small, rest = modules_of(reader, _FLOAT4, None, lambda spec: spec.dtype == torch.uint8)
    packed, rest = modules_of(reader, compressed_tensors.PACKED, rest)
    integer, rest = modules_of(reader, compressed_tensors.INTEGER, rest, lambda spec: spec.dtype == torch.int8)
    dropped = [name for name in rest if name.rpartition(".")[2] in (*_ACTIVATION_PARTS, *CACHE_PARTS)]
    others = plain_or_float8(reader, [name for name in rest if name not in dropped], dtype, _rectangle(groups))
    odd = [name for name in others.entries if name.rpartition(".")[2] in compressed_tensors.PACKED and not name.endswith(".weight")]
    if odd:
        what = f"{odd[0]} belongs to a weight of {str(settings.get('format'))[:40]}, neither integers nor floats of 4 or 8 bits"
        raise CheckpointError(f"{what} that halfbyte reads: start from the float model")
    entries = weights_of(small, lambda parts: float4_entry(parts, dtype))
    classes = _classes(reader, packed.keys() | integer.keys(), groups, config)
    notes: list[str] = []
    entries |= weights_of(packed | integer, lambda parts: _ct_entry(parts, _group_of(parts.module, groups, classes), dtype, notes))
    if dropped:
        notes.append(f"activations and caches are not quantized statically: {len(dropped)} scales and zero points of them are not used")
    return Entries(joined(others.entries, entries), [*others.notes, *notes])


def _classes(
    reader: Reader, modules: Collection[str], groups: Mapping[str, Mapping[str, Any]], config: Mapping[str, object]
) -> Mapping[str, set[str]]:
    """The names of the classes of modules and their base classes, where a target may name one that is not Linear."""
    targets = [target for group in groups.values() if isinstance(group.get("targets"), list) for target in group["targets"]]
    if all(not isinstance(target, str) or target == "Linear" or target.startswith("re:") or target in modules for target in targets):
        return {}
    # Eight codes of 4 bits in a word: the sizes by which a config is judged must not be smaller than those of the floats.
    sizes = [(*spec.shape, 8) for spec in reader.specs().values()]
    return module_classes(config, list(modules), sizes)


def _check_dense(reader: Reader, settings: Mapping[str, object]) -> None:
    """Raise CheckpointError for compressed-tensors' layouts of sparse weights."""
    for name in reader.places:
        if name.endswith(_SPARSE):
            said = settings.get("sparsity_config")
            form = said.get("format") if isinstance(said, dict) else None
            what = f"{name} belongs to a weight in the sparse layout {form or settings.get('format')!s:.40}"
            raise CheckpointError(f"{what}, which halfbyte does not read: take the float model, or one that is pack-quantized")


def _online_transform(transforms: object) -> object:
    """The first place of transforms that are applied as the model runs, not to the stored weights; None where there is none."""
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    lists = [group.get("apply") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    places = [each.get("location") for found in lists if isinstance(found, list) for each in found if isinstance(each, dict)]
    return next((place for place in places if not str(place).startswith("weight_")), None)


def _rectangle(groups: Mapping[str, Mapping[str, object]]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, if one of the groups gives them."""
    weights = [group.get("weights") for group in groups.values()]
    return next((found for each in weights if isinstance(each, dict) and (found := block_of(each.get("block_structure")))), None)


def _ct_entry(parts: Parts, group: Mapping[str, object], dtype: torch.dtype, notes: list[str]) -> Entry:
    bits = 8
    if "weight_packed" in parts:
        bits = _ct_bits(parts, group, notes)
        shape = compressed_tensors.shape_of(parts.spec("weight_packed").shape, parts.read("weight_shape"), bits, parts.module)
    else:
        found = parts.spec("weight").shape
        if len(found) != 2:
            raise CheckpointError(f"{parts.module}.weight is int8 {list(found)}, halfbyte reads matrices: start from the float model")
        shape = (found[0], found[1])
    scale = parts.spec("weight_scale")
    blocks = scale.shape[1] if len(scale.shape) == 2 else 1
    points = compressed_tensors.points_of(parts.only(["weight_zero_point"]).tensors(), bits, (shape[0], blocks), parts.module)
    symmetric = points is None or bool((points == zero_points.middle(bits)).all())
    weights = group.get("weights")
    configured = weights.get("group_size") if isinstance(weights, dict) else None
    size = compressed_tensors.group_size_of(shape[1], blocks, configured, parts.module)
    fmt = Format(bits, "channel" if size < 0 else size, "none" if symmetric else "point", parts.scale_dtype("weight_scale"))
    order = _order(parts, "weight_g_idx", shape[1], zero_points.block_of(size, shape[1]))
    quantized = Quantized(fmt, "compressed-tensors", order, *_activation(group))
    return parts.entry(
        TensorSpec(dtype, shape), lambda _: compressed_tensors.read(parts.tensors(), bits, configured, parts.module)[0], quantized
    )


def _ct_bits(parts: Parts, group: Mapping[str, object], notes: list[str]) -> int:
    """The bits of packed codes: those that the config says, or, where these do not fit the tensor, the ones that do."""
    weights, name = group.get("weights"), parts.module
    said = weights.get("num_bits") if isinstance(weights, dict) else None
    stored = compressed_tensors.bits_of(parts.spec("weight_packed").shape, parts.read("weight_shape"))
    bits = said if said is None or said in stored or not stored else stored[0]
    kind = weights.get("type", "int") if isinstance(weights, dict) else "int"
    if bits not in (4, 8) or kind != "int":
        what = f"config.json says {name} is packed in {short(said)} bits of type {short(kind)}"
        what += f", its tensor in {bits}" if bits != said else ""
        raise CheckpointError(f"{what}: halfbyte reads integers of 4 and 8 bits, start from the float model")
    if bits != said:
        notes.append(f"config.json says {short(said)} bits for {name}, its tensor has {bits}, which are used")
    return int(bits)


def _group_of(name: str, groups: Mapping[str, Mapping[str, object]], classes: Mapping[str, set[str]]) -> Mapping[str, object]:
    """The config group whose targets match a module: its name, a pattern `re:…`, or else its class, Linear where that is not known."""
    lists = {key: [t for t in targets if isinstance(t, str)] for key, g in groups.items() if isinstance(targets := g.get("targets"), list)}
    for key, targets in lists.items():
        if any(target == name or (target.startswith("re:") and _matches(target[3:], name)) for target in targets):
            return groups[key]
    class_names = classes.get(name, {"Linear"})
    return next((groups[key] for key, targets in lists.items() if not class_names.isdisjoint(targets)), {})


def _matches(pattern: str, name: str) -> bool:
    """Match as compressed-tensors does. A pattern that is no regular expression never matches.

    Raises:
        CheckpointError: The match may take seconds or years.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    ways, repetitions = _ways(pattern)
    if math.comb(len(name) + repetitions, repetitions) * ways > _MOST_STEPS:
        what = f"config.json has the pattern {short(pattern)}, whose match with {short(name)} may take exponential time"
        raise CheckpointError(f"{what}: write it without repeated groups and with fewer repetitions and alternatives")
    return compiled.match(name) is not None


@lru_cache(maxsize=256)
def _ways(pattern: str) -> tuple[int, int]:
    """Bound the ways through a regular expression, and the repetitions of each: Python's `re` tries all ways, and for each of them all ways
    to share the text among its repetitions. More than _MOST_STEPS where that is not known."""
    plain = _PATTERN_LOOK.sub("\0", _PATTERN_GROUP.sub("(", _PATTERN_CHARACTER.sub("x", _PATTERN_FLAGS.sub("", pattern))))
    if len(pattern) > _LONGEST_PATTERN or "\0" in pattern or "(?" in plain:
        return _MOST_STEPS + 1, 0
    # The open groups: ways and repetitions of their finished alternatives, and of the one that is being read; whether it is a condition.
    groups = [(0, 0, 1, 0, False)]
    for token in [*_PATTERN_TOKEN.findall(plain), "|"]:
        done, most, ways, repetitions, look = groups.pop()
        if token in "(\0":
            groups += [(done, most, ways, repetitions, look), (0, 0, 1, 0, token == "\0")]
        elif token == "|":
            groups.append((done + ways, max(most, repetitions), 1, 0, look))
        else:
            inner, ended = (1, 0), False
            if token[0] == ")":
                inner, ended = (done + ways, max(most, repetitions)), look
                done, most, ways, repetitions, look = groups.pop()
            if token == ")" and ended and inner != (1, 0):  # what follows does not try a condition's ways again
                done, most, inner = done + ways * inner[0], max(most, repetitions + inner[1]), (1, 0)
            elif token[1:2] == "?":
                inner = inner[0] + 1, inner[1]
            elif token[1:]:
                inner = (1, 1) if inner == (1, 0) else (_MOST_STEPS + 1, 0)
            groups.append((min(done, _MOST_STEPS + 1), most, min(ways * inner[0], _MOST_STEPS + 1), repetitions + inner[1], look))
    return groups[0][:2]


def _activation(group: Mapping[str, object]) -> tuple[str, str]:
    """The compute of a group: with activations quantized to 8 bits per row, or in floating point where it does not mention them."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict) or inputs.get("num_bits") != 8 or inputs.get("type", "int") != "int":
        return "auto", "block"
    return "int8", "row" if inputs.get("symmetric", True) else "row_offset"


def _halfbyte(reader: Reader, settings: dict[str, object], dtype: torch.dtype) -> Entries:
    """A model that halfbyte quantized and transformers saved: codes as in a checkpoint, and a guard under the weight's own name."""
    found, rest = modules_of(reader, ("weight.data", "weight.scale", "weight.zero", "weight", ORDER))
    known, guarded = quantization_config.parse(settings), guard()

    def entry(parts: Parts) -> Entry:
        if (module := known.get(parts.module)) is None:
            raise CheckpointError(f"config.json does not say what format {parts.module} has: the checkpoint is damaged")
        if module.ordered:
            parts.require(ORDER)
        if "weight" in parts and parts.spec("weight") != TensorSpec(guarded.dtype, tuple(guarded.shape)):
            raise CheckpointError(f"the files hold {parts.module}.weight twice, in two ways: remove the tensors of one of them")
        stored = [f"weight.{part}" for part in stored_tensors(module.format, module.shape)]

        def read(_: torch.dtype | None) -> Codes:
            tensors = {part.removeprefix("weight."): tensor for part, tensor in parts.only(stored).tensors().items()}
            return from_dense(module.format, module.shape, tensors)

        order = partial(parts.read, ORDER) if module.ordered else None
        quantized = Quantized(module.format, "halfbyte", order, module.compute, module.activation)
        return parts.entry(TensorSpec(dtype, module.shape), read, quantized)

    return Entries(joined(weights_of(found, entry), plain_entries(reader, rest)))


def _group_size(settings: Mapping[str, object]) -> int:
    size = settings.get("group_size", 128)
    if type(size) is not int or not (size == -1 or 0 < size < 10**9):
        raise CheckpointError(f"config.json says group_size {short(size)}, neither a number of weights nor -1: the checkpoint is damaged")
    return size


def _words_shape(parts: Parts) -> tuple[int, int]:
    """Rows and columns of the packed codes; raises CheckpointError where something is missing."""
    parts.require("qweight", "qzeros", "scales")
    shape = parts.spec("qweight").shape
    if len(shape) != 2 or min(shape) < 1:
        raise CheckpointError(f"{parts.module}.qweight has shape {list(shape)}, halfbyte reads matrices: start from the float model")
    return shape[0], shape[1]


def _stored_points(parts: Parts, bits: int, n: int) -> Tensor:
    """The zero points of a weight as they are stored, uint8 [blocks, N]."""
    stored = zero_points.take({"qzeros": parts.read("qzeros")}, "qzeros", (torch.int32,), (None, None), parts.module)
    return zero_points.unpack(stored, bits, n)


def _points_format(parts: Parts, bits: int, group: int, n: int, middle: int) -> Format:
    """The format of a weight with zero points; symmetric if all are the middle of the range."""
    symmetric = bool((_stored_points(parts, bits, n) == middle).all())
    return Format(bits, group if group > 0 else "channel", "none" if symmetric else "point", parts.scale_dtype("scales"))


def _judge(modules: Mapping[str, Parts], bits: int, symmetric: bool, claimed: int) -> int:
    """The version of a GPTQ model, determined from the zero points of as many modules as needed."""
    seen: list[Tensor] = []
    for parts in modules.values():
        seen.append(_stored_points(parts, bits, _words_shape(parts)[1]).flatten())
        if sum(map(len, seen)) > _MOST_POINTS:
            break
    return gptq.version_of(torch.cat(seen), bits, symmetric, claimed) if seen else claimed
