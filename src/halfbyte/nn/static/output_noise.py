"""What rounding each result of a float network to int8 codes adds to the error of its outputs, measured at calibration (build.py).

One scale per tensor is not enough for every tensor: where a class token is a hundred times smaller than the tokens of an image, its codes
are all 0, and a LayerNorm behind it makes its error as large as the token. The error of a tensor itself does not show that, as the other
tokens hide it; what arrives at the outputs does. To first order, the error e of a result arrives as J e, where J is the Jacobian of the
outputs y. For v of random signs, E[(v · J e)²] = |J e|², and v · J e = g · e for the gradient g of v · y: a backward pass for each v
measures all results at once.

Errors of elements that are independent of each other arrive as sum(g² e²). That of a token whose codes are all 0 is the token itself, which
a LayerNorm, that ignores the size of its input, does not show to first order: g · e = 0. Clipped elements have errors of one sign, which
arrive as (g · e)². The larger one counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from halfbyte.nn.described import Scale
from halfbyte.nn.static.ranges import rounding_error
from halfbyte.nn.static.tracing import first_input, writes_first_input
from halfbyte.ops.checks import FLOATS

MOST_NOISE = 0.01  # of the outputs' power, that the codes of one result may add: a relative error of 10 %
_BACKWARDS = 4  # whose mean is within a factor of 2 in most cases
_IMAGES = 4


def output_noise(traced: fx.GraphModule, scales: Mapping[str, Scale], images: Tensor) -> dict[str, float]:
    """Measure the power of the error of each result, as it arrives at the outputs, as a share of their power, averaged over the outputs.

    Args:
        traced: The float network.
        scales: Of each result that can become codes, by the name of its node.
        images: A batch of calibration images, of which a few are taken, one by one, so that memory is that of one image's training.

    Returns:
        By the names of `scales`; results that no gradient reaches are left out.
    """
    images = images.clone()  # an inference tensor has no gradients
    parts = images[:_IMAGES].split(1) if images.dim() >= 4 else (images,)
    repeats = max(1, _BACKWARDS // max(1, len(parts)))
    noise: defaultdict[str, float] = defaultdict(float)
    generator = torch.Generator().manual_seed(0)
    for part in parts:
        recorder = _ErrorRecorder(traced, scales)
        with torch.enable_grad():
            outputs = recorder.outputs(part)
        # Outputs are divided by |y|, and all of them multiplied by `unit`, as gradients of float16 would underflow.
        unit = sum(y.numel() for y in outputs) ** 0.5
        factors = [unit / y.detach().float().norm().clamp(min=1e-30) for y in outputs]
        for repeat in range(repeats if outputs else 0):
            probes = [(_random_signs(y, generator) * factor).to(y.dtype) for y, factor in zip(outputs, factors, strict=True)]
            last = repeat == repeats - 1
            gradients = torch.autograd.grad(outputs, list(recorder.values.values()), probes, retain_graph=not last, allow_unused=True)
            for (name, error), gradient in zip(recorder.errors.items(), gradients, strict=True):
                if gradient is not None:
                    arrived = gradient.float() * error / unit
                    power = max(float(arrived.sum()) ** 2, float(arrived.square().sum()))
                    noise[name] += power / len(outputs) / (repeats * len(parts))
    return dict(noise)


def _random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(2, like.shape, generator=generator, device="cpu") * 2 - 1).to(like.device)


class _ErrorRecorder(fx.Interpreter):
    """Runs a float network with gradients.

    Attributes:
        values: The results that can become codes, by the names of their nodes.
        errors: Of the codes of each one, float32.
    """

    def __init__(self, traced: fx.GraphModule, scales: Mapping[str, Scale]) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # errors stay one sentence
        self.values: dict[str, Tensor] = {}
        self.errors: dict[str, Tensor] = {}
        self._scales, self._modules = scales, dict(traced.named_modules())

    def outputs(self, images: Tensor) -> list[Tensor]:
        """Return the floating-point outputs for images that depend on some result."""
        found: list[Tensor] = []

        def collect(value: Argument) -> Argument:
            if isinstance(value, Tensor) and value.dtype in FLOATS and value.requires_grad and value.numel():
                found.append(value)
            return value

        fx.node.map_aggregate(cast("Argument", self.run(images)), collect)
        return found

    def run_node(self, n: fx.Node) -> object:
        if writes_first_input(n, self._modules) and isinstance(x := self.env[first_input(n)], Tensor):
            self.env[first_input(n)] = x.clone()  # nodes behind n read n, and recorded values stay as they are
        value = super().run_node(n)
        if n.name not in self._scales or not isinstance(value, Tensor):
            return value
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        self.values[n.name], self.errors[n.name] = value, rounding_error(value.detach(), self._scales[n.name])
        return value
