"""Rewriting of a float network's graph into one on int8 codes: `GraphRewriter`, which build.py calls after calibration.

Nodes are visited in order. The result of a node of the float graph has up to two forms in the new graph, each made where it is first
needed: int8 codes with their Scale, and floating point. A node for which there is a rule (`_rule`) reads and writes codes; every other
node is copied, and reads and writes floating point. Quantize and Dequantize modules stand where one form is made of the other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import fx, nn

from halfbyte.layouts.base import Packed
from halfbyte.nn.described import CALIBRATION_KEY, LEAST, MOST, Calibrated, Scale
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.static.bias_correction import Layer, LayerWeight, Weights
from halfbyte.nn.static.integer import (
    AveragePool,
    Dequantize,
    IntegerConv1d,
    IntegerConv2d,
    IntegerLinear,
    MaxPool,
    Quantize,
    Requantize,
    clamp_codes,
    nearest,
)
from halfbyte.nn.static.memory_format import MemoryFormats
from halfbyte.nn.static.network import IntegerNetwork
from halfbyte.nn.static.ranges import parameter_dtype
from halfbyte.nn.static.tracing import ADDS, RELUS, calls, copy_node, first_input, module_of, read_modules, why_overridden
from halfbyte.ops.conv import functions as conv

# Operations that move codes and do not compute.
_SHAPES = (torch.flatten, torch.reshape, "flatten", "view", "reshape", "permute", "contiguous", "squeeze", "unsqueeze")
_AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
# Attributes of nn.Upsample that are arguments of `interpolate`.
_UPSAMPLE_SETTINGS = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
_READ = "the network reads its weight or bias, which a layer on codes has no longer"

_Rule = Callable[[fx.Node], None]  # adds what computes a node on codes to the new graph


class _Int8(NamedTuple):
    """A result in codes: the node of the new graph, and what its codes stand for."""

    node: fx.Node
    scale: Scale


@dataclass(frozen=True)
class _Output:
    """What a layer or an addition writes.

    Attributes:
        scale, clamp: Of its codes.
        results: The nodes of the float graph whose result this is: its own and, where that is fused, the ReLU behind it.
    """

    scale: Scale
    clamp: tuple[int, int]
    results: tuple[fx.Node, ...]


class GraphRewriter:
    """Builds the network on int8 codes.

    Args:
        traced: The float network, prepared (prepare.py).
        scales: Of each result that can become codes, by the name of its node in `traced`.
        weights: The quantized weight of each layer, or the reason why it stays in floating point.
        why_float: The reasons why results that have no scale stay in floating point, by the names of their nodes.
    """

    def __init__(
        self, traced: fx.GraphModule, scales: Mapping[str, Scale], weights: Weights, why_float: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._traced, self._scales, self._weights, self._why_float = traced, scales, weights, why_float
        self._modules = dict(traced.named_modules())
        self._read_modules = read_modules(traced.graph)
        self._dtype = parameter_dtype(traced)
        # The new graph, and by their names its modules and parameters.
        self._graph = fx.Graph()
        self._root: dict[str, object] = {}
        # Keys: nodes of the float graph.
        self._float_of: dict[fx.Node, fx.Node] = {}
        self._int8_of: dict[fx.Node, _Int8] = {}
        self._padding_of: dict[fx.Node, tuple[int, int, int, int]] = {}  # (top, bottom, left, right), which convolutions behind it do
        # For the calibration record:
        self._float_layers: list[str] = []
        self._notes: list[str] = []

    def rewrite(self, notes: tuple[str, ...]) -> IntegerNetwork:
        """Return the network on codes, in evaluation.

        Args:
            notes: For the calibration record, before those of the operations that run in floating point.
        """
        for node in self._traced.graph.nodes:
            self._rewrite(node)
        self._erase_unread_relus()
        self._activate_in_place()
        self._restore_memory_formats()
        network = IntegerNetwork(self._root, self._graph, type(self._traced).__name__)
        network.meta[CALIBRATION_KEY] = Calibrated(dict(self._scales), tuple(self._float_layers), (*notes, *self._notes))
        return network.eval()

    @property
    def rounded(self) -> dict[str, Scale]:
        """The scales of the results that are rounded, after `rewrite`: others have their input's codes."""
        return {
            node.name: codes.scale
            for node, codes in self._int8_of.items()
            if codes.scale is self._scales[node.name] or isinstance(self._module(node), _AVERAGE_POOLS)
        }

    # After all nodes were visited

    def _erase_unread_relus(self) -> None:
        """Erase the float ReLUs that saturation replaces and nothing else reads."""
        for node, float_node in self._float_of.items():
            if not float_node.users and self._is_saturation(node):
                self._graph.erase_node(float_node)

    def _activate_in_place(self) -> None:
        """Let a ReLU write to the result of the float convolution before it, which nothing else reads: new memory would cost more."""
        calls_of_target = Counter(node.target for node in self._graph.nodes)
        for node, float_node in self._float_of.items():
            module = self._module(node)
            if not isinstance(module, nn.ReLU | nn.ReLU6) or why_overridden(module) or calls_of_target[float_node.target] != 1:
                continue
            source = first_input(node)
            layer = self._module(source)
            is_float_conv = isinstance(layer, nn.Conv1d | nn.Conv2d) and why_overridden(layer) is None and source not in self._int8_of
            if is_float_conv and list(self._float_of[source].users) == [float_node]:
                self._root[str(float_node.target)] = type(module)(inplace=True)

    def _restore_memory_formats(self) -> None:
        """Restore torch's memory format in what leaves the integer layers, which write channels_last."""
        modules = {name: module for name, module in self._root.items() if isinstance(module, nn.Module)}

        def writes_channels_last(node: fx.Node) -> bool:
            return isinstance(module_of(node, modules), IntegerConv2d | MaxPool | AveragePool)

        def keeps_format(node: fx.Node) -> bool:
            return calls(node, (nearest, clamp_codes)) or isinstance(module_of(node, modules), Quantize | Dequantize | Requantize)

        def ignores_format(node: fx.Node) -> bool:
            return isinstance(module_of(node, modules), IntegerLinear | QuantLinear)

        MemoryFormats(self._graph, modules, writes_channels_last, keeps_format, ignores_format).restore()

    # Either form of a result

    def _int8(self, node: fx.Node) -> _Int8:
        """Return a node's result in codes; quantize it if only its float form exists."""
        if node not in self._int8_of:
            scale = self._scales[node.name]
            source = first_input(node) if self._is_saturation(node) else node
            quantized = self._call(node, Quantize(scale), self._float(source), name=f"{node.name}_quantize")
            self._int8_of[node] = _Int8(quantized, scale)
        return self._int8_of[node]

    def _float(self, node: fx.Node) -> fx.Node:
        """Return a node's result in floating point; dequantize it if only its codes exist."""
        if node not in self._float_of:
            codes, scale = self._int8_of[node]
            self._float_of[node] = self._call(node, Dequantize(scale, self._dtype), codes, name=f"{node.name}_dequantize")
        return self._float_of[node]

    def _is_saturation(self, node: fx.Node) -> bool:
        """Whether a node is a ReLU whose codes are those of its input: quantization saturates where the ReLU clamps."""
        scale = self._scales.get(node.name)
        return self._is_relu(node) and bool(_inputs(node)) and scale is not None and self._relu_clamp(node, scale) == (LEAST, MOST)

    def _call(self, node: fx.Node, module: nn.Module, *inputs: fx.Node, name: str | None = None) -> fx.Node:
        """Add a call of `module` in the place of `node`. A layer keeps its name; its second call gets a module by the node's name."""
        name = name or (str(node.target) if node.op == "call_module" else node.name)
        if name in self._root:
            name = node.name
        self._root[name] = module
        return self._graph.call_module(name, inputs)

    # One node

    def _rewrite(self, node: fx.Node) -> None:
        if node in self._int8_of:  # a ReLU that is fused into the layer before it
            return
        rule = self._rule(node)
        if not isinstance(rule, str):
            rule(node)
            return
        if node.op not in ("placeholder", "output", "get_attr"):
            module = self._module(node)
            what = getattr(node.target, "__name__", node.target) if module is None else type(module).__name__
            reason = f": {rule}" if rule else ""
            self._notes.append(f"{node.name if module is None else node.target} ({what}) runs in floating point{reason}")
        self._float_of[node] = copy_node(node, self._traced, self._graph, self._root, self._float)

    def _rule(self, node: fx.Node) -> _Rule | str:
        """Return the rule for a node, or why it runs in floating point: "" where its operation has no rule, or other numbers than codes."""
        if without_scale := [n.name for n in (node, *_inputs(node)) if n.name not in self._scales]:
            has_rule = self._layer_of(node) is not None or self._operation_rule(node) is not None
            return next((self._why_float[name] for name in without_scale if has_rule and name in self._why_float), "")
        if (layer := self._layer_of(node)) is not None:
            return self._layer_rule(node, layer)
        rule, module = self._operation_rule(node), self._module(node)
        if rule is None:
            return ""
        if rule in (self._add, self._relu) and not any(source in self._int8_of for source in _inputs(node)):
            return ""  # of inputs in floating point, whose codes would have a larger step than those of the result
        return rule if module is None else why_overridden(module) or rule

    def _layer_rule(self, node: fx.Node, layer: Layer) -> _Rule | str:
        name = str(node.target)
        weight = _READ if name in self._read_modules else self._weights(name, layer)
        if isinstance(weight, str):
            self._float_layers.append(name)
            return weight
        if isinstance(layer, nn.Linear) and self._is_head(node):
            return functools.partial(self._head, layer=layer, weight=weight)
        return functools.partial(self._layer, layer=layer, weight=weight)

    def _layer_of(self, node: fx.Node) -> Layer | None:
        """Return the layer that a node calls, if layers of its kind can compute on codes."""
        module = self._module(node)
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d | nn.Conv2d) and module.padding_mode == "zeros"):
            return module
        return None

    def _operation_rule(self, node: fx.Node) -> _Rule | None:
        """Return the rule for the operation of a node that is no layer, whatever its inputs are; None if there is none."""
        module = self._module(node)
        if calls(node, ADDS) and len(_inputs(node)) == 2 and not node.kwargs:
            return self._add
        if isinstance(module, nn.ReLU | nn.ReLU6) or calls(node, RELUS):
            return self._relu
        if isinstance(module, nn.Flatten) or calls(node, _SHAPES):
            views_as_dtype = any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values()))
            return None if views_as_dtype else self._reshape
        if isinstance(module, nn.MaxPool1d | nn.MaxPool2d):
            return self._max_pool
        if isinstance(module, nn.ZeroPad2d) and min(module.padding) >= 0 and all(self._is_integer_conv(user) for user in node.users):
            return self._zero_pad
        if isinstance(module, _AVERAGE_POOLS):
            return self._average_pool
        if calls(node, (torch.cat,)) and not isinstance(node.args[0], fx.Node):
            return self._concatenate
        if isinstance(module, nn.Upsample) and module.mode in ("nearest", "nearest-exact"):
            return self._upsample
        if calls(node, (nn.functional.interpolate,)) and node.kwargs.get("mode") in ("nearest", "nearest-exact"):
            return self._upsample
        return None

    def _module(self, node: fx.Node) -> nn.Module | None:
        return module_of(node, self._modules)

    def _is_relu(self, node: fx.Node) -> bool:
        """Whether a node computes ReLU or ReLU6 as torch does."""
        module = self._module(node)
        return calls(node, RELUS) or (isinstance(module, nn.ReLU | nn.ReLU6) and why_overridden(module) is None)

    def _relu_clamp(self, node: fx.Node, scale: Scale) -> tuple[int, int]:
        """Return the codes between which a ReLU or ReLU6 clamps."""
        return scale.code(0), scale.code(6) if isinstance(self._module(node), nn.ReLU6) else MOST

    def _is_head(self, node: fx.Node) -> bool:
        """Whether a node is a linear layer whose result nothing on codes reads: logits that differ by less than a step of codes matter."""
        readers = [user for user in node.users if user.op != "output"]
        return all(self._layer_of(reader) is None and self._operation_rule(reader) is None for reader in readers)

    def _is_integer_conv(self, node: fx.Node) -> bool:
        """Whether a node becomes a convolution on codes, which pads with zeros by itself."""
        layer = self._layer_of(node)
        return (
            isinstance(layer, nn.Conv2d)
            and {node.name, first_input(node).name} <= self._scales.keys()
            and why_overridden(layer) is None
            and str(node.target) not in self._read_modules
            and not isinstance(self._weights(str(node.target), layer), str)
        )

    def _output(self, node: fx.Node) -> _Output:
        """Return what a layer or an addition writes: the result of the ReLU behind it where nothing else reads its own."""
        users = list(node.users)
        if len(users) == 1 and users[0].name in self._scales and self._is_relu(users[0]):
            scale = self._scales[users[0].name]
            return _Output(scale, self._relu_clamp(users[0], scale), (node, users[0]))
        return _Output(self._scales[node.name], (LEAST, MOST), (node,))

    def _set_output(self, output: _Output, codes: fx.Node) -> None:
        for node in output.results:
            self._int8_of[node] = _Int8(codes, output.scale)

    # The rules

    def _head(self, node: fx.Node, *, layer: nn.Linear, weight: LayerWeight) -> None:
        assert isinstance(weight.packed, Packed)
        linear = QuantLinear(weight.packed, weight.bias, "float", dtype=layer.weight.dtype, error=weight.error)
        self._float_of[node] = self._call(node, linear, self._float(first_input(node)))

    def _layer(self, node: fx.Node, *, layer: Layer, weight: LayerWeight) -> None:
        x, output = self._int8(first_input(node)), self._output(node)
        window = None if isinstance(layer, nn.Linear) else conv.module_window(layer)
        if window is not None and (padding := self._padding_of.get(first_input(node))) is not None:
            top, bottom, left, right = (of_layer + before for of_layer, before in zip(window.padding, padding, strict=True))
            window = replace(window, padding=(top, bottom, left, right))
        integer_class = IntegerLinear if isinstance(layer, nn.Linear) else IntegerConv1d if isinstance(layer, nn.Conv1d) else IntegerConv2d
        integer_layer = integer_class(
            weight.packed, weight.bias, x.scale, output.scale, output.clamp, window, dtype=layer.weight.dtype, error=weight.error
        )
        self._set_output(output, self._call(node, integer_layer, x.node))

    def _add(self, node: fx.Node) -> None:
        a, b = (self._int8(source) for source in _inputs(node))
        output = self._output(node)
        self._set_output(output, self._call(node, Requantize((a.scale, b.scale), output.scale, output.clamp), a.node, b.node))

    def _relu(self, node: fx.Node) -> None:
        x = self._int8(first_input(node))
        self._int8_of[node] = x._replace(node=self._graph.call_function(clamp_codes, (x.node, *self._relu_clamp(node, x.scale))))

    def _reshape(self, node: fx.Node) -> None:
        x, module = self._int8(first_input(node)), self._module(node)
        if module is not None:
            reshaped = self._call(node, module, x.node)
        else:
            args, kwargs = self._other_arguments(node)
            reshaped = self._graph.create_node(node.op, node.target, (x.node, *args), kwargs)
        self._int8_of[node] = x._replace(node=reshaped)

    def _upsample(self, node: fx.Node) -> None:
        x, module = self._int8(first_input(node)), self._module(node)
        args, kwargs = self._other_arguments(node)
        if module is not None:
            kwargs = {name: getattr(module, name) for name in _UPSAMPLE_SETTINGS}
        self._int8_of[node] = x._replace(node=self._graph.call_function(nearest, (x.node, *args), kwargs))

    def _other_arguments(self, node: fx.Node) -> tuple[tuple[fx.node.Argument, ...], dict[str, fx.node.Argument]]:
        """Return a node's arguments behind the first one, for a node of the new graph: sizes may be computed by the network, too."""
        args, kwargs = fx.node.map_arg((node.args[1:], dict(node.kwargs)), self._float)
        return args, kwargs

    def _max_pool(self, node: fx.Node) -> None:
        x, module = self._int8(first_input(node)), self._module(node)
        assert isinstance(module, nn.MaxPool1d | nn.MaxPool2d)
        self._int8_of[node] = x._replace(node=self._call(node, MaxPool(module), x.node))

    def _average_pool(self, node: fx.Node) -> None:
        x, module = self._int8(first_input(node)), self._module(node)
        assert module is not None
        # Means lie in the range of what they are of; sums by another divisor do not.
        scale = x.scale if getattr(module, "divisor_override", None) is None else self._scales[node.name]
        self._int8_of[node] = _Int8(self._call(node, AveragePool(module, x.scale, scale), x.node), scale)

    def _zero_pad(self, node: fx.Node) -> None:
        """Leave the padding to the convolutions that read it."""
        module = self._module(node)
        assert isinstance(module, nn.ZeroPad2d)
        left, right, top, bottom = module.padding
        self._padding_of[node] = top, bottom, left, right
        self._int8_of[node] = self._int8(first_input(node))

    def _concatenate(self, node: fx.Node) -> None:
        scale, tensors = self._scales[node.name], []
        for i, source in enumerate(_inputs(node)):
            x = self._int8(source)
            rescaled = Requantize((x.scale,), scale)
            tensors.append(x.node if x.scale == scale else self._call(node, rescaled, x.node, name=f"{node.name}_{i}"))
        self._int8_of[node] = _Int8(self._graph.call_function(torch.cat, (tensors, *node.args[1:]), dict(node.kwargs)), scale)


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose tensors a node computes with: the first argument, both of an addition, all of a concatenation."""
    operands: object = node.args[:1]
    if calls(node, ADDS):
        operands = node.args
    elif calls(node, (torch.cat,)) and node.args:
        operands = node.args[0]
    return [operand for operand in operands if isinstance(operand, fx.Node)] if isinstance(operands, tuple | list) else []
