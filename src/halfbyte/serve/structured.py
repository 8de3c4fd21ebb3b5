"""Logits processors: a JSON schema that the answer must follow, by llguidance, and biases of tokens.

The grammar of a schema is compiled outside of the event loop. Its size, and the work of each token, are limited: a schema that would
explode is refused, or ends its own answer with an error.

Source: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.language.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LIMITS = {"initial_lexer_fuel": 500_000, "step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_grammar_size": 100_000}
_LIMITS |= {"max_items_in_row": 1000, "max_lexer_states": 50_000}
# Space between elements, bounded so that no model fills an answer with it.
_JSON = {"whitespace_pattern": r"[ \n]{0,16}", "whitespace_flexible": True}
_BITS = 32
_MOST_BIAS = 100.0  # as in OpenAI's API


class Grammars:
    """Grammars over the vocabulary of one model."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        """Create a compiler of grammars.

        Args:
            tokenizer: The model's tokenizer.
            vocabulary: Number of the model's logits, which may be more than the tokenizer has tokens.
        """
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    @lru_cache(maxsize=1)  # noqa: B019 - one object lives as long as the server
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        ends = [id for id in self._tokenizer.eos_ids if id < self._vocabulary]
        if not ends:
            raise UnsupportedError(
                "the tokenizer of this model has no token that ends an answer: leave out response_format and tool_choice"
            )
        backend = cast(Any, self._tokenizer.backend)
        return LLTokenizer(backend.to_str(), n_vocab=self._vocabulary, eos_token=ends)

    def json_schema(self, schema: Mapping[str, object] | bool) -> Grammar:
        """Compile a JSON schema, which takes up to a second.

        Args:
            schema: The schema; True allows any value, False none.

        Returns:
            The grammar at the beginning of an answer.

        Raises:
            ArgumentError: It is no JSON schema, has parts that are not supported, or is too large.
            UnsupportedError: The tokenizer has no token that ends an answer.
        """
        import llguidance
        from llguidance import LLMatcher

        ll_tokenizer, limits = self._ll_tokenizer(), llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
        try:
            document = dict(schema) if isinstance(schema, Mapping) else ({} if schema else {"not": {}})
            grammar = LLMatcher.grammar_from_json_schema(document, overrides=cast(Any, _JSON))
        except ValueError as e:
            raise ArgumentError(f"the JSON schema cannot be read ({_one_line(e)}): send another one") from e
        matcher = LLMatcher(ll_tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ArgumentError(f"the JSON schema is not supported, or too large ({_one_line(matcher.get_error())}): use a simpler one")
        return Grammar(matcher, self._vocabulary, ll_tokenizer.eos_tokens)


def _one_line(error: object) -> str:
    """Return an error's text in one line of 300 characters at most."""
    return " ".join(str(error).split())[:300]


class Grammar:
    """Excludes the tokens that a grammar does not allow next; a `LogitsProcessor` of one sequence.

    Attributes:
        error: Why the grammar was given up, or None. The answer ends then.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: list[int]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends
        self._mask = torch.empty(-(-vocabulary // _BITS), dtype=torch.int32, device="cpu")
        self._shifts = torch.arange(_BITS, dtype=torch.int32, device="cpu")
        self.error: str | None = None

    def copy(self) -> Grammar:
        """Return the grammar in its present state for another sequence: compiled once, it serves all sequences of a request."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary, self._ends)

    def process(self, logits: Tensor) -> Tensor:
        """Return logits [N] with -inf for tokens that are not allowed."""
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.nbytes)
        if self._matcher.is_error():
            self.error = f"the answer could not be continued by the schema ({_one_line(self._matcher.get_error())}): use a simpler one"
        if self._matcher.is_stopped():
            allowed = torch.zeros(logits.numel(), dtype=torch.bool, device=logits.device)
            allowed[self._ends] = True
        else:
            bits = (self._mask[:, None] >> self._shifts) & 1
            allowed = bits.flatten()[: logits.numel()].bool().to(logits.device)
        return logits.masked_fill(~allowed, -math.inf)

    def accept(self, token: int) -> None:
        """Take the token that was chosen."""
        if self.error is None:
            self._matcher.consume_token(token)


class Bias:
    """Adds a number to the logits of some tokens; a `LogitsProcessor`."""

    error: str | None = None

    def __init__(self, biases: Mapping[str, float], vocabulary: int) -> None:
        """Take biases by token id.

        Raises:
            ArgumentError: There is no such token, or a bias is out of range.
        """
        for token, bias in biases.items():
            if not token.isascii() or not token.isdigit() or len(token) > 9 or int(token) >= vocabulary:
                raise ArgumentError(f"logit_bias has token ids 0 to {vocabulary - 1} as keys, got {token[:40]!r}: use the model's tokens")
            if not -_MOST_BIAS <= bias <= _MOST_BIAS:
                raise ArgumentError(f"logit_bias is -100 to 100, got {bias:g}: use a smaller one")
        self._ids = torch.tensor([int(token) for token in biases], dtype=torch.int64, device="cpu")
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32, device="cpu")

    def process(self, logits: Tensor) -> Tensor:
        """Return other logits [N]."""
        return logits.float().index_add(0, self._ids.to(logits.device), self._biases.to(logits.device))

    def accept(self, token: int) -> None:
        """Do nothing: biases stay the same, so sequences may share them."""
