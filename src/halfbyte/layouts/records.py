"""Keys and values of attention in 8 bits, as a cache keeps them: each head of a token has D codes and ceil(D / 32) scales.

    scale = bfloat16(max |x| / 127) of 32 elements,   code = round(x / scale), ties to even,   x' = scale * code

On a CPU a head is a record of bytes: D codes, int8; then its scales, bfloat16, little-endian: of elements 0 … 31, of 32 … 63, and so on.
On a GPU codes [..., D] and scales [..., ceil(D / 32)] are tensors of their own, so that codes are aligned to 16 bytes.

|x' - x| is at most half a scale, max |x| / 253, and x' is exact in float32. Where the largest is below 127 * 2^-126 all are 0; where an
element is not finite all 32 become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # elements of a scale
MOST = 127  # of a code
LEAST_SCALE = 2.0**-126


def scales_of(dim: int) -> int:
    """The number of scales of a head."""
    return -(-dim // BLOCK)


def record_bytes(dim: int) -> int:
    return dim + 2 * scales_of(dim)


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] of floats -> codes int8 [..., D], scales bfloat16 [..., ceil(D / 32)]"""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) / MOST
    scales = scales.masked_fill(scales < LEAST_SCALE, 0).to(torch.bfloat16)
    codes = (blocks / scales.float()).nan_to_num(0.0).round().to(torch.int8)
    return codes.flatten(-2)[..., : x.shape[-1]], scales.squeeze(-1)


def from_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, up to rounding: [..., D] of `dtype`."""
    return (codes * scales.float().repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]).to(dtype)


def to_records(x: Tensor) -> Tensor:
    """[..., D] of floats -> int8 [..., record_bytes(D)]"""
    codes, scales = to_codes(x)
    return torch.cat((codes, scales.contiguous().view(torch.int8)), -1)


def split(records: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of records [..., record_bytes(dim)]."""
    return records[..., :dim], records[..., dim:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


def from_records(records: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_records`, up to rounding."""
    return from_codes(*split(records, dim), dtype)
