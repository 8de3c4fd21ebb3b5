"""Convolution: the functions on Codes and PackedConv, and the custom ops `halfbyte::conv2d` and `halfbyte::qconv2d` below them.

Kernels read and write images in channels_last. An image in another memory format is copied, and so is its result, which has the memory
format that torch's own convolution gives: contiguous for a contiguous image; with `channels_last` it is left as the kernel wrote it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

from halfbyte.errors import ArgumentError, check_type
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.problem import Addition, Padding, Sizes, Window, flat, window_of
from halfbyte.layouts import convolution, cpu_tiles, gpu_tiles
from halfbyte.layouts.convolution import PackedConv
from halfbyte.ops import functions
from halfbyte.ops.checks import check_bias, check_device, check_operands, check_requantization, code_range
from halfbyte.ops.conv import cpu as cpu_conv
from halfbyte.ops.conv import cuda as cuda_conv
from halfbyte.ops.conv import elementwise
from halfbyte.ops.conv.images import ConvLayer, filter_from_numbers, from_numbers, in_memory_format_of, out_shape
from halfbyte.ops.long_sums import starts
from halfbyte.ops.modes import differentiated, plain, transformed
from halfbyte.ops.registration import Gradients, bounded, casts, differentiable, loops, optional, transformation
from halfbyte.quantizers.check import check_weight

_INFINITE = float("inf")


# Codes and layouts


def quantize_conv(weight: Tensor, format: str | Format, method: str = "absmax", *, name: str = "weight") -> Codes:
    """Quantize the weight of a convolution.

    Blocks run along the channels of one tap (kernel position), so codes have the shape [Co, Kh*Kw, Ci/groups]; in formats with one scale
    per channel or tensor, [Co, Kh*Kw*Ci/groups].

    Args:
        weight: [Co, Ci/groups, Kh, Kw] or [Co, Ci/groups, Kw].
        format: The format, or its name.
        method: As for `quantize`.
        name: The tensor's name in error messages.

    Returns:
        The codes, for `pack_conv`.

    Raises:
        ArgumentError: As for `quantize`.
        FormatError: As for `quantize`.

    Example:
        >>> hb.quantize_conv(torch.randn(8, 32, 3, 3), "q8_0").shape
        (8, 9, 32)
    """
    fmt = as_format(format)
    check_weight(weight, name)
    return functions.quantize(convolution.channels_last(weight.detach(), fmt), fmt, method, name=name)


def pack_conv(codes: Codes, kernel_size: Sizes, groups: int = 1, device: torch.device | str = "cpu") -> PackedConv:
    """Arrange the codes of a convolution's weight in the byte order of a device's kernels; `unpack` is the exact inverse.

    Args:
        codes: From `quantize_conv`.
        kernel_size: (Kh, Kw) or (Kw,); one number for a square kernel.
        groups: Groups of the convolution.
        device: "cpu" or "cuda".

    Returns:
        The packed weight, on the device.

    Example:
        >>> packed = hb.pack_conv(hb.quantize_conv(torch.randn(8, 32, 3, 3), "q8_0"), 3)
        >>> packed.sizes.kernel
        (3, 3)
    """
    check_type(codes, Codes, "pack_conv takes Codes", "pass what quantize_conv(weight, format) gives")
    kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    if not (isinstance(kernel, Sequence) and len(kernel) in (1, 2) and all(isinstance(n, int) and n > 0 for n in kernel)):
        raise ArgumentError(
            f"a kernel's size is (Kh, Kw) or (Kw,), each from 1 on, or one of a square, got {kernel_size!r}: pass the layer's"
        )
    sizes = convolution.filter_of(codes, kernel, groups)
    device = check_device(device)
    return cpu_conv.pack(codes.to(device), sizes) if device.type == "cpu" else cuda_conv.pack(codes.to(device), sizes)


# Public functions


def conv2d(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    *,
    residual: Tensor | None = None,
    compute: str = "auto",
    activation: str = "block",
    clamp: tuple[float, float] | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Convolve images with a quantized weight, add bias and residual, and clamp. The output is channels_last where x is, else contiguous.

    Gradients flow to x, bias and residual; the weight is frozen.

    Args:
        x: [B, C, H, W] or [C, H, W] in float32, bfloat16 or float16.
        packed: The weight, from `pack_conv`, with the number of groups.
        bias: [Co] or None.
        stride: One number, or (height, width).
        padding: One number, (height, width), ((top, bottom), (left, right)), "valid" or "same" (stride 1).
        dilation: One number, or (height, width).
        residual: [B, Co, Ho, Wo] in x's dtype, added before the clamp.
        compute: "float": weights become floating point in registers; "int8": patches of x are quantized on the fly and integers are
            multiplied; "auto": the faster one. Depthwise convolutions are always "float".
        activation: Scales under "int8": as in `linear`, one for each block of a patch or per patch ("row"); or one per image of the batch
            ("image"), which is then quantized once: faster, and less exact where an image's values differ much in size. This requires
            weights with one scale per channel or tensor and no zero.
        clamp: (low, high) applied to the result: (0, inf) is ReLU, (0, 6) ReLU6.
        channels_last: Whether the result is channels_last whatever x is, which saves a copy.

    Returns:
        [B, Co, Ho, Wo] (or [Co, Ho, Wo]) in x's dtype.

    Raises:
        ArgumentError: Shapes, dtypes or settings do not fit.

    Example:
        >>> packed = hb.pack_conv(hb.quantize_conv(torch.randn(8, 32, 3, 3), "q8_0"), 3)
        >>> hb.conv2d(torch.randn(1, 32, 6, 6), packed, padding="same").shape
        torch.Size([1, 8, 6, 6])
    """
    try:
        is_batch = x.dim() != 3
        if not is_batch:
            x, residual = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
        low, high = (-_INFINITE, _INFINITE) if clamp is None else clamp
        numbers = window_numbers(packed.sizes.kernel, stride, padding, dilation)
        settings = (packed.name, packed.numbers, numbers, compute, activation)
        if not plain(x, bias, residual) or differentiated(x, bias, residual):
            run: Callable[..., Tensor] = _transformed_conv2d if transformed() else _ops.conv2d.default
            y = run(x, packed.data, bias, residual, *settings, *optional(low, high))
        elif x.is_cuda:
            y = cuda_conv.packed_conv2d(x, packed, bias, residual, numbers, compute, activation, low, high)
        else:
            y = cpu_conv.conv2d(x, packed.data, bias, residual, *settings, low, high)
        y = y if channels_last else in_memory_format_of(y, x)
        return y if is_batch else y[0]
    except Exception:
        check_operands(x, packed, PackedConv, bias, residual, clamp)
        raise


