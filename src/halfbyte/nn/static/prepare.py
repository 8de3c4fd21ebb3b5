"""Preparation of a float network for computing on int8 codes: tracing, folding of batch norms, and one form for each operation.

Called by build.py before calibration. The checks refuse what a network on codes could not reproduce.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import fx, nn

from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.quantized import why_not_hooks
from halfbyte.nn.static.batchnorm import fold_, split_norms_
from halfbyte.nn.static.tracing import Tracer, erase_identities, first_input, graph_of, writes_first_input

# Functions, and the modules that compute the same from the same arguments.
_MODULE_OF_FUNCTION: dict[object, type[nn.Module]] = {
    nn.functional.relu6: nn.ReLU6,
    nn.functional.hardtanh: nn.Hardtanh,
    nn.functional.avg_pool1d: nn.AvgPool1d,
    nn.functional.avg_pool2d: nn.AvgPool2d,
    nn.functional.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    nn.functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    torch.avg_pool1d: nn.AvgPool1d,
    torch.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    nn.functional.max_pool1d: nn.MaxPool1d,
    nn.functional.max_pool2d: nn.MaxPool2d,
    torch.max_pool1d: nn.MaxPool1d,
    torch.max_pool2d: nn.MaxPool2d,
}
_MAX_POOL_PARAMETERS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")  # of the functions, in their order


class Prepared(NamedTuple):
    """A traced network in evaluation.

    Attributes:
        traced: Its graph, without operations that do nothing in evaluation; a copy, whose modules may be changed.
        normed_layers: Names of the layers into which a batch norm was folded.
    """

    traced: fx.GraphModule
    normed_layers: frozenset[str]


def prepare(model: nn.Module) -> Prepared:
    """Trace a copy of `model`, fold its batch norms, and turn functions that pool or activate into modules.

    In-place operations are followed: nodes after one read its result where they read the tensor that it writes to.

    Raises:
        UnsupportedError: torch.fx cannot trace the model, it takes more than images, writes to `out=`, or a module that tracing dissolves
            has hooks.
    """
    if "forward" in vars(model):
        raise UnsupportedError(
            f"this {type(model).__name__} has a forward of its own, set on the object, which is not traced: wrap it, nn.Sequential(module)"
        )
    model = copy.deepcopy(model).eval()
    split_norms_(model)
    graph = graph_of(model, "compute on int8 codes", 'take activations="dynamic"', defaults=True)
    _check_inputs(model, graph)
    _check_hooks(model)
    normed_layers = frozenset(layer for layer, _ in fold_(model, [graph]))
    traced = fx.GraphModule(model, graph, type(model).__name__)
    modules = dict(traced.named_modules())
    erase_identities(traced.graph, modules)
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("out") is not None:
            raise UnsupportedError(f"{node.name} writes into other memory (out=), which codes do not share: write y = torch.add(x, y)")
        if writes_first_input(node, modules):
            later_readers = {user for user in first_input(node).users if user > node}
            first_input(node).replace_all_uses_with(node, later_readers.__contains__)
        _call_as_module(node, traced)
    traced.recompile()
    return Prepared(traced, normed_layers)


def _check_inputs(model: nn.Module, graph: fx.Graph) -> None:
    """Raise UnsupportedError for a model that takes more than images."""
    more = [str(n.target) for n in graph.nodes if n.op == "placeholder" and not n.args and not str(n.target).startswith("*")][1:]
    if more:
        raise UnsupportedError(
            f"{type(model).__name__} takes {' and '.join(more)} besides its images, and a network on int8 codes takes images alone: "
            "give these inputs defaults, or wrap the model in a module that passes them"
        )


def _check_hooks(module: nn.Module, name: str = "") -> None:
    """Raise UnsupportedError for hooks of modules that tracing dissolves into the operations in them."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if Tracer().is_leaf_module(child, path):
            continue
        if (reason := why_not_hooks(child)) is not None:
            raise UnsupportedError(
                f"{path} ({type(child).__name__}) cannot become a part of a network on int8 codes: {reason}: remove them, or register them "
                "for a layer in it, which then runs in floating point"
            )
        _check_hooks(child, path)


def _call_as_module(node: fx.Node, traced: fx.GraphModule) -> None:
    """Let a node that calls a function of `_MODULE_OF_FUNCTION` call the module instead, which is added under the node's name.

    Nodes stay as they are where an argument is computed by the network, and a hardtanh that is not a ReLU6.
    """
    module_class = _MODULE_OF_FUNCTION.get(node.target) if node.op == "call_function" else None
    if module_class is None or hasattr(traced, node.name):
        return
    x, *positional = node.args
    named = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    if module_class is nn.Hardtanh:
        bounds = dict(zip(("min_val", "max_val"), positional, strict=False)) | named
        if (bounds.get("min_val", -1.0), bounds.get("max_val", 1.0)) != (0.0, 6.0):
            return
        module_class, positional, named = nn.ReLU6, [], {}
    if module_class in (nn.MaxPool1d, nn.MaxPool2d):
        positional, named = [], dict(zip(_MAX_POOL_PARAMETERS, positional, strict=False)) | named
        named["stride"] = named.get("stride") or None  # the functions' default is an empty list
    if any(isinstance(value, fx.Node) for value in (*positional, *named.values())):
        return
    traced.add_submodule(node.name, module_class(*positional, **named))
    node.op, node.target, node.args, node.kwargs = "call_module", node.name, (x,), {}
