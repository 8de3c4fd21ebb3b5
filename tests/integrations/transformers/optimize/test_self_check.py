"""`optimize_` compares a model with the plain one the first time that it meets an architecture."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import make_decoder
from torch import nn
from transformers import BertConfig, BertModel, SegformerConfig, SegformerModel, ViTConfig, ViTModel
from transformers.utils import generic

import halfbyte as hb
from halfbyte.integrations.transformers.decoder import stack
from halfbyte.integrations.transformers.encoder import encoder_stack
from halfbyte.integrations.transformers.optimize import self_check
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward
from halfbyte.integrations.transformers.optimize.self_check import SelfCheck, relative_difference, tolerance
from halfbyte.nn import fused
from halfbyte.nn.fused import FusedLinear, GeluLinear

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2}
IDS = torch.arange(3, 9)[None]


@pytest.fixture(autouse=True)
def _checking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels stay in the session's cache; verdicts are of this test."""
    monkeypatch.setenv("HALFBYTE_CHECK", "1")
    monkeypatch.setattr(self_check, "_path", lambda key: tmp_path / "checks" / f"{key}.json")


def llama(compute: str = "float", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return hb.quantize_(make_decoder("Llama", **SMALL, num_key_value_heads=1).eval().to(dtype), hb.Config("q4_0", compute=compute))


def bert() -> Any:
    torch.manual_seed(0)
    return hb.quantize_(BertModel(BertConfig(vocab_size=40, **SMALL)).eval(), hb.Config("q4_0", compute="float"))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    plain = self_check._outputs
    monkeypatch.setattr(self_check, "_outputs", lambda *args, **settings: (calls.append(1), plain(*args, **settings))[1])
    return calls


def forgets_the_prompt(module: Any, call: dict[str, Any], run: Callable[..., Any] = stack._run) -> Any:
    """As with a cache whose argument has another name."""
    return run(module, {name: value for name, value in call.items() if name != "cache"})


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_right_is_optimized(compute: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    model = hb.optimize_(llama(compute, dtype))
    assert isinstance(model, ReplacedForward)
    assert len(calls) == 2
    hb.optimize_(llama(compute, dtype))
    assert len(calls) == 2, "the verdict is remembered"
    assert hb.optimize_(model) is model
    assert len(calls) == 2, "an optimized model is not checked again"


@pytest.mark.parametrize("make", [llama, lambda: hb.quantize_(BertModel(BertConfig(**SMALL)).eval(), "q8_0")], ids=["decoder", "encoder"])
def test_it_asks_for_nothing_that_transformers_deprecates(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(generic.logger, "warning_once", lambda message, *_: warned.append(message), raising=False)
    hb.optimize_(make())
    assert warned == []


def test_other_settings_are_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    for model in (llama(), llama("int8"), llama(dtype=torch.bfloat16), bert()):
        before = len(calls)
        hb.optimize_(model)
        assert len(calls) == before + 2


def test_other_versions_are_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    hb.optimize_(llama())
    calls = counted(monkeypatch)
    monkeypatch.setattr(self_check, "_versions", lambda: ("transformers 99",))
    hb.optimize_(llama())
    assert len(calls) == 2


def test_a_model_that_forgets_its_prompt_is_left_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llama()
    model = copy.deepcopy(plain)
    monkeypatch.setattr(stack, "_run", forgets_the_prompt)
    message = r"differs by [\d.]+ from the plain model, where rounding explains .* \(halfbyte .*, transformers .*\): the model is left"
    with pytest.warns(RuntimeWarning, match=message):
        hb.optimize_(model)
    assert_plain(model, plain)
    with torch.no_grad():
        past = [one(IDS, use_cache=True)[KV_CACHE] for one in (plain, model)]
        found = [one(IDS[:, :1], **{KV_CACHE: kept}).logits for one, kept in zip((plain, model), past, strict=True)]
    assert torch.equal(*found)
    assert any("the model is left plain" in note for note in hb.report(model).notes)


def assert_plain(model: nn.Module, plain: nn.Module) -> None:
    """Whether a model has the classes of modules, the weights and the attention of another one."""
    assert [(name, type(module)) for name, module in model.named_modules()] == [(name, type(m)) for name, m in plain.named_modules()]
    assert not any(isinstance(module, (ReplacedForward, FusedLinear, GeluLinear)) for module in model.modules())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.config._attn_implementation == plain.config._attn_implementation  # type: ignore[union-attr]


def test_a_bad_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(stack, "_run", forgets_the_prompt)
        with pytest.warns(RuntimeWarning, match="the model is left plain"):
            hb.optimize_(llama())
    calls, plain = counted(monkeypatch), llama()
    model = copy.deepcopy(plain)
    with pytest.warns(RuntimeWarning, match="the model is left plain"):
        hb.optimize_(model)
    assert_plain(model, plain)
    assert not calls


def test_a_model_that_raises_is_left_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any) -> None:
        raise KeyError("past_key_values")

    plain = llama()
    model = copy.deepcopy(plain)
    monkeypatch.setattr(stack, "_run", raises)
    with pytest.warns(RuntimeWarning, match="an optimized LlamaForCausalLM raises KeyError"):
        hb.optimize_(model)
    assert_plain(model, plain)


def test_an_encoder_within_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bert()
    model = nn.Sequential(copy.deepcopy(plain))
    monkeypatch.setattr(encoder_stack, "_through", lambda compiled, modules, given: given.x)
    with pytest.warns(RuntimeWarning, match="an optimized BertModel differs"):
        hb.optimize_(model)
    assert_plain(model[0], plain)
    with torch.no_grad():
        assert torch.equal(model[0](IDS)[0], plain(IDS)[0])


def test_an_image_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    config = ViTConfig(**SMALL, image_size=16, patch_size=8)
    model = hb.optimize_(hb.quantize_(ViTModel(config).eval(), hb.Config("q4_0", compute="float")))
    assert len(calls) == 2
    assert any(isinstance(module, ReplacedForward) for module in model.modules())


def segformer() -> SegformerModel:
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [32] * 2, "decoder_hidden_size": 32, "num_attention_heads": [1] * 2, "depths": [1] * 2}
    shapes = {"num_encoder_blocks": 2, "sr_ratios": [4, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    return hb.quantize_(SegformerModel(SegformerConfig(**sizes, **shapes)).eval(), hb.Config("q8_0", compute="float"))


def test_images_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a configuration tells none. A GELU that was fused across a convolution is found."""
    calls, model = counted(monkeypatch), segformer()
    hb.optimize_(model)
    assert len(calls) == 2
    if not any(name.endswith("mlp.fc1") for name, _ in model.named_modules()):
        pytest.skip("this version's MLP has names that are not fused")
    monkeypatch.setattr(self_check, "_read", lambda _: None)
    monkeypatch.setattr(fused, "feeds_only", lambda *_: True)
    with pytest.warns(RuntimeWarning, match="an optimized SegformerModel differs"):
        hb.optimize_(segformer())


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CHECK", "0")
    calls = counted(monkeypatch)
    assert isinstance(hb.optimize_(llama()), ReplacedForward)
    assert not calls


def test_training_mode_and_random_numbers_stay() -> None:
    model = llama()
    model.model.layers[0].train()
    torch.manual_seed(7)
    hb.optimize_(model)
    assert model.model.layers[0].training
    assert not model.training
    assert torch.equal(torch.rand(3), torch.manual_seed(7) and torch.rand(3))


def test_a_damaged_verdict_is_none(tmp_path: Path) -> None:
    hb.optimize_(llama())
    (file,) = (tmp_path / "checks").iterdir()
    for text in ("", "[]", '{"trouble": 3}', "\0"):
        file.write_text(text)
        check = SelfCheck.start(llama())
        assert check is not None
        assert check.verdict is None


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (None, tmp_path / "file" / "checks" / "x.json"):
        monkeypatch.setattr(self_check, "_path", lambda key, path=path: path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(hb.optimize_(llama()), ReplacedForward)


def test_differences() -> None:
    plain = torch.tensor([[1.0, 2.0, 3.0]])
    assert relative_difference(plain, plain) == 0
    assert relative_difference(plain + torch.tensor([0, 0, 0.1]), plain) == pytest.approx(0.1 / 2**0.5, rel=1e-6)
    assert relative_difference(plain[:, :2], plain) == float("inf")
    assert relative_difference(plain / 0, plain) == float("inf")
    assert relative_difference(plain / 0, plain / 0) == 0


def test_the_tolerance_follows_from_the_arithmetic() -> None:
    """Far below what a wrong path gives, and in the order of what is rounded."""
    assert tolerance(llama()) < 1e-4 < tolerance(llama(dtype=torch.bfloat16)) < 0.5
    assert tolerance(llama()) < tolerance(llama("int8")) < 0.5


def test_a_model_that_it_cannot_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **settings: Any) -> None:
        raise ValueError("it takes other inputs")

    monkeypatch.setattr(self_check, "_outputs", refuses)
    model = hb.optimize_(llama())
    assert isinstance(model, ReplacedForward)
    assert any("not compared with the plain model" in note for note in hb.report(model).notes)
