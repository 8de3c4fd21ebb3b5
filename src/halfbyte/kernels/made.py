"""The tensors that are made for kernels to write, noted while the launches of a chain of steps are recorded (`ops/replay.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_made: ContextVar[list[Tensor] | None] = ContextVar("_made", default=None)


def is_noted() -> bool:
    return _made.get() is not None


def keep(tensor: Tensor) -> Tensor:
    """Returns a tensor that is made for kernels to write, and notes it if it is made within `noted`."""
    made = _made.get()
    if made is not None:
        made.append(tensor)
    return tensor


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """The tensors that the block gives to `keep`."""
    made: list[Tensor] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)
