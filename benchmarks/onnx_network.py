"""A network on int8 codes as an ONNX model of quantized operators, for ONNX Runtime: the same codes and scales.

Activations become unsigned codes, 128 more, which is what ONNX Runtime's kernels for x86 take.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx_graph import model
from torch import Tensor, fx, nn

from halfbyte.errors import UnsupportedError
from halfbyte.layouts.convolution import channels_first
from halfbyte.nn.described import Scale
from halfbyte.nn.static.integer import AveragePool, Dequantize, IntegerConv2d, IntegerLinear, IntegerModule, MaxPool, Quantize, Requantize

_MICROSOFT = "com.microsoft"


def onnx_model(network: fx.GraphModule, shape: Sequence[int]) -> bytes:
    """The model, from "x" float32 of `shape` to "y". Raises UnsupportedError for what these networks do not have."""
    return _Writer(network).model(shape)


class _Writer:
    def __init__(self, network: fx.GraphModule) -> None:
        self.network = network
        self.nodes: list[Any] = []
        self.constants: dict[str, Tensor] = {}
        self.scales: dict[str, Scale] = {}  # of each tensor of codes, by its name

    def model(self, shape: Sequence[int]) -> bytes:
        modules = dict(self.network.named_modules())
        for node in self.network.graph.nodes:
            if node.op == "placeholder":
                node.name = "x"
            elif node.op == "output":
                self._node("Identity", [node.args[0].name], "y")
            elif node.op == "call_module":
                self._module(node, modules[str(node.target)])
            else:
                raise UnsupportedError(f"{node.format_node()} is not written as ONNX")
        return model(self.nodes, self.constants, [("x", "FLOAT", shape)], [("y", "FLOAT", ["batch", "classes"])], _MICROSOFT)

    def _node(self, kind: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))

    def _constant(self, name: str, value: Tensor) -> str:
        self.constants[name] = value.contiguous()
        return name

    def _scale(self, name: str, scale: Scale) -> list[str]:
        """Names of a scale and an unsigned zero point."""
        zero = torch.tensor(scale.zero + 128, dtype=torch.uint8)
        return [self._constant(f"{name}_scale", torch.tensor(scale.step)), self._constant(f"{name}_zero", zero)]

    def _module(self, node: fx.Node, module: nn.Module) -> None:
        ways: dict[type[nn.Module], Callable[[fx.Node, Any], None]] = {
            Quantize: self._quantize,
            Dequantize: self._dequantize,
            IntegerConv2d: self._convolution,
            IntegerLinear: self._linear,
            Requantize: self._add,
            AveragePool: self._average,
            MaxPool: self._largest,
            nn.Flatten: self._flatten,
        }
        if type(module) not in ways:
            raise UnsupportedError(f"a {type(module).__name__} is not written as ONNX")
        ways[type(module)](node, module)

    def _quantize(self, node: fx.Node, module: Quantize) -> None:
        self._node("QuantizeLinear", [_name(node, 0), *self._scale(node.name, module.scale)], node.name)
        self.scales[node.name] = module.scale

    def _dequantize(self, node: fx.Node, module: Dequantize) -> None:
        self._node("DequantizeLinear", [_name(node, 0), *self._scale(node.name, module.scale)], node.name)

    def _weight(self, node: fx.Node, module: IntegerModule, codes: Tensor, scale: Tensor) -> tuple[list[str], str]:
        """Names of codes, scales and zero points, and of the bias."""
        n, name = len(codes), node.name
        zeros = torch.zeros(n, dtype=torch.int8)
        bias = torch.zeros(n) if module.bias is None else module.bias.float()
        steps = (bias.double() / (scale.double() * module.source.step)).round().to(torch.int32)
        parts = [("w", codes), ("w_scale", scale), ("w_zero", zeros)]
        return [self._constant(f"{name}_{part}", value) for part, value in parts], self._constant(f"{name}_b", steps)

    def _convolution(self, node: fx.Node, module: IntegerConv2d) -> None:
        codes, sizes, window = module.codes(), module.packed.sizes, module.window
        assert window is not None
        top, bottom, left, right = window.padding
        weight, bias = self._weight(node, module, channels_first(codes.data, sizes.kernel), codes.scale.float().flatten())
        settings: dict[str, Any] = {"strides": window.stride, "pads": (top, left, bottom, right), "dilations": window.dilation}
        inputs = [_name(node, 0), *self._scale(f"{node.name}_in", module.source), *weight, *self._scale(node.name, module.result), bias]
        self._node("QLinearConv", inputs, node.name, group=sizes.groups, **settings)
        self.scales[node.name] = module.result

    def _linear(self, node: fx.Node, module: IntegerLinear) -> None:
        codes = module.codes()
        weight, bias = self._weight(node, module, codes.data, codes.scale.float().flatten())
        inputs = [_name(node, 0), *self._scale(f"{node.name}_in", module.source), *weight, bias, *self._scale(node.name, module.result)]
        self._node("QGemm", inputs, node.name, domain=_MICROSOFT, transB=1)
        self.scales[node.name] = module.result

    def _add(self, node: fx.Node, module: Requantize) -> None:
        parts = [part for i in (0, 1) for part in (_name(node, i), *self._scale(f"{node.name}_{i}", self.scales[_name(node, i)]))]
        self._node("QLinearAdd", [*parts, *self._scale(node.name, module.scale)], node.name, domain=_MICROSOFT)
        self.scales[node.name] = module.scale

    def _average(self, node: fx.Node, module: AveragePool) -> None:
        if not isinstance(module.pool, nn.AdaptiveAvgPool2d):
            raise UnsupportedError("only pools over whole images are written as ONNX")
        inputs = [_name(node, 0), *self._scale(f"{node.name}_in", module.scale), *self._scale(node.name, module.scale)]
        self._node("QLinearGlobalAveragePool", inputs, node.name, domain=_MICROSOFT)
        self.scales[node.name] = module.scale

    def _largest(self, node: fx.Node, module: MaxPool) -> None:
        pool = module.pool
        settings: dict[str, Any] = {"kernel_shape": [pool.kernel_size] * 2, "strides": [pool.stride] * 2, "pads": [pool.padding] * 4}
        self._node("MaxPool", [_name(node, 0)], node.name, **settings)
        self.scales[node.name] = self.scales[_name(node, 0)]

    def _flatten(self, node: fx.Node, module: nn.Flatten) -> None:
        self._node("Flatten", [_name(node, 0)], node.name, axis=operator.index(module.start_dim))
        self.scales[node.name] = self.scales[_name(node, 0)]


def _name(node: fx.Node, i: int) -> str:
    source = node.args[i]
    assert isinstance(source, fx.Node)
    return source.name
