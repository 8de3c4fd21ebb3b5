"""halfbyte against its peers on the CPU, on linear layers: each in a process of its own, in turn (`halfbyte.bench.cpu` says how)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cpu_contenders import ALL, LINEAR, QLINEAR

from halfbyte.bench.cpu import Plan, run
from halfbyte.bench.report import plot, text
from halfbyte.errors import HalfbyteError
from halfbyte.machine import machine

PROGRAM = (str(Path(__file__).with_name("cpu_worker.py")),)


def _show(doing: str, done: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:4.0%}  {doing:76.76}", end="" if done < 1 else "\n", file=sys.stderr, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [tuple(int(side) for side in part.split("x")) for part in text.split(",")]
    return tuple((n, k) for n, k in pairs)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of benchmarks/cpu.py: 0, 2 for an invalid request, 130 for Ctrl-C."""
    usual = Plan(peers=tuple(peer.name for peer in LINEAR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lists: list[tuple[str, Callable[[str], object], object, str]] = [
        ("--shapes", _shapes, usual.shapes, "weights as NxK, comma between"),
        ("--m", _numbers, usual.ms, "rows of activations"),
        ("--threads", _numbers, tuple(t for t in usual.threads if t <= machine().cores), "threads, each count on that many cores"),
        ("--formats", _names, usual.formats, "formats of halfbyte's"),
        ("--peers", _names, usual.peers, f"of {','.join(usual.peers)}; an empty string for none"),
    ]
    for option, kind, default, meaning in lists:
        parser.add_argument(option, type=kind, default=default, help=meaning)
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="visits to each contender (default: %(default)s)")
    parser.add_argument("--min-time", type=float, default=usual.min_time, help="seconds of a visit (default: %(default)s)")
    parser.add_argument("--memory", type=int, default=usual.memory_bytes >> 20, help="MiB for a contender's weights (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write everything, single rounds included, to this file")
    parser.add_argument("--plot", type=Path, help="also draw operations per second against M, and the ceilings, to this file (SVG)")
    parser.add_argument("--qlinear", action="store_true", help="in place of all that: int8 codes in, int8 codes out")
    args = parser.parse_args(argv)
    if args.qlinear:
        args.formats, args.peers = (), tuple(one.name for one in QLINEAR)
    try:
        plan = Plan(args.shapes, args.m, args.threads, args.formats, args.peers, args.rounds, args.min_time, args.memory << 20)
        report = run(plan, _show, ALL, PROGRAM)
    except HalfbyteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(text(report))
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if args.plot is not None and report.measurements:
        args.plot.write_text(plot(report))
    return 0
