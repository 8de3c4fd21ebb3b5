"""Whole convolutional networks on a GPU, halfbyte and torch's bfloat16 (channels_last, cuDNN in benchmark mode) in turn, by replays of
CUDA graphs. Each result is checked against torch's float32 before it is timed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from conv_networks import CALIBRATION, EIGHT_BITS, FOUR_BITS, Inference
from networks import images
from torch import Tensor, nn

from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.runtime.clock import graph_times
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_


def _on_codes(model: nn.Module) -> nn.Module:
    seen = images(CALIBRATION, seed=2).cuda()
    return quantize_(model, Config("int8_channel", activations="static"), [seen])


def _weights(format: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: fuse_(quantize_(model.bfloat16(), Config(format, compute="float")))


# What makes a contender of the float32 model, and how far off its result may be.
CONTENDERS: dict[str, tuple[Callable[[nn.Module], nn.Module], float]] = {
    "torch bf16": (lambda model: model.bfloat16(), EIGHT_BITS),
    "halfbyte int8 static": (_on_codes, EIGHT_BITS),
    "halfbyte W8A16": (_weights("int8_channel"), EIGHT_BITS),
    "halfbyte W4A16": (_weights("int4_g32"), FOUR_BITS),
}


def run(names: Sequence[str], batches: Sequence[int], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """For each network and batch a row a contender: seconds. Raises KernelError where a result is off by more than is allowed."""
    for name in names:
        model = Inference(name).model.cuda()
        torch.backends.cudnn.benchmark = False
        built = {contender: make(copy.deepcopy(model)) for contender, (make, _) in CONTENDERS.items()}
        torch.backends.cudnn.benchmark = True
        for batch in batches:
            x = images(batch).cuda()
            with torch.inference_mode():
                with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                    wanted = model(x).double()
                x = x.bfloat16()
                for contender, (_, allowed) in CONTENDERS.items():
                    error = float((built[contender](x).double() - wanted).norm() / wanted.norm())
                    if not error < allowed:
                        raise KernelError(f"{contender} on {name}, batch {batch}, is off by {error:.2g} of the result: report it")
                times = graph_times({contender: [_forward(of, x)] for contender, of in built.items()}, rounds=rounds)
            yield [{"network": name, "batch": batch, "contender": c, "seconds": times[c].median} for c in CONTENDERS]
            torch.cuda.empty_cache()


def _forward(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: model(x)
