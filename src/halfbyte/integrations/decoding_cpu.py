"""Decoder layers that `shorten_` has changed, on a CPU: few tokens of each sequence take one call of `ops.decoder.DecoderLayer`.

A cache that grows is kept in memory with room behind it, so that a token is written and nothing is copied: the layer of the cache holds
views of that memory. Whoever puts other tensors there (cropping, beams, a copied cache) is seen, as the views are no longer those that were
left.

Layers that follow each other are computed by the call of the first, as far as they followed each other before: what the next one returns is
there already if it is called with what the one before it returned, and nothing else has changed. Only then do its tokens enter its cache.
Layers with hooks on them are called one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, StaticLayer

from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import part_of
from halfbyte.ops.decoder import MOST_ROWS, DecoderLayer, Heads, Weight, run_layers, why_not

_ROOM = "_halfbyte_room"
_LEAST_ROOM = 64  # tokens
_CACHES = (DynamicLayer, StaticLayer)


@dataclass(eq=False, slots=True)
class _Room:
    """Memory [B, Hkv, T, D] of keys and of values, and the views of it that a cache was left with."""

    buffers: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor

    def is_of(self, cache: Any) -> bool:
        return cache.keys is self.keys and cache.values is self.values


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """Where tokens enter the layer of a cache: `keys` and `values` are what it has with them. It does not know of them before `enter`."""

    keys: Tensor
    values: Tensor
    length: int

    @classmethod
    def into(cls, cache: Any, tokens: int) -> _Entry | None:
        """None where there is no room for so many."""
        if isinstance(cache, StaticLayer):
            length, keys, values = int(cache.cumulative_length), cast(Tensor, cache.keys), cast(Tensor, cache.values)
            return cls(keys, values, length) if length + tokens <= keys.shape[2] else None
        room, length = getattr(cache, _ROOM, None), cache.keys.shape[2]
        if room is None or not room.is_of(cache) or length + tokens > room.buffers[0].shape[2]:
            b, heads, _, dim = cache.keys.shape
            size = length + tokens + max(_LEAST_ROOM, length // 4)
            buffers = cache.keys.new_empty(b, heads, size, dim), cache.values.new_empty(b, heads, size, dim)
            for buffer, before in zip(buffers, (cache.keys, cache.values), strict=True):
                buffer[:, :, :length] = before
            room = _Room(buffers, cache.keys, cache.values)
            setattr(cache, _ROOM, room)
        keys, values = (buffer.narrow(2, 0, length + tokens) for buffer in room.buffers)
        return cls(keys, values, length)

    def is_into(self, cache: Any) -> bool:
        """Whether the cache is as it was."""
        if isinstance(cache, StaticLayer):
            return cache.keys is self.keys and cache.values is self.values and int(cache.cumulative_length) == self.length
        room: Any = getattr(cache, _ROOM, None)
        if room is None or not room.is_of(cache) or cache.keys.shape[2] != self.length:
            return False
        return bool(room.buffers[0].data_ptr() == self.keys.data_ptr())

    def enter(self, cache: Any, tokens: int) -> None:
        if isinstance(cache, StaticLayer):
            cache.cumulative_length.add_(tokens)
        else:
            room = getattr(cache, _ROOM)
            cache.keys, cache.values = room.keys, room.values = self.keys, self.values


_Same = tuple[Tensor | None, Tensor, Tensor]  # mask, cosines and sines


@dataclass(frozen=True, eq=False, slots=True)
class _Ahead:
    """What a layer gives for x."""

    layer: ref[nn.Module]
    x: Tensor
    version: int | None
    y: Tensor
    entry: _Entry
    same: _Same

    def is_of(self, layer: nn.Module, x: Tensor, cache: Any, same: _Same) -> bool:
        called = self.layer() is layer and self.x is x and all(a is b for a, b in zip(self.same, same, strict=True))
        return called and (self.version is None or x._version == self.version) and self.entry.is_into(cache)


class _Thread(threading.local):
    """What was returned last, and what is there for the layers to come, the next one last."""

    def __init__(self) -> None:
        self.last: _Ahead | None = None
        self.ahead: list[_Ahead] = []


@dataclass(frozen=True, eq=False, slots=True)
class _Made:
    """A layer as it was when it was made: where its tensors lay."""

    computed: DecoderLayer
    at: tuple[object, ...]


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()
_follower: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
_thread = _Thread()


def weights_of(layer: Any) -> tuple[tuple[Weight, Weight, Weight, Weight], Heads]:
    attention, mlp = layer.self_attn, layer.mlp
    together, alone = (attention.q_proj, mlp.gate_proj), (attention.o_proj, mlp.down_proj)
    parts: list[tuple[Any, Any]] = [*(linear.together for linear in together), *((linear.packed, linear.bias) for linear in alone)]
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
    same, last = (mask, *rotary), _thread.last
    if last is not None and last.y is x and (before := last.layer()) is not None:
        _follower[before] = ref(layer)
    if not _thread.ahead or not _thread.ahead[-1].is_of(layer, x, caches[index], same):
        _thread.ahead = _ahead(layer, x, caches, same, settings)
        if not _thread.ahead:
            return None
    found = _thread.last = _thread.ahead.pop()
    found.entry.enter(caches[index], x.shape[1])
    return found.y


def _ahead(layer: Any, x: Tensor, caches: list[Any], same: _Same, settings: dict[str, Any]) -> list[_Ahead]:
    """What this layer gives, and those that followed it before; the last one first. None of it where the layer is not for that."""
    mask, *rotary = same
    layers = list[Any]()
    computed, entries = list[DecoderLayer](), list[_Entry]()
    following: Any = layer
    while following is not None and following not in layers:
        index = following.self_attn.layer_idx
        if index >= len(caches) or not _fits(following, x, mask, caches[index], (rotary[0], rotary[1]), settings):
            break
        one, entry = _computed(following), _Entry.into(caches[index], x.shape[1])
        if one is None or entry is None:
            break
        layers.append(following)
        computed.append(one)
        entries.append(entry)
        link = _follower.get(following)
        following = None if link is None else link()
        if following is not None and any(module._forward_hooks or module._forward_pre_hooks for module in (layers[-1], following)):
            break
    if not layers:
        return []
    outputs = run_layers(computed, x, (rotary[0], rotary[1]), [(e.keys, e.values, e.length) for e in entries], mask)
    inputs = (x, *outputs[:-1])
    versions = [None if t.is_inference() else t._version for t in inputs]
    parts = zip(map(ref, layers), inputs, versions, outputs, entries, strict=True)
    return [_Ahead(*part, same) for part in parts][::-1]


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
