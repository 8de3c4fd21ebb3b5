"""Tied tensors of a model, such as an input and an output embedding, that files hold under more than one name.

Called by plan.py. transformers ties them again after it has read them; files of some trainers hold different values, as they were untied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from halfbyte.checkpoint.entries import Entries
from halfbyte.checkpoint.mapping.architecture import Step
from halfbyte.errors import CheckpointError
from halfbyte.nn.candidates import named_tensors


@dataclass(frozen=True)
class Settled:
    """What remains to be read.

    Attributes:
        steps: Without those of dropped tensors.
        dropped: Name in the files of a tensor that is not read -> why.
    """

    steps: list[Step]
    dropped: dict[str, str]


def settle_ties(model: nn.Module, steps: Sequence[Step], files: Entries) -> Settled:
    """Drop the second of two tied tensors that the files hold under both names where they are equal; where they are not, untie them.

    Args:
        model: On the meta device; tensors that are untied become tensors of their own there.
        steps: How its tensors are computed from the files.
        files: To compare tensors.

    Raises:
        CheckpointError: They are not equal, and the model has one module under both names, which cannot be untied.
    """
    settled = Settled(list(steps), {})
    step_of = {target: step for step in steps for target in step.targets}
    first_places: dict[int, tuple[str, nn.Module]] = {}  # id of a tensor -> the first name that the files have, and the module there
    for name, module, tensor in list(named_tensors(model)):
        if name not in step_of:
            continue
        first, first_module = first_places.setdefault(id(tensor), (name, module))
        if first == name:
            continue
        if _are_equal(step_of[name], step_of[first], files):
            settled.steps.remove(step_of[name])
            settled.dropped[step_of[name].sources[0]] = f"equal to {first}, to which it is tied"
        elif module is first_module:
            what = f"the files hold different values of {first} and {name}, which are one tensor of {type(model).__name__}"
            raise CheckpointError(f"{what}: remove the wrong one from the files")
        else:
            untied = torch.empty_like(tensor)
            setattr(module, name.rpartition(".")[2], nn.Parameter(untied) if isinstance(tensor, nn.Parameter) else untied)
    return settled


def _are_equal(step: Step, other: Step, files: Entries) -> bool:
    """Whether two steps give one tensor each, from sources with the same values, both unchanged or both converted."""
    one_to_one = all(len(each.sources) == len(each.targets) == 1 for each in (step, other))
    return one_to_one and step.converts == other.converts and files.same(step.sources[0], other.sources[0])
