"""`halfbyte convert`: converts a model between kinds of files, with the same codes and scales."""

from __future__ import annotations

import argparse
from os.path import lexists

from halfbyte.cli.shared.models import load_whole
from halfbyte.cli.shared.output import Commands, add_command, check_written, path_argument, progress, show, show_written
from halfbyte.errors import ArgumentError

KINDS = ("gguf", "onnx", "awq", "gptq", "compressed-tensors", "halfbyte")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "convert",
        run,
        "convert a model to another kind of files",
        "Read a model of any of these kinds, or a float Hugging Face folder, and write it as another. Codes and scales do not change; "
        "weights that the target kind cannot hold are dequantized, as the report says.",
    )
    parser.add_argument("src", metavar="SRC", type=path_argument, help="model folder, or a GGUF file")
    parser.add_argument("dst", metavar="DST", type=path_argument, help="folder or file (.gguf, .onnx) to write, which does not exist yet")
    parser.add_argument("--to", metavar="KIND", help=f"the kind to write: {', '.join(KINDS)} (default: gguf or onnx where DST ends so)")
    parser.add_argument("--resume", action="store_true", help="continue a conversion to DST that was killed")


def run(args: argparse.Namespace) -> int:
    from halfbyte.checkpoint.export_checkpoint import export, kind_to_write

    if args.to == "onnx" or (args.to is None and args.dst.suffix == ".onnx"):
        return _to_onnx(args)
    to = kind_to_write(args.dst, args.to)
    with progress(args, "converting", "bytes") as advance:
        report = export(args.src, args.dst, to, lambda done, total, name: advance(done, total), resume=args.resume)
    return show_written(args, report, to=to)


def _to_onnx(args: argparse.Namespace) -> int:
    from halfbyte.deploy.onnx_model import export_onnx

    if args.resume:
        raise ArgumentError("--resume continues a conversion tensor by tensor, and an ONNX file is written as a whole: leave it out")
    check_written("DST", args.dst, ".onnx")
    if lexists(args.dst):
        raise ArgumentError(f"{args.dst} exists: choose another place, or remove it")
    notes = export_onnx(load_whole(args.src).float(), args.dst)  # runtimes have no bfloat16 on CPUs
    text = "\n".join([*notes, f"written to {args.dst}"])
    return show(args, {"src": str(args.src), "dst": str(args.dst), "to": "onnx", "notes": notes}, text)
