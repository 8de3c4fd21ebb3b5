"""Pools of int8 images on the codes themselves, and on GPUs those of largest numbers in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.kernels.problem import Window
from halfbyte.ops import cuda
from halfbyte.ops.conv.images import channels_last, in_memory_format_of
from halfbyte.ops.library import plain

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.steps import ProgramStep

_KEPT = 4096
_LARGEST = 1 << 31  # elements of an image from which on the GPU's kernel, which counts them in 32 bits, is none for it


class Pooling(NamedTuple):
    """A pool of images [B, C, H, W]: the kernel's sizes, how it moves, the sizes of what comes of it, and for a pool of means the
    code that means 0."""

    kernel: tuple[int, int]
    window: Window
    out_size: tuple[int, int]
    zero: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """-> channels_last"""
        if x.is_cuda:
            from halfbyte.kernels.gpu.conv.pool import pool as on_gpu

            with cuda.on(x):
                return on_gpu(channels_last(x), *self)
        from halfbyte.kernels.cpu.conv.pool import pool

        return pool(channels_last(x), *self)

    def step(self, x: Tensor) -> ProgramStep | None:
        """The same of images on the CPU of the sizes and strides of x, as a step of a program; None where it is none."""
        from halfbyte.kernels.cpu.conv.pool import step

        return step(x, *self) if x.is_contiguous(memory_format=torch.channels_last) else None


_Pair = tuple[int, int]  # height, width


def pooling(x: Tensor, pool: nn.Module, zero: int = 0) -> Pooling | None:
    """What `pool` does to images; None where torch does it."""
    if x.dim() != 4 or x.numel() == 0 or (x.is_cuda and (why_no_triton() is not None or x.shape[1:].numel() >= _LARGEST)):
        return None
    if isinstance(pool, nn.MaxPool2d):
        kernel, stride, padding, dilation = map(_pair, (pool.kernel_size, pool.stride or pool.kernel_size, pool.padding, pool.dilation))
        return _pooling(x.shape, kernel, stride, padding, dilation, pool.ceil_mode)
    if isinstance(pool, nn.AdaptiveAvgPool2d) and pool.output_size in (1, (1, 1)):
        return Pooling((x.shape[2], x.shape[3]), Window((1, 1), (0, 0, 0, 0), (1, 1)), (1, 1), zero)
    return None


def _pair(size: int | Sequence[int]) -> _Pair:
    """What torch takes for (height, width)."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return cast(_Pair, sizes * 2 if len(sizes) == 1 else sizes)


def largest(x: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """pool(x), in the memory format of x"""
    ours = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and not pool.return_indices
    if ours and plain(x) and not (x.requires_grad and torch.is_grad_enabled()) and (found := pooling(x, pool)):
        return in_memory_format_of(found(x), x)
    return cast(Tensor, pool(x))


@functools.lru_cache(maxsize=_KEPT)
def _pooling(shape: torch.Size, *settings: *tuple[_Pair, _Pair, _Pair, _Pair, bool]) -> Pooling:
    """A pool of largest codes, whose settings torch also checks."""
    pooled = nn.functional.max_pool2d(torch.empty(shape, dtype=torch.bfloat16, device="meta"), *settings)
    kernel, stride, (down, right), dilation = settings[:4]
    return Pooling(kernel, Window(stride, (down, down, right, right), dilation), (pooled.shape[2], pooled.shape[3]))
