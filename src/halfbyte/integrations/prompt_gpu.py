"""Decoder layers that `shorten_` has changed, on a GPU: many tokens of each sequence, as in prompts, in few kernels:

    qkv  = linear(norm(x), q | k | v)                        a kernel of the norm, a product for each weight
    q    = turn(qkv, …)                                      norms of heads, positions, and the new entries of a static cache
    a    = attend_many(q, keys, values, …)
    h    = linear(a, o, residual=x)                          or, where there is a norm after it: add_normed(linear(a, o), x, norm, …)
    y    = linear(f(gate) * up, down, residual=h)            a kernel of the norm, gate | up = linear(norm(h)), a kernel of the gates
    y    = add_experts(h, …)                                 in place of these, where there are experts
    y    = linear(f(linear(y, gate)) * e, …)                 after these, with a norm, where a layer has an input e of its own

With any cache, or none: others than static ones take keys and values by their `update`; layers that read those of an earlier one (Gemma 4)
take what that one has left in `shared_kv_states`, also for the last tokens alone. All launches of a layer are made by one call, before and
after a cache's `update` by one each, once layers alike have computed as many tokens (`layer_gpu.chain`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import Cache, StaticLayer

from halfbyte.integrations import decoding_gpu
from halfbyte.integrations.compiled_layers import visible
from halfbyte.integrations.families import borrows, lender, lends, mlp_of, shared_as
from halfbyte.integrations.layer_gpu import Parts, added, chain, halves, is_distributed, is_eager, own_input, parts, with_own_input
from halfbyte.integrations.live_layers import all_norms, norms_of
from halfbyte.integrations.static_codes import StaticInt8Layer
from halfbyte.kernels.made import keep
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.decoder import Attention, Dense
from halfbyte.ops.functions import linear
from halfbyte.ops.library import plain
from halfbyte.ops.norms import normed
from halfbyte.ops.prompt import activated, attend_many, turn, why_not_many
from halfbyte.ops.routing import add_experts

_Turns = tuple[Tensor, Tensor] | None  # cosines and sines
_Place = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and how many of them there are before the new ones; None: none


def tokens(
    layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Tensor | None:
    """The layer's output for x [B, T, K], T > 1, or 1 where keys are another layer's; None if that is not supported. past: the cache of
    all layers, or none."""
    reads, shared = borrows(layer), cast(Any, settings.get("shared_kv_states"))
    found = parts(layer) if _fits(layer, x, past, rotary) and (shared is not None or not (reads or lends(layer))) else None
    if found is None or not found.for_prompts or not found.first.heads.turns_by(rotary[0].shape[2]):
        return None
    if x.is_cuda and why_not_many(found.first.heads, x.dtype, gpu(x.get_device())) is not None:
        return None
    seen = _seen(layer, mask, x.shape[1])
    if isinstance(seen, str):
        return None
    own = own_input(found, settings)
    if (own is None) != (found.third is None):
        return None
    index, x = layer.self_attn.layer_idx, x.contiguous()
    turns = None if found.first.heads.turned == 0 else (_in_rows(rotary[0]), _in_rows(rotary[1]))
    cache: Any = None if past is None or index >= len(past.layers) else past.layers[index]
    if reads:
        place = _lent(layer, x, mask, past, shared)
        return None if place is None else _with_others(found, x, seen, turns, place, own)
    if isinstance(cache, StaticLayer) and not cache.is_initialized:
        # A copy from the host would wait for the GPU.
        cache.cumulative_length = torch.zeros_like(cache.cumulative_length, device=x.device)
    if type(cache) is StaticLayer:
        y, kept = _with_static(found, x, seen, turns, cache, own)
    else:
        # Of codes all of a static cache comes back as floats; of it the new tokens see what is before them.
        before = cache.cumulative_length.clone() if type(cache) is StaticInt8Layer else None
        y, kept = _with_any(found, x, seen, turns, None if past is None else partial(past.update, layer_idx=index), own, before)
    if lends(layer):
        shared[shared_as(layer)] = kept
    if isinstance(found.second, Dense) or found.for_token:
        return y
    more = mlp_of(layer)(norms_of(layer)[2](y))
    of_experts: Tensor = more[0] if isinstance(more, tuple) else more  # gpt-oss's tells its router's weights, too
    return y + (of_experts if found.first.factor == 1 else of_experts * found.first.factor)


def _in_rows(table: Tensor) -> Tensor:
    return table if table.stride(-1) == 1 else table.contiguous()


def _lent(layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, shared: Any) -> _Place | None:
    """Keys and values that an earlier layer has left, and before which of them the tokens x are; None where that is not known."""
    index = lender(layer)
    if index is None or shared_as(layer) not in shared or (past is not None and index >= len(past.layers)):
        return None
    keys, values = shared[shared_as(layer)]
    cache: Any = None if past is None else past.layers[index]
    tokens = x.shape[1]
    if keys.dtype != x.dtype or keys.device != x.device:
        return None
    if type(cache) in (StaticLayer, StaticInt8Layer):
        return keys, values, cache.cumulative_length - tokens
    if mask is not None:  # which tells of what is there, too
        return (keys, values, None) if mask.shape[3] == keys.shape[2] else None
    window, before = layer.self_attn.sliding_window, keys.shape[2] - tokens
    if isinstance(cache, StaticLayer) or (window is not None and keys.shape[2] > window):
        return None
    return keys, values, torch.full((1,), before, dtype=torch.int64, device=x.device) if before else None


def _with_others(parts: Parts, x: Tensor, mask: Tensor | None, turns: _Turns, place: _Place, own: Tensor | None) -> Tensor:
    """With keys and values of another layer."""

    def steps() -> list[Tensor]:
        z, queries = _before(parts.first, x, turns, place)
        return [_after(parts, x, z, queries, place, mask, own)]

    (y,) = chain("others", parts, steps, x, (mask, *(turns or (None, None)), *place, own))
    return y


def _with_static(
    parts: Parts, x: Tensor, mask: Tensor | None, turns: _Turns, cache: Any, own: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The output, and keys and values."""
    heads = parts.first.heads
    if not cache.is_initialized:
        new = x.new_empty(len(x), heads.key, 0, heads.dim)
        cache.lazy_initialization(new, new)
    place = cache.keys, cache.values, cache.cumulative_length

    def steps() -> list[Tensor]:
        z, queries = _before(parts.first, x, turns, place)
        return [_after(parts, x, z, queries, place, mask, own)]

    (y,) = chain("prompt", parts, steps, x, (mask, *(turns or (None, None)), *place, own))
    cache.cumulative_length.add_(x.shape[1])
    return y, place[:2]


