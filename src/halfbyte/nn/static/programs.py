"""Faster graphs of a network on int8 codes, which network.py runs in place of its own graph.

`with_programs` (CPU): modules with a method `step` say what they do to tensors of known sizes as steps of a native program
(`kernels/cpu/steps.py`). Steps that follow each other become one program, a single call of native code whose intermediate results lie in
memory of its own. Other nodes run between programs.

`with_fused_additions` (GPU): a convolution whose result is only added to other codes adds them itself.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx, nn

from halfbyte.kernels.problem import Addition
from halfbyte.nn.static.integer import IntegerConv2d, Requantize
from halfbyte.nn.static.tracing import copy_node, module_of

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.steps import Program, ProgramStep


class OtherSizesError(Exception):
    """A program's inputs have other sizes than when it was compiled: an operation between programs depends on more than sizes."""


def with_programs(network: fx.GraphModule, x: Tensor) -> fx.GraphModule:
    """Return the network for images of the layout of `x`; its forward raises OtherSizesError where programs do not fit."""
    sizes = _SizeRecorder(network)
    sizes.run(x)
    return _ProgramWriter(network, sizes.tensors).write()


class _SizeRecorder(fx.Interpreter):
    """Runs a graph and records its tensors' sizes, strides and dtypes, as tensors on the meta device."""

    def __init__(self, network: fx.GraphModule) -> None:
        super().__init__(network)
        self.extra_traceback = False  # errors stay one sentence
        self.tensors: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.tensors[n] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value


class _ProgramWriter:
    """Copies a graph node by node, with steps collected to programs.

    Args:
        network: The network on codes.
        tensors: The result of each node, as a tensor on the meta device.
    """

    def __init__(self, network: fx.GraphModule, tensors: Mapping[fx.Node, Tensor]) -> None:
        self._network, self._tensors = network, tensors
        self._modules = dict(network.named_modules(remove_duplicate=False))
        self._root: dict[str, object] = {}
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        # Nodes for the next program; None: a view of its input, for which the program does nothing.
        self._pending: dict[fx.Node, ProgramStep | None] = {}

    def write(self) -> fx.GraphModule:
        for node in self._network.graph.nodes:
            step = self._step(node)
            if step is not None or self._is_view_of_pending(node):
                self._pending[node] = step
                continue
            self._flush()
            self._copies[node] = copy_node(node, self._network, self._graph, self._root, self._copies.__getitem__)
        return fx.GraphModule(self._root, self._graph, type(self._network).__name__)

    def _step(self, node: fx.Node) -> ProgramStep | None:
        step_of = getattr(module_of(node, self._modules), "step", None)
        if step_of is None or node not in self._tensors:
            return None
        return step_of(*(self._tensors[source] for source in _module_inputs(node)))  # type: ignore[no-any-return]

    def _is_view_of_pending(self, node: fx.Node) -> bool:
        """Whether a node only flattens the result of a pending node, contiguous before and after."""
        if not isinstance(module_of(node, self._modules), nn.Flatten) or _module_inputs(node)[0] not in self._pending:
            return False
        return self._tensors[_module_inputs(node)[0]].is_contiguous() and self._tensors[node].is_contiguous()

    def _flush(self) -> None:
        """Add a program of the pending nodes to the graph."""
        pending, self._pending = self._pending, {}
        steps = {node: step for node, step in pending.items() if step is not None}
        if not steps:
            return
        computed_by = {node: node for node in pending}  # the step, or the input of the program, in whose memory a result lies
        for view in pending.keys() - steps.keys():
            computed_by[view] = computed_by[_module_inputs(view)[0]]
        inputs = list(dict.fromkeys(source for node in steps for source in _module_inputs(node) if source not in computed_by))
        returned_views = [node for node in pending if node not in steps and _is_read_outside(node, pending)]
        outputs = [node for node in steps if _is_read_outside(node, pending) or any(computed_by[view] is node for view in returned_views)]
        name = f"program_{len(self._graph.nodes)}"
        self._root[name] = self._program(steps, inputs, outputs, computed_by)
        call = self._graph.call_module(name, tuple(self._copies[source] for source in inputs))
        for i, node in enumerate(outputs):
            self._copies[node] = self._graph.call_function(operator.getitem, (call, i))
        for view in returned_views:
            memory, shape = self._copies[computed_by[view]], tuple(self._tensors[view].shape)
            self._copies[view] = self._graph.call_function(torch.reshape, (memory, shape))

    def _program(
        self,
        steps: Mapping[fx.Node, ProgramStep],
        inputs: list[fx.Node],
        outputs: list[fx.Node],
        computed_by: Mapping[fx.Node, fx.Node],
    ) -> _ProgramModule:
        from halfbyte.kernels.cpu.steps import Program, ProgramNode

        numbers = {node: i for i, node in enumerate((*inputs, *steps))}  # of the program's tensors
        program_nodes = [
            ProgramNode(step, tuple(numbers[computed_by.get(source, source)] for source in _module_inputs(node)), node in outputs)
            for node, step in steps.items()
        ]
        layouts = [[_TensorLayout.of(self._tensors[node]) for node in nodes] for nodes in (inputs, outputs)]
        return _ProgramModule(Program(program_nodes, len(inputs)), *layouts)


