"""Whether a module is still what it was when something was compiled from it.

Compiled code reads weights by their addresses and has settings baked in. `Frozen` compares everything that the module's own code could
read, instead of a list of what matters: so nothing can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, TypeVar

from torch import Tensor, nn

from halfbyte.bounded import by_object, version_of

M = TypeVar("M", bound=nn.Module)
V = TypeVar("V")

_version = attrgetter("_version")
class_of = attrgetter("__class__")
_get: Callable[[dict[str, Any], str], object] = dict.get


class Frozen:
    """The state of a module and of all that it consists of.

    That is the class and the attributes of every submodule, its parameters, buffers, submodules and hooks, the entries of lists,
    dictionaries and configurations among the attributes; of tensors also where they lie and how often they were written to. Writes through
    `Tensor.data` are not counted by torch, and not seen.

    The check runs before each call, so the values are compared in C, without a Python loop.

    Attributes:
        containers: Types whose entries or attributes are compared.
    """

    containers: tuple[type, ...] = (nn.Module, dict, list, tuple)

    def __init__(self, module: nn.Module, rewritten: Collection[nn.Module] = ()) -> None:
        """Remember the state of a module.

        Args:
            module: The module. It is not kept alive.
            rewritten: Submodules whose own forward replaces their buffers; only their submodules and hooks are compared.
        """
        self._dicts, self._lists = list[dict[Any, Any]](), list[list[Any]]()
        self._tensor_dicts, self._parts = list[Mapping[str, Tensor | None]](), list[nn.Module]()
        self._attributes = list[dict[str, Any]]()  # of modules and configurations
        self._seen = {id(module)}
        self._add(module, rewritten)
        self._sizes = list(map(len, self._attributes))
        named = [(attributes, name) for attributes in self._attributes for name in attributes if name not in _NOT_COMPARED]
        self._owners, self._names = [owner for owner, _ in named], [name for _, name in named]
        self._values = list(map(_get, self._owners, self._names))
        self._empty = [entries for entries in (*self._dicts, *self._tensor_dicts) if not entries]
        self._dicts = [entries for entries in self._dicts if entries]
        self._tensor_dicts = [entries for entries in self._tensor_dicts if entries]
        self._dict_copies, self._list_copies = [dict(entries) for entries in self._dicts], [list(entries) for entries in self._lists]
        self._registered = _values(self._tensor_dicts)
        self._classes = list(map(class_of, self._parts))
        others = chain(self._values, _values(self._dicts), chain.from_iterable(self._lists))
        tensors = {id(value): value for value in (*self._registered, *others) if type(value) in (Tensor, nn.Parameter)}
        self._tensors = list(tensors.values())
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._counted = [tensor for tensor in self._tensors if version_of(tensor) is not None]
        self._versions = list(map(_version, self._counted))
        del self._seen

    def is_unchanged(self) -> bool:
        """Whether the module is as it was."""
        registered = _values(self._tensor_dicts)
        return (
            not any(self._empty)
            and len(registered) == len(self._registered)
            and all(map(is_, registered, self._registered))
            and list(map(len, self._attributes)) == self._sizes
            and _are_equal([list(map(_get, self._owners, self._names))], [self._values])
            and _are_equal(self._dicts, self._dict_copies)
            and _are_equal(self._lists, self._list_copies)
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and list(map(_version, self._counted)) == self._versions
            and list(map(class_of, self._parts)) == self._classes
        )

    def _add(self, module: nn.Module, rewritten: Collection[nn.Module]) -> None:
        self._dicts += [module._modules, module._forward_pre_hooks, module._forward_hooks]
        if module not in rewritten:
            self._attributes.append(vars(module))
            self._tensor_dicts += [module._parameters, module._buffers]
            self._look_into((value for name, value in vars(module).items() if name not in _OF_TORCH), rewritten)
        self._look_into(module._modules.values(), rewritten)

    def _look_into(self, values: Iterable[object], rewritten: Collection[nn.Module]) -> None:
        for value in values:
            if id(value) in self._seen or not isinstance(value, self.containers):
                continue
            self._seen.add(id(value))
            if isinstance(value, nn.Module):
                self._parts.append(value)
                self._add(value, rewritten)
            elif isinstance(value, tuple):
                self._look_into(value, rewritten)
            elif isinstance(value, list):
                self._lists.append(value)
                self._look_into(value, rewritten)
            else:
                entries = value if isinstance(value, dict) else vars(value)
                (self._dicts if isinstance(value, dict) else self._attributes).append(entries)
                self._look_into(entries.values(), rewritten)


def while_unchanged(freeze: Callable[[nn.Module], Frozen] = Frozen) -> Callable[[Callable[[M], V]], Callable[[M], V]]:
    """Memoize a function of a module as long as that lives, which the result must not refer to, and is unchanged.

    Args:
        freeze: Remembers the state that the result follows from.
    """

    def decorate(function: Callable[[M], V]) -> Callable[[M], V]:
        @by_object(lambda entry: entry[1].is_unchanged())
        def result_and_state(module: M) -> tuple[V, Frozen]:
            return function(module), freeze(module)

        @wraps(function)
        def memoized(module: M) -> V:
            return result_and_state(module)[0]

        return memoized

    return decorate


def _values(dicts: Iterable[Any]) -> list[object]:
    return [*chain.from_iterable(map(dict.values, dicts))]


def _are_equal(entries: Iterable[object], copies: Iterable[object]) -> bool:
    """Whether containers have the entries of their copies. What is the same object is not compared any further."""
    try:
        return all(map(eq, entries, copies))
    except Exception:  # other objects, which can't be compared: tensors, arrays
        return False


# Attributes of every module, such as `_parameters`.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
# `generate` sets how transformers' own experts are computed for decoding, and back: nothing that is compiled depends on it.
_NOT_COMPARED = _OF_TORCH | {"_experts_implementation_internal"}
