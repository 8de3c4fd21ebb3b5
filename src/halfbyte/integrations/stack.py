"""Decoder stacks of transformers on a CPU: `optimize_` compiles all layers of one into `CompiledStack`, and replaces the stack's forward.

    x = layers(embedding_multiplier * embed_tokens(ids));  y = norm(x)                         [B, t, K]

The replaced forward accepts the arguments in ARGUMENTS; every other call, gradients, training, torch.compile and requests for hidden
states or attentions take transformers' forward. Layers that `ops.decoder` does not compute, as those with hooks or without quantized
weights, are called as transformers calls them, between the others. Nothing is watched: before each call `Frozen` compares everything that
the stack consists of, and the stack is compiled again if something has changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import ModelOutput

from halfbyte.decoder.family import SLIDING, Family
from halfbyte.integrations import decoding_gpu
from halfbyte.integrations.calls import CACHE, KV_CACHE, Understood, any_value, bind, is_true, unset, why_unknown
from halfbyte.integrations.compiled_layers import Call, CompiledLayer, Run, compile_layers
from halfbyte.integrations.families import family_of, lender, nearest
from halfbyte.integrations.frozen import Frozen
from halfbyte.integrations.hooked import is_capturing, watched
from halfbyte.integrations.shortened import Shortened, original, shorten
from halfbyte.integrations.token_step import Logits, TokenStep, why_no_step
from halfbyte.nn.modules import has_global_hooks
from halfbyte.ops.layers import Weight
from halfbyte.ops.library import plain

LAYER_BY_LAYER = "its layers are called one by one"
FULL = "full_attention"
# Of a stack's call.
ARGUMENTS: Understood = {
    **dict.fromkeys(("input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE, "use_cache"), any_value),
    **dict.fromkeys(("per_layer_inputs", "logits_to_keep"), any_value),  # Gemma 4
    **dict.fromkeys(("cache_position", "token_type_ids", "mm_token_type_ids"), any_value),  # the mask tells what they do
    "num_items_in_batch": any_value,
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), unset),
    **dict.fromkeys(("shared_kv_states", "return_shared_kv_states"), unset),
    **dict.fromkeys(("visual_pos_masks", "deepstack_visual_embeds"), any_value),  # Qwen3-VL
    **dict.fromkeys(("return_dict", "is_causal"), is_true),
}
_ATTENTION = ("sdpa", "halfbyte", "eager")  # others have masks of other kinds


def is_stack(module: Any) -> bool:
    """Whether a module is the stack of decoder layers of a known family."""
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers) or (family := family_of(layers[0])) is None:
        return False
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("embed_tokens", family.final_norm, "rotary_emb"))


def is_compiled_stack(module: Any) -> bool:
    """Whether the forward of a module was replaced by `compile_stack`."""
    return isinstance(module, _Stack)


def compile_stack(stack: nn.Module) -> None:
    """Replace the forward of a stack, in place, or note for the report why it is not replaced."""
    if not isinstance(stack, _Stack):
        shorten(stack, _Stack, LAYER_BY_LAYER, why_unknown(original(stack), ARGUMENTS) or why_unknown_output(original(stack)))


class _Stack(Shortened):
    """Precedes the class of a stack."""

    keeps_name = True

    @property
    def halfbyte_remark(self) -> str:
        """What `halfbyte.report` says of the stack."""
        stack: Any = self
        if next(stack.parameters()).device.type != "cpu":
            return ""
        found = compiled(self)
        return found if isinstance(found, str) else found.remark

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (call := bind(self.argument_names, args, kwargs, ARGUMENTS)) is not None:
            found = _run(self, call)
            if found is not None:
                x, past = found
                return output_class(original(self))(last_hidden_state=x, **{KV_CACHE: past})
        # super() in a class that is made at run time: torch.compile follows the plain call.
        return super().forward(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def output_class(cls: Any) -> Any:
    """The class of a stack's output, the only one that its forward makes; None if there is none. Annotations are not always right."""
    forward = inspect.unwrap(cls.forward)
    names = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    found = {one for one in names if isinstance(one, type) and issubclass(one, ModelOutput)}
    return found.pop() if len(found) == 1 else None


def why_unknown_output(cls: type) -> str | None:
    return f"the forward of a {cls.__name__} makes outputs of an unknown class" if output_class(cls) is None else None


