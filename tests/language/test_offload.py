"""`LanguageModel.open` with a part of the model on the CPU. There is no GPU here: the other part is on the CPU, too."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_language_model, make_mixture

import halfbyte as hb
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.offload.host_experts import HostExperts
from halfbyte.decoder.offload.placement import Placement
from halfbyte.decoder.offload.rates import Rates
from halfbyte.decoder.offload.streamed_experts import StreamedExperts
from halfbyte.decoder.spec import LayerSpec, tensors_of
from halfbyte.errors import ArgumentError
from halfbyte.language import model as opening
from halfbyte.language.device import fitting
from halfbyte.language.model import LanguageModel
from halfbyte.language.report import LanguageReport, Times
from halfbyte.language.sampling.sampler import Sampling
from halfbyte.memory import size_text

TEXTS = ["the quick brown fox", "an old oak", "red hen sleeps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("model") / "mixture")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_gpu", lambda name: torch.device("cpu"))


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes of all KV caches that were made by a test and are not free yet."""
    caches, init = weakref.WeakSet[Cache](), Cache.__init__

    def noted(cache: Cache, *arguments: Any, **settings: Any) -> None:
        init(cache, *arguments, **settings)
        caches.add(cache)

    monkeypatch.setattr(Cache, "__init__", noted)
    return lambda: sum(cache.nbytes for cache in caches)


def opened(folder: Path, **settings: Any) -> LanguageModel:
    return LanguageModel.open(folder, dtype=torch.float32, **settings)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_text_is_that_of_one_device(folder: Path, gpu: None, cache: str | None) -> None:
    expected = [one.ids for one in LanguageModel.open(folder, cache=cache).generate(TEXTS, max_new_tokens=12)]
    for settings in ({"device": {"experts": "cpu"}}, {"device": {"cpu_experts": 1}, "sequences": 2}, {"memory": "1 GB"}):
        model = opened(folder, cache=cache, **settings)
        assert isinstance(model._model, GpuModel)
        assert [one.ids for one in model.generate(TEXTS, max_new_tokens=12)] == expected
        assert model.most_sequences == settings.get("sequences", 1)


def test_as_much_as_fits_is_on_the_gpu(folder: Path, gpu: None) -> None:
    """Placements by the memory given, and what the plan says of them."""
    whole = opened(folder, memory="10 GB").plan
    assert whole is not None
    assert whole.placement == Placement()
    sizes = whole.sizes
    for experts in (1, 2):
        plan = opened(folder, memory=sizes.on_gpu(Placement(experts))).plan
        assert plan is not None
        assert plan.placement == Placement(experts)
        assert plan.gpu_bytes <= (plan.request.memory or 0) < sizes.on_gpu(Placement(experts - 1))
    assert f"the routed experts of layers 0-1, {size_text(plan.cpu_bytes)}" in str(plan)
    with pytest.raises(ArgumentError, match=r"needs at least .* of GPU memory for 600 tokens, got 1.0 MB: give it more"):
        opened(folder, memory="1 MB")
    with pytest.raises(ArgumentError, match="with what is to be on the CPU"):
        opened(folder, memory=sizes.on_gpu(Placement(1)) - 1, device={"cpu_experts": 1})


def test_sizes_are_those_of_the_weights(folder: Path, gpu: None, tmp_path: Path) -> None:
    """Sizes come without reading weights, also of embeddings in floating point; the plan counts each weight."""
    sized = opened(folder, memory="10 GB").plan
    assert sized is not None
    config, tensors = opening.open_checkpoint(folder, device=torch.device("cpu"), dtype=torch.float32, offloads=True)
    spec, absent = opening.build_spec(config, tensors), opening.build_spec(config, tensors.sized())
    assert absent.layers[0].mlp.down_proj.packed.data.is_meta
    request = sized.request
    assert opening.plan_of(spec, request, torch.float32).sizes == opening.plan_of(absent, request, torch.float32).sizes == sized.sizes
    floats = make_language_model(tmp_path / "float", tied=False)
    config, tensors = opening.open_checkpoint(floats, hb.Config("q8_0", skip=["model.embed_tokens", "lm_head"]), device=torch.device("cpu"))
    both = (opening.build_spec(config, each) for each in (tensors, tensors.sized()))
    assert len({opening.plan_of(spec, request, torch.float32).sizes for spec in both}) == 1


