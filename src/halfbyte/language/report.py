"""`report` of a language model: what was measured, next to what its plan was expected to take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from halfbyte.timing import time_text

if TYPE_CHECKING:
    from halfbyte.decoder.offload.expected import Expected
    from halfbyte.decoder.offload.placement import Plan


class Mark(NamedTuple):
    """The end of what was launched on a GPU."""

    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> Mark | None:
        """Mark the end of what was launched so far; None: not on a GPU, which has computed it."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def seconds(self) -> float:
        """Wait for what was launched until now; return the seconds that have passed since the mark."""
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        return float(self.event.elapsed_time(now)) / 1e3


@dataclass
class Times:
    """Seconds of what a model has computed, all together.

    Attributes:
        prompt_tokens, prompt_seconds: Of prompts that were read, each with the choice of the first token.
        steps, step_seconds: Of decode steps, each for one or several sequences.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0

    def add_prompt(self, tokens: int, start: float) -> None:
        """Add tokens of a prompt that were read since `start`, of `time.perf_counter`."""
        self.prompt_tokens += tokens
        self.prompt_seconds += time.perf_counter() - start

    def add_step(self, start: float, read_until: Mark | None = None) -> None:
        """Add a decode step since `start`, of `time.perf_counter`. read_until: The end of a prompt, or a part of it, that the GPU may have
        still been reading then: the time before it is the prompt's."""
        seconds = time.perf_counter() - start
        of_step = seconds if read_until is None else min(seconds, read_until.seconds())
        self.steps += 1
        self.step_seconds += of_step
        self.prompt_seconds += seconds - of_step


@dataclass(frozen=True)
class LanguageReport:
    """What was measured of a language model.

    Attributes:
        times: Of what it has generated.
        plan: What is on the CPU, the rest on a GPU; None: all is on one device.
        expected: Rates of the machine, and the times of the plan that follow from them; None where there is no plan.
        in_floating_point: Linear layers whose weights the checkpoint has in floating point, or, joined in one product, in formats that
            differ: they are multiplied in floating point, exactly, and take more time and memory than quantized ones.
    """

    times: Times
    plan: Plan | None = None
    expected: Expected | None = None
    in_floating_point: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return what is said as a document of JSON."""
        plan = None if self.plan is None else self.plan.to_json()
        expected = None if self.expected is None else self.expected.to_json()
        return {"measured": vars(self.times), "plan": plan, "expected": expected, "in_floating_point": [*self.in_floating_point]}

    def __str__(self) -> str:
        times, lines = self.times, [] if self.plan is None else [str(self.plan), str(self.expected)]
        if times.prompt_tokens:
            rate = times.prompt_tokens / max(times.prompt_seconds, 1e-9)
            lines.append(f"measured of {times.prompt_tokens} tokens of prompts: {rate:.1f} tokens/s")
        if times.steps:
            lines.append(f"measured of {times.steps} decode steps: {time_text(times.step_seconds / times.steps)} each")
        return "\n".join([*in_words(self.in_floating_point), *lines]) or "nothing was generated yet"


def in_words(in_floating_point: Sequence[str]) -> list[str]:
    """Say in one line which linear layers are computed in floating point; an empty list for none."""
    names = in_floating_point
    if not names:
        return []
    others = f" and {len(names) - 1} other{'s' * (len(names) > 2)}" if len(names) > 1 else ""
    return [f"in floating point, as in the checkpoint: {names[0]}{others}"]
