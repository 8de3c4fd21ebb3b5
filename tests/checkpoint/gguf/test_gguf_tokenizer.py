"""Tokenizers through GGUF: the same tokens as before, whatever cuts the words, and as transformers' own reader gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from test_hostile_files import outcome
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from halfbyte.checkpoint.gguf import chat_templates
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.gguf import vocabulary as gguf_vocabulary
from halfbyte.checkpoint.gguf.config import to_config
from halfbyte.errors import CheckpointError
from halfbyte.io import gguf

TEXTS = [
    "The weights of a model, in 4 bits: naïve?",
    "  two  spaces\n\n\tand 12345.67 numbers; it's WE'LL\r\n",
    "日本語 e\u0301 🙂 <|x|><tool> done",
    "",
    " ",
]
CORPUS = [*TEXTS, (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")[:4000]]


def byte_level(steps: list[Any], texts: list[str] = CORPUS, **settings: Any) -> Any:
    built: Any = Tokenizer(models.BPE(**settings))
    built.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "<|x|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    built.train_from_iterator(texts, trainer)
    built.add_tokens([AddedToken("<tool>", normalized=False)])
    return built


def split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def sentencepiece(prefix: bool) -> Any:
    built: Any = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prefix + [normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] * prefix
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    specials = ["<unk>", "<s>", "<|x|>", *(f"<0x{i:02X}>" for i in range(256))]
    built.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=specials))
    return built


def with_byte_tokens(prefix: bool) -> Any:
    """A SentencePiece vocabulary whose byte tokens are ordinary ones, as in models."""
    described = json.loads(sentencepiece(prefix).to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(described))


def written(folder: Path, backend: Any, drop: tuple[str, ...] = (), **settings: Any) -> tuple[Path, Any, list[str]]:
    """A GGUF file with nothing but the tokenizer."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", **settings)
    tokenizer.save_pretrained(folder)
    metadata, notes = gguf_vocabulary.to_metadata(folder, {}, 1000)
    metadata = {key: value for key, value in metadata.items() if key not in drop}
    path = folder / "m.gguf"
    path.unlink(missing_ok=True)
    writer = gguf.Writer(path, {"general.architecture": "llama", **metadata}, {})
    writer.finish()
    return path, tokenizer, notes


def same(a: Any, b: Any) -> bool:
    ids = [(a(text)["input_ids"], b(text)["input_ids"]) for text in TEXTS]
    return all(actual == expected and a.decode(actual) == b.decode(expected) for actual, expected in ids)


@pytest.mark.parametrize(
    ("steps", "settings", "name"),
    [
        ([pre_tokenizers.ByteLevel(add_prefix_space=False)], {}, "gpt-2"),
        (split(gguf_tokenizer.QWEN2), {}, "qwen2"),
        (split(gguf_tokenizer.LLAMA3), {"ignore_merges": True}, "llama-bpe"),
    ],
)
def test_byte_level(steps: list[Any], settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    path, tokenizer, notes = written(tmp_path, byte_level(steps, **settings), add_bos_token=False)
    assert gguf.read_header(path).metadata["tokenizer.ggml.pre"] == name
    assert not notes
    assert same(gguf_tokenizer.load(path), tokenizer)


SHORT, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
HAN = "[一-龥ࠀ-一가-퟿]+"
# As in tokenizer.json of GLM-4, Phi-4, HunYuan, Qwen3.5, StableLM 2, Seed-OSS, DeepSeek-Coder, Mistral Nemo, gpt-oss and EXAONE 4.
PATTERNS = {
    "glm4": [rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"],
    "hunyuan-dense": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
    ],
    "qwen35": [rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"],
    "stablelm2": [rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"],
    "seed-coder": [rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    ],
    "gpt-4o": [
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{SHORT}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{SHORT}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    ],
    "exaone4": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
}
PATTERNS |= {"dbrx": PATTERNS["glm4"], "deepseek-v3": PATTERNS["hunyuan-dense"]}
HARD = [
    *TEXTS,
    "don't CAN'T l'été x2y 3.14 ٣٤٥ HTMLParser\u3000ÀB ไทย हिन्दी 👩‍👩‍👧 foo.bar()\n \n",
    " \u00a0e\u0301ß 1 234 567'd//\r\n\r\n",
]


@pytest.mark.parametrize("name", PATTERNS)
def test_cuts(name: str, tmp_path: Path) -> None:
    """The texts are cut as by these models' tokenizer.json; the vocabulary has tokens across the cuts, so that they matter. What is written
    is read again."""
    backend = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)], texts=HARD * 50)
    whole = [len(backend.encode(text).ids) for text in HARD]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*(split(pattern)[0] for pattern in PATTERNS[name]), backend.pre_tokenizer])
    backend.model.ignore_merges = name == "tekken"
    assert sum(len(backend.encode(text).ids) for text in HARD) > sum(whole) + 10
    path, tokenizer, notes = written(tmp_path, backend, add_bos_token=False)
    assert not notes
    metadata = gguf.read_header(path).metadata
    for cut in (name, metadata["tokenizer.ggml.pre"]):
        path.unlink()
        gguf.Writer(path, {**metadata, "tokenizer.ggml.pre": cut}, {}).finish()
        loaded = gguf_tokenizer.load(path)
        for text in HARD:
            assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"], text


