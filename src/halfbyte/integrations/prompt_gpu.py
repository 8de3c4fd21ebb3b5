"""Decoder layers that `shorten_` has changed, on a GPU: many tokens of each sequence, as in prompts, in few kernels:

    qkv  = linear(norm(x), q | k | v)                        a kernel of the norm, a product for each weight
    q    = turn(qkv, …)                                      norms of heads, positions, and the new entries of a static cache
    a    = attend_many(q, keys, values, …)
    h    = linear(a, o, residual=x)                          or, where there is a norm after it: add_normed(linear(a, o), x, norm, …)
    y    = linear(f(gate) * up, down, residual=h)            a kernel of the norm, gate | up = linear(norm(h)), a kernel of the gates

With any cache, or none: others than static ones take keys and values by their `update`. Experts take transformers' steps behind the
attention half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer

from halfbyte.integrations import decoding_gpu
from halfbyte.integrations.ahead import watched
from halfbyte.integrations.decoding_cpu import all_norms, linears_of, norms_of, parts_of, settings_of
from halfbyte.integrations.families import other
from halfbyte.integrations.unchanged import Unchanged
from halfbyte.machine import Gpu
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import linear_added
from halfbyte.ops.decoder import Attention, Dense, Norm
from halfbyte.ops.functions import linear
from halfbyte.ops.library import plain
from halfbyte.ops.prompt import added_normed, attend_many, gated, normed, turn, why_not_many


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of a layer, as they are now: what its halves compute, the second None where its own steps do, and the linear layers that add."""

    first: Attention
    second: Dense | None
    o: QuantLinear
    down: QuantLinear | None


_known: WeakKeyDictionary[nn.Module, tuple[_Parts | None, Unchanged]] = WeakKeyDictionary()


def tokens(
    layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Tensor | None:
    """The layer's output for x [B, T, K], T > 1; None if that is not supported. past: the cache of all layers, or none."""
    parts = _parts(layer) if _fits(layer, x, mask, past, rotary, settings) else None
    if parts is None or parts.first.heads.turned not in (0, _turned(parts.first, rotary)):
        return None
    first, second = parts.first, parts.second
    seen = _attended(first, x.contiguous(), mask, past, layer.self_attn.layer_idx, rotary)
    h, z = _added(first, parts.o, seen, x, None if second is None else second.before)
    if second is None or parts.down is None:
        found = layer.mlp(norms_of(layer)[2](h))
        y: Tensor = found[0] if isinstance(found, tuple) else found  # gpt-oss's tells its router's weights, too
        return h + y
    if z is None:
        z = h if second.before is None else normed(h, second.before)
    weight = second.gate_up
    inner = gated(linear(z, weight.packed, weight.bias, compute="float"), second.gates, second.factor)
    return _added(second, parts.down, inner, h)[0]


def why_not_prompts(layer: Any, here: Gpu) -> str | None:
    """Why a layer of which one token takes few kernels computes the attention of prompts in torch's operations; None if by a kernel."""
    return why_not_many(decoding_gpu.halves(layer)[0].heads, all_norms(layer)[0].weight.dtype, here)


def _parts(layer: Any) -> _Parts | None:
    """None where a layer takes other steps."""
    known = _known.get(layer)
    if known is None or not known[1].is_still():
        if any(watched(part) or "forward" in vars(part) for part in layer.modules() if part is not layer):
            return None
        of_config = [(layer.self_attn.config, "_attn_implementation")]
        known = _known[layer] = _found(layer), Unchanged(layer, parts_of(layer), [*settings_of(layer), *of_config])
    return known[0]


def _found(layer: Any) -> _Parts | None:
    linears = linears_of(layer)
    if linears is None or other(layer) is not None:
        return None
    first, second = decoding_gpu.halves(layer)
    if decoding_gpu.why_not_attention(layer, linears, first) is not None:
        return None
    if not isinstance(second, Dense):
        return _Parts(first, None, linears[1], None)
    return None if decoding_gpu.why_not_dense(first, second) is not None else _Parts(first, second, linears[1], linears[2][-1])


def _attended(half: Attention, x: Tensor, mask: Tensor | None, past: Cache | None, index: int, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, T, H * D]"""
    heads = half.heads
    z = x if half.before is None else normed(x, half.before)
    products = [linear(z, weight.packed, weight.bias, compute="float") for weight in half.qkv]
    qkv = torch.cat(products, -1) if len(products) > 1 else products[0]
    turns = (rotary[0], rotary[1]) if heads.turned else None
    cache: Any = None if past is None or index >= len(past.layers) else past.layers[index]
    length: Tensor | None = None
    keys: Any
    values: Any
    if isinstance(cache, StaticLayer) and not cache.is_initialized:
        cache.cumulative_length = torch.zeros((), dtype=torch.int64, device=x.device)  # a copy from the host would wait for the GPU
    if type(cache) is StaticLayer:
        if not cache.is_initialized:
            new = qkv.new_empty(len(x), heads.key, 0, heads.dim)
            cache.lazy_initialization(new, new)
        keys, values, length = cache.keys, cache.values, cache.cumulative_length
        queries = turn(qkv, turns, keys, values, length, heads)
    else:
        keys, values = (qkv.new_empty(len(x), heads.key, x.shape[1], heads.dim) for _ in range(2))
        queries = turn(qkv, turns, keys, values, None, heads)
        if past is not None:
            keys, values = past.update(keys, values, index)
    seen = None if mask is None else mask[:, 0, :, : keys.shape[2]]
    y = attend_many(queries, keys, values, length, seen, heads.scale, factor=half.factor, sinks=heads.sinks)
    if length is not None:
        length.add_(x.shape[1])
    return y


def _added(
    half: Attention | Dense, product: QuantLinear, x: Tensor, residual: Tensor, then: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """h = residual + norm(product(x)), and then(h) where that takes no further kernel."""
    if half.after is None:
        return linear_added(product, x, residual), None
    return added_normed(product(x), residual, half.after, then)


def _turned(half: Attention, rotary: tuple[Tensor, Tensor]) -> int:
    return rotary[0].shape[2] * (2 if half.heads.pairs == "once" else 1)


def _fits(layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]) -> bool:
    """Whether the call is for many tokens, with what `attend_many` supports."""
    return (
        x.device.type in decoding_gpu.DEVICES
        and x.shape[1] > 1
        and plain(x)
        and rotary[0].dim() == 3
        and (mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1))
        and not settings.get("output_attentions")
        and layer.self_attn.is_causal
        and not layer.training
        and not torch.is_grad_enabled()
        and (past is None or mask is not None or _is_empty(past, layer.self_attn.layer_idx))
    )


def _is_empty(past: Any, index: int) -> bool:
    """Without a mask, tokens see each other: what is in a cache would have to be seen, too."""
    layer = past.layers[index] if index < len(past.layers) else None
    return layer is None or not layer.is_initialized or type(layer) is StaticLayer or not layer.get_seq_length()
