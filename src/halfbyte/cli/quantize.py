"""`halfbyte quantize`: quantizes a model on disk."""

from __future__ import annotations

import argparse
from dataclasses import replace
from os.path import isdir, lexists
from typing import TYPE_CHECKING, Any

from halfbyte.cli.shared.output import Commands, add_command, path_argument, progress, read_text, show_written
from halfbyte.errors import ArgumentError
from halfbyte.io.files import paths_in

if TYPE_CHECKING:
    from halfbyte.nn.calibration.calibrate import Calibration
    from halfbyte.quantizers.gptq import GPTQ

_MEASURED = 16  # passages for which --bits measures each layer


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "quantize",
        run,
        "quantize a model on disk",
        "Read a Hugging Face folder, or any safetensors file or folder, tensor by tensor, and write a quantized checkpoint. "
        "Patterns are the shell's (*, ?, [...]) and are matched on whole module names, such as '*.mlp.*' or lm_head. "
        "The methods gptq and awq run the model, one decoder layer at a time, on the text given by --calibration.",
    )
    parser.add_argument("src", metavar="SRC", type=path_argument, help="model folder, or a safetensors file")
    parser.add_argument("dst", metavar="DST", type=path_argument, help="folder to write")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--format", help="format of the linear layers: q8_0, q4_0, int4_g128, ...")
    which.add_argument(
        "--bits",
        type=float,
        help="choose a format for each linear layer by its sensitivity on the calibration text, so that all together take at most this "
        "many bits per weight; the whole model has to fit into memory",
    )
    parser.add_argument("--embedding", metavar="FORMAT", help="format of the embeddings, unless they are skipped (default: q8_0)")
    parser.add_argument(
        "--method",
        default="absmax",
        help="absmax is the fastest, mse and hqq are more accurate, awq and gptq the most, which need --calibration (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", type=path_argument, help="UTF-8 text like that the model will process, a few pages or more"
    )
    parser.add_argument(
        "--passages", type=int, default=128, help="number of passages, evenly spread over the calibration text (default: %(default)s)"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens per passage (default: %(default)s)")
    parser.add_argument("--device", help="where calibration runs the model: cpu or cuda (default: cpu)")
    gptq = parser.add_argument_group("gptq")
    gptq.add_argument(
        "--act-order",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="columns in the order of decreasing input energy (default: yes)",
    )
    gptq.add_argument("--static-groups", action="store_true", help="scales from the original weights")
    gptq.add_argument("--damping", type=float, default=0.01, help="fraction of the mean of the Hessian's diagonal (default: %(default)s)")
    parser.add_argument("--skip", metavar="PATTERN", action="append", default=[], help="modules not to quantize; may be repeated")
    parser.add_argument(
        "--override", metavar="PATTERN=FORMAT", action="append", default=[], help="another format for some modules; may be repeated"
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse a weight that its format cannot hold, instead of leaving it in floating point"
    )
    parser.add_argument("--force", action="store_true", help="replace the halfbyte checkpoint that is in DST")
    parser.add_argument("--resume", action="store_true", help="continue a run to DST that was killed")


def run(args: argparse.Namespace) -> int:
    overrides: dict[str, str] = {}
    for pattern, format in map(_override, args.override):
        if overrides.setdefault(pattern, format) != format:
            raise ArgumentError(f"--override gives {pattern!r} two formats, {overrides[pattern]} and {format}: leave one of them out")
    if not args.force and lexists(args.dst) and not (isdir(args.dst) and not paths_in(args.dst)):
        raise ArgumentError(f"{args.dst} exists and is not an empty folder: choose another, or replace the checkpoint in it with --force")

    from halfbyte.checkpoint import convert
    from halfbyte.nn.config import Config, take_calibration
    from halfbyte.quantizers import CALIBRATED, METHODS
    from halfbyte.quantizers.gptq import GPTQ

    if args.method in CALIBRATED and args.calibration is None:
        raise ArgumentError(f"--method {args.method} needs a calibration text: name one with --calibration, or use {', '.join(METHODS)}")
    settings: dict[str, Any] = {"method": args.method, "skip": args.skip, "strict": args.strict}
    if args.embedding is not None:
        settings["embedding"] = args.embedding
    options = GPTQ(act_order=args.act_order, static_groups=args.static_groups, damping=args.damping)
    if args.method != "gptq" and options != GPTQ():
        raise ArgumentError(f"--act-order, --static-groups and --damping are options of --method gptq, got --method {args.method}")
    if args.device is not None and args.calibration is None:
        raise ArgumentError("--device is only for calibration: name a text with --calibration, or leave it out")
    calibration = None if args.calibration is None else _calibration(args, options)
    if args.bits is None:
        config = Config(args.format, overrides=overrides, **settings)
    elif overrides or calibration is None:
        raise ArgumentError("--bits needs a calibration text and excludes --override: name a text with --calibration")
    else:
        from halfbyte.integrations.transformers.text import open_model

        model, _ = open_model(args.src)
        with progress(args, "measuring") as advance:
            # A few passages suffice to rank the layers; all would take proportionally longer.
            few = replace(calibration, tokens=calibration.tokens[:: -(-len(calibration.tokens) // _MEASURED)])
            config = Config.auto(model, args.bits, few, progress=advance, **settings)
        del model
        if not args.quiet and not args.json:
            print(config)
        if args.method in ("absmax", "hqq"):
            calibration = None
    take_calibration(config, calibration, in_memory=False)
    with progress(args, "quantizing", "bytes" if calibration is None else "steps") as advance:
        # The name passed by convert is that of the completed tensor, not of the one in progress.
        report = convert(args.src, args.dst, config, calibration, lambda done, total, name: advance(done, total), resume=args.resume)
    return show_written(args, report)


def _calibration(args: argparse.Namespace, options: GPTQ) -> Calibration:
    from halfbyte.integrations.transformers.text import open_tokenizer
    from halfbyte.nn.calibration.calibrate import Calibration, calibration_tokens

    text = read_text(args.calibration)
    tokens = calibration_tokens(open_tokenizer(args.src), text, args.passages, args.length)
    return Calibration(tokens, device=args.device, gptq=options)


def _override(text: str) -> tuple[str, str]:
    pattern, equals, format = text.rpartition("=")
    if not (pattern and equals and format):
        raise ArgumentError(f"--override takes PATTERN=FORMAT, for example '*.down_proj=q8_0', got {text!r}")
    return pattern, format
