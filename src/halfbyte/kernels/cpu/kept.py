"""What a thread keeps between calls, so that a call that was made before need not be planned again."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import Window

T = TypeVar("T")
_MOST = 1024


class Call(NamedTuple):
    """A call of one kind and size: the arguments, all but the tensors filled in."""

    buffer: ctypes.Array[ctypes.c_char]
    address: int
    threads: int


class ConvCall(NamedTuple):
    """A convolution of images of one size: the arguments, all but those of the call filled in, and what they point to."""

    buffer: ctypes.Array[ctypes.c_char]
    address: int
    out_shape: tuple[int, int, int, int]
    memory: int
    threads: int
    tensors: tuple[Tensor, ...]


class OwnWeights(Protocol):
    """A convolution that multiplies by weights in a form of its own, which are made of codes once.

    form  what they depend on beside the codes: kernels of one form have the same
    """

    form: str

    def weights_of(self, codes: Codes) -> Tensor | None:
        """The weights as the kernel reads them; None where it does not take them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class CodesConv(Protocol):
    """A convolution from codes to codes."""

    def prepare(self, x: Tensor, window: Window, outside: int, weights: Tensor) -> ConvCall:
        """The call for images of the size of x; `outside` is the code of what lies outside of them, `weights` what the kernel reads."""


class Kept(threading.local, Generic[T]):
    """Each Python thread has its own plans, since calls may run side by side."""

    def __init__(self, most: int = _MOST) -> None:
        self.plans: dict[Hashable, T] = {}
        self._most = most

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The plan for `key`, made where there is none yet."""
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= self._most:
                self.plans.clear()
            plan = self.plans[key] = make()
        return plan
