"""Additions and ReLUs after a convolution in floating point, computed by the convolution before it writes its result.

The largest modules that torch.fx can trace are given a forward of their own: the same operations in the same order, but that a
convolution whose result is read by an addition or a ReLU alone does both itself, and images stay in channels_last between convolutions.
Modules, their names and classes stay. A sum is rounded once instead of twice; nothing else changes. In training, and where inner modules
have hooks, the forward of before is called.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable

import torch
from torch import fx, nn

from halfbyte.nn.modules.conv import QuantConv2d, QuantConvTranspose2d
from halfbyte.nn.modules.quantized import QuantModule, has_hooks
from halfbyte.nn.report import REMARK
from halfbyte.nn.static.memory_format import MemoryFormats
from halfbyte.nn.static.tracing import ADDS, RELUS, TracedModules, Tracer, erase_identities, module_of, replace_node
from halfbyte.ops.conv.pool import max_pool2d

_INFINITE = float("inf")
_Clamp = tuple[float, float]


def fuse_convolutions_(model: nn.Module) -> None:
    """Fuse additions and ReLUs into the quantized convolutions of `model`, in place, where `model` is in evaluation."""
    if isinstance(model, QuantModule | _Fused) or not any(isinstance(module, QuantConv2d) for module in model.modules()):
        return
    graph = None if model.training else _graph(model)
    if graph is None:
        for child in model.children():
            fuse_convolutions_(child)
            for one in child.children() if isinstance(child, nn.Sequential) else ():  # which `model` may call one by one
                fuse_convolutions_(one)
        return
    modules = dict(model.named_modules())
    sums, activations = _with_sums(graph, modules), _with_activations(graph, modules)
    in_channels_last = _in_channels_last(graph, modules)
    if not sums + activations + in_channels_last:
        return
    _with_pools(graph, modules)
    fused = f"within the convolutions before them: {sums} additions, {activations} activations"
    setattr(
        model,
        REMARK,
        fused if sums + activations else f"in channels_last from one convolution to the next: {in_channels_last} convolutions",
    )
    forward = type(fx.GraphModule(model, graph)).forward  # with its source where tracebacks find it
    members = {"fused": forward, "inner": TracedModules.of(model), "__module__": type(model).__module__}
    model.__class__ = type(type(model).__name__, (_Fused, type(model)), members)


class _Fused(nn.Module):
    """Mixed in before the class of a module (its second base class) to replace its forward."""

    fused: Callable[..., object]
    inner: TracedModules

    def forward(self, *images: object, **named: object) -> object:
        if self.training or self.inner.in_training():
            return super().forward(*images, **named)
        if not torch.compiler.is_compiling():
            if any(self.inner.hooks):
                return super().forward(*images, **named)
            if not self.inner.unchanged():  # one was replaced
                return _again(self)(*images, **named)
        return self.fused(*images, **named)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _fused_again, (type(self).__mro__[2], self.__dict__)


def _fused_again(kind: type[nn.Module], state: dict[str, object]) -> nn.Module:
    model = kind.__new__(kind)
    model.__dict__.update(state)
    fuse_convolutions_(model)
    return model


def _again(model: nn.Module) -> nn.Module:
    """Restore the class of `model`, one of whose inner modules was replaced, and fuse it again."""
    model.__dict__.pop(REMARK, None)
    model.__class__ = type(model).__mro__[2]
    fuse_convolutions_(model)
    return model


class _Tracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, QuantModule) or super().is_leaf_module(m, module_qualified_name)


def _graph(model: nn.Module) -> fx.Graph | None:
    """The graph of `model`; None where torch.fx cannot trace it, or it takes more than one tensor."""
    inner = [module for module in model.modules() if module is not model]
    if "forward" in vars(model) or any(has_hooks(module) or "forward" in vars(module) for module in inner):
        return None
    if [p.kind for p in inspect.signature(model.forward).parameters.values()] != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
        return None
    try:
        return _Tracer().trace(model)
    except Exception:  # whatever a forward raises that is given no tensor
        return None


def _with_sums(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    """Let convolutions add; return how many."""
    erase_identities(graph, modules)
    place = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in graph.nodes:
        if node.target not in ADDS or len(node.args) != 2 or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
            continue
        first, second = sorted(node.args, key=place.__getitem__)
        read_later = [user for user in first.users if place[user] > place[second] and user is not node]
        if first is second or not _alone(second, modules) or len(second.args) > 1 or read_later:  # or what is read is written to
            continue
        if isinstance(module_of(second, modules), QuantConvTranspose2d):  # which does not add
            continue
        if node.target is operator.iadd and node.args[0] is first:  # which something else may show, such as a view
            continue
        second.args = (*second.args, first)
        replace_node(node, second)
        count += 1
    return count


def _with_activations(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    """Let convolutions clamp; return how many."""
    count = 0
    for node in graph.nodes:
        if node.args and isinstance(node.args[0], fx.Node) and _alone(node.args[0], modules) and (ends := _clamp(node, modules)):
            node.args[0].kwargs = {"clamp": ends}
            replace_node(node, node.args[0])
            count += 1
    return count


def _in_channels_last(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    """Let convolutions hand images on to each other in channels_last; return how many take them so."""

    def writes_channels_last(node: fx.Node) -> bool:
        return _is_convolution(node, modules)

    formats = MemoryFormats(graph, modules, writes_channels_last)
    if not (count := formats.channels_last_count()) or formats.writes_shared():
        return 0
    formats.restore()
    for node in graph.nodes:
        if writes_channels_last(node):
            node.kwargs = {**node.kwargs, "channels_last": True}
    return count


def _with_pools(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Replace max-pooling, for which there is a kernel that is faster on GPUs than torch's."""
    for node in graph.nodes:
        if type(module_of(node, modules)) is nn.MaxPool2d:
            with graph.inserting_before(node):
                pool = graph.get_attr(str(node.target))
                replace_node(node, graph.call_function(max_pool2d, (*node.args, pool), node.kwargs))


def _alone(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether it is a convolution whose result is read once, and not clamped."""
    return _is_convolution(node, modules) and len(node.users) == 1 and not node.kwargs


def _is_convolution(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether it is a quantized convolution, without another class's forward, which takes neither sums nor clamps."""
    module = module_of(node, modules)
    return isinstance(module, QuantConv2d) and module.float_class is None


def _clamp(node: fx.Node, modules: dict[str, nn.Module]) -> _Clamp | None:
    """The ends of an activation that clamps; None of everything else."""
    module = module_of(node, modules)
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        return float(module.min_val), float(module.max_val)
    if isinstance(module, nn.ReLU) or node.target in RELUS:
        return 0.0, _INFINITE
    return (0.0, 6.0) if node.target is nn.functional.relu6 else None
