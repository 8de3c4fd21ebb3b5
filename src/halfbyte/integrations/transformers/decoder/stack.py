"""Decoder stacks of transformers: `optimize_` compiles all layers of one into `CompiledStack`, and replaces the stack's forward.

    x = layers(embedding_multiplier * embed_tokens(ids));  y = norm(x)                         [B, t, K]

The replaced forward accepts the arguments in ARGUMENTS; every other call, gradients, training and requests for hidden states or attentions
take transformers' forward, and so does torch.compile on a CPU. Layers that have no kernels on the device, as those with hooks or without
quantized weights, are called as transformers calls them, between the others. Nothing is watched: before each call `FrozenLayers` compares
everything that the stack consists of, and the stack is compiled again if something has changed. On a GPU each layer is compared just before
its launches, while the GPU computes the layer before it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import ModelOutput

from halfbyte.decoder.family import SLIDING, Family
from halfbyte.decoder.kernels_gpu import layer_kernels
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.program import layer_ops
from halfbyte.decoder.spec import LayerSpec, Logits, tensors_of
from halfbyte.errors import HalfbyteError
from halfbyte.integrations.transformers.decoder import cpu_run, gpu_run, layer_gpu
from halfbyte.integrations.transformers.decoder.cpu_run import CpuRun
from halfbyte.integrations.transformers.decoder.gpu_run import GpuRun
from halfbyte.integrations.transformers.decoder.layer_gpu import LoweredLayer, lower_layer, lower_traced
from halfbyte.integrations.transformers.decoder.live_ends import Head, decoder_spec, longrope_switch
from halfbyte.integrations.transformers.decoder.live_layer import family_of, layer_spec, needs_eager, query_scale_from
from halfbyte.integrations.transformers.decoder.run import Call
from halfbyte.integrations.transformers.decoder.token_step import TokenStep
from halfbyte.integrations.transformers.optimize.calls import (
    CACHE,
    KV_CACHE,
    Arguments,
    Understood,
    any_value,
    bind,
    is_true,
    unset,
    why_unknown,
)
from halfbyte.integrations.transformers.optimize.frozen import FrozenLayers
from halfbyte.integrations.transformers.optimize.hooked import is_capturing
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward, original, replace_class
from halfbyte.machine import gpu
from halfbyte.nn.modules.quantized import has_global_hooks
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.decoder import DecoderLayer
from halfbyte.ops.transformer.weights import Weight

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Config, Part

LAYER_BY_LAYER = "its layers are called one by one"
FULL = "full_attention"
# Arguments of a decoder stack's call.
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


def is_stack(module: nn.Module) -> bool:
    """Whether a module is the stack of decoder layers of a known family."""
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers) or (family := family_of(layers[0])) is None:
        return False
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("embed_tokens", family.final_norm, "rotary_emb"))


def is_compiled_stack(module: object) -> TypeGuard[Part]:
    """Whether the forward of a module was replaced by `compile_stack`."""
    return isinstance(module, _Stack)


def compile_stack(stack: nn.Module) -> None:
    """Replace the forward of a stack, in place, or note for the report why it is not replaced."""
    if isinstance(stack, _Stack):
        return
    layers = cast("nn.ModuleList", stack.layers)
    reason = why_unknown(original(stack), ARGUMENTS) or why_unknown_output(original(stack))
    specs = [layer_spec(layer) for layer in layers] if reason is None else []
    reasons = [spec if isinstance(spec, str) else None for spec in specs]
    if reason is None and all(reasons):
        reason = "; ".join(why_left(reasons))
    replace_class(stack, _Stack, LAYER_BY_LAYER, reason)
    if isinstance(stack, _Stack):
        stack.halfbyte_known = tuple(reason is None for reason in reasons)
        stack.halfbyte_output = output_class(original(stack))


class _Stack(ReplacedForward):
    """Precedes the class of a stack."""

    keeps_name = True
    halfbyte_known: tuple[bool, ...]  # which layers were known when the stack was optimized, for torch.compile
    halfbyte_output: Callable[..., object]  # the class of the output

    @property
    def halfbyte_remark(self) -> str:
        """What `halfbyte.report` says of the stack."""
        stack = cast("Part", self)
        found, device = compiled(stack), next(stack.parameters()).device
        return found if isinstance(found, str) else found.remark(stack, device)

    def forward(self, *args: object, **kwargs: object) -> object:
        if (call := bind(self.argument_names, args, kwargs, ARGUMENTS)) is not None:
            found = _traced(self, call) if torch.compiler.is_compiling() else _run(self, call)
            if found is not None:
                x, past = found
                return self.halfbyte_output(last_hidden_state=x, **{KV_CACHE: past})
        # super() in a class that is made at run time: torch.compile follows the plain call.
        return super().forward(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def output_class(cls: type) -> Any:
    """The class of a stack's output, the only one that its forward makes; None if there is none. Annotations are not always right."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    names = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    found = {one for one in names if isinstance(one, type) and issubclass(one, ModelOutput)}
    return found.pop() if len(found) == 1 else None


