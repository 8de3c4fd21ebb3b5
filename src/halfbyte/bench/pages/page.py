"""The page of a report: its header, tiles with the main figures, cards with charts and tables, and its data as JSON.

Everything is in one file. Its policy (Content-Security-Policy) forbids it to load anything, whatever a name in it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from halfbyte import __version__
from halfbyte.bench.pages.markup import Markup, element, join

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, about: Sequence[str], tiles: Mapping[str, str], cards: Iterable[Markup], data: Mapping[str, object]) -> str:
    """Return the text of an HTML file.

    Args:
        title: The heading.
        about: Lines below it: machine, versions, settings.
        tiles: The main figures, by what they are.
        cards: The rest, each from `card`.
        data: What the page shows, for programs: a script of JSON with the id "data".

    Raises:
        ValueError: `data` has NaN or an infinity, which JSON does not have.
    """
    # In a script "<" is the only character that could end it.
    embedded = Markup(json.dumps(data, allow_nan=False).replace("<", "\\u003c"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", _read_asset("style.css")),
    )
    header = element(
        "header",
        element("div", element("h1", title), *(element("p", line, class_="muted") for line in about if line)),
        element("button", "Light / dark", class_="theme", type="button"),
    )
    shown = [
        element("div", element("strong", value), element("span", name, class_="muted"), class_="tile") for name, value in tiles.items()
    ]
    body = element(
        "body",
        element(
            "main",
            header,
            element("section", *shown, class_="tiles") if shown else "",
            element("div", *cards, class_="cards"),
            element("footer", element("p", f"Written by halfbyte {__version__}. The page has its data as JSON in it.", class_="muted")),
        ),
        element("div", id="tip", hidden=True),
        element("script", embedded, type="application/json", id="data"),
        element("script", _read_asset("script.js")),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def card(title: str, *content: Markup, note: str = "", wide: bool = False) -> Markup:
    explained = element("p", note, class_="muted") if note else ""
    return element("section", element("h2", title), explained, *content, class_="card wide" if wide else "card")


def rows(columns: Sequence[str], cells: Iterable[Sequence[str | Markup]], words: int = 1) -> Markup:
    """A table that scrolls by itself where it is wider than the page. Its first `words` columns are words, the others numbers.

    A cell that is Markup must be a `<td>`.
    """
    aligned = ["word" if i < words else None for i in range(len(columns))]
    heading = element("tr", *(element("th", name, class_=name_class) for name, name_class in zip(columns, aligned, strict=True)))
    lines = [
        element("tr", *(one if isinstance(one, Markup) else element("td", one, class_=c) for one, c in zip(line, aligned, strict=True)))
        for line in cells
    ]
    return element("div", element("table", element("thead", heading), element("tbody", *lines)), class_="scroll", tabindex=0)


def listed(lines: Iterable[str]) -> Markup:
    return element("ul", *(element("li", line) for line in lines))


def _read_asset(name: str) -> Markup:
    return join(Markup(files(__package__).joinpath(name).read_text(encoding="utf-8")))
