"""`BatchSampler` chooses the tokens that a `Sampler` of each sequence chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.language.sampling.draw import MOST_CANDIDATES, choose_rows
from halfbyte.language.sampling.sampler import BatchSampler, Choice, Sampler, Sampling, draw_settings

# Top-k and top-p are drawn from few tokens, the others from all: a batch with both is split.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 7},
    {"temperature": 2.5, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_k": 10_000_000},
    {"temperature": 1.0, "top_k": 1},
]


def chosen(samplers: Sequence[Sampler], logits: Tensor) -> list[int | Choice]:
    chooser = BatchSampler(samplers)
    return chooser.accept(chooser(logits).tolist())


def pairs(settings: Sequence[dict[str, Any]], **more: Any) -> tuple[list[Sampler], list[Sampler]]:
    """The same samplers twice."""
    both = ([Sampler(Sampling(seed=seed, **one), [3, 5, 90], **more) for seed, one in enumerate(settings)] for _ in range(2))
    first, second = both
    return first, second


def random_logits(rows: int, count: int, seed: int) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Draws that `Sampler` has to make."""
    counts: list[int] = []
    draw = Sampler.draw

    def counted(self: Sampler, scores: Tensor, uniform: float) -> int:
        counts.append(1)
        return draw(self, scores, uniform)

    monkeypatch.setattr(Sampler, "draw", counted)
    return counts


@pytest.mark.parametrize("count", [100, 5000, 40_003])
@pytest.mark.parametrize("settings", [SETTINGS, [SETTINGS[1]] * 4, [SETTINGS[4]] * 3, [SETTINGS[0]] * 2, [SETTINGS[3]]], ids=len)
def test_tokens_are_those_of_each_sampler(count: int, settings: list[dict[str, Any]]) -> None:
    batch, alone = pairs(settings)
    for step in range(12):
        logits = random_logits(len(settings), count, step)
        before = logits.clone()
        assert chosen(batch, logits) == [sampler.choose(row) for sampler, row in zip(alone, logits, strict=True)]
        assert torch.equal(logits, before)


def test_no_row_waits_for_its_sampler(undecided: list[int]) -> None:
    few = [settings for settings in SETTINGS if settings["temperature"] < 2]  # candidates
    batch, _ = pairs(few)
    chosen(batch, random_logits(len(few), 40_003, 1))
    assert not undecided


@pytest.mark.parametrize("settings", [{"top_k": MOST_CANDIDATES + 1}, {"top_k": MOST_CANDIDATES}, {"top_p": 0.99}])
def test_a_sampler_draws_from_many_candidates(settings: dict[str, Any], undecided: list[int]) -> None:
    """More than are looked at; the others of the batch are not concerned."""
    batch, alone = pairs([{"temperature": 5.0, **settings}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
    for step in range(5):
        logits = random_logits(3, 5000, step)
        tokens = chosen(batch, logits)
        assert len(undecided) == 1
        assert tokens == [sampler.choose(row) for sampler, row in zip(alone, logits, strict=True)]
        undecided.clear()


@pytest.mark.parametrize("k", [3, 40])
def test_equal_logits(k: int, undecided: list[int]) -> None:
    """All that are equal to the last of the top-k are candidates, also where there are too many of them."""
    batch, alone = pairs([{"temperature": 1.0, "top_k": k}])
    assert chosen(batch, torch.zeros(1, 5000)) == [alone[0].choose(torch.zeros(5000))]
    assert undecided
    few = torch.full((1, 5000), -9.0)
    few[:, 70:140] = 2.0
    batch, _ = pairs([{"temperature": 1.0, "top_k": k}])
    drawn = {token for _ in range(100) for token in chosen(batch, few)}
    assert drawn <= set(range(70, 140))
    assert len(drawn) > k


def test_excluded_tokens_are_never_drawn() -> None:
    for count in (10, 9001):
        logits = torch.full((3, count), -math.inf)
        logits[:, [3, 8]] = torch.tensor([1.0, 1.5])
        batch, _ = pairs([{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.999}, {"temperature": 1.0, "top_k": 5}])
        drawn = [chosen(batch, logits) for _ in range(60)]
        assert all({row[i] for row in drawn} == {3, 8} for i in range(3))


def test_the_largest_uniform_number() -> None:
    """Sums are rounded: what is beyond the last one is the last token of any probability."""
    scores = torch.tensor([[1.0, 2.0, -math.inf]] * 2)
    below_one = math.nextafter(1, 0)
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2)):
        assert set(choose_rows(scores, [draw_settings(sampling, 3, below_one)] * 2).tolist()) <= {0, 1}


def test_penalties_processors_and_log_probabilities() -> None:
    class Even:
        def process(self, logits: Tensor) -> Tensor:
            return logits.masked_fill(torch.arange(logits.numel()) % 2 == 1, -math.inf)

        def accept(self, token: int) -> None:
            seen.append(token)

    seen: list[int] = []
    settings: list[dict[str, Any]] = [
        {"temperature": 0.8, "repetition_penalty": 1.7},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.9, "top_p": 0.7, "logprobs": 3},
        {"temperature": 0.0, "logprobs": 0},
    ]
    batch, alone = pairs(settings)
    processed = [Sampler(Sampling(temperature=1.0, seed=9), (), [Even()]) for _ in range(2)]
    logits = random_logits(5, 100, 4)  # the same in each step, so that tokens repeat
    for _ in range(15):
        tokens = chosen([*batch, processed[0]], logits)
        assert tokens == [sampler.choose(row) for sampler, row in zip([*alone, processed[1]], logits, strict=True)]
        assert isinstance(tokens[2], Choice)
        assert len(tokens[2].top) == 3
    assert len(seen) == 30
    assert all(token % 2 == 0 for token in seen)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[1], SETTINGS[2], SETTINGS[3], SETTINGS[5]], ids=str)
def test_logits_that_are_not_finite(value: float, settings: dict[str, Any]) -> None:
    batch, _ = pairs([settings, settings])
    logits = random_logits(2, 300, 0)
    logits[1, 7] = value
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        chosen(batch, logits)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        chosen(batch, torch.full((2, 300), -math.inf))


def test_a_temperature_that_makes_logits_infinite() -> None:
    batch, alone = pairs([{"temperature": 1e-5}])
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        chosen(batch, torch.tensor([[0.0, 1e35]]))
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        alone[0].choose(torch.tensor([0.0, 1e35]))
