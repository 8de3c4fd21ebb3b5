"""What transformer blocks of diffusers' UNets are to `ops/transformer/cross_block.py`, which computes one in one native call on a CPU.

A block is compiled by the first call (`fused_blocks.py`) from the layers as they are then, and again when one was changed (`frozen.py`).
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import nn

from halfbyte.nn.frozen import while_unchanged
from halfbyte.nn.modules.quantized import QuantLinear, has_hooks
from halfbyte.ops.transformer.cross_block import CrossBlock, why_not
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight

_PROCESSORS = "diffusers.models.attention_processor"


@while_unchanged()
def compiled(block: nn.Module) -> CrossBlock | str:
    """The native block, or why diffusers computes it."""
    return _lowered(cast(_Block, block), block)


class _Attention(Protocol):
    """What is read of diffusers' Attention."""

    processor: object
    spatial_norm: object
    norm_q: object
    norm_k: object
    group_norm: object
    norm_cross: object
    heads: int
    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    to_out: nn.ModuleList
    residual_connection: bool
    rescale_output_factor: float


class _Block(Protocol):
    """What is read of diffusers' BasicTransformerBlock."""

    norm_type: str
    only_cross_attention: bool
    pos_embed: nn.Module | None
    attn1: _Attention
    attn2: _Attention | None
    ff: nn.Module
    _chunk_size: int | None


def _lowered(block: _Block, module: nn.Module) -> CrossBlock | str:
    """The native form of a block, or why there is none."""
    if block.norm_type != "layer_norm" or block.only_cross_attention or block.attn2 is None or block.pos_embed is not None:
        return "it has other norms, attentions or embeddings"
    if hasattr(block, "fuser") or block._chunk_size is not None:
        return "it has a fuser, or computes its feed-forward in chunks"
    if any(has_hooks(part) or "forward" in vars(part) for part in module.modules() if part is not module):
        return "a layer has hooks, or a forward of its own"
    if any(isinstance(part, nn.Dropout) and part.training for part in module.modules()):
        return "it drops outputs"
    net = list(next(block.ff.children()).children()) if type(block.ff).__name__ == "FeedForward" else ()
    geglu, *rest = net or (None,)
    proj = getattr(geglu, "proj", None)
    if type(geglu).__name__ != "Geglu" or type(proj) is not QuantLinear or [type(layer) for layer in rest] != [nn.Dropout, QuantLinear]:
        return "its feed-forward is no GEGLU of quantized layers"
    if any(_is_other(attention) for attention in (block.attn1, block.attn2)):
        return "an attention is of another class, or has norms, a residual, another last layer or a processor of its own"
    if block.attn1.heads != block.attn2.heads:
        return "its attentions have different heads"
    self_attention, cross, cross_q = block.attn1, block.attn2, block.attn2.to_q
    to_q, cross_k, outs = self_attention.to_q, cross.to_k, (self_attention.to_out[0], cross.to_out[0])
    fused = _are_fused(to_q, self_attention.to_k, self_attention.to_v) and _are_fused(cross_k, cross.to_v)
    if not fused or any(type(linear) is not QuantLinear for linear in (cross_q, *outs)):
        return "layers of an attention are not quantized and fused"
    native_norms = list[Norm]()
    for norm in (module._modules.get(f"norm{i}") for i in (1, 2, 3)):
        if type(norm) is not nn.LayerNorm or norm.weight is None:
            return "a norm is no LayerNorm with a weight"
        native_norms.append(Norm(norm.weight, norm.eps, layer_norm=True, bias=norm.bias))
    qkv, o, q, kv, cross_o, up_gate, down = (_weight(linear) for linear in (to_q, outs[0], cross_q, cross_k, outs[1], proj, rest[1]))
    parts = (qkv, o), (q, kv, cross_o), (up_gate, down), native_norms, block.attn1.heads
    return why_not(*parts) or CrossBlock(*parts)


def _are_fused(*linears: nn.Module) -> bool:
    """Whether one product computes exactly these layers, in this order: none was replaced, or has other tensors, since `fuse_`."""
    if any(not isinstance(linear, QuantLinear) or getattr(linear, "index", None) != i for i, linear in enumerate(linears)):
        return False
    wholes = [cast(QuantLinear, linear).together[0] for linear in linears]
    return getattr(linears[0], "count", 1) == len(linears) and all(whole is wholes[0] for whole in wholes)


def _is_other(attention: _Attention) -> bool:
    """Whether attention is anything but softmax(q kᵀ) v and the output's product."""
    if (type(attention).__module__, type(attention).__name__) != (_PROCESSORS, "Attention") or type(attention.to_out[1]) is not nn.Dropout:
        return True
    norms = attention.spatial_norm, attention.norm_q, attention.norm_k, attention.group_norm, attention.norm_cross
    if any(norm is not None for norm in norms) or attention.residual_connection or attention.rescale_output_factor != 1:
        return True
    kind = type(attention.processor)
    return (kind.__module__, kind.__name__) != (_PROCESSORS, "AttnProcessor2_0")


def _weight(linear: nn.Module) -> Weight:
    assert isinstance(linear, QuantLinear)
    return Weight(*linear.together, linear.compute, linear.activation)  # type: ignore[arg-type]
