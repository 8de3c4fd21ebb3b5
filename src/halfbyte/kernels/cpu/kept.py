"""What a thread keeps between calls, so that a call that was made before need not be planned again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")
_MOST = 1024


class ConvCall(NamedTuple):
    """A convolution of images of one size: the arguments, all but those of the call filled in, and what they point to."""

    buffer: ctypes.Array[ctypes.c_char]
    address: int
    out_shape: tuple[int, int, int, int]
    memory: int
    threads: int
    tensors: tuple[Tensor, ...]


class Kept(threading.local, Generic[T]):
    """Each Python thread has its own plans, since calls may run side by side."""

    def __init__(self) -> None:
        self.plans: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The plan for `key`, made where there is none yet."""
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= _MOST:
                self.plans.clear()
            plan = self.plans[key] = make()
        return plan
