"""Weights of bitsandbytes: those in 8 bits -> Codes, those in 4 bits -> floats.

    8 bits   weight         int8 [N, K]
             SCB            float32 [N], the largest magnitude of each row
             weight_format  uint8, 0: row-major; other values are layouts for old GPUs
             w = SCB / 127 * weight     the codes are kept, their scale is rounded once
    4 bits   weight         the flattened weight, two elements per byte, the first in the high nibble; any dtype, any shape
             quant_map      float32 [16]: the value of each nibble, in nf4 or fp4
             absmax         float32, one for each `blocksize` elements; or, quantized themselves ("double quantization"), uint8 with
             nested_absmax  float32, for each `nested_blocksize` of these
             nested_quant_map  float32 [256]
             quant_state.bitsandbytes__nf4 (or fp4)  the bytes of a JSON object: shape, blocksize, nested_blocksize, nested_offset
             w = quant_map[nibble] * absmax     absmax = nested_quant_map[absmax] * nested_absmax + nested_offset

8-bit codes hold neither: the sixteen values of nf4 are not multiples of one step, and those of fp4 only of 1/192.

Sources: https://arxiv.org/abs/2305.14314; bitsandbytes, functional.py (QuantState) and backends/default/ops.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import as_format
from halfbyte.io.safetensors import is_shape, parse_json
from halfbyte.io.tensors import bytes_of
from halfbyte.io.weights import zero_points

EIGHT = ("SCB", "weight", "weight_format")
STATES = {kind: f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
NUMBERS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
CHANNEL = as_format("int8_channel")
_CHUNK = 1 << 20  # weights that are decoded at a time


@dataclass(frozen=True)
class State:
    """The JSON object `quant_state` of a 4-bit weight."""

    shape: tuple[int, ...]
    block: int
    nested_block: int
    nested_offset: float

    @classmethod
    def of(cls, stored: Tensor, where: str) -> State:
        """Raise CheckpointError for values that bitsandbytes does not write."""
        found: dict[str, Any] = parse_json(bytes(bytes_of(stored)), f"the quant_state of {where}")
        shape, block = found.get("shape"), found.get("blocksize")
        nested, offset = found.get("nested_blocksize", 1), found.get("nested_offset", 0.0)
        sound = isinstance(shape, list) and len(shape) > 0 and is_shape(shape)
        sizes = all(type(size) is int and 0 < size < 1 << 31 for size in (block, nested))
        if not sound or not sizes or type(offset) not in (int, float) or not math.isfinite(offset):
            raise CheckpointError(f"the quant_state of {where} is {short(found)}, which is invalid: the checkpoint is damaged")
        return cls(tuple(shape or ()), int(str(block)), nested, float(offset))

    @property
    def count(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)


def read_eight(parts: Mapping[str, Tensor], where: str) -> Codes:
    """The weight [N, K]."""
    shape = tuple(parts["weight"].shape) if parts["weight"].dim() == 2 else (0, 0)
    weight = zero_points.take(parts, "weight", (torch.int8,), shape, where)
    largest = parts["SCB"].reshape(-1) if parts["SCB"].numel() == shape[0] else parts["SCB"]  # older ones are [1, N]
    largest = zero_points.take({"SCB": largest}, "SCB", (torch.float32,), (shape[0],), where)
    if "weight_format" in parts and parts["weight_format"].flatten().tolist() != [0]:
        raise CheckpointError(f"{where} has its columns in an order for old GPUs (weight_format): save the model with a newer bitsandbytes")
    return Codes(CHANNEL, shape, weight, (largest / 127).unsqueeze(1))


def read_four(parts: Mapping[str, Tensor], state: State, dtype: torch.dtype, where: str) -> Tensor:
    """The weight in `dtype`, its products computed in float32."""
    count = state.count
    blocks = -(-count // state.block)
    if parts["weight"].nbytes != (count + 1) // 2:
        got = f"{parts['weight'].nbytes} bytes"
        raise CheckpointError(
            f"{where} has {got}, but its quant_state describes {list(state.shape)} weights of 4 bits: the checkpoint is damaged"
        )
    table = zero_points.take(parts, "quant_map", (torch.float32,), (16,), where)
    absmax = parts.get("absmax", torch.empty(0, dtype=torch.float32, device="cpu")).reshape(-1)
    if "nested_absmax" in parts:
        absmax = zero_points.take({"absmax": absmax}, "absmax", (torch.uint8,), (blocks,), where)
        outer = parts["nested_absmax"].reshape(-1)
        outer = zero_points.take({"nested_absmax": outer}, "nested_absmax", (torch.float32,), (-(-blocks // state.nested_block),), where)
        inner = zero_points.take(parts, "nested_quant_map", (torch.float32,), (256,), where)[absmax.int()]
        absmax = inner * outer[torch.arange(blocks, device="cpu") // state.nested_block] + state.nested_offset
    else:
        absmax = zero_points.take({"absmax": absmax}, "absmax", (torch.float32,), (blocks,), where)
    if not bool(absmax.isfinite().all() & table.isfinite().all()):
        raise CheckpointError(f"{where} has a scale that is not finite: the checkpoint is damaged")
    packed = parts["weight"].contiguous().flatten().view(torch.uint8)
    out = torch.empty(count, dtype=dtype, device="cpu")
    for first in range(0, count, _CHUNK):
        last = min(count, first + _CHUNK)
        code_pairs = packed[first // 2 : (last + 1) // 2]
        nibbles = torch.stack((code_pairs >> 4, code_pairs & 15), dim=1).flatten()[: last - first]
        out[first:last] = table[nibbles.int()] * absmax[torch.arange(first, last, device="cpu") // state.block]
    return out.reshape(state.shape)
