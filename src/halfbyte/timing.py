"""Timing of functions: every call is timed individually, and the median is quoted.

A mean is distorted by single stalls, a minimum by a lucky run; minimum and maximum are kept with the median so that a noisy
machine can be recognized. Reading the clock takes about 0.1 µs, which every run includes. GPU work is asynchronous: `fn` must
synchronize.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

from halfbyte.errors import ArgumentError


@dataclass(frozen=True)
class Timing:
    """Seconds that one call takes.

    median, min, max   over the runs
    runs               calls that were timed (warm-up calls are not)
    seconds            all of them together
    """

    median: float
    min: float
    max: float
    runs: int
    seconds: float


def measure(fn: Callable[[], object], *, min_time: float = 0.2, min_runs: int = 5, warmup: int = 1) -> Timing:
    """Times `fn()` until at least `min_runs` runs and `min_time` seconds of them are done, after `warmup` calls.

    Raises ArgumentError if `min_runs` < 1, `warmup` < 0 or `min_time` is negative or not finite.
    """
    if min_runs < 1 or warmup < 0 or not 0 <= min_time < float("inf"):
        raise ArgumentError(
            f"got min_runs={min_runs}, warmup={warmup}, min_time={min_time}: runs start at 1, warmup and a finite min_time at 0"
        )
    for _ in range(warmup):
        fn()
    runs: list[int] = []
    total = 0
    while len(runs) < min_runs or total < min_time * 1e9:
        runs.append(_time(fn))
        total += runs[-1]
    return _timing(runs)


def interleave(contenders: Mapping[str, Callable[[], object]], *, rounds: int = 20, warmup: int = 1) -> dict[str, Timing]:
    """Times contenders in turn in this process, one call each per round, so that changes of the clock rate affect all equally.

    Every other round runs in reverse order, so that no contender always follows the same one.
    Raises ArgumentError if `rounds` < 1 or `warmup` < 0.
    """
    if rounds < 1 or warmup < 0:
        raise ArgumentError(f"got rounds={rounds}, warmup={warmup}: rounds start at 1, warmup at 0")
    for _ in range(warmup):
        for fn in contenders.values():
            fn()
    order = list(contenders)
    runs: dict[str, list[int]] = {name: [] for name in order}
    for _ in range(rounds):
        for name in order:
            runs[name].append(_time(contenders[name]))
        order.reverse()
    return {name: _timing(times) for name, times in runs.items()}


def time_text(seconds: float) -> str:
    """A human-readable time with three significant digits: "12.3 us", "4.56 ms", "1.20 s"; below 1 ns "0 us"."""
    seconds = float(f"{seconds:.2e}")  # rounded first: 999.9 us are 1.00 ms
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))
    digits = 2 - math.floor(math.log10(seconds / size)) if seconds >= 1e-9 else 0
    return f"{seconds / size:.{max(0, digits)}f} {unit}"


def _time(fn: Callable[[], object]) -> int:
    start = perf_counter_ns()
    fn()
    return perf_counter_ns() - start


def _timing(runs: list[int]) -> Timing:
    return Timing(median(runs) / 1e9, min(runs) / 1e9, max(runs) / 1e9, len(runs), sum(runs) / 1e9)
