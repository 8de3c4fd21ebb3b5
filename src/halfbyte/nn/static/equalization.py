"""Cross-layer equalization of a network that is about to compute on int8 codes, called by build.py before calibration chooses scales.

Codes of a tensor share one scale, in which a channel of small numbers has few codes. So layers that write channel c divide it by s_c and
those that read it multiply by s_c, in their weights:

    conv(x; W)[o] / s_o,   relu(x / s) = relu(x) / s,   (a + b) / s = a / s + b / s,   conv(x / s; W * s) = conv(x; W)

with s_c the largest |x_c| of the calibration images in relation to that of all channels: then channels have equal ranges, the network
computes the same in floating point, and on codes costs nothing. Tensors that are added share s, as a residual stream does. Those that a
ReLU6 clips stay as they are, since it does not commute with a scale. (Nagel et al., Data-free quantization through weight equalization and
bias correction, ICCV 2019, with ranges of activations instead of weights, as SmoothQuant has them.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from halfbyte.nn.static.bias_correction import Layer
from halfbyte.nn.static.tracing import ADDS, RELUS, calls, module_of, read_modules, why_overridden

_SMALLEST = 1 / 16  # of the largest range: a channel that calibration images hardly show keeps room for others

# Modules with f(x / s) = f(x) / s, and the dimensions of their batches: of an input with one less, channels are a size that they pool.
_POOLS: dict[object, int] = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d), 3),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d), 4),
}
_HOMOGENEOUS = {nn.ZeroPad2d: 4, **_POOLS}
_RESHAPES = (torch.flatten, torch.reshape, "flatten", "view", "reshape", "squeeze")


@dataclass(eq=False)
class _Stream:
    """Tensors [B, C, ...] that have to be divided by the same scales.

    nodes    that give them
    writers, readers  layers whose outputs and inputs they are
    fixed    whether something else reads or writes one of them
    """

    nodes: list[fx.Node] = field(default_factory=list)
    writers: list[Layer] = field(default_factory=list)
    readers: list[Layer] = field(default_factory=list)
    fixed: bool = False


@torch.no_grad()
def equalize_(traced: fx.GraphModule, images: Iterable[Tensor]) -> None:
    """Rescale the channels between the layers of `traced` to equal ranges, in place.

    Args:
        traced: Whose batch norms are folded, in evaluation. Its results stay the same but for the rounding of its dtype.
        images: Batches that show the ranges.
    """
    ranges = _ChannelRanges(traced)
    for batch in images:
        if batch.numel():
            ranges.run(batch.clone())  # the network may write to its input
    modules = dict(traced.named_modules())
    for stream in _streams(traced, ranges.shapes, modules):
        if stream.fixed or not stream.writers or not stream.readers:
            continue
        if (scale := _scales([ranges.largest[node] for node in stream.nodes if _has_range(node, modules)])) is None:
            continue
        for layer in stream.writers:
            layer.weight = _like(layer.weight, layer.weight / scale.view(-1, *[1] * (layer.weight.dim() - 1)))
            if layer.bias is not None:
                layer.bias = _like(layer.bias, layer.bias / scale)
        for layer in stream.readers:
            layer.weight = _like(layer.weight, layer.weight * _of_inputs(layer, scale))


def _like(parameter: Tensor, value: Tensor) -> nn.Parameter:
    """Another parameter, since modules may share one."""
    return nn.Parameter(value.to(parameter.dtype), parameter.requires_grad)


class _ChannelRanges(fx.Interpreter):
    """Runs images and records the shape and the largest |x| of each channel, [C], of results [B, C, ...]."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # errors stay one sentence
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.largest: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.numel():
            largest = value.detach().transpose(0, 1).flatten(1).abs().amax(1).float()
            self.shapes[n] = value.shape
            before = self.largest.get(n, largest)
            self.largest[n] = torch.maximum(before, largest) if before.shape == largest.shape else largest
        return value


def _scales(largest: list[Tensor]) -> Tensor | None:
    """The scales [C] of a stream, from the ranges of its tensors; None where they show none."""
    if not largest or not all(bool(r.isfinite().all()) and bool(r.any()) for r in largest):
        return None
    relative = torch.stack([r / r.amax() for r in largest]).amax(0)
    return torch.where(relative > 0, relative.clamp(min=_SMALLEST), 1.0)  # a channel that no image shows stays as it is


def _of_inputs(layer: Layer, scale: Tensor) -> Tensor:
    """Scales [C] of the input channels in the shape of the weight, [Co, C / groups, 1, 1]."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    rows = scale.view(groups, 1, -1).expand(-1, layer.weight.shape[0] // groups, -1).flatten(0, 1)
    return rows.view(*layer.weight.shape[:2], *[1] * (layer.weight.dim() - 2))


def _streams(traced: fx.GraphModule, shapes: Mapping[fx.Node, torch.Size], modules: Mapping[str, nn.Module]) -> list[_Stream]:
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    read = read_modules(traced.graph)
    stream_of: dict[fx.Node, _Stream] = {}

    def stream(node: fx.Node) -> _Stream:
        return stream_of.setdefault(node, _Stream([node], fixed=node not in shapes))

    def join(a: fx.Node, b: fx.Node) -> None:
        one, other = stream(a), stream(b)
        if one is not other:
            for node in other.nodes:
                stream_of[node] = one
            one.nodes += other.nodes
            one.writers += other.writers
            one.readers += other.readers
            one.fixed |= other.fixed

    for node in traced.graph.nodes:
        module, sources = module_of(node, modules), node.all_input_nodes
        private = called.count(str(node.target)) == 1 and str(node.target) not in read
        if isinstance(module, Layer) and private and _is_plain(module) and len(shapes.get(node, ())) == module.weight.dim():
            stream(node).writers.append(module)
            stream(sources[0]).readers.append(module)
        elif _keeps_channels(node, module, sources, shapes):
            for source in sources:
                join(node, source)
        else:
            for fixed in (node, *sources):
                stream(fixed).fixed = True
    return list(dict.fromkeys(stream_of.values()))


def _has_range(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether codes get a scale for the range of a node: a ReLU goes into the layer before it, and a pool has the scale of its input."""
    users = list(node.users)
    covered = len(users) == 1 and (isinstance(module_of(users[0], modules), nn.ReLU) or calls(users[0], RELUS))
    return not covered and type(module_of(node, modules)) not in _POOLS


def _is_plain(layer: Layer) -> bool:
    """Whether a layer computes with its weight and bias as torch's class does, without hooks."""
    return why_overridden(layer) is None and not parametrize.is_parametrized(layer)


def _keeps_channels(node: fx.Node, module: nn.Module | None, sources: list[fx.Node], shapes: Mapping[fx.Node, torch.Size]) -> bool:
    """Whether a node gives f(x / s) = f(x) / s for any scales s of channels, as of its inputs so of its result."""
    if not sources or not all(source in shapes for source in (node, *sources)):
        return False
    if module is not None and why_overridden(module) is not None:
        return False
    shape, (size, *_) = shapes[node], [shapes[source] for source in sources]
    if type(module) is nn.Flatten or calls(node, _RESHAPES):
        return shape[:2] == size[:2] and size.numel() == size[0] * size[1]
    if calls(node, ADDS):
        return not node.kwargs and len(node.args) == 2 and all(isinstance(a, fx.Node) and shapes[a] == shape for a in node.args)
    return type(module) is nn.ReLU or calls(node, RELUS) or len(size) == _HOMOGENEOUS.get(type(module))
