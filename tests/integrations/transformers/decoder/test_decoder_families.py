"""Decoder layers of families with other formulas than Llama's: in one call on a CPU they say what transformers' own layers say."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tiny_decoders
import transformers
from optimized_models import close, layer_calls, model_pair
from transformers import DynamicCache, StaticCache

from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
from halfbyte.integrations.transformers.decoder import gpu_run
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.optimize import forwards
from halfbyte.integrations.transformers.optimize.explain_model import explain_model
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_

SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96}
SIZES |= {"num_hidden_layers": 2, "vocab_size": 99, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WITHOUT = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"hidden_size": 96}  # heads of 16
FULL = ["full_attention"] * 2
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}
PER_LAYER_KIND = "gemma4, inputs of layers' own"
GEMMA4 = {**SIZES, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 99}


def gemma4(**more: Any) -> Any:
    """All of whose layers see all tokens."""
    return transformers.Gemma4TextConfig(**GEMMA4 | {"layer_types": FULL} | more)


KINDS: dict[str, Callable[[], Any]] = {
    "phi3": partial(transformers.Phi3Config, **WITHOUT),
    "phi3, a part of each head": lambda: transformers.Phi3Config(
        **WITHOUT | {"num_attention_heads": 3, "num_key_value_heads": 1}, partial_rotary_factor=0.75
    ),
    "gemma": partial(transformers.GemmaConfig, **SIZES),
    "gemma2": partial(transformers.Gemma2Config, **SIZES, query_pre_attn_scalar=10, attn_logit_softcapping=3.0),
    "gemma2 without a cap": partial(transformers.Gemma2Config, **SIZES, attn_logit_softcapping=None),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES | {"num_key_value_heads": 1, "head_dim": 256}, query_pre_attn_scalar=100),
    "gemma4": lambda: gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    PER_LAYER_KIND: lambda: gemma4(**PER_LAYER, num_kv_shared_layers=1, use_double_wide_mlp=True),
    "granite": partial(transformers.GraniteConfig, **WITHOUT, residual_multiplier=0.3, attention_multiplier=0.1, mlp_bias=True),
    "smollm3": partial(transformers.SmolLM3Config, **SIZES, no_rope_layers=[1, 0]),
    "olmo2": partial(transformers.Olmo2Config, **WITHOUT),
    "olmo3": partial(transformers.Olmo3Config, **WITHOUT, layer_types=FULL),
    "seed_oss": partial(transformers.SeedOssConfig, **SIZES),
    "glm": partial(transformers.GlmConfig, **SIZES | {"head_dim": 32}),
    "glm4": partial(transformers.Glm4Config, **SIZES | {"head_dim": 32}, attention_bias=True),
    "ernie4_5": partial(transformers.Ernie4_5Config, **SIZES, use_bias=True),
    "hunyuan_v1_dense": partial(transformers.HunYuanDenseV1Config, **SIZES, attention_bias=True),
    "helium": partial(transformers.HeliumConfig, **SIZES | {"hidden_size": 144}),
    "exaone4": partial(transformers.Exaone4Config, **SIZES, sliding_window=None, layer_types=FULL),
    "exaone4, without positions": partial(transformers.Exaone4Config, **SIZES, sliding_window=7, layer_types=FULL),
    "cwm": partial(transformers.CwmConfig, **SIZES, layer_types=FULL),
    "cohere": partial(transformers.CohereConfig, **WITHOUT, attention_bias=True),
    "cohere2": partial(transformers.Cohere2Config, **SIZES, sliding_window=7, layer_types=FULL),
    "arcee": partial(transformers.ArceeConfig, **SIZES, mlp_bias=True),
    "jais2": partial(transformers.Jais2Config, **SIZES, mlp_bias=True),
    "nemotron": partial(transformers.NemotronConfig, **SIZES | {"head_dim": 32}),
    "phi": partial(transformers.PhiConfig, **WITHOUT | {"num_attention_heads": 3, "num_key_value_heads": 1}),
    "stablelm": partial(transformers.StableLmConfig, **WITHOUT | {"num_attention_heads": 3, "num_key_value_heads": 1}, use_qkv_bias=True),
    "starcoder2": partial(transformers.Starcoder2Config, **WITHOUT, use_bias=True),
    "ministral": partial(transformers.MinistralConfig, **SIZES, layer_types=FULL),
    "ministral3": lambda: transformers.Ministral3Config(**SIZES, rope_parameters={**YARN, "original_max_position_embeddings": 400}),
}
LEFT = {"ministral3": "queries of its attention have a factor that depends on their positions, but in `generate` of short texts"}
EAGER = "gemma2", "gemma2 without a cap"  # transformers' default for it, as torch's attention has no cap


def pair(kind: str, layer_types: list[str] | None = None, **how: Any) -> tuple[Any, Any]:
    """(as transformers computes it, in one call a layer)"""
    torch.manual_seed(7)
    config = KINDS[kind]()
    if hasattr(config, "layer_types") and config.layer_types is not None:
        config.layer_types = FULL if layer_types is None else layer_types  # transformers' own are sliding ones, too
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in ("norm", "bias", "scalar")):
            torch.nn.init.normal_(tensor, 0.5, 0.3)
    assert model.config._attn_implementation == ("eager" if kind in EAGER else "sdpa")
    quantize_(model, Config("q4_0", **{"compute": "float", "skip": ["lm_head", "model.embed_tokens"]} | how))
    return model_pair(model)


@functools.cache
def shared_pair(kind: str) -> tuple[Any, Any]:
    """For tests that change neither of the models."""
    return pair(kind)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return layer_calls(monkeypatch)


def logits(model: Any, cache: Any, widths: tuple[int, ...], mask: Tensor | None = None, batch: int = 1) -> Tensor:
    """Of so many tokens at a time; those that a mask [B, T] hides are 0."""
    ids, at, found = torch.randint(3, 99, (batch, sum(widths)), generator=torch.Generator().manual_seed(1)), 0, []
    with torch.no_grad():
        for width in widths:
            seen = None if mask is None else mask[:, : at + width]
            y = model(input_ids=ids[:, at : at + width], attention_mask=seen, past_key_values=cache).logits
            found.append(y if mask is None else y * mask[:, at : at + width, None])
            at += width
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_logits(kind: str, calls: list[bool]) -> None:
    plain, short = shared_pair(kind)
    # 300: piece by piece, which has nothing to do with the kind of cache
    dynamic, static = partial(DynamicCache, config=plain.config), partial(StaticCache, config=plain.config, max_cache_len=64)
    for make, widths in ((dynamic, (13, 1, 1, 4, 1, 300, 1)), (static, (13, 1, 1, 4, 1, 30, 1))):
        calls.clear()
        assert close(*(logits(model, make(), widths) for model in (short, plain)))
        assert calls == [True] * 14
    with torch.no_grad():
        ids = torch.arange(30).view(2, 15)
        assert close(*(model(input_ids=ids, use_cache=False).logits for model in (short, plain)))
    assert calls == [True] * 16


@pytest.mark.parametrize("kind", ["exaone4, without positions", "gemma2", "cwm", "cohere2"])
def test_windows(kind: str, calls: list[bool]) -> None:
    """In the first layer, where EXAONE alone has positions."""
    plain, short = pair(kind, ["sliding_attention", "full_attention"])
    for model in (plain, short):
        model.config.sliding_window = model.model.layers[0].self_attn.sliding_window = 7
    widths = (4, 1, 1, 5, 1, 1, 30, 1)
    assert close(*(logits(model, DynamicCache(config=plain.config), widths) for model in (short, plain)))
    assert calls == [True] * 16


# Of Gemma 4: the last three layers read keys and values of the second and third.
SHARED = ["sliding_attention", "sliding_attention", "full_attention"] * 2
WIDTHS_OF_WINDOWS = (4, 1, 1, 5, 1, 1, 30, 1, 70, 1)


@pytest.mark.parametrize("more", [{}, {**PER_LAYER, "num_kv_shared_layers": 3}], ids=["plain", "shared"])
def test_windows_of_heads_of_other_sizes(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, calls: list[bool]) -> None:
    """Gemma 4: with padding, with a cache in 8 bits and with none; of the last tokens alone; with layers that take transformers' steps."""
    sizes = {"num_hidden_layers": 6, "layer_types": SHARED, "sliding_window": 7, **more}
    monkeypatch.setitem(KINDS, "gemma4", lambda: gemma4(**sizes))
    plain, short = pair("gemma4", SHARED)
    mask, ids = torch.ones(2, sum(WIDTHS_OF_WINDOWS), dtype=torch.long), torch.randint(3, 99, (2, 40))
    mask[0, :3] = 0
    for seen in (None, mask):
        found = [logits(model, DynamicCache(config=model.config), WIDTHS_OF_WINDOWS, seen, 2) for model in (short, plain)]
        assert close(*found)
    actual, expected = (logits(model, Int8Cache(plain.config), WIDTHS_OF_WINDOWS) for model in (short, plain))
    assert float((actual - expected).norm()) <= 1e-2 * float(expected.norm())  # as below
    assert calls == [True] * (3 * 6 * len(WIDTHS_OF_WINDOWS))
    calls.clear()
    for keep in (0, 1, 3):
        with torch.no_grad():
            caches = [DynamicCache(config=plain.config) for _ in range(2)]
            for some in (ids[:, :25], ids[:, 25:]):
                found = [
                    model(input_ids=some, past_key_values=cache, logits_to_keep=keep).logits
                    for model, cache in zip((short, plain), caches, strict=True)
                ]
                assert close(*found)
            assert close(*(model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits for model in (short, plain)))
    assert calls == [True] * (3 * 3 * 6)
    for index in range(6):  # what is read by others, and what reads others'
        calls.clear()
        handle = short.model.layers[index].mlp.down_proj.register_forward_hook(lambda *_: None)
        for make in (partial(DynamicCache, config=plain.config), partial(Int8Cache, plain.config)):
            actual, expected = (logits(model, make(), (5, 1, 9, 1)) for model in (short, plain))
            assert float((actual - expected).norm()) <= 1e-2 * float(expected.norm())
        handle.remove()
        assert calls == [layer != index for _ in range(8) for layer in range(6)]


