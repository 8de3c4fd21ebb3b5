"""Whole sequences through encoder layers in one call say what transformers' own layers say."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers as tf
from tiny_encoders import CASES, SIZES, inputs, make_encoder, states

import halfbyte as hb
from halfbyte.cli import main
from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.encoder import embedding, encoder_stack
from halfbyte.integrations.transformers.optimize.calls import parameters_of
from halfbyte.integrations.transformers.optimize.explain_model import explain_model
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_
from halfbyte.nn.report import remarks


def pair(kind: str = "bert", *, optimized: bool = True, fused: bool = True, **more: Any) -> tuple[Any, Any]:
    """(as transformers computes it, in one call)"""
    torch.manual_seed(7)
    model = make_encoder(kind, **more)
    model.set_attn_implementation("sdpa")
    quantize_(model, Config("q8_0", compute="float", skip=["*embeddings*"] if kind != "whisper" else ["conv*"]))
    if fused:
        fuse_(model)
    short = copy.deepcopy(model)
    return model, replace_forwards_(short) if optimized else short


def close(found: Tensor, expected: Tensor) -> bool:
    """Up to the order of sums in float32 in three layers of some hundred products each, which the norms between them may enlarge."""
    return found.shape == expected.shape and float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call computed."""
    found: list[int] = []
    run = encoder_stack.run_layers

    def counting(layers: Any, *args: Any) -> Any:
        found.append(len(layers))
        return run(layers, *args)

    monkeypatch.setattr(encoder_stack, "run_layers", counting)
    return found


@pytest.mark.parametrize("kind", CASES)
def test_the_same_states(kind: str, calls: list[int]) -> None:
    plain, short = pair(kind)
    for lengths in ((1,), (9, 4, 1), (5, 5)):
        given = inputs(plain, *lengths)
        assert close(states(short, given), states(plain, given))
    assert calls == [3, 3, 3]
    assert any("3 of 3 layers take native calls" in text for text in remarks(short))


def test_long_sequences(calls: list[int]) -> None:
    plain, short = pair("whisper", max_source_positions=601)
    given = inputs(plain, 1)
    assert close(states(short, given), states(plain, given))
    assert calls == [3]
    short.half().layers[2].fc2.bias.data.fill_(torch.finfo(torch.float16).max)
    assert bool(states(short, {name: x.half() for name, x in given.items()}).isfinite().all()), "as Whisper's layers have it"


def test_pickled(calls: list[int]) -> None:
    """As processes of sentence-transformers get a model, and torch.save."""
    plain, short = pair()
    given = inputs(plain, 9, 4)
    expected = states(short, given)
    found = pickle.loads(pickle.dumps(short))  # noqa: S301
    assert [type(part) for part in found.modules()] == [type(part) for part in short.modules()]
    states(found, given)
    assert torch.equal(states(found, given), expected)
    assert calls[-1] == 3


def test_masks_of_every_kind(calls: list[int]) -> None:
    plain, short = pair()
    given = inputs(plain, 9, 4)
    states(short, given)
    mask = torch.rand(2, 1, 9, 9) < 0.5
    mask[:, :, :, 0] = True
    for other in (mask, mask[:1], mask.expand(2, 4, 9, 9), None):
        settings = {"input_ids": given["input_ids"], "attention_mask": other}
        with torch.inference_mode():
            assert close(short(**settings).last_hidden_state, plain(**settings).last_hidden_state)
    assert calls == [3, 3, 3, 3], "heads that see differently are left to transformers"


def test_masks_that_are_added(calls: list[int]) -> None:
    """As MPNet has them: what hides tokens is a mask, what only makes them less likely is not."""
    plain, short = pair("mpnet")
    ids = inputs(plain, 9, 4)["input_ids"]
    hiding = torch.zeros(2, 1, 9, 9).masked_fill(torch.rand(2, 1, 9, 9) < 0.3, torch.finfo(torch.float32).min)
    for mask in (hiding, hiding, torch.randn(2, 1, 9, 9)):
        with torch.inference_mode():
            assert close(*(model(input_ids=ids, attention_mask=mask).last_hidden_state for model in (short, plain)))
    assert calls == [3, 3]


