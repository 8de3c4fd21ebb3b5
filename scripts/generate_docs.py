"""Write the pages of docs/ that are generated from code: docs/cli.md from the parsers, docs/layouts.md from what the layouts pack.

python scripts/generate_docs.py             # write both; tests/documentation/test_generated_docs.py checks that they are current
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import layout_diagrams

from halfbyte.cli.main import _parser

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Written by scripts/generate_docs.py: do not edit. -->\n"


def cli_page() -> str:
    """The reference of the command line, as the parsers declare it."""
    parser = _parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    lines = [
        "# Command line",
        "",
        f"{parser.description} `halfbyte COMMAND --help` prints what this page says.",
        "",
        "Results go to stdout, progress and notes to stderr. Exit codes: 0 done, 1 a check failed, 2 an error in the request, 130",
        "interrupted. Every command takes `--json` (print one JSON document instead of tables) and `-q`, `--quiet` (no progress bars and",
        "no notes).",
        "",
        "| command | |",
        "| --- | --- |",
        *(f"| [`{name}`](#{name}) | {_cell(summary)} |" for name, summary in summaries.items()),
    ]
    for name, command in commands.choices.items():
        lines += ["", *_command(name, command)]
    return "\n".join(lines) + "\n"


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in parser._actions if not {"--help", "--json", "--quiet"} & set(action.option_strings)]
    operands = [action for action in actions if not action.option_strings]
    description = _escaped(parser.description or "")
    yield from (f"## {name}", "", description[:1].upper() + description[1:].removesuffix(".") + ".", "")
    yield from ("```text", " ".join(["usage: halfbyte", name, *_synopsis(parser, operands), "[OPTIONS]"]), "```", "")
    yield from ("| argument | |", "| --- | --- |")
    for action in [*operands, *(action for action in actions if action.option_strings)]:
        shown = ", ".join(f"`{option}`" for option in action.option_strings)
        if value := _value(action):
            shown += f" `{value}`" if shown else f"`{value}`"
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f"| {shown} | {_cell(text)} |"


def _synopsis(parser: argparse.ArgumentParser, operands: list[argparse.Action]) -> Iterator[str]:
    """What a command line has to have: operands, and options of which one is required."""
    for action in operands:
        yield f"[{_value(action)}]" if action.nargs == "?" else _value(action)
    for group in parser._mutually_exclusive_groups:
        if group.required:
            yield "(" + " | ".join(f"{action.option_strings[-1]} {_value(action)}" for action in group._group_actions) + ")"
    yield from (f"{action.option_strings[-1]} {_value(action)}" for action in parser._actions if action.option_strings and action.required)


def _value(action: argparse.Action) -> str:
    """What stands for an argument's value."""
    if action.nargs == 0:
        return ""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None and action.option_strings and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return f"{value} [{value} ...]" if action.nargs == "+" else value


def _escaped(text: str) -> str:
    """Text of argparse as Markdown, in one line."""
    return re.sub(r"([*_|\[\]<>])", r"\\\1", " ".join(text.split())) if "`" not in text else " ".join(text.split())


def _cell(text: str) -> str:
    return _escaped(text) if "`" not in text else _escaped(text).replace("|", "\\|")


PAGES = {"cli.md": cli_page, "layouts.md": layout_diagrams.page}


def text_of(name: str) -> str:
    """The text of a generated page."""
    return NOTE + PAGES[name]()


def main() -> None:
    for name in PAGES:
        (DOCS / name).write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
