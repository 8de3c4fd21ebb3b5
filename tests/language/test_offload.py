"""`LanguageModel.open` with a part of the model on the CPU. There is no GPU here: the other part is on the CPU, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from language_model import make_language_model, make_mixture

import halfbyte as hb
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.offload.placement import Placement
from halfbyte.decoder.spec import LayerSpec
from halfbyte.errors import ArgumentError
from halfbyte.language import model as opening
from halfbyte.language.model import LanguageModel
from halfbyte.memory import size_text

TEXTS = ["the quick brown fox", "an old oak", "red hen sleeps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("model") / "mixture")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_gpu", lambda name: torch.device("cpu"))


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
    assert len(model.generate([5, 6]).ids) <= 18


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"memory": "much"}, "GPU memory is a number of bytes above 0"),
        ({"memory": -5}, "GPU memory is a number of bytes above 0"),
        ({"device": {"expert": "cpu"}}, "a mapping of devices has experts: 'cpu'"),
        ({"device": {"cpu_experts": 3}}, "cpu_experts is 0 to 2, the layers of this model, got 3"),
        ({"memory": "1 GB", "context": 0}, "context is a number of at least 1, got 0"),
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
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")

    monkeypatch.setattr(LayerSpec, "check", full)
    monkeypatch.setattr("halfbyte.language.device.free_memory", lambda device: 10**9)
    for memory, remedy in (("1 GB", "give it less memory"), (None, "give memory='auto', which leaves a part of it")):
        with pytest.raises(ArgumentError, match=rf"does not fit into the 1\.0 GB that is free on cpu: {remedy}"):
            LanguageModel.open(folder, memory=memory)
