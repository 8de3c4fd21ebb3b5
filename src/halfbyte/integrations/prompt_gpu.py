"""Decoder layers that `shorten_` has changed, on a GPU: many tokens of each sequence, as in prompts, in few kernels:

    qkv  = linear(norm(x), q | k | v)                        a kernel of the norm, a product for each weight
    q    = turn(qkv, …)                                      norms of heads, positions, and the new entries of a static cache
    a    = attend_many(q, keys, values, …)
    h    = linear(a, o, residual=x)                          or, where there is a norm after it: add_normed(linear(a, o), x, norm, …)
    y    = linear(f(gate) * up, down, residual=h)            a kernel of the norm, gate | up = linear(norm(h)), a kernel of the gates

With any cache, or none: others than static ones take keys and values by their `update`. Experts take transformers' steps behind the
attention half. All launches of a layer are made by one call, before and after a cache's `update` by one each, once layers alike have
computed as many tokens (`whole`): a prompt is a few hundred kernels, and one by one they would take the host longer than the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import Cache, StaticLayer

from halfbyte.bounded import Bounded
from halfbyte.integrations import decoding_gpu
from halfbyte.integrations.ahead import watched
from halfbyte.integrations.decoding_cpu import all_norms, groups_of, has_own_norms, linears_of, norms_of, parts_of, settings_of, visible
from halfbyte.integrations.families import other
from halfbyte.integrations.unchanged import Unchanged
from halfbyte.machine import Gpu, gpu
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import linear_added, part_of
from halfbyte.ops.cuda import is_replayed, on
from halfbyte.ops.decoder import Attention, Dense, Norm
from halfbyte.ops.functions import linear
from halfbyte.ops.layers import Weight
from halfbyte.ops.library import plain
from halfbyte.ops.norms import add_normed, normed
from halfbyte.ops.prompt import activated, attend_many, turn, why_not_many
from halfbyte.ops.replay import MOST_REPLAYS, whole


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of a layer, as they are now: what its halves compute, the second None where its own steps do, and the linear layers that add.

    alike     equal for layers that launch the same kernels; None where they do something else besides
    tensors   what these kernels read, beside x, positions, mask and cache
    """

    first: Attention
    second: Dense | None
    o: QuantLinear
    down: QuantLinear | None
    alike: Hashable = None
    tensors: tuple[Tensor | None, ...] = ()


_known: WeakKeyDictionary[nn.Module, tuple[_Parts | None, Unchanged]] = WeakKeyDictionary()
_chained = Bounded[Hashable, bool](MOST_REPLAYS)  # whether all products' launches can be made again
_Turns = tuple[Tensor, Tensor] | None  # cosines and sines


