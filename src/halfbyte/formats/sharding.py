"""Codes cut into shards, one per process, and joined again bit for bit.

A shard along N (rows) or E (experts) has the codes, scales and zeros of its rows. A shard along K has whole blocks, so that no two shards
need the same block's scale; the scale of a whole row or tensor is copied to every shard.

`nn/parallel` cuts the weights of a model in memory by `take`; `checkpoint/native` reads only the `stored_ranges` of a process from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes, pack_nibbles, stored_tensors, unpack_nibbles
from halfbyte.formats.spec import Format

Range = tuple[int, int]  # first, one past the last
Ranges = tuple[Range, ...]  # a shard is their concatenation


def even_ranges(size: int, count: int, unit: int = 1) -> list[Range]:
    """Split 0 … `size` into `count` ranges of whole units, as evenly as possible, the longer first; the last unit may be short."""
    units, longer = divmod(-(-size // unit), count)
    bounds = [min(size, (i * units + min(i, longer)) * unit) for i in range(count + 1)]
    return list(pairwise(bounds))


def shard(codes: Codes, dim: int, index: int, of: int) -> Codes:
    """Cut codes [..., N, K] along a dimension, as evenly as whole rows or blocks allow, the larger shards first.

    Args:
        codes: The whole codes.
        dim: The dimension that is cut.
        index: Index of the shard.
        of: Number of shards.

    Returns:
        The shard.

    Raises:
        FormatError: There is no such dimension or part, or K is cut into more parts than a row has blocks.

    Example:
        >>> hb.shard(hb.quantize(torch.randn(8, 64), "q8_0"), 0, 1, 2).shape
        (4, 64)
    """
    axis = _axis(codes.shape, dim)
    if of < 1:
        raise FormatError(f"codes are cut into one part at least, got {of}")
    if not 0 <= index < of:
        raise FormatError(f"a part of {of} is one of 0 … {of - 1}, got {index}")
    size, unit = codes.shape[axis], _unit(codes.format, codes.shape, axis)
    if _is_k(codes.shape, axis) and (blocks := -(-size // unit)) < of:
        raise FormatError(
            f"{codes.format} codes of shape {list(codes.shape)} have {blocks} blocks a row: cut K into at most {blocks} parts"
        )
    return take(codes, dim, (even_ranges(size, of, unit)[index],))


def unshard(parts: Sequence[Codes], dim: int) -> Codes:
    """Join shards along a dimension: the inverse of `shard`, bit for bit.

    Args:
        parts: All shards, in order.
        dim: The dimension that was cut.

    Returns:
        The whole codes, on the device of the first part.

    Raises:
        FormatError: The parts do not fit together, or a part before the last one along K ends within a block.

    Example:
        >>> codes = hb.quantize(torch.randn(8, 64), "q8_0")
        >>> hb.unshard([hb.shard(codes, 0, i, 2) for i in (0, 1)], 0).shape
        (8, 64)
    """
    if not parts:
        raise FormatError("there are no parts to put together: pass at least one")
    first, axis = parts[0], _axis(parts[0].shape, dim)
    fmt = first.format
    for part in parts:
        if len(part.shape) != len(first.shape):
            raise FormatError(f"a part of these codes has {len(first.shape)} dimensions, got {list(part.shape)}")
        wanted = (*first.shape[:axis], part.shape[axis], *first.shape[axis + 1 :])
        if part.format != fmt or part.shape != wanted:
            raise FormatError(f"a part of these codes is {fmt} {list(wanted)}, got {part.format} {list(part.shape)}")
    ends = list(accumulate((part.shape[axis] for part in parts), initial=0))
    shape = (*first.shape[:axis], ends[-1], *first.shape[axis + 1 :])
    for run in pairwise(ends):
        _check(fmt, shape, axis, (run,))
    has_nibbles = fmt.bits == 4 and _is_k(shape, axis)
    tensors = {}
    for name, tensor in first.tensors().items():
        stored = [part.tensors()[name].to(tensor.device) for part in parts]
        if _stored_ranges(fmt, name, shape, axis, ()) is None:
            if not all(torch.equal(one, tensor) for one in stored):
                raise FormatError(f"{fmt} codes have one {name} for what is cut along dimension {axis}, and the parts have several")
            tensors[name] = tensor.clone()
        elif name == "data" and has_nibbles:
            codes = [unpack_nibbles(one, part.shape[-1]) for one, part in zip(stored, parts, strict=True)]
            tensors[name] = pack_nibbles(torch.cat(codes, axis))
        else:
            tensors[name] = torch.cat(stored, axis)
    return Codes.from_tensors(fmt, shape, tensors)


def narrowed(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return a copy of some ranges of a tensor along a dimension, concatenated."""
    return torch.cat([tensor.detach().narrow(dim, start, stop - start) for start, stop in ranges or ((0, 0),)], dim)