def why_unknown_output(cls: type) -> str | None:
    return f"the forward of a {cls.__name__} makes outputs of an unknown class" if output_class(cls) is None else None


def _run(stack: Any, call: Arguments) -> tuple[Tensor, Any] | None:
    """The normed hidden states and the cache; None if transformers has to compute them."""
    if (past := _cache(stack, call)) is _NOT_TAKEN or has_global_hooks() or is_capturing():
        return None
    given: Tensor = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
    if not plain(given) or given.device.type not in ("cpu", "cuda"):
        return None
    native = given.device.type == "cpu" and "cpu" not in gpu_run.DEVICES  # in tests a CPU stands in for a GPU
    if native:
        found = compiled(stack)
        x = None if isinstance(found, str) else found.run(stack, call, past)
    else:
        found = compiled_outside(stack)
        x = None if isinstance(found, str) else found.run_on_gpu(stack, call, past, functools.partial(_changed, stack))
    return None if x is None else (x, past)


def _traced(stack: Any, call: Arguments) -> tuple[Tensor, Any] | None:
    """`_run` within torch.compile, on GPUs alone."""
    if (past := _cache(stack, call)) is _NOT_TAKEN:
        return None
    given: Tensor = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
    if given.device.type not in gpu_run.DEVICES:
        return None
    layers = stack.layers
    kinds = layer_kinds(stack)
    if kinds is None or stack.config.num_hidden_layers != len(layers) or not all(kind in (FULL, SLIDING) for kind in kinds.masks):
        return None
    lowered = [lower_traced(layer) if known else None for layer, known in zip(layers, stack.halfbyte_known, strict=True)]
    if (prepared := prepare(stack, kinds, call, past)) is None:
        return None
    x, layer_call = prepared
    normed: Tensor = getattr(stack, kinds.family.final_norm)(GpuRun(lowered, stack, layer_call)(x))
    return normed, past


_NOT_TAKEN: object = object()


def _cache(stack: Part, call: Arguments) -> Any:
    """The cache of a call, or a new one, or None; `_NOT_TAKEN` if transformers has to compute the call."""
    given = call.get("input_ids", call.get("inputs_embeds"))
    if not isinstance(given, Tensor) or ("input_ids" in call and "inputs_embeds" in call) or not given.numel():
        return _NOT_TAKEN
    if torch.is_grad_enabled() or stack.training:
        return _NOT_TAKEN
    past, use_cache = call.get(CACHE), call.get("use_cache", stack.config.use_cache)
    if past is None and use_cache:
        return DynamicCache(config=stack.config)
    # Hybrids of older versions, and paged attention, have caches of their own.
    return past if past is None or (use_cache and isinstance(past, Cache)) else _NOT_TAKEN


# Compiled stacks, or the reason why there is none, with the state that they were compiled from: one for each module, as long as it lives,
# compiled again once that state has changed. Threads may compile one stack at the same time; the later one stays.
_stacks: WeakKeyDictionary[nn.Module, tuple[CompiledStack | str, FrozenLayers]] = WeakKeyDictionary()


def compiled(stack: Part) -> CompiledStack | str:
    """The compiled stack as it is now, or why its layers are called one by one."""
    known = _stacks.get(stack)
    if known is None or not known[1].is_unchanged():
        known = _compile(stack)
    return known[0]


def compiled_outside(stack: Part) -> CompiledStack | str:
    """The compiled stack, whose layers are still to be compared, by `_changed`."""
    known = _stacks.get(stack)
    if known is None or not known[1].is_unchanged_outside():
        known = _compile(stack)
    return known[0]


