"""Bias correction of a network that is about to compute on int8 codes, called by build.py for each batch of calibration images.

A rounded weight shifts the mean of what a layer computes, and 50 layers, depthwise ones above all, add such shifts up. The bias takes
them back: bias + E[W x] - E[W' x'], where x' is the input behind layers that are rounded and corrected themselves. Activations are not
rounded there: where calibration clips them, a few large values would shift all others. (Nagel et al., Data-free quantization through weight
equalization and bias correction, ICCV 2019, in its form with data.)
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import Argument, Target

from halfbyte import ops
from halfbyte.nn.modules.weight_view import AnyPacked

Layer = nn.Conv1d | nn.Conv2d | nn.Linear


class LayerWeight(NamedTuple):
    """What a layer on codes is made of; see `IntegerModule`."""

    packed: AnyPacked
    bias: Tensor | None
    error: float | None = None


# What a layer is made of, by its name; or why it stays in floating point.
Weights = Callable[[str, Layer], LayerWeight | str]


def channel_means(layer: Layer, y: Tensor) -> Tensor:
    """The mean of each output of a layer, [outputs], of its result y."""
    channel = -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)
    return y.movedim(channel, 0).flatten(1).float().mean(1)


class BiasCorrector(fx.Interpreter):
    """Runs images through a traced network with rounded weights, and collects the shifts of its layers' means."""

    def __init__(self, traced: fx.GraphModule, weights: Weights) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # errors stay one sentence
        self._weights = functools.cache(weights)
        self._means: Mapping[str, Tensor] = {}
        self._shifts: defaultdict[str, list[Tensor]] = defaultdict(list)

    def collect(self, images: Tensor, means: Mapping[str, Tensor]) -> None:
        """Add what these images show; `means`: the `channel_means` of the layers in floating point, by name."""
        self._means = means
        self.run(images.clone())  # the network may write to its input

    def call_module(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> object:
        name, layer = str(target), self.submodules[str(target)]
        if name not in self._means or not isinstance(layer, Layer) or isinstance(weight := self._weights(name, layer), str):
            return super().call_module(target, args, kwargs)
        rounded = torch.empty_like(layer.weight)  # in its memory format, which those of results follow
        rounded.copy_(ops.dequantize(weight.packed, layer.weight.dtype).view_as(layer.weight))
        y = functional_call(layer, {"weight": rounded}, args, kwargs)
        shift = channel_means(layer, y) - self._means[name]
        if weight.bias is None or not shift.isfinite().all():
            return y
        self._shifts[name].append(shift)
        sizes = (-1,) if isinstance(layer, nn.Linear) else (-1, *[1] * len(layer.kernel_size))
        return y - shift.to(y.dtype).view(sizes)

    def weights(self) -> Weights:
        """The weights with corrected biases; a layer without a bias stays as it is."""

        def corrected(name: str, layer: Layer) -> LayerWeight | str:
            weight = self._weights(name, layer)
            if isinstance(weight, str) or weight.bias is None or name not in self._shifts:
                return weight
            shift = torch.stack(self._shifts[name]).mean(0)
            return weight._replace(bias=weight.bias - shift.to(weight.bias.dtype))

        return corrected
