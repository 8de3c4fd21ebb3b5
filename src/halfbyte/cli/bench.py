"""`halfbyte bench`: times one linear layer, compared with torch, or a language model's decode step, layer by layer."""

from __future__ import annotations

import argparse
from statistics import median
from typing import TYPE_CHECKING

from halfbyte.cli.shared.output import Commands, add_command, check_fits, check_written, path_argument, progress, show, write_page
from halfbyte.errors import ArgumentError

if TYPE_CHECKING:
    from halfbyte.bench.gpu_report import GpuReport
    from halfbyte.bench.report import Report
    from halfbyte.bench.step import StepReport
    from halfbyte.cli.shared.output import Advance
    from halfbyte.language.model import LanguageModel

_NEW_TOKENS = 32  # in each round of a model's decode steps


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        "time a linear layer, compared with torch, or a model's decode step",
        "Time y = x W^T for x [M, K] and W [N, K]. Contenders run in turn, each in its own process, over copies of the weight that exceed "
        "the caches; on a GPU in one process, by replays of CUDA graphs. Results are checked first. With --model: time a decode step of a "
        "language model, and each of its linear layers.",
    )
    parser.add_argument("--model", metavar="MODEL", type=path_argument, help="time a decode step of this language model")
    parser.add_argument("--html", metavar="FILE", type=path_argument, help="write a page with a roofline and plots")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 128], help="rows of the activations (default: 1 128)")
    parser.add_argument("--n", type=int, default=4096, help="outputs (default: %(default)s)")
    parser.add_argument("--k", type=int, default=4096, help="inputs (default: %(default)s)")
    parser.add_argument("--format", nargs="+", help="formats of the weight (default: q4_0; of a model its own)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="threads (default: as many as torch uses)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if args.html:
        check_written("--html", args.html, ".html")
    if args.model is not None:
        return _model(args)
    check_fits(args.n, args.k)
    return _cpu(args) if args.device == "cpu" else _cuda(args)


def _cuda(args: argparse.Namespace) -> int:
    from halfbyte.bench import gpu
    from halfbyte.bench.gpu_report import text

    plan = gpu.GpuPlan(
        shapes=((args.n, args.k),),
        ms=tuple(args.m),
        formats=tuple(args.format or ["q4_0"]),
        peers=("cublas", "tinygemm"),
        rounds=3 * args.rounds,
    )
    with progress(args, "measuring") as advance:
        report = gpu.run(plan, lambda doing: advance(0, 1, doing))
    _write(args, report)
    return show(args, report.to_json(), text(report))


def _cpu(args: argparse.Namespace) -> int:
    import torch

    from halfbyte.bench import cpu
    from halfbyte.bench.report import text

    plan = cpu.Plan(
        shapes=((args.n, args.k),),
        ms=tuple(args.m),
        threads=(torch.get_num_threads() if args.threads is None else args.threads,),
        formats=tuple(args.format or ["q4_0"]),
        peers=("torch_fp32", "torch_bf16"),
        rounds=args.rounds,
    )
    with progress(args, "measuring", "part") as advance:
        report = cpu.run(plan, lambda doing, done: advance(done, 1, doing))
    _write(args, report)
    return show(args, report.to_json(), text(report))


def _write(args: argparse.Namespace, report: Report | GpuReport) -> None:
    if args.html:
        from halfbyte.bench.pages.linear import linear_page

        write_page(args, linear_page(report))


def _model(args: argparse.Namespace) -> int:
    if len(args.format or ()) > 1:
        raise ArgumentError(f"--model is timed in one format, got {', '.join(args.format)}: give one of them")
    with progress(args, "measuring") as advance:
        report = _step(args, advance)
    if args.html:
        from halfbyte.bench.pages.step import step_page

        write_page(args, step_page(report))
    return show(args, report.to_json(), str(report))


def _step(args: argparse.Namespace, advance: Advance) -> StepReport:
    from halfbyte.bench.step import measure_step
    from halfbyte.decoder.explain import explain_decoder
    from halfbyte.language.model import LanguageModel

    advance(0, 1, "opening the model")
    model = LanguageModel.open(args.model, format=args.format[0] if args.format else None, device=args.device)
    advance(0, 1, "decoding")
    seconds = _decode_seconds(model, args.rounds)
    explanation = explain_decoder(model.spec, args.device, dtype=None)
    return measure_step(explanation, args.device, args.model.name, seconds, advance)


def _decode_seconds(model: LanguageModel, rounds: int) -> float:
    """Seconds of one decode step: the median of some texts, after one that compiles and warms up."""
    prompt = model.tokenizer.encode("The")
    rates: list[float] = [model.generate(prompt, max_new_tokens=_NEW_TOKENS).decode_rate for _ in range(rounds + 1)][1:]
    if not all(rates):
        raise ArgumentError("the model ends its text at once, so that there is no decode step to time: use another model")
    return 1 / median(rates)
