"""Classes of modules with replaced forwards, made at run time: one of this package before one of transformers. They can be pickled."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.utils.generic import ModelOutput

from halfbyte.integrations.transformers.optimize.calls import parameters_of
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.modules.subclassed import with_signature
from halfbyte.nn.report import REMARK

LAYER_BY_LAYER = "its layers are called one by one"
_lock = threading.Lock()  # two threads must not create two classes of the same parts


class ReplacedForward:
    """Comes before the class of a module, which goes on where this one has no shorter way."""

    of_classes: tuple[type, ...]
    original_name: str  # as `name_in_transformers` has it, which torch.compile can read here
    argument_names: tuple[str, ...]  # of its forward, which torch.compile can read here
    keeps_name = False  # the class is known by the name of what it comes before

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Rebuild the class when unpickling, as no module has it by name."""
        return _empty, self.of_classes, self.__getstate__()


def replace_class(module: nn.Module, before: type[ReplacedForward], otherwise: str, reason: str | None) -> None:
    """Puts `before` before the class of a module; with a reason not to, leaves it and notes both for the report."""
    if reason is None:
        module.__dict__.pop(REMARK, None)
        module.__class__ = _class_of(before, *classes_of(module))
    else:
        setattr(module, REMARK, f"{otherwise}: {reason}")


def restore_class(module: ReplacedForward) -> None:
    """Gives a module back the class that it had."""
    module.__class__ = original(module)
    module.__dict__.pop(REMARK, None)


def classes_of(module: nn.Module | ReplacedForward) -> tuple[type, ...]:
    """The classes that were put before a module's own, and that."""
    return module.of_classes if isinstance(module, ReplacedForward) else (type(module),)


def _class_of(*parts: type) -> type:
    """The class that has the methods of the first of some classes of this package, then of the next, and else those of the last."""
    with _lock:
        return _new_class(*parts)


@functools.cache
def _new_class(*parts: type) -> type:
    *before, last = parts
    cls: type[nn.Module] = last
    keeps = any(issubclass(one, ReplacedForward) and one.keeps_name for one in before)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__} if keeps else {}
    about: dict[str, object] = {"of_classes": parts, "original_name": _name(cls), "argument_names": parameters_of(cls.forward)}
    if (replaced := next((vars(one)["forward"] for one in before if "forward" in vars(one)), None)) is not None:
        about["forward"] = with_signature(replaced, cls.forward)
    name = cls.__name__ if keeps else f"{before[0].__name__.lstrip('_')}{cls.__name__}"
    return type(name, parts, {**about, **names})


@functools.cache
def output_class(cls: type) -> Any:
    """Return the class of the outputs of a class's forward: the only ModelOutput that its code names; None if it names none, or several.
    Annotations are not always right."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    named = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    classes = {each for each in named if isinstance(each, type) and issubclass(each, ModelOutput)}
    return classes.pop() if len(classes) == 1 else None


def why_unknown_output(cls: type) -> str | None:
    """Return why the outputs of a class's forward cannot be made; None if they can."""
    return f"the forward of a {cls.__name__} makes outputs of an unknown class" if output_class(cls) is None else None


def why_left(reasons: Sequence[str | None]) -> list[str]:
    """Say which layers of a stack are left to transformers, and why. reasons: Of each layer; None: it is not left."""
    layers_by_reason = dict[str, list[int]]()
    for index, reason in enumerate(reasons):
        if reason is not None:
            layers_by_reason.setdefault(reason, []).append(index)
    return [f"layer {first}{f' and {len(more)} more' if more else ''}: {reason}" for reason, (first, *more) in layers_by_reason.items()]


def why_not_fused(names: str, linears: Sequence[nn.Module]) -> str | None:
    """Why these linear layers are not computed together, in this order, or None."""
    parts = [linear for linear in linears if type(linear) is FusedLinear]
    if [linear.index for linear in parts] == list(range(len(linears))) and len({id(linear.together[0]) for linear in parts}) == 1:
        return None
    return f"{names} are not computed together, which fuse_ does where their formats are the same"


def products_of(names: str, linears: Sequence[nn.Module]) -> dict[str, QuantLinear] | None:
    """The first layer of each product that these linear layers are computed in, alone or together with those after it, by their names; None
    where one is of another kind, or lacks a layer that it was fused with."""
    found: dict[str, QuantLinear] = {}
    left = list(zip(names.split("+"), linears, strict=True))
    while left:
        first = left[0][1]
        count = first.count if type(first) is FusedLinear else 1
        some, left = left[:count], left[count:]
        name = "+".join(name for name, _ in some)
        fused = type(first) is QuantLinear or why_not_fused(name, [linear for _, linear in some]) is None
        if not fused or not isinstance(first, QuantLinear):
            return None
        found[name] = first
    return found


def original(module: nn.Module | ReplacedForward) -> type:
    """The class that a module had before its forward was replaced, or has."""
    return classes_of(module)[-1]


def name_in_transformers(module: nn.Module) -> str:
    """The name of its original class within transformers' models, such as "bert.modeling_bert.BertLayer"."""
    if isinstance(module, ReplacedForward):
        return module.original_name
    cls: type = type(module)
    return _name(cls)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("transformers.models.")


def _empty(*parts: type) -> object:
    cls: type[nn.Module] = _class_of(*parts)
    return cls.__new__(cls)
