"""OpenVINO's compressed weights: u4 with zero points, or i8 per channel; activations quantized to int8 on the fly.

One model holds a MatMul for each copy of the weight. INFERENCE_PRECISION_HINT is f32 because the default (bf16 where the
CPU has it) turns the int8 path off and halves the speed. The int8 path exists on CPUs with VNNI; elsewhere OpenVINO
decompresses and multiplies in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfbyte.bench.workload import Built, Workload
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes, pack_nibbles

# Activations that share a scale where the weight has no blocks.
_ACTIVATION_GROUP = 128


def compressed(work: Workload, format: str) -> Built:
    """A MatMul on decompressed constants, which OpenVINO fuses."""
    import openvino
    import openvino.opset13 as opset

    slab = work.codes(format)
    if work.k % slab.format.block_size(work.k) or work.k % 2:
        raise UnsupportedError(f"OpenVINO's groups must divide K, got {format} and K={work.k}")
    group = slab.format.block_size(work.k) if isinstance(slab.format.block, int) else _ACTIVATION_GROUP
    copy_bytes = _stored_bytes(work.take(slab, 0))
    copies = work.copies(copy_bytes)
    x = opset.parameter([-1, work.k], openvino.Type.f32, name="x")
    products = [opset.matmul(x, _weight(work.take(slab, copy)), False, True) for copy in range(copies)]
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        "INFERENCE_NUM_THREADS": work.threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    compiled = openvino.Core().compile_model(openvino.Model([opset.result(y) for y in products], [x]), "CPU", settings)
    request = compiled.create_infer_request()

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        def one_pass() -> Iterator[Tensor]:
            request.infer()
            return (torch.from_numpy(request.get_output_tensor(copy).data) for copy in range(copies))

        request.set_input_tensor(openvino.Tensor(x.numpy(), shared_memory=True))
        return one_pass

    return Built(slab.dequantize(torch.float64), copy_bytes, copies, bind)


def _stored_bytes(codes: Codes) -> int:
    zeros = 0 if codes.zero is None else (codes.zero.numel() * codes.format.bits + 7) // 8
    return codes.data.nbytes + codes.scale.nbytes + zeros


def _weight(codes: Codes) -> object:
    """The subgraph (q - zero) * scale, reshaped to [N, K], in float32."""
    import openvino
    import openvino.opset13 as opset

    def u4(nibbles: Tensor, shape: tuple[int, ...]) -> object:
        tensor = openvino.Tensor(nibbles.flatten().numpy(), openvino.Shape(shape), openvino.Type.u4)
        return openvino.op.Constant(tensor, shared_memory=False)  # the nibbles are gone when the model is compiled

    n, k = codes.shape
    blocks = codes.scale.shape[-1]
    scale = opset.constant(codes.scale.reshape(n, blocks, 1).numpy())
    dtype = scale.get_element_type()
    if codes.zero is None:
        values = opset.convert(opset.constant(codes.data.reshape(n, blocks, k // blocks).numpy()), dtype)
    else:
        weight, zero = u4(codes.data, (n, blocks, k // blocks)), u4(pack_nibbles(codes.zero.flatten()), (n, blocks, 1))
        values = opset.subtract(opset.convert(weight, dtype), opset.convert(zero, dtype))
    product = opset.reshape(opset.multiply(values, scale), opset.constant([n, k]), False)
    return opset.convert(product, openvino.Type.f32) if dtype != openvino.Type.f32 else product
