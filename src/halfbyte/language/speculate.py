"""Speculative decoding by prompt lookup: the tokens that followed the last occurrence of the newest ones are guessed to follow again.

Guesses are read together with the newest token, at the price of little more than one decode step, and accepted as far as they are the
tokens that the sampler chooses: so the text is the same as without, but for tokens whose logits are closer than the rounding of several
rows differs from that of one (`CpuModel.verify`). Saxena, Prompt Lookup Decoding, 2023; Leviathan et al., 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from halfbyte.language.sampling import Choice, Sampler

_LONGEST, _SHORTEST = 4, 2  # tokens of an n-gram that is looked up
_WINDOW = 4096  # tokens in which it is searched


def guess(tokens: Sequence[int], most: int) -> list[int]:
    """Guess the tokens that follow.

    Args:
        tokens: The text so far.
        most: Tokens that are guessed at most.

    Returns:
        The tokens behind the last earlier occurrence of the newest 4, 3 or 2 tokens, or none.
    """
    text = tokens[-_WINDOW:]
    for size in range(_LONGEST, _SHORTEST - 1, -1):
        newest = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == newest:
                return list(text[start + size : start + size + most])
    return []


def accepted_tokens(sampler: Sampler, logits: Tensor, guesses: Sequence[int]) -> list[int | Choice]:
    """Choose tokens one by one, as long as the guesses were right.

    Args:
        sampler: Of the sequence.
        logits: [1 + guesses, N], after the newest token and after each guess.
        guesses: Token ids.

    Returns:
        The chosen tokens: the guesses that are right, and the one behind them.
    """
    chosen: list[int | Choice] = []
    for index, row in enumerate(logits):
        token = sampler.choose(row)
        chosen.append(token)
        if index == len(guesses) or token != guesses[index]:
            break
    return chosen
