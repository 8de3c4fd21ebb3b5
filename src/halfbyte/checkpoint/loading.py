"""Loads a model from disk."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.files import has_adapter
from halfbyte.checkpoint.mapping.architecture import load_generation_config, skeleton
from halfbyte.checkpoint.mapping.plan import Misfits
from halfbyte.checkpoint.native.checkpoint_model import Checkpoint
from halfbyte.checkpoint.native.manifest import Weight
from halfbyte.checkpoint.native.quantization_config import branches, dtype_of
from halfbyte.checkpoint.planned_model import PlannedModel, without_calibration
from halfbyte.checkpoint.sharded_loading import Sharding, device_of, shard
from halfbyte.checkpoint.sources import open_floats, open_source
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.checkpoint.wrappers import unwrapped
from halfbyte.errors import ArgumentError, CheckpointError, FormatError, check_type, model_path
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.nn.candidates import CUSTOM_LOADER, candidates, direct_tensors, named_tensors
from halfbyte.nn.config import NO_REASONS, Config, as_config
from halfbyte.nn.convert import after_quantizing
from halfbyte.nn.described import ORDER, Calibrated
from halfbyte.nn.kinds import codes_shape, kind_of, pack_weight, quantized_module
from halfbyte.nn.modules.conv import fold_of
from halfbyte.nn.modules.expanded import expanded
from halfbyte.nn.modules.low_rank import expected, placed
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule
from halfbyte.nn.modules.weight_view import AnyPacked
from halfbyte.nn.parallel.parallelize import parallelize_
from halfbyte.nn.report import Report, add_kept, add_notes
from halfbyte.nn.static.build import become_, calibration_of, rebuild_integer_network

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def open_model(
    path: str | PathLike[str], *, floats: bool = False, quantize: Config | None = None, kept: Mapping[str, str] = NO_REASONS
) -> StoredModel:
    """Open a halfbyte checkpoint, a folder that another project quantized, or a GGUF file; no tensor is read.

    Args:
        path: The folder or file.
        floats: Open also models that are not quantized: Hugging Face folders, folders of safetensors, one such file.
        quantize: How to quantize a floating-point model as it is read; none of its weights may be codes.
        kept: Names of modules that stay in floating point then -> why.
    """
    source = model_path(path)
    found = open_source(source, floats=floats) if quantize is None else open_floats(source)
    return Checkpoint(source) if found is None else PlannedModel(source, *found, quantize, kept)


def load_tensors(dir: str | PathLike[str]) -> dict[str, Codes | Tensor]:
    """Read all tensors of a checkpoint, or of a file that `load` reads.

    Tied names have the same value. For a weight whose columns are not in the order of its inputs, as with GPTQ's activation order,
    `<module>.input_order` gives the input of each column.

    Args:
        dir: The folder or file.

    Returns:
        The tensors by the names of the model's parameters and buffers.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> hb.save(model, folder / "model")
        >>> sorted(hb.load_tensors(folder / "model"))
        ['0.bias', '0.weight', '1.bias', '1.weight']
    """
    model = open_model(dir)
    tensors: dict[str, Codes | Tensor] = {name: model.codes(name) for name in model.weights}
    tensors |= {name: model.tensor(name) for name in model.plain}
    return tensors | {name: tensors[owner] for name, owner in model.tied.items()}


def describe(dir: str | PathLike[str]) -> Report:
    """A report of a checkpoint or a file that `load` reads, from its headers alone (and the zero points of some weights)."""
    return open_model(dir).report()


def load(
    dir: str | PathLike[str],
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    *,
    format: Config | Format | str | None = None,
    mesh: DeviceMesh | None = None,
    plan: Mapping[str, str] | None = None,
    exact: bool = False,
) -> nn.Module:
    """Load a model with the codes and scales of its files.

    It is a halfbyte checkpoint, a transformers model quantized by another project, or a GGUF file.

    A module whose weight `format` cannot hold stays in floating point, as with `quantize_`. Parameters and buffers that are not quantized
    take the dtypes of the checkpoint. Memory never holds more than the model and one tensor.

    Args:
        dir: The folder or file.
        device: Where the weights are packed: by default "cpu"; with a mesh, this process's device of its kind.
        model: a module of the right architecture, in floating point (possibly on the meta device) or quantized: it is filled in place and
            returned. Without one, the architecture that config.json names is built with transformers and returned in evaluation mode.
        format: For floating-point files (of 32, 16, 8 or 4 bits): quantize to this, one weight at a time as it is read; a Config, or the
            format of all Linears.
        mesh: torch's DeviceMesh: each of its processes reads and holds its part of the weights (see `parallelize_`, also for `plan` and
            `exact`). A `model` that was passed is filled first and distributed then.
        plan: As for `parallelize_`.
        exact: As for `parallelize_`.

    Returns:
        The model.

    Raises:
        CheckpointError: Anything is missing, superfluous, damaged or of another shape; a `model` that was passed is unchanged then.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> hb.save(model, folder / "model")
        >>> loaded = hb.load(folder / "model", model=nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)))
    """
    if mesh is None and (plan is not None or exact):
        raise ArgumentError("plan and exact are for models shared by processes: pass their mesh, load(dir, mesh=mesh)")
    check_type(device, (torch.device, str, type(None)), "device is a torch.device or its name", "a model is load(dir, model=model)")
    check_type(model, (nn.Module, type(None)), "model is a torch.nn.Module or None", "leave it out for a model of transformers")
    sharding = None if mesh is None else Sharding(mesh, plan, exact)
    if has_adapter(model_path(dir)):
        raise CheckpointError(
            f"{dir} holds a model and an adapter, which load does not apply: transformers does, AutoModelForCausalLM.from_pretrained(dir), "
            "or move adapter_* to a folder of its own and apply it, peft.PeftModel.from_pretrained(load(dir), folder)"
        )
    inner = None if model is None else unwrapped(model)
    kept: dict[str, str] = {}
    while True:
        try:
            stored = open_model(dir) if format is None else open_model(dir, quantize=without_calibration(as_config(format)), kept=kept)
            filled = fill(stored, device_of(mesh, device), inner, sharding)
        except Misfits as e:
            kept |= e.kept
        else:
            add_kept(filled, kept)
            return filled if model is None else model


def fill(
    stored: StoredModel, device: torch.device | str = "cpu", model: nn.Module | None = None, sharding: Sharding | None = None
) -> nn.Module:
    """`load` for a stored model."""
    if sharding is not None and (model is not None or stored.static is not None):
        return parallelize_(fill(stored, device, model), sharding.mesh, sharding.plan, exact=sharding.exact)
    if stored.static is not None:
        return _on_codes(stored, stored.static, device, model)
    if model is None:
        model = skeleton(stored.config, _dtype(stored), stored.shapes())
        load_generation_config(model, stored.path)
    empty = expected(model, branches({name: spec.shape for name, spec in stored.plain.items()}))
    with expanded(model, lambda name: f"{name}.weight" in stored.weights, attention=True), placed(model, empty):
        return _filled(stored, device, model, sharding)


def _on_codes(stored: StoredModel, static: Calibrated, device: torch.device | str, model: nn.Module | None) -> nn.Module:
    """Turns the float network `model` into a network on int8 codes and fills it."""
    if model is None:
        raise CheckpointError(f"{stored.path} holds a network on int8 codes, made from a float one: pass that, load(dir, model=model)")
    if calibration_of(model) == static:
        return _filled(stored, device, model)
    if calibration_of(model) is not None:
        raise CheckpointError(f"{stored.path} has other scales than the model, which computes on int8 codes already: pass the float model")
    try:
        network = rebuild_integer_network(model, static)
    except (ArgumentError, KeyError) as e:
        raise CheckpointError(f"the network on int8 codes in {stored.path} cannot be made from the model: {e}") from e
    _filled(stored, device, network)
    become_(model, network)
    return model


def _filled(stored: StoredModel, device: torch.device | str, model: nn.Module, sharding: Sharding | None = None) -> nn.Module:
    owners, left_out = _fit(stored, model), stored.left_out()
    finish = None
    if sharding is not None:
        stored, finish = shard(stored, owners, model, sharding)
    parameters = {owners[name] for name, _, tensor in named_tensors(model) if isinstance(tensor, nn.Parameter)}
    packed, misfits = dict[str, AnyPacked](), dict[str, str]()
    for owner, module in _holders(stored, owners, model).items():
        try:
            packed[owner] = pack_weight(module, stored.codes(owner), device)
        except Misfits as e:
            misfits |= e.kept
    if misfits and not packed:
        raise FormatError(next(iter(misfits.values())))
    if misfits:
        raise Misfits(misfits)
    plain = {name: stored.tensor(name, parameter=name in parameters).to(device) for name in stored.plain}
    _fill(model, owners, packed, plain, stored.weights)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
        if isinstance(module, QuantModule):
            module.refresh()
    if finish is not None:
        finish(model)
    if left_out:
        add_notes(model, left_out)
    for finish_model in after_quantizing:
        finish_model(model)
    return model


def _fit(checkpoint: StoredModel, model: nn.Module) -> dict[str, str]:
    """For each parameter and buffer of the model, the name that it is stored under; raises CheckpointError if one does not fit."""
    weights, folder = checkpoint.weights, checkpoint.path
    reasons = {c.name: c.reason for c in candidates(model, without_data=True) if c.reason != CUSTOM_LOADER}  # of `load`, which reads codes
    owners = dict(checkpoint.names())
    same: dict[int, str] = {}  # tensor of the model -> the name that it is stored under
    places: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        places |= {f"{dot}{name}": tensor for name, tensor in direct_tensors(module)}
        if isinstance(module, QuantModule):
            places[f"{dot}weight"] = module.packed_data
        owner = owners.get(f"{dot}weight", "")
        if (weight := weights.get(owner)) is None:
            continue
        if (order := f"{dot}{ORDER}") in owners:
            places[order] = torch.empty(module.weight.shape[-1:], dtype=torch.int32, device="meta")
        if reason := reasons.get(prefix):
            raise CheckpointError(f"{dot}weight of {folder} cannot be loaded into the model's {type(module).__name__}: {reason}")
        fits = (weight.kind,) if owner == f"{dot}weight" else ("Linear", "Embedding")
        other = kind_of(module) not in fits or weight.fold != fold_of(module)
        if other or codes_shape(module, module.weight.shape, weight.format) != weight.shape:
            raise CheckpointError(
                f"{dot}weight is a {weight.kind} {list(weight.shape)} in {folder}, "
                f"in the model {type(module).__name__} {list(module.weight.shape)}: pass the model that was saved"
            )
    for name, owner in owners.items():
        if name not in places:
            raise CheckpointError(f"the model has no {name}, which is in {folder}: pass the model that was saved")
        if owner not in weights and (got := checkpoint.plain[owner].shape) != (want := tuple(places[name].shape)):
            raise CheckpointError(f"{name} is {list(got)} in {folder}, {list(want)} in the model: pass the model that was saved")
        same.setdefault(id(places[name]), owner)
    for name, tensor in places.items():
        if name not in owners and id(tensor) not in same:
            raise CheckpointError(f"{folder} has no {name}, which the model has: pass the model that was saved")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in places:
            raise CheckpointError(f"the buffer {name} is in no file and has no data in the model: build its module off the meta device")
    return {name: owners.get(name) or same[id(tensor)] for name, tensor in places.items()}


def _holders(stored: StoredModel, owners: Mapping[str, str], model: nn.Module) -> dict[str, nn.Module]:
    """For each quantized weight the first module that has it."""
    found: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        if (owner := owners.get(f"{prefix}.weight", "")) in stored.weights:
            found.setdefault(owner, module)
    return found


def _fill(
    model: nn.Module, owners: Mapping[str, str], packed: Mapping[str, AnyPacked], plain: Mapping[str, Tensor], weights: Mapping[str, Weight]
) -> None:
    """Put packed weights and plain tensors into the model; `owners` is the result of `_fit`."""
    modules: dict[int, QuantModule] = {}
    for prefix, module in list(model.named_modules(remove_duplicate=False)):
        owner = owners.get(f"{prefix}.weight", "")
        if weight := weights.get(owner):
            if id(module) not in modules:
                settings = (weight.dtype, weight.compute, weight.activation, weight.error)
                modules[id(module)] = _with_order(
                    quantized_module(module, packed[owner], *settings), plain.get(order_name(f"{prefix}.weight"))
                )
            model.set_submodule(prefix, modules[id(module)])
    parameters: dict[str, nn.Parameter] = {}
    for name, module, old in list(named_tensors(model)):
        owner = owners[name]
        value = plain[owner]
        if isinstance(old, nn.Parameter):
            trainable = old.requires_grad and value.is_floating_point()
            value = parameters.setdefault(owner, nn.Parameter(value, requires_grad=trainable))
        setattr(module, name.rpartition(".")[2], value)


def _with_order(module: QuantModule, order: Tensor | None) -> QuantModule:
    if order is None:
        return module
    if not isinstance(module, QuantLinear):
        raise CheckpointError(f"the columns of a {module.kind} have an order, which only those of a Linear can: the checkpoint is damaged")
    try:
        return PermutedLinear(module, order)
    except ArgumentError as e:
        raise CheckpointError(f"{e}: the checkpoint is damaged") from e


def _dtype(checkpoint: StoredModel) -> torch.dtype:
    """The dtype to build the model in: that of config.json, or else that of its first floating-point tensor."""
    named = dtype_of(checkpoint.config)
    floats = (spec.dtype for spec in checkpoint.plain.values() if spec.dtype.is_floating_point)
    return named or next((weight.dtype for weight in checkpoint.weights.values()), None) or next(floats, torch.float32)
