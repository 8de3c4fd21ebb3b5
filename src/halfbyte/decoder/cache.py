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

    def shift(self, tokens: int, length: int) -> None:
        """Renumber the tokens, i as i + `tokens`, so that there are `length` of them."""
        kept = length if self._window is None else min(length, self._window - 1)
        size = round_up(kept + _STEP, _STEP)
        source = max(0, self.length - kept), self.length
        with torch.inference_mode(False), torch.no_grad():
            both = (self.keys, self.values)
            self.keys, self.values = (_moved(buffer, *source, size, kept - (source[1] - source[0])) for buffer in both)
        self.first, self.length = length - kept, kept

    def put(self, slot: int, other: LayerCache, length: int) -> None:
        """Copy the last tokens of another cache's first sequence to the end of `length` tokens, as many as both have."""
        count = min(other.length, length - self.first)
        stop = length - self.first
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine[slot, :, : stop - count] = 0  # masked, but read: not a number would stay one
            mine[slot, :, stop - count : stop] = theirs[0, :, other.length - count : other.length]

    def cut(self, length: int) -> bool:
        """Forget the tokens of the sequence from `length` on. Returns False where a window has lost tokens that others need now."""
        seen = length if self._window is None else min(length, self._window - 1)
        if length - seen < self.first:
            return False
        self.length = length - self.first
        return True


def _moved(buffer: Tensor, start: int, stop: int, size: int, to: int = 0) -> Tensor:
    """The tokens start … stop - 1 of a buffer, from `to` on in one of `size` tokens, with zeros before."""
    moved = buffer.new_empty((*buffer.shape[:2], size, buffer.shape[3]))
    moved[:, :, :to] = 0
    moved[:, :, to : to + stop - start] = buffer[:, :, start:stop]
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

    def entries(self) -> list[tuple[Tensor, Tensor, int]]:
        """Return keys, values and the number of tokens in them, for each layer."""
        return [(layer.keys, layer.values, layer.length) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)


class Slots(Cache):
    """Keys and values of sequences of different lengths, which join and leave: each has a slot of the same buffers.

    The sequences end at the same index, `length`, so that one native call decodes a token of each; one that is shorter begins later:

        slot 0   . . . a a a a a      starts[0] = 3
        slot 1   b b b b b b b b      starts[1] = 0

    Attributes:
        starts: Index of the first token of each sequence.
    """

    def __init__(self, spec: DecoderSpec, capacity: int, *, int8: bool = False) -> None:
        """Make slots for `capacity` sequences, all of them free."""
        super().__init__(spec, capacity, int8=int8)
        self.capacity, self.batch, self.starts = capacity, 0, list[int]()

    def entries(self) -> list[tuple[Tensor, Tensor, int]]:
        """Return the buffers of the slots that are taken."""
        return [(layer.keys[: self.batch], layer.values[: self.batch], layer.length) for layer in self.layers]

    def mask(self) -> Tensor | None:
        """Return which of `length` + 1 tokens each sequence attends to, bool [B, length + 1]; None: all."""
        if not any(self.starts):
            return None
        return torch.arange(self.length + 1, device="cpu") >= torch.tensor(self.starts, device="cpu")[:, None]

    def positions(self) -> list[int]:
        """Return the position of the next token of each sequence."""
        return [self.length - start for start in self.starts]

    def join(self, sequence: Cache) -> None:
        """Copy a sequence into the next free slot.

        Args:
            sequence: The cache of one sequence.

        Raises:
            ArgumentError: All slots are taken.
        """
        if self.batch == self.capacity:
            raise ArgumentError(f"all {self.capacity} slots are taken: wait until a sequence has left")
        if self.batch == 0:
            self._clear()
        if sequence.length > self.length:
            self._shift(sequence.length - self.length)
        self.batch += 1
        self.starts.append(self.length - sequence.length)
        for mine, other in zip(self.layers, sequence.layers, strict=True):
            mine.put(self.batch - 1, other, self.length)
        self.stamp = next(_stamps)

    def leave(self, slot: int) -> None:
        """Free a slot; the last one that is taken moves into its place."""
        last = self.batch - 1
        if slot != last:
            for layer in self.layers:
                for buffer in (layer.keys, layer.values):
                    buffer[slot, :, : layer.length] = buffer[last, :, : layer.length]
            self.starts[slot] = self.starts[last]
        self.starts.pop()
        self.batch = last
        unused = min(self.starts, default=0)
        if unused > max(_STEP, self.length // 2):
            self._shift(-unused)
        self.stamp = next(_stamps)

    def _clear(self) -> None:
        self.length = 0
        for layer in self.layers:
            layer.first = layer.length = 0

    def _shift(self, tokens: int) -> None:
        """Move all sequences by so many tokens, to the end of longer buffers or to the front."""
        self.length += tokens
        self.starts = [start + tokens for start in self.starts]
        for layer in self.layers:
            layer.shift(tokens, self.length)
