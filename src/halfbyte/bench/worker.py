"""The process of one contender: `python -m halfbyte.bench.worker CPU…` reads requests and writes answers, one JSON object a line.

It runs on the CPUs of those numbers (anywhere, if none is named) and takes its number of threads from OMP_NUM_THREADS.

    {"do": "prepare", "name": …, "workload": {…}}   -> copy_bytes, copies
    {"do": "check", "m": …}                         -> error, allowed
    {"do": "measure", "m": …, "min_time": …}        -> seconds a product: median, min, max; runs; idle
    {"do": "probe", "names": […], "threads": …}     -> each function of `kernels.cpu.probe` by its name

Every answer has "ok"; a failed one has "reason". Between requests the process blocks on reading; `measure` answers only
when the runtime's threads have stopped spinning, so that they do not disturb other contenders.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import perf_counter, process_time, sleep

import torch

from halfbyte import timing
from halfbyte.bench.contenders import PEERS, Contender, contender
from halfbyte.bench.workload import Built, Workload, relative_error
from halfbyte.kernels.cpu import probe


class Bench:
    """The contender of this process, and the requests that it answers: its methods.

    peers  that it may be, besides halfbyte
    """

    contender: Contender
    work: Workload
    built: Built

    def __init__(self, peers: Sequence[Contender] = PEERS) -> None:
        self._peers = peers

    def prepare(self, name: str, workload: dict[str, int]) -> dict[str, object]:
        if hasattr(self, "built"):
            del self.built  # frees the memory of the last shape before the next is allocated
        self.contender, self.work = contender(name, self._peers), Workload(**workload)
        self.built = self.contender.build(self.work)
        return {"copy_bytes": self.built.copy_bytes, "copies": self.built.copies}

    def check(self, m: int) -> dict[str, object]:
        allowed = self.contender.arithmetic.error(self.work.activations(m))
        return {"error": relative_error(self.work, self.built, m), "allowed": allowed}

    def measure(self, m: int, min_time: float) -> dict[str, object]:
        one_pass = self.built.bind(self.work.activations(m))

        def run() -> None:
            for _ in one_pass():
                pass

        next(one_pass())  # wakes the threads; a whole pass where the runtime knows nothing less
        taken = timing.measure(run, min_time=min_time, min_runs=1, warmup=0)
        seconds = {name: getattr(taken, name) / self.built.copies for name in ("median", "min", "max")}
        return {**seconds, "runs": taken.runs, "idle": wait_until_idle()}

    def probe(self, names: list[str], threads: int) -> dict[str, object]:
        found = {name: getattr(probe, name)(threads) for name in names}
        wait_until_idle()
        return found


def wait_until_idle(limit: float = 1.0) -> bool:
    """Sleep until this process uses less than a tenth of a core; False if that takes longer than `limit` seconds."""
    end = perf_counter() + limit
    while perf_counter() < end:
        used, began = process_time(), perf_counter()
        sleep(0.005)
        if process_time() - used < 0.1 * (perf_counter() - began):
            return True
    return False


def answers(bench: Bench, requests: Iterator[str]) -> Iterator[dict[str, object]]:
    for line in requests:
        request = json.loads(line)
        try:
            with torch.inference_mode():
                yield {"ok": True, **getattr(bench, request.pop("do"))(**request)}
        except ModuleNotFoundError as error:
            yield {"ok": False, "reason": f"{error.name} is not installed"}
        except Exception as error:
            text = str(error).strip() or "no message"
            yield {"ok": False, "reason": f"{type(error).__name__}: {text.splitlines()[0]}"}


def serve(bench: Bench) -> None:
    """Answer until there are no more requests."""
    # Libraries may print to stdout: it is redirected to stderr, so that the pipe carries only answers.
    written = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Only now, so that many workers can import at once on all cores; threads that start later inherit it.
    if sys.platform == "linux" and len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[1:]})
    with suppress(BrokenPipeError):  # the parent process is gone
        for answer in answers(bench, sys.stdin):
            written.write(json.dumps(answer) + "\n")
            written.flush()


if __name__ == "__main__":
    serve(Bench())
