"""Temporary replacement of modules so that each weight is the `weight` of a module, outputs first, as the rest of halfbyte expects:
for transformers' stacked experts (experts.py) and Conv1D (transposed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from halfbyte.nn.experts import MixtureOfExperts, StackedExperts, stacks, why_not
from halfbyte.nn.modules import QuantModule
from halfbyte.nn.transposed import Conv1DLinear, is_conv1d, turned

Wanted = Callable[[str], bool]
Places = dict[str, MixtureOfExperts | Conv1DLinear]


def expand_(model: nn.Module, wanted: Wanted = lambda name: True) -> Places:
    """Replaces the modules with weights in another layout of which at least one, by its name "….c_attn" or "….experts.down_proj", is
    wanted; returns the replacements by name."""
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    places: Places = {}
    made: dict[int, MixtureOfExperts | Conv1DLinear] = {}
    views: dict[int, nn.Parameter] = {}
    elsewhere = {id(p) for m in model.modules() if not is_conv1d(m) for p in m.parameters(recurse=False)}
    for name, module in modules:
        if is_conv1d(module) and wanted(name):
            if type(weight := module.weight) is not nn.Parameter or id(weight) in elsewhere:
                continue
            if id(module) not in made:
                made[id(module)] = Conv1DLinear(module, views.setdefault(id(weight), turned(weight)))
        elif stacks(module) and why_not(module) is None and any(wanted(f"{name}.{stack}") for stack in stacks(module)):
            if id(module) not in made:
                made[id(module)] = MixtureOfExperts(module)
        else:
            continue
        places[name] = made[id(module)]
    for name, place in places.items():
        model.set_submodule(name, place)
    return places


def collapse_(model: nn.Module, places: Places, keep: Wanted = lambda name: False) -> None:
    """The inverse of `expand_`, except for replacements with a weight that `keep` names."""
    for name, place in places.items():
        if isinstance(place, Conv1DLinear):
            if not keep(name):
                model.set_submodule(name, place._float[0])
        elif any(keep(f"{name}.{stack}") for stack in stacks(place._float[0])):
            place.release()
        else:
            model.set_submodule(name, place.collapsed())


@contextmanager
def expanded(model: nn.Module, wanted: Wanted = lambda name: True) -> Iterator[None]:
    """A context in which modules are replaced as by `expand_`. Afterwards only replacements with a quantized weight remain; none after an
    error."""
    places = expand_(model, wanted)
    try:
        yield
    except BaseException:
        collapse_(model, places)
        raise
    collapse_(model, places, lambda name: isinstance(model.get_submodule(name), QuantModule))


def originals(places: Places) -> dict[int, Tensor]:
    """The transposed views that replace weights: id of the original -> the view."""
    found: dict[int, Tensor] = {}
    for place in places.values():
        if isinstance(place, Conv1DLinear):
            found[id(place._float[0].weight)] = place.weight
        elif place.transposed:
            for name in stacks(place._float[0]):
                child = place.get_submodule(name)
                if isinstance(child, StackedExperts):
                    found[id(place._float[0].get_parameter(name))] = child.weight
    return found
