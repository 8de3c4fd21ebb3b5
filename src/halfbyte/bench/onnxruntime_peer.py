"""ONNX Runtime's MatMulNBits: 4-bit blocks, activations quantized to int8 on the fly (accuracy_level 4).

One model holds a node for each copy of the weight, so that all copies share one thread pool. The model's protobuf is
written here, field by field (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto), so the onnx package is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfbyte.bench.workload import Built, Workload
from halfbyte.errors import UnsupportedError

_FLOAT, _UINT8 = 1, 2  # TensorProto.DataType
_INT = 2  # AttributeProto.AttributeType


def matmul_nbits(work: Workload, format: str) -> Built:
    """MatMulNBits on the codes of a symmetric 4-bit block format, whose nibbles lie as in `Codes`; scales are float32."""
    import onnxruntime

    slab = work.codes(format)
    copy_bytes = work.n * (slab.data.shape[-1] + 4 * slab.scale.shape[-1])
    copies = work.copies(copy_bytes)
    if copies * copy_bytes >= 2**31 - 2**20:
        raise UnsupportedError(f"a protobuf ends at 2 GiB, {copies} weights take {copies * copy_bytes / 2**30:.1f} GiB")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = work.threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(_model(work, format, copies), options, providers=["CPUExecutionProvider"])

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        outputs = [torch.empty(len(x), work.n) for _ in range(copies)]
        binding = session.io_binding()
        binding.bind_cpu_input("x", x.numpy())
        for copy, y in enumerate(outputs):
            binding.bind_output(f"y{copy}", "cpu", 0, y.numpy().dtype, tuple(y.shape), y.data_ptr())

        def one_pass() -> Iterator[Tensor]:
            session.run_with_iobinding(binding)
            return iter(outputs)

        return one_pass

    return Built(slab.dequantize(torch.float64), copy_bytes, copies, bind)


def _model(work: Workload, format: str, copies: int) -> bytes:
    slab = work.codes(format)
    block = slab.format.block_size(work.k)
    if slab.format.bits != 4 or slab.format.zero != "none" or block not in (16, 32, 64, 128, 256) or work.k % block:
        raise UnsupportedError(f"MatMulNBits wants blocks of 16 to 256 (a power of two) that divide K, got {format} and K={work.k}")
    settings = {"K": work.k, "N": work.n, "bits": 4, "block_size": block, "accuracy_level": 4}
    attributes = b"".join(_field(5, _field(1, name) + _field(3, value) + _field(20, _INT)) for name, value in settings.items())
    graph = [_field(2, "halfbyte"), _field(11, _value_info("x", work.k))]
    for copy in range(copies):
        codes = work.take(slab, copy)
        edges = _field(1, "x") + _field(1, f"w{copy}") + _field(1, f"s{copy}") + _field(2, f"y{copy}")
        graph += [
            _field(1, edges + _field(3, f"matmul{copy}") + _field(4, "MatMulNBits") + attributes + _field(7, "com.microsoft")),
            _field(5, _tensor(f"w{copy}", _UINT8, codes.data.reshape(work.n, work.k // block, block // 2))),
            _field(5, _tensor(f"s{copy}", _FLOAT, codes.scale.float().flatten())),
            _field(12, _value_info(f"y{copy}", work.n)),
        ]
    opsets = _field(8, _field(1, "") + _field(2, 17)) + _field(8, _field(1, "com.microsoft") + _field(2, 1))
    return _field(1, 8) + opsets + _field(7, b"".join(graph))


def _tensor(name: str, dtype: int, data: Tensor) -> bytes:
    dims = b"".join(_field(1, size) for size in data.shape)
    return dims + _field(2, dtype) + _field(8, name) + _field(9, data.numpy().tobytes())


def _value_info(name: str, columns: int) -> bytes:
    """A float32 matrix [M, columns], M left open."""
    shape = _field(1, _field(2, "M")) + _field(1, _field(1, columns))
    return _field(1, name) + _field(2, _field(1, _field(1, _FLOAT) + _field(2, shape)))


def _field(number: int, value: int | str | bytes) -> bytes:
    """One protobuf field: a varint, or bytes behind their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
