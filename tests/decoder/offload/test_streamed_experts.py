"""Experts that cross to the GPU for prompts, without a GPU: both devices are the CPU, and the copies to two slots are made all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from test_host_experts import both, ids_of

from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.offload import host_experts, streamed_experts
from halfbyte.decoder.offload.host_experts import HostExperts
from halfbyte.decoder.offload.placement import Placement, Plan, Request, Sizes
from halfbyte.decoder.offload.rates import FEWEST_ROWS
from halfbyte.decoder.offload.streamed_experts import StreamedExperts
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.crossing import DONE, READY
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.routing import add_experts

Models = Callable[[str], DecoderSpec]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose experts were computed where they were copied to."""
    layers, add = list[int](), StreamedExperts.add

    def counted(self: StreamedExperts, layer: int, x: Tensor) -> Tensor:
        layers.append(layer)
        return add(self, layer, x)

    monkeypatch.setattr(StreamedExperts, "add", counted)
    return layers


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_more_layers_than_slots(count: int, specs: Models) -> None:
    half = specs("Qwen3MoeDecoderLayer").layers[0].mlp
    assert isinstance(half, Experts)
    order = torch.randperm(len(half.router), generator=torch.Generator().manual_seed(1))
    halves = {3 * i: half._replace(router=half.router.roll(i, 0), top_k=1 + i % 2) for i in range(count)}
    halves[0] = half._replace(router=half.router[order])
    streamed, x = StreamedExperts(halves, torch.device("cpu")), torch.randn(3, half.k, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        streamed.begin()
        for layer, one in halves.items():
            assert torch.equal(streamed.add(layer, x), add_experts(x, one))


def test_after_the_last_layers_the_first_ones_cross(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next prompt copies none before it computes; one whose predecessor failed copies them anew."""
    mixture = specs("Qwen3MoeDecoderLayer").layers[0].mlp
    assert isinstance(mixture, Experts)
    mixtures = {i: mixture._replace(router=mixture.router.roll(i, 0)) for i in range(5)}
    copied, copy = list[int](), StreamedExperts._copy

    def counted(self: StreamedExperts, layer: int) -> None:
        copied.append(layer)
        copy(self, layer)

    monkeypatch.setattr(StreamedExperts, "_copy", counted)
    streamed, x = StreamedExperts(mixtures, torch.device("cpu")), torch.randn(3, mixture.k, generator=torch.Generator().manual_seed(2))
    expected = [add_experts(x, one) for one in mixtures.values()]
    for layers, at_first in ((5, [0, 1]), (5, []), (3, []), (5, [0, 1]), (5, [])):
        copied.clear()
        streamed.begin()
        assert copied == at_first
        assert all(torch.equal(streamed.add(layer, x), expected[layer]) for layer in range(layers))
        assert copied[len(at_first) :] == [2, 3, 4, 0, 1][:layers]
    copied.clear()
    alone = StreamedExperts({0: mixture}, torch.device("cpu"))
    for _ in range(2):
        alone.begin()
        assert torch.equal(alone.add(0, x), expected[0])
    assert copied == [0]  # a single layer stays in the slot


@pytest.mark.parametrize("kind", ["Qwen3MoeDecoderLayer", "Qwen2MoeDecoderLayer", "GptOssDecoderLayer"])
def test_experts_of_prompts_cross(kind: str, specs: Models, streamed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, and not for a few tokens."""
    spec = specs(kind)
    one, split = both(spec, len(spec.layers))
    monkeypatch.setattr(HostExperts, "streams", lambda _, rows: rows >= FEWEST_ROWS)
    caches = [Cache(model.spec, where=model.where) for model in (one, split)]
    mixtures = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, Experts)]
    for count, expected in ((65, mixtures), (5, []), (71, mixtures)):
        streamed.clear()
        found = [model.prefill(ids_of(count), cache) for model, cache in zip((one, split), caches, strict=True)]
        assert torch.allclose(*found, atol=1e-5 * float(found[0].abs().max()), rtol=0)
        assert streamed == expected


def test_a_failure_between_rows_that_were_sent_and_their_experts(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory or Ctrl-C: rows that were sent are not taken for the next ones."""
    spec = specs("Qwen2MoeDecoderLayer")
    _, split = both(spec, len(spec.layers))
    monkeypatch.setattr(HostExperts, "streams", lambda _, rows: False)
    expected = split.prefill(ids_of(40), Cache(spec, where=split.where))

    def fails(*args: object) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(host_experts, "shared_output", fails)
        with pytest.raises(KeyboardInterrupt):
            split.prefill(ids_of(40), Cache(spec, where=split.where))
    words = split._host._crossing._words
    assert words[READY] == words[DONE] > 0
    assert torch.equal(split.prefill(ids_of(40), Cache(spec, where=split.where)), expected)


def test_decode_steps_are_never_streamed(specs: Models, streamed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences they have, also where they are not captured: only prompts copy experts."""
    spec = specs("Qwen3MoeDecoderLayer")
    one, split = both(spec, len(spec.layers))
    monkeypatch.setattr(HostExperts, "streams", lambda _, rows: True)
    slots = [Slots(spec, 4, where=model.where) for model in (one, split)]
    for seed in range(4):
        for model, some in zip((one, split), slots, strict=True):
            cache = Cache(spec, where=model.where)
            model.prefill(ids_of(5 + seed, seed), cache)
            some.join(cache)
    assert streamed
    streamed.clear()
    for step in range(3):
        found = [model.decode(ids_of(4, step), some) for model, some in zip((one, split), slots, strict=True)]
        assert torch.allclose(*found, atol=1e-5 * float(found[0].abs().max()), rtol=0)
    assert not streamed


@pytest.mark.parametrize("few", ["main memory", "GPU memory"])
def test_without_memory_the_cpu_computes_prompts(few: str, specs: Models, streamed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs("Qwen3MoeDecoderLayer")

    def refuses(*args: object) -> None:
        raise UnsupportedError("main memory of 1 GB cannot be pinned (out of memory)")

    if few == "main memory":
        monkeypatch.setattr(streamed_experts, "pin", refuses)
    memory = None if few == "main memory" else 1000
    split = GpuModel(spec, "cpu", torch.float32, Plan(Request(memory), Placement(len(spec.layers)), Sizes((), 0, 0)))
    expected = GpuModel(spec, "cpu", torch.float32).prefill(ids_of(90), Cache(spec, where=split.where))
    found = split.prefill(ids_of(90), Cache(spec, where=split.where))
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert not streamed
    (note,) = [note for note in split.notes if "prompts" in note]
    assert note.startswith("prompts are read with experts on the CPU, not on the GPU: ")
    assert few in note


def test_without_experts_nothing_is_copied() -> None:
    assert HostExperts({}, torch.device("cpu")).notes == ()
