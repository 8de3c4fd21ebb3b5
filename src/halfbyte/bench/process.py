"""The parent's side of a worker: a process on given cores that answers requests, or fails with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Timer
from types import TracebackType
from typing import Any

import halfbyte
from halfbyte.errors import HalfbyteError

PROGRAM = ("-m", "halfbyte.bench.worker")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HALFBYTE_THREADS")


class WorkerError(HalfbyteError):
    """A request that failed, or a worker that died; the text says why, in one line."""


class Worker:
    """`python -m halfbyte.bench.worker`, or another program that answers like it, on exactly `threads` cores."""

    def __init__(self, threads: int, program: Sequence[str] = PROGRAM) -> None:
        source = str(Path(halfbyte.__file__).parents[1])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads)), "PYTHONPATH": path}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [sys.executable, *program, *map(str, cores(threads))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent process; a worker ends when its input does
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def ask(self, do: str, *, timeout: float = 300, **arguments: object) -> dict[str, Any]:
        """The answer to one request. Raises WorkerError if it fails, dies or takes longer than `timeout` seconds."""
        expired = Event()

        def expire() -> None:
            expired.set()  # first: what follows the end of the process may run before this thread goes on
            self._process.kill()

        timer = Timer(timeout, expire)
        timer.start()
        try:
            self._requests.write(json.dumps({"do": do, **arguments}) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise WorkerError(f"no answer within {timeout:.0f} s" if expired.is_set() else self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise WorkerError(answer["reason"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the process died ({f'signal {-code}' if code < 0 else f'exit code {code}'}){': ' + lines[-1] if lines else ''}"

    def close(self) -> None:
        """Ends the process; it holds nothing that needs saving. May be called again."""
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # a request that was never read
            self._requests.close()
        self._answers.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def cores(threads: int) -> list[int]:
    """The CPUs to use of those this process may use, one of each physical core before any second one.

    Where the operating system does not tell, nothing is pinned and the list is empty.
    """
    if sys.platform != "linux":
        return []
    usable = sorted(os.sched_getaffinity(0))
    seen: set[str] = set()
    first: list[int] = []
    second: list[int] = []
    for cpu in usable:
        file = Path(_SIBLINGS.format(cpu))
        siblings = file.read_text().strip() if file.exists() else str(cpu)
        (second if siblings in seen else first).append(cpu)
        seen.add(siblings)
    return (first + second)[:threads]
