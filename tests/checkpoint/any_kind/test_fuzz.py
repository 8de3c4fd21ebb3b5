"""A few thousand damaged files of each kind; `python tests/shared/fuzzing.py` tries more."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing import KINDS, Kind, run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damaged_files_are_read_or_refused(kind: Kind) -> None:
    outcome = run(kind, 400, seed=1)
    assert outcome.messages["refused"] > 80
    assert outcome.messages["read"] > 3  # some changes do not matter: one in thirty to a tokenizer, whose words and merges name each other


def test_the_check_finds_what_it_looks_for() -> None:
    def broken(folder: Path) -> None:
        raise KeyError("x")

    def greedy(folder: Path) -> bytes:
        return b"x" * (32 << 20)

    for read, what in ((broken, "KeyError"), (greedy, "bytes allocated")):
        first = KINDS[0]
        calls = iter((lambda folder: None,))
        kind = Kind("broken", first.files, first.make, lambda folder, read=read, calls=calls: next(calls, read)(folder))  # type: ignore[misc]
        with pytest.raises(AssertionError, match=what):
            run(kind, 1, seed=0)
