"""transformers: quantized while loading, saved, loaded again, and refused where halfbyte is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import halfbyte
from halfbyte.checkpoint.native.quantization_config import Module, describe, parse
from halfbyte.errors import ArgumentError, CheckpointError, FormatError
from halfbyte.integrations.transformers.quantizer import HalfbyteConfig, HalfbyteQuantizer
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear, QuantModule
from halfbyte.nn.report import report

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64}
IDS = torch.arange(24).view(2, 12)


def llama(tied: bool = True) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))


def qwen2() -> PreTrainedModel:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))


def dinov2() -> PreTrainedModel:
    """A patch embedding is a convolution."""
    return Dinov2Model(Dinov2Config(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=4))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=100))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "float")
    return tmp_path / "float"


def outputs(model: Any) -> torch.Tensor:
    inputs = {"input_ids": IDS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS[:, :5]
    if hasattr(model.config, "image_size"):
        inputs = {"pixel_values": torch.linspace(-1, 1, 3 * 256).view(1, 3, 16, 16)}
    with torch.inference_mode():
        answer = model(**inputs)
    return answer.logits if hasattr(answer, "logits") else answer.last_hidden_state


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


ENTRY = {"format": "q4_0", "shape": [64, 64]}

# Quantized while it loads


@pytest.mark.parametrize(
    ("make", "skip"),
    [
        (llama, "*.layers.0.*"),
        (lambda: llama(tied=False), "*.layers.0.*"),
        (qwen2, "*.layers.0.*"),
        (mixtral, "*.layers.0.*"),
        (t5, "*.block.0.*"),
        (dinov2, "*.layer.0.attention.*"),
    ],
)
@pytest.mark.parametrize("some", [False, True])
def test_the_same_as_quantizing_afterwards_and_after_saving(make: Any, skip: str, some: bool, tmp_path: Path) -> None:
    original = make()
    config = Config("int4_g24_zp", embedding="int4_g64", skip=[skip]) if some else Config("q4_0")
    original.save_pretrained(tmp_path / "float")
    kind = type(original)
    expected = quantize_(kind.from_pretrained(tmp_path / "float"), config)
    loaded = kind.from_pretrained(tmp_path / "float", quantization_config=HalfbyteConfig(config))
    assert report(loaded).to_json() == report(expected).to_json()
    assert torch.equal(outputs(loaded), outputs(expected))
    loaded.save_pretrained(tmp_path / "small")
    expected.save_pretrained(tmp_path / "other")
    for name in ("small", "other"):
        again, info = kind.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(outputs(again), outputs(expected))
    assert (tmp_path / "small" / "model.safetensors").read_bytes() == (tmp_path / "other" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q4_0"), dtype=dtype)
    expected = quantize_(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), "q4_0")
    assert torch.equal(outputs(loaded), outputs(expected))
    loaded.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=dtype)
    assert outputs(again).dtype == dtype
    assert torch.equal(outputs(again), outputs(expected))


def test_no_float_weight_is_kept_while_others_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte import ops
    from halfbyte.integrations.transformers.quantizer import HalfbyteQuantizer

    models, sizes = [], []
    before = HalfbyteQuantizer._process_model_before_weight_loading
    monkeypatch.setattr(HalfbyteQuantizer, "_process_model_before_weight_loading", lambda self, m, **k: (models.append(m), before(self, m)))
    quantize = ops.quantize

    def watched(*args: Any, **kwargs: Any) -> Any:
        sizes.append(sum(p.numel() for p in models[0].parameters() if not p.is_meta and p.dim() == 2))
        return quantize(*args, **kwargs)

    monkeypatch.setattr(ops, "quantize", watched)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q4_0"))
    assert sizes == [0] * 15


def test_tied_weights_stay_one(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q4_0"))
    model.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    for m in (model, again):
        assert isinstance(m.model.embed_tokens, QuantEmbedding)
        assert isinstance(m.lm_head, QuantLinear)
        assert m.lm_head.packed is m.model.embed_tokens.packed
    tensors = safetensors.torch.load_file(tmp_path / "small" / "model.safetensors")
    assert not any(name.startswith("lm_head") for name in tensors)
    assert {n for n in tensors if "embed" in n} == {f"model.embed_tokens.weight{part}" for part in ("", ".data", ".scale")}


def test_a_tied_head_multiplies_as_before(tmp_path: Path) -> None:
    """What is stored is the embedding, which does not multiply."""
    quantize_(built := llama(), Config("q4_0", compute="float", activation="row")).save_pretrained(tmp_path)
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path), halfbyte.load(tmp_path)):
        assert (model.lm_head.compute, model.lm_head.activation) == (built.lm_head.compute, built.lm_head.activation) == ("float", "row")


def test_what_cannot_be_quantized_says_so(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"matches no module.*lm_head"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q4_0", skip=["lm_heads"]))
    with pytest.raises(ArgumentError, match=r"there is nothing to quantize in \w+: .* stays as it is \(skip pattern '\*'\)"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q4_0", skip=["*"]))
    with pytest.raises(ArgumentError, match="settings"):
        HalfbyteConfig(Config("q4_0"), skip=[])
    with pytest.raises(ArgumentError, match=r"no setting load_in_4bit, .* for example HalfbyteConfig\(\"int4_g64\"\)"):
        HalfbyteConfig(load_in_4bit=True)  # type: ignore[call-arg]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArgumentError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q4_0"))


def test_an_empty_format_is_no_format() -> None:
    """It is an error as for `Config`, not the format that stands in where none is given."""
    with pytest.raises(FormatError, match="unknown format ''"):
        HalfbyteConfig("")


def test_several_values_of_one_weight_are_refused() -> None:
    """The loader's operation takes one value of each parameter: another one would be dropped."""
    model = llama(tied=False)
    quantizer = HalfbyteQuantizer(HalfbyteConfig("q8_0"), pre_quantized=False)
    quantizer._process_model_before_weight_loading(model)
    name, weight = "model.layers.0.mlp.up_proj.weight", torch.ones(96, 64)
    operation: Any = quantizer.get_quantize_ops()
    assert operation.convert({name: [weight]}, model) == {}
    with pytest.raises(ValueError, match="too many values"):
        operation.convert({name: [weight, weight]}, model)


