"""Quality against size as an SVG picture, which every browser shows and which needs no library to write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 20, 50  # margins; labels of points need room on the right


class Point(NamedTuple):
    label: str
    x: float
    y: float


def scatter(points: Sequence[Point], x_label: str, y_label: str) -> str:
    """A picture of labelled points, at least one, with finite coordinates."""
    x_ticks, y_ticks = _ticks([p.x for p in points]), _ticks([p.y for p in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for tick in x_ticks:
        x, bottom = place(tick, y_ticks[0])
        parts += [_line(x, bottom, x, place(tick, y_ticks[-1])[1]), _text(x, bottom + 16, f"{tick:g}", "middle")]
    for tick in y_ticks:
        left, y = place(x_ticks[0], tick)
        parts += [_line(left, y, place(x_ticks[-1], tick)[0], y), _text(left - 6, y + 4, f"{tick:g}", "end")]
    for point in points:
        x, y = place(point.x, point.y)
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f77b4"/>', _text(x + 8, y + 4, point.label, "start")]
    middle = place((x_ticks[0] + x_ticks[-1]) / 2, (y_ticks[0] + y_ticks[-1]) / 2)
    parts.append(_text(middle[0], _HEIGHT - 12, x_label, "middle"))
    turned = f'transform="rotate(-90 16 {middle[1]:.1f})"'
    parts.append(f'<text x="16" y="{middle[1]:.1f}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, three to eight of them, that span the values."""
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    if first == last:
        first, last = first - 1, last + 1
    return [round(i * step, 12) for i in range(first, last + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
