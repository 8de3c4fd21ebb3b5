"""Convolutions that are planned once for images of each size, and how a planned one of codes is called."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Buffer
from halfbyte.kernels.cpu.linear.linear import CALL, pack_call
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Window


class ConvCall(NamedTuple):
    """A convolution of images of one size: the arguments, all but those of the call filled in, and what they point to."""

    buffer: Buffer
    address: int
    out_shape: tuple[int, int, int, int]
    memory: int
    threads: int
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, buffer: Buffer, out_shape: tuple[int, int, int, int], memory: int, threads: int, tensors: tuple[Tensor, ...]) -> ConvCall:
        return cls(buffer, ctypes.addressof(buffer), out_shape, memory, threads, tensors)


class RearrangedWeights(Protocol):
    """A convolution that multiplies by weights in a form of its own, which are made of codes once.

    form  what they depend on in addition to the codes: kernels of one form have the same
    """

    form: str

    def weights_of(self, codes: Codes) -> Tensor | None:
        """The weights as the kernel reads them; None where it does not take them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


_numbers = itertools.count()


class PlannedConv:
    """A compiled convolution of images of any size."""

    def __init__(self) -> None:
        self._number = next(_numbers)

    def prepare(self, x: Tensor, window: Window, outside: int, weights: Tensor, *more: bool) -> ConvCall:
        """The call for images of the size of x, exclusive to the caller.

        outside  the code of what lies outside of them
        weights  what the kernel reads
        more     what else it is compiled for
        """
        raise NotImplementedError

    def planned(self, x: Tensor, window: Window, outside: int, weights: Tensor, *more: bool) -> ConvCall:
        """The same, prepared once in each Python thread."""
        key = self._number, x.shape, window.numbers, outside, weights.shape, runtime.threads(), *more
        call: ConvCall | None = PLANS.convolution.get(key)
        if call is None:
            call = PLANS.convolution[key] = self.prepare(x, window, outside, weights, *more)
        return call


def tile_rows(m: int, most: int, cost: float) -> int:
    """Rows of the tiles of m rows, at most `most`, where a tile takes its rows and `cost`, and the last one overlaps the one before."""
    return min(range(min(m, most), min(m, most) * 2 // 3, -1), key=lambda rows: -(-m // rows) * (rows + cost))


class CodesConv(PlannedConv):
    """One of int8 images that gives nothing but codes."""

    def __call__(self, x: Tensor, window: Window, weights: Tensor, table: Tensor, low: float, high: float, *, outside: int) -> Tensor:
        """x -> int8 [B, Co, Ho, Wo] with channels_last strides. `outside` is the code of what lies outside of the image."""
        return convolved(self.planned(x, window, outside, weights), x, weights.data_ptr(), table.data_ptr(), low, high)


def convolved(
    call: ConvCall,
    x: Tensor,
    weights: int,
    table: int,
    low: float,
    high: float,
    dtype: torch.dtype = torch.int8,
    residual: Tensor | None = None,
) -> Tensor:
    """x -> [B, Co, Ho, Wo] of `dtype` with channels_last strides; `weights` and `table` (for codes) or bias are addresses.

    residual  of the output's shape and strides: added before the clamp
    """
    _, channels, height, width = shape = call.out_shape
    line = width * channels
    out = torch.empty_strided(shape, (height * line, 1, line, channels), dtype=dtype, device="cpu")
    _memory, scratch = PLANS.memory(call.memory)
    residual_offset = 0
    if residual is not None:
        residual = residual.to(dtype)
        residual_offset = residual.data_ptr() - out.data_ptr()  # the strides of both are the same
    pack_call(call.buffer, CALL, 0, x.data_ptr(), 0, scratch, weights, table, out.data_ptr(), residual_offset, low, high)
    runtime.runner()(call.address, call.threads)
    return out
