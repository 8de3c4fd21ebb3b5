"""What all convolutions on CPUs share: a plan for images of each size, and the call of a planned one.

    images [B, C, H, W], channels_last  ->  [B, Co, Ho, Wo], channels_last

    PlannedConv.__call__            each kind of convolution is a subclass, which `dispatch/cpu_conv.py` chooses
      planned -> prepare            once for each size of images and Python thread (`plan_cache.PLANS.convolution`)
        plan                        the subclass: code, arguments, and how work is cut into items that threads draw   -> Plan
                                    -> ConvCall: a block of arguments, complete but for what changes from call to call
      convolved                     allocates the output, fills in the rest, and runs

`elementwise.py` and `pool.py` have plans of their own.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Block, Buffer, pack_integer
from halfbyte.kernels.cpu.codegen.kernel import arguments
from halfbyte.kernels.cpu.linear.linear import CALL, WORK_A_THREAD, pack_call
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Pair, Window
from halfbyte.layouts.convolution import Filter


class ConvCall(NamedTuple):
    """A convolution of images of one size, ready but for the addresses, clamp and scales of a call.

    Attributes:
        buffer, address: The arguments.
        out_shape: [B, Co, Ho, Wo]
        scratch_bytes: Memory of all threads.
        threads: That share the items.
        tensors: What the arguments point to, kept alive.
    """

    buffer: Buffer
    address: int
    out_shape: tuple[int, int, int, int]
    scratch_bytes: int
    threads: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """The sizes of a convolution, or of a pool: images [batch, channels, *image] -> [batch, out_channels, *out].

    Attributes:
        kernel: Height and width of the filter.
        window: Its stride, padding and dilation.
        products: Multiplications for an output pixel, over all its channels.
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
        """Return the sizes for images of this shape."""
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
        """Return the number of available threads that are worth waking, where a product takes as long as `cost` products of a GEMM."""
        return runtime.useful_threads(math.prod(self.outputs) * self.products * cost, WORK_A_THREAD)

    def fields(self) -> dict[str, int]:
        """Return the arguments that all convolutions have."""
        return self.window.sizes(self.image, self.out, self.kernel) | {"channels": self.channels}


class Plan(NamedTuple):
    """What one kind of convolution decides for images of one size.

    Attributes:
        block: The names of its arguments.
        function: Address of its code.
        fields: Its arguments, but those of `ConvGeometry.fields` and `outside`.
        items: Pieces of work, which threads draw.
        edge: Elements of the padding code that the argument `outside` points to.
        thread_bytes: Scratch memory of each thread.
        tensors: What arguments point to.
    """

    block: Block
    function: int
    fields: dict[str, int]
    items: int
    edge: int
    thread_bytes: int = 0
    tensors: tuple[Tensor, ...] = ()


