"""Experts on the CPU next to a GPU, without a GPU: both devices are the CPU, hidden states cross through buffers all the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tiny_decoders import CASES

from halfbyte.decoder import gpu_step
from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.families import FAMILIES
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.offload import host_experts, rates
from halfbyte.decoder.offload.host_experts import HostExperts
from halfbyte.decoder.offload.placement import Placement, Plan, Request, Sizes
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.errors import ArgumentError
from halfbyte.ops.transformer.experts import Experts

_WITH_EXPERTS = {family.layer_class for family in FAMILIES.values() if family.moe is not None and family.model_class}
MIXTURES = [kind for kind in CASES if kind.split(",")[0] in _WITH_EXPERTS]
# Relative to the largest logit: float32 sums of the experts of a few rows in another order, in two to four layers.
TOLERANCE = {False: 1e-5, True: 2e-2}
Models = Callable[[str], DecoderSpec]


def both(spec: DecoderSpec, experts: int) -> tuple[GpuModel, GpuModel]:
    return GpuModel(spec, "cpu", torch.float32), GpuModel(spec, "cpu", torch.float32, plan(experts))


def plan(experts: int) -> Plan:
    return Plan(Request(None, sequences=8), Placement(experts), Sizes((), 0, 0))


def ids_of(count: int, seed: int = 1) -> list[int]:
    found: list[int] = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert float((found - expected).abs().max() / expected.abs().max()) <= tolerance


def read(model: GpuModel, ids: list[int], *, int8: bool = False) -> Cache:
    cache = Cache(model.spec, int8=int8, where=model.where)
    model.prefill(ids, cache)
    return cache


def test_all_families_with_experts_are_tested() -> None:
    assert len(MIXTURES) > 12
    assert {"GptOssDecoderLayer", "Glm4MoeDecoderLayer", "Qwen3MoeDecoderLayer"} < set(MIXTURES)


@pytest.mark.parametrize("kind", MIXTURES)
def test_logits_are_those_of_one_device(kind: str, specs: Models) -> None:
    """Of a prompt, whose rows are too many for one native call of the experts, and of tokens after it; up to the order of sums, as products
    of one device have more rows: some behind the prompt."""
    spec = specs(kind)
    for experts in range(1, len(spec.layers) + 1):
        one, split = both(spec, experts)
        ids = ids_of(70)
        caches = [Cache(model.spec, where=model.where) for model in (one, split)]
        expected, found = (model.prefill(ids, cache, every=True) for model, cache in zip((one, split), caches, strict=True))
        assert_close(found, expected, TOLERANCE[False])
        for token in ids[:3]:
            assert_close(split.decode([token], caches[1]), one.decode([token], caches[0]), TOLERANCE[False])
        assert split.decode_tokens([5], caches[1], launch_ahead=True) == one.decode_tokens([5], caches[0])
        assert len(split._host) == sum(isinstance(layer.mlp, Experts) for layer in spec.layers[:experts])


# The crossing


def test_hidden_states_cross_through_buffers(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's experts read and write memory that is not that of the GPU's tensors, and run between launches."""
    _, split = both(specs("Qwen2MoeDecoderLayer"), 2)
    order: list[str] = []
    compute, shared = HostExperts._compute, host_experts.shared_output
    monkeypatch.setattr(HostExperts, "_compute", lambda *args: (order.append("experts"), compute(*args))[1])
    monkeypatch.setattr(host_experts, "shared_output", lambda *args: (order.append("shared"), shared(*args))[1])
    given: list[int] = []
    route = host_experts.route

    def routed(x: Tensor, half: Experts) -> Any:
        found = route(x, half)
        given.extend(one.data_ptr() for one in found[:3])
        return found

    monkeypatch.setattr(host_experts, "route", routed)
    split.decode([5], read(split, ids_of(40)))
    assert order == ["shared", "experts"] * 4, "the shared expert is launched before the host waits"
    buffers = split._host._crossing._rows
    assert not {one.data_ptr() for rows in buffers.values() for one in rows} & set(given)
    ((_, rows),) = buffers.items()  # for all layers, and for 40 rows and one, as no graph keeps the addresses
    assert len(rows.z) == 40
    assert len({one.untyped_storage().data_ptr() for one in rows}) == 1, "one buffer"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", MIXTURES)
