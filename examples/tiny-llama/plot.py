"""Draw log.tsv as an SVG: python plot.py log.tsv loss.svg"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 16, 16, 44
COLOURS = {"train": "#4c78a8", "held_out": "#e45756"}
NAMES = {"train": "training loss", "held_out": "held-out loss"}


def main() -> None:
    rows = list(csv.DictReader(Path(sys.argv[1]).read_text().splitlines(), delimiter="\t"))
    curves = {name: [(int(row["tokens"]) / 1e6, float(row[name])) for row in rows if row[name]] for name in COLOURS}
    points = [point for curve in curves.values() for point in curve]
    most = max(x for x, _ in points)
    low = math.floor(min(y for _, y in points) * 2) / 2
    # The first steps would press the rest of the curve to the floor.
    high = min(low + 2.5, math.ceil(max(y for _, y in points) * 2) / 2)

    def at(x: float, y: float) -> str:
        across = LEFT + x / most * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{TOP + (high - min(y, high)) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for half in range(round((high - low) * 4) + 1):
        value = low + half / 4
        x, y = at(0, value).split(",")
        svg.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        svg.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    step = 10 ** math.floor(math.log10(most)) / 2
    for tick in range(int(most / step) + 1):
        x, y = at(tick * step, low).split(",")
        svg.append(f'<text x="{x}" y="{float(y) + 16:.1f}" text-anchor="middle">{tick * step:g}</text>')
    svg.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">million tokens read</text>')
    svg.append(f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">nats per token</text>')
    for place, (name, curve) in enumerate(curves.items()):
        svg.append(f'<polyline fill="none" stroke="{COLOURS[name]}" stroke-width="1.5" points="{" ".join(at(x, y) for x, y in curve)}"/>')
        y = TOP + 20 + 18 * place
        svg.append(f'<text x="{WIDTH - RIGHT - 8}" y="{y}" text-anchor="end" fill="{COLOURS[name]}">{NAMES[name]}</text>')
    svg.append("</svg>")
    Path(sys.argv[2]).write_text("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
