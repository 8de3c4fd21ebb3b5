"""Fusion of additions and ReLUs into the epilogues of quantized convolutions with floating-point activations, as in a ResNet block:

    relu(conv(x) + shortcut)  ->  conv(x, residual=shortcut, clamp=(0, inf))

`fuse_convolutions_`, which `fuse_` calls, traces the largest modules that torch.fx can trace, and edits the graph:

1. an addition whose later operand is a convolution that nothing else reads becomes that convolution's residual;
2. a ReLU, ReLU6 or Hardtanh of a convolution that nothing else reads becomes its clamp;
3. convolutions pass images on in channels_last, which saves the copies between them;
4. max-pooling becomes halfbyte's operation.

The graph replaces the forward of the traced module by a subclass of its class (`_Fused`); inner modules and all names stay. The sum is
rounded once instead of twice; nothing else changes. In training, with hooks on inner modules, and after an inner module was replaced the
original forward runs, or the module is fused again.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import cast

import torch
from torch import fx, nn

from halfbyte.nn.modules.conv import QuantConv2d, QuantConvTranspose2d
from halfbyte.nn.modules.quantized import QuantModule, has_hooks
from halfbyte.nn.modules.subclassed import with_signature
from halfbyte.nn.report import REMARK, add_remark, drop_remarks
from halfbyte.nn.static.memory_format import MemoryFormats
from halfbyte.nn.static.tracing import (
    ADDS,
    RELUS,
    TracedModules,
    Tracer,
    calls,
    erase_identities,
    module_of,
    replace_node,
    writes_first_input,
)
from halfbyte.ops.conv.pool import max_pool2d

_NOTHING_FUSED = "nothing is fused into its own convolutions"
_NORMS = "torch computes the batch norms"
_Modules = Mapping[str, nn.Module]  # of the traced module, by the names that are the targets of its graph's nodes
_Clamp = tuple[float, float]


def fuse_convolutions_(model: nn.Module) -> None:
    """Fuse additions and activations into the quantized convolutions of `model`, in place.

    Args:
        model: In evaluation mode; of a model in training, the parts that are in evaluation mode are fused.
    """
    if isinstance(model, QuantModule | _Fused) or not any(isinstance(module, QuantConv2d) for module in model.modules()):
        return
    graph = _traced(model)
    if isinstance(graph, str):
        if any(isinstance(child, QuantConv2d) for child in model.children()):
            add_remark(model, f"{_NOTHING_FUSED}: {graph}")
        for child in model.children():
            fuse_convolutions_(child)
            for grandchild in child.children() if isinstance(child, nn.Sequential) else ():  # which `model` may call one by one
                fuse_convolutions_(grandchild)
        return
    modules = dict(model.named_modules())
    sums, activations = _fuse_additions(graph, modules), _fuse_activations(graph, modules)
    in_channels_last = _keep_channels_last(graph, modules)
    drop_remarks(model, f"^{_NOTHING_FUSED}|^{_NORMS}")
    if norms := sum(_is_norm_of_convolution(node, modules) for node in graph.nodes):
        add_remark(model, f"{_NORMS} behind {norms} convolutions: call fold_batch_norms_ before quantize_")
    if not sums + activations + in_channels_last:
        return
    _replace_pools(graph, modules)
    remark = f"in channels_last from one convolution to the next: {in_channels_last} convolutions"
    if sums + activations:
        remark = f"within the convolutions before them: {sums} additions, {activations} activations"
    add_remark(model, remark)
    forward = type(fx.GraphModule(model, graph)).forward  # with its source where tracebacks find it
    members: dict[str, object] = {"fused": forward, "inner": TracedModules.of(model), "__module__": type(model).__module__}
    members["forward"] = with_signature(cast("FunctionType", _Fused.forward), type(model).forward)
    model.__class__ = type(type(model).__name__, (_Fused, type(model)), members)


class _Fused(nn.Module):
    """The first base class of a fused module's class; the second one is the module's own class, whose forward it replaces.

    Attributes:
        fused: The forward of the graph.
        inner: What the graph depends on.
    """

    fused: Callable[..., object]
    inner: TracedModules

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.training or self.inner.in_training():
            return super().forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if any(self.inner.hooks):
                return super().forward(*args, **kwargs)
            if not self.inner.unchanged():
                _restore_class(self)
                fuse_convolutions_(self)
                return self(*args, **kwargs)
        return self.fused(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _unpickled, (_original_class(self), self.__dict__)


def _original_class(model: _Fused) -> type[nn.Module]:
    """Return the class of a fused module before it was fused."""
    _, original = type(model).__bases__
    return cast("type[nn.Module]", original)


def _restore_class(model: _Fused) -> None:
    """Undo the fusion of a module."""
    model.__dict__.pop(REMARK, None)
    model.__class__ = _original_class(model)  # type: ignore[assignment]


def _unpickled(original_class: type[nn.Module], state: dict[str, object]) -> nn.Module:
    """Return a copied or unpickled module, fused: its class was made at run time, so that pickle cannot name it."""
    model = original_class.__new__(original_class)
    model.__dict__.update(state)
    fuse_convolutions_(model)
    return model


class _Tracer(Tracer):
    """Traces quantized modules as calls, not through their forward."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, QuantModule) or super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module) -> fx.Graph | str:
    """Return the graph of `model`, or the reason why there is none."""
    if model.training:
        return "it is in training mode"
    if "forward" in vars(model):
        return "it has a forward of its own"
    for name, module in model.named_modules():
        if module is not model and (has_hooks(module) or "forward" in vars(module)):
            return f"{name} in it has hooks or a forward of its own"
    if [p.kind for p in inspect.signature(model.forward).parameters.values()] != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
        return "its forward takes more than one tensor"
    try:
        return _Tracer().trace(model)
    except Exception as error:  # whatever a forward raises that is given no tensor
        return f"torch.fx cannot trace it ({str(error).strip().partition('. ')[0] or type(error).__name__})"


