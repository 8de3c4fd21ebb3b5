"""Saves a model to a checkpoint on disk."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.mapping.generation_settings import FILE as GENERATION_CONFIG
from halfbyte.checkpoint.native.folder import Staging, replacing, write_json
from halfbyte.checkpoint.native.manifest import INDEX, Manifest, Weight
from halfbyte.checkpoint.native.model_card import CardWeight, model_card, write_card
from halfbyte.checkpoint.native.quantization_config import SETTINGS, Module, describe, dtype_of, with_branches
from halfbyte.checkpoint.wrappers import unwrapped, without_parts
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError, check_type, model_path
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import to_dense
from halfbyte.io.safetensors import SHARD_BYTES, Writer
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.candidates import direct_tensors
from halfbyte.nn.described import ORDER, Calibrated
from halfbyte.nn.modules.conv import QuantConv2d, fold_of
from halfbyte.nn.modules.experts import QuantExperts
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule, guard
from halfbyte.nn.modules.rescaled import as_trained
from halfbyte.nn.parallel.parallelize import PARTS_ONLY, is_parallel
from halfbyte.nn.static.build import calibration_of
from halfbyte.nn.training.fake_quantized import check_not_in_training
from halfbyte.quantizers.check import non_finite

_HEAD, _UNTIED = "lm_head.weight", {"tie_word_embeddings": False}


def save(model: nn.Module, dir: str | PathLike[str], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Save a model to a folder: quantized weights in canonical order, everything else in its state_dict unchanged.

    The config of a transformers model is saved too, so that `load` can build it again; for any other model, `load` must be passed the
    model, and for a network on int8 codes the float one. A halfbyte checkpoint in `dir` is replaced in one step and remains unchanged on
    failure. A model card, README.md, is written unless the folder has one of the user's.

    Args:
        model: A quantized model.
        dir: The folder.
        shard_bytes: The most bytes of a file.

    Returns:
        None.

    Raises:
        CheckpointError: The disk is full, a permission is missing, or the folder holds another model.
        ArgumentError: A tensor has no data, or the model is between `prepare_qat_` and `convert_qat_`.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> hb.save(model, folder / "model")
    """
    check_type(model, nn.Module, "save takes a model, a torch.nn.Module", "pass the model that holds it")
    check_not_in_training(model, "call convert_qat_ first, or keep the state of the training with torch.save(model.state_dict(), file)")
    if is_parallel(model):
        raise UnsupportedError(PARTS_ONLY)
    with as_trained(model := unwrapped(model)):
        _save(model, dir, shard_bytes)


@dataclass
class _Tensors:
    """The tensors of a model, each under the first of the names that it has.

    Attributes:
        plain: Those that are not quantized.
        modules: Name of a quantized weight -> its module.
        tied: Further name of a tensor -> its first one.
        settings: Name of a quantized weight -> compute and activation of a module that multiplies by it.
    """

    plain: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, QuantModule] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)


def _tensors_of(model: nn.Module) -> _Tensors:
    """Find all tensors of a model.

    Raises:
        ArgumentError: One has no data, or holds a value that `load` refuses.
        UnsupportedError: A module has state that is not a tensor.
    """
    found = _Tensors()
    first_names: dict[int, str] = {}  # id of a tensor -> the first of its names
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UnsupportedError(f"{prefix or 'the model'} has extra state that is not a tensor, which a checkpoint cannot hold")
        dot = without_parts(f"{prefix}." if prefix else "")
        if isinstance(module, QuantModule):
            name = f"{dot}weight"
            first = first_names.setdefault(id(module.packed_data), name)
            if first == name:
                found.modules[name] = module
            else:
                found.tied[name] = first
            if isinstance(module, QuantLinear | QuantConv2d | QuantExperts):
                found.settings[first] = (module.compute, module.activation)
        for tensor_name, tensor in direct_tensors(module):
            name = f"{dot}{tensor_name}"
            if tensor.is_meta:
                raise ArgumentError(f"{name} has no data (it is on the meta device): load the model before saving it")
            first = first_names.setdefault(id(tensor), name)
            if first == name:
                found.plain[name] = tensor
            else:
                found.tied[name] = first
    for name, tensor in found.plain.items():
        what = tensor.is_floating_point() and non_finite(tensor, name, infinities=not isinstance(tensor, nn.Parameter))
        if what:
            raise ArgumentError(f"{what}, which `load` would refuse: repair the model before saving it")
    return found


