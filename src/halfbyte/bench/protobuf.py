"""ONNX models written field by field, for peers that take nothing else (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

FLOAT, UINT8, INT8, INT32 = 1, 2, 3, 6  # TensorProto.DataType
INT, INTS = 2, 7  # AttributeProto.AttributeType


def field(number: int, value: int | str | bytes) -> bytes:
    """One field: a varint, or bytes behind their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def attribute(name: str, value: Any, kind: int) -> bytes:
    """An AttributeProto of kind INT or INTS."""
    numbers = field(3, value) if kind == INT else b"".join(field(8, one) for one in value)
    return field(1, name) + numbers + field(20, kind)


def tensor(name: str, dtype: int, data: Tensor) -> bytes:
    """A TensorProto."""
    dims = b"".join(field(1, size) for size in data.shape)
    return dims + field(2, dtype) + field(8, name) + field(9, data.numpy().tobytes())


def value_info(name: str, dtype: int, shape: Sequence[int | str]) -> bytes:
    """A ValueInfoProto of a tensor; a size that is a name is left open."""
    dims = b"".join(field(1, field(1, size) if isinstance(size, int) else field(2, size)) for size in shape)
    return field(1, name) + field(2, field(1, field(1, dtype) + field(2, dims)))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
