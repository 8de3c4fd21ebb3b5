"""Where the keys and values of new tokens go in a layer of a KV cache of transformers, on a CPU.

`ops.transformer.decoder` writes them straight into the cache's memory, so that a growing cache is kept in larger buffers (`growing.py`).
The cache itself changes only when `enter` is called: a layer that turns out to be unsupported can still be computed by transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from halfbyte.integrations.transformers.cache import growing
from halfbyte.layouts.records import from_records

_CACHES = (*growing.LAYERS, StaticLayer)
SharedStates = dict[str | None, tuple[Tensor, Tensor]]  # keys and values of layers that others reuse, by the type of the layers


class KVEntry(NamedTuple):
    """The keys and values of a layer in a KV cache, with room for those of new tokens.

    Attributes:
        keys, values: [B, Hkv, T, D], or in 8 bits with records in place of D elements.
        length: Number of tokens before the new ones in `keys` and `values`; with a sliding window, of those that the first of them sees.
    """

    keys: Tensor
    values: Tensor
    length: int

    @classmethod
    def find(cls, cache: Any, shape: tuple[int, int], dtype: torch.dtype, heads: int, dim: int) -> KVEntry | None:
        """Find those that tokens attend to.

        Args:
            cache: The layer of a cache; None: keys and values are not kept.
            shape: Sequences B and new tokens t of each.
            dtype: Of the model's activations, which keys and values have unless they are in 8 bits.
            heads, dim: Number of key-value heads and elements of each.

        Returns:
            None if the layer of the cache is of another kind, or has no room for so many tokens.
        """
        batch, tokens = shape
        if cache is not None and not _takes(cache, batch, dtype):
            return None
        if cache is None or not cache.is_initialized:
            size = tokens if cache is None else 0
            keys, values = (torch.empty(batch, heads, size, dim, dtype=dtype, device="cpu") for _ in range(2))
            if cache is None:
                return cls(keys, values, 0)
            cache.update(keys, values)
        if isinstance(cache, StaticLayer):
            length, static_keys, static_values = int(cache.cumulative_length), cache.keys, cache.values
            assert static_keys is not None
            assert static_values is not None
            return cls(static_keys, static_values, length) if length + tokens <= static_keys.shape[2] else None
        grown = growing.grow(cache, tokens)
        keys, values = grown.buffers
        begin = growing.begin(grown)
        if begin > 0:
            keys, values = (buffer.narrow(2, begin, buffer.shape[2] - begin) for buffer in (keys, values))
        return cls(keys, values, grown.length - grown.first - begin)

    @classmethod
    def reuse(cls, keys: Tensor, values: Tensor, cache: Any, tokens: int) -> KVEntry | None:
        """Return keys and values of an earlier layer, those of new tokens included, which lie in a layer of a cache, or in none.

        Returns:
            None if native calls do not read tensors of these strides.
        """
        if keys.stride(3) != 1 or values.stride(3) != 1:
            return None
        return cls(keys, values, (int(cache.cumulative_length) if type(cache) is StaticLayer else keys.shape[2]) - tokens)

    def enter(self, cache: Any, tokens: int) -> None:
        """Count so many tokens, whose keys and values have been written, in the layer of the cache."""
        if isinstance(cache, StaticLayer):
            cache.cumulative_length.add_(tokens)
        elif cache is not None:
            growing.entered(cache, tokens)

    def all_states(self, cache: object, tokens: int, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, T, D] as `update` of a cache does, after so many new tokens were written."""
        if isinstance(cache, StaticLayer):
            return self.keys, self.values
        size = self.length + tokens
        keys, values = self.keys[:, :, :size], self.values[:, :, :size]
        if type(cache) not in growing.IN_8_BITS:
            return keys, values
        return from_records(keys, dim, dtype), from_records(values, dim, dtype)


def _takes(cache: Any, batch: int, dtype: torch.dtype) -> bool:
    """Whether tokens of so many sequences may enter a layer of a cache."""
    if type(cache) not in _CACHES:
        return False
    if not cache.is_initialized:
        return True
    keys, values = cache.buffers if isinstance(cache, growing.Growing) else (cache.keys, cache.values)
    return (
        keys.dim() == 4
        and keys.shape == values.shape
        and keys.shape[0] == batch
        and keys.dtype == (torch.int8 if type(cache) in growing.IN_8_BITS else dtype)
        and keys.is_cpu
        and keys.stride(3) == values.stride(3) == 1
        and (not isinstance(cache, DynamicLayer) or growing.is_whole(cache))
    )


def sees_what_it_should(cache: Any, tokens: int, mask: Tensor | None) -> bool:
    """Whether what tokens may attend to in a layer of a cache follows from the mask and from what is in it."""
    window = None if cache is None else growing.window_of(cache)
    if window is None or window < 2:
        return window is None
    before = min(cache.get_seq_length(), window - 1)
    return tokens == 1 or before + tokens <= window if mask is None else mask.shape[3] == before + tokens
