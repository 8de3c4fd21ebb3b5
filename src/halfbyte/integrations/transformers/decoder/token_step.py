"""One new token of each sequence through a compiled decoder stack, by the native call of `CpuModel`'s decode step.

This is for growing caches of transformers. What Python does between two tokens counts, as it runs with caches that are full of weights:
everything that stays from token to token is made once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.integrations.transformers.cache import growing


class TokenStep:
    """The decode step of a stack, with or without the model's head.

    Attributes:
        most_rows: Sequences at most.
        kept: Number of layers that have keys and values of their own; layers that reuse these come behind.
        query_scale_from: Position from which on queries have a factor, which is not computed; None: they have none.
    """

    def __init__(self, model: CpuModel, query_scale_from: int | None, dtype: torch.dtype) -> None:
        """Make the step of a model, or of a stack by itself, whose results have a dtype. query_scale_from: See the attribute."""
        layers, self._model = model.spec.layers, model
        self.most_rows, self.query_scale_from, self.dtype = model.most_decode, query_scale_from, dtype
        self._windows = [layer.sliding_window for layer in layers]
        self._sources = [index if layer.kv_source is None else layer.kv_source for index, layer in enumerate(layers)]
        self.count, self.kept = len(layers), sum(layer.kv_source is None for layer in layers)
        self._last = _LastCache()

    def __call__(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, layers: Sequence[Any]) -> Tensor | None:
        """Compute the logits, or normed hidden states, [B, 1, N] of ids [B, 1], which enter the cache.

        Args:
            ids: The tokens.
            mask: Which tokens are no padding [B, T + 1], or None.
            positions: Of the tokens [B or 1, 1]; None: the cache's length.
            layers: The layers of the cache.

        Returns:
            None if the call is none that the step supports: another kind of cache, more sequences, later positions.
        """
        batch = ids.shape[0]
        if not 0 < batch <= self.most_rows or len(layers) not in (self.count, self.kept):
            return None
        layers = layers[: self.kept]
        last = self._last
        if not last.is_of(layers, batch) and not last.take(self, layers, batch):
            return None
        length: int = layers[0].length
        seen, where = None, [length] * batch
        if mask is not None:
            if type(mask) is not Tensor or mask.shape != (batch, length + 1):
                return None
            seen = None if mask.all() else mask.to(torch.bool).contiguous()
        if positions is not None:
            if type(positions) is not Tensor or positions.is_floating_point() or positions.shape not in ((batch, 1), (1, 1)):
                return None
            where = positions.flatten().tolist() * (batch // len(positions))
            if min(where) < 0:
                return None
        furthest = max(where)
        if self.query_scale_from is not None and furthest >= self.query_scale_from:
            return None
        rows = [self._model.rope_row(position, furthest + 1) for position in where]
        entries = partial(_entries, layers, self._sources)
        y = self._model.step(ids.flatten().tolist(), [address for _, address in rows], last.buffer_ids, entries, length, seen)
        for layer in layers:
            layer.length = length + 1
        return y if y.dtype == self.dtype else y.to(self.dtype)

    def fits(self, layers: Sequence[object]) -> bool:
        """Whether layers of a cache have the sliding windows of the model's."""
        return all(growing.window_of(layer) in (None, window) for layer, window in zip(layers, self._windows[: self.kept], strict=True))


class _LastCache(threading.local):
    """The cache that a thread wrote to last: the buffers of its layers, and for how many sequences and tokens they have room."""

    buffer_ids: tuple[int, ...] = ()
    batch = room = 0

    def is_of(self, layers: Sequence[Any], batch: int) -> bool:
        """Whether it is of these layers, equally long, with room for a token."""
        try:
            lengths = [layer.length for layer in layers]
            same = self.buffer_ids == tuple([layer.buffer_id for layer in layers])
        except AttributeError:  # not growing, or not yet
            return False
        return same and self.batch == batch and lengths[0] < self.room and lengths.count(lengths[0]) == len(lengths)

    def take(self, step: TokenStep, layers: Sequence[Any], batch: int) -> bool:
        """Make room for a token in these layers; False where they are none for this."""
        if any(type(layer) not in growing.LAYERS or not layer.is_initialized for layer in layers):
            return False
        views = [layer.buffers if isinstance(layer, growing.Growing) else (layer.keys, layer.values) for layer in layers]
        dtypes = {step.dtype if type(layer) not in growing.IN_8_BITS else torch.int8 for layer in layers}
        if len(dtypes) > 1 or len({layer.get_seq_length() for layer in layers}) > 1:
            return False
        if not all(keys.shape == values.shape and len(keys) == batch and keys.dtype in dtypes and keys.is_cpu for keys, values in views):
            return False
        if not step.fits(layers) or not all(map(growing.is_whole, layers)):
            return False
        grown = [growing.grow(layer, 1) for layer in layers]
        self.buffer_ids, self.batch = tuple(layer.buffer_id for layer in grown), batch
        self.room = min(layer.first + layer.buffers[0].shape[2] for layer in grown)
        return True


def _entries(layers: Sequence[growing.Growing], sources: Sequence[int]) -> list[tuple[Tensor, Tensor, int]]:
    """Keys, values and lengths for all layers, by the indices of those whose keys and values they read."""
    entries = [(*layer.buffers, layer.length - layer.first) for layer in layers]
    return [entries[source] for source in sources]
