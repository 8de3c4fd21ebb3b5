"""Continuous batching: `Batch` generates text for sequences that join and leave while others run.

    batch.submit   a sequence waits
    batch.step     prefills a chunk of the next prompt that waits, or decodes one token of every sequence that runs

A prompt is prefilled into a KV cache of its own, in chunks, between which other sequences are decoded. A sequence that runs alone is
decoded in that cache, by speculation if that is on. Several sequences move to the slots of one shared cache (`Slots`), and a step decodes a
token of each. Caches of sequences that have ended are kept (`PrefixCache`): a prompt that begins with the same tokens, as in a chat, is
prefilled from where they differ.

Called by `LanguageModel` and the server's engine. `CpuModel` or `GpuModel` computes logits, the `Sampler` of each sequence chooses tokens.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.lower_cpu import DecoderModel
from halfbyte.decoder.offload.placement import CHUNK
from halfbyte.errors import ArgumentError
from halfbyte.language.device import is_out_of_memory, no_memory_to_run, returned_memory
from halfbyte.language.prefix_cache import PrefixCache
from halfbyte.language.report import Mark, Times
from halfbyte.language.sampling.sampler import BatchSampler, Choice, LogitsProcessor, Sampler, Sampling, most_likely
from halfbyte.language.speculate import Draft, Guesser, PromptLookup, accepted_tokens
from halfbyte.language.text_stream import TextStream
from halfbyte.language.tokenizer import Tokenizer
from halfbyte.locks import FairLock

if TYPE_CHECKING:
    from halfbyte.decoder.lower_gpu import GpuModel

DEFAULT_NEW_TOKENS = 128  # where `Sampling` does not say
MOST_GUESSES = 64  # tokens
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(eq=False)
class Generation:
    """A sequence that is being generated.

    Attributes:
        prompt_ids: Token ids of the prompt.
        sampling: How its tokens are chosen.
        max_new_tokens: How many are generated at most.
        stream: Decodes their text.
        ids: Token ids of the answer so far.
        choices: Log probabilities of these, where `sampling` asks for them.
        finish_reason: "stop" after an end token or a stop string, "length" after `max_new_tokens`, "cancelled"; None while it runs.
        cached_tokens: Tokens of the prompt that were in the cache already.
        processors: Change its logits before a token is chosen.
        started, first_token, last_token: Times in seconds of `time.perf_counter`.
    """

    prompt_ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    stream: TextStream = field(repr=False)
    ids: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    processors: Sequence[LogitsProcessor] = ()
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    _text: str = field(default="", repr=False)
    _undecoded: list[int] = field(default_factory=list, repr=False)

    @property
    def text(self) -> str:
        """Text of the answer so far. Tokens are decoded when it is asked for, many in one call."""
        self._decode()
        return self._text

    def _decode(self) -> None:
        if self._undecoded:
            self._text += self.stream.extend(self._undecoded)
            self._undecoded = []

    def accept(self, token: int, *, ends: bool) -> None:
        """Append a token to the answer, without text if it `ends` the sequence, and set `finish_reason` where that was the last one."""
        self.ids.append(token)
        if not ends:
            self._undecoded.append(token)
        if self.sampling.stop:
            self._decode()
        is_last = len(self.ids) >= self.max_new_tokens
        reason: FinishReason | None = "stop" if ends or self.stream.finished else "length" if is_last else None
        if reason is not None:
            self._text = self.text + self.stream.flush()
            self.finish_reason = reason  # at the end: other threads read the text once it is there

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt per second that were read, with the time of the first token of the answer."""
        return (len(self.prompt_ids) - self.cached_tokens) / max(self.first_token - self.started, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first; 0 if there are none."""
        return (len(self.ids) - 1) / max(self.last_token - self.first_token, 1e-9) if len(self.ids) > 1 else 0.0


@dataclass(eq=False)
class _Running:
    """A sequence that runs: it has its first token and not its last.

    Attributes:
        generation: What the caller sees of it.
        sampler: Chooses its tokens.
        cache: The KV cache of this sequence alone; None: it has a slot of the shared one, that of its index in `Batch._active`.
        next_token: The newest token, which was chosen and is not in the cache yet.
        guesser: Guesses tokens for speculation; None: there is none.
        long_rope: Whether keys in the cache have the rope frequencies of long sequences ("longrope").
    """

    generation: Generation
    sampler: Sampler
    cache: Cache | None
    next_token: int
    guesser: Guesser | None = None
    long_rope: bool = False


class Batch:
    """Runs sequences of one model. Threads may share it: one steps at a time.

    Attributes:
        lock: Held while sequences change. A thread holds it to read the text of one that runs, where others call `step`.
        guessed, accepted: Tokens that were guessed, and how many of these were right.
        failed: The sequences whose prompts were being prefilled when `step` last raised an exception; none: a decode step failed.

    Example:
        batch = Batch(model, tokenizer)
        one, two = batch.submit([1, 2, 3], Sampling()), batch.submit([1, 5], Sampling(temperature=0.7))
        while batch.running:
            batch.step()
        print(one.text, two.text)
    """

    def __init__(
        self,
        model: DecoderModel,
        tokenizer: Tokenizer,
        *,
        slots: int = 16,
        int8_cache: bool = False,
        speculate: int = 0,
        draft: DecoderModel | None = None,
        prefix_bytes: int = 0,
        times: Times | None = None,
    ) -> None:
        """Create an empty batch.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            slots: Sequences that are decoded at the same time, at most; others wait.
            int8_cache: Keep keys and values in 8 bits.
            speculate: Tokens that are guessed at most, and checked together, while one sequence runs alone; 0: none.
            draft: A smaller model with the same vocabulary that guesses; None: guesses are looked up in the text so far.
            prefix_bytes: Bytes of KV caches of earlier sequences that stay for prompts with the same beginning; 0: of the last sequence
                that ran alone.
            times: Seconds of prefills and steps are added to it; None: they are not counted.

        Raises:
            ArgumentError: The model decodes fewer sequences at a time.
        """
        if not 1 <= slots <= model.most_decode:
            raise ArgumentError(f"this model decodes 1 to {model.most_decode} sequences at a time, got slots={slots}")
        if not 0 <= speculate <= MOST_GUESSES:
            raise ArgumentError(f"0 to {MOST_GUESSES} tokens are guessed at a time, got speculate={speculate}")
        self._model, self._tokenizer, self._int8, self._speculate = model, tokenizer, int8_cache, speculate
        self._draft: Draft | None = None
        if draft is not None and speculate:
            self._draft = Draft(draft, relative_cost=draft.spec.nbytes / model.spec.nbytes, int8_cache=int8_cache)
        self._capacity = slots
        self._slots = None if slots == 1 else self._new_slots()
        self._waiting: deque[Generation] = deque()
        self._active: list[_Running] = []  # one alone in its own cache, or each in the slot of its index
        self._preempted: list[_Running] = []  # whose cache was lost, by an exception or as rope switches: they are prefilled again
        self._prefill: tuple[Generation, Cache] | None = None  # the first one that waits, where a part of its prompt is in its cache
        self.failed: Sequence[Generation] = ()
        self._prefilling: Sequence[Generation] = ()  # whose prompts the step in progress prefills
        self._prefilled = 0  # tokens of prompts since the last decode step: after `prefill_chunk` of them other sequences are decoded
        self._prefixes = PrefixCache(prefix_bytes)
        self._times = Times() if times is None else times
        self._read_until: Mark | None = None  # where a GPU may still be reading what the last step launched
        self.accepted = self.guessed = 0
        self.lock = FairLock()

    @property
    def running(self) -> bool:
        """Whether there are sequences that have not finished."""
        return bool(self._active or self._waiting or self._preempted)

    @property
    def reads_prompt(self) -> bool:
        """Whether the next step prefills a prompt, or a chunk of it: there is a free slot, and other sequences have not waited too long."""
        has_slot = self._waiting and len(self._active) < self._capacity
        return bool(self._preempted or (has_slot and (self._prefilled < self._model.prefill_chunk or not self._active)))

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, processors: Sequence[LogitsProcessor] = (), *, is_chat: bool = False
    ) -> Generation:
        """Add a sequence, which starts with one of the next steps.

        Args:
            prompt_ids: Token ids of the prompt.
            sampling: How its tokens are chosen.
            processors: Change its logits before a token is chosen.
            is_chat: Whether the prompt is a rendered chat, whose answer is decoded as a new text. Otherwise it is decoded as a
                continuation, which keeps its leading space.

        Raises:
            ArgumentError: The prompt is empty, has ids that the model does not have, or is longer than the model's positions.
        """
        ids, spec = list(prompt_ids), self._model.spec
        if not ids:
            raise ArgumentError("the prompt has no tokens: write some text, or begin with the tokenizer's bos token if it has one")
        if min(ids) < 0 or max(ids) >= spec.vocabulary:
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise ArgumentError(f"the prompt has token {worst}, the model {spec.vocabulary} tokens: its tokenizer is another model's")
        asked, wanted = sampling.max_new_tokens, sampling.max_new_tokens or DEFAULT_NEW_TOKENS
        left = wanted if spec.max_positions is None else spec.max_positions - len(ids)
        longest, more = f"the model has {spec.max_positions} positions", ""
        if self._model.plan is not None:
            longest, more = f"its memory is planned for {spec.max_positions} tokens of a sequence", ", or open it with a larger context"
        if left < 1:
            raise ArgumentError(f"the prompt has {len(ids)} tokens, and {longest}: use a shorter text{more}")
        if asked is not None and asked > left:
            raise ArgumentError(f"max_new_tokens is at most {left} after {len(ids)} tokens, as {longest}, got {asked}: use less{more}")
        stream = TextStream(self._tokenizer, sampling.stop, () if is_chat else ids)
        generation = Generation(ids, sampling, min(wanted, left), stream, processors=processors)
        with self.lock:
            self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a sequence, whether it runs or waits. Other sequences go on undisturbed."""
        with self.lock:
            if generation in self._waiting:
                self._waiting.remove(generation)
                generation.finish_reason = "cancelled"
            if self._prefill is not None and self._prefill[0] is generation:
                self._end_prefill(*self._prefill)
            for running in [one for one in self._preempted if one.generation is generation]:
                self._preempted.remove(running)
                generation.finish_reason = "cancelled"
            for running in [one for one in self._active if one.generation is generation]:
                generation.finish_reason = "cancelled"
                self._leave(running)

    def step(self) -> list[Generation]:
        """Prefill a chunk of the next prompt that waits, or decode a token of each sequence that runs.

        Returns:
            The sequences that have new tokens.
        """
        with self.lock:
            try:
                return self._step()
            except BaseException as e:
                self.failed, self._prefilling = self._prefilling, ()
                self._forget_caches()
                if self._model.where is None or not is_out_of_memory(e):
                    raise
            # Here a GPU is out of memory. The handler has ended, as the traceback holds memory that can be freed now.
            model = cast("GpuModel", self._model)
            model.close_steps_of(None)
            count = len(self._preempted) + len(self.failed)
            raise no_memory_to_run(model.device, f"{count} sequence{'s' * (count > 1)}", returned_memory(model.device))

    def free(self) -> None:
        """Free the KV caches of earlier sequences."""
        with self.lock:
            self._prefixes.clear()

    def release_slots(self) -> None:
        """Free the buffers of the slots, which the next sequences allocate again, while no sequence runs and not on a GPU: recorded steps
        refer to them there."""
        if self._slots is not None and not self.running and self._model.where is None:
            self._slots = self._new_slots()

    def _step(self) -> list[Generation]:
        while self._preempted:
            self._resume(self._preempted[0])
        start, before = time.perf_counter(), self._prefilled
        if self.reads_prompt:
            together = self._prompts_to_batch()
            stepped = self._continue_prefill() if len(together) < 2 else self._prefill_together(together)
            self._times.add_prompt(self._prefilled - before, start)
            self._read_until = None if self._model.where is None else Mark.now(self._model.where.device)
            return stepped
        self._prefilled = 0
        if not self._active:
            return []
        if len(self._active) == 1 and self._active[0].cache is not None:
            stepped = [self._decode_alone(self._active[0])]
        else:
            stepped = self._decode_slots()
        self._times.add_step(start, self._read_until)
        self._read_until = None
        return stepped

    def _forget_caches(self) -> None:
        """Drop all caches, which an exception may have left inconsistent. Sequences that run are prefilled again with the next step."""
        self._preempted = [one for one in (*self._preempted, *self._active) if one.generation.finish_reason is None]
        self._waiting = deque(one for one in self._waiting if not any(one is other.generation for other in self._preempted))
        self._active, self._prefill = [], None
        self._prefixes.clear()
        if self._draft is not None:
            self._draft.forget()
        if self._slots is not None:
            self._slots = self._new_slots()

    def _resume(self, running: _Running) -> None:
        """Prefill a preempted sequence, with its answer so far, into a new cache, and let it run."""
        running.cache = self._new_cache()
        self._prefill_again(running, running.cache)
        self._active.append(running)
        self._preempted.remove(running)
        self._share_slots()

    def _share_slots(self) -> None:
        """Move sequences that have a cache of their own to the slots, where there are several."""
        if len(self._active) > 1:
            for one in self._active:
                self._take_slot(one)

    def _new_cache(self) -> Cache:
        return Cache(self._model.spec, int8=self._int8, most=self._model.spec.max_positions, where=self._model.where)

    def _new_slots(self) -> Slots:
        return Slots(self._model.spec, self._capacity, int8=self._int8, most=self._model.spec.max_positions, where=self._model.where)

    def _continue_prefill(self) -> list[Generation]:
        """Prefill a chunk of the first prompt that waits; after the last one, choose the first token.

        Returns:
            The sequence, if it has its first token.
        """
        if self._prefill is None:
            generation = self._waiting[0]
            generation.started = time.perf_counter()
            for one in self._active if self._prefixes.limit else ():  # its own cache becomes a prefix, which this prompt may share
                self._take_slot(one)
            cache, generation.cached_tokens = self._cache_for(generation.prompt_ids)
            self._prefill = generation, cache
        generation, cache = self._prefill
        self._prefilling = [generation]
        prompt, start = generation.prompt_ids, cache.length
        # Each chunk copies all experts of the CPU to the GPU: larger chunks where no other sequence waits.
        is_larger = self._model.streams_experts and not self._active
        end = min(len(prompt), start + (CHUNK if is_larger else self._model.prefill_chunk))
        if 0 < len(prompt) - end < self._model.least_prefill:
            end = len(prompt) - self._model.least_prefill
        self._prefilled += end - start
        logits = self._model.prefill(prompt[start:end], cache, total=len(prompt))
        if end < len(prompt):
            self._prefilling = ()
            return []
        started = self._start([self._running_of(generation, cache)], logits[None])
        self._share_slots()
        return started

    def _prompts_to_batch(self) -> list[Generation]:
        """Return the first sequences that wait, 1, 2, 4, … of them, whose prompts are short enough to be prefilled as one batch."""
        free, spec = min(self._capacity - len(self._active), self._model.most_prompts), self._model.spec
        most, switch = min(self._model.prefill_chunk, spec.max_positions or self._model.prefill_chunk), spec.rope_switch
        together: list[Generation] = []
        if free < 2 or self._slots is None or self._prefill is not None or self._speculate:
            return together
        longest = 0
        for generation in itertools.islice(self._waiting, free):
            prompt = generation.prompt_ids
            longest = max(longest, len(prompt))
            if (len(together) + 1) * _padded_length(longest) > most or (switch is not None and longest > switch):
                break
            if self._prefixes.find(prompt, len(prompt) - 1, 1, switch)[0] is not None:
                break
            together.append(generation)
        return together[: 1 << (len(together).bit_length() - 1)] if together else together

    def _prefill_together(self, generations: Sequence[Generation]) -> list[Generation]:
        """Prefill short prompts as one batch, and choose their first tokens."""
        slots, lengths = self._slots, [len(generation.prompt_ids) for generation in generations]
        assert slots is not None
        self._prefilling, now = generations, time.perf_counter()
        for generation in generations:
            generation.started = now
        if not self._prefixes.limit:
            self._prefixes.clear()
        most = _padded_length(max(lengths))
        cache = Cache(self._model.spec, len(generations), int8=self._int8, most=most, where=self._model.where)
        logits = cast("GpuModel", self._model).prefill_together([generation.prompt_ids for generation in generations], cache)
        self._prefilled += sum(lengths)
        for one in self._active:
            self._take_slot(one)
        slots.join(cache, lengths)
        return self._start([self._running_of(generation, None) for generation in generations], logits)

    def _end_prefill(self, generation: Generation, cache: Cache) -> None:
        """Keep the part of a cancelled sequence's prompt that has been prefilled, as a prefix for other prompts."""
        prompt, spec = generation.prompt_ids, self._model.spec
        if spec.has_long_rope(cache.length) == spec.has_long_rope(len(prompt)):  # else a short prefix has frequencies of long sequences
            self._prefixes.put(prompt, cache)
        self._prefill = None

    def _running_of(self, generation: Generation, cache: Cache | None) -> _Running:
        is_float16 = self._model.where is not None and self._model.where.dtype == torch.float16
        sampler = Sampler(generation.sampling, generation.prompt_ids, generation.processors, is_float16=is_float16)
        guesser = self._draft or PromptLookup() if self._speculate else None
        return _Running(generation, sampler, cache, 0, guesser)

    def _start(self, runs: Sequence[_Running], logits: Tensor) -> list[Generation]:
        """Choose the token after each prompt, whose logits [B, N] are given; the sequences run from then on."""
        samplers = [one.sampler for one in runs]
        if self._model.where is None:
            first: Sequence[int | Choice] = [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]
        else:
            chooser = BatchSampler(samplers)
            first = chooser.accept(chooser(logits).tolist())
        self._prefill, self._prefilling = None, ()
        for one in runs:
            self._active.append(one)
            self._waiting.remove(one.generation)
        return [self._accept(one, chosen) for one, chosen in zip(runs, first, strict=True)]

    def _cache_for(self, prompt: list[int]) -> tuple[Cache, int]:
        """Return a cache for a prompt, and how many of its tokens it already has."""
        # At least one token is left to prefill, for the logits after it; on a CPU as many as give the same logits as a whole prompt does.
        least = self._model.least_prefill
        prefix = self._prefixes.take(prompt, len(prompt) - least, least, self._model.spec.rope_switch)
        return (self._new_cache(), 0) if prefix is None else prefix

    def _take_slot(self, running: _Running) -> None:
        """Move a sequence from a cache of its own to the next free slot."""
        if running.cache is not None and self._slots is not None:
            self._slots.join(running.cache)
            if self._prefixes.limit:
                self._prefixes.put([*running.generation.prompt_ids, *running.generation.ids], running.cache)
            running.cache = None

    def _decode_alone(self, running: _Running) -> Generation:
        """Decode one token of a sequence in its own cache, or several, where guesses pay."""
        generation, switch = running.generation, self._model.spec.rope_switch
        assert running.cache is not None
        if running.cache.length == switch and not running.long_rope:  # from here on all tokens have other frequencies
            running.cache = self._new_cache()
            self._prefill_again(running, running.cache)
        cache = running.cache
        left = generation.max_new_tokens - len(generation.ids) - 1
        if switch is not None and cache.length < switch:
            left = min(left, switch - cache.length - 1)
        if running.guesser is not None and left > 0 and not generation.sampling.logprobs:
            most = min(self._speculate, left, self._model.most_verify - 1)
            if guesses := running.guesser.guess([*generation.prompt_ids, *generation.ids], most):
                self._check_guesses(running, running.guesser, cache, guesses)
                return generation
        (chosen,) = self._chosen([running], cache)
        return self._accept(running, chosen)

    def _chosen(self, runs: Sequence[_Running], cache: Cache) -> Iterable[int | Choice]:
        """Decode `next_token` of each sequence, and choose the one after it."""
        tokens, samplers = [one.next_token for one in runs], [one.sampler for one in runs]
        are_plain = all(sampler.is_plain for sampler in samplers)
        if self._model.where is None:
            logits = self._model.decode(tokens, cache)
            return most_likely(logits) if are_plain else (sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True))
        chooser = None if are_plain else BatchSampler(samplers)
        launch_ahead = all(len(one.generation.ids) + 1 < one.generation.max_new_tokens for one in runs) and not self._speculate
        chosen = cast("GpuModel", self._model).decode_tokens(tokens, cache, choose=chooser, launch_ahead=launch_ahead)
        return chosen if chooser is None else chooser.accept(chosen)

    def _check_guesses(self, running: _Running, guesser: Guesser, cache: Cache, guesses: list[int]) -> None:
        """Compute the logits after `next_token` and after each guess at once, and accept the tokens that the sampler chooses by these,
        up to the first that was not guessed."""
        before = cache.length
        logits = self._model.verify([running.next_token, *guesses], cache)
        if not running.sampler.is_plain:
            logits = logits.cpu()  # tokens are chosen one after the other
        chosen = accepted_tokens(running.sampler, logits, guesses)
        self.guessed += len(guesses)
        self.accepted += len(chosen) - 1
        guesser.checked(len(guesses), len(chosen) - 1)
        is_valid = cache.cut(before + len(chosen))  # `next_token` and the right guesses; the last chosen token enters with the next step
        for count, token in enumerate(chosen, 1):
            if self._accept(running, token).finish_reason is not None:
                if count < len(chosen):  # the cache is kept as a prefix: with the tokens that it would have without speculation
                    cache.cut(before + count)
                return
        if not is_valid:  # a sliding window had dropped tokens that are needed again: the cache is empty now
            self._prefill_again(running, cache)

    def _prefill_again(self, running: _Running, cache: Cache) -> None:
        """Prefill the prompt and the answer so far, without `next_token`, into an empty cache."""
        tokens = [*running.generation.prompt_ids, *running.generation.ids]
        self._model.prefill(tokens[:-1], cache, total=len(tokens))
        running.long_rope = self._model.spec.has_long_rope(len(tokens))

    def _decode_slots(self) -> list[Generation]:
        """Decode one token of each sequence in the slots."""
        slots, switch = self._slots, self._model.spec.rope_switch
        assert slots is not None
        positions = zip(self._active, slots.positions(), strict=True)
        if short := [one for one, position in positions if position == switch and not one.long_rope]:
            for running in short:  # from here on all of their tokens have other frequencies: they are prefilled again
                self._free_slot(running)
                self._preempted.append(running)
            return []
        runs = list(self._active)
        # From the last slot to the first: when a sequence leaves, the last one moves to its slot, whose token was accepted already.
        chosen = list(self._chosen(runs, slots))
        accepted = [self._accept(run, token) for run, token in zip(runs[::-1], chosen[::-1], strict=True)]
        return accepted[::-1]

    def _accept(self, running: _Running, chosen: int | Choice) -> Generation:
        """Append a token to the answer of a sequence, which leaves with its last one."""
        generation = running.generation
        token = chosen if isinstance(chosen, int) else chosen.id
        if isinstance(chosen, Choice):
            generation.choices.append(chosen)
        running.next_token = token
        generation.last_token = time.perf_counter()
        if not generation.ids:
            generation.first_token = generation.last_token
        generation.accept(token, ends=token in self._tokenizer.eos_ids and not generation.sampling.ignore_eos)
        if generation.finish_reason is not None:
            self._leave(running)
        return generation

    def _leave(self, running: _Running) -> None:
        """Remove a sequence that has ended, and keep its cache for prompts that begin like it."""
        ids = [*running.generation.prompt_ids, *running.generation.ids]
        if running.cache is not None:
            self._prefixes.put(ids, running.cache)
            self._active.remove(running)
            return
        if self._prefixes.limit and self._slots is not None:
            try:
                self._prefixes.put(ids, self._slots.copy_of(self._active.index(running)))
            except torch.OutOfMemoryError:  # a prefix saves time, other sequences need the memory
                self._prefixes.clear()
        self._free_slot(running)

    def _free_slot(self, running: _Running) -> None:
        """Remove a sequence from its slot, to which the last one moves."""
        index = self._active.index(running)
        assert self._slots is not None
        self._slots.leave(index)
        last = self._active.pop()
        if last is not running:
            self._active[index] = last  # as in the slots


def _padded_length(longest: int) -> int:
    """Return the rows that each of several prompts takes in a batch: a power of 2, so that few shapes of launches occur."""
    return 1 << (longest - 1).bit_length()


def run(batch: Batch, generations: Sequence[Generation]) -> Iterator[tuple[int, str]]:
    """Run sequences of a batch until all of them have finished.

    Yields:
        The index of a sequence and its new text, where there is any.
    """
    shown = [0] * len(generations)
    for _ in steps(batch, generations):
        for index, generation in enumerate(generations):  # others that run this batch may have generated some of its text
            with batch.lock:
                piece = generation.text[shown[index] :]
            if piece:
                shown[index] += len(piece)
                yield index, piece


def steps(batch: Batch, generations: Sequence[Generation]) -> Iterator[None]:
    """Run sequences of a batch until all of them have finished, and yield before the first step and after each one."""
    try:
        while True:
            ended = all(generation.finish_reason is not None for generation in generations)
            yield
            if ended:
                return
            batch.step()
    finally:  # an interrupted caller leaves nothing behind
        for generation in generations:
            if generation.finish_reason is None:
                batch.cancel(generation)
