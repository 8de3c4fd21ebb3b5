"""Transposed convolutions by the op for images, `halfbyte::conv2d`.

Outputs whose index has the same remainder by the stride are an ordinary convolution, one of the phases of `layouts/folding.py`. All phases
are computed as output channels of one ordinary convolution (folded.py), and their results are interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.layouts.convolution import PackedConv
from halfbyte.layouts.folding import Fold
from halfbyte.ops.conv.folded import Conv2dSettings, Movement, Sides, convolve, sides_of
from halfbyte.ops.conv.images import ConvLayer


class _Axis(NamedTuple):
    """One dimension of a transposed convolution as an ordinary one of all phases.

    Tap k = m + phases * j of phase m adds to outputs o with o + padding = i * stride + k * dilation. With
    (shift, residue) = divmod(m * dilation, stride), result number q - shift of the ordinary convolution of phase m is
    output o = residue + stride * q - padding. With stride 2, kernel 3, dilation 1 and padding 1 there are two phases: taps 0 and 2 (m = 0,
    residue 0) give outputs 1, 3, 5, …, and tap 1 (m = 1, residue 1) gives outputs 0, 2, 4, ….

    sides   zeros before and after the input of the ordinary convolution; negative: inputs that are left out
    per_residue   how many results q there are for each residue
    skip    interleaved results before the first output
    out     the size of the output
    """

    stride: int
    dilation: int
    phases: int
    sides: Sides
    per_residue: int
    skip: int
    out: int

    @classmethod
    def of(cls, size: int, steps: int, phases: int, stride: int, dilation: int, padding: Sides, out: int) -> _Axis:
        """Return the axis for an input of `size` elements and a kernel of `steps` taps in each phase."""
        first, last = padding[0] // stride, (padding[0] + out - 1) // stride  # q of the first and of the last output
        reach = (steps - 1) * _phase_dilation(stride, dilation)
        sides = reach + _largest_shift(phases, dilation, stride) - first, last - (size - 1)
        return cls(stride, dilation, phases, sides, last - first + 1, padding[0] - first * stride, out)

    def phase_of_residue(self) -> dict[int, tuple[int, int]]:
        """Return by residue the phase that computes it, and the index of its first result; residues that no tap reaches are missing."""
        largest = _largest_shift(self.phases, self.dilation, self.stride)
        shifts = ((m, *divmod(m * self.dilation, self.stride)) for m in range(self.phases))
        return {residue: (m, largest - shift) for m, shift, residue in shifts}


def _phase_dilation(stride: int, dilation: int) -> int:
    """Return the dilation of the ordinary convolution of one phase."""
    return dilation // math.gcd(stride, dilation)


def _largest_shift(phases: int, dilation: int, stride: int) -> int:
    """Return the shift of the last phase: by so much the ordinary convolution begins earlier, for its results."""
    return (phases - 1) * dilation // stride


def transposed_size(size: Sequence[int], layer: ConvLayer, output_padding: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a transposed convolution's result. Raise ArgumentError where one is less than 1."""
    numbers = zip(size, layer.stride, sides_of(layer, layer.padding), layer.dilation, layer.kernel_size, output_padding, strict=True)
    out = tuple((n - 1) * stride - sum(sides) + dilation * (taps - 1) + extra + 1 for n, stride, sides, dilation, taps, extra in numbers)
    if min(out) < 1:
        raise ArgumentError(f"a transposed convolution of {list(size)} with padding {layer.padding} has no result, got sizes {list(out)}")
    return out


def convolve_transposed(
    x: Tensor,
    packed: PackedConv,
    fold: Fold,
    layer: ConvLayer,
    output_padding: Sequence[int],
    settings: Conv2dSettings,
    *,
    channels_last: bool,
) -> Tensor:
    """Compute a transposed convolution with a folded weight.

    Args:
        x: [B, C, *size].
        packed: The weight, as `fold` rearranges it.
        fold: How.
        layer: Its stride, padding and dilation.
        output_padding: As of torch's layers.
        settings: Bias, clamp and how the op computes.
        channels_last: Return the result in this memory format; otherwise contiguous.

    Returns:
        [B, Co, *out].

    Raises:
        ArgumentError: x has other dimensions or channels, or the result would be empty.
    """
    dims = len(fold.kernel)
    if x.dim() != dims + 2:
        raise ArgumentError(f"a transposed convolution in {dims} dimensions takes [B, C, *size], got {list(x.shape)}")
    out = transposed_size(x.shape[2:], layer, output_padding)
    numbers = zip(x.shape[2:], fold.steps, fold.phases, layer.stride, layer.dilation, sides_of(layer, layer.padding), out, strict=True)
    axes = [_Axis.of(*sizes) for sizes in numbers]
    dilation = tuple(_phase_dilation(axis.stride, axis.dilation) for axis in axes)
    move = Movement((1,) * dims, dilation, tuple(axis.sides for axis in axes))
    groups, bias = 1 if fold.depthwise else fold.groups, settings.bias
    if bias is not None:
        of_phases = bias.view(groups, 1, -1).expand(-1, math.prod(fold.phases), -1).reshape(-1)
        settings = settings._replace(bias=of_phases)
    y = convolve(x, packed, fold, move, settings)
    unreached = y.new_zeros(packed.sizes.out // fold.outputs) if bias is None else bias.to(y.dtype)
    if settings.clamp is not None:
        unreached = unreached.clamp(*settings.clamp)
    return _interleaved(y, axes, unreached.view(groups, -1), channels_last=channels_last)


def _interleaved(y: Tensor, axes: Sequence[_Axis], unreached: Tensor, *, channels_last: bool) -> Tensor:
    """Interleave the results of all phases, [B, groups * phases * Co / groups, *size] -> [B, Co, *out].

    One axis after the other, its phases, a dimension of their own, become a dimension of residues behind that of its results. `unreached`
    [groups, Co / groups] is the value of outputs that no tap reaches.
    """
    dims, (groups, outputs) = len(axes), unreached.shape
    y = y.unflatten(1, (groups, *(axis.phases for axis in axes), outputs))
    for i, axis in enumerate(axes):  # y: [B, groups, *phases from this axis on, Co / groups, *(per_residue, stride) before it, size, …]
        dim = 2 + dims + i
        if axis.phases == axis.stride and axis.dilation == 1:  # phases are the residues, in order, and all have `per_residue` results
            y = y.movedim(2, dim + 1)
            continue
        by_residue = {
            residue: y.select(2, phase).narrow(dim, start, axis.per_residue) for residue, (phase, start) in axis.phase_of_residue().items()
        }
        blank = unreached.view(1, groups, *(1,) * (dims - 1 - i), outputs, *(1,) * (dims + i))
        blank = blank.expand(next(iter(by_residue.values())).shape)
        y = torch.stack([by_residue.get(residue, blank) for residue in range(axis.stride)], dim + 1)
    sizes = [axis.per_residue * axis.stride for axis in axes]
    if channels_last:
        y = y.permute(0, *range(3, y.dim()), 1, 2).reshape(y.shape[0], *sizes, groups * outputs).movedim(-1, 1)
    else:
        y = y.reshape(y.shape[0], groups * outputs, *sizes)
    for i, axis in enumerate(axes):
        y = y.narrow(2 + i, axis.skip, axis.out)
    return y
