"""A replaced forward takes a call only if it understands each of its arguments."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from language_model import make_decoder
from optimized_models import native_calls, step_calls
from torch import nn
from transformers import BertConfig, BertModel, DynamicCache

import halfbyte as hb
from halfbyte.decoder.families import FAMILIES
from halfbyte.decoder.families.encoders import EMBEDDING_LAYERS, ENCODER_STACKS, ENCODERS
from halfbyte.integrations.transformers.decoder import stack
from halfbyte.integrations.transformers.decoder.live_layer import LAYER_ARGUMENTS
from halfbyte.integrations.transformers.encoder import embedding, encoder_stack, encoding
from halfbyte.integrations.transformers.generate import steps
from halfbyte.integrations.transformers.generate.generating import generate_fast
from halfbyte.integrations.transformers.optimize.calls import (
    CACHE,
    KV_CACHE,
    OLD_CACHE,
    any_value,
    bind,
    cache_name,
    is_true,
    parameters_of,
    unset,
    why_unknown,
)
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward

KNOWN = {"x": any_value, CACHE: any_value, "mask": any_value, "output_attentions": unset, "is_causal": is_true}
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2}
IDS = torch.arange(3, 9)[None]


@pytest.fixture
def llama() -> Any:
    torch.manual_seed(0)
    return hb.quantize_(make_decoder("Llama", **SMALL, num_key_value_heads=1).eval(), "q4_0")


def test_arguments_are_bound_by_name() -> None:
    names = ("x", "mask", CACHE)
    assert bind(names, (1, 2), {}, KNOWN) == {"x": 1, "mask": 2}
    assert bind(names, (1,), {"mask": None, "anything": None}, KNOWN) == {"x": 1}, "None asks for nothing, whatever its name"
    assert bind(names, (1, 2, 3), {}, KNOWN) == {"x": 1, "mask": 2, CACHE: 3}
    assert bind(names, (1, 2, 3, 4), {}, KNOWN) is None, "more than there are"
    assert bind(names, (1,), {"x": 2}, KNOWN) is None, "one is given twice"
    assert bind(names, (1,), {"anything": False}, KNOWN) is None


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [("output_attentions", False, True), ("output_attentions", True, False), ("is_causal", True, True), ("is_causal", False, False)],
)
def test_values_that_are_understood(name: str, value: bool, known: bool) -> None:
    assert (bind(("x",), (), {name: value}, KNOWN) is not None) == known


def test_both_names_of_the_cache() -> None:
    for name in (CACHE, OLD_CACHE):
        assert bind(("x", CACHE), (), {name: 1}, KNOWN) == {CACHE: 1}
    assert bind(("x", OLD_CACHE), (), {OLD_CACHE: 1}, KNOWN) == {CACHE: 1}
    assert bind(("x", OLD_CACHE), (), {CACHE: 1}, KNOWN) is None, "in older versions `cache` is another one, of pages"
    assert bind(("x", CACHE), (), {CACHE: 1, OLD_CACHE: 1}, KNOWN) is None
    assert cache_name({OLD_CACHE: 1}) == OLD_CACHE
    assert cache_name({CACHE: 1}) == CACHE
    assert cache_name({}) == KV_CACHE


def test_the_installed_version_names_its_cache() -> None:
    assert KV_CACHE in parameters_of(transformers.LlamaForCausalLM.forward)


TABLES = {
    "layers": ([f"{name}.modeling_{name}.{family.layer_class}" for name, family in FAMILIES.items()], LAYER_ARGUMENTS),
    "models": (
        [f"{name}.modeling_{name}.{family.model_class}" for name, family in FAMILIES.items() if family.model_class],
        steps.ARGUMENTS,
    ),
    "encoder layers": ([*ENCODERS], encoding.LAYER_ARGUMENTS),
    "embeddings": ([*EMBEDDING_LAYERS], embedding.ARGUMENTS),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_class_of_the_tables_has_a_known_signature(table: str) -> None:
    """With the installed version of transformers."""
    names, known = TABLES[table]
    found = 0
    for name in names:
        module, _, cls = name.rpartition(".")
        try:
            kind = getattr(__import__(f"transformers.models.{module}", fromlist=[cls]), cls)
        except (ImportError, AttributeError):
            continue  # a version that does not have it
        assert why_unknown(kind, known) is None, name
        found += 1
    assert found > len(names) // 2


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stack_has_a_known_signature_and_output(name: str) -> None:
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    found = []
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__:
            names = inspect.unwrap(kind.forward).__code__.co_names
            if {"layers", "embed_tokens", "rotary_emb"} <= {*names}:
                found.append(kind)
    assert len(found) == 1
    assert why_unknown(found[0], stack.ARGUMENTS) is None
    assert stack.why_unknown_output(found[0]) is None


@pytest.mark.parametrize("name", ENCODER_STACKS)
def test_every_encoder_stack_has_a_known_signature_and_output(name: str) -> None:
    module, _, cls = name.rpartition(".")
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), cls)
    assert why_unknown(kind, encoder_stack.KINDS[ENCODER_STACKS[name].stack].arguments) is None
    assert stack.why_unknown_output(kind) is None


def test_a_replaced_forward_tells_the_signature_of_the_original(llama: Any) -> None:
    """transformers and peft look there for what a model takes."""
    names = parameters_of(type(llama.model).forward)
    replace_forwards_(hb.fuse_(llama))
    assert isinstance(llama.model, ReplacedForward)
    assert parameters_of(llama.model.forward) == names


@pytest.mark.parametrize("name", [CACHE, OLD_CACHE])
def test_a_stack_takes_the_cache_by_both_names(llama: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in (KV_CACHE, OLD_CACHE):
        pytest.skip("the installed version has no such argument")
    replace_forwards_(hb.fuse_(llama))
    calls, cache = native_calls(monkeypatch), DynamicCache(config=llama.config)
    with torch.no_grad():
        llama.model(IDS, use_cache=True, **{name: cache})
    assert [layers for *_, layers in calls] == [2]
    assert cache.get_seq_length() == IDS.shape[1]


def unknown_layer_argument(model: Any) -> Any:
    return model(IDS, cu_seq_lens_q=torch.tensor([0, 3, 6])).logits


def not_causal(model: Any) -> Any:
    return model(IDS, is_causal=False).logits


@pytest.mark.parametrize("call", [unknown_layer_argument, not_causal])
def test_what_is_not_understood_goes_to_the_original(llama: Any, call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hb.fuse_(llama)
    with torch.no_grad():
        expected = call(llama)
        replace_forwards_(llama)
        calls = native_calls(monkeypatch)
        assert torch.equal(call(llama), expected)
        assert not calls
        llama(IDS)
        assert [layers for *_, layers in calls] == [2]


def test_a_token_with_an_argument_that_is_not_understood(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_forwards_(hb.fuse_(llama))
    calls = step_calls(monkeypatch)
    with torch.no_grad():
        past = llama(IDS, use_cache=True)[KV_CACHE]
        llama(IDS[:, :1], use_cache=True, **{KV_CACHE: past})
        assert calls == [False, True]
        for settings in (
            {"output_hidden_states": True},
            {"logits_to_keep": torch.tensor([0])},
            {"inputs_embeds": torch.zeros(1, 1, 64), "input_ids": None},
        ):
            llama(**{"input_ids": IDS[:, :1], **settings}, use_cache=True, **{KV_CACHE: past})
    assert calls[2:] == [True, False], "the logits that are kept are no matter of the stack, hidden states are asked for before"


def changed_forward(self: Any, hidden_states: Any, attention_mask: Any = None, tilt: Any = None, **kwargs: Any) -> Any:
    """As a later version might have it."""
    return hidden_states


def test_a_signature_that_is_not_known_is_not_replaced(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hb.fuse_(llama)
    monkeypatch.setattr(type(llama.model.layers[0]), "forward", changed_forward)
    replace_forwards_(llama)
    assert not stack.is_compiled_stack(llama.model)
    assert any("its forward takes tilt, which this version of halfbyte does not know" in note for note in hb.report(llama).notes)


def test_an_encoder_whose_signature_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hb.fuse_(hb.quantize_(BertModel(BertConfig(vocab_size=40, **SMALL)).eval(), "q4_0"))
    monkeypatch.setattr(type(model.encoder), "forward", changed_forward)
    replace_forwards_(model)
    assert not any(isinstance(module, ReplacedForward) for module in model.encoder.modules())  # type: ignore[union-attr]
    assert any("its forward takes tilt" in note for note in hb.report(model).notes)


def test_private_methods_of_generate_that_changed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.GenerationMixin, "_prefill", lambda self, input_ids, everything: None)
    generate_fast(llama)
    assert not isinstance(llama, ReplacedForward)
    assert any("other parameters of _prefill" in note for note in hb.report(llama).notes)


def test_a_class_with_a_loop_of_its_own(llama: Any) -> None:
    class Subclass(type(llama)):  # type: ignore[misc]
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    llama.__class__ = Subclass
    generate_fast(llama)
    assert not isinstance(llama, ReplacedForward)


def test_an_attention_argument_that_is_not_understood() -> None:
    """Sinks, which torch's attention refuses or ignores as it does without halfbyte."""
    from halfbyte.integrations.transformers import attention

    module = nn.Module()
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
    module.num_key_value_groups = 2  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    plain, _ = attention.sdpa_attention_forward(module, q, k, k, None)
    found, _ = attention.attention(module, q, k, k, None, s_aux=torch.zeros(4))
    assert torch.equal(found, plain)
