"""Decoder layers of Llama and its like, for one new token of each sequence: six kernels a layer on an NVIDIA GPU.

    qkv = normed_linear(x, input norm, q | k | v)             queries, keys and values
    a   = attend(qkv, …)                                      rotary positions, the cache's new entry, attention; two kernels
    x   = linear(a, o, residual=x)
    h   = normed_linear(x, norm, gate | up, gated)            silu(gate) * up
    x   = linear(h, down, residual=x)

Prompts, caches that are not static, training and everything else goes the way of transformers' own layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import linear_added
from halfbyte.ops.decoding import attend, normed_linear

# Their forward is this file's formula; others differ in norms, activations or what is added where.
LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer)
DEVICES = ("cuda",)


def shorten_(model: nn.Module) -> list[str]:
    """Lets decoder layers whose projections `fuse_` has put together take one token in six kernels, in place; returns their names.

    What is rounded is less than before: the roots of the norms, silu(gate) * up and what attention sees of positions and weights stay in
    float32, or as good as that, until they are multiplied. Layers with other parts, or with hooks on them, stay as they are.
    """
    shortened = []
    for name, module in model.named_modules():
        if type(module) in LAYERS and _is_plain(module):
            module.__class__ = _SHORT[type(module)]
            shortened.append(name)
    return shortened


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    alone = [attention.o_proj, mlp.down_proj]
    groups = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    linears = [*alone, *(linear for group in groups for linear in group)]
    return (
        all(type(linear) is QuantLinear for linear in alone)
        and all(type(linear) is FusedLinear and linear.index == i for group in groups for i, linear in enumerate(group))
        and all(len({id(linear.together[0]) for linear in group}) == 1 for group in groups)
        and all(linear.compute in ("auto", "float") for linear in linears)
        and attention.config.hidden_act in ("silu", "swish")
        and mlp.gate_proj.bias is None
        and not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules() if module is not layer)
    )


class _OneToken:
    """Comes before a decoder layer's class."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **settings: Any,
    ) -> Any:
        attention = self.self_attn
        layers = [] if past_key_values is None else past_key_values.layers
        if position_embeddings is None or not _fits(hidden_states, attention_mask, layers, attention.layer_idx, settings):
            # super() in a class that is made at run time: torch.compile follows the plain call.
            return super().forward(  # type: ignore[misc]
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **settings,
            )
        weight, bias = attention.q_proj.together
        norm = self.input_layernorm
        qkv = normed_linear(hidden_states, norm.weight, norm.variance_epsilon, weight, bias)
        rotary = position_embeddings[0][:, 0], position_embeddings[1][:, 0]
        mask = None if attention_mask is None else attention_mask[:, 0, 0]
        kept, first = layers[attention.layer_idx], attention.layer_idx == 0
        # The first layer's length makes masks and positions. torch.compile reads it for these when it likes, unless it knows of a change.
        length, advance = kept.cumulative_length, 0 if first else 1
        seen = attend(qkv.view(len(qkv), -1), rotary, kept.keys, kept.values, length, mask, attention.scaling, advance=advance)
        if first:
            length.add_(1)
        hidden_states = linear_added(attention.o_proj, seen.unsqueeze(1), hidden_states)
        norm = self.post_attention_layernorm
        inner = normed_linear(hidden_states, norm.weight, norm.variance_epsilon, self.mlp.gate_proj.together[0], gated=True)
        return linear_added(self.mlp.down_proj, inner, hidden_states)


_SHORT: dict[type, Any] = {cls: type(f"OneToken{cls.__name__}", (_OneToken, cls), {}) for cls in LAYERS}


def _fits(x: Tensor, mask: Tensor | None, layers: list[Any], index: int, settings: dict[str, Any]) -> bool:
    """One token of each sequence, and a cache as `attend` takes it."""
    return (
        x.device.type in DEVICES
        and x.shape[1] == 1
        and index < len(layers)
        and type(layers[0]) is StaticLayer
        and type(layers[index]) is StaticLayer
        and layers[index].is_initialized
        and layers[index].keys.dtype == x.dtype
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)))
        and not settings.get("output_attentions")
        and not torch.is_grad_enabled()
    )
