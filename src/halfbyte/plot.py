"""Plots as SVG text, so that no plotting library is needed. They are dark where the reader's system is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

from halfbyte.errors import ArgumentError

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 250, 44, 54  # margins; the legend is on the right
# The palette of Okabe and Ito, for colour-blind readers too; and the same, lighter, for dark backgrounds.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b27a00", "#3a94cf", "#000000", "#8c6d31", "#7f3c8d")
_DARK_COLOURS = ("#5ab4ff", "#ff8f4d", "#3fd0a2", "#f0a3cf", "#f2b632", "#8fd0ff", "#ffffff", "#d1b06b", "#c594e0")
_DASHES = ("7 4", "2 3", "10 3 2 3")


def _style(paper: str, ink: str, grid: str, ceiling: str, colours: Sequence[str]) -> str:
    series = "".join(f".c{i}{{color:{colour}}}" for i, colour in enumerate(colours))
    return f".paper{{fill:{paper}}}text{{fill:{ink}}}.grid{{stroke:{grid}}}.dashed{{color:{ceiling}}}{series}"


_STYLE = (
    f"<style>{_style('#ffffff', '#1b1f24', '#e3e6ea', '#777777', _COLOURS)}"
    f"@media (prefers-color-scheme: dark){{{_style('#0d1117', '#d7dde4', '#2a313a', '#9aa4af', _DARK_COLOURS)}}}</style>"
)


def line_plot(
    series: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    lines: Mapping[str, Points] | None = None,
) -> str:
    """An SVG image of labelled series of points (x, y), each connected by a line, with a legend.

    lines  drawn dashed and without markers, such as ceilings

    Raises ArgumentError where there is no point, a number is not finite, or a number on a logarithmic axis is not positive.
    """
    dashed = lines or {}
    points = [point for some in (*series.values(), *dashed.values()) for point in some]
    if not any(series.values()):
        raise ArgumentError("a plot takes at least one point")
    for axis, values, logarithmic in (("x", [x for x, _ in points], log_x), ("y", [y for _, y in points], log_y)):
        if bad := [v for v in values if not math.isfinite(v) or (logarithmic and v <= 0)]:
            raise ArgumentError(f"{axis} values of a plot are finite{' and positive' if logarithmic else ''}, got {bad[0]}")
    xs = sorted({x for some in series.values() for x, _ in some})
    x_ticks = xs if log_x and len(xs) <= 14 else ticks([x for x, _ in points], log_x)
    y_ticks = ticks([y for _, y in points], log_y)
    to_x = scale([x for x, _ in points] + x_ticks, log_x, _LEFT, _WIDTH - _RIGHT)
    to_y = scale([y for _, y in points] + y_ticks, log_y, _HEIGHT - _BOTTOM, _TOP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        _STYLE,
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" class="paper"/>',
        _text(_LEFT, 24, title, 'font-size="15"'),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, x_label, 'text-anchor="middle"'),
        _text(0, 0, y_label, f'text-anchor="middle" transform="translate(18 {(_TOP + _HEIGHT - _BOTTOM) / 2:.0f}) rotate(-90)"'),
    ]
    for y in y_ticks:
        out.append(f'<path d="M{_LEFT} {to_y(y):.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
        out.append(_text(_LEFT - 8, to_y(y) + 4, f"{y:g}", 'text-anchor="end"'))
    for x in x_ticks:
        out.append(f'<path d="M{to_x(x):.1f} {_TOP}V{_HEIGHT - _BOTTOM}" class="grid"/>')
        out.append(_text(to_x(x), _HEIGHT - _BOTTOM + 18, f"{x:g}", 'text-anchor="middle"'))
    styles = [(name, some, f"c{i % len(_COLOURS)}", "") for i, (name, some) in enumerate(series.items())]
    for i, (name, some) in enumerate(dashed.items()):
        styles.append((name, some, "dashed", f' stroke-dasharray="{_DASHES[i % len(_DASHES)]}"'))
    for row, (name, some, colour, dash) in enumerate(styles):
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in sorted(some))
        out.append(f'<polyline points="{path}" fill="none" class="{colour}" stroke="currentColor" stroke-width="2"{dash}/>')
        if not dash:
            out += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3" class="{colour}" fill="currentColor"/>' for x, y in some]
        at, left = _TOP + 8 + 20 * row, _WIDTH - _RIGHT + 14
        out.append(f'<path d="M{left} {at}h26" class="{colour}" stroke="currentColor" stroke-width="2"{dash}/>')
        out.append(_text(left + 32, at + 4, name, ""))
    return "\n".join([*out, "</svg>", ""])


def bar_plot(groups: Mapping[str, Mapping[str, float]], *, title: str, unit: str) -> str:
    """An SVG image of horizontal bars, in groups that each have a scale of their own, with the value at the end of each.

    groups  name of a group -> name of a bar -> its value, which is 0 or more
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    left, right, line = 330, 100, 20
    height = _TOP + 26 + sum(line * len(bars) + 16 for bars in groups.values())
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        _STYLE,
        f'<rect width="{_WIDTH}" height="{height}" class="paper"/>',
        _text(20, 24, title, 'font-size="15"'),
    ]
    for i, name in enumerate(names):
        out.append(f'<rect x="{left + 150 * i}" y="{_TOP - 9}" width="12" height="12" class="c{i % len(_COLOURS)}" fill="currentColor"/>')
        out.append(_text(left + 18 + 150 * i, _TOP + 2, name, ""))
    y = _TOP + 20
    for group, bars in groups.items():
        out.append(_text(left - 10, y + line * len(bars) / 2 + 3, group, 'text-anchor="end"'))
        most = max(bars.values(), default=0) or 1
        for name, value in bars.items():
            width = (_WIDTH - left - right) * value / most
            colour = f"c{names.index(name) % len(_COLOURS)}"
            out.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{line - 4}" rx="2" class="{colour}" fill="currentColor"/>')
            out.append(_text(left + width + 6, y + 12, f"{value:g} {unit}", ""))
            y += line
        y += 16
    return "\n".join([*out, "</svg>", ""])


def panels(plots: Sequence[str]) -> str:
    """Line plots in one SVG image, two side by side."""
    columns = min(2, len(plots))
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    placed = [f'<svg x="{i % 2 * _WIDTH}" y="{i // 2 * _HEIGHT}" {size}' + plot.removeprefix("<svg") for i, plot in enumerate(plots)]
    box = f"0 0 {columns * _WIDTH} {-(-len(plots) // 2) * _HEIGHT}"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">', *placed, "</svg>", ""])


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {attributes}>{escape(text)}</text>'


def scale(values: Sequence[float], logarithmic: bool, start: float, stop: float) -> Callable[[float], float]:
    """Maps numbers to coordinates between start and stop."""

    def linear(v: float) -> float:
        return math.log(v) if logarithmic else v

    low, high = linear(min(values)), linear(max(values))
    span = high - low or 1.0
    return lambda v: start + (linear(v) - low) / span * (stop - start)


def ticks(values: Sequence[float], logarithmic: bool) -> list[float]:
    """Round numbers that cover the values: 1, 2 and 5 of each decade, or, on a linear axis, in steps of 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    if logarithmic:
        decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        all_ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)] + [10.0 ** (decades[-1] + 1)]
        first = max(t for t in all_ticks if t <= low * (1 + 1e-9))
        last = min(t for t in all_ticks if t >= high * (1 - 1e-9))
        return [t for t in all_ticks if first <= t <= last]
    step = 10.0 ** math.floor(math.log10((high - low or abs(high) or 1.0) / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [i * step for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
