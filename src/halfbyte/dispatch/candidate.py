"""What dispatch chooses from: a list of candidates for each kind of problem and machine, of which one is taken, with the reasons against
the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from halfbyte.timing import time_text

P = TypeVar("P")
M = TypeVar("M")


@dataclass(frozen=True)
class Candidate(Generic[P, M]):
    """One way to solve problems P on machines M.

    Attributes:
        name: As `explain` prints it.
        summary: How it computes.
        advantage: Why it comes before those after it, in a list whose order decides.
    """

    name: str
    summary: str
    advantage: str = ""

    def supports(self, problem: P, machine: M) -> str | None:
        """Return the reason why this does not solve `problem`, or is known to be slower than one after it; None if it may be taken."""
        raise NotImplementedError

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
        """Return its configs with their expected times, and why others of them do not run."""
        return [Option(self, config, self.cost(problem, machine, config)) for config in self.configs(problem, machine)], []


C = TypeVar("C", bound=Candidate[Any, Any])


@dataclass(frozen=True, slots=True)
class Option(Generic[C]):
    """A candidate that could run.

    Attributes:
        candidate: The candidate.
        config: One of its configs, which only the candidate reads.
        seconds: Expected; NaN: nothing is known of them.
        measured: Name of the GPU on which they were measured; "": they are predicted.
    """

    candidate: C
    config: Any
    seconds: float = math.nan
    measured: str = ""


@dataclass(frozen=True, slots=True)
class Choice(Generic[P, C]):
    """What solves a problem.

    Attributes:
        problem: As it is solved: what was left to the machine is settled.
        taken: None: torch's own operations.
        others: What could run as well, the best first.
        rejected: The others, with the reasons against them.
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
        found = {candidate.name: reason for candidate, reason in self.rejected}
        for option in self.others:
            if self.taken is not None and option.candidate.name != self.taken.candidate.name:
                found.setdefault(option.candidate.name, _later(option, self.taken))
        return found


def _later(option: Option[Any], taken: Option[Any]) -> str:
    """Why an option is not the one that is taken."""
    if math.isnan(option.seconds):
        advantage = taken.candidate.advantage
        return f"{taken.candidate.name} comes first{f': {advantage}' if advantage else ''}"
    took = f"{time_text(option.seconds)} {'measured' if option.measured else 'predicted'}"
    if taken.measured and not option.measured:
        return f"{took}; what was measured comes first"
    return f"{took}, {option.seconds / taken.seconds:.2f} x as long"


def decide(candidates: Iterable[C], problem: P, machine: object, *, by_time: bool = False) -> Choice[P, C]:
    """Choose from a list: the first that supports the problem; `by_time` the one with the least expected time, where times that were
    measured come before those that were predicted, however good these look."""
    options: list[Option[C]] = []
    rejected: list[tuple[C, str]] = []
    for candidate in candidates:
        if (reason := candidate.supports(problem, machine)) is not None:
            rejected.append((candidate, reason))
            continue
        found, failures = candidate.options(problem, machine)
        options += found
        rejected += [(candidate, failure) for failure in failures]
    if by_time:
        options.sort(key=lambda option: (not option.measured, option.seconds))
    return Choice(problem, options[0] if options else None, tuple(options[1:]), tuple(rejected))
