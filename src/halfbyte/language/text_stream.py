"""Token ids → text as it is generated.

Called by a `Generation` with the ids since the last call. The text of a token can depend on its neighbours: a character of several bytes
is in several tokens, the first token of a SentencePiece text loses its space, WordPiece joins or separates. So tokens are decoded behind a
few tokens of context, and only text that no later token can change is given out.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.errors import ArgumentError
from halfbyte.language.tokenizer import CLEAN_UP_CHARACTERS, Tokenizer, clean
from halfbyte.language.tokenizer_folder import decoder_steps

_REPLACEMENT = "\ufffd"
_LOCAL_STEPS = {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
_CONTEXT = 8  # tokens, of a byte each at least: more than a character of UTF-8 has


class TextStream:
    """The text of one sequence, piece by piece, up to a stop string.

    What `push` and `extend` return, one after the other, and then `flush`, is what `tokenizer.decode` gives for all ids, cut before the
    first stop string that is complete. With a `prefix`, it is a continuation: what `decode` gives for both, from the first character
    that the text of the prefix does not have, such as one of several bytes that the prefix begins.

    Attributes:
        finished: Whether a stop string has come; ids that are pushed afterwards are ignored.

    Example:
        stream = TextStream(tokenizer, stop=["\\n\\n"])
        for id in ids:
            print(stream.push(id), end="")
        print(stream.flush())
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> None:
        """Start an empty text.

        Args:
            tokenizer: The model's tokenizer.
            stop: Strings that end the text; they are not part of it.
            prefix: Token ids of the prompt, where the text is a continuation, which keeps its leading space. Empty for a new text.

        Raises:
            ArgumentError: A stop string is empty, which would end every text before it begins.
        """
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ArgumentError(f"stop is a list of strings of one character or more, got {stop!r}: pass such a list")
        self.finished = False
        self._raw = _RawStream(tokenizer, prefix)
        self._clean_up = tokenizer.clean_up
        self._unclean = ""  # decoded, and not cleaned up yet
        self._stop = _StopStrings(stop)

    def push(self, id: int) -> str:
        """Append a token.

        Args:
            id: The token's id.

        Returns:
            The text that cannot change any more and is not the beginning of a stop string; often "" or several characters.
        """
        return self.extend([id])

    def extend(self, ids: Sequence[int]) -> str:
        """Append tokens, which are decoded together; otherwise like `push`. A stop string may end before the last of them."""
        if self.finished:
            return ""
        text, outlook = self._raw.extend(ids, bool(self._stop))
        if self._clean_up:
            text, outlook = self._cleaned(text, outlook)
        text = self._stop.push(text, outlook)
        self.finished = self._stop.finished
        return text

    def flush(self) -> str:
        """End the text, and return what was held back; "" after a stop string."""
        if self.finished:
            return ""
        text = self._raw.flush()
        if self._clean_up:
            text, self._unclean = clean(self._unclean + text), ""
        text = self._stop.push(text, "") + self._stop.flush()
        self.finished = self._stop.finished
        return text

    def _cleaned(self, text: str, outlook: str) -> tuple[str, str]:
        """Clean up text to the last character that is in none of the patterns: no replacement reaches across it.

        Returns:
            The text that is clean for certain, and what would follow if the sequence ended now.
        """
        self._unclean += text
        end = next((at for at in range(len(self._unclean), 0, -1) if self._unclean[at - 1] not in CLEAN_UP_CHARACTERS), 0)
        stable, self._unclean = clean(self._unclean[:end]), self._unclean[end:]
        return stable, clean(self._unclean + outlook)


