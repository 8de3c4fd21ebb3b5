"""ONNX models written field by field, for peers that take nothing else (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def node(
    kind: str, name: str, inputs: Iterable[str], output: str, attributes: Iterable[tuple[str, Any, int]] = (), domain: str = ""
) -> bytes:
    """A NodeProto with one output. attributes: (name, value, INT or INTS)."""
    start = b"".join(field(1, source) for source in inputs) + field(2, output) + field(3, name) + field(4, kind)
    return start + b"".join(field(5, attribute(*one)) for one in attributes) + (field(7, domain) if domain else b"")


def model(
    nodes: Iterable[bytes], constants: Mapping[str, tuple[int, Tensor]], inputs: Iterable[bytes], outputs: Iterable[bytes], *domains: str
) -> bytes:
    """A ModelProto with one graph. constants: (type, value) by name. inputs, outputs: of `value_info`. domains: beside ONNX's own."""
    graph = [field(2, "halfbyte"), *(field(1, one) for one in nodes), *(field(5, tensor(name, *one)) for name, one in constants.items())]
    graph += [*(field(11, one) for one in inputs), *(field(12, one) for one in outputs)]
    opsets = [("", 17), *((domain, 1) for domain in domains)]
    return field(1, 8) + b"".join(field(8, field(1, name) + field(2, version)) for name, version in opsets) + field(7, b"".join(graph))


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
