"""Decoder layers that `shorten_` has changed, on a CPU: the tokens of a prompt, or new ones, take one call of `ops.decoder.DecoderLayer`.

A growing cache is kept in larger buffers (`growing.py`). Where layers are computed ahead (`ahead.py`), the tokens of each are added to its
cache when it is called.

Under torch.compile a layer with a static cache is the custom op `halfbyte::decoder_layer`, once the layer has read a prompt without. The
op finds its layer by an id and the whole cache by the keys, so that layers are computed ahead there, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from halfbyte.decoder.family import ACTIVATIONS, Family
from halfbyte.integrations import growing, mixtures
from halfbyte.integrations.ahead import Ahead, Same, following, given, watched
from halfbyte.integrations.calls import KV_CACHE
from halfbyte.integrations.families import (
    added_by,
    borrows,
    known,
    lender,
    lends,
    made_of,
    mlp_of,
    other,
    per_layer_of,
    shared_as,
    turned,
)
from halfbyte.integrations.mixtures import half_of, routed_of, weight_of, why_not_routed
from halfbyte.integrations.shortened import products_of
from halfbyte.integrations.unchanged import Unchanged
from halfbyte.layouts.records import from_records
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import part_of
from halfbyte.ops.decoder import MOST_SEQUENCES, Attention, DecoderLayer, Dense, FeedForward, Heads, Norm, PerLayer, run_layers, why_not
from halfbyte.ops.library import OPS, in_mode

_NORMS = ("torch.", "transformers.")  # modules of the classes of norms that families.py knows
_PAIRS = {"": "", "half": "once", "repeated": "twice"}  # `Heads.pairs` by `Family.rope_interleaved`
_FEW_ROWS = 64  # of more, layers are computed one by one: what they give takes memory
_CACHES = (*growing.LAYERS, StaticLayer)


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """The place of new tokens in the layer of a cache, or where there is none (None): `keys` and `values` have space for them. The cache
    is not updated before `enter`.

    length  tokens before them in `keys` and `values`; with a window, those that the first of them sees
    known   of a growing layer, the stamp of its buffers and all its tokens
    """

    keys: Tensor
    values: Tensor
    length: int
    known: tuple[int, int] | None = None

    @classmethod
    def into(cls, cache: Any, x: Tensor, heads: int, dim: int) -> _Entry | None:
        """Of the tokens x [B, t, K]. None if the cache has no space for so many."""
        tokens = x.shape[1]
        if cache is None or not cache.is_initialized:
            keys, values = (x.new_empty(x.shape[0], heads, tokens if cache is None else 0, dim) for _ in range(2))
            if cache is None:
                return cls(keys, values, 0)
            cache.update(keys, values)
        if isinstance(cache, StaticLayer):
            length, keys, values = int(cache.cumulative_length), cast(Tensor, cache.keys), cast(Tensor, cache.values)
            return cls(keys, values, length) if length + tokens <= keys.shape[2] else None
        grown = growing.grow(cache, tokens)
        keys, values = grown.buffers
        begin = growing.begin(grown)
        if begin > 0:
            keys, values = (buffer.narrow(2, begin, buffer.shape[2] - begin) for buffer in (keys, values))
        return cls(keys, values, grown.length - grown.first - begin, (grown.stamp, grown.length))

    def is_into(self, cache: Any) -> bool:
        """Whether the cache has not changed."""
        if cache is None:
            return True
        if isinstance(cache, StaticLayer):
            return cache.keys is self.keys and cache.values is self.values and int(cache.cumulative_length) == self.length
        return isinstance(cache, growing.Growing) and (cache.stamp, cache.length) == self.known

    @classmethod
    def lent(cls, layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, settings: dict[str, Any]) -> _Entry | None:
        """Where keys and values of an earlier layer lie, those of the tokens x too, which are the last ones; None if that is not known."""
        attention, index, t = layer.self_attn, lender(layer), x.shape[1]
        shared = (settings.get("shared_kv_states") or {}).get(shared_as(layer))
        if shared is None or index is None or (past is not None and index >= len(past.layers)):
            return None
        keys, values = shared
        size, cache = keys.shape[2], None if past is None else past.layers[index]
        if isinstance(cache, StaticLayer):
            known = type(cache) is StaticLayer and cache.keys is keys
        else:
            known = cache is None or type(cache) in growing.LAYERS
        if not known or keys.dtype != x.dtype or not keys.is_cpu or keys.stride(3) != 1 or values.stride(3) != 1:
            return None
        window = attention.sliding_window
        if (mask is None and window is not None and size > window) or (mask is not None and mask.shape[3] != size):
            return None
        return cls(keys, values, (size if cache is None or not isinstance(cache, StaticLayer) else int(cache.cumulative_length)) - t)

    def shown(self, cache: Any, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, T, D] as `update` of a cache gives them, after the tokens x have entered."""
        if isinstance(cache, StaticLayer):
            return self.keys, self.values
        both = self.keys[:, :, : self.length + x.shape[1]], self.values[:, :, : self.length + x.shape[1]]
        if type(cache) not in growing.IN_8_BITS:
            return both
        keys, values = (from_records(part, dim, x.dtype) for part in both)
        return keys, values

    def enter(self, cache: Any, tokens: int) -> None:
        if isinstance(cache, StaticLayer):
            cache.cumulative_length.add_(tokens)
        elif cache is not None:
            growing.entered(cache, tokens)