class _RawStream:
    """`backend.decode`, a few tokens at a time.

    Invariant: for all further ids X, the text of all ids is what was emitted followed by what decode(context + tokens + X) has
    behind its common prefix with `emitted`. That is shorter than `emitted` only where later tokens complete a character of the prompt.
    `context` may be any earlier tokens for which this holds: those that were decoded last, if they have text of their own, to which a
    decoder then does what it does to the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int]) -> None:
        self._backend = tokenizer.backend
        self._skipped = tokenizer.special_ids
        steps = decoder_steps(tokenizer.backend)
        kinds = {str(step.get("type")) for step in steps}
        self._bytes_in_characters = "ByteLevel" in kinds
        self._bytes_as_tokens = "ByteFallback" in kinds
        self._streams = all(step.get("type") in _LOCAL_STEPS or _replaces_one_character(step) for step in steps)
        start = max(0, len(prefix) - _CONTEXT)
        while start and self._bytes_as_tokens and _is_byte(self._token(prefix[start]) or ""):  # a run of bytes is decoded as a whole
            start -= 1
        self._context = [id for id in prefix[start:] if self._token(id) is not None]
        self._tokens: list[int] = []
        self._emitted = self._decode(self._context)

    def extend(self, ids: Sequence[int], look_ahead: bool) -> tuple[str, str]:
        """Append tokens.

        Args:
            ids: Their ids.
            look_ahead: Whether to also return text that later tokens may change.

        Returns:
            The text that cannot change any more, and the text of the ids so far that follows it, "" without `look_ahead`.
        """
        last = None
        for id in ids:
            if (token := self._token(id)) is not None:
                last = token
                self._tokens.append(id)
        if last is None:
            return "", ""
        # A run of byte tokens becomes U+FFFD as a whole where one of them is no UTF-8, so it is known at its end only.
        if not self._streams or (self._bytes_as_tokens and _is_byte(last)):
            return "", self._rest() if look_ahead else ""
        text = self._decode(self._context + self._tokens)
        end = len(text)
        if self._bytes_in_characters and text.endswith(_REPLACEMENT):  # perhaps the beginning of a character
            end -= 1
        stable, outlook = text[self._common(text[:end]) : end], text[max(end, self._common(text)) :]
        if stable:
            self._emitted = text[:end]
        if end == len(text):
            self._move_context()
        elif len(self._tokens) > 2 * _CONTEXT:  # text that is no UTF-8: decoding is in step again after one character
            self._context, self._tokens = [], self._tokens[-_CONTEXT:]
            self._emitted = self._decode(self._tokens)[:-1]
        return stable, outlook

    def flush(self) -> str:
        """End the text, and return what later tokens could have changed."""
        text = self._rest()
        self._context, self._tokens, self._emitted = [], [], ""
        return text

    def _rest(self) -> str:
        """Return the text that was not emitted."""
        text = self._decode(self._context + self._tokens)
        return text[self._common(text) :]

    def _common(self, text: str) -> int:
        """Return the length of the common prefix of a text and `emitted`."""
        if text.startswith(self._emitted):
            return len(self._emitted)
        pairs = enumerate(zip(text, self._emitted, strict=False))
        return next((at for at, (new, emitted) in pairs if new != emitted), len(text))

    def _move_context(self) -> None:
        """Forget earlier tokens, if the last ones have text of their own."""
        last = self._tokens[-_CONTEXT:]
        if alone := self._decode(last):
            self._context, self._tokens, self._emitted = last, [], alone

    def _token(self, id: int) -> str | None:
        """Return a token as it is in the vocabulary; None if it has no text."""
        return None if id in self._skipped else self._backend.id_to_token(id)

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, False)


class _StopStrings:
    """Passes text through up to the first complete stop string, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.finished = False
        self._stop = tuple(stop)
        self._pending = ""

    def __bool__(self) -> bool:
        return bool(self._stop)

    def push(self, text: str, outlook: str) -> str:
        """Append text.

        Args:
            text: The text.
            outlook: What would follow if the sequence ended now; it may change, and is only searched.

        Returns:
            The text that is before a stop string and not the beginning of one.
        """
        if not self._stop:
            return text
        self._pending += text
        if (start := self._first(self._pending + outlook)) is not None:
            before, self._pending, self.finished = (self._pending + outlook)[:start], "", True
            return before
        longest = max(map(len, self._stop)) - 1
        at = max(0, len(self._pending) - longest)
        while at < len(self._pending) and not any(stop.startswith(self._pending[at:]) for stop in self._stop):
            at += 1
        passed, self._pending = self._pending[:at], self._pending[at:]
        return passed

    def flush(self) -> str:
        """Return what was held back, as no stop string follows."""
        rest, self._pending = self._pending, ""
        return rest

    def _first(self, text: str) -> int | None:
        """Return where the stop string begins that is complete first; of two that end at the same place the longer one."""
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(ends)[1] if ends else None


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _replaces_one_character(step: dict[str, object]) -> bool:
    """Return whether a step of a decoder replaces a single character, which gives the same in each part of a text as in the whole."""
    pattern = step.get("pattern")
    return step.get("type") == "Replace" and isinstance(pattern, dict) and len(pattern.get("String", "")) == 1
