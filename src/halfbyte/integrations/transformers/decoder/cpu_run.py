"""A call through the layers of a decoder stack that are lowered for a CPU.

Few tokens take consecutive layers in one native call, many tokens one call a layer, as what lies between layers takes memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.decoder.spec import LayerSpec
from halfbyte.integrations.transformers.cache.kv_entry import KVEntry, sees_what_it_should
from halfbyte.integrations.transformers.decoder.live_layer import is_distributed, needs_eager
from halfbyte.integrations.transformers.decoder.run import Call, LayerKinds, Run
from halfbyte.ops.transformer.decoder import MOST_SEQUENCES, DecoderLayer, run_layers, why_not
from halfbyte.ops.transformer.sublayers import Heads

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_FEW_ROWS = 64  # tokens that take several layers at once


def lower_layer(layer: Part, spec: LayerSpec | str) -> DecoderLayer | str:
    """Lower a layer, or say why transformers computes it."""
    if isinstance(spec, str):
        return spec
    return why_not_lowered(layer, spec) or DecoderLayer(spec.attention, spec.mlp, spec.per_layer_input)


def why_not_lowered(layer: Part, spec: LayerSpec) -> str | None:
    """Why native calls do not compute a layer on a CPU, or None."""
    if is_distributed(layer):
        return "its weights are distributed over processes"
    return why_not(spec.attention, spec.mlp, spec.per_layer_input)


class CpuRun(Run):
    """A call through the layers that are lowered for a CPU."""

    def __init__(self, layers: Sequence[DecoderLayer | str], stack: Part, kinds: LayerKinds, call: Call) -> None:
        """Prepare a call. layers: Lowered, or the reason why transformers computes one."""
        super().__init__(stack, kinds, call)
        self._lowered = layers
        self._later: dict[tuple[int, int, int], bool] = {}  # results of `_sees_later`

    def _next_layers(self, x: Tensor, first: int) -> tuple[Tensor, int]:
        """`Run._next_layers`: as many layers as one native call computes."""
        call, layers, entries = self._call, list[DecoderLayer](), list[KVEntry]()
        for index in range(first, len(self._lowered)):
            layer = self._lowered[index]
            if isinstance(layer, str) or (index > first and not self._joins(index, first, x.shape[0] * x.shape[1])):
                break
            if (entry := self._entry(layer, index, x)) is None:
                break
            layers.append(layer)
            entries.append(entry)
        if not layers:
            return self._by_transformers(x, first), first + 1
        per_layer_input = None if call.per_layer is None else call.per_layer[:, :, first]
        y = run_layers(layers, x, call.rotary[first], entries, self._as_bool_mask(call.masks[first]), per_layer_input)
        for index, entry in enumerate(entries, first):
            self._enter(index, entry, x)
        return y, first + len(layers)

    def _joins(self, index: int, first: int, rows: int) -> bool:
        """Whether the layer `index` may be computed in the native call of the layers from `first` on, for x of so many rows."""
        call = self._call
        return (
            rows <= _FEW_ROWS
            and call.masks[index] is call.masks[first]
            and call.rotary[index] is call.rotary[first]
            and call.per_layer is None
            and index > len(call.deepstack)
            and all(self._kv_sharing[one].kind is None for one in (index, first))
            and all(isinstance(layer, DecoderLayer) and layer.fits(rows) for layer in (self._lowered[index], self._lowered[first]))
        )

    def _entry(self, layer: DecoderLayer, index: int, x: Tensor) -> KVEntry | None:
        """Where the keys and values of tokens go, or lie; None where the layer is not to be computed natively."""
        call, heads, shared = self._call, layer.heads, self._kv_sharing[index]
        mask, past, (cos, _) = call.masks[index], call.past, call.rotary[index]
        seen = self._as_bool_mask(mask)
        if not 0 < x.shape[0] <= MOST_SEQUENCES or cos.dim() != 3 or not heads.accepts_rope_of(cos.shape[2]):
            return None
        if (layer.per_layer_width is None) != (call.per_layer is None) or not self._is_mask(heads, mask, seen):
            return None
        if shared.reuses:
            states = self._shared_states(index, x)
            entry = None if states is None else KVEntry.reuse(*states, x.shape[1])
        elif past is not None and index >= len(past.layers):
            return None
        else:
            cache = None if past is None else past.layers[index]
            if not sees_what_it_should(cache, x.shape[1], seen):
                return None
            entry = KVEntry.find(cache, (*x.shape[:2],), self._dtype, heads.num_kv_heads, heads.head_dim)
        return None if entry is None or self._sees_later(seen, x.shape[1], entry.length) else entry

    def _enter(self, index: int, entry: KVEntry, x: Tensor) -> None:
        """Count the tokens x in the cache, and provide their keys and values to later layers that reuse them."""
        call, shared, layer = self._call, self._kv_sharing[index], self._lowered[index]
        if shared.reuses:
            return
        cache: object = None if call.past is None else call.past.layers[index]
        entry.enter(cache, x.shape[1])
        if shared.provides:
            assert isinstance(layer, DecoderLayer)
            call.shared[shared.kind] = entry.all_states(cache, x.shape[1], self._dtype, layer.heads.head_dim)

    def _is_mask(self, heads: Heads, mask: Tensor | None, seen: Tensor | None) -> bool:
        """Whether `mask`, of which `seen` was made, is one for the layer's formula. Eager attention adds its mask, one of
        booleans, too, which then hides nothing, and is not causal without one."""
        if needs_eager(heads) > self._eager or (self._eager and mask is None):
            return False
        return seen is None or (seen.dtype == torch.bool and seen.dim() == 4 and seen.shape[1] == 1 and (mask is seen) != self._eager)

    def _sees_later(self, mask: Tensor | None, tokens: int, length: int) -> bool:
        """Whether a mask shows tokens others behind them, as those of images see each other (Gemma 3), which native calls do not do."""
        if mask is None or tokens == 1:
            return False
        key = id(mask), tokens, length
        if key not in self._later:
            self._later[key] = bool(mask.expand(-1, -1, tokens, -1).triu(length + 1).any())
        return self._later[key]