def test_batches_of_sequences_that_come_and_go(kind: str, int8: bool, specs: Models) -> None:
    """Also beyond sliding windows, whose buffers move. In 8 bits sums in another order can move a key to the next code."""
    spec = specs(kind)
    models = both(spec, len(spec.layers) - 1)
    slots = [Slots(model.spec, 4, int8=int8, where=model.where) for model in models]
    chance = torch.Generator().manual_seed(3)
    for step in range(24):
        if step in (0, 1, 5, 9, 14):
            for model, some in zip(models, slots, strict=True):
                some.join(read(model, ids_of(3 + 7 * step, step), int8=int8))
        elif step in (8, 12):
            for some in slots:
                some.leave(0)
        tokens: list[int] = torch.randint(3, 90, (slots[0].batch,), generator=chance).tolist()
        expected, found = (model.decode(tokens, some) for model, some in zip(models, slots, strict=True))
        assert_close(found, expected, TOLERANCE[int8])


class Pieces:
    """A CUDA graph in pieces without a GPU: a capture notes the functions of the host, a replay runs everything and counts them."""

    instances: list[Pieces]

    def __init__(self, device: torch.device) -> None:
        self.functions: list[Any] = []
        self.instances.append(self)
        self.captures, self.called = False, 0

    def capture(self, run: Callable[[], Any]) -> Any:
        (self.step,) = (cell.cell_contents for cell in run.__closure__ or () if isinstance(cell.cell_contents, gpu_step.DecodeStep))
        self.run, before, self.captures = run, self.step._state.clone(), True
        self.found = run()
        self.step._state.copy_(before)
        self.captures = False
        return self.found

    def between(self, function: Callable[[], None]) -> None:
        if self.captures:
            self.functions.append(function)
        else:
            self.called += 1
            function()

    def meanwhile(self, function: Callable[[], None], settle: Callable[[], None]) -> None:
        try:
            self.between(function)
        except BaseException:
            settle()
            raise

    def replay(self) -> None:
        self.step._host = self
        for static, new in zip(self.found, self.run(), strict=True):
            static.copy_(new)

    def close(self) -> None: ...


