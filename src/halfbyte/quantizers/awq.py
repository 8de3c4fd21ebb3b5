"""AWQ: scales for the input channels of linear layers, so that the channels with large activations lose less precision.

A linear layer gives the same output when each column k of its weight is multiplied by s_k and its input divided by it. The larger
column then uses more of its block's range and is rounded more finely. Among the scales s = a^alpha, with a the mean magnitude of
each input channel and alpha = 0, 1/20, …, 1, this chooses the one that minimises the squared error of the outputs,

    sum over the layers that read this input of  tr(D H D^T),  D = Q(W s) / s - W,  H = sum(x x^T),

and normalizes it so that min(s) * max(s) = 1. For large weights the error is estimated from some of the rows. `nn/calibration/folding.py`
finds the module before the layer that can divide its output by s at no cost.

Source: Lin et al.: AWQ, Activation-aware Weight Quantization (arXiv:2306.00978, 2023), equations 4 and 5. Its search for
clipped ranges is `mse` with these moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.absmax import absmax
from halfbyte.quantizers.mse import mse, power_of_two

_ROWS = 512  # of each weight, evenly spread, by which scales are judged
_LEAST = 1e-4  # lower bound of a scale: a channel that is always 0 must not cause a division by 0


@dataclass(frozen=True, slots=True)
class AWQ:
    """Options of AWQ (Lin et al., arXiv:2306.00978).

    Attributes:
        steps: Alphas that are tried, besides 0.
        clip: Whether ranges are clipped where that lowers the error of the outputs.

    Example:
        >>> hb.AWQ(steps=10).clip
        True
    """

    steps: int = 20
    clip: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ArgumentError(f"AWQ tries 1 or more steps of alpha, got {self.steps}: use 20")


def search_scale(
    weights: Sequence[tuple[Tensor, Format]], moments: Tensor, magnitude: Tensor, options: AWQ, channel: Tensor | None = None
) -> Tensor:
    """The scale s, float32 [K], for the weights [N, K] (with their formats) that read one input.

    Args:
        weights: The weights, with their formats.
        moments: H, float32 [K, K].
        magnitude: a, float32 [K].
        channel: int64 [K] in [0, C): columns of the same channel get the same scale, where the dividing module has only C channels.
    """
    if channel is not None:
        size = int(channel.max()) + 1
        sums = torch.zeros(size, device=magnitude.device, dtype=torch.float32).index_add_(0, channel, magnitude)
        magnitude = (sums / torch.bincount(channel, minlength=size))[channel]
    # Losses are compared with each other only: in float32 they neither overflow nor vanish in units of the largest weight and moment.
    unit = power_of_two(torch.stack([weight.abs().amax().float() for weight, _ in weights if weight.numel()] or [magnitude.max()]).amax())
    moments = moments * power_of_two(moments.abs().amax())
    weights = [(weight[:: -(-len(weight) // _ROWS)], fmt) for weight, fmt in weights]
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(options.steps + 1):
        scale = magnitude.pow(step / options.steps).clamp_min(_LEAST)
        scale = scale / (scale.max() * scale.min()).sqrt()
        loss = sum(output_error(weight, fmt, moments, scale, unit) for weight, fmt in weights)
        if loss < least:
            best, least = scale, loss
    return best


def output_error(weight: Tensor, fmt: Format, moments: Tensor, scale: Tensor, unit: Tensor | float = 1.0) -> float:
    """tr(D H D^T) of a weight [N, K] that is quantized with its columns scaled by `scale`; D is multiplied by `unit`, a power of two."""
    error = (absmax(weight * scale, fmt).dequantize() / scale - weight) * unit
    return float(((error @ moments) * error).sum(dtype=torch.float64))


def awq(weight: Tensor, fmt: Format, moments: Tensor, options: AWQ, name: str = "weight") -> Codes:
    """Quantize a weight [N, K] whose columns have been scaled; `moments` are those of the divided inputs."""
    return mse(weight, fmt, name, moments) if options.clip else absmax(weight, fmt, name)
