"""Decoder layers of many families take one token in few kernels and say what transformers' own layers say: on a GPU, or in torch's
operations on a CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from optimized_models import Shifted, close
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

from halfbyte.decoder import gpu_layer, kernels_gpu
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.program import layer_ops
from halfbyte.integrations.transformers.decoder import gpu_run, layer_gpu
from halfbyte.integrations.transformers.decoder.live_layer import layer_spec, shared_kv
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.optimize import forwards
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.integrations.transformers.optimize.self_check import relative_difference, tolerance
from halfbyte.machine import GPUS
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_
from halfbyte.ops.replay import tapes

EAGER = "gemma2", "gemma2, eager without a cap", "gpt_oss", "gpt_oss, no windows"
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
SIZES |= {"num_hidden_layers": 2, "vocab_size": 99, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WITHOUT = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"hidden_size": 192}  # heads of 32
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
ROPES = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 5e5), ("sliding_attention", 1e4))}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
SCORED = {**SIZES, **EXPERTS, "routed_scaling_factor": 1.5}
GLM = {**SCORED, "n_routed_experts": 12, "n_shared_experts": 2}
GEMMA4 = {**SIZES, "global_head_dim": 64, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
FULL = {"layer_types": ["full_attention"] * 2}
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 99, "use_double_wide_mlp": True}
KINDS: dict[str, partial[Any]] = {
    "llama": partial(transformers.LlamaConfig, **SIZES, attention_bias=True, mlp_bias=True),
    "mistral": partial(transformers.MistralConfig, **SIZES, sliding_window=16),
    "qwen2": partial(transformers.Qwen2Config, **WITHOUT, use_sliding_window=True, **MIXED),
    "qwen3": partial(transformers.Qwen3Config, **SIZES),
    "seed_oss": partial(transformers.SeedOssConfig, **SIZES),
    "ministral": partial(transformers.MinistralConfig, **SIZES, **MIXED),
    "phi3": partial(transformers.Phi3Config, **WITHOUT, sliding_window=16),
    "phi3, a part of each head": partial(transformers.Phi3Config, **WITHOUT, partial_rotary_factor=0.75),
    "gemma": partial(transformers.GemmaConfig, **SIZES),
    "gemma2": partial(transformers.Gemma2Config, **SIZES, query_pre_attn_scalar=10, attn_logit_softcapping=3.0, **MIXED),
    "gemma2, eager without a cap": partial(
        transformers.Gemma2Config, **SIZES, query_pre_attn_scalar=10, attn_logit_softcapping=None, **MIXED
    ),
    "gemma3": partial(transformers.Gemma3TextConfig, **SIZES, query_pre_attn_scalar=20, **MIXED),
    "gemma4": partial(transformers.Gemma4TextConfig, **GEMMA4, **MIXED, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4, no windows": partial(transformers.Gemma4TextConfig, **GEMMA4, **FULL, attention_k_eq_v=True),
    "gemma4, inputs of layers' own": partial(transformers.Gemma4TextConfig, **GEMMA4 | PER_LAYER, **FULL),
    "gemma4, keys in common": partial(transformers.Gemma4TextConfig, **GEMMA4 | PER_LAYER, **FULL, num_kv_shared_layers=1),
    "granite": partial(transformers.GraniteConfig, **WITHOUT, residual_multiplier=0.3, attention_multiplier=0.1),
    "smollm3": partial(transformers.SmolLM3Config, **SIZES, no_rope_layers=[1, 0]),
    "olmo2": partial(transformers.Olmo2Config, **WITHOUT),
    "olmo3": partial(transformers.Olmo3Config, **WITHOUT, **MIXED),
    "exaone4": partial(transformers.Exaone4Config, **SIZES, **MIXED),
    "glm": partial(transformers.GlmConfig, **SIZES),  # half of each head is turned
    "glm4": partial(transformers.Glm4Config, **SIZES, attention_bias=True),
    "ernie4_5": partial(transformers.Ernie4_5Config, **SIZES, use_bias=True),
    "hunyuan_v1_dense": partial(transformers.HunYuanDenseV1Config, **SIZES, attention_bias=True),
    "helium": partial(transformers.HeliumConfig, **SIZES | {"hidden_size": 192}),
    "stablelm": partial(transformers.StableLmConfig, **WITHOUT, use_qkv_bias=True),  # a quarter of each head is turned
    "cohere": partial(transformers.CohereConfig, **WITHOUT, attention_bias=True),
    "cohere2": partial(transformers.Cohere2Config, **SIZES, **MIXED),
    "arcee": partial(transformers.ArceeConfig, **SIZES, mlp_bias=True),
    "jais2": partial(transformers.Jais2Config, **SIZES, mlp_bias=True),
    "nemotron": partial(transformers.NemotronConfig, **SIZES),
    "phi": partial(transformers.PhiConfig, **WITHOUT),
    "starcoder2": partial(transformers.Starcoder2Config, **WITHOUT, use_bias=True),
    "olmoe": partial(transformers.OlmoeConfig, **WITHOUT, num_experts=6, num_experts_per_tok=2),
    "mixtral": partial(transformers.MixtralConfig, **SIZES, num_local_experts=4, sliding_window=16),
    "gpt_oss": partial(transformers.GptOssConfig, **SIZES, **MIXED, num_local_experts=8, num_experts_per_tok=3),
    "gpt_oss, no windows": partial(transformers.GptOssConfig, **SIZES, layer_types=["full_attention"] * 2, num_local_experts=8),
    "qwen2_moe": partial(transformers.Qwen2MoeConfig, **WITHOUT, **EXPERTS, shared_expert_intermediate_size=192),
    "qwen3_moe": partial(transformers.Qwen3MoeConfig, **SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe, shares of all": partial(transformers.Qwen3MoeConfig, **SIZES, **EXPERTS, mlp_only_layers=[1]),
    "mellum": partial(transformers.MellumConfig, **SIZES, **EXPERTS, **MIXED, rope_parameters=ROPES),
    "granite4": partial(
        transformers.GraniteMoeHybridConfig,
        **WITHOUT,
        num_local_experts=0,
        shared_intermediate_size=128,
        position_embedding_type="rope",
        mamba_n_heads=12,
        layer_types=["attention"] * 2,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
    ),
    "granitemoe": partial(
        transformers.GraniteMoeConfig,
        **WITHOUT,
        num_local_experts=8,
        num_experts_per_tok=3,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
    ),
    "glm4_moe": partial(transformers.Glm4MoeConfig, **GLM, first_k_dense_replace=0, use_qk_norm=True, attention_bias=True),
    "dots1": partial(transformers.Dots1Config, **GLM, **MIXED, norm_topk_prob=False),
    "solar_open": partial(transformers.SolarOpenConfig, **GLM),
    "exaone_moe": partial(transformers.ExaoneMoeConfig, **SCORED, **MIXED, mlp_layer_types=["dense", "sparse"]),
    "minimax_m2": partial(transformers.MiniMaxM2Config, **SIZES, num_local_experts=12, num_experts_per_tok=3),
    "hy_v3": partial(transformers.HYV3Config, **SIZES, **EXPERTS, router_scaling_factor=2.0, mlp_layer_types=["dense", "sparse"]),
    "ernie4_5_moe": partial(
        transformers.Ernie4_5_MoeConfig, **WITHOUT, moe_num_experts=8, moe_k=3, moe_intermediate_size=64, moe_layer_start_index=0
    ),
}


def pair(kind: str, device: torch.device, **how: Any) -> tuple[Any, Any]:
    """(as transformers computes it, in few kernels)"""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in ("norm", "bias", "sinks", "scalar")):
            torch.nn.init.normal_(tensor, 0.5, 0.3)
    model.to(device)
    model.set_attn_implementation("eager" if kind in EAGER else "sdpa")
    quantize_(model, Config("q4_0", **{"compute": "float", "skip": ["lm_head", "model.embed_tokens"]} | how))
    short = replace_forwards_(copy.deepcopy(fuse_(model)))
    assert is_compiled_stack(short.model)
    assert {forwards.why_not_native(layer) for layer in short.model.layers} == {None}
    return model, short


@functools.cache
def shared_pair(kind: str, device: torch.device) -> tuple[Any, Any]:
    """For tests that change neither of the models."""
    return pair(kind, device)


def done(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[bool]:
    """Of each call of that function from now on, whether it computed something and did not leave it to transformers by None."""
    found: list[bool] = []
    plain = getattr(module, name)

    def noting(*args: Any, **settings: Any) -> Tensor | None:
        y: Tensor | None = plain(*args, **settings)
        found.append(y is not None)
        return y

    monkeypatch.setattr(module, name, noting)
    return found


@pytest.fixture
def calls(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each layer called, whether it was in few kernels."""
    monkeypatch.setattr(gpu_run, "DEVICES", (device.type,))
    return done(monkeypatch, gpu_run.GpuRun, "_decode_layer")


