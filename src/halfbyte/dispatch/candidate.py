"""`Candidate`, one way to solve a kind of problem, and `decide`, which chooses from a list of them and returns a `Choice` with the reasons
against the others.

There is one list for each kind of problem on CPUs and on GPUs: cpu.py, gpu.py, cpu_conv.py, gpu_conv.py, layers.py. `choose` (choose.py)
finds the list, and `explain` prints the Choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from halfbyte.timing import time_text

P = TypeVar("P")
M = TypeVar("M")


def _solves_all(problem: object, machine: object) -> None:
    """`Candidate.why_not` of a candidate that solves every problem of its list."""


@dataclass(frozen=True)
class Candidate(Generic[P, M]):
    """One way to solve problems P on machines M.

    Attributes:
        name: As `explain` prints it.
        summary: How it computes.
        advantage: Why it comes before those after it, in a list whose order decides.
        why_not: Returns the reason why it does not solve a problem on a machine, or should not; None if it may be taken.
    """

    name: str
    summary: str
    advantage: str = ""
    why_not: Callable[[P, Any], str | None] = field(kw_only=True, default=_solves_all)

    def supports(self, problem: P, machine: M) -> str | None:
        """Return the reason why this does not solve `problem`, or is known to be slower than one after it; None if it may be taken."""
        return self.why_not(problem, machine)

    def configs(self, problem: P, machine: M) -> Sequence[object]:
        """Return the ways to run it, the best guess first; (None,) where there is but one."""
        return (None,)

    def cost(self, problem: P, machine: M, config: object) -> float:
        """Return the seconds that it is expected to take; NaN where nothing is known of them."""
        return math.nan

    def launch(self, problem: P, config: object, *operands: object) -> Any:
        """Run it."""
        raise NotImplementedError

    def options(self, problem: P, machine: M) -> tuple[list[Option[Any]], list[str]]:
        """Return its configs with their expected times, and for each config that failed before a sentence with the failure."""
        return [Option(self, config, self.cost(problem, machine, config)) for config in self.configs(problem, machine)], []


C = TypeVar("C", bound=Candidate[Any, Any])


@dataclass(frozen=True, slots=True)
class Option(Generic[C]):
    """A candidate that supports the problem, with one of its configs.

    Attributes:
        candidate: The candidate.
        config: One of its configs, which only the candidate reads.
        seconds: The expected time; NaN: unknown.
        measured: Name of the GPU on which `seconds` were measured; "": they are predicted.
    """

    candidate: C
    config: Any
    seconds: float = math.nan
    measured: str = ""


@dataclass(frozen=True, slots=True)
class Choice(Generic[P, C]):
    """The result of `decide`.

    Attributes:
        problem: The problem with its `compute` resolved: never "auto".
        taken: What runs; None: torch's own operations.
        others: What could run as well, the best first.
        rejected: The candidates that may not be taken, with the reasons.
    """

    problem: P
    taken: Option[C] | None
    others: tuple[Option[C], ...]
    rejected: tuple[tuple[C, str], ...]

    @property
    def options(self) -> tuple[Option[C], ...]:
        """All that could run, the best first."""
        return () if self.taken is None else (self.taken, *self.others)

    @property
    def reasons(self) -> dict[str, str]:
        """Why each candidate that is not taken is not, by its name."""
        reasons = {candidate.name: reason for candidate, reason in self.rejected}
        for option in self.others:
            if self.taken is not None and option.candidate.name != self.taken.candidate.name:
                reasons.setdefault(option.candidate.name, _why_later(option, self.taken))
        return reasons


def _why_later(option: Option[Any], taken: Option[Any]) -> str:
    """Return why an option that could run comes after the one that is taken."""
    if math.isnan(option.seconds):
        advantage = taken.candidate.advantage
        return f"{taken.candidate.name} comes first{f': {advantage}' if advantage else ''}"
    took = f"{time_text(option.seconds)} {'measured' if option.measured else 'predicted'}"
    if taken.measured and not option.measured:
        return f"{took}; what was measured comes first"
    return f"{took}, {option.seconds / taken.seconds:.2f} x as long"


def decide(candidates: Iterable[C], problem: P, machine: object, *, by_time: bool = False) -> Choice[P, C]:
    """Choose from a list of candidates.

    Args:
        candidates: In the order of preference.
        problem: What to compute.
        machine: On what.
        by_time: Take the option with the least expected time, where each measured time comes before all predicted ones; False: the first
            candidate that supports the problem.
    """
    options: list[Option[C]] = []
    rejected: list[tuple[C, str]] = []
    for candidate in candidates:
        if (reason := candidate.supports(problem, machine)) is not None:
            rejected.append((candidate, reason))
            continue
        possible, failures = candidate.options(problem, machine)
        options += possible
        rejected += [(candidate, failure) for failure in failures]
    if by_time:
        options.sort(key=lambda option: (not option.measured, option.seconds))
    return Choice(problem, options[0] if options else None, tuple(options[1:]), tuple(rejected))