def test_a_cut_without_a_name_is_said(tmp_path: Path) -> None:
    _, _, notes = written(tmp_path, byte_level(split(r"\p{L}+|\p{N}+")))
    assert any("may split some text differently" in note for note in notes)
    for pattern, whole, how in ((gguf_tokenizer.QWEN2, True, "without"), (PATTERNS["tekken"][0], False, "with")):
        _, _, (note,) = written(tmp_path, byte_level(split(pattern), ignore_merges=whole))
        assert f"only {how} ignore_merges" in note


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    path, tokenizer, _ = written(tmp_path, sentencepiece(prefix), unk_token="<unk>", add_bos_token=False)
    loaded = gguf_tokenizer.load(path)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    # Files of llama.cpp have scores and no merges.
    path, _, _ = written(tmp_path, sentencepiece(prefix), ("tokenizer.ggml.merges",), unk_token="<unk>", add_bos_token=False)
    loaded = gguf_tokenizer.load(path)
    assert all(loaded(text)["input_ids"] == tokenizer(text)["input_ids"] for text in TEXTS)


def test_what_texts_begin_with(tmp_path: Path) -> None:
    backend = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    path, tokenizer, _ = written(tmp_path, backend)
    loaded = gguf_tokenizer.load(path)
    assert loaded("a")["input_ids"][0] == 0
    assert same(loaded, tokenizer)
    assert loaded("a", add_special_tokens=False)["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]


def test_what_answers_end_with(tmp_path: Path) -> None:
    """As in llama.cpp: what the file names, and tokens that it knows by their text."""
    sizes = {"context_length": 9, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96, "attention.head_count": 1}
    head: dict[str, Any] = {f"gemma2.{key}": value for key, value in sizes.items()} | {"gemma2.attention.layer_norm_rms_epsilon": 1e-5}

    def ends(tokens: list[str], **metadata: Any) -> Any:
        listed = {f"tokenizer.ggml.{key}": value for key, value in {**metadata, "tokens": tokens}.items()}
        return to_config({"general.architecture": "gemma2", **head, **listed}, [], lambda name: torch.ones(1))["eos_token_id"]

    assert ends(["a", "<eos>"], eos_token_id=1) == 1
    assert ends(["<eos>", "<end_of_turn>"], eos_token_id=0) == [0, 1]  # Gemma
    assert ends(["<|end|>", "<|endoftext|>"], eos_token_id=1) == [1, 0]  # Phi-4-mini
    assert ends(["<|endoftext|>", "a", "<|user|>"], eos_token_id=0, eot_token_id=2) == [0, 2]  # GLM-4
    assert ends(["<|end|>", "<|return|>", "<|call|>"], eos_token_id=1) == [1, 2]  # gpt-oss, where <|end|> ends a part of an answer
    assert ends(["a", "<|im_end|>"]) == 1
    assert ends(["</s>", "a"]) is None


def test_texts_of_gemma_4_begin_with_a_token(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, sentencepiece(False), unk_token="<unk>", add_bos_token=False)
    metadata = gguf.read_header(path).metadata
    path.unlink()
    gguf.Writer(path, {**metadata, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.pre": "gemma4"}, {}).finish()
    assert gguf_tokenizer.load(path)("a")["input_ids"][0] == 1


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.20"), reason="older versions cut words otherwise")
def test_transformers_reads_the_same(tmp_path: Path) -> None:
    for folder, backend in (("a", byte_level(split(gguf_tokenizer.QWEN2))), ("b", sentencepiece(True))):
        (tmp_path / folder).mkdir()
        path, _, _ = written(tmp_path / folder, backend, add_bos_token=False)
        expected = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
        actual = gguf_tokenizer.load(path)
        for text in (TEXTS[0], TEXTS[2].partition("<")[0]):
            assert actual(text, add_special_tokens=False)["input_ids"] == expected(text, add_special_tokens=False)["input_ids"], text


def test_what_is_refused(tmp_path: Path) -> None:
    def load(**metadata: Any) -> Any:
        path = tmp_path / "m.gguf"
        path.unlink(missing_ok=True)
        gguf.Writer(path, {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, {}).finish()
        return gguf_tokenizer.load(path)

    assert load() is None
    assert load(model="none") is None
    with pytest.raises(CheckpointError, match="of kind 'bert', halfbyte knows gpt2, llama, gemma4"):
        load(model="bert")
    with pytest.raises(CheckpointError, match="splits text by the rule 'own'"):
        load(model="gpt2", pre="own", tokens=["a"], merges=["a a"])
    with pytest.raises(CheckpointError, match=r"no list tokenizer\.ggml\.tokens"):
        load(model="gpt2")
    with pytest.raises(CheckpointError, match="no tokenizer can be made"):
        load(model="gpt2", tokens=["a", "b"], merges=["c d"])
    with pytest.raises(CheckpointError, match="no tokenizer can be made"):
        load(model="gpt2", tokens=["a", "b"], merges=["nospace"])
    for wrong in (-1, 2, True):
        with pytest.raises(CheckpointError, match=rf"eos_token_id is {wrong}, and its tokens are 0 … 1: it is damaged"):
            load(model="gpt2", tokens=["a", "b"], merges=[], eos_token_id=wrong)
    with pytest.raises(CheckpointError, match="padding_token_id is -1"):
        load(model="gpt2", tokens=["a", "b"], merges=[], padding_token_id=-1)
    without = load(model="gpt2", tokens=["a", "b"], merges=[], eos_token_id=1, padding_token_id=2, unknown_token_id=9)
    assert (without.eos_token, without.pad_token, without.unk_token) == ("b", None, None)


def test_a_token_that_would_fill_the_memory_with_its_halves(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "a" * 10**6], "tokenizer.ggml.scores": [0.0, -1.0]}
    gguf.Writer(tmp_path / "m.gguf", {"general.architecture": "llama", **metadata}, {}).finish()
    with pytest.raises(CheckpointError, match="has a token of 1000000 characters, more than 1024: it is damaged"):
        gguf_tokenizer.read(tmp_path / "m.gguf")


def test_other_kinds_are_not_written(tmp_path: Path) -> None:
    built: Any = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="<s>"))
    built.normalizer = normalizers.Lowercase()
    path, _, notes = written(tmp_path, built)
    assert any("no tokenizer is written" in note for note in notes)
    assert gguf_tokenizer.load(path) is None


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_nonsense_in_the_metadata(kind: str, tmp_path: Path) -> None:
    backend = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)]) if kind == "gpt2" else sentencepiece(True)
    path, _, _ = written(tmp_path, backend, unk_token="<unk>" if kind == "llama" else None)
    file = gguf.read_header(path).metadata
    sound = {key: list(value) if isinstance(value, gguf.Strings) else value for key, value in file.items()}
    for key in sound:
        for value in (None, 0, -1, 1 << 31, 1.5, "x", "", [], [""], ["a", "a"], [1, 2], [0.5], True):
            changed = {name: old for name, old in sound.items() if name != key} | ({} if value is None else {key: value})
            path.unlink()
            gguf.Writer(path, changed, {}).finish()
            outcome(lambda: gguf_tokenizer.load(path))


