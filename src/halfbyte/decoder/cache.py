"""The KV cache of a decoder: `Cache` of sequences of one length, `Slots` of sequences that join and leave; `LayerCache` is one layer's.

    buffer [B, Hkv, T, D]       place p has token first + p of the sequence, for p < length; T >= length

On a CPU keys and values are float32, or in 8 bits the records of `layouts/records.py` (codes and scale of 32 elements side by side). On a
GPU they are in the dtype of activations, or int8 codes with their scales in buffers of their own.

Layers without a sliding window keep all tokens, in buffers that grow. A layer with a window keeps at least those that a new token attends
to: when its buffer is full, the last window - 1 tokens move to the front, and `first` becomes larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.decoder.spec import DecoderSpec, LayerSpec
from halfbyte.errors import ArgumentError
from halfbyte.layouts.base import round_up
from halfbyte.layouts.records import record_bytes, scales_of

_GROWTH = 64  # tokens: buffers grow by this at least, and have multiples of it
_GROWTH_ON_GPU = 512  # there each size of a buffer needs a CUDA graph and recorded launches of its own
_versions = itertools.count(1)


class OnGpu(NamedTuple):
    """How the cache of a model on a GPU is stored.

    Attributes:
        device: The GPU. In tests a CPU, which computes as a GPU does.
        dtype: Of activations, and of keys and values that are not in 8 bits.
        cpu_layers: How many layers, the first ones, the CPU computes: their caches are as on a CPU.
    """

    device: torch.device
    dtype: torch.dtype
    cpu_layers: int = 0


def _buffers(dim: int, int8: bool, where: OnGpu | None) -> list[tuple[int, torch.dtype]]:
    """Return the last dimension and the dtype of each buffer of a layer with heads of `dim` elements: keys, values, then their scales."""
    if where is None:
        return [(record_bytes(dim), torch.int8) if int8 else (dim, torch.float32)] * 2
    return [(dim, torch.int8)] * 2 + [(scales_of(dim), torch.bfloat16)] * 2 if int8 else [(dim, where.dtype)] * 2


def most_bytes(spec: LayerSpec, *, tokens: int, chunk: int, slots: int = 0, singles: int = 1, int8: bool, where: OnGpu) -> int:
    """Return an upper bound of the bytes that a layer's caches take on a GPU, by which memory is planned.

    It follows from the sizes that `LayerCache.reserve`, `shift` and `fill` choose (tests/decoder/offload/test_placement.py compares them).

    Args:
        spec: The layer.
        tokens: Maximum length of a sequence.
        chunk: Maximum number of tokens that are read at a time.
        slots: Number of slots of `Slots`; 0: there are none.
        singles: Number of caches of one sequence at the same time.
        int8, where: As for `LayerCache`.
    """
    window, heads = spec.sliding_window, spec.attention.heads

    def sized(size: int) -> int:
        if window is not None:
            size = min(size, window + min(chunk, tokens) + window // 4 + _GROWTH)
        return round_up(size, _GROWTH if window is not None else _GROWTH_ON_GPU)

    token = sum(width * dtype.itemsize for width, dtype in _buffers(heads.head_dim, int8, where)) * heads.num_kv_heads
    return token * (slots * sized(tokens + max(tokens // 4, _GROWTH_ON_GPU)) + singles * sized(tokens))


class LayerCache:
    """Keys and values of one layer.

    Attributes:
        buffers: Keys and values, [B, Hkv, T, D] each, or records instead of D elements. On a GPU in 8 bits: codes of keys, codes of values,
            scales of keys, scales of values.
        first: Index in the sequence of the token at place 0 of the buffers.
        length: Number of tokens in the buffers.
        buffer_id: Changes when the buffers are allocated anew; unique among all layers and caches.
    """

    def __init__(self, spec: LayerSpec, batch: int, *, int8: bool = False, where: OnGpu | None = None) -> None:
        """Make an empty cache of `batch` sequences. where: For a GPU; None: for a CPU."""
        heads = spec.attention.heads
        self._window, self.first, self.length, self.buffer_id = spec.sliding_window, 0, 0, next(_versions)
        # A full buffer grows by 1 / `_share` of its tokens, and by `_growth` at least.
        self._growth, self._share = (_GROWTH, 1) if where is None else (_GROWTH_ON_GPU, 4)
        # The most places that a window's buffer has beyond the window. Kernels of a GPU read all places, so there are fewer there.
        self._slack = 0 if self._window is None else _GROWTH + (self._window if where is None else self._window // 4)
        device = torch.device("cpu") if where is None else where.device
        with torch.inference_mode(False):
            self.buffers = [
                torch.empty(batch, heads.num_kv_heads, 0, width, dtype=dtype, device=device)
                for width, dtype in _buffers(heads.head_dim, int8, where)
            ]

    @property
    def keys(self) -> Tensor:
        """Keys, or their codes."""
        return self.buffers[0]

    @property
    def values(self) -> Tensor:
        """Values, or their codes."""
        return self.buffers[1]

    @property
    def size(self) -> int:
        """T"""
        return self.buffers[0].shape[2]

    def _slack_of(self, tokens: int) -> int:
        """Return how many places a window's buffer gets beyond `tokens`: as those of other layers, and `_slack` at most."""
        return min(self._slack, _GROWTH + max(tokens // self._share, self._growth))

    def has_room(self, tokens: int) -> bool:
        """Whether so many more tokens fit. In a window's buffer that a long prompt has enlarged, places beyond `_slack` do not count, so
        that `reserve` makes it smaller again."""
        usable = self.size if self._window is None else min(self.size, self._window + tokens + self._slack)
        return usable - self.length >= tokens

    def reserve(self, tokens: int, most: int | None) -> bool:
        """Make room for so many more tokens.

        Args:
            tokens: How many.
            most: Maximum length of the sequence: no more places than for these are allocated; None: it is not known.

        Returns:
            Whether buffers were allocated anew, or tokens moved in them.
        """
        if self.has_room(tokens):
            return False
        window, size = self._window, self.size
        kept = self.length if window is None else min(self.length, window - 1)
        wanted = kept + tokens
        if window is not None:
            grown = wanted + self._slack_of(wanted)
            fits = grown - _GROWTH <= size <= 2 * grown
        else:
            grown, fits = wanted + max(wanted // self._share, self._growth), size >= wanted
        if not fits:
            size = round_up(grown if most is None else max(wanted, min(grown, most)), _GROWTH if window is not None else self._growth)
            size = size if most is None else min(size, round_up(max(wanted, most), _GROWTH))
        self._move(self.length - kept, self.length, size)
        self.first += self.length - kept
        self.length = kept
        return True

    def shift(self, length: int) -> None:
        """Move the tokens so that they are the last ones of a sequence of `length` tokens, longer or shorter than now (`Slots._shift`)."""
        kept = length if self._window is None else min(length, self._window - 1)
        start = max(0, self.length - kept)
        size = round_up(kept + self._growth, self._growth) if self._window is None else round_up(kept + self._slack_of(kept + 1), _GROWTH)
        self._move(start, self.length, self.size if kept < self.size <= 2 * size else size, kept - (self.length - start))
        self.first, self.length = length - kept, kept

    def _move(self, start: int, stop: int, size: int, to: int = 0) -> None:
        """Move the tokens at places start … stop - 1 to place `to`, with zeros before it, in buffers of `size` places: in new ones unless
        these have the same size."""
        if size != self.size:
            self.buffer_id = next(_versions)
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [_moved(buffer, start, stop, size, to) for buffer in self.buffers]

    def put(self, slots: slice, other: LayerCache, lengths: Tensor | None, length: int) -> None:
        """Copy the newest tokens of another cache's sequences so that they end at index `length` of the sequences here.

        Args:
            slots: Where the sequences are copied to, as many as `other` has.
            other: Their cache.
            lengths: Tokens of each, int64 [b], where they begin at index 0 and end at different ones; None: all end where `other` ends.
            length: Tokens of the sequences here. Older tokens, for which these buffers have no place, are left out.
        """
        stop = length - self.first
        count = min(other.length, stop)
        for target, source in zip(self.buffers, other.buffers, strict=True):
            if target.is_cpu:  # what lies before the tokens is masked, but read: NaN times 0 is NaN. A GPU's buffers never hold one
                target[slots, :, : stop - count] = 0
            if lengths is None:
                tokens = source[:, :, other.length - count : other.length]
            else:
                columns = (lengths[:, None] - count + torch.arange(count, device=lengths.device)).clamp(min=0)
                tokens = source.gather(2, columns[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))
            target[slots, :, stop - count : stop] = tokens

    def copy_from(self, other: LayerCache, slot: int, start: int, length: int) -> None:
        """Replace the contents by the first `length` tokens of a sequence in another cache, or by those of them that a window needs.

        Args:
            other: A cache, for which `can_cut(start + length)` holds.
            slot: Of the sequence.
            start: Index at which it begins there.
            length: Number of tokens.
        """
        skipped, first = max(start - other.first, 0), max(other.first - start, 0)
        count = min(other.length - skipped, length - first)
        if self._window is not None and count > (kept := min(count, self._window - 1)):  # a slot may hold another sequence's before them
            skipped, first, count = skipped + count - kept, first + count - kept, kept
        self.fill([source[slot : slot + 1, :, skipped : skipped + count] for source in other.buffers], first + count)

    def fill(self, states: Sequence[Tensor], length: int) -> None:
        """Replace the contents by the last n tokens of sequences of `length` tokens, [B, Hkv, n, …] for each buffer; n is at least as many
        as a new token attends to."""
        count = states[0].shape[2]
        size = round_up(count + self._growth, _GROWTH if self._window is not None else self._growth)
        self.buffer_id, self.first, self.length = next(_versions), length - count, count
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [_allocated(old, tokens.shape, size) for old, tokens in zip(self.buffers, states, strict=True)]
            for buffer, tokens in zip(self.buffers, states, strict=True):
                buffer[:, :, :count] = tokens

    def can_cut(self, length: int) -> bool:
        """Whether the buffers have all tokens that a new one behind the first `length` of the sequence attends to."""
        return length - (length if self._window is None else min(length, self._window - 1)) >= self.first

    def cut(self, length: int) -> bool:
        """Remove the tokens of the sequence from `length` on; return False, and remove nothing, where `can_cut` is False."""
        if not self.can_cut(length):
            return False
        self.length = length - self.first
        return True


def _moved(buffer: Tensor, start: int, stop: int, size: int, to: int) -> Tensor:
    """Return a buffer of `size` places with the tokens at start … stop - 1 of another one at `to`; the same buffer if it has that size."""
    tokens = buffer[:, :, start:stop]
    if size == buffer.shape[2]:
        moved, tokens = buffer, tokens.clone()
    else:
        moved = _allocated(buffer, buffer.shape, size)
    if to:
        moved[:, :, :to] = 0
    if stop > start:
        moved[:, :, to : to + stop - start] = tokens
    return moved


def _allocated(like: Tensor, shape: Sequence[int], size: int) -> Tensor:
    """Return a buffer of a shape [B, Hkv, T, D] with `size` in place of T, of the dtype and device of another one."""
    batch, heads, _, width = shape
    # Steps on a GPU also read free slots and places behind the tokens, masked: these must not be NaN.
    return (like.new_empty if like.is_cpu or batch == 1 else like.new_zeros)((batch, heads, size, width))


class Cache:
    """Keys and values of sequences that have the same length.

    Attributes:
        layers: Of each layer of the model that has keys and values of its own.
        by_layer: For each layer of the model the cache that it attends to: its own, or that of its `kv_source`.
        length: Number of tokens of each sequence.
        version: Changes when tokens are removed or move, not when tokens are appended; unique among all caches.
        buffer_version: Changes when buffers are allocated anew or tokens move in them; unique among all caches.
        most: Maximum length of each sequence; None: it is not known.
        empty: Makes an empty cache of one sequence with the same settings.
    """

    def __init__(
        self, spec: DecoderSpec, batch: int = 1, *, int8: bool = False, most: int | None = None, where: OnGpu | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            spec: The model.
            batch: Number of sequences.
            int8: Keep keys and values in 8 bits, blocks of 32 elements with a scale each.
            most: Maximum length of the sequences: no more memory than for these is allocated; None: it is not known.
            where: For a GPU; None: for a CPU.
        """
        if batch < 1:
            raise ArgumentError(f"a cache is for at least one sequence, got {batch}")
        on_cpu = len(spec.layers) if where is None else where.cpu_layers
        caches = {
            i: LayerCache(layer, batch, int8=int8, where=None if i < on_cpu else where)
            for i, layer in enumerate(spec.layers)
            if layer.kv_source is None
        }
        self.layers: Sequence[LayerCache] = [*caches.values()]
        self.by_layer = [caches[i if layer.kv_source is None else layer.kv_source] for i, layer in enumerate(spec.layers)]
        self.batch, self.length, self.most = batch, 0, most
        self.empty = partial(Cache, spec, int8=int8, most=most, where=where)
        self._invalidate()

    def _invalidate(self) -> None:
        self.version = self.buffer_version = next(_versions)

    def positions(self) -> list[int]:
        """Return the position of the next token of each sequence."""
        return [self.length] * self.batch

    def mask(self) -> Tensor | None:
        """Return which of `length` + 1 tokens each sequence attends to, bool [B, length + 1]; None: all."""
        return None

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens of each sequence."""
        moved = [layer.reserve(tokens, self.most) for layer in self.layers]
        if any(moved):
            self._invalidate()

    def append(self, tokens: int) -> None:
        """Count tokens that layers have written."""
        self.length += tokens
        for layer in self.layers:
            layer.length += tokens

    def can_cut(self, length: int) -> bool:
        """Whether `cut` to so many tokens is possible."""
        return all(layer.can_cut(length) for layer in self.layers)

    def copy(self, length: int) -> Cache:
        """Copy the first `length` tokens of the first sequence, for which `can_cut` holds, to a cache of its own."""
        return self._copy(0, 0, length)

    def _copy(self, slot: int, start: int, length: int) -> Cache:
        other = self.empty()
        for layer, source in zip(other.layers, self.layers, strict=True):
            layer.copy_from(source, slot, start, length)
        other.length = length
        return other

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
            self._invalidate()
        self.version = next(_versions)
        return possible

    def entries(self) -> list[tuple[Tensor, Tensor, int]]:
        """Return keys, values and the number of tokens in them, for each layer of the model."""
        return [(layer.keys, layer.values, layer.length) for layer in self.by_layer]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers)


class Slots(Cache):
    """Keys and values of sequences of different lengths, which join and leave: each has a slot of the same buffers.

    The sequences end at the same index, `length`, so that one call decodes a token of each; one that is shorter begins later:

        slot 0   . . . a a a a a      starts[0] = 3
        slot 1   b b b b b b b b      starts[1] = 0

    Attributes:
        starts: Index of the first token of each sequence.
    """

    def __init__(
        self, spec: DecoderSpec, capacity: int, *, int8: bool = False, most: int | None = None, where: OnGpu | None = None
    ) -> None:
        """Make slots for `capacity` sequences, all of them free; the other arguments are those of `Cache`."""
        super().__init__(spec, capacity, int8=int8, most=most, where=where)
        self.capacity, self.batch, self.starts = capacity, 0, list[int]()

    def entries(self) -> list[tuple[Tensor, Tensor, int]]:
        """Return the buffers of the slots that are taken."""
        return [(layer.keys[: self.batch], layer.values[: self.batch], layer.length) for layer in self.by_layer]

    def mask(self) -> Tensor | None:
        if not any(self.starts):
            return None
        return torch.arange(self.length + 1, device="cpu") >= torch.tensor(self.starts, device="cpu")[:, None]

    def positions(self) -> list[int]:
        return [self.length - start for start in self.starts]

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens; sequences move to the front before there are more indices than `most`."""
        unused = min(self.starts, default=0)
        if unused and self.most is not None and self.length + tokens > self.most:
            self._shift(-unused)
            self._invalidate()
        super().reserve(tokens)

    def join(self, sequences: Cache, lengths: Sequence[int] | None = None) -> None:
        """Copy sequences into the next free slots.

        Args:
            sequences: Their cache.
            lengths: Tokens of each, where they begin at index 0 and have different ones; None: all have `sequences.length`.

        Raises:
            ArgumentError: Fewer slots are free.
        """
        count = sequences.batch
        if self.batch + count > self.capacity:
            raise ArgumentError(
                f"{self.capacity - self.batch} of {self.capacity} slots are free, got {count} sequences: wait until others have left"
            )
        longest = sequences.length if lengths is None else max(lengths)
        if self.batch == 0:
            self._clear()
        if longest > self.length:
            self._shift(longest - self.length)
        self.starts += [self.length - length for length in ([longest] * count if lengths is None else lengths)]
        slots = slice(self.batch, self.batch + count)
        device = self.layers[0].keys.device
        counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int64, device="cpu").to(device)
        for layer, other in zip(self.layers, sequences.layers, strict=True):
            layer.put(slots, other, counts, self.length)
        self.batch += count
        self._invalidate()

    def copy_of(self, slot: int) -> Cache:
        """Copy the sequence of a slot to a cache of its own."""
        return self._copy(slot, self.starts[slot], self.length - self.starts[slot])

    def leave(self, slot: int) -> None:
        """Free a slot; the last one that is taken moves into its place."""
        last = self.batch - 1
        if slot != last:
            for layer in self.layers:
                for buffer in layer.buffers:
                    buffer[slot, :, : layer.length] = buffer[last, :, : layer.length]
            self.starts[slot] = self.starts[last]
        self.starts.pop()
        self.batch = last
        unused = min(self.starts, default=0)
        if unused > max(_GROWTH, self.length // 2):
            self._shift(-unused)
        self._invalidate()

    def _clear(self) -> None:
        self.length = 0
        for layer in self.layers:
            layer.first = layer.length = 0

    def _shift(self, tokens: int) -> None:
        """Move all sequences by so many tokens, to the end of longer buffers or to the front."""
        self.length += tokens
        self.starts = [start + tokens for start in self.starts]
        for layer in self.layers:
            layer.shift(self.length)
