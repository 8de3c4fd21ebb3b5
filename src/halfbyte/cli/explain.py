"""`halfbyte explain`: which kernel runs for a shape on this machine, or for each layer of a model, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from halfbyte.cli.generate import writes_text
from halfbyte.cli.shared.device import asked_dtype
from halfbyte.cli.shared.output import Commands, add_command, check_fits, path_argument, show
from halfbyte.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn

    from halfbyte.nn.config import Config


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "explain", run, "show which kernel runs for a shape on this machine, why, and how far it is from the roofline"
    )
    what = "instead of a shape: the program of a language model, op by op; or what computes an encoder"
    parser.add_argument("model", nargs="?", type=path_argument, help=what)
    parser.add_argument("--model", metavar="MODEL", dest="named", type=path_argument, help="the same")
    parser.add_argument("--m", type=int, default=1, help="rows of the activations; with a language model, sequences (default: %(default)s)")
    parser.add_argument("--n", type=int, default=4096, help="outputs (default: %(default)s)")
    parser.add_argument("--k", type=int, default=4096, help="inputs (default: %(default)s)")
    parser.add_argument("--format", help="format of the weight (default: q4_0, or what the model is in)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="activations (default: float32; a model on a GPU: bfloat16)"
    )
    parser.add_argument("--compute", default="auto", help="auto, int8 or float (default: %(default)s)")
    parser.add_argument("--activation", default="block", help="scales of int8 activations (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … or the architecture of a GPU that is not here, such as sm_90")
    parser.add_argument("--experts", type=int, help="number of experts of a mixture; M then counts (token, expert) pairs")
    parser.add_argument("--sparse", action="store_true", help="for a 2:4 sparse weight")
    parser.add_argument("--no-measure", action="store_true", help="show the choice without timing it")


def run(args: argparse.Namespace) -> int:
    import torch

    from halfbyte.dispatch.explain import explain

    if args.model is not None and args.named is not None:
        raise ArgumentError(f"one model is explained at a time, got {args.model} and --model {args.named}: leave out one of them")
    args.model = args.model or args.named
    if args.model is not None:
        return _run_model(args)
    check_fits(args.n * max(1, args.experts or 1), args.k)
    check_fits(args.m, max(args.n, args.k), "activations")
    settings = {
        "experts": args.experts,
        "compute": args.compute,
        "activation": args.activation,
        "sparse": args.sparse,
        "device": args.device,
        "measured": not args.no_measure,
    }
    explanation = explain(args.m, args.n, args.k, args.format or "q4_0", dtype=getattr(torch, args.dtype or "float32"), **settings)
    return show(args, explanation.to_json(), str(explanation))


def _run_model(args: argparse.Namespace) -> int:
    from halfbyte.dispatch.explain_gpu import described_gpu
    from halfbyte.errors import UnsupportedError
    from halfbyte.machine import named_device
    from halfbyte.nn.config import Config

    asked = named_device(args.device)
    if asked is None or asked.type != "cpu":
        described_gpu(args.device)  # refuses what is none
    config = None if args.format is None else Config(args.format)
    if not writes_text(args.model):
        return _run_modules(args, config, "it is no causal language model")
    from halfbyte.decoder.explain import explain_decoder
    from halfbyte.language.model import open_spec

    try:
        spec = open_spec(args.model, format=config).spec
        explanation = explain_decoder(spec, args.device, args.m, asked_dtype(args))
    except UnsupportedError as e:
        return _run_modules(args, config, str(e))
    return show(args, explanation.to_json(), str(explanation))


def _run_modules(args: argparse.Namespace, config: Config | None, reason: str) -> int:
    """Explain the modules of a model that halfbyte's own decoder does not run, for the reason given."""
    import torch

    from halfbyte.checkpoint import load
    from halfbyte.integrations.transformers.optimize.explain_model import explain_model
    from halfbyte.integrations.transformers.optimize.optimizing import optimize_
    from halfbyte.integrations.transformers.text import open_model

    if writes_text(args.model):
        dtype = torch.bfloat16 if args.dtype is None and args.device != "cpu" else asked_dtype(args)
        model: nn.Module = open_model(args.model, "cpu", config, dtype)[0]
    else:
        model = optimize_(load(args.model, format=config))
        model = model if args.dtype is None else model.to(asked_dtype(args))
    explanation = explain_model(model, args.device, args.m, notes=[f"modules of transformers, not a program of ops: {reason}"])
    return show(args, explanation.to_json(), str(explanation))
