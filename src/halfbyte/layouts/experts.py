"""Stacked weights [E, N, K], one matrix per expert: the packed matrices [N, K] one after the other.

The layout is called `stacked_` and the name of the matrices' layout. Every matrix begins at a multiple of 64 bytes (of 256 in
`gpu_tiles`), so that a view of one expert is a packed matrix like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed

PREFIX = "stacked_"


def pack(codes: Codes, pack_matrix: Callable[[Codes], Packed], layout: str) -> Packed:
    """Codes [E, N, K] -> Packed, with each matrix as `pack_matrix` arranges it in `layout`, on the device of the codes."""
    data = torch.empty(0, dtype=torch.uint8, device=codes.data.device)
    for e in range(codes.shape[0]):
        matrix = pack_matrix(codes.select(e)).data
        if e == 0:
            nbytes = codes.shape[0] * matrix.numel()
            data = torch.empty(nbytes, dtype=torch.uint8, device=matrix.device) if matrix.is_cuda else cpu_tiles.allocate(nbytes)
        data.view(codes.shape[0], -1)[e] = matrix
    return Packed(codes.format, codes.shape, PREFIX + layout, data)


def unpack(packed: Packed, unpack_matrix: Callable[[Packed], Codes]) -> Codes:
    """The exact inverse of `pack`."""
    parts = [unpack_matrix(matrix) for matrix in matrices(packed)]
    return Codes.joined(parts, torch.stack) if parts else Codes.zeros(packed.format, packed.shape, packed.device)


def matrices(packed: Packed) -> list[Packed]:
    """Each expert's matrix, sharing the memory of `packed`."""
    if not packed.layout.startswith(PREFIX):
        raise FormatError(f"stacked experts have a layout that begins with {PREFIX}, got {packed.layout}")
    layout, count = packed.layout.removeprefix(PREFIX), packed.shape[0]
    return [Packed(packed.format, packed.shape[1:], layout, part) for part in packed.data.view(count, -1)] if count else []
