"""`halfbyte quantize`: a model on disk to a smaller one on disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfbyte.cli.output import Commands, add_command, print_json, progress
from halfbyte.errors import ArgumentError


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "quantize",
        run,
        "quantize a model on disk",
        "Read a Hugging Face folder, or any safetensors file or folder, tensor by tensor, and write a quantized checkpoint. "
        "Patterns are the shell's (*, ?, [...]) and are matched on whole module names, such as '*.mlp.*' or lm_head.",
    )
    parser.add_argument("src", metavar="SRC", type=Path, help="model folder, or a safetensors file")
    parser.add_argument("dst", metavar="DST", type=Path, help="folder to write")
    parser.add_argument("--format", required=True, help="of the linear layers: q8_0, q4_0, int4_g128, ...")
    parser.add_argument("--embedding", metavar="FORMAT", help="of the embeddings, unless they are skipped (default: q8_0)")
    parser.add_argument("--method", default="absmax", help="how scales are chosen: absmax is fast, mse is closer (default: %(default)s)")
    parser.add_argument("--skip", metavar="PATTERN", action="append", default=[], help="modules to leave as they are; may be repeated")
    parser.add_argument(
        "--override", metavar="PATTERN=FORMAT", action="append", default=[], help="another format for some modules; may be repeated"
    )
    parser.add_argument("--force", action="store_true", help="replace the halfbyte checkpoint that is in DST")


def run(args: argparse.Namespace) -> int:
    overrides = dict(_override(text) for text in args.override)
    if not args.force and args.dst.exists() and not (args.dst.is_dir() and not any(args.dst.iterdir())):
        raise ArgumentError(f"{args.dst} exists and is not an empty folder: choose another, or replace the checkpoint in it with --force")

    from halfbyte.checkpoint import convert
    from halfbyte.nn.convert import Config

    settings = {} if args.embedding is None else {"embedding": args.embedding}
    config = Config(args.format, method=args.method, skip=args.skip, overrides=overrides, **settings)
    with progress(args, "quantizing", "bytes") as advance:
        # The name that convert tells is of the tensor that is done, not of the one that takes so long.
        report = convert(args.src, args.dst, config, lambda done, total, name: advance(done, total))
    if args.json:
        print_json({"src": str(args.src), "dst": str(args.dst), **report.to_json()})
    elif not args.quiet:
        print(report)
        print(f"written to {args.dst}")
    return 0


def _override(text: str) -> tuple[str, str]:
    pattern, equals, format = text.rpartition("=")
    if not (pattern and equals and format):
        raise ArgumentError(f"--override takes PATTERN=FORMAT, for example '*.down_proj=q8_0', got {text!r}")
    return pattern, format
