"""int8 codes in, int8 codes out: `qlinear`, oneDNN's and ONNX Runtime's product, with the same codes and one scale for each side.

The peers take activations as unsigned codes, 128 more, as their own quantizers make them for x86.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
from cpu_onnxruntime import copies_in_a_model, session
from onnx_graph import model
from torch import Tensor

from halfbyte import ops
from halfbyte.bench.workload import SIGMA, Built, Workload

_SPAN = 5.0  # standard deviations that codes reach to
IN_SCALE = _SPAN / 127
ERROR = 2 * _SPAN / 127 / 2  # of codes in and of codes out, half a step each, beside deviations of 1


def out_scale(work: Workload) -> float:
    """Of the codes that come out: outputs are sums of K products."""
    return _SPAN * SIGMA * math.sqrt(work.k) / 127


def _codes(x: Tensor) -> Tensor:
    return (x / IN_SCALE).round().clamp(-127, 127).to(torch.int8)


def _unsigned(x: Tensor) -> Tensor:
    return (_codes(x).int() + 128).to(torch.uint8)


def qlinear(work: Workload, format: str) -> Built:
    """`torch.ops.halfbyte.qlinear`, whose table is made before, as a layer does."""
    slab, step = work.codes(format), out_scale(work)
    copy_bytes = work.take(slab, 0).nbytes
    weights = [ops.pack(work.take(slab, copy)) for copy in range(work.copies(copy_bytes))]
    tables = [ops.requantization_table(w, None, in_scale=IN_SCALE, in_zero=0, out_scale=step, out_zero=0) for w in weights]
    run = torch.ops.halfbyte.qlinear.default

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        codes = _codes(x)
        pairs = list(zip(weights, tables, strict=True))
        return lambda: (run(codes, w.data, table, format, work.n, work.k, -128, 127) for w, table in pairs)

    return Built(slab.dequantize(torch.float64), copy_bytes, len(weights), bind, value=lambda y: y.double() * step)


def onednn(work: Workload, format: str) -> Built:
    """`torch.ops.quantized.linear`. (`torch.ops.onednn.qlinear_pointwise` refuses sizes that are not multiples of 64.)"""
    torch.backends.quantized.engine = "onednn"
    slab, step = work.codes(format), out_scale(work)
    zeros = torch.zeros(work.n, dtype=torch.int64)
    copy_bytes = work.take(slab, 0).nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.ao is deprecated
        weights = []
        for copy in range(work.copies(copy_bytes)):
            codes = work.take(slab, copy)
            weight = torch._make_per_channel_quantized_tensor(codes.data, codes.scale.flatten().double(), zeros, 0)
            weights.append(torch.ops.quantized.linear_prepack(weight, None))

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        codes = torch._make_per_tensor_quantized_tensor(_unsigned(x), IN_SCALE, 128)
        return lambda: (torch.ops.quantized.linear(codes, weight, step, 128) for weight in weights)

    return Built(slab.dequantize(torch.float64), copy_bytes, len(weights), bind, value=lambda y: y.dequantize().double())


def onnxruntime_qlinear(work: Workload, format: str) -> Built:
    """QLinearMatMul: a node for each copy of the weight, so that all share one pool of threads."""
    slab, step = work.codes(format), out_scale(work)
    copy_bytes = work.take(slab, 0).nbytes
    copies = copies_in_a_model(work, copy_bytes)
    bind = session(work, _model(work, format, copies), copies, _unsigned, torch.uint8)
    return Built(slab.dequantize(torch.float64), copy_bytes, copies, bind, value=lambda y: (y.double() - 128) * step)


def _model(work: Workload, format: str, copies: int) -> bytes:
    from onnx import helper

    slab = work.codes(format)
    constants = {
        "x_scale": torch.tensor(IN_SCALE),
        "zero": torch.tensor(128, dtype=torch.uint8),
        "w_zero": torch.zeros(work.n, dtype=torch.int8),
        "y_scale": torch.tensor(out_scale(work)),
    }
    nodes, outputs = [], []
    for copy in range(copies):
        codes = work.take(slab, copy)
        constants |= {f"w{copy}": codes.data.T.contiguous(), f"s{copy}": codes.scale.float().flatten()}
        inputs = ("x", "x_scale", "zero", f"w{copy}", f"s{copy}", "w_zero", "y_scale", "zero")
        nodes.append(helper.make_node("QLinearMatMul", inputs, [f"y{copy}"]))
        outputs.append((f"y{copy}", "UINT8", ("M", work.n)))
    return model(nodes, constants, [("x", "UINT8", ("M", work.k))], outputs)
