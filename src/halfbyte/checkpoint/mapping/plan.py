"""The plan for the tensors of a model's files: their names in the model, and which are quantized, tied or unused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.mapping.architecture import Step, initial, rename, skeleton, steps_to
from halfbyte.checkpoint.mapping.left_out import Files, left_out
from halfbyte.checkpoint.native.manifest import Weight
from halfbyte.checkpoint.native.quantization_config import dtype_named
from halfbyte.errors import CheckpointError
from halfbyte.formats.spec import Format
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.candidates import candidates, named_tensors
from halfbyte.nn.described import Candidate
from halfbyte.nn.kinds import codes_shape, kind_of
from halfbyte.nn.modules.conv import fold_of
from halfbyte.nn.modules.expanded import collapse_, expand_, originals
from halfbyte.nn.modules.transposed import is_transposed
from halfbyte.nn.report import Report, Row
from halfbyte.ops.checks import FLOATS

NOT_A_WEIGHT = "not a 2-D tensor of float32, bfloat16 or float16 called *.weight"
# (modules that hold a weight, module -> the tensors of the files that its weight consists of) -> for each the format, or why it has none.
Choose = Callable[[Sequence[Candidate], Mapping[str, Sequence[str]]], Mapping[str, Format | str]]


class Misfits(Exception):
    """Raised while a model is read, for weights that their formats cannot hold. The caller quantizes again, with these in floating point.

    Attributes:
        kept: module -> the reason.
    """

    def __init__(self, kept: Mapping[str, str]) -> None:
        super().__init__(*kept.values())
        self.kept = kept


class Source(Files, Protocol):
    """The tensors of a model's files, by their names there."""

    def outputs_first(self, name: str) -> bool: ...


