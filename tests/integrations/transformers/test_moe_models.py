"""Whole models with experts: quantized, saved, loaded and generating, as the same models with dequantized weights in floating point."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.nn.modules.experts import MixtureOfExperts, QuantExperts, StackedExperts
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3Moe", {**SPARSE, "head_dim": 16}),
    "qwen2": ("Qwen2Moe", {**SPARSE, "shared_expert_intermediate_size": 48}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
}
CONFIG = hb.Config("q4_0", compute="float")
TOKENS = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(1))
CALIBRATION = torch.randint(0, 101, (4, 9), generator=torch.Generator().manual_seed(2))


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    architecture, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**SIZES, **sizes, pad_token_id=0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # of the usual size, so that rounding shows
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(the float model, the quantized one)"""
    model = build(request.param)
    return model, hb.quantize_(deepcopy(model), CONFIG)


def dequantized(model: Any, quantized: Any) -> Any:
    """The float model with the weights that the quantized one has."""
    model = deepcopy(model)
    state = model.state_dict()
    for name, module in quantized.named_modules():
        if isinstance(module, QuantModule):
            weight = module.codes().dequantize()
            state[name if isinstance(module, QuantExperts) else f"{name}.weight"].copy_(weight.mT if module.transposed else weight)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS).logits
    return found


