"""The tensors of a quantized module in another project's checkpoint, grouped by the suffixes of their names.

`modules_of` groups the tensors of a safetensors folder: "…up_proj.qweight", "….scales", "….qzeros" are `Parts` of one module. Readers of
formats (`affine.py`, `floats.py`) turn `Parts` into an `Entry` of a weight, which `folders.py` offers as those of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entry, Quantized
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.io.safetensors import Reader
from halfbyte.io.tensors import TensorSpec
from halfbyte.io.weights import zero_points


@dataclass(frozen=True)
class Parts:
    """The tensors that a quantized weight is stored as.

    Attributes:
        reader: Of the folder's files.
        module: The name of the module.
        names: Name of each part -> name of the tensor: "qweight" -> "model.layers.0.mlp.up_proj.qweight".
    """

    reader: Reader
    module: str
    names: Mapping[str, str]

    def __contains__(self, part: object) -> bool:
        return part in self.names

    def only(self, parts: Iterable[str]) -> Parts:
        """Return those of the named parts that are present."""
        return replace(self, names={part: self.names[part] for part in parts if part in self.names})

    def spec(self, part: str) -> TensorSpec:
        """Return the dtype and shape of a part; raises as `require`."""
        self.require(part)
        return self.reader.spec(self.names[part])

    def require(self, *parts: str) -> None:
        """Raise CheckpointError if one of these parts is missing."""
        if missing := set(parts) - self.names.keys():
            raise CheckpointError(f"{self.module} has no {min(missing)}: the checkpoint is damaged")

    def read(self, part: str) -> Tensor:
        """Read a part; raises as `require`."""
        self.require(part)
        return self.reader.read(self.names[part])

    def tensors(self) -> dict[str, Tensor]:
        """Read all parts."""
        return {part: self.reader.read(name) for part, name in self.names.items()}

    def scale_dtype(self, part: str) -> torch.dtype:
        """Return the dtype of a part with scales.

        Raises:
            CheckpointError: Formats have no scales of this dtype.
        """
        dtype = self.spec(part).dtype
        if dtype not in zero_points.SCALES:
            what = f"{self.names[part]} is {dtype}"
            *first, last = (str(one).removeprefix("torch.") for one in zero_points.SCALES)
            raise CheckpointError(f"{what}, halfbyte reads scales of {', '.join(first)} and {last}: start from the float model")
        return dtype

    def entry(
        self,
        spec: TensorSpec,
        read: Callable[[torch.dtype | None], Codes | Tensor],
        quantized: Quantized | None = None,
        stored_as: str | None = None,
    ) -> Entry:
        """Return an `Entry` for the weight, whose size in the file is that of all parts."""
        return Entry(spec, sum(self.reader.spec(name).nbytes for name in self.names.values()), read, quantized, stored_as)


def modules_of(
    reader: Reader, parts: tuple[str, ...], names: Iterable[str] | None = None, is_code: Callable[[TensorSpec], bool] = lambda spec: True
) -> tuple[dict[str, Parts], list[str]]:
    """Group tensors by modules.

    Args:
        reader: Of the folder's files.
        parts: Suffixes of the tensors of a quantized module. A module is one that has the first of them, its codes.
        names: Names of the tensors to group; None: all.
        is_code: Tells the codes of a quantized module from a tensor of the same suffix that is something else, a float "weight".

    Returns:
        The parts of each module by its name, and the names of the tensors that belong to none.
    """
    ungrouped = dict.fromkeys(reader.places if names is None else names)  # in order
    modules: dict[str, Parts] = {}
    for name in ungrouped:
        module = name.removesuffix(f".{parts[0]}")
        if module != name and is_code(reader.spec(name)):
            modules[module] = Parts(reader, module, {part: tensor for part in parts if (tensor := f"{module}.{part}") in ungrouped})
    # Only now, as a tensor may be a part of two modules.
    for module_parts in modules.values():
        for tensor in module_parts.names.values():
            ungrouped.pop(tensor, None)
    return modules, list(ungrouped)


def weights_of(modules: Mapping[str, Parts], entry: Callable[[Parts], Entry]) -> dict[str, Entry]:
    """Return the entry of each module's weight, by the name that it has in a float model."""
    return {f"{name}.weight": entry(parts) for name, parts in modules.items()}
