"""`GpuModel` computes what `CpuModel` computes: in torch's operations on a CPU, with imitated CUDA graphs.

tests/language/test_gpu_model.py compares them on a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_language_model
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder import gpu_step
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache, OnGpu, Slots
from halfbyte.decoder.gpu_step import DecodeStep
from halfbyte.decoder.kernels_gpu import torch_ops
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.language.checkpoint_tensors import PackedTensors, dtype_on_gpu, open_checkpoint
from halfbyte.language.generate import Batch, run
from halfbyte.language.model import LanguageModel
from halfbyte.language.sampling.sampler import Sampling
from halfbyte.language.tokenizer import Tokenizer
from halfbyte.layouts.records import split
from halfbyte.machine import GPUS

# Windows, soft caps, norms after, parallel residuals, residual multipliers, sinks, layer norms, longrope, mixtures with a shared expert,
# norms of whole rows and after rope, no gates.
FAMILIES = [
    *("LlamaDecoderLayer", "Qwen3DecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer", "Glm4DecoderLayer", "Cohere2DecoderLayer"),
    *("GraniteDecoderLayer", "GptOssDecoderLayer", "Starcoder2DecoderLayer", "Phi3DecoderLayer, longrope", "Qwen2MoeDecoderLayer"),
    *("Olmo2DecoderLayer", "HunYuanDenseV1DecoderLayer", "NemotronDecoderLayer", "Glm4MoeDecoderLayer", "PhiDecoderLayer"),
    *("Gemma4TextDecoderLayer", "Gemma4TextDecoderLayer, shared keys"),
]
SLOTS = ["Gemma3DecoderLayer", "Gemma4TextDecoderLayer, shared keys", "MistralDecoderLayer", "Qwen3MoeDecoderLayer"]
TOKENS = 24  # longer than windows of 5, 6, 7 and 9 tokens
# Relative to the largest logit: float32 sums in another order, in two to four layers. In 8 bits such a difference can move a key to the
# next code, 1/127 of the largest of its block.
TOLERANCE = {False: 1e-5, True: 2e-2}
HALF = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # units of rounding


def make(kind: str, folder: Path, compute: str = "float") -> tuple[CpuModel, GpuModel]:
    torch.manual_seed(7)
    model = CASES[kind]().eval()
    vary_(model)
    hb.quantize_(model, hb.Config("q8_0", compute=compute))
    hb.save(model, folder)
    spec = build_spec(*open_checkpoint(folder))
    return CpuModel(spec), GpuModel(spec, "cpu", torch.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[CpuModel, GpuModel]]:
    instances: dict[str, tuple[CpuModel, GpuModel]] = {}

    def find(kind: str) -> tuple[CpuModel, GpuModel]:
        if kind not in instances:
            instances[kind] = make(kind, tmp_path_factory.mktemp("model") / "model")
        return instances[kind]

    return find


def ids_of(count: int, seed: int = 1) -> list[int]:
    found: list[int] = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance


def in_pieces(model: CpuModel | GpuModel, ids: list[int], *, int8: bool = False) -> Tensor:
    """Logits after each token, of a text that is read in several pieces, some of one token."""
    cache, found = Cache(model.spec, int8=int8, where=model.where), []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 15), *((i, i + 1) for i in range(15, len(ids)))):
        some = ids[start:stop]
        found.append(model.decode(some, cache) if len(some) == 1 else model.prefill(some, cache, every=True))
    assert cache.length == len(ids)
    return torch.cat(found)


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_a_cpu(kind: str, models: Any) -> None:
    cpu, gpu = models(kind)
    ids = ids_of(TOKENS)
    expected = cpu.prefill(ids, Cache(cpu.spec), every=True)
    whole = Cache(gpu.spec, where=gpu.where)
    assert_close(gpu.prefill(ids, whole, every=True), expected, TOLERANCE[False])
    assert_close(in_pieces(gpu, ids), expected, TOLERANCE[False])
    assert_close(gpu.verify(ids[:3], whole), cpu.verify(ids[:3], _read(cpu, ids)), TOLERANCE[False])


def _read(model: CpuModel | GpuModel, ids: list[int], *, int8: bool = False) -> Cache:
    cache = Cache(model.spec, int8=int8, where=model.where)
    model.prefill(ids, cache)
    return cache


@pytest.mark.parametrize("kind", ["Qwen3DecoderLayer", "Gemma3DecoderLayer", "GptOssDecoderLayer", "Gemma4TextDecoderLayer, shared keys"])
def test_a_cache_in_8_bits_has_the_codes_of_a_cpu(kind: str, models: Any) -> None:
    cpu, gpu = models(kind)
    ids = ids_of(TOKENS)
    assert_close(in_pieces(gpu, ids, int8=True), in_pieces(cpu, ids, int8=True), TOLERANCE[True])
    there, here = _read(gpu, ids, int8=True), _read(cpu, ids, int8=True)
    for actual, records in zip(there.layers[0].buffers[:2], (here.layers[0].keys, here.layers[0].values), strict=True):
        codes = split(records[:, :, : here.layers[0].length], actual.shape[3])[0]
        assert actual.dtype == torch.int8
        assert float((actual[:, :, : there.layers[0].length].int() - codes.int()).abs().max()) <= 1
        assert codes.any()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Glm4DecoderLayer"])
def test_activations_of_16_bits(kind: str, dtype: torch.dtype, models: Any) -> None:
    """Relative to the norm: each of some 40 roundings adds at most a unit, mostly with other signs."""
    cpu, gpu = models(kind)
    half = GpuModel(gpu.spec, "cpu", dtype)
    ids = ids_of(TOKENS)
    found, expected = in_pieces(half, ids), in_pieces(cpu, ids)
    assert found.dtype == torch.float32
    assert 0 < float((found - expected).norm() / expected.norm()) < 8 * HALF[dtype]


def test_weights_that_compute_in_int8(tmp_path: Path) -> None:
    """An activation between two codes may get the other one, which moves an output by 1/127 of the largest of a block times a weight."""
    cpu, gpu = make("Qwen3DecoderLayer", tmp_path / "model", "int8")
    floats = make("Qwen3DecoderLayer", tmp_path / "floats")[1]
    ids = ids_of(TOKENS)
    found, expected, other = (in_pieces(model, ids) for model in (gpu, cpu, floats))
    assert float((found - expected).norm() / expected.norm()) < 0.03
    assert float((found - other).norm() / other.norm()) > 1e-3


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", SLOTS)
def test_slots_hold_what_sequences_hold_alone(kind: str, int8: bool, models: Any, graphs: list[int]) -> None:
    """Sequences of different lengths that join and leave, with steps that are CUDA graphs in between."""
    cpu, gpu = models(kind)
    chance, texts = random.Random(3), list[list[int]]()
    slots = Slots(gpu.spec, 6, int8=int8, where=gpu.where)
    for step in range(60):
        if len(texts) < slots.capacity and (not texts or chance.random() < 0.25):
            ids = [chance.randrange(3, 90) for _ in range(chance.choice([1, 2, 5, 9, 30, 70]))]
            slots.join(_read(gpu, ids, int8=int8))
            texts.append(ids)
        elif chance.random() < 0.12:
            gone = chance.randrange(len(texts))
            slots.leave(gone)
            last = texts.pop()
            if gone < len(texts):
                texts[gone] = last
        else:
            for text in texts:
                text.append(chance.randrange(3, 90))
            newest, positions = [text[-1] for text in texts], slots.positions()
            chosen = chance.randrange(len(texts))
            expected = cpu.decode(texts[chosen][-1:], _read(cpu, texts[chosen][:-1], int8=int8))[0]
            if step % 3 or int8:
                assert_close(gpu.decode(newest, slots, positions)[chosen], expected, TOLERANCE[int8])
            else:
                assert gpu.decode_tokens(newest, slots, positions, launch_ahead=True)[chosen] == int(expected.argmax())
    assert sum(graphs) > 5


def test_steps_are_for_batches_of_few_sizes(models: Any, graphs: list[int]) -> None:
    """Rows without a sequence change nothing, whatever is in free slots, and neither do steps that are launched ahead of them."""
    cpu, gpu = models("Gemma3DecoderLayer")
    slots, texts = Slots(gpu.spec, 21, where=gpu.where), list[list[int]]()
    for count in [*range(1, 22), *range(20, 0, -1)]:
        if count > len(texts):
            texts.append([3 + (7 * count + i) % 80 for i in range(1 + count % 4)])
            slots.join(_read(gpu, texts[-1][:-1]) if len(texts[-1]) > 1 else Cache(gpu.spec, where=gpu.where))
            for layer in slots.layers:
                for buffer in layer.buffers:
                    buffer[count:] = math.nan
        else:
            texts.pop()
            slots.leave(count)
        for launch_ahead in (True, True, False):
            tokens = gpu.decode_tokens([text[-1] for text in texts], slots, launch_ahead=launch_ahead)
            assert len(tokens) == count
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
    (text,) = texts
    for length in (4, 30, 60, len(text)):
        assert text[length - 1] == int(cpu.decode([text[length - 2]], _read(cpu, text[: length - 2]))[0].argmax())
    assert len(gpu._steps) <= 32
    assert len(graphs) <= 10, "1, 2, 4, 8, 16 and 21 sequences, before and after the buffers have grown"


# CUDA graphs


class Imitated:
    """A CUDA graph's behaviour without one: a capture runs no operation, and a replay runs them again on the same memory."""

    replays: list[int]
    instances: list[Imitated]

    def __init__(self, device: torch.device) -> None:
        self.closed, self.index = False, len(self.replays)
        self.replays.append(0)
        self.instances.append(self)

    def capture(self, run: Callable[[], Any]) -> Any:
        cells = [cell.cell_contents for cell in run.__closure__ or ()]
        (step,) = (found for found in cells if isinstance(found, DecodeStep))
        (compute,) = (found for found in cells if not isinstance(found, DecodeStep))
        self.cache = compute.args[0]
        self.run, before, self.memory = run, step._state.clone(), self._memory()
        self.found = run()
        step._state.copy_(before)
        return self.found

    def _memory(self) -> tuple[int, ...]:
        return tuple(buffer.data_ptr() for layer in self.cache.layers for buffer in layer.buffers)

    def replay(self) -> None:
        assert not self.closed
        assert self.memory == self._memory(), "a graph writes to the memory that it was captured with"
        self.replays[self.index] += 1
        for static, new in zip(self.found, self.run(), strict=True):
            static.copy_(new)

    def host(self, function: Callable[[], None]) -> None:
        function()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The replays of each graph."""
    found: list[int] = []
    monkeypatch.setattr(Imitated, "replays", found, raising=False)
    monkeypatch.setattr(Imitated, "instances", [], raising=False)
    monkeypatch.setattr(gpu_step, "CapturedGraph", Imitated)
    monkeypatch.setattr(gpu_step, "can_capture", lambda device: True)
    return found


def greedy(model: CpuModel | GpuModel, ids: list[int], count: int, **cache_settings: Any) -> list[int]:
    """Tokens after a text, each by the logits of the one before."""
    cache = Cache(model.spec, where=model.where, **cache_settings)
    found = [int(model.prefill(ids, cache).argmax())]
    while len(found) < count:
        found.append(int(model.decode(found[-1:], cache)[0].argmax()))
    return found


@pytest.mark.parametrize("captured", [False, True])
def test_a_choice_within_a_step_and_after_it(captured: bool, models: Any, graphs: list[int]) -> None:
    """The second likeliest tokens, of logits with a soft cap."""
    cpu, gpu = models("Gemma3DecoderLayer")
    ids, seen = ids_of(9), []

    def second(logits: Tensor) -> Tensor:
        seen.append(logits)
        return logits.topk(2).indices[:, 1]

    here, cache = _read(cpu, ids), Cache(gpu.spec, where=gpu.where)
    gpu.prefill(ids, cache)
    expected, found = [5], [5]
    for _ in range(20):
        expected.append(int(cpu.decode(expected[-1:], here)[0].topk(2).indices[1]))
        found += gpu.decode_tokens(found[-1:], cache, choose=second, captured=captured, launch_ahead=True)
    assert found == expected
    assert all(float(logits.abs().max()) <= 1.5 for logits in seen)
    gpu.close_steps_of(cache)
    assert all(graph.closed for graph in Imitated.instances)


@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Phi3DecoderLayer, longrope"])
def test_steps_that_are_launched_ahead(kind: str, models: Any, graphs: list[int]) -> None:
    cpu, gpu = models(kind)
    ids, count = ids_of(9), 40
    expected = greedy(cpu, ids, count)
    cache = Cache(gpu.spec, where=gpu.where)
    found = [int(gpu.prefill(ids, cache).argmax())]
    while len(found) < count:
        found += gpu.decode_tokens(found[-1:], cache, launch_ahead=True)
    assert found == expected
    assert cache.length == len(ids) + count - 1
    assert sum(graphs) == count - 1, "one step alone was not a graph, and one was launched that nobody asked for"


def test_a_step_ahead_that_nobody_asks_for(models: Any, graphs: list[int]) -> None:
    """Another token than the likeliest one, a cache that was cut, a sequence that is read again, another cache."""
    cpu, gpu = models("Gemma3DecoderLayer")
    ids = ids_of(9)
    cache, other = Cache(gpu.spec, where=gpu.where), Cache(gpu.spec, where=gpu.where)
    here = _read(cpu, ids)
    gpu.prefill(ids, cache)
    gpu.prefill(ids[:4], other)
    for step in range(24):
        token = 3 + 7 * step % 80 if step % 3 else gpu.decode_tokens([5], cache, launch_ahead=True)[0]
        if not step % 3:
            assert token == int(cpu.decode([5], here)[0].argmax())
        if step % 4 == 1:
            gpu.decode_tokens([9], other, launch_ahead=True)
        if step % 5 == 2:
            assert cache.cut(cache.length - 1) == here.cut(here.length - 1)
        if step % 7 == 3:
            gpu.prefill([11, 12], cache)
            cpu.prefill([11, 12], here)
        assert_close(gpu.decode([token], cache), cpu.decode([token], here), TOLERANCE[False])
    assert cache.length == here.length


def test_graphs_are_for_buffers(models: Any, graphs: list[int]) -> None:
    """Other buffers need another graph; windows that move within theirs don't."""
    _, gpu = models("MistralDecoderLayer")  # windows of 9 tokens in all layers
    greedy(gpu, ids_of(9), 120)
    assert len(graphs) == 1
    _, full = models("LlamaDecoderLayer")
    greedy(full, ids_of(9), 40, most=30)
    assert len(graphs) == 2


