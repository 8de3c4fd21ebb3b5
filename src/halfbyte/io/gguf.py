"""GGUF files, read and written one tensor at a time.

    "GGUF" | version u32 (2 or 3) | tensors u64 | keys u64
    for each key:     name | type u32 | value
    for each tensor:  name | dimensions u32 | each u64, the fastest first | type u32 | offset u64, from the start of the data
    padding to `general.alignment` (32), the data, each tensor at a multiple of it

A model may be split into files called <name>-00001-of-00003.gguf and so on, each with a header of its own that counts them
(`split.count`, `split.no`); the first has the metadata. They are read as one.

A string is its length, u64, and its bytes in UTF-8; an array its elements' type u32, their count u64, and they. All little-endian.

The header is parsed from bytes in memory with every length checked against what is left, so that a damaged or hostile file can
neither loop nor allocate beyond its own size; arrays of strings are decoded when they are accessed. Data are read with plain reads
(see safetensors.py), a few rows at a time, and their codes and scales are exact: formats/ggml.py.

Source: docs/gguf.md of https://github.com/ggml-org/ggml
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, CheckpointError, FormatError, unreadable
from halfbyte.formats import ggml
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.io.files import open_file
from halfbyte.io.safetensors import is_shape
from halfbyte.io.tensors import TensorPlace, TensorSpec, TensorWriter, check_is_fetched, fill, opened_at
from halfbyte.layouts.base import round_up
from halfbyte.memory import in_huge_pages

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER_LIMIT = 256 << 20  # the largest vocabularies take 20 MB
_FIRST_BYTES = 4 << 20
_DIMENSIONS = 4
_ALIGNMENT = 32
_CHUNK_WEIGHTS = 1 << 23  # that are decoded at a time: of fewer, threads wait for each other longer than they work
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_MOST_PARTS = 1000

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64, 28: torch.float64}
_PLAIN[30] = torch.bfloat16
_PLAIN_NUMBERS = {dtype: number for number, dtype in _PLAIN.items()}

Scalar = int | float | bool | str
Value = Scalar | Sequence[Any]


class Strings(Sequence[str]):
    """An array of strings in the file's encoding, decoded when it is accessed: each, or at its first iteration all.

    Args:
        text: The header of the file.
        ends: Where the first string begins in `text`, and where each one ends. A string begins with its length in 8 bytes.
        key: Key of the array, for errors.
    """

    def __init__(self, text: bytes, ends: list[int], key: str) -> None:
        self._text, self._ends, self._key = text, ends, key
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        try:
            return self._text[self._ends[index] + 8 : self._ends[index + 1]].decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"string {index} of {self._key} is not UTF-8: the GGUF file is damaged") from None

    def __iter__(self) -> Iterator[str]:
        if self._decoded is None:
            try:
                self._decoded = [self._text[start + 8 : end].decode() for start, end in pairwise(self._ends)]
            except UnicodeDecodeError:
                return super().__iter__()  # which says where
        return iter(self._decoded)


class Numbers(Sequence[Any]):
    """An array of numbers. (A NumPy array itself would compare element by element.)"""

    def __init__(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int | slice) -> Any:
        return self._array[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.tolist())


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        kind: The number of its type in ggml.
        shape: The slowest dimension first, as in torch.
        place: Where its bytes are.
        half: Whether scales and offsets that are float32 otherwise are rounded to float16; those of K-quants, which are multiples of 2^-24,
            change by 2^-11 of themselves at most.
    """

    kind: int
    shape: tuple[int, ...]
    place: TensorPlace
    half: bool = False

    @property
    def blocks(self) -> ggml.BlockType | None:
        """The block type of a quantized tensor."""
        found = ggml.TYPES.get(self.kind)
        if found is None or not self.half or found.format.scale != torch.float32:
            return found
        return replace(found, format=replace(found.format, scale=torch.float16))

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of a tensor that is not quantized."""
        return TensorSpec(_PLAIN[self.kind], self.shape)


@dataclass(frozen=True)
class File:
    """The header of a file, checked; no tensor has been read."""

    path: Path
    metadata: Mapping[str, Value]
    entries: Mapping[str, Entry]


def kind_name(kind: int) -> str:
    """What ggml calls a type."""
    return ggml.TYPES[kind].name if kind in ggml.TYPES else str(_PLAIN[kind]).removeprefix("torch.")


def is_gguf(path: Path) -> bool:
    """Whether a file begins with GGUF's magic number, or at least has its suffix."""
    try:
        with open_file(path) as file:
            return file.read(4) == MAGIC or path.suffix == ".gguf"
    except OSError:
        return False


