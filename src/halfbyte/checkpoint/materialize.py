"""A model on disk of which only some modules are in memory at a time.

`convert` calibrates with it (quantize_checkpoint.py): embeddings and norms outside the decoder layers are loaded, and `calibrate` asks for
one decoder layer at a time.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from torch import Tensor, nn

from halfbyte.checkpoint.entries import Entries
from halfbyte.checkpoint.mapping.plan import Plan
from halfbyte.checkpoint.stored_model import checked_finite
from halfbyte.errors import CheckpointError
from halfbyte.nn.calibration.runs import decoder_layers
from halfbyte.nn.candidates import direct_tensors


class Materializer:
    """The model of a plan, with the data of all modules outside its decoder layers, except an output head that is not tied.

    Args:
        plan: How its tensors are read.
        files: Their tensors in the files.
        path: Their folder, for errors.

    Attributes:
        model: Its other parameters are on the meta device.

    Raises:
        CheckpointError: The files name no architecture.
    """

    def __init__(self, plan: Plan, files: Entries, path: Path) -> None:
        if plan.model is None:
            raise CheckpointError("the files name no architecture to build a model from")
        self.model = plan.model
        self._plan, self._files, self._path = plan, files, path
        self._steps = plan.step_of()
        layers, _ = decoder_layers(self.model)
        get_head = getattr(plan.model, "get_output_embeddings", None)
        head = None if get_head is None else get_head()
        for prefix, module in list(self.model.named_modules()):
            if module is not head and not prefix.startswith(f"{layers}."):
                self._fill(prefix, module)

    def materialize(self, name: str, module: nn.Module) -> nn.Module:
        """Return a copy of the module called `name`, with its data."""
        copy = deepcopy(module)
        for prefix, part in copy.named_modules():
            self._fill(f"{name}.{prefix}" if prefix else name, part)
        return copy

    def _fill(self, prefix: str, module: nn.Module) -> None:
        """Give the tensors of a module, without those of its children, their data."""
        for name, tensor in list(direct_tensors(module)):
            path, is_parameter = f"{prefix}.{name}" if prefix else name, isinstance(tensor, nn.Parameter)
            data = checked_finite(self._read(self._plan.tied.get(path, path)), path, self._path, parameter=is_parameter)
            setattr(module, name, nn.Parameter(data, requires_grad=False) if is_parameter else data)

    def _read(self, name: str) -> Tensor:
        step, target = self._steps[name]
        dtype = self._plan.dtype(name)
        return step.run(lambda source: self._files.read(source, dtype))[target]
