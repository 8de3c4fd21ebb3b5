"""The command line. Exit codes: 0 done, 1 a check failed, 2 an error in the request, 130 interrupted.

Each command is a file of this package with `add(commands)`, which declares its arguments, and a function that runs it. torch and other
heavy packages are imported only when a command runs, so that `halfbyte --help` answers at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfbyte import __version__
from halfbyte.cli import bench, chat, convert, doctor, eval, explain, export, generate, inspect, quantize, serve, tune
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Iterations that an idle OpenMP thread waits for work by spinning: some hundred µs, longer than from token to token. The usual 300 000
# cost a core while Python reads files and plans calls.
_SPINS = "10000"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halfbyte", description="Quantize neural networks to 4 and 8 bits, and measure size, speed and quality."
    )
    parser.add_argument("--version", action="version", version=f"halfbyte {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (quantize, convert, export, inspect, eval, generate, chat, serve, bench, tune, explain, doctor):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` as in sys.argv[1:]. Raises SystemExit(2) for arguments that do not parse."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when torch is imported
    atexit.register(gc.freeze)  # so that Python does not look for cycles before it ends, which takes a second where torch is
    _keep_stderr_harmless()
    if sys.stdout is None:  # as Python has it where the file descriptor is closed
        return _fail("stdout is closed: send it to a file, a pipe or /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters such as × may be missing in the encoding
    try:
        try:
            args = _parser().parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
            with warnings.catch_warnings():
                warnings.showwarning = _warn  # type: ignore[assignment]
                code: int = args.run(args)
            return code
        finally:
            _flush_stdout()
    except HalfbyteError as error:
        return _fail(str(error))
    except BrokenPipeError:
        return 141  # the reader went away, as `| head` does
    except OSError as error:
        said = error.strerror or str(error)
        return _fail(said if error.filename is None else f"{error.filename}: {said}")
    except ImportError as error:  # there is none, or one that is too old
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        return _fail(f"this command needs transformers ({error}): pip install 'halfbyte[transformers]'")
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is imported only by the commands that need it
            raise
        return _fail(f"a GPU's memory is too small ({error}): ask for a format of fewer bits, for less text, or for --device cpu")
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


class _Droppable(io.FileIO):
    """A file descriptor of messages: drops what cannot be written, as on a full disk or after the reader of a pipe has gone.

    Results are not lost by that, and a server goes on answering; an error raised by a warning would end the step that warns.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def _keep_stderr_harmless() -> None:
    """Replace Python's own sys.stderr, which may be None, by one that raises no OSError; all that prints messages writes to it."""
    if sys.stderr is not sys.__stderr__:
        return  # a caller's
    if sys.stderr is None:  # the file descriptor is closed, and print would write to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stderr, io.TextIOWrapper):
        raw = _Droppable(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), sys.stderr.encoding, "backslashreplace", line_buffering=True)


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        # Output that cannot be written is dropped: Python would report the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(error.errno, error.strerror, "stdout") from error


def _warn(message: Warning | str, *_: object) -> None:
    """Replace `warnings.showwarning`, which also prints a line of code."""
    print(f"halfbyte: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _fail(message: str, code: int = 2) -> int:
    print(f"halfbyte: error: {' '.join(message.split())}", file=sys.stderr)
    return code
