"""A decoding step of any model of transformers as a CUDA graph: its call, and where it depends on scores alone the choice of the token.

This is for models that `GpuModel` does not compute (gpu_text.py), with a static cache that the caller does not see. The first step is an
ordinary one, the second is captured, which runs nothing, and then replayed, as are all later ones. What a step changes lies in tensors: the
token, positions, masks, the entries of the cache and their number. A cache layer with a window also counts in Python, and its mask changes
in another way once it is full: there the graph ends, and the next two steps make another (`ops/graph_capture.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StaticCache, cache_utils
from transformers.cache_utils import StaticSlidingWindowLayer

from halfbyte.decoder.gpu_step import HostReader
from halfbyte.integrations.transformers.generate.steps import TOKEN, Choice, Step, Text
from halfbyte.integrations.transformers.optimize.calls import Arguments
from halfbyte.layouts.base import round_up
from halfbyte.ops.graph_capture import CapturedGraph

if TYPE_CHECKING:
    from transformers import Cache
    from transformers.utils.generic import ModelOutput

    from halfbyte.integrations.transformers.modules import Part

_CACHE_STEP = 64  # tokens
_NO_END = 1 << 62  # replays


class GraphStep(Step):
    """A step on a GPU with a static cache. `refused` tells why it is not captured, where it is not."""

    refused: str | None = None

    def __init__(
        self, model: Part, arguments: Arguments, outputs: ModelOutput, choice: Choice, ids: Tensor, more: int, cache: StaticCache
    ) -> None:
        super().__init__(model, arguments, outputs, choice, ids, more)
        self._cache, self._prepared = cache, False
        self._graph: CapturedGraph | None = None
        self._tokens: Tensor | None = None  # that the graph reads, [B]
        self._result: Tensor | None = None  # of the graph: the next tokens, in the same place, or logits
        self._replays = 0
        self._left = 0  # replays for which the graph is right
        self._seen, self._reader = Text(ids), HostReader()
        self._last = self.first
        self._following: Tensor | None = self.first  # the next tokens, where they are on their way already

    def next(self, ids: Tensor, *, launch_ahead: bool) -> Tensor:
        """`Step.next`. The step after these tokens is started before the host has read them, where it is a graph."""
        tokens = self._after(self._seen.ids, self._last) if self._following is None else self._following
        self._last = tokens
        self._reader.ask(tokens)
        self._seen.append(tokens)
        is_ahead = launch_ahead and self._graph is not None and self._left > 0
        self._following = self._after(self._seen.ids, tokens) if is_ahead else None
        return self._reader.answer()

    def _after(self, ids: Tensor, tokens: Tensor) -> Tensor:
        if self._graph is not None and not self._left:
            self.close()
            self._inputs = None
        if self._graph is None:
            return super()._after(ids, tokens)
        self._skipped += 1
        return self._replayed(ids, tokens)

    def _run(self, ids: Tensor, tokens: Tensor) -> Tensor:
        self._capture(tokens)
        if self._graph is not None:
            return self._replayed(ids, tokens)
        self._skipped -= 1
        return super()._after(ids, tokens)

    def _replayed(self, ids: Tensor, tokens: Tensor) -> Tensor:
        assert self._graph is not None
        if tokens is not self._tokens:
            assert self._tokens is not None
            self._tokens.copy_(tokens)
        self._graph.replay()
        self._replays += 1
        self._left -= 1
        assert self._result is not None
        return self._result if self.choice.alone else self.choice(ids, self._result)

    def refuse(self, reason: str) -> None:
        super().refuse(reason)
        self.refused = reason

    def _capture(self, tokens: Tensor) -> None:
        inputs = self._inputs
        assert inputs is not None
        if not inputs.same_shapes:
            self.refuse("its attention takes a mask that becomes longer from token to token")
            return
        counts = [(layer, layer.cumulative_length_int) for layer in _windows(self._cache)]
        # Until a window is full. What is full stays so.
        left = [layer.max_cache_len - n for layer, n in counts if n < layer.max_cache_len]

        captured_tokens = self._tokens = tokens.clone()

        def step() -> Tensor:
            scores = self._scores(captured_tokens)
            return captured_tokens.copy_(self.choice(inputs.values[TOKEN], scores)) if self.choice.alone else scores

        try:
            self._graph = CapturedGraph(tokens.device)
            self._result = self._graph.capture(step)
        except RuntimeError as error:
            self._graph = None
            for layer, n in counts:
                layer.cumulative_length_int = n
            self.refuse(f"torch cannot capture its step ({' '.join(str(error).split())[:200]})")
        else:
            self._left, self._replays = min(left, default=_NO_END), 0

    def close(self) -> None:
        if self._graph is None:
            return
        self._graph.close()
        self._graph = self._result = self._tokens = None
        for layer in _windows(self._cache):
            layer.cumulative_length_int += self._replays - 1  # one was counted by the capture


class Window(StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A window whose tokens move by operations that can be captured, once it is full."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """keys, values [B, Hkv, T, D], after new ones."""
        if self.cumulative_length_int < self.max_cache_len or key_states.shape[2] > 1:
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return found
        self.cumulative_length_int += 1
        assert self.keys is not None
        assert self.values is not None
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states.copy_(torch.cat((states[:, :, 1:], new), 2))
        return self.keys, self.values


def static_cache(model: Part, tokens: int) -> StaticCache:
    """An empty cache for a model, with room for so many tokens."""
    return capturable(StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=round_up(tokens, _CACHE_STEP)))


def capturable(cache: StaticCache) -> StaticCache:
    """Make `Window`s of a cache's windows, in place."""
    for layer in cache.layers:
        if type(layer) is StaticSlidingWindowLayer:
            layer.__class__ = Window
    return cache


def keeping(cache: Cache) -> list[Any]:
    """Layers of a cache but for those that keep nothing, of layers that read keys and values of others."""
    placeholder = getattr(cache_utils, "DummyLayer", None)  # transformers >= 5.18
    return [layer for layer in cache.layers if type(layer) is not placeholder]


def _windows(cache: StaticCache) -> list[Window]:
    return [layer for layer in cache.layers if isinstance(layer, Window)]
