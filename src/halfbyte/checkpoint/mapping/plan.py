"""The plan for reading a model's files: what becomes of each of their tensors, decided before any data is read.

Three kinds of names occur, which are equal for most tensors:

    name in the files         "transformer.h.0.attn.c_attn.weight", "model.layers.0.mlp.experts.3.up_proj.weight"
    name in the float model   of a parameter or buffer of transformers' model: a target of a `Step` (architecture.py)
    stored name               of a tensor in halfbyte's checkpoint. Tied tensors are stored once, under the first of their names; a stack of
                              experts that is quantized, a parameter "….up_proj" of the float model, is stored as "….up_proj.weight"

`plan_model` plans for an architecture of transformers, `plan_by_rule` for tensors alone. `convert` (quantize_checkpoint.py) writes the
tensors of a plan, `PlannedModel` (planned_model.py) and `Materializer` (materialize.py) read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.entries import Entries
from halfbyte.checkpoint.mapping.architecture import Step, initial, rename, skeleton, steps_to
from halfbyte.checkpoint.mapping.left_out import left_out
from halfbyte.checkpoint.mapping.ties import settle_ties
from halfbyte.checkpoint.native.manifest import Weight
from halfbyte.checkpoint.native.quantization_config import dtype_of
from halfbyte.errors import CheckpointError
from halfbyte.formats.spec import Format
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.candidates import candidates, named_tensors
from halfbyte.nn.config import Decisions
from halfbyte.nn.described import Candidate
from halfbyte.nn.kinds import codes_shape, kind_of
from halfbyte.nn.modules.conv import fold_of
from halfbyte.nn.modules.expanded import collapse_, expand_, transposed_views
from halfbyte.nn.modules.transposed import is_transposed
from halfbyte.nn.report import Report, Row
from halfbyte.ops.checks import FLOATS

NOT_A_WEIGHT = "not a 2-D tensor of float32, bfloat16 or float16 called *.weight"
# (modules that hold a weight, name of a module -> names in the files of what its weight consists of) -> the formats of the weights
Choose = Callable[[Sequence[Candidate], Mapping[str, Sequence[str]]], Decisions]


class Misfits(Exception):
    """Raised while a model is read, for weights that their formats cannot hold. The caller quantizes again, with these in floating point.

    Attributes:
        kept: Name of a module -> the reason.
    """

    def __init__(self, kept: Mapping[str, str]) -> None:
        super().__init__(*kept.values())
        self.kept = kept


class About(NamedTuple):
    """What the report says of a tensor.

    Attributes:
        kind: Of its module, such as "Linear".
        reason: Why it is not quantized; "" where it is.
    """

    kind: str
    reason: str


@dataclass
class Plan:
    """What becomes of each tensor of the files. The keys of dicts are stored names, unless something else is said.

    Attributes:
        steps: How tensors are computed from those of the files; their targets are names in the float model.
        stored_names: Name in the float model -> stored name, of the targets of steps whose names differ, and maybe of others.
        weights: The quantized tensors.
        plain: The others.
        about: Of each tensor, also of tied ones under their own names.
        tied: Name of a tensor that is tied -> the stored name.
        unused: Name in the files of a tensor that the model does not have -> why it is not missed.
        linears: The names in `weights` that belong to Linears.
        model: The float model on the meta device; None where only the files are known.
    """

    steps: list[Step]
    stored_names: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    plain: dict[str, TensorSpec] = field(default_factory=dict)
    about: dict[str, About] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    linears: set[str] = field(default_factory=set)
    model: nn.Module | None = None

    def stored_name(self, target: str) -> str:
        """Return the stored name of a step's target."""
        return self.stored_names.get(target, target)

    def read_specs(self) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes that tensors have as they are read from files; constants, of no file, are left out."""
        return {self.stored_name(target): spec for step in self.steps if step.sources for target, spec in step.targets.items()}

    def step_of(self) -> dict[str, tuple[Step, str]]:
        """Return for each stored tensor the step that computes it, and which of its targets it is."""
        return {self.stored_name(target): (step, target) for step in self.steps for target in step.targets}

    def is_parameter(self, name: str) -> bool:
        """Whether a tensor is known to be a parameter of the model, not a buffer."""
        return name in self._parameters

    @cached_property
    def _parameters(self) -> Set[str]:
        return set() if self.model is None else {name for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a plain tensor, or that which a quantized weight has in the float model."""
        return self.weights[name].dtype if name in self.weights else self.plain[name].dtype


