"""Speculative decoding: tokens are guessed, and the model checks them together, at a lower price than that of as many decode steps.

Guesses come from the text so far (`PromptLookup`: Saxena, Prompt Lookup Decoding, 2023) or from a smaller model (`Draft`: Leviathan et
al., 2023). They are accepted as far as they are the tokens that the sampler chooses from the model's own logits, with its own random
numbers: the tokens are those without speculation, greedy or sampled. On a CPU that is exact, as the logits of several tokens are those of
one at a time, bit by bit (`CpuModel.verify`); on a GPU they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import DecoderModel
from halfbyte.language.prefix_cache import common_prefix
from halfbyte.language.sampling.sampler import Choice, Sampler, most_likely

_LONGEST = 8  # tokens of a text and of an earlier occurrence that are compared
_OCCURRENCES = 64  # of the newest two tokens that are looked at
_ROW_COST = 0.25  # of a decode step: what a verified token more adds to it
_PRIOR = {2: 0.5, 3: 0.6, 4: 0.75}  # probability that a guess after so many equal tokens is right
_DRAFT_PRIOR = 0.7
_PRIOR_WEIGHT, _DECAY, _RECOVERY = 4.0, 0.8, 0.05


class Guesser(Protocol):
    """Guesses tokens of one sequence."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess the tokens that follow a text, at most so many, as many as are worth checking."""

    def checked(self, guessed: int, right: int) -> None:
        """Learn how many of the last guesses were right."""


class Acceptance:
    """Estimates the probability p that a guess is right, from those that were checked, older ones counting less.

    The number of guesses g maximizes tokens per time, (1 + p + … + p^g) / (1 + cost * g) (Leviathan et al., 2023).
    """

    def __init__(self, prior: float) -> None:
        """Begin with a prior probability."""
        self._prior = prior
        self._right, self._checked = prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    def count(self, most: int, cost: float) -> int:
        """Return how many guesses pay. cost: of one, relative to a decode step."""
        probability = self._right / self._checked
        best, best_rate, expected, power = 0, 1.0, 1.0, 1.0
        for count in range(1, most + 1):
            power *= probability
            expected += power
            rate = expected / (1 + cost * count)
            if rate <= best_rate:
                break
            best, best_rate = count, rate
        if not best:  # what has failed is tried again after a while
            self._right += _RECOVERY * (self._prior * _PRIOR_WEIGHT - self._right)
            self._checked += _RECOVERY * (_PRIOR_WEIGHT - self._checked)
        return best

    def update(self, guessed: int, right: int) -> None:
        """Count guesses up to the first wrong one."""
        self._right = self._right * _DECAY + right
        self._checked = self._checked * _DECAY + min(right + 1, guessed)


class PromptLookup:
    """Guesses that the tokens behind an earlier occurrence of the newest ones follow again."""

    def __init__(self) -> None:
        """Begin a sequence."""
        self._followers: dict[tuple[int, int], list[int]] = {}  # index of the token behind each occurrence of two tokens
        self._indexed = 1
        self._acceptance = {length: Acceptance(prior) for length, prior in _PRIOR.items()}
        self._last = self._acceptance[2]

    def occurrence(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Find the longest earlier occurrence of the newest 2 to 8 tokens, the last one of these.

        Returns:
            Its length, or 0 if there is none, and the index of the token behind it.
        """
        count = len(tokens)
        for end in range(self._indexed, count - 1):
            self._followers.setdefault((tokens[end - 1], tokens[end]), []).append(end + 1)
        self._indexed = max(self._indexed, count - 1)
        found, follower = 0, 0
        for start in reversed(self._followers.get((tokens[-2], tokens[-1]), [])[-_OCCURRENCES:] if count > 1 else []):
            length = 2
            while length < min(_LONGEST, start) and tokens[start - 1 - length] == tokens[count - 1 - length]:
                length += 1
            if length > found:
                found, follower = length, start
            if found == _LONGEST:
                break
        return found, follower

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess the tokens that follow a text, which is the last call's with more tokens; none if there is no earlier occurrence."""
        length, follower = self.occurrence(tokens)
        if not length:
            return []
        self._last = self._acceptance[min(length, max(_PRIOR))]
        return list(tokens[follower : follower + self._last.count(most, _ROW_COST)])

    def checked(self, guessed: int, right: int) -> None:
        """Learn how many of the last guesses were right."""
        self._last.update(guessed, right)


class Draft:
    """Guesses by a smaller model of the same vocabulary, greedily.

    It has a cache of its own, which keeps what a text has in common with the last one: wrong guesses are cut off, and the beginning of a
    chat stays.
    """

    def __init__(self, model: DecoderModel, *, relative_cost: float, int8_cache: bool = False) -> None:
        """Make a draft.

        Args:
            model: The smaller model.
            relative_cost: Of its decode step, relative to one of the model that checks.
            int8_cache: Keep its keys and values in 8 bits.
        """
        self._model, self._cost, self._int8 = model, _ROW_COST + relative_cost, int8_cache
        self._acceptance = Acceptance(_DRAFT_PRIOR)
        self.forget()

    def forget(self) -> None:
        """Forget keys and values, which an exception may have left half written."""
        spec = self._model.spec
        self._cache = Cache(spec, int8=self._int8, most=spec.max_positions, where=self._model.where)
        self._tokens: list[int] = []  # in the cache
        self._long_rope = False

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess the tokens that follow a text; none where the model has no such positions or tokens."""
        spec, text = self._model.spec, list(tokens)
        room = [most, *(limit - len(text) for limit in (spec.max_positions,) if limit is not None)]
        if spec.rope_switch is not None and len(text) <= spec.rope_switch:
            room.append(spec.rope_switch - len(text))
        count = self._acceptance.count(min(room), self._cost) if min(room) > 0 else 0
        if not count:
            return []
        try:
            return self._guess(text, count)
        except BaseException:
            self.forget()
            raise

    def _guess(self, text: list[int], count: int) -> list[int]:
        spec = self._model.spec
        long_rope = spec.has_long_rope(len(text))
        same = common_prefix(self._tokens, text, len(text) - 1)
        if long_rope != self._long_rope or not self._cache.cut(same):
            self.forget()
            self._long_rope, same = long_rope, 0
        if max(text[same:]) >= spec.vocabulary:
            self._tokens = text[:same]
            return []
        if len(text) - same > 1:
            logits = self._model.prefill(text[same:], self._cache)
        else:
            logits = self._model.decode(text[same:], self._cache)[0]
        guesses = [int(logits.argmax())]
        while len(guesses) < count:
            logits = self._model.decode(guesses[-1:], self._cache)[0]
            guesses.append(int(logits.argmax()))
        self._tokens = [*text, *guesses[:-1]]
        return guesses

    def checked(self, guessed: int, right: int) -> None:
        """Learn how many of the last guesses were right."""
        self._acceptance.update(guessed, right)


def accepted_tokens(sampler: Sampler, logits: Tensor, guesses: Sequence[int]) -> list[int | Choice]:
    """Choose tokens one by one, as long as the guesses were right.

    Args:
        sampler: Of the sequence.
        logits: [1 + guesses, N], after the newest token and after each guess.
        guesses: Token ids.

    Returns:
        The chosen tokens: the guesses that are right, and the one behind them.
    """
    choices = most_likely(logits, is_float16=sampler.is_float16) if sampler.is_plain else map(sampler.choose, logits)
    chosen: list[int | Choice] = []
    for index, token in enumerate(choices):
        chosen.append(token)
        if index == len(guesses) or token != guesses[index]:
            break
    return chosen
