"""Common to the commands: shared arguments, tables, progress bars.

Results go to stdout, progress and notes to stderr. With --json stdout holds one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from halfbyte.errors import ArgumentError, CheckpointError, unreadable
from halfbyte.io.files import is_file, is_folder, open_file

if TYPE_CHECKING:
    from halfbyte.nn.report import Report

Command = Callable[[argparse.Namespace], int]


class Commands(Protocol):
    """Where parsers of commands are added: argparse's own type for this is private."""

    def add_parser(self, name: str, *, help: str, description: str, allow_abbrev: bool) -> argparse.ArgumentParser: ...


def add_command(commands: Commands, name: str, run: Command, help: str, description: str = "") -> argparse.ArgumentParser:
    """A parser for one command, with the arguments that all commands have."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description or help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bars and no notes")
    parser.set_defaults(run=run)
    return parser


@contextmanager
def settling() -> Iterator[None]:
    """A context for imports and other work whose objects stay to the end. Python's garbage collector is off in it, as each run takes a
    quarter of a second when torch and transformers are loaded, and afterwards ignores the objects that then exist."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def print_json(document: Mapping[str, object]) -> None:
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def show(args: argparse.Namespace, document: Mapping[str, object], text: str) -> int:
    """Print a result as JSON, if asked for, or as text; return the exit code."""
    if args.json:
        print_json(document)
    else:
        print(text)
    return 0


def show_written(args: argparse.Namespace, report: Report, **more: str) -> int:
    """The same for a report of what was written from args.src to args.dst."""
    if args.json:
        print_json({"src": str(args.src), "dst": str(args.dst), **more, **report.to_json()})
    elif not args.quiet:
        print(report)
        print(f"written to {args.dst}")
    return 0


def print_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, left: int = 1) -> None:
    """A table on stdout; the first `left` columns are words, the others numbers. It is never truncated to the terminal's width."""
    from halfbyte.nn.report import table

    print("\n".join(table([columns, *rows], left)))


def path_argument(text: str) -> Path:
    """The path that an argument names. Raises CheckpointError, which argparse passes on, for an empty one."""
    if not text:
        raise CheckpointError("an argument names a file or folder, got '': write . for the current folder")
    return Path(text)


def check_written(option: str, path: Path, suffix: str) -> None:
    """Raise ArgumentError, before any work, for a file that an option names and that could not be written."""
    if path.suffix != suffix:
        raise ArgumentError(f"{option} writes a file called *{suffix}, got {path}: name it {path.stem}{suffix}")
    if not is_folder(path.parent):
        raise ArgumentError(f"{option} is a file in a folder that exists, got {path}: make {path.parent} first")
    if is_folder(path):
        raise ArgumentError(f"{option} is a file, got the folder {path}: name a file in it")


def write_page(args: argparse.Namespace, page: str) -> None:
    """Write the page that --html names, in one step, and say so."""
    from halfbyte.checkpoint.native.folder import replacing_file

    with replacing_file(args.html) as path:
        path.write_text(page, encoding="utf-8")
    if not args.quiet:
        print(f"written to {args.html}", file=sys.stderr)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ArgumentError for anything else."""
    if not is_file(path):
        raise ArgumentError(f"{path} is {'a folder' if is_folder(path) else 'missing'}: name a file with UTF-8 text")
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from error


class Advance(Protocol):
    def __call__(self, done: float, total: float, doing: str = "") -> None:
        """`done` of `total` is done; `doing` replaces the label of the bar."""


@contextmanager
def progress(args: argparse.Namespace, what: str, unit: Literal["bytes", "steps", "part"] = "steps") -> Iterator[Advance]:
    """A progress bar on stderr with the time left. It shows steps, bytes with their rate, or just the completed fraction."""
    from rich import progress as rich
    from rich.console import Console

    counts: dict[str, tuple[rich.ProgressColumn, ...]] = {
        "bytes": (rich.DownloadColumn(), rich.TransferSpeedColumn()),
        "steps": (rich.MofNCompleteColumn(),),
        "part": (rich.TaskProgressColumn(),),
    }
    console = Console(stderr=True)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *counts[unit], rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console, disable=args.quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: float, total: float, doing: str = "") -> None:
            bar.update(task, completed=done, total=total, description=doing or None)

        yield advance


def check_fits(n: int, k: int, what: str = "weight") -> None:
    """Raise ArgumentError for a weight or activations [n, k] that this machine cannot hold in float32 four times over."""
    from halfbyte.machine import machine

    memory = machine().memory
    if memory is not None and n > 0 and k > 0 and 16 * n * k > memory:
        got, most = 4 * n * k / 1e9, memory / 4e9
        raise ArgumentError(f"{what} of {n} x {k} would take {got:.1f} GB in float32: ask for at most {most:.1f} GB on this machine")
