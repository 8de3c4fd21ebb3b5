"""safetensors files, read and written one tensor at a time.

    bytes 0-7      length H of the header, unsigned, little-endian
    bytes 8-8+H    the header, JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}; offsets count
                   from the header's end; "__metadata__" may hold an object of strings
    the rest       the tensors, row-major, little-endian, without holes or overlaps

Tensors are read with plain reads, not through a memory map: a mapped file that another process truncates crashes the reader,
and mapped pages count as its memory. They are written at offsets computed in advance, so that no more than one tensor is held
in memory.

Wider dtypes are written first, so that every tensor is aligned to its elements, as readers that map the file expect.

Source: the format's text at https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError, UnsupportedError, unreadable
from halfbyte.io.files import open_file
from halfbyte.io.tensors import TensorPlace, TensorSpec, TensorWriter, check_is_fetched, fill, opened_at

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEADER_LIMIT = 100_000_000  # bytes; the same as the safetensors package's
_CHUNK = 4 << 20  # elements that are converted at a time
_RUN = 1 << 16  # bytes: shorter runs are not worth a separate read
_MOST_LEVELS = 100  # of JSON: its readers are recursive, and since Python 3.13 json parses many times deeper than Python may call
SHARD_BYTES = 5_000_000_000


def load_json(path: Path, limit: int = _HEADER_LIMIT) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes."""
    return parse_json(read_bytes(path, limit), str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes."""
    try:
        with open_file(path) as file:
            content = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)  # read(n) allocates n bytes, however long the file is
    except OSError as e:
        raise unreadable(path, e) from e
    if len(content) > limit:
        raise CheckpointError(f"{path} is longer than {limit} bytes, which no {path.name} needs: check that it is the right file")
    return content


def parse_json(text: bytes, what: str) -> dict[str, object]:
    """The JSON object in `text`; a duplicate name is an error, and so are more than _MOST_LEVELS of arrays and objects."""

    def unique(items: list[tuple[str, object]]) -> dict[str, object]:
        parsed = dict(items)
        "".join(parsed).encode()  # raises for an escaped lone surrogate, which is not text
        if len(parsed) < len(items):
            raise ValueError("a name occurs twice")
        return parsed

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{what} is not JSON ({str(e) or 'nested too deeply'}): the file is damaged") from e
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{what} holds a JSON {type(parsed).__name__}, not an object: the file is damaged")
    level: list[Any] = [parsed]
    for _ in range(_MOST_LEVELS):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        raise CheckpointError(f"{what} is nested in more than {_MOST_LEVELS} levels: the file is damaged")
    return parsed


def read_header(path: Path) -> tuple[dict[str, TensorPlace], dict[str, object]]:
    """The place of each tensor in a file, and the metadata. Raises CheckpointError for a header that breaks any rule of the format."""
    if sys.byteorder != "little":
        raise UnsupportedError("safetensors files are little-endian and this machine is not: load the model on another machine")
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            check_is_fetched(path, first)
            length = int.from_bytes(first, "little")
            if size < 8 or length > min(_HEADER_LIMIT, size - 8):
                what = f"{path} has {size} bytes, and does not begin with the size of a header in these"
                raise CheckpointError(f"{what}: it is not a safetensors file or is truncated")
            header = parse_json(file.read(length), f"the header of {path}")
    except OSError as e:
        raise unreadable(path, e) from e
    metadata = header.pop("__metadata__", None)
    start = 8 + length
    places = {name: _place(path, start, name, entry) for name, entry in header.items()}
    end = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].spec.nbytes)):
        if place.offset != end:
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {place.offset}, not {end}, where the one before it ends")
        end += place.spec.nbytes
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, its header describes {end}: the file is damaged or truncated")
    return places, metadata if isinstance(metadata, dict) else {}


def _place(path: Path, start: int, name: str, entry: object) -> TensorPlace:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has no description in the header: the file is damaged")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{where} has dtype {dtype!r}: halfbyte reads {', '.join(_DTYPES)}")
    if not (isinstance(shape, list) and is_shape(shape)):
        raise CheckpointError(f"{where} has shape {shape!r}, which is not a list of sizes: the file is damaged")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_count, offsets))):
        raise CheckpointError(f"{where} has offsets {offsets!r}, which are not a pair of offsets: the file is damaged")
    spec = TensorSpec(_DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        raise CheckpointError(f"{where} has {offsets[1] - offsets[0]} bytes, but {dtype} {shape} takes {spec.nbytes}: the file is damaged")
    return TensorPlace(path, start + offsets[0], spec)


def is_count(value: object) -> bool:
    """Whether a value from JSON is a size that torch can take."""
    return type(value) is int and 0 <= value < 1 << 62


def is_shape(value: list[Any]) -> bool:
    """Whether a list from JSON is a shape whose strides torch can compute, zero-size ones included."""
    return len(value) <= 64 and all(map(is_count, value)) and math.prod(s or 1 for s in value) < 1 << 60


class Reader:
    """The tensors of one or more safetensors files, by name.

    Attributes:
        places: Name of a tensor -> where it is, in the order of the headers.
        metadata: The metadata of all files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.places: dict[str, TensorPlace] = {}
        self.metadata: dict[str, object] = {}
        for path in paths:
            places, metadata = read_header(path)
            self.metadata |= metadata
            for name, place in places.items():
                if name in self.places:
                    raise CheckpointError(f"tensor {name!r} is in both {self.places[name].path} and {path}: remove one of the files")
                self.places[name] = place

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names: the present one -> the new one, which must be unique."""
        self.places = {names[name]: place for name, place in self.places.items()}
        self.metadata = {names.get(name, name): value for name, value in self.metadata.items()}

    def spec(self, name: str) -> TensorSpec:
        return self.places[name].spec

    def specs(self) -> dict[str, TensorSpec]:
        return {name: place.spec for name, place in self.places.items()}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, converted to `dtype` piece by piece if one is given. Needs memory for the result and a few MB."""
        place = self.places[name]
        spec = place.spec
        out = torch.empty(spec.shape, dtype=dtype or spec.dtype, device="cpu")
        flat = out.view(-1)
        with opened_at(place) as file:
            if out.dtype == spec.dtype:
                fill(file, flat, place.path)
            else:
                for piece in flat.split(_CHUNK):
                    raw = torch.empty(piece.shape, dtype=spec.dtype, device="cpu")
                    fill(file, raw, place.path)
                    piece.copy_(raw)
        return out

    def read_part(self, name: str, dim: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Some ranges (first, one past the last) of a tensor along a dimension, concatenated. Needs memory for them and a few MB.

        Long runs of bytes are read one by one; for short ones the tensor is read piece by piece and the rest dropped.
        """
        place = self.places[name]
        shape, axis = place.spec.shape, dim % len(place.spec.shape)
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        out = torch.empty(
            (*shape[:axis], sum(stop - start for start, stop in ranges), *shape[axis + 1 :]), dtype=place.spec.dtype, device="cpu"
        )
        rows, width, size = out.view(outer, -1) if out.numel() else out.view(0, 0), shape[axis] * inner, place.spec.dtype.itemsize
        with opened_at(place) as file:
            if all((stop - start) * inner * size >= _RUN for start, stop in ranges):
                for i, row in enumerate(rows):
                    at = 0
                    for start, stop in ranges:
                        file.seek(place.offset + (i * width + start * inner) * size)
                        fill(file, row[at : at + (stop - start) * inner], place.path)
                        at += (stop - start) * inner
                return out
            for some in rows.split(max(1, _CHUNK // max(1, width * size))) if out.numel() else ():
                raw = torch.empty((len(some), width), dtype=place.spec.dtype, device="cpu")
                fill(file, raw, place.path)
                torch.cat([raw[:, start * inner : stop * inner] for start, stop in ranges], 1, out=some)
        return out

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes."""
        a, b = self.places[name], self.places[other]
        if a.spec != b.spec:
            return False
        pieces = torch.empty(2, min(_CHUNK, a.spec.nbytes), dtype=torch.uint8, device="cpu")
        with opened_at(a) as first_file, opened_at(b) as second_file:
            for start in range(0, a.spec.nbytes, _CHUNK):
                first, second = pieces[:, : a.spec.nbytes - start]
                fill(first_file, first, a.path)
                fill(second_file, second, b.path)
                if not torch.equal(first, second):
                    return False
        return True


class Writer(TensorWriter):
    """Writes files that together hold `tensors`, each of at most `shard_bytes` unless a single tensor is larger.

    A single file is called `<stem>.safetensors`, several `<stem>-00001-of-0000N.safetensors`. Tensors are written in any order.

    Attributes:
        specs: Name of a tensor -> its dtype and shape.
        nbytes: Bytes of all tensors.
        files: Names of the files.
        file_of: Name of a tensor -> name of its file.
    """

    def __init__(
        self, folder: Path, stem: str, tensors: Mapping[str, TensorSpec], shard_bytes: int = SHARD_BYTES, *, journal: str | None = None
    ) -> None:
        shards = list(_split(tensors, shard_bytes))
        count = len(shards)
        self.specs = tensors
        self.nbytes = sum(spec.nbytes for spec in tensors.values())
        self.files = [f"{stem}.safetensors"] if count == 1 else [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self.file_of: dict[str, str] = {}
        heads: dict[Path, bytes] = {}
        places: dict[str, TensorPlace] = {}
        for name, shard in zip(self.files, shards, strict=True):
            heads[folder / name], found = _header(folder / name, {tensor: tensors[tensor] for tensor in shard})
            places |= found
            self.file_of |= dict.fromkeys(shard, name)
        super().__init__(heads, places, folder, journal)


def _split(tensors: Mapping[str, TensorSpec], shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, split where the next tensor would make a file larger than `shard_bytes`. At least one list."""
    shard: list[str] = []
    size = 0
    for name, spec in tensors.items():
        if shard and size + spec.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += spec.nbytes
    yield shard


def _header(path: Path, tensors: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, TensorPlace]]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n)):
        spec = tensors[name]
        if spec.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {spec.dtype}, which safetensors cannot hold: it holds {', '.join(str(d) for d in _NAMES)}")
        begins[name], end = end, end + spec.nbytes
        entries[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: TensorPlace(path, start + begin, tensors[name]) for name, begin in begins.items()}
