"""`halfbyte explain`: which kernel runs for a shape on this machine, and why."""

from __future__ import annotations

import argparse

from halfbyte.cli.output import Commands, add_command, check_fits, print_json


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "explain", run, "say which kernel runs for a shape on this machine, why, and how far it is from what the machine can do"
    )
    parser.add_argument("--m", type=int, default=1, help="rows of the activations (default: %(default)s)")
    parser.add_argument("--n", type=int, default=4096, help="outputs (default: %(default)s)")
    parser.add_argument("--k", type=int, default=4096, help="inputs (default: %(default)s)")
    parser.add_argument("--format", default="q4_0", help="format of the weight (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="activations (default: %(default)s)")
    parser.add_argument("--compute", default="auto", help="auto, int8 or float (default: %(default)s)")
    parser.add_argument("--activation", default="block", help="scales of int8 activations (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … or the architecture of a GPU that is not here, such as sm_90")
    parser.add_argument("--experts", type=int, help="of a mixture, to which the M rows (tokens, once for each of their experts) are sent")
    parser.add_argument("--no-measure", action="store_true", help="only the choice, without timing it")


def run(args: argparse.Namespace) -> int:
    import torch

    from halfbyte.dispatch.explain import explain

    check_fits(args.n * max(1, args.experts or 1), args.k)
    settings = {
        "experts": args.experts,
        "compute": args.compute,
        "activation": args.activation,
        "device": args.device,
        "measured": not args.no_measure,
    }
    explanation = explain(args.m, args.n, args.k, args.format, dtype=getattr(torch, args.dtype), **settings)
    if args.json:
        print_json(explanation.to_json())
    else:
        print(explanation)
    return 0
