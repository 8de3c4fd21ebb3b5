"""Pooling of images [B, C, H, W] by halfbyte's kernels: of int8 codes, and on GPUs max pooling in 16 bits.

    max      y[b, c, i, j] = max over the taps of  x[b, c, i * stride - padding + tap * dilation]
    average  y[b, c]       = round(mean over H and W of  (x - zero)) + zero

`kernel_pool` translates a module of torch, for networks on int8 codes (nn/static/integer.py); `max_pool2d` computes one in floating point,
for fused convolutions (nn/fused_convolutions.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.kernels.problem import Window
from halfbyte.ops import cuda
from halfbyte.ops.conv.images import channels_last, in_memory_format_of
from halfbyte.ops.modes import plain

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.steps import ProgramStep

_Pair = tuple[int, int]  # height, width
_CACHED_SHAPES = 4096
_MOST_AVERAGED = (1 << 31) // 255  # pixels: kernels sum their differences from `zero`, up to 255 each, in int32
_GPU_ELEMENTS = 1 << 31  # the GPU's kernel takes images of fewer elements: it counts them in 32 bits
_GPU_OUTPUTS = (1 << 31) - 64  # pixels of all outputs that it takes, for the same reason: a program computes 64


class KernelPool(NamedTuple):
    """Pooling of images of one size by a kernel.

    kernel    Kh, Kw
    window    stride, padding and dilation
    out_size  Ho, Wo
    zero      for average pooling, the code that means 0; None: max pooling
    """

    kernel: _Pair
    window: Window
    out_size: _Pair
    zero: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, Ho, Wo], channels_last."""
        if x.is_cuda:
            from halfbyte.kernels.gpu.conv.pool import pool as gpu_pool

            with cuda.on(x):
                return gpu_pool(channels_last(x), *self)
        from halfbyte.kernels.cpu.conv.pool import pool

        return pool(channels_last(x), *self)

    def step(self, x: Tensor) -> ProgramStep | None:
        """Return the same as a step of a native program, for images on the CPU with x's sizes and strides; None unless channels_last."""
        from halfbyte.kernels.cpu.conv.pool import step

        return step(x, *self) if x.is_contiguous(memory_format=torch.channels_last) else None


def kernel_pool(x: Tensor, pool: nn.Module, zero: int = 0) -> KernelPool | None:
    """Return what `pool` computes of images like x as a kernel's pooling; None where there is no kernel for it.

    Args:
        x: int8 codes, or on a GPU float16 or bfloat16 for max pooling.
        pool: MaxPool2d without indices, or AdaptiveAvgPool2d of at most 2^31 / 255 pixels to one; there is no kernel for other modules.
        zero: The code that means 0, for the latter.
    """
    if x.dim() != 4 or x.numel() == 0 or (x.is_cuda and (why_no_triton() is not None or x.shape[1:].numel() >= _GPU_ELEMENTS)):
        return None
    if isinstance(pool, nn.MaxPool2d):
        kernel, stride, padding, dilation = map(_pair, (pool.kernel_size, pool.stride or pool.kernel_size, pool.padding, pool.dilation))
        by_kernel = _max_pool(x.shape, kernel, stride, padding, dilation, pool.ceil_mode)
        return None if x.is_cuda and x.shape[0] * math.prod(by_kernel.out_size) > _GPU_OUTPUTS else by_kernel
    if isinstance(pool, nn.AdaptiveAvgPool2d) and pool.output_size in (1, (1, 1)) and x.shape[2:].numel() <= _MOST_AVERAGED:
        return KernelPool((x.shape[2], x.shape[3]), Window(), (1, 1), zero)
    return None


def max_pool2d(x: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """Return pool(x), in the memory format of x: by the GPU's kernel where it applies, otherwise by torch."""
    in_16_bits = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and not pool.return_indices
    if in_16_bits and plain(x) and not (x.requires_grad and torch.is_grad_enabled()) and (by_kernel := kernel_pool(x, pool)):
        return in_memory_format_of(by_kernel(x), x)
    return cast(Tensor, pool(x))


@functools.lru_cache(maxsize=_CACHED_SHAPES)
def _max_pool(shape: torch.Size, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, ceil_mode: bool) -> KernelPool:
    """Max pooling of images of a shape; torch checks the settings and says which size the result has."""
    images = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    pooled = nn.functional.max_pool2d(images, kernel, stride, padding, dilation, ceil_mode)
    vertical, horizontal = padding
    window = Window(stride, (vertical, vertical, horizontal, horizontal), dilation)
    return KernelPool(kernel, window, (pooled.shape[2], pooled.shape[3]))


def _pair(size: int | Sequence[int]) -> _Pair:
    """Return (height, width) of what torch takes for both: a number, or a sequence of one or two."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return cast(_Pair, sizes * 2 if len(sizes) == 1 else sizes)
