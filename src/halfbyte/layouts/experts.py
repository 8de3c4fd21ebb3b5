"""Stacked weights [E, N, K], one matrix per expert: the packed matrices [N, K] one after the other.

The layout is called `stacked_` and the name of the matrices' layout. Every matrix begins at a multiple of 64 bytes (of 256 in
`gpu_tiles`), so that a view of one expert is a packed matrix like any other.

Some experts at a time are packed as one matrix of all their rows, each expert's padded to whole panels. That matrix has the same bytes in
another order (`_in_both`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import Packed

Geometry: TypeAlias = cpu_tiles.Geometry | gpu_tiles.Geometry

PREFIX = "stacked_"
_PIECE = 1 << 26  # elements that are packed or unpacked at a time, to bound their memory


def pack(codes: Codes, pack_matrix: Callable[[Codes], Packed], layout: str) -> Packed:
    """Codes [E, N, K] -> Packed, with each matrix as `pack_matrix` arranges it in `layout`, on the device of the codes."""
    (count, n, k), device = codes.shape, codes.data.device
    geo = _geometry(layout, codes.format, n, k)
    data = cpu_tiles.allocate(count * geo.nbytes) if device.type == "cpu" else codes.data.new_zeros(count * geo.nbytes, dtype=torch.uint8)
    for some in _some_experts(count, geo):
        one = pack_matrix(_one_matrix(codes.select(some), geo)).data
        for of_stack, of_one in _in_both(data.view(count, -1)[some], one, geo):
            of_stack.copy_(of_one)
    return Packed(codes.format, codes.shape, PREFIX + layout, data)


def unpack(packed: Packed, unpack_matrix: Callable[[Packed], Codes]) -> Codes:
    """The exact inverse of `pack`."""
    layout, (count, n, k) = _matrix_layout(packed), packed.shape
    geo, parts = _geometry(layout, packed.format, n, k), list[Codes]()
    if packed.data.numel() != count * geo.nbytes:
        got = f"{packed.data.numel()} in layout {packed.layout}"
        raise FormatError(f"{count} matrices [{n}, {k}] of {packed.format} take {geo.nbytes} bytes each in layout {layout}, got {got}")
    for some in _some_experts(count, geo):
        stack = packed.data.view(count, -1)[some]
        shape = len(stack) * geo.n_padded, k
        one = stack.new_empty(_geometry(layout, packed.format, *shape).nbytes)
        for of_stack, of_one in _in_both(stack, one, geo):
            of_one.copy_(of_stack)
        codes = unpack_matrix(Packed(packed.format, shape, layout, one))
        if n == geo.n_padded:
            parts.append(codes.reshape((len(stack), n, k)))
        else:
            parts.extend(codes.select(slice(e * geo.n_padded, e * geo.n_padded + n)).reshape((1, n, k)) for e in range(len(stack)))
    return Codes.joined(parts, torch.cat) if parts else Codes.zeros(packed.format, packed.shape, packed.device)


def matrices(packed: Packed) -> list[Packed]:
    """Each expert's matrix, sharing the memory of `packed`."""
    layout, count = _matrix_layout(packed), packed.shape[0]
    return [Packed(packed.format, packed.shape[1:], layout, part) for part in packed.data.view(count, -1)] if count else []


def _matrix_layout(packed: Packed) -> str:
    if not packed.layout.startswith(PREFIX):
        raise FormatError(f"stacked experts have a layout that begins with {PREFIX}, got {packed.layout}")
    return packed.layout.removeprefix(PREFIX)


def _geometry(layout: str, fmt: Format, n: int, k: int) -> Geometry:
    match layout:
        case cpu_tiles.NAME:
            return cpu_tiles.geometry(fmt, (n, k))
        case gpu_tiles.NAME:
            return gpu_tiles.geometry(fmt, (n, k))
        case _:
            raise FormatError(f"stacked matrices are in layout {cpu_tiles.NAME} or {gpu_tiles.NAME}, got {layout}")


def _some_experts(count: int, geo: Geometry) -> Iterator[slice]:
    """Ranges of experts with about _PIECE elements each; none where matrices [N, K] have no elements."""
    step = max(1, _PIECE // max(1, geo.n_padded * geo.k))
    return (slice(start, start + step) for start in range(0, count if geo.nbytes else 0, step))


def _one_matrix(codes: Codes, geo: Geometry) -> Codes:
    """Codes [some, N, K] -> those of one matrix [some * N padded, K], whose padding has q = 0."""
    count, k, missing = len(codes.data), geo.k, geo.n_padded - geo.n
    if missing:
        zeros = Codes.zeros(codes.format, (missing, k), codes.data.device)
        zeros.data.fill_(17 * codes.format.pad_index if codes.format.bits == 4 else 0)
        codes = Codes.joined([part for e in range(count) for part in (codes.select(e), zeros)], torch.cat)
    return codes.reshape((count * geo.n_padded, k))


def _in_both(stack: Tensor, one: Tensor, geo: Geometry) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same bytes in packed matrices and in one matrix of all their rows, uint8 [strips, matrices, bytes of a strip].

    Args:
        stack: uint8 [matrices, bytes of each].
        one: uint8 [bytes].
        geo: Of each matrix.
    """
    count = len(stack)
    of_one = _geometry(geo.layout, geo.format, count * geo.n_padded, geo.k)
    for section, section_of_one in zip(geo.sections, of_one.sections, strict=True):
        strips, width = section.strips, section.strip_bytes
        yield (
            stack[:, section.start :][:, : strips * width].unflatten(1, (strips, width)).transpose(0, 1),
            one[section_of_one.start :][: strips * count * width].view(strips, count, width),
        )
