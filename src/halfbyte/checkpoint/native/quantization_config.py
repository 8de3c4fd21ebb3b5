"""The `quantization_config` of config.json, which tells transformers that a model is quantized.

docs/engineering/checkpoint.md specifies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.errors import ArgumentError, CheckpointError, FormatError
from halfbyte.formats.spec import Format, as_format
from halfbyte.io.safetensors import is_shape
from halfbyte.nn.described import INPUT_SCALE, LOW_RANK, RESIDUAL, check_compute

if TYPE_CHECKING:
    from halfbyte.nn.modules.quantized import QuantModule

SETTINGS = "quantization_config"
METHOD = "halfbyte"
BITS = "bits"  # key: how many a code of 5 or 6 bits takes in the files
VERSION = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Module:
    """How one quantized module is stored and, if it is a Linear, how it multiplies.

    Attributes:
        shape: Of its codes: [N, K] of a Linear or Embedding, [E, N, K] of experts.
        compute, activation: How it is multiplied, as in `halfbyte.Config`.
        ordered: Whether its inputs are reordered: <module>.input_order is stored, too.
        dtype: The dtype of the float weight that it replaces, where that is not the model's.
        low_rank: The rank of the branch of the LowRankLinear whose residual it is, else 0; `with_branches` sets it.
        scaled: Whether that LowRankLinear has a scale of its inputs.
    """

    format: Format
    shape: tuple[int, ...]
    compute: str = "auto"
    activation: str = "block"
    ordered: bool = False
    dtype: torch.dtype | None = None
    low_rank: int = 0
    scaled: bool = False

    @classmethod
    def of(cls, module: QuantModule, dtype: torch.dtype) -> Module:
        """dtype: the model's."""
        from halfbyte.nn.modules.conv import QuantConv2d
        from halfbyte.nn.modules.experts import QuantExperts
        from halfbyte.nn.modules.permuted import PermutedLinear
        from halfbyte.nn.modules.quantized import QuantLinear

        dtype_of_module = None if module.dtype == dtype else module.dtype
        module_entry = cls(
            module.packed_anywhere.codes_format, module.codes_shape, ordered=isinstance(module, PermutedLinear), dtype=dtype_of_module
        )
        if isinstance(module, QuantLinear | QuantConv2d | QuantExperts):
            return replace(module_entry, compute=module.compute, activation=module.activation)
        return module_entry

    def to_json(self) -> dict[str, object]:
        entry = {**asdict(self), "format": str(self.format), "shape": list(self.shape)}
        del entry["dtype"]
        if not self.low_rank:
            del entry["low_rank"], entry["scaled"]
        if self.dtype is not None:
            entry["dtype"] = DTYPE_NAMES[self.dtype]
        if self.format.packed_bits:
            entry[BITS] = self.format.packed_bits
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Module:
        """The inverse of `to_json`; raises FormatError or ArgumentError for anything else."""
        fmt, shape, ordered = as_format(entry.get("format", "")), entry.get("shape"), entry.get("ordered", False)
        if not (isinstance(shape, list) and len(shape) in (2, 3) and is_shape(shape)) or not isinstance(ordered, bool):
            raise FormatError(f"a shape is two or three sizes and ordered true or false, got {short(shape)} and {short(ordered)}")
        dtype = entry.get("dtype")
        if dtype is not None and dtype_named(dtype) is None:
            raise FormatError(f"a dtype is one of {', '.join(DTYPES)}, got {short(dtype)}")
        rank, scaled = entry.get("low_rank", 0), entry.get("scaled", False)
        if type(rank) is not int or rank < 0 or not isinstance(scaled, bool) or (scaled and not rank):
            raise FormatError(
                f"a low_rank is a whole number, more than 0 if scaled, which is true or false, got {short(rank)} and {short(scaled)}"
            )
        settings = entry.get("compute", "auto"), entry.get("activation", "block")
        check_bits(fmt, entry)
        module_entry = cls(fmt, tuple(shape), *settings, ordered, dtype_named(dtype), rank, scaled)
        check_compute(module_entry.compute, module_entry.activation)
        return module_entry


def dtype_named(name: object) -> torch.dtype | None:
    """float32, bfloat16 or float16 by its name in a config.json, None for anything else."""
    return DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None


def dtype_of(config: Mapping[str, object]) -> torch.dtype | None:
    """Return the dtype that a config.json gives a model, under the key of transformers 5 or an earlier one; None where it gives none."""
    return dtype_named(config.get("dtype", config.get("torch_dtype")))


def check_bits(fmt: Format, entry: Mapping[str, object]) -> None:
    """Raise FormatError unless config.json says of a weight with codes of 5 or 6 bits that they take as many in the files."""
    bits = entry.get(BITS)
    if fmt.packed_bits and (type(bits) is not int or bits != fmt.packed_bits):
        raise FormatError(f"codes of {fmt} take {fmt.packed_bits} bits in files, got {short(bits)}")


def branches(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, bool]]:
    """The rank of each LowRankLinear, and whether its inputs have a scale. shapes: of the tensors that are not quantized."""
    names = (name for name, shape in shapes.items() if name.endswith(f".{LOW_RANK}") and len(shape) == 2)
    homes = {name.removesuffix(f".{LOW_RANK}"): shapes[name][0] for name in names}
    return {home: (rank, f"{home}.{INPUT_SCALE}" in shapes) for home, rank in homes.items()}


def with_branches(modules: Mapping[str, Module], shapes: Mapping[str, Sequence[int]]) -> dict[str, Module]:
    """The modules, those that are the residual of a LowRankLinear with its settings."""
    more = {f"{home}.{RESIDUAL}": settings for home, settings in branches(shapes).items()}
    return {name: replace(m, low_rank=more[name][0], scaled=more[name][1]) if name in more else m for name, m in modules.items()}


def describe(modules: Mapping[str, Module]) -> dict[str, object]:
    """The section for these modules, in plain types."""
    return {"quant_method": METHOD, "version": VERSION, "modules": {name: module.to_json() for name, module in modules.items()}}


def parse(section: Mapping[str, object]) -> dict[str, Module]:
    """The inverse of `describe`; raises CheckpointError where anything in the section is invalid."""
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
            modules[name] = Module.from_json(entry)
        except (ArgumentError, FormatError, TypeError) as e:
            raise CheckpointError(f"{short(name)} in the quantization_config: {e}: the checkpoint is damaged") from e
    return modules
