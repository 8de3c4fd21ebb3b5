"""Decode steps of a model of transformers as CUDA graphs, for models that `GpuModel` (gpu_text.py) does not compute.

`generating.py` makes a `GraphStep` for each call of `generate` on a GPU. Its steps are computed as follows:

    first steps    as in `Step`, until the arguments of two steps have shown how they change (`StepArguments` in steps.py)
    capture        one step is captured, which runs nothing: the model's call and, if it depends on logits alone, the choice of the token
    replays        that step, and all later ones

A replay reads and writes the same tensors each time: tokens, positions, masks, and the static cache with its length. A cache layer with a
sliding window also counts its tokens in Python, and its mask changes in another way once the window is full. So a graph captured before
that is replaced then: two ordinary steps, and a new capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StaticCache, cache_utils
from transformers.cache_utils import StaticSlidingWindowLayer

from halfbyte.decoder.gpu_step import HostReader
from halfbyte.integrations.transformers.generate.request import Request, TokenIds
from halfbyte.integrations.transformers.generate.steps import TOKEN, Step
from halfbyte.layouts.base import round_up
from halfbyte.ops.graph_capture import CapturedGraph

if TYPE_CHECKING:
    from transformers import Cache
    from transformers.utils.generic import ModelOutput

    from halfbyte.integrations.transformers.modules import Part

_CACHE_MULTIPLE = 64  # static caches have room for a multiple of this number of tokens
_UNLIMITED = 1 << 62  # replays of a graph that stays valid


class GraphStep(Step):
    """The decode steps of one call of `generate` on a GPU, with a static cache.

    Attributes:
        refused: Reason why steps are not captured; None where they are, or no capture was tried.
    """

    refused: str | None = None

    def __init__(self, request: Request, outputs: ModelOutput) -> None:
        """Begin after the prompts, which were read into a `static_cache`, or one that is `capturable`."""
        super().__init__(request, outputs)
        self._cache: StaticCache = request.cache
        self._prepare_each = False  # `_capture` decides by `StepArguments.same_shapes`, and replaces graphs
        self._graph: CapturedGraph | None = None
        self._graph_tokens: Tensor | None = None  # [B], the tokens that the graph decodes
        self._graph_result: Tensor | None = None  # `_graph_tokens` if `choose.alone`, which the graph overwrites; else logits [B, N]
        self._replays = 0  # of this graph
        self._replays_left = 0  # until the graph is no longer valid
        self._text, self._reader = TokenIds(request.ids), HostReader()
        self._newest = self.first  # the tokens [B] that `next` returned last
        self._launched: Tensor | None = self.first  # the tokens [B] that `next` returns next, if their step was launched already

    def next(self, ids: Tensor, *, launch_ahead: bool) -> Tensor:
        """Return the next tokens [B], on the host, as `Step.next` does. `launch_ahead` launches a graph only."""
        tokens = self._next_tokens(self._text.ids, self._newest) if self._launched is None else self._launched
        self._newest = tokens
        self._reader.ask(tokens)
        self._text.append(tokens)
        can_launch = launch_ahead and self._graph is not None and self._replays_left > 0
        self._launched = self._next_tokens(self._text.ids, tokens) if can_launch else None
        return self._reader.answer()

    def _next_tokens(self, ids: Tensor, tokens: Tensor) -> Tensor:
        if self._graph is not None and not self._replays_left:
            self.close()
            self._inputs = None  # `Step` compares two steps again
        if self._graph is None:
            return super()._next_tokens(ids, tokens)
        self._unprepared += 1
        return self._replay(ids, tokens)

    def _decode(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Capture the step and replay it; where it cannot be captured, let transformers prepare it."""
        self._capture(tokens)
        if self._graph is not None:
            return self._replay(ids, tokens)
        self._unprepared -= 1  # `Step` has counted this step as one without transformers' preparation
        return super()._next_tokens(ids, tokens)

    def _replay(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens [B] that follow all tokens so far, ids [B, t], of which the last column is `tokens`."""
        assert self._graph is not None
        assert self._graph_tokens is not None
        assert self._graph_result is not None
        if tokens is not self._graph_tokens:
            self._graph_tokens.copy_(tokens)
        self._graph.replay()
        self._replays += 1
        self._replays_left -= 1
        return self._graph_result if self.choose.alone else self.choose(ids, self._graph_result)

    def refuse(self, reason: str) -> None:
        """Let transformers prepare and run each step from now on."""
        super().refuse(reason)
        self.refused = reason

    def _capture(self, tokens: Tensor) -> None:
        """Capture the step that decodes tokens [B] and the later ones; `refuse` where that fails."""
        inputs = self._inputs
        assert inputs is not None
        if not inputs.same_shapes:
            self.refuse("its attention takes a mask that becomes longer from token to token")
            return
        window_lengths = [(layer, layer.cumulative_length_int) for layer in _windows(self._cache)]
        until_full = [layer.max_cache_len - length for layer, length in window_lengths if length < layer.max_cache_len]
        graph_tokens = tokens.clone()
        self._graph_tokens = graph_tokens

        def step() -> Tensor:
            logits = self._compute_logits(graph_tokens)
            return graph_tokens.copy_(self.choose(inputs.values[TOKEN], logits)) if self.choose.alone else logits

        try:
            graph = CapturedGraph(tokens.device)
            self._graph_result = graph.capture(step)
        except RuntimeError as error:
            for layer, length in window_lengths:
                layer.cumulative_length_int = length
            self.refuse(f"torch cannot capture its step ({' '.join(str(error).split())[:200]})")
        else:
            self._graph, self._replays, self._replays_left = graph, 0, min(until_full, default=_UNLIMITED)

    def close(self) -> None:
        """Free the graph, and count its replays in the cache layers that count in Python."""
        if self._graph is None:
            return
        self._graph.close()
        self._graph = self._graph_result = self._graph_tokens = None
        for layer in _windows(self._cache):
            layer.cumulative_length_int += self._replays - 1  # the capture ran Python's part once: it has counted one


class Window(StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A cache layer with a sliding window that a CUDA graph can update. Once it is full, each new token shifts all others by one place, by
    operations that can be captured."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append new keys and values [B, Hkv, t, D]; return those of the window, [B, Hkv, T, D]."""
        if self.cumulative_length_int < self.max_cache_len or key_states.shape[2] > 1:
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self.cumulative_length_int += 1
        assert self.keys is not None
        assert self.values is not None
        for window, new in ((self.keys, key_states), (self.values, value_states)):
            window.copy_(torch.cat((window[:, :, 1:], new), 2))
        return self.keys, self.values


def static_cache(model: Part, tokens: int) -> StaticCache:
    """Return an empty cache for a model, `capturable`, with room for at least this number of tokens."""
    return capturable(StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=round_up(tokens, _CACHE_MULTIPLE)))


def capturable(cache: StaticCache) -> StaticCache:
    """Return the same cache, whose sliding-window layers have become `Window`s in place."""
    for layer in cache.layers:
        if type(layer) is StaticSlidingWindowLayer:
            layer.__class__ = Window
    return cache


def layers_with_states(cache: Cache) -> list[Any]:
    """Return the layers of a cache that hold keys and values: all but the placeholders of decoder layers that reuse those of another."""
    placeholder = getattr(cache_utils, "DummyLayer", None)  # transformers >= 5.18
    return [layer for layer in cache.layers if type(layer) is not placeholder]


def _windows(cache: StaticCache) -> list[Window]:
    return [layer for layer in cache.layers if isinstance(layer, Window)]
