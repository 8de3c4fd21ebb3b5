"""Tensor parallelism for processes started by torchrun, and in transformers' `from_pretrained`.

    torchrun --nproc-per-node 2 -m halfbyte generate small --prompt "Once"

    model = AutoModelForCausalLM.from_pretrained("small", tp_plan="auto")

`nn/parallel/plan.py` decides how weights are cut. transformers would cut parameters as it reads them, which is not possible for packed
weights: its plan is applied after the model has been loaded whole. `halfbyte.load(folder, mesh=mesh)` never has a whole model in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.nn.parallel.parallelize import parallelize_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from halfbyte.integrations.transformers.modules import Part


@contextmanager
def processes(device: str) -> Iterator[tuple[DeviceMesh | None, str]]:
    """A context with (mesh of all processes, this one's device); (None, device) for a single process."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield None, device
        return
    kind = torch.device(device).type
    if kind != "cpu":
        local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= there:
            raise ArgumentError(f"process {local} of this machine needs a GPU of its own, got {there} GPUs: start as many processes")
        torch.cuda.set_device(local)
        device = f"{kind}:{local}"
    distributed.init_process_group("gloo" if kind == "cpu" else "nccl", device_id=None if kind == "cpu" else torch.device(device))
    from torch.distributed.device_mesh import init_device_mesh  # missing in a torch built without distributed

    try:
        yield init_device_mesh(kind, (count,)), device
    finally:
        distributed.destroy_process_group()


# transformers


def is_asked(model: nn.Module) -> bool:
    """Whether `from_pretrained` was asked for tensor parallelism. Raises UnsupportedError for other kinds of parallelism."""
    config = getattr(model.config, "distributed_config", None)
    if config is None:
        return False
    sizes = {name: getattr(config, f"{name}_size", 1) for name in ("pp", "dp", "fsdp", "ep")}
    if others := [name for name, size in sizes.items() if (size or 1) > 1]:
        raise UnsupportedError(f"quantized models support only tensor parallelism, got {others[0]}_size {sizes[others[0]]}")
    if (getattr(config, "tp_size", 1) or 1) == 1:
        return False
    if isinstance(config.tp_plan, dict):
        raise UnsupportedError(
            'from_pretrained takes tp_plan="auto" for a quantized model: use halfbyte.load(folder, mesh=mesh, plan=plan)'
        )
    return True


def check_asks(model: nn.Module, *, asks: bool) -> None:
    """Raises UnsupportedError where transformers would cut a model itself: it would cut biases, but not packed weights.

    asks  whether this version of transformers passes the plan to the quantizer, as releases from 5.21 on do
    """
    mesh = getattr(model, "_device_mesh", None)
    cut = (getattr(model, "_tp_size", None) or 1) > 1 or (mesh is not None and mesh.size() > 1)
    if not asks and (cut or is_asked(model)):
        raise UnsupportedError(
            f"transformers {version('transformers')} cuts a model without asking its quantizer, which packed weights do not allow: "
            "pip install 'transformers>=5.21', or use halfbyte.load(folder, mesh=mesh)"
        )


def take_over(plan: dict[str, str]) -> dict[str, str]:
    """Takes over a plan from transformers; returns the plan for transformers, with which it cuts nothing."""
    base_plan = dict(plan)
    plan.update(dict.fromkeys(plan, "replicate"))
    return base_plan


def share_(model: Part, plan: dict[str, str]) -> None:
    """Reduces a model that transformers has loaded whole to this process's part."""
    manager = getattr(model, "_mesh_manager", None)
    if manager is None:
        raise UnsupportedError("this version of transformers has no mesh to ask for: use halfbyte.load(folder, mesh=mesh)")
    for module in model.modules():
        if isinstance(module, nn.Module) and getattr(module, "_is_hooked", False):
            vars(module).pop("forward", None)  # set by transformers, without effect
    model.tp_plan = plan
    parallelize_(model, manager.get_mesh("tp"))
