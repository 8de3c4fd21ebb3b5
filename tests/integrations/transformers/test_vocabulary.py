"""The vocabulary of quantized models gets another size, and transformers' Trainer with quantized models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import halfbyte as hb
from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
IDS = torch.arange(3, 21).view(2, 9)
FORMAT = hb.Config("q8_0", compute="float")


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **settings))


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=ids).logits
    return result


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of float32 sums of at most 100 terms in another order, through a dozen of operations."""
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


def quantized(how: str, folder: Path, tied: bool) -> Any:
    model = llama(tie_word_embeddings=tied)
    if how == "quantize_":
        return hb.quantize_(model, FORMAT)
    if how == "optimize_":
        return hb.optimize_(hb.quantize_(model, FORMAT))
    model.save_pretrained(folder / "float")
    if how == "from_pretrained":
        return AutoModelForCausalLM.from_pretrained(folder / "float", quantization_config=hb.HalfbyteConfig(FORMAT))
    return hb.load(folder / "float", format=FORMAT)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["quantize_", "optimize_", "from_pretrained", "load"])
def test_the_vocabulary_of_a_quantized_model_grows(how: str, tied: bool, tmp_path: Path) -> None:
    model = quantized(how, tmp_path, tied)
    before = logits(model)
    settings: Any = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model.generate(IDS, **settings)  # what is planned for the old embedding is not used for the new one
    model.resize_token_embeddings(101, pad_to_multiple_of=4)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert type(embedding) is nn.Embedding
    assert type(head) is nn.Linear
    assert head.out_features == 104 == model.config.vocab_size
    assert (head.weight is embedding.weight) == tied
    assert isinstance(model.model.layers[0].mlp.down_proj, QuantLinear)
    after = logits(model)
    assert_close(after[..., :100], before)
    assert torch.isfinite(logits(model, IDS + 80)).all()
    assert model.generate(IDS, **settings).shape == (2, 12)
    assert any("embed_tokens" in note and "resized" in note for note in hb.report(model).notes)
    model.save_pretrained(tmp_path / "small")
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "small")), after)
    if how != "optimize_":
        hb.save(model, tmp_path / "checkpoint")
        assert_close(logits(hb.load(tmp_path / "checkpoint")), after)
    model.resize_token_embeddings(90)
    assert_close(logits(model), after[..., :90])


def test_the_same_number_of_rows_changes_nothing() -> None:
    model = hb.quantize_(llama(), FORMAT)
    for settings in ((), (100,), (None, 10), (97, 10)):
        assert isinstance(model.resize_token_embeddings(*settings), QuantEmbedding)
    assert isinstance(model.lm_head, QuantLinear)
    assert not any("resized" in note for note in hb.report(model).notes)


def test_the_vocabulary_of_an_encoder_and_decoder_grows() -> None:
    torch.manual_seed(0)
    settings: Any = {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model: Any = hb.quantize_(T5ForConditionalGeneration(T5Config(**settings, decoder_start_token_id=0)), FORMAT)

    def run() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model.eval()(input_ids=IDS, decoder_input_ids=IDS).logits
        return result

    before = run()
    model.resize_token_embeddings(104)
    assert_close(run()[..., :100], before)
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight


# Trainer


class Passages(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": IDS[index], "labels": IDS[index]}


def train(model: nn.Module, folder: Path) -> Any:
    arguments = TrainingArguments(
        str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=5
    )
    return Trainer(model=model, args=arguments, train_dataset=Passages()).train()


@pytest.mark.parametrize("how", ["quantize_", "load"])
def test_the_trainer_refuses_a_quantized_model_without_adapters(how: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="attach adapters"):
        train(quantized(how, tmp_path, tied=False), tmp_path)


class Wrapper(nn.Module):
    """A module of a user around a language model."""

    def __init__(self, model: Any, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.model(input_ids=input_ids).logits)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_trainer_trains_what_is_beside_quantized_weights(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    model = hb.quantize_(llama(), FORMAT)
    with pytest.raises(UnsupportedError, match="Wrapper"):  # within another module as well: its norms only
        train(Wrapper(model, nn.Identity()), tmp_path)
    assert train(Wrapper(model, nn.Linear(100, 100)), tmp_path).training_loss > 0
    assert train(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")), tmp_path).training_loss > 0
    model = hb.quantize_(llama(), FORMAT)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    assert train(model, tmp_path).training_loss > 0
    assert train(llama(), tmp_path).training_loss > 0
