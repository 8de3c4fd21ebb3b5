"""The planner of convolutions: geometry, threads, arguments, once for images of each size; and the call of a planned one.

Each kind of convolution gives a `Plan`: its table of arguments, its code, and how its work is cut into items that threads draw.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Block, Buffer
from halfbyte.kernels.cpu.codegen.kernel import arguments
from halfbyte.kernels.cpu.linear.linear import CALL, WORK_A_THREAD, pack_call
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Pair, Window
from halfbyte.layouts.convolution import Filter


class ConvCall(NamedTuple):
    """A convolution of images of one size: the arguments, all but those of the call filled in, and what they point to."""

    buffer: Buffer
    address: int
    out_shape: tuple[int, int, int, int]
    memory: int
    threads: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """The sizes of a convolution, or of a pool: images [batch, channels, *image] -> [batch, out_channels, *out].

    products   of each output pixel, over all its channels
    """

    batch: int
    channels: int
    image: Pair
    out_channels: int
    out: Pair
    kernel: Pair
    window: Window
    products: int

    @classmethod
    def of(cls, shape: Sequence[int], sizes: Filter, window: Window) -> ConvGeometry:
        """For images of this shape."""
        batch, channels, height, width = shape
        image, kernel = (height, width), sizes.kernel
        return cls(batch, channels, image, sizes.out, window.out_size(image, kernel), kernel, window, sizes.out * sizes.k)

    @property
    def outputs(self) -> tuple[int, int, int]:
        """[B, Ho, Wo]"""
        return self.batch, *self.out

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.out_channels, *self.out

    def threads(self, cost: int = 1) -> int:
        """The number of available threads that are worth waking, where a product costs as much as `cost` products of a matrix."""
        return max(1, min(runtime.threads(), math.prod(self.outputs) * self.products * cost // WORK_A_THREAD))

    def fields(self) -> dict[str, int]:
        """The arguments that all convolutions have."""
        return self.window.sizes(self.image, self.out, self.kernel) | {"channels": self.channels}


class Plan(NamedTuple):
    """What one kind of convolution decides for images of one size.

    block, function   the table of its arguments, and the address of its code
    fields            the arguments, but those of `ConvGeometry.fields` and `outside`
    items             pieces of work, which threads draw
    edge              elements that stand for what lies outside of an image
    thread_bytes      scratch memory of each thread
    tensors           that arguments point to
    """

    block: Block
    function: int
    fields: dict[str, int]
    items: int
    edge: int
    thread_bytes: int = 0
    tensors: tuple[Tensor, ...] = ()


def parts_of(size: int, threads: int, items_a_thread: int, others: int) -> int:
    """Into how many parts, `size` at most, work is cut of which there are `others` pieces, so that each thread draws so many items."""
    return max(1, min(size, -(-threads * items_a_thread // others))) if threads > 1 else 1


class RearrangedWeights(Protocol):
    """A convolution that multiplies by weights in a form of its own, which are made of codes once.

    form  what they depend on in addition to the codes: kernels of one form have the same
    """

    form: str

    def weights_of(self, codes: Codes) -> Tensor | None:
        """The weights as the kernel reads them; None where it does not take them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


_numbers = itertools.count()
_pack_address = struct.Struct("<q").pack_into


class PlannedConv:
    """A compiled convolution of images of any size. Each kind has a `plan`; all else is the same.

    cost       of a product, in products of a matrix
    dtype      of the images that its code reads
    out_dtype  of what its code writes
    result     of what a call returns
    """

    sizes: Filter
    cost = 1
    dtype = out_dtype = result = torch.int8
    scales_at = 0  # the offset of the address of `scales` among its arguments

    def __init__(self) -> None:
        self._number = next(_numbers)

    def __call__(
        self,
        x: Tensor,
        window: Window,
        weights: Tensor,
        bias: Tensor | None,
        low: float,
        high: float,
        *,
        residual: Tensor | None = None,
        outside: int = 0,
        scales: Tensor | None = None,
    ) -> Tensor:
        """x -> [B, Co, Ho, Wo] with channels_last strides.

        bias      or, for codes, the tables of the groups
        residual  added before the clamp: of the output's shape and strides, in x's dtype
        outside   the code of what lies outside of an int8 image
        scales    of each image, float32 [B], where codes become floating point
        """
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        call = self.planned(x, window, outside, weights, *self.variant(residual))
        if scales is not None:
            _pack_address(call.buffer, self.scales_at, scales.data_ptr())
        table = self.table(bias, scales)
        at = 0 if table is None else table.data_ptr()
        out = convolved(call, x, weights.data_ptr(), at, low, high, self.out_dtype, residual)
        return out if out.dtype == self.result else out.to(self.result)

    def table(self, bias: Tensor | None, scales: Tensor | None) -> Tensor | None:
        """The bias or tables as its code reads them; None: it may do without."""
        return bias

    def variant(self, residual: Tensor | None) -> tuple[bool, ...]:
        """What else `plan` is told of a call."""
        return ()

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *more: bool) -> Plan:
        """How images of these sizes are convolved, on at most so many threads. Arguments as for `prepare`."""
        raise NotImplementedError

    def prepare(self, x: Tensor, window: Window, outside: int, weights: Tensor, *more: bool) -> ConvCall:
        """The call for images of the size of x, exclusive to the caller.

        outside  the code of what lies outside of them
        weights  what the kernel reads
        more     what else it is compiled for
        """
        geo = ConvGeometry.of(x.shape, self.sizes, window)
        threads = geo.threads(self.cost)
        plan = self.plan(geo, threads, outside, weights, *more)
        threads = min(threads, plan.items)
        edge = torch.full((plan.edge,), outside, dtype=x.dtype, device="cpu")
        fields = plan.block.known(geo.fields()) | {"outside": edge.data_ptr()} | plan.fields
        buffer = arguments(plan.block, plan.function, fields)
        tensors = edge, *plan.tensors
        return ConvCall(buffer, ctypes.addressof(buffer), geo.out_shape, threads * plan.thread_bytes, threads, tensors)

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
