"""Decoder layers that `shorten_` has changed, on a CPU: few tokens of each sequence take one call of `ops.decoder.DecoderLayer`.

A cache that grows is kept in memory with room behind it, so that a token is written and nothing is copied: the layer of the cache holds
views of that memory. Whoever puts other tensors there (cropping, beams, a copied cache) is seen, as the views are no longer those that were
left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, StaticLayer

from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import part_of
from halfbyte.ops.decoder import MOST_ROWS, DecoderLayer, Heads, Weight, why_not

_ROOM = "_halfbyte_room"
_LEAST_ROOM = 64  # tokens
_CACHES = (DynamicLayer, StaticLayer)


@dataclass(eq=False, slots=True)
class _Room:
    """Memory [B, Hkv, T, D] of keys and of values, and the views of it that a cache was left with."""

    buffers: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Made:
    """A layer as it was when it was made: where its tensors lay."""

    computed: DecoderLayer
    at: tuple[object, ...]


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()


def weights_of(layer: Any) -> tuple[tuple[Weight, Weight, Weight, Weight], Heads]:
    attention, mlp = layer.self_attn, layer.mlp
    together, alone = (attention.q_proj, mlp.gate_proj), (attention.o_proj, mlp.down_proj)
    parts: list[Any] = [*(linear.together for linear in together), *((linear.packed, linear.bias) for linear in alone)]
    qkv, gate_up, o, down = (Weight(*p, x.compute, x.activation) for p, x in zip(parts, (*together, *alone), strict=True))
    dim = attention.head_dim
    query, key = (linear.packed.shape[0] // dim for linear in (attention.q_proj, attention.k_proj))
    norms: Any = tuple(norm.weight for norm in _of_heads(attention._modules))
    return (qkv, o, gate_up, down), Heads(query, key, dim, attention.scaling, norms or None)


def why_not_one_call(layer: Any) -> str | None:
    """Why tokens take the steps of transformers on a CPU; None where they take one call."""
    if any(part_of(linear) is not None for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)):
        return "its weights are spread over processes"
    return why_not(*weights_of(layer))


def token(
    layer: Any, x: Tensor, mask: Tensor | None, caches: list[Any], rotary: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Tensor | None:
    """The layer's output for x [B, t, K], by one call; None where it is not for that."""
    index = layer.self_attn.layer_idx
    if index >= len(caches) or not _fits(layer, x, mask, caches[index], rotary, settings):
        return None
    computed = _computed(layer)
    if computed is None:
        return None
    cache, tokens = caches[index], x.shape[1]
    if isinstance(cache, StaticLayer):
        length = int(cache.cumulative_length)
        keys: Any = cache.keys
        values: Any = cache.values
        if length + tokens > keys.shape[2]:
            return None
        y = computed(x, rotary, keys, values, length, mask)
        cache.cumulative_length.add_(tokens)
        return y
    length = cache.keys.shape[2]
    return computed(x, rotary, *_grown(cache, tokens), length, mask)


def _fits(layer: Any, x: Tensor, mask: Tensor | None, cache: Any, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]) -> bool:
    return (
        x.shape[0] * x.shape[1] <= MOST_ROWS
        and type(cache) in _CACHES
        and cache.is_initialized
        and cache.keys.dim() == 4
        and cache.keys.shape == cache.values.shape
        and cache.keys.shape[0] == x.shape[0]
        and cache.keys.dtype == x.dtype
        and cache.keys.is_cpu
        and cache.keys.stride(3) == cache.values.stride(3) == 1
        and rotary[0].dim() == 3
        and rotary[0].shape[2] == layer.self_attn.head_dim
        and (mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1))
        and not settings.get("output_attentions")
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not layer.training
    )


def _computed(layer: Any) -> DecoderLayer | None:
    """The layer's weights in one, as they are now; None where a part was replaced that it cannot do without, or is watched."""
    made = _made.get(layer)
    at = _addresses(layer)
    if made is not None and at is not None and made.at == at:
        return made.computed
    linears = layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj
    if at is None or not all(isinstance(linear, QuantLinear) for linear in linears) or why_not_one_call(layer) is not None:
        return None
    weights, heads = weights_of(layer)
    norms = layer.input_layernorm, layer.post_attention_layernorm
    eps = (*(norm.variance_epsilon for norm in norms), 0.0 if heads.norms is None else layer.self_attn.q_norm.variance_epsilon)
    computed = DecoderLayer(weights, (norms[0].weight, norms[1].weight), eps, heads)
    _made[layer] = _Made(computed, at)
    return computed


def _addresses(layer: Any) -> tuple[object, ...] | None:
    """What changes when a part of the layer, or a tensor of it, is replaced; None where one has a hook."""
    parts = layer._modules
    attention, mlp = parts["self_attn"]._modules, parts["mlp"]._modules
    linears = attention["q_proj"], attention["o_proj"], mlp["gate_proj"], mlp["down_proj"]
    inside = *attention.values(), *mlp.values(), *parts.values()
    if any(module._forward_hooks or module._forward_pre_hooks for module in inside):
        return None
    weights = (linear._buffers.get("packed_data") for linear in linears)
    norms = *_of_heads(attention), parts["input_layernorm"], parts["post_attention_layernorm"]
    small = (p for module in (*linears, *norms) for p in module._parameters.values())
    return (
        *map(id, linears),
        *(0 if t is None else t.data_ptr() for t in (*weights, *small)),
        *(getattr(linear, name, None) for linear in linears for name in ("compute", "activation")),
    )


def _of_heads(attention: Mapping[str, Any]) -> tuple[Any, ...]:
    """The norms of queries and keys, where there are any."""
    return tuple(attention[name] for name in ("q_norm", "k_norm") if name in attention)


def _grown(cache: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache that grows, with so many tokens more, which are yet to be written."""
    room, length = getattr(cache, _ROOM, None), cache.keys.shape[2]
    if room is None or room.keys is not cache.keys or room.values is not cache.values or length + tokens > room.buffers[0].shape[2]:
        b, heads, _, dim = cache.keys.shape
        size = length + tokens + max(_LEAST_ROOM, length // 4)
        buffers = cache.keys.new_empty(b, heads, size, dim), cache.values.new_empty(b, heads, size, dim)
        for buffer, before in zip(buffers, (cache.keys, cache.values), strict=True):
            buffer[:, :, :length] = before
        room = _Room(buffers, cache.keys, cache.values)
        setattr(cache, _ROOM, room)
    room.keys, room.values = (buffer.narrow(2, 0, length + tokens) for buffer in room.buffers)
    cache.keys, cache.values = room.keys, room.values
    return room.keys, room.values
