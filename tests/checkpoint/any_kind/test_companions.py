"""Files beside a model's weights that name other weights, adapters and parts of sentence-transformers: the model that is written loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import halfbyte as hb
from halfbyte.checkpoint.files import companions
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.nn.candidates import CUSTOM_LOADER

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 40}
IDS = torch.arange(10)[None]
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore:.*lora_bias")]
FORMAT = hb.Config("q8_0", compute="float")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def near(got: Tensor, want: Tensor) -> bool:
    """8-bit codes are within 1/254 of a block's largest weight, those of a few layers below 5 %."""
    return float((got - want).abs().max() / want.abs().max()) < 0.05


# Adapters


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Tensor]:
    """A folder with a model and an adapter that changes it a lot, and the logits of both."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "f")
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    changed = peft.get_peft_model(model, config)
    changed.save_pretrained(tmp_path / "f")
    return tmp_path / "f", logits(changed)


def test_an_adapter_goes_along_with_its_model(adapted: tuple[Path, Tensor], tmp_path: Path) -> None:
    folder, want = adapted
    report = hb.convert(folder, tmp_path / "c", FORMAT)
    assert any("adapter in the model's folder" in note and "copied, not merged" in note for note in report.notes)
    assert near(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "c")), want)
    report = hb.export(tmp_path / "c", tmp_path / "again", "halfbyte")
    assert any("copied, not merged" in note for note in report.notes)
    assert near(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), want)


def test_an_adapter_is_not_left_out_silently(adapted: tuple[Path, Tensor], tmp_path: Path) -> None:
    """What does not apply it refuses it, and the remedies work."""
    import peft

    folder, want = adapted
    hb.convert(folder, tmp_path / "c", FORMAT)
    for source, settings in ((tmp_path / "c", {}), (folder, {"format": FORMAT})):
        with pytest.raises(CheckpointError, match=r"an adapter, which load does not apply: .* move adapter_\* to a folder of its own"):
            hb.load(source, **settings)
    with pytest.raises(ArgumentError, match=r"an adapter, which a GGUF file of the model cannot hold: .* merge it"):
        hb.export(folder, tmp_path / "m.gguf")
    (tmp_path / "a").mkdir()
    for source in (tmp_path / "c", folder):
        for file in source.glob("adapter_*"):
            file.replace(tmp_path / "a" / file.name)
    assert near(logits(peft.PeftModel.from_pretrained(hb.load(tmp_path / "c"), tmp_path / "a")), want)
    merged = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "a").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    hb.export(tmp_path / "merged", tmp_path / "m.gguf")
    # Floats as they are, but for the rounding of the merged weights, of float32.
    torch.testing.assert_close(logits(hb.load(tmp_path / "m.gguf")), want, rtol=0, atol=1e-4)


def test_files_that_name_weights_left_out_are_left_out(tmp_path: Path) -> None:
    """Weights of several kinds, in a subfolder each: none is half a model."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    names = {
        "openvino/openvino_model.xml": "openvino/openvino_model.bin",
        "onnx/config.json": "onnx/model.onnx",
        "draft/pytorch_model.bin.index.json": "draft/pytorch_model-00001-of-00002.bin",
    }
    for name in (*names, *names.values(), "lora/adapter_config.json", "lora/adapter_model.bin", "extra.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = companions(tmp_path, tmp_path / "target")
    copied, left_out = found.copied, found.left_out
    assert copied == ["lora/adapter_config.json", "lora/adapter_model.bin", "onnx/config.json"]
    assert {*left_out} == {*names, *names.values(), "extra.safetensors"} - {"onnx/config.json"}


# Parts of sentence-transformers


@pytest.fixture
def sentence(tmp_path: Path) -> Any:
    """A model with two Dense parts."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES, max_position_embeddings=32)).save_pretrained(tmp_path / "bert")
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    settings: dict[str, Any] = {"tokenizer_object": tokenizer(), "model_input_names": ["input_ids", "attention_mask"], **names}
    PreTrainedTokenizerFast(**settings).save_pretrained(tmp_path / "bert")
    parts = [Transformer(str(tmp_path / "bert")), Pooling(32), Dense(32, 48), Dense(48, 32)]
    return SentenceTransformer(modules=parts, device="cpu")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "[PAD]", *TEXTS[0].split()]
    built: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return built


TEXTS = ["a quick brown fox jumps over lazy dogs", "lazy dogs jumps"]


def encoded(model: Any) -> Tensor:
    return torch.from_numpy(model.encode(TEXTS))


def opened(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def test_parts_with_their_own_loaders_stay_floats(sentence: Any, tmp_path: Path) -> None:
    want = encoded(sentence)
    hb.quantize_(sentence, "q8_0")
    rows = {row.name: row for row in hb.report(sentence).rows}
    assert rows["2.linear"].reason == rows["3.linear"].reason == CUSTOM_LOADER
    assert rows["0.model.pooler.dense"].format is not None
    assert near(encoded(sentence), want)
    sentence.save(str(tmp_path / "small"))
    assert torch.equal(encoded(opened(tmp_path / "small")), encoded(sentence))


def test_a_part_alone_is_quantized(sentence: Any, tmp_path: Path) -> None:
    """As the remedy has it: it is saved by `save` then, and what was saved is loaded into the whole model, too."""
    dense = hb.quantize_(sentence[2], "q8_0")
    assert type(dense.linear).__name__ == "QuantLinear"
    want = encoded(sentence)
    hb.save(sentence, tmp_path / "s")
    torch.nn.init.zeros_(sentence[3].linear.weight)
    sentence[2].linear = nn.Linear(32, 48)
    assert torch.equal(encoded(hb.load(tmp_path / "s", model=sentence)), want)


def test_a_model_whose_parts_all_stay_floats(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer(), embedding_dim=32)], device="cpu")
    with pytest.warns(UserWarning, match=r"SentenceTransformer is left in floating point: 0\.embedding: .* own save and load"):
        hb.quantize_(model, "q8_0")
    assert [row.reason for row in hb.report(model).rows] == [CUSTOM_LOADER]
    model.save(str(tmp_path / "m"))
    assert torch.equal(encoded(opened(tmp_path / "m")), encoded(model))
    with pytest.raises(CheckpointError, match="the weights of StaticEmbedding, which sentence-transformers reads in floating point only"):
        hb.convert(tmp_path / "m", tmp_path / "c", "q8_0")
    assert not (tmp_path / "c").exists()
    hb.quantize_(model[0], "q8_0")
    want = encoded(model)
    hb.save(model[0], tmp_path / "part")
    hb.load(tmp_path / "part", model=opened(tmp_path / "m")[0])
    assert torch.equal(encoded(model), want)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_parts_go_along_with_the_model(form: str, sentence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of the two kinds of files in which a part may be, and whatever its size."""
    monkeypatch.setattr("halfbyte.checkpoint.files.COMPANION_BYTES", 5000)
    want = encoded(sentence)
    sentence.save(str(tmp_path / "m"))
    for part in ("2_Dense", "3_Dense"):
        file = tmp_path / "m" / part / "model.safetensors"
        assert file.stat().st_size > 5000
        if form == "bin":
            torch.save(safetensors.torch.load_file(file), file.with_name("pytorch_model.bin"))
            file.unlink()
        else:
            file.with_name("pytorch_model.bin").write_text("not needed")
    report = hb.convert(tmp_path / "m", tmp_path / "c", "q8_0")
    assert near(encoded(opened(tmp_path / "c")), want)
    assert any("2_Dense/pytorch_model.bin" in note for note in report.notes) is (form == "safetensors")


def test_a_list_of_parts_that_is_none(sentence: Any, tmp_path: Path) -> None:
    sentence.save(str(tmp_path / "m"))
    for damaged in ('{"0": 1}', '[{"path": "x"}]', '"x"', "[" * 100_000):
        (tmp_path / "m" / "modules.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"modules\.json is not a list of modules"):
            hb.convert(tmp_path / "m", tmp_path / "c", "q8_0")
    shutil.rmtree(tmp_path / "m")