def conv1d(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: Padding = 0,
    dilation: int = 1,
    *,
    residual: Tensor | None = None,
    compute: str = "auto",
    activation: str = "block",
    clamp: tuple[float, float] | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Convolve sequences with a quantized weight: `conv2d` of images of height 1, with a kernel (1, Kw).

    Args:
        x: [B, C, L] or [C, L].
        packed: The weight, from `pack_conv` with a kernel (Kw,).
        bias: As in `conv2d`.
        stride: Of the kernel.
        padding: As in `conv2d`.
        dilation: Of the kernel.
        residual: [B, Co, Lo], added before the clamp.
        compute: As in `conv2d`.
        activation: As in `conv2d`.
        clamp: As in `conv2d`.
        channels_last: Whether the channels of a position are adjacent in the result's memory.

    Returns:
        [B, Co, Lo] (or [Co, Lo]) in x's dtype, by default contiguous.

    Example:
        >>> packed = hb.pack_conv(hb.quantize_conv(torch.randn(8, 32, 3), "q8_0"), (3,))
        >>> hb.conv1d(torch.randn(1, 32, 10), packed).shape
        torch.Size([1, 8, 8])
    """
    try:
        if x.dim() not in (2, 3):
            raise ArgumentError(f"conv1d takes [B, C, L] or [C, L], got {list(x.shape)}")
        if not isinstance(padding, str):
            sides = flat(padding)
            if len(sides) not in (1, 2):
                raise ArgumentError(f'the padding of conv1d is one number, (left, right), "same" or "valid", got {padding!r}')
            padding = (0, 0), (sides[0], sides[-1])
        more = None if residual is None else residual.unsqueeze(-2)
        y = conv2d(
            x.unsqueeze(-2),
            packed,
            bias,
            (1, stride),
            padding,
            (1, dilation),
            residual=more,
            compute=compute,
            activation=activation,
            clamp=clamp,
            channels_last=True,
        ).squeeze(-2)
        return y if channels_last else in_memory_format_of(y, None)
    except Exception:
        check_operands(x, packed, PackedConv, bias, residual, clamp)
        raise


def qconv2d(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    *,
    in_scale: float,
    in_zero: int,
    out_scale: float,
    out_zero: int,
    clamp: tuple[int, int] | None = None,
) -> Tensor:
    """Convolve int8 images, with requantization fused: `qlinear` of each patch. The output is channels_last where x is, else contiguous.

    Args:
        x: int8 [B, C, H, W]; padded with `in_zero`, the code of 0.
        packed: The weight, from `pack_conv`.
        bias: [Co] in floating point, or None.
        stride: As in `conv2d`.
        padding: As in `conv2d`.
        dilation: As in `conv2d`.
        in_scale: Scale of the input.
        in_zero: Zero point of the input.
        out_scale: Scale of the output.
        out_zero: Zero point of the output.
        clamp: (low, high) in output codes; (out_zero, 127) is ReLU; None is (-128, 127).

    Returns:
        int8 [B, Co, Ho, Wo].

    Example:
        >>> packed = hb.pack_conv(hb.quantize_conv(torch.randn(8, 32, 3, 3), "int8_channel"), 3)
        >>> scales = {"in_scale": 0.1, "in_zero": 0, "out_scale": 0.5, "out_zero": 3}
        >>> hb.qconv2d(torch.zeros(1, 32, 5, 5, dtype=torch.int8), packed, **scales).shape
        torch.Size([1, 8, 3, 3])
    """
    try:
        low, high = code_range(clamp)
        table = conv_requantization_table(packed, bias, in_scale=in_scale, in_zero=in_zero, out_scale=out_scale, out_zero=out_zero)
        numbers = window_numbers(packed.sizes.kernel, stride, padding, dilation)
        return in_memory_format_of(qconv2d_with(x, packed, table, numbers, in_zero, (low, high)), x)
    except Exception:
        check_operands(x, packed, PackedConv, bias, clamp=clamp)
        raise


def qconv2d_with(
    x: Tensor, packed: PackedConv, table: Tensor, window_numbers: tuple[int, ...], in_zero: int, clamp: tuple[int, int] = (-128, 127)
) -> Tensor:
    """`qconv2d` with the invariants of repeated calls precomputed: `conv_requantization_table` and `Window.numbers`. -> channels_last"""
    run: Callable[..., Tensor] = _ops.qconv2d.default
    if plain(x):
        if x.is_cuda:
            return cuda_conv.packed_qconv2d(x, packed, table, window_numbers, in_zero, clamp)
        run = cpu_conv.qconv2d
    return run(x, packed.data, table, packed.name, packed.numbers, window_numbers, in_zero, *clamp)


def qconv2d_added(
    x: Tensor, packed: PackedConv, table: Tensor, window_numbers: tuple[int, ...], in_zero: int, clamp: tuple[int, int], addition: Addition
) -> Tensor:
    """`qconv2d_with` whose codes are added to others that broadcast with them, on GPUs before they are written if of one shape."""
    if x.is_cuda and plain(x, None, addition.other):
        return cuda_conv.packed_qconv2d(x, packed, table, window_numbers, in_zero, clamp, addition)
    return elementwise.combine(*addition.of(qconv2d_with(x, packed, table, window_numbers, in_zero, clamp)))


def conv_requantization_table(
    packed: PackedConv, bias: Tensor | None, *, in_scale: float, in_zero: int, out_scale: float, out_zero: int
) -> Tensor:
    """The table that `halfbyte::qconv2d` reads besides the weight, float32: offset, multiplier and int32 start of each output, in the order
    of `cpu_conv.table` or `cuda_conv.table`."""
    sizes = packed.sizes
    check_requantization(sizes.format, in_scale, in_zero, out_scale, out_zero)
    sums, scale = functions.integer_sums(packed, sizes.out, sizes.taps * sizes.channels, sizes.taps)
    if bias is not None:
        check_bias(bias, sizes.out, packed.device)
    start = starts(sums.sum(1, dtype=torch.int32), sizes.k)
    rows = functions.requantization_rows(start, scale, bias, in_scale, in_zero, out_scale, out_zero)
    return cuda_conv.table(rows, sums, sizes, in_zero) if rows.is_cuda else cpu_conv.table(rows, sizes)


def module_window(module: ConvLayer) -> Window:
    """The stride, padding with zeros and dilation of a Conv1d or Conv2d, quantized or not; of a Conv1d as one of images of height 1."""
    kernel, stride, dilation = (((1, *sizes)[-2], sizes[-1]) for sizes in (module.kernel_size, module.stride, module.dilation))
    padding = 0 if module.padding_mode != "zeros" else module.padding if isinstance(module.padding, str) else (0, *module.padding)[-2:]
    return window_of(kernel, stride, padding, dilation)


def window_numbers(kernel: tuple[int, int], stride: Sizes, padding: Padding, dilation: Sizes) -> tuple[int, ...]:
    """`Window.numbers` of a caller's arguments, cached: parsing takes longer than a small kernel."""
    if torch.compiler.is_compiling():
        return window_of(kernel, stride, padding, dilation).numbers
    try:
        return _parsed_window(kernel, stride, padding, dilation)
    except TypeError:  # lists
        try:
            return _parsed_window(kernel, _frozen(stride), _frozen(padding), _frozen(dilation))
        except ArgumentError:  # whose text names the lists
            return window_of(kernel, stride, padding, dilation).numbers


@functools.lru_cache(maxsize=4096)
def _parsed_window(kernel: tuple[int, int], stride: Sizes, padding: Padding, dilation: Sizes) -> tuple[int, ...]:
    return window_of(kernel, stride, padding, dilation).numbers


def _frozen(value: object) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


# Custom ops

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str format, int[] sizes, int[] window, str compute, str activation, "
    "float? low, float? high) -> Tensor"
)
_library.define(
    "qconv2d(Tensor x, Tensor weight, Tensor table, str format, int[] sizes, int[] window, int in_zero, int low, int high) -> Tensor"
)
_library.define("dequantize_conv(Tensor weight, str format, int[] sizes, ScalarType dtype) -> Tensor")
_ops = torch.ops.halfbyte


