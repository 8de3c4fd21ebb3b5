"""Tracing of convolutional networks by torch.fx.

Used by what rewrites their graphs: networks on int8 codes (prepare.py, rewriter.py, programs.py), folding of batch norms (batchnorm.py),
fused convolutions (nn/fused_convolutions.py), memory formats (memory_format.py). Here are the tracer, the operations that all of these look
for, the check that the traced modules are still those that were traced, and small changes of a graph.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target
from torch.nn.modules import module as torch_modules

from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.quantized import CALL_HOOKS, why_not_hooks
from halfbyte.nn.modules.subclassed import is_same_as_base

IDENTITIES_IN_EVAL = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity
)  # fmt: skip
# Operations, for `calls`: functions, and names of methods of tensors.
ADDS = (operator.add, operator.iadd, torch.add)
RELUS = (torch.relu, nn.functional.relu, "relu", "relu_")
IN_PLACE_OPERATORS = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift
)  # fmt: skip
_GLOBAL_HOOKS = tuple(getattr(torch_modules, f"_global{name}") for name in CALL_HOOKS)
# Functions of torch whose first parameter is not called `input`.
_FIRST_PARAMETERS = (
    *((torch.cat, "tensors"), (torch.stack, "tensors")),
    *((torch.where, "condition"), (torch.searchsorted, "sorted_sequence")),
)


class _Proxy(fx.Proxy):
    """A proxy that traces `x += y` as the in-place operation that it is.

    torch.fx's own proxy traces it as `x = x + y`, which leaves other references to x unchanged.
    """


def _traced_in_place(operation: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, object], fx.Proxy]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", operation, (proxy, other), {})


for _operator in IN_PLACE_OPERATORS:
    setattr(_Proxy, f"__{_operator.__name__}__", _traced_in_place(_operator))


class Tracer(fx.Tracer):
    """torch.fx's tracer, whose nodes have the form that the rewriters of halfbyte look for.

    They read a node's first operand in `args[0]`, so that one that was passed by keyword becomes positional, and in-place operators are
    nodes of their own (operator.iadd).

    Args:
        defaults: Trace inputs that have a default with that value, not as tensors.
    """

    def __init__(self, *, defaults: bool = False) -> None:
        super().__init__()
        self.defaults = defaults
        self._failure: tuple[Exception, str] | None = None  # the last one, and the path of the innermost module that raised it

    def trace(self, root: nn.Module | Callable[..., object], concrete_args: dict[str, object] | None = None) -> fx.Graph:
        try:
            return super().trace(root, concrete_args)
        finally:
            if isinstance(root, nn.Module):
                _forget_proxies(root)

    def create_args_for_root(
        self, root_fn: Callable[..., object], is_module: bool, concrete_args: dict[str, object] | tuple[object, ...] | None = None
    ) -> tuple[object, list[object]]:
        forward, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        if self.defaults:  # torch.fx stores an input's default as the argument of its node
            arguments = [a.node.args[0] if isinstance(a, fx.Proxy) and a.node.args else a for a in arguments]
        return forward, arguments

    def call_module(self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if self._failure is None or self._failure[0] is not error:
                self._failure = error, self.path_of_module(m)
            raise

    def path_of(self, error: Exception) -> str:
        """Return the path of the innermost module whose forward raised `error`; "" for the traced one."""
        return self._failure[1] if self._failure is not None and self._failure[0] is error else ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_same_as_base(m) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        first = self._first_parameter(kind, target) if kwargs and not args else None
        if first is not None and first in kwargs:
            args, kwargs = (kwargs[first],), {key: value for key, value in kwargs.items() if key != first}
        return super().create_node(kind, target, args, kwargs, name, type_expr)

    def _first_parameter(self, kind: str, target: Target) -> str | None:
        """Return the name of the first parameter of what a node calls; None where it can't be passed by position."""
        if kind == "call_function":
            return next((name for function, name in _FIRST_PARAMETERS if function is target), "input")
        if kind != "call_module":
            return None
        first = next(iter(inspect.signature(self.root.get_submodule(str(target)).forward).parameters.values()), None)
        return first.name if first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None


def _forget_proxies(model: nn.Module) -> None:
    """Remove the proxies that forwards stored in dictionaries of their modules (LeViT's biases): the next trace would read them."""
    for attribute in [value for module in model.modules() for value in vars(module).values() if isinstance(value, dict)]:
        for key in [key for key, value in attribute.items() if isinstance(value, fx.Proxy)]:
            del attribute[key]


