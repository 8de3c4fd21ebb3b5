"""Memory formats of images in a traced network.

Kernels of convolutions write channels_last, whatever they read, while torch's keep the format of their input. So a graph hands images on
in channels_last from one convolution to the next, and `MemoryFormats.restore` inserts conversions where an image leaves them for an
operation that could tell the difference. Called by nn/fused_convolutions.py and rewriter.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from halfbyte.nn.static.tracing import IDENTITIES_IN_EVAL, calls, module_of, writes_first_input
from halfbyte.ops.conv.images import in_memory_format_of

# Operations whose numbers do not depend on the memory format of images, and whose results keep it.
_MODULES = (
    nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.SiLU, nn.GELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Mish,
    nn.Softplus, nn.BatchNorm1d, nn.BatchNorm2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.Upsample, nn.Flatten, *IDENTITIES_IN_EVAL,
)  # fmt: skip
_FUNCTIONS = {
    operator.add, operator.iadd, operator.sub, operator.mul, operator.truediv, operator.getitem, torch.add, torch.sub, torch.mul, torch.div,
    torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.clamp, torch.cat, torch.chunk, torch.split, torch.flatten, torch.reshape,
    F.relu, F.relu6, F.hardtanh, F.silu, F.gelu, F.hardswish, F.hardsigmoid, F.sigmoid, F.tanh, F.elu, F.leaky_relu, F.mish, F.softplus,
    F.dropout, F.interpolate, F.avg_pool1d, F.avg_pool2d, F.max_pool1d, F.max_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
}  # fmt: skip
_METHODS = {"relu", "relu_", "sigmoid", "tanh", "clamp", "add", "sub", "mul", "div", "chunk", "split", "flatten", "reshape"}
_SIZES = {"size", "dim"}  # methods that read no elements
_VIEWS = {operator.getitem, torch.chunk, torch.split, torch.flatten, torch.reshape, "chunk", "split", "flatten", "reshape"}
_VIEW_MODULES = (nn.Flatten, *IDENTITIES_IN_EVAL)
Test = Callable[[fx.Node], bool]


def _never(node: fx.Node) -> bool:
    return False


class MemoryFormats:
    """Which results of a graph are in channels_last though torch's may not be.

    Args:
        graph: Of the network.
        modules: The network's modules by name.
        writes_channels_last: Whether a node's result is in channels_last whatever it reads.
        keeps_format: Whether a node, besides the operations listed in this file, computes the same in each memory format, and keeps it.
        ignores_format: Whether a node, besides these, computes the same in each memory format.
    """

    def __init__(
        self,
        graph: fx.Graph,
        modules: Mapping[str, nn.Module],
        writes_channels_last: Test,
        keeps_format: Test = _never,
        ignores_format: Test = _never,
    ) -> None:
        self._graph, self._modules, self._writes_channels_last = graph, modules, writes_channels_last
        self._also_keeps, self._also_ignores = keeps_format, ignores_format
        self._channels_last: set[fx.Node] = set()
        for node in graph.nodes:
            if writes_channels_last(node) or (self._keeps_format(node) and self._reads_channels_last(node)):
                self._channels_last.add(node)

    def channels_last_count(self) -> int:
        """Return how many convolutions read what another one left in channels_last."""
        return sum(self._writes_channels_last(node) and self._reads_channels_last(node) for node in self._graph.nodes)

    def writes_shared(self) -> bool:
        """Whether a node may write to memory that another node reads too, which a copy in another memory format would not show."""
        nodes = [node for node in self._graph.nodes if node.all_input_nodes]
        return any(self._writes_input(node) and not self._has_one_reader(node.all_input_nodes[0]) for node in nodes)

    def restore(self) -> None:
        """Insert conversions to torch's memory format in front of the nodes that are not indifferent to it."""
        for node in list(self._graph.nodes):
            readers = sorted(user for user in node.users if not self._ignores_format(user))
            if node in self._channels_last and readers:
                with self._graph.inserting_before(readers[0]):  # as late as can be: until then all is one program (programs.py)
                    restored = self._graph.call_function(restore, (node, self._origin(node)))
                for reader in readers:
                    reader.replace_input_with(node, restored)

    def _reads_channels_last(self, node: fx.Node) -> bool:
        return not self._channels_last.isdisjoint(node.all_input_nodes)

    def _keeps_format(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._modules[str(node.target)], _MODULES) or self._also_keeps(node)
        return calls(node, _FUNCTIONS) or calls(node, _METHODS) or self._also_keeps(node)

    def _ignores_format(self, node: fx.Node) -> bool:
        reads_size = calls(node, _SIZES) or (node.target is getattr and node.args[1] == "shape")
        return reads_size or self._writes_channels_last(node) or self._keeps_format(node) or self._also_ignores(node)

    def _writes_input(self, node: fx.Node) -> bool:
        """Whether a node writes to memory of an input: in place, by `out=`, or an element (`x[i] = y`)."""
        return writes_first_input(node, self._modules) or node.kwargs.get("out") is not None or node.target is operator.setitem

    def _has_one_reader(self, node: fx.Node) -> bool:
        """Whether the memory of a node's result is read by one other node alone."""
        while len(node.users) == 1 and (self._is_view(node) or self._writes_input(node)) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return len(node.users) == 1 and not self._is_view(node) and (self._writes_channels_last(node) or self._keeps_format(node))

    def _is_view(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._modules[str(node.target)], _VIEW_MODULES)
        return calls(node, _VIEWS)

    def _origin(self, node: fx.Node) -> fx.Node | None:
        """Return the tensor whose memory format a result has in torch; None where it is contiguous."""
        while self._writes_channels_last(node) or self._keeps_format(node):
            inputs = node.all_input_nodes
            if not inputs:
                break
            if self._is_conv1d(node):  # [B, C, L] is contiguous in torch
                return None
            node = next((n for n in inputs if n in self._channels_last), inputs[0])
        return node

    def _is_conv1d(self, node: fx.Node) -> bool:
        return self._writes_channels_last(node) and getattr(module_of(node, self._modules), "kind", "").endswith("1d")


def restore(value: object, origin: Tensor) -> object:
    """Return a result, or a tuple of some, in the memory format that torch gives the results of convolutions of `origin`."""
    if isinstance(value, tuple | list):
        return type(value)(restore(item, origin) for item in value)
    return in_memory_format_of(value, origin) if isinstance(value, torch.Tensor) else value
