"""peft: adapters on the layers of a quantized model are trained, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_decoders import CASES
from transformers import AutoModelForCausalLM

import halfbyte as hb

IDS = torch.arange(3, 21).view(2, 9)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("case", ["LlamaDecoderLayer", "Qwen3DecoderLayer", "Gemma3DecoderLayer", "GraniteDecoderLayer"])
def test_adapters(case: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    CASES[case]().save_pretrained(tmp_path / "float")
    how = {"quantization_config": hb.HalfbyteConfig("int8_channel", compute="float")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", **how)
    before = logits(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)  # B begins with zeros
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-2)
    losses = []
    for _ in range(4):
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    after = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "float", **how)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter")), after, rtol=0, atol=0)
    model.merge_adapter()  # quantizes the sums again
    assert float((logits(model) - after).norm() / after.norm()) < 0.05  # each weight moves by at most 1/254 of the largest of its row
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), after, rtol=0, atol=0)
