"""What a thread keeps between calls, so that a call that was made before need not be planned again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from halfbyte.bounded import Bounded

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
        self.entries = Bounded[Hashable, T](most)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The plan for `key`, made where there is none yet."""
        plan = self.entries.get(key)
        if plan is None:
            plan = self.entries[key] = make()
        return plan
