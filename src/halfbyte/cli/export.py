"""`halfbyte export`: writes a model as a compiled program that runs without its Python source."""

from __future__ import annotations

import argparse

from halfbyte.cli.shared.models import load_whole
from halfbyte.cli.shared.output import Commands, add_command, path_argument, show


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        run,
        "write a model as a compiled program",
        "Compile a quantized model (torch.export, AOTInductor, a C++ compiler) to a folder with halfbyte's kernels and a loader, load.py.",
    )
    parser.add_argument("model", metavar="MODEL", type=path_argument, help="checkpoint of a text model, an image classifier or a UNet")
    parser.add_argument("out", metavar="OUT", type=path_argument, help="folder to write, which does not exist yet")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="of a decoder: positions of its KV cache (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    from halfbyte.deploy.program import export_program

    export_program(load_whole(args.model, args.device), args.out, context=args.context)
    return show(args, {"model": str(args.model), "out": str(args.out)}, f"written to {args.out}: run {args.out / 'load.py'} to try it")
