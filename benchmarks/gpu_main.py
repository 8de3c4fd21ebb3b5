"""halfbyte against its peers on a GPU, on linear layers (`halfbyte.bench.gpu` says how)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_contenders import contenders
from gpu_results import markdown, plot, read, select, written

from halfbyte.bench.gpu import MS, SHAPES, GpuPlan, run
from halfbyte.bench.gpu_contenders import HALFBYTE
from halfbyte.bench.gpu_report import GpuReport, text
from halfbyte.errors import HalfbyteError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lists: list[tuple[str, Callable[[str], object], Sequence[object], str]] = [
        ("--shapes", _shape_of, SHAPES, "NxK"),
        ("--m", int, MS, "rows of the activations"),
        ("--formats", str, ("int4_g128",), "of the weights"),
        ("--dtypes", str, ("bfloat16",), "of the activations: float16, bfloat16, float32"),
        ("--computes", str, ("float",), "float, int8"),
        ("--peers", str, tuple(peer.name for peer in contenders()), "the contenders in addition to halfbyte"),
    ]
    for option, kind, usual, meaning in lists:
        shown = " ".join(f"{one[0]}x{one[1]}" if isinstance(one, tuple) else str(one) for one in usual)
        parser.add_argument(option, type=kind, nargs="*", help=f"{meaning} (default: {shown})")
    parser.add_argument("--activation", default="row", help="scales of int8 activations (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="turns that each contender takes (default: %(default)s)")
    parser.add_argument("--vllm", help="a folder with vLLM's libraries, where it is not installed")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--plot", type=Path, help="write the times against M to this SVG file")
    parser.add_argument("--markdown", action="store_true", help="print tables for a document")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="JSON",
        help="measure nothing: show what --json wrote earlier, or the part of it that the lists above name",
    )  # fmt: skip
    args = parser.parse_args(argv)

    def keep(report: GpuReport) -> None:
        if args.json:
            args.json.write_text(written(report), encoding="utf-8")
        if args.plot:
            args.plot.write_text(plot(report), encoding="utf-8")

    try:
        if args.read:
            fields = {"shape": args.shapes, "m": args.m, "format": args.formats, "dtype": args.dtypes, "compute": args.computes}
            peers = None if args.peers is None else [HALFBYTE.name, *args.peers]
            report = select(read(args.read), **fields, contender=peers)
            keep(report)
        else:
            asked = [getattr(args, option[2:]) for option, *_ in lists]
            chosen = [usual if one is None else tuple(one) for one, (_, _, usual, _) in zip(asked, lists, strict=True)]
            names = ("shapes", "ms", "formats", "dtypes", "computes", "peers")
            plan = GpuPlan(activation=args.activation, rounds=args.rounds, **dict(zip(names, chosen, strict=True)))  # type: ignore[arg-type]
            report = run(plan, lambda doing: print(doing, file=sys.stderr), keep, contenders(args.vllm))
    except HalfbyteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(report) if args.markdown else text(report))
    return 0


def _shape_of(text: str) -> tuple[int, int]:
    n, k = text.split("x")
    return int(n), int(k)
