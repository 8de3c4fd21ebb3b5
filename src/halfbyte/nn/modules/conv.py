"""QuantConv1d and QuantConv2d in place of nn.Conv1d and nn.Conv2d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError
from halfbyte.layouts.convolution import PackedConv
from halfbyte.nn.described import check_compute
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.ops.conv import functions as conv


class QuantConv2d(QuantModule):
    """A convolution like nn.Conv2d, with a quantized weight. Its output is channels_last where its input is, else contiguous.

    Args:
        packed: The weight, [out_channels, in_channels / groups, Kh, Kw].
        like: The nn.Conv2d or QuantConv2d that it replaces: stride, padding, dilation and bias are copied from it. The bias stays in
            floating point, frozen.
        compute: See `conv2d`.
        activation: See `compute`.
        dtype: Of the float weight that it replaces.
        error: As in QuantModule.

    Example:
        >>> layer = hb.quantize_(nn.Sequential(nn.Conv2d(32, 8, 3)), "int8_channel")[0]
        >>> type(layer).__name__, layer(torch.randn(1, 32, 5, 5)).shape
        ('QuantConv2d', torch.Size([1, 8, 3, 3]))
    """

    kind = "Conv2d"
    packed: PackedConv
    bias: nn.Parameter | None
    out_channels: int
    in_channels: int
    kernel_size: tuple[int, ...]
    groups: int
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str

    def __init__(
        self,
        packed: PackedConv,
        like: nn.Conv1d | nn.Conv2d | QuantConv2d,
        compute: str = "auto",
        activation: str = "block",
        *,
        dtype: torch.dtype,
        error: float | None = None,
    ) -> None:
        super().__init__(packed, dtype, error)
        sizes = packed.sizes
        wanted = (sizes.out, sizes.channels * sizes.groups, sizes.kernel[-len(like.kernel_size) :], sizes.groups)
        got = (like.out_channels, like.in_channels, tuple(like.kernel_size), like.groups)
        if got != wanted:
            raise ArgumentError(f"a weight of (outputs, inputs, kernel, groups) {wanted} does not fit a {type(like).__name__} of {got}")
        if like.padding_mode != "zeros":
            raise ArgumentError(f"padding is always with zeros, got padding_mode={like.padding_mode!r}: pad before the convolution")
        check_compute(compute, activation)
        self.out_channels, self.in_channels, self.kernel_size, self.groups = got
        self.stride = tuple(like.stride)
        self.padding = like.padding
        self.dilation = tuple(like.dilation)
        self.padding_mode = "zeros"
        self.compute, self.activation = compute, activation
        self._window = conv.module_window(like)
        bias = like.bias
        self.register_parameter("bias", bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    def forward(
        self, x: Tensor, added: Tensor | None = None, clamp: tuple[float, float] | None = None, channels_last: bool = False
    ) -> Tensor:
        """x [B, C, H, W] or [C, H, W] in float32, bfloat16 or float16 -> [B, Co, Ho, Wo] of the same dtype; with `added` to it, of whatever
        shape, and then clamped; `channels_last`: in this memory format whatever x has, which saves a copy."""
        if added is None or self._is_residual(added, x):
            return self._convolve(x, channels_last, residual=added, clamp=clamp)
        y = self._convolve(x, channels_last) + added
        return y if clamp is None else y.clamp(*clamp)

    def _convolve(self, x: Tensor, channels_last: bool, residual: Tensor | None = None, clamp: tuple[float, float] | None = None) -> Tensor:
        convolve, window = conv.conv2d_channels_last if channels_last else conv.conv2d, (self.stride, self.padding, self.dilation)
        settings = self.bias, *window
        return convolve(x, self.packed, *settings, residual=residual, compute=self.compute, activation=self.activation, clamp=clamp)

    def _is_residual(self, added: Tensor, x: Tensor) -> bool:
        """Whether it is as large as the result and of its type, so that the convolution itself adds it."""
        dims, sizes = len(self.kernel_size), self.packed.sizes
        size = self._window.out_size((1, *x.shape[-dims:])[-2:], sizes.kernel)
        return added.dtype == x.dtype and added.shape == (*x.shape[: -dims - 1], sizes.out, *size[-dims:])

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}, format={self.packed.format}"
        )


class QuantConv1d(QuantConv2d):
    """A convolution like nn.Conv1d: [B, C, L] or [C, L] -> [B, Co, Lo] or [Co, Lo].

    Args:
        packed: The weight, from `pack_conv` with a kernel (Kw,).
        like: The nn.Conv1d whose settings and bias it takes.
        compute: See `conv2d`.
        activation: See `conv2d`.
        dtype: Of the float weight that it replaces.
        error: As in QuantModule.

    Example:
        >>> layer = hb.quantize_(nn.Sequential(nn.Conv1d(32, 8, 3)), "int8_channel")[0]
        >>> type(layer).__name__, layer(torch.randn(1, 32, 5)).shape
        ('QuantConv1d', torch.Size([1, 8, 3]))
    """

    kind = "Conv1d"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[Co, Ci/groups, Kw]: the kernel's height, 1, is left out."""
        out, channels, _, width = self.packed.shape
        return out, channels, width

    def _convolve(self, x: Tensor, channels_last: bool, residual: Tensor | None = None, clamp: tuple[float, float] | None = None) -> Tensor:
        padding = self.padding if isinstance(self.padding, str) else self.padding[0]
        convolve, window = conv.conv1d_channels_last if channels_last else conv.conv1d, (self.stride[0], padding, self.dilation[0])
        settings = self.bias, *window
        return convolve(x, self.packed, *settings, residual=residual, compute=self.compute, activation=self.activation, clamp=clamp)