def logits(model: Any, cache: Any, widths: tuple[int, ...], mask: Tensor | None = None, batch: int = 1) -> Tensor:
    """Of so many tokens at a time; those that a mask [B, T] hides are 0."""
    ids, at, found = torch.randint(3, 99, (batch, sum(widths)), generator=torch.Generator().manual_seed(1)).to(model.device), 0, []
    with torch.no_grad():
        for width in widths:
            seen = None if mask is None else mask[:, : at + width]
            y = model(input_ids=ids[:, at : at + width], attention_mask=seen, past_key_values=cache).logits
            found.append(y if mask is None else y * mask[:, at : at + width, None])
            at += width
    return torch.cat(found, 1)


def fixed(model: Any, size: int) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=size)


def decoded(model: Any, widths: tuple[int, ...]) -> list[bool]:
    """Of each layer called, whether it is a decode step of kernels: those of layers with windows are transformers' own."""
    sources = [shared.source if (shared := shared_kv(layer)).reuses else index for index, layer in enumerate(model.model.layers)]
    windows = [type(layer) is StaticSlidingWindowLayer for layer in fixed(model, 1).layers]
    return [width == 1 and source is not None and not windows[source] for width in widths for source in sources]


# Windows of 16 that become full, that are full after the prompt, and that take several tokens once they are full.
WIDTHS = [(9, *[1] * 24), (30, *[1] * 5), (9, *[1] * 12, 5, *[1] * 4, 17, *[1] * 3)]
PROMPTS = [(9, 5, 17, 3), (30, 1, 5), (9, 1, 7)]