def read_header(path: Path) -> File:
    """The header of a GGUF file, or of all the files that a model is split into. Raises CheckpointError for whatever breaks a rule of
    the format."""
    file = _read_one(path)
    count = file.metadata.get("split.count", 0)
    return file if count in (0, 1) else _merged(path, count)


def _merged(path: Path, count: Value) -> File:
    """The parts of a split model, one of which is at `path`, as one file: the first, with the tensors of all."""
    name = _PART.fullmatch(path.name)
    if not isinstance(count, int) or not 0 < count <= _MOST_PARTS:
        raise CheckpointError(f"{path} says that it is one of {short(count)} files: it is damaged")
    if name is None or int(name[2]) != count:
        wanted = f"<name>-00001-of-{count:05d}.gguf"
        raise CheckpointError(f"{path} is one of {count} files, which are called {wanted} and so on: give all of them their names again")
    files = [_read_one(path.with_name(f"{name[1]}-{i + 1:05d}-of-{name[2]}.gguf")) for i in range(count)]
    entries: dict[str, Entry] = {}
    for number, part in enumerate(files):
        if (part.metadata.get("split.count"), part.metadata.get("split.no")) != (count, number):
            raise CheckpointError(f"{part.path} is not the part that its name says: fetch the file again")
        if twice := entries.keys() & part.entries.keys():
            raise CheckpointError(f"{part.path} has {short(min(twice))}, which another part has too: fetch the file again")
        entries |= part.entries
    if (said := files[0].metadata.get("split.tensors.count")) not in (None, len(entries)):
        raise CheckpointError(f"the parts of {files[0].path} have {len(entries)} tensors, not {short(said)}: one of them is damaged")
    return replace(files[0], entries=entries)


def _read_one(path: Path) -> File:
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            # The length of the header is not stored: a few MB suffice for most, otherwise twice as much is read.
            have = _FIRST_BYTES
            while True:
                file.seek(0)
                text = file.read(min(have, size))
                try:
                    return _parse(path, text, size)
                except _CutError:
                    if len(text) == size:
                        raise CheckpointError(f"{path} ends within its header: it is truncated or damaged") from None
                if have >= _HEADER_LIMIT:
                    raise CheckpointError(f"the header of {path} is longer than {_HEADER_LIMIT} bytes: the file is damaged")
                have *= 4
    except OSError as e:
        raise unreadable(path, e) from e


class _CutError(Exception):
    """More bytes are needed than are in memory."""


class _Cursor:
    """Reads values from `text`, the first bytes of a file of `size` bytes."""

    def __init__(self, path: Path, text: bytes, size: int) -> None:
        self.path, self.text, self.size, self.at = path, text, size, 0

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: the file is damaged")

    def skip(self, count: int) -> int:
        """Skip `count` bytes; return where they begin."""
        start = self.at
        if count > self.size - start:
            raise self.wrong(f"something of {count} bytes at byte {start} goes beyond the end, {self.size}")
        if start + count > len(self.text):
            raise _CutError
        self.at += count
        return start

    def number(self, code: str) -> Any:
        layout = "<" + code
        start = self.skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self.text, start)[0]

    def string(self) -> str:
        start = self.skip(self.number("Q"))
        try:
            return self.text[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.wrong(f"the string at byte {start} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.number("I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])  # type: ignore[no-any-return]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.wrong(f"{short(key)} has a value of type {kind}, which does not exist")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            dtype = np.dtype("<u1" if kind == 7 else "<" + _SCALARS[kind])
            start = self.skip(count * dtype.itemsize)
            return Numbers(np.frombuffer(self.text, dtype, count, start).copy())
        if kind != _STRING:
            if kind == _ARRAY:
                raise CheckpointError(f"{self.path}: {short(key)} is an array of arrays, which halfbyte does not read: use its safetensors")
            raise self.wrong(f"{short(key)} is an array of type {kind}, neither numbers nor strings")
        if 8 * count > self.size - self.at:
            raise self.wrong(f"{short(key)} has {count} strings, more than the file has room for")
        return Strings(self.text, self._string_ends(count), key)

    def _string_ends(self, count: int) -> list[int]:
        """Skip so many strings; return where each ends, after where the first begins. There may be hundreds of thousands."""
        text, at, ends, length = self.text, self.at, [self.at], struct.Struct("<Q").unpack_from
        with suppress(struct.error, OverflowError):
            for _ in range(count):
                at += 8 + length(text, at)[0]
                ends.append(at)
            if at <= len(text):
                self.at = at
                return ends
        for _ in range(count):
            self.skip(self.number("Q"))  # raises where the first string ends beyond `text`
        raise AssertionError


