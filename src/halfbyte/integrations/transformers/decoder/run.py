"""A call through all layers of a decoder stack: `prepare` computes what layers are called with (`Call`), `Run` calls them.

`Run` calls each layer as transformers does. Its subclasses, `CpuRun` (cpu_run.py) and `GpuRun` (gpu_run.py), compute natively what they can
and leave other layers to it: layers that are not compiled, and those whose cache or mask is of another kind. Called by `stack.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from halfbyte.decoder.family import SLIDING, Family
from halfbyte.integrations.transformers.cache.kv_entry import SharedStates
from halfbyte.integrations.transformers.decoder.live_layer import SharedKV, family_of, shared_kv
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE, Arguments

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Config, Part

FULL = "full_attention"  # with SLIDING the kinds of a stack's masks


class Call(NamedTuple):
    """What the layers of a stack are called with.

    Attributes:
        masks: Of each layer: bool [B, 1, t, T], or a float one that is added to scores, or None: causal.
        rotary: Of each layer: cosines and sines [B or 1, t, R].
        past: The cache of all layers, or None.
        positions: As transformers passes them on to layers.
        rope_positions: Those that rope takes.
        per_layer: The per-layer inputs of all layers, [B, t, L, P], or None.
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


class LayerKinds(NamedTuple):
    """In what the layers of a stack differ, for each layer.

    Attributes:
        family: The family of the stack.
        masks: FULL or SLIDING: which mask a layer takes.
        windows: Its sliding window, or None.
        ropes: The type of layers whose rotary embedding it takes; "" where all layers take the same.
        kv_sharing: How it shares keys and values with others.
    """

    family: Family
    masks: list[str]
    windows: list[int | None]
    ropes: list[str]
    kv_sharing: list[SharedKV]


def layer_kinds(stack: Part) -> LayerKinds | None:
    """Return in what the layers of a stack differ; None if they are of no known family."""
    family, config, count = family_of(stack.layers[0]), stack.config, len(stack.layers)
    if family is None:
        return None
    types = list(getattr(config, "layer_types", None) or [FULL] * count)
    window: int | None = getattr(config, "sliding_window", None)
    masks = types
    if family.sliding_window != "layer_types":
        masks = [SLIDING if family.sliding_window == "all" and window is not None else FULL] * count
    windows = [window if kind == SLIDING else None for kind in masks]
    return LayerKinds(family, masks, windows, types if family.rope_per_type else [""] * count, [*map(shared_kv, stack.layers)])


def prepare(stack: Part, kinds: LayerKinds, call: Arguments, past: Cache | None) -> tuple[Tensor, Call] | None:
    """Compute what transformers' forward of the stack computes before its first layer.

    Args:
        stack: The module of transformers.
        kinds: In what its layers differ.
        call: Its arguments.
        past: The KV cache, or None.

    Returns:
        The input of the first layer [B, t, K], and what all layers are called with; None if transformers has to compute the call.
    """
    ids, mask = call.get("input_ids"), call.get("attention_mask")
    x: Tensor = stack.embed_tokens(ids) if ids is not None else call["inputs_embeds"]
    if x.dim() != 3:
        return None
    per_layer = _per_layer_inputs(stack, call, x)
    if kinds.family.embedding_multiplier is not None:
        x = x * getattr(stack, kinds.family.embedding_multiplier)
    text, rope_positions = _positions(call.get("position_ids"), x, past, mrope=kinds.family.mrope)
    masks = {kind: _mask(stack.config, kind, mask, x, past, text) for kind in sorted({*kinds.masks})}
    rotary = {kind: stack.rotary_emb(x, rope_positions, *([kind] if kind else [])) for kind in sorted({*kinds.ropes})}
    return x, Call(
        masks=[masks[kind] for kind in kinds.masks],
        rotary=[rotary[kind] for kind in kinds.ropes],
        past=past,
        positions=text,
        rope_positions=rope_positions,
        per_layer=per_layer,
        shared={},
        keep=call.get("logits_to_keep", 0),
        visual=call.get("visual_pos_masks"),
        deepstack=call.get("deepstack_visual_embeds", ()),
    )


def _per_layer_inputs(stack: Part, call: Arguments, x: Tensor) -> Tensor | None:
    """Compute the per-layer inputs of all layers, [B, t, L, P] (Gemma 4); None where layers have none."""
    if not getattr(stack, "hidden_size_per_layer_input", 0):
        return None
    given = call.get("per_layer_inputs")
    rows = stack.get_per_layer_inputs(call.get("input_ids"), x) if given is None else given
    per_layer: Tensor = stack.project_per_layer_inputs(x, rows)
    return per_layer


def _positions(given: Tensor | None, x: Tensor, past: Cache | None, *, mrope: bool) -> tuple[Tensor | None, Tensor]:
    """Return the positions of tokens in the text, [B or 1, t] or None, and those that rope takes: the same, or [3, B, t] with `mrope`."""
    if given is None:
        before = 0 if past is None else past.get_seq_length()  # of a static cache a tensor, which is not to be waited for
        given = (torch.arange(x.shape[1], device=x.device) + before)[None]
    if not mrope:
        return given, given
    if given.dim() == 2:
        return None, given[None].expand(3, x.shape[0], -1)
    return (given[0], given[1:]) if len(given) == 4 else (None, given)


