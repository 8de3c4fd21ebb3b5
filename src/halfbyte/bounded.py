"""Caches: a dict of bounded size, and values computed from tensors and from objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar
from weakref import ref

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")


class _Missing:
    """The type of the value that stands for no result."""


_MISSING = _Missing()


class Bounded(dict[K, V]):
    """A dict of at most `most` entries: setting one more removes all others first. Look-ups take as long as those of a plain dict."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)


class ByTensor(Generic[V]):
    """Values computed from tensors, kept as long as the tensor lives and is not written to."""

    def __init__(self) -> None:
        self._entries = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor) -> V | None:
        writes, value = self._entries.get(tensor, (None, None))
        return value if writes == writes_to(tensor) else None

    def put(self, tensor: Tensor, value: V) -> V:
        self._entries[tensor] = writes_to(tensor), value
        return value


def by_tensor(function: Callable[[Tensor], V]) -> Callable[[Tensor], V]:
    """Memoize a function of one tensor, for each tensor as long as it lives and is not written to."""
    results = ByTensor[V]()

    @functools.wraps(function)
    def memoized(tensor: Tensor) -> V:
        result = results.get(tensor)
        return results.put(tensor, function(tensor)) if result is None else result

    return memoized


def by_object(
    is_current: Callable[..., bool] = lambda *_, **__: True,
) -> Callable[[Callable[Concatenate[K, P], V]], Callable[Concatenate[K, P], V]]:
    """Memoize a function for each of its first arguments as long as that object lives, which the result must not refer to.

    Args:
        is_current: Tells from a result, and the function's other arguments, whether it is still valid; if not, it is computed again.

    Threads may compute one result twice; the later one stays.
    """

    def decorate(function: Callable[Concatenate[K, P], V]) -> Callable[Concatenate[K, P], V]:
        results: dict[ref[K], V] = {}  # not a WeakKeyDictionary, whose `get` is one more call in Python

        def forget(one: ref[K]) -> None:
            results.pop(one, None)

        @functools.wraps(function)
        def memoized(one: K, /, *args: P.args, **kwargs: P.kwargs) -> V:
            result = results.get(ref(one), _MISSING)
            if isinstance(result, _Missing) or not is_current(result, *args, **kwargs):
                result = results[ref(one, forget)] = function(one, *args, **kwargs)
            return result

        return memoized

    return decorate


def version_of(tensor: Tensor) -> int | None:
    """The number of writes to a tensor that torch has counted; None for inference tensors, whose writes it does not count, and for those
    that one of `tensor` and its `data` was assigned to."""
    try:
        return None if tensor.is_inference() else tensor._version
    except RuntimeError:
        return None


def writes_to(tensor: Tensor) -> int:
    """The number of writes to a tensor: of those to an inference tensor the ones that `count_write` was told of."""
    counted, told = version_of(tensor), getattr(tensor, "_halfbyte_writes", 0)
    return told if counted is None else counted


def count_write(tensor: Tensor) -> None:
    """Count a write that torch may not have counted: to an inference tensor, or by an operation within a dispatch."""
    if version_of(tensor) is None:
        tensor._halfbyte_writes = writes_to(tensor) + 1  # type: ignore[attr-defined]
    else:
        increment_version(tensor)
