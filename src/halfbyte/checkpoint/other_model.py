"""A model that another project wrote, as a `StoredModel`, which `load`, `export` and `convert` read.

`Entries` are the tensors of its files (`foreign/`, `gguf/`). A plan (`mapping/plan.py`) maps them to the tensors of the model: it renames,
stacks and splits them as transformers does, and decides which stay quantized, or which of a float model are quantized as they are read.
Here tensors are read by the plan's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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


class OtherModel(StoredModel):
    """The model that a config describes, from tensors in files; or only the tensors, where it names no architecture.

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
            quantize: How to quantize weights as they are read; all must be floats then, and a method that needs calibration is replaced
                by the one for weights that calibration does not reach. None: those that are quantized stay so.
            kept: Modules that `quantize` leaves in floating point, and why.
        """
        self.entries, self._quantize, self._kept = entries, quantize, kept
        self._notes = list(entries.notes)
        if known_architecture(config) is not None:
            plan = plan_model(config, entries, self._choose)
        else:
            plan = plan_by_rule(entries, self._choose)
            self._notes.append("no architecture of transformers is named: every 2-D float tensor called *.weight is taken as a Linear's")
        self.plan = plan
        self._steps = plan.step_of()
        self._orders: dict[str, ReadColumnOrder] = {}
        self._split: tuple[Step, torch.dtype, Mapping[str, Tensor]] | None = None  # the results of the last step that has several
        for name, weight in plan.weights.items():
            stored = entries.entries[self._steps[name][0].sources[0]].quantized
            settings = stored if quantize is None else quantize
            assert settings is not None
            if name in plan.linears or weight.kind != "Embedding":
                plan.weights[name] = replace(weight, compute=settings.compute, activation=settings.activation)
            if quantize is None and stored is not None and stored.order is not None:
                self._orders[order_name(name)] = stored.order
                plan.plain[order_name(name)] = TensorSpec(torch.int32, weight.shape[-1:])
                plan.about[order_name(name)] = About("tensor", "the order of the columns of a quantized weight")
        self._report_dequantized()
        super().__init__(path, config, plan.weights, plan.plain, plan.tied)

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
        (step, target), weight = self._steps[name], self.weights[name]
        if self._quantize is not None:
            method = UNCALIBRATED.get(self._quantize.method, self._quantize.method)
            tensor = self._floats(name, weight.dtype)
            try:
                codes = quantize_weight(weight.kind, tensor, weight.format, method, name, weight.fold)
            except FormatError as e:
                if self._quantize.strict:
                    raise
                raise Misfits({name.removesuffix(".weight"): str(e)}) from e
            self.plan.weights[name] = replace(weight, error=relative_error(tensor, codes, weight.kind, weight.fold))
            return codes
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

    def _plain_tensor(self, name: str) -> Tensor:
        return self._orders[name]() if name in self._orders else self._floats(name, self.plain[name].dtype)

    def _floats(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a tensor of the model as floats."""
        step, target = self._steps[name]
        if self._split is not None and self._split[:2] == (step, dtype):
            tensor = self._split[2][target]
        else:
            results = step.run(lambda source: self.entries.read(source, dtype))
            self._split = (step, dtype, results) if len(step.targets) > 1 else None
            tensor = results[target]
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
    """Return a config by which a model can be quantized as it is loaded. Raises ArgumentError if it needs calibration, or has one."""
    config, calibration = take_calibration(config, None, in_memory=False)
    if calibration is not None:
        raise ArgumentError("a model that is quantized while it loads cannot be calibrated: use halfbyte.convert, or quantize_")
    return config
