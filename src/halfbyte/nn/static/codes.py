"""Convolutional networks that compute on int8 codes from their first layer to their last.

The network is traced (torch.fx), its batch norms are folded, and calibration images show the range of each result. Then convolutions
and linear layers take and give codes, with their ReLU in the clamp; additions, pools and concatenations work on codes; and what else
there is runs in floating point, between a Dequantize and a Quantize. (Jacob et al., Quantization and training of neural networks for
efficient integer-arithmetic-only inference, CVPR 2018.)
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from halfbyte.errors import ArgumentError, UnsupportedError, unreachable
from halfbyte.formats.spec import as_format
from halfbyte.layouts.base import Packed
from halfbyte.nn.config import Observer
from halfbyte.nn.described import LEAST, MOST, Calibrated, Scale
from halfbyte.nn.kinds import kind_of, pack_weight, quantize_weight
from halfbyte.nn.modules.quantized import QuantLinear, keep_hooks, why_not_hooks
from halfbyte.nn.static.batchnorm import fold_
from halfbyte.nn.static.bias_correction import BiasCorrector, Layer, LayerWeight, Weights, channel_means
from halfbyte.nn.static.equalization import equalize_
from halfbyte.nn.static.integer import (
    AveragePool,
    Dequantize,
    IntegerConv1d,
    IntegerConv2d,
    IntegerLinear,
    MaxPool,
    Quantize,
    Requantize,
    clamp_codes,
    nearest,
)
from halfbyte.nn.static.memory_format import MemoryFormats
from halfbyte.nn.static.moments import InputMoments
from halfbyte.nn.static.network import IntegerNetwork
from halfbyte.nn.static.tracing import (
    ADDS,
    RELUS,
    Tracer,
    copy_node,
    erase_identities,
    graph_of,
    module_of,
    why_overridden,
    writes_first_input,
)
from halfbyte.ops.checks import FLOATS, check_floats
from halfbyte.ops.conv import functions as conv

# `Weights` that also take the moments of the layer's inputs, None where they are not measured.
CalibratedWeights = Callable[[str, Layer, InputMoments | None], LayerWeight | str]

_PERCENTILE = 0.9999  # of a result's values lie inside the range that "percentile" chooses
_SAMPLES = 1 << 16  # of a result, from one batch, that percentiles and squared errors are made of
_LARGEST = 2.0**60  # results that reach as far, or are NaN or infinite (masks), stay in floating point
_READ = "the network reads its weight or bias, which a layer on codes has no longer"
_META = "halfbyte"  # the key in a GraphModule's `meta`, which copies keep

_SHAPES = (torch.flatten, torch.reshape, "flatten", "view", "reshape", "permute", "contiguous", "squeeze", "unsqueeze")
_AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
# Functions, and the modules that take the same numbers.
_MODULES: dict[object, type[nn.Module]] = {
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
_MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")  # the functions' order


def calibrated(model: nn.Module) -> Calibrated | None:
    """What a network on codes was made from; None for any other model."""
    found = model.meta.get(_META) if isinstance(model, fx.GraphModule) else None
    return found if isinstance(found, Calibrated) else None


def on_codes(
    model: nn.Module,
    images: Iterable[object],
    weights: CalibratedWeights,
    *,
    observer: Observer,
    moments: bool = False,
    equalize: bool = False,
) -> fx.GraphModule:
    """A copy of `model`, in evaluation, that computes on int8 codes.

    images      batches that show what the network meets, each a tensor or a tuple that begins with one, as a DataLoader gives them;
                one hundred images or so
    observer    how a result's range is chosen: "minmax"; "percentile": without the outermost values; "mse": the one with the least
                squared error of the codes
    moments     whether `weights` takes the moments of the inputs of a layer
    equalize    whether channels get equal ranges first, by `equalize_`; for either, images are kept in memory

    Raises UnsupportedError for a model that torch.fx cannot trace, ArgumentError without images.
    """
    traced, folded = _traced(model)
    range_observer = _RangeObserver(traced, observer, {layer for layer, _ in folded}, moments)
    corrector = BiasCorrector(traced, lambda name, layer: weights(name, layer, range_observer.moments.get(name)))
    batches: Iterable[Tensor] = map(_image_of, [images] if isinstance(images, Tensor) else images)
    kept: list[tuple[Tensor, Mapping[str, Tensor]]] = []
    with torch.no_grad():
        if equalize:
            batches = list(batches)
            equalize_(traced, batches)
        for image in batches:
            range_observer.run(image)
            if moments:
                kept.append((image, dict(range_observer.means)))
            else:
                corrector.collect(image, range_observer.means)
        for image, means in kept:
            corrector.collect(image, means)
    if not range_observer.seen:
        raise ArgumentError("there are no calibration images of float32, bfloat16 or float16: pass at least one batch")
    notes = (f"{len(folded)} batch norm{' was' if len(folded) == 1 else 's were'} folded into the layers before",) if folded else ()
    return _Rewriter(traced, range_observer.scales(), corrector.weights()).result(notes)


def rebuilt(model: nn.Module, calibration_record: Calibrated) -> fx.GraphModule:
    """Build the int8 network of a calibration record from the float model, which may be on the meta device; its weights are 0."""
    traced, _ = _traced(model)
    if odd := calibration_record.scales.keys() - {node.name for node in traced.graph.nodes}:
        raise ArgumentError(
            f"{type(model).__name__} has no result {min(odd)}, which the network on codes has: pass the model it was made of"
        )

    def zeros(name: str, layer: Layer) -> LayerWeight | str:
        if name in calibration_record.floats:
            return ""
        bias = None if layer.bias is None else torch.zeros(layer.bias.shape, dtype=layer.bias.dtype, device="cpu")
        weight = torch.zeros(layer.weight.shape, dtype=torch.float32, device="cpu")
        codes = quantize_weight(kind_of(layer), weight, as_format("int8_channel"), "absmax", name)
        return LayerWeight(pack_weight(layer, codes, "cpu"), bias)

    network = _Rewriter(traced, calibration_record.scales, zeros).result(())
    network.meta[_META] = calibration_record
    return network


def replace_(model: nn.Module, network: fx.GraphModule) -> None:
    """Turns the object `model` into the network `network`, so that existing references to it now refer to the network on codes."""
    keep_hooks(model, network)
    try:
        model.__class__ = network.__class__
    except TypeError as e:
        raise UnsupportedError(
            f"a {type(model).__name__} cannot become another module in place ({e}): wrap it, nn.Sequential(module)"
        ) from e
    model.__dict__ = network.__dict__


def _traced(model: nn.Module) -> tuple[fx.GraphModule, list[tuple[str, str]]]:
    """A copy of the model as a graph, without what does nothing in evaluation, and the batch norms that were folded."""
    if "forward" in vars(model):
        raise UnsupportedError(
            f"this {type(model).__name__} has a forward of its own, set on the object, which is not traced: wrap it, nn.Sequential(module)"
        )
    model = copy.deepcopy(model).eval()
    graph = graph_of(model, "compute on int8 codes", defaults=True)
    _check_inputs(model, graph)
    _check_hooks(model)
    folded = fold_(model, [graph])
    traced = fx.GraphModule(model, graph, type(model).__name__)
    modules = dict(traced.named_modules())
    erase_identities(traced.graph, modules)
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("out") is not None:
            raise UnsupportedError(f"{node.name} writes into other memory (out=), which codes do not share: write y = torch.add(x, y)")
        if writes_first_input(node, modules):
            later_users = {user for user in _first(node).users if user > node}  # who read what it wrote
            _first(node).replace_all_uses_with(node, later_users.__contains__)
        _make_module(node, traced)
    traced.recompile()
    return traced, folded


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


def _make_module(node: fx.Node, traced: fx.GraphModule) -> None:
    """An activation or a pool that is called as a function becomes the module that does the same, under the node's name."""
    if node.op != "call_function" or not (form := _MODULES.get(node.target)) or hasattr(traced, node.name):
        return
    settings = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    source, *numbers = node.args
    ends = dict(zip(("min_val", "max_val"), numbers, strict=False)) | settings
    if form is nn.Hardtanh:
        if (ends.get("min_val", -1.0), ends.get("max_val", 1.0)) != (0.0, 6.0):
            return
        form, numbers, settings = nn.ReLU6, [], {}
    if form in (nn.MaxPool1d, nn.MaxPool2d):
        numbers, settings = [], dict(zip(_MAX_POOL, numbers, strict=False)) | settings
        settings["stride"] = settings.get("stride") or None
    if any(isinstance(value, fx.Node) for value in (*numbers, *settings.values())):
        return
    traced.add_submodule(node.name, form(*numbers, **settings))
    node.op, node.target, node.args, node.kwargs = "call_module", node.name, (source,), {}


