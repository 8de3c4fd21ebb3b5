"""`generate` of a live model by `GpuModel`: the tokens are transformers' own. A CPU stands in for a GPU, and graphs are imitated."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_generating import ASKED, Heard, prompt
from tiny_decoders import CASES, vary_
from torch import Tensor
from transformers import DynamicCache, StaticCache

import halfbyte as hb
from halfbyte.decoder import gpu_step
from halfbyte.decoder.cache import Cache
from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.decoder import gpu_run, stack
from halfbyte.integrations.transformers.generate import generating
from halfbyte.integrations.transformers.generate.gpu_text import GpuText
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.fused import fuse_


class Replayed:
    """A graph that runs its launches again."""

    open = 0

    def __init__(self, device: torch.device) -> None:
        Replayed.open += 1

    def capture(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        self.run = run
        cell = next(c.cell_contents for c in run.__closure__ or () if isinstance(c.cell_contents, gpu_step.DecodeStep))
        before, random = cell._state.clone(), torch.get_rng_state()
        self.found = run()
        cell._state.copy_(before)
        torch.set_rng_state(random)
        return self.found

    def replay(self) -> None:
        for place, new in zip(self.found, self.run(), strict=True):
            place.copy_(new)

    def host(self, function: Callable[[], None]) -> None:
        """What the host does between launches."""
        function()

    def close(self) -> None:
        Replayed.open -= 1


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Those that `GpuModel` has written."""
    found: list[bool] = []
    begin = GpuText.__init__

    def counted(self: Any, *args: Any) -> None:
        begin(self, *args)
        found.append(True)

    monkeypatch.setattr(GpuText, "__init__", counted)
    monkeypatch.setattr(gpu_run, "DEVICES", ("cpu",))
    monkeypatch.setattr(generating, "_on_gpu", lambda device: True)
    monkeypatch.setattr(gpu_step, "can_capture", lambda device: True)
    monkeypatch.setattr(gpu_step, "CapturedGraph", Replayed)
    monkeypatch.setattr(generating, "_has_steps", lambda *_: False)  # others are transformers' own
    monkeypatch.setattr(Replayed, "open", 0)
    return found


def models(kind: str) -> tuple[Any, Any]:
    """(transformers' own, optimized)"""
    torch.manual_seed(5)
    model = CASES[kind]().eval()
    vary_(model)
    fuse_(hb.quantize_(model, hb.Config("q8_0", compute="float")))
    return model, replace_forwards_(copy.deepcopy(model))


SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}


@pytest.mark.parametrize("kind", CASES)
def test_tokens_are_transformers_own(kind: str, texts: list[bool]) -> None:
    """Of one prompt, and of several with padding on the left."""
    plain, model = models(kind)
    for lengths in ((9,), (9, 5, 1)):
        asked = {**prompt(*lengths), **SETTINGS}
        assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert len(texts) == 2
    assert Replayed.open == 0


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    return models("LlamaDecoderLayer")


@pytest.mark.parametrize("lengths", [(9,), (9, 5, 1)])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_whatever_is_asked_for(asked: dict[str, Any], lengths: tuple[int, ...], llama: tuple[Any, Any], texts: list[bool]) -> None:
    plain, model = llama
    found, heard = [], []
    for one in (plain, model):
        torch.manual_seed(5)
        streamer = None if "num_return_sequences" in asked or len(lengths) > 1 else Heard()
        found.append(one.generate(**prompt(*lengths), **{"max_new_tokens": 25, **asked}, streamer=streamer))
        heard.append(streamer and streamer.pieces)
    assert torch.equal(*found)
    assert heard[0] == heard[1]
    assert len(texts) == 1
    assert Replayed.open == 0


