"""Networks on int8 codes as one module, which on a CPU computes images of sizes that it has seen before in one call.

What modules do to tensors of known sizes are steps (`kernels/cpu/steps.py`): those that follow each other become a program, which Python
starts once, and whose results lie in memory of its own. What is no step runs between the programs as it did. Gradients, hooks,
torch.compile and other devices go node by node.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode

from halfbyte.bounded import by_object
from halfbyte.errors import ArgumentError
from halfbyte.kernels.problem import Addition
from halfbyte.nn.static.integer import IntegerConv2d, IntegerModule, Requantize
from halfbyte.nn.static.tracing import TracedModules, copy_node, module_of
from halfbyte.ops.modes import plain
from halfbyte.quantizers.check import check_dense

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.steps import ProgramStep

_SIZES = 16  # of images whose programs are kept: each has memory of its own


class IntegerNetwork(fx.GraphModule):
    """A graph whose nodes are modules of `integer.py`, and others."""

    def recompile(self) -> PythonCode:
        code = super().recompile()
        cls: Any = type(self)  # each GraphModule is the only one of its class
        cls.node_by_node, cls.forward = cls.forward, _forward
        return code

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (*super().__reduce__(), self.meta)  # which torch leaves out


def _unpickled(make: Callable[..., fx.GraphModule], arguments: tuple[object, ...], meta: dict[str, object]) -> IntegerNetwork:
    plain = make(*arguments)
    network = IntegerNetwork(plain, plain.graph, type(plain).__name__)
    network.meta = meta
    return network.eval()


def _forward(self: Any, *inputs: Any, **more: object) -> object:
    if len(inputs) != 1 or more:
        inputs, more = _without_defaults(self, inputs, more)
    if len(inputs) == 1 and not more and not torch.compiler.is_compiling() and plain(x := inputs[0]):
        check_dense(x, "the input of a network on int8 codes")
        thread = _thread_programs_of(self)
        if thread.programs is None or not thread.programs.inner.unchanged():
            thread.programs = _Programs(self)
        programs = thread.programs
        if not any(programs.inner.hooks) and not (torch.is_grad_enabled() and programs.has_gradient(x)):
            compiled = programs.programs_for(self, x) if x.is_cpu else programs.with_sums(self)
            if compiled is not None:
                with suppress(_OtherSizes):
                    return compiled(x)
    return self.node_by_node(*inputs, **more)


def _without_defaults(
    network: fx.GraphModule, inputs: tuple[object, ...], more: dict[str, object]
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """The arguments of a call without those that pass the default of an optional input, with which the network was traced."""
    places = {str(node.target): node for node in network.graph.nodes if node.op == "placeholder"}
    if len(inputs) > len(places) or more.keys() - places.keys():
        return inputs, more  # Python's error says what is wrong
    given, left = dict(zip(places, inputs, strict=False)), dict[str, object]()
    for name, value in (given | more).items():
        default = places[name].args
        if not default:
            left[name] = value
        elif value is not default[0] and (isinstance(value, Tensor) or type(value) is not type(default[0]) or value != default[0]):
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise ArgumentError(
                f"the network on int8 codes was made for {name}={default[0]!r}, its default, got {got}: pass the images alone, or quantize "
                f"a module that calls the model with {name}"
            )
    return (tuple(left.values()), {}) if len(left) == 1 else (inputs, more)


class _Programs:
    """The programs of a network in one thread: by size, type and stride of the images, or None if such images came only once. They do not
    keep the network alive."""

    def __init__(self, network: fx.GraphModule) -> None:
        self.inner = TracedModules.of(network)
        self.layers = [module for module in network.modules() if isinstance(module, IntegerModule)]
        self.parameters = list(network.parameters())
        self.weights = self._weights()
        self.by_size: dict[tuple[object, ...], Callable[[Tensor], object] | None] = {}
        self.sums: Callable[[Tensor], object] | None = None

    def _weights(self) -> tuple[list[int], list[int]]:
        """A value that changes with the weights and biases; each layer looks for other ones."""
        addresses = [layer.packed.data.data_ptr() for layer in self.layers if layer.current_table() is not None]
        return addresses, [layer.updates for layer in self.layers]

    def has_gradient(self, x: Tensor) -> bool:
        """Whether gradients flow to x, or to a parameter of what runs in floating point."""
        return x.requires_grad or any(parameter.requires_grad for parameter in self.parameters)

    def with_sums(self, network: fx.GraphModule) -> Callable[[Tensor], object]:
        if self.sums is None:
            self.sums = _with_sums(network)
        return self.sums

    def programs_for(self, network: fx.GraphModule, x: Tensor) -> Callable[[Tensor], object] | None:
        from halfbyte.kernels.cpu.codegen import runtime

        if self.weights != (weights := self._weights()):
            self.weights = weights
            self.by_size.clear()
        key = x.shape, x.stride(), x.dtype, runtime.threads()
        compiled = self.by_size.get(key)
        if compiled is None:
            if len(self.by_size) >= _SIZES:
                self.by_size.clear()
            compiled = self.by_size[key] = _with_programs(network, x) if key in self.by_size else None
        return compiled


class _ThreadPrograms(threading.local):
    """The programs of a network, in each Python thread others, as their results lie in memory of their own."""

    programs: _Programs | None = None


@by_object()
def _thread_programs_of(network: IntegerNetwork) -> _ThreadPrograms:
    return _ThreadPrograms()


class _OtherSizes(Exception):
    """An operation between programs returned tensors of other sizes than before, for images of the same size."""


class _Sizes(fx.Interpreter):
    """Runs a graph and records its tensors' sizes, strides and dtypes, as tensors on the meta device."""

    def __init__(self, network: fx.GraphModule) -> None:
        super().__init__(network)
        self.extra_traceback = False  # errors stay one sentence
        self.seen: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.seen[n] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value


