"""Keys and values of attention in 8 bits, as a cache keeps them: each head of a token, D elements, is a record of bytes.

    D codes, int8; then ceil(D / 32) scales, bfloat16, little-endian: of elements 0 … 31, of 32 … 63, and so on
    scale = bfloat16(max |x| / 127) of 32 elements,   code = round(x / scale), ties to even,   x' = scale * code

|x' - x| is at most half a scale, max |x| / 253, and x' is exact in float32. Where the largest is below 127 * 2^-126 all are 0; where an
element is not finite all 32 become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # elements of a scale
MOST = 127  # of a code
LEAST_SCALE = 2.0**-126


def record_bytes(dim: int) -> int:
    return dim + 2 * -(-dim // BLOCK)


def to_records(x: Tensor) -> Tensor:
    """[..., D] of floats -> int8 [..., record_bytes(D)]"""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) / MOST
    scales = scales.masked_fill(scales < LEAST_SCALE, 0).to(torch.bfloat16)
    codes = (blocks / scales.float()).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat((codes.flatten(-2)[..., : x.shape[-1]], scales.view(torch.int8).flatten(-2)), -1)


def from_records(records: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The inverse, up to rounding."""
    scales = records[..., dim:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    return (records[..., :dim] * scales.repeat_interleave(BLOCK, -1)[..., :dim]).to(dtype)
