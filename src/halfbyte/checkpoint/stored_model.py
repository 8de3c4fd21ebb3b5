"""A model on disk, of any kind, whose names, shapes and dtypes are known before any tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.architecture import known_architecture
from halfbyte.checkpoint.entries import Entries
from halfbyte.checkpoint.manifest import Weight
from halfbyte.checkpoint.plan import plan_by_rule, plan_model, report
from halfbyte.errors import ArgumentError, CheckpointError, FormatError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.sharding import Ranges, narrowed, take
from halfbyte.formats.spec import Format
from halfbyte.io.tensors import Spec
from halfbyte.nn.candidates import Candidate, choose
from halfbyte.nn.config import Config, take_calibration
from halfbyte.nn.kinds import quantize_weight
from halfbyte.nn.permuted import ORDER
from halfbyte.nn.report import Report
from halfbyte.nn.static import Calibrated


@dataclass(frozen=True)
class StoredModel:
    """Names are those of the model's parameters and buffers, as in a halfbyte checkpoint.

    path     its name in error messages
    config   config.json without its settings of quantization
    weights  the quantized ones
    plain    all others. One called `<module>.input_order`, int32 [K], is the order of the columns of that module's weight
    tied     name -> the name, in `weights` or `plain`, of the tensor that it shares
    codes    reads a weight
    tensor   reads a plain tensor
    report   what became of each tensor of the files, and why
    nbytes   of each weight and plain tensor in the files
    static   of a network on int8 codes: what it is made from, besides the float network
    codes_part, tensor_part   read only some ranges along a dimension, where the files allow it
    """

    path: Path
    config: dict[str, Any]
    weights: Mapping[str, Weight]
    plain: Mapping[str, Spec]
    tied: Mapping[str, str]
    codes: Callable[[str], Codes]
    tensor: Callable[[str], Tensor]
    report: Callable[[], Report]
    nbytes: Mapping[str, int] = field(default_factory=dict)
    static: Calibrated | None = None
    codes_part: Callable[[str, int, Ranges], Codes] | None = None
    tensor_part: Callable[[str, int, Ranges], Tensor] | None = None

    def part_of_codes(self, name: str, dim: int, ranges: Ranges) -> Codes:
        """Some ranges of a weight along one of its dimensions, concatenated."""
        return take(self.codes(name), dim, ranges) if self.codes_part is None else self.codes_part(name, dim, ranges)

    def part_of_tensor(self, name: str, dim: int, ranges: Ranges) -> Tensor:
        """The same for a plain tensor."""
        return narrowed(self.tensor(name), dim, ranges) if self.tensor_part is None else self.tensor_part(name, dim, ranges)

    def names(self) -> Iterator[tuple[str, str]]:
        """(name, the name under which it is stored) of all tensors, tied ones included."""
        yield from ((name, name) for name in (*self.weights, *self.plain))
        yield from self.tied.items()

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Of all weights and plain tensors."""
        yield from (weight.shape for weight in self.weights.values())
        yield from (spec.shape for spec in self.plain.values())


def order_name(weight: str) -> str:
    """The name of the tensor with the order of a weight's columns."""
    return f"{weight.removesuffix('weight')}{ORDER}"


def open_entries(path: Path, config: dict[str, Any], entries: Entries, quantize: Config | None = None) -> StoredModel:
    """The model that a config describes, from tensors in files; or only the tensors, where it names no architecture.

    quantize  how to quantize weights as they are read; all must be floats then
    """
    choose = entries.choose if quantize is None else partial(_choose, quantize)
    if known_architecture(config) is not None:
        plan = plan_model(config, entries, choose)
        notes = list(entries.notes)
    else:
        plan = plan_by_rule(entries, choose)
        notes = [*entries.notes, "no architecture of transformers is named: names are those of the files"]
    steps = {plan.renamed.get(target, target): (step, target) for step in plan.steps for target in step.targets}
    orders = {}
    for name, weight in plan.weights.items():
        quantized = entries.entries[steps[name][0].sources[0]].quantized
        if quantize is not None:  # as it is read
            plan.weights[name] = replace(weight, compute=quantize.compute, activation=quantize.activation)
            continue
        assert quantized is not None
        plan.weights[name] = replace(weight, compute=quantized.compute, activation=quantized.activation)
        if quantized.order is not None:
            orders[order_name(name)] = quantized.order
            plan.plain[order_name(name)] = Spec(torch.int32, weight.shape[-1:])
            plan.about[order_name(name)] = "tensor", "the order of the columns of a quantized weight"

    for step in plan.steps:
        form = entries.form(step.sources)
        for target in step.targets if form is not None else ():
            name = plan.renamed.get(target, target)
            kind, reason = plan.about.get(name, ("", ""))
            if step.converts:
                plan.about[name] = kind, f"{form}, dequantized: transformers keeps it fused, stacked or split"
            elif "dequantized" not in reason:
                plan.about[name] = kind, f"{form}, dequantized: {reason}"

    def codes(name: str) -> Codes:
        step, target = steps[name]
        if quantize is not None:
            weight = plan.weights[name]
            return quantize_weight(weight.kind, floats(name, weight.dtype), weight.format, quantize.method, name)
        if not step.stacks:
            return entries.codes(step.sources[0])
        matrices = {source: entries.codes(source) for source in step.sources}
        weight, tensors = plan.weights[name], {}
        for part in stored_tensors(weight.format, weight.shape):
            tensors[part] = step.run(lambda source, part=part: matrices[source].tensors()[part])[target]  # type: ignore[misc]
        try:
            return Codes.from_tensors(weight.format, weight.shape, tensors)
        except FormatError as e:
            raise CheckpointError(f"{name}: the experts of {path} do not fit together ({e}): the checkpoint is damaged") from e

    def tensor(name: str) -> Tensor:
        return orders[name]() if name in orders else floats(name, plan.plain[name].dtype)

    def floats(name: str, dtype: torch.dtype) -> Tensor:
        step, target = steps[name]
        made = step.run(lambda source: entries.read(source, dtype))[target]
        # The result of a conversion may be a view of a larger tensor.
        return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made

    sizes = {name: sum(entries.entries[source].nbytes for source in step.sources) for name, (step, _) in steps.items()}
    return StoredModel(path, config, plan.weights, plan.plain, plan.tied, codes, tensor, lambda: report(plan, entries, notes), sizes)


def _choose(config: Config, found: Sequence[Candidate], sources: Mapping[str, Sequence[str]]) -> Mapping[str, Format | str]:
    if take_calibration(config, None, in_memory=False)[1] is not None:
        raise ArgumentError("a model that is quantized while it loads cannot be calibrated: use halfbyte.convert, or quantize_")
    return choose(found, config)
