"""A model of other files than halfbyte's as a model on disk, by a plan that maps the tensors of the files to those of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, Order
from halfbyte.checkpoint.mapping.architecture import known_architecture
from halfbyte.checkpoint.mapping.plan import Misfits, plan_by_rule, plan_model, report
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import ArgumentError, CheckpointError, FormatError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.io.tensors import Spec
from halfbyte.nn.config import NO_REASONS, Config, Decisions, choose, take_calibration
from halfbyte.nn.described import Candidate
from halfbyte.nn.kinds import quantize_weight
from halfbyte.nn.report import Report


class OtherModel(StoredModel):
    """The model that a config describes, from tensors in files; or only the tensors, where it names no architecture.

    quantize  how to quantize weights as they are read; all must be floats then
    kept      modules that stay in floating point then, and why
    """

    def __init__(
        self, path: Path, config: dict[str, object], entries: Entries, quantize: Config | None = None, kept: Mapping[str, str] = NO_REASONS
    ) -> None:
        self._entries, self._quantize, self.kept = entries, quantize, kept
        self._notes = list(entries.notes)
        if known_architecture(config) is not None:
            plan = plan_model(config, entries, self._choose)
        else:
            plan = plan_by_rule(entries, self._choose)
            self._notes.append("no architecture of transformers is named: names are those of the files")
        self._plan = plan
        self._steps = {plan.renamed.get(target, target): (step, target) for step in plan.steps for target in step.targets}
        self._orders: dict[str, Order] = {}
        for name, weight in plan.weights.items():
            stored = entries.entries[self._steps[name][0].sources[0]].quantized
            how = stored if quantize is None else quantize
            assert how is not None
            plan.weights[name] = replace(weight, compute=how.compute, activation=how.activation)
            if quantize is None and stored is not None and stored.order is not None:
                self._orders[order_name(name)] = stored.order
                plan.plain[order_name(name)] = Spec(torch.int32, weight.shape[-1:])
                plan.about[order_name(name)] = "tensor", "the order of the columns of a quantized weight"
        self._say_what_is_dequantized()
        super().__init__(path, config, plan.weights, plan.plain, plan.tied)

    def _choose(self, found: Sequence[Candidate], sources: Mapping[str, Sequence[str]]) -> Decisions:
        if self._quantize is None:
            return self._entries.choose(found, sources)
        if take_calibration(self._quantize, None, in_memory=False)[1] is not None:
            raise ArgumentError("a model that is quantized while it loads cannot be calibrated: use halfbyte.convert, or quantize_")
        return choose(found, self._quantize, self.kept)

    def _say_what_is_dequantized(self) -> None:
        plan = self._plan
        for step in plan.steps:
            form = self._entries.form(step.sources)
            for target in step.targets if form is not None else ():
                name = plan.renamed.get(target, target)
                kind, reason = plan.about.get(name, ("", ""))
                if step.converts:
                    plan.about[name] = kind, f"{form}, dequantized: transformers keeps it fused, stacked or split"
                elif "dequantized" not in reason:
                    plan.about[name] = kind, f"{form}, dequantized: {reason}"

    def codes(self, name: str) -> Codes:
        (step, target), weight = self._steps[name], self.weights[name]
        if self._quantize is not None:
            try:
                return quantize_weight(weight.kind, self._floats(name, weight.dtype), weight.format, self._quantize.method, name)
            except FormatError as e:
                if self._quantize.strict:
                    raise
                raise Misfits({name.removesuffix(".weight"): str(e)}) from e
        if not step.stacks:
            return self._entries.codes(step.sources[0])
        matrices = {source: self._entries.codes(source).tensors() for source in step.sources}
        tensors = {}
        for part in stored_tensors(weight.format, weight.shape):
            tensors[part] = step.run(lambda source, part=part: matrices[source][part])[target]  # type: ignore[misc]
        try:
            return Codes.from_tensors(weight.format, weight.shape, tensors)
        except FormatError as e:
            raise CheckpointError(f"{name}: the experts of {self.path} do not fit together ({e}): the checkpoint is damaged") from e

    def _plain_tensor(self, name: str) -> Tensor:
        return self._orders[name]() if name in self._orders else self._floats(name, self.plain[name].dtype)

    def _floats(self, name: str, dtype: torch.dtype) -> Tensor:
        step, target = self._steps[name]
        tensor = step.run(lambda source: self._entries.read(source, dtype))[target]
        # The result of a conversion may be a view of a larger tensor.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    def left_out(self) -> Sequence[str]:
        names: dict[str, list[str]] = {}
        for name, reason in self._plan.unused.items():
            if reason.startswith("equal to"):  # nothing is lost
                continue
            names.setdefault(reason, []).append(name)
        return [f"{len(some)} tensors of the files are left out, such as {some[0]}: {reason}" for reason, some in names.items()]

    def is_parameter(self, name: str) -> bool:
        return self._plan.is_parameter(name)

    def nbytes(self, name: str) -> int:
        """Where the files have several tensors as one, an equal part of it."""
        if name not in self._steps:
            return 0
        step, _ = self._steps[name]
        return sum(self._entries.entries[source].nbytes for source in step.sources) // len(step.targets)

    def form(self, name: str) -> str | None:
        return self._entries.form(self._steps[name][0].sources) if name in self._steps else None

    def report(self) -> Report:
        return report(self._plan, self._entries, self._notes)