def plan_model(config: Mapping[str, object], files: Entries, choose: Choose) -> Plan:
    """Plan for an architecture of transformers.

    Args:
        config: config.json, which names the architecture.
        files: The tensors of the files.
        choose: Decides on the format of each weight.

    Raises:
        CheckpointError: A tensor is missing, superfluous or of another shape than config.json says.
    """
    specs = files.specs()
    floats = (spec.dtype for spec in specs.values() if spec.dtype in FLOATS)
    dtype = dtype_of(config) or next(floats, torch.float32)
    model = skeleton(config, dtype, [spec.shape for spec in specs.values()])
    steps, unused = steps_to(model, specs)
    unused = left_out(model, steps, unused, files)
    settled = settle_ties(model, steps, files)
    plan = Plan(settled.steps, unused=unused | settled.dropped, model=model)
    first_names: dict[int, str] = {}  # id of a tensor -> the first of its names
    stored = {name: first_names.setdefault(id(tensor), name) for name, _, tensor in named_tensors(model)}
    plan.stored_names = {target: stored.get(target, target) for step in plan.steps for target in step.targets}
    plan.tied = {name: first for name, first in stored.items() if name != first}
    if unknown := plan.read_specs().keys() - stored.keys():
        raise CheckpointError(f"transformers makes {min(unknown)} of the files' tensors, which {type(model).__name__} does not have")
    _plan_tensors(plan, model, _choose_formats(plan, model, files, choose))
    return plan


def _choose_formats(plan: Plan, model: nn.Module, files: Entries, choose: Choose) -> Decisions:
    """Let `choose` decide on the format of each weight, and bring `model` and `plan` into the form that follows from that.

    A stack of experts is a parameter of the float model, [E, N, K] or, inputs first, [E, K, N]. While `choose` decides, each is the
    `weight` [E, N, K] of a module of its own (nn/modules/expanded.py). Stacks that get a format stay such modules; the others become
    parameters again.
    """
    tensors_before = list(named_tensors(model))
    expanded = expand_(model)
    modules = candidates(model, without_data=True)
    decisions = choose(modules, _files_of_weights(plan, modules))
    views = transposed_views(expanded)
    collapse_(model, expanded, lambda name: isinstance(decisions.get(name), Format))
    places_after = {(name, id(tensor)) for name, _, tensor in named_tensors(model)}
    moved: dict[str, str] = {}  # name of a stack of experts in the float model -> its name as the weight of a module
    outputs_first: dict[str, bool] = {}  # for weights that the float model has inputs first: whether `model` has their transposed views
    for name, _, tensor in tensors_before:
        view = views.get(id(tensor))
        if (f"{name}.weight", id(tensor if view is None else view)) in places_after:
            moved[name] = f"{name}.weight"
        if view is not None:
            outputs_first[name] = (moved.get(name, name), id(view)) in places_after
    plan.steps = [_transposed(step, plan, files, outputs_first) for step in plan.steps]
    plan.stored_names = {target: moved.get(name, name) for target, name in plan.stored_names.items()}
    plan.tied = {moved.get(name, name): moved.get(owner, owner) for name, owner in plan.tied.items()}
    return decisions


def _files_of_weights(plan: Plan, modules: Sequence[Candidate]) -> dict[str, Sequence[str]]:
    """Return, by the names of modules, the names in the files of the tensors that their weights are made of without another conversion than
    stacking."""
    unchanged = {plan.stored_name(target): step.sources for step in plan.steps if not step.converts for target in step.targets}
    files: dict[str, Sequence[str]] = {}
    for module in modules:
        for name in (f"{module.name}.weight", module.name):  # the latter is the parameter that a stack of experts was
            if (stored := plan.tied.get(name, name)) in unchanged:
                files[module.name] = unchanged[stored]
    return files | {target: step.sources for step in plan.steps if step.stacks for target in step.targets}


