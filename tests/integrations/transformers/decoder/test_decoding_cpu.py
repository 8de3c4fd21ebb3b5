"""Few tokens through a decoder layer in one call on a CPU say what transformers' own layer says."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import decoder_parts
from language_model import make_decoder
from optimized_models import Shifted, close, model_pair, native_calls
from transformers import DynamicCache, StaticCache

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
from halfbyte.integrations.transformers.decoder.token_step import TokenStep
from halfbyte.integrations.transformers.optimize.forwards import why_not_native
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.ops.transformer.decoder import DecoderLayer
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm
from halfbyte.ops.transformer.weights import Weight

SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
KINDS: dict[str, Callable[..., Any]] = {
    "llama": partial(make_decoder, "Llama", **SIZES),
    "llama with biases": partial(make_decoder, "Llama", **SIZES, attention_bias=True),
    "mistral": partial(make_decoder, "Mistral", **SIZES, sliding_window=None),
    "qwen2": partial(make_decoder, "Qwen2", **SIZES),
    "qwen3": partial(make_decoder, "Qwen3", **SIZES),
    "llama of several formats": partial(make_decoder, "Llama", **SIZES),
}
OTHERS = {"*.0.self_attn.v_proj": "q8_0", "*.1.self_attn.q_proj": "q8_0"}


def pair(kind: str = "llama", compute: str = "float", skip: Sequence[str] = ("lm_head",), **more: Any) -> tuple[Any, Any]:
    """(as transformers computes it, in one call a layer)"""
    torch.manual_seed(7)
    model = KINDS[kind](**more).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.set_attn_implementation("sdpa")
    several = OTHERS if kind.endswith("formats") else {}
    quantize_(model, Config("q4_0", compute=compute, skip=list(skip), overrides=several))
    return model_pair(model)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(sequences, tokens, layers) of each native call."""
    return native_calls(monkeypatch)


def padded(ids: Tensor, mask: Tensor | None, more: Tensor) -> tuple[Tensor, Tensor | None]:
    return more, None if mask is None else torch.cat((mask, mask.new_ones(more.shape)), 1)


