"""Loading for tensor parallelism: each of several processes reads its part of a model.

Called by loading.py. The architecture is built on the meta device; a plan (nn/parallel) says which modules are cut and how; they are then
filled like those of a smaller model. From a halfbyte checkpoint, no process has more of a weight in memory than its part; from other files
one whole weight is read at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.formats.sharding import Ranges
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.parallel.parallelize import Processes, attach_, parts_of_plan, shrink_all_
from halfbyte.nn.parallel.plan import Holder, holders, make_plan
from halfbyte.nn.report import Report

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from halfbyte.checkpoint.native.manifest import Weight

Finish = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Sharding:
    """The processes that share a model, and how: the arguments of `parallelize_`."""

    mesh: DeviceMesh
    plan: Mapping[str, str] | None = None
    exact: bool = False


def device_of(mesh: DeviceMesh | None, device: torch.device | str | None) -> torch.device | str:
    """Return the device of a process's part: with a mesh its own of the mesh's type; without one `device`, by default the CPU.

    Raises:
        ArgumentError: `device` is of another type than the mesh's.
    """
    if mesh is None:
        return "cpu" if device is None else device
    if device is None:
        return mesh.device_type if mesh.device_type == "cpu" else torch.device(mesh.device_type, torch.accelerator.current_device_index())
    if torch.device(device).type != mesh.device_type:
        raise ArgumentError(f"a mesh of {mesh.device_type} devices cannot share a model on {str(device)!r}: leave the device out")
    return device


def shard(stored: StoredModel, owners: Mapping[str, str], model: nn.Module, sharding: Sharding) -> tuple[StoredModel, Finish]:
    """Cut the modules of `model` to this process's parts.

    Args:
        stored: The whole model.
        owners: For each parameter, the name under which it is stored.
        model: Its modules have no data yet.
        sharding: The processes.

    Returns:
        The stored model that has this process's parts, and a function to call when `model` is filled with them.

    Raises:
        ArgumentError: The plan does not fit the model.
    """
    processes = Processes.of(sharding.mesh)
    weight_holders = {name: _as_stored(holder, owners, stored) for name, holder in holders(model).items()}
    plan = make_plan(model, weight_holders, sharding.plan, processes.count, device=processes.device, exact=sharding.exact)
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    whole_bytes = {name: _nbytes(modules[name], stored.weights.get(owners[f"{name}.weight"])) for name in weight_holders}
    parts = parts_of_plan(modules, plan, processes)
    cut = {name: part for name, part in parts.items() if name in weight_holders}
    slices: dict[str, tuple[int, Ranges]] = {}
    dropped: set[str] = set()
    for name, part in cut.items():
        slices[owners[f"{name}.weight"]] = part.cut.dim, part.rank_slices
        if part.bias and part.cut.along == "outputs":
            slices[owners[f"{name}.bias"]] = 0, part.rank_slices
        elif part.bias and processes.rank > 0:  # products of parts of the inputs are summed: the first process adds the bias
            dropped.add(owners[f"{name}.bias"])
    shrink_all_({name: modules[name] for name in cut}, parts)

    def finish(model: nn.Module) -> None:
        attach_(model, plan, parts, whole_bytes)

    plain = {name: spec for name, spec in stored.plain.items() if name not in dropped}
    return _StoredPart(stored, plain, slices), finish


class _StoredPart(StoredModel):
    """This process's part of a stored model.

    Args:
        whole: The model.
        plain: Its plain tensors that this process has.
        slices: For tensors that are read in part: the dimension, and the ranges along it.
    """

    def __init__(self, whole: StoredModel, plain: Mapping[str, TensorSpec], slices: Mapping[str, tuple[int, Ranges]]) -> None:
        super().__init__(whole.path, whole.config, whole.weights, plain, whole.tied)
        self._whole, self._slices = whole, slices

    def codes(self, name: str) -> Codes:
        return self._whole.part_of_codes(name, *self._slices[name]) if name in self._slices else self._whole.codes(name)

    def _plain_tensor(self, name: str) -> Tensor:
        return self._whole.part_of_tensor(name, *self._slices[name]) if name in self._slices else self._whole.tensor(name)

    def nbytes(self, name: str) -> int:
        return self._whole.nbytes(name)

    def report(self) -> Report:
        return self._whole.report()


def _as_stored(holder: Holder, owners: Mapping[str, str], stored: StoredModel) -> Holder:
    """Return a holder of the float model with the name, format and settings that its weight has in the files."""
    owner = owners[f"{holder.name}.weight"]
    if (weight := stored.weights.get(owner)) is None:
        return replace(holder, weight=owner)
    ordered = order_name(f"{holder.name}.weight") in stored.plain
    return replace(holder, weight=owner, format=weight.format, compute=weight.compute, activation=weight.activation, ordered=ordered)


def _nbytes(module: nn.Module, weight: Weight | None) -> int:
    """Return the bytes of a whole module, its weight as stored."""
    direct_bytes = sum(parameter.nbytes for name, parameter in module.named_parameters(recurse=False) if weight is None or name != "weight")
    return direct_bytes + (0 if weight is None else int(weight.stored_bytes))
