"""A model on disk of which only some modules are in memory at a time."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from torch import Tensor, nn

from halfbyte.checkpoint.mapping.plan import Plan, Source
from halfbyte.checkpoint.stored_model import checked_finite
from halfbyte.errors import CheckpointError
from halfbyte.nn.calibration.runs import decoder_layers
from halfbyte.nn.candidates import direct_tensors


class Materializer:
    """The model of a plan. Modules outside its decoder layers are loaded, except an output head that is not tied.

    model  its other parameters are on the meta device
    """

    def __init__(self, plan: Plan, reader: Source, path: Path) -> None:
        if plan.model is None:
            raise CheckpointError("the files name no architecture to build a model from")
        self.model = plan.model
        self._plan, self._reader, self._path = plan, reader, path
        self._steps = {plan.renamed.get(target, target): step for step in plan.steps for target in step.targets}
        layers, _ = decoder_layers(self.model)
        get_head = getattr(plan.model, "get_output_embeddings", None)
        head = None if get_head is None else get_head()
        for prefix, module in list(self.model.named_modules()):
            if module is not head and not prefix.startswith(f"{layers}."):
                self._fill(prefix, module)

    def materialize(self, name: str, module: nn.Module) -> nn.Module:
        """A copy of the module called `name`, with its data."""
        copy = deepcopy(module)
        for prefix, part in copy.named_modules():
            self._fill(f"{name}.{prefix}" if prefix else name, part)
        return copy

    def _fill(self, prefix: str, module: nn.Module) -> None:
        """Gives a module's own tensors their data."""
        for name, tensor in list(direct_tensors(module)):
            full = f"{prefix}.{name}" if prefix else name
            data = self._read(self._plan.tied.get(full, full))
            checked_finite(data, full, self._path, parameter=isinstance(tensor, nn.Parameter))
            value = nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data
            setattr(module, name, value)

    def _read(self, name: str) -> Tensor:
        step, plan = self._steps[name], self._plan
        dtype = plan.dtype(name)
        tensors = step.run(lambda source: self._reader.read(source, dtype))
        return next(tensor for target, tensor in tensors.items() if plan.renamed.get(target, target) == name)
