"""`Tokenizer`: the same ids and texts as transformers for the same folder or file, without transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_gguf_tokenizer import HARD, byte_level, sentencepiece, split, written
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS, TOKENIZER_MAPPING_NAMES

from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.language import Tokenizer
from halfbyte.language.tokenizer_folder import GENERIC_TYPES

TEXTS = [*HARD, "  <s>  a</s> b <|x|>c <tool> d", "don 't , go . ' x ' ? !", " a", "a ", "\n\n"]


def saved(folder: Path, backend: Any, *, config: dict[str, Any] | None = None, edit: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A folder with a tokenizer; `edit` changes tokenizer_config.json, None removes an entry."""
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=backend, **({"bos_token": "<s>"} | settings)).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    stated = json.loads(path.read_text()) | (edit or {})
    path.write_text(json.dumps({key: value for key, value in stated.items() if value is not None}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_same(path: Path, expected: Any = None) -> Tokenizer:
    """Compares ids and texts with transformers'."""
    actual = Tokenizer.open(path)
    expected = expected or AutoTokenizer.from_pretrained(path)
    assert actual.eos_ids[:1] == ((expected.eos_token_id,) if expected.eos_token_id is not None else actual.eos_ids[:1])
    assert actual.backend.get_vocab_size() == len(expected)
    assert actual.special_tokens.items() <= expected.special_tokens_map.items()
    for text in TEXTS:
        for add in (True, False):
            ids = expected(text, add_special_tokens=add)["input_ids"]
            assert actual.encode(text, add_special_tokens=add) == ids, text
            for skip in (True, False):
                assert actual.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip), text
    return actual


def plain_bytes() -> Any:
    return byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])


