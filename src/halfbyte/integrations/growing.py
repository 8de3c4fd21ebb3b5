"""Layers of transformers' growing caches whose tokens lie in a larger buffer, so that a new token is written without copying.

`keys` and `values` are views of the buffers, made when somebody asks. Whoever sets one of them (cropping, beams) gets an ordinary layer.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from halfbyte.integrations.cache import Int8Layer

_LEAST_ROOM = 64  # tokens


class Growing(CacheLayerMixin):  # type: ignore[no-untyped-call]  # the base without which objects could not change their class
    """Precedes the class of a layer.

    buffers  of keys and of values, [B, Hkv, T, D]
    length   tokens that are in them
    stamp    the number of these buffers, of all that there ever were
    """

    plain: type
    buffers: tuple[Tensor, Tensor]
    length: int
    stamp: int

    @property
    def keys(self) -> Any:
        return self.buffers[0].narrow(2, 0, self.length)

    @keys.setter
    def keys(self, value: Any) -> None:
        self._leave()
        self.keys = value

    @property
    def values(self) -> Any:
        return self.buffers[1].narrow(2, 0, self.length)

    @values.setter
    def values(self, value: Any) -> None:
        self._leave()
        self.values = value

    def _leave(self) -> None:
        keys, values = self.keys, self.values
        self.__class__ = self.plain
        del self.buffers, self.length, self.stamp
        self.keys, self.values = keys, values

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy is an ordinary layer: two that write to the same buffers would mix their tokens."""
        kept = {name: value for name, value in vars(self).items() if name not in ("buffers", "length", "stamp")}
        return _made, (self.plain,), {**kept, "keys": self.keys, "values": self.values}

    def get_seq_length(self) -> int:
        return self.length


def _made(plain: Any) -> Any:
    return plain.__new__(plain)


class _GrowingLayer(Growing, DynamicLayer):  # type: ignore[no-untyped-call]
    plain = DynamicLayer


class _GrowingInt8Layer(Growing, Int8Layer):  # type: ignore[no-untyped-call]
    plain = Int8Layer


_GROWING: dict[type, type] = {DynamicLayer: _GrowingLayer, Int8Layer: _GrowingInt8Layer}
LAYERS = (*_GROWING, *_GROWING.values())
IN_8_BITS = (Int8Layer, _GrowingInt8Layer)
_stamps = itertools.count()


def grow(layer: Any, tokens: int) -> Growing:
    """The same layer, initialized and of one of the types LAYERS, with space for so many more tokens, for which it has none now only if
    it gets new memory."""
    if isinstance(layer, Growing):
        if layer.length + tokens <= layer.buffers[0].shape[2]:
            return layer
        layer._leave()
    before: tuple[Tensor, Tensor] = layer.keys, layer.values
    b, heads, length, dim = before[0].shape
    size = length + tokens + max(_LEAST_ROOM, (length + tokens) // 4)
    keys, values = (tensor.new_empty(b, heads, size, dim) for tensor in before)
    for buffer, tensor in zip((keys, values), before, strict=True):
        buffer[:, :, :length] = tensor
    del layer.keys, layer.values
    layer.__class__ = _GROWING[type(layer)]
    layer.buffers, layer.length, layer.stamp = (keys, values), length, next(_stamps)
    grown: Growing = layer
    return grown
