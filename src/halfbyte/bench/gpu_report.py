"""The report of the GPU benchmark (gpu.py): data for JSON files, and tables for a terminal or a document.

`halfbyte bench` prints `text`; benchmarks/gpu_results.py reads reports again, and bench/pages/linear.py draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfbyte.nn.report import table

SCHEMA = 1
_DETAILS = "error", "kernel"  # further columns of detailed tables


@dataclass(frozen=True)
class GpuMeasurement:
    """One contender's product of M rows and a weight [N, K].

    label      the contender's name in tables
    peer       whether it is another project's; halfbyte otherwise
    kernel     the kernel and its config
    error      ||y - reference|| / ||reference|| in float64; None where y is not that product
    seconds    median of the rounds
    spread     the fastest and the slowest round, in seconds
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
    """Everything about one run.

    gpu       the fields of `machine.Gpu`
    settings  the plan that was measured
    ceilings  measured on this GPU: bytes a second as "read", operations a second by the name of the arithmetic
    absences  what was not measured, and why
    """

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
    """Return the tables for a terminal, with errors relative to float64 and halfbyte's kernels."""
    lines = [*heading(report), "us: medians", ""]
    for title, rows in tables(report, detailed=True):
        lines += [title, *table(rows, left=1), ""]
    return "\n".join(lines + [f"not measured: {line}" for line in report.absences])


def tables(report: GpuReport, *, detailed: bool = False) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield for each format, dtype and compute a title and the lines of a table, the names of its columns first.

    Args:
        report: Of one run.
        detailed: With halfbyte's error and kernel.
    """
    cases: dict[tuple[str, str, str], list[GpuMeasurement]] = {}
    for measured in report.measurements:
        cases.setdefault((measured.format, measured.dtype, measured.compute), []).append(measured)
    for (fmt, dtype, compute), measurements in cases.items():
        labels = list(dict.fromkeys(measured.label for measured in sorted(measurements, key=lambda measured: measured.peer)))
        lines: list[tuple[str, ...]] = [("N x K", "M", *labels, "best peer / halfbyte", "of the floor", *(_DETAILS if detailed else ()))]
        products: dict[tuple[int, int, int], list[GpuMeasurement]] = {}
        for measured in measurements:
            products.setdefault((measured.n, measured.k, measured.m), []).append(measured)
        shape_before = None
        for (n, k, m), contenders in products.items():
            shape = f"{n} x {k}" if (n, k) != shape_before else ""
            details = _details(contenders) if detailed else ()
            lines.append((shape, str(m), *_times(contenders, labels), *_comparison(contenders), *details))
            shape_before = n, k
        yield f"{fmt} weights, {dtype} activations, {compute} compute", lines


def _times(contenders: Sequence[GpuMeasurement], labels: Sequence[str]) -> list[str]:
    """Return the microseconds of each contender."""
    by_label = {measured.label: measured for measured in contenders}
    return [f"{by_label[label].seconds * 1e6:.1f}" if label in by_label else "-" for label in labels]


def _comparison(contenders: Sequence[GpuMeasurement]) -> tuple[str, str]:
    """Return how halfbyte compares with the best peer and with the floor."""
    measured = _halfbyte(contenders)
    if measured is None:
        return "-", "-"
    best = "-" if measured.best_peer is None else f"{measured.best_peer:.2f}"
    return best, f"{measured.floor / measured.seconds:.0%}"


def _details(contenders: Sequence[GpuMeasurement]) -> tuple[str, str]:
    """Return halfbyte's error and kernel."""
    measured = _halfbyte(contenders)
    if measured is None:
        return "-", ""
    return "-" if measured.error is None else f"{measured.error:.1e}", measured.kernel.split(" ")[0]


def _halfbyte(contenders: Sequence[GpuMeasurement]) -> GpuMeasurement | None:
    return next((measured for measured in contenders if not measured.peer), None)


def heading(report: GpuReport) -> list[str]:
    """Return two lines: date, GPU and versions; the measured ceilings."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    units = {"read": "TB/s"}
    ceilings = (f"{name} {value / 1e12:.2f} {units.get(name, 'TOP/s')}" for name, value in report.ceilings.items())
    return [f"{report.date} · {report.gpu['name']} · {versions}", f"measured here: {', '.join(ceilings)}"]
