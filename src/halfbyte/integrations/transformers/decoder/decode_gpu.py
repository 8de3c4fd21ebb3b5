"""Decoder layers of optimized models on a GPU: one new token of each sequence, with a static cache, by the kernels of
`decoder/gpu_layer.py`.

Layers are those of `layer_gpu.py`. Some may attend to keys and values of an earlier layer (Gemma 4), with the new token's; a sliding window
is a ring buffer (`rings.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from halfbyte.decoder.gpu_layer import KeyValues, decode
from halfbyte.integrations.transformers.cache.kv_place import SharedStates
from halfbyte.integrations.transformers.cache.rings import Later, Ring
from halfbyte.integrations.transformers.cache.static_codes import IN_CODES, scales_or_none
from halfbyte.integrations.transformers.decoder.layer_gpu import LoweredLayer, contiguous_rows
from halfbyte.ops.library import in_mode

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

DEVICES = ("cuda",)
_CACHES = (StaticLayer, Ring, *IN_CODES)


def token(
    layer: Part,
    found: LoweredLayer,
    x: Tensor,
    mask: Tensor | None,
    layers: list[Any],
    rotary: tuple[Tensor, Tensor],
    per_layer_input: Tensor | None,
    shared: SharedStates,
) -> Tensor | None:
    """The layer's output for one token of each sequence, x [B, 1, K]; None if that is not supported.

    Args:
        layer, found: The layer, and what its kernels read.
        x: The tokens' hidden states.
        mask: As transformers makes it.
        layers: Of the cache.
        rotary: Cosines and sines.
        per_layer_input: The layer's input [B, 1, P], if it has one.
        shared: Keys and values that layers reuse.
    """
    reads, kind = found.shared.reuses, found.shared.kind
    number = found.shared.source if reads else layer.self_attn.layer_idx
    if number is None or (reads and kind not in shared):
        return None
    index: int = number
    if not _fits(x, layers, index) or not found.decodes or not _is_mask(found, mask, layers[index].keys.shape[2]):
        return None
    per_layer_input = contiguous_rows(per_layer_input)
    if (per_layer_input is None) != (found.layer.per_layer is None):
        return None
    heads = found.layer.attention.heads
    if not heads.accepts_rope_of(rotary[0].shape[2]) or not layer.self_attn.is_causal:
        return None
    kept = layers[index]
    rope_cache = (rotary[0][:, 0], rotary[1][:, 0]) if heads.rotary_dim else None
    seen, length, ring = None if mask is None else mask[:, 0, 0], kept.cumulative_length, isinstance(kept, Ring)
    cache = KeyValues(kept.keys, kept.values, length, scales_or_none(kept), ring)
    y = decode(found.layer, x, rope_cache, cache, seen, per_layer_input, advance=0 if index == 0 or reads else 1)
    if reads:
        return y
    if index == 0:
        # The first layer's length makes masks and positions. torch.compile reads it for these when it likes, unless it knows of a change.
        length.add_(1)
    if ring:
        kept.cumulative_length_int += 1
    if found.shared.provides:
        shared[kind] = _lent(kept)
    return y


def _lent(kept: Any) -> Any:
    """Keys and values as other layers take them: what is to be computed is when somebody reads it."""
    if type(kept) is StaticLayer:
        return kept.keys, kept.values
    return Later(kept.in_floats if type(kept) in IN_CODES else kept.in_order)


def _is_mask(layer: LoweredLayer, mask: Tensor | None, size: int) -> bool:
    """Whether `attend` does with it what the layer's attention does. Eager attention without one sees places where no token is."""
    if mask is None:
        return not layer.eager
    return mask.shape[1:] == (1, 1, size) and (mask.is_floating_point() if layer.eager else mask.dtype == torch.bool)


def _fits(x: Tensor, layers: list[Any], index: int) -> bool:
    """Whether the call is for one token of each sequence, with a cache that `attend` supports."""
    return (
        x.device.type in DEVICES
        and x.shape[1] == 1
        and index < len(layers)
        and type(layers[0]) in _CACHES
        and type(layers[index]) in _CACHES
        and layers[index].is_initialized
        and (layers[index].floats if type(layers[index]) in IN_CODES else layers[index].keys.dtype) == x.dtype
        and layers[index].keys.device == x.device
        and not torch.is_grad_enabled()
        and not in_mode()
    )
