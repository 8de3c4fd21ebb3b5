"""The convolution benchmark: layers of ResNet-50, or whole networks, on the CPU: halfbyte and its peers in turn, each in a process of its
own."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from conv_contenders import CONTENDERS, INTEGER, Layer
from conv_networks import CONTENDERS as NETWORK_CONTENDERS
from conv_networks import PEER as NETWORK_PEER
from networks import NETWORKS

from halfbyte.bench.cpu import versions
from halfbyte.bench.process import Worker, WorkerError
from halfbyte.machine import machine

PROGRAM = (str(Path(__file__).with_name("conv_worker.py")),)
_PART = "of_dot_peak"  # of a row: what part of the probed rate of byte products a layer reaches
LAYERS = (
    Layer(64, 56, 64, 3),
    Layer(128, 28, 128, 3),
    Layer(256, 14, 256, 3),
    Layer(512, 7, 512, 3),
    Layer(256, 56, 64, 1),
    Layer(1024, 14, 256, 1),
    Layer(3, 224, 64, 7, 2),
    Layer(144, 56, 144, 3, 1, 144),
)


def run(layers: Sequence[Layer], threads: int, rounds: int, min_time: float) -> Iterator[list[dict[str, Any]]]:
    """For each layer a row a contender: seconds (median of the rounds), or the reason why there are none."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(threads, PROGRAM)) for name in CONTENDERS}
        probe = stack.enter_context(Worker(threads))
        for layer in layers:
            peaks: list[float] = []

            def before(peaks: list[float] = peaks) -> None:
                peaks.append(probe.ask("probe", names=["dot_peak"], threads=threads)["dot_peak"])

            found = _interleaved(workers, rounds, before, do="convolve", layer=asdict(layer), min_time=min_time)
            case = {"layer": asdict(layer), "threads": threads}
            fraction = {name: layer.operations / t["seconds"] / max(peaks) if t["seconds"] else None for name, t in found.items()}
            yield [case | {"contender": name, _PART: fraction[name]} | taken for name, taken in found.items()]


def run_networks(names: Sequence[str], batch: int, threads: int, rounds: int, min_time: float) -> Iterator[list[dict[str, Any]]]:
    """As `run`, of whole networks."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(threads, PROGRAM)) for name in NETWORK_CONTENDERS}
        for network in names:
            case: dict[str, Any] = {"network": network, "batch": batch, "threads": threads}
            asked = {"network": {"name": network, "batch": batch}, "min_time": min_time}
            found = _interleaved(workers, rounds, lambda: None, do="infer", **asked)
            yield [case | {"contender": name} | taken for name, taken in found.items()]


def collected(measured: Iterable[list[dict[str, Any]]], about: Mapping[str, Any], path: Path | None) -> list[dict[str, Any]]:
    """All rows; after each of `measured` those that there are so far are in the file, so that a run that is cut leaves what it measured."""
    rows: list[dict[str, Any]] = []
    for more in measured:
        rows += more
        if path is not None:
            extra = path.with_name(f"{path.name}.part")
            extra.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            extra.replace(path)
    return rows


def _interleaved(
    workers: Mapping[str, Worker], rounds: int, before: Callable[[], None], *, do: str, **asked: Any
) -> dict[str, dict[str, Any]]:
    """Of each contender its "seconds", the median of the rounds, or None and the "reason"; `before` is called at each round."""
    seconds: dict[str, list[float]] = defaultdict(list)
    absent: dict[str, str] = {}
    for round_index in range(rounds):
        before()
        for name in list(workers)[:: -1 if round_index % 2 else 1]:
            if name in absent:
                continue
            try:
                taken = workers[name].ask(do, name=name, **asked)
                if not taken.get("error", 0) <= taken.get("allowed", 0):
                    raise WorkerError(f"wrong result: off by {taken['error']:.2g}, {taken['allowed']:.2g} is right")
                seconds[name].append(taken["seconds"])
            except WorkerError as error:
                absent[name] = str(error)
    missing = {name: {"seconds": None, "reason": reason} for name, reason in absent.items()}
    return {name: missing.get(name) or {"seconds": median(seconds[name])} for name in workers}


def table(rows: Sequence[dict[str, Any]], contenders: Sequence[str], peers: Sequence[str]) -> str:
    """Milliseconds; for the first of the contenders also the best of `peers`' time over its own, and the part of the probed int8 peak."""
    by_cell = {(_case(row), row["contender"]): row for row in rows}
    lines = ["| | threads | " + " | ".join(contenders) + " |", "|" + " --- |" * (len(contenders) + 2)]
    for case in dict.fromkeys(map(_case, rows)):
        custom, *_ = found = [by_cell[case, name] for name in contenders]
        cells = ["-" if row["seconds"] is None else f"{row['seconds'] * 1e3:.3f}" for row in found]
        expected = [seconds for peer in peers if (seconds := by_cell[case, peer]["seconds"]) is not None]
        if custom["seconds"]:
            more = [f"×{min(expected) / custom['seconds']:.2f}"] if expected else []
            more += [f"{custom[_PART]:.0%}"] if _PART in custom else []
            cells[0] += f" ({', '.join(more)})" if more else ""
        lines.append(f"| {case[0]} | {case[1]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *sorted({f"not measured: {row['contender']}: {row['reason']}" for row in rows if "reason" in row})])


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["network"] if "network" in row else str(Layer(**row["layer"])), row["threads"]


def main(argv: Sequence[str]) -> int:
    """The command line of conv.py, without --device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[t for t in (1, 2) if t <= machine().cores])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--model", nargs="+", choices=list(NETWORKS), default=[], help="time whole networks instead of layers")
    parser.add_argument("--rounds", type=int, default=5, help="visits to each contender (default: %(default)s)")
    parser.add_argument("--min-time", type=float, default=0.05, help="seconds of a visit (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    args = parser.parse_args(argv)
    layers = [Layer(**(asdict(layer) | {"batch": args.batch})) for layer in LAYERS]
    about = {"machine": machine().cpu, "versions": versions()}
    measured = (
        run_networks(args.model, args.batch, threads, args.rounds, args.min_time)
        if args.model
        else run(layers, threads, args.rounds, args.min_time)
        for threads in args.threads
    )
    rows = collected(chain.from_iterable(measured), about, args.json)
    print(f"{about['machine']} · " + " · ".join(f"{name} {version}" for name, version in versions().items()))
    if args.model:
        print(f"ms a batch of {args.batch}; in brackets ONNX Runtime's time over ours\n")
        print(table(rows, list(NETWORK_CONTENDERS), [NETWORK_PEER]))
    else:
        print("ms; in brackets the best integer peer's time over ours, and the part of the int8 rate probed meanwhile\n")
        print(table(rows, list(CONTENDERS), INTEGER[1:]))
    return 0
