"""Layers of static caches in 8 bits, for GPUs: keys and values are codes, int8 [B, Hkv, T, D], with scales of their own.

`scales` is a layer of the same kind whose keys and values, bfloat16 [B, Hkv, T, ceil(D / 32)], are the scales (`layouts/records.py`), so
that what moves tokens is the same code for both. Its length is that of the codes. `attend` reads and writes both (`gpu_run.py`); who
asks by `update` gets all of the cache as floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from halfbyte.integrations.transformers.cache.rings import Ring
from halfbyte.layouts.records import from_codes, scales_of, to_codes


class _Codes:
    """Mixin that precedes the class of a layer.

    scales  of keys and of values
    floats  the dtype of keys and values as others see them
    """

    scales: Any
    floats: torch.dtype

    def lazy_initialization(self: Any, key_states: Tensor, value_states: Tensor) -> None:
        new, widths = (key_states, value_states), [scales_of(x.shape[-1]) for x in (key_states, value_states)]
        self.floats = key_states.dtype
        super().lazy_initialization(*(x.new_empty((*x.shape[:2], 0, x.shape[-1]), dtype=torch.int8) for x in new))  # type: ignore[misc]
        of_new = [x.new_empty((*x.shape[:2], 0, n), dtype=torch.bfloat16) for x, n in zip(new, widths, strict=True)]
        self.scales.cumulative_length = torch.zeros_like(self.cumulative_length)  # a copy from the host would wait for the GPU
        self.scales.lazy_initialization(*of_new)

    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values as the codes have them, the new ones too."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        (keys, of_keys), (values, of_values) = to_codes(key_states), to_codes(value_states)
        scales = self._scales().update(of_keys, of_values)
        codes = super().update(keys, values, *args, **kwargs)  # type: ignore[misc]
        return _decoded(codes, scales, self.floats)

    def in_floats(self: Any) -> tuple[Tensor, Tensor]:
        """Keys and values, those of a ring in their order."""
        of_codes = self._scales()
        if self.is_sliding:
            return _decoded(self.in_order(), of_codes.in_order(), self.floats)
        return _decoded((self.keys, self.values), (of_codes.keys, of_codes.values), self.floats)

    def _scales(self: Any) -> object:
        """With the length of the codes."""
        self.scales.cumulative_length.copy_(self.cumulative_length)
        if self.is_sliding:
            self.scales.cumulative_length_int = self.cumulative_length_int
        return self.scales

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._scales().reorder_cache(beam_idx)


def _decoded(codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return from_codes(codes[0], scales[0], dtype), from_codes(codes[1], scales[1], dtype)


class StaticInt8Layer(_Codes, StaticLayer):  # type: ignore[no-untyped-call]
    """Static int8 cache of a layer with full attention."""


class Int8Ring(_Codes, Ring):  # type: ignore[no-untyped-call]
    """Static int8 cache of a layer with sliding-window attention."""


_CODES: dict[type, type] = {StaticLayer: StaticInt8Layer, Ring: Int8Ring}
IN_CODES = tuple(_CODES.values())


def with_codes(cache: StaticCache) -> StaticCache:
    """Turns the layers of an empty cache, whose windows are rings, into layers of codes, in place."""
    cache.layers = [_of_codes(layer) if type(layer) in _CODES else layer for layer in cache.layers]
    return cache


def _of_codes(layer: Any) -> Any:
    kind: Any = _CODES[type(layer)]
    new = kind.__new__(kind)
    vars(new).update(vars(layer), cumulative_length=layer.cumulative_length.clone(), scales=layer)
    return new


def scales_or_none(layer: object) -> tuple[Tensor, Tensor] | None:
    """Those of an initialized layer of codes, as `attend` takes them."""
    return (layer.scales.keys, layer.scales.values) if isinstance(layer, _Codes) else None
