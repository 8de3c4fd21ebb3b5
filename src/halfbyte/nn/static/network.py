"""The module of a network on int8 codes: `IntegerNetwork`, a graph of modules of integer.py and others.

Its forward runs one of three graphs: on a CPU, for images of sizes that it has seen before, the one with native programs; on a GPU the one
in which convolutions compute the additions behind them (both: programs.py); and its own, node by node, for gradients, hooks, torch.compile,
and the first images of a size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx
from torch.fx.graph import PythonCode

from halfbyte.bounded import by_object
from halfbyte.errors import ArgumentError
from halfbyte.nn.modules.subclassed import with_signature
from halfbyte.nn.static.integer import IntegerModule
from halfbyte.nn.static.programs import OtherSizesError, with_fused_additions, with_programs
from halfbyte.nn.static.tracing import TracedModules
from halfbyte.ops.modes import plain
from halfbyte.quantizers.check import check_dense

_MAX_SIZES = 16  # of images whose programs are cached: each has memory of its own


class IntegerNetwork(fx.GraphModule):
    """A network on int8 codes, which rewriter.py makes.

    Attributes:
        node_by_node: The forward that torch.fx generates of the graph.
        defaults: By each input's name its default in a tuple, which is empty where it has none. torch.compile can read it, and no graph.
    """

    defaults: ClassVar[dict[str, tuple[object, ...]]]

    def recompile(self) -> PythonCode:
        code = super().recompile()
        cls: Any = type(self)  # each GraphModule is the only one of its class
        cls.node_by_node, cls.forward = cls.forward, with_signature(cast("FunctionType", _forward), cls.forward)
        cls.defaults = {str(node.target): node.args for node in self.graph.nodes if node.op == "placeholder"}
        return code

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (*super().__reduce__(), self.meta)  # torch leaves `meta` out


def _unpickled(make: Callable[..., fx.GraphModule], arguments: tuple[object, ...], meta: dict[str, object]) -> IntegerNetwork:
    graph_module = make(*arguments)
    network = IntegerNetwork(graph_module, graph_module.graph, type(graph_module).__name__)
    network.meta = meta
    return network.eval()


def _forward(self: Any, *args: Any, **kwargs: object) -> object:
    """The forward of each IntegerNetwork."""
    if len(args) != 1 or kwargs:
        args, kwargs = _without_defaults(self, args, kwargs)
    if len(args) == 1 and not kwargs and not torch.compiler.is_compiling() and plain(x := args[0]):
        check_dense(x, "the input of a network on int8 codes")
        graph = _graphs_of_thread(self).graph_for(self, x)
        if graph is not None:
            with suppress(OtherSizesError):
                return graph(x)
    return self.node_by_node(*args, **kwargs)


def _without_defaults(
    network: IntegerNetwork, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return the arguments of a call without those that pass the default of an optional input, with which the network was traced.

    Raises:
        ArgumentError: An optional input is passed another value.
    """
    defaults = network.defaults
    if len(args) > len(defaults) or kwargs.keys() - defaults.keys():
        return args, kwargs  # Python's error says what is wrong
    required: dict[str, object] = {}
    for name, value in (dict(zip(defaults, args, strict=False)) | kwargs).items():
        default = defaults[name]
        if not default:
            required[name] = value
        elif value is not default[0] and (isinstance(value, Tensor) or type(value) is not type(default[0]) or value != default[0]):
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise ArgumentError(
                f"the network on int8 codes was made for {name}={default[0]!r}, its default, got {got}: pass the images alone, or quantize "
                f"a module that calls the model with {name}"
            )
    return (tuple(required.values()), {}) if len(required) == 1 else (args, kwargs)


class _Graphs:
    """The faster graphs of a network, for one Python thread. They do not keep the network alive.

    Attributes:
        traced: The modules of the network as they were when this object was made: it is stale once they change.
    """

    def __init__(self, network: fx.GraphModule) -> None:
        self.traced = TracedModules.of(network)
        self._layers = [module for module in network.modules() if isinstance(module, IntegerModule)]
        self._parameters = list(network.parameters())
        self._weights = self._weight_versions()
        # Keys: shape, strides and dtype of the images and the number of threads; None: such images came once.
        self._by_size: dict[tuple[object, ...], fx.GraphModule | None] = {}
        self._on_gpu: fx.GraphModule | None = None

    def graph_for(self, network: fx.GraphModule, x: Tensor) -> Callable[[Tensor], object] | None:
        """Return the graph for images `x`; None: go node by node, as for hooks and gradients to `x` or to a parameter."""
        if any(self.traced.hooks):
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(parameter.requires_grad for parameter in self._parameters)):
            return None
        if x.is_cpu:
            return self._with_programs(network, x)
        if self._on_gpu is None:
            self._on_gpu = with_fused_additions(network)
        return self._on_gpu

    def _with_programs(self, network: fx.GraphModule, x: Tensor) -> fx.GraphModule | None:
        """Return the graph with programs for the sizes of `x`, compiled when images of a size come for the second time."""
        from halfbyte.kernels.cpu.codegen import runtime

        if self._weights != (weights := self._weight_versions()):
            self._weights = weights
            self._by_size.clear()
        key = x.shape, x.stride(), x.dtype, runtime.threads()
        if (graph := self._by_size.get(key)) is not None:
            return graph
        came_before = key in self._by_size
        if len(self._by_size) >= _MAX_SIZES:
            self._by_size.clear()
        self._by_size[key] = with_programs(network, x) if came_before else None
        return self._by_size[key]

    def _weight_versions(self) -> tuple[list[int], list[int]]:
        """Return a value that changes with the weights and biases, whose requantization tables are recomputed first if they are stale."""
        for layer in self._layers:
            layer.current_table()
        return [layer.packed.data.data_ptr() for layer in self._layers], [layer.updates for layer in self._layers]


class _ThreadGraphs(threading.local):
    """The graphs of a network in this Python thread: results of programs lie in memory of their own, which threads must not share."""

    graphs: _Graphs | None = None


@by_object()
def _thread_graphs_of(network: IntegerNetwork) -> _ThreadGraphs:
    return _ThreadGraphs()


def _graphs_of_thread(network: IntegerNetwork) -> _Graphs:
    """Return the graphs of `network` for this thread, new ones after its modules changed."""
    thread = _thread_graphs_of(network)
    if thread.graphs is None or not thread.graphs.traced.unchanged():
        thread.graphs = _Graphs(network)
    return thread.graphs
