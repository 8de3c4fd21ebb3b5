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
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import Cache, StaticLayer

from halfbyte.integrations import decoding_gpu
from halfbyte.integrations.ahead import watched
from halfbyte.integrations.decoding_cpu import all_norms, groups_of, linears_of, norms_of, parts_of, settings_of, visible
from halfbyte.integrations.families import other
from halfbyte.integrations.unchanged import Unchanged
from halfbyte.machine import Gpu
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import part_of
from halfbyte.ops.decoder import Attention, Dense
from halfbyte.ops.functions import linear
from halfbyte.ops.library import plain
from halfbyte.ops.norms import normed
from halfbyte.ops.prompt import activated, attend_many, turn, why_not_many


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
    parts = _parts(layer) if _fits(layer, x, past, rotary, settings) else None
    if parts is None or not parts.first.heads.turns_by(rotary[0].shape[2]):
        return None
    seen = _seen(layer, mask)
    if isinstance(seen, str):
        return None
    first, second = parts.first, parts.second
    x = x.contiguous()
    z = x if first.before is None else normed(x, first.before)
    read = _attended(first, z, seen, past, layer.self_attn.layer_idx, rotary)
    h, then = decoding_gpu.added(first, parts.o, read, x, None if second is None else second.before)
    if second is None or parts.down is None:
        found = layer.mlp(norms_of(layer)[2](h))
        y: Tensor = found[0] if isinstance(found, tuple) else found  # gpt-oss's tells its router's weights, too
        return h + y
    if not second.parallel:
        z = then if then is not None else h if second.before is None else normed(h, second.before)
    product = linear(z, second.gate_up.packed, second.gate_up.bias, compute="float")
    inner = activated(product, second.gates, second.factor, gated=second.gated)
    return decoding_gpu.added(second, parts.down, inner, h)[0]


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
    if any(part_of(product) is not None for product in linears[0]):  # a part of the heads is here
        _, own = groups_of(layer)[0]
        if len(own) != 3 or first.heads.sinks is not None:
            return None
        query, key = (linear.out_features // first.heads.dim for linear in own[:2])
        first = first._replace(heads=first.heads._replace(query=query, key=key))
    if not isinstance(second, Dense):
        return _Parts(first, None, linears[1], None)
    return None if decoding_gpu.why_not_dense(first, second) is not None else _Parts(first, second, linears[1], linears[2][-1])


def _attended(half: Attention, z: Tensor, mask: Tensor | None, past: Cache | None, index: int, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, T, H * D] for z [B, T, K]"""
    heads = half.heads
    products = [linear(z, weight.packed, weight.bias, compute="float") for weight in half.qkv]
    qkv = torch.cat(products, -1) if len(products) > 1 else products[0]
    turns = (rotary[0], rotary[1]) if heads.turned else None
    cache: Any = None if past is None or index >= len(past.layers) else past.layers[index]
    length: Tensor | None = None
    keys: Any
    values: Any
    if isinstance(cache, StaticLayer) and not cache.is_initialized:
        cache.cumulative_length = torch.zeros((), dtype=torch.int64, device=z.device)  # a copy from the host would wait for the GPU
    if type(cache) is StaticLayer:
        if not cache.is_initialized:
            new = qkv.new_empty(len(z), heads.key, 0, heads.dim)
            cache.lazy_initialization(new, new)
        keys, values, length = cache.keys, cache.values, cache.cumulative_length
        queries = turn(qkv, turns, keys, values, length, heads)
    else:
        keys, values = (qkv.new_empty(len(z), heads.key, z.shape[1], heads.dim) for _ in range(2))
        queries = turn(qkv, turns, keys, values, None, heads)
        if past is not None:
            keys, values = past.update(keys, values, index)
    seen = None if mask is None else mask[:, 0, :, : keys.shape[2]]
    y = attend_many(queries, keys, values, length, seen, heads.scale, factor=half.factor, sinks=heads.sinks)
    if length is not None:
        length.add_(z.shape[1])
    return y


_masks: Any = WeakTensorKeyDictionary()  # those that are added to scores: what they show, and when


def _seen(layer: Any, mask: Tensor | None) -> Tensor | str | None:
    """The mask as `attend_many` takes it; or why it takes none like it."""
    if not decoding_gpu.is_eager(layer):
        fits = mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)
        return mask if fits else "a mask of another kind"
    if mask is None or mask.dim() != 4 or mask.shape[1] != 1:
        return "eager attention without a mask is not causal"
    known = _masks.get(mask)
    version = None if mask.is_inference() else mask._version
    if known is None or known[1] != version:
        known = _masks[mask] = visible(mask), version  # waits for the GPU, once for all layers
    found: Tensor = known[0]
    return found if found.dtype == torch.bool else "a mask that adds other numbers"


def _fits(layer: Any, x: Tensor, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]) -> bool:
    """Whether the call is for many tokens, with nothing else than their results asked for."""
    return (
        x.device.type in decoding_gpu.DEVICES
        and x.shape[1] > 1
        and plain(x)
        and rotary[0].dim() == 3
        and not settings.get("output_attentions")
        and layer.self_attn.is_causal
        and not layer.training
        and not torch.is_grad_enabled()
    )
