"""A decoding step as a CUDA graph: the model's call, and where it depends on scores alone the choice of the token and its way back.

The first step is an ordinary one, the second is captured, which runs nothing, and then replayed, as are all later ones. What a step changes
lies in tensors: the token, positions, masks, the entries of a static cache and their number. A cache layer with a window (`rings.py`) also
counts in Python, and its mask changes in another way once it is full; a cache that is full is replaced by a larger one: there the graph
ends, and the next two steps make another (`ops/graph_capture.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import StaticCache, cache_utils

from halfbyte.decoder.gpu_step import HostReader
from halfbyte.integrations.transformers.cache.rings import Ring, make_rings
from halfbyte.integrations.transformers.cache.static_codes import IN_CODES, with_codes
from halfbyte.integrations.transformers.generate.steps import TOKEN, Choice, Step, Text
from halfbyte.integrations.transformers.optimize.calls import Arguments
from halfbyte.ops.graph_capture import CapturedGraph

if TYPE_CHECKING:
    from transformers import Cache
    from transformers.utils.generic import ModelOutput

    from halfbyte.integrations.transformers.modules import Part

_LARGEST = 1 << 62  # tokens
_EMPTY = getattr(cache_utils, "DummyLayer", None)  # older versions of transformers do not have it


class GraphStep(Step):
    """A step on a GPU with a static cache. `refused` tells why it is not captured, where it is not."""

    refused: str | None = None

    def __init__(
        self, model: Part, arguments: Arguments, outputs: ModelOutput, choice: Choice, ids: Tensor, more: int, cache: StaticCache
    ) -> None:
        super().__init__(model, arguments, outputs, choice, ids, more)
        self._cache, self._capacity = cache, capacity(cache, model)
        self._prepared = False
        self._graph: CapturedGraph | None = None
        self._tokens: Tensor | None = None  # that the graph reads, [B]
        self._result: Tensor | None = None  # of the graph: the next tokens, in the same place, or logits
        self._replays = 0
        self._left = 0  # replays for which the graph is right
        self._seen, self._reader = Text(ids), HostReader()
        self._last = self.first
        self._following: Tensor | None = self.first  # the next tokens, where they are on their way already

    def next(self, ids: Tensor, *, goes_on: bool) -> Tensor:
        """`Step.next`. The step after these tokens is started before the host has read them, where it is a graph."""
        tokens = self._after(self._seen.ids, self._last) if self._following is None else self._following
        self._last = tokens
        self._reader.ask(tokens)
        self._seen.append(tokens)
        is_ahead = goes_on and self._graph is not None and self._left > 0
        self._following = self._after(self._seen.ids, tokens) if is_ahead else None
        return self._reader.answer()

    def _after(self, ids: Tensor, tokens: Tensor) -> Tensor:
        length = self._length(ids)
        if self._graph is not None and not self._left:
            self.close()
            self._inputs = None
        if length >= self._capacity:
            enlarge(self._cache, self._model, 2 * length)
            self._capacity = capacity(self._cache, self._model)
            self._before = self._inputs = None
        if self._graph is None:
            return super()._after(ids, tokens)
        self._skipped += 1
        return self._replayed(ids, tokens)

    def _run(self, ids: Tensor, tokens: Tensor) -> Tensor:
        self._capture(self._length(ids), tokens)
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

    def _capture(self, length: int, tokens: Tensor) -> None:
        inputs = self._inputs
        assert inputs is not None
        if not inputs.same_shapes:
            self.refuse("its attention takes a mask that becomes longer from token to token")
            return
        counts = [(layer, layer.cumulative_length_int) for layer in _rings(self._cache)]
        # Until a window is full. What is full stays so.
        left = [self._capacity - length, *(layer.max_cache_len - n for layer, n in counts if n < layer.max_cache_len)]

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
            self._left, self._replays = min(left), 0

    def close(self) -> None:
        if self._graph is None:
            return
        self._graph.close()
        self._graph = self._result = self._tokens = None
        for layer in _rings(self._cache):
            layer.cumulative_length_int += self._replays - 1  # one was counted by the capture

    def finish(self) -> None:
        """Takes the token of a step that was started ahead out of the cache."""
        if self._following is None:
            return
        self.close()
        for layer in keeping(self._cache):
            if isinstance(layer, Ring):
                layer.cumulative_length_int -= 1
            layer.cumulative_length.sub_(1)


def static_cache(model: Part, size: int, *, int8: bool = False) -> StaticCache:
    """An empty cache for a model, with room for `size` tokens, perhaps in 8 bits; windows are rings."""
    cache = make_rings(StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=size))
    return with_codes(cache) if int8 else cache


def keeping(cache: Cache) -> list[Any]:
    """Layers of a cache but for those that keep nothing, of layers that read keys and values of others."""
    return [layer for layer in cache.layers if type(layer) is not _EMPTY]


def capacity(cache: StaticCache, model: Part) -> int:
    """The number of tokens for which a cache has room. Layers with a window have it always, once they are as large as the window."""
    layer_pairs = zip(keeping(cache), keeping(static_cache(model, _LARGEST)), strict=True)
    return min((layer.max_cache_len for layer, largest in layer_pairs if layer.max_cache_len < largest.max_cache_len), default=_LARGEST)


def enlarge(cache: StaticCache, model: Part, size: int) -> None:
    """Makes room for `size` tokens, in place."""
    int8 = any(type(layer) in IN_CODES for layer in cache.layers)
    layer_pairs: Any = zip(cache.layers, static_cache(model, size, int8=int8).layers, strict=True)
    for index, (old, new) in enumerate(layer_pairs):
        if type(new) is _EMPTY or new.max_cache_len <= old.max_cache_len:
            continue
        if old.is_initialized:
            new.lazy_initialization(old.keys, old.values)
            _copy(old, new)
            if type(old) in IN_CODES:
                new.floats = old.floats
                _copy(old.scales, new.scales)
            new.cumulative_length.copy_(old.cumulative_length)
            if isinstance(old, Ring):
                new.cumulative_length_int = old.cumulative_length_int
        cache.layers[index] = new


def _copy(old: Any, new: Any) -> None:
    for target, source in ((new.keys, old.keys), (new.values, old.values)):
        target[:, :, : old.max_cache_len] = source


def _rings(cache: StaticCache) -> list[Ring]:
    return [layer for layer in cache.layers if isinstance(layer, Ring)]
