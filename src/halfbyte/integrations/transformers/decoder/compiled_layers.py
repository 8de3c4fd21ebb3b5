"""The layers of a compiled decoder stack on a CPU, and a call through all of them.

Few tokens take consecutive layers in one native call, many tokens one call a layer, as what lies between layers takes memory. A mixture of
experts with more rows than its kernel takes is one call for attention, and transformers' MLP. A layer that is not compiled, or whose cache
or mask is of another kind, is called as transformers calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from halfbyte.decoder.spec import LayerSpec
from halfbyte.integrations.transformers.cache.kv_entry import KVEntry, SharedStates, sees_what_it_should
from halfbyte.integrations.transformers.decoder.live_layer import SharedKV, family_of, is_distributed, needs_eager, shared_kv
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE
from halfbyte.integrations.transformers.optimize.hooked import watched
from halfbyte.ops.transformer.decoder import MOST_SEQUENCES, DecoderLayer, run_layers, why_not

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_FEW_ROWS = 64  # tokens that take several layers at once


@dataclass(frozen=True, eq=False, slots=True)
class CompiledLayer:
    """A layer, lowered for a CPU.

    Attributes:
        spec: Its specification.
        whole: The layer.
        attention: Its attention alone, where `whole` takes few rows: layers with experts.
        shared: How it shares keys and values with other layers.
    """

    spec: LayerSpec
    whole: DecoderLayer
    attention: DecoderLayer | None
    shared: SharedKV

    @property
    def stands_alone(self) -> bool:
        """Whether it depends on more than other layers do, or others on more of it."""
        return self.shared.reuses or self.shared.provides or self.whole.per_layer_width is not None


def compile_layers(stack: Part, specs: Sequence[LayerSpec | str]) -> list[CompiledLayer | str]:
    """Lower each layer of a stack, or say why transformers computes it."""
    return [_compiled(layer, spec, index) for index, (layer, spec) in enumerate(zip(stack.layers, specs, strict=True))]


def _compiled(layer: Part, spec: LayerSpec | str, index: int) -> CompiledLayer | str:
    if isinstance(spec, str):
        return spec
    if (reason := why_not_lowered(layer, spec)) is not None:
        return reason
    if watched(layer):
        return "it has a hook"
    if any("forward" in vars(part) for part in layer.modules()):
        return "the forward of a part was replaced"
    attention = layer.self_attn
    if layer.training or not attention.is_causal or attention.layer_idx != index:
        return "it is in training, not causal, or of another place"
    whole = DecoderLayer(spec.attention, spec.mlp, spec.per_layer_input)
    alone = None if whole.most_rows is None else DecoderLayer(spec.attention, None)
    return CompiledLayer(spec, whole, alone, shared_kv(layer))


def why_not_lowered(layer: Part, spec: LayerSpec) -> str | None:
    """Why native calls do not compute a layer on a CPU, or None."""
    if is_distributed(layer):
        return "its weights are distributed over processes"
    return why_not(spec.attention, spec.mlp, spec.per_layer_input)


class Call(NamedTuple):
    """A call of a stack, as its layers see it.

    Attributes:
        masks: Of each layer: bool [B, 1, t, T], or a float one that is added to scores, or None: causal.
        rotary: Of each layer: cosines and sines [B or 1, t, R].
        past: The cache of all layers, or None.
        positions: As transformers passes them on to layers.
        rope_positions: Those that rope takes.
        per_layer: The layers' own inputs [B, t, L, P], or None.
        shared: Keys and values that layers reuse.
        keep: Number of last tokens whose results are wanted; 0: of all.
        visual: Which tokens are those of images [B, t], or None.
        deepstack: What is added to these after each of the first layers (Qwen3-VL).
    """

    masks: Sequence[Tensor | None]
    rotary: Sequence[tuple[Tensor, Tensor]]
    past: Cache | None
    positions: Tensor | None
    rope_positions: Tensor
    per_layer: Tensor | None
    shared: SharedStates
    keep: int | Tensor
    visual: Tensor | None
    deepstack: Sequence[Tensor]

    def cut(self, tokens: int) -> Call:
        """The same for the last tokens alone."""
        masks = [None if mask is None else mask[:, :, -tokens:] for mask in self.masks]
        rotary = [(cos[:, -tokens:], sin[:, -tokens:]) for cos, sin in self.rotary]
        per_layer_input = None if self.per_layer is None else self.per_layer[:, -tokens:]
        return self._replace(masks=masks, rotary=rotary, per_layer=per_layer_input, keep=0)


class Run:
    """A call through all layers of a stack, each computed as transformers does it; subclasses compute them natively."""

    def __init__(self, stack: Part, call: Call) -> None:
        self._modules, self._call = stack.layers, call
        self._shared = [shared_kv(layer) for layer in stack.layers]
        self._shares = any(shared.kind is not None for shared in self._shared)
        self._visible: dict[int, Tensor | None] = {}  # by the ids of masks, which several layers have in common

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the hidden states [B, t, K] after the last layer."""
        index, count = 0, len(self._modules)
        while index < count:
            keep = self._call.keep
            if self._shares and type(keep) is int and self._may_cut(index, x, keep):
                x, self._call = x[:, -keep:], self._call.cut(keep)
            x, index = self._some(x, index)
            if index <= len(self._call.deepstack):
                x = self._with_visual(x, self._call.deepstack[index - 1])
        return x

    def _some(self, x: Tensor, first: int) -> tuple[Tensor, int]:
        """The hidden states after the layer `first`, or after more, and the index of the next one."""
        return self._by_transformers(x, first), first + 1

    def _by_transformers(self, x: Tensor, index: int) -> Tensor:
        call, module = self._call, self._modules[index]
        more: dict[str, object] = {"use_cache": call.past is not None, KV_CACHE: call.past}
        if call.per_layer is not None:
            more["per_layer_input"] = call.per_layer[:, :, index]
        if self._shares:
            more["shared_kv_states"] = call.shared
        positions = {"position_ids": call.positions, "position_embeddings": call.rotary[index]}
        y: Tensor = module(x, attention_mask=call.masks[index], **positions, **more)
        return y

    def _shown(self, mask: Tensor | None) -> Tensor | None:
        """`visible` of a mask of the call."""
        if mask is None:
            return None
        if id(mask) not in self._visible:
            self._visible[id(mask)] = visible(mask)
        return self._visible[id(mask)]

    def _may_cut(self, first: int, x: Tensor, keep: int) -> bool:
        """Whether the layers from one on need the last tokens alone, as they add no keys and values (Gemma 4)."""
        if not 0 < keep < x.shape[1] or not all(shared.reuses for shared in self._shared[first:]):
            return False
        # Without a mask torch's attention takes tokens for the first ones of a text, not for the last.
        known_places = all(mask is not None for mask in self._call.masks)
        return known_places or (keep == 1 and not getattr(self._call.past, "is_compileable", False))

    def _with_visual(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """Add the embeddings [n, K] of images to the hidden states of their tokens."""
        visual = self._call.visual
        if visual is None:
            return x
        y = x.clone()
        y[visual] += embeddings.to(x.dtype)
        return y


class CpuRun(Run):
    """A call through the layers that are compiled for a CPU."""

    def __init__(self, layers: Sequence[CompiledLayer | str], stack: Part, call: Call) -> None:
        super().__init__(stack, call)
        self._compiled = layers
        self._eager: bool = stack.config._attn_implementation == "eager"
        self._later: dict[tuple[int, int, int], bool] = {}

    def _some(self, x: Tensor, first: int) -> tuple[Tensor, int]:
        """The hidden states after the layer `first`, or after more, and the index of the next one."""
        call, layers, entries = self._call, list[DecoderLayer](), list[KVEntry]()
        rows = x.shape[0] * x.shape[1]
        for index in range(first, len(self._compiled)):
            layer = self._compiled[index]
            if isinstance(layer, str) or (layer.whole.most_rows is not None and rows > layer.whole.most_rows):
                break
            one_by_one = rows > _FEW_ROWS or layer.stands_alone or index <= len(call.deepstack)
            if index > first and (one_by_one or not self._same_kernels(index, first)):
                break
            entry = self._entry(layer, layer.whole, index, x)
            if entry is None:
                break
            layers.append(layer.whole)
            entries.append(entry)
            if layer.stands_alone:
                break
        if not layers:
            return self._one(x, first), first + 1
        per_layer_input = None if layers[0].per_layer_width is None or call.per_layer is None else call.per_layer[:, :, first]
        mask = self._shown(call.masks[first])
        y = run_layers(layers, x, call.rotary[first], entries, mask, per_layer_input)[-1]
        for index, entry in enumerate(entries, first):
            self._enter(index, entry, x)
        return y, first + len(layers)

    def _same_kernels(self, index: int, other: int) -> bool:
        """Whether two layers have the same mask and rope."""
        return self._call.masks[index] is self._call.masks[other] and self._call.rotary[index] is self._call.rotary[other]

    def _one(self, x: Tensor, index: int) -> Tensor:
        """A layer that is no native call, or one for attention alone."""
        layer, module, call = self._compiled[index], self._modules[index], self._call
        entry = None
        if isinstance(layer, CompiledLayer) and layer.attention is not None and not layer.stands_alone:
            entry = self._entry(layer, layer.attention, index, x)
        if entry is None or isinstance(layer, str) or layer.attention is None:
            return self._by_transformers(x, index)
        (h,) = run_layers((layer.attention,), x, call.rotary[index], (entry,), self._shown(call.masks[index]))
        self._enter(index, entry, x)
        return add_mlp(module, layer.spec, h)

    def _entry(self, layer: CompiledLayer, part: DecoderLayer, index: int, x: Tensor) -> KVEntry | None:
        """Where the keys and values of tokens go, or lie; None where the layer is not to be computed natively."""
        call, module, mask = self._call, self._modules[index], self._call.masks[index]
        seen, past = self._shown(mask), self._call.past
        if (
            not 0 < x.shape[0] <= MOST_SEQUENCES
            or call.rotary[index][0].dim() != 3
            or not part.accepts_rope_of(call.rotary[index][0].shape[2])
        ):
            return None
        if (part.per_layer_width is None) != (call.per_layer is None) or not self._is_mask(layer, mask, seen):
            return None
        if layer.shared.reuses:
            entry = KVEntry.reuse(module, layer.shared, x, seen, past, call.shared)
        elif past is not None and index >= len(past.layers):
            return None
        else:
            cache = None if past is None else past.layers[index]
            if not sees_what_it_should(cache, x.shape[1], seen):
                return None
            entry = KVEntry.find(cache, x, part.heads.num_kv_heads, part.heads.head_dim)
        return None if entry is None or self._sees_later(seen, x.shape[1], entry.length) else entry

    def _enter(self, index: int, entry: KVEntry, x: Tensor) -> None:
        layer, call = self._compiled[index], self._call
        assert isinstance(layer, CompiledLayer)
        if layer.shared.reuses:
            return
        cache: object = None if call.past is None else call.past.layers[index]
        entry.enter(cache, x.shape[1])
        if layer.shared.provides:
            call.shared[layer.shared.kind] = entry.all_states(cache, x, layer.whole.heads.head_dim)

    def _is_mask(self, layer: CompiledLayer, mask: Tensor | None, seen: Tensor | None) -> bool:
        """Whether `mask`, of which `seen` was made, is one for the layer's formula. Eager attention adds its mask, one of
        booleans, too, which then hides nothing, and is not causal without one."""
        if needs_eager(layer.spec) > self._eager or (self._eager and mask is None):
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


def add_mlp(layer: Part, spec: LayerSpec, h: Tensor) -> Tensor:
    """The output of a live layer from that of its attention half, h, by the modules of transformers."""
    family = family_of(layer)
    assert family is not None
    assert family.norms[2] is not None
    found = getattr(layer, family.mlp)(getattr(layer, family.norms[2])(h))
    y: Tensor = found[0] if isinstance(found, tuple) else found  # gpt-oss's returns its router's weights, too
    factor = spec.attention.residual_multiplier
    return h + (y if factor == 1 else y * factor)


def visible(mask: Tensor | None, hidden: float | None = None) -> Tensor | None:
    """The bool mask that does what one does which is added to scores, if it has nothing but 0 and at most `hidden`, by default the least
    number or -inf; or as it is."""
    if mask is None or not mask.is_floating_point():
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= (torch.finfo(mask.dtype).min if hidden is None else hidden))).all()) else mask