DEFAULT, TOOLS = "{% for m in messages %}A:{{ m['content'] }}{% endfor %}", "{% for m in messages %}TOOL:{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("style", ["files", "list", "processor"])
def test_several_chat_templates(style: str, tmp_path: Path) -> None:
    """They survive the way into a file, out of it and back into a folder, in each of the places where folders have them."""
    templates = {"default": DEFAULT, "tool_use": TOOLS, "rag-2": "{{ documents }}"}
    backend = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=templates).save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    if style != "files":
        shutil.rmtree(tmp_path / "additional_chat_templates")
        (tmp_path / "chat_template.jinja").unlink()
        path = tmp_path / ("tokenizer_config.json" if style == "list" else "chat_template.json")
        settings = json.loads(path.read_text()) if path.exists() else {}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        path.write_text(json.dumps(settings))
    metadata, notes = gguf_vocabulary.to_metadata(tmp_path, {}, 1000)
    assert metadata["tokenizer.chat_template"] == DEFAULT
    assert metadata["tokenizer.chat_template.tool_use"] == TOOLS
    assert sorted(metadata["tokenizer.chat_templates"]) == ["rag_2", "tool_use"]  # type: ignore[arg-type]
    assert notes == ["the chat template 'rag-2' is called 'rag_2' in the file: names in GGUF have letters, digits and _"]
    path = tmp_path / "m.gguf"
    gguf.Writer(path, {"general.architecture": "llama", **metadata}, {}).finish()
    loaded = gguf_tokenizer.load(path)
    assert loaded.chat_template == {"default": DEFAULT, "tool_use": TOOLS, "rag_2": "{{ documents }}"}
    gguf_tokenizer.save(path, tmp_path / "again")
    assert PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "again")).chat_template == loaded.chat_template


