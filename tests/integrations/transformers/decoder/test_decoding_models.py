"""One token through a whole model in one call on a CPU, of families that do more around their layers than Llama does, or other things: it
says what transformers' own model says."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from optimized_models import close, step_calls
from tiny_decoders import KINDS, from_kind, vary_
from transformers import DynamicCache

from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
from halfbyte.integrations.transformers.decoder.stack import compiled
from halfbyte.integrations.transformers.decoder.token_step import TokenStep
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_
from halfbyte.nn.modules.quantized import QuantEmbedding


def pair(kind: str, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[Any, Any]:
    """(as transformers computes it, in one call)"""
    torch.manual_seed(7)
    model = from_kind(kind).eval()
    vary_(model)
    quantize_(model.to(dtype), Config("q4_0", **{"compute": "float"} | how))
    return model, replace_forwards_(copy.deepcopy(fuse_(model)))


@functools.cache
def shared_pair(kind: str) -> tuple[Any, Any]:
    """For tests that change neither of the models."""
    return pair(kind)


# One for each way to compute cosines and sines: one table, a part of heads, two tables, heads of two sizes, none in some layers, with
# windows, and those that depend on how far a text reaches. The tables end after 64 positions.
ROPE_KINDS = ("gemma", "stablelm", "gemma3", "gemma4", "smollm3, windows, no positions first", "phi3, far texts", "ministral3")
# One for each step that a model has around its layers or between its parts: `generate` calls the model whose logits are compared above.
TEXT_KINDS = ("gemma2", "gemma4, inputs of layers' own", "granite", "cohere2", "dots1", "gpt_oss", "starcoder2", "phi3, far texts")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call with a cache, whether it was one call."""
    return step_calls(monkeypatch)


def said(model: Any, cache: Any, *, batch: int = 1, tokens: int = 12, mask: Tensor | None = None) -> Tensor:
    """The logits after a prompt of five tokens, and after each of those that follow."""
    ids = torch.randint(3, 99, (batch, 5 + tokens), generator=torch.Generator().manual_seed(1))
    found = []
    with torch.no_grad():
        for begin, end in ((0, 5), *((at, at + 1) for at in range(5, 5 + tokens))):
            seen = None if mask is None else mask[:, :end]
            found.append(model(ids[:, begin:end], attention_mask=seen, past_key_values=cache).logits[:, -1:])
    return torch.cat(found, 1)


