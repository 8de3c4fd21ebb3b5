"""What goes to the CPU: pure functions of sizes, memory and context."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache, OnGpu, Slots
from halfbyte.decoder.offload.placement import LayerSize, Placement, Plan, Request, Sizes, bytes_of, plan_for, plan_of, request_of, sizes_of
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.errors import ArgumentError
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.ops.transformer.experts import Experts

BYTES = st.integers(0, 10**9)
LAYER = st.builds(LayerSize, BYTES, st.one_of(st.just(0), BYTES), BYTES, st.floats(0.01, 1.0), BYTES, BYTES).map(
    lambda layer: layer._replace(biases=layer.experts // 7)
)
LAYERS = st.lists(LAYER, min_size=1, max_size=12)
SIZES = st.builds(Sizes, LAYERS.map(tuple), BYTES, BYTES, BYTES, st.sampled_from([None, "its layers share keys"]), BYTES)


def whole_of(sizes: Sizes) -> int:
    return sizes.outside + sizes.workspace + sizes.prefix + sum(sum(layer[:3]) for layer in sizes.layers)


def planned(sizes: Sizes, memory: int | None, **asked: Any) -> Plan | None:
    try:
        return plan_for(sizes, Request(memory, **asked))
    except ArgumentError:
        return None


@given(SIZES, st.integers(1, 3 * 10**10))
def test_a_plan_never_exceeds_the_memory(sizes: Sizes, memory: int) -> None:
    plan, whole = planned(sizes, memory), whole_of(sizes)
    if plan is not None:
        assert 0 <= plan.gpu_bytes <= memory
        assert plan.gpu_bytes + plan.cpu_bytes == whole + plan.stream_bytes
        assert (plan.gpu.prefix, plan.cpu.prefix, plan.cpu.workspace) == (sizes.prefix, 0, 0)
        assert sizes.why_whole is None or plan.placement.layers == 0
    else:
        assert memory < whole


@given(SIZES, st.integers(1, 3 * 10**10), st.integers(0, 10**10))
def test_more_memory_moves_nothing_to_the_cpu(sizes: Sizes, memory: int, more: int) -> None:
    """But for the buffers through which experts cross, once there is memory for these."""
    plan, larger = planned(sizes, memory), planned(sizes, memory + more)
    if plan is not None:
        assert larger is not None
        assert larger.gpu_bytes >= plan.gpu_bytes
        assert larger.placement.layers <= plan.placement.layers
        assert not plan.streams or larger.streams or not sizes.stream_buffers(larger.placement)
        if larger.streams == plan.streams:
            assert larger.placement <= plan.placement


@given(SIZES, st.integers(1, 3 * 10**10))
def test_experts_cross_through_two_buffers_of_the_largest(sizes: Sizes, memory: int) -> None:
    plan = planned(sizes, memory)
    if plan is not None and plan.streams:
        crossing = [layer for layer in sizes.layers[plan.placement.layers : plan.placement.experts] if layer.experts]
        largest = max(layer.experts - layer.biases for layer in crossing)
        assert plan.stream_bytes == 2 * (largest + 512) + largest // 64 + sum(layer.biases for layer in crossing)
        assert plan.gpu_bytes == sizes.on_gpu(plan.placement) + plan.stream_bytes
    elif plan is not None and plan.placement != Placement():  # no placement of experts alone has room for them
        alone = [one for one in sizes.placements() if not one.layers]
        assert all(sizes.on_gpu(one) + sizes.stream_buffers(one) > memory for one in alone)


@given(SIZES)
def test_everything_is_on_one_device_at_the_extremes(sizes: Sizes) -> None:
    for memory in (None, max(whole_of(sizes), 1)):
        plan = planned(sizes, memory)
        assert plan is not None
        assert plan.placement == Placement()
        assert plan.cpu_bytes == 0
    *_, last = sizes.placements()
    assert all(last.on_cpu(i, experts=True) for i, layer in enumerate(sizes.layers) if layer.experts)
    if sizes.why_whole is None:
        assert sizes.on_gpu(last) == sizes.outside + sizes.workspace + sizes.prefix
        assert all(last.on_cpu(index) for index in range(len(sizes.layers)))


@given(SIZES)
def test_experts_go_before_layers(sizes: Sizes) -> None:
    found = [*sizes.placements()]
    assert found == sorted(found)
    taken = [sizes.on_gpu(placement) for placement in found]
    assert taken == sorted(taken, reverse=True)
    for placement in found:
        if placement.layers:
            assert all(placement.on_cpu(i, experts=True) for i, layer in enumerate(sizes.layers) if layer.experts)


@given(SIZES, st.integers(1, 10**9))
def test_what_fits_nothing_says_how_much_is_needed(sizes: Sizes, memory: int) -> None:
    if planned(sizes, memory) is not None:
        return
    with pytest.raises(ArgumentError, match="needs at least") as told:
        plan_for(sizes, Request(memory))
    (least,) = re.findall(r"at least (\d+(?:\.\d+)? k?[kMGT]?B)", str(told.value))
    assert planned(sizes, bytes_of(least)) is not None
    assert "\n" not in str(told.value)


def test_what_is_asked_for() -> None:
    sizes = Sizes((LayerSize(10), LayerSize(20, 300, 5, 0.1), LayerSize(20, 300, 5, 0.1)), 50, 7)
    assert plan_for(sizes, Request(None, experts=2)).placement == Placement(2, 0)
    plan = plan_for(sizes, Request(500, experts=3, gpu_layers=2))
    assert (plan.placement, plan.streams, plan.gpu_bytes, plan.cpu_bytes) == (Placement(3, 1), False, 107, 610)
    said = (
        "on the GPU: 107 B of 500 B given (weights 90 B, KV cache of 8192 tokens 10 B, workspaces 7 B); on the CPU: layer 0 and the routed "
    )
    assert str(plan) == said + "experts of layers 1-2, 610 B (weights 610 B)"
    plan = plan_for(sizes, Request(2000, experts=3, gpu_layers=2, sequences=2))
    assert (plan.streams, plan.gpu_bytes) == (True, 1735)
    assert "KV cache of 8192 tokens of 2 sequences 10 B, workspaces 1.6 kB)" in str(plan)
    assert str(plan).endswith("610 B (weights 610 B)")
    assert plan.to_json()["gpu"] == {"weights": 90, "cache": 10, "workspace": 1635, "prefix": 0}
    for asked, match in (
        ({"experts": 4}, "cpu_experts is 0 to 3, the layers of this model, got 4"),
        ({"gpu_layers": 4}, "gpu_layers is 0 to 3, the layers of this model, got 4"),
    ):
        with pytest.raises(ArgumentError, match=match):
            plan_for(sizes, Request(None, **asked))
    with pytest.raises(ArgumentError, match="at least 420 B of GPU memory with what is to be on the CPU for 8192 tokens, got 400 B"):
        plan_for(sizes, Request(400, experts=2))
    with pytest.raises(ArgumentError, match=r"1 of 3 layers cannot be on the CPU, as they share keys: leave gpu_layers out"):
        plan_for(sizes._replace(why_whole="they share keys"), Request(None, gpu_layers=2))


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(5, 5), ("12 GB", 12 * 10**9), ("12gb", 12 * 10**9), ("1.5GiB", 3 << 29), ("800 MB", 8 * 10**8), ("2g", 2 * 10**9), (".5 kB", 500)],
)
def test_amounts_of_memory(memory: int | str, expected: int) -> None:
    assert bytes_of(memory) == expected


@pytest.mark.parametrize(
    "memory", [0, -1, True, 1.5, "", "GB", "-3 GB", "12 XB", "nan", "1e9 GB", "0 GB", "999999999 TB", "0.0001 B", None]
)
def test_amounts_that_are_none(memory: Any) -> None:
    with pytest.raises(ArgumentError, match=r"GPU memory is a number of bytes above 0 or a text such as '12 GB', got "):
        bytes_of(memory)


def test_mappings_of_devices() -> None:
    assert request_of({"experts": "cpu"}) == ("cuda", -1, None)
    assert request_of({"cpu_experts": 3, "gpu": "cuda:1"}) == ("cuda:1", 3, None)
    assert request_of({"gpu_layers": 2}) == ("cuda", None, 2)
    for wrong in ({"expert": "cpu"}, {"experts": "cuda"}, {"cpu_experts": -1}, {"gpu_layers": "2"}, {"gpu": "cpu"}, {"cpu_experts": True}):
        with pytest.raises(ArgumentError, match="a mapping of devices has experts: 'cpu'"):
            request_of(wrong)
    with pytest.raises(ArgumentError, match="say the same"):
        request_of({"experts": "cpu", "cpu_experts": 3})


# Sizes of a specification


def spec_of(kind: str, folder: Path) -> DecoderSpec:
    torch.manual_seed(7)
    model = CASES[kind]().eval()
    vary_(model)
    hb.save(hb.quantize_(model, hb.Config("q8_0")), folder)
    return build_spec(*open_checkpoint(folder))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["GptOssDecoderLayer", "Glm4MoeDecoderLayer", "Gemma3DecoderLayer"])
def test_caches_are_not_larger_than_planned(kind: str, int8: bool, tmp_path: Path) -> None:
    spec, where = spec_of(kind, tmp_path), OnGpu(torch.device("cpu"), torch.bfloat16)
    for tokens, sequences in ((40, 1), (3000, 1), (100, 3)):
        sizes = sizes_of(spec, Request(None, tokens, sequences=sequences, int8_cache=int8), torch.bfloat16)
        cache = Cache(spec, int8=int8, most=tokens, where=where)
        for step in (1, 7, tokens - 8):
            cache.reserve(step)
            cache.append(step)
        slots = Slots(spec, sequences, int8=int8, where=where) if sequences > 1 else None
        for _ in range(0 if slots is None else sequences):
            assert slots is not None
            slots.join(cache)
        taken = cache.nbytes + (0 if slots is None else slots.nbytes)
        assert 0 < taken <= sum(layer.cache for layer in sizes.layers) < 3 * taken + 10**6 * sequences


def test_biases_of_streamed_experts_are_planned_for(tmp_path: Path) -> None:
    """They stay on the GPU for all layers, stacks cross through two buffers."""
    spec = spec_of("GptOssDecoderLayer", tmp_path)
    sizes = sizes_of(spec, Request(None, 64), torch.bfloat16)
    halves = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, Experts)]
    biases = [one.bias for half in halves for one in (half.gate_up, half.down_proj)]
    expected = sum(bias.nbytes for bias in biases if bias is not None)
    assert sum(layer.biases for layer in sizes.layers) >= expected > 0
    largest = max(layer.experts - layer.biases for layer in sizes.layers)
    assert sizes.stream_buffers(Placement(len(spec.layers))) - 2 * (largest + 512) - largest // 64 == sum(
        layer.biases for layer in sizes.layers
    )


def test_sizes_of_a_mixture(tmp_path: Path) -> None:
    """A tied embedding counts once; a layer without experts has none."""
    spec = spec_of("Glm4MoeDecoderLayer", tmp_path)
    sizes = sizes_of(spec, Request(None, 64), torch.bfloat16)
    assert [bool(layer.experts) for layer in sizes.layers] == [type(layer.mlp).__name__ == "Experts" for layer in spec.layers]
    assert any(layer.experts for layer in sizes.layers)
    tied = sizes_of(spec_of("LlamaDecoderLayer", tmp_path / "llama"), Request(None, 64), torch.bfloat16)
    assert 0 < tied.head <= tied.outside


@pytest.mark.parametrize("reason", ["its layers have per-layer inputs", "its layers reuse keys and values of others"])
def test_layers_that_stay_together(reason: str, tmp_path: Path) -> None:
    """Layers that share keys and values or have per-layer inputs are not split; all of them fit, or the message says how much they need."""
    spec = spec_of("Gemma4TextDecoderLayer, shared keys", tmp_path)
    if "reuse" in reason:
        spec = replace(spec, per_layer_inputs=None)
    sizes = sizes_of(spec, Request(None, 64), torch.bfloat16)
    assert sizes.why_whole == reason
    whole = sizes.on_gpu(Placement())
    assert plan_of(spec, Request(whole, 64), torch.bfloat16).placement == Placement()
    with pytest.raises(ArgumentError, match=r"the model needs at least .* of GPU memory for 64 tokens"):
        plan_of(spec, Request(whole - 1, 64), torch.bfloat16)
    count = len(spec.layers)
    with pytest.raises(ArgumentError, match=f"1 of {count} layers cannot be on the CPU, as {reason}: leave gpu_layers out"):
        plan_of(spec, Request(None, 64, gpu_layers=count - 1), torch.bfloat16)
