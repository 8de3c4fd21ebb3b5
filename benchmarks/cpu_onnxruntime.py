"""ONNX Runtime's MatMulNBits: 4-bit blocks, activations quantized to int8 on the fly (accuracy_level 4).

One model holds a node for each copy of the weight, so that all copies share one thread pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from onnx_graph import model
from torch import Tensor

from halfbyte.bench.workload import Built, Workload
from halfbyte.errors import UnsupportedError


def matmul_nbits(work: Workload, format: str) -> Built:
    """MatMulNBits on the codes of a symmetric 4-bit block format, whose nibbles lie as in `Codes`; scales are float32."""
    slab = work.codes(format)
    copy_bytes = work.n * (slab.data.shape[-1] + 4 * slab.scale.shape[-1])
    copies = copies_in_a_model(work, copy_bytes)
    return Built(slab.dequantize(torch.float64), copy_bytes, copies, session(work, _model(work, format, copies), copies))


def copies_in_a_model(work: Workload, copy_bytes: int) -> int:
    """How many copies of the weight a workload has. Raises UnsupportedError where one model cannot hold them."""
    copies = work.copies(copy_bytes)
    if copies * copy_bytes >= 2**31 - 2**20:
        raise UnsupportedError(f"a protobuf ends at 2 GiB, {copies} weights take {copies * copy_bytes / 2**30:.1f} GiB")
    return copies


def session(
    work: Workload, model: bytes, copies: int, prepared: Callable[[Tensor], Tensor] = lambda x: x, dtype: torch.dtype = torch.float32
) -> Callable[[Tensor], Callable[[], Iterator[Tensor]]]:
    """What binds activations to a model with the input x, which is `prepared` of them, and an output [M, N] of `dtype` for each copy."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = work.threads
    options.inter_op_num_threads = 1
    running = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        taken, outputs = prepared(x), [torch.empty(len(x), work.n, dtype=dtype) for _ in range(copies)]
        binding = running.io_binding()
        binding.bind_cpu_input("x", taken.numpy())
        for copy, y in enumerate(outputs):
            binding.bind_output(f"y{copy}", "cpu", 0, y.numpy().dtype, tuple(y.shape), y.data_ptr())

        def one_pass(_kept: Tensor = taken) -> Iterator[Tensor]:  # the binding may have no more than its address
            running.run_with_iobinding(binding)
            return iter(outputs)

        return one_pass

    return bind


def _model(work: Workload, format: str, copies: int) -> bytes:
    from onnx import helper

    slab = work.codes(format)
    block = slab.format.block_size(work.k)
    if slab.format.bits != 4 or slab.format.zero != "none" or block not in (16, 32, 64, 128, 256) or work.k % block:
        raise UnsupportedError(f"MatMulNBits wants blocks of 16 to 256 (a power of two) that divide K, got {format} and K={work.k}")
    settings: dict[str, Any] = {"K": work.k, "N": work.n, "bits": 4, "block_size": block, "accuracy_level": 4}
    constants, nodes, outputs = dict[str, Tensor](), [], []
    for copy in range(copies):
        codes, inputs = work.take(slab, copy), ("x", f"w{copy}", f"s{copy}")
        constants[f"w{copy}"] = codes.data.reshape(work.n, work.k // block, block // 2)
        constants[f"s{copy}"] = codes.scale.float().flatten()
        nodes.append(helper.make_node("MatMulNBits", inputs, [f"y{copy}"], domain="com.microsoft", **settings))
        outputs.append((f"y{copy}", "FLOAT", ("M", work.n)))
    return model(nodes, constants, [("x", "FLOAT", ("M", work.k))], outputs, "com.microsoft")