def _dequantize(weight: Tensor, format: str, filter_numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    sizes = filter_from_numbers(format, filter_numbers)
    layout = convolution.CANONICAL if sizes.depthwise else gpu_tiles.NAME if weight.is_cuda else cpu_tiles.NAME
    return convolution.dequantize(PackedConv(sizes, layout, weight), dtype).contiguous()


def _dequantize_fake(weight: Tensor, format: str, filter_numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    out, channels, kh, kw, _ = filter_numbers
    return weight.new_empty((out, channels, kh, kw), dtype=dtype)


def _fake(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    format, filter_numbers, window_numbers = next(arguments[i : i + 3] for i, a in enumerate(arguments) if isinstance(a, str))
    _, out, height, width = shape = out_shape(x, *from_numbers(format, filter_numbers, window_numbers))
    return x.new_empty_strided(shape, (height * width * out, 1, width * out, out))


def _image_gradient(
    grad: Tensor, weight: Tensor, shape: torch.Size, format: str, filter_numbers: Sequence[int], window_numbers: Sequence[int], *_: object
) -> Tensor:
    """The gradient of a convolution with the dequantized weight."""
    sizes, window = from_numbers(format, filter_numbers, window_numbers)
    top, bottom, left, right = window.padding
    batch, channels, height, width = shape
    floats = _ops.dequantize_conv.default(weight, format, filter_numbers, grad.dtype)
    padded = (batch, channels, height + top + bottom, width + left + right)
    whole: Tensor = conv2d_input(padded, floats, grad, window.stride, 0, window.dilation, sizes.groups)
    return whole[:, :, top : top + height, left : left + width]


def _image_product(
    x: Tensor, weight: Tensor, format: str, filter_numbers: Sequence[int], window_numbers: Sequence[int], *_: object
) -> Tensor:
    """The convolution with the dequantized weight."""
    sizes, window = from_numbers(format, filter_numbers, window_numbers)
    top, bottom, left, right = window.padding
    floats = _ops.dequantize_conv.default(weight, format, filter_numbers, x.dtype)
    padded = functional.pad(x, (left, right, top, bottom))
    return functional.conv2d(padded, floats, None, window.stride, 0, window.dilation, sizes.groups)


_gradients = Gradients(_ops.conv2d.default, _image_product, _image_gradient, lambda grad: grad.sum((0, 2, 3)), (-1, 1, 1))
_transformed_conv2d = transformation(_gradients)
for _device, _home in (("CPU", cpu_conv), ("CUDA", cuda_conv)):
    _library.impl("conv2d", bounded(_home.conv2d), _device)
    _library.impl("conv2d", partial(differentiable, _gradients, bounded(_home.conv2d)), f"Autograd{_device}")
    _library.impl("qconv2d", _home.qconv2d, _device)
    _library.impl("dequantize_conv", _dequantize, _device)
casts(_library, "conv2d", 0, 3)
loops(_library, "conv2d", "qconv2d")
torch.library.register_fake("halfbyte::conv2d", _fake, lib=_library)
torch.library.register_fake("halfbyte::qconv2d", _fake, lib=_library)
torch.library.register_fake("halfbyte::dequantize_conv", _dequantize_fake, lib=_library)
