"""The custom ops of convolutions on the CPU: what they are given is checked, and the kernel that calls of one kind share is found."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import ConvProblem, Window, check_one_scale
from halfbyte.layouts import convolution, cpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter, PackedConv
from halfbyte.ops import functions, long_sums
from halfbyte.ops.checks import check_activation, check_bytes, check_floats, check_table
from halfbyte.ops.conv.images import (
    ACTIVATIONS,
    Shape,
    canonical_nbytes,
    channels_last,
    check_codes,
    check_conv2d,
    empty_result,
    from_numbers,
    out_shape,
)
from halfbyte.ops.conv.weight_forms import derived, state_of, taps_of
from halfbyte.ops.tensors import aligned

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.conv.planned import ConvCall, PlannedConv, RearrangedWeights
    from halfbyte.kernels.cpu.steps import ProgramStep

_CPU = torch.device("cpu")


def pack(codes: Codes, sizes: Filter) -> PackedConv:
    """Codes on the CPU, arranged for its kernels."""
    if sizes.depthwise:
        return PackedConv(sizes, convolution.CANONICAL, aligned(convolution.canonical_bytes(codes)))
    parts = [functions.pack_dense(part).data for part in convolution.groups_of(codes, sizes)]
    return PackedConv(sizes, cpu_tiles.NAME, parts[0] if len(parts) == 1 else aligned(torch.cat(parts)))


def table(rows: Tensor, sizes: Filter) -> Tensor:
    """What requantization reads, of `functions.requantization_rows`: float32 [groups, 3, Co/groups padded to 32], depthwise [1, 3, Co]."""
    if sizes.depthwise:
        return rows.unsqueeze(0)
    groups, _, padded = _table_shape(sizes)
    padded_table = torch.zeros(groups, 3, padded, dtype=torch.float32, device="cpu")
    padded_table[:, :, : sizes.out // groups] = rows.view(3, groups, -1).transpose(0, 1)
    return padded_table


def _table_shape(sizes: Filter) -> tuple[int, int, int]:
    if sizes.depthwise:
        return 1, 3, sizes.out
    return sizes.groups, 3, round_up(sizes.out // sizes.groups, cpu_tiles.PANEL)


def _packed_bytes(sizes: Filter) -> int:
    if sizes.depthwise:
        return canonical_nbytes(sizes)
    return sizes.groups * cpu_tiles.geometry(sizes.matrix_format, (sizes.out // sizes.groups, sizes.k)).nbytes


class _Plan(NamedTuple):
    """What calls on images of one shape share; everything that does not change from call to call has been checked."""

    sizes: Filter
    window: Window
    out_shape: Shape
    strides: Shape
    weight_bytes: int
    table_shape: tuple[int, int, int]
    kernel: Callable[..., Tensor] | None  # None: there is nothing to multiply, or sums are too long
    other: RearrangedWeights | None  # where that is faster


def _plan(
    x: Tensor,
    format: str,
    filter_numbers: Sequence[int],
    window_numbers: Sequence[int],
    compute: str = "int8",
    activation: str = "block",
    in_zero: int = 0,
) -> _Plan:
    key = format, tuple(filter_numbers), tuple(window_numbers), tuple(x.shape), x.dtype, compute, activation, in_zero
    plan: _Plan | None = PLANS.conv2d.get(key)
    if plan is None:
        plan = PLANS.conv2d[key] = _new_plan(x, format, filter_numbers, window_numbers, compute, activation, in_zero)
    return plan


def _new_plan(
    x: Tensor, format: str, filter_numbers: Sequence[int], window_numbers: Sequence[int], compute: str, activation: str, in_zero: int
) -> _Plan:
    from halfbyte.dispatch.choose import choose
    from halfbyte.dispatch.cpu_conv import quantizes_images, settled
    from halfbyte.kernels.cpu.codegen.isas import current

    sizes, window = from_numbers(format, filter_numbers, window_numbers)
    shape = out_shape(x, sizes, window)
    check_activation(activation, ACTIVATIONS)
    _, c, h, w = x.shape
    asked = ConvProblem(sizes, window, x.shape[0], (h, w), x.dtype, compute, activation, in_zero)  # type: ignore[arg-type]
    problem = settled(asked, current())
    if quantizes_images(problem) and not sizes.depthwise:
        check_one_scale(sizes)
    kernel, other = None, None
    long = x.dtype == torch.int8 and long_sums.overflows(sizes.k)
    if 0 not in shape and x.numel() > 0 and not long:
        choice = choose(problem, current())
        first, as_packed = choice.options[0], next(option for option in choice.options if not option.candidate.rearranges)
        kernel = as_packed.candidate.kernel(problem, current(), as_packed.config)
        other = first.candidate.kernel(problem, current(), first.config) if first.candidate.rearranges else None
    strides = h * w * c, 1, w * c, c
    return _Plan(sizes, window, shape, strides, _packed_bytes(sizes), _table_shape(sizes), kernel, other)


def _check_weight(weight: Tensor, plan: _Plan) -> None:
    check_bytes(weight, plan.weight_bytes, _CPU, plan.sizes, "pack_conv")


def _kernel_of(weight: Tensor, plan: _Plan, *, integer: bool = False) -> tuple[Callable[..., Tensor], Tensor]:
    """The plan's other kernel if it takes these weights, or else its kernel; and the weights as that reads them."""
    if (other := plan.other) is not None:
        layout = convolution.CANONICAL if plan.sizes.depthwise else cpu_tiles.NAME
        form = derived(weight, other.form, lambda: other.weights_of(convolution.unpack(PackedConv(plan.sizes, layout, weight))))
        if form is not None:
            return other, form
    assert plan.kernel is not None
    if plan.sizes.depthwise:
        return plan.kernel, taps_of(weight, plan.sizes, integer=integer)
    if weight.data_ptr() % 64 == 0 and weight.is_contiguous():
        return plan.kernel, weight
    return plan.kernel, cast(Tensor, derived(weight, "aligned", lambda: aligned(weight)))


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    filter_numbers: Sequence[int],
    window_numbers: Sequence[int],
    compute: str,
    activation: str,
    low: float,
    high: float,
) -> Tensor:
    check_floats(x, "conv2d takes images")
    plan = _plan(x, format, filter_numbers, window_numbers, compute, activation)
    check_conv2d(x, bias, residual, plan.out_shape, low, high)
    _check_weight(weight, plan)
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    if plan.kernel is None:
        return empty_result(x, bias, residual, plan.out_shape, low, high)
    residual = None if residual is None else channels_last(residual)
    if x.stride() != plan.strides:
        x = channels_last(x)
    kernel, weights = _kernel_of(weight, plan)
    return kernel(x, plan.window, weights, bias, low, high, residual=residual)


