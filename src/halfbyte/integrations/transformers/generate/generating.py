"""`generate` of optimized models, where transformers would sample or decode greedily: transformers prepares the cache, the
logits processors and the stopping criteria and reads the prompt; then the tokens are written by a loop of this file, with the same result.

On a CPU the loop saves a part of what transformers does between steps. On a GPU the tokens are those of `GpuModel` (gpu_text.py), as in
`hb.LanguageModel`; steps of models that it does not compute become CUDA graphs (graphs.py). Both are started before the host has read the
token before: so the GPU never waits for Python.

The method that is replaced is `_sample` of the model's class. (`generate(custom_generate=…)` would be a public way, but transformers up to
5.24 do not pass the streamer on to such a function, and forget the tokenizer that stop strings need.) What this loop does not do is
transformers' own: beams, assistants, encoder-decoders, and calls that ask for scores, attentions or hidden states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.generate.gpu_text import GpuText, lowered, read_prompts
from halfbyte.integrations.transformers.generate.graphs import GraphStep, Window, capturable, layers_with_states, static_cache
from halfbyte.integrations.transformers.generate.request import Request, TokenChooser, TokenIds, mark_default
from halfbyte.integrations.transformers.generate.steps import Step
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE, Arguments, cache_name, parameters_of
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward, replace_class
from halfbyte.nn.parallel.parallelize import is_parallel
from halfbyte.ops.modes import in_mode

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    from halfbyte.integrations.transformers.modules import Part

_MOST_LATER = 16384  # tokens after a prompt, for which a static cache has room
# These may be asked about ids in any memory.
_ANYWHERE = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
_LAYERS = (StaticLayer, Window)  # of caches of fixed size
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Methods of GenerationMixin that are called or replaced here, with the parameters that they have in all tested versions.
_METHODS = {
    "_sample": ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"),
    "_prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "_prepare_cache_for_generation": ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"),
    "_optimize_model_for_decode": (),
}


def check_tokens(ids: Tensor) -> None:
    """Raises ArgumentError for a prompt [B, t] without tokens, which transformers cannot read."""
    if not ids.numel():
        got = f"got input_ids {list(ids.shape)}"
        raise ArgumentError(f"the prompt has no tokens, {got}: write some text, or begin with the tokenizer's bos token if it has one")


def generate_fast(model: nn.Module) -> None:
    """Puts the loop of this file into a model of transformers that generates text, in place; nothing for any other module."""
    if isinstance(model, GenerationMixin) and not isinstance(model, _Generating):
        replace_class(model, _Generating, "`generate` is transformers' own", _why_unknown_methods(type(model)))


def _why_unknown_methods(cls: type) -> str | None:
    """Why the loop of this file does not fit a class: private methods of transformers have other parameters. None if it does."""
    if "_sample" in {name for base in cls.__mro__ if base is not GenerationMixin for name in vars(base)}:
        return f"{cls.__name__} has a _sample of its own"
    changed = next((name for name, parameters in _METHODS.items() if parameters_of(getattr(cls, name)) != parameters), None)
    return None if changed is None else f"this version of transformers has other parameters of {changed}"


class _Generating(ReplacedForward):
    """Mixin that precedes the class of a model."""

    keeps_name = True  # config.json has it
    why_slow: str | None = None  # the reason why this model's steps on a GPU are not captured, of which there was a warning

    @property
    def halfbyte_remark(self) -> str | None:
        """What `halfbyte.report` says of it on a GPU."""
        model = cast("Part", self)
        if not _on_gpu(model.device):
            return None
        found = lowered(model)
        if isinstance(found, str):
            return f"`generate` replays decode steps of transformers as CUDA graphs where it can, as {found}"
        return "`generate` decodes all layers in one CUDA graph; beams, assistants and masks with holes: transformers' steps"

    def _prepare_cache_for_generation(self, generation_config: object, model_kwargs: dict[str, object], *args: object) -> Any:
        given = _cache_of(model_kwargs)
        answer = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        prepared = _cache_of(model_kwargs)
        if prepared is not None and prepared is not given:
            mark_default(prepared)
        return answer

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: object,
    ) -> Any:
        if model_kwargs.get("inputs_embeds") is None:
            check_tokens(input_ids)
        model = cast("Part", self)
        if not synced_gpus and _is_plain(model, input_ids, generation_config, model_kwargs):
            choose = TokenChooser(logits_processor, generation_config.do_sample)
            request = Request(model, input_ids, generation_config, model_kwargs, choose)
            # Copies to the host come before the prompt, for which they would wait.
            host_ids, ends = TokenIds(input_ids.cpu()), any(hasattr(one, "eos_token_id") for one in stopping_criteria)
            pad = int(vars(generation_config)["_pad_token_tensor"]) if ends else None
            step = read_prompts(request) if _on_gpu(input_ids.device) and not in_mode() else None
            if step is None and _has_steps(request):
                step = _read(request)
            if step is not None:
                return _decode(request, step, host_ids, stopping_criteria, streamer, pad)
        return super()._sample(  # type: ignore[misc]
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
        )


def _cache_of(arguments: Arguments) -> Any:
    return arguments.get(cache_name(arguments))


def _is_plain(model: Part, ids: Tensor, config: GenerationConfig, arguments: Arguments) -> bool:
    """Whether the loop of this file does what is asked for."""
    cache = _cache_of(arguments)
    plain = (
        ids.device.type in ("cpu", "cuda")
        and ids.device == model.device
        and cache is not None
        and arguments.get("use_cache", True)
        and arguments.get("inputs_embeds") is None
        and not model.config.is_encoder_decoder
        and not getattr(config, "is_assistant", False)
        and config.max_length is not None
        and config.compile_config is None
        and config.prefill_chunk_size is None
        and not (config.return_dict_in_generate and any(getattr(config, name) for name in _OUTPUTS))
    )
    return bool(plain)


def _has_steps(request: Request) -> bool:
    """Whether the steps of `steps.py`, or on a GPU those of `graphs.py`, do what is asked for."""
    model, ids, cache = request.model, request.ids, request.cache
    if not _on_gpu(ids.device):
        return True
    asked = request.keeps_cache or request.config.cache_implementation == "dynamic" or cache.offloading
    if asked or request.most - ids.shape[1] > _MOST_LATER or type(cache) not in (DynamicCache, StaticCache):
        return False
    if in_mode():  # of this call
        warnings.warn("tokens are written in many calls, not by a CUDA graph, under autocast or forward-mode differentiation", stacklevel=4)
        return False
    if (reason := _why_not_captured(model, ids.device)) is not None:
        _warn_once(model, reason)
    return model.why_slow is None


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _why_not_captured(model: Part, device: torch.device) -> str | None:
    """Why no step of a model on a GPU is captured, or None."""
    if is_parallel(model):
        return "its weights are distributed over processes"
    if any(parameter.device != device for parameter in model.parameters()):
        return "it is on several devices"
    other = next((type(layer).__name__ for layer in layers_with_states(static_cache(model, 1)) if type(layer) not in _LAYERS), None)
    return None if other is None else f"its cache has a {other}"


def new_cache(model: Part) -> DynamicCache | None:
    """An empty cache for a text that is continued, `past_key_values` of several calls of `generate`; None where `generate` is faster with a
    cache of its own, so that reading the text again takes less time."""
    return None if _on_gpu(model.device) and isinstance(lowered(model), str) else DynamicCache(config=model.config)


def _warn_once(model: Part, reason: str) -> None:
    if model.why_slow is None:
        model.why_slow = reason
        name = type(model).__name__
        warnings.warn(f"{name} writes tokens in many calls, not by a CUDA graph, as {reason}: torch.compile may be faster", stacklevel=2)


def _read(request: Request) -> Step:
    """Read the prompts as transformers does, on a GPU into a cache of fixed size."""
    if not _on_gpu(request.ids.device):
        return Step(request, request.prefill())
    cache = request.cache
    fixed = static_cache(request.model, request.most) if type(cache) is DynamicCache else capturable(cache)
    request.arguments[cache_name(request.arguments)] = fixed
    return GraphStep(request, request.prefill())


def _decode(
    request: Request, step: Step | GpuText, host_ids: TokenIds, criteria: StoppingCriteriaList, streamer: Any, pad: int | None
) -> object:
    """Generate as `_sample` of transformers does after the prompts.

    Args:
        request: The call.
        step: The steps after its prompts.
        host_ids: The ids on the host, to which those that are generated are appended.
        criteria: When a sequence ends.
        streamer: Gets the tokens; None: there is none.
        pad: Token of sequences that have ended while others go on; None: none ends before all do.
    """
    model, ids, config, cache = request.model, request.ids, request.config, request.cache
    on_host = all(type(one) in _ANYWHERE for one in criteria)
    unfinished = torch.ones(len(ids), dtype=torch.bool, device="cpu")
    with torch.cuda.device_of(ids), _closing(step), model._optimize_model_for_decode():
        while True:
            new = step.next(host_ids.ids, launch_ahead=host_ids.count + 1 < config.max_length)
            if pad is not None and not unfinished.all():
                new = new.where(unfinished, pad)
            host_ids.append(new)
            if streamer is not None:
                streamer.put(new)
            unfinished &= ~criteria(host_ids.ids if on_host else host_ids.ids.to(ids.device), None).cpu()
            if not unfinished.any():
                break
        if isinstance(step, GraphStep) and step.refused is not None:
            _warn_once(model, step.refused)
    if streamer is not None:
        streamer.end()
    sequences = host_ids.ids.to(ids.device, copy=True)
    return GenerateDecoderOnlyOutput(**{"sequences": sequences, KV_CACHE: cache}) if config.return_dict_in_generate else sequences


@contextmanager
def _closing(step: Step | GpuText) -> Iterator[None]:
    try:
        yield
    finally:
        step.close()
