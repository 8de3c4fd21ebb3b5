"""Continuous batching: each sequence gets the text that it gets alone, whatever joins, leaves, fails or is interrupted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_tokenizer
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder import lower_cpu
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.lower_cpu import LEAST_PREFILL, CpuModel
from halfbyte.errors import ArgumentError
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.language.generate import Batch, Generation, run
from halfbyte.language.sampling.sampler import Sampling
from halfbyte.language.tokenizer import Tokenizer

KINDS = ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Gemma4TextDecoderLayer, shared keys", "MistralDecoderLayer", "Qwen3MoeDecoderLayer"]
KINDS += ["Phi3DecoderLayer, longrope"]
DENSE = [kind for kind in KINDS if kind != "Qwen3MoeDecoderLayer"]
EOS = 98


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    found = Tokenizer.open(folder)
    return cast(Tokenizer, Wrapped(found, frozenset({EOS})))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CpuModel]:
    found = {}
    for kind in KINDS:
        torch.manual_seed(7)
        model = CASES[kind]().eval()
        vary_(model)
        hb.quantize_(model, hb.Config("q8_0", compute="float"))
        folder = tmp_path_factory.mktemp("model") / "model"
        hb.save(model, folder)
        found[kind] = CpuModel(build_spec(*open_checkpoint(folder)))
    return found


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: CpuModel, tokenizer: Tokenizer, ids: list[int], sampling: Sampling, **settings: Any) -> Generation:
    batch = Batch(model, tokenizer, slots=1, **settings)
    generation = batch.submit(ids, sampling)
    for _ in run(batch, [generation]):
        pass
    return generation


def finish(batch: Batch) -> None:
    for _ in range(1000):
        if not batch.running:
            return
        batch.step()
    raise AssertionError("the batch does not end")


def same(found: Generation, expected: Generation) -> None:
    assert (found.ids, found.text, found.finish_reason) == (expected.ids, expected.text, expected.finish_reason)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_batch_is_its_sequences(kind: str, int8: bool, models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model = models[kind]
    lengths = [1, 40, 3, 66, 12, 7, 55]  # one crosses the length at which longrope switches
    samplings = [Sampling(max_new_tokens=new, ignore_eos=True) for new in (12, 1, 20, 9, 15, 3, 18)]
    samplings[2] = Sampling(max_new_tokens=20, temperature=0.8, seed=5, ignore_eos=True, logprobs=2)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    batch = Batch(model, tokenizer, slots=4, int8_cache=int8)
    found = [batch.submit(ids, sampling) for ids, sampling in zip(prompts[:3], samplings, strict=False)]
    for _ in range(6):
        batch.step()
    found += [batch.submit(ids, sampling) for ids, sampling in zip(prompts[3:], samplings[3:], strict=True)]
    finish(batch)
    for generation, ids, sampling in zip(found, prompts, samplings, strict=True):
        expected = alone(model, tokenizer, ids, sampling, int8_cache=int8)
        same(generation, expected)
        assert len(generation.ids) == sampling.max_new_tokens
        for actual, reference in zip(generation.choices, expected.choices, strict=True):
            assert actual.logprob == pytest.approx(reference.logprob, abs=1e-4)
            assert [id for id, _ in actual.top] == [id for id, _ in reference.top]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_cancelled_sequences_disturb_no_others(kind: str, models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[kind], Sampling(max_new_tokens=20, ignore_eos=True)
    prompts = [prompt(5 + 7 * seed, seed) for seed in range(6)]
    batch = Batch(model, tokenizer, slots=3)
    found = [batch.submit(ids, sampling) for ids in prompts]
    for _ in range(8):
        batch.step()
    batch.cancel(found[0])  # runs in the first slot
    batch.cancel(found[4])  # waits
    batch.cancel(found[0])  # has ended
    assert (found[0].finish_reason, found[4].finish_reason) == ("cancelled", "cancelled")
    assert not found[4].ids
    finish(batch)
    for index in (1, 2, 3, 5):
        same(found[index], alone(model, tokenizer, prompts[index], sampling))
    assert found[0].ids == alone(model, tokenizer, prompts[0], sampling).ids[: len(found[0].ids)]


def test_ends_of_sequences(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, ids = models[KINDS[0]], prompt(9, 3)
    whole = alone(model, tokenizer, ids, Sampling(max_new_tokens=30, ignore_eos=True))
    at = 4
    stop = tokenizer.decode(whole.ids[at : at + 2])
    stopped = alone(model, tokenizer, ids, Sampling(max_new_tokens=30, ignore_eos=True, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    ends = frozenset({whole.ids[6]})
    first = whole.ids.index(whole.ids[6])
    ended = alone(model, cast(Tokenizer, Wrapped(tokenizer, ends)), ids, Sampling(max_new_tokens=30))
    assert (ended.ids, ended.finish_reason) == (whole.ids[: first + 1], "stop")
    assert ended.text == tokenizer.decode(whole.ids[:first])
    immediately = Batch(model, cast(Tokenizer, Wrapped(tokenizer, frozenset({whole.ids[0]}))), slots=2)
    found = [immediately.submit(ids, Sampling(max_new_tokens=9)) for _ in range(3)]
    other = immediately.submit(prompt(4, 9), Sampling(max_new_tokens=9))
    finish(immediately)
    assert all((one.ids, one.text, one.finish_reason) == (whole.ids[:1], "", "stop") for one in found)
    assert other.ids == alone(model, tokenizer, prompt(4, 9), Sampling(max_new_tokens=9, ignore_eos=True)).ids[: len(other.ids)]


class Wrapped:
    """A tokenizer with other end tokens."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer, self.eos_ids = tokenizer, ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_sequences_wait_for_the_only_slot(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[KINDS[0]], Sampling(max_new_tokens=4, ignore_eos=True)
    batch = Batch(model, tokenizer, slots=1)
    found = [batch.submit(prompt(5, seed), sampling) for seed in range(3)]
    batch.step()
    batch.step()
    assert [len(one.ids) for one in found] == [2, 0, 0]
    finish(batch)
    for seed, one in enumerate(found):
        same(one, alone(model, tokenizer, prompt(5, seed), sampling))


