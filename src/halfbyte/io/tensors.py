"""What safetensors and GGUF files share: tensors at offsets that are known in advance, and resumable writing.

The readers and writers of `io/safetensors.py` and `io/gguf.py` build on it; both writers derive from `TensorWriter`.

A journal makes writing resumable. It is a text file in the folder of the files that are being written:

    "what is being written, as the caller identifies it"     first line, JSON
    3d1a0b7c "model.layers.0.q_proj.weight.data"             a tensor that has been written completely: CRC-32, name in JSON

A writer that finds a journal with the first line that it would write keeps the tensors whose bytes in the files have the CRC-32 of their
line, and its caller skips them. `checkpoint/native/folder.py` decides which files of a killed writer are kept for that.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, CheckpointError, unreadable
from halfbyte.io.files import open_unbuffered

JOURNAL = "journal"
_CHUNK_BYTES = 4 << 20  # that are read at a time for a checksum


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype and shape of a tensor, whose elements need not be in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is stored: in `spec.nbytes` bytes, row-major, of the file at `path`, from byte `offset` on."""

    path: Path
    offset: int
    spec: TensorSpec


def check_is_fetched(path: Path, beginning: bytes) -> None:
    """Check that a file is not the text pointer that Git LFS checks out until the file itself has been fetched.

    Args:
        path: The file, for the error.
        beginning: Its first 8 bytes or more.

    Raises:
        CheckpointError: It is a pointer.
    """
    if beginning[:8] == b"version ":
        raise CheckpointError(f"{path} is a pointer of Git LFS in the place of the file: fetch the file with git lfs pull")


def checksum(tensor: Tensor) -> int:
    """Compute zlib's CRC-32 of a CPU tensor's bytes, row-major."""
    return zlib.crc32(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, row-major: a view of its memory if it is contiguous, else of a copy."""
    array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)


def fill(file: FileIO, tensor: Tensor, path: Path) -> None:
    """Read the next `tensor.nbytes` bytes of an unbuffered file into a tensor.

    Args:
        file: At the tensor's first byte.
        tensor: Contiguous, so that `bytes_of` is a view of it.
        path: The file's, for the error.

    Raises:
        CheckpointError: The file ends before that.
    """
    view = bytes_of(tensor)
    while view:  # a read may return fewer bytes than asked for
        if (count := file.readinto(view)) == 0:
            raise CheckpointError(f"{path} became shorter while it was read: load it again when nothing writes to it")
        view = view[count:]


@contextmanager
def opened_at(place: TensorPlace) -> Iterator[FileIO]:
    """Open the file of a tensor, unbuffered, at its first byte.

    Raises:
        CheckpointError: The file cannot be opened, or an OSError occurs in the block.
    """
    try:
        with open_unbuffered(place.path) as file:
            file.seek(place.offset)
            yield file
    except OSError as e:
        raise unreadable(place.path, e) from e


class TensorWriter:
    """Writes files one tensor at a time, each at its precomputed offset, in any order.

    Attributes:
        checksums: Name of a tensor that has been written -> CRC-32 of its bytes; after resuming, also the tensors of the earlier writer.
        resumed: Number of tensors that an earlier writer wrote. The caller skips these: `checksums` names them.
    """

    def __init__(self, heads: Mapping[Path, bytes], places: Mapping[str, TensorPlace], folder: Path, journal: str | None = None) -> None:
        """Create the files, or open those of an earlier writer that was killed.

        Args:
            heads: Path of each file -> its first bytes, which are written at once: the header, with the offsets of all tensors.
            places: Name of each tensor -> where it is written.
            folder: Where the journal is stored.
            journal: Makes the writer resumable: the text that identifies what is written. If the journal in `folder` has another one, or
                a file another header, writing starts from the beginning. None: no journal.
        """
        self._places = places
        self.checksums: dict[str, int] = {}
        self._journal: Path | None = None
        if journal is not None:
            self._journal = folder / JOURNAL
            title = json.dumps(journal) + "\n"
            if self._journal.exists() and all(_begins_with(path, head) for path, head in heads.items()):
                self.checksums = dict(_done(self._journal, title, places))
            # Written anew, without lines that were cut off or whose tensors are damaged.
            self._journal.write_text(title + "".join(_line(name, crc32) for name, crc32 in self.checksums.items()), encoding="utf-8")
        self.resumed = len(self.checksums)
        for path, head in heads.items():
            if self.resumed == 0:  # else each file exists and has this header, as compared above
                path.unlink(missing_ok=True)
                with open(path, "xb") as file:
                    file.write(head)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, and then its line of the journal.

        Args:
            name: A name of `places`.
            tensor: On any device.

        Raises:
            ArgumentError: Its dtype or shape is not that of its place.
        """
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

    def write_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Write several tensors by name; raise as `write` does."""
        for name, tensor in tensors.items():
            self.write(name, tensor)

    def finish(self) -> None:
        """Check that all tensors have been written, and remove the journal.

        Raises:
            ArgumentError: A tensor is missing.
        """
        if missing := self._places.keys() - self.checksums.keys():
            raise ArgumentError(f"{len(missing)} announced tensors were not written, the first is {min(missing)}")
        if self._journal is not None:
            self._journal.unlink()


def _line(name: str, crc32: int) -> str:
    """Format a line of the journal."""
    return f"{crc32:08x} {json.dumps(name)}\n"


def _begins_with(path: Path, head: bytes) -> bool:
    """Whether a file exists and begins with these bytes."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(head)) == head


def _done(journal: Path, title: str, places: Mapping[str, TensorPlace]) -> Iterator[tuple[str, int]]:
    """Yield (name, CRC-32) of the tensors that a journal lists and whose bytes are intact.

    The bytes are compared because neither files nor journal are flushed to the disk after each tensor: a power failure may keep the line
    and lose the bytes.

    Args:
        journal: The file.
        title: The first line that it must have, else no tensor is yielded.
        places: Where tensors are written now; others are ignored.
    """
    lines = journal.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines[:1] != [title]:
        return
    for line in lines[1:]:
        if not line.endswith("\n"):  # the writer was killed within it
            continue
        try:
            crc32, name = int(line[:8], 16), json.loads(line[9:])
        except ValueError:  # a power failure has left other bytes in its place
            continue
        place = places.get(name) if isinstance(name, str) else None
        if place is not None and _crc32_of(place) == crc32:
            yield name, crc32


def _crc32_of(place: TensorPlace) -> int | None:
    """Compute the CRC-32 of the bytes at a place, None if the file ends before them. Reads 4 MiB at a time."""
    left, crc32 = place.spec.nbytes, 0
    with open(place.path, "rb") as file:
        if os.fstat(file.fileno()).st_size < place.offset + left:
            return None
        file.seek(place.offset)
        while left:
            piece = file.read(min(left, _CHUNK_BYTES))
            crc32, left = zlib.crc32(piece, crc32), left - len(piece)
    return crc32
