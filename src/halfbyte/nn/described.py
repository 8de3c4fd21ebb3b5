"""What configs and checkpoints say of modules: names, kinds and settings. The modules themselves take long to import."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from halfbyte.errors import ArgumentError
from halfbyte.kernels.problem import COMPUTES
from halfbyte.ops.conv.images import ACTIVATIONS

# Kind -> dimensions of the kernel.
CONVOLUTIONS = {"Conv1d": 1, "Conv2d": 2, "Conv3d": 3, "ConvTranspose1d": 1, "ConvTranspose2d": 2, "ConvTranspose3d": 3}
KINDS = ("Linear", "Embedding", "EmbeddingBag", *CONVOLUTIONS, "Experts")
NOT_A_KIND = "only Linear, Embedding, EmbeddingBag, convolutions and experts are quantized"
ORDER = "input_order"
RESIDUAL, LOW_RANK, INPUT_SCALE = "residual", "low_rank_in", "input_scale"  # the quantized part of a LowRankLinear, and what it adds
LEAST, MOST = -128, 127  # int8 codes
CALIBRATION_KEY = "halfbyte"  # of a `Calibrated` in the `meta` of a torch.fx.GraphModule, which copies keep


@dataclass(frozen=True, slots=True)
class Scale:
    """What a code q stands for: step * (q - zero)."""

    step: float
    zero: int

    @classmethod
    def of_range(cls, low: float, high: float) -> Scale:
        """The scale with the smallest step that covers `low` to `high` and represents 0 exactly."""
        low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / (MOST - LEAST)
        step = step if step > 2.0**-60 else 1.0  # its inverse must be a float32
        return cls(step, max(LEAST, min(MOST, round(LEAST - low / step))))

    def code(self, value: float) -> int:
        """The code nearest to a number."""
        return max(LEAST, min(MOST, round(value / self.step) + self.zero)) if abs(value) < float("inf") else (MOST if value > 0 else LEAST)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The calibration record of a network on codes: all it is built from apart from the float network.

    scales  of each result of the traced network, by the name of its node
    floats  names of the layers that stay in floating point though they could do without
    notes   what else runs in floating point, and what was folded
    """

    scales: Mapping[str, Scale]
    floats: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module that holds a weight, and can be quantized unless `reason` says why not.

    kind    "Linear", "Conv2d", … or another class name
    weight  equal for candidates that share one weight
    narrow  a convolution whose taps have few channels: it takes int8_channel instead of a format with blocks
    """

    name: str
    kind: str
    weight: Hashable
    reason: str | None = None
    narrow: bool = False


def check_compute(compute: str, activation: str) -> None:
    """Raise ArgumentError for a `compute` or `activation` that does not exist."""
    if compute not in COMPUTES:
        raise ArgumentError(f"compute is one of {', '.join(COMPUTES)}, got {compute!r}")
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
