"""A cache of keys and values in 8 bits, for transformers: 1.06 bytes an element instead of 4 or 2.

    model.generate(**inputs, cache=halfbyte.Int8Cache(model.config))    # before transformers 5.24: past_key_values=

`layouts/records.py` has the bytes. A layer of the cache is transformers' own, whose tensors [B, Hkv, T, D] hold records in the place of D
elements: so what moves whole tokens (cropping, beams, windows) is transformers' code. Decoder layers of optimized models read
the codes on a CPU; other layers get all of the cache as floats whenever tokens enter it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from halfbyte.errors import ArgumentError
from halfbyte.layouts.records import from_records, to_records


class _Records(DynamicLayer):  # type: ignore[no-untyped-call]
    """Precedes the class of a layer."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(*(x.new_empty(0, dtype=torch.int8) for x in (key_states, value_states)))

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """All keys and values as the codes have them, the new ones too."""
        keys, values = super().update(to_records(key_states), to_records(value_states), *args, **kwargs)
        (k, v), dtype = (x.shape[-1] for x in (key_states, value_states)), key_states.dtype
        return from_records(keys, k, dtype), from_records(values, v, dtype)


class Int8Layer(_Records):  # type: ignore[no-untyped-call]
    """Growing int8 cache of a layer with full attention."""


class Int8SlidingLayer(_Records, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Growing int8 cache of a layer with sliding-window attention."""


class Int8Cache(DynamicCache):
    """A growing KV cache in 8 bits for a model of transformers: the `cache` of `generate` or of a call, `past_key_values` before 5.24.

    32 elements share a scale; each is off by at most half a scale, 1/253 of the largest of them. Layers that keep anything else, such as
    states of linear attention, are as in transformers' DynamicCache.

    Args:
        config: The model's config.

    Raises:
        ArgumentError: `config` is none of transformers.

    Example:
        >>> from transformers import LlamaConfig
        >>> hb.Int8Cache(LlamaConfig(num_hidden_layers=2)).get_seq_length()
        0
    """

    def __init__(self, config: object) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ArgumentError(f"a cache is made for the config of a model, got {type(config).__name__}: pass model.config")
        super().__init__(config=config)
        for i, layer in enumerate(self.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                self.layers[i] = Int8SlidingLayer(layer.sliding_window)
            elif type(layer) is DynamicLayer:
                self.layers[i] = Int8Layer()  # type: ignore[no-untyped-call]