def test_a_model_within_another_is_saved_too(tmp_path: Path) -> None:
    """As sentence-transformers has it."""
    whole = nn.Sequential(llama(), nn.Identity())
    quantize_(whole, "q8_0")
    whole[0].save_pretrained(tmp_path)
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(whole[0].eval()))


def test_a_config_that_other_models_have_too_is_not_changed() -> None:
    config = LlamaConfig(**SMALL)
    model, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config)
    quantize_(model, "q8_0")
    assert not hasattr(other.config, "quantization_config")
    assert model.config.quantization_config is model.hf_quantizer.quantization_config
    model.set_attn_implementation("eager")  # reaches the layers by the config that they share
    assert model.model.layers[0].self_attn.config is model.model.config is model.config


def test_with_calibration(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"gptq needs calibration.*calibration=calibration_tokens"):
        HalfbyteConfig("int4_g32", method="gptq")
    tokens = torch.randint(0, 100, (4, 16))
    for method in ("gptq", "awq"):
        config = Config("int4_g32", method=method, skip=["*.layers.0.mlp.*"])
        expected = quantize_(AutoModelForCausalLM.from_pretrained(folder), config, tokens)
        loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig(config, calibration=tokens))
        assert report(loaded).to_json() == report(expected).to_json()
        assert torch.equal(outputs(loaded), outputs(expected))
        assert isinstance(loaded.config.quantization_config, HalfbyteConfig)
        loaded.save_pretrained(tmp_path / method)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / method)
        assert torch.equal(outputs(again), outputs(expected))
        assert again.lm_head.packed is again.model.embed_tokens.packed


# Saved and loaded


@pytest.fixture
def small(folder: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=HalfbyteConfig("q4_0"))
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_shards(small: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "shards")), outputs(model))


