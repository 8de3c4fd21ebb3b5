"""What README.md and the docs say can be done: commands that parse, names and arguments that exist, links that lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cli.main import _parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]


def _lines() -> Iterator[tuple[str, str]]:
    """(page, line) of all lines of code blocks, fenced or indented, that are a command of halfbyte's."""
    for page in PAGES:
        fenced = False
        for line in page.read_text(encoding="utf-8").splitlines():
            fenced ^= line.startswith("```")
            code = line if fenced else line.removeprefix("    ") if line.startswith("    ") else ""
            if (match := re.fullmatch(r"(?:\$ )?(?:torchrun .* -m )?(halfbyte [a-z]+ [^`]*)", code)) is not None:
                yield page.name, match[1]


def _blocks() -> Iterator[tuple[str, str]]:
    """(page and line, code) of all blocks of Python."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield f"{page.name}:{text.count(chr(10), 0, match.start()) + 2}", match[1]


@pytest.mark.parametrize(("page", "line"), list(_lines()))
def test_commands_parse(page: str, line: str) -> None:
    if any(sign in line for sign in "[|…"):  # a synopsis: its first choice
        line = re.sub(r"\|\S*|[\[\]…]", "", line)
    words = shlex.split(line, comments=True)
    args = _parser().parse_args(words[1:])
    assert callable(args.run)


@pytest.mark.parametrize(("place", "code"), list(_blocks()))
def test_names_and_arguments_exist(place: str, code: str) -> None:
    known: dict[str, Any] = {}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or a.name: importlib.import_module(a.name) for a in node.names if a.name.startswith("halfbyte")}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("halfbyte"):
            known |= {a.asname or a.name: getattr(importlib.import_module(node.module), a.name) for a in node.names}
    known.setdefault("hb", importlib.import_module("halfbyte"))
    known.setdefault("halfbyte", importlib.import_module("halfbyte"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("hb", "halfbyte"):
            assert hasattr(known[node.value.id], node.attr), f"{place}: there is no {ast.unparse(node)}"
        if isinstance(node, ast.Call) and (function := _found(node.func, known)) is not None:
            keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
            assert callable(function)
            inspect.signature(function).bind(*node.args, **keywords)


def test_the_first_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of docs/ run in test_user_pages.py."""
    code = next(code for place, code in _blocks() if place.startswith("README.md:"))
    code = "\n\n".join(code.split("\n\n")[:2])  # imports, and a model from disk to disk
    assert "path/to/model" in code
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("path/to/model", str(ROOT / "models" / "tiny-llama")), "README.md", "exec"), {})
    assert (tmp_path / "small" / "config.json").is_file()


def _found(node: ast.expr, known: dict[str, Any]) -> Any:
    """The function of halfbyte that an expression names, or None."""
    if isinstance(node, ast.Name):
        return known.get(node.id) if node.id not in ("hb", "halfbyte") else None
    if isinstance(node, ast.Attribute):
        home = known.get(node.value.id) if isinstance(node.value, ast.Name) else _found(node.value, known)
        return None if home is None else getattr(home, node.attr, None)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path), f"{page.name} links to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page: those that it sets, and those of its headings, as GitHub and mkdocs name them."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    return slugs | {*re.findall(r'<a id="([^"]+)">', text)}
