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
MEASURED = re.compile(r"\d[\d.]*\s*(ms|µs|us|tokens/s|MB|GB|%|×)|^[-+×~]?\d*\.\d+\b|^[-+]?\d+$|^\d[\d.]* / \d")
# One cell with a time, a rate, or a range of what was reached is enough, among whatever words.
TIMED = re.compile(r"\d\s*(ms|µs|us|tokens/s|[GT]B/s|[GT]op/s)\b|\d*\.\d+ to \d*\.\d+")
# Tables of numbers that nobody measured, by their page and heading: they follow from definitions, or count instructions.
EXPLANATIONS = {
    ("quantize.md", "| format | bits per weight | take it |"): "bits of a code and its share of a scale",
    ("versions.md", "| package | which versions |"): "versions",
    ("serving.md", "| limit | option | beyond it |"): "defaults of options",
    ("cpu.md", "| | tile | products | vector instructions in all, blocks of 128 / 32 | share of products |"): "instructions, counted",
    ("cpu-avx2.md", "| | instructions |"): "instructions, counted",
    ("cpu-avx512.md", "| format | tile | products | unpacking | end of a block | at most |"): "instructions, counted",
}


def tables(text: str) -> Iterator[str]:
    """The Markdown tables outside of generated blocks."""
    yield from re.findall(r"(?:^\|.*\n){3,}", figures.BLOCK.sub("\n", text), re.MULTILINE)


def is_measured(table: str) -> bool:
    """Whether a third or more of the cells after the first column are figures with a unit or decimals, or one is a time or a rate."""
    rows = [[re.sub(r"`[^`]*`", "", cell).strip() for cell in line.strip("|").split("|")[1:]] for line in table.splitlines()[2:]]
    cells = [cell for row in rows for cell in row]
    figured = sum(MEASURED.search(cell) is not None for cell in cells)
    return 3 * figured >= max(1, len(cells)) or any(TIMED.search(cell) for cell in cells)


def sourceless(page: str, text: str) -> list[str]:
    """The headings of a page's tables of measurements that `make figures` does not write."""
    headings = [table.splitlines()[0] for table in tables(text) if is_measured(table)]
    return [heading for heading in headings if (page, heading) not in EXPLANATIONS]


@pytest.mark.parametrize(("path", "text"), list(figures.files()), ids=lambda value: value.name if isinstance(value, Path) else "")
def test_tables_and_plots_are_current(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `make figures`, and commit what it writes"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_every_table_of_measurements_has_a_source(page: Path) -> None:
    found = sourceless(page.name, page.read_text(encoding="utf-8"))
    assert not found, f"{found}: move them to benchmarks/results (README.md there), or drop them where no command prints them"


def test_explanations_are_tables_that_would_be_taken_for_measurements() -> None:
    """An entry whose table has changed or has gone is an error: it would hide a later one."""
    headings = {
        (page.name, table.splitlines()[0])
        for page in figures.PAGES
        for table in tables(page.read_text(encoding="utf-8"))
        if is_measured(table)
    }
    assert set(EXPLANATIONS) - headings == set()


@pytest.mark.parametrize(
    "row",
    [
        "| ResNet | 5.15 |",
        "| `q4_0` | .739 |",
        "| 4096 x 4096 | 1.17 / 1.32 / 2.16 |",
        "| one row, beside the best peer | `q4_0` 1.04 to 1.26 |",
        "| 64x56², 3x3→64 | 0.265 (×1.35) |",
        "| product and load of a tile | 16 |",
        "| the call of a small layer | most of 6 µs |",
    ],
)
def test_a_table_without_a_source_is_found(row: str) -> None:
    table = f"| network | time |\n| --- | ---: |\n{row}\n"
    assert sourceless("cpu.md", f"text\n\n{table}\n") == ["| network | time |"]
    assert sourceless("cpu.md", f"<!-- figures: vision -->\n{table}<!-- end of figures -->\n") == []


def test_tables_of_words_are_no_measurements() -> None:
    assert not is_measured("| option | meaning |\n| --- | --- |\n| `--m 1.5` | 3 of them |\n")
    assert not is_measured("| rows | tile |\n| --- | --- |\n| 1 to 3 | panels of 64 KB: four interleaved |\n")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_where_it_is_from(path: Path) -> None:
    """Machine, versions, date, commit and a command, whose script and make target are there."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if "sources" in found:
        assert not [value for row in found["rows"] for value in row.values() if isinstance(value, float)], "a figure is a reference here"
        return
    for name, kind in {"title": str, "date": str, "commit": str, "machine": dict, "versions": dict, "command": str}.items():
        assert found[name], name
        assert isinstance(found[name], kind), name
    assert re.match(r"\d{4}-\d\d-\d\d", found["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["commit"])
    words = [word for word in shlex.split(found["command"]) if not re.match(r"[A-Z_]+=", word)]
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        words = ["python", *words[3:]]
    program, what, *arguments = words
    if program == "make":
        assert f"\n{what}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return
    assert program == "python"
    source = (ROOT / what).read_text(encoding="utf-8")
    folders = [(ROOT / what).parent, ROOT / "src" / "halfbyte" / "bench"]
    declared = source + "".join(file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py"))
    for option in (word for word in arguments if word.startswith("--")):
        assert f'"{option}"' in declared, f"{what} has no {option}"


def test_every_result_is_used_and_every_block_has_one() -> None:
    used = {match[2] for page in figures.PAGES for match in figures.BLOCK.finditer(page.read_text(encoding="utf-8"))}
    drawn = {name.removesuffix(".svg") for name in figures.DRAWN}
    referred = {match[1] for path in RESULTS for match in figures._REFERENCE.finditer(path.read_text(encoding="utf-8"))}
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
