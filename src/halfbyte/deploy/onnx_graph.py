"""What replaces halfbyte's ops in a traced model that becomes an ONNX file, with the same codes and scales.

    halfbyte::linear, linear_gelu, linear_geglu    MatMulNBits of com.microsoft, where it can hold the weight
    halfbyte::conv2d                 Conv with a weight of DequantizeLinear: int8 codes
    halfbyte::embedding              Gather of codes and scales, and their product
    halfbyte::dequantize, _conv      a constant
    halfbyte::attend_whole           torch's attention

A weight that none of these can hold is a constant in floating point; `replace_ops` says which.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn import functional
from torch.onnx.ops import symbolic

from halfbyte import ops
from halfbyte.deploy.onnx_static import Attribute, dequantized_rows
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.io.onnx import matmul_n_bits, why_not
from halfbyte.kernels.problem import Window
from halfbyte.layouts import convolution, cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.convolution import Filter, PackedConv, channels_first
from halfbyte.ops.conv.images import filter_from_numbers
from halfbyte.ops.registration import ends
from halfbyte.ops.tensors import geglu

_INT8 = 4  # the accuracy level of MatMulNBits that rounds activations to int8, as compute="int8" does
_FLOAT32 = 1


class _Linear(nn.Module):
    """halfbyte::linear, and with an activation function of its outputs linear_gelu and linear_geglu"""

    def __init__(self, weight: Codes, compute: str, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.n, self.activation = len(weight.data), activation
        self.settings: dict[str, Attribute] = {}
        tensors, settings = {"weight": weight.dequantize()}, None
        if why_not(weight) is None:
            tensors, settings = matmul_n_bits(weight)
            self.settings = {**settings, "accuracy_level": _FLOAT32 if compute == "float" else _INT8}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, low: float | None = None, high: float | None = None
    ) -> Tensor:
        buffers, bias = cast("dict[str, Tensor]", self._buffers), None if bias is None else bias.to(x.dtype)
        if self.settings:
            order = None
            inputs = (x, buffers["B"], buffers["scales"].to(x.dtype), buffers.get("zero_points"), order, bias)
            shape = (*x.shape[:-1], self.n)
            y = symbolic("com.microsoft::MatMulNBits", inputs, self.settings, dtype=x.dtype, shape=shape, version=1)
        else:
            y = functional.linear(x, buffers["weight"].to(x.dtype), bias)
        return _finished(y if self.activation is None else self.activation(y), residual, low, high)


def _finished(y: Tensor, residual: Tensor | None, low: float | None, high: float | None) -> Tensor:
    y = y if residual is None else y + residual
    return y if low is None and high is None else y.clamp(*ends(low, high))


class _Embedding(nn.Module):
    """halfbyte::embedding; codes of 4 bits take 8, as torch writes shifts of bytes that ONNX Runtime does not load"""

    def __init__(self, weight: Codes, dtype: torch.dtype) -> None:
        super().__init__()
        if (fmt := weight.format).bits == 4:
            weight = Codes.from_values(Format(8, fmt.block, fmt.zero, fmt.scale), weight.values(), weight.scale, weight.zero)
        self.format, self.k, self.dtype = weight.format, weight.shape[1], dtype
        self.shared = weight.format.block == "tensor"
        for name, tensor in weight.tensors().items():
            self.register_buffer(name, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        tensors = cast("dict[str, Tensor]", self._buffers)
        shape = (*ids.shape, self.k)
        rows = {
            name: tensor.reshape(self.format.scale_shape(shape)) if self.shared and name != "data" else functional.embedding(ids, tensor)
            for name, tensor in tensors.items()
        }
        return Codes(self.format, shape, **rows).dequantize(self.dtype)


class _Convolution(nn.Module):
    """halfbyte::conv2d"""

    def __init__(self, weight: Codes, sizes: Filter, window: Window) -> None:
        super().__init__()
        self.groups, self.window = sizes.groups, window
        self.per_row = weight.zero is None and not isinstance(weight.format.block, int)
        if self.per_row:
            values = weight.values().to(torch.int8)
            self.register_buffer("scale", weight.scale.float().flatten().expand(sizes.out).contiguous())
        else:
            values = weight.dequantize()
        self.register_buffer("data", channels_first(values, sizes.kernel).contiguous())

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, low: float | None, high: float | None) -> Tensor:
        buffers = cast("dict[str, Tensor]", self._buffers)
        weight = dequantized_rows(buffers["data"], buffers["scale"]) if self.per_row else buffers["data"]
        top, bottom, left, right = self.window.padding
        padding = (top, left)
        if (top, left) != (bottom, right):
            x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
        bias = None if bias is None else bias.to(x.dtype)
        y = functional.conv2d(x, weight.to(x.dtype), bias, self.window.stride, padding, self.window.dilation, self.groups)
        return _finished(y, residual, low, high)


class _Attention(nn.Module):
    """halfbyte::attend_whole"""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=self.scale).transpose(1, 2)


class _Constant(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self) -> Tensor:
        return cast(Tensor, self.value)


def replace_ops(traced: fx.GraphModule) -> list[str]:
    """Replace halfbyte's ops in a traced model.

    Returns:
        A sentence for each weight that became a constant in floating point.

    Raises:
        UnsupportedError: The model has an op that ONNX has no form for.
    """
    notes: list[str] = []
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "halfbyte":
            continue
        name = str(node.target._opname)
        weight = node.args[1 if name in ("linear", "linear_gelu", "linear_geglu", "embedding", "conv2d") else 0]
        if name not in _FORMS:
            raise UnsupportedError(f"halfbyte::{name} has no form in ONNX, only {', '.join(_FORMS)} have: leave that part out")
        module, inputs, note = _FORMS[name](traced, *node.args)
        target = f"{name}_{len(notes)}_{node.name}"
        traced.add_submodule(target, module)
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.call_module(target, tuple(inputs)))
        traced.graph.erase_node(node)
        notes += [] if note is None else [f"{weight} is stored in floating point: {note}"]
    traced.graph.eliminate_dead_code()
    traced.delete_all_unused_submodules()
    traced.recompile()
    return notes


def _codes(traced: fx.GraphModule, node: fx.Node, format: str, n: int, k: int) -> Codes:
    data = cast(Tensor, _attribute(traced, node)).cpu()
    layout = cpu_tiles.SPARSE if cpu_tiles.geometry_of(as_format(format), n, k, data.numel()).sparse else cpu_tiles.NAME
    return ops.unpack(Packed(as_format(format), (n, k), layout, data))


def _attribute(traced: fx.GraphModule, node: fx.Node) -> object:
    return operator.attrgetter(str(node.target))(traced)


_Form = tuple[nn.Module, list[Argument], str | None]


def _linear(
    traced: fx.GraphModule, x: Argument, weight: fx.Node, bias: Argument, residual: Argument, format: str, n: int, k: int, compute: str,
    activation: str, low: Argument, high: Argument,
) -> _Form:  # fmt: skip
    codes = _codes(traced, weight, format, n, k)
    return _Linear(codes, compute), [x, bias, residual, low, high], why_not(codes)


def _linear_gelu(
    traced: fx.GraphModule,
    x: Argument,
    weight: fx.Node,
    bias: Argument,
    format: str,
    n: int,
    k: int,
    compute: str,
    activation: str,
    approximate: str,
) -> _Form:
    codes = _codes(traced, weight, format, n, k)
    return _Linear(codes, compute, partial(functional.gelu, approximate=approximate)), [x, bias], why_not(codes)


def _linear_geglu(
    traced: fx.GraphModule, x: Argument, weight: fx.Node, bias: Argument, format: str, n: int, k: int, compute: str, activation: str
) -> _Form:
    codes = _codes(traced, weight, format, n, k)
    return _Linear(codes, compute, geglu), [x, bias], why_not(codes)


def _embedding(traced: fx.GraphModule, ids: Argument, weight: fx.Node, format: str, n: int, k: int, dtype: torch.dtype) -> _Form:
    return _Embedding(_codes(traced, weight, format, n, k), dtype), [ids], None


def _dequantize(traced: fx.GraphModule, weight: fx.Node, format: str, n: int, k: int, dtype: torch.dtype) -> _Form:
    return _Constant(_codes(traced, weight, format, n, k).dequantize(dtype)), [], "it is read as a whole"


def _packed_filter(traced: fx.GraphModule, weight: fx.Node, format: str, sizes: list[int]) -> PackedConv:
    filter_sizes = filter_from_numbers(format, sizes)
    layout = convolution.CANONICAL if filter_sizes.depthwise else cpu_tiles.NAME
    return PackedConv(filter_sizes, layout, cast(Tensor, _attribute(traced, weight)).cpu())


def _conv2d(
    traced: fx.GraphModule, x: Argument, weight: fx.Node, bias: Argument, residual: Argument, format: str, sizes: list[int],
    window: list[int], compute: str, activation: str, low: Argument, high: Argument,
) -> _Form:  # fmt: skip
    packed = _packed_filter(traced, weight, format, sizes)
    module = _Convolution(convolution.unpack(packed), packed.sizes, Window.from_numbers(window))
    return module, [x, bias, residual, low, high], None if module.per_row else "a convolution has a scale per channel in ONNX, and no zero"


def _dequantize_conv(traced: fx.GraphModule, weight: fx.Node, format: str, sizes: list[int], dtype: torch.dtype) -> _Form:
    return _Constant(convolution.dequantize(_packed_filter(traced, weight, format, sizes), dtype)), [], "it is read as a whole"


def _attend_whole(traced: fx.GraphModule, query: Argument, key: Argument, value: Argument, mask: Argument, scale: float) -> _Form:
    return _Attention(scale), [query, key, value, mask], None


_FORMS: dict[str, Callable[..., _Form]] = {
    "linear": _linear,
    "linear_gelu": _linear_gelu,
    "linear_geglu": _linear_geglu,
    "embedding": _embedding,
    "dequantize": _dequantize,
    "conv2d": _conv2d,
    "dequantize_conv": _dequantize_conv,
    "attend_whole": _attend_whole,
}