def _run(stack: Any, call: dict[str, Any]) -> tuple[Tensor, Any] | None:
    """The normed hidden states and the cache; None if transformers has to compute them."""
    if "cpu" in decoding_gpu.DEVICES:  # a CPU stands in for a GPU, in tests
        return None
    given = call.get("input_ids", call.get("inputs_embeds"))
    if not isinstance(given, Tensor) or ("input_ids" in call and "inputs_embeds" in call) or not given.is_cpu or not given.numel():
        return None
    if torch.is_grad_enabled() or stack.training or not plain(given) or has_global_hooks() or is_capturing():
        return None
    past, use_cache = call.get(CACHE), call.get("use_cache", stack.config.use_cache)
    if past is None and use_cache:
        past = DynamicCache(config=stack.config)
    if past is not None and not (use_cache and isinstance(past, Cache)):
        return None
    found = compiled(stack)
    return None if isinstance(found, str) or (x := found.run(stack, call, past)) is None else (x, past)


_stacks: WeakKeyDictionary[nn.Module, tuple[CompiledStack | str, Frozen]] = WeakKeyDictionary()


def compiled(stack: Any) -> CompiledStack | str:
    """The compiled stack as it is now, or why its layers are called one by one."""
    held = _stacks.get(stack)
    if held is None or not held[1].is_unchanged():
        reason = _why_not(stack)
        held = _stacks[stack] = CompiledStack(stack) if reason is None else reason, Frozen(stack, _rewritten(stack))
    return held[0]


