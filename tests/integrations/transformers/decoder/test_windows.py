"""Attention to a window of the last tokens, on a CPU: what transformers' own model says, in as few calls as without a window."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_decoder
from optimized_models import close, native_calls
from transformers import DynamicCache, StaticCache

from halfbyte.integrations.transformers.cache import growing
from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
from halfbyte.integrations.transformers.decoder.token_step import TokenStep
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_

SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
MIXED = {"use_sliding_window": True, "num_hidden_layers": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "of 4 tokens": ("Mistral", {"sliding_window": 4}),
    "of 9 tokens": ("Mistral", {"sliding_window": 9}),
    "of 2 tokens": ("Mistral", {"sliding_window": 2}),
    "of experts": ("Mixtral", {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "of 150 tokens": ("Mistral", {"sliding_window": 150}),
    "in the last layers": ("Qwen2", {**MIXED, "sliding_window": 5, "max_window_layers": 1}),
    "in every other layer": (
        "Qwen3",
        {**MIXED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


def pair(kind: str) -> tuple[Any, Any]:
    """(as transformers computes it, in few calls)"""
    torch.manual_seed(7)
    family, settings = KINDS[kind]
    model = make_decoder(family, **SIZES, **settings).eval()
    model.set_attn_implementation("sdpa")
    fuse_(quantize_(model, Config("q4_0", compute="float")))
    return model, replace_forwards_(copy.deepcopy(model))


@functools.cache
def shared_pair(kind: str) -> tuple[Any, Any]:
    """For tests that change neither of the models."""
    return pair(kind)


# Prompts of one token, shorter than a window of 4, as long, and longer; with a cache that knows of windows, and one that does not. All of
# them with a window in all layers and with one in some; each other kind with one of each.
PROMPTS = [(1, True), (3, False), (4, True), (13, True), (13, False)]
THOROUGH = ("of 4 tokens", "in every other layer")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(sequences, tokens, layers) of each native call."""
    return native_calls(monkeypatch)


