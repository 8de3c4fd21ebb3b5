"""torch's nn.MultiheadAttention with its projections as nn.Linear modules, so that they are quantized, saved and loaded as others are.

torch stores the weights of queries, keys and values in one parameter, `in_proj_weight` [3 * embed_dim, embed_dim], and multiplies by it
and by `out_proj.weight` without calling a module. `expanded` (expanded.py) replaces an nn.MultiheadAttention by `Attention` before it is
quantized.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.nn.modules.quantized import why_not_hooks

PARTS = ("in_proj", "out_proj")


class Attention(nn.Module):
    """An nn.MultiheadAttention with the same arguments and results, whose `in_proj` and `out_proj` are modules."""

    _qkv_same_embed_dim = False  # so that torch's encoder layers do not read the weights, either

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self._float: tuple[nn.MultiheadAttention, ...] = (module,)  # in a tuple, so that it is not a child
        self.embed_dim, self.num_heads, self.head_dim = module.embed_dim, module.num_heads, module.head_dim
        self.dropout, self.batch_first = module.dropout, module.batch_first
        self.in_proj = _linear(module.in_proj_weight, module.in_proj_bias)
        self.out_proj = _linear(module.out_proj.weight, module.out_proj.bias)
        self.train(module.training)

    @property
    def in_proj_weight(self) -> Tensor:
        return self.in_proj.weight

    @property
    def in_proj_bias(self) -> Tensor | None:
        return self.in_proj.bias

    def collapsed(self) -> nn.Module:
        """Return the float module that this one replaced."""
        return self._float[0]

    def release(self) -> None:
        """Drop the reference to the float module, so that its memory can be freed."""
        self._float = ()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            raise UnsupportedError("quantized attention takes no nested tensors: pass a padded tensor and a key_padding_mask")
        if is_causal and attn_mask is None:
            raise ArgumentError("is_causal only says what attn_mask is, and there is none: pass the mask")
        unbatched = query.dim() == 2
        q, k, v = self._project(query, key, value)
        q, k, v = (self._split_heads(x, unbatched) for x in (q, k, v))
        mask = self._mask(key_padding_mask, attn_mask, q)
        weights = None
        if need_weights:
            scores = q @ k.mT * self.head_dim**-0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, self.dropout, self.training)
            y = weights @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        y = cast(Tensor, self.out_proj(y.transpose(1, 2).flatten(2)))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if unbatched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v. A quantized weight is multiplied as a whole: of different inputs, the outputs for the others are discarded."""
        if query is key and key is value:
            return self.in_proj(query).chunk(3, -1)  # type: ignore[no-any-return]
        q, k = self.in_proj(query), self.in_proj(key)
        return tuple(x.chunk(3, -1)[i] for i, x in enumerate((q, k, k if key is value else self.in_proj(value))))

    def _split_heads(self, x: Tensor, unbatched: bool) -> Tensor:
        """Return x, [T, E], [B, T, E] or [T, B, E], as [B, H, T, D]."""
        if unbatched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the sum of both masks, to be added to the scores [B, H, T, S]; None if there is none.

        Args:
            key_padding_mask: [B, S] or [S].
            attn_mask: [T, S] or [B * H, T, S].
            q: [B, H, T, D].
        """
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q)
            mask = mask.unflatten(0, q.shape[:2]) if attn_mask.dim() == 3 else mask
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q).view(-1, 1, 1, key_padding_mask.shape[-1])
            mask = padding if mask is None else mask + padding
        return mask


def is_attention(module: nn.Module) -> bool:
    """Return whether `Attention` can replace a module: an nn.MultiheadAttention, no subclass, without options that it does not compute."""
    return (
        type(module) is nn.MultiheadAttention
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and not any(why_not_hooks(part) or "forward" in vars(part) for part in (module, module.out_proj))
        and all(type(parameter) is nn.Parameter for parameter in (module.in_proj_weight, module.out_proj.weight))
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an nn.Linear with these parameters, which are not copied."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device="meta")
    linear.weight, linear.bias = cast(nn.Parameter, weight), cast(nn.Parameter, bias)
    return linear


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    """Return a mask in q's dtype that is added to scores: -inf where a bool mask is True, which torch takes for masked."""
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask, float("-inf"))
