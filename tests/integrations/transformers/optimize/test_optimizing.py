"""`optimize_` is all the calls that make a model faster."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from language_model import make_decoder
from torch import nn
from transformers import BertConfig, BertModel

import halfbyte as hb
from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture
def llama() -> Any:
    torch.manual_seed(0)
    return hb.quantize_(make_decoder("Llama", **SMALL, num_key_value_heads=1).eval(), "q4_0")


def test_a_language_model(llama: Any) -> None:
    other = copy.deepcopy(llama)
    assert hb.optimize_(llama) is llama
    other.set_attn_implementation("halfbyte")
    replace_forwards_(hb.fuse_(other))
    assert llama.config._attn_implementation == "halfbyte"
    assert hb.report(llama).notes == hb.report(other).notes
    ids = torch.arange(5)[None]
    with torch.inference_mode():
        assert torch.equal(llama(ids).logits, other(ids).logits)
        before = llama(ids).logits
        assert torch.equal(hb.optimize_(llama)(ids).logits, before), "a second call changes nothing"


def test_an_attention_that_was_chosen_stays(llama: Any) -> None:
    llama.set_attn_implementation("eager")
    assert hb.optimize_(llama).config._attn_implementation == "eager"


def test_a_model_within_another() -> None:
    """As sentence-transformers has it."""
    torch.manual_seed(0)
    model = nn.Sequential(BertModel(BertConfig(vocab_size=40, **SMALL)).eval())
    hb.optimize_(hb.quantize_(model, "q4_0"))
    assert model[0].config._attn_implementation == "halfbyte"
    assert any("one native call" in note for note in hb.report(model).notes)


def test_a_float_model() -> None:
    with pytest.raises(ArgumentError, match="call quantize_ first"):
        hb.optimize_(nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match=r"optimize_ takes a model, a torch\.nn\.Module, got str: pass the model"):
        hb.optimize_("folder")  # type: ignore[arg-type]


def test_without_transformers() -> None:
    code = """
import sys
import torch
from torch import nn
import halfbyte as hb
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
hb.optimize_(hb.quantize_(model, hb.Config("int8_channel")))
assert any("within the convolutions" in note for note in hb.report(model).notes), hb.report(model).notes
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@torch.no_grad()
def test_an_optimized_model_gives_the_dtype_of_autocast(llama: Any) -> None:
    """Fused kernels cast nothing: under autocast, as with tangents, layers take the steps of the model that is not optimized."""
    fast, ids = hb.optimize_(copy.deepcopy(llama)), torch.randint(0, 99, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        plain, found = llama(ids, use_cache=True), fast(ids, use_cache=True)
        assert found.logits.dtype == torch.bfloat16
        assert torch.equal(found.logits, plain.logits)
        plain, found = (m(ids[:, :1], past_key_values=before.past_key_values) for m, before in ((llama, plain), (fast, found)))
        assert torch.equal(found.logits, plain.logits)
    assert fast(ids).logits.dtype == torch.float32
