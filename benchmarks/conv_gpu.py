"""The convolution benchmark on a GPU: layers of ResNet-50, halfbyte and cuDNN's bfloat16 in turn, by replays of CUDA graphs.

Images rotate over more memory than the caches hold; medians of rounds are quoted. All images are channels_last, and every result is
checked against torch's float32 convolution of the same numbers before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import conv_networks_gpu as networks
import torch
from conv_contenders import IN_SCALE, IN_ZERO, Layer
from conv_cpu import LAYERS, collected
from networks import NETWORKS
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import KernelError
from halfbyte.formats.codes import Codes
from halfbyte.kernels.gpu.runtime.clock import copies, graph_times
from halfbyte.kernels.problem import Window
from halfbyte.machine import gpu
from halfbyte.ops.conv import functions as conv

Launches = list[Callable[[], Tensor]]


def _images(layer: Layer, images: Sequence[Tensor], *_: object) -> Launches:
    weight = layer.weight.to("cuda", torch.bfloat16).contiguous(memory_format=torch.channels_last)
    return [lambda x=x: torch.nn.functional.conv2d(x, weight, None, layer.stride, layer.padding, 1, layer.groups) for x in images]  # type: ignore[misc]


def _codes(layer: Layer, format: str) -> Codes:
    return conv.quantize_conv(layer.weight, format if layer.channels // layer.groups >= 16 else "int8_channel")


def _weights(layer: Layer, images: Sequence[Tensor], format: str, _: float) -> Launches:
    packed = conv.pack_conv(_codes(layer, format), layer.kernel, layer.groups, "cuda")
    return [lambda x=x: conv.conv2d(x, packed, None, layer.stride, layer.padding) for x in images]  # type: ignore[misc]


def _integers(layer: Layer, images: Sequence[Tensor], _: str, out_scale: float) -> Launches:
    packed = conv.pack_conv(layer.codes, layer.kernel, layer.groups, "cuda")
    scales = {"in_scale": IN_SCALE, "in_zero": IN_ZERO, "out_scale": out_scale, "out_zero": 0}
    table = conv.conv_requantization_table(packed, None, **scales)  # type: ignore[arg-type]
    window = Window((layer.stride,) * 2, (layer.padding,) * 4).numbers
    codes = [(x.float() / IN_SCALE + IN_ZERO).round().clamp(-128, 127).to(torch.int8) for x in images]
    return [lambda x=x: conv.qconv2d_with(x, packed, table, window, IN_ZERO) for x in codes]  # type: ignore[misc]


CONTENDERS: dict[str, tuple[Callable[..., Launches], str]] = {
    "cuDNN bf16": (_images, "int8_channel"),
    "halfbyte int8→int8": (_integers, "int8_channel"),
    "halfbyte W8A16": (_weights, "int8_channel"),
    "halfbyte W4A16": (_weights, "int4_g32"),
}


def run(layers: Sequence[Layer], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """For each layer a row a contender: seconds. Raises KernelError where a result is off by more than 3 % of the largest."""
    torch.backends.cudnn.benchmark = True
    for layer in layers:
        shape = layer.batch, layer.size, layer.size, layer.channels
        codes = (torch.randn(shape, device="cuda").clamp_(0, 5) / IN_SCALE).round_().permute(0, 3, 1, 2)
        one = (codes * IN_SCALE).to(torch.bfloat16)
        del codes
        images = [one.clone(memory_format=torch.preserve_format) for _ in range(copies(one.nbytes, gpu().l2))]
        wanted = {fmt: _wanted(layer, one, fmt) for fmt in ("int8_channel", "int4_g32")}
        out_scale = float(wanted["int8_channel"].abs().max()) / 127
        launches = {name: make(layer, images, fmt, out_scale) for name, (make, fmt) in CONTENDERS.items()}
        for name, (_, fmt) in CONTENDERS.items():
            y = launches[name][0]()
            error = (y.float() * (out_scale if y.dtype == torch.int8 else 1) - wanted[fmt]).abs().max() / (127 * out_scale)
            if not error < 0.03:
                raise KernelError(f"{name} on {layer} is off by {float(error):.2g} of the largest result: report it")
        del wanted, one
        times = graph_times(launches, rounds=rounds)
        yield [{"layer": asdict(layer), "contender": name, "seconds": times[name].median} for name in CONTENDERS]
        del launches, images
        torch.cuda.empty_cache()


def _wanted(layer: Layer, image: Tensor, format: str) -> Tensor:
    weight = ops.dequantize(conv.pack_conv(_codes(layer, format), layer.kernel, layer.groups))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return torch.nn.functional.conv2d(image.float(), weight.cuda(), None, layer.stride, layer.padding, 1, layer.groups)


def _printed(
    contenders: Iterable[str], measured: Iterable[list[dict[str, Any]]], name: Callable[[dict[str, Any]], str], units: str
) -> Iterator[list[dict[str, Any]]]:
    """The rows, printed as they come, a line for all contenders, of which the first is the peer; `units` are "us" or "ms"."""
    names, (decimals, factor) = list(contenders), {"us": (1, 1e6), "ms": (2, 1e3)}[units]
    print(f"| {units} | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1), sep="\n", flush=True)
    for rows in measured:
        peer, *custom = (row["seconds"] for row in rows)
        cells = [f"{peer * factor:.{decimals}f}", *(f"{seconds * factor:.{decimals}f} (×{peer / seconds:.2f})" for seconds in custom)]
        print(f"| {name(rows[0])} | " + " | ".join(cells) + " |", flush=True)
        yield rows


def main(argv: Sequence[str]) -> int:
    """The command line of conv.py with --device cuda."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--model", nargs="+", choices=list(NETWORKS), default=[], help="time whole networks instead of layers")
    parser.add_argument("--rounds", type=int, default=9, help="replays of each contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    args = parser.parse_args(argv)
    about = {"gpu": gpu().name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    if args.model:
        print("ms; in brackets the time of torch's bfloat16 (channels_last, cuDNN in benchmark mode) over ours\n")
        measured = networks.run(args.model, args.batch, args.rounds)
        table = _printed(networks.CONTENDERS, measured, lambda row: f"{row['network']}, batch {row['batch']}", "ms")
    else:
        layers = [replace(layer, batch=batch) for batch in args.batch for layer in LAYERS]
        print("us; in brackets the time of cuDNN's bfloat16 (channels_last, benchmark mode) over ours\n")
        table = _printed(CONTENDERS, run(layers, args.rounds), lambda row: str(Layer(**row["layer"])), "us")
    collected(table, about, args.json)
    return 0
