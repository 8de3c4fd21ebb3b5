"""Live encoder layers of transformers: the specification of one, found by the table of encoder families, or the
reason why it is none; and its lowering for a CPU (`ops.transformer.encoder`).

`encoder_stack.py` computes all layers of a stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from halfbyte.decoder.families.encoders import ENCODERS, EncoderFamily
from halfbyte.decoder.spec import LayerSpec
from halfbyte.errors import UnsupportedError
from halfbyte.integrations.transformers.decoder.live_layer import weight_of
from halfbyte.integrations.transformers.optimize.calls import CACHE, Understood, any_value, unset, why_unknown
from halfbyte.integrations.transformers.optimize.hooked import watched, why_hooked
from halfbyte.integrations.transformers.optimize.replaced import name_in_transformers, original, why_not_fused
from halfbyte.nn.fused import GeluLinear
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.parallel.parallelize import part_of
from halfbyte.ops.transformer.encoder import EncoderLayer, why_not
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_ATTENTION = ("sdpa", "halfbyte")  # others have masks of other kinds

LAYER_ARGUMENTS: Understood = {
    **dict.fromkeys(("hidden_states", "attention_mask", "position_bias"), any_value),
    **dict.fromkeys(("position_ids", "use_cache", "output_hidden_states", "return_dict"), any_value),  # without effect in these layers
    **dict.fromkeys(("encoder_hidden_states", "encoder_attention_mask", CACHE, "output_attentions"), unset),
}


def family_of(layer: nn.Module) -> EncoderFamily | None:
    """Return the family of an encoder layer; None for any other module."""
    return ENCODERS.get(name_in_transformers(layer))


def layer_spec(layer: nn.Module) -> LayerSpec | str:
    """Build the specification of a layer, or say why it is not computed as its family says."""
    family = family_of(layer)
    if family is None:
        return f"a {type(layer).__name__} is none of {', '.join(sorted({name.rpartition('.')[2] for name in ENCODERS}))}"
    if (reason := why_unknown(original(layer), LAYER_ARGUMENTS)) is not None:
        return reason
    try:
        return _built(layer, family)
    except UnsupportedError as e:
        return str(e)
    except AttributeError as e:  # another version of transformers
        return f"it has other parts: {e}"


def lowered_layer(layer: nn.Module) -> EncoderLayer | str:
    """Lower a layer for a CPU, or say why transformers computes it."""
    spec = layer_spec(layer)
    if isinstance(spec, str):
        return spec
    if (reason := why_not_lowered(spec)) is not None:
        return reason
    if watched(layer) or any("forward" in vars(part) for part in layer.modules()):
        return "it has a hook, or a part with another forward"
    assert isinstance(spec.mlp, MLP)
    return "it is in training" if layer.training else EncoderLayer(spec.attention, spec.mlp)


def why_not_lowered(spec: LayerSpec) -> str | None:
    """Why native calls do not compute a layer on a CPU, or None."""
    assert isinstance(spec.mlp, MLP)
    return why_not(spec.attention, spec.mlp)


def _built(layer: nn.Module, family: EncoderFamily) -> LayerSpec:
    names = (*(f"{family.attention}.{name}" for name in family.qkv), family.o_proj, family.up, family.down)
    linears = [_linear(layer, name) for name in names]
    query, o_proj, up, down = linears[0], *linears[3:]
    if (reason := why_not_fused("+".join(family.qkv), linears[:3])) is not None:
        raise UnsupportedError(reason)
    if type(up) is not GeluLinear or up.approximate != "none" or type(layer.get_submodule(family.activation)) is not nn.Identity:
        raise UnsupportedError(f"its {family.up} has no GELU, which fuse_ puts there where it follows")
    for name, linear in ((family.o_proj, o_proj), (family.down, down)):
        if type(linear) is not QuantLinear:
            raise UnsupportedError(f"its {name} is a {type(linear).__name__}")
    first, second = (_norm(layer, name, family) for name in family.norms)
    attention = cast("Part", layer.get_submodule(family.attention))
    if getattr(attention, "is_causal", False) or any(getattr(layer, name, False) for name in ("is_decoder", "add_cross_attention")):
        raise UnsupportedError("it is a decoder")
    if not family.position_bias and (implementation := attention.config._attn_implementation) not in _ATTENTION:
        raise UnsupportedError(f'its attn_implementation is "{implementation}", not {" or ".join(map(repr, _ATTENTION))}')
    if (reason := why_hooked(layer)) is not None:
        raise UnsupportedError(reason)
    count = int(getattr(attention, family.heads))
    scale = attention.attention_head_size**-0.5 if family.position_bias else attention.scaling
    heads = Heads(count, count, o_proj.packed.shape[1] // count, scale, rotary_dim=0)
    before, after = ((first, second), (None, None)) if family.pre_norm else ((None, None), (first, second))
    return LayerSpec(
        Attention((weight_of(query),), weight_of(o_proj), before[0], heads, residual_norm=after[0]),
        MLP(weight_of(up), weight_of(down), before[1], activation="gelu", gated=False, residual_norm=after[1]),
        rope=0,
        sliding_window=None,
        bidirectional=True,
        position_bias=family.position_bias,
    )


def _linear(layer: nn.Module, name: str) -> QuantLinear:
    linear = layer.get_submodule(name)
    if not isinstance(linear, QuantLinear):
        raise UnsupportedError(f"its {name} is a {type(linear).__name__}, which is not quantized")
    if part_of(linear) is not None:
        raise UnsupportedError("its weights are distributed over processes")
    return linear


def _norm(layer: nn.Module, name: str, family: EncoderFamily) -> Norm:
    norm = layer.get_submodule(name)
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.bias is None:
        raise UnsupportedError(f"its {' or '.join(family.norms)} is not a LayerNorm with weight and bias")
    return Norm(norm.weight, norm.eps, layer_norm=True, bias=norm.bias)
