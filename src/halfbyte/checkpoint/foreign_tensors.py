"""Common to the readers of other projects' folders: the tensors of a module, found by the suffixes of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.io import zero_points
from halfbyte.io.safetensors import Reader
from halfbyte.io.tensors import Spec


def modules_of(
    reader: Reader, parts: tuple[str, ...], names: Iterable[str] | None = None, fits: Callable[[Spec], bool] = lambda spec: True
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """(module -> {part: full name} of the modules that have the first of `parts`, the names of all other tensors)."""
    rest = dict.fromkeys(reader.places if names is None else names)
    modules: dict[str, dict[str, str]] = {}
    for name in list(rest):
        module = name.removesuffix(f".{parts[0]}")
        if module != name and fits(reader.spec(name)):
            modules[module] = {part: full for part in parts if (full := f"{module}.{part}") in rest}
    for found in modules.values():
        for full in found.values():
            rest.pop(full, None)
    return modules, list(rest)


def read_parts(reader: Reader, parts: Mapping[str, str]) -> dict[str, Tensor]:
    return {part: reader.read(name) for part, name in parts.items()}


def nbytes_of(reader: Reader, parts: Mapping[str, str]) -> int:
    return sum(reader.spec(name).nbytes for name in parts.values())


def scale_dtype(name: str, spec: Spec) -> torch.dtype:
    if spec.dtype not in zero_points.SCALES:
        raise CheckpointError(f"{name} is {spec.dtype}: scales are float16, bfloat16 or float32, the checkpoint is damaged")
    return spec.dtype
