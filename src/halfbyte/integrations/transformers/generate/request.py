"""A call of `generate`: `Request` is what transformers passes on, `TokenChooser` chooses tokens as it does, `TokenIds` are those so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from halfbyte.decoder.gpu_step import likeliest
from halfbyte.integrations.transformers.optimize.calls import Arguments, cache_name

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList
    from transformers.utils.generic import ModelOutput

    from halfbyte.integrations.transformers.modules import Part

_DEFAULT_CACHE = "_halfbyte_made_by_transformers"  # attribute of caches that no caller has
_ROOM = 1024  # tokens
# Processors whose effect depends on scores alone, without a synchronization with the GPU.
_OF_SCORES = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class TokenChooser:
    """Chooses the next token of each sequence as transformers' `generate` does.

    Attributes:
        alone: Whether the choice depends on the logits alone, not on the tokens before.
    """

    def __init__(self, processors: LogitsProcessorList, sample: bool) -> None:
        """Take the logits processors of a call of `generate`, and whether it samples."""
        self._processors, self._sample = processors, sample
        self.alone = all(type(processor) in _OF_SCORES for processor in processors)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Choose tokens, int64 [B], by the tokens so far [B, t] and the logits [B, N]."""
        scores = logits.to(torch.float32, copy=bool(self._processors))  # processors may write to it
        for processor in self._processors:
            scores = processor(ids, scores)
        if not self._sample:
            return likeliest(scores)
        chances = scores.softmax(-1)
        if chances.is_cpu:
            return torch.multinomial(chances, 1).squeeze(1)
        # The same draw. torch.multinomial would wait for the GPU to check the chances.
        return likeliest(chances / torch.empty_like(chances).exponential_())


class Request:
    """A call of `generate`.

    Attributes:
        model: The model.
        ids: Of the prompts, [B, t].
        config: How tokens are generated.
        arguments: Of the model's next call.
        choose: Chooses tokens.
        cached: Number of tokens in the cache before the prompts.
        most: Number of tokens that the whole text has at most.
        keeps_cache: Whether the caller gets or has the cache.
    """

    def __init__(self, model: Part, ids: Tensor, config: GenerationConfig, arguments: Arguments, choose: TokenChooser) -> None:
        """Describe a call whose `max_length` is known."""
        self.model, self.ids, self.config, self.arguments, self.choose = model, ids, config, arguments, choose
        mask = arguments.get("attention_mask")
        lengths = 0 if mask is None else mask.shape[1], getattr(config, "_mask_length", 0)
        self.cached = max(0, *(length - ids.shape[1] for length in lengths))
        assert config.max_length is not None
        self.most = self.cached + config.max_length
        self.keeps_cache = bool(config.return_dict_in_generate) or not getattr(self.cache, _DEFAULT_CACHE, False)

    @property
    def cache(self) -> Any:
        """The KV cache of the model's next call."""
        return self.arguments[cache_name(self.arguments)]

    def prefill(self) -> ModelOutput:
        """Read the prompts by the model's forward, as transformers does."""
        outputs: ModelOutput = self.model._prefill(self.ids, self.config, self.arguments)
        return outputs


def mark_default(cache: object) -> None:
    """Note that transformers has made a cache, which no caller has."""
    setattr(cache, _DEFAULT_CACHE, True)


class TokenIds:
    """Token ids [B, t] of a text to which tokens are appended. The buffer grows by doubling, so that appending seldom copies."""

    def __init__(self, ids: Tensor) -> None:
        """Begin with the ids of a prompt."""
        self.count = ids.shape[1]
        self._places = torch.cat((ids, ids.new_empty(len(ids), _ROOM)), 1)

    @property
    def ids(self) -> Tensor:
        """All ids so far."""
        return self._places[:, : self.count]

    def append(self, tokens: Tensor) -> None:
        """Append a token [B] to each."""
        if self.count == self._places.shape[1]:
            self._places = torch.cat((self._places, torch.empty_like(self._places)), 1)
        self._places[:, self.count] = tokens
        self.count += 1
