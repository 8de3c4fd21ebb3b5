"""Common to the readers of other projects' folders: the tensors of a module, found by the suffixes of their names."""

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
    """The tensors of which a weight is made.

    module  the name of its module
    names   of each part: "qweight" -> "model.layers.0.mlp.up_proj.qweight"
    """

    reader: Reader
    module: str
    names: Mapping[str, str]

    def __contains__(self, part: object) -> bool:
        return part in self.names

    def only(self, parts: Iterable[str]) -> Parts:
        return replace(self, names={part: self.names[part] for part in parts if part in self.names})

    def spec(self, part: str) -> TensorSpec:
        self.require(part)
        return self.reader.spec(self.names[part])

    def require(self, *parts: str) -> None:
        """Raises CheckpointError where one of these is missing."""
        if missing := set(parts) - self.names.keys():
            raise CheckpointError(f"{self.module} has no {min(missing)}: the checkpoint is damaged")

    def read(self, part: str) -> Tensor:
        self.require(part)
        return self.reader.read(self.names[part])

    def tensors(self) -> dict[str, Tensor]:
        """All of them, read."""
        return {part: self.reader.read(name) for part, name in self.names.items()}

    def scale_dtype(self, part: str) -> torch.dtype:
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
        form: str | None = None,
    ) -> Entry:
        """The weight, as `Entry` describes it."""
        return Entry(spec, sum(self.reader.spec(name).nbytes for name in self.names.values()), read, quantized, form)


def modules_of(
    reader: Reader, parts: tuple[str, ...], names: Iterable[str] | None = None, fits: Callable[[TensorSpec], bool] = lambda spec: True
) -> tuple[dict[str, Parts], list[str]]:
    """(module -> its parts, of the modules that have the first of `parts`; the names of all other tensors)."""
    rest = dict.fromkeys(reader.places if names is None else names)
    modules: dict[str, Parts] = {}
    for name in list(rest):
        module = name.removesuffix(f".{parts[0]}")
        if module != name and fits(reader.spec(name)):
            modules[module] = Parts(reader, module, {part: full for part in parts if (full := f"{module}.{part}") in rest})
    for found in modules.values():
        for full in found.names.values():
            rest.pop(full, None)
    return modules, list(rest)


def weights_of(modules: Mapping[str, Parts], entry: Callable[[Parts], Entry]) -> dict[str, Entry]:
    """The weight of each module, by its usual name."""
    return {f"{name}.weight": entry(parts) for name, parts in modules.items()}
