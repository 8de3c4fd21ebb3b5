"""Convolutions of images that are enlarged twice by nearest neighbours, on a CPU: what `Upsample2D` of diffusion models computes.

`nn/fused_blocks.py` calls `UpsampledConv`; the kernel is in `kernels/cpu/upsampled_conv.py`, which functions import here, so that
`import halfbyte` does not import llvmlite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import PackedConv
from halfbyte.ops.conv import cpu
from halfbyte.ops.conv.images import channels_last
from halfbyte.ops.modes import plain

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.conv.gathered import ImageConvKernel

_PLANS = 64  # of a layer in each Python thread


class UpsampledConv:
    """y = conv2d(interpolate(x, scale_factor=2, mode="nearest")), of a convolution that quantizes images with one scale each, bit for bit.

    The weight is read where it lies; a bias that is not contiguous float32 is copied: a caller that writes to it makes a new object.
    """

    def __init__(self, packed: PackedConv, bias: Tensor | None, window_numbers: tuple[int, ...], compute: str, activation: str) -> None:
        self._packed, self._how = packed, (window_numbers, compute, activation)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._kernels: PlanCache[tuple[ImageConvKernel, Tensor, Window] | str] = PlanCache(_PLANS)

    def __call__(self, x: Tensor) -> Tensor | None:
        """Compute y [B, Co, 2 H, 2 W], channels_last, of x [B, C, H, W]; None where no native call does, as of tensors off the CPU."""
        if not plain(x) or not x.is_cpu or x.dim() != 4 or not x.numel():
            return None
        found = self._kernels.get((x.shape, x.dtype), lambda: self._kernel(x))
        if isinstance(found, str):
            return None
        kernel, weights, window = found
        return kernel(channels_last(x), window, weights, self._bias, float("-inf"), float("inf"))

    def _kernel(self, x: Tensor) -> tuple[ImageConvKernel, Tensor, Window] | str:
        """The kernel for images like x, its weights and window, or why there is none."""
        from halfbyte.kernels.cpu.conv.gathered import ConvKernel, ImageConvKernel
        from halfbyte.kernels.cpu.upsampled_conv import UpsampledConvKernel, why_not

        batch, channels, height, width = x.shape
        enlarged = torch.empty((batch, channels, 2 * height, 2 * width), dtype=x.dtype, device="meta")
        found = cpu.kernel_for(enlarged, self._packed, *self._how, as_packed=True)
        if found is None:
            return "an image is empty"
        kernel, weights, window, _ = found
        if not isinstance(kernel, ImageConvKernel) or not isinstance(kernel.codes, ConvKernel):
            return "its images are not quantized with one scale each"
        return why_not(kernel.codes, window) or (ImageConvKernel(UpsampledConvKernel(kernel.codes)), weights, window)
