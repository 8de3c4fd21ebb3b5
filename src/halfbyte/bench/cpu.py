"""The CPU benchmark: halfbyte and its peers on linear layers, in turn, between measurements of the machine's ceilings.

Each contender has its own process, since the thread pools of several runtimes in one process spin against each other, and
sleeps while another one runs. A round visits every M and, for each, every contender. All ceilings are measured before each M,
the dot-product rate also between visits: on a shared host two cores may for seconds be only as fast as one, and visits in such
a time are excluded from the medians.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import halfbyte
from halfbyte.bench.contenders import PEERS, Contender, select
from halfbyte.bench.process import PROGRAM, Worker, WorkerError
from halfbyte.bench.report import Absence, Ceilings, Measurement, Report, Sample, rank, summarize
from halfbyte.bench.workload import Workload
from halfbyte.errors import ArgumentError, check_counts
from halfbyte.machine import machine

_PACKAGES = ("torch", "onnxruntime", "openvino", "llama_cpp", "llvmlite", "numpy")
_MEMORY_CAP = 4 << 30
# Assumed where the machine does not report its own.
_USUAL_MEMORY, _USUAL_CACHE = 16 << 30, 32 << 20

Advance = Callable[[str, float], None]  # (current activity, fraction done)


def _usual_memory() -> int:
    """An eighth of main memory: quantized weights rotate over far less, so that in practice dense ones alone come near it."""
    return min(_MEMORY_CAP, (machine().memory or _USUAL_MEMORY) // 8)


def _cache() -> int:
    return max(level or 0 for level in machine().caches) or _USUAL_CACHE


@dataclass(frozen=True)
class Plan:
    """The measurements to make.

    shapes        (N, K) of the weights
    min_time      seconds that one visit measures for, at least
    memory_bytes  that the weights of one contender may take
    """

    shapes: tuple[tuple[int, int], ...] = ((14336, 4096),)
    ms: tuple[int, ...] = (1, 4, 16, 128)
    threads: tuple[int, ...] = (1, 2)
    formats: tuple[str, ...] = ("q4_0",)
    peers: tuple[str, ...] = tuple(peer.name for peer in PEERS)
    rounds: int = 5
    min_time: float = 0.1
    memory_bytes: int = field(default_factory=_usual_memory)
    cache_bytes: int = field(default_factory=_cache)

    def check(self, peers: Sequence[Contender] = PEERS) -> list[Contender]:
        """The contenders, of `peers` those that are named. Raises ArgumentError or FormatError for a plan that cannot be run."""
        n, k = [shape[0] for shape in self.shapes], [shape[1] for shape in self.shapes]
        check_counts("a benchmark", m=self.ms, n=n, k=k, threads=self.threads, rounds=(self.rounds,))
        if max(self.threads, default=1) > machine().cores:
            raise ArgumentError(f"got {max(self.threads)} threads, this process may use {machine().cores} cores: ask for fewer")
        found = select(self.formats, self.peers, peers)
        if not (found and self.shapes and self.ms and self.threads):
            raise ArgumentError("nothing to measure: name at least one shape, M, thread count and contender")
        return found


def run(
    plan: Plan,
    progress: Advance = lambda doing, done: None,
    peers: Sequence[Contender] = PEERS,
    program: Sequence[str] = PROGRAM,
) -> Report:
    """Measure everything in the plan; raise what `Plan.check` does.

    program  of a worker that knows these `peers`
    """
    contenders = plan.check(peers)
    report = Report(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine={"cpu": machine().cpu, "cores": machine().cores, "last-level cache": f"{plan.cache_bytes / 2**20:.0f} MiB"},
        versions={"python": sys.version.split()[0], "halfbyte": halfbyte.__version__, **versions()},
        settings=asdict(plan),
    )
    groups = [Workload(n, k, threads, plan.cache_bytes, plan.memory_bytes) for threads in plan.threads for n, k in plan.shapes]
    for at, work in enumerate(groups):

        def advance(doing: str, done: float, at: int = at, work: Workload = work) -> None:
            progress(f"{work.n}x{work.k}, {work.threads} threads: {doing}", (at + done) / len(groups))

        with ExitStack() as stack:
            workers = [(one, stack.enter_context(Worker(work.threads, program))) for one in contenders]
            probe = stack.enter_context(Worker(work.threads))
            ready = _prepare(plan, work, workers, report, advance)
            report.measurements += _measure(plan, work, ready, probe, report, advance)
    report.measurements = rank(report.measurements)
    for one in report.measurements:
        if one.copies * one.copy_bytes <= plan.cache_bytes:
            report.note(f"{one.label} at N={one.n}, K={one.k}: its weights fit into the cache, and may have been read from it")
        if not all(sample.idle for sample in one.samples):
            report.note(f"{one.label}: its threads went on spinning after its turn, in others' time")
    visits = sum(len(one.samples) for one in report.measurements)
    if left_out := visits - sum(one.steady for one in report.measurements):
        report.note(f"{left_out} of {visits} visits left out: the host was busy with something else")
    return report


@dataclass
class _Ready:
    """A contender whose weights are prepared and whose results have been checked."""

    contender: Contender
    worker: Worker
    facts: dict[str, Any]
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=lambda: defaultdict(list))


def _prepare(plan: Plan, work: Workload, workers: Sequence[tuple[Contender, Worker]], report: Report, advance: Advance) -> list[_Ready]:
    """Prepare every contender's weights and check its results; contenders that fail are reported absent."""
    ready = []
    for at, (one, worker) in enumerate(workers):
        advance(f"preparing {one.label}", 0.4 * at / len(workers))
        try:
            candidate = _Ready(one, worker, worker.ask("prepare", name=one.name, workload=asdict(work)))
            for m in plan.ms:
                candidate.errors[m] = checked = worker.ask("check", m=m)
                if checked["error"] > checked["allowed"]:
                    raise WorkerError(f"wrong result at M={m}: relative error {checked['error']:.2g}, {checked['allowed']:.2g} is right")
        except WorkerError as error:
            report.absences.append(Absence(one.name, one.label, work.n, work.k, work.threads, str(error)))
            worker.close()
        else:
            ready.append(candidate)
    return ready