def word_pieces() -> Any:
    backend: Any = Backend(
        models.WordPiece({"[UNK]": 0, "<s>": 1, "a": 2, "##b": 3, "don": 4, "'": 5, "t": 6, ".": 7, ",": 8}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def unigram() -> Any:
    scores = [(token, -float(i)) for i, token in enumerate(["<unk>", "<s>", "\u2581a", "\u2581", "b", "don", "'", "t", ".", ","])]
    backend: Any = Backend(models.Unigram(scores, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def beginning(backend: Any) -> Any:
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return backend


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        (plain_bytes, {}),
        (plain_bytes, {"eos_token": "<|x|>", "pad_token": "[PAD]"}),  # one that is there, and one that is added
        (plain_bytes, {"add_bos_token": True}),
        (lambda: beginning(plain_bytes()), {"add_bos_token": False}),
        (plain_bytes, {"add_prefix_space": True}),
        (plain_bytes, {"clean_up_tokenization_spaces": True}),
        (plain_bytes, {"extra_special_tokens": ["<tool>", "<more>"]}),
        (plain_bytes, {"image_token": "<image>"}),
        (plain_bytes, {"split_special_tokens": True}),
        (lambda: sentencepiece(True), {"unk_token": "<unk>"}),
        (lambda: beginning(sentencepiece(False)), {"unk_token": "<unk>", "eos_token": AddedToken("</s>", rstrip=True)}),
        (word_pieces, {"unk_token": "[UNK]", "clean_up_tokenization_spaces": True}),
        (unigram, {"unk_token": "<unk>", "clean_up_tokenization_spaces": True}),
        (unigram, {"unk_token": "<unk>"}),
    ],
)
def test_the_same_as_transformers(backend: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    check_same(saved(tmp_path, backend(), **settings))


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = plain_bytes()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    assert len(check_same(saved(tmp_path, backend)).encode("one two three four five")) > 3


@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_the_class_llama_replaces_parts_of_the_file(model_type: str, prefix: bool | None, legacy: bool | None, tmp_path: Path) -> None:
    edit = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": prefix, "legacy": legacy}
    check_same(saved(tmp_path, sentencepiece(True), unk_token="<unk>", eos_token="<|x|>", config={"model_type": model_type}, edit=edit))


def test_the_class_llama_with_byte_level_bpe_is_the_file(tmp_path: Path) -> None:
    edit = {"tokenizer_class": "LlamaTokenizerFast"}
    check_same(saved(tmp_path, beginning(plain_bytes()), config={"model_type": "llama"}, edit=edit))


@pytest.mark.parametrize(("name", "model_type"), [("GPT2Tokenizer", "gpt2"), ("Qwen2Tokenizer", "qwen3")])
@pytest.mark.parametrize("prefix", [True, False, None])
def test_classes_of_byte_level_bpe(name: str, model_type: str, prefix: bool | None, tmp_path: Path) -> None:
    backend = plain_bytes() if name == "GPT2Tokenizer" else byte_level(split(gguf_tokenizer.QWEN2))
    if name == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
    tokens = {f"{kind}_token": "<|x|>" for kind in ("eos", "unk", "pad")}
    edit = {"tokenizer_class": name, "add_prefix_space": prefix}
    check_same(saved(tmp_path, backend, config={"model_type": model_type}, edit=edit, **tokens))


def test_the_class_gemma(tmp_path: Path) -> None:
    backend = beginning(sentencepiece(False))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokens = {"unk_token": "<unk>", **{f"{kind}_token": "<|x|>" for kind in ("eos", "pad", "mask")}}
    check_same(saved(tmp_path, backend, config={"model_type": "gemma3_text"}, edit={"tokenizer_class": "GemmaTokenizer"}, **tokens))


def test_files_of_older_versions(tmp_path: Path) -> None:
    """Without added_tokens_decoder special tokens are in special_tokens_map.json, added ones in added_tokens.json."""
    folder = saved(tmp_path, plain_bytes(), edit={"added_tokens_decoder": None, "bos_token": None})
    size = len(AutoTokenizer.from_pretrained(folder))
    special = {
        "bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False},
        "eos_token": "<e>",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text(json.dumps({"<e>": size, "<f>": size + 1}))
    actual = check_same(folder)
    assert actual.special_tokens == {"bos_token": "<s>", "eos_token": "<e>"}
    assert actual.eos_ids == (size,)
    assert actual.encode("<f>", add_special_tokens=False) == [size + 1]


def test_types_for_which_the_class_llama_is_ignored() -> None:
    generic = {"TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend"}
    names = {name: TOKENIZER_MAPPING_NAMES.get(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    encoders = {"beam", "bigbird_pegasus", "xlm-roberta-xl"}
    expected = {name for name, kind in names.items() if kind in generic} - encoders
    expected -= {name for name in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if names.get(name) not in generic}
    assert expected <= GENERIC_TYPES


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "scores"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    backend = byte_level(split(gguf_tokenizer.QWEN2)) if kind == "bytes" else sentencepiece(True)
    drop = ("tokenizer.ggml.merges",) if kind == "scores" else ()
    path, _, _ = written(
        tmp_path, backend, drop, eos_token="<|x|>", unk_token="<unk>" if kind != "bytes" else None, chat_template="{{ x }}"
    )
    actual = check_same(path, gguf_tokenizer.load(path))
    assert actual.chat_templates == {"default": "{{ x }}"}
    assert actual.eos_ids == (backend.token_to_id("<|x|>"),)


def test_what_ends_an_answer(tmp_path: Path) -> None:
    folder = saved(tmp_path, plain_bytes(), eos_token="<|x|>", config={"eos_token_id": 7, "text_config": {"eos_token_id": 9}})
    default_eos = PreTrainedTokenizerFast.from_pretrained(folder).eos_token_id
    assert Tokenizer.open(folder).eos_ids == (default_eos, 7)
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    assert Tokenizer.open(folder).eos_ids == (default_eos, 9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, default_eos, 6]}))
    assert Tokenizer.open(folder).eos_ids == (default_eos, 5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=r"eos_token_id of .*generation_config\.json is a token id or a list of them, got 'x'"):
        Tokenizer.open(folder)


def test_chat_templates(tmp_path: Path) -> None:
    templates = {"default": "{{ a }}", "tool_use": "{{ b }}"}
    assert Tokenizer.open(saved(tmp_path, plain_bytes(), chat_template=templates)).chat_templates == templates


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json: copy tokenizer\.json and tokenizer_config\.json"):
        Tokenizer.open(tmp_path)
    described = json.loads(plain_bytes().to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(described["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in described["model"]["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match=r"as vocab\.json and merges\.txt, and halfbyte reads tokenizer\.json: write one with transf"):
        Tokenizer.open(tmp_path)
    expected: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected.save_pretrained(tmp_path)  # the remedy
    assert Tokenizer.open(tmp_path).encode(TEXTS[0]) == expected(TEXTS[0])["input_ids"]


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no "):
        Tokenizer.open(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"is no \.gguf file: name a Hugging Face folder"):
        Tokenizer.open(tmp_path / "file")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', '{"model": 5}'])
def test_a_damaged_tokenizer_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"no tokenizer can be made from tokenizer\.json and tokenizer_config\.json of .*: copy them"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("value", [5, ["a"], {"content": 5}, {"lstrip": True}])
@pytest.mark.parametrize("name", ["bos_token", "added_tokens_decoder", "extra_special_tokens"])
def test_damaged_settings(name: str, value: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path, plain_bytes(), edit={name: [value] if name == "extra_special_tokens" else value})
    if (name, value) == ("extra_special_tokens", ["a"]):
        return
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        Tokenizer.open(folder)


def test_bad_input(tmp_path: Path) -> None:
    actual = Tokenizer.open(saved(tmp_path, plain_bytes()))
    with pytest.raises(ArgumentError, match=r"a lone surrogate '\\ud800' at character 1, which is no text: decode it as UTF-8"):
        actual.encode("a\ud800")
    with pytest.raises(ArgumentError, match="the text to encode is a str, got list: pass one text at a time"):
        actual.encode(["a"])  # type: ignore[arg-type]
    for id in (-1, 1 << 32):
        with pytest.raises(ArgumentError, match="a token id is from 0 to 4294967295, got"):
            actual.decode([id])
    assert actual.decode([actual.encode("a")[0], 1_000_000]) == "a"  # a row of an embedding that is padding


def test_neither_transformers_nor_tokenizers_nor_jinja2_are_imported_early(tmp_path: Path) -> None:
    folder = saved(tmp_path, plain_bytes(), chat_template="{{ messages[0].content }}")
    code = f"""
import sys
from pathlib import Path
import torch
before = set(sys.modules)
from halfbyte.language import Sampler, Sampling, TextStream, Tokenizer, render
new = set(sys.modules) - before
assert not new & {{"tokenizers", "jinja2", "transformers"}}, new
tokenizer = Tokenizer.open(Path({str(folder)!r}))
assert render(tokenizer.chat_templates["default"], [{{"content": "a"}}]) == "a"
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, plain_bytes())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CheckpointError, match="needs the package tokenizers: pip install tokenizers"):
        Tokenizer.open(folder)


def test_a_decoder_with_a_pattern_is_read(tmp_path: Path) -> None:
    backend = plain_bytes()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("e+"), "E")])
    check_same(saved(tmp_path, backend))


def test_a_decoder_that_tokenizers_cannot_run(tmp_path: Path) -> None:
    """It panics for an empty text, which is no Exception."""
    backend = plain_bytes()
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    folder = saved(tmp_path, backend)
    with pytest.raises(CheckpointError, match=r"no tokenizer can be made from .*PanicException"):
        Tokenizer.open(folder)
