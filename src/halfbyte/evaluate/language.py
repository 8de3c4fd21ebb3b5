"""Predictions of language models on a text: perplexity, and how far a candidate's predictions are from a reference's.

A text is read in windows of `context` tokens, each starting `stride` tokens after the previous one. Each token except the first is
scored once, in the first window that predicts it; so after the first window each is predicted from more than context - stride preceding
tokens. With stride = context windows do not overlap: the fastest, and what most papers do. A smaller stride is slower and more realistic:
in use, a model rarely sees only a few preceding tokens.

    perplexity   exp of the mean of -log p(token)
    divergence   mean of KL(reference || candidate) = sum_v p_ref(v) log(p_ref(v) / p_cand(v)) over the scored tokens, in nats
    top1         fraction of the scored tokens for which both models predict the same most likely token

Logits come from the models in their own precision; everything after is float64, on the reference's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError

_ROWS = 128  # of logits at a time in float64: 131 MB with a vocabulary of 128 000


@dataclass(frozen=True, slots=True)
class LanguageQuality:
    """The result of `evaluate_language` for one model, as defined above.

    tokens       scored
    perplexity   with its standard error, assuming independent tokens
    divergence, top1   against the reference; None for the reference itself
    """

    tokens: int
    perplexity: float
    perplexity_error: float
    divergence: float | None = None
    top1: float | None = None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


class _Sums:
    """Running sums over the scored tokens of one model."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.divergence = 0.0
        self.same = 0

    def add(self, log_p: Tensor, targets: Tensor, reference: Tensor | None) -> None:
        self.losses.append(-log_p.gather(1, targets[:, None])[:, 0].cpu())
        if reference is not None:
            # A token of probability 0 in the reference contributes 0, even if its probability in the candidate is 0 too.
            terms = torch.where(reference > -math.inf, reference.exp() * (reference - log_p), 0.0)
            self.divergence += float(terms.sum())
            self.same += int((reference.argmax(1) == log_p.argmax(1)).sum())

    def quality(self, compared: bool) -> LanguageQuality:
        losses = torch.cat(self.losses)
        n, perplexity = len(losses), math.exp(min(float(losses.mean()), 700.0))
        error = perplexity * float(losses.std()) / math.sqrt(n) if n > 1 else 0.0
        return LanguageQuality(n, perplexity, error, *((self.divergence / n, self.same / n) if compared else ()))


def evaluate_language(
    reference: object,
    candidates: Mapping[str, object],
    ids: Tensor,
    *,
    context: int = 512,
    stride: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[LanguageQuality, dict[str, LanguageQuality]]:
    """(the reference, each candidate) on one text.

    reference, candidates   causal language models: called with input_ids [1, t], return `logits` [1, t, V], the same V for all
    ids                     int64 [t], t >= 2: the text, with the special tokens at its beginning
    context, stride         as above; the default stride is the context
    progress                called with (tokens scored, total tokens) after each window

    Raises ArgumentError for a text that is too short, for invalid sizes and for logits with NaN.
    """
    stride = context if stride is None else stride
    if context < 1 or not 1 <= stride <= context:
        raise ArgumentError(f"context is 1 or more and stride 1 to context, got {context} and {stride}")
    if ids.dim() != 1 or len(ids) < 2:
        raise ArgumentError(f"a text has at least 2 tokens, got ids of shape {list(ids.shape)}")
    reference_sums, candidate_sums = _Sums(), {name: _Sums() for name in candidates}
    for begin, scored, end in _windows(len(ids), context, stride):
        window, targets = ids[begin : end - 1], ids[scored:end]
        rows = slice(scored - begin - 1, end - begin - 1)  # each row predicts the token after it
        expected = _logits(reference, window, rows, "the reference")
        found = {name: _logits(model, window, rows, name).to(expected.device) for name, model in candidates.items()}
        targets = targets.to(expected.device)
        for start in range(0, len(targets), _ROWS):
            part = slice(start, start + _ROWS)
            log_p = expected[part].double().log_softmax(1)
            reference_sums.add(log_p, targets[part], None)
            for name, logits in found.items():
                candidate_sums[name].add(logits[part].double().log_softmax(1), targets[part], log_p)
        if progress is not None:
            progress(end - 1, len(ids) - 1)
    return reference_sums.quality(compared=False), {name: sums.quality(compared=True) for name, sums in candidate_sums.items()}


@torch.inference_mode()
def last_word_accuracy(model: object, tokenizer: Callable[..., Mapping[str, list[int]]], lines: Sequence[str]) -> float:
    """The fraction of lines whose last word the model predicts greedily from the words before it.

    The task of LAMBADA (Paperno et al., 2016, arXiv 1606.06031), on any lines. Raises ArgumentError for a line of one word.
    """
    right = 0
    for line in lines:
        before, blank, word = line.strip().rpartition(" ")
        if not before:
            raise ArgumentError(f"a line has at least two words, got {line.strip()!r}")
        start = tokenizer(before)["input_ids"]
        word_ids = tokenizer(blank + word, add_special_tokens=False)["input_ids"]
        ids = torch.tensor(start + word_ids, device="cpu")
        logits = _logits(model, ids, slice(len(start) - 1, len(ids) - 1), "the model")
        right += int((logits.argmax(1).cpu() == ids[len(start) :]).all())
    return right / len(lines)


def _windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first scored token, end) of each window: tokens begin … end - 2 are read, tokens begin + 1 … end - 1 predicted."""
    scored = 1
    for begin in range(0, count, stride):
        end = min(begin + context + 1, count)
        yield begin, scored, end
        if end == count:
            return
        scored = end


@torch.inference_mode()
def _logits(model: Any, ids: Tensor, rows: slice, name: str) -> Tensor:
    """The logits [rows, V] of a model for a text [t]."""
    logits: Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, rows]
    if bool(logits.isnan().any()):
        raise ArgumentError(f"the logits of {name} contain NaN: its weights are damaged or its activations overflow")
    return logits
