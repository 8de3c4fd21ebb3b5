"""What a thread keeps between calls, so that a call that was made before need not be planned again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

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


class Plans(threading.local):
    """The plans of this Python thread for operations that no object owns: at most so many of each kind. Keys hold all that a plan depends
    on, so that none gets stale; what depends on addresses is checked by `ops/conv/cpu.py` before it is used."""

    def __init__(self) -> None:
        self.elementwise = Bounded[Hashable, Call](_MOST)
        self.pool = Bounded[Hashable, Call](_MOST)
        self.convolution = Bounded[Hashable, Any](_MOST)  # of ConvCall
        self.experts = Bounded[Hashable, tuple[bytes, int]](_MOST)
        self.qconv2d = Bounded[Hashable, Any](_MOST)  # of calls with their operands


PLANS = Plans()
