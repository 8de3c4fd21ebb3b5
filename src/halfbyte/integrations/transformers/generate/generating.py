"""`generate` of optimized models, where transformers would sample or decode greedily: transformers prepares the cache, the
logits processors and the stopping criteria and reads the prompt; then the tokens are written by a loop of this file, with the same result.

On a CPU the loop saves a part of what transformers does between steps. On a GPU a step becomes a CUDA graph (graphs.py) and is started
before the host has read the token before: so the GPU never waits for Python. If the text ends there, that step is undone. One sequence
whose cache is not returned is read and written by `GpuModel` (gpu_text.py), as in `hb.LanguageModel`.

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
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
from halfbyte.integrations.transformers.cache.rings import Ring, make_rings
from halfbyte.integrations.transformers.cache.static_codes import IN_CODES
from halfbyte.integrations.transformers.generate.gpu_text import GpuText, read_prompts
from halfbyte.integrations.transformers.generate.graphs import GraphStep, capacity, enlarge, keeping, static_cache
from halfbyte.integrations.transformers.generate.steps import Choice, Step, Text, tokens_before
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE, Arguments, cache_name, parameters_of
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward, replace_class
from halfbyte.layouts.base import round_up
from halfbyte.nn.parallel.parallelize import is_parallel
from halfbyte.ops.library import in_mode

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    from halfbyte.integrations.transformers.modules import Part

_DEFAULT_CACHE = "_halfbyte_made_by_transformers"
_LATER = 1024  # tokens for which a cache has room at first, at most
_CACHE_STEP = 64  # tokens
# These may be asked about ids in any memory.
_ANYWHERE = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
_LAYERS = (StaticLayer, StaticSlidingWindowLayer, Ring, *IN_CODES)  # of caches of fixed size
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

    def _prepare_cache_for_generation(self, generation_config: object, model_kwargs: dict[str, object], *args: object) -> Any:
        given = _cache_of(model_kwargs)
        answer = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        prepared = _cache_of(model_kwargs)
        if prepared is not None and prepared is not given:
            setattr(prepared, _DEFAULT_CACHE, True)
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
        model, choice = cast("Part", self), Choice(logits_processor, generation_config.do_sample)
        if not synced_gpus and _is_plain(model, input_ids, generation_config, model_kwargs):
            # Copies to the host come before the prompt, for which they would wait.
            told, ends = Text(input_ids.cpu()), any(hasattr(one, "eos_token_id") for one in stopping_criteria)
            pad = int(vars(generation_config)["_pad_token_tensor"]) if ends else None
            step: Step | GpuText | None = None
            if _on_gpu(input_ids.device) and not in_mode():
                kept = _is_kept(_cache_of(model_kwargs), generation_config)
                step = read_prompts(model, input_ids, generation_config, model_kwargs, choice, kept=kept)
            if step is None and _has_steps(model, input_ids, generation_config, model_kwargs):
                step = _read(model, input_ids, choice, generation_config, model_kwargs)
            if step is not None:
                return _decode(model, input_ids, told, step, stopping_criteria, generation_config, streamer, model_kwargs, pad)
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


def _is_kept(cache: object, config: GenerationConfig) -> bool:
    """Whether somebody sees the cache of a call."""
    return bool(config.return_dict_in_generate) or not getattr(cache, _DEFAULT_CACHE, False)


def _is_default(cache: object, config: GenerationConfig) -> bool:
    """Whether transformers has chosen the kind of the cache."""
    return getattr(cache, _DEFAULT_CACHE, False) and config.cache_implementation != "dynamic"


def _has_steps(model: Part, ids: Tensor, config: GenerationConfig, arguments: Arguments) -> bool:
    """Whether the steps of `steps.py`, or on a GPU those of `graphs.py`, do what is asked for."""
    if not _on_gpu(ids.device):
        return True
    cache = _cache_of(arguments)
    is_default = _is_default(cache, config)
    ours = _is_static(cache) or (type(cache) is DynamicCache and is_default) or (type(cache) is Int8Cache and not cache.get_seq_length())
    if cache.offloading or not ours:
        return False  # another kind of cache was asked for
    if (reason := _why_not_captured(model, ids.device, cache)) is not None:
        _warn_once(model, reason)
        return False
    # A static cache of the caller is made larger here only.
    return model.why_slow is None or not is_default


def _is_static(cache: object) -> bool:
    """Whether it has a fixed size; an Int8Cache has one on a GPU, from its first tokens on."""
    return type(cache) is StaticCache or (type(cache) is Int8Cache and any(type(layer) in IN_CODES for layer in cache.layers))


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _why_not_captured(model: Part, device: torch.device, cache: Cache | None) -> str | None:
    """Why no step of a model on a GPU is captured, or None."""
    if in_mode():
        return "autocast or forward-mode differentiation is on"
    if is_parallel(model):
        return "its weights are distributed over processes"
    if any(parameter.device != device for parameter in model.parameters()):
        return "it is on several devices"
    layers = keeping(cache if cache is not None and _is_static(cache) else static_cache(model, 1))
    other = next((type(layer).__name__ for layer in layers if type(layer) not in _LAYERS), None)
    return None if other is None else f"its cache has a {other}"


def new_cache(model: Part, tokens: int = _LATER, *, int8: bool = False) -> Cache:
    """An empty cache of the best kind for a text that is continued, at first with room for so many tokens, perhaps in 8 bits:
    `past_key_values` of several calls of `generate`, which makes it larger where needed."""
    if _on_gpu(model.device) and _why_not_captured(model, model.device, None) is None:
        return static_cache(model, tokens, int8=int8)
    return Int8Cache(model.config) if int8 else DynamicCache(config=model.config)


def first_size(known: int, most: int) -> int:
    """Tokens for which a static cache has room at first, of which so many are known and so many may come to be in all."""
    return round_up(min(most, known + _LATER), _CACHE_STEP)


def _warn_once(model: Part, reason: str) -> None:
    if model.why_slow is None:
        model.why_slow = reason
        name = type(model).__name__
        warnings.warn(f"{name} writes tokens in many calls, not by a CUDA graph, as {reason}: torch.compile may be faster", stacklevel=2)


def _read(model: Part, ids: Tensor, choice: Choice, config: GenerationConfig, arguments: Arguments) -> Step:
    """Read the prompt ids [B, t] as transformers does, on a GPU into a cache of fixed size."""
    more, name = tokens_before(ids, config, arguments), cache_name(arguments)
    if _on_gpu(ids.device):
        known = ids.shape[1] + more
        size = first_size(known, more + config.max_length)
        if type(arguments[name]) is DynamicCache:
            arguments[name] = static_cache(model, size)
        elif not _is_static(arguments[name]):
            arguments[name].layers = static_cache(model, size, int8=True).layers
        elif capacity(make_rings(arguments[name]), model) < known:
            enlarge(arguments[name], model, size)
    prepared = model, arguments, model._prefill(ids, config, arguments), choice, ids, more
    if not _on_gpu(ids.device):
        return Step(*prepared)
    step = GraphStep(*prepared, arguments[name])
    if model.why_slow is not None:
        step.refuse(model.why_slow)
    return step


def _decode(
    model: Part,
    ids: Tensor,
    told: Text,
    step: Step | GpuText,
    criteria: StoppingCriteriaList,
    config: Any,
    streamer: Any,
    arguments: Arguments,
    pad: int | None,
) -> object:
    """`_sample` of transformers after the prompt: ids [B, t] and what follows, [B, n]. told: what the host knows, and is returned."""
    cache = arguments[cache_name(arguments)]
    anywhere = all(type(one) in _ANYWHERE for one in criteria)
    unfinished = torch.ones(len(ids), dtype=torch.bool, device="cpu")
    with torch.cuda.device_of(ids), _closing(step), model._optimize_model_for_decode():
        while True:
            new = step.next(told.ids, goes_on=told.count + 1 < config.max_length)
            if pad is not None and not unfinished.all():
                new = new.where(unfinished, pad)
            told.append(new)
            if streamer is not None:
                streamer.put(new)
            unfinished &= ~criteria(told.ids if anywhere else told.ids.to(ids.device), None).cpu()
            if not unfinished.any():
                break
        if _is_kept(cache, config):
            step.finish()
        if isinstance(step, GraphStep) and step.refused is not None:
            _warn_once(model, step.refused)
    if streamer is not None:
        streamer.end()
    found = told.ids.to(ids.device, copy=True)
    return GenerateDecoderOnlyOutput(**{"sequences": found, KV_CACHE: cache}) if config.return_dict_in_generate else found


@contextmanager
def _closing(step: Step | GpuText) -> Iterator[None]:
    try:
        yield
    finally:
        step.close()
