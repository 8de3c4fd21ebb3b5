"""A language model whose steps sleep, for benchmarks of what is around them: `serve.py --step-ms`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.decoder.cache import Cache, OnGpu
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.language.model import LanguageModel

_LAUNCHES = 5  # calls of CUDA in a step, each of which releases Python's lock
_PREFILL = 1 / 260  # of a decode step per token of a prompt: as on an H100


class SimulatedGpu:
    """The interface of `GpuModel`: launches return at once, results come when the time of all launches before has passed."""

    plan = None
    most_decode, most_verify, least_prefill, most_prompts, prefill_chunk = 256, 65, 1, 32, 2048
    streams_experts = False

    def __init__(self, spec: DecoderSpec, step: float) -> None:
        """Make a model. step: seconds of a decode step."""
        self.spec, self.where = spec, OnGpu(torch.device("cpu"), torch.bfloat16)
        self.device, self.notes = self.where.device, ()
        self._step, self._idle_at, self._ahead = step, 0.0, False
        self._random = random.Random(0)

    def _launch(self, seconds: float) -> float:
        """Launch work; the time at which it ends."""
        self._idle_at = max(self._idle_at, time.perf_counter()) + seconds
        return self._idle_at

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self.spec.vocabulary), k=count)

    def decode_tokens(
        self, ids: Sequence[int], cache: Cache, *, choose: Callable[[Tensor], Tensor] | None = None, launch_ahead: bool = False
    ) -> list[int]:
        """Choose random tokens at the time at which the step ends; with `launch_ahead` the next one is launched before."""
        cache.reserve(1)
        cache.positions()
        ends = self._idle_at if self._ahead else self._launch(self._step)
        cache.append(1)
        self._ahead = launch_ahead
        if launch_ahead:
            self._launch(self._step)
        for _ in range(_LAUNCHES):
            time.sleep(0)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return self._tokens(len(ids))

    def prefill(self, ids: Sequence[int], cache: Cache, *, total: int | None = None) -> Tensor:
        """Read a prompt: one token is likely."""
        return self._read([len(ids)], cache)[0]

    def prefill_together(self, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:
        """Read several prompts."""
        return self._read([len(prompt) for prompt in prompts], cache)

    def _read(self, lengths: Sequence[int], cache: Cache) -> Tensor:
        cache.reserve(max(lengths))
        cache.append(max(lengths))
        self._ahead = False
        ends = self._launch(self._step * max(0.5, _PREFILL * sum(lengths)))
        time.sleep(max(0.0, ends - time.perf_counter()))
        logits = torch.zeros(len(lengths), self.spec.vocabulary)
        logits[range(len(lengths)), self._tokens(len(lengths))] = 1
        return logits

    def close_steps_of(self, cache: Cache | None) -> None:
        """Nothing is held."""


def simulated(model: LanguageModel, step: float) -> LanguageModel:
    """Return a model with the same tokenizer, of one layer, so that moving its cache takes little time."""
    spec = replace(model.spec, layers=model.spec.layers[:1])
    found = LanguageModel(spec, model.tokenizer, model.path)
    found._model = SimulatedGpu(spec, step)  # type: ignore[assignment]
    return found