def _parse(path: Path, text: bytes, size: int) -> File:
    cursor = _Cursor(path, text, size)
    check_is_fetched(path, text)
    if text[:4] != MAGIC:
        raise CheckpointError(f"{path} begins with {text[:4]!r}, not {MAGIC!r}: it is not a GGUF file")
    cursor.skip(4)
    version = cursor.number("I")
    if version not in _VERSIONS:
        hint = ", big-endian" if version & 0xFFFF == 0 and version else ""
        raise CheckpointError(f"{path} is a GGUF file of version {version}{hint}, little-endian 2 and 3 are read: convert it")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    if 24 * tensors + 12 * keys > size:
        raise cursor.wrong(f"it would have {tensors} tensors and {keys} keys, in {size} bytes")
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.wrong(f"the key {short(key)} comes twice")
        metadata[key] = cursor.value(key)
    found: list[tuple[str, int, tuple[int, ...], int]] = []
    for _ in range(tensors):
        name, dimensions = cursor.string(), cursor.number("I")
        if dimensions > _DIMENSIONS:
            raise cursor.wrong(f"tensor {short(name)} has {dimensions} dimensions, more than {_DIMENSIONS}")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        found.append((name, cursor.number("I"), shape, cursor.number("Q")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not (type(alignment) is int and 0 < alignment < 1 << 20 and alignment & (alignment - 1) == 0):
        raise cursor.wrong(f"its alignment is {short(alignment)}, which is not a power of two")
    start = round_up(cursor.at, alignment)
    entries: dict[str, Entry] = {}
    for name, kind, shape, offset in found:
        if name in entries:
            raise cursor.wrong(f"tensor {short(name)} comes twice")
        if not is_shape(list(shape)):
            raise cursor.wrong(f"tensor {short(name)} has shape {short(list(shape))}, which is not a list of sizes")
        if offset % alignment:
            raise cursor.wrong(f"tensor {short(name)} begins at {offset}, no multiple of the alignment {alignment}")
        entries[name] = Entry(kind, shape, TensorPlace(path, start + offset, _bytes(path, name, kind, shape)))
    _check_places(cursor, entries, start, alignment)
    return File(path, metadata, entries)


def _check_places(cursor: _Cursor, entries: Mapping[str, Entry], start: int, alignment: int) -> None:
    """Raise CheckpointError unless each tensor begins at the first multiple of the alignment behind the one before it and the file ends
    with the last: otherwise the type or shape of a tensor in the header is not that of its data."""
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].place.offset, item[1].place.spec.nbytes)):
        if entry.place.offset < end:
            raise cursor.wrong(f"tensor {short(name)} overlaps the one before it")
        if entry.place.offset > round_up(end, alignment):
            raise cursor.wrong(f"{entry.place.offset - end} bytes before tensor {short(name)} belong to no tensor")
        end = entry.place.offset + entry.place.spec.nbytes
        if end > cursor.size:
            what = f"{cursor.path} has {cursor.size} bytes, tensor {short(name)} ends at {end}"
            raise CheckpointError(f"{what}: the file is truncated or damaged")
    if entries and cursor.size > round_up(end, alignment):
        raise cursor.wrong(f"{cursor.size - end} bytes behind its last tensor belong to no tensor")


def _bytes(path: Path, name: str, kind: int, shape: tuple[int, ...]) -> TensorSpec:
    """dtype and shape of a tensor in the file: rows of bytes, or numbers."""
    if kind in _PLAIN:
        return TensorSpec(_PLAIN[kind], shape)
    if kind not in ggml.TYPES:
        known = ", ".join(kind_name(number) for number in sorted({*ggml.TYPES, *_PLAIN}))
        raise CheckpointError(f"{path}: tensor {short(name)} is of ggml type {kind}, halfbyte reads {known}: requantize it with llama.cpp")
    try:
        return TensorSpec(torch.uint8, (*shape[:-1], ggml.TYPES[kind].row_bytes(shape[-1] if shape else 1)))
    except FormatError as e:
        raise CheckpointError(f"{path}: tensor {short(name)}: {e}") from e


def read(entry: Entry, extract: ggml.Extract = ggml.extract) -> Codes | Tensor:
    """One tensor; as codes, with the file's exact numbers, where it is quantized. Needs memory for the result and some ten MB.

    Args:
        entry: The tensor.
        extract: The function that takes codes out of blocks.
    """
    with opened_at(entry.place) as file:
        if (kind := entry.blocks) is not None:
            codes = _read_codes(kind, entry, file, extract)
            codes.check_values()
            return codes
        out = torch.empty(entry.shape, dtype=entry.place.spec.dtype, device="cpu")
        fill(file, out, entry.place.path)
        return out