def test_a_context_that_outgrows_the_plan(folder: Path, gpu: None) -> None:
    model = opened(folder, memory="10 GB", context=20)
    match = r"its memory is planned for 20 tokens of a sequence.*: use a shorter text, or open it with a larger context"
    with pytest.raises(ArgumentError, match=match):
        model.generate(list(range(3, 33)))
    with pytest.raises(
        ArgumentError, match=r"as its memory is planned for 20 tokens .*, got 64: use less, or open it with a larger context"
    ):
        model.generate([5, 6], max_new_tokens=64)
    with pytest.raises(ArgumentError, match="this model's memory is planned for 20 tokens, got 21: open it with a larger context"):
        model.logits(range(3, 24))
    assert len(model.generate([5, 6]).ids) <= 18


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"memory": "much"}, "GPU memory is a number of bytes above 0"),
        ({"memory": -5}, "GPU memory is a number of bytes above 0"),
        ({"device": {"expert": "cpu"}}, "a mapping of devices has experts: 'cpu'"),
        ({"device": {"cpu_experts": 3}}, "cpu_experts is 0 to 2, the layers of this model, got 3"),
        ({"memory": "1 GB", "context": 0}, "context is a number of at least 1, got 0"),
        ({"memory": "1 GB", "prefix_bytes": -1}, "prefix_bytes is a number of bytes, 0 for none, got -1"),
        ({"memory": "1 GB", "sequences": True}, "sequences is a number of at least 1, got True"),
        ({"context": 20}, "context bounds the KV cache of a model that is given GPU memory"),
        ({"memory": "1 GB", "draft": "other"}, "a draft model takes GPU memory that is not planned for"),
    ],
)
def test_mistakes(folder: Path, gpu: None, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match) as told:
        opened(folder, **settings)
    assert "\n" not in str(told.value)


def test_layers_of_a_model_without_experts(gpu: None, tmp_path: Path) -> None:
    """The first layers go to the CPU, one by one, with their KV cache; the text is the same."""
    folder = make_language_model(tmp_path / "float")
    config = hb.Config("q8_0", compute="float")
    expected = LanguageModel.open(folder, format=config).generate(TEXTS[0], max_new_tokens=12).ids
    whole = opened(folder, format=config, memory="10 GB").plan
    assert whole is not None
    for layers in (1, 2):
        memory = whole.sizes.on_gpu(Placement(0, layers))
        by_memory, by_count = (opened(folder, format=config, **how) for how in ({"memory": memory}, {"device": {"gpu_layers": 2 - layers}}))
        for model in (by_memory, by_count):
            assert model.plan is not None
            assert model.plan.placement == Placement(0, layers)
            assert model.generate(TEXTS[0], max_new_tokens=12).ids == expected


def test_a_model_without_experts(gpu: None, tmp_path: Path) -> None:
    folder = make_language_model(tmp_path / "float")
    with pytest.raises(ArgumentError, match="this model has no experts that could be on the CPU: leave cpu_experts out"):
        opened(folder, format="q8_0", device={"experts": "cpu"})


def test_without_a_gpu(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="are for a GPU, got device='cpu': leave them out"):
        opened(folder, memory="1 GB")


