"""AWQ's weights (its "gemm" version) <-> Codes. Nothing is rounded.

    qweight  int32 [K, N/8]    codes of one input for eight neighbouring outputs: nibble i, lowest first, is output ORDER[i] of the eight
    qzeros   int32 [K/g, N/8]  the zero points of each block, in the same order
    scales   [K/g, N]
    w[n, k] = scales[k / g, n] * (q[k, n] - qzeros[k / g, n])

Sources: https://arxiv.org/abs/2306.00978; WQLinear_GEMM in github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes, pack_nibbles, unpack_nibbles
from halfbyte.formats.spec import Format
from halfbyte.io.weights import zero_points

PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = tuple(ORDER.index(i) for i in range(8))  # in which nibble each output is


def read(parts: Mapping[str, Tensor], group_size: int, where: str) -> Codes:
    """The weight [N, K]; `group_size` -1 is one block per row. `where` is its name in error messages."""
    qweight = zero_points.take(parts, "qweight", (torch.int32,), (None, None), where)
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    blocks, rest = divmod(k, zero_points.block_of(group_size, k))
    if rest:
        raise CheckpointError(f"{where} has {k} inputs, no multiple of its blocks of {group_size}: the checkpoint is damaged")
    zeros = zero_points.take(parts, "qzeros", (torch.int32,), (blocks, n // 8), where)
    scales = zero_points.take(parts, "scales", zero_points.SCALES, (blocks, n), where)
    data = pack_nibbles(_unpack(qweight).T)
    return zero_points.codes_of(4, group_size, k, data, scales.T.contiguous(), _unpack(zeros).T.contiguous())


def write(codes: Codes) -> dict[str, Tensor]:
    """The three tensors of a weight for which `why_not` gives None."""
    data, zeros = zero_points.unsigned(codes)
    return {
        "qweight": _pack(unpack_nibbles(data, codes.shape[1]).T),
        "qzeros": _pack(zeros.T),
        "scales": codes.scale.T.contiguous(),
    }


def why_not(fmt: Format, shape: tuple[int, ...]) -> str | None:
    """Why a weight cannot be written, or None."""
    if isinstance(fmt.block, int) and shape[-1] % fmt.block:  # one block longer than the row, too
        return f"its blocks of {fmt.block} do not divide its {shape[-1]} columns"
    return zero_points.why_not(fmt, shape, (4,), n_multiple=8, k_multiple=1)


def _unpack(packed: Tensor) -> Tensor:
    """int32 [R, N/8] -> uint8 [R, N]."""
    nibbles = unpack_nibbles(zero_points.bytes_of(packed), 8 * packed.shape[1])
    eights: Tensor = nibbles.unflatten(1, (-1, 8))
    return eights[:, :, list(_PLACE)].flatten(1)


def _pack(values: Tensor) -> Tensor:
    """uint8 [R, N] -> int32 [R, N/8]."""
    eights: Tensor = values.unflatten(1, (-1, 8))
    return zero_points.words(pack_nibbles(eights[:, :, list(ORDER)].flatten(1)))