def groups_of(layer: Any) -> tuple[tuple[str, list[Any]], tuple[str, list[Any]]]:
    """The linear layers of queries, keys and values, and of gates, each with their names joined by +; no gates where there are experts."""
    family, attention, mlp = known(layer), layer.self_attn, mlp_of(layer)
    of_mlp = family.gate_up if routed_of(layer) is None else ()
    of_qkv = family.qkv[: len(made_of(layer))]
    qkv, gates = ([getattr(part, name) for name in names] for part, names in ((attention, of_qkv), (mlp, of_mlp)))
    return ("+".join(of_qkv), qkv), ("+".join(of_mlp), gates)


def linears_of(layer: Any) -> tuple[tuple[QuantLinear, ...], QuantLinear, tuple[QuantLinear, ...]] | None:
    """One layer for each product: those of queries, keys and values, o, and gates and down, or none where there are experts; None where one
    was replaced by what is computed otherwise."""
    o, groups, routed = getattr(layer.self_attn, known(layer).o_proj), groups_of(layer), routed_of(layer)
    qkv, of_own_input = products_of(*groups[0]), (per_layer_of(layer) or ())[:2]
    if qkv is None or any(type(linear) is not QuantLinear for linear in (o, *of_own_input)):
        return None
    if routed is not None:
        return None if why_not_routed(layer, routed) is not None else (tuple(qkv.values()), o, ())
    gates, down = products_of(*groups[1]), getattr(mlp_of(layer), known(layer).down_proj)
    if gates is None or len(gates) > 1 or type(down) is not QuantLinear:
        return None
    return tuple(qkv.values()), o, (*gates.values(), down)


