"""The layers of a decoder stack of transformers on an NVIDIA GPU, by the kernels of `decoder/gpu_layer.py`.

One new token of each sequence with a static cache without a window is a decode step of the layer. Others are a prefill, with any cache or
none: other caches take keys and values by their `update`. Layers that read those of an earlier one (Gemma 4) take what that one has left in
`shared_kv_states`, also for the last tokens alone. `generate` decodes by `GpuModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from halfbyte.decoder.gpu_layer import GpuLayer, KeyValues, Rotary, decode, prefill, prefill_with
from halfbyte.decoder.spec import LayerSpec
from halfbyte.integrations.transformers.decoder.layer_gpu import LoweredLayer
from halfbyte.integrations.transformers.decoder.live_layer import SharedKV, family_of, is_distributed, query_scale_from
from halfbyte.integrations.transformers.decoder.run import Call, Run
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.modes import in_mode, plain
from halfbyte.ops.transformer.prefill_ops import why_not_many

DEVICES = ("cuda",)
_Entry = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and how many of them there are before the new ones; None: none

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


class GpuRun(Run):
    """A call through the layers that kernels of a GPU compute."""

    def __init__(
        self,
        layers: Sequence[LoweredLayer | None],
        stack: Part,
        call: Call,
        changed: Callable[[int], Sequence[LoweredLayer | None] | None] | None = None,
    ) -> None:
        """Prepare a call.

        Args:
            layers: What kernels read of each layer, or None where transformers computes it.
            stack: The module of transformers.
            call: What all layers are called with.
            changed: Function from the index of a layer to None if that layer is as it was when it was lowered, and otherwise to `layers`
                as they are now. It is called just before the layer's launches, while the GPU computes the layer before it. None: no layer
                has changed.
        """
        super().__init__(stack, call)
        self._lowered, self._changed = layers, changed
        self._scales_queries = query_scale_from(stack.layers[0]) is not None  # by their positions, which kernels do not do

    def _some(self, x: Tensor, first: int) -> tuple[Tensor, int]:
        if self._changed is not None and (layers := self._changed(first)) is not None:
            self._lowered = layers
        lowered, y = self._lowered[first], None
        if lowered is not None and self._accepts(lowered, x, first):
            y = self._token(lowered, x, first)
            y = self._tokens(lowered, x, first) if y is None else y
        return self._by_transformers(x, first) if y is None else y, first + 1

    def _accepts(self, lowered: LoweredLayer, x: Tensor, index: int) -> bool:
        """Whether the call is one for kernels, whatever its number of tokens and its cache."""
        cos = self._call.rotary[index][0]
        return (
            x.device.type in DEVICES
            and cos.dim() == 3
            and lowered.layer.attention.heads.accepts_rope_of(cos.shape[2])
            and not self._scales_queries
            and (self._call.per_layer is None) == (lowered.layer.per_layer is None)
            and self._modules[index].self_attn.is_causal
            and not torch.is_grad_enabled()
        )

    def _per_layer_input(self, index: int) -> Tensor | None:
        """A layer's own input [B, t, P] as kernels read it: its rows lie equally far apart."""
        given = None if self._call.per_layer is None else self._call.per_layer[:, :, index]
        if given is None or (given.stride(2) == 1 and given.stride(0) == given.stride(1) * given.shape[1]):
            return given
        return given.contiguous()

    def _token(self, lowered: LoweredLayer, x: Tensor, index: int) -> Tensor | None:
        """A layer's output for one token of each sequence, x [B, 1, K], with a cache of fixed size; None if that is not supported."""
        call, shared = self._call, self._shared[index]
        layers: Sequence[Any] = () if call.past is None else call.past.layers
        number: int | None = shared.source if shared.reuses else self._modules[index].self_attn.layer_idx
        if number is None or (shared.reuses and shared.kind not in call.shared):
            return None
        mask = call.masks[index]
        if not _is_decode(x, layers, number) or not lowered.decodes or not self._is_decode_mask(mask, layers[number].keys.shape[2]):
            return None
        heads, (cos, sin) = lowered.layer.attention.heads, call.rotary[index]
        kept = layers[number]
        rope_cache = (cos[:, 0], sin[:, 0]) if heads.rotary_dim else None
        seen, length = None if mask is None else mask[:, 0, 0], kept.cumulative_length
        cache = KeyValues(kept.keys, kept.values, length)
        advance = 0 if number == 0 or shared.reuses else 1
        y = decode(lowered.layer, x, rope_cache, cache, seen, self._per_layer_input(index), advance=advance)
        if shared.reuses:
            return y
        if number == 0:
            # The first layer's length determines masks and positions, for which torch.compile reads it at any time, unless it knows of a
            # change.
            length.add_(1)
        if shared.provides:
            call.shared[shared.kind] = kept.keys, kept.values
        return y

    def _tokens(self, lowered: LoweredLayer, x: Tensor, index: int) -> Tensor | None:
        """A layer's output for x [B, T, K], T > 1, or 1 where keys are another layer's; None if that is not supported."""
        call, layer, shared, heads = self._call, self._modules[index], self._shared[index], lowered.layer.attention.heads
        is_prefill = (x.shape[1] > 1 or shared.reuses) and plain(x) and not getattr(call.past, "offloading", False) and not layer.training
        if not is_prefill or not lowered.prefills or (x.is_cuda and why_not_many(heads, x.dtype, gpu(x.get_device())) is not None):
            return None
        seen = call.masks[index]
        if not self._is_prefill_mask(seen, x.shape[1]):
            return None
        seen = self._shown(seen) if self._eager else seen
        x, mask, per_layer_input = x.contiguous(), None if seen is None else seen[:, 0], self._per_layer_input(index)
        cos, sin = call.rotary[index]
        rope_cache = None if heads.rotary_dim == 0 else (_in_rows(cos), _in_rows(sin))
        if shared.reuses:
            entry = self._reused(layer, shared, x, call.masks[index])
            if entry is None:
                return None
            return prefill(lowered.layer, x, rope_cache, KeyValues(*entry), mask, per_layer_input, name="others")
        number: int = layer.self_attn.layer_idx
        cache: Any = None if call.past is None or number >= len(call.past.layers) else call.past.layers[number]
        if isinstance(cache, StaticLayer) and not cache.is_initialized:
            # A copy from the host would wait for the GPU.
            cache.cumulative_length = torch.zeros_like(cache.cumulative_length, device=x.device)
        if type(cache) is StaticLayer:
            y, kept = _with_static(lowered.layer, x, mask, rope_cache, cache, per_layer_input)
        else:
            update = None if call.past is None else partial(call.past.update, layer_idx=number)
            y, kept = prefill_with(lowered.layer, x, rope_cache, update, mask, per_layer_input)
        if shared.provides:
            call.shared[shared.kind] = kept
        return y if lowered.layer.mlp is not None else _add_mlp(layer, lowered.spec, y)

    def _is_decode_mask(self, mask: Tensor | None, size: int) -> bool:
        """Whether `attend` does with it what the layer's attention does. Eager attention without one sees places where no token is."""
        if mask is None:
            return not self._eager
        return mask.shape[1:] == (1, 1, size) and (mask.is_floating_point() if self._eager else mask.dtype == torch.bool)

    def _is_prefill_mask(self, mask: Tensor | None, tokens: int) -> bool:
        """Whether `attend_many` does with it what the layer's attention does. Eager attention without one is not causal."""
        if mask is None:
            return not self._eager
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != tokens:
            return False
        if not self._eager or mask.dtype == torch.bool:  # eager attention would add it
            return not self._eager and mask.dtype == torch.bool
        if id(mask) not in self._visible and mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # to look at the mask waits for the GPU
        shown = self._shown(mask)
        return shown is not None and shown.dtype == torch.bool

    def _reused(self, layer: Part, sharing: SharedKV, x: Tensor, mask: Tensor | None) -> _Entry | None:
        """Keys and values that an earlier layer has left, and before which of them the tokens x are; None where that is not known."""
        past, index, shared = self._call.past, sharing.source, self._call.shared
        if index is None or sharing.kind not in shared or (past is not None and index >= len(past.layers)):
            return None
        keys, values = shared[sharing.kind]
        cache: Any = None if past is None else past.layers[index]
        tokens = x.shape[1]
        if keys.dtype != x.dtype or keys.device != x.device:
            return None
        if type(cache) is StaticLayer:
            return keys, values, cache.cumulative_length - tokens
        if mask is not None:  # which tells of what is there, too
            return (keys, values, None) if mask.shape[3] == keys.shape[2] else None
        window, before = layer.self_attn.sliding_window, keys.shape[2] - tokens
        if isinstance(cache, StaticLayer) or (window is not None and keys.shape[2] > window):
            return None
        return keys, values, torch.full((1,), before, dtype=torch.int64, device=x.device) if before else None


