"""Perplexity, divergence, agreement and last words, against values worked out another way."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.evaluate import evaluate_language, last_word_accuracy
from halfbyte.evaluate.language import _windows

WORDS = 7


class Model:
    """Predicts from the last two tokens of a window, so that the size of windows matters a little."""

    device = torch.device("cpu")

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self.table = scale * torch.randn(WORDS + 1, WORDS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.longest = 0

    def __call__(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        self.longest = max(self.longest, input_ids.shape[1])
        before = torch.cat((torch.full((1, 1), WORDS), input_ids[:, :-1]), 1)
        return SimpleNamespace(logits=self.table[before, input_ids])


def text(count: int) -> Tensor:
    return torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("count", "context", "stride"), [(2, 2, 2), (2, 9, 9), (31, 8, 8), (31, 8, 3), (32, 8, 8), (33, 8, 1), (9, 4, 4)])
def test_every_token_but_the_first_is_scored_once(count: int, context: int, stride: int) -> None:
    seen = []
    for begin, scored, end in _windows(count, context, stride):
        assert 0 <= begin < scored < end <= count
        assert end - 1 - begin <= context
        if begin:
            assert scored - begin > context - stride
        seen += range(scored, end)
    assert seen == list(range(1, count))


@pytest.mark.parametrize(("context", "stride"), [(40, None), (8, 3), (8, 8), (3, 1)])
def test_perplexity_by_hand(context: int, stride: int | None) -> None:
    ids, model = text(40), Model(0)
    quality, others = evaluate_language(model, {}, ids, context=context, stride=stride)
    losses = []
    for i in range(1, 40):
        # The first window that predicts token i starts at the smallest multiple of the stride from which i is at most `context` away.
        step = stride or context
        begin = max(0, -(-(i - context) // step) * step)
        before = WORDS if i - 1 == begin else int(ids[i - 2])
        losses.append(-float(model.table[before, ids[i - 1]].log_softmax(0)[ids[i]]))
    assert (quality.tokens, others) == (39, {})
    assert quality.perplexity == pytest.approx(math.exp(sum(losses) / 39), rel=1e-12)
    assert quality.perplexity_error == pytest.approx(
        quality.perplexity * float(torch.tensor(losses, dtype=torch.float64).std()) / 39**0.5, rel=1e-9
    )
    assert (quality.divergence, quality.top1) == (None, None)
    assert model.longest <= context


def test_divergence_and_agreement_by_hand() -> None:
    ids, ours, reference = text(300), Model(0), Model(2)
    _, found = evaluate_language(ours, {"same": ours, "other": reference}, ids, context=300)
    assert (found["same"].divergence, found["same"].top1) == (0.0, 1.0)
    p, q = (m(ids[None], use_cache=False).logits[0, :-1].log_softmax(1) for m in (ours, reference))
    expected = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    assert found["other"].divergence == pytest.approx(float(expected), rel=1e-12)
    assert found["other"].top1 == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))


def test_tokens_that_are_ruled_out() -> None:
    ours, expected = Model(0), Model(2)
    ours.table[..., 3] = expected.table[..., 3] = -math.inf
    ids = text(50)
    ids[ids == 3] = 2
    _, found = evaluate_language(ours, {"other": expected}, ids)
    assert 0 < (found["other"].divergence or 0) < math.inf


def test_bad_input() -> None:
    with pytest.raises(ArgumentError, match="at least 2 tokens"):
        evaluate_language(Model(0), {}, text(1))
    for context, stride in ((0, 1), (8, 9), (8, 0)):
        with pytest.raises(ArgumentError, match="context"):
            evaluate_language(Model(0), {}, text(9), context=context, stride=stride)
    broken = Model(0)
    broken.table[0] = math.nan
    with pytest.raises(ArgumentError, match="logits of broken contain NaN"):
        evaluate_language(Model(0), {"broken": broken}, text(99))


class Tokenizer:
    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - ord("a") if c != " " else WORDS - 1 for c in text]}


def test_last_words() -> None:
    model = Model(0, scale=0.0)
    a, b, c, blank = 0, 1, 2, WORDS - 1
    model.table[:, :, 4] = 0.5  # otherwise it writes e
    for before, last, following in ((c, b, blank), (a, b, blank), (b, blank, c), (blank, c, a)):
        model.table[before, last, following] = 1.0
    assert last_word_accuracy(model, Tokenizer(), ["a cb ca", " acb ca ", "b ab cb", "ab cad"]) == 0.5
    with pytest.raises(ArgumentError, match="at least two words"):
        last_word_accuracy(model, Tokenizer(), ["abc"])