def _fuse_additions(graph: fx.Graph, modules: _Modules) -> int:
    """Make residuals of additions; return how many."""
    erase_identities(graph, modules)
    position = {node: i for i, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if writes_first_input(node, modules)]
    count = 0
    for node in graph.nodes:
        if not calls(node, ADDS) or len(node.args) != 2 or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
            continue
        earlier, later = sorted(node.args, key=position.__getitem__)
        if earlier is later or not _is_unfused(later, modules) or len(later.args) > 1:
            continue
        if isinstance(module_of(later, modules), QuantConvTranspose2d):  # its epilogue has no residual
            continue
        # The convolution reads `earlier` when it runs: nothing after it may write to that or, up to the addition, to a view of it.
        is_read_later = any(position[user] > position[later] and user is not node for user in earlier.users)
        if is_read_later or any(position[later] < position[write] < position[node] for write in writes):
            continue
        if node.target is operator.iadd and node.args[0] is earlier:  # in place, which a view of `earlier` would show
            continue
        later.args = (*later.args, earlier)
        replace_node(node, later)
        count += 1
    return count


def _fuse_activations(graph: fx.Graph, modules: _Modules) -> int:
    """Make clamps of activations; return how many."""
    count = 0
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and _is_unfused(source, modules) and (clamp := _clamp_of(node, modules)) is not None:
            source.kwargs = {"clamp": clamp}
            replace_node(node, source)
            count += 1
    return count


def _keep_channels_last(graph: fx.Graph, modules: _Modules) -> int:
    """Let convolutions write channels_last where convolutions read it; return how many read it."""

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


def _replace_pools(graph: fx.Graph, modules: _Modules) -> None:
    """Replace max-pooling by halfbyte's, whose kernel is faster on GPUs than torch's."""
    for node in graph.nodes:
        if type(module_of(node, modules)) is nn.MaxPool2d:
            with graph.inserting_before(node):
                pool = graph.get_attr(str(node.target))
                replace_node(node, graph.call_function(max_pool2d, (*node.args, pool), node.kwargs))


def _is_unfused(node: fx.Node, modules: _Modules) -> bool:
    """Whether a node is a convolution without a clamp whose result is read once: by the operation that may be fused."""
    return _is_convolution(node, modules) and len(node.users) == 1 and not node.kwargs


def _is_convolution(node: fx.Node, modules: _Modules) -> bool:
    """Whether a node calls a quantized convolution; not one of a subclass with a forward of its own, which takes no residual or clamp."""
    module = module_of(node, modules)
    return isinstance(module, QuantConv2d) and module.float_class is None


def _is_norm_of_convolution(node: fx.Node, modules: _Modules) -> bool:
    """Whether a node is a batch norm of a convolution's result, which `fold_batch_norms_` could have folded."""
    source = node.args[0] if node.args else None
    return isinstance(module_of(node, modules), nn.BatchNorm2d) and isinstance(source, fx.Node) and _is_unfused(source, modules)


def _clamp_of(node: fx.Node, modules: _Modules) -> _Clamp | None:
    """Return the bounds of an activation that clamps its first argument; None for any other node."""
    module = module_of(node, modules)
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        return float(module.min_val), float(module.max_val)
    if isinstance(module, nn.ReLU) or calls(node, RELUS):
        return 0.0, math.inf
    return (0.0, 6.0) if calls(node, (nn.functional.relu6,)) else None