def input_unit(fmt: Format) -> int:
    """Return the number of inputs at whose multiples codes may be cut along K."""
    return fmt.block if isinstance(fmt.block, int) else 1


def take(codes: Codes, dim: int, ranges: Ranges) -> Codes:
    """Return a copy of some ranges of codes along `dim`, concatenated.

    Raises:
        FormatError: A range lies outside of the codes, or cuts a block of K.
    """
    axis = _axis(codes.shape, dim)
    _check(codes.format, codes.shape, axis, ranges)
    has_nibbles = codes.format.bits == 4 and _is_k(codes.shape, axis)
    shape = (*codes.shape[:axis], sum(stop - start for start, stop in ranges), *codes.shape[axis + 1 :])
    tensors = {}
    for name, tensor in codes.tensors().items():
        stored = _stored_ranges(codes.format, name, codes.shape, axis, ranges)
        if stored is None:
            tensors[name] = tensor.clone()
        elif name == "data" and has_nibbles:
            tensors[name] = pack_nibbles(narrowed(unpack_nibbles(tensor, codes.shape[-1]), axis, stored))
        else:
            tensors[name] = narrowed(tensor, axis, stored)
    return Codes.from_tensors(codes.format, shape, tensors)


def stored_ranges(fmt: Format, shape: tuple[int, ...], dim: int, ranges: Ranges) -> dict[str, Ranges | None] | None:
    """Return the ranges of each stored tensor that `take` needs, so that only these are read from a file.

    Args:
        fmt: Format of the codes.
        shape: Shape of the whole codes.
        dim: The dimension that is cut.
        ranges: The ranges along it.

    Returns:
        Ranges in elements of each tensor, None for all of it; None where a range begins or ends within a byte of the file.
    """
    axis = _axis(shape, dim)
    _check(fmt, shape, axis, ranges)
    stored = {name: _stored_ranges(fmt, name, shape, axis, ranges) for name in stored_tensors(fmt, shape)}
    if _is_k(shape, axis):
        bits, row_bits = fmt.stored_bits, shape[-1] * fmt.stored_bits
        for i, (start, stop) in enumerate(ranges):
            ends_row = i == len(ranges) - 1 and stop * bits == row_bits  # whose last byte is padded
            if start * bits % 8 or (stop * bits % 8 and not ends_row):
                return None
        stored["data"] = tuple((start * bits // 8, -(-stop * bits // 8)) for start, stop in ranges)
    return stored


def _axis(shape: tuple[int, ...], dim: int) -> int:
    """Return the index of a dimension, not negative; raise FormatError if there is none."""
    if not -len(shape) <= dim < len(shape):
        raise FormatError(f"codes of shape {list(shape)} have dimensions 0 … {len(shape) - 1}, got {dim}")
    return dim % len(shape)


def _is_k(shape: tuple[int, ...], axis: int) -> bool:
    return axis == len(shape) - 1


def _unit(fmt: Format, shape: tuple[int, ...], axis: int) -> int:
    """Return the number of elements at whose multiples codes may be cut along a dimension."""
    return input_unit(fmt) if _is_k(shape, axis) else 1


def _check(fmt: Format, shape: tuple[int, ...], axis: int, ranges: Ranges) -> None:
    """Raise FormatError unless codes may be cut into a shard with these ranges."""
    size, unit = shape[axis], _unit(fmt, shape, axis)
    for i, (start, stop) in enumerate(ranges):
        if not 0 <= start <= stop <= size:
            raise FormatError(f"a run along a dimension of {size} lies in 0 … {size}, got {start} … {stop}")
        if start % unit or (stop % unit and (stop != size or i < len(ranges) - 1)):
            raise FormatError(f"{fmt} codes are cut along K after whole blocks, at multiples of {unit}, got {start} … {stop} of {size}")
    if _is_k(shape, axis) and size and fmt.block == "channel" and all(start == stop for start, stop in ranges):
        raise FormatError(f"{fmt} codes are cut along K into parts of one input at least, as each has the scales of all rows, got none")


def _stored_ranges(fmt: Format, name: str, shape: tuple[int, ...], axis: int, ranges: Ranges) -> Ranges | None:
    """Return the ranges of one stored tensor, those of "data" in codes; None: every shard has all of it."""
    if name == "data" or (not _is_k(shape, axis) and fmt.block != "tensor"):
        return ranges
    if not isinstance(fmt.block, int):
        return None
    return tuple((start // fmt.block, -(-stop // fmt.block)) for start, stop in ranges)
