"""Charts as SVG, small enough that their text can be read on a phone; colours are those of the page's style, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from halfbyte.bench.pages.markup import Markup, element
from halfbyte.plot import scale, ticks

_WIDTH, _HEIGHT = 420, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 12, 40
_COLOURS = 8
_MOST_TICKS = 9


class Point(NamedTuple):
    """tip: what a reader sees who points at it."""

    x: float
    y: float
    tip: str


class Series(NamedTuple):
    """is_halfbyte: drawn thicker. label: drawn next to its last point. colour: 0 to 7; None: its place among the others."""

    name: str
    points: Sequence[Point]
    is_halfbyte: bool = False
    label: str = ""
    colour: int | None = None


def chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    ceilings: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Markup:
    """Points and lines on two axes, with a legend that can hide a series.

    Args:
        ceilings: Dashed lines with their names next to them.
    """
    ceilings = ceilings or {}
    xs = [p.x for one in series for p in one.points] + [x for line in ceilings.values() for x, _ in line]
    ys = [p.y for one in series for p in one.points] + [y for line in ceilings.values() for _, y in line]
    point_xs = sorted({p.x for one in series for p in one.points})
    are_spread = all(int(x) == x for x in point_xs) and all(b >= 1.4 * a for a, b in pairwise(point_xs))
    x_ticks = point_xs if log_x and are_spread and len(point_xs) <= _MOST_TICKS else _thinned(ticks(xs, log_x))
    y_ticks = _thinned(ticks(ys, log_y))
    to_x = scale(xs + x_ticks, log_x, _LEFT, _WIDTH - _RIGHT)
    to_y = scale(ys + y_ticks, log_y, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for y in y_ticks:
        parts.append(element("path", d=f"M{_LEFT} {to_y(y):.1f}H{_WIDTH - _RIGHT}", class_="grid"))
        parts.append(element("text", _tick(y), x=_LEFT - 6, y=to_y(y) + 4, text_anchor="end"))
    for x in x_ticks:
        parts.append(element("path", d=f"M{to_x(x):.1f} {_TOP}V{_HEIGHT - _BOTTOM}", class_="grid"))
        parts.append(element("text", _tick(x), x=to_x(x), y=_HEIGHT - _BOTTOM + 16, text_anchor="middle"))
    parts.append(element("text", x_label, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 6, text_anchor="middle"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(element("text", y_label, transform=f"translate(12 {middle:.0f}) rotate(-90)", text_anchor="middle"))
    for name, line in ceilings.items():
        path = " L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in line)
        parts.append(element("path", d=f"M{path}", class_="ceiling"))
        x, y = line[-1]
        parts.append(element("text", name, x=to_x(x) - 2, y=to_y(y) - 5, text_anchor="end", class_="ceiling-label"))
    for i, one in enumerate(series):
        parts.append(_drawn(one, _colour(one, i), [(to_x(p.x), to_y(p.y)) for p in one.points]))
    described = f"{y_label} against {x_label}: {', '.join(one.name for one in series)}"
    drawing = element("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", class_="chart", role="img", aria_label=described)
    return Markup(drawing + _legend(series))


def _drawn(one: Series, colour: str, places: Sequence[tuple[float, float]]) -> Markup:
    line = element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places)) if len(places) > 1 else ""
    circles = [
        element(
            "circle",
            cx=x,
            cy=y,
            r=5 if one.is_halfbyte else 4,
            data_tip=f"{one.name}\n{p.tip}",
            data_x=repr(p.x),
            data_y=repr(p.y),
            tabindex=0,
        )
        for p, (x, y) in zip(one.points, places, strict=True)
    ]
    name: Markup | str = ""
    if one.label and places:
        x, y = places[-1]
        left = x > (_WIDTH + _LEFT) / 2
        name = element("text", one.label, x=x - 9 if left else x + 9, y=y + 4, text_anchor="end" if left else "start", class_="label")
    return element("g", line, *circles, name, class_=f"{colour} own" if one.is_halfbyte else colour, data_series=one.name)


def _colour(one: Series, place: int) -> str:
    return f"s{(place if one.colour is None else one.colour) % _COLOURS}"


def _legend(series: Sequence[Series]) -> Markup:
    buttons = [
        element(
            "button",
            element("span", class_=f"swatch {_colour(one, i)}"),
            element("span", one.name),
            type="button",
            aria_pressed="true",
            data_of=one.name,
        )
        for i, one in enumerate(series)
    ]
    return element("div", *buttons, class_="legend")


class Bar(NamedTuple):
    """A line of `bars`. mark: another value on the same scale, such as the least possible; colour: 0 to 7."""

    name: str
    value: float
    shown: str
    tip: str
    mark: float | None = None
    colour: int = 0


def bars(lines: Sequence[Bar]) -> Markup:
    """Horizontal bars below their names, on one scale."""
    most = max((max(one.value, one.mark or 0) for one in lines), default=0) or 1
    drawn = []
    for one in lines:
        mark = element("span", class_="mark", style=f"left:{100 * one.mark / most:.2f}%") if one.mark is not None else ""
        fill = element("span", class_=f"fill s{one.colour % _COLOURS}", style=f"width:{100 * one.value / most:.2f}%")
        track = element("div", fill, mark, class_="track", data_tip=f"{one.name}\n{one.tip}", data_value=repr(one.value), tabindex=0)
        drawn.append(element("div", element("span", one.name, class_="name"), element("span", one.shown), track, class_="bar"))
    return element("div", *drawn, class_="bars")


def _thinned(values: list[float]) -> list[float]:
    """At most so many ticks as there is room for: the powers of ten where there are too many."""
    if len(values) <= _MOST_TICKS:
        return values
    tens = [v for v in values if f"{v:e}".startswith("1.000000e")]
    return tens if 2 <= len(tens) <= _MOST_TICKS else values[:: -(-len(values) // _MOST_TICKS)]


def _tick(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:g}"