def test_a_captured_step_is_in_pieces(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stretch for each layer with experts on the CPU; nothing is launched ahead of the host."""
    monkeypatch.setattr(Pieces, "instances", [], raising=False)
    monkeypatch.setattr(gpu_step, "CapturedGraph", Pieces)
    monkeypatch.setattr(gpu_step, "can_capture", lambda device: True)
    one, split = both(specs("Qwen3MoeDecoderLayer"), 2)
    cache, other = read(split, ids_of(9)), read(one, ids_of(9))
    tokens = [5]
    for _ in range(5):
        expected = one.decode_tokens(tokens, other)
        found = split.decode_tokens(tokens, cache, launch_ahead=True)
        assert found == expected
        assert split._ahead is None
        tokens = found
    (graph,) = (graph for graph in Pieces.instances if graph.step in split._steps.values())
    assert len(graph.functions) == len(split._host) > 0
    assert graph.called == 4 * len(split._host)
    assert split.notes == ()


def test_interrupted_in_a_crossing(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the CPU computes: the next call computes what it would have computed, and no thread or buffer is left."""
    _, split = both(specs("Qwen3MoeDecoderLayer"), 1)
    expected = split.decode([5], read(split, ids_of(9)))
    compute, threads, buffers = HostExperts._compute, threading.active_count(), len(split._host._crossing._rows)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    cache = read(split, ids_of(9))
    monkeypatch.setattr(HostExperts, "_compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        split.decode([5], cache)
    monkeypatch.setattr(HostExperts, "_compute", compute)
    assert torch.equal(split.decode([5], cache), expected)
    assert (threading.active_count(), len(split._host._crossing._rows)) == (threads, buffers)


def test_interrupted_between_pieces(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a captured step is replayed: the same step again gives what it would have given, and so do those after it."""
    monkeypatch.setattr(Pieces, "instances", [], raising=False)
    monkeypatch.setattr(gpu_step, "CapturedGraph", Pieces)
    monkeypatch.setattr(gpu_step, "can_capture", lambda device: True)
    one, split = both(specs("GptOssDecoderLayer"), 3)
    cache, other = read(split, ids_of(9)), read(one, ids_of(9))
    compute, tokens = HostExperts._compute, [5]
    for step in range(6):
        expected = one.decode_tokens(tokens, other)
        if step > 1:
            calls = itertools.count()

            def interrupted(*args: Any, calls: Iterator[int] = calls, layer: int = step % 3) -> None:
                compute(*args)
                if next(calls) == layer:
                    raise KeyboardInterrupt

            monkeypatch.setattr(HostExperts, "_compute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                split.decode_tokens(tokens, cache, launch_ahead=True)
            monkeypatch.setattr(HostExperts, "_compute", compute)
        assert split.decode_tokens(tokens, cache, launch_ahead=True) == expected
        tokens = expected


def test_experts_without_a_native_call(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed by torch's operations, which the notes tell once."""
    monkeypatch.setattr(host_experts, "why_no_mixture", lambda *weights: "its gates are odd")
    one, split = both(specs("MixtralDecoderLayer"), 2)
    assert split.notes == ("torch computes experts on the CPU: its gates are odd",)
    assert one.notes == ()
    assert_close(split.decode([5], read(split, ids_of(9))), one.decode([5], read(one, ids_of(9))), TOLERANCE[False])


def test_whether_experts_cross_is_measured(specs: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the computation of one layer, all of whose experts are used; once, and not for a few tokens."""
    _, split = both(specs("Qwen3MoeDecoderLayer"), 2)
    used: list[Tensor] = []
    routed = HostExperts._routed
    monkeypatch.setattr(HostExperts, "_routed", lambda *args: (used.append(args[3]), routed(*args))[1])
    monkeypatch.setattr(host_experts, "link_bandwidth", lambda device: 1e15)
    host = HostExperts(split._host._mixtures, torch.device("cpu"))
    monkeypatch.setattr(host, "_device", torch.device("cuda", 0))
    assert not host.streams(rates.FEWEST_ROWS - 1)
    assert not used
    assert host.streams(rates.FEWEST_ROWS), "the link takes no time"
    assert [len(ids) for ids in used] == [rates.FEWEST_ROWS] * 2
    assert used[0].unique().tolist() == list(range(len(next(iter(host._mixtures.values())).router)))
    host.__dict__.update(_link_seconds=1.0, _cpu_seconds=rates.SecondsOfRows([(16, 0.02), (32, 1.0), (64, 3.0)]))
    assert [host.streams(rows) for rows in (16, 32, 33, 64, 6400)] == [False, False, True, True, True]


def test_experts_elsewhere_than_placed(specs: Models) -> None:
    spec = specs("Qwen3MoeDecoderLayer")
    half = spec.layers[0].mlp
    assert isinstance(half, Experts)
    absent = half.gate_up.packed
    elsewhere = replace(
        spec.layers[0], mlp=half._replace(gate_up=half.gate_up._replace(packed=replace(absent, data=absent.data.to("meta"))))
    )
    with pytest.raises(ArgumentError, match=r"the experts of layer 0 are on meta, and .*experts=1.* needs them on cpu: pack them there"):
        GpuModel(replace(spec, layers=(elsewhere, *spec.layers[1:])), "cpu", torch.float32, plan(1))