def _image_of(batch: object) -> Tensor:
    """The images of a batch, checked."""
    image = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(image, Tensor):
        raise ArgumentError(f"calibration takes batches that are tensors, or tuples that begin with one, got a {type(batch).__name__}")
    if image.is_floating_point():  # others may be ids
        check_floats(image, "calibration takes images")
    return image


class _RangeObserver(fx.Interpreter):
    """Runs the network and remembers, of each tensor, what its range is chosen from."""

    def __init__(self, traced: fx.GraphModule, observer: Observer, folded: Set[str], moments: bool) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # errors stay one sentence
        self.observer, self.folded = observer, folded
        self.modules = dict(traced.named_modules())
        self.non_finite: set[str] = set()
        self.dtype = _dtype(traced)
        self.seen: dict[str, tuple[float, float]] = {}
        self.samples: dict[str, list[Tensor]] = {}
        self.takes_moments, self.moments = moments, dict[str, InputMoments]()
        self.means: dict[str, Tensor] = {}  # of the outputs of each layer, for the last images

    def run_node(self, n: fx.Node) -> object:
        views = self._views(n)
        value = super().run_node(n)
        if changed := [node for node, before in views.items() if not torch.equal(self.env[node], before)]:
            raise UnsupportedError(
                f"{n.name} writes to memory that {changed[0].name} shows too and that is read behind it, which codes do not share: "
                "write x = x + y, not x += y, and no activation in place there"
            )
        if n.target in self.folded and isinstance(self.modules[str(n.target)], nn.Linear) and value.dim() > 2:
            raise UnsupportedError(
                f"{n.target} gives {list(value.shape)}, whose batch norm is one of rows, not of features: write it with x.transpose(1, 2)"
            )
        if isinstance(layer := module_of(n, self.modules), Layer) and isinstance(value, Tensor) and value.numel():
            self.means[str(n.target)] = channel_means(layer, value)
            if self.takes_moments:
                self.moments.setdefault(str(n.target), InputMoments()).add(layer, self.env[_first(n)])
        if isinstance(value, Tensor) and value.dtype in FLOATS and value.numel() and n.op != "output":
            low, high = (float(end) for end in torch.aminmax(value))
            if value.dtype != self.dtype:  # that of all results that codes stand for
                self.non_finite.add(n.name)
            if not -_LARGEST < low <= high < _LARGEST:
                if n.op == "placeholder":
                    raise ArgumentError(f"the calibration images hold numbers from {low} to {high}: pass those that the network meets")
                self.non_finite.add(n.name)
            before = self.seen.get(n.name, (low, high))
            self.seen[n.name] = min(low, before[0]), max(high, before[1])
            if self.observer != "minmax":
                flat = value.detach().flatten().float()
                self.samples.setdefault(n.name, []).append(flat[:: max(1, flat.numel() // _SAMPLES)].clone())
        return value

    def _views(self, n: fx.Node) -> dict[fx.Node, Tensor]:
        """For a node n that writes to its input: copies of the other tensors in the same memory that are read after n."""
        if not writes_first_input(n, self.modules) or not isinstance(self.env[_first(n)], Tensor):
            return {}
        read = [(node, value) for node, value in self.env.items() if isinstance(value, Tensor) and any(user > n for user in node.users)]
        written = self.env[_first(n)].untyped_storage().data_ptr()
        return {node: value.clone() for node, value in read if value.untyped_storage().data_ptr() == written}

    def scales(self) -> dict[str, Scale]:
        return {name: self._scale(name) for name in self.seen if name not in self.non_finite}

    def _scale(self, name: str) -> Scale:
        low, high = self.seen[name]
        match self.observer:
            case "minmax":
                return Scale.of_range(low, high)
            case "percentile":
                tail = (1 - _PERCENTILE) / 2
                ordered = torch.cat(self.samples[name]).sort().values
                last = len(ordered) - 1
                return Scale.of_range(float(ordered[round(tail * last)]), float(ordered[round((1 - tail) * last)]))
            case "mse":
                samples = torch.cat(self.samples[name])
                choices = [Scale.of_range(low * part, high * part) for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)]
                return min(choices, key=lambda scale: _squared_error(samples, scale))
            case _:
                raise unreachable(self.observer, "the observer of a static network,")


def _dtype(traced: fx.GraphModule) -> torch.dtype:
    return next((p.dtype for p in traced.parameters()), torch.float32)


def _squared_error(x: Tensor, scale: Scale) -> float:
    codes = (x / scale.step + scale.zero).round().clamp(LEAST, MOST)
    return float(((codes - scale.zero) * scale.step - x).square().sum())


class _Rewriter:
    """Makes the graph on codes, node by node."""

    def __init__(self, traced: fx.GraphModule, scales: Mapping[str, Scale], weights: Weights) -> None:
        self.traced, self.scales, self.weights = traced, scales, weights
        self.modules = dict(traced.named_modules())
        self.read = {str(node.target).rpartition(".")[0] for node in traced.graph.nodes if node.op == "get_attr"}
        self.dtype = _dtype(traced)
        self.graph = fx.Graph()
        self.root: dict[str, object] = {}
        self.float_of: dict[fx.Node, fx.Node] = {}
        self.codes_of: dict[fx.Node, tuple[fx.Node, Scale]] = {}
        self.paddings: dict[fx.Node, tuple[int, int, int, int]] = {}  # (top, bottom, left, right), which a convolution does
        self.floats: list[str] = []
        self.notes: list[str] = []

    def result(self, notes: tuple[str, ...]) -> fx.GraphModule:
        for node in self.traced.graph.nodes:
            self._node(node)
        for node, floats in self.float_of.items():
            if not floats.users and self._is_saturation(node):  # only its codes are read
                self.graph.erase_node(floats)
        self._activate_in_place()
        self._restore_formats()
        network = IntegerNetwork(self.root, self.graph, type(self.traced).__name__)
        network.meta[_META] = Calibrated(dict(self.scales), tuple(self.floats), (*notes, *self.notes))
        return network.eval()

    def _activate_in_place(self) -> None:
        """Let a ReLU write to the result of the float convolution before it, which nothing else reads: new memory would cost more."""
        calls = Counter(node.target for node in self.graph.nodes)
        for node, floats in self.float_of.items():
            module = module_of(node, self.modules)
            if not isinstance(module, nn.ReLU | nn.ReLU6) or why_overridden(module) or calls[floats.target] != 1:
                continue
            source, conv_layer = _first(node), module_of(_first(node), self.modules)
            is_conv = isinstance(conv_layer, nn.Conv1d | nn.Conv2d) and why_overridden(conv_layer) is None and source not in self.codes_of
            if is_conv and list(self.float_of[source].users) == [floats]:
                self.root[str(floats.target)] = type(module)(inplace=True)

    def _restore_formats(self) -> None:
        """Restore torch's memory format in what leaves the integer layers, which write channels_last."""
        modules = {name: module for name, module in self.root.items() if isinstance(module, nn.Module)}

        def writes_channels_last(node: fx.Node) -> bool:
            return isinstance(module_of(node, modules), IntegerConv2d | MaxPool | AveragePool)

        def keeps_format(node: fx.Node) -> bool:
            return node.target in (nearest, clamp_codes) or isinstance(module_of(node, modules), Quantize | Dequantize | Requantize)

        def ignores_format(node: fx.Node) -> bool:
            return isinstance(module_of(node, modules), IntegerLinear | QuantLinear)

        MemoryFormats(self.graph, modules, writes_channels_last, keeps_format, ignores_format).restore()

    # Either form of a node's result, made where it is first needed

    def _codes(self, node: fx.Node) -> tuple[fx.Node, Scale]:
        if node not in self.codes_of:
            scale = self.scales[node.name]
            floats = self._floats(_first(node) if self._is_saturation(node) else node)
            self.codes_of[node] = self._call(node, Quantize(scale), floats, name=f"{node.name}_quantize"), scale
        return self.codes_of[node]

    def _is_saturation(self, node: fx.Node) -> bool:
        """Whether a node is a ReLU or ReLU6 whose codes are those of its input, saturated at the ends of its range."""
        module, scale = module_of(node, self.modules), self.scales.get(node.name)
        plain = node.target in RELUS or (isinstance(module, nn.ReLU | nn.ReLU6) and why_overridden(module) is None)
        return plain and bool(_sources(node)) and scale is not None and _relu_clamp(scale, module) == (LEAST, MOST)

    def _floats(self, node: fx.Node) -> fx.Node:
        if node not in self.float_of:
            codes, scale = self.codes_of[node]
            self.float_of[node] = self._call(node, Dequantize(scale, self.dtype), codes, name=f"{node.name}_dequantize")
        return self.float_of[node]

    def _call(self, node: fx.Node, module: nn.Module, *inputs: fx.Node, name: str | None = None) -> fx.Node:
        """`module` in the place of `node`: a layer keeps its name, unless it has been called before."""
        name = name or (str(node.target) if node.op == "call_module" else node.name)
        if name in self.root:
            name = node.name
        self.root[name] = module
        return self.graph.call_module(name, inputs)

    # One node

    def _node(self, node: fx.Node) -> None:
        if node in self.codes_of:  # an activation that went into the layer before it
            return
        module = module_of(node, self.modules)
        known = self.scales.keys() >= {node.name, *(source.name for source in _sources(node))}
        make, reason = self._maker(node, module) if known else None, ""
        if make in (self._add, self._relu) and not any(source in self.codes_of for source in _sources(node)):
            make = None  # of numbers: codes of the result have a smaller step
        given: nn.Module | tuple[Layer, LayerWeight] | None = module
        if make is not None and module is not None and (why_not := why_overridden(module)) and not isinstance(module, Layer):
            make, reason = None, f": {why_not}"
        if make is not None and isinstance(module, Layer):
            weight = _READ if str(node.target) in self.read else self.weights(str(node.target), module)
            if isinstance(weight, str):
                self.floats.append(str(node.target))
                make, reason = None, f": {weight}"
            else:
                given = module, weight
        if isinstance(module, nn.Linear) and isinstance(given, tuple) and self._is_head(node):
            weight = given[1]
            assert isinstance(weight.packed, Packed)
            linear = QuantLinear(weight.packed, weight.bias, "float", dtype=module.weight.dtype, error=weight.error)
            self.float_of[node] = self._call(node, linear, self._floats(_first(node)))
            return
        if make is not None:
            replacement, scale, covers = make(node, given)
            for covered in (node, *covers):
                self.codes_of[covered] = replacement, scale
            return
        if node.op not in ("placeholder", "output", "get_attr"):
            what = type(module).__name__ if module is not None else getattr(node.target, "__name__", node.target)
            self.notes.append(f"{node.target if module is not None else node.name} ({what}) runs in floating point{reason}")
        self.float_of[node] = copy_node(node, self.traced, self.graph, self.root, self._floats)

    def _is_head(self, node: fx.Node) -> bool:
        """Whether a node is a linear layer whose result nothing on codes reads: logits that differ by less than a step of codes matter."""
        users = [user for user in node.users if user.op != "output"]
        return isinstance(module_of(node, self.modules), nn.Linear) and not any(self._maker(u, module_of(u, self.modules)) for u in users)

    def _maker(self, node: fx.Node, module: nn.Module | None) -> Callable[..., tuple[fx.Node, Scale, list[fx.Node]]] | None:
        """The function that makes a node on codes; None for an operation that has none."""
        target = node.target
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d | nn.Conv2d) and module.padding_mode == "zeros"):
            return self._layer
        if target in ADDS and len(_sources(node)) == 2 and not node.kwargs:
            return self._add
        if isinstance(module, nn.ReLU | nn.ReLU6) or target in RELUS:
            return self._relu
        if isinstance(module, nn.Flatten) or target in _SHAPES:
            return None if any(isinstance(size, torch.dtype) for size in (*node.args, *node.kwargs.values())) else self._as_it_is
        if isinstance(module, nn.MaxPool1d | nn.MaxPool2d):
            return self._largest
        if isinstance(module, nn.ZeroPad2d) and min(module.padding) >= 0 and all(self._is_convolution(user) for user in node.users):
            return self._padding
        if isinstance(module, _AVERAGE_POOLS):
            return self._average
        if target is torch.cat and not isinstance(node.args[0], fx.Node):
            return self._concatenation
        mode = module.mode if isinstance(module, nn.Upsample) else node.kwargs.get("mode") if target is nn.functional.interpolate else ""
        if mode in ("nearest", "nearest-exact"):
            return self._nearest
        return None

    def _activation(self, node: fx.Node) -> tuple[Scale, tuple[int, int], list[fx.Node]]:
        """The scale and the clamp of a layer's result, with the ReLU behind it where the result has no other reader."""
        users = list(node.users)
        if len(users) == 1 and users[0].name in self.scales:
            module = module_of(users[0], self.modules)
            if (isinstance(module, nn.ReLU | nn.ReLU6) and why_overridden(module) is None) or users[0].target in RELUS:
                scale = self.scales[users[0].name]
                return scale, _relu_clamp(scale, module), users
        return self.scales[node.name], (LEAST, MOST), []

    def _layer(self, node: fx.Node, layer: tuple[Layer, LayerWeight]) -> tuple[fx.Node, Scale, list[fx.Node]]:
        (x, source), (result, clamp, covers), (module, weight) = self._codes(_first(node)), self._activation(node), layer
        form = IntegerLinear if isinstance(module, nn.Linear) else IntegerConv1d if isinstance(module, nn.Conv1d) else IntegerConv2d
        window = None if isinstance(module, nn.Linear) else conv.module_window(module)
        if window is not None and (pad := self.paddings.get(_first(node))) is not None:
            (a, b, c, d), (e, f, g, h) = window.padding, pad
            window = replace(window, padding=(a + e, b + f, c + g, d + h))
        integer_layer = form(weight.packed, weight.bias, source, result, clamp, window, dtype=module.weight.dtype, error=weight.error)
        return self._call(node, integer_layer, x), result, covers

    def _is_convolution(self, node: fx.Node) -> bool:
        """Whether a node becomes a convolution on codes, which pads with zeros by itself."""
        module = module_of(node, self.modules)
        return (
            isinstance(module, nn.Conv2d)
            and {node.name, _first(node).name} <= self.scales.keys()
            and self._maker(node, module) == self._layer
            and why_overridden(module) is None
            and str(node.target) not in self.read
            and not isinstance(self.weights(str(node.target), module), str)
        )

    def _padding(self, node: fx.Node, pad: nn.ZeroPad2d) -> tuple[fx.Node, Scale, list[fx.Node]]:
        left, right, top, bottom = pad.padding
        self.paddings[node] = top, bottom, left, right
        return *self._codes(_first(node)), []

    def _add(self, node: fx.Node, _: None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        (a, scale_a), (b, scale_b) = (self._codes(n) for n in node.args if isinstance(n, fx.Node))
        result, clamp, covers = self._activation(node)
        return self._call(node, Requantize((scale_a, scale_b), result, clamp), a, b), result, covers

    def _relu(self, node: fx.Node, module: nn.Module | None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        x, scale = self._codes(_first(node))
        return self.graph.call_function(clamp_codes, (x, *_relu_clamp(scale, module))), scale, []

    def _as_it_is(self, node: fx.Node, module: nn.Module | None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        """For operations that only move codes."""
        x, scale = self._codes(_first(node))
        if module is not None:
            return self._call(node, module, x), scale, []
        more, named = fx.node.map_arg((node.args[1:], dict(node.kwargs)), self._floats)  # sizes may be nodes too
        return self.graph.create_node(node.op, node.target, (x, *more), named), scale, []

    def _nearest(self, node: fx.Node, module: nn.Upsample | None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        x, scale = self._codes(_first(node))
        if module is not None:
            settings = {name: getattr(module, name) for name in ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")}
            return self.graph.call_function(nearest, (x,), settings), scale, []
        more, named = fx.node.map_arg((node.args[1:], dict(node.kwargs)), self._floats)  # sizes may be nodes too
        return self.graph.call_function(nearest, (x, *more), named), scale, []

    def _largest(self, node: fx.Node, pool: nn.MaxPool1d | nn.MaxPool2d) -> tuple[fx.Node, Scale, list[fx.Node]]:
        x, scale = self._codes(_first(node))
        return self._call(node, MaxPool(pool), x), scale, []

    def _average(self, node: fx.Node, pool: nn.Module) -> tuple[fx.Node, Scale, list[fx.Node]]:
        x, scale = self._codes(_first(node))
        # Means lie in the range of what they are of; sums by another divisor do not.
        result = scale if getattr(pool, "divisor_override", None) is None else self.scales[node.name]
        return self._call(node, AveragePool(pool, scale, result), x), result, []

    def _concatenation(self, node: fx.Node, _: None) -> tuple[fx.Node, Scale, list[fx.Node]]:
        result, parts = self.scales[node.name], []
        for i, source in enumerate(node.args[0]):  # type: ignore[arg-type]
            x, scale = self._codes(source)
            parts.append(x if scale == result else self._call(node, Requantize((scale,), result), x, name=f"{node.name}_{i}"))
        return self.graph.call_function(torch.cat, (parts, *node.args[1:]), dict(node.kwargs)), result, []


def _relu_clamp(scale: Scale, module: nn.Module | None) -> tuple[int, int]:
    """The ends of a ReLU or ReLU6, in codes."""
    return scale.code(0), scale.code(6) if isinstance(module, nn.ReLU6) else MOST


def _sources(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node computes with: the first operand, both of a sum, all that are concatenated."""
    operands = node.args if node.target in ADDS else node.args[0] if node.target is torch.cat and node.args else node.args[:1]
    return [operand for operand in operands if isinstance(operand, fx.Node)] if isinstance(operands, tuple | list) else []


def _first(node: fx.Node) -> fx.Node:
    assert isinstance(node.args[0], fx.Node)
    return node.args[0]
