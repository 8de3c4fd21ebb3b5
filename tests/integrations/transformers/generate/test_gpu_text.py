"""`generate` of a live model by `GpuModel`: the tokens are transformers' own. A CPU stands in for a GPU, and graphs are imitated."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_generating import ASKED, Heard, prompt
from tiny_decoders import CASES, vary_
from torch import Tensor
from transformers import DynamicCache

import halfbyte as hb
from halfbyte.decoder import gpu_step
from halfbyte.decoder.cache import Cache
from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.decoder import gpu_run, stack
from halfbyte.integrations.transformers.generate import generating
from halfbyte.integrations.transformers.generate.gpu_text import GpuText
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.fused import fuse_

# What `GpuModel` does not compute as transformers does: soft caps, which transformers' sdpa leaves out, frequencies that depend on the
# length of the text, queries with a factor that depends on the position, and models with more than a stack and a head.
LEFT = {
    *("Gemma2DecoderLayer", "VaultGemmaDecoderLayer", "Phi3DecoderLayer, longrope", "Ministral3DecoderLayer", "Glm4vMoeTextDecoderLayer"),
    *("Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3VLMoeTextDecoderLayer", "Qwen3VLTextDecoderLayer"),
}


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
    plain, model = models(kind)
    asked = {**prompt(9), **SETTINGS}
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert len(texts) == (kind not in LEFT)
    assert Replayed.open == 0


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    return models("LlamaDecoderLayer")


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_whatever_is_asked_for(asked: dict[str, Any], llama: tuple[Any, Any], texts: list[bool]) -> None:
    plain, model = llama
    found, heard = [], []
    for one in (plain, model):
        torch.manual_seed(5)
        several = "num_return_sequences" in asked
        streamer = None if several else Heard()
        found.append(one.generate(**prompt(9), **{"max_new_tokens": 25, **asked}, streamer=streamer))
        heard.append(streamer and streamer.pieces)
    assert torch.equal(*found)
    assert heard[0] == heard[1]
    assert len(texts) == ("cache_implementation" not in asked and not several)
    assert Replayed.open == 0


def test_texts_longer_than_windows(texts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of windows are moved, those of full attention replaced, tables of rope become longer, and steps are captured again."""
    monkeypatch.setattr("halfbyte.decoder.lower_gpu._LEAST_POSITIONS", 16)
    monkeypatch.setattr("halfbyte.decoder.cache._STEP_ON_GPU", 16)
    monkeypatch.setattr("halfbyte.decoder.cache._STEP", 16)
    plain, model = models("Gemma3DecoderLayer")
    asked = {**prompt(30), **SETTINGS, "max_new_tokens": 60}
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
    assert len(texts) == 1


def test_calls_of_another_kind(llama: tuple[Any, Any], texts: list[bool]) -> None:
    """Padding, several sequences, positions of the caller, and caches that somebody sees take the other steps."""
    plain, model = llama
    ids, later = prompt(9)["input_ids"], torch.arange(5, 14)[None]
    padded = {"input_ids": ids, "attention_mask": (later > 6).long()}
    returned = {"input_ids": ids, "return_dict_in_generate": True}
    cases: list[dict[str, Any]] = [
        prompt(9, 5),
        padded,
        {"input_ids": ids, "position_ids": later},
        returned,
        {"input_ids": ids, "num_beams": 2},
    ]
    for asked in cases:
        found, expected = (one.generate(**asked, **SETTINGS) for one in (model, plain))
        assert torch.equal(found.sequences if asked is returned else found, expected.sequences if asked is returned else expected)
    cache = DynamicCache(config=model.config)
    model.generate(ids, past_key_values=cache, **SETTINGS)
    assert cache.get_seq_length() == 20
    assert not texts


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


def test_a_layer_that_changes_while_the_prompt_is_read(texts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen before its launches, and the prompt is read again."""
    plain, model = models("LlamaDecoderLayer")
    asked, seen = {**prompt(9), **SETTINGS}, []
    check = stack._changed

    def changing(one: Any, index: int) -> Any:
        if not seen:
            seen.append(index)
            for other in (plain, model):
                other.model.layers[1].mlp.down_proj = other.model.layers[0].mlp.down_proj
        return check(one, index)

    monkeypatch.setattr(stack, "_changed", changing)
    found = model.generate(**asked)
    assert seen
    assert torch.equal(found, plain.generate(**asked))
    assert len(texts) == 1


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
