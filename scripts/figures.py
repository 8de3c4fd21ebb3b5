"""Write the tables and plots of README.md and docs/ from the measurements in benchmarks/results: `make figures`.

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->` and is benchmarks/results/NAME.json, as README.md there
describes. tests/documentation/test_figures.py checks that all are current.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from halfbyte.plot import bar_plot, line_plot, panels

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end of figures -->\n)", re.DOTALL)
_FIELD = re.compile(r"\{([a-z0-9_]+)\}")
_REFERENCE = re.compile(r"\{([a-z0-9-]+)\.([a-z0-9-]+)\.([a-z0-9_]+)\}")


@cache
def result(name: str) -> dict[str, Any]:
    """A file of results. Numbers keep their digits: 14.80 stays 14.80."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"), parse_float=Decimal)
    return found


def table(name: str) -> str:
    """The Markdown table of a file with columns and rows, or of a report that benchmarks/cpu.py wrote."""
    found = result(name)
    if "measurements" in found:
        found = _milliseconds(found["measurements"])
    columns, left = found["columns"], found["left"]
    aligned = "|".join("---" if i < left else "---:" for i in range(len(columns)))
    rows = [[_cell(column["cell"], row) for column in columns] for row in found["rows"]]
    names, *lines = (
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n" for cells in ([column["name"] for column in columns], *rows)
    )
    return "".join((names, f"|{aligned}|\n", *lines))


def _milliseconds(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns and rows of a benchmark's measurements of one layer: ms, with a row for each contender and a column for each M."""
    rows: dict[str, dict[str, str]] = {}
    for one in measurements:
        row = rows.setdefault(one["label"], {"contender": one["label"]})
        row[f"m{one['m']}"] = f"{1000 * float(one['seconds']):#.3g}".rstrip(".")
    sizes = sorted({one["m"] for one in measurements})
    columns = [{"name": "", "cell": "{contender}"}, *({"name": f"M = {m}", "cell": f"{{m{m}}}"} for m in sizes)]
    return {"left": 1, "columns": columns, "rows": list(rows.values())}


def _cell(template: str, row: Mapping[str, Any]) -> str:
    """A template with the row's fields, in which fields of other files are named; nothing where the row has no such field."""
    if not any(field in row for field in _FIELD.findall(template)):
        return ""
    return _REFERENCE.sub(_referred, _FIELD.sub(lambda match: str(row[match[1]]), template))


def _referred(match: re.Match[str]) -> str:
    """The value of a field of a row of another file, which may be a reference itself."""
    (row,) = (row for row in result(match[1])["rows"] if row["id"] == match[2])
    return _REFERENCE.sub(_referred, str(row[match[3]]))


def page_text(page: Path) -> str:
    """The text of a page with its tables as the results have them."""
    return BLOCK.sub(lambda match: match[1] + table(match[2]) + match[4], page.read_text(encoding="utf-8"))


# Plots


def _recorded(name: str) -> str:
    """The plots of a file that has them, on logarithmic axes."""
    drawn = []
    for one in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["plots"]:
        points = {kind: {label: [(x, y) for x, y in line] for label, line in one[kind].items()} for kind in ("series", "lines")}
        labels = {"title": one["title"], "x_label": one["x_label"], "y_label": one["y_label"]}
        drawn.append(line_plot(points["series"], **labels, log_x=True, log_y=True, lines=points["lines"]))
    return drawn[0] if len(drawn) == 1 else panels(drawn)


def _benchmark(name: str) -> str:
    """The plot of a report that benchmarks/cpu.py wrote."""
    from halfbyte.bench.report import Ceilings, Measurement, Report, Sample, plot

    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    points = []
    for one in found["measurements"]:
        samples = [Sample(**{**sample, "ceilings": Ceilings(**sample["ceilings"])}) for sample in one["samples"]]
        points.append(Measurement(**{**one, "samples": samples}))
    return plot(Report(found["date"], found["machine"], found["versions"], found["settings"], points))


def _size_and_quality() -> str:
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in result("quality-methods")["rows"]:
        if "top1" in row and row["mb"] < 20 and not row["format"].startswith("mixed"):
            series[str(row["format"]).rpartition(", ")[2]].append((float(row["mb"]), float(row["perplexity"])))
    title = "A Llama of 25 million weights, about 4 bits: perplexity against size (float32: 100.7 MB, 9.72)"
    return line_plot(dict(sorted(series.items())), title=title, x_label="MB of weights", y_label="perplexity")


def _tokens() -> str:
    groups = {
        f"{row['model']}, {row['hardware']}": {
            "halfbyte": float(_cell("{decode}", row)),
            "llama.cpp": float(_cell("{llamacpp_decode}", row)),
        }
        for row in result("language-models-speed")["rows"]
    }
    return bar_plot(groups, title="Decoding one sequence, q4_0", unit="tokens/s")


DRAWN: dict[str, Callable[[], str]] = {
    "cpu-avx512.svg": lambda: _recorded("cpu-avx512"),
    "cpu-avx2.svg": lambda: _recorded("cpu-avx2"),
    "cpu-zen5.svg": lambda: _benchmark("cpu-zen5"),
    "gpu.svg": lambda: _recorded("gpu"),
    "quality.svg": _size_and_quality,
    "tokens.svg": _tokens,
}


def files() -> Iterator[tuple[Path, str]]:
    """Everything that is written: (path, text)."""
    for page in PAGES:
        if BLOCK.search(page.read_text(encoding="utf-8")):
            yield page, page_text(page)
    for name, draw in DRAWN.items():
        yield PLOTS / name, draw()


def main() -> None:
    for path, text in files():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
