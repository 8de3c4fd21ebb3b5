"""Values of generation_config.json, tokenizer_config.json and config.json that transformers does not examine; and positions."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import halfbyte as hb
from halfbyte.checkpoint.mapping.generation_settings import check_generation
from halfbyte.cli import main
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.integrations.transformers.text import generate, open_model, positions, room

WORDS = ["[PAD]", "[UNK]", "</s>", *["a", "bug", "is", "an", "unwanted", "property", "of", "code", "that", "makes", "it", "fail"]]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m['content'] }} {% endfor %}"
)
INFINITE, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("settings")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=32))
    hb.save(hb.quantize_(model, "q8_0"), folder / "quantized")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "</s>", "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder / "quantized")
    model.generation_config.save_pretrained(folder / "quantized")
    return folder / "quantized"


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "m")


def change(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in argv])
    return code, *capsys.readouterr()


WRONG = [
    ("eos_token_id", INFINITE),
    ("eos_token_id", ["bad"]),
    ("eos_token_id", 1 << 70),
    ("bos_token_id", "bad"),
    ("pad_token_id", {}),
    ("output_hidden_states", "bad"),
    ("return_dict_in_generate", INFINITE),
    ("temperature", 1e-320),
    ("top_k", 1.5),
    ("top_p", "bad"),
    ("min_p", -1),
    ("repetition_penalty", NAN),
    ("min_length", "bad"),
    ("encoder_no_repeat_ngram_size", 1 << 40),
    ("bad_words_ids", []),
    ("begin_suppress_tokens", 3),
    ("num_beams", 0.5),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_that_transformers_could_not_use_is_named(name: str, value: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{name} of .*generation_config.json.* is .*, got .*: repair or remove it$"):
        check_generation(SimpleNamespace(**{name: value}), folder)


def test_values_that_can_be_used_stay(folder: Path) -> None:
    settings: dict[str, Any] = {
        "eos_token_id": [2, 7],
        "pad_token_id": -1,
        "bos_token_id": None,
        "top_k": 0,
        "top_p": 1.0,
        "do_sample": True,
    }
    config = GenerationConfig(**settings, repetition_penalty=2, suppress_tokens=[], bad_words_ids=[[3, 4]], temperature=0.6)
    check_generation(config, folder)
    assert {name: getattr(config, name) for name in settings} == settings
    assert (config.repetition_penalty, config.suppress_tokens, config.bad_words_ids) == (2.0, None, [[3, 4]])
    assert type(config.repetition_penalty) is float  # transformers refuses an integer
    check_generation(GenerationConfig(), folder)


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("generation_config.json", {"eos_token_id": INFINITE}, "eos_token_id of"),
        ("generation_config.json", {"bos_token_id": "bad"}, "bos_token_id of"),
        ("generation_config.json", {"sequence_bias": 1.5}, "cannot generate with sequence_bias of generation_config.json"),
        ("tokenizer_config.json", {"bos_token": 7}, "tokenizer_config.json"),
        ("config.json", {"rms_norm_eps": -INFINITE}, "config.json says rms_norm_eps"),
    ],
)
def test_a_wrong_value_is_one_line(file: str, values: dict[str, Any], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, file, **values)
    code, _, err = run(capsys, "generate", folder, "--prompt", "a bug", "--max-new-tokens", 3, "--temperature", 1)
    assert code == 2
    assert err.splitlines()[-1].startswith("halfbyte: error: ")
    assert said in err.splitlines()[-1]
    if "eos_token_id" in values:
        with pytest.raises(CheckpointError, match="eos_token_id"):
            hb.load(folder)


def test_settings_that_are_for_other_programs_do_not_matter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", folder, "--prompt", "a bug", "--max-new-tokens", 4, "--quiet")
    expected = run(capsys, *asked)
    assert expected[0] == 0
    change(folder, "generation_config.json", num_beams=2, return_dict_in_generate=True, output_hidden_states=True, num_return_sequences=2)
    assert run(capsys, *asked)[:2] == expected[:2]


def test_a_template_that_refuses_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a bug\n\n"))
    code, _, err = run(capsys, "chat", folder, "--system", "be brief", "--quiet")
    assert code == 2
    assert "no system" in err
    assert "leave --system out" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("a bug\n\n"))
    assert run(capsys, "chat", folder, "--quiet", "--max-new-tokens", 2)[0] == 0


def model_with(**settings: Any) -> Any:
    config = SimpleNamespace(**settings)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))


def test_the_positions_of_a_model() -> None:
    assert positions(model_with()) is None
    assert positions(model_with(max_position_embeddings=-1)) is None
    assert positions(model_with(max_position_embeddings=32, rope_parameters={"rope_type": "default"})) == 32
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert positions(model_with(max_position_embeddings=32, rope_parameters=scaled)) == 128
    assert positions(model_with(max_position_embeddings=128, rope_parameters=scaled)) == 128


def test_new_tokens_fit_the_positions() -> None:
    endless, short = model_with(), model_with(max_position_embeddings=32)
    assert [room(endless, 10, asked) for asked in (None, 5, 1 << 30)] == [128, 5, 1 << 30]
    assert [room(short, 10, asked) for asked in (None, 5, 22)] == [22, 5, 22]
    assert room(model_with(max_position_embeddings=999), 10, None) == 128
    for prompt, asked, said in ((10, 23, "at most 22 after 10 tokens"), (32, None, "use a shorter text"), (40, 1, "use a shorter text")):
        with pytest.raises(ArgumentError, match=said):
            room(short, prompt, asked)


def test_all_positions_are_used_and_no_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, "generation_config.json", eos_token_id=None)
    found = run(capsys, "generate", folder, "--prompt", "a bug", "--json")
    assert json.loads(found[1])["new_tokens"] == 30
    code, out, err = run(capsys, "generate", folder, "--prompt", "a bug", "--max-new-tokens", 1_000_000)
    assert (code, out) == (2, "")
    assert "max_new_tokens is at most 30 after 2 tokens" in err
    assert run(capsys, "generate", folder, "--prompt", "a bug " * 20)[0] == 2
    model, tokenizer = open_model(folder)
    with pytest.raises(ArgumentError, match="at most 30"):
        generate(model, tokenizer, tokenizer("a bug", return_tensors="pt"), print, max_new_tokens=31)
