"""An attention implementation for transformers, used where it is faster than torch's: one token attending to a cache, and whole
sequences on a CPU.

For one token, query heads that share a key head are grouped.

With a static cache and torch.compile transformers copies keys and values once for each query head before it calls torch. With
q [b, kv heads, heads / kv heads, d] in place of [b, heads, 1, d] the same products are computed and nothing is copied. A single token
sees the whole cache, so the order of these "queries" does not matter.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="halfbyte")

Whole sequences in float32 with full attention (encoders) use `ops.transformer.attention` on CPUs.

On a GPU under torch.compile the formula is written out in float32, of which it generates small kernels, as torch's own attention is made
for many queries. Eager calls on GPUs, and all other calls, use torch's own attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from halfbyte.integrations.transformers.optimize.calls import Understood, any_value, bind, unset
from halfbyte.ops.transformer import attention as whole

NAME = "halfbyte"

ARGUMENTS: Understood = {
    **dict.fromkeys(("scaling", "is_causal"), any_value),
    # The mask tells what these do.
    **dict.fromkeys(("sliding_window", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids"), any_value),
    **dict.fromkeys(("use_cache", "output_hidden_states", "num_items_in_batch", "return_dict"), any_value),  # concern the model around it
    **dict.fromkeys(("softcap", "output_attentions", "output_router_logits"), unset),
    "dropout": lambda value: not value,
}


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """query [b, h, t, d], key and value [b, h_kv, s, d], mask None or [b, 1, t, s] -> [b, t, h, d]; transformers' interface."""
    b, heads, t, d = query.shape
    kv_heads = key.shape[1]
    plain = bind((), (), settings, ARGUMENTS) is not None
    plain = plain and (attention_mask is None or attention_mask.shape[1] == 1)
    on_cpu = query.device.type == "cpu"
    causal = settings.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if on_cpu and plain and not causal and t > 1 and whole.supports(query, key, value, attention_mask):
        scaling = settings.get("scaling")
        return whole.attend(query, key, value, attention_mask, d**-0.5 if scaling is None else scaling), None
    if t != 1 or not plain or (heads == kv_heads if on_cpu else not torch.compiler.is_compiling()):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    grouped, scale = query.reshape(b, kv_heads, heads // kv_heads, d), settings.get("scaling")
    attend = functional.scaled_dot_product_attention if on_cpu else _written_out
    output = attend(grouped, key, value, attention_mask, scale=scale)
    return output.reshape(b, 1, heads, value.shape[-1]), None


def use_(model: nn.Module) -> None:
    """Puts this attention in the place of torch's, in models of transformers that have torch's."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == "sdpa":
            module.set_attn_implementation(NAME)


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None) -> Tensor:
    """query [b, h_kv, g, d], key and value [b, h_kv, s, d], mask [b, 1, 1, s] -> [b, h_kv, g, d]. Computed with sums, as matrix products
    would round the scores."""
    scores = (query.float().unsqueeze(3) * key.float().unsqueeze(2)).sum(-1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).unsqueeze(-1)
    return (weights * value.float().unsqueeze(2)).sum(3).to(value.dtype)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
