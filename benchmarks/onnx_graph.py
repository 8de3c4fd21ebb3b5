"""ONNX models for ONNX Runtime, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Value = tuple[str, str, Sequence[int | str]]  # of an input or output: name, type ("FLOAT", "UINT8") and shape; a size may be a name


def model(nodes: Sequence[Any], constants: Mapping[str, Tensor], inputs: Sequence[Value], outputs: Sequence[Value], *domains: str) -> bytes:
    """A model with one graph of nodes of `onnx.helper.make_node`. domains: of operators beside ONNX's own."""
    from onnx import TensorProto, helper, numpy_helper

    ends = [helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape) for name, kind, shape in (*inputs, *outputs)]
    tensors = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in constants.items()]
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 1) for domain in domains)]
    graph = helper.make_graph(nodes, "halfbyte", ends[: len(inputs)], ends[len(inputs) :], tensors)
    built = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(built.SerializeToString())
