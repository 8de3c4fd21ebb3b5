"""Speculative decoding gives the tokens that decoding token by token gives, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")

from language_model import make_language_model, make_tokenizer
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.cli.main import main
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.errors import ArgumentError
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.language.generate import Batch, Generation
from halfbyte.language.model import LanguageModel
from halfbyte.language.sampling.sampler import Sampler, Sampling
from halfbyte.language.speculate import Acceptance, Draft, PromptLookup, accepted_tokens
from halfbyte.language.tokenizer import Tokenizer

KINDS = ["LlamaDecoderLayer", "Gemma3DecoderLayer", "MistralDecoderLayer", "Qwen3MoeDecoderLayer", "Phi3DecoderLayer, longrope"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return Tokenizer.open(folder)


def opened(kind: str, compute: str, format: str, folder: Path, *, ties: bool = False) -> CpuModel:
    """ties: each row of lm_head is there twice."""
    torch.manual_seed(7)
    model = CASES[kind]().eval()
    vary_(model)
    if ties:
        with torch.no_grad():
            rows = model.lm_head.weight
            rows[1::2] = rows[: len(rows) // 2 * 2 : 2]
    hb.quantize_(model, hb.Config(format, compute=cast(Any, compute)))
    hb.save(model, folder / "model")
    return CpuModel(build_spec(*open_checkpoint(folder / "model")))


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(model: CpuModel, tokenizer: Tokenizer, ids: list[int], sampling: Sampling, speculate: int) -> tuple[Generation, Batch]:
    batch = Batch(model, tokenizer, slots=1, speculate=speculate)
    generation = batch.submit(ids, sampling)
    while batch.running:
        batch.step()
    return generation, batch


@pytest.mark.parametrize(("compute", "format"), [("float", "q8_0"), ("int8", "q8_0"), ("int8", "q4_0")])
@pytest.mark.parametrize("kind", KINDS)
def test_verified_logits_are_those_of_decoding(kind: str, compute: str, format: str, tmp_path: Path) -> None:
    model = opened(kind, compute, format, tmp_path)
    ids, int8 = prompt(80, 2), format == "q4_0"
    assert model.most_verify == 8
    one, several = Cache(model.spec, int8=int8), Cache(model.spec, int8=int8)
    for cache in (one, several):
        model.prefill(ids[:20], cache)
    at = 20
    for rows in (2, 5, 8, 8, 7):  # beyond a sliding window, too
        expected = torch.cat([model.decode([id], one) for id in ids[at : at + rows]])
        assert torch.equal(model.verify(ids[at : at + rows], several), expected)
        at += rows
    several.cut(at - 3)
    model.verify([1, 2, 3], several)  # wrong guesses, which leave no trace
    if several.cut(at - 3):
        for cache in (one, several):
            cache.cut(at - 3)
        assert torch.equal(model.verify(ids[at : at + 4], several)[3], [model.decode([id], one) for id in ids[at : at + 4]][3][0])


def test_more_tokens_than_are_verified_are_refused(tmp_path: Path) -> None:
    model = opened(KINDS[0], "float", "q8_0", tmp_path)
    for ids in ([], [1] * 9):
        with pytest.raises(ArgumentError, match="1 to 8 tokens of one sequence"):
            model.verify(ids, Cache(model.spec))


@pytest.mark.parametrize("compute", ["float", "int8"])
def test_ties_are_decided_alike(compute: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Two tokens always have the same logit."""
    model = opened(KINDS[0], compute, "q8_0", tmp_path, ties=True)
    for seed in range(3):
        ids = prompt(9, seed) * 4
        sampling = Sampling(max_new_tokens=60, ignore_eos=True)
        expected, _ = generated(model, tokenizer, ids, sampling, 0)
        found, batch = generated(model, tokenizer, ids, sampling, 8)
        assert found.ids == expected.ids
        assert batch.guessed
    logits = model.prefill(prompt(9, 4), Cache(model.spec))
    assert torch.equal(logits[: len(logits) // 2 * 2 : 2], logits[1::2])


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same(kind: str, compute: str, temperature: float, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = opened(kind, compute, "q8_0", tmp_path)
    more: dict[str, Any] = {"temperature": temperature, "seed": 3 if temperature else None, "ignore_eos": True}
    for seed in range(3):
        ids = prompt(9, seed) * 4
        sampling = Sampling(max_new_tokens=60, repetition_penalty=1.1 if seed == 2 else 1.0, **more)
        expected, plain = generated(model, tokenizer, ids, sampling, 0)
        found, batch = generated(model, tokenizer, ids, sampling, 8)
        assert (found.ids, found.text, found.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
        assert (plain.guessed, plain.accepted) == (0, 0)
        assert 0 <= batch.accepted <= batch.guessed


class Repeating:
    """A model whose next token is a function of the last one, and which counts its calls."""

    def __init__(self, model: CpuModel) -> None:
        self._model, self.calls, self.spec, self.most_decode, self.most_verify, self.where = model, 0, model.spec, 1, 8, None
        self.least_prefill, self.most_prompts, self.prefill_chunk, self.plan, self.streams_experts = 1, 1, 512, None, False

    def _logits(self, ids: list[int]) -> torch.Tensor:
        self.calls += 1
        return torch.stack([torch.nn.functional.one_hot(torch.tensor((id + 1) % 7), 99).float() * 9 for id in ids])

    def prefill(self, ids: list[int], cache: Cache, **settings: Any) -> torch.Tensor:
        cache.append(len(ids))
        return self._logits(ids)[-1]

    def decode(self, ids: list[int], cache: Cache, *_: Any) -> torch.Tensor:
        cache.append(len(ids))
        return self._logits(ids)

    verify = decode


def test_right_guesses_save_steps(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = Repeating(opened(KINDS[0], "float", "q8_0", tmp_path))
    batch = Batch(cast(CpuModel, model), tokenizer, slots=1, speculate=4)
    generation = batch.submit([0, 1, 2, 3, 4, 5, 6] * 2, Sampling(max_new_tokens=22, ignore_eos=True))
    while batch.running:
        batch.step()
    assert generation.ids == [i % 7 for i in range(22)]
    # one for the prompt, then 4 tokens (3 are guessed at first), then 5 a step, the last step for what is left
    assert (model.calls, batch.guessed, batch.accepted) == (6, 16, 16)


def test_an_end_among_the_guesses_leaves_the_cache_as_without(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = Repeating(opened(KINDS[0], "float", "q8_0", tmp_path))
    assert tokenizer.eos_ids == (1,)
    for speculate in (0, 4):
        batch = Batch(cast(CpuModel, model), tokenizer, slots=1, speculate=speculate)
        generation = batch.submit([0, 1, 2, 3, 4, 5, 6] * 2, Sampling(max_new_tokens=22))
        while batch.running:
            batch.step()
        assert (generation.ids, generation.finish_reason, batch.guessed) == ([0, 1], "stop", 3 if speculate else 0)
        assert batch._prefixes.entries[-1].cache.length == 15  # the end token is not read
        again = batch.submit([*generation.prompt_ids, *generation.ids, 5, 6], Sampling(max_new_tokens=2))
        while batch.running:
            batch.step()
        assert (again.ids, again.cached_tokens) == ([0, 1], 15)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0),
        ([1], 0),
        ([1, 2], 0),
        ([1, 2, 1, 2], 2),
        ([1, 2, 3, 9, 1, 2], 2),
        ([1, 2, 3, 1, 2, 4, 1, 2], 5),  # the last occurrence
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 3),  # the longest
        ([5, 5, 5, 5, 5, 5], 5),
        ([1, 2, 3], 0),
    ],
)
def test_occurrences_by_hand(tokens: list[int], expected: int) -> None:
    assert PromptLookup().occurrence(tokens)[1] == expected
    growing = PromptLookup()
    for count in range(len(tokens)):
        growing.occurrence(tokens[:count])
    assert growing.occurrence(tokens)[1] == expected


def test_the_number_of_guesses_follows_the_acceptance() -> None:
    text = list(range(10)) * 2
    lookup = PromptLookup()
    counts = []
    for right in [7] * 5 + [0] * 60:
        guesses = lookup.guess(text, 7)
        counts.append(len(guesses))
        assert guesses == text[: len(guesses)]
        if guesses:
            lookup.checked(len(guesses), min(right, len(guesses)))
    assert counts[0] == 3  # rates 1, 1.4, 1.54, 1.56, 1.53 by hand: 0.75 right, 0.25 of a step each
    assert max(counts) == 7
    stopped = counts.index(0)
    assert stopped > 5
    assert any(counts[stopped:])  # it tries again
    assert lookup.guess(text, 0) == []


def test_guesses_that_cost_more_than_they_bring_are_not_made() -> None:
    assert [Acceptance(0.5).count(7, cost) for cost in (0.0, 0.25, 0.5, 1.0)] == [7, 1, 0, 0]


# A draft model


@pytest.fixture
def always_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses of a draft model are made even where it is as slow as the model."""
    monkeypatch.setattr(Acceptance, "count", lambda _, most, cost: most)


def with_draft(model: CpuModel, draft: CpuModel, tokenizer: Tokenizer) -> Batch:
    return Batch(model, tokenizer, slots=1, speculate=8, draft=draft)


@pytest.mark.usefixtures("always_guessing")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Phi3DecoderLayer, longrope"])
def test_a_draft_model_leaves_the_text_as_it_is(kind: str, temperature: float, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The model in 4 bits guesses for that in 8, often but not always right, over two turns of a chat."""
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
    model, draft = opened(kind, "int8", "q8_0", tmp_path / "model"), opened(kind, "int8", "q4_0", tmp_path / "draft")
    sampling = Sampling(max_new_tokens=40, temperature=temperature, seed=3 if temperature else None, ignore_eos=True)
    batch, plain = with_draft(model, draft, tokenizer), Batch(model, tokenizer, slots=1)
    ids = prompt(20, 5)
    for round_index in range(2):
        found, expected = batch.submit(ids, sampling), plain.submit(ids, sampling)
        for one in (batch, plain):
            while one.running:
                one.step()
        assert (found.ids, found.text) == (expected.ids, expected.text)
        ids = [*ids, *expected.ids, 7 + round_index, 8]
    assert 0 < batch.accepted < batch.guessed


def test_a_draft_that_is_the_model_is_right(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = opened(KINDS[0], "int8", "q4_0", tmp_path)
    draft = Draft(model, relative_cost=0.0)
    text = prompt(30, 6)
    expected = Batch(model, tokenizer, slots=1)
    generation = expected.submit(text, Sampling(max_new_tokens=12, ignore_eos=True))
    while expected.running:
        expected.step()
    for begin in (0, 3, 1, 5):  # forth and back
        guesses = draft.guess([*text, *generation.ids[:begin]], 5)
        assert guesses
        assert guesses == generation.ids[begin : begin + len(guesses)]
    model.prefill = cast(Any, interrupted)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        draft.guess(text[:10] + text, 5)
    del model.prefill
    assert draft.guess(text, 5)[0] == generation.ids[0]


def interrupted(*_: Any, **__: Any) -> torch.Tensor:
    raise KeyboardInterrupt


def test_a_draft_model_guesses_within_its_positions_and_tokens(tmp_path: Path) -> None:
    model = opened(KINDS[0], "float", "q8_0", tmp_path)
    most = model.spec.max_positions
    assert most is not None
    draft = Draft(model, relative_cost=0.0)
    assert draft.guess([5] * most, 4) == []
    assert len(draft.guess([5] * (most - 1), 4)) == 1
    assert draft.guess([5, 6, model.spec.vocabulary], 4) == []  # padding of the larger model's vocabulary
    assert draft.guess([5, 6, 7], 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("opened") / "float")


@pytest.mark.usefixtures("always_guessing")
def test_open_with_a_draft(folder: Path, tmp_path: Path) -> None:
    plain = LanguageModel.open(folder, format="q8_0")
    for draft in (folder, plain):
        model = LanguageModel.open(folder, format="q8_0", draft=draft)
        found = model.generate(prompt(9, 1), max_new_tokens=20, ignore_eos=True)
        assert found.ids == plain.generate(prompt(9, 1), max_new_tokens=20, ignore_eos=True).ids
    with pytest.raises(ArgumentError, match=r"got speculate=0: pass speculate=8, or no draft"):
        LanguageModel.open(folder, draft=plain, speculate=0)
    for wrong in (-1, 65, 2.5, True):
        with pytest.raises(ArgumentError, match="0 to 64 tokens are guessed at a time"):
            LanguageModel.open(folder, speculate=cast(Any, wrong))
    hb.convert(folder, tmp_path / "codes", "q8_0")
    with pytest.raises(ArgumentError, match=r"the draft model cannot be opened \(.*not quantized.*\): quantize it first, or leave it out"):
        LanguageModel.open(tmp_path / "codes", draft=folder)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append({**added[0], "id": added[-1]["id"] + 1000, "content": "<another>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ArgumentError, match="a draft model has the vocabulary of the model"):
        LanguageModel.open(folder, format="q8_0", draft=other)


@pytest.mark.usefixtures("always_guessing")
def test_the_command_line_speculates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for more in ([], ["--speculate", "4"], ["--draft", str(folder)]):
        assert main(["generate", str(folder), "--format", "q8_0", "--prompt", "a b a b", "--max-new-tokens", "12", *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert main(["generate", str(folder), "--format", "q8_0", "--prompt", "a", "--compile", "--speculate", "4"]) != 0
    assert "without speculative decoding: leave out --speculate and --draft" in capsys.readouterr().err


def test_accepted_tokens_by_hand() -> None:
    logits = torch.eye(6)[[3, 1, 5, 2]]
    for guesses, expected in (([3, 1, 5], [3, 1, 5, 2]), ([3, 2, 5], [3, 1]), ([0, 1, 5], [3])):
        assert accepted_tokens(Sampler(Sampling()), logits, guesses) == expected
