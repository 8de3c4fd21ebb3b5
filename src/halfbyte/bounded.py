"""Caches: a dict of bounded size, and values computed from tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

K = TypeVar("K")
V = TypeVar("V")


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
        version, value = self._entries.get(tensor, (None, None))
        return value if version == version_of(tensor) else None

    def put(self, tensor: Tensor, value: V) -> V:
        self._entries[tensor] = version_of(tensor), value
        return value


def by_tensor(function: Callable[[Tensor], V]) -> Callable[[Tensor], V]:
    """Memoizes a function of one tensor, for each tensor as long as it lives and is not written to."""
    results = ByTensor[V]()

    @functools.wraps(function)
    def memoized(tensor: Tensor) -> V:
        result = results.get(tensor)
        return results.put(tensor, function(tensor)) if result is None else result

    return memoized


def version_of(tensor: Tensor) -> int | None:
    """The number of writes to a tensor that torch has counted; None for inference tensors, whose writes it does not count."""
    return None if tensor.is_inference() else tensor._version
