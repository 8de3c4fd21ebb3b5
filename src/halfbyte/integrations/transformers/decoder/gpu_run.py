"""`GpuRun`: a call of a live decoder stack of transformers, layer by layer, by the kernels of `decoder/gpu_layer.py`.

`stack.py` makes a `GpuRun` for each call of a compiled stack on a GPU. Each layer takes the first of these that supports it:

    decode            one new token of each sequence, a `StaticCache` layer without a window
    prefill           several tokens, any cache or none; also one token of a layer that reuses the keys and values of another (Gemma 4)
    transformers      everything else

A prefill writes to a `StaticCache` layer by kernels, and to other caches by their `update`. `generate` does not call this to decode models
that `GpuModel` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from halfbyte.decoder.gpu_layer import GpuLayer, KeyValues, Rotary, decode, prefill, prefill_with
from halfbyte.decoder.spec import LayerSpec
from halfbyte.integrations.transformers.decoder.layer_gpu import is_prefilled
from halfbyte.integrations.transformers.decoder.live_layer import query_scale_from
from halfbyte.integrations.transformers.decoder.run import Call, LayerKinds, Run
from halfbyte.machine import gpu
from halfbyte.ops.modes import in_mode, plain
from halfbyte.ops.transformer.prefill_ops import why_not_many

DEVICES = ("cuda",)

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


class GpuRun(Run):
    """A call through the layers of a stack, computed by kernels of a GPU where these support the layer and the call."""

    def __init__(self, layers: Sequence[GpuLayer | None], stack: Part, kinds: LayerKinds, call: Call) -> None:
        """Prepare a call. layers: Lowered; None where transformers computes one."""
        super().__init__(stack, kinds, call)
        self._lowered = layers
        self._scales_queries = query_scale_from(stack.layers[0]) is not None  # by position, which no kernel does

    def _next_layers(self, x: Tensor, first: int) -> tuple[Tensor, int]:
        """`Run._next_layers`: one layer."""
        lowered, y = self._lowered[first], None
        if lowered is not None and self._accepts(lowered, x, first):
            y = self._decode_layer(lowered, x, first)
            y = self._prefill_layer(lowered, x, first) if y is None else y
        return self._by_transformers(x, first) if y is None else y, first + 1

    def _accepts(self, lowered: GpuLayer, x: Tensor, index: int) -> bool:
        """Whether kernels may compute this call of a layer, as far as that depends neither on the number of tokens nor on the cache."""
        cos = self._call.rotary[index][0]
        return (
            x.device.type in DEVICES
            and cos.dim() == 3
            and lowered.attention.heads.accepts_rope_of(cos.shape[2])
            and not self._scales_queries
            and (self._call.per_layer is None) == (lowered.per_layer is None)
            and self._modules[index].self_attn.is_causal
            and not torch.is_grad_enabled()
        )

    def _per_layer_input(self, index: int) -> Tensor | None:
        """Return the per-layer input [B, t, P] of a layer, copied if its B * t rows are not equally far apart, as kernels take them."""
        if self._call.per_layer is None:
            return None
        rows = self._call.per_layer[:, :, index]
        is_strided = rows.stride(2) == 1 and rows.stride(0) == rows.stride(1) * rows.shape[1]
        return rows if is_strided else rows.contiguous()

    def _decode_layer(self, lowered: GpuLayer, x: Tensor, index: int) -> Tensor | None:
        """Compute a layer for one token of each sequence, x [B, 1, K], with a static cache; return None if that is not supported."""
        call, sharing = self._call, self._kv_sharing[index]
        cache_layers: Sequence[Any] = () if call.past is None else call.past.layers
        cache_index: int | None = sharing.source if sharing.reuses else self._modules[index].self_attn.layer_idx
        if cache_index is None or (sharing.reuses and sharing.kind not in call.shared):
            return None
        if not _supports_decode(x, cache_layers, cache_index):
            return None
        cache_layer, mask = cache_layers[cache_index], call.masks[index]
        if not self._is_decode_mask(mask, cache_layer.keys.shape[2]):
            return None
        cos, sin = call.rotary[index]
        rope_cache = (cos[:, 0], sin[:, 0]) if lowered.attention.heads.rotary_dim else None
        row_mask = None if mask is None else mask[:, 0, 0]
        length = cache_layer.cumulative_length
        cache = KeyValues(cache_layer.keys, cache_layer.values, length)
        # Masks and positions are computed from the length of the cache's first layer, which torch.compile may read at any time. It must see
        # that this length changes, so torch increments it. The kernel increments the lengths of the other layers.
        is_first = cache_index == 0
        advance = 0 if is_first or sharing.reuses else 1
        y = decode(lowered, x, rope_cache, cache, row_mask, self._per_layer_input(index), advance=advance)
        if sharing.reuses:
            return y
        if is_first:
            length.add_(1)
        if sharing.provides:
            call.shared[sharing.kind] = cache_layer.keys, cache_layer.values
        return y

    def _prefill_layer(self, lowered: GpuLayer, x: Tensor, index: int) -> Tensor | None:
        """Compute a layer for x [B, t, K], t > 1, or t = 1 if it reuses keys and values; return None if that is not supported."""
        call, module, sharing, heads = self._call, self._modules[index], self._kv_sharing[index], lowered.attention.heads
        is_prefill = (x.shape[1] > 1 or sharing.reuses) and plain(x) and not getattr(call.past, "offloading", False) and not module.training
        if not is_prefill or not is_prefilled(lowered) or (x.is_cuda and why_not_many(heads, x.dtype, gpu(x.get_device())) is not None):
            return None
        given_mask = call.masks[index]
        if not self._is_prefill_mask(given_mask, x.shape[1]):
            return None
        bool_mask = self._as_bool_mask(given_mask) if self._eager else given_mask
        mask = None if bool_mask is None else bool_mask[:, 0]
        x, per_layer_input = x.contiguous(), self._per_layer_input(index)
        cos, sin = call.rotary[index]
        rope_cache = None if heads.rotary_dim == 0 else (_with_unit_stride(cos), _with_unit_stride(sin))
        if sharing.reuses:
            reused = self._reused(index, x)
            if reused is None:
                return None
            return prefill(lowered, x, rope_cache, reused, mask, per_layer_input, name="others")
        cache_index: int = module.self_attn.layer_idx
        cache_layer: Any = None if call.past is None or cache_index >= len(call.past.layers) else call.past.layers[cache_index]
        if isinstance(cache_layer, StaticLayer) and not cache_layer.is_initialized:
            # Create the length on the GPU: `lazy_initialization` would copy it from the host, and wait for the GPU.
            cache_layer.cumulative_length = torch.zeros_like(cache_layer.cumulative_length, device=x.device)
        if type(cache_layer) is StaticLayer:
            y, states = _prefill_static(lowered, x, mask, rope_cache, cache_layer, per_layer_input)
        else:
            update = None if call.past is None else partial(call.past.update, layer_idx=cache_index)
            y, states = prefill_with(lowered, x, rope_cache, update, mask, per_layer_input)
        if sharing.provides:
            call.shared[sharing.kind] = states
        return y

    def _is_decode_mask(self, mask: Tensor | None, size: int) -> bool:
        """Whether `attend` masks scores as the layer's attention does, with a cache of `size` places.

        Attention by SDPA takes bool masks. Eager attention adds its mask, and without one attends to the empty places of the cache, too.
        """
        if mask is None:
            return not self._eager
        return mask.shape[1:] == (1, 1, size) and (mask.is_floating_point() if self._eager else mask.dtype == torch.bool)

    def _is_prefill_mask(self, mask: Tensor | None, tokens: int) -> bool:
        """Whether `attend_many`, which takes bool masks, masks scores as the layer's attention does.

        Eager attention adds its mask, which needs an equivalent bool one. Without a mask it is not causal.
        """
        if mask is None:
            return not self._eager
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != tokens:
            return False
        if not self._eager:
            return mask.dtype == torch.bool
        if mask.dtype == torch.bool:  # eager attention adds True as 1, which masks nothing
            return False
        if id(mask) not in self._bool_masks and mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # reading the mask synchronizes, which a capture forbids
        bool_mask = self._as_bool_mask(mask)
        return bool_mask is not None and bool_mask.dtype == torch.bool

    def _reused(self, index: int, x: Tensor) -> KeyValues | None:
        """Return keys and values that an earlier layer provides to this one (`Run._shared_states`)."""
        states = self._shared_states(index, x)
        if states is None:
            return None
        keys, values, cache_layer = states
        if type(cache_layer) is StaticLayer:
            return KeyValues(keys, values, cache_layer.cumulative_length - x.shape[1])
        before = keys.shape[2] - x.shape[1] if self._call.masks[index] is None else 0  # a mask hides later tokens
        return KeyValues(keys, values, torch.full((1,), before, dtype=torch.int64, device=x.device) if before else None)


def _supports_decode(x: Tensor, cache_layers: Sequence[Any], index: int) -> bool:
    """Whether x is one token of each sequence, and `attend` can append its keys and values to a layer of the cache."""
    return (
        x.shape[1] == 1
        and index < len(cache_layers)
        and type(cache_layers[index]) is StaticLayer
        and cache_layers[index].is_initialized
        and cache_layers[index].keys.dtype == x.dtype
        and cache_layers[index].keys.device == x.device
        and not in_mode()
    )


def _with_unit_stride(table: Tensor) -> Tensor:
    """Return cosines or sines [B or 1, t, R], contiguous along R."""
    return table if table.stride(-1) == 1 else table.contiguous()


def _prefill_static(
    layer: GpuLayer, x: Tensor, mask: Tensor | None, rope_cache: Rotary, cache_layer: Any, per_layer_input: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Prefill a layer into a `StaticLayer`. Return the output [B, t, K], and the cache's keys and values [B, Hkv, T, D]."""
    heads = layer.attention.heads
    if not cache_layer.is_initialized:
        no_tokens = x.new_empty(len(x), heads.num_kv_heads, 0, heads.head_dim)
        cache_layer.lazy_initialization(no_tokens, no_tokens)
    keys, values, length = cache_layer.keys, cache_layer.values, cache_layer.cumulative_length
    y = prefill(layer, x, rope_cache, KeyValues(keys, values, length), mask, per_layer_input)
    length.add_(x.shape[1])
    return y, (keys, values)


def dtype_of(spec: LayerSpec) -> torch.dtype:
    """Return the dtype of a layer's activations, which is that of its norms' weights."""
    norms = [
        norm for norm in (spec.attention.pre_norm, spec.attention.post_norm, *(spec.attention.heads.qk_norm or ())) if norm is not None
    ]
    dtype: torch.dtype = norms[0].weight.dtype
    return dtype
