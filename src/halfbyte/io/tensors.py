"""Common to safetensors and GGUF files: tensors at offsets that are known before any is read or written, and resumable writing.

A journal makes writing resumable. It is a text file next to the files: the first line identifies what is being written, every other
line a tensor that has been written completely, as `<CRC-32 in hexadecimal> <name in JSON>`. A writer that finds a journal with the
same first line skips the tensors whose bytes have that CRC-32.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, CheckpointError

JOURNAL = "journal"
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    """dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: `spec.nbytes` bytes of the file at `path`, from `offset` on."""

    path: Path
    offset: int
    spec: Spec


def check_is_fetched(path: Path, beginning: bytes) -> None:
    """Raises CheckpointError for what Git LFS puts in the place of a file until it has been fetched; `beginning`: 8 bytes or more."""
    if beginning[:8] == b"version ":
        raise CheckpointError(f"{path} is a pointer of Git LFS in the place of the file: fetch the file with git lfs pull")


def checksum(tensor: Tensor) -> int:
    """CRC-32 (zlib's) of a CPU tensor's bytes, row-major."""
    return zlib.crc32(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, row-major; a view where it is contiguous."""
    array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)


def fill(file: FileIO, tensor: Tensor, path: Path) -> None:
    """Reads the next `tensor.nbytes` bytes of an unbuffered file into a contiguous tensor."""
    view = bytes_of(tensor)
    while view:
        if (count := file.readinto(view)) == 0:
            raise CheckpointError(f"{path} became shorter while it was read: load it again when nothing writes to it")
        view = view[count:]


class Placed:
    """Files that are written one tensor at a time, in any order.

    heads    the first bytes of each file; its size follows from its last tensor
    places   where each tensor goes
    folder   where the journal is kept, if there is one
    journal  the journal's first line, for a resumable writer: if it or a header differs, writing starts from the beginning

    checksums  name of a tensor that has been written -> CRC-32 of its bytes
    resumed    how many of them an earlier writer wrote
    """

    def __init__(self, heads: Mapping[Path, bytes], places: Mapping[str, Place], folder: Path, journal: str | None = None) -> None:
        self._places = places
        self.checksums: dict[str, int] = {}
        self._journal: Path | None = None
        if journal is not None:
            self._journal = folder / JOURNAL
            title = json.dumps(journal) + "\n"
            if self._journal.exists() and all(_begins_with(path, head) for path, head in heads.items()):
                self.checksums = dict(_done(self._journal, title, places))
            self._journal.write_text(title + "".join(_line(name, crc32) for name, crc32 in self.checksums.items()), encoding="utf-8")
        self.resumed = len(self.checksums)
        for path, head in heads.items():
            if self.resumed == 0:
                path.unlink(missing_ok=True)
                with open(path, "xb") as file:
                    file.write(head)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, which must have the dtype and shape that were announced."""
        place = self._places[name]
        if (tensor.dtype, tuple(tensor.shape)) != (place.spec.dtype, place.spec.shape):
            raise ArgumentError(
                f"{name} was announced as {place.spec.dtype} {list(place.spec.shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        view = bytes_of(tensor.cpu())
        with open(place.path, "r+b") as file:
            file.seek(place.offset)
            file.write(view)
        self.checksums[name] = zlib.crc32(view)
        if self._journal is not None:
            with open(self._journal, "a", encoding="utf-8") as lines:
                lines.write(_line(name, self.checksums[name]))

    def finish(self) -> None:
        """Raises ArgumentError if a tensor has not been written; removes the journal."""
        if missing := self._places.keys() - self.checksums.keys():
            raise ArgumentError(f"{len(missing)} announced tensors were not written, the first is {min(missing)}")
        if self._journal is not None:
            self._journal.unlink()


def _line(name: str, crc32: int) -> str:
    return f"{crc32:08x} {json.dumps(name)}\n"


def _begins_with(path: Path, head: bytes) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(head)) == head


def _done(journal: Path, title: str, places: Mapping[str, Place]) -> Iterator[tuple[str, int]]:
    """The tensors that a journal lists and whose bytes are intact: a power failure may keep the line and lose the bytes."""
    lines = journal.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines[:1] != [title]:
        return
    for line in lines[1:]:
        if not line.endswith("\n"):  # cut in the middle
            continue
        crc32, _, name = line.rstrip().partition(" ")
        place = places.get(json.loads(name))
        if place is not None and _crc32_of(place) == int(crc32, 16):
            yield json.loads(name), int(crc32, 16)


def _crc32_of(place: Place) -> int | None:
    """The CRC-32 of the bytes at a place; None where the file is shorter."""
    left, crc32 = place.spec.nbytes, 0
    with open(place.path, "rb") as file:
        if os.fstat(file.fileno()).st_size < place.offset + left:
            return None
        file.seek(place.offset)
        while left:
            piece = file.read(min(left, _CHUNK_BYTES))
            crc32, left = zlib.crc32(piece, crc32), left - len(piece)
    return crc32