def _with_any(
    parts: Parts,
    x: Tensor,
    mask: Tensor | None,
    turns: _Turns,
    update: Callable[..., Any] | None,
    own: Tensor | None,
    before: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The output, and keys and values, with a cache that takes these by itself, or none. before: how many tokens are before the new ones in
    what the cache gives back; None: by the mask, or none."""
    first, heads = parts.first, parts.first.heads

    def begin() -> list[Tensor]:
        keys, values = (keep(x.new_empty(len(x), heads.key, x.shape[1], heads.dim)) for _ in range(2))
        z, queries = _before(first, x, turns, (keys, values, None))
        return [keys, values, queries, *(() if z is x else (z,))]

    keys, values, queries, *read = chain("before", parts, begin, x, turns or (None, None))
    z = read[0] if read else x
    if update is not None:
        keys, values = update(keys, values)
    seen = None if mask is None else mask[..., : keys.shape[2]]

    def end() -> list[Tensor]:
        return [_after(parts, x, z, queries, (keys, values, before), seen, own)]

    (y,) = chain("after", parts, end, x, (None if z is x else z, queries, keys, values, before, seen, own))
    return y, (keys, values)


def _before(half: Attention, x: Tensor, turns: _Turns, place: _Place) -> tuple[Tensor, Tensor]:
    """What the products read, and queries; keys and values are written to their place."""
    z = x if half.before is None else normed(x, half.before)
    products = [linear(z, weight.packed, weight.bias, compute="float") for weight in half.qkv]
    return z, turn(torch.cat(products, -1) if len(products) > 1 else products[0], turns, *place, half.heads)


def _after(parts: Parts, x: Tensor, z: Tensor, queries: Tensor, place: _Place, mask: Tensor | None, own: Tensor | None) -> Tensor:
    """The layer's output, or, where it has experts that are not for `add_experts`, that of its first half."""
    first, second = parts.first, parts.second
    heads, seen = first.heads, None if mask is None else mask[:, 0]
    read = attend_many(queries, *place, seen, heads.scale, factor=first.factor, sinks=heads.sinks)
    if not isinstance(second, Dense):
        h, _ = added(first, parts.o, read, x)
        return add_experts(h, second) if parts.for_token else h
    assert parts.down is not None
    h, then = added(first, parts.o, read, x, None if second.parallel else second.before)
    if not second.parallel:
        z = then if then is not None else h if second.before is None else normed(h, second.before)
    product = linear(z, second.gate_up.packed, second.gate_up.bias, compute="float")
    y = added(second, parts.down, activated(product, second.gates, second.factor, gated=second.gated), h)[0]
    return with_own_input(parts, y, own)


def why_not_prompts(layer: Any, here: Gpu) -> str | None:
    """Why prompts take transformers' steps in a layer of which one token takes few kernels; None if they take few, too."""
    if is_distributed(layer):
        return "its weights are distributed over processes"
    return why_not_many(halves(layer)[0].heads, all_norms(layer)[0].weight.dtype, here)


_masks: Any = WeakTensorKeyDictionary()  # those that are added to scores: what they show, and the last layer that asked


def _seen(layer: Any, mask: Tensor | None, tokens: int) -> Tensor | str | None:
    """The mask as `attend_many` takes it; or why it takes none like it."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != tokens):
        return "its mask is not one of all heads for each token"
    if not is_eager(layer):
        return mask if mask is None or mask.dtype == torch.bool else "its mask is not of booleans"
    if mask is None:
        return "eager attention without a mask is not causal"
    index, (found, last) = layer.self_attn.layer_idx, _masks.get(mask, (None, -1))
    if found is None or index <= last:  # another call of the model, since when the mask may have changed
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return "to look at the mask waits for the GPU"
        found = visible(mask)
    _masks[mask] = found, index
    return found if found.dtype == torch.bool else "its mask adds other numbers"


def _fits(layer: Any, x: Tensor, past: Cache | None, rotary: tuple[Tensor, Tensor]) -> bool:
    """Whether the call is for many tokens, with nothing else than their results asked for."""
    return (
        x.device.type in decoding_gpu.DEVICES
        and (x.shape[1] > 1 or borrows(layer))
        and plain(x)
        and rotary[0].dim() == 3
        and not getattr(past, "offloading", False)
        and layer.self_attn.is_causal
        and not layer.training
        and not torch.is_grad_enabled()
    )