def test_other_classes(small: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(small)
    base, info = AutoModel.from_pretrained(small, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(outputs(base), whole.model(IDS).last_hidden_state)
    built_on, info = LlamaForSequenceClassification.from_pretrained(small, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}
    assert isinstance(built_on.model.layers[0].mlp.up_proj, QuantLinear)


def test_reordered_inputs(small: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small)
    name = "model.layers.0.mlp.up_proj"
    model.set_submodule(name, PermutedLinear(model.get_submodule(name), torch.randperm(64)))
    model.save_pretrained(tmp_path / "permuted")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "permuted")
    assert isinstance(again.get_submodule(name), PermutedLinear)
    for other in (again, halfbyte.load(tmp_path / "permuted")):
        assert torch.equal(outputs(other), outputs(model))
    expected = model.get_submodule(name).weight
    assert torch.equal(model.dequantize().get_submodule(name).weight, expected)


def test_one_checkpoint_for_both(small: Path, folder: Path, tmp_path: Path) -> None:
    """What either writes, the other reads."""
    model = AutoModelForCausalLM.from_pretrained(small)
    assert torch.equal(outputs(halfbyte.load(small)), outputs(model))
    halfbyte.save(model, tmp_path / "saved")
    halfbyte.convert(folder, tmp_path / "converted", "q4_0")
    for path in (tmp_path / "saved", tmp_path / "converted"):
        again = AutoModelForCausalLM.from_pretrained(path)
        assert torch.equal(outputs(again), outputs(model))
        loaded = halfbyte.load(path)
        loaded.save_pretrained(tmp_path / "again")
        assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), outputs(model))
        again.save_pretrained(tmp_path / "again")
        assert "halfbyte" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_dequantize(small: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small)
    before = outputs(model)
    model.resize_token_embeddings(100)  # as many as it has: scripts call this for any tokenizer, and transformers ties weights again
    assert torch.equal(outputs(model), before)
    expected = {n: m.weight + 0 for n, m in model.named_modules() if isinstance(m, QuantModule)}
    model.dequantize()
    assert not any(isinstance(m, QuantModule) for m in model.modules())
    assert all(torch.equal(model.get_submodule(n).weight, w) for n, w in expected.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(expected["lm_head"].clone())
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_without_halfbyte_nothing_is_made_up(small: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does where halfbyte has not been imported."""
    halfbyte.convert(folder, tmp_path / "converted", "q8_0")
    for table in (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(table, "halfbyte")
    for path in (small, tmp_path / "converted"):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("first", ["halfbyte", "transformers.quantizers.auto"])
def test_import_in_any_order(first: str) -> None:
    tables = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as q, AUTO_QUANTIZATION_CONFIG_MAPPING as c"
    printed = run(f"import {first}\nimport halfbyte\n{tables}\nprint(q['halfbyte'].__name__, c['halfbyte'].__name__)")
    # torchao 0.18, where it is installed, makes torch 2.15 log warnings before.
    assert printed.splitlines()[-1] == "HalfbyteQuantizer HalfbyteConfig"


def test_importing_halfbyte_imports_neither_torch_nor_transformers() -> None:
    assert run("import sys, halfbyte; print([n for n in ('torch', 'transformers') if n in sys.modules])").strip() == "[]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight.scale"), r"no file has model\.layers\.1\.mlp\.up_proj\.weight\.scale"),
        (lambda t: t.update({"model.layers.1.mlp.up_proj.weight.data": torch.zeros(96, 32, dtype=torch.int16)}), "is torch.uint8"),
        (lambda t: t["model.layers.1.mlp.up_proj.weight.scale"].fill_(float("inf")), "not finite"),
    ],
)
def test_damaged_tensors(change: Any, message: str, small: Path) -> None:
    tensors = safetensors.torch.load_file(small / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, small / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "version 2"),
        (lambda c: c.update(modules=[]), "are an object"),
        (lambda c: c["modules"].update({"model.norm": ENTRY}), "model.norm is a LlamaRMSNorm"),
        (lambda c: c["modules"].update({"model.nonsense": ENTRY}), "has no model.nonsense"),
        (lambda c: c["modules"].update({"lm_head": "q4_0"}), "an object with a format"),
        (lambda c: c["modules"]["model.embed_tokens"].update(format="q7_7"), "q7_7"),
        (lambda c: c["modules"]["model.embed_tokens"].update(shape=[100, 32]), "is \\[100, 32\\] in the files"),
        (lambda c: c["modules"]["model.embed_tokens"].update(shape=[100]), "a shape is two or three sizes"),
        (lambda c: c["modules"]["model.embed_tokens"].update(compute="fast"), "compute is one of"),
    ],
)
def test_damaged_config(change: Any, message: str, small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    change(config["quantization_config"])
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(small)


def test_the_section_is_what_it_was() -> None:
    modules = {
        "a.b": Module(halfbyte.as_format("q4_0"), (3, 5), "int8", "row", True),
        "c": Module(halfbyte.as_format("int8_channel"), (1, 1)),
    }
    assert parse(json.loads(json.dumps(describe(modules)))) == modules


def test_an_old_release_is_named() -> None:
    program = """
import warnings, transformers
transformers.__version__ = "5.16.1"
warnings.simplefilter("error")
import halfbyte
try:
    halfbyte.HalfbyteConfig("q4_0")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "halfbyte.HalfbyteConfig needs transformers (this is 5.16.1, the oldest that is taken 5.17): pip install 'halfbyte[transformers]'"
    )