def _with_programs(network: fx.GraphModule, x: Tensor) -> fx.GraphModule:
    sizes = _Sizes(network)
    sizes.run(x)
    return _Writer(network, sizes.seen).result()


class _Added(nn.Module):
    """A convolution and the addition of its codes to others, of which they are the first or (`leads` is false) the second."""

    def __init__(self, conv: IntegerConv2d, addition: Requantize, leads: bool) -> None:
        super().__init__()
        self.conv, self.addition, self.leads = conv, addition, leads

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.conv.added(x, Addition(other, self.addition.how(True), self.leads))


def _with_sums(network: fx.GraphModule) -> fx.GraphModule:
    """The graph in which a convolution whose result is added to others and has no other reader adds it itself."""
    modules, place = dict(network.named_modules(remove_duplicate=False)), {node: i for i, node in enumerate(network.graph.nodes)}
    added: dict[fx.Node, fx.Node] = {}  # convolutions, by the additions
    for node in network.graph.nodes:
        both = _sources(node) if isinstance(modules.get(str(node.target)), Requantize) else ()
        found = [n for n in both if len(n.users) == 1 and type(modules.get(str(n.target))) is IntegerConv2d]
        if len(set(both)) == 2 and found:
            added[node] = max(found, key=place.__getitem__)
    root, graph, copies = dict[str, object](), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in network.graph.nodes:
        if node in added.values():
            continue
        if node in added:
            conv, (first, second) = added[node], _sources(node)
            root[str(node.target)] = _Added(modules[str(conv.target)], modules[str(node.target)], conv is first)
            other = second if conv is first else first
            copies[node] = graph.call_module(str(node.target), (copies[_sources(conv)[0]], copies[other]))
            continue
        copies[node] = copy_node(node, network, graph, root, copies.__getitem__)
    return fx.GraphModule(root, graph, type(network).__name__)


