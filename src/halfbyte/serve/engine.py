"""`Engine`: the thread that owns a language model's `Batch`, and how the event loop talks to it.

The event loop puts `Job`s, the sequences of a `Request`, into a queue. The thread moves them into the batch, decodes step by step, and
hands new text to the event loop, of each sequence 60 times a second at most, and less often where many run: many steps of a GPU are shorter
than that, and each event of a stream takes the time of a token of others. Until then tokens are not even decoded to text. Each step sends
the text of some sequences, so that none takes the time of all. The loop never waits for the model, and the model never for a client: text
that a slow client has not read yet waits in its request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from halfbyte.errors import HalfbyteError
from halfbyte.language.generate import Batch, Generation
from halfbyte.language.sampling.sampler import Choice, LogitsProcessor, Sampling
from halfbyte.memory import return_freed_memory
from halfbyte.serve.metrics import Metrics
from halfbyte.serve.replies import ApiError, shutting_down

_log = logging.getLogger("halfbyte.serve")
_INTERVAL = 1 / 60  # seconds between the texts that are sent of a sequence, at least: those of a display's frames
_PER_TEXT = 1 / 4000  # seconds between the texts of all sequences: the event loop then takes some tenth of a core from the engine
_TRIM = 30.0  # seconds between returns of freed memory while sequences run: caches of all lengths come and go, and fragment the heap
_IDLE = 10.0  # seconds without a sequence after which memory that the next ones need is freed


class Processor(LogitsProcessor, Protocol):
    """A logits processor that may give up."""

    error: str | None


class Update(NamedTuple):
    """New text and tokens of a sequence, for the response.

    Attributes:
        sequence: Its index in the request.
        text: New text.
        choices: New tokens with log probabilities, where they were asked for.
        finish_reason: "stop" or "length" with the last update.
    """

    sequence: int
    text: str
    choices: list[Choice]
    finish_reason: str | None


@dataclass(eq=False)
class Job:
    """A sequence of a request.

    The event loop makes it. From then on the engine's thread has `generation`, `sent_tokens` and `sent_text`, which are what the loop was
    told of it; the loop has what follows these: text and tokens that no response has taken yet, and counts.

    It has its `request` from when the engine takes it to its end: longer, the two would keep each other alive, with tokens, log
    probabilities and grammars, until Python's collector finds them, which takes hundreds of requests.
    """

    request: Request = field(init=False)
    index: int
    prompt_ids: list[int]
    sampling: Sampling
    processors: Sequence[Processor] = ()
    is_chat: bool = False
    generation: Generation | None = None
    sent_tokens: int = 0
    sent_text: int = 0
    text: list[str] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    new_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    is_updated: bool = False


class Request:
    """The sequences of one request, for the event loop.

    Attributes:
        jobs: The sequences.
        deadline: Time of `time.monotonic` at which it is ended.
        cancelled: Whether no client waits for it any more.
        error: Why it has failed, or None.
    """

    def __init__(self, deadline: float) -> None:
        self.jobs: list[Job] = []
        self.deadline, self.cancelled = deadline, False
        self.error: ApiError | None = None
        self._event = asyncio.Event()

    def cancel(self) -> None:
        """End it: no client waits for its text any more."""
        self.cancelled = True
        self._event.set()

    def fail(self, error: ApiError) -> None:
        """End it with an error, the first one of several."""
        self.error = self.error or error
        self.cancel()

    def wake(self) -> None:
        """Tell who waits that there is something new."""
        self._event.set()

    @property
    def new_tokens(self) -> int:
        """Tokens that were generated so far."""
        return sum(job.new_tokens for job in self.jobs)

    async def started(self) -> None:
        """Wait for the first token of a sequence.

        Raises:
            ApiError: There will be none.
        """
        while not any(job.is_updated for job in self.jobs) and not self.cancelled:
            await self._event.wait()
            self._event.clear()
        self._raise()

    def _raise(self) -> None:
        """Raise the error, if there is one, and give it up: by its traceback, the two would keep each other alive."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    async def updates(self) -> AsyncIterator[Update]:
        """Yield what is new of the sequences until all have finished, or the request is cancelled.

        Raises:
            ApiError: It has failed.
        """
        left = len(self.jobs)
        while left:
            for job in self.jobs:
                if job.is_updated:
                    job.is_updated = False
                    left -= job.finish_reason is not None
                    reason = None if job.finish_reason == "cancelled" else job.finish_reason
                    update = Update(job.index, "".join(job.text), job.choices, reason)
                    job.text, job.choices = [], []
                    yield update
            self._raise()
            if self.cancelled or not left:
                return
            await self._event.wait()
            self._event.clear()


class _Change(NamedTuple):
    """What the event loop is told of a sequence."""

    job: Job
    text: str
    choices: list[Choice]
    new_tokens: int
    finish_reason: str | None
    error: ApiError | None


