"""`halfbyte convert`: converts a model between kinds of files, with the same codes and scales."""

from __future__ import annotations

import argparse

from halfbyte.cli.shared.output import Commands, add_command, path_argument, progress, show_written

KINDS = ("gguf", "awq", "gptq", "compressed-tensors", "halfbyte")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "convert",
        run,
        "convert a model to another kind of files",
        "Read a halfbyte checkpoint, a folder of AWQ, GPTQ or compressed-tensors, a GGUF file or a float Hugging Face folder, and write "
        "it as another kind. Codes and scales do not change; weights that the target kind cannot hold are dequantized, and the report "
        "says so.",
    )
    parser.add_argument("src", metavar="SRC", type=path_argument, help="model folder, or a GGUF file")
    parser.add_argument("dst", metavar="DST", type=path_argument, help="folder or GGUF file (.gguf) to write, which does not exist yet")
    parser.add_argument("--to", metavar="KIND", help=f"the kind to write: {', '.join(KINDS)} (default: gguf where DST ends in .gguf)")
    parser.add_argument("--resume", action="store_true", help="continue a conversion to DST that was killed")


def run(args: argparse.Namespace) -> int:
    from halfbyte.checkpoint.export_checkpoint import export, kind_to_write

    to = kind_to_write(args.dst, args.to)
    with progress(args, "converting", "bytes") as advance:
        report = export(args.src, args.dst, to, lambda done, total, name: advance(done, total), resume=args.resume)
    return show_written(args, report, to=to)