def parts_of(size: int, threads: int, items_a_thread: int, others: int) -> int:
    """Return into how many parts a dimension of `size` is cut, where the other dimensions have `others` parts: as few as give each thread
    `items_a_thread` items, and one for a single thread."""
    return max(1, min(size, -(-threads * items_a_thread // others))) if threads > 1 else 1


class RearrangedWeights(Protocol):
    """A convolution that multiplies by weights in a form of its own, which is computed from codes once.

    Attributes:
        form: What it depends on in addition to the codes: kernels with equal `form` share it.
    """

    form: str

    def weights_of(self, codes: Codes) -> Tensor | None:
        """Return the weights as the kernel reads them; None if it does not support these codes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


_numbers = itertools.count()  # of kernels: an id() may be that of a kernel which was freed


class PlannedConv:
    """A compiled convolution of images of any size. Each kind has a `plan`; all else is the same.

    Attributes:
        number: Identifies the kernel in caches.
        sizes: The filter.
        cost: Time of a product, relative to one of a GEMM.
        dtype: Of the images that its code reads.
        out_dtype: Of what its code writes.
        result: Dtype of what a call returns.
        no_bias: Zeros, float32 [Co], which stand for no bias; None: its code takes 0.
        scales_at: Offset of the address of `scales` in its arguments.
        specializes_residual: Whether calls with a residual have code of their own.
    """

    sizes: Filter
    cost = 1
    dtype = out_dtype = result = torch.int8
    no_bias: Tensor | None = None
    scales_at = 0
    specializes_residual = False

    def __init__(self) -> None:
        self.number = next(_numbers)

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
        """Return the convolution [B, Co, Ho, Wo] with channels_last strides.

        Args:
            x: [B, C, H, W] with channels_last strides, which the caller checks.
            window: Stride, padding and dilation.
            weights: As the kernel reads them.
            bias: float32 [Co], or, for int8 outputs, the requantization tables of the groups.
            low, high: The clamp.
            residual: Added before the clamp: of the output's shape and strides, in x's dtype.
            outside: The code of padding in an int8 image.
            scales: float32 [B], a scale of each image's codes, if outputs are floating point.
        """
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        call = self.planned(x, window, outside, weights, has_residual=residual is not None and self.specializes_residual)
        if scales is not None:
            pack_integer(call.buffer, self.scales_at, scales.data_ptr())
        table = self.table(bias, scales)  # alive until the call has run
        table_address = 0 if table is None else table.data_ptr()
        out = convolved(call, x, weights.data_ptr(), table_address, low, high, self.out_dtype, residual)
        return out if out.dtype == self.result else out.to(self.result)

    def table(self, bias: Tensor | None, scales: Tensor | None) -> Tensor | None:
        """Return the bias or tables as its code reads them; None if its code takes 0 for no bias. `scales` are those of a call."""
        return self.no_bias if bias is None else bias

    def geometry(self, shape: Sequence[int], window: Window) -> ConvGeometry:
        """Return the sizes of the convolution of images of this shape."""
        return ConvGeometry.of(shape, self.sizes, window)

    def plan(self, geo: ConvGeometry, threads: int, outside: int, weights: Tensor, *, has_residual: bool) -> Plan:
        """Plan the convolution of images of these sizes on at most so many threads; the other arguments are `prepare`'s."""
        raise NotImplementedError

    def prepare(self, x: Tensor, window: Window, outside: int, weights: Tensor, *, has_residual: bool = False) -> ConvCall:
        """Return the call for images of the size of x, exclusive to the caller.

        Args:
            x: Images.
            window: Stride, padding and dilation.
            outside: The code of padding.
            weights: As the kernel reads them; their shape alone counts.
            has_residual: Whether calls have one, if the kernel `specializes_residual`.
        """
        geo = self.geometry(x.shape, window)
        threads = geo.threads(self.cost)
        plan = self.plan(geo, threads, outside, weights, has_residual=has_residual)
        threads = min(threads, plan.items)
        edge = torch.full((plan.edge,), outside, dtype=x.dtype, device="cpu")
        fields = plan.block.known(geo.fields()) | {"outside": edge.data_ptr()} | plan.fields
        buffer = arguments(plan.block, plan.function, fields)
        tensors = edge, *plan.tensors
        return ConvCall(buffer, ctypes.addressof(buffer), geo.out_shape, threads * plan.thread_bytes, threads, tensors)

    def planned(self, x: Tensor, window: Window, outside: int, weights: Tensor, *, has_residual: bool = False) -> ConvCall:
        """Return what `prepare` does, prepared once in each Python thread and shared by its calls."""
        key = self.number, x.shape, window.numbers, outside, weights.shape, runtime.threads(), has_residual
        call: ConvCall | None = PLANS.convolution.get(key)
        if call is None:
            call = PLANS.convolution[key] = self.prepare(x, window, outside, weights, has_residual=has_residual)
        return call


def tile_rows(m: int, most: int, cost: float) -> int:
    """Return the rows r of the tiles that m rows are cut into, r <= `most`, with the least time ceil(m / r) * (r + cost): the last tile
    overlaps the one before it, and `cost` is what a tile takes in addition, in rows."""
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
    """Run a planned call: [B, Co, Ho, Wo] of `dtype` with channels_last strides.

    Args:
        call: For images of the size of x.
        x: With channels_last strides.
        weights: Address of them, as the kernel reads them.
        table: Address of the bias or of the requantization tables; 0: none.
        low, high: The clamp.
        dtype: What the code writes.
        residual: Added before the clamp; of the output's shape and strides.
    """
    _, channels, height, width = shape = call.out_shape
    line_size = width * channels
    out = torch.empty_strided(shape, (height * line_size, 1, line_size, channels), dtype=dtype, device="cpu")
    _memory, scratch = PLANS.memory(call.scratch_bytes)
    residual_offset = 0
    if residual is not None:
        residual = residual.to(dtype)
        residual_offset = residual.data_ptr() - out.data_ptr()
    pack_call(call.buffer, CALL, 0, x.data_ptr(), 0, scratch, weights, table, out.data_ptr(), residual_offset, low, high)
    runtime.runner()(call.address, call.threads)
    return out