def _measure(plan: Plan, work: Workload, ready: list[_Ready], probe: Worker, report: Report, advance: Advance) -> list[Measurement]:
    """Visit every contender in each round, every other round in reverse; contenders that fail are reported absent."""

    def probed(*names: str) -> dict[str, float]:
        return probe.ask("probe", names=names, threads=work.threads)

    for round_index in range(plan.rounds):
        for at, m in enumerate(plan.ms):
            ceilings = Ceilings(**probed(*Ceilings.__dataclass_fields__))
            before = probed("dot_peak")["dot_peak"]
            for one in ready[:: -1 if round_index % 2 else 1]:
                advance(
                    f"round {round_index + 1}, M={m}, {one.contender.label}", 0.4 + 0.6 * (round_index + at / len(plan.ms)) / plan.rounds
                )
                try:
                    taken = one.worker.ask("measure", m=m, min_time=plan.min_time)
                except WorkerError as error:
                    report.absences.append(Absence(one.contender.name, one.contender.label, work.n, work.k, work.threads, str(error)))
                    ready.remove(one)
                    continue
                after = probed("dot_peak")["dot_peak"]
                one.samples[m].append(Sample(**taken, ceilings=ceilings, host_rate=min(before, after)))
                before = after
    best_rate = max((s.host_rate for one in ready for samples in one.samples.values() for s in samples), default=0)
    return [_measurement(work, one, m, best_rate) for one in ready for m in plan.ms]


def _measurement(work: Workload, one: _Ready, m: int, best_rate: float) -> Measurement:
    operations = 2 * m * work.n * work.k
    return Measurement(
        contender=one.contender.name,
        label=one.contender.label,
        weights=one.contender.weights,
        peer=one.contender.peer,
        n=work.n,
        k=work.k,
        m=m,
        threads=work.threads,
        samples=one.samples[m],
        **one.facts,
        **one.errors[m],
        **summarize(one.samples[m], best_rate, one.contender.arithmetic.peak, one.facts["copy_bytes"], operations),
    )


def versions() -> dict[str, str]:
    """Those of the packages that may take part and are installed."""
    installed = metadata.packages_distributions()
    return {package: metadata.version(installed[package][0]) for package in _PACKAGES if package in installed}
