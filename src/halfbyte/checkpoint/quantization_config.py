"""The `quantization_config` of config.json, by which transformers learns that a model is quantized. docs/checkpoint.md specifies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, CheckpointError, FormatError
from halfbyte.formats.spec import Format, as_format
from halfbyte.nn.modules import QuantLinear, QuantModule, check_compute

METHOD = "halfbyte"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Module:
    """How one quantized module is stored and, if it is a Linear, how it multiplies."""

    format: Format
    compute: str = "auto"
    activation: str = "block"

    @classmethod
    def of(cls, module: QuantModule) -> Module:
        settings = (module.compute, module.activation) if isinstance(module, QuantLinear) else ()
        return cls(module.packed.format, *settings)


def describe(modules: Mapping[str, Module]) -> dict[str, Any]:
    """The section for these modules, in plain types."""
    entries = {name: {"format": str(m.format), "compute": m.compute, "activation": m.activation} for name, m in modules.items()}
    return {"quant_method": METHOD, "version": VERSION, "modules": entries}


def parse(section: Mapping[str, Any]) -> dict[str, Module]:
    """The inverse of `describe`; raises CheckpointError where anything in the section makes no sense."""
    if (version := section.get("version")) != VERSION:
        raise CheckpointError(f"the quantization_config is of version {short(version)}, this halfbyte reads {VERSION}: use a newer one")
    entries = section.get("modules")
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"the modules of a quantization_config are an object, got {short(entries)}: the checkpoint is damaged")
    modules = {}
    for name, entry in entries.items():
        try:
            if not isinstance(entry, Mapping):
                raise FormatError(f"an object with a format, got {short(entry)}")
            modules[name] = Module(as_format(entry.get("format", "")), entry.get("compute", "auto"), entry.get("activation", "block"))
            check_compute(modules[name].compute, modules[name].activation)
        except (ArgumentError, FormatError, TypeError) as e:
            raise CheckpointError(f"{short(name)} in the quantization_config: {e}: the checkpoint is damaged") from e
    return modules


def guard() -> Tensor:
    """What is stored under the name of a quantized weight itself: a reader that takes it for the weight fails, as its shape is wrong.

    Without it a reader that does not know halfbyte finds no weight, and transformers then makes one up, with no more than a warning.
    """
    return torch.zeros(1, dtype=torch.uint8)
