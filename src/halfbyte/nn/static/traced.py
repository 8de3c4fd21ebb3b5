"""What torch.fx finds in convolutional networks: operations that more than one rewriter looks for, and how nodes are copied."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target
from torch.nn.modules import module as torch_modules

from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.quantized import CALLED, why_not_hooks

SAME = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity)  # in evaluation
ADDS = (operator.add, operator.iadd, torch.add)
RELUS = (torch.relu, nn.functional.relu, "relu", "relu_")
_GLOBAL_HOOKS = tuple(getattr(torch_modules, f"_global{name}") for name in CALLED)


class _Proxy(fx.Proxy):
    """torch.fx's own proxy traces `x += y` as `x = x + y`, which would leave other references to x unchanged."""

    def __iadd__(self, other: object) -> fx.Proxy:
        return self._written(operator.iadd, other)

    def __isub__(self, other: object) -> fx.Proxy:
        return self._written(operator.isub, other)

    def __imul__(self, other: object) -> fx.Proxy:
        return self._written(operator.imul, other)

    def __itruediv__(self, other: object) -> fx.Proxy:
        return self._written(operator.itruediv, other)

    def _written(self, by: Callable[..., object], other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", by, (self, other), {})


class Tracer(fx.Tracer):
    """torch.fx's tracer, but in-place operations become nodes of their own (operator.iadd), and a first operand that was passed by keyword
    becomes positional.

    defaults   whether inputs with a default are traced with that value, not as tensors
    failed     after an error: the innermost module in whose forward it was raised; "" for the traced one
    """

    def __init__(self, *, defaults: bool = False) -> None:
        super().__init__()
        self.defaults, self.failed = defaults, ""

    def create_args_for_root(
        self, root_fn: Callable[..., object], is_module: bool, concrete_args: dict[str, object] | tuple[object, ...] | None = None
    ) -> tuple[object, list[object]]:
        forward, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        if self.defaults:
            arguments = [a.node.args[0] if isinstance(a, fx.Proxy) and a.node.args else a for a in arguments]
        return forward, arguments

    def call_module(self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise

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
        if kwargs and not args and kind in ("call_module", "call_function"):
            first = "tensors" if target is torch.cat else "input"
            if kind == "call_module":
                first = next(iter(inspect.signature(self.root.get_submodule(str(target)).forward).parameters))
            if first in kwargs:
                args, kwargs = (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
        return super().create_node(kind, target, args, kwargs, name, type_expr)


def graph_of(model: nn.Module, purpose: str, *, defaults: bool) -> fx.Graph:
    """The graph of `model`. `purpose`: of tracing it, for the message of the UnsupportedError where torch.fx cannot."""
    tracer = Tracer(defaults=defaults)
    try:
        return tracer.trace(model)
    except Exception as error:  # whatever a forward raises that is given no tensors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f", in {tracer.failed} ({type(model.get_submodule(tracer.failed)).__name__})" if tracer.failed else ""
        remedy = "write its forward without control flow that depends on tensors, or put that into a module that stays in floating point"
        raise UnsupportedError(f"{type(model).__name__} cannot be traced by torch.fx to {purpose}{where} ({reason}): {remedy}") from error


class Inner(NamedTuple):
    """The modules inside a traced one: their hooks and those of all modules, which a traced graph would not run, and each one's children
    at the time of tracing."""

    hooks: tuple[dict[int, object], ...]
    children: tuple[tuple[dict[str, nn.Module | None], list[nn.Module | None]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Inner:
        every = list(model.modules())
        hooks = [getattr(m, name) for m in every if m is not model for name in CALLED]
        return cls((*_GLOBAL_HOOKS, *hooks), tuple((m._modules, list(m._modules.values())) for m in every if m._modules))

    def are_still(self) -> bool:
        return all(list(now.values()) == before for now, before in self.children)  # modules are equal to themselves alone


def module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The module that a node calls, if it calls one."""
    return modules[str(node.target)] if node.op == "call_module" else None


def why_not_torch(module: nn.Module) -> str | None:
    """Why calling a module of one of torch's classes does not just compute what the class does; None if it does."""
    return "it has a forward of its own" if "forward" in vars(module) else why_not_hooks(module)


def erase_identities(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Removes the calls of modules that do nothing in evaluation."""
    for node in graph.nodes:
        module = module_of(node, modules)
        if isinstance(module, SAME) and why_not_torch(module) is None:
            replace(node, node.args[0])


def replace(node: fx.Node, by: fx.Node) -> None:
    """Lets all users of a node read another one, and erases it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def copy_node(node: fx.Node, module: nn.Module, graph: fx.Graph, root: dict[str, object], copy_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A node of `module`'s graph in another graph, where `copy_of` gives its arguments; what it calls or reads is added to `root`."""
    if node.op in ("call_module", "get_attr"):
        root[str(node.target)] = operator.attrgetter(str(node.target))(module)
    return graph.node_copy(node, copy_of)