class _Writer:
    """Makes the graph with programs, node by node."""

    def __init__(self, network: fx.GraphModule, seen: dict[fx.Node, Tensor]) -> None:
        self.network, self.seen = network, seen
        self.modules = dict(network.named_modules(remove_duplicate=False))
        self.root: dict[str, object] = {}
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.pending: dict[fx.Node, ProgramStep | None] = {}  # what becomes the next program; None: its input as it lies in memory

    def result(self) -> fx.GraphModule:
        for node in self.network.graph.nodes:
            if (step := self._step(node)) is not None or self._is_free_view(node):
                self.pending[node] = step
                continue
            self._flush()
            self.copies[node] = copy_node(node, self.network, self.graph, self.root, self.copies.__getitem__)
        return fx.GraphModule(self.root, self.graph, type(self.network).__name__)

    def _step(self, node: fx.Node) -> ProgramStep | None:
        step_of = getattr(module_of(node, self.modules), "step", None)
        if step_of is None or node not in self.seen:
            return None
        return step_of(*(self.seen[source] for source in _sources(node)))  # type: ignore[no-any-return]

    def _is_free_view(self, node: fx.Node) -> bool:
        """Whether it is a view, of another shape, of the result of a pending step."""
        if not isinstance(self.modules.get(str(node.target)), nn.Flatten) or _sources(node)[0] not in self.pending:
            return False
        x, y = self.seen[_sources(node)[0]], self.seen[node]
        return x.is_contiguous() and y.is_contiguous()

    def _flush(self) -> None:
        """Makes a program of the pending steps."""
        pending, self.pending = self.pending, {}
        steps = {node: step for node, step in pending.items() if step is not None}
        if not steps:
            return
        memory_of = {node: node for node in pending}  # where its memory comes from
        for node in pending.keys() - steps.keys():
            memory_of[node] = memory_of[_sources(node)[0]]
        inputs = list(dict.fromkeys(source for node in steps for source in _sources(node) if source not in memory_of))
        views = [node for node in pending if node not in steps and self._is_read_later(node, pending)]
        outputs = [node for node in steps if self._is_read_later(node, pending) or any(memory_of[view] is node for view in views)]
        program = _ProgramModule(inputs, steps, memory_of, outputs, self.seen)
        name = f"program_{len(self.graph.nodes)}"
        self.root[name] = program
        call = self.graph.call_module(name, tuple(self.copies[source] for source in inputs))
        for i, node in enumerate(outputs):
            self.copies[node] = self.graph.call_function(operator.getitem, (call, i))
        for view in views:
            self.copies[view] = self.graph.call_function(torch.reshape, (self.copies[memory_of[view]], tuple(self.seen[view].shape)))

    @staticmethod
    def _is_read_later(node: fx.Node, pending: Mapping[fx.Node, object]) -> bool:
        return any(user not in pending for user in node.users)


def _sources(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors that a node passes to its module, if it passes nothing else."""
    return cast("tuple[fx.Node, ...]", node.args)


class _ProgramModule(nn.Module):
    """A program, and the tensors that it makes: tensors -> list of tensors."""

    def __init__(
        self,
        inputs: list[fx.Node],
        steps: dict[fx.Node, ProgramStep],
        memory_of: dict[fx.Node, fx.Node],
        outputs: list[fx.Node],
        seen: dict[fx.Node, Tensor],
    ) -> None:
        from halfbyte.kernels.cpu.steps import Program, ProgramNode

        super().__init__()
        numbers = {node: i for i, node in enumerate((*inputs, *steps))}
        program_nodes = [
            ProgramNode(step, tuple(numbers[memory_of.get(source, source)] for source in _sources(node)), node in outputs)
            for node, step in steps.items()
        ]
        self._program = Program(program_nodes, len(inputs))
        self._inputs = [(seen[node].shape, seen[node].stride()) for node in inputs]
        self._outputs = [(tuple(seen[node].shape), seen[node].stride(), seen[node].dtype) for node in outputs]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        if [(t.shape, t.stride()) for t in tensors] != self._inputs:
            raise _OtherSizes
        outputs = [torch.empty_strided(size, stride, dtype=dtype, device="cpu") for size, stride, dtype in self._outputs]
        self._program((*tensors, *outputs))
        return outputs