def steps(model: Any, kept: Any, ids: Tensor, mask: Tensor | None = None, widths: tuple[int, ...] = (1, 1, 1)) -> Tensor:
    """Logits after a prompt and so many tokens at a time."""
    found = []
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for width in (*widths, 0):
            found.append(model(input_ids=ids, attention_mask=mask, past_key_values=kept).logits[:, -1:])
            ids, mask = padded(ids, mask, torch.randint(99, (len(ids), width), generator=generator))
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["grows", "grows, without the head", "grows, layer by layer", "static"])
def test_the_same_logits(kind: str, cache: str, calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, short = pair(kind, skip=["lm_head"] if cache.endswith("head") else [])
    if cache.endswith("layer"):
        monkeypatch.setattr(TokenStep, "__call__", lambda *_: None)
    kept = [
        DynamicCache(config=plain.config) if cache != "static" else StaticCache(config=plain.config, max_cache_len=24) for _ in range(2)
    ]
    ids = torch.randint(99, (1, 13))
    widths = (1, 1, 4, 1)  # a few at a time, as one that guesses ahead has it
    assert close(steps(short, kept[0], ids, widths=widths), steps(plain, kept[1], ids, widths=widths))
    assert calls == [(1, width, 2) for width in (13, *widths)]
    for actual, expected in zip(kept[0].layers, kept[1].layers, strict=True):
        assert actual.get_seq_length() == expected.get_seq_length() == 20
        assert close(actual.keys, expected.keys)
        assert close(actual.values, expected.values)
    with torch.no_grad():
        found = [model(input_ids=ids.view(13, 1).expand(-1, 11), use_cache=False).logits for model in (short, plain)]
    assert close(*found)
    assert calls[-2:] == [(13, 11, 1)] * 2


@pytest.mark.parametrize("dim", [16, 40])
def test_the_same_logits_from_a_cache_of_8_bits(dim: int, calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair(head_dim=dim)
    kept = [Int8Cache(plain.config) for _ in range(2)]
    ids, mask = torch.randint(99, (2, 13)), torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    widths = (1, 1, 70, 9, 1)
    found = [steps(model, cache, ids, mask, widths) for model, cache in zip((short, plain), kept, strict=True)]
    # The codes of a key that differs in its last bits may differ by one where it is just between two: 1/127 of the largest of 32.
    assert float((found[0] - found[1]).norm()) <= 1e-2 * float(found[1].norm())
    assert calls == [call for width in (13, *widths) for call in ([(2, width, 2)] if width < 32 else [(2, width, 1)] * 2)]
    for actual, expected in zip(kept[0].layers, kept[1].layers, strict=True):
        assert actual.keys.shape == expected.keys.shape == (2, 2, 95, dim + 2 * -(-dim // 32))
        assert actual.keys.dtype == torch.int8
        differ = [(a != b).float().mean() for a, b in ((actual.keys, expected.keys), (actual.values, expected.values))]
        assert max(differ) < 0.02
    exact = steps(plain, DynamicCache(config=plain.config), ids, mask, widths)
    assert float((found[0] - exact).norm()) <= 0.05 * float(exact.norm())
    ids = ids[:1]
    length = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for settings in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        kept = [Int8Cache(plain.config) for _ in range(2)]
        both = [m.generate(ids, past_key_values=c, **length, **settings) for m, c in zip((short, plain), kept, strict=True)]  # type: ignore[arg-type]
        assert both[0].shape == both[1].shape == (1, 33)
        assert kept[0].get_seq_length() == 32


@pytest.mark.parametrize("cache", ["grows", "static"])
def test_padding_on_the_left(cache: str, calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair()
    kept = [DynamicCache(config=plain.config) if cache == "grows" else StaticCache(config=plain.config, max_cache_len=24) for _ in range(2)]
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :3] = mask[2, :5] = 0
    ids = torch.randint(99, (3, 12))
    assert close(steps(short, kept[0], ids, mask, (1, 2, 1)), steps(plain, kept[1], ids, mask, (1, 2, 1)))
    assert len(calls) == 4


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_the_same_text(settings: dict[str, Any], calls: list[tuple[int, int, int]]) -> None:
    """Of so many tokens that the cache that grows gets new memory on the way."""
    plain, short = pair()
    ids = torch.randint(3, 99, (1, 5))
    length = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    actual, expected = (m.generate(ids, attention_mask=torch.ones_like(ids), **length, **settings) for m in (short, plain))
    assert torch.equal(actual, expected)
    assert len(calls) >= 50


def test_caches_that_share_a_beginning() -> None:
    """What one of them writes behind it, the others do not see."""
    plain, short = pair()
    ids, more = torch.randint(99, (1, 6)), torch.randint(99, (4, 1, 9))
    found = []
    with torch.no_grad():
        for model in (short, plain):
            first = DynamicCache()
            model(input_ids=ids, past_key_values=first)
            model(input_ids=ids[:, :1], past_key_values=first)  # memory with room
            snapshot = [(layer.keys, layer.values) for layer in first.layers]
            others = copy.deepcopy(first), DynamicCache(), copy.copy(first)
            others[2].layers = [copy.copy(layer) for layer in first.layers]
            for layer, (keys, values) in enumerate(snapshot):
                others[1].update(keys[:, :, :0], values[:, :, :0], layer)
                others[1].layers[layer].keys, others[1].layers[layer].values = keys, values
            for at in range(9):
                for cache, row in zip((first, *others), more, strict=True):
                    found.append(model(input_ids=row[:, at : at + 1], past_key_values=cache).logits)
            first.crop(-4)
            found += [model(input_ids=ids[:, :1], past_key_values=cache).logits for cache in (first, *others)]
    half = len(found) // 2
    assert close(torch.cat(found[:half]), torch.cat(found[half:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype, calls: list[tuple[int, int, int]]) -> None:
    """Everything between x and y is float32: no farther from float32's logits than transformers' steps, which round each."""
    exact, _ = pair()
    plain, short = pair()
    ids = torch.randint(99, (1, 30))
    wanted = steps(exact, DynamicCache(config=exact.config), ids)
    actual, expected = (steps(m.to(dtype), DynamicCache(config=m.config), ids).float() for m in (short, plain))
    assert len(calls) == 4
    # The caches are of `dtype` in both.
    assert float((actual - wanted).norm()) <= 1.1 * float((expected - wanted).norm())
    calls.clear()
    with torch.inference_mode():
        once, again, one_by_one = (m(input_ids=ids, use_cache=False).logits for m in (short, short, copy.deepcopy(short)))
    assert torch.equal(once, again)
    assert torch.equal(once, one_by_one)


@pytest.mark.parametrize("name", ["q4_0", "int4_g128_zp+q8_0", "int8_channel"])
def test_products_on_the_way_are_those_of_linear(name: str) -> None:
    sizes = decoder_parts.Sizes(4, 2, 32, 160, 64)
    shapes = (1, 1), (1, 3), (5, 1), (2, 20), (9, 40), (1, 300)  # the last two piece by piece
    decoder_parts.check(name, sizes, shapes, lambda _: nullcontext())


def test_what_goes_the_long_way(calls: list[tuple[int, int, int]]) -> None:
    _, short = pair()
    ids, one = torch.randint(99, (1, 5)), torch.tensor([[5]])
    short(input_ids=ids, past_key_values=(kept := DynamicCache()))
    short(input_ids=one, past_key_values=kept)  # gradients
    with torch.no_grad():
        short(input_ids=one, past_key_values=kept)
        assert calls.pop() == (1, 1, 2)
        short(input_ids=one.expand(65, 1))  # too many
        short.train()(input_ids=one, past_key_values=kept)
        short.eval()
        seen: list[Any] = []
        hook = short.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args))
        short(input_ids=one, past_key_values=kept)
        assert seen
        assert calls == [(1, 1, 1)], "the other layer"
        hook.remove()
        short(input_ids=one, past_key_values=kept)
        assert len(calls) == 2
        short(input_ids=one, past_key_values=kept, output_attentions=True)
        assert len(calls) == 2


def test_consecutive_layers_are_one_call(calls: list[tuple[int, int, int]]) -> None:
    """But for one with a hook, and not where inner results are asked for."""
    plain, short = pair(num_hidden_layers=4)
    ids, one = torch.randint(99, (1, 5)), torch.tensor([[5]])
    kept: list[Any] = [DynamicCache(), DynamicCache()]

    def both(**how: Any) -> list[int]:
        calls.clear()
        found = [m(past_key_values=c, **how) for m, c in zip((short, plain), kept, strict=True)]
        assert close(found[0].logits, found[1].logits)
        hidden = [found[0].hidden_states, found[1].hidden_states]
        assert hidden[0] is None or all(map(close, *hidden))
        return [layers for _, _, layers in calls]

    with torch.no_grad():
        assert both(input_ids=ids) == [], "the cache has no layers yet"
        assert both(input_ids=one) == both(input_ids=one) == [4]
        # Something that changes what a layer gives, in place and not.
        for change in (lambda *args: args[2] * 2, lambda *args: args[2].mul_(2), lambda *args: None):
            hooks = [m.model.layers[1].register_forward_hook(change) for m in (short, plain)]
            assert both(input_ids=one) == [1, 2]
            for hook in hooks:
                hook.remove()
        for actual in kept:
            actual.crop(-2)
        assert both(input_ids=one) == [4]
        assert both(input_ids=one, attention_mask=torch.ones(1, kept[1].get_seq_length() + 1)) == [4]
        for model in (short, plain):
            model.config.num_hidden_layers = 3
        assert both(input_ids=one) == []
        lengths = [[layer.get_seq_length() for layer in cache.layers] for cache in kept]
        assert lengths[0] == lengths[1]
        for model in (short, plain):
            model.config.num_hidden_layers = 4
    with torch.inference_mode():
        kept = [DynamicCache(config=plain.config), DynamicCache(config=plain.config)]
        assert both(input_ids=ids) == [4]
        assert both(input_ids=one) == [4]
        assert both(input_ids=one, output_hidden_states=True) == []
        assert both(input_ids=one) == [4], "the hooks that transformers has left are inactive"


def test_under_torch_compile(calls: list[tuple[int, int, int]]) -> None:
    """transformers' forward is traced, which reads what torch.func.functional_call gives the model."""
    _, short = pair()
    compiled: Any = torch.compile(short.forward, fullgraph=True, dynamic=False, backend="eager")
    ids, one = torch.randint(99, (1, 5)), torch.tensor([[5]])
    kept = [StaticCache(config=short.config, max_cache_len=24) for _ in range(2)]
    with torch.no_grad():
        for cache in kept:
            short(input_ids=ids, past_key_values=cache)
        for _ in range(2):
            calls.clear()
            expected = short(input_ids=one, past_key_values=kept[0]).logits
            assert calls == [(1, 1, 2)]
            assert close(compiled(input_ids=one, past_key_values=kept[1]).logits, expected)
            assert len(calls) == 1
        name = "model.layers.0.input_layernorm.weight"
        other = {name: short.get_parameter(name) * 2}
        call: Any = torch.compile(torch.func.functional_call, backend="eager")
        changed = torch.func.functional_call(short, other, (one,)).logits
        assert close(call(short, other, (one,)).logits, changed)
        assert not close(short(one).logits, changed)


def test_weights_that_change(calls: list[tuple[int, int, int]]) -> None:
    plain, short = pair()
    _, other = pair(initializer_range=0.1)
    ids = torch.randint(99, (1, 5))
    steps(short, DynamicCache(), ids)
    for model in (plain, short):
        for actual, expected in zip(model.model.layers, other.model.layers, strict=True):
            actual.self_attn.o_proj.load_state_dict(expected.self_attn.o_proj.state_dict())
            actual.input_layernorm.weight.data = torch.rand(48) + 1
    short.model.layers[1].input_layernorm.weight.data = plain.model.layers[1].input_layernorm.weight.data.clone()
    short.model.layers[0].input_layernorm.weight.data.copy_(plain.model.layers[0].input_layernorm.weight.data)
    assert close(steps(short, DynamicCache(), ids), steps(plain, DynamicCache(), ids))
    for name in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        plain, short = pair()
        steps(short, DynamicCache(), ids)
        linear = torch.nn.Linear(*plain.model.layers[0].get_submodule(name).weight.shape[::-1], bias=False)
        for model in (plain, short):
            model.model.layers[0].set_submodule(name, linear)
        before = len(calls)
        assert close(steps(short, DynamicCache(), ids), steps(plain, DynamicCache(), ids))
        assert len(calls) == before + 3, "one layer of two"


def test_a_model_that_is_gone_leaves_no_weights_behind() -> None:
    _, short = pair()
    steps(short, DynamicCache(), torch.randint(99, (1, 5)))
    weight = weakref.ref(short.model.layers[0].mlp.down_proj.packed.data)
    del short
    gc.collect()
    assert weight() is None


def test_threads_do_not_mix() -> None:
    _, short = pair()
    prompts = [torch.randint(99, (1, 4)) for _ in range(4)]
    expected = [steps(short, DynamicCache(), ids, widths=(1,) * 8) for ids in prompts]
    found: dict[int, Tensor] = {}

    def run(i: int) -> None:
        torch.set_num_threads(1)
        found[i] = steps(short, DynamicCache(), prompts[i], widths=(1,) * 8)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(close(found[i], expected[i]) for i in range(4))


def test_arguments() -> None:
    heads = Heads(2, 1, 16, 0.25)
    shapes = (64, 32), (32, 32), (64, 32), (32, 32)
    qkv, o, gate_up, down = (Weight(ops.pack(ops.quantize(torch.randn(n, c), "q4_0")), None, "auto", "block") for n, c in shapes)
    norm = Norm(torch.ones(32), 0.0)
    attention, dense = Attention((qkv,), o, norm, heads), MLP(gate_up, down, norm)
    layer = DecoderLayer(attention, dense)
    x, rope, cache = torch.randn(1, 1, 32), torch.ones(1, 1, 16), torch.zeros(1, 1, 4, 16)
    assert layer(x, (rope, rope), cache, cache.clone(), 3).shape == x.shape
    no_mask = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    for wrong in (
        lambda: layer(x, (rope, rope), cache, cache.clone(), 4),
        lambda: layer(x, (rope, rope), cache, cache.clone(), -1),
        lambda: layer(x[..., :31], (rope, rope), cache, cache.clone(), 0),
        lambda: layer(x, (rope, rope[..., :8]), cache, cache.clone(), 0),
        lambda: layer(x, (rope, rope), cache, cache.double(), 0),
        lambda: layer(x, (rope, rope), cache.expand(2, -1, -1, -1), cache.expand(2, -1, -1, -1), 0),
        lambda: layer(x, (rope, rope), cache.transpose(2, 3), cache.transpose(2, 3), 0),
        lambda: layer(x, (rope, rope), cache, cache.clone(), 3, no_mask),
        lambda: layer(x, (rope, rope), cache, cache.clone(), 1, no_mask.float()),
        lambda: layer(x.expand(65, 1, 32), (rope, rope), cache.expand(65, 1, 4, 16), cache.expand(65, 1, 4, 16), 0),
    ):
        with pytest.raises(ArgumentError, match="this layer takes on the CPU"):
            wrong()
    short = Norm(torch.ones(3), 0.0)
    for wrong_attention in (attention._replace(qkv=(o,)), attention._replace(pre_norm=short)):
        with pytest.raises(ArgumentError, match="the attention half of a decoder layer takes weights"):
            DecoderLayer(wrong_attention, dense)
    for wrong_dense in (MLP(down, gate_up, norm), dense._replace(pre_norm=short)):
        with pytest.raises(ArgumentError, match="the feed-forward half of a decoder layer takes weights"):
            DecoderLayer(attention, wrong_dense)
    others = (66, 32), (32, 33), (64, 64), (64, 32)
    packed = [Weight(ops.pack(ops.quantize(torch.randn(n, c), "q4_0")), None, "auto", "block") for n, c in others]
    odd, wide = MLP(packed[0], packed[1], norm), MLP(packed[2], packed[3], Norm(torch.ones(64), 0.0))
    with pytest.raises(ArgumentError, match="33 gates are not whole panels of 32"):
        DecoderLayer(attention, odd)
    with pytest.raises(ArgumentError, match="have one width, got 32 and 64"):
        DecoderLayer(attention, wide)


def test_a_norm_that_was_replaced() -> None:
    """By an adapter, say: it is called, before and after the layer was once computed without."""
    plain, short = pair()
    ids = torch.randint(99, (1, 7))
    with torch.no_grad():
        assert close(short(ids).logits, plain(ids).logits)
        for model in (plain, short):
            model.model.layers[1].post_attention_layernorm = Shifted(model.model.layers[1].post_attention_layernorm)
        assert close(steps(short, DynamicCache(config=short.config), ids), steps(plain, DynamicCache(config=plain.config), ids))
    assert why_not_native(short.model.layers[1], "cpu") == "one of its norms was replaced"


class _Skipped(torch.nn.Module):
    """In the place of a layer, without any of its parts."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return x


def test_a_layer_of_another_class() -> None:
    plain, short = pair("llama")
    for model in (plain, short):
        model.model.layers[1] = _Skipped()
    assert short.model.halfbyte_remark == "its layers are called one by one: they are of several classes"
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(short(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)
