"""Encoder layers of BERT and its like, as `ops.encoder` computes them on a CPU: their parts in transformers' modules.

    h = norm(x + o(attention(query(x), key(x), value(x))));  y = norm(h + down(gelu(up(h))))        or with the norms before (ViT)

MPNet adds a bias to the scores, the same one in all layers: its layers take it as a tensor. `encoder_stack.py` computes all layers of a
stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from halfbyte.integrations.calls import CACHE, Understood, any_value, unset, why_unknown
from halfbyte.integrations.hooked import watched, why_hooked
from halfbyte.integrations.replaced import name_in_transformers, original, why_not_fused
from halfbyte.nn.fused import GeluLinear
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import part_of
from halfbyte.ops.encoder import EncoderLayer, why_not
from halfbyte.ops.layers import LayerNorm, Weight

_ATTENTION = ("sdpa", "halfbyte")  # others have masks of other kinds


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the layers of a kind have their parts, and in which attribute of `attention` the number of heads."""

    attention: str
    qkv: tuple[str, str, str]  # of attention
    o: str
    up: str
    activation: str
    down: str
    norms: tuple[str, str]
    heads: str = "num_attention_heads"
    before: bool = False  # norms come before the products
    biased: bool = False  # scores get a bias, by torch's operations and no `attn_implementation`


_BERT = Parts(
    attention="attention.self",
    qkv=("query", "key", "value"),
    o="attention.output.dense",
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)
_DISTILBERT = Parts(
    attention="attention",
    qkv=("q_lin", "k_lin", "v_lin"),
    o="attention.out_lin",
    up="ffn.lin1",
    activation="ffn.activation",
    down="ffn.lin2",
    norms=("sa_layer_norm", "output_layer_norm"),
    heads="n_heads",
)
_MPNET = Parts(
    attention="attention.attn",
    qkv=("q", "k", "v"),
    o="attention.attn.o",
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    norms=("attention.LayerNorm", "output.LayerNorm"),
    biased=True,
)
_VIT = Parts(
    attention="attention",
    qkv=("q_proj", "k_proj", "v_proj"),
    o="attention.o_proj",
    up="mlp.fc1",
    activation="mlp.activation_fn",
    down="mlp.fc2",
    norms=("layernorm_before", "layernorm_after"),
    before=True,
)
_WHISPER = Parts(
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    o="self_attn.out_proj",
    up="fc1",
    activation="activation_fn",
    down="fc2",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    heads="num_heads",
    before=True,
)
# Layers of transformers whose forward is this file's formula, by their names: nothing is imported for them.
LAYERS = {
    "bert.modeling_bert.BertLayer": _BERT,
    "camembert.modeling_camembert.CamembertLayer": _BERT,
    "electra.modeling_electra.ElectraLayer": _BERT,
    "roberta.modeling_roberta.RobertaLayer": _BERT,
    "xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer": _BERT,
    "distilbert.modeling_distilbert.TransformerBlock": _DISTILBERT,
    "deit.modeling_deit.DeiTLayer": _VIT,
    "mpnet.modeling_mpnet.MPNetLayer": _MPNET,
    "vit.modeling_vit.ViTLayer": _VIT,
    "whisper.modeling_whisper.WhisperEncoderLayer": _WHISPER,
}

LAYER_ARGUMENTS: Understood = {
    **dict.fromkeys(("hidden_states", "attention_mask", "position_bias"), any_value),
    **dict.fromkeys(("position_ids", "use_cache", "output_hidden_states", "return_dict"), any_value),  # without effect in these layers
    **dict.fromkeys(("encoder_hidden_states", "encoder_attention_mask", CACHE, "output_attentions"), unset),
}


def parts_of(layer: nn.Module) -> Parts | None:
    """Where an encoder layer has its parts; None for any other module."""
    return LAYERS.get(name_in_transformers(layer))


def why_not_whole(layer: nn.Module) -> str | None:
    """Why a layer that has `parts_of` does not take whole sequences in one call; None where it does."""
    reason = _why_not_parts(layer)
    return why_not(_weights(layer), _heads(layer)) if reason is None else reason


def compiled_layer(layer: Any) -> EncoderLayer | str:
    """Compile a layer that has `parts_of`, or say why transformers computes it."""
    if (reason := why_not_whole(layer)) is not None:
        return reason
    if watched(layer) or any("forward" in vars(part) for part in layer.modules()):
        return "it has a hook, or a part with another forward"
    if layer.training:
        return "it is in training"
    parts = _parts(layer)
    norms = [cast(Any, layer.get_submodule(name)) for name in parts.norms]
    first, second = (LayerNorm(norm.weight, norm.bias, norm.eps) for norm in norms)
    attention: Any = layer.get_submodule(parts.attention)
    scale = attention.attention_head_size**-0.5 if parts.biased else attention.scaling
    return EncoderLayer(_weights(layer), (first, second), _heads(layer), scale, before=parts.before)


def _parts(layer: nn.Module) -> Parts:
    parts = parts_of(layer)
    assert parts is not None
    return parts


def _linears(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    parts = _parts(layer)
    for name in (*(f"{parts.attention}.{name}" for name in parts.qkv), parts.o, parts.up, parts.down):
        yield name, layer.get_submodule(name)


def _weights(layer: nn.Module) -> tuple[Weight, Weight, Weight, Weight]:
    query, _, _, o, up, down = (module for _, module in _linears(layer))
    parts: list[tuple[Any, Any]] = [query.together, *((linear.packed, linear.bias) for linear in (o, up, down))]
    qkv, o, up, down = (Weight(*part, x.compute, x.activation) for part, x in zip(parts, (query, o, up, down), strict=True))
    return qkv, o, up, down


def _heads(layer: nn.Module) -> int:
    parts = _parts(layer)
    return int(getattr(layer.get_submodule(parts.attention), parts.heads))


def _why_not_parts(layer: nn.Module) -> str | None:
    """Why the parts of a layer are not those of this file's formula; None where they are."""
    parts = _parts(layer)
    if (reason := why_unknown(original(layer), LAYER_ARGUMENTS)) is not None:
        return reason
    try:
        linears = dict(_linears(layer))
        attention, activation, *norms = (layer.get_submodule(name) for name in (parts.attention, parts.activation, *parts.norms))
    except AttributeError as e:  # another version of transformers
        return f"it has other parts: {e}"
    for name, linear in linears.items():
        if not isinstance(linear, QuantLinear):
            return f"its {name} is a {type(linear).__name__}, which is not quantized"
        if part_of(linear) is not None:
            return "its weights are spread over processes"
    if (reason := why_not_fused("+".join(parts.qkv), list(linears.values())[:3])) is not None:
        return reason
    if type(linears[parts.up]) is not GeluLinear or type(activation) is not nn.Identity:
        return f"its {parts.up} has no GELU, which fuse_ puts there where it follows"
    for name in (parts.o, parts.down):
        if type(linears[name]) is not QuantLinear:
            return f"its {name} is a {type(linears[name]).__name__}"
    if not all(type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1 and norm.bias is not None for norm in norms):
        return f"its {' or '.join(parts.norms)} is not a LayerNorm with weight and bias"
    if getattr(attention, "is_causal", False) or getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
        return "it is a decoder"
    if not parts.biased and (implementation := cast(Any, attention).config._attn_implementation) not in _ATTENTION:
        return f'its attn_implementation is "{implementation}", not {" or ".join(map(repr, _ATTENTION))}'
    return why_hooked(layer)
