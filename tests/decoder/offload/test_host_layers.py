"""The first layers on the CPU next to a GPU, without a GPU: hidden states cross, and each layer's KV cache is where the layer is."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers")

from tiny_decoders import CASES

from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.families import FAMILIES
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.offload.host_layers import HostLayers
from halfbyte.decoder.offload.placement import Placement, Plan, Request, Sizes
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.errors import ArgumentError, UnsupportedError

_WITH_EXPERTS = {family.layer_class for family in FAMILIES.values() if family.moe is not None and family.model_class}
MIXTURES = [kind for kind in CASES if kind.split(",")[0] in _WITH_EXPERTS]
# Windows, soft caps, parallel residuals, residual multipliers, sinks, layer norms, longrope, no gates, experts.
KINDS = [
    *("LlamaDecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer", "Cohere2DecoderLayer", "GraniteDecoderLayer"),
    *("Phi3DecoderLayer, longrope", "Starcoder2DecoderLayer"),
    *MIXTURES,
]
# Relative to the largest logit: float32 sums in another order, in two to four layers; in 8 bits a key may get the next code.
TOLERANCE = {False: 1e-5, True: 2e-2}
Models = Callable[[str], DecoderSpec]


def split(spec: DecoderSpec, layers: int, experts: int | None = None) -> GpuModel:
    placement = Placement(len(spec.layers) if experts is None else experts, layers)
    plan = Plan(Request(None, sequences=8), placement, Sizes((), 0, 0))
    return GpuModel(spec, "cpu", torch.float32, plan)


def ids_of(count: int, seed: int = 1) -> list[int]:
    found: list[int] = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert float((found - expected).abs().max() / expected.abs().max()) <= tolerance


def read(model: GpuModel | CpuModel, ids: list[int], *, int8: bool = False) -> Cache:
    cache = Cache(model.spec, int8=int8, where=model.where)
    model.prefill(ids, cache)
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_cpu(kind: str, specs: Models) -> None:
    """Whatever the split, also beyond sliding windows and the length at which rope switches frequencies."""
    spec = specs(kind)
    one = CpuModel(spec)
    ids = ids_of(78)
    here = Cache(spec)
    expected = one.prefill(ids, here, every=True)
    tokens = [one.decode([token], here) for token in ids[:4]]
    for layers in range(1, len(spec.layers) + 1):
        model = split(spec, layers)
        cache = Cache(spec, where=model.where)
        assert_close(model.prefill(ids, cache, every=True), expected, TOLERANCE[False])
        for token, logits in zip(ids[:4], tokens, strict=True):
            assert_close(model.decode([token], cache), logits, TOLERANCE[False])
        assert model.decode_tokens([5], cache, launch_ahead=True) == [int(one.decode([5], read(one, ids + ids[:4]))[0].argmax())]
        assert model._ahead is None


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "GptOssDecoderLayer"])
def test_batches_of_sequences_that_come_and_go(kind: str, int8: bool, specs: Models) -> None:
    spec = specs(kind)
    one, model = CpuModel(spec), split(spec, 1)
    slots = [Slots(spec, 4, int8=int8, where=each.where) for each in (one, model)]
    chance = torch.Generator().manual_seed(3)
    for step in range(20):
        if step in (0, 1, 5, 9):
            for each, some in zip((one, model), slots, strict=True):
                some.join(read(each, ids_of(3 + 7 * step, step), int8=int8))
        elif step in (8, 12):
            for some in slots:
                some.leave(0)
        tokens: list[int] = torch.randint(3, 90, (slots[0].batch,), generator=chance).tolist()
        expected = one.decode(tokens, slots[0])
        assert_close(model.decode(tokens, slots[1]), expected, TOLERANCE[int8])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_split(specs: Models, data: st.DataObject) -> None:
    """Of any mixture: first layers and experts on the CPU, in any number; sequences of any length join, decode and leave."""
    spec = specs(data.draw(st.sampled_from(MIXTURES)))
    layers = data.draw(st.integers(0, len(spec.layers)))
    experts, int8 = data.draw(st.integers(layers, len(spec.layers))), data.draw(st.booleans())
    whole = (split(spec, 0, 0), split(spec, layers, experts))
    slots = [Slots(spec, 3, int8=int8, where=each.where) for each in whole]
    for _ in range(data.draw(st.integers(1, 6))):
        leaving = data.draw(st.integers(0, 2))
        for some in slots:
            if leaving < some.batch > 1:
                some.leave(leaving)
        if slots[0].batch < 3:
            ids = ids_of(data.draw(st.integers(1, 90)), data.draw(st.integers(0, 3)))
            for each, some in zip(whole, slots, strict=True):
                some.join(read(each, ids, int8=int8))
        tokens = ids_of(slots[0].batch, data.draw(st.integers(4, 9)))
        expected, found = (each.decode(tokens, some) for each, some in zip(whole, slots, strict=True))
        assert_close(found, expected, TOLERANCE[int8])


def test_a_prompt_in_chunks(specs: Models) -> None:
    spec = specs("Gemma3DecoderLayer")
    one, model = CpuModel(spec), split(spec, 2)
    ids = ids_of(1100)
    caches = read(one, ids), read(model, ids)
    assert_close(model.decode([5], caches[1], [1000]), one.decode([5], caches[0], [1000]), TOLERANCE[False])


def test_no_cache_is_held(specs: Models) -> None:
    """A cache that is dropped is free at once, after prompts, steps, and one that was interrupted."""
    model = split(specs("LlamaDecoderLayer"), 1)
    cache = read(model, ids_of(9))
    model.decode([5], cache)
    reference = weakref.ref(cache)
    del cache
    assert reference() is None
    cache = read(model, ids_of(9))
    model._prepared([5], cache, None)
    reference = weakref.ref(cache)
    del cache
    model.close_steps_of(None)
    assert reference() is None


def test_prompts_leave_no_buffers(specs: Models) -> None:
    model = split(specs("LlamaDecoderLayer"), 1)
    for count in (5, 9, 20):
        model.decode([5], read(model, ids_of(count)))
    assert {*model._first._buffers} == {(1, 1), (1, 20)}


def test_layers_without_a_kernel(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.decoder.lower_cpu.why_not", lambda *parts: "its heads are odd")
    with pytest.raises(UnsupportedError, match="layer 0 has no kernel on a CPU: its heads are odd"):
        HostLayers(specs("LlamaDecoderLayer").layers, (), torch.device("cpu"))
    model = split(specs("LlamaDecoderLayer"), 0)
    assert len(model._first) == 0
    with pytest.raises(ArgumentError, match="8 at most, got 9"):
        model.decode([5] * 9, Cache(model.spec, 9, where=model.where))
