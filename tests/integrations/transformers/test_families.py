"""Model families of transformers with ways of their own: tied heads and biases, embeddings with a factor, lines, sines in no file."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_decoders import EXPERTS, multimodal_config
from torch import nn

import halfbyte as hb
from halfbyte.errors import ArgumentError
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear, QuantModule

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
GEMMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
TWO_SIDED = {
    f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 96))
}
TWO_SIDED |= {"d_model": 64, "vocab_size": 100, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
WHISPER = {"num_mel_bins": 20, "max_source_positions": 30, "max_target_positions": 32, "bos_token_id": 1}
FAMILIES: dict[str, Any] = {
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(**GEMMA),
    # Stacked experts, which older files have transposed.
    "Qwen3VLMoeForConditionalGeneration": partial(multimodal_config, "Qwen3VLMoe", head_dim=16, **EXPERTS, pad_token_id=0),
    "BartForConditionalGeneration": lambda: transformers.BartConfig(**TWO_SIDED, max_position_embeddings=32, scale_embedding=True),
    "MarianMTModel": lambda: transformers.MarianConfig(**TWO_SIDED, max_position_embeddings=32),
    "WhisperForConditionalGeneration": lambda: transformers.WhisperConfig(**TWO_SIDED, **WHISPER),
    "BertForMaskedLM": lambda: transformers.BertConfig(**SIZES),
    "ModernBertForMaskedLM": lambda: transformers.ModernBertConfig(**SIZES, pad_token_id=0),
    "FalconForCausalLM": lambda: transformers.FalconConfig(**{**SIZES, "num_hidden_layers": 1}),
    "MambaForCausalLM": lambda: transformers.MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=100, state_size=8),
    "Mamba2ForCausalLM": lambda: transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=1, vocab_size=100, state_size=8, num_heads=8, head_dim=16, n_groups=2
    ),
}
CONFIG = hb.Config("q4_0", compute="float")


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(FAMILIES[name]()).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                nn.init.normal_(parameter, std=0.05)
    return model


def outputs(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 21).view(2, 9)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    if isinstance(model, transformers.WhisperForConditionalGeneration):
        inputs["input_features"] = torch.linspace(-1, 1, 2 * 20 * 60).view(2, 20, 60)
        del inputs["input_ids"]
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_with_its_dequantized_weights_wherever_it_comes_from(name: str, tmp_path: Path) -> None:
    model = build(name)
    quantized = hb.quantize_(copy.deepcopy(model), CONFIG)
    expected = outputs(quantized)
    # Sums in another order, through one layer and a head: 2^-23 times a factor of some tens.
    torch.testing.assert_close(outputs(copy.deepcopy(quantized).dequantize()), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(outputs(model), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))

    model.save_pretrained(tmp_path / "float")
    hb.save(quantized, tmp_path / "saved")
    quantized.save_pretrained(tmp_path / "pretrained")
    hb.convert(tmp_path / "float", tmp_path / "converted", CONFIG)
    kind, names = type(model), {n for n, m in quantized.named_modules() if isinstance(m, QuantModule)}
    for loaded in (
        hb.load(tmp_path / "saved"),
        hb.load(tmp_path / "converted"),
        kind.from_pretrained(tmp_path / "saved"),
        kind.from_pretrained(tmp_path / "pretrained"),
        kind.from_pretrained(tmp_path / "converted"),
        kind.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(CONFIG)),
    ):
        assert {n for n, m in loaded.named_modules() if isinstance(m, QuantModule)} == names
        torch.testing.assert_close(outputs(loaded.eval()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "BartForConditionalGeneration"])
def test_embeddings_with_a_factor_are_quantized_and_keep_it(name: str) -> None:
    model = build(name)
    ids = torch.tensor([[3, 99]])
    expected = model.get_input_embeddings()(ids).detach()
    quantized = hb.quantize_(copy.deepcopy(model), hb.Config("q8_0", embedding=None))
    embedding, head = quantized.get_input_embeddings(), quantized.get_output_embeddings()
    assert isinstance(embedding, QuantEmbedding)
    assert isinstance(head, QuantLinear)
    assert head.packed.data is embedding.packed.data
    largest = float(expected.abs().max())
    # q8_0: half of 1/127 of the largest in a block, and the rounding of its scale to float16.
    torch.testing.assert_close(embedding(ids), expected, rtol=0, atol=largest * (0.5 / 127 + 2**-11))
    again = hb.quantize_(quantized.dequantize(), hb.Config("q8_0", embedding=None))
    torch.testing.assert_close(again.get_input_embeddings()(ids), embedding(ids), rtol=1e-6, atol=largest * 2**-11)

    trained = hb.prepare_qat_(copy.deepcopy(model), "q8_0").eval()
    torch.testing.assert_close(trained.get_input_embeddings()(ids), embedding(ids), rtol=1e-6, atol=0)
    torch.testing.assert_close(hb.convert_qat_(trained).get_input_embeddings()(ids), embedding(ids), rtol=1e-6, atol=0)


def test_an_embedding_that_does_something_else_stays() -> None:
    class Shifted(nn.Embedding):
        embed_scale = 2.0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.embed_scale + 1

    row, _ = hb.report(hb.quantize_(nn.ModuleDict({"a": Shifted(8, 32), "b": nn.Embedding(8, 32)}), "q8_0")).rows
    assert (row.format, row.reason) == (None, "Shifted has a forward of its own")


def test_timms_linear_layers() -> None:
    """Heads of MobileNets and EfficientNets: their forward differs from torch's under torch.jit.script alone."""
    members = {"__module__": "timm.layers.linear", "forward": lambda self, x: nn.functional.linear(x, self.weight)}
    linear = type("Linear", (nn.Linear,), members)
    (row,) = hb.report(hb.quantize_(nn.Sequential(linear(32, 8)), "q8_0")).rows
    assert str(row.format) == "q8_0"


