"""`quantize_static`: a convolutional network that computes on int8 codes from its first layer to its last.

The network is traced (torch.fx), its batch norms are folded, and calibration images show the range of each result. Then convolutions
and linear layers take and give codes, with their ReLU in the clamp; additions, pools and concatenations work on codes; and what else
there is runs in floating point, between a Dequantize and a Quantize. (Jacob et al., Quantization and training of neural networks for
efficient integer-arithmetic-only inference, CVPR 2018.)
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.kernels.problem import Window
from halfbyte.nn.batchnorm import fold_batch_norms_
from halfbyte.nn.integer import MOST, AveragePool, Dequantize, IntegerConv2d, IntegerLinear, Quantize, Requantize, Scale
from halfbyte.ops import conv

Observer = Literal["minmax", "percentile", "mse"]
_PERCENTILE = 0.9999
_SAMPLES = 1 << 16  # of a result, from one batch, that percentiles and squared errors are made of

_SAME = (nn.Dropout, nn.Dropout2d, nn.Identity)  # in evaluation
_SHAPES = (torch.flatten, torch.reshape, "flatten", "view", "reshape", "permute", "contiguous", "squeeze", "unsqueeze")
_MAX_POOLS = (nn.functional.max_pool2d, torch.max_pool2d)
_ADDS = (operator.add, operator.iadd, torch.add)
_RELUS = (torch.relu, nn.functional.relu, "relu", "relu_")


def quantize_static(
    model: nn.Module, images: Iterable[Tensor], *, observer: Observer = "minmax", percentile: float = _PERCENTILE
) -> fx.GraphModule:
    """A copy of `model`, in evaluation, that computes on int8 codes.

    images      batches that show what the network meets; one hundred images or so
    observer    how a result's range is chosen: "minmax"; "percentile": without the outermost values; "mse": the one with the least
                squared error of the codes
    percentile  the part of values inside the range, for "percentile"

    The result's `notes` name what stayed in floating point. Raises UnsupportedError for a model that torch.fx cannot trace,
    ArgumentError without images.
    """
    if observer not in ("minmax", "percentile", "mse"):
        raise ArgumentError(f"observer is one of minmax, percentile, mse, got {observer!r}")
    model = copy.deepcopy(model).eval()
    fold_batch_norms_(model)
    traced = fx.symbolic_trace(model)
    modules = dict(traced.named_modules())
    for node in traced.graph.nodes:
        if node.op == "call_module" and isinstance(modules[str(node.target)], _SAME):
            node.replace_all_uses_with(_first(node))
            traced.graph.erase_node(node)
    traced.recompile()
    watcher = _Watcher(traced, observer, percentile)
    with torch.no_grad():
        for batch in images:
            watcher.run(batch)
    if not watcher.seen:
        raise ArgumentError("there are no calibration images: pass at least one batch")
    return _Rewriter(traced, watcher.scales()).result()


class _Watcher(fx.Interpreter):
    """Runs the network and remembers, of each tensor, what its range is chosen from."""

    def __init__(self, traced: fx.GraphModule, observer: Observer, percentile: float) -> None:
        super().__init__(traced)
        self.observer, self.percentile = observer, percentile
        self.seen: dict[str, tuple[float, float]] = {}
        self.samples: dict[str, list[Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and n.op != "output":
            low, high = (float(end) for end in torch.aminmax(value))
            before = self.seen.get(n.name, (low, high))
            self.seen[n.name] = min(low, before[0]), max(high, before[1])
            if self.observer != "minmax":
                flat = value.detach().flatten().float()
                self.samples.setdefault(n.name, []).append(flat[:: max(1, flat.numel() // _SAMPLES)].clone())
        return value

    def scales(self) -> dict[str, Scale]:
        return {name: self._scale(name) for name in self.seen}

    def _scale(self, name: str) -> Scale:
        low, high = self.seen[name]
        if self.observer == "minmax":
            return Scale.of_range(low, high)
        samples = torch.cat(self.samples[name])
        if self.observer == "percentile":
            tail = (1 - self.percentile) / 2
            ordered = samples.sort().values
            last = len(ordered) - 1
            return Scale.of_range(float(ordered[round(tail * last)]), float(ordered[round((1 - tail) * last)]))
        choices = [Scale.of_range(low * part, high * part) for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)]
        return min(choices, key=lambda scale: _squared_error(samples, scale))


def _squared_error(x: Tensor, scale: Scale) -> float:
    codes = (x / scale.step + scale.zero).round().clamp(-128, MOST)
    return float(((codes - scale.zero) * scale.step - x).square().sum())


class _Rewriter:
    """Makes the graph on codes, node by node."""

    def __init__(self, traced: fx.GraphModule, scales: dict[str, Scale]) -> None:
        self.traced, self.scales = traced, scales
        self.modules = dict(traced.named_modules())
        self.graph = fx.Graph()
        self.root = nn.ModuleDict()
        self.float_of: dict[fx.Node, fx.Node] = {}
        self.codes_of: dict[fx.Node, tuple[fx.Node, Scale]] = {}
        self.notes: list[str] = []

    def result(self) -> fx.GraphModule:
        for node in self.traced.graph.nodes:
            self._node(node)
        made = fx.GraphModule(self.root, self.graph)
        made.notes = tuple(self.notes)  # type: ignore[assignment]
        return made.eval()

    # Either form of a node's result, made where it is first needed

    def _codes(self, node: fx.Node) -> tuple[fx.Node, Scale]:
        if node not in self.codes_of:
            scale = self.scales[node.name]
            self.codes_of[node] = self._call(f"{node.name}_quantize", Quantize(scale), self.float_of[node]), scale
        return self.codes_of[node]

    def _floats(self, node: fx.Node) -> fx.Node:
        if node not in self.float_of:
            codes, scale = self.codes_of[node]
            self.float_of[node] = self._call(f"{node.name}_dequantize", Dequantize(scale, torch.float32), codes)
        return self.float_of[node]

    def _call(self, name: str, module: nn.Module, *inputs: fx.Node) -> fx.Node:
        self.root[name] = module
        return self.graph.call_module(name, inputs)

    # One node

    def _node(self, node: fx.Node) -> None:
        if node in self.codes_of:  # an activation that went into the layer before it
            return
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        make = self._maker(node, module)
        if make is not None and node.name in self.scales:
            made, scale, covers = make(node, module)
            for covered in (node, *covers):
                self.codes_of[covered] = made, scale
            return
        if node.op not in ("placeholder", "output", "get_attr"):
            what = type(module).__name__ if module is not None else getattr(node.target, "__name__", node.target)
            self.notes.append(f"{node.name} ({what}) runs in floating point")
        if module is not None:
            self.root[node.name] = module
            inputs = [self._floats(a) if isinstance(a, fx.Node) else a for a in node.args]
            self.float_of[node] = self.graph.call_module(node.name, tuple(inputs), dict(node.kwargs))
        elif node.op == "get_attr":
            self.root.register_buffer(node.name, operator.attrgetter(str(node.target))(self.traced))
            self.float_of[node] = self.graph.get_attr(node.name)
        else:
            self.float_of[node] = self.graph.node_copy(node, self._floats)

    def _maker(self, node: fx.Node, module: nn.Module | None) -> Callable[..., tuple[fx.Node, Scale, list[fx.Node]]] | None:
        """What makes a node on codes; None where there is no such thing."""
        target = node.target
        if isinstance(module, nn.Conv2d) and module.padding_mode == "zeros":
            return self._convolution
        if isinstance(module, nn.Linear):
            return self._linear
        if target in _ADDS and all(isinstance(a, fx.Node) for a in node.args) and len(node.args) == 2 and not node.kwargs:
            shapes = {self.scales.keys() >= {a.name} for a in node.args if isinstance(a, fx.Node)}
            return self._add if shapes == {True} else None
        if isinstance(module, nn.ReLU | nn.ReLU6) or target in _RELUS:
            return self._relu
        if isinstance(module, nn.Flatten) or target in _SHAPES:
            return self._as_it_is
        if isinstance(module, nn.MaxPool2d) or target in _MAX_POOLS:
            return self._largest
        if isinstance(module, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            return self._average
        if target is torch.cat:
            return self._concatenation
        return None

    def _activation(self, node: fx.Node) -> tuple[Scale, tuple[int, int], list[fx.Node]]:
        """The scale and the clamp of a layer's result, with the ReLU behind it where nobody else reads the result."""
        users = list(node.users)
        if len(users) == 1 and users[0].name in self.scales:
            module = self.modules.get(str(users[0].target)) if users[0].op == "call_module" else None
            if isinstance(module, nn.ReLU | nn.ReLU6) or users[0].target in _RELUS:
                scale = self.scales[users[0].name]
                return scale, (scale.code(0), scale.code(6) if isinstance(module, nn.ReLU6) else MOST), users
        return self.scales[node.name], (-128, MOST), []

    def _convolution(self, node: fx.Node, layer: nn.Conv2d) -> tuple[fx.Node, Scale, list[fx.Node]]:
        (x, source), (result, clamp, covers) = self._codes(_first(node)), self._activation(node)
        kernel = layer.kernel_size[0], layer.kernel_size[1]
        packed = conv.pack_conv(conv.quantize_conv(layer.weight, "int8_channel", name=f"{node.target}.weight"), kernel, layer.groups)
        moves = Window.from_numbers(conv.written_moves(kernel, layer.stride, layer.padding, layer.dilation))
        return self._call(node.name, IntegerConv2d(packed, _detached(layer.bias), moves, source, result, clamp), x), result, covers

    def _linear(self, node: fx.Node, layer: nn.Linear) -> tuple[fx.Node, Scale, list[fx.Node]]:
        (x, source), (result, clamp, covers) = self._codes(_first(node)), self._activation(node)
        packed = ops.pack(ops.quantize(layer.weight, "int8_channel", name=f"{node.target}.weight"))
        return self._call(node.name, IntegerLinear(packed, _detached(layer.bias), source, result, clamp), x), result, covers

    def _add(self, node: fx.Node, _: None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        (a, scale_a), (b, scale_b) = (self._codes(n) for n in node.args if isinstance(n, fx.Node))
        result, clamp, covers = self._activation(node)
        return self._call(node.name, Requantize((scale_a, scale_b), result, clamp), a, b), result, covers

    def _relu(self, node: fx.Node, module: nn.Module | None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        x, scale = self._codes(_first(node))
        high = scale.code(6) if isinstance(module, nn.ReLU6) else MOST
        return self.graph.call_function(torch.clamp, (x, scale.code(0), high)), scale, []

    def _as_it_is(self, node: fx.Node, module: nn.Module | None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        """What only moves codes."""
        x, scale = self._codes(_first(node))
        if module is not None:
            return self._call(node.name, module, x), scale, []
        return self.graph.create_node(node.op, node.target, (x, *node.args[1:]), dict(node.kwargs)), scale, []

    def _largest(self, node: fx.Node, module: nn.Module | None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        """A pool of largest codes: in bfloat16, which holds them all, since torch's own of int8 fails for large images."""
        x, scale = self._codes(_first(node))
        x = self.graph.call_method("to", (x, torch.bfloat16))
        x = (
            self._call(node.name, module, x)
            if module is not None
            else self.graph.create_node(node.op, node.target, (x, *node.args[1:]), dict(node.kwargs))
        )
        return self.graph.call_method("to", (x, torch.int8)), scale, []

    def _average(self, node: fx.Node, pool: nn.Module) -> tuple[fx.Node, Scale, list[fx.Node]]:
        x, scale = self._codes(_first(node))
        return self._call(node.name, AveragePool(pool, scale), x), scale, []

    def _concatenation(self, node: fx.Node, _: None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        result, parts = self.scales[node.name], []
        for i, source in enumerate(node.args[0]):  # type: ignore[arg-type]
            x, scale = self._codes(source)
            parts.append(x if scale == result else self._call(f"{node.name}_{i}", Requantize((scale,), result), x))
        return self.graph.call_function(torch.cat, (parts, *node.args[1:]), dict(node.kwargs)), result, []


def _first(node: fx.Node) -> fx.Node:
    assert isinstance(node.args[0], fx.Node)
    return node.args[0]


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()
