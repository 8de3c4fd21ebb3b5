"""Modules that take and give int8 codes: of which rewriter.py makes a network.

A code q stands for scale * (q - zero), with the scale and zero point of its `Scale`; weights are symmetric, with a scale per channel.

Where gradients are wanted, codes are float32 numbers, whose gradient is that of the numbers before they were rounded (the straight-through
estimator) and 0 for those beyond the ends; all else in a network acts on them as on int8.

`step(x, ...)` of a module is what it does to tensors on the CPU of the sizes, strides and types of x, as a step of a program
(programs.py); None where there is no such step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte import ops
from halfbyte.errors import ArgumentError, check_type
from halfbyte.kernels.problem import Addition, Combination, Window
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.convolution import PackedConv
from halfbyte.nn.described import LEAST, MOST, Scale
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.modules.weight_view import AnyPacked
from halfbyte.ops.checks import check_floats, check_plain_tensor
from halfbyte.ops.conv import elementwise
from halfbyte.ops.conv import functions as conv
from halfbyte.ops.conv.cpu import qconv2d_step
from halfbyte.ops.conv.pool import kernel_pool
from halfbyte.ops.conv.weight_forms import state_of
from halfbyte.ops.cpu import qlinear_step
from halfbyte.ops.modes import plain
from halfbyte.ops.registration import autocast

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.steps import ProgramStep


class _StraightThrough(torch.autograd.Function):
    """Codes in floating point, with the gradient of the numbers that they were rounded from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(numbers: Tensor, codes: Tensor) -> Tensor:
        return codes.to(numbers.dtype)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _rounded(numbers: Tensor, codes: Tensor) -> Tensor:
    return _StraightThrough.apply(numbers, codes)  # type: ignore[no-any-return,no-untyped-call]


def _clamped(numbers: Tensor, low: int = LEAST, high: int = MOST) -> Tensor:
    """Numbers before they are rounded, without a gradient where their code is clamped; those that round to the last code have one."""
    return numbers.clamp(low - 0.5 if low == LEAST else low, high + 0.5 if high == MOST else high)


def _has_gradient(*codes: Tensor | None) -> bool:
    """Whether some of these codes are in floating point, so that gradients flow to them."""
    return any(x is not None and x.is_floating_point() for x in codes)


def _integers(x: Tensor) -> Tensor:
    return x.detach().to(torch.int8)


def clamp_codes(x: Tensor, low: int, high: int) -> Tensor:
    """A ReLU of codes."""
    return x.clamp(low, high)


def nearest(x: Tensor, *settings: Any, **named: Any) -> Tensor:
    """Nearest-neighbour resizing of codes, as uint8, since torch has no such function for int8; settings as of `interpolate`."""
    if _has_gradient(x):
        return functional.interpolate(x, *settings, **named)
    return functional.interpolate(x.view(torch.uint8), *settings, **named).view(torch.int8)


