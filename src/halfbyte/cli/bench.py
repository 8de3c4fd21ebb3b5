"""`halfbyte bench`: times one linear layer, compared with torch in float32 and bfloat16."""

from __future__ import annotations

import argparse

from halfbyte.cli.shared.output import Commands, add_command, check_fits, progress, show


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        "time a linear layer, compared with torch",
        "Time y = x W^T for x [M, K] and W [N, K]. The contenders run in turn, each in its own process, and rotate over copies of the "
        "weight that exceed the caches, so that weights come from memory, as in a whole model. Results are checked first. On a GPU "
        "the contenders run in turn in one process, by replays of CUDA graphs.",
    )
    parser.add_argument("--m", type=int, nargs="+", default=[1, 128], help="rows of the activations (default: 1 128)")
    parser.add_argument("--n", type=int, default=4096, help="outputs (default: %(default)s)")
    parser.add_argument("--k", type=int, default=4096, help="inputs (default: %(default)s)")
    parser.add_argument("--format", nargs="+", default=["q4_0"], help="formats of the weight (default: q4_0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="threads (default: as many as torch uses)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    check_fits(args.n, args.k)
    return _cpu(args) if args.device == "cpu" else _cuda(args)


def _cuda(args: argparse.Namespace) -> int:
    from halfbyte.bench import gpu
    from halfbyte.bench.gpu_report import text

    plan = gpu.GpuPlan(
        shapes=((args.n, args.k),), ms=tuple(args.m), formats=tuple(args.format), peers=("cublas", "tinygemm"), rounds=3 * args.rounds
    )
    with progress(args, "measuring") as advance:
        report = gpu.run(plan, lambda doing: advance(0, 1, doing))
    return show(args, report.to_json(), text(report))


def _cpu(args: argparse.Namespace) -> int:
    import torch

    from halfbyte.bench import cpu
    from halfbyte.bench.report import text

    plan = cpu.Plan(
        shapes=((args.n, args.k),),
        ms=tuple(args.m),
        threads=(torch.get_num_threads() if args.threads is None else args.threads,),
        formats=tuple(args.format),
        peers=("torch_fp32", "torch_bf16"),
        rounds=args.rounds,
    )
    with progress(args, "measuring", "part") as advance:
        report = cpu.run(plan, lambda doing, done: advance(done, 1, doing))
    return show(args, report.to_json(), text(report))
