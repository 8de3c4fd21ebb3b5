"""Files of packed weights, which `packed_cache.py` writes, and maps into memory when a model is opened again.

    bytes 0-7      "HBPACKED"
    bytes 8-11     version of this format, u32
    bytes 12-15    length H of the header, u32
    bytes 16-47    SHA-256 of the header
    bytes 48-48+H  the header, JSON: {"bytes": of the whole file, "weights": [{"name", "format", "shape", "layout", "sparse",
                   "source_format", "offset", "bytes", "crc"}, ...]}; "crc" is the CRC-32 of a weight's first and last page
    the rest       the weights, each at a multiple of 4096

All little-endian. A file is read only where it belongs to the user and no other user can write it. Its length is checked before it is
mapped, so that a truncated file is damaged, not a bus error; it is never written again, only replaced.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfbyte.layouts.base import round_up

SUFFIX, TEMPORARY = ".packed", ".writing"
_FIXED = struct.Struct("<8sII32s")
_MAGIC, _VERSION = b"HBPACKED", 2
_PAGE = 4096
_MOST_HEADER = 64 << 20
_CHUNK = 8 << 20  # bytes that are written and flushed at a time: how long a process that ends may wait


class DamagedError(Exception):
    """A file that cannot be used, and why."""


@dataclass(frozen=True)
class Stored:
    """A weight in a file.

    Attributes:
        name: Names of the tensors of the checkpoint that it was packed from.
        format, shape, layout, sparse, source_format: As in `Packed`, by name; `format` of a floating-point tensor is its dtype.
        offset: Where its bytes begin in the file.
        bytes: Their number.
        crc: CRC-32 of their first and last page.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    layout: str
    sparse: bool | None
    source_format: str | None
    offset: int
    bytes: int
    crc: int

    def is_sound(self, size: int) -> bool:
        """Return whether the fields have the types and ranges that `write` gives them, in a file of `size` bytes."""
        numbers = (self.offset, self.bytes, self.crc, *self.shape)
        texts = (self.name, self.format, self.layout, self.source_format or "")
        return (
            all(type(number) is int and number >= 0 for number in numbers)
            and all(type(text) is str for text in texts)
            and self.sparse in (None, True, False)
            and self.offset % _PAGE == 0
            and 0 < self.bytes <= size - self.offset
        )


class PackedFile:
    """A file that is mapped into memory: pages are read when they are used, and shared by all processes that map it.

    Attributes:
        path: Of the file.
        weights: What it holds.
    """

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            DamagedError: It is not a whole file of this version that only the user can write.
            OSError: It cannot be read.
        """
        self.path = path
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, os.O_RDONLY | flags)
        with open(descriptor, "rb", buffering=0) as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise DamagedError("it is not a file")
            if hasattr(os, "getuid") and (info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022):
                raise DamagedError("others can write it")
            self.weights = _read_header(file.read(_FIXED.size), file.read, info.st_size)
            self._mapping = mmap.mmap(descriptor, info.st_size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # of ordinary ones the address translation takes some 3 % of a decode step
            with suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._address = np.frombuffer(self._mapping, np.uint8).ctypes.data

    def tensor(self, weight: Stored) -> Tensor:
        """Return the bytes of a weight, uint8, in the mapped file.

        Raises:
            DamagedError: Its first or last page is not what was written.
        """
        with memoryview(self._mapping) as whole, whole[weight.offset : weight.offset + weight.bytes] as part:
            if _crc(part) != weight.crc:
                raise DamagedError(f"the bytes of {weight.name} are not those that were written")
        memory = (ctypes.c_char * weight.bytes).from_address(self._address + weight.offset)
        memory.mapping = self._mapping  # type: ignore[attr-defined]  # which is unmapped when no tensor is left
        return torch.frombuffer(memory, dtype=torch.uint8)


def _read_header(fixed: bytes, read: Callable[[int], bytes], size: int) -> tuple[Stored, ...]:
    """Read the header of a file.

    Args:
        fixed: The first bytes of the file, of fixed length.
        read: Reads the bytes that follow.
        size: Bytes of the file.

    Returns:
        The weights that the file holds.

    Raises:
        DamagedError: It is not a whole file of this version.
    """
    if len(fixed) < _FIXED.size:
        raise DamagedError(f"it has {size} bytes")
    magic, version, length, digest = _FIXED.unpack(fixed)
    if (magic, version) != (_MAGIC, _VERSION) or length > min(size, _MOST_HEADER):
        raise DamagedError("it is of another version, or none of these files")
    text = read(length)
    if hashlib.sha256(text).digest() != digest:
        raise DamagedError("its header is not what was written")
    try:
        header = json.loads(text)
        weights = tuple(Stored(**{**fields, "shape": tuple(fields["shape"])}) for fields in header["weights"])
        whole = header["bytes"]
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise DamagedError(f"its header cannot be read ({e})") from e
    if whole != size:
        raise DamagedError(f"it has {size} of {whole} bytes")
    if not all(weight.is_sound(size) for weight in weights):
        raise DamagedError("its header has a weight beyond its end")
    return weights


def _crc(data: memoryview) -> int:
    return zlib.crc32(data[-_PAGE:], zlib.crc32(data[:_PAGE]))


def write(folder: Path, weights: Sequence[tuple[Stored, Tensor]], check: Callable[[], None]) -> None:
    """Write a file of weights.

    Args:
        folder: The file gets a name of its own there, once it is whole and on the disk.
        weights: What is written; offset, bytes and crc of each follow from its tensor.
        check: Called every few MB; what it raises ends the writing, and nothing is left.

    Raises:
        OSError: It cannot be written, or the disk is full.
    """
    data = [tensor.view(torch.uint8).flatten().numpy().data for _, tensor in weights]
    entries = [{**asdict(stored), "bytes": len(part), "crc": _crc(part)} for (stored, _), part in zip(weights, data, strict=True)]
    start = round_up(_FIXED.size + len(_header(entries, 0, 0)), _PAGE)
    header = _header(entries, start, sum(round_up(len(part), _PAGE) for part in data))
    digest = hashlib.sha256(header).digest()
    handle, name = tempfile.mkstemp(dir=folder, suffix=TEMPORARY)
    try:
        with open(handle, "wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(_FIXED.pack(_MAGIC, _VERSION, len(header), digest) + header), start, check)
            for part in data:
                _write_all(file.fileno(), part, round_up(len(part), _PAGE), check)
        os.replace(name, folder / f"{digest.hex()[:32]}{SUFFIX}")
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _header(entries: Sequence[Mapping[str, Any]], start: int, data_bytes: int) -> bytes:
    """Return the header, which is as long for all positions: it is padded by as much as its numbers may need."""
    at, placed = start, []
    for entry in entries:
        placed.append({**entry, "offset": at})
        at += round_up(entry["bytes"], _PAGE)
    text = json.dumps({"bytes": start + data_bytes, "weights": placed})
    return text.encode().ljust(len(json.dumps({"bytes": 0, "weights": list(entries)})) + 24 * (len(entries) + 1))


def _write_all(descriptor: int, data: memoryview, padded: int, check: Callable[[], None]) -> None:
    """Write bytes and zeros behind them, and flush each chunk, so that a name is only given to what is on the disk."""
    for first in range(0, len(data), _CHUNK):
        part = data[first : first + _CHUNK]
        while part:
            part = part[os.write(descriptor, part) :]
        if first + _CHUNK >= len(data):
            os.write(descriptor, bytes(padded - len(data)))
        getattr(os, "fdatasync", os.fsync)(descriptor)
        check()
