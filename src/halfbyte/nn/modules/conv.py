"""QuantConv1d, QuantConv2d, QuantConv3d and QuantConvTranspose1d, 2d and 3d in place of torch's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.layouts.convolution import PackedConv
from halfbyte.layouts.folding import Fold
from halfbyte.nn.described import CONVOLUTIONS, check_compute
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.modules.weight_view import Step, WeightView, traced
from halfbyte.ops.conv import folded, transposed
from halfbyte.ops.conv import functions as conv
from halfbyte.ops.conv.images import in_memory_format_of, is_channels_last

FloatConv = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class _How(TypedDict):
    """Keywords of `conv2d` and `conv1d`."""

    compute: str
    activation: str
    clamp: tuple[float, float] | None
    channels_last: bool


class QuantConv2d(QuantModule):
    """A convolution like nn.Conv2d, with a quantized weight. Its output is channels_last where its input is, else contiguous.

    Args:
        packed: The weight, [out_channels, in_channels / groups, Kh, Kw].
        like: The nn.Conv2d or QuantConv2d that it replaces: stride, padding, its mode, dilation and bias are copied from it. The bias stays
            in floating point, frozen.
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
    fold: Fold  # how the weight of the float layer became `packed`
    compute: str
    activation: str
    leaves_channels_last = False  # whatever x is: `fused_blocks.py` sets it where channels_last is what follows reads
    float_class: type[nn.Module] | None = None  # a subclass of torch's convolution, whose forward it has; see subclassed.py

    def __init__(
        self,
        packed: PackedConv,
        like: FloatConv | QuantConv2d,
        compute: str = "auto",
        activation: str = "block",
        *,
        dtype: torch.dtype,
        error: float | None = None,
    ) -> None:
        super().__init__(packed, dtype, error)
        sizes, fold = packed.sizes, fold_of(like)
        assert fold is not None
        wanted = (sizes.out, sizes.channels * sizes.groups, sizes.kernel, sizes.groups)
        got = (like.out_channels * fold.outputs, like.in_channels * fold.channels, fold.image_kernel, image_groups(like, fold))
        if got != wanted:
            raise ArgumentError(f"a weight of (outputs, inputs, kernel, groups) {wanted} does not fit a {type(like).__name__} of {got}")
        check_compute(compute, activation)
        self.fold = fold
        self.out_channels, self.in_channels, self.groups = like.out_channels, like.in_channels, like.groups
        self.kernel_size, self.stride, self.dilation = tuple(like.kernel_size), tuple(like.stride), tuple(like.dilation)
        self.padding, self.padding_mode = like.padding, like.padding_mode
        self.compute, self.activation = compute, activation
        bias = like.bias
        self.register_parameter("bias", bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self._zeros = like.padding if like.padding_mode == "zeros" else (0,) * len(like.kernel_size)  # the padding of the op

    def forward(
        self, x: Tensor, added: Tensor | None = None, clamp: tuple[float, float] | None = None, channels_last: bool = False
    ) -> Tensor:
        """x [B, C, H, W] or [C, H, W] in float32, bfloat16 or float16 -> [B, Co, Ho, Wo] of the same dtype; with `added` to it, of whatever
        shape, and then clamped; `channels_last`: in this memory format whatever x has, which saves a copy."""
        channels_last = channels_last or self.leaves_channels_last
        if self.padding_mode != "zeros":
            x = folded.pad_by_mode(x, self)
        if added is None or self.is_residual(added, x):
            return self._convolve(x, channels_last, residual=added, clamp=clamp)
        y = self._convolve(x, channels_last) + added
        return y if clamp is None else y.clamp(*clamp)

    def _convolve(self, x: Tensor, channels_last: bool, residual: Tensor | None = None, clamp: tuple[float, float] | None = None) -> Tensor:
        how: _How = {"compute": self.compute, "activation": self.activation, "clamp": clamp, "channels_last": channels_last}
        return conv.conv2d(x, self.packed, self.bias, self.stride, self._zeros, self.dilation, residual=residual, **how)

    def is_residual(self, added: Tensor, x: Tensor) -> bool:
        """Whether it is as large as the result and of its type, so that the convolution itself adds it."""
        dims = len(self.kernel_size)
        if added.dtype != x.dtype or added.dim() != x.dim() or x.dim() <= dims:
            return False
        size = folded.out_size(x.shape[-dims:], self.fold, folded.movement_of(self, zeros=self._zeros))
        return added.shape == (*x.shape[: -dims - 1], self.out_channels, *size)

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
        out, channels, _, width = self.packed_anywhere.shape
        return out, channels, width

    def _convolve(self, x: Tensor, channels_last: bool, residual: Tensor | None = None, clamp: tuple[float, float] | None = None) -> Tensor:
        padding = self._zeros if isinstance(self._zeros, str) else self._zeros[0]
        how: _How = {"compute": self.compute, "activation": self.activation, "clamp": clamp, "channels_last": channels_last}
        return conv.conv1d(x, self.packed, self.bias, self.stride[0], padding, self.dilation[0], residual=residual, **how)


def fold_of(module: nn.Module) -> Fold | None:
    """How the weight of a convolution, quantized or not, becomes one of images; None for any other module."""
    if isinstance(module, QuantConv2d):
        return module.fold
    if isinstance(module, QuantModule):  # of a network on codes
        kind, packed = CONVOLUTIONS.get(module.kind), module.packed_anywhere
        return Fold(packed.sizes.kernel[-kind:]) if kind and isinstance(packed, PackedConv) else None
    return folded.fold_of(module, transposed=module.transposed) if isinstance(module, FloatConv) else None


def image_groups(module: FloatConv | QuantConv2d, fold: Fold) -> int:
    """Groups of the convolution of images that is computed."""
    return module.groups * fold.channels if fold.depthwise else module.groups


class _FoldedConv(QuantConv2d):
    """Base of those whose packed weight is not that of the float layer, but `fold` of it."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[Co, Ci/groups, *kernel], of a transposed one [Ci, Co/groups, *kernel]"""
        first, second = (self.in_channels, self.out_channels) if self.fold.phases else (self.out_channels, self.in_channels)
        return (first, second // self.groups, *self.kernel_size)

    @property
    def weight(self) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return traced(self.fold.unfold(ops.dequantize(self.packed, self.dtype)), self)
        steps = (Step(self.fold.unfold, (), {}, None),)
        check = self._buffers.get("packed_check")
        return WeightView(self.packed, self.dtype, self.weight_shape, check=check, steps=steps, base=self.packed.shape)


class QuantConv3d(_FoldedConv):
    """A convolution like nn.Conv3d: [B, C, D, H, W] or [C, D, H, W] -> [B, Co, Do, Ho, Wo] or [Co, Do, Ho, Wo].

    Frames become images whose channels are those of all frames that the kernel covers, and a convolution of these with the kernel (Kh, Kw)
    is computed; of a kernel that moves by its own size, a product of patches. Sums over all taps are in float32. An activation scale per
    "image" is one for what the kernel covers along D.

    Args:
        packed: The weight, from `pack_conv`, in the order of `layouts/folding.py`.
        like: The nn.Conv3d whose settings and bias it takes.
        compute: See `conv2d`.
        activation: See `conv2d`.
        dtype: Of the float weight that it replaces.
        error: As in QuantModule.

    Example:
        >>> layer = hb.quantize_(nn.Sequential(nn.Conv3d(32, 8, 3)), "int8_channel")[0]
        >>> type(layer).__name__, layer(torch.randn(1, 32, 4, 5, 5)).shape
        ('QuantConv3d', torch.Size([1, 8, 2, 3, 3]))
    """

    kind = "Conv3d"

    def _convolve(self, x: Tensor, channels_last: bool, residual: Tensor | None = None, clamp: tuple[float, float] | None = None) -> Tensor:
        if x.dim() == 4:
            return self._convolve(x[None], channels_last, None if residual is None else residual[None], clamp)[0]
        settings = folded.Conv2dSettings(self.bias, self.compute, self.activation, clamp)
        y = folded.convolve(x, self.packed, self.fold, folded.movement_of(self, zeros=self._zeros), settings, residual)
        return y if channels_last else in_memory_format_of(y, x)


class QuantConvTranspose2d(_FoldedConv):
    """A transposed convolution like nn.ConvTranspose2d: [B, C, H, W] or [C, H, W] -> [B, Co, Ho, Wo] or [Co, Ho, Wo].

    The outputs that are a stride apart are outputs of an ordinary convolution, with the taps that reach them; all of these are computed as
    one with stride² times as many channels. Where the stride does not divide the kernel, zeros complete the taps, as `report` says.

    Args:
        packed: The weight, from `pack_conv`, in the order of `layouts/folding.py`.
        like: The layer whose settings and bias it takes.
        compute: See `conv2d`.
        activation: See `conv2d`.
        dtype: Of the float weight that it replaces.
        error: As in QuantModule.

    Example:
        >>> layer = hb.quantize_(nn.Sequential(nn.ConvTranspose2d(32, 8, 2, 2)), "int8_channel")[0]
        >>> type(layer).__name__, layer(torch.randn(1, 32, 5, 5)).shape
        ('QuantConvTranspose2d', torch.Size([1, 8, 10, 10]))
    """

    kind = "ConvTranspose2d"
    output_padding: tuple[int, ...]

    def __init__(self, packed: PackedConv, like: FloatConv | QuantConv2d, *settings: str, dtype: torch.dtype, error: float | None = None):
        super().__init__(packed, like, *settings, dtype=dtype, error=error)
        assert isinstance(like, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | QuantConvTranspose2d)
        self.output_padding = tuple(like.output_padding)

    @property
    def halfbyte_remark(self) -> str | None:
        zeros = self.fold.zeros
        if not zeros:
            return None
        return f"{zeros:.0%} of the packed weight are zeros, as the stride {self.stride} does not divide the kernel {self.kernel_size}"

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        output_size: Sequence[int] | None = None,
        *,
        clamp: tuple[float, float] | None = None,
        channels_last: bool = False,
    ) -> Tensor:
        """x [B, C, *size] or [C, *size] -> [B, Co, *out] or [Co, *out] of the same dtype, clamped. output_size: `out`, where the stride
        allows several; by default `output_padding` decides."""
        n = len(self.kernel_size)
        if x.dim() == n + 1:
            sizes = output_size[1:] if output_size is not None and len(output_size) == n + 1 else output_size
            return self.forward(x[None], sizes, clamp=clamp, channels_last=channels_last)[0]
        if x.dim() != n + 2 or x.shape[1] != self.in_channels:
            named = ("L", "H, W", "D, H, W")[n - 1]
            raise ArgumentError(f"a {self.kind} of {self.in_channels} channels takes [B, {self.in_channels}, {named}], got {list(x.shape)}")
        more = self.output_padding if output_size is None else self._padding_for(x.shape[2:], output_size)
        settings = folded.Conv2dSettings(self.bias, self.compute, self.activation, clamp)
        last = channels_last or (n > 1 and is_channels_last(x))
        y = transposed.convolve_transposed(x, self.packed, self.fold, self, more, settings, channels_last=last)
        return y if channels_last else in_memory_format_of(y, x)

    def _padding_for(self, size: Sequence[int], output_size: Sequence[int]) -> tuple[int, ...]:
        """The output_padding that gives results of `output_size`, which may name batch and channels too."""
        n = len(self.kernel_size)
        least = transposed.transposed_size(size, self, (0,) * n)
        more = tuple(wanted - size for wanted, size in zip(output_size[-n:], least, strict=False))
        if len(output_size) not in (n, n + 2) or not all(0 <= extra < stride for extra, stride in zip(more, self.stride, strict=True)):
            most = [size + stride - 1 for size, stride in zip(least, self.stride, strict=True)]
            raise ArgumentError(f"output_size is {n} sizes from {list(least)} to {most}, got {list(output_size)}: pass one of those")
        return more

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, output_padding={self.output_padding}"


class QuantConvTranspose1d(QuantConvTranspose2d):
    """A transposed convolution like nn.ConvTranspose1d: [B, C, L] or [C, L] -> [B, Co, Lo] or [Co, Lo]; see QuantConvTranspose2d.

    Args:
        packed: As for QuantConvTranspose2d.
        like: The layer whose settings and bias it takes.
        compute: See `conv2d`.
        activation: See `conv2d`.
        dtype: Of the float weight that it replaces.
        error: As in QuantModule.

    Example:
        >>> layer = hb.quantize_(nn.Sequential(nn.ConvTranspose1d(32, 8, 2, 2)), "int8_channel")[0]
        >>> type(layer).__name__, layer(torch.randn(1, 32, 5)).shape
        ('QuantConvTranspose1d', torch.Size([1, 8, 10]))
    """

    kind = "ConvTranspose1d"


class QuantConvTranspose3d(QuantConvTranspose2d):
    """A transposed convolution like nn.ConvTranspose3d: [B, C, D, H, W] -> [B, Co, Do, Ho, Wo], or both without B.

    See QuantConvTranspose2d, and QuantConv3d for its taps along D.

    Args:
        packed: As for QuantConvTranspose2d.
        like: The layer whose settings and bias it takes.
        compute: See `conv2d`.
        activation: See `conv2d`.
        dtype: Of the float weight that it replaces.
        error: As in QuantModule.

    Example:
        >>> layer = hb.quantize_(nn.Sequential(nn.ConvTranspose3d(32, 8, 2, 2)), "int8_channel")[0]
        >>> type(layer).__name__, layer(torch.randn(1, 32, 2, 5, 5)).shape
        ('QuantConvTranspose3d', torch.Size([1, 8, 4, 10, 10]))
    """

    kind = "ConvTranspose3d"


QUANT_CONVOLUTIONS: dict[str, type[QuantConv2d]] = {
    form.kind: form for form in (QuantConv1d, QuantConv2d, QuantConv3d, QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d)
}