@pytest.mark.parametrize("lengths", [(30,), (5, 30, 13)])
@pytest.mark.parametrize("kind", ["Gemma3DecoderLayer", "Gemma4TextDecoderLayer, shared keys"])
def test_texts_longer_than_windows(kind: str, lengths: tuple[int, ...], texts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of windows are moved, those of full attention replaced, tables of rope become longer, and steps are captured again."""
    monkeypatch.setattr("halfbyte.decoder.rope._LEAST_POSITIONS", 16)
    monkeypatch.setattr("halfbyte.decoder.cache._GROWTH_ON_GPU", 16)
    monkeypatch.setattr("halfbyte.decoder.cache._GROWTH", 16)
    plain, model = models(kind)
    asked = {**prompt(*lengths), **SETTINGS, "max_new_tokens": 60}
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert len(texts) == 1


def test_a_text_beyond_what_is_known(texts: list[bool]) -> None:
    """Where frequencies of rope change within the text, or queries get a factor, it is transformers' own; behind, or before, it is not."""
    for kind, cases in (
        ("Phi3DecoderLayer, longrope", [((9,), 40, 1), ((80,), 12, 1), ((60,), 20, 0), ((80, 75), 12, 1), ((80, 50), 12, 0)]),
        ("Ministral3DecoderLayer", [((80,), 20, 1), ((80,), 21, 0)]),
    ):
        plain, model = models(kind)
        for lengths, count, by_model in cases:
            texts.clear()
            asked = {**prompt(*lengths), **SETTINGS, "max_new_tokens": count}
            assert torch.equal(model.generate(**asked), plain.generate(**asked))
            assert len(texts) == by_model, (kind, lengths)


def test_calls_of_another_kind(llama: tuple[Any, Any], texts: list[bool]) -> None:
    """Positions of the caller; padding elsewhere than on the left, and beams, which take the steps of transformers."""
    plain, model = llama
    ids, later = prompt(9)["input_ids"], torch.arange(5, 14)[None]
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {"input_ids": ids, "attention_mask": (later > 6).long()}),
        (1, {"input_ids": ids, "position_ids": later}),
        (1, {"inputs_embeds": model.get_input_embeddings()(ids), "input_ids": ids}),
        (0, {"input_ids": ids, "attention_mask": (later != 7).long()}),
        (0, {"input_ids": ids, "num_beams": 2}),
    ]
    for by_model, asked in cases:
        texts.clear()
        assert torch.equal(model.generate(**asked, **SETTINGS), plain.generate(**asked, **SETTINGS))
        assert len(texts) == by_model * ("inputs_embeds" not in asked), asked.keys()


CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda model: DynamicCache(config=model.config),
    "growing, without windows": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
    "8 bits": lambda model: hb.Int8Cache(model.config),
}


@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Gemma4TextDecoderLayer, shared keys"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths", [(9,), (9, 5, 1)])
def test_caches_that_are_seen(kind: str, cache: str, lengths: tuple[int, ...], texts: list[bool]) -> None:
    """They have all tokens but the last one in the end, and calls go on with them: texts and the next logits are transformers' own."""
    plain, model = models(kind)
    found = []
    for one in (plain, model):
        asked, past = prompt(*lengths), CACHES[cache](one)
        for _ in range(3):
            ids = one.generate(**asked, past_key_values=past, **SETTINGS)
            assert int(past.get_seq_length()) == ids.shape[1] - 1
            ids = torch.cat((ids, ids[:, :3]), 1)
            more = ids.shape[1] - asked["input_ids"].shape[1]
            asked = {"input_ids": ids, "attention_mask": torch.nn.functional.pad(asked["attention_mask"], (0, more), value=1)}
        found.append(ids)
    assert len(texts) == 3
    assert torch.equal(*found)


def test_a_static_cache_that_is_too_small(llama: tuple[Any, Any], texts: list[bool]) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        llama[1].generate(**prompt(9), past_key_values=StaticCache(config=llama[1].config, max_cache_len=12), **SETTINGS)
    assert not texts


