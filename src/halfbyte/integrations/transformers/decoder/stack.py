"""Decoder stacks of transformers: `optimize_` compiles all layers of one into a `CompiledStack`, and replaces the stack's forward.

    x = layers(embedding_multiplier * embed_tokens(ids));  y = norm(x)                         [B, t, K]

    compile_stack      puts `_Stack` before the stack's class
    _Stack.forward     takes calls whose arguments are in ARGUMENTS, without gradients, on a device that has kernels; others go to
                       transformers' forward, and so do training and requests for hidden states or attentions
    compiled           finds, or makes, the `CompiledStack` of the modules as they are now
    CompiledStack.run  computes a call, `_traced` one under torch.compile on a GPU
    CompiledStack.lowered  is the whole stack as one native call on a CPU, or as a `GpuModel`, for single tokens and `generate`

Layers that have no kernels on the device, as those with hooks or without quantized weights, are called as transformers calls them, between
the others (run.py). Before each call `Frozen` compares everything that the stack consists of; where anything has changed, the stack is
compiled again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from halfbyte.decoder.family import SLIDING
from halfbyte.decoder.gpu_layer import GpuLayer
from halfbyte.decoder.kernels_gpu import torch_ops
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.spec import LayerSpec, Logits, tensors_of
from halfbyte.errors import HalfbyteError
from halfbyte.integrations.transformers.decoder import cpu_run, gpu_run, layer_gpu
from halfbyte.integrations.transformers.decoder.cpu_run import CpuRun
from halfbyte.integrations.transformers.decoder.gpu_run import GpuRun
from halfbyte.integrations.transformers.decoder.layer_gpu import is_prefilled, lower_layer, lower_traced
from halfbyte.integrations.transformers.decoder.live_ends import Head, decoder_spec, longrope_switch
from halfbyte.integrations.transformers.decoder.live_layer import family_of, is_distributed, layer_spec, needs_eager, query_scale_from
from halfbyte.integrations.transformers.decoder.run import FULL, LayerKinds, layer_kinds, prepare
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
from halfbyte.integrations.transformers.optimize.frozen import Frozen
from halfbyte.integrations.transformers.optimize.hooked import is_capturing, watched
from halfbyte.integrations.transformers.optimize.replaced import (
    LAYER_BY_LAYER,
    ReplacedForward,
    original,
    output_class,
    replace_class,
    why_left,
    why_unknown_output,
)
from halfbyte.machine import gpu
from halfbyte.nn.frozen import while_unchanged
from halfbyte.nn.modules.quantized import has_global_hooks
from halfbyte.nn.parallel.parallelize import part_of
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.decoder import DecoderLayer

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

# Arguments of a decoder stack's call, and which values of each the replaced forward takes.
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
        stack.halfbyte_has_spec = tuple(reason is None for reason in reasons)
        stack.halfbyte_output = output_class(original(stack))


class _Stack(ReplacedForward):
    """Precedes the class of a stack."""

    keeps_name = True
    halfbyte_has_spec: tuple[bool, ...]  # of each layer: whether it had a specification when the stack was optimized, for torch.compile
    halfbyte_output: Callable[..., object]  # the class of the output

    @property
    def halfbyte_remark(self) -> str:
        """What `halfbyte.report` says of the stack."""
        stack = cast("Part", self)
        now, device = compiled(stack), next(stack.parameters()).device
        return now if isinstance(now, str) else now.remark(device)

    def forward(self, *args: object, **kwargs: object) -> object:
        if (call := bind(self.argument_names, args, kwargs, ARGUMENTS)) is not None:
            computed = _traced(self, call) if torch.compiler.is_compiling() else _run(self, call)
            if computed is not None:
                x, past = computed
                return self.halfbyte_output(last_hidden_state=x, **{KV_CACHE: past})
        # super() in a class that is made at run time: torch.compile follows the plain call.
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _run(stack: Any, call: Arguments) -> tuple[Tensor, Any] | None:
    """Return the normed hidden states and the cache; None if transformers has to compute the call."""
    if (past := _cache(stack, call)) is _NOT_TAKEN or has_global_hooks() or is_capturing():
        return None
    given: Tensor = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
    if not plain(given) or given.device.type not in ("cpu", "cuda"):
        return None
    on_cpu = given.device.type == "cpu" and "cpu" not in gpu_run.DEVICES  # in tests a CPU stands in for a GPU
    now = compiled(stack)
    x = None if isinstance(now, str) else now.run(call, past, on_cpu=on_cpu)
    return None if x is None else (x, past)


def _traced(stack: Any, call: Arguments) -> tuple[Tensor, Any] | None:
    """`_run` under torch.compile, for GPUs alone. Layers are lowered within the traced code: tracing cannot read what `compiled` keeps."""
    if (past := _cache(stack, call)) is _NOT_TAKEN:
        return None
    given: Tensor = call["input_ids"] if "input_ids" in call else call["inputs_embeds"]
    if given.device.type not in gpu_run.DEVICES:
        return None
    layers = stack.layers
    kinds = layer_kinds(stack)
    if kinds is None or stack.config.num_hidden_layers != len(layers) or not all(kind in (FULL, SLIDING) for kind in kinds.masks):
        return None
    lowered = [lower_traced(layer) if has_spec else None for layer, has_spec in zip(layers, stack.halfbyte_has_spec, strict=True)]
    if (prepared := prepare(stack, kinds, call, past)) is None:
        return None
    x, layer_call = prepared
    normed: Tensor = getattr(stack, kinds.family.final_norm)(GpuRun(lowered, stack, kinds, layer_call)(x))
    return normed, past


_NOT_TAKEN: object = object()


def _cache(stack: Part, call: Arguments) -> Any:
    """Return the KV cache of a call, a new one where it asks for that, or None; `_NOT_TAKEN` if transformers has to compute the call."""
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


@while_unchanged(lambda stack: Frozen(stack, _rewritten(cast("Part", stack))))
def compiled(stack: Part) -> CompiledStack | str:
    """Return the compiled stack of modules as they are now, or why transformers calls its layers one by one."""
    reason, kinds = _why_not(stack), layer_kinds(stack)
    return reason or (LAYER_BY_LAYER if kinds is None else CompiledStack(stack, kinds))


def _rewritten(stack: Part) -> tuple[nn.Module, ...]:
    """Return the submodules that replace their buffers when they are called: ropes whose frequencies depend on the length of the text."""
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


def _why_changed(layer: Part, index: int) -> str | None:
    """Why the layer of an index in its stack is left to transformers, whatever it computes; None if it is not."""
    if watched(layer):
        return "it has a hook"
    if any("forward" in vars(part) and part_of(part) is None for part in layer.modules()):
        return "the forward of a part was replaced"
    if layer.training or not layer.self_attn.is_causal or layer.self_attn.layer_idx != index:
        return "it is in training, not causal, or of another place"
    return None


class CompiledStack:
    """The layers of a stack, lowered when they are first called on a device. Valid while the modules are unchanged (`compiled`).

    Attributes:
        kinds: In what its layers differ.
        gpu_lock: Held by the thread that generates text by the `GpuModel`.
    """

    def __init__(self, stack: Part, kinds: LayerKinds) -> None:
        """Make one for a stack for which `_why_not` has no reason."""
        self.kinds, self._stack = kinds, weakref.ref(stack)  # `compiled` keeps it as long as the stack lives
        # Keys: whether for a CPU, and whether without a head.
        self._lowered: dict[tuple[bool, bool], tuple[Head | None, Logits, TokenStep | GpuModel | str]] = {}
        self.gpu_lock = threading.Lock()

    @property
    def stack(self) -> Part:
        """The module of transformers."""
        stack = self._stack()
        assert stack is not None
        return stack

    @cached_property
    def specs(self) -> list[LayerSpec | str]:
        """The specifications of the layers, or the reason why transformers computes them."""
        ropes, layers = sorted({*self.kinds.ropes}), zip(self.stack.layers, self.kinds.ropes, self.kinds.windows, strict=True)
        return [_why_changed(layer, i) or layer_spec(layer, ropes.index(rope), window) for i, (layer, rope, window) in enumerate(layers)]

    @cached_property
    def on_cpu(self) -> list[DecoderLayer | str]:
        """The layers on a CPU: lowered, or the reason why transformers computes them."""
        return [cpu_run.lower_layer(layer, spec) for layer, spec in zip(self.stack.layers, self.specs, strict=True)]

    @cached_property
    def on_gpu(self) -> list[GpuLayer | None]:
        """The layers on a GPU: what kernels read, or None where transformers computes them."""
        return [lower_layer(layer, spec) for layer, spec in zip(self.stack.layers, self.specs, strict=True)]

    def remark(self, device: torch.device) -> str:
        """What `halfbyte.report` says of the stack on a device."""
        if device.type == "cpu":
            reasons = [layer if isinstance(layer, str) else None for layer in self.on_cpu]
        elif device.type in gpu_run.DEVICES:
            reasons = [
                spec if isinstance(spec, str) else layer_gpu.why_not_decoded(layer, spec)
                for layer, spec in zip(self.stack.layers, self.specs, strict=True)
            ]
        else:
            return f"{LAYER_BY_LAYER}: kernels are for CPUs and NVIDIA GPUs, not for {device.type}"
        native = reasons.count(None)
        told, left = [f"{native} of {len(reasons)} layers take native calls"], why_left(reasons)
        if device.type != "cpu" and native:
            told += self._remarks_on_gpu(reasons.index(None), device)
        return "; ".join([*told, *left])

    def _remarks_on_gpu(self, index: int, device: torch.device) -> list[str]:
        """Which ops of a layer torch computes, and why."""
        spec = self.specs[index]
        assert not isinstance(spec, str)
        told = ["single tokens in calls with a cache that grows: transformers' layers"]
        told += ["prompts: its weights are distributed over processes"] if is_distributed(self.stack.layers[index]) else []
        return [*told, *torch_ops([spec], gpu_run.dtype_of(spec), gpu(device.index or 0))]

    def run(self, call: Arguments, past: Cache | None, *, on_cpu: bool) -> Tensor | None:
        """Compute the normed hidden states on a CPU or a GPU; None if transformers has to."""
        stack, ids, mask = self.stack, call.get("input_ids"), call.get("attention_mask")
        if on_cpu and ids is not None and ids.dim() == 2 and ids.shape[1] == 1 and past is not None and not isinstance(mask, Mapping):
            step = self.lowered(None, None, on_cpu=True)
            y = step(ids, mask, call.get("position_ids"), past.layers) if isinstance(step, TokenStep) else None
            if y is not None:
                return y
        prepared = prepare(stack, self.kinds, call, past)
        if prepared is None:
            return None
        x, layer_call = prepared
        limit = query_scale_from(stack.layers[0]) if on_cpu else None
        if limit is not None and int(layer_call.rope_positions.max()) >= limit:
            return None
        given = stack, self.kinds, layer_call
        run = CpuRun(self.on_cpu, *given) if on_cpu else GpuRun(self.on_gpu, *given)
        normed: Tensor = getattr(stack, self.kinds.family.final_norm)(run(x))
        return normed

    def lowered(self, head: Head | None, logits: Logits, *, on_cpu: bool) -> TokenStep | GpuModel | str:
        """Return the whole stack with an output embedding, lowered, or why it is not: for a CPU its decode step.

        Args:
            head: The model's output embedding; None: the result is the normed hidden states.
            logits: Function of the logits.
            on_cpu: For which device.
        """
        key = on_cpu, head is None
        before, function, found = self._lowered.get(key, (None, None, None))
        is_same = head is None or (before is not None and head.is_same(before))
        if found is None or not is_same or function != logits:
            found = self._lower(head, logits, on_cpu=on_cpu)
            self._lowered[key] = head, logits, found
        return found

    def why_not_text(self, positions: Sequence[int], most: int) -> str | None:
        """Why a `GpuModel` does not write a text of at most so many tokens, whose next tokens have these positions; None if it does."""
        limit, switch = query_scale_from(self.stack.layers[0]), longrope_switch(self.stack)
        if limit is not None and most > limit:
            return f"queries of positions from {limit} on have a factor that depends on these"
        if switch is not None and most > switch and min(positions) <= switch:
            return f"frequencies of its rope change when the text has more than {switch} tokens"
        return None

    def _lower(self, head: Head | None, logits: Logits, *, on_cpu: bool) -> TokenStep | GpuModel | str:
        stack = self.stack
        if on_cpu:
            is_lowered = [isinstance(layer, DecoderLayer) for layer in self.on_cpu]
        else:
            is_lowered = [layer is not None and is_prefilled(layer) for layer in self.on_gpu]
        layers = [spec for spec in self.specs if isinstance(spec, LayerSpec)]
        if not all(is_lowered) or len(layers) < len(is_lowered):
            return "transformers computes some of its layers"
        if any(needs_eager(layer.attention.heads) for layer in layers) and stack.config._attn_implementation != "eager":
            return "its attention is not transformers' eager one"
        spec = decoder_spec(stack, self.kinds.family, layers, sorted({*self.kinds.ropes}), head, logits)
        if isinstance(spec, str):
            return spec
        dtype, (device, *others) = spec.norm.weight.dtype, {tensor.device for tensor in tensors_of(spec)}
        if others or (on_cpu and device.type != "cpu"):
            return "it is on several devices"
        try:
            if on_cpu:
                return TokenStep(CpuModel(spec), query_scale_from(stack.layers[0]), dtype)
            return GpuModel(spec, device, dtype)
        except HalfbyteError as error:
            return str(error)
