"""Modules for quantization-aware training: they hold the float weight and compute with its quantized and dequantized value."""

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
from halfbyte.nn.kinds import kind_of, quantize_weight
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

    float_class    of the module before
    weight_scale   only with learned scales: a parameter in the shape of the codes' scales, float32
    weight_zero    the corresponding zeros, which are not trained; None where the format has none
    """

    target: Target
    float_class: type[nn.Module]
    weight: Tensor
    weight_scale: nn.Parameter | None
    weight_zero: Tensor | None

    def ordered(self, weight: Tensor) -> Tensor:
        """A weight in the order of its codes."""
        return weight

    def reordered(self, rows: Tensor) -> Tensor:
        """The inverse of `ordered`."""
        return rows

    def rounded_rows(self) -> Tensor:
        """The quantized and dequantized weight, in the order of its codes; gradients flow to the float weight and to learned scales."""
        rows, fmt, name = self.ordered(self.weight), self.target.format, f"{self.target.name}.weight"
        if self.weight_scale is None:
            return fake_quantize(rows, fmt, self.target.method, name=name)
        return fake_quantize_given(rows, fmt, self.weight_scale, self.weight_zero, name=name)

    def rounded(self) -> Tensor:
        """The same, as the module uses it."""
        return self.reordered(self.rounded_rows())

    def codes(self) -> Codes:
        """The weight quantized."""
        name = f"{self.target.name}.weight"
        if self.weight_scale is None:
            weight = self.weight.T if is_transposed(self) else self.weight
            return quantize_weight(kind_of(self), weight, self.target.format, self.target.method, name)
        return quantize_to_grid(self.ordered(self.weight.detach()), self.target.format, self.weight_scale, self.weight_zero, name)

    def extra_repr(self) -> str:
        scales = "" if self.weight_scale is None else ", learned scales"
        return f"{super().extra_repr()}, trained for {self.target.format}{scales}"


class FakeQuantLinear(FakeQuantized, nn.Linear):
    """nn.Linear that computes like the later QuantLinear."""

    def forward(self, x: Tensor) -> Tensor:
        fmt, activation = self.target.format, self.target.activation
        if self.target.compute == "int8":
            x = fake_quantize_activation(x, fmt.block_size(self.in_features), "row" if activation == "image" else activation)  # type: ignore[arg-type]
        return functional.linear(x, self.rounded_rows(), self.bias)


class FakeQuantConv1D(FakeQuantLinear):
    """transformers' Conv1D, weight [K, N], that computes like the later QuantLinear."""

    transposed = True

    def ordered(self, weight: Tensor) -> Tensor:
        return weight.T

    def reordered(self, rows: Tensor) -> Tensor:
        return rows.T


class FakeQuantEmbedding(FakeQuantized, ScaledEmbedding):
    """nn.Embedding that gives the rows of the later QuantEmbedding."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.rounded(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return scaled(rows, factor_of(self))


class _FakeQuantConvolution(FakeQuantized):
    """Base of the convolutions; `kernel_size`, `stride` and so on are torch's own."""

    out_channels: int
    in_channels: int
    groups: int
    bias: Tensor | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]

    def ordered(self, weight: Tensor) -> Tensor:
        return channels_last(weight, self.target.format)

    def reordered(self, rows: Tensor) -> Tensor:
        return channels_first(rows, self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        sizes, activation = self._sizes(), self.target.activation
        if self.target.compute == "int8" and not sizes.depthwise:
            one_scale = not isinstance(sizes.format.block, int) and sizes.format.zero == "none"
            if activation != "image" or not one_scale:  # as Config says
                padded = x if self.padding_mode == "zeros" else pad_by_mode(x, self)
                y = self._on_patches(self._images(padded), sizes, "row" if activation == "image" else activation)
                y = y.reshape(*x.shape[: -len(self.kernel_size) - 1], sizes.out, *y.shape[-len(self.kernel_size) :])
                return in_memory_format_of(y, x)
            x = in_memory_format_of(fake_quantize_images(self._images(x)).reshape(x.shape), x)
        return self._conv_forward(x, in_memory_format_of(self.rounded(), None), self.bias)  # type: ignore[operator,no-any-return]

    def _images(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.in_channels, *(1, *x.shape[-len(self.kernel_size) :])[-2:])

    def _sizes(self) -> Filter:
        height, width = (1, *self.kernel_size)[-2:]
        return Filter(self.target.format, self.out_channels, self.in_channels // self.groups, (height, width), self.groups)

    def _on_patches(self, images: Tensor, sizes: Filter, activation: str) -> Tensor:
        """Images [B, C, H, W] -> [B, Co, Ho, Wo]. Each patch is rounded by itself, so all are materialized: [groups, B, Ho, Wo, K]."""
        block = sizes.matrix_format.block_size(sizes.k)
        rows = fake_quantize_activation(patches(images, sizes, module_window(self)), block, activation)  # type: ignore[arg-type]
        weight = self.rounded_rows().reshape(sizes.out, sizes.taps, sizes.channels)
        weight = functional.pad(weight, (0, sizes.padded - sizes.channels)).reshape(sizes.groups, -1, sizes.k)
        y = torch.einsum("gbhwk,gnk->bgnhw", rows, weight.to(rows.dtype)).flatten(1, 2)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1).to(y.dtype)


class FakeQuantConv1d(_FakeQuantConvolution, nn.Conv1d):
    """nn.Conv1d that computes like the later QuantConv1d."""


class FakeQuantConv2d(_FakeQuantConvolution, nn.Conv2d):
    """nn.Conv2d that computes like the later QuantConv2d."""


def check_not_in_training(model: nn.Module, remedy: str = "call this before prepare_qat_, or convert_qat_ first") -> None:
    """Raises ArgumentError for a model with modules in training, whose weights and modules must not be changed otherwise."""
    if name := next((name for name, module in model.named_modules() if isinstance(module, FakeQuantized)), None):
        raise ArgumentError(f"{name} is in training for its quantized form: {remedy}")


def has_form(module: nn.Module) -> bool:
    """Whether a module can be trained for its quantized form."""
    subclassed = isinstance(module, nn.Conv1d | nn.Conv2d) and form_of(module).float_class is not None
    return kind_of(module) in FORMS and not subclassed


def prepare_(module: nn.Module, target: Target, scale: nn.Parameter | None, zero: Tensor | None) -> None:
    """Turns a float module into one in training. It stays the same object, so that references to it and its weight (from parents, an
    optimizer, hooks) remain valid."""
    float_class = type(module)
    if is_conv1d(module):
        module.__class__ = FakeQuantConv1D
        assert isinstance(module, FakeQuantConv1D)
        module.in_features, module.out_features = module.weight.shape
    else:
        module.__class__ = FORMS[kind_of(module)]
    assert isinstance(module, FakeQuantized)
    module.float_class, module.target = float_class, target
    module.register_parameter("weight_scale", scale)
    module.register_buffer("weight_zero", zero)


def restore_(module: FakeQuantized) -> None:
    """Turns a module in training into the float module that it was, with its trained weight."""
    if isinstance(module, FakeQuantConv1D):
        del module.in_features, module.out_features
    del module.weight_scale, module.weight_zero, module.target
    module.__class__ = module.__dict__.pop("float_class")


FORMS: dict[str, type[FakeQuantized]] = {
    "Linear": FakeQuantLinear,
    "Embedding": FakeQuantEmbedding,
    "Conv1d": FakeQuantConv1d,
    "Conv2d": FakeQuantConv2d,
}