def _mask(config: Config, kind: str, given: Any, x: Tensor, past: Cache | None, positions: Tensor | None) -> Tensor | None:
    """Return the mask of layers of a kind, FULL or SLIDING, as transformers makes it; `given`: the call's mask, or masks by kind."""
    if isinstance(given, Mapping):
        of_kind: Tensor | None = given[kind]
        return of_kind
    make = create_sliding_window_causal_mask if kind == SLIDING else create_causal_mask
    mask: Tensor | None = make(config, x, given, position_ids=positions, **{KV_CACHE: past})
    return mask


class Run:
    """A call through all layers of a stack, each computed as transformers does it; subclasses compute them natively."""

    def __init__(self, stack: Part, kinds: LayerKinds, call: Call) -> None:
        """Prepare a call of a stack, whose layers are of these kinds."""
        self._modules, self._call = stack.layers, call
        self._eager: bool = stack.config._attn_implementation == "eager"  # whose masks are added to scores
        self._kv_sharing = kinds.kv_sharing
        self._has_kv_sharing = any(shared.kind is not None for shared in self._kv_sharing)
        self._bool_masks: dict[int, Tensor | None] = {}  # memoized `visible`, by id(mask): layers share masks

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the hidden states [B, t, K] after the last layer. Between layers they may be float32, whatever x's dtype."""
        index, count = 0, len(self._modules)
        self._dtype = x.dtype
        while index < count:
            keep = self._call.keep
            if self._has_kv_sharing and type(keep) is int and self._may_cut(index, x, keep):
                x, self._call = x[:, -keep:], self._call.cut(keep)
            x, index = self._next_layers(x, index)
            if index <= len(self._call.deepstack):
                x = self._with_visual(x, self._call.deepstack[index - 1])
        return x.to(self._dtype)

    def _next_layers(self, x: Tensor, first: int) -> tuple[Tensor, int]:
        """Compute the layer `first`, or several from it on. Return their hidden states [B, t, K] and the index of the layer after them."""
        return self._by_transformers(x, first), first + 1

    def _by_transformers(self, x: Tensor, index: int) -> Tensor:
        call, module = self._call, self._modules[index]
        more: dict[str, object] = {"use_cache": call.past is not None, KV_CACHE: call.past}
        if call.per_layer is not None:
            more["per_layer_input"] = call.per_layer[:, :, index]
        if self._has_kv_sharing:
            more["shared_kv_states"] = call.shared
        positions = {"position_ids": call.positions, "position_embeddings": call.rotary[index]}
        y: Tensor = module(x.to(self._dtype), attention_mask=call.masks[index], **positions, **more)
        return y

    def _shared_states(self, index: int, x: Tensor) -> tuple[Tensor, Tensor, Any] | None:
        """Find keys and values [B, Hkv, T, D] that an earlier layer provides to this one, those of the tokens x [B, t, K] included.

        Returns:
            These, and the layer of the cache that has them, or None; None if there are none, or if it is not known which are those of x.
        """
        source, past, mask = self._kv_sharing[index].source, self._call.past, self._call.masks[index]
        states = self._call.shared.get(self._kv_sharing[index].kind)
        if states is None or source is None or (past is not None and source >= len(past.layers)):
            return None
        (keys, values), cache_layer = states, None if past is None else past.layers[source]
        size, window = keys.shape[2], self._modules[index].self_attn.sliding_window
        if mask is not None:  # it masks later tokens
            is_known = mask.shape[3] == size
        elif isinstance(cache_layer, StaticLayer):  # others of fixed size are ring buffers
            is_known = type(cache_layer) is StaticLayer
        else:
            is_known = window is None or size <= window
        is_known = is_known and keys.dtype == self._dtype and keys.device == x.device
        return (keys, values, cache_layer) if is_known else None

    def _as_bool_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the equivalent bool mask of a mask of the call, or that mask if there is none (`visible`). Synchronizes with a GPU."""
        if mask is None:
            return None
        if id(mask) not in self._bool_masks:
            self._bool_masks[id(mask)] = visible(mask)
        return self._bool_masks[id(mask)]

    def _may_cut(self, first: int, x: Tensor, keep: int) -> bool:
        """Whether the layers from one on need the last tokens alone, as they add no keys and values (Gemma 4)."""
        if not 0 < keep < x.shape[1] or not all(shared.reuses for shared in self._kv_sharing[first:]):
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


def visible(mask: Tensor | None, hidden: float | None = None) -> Tensor | None:
    """The bool mask that does what one does which is added to scores, if it has nothing but 0 and at most `hidden`, by default the least
    number or -inf; or as it is."""
    if mask is None or not mask.is_floating_point():
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= (torch.finfo(mask.dtype).min if hidden is None else hidden))).all()) else mask
