"""Time against M, a panel for each weight, both axes logarithmic: an SVG that any browser and README shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from halfbyte.bench.gpu_report import GpuMeasurement

_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 440, 300, 56, 34, 18, 34


def svg(points: Sequence[GpuMeasurement], title: str) -> str:
    """The whole picture: panels in two columns, the legend below."""
    cases = list(dict.fromkeys((p.n, p.k, p.format, p.dtype, p.compute) for p in points))
    labels = list(dict.fromkeys(p.label for p in points))
    colours = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(labels)}
    columns = min(2, len(cases)) or 1
    rows = -(-len(cases) // columns)
    width, height = columns * _WIDTH, 30 + rows * _HEIGHT + 22 * -(-len(labels) // 3) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}: microseconds against rows M</text>',
    ]
    for i, case in enumerate(cases):
        group = [p for p in points if (p.n, p.k, p.format, p.dtype, p.compute) == case]
        parts.append(f'<g transform="translate({i % columns * _WIDTH} {30 + i // columns * _HEIGHT})">')
        parts += [*_panel(group, f"{case[0]} x {case[1]}, {case[2]}, {case[3]}, {case[4]}", colours), "</g>"]
    for i, label in enumerate(labels):
        x, y = 20 + i % 3 * width / 3, 30 + rows * _HEIGHT + 14 + i // 3 * 22
        parts.append(f'<rect x="{x:.0f}" y="{y - 8}" width="18" height="4" fill="{colours[label]}"/>')
        parts.append(f'<text x="{x + 24:.0f}" y="{y - 2}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(points: Sequence[GpuMeasurement], title: str, colours: dict[str, str]) -> list[str]:
    times = [p.seconds * 1e6 for p in points]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    ms = sorted({p.m for p in points})
    first, last = math.log2(ms[0]), math.log2(max(ms[-1], ms[0] + 1))

    def x(m: int) -> float:
        return _LEFT + (math.log2(m) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(us: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(us) - low) / max(1, high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_TOP - 12}" text-anchor="middle" font-size="12">{escape(title)}</text>']
    for power in range(low, high + 1):
        for us in (10**power * step for step in (1, 2, 5)):
            if math.log10(us) <= high:
                at = y(us)
                parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
                parts.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{us:g}</text>')
    parts += [f'<text x="{x(m):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{m}</text>' for m in ms]
    for label in dict.fromkeys(p.label for p in sorted(points, key=lambda p: not p.peer)):  # our own line on top
        line = sorted((p for p in points if p.label == label), key=lambda p: p.m)
        where = " ".join(f"{x(p.m):.1f},{y(p.seconds * 1e6):.1f}" for p in line)
        wide = 1.5 if line[0].peer else 3
        parts.append(f'<polyline points="{where}" fill="none" stroke="{colours[label]}" stroke-width="{wide}"/>')
        parts += [f'<circle cx="{x(p.m):.1f}" cy="{y(p.seconds * 1e6):.1f}" r="{wide}" fill="{colours[label]}"/>' for p in line]
    return parts
