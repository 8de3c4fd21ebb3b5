"""sentence-transformers: quantized in memory and while it loads, optimized, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from language_model import make_tokenizer
from transformers import BertConfig, BertModel

import halfbyte as hb
from halfbyte.nn.modules.quantized import QuantModule

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.2}
SENTENCES = ["the quick brown fox", "a lazy dog sleeps under an old oak tree", "hens"]
CONFIG = hb.Config("q4_0", compute="float")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    BertModel(BertConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=64)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    sentence_transformers.SentenceTransformer(str(tmp_path / "bert"), device="cpu").save(str(tmp_path / "model"))
    return tmp_path / "model"


def load(folder: Path, **settings: Any) -> Any:
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", **settings).eval()


def test_the_same_embeddings(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    plain = hb.quantize_(copy.deepcopy(model), CONFIG)
    expected = torch.from_numpy(plain.encode(SENTENCES))
    assert not torch.allclose(torch.from_numpy(model.encode(SENTENCES)), expected, atol=1e-3)
    optimized = hb.optimize_(copy.deepcopy(plain))
    loading = load(folder, model_kwargs={"quantization_config": hb.HalfbyteConfig(CONFIG)})
    plain.save(str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    for other in (optimized, loading, saved):
        assert any(isinstance(module, QuantModule) for module in other.modules())
        # float32 sums in another order in two layers.
        torch.testing.assert_close(torch.from_numpy(other.encode(SENTENCES)), expected, rtol=1e-4, atol=1e-4)
