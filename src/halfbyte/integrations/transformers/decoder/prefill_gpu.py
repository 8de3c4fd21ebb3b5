"""Decoder layers of optimized models on a GPU: many tokens of each sequence, as in prompts, by the kernels of
`decoder/gpu_layer.py`.

With any cache, or none: others than static ones take keys and values by their `update`; layers that read those of an earlier one (Gemma 4)
take what that one has left in `shared_kv_states`, also for the last tokens alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import Cache, StaticLayer

from halfbyte.decoder.gpu_layer import GpuLayer, KeyValues, Rotary, prefill, prefill_with
from halfbyte.decoder.spec import LayerSpec
from halfbyte.integrations.transformers.cache.kv_place import SharedStates
from halfbyte.integrations.transformers.cache.static_codes import StaticInt8Layer
from halfbyte.integrations.transformers.decoder import decode_gpu
from halfbyte.integrations.transformers.decoder.compiled_layers import add_mlp, visible
from halfbyte.integrations.transformers.decoder.layer_gpu import LoweredLayer, contiguous_rows
from halfbyte.integrations.transformers.decoder.live_layer import SharedKV, is_distributed
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.library import plain
from halfbyte.ops.transformer.prefill_ops import why_not_many

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_Place = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and how many of them there are before the new ones; None: none


def tokens(
    layer: Part,
    found: LoweredLayer,
    x: Tensor,
    mask: Tensor | None,
    past: Cache | None,
    rotary: tuple[Tensor, Tensor],
    per_layer_input: Tensor | None,
    shared: SharedStates,
) -> Tensor | None:
    """The layer's output for x [B, T, K], T > 1, or 1 where keys are another layer's; None if that is not supported.

    Args:
        layer, found, mask, rotary, per_layer_input, shared: As for `decode_gpu.token`.
        x: The tokens' hidden states.
        past: The cache of all layers, or None.
    """
    if (
        not _fits(layer, found, x, past, rotary)
        or not found.prefills
        or not found.layer.attention.heads.accepts_rope_of(rotary[0].shape[2])
    ):
        return None
    computed, heads = found.layer, found.layer.attention.heads
    if x.is_cuda and why_not_many(heads, x.dtype, gpu(x.get_device())) is not None:
        return None
    seen = _seen(layer, mask, x.shape[1], eager=found.eager)
    if isinstance(seen, str):
        return None
    per_layer_input = contiguous_rows(per_layer_input)
    if (per_layer_input is None) != (computed.per_layer is None):
        return None
    index, x = layer.self_attn.layer_idx, x.contiguous()
    rope_cache = None if heads.rotary_dim == 0 else (_in_rows(rotary[0]), _in_rows(rotary[1]))
    cache: object = None if past is None or index >= len(past.layers) else past.layers[index]
    if found.shared.reuses:
        place = _lent(layer, found.shared, x, mask, past, shared)
        return (
            None if place is None else prefill(computed, x, rope_cache, KeyValues(*place), _of_tokens(seen), per_layer_input, name="others")
        )
    if isinstance(cache, StaticLayer) and not cache.is_initialized:
        # A copy from the host would wait for the GPU.
        cache.cumulative_length = torch.zeros_like(cache.cumulative_length, device=x.device)
    if type(cache) is StaticLayer:
        y, kept = _with_static(computed, x, seen, rope_cache, cache, per_layer_input)
    else:
        # A static int8 cache is dequantized as a whole; the mask hides from the new tokens what comes after them.
        before = cache.cumulative_length.clone() if type(cache) is StaticInt8Layer else None
        update = None if past is None else partial(past.update, layer_idx=index)
        y, kept = prefill_with(computed, x, rope_cache, update, _of_tokens(seen), per_layer_input, before)
    if found.shared.provides:
        shared[found.shared.kind] = kept
    return y if computed.mlp is not None else add_mlp(layer, found.spec, y)


def _in_rows(table: Tensor) -> Tensor:
    return table if table.stride(-1) == 1 else table.contiguous()


def _lent(layer: Part, sharing: SharedKV, x: Tensor, mask: Tensor | None, past: Cache | None, shared: SharedStates) -> _Place | None:
    """Keys and values that an earlier layer has left, and before which of them the tokens x are; None where that is not known."""
    index = sharing.source
    if index is None or sharing.kind not in shared or (past is not None and index >= len(past.layers)):
        return None
    keys, values = shared[sharing.kind]
    cache: Any = None if past is None else past.layers[index]
    tokens = x.shape[1]
    if keys.dtype != x.dtype or keys.device != x.device:
        return None
    if type(cache) in (StaticLayer, StaticInt8Layer):
        return keys, values, cache.cumulative_length - tokens
    if mask is not None:  # which tells of what is there, too
        return (keys, values, None) if mask.shape[3] == keys.shape[2] else None
    window, before = layer.self_attn.sliding_window, keys.shape[2] - tokens
    if isinstance(cache, StaticLayer) or (window is not None and keys.shape[2] > window):
        return None
    return keys, values, torch.full((1,), before, dtype=torch.int64, device=x.device) if before else None


def _with_static(
    layer: GpuLayer, x: Tensor, mask: Tensor | None, rope_cache: Rotary, cache: Any, per_layer_input: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The output, and keys and values."""
    heads = layer.attention.heads
    if not cache.is_initialized:
        new = x.new_empty(len(x), heads.num_kv_heads, 0, heads.head_dim)
        cache.lazy_initialization(new, new)
    y = prefill(layer, x, rope_cache, KeyValues(cache.keys, cache.values, cache.cumulative_length), _of_tokens(mask), per_layer_input)
    cache.cumulative_length.add_(x.shape[1])
    return y, (cache.keys, cache.values)


