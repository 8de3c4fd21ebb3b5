"""Logits → the next token: `Sampler` for one sequence, `BatchSampler` for several at once on a GPU. Both draw by `draw.py`.

Called by the generation loop (language/generate.py). Penalties, temperature,
top-k, top-p and min-p have the meaning and the order of transformers' logits processors; presence and frequency penalties are those of
OpenAI's API, as in vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, non_finite_logits
from halfbyte.language.sampling.draw import NOT_FINITE, UNDECIDED, DrawSettings, choose_rows

LEAST, MOST = 1e-5, 1e5  # of what logits are divided by: less makes them infinite in float32, more makes them equal
_MOST_PENALTY = 2.0  # as in OpenAI's API
# Settings that are numbers: whether they are whole ones, the least and the largest value, what is allowed, and the remedy.
_RANGES: dict[str, tuple[bool, float, float, str, str]] = {
    "temperature": (False, LEAST, MOST, f"is 0 for greedy decoding, or {LEAST:g} to {MOST:g}", "try 0.7"),
    "top_k": (True, 1, math.inf, "is 1 or more", "leave it out to draw from all tokens"),
    "top_p": (False, math.nextafter(0, 1), 1, "is a probability above 0", "leave it out to draw from all tokens"),
    "min_p": (False, 0, 1, "is a probability", "leave it out to draw from all tokens"),
    "repetition_penalty": (False, LEAST, MOST, f"is {LEAST:g} to {MOST:g}", "leave it out for none"),
    "presence_penalty": (False, -_MOST_PENALTY, _MOST_PENALTY, f"is {-_MOST_PENALTY:g} to {_MOST_PENALTY:g}", "leave it out for none"),
    "frequency_penalty": (False, -_MOST_PENALTY, _MOST_PENALTY, f"is {-_MOST_PENALTY:g} to {_MOST_PENALTY:g}", "leave it out for none"),
    "seed": (True, -(1 << 63), (1 << 64) - 1, "has 64 bits", "use a smaller number"),
    "max_new_tokens": (True, 1, math.inf, "is 1 or more", "ask for at least one token"),
    "logprobs": (True, 0, math.inf, "is 0 or more", "leave it out for none"),
}
_NOT_NONE = {"temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"}
_FIRST_CANDIDATES = 64  # tokens that `Sampler.draw` looks at first; most texts need no more
_AS_LIKELY = 8  # tokens more than top_k: some may be as likely as the last of them


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one sequence are chosen, and when it ends.

    Attributes:
        temperature: 0: greedy, the most likely token; above 0: logits are divided by it, and a token is drawn.
        top_k: Draw from the K most likely tokens; None: from all.
        top_p: Draw from the most likely tokens with the total probability P; None: from all.
        min_p: Draw from tokens that are at least P times as likely as the most likely one; None: from all.
        repetition_penalty: Divide positive logits of tokens that have occurred, in the prompt or after it, by it, and multiply negative
            ones.
        presence_penalty: Subtract it from the logits of tokens that have been generated.
        frequency_penalty: Subtract it from the logits of generated tokens as often as they have been generated.
        seed: Seed of the sequence's own generator; None: drawn from torch's default generator, so that `torch.manual_seed` decides.
        max_new_tokens: Maximum number of tokens to generate; None: as many as the model has room for.
        stop: Strings that end the text; they are not part of it.
        logprobs: Number of most likely tokens whose log probabilities are returned with each token, by the model's own logits; 0: of the
            token alone; None: no log probabilities.
        ignore_eos: Go on after a token that ends an answer.

    Raises:
        ArgumentError: A value is out of its range, or top_k, top_p or min_p have no effect because temperature is 0.

    Example:
        >>> hb.Sampling(temperature=0.7, top_p=0.9, seed=1, stop=("END",)).top_p
        0.9
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, (is_whole, least, most, allowed, remedy) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name not in _NOT_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
                kind, pass_ = ("a whole number", "an int") if is_whole else ("a number", "a float")
                raise ArgumentError(f"{name} is {kind}, got {value!r}: pass {pass_}")
            if not least <= value <= most and not (name == "temperature" and value == 0):  # NaN, too
                raise ArgumentError(f"{name} {allowed}, got {value}: {remedy}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ArgumentError(f"stop is a list of strings of one character or more, got {self.stop!r}: pass such a list")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not self.temperature and (self.top_k or (self.top_p or 1) < 1 or self.min_p):
            raise ArgumentError("top_k, top_p and min_p have no effect without sampling: add a temperature, such as 0.7")


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence before each of its tokens is chosen: excludes tokens that a grammar forbids, or adds a bias."""

    def process(self, logits: Tensor) -> Tensor:
        """Return other logits [N] for the next token, of which one at least is above -inf; the given ones are not changed."""

    def accept(self, token: int) -> None:
        """Learn which token was chosen."""


