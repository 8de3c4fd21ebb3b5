"""The tokenizer of a Hugging Face folder, built with `tokenizers` from tokenizer.json and the files next to it.

Called by tokenizer.py. Follows the rules of transformers 5, so that the same folder gives the same ids as with its AutoTokenizer.

Source: transformers, tokenization_utils_tokenizers.py, tokenization_utils_base.py, models/auto/tokenization_auto.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from halfbyte.checkpoint.files import COMPANION_BYTES
from halfbyte.checkpoint.gguf import chat_templates
from halfbyte.checkpoint.gguf.tokenizer import StoredTokenizer, import_tokenizers
from halfbyte.checkpoint.mapping import generation_settings
from halfbyte.checkpoint.native.manifest import CONFIG
from halfbyte.errors import CheckpointError
from halfbyte.io.files import is_file
from halfbyte.io.safetensors import load_json, read_bytes

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

FILE, SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "spiece.model", "vocab.txt", "tiktoken.model")
# Model types for which transformers ignores that tokenizer_config.json names LlamaTokenizer, and takes tokenizer.json as it is.
# fmt: off
GENERIC_TYPES = frozenset([
    "ernie4_5", "ernie4_5_moe", "flex_olmo", "fuyu", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2", "gpt_bigcode", "granite",
    "granitemoe", "granitemoehybrid", "granitemoeshared", "hyperclovax", "internlm2", "internlm3", "iquestcoder", "jamba", "kimi_linear",
    "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "modernbert-decoder",
    "nemotron", "olmo2", "olmo3", "olmo_hybrid", "persimmon", "phi3", "phimoe", "stablelm",
])
# fmt: on


def read(folder: Path) -> StoredTokenizer:
    """Read the tokenizer of a folder.

    Args:
        folder: A Hugging Face folder or a halfbyte folder.

    Returns:
        The tokenizer, its special tokens and chat templates, and ids of tokens that end an answer.

    Raises:
        CheckpointError: There is no tokenizer.json, or one of the files is damaged.
    """
    if not is_file(folder / FILE):
        raise _no_tokenizer(folder)
    tokenizers = import_tokenizers(f"the tokenizer of {folder}")
    settings = load_json(folder / SETTINGS, COMPANION_BYTES) if is_file(folder / SETTINGS) else {}
    config = load_json(folder / CONFIG, COMPANION_BYTES) if is_file(folder / CONFIG) else {}
    content = read_bytes(folder / FILE, COMPANION_BYTES)
    with _naming_the_folder(folder):
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_padding()
        backend.no_truncation()
        _apply_class(backend, settings, config)
        special = _add_tokens(backend, folder, settings, tokenizers.AddedToken)
        backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
        clean_up = bool(settings.get("clean_up_tokenization_spaces", False)) and (
            type(backend.model).__name__ != "BPE"
            or bool(settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
        )
        for text in ("", "a"):  # raises for what is of a wrong type, or what tokenizers cannot decode
            backend.decode(backend.encode(text, add_special_tokens=False).ids)
    return StoredTokenizer(backend, special, chat_templates.of_folder(folder, settings), _end_ids(folder, config), clean_up)


def _no_tokenizer(folder: Path) -> CheckpointError:
    if there := [name for name in _OTHER_FILES if is_file(folder / name)]:
        remedy = "write one with transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        return CheckpointError(f"{folder} has its tokenizer as {' and '.join(there)}, and halfbyte reads {FILE}: {remedy}")
    return CheckpointError(f"{folder} has no {FILE}: copy {FILE} and {SETTINGS} of the same model to it")


@contextmanager
def _naming_the_folder(folder: Path) -> Iterator[None]:
    """Turn errors for an invalid tokenizer into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as e:
        # tokenizers raises Exception itself for invalid files, and where it has no check its language's panic, a BaseException.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise CheckpointError(f"no tokenizer can be made from {FILE} and {SETTINGS} of {folder} ({why}): copy them again") from e


def _apply_class(backend: Tokenizer, settings: Mapping[str, object], config: Mapping[str, object]) -> None:
    """Replace what transformers' class of the tokenizer replaces in tokenizer.json: the way in which spaces begin a text."""
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = stated.removesuffix("Fast") if isinstance(stated, str) else ""
    prefix = settings.get("add_prefix_space")
    byte_level = '"ByteLevel"' in f"{_described(backend.pre_tokenizer)} {_described(backend.decoder)}"
    if name == "LlamaTokenizer" and not byte_level and config.get("model_type") not in GENERIC_TYPES:
        _apply_llama(backend, prefix is None or bool(prefix), bool(settings.get("legacy", False)))
    elif name in ("GPT2Tokenizer", "Qwen2Tokenizer") and byte_level and prefix is not None:
        described, pieces = json.loads(_described(backend.pre_tokenizer) or "{}"), backend.pre_tokenizer
        steps = [pieces[i] for i in range(len(described["pretokenizers"]))] if described.get("type") == "Sequence" else [pieces]
        for step in steps:
            if type(step).__name__ == "ByteLevel":
                step.add_prefix_space = bool(prefix)


