"""Networks on int8 codes as ONNX has them: floating-point operators between QuantizeLinear and DequantizeLinear (QDQ), with the network's
own scales. A runtime fuses each such group into one operator on codes. Codes are unsigned, 128 more than the network's, which is what ONNX
Runtime's kernels for x86 take.

`onnx_model.py` traces the copy that `with_qdq` makes.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.onnx.ops import symbolic

from halfbyte import ops
from halfbyte.layouts.convolution import channels_first
from halfbyte.nn.described import LEAST, MOST, Scale
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.static.integer import (
    AveragePool,
    Dequantize,
    IntegerConv1d,
    IntegerConv2d,
    IntegerLinear,
    IntegerModule,
    MaxPool,
    Quantize,
    Requantize,
    clamp_codes,
    nearest,
)
from halfbyte.nn.static.network import IntegerNetwork

_UNIT = Scale(1.0, 0)
Attribute = int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]


def quantized(x: Tensor, scale: Scale) -> Tensor:
    """QuantizeLinear: codes of x."""
    return symbolic("QuantizeLinear", (x, *_numbers(scale)), {}, dtype=torch.uint8, shape=x.shape, version=21)


def dequantized(codes: Tensor, scale: Scale) -> Tensor:
    """DequantizeLinear: the float32 numbers that codes stand for."""
    return symbolic("DequantizeLinear", (codes, *_numbers(scale)), {}, dtype=torch.float32, shape=codes.shape, version=21)


def _numbers(scale: Scale) -> tuple[Tensor, Tensor]:
    return torch.tensor(scale.step, device="cpu"), torch.tensor(scale.zero - LEAST, dtype=torch.uint8, device="cpu")


def dequantized_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """DequantizeLinear of codes [N, …], int8 or int32, with a scale [N] of each."""
    return symbolic("DequantizeLinear", (codes, scale), {"axis": 0}, dtype=torch.float32, shape=codes.shape, version=21)


class _Requantized(nn.Module):
    """x -> codes of a result, with the clamp of an activation where it is narrower than that of codes."""

    def __init__(self, result: Scale, clamp: tuple[int, int]) -> None:
        super().__init__()
        self.result, self.clamp = result, clamp

    def forward(self, x: Tensor) -> Tensor:
        if self.clamp != (LEAST, MOST):
            low, high = ((end - self.result.zero) * self.result.step for end in self.clamp)
            x = x.clamp(low, high)
        return quantized(x, self.result)


class _Layer(nn.Module):
    """A layer on codes: its integer weight, its bias in steps of the sum, which are those of input and weight together."""

    def __init__(self, layer: IntegerModule) -> None:
        super().__init__()
        self.source, self.window, self.requantized = layer.source, layer.window, _Requantized(layer.result, layer.clamp)
        self.is_lines = isinstance(layer, IntegerConv1d)
        codes = layer.codes()
        data, scale = codes.values().to(torch.int8), codes.scale.float().flatten().expand(codes.shape[0])
        self.groups = 1
        if isinstance(layer, IntegerConv2d):
            sizes = layer.packed.sizes
            data, self.groups = channels_first(data, sizes.kernel), sizes.groups
        steps = scale.double() * layer.source.step
        bias = torch.zeros(len(data), dtype=torch.float32, device="cpu") if layer.bias is None else layer.bias
        self.register_buffer("data", data.contiguous())
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("bias", (bias.double() / steps).round().clamp(-(2**31), 2**31 - 1).to(torch.int32))
        self.register_buffer("bias_scale", steps.float())

    def forward(self, codes: Tensor) -> Tensor:
        x, buffers = dequantized(codes, self.source), cast("dict[str, Tensor]", self._buffers)
        weight, bias = dequantized_rows(buffers["data"], buffers["scale"]), dequantized_rows(buffers["bias"], buffers["bias_scale"])
        if self.window is None:
            return cast(Tensor, self.requantized(functional.linear(x, weight, bias)))
        if self.is_lines:
            x = x.unsqueeze(-2)
        top, bottom, left, right = self.window.padding
        attributes: dict[str, Attribute] = {
            "group": self.groups, "strides": [*self.window.stride], "dilations": [*self.window.dilation], "pads": [top, left, bottom, right]
        }  # fmt: skip
        height, width = self.window.out_size((x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3]))
        shape = (x.shape[0], weight.shape[0], height, width)
        y = symbolic("Conv", (x, weight, bias), attributes, dtype=torch.float32, shape=shape, version=22)
        y = self.requantized(y)
        return cast(Tensor, y.squeeze(-2) if self.is_lines else y)


class _Sum(nn.Module):
    def __init__(self, sources: tuple[Scale, ...], module: Requantize) -> None:
        super().__init__()
        self.sources, self.requantized = sources, _Requantized(module.scale, module.clamp)

    def forward(self, *codes: Tensor) -> Tensor:
        first, *others = (dequantized(x, scale) for x, scale in zip(codes, self.sources, strict=True))
        return cast(Tensor, self.requantized(first + others[0] if others else first))


class _Pool(nn.Module):
    def __init__(self, pool: nn.Module, source: Scale, result: Scale) -> None:
        super().__init__()
        self.pool, self.source, self.result = pool, source, result

    def forward(self, codes: Tensor) -> Tensor:
        x = dequantized(codes, self.source)
        if isinstance(self.pool, nn.AdaptiveAvgPool2d) and self.pool.output_size in (1, (1, 1)):
            y = symbolic("GlobalAveragePool", (x,), {}, dtype=x.dtype, shape=(*x.shape[:2], 1, 1), version=22)
        else:
            y = cast(Tensor, self.pool(x))
        return quantized(y, self.result)


class _Quantize(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return quantized(x.float(), self.scale)


class _Dequantize(nn.Module):
    def __init__(self, scale: Scale, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.dtype = scale, dtype

    def forward(self, codes: Tensor) -> Tensor:
        return dequantized(codes, self.scale).to(self.dtype)


def with_qdq(module: nn.Module) -> nn.Module:
    """A copy of a model that shares its tensors: modules on int8 codes have their QDQ forms in it, fused layers their own weights."""
    match module:
        case FusedLinear():
            packed, how = ops.pack(module.codes(), "cpu"), (module.compute, module.activation)
            return QuantLinear(packed, module.bias, *how, dtype=module.dtype)
        case Quantize():
            return _Quantize(module.scale)
        case Dequantize():
            return _Dequantize(module.scale, module.dtype)
        case IntegerConv2d() | IntegerLinear():
            return _Layer(module)
        case Requantize():
            return _Sum(module.sources, module)
        case AveragePool():
            return _Pool(module.pool, module.scale, module.result)
        case MaxPool():
            return _Pool(module.pool, _UNIT, _UNIT)
        case IntegerNetwork():
            return _network(module)
    copied = copy.copy(module)
    copied._modules = {name: None if child is None else with_qdq(child) for name, child in module._modules.items()}
    return copied


def _nearest(codes: Tensor, *settings: object, **named: object) -> Tensor:
    return quantized(functional.interpolate(dequantized(codes, _UNIT), *settings, **named), _UNIT)  # type: ignore[arg-type]


def _network(network: IntegerNetwork) -> fx.GraphModule:
    graph = copy.deepcopy(network.graph)
    for node in graph.nodes:
        if node.target is clamp_codes:
            x, low, high = node.args
            node.args = (x, low - LEAST, high - LEAST)
        elif node.target is nearest:
            node.target = _nearest
    names = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    parts = {name: operator.attrgetter(name)(network) for name in names}
    return fx.GraphModule({name: with_qdq(part) if isinstance(part, nn.Module) else part for name, part in parts.items()}, graph)
