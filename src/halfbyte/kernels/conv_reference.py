"""Convolution by its definition: patches of the input times the weight as a matrix, in float64, without regard to speed.

    y[b, co, oy, ox] = sum over kh, kw, ci of  w[co, ci, kh, kw] * x[b, ci, oy*stride - pad + kh*dilation, ox*stride - pad + kw*dilation]

where x is padded with 0. A patch holds its taps row by row, with the channels of a tap together and padded with zeros to whole
blocks (`layouts/convolution.py`), so that `reference.py`'s definitions for linear layers apply to each group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels import reference
from halfbyte.kernels.problem import Activation, Compute, Pair, Window
from halfbyte.layouts.convolution import Filter, channels_first, filter_of, groups_of


def patches(x: Tensor, sizes: Filter, window: Window, fill: float = 0) -> Tensor:
    """x [B, C, H, W] -> [groups, B, Ho, Wo, K] in x's dtype, padded with `fill`."""
    top, bottom, left, right = window.padding
    ho, wo = window.out_size((x.shape[2], x.shape[3]), sizes.kernel)
    x = torch.nn.functional.pad(x, (left, right, top, bottom), value=fill)
    x = x.reshape(x.shape[0], sizes.groups, sizes.channels, *x.shape[2:]).permute(1, 0, 3, 4, 2)
    x = torch.nn.functional.pad(x, (0, sizes.padded - sizes.channels))
    (sh, sw), (dh, dw) = window.stride, window.dilation
    taps = [
        x[:, :, kh * dh : kh * dh + (ho - 1) * sh + 1 : sh, kw * dw : kw * dw + (wo - 1) * sw + 1 : sw]
        for kh in range(sizes.kernel[0])
        for kw in range(sizes.kernel[1])
    ]
    return torch.cat(taps, dim=-1)


def _each_group(codes: Codes, sizes: Filter, x: Tensor, bias: Tensor | None, run: Callable[..., Tensor], *settings: object) -> Tensor:
    """`run(patches, matrix, bias, *settings)` of each group, joined: [B, Co, Ho, Wo]."""
    biases = [None] * sizes.groups if bias is None else bias.chunk(sizes.groups)
    parts = [run(rows, matrix, group_bias, *settings) for rows, matrix, group_bias in zip(x, groups_of(codes, sizes), biases, strict=True)]
    return torch.cat(parts, dim=-1).movedim(-1, 1)


def conv2d(
    x: Tensor,
    codes: Codes,
    kernel: Pair,
    window: Window,
    bias: Tensor | None = None,
    groups: int = 1,
    compute: Compute = "float",
    activation: Activation = "block",
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """float64 [B, Co, Ho, Wo]; `compute` and `activation` as in `reference.linear`, of each patch. See `quantized_images` for "image"."""
    sizes = filter_of(codes, kernel, groups)
    return _each_group(codes, sizes, patches(x, sizes, window), bias, reference.linear, compute, activation, clamp)


def error_bound(
    x: Tensor,
    codes: Codes,
    kernel: Pair,
    window: Window,
    bias: Tensor | None = None,
    groups: int = 1,
    compute: Compute = "float",
    activation: Activation = "block",
) -> Tensor:
    """The bound of the error of a kernel's float32 sums: `reference.error_bound` of each patch."""
    sizes = filter_of(codes, kernel, groups)
    return _each_group(codes, sizes, patches(x, sizes, window), bias, reference.error_bound, compute, activation)


def qconv2d(
    xq: Tensor,
    codes: Codes,
    kernel: Pair,
    window: Window,
    bias: Tensor | None,
    in_scale: float,
    in_zero: int,
    out_scale: float,
    out_zero: int,
    groups: int = 1,
    clamp: tuple[int, int] = (-128, 127),
) -> reference.Requantized:
    """int8 [B, C, H, W] -> int8 [B, Co, Ho, Wo] as `reference.qlinear` of each patch. x is padded with `in_zero`, the code of 0."""
    sizes = filter_of(codes, kernel, groups)
    rows = patches(xq, sizes, window, in_zero)
    settings = in_scale, in_zero, out_scale, out_zero, clamp
    parts = (_each_group(codes, sizes, rows, bias, lambda *args, i=i: reference.qlinear(*args)[i], *settings) for i in range(3))
    return reference.Requantized(*parts)


def quantized_images(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes images [B, C, H, W] as `activation="image"` does: int8 codes, and the scale of each image, float32 [B].

    With fl the rounding to float32 and rne to the nearest integer, ties to even:

        amax = max|x|    scale = fl(amax * fl(1/127))    inverse = fl(127 / amax), or 0 where that is not finite
        q = rne(fl(x * inverse))

    The scale of an image with a NaN or infinity is NaN, and its codes are 0. A convolution is then
    clamp(scale * scale[co] * sum(q * codes) + bias + residual).
    """
    amax = x.float().abs().flatten(1).amax(1)
    inverse = torch.full_like(amax, 127) / amax
    inverse = torch.where(torch.isfinite(inverse) & torch.isfinite(amax), inverse, 0)
    q = torch.round(x.float() * inverse.view(-1, 1, 1, 1)).clamp(-127, 127)
    finite = torch.isfinite(amax)
    scale = torch.where(finite, amax * torch.full_like(amax, 1 / 127), torch.nan)
    return torch.where(finite.view(-1, 1, 1, 1), q, 0).to(torch.int8), scale


def conv2d_of_images(
    x: Tensor, codes: Codes, kernel: Pair, window: Window, bias: Tensor | None = None, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """float64 [B, Co, Ho, Wo] under `activation="image"`, and how far a kernel's float32 steps may be from it."""
    q, scale = quantized_images(x)
    floats = channels_first(codes.dequantize(torch.float64), kernel)
    top, bottom, left, right = window.padding
    padded = torch.nn.functional.pad(q.double(), (left, right, top, bottom))
    exact = torch.nn.functional.conv2d(padded, floats, None, window.stride, 0, window.dilation, groups) * scale.double().view(-1, 1, 1, 1)
    y = exact if bias is None else exact + bias.double().view(1, -1, 1, 1)
    # float(acc), the product of the scales, their product, and the bias added: four roundings.
    return y, 2.0**-23 * (2 * exact.abs() + y.abs()) + 2.0**-126