class Quantize(nn.Module):
    """Floating point -> codes."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.scale = scale

    @property
    def _how(self) -> Combination:
        return Combination(torch.int8, 1 / self.scale.step, self.scale.zero, low=LEAST, high=MOST)

    def forward(self, x: Tensor) -> Tensor:
        check_type(x, Tensor, "a network on int8 codes takes tensors", "pass torch.as_tensor(x)")
        check_plain_tensor(x, "the input of a network on int8 codes")
        check_floats(x, "a network on int8 codes takes tensors")
        if x.requires_grad and torch.is_grad_enabled():
            numbers = _clamped(x.float() / self.scale.step + self.scale.zero)
            return _rounded(numbers, elementwise.combine(x.detach(), self._how))
        return elementwise.combine(x, self._how)

    def step(self, x: Tensor) -> ProgramStep | None:
        return elementwise.combine_step(x, self._how)

    def extra_repr(self) -> str:
        return f"step={self.scale.step:.4g}, zero={self.scale.zero}"


class Dequantize(nn.Module):
    """Codes -> floating point of `dtype`, or, under autocast, of its dtype, as torch's layers give it. `dtype` follows `.to(dtype)`."""

    dtype_mark: Tensor

    def __init__(self, scale: Scale, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.dtype_mark.dtype

    @property
    def _how(self) -> Combination:
        return Combination(self.dtype, self.scale.step, -self.scale.step * self.scale.zero)

    def forward(self, x: Tensor) -> Tensor:
        if _has_gradient(x):
            exact = ((x - self.scale.zero) * self.scale.step).to(self.dtype)
            return autocast(_rounded(exact, elementwise.combine(_integers(x), self._how)))
        return autocast(elementwise.combine(x, self._how))

    def step(self, x: Tensor) -> ProgramStep | None:
        return elementwise.combine_step(x, self._how)


class Requantize(nn.Module):
    """Codes of one scale -> codes of another; two tensors are added first, broadcast to one shape. `clamp` is in codes of the result."""

    def __init__(self, sources: Sequence[Scale], result: Scale, clamp: tuple[int, int] = (LEAST, MOST)) -> None:
        super().__init__()
        self.sources, self.scale, self.clamp = tuple(sources), result, clamp
        self.factors = [source.step / result.step for source in sources]
        self.offset = result.zero - sum(f * source.zero for f, source in zip(self.factors, sources, strict=True))

    def how(self, both: bool) -> Combination:
        return Combination(torch.int8, self.factors[0], self.offset, self.factors[1] if both else 0.0, *self.clamp)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        if _has_gradient(a, b):
            numbers = a * self.factors[0] + self.offset if b is None else a * self.factors[0] + b * self.factors[1] + self.offset
            return _rounded(_clamped(numbers, *self.clamp), self.forward(_integers(a), None if b is None else _integers(b)))
        if b is not None and a.shape != b.shape:
            a, b = torch.broadcast_tensors(a, b)
        return elementwise.combine(a, self.how(b is not None), b)

    def step(self, a: Tensor, b: Tensor | None = None) -> ProgramStep | None:
        return elementwise.combine_step(a, self.how(b is not None), b)


class AveragePool(nn.Module):
    """A pool that averages, on codes: exact sums, rounded once to a code of the same scale, or of that of the result."""

    def __init__(self, pool: nn.Module, scale: Scale, result: Scale | None = None) -> None:
        super().__init__()
        self.pool, self.scale, self.result = pool, scale, result or scale

    def forward(self, x: Tensor) -> Tensor:
        if _has_gradient(x):
            return _rounded(_clamped(self._means(x) + self.result.zero), self.forward(_integers(x)))
        if self.result is self.scale and plain(x) and (pool := kernel_pool(x, self.pool, self.scale.zero)):
            return pool(x)
        return (self._means(x.float()).round() + self.result.zero).clamp(LEAST, MOST).to(torch.int8)

    def _means(self, x: Tensor) -> Tensor:
        """Means of codes in floating point, in steps of the result."""
        means = cast(Tensor, self.pool(x - self.scale.zero))  # what pads is 0
        return means if self.result == self.scale else means * (self.scale.step / self.result.step)

    def step(self, x: Tensor) -> ProgramStep | None:
        return pool.step(x) if self.result is self.scale and (pool := kernel_pool(x, self.pool, self.scale.zero)) else None


class MaxPool(nn.Module):
    """A pool of largest codes."""

    def __init__(self, pool: nn.MaxPool1d | nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        if _has_gradient(x):
            return cast(Tensor, self.pool(x))
        if plain(x) and (pool := kernel_pool(x, self.pool)):
            return pool(x)
        # In bfloat16, which holds all codes, since torch's own of int8 fails for large images.
        return cast(Tensor, self.pool(x.to(torch.bfloat16)).to(torch.int8))

    def step(self, x: Tensor) -> ProgramStep | None:
        return pool.step(x) if (pool := kernel_pool(x, self.pool)) else None


def _in_order(packed: AnyPacked) -> AnyPacked:
    """A weight in K's order, in which codes come: for one in pairs they would take a pass of their own."""
    return gpu_tiles.in_order(packed) if isinstance(packed, Packed) else packed


class IntegerModule(QuantModule):
    """int8 -> int8 with requantization, an activation's clamp included.

    packed   the weight, symmetric codes with a scale for a channel or the tensor
    bias     [outputs] or None; kept in floating point, frozen
    source, result   what codes of the input and of the output stand for
    clamp    in codes of the output
    window   of a convolution: its stride, padding and dilation
    updates  how many times `table` was computed: programs that were compiled at another count may be out of date
    """

    updates = 0

    bias: nn.Parameter | None
    table: Tensor
    _table_of: tuple[Tensor, Tensor | None]  # of which `table` was computed: kept alive, or others might get their addresses
    _table_state: tuple[object, object]

    def __init__(
        self,
        packed: AnyPacked,
        bias: Tensor | None,
        source: Scale,
        result: Scale,
        clamp: tuple[int, int],
        window: Window | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        error: float | None = None,
    ) -> None:
        super().__init__(_in_order(packed), dtype, error)
        self.source, self.result, self.clamp, self.window = source, result, clamp, window
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.register_buffer("table", torch.empty(0, dtype=torch.float32, device="cpu"), persistent=False)
        self.refresh()

    def _set_packed(self, packed: AnyPacked) -> None:
        super()._set_packed(_in_order(packed))

    def with_weight(self, packed: AnyPacked, dtype: torch.dtype, error: float | None) -> IntegerModule:
        """The same layer with another weight of the same sizes."""
        return type(self)(packed, self.bias, self.source, self.result, self.clamp, self.window, dtype=dtype, error=error)

    def refresh(self) -> None:
        self.updates += 1
        scales = {"in_scale": self.source.step, "in_zero": self.source.zero, "out_scale": self.result.step, "out_zero": self.result.zero}
        table = conv.conv_requantization_table if isinstance(self._packed, PackedConv) else ops.requantization_table
        self.table = table(self._packed, self.bias, **scales)  # type: ignore[arg-type]
        self._table_of, self._table_state = (self._packed.data, self.bias), self._state()

    def _state(self) -> tuple[object, object]:
        """A value that changes when the weight or the bias is written to or replaced; torch does not count writes by way of `.data`."""
        return state_of(self._packed.data), None if self.bias is None else state_of(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not _has_gradient(x):
            return self._multiply(x)
        if not x.requires_grad:
            raise ArgumentError(f"a layer on codes takes int8, or codes in floating point with gradients, got {x.dtype}: quantize x")
        numbers = self._sums((x - self.source.zero) * self.source.step, ops.dequantize(self.packed, torch.float32))
        numbers = numbers / self.result.step + self.result.zero
        return _rounded(_clamped(numbers, *self.clamp), self._multiply(_integers(x)))

    def _multiply(self, x: Tensor) -> Tensor:
        """The layer on int8 codes."""
        raise NotImplementedError

    def _sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """The layer on the numbers that codes stand for, with the dequantized weight."""
        raise NotImplementedError

    def current_table(self) -> Tensor:
        """`table`, recomputed if the weight or the bias has changed; torch.compile takes the buffer as it is."""
        if not torch.compiler.is_compiling() and self._table_state != self._state():
            self.refresh()
        return self.table


class IntegerConv2d(IntegerModule):
    """A convolution of codes [B, C, H, W] or [C, H, W]."""

    kind = "Conv2d"
    packed: PackedConv

    def _multiply(self, x: Tensor) -> Tensor:
        assert self.window is not None
        if x.dim() == 3:
            return self._multiply(x.unsqueeze(0)).squeeze(0)
        return conv.qconv2d_with(x, self.packed, self.current_table(), self.window.numbers, self.source.zero, self.clamp)

    def _sums(self, x: Tensor, weight: Tensor) -> Tensor:
        assert self.window is not None
        top, bottom, left, right = self.window.padding
        bias, groups = None if self.bias is None else self.bias.float(), self.packed.sizes.groups
        padded = functional.pad(x, (left, right, top, bottom))
        return functional.conv2d(padded, weight, bias, self.window.stride, 0, self.window.dilation, groups)

    def added(self, x: Tensor, addition: Addition) -> Tensor:
        """The same, added to other codes at once."""
        assert self.window is not None
        if x.dim() == 3:
            return elementwise.combine(*addition.of(self._multiply(x)))
        return conv.qconv2d_added(x, self.packed, self.current_table(), self.window.numbers, self.source.zero, self.clamp, addition)

    def step(self, x: Tensor) -> ProgramStep | None:
        assert self.window is not None
        if x.dim() == 3:
            return None
        return qconv2d_step(x, self.packed, self.current_table(), self.window.numbers, self.source.zero, self.clamp)

    def extra_repr(self) -> str:
        out, channels, kh, kw = self.packed.shape
        return f"{channels * self.packed.sizes.groups}, {out}, kernel_size=({kh}, {kw}), clamp={self.clamp}, format={self.packed.format}"


class IntegerConv1d(IntegerConv2d):
    """The same of lines [B, C, L] or [C, L]: images of one line."""

    kind = "Conv1d"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(-2)).squeeze(-2)

    def step(self, x: Tensor) -> ProgramStep | None:
        return super().step(x.unsqueeze(-2))


class IntegerLinear(IntegerModule):
    """A linear layer on codes."""

    kind = "Linear"
    packed: Packed

    def _sums(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight, None if self.bias is None else self.bias.float())

    def _multiply(self, x: Tensor) -> Tensor:
        n, k = self.packed.shape
        return torch.ops.halfbyte.qlinear.default(x, self.packed.data, self.current_table(), self.packed.name, n, k, *self.clamp)  # type: ignore[no-any-return]

    def step(self, x: Tensor) -> ProgramStep | None:
        return qlinear_step(x, self.packed, self.current_table(), self.clamp)

    def extra_repr(self) -> str:
        n, k = self.packed.shape
        return f"in_features={k}, out_features={n}, clamp={self.clamp}, format={self.packed.format}"
