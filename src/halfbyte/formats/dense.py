"""Codes as they are in files: those of 5 and 6 bits, b, without the bits that they leave unused in a byte.

Code j of a row takes the bits b*j … b*j + b - 1 of the row, of which bit i is bit i % 8 of byte i // 8: q where codes are unsigned, and
q + 2^(b-1) where they are signed. A row has whole bytes; the bits after its last code are 0. All else is as in `Codes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.spec import Format

_CHUNK = 1 << 20  # codes that are converted at a time


def dense_tensors(fmt: Format, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """`stored_tensors` in files."""
    tensors = stored_tensors(fmt, shape)
    if fmt.packed_bits:
        tensors["data"] = torch.uint8, (*shape[:-1], -(-shape[-1] * fmt.packed_bits // 8))
    return tensors


def stored_bytes(fmt: Format, shape: tuple[int, ...]) -> int:
    """Bytes of all of `dense_tensors`."""
    return sum(math.prod(size) * dtype.itemsize for dtype, size in dense_tensors(fmt, shape).values())


def to_dense(codes: Codes) -> dict[str, Tensor]:
    """The tensors of `codes` as they are in files. Raises FormatError for codes of 5 and 6 bits that are outside of their range."""
    fmt, tensors = codes.format, codes.tensors()
    if not fmt.packed_bits:
        return tensors
    codes.check_values()
    out = torch.empty(dense_tensors(fmt, codes.shape)["data"][1], dtype=torch.uint8, device=codes.data.device)
    for given, packed in _matching_rows(codes.data, out):
        words = _eights(given - fmt.q_min, 8)
        for n in (1, 2, 4):  # codes that lie together move to their neighbours
            upper = words >> n * (8 - fmt.packed_bits)
            upper &= _low(n, fmt) << n * fmt.packed_bits
            words &= _low(n, fmt)
            words |= upper
        packed.copy_(words.view(torch.uint8)[..., : fmt.packed_bits].flatten(1)[:, : packed.shape[1]])
    return {**tensors, "data": out}


def from_dense(fmt: Format, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Codes:
    """The inverse of `to_dense`. Raises FormatError where a tensor is not as the format has it in files."""
    if not fmt.packed_bits or "data" not in tensors:
        return Codes.from_tensors(fmt, shape, tensors)
    data, k, wanted = tensors["data"], shape[-1], dense_tensors(fmt, shape)["data"]
    if (data.dtype, tuple(data.shape)) != wanted:
        raise FormatError(
            f"the data of {fmt} codes of shape {list(shape)} is {wanted[0]} {list(wanted[1])} in files, got {data.dtype} {list(data.shape)}"
        )
    dtype, size = stored_tensors(fmt, shape)["data"]
    out = torch.empty(size, dtype=dtype, device=data.device)
    for given, unpacked in _matching_rows(data, out):
        words = _eights(given, fmt.packed_bits)
        for n in (4, 2, 1):
            upper = words & _low(n, fmt) << n * fmt.packed_bits
            upper <<= n * (8 - fmt.packed_bits)
            words &= _low(n, fmt)
            words |= upper
        u = words.view(torch.uint8).flatten(1)
        if k % 8 and bool(u[:, k:].any()):
            raise FormatError(f"the unused last bits of a row of {fmt} codes of shape {list(shape)} are 0 in files, got other values")
        torch.add(u[:, :k].view(dtype), fmt.q_min, out=unpacked)
    return Codes.from_tensors(fmt, shape, {**tensors, "data": out})


def _matching_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each tensor at a time, as matrices; nothing where there are no elements."""
    if not all(tensor.numel() for tensor in tensors):
        return
    matrices = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    count = max(1, _CHUNK // matrices[0].shape[1])
    yield from zip(*(matrix.split(count) for matrix in matrices), strict=True)


def _eights(rows: Tensor, each: int) -> Tensor:
    """Bytes [N, …] -> int64 [N, groups, 1], of each the `each` lower bytes, which are 0 after the last."""
    n, groups = len(rows), -(-rows.shape[1] // each)
    whole = rows if rows.shape[1] == groups * each else torch.nn.functional.pad(rows, (0, groups * each - rows.shape[1]))
    words = torch.empty(n, groups, 8, dtype=rows.dtype, device=rows.device)
    words[..., :each] = whole.view(n, groups, each)
    return words.view(torch.int64)


def _low(codes: int, fmt: Format) -> int:
    """A mask of 64 bits: of each 2 * `codes` bytes the lowest bits, as many as these codes take without gaps."""
    return sum(((1 << codes * fmt.packed_bits) - 1) << at for at in range(0, 64, 16 * codes))