def _save(model: nn.Module, dir: str | PathLike[str], shard_bytes: int) -> None:
    found = _tensors_of(model)
    weights = {name: _weight(module, *found.settings.get(name, ("auto", "block"))) for name, module in found.modules.items()}
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in found.plain.items()}
    with replacing(model_path(dir)) as staging:
        writer = Writer(staging.path, staging.stem, stored_specs(weights, specs), shard_bytes)
        writer.write_all(found.plain)
        for name, module in found.modules.items():
            writer.write_all(codes_in_files(name, module.codes()))
        if (generation := getattr(model, "generation_config", None)) is not None and hasattr(generation, "to_json_string"):
            write_json(staging.path / GENERATION_CONFIG, json.loads(generation.to_json_string()))
        origin = getattr(getattr(model, "config", None), "_name_or_path", None)
        publish(staging, writer, _config_of(model), weights, found.tied, calibration_of(model), base_model=origin)


def _weight(module: QuantModule, compute: str, activation: str) -> Weight:
    packed = module.packed_anywhere
    settings = (packed.codes_format, module.codes_shape, module.dtype, module.error, compute, activation)
    return Weight(module.kind, *settings, fold=fold_of(module), transposed=module.transposed)


def stored_specs(weights: Mapping[str, Weight], plain: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint, by their names in the files."""
    specs = dict(plain)
    for name, weight in weights.items():
        stored = weight.stored(name)
        if taken := stored.keys() & specs.keys():
            raise CheckpointError(f"{min(taken)} is the name of a tensor already: {name} cannot be quantized, skip it")
        specs |= stored
    return specs | dict.fromkeys(weights, TensorSpec(guard().dtype, tuple(guard().shape)))


def codes_in_files(name: str, codes: Codes) -> dict[str, Tensor]:
    """Return the tensors of the weight called `name`, by their names in a checkpoint's files."""
    return {f"{name}.{part}": tensor for part, tensor in to_dense(codes).items()}


def write_index(folder: Path, writer: Writer) -> None:
    """Write the file by which transformers and others find the file of each tensor."""
    write_json(folder / INDEX, {"metadata": {"total_size": writer.nbytes}, "weight_map": writer.file_of})


def publish(
    staging: Staging,
    writer: Writer,
    config: Mapping[str, object],
    weights: Mapping[str, Weight],
    tied: Mapping[str, str],
    static: Calibrated | None = None,
    *,
    base_model: str | None = None,
) -> None:
    """Complete a checkpoint: guards, the index by which other readers find the weight files, the model card, the manifest, the commit.

    Args:
        base_model: The model that was quantized, if it is known; for the model card.
    """
    config = with_separate_head(config, writer.specs)
    for name in weights:
        writer.write(name, guard())
    writer.finish()
    if len(writer.files) > 1 or not staging.fresh:
        write_index(staging.path, writer)
    sums = dict(writer.checksums)
    weights = {
        name: replace(weight, crc32={full.removeprefix(f"{name}."): sums.pop(full) for full in weight.stored(name)})
        for name, weight in weights.items()
    }
    for name in weights:
        del sums[name]
    if weights:
        ordered = {name.removesuffix(f".{ORDER}") for name in sums if name.endswith(f".{ORDER}")}
        most = Counter(weight.dtype for weight in weights.values()).most_common(1)[0][0]
        main = dtype_of(config) or most
        modules = {}
        for name, weight in weights.items():
            module, dtype = name.removesuffix(".weight"), None if weight.dtype == main else weight.dtype
            modules[module] = Module(weight.format, weight.shape, weight.compute, weight.activation, module in ordered, dtype=dtype)
        config = {**config, SETTINGS: describe(with_branches(modules, {name: spec.shape for name, spec in writer.specs.items()}))}
    described = [CardWeight(one.kind, one.format, math.prod(one.shape), one.stored_bytes, one.error) for one in weights.values()]
    card = model_card(staging.folder.name, described, total_bytes=writer.nbytes, config=config, base_model=base_model)
    write_card(staging.path, card, published=staging.folder)
    staging.commit(config, Manifest(files=tuple(writer.files), weights=weights, plain=sums, tied=tied, static=static))


def with_separate_head(config: Mapping[str, object], stored: Container[str]) -> Mapping[str, object]:
    """Return a decoder's config.json that does not tie the output embedding where the files have it: vLLM would replace it by the input
    embedding.

    Args:
        config: config.json.
        stored: Names of the tensors in the files, in which tied ones are missing.
    """
    if _HEAD not in stored or not config or config.get("is_encoder_decoder"):
        return config
    text = config.get("text_config")
    nested = {"text_config": {**text, **_UNTIED}} if isinstance(text, Mapping) else {}
    return {**config, **nested, **_UNTIED}


def _config_of(model: nn.Module) -> dict[str, object]:
    """The config.json of a transformers model; empty for any other."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        return {}
    described: dict[str, object] = json.loads(config.to_json_string())
    present = {m.dtype for m in model.modules() if isinstance(m, QuantModule)} | {p.dtype for p in model.parameters()}
    loaded = getattr(config, "dtype", None)
    # The model's own is that of its first parameter, which may be one of those that stay in float32.
    dtype = loaded if loaded in present else getattr(model, "dtype", torch.float32)
    return described | {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
