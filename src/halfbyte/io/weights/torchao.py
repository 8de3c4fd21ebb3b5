"""torchao's weights -> Codes: w = (q - zero) scale.

    Int8Tensor                qdata int8 [N, K], scale [N, blocks], zero_point int8 [N, blocks] or none
    IntxUnpackedToInt8Tensor  the same; q has 1 to 8 bits, which the file's metadata give

Source: torchao 0.18, quantization/quantize_/workflows, prototype/safetensors
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes, pack_nibbles
from halfbyte.io.weights import zero_points

PARTS = ("qdata", "scale", "zero_point")


def read(parts: Mapping[str, Tensor], bits: int, shape: tuple[int, int], blocks: int, where: str) -> Codes:
    """qdata, scale and zero_point -> Codes [N, K] of 4 or 8 bits."""
    n, k = shape
    q = zero_points.take(parts, "qdata", (torch.int8,), shape, where)
    low = -(1 << bits - 1)
    if q.numel() and (int(q.min()) < low or int(q.max()) >= -low):
        raise CheckpointError(f"{where}.qdata has values in {int(q.min())} … {int(q.max())}, not of {bits} bits: the checkpoint is damaged")
    scale = zero_points.take(parts, "scale", zero_points.SCALES, (n, blocks), where)
    zero = zeros(parts, (n, blocks), where) - low
    if bool(((zero < 0) | (zero >= 1 << bits)).any()):
        raise CheckpointError(f"{where}.zero_point is not a number of {bits} bits: the checkpoint is damaged")
    raw = q.to(torch.int16) - low
    data = raw.to(torch.uint8) if bits == 8 else pack_nibbles(raw.to(torch.uint8))
    return zero_points.codes_of(bits, k // blocks if blocks > 1 else -1, k, data, scale, zero.to(torch.uint8))


def zeros(parts: Mapping[str, Tensor], shape: tuple[int, int], where: str) -> Tensor:
    """The zero points of signed codes, int64, of any value."""
    if "zero_point" not in parts:
        return torch.zeros(shape, dtype=torch.int64, device="cpu")
    return zero_points.take(parts, "zero_point", (torch.int8, torch.int16, torch.int32, torch.int64), shape, where).to(torch.int64)
