"""What the GPU benchmark found: as data for JSON, and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
    settings: dict[str, Any]
    ceilings: dict[str, float] = field(default_factory=dict)
    measurements: list[GpuMeasurement] = field(default_factory=list)
    absences: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def text(report: GpuReport) -> str:
    """The table for a terminal."""
    lines = [
        f"{report.date} · {report.gpu['name']} · " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "measured here: "
        + ", ".join(f"{name} {value / 1e12:.2f} T{'B' if name == 'read' else 'OP'}/s" for name, value in report.ceilings.items()),
        "us: median. x: the best peer's time over halfbyte's, above 1 is faster. %: of the floor. error: relative to float64.",
        "",
    ]
    cases = dict.fromkeys((one.n, one.k, one.format, one.dtype, one.compute) for one in report.measurements)
    for case in cases:
        group = [one for one in report.measurements if (one.n, one.k, one.format, one.dtype, one.compute) == case]
        labels = list(dict.fromkeys(one.label for one in group))
        lines += [f"N={case[0]} K={case[1]} {case[2]}, {case[3]}, {case[4]}", _row("M", [*labels, "x", "%", "error", "kernel"])]
        for m in dict.fromkeys(one.m for one in group):
            cells = {one.label: one for one in group if one.m == m}
            own = next((one for one in cells.values() if not one.peer), None)
            row = [f"{cells[label].seconds * 1e6:.1f}" if label in cells else "-" for label in labels]
            if own is not None:
                best = "-" if own.best_peer is None else f"{own.best_peer:.2f}"
                row += [best, f"{own.floor / own.seconds:.0%}", "-" if own.error is None else f"{own.error:.1e}", own.kernel.split(" ")[0]]
            lines.append(_row(str(m), row))
        lines.append("")
    return "\n".join(lines + [f"not measured: {line}" for line in report.absences])


def _row(first: str, cells: Sequence[str]) -> str:
    return "  ".join([first.rjust(5), *(cell.rjust(max(9, min(14, len(cell)))) for cell in cells)])
