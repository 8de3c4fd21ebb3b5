"""`Sampler`: the candidates and probabilities of transformers' logits processors, draws that follow them, and settings that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.language import Choice, Sampler, Sampling
from halfbyte.language.sampling.draw import Columns, largest, of_all
from halfbyte.language.sampling.sampler import draw_settings

PROMPT = [3, 5, 5, 90]


def random_logits(count: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * spread


def probabilities(sampling: Sampling, scores: Tensor) -> Tensor:
    """Probabilities [N] of all tokens by `largest`, with candidates that are too few, and enough; or by `of_all`."""
    count = scores.numel()
    columns = Columns.of([draw_settings(sampling, count, 0.5)], scores[None])
    if (sampling.top_k or count) >= count and (sampling.top_p or 1) >= 1:
        weights = of_all(scores[None], columns)[0]
        return weights / weights.sum()
    for most in (8, 64, 512, count):
        ids, cumulative, last, is_undecided = largest(scores[None], columns, most)
        if is_undecided is None or not is_undecided:
            break
    assert is_undecided is None or not is_undecided
    kept = cumulative[0, : int(last) + 1].diff(prepend=torch.zeros(1))
    return torch.zeros(count).scatter(0, ids[0, : len(kept)], (kept / kept.sum()).float())


def warped(sampling: Sampling, logits: Tensor, ids: list[int]) -> Tensor:
    """Probabilities [N] by transformers, in the order of its `generate` and in float64."""
    processors: list[Any] = []
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        processors.append(MinPLogitsWarper(sampling.min_p))
    process: Any = LogitsProcessorList(processors)
    return torch.softmax(process(torch.tensor([ids]), logits.double()[None])[0], 0)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1, 2.5])
@pytest.mark.parametrize("count", [100, 20_003])
def test_candidates_and_probabilities_of_transformers(count: int, temperature: float, settings: dict[str, Any]) -> None:
    for seed in range(3):
        logits = random_logits(count, seed)
        sampling = Sampling(temperature=temperature, **settings)
        sampler = Sampler(sampling, PROMPT)
        actual = probabilities(sampling, sampler._penalized(logits) if sampler._penalizes else logits)
        wanted = warped(sampling, logits, PROMPT)
        # Quotients of logits and temperature are up to 42 here and their differences 84, each rounded to 2^-24 of that: probabilities are
        # exact to 2^-16, and to 2^-18 those that matter in sums. So top-p may end earlier or later by tokens of that probability together.
        differ = (actual > 0) != (wanted > 0)
        plain = torch.softmax(logits.double() / temperature, 0)
        assert float(plain[differ].sum()) <= (2**-18 if 0 < settings.get("top_p", 0) < 1 else 0)
        torch.testing.assert_close(actual[~differ].double(), wanted[~differ], rtol=2**-16, atol=2**-126)


@pytest.mark.parametrize("count", [100, 20_003])
def test_equal_logits_are_all_candidates_of_top_k(count: int) -> None:
    """As in transformers; frequent in bfloat16."""
    logits = random_logits(count, 0).bfloat16().float()
    for k in (5, 20, 60):
        sampling = Sampling(temperature=1, top_k=k)
        assert torch.equal(probabilities(sampling, logits) > 0, warped(sampling, logits, []) > 0)
    assert int((probabilities(Sampling(temperature=1, top_k=3), torch.zeros(count)) > 0).sum()) == count


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_probabilities(settings: dict[str, Any]) -> None:
    logits, draws = random_logits(12, 1, 1.0), 2000
    sampling = Sampling(temperature=0.8, seed=5, **settings)
    sampler = Sampler(sampling)
    counts = torch.zeros(12)
    for _ in range(draws):
        id = sampler.choose(logits)
        assert isinstance(id, int)
        counts[id] += 1
    p = probabilities(sampling, logits)
    assert not counts[p == 0].any()
    # Five standard deviations of a binomial distribution: each of 12 is missed once in two million.
    assert bool(((counts / draws - p).abs() <= 5 * (p * (1 - p) / draws).sqrt()).all())


def test_draws_from_a_large_vocabulary() -> None:
    """Which is searched in two steps: two tokens of equal probability, in blocks of their own and in one, and none of the others."""
    for pair in ([5000, 17], [131, 130], [9000, 8999]):
        logits = torch.full((9001,), -math.inf)
        logits[pair] = 3.0
        sampler = Sampler(Sampling(temperature=1, seed=3))
        drawn = [sampler.choose(logits) for _ in range(400)]
        assert set(drawn) == set(pair)
        assert abs(drawn.count(pair[0]) - 200) <= 5 * 10  # five standard deviations


def test_a_seed_gives_the_same_tokens_whatever_else_is_drawn() -> None:
    logits = [random_logits(50, i) for i in range(20)]
    sampling = Sampling(temperature=1, seed=11)
    alone = Sampler(sampling)
    wanted = [alone.choose(x) for x in logits]
    again, other = Sampler(sampling), Sampler(Sampling(temperature=1, seed=12))
    mixed = []
    for x in logits:
        mixed.append(again.choose(x))
        torch.rand(3)
        other.choose(x)
    assert mixed == wanted
    assert len(set(wanted)) > 3


def test_without_a_seed_torch_decides() -> None:
    logits = random_logits(1000, 0, 0.1)

    def drawn() -> list[Any]:
        sampler = Sampler(Sampling(temperature=1))
        return [sampler.choose(logits) for _ in range(5)]

    torch.manual_seed(1)
    first = drawn()
    assert drawn() != first
    torch.manual_seed(1)
    assert drawn() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy(dtype: torch.dtype) -> None:
    logits = random_logits(1000, 2).to(dtype)
    before = logits.clone()
    assert Sampler(Sampling()).choose(logits) == int(logits.argmax())
    assert Sampler(Sampling(repetition_penalty=1.5, presence_penalty=1), [1]).choose(logits) == int(logits.argmax())
    assert torch.equal(logits, before)


def test_repetition_penalty() -> None:
    """Of the prompt and of what came after it, by transformers' own processor."""
    logits = torch.tensor([2.0, 1.9, -0.1, 1.0])
    sampler, ids = Sampler(Sampling(repetition_penalty=2.0), [0]), [0]
    for _ in range(4):
        wanted = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([ids]), logits[None].clone())
        assert torch.equal(sampler._penalized(logits), wanted[0])
        ids.append(sampler.choose(logits))  # type: ignore[arg-type]
    assert ids == [0, 1, 0, 0, 0]  # 1.0 of token 0 is as high as that of token 3, and before it