def test_a_cache_that_is_returned(llama: tuple[Any, Any], texts: list[bool]) -> None:
    plain, model = llama
    found, expected = (one.generate(**prompt(9, 3), **SETTINGS, return_dict_in_generate=True) for one in (model, plain))
    assert torch.equal(found.sequences, expected.sequences)
    assert len(texts) == 1
    for layer, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        seen = prompt(9, 3)["attention_mask"][:, None, :, None]
        for states, others in ((layer.keys, other.keys), (layer.values, other.values)):
            assert float(((states - others)[:, :, :9] * seen).abs().max()) < 1e-4
            assert float((states - others)[:, :, 9:].abs().max()) < 1e-4


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4"])
def test_stacks_within_models_of_images(kind: str, texts: list[bool]) -> None:
    """Their logits have soft caps where those of the text model have them."""
    text = CASES["Gemma3DecoderLayer" if kind == "Gemma3" else "Gemma4TextDecoderLayer"]().config
    torch.manual_seed(5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = getattr(transformers, f"{kind}Config")(text_config=text.to_dict(), vision_config=sizes)
    plain = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    vary_(plain.model.language_model)
    fuse_(hb.quantize_(plain, hb.Config("q8_0", compute="float", skip=["*vision*"])))
    model = replace_forwards_(copy.deepcopy(plain))
    for lengths in ((9,), (9, 5)):
        asked = {**prompt(*lengths), **SETTINGS, "return_dict_in_generate": True}
        for how in ({}, {"do_sample": True, "temperature": 3.0}):
            found = []
            for one in (plain, model):
                torch.manual_seed(7)
                found.append(one.generate(**{**asked, **how}).sequences)
            assert torch.equal(*found)
    assert len(texts) == 4


@pytest.mark.parametrize("kind", ["Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer"])
def test_images(kind: str, texts: list[bool]) -> None:
    """Positions after an image are others than indices."""
    plain, model = models(kind)
    config = model.config
    patch, merge = config.vision_config.patch_size, config.vision_config.spatial_merge_size
    tokens = 2 * 3  # of an image of 2 * 3 merged patches
    ids = torch.cat((prompt(5)["input_ids"], torch.full((1, tokens), 98), prompt(4)["input_ids"]), 1)
    for one in (plain, model):
        one.config.image_token_id = one.model.config.image_token_id = 98
    grid = torch.tensor([[1, 2 * merge, 3 * merge]])
    pixels = torch.randn(int(grid.prod()), 3 * config.vision_config.temporal_patch_size * patch**2)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "image_grid_thw": grid}
    asked["mm_token_type_ids"] = (ids == 98).int()
    assert torch.equal(model.generate(**asked, **SETTINGS), plain.generate(**asked, **SETTINGS))
    assert len(texts) == 1


def test_a_model_that_changes(texts: list[bool]) -> None:
    plain, model = models("LlamaDecoderLayer")
    asked = {**prompt(9), **SETTINGS}
    before = model.generate(**asked)
    for one in (plain, model):
        one.model.layers[1].mlp.down_proj = one.model.layers[0].mlp.down_proj
    found = model.generate(**asked)
    assert torch.equal(found, plain.generate(**asked))
    assert not torch.equal(found, before)
    assert len(texts) == 2
    torch.manual_seed(1)
    head = hb.quantize_(torch.nn.Sequential(torch.nn.Linear(model.config.hidden_size, 99, bias=False)), hb.Config("q8_0", compute="float"))[
        0
    ]
    plain.lm_head = model.lm_head = head
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert len(texts) == 3
    for one in (plain, model):
        one.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert len(texts) == 3


def test_what_the_report_says(llama: tuple[Any, Any]) -> None:
    assert "`generate` decodes all layers in one CUDA graph; beams" in str(hb.report(llama[1]))
    model = models("LlamaDecoderLayer")[1]
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
    assert "where it can, as transformers computes some of its layers" in str(hb.report(model))
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "where it can, as its head is no linear layer by itself" in str(hb.report(model))


def test_another_thread_is_at_work(llama: tuple[Any, Any], texts: list[bool]) -> None:
    plain, model = llama
    asked = {**prompt(9), **SETTINGS}
    lock = stack.compiled(model.model).gpu_lock  # type: ignore[union-attr]
    with lock:
        assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert not texts
    model.generate(**asked)
    assert len(texts) == 1
    assert not lock.locked()


def test_tokens_out_of_range(llama: tuple[Any, Any], texts: list[bool]) -> None:
    model = llama[1]
    with pytest.raises(ArgumentError, match="token ids lie in 0 … 98, got 5 … 99"):
        model.generate(torch.tensor([[5, 99]]), **SETTINGS)
    assert model.generate(torch.tensor([[5, 98]]), **SETTINGS).shape == (1, 14)
    assert len(texts) == 1


def test_nothing_is_kept(llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a cache is free at once, not when garbage is collected."""
    caches: list[weakref.ref[Cache]] = []
    begin = GpuText.__init__

    def seen(self: Any, *args: Any) -> None:
        begin(self, *args)
        caches.append(weakref.ref(self._cache))

    monkeypatch.setattr(GpuText, "__init__", seen)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            llama[1].generate(**prompt(9), **SETTINGS)
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()
