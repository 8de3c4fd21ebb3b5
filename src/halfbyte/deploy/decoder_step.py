"""A decoder of transformers with its KV cache inside, as `example.py` exports it: prefill and decode steps of one sequence."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from halfbyte.errors import UnsupportedError


class _CacheLayer(Protocol):
    keys: Tensor
    values: Tensor
    position: Tensor


class DecoderStep(nn.Module):
    """input_ids [1, T], position [] -> logits [1, T, vocabulary].

    `position` is that of the first of these tokens, 0 in a new sequence; keys and values of positions before it are in the cache.

    Attributes:
        context: The positions of the cache.
    """

    def __init__(self, model: nn.Module, context: int, caches: list[tuple[Tensor, Tensor]]) -> None:
        from transformers import Cache

        from halfbyte.integrations.transformers.optimize.calls import KV_CACHE

        super().__init__()
        self.model, self.context, self.keyword = model, context, KV_CACHE
        for name, tensors in (("keys", [keys for keys, _ in caches]), ("values", [values for _, values in caches])):
            for i, tensor in enumerate(tensors):
                _, heads, _, width = tensor.shape
                self.register_buffer(f"{name}_{i}", tensor.new_zeros(1, heads, context, width), persistent=False)
        self.layers = [_cache_layer(context) for _ in caches]
        self.cache = Cache(layers=self.layers)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, position: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values, layer.position = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}"), position
        places = position + torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.model(input_ids=input_ids, position_ids=places[None], use_cache=True, **{self.keyword: self.cache}).logits  # type: ignore[no-any-return]


def decoder_step(model: nn.Module, ids: Tensor, context: int) -> tuple[DecoderStep, dict[str, Tensor]]:
    """The step of a model of transformers and its inputs.

    Raises:
        UnsupportedError: Its cache holds other things than keys and values by position.
    """
    from halfbyte.integrations.transformers.optimize.calls import KV_CACHE

    with torch.no_grad():
        cache = getattr(model(input_ids=ids, use_cache=True), KV_CACHE)
    layers = getattr(cache, "layers", [])
    if not layers or not all(isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.dim() == 4 for layer in layers):
        raise UnsupportedError(f"the state of {type(model).__name__} is not a KV cache of every layer: use export_onnx instead")
    step = DecoderStep(model, context, [(layer.keys, layer.values) for layer in layers]).eval()
    return step, {"input_ids": ids, "position": torch.zeros((), dtype=torch.int64, device=ids.device)}


def _cache_layer(context: int) -> _CacheLayer:
    """A layer of a cache whose tensors and position `DecoderStep` sets at each call; transformers is imported here."""
    from transformers.cache_utils import StaticLayer

    class Layer(StaticLayer):  # type: ignore[no-untyped-call]
        position: Tensor

        def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
            assert self.keys is not None
            assert self.values is not None
            places = self.position + torch.arange(key_states.shape[-2], device=key_states.device)
            self.keys.index_copy_(2, places, key_states)
            self.values.index_copy_(2, places, value_states)
            return self.keys, self.values

        def get_seq_length(self) -> Tensor:  # type: ignore[override]
            return self.position

    layer = Layer(max_cache_len=context)
    layer.is_initialized = True
    return cast(_CacheLayer, layer)