def test_chat_templates_of_other_writers(tmp_path: Path) -> None:
    """The keys are gguf-py's."""
    gguf_py = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf_py.GGUFWriter(path, "llama")
    writer.add_chat_template([{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOLS}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = gguf.read_header(path).metadata
    assert chat_templates.of_metadata(metadata) == {"default": DEFAULT, "tool_use": TOOLS}
    written, _ = chat_templates.to_metadata({"default": DEFAULT, "tool_use": TOOLS})
    assert {key: list(value) if isinstance(value, list) else value for key, value in written.items()} == {
        key: list(value) if isinstance(value, gguf.Strings) else value for key, value in metadata.items() if "chat_template" in key
    }


def test_chat_templates_that_cannot_be_written() -> None:
    written, (note,) = chat_templates.to_metadata({"tool-use": DEFAULT, "tool_use": TOOLS})
    assert written["tokenizer.chat_template.tool_use"] == TOOLS
    assert note == "the chat template 'tool-use' is not written: its name is 'tool_use' in GGUF, which another one has"
    with pytest.raises(CheckpointError, match=r"a chat template '\.\./x', names have letters"):
        chat_templates.of_metadata({"tokenizer.chat_template.../x": TOOLS})


def test_chat_templates_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is a text, or several by name, got 5: repair or remove it"):
        chat_templates.of_folder(tmp_path, {"chat_template": 5})
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8 \(invalid start byte at byte 1\)"):
        chat_templates.of_folder(tmp_path, {})


def test_tokens_beyond_the_embedding(tmp_path: Path) -> None:
    """A pad token that was added to the tokenizer alone: its id has no row, and no reader takes it."""
    backend = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    rows = backend.get_vocab_size()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", pad_token="[PAD]", eos_token="[E]", add_eos_token=True)
    assert {tokenizer.pad_token_id, tokenizer.eos_token_id} == {rows, rows + 1}
    tokenizer.save_pretrained(tmp_path)
    metadata, notes = gguf_vocabulary.to_metadata(tmp_path, {}, rows)
    assert len(metadata["tokenizer.ggml.tokens"]) == rows  # type: ignore[arg-type]
    assert {key for key in metadata if key.endswith("_token_id")} == {"tokenizer.ggml.bos_token_id"}
    assert not metadata["tokenizer.ggml.add_eos_token"]
    assert any("'[PAD]' (id" in note and "has no row" in note for note in notes)
    assert f"the pad token has id {tokenizer.pad_token_id} and is left out: the embedding has {rows} rows, 0 … {rows - 1}" in notes
    path = tmp_path / "m.gguf"
    gguf.Writer(path, {"general.architecture": "llama", **metadata}, {}).finish()
    assert gguf_tokenizer.load(path)(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]


def test_ids_of_config_beyond_the_embedding(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_level([pre_tokenizers.ByteLevel()]), bos_token="<s>").save_pretrained(tmp_path)
    metadata, notes = gguf_vocabulary.to_metadata(tmp_path, {"pad_token_id": 1000, "eos_token_id": [999, 1000]}, 1000)
    assert "tokenizer.ggml.padding_token_id" not in metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == 999
    assert "the pad token has id 1000 and is left out: the embedding has 1000 rows, 0 … 999" in notes


def test_a_vocabulary_beyond_the_embedding(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_level([pre_tokenizers.ByteLevel()])).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"ids up to \d{3}, and the embedding 100 rows, one for each of 0 … 99: write the tokenizer"):
        gguf_vocabulary.to_metadata(tmp_path, {}, 100)


def test_placeholders_of_rows_without_a_token(tmp_path: Path) -> None:
    """A token that is called as the placeholder of another row would take its place."""
    backend = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.add_special_tokens(["[PAD998]"])
    path, tokenizer, _ = written(tmp_path, backend, add_bos_token=False)
    tokens = list(gguf.read_header(path).metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    assert len(set(tokens)) == len(tokens) == 1000
    assert gguf_tokenizer.load(path)("[PAD998]")["input_ids"] == tokenizer("[PAD998]")["input_ids"]