def halves_of(layer: Any) -> tuple[Attention, FeedForward]:
    """Of a layer that has `linears_of`."""
    family, attention, linears, routed = known(layer), layer.self_attn, linears_of(layer), routed_of(layer)
    assert linears is not None
    first, second, third, fourth = (None if norm is None else norm_of(norm, family) for norm in norms_of(layer))
    qkv, o = tuple(map(weight_of, linears[0])), weight_of(linears[1])
    dim = attention.head_dim
    query = o.packed.shape[1] // dim
    of_row = made_of(layer)
    if of_row == "q":
        key = query // attention.num_key_value_groups
    else:
        key = (sum(weight.packed.shape[0] for weight in qkv) // dim - query) // (len(of_row) - 1)
    norms: Any = tuple(norm_of(norm, family) for norm in _of_heads(layer))
    norms = (*norms, *norms) if len(norms) == 1 else norms  # that of queries alone
    cap = None if family.softcap is None else getattr(attention, family.softcap)
    sinks = None if family.sinks is None else getattr(attention, family.sinks)
    of_heads = norms or None, family.qk_norm_whole, turned(layer), cap, sinks, _PAIRS[family.rope_interleaved], family.norm_after_rope
    heads = Heads(query, key, dim, attention.scaling, *of_heads, of_row, _of_values(layer) is not None)
    factor = added_by(layer)
    half = Attention(qkv, o, first, heads, second, factor)
    if routed is not None:
        assert third is not None
        return half, half_of(layer, routed, third)
    gate_up, down = map(weight_of, linears[2])
    activation = ACTIVATIONS[getattr(attention.config, family.activation)]
    scale = _scale_of(layer) if per_layer_of(layer) is None else None
    return half, Dense(gate_up, down, third, fourth, factor, activation, family.gated, family.parallel_residual, scale)


def third_of(layer: Any) -> PerLayer | None:
    """What a layer with an input of its own does with it, which has `linears_of`."""
    found, family = per_layer_of(layer), known(layer)
    if found is None:
        return None
    gate, projection, norm = found
    activation = ACTIVATIONS[getattr(layer.self_attn.config, family.activation)]
    return PerLayer(weight_of(gate), weight_of(projection), norm_of(norm, family), activation, _scale_of(layer))


def _scale_of(layer: Any) -> Tensor | None:
    name = known(layer).layer_scalar
    return None if name is None else getattr(layer, name)


def norm_of(norm: Any, family: Family) -> Norm:
    shift = getattr(norm, "bias", None) if family.layer_norm else None
    return Norm(norm.weight, getattr(norm, eps_of(norm)), family.unit_offset, family.layer_norm, shift)


def eps_of(norm: Any) -> str:
    """The name of its attribute."""
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"


def why_not_one_call(layer: Any) -> str | None:
    """Why tokens are computed by transformers' operations on a CPU; None if by one call."""
    _, o, second = linears_of(layer) or ((), getattr(layer.self_attn, known(layer).o_proj), ())
    if any(part_of(linear) is not None for linear in (o, *second, *(per_layer_of(layer) or ())[:2])):
        return "its weights are distributed over processes"
    return why_not_shared(layer) or why_not(*halves_of(layer), third_of(layer))


def why_not_shared(layer: Any) -> str | None:
    """Why keys and values of a layer, which others may have in common with it, are not those of `ops.decoder`; None if they are."""
    values = _of_values(layer)
    if values is not None and getattr(values, eps_of(values)) != getattr(layer.self_attn.q_norm, eps_of(values)):
        return "the norm of its values has another eps than those of its heads"
    if borrows(layer) and lender(layer) is None:
        return "no layer has the keys and values that it reads"
    return None if borrows(layer) == (made_of(layer) == "q") else "it has keys of its own, and reads those of another layer"


def tokens(
    layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Tensor | None:
    """The layer's output for x [B, t, K], by one call, or, of many tokens of a layer with experts, by one for the attention half; None if
    that is not supported. past: the cache of all layers, or none."""
    index = layer.self_attn.layer_idx
    if torch.is_grad_enabled() or in_mode() or (past is not None and index >= len(past.layers) and not borrows(layer)):
        return None
    if _is_alone(layer):
        return _alone(layer, x, mask, past, rotary, settings)
    cache: Any = None if past is None else past.layers[index]
    if torch.compiler.is_compiling():
        return _op(layer, x, mask, cache, rotary)
    found = _given(layer, x, mask, past, rotary, settings)
    y = _by_halves(layer, x, mask, cache, rotary, settings) if found is None else found.y
    if found is not None:
        found.entry.enter(cache, x.shape[1])
    if y is not None and isinstance(cache, StaticLayer):
        _remember(layer, x, cache, past)
    return y


def _is_alone(layer: Any) -> bool:
    """Whether it depends on more than other layers do, or they on more of it."""
    return per_layer_of(layer) is not None or lends(layer) or borrows(layer)


def _alone(
    layer: Any, x: Tensor, mask: Tensor | None, past: Cache | None, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Tensor | None:
    """Of a layer with an input of its own, or with keys and values that others have, too: by a call of its own."""
    found, beside, reads = None if torch.compiler.is_compiling() else computed(layer), settings.get("per_layer_input"), borrows(layer)
    if found is None or (found.beside is None) != (beside is None) or (lends(layer) and settings.get("shared_kv_states") is None):
        return None
    seen, cache = visible(mask), None if past is None or reads else past.layers[layer.self_attn.layer_idx]
    entry = _entry(layer, found, x, (mask, seen), cache, rotary, settings, past)
    if entry is None:
        return None
    (y,) = run_layers((found,), x, rotary, [(entry.keys, entry.values, entry.length)], seen, beside)
    if not reads:
        entry.enter(cache, x.shape[1])
    if lends(layer):
        settings["shared_kv_states"][shared_as(layer)] = entry.shown(cache, x, found.heads.dim)
    return y


def _by_halves(
    layer: Any, x: Tensor, mask: Tensor | None, cache: Any, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Tensor | None:
    """More rows than are for one call: attention by one, the mlp by transformers' steps. None where a layer takes any number of rows."""
    seen, made = visible(mask), computed(layer)
    if made is None or made.most_rows is None or x.shape[0] * x.shape[1] <= made.most_rows:
        return None
    entry = _entry(layer, made, x, (mask, seen), cache, rotary, settings)
    if entry is None:
        return None
    held = _attending.get(layer)
    if held is None or held[0] is not made:
        held = _attending[layer] = made, DecoderLayer(halves_of(layer)[0], None)
    (h,) = run_layers((held[1],), x, rotary, [(entry.keys, entry.values, entry.length)], seen)
    entry.enter(cache, x.shape[1])
    found = mlp_of(layer)(norms_of(layer)[2](h))
    y: Tensor = found[0] if isinstance(found, tuple) else found  # gpt-oss's tells its router's weights, too
    factor = added_by(layer)
    return h + (y if factor == 1 else y * factor)


def _given(layer: Any, x: Tensor, mask: Tensor | None, past: Any, rotary: tuple[Tensor, Tensor], settings: dict[str, Any]) -> Ahead | None:
    caches = None if past is None else past.layers
    cache = None if caches is None else caches[layer.self_attn.layer_idx]
    same: Same = (mask, *rotary)
    return given(layer, x, same, lambda: _ahead(layer, x, caches, same, settings), lambda entry: entry.is_into(cache))


def _ahead(layer: Any, x: Tensor, caches: list[Any] | None, same: Same, settings: dict[str, Any]) -> list[Ahead]:
    """The results of this layer and, for few tokens, of those that followed it before. Empty if the layer is not supported."""
    mask, rotary = same[0], cast(tuple[Tensor, Tensor], same[1:])
    seen = visible(mask)
    layers, found, entries = list[Any](), list[DecoderLayer](), list[_Entry]()
    one: Any
    for one in following(layer) if x.shape[0] * x.shape[1] <= _FEW_ROWS else (layer,):
        attention = one.self_attn
        if (caches is not None and attention.layer_idx >= len(caches)) or _is_alone(one):
            break
        cache, made = None if caches is None else caches[attention.layer_idx], computed(one)
        if made is None or _sort(one) != _sort(layer) or (made.most_rows is not None and x.shape[0] * x.shape[1] > made.most_rows):
            break
        entry = _entry(one, made, x, (mask, seen), cache, rotary, settings)
        if entry is None:
            break
        layers.append(one)
        found.append(made)
        entries.append(entry)
    if not layers:
        return []
    outputs = run_layers(found, x, rotary, [(e.keys, e.values, e.length) for e in entries], seen)
    parts = zip(layers, (x, *outputs[:-1]), outputs, entries, strict=True)
    return [Ahead.of(one, before, y, same, entry) for one, before, y, entry in parts]


def _entry(
    layer: Any,
    made: DecoderLayer,
    x: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    cache: Any,
    rotary: tuple[Tensor, Tensor],
    settings: dict[str, Any],
    past: Cache | None = None,
) -> _Entry | None:
    """Where tokens enter a layer's cache, or where another layer's keys and values lie; None where the call is none for it. masks: as
    given, and what they show; past: the cache of all layers."""
    mask, seen = masks
    if not _fits(layer, x, cache, rotary) or not _is_mask(layer, mask, seen) or not made.turns_by(rotary[0].shape[2]):
        return None
    if cache is not None and not _sees(cache, x, seen):
        return None
    if made.heads.made == "q":
        entry = _Entry.lent(layer, x, mask, past, settings)
    else:
        entry = _Entry.into(cache, x, made.heads.key, made.heads.dim)
    return None if entry is None or _sees_later(seen, x.shape[1], entry.length) else entry


def _sort(layer: Any) -> Any:
    """What decides on a layer's masks and positions: those of another sort are not given to it."""
    kinds = getattr(layer.self_attn.config, "layer_types", None)
    return kinds[layer.self_attn.layer_idx] if kinds else None


def visible(mask: Tensor | None) -> Tensor | None:
    """The bool mask that does what one does which is added to scores, if it has nothing but 0 and the least number or -inf; or as it is."""
    if mask is None or not mask.is_floating_point():
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else mask


def is_eager(layer: Any) -> bool:
    """Whether eager attention alone computes its formula: caps of scores, and sinks."""
    family = known(layer)
    return family.sinks is not None or (family.softcap is not None and getattr(layer.self_attn, family.softcap) is not None)


def _is_mask(layer: Any, mask: Tensor | None, seen: Tensor | None) -> bool:
    """Whether `mask`, of which `seen` was made, is one for the layer's formula. Eager attention adds its mask, without which it is not
    causal."""
    eager = layer.self_attn.config._attn_implementation == "eager"
    if is_eager(layer) > eager or (eager and mask is None):
        return False
    return seen is None or (seen.dtype == torch.bool and seen.dim() == 4 and seen.shape[1] == 1 and (eager or mask is seen))


def _sees_later(mask: Tensor | None, tokens: int, length: int) -> bool:
    """Whether a mask shows tokens others behind them, as those of images see each other (Gemma 3), which one call does not do."""
    return mask is not None and tokens > 1 and bool(mask.expand(-1, -1, tokens, -1).triu(length + 1).any())


def _fits(layer: Any, x: Tensor, cache: Any, rotary: tuple[Tensor, Tensor]) -> bool:
    return (
        0 < x.shape[0] <= MOST_SEQUENCES
        and x.shape[1] > 0
        and (cache is None or (type(cache) in _CACHES and (not cache.is_initialized or _is_of(cache, x))))
        and rotary[0].dim() == 3
        and layer.self_attn.is_causal
        and not layer.training
    )


def _is_of(cache: Any, x: Tensor) -> bool:
    """Whether the tokens of x may enter a layer of a cache."""
    keys, values = cache.buffers if isinstance(cache, growing.Growing) else (cache.keys, cache.values)
    return (
        keys.dim() == 4
        and keys.shape == values.shape
        and keys.shape[0] == x.shape[0]
        and keys.dtype == (torch.int8 if type(cache) in growing.IN_8_BITS else x.dtype)
        and keys.is_cpu
        and keys.stride(3) == values.stride(3) == 1
        and (not isinstance(cache, DynamicLayer) or growing.is_whole(cache))
    )


def _sees(cache: Any, x: Tensor, mask: Tensor | None) -> bool:
    """Whether what tokens may see of a layer of a cache follows from the mask and from what is in it."""
    window = growing.window_of(cache)
    if window is None or window < 2:
        return window is None
    tokens, before = x.shape[1], min(cache.get_seq_length(), window - 1)
    return tokens == 1 or before + tokens <= window if mask is None else mask.shape[3] == before + tokens


_made: WeakKeyDictionary[nn.Module, tuple[DecoderLayer, Unchanged]] = WeakKeyDictionary()
_attending: WeakKeyDictionary[nn.Module, tuple[DecoderLayer, DecoderLayer]] = WeakKeyDictionary()  # what is whole, and attention alone


def parts_of(layer: Any) -> tuple[nn.Module, ...]:
    """Those whose weights are read."""
    linears, routed = linears_of(layer), routed_of(layer)
    products = () if linears is None else (*linears[0], linears[1], *linears[2])
    experts = () if routed is None else mixtures.parts_of(layer, routed)
    sinks = () if known(layer).sinks is None else (layer.self_attn,)
    own = () if known(layer).layer_scalar is None else (layer,)
    return *products, *(per_layer_of(layer) or ())[:2], *experts, *sinks, *own, *all_norms(layer)


def settings_of(layer: Any) -> list[tuple[Any, str]]:
    """Attributes that what it computes depends on, beside weights, and the objects that have them."""
    family, attention, routed = known(layer), layer.self_attn, routed_of(layer)
    norms = [(norm, eps_of(norm)) for norm in all_norms(layer)]
    of_experts = [] if routed is None else mixtures.settings_of(layer, routed)
    of_attention = [name for name in ("is_causal", "scaling", "layer_idx", family.softcap) if name is not None]
    of_attention += () if family.rope_layers is None else family.rope_layers.attributes
    of_attention += () if family.kv_sharing is None else (family.kv_sharing.reuses, family.kv_sharing.provides, family.kv_sharing.kind)
    of_layer = [] if family.residual_multiplier is None else [(layer, family.residual_multiplier)]
    of_config = [(attention.config, name) for name in family.unsupported]
    return [*of_experts, *norms, *((attention, name) for name in of_attention), *of_layer, *of_config]


def computed(layer: Any) -> DecoderLayer | None:
    """The layer's weights in one, as they are now; None where a part was replaced that it cannot do without, or is watched."""
    made = _made.get(layer)
    if made is None or not made[1].is_still():
        inner = [part for part in layer.modules() if part is not layer]
        if any(watched(part) or "forward" in vars(part) for part in inner):
            return None
        if linears_of(layer) is None or not has_own_norms(layer) or why_not_one_call(layer) is not None or other(layer) is not None:
            return None
        whole = DecoderLayer(*halves_of(layer), third_of(layer))
        made = _made[layer] = whole, Unchanged(layer, parts_of(layer), settings_of(layer))
    return made[0]


def norms_of(layer: Any) -> tuple[Any, ...]:
    """Before and after attention, and before and after the mlp; None where there is none."""
    return tuple(None if name is None else getattr(layer, name) for name in known(layer).norms)


def all_norms(layer: Any) -> list[Any]:
    """All that there are."""
    own = (per_layer_of(layer) or ())[2:]
    return [norm for norm in (*norms_of(layer), *own, *_of_heads(layer), _of_values(layer)) if norm is not None]


def has_own_norms(layer: Any) -> bool:
    """Whether no norm was replaced by what computes something else, as adapters do."""
    return all(type(norm).__module__.startswith(_NORMS) for norm in all_norms(layer))


def _of_heads(layer: Any) -> tuple[Any, ...]:
    """The norms of queries and keys, if it has any, which some configs of a family leave out."""
    attention = layer.self_attn
    return tuple(getattr(attention, name) for name in known(layer).qk_norm or () if hasattr(attention, name))


def _of_values(layer: Any) -> Any:
    """The norm of values, if it has one and makes values."""
    name = known(layer).v_norm
    return None if name is None else getattr(layer.self_attn, name, None)


# Under torch.compile

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "decoder_layer(Tensor x, Tensor? mask, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor length, int layer) -> Tensor",
    tags=(torch.Tag.flexible_layout,),  # without it Inductor computes the mask and the positions for each layer anew
)
_KNOWN = "_halfbyte_id"  # of a layer, its id: a copy has another one
_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_caches: Any = WeakTensorKeyDictionary()  # of their layers' keys, weakly


def _remember(layer: nn.Module, x: Tensor, cache: StaticLayer, past: Cache | None) -> None:
    if getattr(layer, _KNOWN, None) != id(layer):
        setattr(layer, _KNOWN, id(layer))
        _layers[id(layer)] = layer
    if x.shape[1] > 1:
        _caches[cache.keys] = ref(past)


def _op(layer: Any, x: Tensor, mask: Any, cache: Any, rotary: tuple[Tensor, Tensor]) -> Tensor | None:
    if getattr(layer, _KNOWN, None) != id(layer) or type(cache) is not StaticLayer or not cache.is_initialized:
        return None
    if torch.compiler.is_exporting() or not (mask is None or isinstance(mask, Tensor)):
        return None
    y: Tensor = OPS.decoder_layer.default(x, mask, *rotary, cache.keys, cache.values, cache.cumulative_length, id(layer))
    # Not by the op: Inductor makes masks from the first layer's length when it likes, unless it knows of a change.
    cache.cumulative_length.add_(x.shape[1])
    return y


def _run(x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor, number: int) -> Tensor:
    layer: Any = _layers[number]
    index, known = layer.self_attn.layer_idx, _caches.get(keys)
    past = None if known is None else known()
    if past is None or past.layers[index].keys is not keys:  # a copied or reordered cache
        past = _cache_of(keys, values, length, index)
    found = _given(layer, x, mask, past, (cos, sin), {})
    if found is not None:
        return found.y
    y: Tensor = layer.forward(x, attention_mask=mask, position_embeddings=(cos, sin), **{KV_CACHE: past})
    length.sub_(x.shape[1])  # who calls the op adds them
    return y.contiguous()


def _cache_of(keys: Tensor, values: Tensor, length: Tensor, index: int) -> Cache:
    """A cache with these tensors in layer `index`, the last one."""
    layer: Any = StaticLayer(keys.shape[2])
    layer.keys, layer.values, layer.cumulative_length, layer.is_initialized = keys, values, length, True
    layer.dtype, layer.device = keys.dtype, keys.device
    return Cache(layers=[layer] * (index + 1))


_library.impl("decoder_layer", _run, "CPU")
torch.library.register_fake("halfbyte::decoder_layer", lambda x, *_: x.new_empty(x.shape), lib=_library)
