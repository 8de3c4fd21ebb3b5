"""Temporary replacement of modules so that each weight is the `weight` of a module, outputs first, as the rest of halfbyte expects:
for transformers' stacked experts (experts.py) and Conv1D (transposed.py), and for torch's MultiheadAttention (attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn

from halfbyte.nn.modules.attention import PARTS, Attention, is_attention
from halfbyte.nn.modules.experts import MixtureOfExperts, StackedExperts, stacks, why_not
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.modules.transposed import Conv1DLinear, is_conv1d, transposed_parameter

Wanted = Callable[[str], bool]
Place = MixtureOfExperts | Conv1DLinear | Attention
Places = dict[str, Place]


def expand_(model: nn.Module, wanted: Wanted = lambda name: True, *, attention: bool = False) -> Places:
    """Replace the modules with weights in another layout of which at least one, by its name "….c_attn" or "….experts.down_proj", is
    wanted; returns the replacements by name.

    attention  torch's MultiheadAttention too, except within models that save themselves, as transformers' do, under torch's names
    """
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    places: Places = {}
    expanded_places: dict[int, Place] = {}
    selves = tuple(f"{name}." if name else "" for name, module in model.named_modules() if hasattr(module, "save_pretrained"))
    views: dict[int, nn.Parameter] = {}
    elsewhere = {id(p) for m in model.modules() if not is_conv1d(m) for p in m.parameters(recurse=False)}
    for name, module in modules:
        if is_conv1d(module) and wanted(name):
            if type(weight := module.weight) is not nn.Parameter or id(weight) in elsewhere:
                continue
            if id(module) not in expanded_places:
                expanded_places[id(module)] = Conv1DLinear(module, views.setdefault(id(weight), transposed_parameter(weight)))
        elif stacks(module) and why_not(module) is None and any(wanted(f"{name}.{stack}") for stack in stacks(module)):
            if id(module) not in expanded_places:
                expanded_places[id(module)] = MixtureOfExperts(module)
        elif attention and is_attention(module) and not name.startswith(selves) and any(wanted(f"{name}.{part}") for part in PARTS):
            if id(module) not in expanded_places:
                expanded_places[id(module)] = Attention(cast(nn.MultiheadAttention, module))
        else:
            continue
        places[name] = expanded_places[id(module)]
    for name, place in places.items():
        model.set_submodule(name, place)
    return places


def collapse_(model: nn.Module, places: Places, keep: Wanted = lambda name: False) -> None:
    """The inverse of `expand_`, except for replacements with a weight that `keep` names."""
    for name, place in places.items():
        if isinstance(place, Conv1DLinear):
            if not keep(name):
                model.set_submodule(name, place._float[0])
        elif any(keep(f"{name}.{part}") for part in (PARTS if isinstance(place, Attention) else stacks(place._float[0]))):
            place.release()
        else:
            model.set_submodule(name, place.collapsed())


@contextmanager
def expanded(model: nn.Module, wanted: Wanted = lambda name: True, *, attention: bool = False) -> Iterator[None]:
    """A context in which modules are replaced as by `expand_`. Afterwards only replacements with a quantized weight remain; none after an
    error."""
    places = expand_(model, wanted, attention=attention)
    try:
        yield
    except BaseException:
        collapse_(model, places)
        raise
    collapse_(model, places, lambda name: isinstance(model.get_submodule(name), QuantModule))


def transposed_views(places: Places) -> dict[int, Tensor]:
    """The transposed views that replace weights: id of the original -> the view."""
    found: dict[int, Tensor] = {}
    for place in places.values():
        if isinstance(place, Conv1DLinear):
            found[id(place._float[0].weight)] = place.weight
        elif isinstance(place, MixtureOfExperts) and place.transposed:
            for name in stacks(place._float[0]):
                child = place.get_submodule(name)
                if isinstance(child, StackedExperts):
                    found[id(place._float[0].get_parameter(name))] = child.weight
    return found
