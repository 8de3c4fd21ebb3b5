"""The page of `halfbyte bench`: a roofline with the measured kernels, time against M, and everything in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from halfbyte.bench.gpu_report import GpuMeasurement, GpuReport
from halfbyte.bench.pages.charts import Point, Series, chart
from halfbyte.bench.pages.markup import Markup, element
from halfbyte.bench.pages.page import card, listed, page, rows
from halfbyte.bench.report import Measurement, Report
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.timing import time_text

# What a processor computes at most, in the reports of CPUs and GPUs -> how the roofline calls it.
_PEAKS = {
    "dot_peak": "int8 dot products",
    "fma_peak": "float32 FMA",
}
_BANDWIDTH = "read"  # in the ceilings of a GPU's report; all others there are rates of arithmetic


class _Row(NamedTuple):
    """One contender on M rows, of either kind of report. nbytes: of the weight. fraction: of what the ceilings allow."""

    label: str
    peer: bool
    n: int
    k: int
    m: int
    nbytes: float
    seconds: float
    best_peer: float | None
    fraction: float | None
    error: float | None
    more: str

    @property
    def rate(self) -> float:
        return 2 * self.m * self.n * self.k / self.seconds

    @property
    def intensity(self) -> float:
        return 2 * self.m * self.n * self.k / self.nbytes

    @property
    def tip(self) -> str:
        lines = [f"M = {self.m}: {time_text(self.seconds)}, {self.rate / 1e9:.1f} GOP/s"]
        if self.best_peer is not None:
            lines.append(f"{self.best_peer:.2f}× the best peer's speed")
        if self.fraction is not None:
            lines.append(f"{self.fraction:.0%} of the roofline")
        return "\n".join(line for line in (*lines, self.more) if line)


def linear_page(report: Report | GpuReport) -> str:
    """Return the page of a run. Raises ArgumentError for a run that measured nothing."""
    if not report.measurements:
        raise ArgumentError('the run measured nothing that a page could show: see why under "not measured", and ask for other formats')
    on_gpu = isinstance(report, GpuReport)
    machine = str(report.gpu["name"]) if isinstance(report, GpuReport) else ", ".join(f"{name} {v}" for name, v in report.machine.items())
    versions = " · ".join(f"{name} {version}" for name, version in report.versions.items())
    absences = [one if isinstance(one, str) else f"{one.label}, {one.n} × {one.k}: {one.reason}" for one in report.absences]
    notes = [] if isinstance(report, GpuReport) else report.notes
    cards = [one for title, group, bandwidth, peaks in _groups(report) for one in _cards(title, group, bandwidth, peaks)]
    if absences:
        cards.append(card("Not measured", listed(absences), wide=True))
    if notes:
        cards.append(card("Notes", listed(notes), wide=True))
    everything = [_of_gpu(one) for one in report.measurements] if isinstance(report, GpuReport) else [*map(_of_cpu, report.measurements)]
    about = [f"{machine} · {report.date}", versions]
    return page(f"Linear layers on {'a GPU' if on_gpu else 'a CPU'}", about, _tiles(everything), cards, report.to_json())


def _groups(report: Report | GpuReport) -> Iterator[tuple[str, list[_Row], float | None, dict[str, float]]]:
    """Measurements that belong into one chart: title, rows, bytes per second, operations per second of each kind."""
    if isinstance(report, GpuReport):
        bandwidth = report.ceilings.get(_BANDWIDTH)
        peaks = {name: rate for name, rate in report.ceilings.items() if name != _BANDWIDTH}
        for case in dict.fromkeys((one.n, one.k, one.format, one.dtype, one.compute) for one in report.measurements):
            some = [one for one in report.measurements if (one.n, one.k, one.format, one.dtype, one.compute) == case]
            yield f"{case[0]} × {case[1]}, {case[2]}, {case[3]}, {case[4]}", [*map(_of_gpu, some)], bandwidth, peaks
        return
    for key in dict.fromkeys((one.n, one.k, one.threads) for one in report.measurements):
        group = [one for one in report.measurements if (one.n, one.k, one.threads) == key]
        ceilings = [sample.ceilings for one in group for sample in one.samples]
        rates = {name: median(getattr(one, field) for one in ceilings) for field, name in _PEAKS.items()} if ceilings else {}
        bandwidth = median(one.read_bandwidth for one in ceilings) if ceilings else None
        threads = f"{key[2]} thread{'s' if key[2] > 1 else ''}"
        yield f"{key[0]} × {key[1]}, {threads}", [*map(_of_cpu, group)], bandwidth, rates


def _of_cpu(one: Measurement) -> _Row:
    return _Row(one.label, one.peer, one.n, one.k, one.m, one.copy_bytes, one.seconds, one.best_peer, one.fraction, one.error, "")


def _of_gpu(one: GpuMeasurement) -> _Row:
    """A peer's bytes are those of the format where it has codes, and of the dtype where it multiplies floats."""
    dense = one.peer and one.contender.startswith("cublas")
    bits = 16.0 if dense else as_format(one.format).bits_per_weight(one.k)
    fraction = None if one.peer else one.floor / one.seconds
    kernel = one.kernel.split("\n")[0]
    return _Row(one.label, one.peer, one.n, one.k, one.m, one.n * one.k * bits / 8, one.seconds, one.best_peer, fraction, one.error, kernel)


