"""Layers of transformers' growing caches with room for more tokens: native calls write new keys and values into the buffers of a `Growing`.

transformers' own layers concatenate, which copies the whole cache for each token. `grow` changes the class of such a layer, in place, to
one whose `keys` and `values` are views of larger buffers. Setting one of them (cropping, beams) makes the layer an ordinary one
again. The views of a layer with a window of W tokens have the last W - 1, as in transformers, and move along the buffers. Where these are
full, the layer gets new ones: a token that is in a buffer is never overwritten, so existing views stay valid.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from halfbyte.integrations.transformers.cache.int8_cache import Int8Layer, Int8SlidingLayer

_LEAST_ROOM = 64  # tokens
_EXTRA_STATE = ("buffers", "length", "first", "buffer_id")


class Growing(CacheLayerMixin):  # type: ignore[no-untyped-call]  # the base without which objects could not change their class
    """Precedes the class of a layer.

    Attributes:
        plain: The class that it precedes.
        buffers: Of keys and of values, [B, Hkv, T, D]; in 8 bits of records.
        length: Number of tokens so far.
        first: Index of the token at place 0 of the buffers.
        buffer_id: Unique number of these buffers.
    """

    plain: type
    buffers: tuple[Tensor, Tensor]
    length: int
    first: int
    buffer_id: int

    @property
    def keys(self) -> Tensor:
        return self._kept(self.buffers[0])

    @keys.setter
    def keys(self, value: Tensor) -> None:
        self._leave()
        self.keys = value

    @property
    def values(self) -> Tensor:
        return self._kept(self.buffers[1])

    @values.setter
    def values(self, value: Tensor) -> None:
        self._leave()
        self.values = value

    def _kept(self, buffer: Tensor) -> Tensor:
        return buffer.narrow(2, 0, self.length)

    def _leave(self) -> None:
        plain = self._as_plain()
        self.__class__ = self.plain
        self.__dict__.clear()
        self.__dict__.update(plain)

    def _as_plain(self) -> dict[str, object]:
        """The attributes of an ordinary layer."""
        kept = {name: value for name, value in vars(self).items() if name not in _EXTRA_STATE}
        return {**kept, "keys": self.keys, "values": self.values}

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copy is an ordinary layer: two that write to the same buffers would mix their tokens."""
        return _uninitialized, (self.plain,), self._as_plain()

    def get_seq_length(self) -> int:
        return self.length


def _uninitialized(plain: Any) -> object:
    return plain.__new__(plain)


class _GrowingLayer(Growing, DynamicLayer):  # type: ignore[no-untyped-call]
    plain = DynamicLayer


class _GrowingInt8Layer(Growing, Int8Layer):  # type: ignore[no-untyped-call]
    plain = Int8Layer


class _Window(Growing):  # type: ignore[no-untyped-call]
    """The length is transformers' `cumulative_length`."""

    sliding_window: int
    record_past: bool
    cumulative_length: int

    @property
    def length(self) -> int:
        return self.cumulative_length

    @length.setter
    def length(self, value: int) -> None:
        self.cumulative_length = value

    def _kept(self, buffer: Tensor) -> Tensor:
        at = 0 if self.record_past else begin(self)
        return buffer.narrow(2, at, self.length - self.first - at)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """transformers' own, which first changes the length."""
        self._leave()
        found: tuple[Tensor, Tensor] = self.update(*args, **kwargs)
        return found

    def activate_past_recording(self) -> None:
        """From here on, not from what else the buffers have."""
        self._leave()
        self.activate_past_recording()


class _GrowingWindow(_Window, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    plain = DynamicSlidingWindowLayer


class _GrowingInt8Window(_Window, Int8SlidingLayer):  # type: ignore[no-untyped-call]
    plain = Int8SlidingLayer


_GROWING: dict[type, type] = {
    DynamicLayer: _GrowingLayer,
    Int8Layer: _GrowingInt8Layer,
    DynamicSlidingWindowLayer: _GrowingWindow,
    Int8SlidingLayer: _GrowingInt8Window,
}
LAYERS = (*_GROWING, *_GROWING.values())
IN_8_BITS = tuple(layer for layer in LAYERS if issubclass(layer, (Int8Layer, Int8SlidingLayer)))
_buffer_ids = itertools.count()


def seen_from(length: int, window: int) -> int:
    """Return the index of the first of `length` tokens in the window of the next one, which is the last of the window itself."""
    return max(0, length - window + 1)


def window_of(layer: object) -> int | None:
    """Return the window of a cache's layer; None where it keeps all tokens."""
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


def begin(layer: Growing) -> int:
    """Return the place in the buffers of the first token that the next one attends to."""
    window = window_of(layer)
    return 0 if window is None else max(0, seen_from(layer.length, window) - layer.first)


def is_whole(layer: Any) -> bool:
    """Whether an initialized layer has all tokens that the next one attends to: cropping may have removed some."""
    window, length = window_of(layer), layer.get_seq_length()
    return window is None or bool(layer.keys.shape[2] >= length - seen_from(length, window))


def grow(layer: Any, tokens: int) -> Growing:
    """Make room for so many more tokens in an initialized layer of one of the types LAYERS, in place, and return it as a `Growing`."""
    if isinstance(layer, Growing):
        if layer.length - layer.first + tokens <= layer.buffers[0].shape[2]:
            return layer
        layer._leave()
    before: tuple[Tensor, Tensor] = layer.keys, layer.values
    length: int = layer.get_seq_length()
    b, heads, kept, dim = before[0].shape
    size = kept + tokens + max(_LEAST_ROOM, (kept + tokens) // 4)
    keys, values = (tensor.new_empty(b, heads, size, dim) for tensor in before)
    for buffer, tensor in zip((keys, values), before, strict=True):
        buffer[:, :, :kept] = tensor
    del layer.keys, layer.values
    layer.__class__ = _GROWING[type(layer)]
    layer.buffers, layer.length, layer.first, layer.buffer_id = (keys, values), length, length - kept, next(_buffer_ids)
    grown: Growing = layer
    return grown


def entered(layer: Growing, tokens: int) -> None:
    """Count tokens that were written behind the others, and free buffers of which a window needs a small part, as after a long prompt."""
    layer.length += tokens
    window = window_of(layer)
    if window is not None and layer.buffers[0].shape[2] > 2 * window + 2 * _LEAST_ROOM and layer.keys.shape[2] < window:
        layer._leave()
        grow(layer, 1)
