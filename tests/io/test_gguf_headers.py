"""Headers of GGUF files that break a rule of the format: each is refused with one line, before any tensor is read."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from halfbyte.errors import CheckpointError
from halfbyte.io import gguf

F32, Q4_0, STRING, ARRAY, U32 = 0, 2, 8, 9, 4
HUGE = (1 << 64) - 1


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def u32(name: bytes, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def tensor(name: bytes = b"w", sizes: tuple[int, ...] = (8,), kind: int = F32, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + struct.pack("<IQ", kind, offset)


def file(*parts: bytes, keys: int = 0, tensors: int = 0, data: int = 0, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)
    return header + bytes(-len(header) % 32) + bytes(data)


# What is wrong -> the file, and what the error says of it.
BROKEN = {
    "no magic number": (b"GGUX" + bytes(60), "begins with b'GGUX'"),
    "another version": (file(version=4), "of version 4, little-endian 2 and 3 are read"),
    "another byte order": (file(version=3 << 24), "big-endian"),
    "more tensors than bytes": (file(tensors=HUGE), "would have 18446744073709551615 tensors"),
    "more keys than bytes": (file(keys=1 << 40), "would have 0 tensors and 1099511627776 keys"),
    "a cut header": (file(u32(b"a", 1), keys=1)[:30], "ends within its header|beyond the end"),
    "a text that is longer than the file": (file(string(b"a", HUGE), keys=1), "something of 18446744073709551615 bytes"),
    "a text that is not UTF-8": (file(key(b"\xff\xfe", U32, bytes(4)), keys=1), "is not UTF-8"),
    "a key twice": (file(u32(b"a", 1), u32(b"a", 1), keys=2), "the key 'a' comes twice"),
    "a value of no type": (file(key(b"a", 77, bytes(8)), keys=1), "a value of type 77"),
    "an array of no type": (file(key(b"a", ARRAY, struct.pack("<IQ", 77, 1)), keys=1), "an array of type 77"),
    "an array of arrays": (file(key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1)), keys=1), "an array of arrays"),
    "an array of more numbers than bytes": (file(key(b"a", ARRAY, struct.pack("<IQ", U32, 1 << 62)), keys=1), "beyond the end"),
    "an array of more texts than bytes": (file(key(b"a", ARRAY, struct.pack("<IQ", STRING, 1 << 60)), keys=1), "more than the file has"),
    "a text in an array that is too long": (
        file(key(b"a", ARRAY, struct.pack("<IQ", STRING, 1) + string(b"x", HUGE)), keys=1),
        "something of 18446744073709551615 bytes",
    ),
    "an alignment of 0": (file(u32(b"general.alignment", 0), keys=1), "alignment is 0, which is not a power of two"),
    "an alignment of 48": (file(u32(b"general.alignment", 48), keys=1), "alignment is 48"),
    "an alignment that is a text": (file(key(b"general.alignment", STRING, string(b"32")), keys=1), "alignment is '32'"),
    "a tensor of five dimensions": (file(tensor(sizes=(1, 1, 1, 1, 1)), tensors=1, data=4), "has 5 dimensions"),
    "sizes whose product overflows": (file(tensor(sizes=(1 << 40, 1 << 40)), tensors=1, data=32), "not a list of sizes"),
    "a size that overflows": (file(tensor(sizes=(0, HUGE)), tensors=1), "not a list of sizes"),
    "an unknown type": (file(tensor(kind=4), tensors=1, data=32), "is of ggml type 4, halfbyte reads"),
    "a row that is no whole blocks": (file(tensor(sizes=(31,), kind=Q4_0), tensors=1, data=18), "a multiple of 32 weights, got 31"),
    "a number of blocks": (file(tensor(sizes=(), kind=Q4_0), tensors=1, data=18), "a multiple of 32 weights, got 1"),
    "a tensor twice": (file(tensor(), tensor(offset=32), tensors=2, data=64), "tensor 'w' comes twice"),
    "an offset between two multiples": (file(tensor(offset=4), tensors=1, data=36), "begins at 4, no multiple of the alignment 32"),
    "an offset that overflows": (file(tensor(offset=HUGE - 31), tensors=1, data=32), "bytes before tensor 'w' belong to no tensor"),
    "tensors that overlap": (file(tensor(), tensor(b"v"), tensors=2, data=32), "overlaps the one before it"),
    "bytes between tensors": (file(tensor(), tensor(b"v", offset=64), tensors=2, data=96), "bytes before tensor 'v' belong to no tensor"),
    "bytes after the last tensor": (file(tensor(), tensors=1, data=64), "bytes behind its last tensor belong to no tensor"),
    "a tensor that is cut": (file(tensor(), tensors=1, data=31), "truncated or damaged"),
    "no tensor for the data": (file(tensor(), tensors=1), "truncated or damaged"),
    "one part of very many": (file(u32(b"split.count", 1 << 30), keys=1), "one of 1073741824 files: it is damaged"),
    "a count of parts that is a text": (file(key(b"split.count", STRING, string(b"2")), keys=1), "one of '2' files: it is damaged"),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_headers_that_break_a_rule(wrong: str, tmp_path: Path) -> None:
    content, message = BROKEN[wrong]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        gguf.read_header(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_header_without_mistakes(tmp_path: Path) -> None:
    """The files above are refused for what is wrong with them, and for nothing else."""
    path = tmp_path / "m.gguf"
    path.write_bytes(file(u32(b"a", 5), tensor(), tensor(b"v", (32, 2), Q4_0, 32), keys=1, tensors=2, data=32 + 36))
    found = gguf.read_header(path)
    assert found.metadata == {"a": 5}
    assert {name: entry.shape for name, entry in found.entries.items()} == {"w": (8,), "v": (2, 32)}


def test_parts_that_are_links_or_lie_elsewhere(tmp_path: Path) -> None:
    """Names of parts follow from the name of the file, whatever the file says."""
    for number in range(2):
        keys = u32(b"split.count", 2), key(b"split.no", U32, struct.pack("<I", number))
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(file(*keys, tensor(b"%d" % number), keys=2, tensors=1, data=32))
    assert {*gguf.read_header(tmp_path / "m-00002-of-00002.gguf").entries} == {"0", "1"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "m-00001-of-00002.gguf").symlink_to(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"cannot read .*other.m-00002-of-00002\.gguf"):
        gguf.read_header(tmp_path / "other" / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes((tmp_path / "m-00001-of-00002.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="is not the part that its name says"):
        gguf.read_header(tmp_path / "m-00001-of-00002.gguf")