def routed(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the experts of each layer and token, in their order by number."""
    chosen: list[torch.Tensor] = []
    routers = [getattr(layer.mlp, "router", None) or layer.mlp.gate for layer in model.model.layers]
    hooks = [router.register_forward_hook(lambda _, __, found: chosen.append(found[2])) for router in routers]
    found = logits(model)
    for hook in hooks:
        hook.remove()
    return found, torch.stack([ids.sort(-1).values for ids in chosen])


def test_every_stack_is_quantized(pair: tuple[Any, Any]) -> None:
    model, quantized = pair
    report = hb.report(quantized)
    rows = {row.name: row for row in report.quantized if row.kind == "Experts"}
    stacks = {name: p for name, p in model.named_parameters() if p.dim() == 3}
    assert rows.keys() == stacks.keys()
    for name, row in rows.items():
        shape = tuple(stacks[name].shape)
        assert row.shape == ((shape[0], shape[2], shape[1]) if quantized.config.model_type == "gpt_oss" else shape)
        assert row.bytes_before == stacks[name].nbytes
        assert row.bytes_after == quantized.get_submodule(name).codes().nbytes
        assert row.error is not None
        assert 0.05 < row.error < 0.12
    assert not any("experts" in row.name and row.reason != "the biases of experts" for row in report.kept)
    assert not any(p.dim() == 3 for p in quantized.parameters())


def test_logits_are_those_of_the_dequantized_model(pair: tuple[Any, Any]) -> None:
    """Both sum in float32, in another order: 2^-24 times the length of the sums, through two layers, relative to the largest logit."""
    expected = logits(dequantized(*pair))
    assert (logits(pair[1]) - expected).abs().max() <= 2.0**-24 * 96 * 8 * expected.abs().max()


def test_generation(pair: tuple[Any, Any]) -> None:
    how = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    expected = dequantized(*pair).generate(TOKENS, **how)
    assert torch.equal(pair[1].generate(TOKENS, **how), expected)
    assert torch.equal(pair[1].generate(TOKENS, **how, cache_implementation="static"), expected)


def test_saved_and_loaded(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model, quantized = pair
    expected = logits(quantized)
    hb.save(quantized, tmp_path / "own")
    assert torch.equal(logits(hb.load(tmp_path / "own")), expected)
    assert torch.equal(logits(hb.load(tmp_path / "own", model=deepcopy(model))), expected)
    assert torch.equal(logits(hb.load(tmp_path / "own", model=hb.quantize_(deepcopy(model), "q4_0"))), expected)
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    assert torch.equal(logits(from_pretrained(tmp_path / "own")), expected)
    quantized.save_pretrained(tmp_path / "theirs")
    assert torch.equal(logits(from_pretrained(tmp_path / "theirs")), expected)


def test_quantized_while_it_is_read(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model, quantized = pair
    expected = logits(quantized)
    model.save_pretrained(tmp_path / "float")
    report = hb.convert(tmp_path / "float", tmp_path / "converted", CONFIG)
    assert {row.name for row in report.quantized} == {row.name for row in hb.report(quantized).quantized}
    assert torch.equal(logits(hb.load(tmp_path / "converted")), expected)
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    loaded = from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(CONFIG))
    assert torch.equal(logits(loaded), expected)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(from_pretrained(tmp_path / "again")), expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_some_layers_stay(name: str, tmp_path: Path) -> None:
    """A float stack beside a quantized one is saved and loaded too; a layer of which all stays is the module that it was."""
    model = build(name)
    config = hb.Config("q8_0", skip=["model.layers.0.mlp.experts.*", "*.1.mlp.experts.down_proj"], compute="float")
    quantized = hb.quantize_(deepcopy(model), config)
    first, second = (layer.mlp.experts for layer in quantized.model.layers)
    assert type(first) is type(model.model.layers[0].mlp.experts)
    assert isinstance(second, MixtureOfExperts)
    assert isinstance(second.gate_up_proj, QuantExperts)
    assert isinstance(second.down_proj, StackedExperts)
    expected = logits(quantized)
    assert (expected - logits(dequantized(model, quantized))).abs().max() <= 2.0**-24 * 96 * 8 * expected.abs().max()
    hb.save(quantized, tmp_path / "own")
    model.save_pretrained(tmp_path / "float")
    hb.convert(tmp_path / "float", tmp_path / "converted", config)
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    loaded = from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(config))
    loaded.save_pretrained(tmp_path / "theirs")
    again: list[Callable[[], Any]] = [
        lambda: hb.load(tmp_path / "own"),
        lambda: hb.load(tmp_path / "converted"),
        lambda: from_pretrained(tmp_path / "own"),
        lambda: from_pretrained(tmp_path / "theirs"),
        lambda: loaded,
    ]
    for make in again:  # transformers has several ways to multiply float experts, which round differently
        assert (logits(make()) - expected).abs().max() <= 2.0**-24 * 96 * 8 * expected.abs().max()


def test_dequantized_again(pair: tuple[Any, Any]) -> None:
    model, quantized = pair
    expected = dequantized(model, quantized)
    again = deepcopy(quantized)
    again.dequantize()
    assert {name: type(m) for name, m in again.named_modules()} == {name: type(m) for name, m in model.named_modules()}
    assert torch.equal(logits(again), logits(expected))


def test_moved_copied_and_compiled(pair: tuple[Any, Any]) -> None:
    quantized = pair[1]
    expected = logits(quantized)
    half = deepcopy(quantized).to(torch.bfloat16)
    found, ids = routed(half)
    assert found.dtype == torch.bfloat16
    # Up to the first token of a text that has other experts, where two were nearly equally likely. Each of two layers rounds what it
    # hands on some twelve times, by up to 2^-9 of it.
    same = (ids == routed(quantized)[1]).all(-1).all(0).view(TOKENS.shape).cumprod(-1).bool()
    assert same.any()
    assert (found.float() - expected)[same].abs().max() <= 24 * 2.0**-9 * expected.abs().max()
    assert torch.equal(logits(deepcopy(quantized)), expected)
    state = quantized.state_dict()
    other = hb.quantize_(deepcopy(pair[0]), CONFIG)
    assert not other.load_state_dict(state).missing_keys
    block = quantized.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(5, 64), torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1], [1, 0]]), torch.rand(5, 2)
    with torch.no_grad():
        assert torch.allclose(torch.compile(block, fullgraph=True, backend="aot_eager")(x, ids, weights), block(x, ids, weights))


def test_methods(tmp_path: Path) -> None:
    """gptq and awq do not see inside of experts: they are quantized by mse, as what calibration does not reach is."""
    model = build("mixtral")
    for method in ("mse", "hqq"):
        quantized = hb.quantize_(deepcopy(model), hb.Config("int4_g32", method=method))
        assert all(row.error is not None and row.error < 0.12 for row in hb.report(quantized).quantized)
    quantized = hb.quantize_(deepcopy(model), hb.Config("int4_g32", method="gptq"), calibration=CALIBRATION)
    assert sum(row.kind == "Experts" for row in hb.report(quantized).quantized) == 4
    assert logits(quantized).isfinite().all()


def test_calibrated_on_disk_and_exported(tmp_path: Path) -> None:
    model, config = build("mixtral"), hb.Config("int4_g32", method="gptq", compute="float")
    model.save_pretrained(tmp_path / "float")
    hb.convert(tmp_path / "float", tmp_path / "own", config, calibration=hb.Calibration(CALIBRATION))
    quantized = hb.quantize_(model, config, calibration=CALIBRATION)
    expected = logits(quantized)
    assert torch.equal(logits(hb.load(tmp_path / "own")), expected)
    report = hb.export(tmp_path / "own", tmp_path / "gptq", "gptq")  # has no place for stacks: they become float parameters again
    assert sum(row.kind == "Experts" and "dequantized" in (row.reason or "") for row in report.kept) == 4
    exported = hb.load(tmp_path / "gptq")
    assert not any(isinstance(module, QuantExperts) for module in exported.modules())
    for module in exported.modules():
        if isinstance(module, QuantLinear):
            module.compute = "float"
    assert (logits(exported) - expected).abs().max() <= 2.0**-24 * 96 * 8 * expected.abs().max()


def test_experts_that_are_not_known_stay_and_say_why() -> None:
    model = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.register_buffer("scale", torch.ones(4))
    kept = [row for row in hb.report(hb.quantize_(model, "q4_0")).kept if row.name.endswith("experts")]
    assert [row.reason for row in kept] == ["it has other tensors than two stacks of weights and their biases"]


def test_after_an_error_nothing_has_changed() -> None:
    model = build("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 3, 4] = torch.nan
    kinds = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(hb.HalfbyteError, match=r"layers.1.mlp.experts.down_proj.weight"):
        hb.quantize_(model, "q4_0")
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert not logits(model).isfinite().all()


def test_formats_and_overrides_by_name() -> None:
    config = hb.Config("q4_0", overrides={"*.experts.down_proj": "int8_channel"})
    rows = hb.report(hb.quantize_(build("qwen3"), config)).quantized
    assert {str(row.format) for row in rows if row.name.endswith("experts.down_proj")} == {"int8_channel"}
    assert {str(row.format) for row in rows if row.name.endswith("experts.gate_up_proj")} == {"q4_0"}


def test_the_experts_share_the_models_config() -> None:
    """`quantize_` replaces the model's config by a copy: that of modules which torch does not see, too."""
    model = build("mixtral")
    hb.quantize_(model, "int4_g32")
    model.dequantize()
    assert model.model.layers[0].mlp.experts.config is model.config