def test_inputs_that_are_given(calls: list[bool]) -> None:
    """As a model with images gives them, whose layers have Gemma 4's as the text's."""
    plain, short = pair(PER_LAYER_KIND)
    x, per_layer_input = torch.randn(2, 9, 48), torch.randn(2, 9, 2, 32)
    with torch.no_grad():
        assert close(*(model.model(inputs_embeds=x, per_layer_inputs=per_layer_input).last_hidden_state for model in (short, plain)))
    assert calls == [True] * 2


def test_experts_of_gemma4_are_left() -> None:
    config = gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
    model = quantize_(transformers.AutoModelForCausalLM.from_config(config).eval(), Config("q4_0"))
    short = replace_forwards_(fuse_(model))
    for device in ("cpu", "cuda"):
        assert forwards.why_not_native(short.model.layers[0], device) == "its config has enable_moe_block = True"


@torch.no_grad()
def test_a_cache_without_layers(calls: list[bool]) -> None:
    """As hybrids have it in older versions of transformers."""

    class Empty:
        def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    plain, short = pair("granite")
    x, at = torch.randn(1, 3, 96), torch.arange(3)[None]
    rotary = plain.model.rotary_emb(x, at)
    found = [model.model.layers[0](x, position_ids=at, past_key_values=Empty(), position_embeddings=rotary) for model in (short, plain)]
    assert torch.equal(*found)
    assert not any(calls)