class Engine:
    """Runs the sequences of requests, in a thread of its own.

    Example:
        engine = Engine(model.batch(16, prefix_bytes=1 << 29), parallel=16, most_waiting=64, metrics=Metrics())
        engine.start(asyncio.get_running_loop())
        with engine.admit(request, 1):
            request.jobs.append(Job(0, prompt_ids, Sampling()))
        async for update in request.updates(): ...
    """

    def __init__(self, batch: Batch, *, parallel: int, most_waiting: int, metrics: Metrics) -> None:
        """Create an engine, whose thread does not run yet.

        Args:
            batch: The thread will own it.
            parallel: Sequences that the batch decodes at the same time.
            most_waiting: Sequences beyond these that wait, at most; more are refused.
            metrics: Counts tokens and times.
        """
        self._batch, self._metrics = batch, metrics
        self._most_unfinished = parallel + most_waiting
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._jobs: dict[Generation, Job] = {}  # the thread's
        self._unsent: dict[Job, None] = {}  # the thread's: with tokens that were not sent; the one that waits longest is the first
        self._stepped = 0.0  # time of the last step; the thread's
        self._trimmed = 0.0  # time of the last return of freed memory; the thread's
        self._unfinished = 0  # the event loop's
        self._closing, self._ending, self._has_ended = False, False, False
        self._idle, self._hurried = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="halfbyte-engine", daemon=True)

    # The event loop's side

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread."""
        self._loop = loop
        self._metrics.watch(self._batch, lambda: self._unfinished)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._has_ended and not self._closing

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return self._unfinished

    @contextmanager
    def admit(self, request: Request, count: int) -> Iterator[None]:
        """Take room for the sequences of a request, which the block adds, and decode them from its end on, unless no client waits any more.

        Preparing a request takes time and memory, too: no more are prepared than fit the queue.

        Args:
            request: The request, without jobs.
            count: Of the jobs that it will have.

        Raises:
            ApiError: There is no room for them in the queue, or the server is shutting down.
        """
        if not self.is_ready:
            raise shutting_down()
        if self._unfinished + count > self._most_unfinished:
            raise ApiError(
                429,
                f"{self._unfinished} sequences run and wait, {self._most_unfinished} at most: ask again later",
                "queue_full",
                headers={"Retry-After": "1"},
            )
        self._unfinished += count
        self._idle.clear()
        try:
            yield
            if self._has_ended:
                raise shutting_down()
        except BaseException:
            self._leave(count)
            raise
        if request.cancelled:
            self._leave(count)
            return
        for job in request.jobs:
            job.request = request
            self._inbox.put(job)

    def _leave(self, count: int) -> None:
        """Count sequences that have ended."""
        self._unfinished -= count
        if not self._unfinished:
            self._idle.set()

    def hurry(self) -> None:
        """Let `close` wait no longer; called in a signal's handler, too."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._hurried.set)

    async def close(self, grace: float) -> None:
        """Refuse new requests, give the others `grace` seconds to finish, end those that do not, and stop the thread."""
        self._closing = True
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, self._hurried)]
        await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._ending = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 30.0)

    def _deliver(self, changes: list[_Change]) -> None:
        """Add what the thread has told to the jobs, and wake the responses that wait for it."""
        for job, text, choices, new_tokens, finish_reason, error in changes:
            if text:
                job.text.append(text)
            job.choices += choices
            job.new_tokens += new_tokens
            job.is_updated = True
            if finish_reason is not None:
                job.finish_reason = finish_reason
            if error is not None:
                job.request.fail(error)
            job.request.wake()
            if finish_reason is not None:
                del job.request
        self._leave(sum(change.finish_reason is not None for change in changes))

    def _end_all(self) -> None:
        """End all sequences after the thread has ended. On the event loop, where requests come in: none comes in between."""
        self._has_ended = True
        left = list(self._jobs.values())
        self._jobs = {}
        with suppress(queue.Empty):
            while True:
                job = self._inbox.get(block=False)
                left += [] if job is None else [job]
        self._deliver([self._change(job, "cancelled", shutting_down()) for job in left])

    # The thread's side

    def _run(self) -> None:
        try:
            self._trim()  # what the model was built from: later it would take as long as some steps, which streams would wait for
            while self._admit():
                self._drop()
                if self._batch.running:
                    self._step()
                if time.monotonic() - self._trimmed > _TRIM:
                    self._trim()
        except BaseException:
            _log.exception("the engine's thread has failed")
            raise
        finally:
            assert self._loop is not None
            with suppress(RuntimeError):  # the loop is closed: no client waits
                self._loop.call_soon_threadsafe(self._end_all)

    def _trim(self) -> None:
        self._trimmed = time.monotonic()
        return_freed_memory()

    def _admit(self) -> bool:
        """Move new sequences into the batch; wait for one if none runs. False: the thread has to stop."""
        is_released = False
        while True:
            try:
                job = self._inbox.get(block=not self._batch.running, timeout=None if is_released else _IDLE)
            except queue.Empty:
                if self._batch.running:
                    return not self._ending
                self._batch.release_slots()
                self._trim()
                is_released = True
                continue
            if is_released:
                self._trimmed = time.monotonic()  # nothing has been freed since
            if job is None or self._ending:
                if job is not None:
                    self._inbox.put(job)  # `_end_all` finds it
                return False
            try:
                job.generation = self._batch.submit(job.prompt_ids, job.sampling, job.processors, is_chat=job.is_chat)
                self._jobs[job.generation] = job
            except HalfbyteError as e:
                self._notify([self._change(job, "cancelled", ApiError(400, str(e)))])
            except Exception as e:  # the thread and other requests go on
                _log.error("a request could not be started", exc_info=e)
                error = ApiError(500, f"{type(e).__name__}, which the server's log describes", "model_failed")
                self._notify([self._change(job, "cancelled", error)])

    def _drop(self) -> None:
        """End sequences that no client waits for, or whose time is over."""
        now, changes = time.monotonic(), []
        for generation, job in list(self._jobs.items()):
            is_late = now > job.request.deadline
            if not job.request.cancelled and not is_late:
                continue
            self._batch.cancel(generation)
            del self._jobs[generation]
            error = ApiError(504, "the time of this request is over: ask for fewer tokens, or later", "timeout") if is_late else None
            changes.append(self._change(job, "cancelled", error))
        self._notify(changes)

    def _step(self) -> None:
        """Decode a token of each sequence. First tokens and ends are sent at once, for a client waits for them, others now and then."""
        try:
            stepped = self._batch.step()
        except Exception as e:
            self._fail(e)
            return
        urgent = []
        for generation in stepped:
            job = self._jobs[generation]
            if not job.sent_tokens or generation.finish_reason is not None:
                self._unsent.pop(job, None)
                urgent.append(job)
            else:
                self._unsent[job] = None
        now = time.monotonic()
        share = (now - self._stepped) / max(_INTERVAL, _PER_TEXT * len(stepped))
        count = len(self._unsent) if self._batch.reads_prompt else math.ceil(share * len(self._unsent))  # a prompt may take long
        self._stepped = now
        self._notify([self._new(job) for job in [*urgent, *itertools.islice(self._unsent, count)]])
        for generation in stepped:
            if generation.finish_reason is not None:
                del self._jobs[generation]

    def _new(self, job: Job) -> _Change:
        """Return what the event loop has not been told of a sequence that runs or has just finished, and count its first and last token."""
        generation, error = job.generation, None
        assert generation is not None
        if not job.sent_tokens:
            self._metrics.first_token(generation)
            job.cached_tokens = generation.cached_tokens
        if generation.finish_reason is not None:
            self._metrics.finished(generation)
            faults = [processor.error for processor in job.processors if processor.error is not None]
            error = ApiError(400, faults[0], "schema_too_complex", "response_format") if faults else None
        return self._change(job, generation.finish_reason, error)

    def _change(self, job: Job, finish_reason: str | None, error: ApiError | None) -> _Change:
        """Return what the event loop has not been told of a sequence.

        Args:
            job: The sequence.
            finish_reason: Where it has ended.
            error: Why it has failed.
        """
        generation = job.generation
        self._unsent.pop(job, None)
        if generation is None:
            return _Change(job, "", [], 0, finish_reason, error)
        text, choices = generation.text[job.sent_text :], generation.choices[job.sent_tokens :]
        new_tokens = len(generation.ids) - job.sent_tokens
        job.sent_text += len(text)
        job.sent_tokens += new_tokens
        return _Change(job, text, choices, new_tokens, finish_reason, error)

    def _fail(self, error: Exception) -> None:
        """End the sequences whose prompts could not be read, or all of them after an error of another step."""
        _log.error("a step of the model has failed", exc_info=error)
        failed = self._batch.failed
        ended = [job for generation, job in self._jobs.items() if not failed or generation in failed]
        for job in ended:
            assert job.generation is not None
            self._batch.cancel(job.generation)
            del self._jobs[job.generation]
        said = str(error) if isinstance(error, HalfbyteError) else f"{type(error).__name__}, which the server's log describes"
        failure = ApiError(500, f"the model has failed ({said}): ask again", "model_failed")
        self._notify([self._change(job, "cancelled", failure) for job in ended])

    def _notify(self, changes: list[_Change]) -> None:
        """Tell the event loop of changes."""
        assert self._loop is not None
        if changes:
            self._metrics.generated(sum(change.new_tokens for change in changes))
            with suppress(RuntimeError):  # the loop is closed: no client waits
                self._loop.call_soon_threadsafe(self._deliver, changes)
