"""A cache of keys and values in 8 bits is one of transformers' that holds what the codes mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, MistralConfig

import halfbyte
from halfbyte.errors import ArgumentError
from halfbyte.layouts.records import from_records, record_bytes, to_records


def meant(x: Tensor) -> Tensor:
    return from_records(to_records(x), x.shape[-1], x.dtype)


@pytest.mark.parametrize("dim", [1, 8, 32, 40, 96, 128])
def test_an_error_is_half_a_scale(dim: int) -> None:
    x = torch.randn(3, 5, dim) * torch.logspace(-30, 30, 15).view(3, 5, 1)
    records = to_records(x)
    assert records.shape == (3, 5, record_bytes(dim))
    found = from_records(records, dim, torch.float64)
    padded = torch.nn.functional.pad(x.double(), (0, -dim % 32)).unflatten(-1, (-1, 32))
    # A scale is rounded to 8 bits, a quotient of up to 127 to 24.
    limit = padded.abs().amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., :dim] / 254 * (1 + 2.0**-8 + 2.0**-16)
    assert bool(((found - x.double()).abs() <= limit).all())
    assert torch.equal(to_records(found), records), "what the codes mean has the same codes"


def test_what_has_no_codes() -> None:
    x = torch.randn(5, 40)
    x[0] = 0
    x[1, :32] = 1e-37
    x[2, 3], x[3, 35], x[4] = torch.nan, -torch.inf, 3.4e38
    found = meant(x)
    assert not found[0].any()
    assert not found[1, :32].any()
    assert bool(found[2, :32].isnan().all())
    assert bool(found[3, 32:].isnan().all())
    assert bool(found[(1, 2, 3), (35, 35, 3)].isfinite().all())
    assert bool(found[4].isfinite().all())
    assert to_records(x[:0]).shape == (0, 44)


def test_it_is_for_a_config() -> None:
    with pytest.raises(ArgumentError, match=r"got str: pass model\.config"):
        halfbyte.Int8Cache("x")


def test_layers_do_what_those_of_transformers_do() -> None:
    """With windows and without: keys and values as their codes mean them, however the cache is changed."""
    settings = {"num_hidden_layers": 2, "hidden_size": 80, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8}
    config = MistralConfig(**settings, layer_types=["full_attention", "sliding_attention"])
    actual, reference = halfbyte.Int8Cache(config), DynamicCache(config=config)
    assert [type(layer).__name__ for layer in actual.layers] == ["Int8Layer", "Int8SlidingLayer"]
    generator = torch.Generator().manual_seed(2)

    def both(batch: int, tokens: int) -> None:
        for i in range(2):
            k, v = torch.randn(2, batch, 1, tokens, 40, generator=generator).to(torch.bfloat16)
            found, expected = actual.update(k, v, i), reference.update(meant(k), meant(v), i)
            assert all(map(torch.equal, found, expected))
            assert found[0].dtype == torch.bfloat16
            assert actual.layers[i].keys.dtype == torch.int8
            assert actual.get_seq_length(i) == reference.get_seq_length(i)
            assert actual.get_mask_sizes(3, i) == reference.get_mask_sizes(3, i)

    both(2, 5)
    for cache in (actual, reference):
        cache.crop(-2)
    both(2, 1)
    for cache in (actual, reference):
        cache.batch_repeat_interleave(2)
    both(4, 6)
    for cache in (actual, reference):
        cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    both(4, 1)
    for cache in (actual, reference):
        cache.batch_select_indices(torch.tensor([1, 2]))
    both(2, 1)
    for cache in (actual, reference):
        cache.reset()
    both(3, 2)
