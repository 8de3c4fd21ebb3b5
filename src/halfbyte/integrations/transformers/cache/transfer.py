"""Keys and values between the caches of transformers and those of `GpuModel`, which writes the tokens of `generate` on a GPU.

Both have the tokens of all sequences end at the same index, those that are shorter behind padding, so that layers are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from halfbyte.decoder.cache import Cache, LayerCache, OnGpu, Slots
from halfbyte.decoder.spec import DecoderSpec, LayerSpec
from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache, Int8Layer, Int8SlidingLayer
from halfbyte.layouts.records import from_codes, split

_CACHES = (DynamicCache, Int8Cache, StaticCache)
_IN_8_BITS = (Int8Layer, Int8SlidingLayer)
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, *_IN_8_BITS, StaticLayer, StaticSlidingWindowLayer)


def why_not_transferred(past: Any, spec: DecoderSpec, most: int) -> str | None:
    """Why keys and values of a cache of transformers, which is to have so many tokens at most, cannot be transferred; None if they can."""
    if type(past) not in _CACHES or past.offloading:
        return f"its cache is a {type(past).__name__}{' that is offloaded' if type(past) in _CACHES else ''}"
    for index, _ in _with_keys(spec):
        layer = past.layers[index] if index < len(past.layers) else None  # a DynamicCache makes layers when they are needed
        if layer is not None and type(layer) not in _LAYERS:
            return f"its cache has a {type(layer).__name__}"
        if type(layer) is StaticLayer and layer.max_cache_len < most - 1:  # the last one does not enter it
            return f"its cache has room for {layer.max_cache_len} tokens, not for {most - 1}"
    return None


def taken(past: Any, spec: DecoderSpec, where: OnGpu, starts: Sequence[int], *, keep: bool) -> Slots:
    """Copy a cache of transformers.

    Args:
        past: The cache, for which `why_not_transferred` has no reason.
        spec: Of the model.
        where: Of the copy.
        starts: Index of the first token of each sequence, behind its padding.
        keep: Whether it is still needed; if not, what was copied of it is freed.
    """
    slots = Slots(spec, len(starts), int8=type(past) is Int8Cache, where=where)
    slots.batch, slots.starts, slots.length = len(starts), list(starts), int(past.get_seq_length())
    for (index, layer), cache in zip(_with_keys(spec), slots.layers, strict=True):
        source = past.layers[index]
        cache.fill(_states(source, layer), slots.length)
        if not keep and not isinstance(source, StaticLayer):
            source.keys = source.values = cache.keys.new_empty(0)
    return slots


def give_back(cache: Cache, past: Any, spec: DecoderSpec) -> None:
    """Append the tokens that a cache of transformers does not have yet."""
    count = cache.length - int(past.get_seq_length())
    for (index, _), layer in zip(_with_keys(spec), cache.layers, strict=True):
        past.update(*_last(layer, count), index)


def _with_keys(spec: DecoderSpec) -> list[tuple[int, LayerSpec]]:
    """The layers that have keys and values of their own."""
    return [(index, layer) for index, layer in enumerate(spec.layers) if layer.kv_source is None]


def _states(layer: Any, spec: LayerSpec) -> list[Tensor]:
    """The last tokens of a layer, as the buffers of `LayerCache` have them."""
    both = [layer.keys, layer.values]
    if isinstance(layer, StaticLayer):
        length = layer.cumulative_length_int if isinstance(layer, StaticSlidingWindowLayer) else int(layer.cumulative_length)
        both = [states[:, :, : min(length, layer.max_cache_len)] for states in both]
    if type(layer) not in _IN_8_BITS:
        return both
    (keys, of_keys), (values, of_values) = (split(records, spec.attention.heads.head_dim) for records in both)
    return [keys, values, of_keys, of_values]


def _last(layer: LayerCache, count: int) -> list[Tensor]:
    """Keys and values of the last `count` tokens; 0 for those that a window has forgotten."""
    there = min(count, layer.length)
    buffers = [buffer[:, :, layer.length - there : layer.length] for buffer in layer.buffers]
    if len(buffers) > 2:
        keys, values, *scales = buffers
        buffers = [from_codes(codes, scale, torch.float32) for codes, scale in zip((keys, values), scales, strict=True)]
    return [torch.nn.functional.pad(states, (0, 0, count - there, 0)) for states in buffers]
