"""`PlannedModel`: a model that is read by a plan. It is the `StoredModel` of all files but halfbyte's own, and of float models that are
quantized as they are read.

    Entries              the tensors of the files (foreign/, gguf/)
    Plan                 maps them to the tensors of the model (mapping/plan.py): renames, stacks and splits them as transformers does, and
                         says which are codes
    PlannedModel         reads a tensor of the model by the plan's step that computes it

Loading (loading.py, integrations/transformers/gguf.py), `export` and `convert` (quantize_checkpoint.py) open one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.checkpoint.entries import Entries, ReadColumnOrder
from halfbyte.checkpoint.mapping.architecture import Step, known_architecture
from halfbyte.checkpoint.mapping.plan import About, Misfits, plan_by_rule, plan_model, report
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import ArgumentError, CheckpointError, FormatError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.config import NO_REASONS, Config, Decisions, choose, take_calibration
from halfbyte.nn.convert import UNCALIBRATED
from halfbyte.nn.described import Candidate
from halfbyte.nn.kinds import quantize_weight, relative_error
from halfbyte.nn.report import Report


class _Results(NamedTuple):
    """All results of a step, by its targets, as `dtype`."""

    step: Step
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]


class PlannedModel(StoredModel):
    """The model that a config describes, from tensors in files; or only the tensors, where the config names no architecture.

    Attributes:
        entries: The tensors of the files.
        plan: How they become those of the model.
    """

    def __init__(
        self, path: Path, config: dict[str, object], entries: Entries, quantize: Config | None = None, kept: Mapping[str, str] = NO_REASONS
    ) -> None:
        """Plan how the tensors are read.

        Args:
            path: The folder or file, for errors.
            config: config.json.
            entries: The tensors of the files.
            quantize: How to quantize weights as they are read, all of which are floats in the files then; in place of a method that needs
                calibration the one for weights that calibration does not reach is used. None: weights that are codes in the files stay so.
            kept: Modules that `quantize` leaves in floating point, and why.
        """
        self.entries, self._quantize, self._kept = entries, quantize, kept
        self._notes = list(entries.notes)
        if known_architecture(config) is not None:
            self.plan = plan_model(config, entries, self._choose)
        else:
            self.plan = plan_by_rule(entries, self._choose)
            self._notes.append("no architecture of transformers is named: every 2-D float tensor called *.weight is taken as a Linear's")
        self._steps = self.plan.step_of()
        self._column_orders: dict[str, ReadColumnOrder] = {}
        self._last_results: _Results | None = None  # of the last step with several targets, which are usually read one after the other
        self._complete_weights()
        self._report_dequantized()
        super().__init__(path, config, self.plan.weights, self.plan.plain, self.plan.tied)

    def _complete_weights(self) -> None:
        """Set how the plan's weights compute, and add the orders of their columns to the plan's tensors."""
        plan = self.plan
        for name, weight in plan.weights.items():
            stored = self.entries.entries[self._steps[name][0].sources[0]].quantized
            settings = stored if self._quantize is None else self._quantize
            assert settings is not None  # a weight of the plan is codes in the files, or `quantize` says how it becomes codes
            if name in plan.linears or weight.kind != "Embedding":
                plan.weights[name] = replace(weight, compute=settings.compute, activation=settings.activation)
            if self._quantize is None and stored is not None and stored.order is not None:
                order = order_name(name)
                self._column_orders[order] = stored.order
                plan.plain[order] = TensorSpec(torch.int32, weight.shape[-1:])
                plan.about[order] = About("tensor", "the order of the columns of a quantized weight")

    def _choose(self, candidates: Sequence[Candidate], sources: Mapping[str, Sequence[str]]) -> Decisions:
        """Decide on the format of each module that holds a weight; sources: the tensors of the files that it comes from."""
        if self._quantize is None:
            return self.entries.choose(candidates, sources)
        return choose(candidates, self._quantize, self._kept)

    def _report_dequantized(self) -> None:
        """Add to the report which tensors are quantized in the files and floats in the model, and why."""
        plan = self.plan
        for step in plan.steps:
            stored_as = self.entries.stored_as(step.sources)
            for target in step.targets if stored_as is not None else ():
                name = plan.stored_name(target)
                kind, reason = plan.about.get(name, About("", ""))
                if step.converts:
                    plan.about[name] = About(kind, f"{stored_as}, dequantized: transformers keeps it fused, stacked or split")
                elif "dequantized" not in reason:
                    plan.about[name] = About(kind, f"{stored_as}, dequantized: {reason}")

    def codes(self, name: str) -> Codes:
        """Read a weight, or quantize it.

        Raises:
            Misfits: `quantize` is not strict, and the weight does not fit its format.
        """
        if self._quantize is not None:
            return self._quantized(name, self._quantize)
        (step, target), weight = self._steps[name], self.weights[name]
        if not step.stacks:
            return self.entries.codes(step.sources[0])
        # Experts that are separate in the files: the step stacks their codes, then their scales, ….
        matrices = {source: self.entries.codes(source).tensors() for source in step.sources}
        tensors = {}
        for part in stored_tensors(weight.format, weight.shape):
            tensors[part] = step.run(lambda source, part=part: matrices[source][part])[target]  # type: ignore[misc]
        try:
            return Codes.from_tensors(weight.format, weight.shape, tensors)
        except FormatError as e:
            raise CheckpointError(f"{name}: the experts of {self.path} do not fit together ({e}): the checkpoint is damaged") from e

    def _quantized(self, name: str, config: Config) -> Codes:
        """Read a weight as floats, and quantize it; the plan notes the error."""
        weight, method = self.weights[name], UNCALIBRATED.get(config.method, config.method)
        tensor = self._floats(name, weight.dtype)
        try:
            codes = quantize_weight(weight.kind, tensor, weight.format, method, name, weight.fold)
        except FormatError as e:
            if config.strict:
                raise
            raise Misfits({name.removesuffix(".weight"): str(e)}) from e
        self.plan.weights[name] = replace(weight, error=relative_error(tensor, codes, weight.kind, weight.fold))
        return codes

    def _plain_tensor(self, name: str) -> Tensor:
        return self._column_orders[name]() if name in self._column_orders else self._floats(name, self.plain[name].dtype)

    def _floats(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a tensor of the model as floats."""
        step, target = self._steps[name]
        last = self._last_results
        if last is not None and (last.step, last.dtype) == (step, dtype):
            tensor = last.tensors[target]
        else:
            tensors = step.run(lambda source: self.entries.read(source, dtype))
            self._last_results = _Results(step, dtype, tensors) if len(step.targets) > 1 else None
            tensor = tensors[target]
        # The result of a conversion may be a view of a larger tensor.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    def left_out(self) -> Sequence[str]:
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.plan.unused.items():
            if not reason.startswith("equal to"):  # a tied weight: nothing is lost
                names_by_reason.setdefault(reason, []).append(name)
        return [
            f"{len(names)} tensors of the files are left out, such as {names[0]}: {reason}" for reason, names in names_by_reason.items()
        ]

    def is_parameter(self, name: str) -> bool:
        return self.plan.is_parameter(name)

    def nbytes(self, name: str) -> int:
        """Return the bytes in the files; of a tensor that files store together with others, an equal part."""
        if name not in self._steps:
            return 0
        step, _ = self._steps[name]
        return sum(self.entries.entries[source].nbytes for source in step.sources) // len(step.targets)

    def stored_as(self, name: str) -> str | None:
        return self.entries.stored_as(self._steps[name][0].sources) if name in self._steps else None

    def report(self) -> Report:
        return report(self.plan, self.entries, self._notes)


def without_calibration(config: Config) -> Config:
    """Return a config by which a model can be quantized as it is loaded.

    Raises:
        ArgumentError: It needs calibration, or has one.
    """
    config, calibration = take_calibration(config, None, in_memory=False)
    if calibration is not None:
        raise ArgumentError("a model that is quantized while it loads cannot be calibrated: use halfbyte.convert, or quantize_")
    return config
