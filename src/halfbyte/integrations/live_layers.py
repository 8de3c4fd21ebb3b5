"""What live decoder layers of transformers compute, as `ops.decoder` has it: their linear layers, norms and settings, found by the table
of families; and why a layer is not one that `ops.decoder` computes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfbyte.decoder.family import ACTIVATIONS, Family
from halfbyte.integrations.calls import CACHE, Understood, any_value, is_true, unset, why_unknown
from halfbyte.integrations.families import NAMES, added_by, borrows, family_of, known, lender, made_of, mlp_of, other, per_layer_of, turned
from halfbyte.integrations.hooked import why_hooked
from halfbyte.integrations.mixtures import half_of, routed_of, weight_of, why_not_routed
from halfbyte.integrations.replaced import original, products_of, why_not_fused
from halfbyte.kernels.layer_kinds import RopePairs
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import part_of
from halfbyte.ops.decoder import Attention, Dense, FeedForward, Heads, Norm, PerLayer, why_not

_NORMS = ("torch.", "transformers.")  # modules of the classes of norms that families.py knows
_PAIRS: dict[str, RopePairs] = {"": "", "half": "once", "repeated": "twice"}  # `Heads.pairs` by `Family.rope_interleaved`

# Of a decoder layer's call. Some families name few of them as parameters; all get what the model was called with.
LAYER_ARGUMENTS: Understood = {
    **dict.fromkeys(("hidden_states", "attention_mask", "position_ids", CACHE, "use_cache", "position_embeddings"), any_value),
    **dict.fromkeys(("per_layer_input", "shared_kv_states", "return_shared_kv_states"), any_value),  # Gemma 4
    **dict.fromkeys(("cache_position", "token_type_ids", "mm_token_type_ids"), any_value),  # the mask tells what they do
    **dict.fromkeys(("output_hidden_states", "num_items_in_batch", "return_dict"), any_value),  # concern the model around the layers
    **dict.fromkeys(("output_attentions", "output_router_logits"), unset),
    "is_causal": is_true,
}


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


def is_eager(layer: Any) -> bool:
    """Whether eager attention alone computes its formula: caps of scores, and sinks."""
    family = known(layer)
    return family.sinks is not None or (family.softcap is not None and getattr(layer.self_attn, family.softcap) is not None)


def why_not_known(layer: Any) -> str | None:
    """Why a layer is not computed as its family says, on any device, or None."""
    family = family_of(layer)
    if family is None:
        return f"a {original(layer).__name__} is none of {', '.join(NAMES)}"
    if (reason := why_unknown(original(layer), LAYER_ARGUMENTS)) is not None:
        return reason
    if not hasattr(layer, "self_attn") or layer.self_attn is None:
        return "it has no self_attn"
    attention, mlp, routed = layer.self_attn, mlp_of(layer), routed_of(layer)
    if (name := other(layer)) is not None:
        return f"its config has {name}"
    if routed is None and (missing := [name for name in (*family.gate_up, family.down_proj) if not hasattr(mlp, name)]):
        return f"its {family.mlp} has no {missing[0]}"
    groups = {name: parts for name, parts in groups_of(layer) if parts}
    alone = {family.o_proj: getattr(attention, family.o_proj)}
    alone |= {family.down_proj: getattr(mlp, family.down_proj)} if routed is None else {}
    if (own := per_layer_of(layer)) is not None and family.per_layer_input is not None:
        alone |= dict(zip(family.per_layer_input[:2], own[:2], strict=True))
    linears = alone | {name: linear for group, parts in groups.items() for name, linear in zip(group.split("+"), parts, strict=True)}
    for name, linear in linears.items():
        if not isinstance(linear, QuantLinear):
            return f"its {name} is a {type(linear).__name__}, which is not quantized"
    for name, parts in groups.items():
        products = products_of(name, parts)
        if products is not None and (len(products) == 1 or family.qkv[0] in name.split("+")):
            continue  # one step each
        if (reason := why_not_fused(name, parts)) is not None:
            return reason
    for name, linear in alone.items():
        if type(linear) is not QuantLinear:
            return f"its {name} is a {type(linear).__name__}"
    activation = getattr(attention.config, family.activation)
    taken = [*ACTIVATIONS] if routed is None else ["silu", "swish"]
    if activation not in taken:
        return f"its activation is {activation}, not {' or '.join(taken) if len(taken) > 2 else 'silu'}"
    if routed is not None and (reason := why_not_routed(layer, routed)) is not None:
        return reason
    if not has_own_norms(layer):
        return "one of its norms was replaced"
    return why_hooked(layer)


def why_not_compiled(layer: Any) -> str | None:
    """Why a layer is not compiled on a CPU, or None."""
    return why_not_known(layer) or why_not_one_call(layer)
