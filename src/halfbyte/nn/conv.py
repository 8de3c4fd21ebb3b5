"""QuantConv1d and QuantConv2d in place of nn.Conv1d and nn.Conv2d."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError
from halfbyte.layouts.convolution import PackedConv
from halfbyte.nn.modules import QuantModule, check_compute
from halfbyte.ops import conv


class QuantConv2d(QuantModule):
    """A convolution like nn.Conv2d, with a quantized weight. Its output is channels_last.

    packed      the weight, [out_channels, in_channels / groups, Kh, Kw]
    like        the nn.Conv2d or QuantConv2d that it replaces: stride, padding, dilation and bias are copied from it. The bias stays in
                floating point, frozen
    compute, activation   see `conv2d`
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
        bias = like.bias
        self.register_parameter("bias", bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, H, W] or [C, H, W] in float32, bfloat16 or float16 -> [B, Co, Ho, Wo] of the same dtype."""
        moves = self.stride, self.padding, self.dilation
        return conv.conv2d(x, self.packed, self.bias, *moves, compute=self.compute, activation=self.activation)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}, format={self.packed.format}"
        )


class QuantConv1d(QuantConv2d):
    """A convolution like nn.Conv1d, of [B, C, L] or [C, L]."""

    kind = "Conv1d"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[Co, Ci/groups, Kw]: the kernel's height, 1, is left out."""
        out, channels, _, width = self.packed.shape
        return out, channels, width

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, L] or [C, L] in float32, bfloat16 or float16 -> [B, Co, Lo] of the same dtype."""
        padding = self.padding if isinstance(self.padding, str) else self.padding[0]
        moves = self.stride[0], padding, self.dilation[0]
        return conv.conv1d(x, self.packed, self.bias, *moves, compute=self.compute, activation=self.activation)
