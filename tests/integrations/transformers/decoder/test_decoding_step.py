"""One token through a whole model in one call on a CPU says what transformers' own model says, whatever changes between two tokens."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from language_model import make_decoder
from optimized_models import close, step_calls
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.cache.growing import Growing
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_

SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


def pair(kind: str = "Llama", compute: str = "float", **more: Any) -> tuple[Any, Any]:
    """(as transformers computes it, in one call)"""
    torch.manual_seed(7)
    model = make_decoder(kind, **SIZES, **more).eval()
    model.set_attn_implementation("sdpa")
    fuse_(quantize_(model, Config("q4_0", compute=compute)))
    return model, replace_forwards_(copy.deepcopy(model))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call with a cache, whether it was one call."""
    return step_calls(monkeypatch)


def tokens(model: Any, cache: Any, *, of: int = 4, **how: Any) -> Tensor:
    """The logits after so many tokens, one by one behind a prompt of three."""
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        found = [model(ids, past_key_values=cache, **how).logits[:, -1:]]
        found += [model(torch.tensor([[8 + i]]), past_key_values=cache, **how).logits for i in range(of)]
    return torch.cat(found)


def new_data(module: nn.Module) -> None:
    torch.manual_seed(5)
    module.weight.data = torch.rand_like(module.weight) + 0.5  # type: ignore[assignment]


def in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight.mul_(2)  # type: ignore[operator]


def loaded(module: nn.Module, seed: int = 3) -> None:
    """Other codes."""
    torch.manual_seed(seed)
    float_ = nn.Linear(*module.weight.shape[::-1], bias=False)  # type: ignore[arg-type]
    module.load_state_dict(quantize_(nn.ModuleList([float_]), Config("q4_0"))[0].state_dict())


def replaced(model: Any, name: str) -> None:
    torch.manual_seed(4)
    shape = model.get_submodule(name).weight.shape
    model.set_submodule(name, nn.Embedding(*shape) if "embed" in name else nn.Linear(*shape[::-1], bias=False))


def again(model: Any, layer: int, at: int) -> None:
    """A copy of a layer in the place of another."""
    model.model.layers[at] = copy.deepcopy(model.model.layers[layer])
    model.model.layers[at].self_attn.layer_idx = at


def set_on(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {  # and whether it is one call afterwards
    "nothing": (lambda model: None, True),
    "the last norm, other data": (lambda model: new_data(model.model.norm), True),
    "the last norm, in place": (lambda model: in_place(model.model.norm), True),
    "a layer's norm": (lambda model: new_data(model.model.layers[1].input_layernorm), True),
    "a layer's norm, another parameter": (
        lambda model: setattr(model.model.layers[1].input_layernorm, "weight", nn.Parameter(torch.full((48,), 0.7))),
        True,
    ),
    "the last eps": (set_on("model.norm", "variance_epsilon", 0.5), True),
    "a layer's eps": (set_on("model.layers.1.input_layernorm", "variance_epsilon", 0.5), True),
    "the head's codes": (lambda model: loaded(model.lm_head), True),
    "a layer's codes": (lambda model: loaded(model.model.layers[0].mlp.down_proj), True),
    "how a product computes": (set_on("model.layers.0.mlp.down_proj", "compute", "int8"), True),
    "another head": (partial(replaced, name="lm_head"), True),
    "another embedding": (partial(replaced, name="model.embed_tokens"), True),
    "another product": (partial(replaced, name="model.layers.1.mlp.down_proj"), False),
    "positions": (lambda model: model.model.rotary_emb.inv_freq.mul_(0.5), True),
    "how far positions reach": (set_on("model.rotary_emb", "attention_scaling", 1.5), True),
    "a layer less": (lambda model: setattr(model.config, "num_hidden_layers", 1), False),
    "a layer that is gone": (lambda model: model.model.layers.pop(1), False),
    "a layer put in its place": (lambda model: again(model, 0, 1), True),
    "a layer in training": (lambda model: model.model.layers[0].train(), False),
    "a layer's own forward": (
        lambda model: setattr(model.model.layers[1], "forward", partial(twice, model.model.layers[1].forward)),
        False,
    ),
    "a hook": (lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *args: args[2] * 2), False),
    "a hook of the last norm": (lambda model: model.model.norm.register_forward_hook(lambda *args: args[2] * 2), False),
}


