"""Modules in quantization-aware training: each holds its float weight and computes with the quantized and dequantized one.

`prepare_qat_` (qat.py) turns float modules into these and `convert_qat_` reads their codes. A module changes its class, not its identity:
optimizers, hooks and parents go on to refer to it. What rounds, and its gradients, is in ops/fake_quantize.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.kernels.conv_reference import patches
from halfbyte.layouts.convolution import Filter, channels_first, channels_last
from halfbyte.nn.kinds import kind_of, module_activation, quantize_weight
from halfbyte.nn.modules.scaled import ScaledEmbedding, factor_of, scaled
from halfbyte.nn.modules.subclassed import form_of
from halfbyte.nn.modules.transposed import is_conv1d, is_transposed
from halfbyte.ops.conv.folded import pad_by_mode
from halfbyte.ops.conv.functions import module_window
from halfbyte.ops.conv.images import in_memory_format_of
from halfbyte.ops.fake_quantize import fake_quantize, fake_quantize_activation, fake_quantize_given, fake_quantize_images
from halfbyte.quantizers import quantize_to_grid


@dataclass(frozen=True, slots=True)
class Target:
    """The quantized form that a module is trained for.

    name     of the module in its model
    method   by which codes and scales are chosen at each step or, where scales are learned, were initialized
    compute, activation   see QuantLinear. With "int8" activations are rounded too
    """

    name: str
    format: Format
    method: str
    compute: str
    activation: str


class FakeQuantized(nn.Module):
    """Base of the modules in training. `weight` is the float weight, which an optimizer updates and a state_dict has under its old name.

    Codes are those of a matrix [..., N, K], which `to_rows` arranges the weight as; `from_rows` is its inverse.

    float_class    the module's class before, which it has again after training
    weight_scale   only with learned scales: a parameter in the shape of the codes' scales, float32
    weight_zero    the corresponding zeros, which are not trained; None where the format has none
    """

    target: Target
    float_class: type[nn.Module]
    weight: Tensor
    weight_scale: nn.Parameter | None
    weight_zero: Tensor | None

    def to_rows(self, weight: Tensor) -> Tensor:
        return weight

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows

    def fake_quantized_rows(self) -> Tensor:
        """Return the quantized and dequantized weight as rows; gradients flow to the float weight and to learned scales."""
        rows, fmt, name = self.to_rows(self.weight), self.target.format, f"{self.target.name}.weight"
        if self.weight_scale is None:
            return fake_quantize(rows, fmt, self.target.method, name=name)
        return fake_quantize_given(rows, fmt, self.weight_scale, self.weight_zero, name=name)

    def fake_quantized_weight(self) -> Tensor:
        """Return the quantized and dequantized weight, in the shape of `weight`."""
        return self.from_rows(self.fake_quantized_rows())

    def codes(self) -> Codes:
        """Quantize the weight: the codes whose values `fake_quantized_weight` returns."""
        name = f"{self.target.name}.weight"
        if self.weight_scale is None:
            weight = self.weight.T if is_transposed(self) else self.weight
            return quantize_weight(kind_of(self), weight, self.target.format, self.target.method, name)
        return quantize_to_grid(self.to_rows(self.weight.detach()), self.target.format, self.weight_scale, self.weight_zero, name)

    def extra_repr(self) -> str:
        scales = "" if self.weight_scale is None else ", learned scales"
        return f"{super().extra_repr()}, trained for {self.target.format}{scales}"


class FakeQuantLinear(FakeQuantized, nn.Linear):
    """nn.Linear that computes like the later QuantLinear."""

    def forward(self, x: Tensor) -> Tensor:
        fmt = self.target.format
        if self.target.compute == "int8":
            activation = module_activation(self.target.activation, fmt, convolution=False)
            x = fake_quantize_activation(x, fmt.block_size(self.in_features), activation)  # type: ignore[arg-type]
        return functional.linear(x, self.fake_quantized_rows(), self.bias)


class FakeQuantConv1D(FakeQuantLinear):
    """transformers' Conv1D, weight [K, N], that computes like the later QuantLinear."""

    transposed = True

    def to_rows(self, weight: Tensor) -> Tensor:
        return weight.T

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows.T