def _is_read_outside(node: fx.Node, pending: Mapping[fx.Node, object]) -> bool:
    """Whether a node's result is read by one that is not in the program."""
    return any(user not in pending for user in node.users)


def _module_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments of a call of a module of integer.py, which are all tensors."""
    return cast("tuple[fx.Node, ...]", node.args)


@dataclass(frozen=True)
class _TensorLayout:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _TensorLayout:
        return cls(tuple(x.shape), x.stride(), x.dtype)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


class _ProgramModule(nn.Module):
    """A native program as a module: tensors of the layouts `inputs` -> a list of tensors of the layouts `outputs`."""

    def __init__(self, program: Program, inputs: list[_TensorLayout], outputs: list[_TensorLayout]) -> None:
        super().__init__()
        self._program, self._inputs, self._outputs = program, inputs, outputs

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        if [_TensorLayout.of(x) for x in tensors] != self._inputs:
            raise OtherSizesError
        outputs = [layout.empty() for layout in self._outputs]
        self._program((*tensors, *outputs))
        return outputs


class _ConvAdd(nn.Module):
    """A convolution and the addition of its codes to others, of which the convolution's are the first or (`conv_first` is false) second."""

    def __init__(self, conv: IntegerConv2d, addition: Requantize, *, conv_first: bool) -> None:
        super().__init__()
        self._conv, self._addition, self._conv_first = conv, addition, conv_first

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self._conv.added(x, Addition(other, self._addition.how(True), self._conv_first))


def with_fused_additions(network: fx.GraphModule) -> fx.GraphModule:
    """Return the network in which each convolution adds the codes to which its result is added, if nothing else reads that."""
    modules = dict(network.named_modules(remove_duplicate=False))
    position = {node: i for i, node in enumerate(network.graph.nodes)}
    conv_of: dict[fx.Node, fx.Node] = {}  # the convolution, by the addition that it computes
    for node in network.graph.nodes:
        if not isinstance(module_of(node, modules), Requantize) or len(set(_module_inputs(node))) != 2:
            continue
        convs = [n for n in _module_inputs(node) if len(n.users) == 1 and type(module_of(n, modules)) is IntegerConv2d]
        if convs:
            conv_of[node] = max(convs, key=position.__getitem__)  # the later one, when both operands are there
    fused_convs = set(conv_of.values())
    root, graph, copies = dict[str, object](), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in network.graph.nodes:
        if node in fused_convs:
            continue
        if node not in conv_of:
            copies[node] = copy_node(node, network, graph, root, copies.__getitem__)
            continue
        conv_node, (first, second) = conv_of[node], _module_inputs(node)
        conv, addition = module_of(conv_node, modules), module_of(node, modules)
        assert isinstance(conv, IntegerConv2d)
        assert isinstance(addition, Requantize)
        root[str(node.target)] = _ConvAdd(conv, addition, conv_first=conv_node is first)
        other = second if conv_node is first else first
        copies[node] = graph.call_module(str(node.target), (copies[_module_inputs(conv_node)[0]], copies[other]))
    return fx.GraphModule(root, graph, type(network).__name__)
