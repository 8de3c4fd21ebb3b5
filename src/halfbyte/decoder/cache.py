"""The KV cache of a decoder on a CPU: keys and values of each layer, in floating point or in 8 bits, in buffers that grow.

    buffer [B, Hkv, T, D]       tokens first … first + n - 1 of the sequence, at 0 … n - 1; T >= n

A layer with a sliding window keeps the tokens that a new one may attend to: when its buffer is full, the last window - 1 of them move to
the front of it. Other layers get a buffer twice as large.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from halfbyte.decoder.spec import DecoderSpec, LayerSpec
from halfbyte.errors import ArgumentError
from halfbyte.layouts.base import round_up
from halfbyte.layouts.records import record_bytes

_STEP = 64  # tokens by which buffers grow at least
_stamps = itertools.count(1)


class LayerCache:
    """Keys and values of one layer.

    Attributes:
        keys, values: Buffers [B, Hkv, T, D]; in 8 bits the records of `layouts/records.py` in place of D elements.
        first: Index in the sequence of the token at 0 of the buffers.
        length: Tokens in the buffers.
    """

    def __init__(self, spec: LayerSpec, batch: int, dtype: torch.dtype) -> None:
        """Make an empty cache for `batch` sequences; `dtype` is torch.int8 for one in 8 bits."""
        heads = spec.attention.heads
        self._window, self.first, self.length = spec.sliding_window, 0, 0
        width = record_bytes(heads.dim) if dtype == torch.int8 else heads.dim
        with torch.inference_mode(False):
            self.keys = self.values = torch.empty(batch, heads.key, 0, width, dtype=dtype, device="cpu")

    def reserve(self, tokens: int, most: int | None) -> bool:
        """Make room for so many more tokens; `most` is the longest that the sequence can become. Returns whether the buffers are others,
        or tokens have moved in them."""
        room = self.keys.shape[2] - self.length
        if room >= tokens:
            return False
        kept = self.length if self._window is None else min(self.length, self._window - 1)
        wanted = kept + tokens
        size = self.keys.shape[2]
        if size < wanted + (0 if self._window is None else self._window):
            grown = max(2 * wanted, wanted + _STEP) if self._window is None else wanted + self._window + _STEP
            size = round_up(grown if most is None else max(wanted, min(grown, most)), _STEP)
        dropped = self.length - kept
        with torch.inference_mode(False), torch.no_grad():
            self.keys, self.values = (_moved(buffer, dropped, self.length, size) for buffer in (self.keys, self.values))
        self.first += dropped
        self.length = kept
        return True

    def cut(self, length: int) -> bool:
        """Forget the tokens of the sequence from `length` on. Returns False where a window has lost tokens that others need now."""
        seen = length if self._window is None else min(length, self._window - 1)
        if length - seen < self.first:
            return False
        self.length = length - self.first
        return True


def _moved(buffer: Tensor, start: int, stop: int, size: int) -> Tensor:
    """The tokens start … stop - 1 of a buffer, at the front of one of `size` tokens."""
    moved = buffer.new_empty((*buffer.shape[:2], size, buffer.shape[3]))
    moved[:, :, : stop - start] = buffer[:, :, start:stop]
    return moved


class Cache:
    """Keys and values of sequences that have the same length.

    Attributes:
        layers: One for each layer.
        length: Tokens of each sequence so far.
        stamp: Unique number of the buffers' memory: another one after they have moved.
    """

    def __init__(self, spec: DecoderSpec, batch: int = 1, *, int8: bool = False, most: int | None = None) -> None:
        """Make an empty cache.

        Args:
            spec: Of the model.
            batch: Number of sequences.
            int8: Keep keys and values in 8 bits, blocks of 32 elements with a scale each.
            most: Tokens that the sequences will have at most, if known: no more memory than for these is reserved.
        """
        if batch < 1:
            raise ArgumentError(f"a cache is for at least one sequence, got {batch}")
        dtype = torch.int8 if int8 else torch.float32
        self.layers: Sequence[LayerCache] = [LayerCache(layer, batch, dtype) for layer in spec.layers]
        self.batch, self.length, self.stamp, self._most = batch, 0, next(_stamps), most

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens of each sequence."""
        moved = [layer.reserve(tokens, self._most) for layer in self.layers]
        if any(moved):
            self.stamp = next(_stamps)

    def append(self, tokens: int) -> None:
        """Count tokens that layers have written."""
        self.length += tokens
        for layer in self.layers:
            layer.length += tokens

    def cut(self, length: int) -> bool:
        """Forget the tokens from `length` on.

        Returns:
            Whether that was possible: with sliding windows, tokens that were dropped may be needed again. If not, the cache is empty.
        """
        if not 0 <= length <= self.length:
            raise ArgumentError(f"a cache of {self.length} tokens is cut to 0 … {self.length} of them, got {length}")
        possible = min(map(partial(LayerCache.cut, length=length), self.layers), default=True)
        self.length = length
        if not possible:
            for layer in self.layers:
                layer.first = layer.length = 0
            self.length = 0
        self.stamp = next(_stamps)
        return possible

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