def twice(forward: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
    return forward(*args, **how) * 2


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_tokens(name: str, taken: list[bool]) -> None:
    change, still = CHANGES[name]
    models = pair()
    for model in models:
        tokens(model, DynamicCache(config=model.config))
    assert taken == [False, True, True, True, True]
    taken.clear()
    for model in models:
        change(model)
    plain, short = (tokens(model, DynamicCache(config=model.config)) for model in models)
    assert close(short, plain)
    assert taken == [False, *[still] * 4]


def test_what_is_asked_for_otherwise(taken: list[bool]) -> None:
    plain, short = pair()
    for how in ({"output_hidden_states": True}, {"output_attentions": True}, {"labels": torch.tensor([[3]])}):
        cache = [DynamicCache(config=plain.config) for _ in range(2)]
        for model, kept in zip((plain, short), cache, strict=True):
            tokens(model, kept, of=1)
        taken.clear()
        with torch.no_grad():
            actual, expected = (m(torch.tensor([[3]]), past_key_values=c, **how) for m, c in zip((short, plain), cache, strict=True))
        assert any(taken) == ("labels" in how), "the loss is the causal model's, the stack computes as without"
        assert close(actual.logits, expected.logits)
        assert actual.keys() == expected.keys()
    cache = [DynamicCache(config=plain.config) for _ in range(2)]
    found = [tokens(model, kept, return_dict=True, logits_to_keep=1) for model, kept in zip((plain, short), cache, strict=True)]
    assert close(*found)
    assert all(taken[-4:])
    as_tuple = short(torch.tensor([[3]]), past_key_values=cache[1], return_dict=False)
    assert type(as_tuple) is tuple
    with torch.no_grad():
        with torch.nn.modules.module.register_module_forward_hook(lambda *args: None):
            short(torch.tensor([[3]]), past_key_values=cache[1])
        assert not taken[-1]
        short(torch.tensor([[3]]), past_key_values=cache[1])
        assert taken[-1]
        short.train()(torch.tensor([[3]]), past_key_values=cache[1])
        assert not taken[-1]


def test_the_output_is_what_transformers_makes() -> None:
    _, short = pair()
    cache = DynamicCache(config=short.config)
    tokens(short, cache)
    with torch.no_grad():
        found = short(torch.tensor([[3]]), past_key_values=cache)
    expected = CausalLMOutputWithPast(logits=found.logits, past_key_values=cache)
    assert type(found) is CausalLMOutputWithPast
    assert vars(found) == vars(expected)
    assert list(found.items()) == list(expected.items())
    assert found.to_tuple() == expected.to_tuple()


def test_positions_masks_and_caches(taken: list[bool]) -> None:
    """Given ones, also of caches that take turns, and beyond the positions that are computed at once."""
    plain, short = pair()
    prompts = torch.randint(99, (3, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[0, :7] = mask[2, :3] = 0
    found = []
    for model in (plain, short):
        kept, other, rows = DynamicCache(config=model.config), DynamicCache(config=model.config), []
        seen = mask
        with torch.no_grad():
            model(prompts, attention_mask=seen, past_key_values=kept)
            model(prompts[:1, :2], past_key_values=other)
            for i in range(70):
                seen = torch.cat((seen, seen.new_ones(3, 1)), 1)
                where = seen.sum(1, keepdim=True) - 1
                ids = prompts[:, i % 60 : i % 60 + 1]
                rows.append(model(ids, attention_mask=seen, position_ids=where, past_key_values=kept).logits)
                rows.append(model(ids[:1], position_ids=torch.tensor([[9 * i]]), past_key_values=other).logits)
        found.append(torch.cat(rows))
    assert close(*found)
    assert sum(taken) == 140
    with torch.no_grad(), pytest.raises(ArgumentError, match="embedding ids lie in 0"):
        short(torch.tensor([[99]]), past_key_values=other)
    assert other.get_seq_length() == 72


@pytest.mark.parametrize("path", ["model.norm", "model.layers.1.mlp", "model.layers.0"])
def test_a_forward_of_its_own(path: str, taken: list[bool]) -> None:
    plain, short = pair()
    for part in (plain.get_submodule(path), short.get_submodule(path)):
        part.forward = partial(twice, part.forward)  # type: ignore[method-assign]
    assert close(tokens(short, DynamicCache()), tokens(plain, DynamicCache()))
    assert not any(taken)


def test_other_caches_and_kinds_of_attention(taken: list[bool]) -> None:
    plain, short = pair()
    static, grows = partial(StaticCache, config=plain.config, max_cache_len=16), partial(DynamicCache, config=plain.config)
    for make, attention in ((static, "sdpa"), (grows, "eager")):
        for model in (plain, short):
            model.set_attn_implementation(attention)
        assert close(tokens(short, make()), tokens(plain, make()))
        assert taken == [False, *[make is grows] * 4]
        taken.clear()


def test_the_model_keeps_its_name(tmp_path: Path, taken: list[bool]) -> None:
    _, short = pair()
    assert type(short).__name__ == "LlamaForCausalLM"
    short.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    expected = tokens(short, DynamicCache(config=short.config))
    assert close(tokens(again, DynamicCache(config=short.config)), expected)
    for one in (copy.deepcopy(short), pickle.loads(pickle.dumps(short))):  # noqa: S301
        taken.clear()
        assert close(tokens(one, DynamicCache(config=short.config)), expected)
        assert taken == [False, True, True, True, True]


def test_a_copy_of_a_growing_cache_is_an_ordinary_one() -> None:
    _, short = pair()
    cache = DynamicCache(config=short.config)
    tokens(short, cache)
    layer = cache.layers[0]
    assert isinstance(layer, Growing)
    for one in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        assert not isinstance(one, Growing)
        assert torch.equal(one.keys, layer.keys)
        assert torch.equal(one.values, layer.values)
    layer.keys = layer.keys[:, :, :-1]
    assert not isinstance(layer, Growing)
    assert layer.values.shape[2] == 7
