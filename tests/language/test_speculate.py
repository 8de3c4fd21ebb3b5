"""Speculative decoding gives the text that decoding token by token gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")

from language_model import make_tokenizer
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.language.generate import Batch, Generation
from halfbyte.language.sampling import Sampler, Sampling
from halfbyte.language.speculate import accepted_tokens, guess
from halfbyte.language.tokenizer import Tokenizer

KINDS = ["LlamaDecoderLayer", "Gemma3DecoderLayer", "MistralDecoderLayer", "Qwen3MoeDecoderLayer", "Phi3DecoderLayer, longrope"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return Tokenizer.open(folder)


def opened(kind: str, compute: str, format: str, folder: Path) -> CpuModel:
    torch.manual_seed(7)
    model = CASES[kind]().eval()
    vary_(model)
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
def test_verified_logits_are_close_to_those_of_decoding(kind: str, compute: str, format: str, tmp_path: Path) -> None:
    model = opened(kind, compute, format, tmp_path)
    ids = prompt(40, 2)
    for rows in (2, 3, 5, 9):
        one, several = Cache(model.spec), Cache(model.spec)
        for cache in (one, several):
            model.prefill(ids[:20], cache)
        expected = torch.cat([model.decode([id], one) for id in ids[20 : 20 + rows]])
        found = model.verify(ids[20 : 20 + rows], several)
        # float32 sums in another order; in 8 bits that can move an activation to the next code
        assert float((found - expected).norm() / expected.norm()) < (1e-5 if compute == "float" else 0.03)


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
        self._model, self.calls, self.spec, self.most_decode, self.where = model, 0, model.spec, 1, None

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
    # one for the prompt, then 5 tokens a step, the last step for one that is left
    assert (model.calls, batch.guessed, batch.accepted) == (6, 16, 16)


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2], 4, []),
        ([1, 2, 1, 2], 4, [1, 2]),
        ([1, 2, 3, 9, 1, 2], 4, [3, 9, 1, 2]),
        ([1, 2, 3, 9, 1, 2], 1, [3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # the last occurrence
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, [3]),  # the longest
        ([5, 5, 5, 5, 5, 5], 3, [5]),
        ([1, 2, 3], 0, []),
    ],
)
def test_guesses_by_hand(tokens: list[int], most: int, expected: list[int]) -> None:
    assert guess(tokens, most) == expected


def test_accepted_tokens_by_hand() -> None:
    logits = torch.eye(6)[[3, 1, 5, 2]]
    for guesses, expected in (([3, 1, 5], [3, 1, 5, 2]), ([3, 2, 5], [3, 1]), ([0, 1, 5], [3])):
        assert accepted_tokens(Sampler(Sampling()), logits, guesses) == expected
