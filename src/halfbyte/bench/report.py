"""The results of a benchmark: as data for JSON, and as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TypedDict

from halfbyte.nn.report import table
from halfbyte.plot import line_plot

SCHEMA = 1
_CEILINGS = (("read_bandwidth", "reads", "GB/s"), ("dot_peak", "int8 dot", "GOP/s"), ("fma_peak", "float32 FMA", "GFLOP/s"))
# A host below this fraction of its best dot-product rate is busy with something else.
_STEADY = 0.8


@dataclass(frozen=True)
class Ceilings:
    """The machine's rates at one moment: bytes per second read from memory, int8 and float32 operations per second."""

    read_bandwidth: float
    dot_peak: float
    fma_peak: float


@dataclass(frozen=True)
class Sample:
    """One round of one contender: seconds per product (median, shortest and longest pass), and the machine's rates then.

    idle       the contender's threads slept soon after
    ceilings   at the start of the round's visits to this M
    host_rate  the lower of `dot_peak` right before and right after
    """

    median: float
    min: float
    max: float
    runs: int
    idle: bool
    ceilings: Ceilings
    host_rate: float


@dataclass(frozen=True)
class Measurement:
    """A contender on M rows. `best_peer` and `fraction` are None where there is nothing to divide by.

    seconds     a product: the median of the rounds on a steady host (of all, where none was)
    steady      how many rounds those were
    best_peer   the best peer's seconds / these seconds: above 1 is faster
    fraction    the least time that the ceilings allow (the larger of bytes / bandwidth and operations / peak) / these seconds
    error       relative to its own weights in float64; `allowed` is what its arithmetic can give
    """

    contender: str
    label: str
    weights: str
    peer: bool
    n: int
    k: int
    m: int
    threads: int
    copy_bytes: int
    copies: int
    error: float
    allowed: float
    seconds: float
    steady: int
    operations_per_second: float
    fraction: float | None
    samples: list[Sample]
    best_peer: float | None = None


@dataclass(frozen=True)
class Absence:
    """A contender that was not measured, and why."""

    contender: str
    label: str
    n: int
    k: int
    threads: int
    reason: str


@dataclass
class Report:
    """Everything about one run. `machine`, `versions` and `settings` say what it ran on and how."""

    date: str
    machine: dict[str, object]
    versions: dict[str, str]
    settings: dict[str, object]
    measurements: list[Measurement] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def to_json(self) -> dict[str, object]:
        return {"schema": SCHEMA, **asdict(self)}


class Summary(TypedDict):
    """Fields of Measurement that `summarize` computes."""

    seconds: float
    steady: int
    operations_per_second: float
    fraction: float | None


def summarize(samples: Sequence[Sample], best_rate: float, peak: str | None, nbytes: int, operations: int) -> Summary:
    """seconds, steady, rate and fraction of one contender's samples: fields of Measurement.

    best_rate   the highest `host_rate` of the run, that of a steady host
    peak        the field of Ceilings that bounds the operations; None where none is probed
    """
    steady = [s for s in samples if s.host_rate >= _STEADY * best_rate] or list(samples)
    seconds = median(s.median for s in steady)
    least = [(s, _least_seconds(s.ceilings, peak, nbytes, operations)) for s in steady]
    fractions = [ideal / s.median for s, ideal in least if ideal is not None]
    return {
        "seconds": seconds,
        "steady": len(steady),
        "operations_per_second": operations / seconds,
        "fraction": median(fractions) if fractions else None,
    }


def _least_seconds(ceilings: Ceilings, peak: str | None, nbytes: int, operations: int) -> float | None:
    """The least seconds that the ceilings allow; None where that of the operations is not known, and may bind."""
    reading = nbytes / ceilings.read_bandwidth
    if peak is None:  # one operation a byte or less: memory binds on any CPU
        return reading if operations <= nbytes else None
    return max(reading, operations / float(getattr(ceilings, peak)))


