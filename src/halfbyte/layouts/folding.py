"""The weights of 3-D and of transposed convolutions as those of ordinary convolutions in one or two dimensions, which kernels compute.

    transposed   y[o] = sum over k of w[k] * x[i],  o + padding = i * stride + k * dilation

Taps k = m + phases * j of one phase m lie `stride` apart in the output, so each phase is an ordinary convolution of x, and all of them have
the same window: the phases become output channels of one convolution, whose results interleave (`ops/conv/transposed.py`). Taps that some
phases lack are 0. Of a 3-D kernel the taps along time become input channels; of one that moves by its own size, all taps do.

    transposed   [Ci, Co/groups, *kernel]    -> [groups * phases * Co/groups, Ci/groups, *ceil(kernel / phases)]
    3-D          [Co, Ci/groups, Kt, Kh, Kw] -> [Co, Kt * Ci/groups, Kh, Kw] or [Co, Kt * Kh * Kw * Ci/groups, 1, 1]
    depthwise    phases and taps become channels of their own, each with one kernel: [taps * phases * C, 1, Kh, Kw]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Fold:
    """How the weight of a convolution is rearranged.

    Attributes:
        kernel: Sizes of the kernel, as the float layer has them.
        phases: Phases of a transposed convolution along each dimension, min(stride / gcd(stride, dilation), kernel); () for any other.
        folded: Number of leading dimensions of the kernel whose taps become input channels.
        groups: Groups of a transposed or depthwise convolution, else 1.
        depthwise: Whether each channel has one kernel of its own, and phases or taps become channels.
    """

    kernel: tuple[int, ...]
    phases: tuple[int, ...] = ()
    folded: int = 0
    groups: int = 1
    depthwise: bool = False

    def __post_init__(self) -> None:
        sizes = (*self.kernel, *self.phases, self.groups)
        if not all(type(n) is int and n > 0 for n in sizes) or len(self.phases) not in (0, len(self.kernel)):
            raise ArgumentError(f"a kernel, its phases and groups are sizes of at least 1, got {self}: pass those of the layer")
        if self.folded not in (0, 1, 3) or self.folded > len(self.kernel):
            raise ArgumentError(f"none, the first or all three dimensions of a kernel become channels, got {self}: pass those of the layer")

    @classmethod
    def of(
        cls,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
        *,
        channels: tuple[int, int],
        groups: int,
        padded: bool,
        transposed: bool = False,
    ) -> Fold:
        """How the weight of a convolution with these settings is folded. channels: inputs and outputs; padded: whether its input is."""
        phases: tuple[int, ...] = ()
        if transposed:
            phases = tuple(min(step // math.gcd(step, gap), taps) for step, gap, taps in zip(stride, dilation, kernel, strict=True))
        folded = 0
        if len(kernel) == 3:
            # A kernel that moves by its own size over what is not padded reads each number once: it is a linear layer of patches.
            dense = all(gap == 1 or taps == 1 for gap, taps in zip(dilation, kernel, strict=True))
            folded = 3 if not transposed and stride == kernel and not padded and dense else 1
        depthwise = groups > 1 and channels == (groups, groups) and math.prod(phases) * math.prod(kernel[:folded]) > 1
        return cls(kernel, phases, folded, groups if transposed or depthwise else 1, depthwise)

    @property
    def steps(self) -> tuple[int, ...]:
        """Sizes of the kernel of the ordinary convolution, before taps become channels."""
        if not self.phases:
            return self.kernel
        return tuple(-(-taps // phases) for taps, phases in zip(self.kernel, self.phases, strict=True))

    @property
    def image_kernel(self) -> tuple[int, int]:
        """(Kh, Kw) of the convolution of images that is computed."""
        height, width = (1, 1, *self.steps[self.folded :])[-2:]
        return height, width

    @property
    def channels(self) -> int:
        """How many channels of the convolution of images one input becomes."""
        return math.prod(self.steps[: self.folded]) * (math.prod(self.phases) if self.depthwise else 1)

    @property
    def outputs(self) -> int:
        """How many outputs of the convolution of images one output becomes."""
        return self.channels if self.depthwise else math.prod(self.phases)

    @property
    def zeros(self) -> float:
        """The share of the weight's taps that are 0, as phases lack them."""
        return 1 - math.prod(self.kernel) / (math.prod(self.steps) * math.prod(self.phases)) if self.phases else 0.0

    def fold(self, weight: Tensor) -> Tensor:
        """The float layer's weight -> [Co', Ci', *kernel], in one or two dimensions."""
        if weight.dim() != len(self.kernel) + 2 or tuple(weight.shape[2:]) != self.kernel:
            raise ArgumentError(f"the weight of a convolution with a kernel {self.kernel} ends with these sizes, got {list(weight.shape)}")
        if self.phases:
            weight = self._ordinary(weight)
        if self.depthwise:
            kernels = weight.reshape(self.groups, -1, *self.steps).transpose(0, 1).flatten(0, 1)
            taps = kernels.movedim(0, self.folded).reshape(-1, 1, *self.steps[self.folded :])
            return taps if taps.dim() > 2 else taps[..., None, None]
        if not self.folded:
            return weight
        taps_last = weight.permute(0, *range(2, 2 + self.folded), 1, *range(2 + self.folded, weight.dim()))
        images = taps_last.flatten(1, 1 + self.folded)
        return images if images.dim() > 2 else images[..., None, None]

    def unfold(self, weight: Tensor) -> Tensor:
        """The inverse of `fold`; the kernel may have a height of 1 before it."""
        weight = weight.reshape(*weight.shape[:2], *self.steps[self.folded :])
        if self.depthwise:
            kernels = weight.reshape(*self.steps[: self.folded], -1, *self.steps[self.folded :]).movedim(self.folded, 0)
            weight = kernels.reshape(-1, self.groups, *self.steps).transpose(0, 1).reshape(-1, 1, *self.steps)
        elif self.folded:
            taps = weight.unflatten(1, (*self.steps[: self.folded], -1))
            weight = taps.movedim(1 + self.folded, 1)
        return self._transposed(weight).contiguous() if self.phases else weight.contiguous()

    def _ordinary(self, weight: Tensor) -> Tensor:
        """[Ci, Co/groups, *kernel] -> [groups * phases * Co/groups, Ci/groups, *steps]"""
        n, split = len(self.kernel), self._split()
        missing = (steps * phases - taps for steps, phases, taps in zip(self.steps, self.phases, self.kernel, strict=True))
        padded = torch.nn.functional.pad(weight, [size for more in reversed(tuple(missing)) for size in (0, more)])
        parts = padded.reshape(self.groups, -1, weight.shape[1], *split).flip(_steps(n))
        return parts.permute(0, *_phases(n), 2, 1, *_steps(n)).reshape(-1, weight.shape[0] // self.groups, *self.steps)

    def _transposed(self, weight: Tensor) -> Tensor:
        """The inverse of `_ordinary`."""
        n = len(self.kernel)
        parts = weight.reshape(self.groups, *self.phases, -1, *weight.shape[1:]).flip(tuple(range(n + 3, 2 * n + 3)))
        order = (0, n + 2, n + 1, *chain.from_iterable((n + 3 + i, 1 + i) for i in range(n)))
        whole = parts.permute(order).reshape(self.groups * weight.shape[1], -1, *map(math.prod, zip(self.steps, self.phases, strict=True)))
        for i, taps in enumerate(self.kernel):
            whole = whole.narrow(2 + i, 0, taps)
        return whole

    def _split(self) -> Sequence[int]:
        return tuple(chain.from_iterable(zip(self.steps, self.phases, strict=True)))


def _steps(n: int) -> tuple[int, ...]:
    return tuple(range(3, 3 + 2 * n, 2))


def _phases(n: int) -> tuple[int, ...]:
    return tuple(range(4, 4 + 2 * n, 2))