def test_bfloat16(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, short = pair()
    given = inputs(plain, 7, 3)
    wanted = states(plain, given)
    short.bfloat16()
    found = states(short, given)
    assert torch.equal(states(short, given), found)
    assert found.dtype == torch.bfloat16
    assert calls == [3, 3]
    monkeypatch.setattr(encoder_stack, "_MOST_BYTES", 0)
    assert torch.equal(states(short, given), found)
    assert calls[2:] == [1, 1, 1], "what layers give one by one is not rounded before the next one, either"
    # Norms, biases, embeddings and the result are rounded to 2^-9 of them: twice that for each of three layers, as norms enlarge it.
    assert float((found.float() - wanted).norm() / wanted.norm()) < 3 * 2 * 2.0**-8


def test_inner_outputs_that_are_asked_for(calls: list[int]) -> None:
    plain, short = pair()
    given = inputs(plain, 9, 4)
    wanted = states(plain, given)
    for _ in range(2):
        states(short, given)
    assert calls == [3, 3]
    for setting in ("output_hidden_states", "output_attentions"):
        for model in (plain, short):
            model.set_attn_implementation("eager" if setting == "output_attentions" else "sdpa")
        with torch.inference_mode():
            found, expected = (model(**given, **{setting: True}) for model in (short, plain))
        name = setting.removeprefix("output_")
        assert len(found[name]) == len(expected[name]) >= 3
        assert all(torch.equal(a, b) for a, b in zip(found[name], expected[name], strict=True))
    assert len(calls) == 2
    short.set_attn_implementation("sdpa")
    for _ in range(2):  # the hooks that transformers has left behind do nothing now
        assert close(states(short, given), wanted)
    assert calls[2:] == [3, 3]


def test_what_is_left_to_transformers(calls: list[int]) -> None:
    plain, short = pair()
    given = inputs(plain, 9, 4)
    wanted = states(plain, given)
    y = short(**given).last_hidden_state
    y.sum().backward()
    assert short.encoder.layer[0].output.LayerNorm.weight.grad is not None
    short.train()
    states(short, given)
    short.eval()
    assert calls == []
    seen: list[str] = []
    handle = short.encoder.layer[1].attention.self.key.register_forward_hook(lambda *_: seen.append("key"))
    for _ in range(2):
        assert close(states(short, given), wanted)
    assert seen == ["key"] * 2
    assert calls == [1, 1] * 2, "two of three layers, one by one"
    assert any("2 of 3 layers take native calls; layer 1: its attention.self.key has a hook" in text for text in remarks(short))
    handle.remove()
    outputs: list[Tensor] = []
    handle = short.encoder.layer[1].register_forward_hook(lambda _, __, y: outputs.append(y) or y + 0)
    calls.clear()
    for _ in range(2):
        assert close(states(short, given), wanted)
    assert calls == [1, 1] * 2
    assert len(outputs) == 2
    handle.remove()
    calls.clear()
    states(short, given)
    assert close(states(short, given), wanted)
    assert calls[-1] == 3


def test_weights_that_change(calls: list[int]) -> None:
    plain, short = pair()
    given = inputs(plain, 9, 4)
    for _ in range(2):
        states(short, given)
    for model in (plain, short):
        layers = model.encoder.layer
        layers[0].output.dense.load_state_dict(layers[1].output.dense.state_dict())
        layers[1].output.LayerNorm.weight.data = torch.arange(32.0)
        layers[1].intermediate.dense.bias.data.add_(1)
        layers[1].attention.self.key.bias.add_(1)
    assert close(states(short, given), states(plain, given))
    for model in (plain, short):
        torch.manual_seed(3)
        model.encoder.layer[1].output.dense = torch.nn.Linear(40, 32)
    calls.clear()
    assert close(states(short, given), states(plain, given))
    assert calls == [1, 1], "the one in the middle is transformers'"
    weight = weakref.ref(short.encoder.layer[2].output.dense.packed.data)
    del short, model, layers
    gc.collect()
    assert weight() is None


def test_what_stays_as_it_is() -> None:
    def reason(model: Any) -> str:
        (text,) = [text for text in remarks(replace_forwards_(model)) if "layer 0 and 2 more: " in text]
        return text.partition("layer 0 and 2 more: ")[2]

    assert reason(pair(optimized=False, fused=False)[1]).startswith("query+key+value are not computed together")
    assert reason(pair(optimized=False, hidden_act="relu")[1]).startswith("its intermediate.dense has no GELU")
    assert reason(pair(optimized=False, is_decoder=True)[1]) == "it is a decoder"
    eager = pair(optimized=False)[1]
    eager.set_attn_implementation("eager")
    assert reason(eager) == "its attn_implementation is \"eager\", not 'sdpa' or 'halfbyte'"
    assert "is a Linear, which is not quantized" in reason(CASES["bert"]())
    odd = pair(optimized=False, hidden_size=24, num_attention_heads=4)[1]  # found where weights are looked at, as they may move
    assert reason(odd) == "heads of 6 are not a multiple of 4"
    assert states(odd, inputs(odd, 3)).shape == (3, 24)


@pytest.mark.parametrize("kind", ["bert", "electra", "xlm_roberta", "distilbert"])
def test_embeddings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model = CASES[kind]().eval()
    torch.nn.init.normal_(model.embeddings.LayerNorm.bias)
    quantize_(model, Config("int4_g32", compute="float"))
    plain, short = model.embeddings, replace_forwards_(copy.deepcopy(model)).embeddings
    assert (text := short.halfbyte_remark) == embedding.ONE_CALL
    assert text in "".join(remarks(short))
    calls: list[object] = []
    monkeypatch.setattr(embedding, "_fused", lambda *args, run=embedding._fused: (calls.append(0), run(*args))[1])
    ids = torch.randint(3, 60, (3, 7))
    ids[1, 4:] = 1
    more = {"position_ids": torch.randint(0, 20, (3, 7))}, {"position_ids": torch.arange(5, 12)[None]}
    if kind != "distilbert":
        cached = parameters_of(type(plain).forward)[-1]  # how many tokens a cache has
        more += {"token_type_ids": torch.randint(0, plain.token_type_embeddings.num_embeddings, (3, 7))}, {cached: 0}  # type: ignore[assignment]
    # Sums are the same; a norm of 32 numbers is right to a few units of float32's last place, here of numbers of up to 10.
    settings: Any
    with torch.no_grad():
        for settings in ({}, *more):
            assert torch.allclose(short(ids, **settings), plain(ids, **settings), rtol=0, atol=64 * 2.0**-23)
        assert len(calls) == 1 + len(more)
        with pytest.raises(ArgumentError, match=r"0 … 59, got 3 … 60"):
            short(torch.tensor([[3, 60]]))
        vectors = torch.randn(3, 7, plain.word_embeddings.embedding_dim)
        assert torch.equal(short(None, inputs_embeds=vectors), plain(None, inputs_embeds=vectors))
        short.LayerNorm.weight.data = short.LayerNorm.weight.data * 2
        assert torch.allclose(short(ids) - short.LayerNorm.bias, 2 * (plain(ids) - plain.LayerNorm.bias), atol=1e-5)
        short.position_embeddings.register_forward_hook(lambda *_: calls.clear())
        short(ids)
        assert not calls
    assert short(ids).requires_grad


def test_what_computes_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, short = pair()
    with_quantized_tables = hb.quantize_(CASES["mpnet"]().eval(), "q8_0")
    hb.save(with_quantized_tables, tmp_path / "small")
    assert main(["explain", str(tmp_path / "small")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("whole sequences, on the CPU\nembeddings\n  tables, norm  embedding  embed\nencoder.layer.0 and 2 more\n  qkv ")
    assert "bidirectional, position_bias" in said
    tables, layers, pooler = explain_model(short).groups
    assert "is not quantized" in (tables.reason or "")
    assert layers.reason is None
    names = "qkv attention o_proj attn_residual attn_residual_norm up_proj activation down_proj mlp_residual mlp_residual_norm"
    assert [lowered.op.name for lowered in layers.ops] == names.split()
    assert {lowered.op.name: lowered.kernel for lowered in layers.ops}["attention"] == "attend_whole"
    assert pooler.names == ("pooler.dense",)
    reasons = [explain_model(model, device).groups[1].reason for model, device in ((plain, "cpu"), (short, "sm_90"))]
    assert reasons == ["optimize_ has not been called", "native calls are for CPUs"]
    other = hb.quantize_(tf.AlbertModel(tf.AlbertConfig(embedding_size=16, **SIZES)), "q8_0")
    assert (explain_model(other).groups[0].reason or "").startswith("a AlbertLayerGroup is none of BertLayer, ")
