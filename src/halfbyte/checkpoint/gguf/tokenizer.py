"""A tokenizer from the metadata of a GGUF file: of the package `tokenizers` (`read`), and of transformers (`load`).

Two kinds are supported: byte-level BPE, llama.cpp's "gpt2", and BPE over a SentencePiece vocabulary, its "llama" and "gemma4". They are
built with `tokenizers` so as to behave like llama.cpp, so that every version of transformers gives the same tokens.

Source: llama.cpp, src/llama-vocab.cpp
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from halfbyte.checkpoint.gguf import chat_templates
from halfbyte.decoder.families import FAMILIES, OTHERS
from halfbyte.errors import CheckpointError
from halfbyte.io.gguf import File, Value, is_gguf, read_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_KINDS = ("gpt2", "llama", "gemma4")
CONTROL, USER = 3, 4  # llama.cpp's types of tokens that are matched before a text is split
# The patterns that split text into words before merging, as in the tokenizer.json of the models.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_AFTER}"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|{_AFTER}"
# DeepSeek's. In the older one letters are those that have cases.
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN,
    DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, DIGIT)
_LLAMAS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
# With these, a word that is a token is not merged from pieces, and texts begin with a token by default.
WHOLE = (*_LLAMAS, "tekken")
# What splits text by llama.cpp's name: patterns, of which each splits what the last one left.
CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LLAMAS, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"), (QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "default", "mpt", "olmo", "exaone4", "jais", "trillion", "a.x-4.0", "mellum", "gigachat"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), (DIGIT, GPT2)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "seed-coder": (_SEED,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
}
# The texts of tokens that end an answer, as llama.cpp knows them.
_ENDS = {"<|eot_id|>", "<|im_end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}
_ENDS |= {"<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["}
# Architectures of which the scores of tokens are not those that merges were learned by; their order is.
_MERGES_BY_INDEX = {family.gguf.architecture for family in (FAMILIES | OTHERS).values() if family.gguf and family.gguf.merges_by_index}
_LONGEST_TOKEN = 1024  # characters of a token of SentencePiece, which has at most some dozens
_NOT_THE_LAST = {"<|return|>", "<|flush|>"}  # in vocabularies with these "<|end|>" ends a part of an answer


class StoredTokenizer(NamedTuple):
    """A tokenizer as a GGUF file or a folder describes it.

    Attributes:
        backend: A `tokenizers.Tokenizer` with all added tokens and the post-processor.
        special_tokens: Texts of special tokens by transformers' names: bos_token, eos_token, unk_token, pad_token, …
        chat_templates: Chat templates by name.
        end_ids: Ids of the tokens that end an answer.
        clean_up: Whether transformers removes spaces before punctuation from decoded text.
    """

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    end_ids: list[int]
    clean_up: bool = False


def import_tokenizers(why: str) -> ModuleType:
    """The package `tokenizers`; raises CheckpointError, which says `why` it is needed, where it is not installed."""
    try:
        import tokenizers
    except ImportError as e:
        raise CheckpointError(f"{why} needs the package tokenizers: pip install tokenizers") from e
    return tokenizers


def read(path: Path, file: File | None = None) -> StoredTokenizer | None:
    """Build the tokenizer of a GGUF file, without transformers; None where the file has none.

    Args:
        path: The file.
        file: Its header, where that has been read already.

    Raises:
        CheckpointError: The tokenizer is of an unsupported kind, or damaged.
    """
    metadata = (file or read_header(path)).metadata
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return None
    if kind not in _KINDS:
        raise CheckpointError(f"{path} has a tokenizer of kind {short(kind)}, halfbyte knows {', '.join(_KINDS)}: take it from elsewhere")
    tokenizers = import_tokenizers("the tokenizer of a GGUF file")
    with _naming_the_file(path), _without_collections():
        tokens = list(_sequence(metadata, "tokens"))
        metadata = {**metadata, "tokenizer.ggml.tokens": tokens}  # decoded once
        special = _special_tokens(metadata, tokens)
        backend = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, special.get("unk_token"))
        _begin_and_end(backend, metadata, special, kind != "gpt2" or metadata.get("tokenizer.ggml.pre") in WHOLE)
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([tokenizers.AddedToken(token, special=True) for token in special.values() if token not in added])
        return StoredTokenizer(backend, special, chat_templates.of_metadata(metadata), end_tokens(metadata))


def load(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a GGUF file as one of transformers; None where the file has none. Raises CheckpointError as `read` does."""
    described = read(path)
    if described is None:
        return None
    from halfbyte.checkpoint.mapping.architecture import import_transformers

    transformers = import_transformers("the tokenizer of a GGUF file")
    settings: dict[str, object] = dict(described.special_tokens)
    if templates := described.chat_templates:
        only_default = templates.keys() == {chat_templates.DEFAULT}
        settings["chat_template"] = templates[chat_templates.DEFAULT] if only_default else templates
    with _naming_the_file(path):
        settings |= {"tokenizer_object": described.backend, "clean_up_tokenization_spaces": False}
        return transformers.PreTrainedTokenizerFast(**settings)  # type: ignore[no-any-return]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Hundreds of thousands of tuples that die young would make Python look through all objects of the process for cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _naming_the_file(path: Path) -> Iterator[None]:
    """Turns errors for invalid metadata into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:  # tokenizers raises Exception itself for an invalid vocabulary
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise CheckpointError(f"no tokenizer can be made from the metadata of {path} ({why}): the file is damaged") from e


def end_tokens(metadata: Mapping[str, Value]) -> list[int]:
    """The ids of the tokens with which an answer ends: a file names up to three, llama.cpp knows the others by their text."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts = list(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else []
    ending = _ENDS | ({"<|end|>"} if _NOT_THE_LAST.isdisjoint(texts) else set())
    return list(dict.fromkeys([i for i in named if type(i) is int] + [i for i, text in enumerate(texts) if text in ending]))