# One for each kind of window: in all layers, in some, with a table of positions for each, with sinks, before layers that read its keys.
WINDOWED = ("mistral", "qwen2", "gemma3", "gemma4", "gpt_oss")


def of_each(widths: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """With all of these the kinds above; the last, in which windows become full and are, too, all kinds."""
    return [(kind, w) for kind in KINDS for w in (widths if kind in WINDOWED else widths[-1:])]


@pytest.mark.parametrize(("kind", "widths"), of_each(WIDTHS))
def test_the_same_logits(kind: str, widths: tuple[int, ...], device: torch.device, calls: list[bool]) -> None:
    plain, short = shared_pair(kind, device)
    found = logits(short, fixed(short, 64), widths)
    assert calls == decoded(short, widths)
    assert close(found, logits(plain, StaticCache(config=plain.config, max_cache_len=64), widths))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_several_sequences(kind: str, device: torch.device, calls: list[bool]) -> None:
    """Padding that a window still has, and that it has forgotten."""
    plain, short = shared_pair(kind, device)
    widths, mask = (12, *[1] * 20), torch.ones(3, 32, dtype=torch.long, device=device)
    mask[0, :3] = mask[2, :9] = 0
    found = logits(short, fixed(short, 64), widths, mask, 3)
    assert calls == decoded(short, widths)
    assert close(found, logits(plain, StaticCache(config=plain.config, max_cache_len=64), widths, mask, 3))


SHARED = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def of_layers_that_share(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Of Gemma 4: the last three layers read keys and values of the second and third."""
    sizes = {"num_hidden_layers": 6, "layer_types": SHARED, "sliding_window": 16, "num_kv_shared_layers": 3}
    monkeypatch.setitem(KINDS, "gemma4, shared", partial(transformers.Gemma4TextConfig, **GEMMA4 | PER_LAYER | sizes))
    return pair("gemma4, shared", device)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_layers_that_read_the_keys_of_others(
    widths: tuple[int, ...], padded: bool, device: torch.device, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, short = of_layers_that_share(device, monkeypatch)
    batch, mask = 1, None
    if padded:
        batch, mask = 2, torch.ones(2, sum(widths), dtype=torch.long, device=device)
        mask[0, :3] = 0
    found = logits(short, fixed(short, 64), widths, mask, batch)
    assert calls == decoded(short, widths)
    assert close(found, logits(plain, StaticCache(config=plain.config, max_cache_len=64), widths, mask, batch))
    for index in range(6):  # any of them may take transformers' steps
        calls.clear()
        handle = short.model.layers[index].mlp.down_proj.register_forward_hook(lambda *_: None)
        assert close(logits(short, fixed(short, 64), widths, mask, batch), found)
        assert calls == [by_kernels for place, by_kernels in enumerate(decoded(short, widths)) if place % 6 != index]
        handle.remove()


@pytest.fixture
def prompts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each layer called with what `token` has left, whether it was in few kernels."""
    monkeypatch.setattr(gpu_run, "DEVICES", (device.type,))
    return done(monkeypatch, gpu_run.GpuRun, "_prefill_layer")


@pytest.mark.parametrize(("kind", "widths"), of_each(PROMPTS))
def test_prompts(kind: str, widths: tuple[int, ...], device: torch.device, prompts: list[bool]) -> None:
    """The first, and those that go on: with caches that are static, and growing, and without any."""
    plain, short = shared_pair(kind, device)
    found = logits(short, fixed(short, 64), widths)
    several = 2 * sum(width > 1 for width in widths)
    steps = zip([width > 1 for width in widths for _ in short.model.layers], decoded(short, widths), strict=True)
    assert prompts == [is_prompt and takes_prompts(device) for is_prompt, is_decode in steps if not is_decode]
    assert close(found, logits(plain, StaticCache(config=plain.config, max_cache_len=64), widths))
    found = logits(short, DynamicCache(config=short.config), widths)
    # Of one token the layers that reuse keys and values are also computed so.
    assert 2 * several * takes_prompts(device) <= prompts.count(True) <= 2 * len(widths) * 2 * takes_prompts(device)
    assert close(found, logits(plain, DynamicCache(config=plain.config), widths))
    ids = torch.randint(3, 99, (2, 20), device=device)
    with torch.no_grad():
        assert close(short(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_padding(kind: str, device: torch.device, prompts: list[bool]) -> None:
    plain, short = shared_pair(kind, device)
    widths, mask = (20, 3, 9), torch.ones(3, 32, dtype=torch.long, device=device)
    mask[0, :3] = mask[2, :9] = 0
    found = logits(short, fixed(short, 64), widths, mask, 3)
    assert prompts == [takes_prompts(device)] * 6
    assert close(found, logits(plain, StaticCache(config=plain.config, max_cache_len=64), widths, mask, 3))


@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize("widths", [(9, 7), (30, 5), (9, 5, 17, 3)])
def test_prompts_of_layers_that_read_the_keys_of_others(
    widths: tuple[int, ...], keep: int, device: torch.device, prompts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute no more than the tokens whose logits are asked for."""
    plain, short = of_layers_that_share(device, monkeypatch)
    ids = torch.randint(3, 99, (2, sum(widths)), generator=torch.Generator().manual_seed(1)).to(device)
    for make in (partial(fixed, short, 64), partial(DynamicCache, config=plain.config), lambda: None):
        cache, other = make(), None if make() is None else DynamicCache(config=plain.config)
        for start, stop in pairwise(accumulate(widths, initial=0)):
            how = {"input_ids": ids[:, start:stop], "logits_to_keep": keep, "use_cache": cache is not None}
            with torch.no_grad():
                found, expected = (m(past_key_values=c, **how).logits for m, c in ((short, cache), (plain, other)))
            assert close(found, expected)
    if keep != 1:
        assert prompts == [takes_prompts(device)] * len(prompts)


def test_prompts_that_are_left_to_transformers(device: torch.device, prompts: list[bool]) -> None:
    """With gradients, hooks, other masks, attention weights, in training, after a part was replaced."""
    plain, short = pair("llama", device)
    ids = torch.randint(3, 99, (2, 20), device=device)
    later = ~torch.ones(20, 20, dtype=torch.bool, device=device).tril()
    expected = plain(input_ids=ids).logits.detach()
    assert close(short(input_ids=ids).logits.detach(), expected), "gradients"
    with torch.no_grad():
        floats = torch.zeros(2, 1, 20, 20, device=device).masked_fill(later, -torch.inf)
        assert close(short(input_ids=ids, attention_mask=floats).logits, expected)
        short.train()
        assert close(short(input_ids=ids).logits, expected)
        short.eval()
        seen = []
        handle = short.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
        assert not any(prompts)
        prompts.clear()
        assert close(short(input_ids=ids).logits, expected)
        assert seen == [1]
        taken = takes_prompts(device)
        assert prompts == [taken], "the other layer"
        handle.remove()
        assert close(short(input_ids=ids).logits, expected)
        assert prompts == [taken] * 3
        short.model.layers[1].mlp.down_proj = torch.nn.Linear(128, 96, bias=False, device=device)
        short(input_ids=ids)
        assert prompts == [taken] * 4


def takes_prompts(device: torch.device) -> bool:
    """In float32, on a GPU, they go transformers' way."""
    return device.type == "cpu"


def test_what_changes_attention_is_left_to_transformers(device: torch.device, prompts: list[bool]) -> None:
    """Masks for all tokens alike, other implementations and settings of attention, and norms that were replaced."""
    plain, short = pair("mistral", device)
    ids, seen = torch.randint(3, 99, (2, 30), device=device), torch.ones(2, 1, 1, 30, dtype=torch.bool, device=device)
    seen[0, :, :, :2] = False
    with torch.no_grad():
        assert close(short(ids, attention_mask=seen).logits, plain(ids, attention_mask=seen).logits)
        assert close(short(ids, is_causal=False).logits, plain(ids, is_causal=False).logits)
        for model in (plain, short):
            model.model.layers[1].input_layernorm = Shifted(model.model.layers[1].input_layernorm)
        assert not any(prompts)
        prompts.clear()
        assert close(short(ids).logits, plain(ids).logits)
        assert prompts == [takes_prompts(device)], "the other layer"
    transformers.AttentionInterface.register("custom_attention", custom_attention)
    transformers.AttentionMaskInterface.register("custom_attention", lambda *_, **__: None)
    plain, short = pair("mistral", device)
    for model in (plain, short):
        model.set_attn_implementation("custom_attention")
    prompts.clear()
    with torch.no_grad():
        assert close(short(ids).logits, plain(ids).logits)
    assert not any(prompts)
    assert forwards.why_not_native(short.model.layers[0]) == "its attention is custom_attention, not sdpa or halfbyte or eager"


def test_a_layer_that_changed(device: torch.device, calls: list[bool]) -> None:
    """A number that is baked into launches compiles the stack again, when the layer is called the next time."""
    plain, short = pair("llama", device)
    caches = [fixed(short, 64), StaticCache(config=plain.config, max_cache_len=64)]
    for model, cache in zip((short, plain), caches, strict=True):
        logits(model, cache, (9, 1))
    assert calls[-2:] == [True, True]
    for model in (plain, short):
        model.model.layers[1].post_attention_layernorm.variance_epsilon = 1.0
    for _ in range(2):
        calls.clear()
        assert close(logits(short, caches[0], (1,)), logits(plain, caches[1], (1,)))
        assert calls == [True, True]


@pytest.mark.parametrize("kind", ["llama", "glm4", "qwen2_moe", "gemma4, inputs of layers' own"])
def test_products_of_integers(kind: str, device: torch.device, calls: list[bool], prompts: list[bool]) -> None:
    """Activations are quantized as in the modules, each in blocks; those that round otherwise differ by a code."""
    plain, short = pair(kind, device, compute="int8")
    caches = fixed(short, 64), StaticCache(config=plain.config, max_cache_len=64)
    found, expected = (logits(model, cache, (9, 1, 1)) for model, cache in zip((short, plain), caches, strict=True))
    assert relative_difference(found.float(), expected.float()) <= tolerance(plain)
    assert calls == decoded(short, (9, 1, 1))
    assert prompts == [takes_prompts(device)] * 2


def custom_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any) -> tuple[Tensor, None]:
    """Masks what it masks by itself."""
    assert mask is None
    age = torch.arange(key.shape[2], device=query.device)[:, None] - torch.arange(key.shape[2], device=query.device)
    seen = ((age >= 0) & (age < how["sliding_window"]))[-query.shape[2] :]
    y = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=how["scaling"], enable_gqa=True)
    return y.transpose(1, 2), None


def test_a_mask_that_is_added_may_change(device: torch.device, prompts: list[bool]) -> None:
    """In place, from one call to the next, also where nothing counts changes."""
    plain, short = pair("llama", device)
    for model in (plain, short):
        model.set_attn_implementation("eager")
    ids = torch.randint(3, 99, (1, 12), device=device)
    with torch.inference_mode():
        mask = torch.zeros(1, 1, 12, 12, device=device).masked_fill(~torch.ones(12, 12, dtype=torch.bool, device=device).tril(), -torch.inf)
        for hidden in (0, 3):
            mask[..., 4:, :hidden] = torch.finfo(torch.float32).min
            assert close(short(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
    assert prompts == [takes_prompts(device)] * 4


def test_tokens_that_are_left_to_transformers(device: torch.device, calls: list[bool]) -> None:
    """With a hook within the layer, which is called, and after a norm was replaced."""
    plain, short = pair("llama", device)
    seen: list[int] = []
    handle = short.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    found = logits(short, fixed(short, 64), (9, 1))
    assert calls[-2:] == [False, True]
    assert len(seen) == 2
    handle.remove()
    for model in (plain, short):
        model.model.layers[1].input_layernorm = Shifted(model.model.layers[1].input_layernorm)
    changed = logits(short, fixed(short, 64), (9, 1))
    assert calls[-2:] == [False, True]
    assert close(changed, logits(plain, StaticCache(config=plain.config, max_cache_len=64), (9, 1)))
    assert not close(found, changed)


CHANGES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "llama": lambda layer: (layer.input_layernorm, "variance_epsilon"),
    "qwen3": lambda layer: (layer.self_attn, "scaling"),
    "granite": lambda layer: (layer, "residual_multiplier"),
    "qwen3_moe": lambda layer: (layer.mlp.gate, "top_k"),
    "glm4_moe": lambda layer: (layer.mlp.gate, "routed_scaling_factor"),
    "gpt_oss": lambda layer: (layer.mlp.experts.float_module, "limit"),
    "gemma4, no windows": lambda layer: (layer.self_attn, "scaling"),
    "gemma4, inputs of layers' own": lambda layer: (layer.post_per_layer_input_norm, "eps"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_layers_are_alike_that_launch_the_same(kind: str, device: torch.device) -> None:
    """Their launches are made again for each other: whatever number a kernel is given tells layers apart."""
    _, short = pair(kind, device)
    first, second = short.model.layers
    for index in (0, 1):
        found = [layer_gpu.lower_layer(layer, layer_spec(layer)) for layer in (first, second)]
        numbers = [lowered and lowered.launch_id for lowered in found]
        assert None not in numbers
        assert (numbers[0] == numbers[1]) == (index == 0)
        owner, name = CHANGES[kind](second)
        setattr(owner, name, getattr(owner, name) * 2)


def replayed_layers(*names: str) -> list[Any]:
    return [key for key, tape in tapes.items() if isinstance(key, tuple) and key[0] in names and tape.replay is not None]


@pytest.mark.parametrize("kind", ["llama", "granite", "glm4", "cohere", "phi", "starcoder2", "gemma", "phi3", "mixtral", "olmo2"])
def test_prompts_by_one_call_for_a_layer(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches of a layer at once: the same bits, for other tokens, too, and with a mask."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    tapes.clear()
    _, short = pair(kind, device)
    short.to(torch.bfloat16)
    mask = torch.ones(2, 20, dtype=torch.long, device=device)
    mask[0, :3] = 0
    for seen in (None, mask):
        first, *more = (logits(short, fixed(short, 64), (20,), seen, 2) for _ in range(4))
        assert all(torch.equal(first, found) for found in more)
        ids, cache = torch.randint(3, 99, (2, 20), device=device), fixed(short, 64)
        with torch.no_grad():
            once = short(input_ids=ids, attention_mask=seen, past_key_values=cache).logits
            tapes.clear()
            again = short(input_ids=ids, attention_mask=seen, past_key_values=fixed(short, 64)).logits
        assert torch.equal(once, again)
        found = replayed_layers("prompt", "others", "before", "after")
        assert len(found) == {"phi3": 2, "mixtral": 2}.get(kind, 1), "windows take keys and values by themselves"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_by_one_call_for_a_layer(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches at once: the same bits, for one sequence and for several, with padding, with windows that become full."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    tapes.clear()
    _, short = pair(kind, device)
    short.to(torch.bfloat16)
    mask = torch.ones(3, 33, dtype=torch.long, device=device)
    mask[0, :3] = 0
    cases = (None, 1), (mask, 3)
    found = [[logits(short, fixed(short, 64), (9, *[1] * 24), *case) for _ in range(2)] for case in cases]
    kinds = {index == 0 for index, by_kernels in enumerate(decoded(short, (1,))) if by_kernels}
    reasons = {str(key[0]): tape.why_not_replayed for key, tape in tapes.items() if isinstance(key, tuple)}
    if getattr(short.config, "attn_logit_softcapping", None) is not None:  # no kernel has a soft cap of scores: attention is torch's
        assert not replayed_layers("token")
    else:
        assert len(replayed_layers("token")) >= 2 * len(kinds), f"the first layer and the others, each with and without a mask: {reasons}"
    monkeypatch.setattr(gpu_layer, "replay_layer", lambda _name, _layer, steps, *_, **__: steps())
    for (first, again), case in zip(found, cases, strict=True):
        assert torch.equal(first, again)
        assert torch.equal(first, logits(short, fixed(short, 64), (9, *[1] * 24), *case))


# What Llama's steps are not enough for.
OTHERS = "glm4", "cohere", "starcoder2", "phi", "gpt_oss, no windows", "qwen2_moe", "glm4_moe"
OTHERS += "gemma4, no windows", "gemma4, keys in common"


@pytest.mark.parametrize("kind", OTHERS)
def test_the_same_text(kind: str, device: torch.device, calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    by_model = done(monkeypatch, GpuModel, "decode_tokens")  # on a GPU
    plain, short = shared_pair(kind, device)
    ids = torch.randint(3, 99, (1, 5), generator=torch.Generator().manual_seed(2)).to(device)
    how = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    actual = short.generate(ids, past_key_values=fixed(short, 40), **how)
    how["disable_compile"] = True  # which transformers would otherwise do for a static cache
    assert any(calls) or any(by_model)
    assert torch.equal(actual, plain.generate(ids, past_key_values=StaticCache(config=plain.config, max_cache_len=40), **how))


@pytest.mark.parametrize("kind", OTHERS)
def test_under_torch_compile(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "DEVICES", (device.type,))
    _, short = pair(kind, device)
    expected = logits(short, fixed(short, 40), (5, 1, 1))
    traced = done(monkeypatch, gpu_run, "decode")
    torch._dynamo.reset()
    step: Any = torch.compile(short.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    cache: Any = StaticCache(config=short.config, max_cache_len=40)
    assert close(logits(short, cache, (5,)), expected[:, :5])
    ids = torch.randint(3, 99, (1, 7), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        for at in (5, 6):
            assert close(step(input_ids=ids[:, at : at + 1], past_key_values=cache).logits, expected[:, at : at + 1])
    assert traced == [True] * 4, "two layers, two steps"


def test_values_of_another_format_than_queries(device: torch.device, calls: list[bool]) -> None:
    """As Q4_K_M has them: a product for each."""
    plain, short = pair("llama", device, overrides={"*.v_proj": "q8_0"})
    found = logits(short, fixed(short, 32), (9, 1, 1))
    assert calls == [False] * 2 + [True] * 4
    assert close(found, logits(plain, StaticCache(config=plain.config, max_cache_len=32), (9, 1, 1)))


def test_half_precision(device: torch.device, calls: list[bool]) -> None:
    """bfloat16 rounds each layer's result, and what lies between, by some of 2^-8; so does transformers, a few times more."""
    for kind in (kinds := ("gemma3", "gemma4", "gemma4, keys in common", "granite", "olmo2", "phi3", "cohere", "nemotron")):
        plain, short = (model.to(torch.bfloat16) for model in pair(kind, device))
        found = logits(short, fixed(short, 32), (9, 1, 1)).float()
        expected = logits(plain, StaticCache(config=plain.config, max_cache_len=32), (9, 1, 1)).float()
        assert float((found - expected).norm()) <= 0.1 * float(expected.norm()), kind
    assert calls == [by_kernels for kind in kinds for by_kernels in decoded(shared_pair(kind, device)[1], (9, 1, 1))]


def test_what_explain_says_of_a_layer(device: torch.device) -> None:
    found = {}
    kinds = "gemma3", "olmo2", "granite", "glm4", "stablelm", "cohere", "arcee", "starcoder2", "gpt_oss", "qwen2_moe", "glm4_moe"
    kinds += "gemma4", "gemma4, keys in common"
    for kind in kinds:
        _, short = pair(kind, device)
        short.to(torch.bfloat16)
        spec = layer_spec(short.model.layers[-1])
        assert not isinstance(spec, str), kind
        kernels = kernels_gpu.layer_kernels(layer_ops(spec), GPUS["sm_90"])
        assert all(lowered.reason is None for lowered in kernels), kind
        found[kind] = {lowered.op.name: lowered.kernel or f"in {lowered.fused_into}" for lowered in kernels}
    assert [found["gemma3"][name] for name in ("attn_post_norm", "attn_residual", "mlp_norm")] == ["norm", *["in attn_post_norm"] * 2]
    assert [*found["gemma4"]][:2] == ["attn_norm", "qk"]
    shared = found["gemma4, keys in common"]
    assert [*shared][:2] == ["attn_norm", "q_proj"]
    assert [*shared.items()][-5:] == [
        ("per_layer_input_gate", "skinny"),
        ("per_layer_gate", "gates"),
        ("per_layer_projection", "skinny"),
        ("per_layer_post_norm", "norm"),
        ("per_layer_residual", "in per_layer_post_norm"),
    ]
    assert "attn_norm" not in found["olmo2"]
    assert [found[kind]["qk_norm"] for kind in ("olmo2", "gemma3")] == ["norm", "in attention"]
    assert [found[kind]["attn_norm"] for kind in ("stablelm", "cohere", "starcoder2")] == ["norm"] * 3
    assert "mlp_norm" not in found["cohere"]
    assert [found[kind]["activation"] for kind in ("arcee", "starcoder2")] == ["gates"] * 2
    assert [found[kind]["experts.gate"] for kind in ("gpt_oss", "qwen2_moe")] == ["gates", "in experts.gate_up"]
    assert found["qwen2_moe"]["shared_expert_gate"] == "in router"
    assert found["glm4_moe"]["mlp_residual"] == "routing"
