"""Codes for given scales and zeros: each weight goes to the nearest code, by the format's own rounding (`absmax.encode`)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.absmax import encode, grid_of
from halfbyte.quantizers.builder import Builder, as_blocks
from halfbyte.quantizers.check import check_finite, check_weight


@torch.no_grad()
def quantize_to_grid(weight: Tensor, fmt: Format, scale: Tensor, zero: Tensor | None, name: str = "weight") -> Codes:
    """Quantize `weight` [..., N, K] to `fmt` with these scales (floating point, rounded to the scale dtype here) and zeros (as stored),
    both in the shape `Format.scale_shape`.

    Raises ArgumentError where a weight is NaN or infinite or the grid does not fit, FormatError where a scale overflows.
    """
    shape = fmt.scale_shape(tuple(weight.shape))
    if tuple(scale.shape) != shape or (zero is None) != (fmt.zero == "none") or (zero is not None and tuple(zero.shape) != shape):
        got = f"scales {list(scale.shape)} and " + ("no zeros" if zero is None else f"zeros {list(zero.shape)}")
        raise ArgumentError(f"the grid of {fmt} codes of {name} {list(weight.shape)} is {list(shape)}, got {got}")
    check_weight(weight, name)
    check_finite(weight, name)
    builder = Builder(weight, fmt, name)
    flat = builder.scale.shape
    exact, points = scale.detach().reshape(flat).float(), None if zero is None else zero.reshape(flat)
    row = 0
    for group in builder:
        at = slice(None) if fmt.block == "tensor" else slice(row, row + len(group[0]))
        row += sum(map(len, group))
        grid = grid_of(fmt, exact[at].to(fmt.scale), None if points is None else points[at])
        builder.check("scale", exact[at], grid.scale)
        builder.add(group, grid, (encode(fmt, as_blocks(rows, fmt), grid) for rows in group))
    return builder.codes()
