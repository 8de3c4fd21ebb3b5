"""Classes that `shorten_` makes at run time: one of this package before one of transformers. Their modules can be pickled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from halfbyte.integrations.ahead import watched
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules import Changes, QuantLinear
from halfbyte.nn.report import REMARK

_classes: dict[tuple[type, type], Any] = {}


class Shortened:
    """Comes before the class of a module, which goes on where this one has no shorter way."""

    of_classes: tuple[type, type]
    keeps_name = False  # the class is known by the name of what it comes before

    def __setattr__(self, name: str, value: Any) -> None:
        Changes.count += 1
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The class is made anew, where no module can name it."""
        return _empty, self.of_classes, self.__getstate__()


def shorten(module: nn.Module, before: type[Shortened], otherwise: str, reason: str | None) -> None:
    """Puts `before` before the class of a module; with a reason not to, leaves it and notes both for the report."""
    if reason is None:
        module.__dict__.pop(REMARK, None)
        module.__class__ = _shortened(before, type(module))
    else:
        setattr(module, REMARK, f"{otherwise}: {reason}")


def _shortened(before: type[Shortened], cls: type) -> Any:
    """The class that has the methods of `before`, and else those of `cls`."""
    parts = before, cls
    if parts not in _classes:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__} if before.keeps_name else {}
        name = cls.__name__ if before.keeps_name else f"{before.__name__.lstrip('_')}{cls.__name__}"
        _classes.setdefault(parts, type(name, parts, {"of_classes": parts, **names}))
    return _classes[parts]


def why_not_fused(names: str, linears: Sequence[nn.Module]) -> str | None:
    """Why these linear layers are not computed together, in this order, or None."""
    parts = [linear for linear in linears if type(linear) is FusedLinear]
    if [linear.index for linear in parts] == list(range(len(linears))) and len({id(linear.together[0]) for linear in parts}) == 1:
        return None
    return f"{names} are not computed together, which fuse_ does where their formats are the same"


def products_of(names: str, linears: Sequence[nn.Module]) -> dict[str, QuantLinear] | None:
    """The first layer of each product that these linear layers are computed in, alone or together with those after it, by their names; None
    where one is of another kind, or lacks a layer that it was fused with."""
    found, left = dict[str, QuantLinear](), list(zip(names.split("+"), linears, strict=True))
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


def why_hooked(module: nn.Module) -> str | None:
    """Which part of a module has a hook, or None."""
    return next((f"its {name} has a hook" for name, part in module.named_modules() if name and watched(part)), None)


def original(module: Any) -> type:
    """The class that a module had before it was shortened, or has."""
    cls: Any = type(module)
    return _before(cls)


def name_in_transformers(module: Any) -> str:
    """The name of its original class within transformers' models, such as "bert.modeling_bert.BertLayer"."""
    cls: Any = type(module)
    return _name(cls)


@functools.cache
def _before(cls: Any) -> type:
    while issubclass(cls, Shortened):
        cls = cls.of_classes[1]
    found: type = cls
    return found


@functools.cache
def _name(cls: Any) -> str:
    before = _before(cls)
    return f"{before.__module__}.{before.__qualname__}".removeprefix("transformers.models.")


def _empty(before: type[Shortened], cls: type) -> Any:
    made = _shortened(before, cls)
    return made.__new__(made)