def _read_codes(kind: ggml.BlockType, entry: Entry, file: FileIO, extract: ggml.Extract) -> Codes:
    count = math.prod(entry.shape) // kind.weights  # of blocks: a row is a whole number of them
    step = _CHUNK_WEIGHTS // kind.weights
    if count <= step:
        return _decoded(kind, count, file, entry.place.path, extract).reshape(entry.shape)
    flat = stored_tensors(kind.format, (count, kind.weights))
    parts = {name: in_huge_pages(torch.empty(size, dtype=dtype, device="cpu")) for name, (dtype, size) in flat.items()}
    for first in range(0, count, step):
        last = min(count, first + step)
        into = {name: tensor[first:last] for name, tensor in parts.items()}
        codes = _decoded(kind, last - first, file, entry.place.path, partial(extract, out=into["data"]))
        for name, tensor in codes.tensors().items():
            if tensor.data_ptr() != into[name].data_ptr():  # types without fields have their codes elsewhere
                into[name].copy_(tensor)
    return Codes.from_tensors(kind.format, (count, kind.weights), parts).reshape(entry.shape)


def _decoded(kind: ggml.BlockType, count: int, file: FileIO, path: Path, extract: ggml.Extract) -> Codes:
    """The codes of the next blocks of a file."""
    raw = in_huge_pages(torch.empty(count, kind.nbytes, dtype=torch.uint8, device="cpu"))
    fill(file, raw, path)
    return ggml.decode(kind, (count, kind.weights), raw, extract)


class Writer(TensorWriter):
    """One GGUF file.

    Args:
        path: The file.
        metadata: str, bool, int, float, or a list of one of them; ints are written in 32 bits where they fit.
        tensors: Name -> (ggml's number of its type, shape); see ggml.NUMBERS and `plain_number`.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, tuple[int, tuple[int, ...]]], *, journal: str | None = None
    ) -> None:
        out = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            out += _string(key) + _value(key, value)
        offset, offsets = 0, {}
        for name, (kind, shape) in tensors.items():
            out += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)) + struct.pack("<IQ", kind, offset)
            offsets[name] = offset
            offset = round_up(offset + _bytes(path, name, kind, shape).nbytes, _ALIGNMENT)
        out += bytes(-len(out) % _ALIGNMENT)
        places = {
            name: TensorPlace(path, len(out) + offsets[name], _bytes(path, name, kind, shape)) for name, (kind, shape) in tensors.items()
        }
        self._file_bytes = len(out) + offset
        self._path = path
        super().__init__({path: bytes(out)}, places, path.parent, journal)

    def finish(self) -> None:
        """Raise ArgumentError if a tensor has not been written; pad the last one."""
        super().finish()
        with open(self._path, "r+b") as file:
            file.truncate(self._file_bytes)


def plain_number(dtype: torch.dtype) -> int:
    """ggml's number of a dtype."""
    if dtype not in _PLAIN_NUMBERS:
        raise CheckpointError(f"GGUF has no {dtype}: it has {', '.join(str(d) for d in _PLAIN_NUMBERS)}")
    return _PLAIN_NUMBERS[dtype]


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(key: str, value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool | int | float):
        kind = _kind([value])
        return struct.pack("<I" + _SCALARS[kind], kind, value)
    items = list(value)
    if all(isinstance(item, str) for item in items):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(items)) + b"".join(map(_string, items))
    if not all(isinstance(item, bool | int | float) for item in items):
        raise ArgumentError(f"GGUF's {key} is text, a number, or a list of one of them, got {short(value)}")
    kind = _kind(items)
    return struct.pack("<IIQ", _ARRAY, kind, len(items)) + struct.pack(f"<{len(items)}{_SCALARS[kind]}", *items)


def _kind(items: Iterable[bool | int | float]) -> int:
    """The type of a number or of all numbers of an array: bool, u32, i32, u64, i64 or f32."""
    items = list(items)
    if all(isinstance(item, bool) for item in items):
        return 7
    if any(isinstance(item, float) for item in items):
        return 6
    low, high = min(items), max(items)
    if len(items) > 1 and low >= -(1 << 31) and high < 1 << 31:
        return 5  # arrays of numbers, such as token types, are signed in every file
    if low >= 0:
        return 4 if high < 1 << 32 else 10
    return 5 if low >= -(1 << 31) and high < 1 << 31 else 11
