"""Memory formats within a traced network: convolutions hand images on in channels_last, as their kernels read and write them, and what
leaves them has the memory format that torch gives it, as if each convolution had kept that of its input.

Called by `fused_convolutions.py` and `codes.py` on graphs whose convolutions give channels_last whatever they take.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from halfbyte.nn.static.tracing import IDENTITIES_IN_EVAL, IN_PLACE, module_of
from halfbyte.ops.conv.images import in_memory_format_of

# Operations whose numbers do not depend on the memory format of images, and whose results have it.
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
_WRITES = {*IN_PLACE, operator.setitem}

Kind = Callable[[fx.Node], bool]


def _none(node: fx.Node) -> bool:
    return False


class Formats:
    """Which results of a graph are in channels_last though torch's may not be.

    gives   whether a node gives channels_last whatever it takes
    passes  whether a node is of an operation, besides those listed here, that acts on elements alone
    reads_any   whether a node, besides these, computes the same whatever memory format its inputs have
    """

    def __init__(
        self, graph: fx.Graph, modules: Mapping[str, nn.Module], gives: Kind, passes: Kind = _none, reads_any: Kind = _none
    ) -> None:
        self.graph, self.modules, self.gives, self._passes, self._reads_any = graph, modules, gives, passes, reads_any
        self.free: set[fx.Node] = set()
        for node in graph.nodes:
            if gives(node) or (self.passes(node) and not self.free.isdisjoint(node.all_input_nodes)):
                self.free.add(node)

    def passes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.modules[str(node.target)], _MODULES) or self._passes(node)
        listed = node.target in _FUNCTIONS if node.op == "call_function" else node.op == "call_method" and node.target in _METHODS
        return listed or self._passes(node)

    def reads_any(self, node: fx.Node) -> bool:
        """Whether a node computes the same whatever memory format its inputs have."""
        sizes = (node.op == "call_method" and node.target in _SIZES) or (node.target is getattr and node.args[1] == "shape")
        return sizes or self.gives(node) or self.passes(node) or self._reads_any(node)

    def channels_last_count(self) -> int:
        """How many convolutions take what another one left in channels_last."""
        return sum(self.gives(node) and not self.free.isdisjoint(node.all_input_nodes) for node in self.graph.nodes)

    def writes_shared(self) -> bool:
        """Whether a node may write to memory that another node reads too, which a copy in another memory format would not show."""
        return any(
            self._writes(node) and not self._has_one_reader(node.all_input_nodes[0]) for node in self.graph.nodes if node.all_input_nodes
        )

    def _writes(self, node: fx.Node) -> bool:
        if node.op == "call_method":
            return str(node.target).endswith("_")
        in_place = node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None or node.target in _WRITES
        return in_place or getattr(module_of(node, self.modules), "inplace", False) is True

    def _has_one_reader(self, node: fx.Node) -> bool:
        """Whether the memory of a node's result is read by one other node alone."""
        while len(node.users) == 1 and (self._is_view(node) or self._writes(node)) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return len(node.users) == 1 and not self._is_view(node) and (self.gives(node) or self.passes(node))

    def _is_view(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.modules[str(node.target)], _VIEW_MODULES)
        return node.target in _VIEWS

    def restore(self) -> None:
        """Gives what leaves the convolutions the memory format of torch."""
        for node in list(self.graph.nodes):
            readers = sorted(user for user in node.users if not self.reads_any(user))
            if node in self.free and readers:
                with self.graph.inserting_before(readers[0]):  # as late as can be: until then all is one program (`network.py`)
                    restored = self.graph.call_function(restore, (node, self._origin(node)))
                for reader in readers:
                    reader.replace_input_with(node, restored)

    def _origin(self, node: fx.Node) -> fx.Node | None:
        """The tensor whose memory format a result has in torch; None where it is contiguous."""
        while self.gives(node) or self.passes(node):
            inputs = node.all_input_nodes
            if not inputs:
                break
            if self._is_of_lines(node):
                return None
            node = next((n for n in inputs if n in self.free), inputs[0])
        return node

    def _is_of_lines(self, node: fx.Node) -> bool:
        return self.gives(node) and getattr(module_of(node, self.modules), "kind", "").endswith("1d")


def restore(value: object, origin: Tensor) -> object:
    """A result, or a tuple of some, in the memory format that torch gives the results of convolutions of `origin`."""
    if isinstance(value, tuple | list):
        return type(value)(restore(item, origin) for item in value)
    return in_memory_format_of(value, origin) if isinstance(value, torch.Tensor) else value