class Empty(Imitated):
    """Computes nothing, and so keeps no cache alive, as a CUDA graph doesn't."""

    def capture(self, run: Callable[[], Any]) -> Any:
        found = super().capture(run)
        del self.run, self.cache
        return found

    def replay(self) -> None:
        assert not self.closed


def test_graphs_of_caches_that_are_gone_are_closed(tmp_path: Path, graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps scratch memory. Of caches that are there some graphs are kept."""
    monkeypatch.setattr(gpu_step, "CapturedGraph", Empty)
    _, gpu = make("LlamaDecoderLayer", tmp_path / "model")
    caches: list[Cache] = []
    for most in (3, 40):
        for _ in range(40):
            caches = [*caches[1 - most :], _read(gpu, ids_of(3))]
            for _ in range(2):
                gpu.decode_tokens([5], caches[-1])
            assert sum(not graph.closed for graph in Imitated.instances) <= min(most + 1, 32)
    assert len(graphs) == 80
    assert not Imitated.instances[-1].closed


def test_a_step_that_cannot_be_captured(models: Any, graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Imitated, run: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    cpu, gpu = models("LlamaDecoderLayer")
    monkeypatch.setattr(Imitated, "capture", fails)
    with pytest.warns(UserWarning, match="not by a CUDA graph, as torch cannot capture") as told:
        assert greedy(gpu, ids_of(9), 12) == greedy(cpu, ids_of(9), 12)
    assert len(graphs) == len(told) == 1
    assert "cannot capture" in gpu.notes[-1]


# Text


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[CpuModel, GpuModel, Tokenizer]:
    folder = make_language_model(tmp_path_factory.mktemp("model") / "float")
    spec = build_spec(*open_checkpoint(folder, hb.Config("q8_0", compute="float")))
    return CpuModel(spec), GpuModel(spec, "cpu", torch.float32), Tokenizer.open(folder, None)


SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=20, ignore_eos=True),
    "sampled": Sampling(max_new_tokens=20, temperature=0.8, top_k=20, seed=5, ignore_eos=True),
    "from all": Sampling(max_new_tokens=20, temperature=0.9, seed=3, ignore_eos=True),
    "penalty": Sampling(max_new_tokens=20, repetition_penalty=1.3),
    "logprobs": Sampling(max_new_tokens=12, logprobs=2),
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("speculate", [0, 4])
def test_batches_say_the_same(int8: bool, speculate: int, both: Any, graphs: list[int]) -> None:
    """Sequences of several kinds at the same time, more than there are slots, and one that runs alone before and after."""
    cpu, gpu, tokenizer = both
    texts = []
    for model in (cpu, gpu):
        batch = Batch(model, tokenizer, slots=3, int8_cache=int8, speculate=speculate)
        found = []
        for prompts in (["the quick brown fox"], ["the quick brown fox jumps", "an old oak", "hen", "red hen sleeps"], ["an old oak tree"]):
            for names in (*([name] * 4 for name in SAMPLINGS), [*SAMPLINGS][1:]):
                both_of = zip(prompts, names, strict=False)
                started = [batch.submit(tokenizer.encode(prompt), SAMPLINGS[name]) for prompt, name in both_of]
                for _ in run(batch, started):
                    pass
                found += [(names, one.ids, [choice.id for choice in one.choices]) for one in started]
        texts.append(found)
    assert texts[0] == texts[1]
    assert sum(graphs) > 20


def test_damaged_weights_are_told(tmp_path: Path, graphs: list[int]) -> None:
    _, gpu = make("LlamaDecoderLayer", tmp_path / "model")
    cache = _read(gpu, ids_of(5))
    gpu.decode_tokens([5], cache)
    gpu._norm.weight.fill_(torch.nan)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            gpu.decode_tokens([5], cache)


# Opening


def test_weights_in_the_type_of_activations(tmp_path: Path) -> None:
    """Embeddings that are not quantized take half the memory; everything else is the same."""
    folder = make_language_model(tmp_path / "float", tied=False)
    config, tensors = open_checkpoint(folder, hb.Config("q8_0", compute="float", skip=["model.embed_tokens", "lm_head"]))
    expected = CpuModel(build_spec(config, tensors))
    spec = build_spec(config, PackedTensors(tensors._source, where=OnGpu(torch.device("cpu"), torch.bfloat16)))
    assert isinstance(spec.embedding, Tensor)
    assert isinstance(spec.lm_head, Tensor)
    assert spec.embedding.dtype == spec.lm_head.dtype == torch.bfloat16
    ids = ids_of(TOKENS)
    found, wanted = in_pieces(GpuModel(spec, "cpu", torch.bfloat16), ids), in_pieces(expected, ids)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 8 * HALF[torch.bfloat16]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_type_of_activations(config: dict[str, Any], expected: torch.dtype) -> None:
    assert dtype_on_gpu(config) == expected


def test_hidden_states_beyond_the_range_of_float16(tmp_path: Path) -> None:
    """Embeddings of up to 1e6 are infinite in float16: the error says what to do, and that helps."""
    folder = make_language_model(tmp_path / "float", tied=False)
    spec = build_spec(*open_checkpoint(folder, hb.Config("q8_0", compute="float", skip=["model.embed_tokens", "lm_head"])))
    assert isinstance(spec.embedding, Tensor)
    spec = replace(spec, embedding=spec.embedding * (1e6 / spec.embedding.abs().max()))
    narrow, wide = (GpuModel(spec, "cpu", dtype) for dtype in (torch.float16, torch.bfloat16))
    cache = _read(narrow, ids_of(5))
    with pytest.raises(CheckpointError, match=r"leave the range of float16: open it with dtype=torch\.bfloat16"):
        narrow.decode_tokens([5], cache)
    for sampling in (hb.Sampling(), hb.Sampling(temperature=1.0), hb.Sampling(logprobs=1)):
        batch = Batch(narrow, Tokenizer.open(folder), slots=1)
        batch.submit(ids_of(5), sampling)
        with pytest.raises(CheckpointError, match=r"leave the range of float16: open it with dtype=torch\.bfloat16"):
            batch.step()
    assert len(wide.decode_tokens([5], _read(wide, ids_of(5)))) == 1


def test_what_torch_computes_is_told(models: Any) -> None:
    """On an H100, which is not here."""
    assert list(torch_ops(models("Gemma3DecoderLayer")[1].spec.layers, torch.bfloat16, GPUS["sm_90"])) == []
    assert list(torch_ops(models("Gemma2DecoderLayer")[1].spec.layers, torch.bfloat16, GPUS["sm_90"])) == [
        "torch computes attention of one token: the kernels have no soft cap of scores",
        "torch computes attention of prompts: the kernels have no soft cap of scores",
    ]
    (note,) = torch_ops(models("LlamaDecoderLayer")[1].spec.layers, torch.float32, GPUS["sm_90"])
    assert note.startswith("torch computes attention of prompts: it computes in")


# Mistakes


def _raises(match: str) -> Any:
    return pytest.raises(ArgumentError, match=match)


def test_mistakes(models: Any) -> None:
    _, gpu = models("LlamaDecoderLayer")
    with _raises("float16, bfloat16, float32, got torch.float64"):
        GpuModel(gpu.spec, "cpu", torch.float64)
    with _raises("weights of this model are on cpu, got device='cuda:0'"):
        GpuModel(gpu.spec, "cuda:0")
    cache = _read(gpu, [3, 4])
    with _raises("cache's 1 sequences, 256 at most, got 2"):
        gpu.decode([3, 4], cache)
    for wrong in ([99], [-1]):
        with _raises(r"token ids lie in 0 … 98"):
            gpu.decode(wrong, cache)
        with _raises(r"token ids lie in 0 … 98"):
            gpu.prefill(wrong, cache)
    with _raises("at least one token"):
        gpu.prefill([], cache)
    with _raises("got 1 prompts and a cache of 1 sequences with 2 tokens"):
        gpu.prefill_together([[3]], cache)
    with _raises("got 2 prompts"):
        gpu.prefill_together([[3], []], Cache(gpu.spec, 2, where=gpu.where))
    with _raises("0 of 1 slots are free, got 2 sequences"):
        slots = Slots(gpu.spec, 1, where=gpu.where)
        slots.join(cache)
        slots.join(Cache(gpu.spec, 2, where=gpu.where))
    assert cache.length == 2


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpus")
def test_devices(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path / "float")
    for device in ("cuda", "cuda:1", "meta", "mps"):
        with _raises(f"'cpu' or a GPU that torch sees, none, got '{device}': use device='cpu'"):
            LanguageModel.open(folder, format="q8_0", device=device)
    with _raises("'cpu', 'cuda', 'cuda:1', … or 'auto', got 'gpu'"):
        LanguageModel.open(folder, format="q8_0", device="gpu")
    with _raises("activations on cpu are float32, got dtype=torch.float16: leave it out"):
        LanguageModel.open(folder, format="q8_0", dtype=torch.float16)
    model = LanguageModel.open(folder, format="q8_0", device="auto")
    assert model.spec.embedding.device.type == "cpu"
    assert (
        model.generate("the quick", max_new_tokens=3).text
        == LanguageModel.open(folder, format="q8_0").generate("the quick", max_new_tokens=3).text
    )