def _changed(stack: Part, index: int) -> list[LoweredLayer | None] | None:
    """The lowered layers, compiled again, if the layer of an index has changed; else None."""
    if _stacks[stack][1].layers[index].is_unchanged():
        return None
    found = _compile(stack)[0]
    return [None] * len(stack.layers) if isinstance(found, str) else found.on_gpu(stack)


def _compile(stack: Part) -> tuple[CompiledStack | str, FrozenLayers]:
    reason = _why_not(stack)
    kinds = layer_kinds(stack)
    found = reason or (LAYER_BY_LAYER if kinds is None else CompiledStack(kinds))
    known = _stacks[stack] = found, FrozenLayers(stack, stack.layers, _rewritten(stack))
    return known


def _rewritten(stack: Part) -> tuple[nn.Module, ...]:
    """Submodules that replace their buffers at each call: ropes whose frequencies depend on the length of the text."""
    kinds = getattr(stack.rotary_emb, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return (stack.rotary_emb,) if any("dynamic" in str(kind) or kind == "longrope" for kind in kinds) else ()


def _why_not(stack: Part) -> str | None:
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


def why_left(reasons: Sequence[str | None]) -> list[str]:
    """Which layers are left to transformers, with the reasons of each; None: a layer is not."""
    found = dict[str, list[int]]()
    for index, reason in enumerate(reasons):
        if reason is not None:
            found.setdefault(reason, []).append(index)
    return [f"layer {first}{f' and {len(more)} more' if more else ''}: {reason}" for reason, (first, *more) in found.items()]


class Kinds(NamedTuple):
    """What distinguishes the layers of a stack.

    Attributes:
        family: Of the stack.
        masks: Of each layer, FULL or SLIDING.
        windows: Of each layer, its sliding window, or None.
        ropes: Of each layer, the type of layers whose rope it has; "" where all have the same.
    """

    family: Family
    masks: list[str]
    windows: list[int | None]
    ropes: list[str]


def layer_kinds(stack: Part) -> Kinds | None:
    """The kinds of a stack's layers; None if its layers are of no known family."""
    family, config, count = family_of(stack.layers[0]), stack.config, len(stack.layers)
    if family is None:
        return None
    types = list(getattr(config, "layer_types", None) or [FULL] * count)
    window: int | None = getattr(config, "sliding_window", None)
    masks = types
    if family.sliding_window != "layer_types":
        masks = [SLIDING if family.sliding_window == "all" and window is not None else FULL] * count
    windows = [window if kind == SLIDING else None for kind in masks]
    return Kinds(family, masks, windows, types if family.rope_per_type else [""] * count)


def prepare(stack: Part, kinds: Kinds, call: Arguments, past: Cache | None) -> tuple[Tensor, Call] | None:
    """What goes into the first layer [B, t, K], and the call as layers see it; None if transformers has to compute it."""
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


class CompiledStack:
    """What native code needs of all layers of a stack, which must not have changed.

    Attributes:
        kinds: What distinguishes the layers.
        gpu_lock: Of the thread that generates text by `gpu_model`.
    """

    def __init__(self, kinds: Kinds) -> None:
        """Make one for a stack for which `_why_not` has no reason."""
        self.kinds = kinds
        self._specs: list[LayerSpec | str] | None = None
        self._on_cpu: list[DecoderLayer | str] | None = None
        self._on_gpu: list[LoweredLayer | None] | None = None
        self._steps: dict[tuple[int, Logits], TokenStep | None] = {}
        self._gpu_model: tuple[Head, Logits, GpuModel | str] | None = None
        self.gpu_lock = threading.Lock()

    def specs(self, stack: Part) -> list[LayerSpec | str]:
        """The specifications of the layers, or the reason why transformers computes them."""
        if self._specs is None:
            kinds, ropes = self.kinds, sorted({*self.kinds.ropes})
            layers = zip(stack.layers, kinds.ropes, kinds.windows, strict=True)
            self._specs = [layer_spec(layer, ropes.index(rope), window) for layer, rope, window in layers]
        return self._specs

    def on_cpu(self, stack: Part) -> list[DecoderLayer | str]:
        """The layers on a CPU: lowered, or the reason why transformers computes them."""
        if self._on_cpu is None:
            layers = zip(stack.layers, self.specs(stack), strict=True)
            self._on_cpu = [cpu_run.lower_layer(layer, spec, index) for index, (layer, spec) in enumerate(layers)]
        return self._on_cpu

    def on_gpu(self, stack: Part) -> list[LoweredLayer | None]:
        """The layers on a GPU: what kernels read, or None where transformers computes them."""
        if self._on_gpu is None:
            self._on_gpu = [lower_layer(layer, spec) for layer, spec in zip(stack.layers, self.specs(stack), strict=True)]
        return self._on_gpu

    def remark(self, stack: Part, device: torch.device) -> str:
        """What `halfbyte.report` says of the stack on a device."""
        layers = stack.layers
        if device.type == "cpu":
            reasons = [layer if isinstance(layer, str) else None for layer in self.on_cpu(stack)]
        elif device.type in gpu_run.DEVICES:
            reasons = [
                spec if isinstance(spec, str) else layer_gpu.why_not_decoded(layer, spec)
                for layer, spec in zip(layers, self.specs(stack), strict=True)
            ]
        else:
            return f"{LAYER_BY_LAYER}: kernels are for CPUs and NVIDIA GPUs, not for {device.type}"
        native = reasons.count(None)
        told, left = [f"{native} of {len(reasons)} layers take native calls"], why_left(reasons)
        if device.type != "cpu" and native:
            told += self._remarks_on_gpu(stack, reasons.index(None), device)
        return "; ".join([*told, *left])

    def _remarks_on_gpu(self, stack: Part, index: int, device: torch.device) -> list[str]:
        """Which ops of a layer torch computes, and why."""
        spec, here = self.specs(stack)[index], gpu(device.index or 0)
        assert not isinstance(spec, str)
        kernels = layer_kernels(layer_ops(spec), here, dtype=gpu_run.dtype_of(spec))
        told = ["single tokens in calls with a cache that grows: transformers' layers"]
        told += [f"{lowered.op.name}: {lowered.reason}" for lowered in kernels if lowered.reason is not None]
        reason = gpu_run.why_not_prefilled(stack.layers[index], spec, here)
        return told if reason is None else [*told, f"prompts: {reason}"]

    def run(self, stack: Part, call: Arguments, past: Cache | None) -> Tensor | None:
        """Compute the normed hidden states on a CPU; None if transformers has to."""
        ids, mask = call.get("input_ids"), call.get("attention_mask")
        if ids is not None and ids.dim() == 2 and ids.shape[1] == 1 and past is not None and not isinstance(mask, Mapping):
            step = self.step(stack)
            y = None if step is None else step(ids, mask, call.get("position_ids"), past.layers)
            if y is not None:
                return y
        prepared = prepare(stack, self.kinds, call, past)
        if prepared is None:
            return None
        x, layer_call = prepared
        if (limit := query_scale_from(stack.layers[0])) is not None and int(layer_call.rope_positions.max()) >= limit:
            return None
        normed: Tensor = getattr(stack, self.kinds.family.final_norm)(CpuRun(self.on_cpu(stack), stack, layer_call)(x))
        return normed

    def run_on_gpu(
        self,
        stack: Part,
        call: Arguments,
        past: Cache | None,
        changed: Callable[[int], Sequence[LoweredLayer | None] | None],
    ) -> Tensor | None:
        """Compute the normed hidden states on a GPU; None if transformers has to. `changed` is that of `GpuRun`."""
        prepared = prepare(stack, self.kinds, call, past)
        if prepared is None:
            return None
        x, layer_call = prepared
        run = GpuRun(self.on_gpu(stack), stack, layer_call, changed)
        normed: Tensor = getattr(stack, self.kinds.family.final_norm)(run(x))
        return normed

    def step(self, stack: Part, head: Weight | None = None, logits: Logits = None) -> TokenStep | None:
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

    def why_not_text(self, stack: Part, positions: Sequence[int], most: int) -> str | None:
        """Why `gpu_model` does not write a text of at most so many tokens, whose next tokens have these positions; None if it does."""
        limit, switch = query_scale_from(stack.layers[0]), longrope_switch(stack)
        if limit is not None and most > limit:
            return f"queries of positions from {limit} on have a factor that depends on these"
        if switch is not None and most > switch and min(positions) <= switch:
            return f"frequencies of its rope change when the text has more than {switch} tokens"
        return None

    def gpu_model(self, stack: Part, head: Head, logits: Logits) -> GpuModel | str:
        """The whole model with an output embedding and a function of the logits, lowered for a GPU, or why it is not."""
        known = self._gpu_model
        if known is None or not known[0].is_same(head) or known[1] != logits:
            known = self._gpu_model = head, logits, self._new_gpu_model(stack, head, logits)
        return known[2]

    def _new_gpu_model(self, stack: Part, head: Head, logits: Logits) -> GpuModel | str:
        specs, lowered = self.specs(stack), self.on_gpu(stack)
        layers = [spec for spec in specs if isinstance(spec, LayerSpec)]
        if len(layers) < len(specs) or not all(layer is not None and layer.decodes and layer.prefills for layer in lowered):
            return "transformers computes some of its layers"
        if any(not layer.self_attn.is_causal or layer.training or layer.self_attn.layer_idx != i for i, layer in enumerate(stack.layers)):
            return "a layer is in training, not causal, or of another place"
        found = decoder_spec(stack, self.kinds.family, layers, sorted({*self.kinds.ropes}), head, logits)
        if isinstance(found, str):
            return found
        if len({tensor.device for tensor in tensors_of(found)}) > 1:
            return "it is on several devices"
        try:
            return GpuModel(found, found.norm.weight.device, found.norm.weight.dtype)
        except HalfbyteError as error:
            return str(error)

    def _new_step(self, stack: Part, head: Weight | None, logits: Logits) -> TokenStep | None:
        specs = zip(self.specs(stack), self.on_cpu(stack), strict=True)
        layers = [spec for spec, lowered in specs if isinstance(spec, LayerSpec) and isinstance(lowered, DecoderLayer)]
        reuses = [layer.kv_source is not None for layer in layers]
        if len(layers) < len(stack.layers) or reuses != sorted(reuses):
            return None
        if any(needs_eager(layer.attention.heads) for layer in layers) and stack.config._attn_implementation != "eager":
            return None
        ends = None if head is None else Head(head, None), logits
        spec = decoder_spec(stack, self.kinds.family, layers, sorted({*self.kinds.ropes}), *ends)
        if isinstance(spec, str) or any(not tensor.is_cpu for tensor in tensors_of(spec)):
            return None
        try:
            return TokenStep(CpuModel(spec), query_scale_from(stack.layers[0]), spec.norm.weight.dtype)
        except HalfbyteError:
            return None


def _per_layer_inputs(stack: Part, call: Arguments, x: Tensor) -> Tensor | None:
    """The layers' own inputs [B, t, L, P] (Gemma 4); None where they have none."""
    if not getattr(stack, "hidden_size_per_layer_input", 0):
        return None
    given = call.get("per_layer_inputs")
    found: Tensor = stack.project_per_layer_inputs(x, stack.get_per_layer_inputs(call.get("input_ids"), x) if given is None else given)
    return found


def _positions(given: Tensor | None, x: Tensor, past: Cache | None, *, mrope: bool) -> tuple[Tensor | None, Tensor]:
    """The positions of tokens in the text [B or 1, t], or None, and those that rope takes, [3, B, t] where it has three axes."""
    if given is None:
        before = 0 if past is None else past.get_seq_length()  # of a static cache a tensor, which is not to be waited for
        given = (torch.arange(x.shape[1], device=x.device) + before)[None]
    if not mrope:
        return given, given
    if given.dim() == 2:
        return None, given[None].expand(3, x.shape[0], -1)
    return (given[0], given[1:]) if len(given) == 4 else (None, given)


def _mask(config: Config, kind: str, given: Any, x: Tensor, past: Cache | None, positions: Tensor | None) -> Tensor | None:
    """The mask of a type of layers, as transformers makes it."""
    if isinstance(given, Mapping):
        found: Tensor | None = given[kind]
        return found
    make = create_sliding_window_causal_mask if kind == SLIDING else create_causal_mask
    mask: Tensor | None = make(config, x, given, position_ids=positions, **{KV_CACHE: past})
    return mask