def random_ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(99, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def said(model: Any, cache: Any, ids: Tensor, widths: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """The logits after so many tokens at a time, all but the first of each call."""
    found, begin = [], 0
    with torch.no_grad():
        for end in torch.tensor(widths).cumsum(0).tolist():
            seen = None if mask is None else mask[:, : mask.shape[1] - sum(widths) + end]
            found.append(model(ids[:, begin:end], attention_mask=seen, past_key_values=cache).logits)
            begin = end
    return torch.cat(found, 1)


def same_cache(actual: Any, expected: Any) -> bool:
    """Also in what each layer tells of itself."""
    for one, other in zip(actual.layers, expected.layers, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        assert one.get_mask_sizes(3) == other.get_mask_sizes(3)
        assert getattr(one, "cumulative_length", 0) == getattr(other, "cumulative_length", 0)
        assert close(one.keys, other.keys)
        assert close(one.values, other.values)
    return True


@pytest.mark.parametrize(("kind", "prompt", "configured"), [(k, *p) for k in KINDS for p in (PROMPTS if k in THOROUGH else PROMPTS[1::2])])
def test_the_same_logits(kind: str, prompt: int, configured: bool, calls: list[tuple[int, int, int]]) -> None:
    """Of so many tokens that buffers end; at times some at once, as who continues a chat or guesses ahead has it."""
    plain, short = shared_pair(kind)
    widths = (prompt, *[1] * 75, 2, 1, 7, *[1] * 70, 40, 1)
    ids = random_ids(2, sum(widths))
    actual, expected = (DynamicCache(config=plain.config if configured else None) for _ in range(2))
    assert close(said(short, actual, ids, widths), said(plain, expected, ids, widths))
    assert same_cache(actual, expected)
    layers, together = plain.config.num_hidden_layers, sum(width > 1 for width in widths)
    assert calls.count((2, 1, layers)) >= len(widths) - together - (prompt == 1)
    # A cache that has no layers yet gets them from transformers' own.
    assert sum(count for *_, count in calls) == layers * (len(widths) - (not configured))


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer(kind: str, calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a cache."""
    plain, short = shared_pair(kind)
    monkeypatch.setattr(TokenStep, "__call__", lambda *_: None)
    widths = (5, *[1] * 80, 3, 1)
    ids = random_ids(1, sum(widths))
    actual, expected = (DynamicCache(config=plain.config) for _ in range(2))
    assert close(said(short, actual, ids, widths), said(plain, expected, ids, widths))
    assert same_cache(actual, expected)
    assert sum(count for *_, count in calls) == plain.config.num_hidden_layers * len(widths)
    with torch.no_grad():
        assert close(*(model(ids, use_cache=False).logits for model in (short, plain)))
    assert sum(count for *_, count in calls) == plain.config.num_hidden_layers * (len(widths) + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("configured", [True, False])
def test_padding_on_the_left(kind: str, configured: bool, calls: list[tuple[int, int, int]]) -> None:
    """Shorter and longer than the window, and positions that do not count it."""
    plain, short = shared_pair(kind)
    widths = (12, 1, 1, 3, *[1] * 9)
    ids, mask = random_ids(3, sum(widths)), torch.ones(3, sum(widths), dtype=torch.long)
    mask[0, :3] = mask[2, :11] = 0
    actual, reference = (DynamicCache(config=plain.config if configured else None) for _ in range(2))
    found, expected = (said(model, cache, ids, widths, mask) for model, cache in ((short, actual), (plain, reference)))
    seen = mask.bool()
    assert close(found[seen], expected[seen]), "what padding says means nothing"
    assert calls.count((3, 1, plain.config.num_hidden_layers)) == 11
    length, found_at = sum(widths), []
    for model, cache in ((short, actual), (plain, reference)):
        where = mask.sum(1, keepdim=True)
        more = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
        with torch.no_grad():
            found_at.append(model(ids[:, :1], attention_mask=more, position_ids=where, past_key_values=cache).logits)
    assert close(*found_at)
    assert actual.get_seq_length() == length + 1


WAYS: list[dict[str, Any]] = [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}, {"use_cache": False}]


@pytest.mark.parametrize(("kind", "settings"), [(k, way) for k in KINDS for way in ({}, *(WAYS if k in THOROUGH else ()))], ids=str)
def test_the_same_text(kind: str, settings: dict[str, Any]) -> None:
    plain, short = shared_pair(kind)
    ids, mask = random_ids(1 if "prompt_lookup_num_tokens" in settings else 2, 11), None
    if len(ids) > 1:
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
    length = {"max_new_tokens": 20 if "use_cache" in settings else 90, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    actual, expected = (model.generate(ids, attention_mask=mask, **length, **settings) for model in (short, plain))
    assert torch.equal(actual, expected)


def test_a_chat_that_goes_on(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("in every other layer")
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    texts = [random_ids(1, 7)] * 2
    for round_index in range(4):
        for i, model in enumerate((short, plain)):
            texts[i] = model.generate(
                texts[i], past_key_values=caches[i], max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert torch.equal(*texts)
        assert same_cache(*caches)
        texts = [torch.cat((text, random_ids(1, 1 + 3 * round_index, seed=round_index)), 1) for text in texts]
    assert len([call for call in calls if call[1] == 1]) == 4 * 29


@pytest.mark.parametrize("kind", KINDS)
def test_cropping_and_beams(kind: str) -> None:
    """Whatever is done with a cache between tokens is transformers' own, also what it refuses."""
    plain, short = shared_pair(kind)
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    ids = random_ids(2, 200)

    def both(*widths: int) -> None:
        assert close(*(said(model, cache, ids, widths) for model, cache in zip((short, plain), caches, strict=True)))
        assert same_cache(*caches)

    def each(change: Callable[[Any], Any]) -> None:
        for cache in caches:
            change(cache)
        assert same_cache(*caches)

    both(3, 1, 1)
    for cache in caches:
        if plain.config.sliding_window < 6:
            with pytest.raises(RuntimeError, match="does not track past states"):
                cache.crop(-2)
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    both(1, 1, 1)
    each(lambda cache: cache.activate_past_recording())
    both(6, 1, 1)
    each(lambda cache: cache.crop(-3))
    both(1)
    each(lambda cache: cache.crop(0))
    both(1, 4, *[1] * 70)
    each(lambda cache: cache.crop(-5))
    each(lambda cache: [setattr(layer, "record_past", False) for layer in cache.layers])
    both(1, 2, *[1] * 80)
    each(lambda cache: cache.reorder_cache(torch.tensor([1, 1])))
    both(1, 1)
    each(lambda cache: cache.batch_repeat_interleave(2))
    ids = random_ids(4, 200, seed=2)
    both(1, 5, 1)
    each(lambda cache: cache.batch_select_indices(torch.tensor([2, 0])))
    ids = ids[:2]
    both(1, 1)
    for cache in caches:
        cache.reset()
    ids = ids[:1]
    both(2, 1, 1)


def test_caches_that_share_a_beginning() -> None:
    """What one of them writes behind it, and the views that somebody keeps, stay apart."""
    plain, short = pair("in the last layers")
    for model in (short, plain):
        first = DynamicCache(config=model.config)
        said(model, first, random_ids(1, 9), (7, 1, 1))
        views = [(layer.keys, layer.values) for layer in first.layers]
        before = copy.deepcopy(views)
        others = [copy.deepcopy(first), pickle.loads(pickle.dumps(first)), copy.copy(first)]  # noqa: S301
        others[2].layers = [copy.copy(layer) for layer in first.layers]
        assert not any(isinstance(layer, growing.Growing) for other in others for layer in other.layers)
        assert all(same_cache(other, first) for other in others)
        texts = [random_ids(1, 150, seed=seed) for seed in range(4)]
        found = [Tensor()] * 4
        for _ in range(2):
            for i, (cache, text) in enumerate(zip((first, *others), texts, strict=True)):
                found[i] = torch.cat((found[i], said(model, cache, text[:, :75], (1,) * 75)))
                texts[i] = text[:, 75:]
        for (keys, values), (old_keys, old_values) in zip(views, before, strict=True):
            assert torch.equal(keys, old_keys)
            assert torch.equal(values, old_values)
        if model is short:
            actual = found
    assert all(map(close, actual, found))


def test_a_long_prompt_leaves_no_memory_behind() -> None:
    plain, short = pair("in every other layer")
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    ids = random_ids(1, 900)
    assert close(*(said(model, cache, ids, (800, 1, 90, 9)) for model, cache in zip((short, plain), caches, strict=True)))
    assert same_cache(*caches)
    sizes = [layer.buffers[0].shape[2] for layer in caches[0].layers]  # type: ignore[attr-defined]
    assert sizes[1] >= 900
    assert max(sizes[0], sizes[2]) <= 256


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_8_bits(kind: str, calls: list[tuple[int, int, int]]) -> None:
    plain, short = shared_pair(kind)
    widths = (11, *[1] * 70, 4, 1)
    ids = random_ids(2, sum(widths))
    caches = [Int8Cache(plain.config) for _ in range(2)]
    found, expected = (said(model, cache, ids, widths) for model, cache in zip((short, plain), caches, strict=True))
    # The codes of a key that differs in its last bits may differ by one where it is just between two: 1/127 of the largest of 32.
    assert float((found - expected).norm()) <= 1e-2 * float(expected.norm())
    for actual, reference in zip(caches[0].layers, caches[1].layers, strict=True):
        assert actual.keys.dtype == torch.int8
        assert actual.keys.shape == reference.keys.shape
        assert float((actual.keys != reference.keys).float().mean()) < 0.02
    assert calls.count((2, 1, plain.config.num_hidden_layers)) == 71


def test_a_window_that_the_cache_does_not_know() -> None:
    """Of another model."""
    models = pair("of 9 tokens")
    other = copy.deepcopy(models[0].config)
    other.sliding_window = 12
    assert close(*(said(model, DynamicCache(config=other), random_ids(1, 20), (4, *[1] * 16)) for model in models))


def test_what_changes_between_tokens(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("of 9 tokens")
    ids = random_ids(1, 30)
    found = []
    for model in (short, plain):
        cache = DynamicCache()
        some = [said(model, cache, ids, (12, 1, 1))]
        model.config.sliding_window = 4
        some.append(said(model, cache, ids[:, 14:], (1, 1)))
        model.config.sliding_window = None
        some.append(said(model, cache, ids[:, 16:], (1, 1)))
        found.append(torch.cat(some, 1))
    assert close(*found)
    assert calls.count((1, 1, 2)) == 6


def test_threads_do_not_mix() -> None:
    plain, short = pair("in every other layer")
    texts = [random_ids(1, 90, seed=seed) for seed in range(4)]
    expected = [said(plain, DynamicCache(config=plain.config), text, (5, *[1] * 80)) for text in texts]
    found: dict[int, Tensor] = {}

    def run(i: int) -> None:
        torch.set_num_threads(1)
        found[i] = said(short, DynamicCache(config=short.config), texts[i], (5, *[1] * 80))

    threads = [threading.Thread(target=partial(run, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(close(found[i], expected[i]) for i in range(4))


def test_static_caches(calls: list[tuple[int, int, int]]) -> None:
    """Those with windows are rolled by transformers' layers."""
    plain, short = pair("in every other layer")
    widths = (4, 1, 1, 3, *[1] * 9)
    ids = random_ids(1, sum(widths))
    caches = [StaticCache(config=plain.config, max_cache_len=40) for _ in range(2)]
    assert close(*(said(model, cache, ids, widths) for model, cache in zip((short, plain), caches, strict=True)))
    assert calls == [(1, width, 1) for width in widths]