def _tiles(found: Sequence[_Row]) -> dict[str, str]:
    halfbyte_rows = [one for one in found if not one.peer]
    tiles = {}
    if compared := [one for one in halfbyte_rows if one.best_peer is not None]:
        best = max(compared, key=lambda one: one.best_peer or 0)
        least = min(compared, key=lambda one: one.best_peer or 0)
        tiles[f"the best peer's speed, {best.label}, M = {best.m}"] = f"{best.best_peer:.2f}×"
        tiles[f"where it is least: {least.label}, M = {least.m}"] = f"{least.best_peer:.2f}×"
    if near := [one for one in halfbyte_rows if one.fraction is not None]:
        nearest = max(near, key=lambda one: one.fraction or 0)
        tiles[f"of the roofline at most: {nearest.label}, M = {nearest.m}"] = f"{nearest.fraction:.0%}"
    if halfbyte_rows:
        fastest = max(halfbyte_rows, key=lambda one: one.rate)
        tiles[f"{fastest.label}, M = {fastest.m}"] = f"{fastest.rate / 1e9:,.0f} GOP/s"
    return tiles


def _cards(title: str, group: Sequence[_Row], bandwidth: float | None, peaks: dict[str, float]) -> Iterator[Markup]:
    ordered = sorted(group, key=lambda one: one.peer)  # halfbyte first: its colours do not depend on how many peers there are
    labels = dict.fromkeys(one.label for one in ordered)
    lines = {label: sorted((one for one in ordered if one.label == label), key=lambda one: one.m) for label in labels}
    if bandwidth:
        series = [
            Series(label, [Point(one.intensity, one.rate, one.tip) for one in some], is_halfbyte=not some[0].peer)
            for label, some in lines.items()
        ]
        drawn = chart(
            series,
            x_label="operations per byte of the weight",
            y_label="operations per second",
            log_x=True,
            log_y=True,
            ceilings=_roofs([one.intensity for one in group], bandwidth, peaks),
        )
        yield card(
            f"Roofline: {title}", drawn, note="A point for each number of rows M. Dashed: what the machine can do, measured in this run."
        )
    times = [
        Series(label, [Point(one.m, one.seconds * 1e6, one.tip) for one in some], is_halfbyte=not some[0].peer)
        for label, some in lines.items()
    ]
    drawn = chart(times, x_label="M, rows of activations", y_label="microseconds", log_x=True, log_y=True)
    yield card(f"Time against M: {title}", drawn, note="Medians; lower is faster. Point at a mark for its figures.")
    columns = ("", "M", "time", "× best peer", "of the roofline", "relative error", "bits per weight")
    yield card(f"Measured: {title}", rows(columns, map(_cells, ordered)), wide=True)


def _roofs(intensities: Sequence[float], bandwidth: float, peaks: dict[str, float]) -> dict[str, list[tuple[float, float]]]:
    """The slope of the bandwidth up to the highest peak, and each peak from there on."""
    low, high = min(intensities) / 1.3, max(intensities) * 1.6
    top = max(peaks.values(), default=bandwidth * high)
    ridge = top / bandwidth
    roofs = {f"{bandwidth / 1e9:,.0f} GB/s": [(low, bandwidth * low), (min(high, ridge), bandwidth * min(high, ridge))]}
    for name, rate in peaks.items():
        if (start := max(low, rate / bandwidth)) < high:
            roofs[name] = [(start, rate), (high, rate)]
    return roofs


def _cells(one: _Row) -> tuple[str | Markup, ...]:
    ratio: str | Markup = ""
    if one.best_peer is not None:
        ratio = element("td", f"{one.best_peer:.2f}", class_=None if one.peer else "good" if one.best_peer >= 0.995 else "bad")
    fraction = "" if one.fraction is None else f"{one.fraction:.0%}"
    error = "" if one.error is None else f"{one.error:.1e}"
    return one.label, str(one.m), time_text(one.seconds), ratio, fraction, error, f"{one.nbytes * 8 / (one.n * one.k):.2f}"