class FakeQuantEmbedding(FakeQuantized, ScaledEmbedding):
    """nn.Embedding that returns the rows of the later QuantEmbedding."""

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.fake_quantized_weight()
        rows = functional.embedding(ids, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return scaled(rows, factor_of(self))


class _FakeQuantConvolution(FakeQuantized):
    """Base of the convolutions [B, C, *size] or [C, *size]; the attributes are torch's own. A Conv1d computes on images of height 1."""

    out_channels: int
    in_channels: int
    groups: int
    bias: Tensor | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]

    def to_rows(self, weight: Tensor) -> Tensor:
        return channels_last(weight, self.target.format)

    def from_rows(self, rows: Tensor) -> Tensor:
        return channels_first(rows, self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self._filter()
        if self.target.compute == "int8" and not sizes.depthwise:  # depthwise convolutions compute in floating point
            activation = module_activation(self.target.activation, sizes.format, convolution=True)
            if activation != "image":
                return self._convolve_patches(x, sizes, activation)
            x = in_memory_format_of(fake_quantize_images(self._as_images(x)).reshape(x.shape), x)
        weight = in_memory_format_of(self.fake_quantized_weight(), None)
        return self._conv_forward(x, weight, self.bias)  # type: ignore[operator,no-any-return]

    def _filter(self) -> Filter:
        height, width = (1, *self.kernel_size)[-2:]
        return Filter(self.target.format, self.out_channels, self.in_channels // self.groups, (height, width), self.groups)

    def _as_images(self, x: Tensor) -> Tensor:
        """[B, C, *size] or [C, *size] -> [B, C, H, W]"""
        return x.reshape(-1, self.in_channels, *(1, *x.shape[-len(self.kernel_size) :])[-2:])

    def _convolve_patches(self, x: Tensor, sizes: Filter, activation: str) -> Tensor:
        """Convolve x, rounding what lies under the kernel at each output by itself: patches [groups, B, Ho, Wo, K] are materialized."""
        dims = len(self.kernel_size)
        images = self._as_images(x if self.padding_mode == "zeros" else pad_by_mode(x, self))
        block = sizes.matrix_format.block_size(sizes.k)
        rows = fake_quantize_activation(patches(images, sizes, module_window(self)), block, activation)  # type: ignore[arg-type]
        weight = self.fake_quantized_rows().reshape(sizes.out, sizes.taps, sizes.channels)
        weight = functional.pad(weight, (0, sizes.padded - sizes.channels)).reshape(sizes.groups, -1, sizes.k)
        y = torch.einsum("gbhwk,gnk->bgnhw", rows, weight.to(rows.dtype)).flatten(1, 2)
        if self.bias is not None:
            y = y + self.bias.view(-1, 1, 1).to(y.dtype)
        return in_memory_format_of(y.reshape(*x.shape[: -dims - 1], sizes.out, *y.shape[-dims:]), x)


class FakeQuantConv1d(_FakeQuantConvolution, nn.Conv1d):
    """nn.Conv1d that computes like the later QuantConv1d."""


class FakeQuantConv2d(_FakeQuantConvolution, nn.Conv2d):
    """nn.Conv2d that computes like the later QuantConv2d."""


_BY_KIND: dict[str, type[FakeQuantized]] = {
    "Linear": FakeQuantLinear,
    "Embedding": FakeQuantEmbedding,
    "Conv1d": FakeQuantConv1d,
    "Conv2d": FakeQuantConv2d,
}


def can_be_trained(module: nn.Module) -> bool:
    """Whether there is a module in training for this one: neither for experts nor for a convolution of a subclass, for example."""
    subclassed = isinstance(module, nn.Conv1d | nn.Conv2d) and form_of(module).float_class is not None
    return kind_of(module) in _BY_KIND and not subclassed


def check_not_in_training(model: nn.Module, remedy: str = "call this before prepare_qat_, or convert_qat_ first") -> None:
    """Raise ArgumentError for a model with modules in training, whose weights and modules must not be changed otherwise."""
    if name := next((name for name, module in model.named_modules() if isinstance(module, FakeQuantized)), None):
        raise ArgumentError(f"{name} is in training for its quantized form: {remedy}")


def start_training_(module: nn.Module, target: Target, scale: nn.Parameter | None, zero: Tensor | None) -> None:
    """Make a float module one in training for `target`, in place.

    Args:
        module: A module that `can_be_trained`.
        scale: Learned scales; None: scales follow from the weight at each step.
        zero: The zeros of learned scales.
    """
    float_class = type(module)
    if is_conv1d(module):
        module.__class__ = FakeQuantConv1D
        assert isinstance(module, FakeQuantConv1D)
        module.in_features, module.out_features = module.weight.shape
    else:
        module.__class__ = _BY_KIND[kind_of(module)]
    assert isinstance(module, FakeQuantized)
    module.float_class, module.target = float_class, target
    module.register_parameter("weight_scale", scale)
    module.register_buffer("weight_zero", zero)


def end_training_(module: FakeQuantized) -> None:
    """Make a module in training the float module that it was, in place, with its trained weight."""
    if isinstance(module, FakeQuantConv1D):
        del module.in_features, module.out_features
    del module.weight_scale, module.weight_zero, module.target
    module.__class__ = module.__dict__.pop("float_class")
