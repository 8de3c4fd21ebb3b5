"""The tokenizer of a Hugging Face folder as the metadata of a GGUF file.

It is written from tokenizer.json: byte-level BPE as llama.cpp's "gpt2", BPE over a SentencePiece vocabulary as its "llama". llama.cpp
knows the rules that split text before merging by name only (`tokenizer.ggml.pre`).

Source: llama.cpp, convert_hf_to_gguf.py and convert_hf_to_gguf_update.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

from halfbyte.checkpoint.files import COMPANION_BYTES
from halfbyte.checkpoint.gguf import chat_templates
from halfbyte.checkpoint.gguf.tokenizer import CONTROL, CUTS, DIGIT, GPT2, USER, WHOLE
from halfbyte.errors import CheckpointError
from halfbyte.io.files import is_file
from halfbyte.io.gguf import Value
from halfbyte.io.safetensors import load_json

_NORMAL, _UNKNOWN, _UNUSED, _BYTE = 1, 2, 5, 6  # llama.cpp's types of tokens


def to_metadata(folder: Path, config: Mapping[str, object], vocabulary: int) -> tuple[dict[str, Value], list[str]]:
    """The metadata for the tokenizer of a folder, and notes for the report.

    Args:
        folder: It may have a tokenizer.json, tokenizer_config.json and chat templates.
        config: Its config.json.
        vocabulary: Number of rows of the embedding, each of which gets a token.

    Raises:
        CheckpointError: A file is damaged, or has tokens for more rows than there are.
    """
    if not is_file(folder / "tokenizer.json"):
        return {"tokenizer.ggml.model": "none"}, ["no tokenizer is written because there is no tokenizer.json"]
    described = load_json(folder / "tokenizer.json", COMPANION_BYTES)
    settings = load_json(folder / "tokenizer_config.json", COMPANION_BYTES) if is_file(folder / "tokenizer_config.json") else {}
    try:
        out, notes = _vocabulary(described, vocabulary)
        special, left_out = _special(described, settings, config, vocabulary)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise CheckpointError(f"{folder / 'tokenizer.json'} is not a file of tokenizers ({type(e).__name__}: {e})") from e
    templates, renamed = chat_templates.to_metadata(chat_templates.of_folder(folder, settings))
    return out | special | templates, [*notes, *left_out, *renamed]


def _vocabulary(described: Mapping[str, Any], count: int) -> tuple[dict[str, Value], list[str]]:
    model = described["model"]
    pieces = list(_walk(described.get("pre_tokenizer"))) + list(_walk(described.get("normalizer")))
    byte_level = any(piece.get("type") == "ByteLevel" for piece in _walk(described.get("pre_tokenizer")))
    if model.get("type") != "BPE" or not (byte_level or model.get("byte_fallback")):
        kind = f"{model.get('type')}{'' if model.get('type') != 'BPE' else ' without bytes'}"
        return {"tokenizer.ggml.model": "none"}, [f"no tokenizer is written: GGUF has no known form for a tokenizer of type {kind}"]
    if (highest := max(model["vocab"].values(), default=0)) >= count:
        raise CheckpointError(
            f"the vocabulary of tokenizer.json has ids up to {highest}, and the embedding {count} rows, one for each of 0 … {count - 1}: "
            "write the tokenizer that belongs to this model"
        )
    added_tokens = described.get("added_tokens") or []
    known = model["vocab"].keys() | {added["content"] for added in added_tokens}
    tokens = [f"[PAD{i}]" if f"[PAD{i}]" not in known else f"[PAD{i} of {count}]" for i in range(count)]
    types = [_UNUSED] * count
    for token, i in model["vocab"].items():
        tokens[i] = token
        types[i] = _BYTE if not byte_level and len(token) == 6 and token.startswith("<0x") else _NORMAL
    for added in added_tokens:
        if added["id"] < count:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added.get("special") else USER
    beyond = {added["content"]: added["id"] for added in added_tokens if added["id"] >= count}
    notes = [f"not written: the tokens {_listed(beyond)}, for which the embedding has no row, it has {count}"] if beyond else []
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    out: dict[str, Value] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges}
    if byte_level:
        cut, about_cut = _cut(described.get("pre_tokenizer"), bool(model.get("ignore_merges")))
        return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": cut, **out}, [*notes, *about_cut]
    if model.get("unk_token") in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = _UNKNOWN
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    # llama.cpp merges the pair whose result has the highest score.
    scores = [-float(ranks.get(token, len(merges) + i)) for i, token in enumerate(tokens)]
    prefix = any(p.get("type") == "Prepend" or (p.get("type") == "Metaspace" and p.get("prepend_scheme") != "never") for p in pieces)
    head: dict[str, Value] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.add_space_prefix": prefix}
    return {**head, **out, "tokenizer.ggml.scores": scores}, notes


def _listed(ids: Mapping[str, int]) -> str:
    first = ", ".join(f"{short(token)} (id {i})" for token, i in list(ids.items())[:3])
    return first if len(ids) <= 3 else f"{first} and {len(ids) - 3} more"


def _walk(piece: object) -> Iterator[Mapping[str, Any]]:
    """A pre-tokenizer or normalizer, or the elements of a sequence of them."""
    if isinstance(piece, Mapping):
        yield piece
        for key in ("pretokenizers", "normalizers"):
            for inner in piece.get(key) or ():
                yield from _walk(inner)


def _cut(pre_tokenizer: object, whole: bool) -> tuple[str, list[str]]:
    """llama.cpp's name of the rule that splits text.

    Args:
        pre_tokenizer: That of tokenizer.json.
        whole: Whether a word that is a token is not merged from pieces.
    """
    patterns = []
    for piece in _walk(pre_tokenizer):
        if piece.get("type") == "Split":
            patterns.append(piece["pattern"].get("Regex", ""))
        elif piece.get("type") == "Digits":
            patterns.append(DIGIT if piece.get("individual_digits") else "")
        elif piece.get("type") == "ByteLevel" and piece.get("use_regex", True):
            patterns.append(GPT2)
    if names := [name for name, cut in CUTS.items() if cut == tuple(patterns)]:
        if same := [name for name in names if whole == (name in WHOLE)]:
            return same[0], []
        how = "without" if whole else "with"
        return names[0], [f"llama.cpp splits text by this tokenizer's rule only {how} ignore_merges: some words may become other tokens"]
    return "default", ["llama.cpp has no name for the rule by which this tokenizer splits text: it may split some text differently"]


def _special(
    described: Mapping[str, Any], settings: Mapping[str, object], config: Mapping[str, object], count: int
) -> tuple[dict[str, Value], list[str]]:
    """The ids of special tokens, and whether a text begins or ends with one; and notes of ids beyond the `count` rows of the embedding,
    which are left out."""
    ids = dict(described["model"]["vocab"]) | {added["content"]: added["id"] for added in described.get("added_tokens") or []}
    out: dict[str, Value] = {}
    notes: list[str] = []
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{key}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        found = ids.get(token) if isinstance(token, str) else None
        if found is None:
            stated = config.get(f"{key}_token_id")
            found = stated[0] if isinstance(stated, list) and stated else stated
        if type(found) is int and found >= count:
            notes.append(f"the {key} token has id {found} and is left out: the embedding has {count} rows, 0 … {count - 1}")
        elif type(found) is int and found >= 0:
            out[f"tokenizer.ggml.{name}_token_id"] = found
    single = json.dumps(described.get("post_processor") or {})
    for key in ("bos", "eos"):
        token = next((text for text, i in ids.items() if i == out.get(f"tokenizer.ggml.{key}_token_id")), None)
        added = settings.get(f"add_{key}_token")
        around = bool(added) if added is not None else token is not None and json.dumps(token) in single
        out[f"tokenizer.ggml.add_{key}_token"] = around and f"tokenizer.ggml.{key}_token_id" in out
    return out, notes