def test_presence_and_frequency_penalties_are_of_generated_tokens() -> None:
    logits = torch.tensor([2.0, 1.5, 0.0])
    sampler = Sampler(Sampling(presence_penalty=0.4, frequency_penalty=0.25), [0, 0, 0])
    assert [sampler.choose(logits) for _ in range(3)] == [0, 1, 0]  # 2 | 1.35, 1.5 | 1.35, 0.85
    # Twice token 0, once token 1; exact but for the rounding of float32 to units of 2^-23.
    torch.testing.assert_close(sampler._penalized(logits), torch.tensor([2 - 0.4 - 0.5, 1.5 - 0.65, 0.0]), rtol=0, atol=2**-22)


@pytest.mark.parametrize("count", [9, 5000])
def test_log_probabilities_are_the_model_s(count: int) -> None:
    logits = random_logits(count, 4)
    wanted = torch.log_softmax(logits.double(), 0)
    for sampling in (Sampling(logprobs=3), Sampling(logprobs=3, temperature=0.5, top_k=5, repetition_penalty=1.2, seed=1)):
        choice = Sampler(sampling, [1]).choose(logits)
        assert isinstance(choice, Choice)
        # float32 has 24 bits, of logits up to 16 in absolute value: 2^-20, twice rounded.
        assert choice.logprob == pytest.approx(float(wanted[choice.id]), abs=2**-18)
        assert [id for id, _ in choice.top] == torch.topk(wanted, 3).indices.tolist()
        assert [logprob for _, logprob in choice.top] == pytest.approx(torch.topk(wanted, 3).values.tolist(), abs=2**-18)
    none = Sampler(Sampling(logprobs=0)).choose(logits)
    assert isinstance(none, Choice)
    assert none.top == ()
    many = Sampler(Sampling(logprobs=10_000)).choose(logits)
    assert isinstance(many, Choice)
    assert len(many.top) == count


ALL = [Sampling(), Sampling(temperature=1), *(Sampling(temperature=1, **settings) for settings in SETTINGS)]