def save(path: Path, folder: Path) -> list[str]:
    """Write the tokenizer of a GGUF file to a folder; return a note for the report if there is none."""
    if not is_gguf(path):
        return []
    tokenizer = load(path)
    if tokenizer is None:
        return [f"{path.name} has no tokenizer"]
    tokenizer.save_pretrained(str(folder))
    return []


def _special_tokens(metadata: Mapping[str, Value], tokens: Sequence[str]) -> dict[str, str]:
    """Return the texts of special tokens by transformers' names. Some files pad with, or take for unknown text, a token that the vocabulary
    lacks: they do without, as in llama.cpp."""
    special = {}
    for name, key in {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}.items():
        if (number := metadata.get(f"tokenizer.ggml.{key}_token_id")) is None:
            continue
        if type(number) is int and number >= len(tokens) and key in {"unknown", "padding"}:
            continue
        if type(number) is not int or not 0 <= number < len(tokens):
            what = f"the GGUF file's tokenizer.ggml.{key}_token_id is {short(number)}"
            raise CheckpointError(f"{what}, and its tokens are 0 … {len(tokens) - 1}: it is damaged")
        special[name] = tokens[number]
    return special


def _sequence(metadata: Mapping[str, Value], name: str) -> Sequence[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None or isinstance(value, str | int | float):
        raise CheckpointError(f"the GGUF file has no list tokenizer.ggml.{name}: it is damaged")
    return value


def _cut(metadata: Mapping[str, Value]) -> tuple[str, ...]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in CUTS:
        raise CheckpointError(
            f"the GGUF file's tokenizer splits text by the rule {short(name)}, which halfbyte does not know: load the model alone"
        )
    return CUTS[str(name)]


def _byte_level(metadata: Mapping[str, Value], tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    patterns = _cut(metadata)
    merges = _merge_halves(metadata)
    whole = metadata.get("tokenizer.ggml.pre") in WHOLE
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=whole))
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, metadata, tokens)
    return backend


def _merge_halves(metadata: Mapping[str, Value]) -> list[tuple[str, str]]:
    """The merges, (left, right) each."""
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in _sequence(metadata, "merges"))]


def _sentencepiece(metadata: Mapping[str, Value], tokens: list[str], unk_token: str | None) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = _merge_halves(metadata)
    else:
        by_order = metadata.get("general.architecture") in _MERGES_BY_INDEX
        merges = _merges(vocabulary, [-i for i in range(len(tokens))] if by_order else _sequence(metadata, "scores"))
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unk_token))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    # One more space precedes each piece of text, even one that begins with a space, as in llama.cpp.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prefix + [normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    _add_tokens(backend, metadata, tokens)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that form every token that two others concatenate to, in the order of decreasing scores.

    Raises:
        CheckpointError: A token is so long that its halves, whose number and length grow with it, would fill the memory.
    """
    if (longest := max(vocabulary, key=len, default="")) and len(longest) > _LONGEST_TOKEN:
        raise CheckpointError(f"the GGUF file has a token of {len(longest)} characters, more than {_LONGEST_TOKEN}: it is damaged")
    found = []
    for token, i in vocabulary.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(vocabulary[left], vocabulary[right], left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        found += [(-float(scores[i]), *pair) for pair in sorted(pairs)]
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: Tokenizer, metadata: Mapping[str, Value], tokens: Sequence[str]) -> None:
    """Register the tokens that are matched literally in a text."""
    from tokenizers import AddedToken

    if "tokenizer.ggml.token_type" not in metadata:
        return
    types = [int(kind) for kind in _sequence(metadata, "token_type")]
    for kind, special in ((CONTROL, True), (USER, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type == kind
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _begin_and_end(backend: Tokenizer, metadata: Mapping[str, Value], special: Mapping[str, str], begins: bool) -> None:
    """Set the tokens that texts begin and end with."""
    from tokenizers import processors

    gemma = metadata["tokenizer.ggml.model"] == "gemma4"  # some of its files say that texts begin with none: llama.cpp does not believe it
    begins = "bos_token" in special and bool(gemma or metadata.get("tokenizer.ggml.add_bos_token", begins))
    ends = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in special
    if begins or ends:
        around = [special["bos_token"]] if begins else [], [special["eos_token"]] if ends else []
        single = [*around[0], "$A", *around[1]]
        pair = [*single, *(f"{token}:1" for token in around[0]), "$B:1", *(f"{token}:1" for token in around[1])]
        ids = [(token, backend.token_to_id(token)) for token in {*around[0], *around[1]}]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
