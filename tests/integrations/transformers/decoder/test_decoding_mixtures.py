"""Few tokens through decoder layers with experts in one call on a CPU say what transformers' own layers say."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_decoder
from optimized_models import close, model_pair, native_calls
from tiny_decoders import MIXTURE_SIZES, MIXTURES, SPARSE
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
from halfbyte.integrations.transformers.decoder.stack import compiled, is_compiled_stack
from halfbyte.integrations.transformers.decoder.token_step import TokenStep
from halfbyte.integrations.transformers.optimize import forwards
from halfbyte.integrations.transformers.optimize.explain_model import explain_model
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_
from halfbyte.nn.report import report
from halfbyte.ops.transformer.experts import Mixture

LENGTH = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def pair(kind: str, compute: str = "float", fmt: str = "q4_0", **more: Any) -> tuple[Any, Any]:
    """(as transformers computes it, in one call)"""
    torch.manual_seed(7)
    model = MIXTURES[kind](**more).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in ("norm", "bias", "sinks")):
            torch.nn.init.normal_(tensor, 1.0, 0.3)
    model.set_attn_implementation("eager" if kind.startswith("gpt-oss") else "sdpa")  # sdpa has no sinks
    quantize_(model, Config(fmt, compute=compute))
    return model_pair(model)


@functools.cache
def shared_pair(kind: str) -> tuple[Any, Any]:
    """For tests that change neither of the models."""
    return pair(kind)


# One for each formula of a half with experts, in the formats of more than the blocks of all: these are decoded by the same kernels.
OTHER_FORMATS = [(kind, fmt) for fmt in ("q8_0", "int4_g16_zp") for kind in ("mixtral", "qwen2", "gpt-oss", "glm4")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(sequences, tokens, layers) of each native call."""
    return native_calls(monkeypatch)