def _apply_llama(backend: Tokenizer, prefix: bool, legacy: bool) -> None:
    """Set the normalizer, pre-tokenizer and decoder of transformers' LlamaTokenizer.

    Args:
        backend: The tokenizer that is changed.
        prefix: Whether a space is added before a text.
        legacy: Whether it is added before each part between special tokens, too.
    """
    from tokenizers import decoders, pre_tokenizers

    scheme = "never" if not prefix else "always" if legacy else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1)] if prefix else []))


def _described(component: Any) -> str:
    """Return a component of a tokenizer as JSON; "" where there is none."""
    return "" if component is None else str(component.__getstate__(), "utf-8")


def decoder_steps(backend: Any) -> list[dict[str, object]]:
    """Return the steps of a tokenizer's decoder as in tokenizer.json: of a Sequence its elements, of no decoder none."""
    described = _described(backend.decoder)
    return list(_flat(json.loads(described))) if described else []


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step.get("type") == "Sequence":
        for inner in step["decoders"]:
            yield from _flat(inner)
    else:
        yield step


def _add_tokens(backend: Tokenizer, folder: Path, settings: Mapping[str, Any], make: type[AddedToken]) -> dict[str, str]:
    """Add the tokens that the files next to tokenizer.json name, and return the special ones by transformers' names."""
    stated = dict(settings)
    described: dict[int, AddedToken] = {}  # by id
    if (listed := stated.pop("added_tokens_decoder", None)) is not None:
        described = {int(i): make(**token) for i, token in listed.items()}
    else:
        if is_file(folder / SPECIAL_TOKENS):
            stated |= load_json(folder / SPECIAL_TOKENS, COMPANION_BYTES)
        if is_file(folder / ADDED_TOKENS):
            special_texts = {_text(name, stated.get(name)) for name in _NAMES}
            for token, i in load_json(folder / ADDED_TOKENS, COMPANION_BYTES).items():
                described[int(i)] = make(token, normalized=token not in special_texts, special=token in special_texts)
    special = dict(_special_tokens(stated))
    by_text = {token.content: token for token in described.values()}
    tokens = [described[i] for i in sorted(described)]
    there = {token.content for token in backend.get_added_tokens_decoder().values()} | by_text.keys()
    for name, text in special.items():
        if text not in there:
            tokens.append(make(text, **(_flags(stated.get(name)) | {"special": True})))
            there.add(text)
    for text in _extra_tokens(stated):
        if text not in there:
            tokens.append(make(text, special=True))
            there.add(text)
    for added in tokens:
        added.special = added.special or added.content in special.values()
    backend.add_tokens(tokens)
    return special


def _special_tokens(stated: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the special tokens: those of `_NAMES`, and a model's own, such as `image_token`."""
    extra = stated.get("extra_special_tokens")
    for name, value in [*stated.items(), *(extra.items() if isinstance(extra, Mapping) else ())]:
        is_token = (name.endswith("_token") or name not in stated) and isinstance(value, str | Mapping)
        if value is not None if name in _NAMES else is_token:
            yield name, _text(name, value)


def _extra_tokens(stated: Mapping[str, Any]) -> Iterable[str]:
    extra = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or []
    return [] if isinstance(extra, Mapping) else [_text("extra_special_tokens", token) for token in extra]


def _text(name: str, token: object) -> str:
    content = token.get("content") if isinstance(token, Mapping) else "" if token is None else token
    if not isinstance(content, str):
        raise CheckpointError(f"{name} of {SETTINGS} is a text or an added token, got {short(token)}: repair or remove it")
    return content


def _flags(token: object) -> dict[str, bool]:
    """Return the flags of an added token as a file states it."""
    return {key: bool(value) for key, value in token.items() if key not in ("content", "__type")} if isinstance(token, Mapping) else {}


def _end_ids(folder: Path, config: Mapping[str, object]) -> list[int]:
    """Return the ids of eos_token_id in generation_config.json; where there is no such file, in config.json."""
    file = folder / generation_settings.FILE
    stated: Any
    if is_file(file):
        stated = load_json(file, COMPANION_BYTES).get("eos_token_id")
    else:
        file, text = folder / CONFIG, config.get("text_config")
        stated = config.get("eos_token_id") or (text.get("eos_token_id") if isinstance(text, Mapping) else None)
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(i) is int and -1 <= i < 1 << 31 for i in ids):
        raise CheckpointError(f"eos_token_id of {file} is a token id or a list of them, got {short(stated)}: repair or remove it")
    return [i for i in ids if i >= 0]
