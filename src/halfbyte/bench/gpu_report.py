"""What the GPU benchmark found: as data for JSON, and as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfbyte.nn.report import table

SCHEMA = 1


@dataclass(frozen=True)
class GpuMeasurement:
    """A contender on M rows. seconds: median of the rounds. error: ||y - reference|| / ||reference||, None where y is not that product.

    floor      seconds that the GPU takes at least for the packed weight's bytes and the arithmetic
    best_peer  the best peer's seconds / these seconds: above 1 is faster
    """

    contender: str
    label: str
    peer: bool
    n: int
    k: int
    m: int
    format: str
    dtype: str
    compute: str
    kernel: str
    error: float | None
    seconds: float
    spread: tuple[float, float]
    floor: float
    best_peer: float | None = None
    best_peer_name: str | None = None


@dataclass
class GpuReport:
    """Everything about one run."""

    date: str
    gpu: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, object]
    ceilings: dict[str, float] = field(default_factory=dict)
    measurements: list[GpuMeasurement] = field(default_factory=list)
    absences: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def text(report: GpuReport) -> str:
    """Tables for a terminal, one for each format, dtype and compute, with errors relative to float64, and halfbyte's kernels."""
    lines = [*heading(report), "us: medians", ""]
    for title, rows in tables(report, detailed=True):
        lines += [title, *table(rows, left=1), ""]
    return "\n".join(lines + [f"not measured: {line}" for line in report.absences])


def tables(report: GpuReport, *, detailed: bool = False) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """A title, and the lines of a table, the names of its columns first."""
    for case in dict.fromkeys((one.format, one.dtype, one.compute) for one in report.measurements):
        group = [one for one in report.measurements if (one.format, one.dtype, one.compute) == case]
        labels = list(dict.fromkeys(one.label for one in sorted(group, key=lambda one: one.peer)))
        more = ("error", "kernel") if detailed else ()
        rows: list[tuple[str, ...]] = [("N x K", "M", *labels, "best peer / halfbyte", "of the floor", *more)]
        last = None
        for n, k, m in dict.fromkeys((one.n, one.k, one.m) for one in group):
            cells = _cells([one for one in group if (one.n, one.k, one.m) == (n, k, m)], labels)
            rows.append((f"{n} x {k}" if (n, k) != last else "", str(m), *cells[: len(rows[0]) - 2]))
            last = n, k
        yield f"{case[0]} weights, {case[1]} activations, {case[2]} compute", rows


def _cells(points: Sequence[GpuMeasurement], labels: Sequence[str]) -> list[str]:
    """Microseconds of each contender, then how halfbyte compares, its error and its kernel."""
    by_label = {one.label: one for one in points}
    times = [f"{by_label[label].seconds * 1e6:.1f}" if label in by_label else "-" for label in labels]
    halfbyte_point = next((one for one in points if not one.peer), None)
    if halfbyte_point is None:
        return [*times, "-", "-", "-", ""]
    best = "-" if halfbyte_point.best_peer is None else f"{halfbyte_point.best_peer:.2f}"
    error = "-" if halfbyte_point.error is None else f"{halfbyte_point.error:.1e}"
    return [*times, best, f"{halfbyte_point.floor / halfbyte_point.seconds:.0%}", error, halfbyte_point.kernel.split(" ")[0]]


def heading(report: GpuReport) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    units = {"read": "TB/s"}
    ceilings = (f"{name} {value / 1e12:.2f} {units.get(name, 'TOP/s')}" for name, value in report.ceilings.items())
    return [f"{report.date} · {report.gpu['name']} · {versions}", f"measured here: {', '.join(ceilings)}"]
