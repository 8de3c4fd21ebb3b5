"""LoRA adapters of peft on quantized layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import halfbyte as hb
from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.quantized import QuantLinear

peft = pytest.importorskip("peft")
# peft's own: of torch's, and that a layer without a bias cannot be merged with one.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in (":FutureWarning", ".*lora_bias", "merging rounds")]

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
IDS = torch.arange(3, 21).view(2, 9)
FORMAT = hb.Config("int8_channel", compute="float")


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def adapted(model: Any, targets: Any = "all-linear", **settings: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **settings))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS).logits
    return result


def train(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(4):
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_adapters_are_trained_beside_the_codes_and_saved(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(FORMAT))
    before, codes = logits(model), {n: m.codes().data for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    model = adapted(model)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)  # B begins with zeros
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7
    losses = train(model)
    assert losses[-1] < losses[0]
    after = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(FORMAT))
    assert all(torch.equal(m.codes().data, codes[n]) for n, m in again.named_modules() if n in codes)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter")), after, rtol=0, atol=0)


def test_a_classifier_is_no_target_of_all_linear() -> None:
    model = hb.quantize_(BertForSequenceClassification(BertConfig(**SIZES)), "q4_0")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="SEQ_CLS"))
    assert not any("classifier" in name for name in model.targeted_module_names)
    assert len(model.targeted_module_names) == 7


def test_merging_quantizes_again_and_unmerging_gives_the_codes_back() -> None:
    model = adapted(hb.quantize_(llama(), FORMAT), ["q_proj", "down_proj"])
    train(model)
    unmerged = logits(model)
    codes = [m.codes().data.clone() for m in model.modules() if isinstance(m, QuantLinear)]
    model.merge_adapter()
    # 8 bits per channel: each weight moves by at most 1/254 of the largest of its channel.
    assert 0 < float((logits(model) - unmerged).norm() / unmerged.norm()) < 0.02
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), unmerged, rtol=0, atol=0)
    assert all(
        torch.equal(m.codes().data, old) for m, old in zip([m for m in model.modules() if isinstance(m, QuantLinear)], codes, strict=True)
    )


def test_several_adapters_are_rounded_once_and_the_user_is_told() -> None:
    model = adapted(hb.quantize_(llama(), "int4_g32"), ["q_proj"], init_lora_weights=False)
    for name in ("second", "third"):
        model.add_adapter(name, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    names, base = ["default", "second", "third"], layer.get_base_layer()
    weight = sum((layer.get_delta_weight(name).detach().double() for name in names), base.weight.dequantize().double())
    before = base.codes().data.clone()
    with pytest.warns(UserWarning, match=r"rounds the sums of weights and adapters to int4_g32, .*load the adapters onto model.dequantize"):
        layer.merge(adapter_names=["default"])
    with pytest.warns(UserWarning, match="Already following adapters were merged"):  # peft's
        layer.merge(adapter_names=["second", "third"])
    assert layer.merged_adapters == names
    once = hb.quantize(weight.float(), "int4_g32")
    assert (base.codes().data == once.data).float().mean() > 0.99  # sums in float32 may round to the other side; twice rounded: .8
    torch.nn.init.constant_(layer.lora_B["default"].weight, float("nan"))
    layer.unmerge()
    layer.merge(adapter_names=["second"])
    merged = base.codes().data.clone()
    with pytest.warns(UserWarning, match="Already"), pytest.raises(ValueError, match="The adapter default seems to be broken"):
        layer.merge(safe_merge=True, adapter_names=["default"])
    assert layer.merged_adapters == ["second"]
    assert torch.equal(base.codes().data, merged)
    layer.unmerge()
    assert torch.equal(base.codes().data, before)


def test_adapters_are_merged_exactly_where_the_warning_says(tmp_path: Path) -> None:
    model = adapted(hb.quantize_(llama(), FORMAT), init_lora_weights=False)
    unmerged = logits(model)
    model.save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(hb.quantize_(llama(), FORMAT).dequantize(), tmp_path).merge_and_unload()
    torch.testing.assert_close(logits(merged), unmerged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("settings", "error"), [({"init_lora_weights": "pissa"}, "frozen"), ({"init_lora_weights": "olora"}, "frozen")])
def test_what_would_change_the_weight_is_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(UnsupportedError, match=error):
        adapted(hb.quantize_(llama(), FORMAT), ["q_proj"], **settings)


@pytest.mark.parametrize(("settings", "error"), [({"use_dora": True}, "DoRA"), ({"lora_bias": True}, "biases")])
def test_what_cannot_be_merged_is_refused(settings: dict[str, Any], error: str) -> None:
    model = adapted(hb.quantize_(llama(), FORMAT), ["q_proj"], **settings)
    with pytest.raises(UnsupportedError, match=error):
        model.merge_adapter()
