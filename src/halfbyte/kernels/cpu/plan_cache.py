"""What a thread keeps between calls, so that a call that was made before need not be planned again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_MOST = 1024


class Call(NamedTuple):
    """A call of one kind and size: the arguments, all but the tensors filled in."""

    buffer: ctypes.Array[ctypes.c_char]
    address: int
    threads: int


class PlanCache(threading.local, Generic[T]):
    """Each Python thread has its own plans, since calls may run side by side."""

    def __init__(self, most: int = _MOST) -> None:
        self.entries: dict[Hashable, T] = {}
        self._most = most

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The plan for `key`, made where there is none yet."""
        plan = self.entries.get(key)
        return self.put(key, make()) if plan is None else plan

    def put(self, key: Hashable, plan: T) -> T:
        if len(self.entries) >= self._most:
            self.entries.clear()
        self.entries[key] = plan
        return plan
