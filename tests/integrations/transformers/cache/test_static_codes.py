"""Static caches in 8 bits: layers of codes for GPUs, here in torch's operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_decoding import counted, pair
from test_generating import make_family
from torch import Tensor
from transformers import StaticCache

import halfbyte as hb
from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.cache.static_codes import Int8Ring, StaticInt8Layer
from halfbyte.integrations.transformers.decoder import gpu_run
from halfbyte.integrations.transformers.generate.graphs import capacity, enlarge, static_cache
from halfbyte.layouts.records import from_codes, to_codes
from halfbyte.ops.transformer.decode_ops import attend
from halfbyte.ops.transformer.decoder import Heads


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "DEVICES", ("cpu", "cuda"))


def rounded(x: Tensor) -> Tensor:
    return from_codes(*to_codes(x), x.dtype)


def logits(model: Any, cache: Any, ids: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Of the last token of each of several calls."""
    with torch.no_grad():
        parts = ids.split(widths, 1)
        return torch.stack([model(input_ids=part, past_key_values=cache, logits_to_keep=1).logits[:, -1] for part in parts])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_read_and_write_codes(kind: str, everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' layers with the same cache, of which they get floats; and near a cache of floats, but not the same."""
    plain, short = pair(kind)
    calls, ids, widths = counted(monkeypatch), torch.randint(99, (3, 16)), (9, 1, 1, 4, 1)
    caches = [static_cache(model, 24, int8=True) for model in (plain, short)]
    expected, found = (logits(model, cache, ids, widths) for model, cache in zip((plain, short), caches, strict=True))
    assert len(calls) == 3 * 2, "each token alone, in each layer"
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        assert all(type(layer) is StaticInt8Layer and layer.keys.dtype == torch.int8 for layer in layers)
        for x, y in zip(*(layer.in_floats() for layer in layers), strict=True):
            assert torch.allclose(x, y, atol=1.01 * float(x.abs().max()) / 127), "a code apart where sums are in another order"
    exact = logits(plain, StaticCache(config=plain.config, max_cache_len=24), ids, widths)
    assert 1e-4 < float((found - exact).abs().max() / exact.abs().max()) < 0.1


@pytest.mark.parametrize("widths", [(5, 1, 1, 1), (11, 1, 1, 1, 9, 1, 1, 20, 1)])
def test_a_ring_has_what_an_int8_cache_that_grows_has(widths: tuple[int, ...]) -> None:
    """Also once it is full, and where several tokens come at once."""
    model = make_family("Mistral").eval()
    ids = torch.randint(99, (2, sum(widths)))
    ring = static_cache(model, 64, int8=True)
    found, expected = (logits(model, cache, ids, widths) for cache in (ring, hb.Int8Cache(model.config)))
    assert {type(layer) for layer in ring.layers} == {Int8Ring}
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_becomes_larger() -> None:
    model, _ = pair("llama")
    ids, (cache, large) = torch.randint(99, (2, 12)), (static_cache(model, size, int8=True) for size in (8, 20))
    logits(model, cache, ids[:, :8], (7, 1))
    assert capacity(cache, model) == 8
    enlarge(cache, model, 20)
    assert capacity(cache, model) == 20
    found, expected = logits(model, cache, ids[:, 8:], (1, 3)), logits(model, large, ids, (7, 1, 1, 3))[2:]
    assert torch.equal(found, expected)


def test_beams_take_the_scales_along() -> None:
    layer: Any = static_cache(make_family("Mistral"), 64, int8=True).layers[0]
    states = torch.randn(3, 2, 5, 16) * torch.tensor([1.0, 10.0, 100.0])[:, None, None, None]
    layer.update(states, states)
    before = [t.clone() for t in layer.in_floats()]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert all(torch.equal(x, y[[2, 0, 0]]) for x, y in zip(layer.in_floats(), before, strict=True))


@pytest.mark.parametrize("ring", [False, True])
def test_the_new_token_is_what_the_cache_holds(ring: bool) -> None:
    """One token of a cache that was empty sees itself alone: its value, as its codes have it."""
    heads = Heads(2, 1, 40, 0.2, rotary_dim=0)
    keys, values = torch.zeros(2, 2, 1, 4, 40, dtype=torch.int8)
    scales = torch.zeros(2, 1, 4, 2, dtype=torch.bfloat16)
    both, qkv = (scales, scales.clone()), torch.randn(2, 4 * 40)
    y = attend(qkv, None, keys, values, torch.zeros(1, dtype=torch.int64), None, heads, scales=both, ring=ring)
    new = qkv.view(2, 4, 40)
    assert torch.allclose(y.view(2, 2, 40), rounded(new[:, 3:]).expand(2, 2, 40), rtol=1e-6)
    for codes, of_codes, x in ((keys, both[0], new[:, 2]), (values, both[1], new[:, 3])):
        assert torch.equal(from_codes(codes, of_codes, torch.float32)[:, 0, 0], rounded(x))
        assert not codes[:, :, 1:].any()


def test_scales_that_do_not_fit() -> None:
    heads, length = Heads(2, 1, 40, 0.2, rotary_dim=0), torch.zeros(1, dtype=torch.int64)
    keys, scales = torch.zeros(2, 1, 4, 40, dtype=torch.int8), torch.zeros(2, 1, 4, 2, dtype=torch.bfloat16)
    for cache, both in ((keys.float(), (scales, scales)), (keys, (scales[..., :1], scales)), (keys, (scales.float(),) * 2), (keys, None)):
        with pytest.raises(ArgumentError, match="or int8 with scales"):
            attend(torch.zeros(2, 160), None, cache, copy.copy(cache), length, None, heads, scales=both)
