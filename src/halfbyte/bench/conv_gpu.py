"""The convolution benchmark on a GPU: layers of ResNet-50, halfbyte and cuDNN's bfloat16 in turn, by replays of CUDA graphs.

Images rotate over more memory than the caches hold; medians of rounds are quoted. All images are channels_last, and every result is
checked against torch's float32 convolution of the same numbers before it is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.bench.conv import LAYERS
from halfbyte.bench.conv_contenders import IN_SCALE, IN_ZERO, Layer
from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.clock import copies, graph_times
from halfbyte.kernels.problem import Window
from halfbyte.machine import gpu
from halfbyte.ops import conv

PEER = "cuDNN bf16"

Launches = list[Callable[[], Tensor]]


def _images(layer: Layer, images: Sequence[Tensor], **_: Any) -> Launches:
    weight = layer.weight.to("cuda", torch.bfloat16).contiguous(memory_format=torch.channels_last)
    return [lambda x=x: torch.nn.functional.conv2d(x, weight, None, layer.stride, layer.padding, 1, layer.groups) for x in images]  # type: ignore[misc]


def _weights(layer: Layer, images: Sequence[Tensor], format: str) -> Launches:
    codes = conv.quantize_conv(layer.weight, format if layer.channels // layer.groups >= 16 else "int8_channel")
    packed = conv.pack_conv(codes, layer.kernel, layer.groups, "cuda")
    return [lambda x=x: conv.conv2d(x, packed, None, layer.stride, layer.padding) for x in images]  # type: ignore[misc]


def _integers(layer: Layer, images: Sequence[Tensor], **_: Any) -> Launches:
    packed = conv.pack_conv(layer.codes, layer.kernel, layer.groups, "cuda")
    scales = {"in_scale": IN_SCALE, "in_zero": IN_ZERO, "out_scale": layer.out_scale, "out_zero": 0}
    table = conv.conv_requantization_table(packed, None, **scales)  # type: ignore[arg-type]
    moves = Window((layer.stride,) * 2, (layer.padding,) * 4).numbers
    codes = [(x.float() / IN_SCALE + IN_ZERO).round().clamp(-128, 127).to(torch.int8) for x in images]
    return [lambda x=x: conv.qconv2d_with(x, packed, table, moves, IN_ZERO) for x in codes]  # type: ignore[misc]


CONTENDERS: dict[str, tuple[Callable[..., Launches], str]] = {
    PEER: (_images, ""),
    "halfbyte int8→int8": (_integers, "int8_channel"),
    "halfbyte W8A16": (_weights, "int8_channel"),
    "halfbyte W4A16": (_weights, "int4_g32"),
}


def run(layers: Sequence[Layer], rounds: int) -> list[dict[str, Any]]:
    """A row a layer and contender: seconds. Raises KernelError where a result is off by more than 3 % of the largest."""
    torch.backends.cudnn.benchmark = True
    rows = []
    for layer in layers:
        one = layer.floats.to("cuda", torch.bfloat16)
        count = copies(one.nbytes, gpu().l2)
        images = [one.clone(memory_format=torch.preserve_format) for _ in range(count)]
        launches = {name: make(layer, images, format=fmt) for name, (make, fmt) in CONTENDERS.items()}
        wanted = _wanted(layer, one, layer.weight)
        for name, (make, fmt) in CONTENDERS.items():
            near = wanted
            if make is _weights and layer.channels // layer.groups >= 16:
                near = _wanted(
                    layer, one, ops.dequantize(conv.pack_conv(conv.quantize_conv(layer.weight, fmt), layer.kernel, layer.groups))
                )
            y = launches[name][0]()
            error = (y.float() * (layer.out_scale if y.dtype == torch.int8 else 1) - near).abs().max() / near.abs().max()
            if not error < 0.03:
                raise KernelError(f"{name} on {layer} is off by {float(error):.2g} of the largest result: report it")
        times = graph_times(launches, rounds=rounds)
        rows += [{"layer": asdict(layer), "contender": name, "seconds": times[name].median} for name in CONTENDERS]
        del launches, images
        torch.cuda.empty_cache()
    return rows


def _wanted(layer: Layer, image: Tensor, weight: Tensor) -> Tensor:
    with torch.backends.cudnn.flags(allow_tf32=False):
        return torch.nn.functional.conv2d(image.float(), weight.cuda(), None, layer.stride, layer.padding, 1, layer.groups)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds, and cuDNN's time over ours."""
    lines = ["| layer | " + " | ".join(CONTENDERS) + " |", "|" + " --- |" * (len(CONTENDERS) + 1)]
    for i in range(0, len(rows), len(CONTENDERS)):
        group = rows[i : i + len(CONTENDERS)]
        peer = next(row["seconds"] for row in group if row["contender"] == PEER)
        ratios = ["" if row["contender"] == PEER else f" (×{peer / row['seconds']:.2f})" for row in group]
        cells = [f"{row['seconds'] * 1e6:.1f}{ratio}" for row, ratio in zip(group, ratios, strict=True)]
        lines.append(f"| {Layer(**group[0]['layer'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The command line of benchmarks/conv.py with --device cuda."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rounds", type=int, default=9, help="replays of each contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    args = parser.parse_args(argv)
    rows = run([replace(layer, batch=batch) for batch in args.batch for layer in LAYERS], args.rounds)
    about = {"gpu": gpu().name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    print("us; in brackets the time of cuDNN's bfloat16 (channels_last, benchmark mode) over ours\n")
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0