class Choice(NamedTuple):
    """A token with log probabilities, natural logarithms by the model's logits before penalties and temperature.

    Attributes:
        id: The token.
        logprob: Its log probability.
        top: (id, log probability) of the most likely tokens, in decreasing order.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses the tokens of one sequence; remembers what it has chosen, for penalties.

    Draws come from a generator of its own, one number a token: a sequence gets the same tokens whatever else is in its batch.

    Attributes:
        sampling: How tokens are chosen.
        is_float16: Whether the model's activations are float16, whose range some models leave: an error about its logits names the remedy.

    Example:
        sampler = Sampler(Sampling(temperature=0.7, seed=1), prompt_ids)
        id = sampler.choose(logits)
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int] = (),
        processors: Sequence[LogitsProcessor] = (),
        *,
        is_float16: bool = False,
    ) -> None:
        """Start a sequence.

        Args:
            sampling: How tokens are chosen.
            prompt_ids: Ids of the prompt's tokens, to which the repetition penalty applies.
            processors: Change the logits before penalties, one after the other.
            is_float16: Whether the model's activations are float16.
        """
        self.sampling, self.is_float16, self._processors = sampling, is_float16, tuple(processors)
        self._penalizes = sampling.repetition_penalty != 1 or bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._occurred = _Ids(prompt_ids if sampling.repetition_penalty != 1 else ())
        self._counts: Counter[int] = Counter()
        self._generator: torch.Generator | None = None
        if sampling.temperature:
            seed = sampling.seed
            if seed is None:
                seed = int(torch.randint(0, (1 << 63) - 1, (), dtype=torch.int64, device="cpu"))
            self._generator = torch.Generator(device="cpu").manual_seed(seed)

    @property
    def is_plain(self) -> bool:
        """Whether it chooses the most likely token, without penalties and log probabilities."""
        return not self.draws and not self.changes_logits and self.sampling.logprobs is None

    @property
    def changes_logits(self) -> bool:
        """Whether it has penalties or processors."""
        return self._penalizes or bool(self._processors)

    def choose(self, logits: Tensor) -> int | Choice:
        """Choose the next token.

        Args:
            logits: The model's logits [N] for the next token, of any floating-point dtype, on any device; they are not changed. -inf
                excludes a token.

        Returns:
            The token's id; where `sampling.logprobs` is not None a Choice.

        Raises:
            ArgumentError: The logits are no vector of floating-point numbers, or the prompt has a token that they have no element for.
            CheckpointError: The logits are NaN or infinite.
        """
        if logits.dim() != 1 or logits.numel() == 0 or not logits.is_floating_point():
            shape = [*logits.shape]
            raise ArgumentError(
                f"logits are a vector [N] of floating-point numbers, got {shape} {logits.dtype}: pass those of one sequence"
            )
        scores = self.scores(logits)
        chosen = self.draw(scores, self.uniform()) if self.draws else next(most_likely(scores[None], is_float16=self.is_float16))
        return self.accept(chosen, logits)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, not the most likely ones."""
        return self._generator is not None

    def uniform(self) -> float:
        """Return the next number of the sequence's generator, uniform in [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64, device="cpu"))

    def scores(self, logits: Tensor) -> Tensor:
        """Return the logits [N] after processors and penalties; the given ones are not changed."""
        scores = logits
        for processor in self._processors:
            scores = processor.process(scores)
        return self._penalized(scores) if self._penalizes else scores

    def accept(self, chosen: int, logits: Tensor) -> int | Choice:
        """Note which token was chosen, and return it, with log probabilities by the logits [N] where they are asked for."""
        if self._penalizes:
            self._counts[chosen] += 1
            if self.sampling.repetition_penalty != 1:
                self._occurred.add(chosen)
        for processor in self._processors:
            processor.accept(chosen)
        return chosen if self.sampling.logprobs is None else _with_logprobs(logits, chosen, self.sampling.logprobs)

    def _penalized(self, logits: Tensor) -> Tensor:
        """Return a copy of the logits in float32 with the penalties of tokens that have occurred."""
        scores = logits.to(torch.float32, copy=True)
        if (penalty := self.sampling.repetition_penalty) != 1 and self._occurred.count:
            if self._occurred.highest >= scores.numel():
                raise ArgumentError(
                    f"the prompt has token {self._occurred.highest}, and the model logits for {scores.numel()} tokens: "
                    "its tokenizer is another model's"
                )
            ids = self._occurred.on(scores.device)
            values = scores[ids]
            scores[ids] = torch.where(values < 0, values * penalty, values / penalty)
        if self._counts and (self.sampling.presence_penalty or self.sampling.frequency_penalty):
            ids = torch.tensor(list(self._counts), dtype=torch.int64, device=scores.device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=scores.device)
            scores[ids] -= self.sampling.presence_penalty + self.sampling.frequency_penalty * counts
        return scores

    def draw(self, scores: Tensor, uniform: float) -> int:
        """Draw a token of scores [N] by inverting the cumulative distribution at a number in [0, 1).

        Raises:
            CheckpointError: The scores are NaN or infinite.
        """
        top_k = self.sampling.top_k
        most = _FIRST_CANDIDATES if top_k is None else top_k + _AS_LIKELY
        settings = [draw_settings(self.sampling, scores.numel(), uniform)]
        while (token := int(choose_rows(scores[None], settings, most))) == UNDECIDED:
            most *= 8
        if token == NOT_FINITE:
            raise non_finite_logits(is_float16=self.is_float16)
        return token


def draw_settings(sampling: Sampling, count: int, uniform: float) -> DrawSettings:
    """Return the settings that a token of `count` is drawn with, at a number in [0, 1)."""
    top_p = math.inf if sampling.top_p is None or sampling.top_p == 1 else sampling.top_p
    log_min_p = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return DrawSettings(sampling.temperature, min(sampling.top_k or count, count), top_p, log_min_p, uniform)


class BatchSampler:
    """Chooses one token of each of several sequences, on the device of their logits: only token ids leave a GPU.

    Tokens are those of each `Sampler`, up to the rounding of sums, without a branch on what the logits hold, so that the host does not wait
    before it has the ids. Where more than `MOST_CANDIDATES` tokens of a sequence may be drawn, which is rare, its `Sampler` draws.

    Example:
        chooser = BatchSampler(samplers)
        ids = chooser(logits)               # on the device of the logits
        tokens = chooser.accept(ids.tolist())
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        """Begin a step. samplers: Of the sequences."""
        self._samplers = samplers

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose tokens.

        Args:
            logits: The model's logits [B, N], float32; not changed, and kept until `accept`.

        Returns:
            Ids int64 [B] on the same device; negative where `accept` has to decide.
        """
        self._logits, self._scores = logits, logits
        if any(sampler.changes_logits for sampler in self._samplers):
            self._scores = torch.stack([sampler.scores(row) for sampler, row in zip(self._samplers, logits, strict=True)])
        self._uniforms = [sampler.uniform() if sampler.draws else 0.0 for sampler in self._samplers]
        pairs = zip(self._samplers, self._uniforms, strict=True)
        return choose_rows(self._scores, [draw_settings(sampler.sampling, logits.shape[1], uniform) for sampler, uniform in pairs])

    def accept(self, ids: Sequence[int]) -> list[int | Choice]:
        """Note which tokens were chosen.

        Args:
            ids: What the call has returned.

        Raises:
            CheckpointError: Logits are NaN or infinite.
        """
        chosen = []
        for row, (sampler, id, uniform) in enumerate(zip(self._samplers, ids, self._uniforms, strict=True)):
            if id == NOT_FINITE:
                raise non_finite_logits(is_float16=sampler.is_float16)
            token = sampler.draw(self._scores[row].cpu(), uniform) if id == UNDECIDED else id
            chosen.append(sampler.accept(token, self._logits[row]))
        return chosen


def most_likely(logits: Tensor, *, is_float16: bool = False) -> Iterator[int]:
    """Yield the most likely token of each row of logits [M, N], the first of those that are as likely.

    Args:
        logits: The logits.
        is_float16: Whether the model's activations are float16.

    Raises:
        CheckpointError: The logits of a row, when it is its turn, are NaN or infinite.
    """
    values, ids = logits.max(1)  # NaN counts as the highest
    for value, id in zip(values.tolist(), ids.tolist(), strict=True):
        if not math.isfinite(value):
            raise non_finite_logits(is_float16=is_float16)
        yield id


def _with_logprobs(logits: Tensor, chosen: int, count: int) -> Choice:
    logits = logits.float()
    total = torch.logsumexp(logits, 0)
    logprob = float(logits[chosen] - total)
    if not count:
        return Choice(chosen, logprob, ())
    values, ids = logits.topk(min(count, logits.numel()))
    return Choice(chosen, logprob, tuple(zip(ids.tolist(), (values - total).tolist(), strict=True)))


class _Ids:
    """A set of token ids that grows, as a tensor, to which new ids are appended only when it is asked for."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._set = set(ids)
        self._tensor = torch.tensor(sorted(self._set), dtype=torch.int64, device="cpu")
        self._new: list[int] = []

    @property
    def count(self) -> int:
        return len(self._set)

    @property
    def highest(self) -> int:
        return max(self._set)

    def add(self, id: int) -> None:
        if id not in self._set:
            self._set.add(id)
            self._new.append(id)

    def on(self, device: torch.device) -> Tensor:
        """Return the ids as int64 on a device."""
        if self._new or self._tensor.device != device:
            self._tensor = torch.cat([self._tensor.to(device), torch.tensor(self._new, dtype=torch.int64, device=device)])
            self._new = []
        return self._tensor