@pytest.mark.parametrize("skip", [[], ["lm_head", "model.embed_tokens"]])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_logits(kind: str, skip: list[str], taken: list[bool]) -> None:
    """Of quantized embeddings and heads, tied ones too, and of others; for some kinds, so many tokens that buffers and tables end."""
    plain, short = pair(kind, skip=skip) if skip else shared_pair(kind)
    assert isinstance(short.model.embed_tokens, QuantEmbedding) == (not skip)
    tokens = 75 if kind in ROPE_KINDS and not skip else 12
    expected = said(plain, DynamicCache(config=plain.config), tokens=tokens)
    assert close(said(short, DynamicCache(config=plain.config), tokens=tokens), expected)
    assert taken == [False, *[True] * tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_several_sequences(kind: str, taken: list[bool]) -> None:
    plain, short = shared_pair(kind)
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[0, :3] = mask[2, :4] = 0
    found = [said(model, DynamicCache(config=model.config), batch=3, mask=mask) for model in (short, plain)]
    assert close(*found)
    assert taken == [False, *[True] * 12]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_the_same_text(kind: str) -> None:
    plain, short = shared_pair(kind)
    ids = torch.randint(3, 99, (1, 5), generator=torch.Generator().manual_seed(2))
    how = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    actual, expected = (model.generate(ids, **how) for model in (short, plain))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_8_bits(kind: str, taken: list[bool]) -> None:
    plain, short = shared_pair(kind)
    actual, expected = (said(model, Int8Cache(plain.config)) for model in (short, plain))
    # The codes of a key that differs in its last bits may differ by one where it is just between two: 1/127 of the largest of 32.
    assert float((actual - expected).norm()) <= 1e-2 * float(expected.norm())
    assert taken == [False, *[True] * 12]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma4, inputs of layers' own", "granite", "olmo3"])
def test_half_precision(kind: str, taken: list[bool]) -> None:
    """What transformers rounds to bfloat16 between its steps, this does not: it is nearer to the same model in float32."""
    plain, short = pair(kind, torch.bfloat16)
    found = [said(model, DynamicCache(config=model.config)).float() for model in (short, plain)]
    exact = said(plain.float(), DynamicCache(config=plain.config))
    errors = [float((y - exact).norm()) for y in found]
    assert found[0].shape == found[1].shape
    assert errors[0] <= errors[1]
    assert taken == [False, *[True] * 12]


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the factor of embeddings": ("granite", lambda model: setattr(model.model, "embedding_multiplier", 2.0)),
    "what logits are divided by": ("granite", lambda model: setattr(model.config, "logits_scaling", 0.25)),
    "the cap of logits": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 0.75)),
    "a cap of logits": ("gemma2 without caps", lambda model: setattr(model.config, "final_logit_softcapping", 0.75)),
    "the embedding's own factor": (
        "gemma3",
        lambda model: setattr(model.model.embed_tokens, "embed_scale", torch.tensor(1.5)),
    ),
    "the embedding's own factor, in place": ("gemma", lambda model: model.model.embed_tokens.embed_scale.mul_(0.25)),
    "positions of a type of layers": ("gemma3", lambda model: model.model.rotary_emb.sliding_attention_inv_freq.mul_(0.5)),
    "how far positions reach": ("olmo3", lambda model: setattr(model.model.rotary_emb, "full_attention_attention_scaling", 1.5)),
    "the factor of a layer": ("gemma4", lambda model: model.model.layers[1].layer_scalar.mul_(0.25)),
    "the factor of the table of layers' inputs": (
        "gemma4, inputs of layers' own",
        lambda model: model.model.embed_tokens_per_layer.embed_scale.mul_(0.25),
    ),
    "the factor of what is projected to layers' inputs": (
        "gemma4, inputs of layers' own",
        lambda model: setattr(model.model, "per_layer_model_projection_scale", 1e-4),  # beside the norm's eps
    ),
    "the factor of layers' inputs": ("gemma4, inputs of layers' own", lambda model: setattr(model.model, "per_layer_input_scale", 1e-4)),
    "the norm of layers' inputs": (
        "gemma4, inputs of layers' own",
        lambda model: model.model.per_layer_projection_norm.weight.data.mul_(3),
    ),
    "the last eps": ("gemma", lambda model: setattr(model.model.norm, "eps", 0.5)),
    "the last norm": ("gemma2", lambda model: model.model.norm.weight.data.mul_(3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_tokens(name: str, taken: list[bool]) -> None:
    kind, change = CHANGES[name]
    models = pair(kind)
    before = said(models[1], DynamicCache(config=models[1].config))
    for model in models:
        change(model)
    taken.clear()
    plain, short = (said(model, DynamicCache(config=model.config)) for model in models)
    assert close(short, plain)
    assert not close(short, before)
    assert taken == [False, *[True] * 12]


def test_the_furthest_sequence_decides_on_the_positions_of_all(taken: list[bool]) -> None:
    """Those of longrope."""
    plain, short = pair("phi3, far texts")
    prompts = torch.randint(3, 99, (2, 5), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (short, plain):
        cache, rows = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(prompts, past_key_values=cache)
            for near, far in ((66, 69), (67, 70), (68, 140), (3, 69), (69, 3)):
                where = torch.tensor([[near], [far]])
                rows.append(model(prompts[:, :1], position_ids=where, past_key_values=cache).logits)
        found.append(torch.cat(rows))
    assert close(*found)
    assert taken == [False, *[True] * 5]


def test_queries_with_a_factor_are_left(taken: list[bool]) -> None:
    """Those that are far, of any of the sequences."""
    plain, short = pair("ministral3")
    prompts = torch.randint(3, 99, (2, 5), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (short, plain):
        cache, rows = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(prompts, past_key_values=cache)
            for near, far in ((5, 99), (6, 100), (101, 7), (8, 9)):
                rows.append(model(prompts[:, :1], position_ids=torch.tensor([[near], [far]]), past_key_values=cache).logits)
        found.append(torch.cat(rows))
    assert close(*found)
    assert taken == [False, True, False, False, True]


def _has_step(model: Any) -> bool:
    found = compiled(model.model)
    assert not isinstance(found, str)
    return isinstance(found.lowered(None, None, on_cpu=True), TokenStep)


def test_what_goes_the_long_way(taken: list[bool]) -> None:
    """Scores have a cap, which torch's attention leaves out; positions depend on how long the text is."""
    for kind in ("gemma2", "phi3", "gemma3"):
        plain, short = pair(kind)
        assert _has_step(short)
        for model in (plain, short):
            rotary = model.model.rotary_emb
            if kind == "gemma2":
                model.config._attn_implementation = "sdpa"  # which would raise an error
            elif kind == "gemma3":
                rotary.rope_type = {**rotary.rope_type, "sliding_attention": "dynamic"}
                rotary.sliding_attention_max_seq_len_cached = 64
            else:
                rotary.rope_type = "dynamic"
        assert not _has_step(short)
        if kind != "gemma2":
            assert close(*(said(model, DynamicCache(config=model.config), tokens=2) for model in (short, plain)))
    assert not any(taken)
