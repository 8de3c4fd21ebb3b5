"""`TextStream`: its pieces are the text that `decode` gives for all ids, up to the first stop string, and come as early as they can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf_tokenizer import byte_level, with_byte_tokens
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from halfbyte.errors import ArgumentError
from halfbyte.language import TextStream, Tokenizer

FAMILY, EURO = "👩‍👩‍👧", "€"


def simple(model: Any, decoder: Any) -> Any:
    backend: Any = Backend(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<e>", special=True)])
    return backend


def words(*tokens: str) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


TOKENS = ("a", ".", "?", "!", ",", "'", "n't", "'m", "'s", "'ve", "'re", "s", "it")
KINDS: dict[str, Callable[[], tuple[Any, bool]]] = {
    "bytes": lambda: (byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)]), False),
    "sentencepiece": lambda: (with_byte_tokens(False), False),
    "sentencepiece with prefix": lambda: (with_byte_tokens(True), False),
    "metaspace": lambda: (simple(models.WordLevel(words("\u2581", "\u2581a", "b", "\u2581\u2581c"), "b"), decoders.Metaspace()), False),
    "word pieces": lambda: (simple(models.WordPiece(words("a", "##b", "##'", *TOKENS[1:])), decoders.WordPiece(cleanup=True)), False),
    "end of word": lambda: (simple(models.WordLevel(words("a</w>", "b", "c</w>"), "b"), decoders.BPEDecoder()), False),
    "words": lambda: (simple(models.WordLevel(words(*TOKENS), "a"), None), False),
    "words, cleaned up": lambda: (simple(models.WordLevel(words(*TOKENS, " ", "x "), "a"), None), True),
    "characters, cleaned up": lambda: (
        simple(
            models.WordLevel(words(*" .?!,'ntmsvrea\u2581"), "a"), decoders.Sequence([decoders.Fuse(), decoders.Replace("\u2581", " ")])
        ),
        True,
    ),
    "a pattern over the whole text": lambda: (
        simple(models.WordLevel(words("a", "b", "aa"), "b"), decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "A")])),
        False,
    ),
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    backend, clean_up = KINDS[kind]()
    return Tokenizer(backend, {}, clean_up=clean_up)


def streamed(actual: Tokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], int]:
    """(pieces of text, how many tokens were taken)."""
    stream, pieces, taken = TextStream(actual, stop), [], 0
    for id in ids:
        pieces.append(stream.push(id))
        taken += 1
        if stream.finished:
            assert stream.push(id) == ""
            break
    return [*pieces, stream.flush()], taken


def together(actual: Tokenizer, ids: Sequence[int], data: st.DataObject) -> list[str]:
    """Pieces of text of several tokens at a time."""
    stream, pieces, start = TextStream(actual), [], 0
    while start < len(ids):
        count = data.draw(st.integers(1, 24))
        pieces.append(stream.extend(ids[start : start + count]))
        start += count
    return [*pieces, stream.flush()]


def cut(text: str, stop: Sequence[str]) -> str | None:
    """A text up to the stop string that is complete first; None where none is in it."""
    ends = [(end, -len(s)) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    return None if not ends else text[: min(ends)[0] + min(ends)[1]]


def expected(actual: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int]:
    for taken in range(1, len(ids) + 1):
        if (text := cut(actual.decode(ids[:taken]), stop)) is not None:
            return text, taken
    return actual.decode(ids), len(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_pieces_are_the_whole(kind: str, data: st.DataObject) -> None:
    actual = tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, actual.backend.get_vocab_size() + 1), max_size=40))  # and ids that have no token
    assert "".join(streamed(actual, ids)[0]) == actual.decode(ids)
    assert "".join(together(actual, ids, data)) == actual.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "sentencepiece with prefix"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_that_are_characters_or_not(kind: str, data: st.DataObject) -> None:
    actual = tokenizer(kind)
    encoded = data.draw(st.lists(st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=3)), max_size=12))
    ids = _ids(kind, b"".join(encoded))
    assert "".join(streamed(actual, ids)[0]) == actual.decode(ids)
    assert "".join(together(actual, ids, data)) == actual.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "sentencepiece with prefix"])
@settings(max_examples=60, deadline=None)
@given(prefix=st.text("the 狐🦊é", max_size=24), text=st.text("fox 狐🦊é", min_size=1, max_size=24))
def test_a_text_goes_on_after_its_prefix(kind: str, prefix: str, text: str) -> None:
    actual = tokenizer(kind)
    head, tail = actual.encode(prefix), actual.encode(prefix + text)
    if tail[: len(head)] != head:  # a token has characters of both
        head = []
    stream = TextStream(actual, prefix=head)
    assert actual.decode(head) + "".join([stream.push(id) for id in tail[len(head) :]] + [stream.flush()]) == actual.decode(tail)


def continued(actual: Tokenizer, head: Sequence[int], tail: Sequence[int]) -> str:
    stream = TextStream(actual, prefix=head)
    return "".join([stream.push(id) for id in tail] + [stream.flush()])


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "sentencepiece with prefix"])
@pytest.mark.parametrize("cut_at", [1, 2, 3, 4, 5])
def test_a_character_that_the_prompt_begins_is_part_of_the_answer(kind: str, cut_at: int) -> None:
    actual = tokenizer(kind)
    a, *rest = actual.encode("a")
    ids = [a, *rest, *_ids(kind, "🦊é".encode())]
    cut_at += len(rest)
    assert continued(actual, ids[:cut_at], ids[cut_at:]) == ("🦊é" if cut_at < len(rest) + 5 else "é")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "sentencepiece with prefix"])
def test_no_character_of_the_prompt_is_repeated(kind: str) -> None:
    """U+FFFD in the prompt is a character, or bytes that stay incomplete."""
    actual = tokenizer(kind)
    b = actual.encode("b")
    for data in ("\ufffd".encode(), b"\xf0\x9f", b"\x80", b"\xff\xff"):
        head = [*actual.encode("a"), *_ids(kind, data)]
        assert continued(actual, head, b) == actual.decode([*head, *b])[len(actual.decode(head)) :]
        assert continued(actual, head, []) == ""


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "sentencepiece with prefix"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_answer_begins_where_the_text_of_the_prompt_ends(kind: str, data: st.DataObject) -> None:
    actual = tokenizer(kind)
    encoded = data.draw(st.lists(st.one_of(st.text("a é🦊\ufffd", max_size=4).map(str.encode), st.binary(max_size=2)), max_size=12))
    ids = _ids(kind, b"".join(encoded))
    cut_at = data.draw(st.integers(0, len(ids)))
    whole = actual.decode(ids)
    prompt = actual.decode(ids[:cut_at])
    common = max(size for size in range(len(prompt) + 1) if whole.startswith(prompt[:size]))
    assert continued(actual, ids[:cut_at], ids[cut_at:]) == whole[common:]


def _ids(kind: str, data: bytes) -> list[int]:
    """Return tokens of one byte each."""
    alphabet = dict(zip(_bytes(), _characters(), strict=True))
    ids = [tokenizer(kind).backend.token_to_id(alphabet[byte] if kind == "bytes" else f"<0x{byte:02X}>") for byte in data]
    assert None not in ids
    return ids  # type: ignore[return-value]


def _bytes() -> list[int]:
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printed + [byte for byte in range(256) if byte not in printed]


def _characters() -> list[str]:
    return [chr(byte) for byte in _bytes()[:188]] + [chr(256 + i) for i in range(68)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stop_strings(kind: str, data: st.DataObject) -> None:
    """Compared with a search of the whole text after each token."""
    actual = tokenizer(kind)
    if kind.endswith("cleaned up") or "the whole" in kind:
        size = 5
    else:
        size = min(actual.backend.get_vocab_size(), 300)
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=16))
    whole = actual.decode(ids)
    inside = st.integers(0, max(len(whole) - 1, 0)).flatmap(lambda at: st.integers(1, 5).map(lambda n: whole[at : at + n] or "x"))
    stop = data.draw(st.lists(st.one_of(inside, st.text("ab\u00e9 ", min_size=1, max_size=3)), max_size=3))
    pieces, taken = streamed(actual, ids, stop)
    assert ("".join(pieces), taken) == expected(actual, ids, stop)


def test_characters_come_as_soon_as_they_are_whole() -> None:
    actual = tokenizer("bytes")
    text = f"a{EURO}b{FAMILY}"
    pieces, _ = streamed(actual, actual.encode(text))
    assert pieces[0] == "a"
    assert pieces[-1] == ""  # nothing is held back
    assert all(piece == "" or "\ufffd" not in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) == len(text)
    actual = tokenizer("sentencepiece with prefix")
    pieces, _ = streamed(actual, actual.encode(f"a {EURO} b"))
    assert "".join(pieces) == f"a {EURO} b"
    assert EURO not in pieces[-1]


def test_what_may_be_a_stop_string_is_held_back() -> None:
    actual = Tokenizer(simple(models.WordLevel(words("a", "b", "c"), "a"), decoders.Fuse()), {})
    stream = TextStream(actual, ["abc", "bb"])
    assert [stream.push(id) for id in (0, 1, 0, 1)] == ["", "", "ab", ""]
    assert (stream.push(2), stream.finished, stream.flush()) == ("", True, "")
    stream = TextStream(actual, ["abc"])
    assert [stream.push(id) for id in (2, 0, 1)] == ["c", "", ""]
    assert (stream.flush(), stream.finished) == ("ab", False)


def test_newlines_of_a_sentencepiece_vocabulary_stop_at_once() -> None:
    """They are byte tokens, whose text is certain only after the last one of a run."""
    actual = tokenizer("sentencepiece")
    newline = actual.backend.token_to_id("<0x0A>")
    assert newline is not None
    ids = actual.encode("a")
    pieces, taken = streamed(actual, [*ids, newline, newline, newline], ["\n\n"])
    assert ("".join(pieces), taken) == ("a", len(ids) + 2)


def test_special_tokens_are_left_out() -> None:
    actual = tokenizer("bytes")
    special = actual.backend.token_to_id("<|x|>")
    assert special is not None
    ids = [*actual.encode("a"), special, *actual.encode("b")]
    stream = TextStream(actual)
    assert "".join(stream.push(id) for id in ids) == "ab"


def test_a_long_text_is_decoded_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is no UTF-8."""
    actual = tokenizer("bytes")
    broken = actual.backend.token_to_id("\u0122")  # the byte 0x80... as a character of the byte-level alphabet
    assert broken is not None
    for ids in ([*actual.encode("the weights of a model ") * 50], [broken] * 500):
        stream, longest, pieces = TextStream(actual), 0, []
        decode = stream._raw._decode

        def watched(tokens: list[int], decode: Callable[[list[int]], str] = decode) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return decode(tokens)

        monkeypatch.setattr(stream._raw, "_decode", watched)
        pieces = [stream.push(id) for id in ids]
        assert "".join([*pieces, stream.flush()]) == actual.decode(ids)
        assert longest < 40
        pieces, longest = [stream.extend(ids)], 0
        pieces += [stream.push(id) for id in ids]
        assert "".join([*pieces, stream.flush()]) == actual.decode([*ids, *ids])
        assert longest < 40, "few of many tokens are decoded again"


@pytest.mark.parametrize("stop", [[""], "ab", [5]])
def test_stop_strings_that_are_none(stop: Any) -> None:
    with pytest.raises(ArgumentError, match=r"stop is a list of strings of one character or more, got .*: pass such a list"):
        TextStream(tokenizer("bytes"), stop)
