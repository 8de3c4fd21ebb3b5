"""KV caches of earlier sequences, chunks of long prompts, logits processors: the tokens are those without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from test_batches import DENSE, KINDS, models, prompt, tokenizer  # noqa: F401 - fixtures

from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.language.generate import Batch, Generation
from halfbyte.language.prefix_cache import PrefixCache, common_prefix
from halfbyte.language.sampling.sampler import Sampling
from halfbyte.language.tokenizer import Tokenizer

MOST = 1 << 30


def run(batch: Batch, ids: list[int], **settings: Any) -> Generation:
    generation = batch.submit(ids, Sampling(**{"max_new_tokens": 6, "ignore_eos": True, **settings}))
    while batch.running:
        batch.step()
    return generation


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("together", [1, 3])
def test_a_shared_beginning_is_read_once(kind: str, together: int, models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:  # noqa: F811
    model, shared = models[kind], prompt(12, 1)
    prompts = [[*shared, *prompt(10 + i, 2 + i)] for i in range(4)]
    expected = [run(Batch(model, tokenizer, slots=1), ids).ids for ids in prompts]
    batch = Batch(model, tokenizer, slots=together, prefix_bytes=MOST)
    generations = []
    for start in range(0, len(prompts), together):
        some = [batch.submit(ids, Sampling(max_new_tokens=6, ignore_eos=True)) for ids in prompts[start : start + together]]
        while batch.running:
            batch.step()
        generations += some
    assert [generation.ids for generation in generations] == expected
    cached = [generation.cached_tokens for generation in generations]
    assert cached[0] == 0
    assert all(count in (0, 12) for count in cached)
    if kind == KINDS[0]:  # in sliding windows the beginning may have been lost
        assert cached[1:] == [12, 12, 12]


def test_a_conversation_goes_on_where_it_was(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:  # noqa: F811
    batch = Batch(models[KINDS[0]], tokenizer, slots=2, prefix_bytes=MOST)
    ids = prompt(12, 1)
    first, other = batch.submit(ids, Sampling(max_new_tokens=9, ignore_eos=True)), batch.submit(prompt(11, 5), Sampling(max_new_tokens=15))
    while batch.running:
        batch.step()
    ids = [*ids, *first.ids, *prompt(9, 3)]
    second = run(batch, ids)
    assert second.cached_tokens >= 12 + 8, "the answer that was decoded in a slot, but for its last token"
    assert second.ids == run(Batch(models[KINDS[0]], tokenizer, slots=1), ids).ids
    assert other.finish_reason is not None


def test_caches_are_dropped_beyond_a_number_of_bytes(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:  # noqa: F811
    model = models[KINDS[0]]
    size = run_and_measure(model, prompt(20, 1))
    cache = PrefixCache(int(2.5 * size))
    for seed in (1, 2, 3):
        filled = Cache(model.spec)
        model.prefill(prompt(20, seed), filled)
        cache.put(prompt(20, seed), filled)
    assert [entry.ids for entry in cache.entries] == [prompt(20, 2), prompt(20, 3)]
    assert cache.nbytes <= cache.limit
    assert cache.take(prompt(20, 1), 12, 8, None) is None
    found = cache.take(prompt(20, 2), 12, 8, None)
    assert found is not None
    assert (found[1], found[0].length, len(cache.entries)) == (12, 12, 1)


def run_and_measure(model: CpuModel, ids: list[int]) -> int:
    cache = Cache(model.spec)
    model.prefill(ids, cache)
    return cache.nbytes


@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_copy_of_a_slot_is_its_sequence(kind: str, models: dict[str, CpuModel]) -> None:  # noqa: F811
    model = models[kind]
    slots, alone = Slots(model.spec, 3), []
    for seed, length in ((1, 20), (2, 33), (3, 9)):
        cache = Cache(model.spec)
        model.prefill(prompt(length, seed), cache)
        slots.join(cache)
        alone.append(cache)
    for slot, cache in enumerate(alone):
        assert torch.equal(model.decode([5], slots.copy_of(slot)), model.decode([5], cache))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [9, 16])
def test_prompts_are_read_in_chunks(
    kind: str,
    chunk: int,
    models: dict[str, CpuModel],  # noqa: F811
    tokenizer: Tokenizer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = models[kind], prompt(50, 1)
    expected = run(Batch(model, tokenizer, slots=1), ids).ids
    monkeypatch.setattr(model, "prefill_chunk", chunk)
    batch = Batch(model, tokenizer, slots=2)
    other = batch.submit(prompt(5, 2), Sampling(max_new_tokens=30, ignore_eos=True))
    batch.step()
    generation = batch.submit(ids, Sampling(max_new_tokens=6, ignore_eos=True))
    decoded = []
    while not generation.ids:
        batch.step()
        decoded.append(len(other.ids))
    assert len(set(decoded)) >= 50 // chunk - 1, "the other sequence goes on between chunks"
    while batch.running:
        batch.step()
    assert generation.ids == expected


def test_a_part_of_a_long_prompt_is_kept_for_its_frequencies(
    models: dict[str, CpuModel],  # noqa: F811
    tokenizer: Tokenizer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first tokens of a prompt beyond the length at which rope switches have the long frequencies: no shorter prompt may use them."""
    model = models["Phi3DecoderLayer, longrope"]
    switch = model.spec.rope_switch
    assert switch is not None
    monkeypatch.setattr(model, "prefill_chunk", switch // 2)
    batch, ids = Batch(model, tokenizer, slots=2, prefix_bytes=MOST), prompt(switch + 20, 1)
    generation = batch.submit(ids, Sampling())
    batch.step()
    batch.cancel(generation)
    short = [*ids[: switch // 2], 5, 6]
    assert run(batch, short).ids == run(Batch(model, tokenizer, slots=1), short).ids
    assert not [entry for entry in batch._prefixes.entries if entry.ids == ids[: switch // 2]]


def test_a_prompt_is_cancelled_between_chunks(models: dict[str, CpuModel], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(models[KINDS[0]], "prefill_chunk", 10)
    batch, ids = Batch(models[KINDS[0]], tokenizer, slots=2, prefix_bytes=MOST), prompt(60, 1)
    generation = batch.submit(ids, Sampling())
    batch.step()
    assert batch._prefill is not None
    assert batch._prefill[0] is generation
    batch.cancel(generation)
    assert (generation.finish_reason, batch.running, batch._prefill) == ("cancelled", False, None)
    assert run(batch, ids).cached_tokens == 10


class Only:
    """Allows one token."""

    def __init__(self, token: int) -> None:
        self.token, self.accepted = token, list[int]()

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -math.inf).index_fill(0, torch.tensor([self.token]), 0.0)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}, {"logprobs": 2}, {"repetition_penalty": 1.5}])
def test_a_processor_decides(settings: dict[str, Any], models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:  # noqa: F811
    batch, only = Batch(models[KINDS[0]], tokenizer, slots=2, speculate=4), Only(7)
    generation = batch.submit(prompt(10, 1), Sampling(max_new_tokens=8, **settings), [only])
    other = batch.submit(prompt(10, 2), Sampling(max_new_tokens=8, ignore_eos=True))
    while batch.running:
        batch.step()
    assert generation.ids == only.accepted == [7] * 8
    assert other.ids == run(Batch(models[KINDS[0]], tokenizer, slots=1), prompt(10, 2), max_new_tokens=8).ids


def test_common_prefixes() -> None:
    assert [
        common_prefix([1, 2, 3], other, most) for other, most in (([1, 2, 4], 3), ([1, 2, 3, 4], 9), ([2], 3), ([], 3), ([1, 2], 1))
    ] == [
        2,
        3,
        0,
        0,
        1,
    ]