@torch.no_grad()
def steps(model: Any, kept: Any, widths: tuple[int, ...], batch: int = 1) -> Tensor:
    """Logits after so many tokens at a time."""
    generator = torch.Generator().manual_seed(1)
    return torch.cat([model(torch.randint(99, (batch, n), generator=generator), past_key_values=kept).logits[:, -1:] for n in widths])


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("cache", ["grows", "grows, layer by layer", "static"])
def test_the_same_logits(kind: str, cache: str, calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, short = shared_pair(kind)
    if cache.endswith("layer"):
        monkeypatch.setattr(TokenStep, "__call__", lambda *_: None)
    kept = [
        DynamicCache(config=plain.config) if cache != "static" else StaticCache(config=plain.config, max_cache_len=90) for _ in range(2)
    ]
    widths = (13, 1, 1, 4, 70, 1)  # of 70 tokens attention alone is one call
    assert close(steps(short, kept[0], widths), steps(plain, kept[1], widths))
    layers = len(plain.model.layers)
    expected = [[(1, width, layers)] if width != 70 else [(1, 70, 1)] * layers for width in widths]
    assert calls == [call for step in expected for call in step]
    for actual, reference in zip(kept[0].layers, kept[1].layers, strict=True):
        assert actual.get_seq_length() == reference.get_seq_length() == 90
        assert close(actual.keys, reference.keys)


@pytest.mark.parametrize(("kind", "fmt"), [*((kind, "q4_0") for kind in MIXTURES), *OTHER_FORMATS])
def test_the_same_text(kind: str, fmt: str, calls: list[tuple[int, int, int]]) -> None:
    plain, short = shared_pair(kind) if fmt == "q4_0" else pair(kind, fmt=fmt)
    ids = torch.randint(3, 99, (3, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    actual, expected = (model.generate(ids, attention_mask=mask, **LENGTH) for model in (short, plain))
    assert torch.equal(actual, expected)
    assert calls.count((3, 1, len(plain.model.layers))) == 15


def test_a_first_call_in_inference_mode() -> None:
    """The weight of a shared expert's gate, which is quantized, is dequantized when the model is compiled."""
    plain, short = pair("qwen2")
    ids = torch.randint(3, 99, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        assert close(short(ids).logits, plain(ids).logits)


def test_the_factor_of_what_layers_add_may_change(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("granite")
    before, after = [], []
    for found in (before, after):
        found += [steps(model, DynamicCache(config=plain.config), (5, 1, 70, 1)) for model in (short, plain)]
        for layer in (*plain.model.layers, *short.model.layers):
            layer.residual_multiplier = 0.7
    assert close(*before)
    assert close(*after)
    assert not close(before[0], after[0])


def test_integers(calls: list[tuple[int, int, int]]) -> None:
    """A code that flips moves an activation by 1/127 of the largest of 32."""
    plain, short = pair("qwen3", compute="int8")
    found = [steps(model, DynamicCache(config=plain.config), (9, 1, 1, 1)) for model in (short, plain)]
    assert float((found[0] - found[1]).norm()) <= 2e-2 * float(found[1].norm())
    assert len(calls) == 4


def test_more_sequences_than_are_worth_it(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("mixtral")
    found = [steps(model, DynamicCache(config=plain.config), (2, 1), batch=40) for model in (short, plain)]
    assert close(*found)
    assert calls == [(40, 2, 1)] * 2 + [(40, 1, 1)] * 2, "attention alone"


@torch.no_grad()
@pytest.mark.parametrize("kind", MIXTURES)
def test_prompts(kind: str, calls: list[tuple[int, int, int]]) -> None:
    """Attention is one call, the experts take transformers' steps: with padding, without a cache, in 8 bits, and after a change."""
    plain, short = pair(kind)
    layers, generator = len(plain.model.layers), torch.Generator().manual_seed(3)
    ids, mask = torch.randint(3, 99, (3, 75), generator=generator), torch.ones(3, 75, dtype=torch.long)
    mask[0, :9] = mask[2, :30] = 0
    seen, caches = mask.bool(), [DynamicCache(config=plain.config) for _ in range(2)]
    for begin, end in ((0, 40), (40, 75)):
        found = [
            model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for model, cache in zip((short, plain), caches, strict=True)
        ]
        assert close(*(logits[seen[:, begin:end]] for logits in found))
    assert close(*(model(ids, use_cache=False).logits for model in (short, plain)))
    assert [call[2] for call in calls] == [1] * 3 * layers
    actual, expected = (model(ids, past_key_values=Int8Cache(plain.config)).logits for model in (short, plain))
    # The codes of a key that differs in its last bits may differ by one where it is just between two: 1/127 of the largest of 32.
    assert float((actual - expected).norm()) <= 1e-2 * float(expected.norm())
    for model in (short, plain):
        model.model.layers[0].input_layernorm.weight.mul_(-2)
        model.model.layers[1].self_attn.o_proj = copy.deepcopy(short.model.layers[0].self_attn.o_proj)
    changed = [model(ids, use_cache=False).logits for model in (short, plain)]
    assert close(*changed)
    assert not close(changed[0], actual)


def test_what_the_output_is() -> None:
    plain, short = pair("qwen3")
    outputs = []
    with torch.no_grad():
        for model in (short, plain):
            cache = DynamicCache(config=plain.config)
            model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
            outputs.append(model(torch.tensor([[8]]), past_key_values=cache))
    actual, expected = outputs
    assert type(actual) is type(expected) is MoeCausalLMOutputWithPast
    assert [*actual.keys()] == [*expected.keys()]
    assert vars(actual).keys() == vars(expected).keys()


@pytest.mark.parametrize("by_config", [False, True])
def test_the_router_may_be_asked(by_config: bool, calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("qwen3")
    settings: dict[str, Any] = {} if by_config else {"output_router_logits": True}
    found = []
    with torch.no_grad():
        for model in (short, plain):
            model.config.output_router_logits = by_config
            cache = DynamicCache(config=model.config)
            model(torch.tensor([[5, 6, 7]]), past_key_values=cache, **settings)
            found.append(model(torch.tensor([[8]]), past_key_values=cache, **settings))
    assert len(found[0].router_logits) == len(found[1].router_logits) == 2
    assert all(map(close, found[0].router_logits, found[1].router_logits))
    assert close(found[0].logits, found[1].logits)
    assert calls == []


def test_how_experts_of_transformers_are_computed_is_no_change() -> None:
    """`generate` on a GPU sets it for decoding, and back: no stack is compiled again for it."""
    _, short = pair("qwen3")
    steps(short, DynamicCache(config=short.config), (3, 1))
    before = compiled(short.model)
    short.set_experts_implementation("eager")
    assert compiled(short.model) is before
    short.config.rms_norm_eps = 0.5
    assert compiled(short.model) is not before


@torch.no_grad()
def test_changes_are_seen(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("qwen2")

    def same(count: int) -> None:
        calls.clear()
        found = [steps(model, DynamicCache(config=plain.config), (3, 1, 1)) for model in (short, plain)]
        assert close(*found)
        assert len(calls) == count

    def change(what: Callable[[Any], None]) -> None:
        before = steps(plain, DynamicCache(config=plain.config), (3, 1, 1))
        for model in (short, plain):
            what(model.model.layers[1].mlp)
        assert not close(steps(plain, DynamicCache(config=plain.config), (3, 1, 1)), before)

    same(3)
    change(lambda mlp: mlp.gate.weight.mul_(0.5))
    same(3)
    change(lambda mlp: setattr(mlp.gate, "top_k", 2))
    same(3)
    change(lambda mlp: setattr(mlp.gate, "norm_topk_prob", True))
    same(3)
    change(lambda mlp: setattr(mlp.gate, "weight", torch.nn.Parameter(-mlp.gate.weight)))
    same(3)
    change(lambda mlp: setattr(mlp.experts, "down_proj", copy.deepcopy(short.model.layers[0].mlp.experts.down_proj)))
    same(3)


@torch.no_grad()
def test_hooks_are_called(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("mixtral")
    cache = DynamicCache(config=plain.config)
    seen: list[Tensor] = []
    steps(short, cache, (3, 1))
    experts = short.model.layers[1].mlp.experts
    for part in (experts, experts.down_proj, short.model.layers[1].mlp.gate):
        calls.clear()
        handle = part.register_forward_hook(lambda *_: seen.append(torch.empty(0)))
        steps(short, cache, (1,))
        handle.remove()
        assert (1, 1, 2) not in calls
        assert len(seen) == 1
        seen.clear()
    calls.clear()
    steps(short, cache, (1,))
    assert calls == [(1, 1, 2)]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["phimoe", "gpt-oss"])
def test_experts_of_other_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers are not one call the experts alone are, where `replace_forwards_` was called."""
    found: list[tuple[int, ...]] = []
    call = Mixture.__call__
    monkeypatch.setattr(Mixture, "__call__", lambda self, x, *args: (found.append(tuple(x.shape)), call(self, x, *args))[1])
    torch.manual_seed(7)
    plain = MIXTURES[kind]().eval() if kind in MIXTURES else make_decoder("Phimoe", **SPARSE, pad_token_id=0).eval()
    quantize_(plain, Config("q4_0", compute="float", skip=["*.o_proj"]))
    short = replace_forwards_(copy.deepcopy(plain))
    assert not is_compiled_stack(short.model)
    widths = (3, 1, 40, 1)
    logits = [steps(model, DynamicCache(config=plain.config), widths) for model in (short, plain)]
    assert close(*logits)
    assert found == [(width, 48) for width in widths for _ in range(2)]


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_and_sinks(batch: int, calls: list[tuple[int, int, int]]) -> None:
    """Of gpt-oss each second layer sees the last tokens alone."""
    plain, short = pair("gpt-oss", sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    kept = [DynamicCache(config=plain.config) for _ in range(2)]
    widths = (4, 1, 1, 1, 4, 5, *[1] * 20)
    assert close(*(steps(model, cache, widths, batch) for model, cache in zip((short, plain), kept, strict=True)))
    of_a_call = [[(batch, width, 1)] * 2 if width > 1 else [(batch, 1, 2)] for width in widths]
    assert calls == [call for found in of_a_call for call in found]
    for actual, expected in zip(kept[0].layers, kept[1].layers, strict=True):
        assert actual.get_seq_length() == expected.get_seq_length()
        assert close(actual.keys, expected.keys)
        assert close(actual.values, expected.values)
    ids, mask = torch.randint(3, 99, (3, 11), generator=torch.Generator().manual_seed(2)), torch.ones(3, 11, dtype=torch.long)
    mask[1, :4] = mask[2, :8] = 0
    assert torch.equal(*(model.generate(ids, attention_mask=mask, **LENGTH) for model in (short, plain)))


@torch.no_grad()
def test_a_prompt_that_sees_nothing_but_sinks(calls: list[tuple[int, int, int]]) -> None:
    """Padding: what it says means nothing, but it is a number, and the rest is as without."""
    plain, short = pair("gpt-oss")
    ids, mask = torch.randint(3, 99, (2, 10), generator=torch.Generator().manual_seed(2)), torch.ones(2, 10, dtype=torch.long)
    mask[1, :5] = 0
    actual, expected = (
        model(ids, attention_mask=mask, past_key_values=DynamicCache(config=plain.config)).logits for model in (short, plain)
    )
    assert close(actual[mask.bool()], expected[mask.bool()])
    assert actual.isfinite().all()
    assert calls == [(2, 10, 2)]


@torch.no_grad()
def test_changes_of_gpt_oss_are_seen(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("gpt-oss")

    def logits(model: Any) -> Tensor:
        return steps(model, DynamicCache(config=plain.config), (3, 1, 1))

    for change in (
        lambda layer: layer.self_attn.sinks.add_(2),
        lambda layer: setattr(layer.self_attn, "sinks", torch.nn.Parameter(-layer.self_attn.sinks)),
        lambda layer: layer.mlp.router.bias.mul_(-1),
        lambda layer: setattr(layer.mlp.experts.float_module, "limit", 0.3),
        lambda layer: setattr(layer.mlp.experts.float_module, "alpha", 0.7),
        lambda layer: layer.mlp.experts.gate_up_proj_bias.add_(1),
        lambda layer: setattr(layer.mlp.experts, "down_proj_bias", torch.nn.Parameter(layer.mlp.experts.down_proj_bias + 1)),
    ):
        before = logits(plain)
        for model in (short, plain):
            change(model.model.layers[1])
        calls.clear()
        assert close(logits(short), logits(plain))
        assert len(calls) == 3
        assert not close(logits(plain), before)
    half = [copy.deepcopy(model).to(torch.bfloat16) for model in (short, plain)]  # biases are copies in float32
    for change in (lambda experts: experts.gate_up_proj_bias.add_(1), lambda experts: experts.down_proj_bias.mul_(-1)):
        before = logits(half[0]).float()
        for model in half:
            change(model.model.layers[0].mlp.experts)
        actual, expected = (logits(model).float() for model in half)
        # bfloat16 rounds a number by 2^-9 of it: dozens of them in turn, in transformers' layers.
        assert float((actual - expected).norm()) <= 0.1 * float(expected.norm())
        assert float((actual - before).norm()) > 0.2 * float(before.norm())


CORRECTED = {
    "glm4": lambda mlp: mlp.gate.e_score_correction_bias,
    "minimax_m2": lambda mlp: mlp.e_score_correction_bias,
    "ernie4_5": lambda mlp: mlp.gate.moe_statics.e_score_correction_bias,
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CORRECTED)
def test_changes_of_corrections_are_seen(kind: str, dtype: torch.dtype, calls: list[tuple[int, int, int]]) -> None:
    """In bfloat16 they are copies in float32; which experts there are is all that is compared then, as hidden states are rounded."""
    models = [model.to(dtype) for model in pair(kind)]
    found = []
    for favourites in ([0, 1, 2], [3, 4, 5]):  # of each token
        for model in models:
            correction = CORRECTED[kind](model.model.layers[1].mlp)
            correction.zero_()
            correction.view(-1)[favourites] = 8
        calls.clear()
        plain, short = (steps(model, DynamicCache(config=model.config), (3, 1, 1)).float() for model in models)
        assert float((short - plain).norm()) <= (1e-4 if dtype == torch.float32 else 0.1) * float(plain.norm())
        assert len(calls) == 3
        found.append(short)
    assert float((found[0] - found[1]).norm()) > 0.2 * float(found[0].norm())


@torch.no_grad()
def test_factors_and_groups_are_seen(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair("glm4")
    for model in (plain, short):
        model.model.layers[1].mlp.gate.routed_scaling_factor = 0.25
    assert close(*(steps(model, DynamicCache(config=plain.config), (3, 1)) for model in (short, plain)))
    assert calls == [(1, 3, 2), (1, 1, 2)]
    for model in (plain, short):
        model.model.layers[1].mlp.gate.num_group, model.model.layers[1].mlp.gate.topk_group = 4, 2
    calls.clear()
    assert close(*(steps(model, DynamicCache(config=plain.config), (3, 1)) for model in (short, plain)))
    assert calls == [(1, 3, 1), (1, 1, 1)], "the first layer, which has no experts"
    assert "its router chooses among groups of experts" in short.model.halfbyte_remark


def test_olmoe_that_clips_is_left() -> None:
    torch.manual_seed(7)
    model = MIXTURES["olmoe"](clip_qkv=3.0).eval()
    replace_forwards_(fuse_(quantize_(model, "q4_0")))
    assert not is_compiled_stack(model.model)
    assert any("its config has clip_qkv" in note for note in report(model).notes)


def test_gradients_take_the_other_way(calls: list[tuple[int, int, int]]) -> None:
    _, short = pair("qwen3")
    embeds = torch.randn(1, 3, 48, requires_grad=True)
    short(inputs_embeds=embeds, use_cache=False).logits.sum().backward()
    assert embeds.grad is not None
    assert embeds.grad.abs().sum() > 0
    assert calls == []


def test_what_is_said() -> None:
    plain, short = pair("qwen2")
    assert any(note.endswith("2 of 2 layers take native calls") for note in report(short).notes)
    said = str(explain_model(short))
    for step in ("shared_expert", "experts", "gate"):
        assert f"{step}" in said
    layer = short.model.layers[0]
    assert forwards.why_not_native(layer, "cpu") is None
    assert forwards.why_not_native(layer) is forwards.why_not_native(plain.model.layers[0]) is None
    oss = pair("gpt-oss")[1].model.layers[0]
    assert forwards.why_not_native(oss) is None
    oss.self_attn.config._attn_implementation = "sdpa"
    assert forwards.why_not_native(oss) == "its attention is not transformers' eager one, which alone has caps of scores and sinks"
    torch.manual_seed(7)
    model = make_decoder("Mixtral", **{**MIXTURE_SIZES, "intermediate_size": 72}, num_local_experts=4, num_experts_per_tok=2).eval()
    replace_forwards_(fuse_(quantize_(model, "q4_0")))
    assert any("72 gates are not whole panels of 32" in note for note in report(model).notes)
    kept = make_decoder("Mixtral", **MIXTURE_SIZES, num_local_experts=4, num_experts_per_tok=2).eval()
    replace_forwards_(fuse_(quantize_(kept, Config("q4_0", skip=["*.experts.*"]))))
    assert any("its experts are not quantized" in note for note in report(kept).notes)