def kernel_for(
    x: Tensor, packed: PackedConv, window_numbers: Sequence[int], compute: str, activation: str, *, as_packed: bool = False
) -> tuple[Callable[..., Tensor], Tensor, Window, Shape] | None:
    """The kernel of `conv2d` of images like x, the weights as it reads them, its window and the result's shape; None: a size is 0.
    `as_packed`: the one that reads weights as they are packed, if another is faster, too."""
    plan = _plan(x, packed.name, packed.numbers, window_numbers, compute, activation)
    plan = plan._replace(other=None) if as_packed else plan
    _check_weight(packed.data, plan)
    return None if plan.kernel is None else (*_kernel_of(packed.data, plan), plan.window, plan.out_shape)


class _Ready(NamedTuple):
    """A call of `qconv2d` that was made before, and of which nothing need be checked but that these are the same tensors."""

    weight: weakref.ref[Tensor]
    bytes: tuple[int, int | None]
    table: weakref.ref[Tensor]
    strides: Shape
    threads: int
    call: ConvCall
    weights: int  # the address of what the kernel reads
    convolved: Callable[..., Tensor]  # two functions, since importing them at each call takes longer than all of this
    threads_now: Callable[[], int]

    def is_stale(self, weight: Tensor) -> bool:
        return self.threads != self.threads_now() or self.bytes != state_of(weight)


def qconv2d(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    format: str,
    filter_numbers: Sequence[int],
    window_numbers: Sequence[int],
    in_zero: int,
    low: int,
    high: int,
) -> Tensor:
    check_codes(x)
    key = id(weight), id(table), x.shape, format, tuple(filter_numbers), tuple(window_numbers), in_zero, low, high
    ready: _Ready | None = PLANS.qconv2d.get(key)
    if ready is None or ready.weight() is not weight or ready.table() is not table or ready.is_stale(weight):
        plan = _plan(x, format, filter_numbers, window_numbers, in_zero=in_zero)
        check_table(table, plan.table_shape, x.device, low, high, "conv_requantization_table")
        _check_weight(weight, plan)
        if 0 in plan.out_shape or not x.numel():
            return channels_last(x.new_empty(plan.out_shape))
        if plan.kernel is None:  # sums are too long
            codes = convolution.unpack(PackedConv(plan.sizes, cpu_tiles.NAME, weight))  # no depthwise one has so many taps
            return long_sums.qconv2d(x, codes, plan.sizes, plan.window, table, in_zero, low, high)
        ready = PLANS.qconv2d[key] = _prepared(x, weight, table, plan, in_zero)
    if x.stride() != ready.strides:
        x = channels_last(x)
    return ready.convolved(ready.call, x, ready.weights, table.data_ptr(), low, high)


def _prepared(x: Tensor, weight: Tensor, table: Tensor, plan: _Plan, in_zero: int) -> _Ready:
    from halfbyte.kernels.cpu.codegen.runtime import threads
    from halfbyte.kernels.cpu.conv.planned import convolved

    kernel, weights = _kernel_of(weight, plan, integer=True)
    call = cast("PlannedConv", kernel).planned(x, plan.window, in_zero, weights)
    places = weakref.ref(weight), state_of(weight), weakref.ref(table)
    return _Ready(*places, plan.strides, threads(), call, weights.data_ptr(), convolved, threads)


def qconv2d_step(
    x: Tensor, packed: PackedConv, table: Tensor, window_numbers: Sequence[int], in_zero: int, clamp: tuple[int, int]
) -> ProgramStep | None:
    """`qconv2d` of images of the sizes and strides of x, as a step of a program; None where it is none."""
    from halfbyte.kernels.cpu.steps import conv_step

    plan = _plan(x, packed.name, packed.numbers, window_numbers, in_zero=in_zero)
    if plan.kernel is None or x.stride() != plan.strides:
        return None
    kernel, weights = _kernel_of(packed.data, plan, integer=True)
    return conv_step(cast("PlannedConv", kernel).prepare(x, plan.window, in_zero, weights), weights, table, *map(float, clamp))