HYBRID = {
    "num_hidden_layers": 3,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "layer_types": ["linear_attention", "attention", "linear_attention"],
}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "position_embedding_type = None"),
        ({"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"}, "num_local_experts = 4"),
        ({"position_embedding_type": "rope"}, None),
    ],
    ids=["no positions", "experts", "taken"],
)
@torch.no_grad()
def test_of_hybrids_layers_with_attention(more: dict[str, Any], reason: str | None) -> None:
    config = transformers.GraniteMoeHybridConfig(**WITHOUT | HYBRID | {"num_local_experts": 0} | more)
    torch.manual_seed(3)
    plain = quantize_(transformers.AutoModelForCausalLM.from_config(config).eval(), Config("q4_0", compute="float"))
    short = replace_forwards_(fuse_(copy.deepcopy(plain)))
    taken = reason is None
    assert is_compiled_stack(short.model) == taken
    assert forwards.why_not_native(plain.model.layers[1], "cpu") == (None if taken else f"its config has {reason}")
    ids = torch.randint(3, 99, (1, 9), generator=torch.Generator().manual_seed(1))
    kept = [transformers.DynamicCache(config=config) for _ in range(2)]
    for piece in (ids, ids[:, :1], ids[:, 1:2]):
        actual, expected = (model(piece, past_key_values=cache).logits for model, cache in zip((short, plain), kept, strict=True))
        assert close(actual, expected)


