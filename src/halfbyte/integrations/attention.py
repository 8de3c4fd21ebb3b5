"""Attention of one token to a cache, on CPUs: query heads that share a key head are taken together.

With a static cache and torch.compile transformers writes keys and values out once for each query head before it calls torch. With
q [b, kv heads, heads / kv heads, d] in place of [b, heads, 1, d] the same products are computed and nothing is copied. A single token
sees the whole cache, so that no order among "queries" matters.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="halfbyte")

It is torch's own attention in every other case.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "halfbyte"


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """query [b, h, t, d], key and value [b, h_kv, s, d], mask None or [b, 1, t, s] -> [b, t, h, d]; transformers' interface."""
    b, heads, t, d = query.shape
    kv_heads = key.shape[1]
    plain = not any(settings.get(name) for name in ("dropout", "softcap", "output_attentions"))
    plain = plain and all(settings.get(name) is None for name in ("position_bias", "cache"))
    if t != 1 or heads == kv_heads or query.device.type != "cpu" or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    grouped = query.reshape(b, kv_heads, heads // kv_heads, d)
    output = functional.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=settings.get("scaling"))
    return output.reshape(b, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
