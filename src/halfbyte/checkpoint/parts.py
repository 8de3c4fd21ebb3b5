"""A model on disk of which each of several processes reads its part.

The architecture is built without numbers, the plan made from it and from what the files say, its modules cut, and then filled like a model
that was never larger: no process has a whole weight in memory that it has a part of, if the files are a halfbyte checkpoint. What other
files hold is read one whole weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.opened import Opened, order_name
from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.formats.sharding import Ranges
from halfbyte.nn.parallel import Part, Processes, attach_, shrink_
from halfbyte.nn.parallel_plan import Holder, holders, make_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Finish = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Sharing:
    """Between which processes a model is shared, and how: the arguments of `parallelize_`."""

    mesh: DeviceMesh
    plan: Mapping[str, str] | None = None
    exact: bool = False


def device_of(mesh: DeviceMesh | None, device: torch.device | str | None) -> torch.device | str:
    """Where a process's part goes: to its device of the mesh's kind, or to the CPU without a mesh."""
    if mesh is None:
        return "cpu" if device is None else device
    if device is None:
        return mesh.device_type if mesh.device_type == "cpu" else torch.device(mesh.device_type, torch.accelerator.current_device_index())
    if torch.device(device).type != mesh.device_type:
        raise ArgumentError(f"a mesh of {mesh.device_type} devices cannot share a model on {str(device)!r}: leave the device out")
    return device


def in_parts(opened: Opened, owners: Mapping[str, str], model: nn.Module, sharing: Sharing) -> tuple[Opened, Finish]:
    """Cuts the modules of `model`, which have no data, and gives what fills them, and what to do with the model then.

    owners  for each parameter, the name that it is stored under
    """
    processes = Processes.of(sharing.mesh)
    found = {name: _as_stored(holder, owners, opened) for name, holder in holders(model).items()}
    plan = make_plan(model, found, sharing.plan, processes.count, device=processes.device, exact=sharing.exact)
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    before = {name: _nbytes(modules[name], opened.weights.get(owners[f"{name}.weight"])) for name in found}
    runs: dict[str, tuple[int, Ranges]] = {}
    dropped: set[str] = set()
    parts: dict[str, Part] = {}
    done: set[int] = set()
    for name, cut in plan.cuts.items():
        module = modules[name]
        biased = getattr(module, "bias", None) is not None
        parts[name] = Part(cut, processes, module.weight.shape[cut.dim] if name in found else 0, biased)
        if name not in found or id(module) in done:
            continue
        done.add(id(module))
        runs[owners[f"{name}.weight"]] = cut.dim, parts[name].mine
        if biased and cut.along == "outputs":
            runs[owners[f"{name}.bias"]] = 0, parts[name].mine
        elif biased and processes.rank > 0:
            dropped.add(owners[f"{name}.bias"])
    moved: dict[int, Any] = {}
    for name in {id(modules[name]): name for name in plan.cuts if name in found}.values():
        shrink_(modules[name], parts[name], moved)

    def codes(name: str) -> Codes:
        return opened.part_of_codes(name, *runs[name]) if name in runs else opened.codes(name)

    def tensor(name: str) -> Tensor:
        return opened.part_of_tensor(name, *runs[name]) if name in runs else opened.tensor(name)

    def finish(model: nn.Module) -> None:
        attach_(model, plan, parts, before)

    plain = {name: spec for name, spec in opened.plain.items() if name not in dropped}
    return replace(opened, codes=codes, tensor=tensor, plain=plain), finish


def _as_stored(holder: Holder, owners: Mapping[str, str], opened: Opened) -> Holder:
    """A holder of the float model with what the files say of its weight."""
    owner = owners[f"{holder.name}.weight"]
    if (weight := opened.weights.get(owner)) is None:
        return replace(holder, weight=owner)
    ordered = order_name(f"{holder.name}.weight") in opened.plain
    return replace(holder, weight=owner, format=weight.format, compute=weight.compute, activation=weight.activation, ordered=ordered)


def _nbytes(module: nn.Module, weight: Any) -> int:
    """Bytes of a whole module; of its weight as it is stored."""
    own = sum(parameter.nbytes for name, parameter in module.named_parameters(recurse=False) if weight is None or name != "weight")
    return own + (0 if weight is None else int(weight.stored_bytes))