def test_more_memory_than_is_free(folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program uses the GPU."""
    monkeypatch.setattr(opening, "free_memory", lambda device: 5 * 10**8)
    with pytest.raises(ArgumentError, match=r"has 500\.0 MB of free memory, got memory='1 GB': give it less, or 'auto'"):
        opened(folder, memory="1 GB")
    plan = opened(folder, memory="auto").plan
    assert plan is not None
    assert plan.request.memory == 475 * 10**6, "the rest is for CUDA"
    monkeypatch.setattr(opening, "free_memory", lambda device: 10**8)
    with pytest.raises(ArgumentError, match="needs at least"):
        opened(folder, device={"experts": "cpu"})


def test_out_of_memory_while_it_is_opened(folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerSpec, "check", full)
    monkeypatch.setattr("halfbyte.language.device.free_memory", lambda device: 10**9)
    for memory, remedy in (("1 GB", "give it less memory"), (None, "give memory='auto', which leaves a part of it")):
        with pytest.raises(ArgumentError, match=rf"does not fit into the 1\.0 GB that is free on cpu: {remedy}"):
            LanguageModel.open(folder, memory=memory)


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")


def failing_after(monkeypatch: pytest.MonkeyPatch, calls: int, fail: Callable[..., object]) -> None:
    """Let the experts on the CPU fail in one call, after so many of them."""
    compute, count = HostExperts._compute, itertools.count()

    def computed(*arguments: Any) -> None:
        compute(*arguments)
        if next(count) == calls:
            fail()

    monkeypatch.setattr(HostExperts, "_compute", computed)


def test_a_prompt_is_read_at_once_where_experts_cross(folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all experts cross for each chunk; in chunks where others are decoded between these, or no experts cross."""
    monkeypatch.setattr("halfbyte.decoder.lower_gpu._FEW", 64)
    read, prefill = list[int](), GpuModel.prefill
    monkeypatch.setattr(GpuModel, "prefill", lambda model, ids, *a, **k: (read.append(len(ids)), prefill(model, ids, *a, **k))[1])
    for memory, chunks in ((None, [300]), ("1 GB", [64] * 4 + [44])):
        model = opened(folder, memory=memory, device={} if memory else {"experts": "cpu"}, sequences=2)
        assert model.plan is not None
        assert model.plan.streams == (memory is None)
        read.clear()
        model.generate(ids_of(300, 1), max_new_tokens=2)
        assert read == chunks
    batch = opened(folder, device={"experts": "cpu"}, sequences=2).batch(2)
    batch.submit(ids_of(20, 1), Sampling(max_new_tokens=30, ignore_eos=True))
    batch.step()
    read.clear()
    batch.submit(ids_of(100, 2), Sampling(max_new_tokens=2))
    while batch.running:
        batch.step()
    assert read == [64, 36]


def test_what_was_built_is_free_after_it_did_not_fit(folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the error is still known; another try has the memory."""
    built: list[weakref.ref[Tensor]] = []
    check = LayerSpec.check

    def checked(layer: LayerSpec) -> None:
        check(layer)
        built.extend(weakref.ref(tensor) for tensor in tensors_of(layer))

    def checked_till_full(layer: LayerSpec) -> None:
        checked(layer)
        if len(built) > 9:
            full()

    for check_layer, cast in ((checked_till_full, GpuModel._cast_norm), (checked, full)):
        with monkeypatch.context() as patch:
            patch.setattr(LayerSpec, "check", check_layer)
            patch.setattr(GpuModel, "_cast_norm", cast)
            with pytest.raises(ArgumentError, match="does not fit into the memory that is free on cpu: give it less memory") as told:
                opened(folder, memory="1 GB")
        assert told.value.__cause__ is told.value.__context__ is None
        gc.collect()
        assert built
        assert [one() for one in built] == [None] * len(built)
        built.clear()
    assert opened(folder, memory="1 GB").generate(TEXTS[0], max_new_tokens=2).ids


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_out_of_memory_while_it_runs(
    folder: Path, gpu: None, cached: Callable[[], int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt, in its second layer, and while tokens are decoded: no cache is left, and the model computes the same afterwards."""
    model = opened(folder, device={"experts": "cpu"})
    expected = model.generate(TEXTS[0], max_new_tokens=8).ids
    model._batch.free()
    with monkeypatch.context() as patch:
        failing_after(patch, calls, full)
        match = r"^cpu has no memory for 1 sequence, memory is free: use fewer tokens or sequences at a time, end other .* less memory$"
        with pytest.raises(ArgumentError, match=match) as told:
            model.generate(TEXTS[0], max_new_tokens=8)
    assert told.value.__context__ is None
    assert cached() == 0
    assert not model._batch.running
    assert model.generate(TEXTS[0], max_new_tokens=8).ids == expected
    assert isinstance(model._model, GpuModel)
    with monkeypatch.context() as patch:
        failing_after(patch, 1, full)
        with pytest.raises(ArgumentError, match="cpu has no memory for the logits of 9 tokens, memory is free"):
            model.logits(range(3, 12))
    assert torch.isfinite(model.logits(range(3, 12))).all()


@pytest.mark.parametrize(("error", "expected_error"), [(torch.OutOfMemoryError, ArgumentError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_prompt_that_ends_while_experts_cross(
    folder: Path,
    gpu: None,
    cached: Callable[[], int],
    error: type[BaseException],
    expected_error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first of two layers, with the second one's experts on their way."""
    model, prompt = opened(folder, device={"experts": "cpu"}), ids_of(90, 1)
    expected = model.generate(prompt, max_new_tokens=8).ids
    model._batch.free()

    def interrupted(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(StreamedExperts, "add", interrupted)
        with pytest.raises(expected_error):
            model.generate(prompt, max_new_tokens=8)
    assert cached() == 0
    assert model.generate(prompt, max_new_tokens=8).ids == expected


@pytest.mark.parametrize("calls", [1, 4, 9])
def test_out_of_memory_of_several_sequences(folder: Path, gpu: None, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(folder, device={"experts": "cpu"}, sequences=3)
    expected = [one.ids for one in model.generate(TEXTS, max_new_tokens=8)]
    with monkeypatch.context() as patch:
        failing_after(patch, calls, full)
        with pytest.raises(ArgumentError, match=r"cpu has no memory for [123] sequences?, memory is free"):
            model.generate(TEXTS, max_new_tokens=8)
    assert [one.ids for one in model.generate(TEXTS, max_new_tokens=8)] == expected


def test_another_error_is_not_one_of_memory(folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    model = opened(folder, device={"experts": "cpu"})
    failing_after(monkeypatch, 1, broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        model.generate(TEXTS[0])
    with pytest.raises(RuntimeError, match="does not fit"):
        fitting(failing_pinned, torch.device("cpu"), lambda free: RuntimeError("does not fit"))


def failing_pinned() -> None:
    raise RuntimeError("CUDA error: out of memory")  # of pinned memory


@contextmanager
def interruptible() -> Iterator[None]:
    """As in a shell's foreground: a process in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("calls", [0, 1, 4])
def test_ctrl_c_in_a_crossing(folder: Path, gpu: None, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal while the CPU computes experts: the call ends, no thread is left, and the next one computes the same."""
    model = opened(folder, device={"experts": "cpu"}, sequences=2)
    expected = model.generate(TEXTS[0], max_new_tokens=8).ids
    threads = threading.active_count()
    with monkeypatch.context() as patch, interruptible():
        failing_after(patch, calls, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            model.generate(TEXTS[0], max_new_tokens=8)
        failing_after(patch, calls, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            model.generate(TEXTS[:2], max_new_tokens=8)
    assert threading.active_count() == threads
    assert not model._batch.running
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.2, "a thread spins while nothing is computed"
    assert model.generate(TEXTS[0], max_new_tokens=8).ids == expected


def test_cores_that_another_program_takes(folder: Path, gpu: None) -> None:
    """Slower, but the same, with twice as many busy processes as cores."""
    model = opened(folder, device={"experts": "cpu"})
    expected = model.generate(TEXTS[0], max_new_tokens=8).ids
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert model.generate(TEXTS[0], max_new_tokens=8).ids == expected
    finally:
        for one in others:
            one.kill()
            one.wait()


def test_a_report(folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured, next to what was expected."""
    monkeypatch.setattr("halfbyte.decoder.offload.rates.rates_of", lambda device: Rates(5e10, 1e12, 2e10, 1e12, 1e14))
    model = opened(folder, device={"experts": "cpu"})
    assert "measured of" not in str(model.report())
    generation = model.generate(TEXTS[0], max_new_tokens=9)
    report = model.report()
    assert report.times.prompt_tokens == len(generation.prompt_ids)
    assert report.times.steps == len(generation.ids) - 1
    assert 0 < report.times.prompt_seconds <= generation.first_token - generation.started + 1e-3
    text = str(report)
    for said in ("on the CPU: the routed experts of layers 0-1", "CPU memory 50.0 GB/s", "a prompt of 512 tokens: ", " decode steps: "):
        assert said in text
    document = report.to_json()
    assert set(document) == {"measured", "plan", "expected", "in_floating_point"}
    assert report.expected is not None
    assert report.expected.streamed_seconds is not None
    assert LanguageModel.open(folder).report().to_json()["plan"] is None
    assert str(LanguageModel.open(folder).report()) == str(LanguageReport(Times())) == "nothing was generated yet"


@pytest.mark.parametrize("prefix_bytes", [0, 10**5])
@pytest.mark.parametrize("sequences", [1, 2])
def test_caches_that_live_at_the_same_time_are_planned(
    folder: Path, gpu: None, cached: Callable[[], int], sequences: int, prefix_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a plan are enough for slots, sequences that are read, and those that stay for prompts that begin like them."""
    monkeypatch.setattr("halfbyte.decoder.lower_gpu._FEW", 64)
    model = opened(folder, memory="1 GB", sequences=sequences, prefix_bytes=prefix_bytes, context=512)
    assert model.plan is not None
    assert (model.plan.gpu.prefix > 0) == (prefix_bytes > 0)
    batch, most = model.batch(sequences, prefix_bytes=prefix_bytes), 0
    prompts = [ids_of(count, seed) for seed, count in enumerate((300, 380, 310, 390, 20, 350))]
    while batch.running or prompts:
        if prompts:
            batch.submit(prompts.pop(), Sampling(max_new_tokens=5 + 6 * len(prompts), ignore_eos=True))
            batch.step()
        batch.step()
        most = max(most, cached())
    planned = model.plan.gpu.cache + model.plan.gpu.prefix
    assert planned / 2 < most <= planned


def ids_of(count: int, seed: int) -> list[int]:
    found: list[int] = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found