@pytest.mark.parametrize("sampling", ALL, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_logits_that_are_not_finite(everywhere: bool, value: float, sampling: Sampling) -> None:
    for count in (10, 20_000):
        logits = random_logits(count, 0)
        logits[... if everywhere else count // 2] = value
        sampler = Sampler(sampling, [1])
        if value == -math.inf and not everywhere:  # a token that is excluded
            assert sampler.choose(logits) != count // 2
            continue
        with pytest.raises(CheckpointError, match=r"computes NaN or infinite logits: its files are damaged, or of another model$"):
            sampler.choose(logits)
        with pytest.raises(CheckpointError, match=r"leave the range of float16: open it with dtype=torch.bfloat16 \(--dtype bfloat16\)$"):
            Sampler(sampling, [1], is_float16=True).choose(logits)


@pytest.mark.parametrize("logits", [torch.zeros(1, 5), torch.zeros(0), torch.zeros(5, dtype=torch.int64), torch.zeros(())])
def test_what_are_no_logits(logits: Tensor) -> None:
    with pytest.raises(
        ArgumentError, match=r"logits are a vector \[N\] of floating-point numbers, got \[.*\] torch.*: pass those of one sequence"
    ):
        Sampler(Sampling()).choose(logits)


def test_a_prompt_of_another_vocabulary() -> None:
    with pytest.raises(ArgumentError, match="the prompt has token 9, and the model logits for 5 tokens: its tokenizer is another model's"):
        Sampler(Sampling(repetition_penalty=1.1), [9]).choose(torch.zeros(5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature is 0 for greedy decoding, or 1e-05 to 100000, got -1: try 0.7"),
        ({"temperature": math.nan}, "temperature is 0 for greedy"),
        ({"temperature": 1e-9}, "temperature is 0 for greedy"),
        ({"temperature": "1"}, "temperature is a number, got '1': pass a float"),
        ({"temperature": None}, "temperature is a number, got None"),
        ({"temperature": 1, "top_k": 0}, "top_k is 1 or more, got 0: leave it out"),
        ({"temperature": 1, "top_k": 1.5}, "top_k is a whole number, got 1.5: pass an int"),
        ({"temperature": 1, "top_k": True}, "top_k is a whole number, got True"),
        ({"temperature": 1, "top_p": 0}, "top_p is a probability above 0, got 0: leave it out"),
        ({"temperature": 1, "top_p": math.nan}, "top_p is a probability above 0, got nan"),
        ({"temperature": 1, "top_p": 1.1}, "top_p is a probability above 0, got 1.1"),
        ({"temperature": 1, "min_p": 1.1}, "min_p is a probability, got 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 1e-05 to 100000, got 0: leave it out"),
        ({"repetition_penalty": None}, "repetition_penalty is a number, got None"),
        ({"presence_penalty": 3}, "presence_penalty is -2 to 2, got 3: leave it out"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is -2 to 2, got nan"),
        ({"seed": 1 << 64}, "seed has 64 bits, got 18446744073709551616: use a smaller number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 1 or more, got 0: ask for at least one"),
        ({"logprobs": -1}, "logprobs is 0 or more, got -1: leave it out"),
        ({"stop": "ab"}, "stop is a list of strings of one character or more, got 'ab': pass such a list"),
        ({"stop": ["a", ""]}, "stop is a list of strings"),
        ({"top_k": 5}, "top_k, top_p and min_p have no effect without sampling: add a temperature, such as 0.7"),
        ({"top_p": 0.9}, "have no effect without sampling"),
        ({"min_p": 0.1}, "have no effect without sampling"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Sampling(**settings)
    assert str(error.value).startswith(message) or message in str(error.value)


def test_limits_are_settings() -> None:
    Sampling(temperature=1e-5, top_p=1, top_k=1, min_p=0, seed=-(1 << 63), logprobs=0)
    assert Sampling(top_p=1.0, min_p=0.0, stop=["a"], seed=(1 << 64) - 1).stop == ("a",)
    assert Sampler(Sampling(temperature=1, seed=-(1 << 63))).choose(torch.zeros(3)) in range(3)
    assert Sampler(Sampling(temperature=1, seed=(1 << 64) - 1)).choose(torch.zeros(3)) in range(3)
    assert Sampler(Sampling(temperature=1e-5)).choose(torch.tensor([0.0, 1e4, 1.0])) == 1