def test_the_weight_of_a_line_has_the_shape_of_the_float_one() -> None:
    line = nn.Conv1d(32, 48, 3)
    quantized = hb.quantize_(nn.Sequential(copy.deepcopy(line)), hb.Config("q4_0", compute="float"))
    weight, x = quantized[0].weight, torch.randn(2, 32, 9)
    assert weight.shape == weight.data.shape == line.weight.shape
    torch.testing.assert_close(nn.functional.conv1d(x, weight, line.bias), quantized(x), rtol=1e-5, atol=1e-5)


class _Patches(nn.Module):
    """Looks at the dtype of its convolution's weight, as vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 32, 4, 4)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches: torch.Tensor = self.projection(pixels.to(self.projection.weight.dtype))
        return patches


def test_models_compile_though_they_look_at_a_convolution_s_weight() -> None:
    model = hb.quantize_(_Patches().eval(), "int8_channel")
    pixels = torch.linspace(-1, 1, 768).view(1, 3, 16, 16)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(pixels)
    torch.testing.assert_close(compiled, model(pixels), rtol=0, atol=0)


def test_traced_models_compute() -> None:
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 48), nn.Linear(48, 32))
    hb.quantize_(model, "q4_0")
    ids = torch.tensor([[1, 2], [3, 4]])
    traced = torch.jit.trace(model, (ids,))
    torch.testing.assert_close(traced(ids + 5), model(ids + 5), rtol=0, atol=0)


def test_calibration_says_which_models_it_cannot_run() -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    tokens = torch.arange(3, 39).view(2, 18)
    with pytest.raises(ArgumentError, match="T5ForConditionalGeneration does not run on those"):
        hb.quantize_(model, hb.Config("int4_g32", method="gptq"), tokens)
    with pytest.raises(ArgumentError, match="T5ForConditionalGeneration does not run on those"):
        hb.Config.auto(model, 5, tokens)