def _transposed(step: Step, plan: Plan, files: Entries, outputs_first: Mapping[str, bool]) -> Step:
    """Return the step, with the last two dimensions swapped in targets whose files have the other order than the model.

    outputs_first: whether the model has a weight outputs first, by its stored name; weights that it does not name are not swapped.
    """
    swapped = {}
    for target, spec in step.targets.items():
        if (in_model := outputs_first.get(plan.stored_name(target))) is not None and len(spec.shape) > 1:
            # Saved from a module that replaced the experts, whose weight is outputs first in any file.
            of_module = step.sources[0].endswith(".weight") and not target.endswith(".weight")
            if in_model != (of_module or files.outputs_first(step.sources[0])):
                swapped[target] = TensorSpec(spec.dtype, (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]))
    if not swapped:
        return step

    def run(read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        return {target: tensor.mT if target in swapped else tensor for target, tensor in step.run(read).items()}

    return replace(step, targets={**step.targets, **swapped}, run=run)


def _plan_tensors(plan: Plan, model: nn.Module, decisions: Decisions) -> None:
    """Fill `about` for each tensor of the model, and `weights`, `plain` and `linears` for those that are stored.

    Raises:
        CheckpointError: A tensor is in no file, or has another shape there.
    """
    places, read_specs = list(named_tensors(model)), plan.read_specs()
    linears = {id(module.weight) for _, module, _ in places if isinstance(module, nn.Linear)}
    for name, module, tensor in places:
        prefix, _, tensor_name = name.rpartition(".")
        decision = decisions.get(prefix, decisions.get(name, ""))
        plan.about[name] = About(kind_of(module), decision if isinstance(decision, str) else "the bias of a quantized weight")
        if name in plan.tied:
            continue
        spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
        if name not in read_specs:
            plan.steps.append(_constant(name, _value_without_file(plan, model, name, tensor)))
        elif (got := read_specs[name]).shape != spec.shape or got.dtype.is_floating_point != spec.dtype.is_floating_point:
            what = f"{name} is {got.dtype} {list(got.shape)} in the files, but config.json makes it {list(spec.shape)} of {spec.dtype}"
            raise CheckpointError(f"{what}: one of them is damaged, or of another model")
        if isinstance(decision, Format) and tensor_name == "weight":
            shape = codes_shape(module, spec.shape, decision)
            transposed = is_transposed(module)
            plan.weights[name] = Weight(kind_of(module), decision, shape, spec.dtype, fold=fold_of(module), transposed=transposed)
            if id(tensor) in linears:
                plan.linears.add(name)
        else:
            plan.plain[name] = spec


def _value_without_file(plan: Plan, model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return the value of a tensor that no file has: a buffer that the model has computed, which older files lack, or a parameter that
    transformers computes. Raise CheckpointError for any other."""
    if not tensor.is_meta and not isinstance(tensor, nn.Parameter):
        return tensor
    if (value := initial(model, name)) is not None:
        return value
    prefix = f"{name.rpartition('.')[0]}."
    unread = ", ".join(other.removeprefix(prefix) for other in plan.unused if other.startswith(prefix))
    remedy = f"its {unread[:80]} are not read, take another form of the model" if unread else "save the whole model first"
    raise CheckpointError(f"no file has {name}, which {type(model).__name__} needs: {remedy}")


def _constant(name: str, value: Tensor) -> Step:
    """Return the step that gives a tensor a value that is in no file."""
    return Step((), {name: TensorSpec(value.dtype, tuple(value.shape))}, lambda _: {name: value})


def plan_by_rule(files: Entries, choose: Choose) -> Plan:
    """Plan for tensors without an architecture: each 2-D floating-point tensor called *.weight is taken as a Linear's."""
    specs = files.specs()
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
            plan.about[name] = About("Linear" if name in found else "tensor", decision)
    return plan


def report(plan: Plan, files: Entries, notes: Sequence[str]) -> Report:
    """Report what becomes of each tensor of a plan, whether it was carried out or not."""
    read_specs, rows = plan.read_specs(), []
    for name, weight in plan.weights.items():
        before, module = read_specs[name].nbytes, name.removesuffix(".weight")
        rows.append(Row(module, weight.kind, weight.shape, weight.format, None, before, weight.stored_bytes, weight.error))
    for name, spec in plan.plain.items():
        kind, reason = plan.about[name]
        before = read_specs[name].nbytes if name in read_specs else 0
        rows.append(Row(name, kind, spec.shape, None, reason, before, spec.nbytes))
    for name, owner in plan.tied.items():
        kind, reason = plan.about[name]
        if owner in plan.weights:
            weight = plan.weights[owner]
            module, tied_to = name.removesuffix(".weight"), owner.removesuffix(".weight")
            rows.append(Row(module, kind, weight.shape, weight.format, None, 0, 0, weight.error, tied_to))
        else:
            rows.append(Row(name, kind, plan.plain[owner].shape, None, reason, 0, 0, tied_to=owner))
    specs = files.specs()
    for name, reason in plan.unused.items():
        rows.append(Row(name, "tensor", specs[name].shape, None, f"left out: {reason}", specs[name].nbytes, 0))
    return Report(tuple(rows), tuple(notes))