def tokens(
    layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Tensor | None:
    """The layer's output for x [B, T, K], T > 1; None if that is not supported. past: the cache of all layers, or none."""
    parts = _parts(layer) if _fits(layer, x, past, rotary, settings) else None
    if parts is None or not parts.first.heads.turns_by(rotary[0].shape[2]):
        return None
    if x.is_cuda and why_not_many(parts.first.heads, x.dtype, gpu(x.get_device())) is not None:
        return None
    seen = _seen(layer, mask, x.shape[1])
    if isinstance(seen, str):
        return None
    index, x = layer.self_attn.layer_idx, x.contiguous()
    turns = None if parts.first.heads.turned == 0 else (_in_rows(rotary[0]), _in_rows(rotary[1]))
    cache: Any = None if past is None or index >= len(past.layers) else past.layers[index]
    if isinstance(cache, StaticLayer) and not cache.is_initialized:
        # A copy from the host would wait for the GPU.
        cache.cumulative_length = torch.zeros_like(cache.cumulative_length, device=x.device)
    if type(cache) is StaticLayer:
        y = _with_static(parts, x, seen, turns, cache)
    else:
        y = _with_any(parts, x, seen, turns, None if past is None else partial(past.update, layer_idx=index))
    if parts.second is not None:
        return y
    found = layer.mlp(norms_of(layer)[2](y))
    of_experts: Tensor = found[0] if isinstance(found, tuple) else found  # gpt-oss's tells its router's weights, too
    return y + of_experts


def _in_rows(table: Tensor) -> Tensor:
    return table if table.stride(-1) == 1 else table.contiguous()


def _with_static(parts: _Parts, x: Tensor, mask: Tensor | None, turns: _Turns, cache: Any) -> Tensor:
    heads = parts.first.heads
    if not cache.is_initialized:
        new = x.new_empty(len(x), heads.key, 0, heads.dim)
        cache.lazy_initialization(new, new)
    place = cache.keys, cache.values, cache.cumulative_length

    def steps(made: list[Tensor]) -> None:
        z, queries = _before(parts.first, x, turns, place, made)
        _after(parts, x, z, queries, place, mask, made)

    y = _chain("layer", parts, steps, x, (mask, *(turns or (None, None)), *place))[-1]
    cache.cumulative_length.add_(x.shape[1])
    return y


def _with_any(parts: _Parts, x: Tensor, mask: Tensor | None, turns: _Turns, update: Callable[..., Any] | None) -> Tensor:
    """With a cache that takes keys and values by itself, or none."""
    first, heads = parts.first, parts.first.heads

    def begin(made: list[Tensor]) -> None:
        keys, values = (x.new_empty(len(x), heads.key, x.shape[1], heads.dim) for _ in range(2))
        made += keys, values
        _before(first, x, turns, (keys, values, None), made)

    keys, values, *rest = _chain("before", parts, begin, x, turns or (None, None))
    z, queries = x if first.before is None else rest[0], rest[-1]
    if update is not None:
        keys, values = update(keys, values)
    seen = None if mask is None else mask[..., : keys.shape[2]]

    def end(made: list[Tensor]) -> None:
        _after(parts, x, z, queries, (keys, values, None), seen, made)

    return _chain("after", parts, end, x, (None if z is x else z, queries, keys, values, seen))[-1]


def _chain(name: str, parts: _Parts, steps: Callable[[list[Tensor]], None], x: Tensor, others: tuple[Tensor | None, ...]) -> list[Tensor]:
    """What steps append to a list, which depend on x and others, where this is possible by one call."""
    operands = x, *others
    if parts.alike is not None and all(t is None or t.data_ptr() % 16 == 0 for t in operands):
        kinds = (None if t is None else (t.shape, t.stride(), t.dtype) for t in operands)
        key = name, parts.alike, x.get_device(), *kinds
        if _is_chained(key, parts, x):
            with on(x):
                return whole(key, steps, (*operands, *parts.tensors))
    made: list[Tensor] = []
    steps(made)
    return made


def _is_chained(key: Hashable, parts: _Parts, x: Tensor) -> bool:
    found = _chained.get(key)
    if found is None and x.is_cuda:
        rows = x.shape[0] * x.shape[1]
        found = all(is_replayed(rows, weight.packed, x.dtype) for weight in _weights(parts.first, parts.second))
        _chained[key] = found
    return bool(found)


def _before(
    half: Attention, x: Tensor, turns: _Turns, place: tuple[Tensor, Tensor, Tensor | None], made: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """What the products read, and queries; keys and values are written to their place. Appended to `made`: what is made."""
    z = x
    if half.before is not None:
        made.append(z := normed(x, half.before))
    products = [linear(z, weight.packed, weight.bias, compute="float") for weight in half.qkv]
    made += products
    queries = turn(torch.cat(products, -1) if len(products) > 1 else products[0], turns, *place, half.heads)
    made.append(queries)
    return z, queries


def _after(
    parts: _Parts,
    x: Tensor,
    z: Tensor,
    queries: Tensor,
    place: tuple[Tensor, Tensor, Tensor | None],
    mask: Tensor | None,
    made: list[Tensor],
) -> None:
    """Appends what is made to `made`, and last the layer's output, or, where the second half is its own, that of the first."""

    def keep(tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor

    def add(half: Attention | Dense, product: QuantLinear, x: Tensor, residual: Tensor, then: Norm | None) -> tuple[Tensor, Tensor | None]:
        """h = residual + norm(product(x)), and then(h) where that takes no further kernel."""
        if half.after is None:
            return keep(linear_added(product, x, residual)), None
        h, z = add_normed(keep(product(x)), residual, half.after, then)
        return keep(h), z if z is None else keep(z)

    first, second = parts.first, parts.second
    heads, seen = first.heads, None if mask is None else mask[:, 0]
    read = keep(attend_many(queries, *place, seen, heads.scale, factor=first.factor, sinks=heads.sinks))
    h, then = add(first, parts.o, read, x, None if second is None or second.parallel else second.before)
    if second is None or parts.down is None:
        return
    if not second.parallel:
        z = then if then is not None else h if second.before is None else keep(normed(h, second.before))
    product = keep(linear(z, second.gate_up.packed, second.gate_up.bias, compute="float"))
    inner = keep(activated(product, second.gates, second.factor, gated=second.gated))
    add(second, parts.down, inner, h, None)


def why_not_prompts(layer: Any, here: Gpu) -> str | None:
    """Why prompts take transformers' steps in a layer of which one token takes few kernels; None if they take few, too."""
    return why_not_many(decoding_gpu.halves(layer)[0].heads, all_norms(layer)[0].weight.dtype, here)


def _parts(layer: Any) -> _Parts | None:
    """None where a layer takes other steps."""
    known = _known.get(layer)
    if known is None or not known[1].is_still():
        if any(watched(part) or "forward" in vars(part) for part in layer.modules() if part is not layer):
            return None
        if not has_own_norms(layer):
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
    dense = second if isinstance(second, Dense) else None
    if dense is not None and decoding_gpu.why_not_dense(first, dense) is not None:
        return None
    linked = _linked(first, dense) if all(part_of(product) is None for product in (*linears[0], linears[1], *linears[2])) else (None, ())
    return _Parts(first, dense, linears[1], linears[2][-1] if dense is not None else None, *linked)


def _linked(first: Attention, second: Dense | None) -> tuple[Hashable, tuple[Tensor | None, ...]]:
    """`alike` and `tensors` of _Parts."""
    heads, weights = first.heads, _weights(first, second)
    of_mlp = [] if second is None else [None if second.parallel else second.before, second.after]  # a tensor stands once
    norms = [first.before, first.after, *(heads.norms or ()), *of_mlp]
    of_norms = [None if norm is None else norm[1:4] for norm in norms]
    tensors = [t for weight in weights for t in (weight.packed.data, weight.bias)]
    tensors += [t for norm in norms for t in ((None, None) if norm is None else (norm.weight, norm.shift))]
    tensors.append(heads.sinks)
    if len(first.qkv) > 1 or heads.rows or any(t is not None and (t.data_ptr() % 16 or not t.is_contiguous()) for t in tensors):
        return None, ()  # what is joined by torch, or lies where kernels leave it to themselves
    numbers = heads._replace(norms=None, sinks=None), first.factor
    of_second = None if second is None else (second.factor, second.gates, second.gated, second.parallel)
    names = [(weight.packed.name, weight.packed.shape) for weight in weights]
    kinds = [None if t is None else (t.shape, t.dtype) for t in tensors]
    return (numbers, of_second, *names, *of_norms, *kinds), tuple(tensors)


def _weights(first: Attention, second: Dense | None) -> list[Weight]:
    return [*first.qkv, first.o, *([] if second is None else [second.gate_up, second.down])]


_masks: Any = WeakTensorKeyDictionary()  # those that are added to scores: what they show, and the last layer that asked


def _seen(layer: Any, mask: Tensor | None, tokens: int) -> Tensor | str | None:
    """The mask as `attend_many` takes it; or why it takes none like it."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != tokens):
        return "its mask is not one of all heads for each token"
    if not decoding_gpu.is_eager(layer):
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


def _fits(layer: Any, x: Tensor, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]) -> bool:
    """Whether the call is for many tokens, with nothing else than their results asked for."""
    return (
        x.device.type in decoding_gpu.DEVICES
        and x.shape[1] > 1
        and plain(x)
        and rotary[0].dim() == 3
        and not settings.get("output_attentions")
        and settings.get("is_causal") in (None, True)
        and settings.get("cache") is None
        and not getattr(past, "offloading", False)
        and layer.self_attn.is_causal
        and not layer.training
        and not torch.is_grad_enabled()
    )