@dataclass
class Plan:
    """What becomes of each tensor of the files. Names are those in the checkpoint, unless something else is said.

    Attributes:
        steps: How the tensors are computed from those of the files; their targets have the model's names.
        renamed: A step's target -> its name in the checkpoint, for all targets.
        weights: The quantized tensors.
        plain: The others.
        about: For each tensor of the model: (the kind of its module, why it is not quantized, if it is not).
        tied: The name of a tensor -> the name under which its parameter is stored, as in the manifest.
        unused: Names in the files of tensors that the model does not have -> why.
        linears: The names in `weights` that belong to Linears.
        model: The model on the meta device; None where only the files are known.
    """

    steps: list[Step]
    renamed: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    plain: dict[str, TensorSpec] = field(default_factory=dict)
    about: dict[str, tuple[str, str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    linears: set[str] = field(default_factory=set)
    model: nn.Module | None = None

    def given(self) -> dict[str, TensorSpec]:
        """Return the targets of the steps that read files, in the dtypes of the files; the others are constants."""
        return {self.renamed.get(target, target): spec for step in self.steps for target, spec in step.targets.items() if step.sources}

    def is_parameter(self, name: str) -> bool:
        """Whether a tensor is known to be a parameter of the model, not a buffer."""
        return name in self._parameters

    @cached_property
    def _parameters(self) -> Set[str]:
        return set() if self.model is None else {name for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def dtype(self, name: str) -> torch.dtype:
        return self.weights[name].dtype if name in self.weights else self.plain[name].dtype


def plan_model(described: Mapping[str, object], source: Source, choose: Choose) -> Plan:
    """Plan for an architecture of transformers, by its modules on the meta device."""
    files = source.specs()
    floats = (spec.dtype for spec in files.values() if spec.dtype in FLOATS)
    dtype = dtype_named(described.get("dtype", described.get("torch_dtype"))) or next(floats, torch.float32)
    model = skeleton(described, dtype, [spec.shape for spec in files.values()])
    steps, unused = steps_to(model, files)
    plan = Plan(steps, unused=left_out(model, steps, unused, source), model=model)
    _settle_ties(plan, model, source)
    first: dict[int, str] = {}  # id of a tensor of the model -> its first name, which is its name in the checkpoint
    canonical = {name: first.setdefault(id(tensor), name) for name, _, tensor in named_tensors(model)}
    plan.renamed = {target: canonical.get(target, target) for step in steps for target in step.targets}
    plan.tied = {name: owner for name, owner in canonical.items() if name != owner}
    if strange := plan.given().keys() - canonical.keys():
        raise CheckpointError(f"transformers makes {min(strange)} of the files' tensors, which {type(model).__name__} does not have")
    _settle_tensors(plan, model, _decide(plan, model, canonical, source, choose))
    return plan


def _decide(plan: Plan, model: nn.Module, canonical: Mapping[str, str], source: Source, choose: Choose) -> Mapping[str, Format | str]:
    """Return what `choose` decides for each module that holds a weight, and update `model` and `plan` to it.

    Stacks of experts that it quantizes become modules of the model: their parameters have other names then, and transposed ones become
    outputs first. canonical: name of a tensor -> its first name.
    """
    tensors_before = list(named_tensors(model))
    unchanged = {plan.renamed[target]: step.sources[0] for step in plan.steps if not step.converts for target in step.targets}
    source_of = {name: unchanged[owner] for name, owner in canonical.items() if owner in unchanged}
    expanded = expand_(model)
    modules = candidates(model, without_data=True)
    # Experts that are stacked in the files have the name of the parameter.
    sources: dict[str, Sequence[str]] = {c.name: (source_of[n],) for c in modules for n in (f"{c.name}.weight", c.name) if n in source_of}
    sources |= {target: step.sources for step in plan.steps if step.stacks for target in step.targets}
    decisions = choose(modules, sources)
    views = originals(expanded)
    collapse_(model, expanded, lambda name: isinstance(decisions.get(name), Format))
    after = {(name, id(tensor)) for name, _, tensor in named_tensors(model)}
    moved = {old: f"{old}.weight" for old, _, t in tensors_before if (f"{old}.weight", id(views.get(id(t), t))) in after}
    # For weights that the float model has inputs first: whether they become outputs first, which quantized ones are.
    outputs_first = {old: (moved.get(old, old), id(views[id(t)])) in after for old, _, t in tensors_before if id(t) in views}
    plan.steps = [_transposed(step, plan, source, outputs_first) for step in plan.steps]
    plan.renamed = {target: moved.get(name, name) for target, name in plan.renamed.items()}
    plan.tied = {moved.get(name, name): moved.get(owner, owner) for name, owner in plan.tied.items()}
    return decisions


def _settle_tensors(plan: Plan, model: nn.Module, decisions: Mapping[str, Format | str]) -> None:
    """Make each tensor of the model that is not tied to another one of the plan's weights or plain tensors.

    Raises:
        CheckpointError: A tensor is in no file, or has another shape there.
    """
    places, given = list(named_tensors(model)), plan.given()
    linears = {id(module.weight) for _, module, _ in places if isinstance(module, nn.Linear)}
    for name, module, tensor in places:
        prefix, _, tensor_name = name.rpartition(".")
        decision = decisions.get(prefix, decisions.get(name, ""))
        plan.about[name] = kind_of(module), decision if isinstance(decision, str) else "the bias of a quantized weight"
        if name in plan.tied:
            continue
        spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
        if name not in given and not tensor.is_meta and not isinstance(tensor, nn.Parameter):
            plan.steps.append(Step((), {name: spec}, partial(_constant, {name: tensor})))  # a buffer missing in older files
        elif name not in given and (value := initial(model, name)) is not None:
            plan.steps.append(Step((), {name: spec}, partial(_constant, {name: value})))
        elif name not in given:
            parts = [other.removeprefix(f"{prefix}.") for other in plan.unused if other.startswith(f"{prefix}.")]
            remedy = f"its {', '.join(parts)[:80]} are not read, take another form of the model" if parts else "save the whole model first"
            raise CheckpointError(f"no file has {name}, which {type(model).__name__} needs: {remedy}")
        elif (got := given[name]).shape != spec.shape or got.dtype.is_floating_point != spec.dtype.is_floating_point:
            what = f"{name} is {got.dtype} {list(got.shape)} in the files, but config.json makes it {list(spec.shape)} of {spec.dtype}"
            raise CheckpointError(f"{what}: one of them is damaged, or of another model")
        if isinstance(decision, Format) and tensor_name == "weight":
            kind = kind_of(module)
            shape = codes_shape(module, spec.shape, decision)
            plan.weights[name] = Weight(kind, decision, shape, spec.dtype, fold=fold_of(module), transposed=is_transposed(module))
            if id(tensor) in linears:
                plan.linears.add(name)
        else:
            plan.plain[name] = spec


def _transposed(step: Step, plan: Plan, source: Source, outputs_first: Mapping[str, bool]) -> Step:
    """Return the step, with the last two dimensions swapped in targets that the model has transposed relative to the files.

    outputs_first: whether the model has a weight outputs first, for those whose order is known; elsewhere nothing is swapped.
    """
    transposed = {}
    for target, spec in step.targets.items():
        if (now := outputs_first.get(plan.renamed[target])) is not None and len(spec.shape) > 1:
            # Saved from a module that replaced the experts, whose weight is outputs first in any file.
            of_module = step.sources[0].endswith(".weight") and not target.endswith(".weight")
            if now != (of_module or source.outputs_first(step.sources[0])):
                transposed[target] = TensorSpec(spec.dtype, (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]))
    if not transposed:
        return step

    def run(read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        return {target: tensor.mT if target in transposed else tensor for target, tensor in step.run(read).items()}

    return replace(step, targets={**step.targets, **transposed}, run=run)


def _constant(tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
    return tensors


def _settle_ties(plan: Plan, model: nn.Module, source: Source) -> None:
    """Drop the second of two tied tensors that the files hold under both names where they are equal; where they are not, untie them.

    Raises:
        CheckpointError: They are not equal, and the model has one module under both names, which cannot be untied.
    """
    step_of = {target: step for step in plan.steps for target in step.targets}
    first_of: dict[int, tuple[str, nn.Module]] = {}
    for name, module, tensor in list(named_tensors(model)):
        if name not in step_of:
            continue
        first, first_module = first_of.setdefault(id(tensor), (name, module))
        if first == name:
            continue
        step, first_step = step_of[name], step_of[first]
        alone = all(len(one.sources) == len(one.targets) == 1 for one in (step, first_step))
        if alone and step.converts == first_step.converts and source.same(step.sources[0], first_step.sources[0]):
            plan.steps.remove(step)
            plan.unused[step.sources[0]] = f"equal to {first}, to which it is tied"
        elif module is first_module:
            what = f"the files hold different values of {first} and {name}, which are one tensor of {type(model).__name__}"
            raise CheckpointError(f"{what}: remove the wrong one from the files")
        else:
            untied = torch.empty_like(tensor)
            setattr(module, name.rpartition(".")[2], nn.Parameter(untied) if isinstance(tensor, nn.Parameter) else untied)


def plan_by_rule(source: Source, choose: Choose) -> Plan:
    """Plan for tensors without an architecture: each 2-D floating-point tensor called *.weight is taken as a Linear's."""
    specs = source.specs()
    plan = Plan([rename(name, name, spec) for name, spec in specs.items()])
    fits = [name for name, spec in specs.items() if len(spec.shape) == 2 and spec.dtype in FLOATS and spec.nbytes > 0]
    found = {name: Candidate(name.removesuffix(".weight"), "Linear", name) for name in fits if name.endswith(".weight")}
    decisions = choose(list(found.values()), {candidate.name: (name,) for name, candidate in found.items()})
    for name, spec in specs.items():
        decision = decisions[found[name].name] if name in found else NOT_A_WEIGHT
        if isinstance(decision, Format):
            plan.weights[name] = Weight("Linear", decision, spec.shape, spec.dtype)
            plan.linears.add(name)
        else:
            plan.plain[name] = spec
            plan.about[name] = "Linear" if name in found else "tensor", decision
    return plan


def report(plan: Plan, source: Source, notes: Sequence[str]) -> Report:
    """Report what becomes of each tensor of a plan, which need not have been carried out."""
    given, rows = plan.given(), []
    for name, weight in plan.weights.items():
        before, module = given[name].nbytes, name.removesuffix(".weight")
        rows.append(Row(module, weight.kind, weight.shape, weight.format, None, before, weight.stored_bytes, weight.error))
    for name, spec in plan.plain.items():
        before = given[name].nbytes if name in given else 0
        rows.append(Row(name, plan.about[name][0], spec.shape, None, plan.about[name][1], before, spec.nbytes))
    for name, owner in plan.tied.items():
        kind, reason = plan.about[name]
        if owner in plan.weights:
            weight = plan.weights[owner]
            short, tied_to = name.removesuffix(".weight"), owner.removesuffix(".weight")
            rows.append(Row(short, kind, weight.shape, weight.format, None, 0, 0, weight.error, tied_to))
        else:
            rows.append(Row(name, kind, plan.plain[owner].shape, None, reason, 0, 0, tied_to=owner))
    specs = source.specs()
    for name, reason in plan.unused.items():
        rows.append(Row(name, "tensor", specs[name].shape, None, f"left out: {reason}", specs[name].nbytes, 0))
    return Report(tuple(rows), tuple(notes))
