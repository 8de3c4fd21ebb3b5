"""Times of decode steps that begin while a GPU still reads a prompt, which the report counts for the prompt. There is no GPU here."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch

from halfbyte.language.report import Mark, Times


@pytest.mark.parametrize(("of_step", "rest"), [(0.25, 0.75), (5.0, 0.0)])
def test_the_time_before_the_mark_is_the_prompts(of_step: float, rest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark before the step's beginning takes nothing from it."""
    monkeypatch.setattr(Mark, "seconds", lambda mark: of_step)
    monkeypatch.setattr(time, "perf_counter", lambda: 11.0)
    times = Times()
    times.add_prompt(512, 10.5)
    times.add_step(10.0, Mark(cast(Any, None)))
    assert (times.prompt_seconds, times.steps, times.step_seconds) == (0.5 + rest, 1, 1.0 - rest)
    times.add_step(10.0)
    assert (times.steps, times.step_seconds) == (2, 2.0 - rest)


def test_a_cpu_has_computed_what_was_launched() -> None:
    assert Mark.now(torch.device("cpu")) is None