def rank(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The same measurements with `best_peer` filled in, each against the peers of its own shape, M and threads."""
    best: dict[tuple[int, ...], float] = {}
    for one in measurements:
        if one.peer:
            best[_case(one)] = min(one.seconds, best.get(_case(one), one.seconds))
    return [replace(one, best_peer=best[_case(one)] / one.seconds) if _case(one) in best else one for one in measurements]


def _case(one: Measurement) -> tuple[int, ...]:
    return one.n, one.k, one.m, one.threads


def text(report: Report) -> str:
    """The whole report for a terminal."""
    return "\n".join([*_header(report), "", *_body(report), *_legend(report)])


def plot(report: Report) -> str:
    """An SVG plot of GFLOP/s against M, for the first shape of the run with the most threads, with the probed ceilings."""
    threads = max(one.threads for one in report.measurements)
    n, k = next((one.n, one.k) for one in report.measurements if one.threads == threads)
    group = sorted((one for one in report.measurements if (one.n, one.k, one.threads) == (n, k, threads)), key=lambda one: one.m)
    series: dict[str, list[tuple[float, float]]] = {}
    for one in group:
        series.setdefault(one.label, []).append((one.m, one.operations_per_second / 1e9))
    first, last = group[0].m, group[-1].m
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, label in (("dot_peak", "int8 dot products"), ("fma_peak", "float32 FMA")):
        rate = median(_probed(group, name)) / 1e9
        lines[f"ceiling: {label}"] = [(first, rate), (last, rate)]
    highest = max(y for points in (*series.values(), *lines.values()) for _, y in points)
    least = min(group, key=lambda one: one.copy_bytes)
    rate = 2 * n * k * median(_probed(group, "read_bandwidth")) / least.copy_bytes / 1e9  # for each row of M
    lines[f"ceiling: reading {least.label}"] = [(m, rate * m) for m in (first, max(first, min(last, highest / rate)))]
    title = f"{report.machine.get('cpu', 'CPU')}, {threads} thread{'s' if threads > 1 else ''}: x [M, {k}] · W [{n}, {k}]ᵀ"
    return line_plot(series, title=title, x_label="M, rows of activations", y_label="GFLOP/s", log_x=True, log_y=True, lines=lines)


def _header(report: Report) -> list[str]:
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    return [f"{report.date} · {machine}", " · ".join(f"{name} {version}" for name, version in report.versions.items())]


def _body(report: Report) -> list[str]:
    lines = []
    everything: list[Measurement | Absence] = [*report.measurements, *report.absences]
    for n, k, threads in dict.fromkeys((one.n, one.k, one.threads) for one in everything):
        group = [one for one in report.measurements if (one.n, one.k, one.threads) == (n, k, threads)]
        missing = [one for one in report.absences if (one.n, one.k, one.threads) == (n, k, threads)]
        lines += [f"N={n} K={k}, {threads} thread{'s' if threads > 1 else ''}{_ceilings(group)}", ""]
        if group:
            lines += [*table(_rows(group), left=1), ""]
        lines += [f"not measured: {one.label}: {one.reason}" for one in missing]
        lines += [""] if missing else []
    return lines


def _rows(group: list[Measurement]) -> list[tuple[str, ...]]:
    ms = sorted({one.m for one in group})
    rows: list[tuple[str, ...]] = [("", "bits", *(f"M={m}" for m in ms))]
    for name in dict.fromkeys(one.contender for one in group):
        cells = {one.m: one for one in group if one.contender == name}
        first = next(iter(cells.values()))
        bits = first.copy_bytes * 8 / (first.n * first.k)
        rows.append((first.label, f"{bits:.2f}", *(_cell(cells[m]) if m in cells else "-" for m in ms)))
    return rows


def _cell(one: Measurement) -> str:
    ms = one.seconds * 1e3
    parts = [f"{ms:.{max(0, 2 - math.floor(math.log10(ms)))}f} ms"]
    if one.best_peer is not None:
        parts.append(f"×{one.best_peer:.2f}")
    if one.fraction is not None:
        parts.append(f"{one.fraction:.0%}")
    return " ".join(parts)


def _ceilings(group: list[Measurement]) -> str:
    spans = []
    for name, what, unit in _CEILINGS if group else ():
        values = [value / 1e9 for value in _probed(group, name)]
        spans.append(f"{what} {median(values):.0f} ({min(values):.0f}-{max(values):.0f}) {unit}")
    return f": {', '.join(spans)}" if spans else ""


def _probed(group: list[Measurement], name: str) -> list[float]:
    return [getattr(sample.ceilings, name) for one in group for sample in one.samples]


def _legend(report: Report) -> list[str]:
    rounds = report.settings.get("rounds")
    legend = [f"ms: median of {rounds} rounds. ×: the best peer's time over this one, above 1 is faster. %: of what the ceilings allow."]
    return legend + report.notes
