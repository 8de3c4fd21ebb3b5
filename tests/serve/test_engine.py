"""`Engine`: first tokens and ends are sent at once, and other text in turn, that of every sequence within the interval."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("tokenizers")

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from halfbyte.language import Sampling, TextStream, Tokenizer
from halfbyte.language.generate import Generation
from halfbyte.serve import engine as serve_engine
from halfbyte.serve.engine import Engine, Job, Request
from halfbyte.serve.metrics import Metrics
from halfbyte.serve.replies import ApiError

STEP, NEW = 0.002, 200  # seconds, tokens


class FakeBatch:
    """Each step takes `STEP` seconds of a clock that stands still otherwise, and appends the token "a" to each sequence."""

    reads_prompt, guessed, accepted = False, 0, 0

    def __init__(self, count: int) -> None:
        backend: Any = Backend(models.WordLevel({"a": 0}, "a"))
        backend.decoder = decoders.Fuse()
        tokenizer, sampling = Tokenizer(backend, {}), Sampling(max_new_tokens=NEW)
        self.now, self.running = 0.0, True
        self.generations = [Generation([0], sampling, NEW, TextStream(tokenizer)) for _ in range(count)]

    def step(self) -> list[Generation]:
        self.now += STEP
        for generation in self.generations:
            generation.accept(0, ends=False)
        return self.generations


@pytest.mark.parametrize("count", [1, 7, 128])
def test_text_is_sent_in_turn(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = FakeBatch(count)
    monkeypatch.setattr(time, "monotonic", lambda: batch.now)
    engine, request, sent = Engine(batch, parallel=count, most_waiting=0, metrics=Metrics()), Request(1e9), list[list[Any]]()
    engine._loop = SimpleNamespace(call_soon_threadsafe=lambda deliver, changes: sent.append(changes))  # type: ignore[assignment]
    for index, generation in enumerate(batch.generations):
        request.jobs.append(Job(index, [0], Sampling(max_new_tokens=NEW), generation=generation))
        engine._jobs[generation] = request.jobs[-1]
    interval, last, texts, steps_with_text = max(serve_engine._INTERVAL, serve_engine._PER_TEXT * count), [0.0] * count, [""] * count, 0
    for step in range(NEW):
        sent.clear()
        engine._step()
        for change in (change for changes in sent for change in changes):
            index = change.job.index
            assert change.new_tokens == len(change.text) > 0
            texts[index] += change.text
            assert batch.now - last[index] <= interval + 2 * STEP
            last[index] = batch.now
        told = sum(map(len, sent))
        assert told == count if step in (0, NEW - 1) else told <= count * STEP / interval + 1, "the work is spread over the steps"
        steps_with_text += told > 0
    assert texts == ["a" * NEW] * count
    assert not engine._jobs
    assert not engine._unsent


async def end_of_a_failed_request(starts: bool) -> weakref.ref[Request]:
    request = Request(1e9)
    request.fail(ApiError(400, "too complex"))
    try:
        if starts:
            await request.started()
        else:
            request.jobs.append(Job(0, [0], Sampling()))
            async for _ in request.updates():
                raise AssertionError("there are none")
    except ApiError:
        return weakref.ref(request)
    raise AssertionError("it has failed")


@pytest.mark.parametrize("starts", [True, False])
def test_an_error_does_not_keep_its_request(starts: bool) -> None:
    gc.disable()
    try:
        assert asyncio.run(end_of_a_failed_request(starts))() is None
    finally:
        gc.enable()
