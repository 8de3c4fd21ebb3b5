"""`halfbyte tune`: measures the GPU's kernels for given shapes, so that the fastest is used from then on."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from halfbyte.cli.shared.output import Commands, add_command, print_json, print_table, progress
from halfbyte.errors import ArgumentError
from halfbyte.machine import named_device

if TYPE_CHECKING:
    import torch

    from halfbyte.formats.spec import Format


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "tune",
        run,
        "measure a GPU's kernels for the shapes of a model",
        "Time the candidates for y = x W^T on this machine's GPU and keep the times, as readable JSON, in the cache folder. Without it "
        "halfbyte chooses by tables that come with it and by predictions.",
    )
    parser.add_argument("model", nargs="?", help="a folder with a quantized model, whose shapes and formats are tuned")
    parser.add_argument("--n", type=int, help="outputs, in place of a model")
    parser.add_argument("--k", type=int, help="inputs, in place of a model")
    parser.add_argument(
        "--format", nargs="+", default=["int4_g128"], help="formats of the weight, in place of a model's (default: int4_g128)"
    )
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], help="rows of the activations")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="activations (default: %(default)s)"
    )
    parser.add_argument("--compute", default="auto", help="auto, float or int8 (default: %(default)s)")
    parser.add_argument("--activation", default="block", help="scales of int8 activations (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, … (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    import torch

    from halfbyte.dispatch import tune
    from halfbyte.dispatch.gpu import compute_of
    from halfbyte.dispatch.measure import tune_linear
    from halfbyte.kernels.problem import Problem
    from halfbyte.machine import gpu

    device = _gpu_device(args.device)
    found = gpu(device.index or 0)
    dtype = getattr(torch, args.dtype)
    problems = [
        Problem("linear", m, n, k, fmt, dtype, compute_of(args.compute), args.activation) for n, k, fmt in _weights(args) for m in args.m
    ]
    rows, entries = [], []
    with progress(args, "measuring") as advance, torch.cuda.device(device):
        for i, problem in enumerate(problems):
            advance(i, len(problems), f"{problem.n} x {problem.k}, M = {problem.m}")
            times = tune_linear(problem, found, device=device)
            ranked = sorted((seconds, name, config) for name, configs in times.items() for config, seconds in configs.items())
            best = ranked[0]
            entries.append({"kind": tune.kind(problem), "m": tune.rows_class(problem.m), "times": times})
            rows.append((f"{problem.n}x{problem.k}", str(problem.format), str(problem.m), best[1], best[2], f"{best[0] * 1e6:.1f}"))
    path = tune.written(found)
    if args.json:
        print_json({"gpu": found.name, "file": None if path is None else str(path), "measured": entries})
    else:
        print_table(("weight", "format", "M", "kernel", "config", "us"), rows, left=5)
        print("not written, as warned" if path is None else f"kept in {path}")
    return 0


def _gpu_device(name: str) -> torch.device:
    """Raise ArgumentError for a device that is not a GPU of torch."""
    device = named_device(name)
    if device is None or device.type != "cuda":
        raise ArgumentError(f"--device is cuda or one of cuda:0, cuda:1, …, got {name!r}: name a GPU, as other kernels need no tuning")
    return device


def _weights(args: argparse.Namespace) -> list[tuple[int, int, Format]]:
    """The distinct (N, K, Format) to tune, as they are packed."""
    from halfbyte.checkpoint.loading import describe
    from halfbyte.dispatch.packed import packed_format
    from halfbyte.formats.spec import as_format

    if args.model is None:
        if args.n is None or args.k is None:
            raise ArgumentError("tune takes a folder with a quantized model, or --n and --k: name one or the other")
        return [(args.n, args.k, packed_format(as_format(name), on_cpu=False)) for name in args.format]
    if args.n is not None or args.k is not None:
        raise ArgumentError("tune takes a folder with a quantized model, or --n and --k, not both")
    rows = [row for row in describe(args.model).quantized if row.kind == "Linear"]
    if not rows:
        raise ArgumentError(f"{args.model} has no quantized linear layer: quantize it first")
    return list(dict.fromkeys((row.shape[0], row.shape[1], packed_format(row.format, on_cpu=False)) for row in rows if row.format))
