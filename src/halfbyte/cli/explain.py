"""`halfbyte explain`: which kernel runs for a shape on this machine, or for each layer of a model, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from halfbyte.cli.generate import writes_text
from halfbyte.cli.shared.device import add_offload, asked_dtype, offloads, placed, refuse_offload
from halfbyte.cli.shared.output import Commands, add_command, check_fits, path_argument, show
from halfbyte.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn

    from halfbyte.decoder.offload.placement import Request
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
        "--dtype",
        choices=("float32", "bfloat16", "float16", "int8"),
        help="activations (default: float32; a model on a GPU: bfloat16); int8: the codes of a convolution",
    )
    parser.add_argument("--compute", default="auto", help="auto, int8 or float (default: %(default)s)")
    parser.add_argument("--activation", default="block", help="scales of int8 activations (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … or the architecture of a GPU that is not here, such as sm_90")
    add_offload(parser)
    parser.add_argument("--experts", type=int, help="number of experts of a mixture; M then counts (token, expert) pairs")
    parser.add_argument("--sparse", action="store_true", help="for a 2:4 sparse weight")
    shapes = parser.add_argument_group("shapes other than of linear layers, which are not timed")
    shapes.add_argument("--conv", nargs="+", type=int, metavar="SIZE", help="a convolution of images B C H W, or videos B C D H W")
    shapes.add_argument("--weight", nargs="+", type=int, metavar="SIZE", help="its weight CO CI KH KW, or CO CI KD KH KW; CI: of one group")
    shapes.add_argument("--stride", type=int, default=1, help="its stride (default: %(default)s)")
    shapes.add_argument("--padding", type=int, default=0, help="its padding (default: %(default)s)")
    shapes.add_argument("--dilation", type=int, default=1, help="its dilation (default: %(default)s)")
    shapes.add_argument("--groups", type=int, default=1, help="its groups (default: %(default)s)")
    heads = ("BATCH", "HEADS", "KV_HEADS", "HEAD_DIM")
    shapes.add_argument("--attention", nargs=4, type=int, metavar=heads, help="the attention of new tokens of so many sequences")
    shapes.add_argument("--tokens", type=int, default=1, help="new tokens of each; more than 1: a prompt (default: %(default)s)")
    cache = "KV cache; none: all tokens see each other, as in an encoder (default: %(default)s)"
    shapes.add_argument("--cache", choices=("float", "int8", "none"), default="float", help=cache)
    sizes = ("ROWS", "EXPERTS", "TOP_K", "HIDDEN", "INNER")
    shapes.add_argument("--mixture", nargs=5, type=int, metavar=sizes, help="a mixture of experts: router, products, gates and their sum")
    parser.add_argument("--no-measure", action="store_true", help="show the choice without timing it")


def run(args: argparse.Namespace) -> int:
    import torch

    from halfbyte.dispatch.explain import explain

    if args.model is not None and args.named is not None:
        raise ArgumentError(f"one model is explained at a time, got {args.model} and --model {args.named}: leave out one of them")
    args.model = args.model or args.named
    if args.model is not None:
        return _run_model(args)
    refuse_offload(args, "a shape")
    if args.conv or args.attention or args.mixture:
        return _run_shape(args)
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


def _run_shape(args: argparse.Namespace) -> int:
    import torch

    from halfbyte.dispatch.explain import explain
    from halfbyte.dispatch.explain_shapes import AttentionShape, ConvShape, ExpertsShape, Shape

    if sum(asked is not None for asked in (args.conv, args.attention, args.mixture)) > 1:
        raise ArgumentError("one shape is explained at a time, got several of --conv, --attention and --mixture: leave out the others")
    shape: Shape
    if args.conv:
        if args.weight is None:
            raise ArgumentError("--conv takes the shape of the weight, got none: add --weight CO CI KH KW")
        shape = ConvShape(args.conv, args.weight, args.stride, args.padding, args.dilation, args.groups)
    elif args.attention:
        batch, heads, kv_heads, head_dim = args.attention
        shape = AttentionShape(batch, heads, kv_heads, head_dim, args.tokens, None if args.cache == "none" else args.cache)
    else:
        shape = ExpertsShape(*args.mixture)
    dtype, how = getattr(torch, args.dtype or "float32"), {"compute": args.compute, "activation": args.activation}
    explanation = explain(shape, format=args.format or "q4_0", dtype=dtype, **how, device=args.device)
    return show(args, explanation.to_json(), str(explanation))


def _run_model(args: argparse.Namespace) -> int:
    from halfbyte.dispatch.explain_gpu import described_gpu
    from halfbyte.errors import UnsupportedError
    from halfbyte.machine import named_device
    from halfbyte.nn.config import Config

    if args.dtype == "int8":
        raise ArgumentError("a model has activations of float32, bfloat16 or float16, got --dtype int8: leave it out")
    asked = named_device(args.device)
    if asked is None or asked.type != "cpu":
        described_gpu(args.device)  # refuses what is none
    config = None if args.format is None else Config(args.format)
    if not writes_text(args.model):
        refuse_offload(args, str(args.model))
        return _run_modules(args, config, "it is no causal language model")
    from halfbyte.decoder.explain import explain_decoder
    from halfbyte.language.model import open_spec

    try:
        spec = open_spec(args.model, format=config).spec
        explanation = explain_decoder(spec, args.device, args.m, asked_dtype(args), _request(args))
    except UnsupportedError as e:
        if offloads(args):
            raise
        return _run_modules(args, config, str(e))
    return show(args, explanation.to_json(), str(explanation))


def _request(args: argparse.Namespace) -> Request | None:
    """What is asked for of a part on the CPU, the rest on a GPU, which need not be here."""
    if not offloads(args):
        return None
    from halfbyte.decoder.offload.placement import make_request

    where = placed(args, args.m)
    return make_request(where["device"], where["memory"], where["context"], args.m)[1]


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
