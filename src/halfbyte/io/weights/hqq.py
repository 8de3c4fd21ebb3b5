"""HQQ's weights -> Codes: w = (q - zero) scale, zero and scale floats for each group of the flattened weight.

    W_q    [rows / (8 / bits), group]  uint8, the first rows in the highest bits; of 3 bits int32, ten rows a word, from bit 27 down.
                                       Or the same bytes viewed as a floating-point dtype
    scale, zero  [rows, 1]             with axis 1: groups are contiguous inputs
                 [1, columns]          with axis 0: they are not, so Codes cannot hold them

Codes have offsets -zero * scale, in float32: a product of two numbers of 11 bits or fewer is exact there. Where all zeros are integers
they are zero points. Weights of 1, 2 and 3 bits become 4-bit codes.

Source: hqq 0.2.8, core/quantize.py and core/bitpack.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes, pack_nibbles
from halfbyte.formats.spec import Format
from halfbyte.io.weights import zero_points

BITS = (8, 4, 3, 2, 1)
_CHUNK = 1 << 20  # weights that are multiplied at a time


def format_of(scale: Tensor, zero: Tensor, bits: int, group: int | None) -> Format:
    """The format that holds codes with these scales and zeros."""
    packed_bits, block = (8 if bits == 8 else 4), group or "channel"
    if not bool(((zero == zero.round()) & (zero >= 0) & (zero < 1 << packed_bits)).all()):
        return Format(packed_bits, block, "offset", torch.float32)  # type: ignore[arg-type]
    middle = bool((zero == zero_points.middle(packed_bits)).all())
    return Format(packed_bits, block, "none" if middle else "point", scale.dtype)  # type: ignore[arg-type]


def read(parts: Mapping[str, Tensor], bits: int, group: int | None, shape: tuple[int, int], where: str) -> Codes:
    """A weight with groups along its inputs -> Codes [N, K]."""
    n, k = shape
    values = _values(parts, bits, group or k, n * k, where).reshape(n, k)
    blocks = k // (group or k)
    scale, zero = (
        zero_points.take(parts, name, zero_points.SCALES, (n * blocks, 1), where).reshape(n, blocks) for name in ("scale", "zero")
    )
    fmt = format_of(scale, zero, bits, group)
    data = values if fmt.bits == 8 else pack_nibbles(values)
    if fmt.zero != "offset":
        return zero_points.codes_of(fmt.bits, group or -1, k, data, scale, zero.to(torch.uint8))
    return Codes(fmt, shape, data, scale.float(), -(zero.float() * scale.float()))


def read_floats(
    parts: Mapping[str, Tensor], bits: int, group: int | None, shape: tuple[int, int], where: str, *, dtype: torch.dtype
) -> Tensor:
    """A weight with groups along its outputs -> [N, K] in `dtype`, its products computed in float32."""
    rows = group or shape[0]
    columns = shape[0] * shape[1] // rows
    values = _values(parts, bits, columns, shape[0] * shape[1], where)
    scale, zero = (zero_points.take(parts, name, zero_points.SCALES, (1, columns), where).float() for name in ("scale", "zero"))
    out = torch.empty(rows, columns, dtype=dtype, device="cpu")
    step = max(1, _CHUNK // max(1, columns))
    for target, some in zip(out.split(step), values.split(step), strict=True):
        target.copy_((some - zero) * scale)
    return out.reshape(shape)


def _values(parts: Mapping[str, Tensor], bits: int, columns: int, count: int, where: str) -> Tensor:
    """uint8 [rows, columns]"""
    packed, per = parts["W_q"], 10 if bits == 3 else 8 // bits
    rows = count // columns
    word = torch.int32 if bits == 3 else torch.uint8
    if packed.dim() != 2 or rows * columns != count or packed.nbytes != -(-rows // per) * columns * word.itemsize:
        what = f"{str(packed.dtype).removeprefix('torch.')} {list(packed.shape)}"
        raise CheckpointError(f"{where}.W_q is {what}, not {rows} x {columns} weights of {bits} bits: the checkpoint is damaged")
    words = packed.contiguous().view(word).reshape(-1, columns)
    pieces = [((words >> bits * (per - 1 - i)) & ((1 << bits) - 1)).to(torch.uint8) for i in range(per)]
    return torch.cat(pieces)[:rows]