@pytest.mark.parametrize("kind", DENSE)  # an expert's rows are those of the tokens that are read together
@pytest.mark.parametrize("tokens", [3, 9, 24, 66])
def test_a_prompt_asked_again_has_the_same_logits_bit_by_bit(
    kind: str, tokens: int, models: dict[str, CpuModel], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of it the cache has: the last two of 66 tokens would be a chunk of their own."""
    model, logits = models[kind], list[Tensor]()
    read = model.prefill
    monkeypatch.setattr(lower_cpu, "_CHUNK", 64)
    monkeypatch.setattr(model, "prefill", lambda *args, **more: logits.append(read(*args, **more)) or logits[-1])
    batch = Batch(model, tokenizer, slots=1)
    ids = prompt(tokens, 5)
    cached = []
    for text in (ids, ids, [*ids[: tokens - 2], *prompt(12, 6)], ids):
        cached.append(batch.submit(text, Sampling(max_new_tokens=3, ignore_eos=True)))
        finish(batch)
    assert all(torch.equal(found, logits[0]) for found in (logits[1], logits[3]))
    if kind == KINDS[0] and tokens > 2 * LEAST_PREFILL:
        assert [one.cached_tokens for one in cached] == [0, tokens - LEAST_PREFILL, tokens - 2, tokens - LEAST_PREFILL]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speculate", [0, 5])
def test_a_chat_keeps_its_prefix(kind: str, speculate: int, models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[kind], Sampling(max_new_tokens=11, ignore_eos=True)
    batch = Batch(model, tokenizer, slots=1, speculate=speculate)
    ids = prompt(8, 1) * 3
    for round_index in range(5):  # longer than the windows, and than the length at which longrope switches
        generation = batch.submit(ids, sampling)
        finish(batch)
        same(generation, alone(model, tokenizer, ids, sampling))
        if kind == KINDS[0]:
            assert generation.cached_tokens == (0 if round_index == 0 else len(ids) - LEAST_PREFILL)
        ids = [*ids, *generation.ids, *prompt(3, 20 + round_index)]
    again = batch.submit(ids[:20], sampling)  # a shorter one
    finish(batch)
    same(again, alone(model, tokenizer, ids[:20], sampling))


def test_an_abandoned_stream_leaves_nothing_behind(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[KINDS[0]], Sampling(max_new_tokens=20, ignore_eos=True)
    batch = Batch(model, tokenizer, slots=2)
    generation = batch.submit(prompt(6, 1), sampling)
    stream = run(batch, [generation])
    next(stream)
    stream.close()
    assert generation.finish_reason == "cancelled"
    assert not batch.running
    following = batch.submit(prompt(6, 1), sampling)
    finish(batch)
    same(following, alone(model, tokenizer, prompt(6, 1), sampling))


def test_two_streams_at_once_lose_no_text(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[KINDS[0]], Sampling(max_new_tokens=20, ignore_eos=True)
    for slots in (1, 2):
        batch = Batch(model, tokenizer, slots=slots)
        first, second = (batch.submit(prompt(6, seed), sampling) for seed in (1, 2))
        one: Iterator[tuple[int, str]] = run(batch, [first])
        text = next(one)[1]
        other = "".join(piece for _, piece in run(batch, [second]))
        text += "".join(piece for _, piece in one)
        assert text == first.text == alone(model, tokenizer, prompt(6, 1), sampling).text
        assert other == second.text == alone(model, tokenizer, prompt(6, 2), sampling).text


class Slow:
    """A model whose calls let other threads run."""

    def __init__(self, model: CpuModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name not in ("decode", "prefill"):
            return found

        def call(*arguments: Any, **settings: Any) -> Any:
            time.sleep(0.0005)
            return found(*arguments, **settings)

        return call


@pytest.mark.parametrize("slots", [1, 3])
def test_threads_share_a_batch(slots: int, models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[KINDS[0]], Sampling(max_new_tokens=12, ignore_eos=True)
    batch = Batch(cast(CpuModel, Slow(model)), tokenizer, slots=slots)

    def generated(seed: int) -> tuple[str, str]:
        generation = batch.submit(prompt(6, seed), sampling)
        return "".join(piece for _, piece in run(batch, [generation])), generation.text

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(generated, range(12)))
    for seed, (pieces, text) in enumerate(found):
        assert pieces == text == alone(model, tokenizer, prompt(6, seed), sampling).text
    assert not batch.running


class Interrupting:
    """A model that is interrupted in some calls, with the cache half written."""

    def __init__(self, model: CpuModel) -> None:
        self._model, self.after = model, 1 << 60

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name not in ("decode", "prefill", "verify"):
            return found

        def call(ids: Any, cache: Any, *arguments: Any, **settings: Any) -> Any:
            self.after -= 1
            if self.after == 0:
                cache.reserve(1)
                for layer in cache.layers[:1]:
                    layer.keys.fill_(float("nan"))
                    layer.length += 1
                raise KeyboardInterrupt
            return found(ids, cache, *arguments, **settings)

        return call


@pytest.mark.parametrize("after", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("slots", [1, 3])
def test_an_interrupted_step_loses_nothing(after: int, slots: int, models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[KINDS[1]], Sampling(max_new_tokens=10, temperature=0.7, seed=4, ignore_eos=True)
    interrupting = Interrupting(model)
    batch = Batch(cast(CpuModel, interrupting), tokenizer, slots=slots)
    found = [batch.submit(prompt(5 + 4 * seed, seed), sampling) for seed in range(4)]
    interrupting.after = after
    with pytest.raises(KeyboardInterrupt):
        finish(batch)
    finish(batch)
    for seed, one in enumerate(found):
        same(one, alone(model, tokenizer, prompt(5 + 4 * seed, seed), sampling))


def test_an_interrupted_stream_ends(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model, sampling = models[KINDS[0]], Sampling(max_new_tokens=10, ignore_eos=True)
    for after in (1, 4):
        interrupting = Interrupting(model)
        batch = Batch(cast(CpuModel, interrupting), tokenizer, slots=1)
        interrupting.after = after
        generation = batch.submit(prompt(5, 1), sampling)
        with pytest.raises(KeyboardInterrupt):
            list(run(batch, [generation]))
        assert generation.finish_reason == "cancelled"
        assert not batch.running
        following = batch.submit(prompt(5, 1), sampling)
        finish(batch)
        same(following, alone(model, tokenizer, prompt(5, 1), sampling))


@pytest.mark.parametrize("kind", ["MistralDecoderLayer", "Gemma3DecoderLayer"])
def test_long_prompts_are_read_in_chunks(kind: str, models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    from halfbyte.decoder.cache import Cache

    model, ids = models[kind], prompt(1100, 4)
    whole = model.prefill(ids, Cache(model.spec))
    cache = Cache(model.spec)
    model.prefill(ids[:700], cache)
    assert torch.allclose(model.prefill(ids[700:], cache), whole, rtol=0, atol=1e-3 * float(whole.abs().max()))
    sampling = Sampling(max_new_tokens=5, ignore_eos=True)
    batch = Batch(model, tokenizer, slots=2)
    found = [batch.submit(ids, sampling), batch.submit(ids[:3], sampling)]
    finish(batch)
    for one in found:
        same(one, alone(model, tokenizer, one.prompt_ids, sampling))


def test_what_is_refused(models: dict[str, CpuModel], tokenizer: Tokenizer) -> None:
    model = models["Phi3DecoderLayer, longrope"]  # of 200 positions
    batch = Batch(model, tokenizer, slots=2)
    for ids, message in (([], "no tokens"), ([3, 99], "token 99"), ([-1, 3], "token -1"), ([1] * 200, "200 positions")):
        with pytest.raises(ArgumentError, match=message):
            batch.submit(ids, Sampling())
    with pytest.raises(ArgumentError, match="at most 1"):
        batch.submit([1] * 199, Sampling(max_new_tokens=2))
    assert not batch.running
    last = batch.submit([5] * 199, Sampling(ignore_eos=True))
    finish(batch)
    assert (len(last.ids), last.finish_reason) == (1, "length")
    for settings in ({"slots": 0}, {"slots": 1000}, {"speculate": -1}, {"speculate": 65}):
        with pytest.raises(ArgumentError):
            Batch(model, tokenizer, **settings)
