"""Windows of a static cache, as rings: each token stays where it was written, and the next one takes the place of the oldest.

transformers' own layer with a window moves all of its tokens for each new one, once it is full. Here one is written. Who asks by `update`
gets them in their order, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer


class Ring(StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """The next token's place is `cumulative_length` modulo the size. As long as it is not full, it is what it is derived from."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """keys, values [B, Hkv, T, D] in their order, after new ones; of several new ones also those that these have pushed out."""
        size = self.max_cache_len
        if self.cumulative_length_int >= size:
            if key_states.shape[2] == 1:
                place = (self.cumulative_length % size).view(1)
                for buffer, new in zip(self._both(), (key_states, value_states), strict=True):
                    buffer.index_copy_(2, place, new)
                self.cumulative_length.add_(1)
                self.cumulative_length_int += 1
                return self.in_order()
            for buffer, ordered in zip(self._both(), self.in_order(), strict=True):
                buffer.copy_(ordered)
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        if self.cumulative_length_int >= size:
            self.cumulative_length.fill_(size)
        return found

    def _both(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Keys and values, the oldest token first; behind the last one, where it is not full, there may be anything."""
        keys, values = self._both()
        gone_by, size = self.cumulative_length, self.max_cache_len
        order = (torch.arange(size, device=keys.device) + gone_by.where(gone_by >= size, 0)) % size
        return keys.index_select(2, order), values.index_select(2, order)


class Later:
    """Keys and values that are computed when somebody takes them apart: `keys, values = Later(ring.in_order)`."""

    def __init__(self, both: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._both = both

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._both())


def make_rings(cache: StaticCache) -> StaticCache:
    """Turns its windows into rings, in place."""
    for layer in cache.layers:
        if type(layer) is StaticSlidingWindowLayer:
            layer.__class__ = Ring
            if layer.cumulative_length_int >= layer.max_cache_len:
                layer.cumulative_length.fill_(layer.max_cache_len)
    return cache
