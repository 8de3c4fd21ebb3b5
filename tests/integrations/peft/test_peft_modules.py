"""What peft trains besides LoRA on linear layers: whole layers, heads, tokens, embeddings, prompts; and what it cannot train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import halfbyte as hb
from halfbyte.errors import UnsupportedError
from halfbyte.nn.fused import GeluLinear
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear, QuantModule

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:merging rounds"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers"),
]

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
IDS = torch.arange(3, 21).view(2, 9)
FORMAT = hb.Config("q8_0", compute="float")


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, **settings))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)  # so that predictions, and what training changes in them, are not all alike
    return model


def quantized(**settings: Any) -> Any:
    return hb.quantize_(llama(**settings), FORMAT)


def adapted(model: Any, task: str | None = "CAUSAL_LM", **settings: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type=task, **{"target_modules": ["q_proj"], **settings}))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS).logits
    return result


def step(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    """The gradients of one step of training, by the names that peft gives to parameters."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), 0.5)
    model.train()(input_ids=IDS, labels=inputs.get("labels", IDS)).loss.backward()
    gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    optimizer.step()
    return gradients


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of float32 sums of at most 100 terms in another order, through a dozen of operations."""
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("loaded", [False, True])
def test_modules_to_save_are_float_and_trained(tmp_path: Path, loaded: bool) -> None:
    def base() -> Any:
        if not loaded:
            return quantized()
        return AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(FORMAT))

    llama().save_pretrained(tmp_path / "float")
    before = logits(base())
    model = adapted(base(), modules_to_save=["lm_head", "embed_tokens"])
    assert_close(logits(model), before)
    gradients = step(model)
    head, embedding = model.base_model.model.lm_head, model.base_model.model.model.embed_tokens
    assert isinstance(head.modules_to_save["default"], nn.Linear)
    assert isinstance(embedding.modules_to_save["default"], nn.Embedding)
    assert sum("modules_to_save" in name and bool(gradient.any()) for name, gradient in gradients.items()) == 2
    after = logits(model)
    assert not torch.allclose(after, before)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")), after, rtol=0, atol=0)
    torch.testing.assert_close(logits(model.unload()), logits(model.base_model.model), rtol=0, atol=0)


def test_modules_to_save_holds_a_block_of_several_quantized_layers() -> None:
    before = logits(quantized())
    model = adapted(quantized(), modules_to_save=["mlp"])
    assert_close(logits(model), before)
    gradients = step(model)
    assert sum("mlp.modules_to_save" in name and bool(gradient.any()) for name, gradient in gradients.items()) == 3


def test_modules_to_save_of_an_inactive_adapter_are_frozen() -> None:
    model = adapted(quantized(), modules_to_save=["lm_head"])
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"]))
    copies = model.base_model.model.lm_head.modules_to_save
    assert isinstance(copies["other"], nn.Linear)
    assert copies["default"].weight.requires_grad
    assert not copies["other"].weight.requires_grad
    model.set_adapter("other")
    assert copies["other"].weight.requires_grad
    assert not copies["default"].weight.requires_grad


def test_experts_in_modules_to_save_are_trained() -> None:
    torch.manual_seed(0)
    settings: Any = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    model: Any = hb.quantize_(MixtralForCausalLM(MixtralConfig(**settings)), FORMAT)
    before = logits(model)
    model = adapted(model, modules_to_save=["mlp"])
    assert_close(logits(model), before)
    assert any("experts" in name and bool(gradient.any()) for name, gradient in step(model).items())


def test_a_fused_layer_cannot_be_trained_but_before_it_is_fused() -> None:
    settings: Any = {"target_modules": ["o_proj"], "modules_to_save": ["q_proj"]}
    with pytest.raises(UnsupportedError, match="before fuse_"):
        adapted(hb.fuse_(quantized()), **settings)
    adapted(quantized(), **settings)


def test_adapters_beside_a_fused_activation_are_refused() -> None:
    def bert() -> Any:
        return hb.quantize_(BertModel(BertConfig(**SIZES)), FORMAT)

    model = hb.fuse_(bert())
    assert any(isinstance(module, GeluLinear) for module in model.modules())  # its adapters would be added to the GELU, not to its argument
    with pytest.raises(UnsupportedError, match="adapters first"):
        adapted(model, None, target_modules=["dense"])
    with pytest.raises(UnsupportedError, match="GeluLinear is fused"):  # nor would a float layer in its place apply the GELU
        model.dequantize()
    assert any(isinstance(module, GeluLinear) for module in model.modules())
    hb.fuse_(adapted(bert(), None, target_modules=["dense"]))


# Heads


def test_a_head_that_is_in_no_file_is_not_quantized(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    passages = torch.randint(3, 100, (2, 16))
    for config in (hb.HalfbyteConfig(FORMAT), hb.HalfbyteConfig("q4_0", method="gptq", calibration=passages)):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "float", quantization_config=config)
        assert isinstance(model.score, nn.Linear)
        assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
        assert any("score was in no file" in note for note in hb.report(model).notes)
    model.save_pretrained(tmp_path / "whole")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(again.score.weight, model.score.weight, rtol=0, atol=0)


def test_the_head_of_a_classifier_is_trained() -> None:
    torch.manual_seed(0)
    model = hb.quantize_(BertForSequenceClassification(BertConfig(**SIZES)), "q4_0")
    model = adapted(model, "SEQ_CLS", target_modules="all-linear")
    gradients = step(model, labels=torch.tensor([0, 1]))
    assert all(any(f"classifier.modules_to_save.default.{part}" in name for name in gradients) for part in ("weight", "bias"))


def test_a_head_that_peft_does_not_train_is_warned_of() -> None:
    def bart() -> Any:
        settings: Any = {
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        }
        more: Any = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100, "max_position_embeddings": 32}
        return hb.quantize_(BartForSequenceClassification(BartConfig(**settings, **more)), "q4_0")

    with pytest.warns(UserWarning, match="no head of BartForSequenceClassification"):
        adapted(bart(), "SEQ_CLS")
    model = adapted(bart(), "SEQ_CLS", modules_to_save=["classification_head"])
    assert model.base_model.model.classification_head.modules_to_save["default"].out_proj.weight.requires_grad


# Tokens and embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_trained_tokens_are_those_of_a_float_model(tied: bool) -> None:
    settings: Any = {"trainable_token_indices": [3, 5, 20], "init_lora_weights": True}
    models = [
        adapted(model, **settings) for model in (quantized(tie_word_embeddings=tied), quantized(tie_word_embeddings=tied).dequantize())
    ]
    for model in models:
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "trainable_tokens_delta" in name:
                parameter.data.normal_()
    assert isinstance(models[0].base_model.model.model.embed_tokens.token_adapter.base_layer, QuantEmbedding)
    for _ in range(2):
        assert_close(*map(logits, models))
        ours, expected = map(step, models)
        assert ours.keys() == expected.keys()
        assert any("trainable_tokens_delta" in name for name in ours)
        for name, gradient in expected.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5)  # sums that cancel


def test_trained_tokens_are_not_merged(tmp_path: Path) -> None:
    model = adapted(quantized(), trainable_token_indices=[3, 5])
    step(model)
    after = logits(model)
    with pytest.raises(UnsupportedError, match="cannot be merged"):
        model.merge_and_unload()
    model.save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(quantized().dequantize(), tmp_path).merge_and_unload()
    assert_close(logits(merged), after)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_lora_on_an_embedding_is_that_of_a_float_model(family: str, tmp_path: Path) -> None:
    def base() -> Any:
        if family == "llama":
            return quantized()
        torch.manual_seed(0)  # rows are multiplied by a factor
        return hb.quantize_(Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16, num_key_value_heads=2)), FORMAT)

    model, floats = (adapted(model, target_modules=["embed_tokens"]) for model in (base(), base().dequantize()))
    assert isinstance(model.base_model.model.model.embed_tokens.base_layer, QuantEmbedding)
    for each in (model, floats):
        torch.manual_seed(1)
        for name, parameter in each.named_parameters():
            if "lora" in name:
                parameter.data.normal_(std=0.1)
    assert_close(logits(model), logits(floats))
    ours, expected = step(model), step(floats)
    assert all(bool(gradient.any()) for gradient in ours.values())
    assert len(ours) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5)  # sums that cancel
    unmerged = logits(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base(), tmp_path)), unmerged, rtol=0, atol=0)
    model.merge_adapter()
    # 8 bits in blocks of 32: each weight moves by at most 1/254 of the largest of its block.
    assert 0 < float((logits(model) - unmerged).norm() / unmerged.norm()) < 0.02
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), unmerged, rtol=0, atol=0)


def test_dora_on_an_embedding_and_a_head() -> None:
    before = logits(quantized())
    model = adapted(quantized(), target_modules=["embed_tokens", "lm_head"], use_dora=True)
    assert_close(logits(model), before)  # magnitudes are those of the weights
    gradients = step(model)
    assert sum("magnitude" in name and bool(gradient.any()) for name, gradient in gradients.items()) == 2


def test_biases_are_trained_where_peft_asks_for_all() -> None:
    torch.manual_seed(0)
    model = adapted(hb.quantize_(Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)), FORMAT), bias="all")
    biases = [gradient for name, gradient in step(model).items() if name.endswith("bias")]
    assert len(biases) == 3
    assert all(bool(gradient.any()) for gradient in biases)


def test_adapters_are_merged_without_rounding_after_the_model_was_dequantized() -> None:
    model = adapted(quantized(), target_modules=["q_proj", "embed_tokens"])
    step(model)
    unmerged = logits(model)
    model.dequantize()
    assert not any(isinstance(module, QuantModule) for module in model.modules())
    model.merge_adapter()
    assert_close(logits(model), unmerged)
    model.unmerge_adapter()
    assert_close(logits(model), unmerged)
    assert_close(logits(model.merge_and_unload()), unmerged)


# Other methods


@pytest.mark.parametrize("skip", [(), ("lm_head",)])
def test_prompts_are_trained_beside_a_quantized_embedding(skip: tuple[str, ...]) -> None:
    model = hb.quantize_(llama(), hb.Config("q8_0", compute="float", skip=skip))
    model = peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert model.word_embeddings is model.get_input_embeddings()  # not a head that has as many rows
    assert [bool(gradient.any()) for gradient in step(model).values()] == [True]


def others() -> list[Any]:
    targets: Any = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return [
        peft.IA3Config(**targets, feedforward_modules=["down_proj"]),
        peft.VeraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"]),
        peft.LoHaConfig(r=4, **targets),
        peft.AdaLoraConfig(total_step=4, **targets),
        peft.LNTuningConfig(**targets),
    ]


@pytest.mark.parametrize("config", others(), ids=lambda config: config.peft_type.value)
def test_adapters_of_other_kinds_are_refused_with_a_remedy_that_works(config: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot train .*_proj.*LoraConfig.*skip"):
        peft.get_peft_model(quantized(), config)
    model = hb.quantize_(llama(), hb.Config("q8_0", compute="float", skip=["*q_proj", "*down_proj"]))
    assert any(bool(gradient.any()) for gradient in step(peft.get_peft_model(model, config)).values())


def test_what_peft_raises_of_a_quantized_model_gets_a_remedy() -> None:
    def config() -> Any:
        return peft.AdaptionPromptConfig(adapter_layers=1, adapter_len=3, task_type="CAUSAL_LM")

    with pytest.raises(UnsupportedError, match=r"ADAPTION_PROMPT cannot be attached.*skip"):
        peft.get_peft_model(quantized(), config())
    peft.get_peft_model(hb.quantize_(llama(), hb.Config("q8_0", skip=["*self_attn*"])), config())


def test_target_parameters_that_are_quantized_are_refused() -> None:
    settings: Any = {**SIZES, "num_local_experts": 2, "num_key_value_heads": 2}
    for name in ("mlp.experts.down_proj", "q_proj.weight"):
        model = hb.quantize_(MixtralForCausalLM(MixtralConfig(**settings)), FORMAT)
        with pytest.raises(UnsupportedError, match=f"target_parameters has '{name}'"):
            adapted(model, target_parameters=[name])
    model = hb.quantize_(MixtralForCausalLM(MixtralConfig(**settings)), hb.Config("q8_0", skip=["*experts*"]))
    adapted(model, target_parameters=["mlp.experts.down_proj"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_prepare_model_for_kbit_training_enables_checkpointing(reentrant: bool) -> None:
    settings = {"use_reentrant": reentrant}
    model = peft.prepare_model_for_kbit_training(quantized().to(torch.bfloat16), gradient_checkpointing_kwargs=settings)
    assert model.is_gradient_checkpointing
    model = adapted(model)
    gradients = step(model)
    assert len(gradients) == 2
    assert bool(next(g for name, g in gradients.items() if "lora_B" in name).any())
    plain = peft.prepare_model_for_kbit_training(quantized(), use_gradient_checkpointing=False)
    assert not plain.is_gradient_checkpointing
    assert not any(p.requires_grad for p in plain.parameters())
    assert any(isinstance(module, QuantModule) for module in plain.modules())
