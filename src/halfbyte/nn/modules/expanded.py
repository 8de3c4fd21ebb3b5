"""Temporary replacement of modules by others in which each matrix is the `weight` [N, K] of a module of its own, as quantizers, checkpoints
and calibration expect it.

    transformers' module of experts   `MixtureOfExperts`, with a child for each stack (experts.py)
    transformers' Conv1D              `Conv1DLinear`, whose weight is the transposed view of the Conv1D's (transposed.py)
    torch's MultiheadAttention        `Attention`, with a child for each projection (attention.py)

`expand_` replaces them, `collapse_` undoes it but for those that were quantized meanwhile; `expanded` is both as a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn

from halfbyte.nn.modules.attention import PARTS, Attention, is_attention
from halfbyte.nn.modules.experts import MixtureOfExperts, StackedExperts, stack_names, why_not_experts
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.modules.transposed import Conv1DLinear, is_conv1d, transposed_parameter

Wanted = Callable[[str], bool]  # whether a weight is, by the name of the module that it is the `weight` of while modules are replaced
Replacement = MixtureOfExperts | Conv1DLinear | Attention
Replacements = dict[str, Replacement]


def expand_(model: nn.Module, wanted: Wanted = lambda name: True, *, attention: bool = False) -> Replacements:
    """Replace the modules of `model` of which at least one weight is wanted.

    Args:
        model: The model itself is never replaced.
        wanted: Names such as "….c_attn" and "….experts.down_proj".
        attention: Replace MultiheadAttention, too, except within parts that save themselves, as transformers' models do, under torch's
            names.

    Returns:
        The replacements by name. A module with several names has one replacement.
    """
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    saving_parts = tuple(f"{name}." if name else "" for name, module in model.named_modules() if hasattr(module, "save_pretrained"))
    shared_with_others = {id(p) for m in model.modules() if not is_conv1d(m) for p in m.parameters(recurse=False)}
    views: dict[int, nn.Parameter] = {}  # id of a Conv1D's weight -> its view, which all modules with that weight share
    built: dict[int, Replacement] = {}  # id of a module -> its replacement
    replacements: Replacements = {}

    def replacement_of(name: str, module: nn.Module) -> Replacement | None:
        if is_conv1d(module) and wanted(name):
            weight = cast(Tensor, module.weight)
            if type(weight) is not nn.Parameter or id(weight) in shared_with_others:
                return None
            return built.get(id(module)) or Conv1DLinear(module, views.setdefault(id(weight), transposed_parameter(weight)))
        stacks = stack_names(module)
        if stacks and why_not_experts(module) is None and any(wanted(f"{name}.{stack}") for stack in stacks):
            return built.get(id(module)) or MixtureOfExperts(module)
        if attention and is_attention(module) and not name.startswith(saving_parts) and any(wanted(f"{name}.{part}") for part in PARTS):
            return built.get(id(module)) or Attention(cast(nn.MultiheadAttention, module))
        return None

    for name, module in modules:
        if (replacement := replacement_of(name, module)) is not None:
            built[id(module)] = replacements[name] = replacement
    for name, replacement in replacements.items():
        model.set_submodule(name, replacement)
    return replacements


def collapse_(model: nn.Module, replacements: Replacements, keep: Wanted = lambda name: False) -> None:
    """Undo `expand_`, except for replacements with a weight that `keep` names."""
    for name, replacement in replacements.items():
        if isinstance(replacement, Conv1DLinear):
            if not keep(name):
                model.set_submodule(name, replacement._float[0])
            continue
        parts = PARTS if isinstance(replacement, Attention) else stack_names(replacement.float_module)
        if any(keep(f"{name}.{part}") for part in parts):
            replacement.release()
        else:
            model.set_submodule(name, replacement.collapsed())


@contextmanager
def expanded(model: nn.Module, wanted: Wanted = lambda name: True, *, attention: bool = False) -> Iterator[None]:
    """Replace modules as `expand_` does while the context lasts. Afterwards only replacements with a quantized weight remain; none after
    an error."""
    replacements = expand_(model, wanted, attention=attention)
    try:
        yield
    except BaseException:
        collapse_(model, replacements)
        raise
    collapse_(model, replacements, lambda name: isinstance(model.get_submodule(name), QuantModule))


def transposed_views(replacements: Replacements) -> dict[int, Tensor]:
    """Return the transposed views that replace weights which are inputs first: id of the float model's parameter -> the view."""
    views: dict[int, Tensor] = {}
    for replacement in replacements.values():
        if isinstance(replacement, Conv1DLinear):
            views[id(replacement._float[0].weight)] = replacement.weight
        elif isinstance(replacement, MixtureOfExperts) and replacement.transposed:
            for name in stack_names(replacement.float_module):
                child = replacement.get_submodule(name)
                if isinstance(child, StackedExperts):
                    views[id(replacement.float_module.get_parameter(name))] = child.weight
    return views