def test_layers_that_read_others_keys_with_static_caches(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of static caches take transformers' steps, but not the layers that read them: the mask tells which keys are seen."""
    monkeypatch.setitem(
        KINDS, "gemma4", lambda: gemma4(**PER_LAYER, num_hidden_layers=6, layer_types=SHARED, sliding_window=7, num_kv_shared_layers=3)
    )
    plain, short = pair("gemma4", SHARED)
    assert close(*(logits(model, StaticCache(config=plain.config, max_cache_len=64), (5, 1, 30, 1, 1)) for model in (short, plain)))
    assert calls == [kind == "full_attention" or index >= 3 for _ in range(5) for index, kind in enumerate(SHARED)]


@pytest.mark.parametrize("widths", [(5, 30, 4), (3, 2)])  # the window has 7 tokens
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [None, DynamicCache, StaticCache])
def test_layers_that_read_others_keys_on_a_gpu(
    kind: Any, padded: bool, widths: tuple[int, ...], calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in parts, on a CPU as if that were one: kernels compute all layers."""
    monkeypatch.setattr(gpu_run, "DEVICES", ("cpu",))
    monkeypatch.setitem(
        KINDS, "gemma4", lambda: gemma4(**PER_LAYER, num_hidden_layers=6, layer_types=SHARED, sliding_window=7, num_kv_shared_layers=3)
    )
    plain, short = pair("gemma4", SHARED)
    mask = torch.ones(2, sum(widths), dtype=torch.int64)
    mask[1, :2] = 0
    sizes = {"max_cache_len": 64} if kind is StaticCache else {}
    found = []
    for model in (short, plain):
        cache = None if kind is None else kind(config=plain.config, **sizes)
        found.append(logits(model, cache, widths if kind else widths[:1], mask if padded else None, batch=2))
    assert close(*found)
    assert calls == []


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_several_sequences(kind: str, calls: list[bool]) -> None:
    plain, short = shared_pair(kind)
    widths, mask = (12, 1, 2, 9, 1), torch.ones(3, 25, dtype=torch.long)
    mask[0, :3] = mask[2, :5] = 0
    for seen in (mask, mask.bool()):
        assert close(*(logits(model, DynamicCache(config=model.config), widths, seen, 3) for model in (short, plain)))
    assert calls == [True] * 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_8_bits(kind: str, calls: list[bool]) -> None:
    plain, short = shared_pair(kind)
    actual, expected = (logits(model, Int8Cache(plain.config), (13, 1, 30, 1)) for model in (short, plain))
    assert calls == [True] * 8
    # The codes of a key that differs in its last bits may differ by one where it is just between two: 1/127 of the largest of 32.
    assert float((actual - expected).norm()) <= 1e-2 * float(expected.norm())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in tiny_decoders.KINDS])
def test_the_same_text(kind: str) -> None:
    """In a decode step of the whole stack, of the kinds that test_decoding_models.py has not."""
    plain, short = pair(kind, skip=[])
    ids = torch.randint(3, 99, (1, 5), generator=torch.Generator().manual_seed(2))
    how = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    actual, expected = (model.generate(ids, **how) for model in (short, plain))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_integers(kind: str, calls: list[bool]) -> None:
    """Quantized activations: a code that flips where one is just between two moves an output by 1/127 of the largest times a weight."""
    plain, short = pair(kind, compute="int8")
    actual, expected = (logits(model, DynamicCache(config=model.config), (13, 1, 4)) for model in (short, plain))
    assert calls == [True] * 6
    assert float((actual - expected).norm()) <= 0.02 * float(expected.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_what_gpus_leave_to_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, short = pair(kind) if kind in LEFT else shared_pair(kind)
    reason = forwards.why_not_native(short.model.layers[0], "cuda")
    assert reason == forwards.why_not_native(plain.model.layers[0], "cuda") == LEFT.get(kind)
    if reason is None:  # `test_decoding.py` has these
        return
    assert explain_model(short, "sm_90").groups[0].reason == reason
    monkeypatch.setattr(gpu_run, "DEVICES", ("cpu",))  # as if that were one
    caches = [StaticCache(config=plain.config, max_cache_len=20) for _ in range(2)]
    assert torch.equal(*(logits(model, cache, (5, 1, 1)) for model, cache in zip((short, plain), caches, strict=True)))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe"])
def test_text_with_images(kind: str, calls: list[bool]) -> None:
    """Positions along three axes; after a layer of Qwen3-VL something is added to the tokens of images."""
    torch.manual_seed(7)
    names = {
        "qwen2_vl": "Qwen2VL",
        "qwen2_5_vl": "Qwen2_5_VL",
        "qwen3_vl": "Qwen3VL",
        "qwen3_vl_moe": "Qwen3VLMoe",
        "glm4v_moe": "Glm4vMoe",
    }
    name = names[kind]
    sizes = {**WITHOUT, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64} if kind.endswith("moe") else {}
    sizes |= {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1} if kind.startswith("glm") else {}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1] if kind.startswith("glm") else [4, 2, 2]}
    config = getattr(transformers, f"{name}TextConfig")(**sizes, rope_parameters=rope, **({"head_dim": 16} if "3" in kind else {}))
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    plain = getattr(module, f"{name}TextModel")(config).eval()
    for one, parameter in plain.named_parameters():
        if "norm" in one or "bias" in one:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    fuse_(quantize_(plain, Config("q4_0", compute="float")))
    short = replace_forwards_(copy.deepcopy(plain))
    assert is_compiled_stack(short)
    x, places, found = torch.randn(1, 10, 48), torch.randint(0, 20, (3, 1, 10)).sort(-1).values, []
    added = {"visual_pos_masks": torch.arange(9)[None] % 3 > 1, "deepstack_visual_embeds": [torch.ones(3, 48)]} if "3" in kind else {}
    with torch.no_grad():
        for model in (short, plain):
            cache = DynamicCache(config=config)
            y = model(inputs_embeds=x[:, :9], position_ids=places[..., :9], past_key_values=cache, use_cache=True, **added)
            z = model(inputs_embeds=x[:, 9:], position_ids=places[..., 9:], past_key_values=cache, use_cache=True)
            found.append(torch.cat((y.last_hidden_state, z.last_hidden_state), 1))
    assert close(*found)
    assert calls == [True] * 4


def test_queries_with_a_factor_are_left(calls: list[bool]) -> None:
    """From a position on: before it all tokens of a call are computed so."""
    plain, short = pair("ministral3")
    for model in (plain, short):
        model.config.rope_parameters["original_max_position_embeddings"] = 20
    found = logits(short, DynamicCache(config=plain.config), (13, 1, 6, 1, 4))
    assert close(found, logits(plain, DynamicCache(config=plain.config), (13, 1, 6, 1, 4)))
    assert calls == [True] * 6
    assert close(*(logits(model, DynamicCache(config=plain.config), (13, 8)) for model in (short, plain)))
    assert calls == [True] * 8


def test_queries_with_a_factor_under_torch_compile() -> None:
    plain, short = pair("ministral3")
    found = []
    for model in (short, plain):
        cache: Any = StaticCache(config=plain.config, max_cache_len=32)
        torch._dynamo.reset()
        step: Any = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if model is short else model
        ids = torch.arange(3, 9)[None]
        with torch.no_grad():
            model(input_ids=ids[:, :5], past_key_values=cache)
            found.append(step(input_ids=ids[:, 5:], past_key_values=cache).logits)
    assert close(*found)


def test_what_is_said() -> None:
    for kind in KINDS:
        _, short = shared_pair(kind)
        assert short.model.halfbyte_remark == "2 of 2 layers take native calls"
        text = str(explain_model(short))
        assert "as transformers computes it" not in text
        assert ("attn_post_norm" in text) == (kind.startswith(("gemma2", "gemma3", "gemma4", "olmo", "glm4", "exaone")))
        assert ("multiplier 0.3" in text) == (kind == "granite")
        assert ("gelu_tanh(gate) * up" in text) == kind.startswith("gemma")


@pytest.mark.parametrize("kind", ["granite", "gemma2", "gemma4"])
def test_a_replaced_activation_is_left_to_transformers(kind: str, calls: list[bool]) -> None:
    plain, short = pair(kind)
    cache = DynamicCache(config=plain.config)
    logits(short, cache, (5, 1))
    for model in (plain, short):
        mlp = model.model.layers[1].mlp
        name = next(name for name in ("act_fn", "act") if hasattr(mlp, name))
        setattr(mlp, name, torch.nn.Tanh())
    assert close(*(logits(model, DynamicCache(config=model.config), (5, 1)) for model in (short, plain)))
    for device in ("cpu", "cuda"):
        assert forwards.why_not_native(short.model.layers[1], device) == "its activation was replaced by a Tanh"
    assert "its activation was replaced by a Tanh" in short.model.halfbyte_remark


def test_what_changes_is_seen(calls: list[bool]) -> None:
    for kind, change in (
        ("granite", lambda layer: setattr(layer, "residual_multiplier", 0.7)),
        ("gemma2", lambda layer: setattr(layer.self_attn, "attn_logit_softcapping", 9.0)),
        ("smollm3", lambda layer: setattr(layer.self_attn, "use_rope", False)),
        ("gemma3", lambda layer: setattr(layer.post_feedforward_layernorm, "eps", 0.5)),
        ("gemma3", lambda layer: layer.self_attn.q_norm.weight.data.mul_(3)),
        ("olmo2", lambda layer: setattr(layer.self_attn, "q_norm", copy.deepcopy(layer.self_attn.k_norm))),
        ("gemma4", lambda layer: layer.layer_scalar.mul_(0.5)),
        (PER_LAYER_KIND, lambda layer: setattr(layer, "layer_scalar", layer.layer_scalar * 3)),
        (PER_LAYER_KIND, lambda layer: setattr(layer.post_per_layer_input_norm, "eps", 0.5)),
        (PER_LAYER_KIND, lambda layer: layer.post_per_layer_input_norm.weight.data.mul_(3)),
    ):
        models = pair(kind)
        if kind == "olmo2":
            models = pair("gemma3")
        before = logits(models[1], DynamicCache(), (7, 1))
        for model in models:
            change(model.model.layers[0])
        calls.clear()
        plain, short = (logits(model, DynamicCache(config=model.config), (7, 1)) for model in models)
        assert calls == [True] * 4
        assert close(short, plain)
        assert not close(short, before)


def test_what_goes_the_long_way(calls: list[bool]) -> None:
    """Masks that show what comes later, as those of images in Gemma 3 and 4, and masks that do more than hide, as booleans that eager
    attention adds to its scores."""
    ids = torch.arange(8).view(1, 8)
    both = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    earlier = both.tril()
    with torch.no_grad():
        for kind, mask, taken in ((kind, *of_mask) for kind in ("gemma3", PER_LAYER_KIND) for of_mask in ((both, False), (earlier, True))):
            plain, short = pair(kind)
            calls.clear()
            masks = {"full_attention": mask, "sliding_attention": mask}
            assert close(*(model.model(input_ids=ids, attention_mask=masks).last_hidden_state for model in (short, plain)))
            assert calls == [taken] * 2
        plain, short = pair("gemma2")
        hidden = torch.zeros(1, 1, 8, 8).masked_fill(~earlier, torch.finfo().min)
        for added, taken in ((hidden, True), (hidden + 0.5, False), (hidden + torch.eye(8), False), (earlier, False)):
            calls.clear()
            masks = {"full_attention": added, "sliding_attention": added}
            assert close(*(model.model(input_ids=ids, attention_mask=masks).last_hidden_state for model in (short, plain)))
            assert calls == [taken] * 2
