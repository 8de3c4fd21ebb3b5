"""The arguments of transformers' forwards that halfbyte replaces: their names, and which values are understood.

transformers renames arguments (5.24 calls the KV cache `cache`, earlier versions `past_key_values`) and adds new ones, which a forward
takes into `**kwargs`. So each replaced forward reads its call through `bind`, which answers None where an argument is set that is not
understood: such a call is passed on unchanged to the original forward. A class whose forward has an unknown parameter is not replaced at
all (`why_unknown`). Called by the modules that replace forwards: decoding, embedding, encoding, generating, stack.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE, OLD_CACHE = "cache", "past_key_values"
# What the installed version calls the KV cache, in arguments and in outputs.
KV_CACHE = CACHE if CACHE in BaseModelOutputWithPast.__dataclass_fields__ else OLD_CACHE

# Whether a value other than None is understood, by parameter; the KV cache is called "cache".
Understood = Mapping[str, Callable[[object], bool]]
# Arguments of a forward by name. Their types are transformers' choice; a value is read after a test of its name in `Understood`.
Arguments: TypeAlias = dict[str, Any]


def any_value(value: object) -> bool:
    """Accept every value: the argument is used, or has no effect in this forward."""
    return True


def unset(value: object) -> bool:
    """Accept values that ask for nothing."""
    return value is None or value is False


def is_true(value: object) -> bool:
    """Accept True alone."""
    return value is True


@functools.cache
def parameters_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of a function's parameters in order, without `self` and `**kwargs`."""
    found = inspect.signature(function).parameters.values()
    return tuple(one.name for one in found if one.name != "self" and one.kind is not inspect.Parameter.VAR_KEYWORD)


def why_unknown(cls: type, understood: Understood) -> str | None:
    """Return why the forward of a class is not replaced: it has a parameter that is not in `understood`. None if it has none."""
    forward: object = cls.forward  # type: ignore[attr-defined]
    unknown = [name for name in parameters_of(forward) if (CACHE if name == OLD_CACHE else name) not in understood]
    return f"its forward takes {unknown[0]}, which this version of halfbyte does not know" if unknown else None


def bind(parameters: tuple[str, ...], args: tuple[object, ...], kwargs: Mapping[str, object], understood: Understood) -> Arguments | None:
    """Return the arguments of a call that are not None, by name, the KV cache as "cache".

    Args:
        parameters: the names of the original forward's positional parameters.
        args, kwargs: of the call.
        understood: the arguments that the replaced forward understands.

    Returns:
        None if an argument is set that is not understood, or is given twice.
    """
    if args:
        by_name = dict(zip(parameters, args, strict=False))
        if len(args) > len(parameters) or any(name in kwargs for name in by_name):
            return None
        kwargs = {**by_name, **kwargs}
    if kwargs.get(CACHE) is not None and (OLD_CACHE in parameters or kwargs.get(OLD_CACHE) is not None):
        return None  # given by both names; or of paged attention, as in classes that call the KV cache `past_key_values`
    found: Arguments = {}
    for name, value in kwargs.items():
        if value is not None:
            known = CACHE if name == OLD_CACHE else name
            is_understood = understood.get(known)
            if is_understood is None or not is_understood(value):
                return None
            found[known] = value
    return found


def cache_name(arguments: Mapping[str, object]) -> str:
    """Return the name under which these arguments of a model have the KV cache."""
    return next((name for name in (CACHE, OLD_CACHE) if name in arguments), KV_CACHE)
