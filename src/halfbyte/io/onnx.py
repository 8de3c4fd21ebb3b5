"""One linear layer as an ONNX file with the operator MatMulNBits of com.microsoft. Nothing is rounded.

    y = A [..., K] · dequantize(B)ᵀ (+ bias)
    B            uint8 [N, blocks, block * bits / 8]   codes along K, low nibble first; the last block is padded
    scales       [N * blocks]  of A's dtype
    zero_points  uint8 [N * ceil(blocks * bits / 8)]   packed likewise; if absent, all are 2^(bits-1)

Source: github.com/microsoft/onnxruntime, docs/ContribOperators.md. Needs the package `onnx`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, CheckpointError, lookup, model_path, unreadable, unwritable
from halfbyte.formats.codes import Codes, pack_nibbles, unpack_nibbles
from halfbyte.formats.spec import Format
from halfbyte.io.files import open_file, write_whole
from halfbyte.io.weights import zero_points

if TYPE_CHECKING:
    from onnx import TensorProto

_OPSET = 21
_DOMAIN = "com.microsoft"
_LEAST_BLOCK, _BLOCK = 16, 128  # the least, and that of weights with a scale per channel
FILE_LIMIT = 2 << 30  # of a protobuf


def export_linear(path: str | os.PathLike[str], codes: Codes, bias: Tensor | None = None) -> None:
    """Write a model with one input "x" [M, K] and one output "y" [M, N], both of the scales' dtype, float32 or float16.

    Raises ArgumentError for a format that the operator does not support: it takes symmetric codes or zero points, and blocks
    of a power of two, 16 or more, or a scale per channel.
    """
    onnx = import_onnx()
    dtype, (n, k) = codes.scale.dtype, codes.shape
    reason = why_not(codes)
    if reason is None and dtype == torch.bfloat16:
        reason = "its scales are bfloat16"
    if reason is not None:
        raise ArgumentError(
            f"MatMulNBits cannot hold a weight {[n, k]} of {codes.format}, for {reason}: use float16 scales and blocks of 32"
        )
    tensors, settings = matmul_n_bits(codes)
    inputs = ["x", *tensors]
    if bias is not None:
        tensors["bias"] = bias.detach().to(dtype)
        inputs += [""] * (5 - len(inputs)) + ["bias"]  # B, scales, zero_points, g_idx, bias
    numbers = {torch.float32: onnx.TensorProto.FLOAT, torch.float16: onnx.TensorProto.FLOAT16}
    number = lookup(numbers, dtype, "the scales of MatMulNBits,")
    helper = onnx.helper
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain=_DOMAIN, **settings)
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", number, ["M", k])],
        [helper.make_tensor_value_info("y", number, ["M", n])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(tensor.cpu().numpy()), name) for name, tensor in tensors.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="halfbyte")
    target = model_path(path)
    try:
        write_whole(target, model.SerializeToString())
    except OSError as e:
        raise unwritable(target, e) from e


def why_not(codes: Codes) -> str | None:
    """Why MatMulNBits cannot hold a weight, or None."""
    codes = _blocked(codes)
    block = codes.format.block
    if not isinstance(block, int):
        return "one scale is for all of it"
    if reason := zero_points.why_not(codes.format, (codes.shape[0], block), (4, 8), n_multiple=1, k_multiple=1):
        return reason
    fits = block >= _LEAST_BLOCK and block & (block - 1) == 0
    return None if fits else f"its blocks have {block} weights, not a power of two from {_LEAST_BLOCK}"


def matmul_n_bits(codes: Codes) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The inputs B, scales and, where the codes have them, zero_points of MatMulNBits, and its attributes; `why_not` is None."""
    codes = _blocked(codes)
    (n, k), bits, blocks, block = codes.shape, codes.format.bits, codes.scale.shape[1], codes.format.block
    assert isinstance(block, int)
    data, zeros = zero_points.unsigned(codes)
    width = blocks * block * bits // 8
    data = torch.nn.functional.pad(data, (0, width - data.shape[1])).reshape(n, blocks, -1)
    tensors = {"B": data, "scales": codes.scale.flatten()}
    if codes.zero is not None:
        tensors["zero_points"] = (pack_nibbles(zeros) if bits == 4 else zeros).flatten()
    return tensors, {"K": k, "N": n, "bits": bits, "block_size": block}


