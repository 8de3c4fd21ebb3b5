"""The KV cache: sequences of a batch have the logits that they have alone, whatever joins, leaves, moves and is cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.lower_cpu import CpuModel, DecoderModel
from halfbyte.errors import ArgumentError
from halfbyte.language.checkpoint_tensors import open_checkpoint

KINDS = ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Gemma4TextDecoderLayer, shared keys", "MistralDecoderLayer", "Qwen3MoeDecoderLayer"]
# Relative to the largest logit: float32 sums in another order. An 8-bit cache is the same in both ways, but for such differences, which
# can move a key to the next code, 1/127 of the largest of its block.
TOLERANCE = {False: 1e-4, True: 2e-2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CpuModel]:
    found = {}
    for kind in KINDS:
        torch.manual_seed(7)
        model = CASES[kind]().eval()
        vary_(model)
        hb.quantize_(model, hb.Config("q8_0", compute="float"))
        folder: Path = tmp_path_factory.mktemp("model") / "model"
        hb.save(model, folder)
        found[kind] = CpuModel(build_spec(*open_checkpoint(folder)))
    return found


def read(model: DecoderModel, ids: list[int], *, int8: bool = False) -> Cache:
    cache = Cache(model.spec, int8=int8)
    model.prefill(ids, cache)
    return cache


def last_logits(model: DecoderModel, ids: list[int], *, int8: bool) -> torch.Tensor:
    """The logits after the last token, with a cache of the others."""
    cache = read(model, ids[:-1], int8=int8)
    return model.decode(ids[-1:], cache)[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor, int8: bool) -> None:
    assert torch.isfinite(found).all()
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE[int8]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_hold_what_sequences_hold_alone(kind: str, int8: bool, models: dict[str, CpuModel]) -> None:
    model, chance = models[kind], random.Random(3)
    slots = Slots(model.spec, min(16, model.most_decode), int8=int8)
    texts: list[list[int]] = []
    for step in range(160):
        joins = len(texts) < slots.capacity and (not texts or chance.random() < 0.25 + 0.2 * (step < 40))
        if joins:
            ids = [chance.randrange(3, 90) for _ in range(chance.choice([1, 2, 5, 9, 30, 70, 150]))]
            slots.join(read(model, ids, int8=int8))
            texts.append(ids)
        elif chance.random() < 0.12:
            gone = max(range(len(texts)), key=lambda i: len(texts[i])) if chance.random() < 0.5 else chance.randrange(len(texts))
            slots.leave(gone)
            last = texts.pop()
            if gone < len(texts):
                texts[gone] = last
        else:
            for text in texts:
                text.append(chance.randrange(3, 90))
            logits = model.decode([text[-1] for text in texts], slots)
            chosen = chance.randrange(len(texts))
            assert_close(logits[chosen], last_logits(model, texts[chosen], int8=int8), int8)
        assert slots.batch == len(texts)
        assert slots.positions() == [len(text) for text in texts]
        assert slots.length <= 2 * max(map(len, texts), default=0) + 64 * 2 or not texts


@pytest.mark.parametrize("kind", KINDS)
def test_slots_have_no_more_indices_than_the_longest_sequence_may_have(kind: str, models: dict[str, CpuModel]) -> None:
    """A long sequence leaves beside a short one, which then grows: it moves to the front, and its logits are those of it alone."""
    model, chance, most = models[kind], random.Random(6), 150
    texts = [[chance.randrange(3, 90) for _ in range(length)] for length in (100, 58)]
    slots = Slots(model.spec, 3, most=most)
    for text in texts:
        slots.join(read(model, text, int8=False))
    slots.leave(0)
    text = texts[1]
    for step in range(most - len(text)):
        text.append(chance.randrange(3, 90))
        logits = model.decode(text[-1:], slots)
        assert slots.positions() == [len(text)]
        assert slots.length <= most
        if step in (0, 49, 50, 51, 91):
            assert_close(logits[0], last_logits(model, text, int8=False), int8=False)
    assert all(layer.size <= most + 64 for layer in slots.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_slot_holds_no_other_sequence(kind: str, models: dict[str, CpuModel]) -> None:
    """Where a window's buffer has more tokens than a sequence that joined had left: those before them are another sequence's."""
    model, chance = models[kind], random.Random(4)
    slots, alone = Slots(model.spec, 3), Cache(model.spec)
    for _ in range(2):
        slots.join(read(model, [chance.randrange(3, 90) for _ in range(250)], int8=False))
    for token in range(40):  # windows' buffers fill up
        model.decode([5 + token, 6 + token], slots)
    for length in (190, 10):  # of the first part only a window is left
        model.prefill([chance.randrange(3, 90) for _ in range(length)], alone)
    slots.join(alone)
    copy = slots.copy_of(2)
    for found, expected in zip(copy.layers, alone.layers, strict=True):
        assert found.first >= expected.first
        for one, other in zip(found.buffers, expected.buffers, strict=True):
            assert torch.equal(one[:, :, : found.length], other[:, :, found.first - expected.first : expected.length])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_was_cut_goes_on_as_a_new_one(kind: str, models: dict[str, CpuModel]) -> None:
    model, chance = models[kind], random.Random(5)
    windows = [layer.sliding_window for layer in model.spec.layers if layer.sliding_window is not None]
    ids: list[int] = []
    cache = Cache(model.spec)
    emptied = 0
    for _ in range(60):
        new = [chance.randrange(3, 90) for _ in range(chance.choice([1, 1, 1, 2, 7, 33, 80]))]
        ids += new
        found = model.decode(new, cache)[0] if len(new) == 1 else model.prefill(new, cache)
        assert cache.length == len(ids)
        assert_close(found, last_logits(model, ids, int8=False) if len(ids) > 1 else model.prefill(ids, Cache(model.spec)), False)
        if chance.random() < 0.5 or len(ids) > 300:
            length = chance.randrange(len(ids)) if chance.random() < 0.5 else max(0, len(ids) - chance.randrange(4))
            if cache.cut(length):
                ids = ids[:length]
            else:
                emptied += 1
                assert windows
                ids = []
            assert cache.length == len(ids)
    assert bool(emptied) == bool(windows)


def test_windows_keep_no_more_than_they_need(models: dict[str, CpuModel]) -> None:
    model = models["MistralDecoderLayer"]  # windows of 9 tokens in all layers
    cache, longest = Cache(model.spec), 0
    for position in range(400):
        model.decode([3 + position % 80], cache)
        longest = max(longest, cache.layers[0].keys.shape[2])
    assert longest <= 128
    assert cache.layers[0].first + cache.layers[0].length == cache.length == 400
    assert cache.nbytes < 2 * 3 * 2 * 128 * 16 * 4 + 1


def test_a_cache_reserves_no_more_than_the_model_has_positions(models: dict[str, CpuModel]) -> None:
    model = models["LlamaDecoderLayer"]
    cache = Cache(model.spec, most=70)
    model.prefill([5] * 69, cache)
    assert cache.layers[0].keys.shape[2] == 128  # in steps of 64


def test_what_is_refused(models: dict[str, CpuModel]) -> None:
    model = models["LlamaDecoderLayer"]
    with pytest.raises(ArgumentError, match="at least one sequence"):
        Cache(model.spec, 0)
    cache = read(model, [3, 4, 5])
    for length in (-1, 4):
        with pytest.raises(ArgumentError, match="0 … 3"):
            cache.cut(length)
    slots = Slots(model.spec, 1)
    slots.join(cache)
    with pytest.raises(ArgumentError, match="0 of 1 slots are free, got 1 sequences: wait until others have left"):
        slots.join(cache)
    for ids in ([99], [-1]):
        with pytest.raises(ArgumentError, match="lie in 0 … 98"):
            model.decode(ids, cache)
        with pytest.raises(ArgumentError, match="lie in 0 … 98"):
            model.prefill([1, *ids], cache)
        assert cache.length == 3
    with pytest.raises(ArgumentError, match="at least one token"):
        model.prefill([], cache)
    with pytest.raises(ArgumentError, match="1 sequences"):
        model.decode([1, 2], cache)
    assert_close(model.decode([6], cache)[0], last_logits(model, [3, 4, 5, 6], int8=False), False)
