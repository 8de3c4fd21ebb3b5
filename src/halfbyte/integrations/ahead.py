"""Consecutive layers are computed by the call of the first, in the order of their list, or in which they followed each other before: the
result of the next one is ready if it is called with the result of the previous one and nothing else has changed. Layers with hooks are
called one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from halfbyte.integrations.hooked import watched

Same = tuple[Tensor | None, ...]  # the arguments besides x, the same for all layers


@dataclass(frozen=True, eq=False, slots=True)
class Ahead:
    """A layer's result for x, computed ahead of its call. `entry`: further data of the layer."""

    layer: ref[nn.Module]
    x: Tensor
    version: int | None
    y: Tensor
    same: Same
    entry: Any

    @classmethod
    def of(cls, layer: nn.Module, x: Tensor, y: Tensor, same: Same, entry: Any = None) -> Ahead:
        return cls(ref(layer), x, None if x.is_inference() else x._version, y, same, entry)

    def is_of(self, layer: nn.Module, x: Tensor, same: Same) -> bool:
        called = self.layer() is layer and self.x is x and all(map(_is_same, self.same, same))
        return called and (self.version is None or x._version == self.version)


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether they are one tensor, or views of it that torch.compile makes for each call."""
    return a is b or (a is not None and b is not None and (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride()))


class _Thread(threading.local):
    """The last layer called and its result, and the results ready for the following layers, the next one last."""

    def __init__(self) -> None:
        self.last: tuple[ref[nn.Module], ref[Tensor]] | None = None
        self.ahead: list[Ahead] = []


_follower: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
_thread = _Thread()


def expect(layers: Iterable[nn.Module]) -> None:
    """They are expected to follow each other, until another one does."""
    for before, after in pairwise(layers):
        _follower[before] = ref(after)


def following(layer: nn.Module) -> Iterator[nn.Module]:
    """The layer, and those that are expected to follow it."""
    seen = [layer]
    yield layer
    while (link := _follower.get(layer)) is not None and (after := link()) is not None and after not in seen:
        if watched(layer) or watched(after):
            return
        layer = after
        seen.append(layer)
        yield layer


def given(layer: nn.Module, x: Tensor, same: Same, compute: Callable[[], list[Ahead]], still: Callable[[Any], bool]) -> Ahead | None:
    """The layer's result for x: ready, if `still` is true of its entry, or computed now.

    compute  computes the results of this layer and of as many following ones as possible, in order; empty if this layer is not supported
    """
    here = _thread
    if here.last is not None and here.last[1]() is x and (before := here.last[0]()) is not None:
        _follower[before] = ref(layer)
    if not here.ahead or not here.ahead[-1].is_of(layer, x, same) or not still(here.ahead[-1].entry):
        here.ahead = compute()[::-1]
        if not here.ahead:
            return None
    found = here.ahead.pop()
    here.last = found.layer, ref(found.y)
    return found
