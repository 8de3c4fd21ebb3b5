"""Batch normalization folded into the layer before it: in evaluation it is a scale and an offset per channel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from torch import fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.nn.modules.conv import FloatConv
from halfbyte.nn.report import REMARK
from halfbyte.nn.static.tracing import graph_of, read_modules, why_overridden
from halfbyte.nn.training.fake_quantized import check_not_in_training

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WITH_ACTIVATION = "timm.layers.norm_act.BatchNormAct2d"  # the class of BatchNorm2d whose forward calls its children `drop` and `act` last


def fold_batch_norms_(model: nn.Module) -> nn.Module:
    """Fold each BatchNorm that follows a convolution, transposed or not, or a Linear into it, in place.

    The norm becomes nn.Identity, which `report(model)` mentions. Only pairs are folded where nothing else reads the layer's result and both
    are used once, so in evaluation the model computes the same. A norm behind a Linear is taken for one of its features; one of the rows of
    [batch, rows, features] is told apart only where there are more or fewer rows than features. Call it before `quantize_`, and before
    passing a model to `load`.

    Args:
        model: In evaluation mode.

    Returns:
        `model`.

    Raises:
        ArgumentError: The model is in training mode, or prepared by `prepare_qat_`.
        UnsupportedError: torch.fx cannot trace the model.

    Example:
        >>> hb.fold_batch_norms_(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval())[1]
        Identity()
    """
    if model.training:
        raise ArgumentError("batch norms are folded as they are in evaluation: call model.eval() first")
    check_not_in_training(model)
    if not any(isinstance(module, NORMS) for module in model.modules()):
        return model
    with_activation = split_norms_(model)
    try:
        graph = partial(graph_of, model, "find the layers before its norms", "quantize it with its norms")
        graphs = [graph(defaults=False)]
        if any(node.op == "placeholder" and node.args for node in graphs[0].nodes):
            with suppress(UnsupportedError):  # then it is always called with its optional inputs
                graphs.append(graph(defaults=True))
        for _, norm in fold_(model, graphs):
            setattr(model.get_submodule(norm), REMARK, "folded into the layer before")
    finally:
        for name, module in with_activation.items():
            if isinstance(model.get_submodule(name).get_submodule("norm"), NORMS):  # which is not folded
                model.set_submodule(name, module)
    return model


def split_norms_(model: nn.Module) -> dict[str, nn.Module]:
    """Replace timm's norms with an activation by a Sequential of `norm`, which shares their tensors, `drop` and `act`, in place.

    Returns:
        The replaced modules, by their names.
    """
    parts: dict[nn.Module, nn.Module] = {}
    replaced: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        is_known = f"{type(module).__module__}.{type(module).__name__}" == _WITH_ACTIVATION and isinstance(module, nn.BatchNorm2d)
        if not (is_known and name) or why_overridden(module) is not None:
            continue
        if module not in parts:
            norm = nn.BatchNorm2d.__new__(nn.BatchNorm2d)
            norm.__dict__ = {**vars(module), "_modules": {}}
            parts[module] = nn.Sequential(OrderedDict(norm=norm, drop=module.get_submodule("drop"), act=module.get_submodule("act")))
            parts[module].training = module.training
        replaced[name] = module
    for name, module in replaced.items():
        model.set_submodule(name, parts[module])
    return replaced


def fold_(model: nn.Module, graphs: Sequence[fx.Graph]) -> list[tuple[str, str]]:
    """`fold_batch_norms_` without checks and remarks for the report; returns the names (layer, norm) of each pair.

    graphs   of `model`, one for each way in which it is called: a pair is folded if it is one in each graph that has either of them
    """
    modules = dict(model.named_modules())
    foldable = [_foldable(graph, modules) for graph in graphs]
    used = [{str(node.target) for node in graph.nodes if node.op == "call_module"} | read_modules(graph) for graph in graphs]
    folded = []
    for names in dict.fromkeys(pair for of_graph in foldable for pair in of_graph):
        if all(names in of_graph or used_there.isdisjoint(names) for of_graph, used_there in zip(foldable, used, strict=True)):
            before, after = (modules[name] for name in names)
            if isinstance(before, nn.Linear):
                model.set_submodule(names[0], fuse_linear_bn_eval(before, after))
            else:
                model.set_submodule(names[0], fuse_conv_bn_eval(before, after, transpose=before.transposed))
            model.set_submodule(names[1], nn.Identity())
            folded.append(names)
    return folded


def _foldable(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """The names (layer, norm) of the pairs that can be folded as far as one graph shows."""
    used = [node.target for node in graph.nodes if node.op == "call_module"] + list(read_modules(graph))
    found = []
    for norm in graph.nodes:
        layer = norm.args[0] if norm.op == "call_module" and norm.args else None
        if not (isinstance(layer, fx.Node) and layer.op == "call_module" and len(layer.users) == 1):
            continue
        names = str(layer.target), str(norm.target)
        before, after = (modules[name] for name in names)
        if not (isinstance(after, NORMS) and after.track_running_stats) or any(_has_more(module) for module in (before, after)):
            continue
        if isinstance(before, nn.Linear) and before.out_features != after.num_features:  # a norm of the rows of [batch, rows, features]
            continue
        if isinstance(before, FloatConv) and before.transposed and before.groups > 1:  # whose weight has the outputs of one group
            continue
        if isinstance(before, FloatConv | nn.Linear) and used.count(names[0]) == used.count(names[1]) == 1:
            found.append(names)
    return found


def _has_more(module: nn.Module) -> bool:
    """Whether a module does more than its class, or recomputes its weight at each call, as with weight_norm and spectral_norm."""
    return why_overridden(module) is not None or parametrize.is_parametrized(module)
