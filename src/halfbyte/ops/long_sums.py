"""Requantized products whose sums of int8 codes may overflow an int32 (`LONGEST_INTEGER_SUM`), on all devices, called by their custom ops.

    y = clamp(rne(multiplier * sum((x - in_zero) * q) + offset))

K is split into pieces. Sums are exact in float64, whatever their order: they are below 2^53. Slow compared with kernels, which such
layers are too rare to be worth.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import LONGEST_INTEGER_SUM, Window
from halfbyte.layouts.convolution import Filter, channels_first
from halfbyte.ops.conv.images import channels_last

_PIECE = 1 << 13  # elements of K in float64 at a time


def overflows(k: int) -> bool:
    """Whether a sum of k products of codes may overflow an int32."""
    return k > LONGEST_INTEGER_SUM


def starts(sums: Tensor, k: int) -> Tensor:
    """What requantization tables multiply by -in_zero, from the sums of each output's codes (int32): for long sums 1, as `qlinear` here
    subtracts in_zero from x."""
    return torch.ones_like(sums) if overflows(k) else sums


def qlinear(x: Tensor, codes: Codes, table: Tensor, low: int, high: int) -> Tensor:
    """x int8 [..., K], codes [N, K], table float32 [3, at least N] with -in_zero (int32 bits) in its third row -> int8 [..., N]."""
    n, k = codes.shape
    shift, weight = table[2, :1].view(torch.int32).double(), codes.values()
    total = x.new_zeros((*x.shape[:-1], n), dtype=torch.float64)
    for start in range(0, k, _PIECE):
        piece = slice(start, start + _PIECE)
        total += (x[..., piece].double() + shift) @ weight[:, piece].double().T
    return _requantized(total, table[0, :n], table[1, :n], low, high)


def qconv2d(x: Tensor, codes: Codes, sizes: Filter, window: Window, table: Tensor, in_zero: int, low: int, high: int) -> Tensor:
    """x int8 [B, C, H, W] -> int8 [B, Co, Ho, Wo]. table: float32 [groups or 1, at least 3, at least Co / groups]."""
    top, bottom, left, right = window.padding
    batch, _, *image = x.shape
    weight, channels = channels_first(codes.values(), sizes.kernel), x.reshape(batch, sizes.groups, sizes.channels, *image)
    total, step = None, max(1, _PIECE // sizes.taps)
    for start in range(0, sizes.channels, step):
        piece = slice(start, start + step)
        some = (channels[:, :, piece].double() - in_zero).flatten(1, 2)
        padded = functional.pad(some, (left, right, top, bottom))
        part = functional.conv2d(padded, weight[:, piece].double(), None, window.stride, 0, window.dilation, sizes.groups)
        total = part if total is None else total + part
    assert total is not None
    offset, multiplier = (table[:, row, : sizes.out // len(table)].reshape(-1, 1, 1) for row in (0, 1))
    y = _requantized(total.round(), offset, multiplier, low, high)  # some algorithms of GPUs' libraries round on the way
    return channels_last(y)


def _requantized(total: Tensor, offset: Tensor, multiplier: Tensor, low: int, high: int) -> Tensor:
    return (total * multiplier.double() + offset.double()).round().clamp(low, high).to(torch.int8)
