"""What runs of the GPU benchmark wrote as JSON: read, selected, and shown in tables and pictures for documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from halfbyte.bench.gpu_report import GpuMeasurement, GpuReport, heading, tables
from halfbyte.errors import ArgumentError
from halfbyte.plot import line_plot
from halfbyte.plot import panels as plot_panels


def written(report: GpuReport) -> str:
    """JSON with a line for each measurement."""
    data = report.to_json()
    points = ",\n".join(json.dumps(one) for one in data.pop("measurements"))
    return f'{json.dumps(data, indent=1)[:-2]},\n "measurements": [\n{points}\n]}}\n'


def read(paths: Sequence[Path]) -> GpuReport:
    """What runs on one GPU wrote as JSON, as one report under the first one's heading. Raises ArgumentError for other files."""
    reports = []
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            points = [GpuMeasurement(**{**one, "spread": tuple(one["spread"])}) for one in data["measurements"]]
            reports.append(GpuReport(**{**{name: data[name] for name in GpuReport.__dataclass_fields__}, "measurements": points}))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ArgumentError(f"{path} is not a report of the GPU benchmark ({error!r}): give a file that --json wrote") from error
    if len({report.gpu["name"] for report in reports}) != 1:
        names = ", ".join(report.gpu["name"] for report in reports)
        raise ArgumentError(f"reports of one GPU become one, got {names or 'none'}")
    absences = dict.fromkeys(line for report in reports for line in report.absences)
    return replace(reports[0], measurements=[one for report in reports for one in report.measurements], absences=list(absences))


def select(report: GpuReport, **allowed: Sequence[object] | None) -> GpuReport:
    """The measurements whose fields are among those `allowed`; None allows all. shape: (n, k)."""
    wanted = {name: set(values) for name, values in allowed.items() if values is not None}

    def fits(one: GpuMeasurement) -> bool:
        fields = {**asdict(one), "shape": (one.n, one.k)}
        return all(fields[name] in values for name, values in wanted.items())

    return replace(report, measurements=[one for one in report.measurements if fits(one)])


def plot(report: GpuReport) -> str:
    """An SVG image: microseconds against M, a panel for each weight, both axes logarithmic."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in sorted(report.measurements, key=lambda one: (not one.peer, one.m)):  # halfbyte's line is drawn last, on top
        title = f"{report.gpu['name']}: {one.n} x {one.k}, {one.format}, {one.dtype}, {one.compute}"
        panels.setdefault(title, {}).setdefault(one.label, []).append((one.m, one.seconds * 1e6))
    draw = partial(line_plot, x_label="M, rows of activations", y_label="microseconds", log_x=True, log_y=True)
    return plot_panels([draw(series, title=title) for title, series in panels.items()])


def markdown(report: GpuReport) -> str:
    """Tables for a document, one for each format, dtype and compute."""
    lines = [*(f"{line}  " for line in heading(report)), ""]
    for title, (names, *rows) in tables(report):
        lines += [f"{title}:", "", _piped(names), "| --- |" + " ---: |" * (len(names) - 1), *map(_piped, rows), ""]
    return "\n".join(lines)


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
