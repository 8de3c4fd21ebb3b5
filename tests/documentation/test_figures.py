"""Tables and plots of the docs are those that benchmarks/results has, and no table of measurements is without a source."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import figures
import pytest

from halfbyte.plot import bar_plot

ROOT = figures.ROOT
RESULTS = sorted(figures.RESULTS.glob("*.json"))
USERS_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASURED = re.compile(r"\d[\d.]*\s*(ms|µs|us|tokens/s|MB|GB|%|×)|^[-+]?\d+\.\d+$|^\d+ / \d+")
# Tables of figures that follow from definitions: bits per weight of formats, layouts, tested versions.
NOT_MEASURED = ("| format | bits per weight", "| package | which versions")


def tables(text: str) -> Iterator[str]:
    """The Markdown tables outside of generated blocks."""
    yield from re.findall(r"(?:^\|.*\n){3,}", figures.BLOCK.sub("\n", text), re.MULTILINE)


def is_measured(table: str) -> bool:
    """Whether a third or more of the cells behind the first column are figures with a unit or decimals."""
    rows = [[re.sub(r"`[^`]*`", "", cell).strip() for cell in line.strip("|").split("|")[1:]] for line in table.splitlines()[2:]]
    cells = [cell for row in rows for cell in row]
    return 3 * sum(MEASURED.search(cell) is not None for cell in cells) >= max(1, len(cells)) and not table.startswith(NOT_MEASURED)


@pytest.mark.parametrize(("path", "text"), list(figures.files()), ids=lambda value: value.name if isinstance(value, Path) else "")
def test_tables_and_plots_are_current(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `make figures`, and commit what it writes"


@pytest.mark.parametrize("page", USERS_PAGES, ids=lambda page: page.name)
def test_every_table_of_measurements_has_a_source(page: Path) -> None:
    assert [table.splitlines()[0] for table in tables(page.read_text(encoding="utf-8")) if is_measured(table)] == []


def test_a_table_without_a_source_is_found() -> None:
    table = "| network | time |\n| --- | ---: |\n| ResNet | 5.15 |\n"
    assert [is_measured(one) for one in tables(f"text\n\n{table}\n")] == [True]
    assert list(tables(f"<!-- figures: vision -->\n{table}<!-- end of figures -->\n")) == []
    assert not is_measured("| option | meaning |\n| --- | --- |\n| `--m 1.5` | 3 of them |\n")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_where_it_is_from(path: Path) -> None:
    """Machine, versions, date, commit and a command, whose script and make target are there."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("sources"):
        return
    for name, kind in {"title": str, "date": str, "commit": str, "machine": dict, "versions": dict, "command": str}.items():
        assert found[name], name
        assert isinstance(found[name], kind), name
    assert re.match(r"\d{4}-\d\d-\d\d", found["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["commit"])
    program, what, *arguments = shlex.split(found["command"])
    if program == "make":
        assert f"\n{what}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return
    assert program == "python"
    source = (ROOT / what).read_text(encoding="utf-8")
    declared = source + "".join(file.read_text(encoding="utf-8") for file in (ROOT / what).parent.glob("*.py"))
    for option in (word for word in arguments if word.startswith("--")):
        assert f'"{option}"' in declared, f"{what} has no {option}"


def test_every_result_is_used_and_every_block_has_one() -> None:
    used = {match[2] for page in figures.PAGES for match in figures.BLOCK.finditer(page.read_text(encoding="utf-8"))}
    drawn = {name.removesuffix(".svg") for name in figures.DRAWN}
    summaries = [(figures.RESULTS / f"{name}.json").read_text(encoding="utf-8") for name in ("summary", "summary-home")]
    referred = set(re.findall(r"\{([a-z0-9-]+)\.[a-z0-9-]+\.", "".join(summaries)))
    assert {path.stem for path in RESULTS} == used | referred | (drawn & {path.stem for path in RESULTS})


def test_numbers_keep_their_digits() -> None:
    assert "| 14.80 |" in figures.table("vision-cpu")
    assert "| 44.0 (1.04×) |" in figures.table("gpu-linear")
    assert "wrong result" in figures.table("vision-cpu")


def test_a_missing_field_is_an_empty_cell_and_a_wrong_reference_is_an_error() -> None:
    assert figures._cell("{a} %", {"b": 1}) == ""
    assert figures._cell("{a} %", {"a": 1}) == "1 %"
    assert figures._cell("{a}", {"a": "{vision-cpu.resnet-18-xeon-1.int8} ms"}) == "5.15 ms"
    with pytest.raises(ValueError):
        figures._cell("{a}", {"a": "{vision-cpu.no-such-row.int8} ms"})


def test_bars_are_as_long_as_their_values() -> None:
    text = bar_plot({"a & b": {"one": 3.0, "two": 1.5}, "c": {"one": 0.0}}, title="t", unit="ms")
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="16"', text)]
    assert widths == [pytest.approx(2 * widths[1]), widths[1], 0]
    assert "a &amp; b" in text
    assert ">1.5 ms<" in text


@pytest.mark.parametrize("name", figures.DRAWN)
def test_plots_are_svg_for_light_and_dark(name: str) -> None:
    text = (figures.PLOTS / name).read_text(encoding="utf-8")
    ET.fromstring(text)
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r'(?:fill|stroke)="#', text)


def test_every_plot_is_drawn_from_data_and_shown() -> None:
    assert {path.name for path in figures.PLOTS.iterdir()} == {*figures.DRAWN}
    pages = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    assert [name for name in figures.DRAWN if f"figures/{name}" not in pages] == []


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_no_figure_is_from_a_script_that_nobody_has(page: Path) -> None:
    """A figure names a command of the repository, or it is not there."""
    text = " ".join(page.read_text(encoding="utf-8").split())
    wordings = (r"\bscripts? (?:that )?(?:is|are|was|were) not\b", r"\((?:a|the same) script\b", r"\bby (?:a script|scripts)\b(?!/)")
    assert [re.findall(f".{{0,40}}{words}.{{0,20}}", text) for words in wordings if re.search(words, text)] == []
