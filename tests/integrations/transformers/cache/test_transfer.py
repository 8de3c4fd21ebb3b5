"""Keys and values that move between caches of transformers and those of `GpuModel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_decoders import CASES
from transformers import DynamicCache, StaticCache

import halfbyte as hb
from halfbyte.decoder.cache import OnGpu
from halfbyte.integrations.transformers.cache.transfer import give_back, taken, why_not_transferred
from halfbyte.integrations.transformers.decoder import gpu_run, stack
from halfbyte.integrations.transformers.generate.gpu_text import lowered
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.fused import fuse_

WHERE = OnGpu(torch.device("cpu"), torch.float32)
CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=32),
    "8 bits": lambda model: hb.Int8Cache(model.config),
}


@pytest.fixture(scope="module")
def model() -> Any:
    """With windows of 6 tokens, and layers that read keys and values of others."""
    torch.manual_seed(5)
    found = fuse_(hb.quantize_(CASES["Gemma4TextDecoderLayer, shared keys"]().eval(), hb.Config("q8_0", compute="float")))
    return replace_forwards_(found)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("new", [1, 3, 12])
def test_there_and_back(kind: str, new: int, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come back are those that a cache of transformers would have; what a window has forgotten is 0, and not seen."""
    monkeypatch.setattr(gpu_run, "DEVICES", ("cpu",))
    assert stack.is_compiled_stack(model.model)
    spec = lowered(model)[0].spec  # type: ignore[union-attr]
    ids = torch.randint(3, 99, (2, 9 + new))
    with torch.no_grad():
        past, expected = CACHES[kind](model), CACHES[kind](model)
        model(ids[:, :9], past_key_values=past)
        model(ids, past_key_values=expected)
        everything = taken(expected, spec, WHERE, [0, 4], keep=True)
        slots = taken(past, spec, WHERE, [0, 4], keep=True)
        assert (slots.batch, slots.starts, slots.length) == (2, [0, 4], 9)
        for cache, other in zip(slots.layers, everything.layers, strict=True):  # `new` more tokens, as a model would write them
            cache.fill([buffer[:, :, : other.length] for buffer in other.buffers], 9 + new)
        slots.length += new
        give_back(slots, past, spec)
    assert int(past.get_seq_length()) == 9 + new
    for layer, other in zip(past.layers[:2], expected.layers, strict=False):
        first = -5 if layer.is_sliding else 0
        for states, others in ((layer.keys, other.keys), (layer.values, other.values)):
            assert torch.allclose(states[:, :, first:].float(), others[:, :, first:].float(), atol=1 if kind == "8 bits" else 1e-5)


def test_what_is_freed(model: Any) -> None:
    spec = lowered(model)[0].spec  # type: ignore[union-attr]
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 9)), past_key_values=past)
    taken(past, spec, WHERE, [0], keep=False)
    assert all(layer.keys.numel() == 0 for layer in past.layers[:2])


class Odd(DynamicCache):
    """A cache of another class."""


def test_what_is_not_transferred(model: Any) -> None:
    spec = lowered(model)[0].spec  # type: ignore[union-attr]
    assert why_not_transferred(DynamicCache(config=model.config), spec, 1000) is None
    assert why_not_transferred(Odd(config=model.config), spec, 9) == "its cache is a Odd"
    assert why_not_transferred(StaticCache(config=model.config, max_cache_len=32), spec, 33) is None
    assert "room for 32 tokens, not for 33" in (why_not_transferred(StaticCache(config=model.config, max_cache_len=32), spec, 34) or "")
    other = transformers.DynamicCache(config=model.config)
    other.layers[1] = hb.Int8Cache(model.config).layers[1]
    other.layers[0] = object()  # type: ignore[call-overload]
    assert why_not_transferred(other, spec, 9) == "its cache has a object"
