"""Codes split into shards, one per process, and their exact inverse.

A shard along N (rows) or E (experts) has the codes, scales and zeros of its rows. A shard along K has whole blocks, so that no scale
is needed on both sides of a cut; a scale of a whole row or of the tensor is copied to every shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes, pack_nibbles, stored_tensors, unpack_nibbles
from halfbyte.formats.spec import Format

Range = tuple[int, int]  # first, one past the last
Ranges = tuple[Range, ...]  # whose concatenation is a shard


def spread(count: int, of: int, unit: int = 1) -> list[Range]:
    """Split 0 … `count` into `of` ranges of whole units, as evenly as possible, the longer first; the last unit may be short."""
    whole, longer = divmod(-(-count // unit), of)
    bounds = [min(count, (i * whole + min(i, longer)) * unit) for i in range(of + 1)]
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
    size, unit = codes.shape[axis], input_unit(codes.format) if axis == len(codes.shape) - 1 else 1
    if axis == len(codes.shape) - 1 and (blocks := -(-size // unit)) < of:
        raise FormatError(
            f"{codes.format} codes of shape {list(codes.shape)} have {blocks} blocks a row: cut K into at most {blocks} parts"
        )
    return take(codes, dim, (spread(size, of, unit)[index],))


def unshard(parts: Sequence[Codes], dim: int) -> Codes:
    """Join shards along a dimension: the inverse of `shard`, bit for bit.

    Args:
        parts: All shards, in order.
        dim: The dimension that was cut.

    Returns:
        The whole codes.

    Example:
        >>> codes = hb.quantize(torch.randn(8, 64), "q8_0")
        >>> hb.unshard([hb.shard(codes, 0, i, 2) for i in (0, 1)], 0).shape
        (8, 64)
    """
    if not parts:
        raise FormatError("there are no parts to put together: pass at least one")
    first, axis = parts[0], _axis(parts[0].shape, dim)
    for part in parts:
        if len(part.shape) != len(first.shape):
            raise FormatError(f"a part of these codes has {len(first.shape)} dimensions, got {list(part.shape)}")
    sizes = [part.shape[axis] for part in parts]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    shape = (*first.shape[:axis], ends[-1], *first.shape[axis + 1 :])
    return merge(first.format, shape, dim, [((end - size, end),) for size, end in zip(sizes, ends, strict=True)], parts)


def narrowed(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """A copy of some ranges of a tensor along a dimension, concatenated."""
    return torch.cat([tensor.detach().narrow(dim, start, stop - start) for start, stop in ranges or ((0, 0),)], dim)


def input_unit(fmt: Format) -> int:
    """Codes may be cut along K at multiples of this number of inputs."""
    return fmt.block if isinstance(fmt.block, int) else 1


def take(codes: Codes, dim: int, ranges: Ranges) -> Codes:
    """A copy of some ranges of codes along `dim`, concatenated.

    Raises FormatError for a range outside of the codes, or one along K that cuts a block.
    """
    axis = _axis(codes.shape, dim)
    _check(codes.format, codes.shape, axis, ranges)
    inputs, k = axis == len(codes.shape) - 1, codes.shape[-1]
    shape = (*codes.shape[:axis], sum(stop - start for start, stop in ranges), *codes.shape[axis + 1 :])
    tensors = {}
    for part, tensor in codes.tensors().items():
        nibbles = part == "data" and inputs and codes.format.bits == 4
        slices = _slices(codes.format, part, inputs, ranges)
        taken = tensor.clone() if slices is None else narrowed(unpack_nibbles(tensor, k) if nibbles else tensor, axis, slices)
        tensors[part] = pack_nibbles(taken) if nibbles else taken
    return Codes.from_tensors(codes.format, shape, tensors)


def merge(fmt: Format, shape: tuple[int, ...], dim: int, runs: Sequence[Ranges], parts: Sequence[Codes]) -> Codes:
    """The inverse of `take`: codes of `shape` from parts with these ranges of it, which together cover it.

    Where ranges overlap, the codes of the last part count. Raises FormatError for parts that do not fit together.
    """
    axis = _axis(shape, dim)
    inputs = axis == len(shape) - 1
    for ranges, part in zip(runs, parts, strict=True):
        _check(fmt, shape, axis, ranges)
        wanted = (*shape[:axis], sum(stop - start for start, stop in ranges), *shape[axis + 1 :])
        if part.format != fmt or part.shape != wanted:
            raise FormatError(f"a part of these codes is {fmt} {list(wanted)}, got {part.format} {list(part.shape)}")
    covered = sorted(run for ranges in runs for run in ranges)
    end = 0
    for start, stop in covered:
        end = max(end, stop) if start <= end else end
    if end != shape[axis]:
        raise FormatError(f"the parts of codes of shape {list(shape)} have {end} of {shape[axis]} along dimension {axis}: pass all of them")
    tensors = {}
    for name, (dtype, size) in stored_tensors(fmt, shape).items():
        given = [part.tensors()[name] for part in parts]
        nibbles = name == "data" and inputs and fmt.bits == 4
        if _slices(fmt, name, inputs, ()) is None:
            if not all(torch.equal(one, given[0]) for one in given[1:]):
                raise FormatError(f"{fmt} codes have one {name} for what is cut along dimension {axis}, and the parts have several")
            tensors[name] = given[0].clone()
            continue
        whole = torch.empty(shape if nibbles else size, dtype=dtype, device=given[0].device)
        for ranges, tensor in zip(runs, given, strict=True):
            at = 0
            source = unpack_nibbles(tensor, sum(stop - start for start, stop in ranges)) if nibbles else tensor
            for start, stop in _slices(fmt, name, inputs, ranges) or ():
                whole.narrow(axis, start, stop - start).copy_(source.narrow(axis, at, stop - start))
                at += stop - start
        tensors[name] = pack_nibbles(whole) if nibbles else whole
    return Codes.from_tensors(fmt, shape, tensors)


def stored_runs(fmt: Format, shape: tuple[int, ...], dim: int, ranges: Ranges) -> dict[str, Ranges | None] | None:
    """Which ranges of each stored tensor `take` needs, so that only these are read from a file.

    Args:
        fmt: Format of the codes.
        shape: Of the whole codes.
        dim: The dimension that is cut.
        ranges: Along it.

    Returns:
        Ranges in elements of each tensor, None for all of it; None where a range begins or ends inside of a byte of the file.
    """
    axis = _axis(shape, dim)
    _check(fmt, shape, axis, ranges)
    inputs = axis == len(shape) - 1
    runs = {part: _slices(fmt, part, inputs, ranges) for part in stored_tensors(fmt, shape)}
    if inputs:
        bits = fmt.stored_bits
        at = [(start * bits, stop * bits) for start, stop in ranges]
        if any(start % 8 or (stop % 8 and (stop, i) != (shape[-1] * bits, len(at) - 1)) for i, (start, stop) in enumerate(at)):
            return None
        runs["data"] = tuple((start // 8, -(-stop // 8)) for start, stop in at)
    return runs


def _axis(shape: tuple[int, ...], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise FormatError(f"codes of shape {list(shape)} have dimensions 0 … {len(shape) - 1}, got {dim}")
    return dim % len(shape)


def _check(fmt: Format, shape: tuple[int, ...], axis: int, ranges: Ranges) -> None:
    size, unit = shape[axis], input_unit(fmt) if axis == len(shape) - 1 else 1
    for i, (start, stop) in enumerate(ranges):
        if not 0 <= start <= stop <= size:
            raise FormatError(f"a run along a dimension of {size} lies in 0 … {size}, got {start} … {stop}")
        if start % unit or (stop % unit and (stop != size or i < len(ranges) - 1)):
            raise FormatError(f"{fmt} codes are cut along K after whole blocks, at multiples of {unit}, got {start} … {stop} of {size}")
    if axis == len(shape) - 1 and size and fmt.block == "channel" and all(start == stop for start, stop in ranges):
        raise FormatError(f"{fmt} codes are cut along K into parts of one input at least, as each has the scales of all rows, got none")


def _slices(fmt: Format, part: str, inputs: bool, ranges: Ranges) -> Ranges | None:
    """The ranges of one stored tensor, those of data in codes; None: every part has all of it."""
    if part == "data" or (not inputs and fmt.block != "tensor"):
        return ranges
    if not isinstance(fmt.block, int):
        return None
    return tuple((start // fmt.block, -(-stop // fmt.block)) for start, stop in ranges)
