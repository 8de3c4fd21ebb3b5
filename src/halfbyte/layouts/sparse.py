"""2:4 sparsity: of every 4 neighbours along K at most 2 codes are not the code of 0. Layouts that leave the others out are chosen by it."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes, unpack_nibbles

GROUP, KEPT = 4, 2
SPARSITY = f"{KEPT}:{GROUP}"
_FIRST, _MORE = 16, 1 << 24  # rows, and then elements, that are looked at at a time: a dense weight is found out by the first


def why_not_sparse(codes: Codes) -> str | None:
    """Why `codes` are not 2:4 sparse; None if they are. A short group at the end of a row counts as if zeros followed.

    Codes with zero points are compared with the point of their own block.
    """
    fmt, k = codes.format, codes.shape[-1]
    block = fmt.block_size(k)
    if fmt.zero == "offset":
        return "formats with float offsets have no code that means 0"
    if block % GROUP and block < k:
        return f"blocks of {block} cut groups of {GROUP} neighbours"
    if codes.data.numel() == 0:
        return "there are no codes"
    rows = codes.data.reshape(-1, codes.data.shape[-1])
    points = None if codes.zero is None else codes.zero.expand(*codes.shape[:-1], codes.zero.shape[-1]).reshape(len(rows), -1)
    start, step = 0, _FIRST
    while start < len(rows):
        part = slice(start, start + step)
        if not _sparse(codes, rows[part], None if points is None else points[part], block):
            return f"of {GROUP} neighbours more than {KEPT} are not 0"
        start, step = start + step, max(_FIRST, _MORE // k)
    return None


def _sparse(codes: Codes, rows: Tensor, points: Tensor | None, block: int) -> bool:
    """Whether some rows of the codes' data, with their zero points, are 2:4 sparse."""
    fmt, k = codes.format, codes.shape[-1]
    u = unpack_nibbles(rows, k) if fmt.bits == 4 else rows.view(torch.uint8)
    zero: Tensor | int = 8 if fmt.bits == 4 else 0
    if points is not None:
        zero = points if points.shape[1] == 1 else points.repeat_interleave(block, dim=1)[:, :k]
    differs = torch.nn.functional.pad((u != zero).contiguous(), (0, -k % GROUP)).view(torch.int32)  # a byte each
    return not bool(((differs * 0x01010101) >> 24 > KEPT).any())
