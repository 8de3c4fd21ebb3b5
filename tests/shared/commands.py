"""What a command of `halfbyte` has printed, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    def refuses(self, *words: str) -> None:
        """One line on stderr that begins as errors do and says these words; nothing on stdout; exit code 2."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("halfbyte: error: ")
        assert self.err.count("\n") == 1
        for word in words:
            assert word in self.err


Run = Callable[..., Answer]