# One token of each sequence


def _is_decode(x: Tensor, layers: Sequence[Any], index: int) -> bool:
    """Whether x is one token of each sequence, with a cache that `attend` supports."""
    return (
        x.shape[1] == 1
        and index < len(layers)
        and type(layers[index]) is StaticLayer
        and layers[index].is_initialized
        and layers[index].keys.dtype == x.dtype
        and layers[index].keys.device == x.device
        and not in_mode()
    )


# Many tokens of each sequence


def _in_rows(table: Tensor) -> Tensor:
    return table if table.stride(-1) == 1 else table.contiguous()


def _with_static(
    layer: GpuLayer, x: Tensor, mask: Tensor | None, rope_cache: Rotary, cache: Any, per_layer_input: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The output, and keys and values."""
    heads = layer.attention.heads
    if not cache.is_initialized:
        new = x.new_empty(len(x), heads.num_kv_heads, 0, heads.head_dim)
        cache.lazy_initialization(new, new)
    y = prefill(layer, x, rope_cache, KeyValues(cache.keys, cache.values, cache.cumulative_length), mask, per_layer_input)
    cache.cumulative_length.add_(x.shape[1])
    return y, (cache.keys, cache.values)


def _add_mlp(layer: Part, spec: LayerSpec, h: Tensor) -> Tensor:
    """Compute a live layer's output from h, that of its attention sublayer, by the modules of transformers."""
    family = family_of(layer)
    assert family is not None
    assert family.norms[2] is not None
    found = getattr(layer, family.mlp)(getattr(layer, family.norms[2])(h))
    y: Tensor = found[0] if isinstance(found, tuple) else found  # gpt-oss's returns its router's weights, too
    factor = spec.attention.residual_multiplier
    return h + (y if factor == 1 else y * factor)


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