def _of_tokens(mask: Tensor | None) -> Tensor | None:
    """[B, 1, T, S] -> [B, T, S]"""
    return None if mask is None else mask[:, 0]


def why_not_prefilled(layer: Part, spec: LayerSpec, here: Gpu) -> str | None:
    """Why kernels do not prefill a layer that they decode; None if they do."""
    if is_distributed(layer):
        return "its weights are distributed over processes"
    return why_not_many(spec.attention.heads, dtype_of(spec), here)


def dtype_of(spec: LayerSpec) -> torch.dtype:
    """The dtype of a layer's activations, which its norms have."""
    norms = [
        norm for norm in (spec.attention.pre_norm, spec.attention.post_norm, *(spec.attention.heads.qk_norm or ())) if norm is not None
    ]
    dtype: torch.dtype = norms[0].weight.dtype
    return dtype


_masks: Any = WeakTensorKeyDictionary()  # those that are added to scores: what they show, and the last layer that asked


def _seen(layer: Part, mask: Tensor | None, tokens: int, *, eager: bool) -> Tensor | str | None:
    """The mask as `attend_many` takes it; or why it takes none like it."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != tokens):
        return "its mask is not one of all heads for each token"
    if not eager:
        return mask if mask is None or mask.dtype == torch.bool else "its mask is not of booleans"
    if mask is None:
        return "eager attention without a mask is not causal"
    index, (found, last) = layer.self_attn.layer_idx, _masks.get(mask, (None, -1))
    if found is None or index <= last:  # another call of the model, since when the mask may have changed
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return "to look at the mask waits for the GPU"
        found = visible(mask)
    _masks[mask] = found, index
    return found if found.dtype == torch.bool else "its mask adds other numbers"


def _fits(layer: Part, found: LoweredLayer, x: Tensor, past: Cache | None, rotary: tuple[Tensor, Tensor]) -> bool:
    """Whether the call is for many tokens, with nothing else than their results asked for."""
    return (
        x.device.type in decode_gpu.DEVICES
        and (x.shape[1] > 1 or found.shared.reuses)
        and plain(x)
        and rotary[0].dim() == 3
        and not getattr(past, "offloading", False)
        and layer.self_attn.is_causal
        and not layer.training
        and not torch.is_grad_enabled()
    )