def graph_of(model: nn.Module, purpose: str, otherwise: str, *, defaults: bool) -> fx.Graph:
    """Trace `model`.

    Args:
        model: Its forward is called with proxies.
        purpose: What the graph is for, in the error: "cannot be traced by torch.fx to <purpose>".
        otherwise: What works without a graph, for the error.
        defaults: As for Tracer.

    Raises:
        UnsupportedError: torch.fx cannot trace it.
    """
    tracer = Tracer(defaults=defaults)
    try:
        return tracer.trace(model)
    except Exception as error:  # a forward without real tensors may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        path = tracer.path_of(error)
        where = f", in {path} ({type(model.get_submodule(path)).__name__})" if path else ""
        remedy = f"write its forward without control flow that depends on tensors, pass a part of the model that has none, or {otherwise}"
        raise UnsupportedError(f"{type(model).__name__} cannot be traced by torch.fx to {purpose}{where} ({reason}): {remedy}") from error


# What may change after tracing


class _Children(NamedTuple):
    """The children of a module: torch's own dictionary of them, which changes with the module, and what it held when traced."""

    current: dict[str, nn.Module | None]
    traced: list[nn.Module | None]


class TracedModules(NamedTuple):
    """What can make a module compute something else than the graph that was traced of it.

    hooks     of all modules, and of each one inside of the traced one: torch's own dictionaries, which show hooks that come later. The
              traced module's own hooks run around the graph
    children  of each module that has some
    dropouts  which the graph leaves out, as in evaluation
    """

    hooks: tuple[dict[int, object], ...]
    children: tuple[_Children, ...]
    dropouts: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: nn.Module) -> TracedModules:
        modules = list(model.modules())
        hooks = [getattr(m, name) for m in modules if m is not model for name in CALL_HOOKS]
        children = tuple(_Children(m._modules, list(m._modules.values())) for m in modules if m._modules)
        dropouts = tuple(m for m in modules if isinstance(m, IDENTITIES_IN_EVAL) and not isinstance(m, nn.Identity))
        return cls((*_GLOBAL_HOOKS, *hooks), children, dropouts)

    def unchanged(self) -> bool:
        """Whether each module has the children that were traced."""
        return all(list(child.current.values()) == child.traced for child in self.children)  # nn.Module compares by identity

    def in_training(self) -> bool:
        """Whether a dropout is active, though the traced module is in evaluation (Monte Carlo dropout)."""
        return any(dropout.training for dropout in self.dropouts)


# Nodes and graphs


def module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the module that a node calls, if it calls one."""
    return modules[str(node.target)] if node.op == "call_module" else None


def calls(node: fx.Node, operations: Collection[object]) -> bool:
    """Whether a node calls one of these functions, or a method of a tensor of one of these names.

    A node's target alone does not tell: that of a call of the module `model.relu`, of whatever class, is "relu", too.
    """
    return node.op in ("call_function", "call_method") and node.target in operations


def first_input(node: fx.Node) -> fx.Node:
    """Return the node whose result is the first argument of `node`."""
    assert isinstance(node.args[0], fx.Node)
    return node.args[0]


def read_modules(graph: fx.Graph) -> set[str]:
    """Return the names of the modules from which a graph reads a parameter or buffer without calling them."""
    return {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}


def writes_first_input(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node is an in-place operation: it writes to the memory of its first input, which it returns."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if (module := module_of(node, modules)) is not None:
        return getattr(module, "inplace", False) is True
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        by_name = name.endswith("_") and getattr(operator, name, None) is not node.target  # torch.clamp_, but not operator.and_
        return by_name or node.target in IN_PLACE_OPERATORS or node.kwargs.get("inplace") is True
    return node.op == "call_method" and str(node.target).endswith("_")


def why_overridden(module: nn.Module) -> str | None:
    """Return why a module of one of torch's classes does not compute what its class does; None if it does."""
    return "it has a forward of its own" if "forward" in vars(module) else why_not_hooks(module)


def erase_identities(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Remove the calls of modules that do nothing in evaluation."""
    for node in graph.nodes:
        module = module_of(node, modules)
        if isinstance(module, IDENTITIES_IN_EVAL) and why_overridden(module) is None:
            replace_node(node, node.args[0])


def replace_node(node: fx.Node, by: fx.Node) -> None:
    """Let all users of a node read another one, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def copy_node(node: fx.Node, module: nn.Module, graph: fx.Graph, root: dict[str, object], copy_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Append a copy of a node to another graph.

    Args:
        node: A node of `module`'s graph.
        module: The traced module.
        graph: Where the copy goes.
        root: By their paths, what nodes of `graph` call or read, for the GraphModule; gets what this node does.
        copy_of: Returns the copy in `graph` of one of the node's arguments.
    """
    if node.op in ("call_module", "get_attr"):
        root[str(node.target)] = operator.attrgetter(str(node.target))(module)
    return graph.node_copy(node, copy_of)