def _blocked(codes: Codes) -> Codes:
    """The same weight with integer codes and scales of blocks."""
    if codes.format.codebook or codes.format.packed_bits:
        codes = codes.integers()
    fmt, k = codes.format, codes.shape[1]
    if fmt.block != "channel":
        return codes
    spread = {name: tensor if name == "data" else tensor.repeat(1, -(-k // _BLOCK)) for name, tensor in codes.tensors().items()}
    return Codes.from_tensors(Format(fmt.bits, _BLOCK, fmt.zero, fmt.scale), codes.shape, spread)


def import_linear(path: str | os.PathLike[str]) -> tuple[Codes, Tensor | None]:
    """The weight [N, K] and the bias [N] of the only MatMulNBits in an ONNX file."""
    onnx = import_onnx()
    source = model_path(path)
    try:
        with open_file(source) as file:
            if os.fstat(file.fileno()).st_size > FILE_LIMIT:
                raise CheckpointError(f"{source} is longer than {FILE_LIMIT} bytes, which no ONNX file is")
            model = onnx.ModelProto.FromString(file.read())
    except OSError as e:
        raise unreadable(source, e) from e
    except CheckpointError:
        raise
    except Exception as e:  # the implementations of protobuf raise different DecodeErrors
        raise CheckpointError(f"{source} is not an ONNX file: {' '.join(str(e).split())[:200]}") from e
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    if len(nodes) != 1:
        raise CheckpointError(f"{source} has {len(nodes)} MatMulNBits: a file with one is imported")
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    roles = dict(zip(("x", "B", "scales", "zero_points", "g_idx", "bias"), nodes[0].input, strict=False))
    parts = {role: _tensor(onnx, initializers[name], source) for role, name in roles.items() if role != "x" and name in initializers}
    if missing := [role for role, name in roles.items() if role != "x" and name and role not in parts]:
        raise CheckpointError(f"{source}: {missing[0]} of MatMulNBits is not an initializer: export the model with its weights")
    settings = {attribute.name: attribute.i for attribute in nodes[0].attribute}
    return _weight(parts, settings, source), parts.get("bias")


def _weight(parts: dict[str, Tensor], settings: dict[str, int], source: Path) -> Codes:
    where = f"{source}: MatMulNBits"
    k, n, bits, block = (settings.get(name, 0) for name in ("K", "N", "bits", "block_size"))
    if bits not in (4, 8) or min(k, n) < 1 or block < _LEAST_BLOCK or block & (block - 1):
        raise CheckpointError(f"{where} has K={k}, N={n}, bits={bits}, block_size={block}: bits are 4 or 8, blocks a power of two from 16")
    if "g_idx" in parts:
        raise CheckpointError(f"{where} has a g_idx, which is not read: export the model without activation order")
    blocks = -(-k // block)
    flat = {name: tensor.reshape(-1) for name, tensor in parts.items()}
    data = (
        zero_points.take(flat, "B", (torch.uint8,), (n * blocks * (block * bits // 8),), where)
        .reshape(n, -1)[:, : -(-k * bits // 8)]
        .contiguous()
    )
    if bits == 4 and k % 2:
        data[:, -1] &= 15
    scales = zero_points.take(flat, "scales", zero_points.SCALES, (n * blocks,), where).reshape(n, blocks)
    zero = torch.full(scales.shape, zero_points.middle(bits), dtype=torch.uint8, device="cpu")
    if "zero_points" in flat:
        stored = zero_points.take(flat, "zero_points", (torch.uint8,), (n * -(-blocks * bits // 8),), where).reshape(n, -1)
        zero = stored if bits == 8 else unpack_nibbles(stored, blocks)
    codes = zero_points.codes_of(bits, block, k, data, scales, zero.contiguous())
    codes.check_values()
    return codes


def _tensor(onnx: ModuleType, stored: TensorProto, source: Path) -> Tensor:
    if stored.data_location == onnx.TensorProto.EXTERNAL:
        raise CheckpointError(f"{source} keeps {stored.name} in another file: save it as one file")
    try:
        return torch.from_numpy(np.array(onnx.numpy_helper.to_array(stored)))
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{source}: {stored.name} is damaged: {' '.join(str(e).split())[:200]}") from e


def import_onnx() -> ModuleType:
    """The package; raises CheckpointError where it is not installed."""
    try:
        import onnx
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as e:
        raise CheckpointError("ONNX files need the package onnx: pip install onnx") from e
    return onnx
