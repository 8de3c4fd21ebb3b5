"""Draw log.tsv as an SVG: python plot.py log.tsv loss.svg"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from halfbyte.plot import line_plot

NAMES = {"train": "training loss", "held_out": "held-out loss"}
HIGHEST = 3.5  # the loss of the first steps would compress the rest of the curve


def main() -> None:
    rows = list(csv.DictReader(Path(sys.argv[1]).read_text().splitlines(), delimiter="\t"))
    curves = {
        label: [(int(row["tokens"]) / 1e6, float(row[name])) for row in rows if row[name] and float(row[name]) <= HIGHEST]
        for name, label in NAMES.items()
    }
    svg = line_plot(curves, title="loss of tiny-llama in training", x_label="million tokens read", y_label="nats per token")
    Path(sys.argv[2]).write_text(svg)


if __name__ == "__main__":
    main()
