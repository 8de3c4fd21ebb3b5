"""The JSON of answers: choices, deltas, log probabilities and usage, in the shapes of both endpoints for text.

`completions.py` has one `CompletionFormat` or `ChatFormat` for each request, and calls `whole` for a response, `first`, `delta` and
`text_chunk` for a stream.
"""

from __future__ import annotations

import codecs
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache

from halfbyte import __version__
from halfbyte.language.sampling.sampler import Choice
from halfbyte.language.tokenizer import Tokenizer
from halfbyte.language.tokenizer_folder import decoder_steps
from halfbyte.serve.engine import Request
from halfbyte.serve.replies import dumps, event

Calls = list[dict[str, object]]  # tool calls, as OpenAI's API has them
# The characters that byte-level tokenizers spell bytes with: those that print are themselves, the others follow from U+0100 on.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTED)}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """Bytes of single tokens, for log probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        kinds = {step.get("type") for step in decoder_steps(tokenizer.backend)}
        self._bytes_in_characters, self._bytes_as_tokens = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._added, self._special = frozenset(tokenizer.backend.get_added_tokens_decoder()), tokenizer.special_ids
        self.bytes = lru_cache(maxsize=1 << 14)(self._bytes)

    def _bytes(self, token: int) -> bytes:
        """Return what a token adds to a text, in UTF-8: often not whole characters, and of special tokens nothing."""
        if token in self._special:
            return b""
        name = self._backend.id_to_token(token) or ""
        if token not in self._added and self._bytes_in_characters and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        if self._bytes_as_tokens and _BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        # Decode the token twice: decoders strip the leading space of a text's first token.
        alone = self._backend.decode([token], False)
        return self._backend.decode([token, token], False)[len(alone) :].encode()

    def entry(self, token: int, logprob: float) -> dict[str, object]:
        """Return a token as /v1/chat/completions has it; bytes that are no characters are escaped in its text, as OpenAI's API does."""
        data = self.bytes(token)
        return {"token": self._escaped(token), "logprob": max(logprob, -9999.0), "bytes": list(data) or None}

    def text(self, token: int) -> str:
        """Return the text of a token as /v1/completions has it: OpenAI's API marks one that is not whole characters with "bytes:"."""
        data, text = self.bytes(token), self._escaped(token)
        return f"bytes:{text}" if data and text.encode() != data else text

    def _escaped(self, token: int) -> str:
        return self.bytes(token).decode("utf-8", "backslashreplace") or self._backend.id_to_token(token) or ""


def usage(request: Request, prompt_tokens: int) -> dict[str, object]:
    """Return the numbers of tokens of a request."""
    new, cached = request.new_tokens, max((job.cached_tokens for job in request.jobs), default=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class CompletionFormat:
    """The JSON of /v1/completions for one request.

    Attributes:
        kind, chunk_kind: Names of a response and of a chunk of a stream.
        prefix: Of the response's id.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, tokens: TokenTexts) -> None:
        self._tokens = tokens
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._head["system_fingerprint"] = f"halfbyte-{__version__}"
        self._offsets: dict[int, tuple[codecs.IncrementalDecoder, int]] = {}
        self._text_events: dict[int, list[bytes]] = {}

    def document(self, choices: Sequence[Mapping[str, object]], usage: dict[str, object] | None, *, chunk: bool) -> dict[str, object]:
        """Return a response, or a `chunk` of a stream, with these choices."""
        kind = self.chunk_kind if chunk else self.kind
        document: dict[str, object] = {**self._head, "object": kind, "choices": choices}
        return document if usage is None else {**document, "usage": usage}

    def first(self, index: int) -> dict[str, object] | None:
        """Return the choice of the chunk with which a sequence begins, if there is one."""
        return None

    def delta(self, index: int, text: str, choices: Sequence[Choice] | None, reason: str | None, calls: Calls) -> dict[str, object]:
        """Return new text of a sequence as a choice.

        Args:
            index: Of the sequence in the request.
            text: New text.
            choices: New tokens with log probabilities; None: the request asks for none.
            reason: The finish_reason, with the last text.
            calls: Tool calls, which completions do not have.
        """
        return {"index": index, "text": text, "logprobs": self._logprobs(index, choices), "finish_reason": reason}

    def whole(self, index: int, text: str, choices: Sequence[Choice] | None, reason: str | None, calls: Calls) -> dict[str, object]:
        """Return a whole sequence as a choice; the arguments are those of `delta`."""
        return self.delta(index, text, choices, reason, calls)

    def chunk(self, choices: Sequence[Mapping[str, object]], **fields: object) -> bytes:
        """Return the server-sent event of a chunk; fields: more of it, such as "usage"."""
        return event({**self.document(choices, None, chunk=True), **fields})

    def text_chunk(self, index: int, text: str, **fields: object) -> bytes:
        """Return `chunk` for new text of a sequence and nothing else; `fields` are the same in each call.

        All but the text is encoded once: a stream has such an event for each token, and encoding it took longer than sending it.
        """
        parts = self._text_events.get(index)
        if parts is None:
            placeholder = uuid.uuid4().hex
            parts = self.chunk([self.delta(index, placeholder, None, None, [])], **fields).split(dumps(placeholder))
            self._text_events[index] = parts
        return dumps(text).join(parts)

    def _logprobs(self, index: int, choices: Sequence[Choice] | None) -> dict[str, object] | None:
        if choices is None:
            return None
        decoder, offset = self._offsets.get(index) or (_UTF8("replace"), 0)
        offsets = []
        for choice in choices:
            offsets.append(offset)
            offset += len(decoder.decode(self._tokens.bytes(choice.id)))
        self._offsets[index] = decoder, offset
        return {
            "tokens": [self._tokens.text(choice.id) for choice in choices],
            "token_logprobs": [max(choice.logprob, -9999.0) for choice in choices],
            "top_logprobs": [{self._tokens.text(id): max(value, -9999.0) for id, value in choice.top} for choice in choices],
            "text_offset": offsets,
        }


class ChatFormat(CompletionFormat):
    """The JSON of /v1/chat/completions for one request."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self, index: int) -> dict[str, object] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, choices: Sequence[Choice] | None, reason: str | None, calls: Calls) -> dict[str, object]:
        delta: dict[str, object] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return {"index": index, "delta": delta, "logprobs": self._logprobs(index, choices), "finish_reason": _reason(reason, calls)}

    def whole(self, index: int, text: str, choices: Sequence[Choice] | None, reason: str | None, calls: Calls) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": self._logprobs(index, choices), "finish_reason": _reason(reason, calls)}

    def _logprobs(self, index: int, choices: Sequence[Choice] | None) -> dict[str, object] | None:
        if choices is None:
            return None
        entry = self._tokens.entry
        content = [
            {**entry(choice.id, choice.logprob), "top_logprobs": [entry(id, value) for id, value in choice.top]} for choice in choices
        ]
        return {"content": content, "refusal": None}


def _reason(reason: str | None, calls: Calls) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason
