"""Sensitivity of a float network's outputs to int8 rounding of its activations, measured at calibration; called by build.py.

One scale per tensor does not suit every tensor: a class token a hundred times smaller than the image's tokens has codes of 0, and a
LayerNorm behind it makes its error as large as the token. The tensor's own error hides that; the error of the outputs shows it.

To first order, the rounding error e of an activation changes the outputs y by J e, where J is the Jacobian. Rademacher probes v, as in
Hutchinson's estimator, give E[(v · J e)²] = |J e|², and v · J e = g · e for the vector-Jacobian product g = Jᵀ v: one backward pass for
each v measures all activations at once.

Independent errors of elements add sum(g² e²) to |J e|², and errors of one sign (g · e)²: those of clipped elements. A LayerNorm ignores the
size of its input, so g · e = 0 for a token whose codes are all 0, where sum(g² e²) is not 0. The larger of the two counts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from halfbyte.nn.described import Scale
from halfbyte.nn.static.ranges import parameter_dtype, rounding_error
from halfbyte.nn.static.tracing import first_input, writes_first_input
from halfbyte.ops.checks import FLOATS

MAX_RELATIVE_NOISE = 0.1  # the relative output error that quantizing one activation may add
_SAMPLE_IMAGES = 4
_PROBES = 4  # over all images: their mean is within a factor of 2 in most cases
_GROUPS = 8  # of outputs: an output with a large error is not hidden by the average over many others


def output_noise(traced: fx.GraphModule, scales: Mapping[str, Scale], images: Tensor) -> dict[str, float]:
    """Estimate how much the int8 rounding error of each activation contributes to the error of the outputs.

    Args:
        traced: The float network.
        scales: The scale of each activation that can become codes, by the name of its node.
        images: A batch of calibration images. A few of them run one by one: the memory is that of training with one image.

    Returns:
        The relative output error by the names of `scales`, the largest of all groups of outputs; activations without gradient are left out.
    """
    if parameter_dtype(traced) != torch.float32:  # gradients would overflow in float16
        traced = copy.deepcopy(traced).float()
        images = images.float() if images.is_floating_point() else images
    samples = images[:_SAMPLE_IMAGES].split(1) if images.dim() >= 2 else (images,)
    # One image's outputs may be close to 0, so that errors are relative to the mean over the images.
    output_power = torch.stack([_output_power(traced, sample) for sample in samples]).mean(0).clamp(min=1e-30)
    probes = max(1, _PROBES // len(samples))
    generator = torch.Generator().manual_seed(0)
    noise: dict[str, Tensor] = {}
    for sample in samples:
        for name, power in _noise_power(traced, scales, sample, output_power, probes, generator).items():
            noise[name] = noise.get(name, 0.0) + power / (probes * len(samples))
    return {name: float(power.amax().sqrt()) for name, power in noise.items()}


@torch.no_grad()
def _output_power(traced: fx.GraphModule, image: Tensor) -> Tensor:
    """Return |y|² of each output y, [outputs]."""
    outputs = _float_outputs(fx.Interpreter(traced).run(image.clone()))
    return torch.tensor([float(y.square().sum()) for y in outputs], dtype=torch.float64, device="cpu")


def _float_outputs(result: Argument) -> list[Tensor]:
    """Return the floating-point tensors of a network's result."""
    outputs: list[Tensor] = []

    def collect(value: Argument) -> Argument:
        if isinstance(value, Tensor) and value.dtype in FLOATS and value.numel():
            outputs.append(value)
        return value

    fx.node.map_aggregate(result, collect)
    return outputs


def _noise_power(
    traced: fx.GraphModule, scales: Mapping[str, Scale], image: Tensor, output_power: Tensor, probes: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the sum over probes of |J e|² / |y|² of each activation, [groups of outputs], by its name."""
    activations = _Activations(traced, scales)
    with torch.enable_grad():  # the clone has gradients, unlike an inference tensor, and the network may write to it
        outputs = _float_outputs(activations.run(image.clone()))
    differentiable = [j for j, y in enumerate(outputs) if y.requires_grad]
    groups = min(_GROUPS, len(differentiable))
    noise: dict[str, Tensor] = {}
    for group in [*range(groups)] * probes:
        members = differentiable[group::_GROUPS]
        vectors = [_rademacher(outputs[j], generator) / float(output_power[j] * len(members)) ** 0.5 for j in members]
        gradients = torch.autograd.grad(
            [outputs[j] for j in members], list(activations.values.values()), vectors, retain_graph=True, allow_unused=True
        )
        for (name, value), gradient in zip(activations.values.items(), gradients, strict=True):
            if gradient is not None:
                output_error = gradient * rounding_error(value.detach(), scales[name])
                power = noise.setdefault(name, torch.zeros(groups, dtype=torch.float64, device="cpu"))
                power[group] += float(torch.maximum(output_error.sum().square(), output_error.square().sum()))
        del gradients  # before those of the next group need memory
    return noise


def _rademacher(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random signs in the shape of `like`."""
    return (torch.randint(2, like.shape, generator=generator, device="cpu") * 2 - 1).to(like)


class _Activations(fx.Interpreter):
    """Runs a float network with gradients and records the activations that can become codes.

    Attributes:
        values: The activations, by the names of their nodes.
    """

    def __init__(self, traced: fx.GraphModule, scales: Mapping[str, Scale]) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # errors stay one sentence
        self.values: dict[str, Tensor] = {}
        self._scales, self._modules = scales, dict(traced.named_modules())

    def run_node(self, n: fx.Node) -> object:
        if writes_first_input(n, self._modules) and isinstance(x := self.env[first_input(n)], Tensor):
            self.env[first_input(n)] = x.clone()  # nodes behind n read n, and recorded values stay as they are
        value = super().run_node(n)
        if n.name not in self._scales or not isinstance(value, Tensor):
            return value
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        self.values[n.name] = value
        return value
