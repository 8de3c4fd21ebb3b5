"""Tokens as log probabilities list them: their bytes are those of the text, whatever part of a character a token is."""

from __future__ import annotations

import pytest
from test_gguf_tokenizer import byte_level, with_byte_tokens
from tokenizers import pre_tokenizers

pytest.importorskip("starlette")

from halfbyte.language.tokenizer import Tokenizer
from halfbyte.serve.formats import TokenTexts

TOKENIZERS = {
    "bytes": Tokenizer(byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)]), {}),
    "sentencepiece": Tokenizer(with_byte_tokens(False), {}),
    "sentencepiece with prefix": Tokenizer(with_byte_tokens(True), {}),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["the quick  brown", "狐 🦊\n"])
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, text: str) -> None:
    texts, ids = TokenTexts(TOKENIZERS[kind]), TOKENIZERS[kind].encode(text, add_special_tokens=False)
    joined = b"".join(texts.bytes(id) for id in ids).decode()
    assert joined == (f" {text}" if kind == "sentencepiece with prefix" else text)


def test_special_tokens_have_a_name_and_no_bytes() -> None:
    backend = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.add_special_tokens(["<end>"])
    texts, end = TokenTexts(Tokenizer(backend, {})), backend.token_to_id("<end>")
    assert (texts.entry(end, -1.0), texts.text(end)) == ({"token": "<end>", "logprob": -1.0, "bytes": None}, "<end>")


def test_parts_of_characters_are_told_apart() -> None:
    texts, ids = TokenTexts(TOKENIZERS["bytes"]), TOKENIZERS["bytes"].encode("🦊", add_special_tokens=False)
    entries = [texts.entry(id, -1.0) for id in ids]
    assert [byte for entry in entries for byte in entry["bytes"]] == list("🦊".encode())  # type: ignore[attr-defined]
    assert [entry["token"] for entry in entries] == ["\\xf0", "\\x9f", "\\xa6", "\\x8a"]
    assert [texts.text(id) for id in ids] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x8a"]