def _rewritten(stack: Any) -> tuple[nn.Module, ...]:
    """Submodules that replace their buffers at each call: ropes whose frequencies depend on the length of the text."""
    kinds = getattr(stack.rotary_emb, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return (stack.rotary_emb,) if any("dynamic" in str(kind) or kind == "longrope" for kind in kinds) else ()


def _why_not(stack: Any) -> str | None:
    """Why no layer of a stack is compiled, or None."""
    layers, config = stack.layers, stack.config
    if config.num_hidden_layers != len(layers):
        return f"{LAYER_BY_LAYER}: it has {len(layers)} layers, its config {config.num_hidden_layers}"
    if len({original(layer) for layer in layers}) > 1:
        return f"{LAYER_BY_LAYER}: they are of several classes"
    if config._attn_implementation not in _ATTENTION:
        return f"{LAYER_BY_LAYER}: its attention is {config._attn_implementation}, not {' or '.join(_ATTENTION)}"
    if other := {*(getattr(config, "layer_types", None) or ())} - {FULL, SLIDING}:
        return f"{LAYER_BY_LAYER}: some are of type {min(other)}"
    if any(getattr(config, name, False) for name in ("output_hidden_states", "output_attentions", "output_router_logits")):
        return f"{LAYER_BY_LAYER}: its config asks for what they give"
    if not getattr(config, "return_dict", True):
        return f"{LAYER_BY_LAYER}: its config has return_dict = False"
    return None


class CompiledStack:
    """What `ops.decoder` needs of all layers of a stack, which must not have changed.

    Attributes:
        layers: A compiled layer for each, or the reason why transformers computes it.
    """

    def __init__(self, stack: Any) -> None:
        """Compile a stack for which `_why_not` has no reason."""
        self.family: Family = family_of(stack.layers[0]) or Family("")
        config, count = stack.config, len(stack.layers)
        types = list(getattr(config, "layer_types", None) or [FULL] * count)
        window: int | None = getattr(config, "sliding_window", None)
        if self.family.sliding_window == "none":
            self.kinds = [FULL] * count
        elif self.family.sliding_window == "all":
            self.kinds = [FULL if window is None else SLIDING] * count
        else:
            self.kinds = types
        self.windows = [window if kind == SLIDING else None for kind in self.kinds]
        self.ropes = types if self.family.rope_per_type else [""] * count
        self.layers: list[CompiledLayer | str] = compile_layers(stack)
        self.query_scale_from = nearest(stack.layers[0])
        self._steps: dict[tuple[int, Logits], TokenStep | None] = {}

    @property
    def remark(self) -> str:
        """What `halfbyte.report` says."""
        left = [f"layer {index}: {layer}" for index, layer in enumerate(self.layers) if isinstance(layer, str)]
        return "; ".join([f"{len(self.layers) - len(left)} of {len(self.layers)} layers take native calls", *left])

    def run(self, stack: Any, call: Mapping[str, Any], past: Cache | None) -> Tensor | None:
        """Compute the normed hidden states; None if transformers has to."""
        ids, mask, positions = (call.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if ids is not None and ids.dim() == 2 and ids.shape[1] == 1 and past is not None and not isinstance(mask, Mapping):
            step = self.step(stack)
            y = None if step is None else step(ids, mask, positions, past.layers)
            if y is not None:
                return y
        x: Tensor = stack.embed_tokens(ids) if ids is not None else call["inputs_embeds"]
        if x.dim() != 3:
            return None
        per_layer = _per_layer_inputs(stack, call, x)
        if self.family.embedding_multiplier is not None:
            x = x * getattr(stack, self.family.embedding_multiplier)
        text, places = _positions(positions, x, past, mrope=self.family.mrope)
        if self.query_scale_from is not None and int(places.max()) >= self.query_scale_from:
            return None
        masks = {kind: _mask(stack.config, kind, mask, x, past, text) for kind in {*self.kinds}}
        rotary = {kind: stack.rotary_emb(x, places, *([kind] if kind else [])) for kind in {*self.ropes}}
        layer_call = Call(
            masks=[masks[kind] for kind in self.kinds],
            rotary=[rotary[kind] for kind in self.ropes],
            past=past,
            positions=text,
            per_layer=per_layer,
            shared={},
            keep=call.get("logits_to_keep", 0),
            visual=call.get("visual_pos_masks"),
            deepstack=call.get("deepstack_visual_embeds", ()),
        )
        normed: Tensor = getattr(stack, self.family.final_norm)(Run(self.layers, stack, layer_call)(x))
        return normed

    def step(self, stack: Any, head: Weight | None = None, logits: Logits = None) -> TokenStep | None:
        """The decode step of the whole stack; None if some of it is not compiled.

        Args:
            stack: The module of transformers.
            head: The model's output embedding, if the step is to end with logits.
            logits: Function of the logits.
        """
        key = 0 if head is None else id(head.packed.data), logits
        if key not in self._steps:
            self._steps[key] = self._new_step(stack, head, logits)
        return self._steps[key]

    def _new_step(self, stack: Any, head: Weight | None, logits: Logits) -> TokenStep | None:
        layers = [layer for layer in self.layers if isinstance(layer, CompiledLayer)]
        reuses = [layer.reuses for layer in layers]
        if len(layers) < len(self.layers) or reuses != sorted(reuses) or any(window is not None and window < 2 for window in self.windows):
            return None
        if any(layer.eager for layer in layers) and stack.config._attn_implementation != "eager":
            return None
        per_layer = layers[0].whole.beside is not None
        if why_no_step(stack, self.family, per_layer=per_layer) is not None:
            return None
        if any(watched(part) or "forward" in vars(part) for part in stack.modules() if part is not stack):
            return None
        sources = [index if not reuse else lender(stack.layers[index]) for index, reuse in enumerate(reuses)]
        return TokenStep(
            stack,
            self.family,
            [layer.whole for layer in layers],
            windows=self.windows,
            ropes=self.ropes,
            sources=[index for index in sources if index is not None],
            query_scale_from=self.query_scale_from,
            head=head,
            logits=logits,
        )


def _per_layer_inputs(stack: Any, call: Mapping[str, Any], x: Tensor) -> Tensor | None:
    """The layers' own inputs [B, t, L, P] (Gemma 4); None where they have none."""
    if not getattr(stack, "hidden_size_per_layer_input", 0):
        return None
    given = call.get("per_layer_inputs")
    found: Tensor = stack.project_per_layer_inputs(x, stack.get_per_layer_inputs(call.get("input_ids"), x) if given is None else given)
    return found


def _positions(given: Tensor | None, x: Tensor, past: Cache | None, *, mrope: bool) -> tuple[Tensor | None, Tensor]:
    """The positions of tokens in the text [B or 1, t], or None, and those that rope takes, [3, B, t] where it has three axes."""
    if given is None:
        before = 0 if past is None else past.get_seq_length()
        given = torch.arange(before, before + x.shape[1], device=x.device)[None]
    if not mrope:
        return given, given
    if given.dim() == 2:
        return None, given[None].expand(3, x.shape[0], -1)
    return (given[0], given[1:]) if len(given) == 4 else (None, given)


def _mask(config: Any, kind: str, given: Any, x: Tensor, past: Cache | None, positions: Tensor | None) -> Tensor | None:
    """The mask of a type of layers, as transformers makes it."""
    if isinstance(given, Mapping):
        found: Tensor | None = given[kind]
        return found
    make = create_sliding_window_causal_mask if kind == SLIDING else create_causal_mask
    mask: Tensor | None = make(config, x, given, position_ids=positions, **{KV_CACHE: past})
    return mask
