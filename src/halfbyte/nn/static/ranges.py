"""Calibration of a network on int8 codes: the range of each result, from images that run through the float network.

`RangeObserver` is run by build.py for each batch; its `scales` are what rewriter.py quantizes each result with.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, fx, nn

from halfbyte.errors import ArgumentError, UnsupportedError, unreachable
from halfbyte.nn.config import Observer
from halfbyte.nn.described import LEAST, MOST, Scale
from halfbyte.nn.static.bias_correction import Layer, channel_means
from halfbyte.nn.static.moments import InputMoments, random_places
from halfbyte.nn.static.tracing import first_input, module_of, writes_first_input
from halfbyte.ops.checks import FLOATS

_PERCENTILE = 0.9999  # the share of a result's values inside the range that "percentile" chooses
_SAMPLES = 1 << 16  # values of a result, from each batch, that percentiles and squared errors are computed of
_SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of the whole range, which "mse" tries
_LARGEST = 2.0**60  # results that reach as far, or are NaN or infinite (masks), stay in floating point


def parameter_dtype(traced: fx.GraphModule) -> torch.dtype:
    """Return the dtype of a network's parameters: of the results that become codes."""
    return next((p.dtype for p in traced.parameters()), torch.float32)


class RangeObserver(fx.Interpreter):
    """Runs a traced float network and records what the scales of its results are chosen from.

    Args:
        traced: The network.
        observer: How a range is chosen: "minmax"; "percentile": without the outermost values; "mse": the one whose codes have the least
            squared error.
        normed_layers: Names of the layers into which a batch norm was folded.
        with_moments: Whether second moments of the inputs of layers are measured, too.

    Attributes:
        means: The `channel_means` of each layer, by its name, for the batch that ran last.
        moments: Of the inputs of each layer, by its name, over all batches; empty without `with_moments`.
    """

    def __init__(self, traced: fx.GraphModule, observer: Observer, normed_layers: Set[str], *, with_moments: bool) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # errors stay one sentence
        self.means: dict[str, Tensor] = {}
        self.moments: dict[str, InputMoments] = {}
        self._observer, self._normed_layers, self._with_moments = observer, normed_layers, with_moments
        self._modules = dict(traced.named_modules())
        self._dtype = parameter_dtype(traced)
        # Keys: names of nodes.
        self._ranges: dict[str, tuple[float, float]] = {}
        self._samples: dict[str, list[Tensor]] = {}
        self._stays_float: set[str] = set()

    @property
    def has_seen_images(self) -> bool:
        return bool(self._ranges)

    def run_node(self, n: fx.Node) -> object:
        aliases = self._aliases_read_later(n)
        value = super().run_node(n)
        if changed := [node for node, before in aliases.items() if not torch.equal(self.env[node], before)]:
            raise UnsupportedError(
                f"{n.name} writes to memory that {changed[0].name} shows too and that is read behind it, which codes do not share: "
                "write x = x + y, not x += y, and no activation in place there"
            )
        if isinstance(value, Tensor) and n.op != "output":
            module = module_of(n, self._modules)
            if isinstance(module, Layer):
                self._observe_layer(n, module, value)
            if value.dtype in FLOATS and value.numel():
                self._observe_range(n, value)
        return value

    def _aliases_read_later(self, n: fx.Node) -> dict[fx.Node, Tensor]:
        """Return copies of the tensors in the memory that node n writes to and that are read after it; nothing if n does not write."""
        if not writes_first_input(n, self._modules) or not isinstance(self.env[first_input(n)], Tensor):
            return {}
        written = self.env[first_input(n)].untyped_storage().data_ptr()
        read_later = [(node, x) for node, x in self.env.items() if isinstance(x, Tensor) and any(user > n for user in node.users)]
        return {node: x.clone() for node, x in read_later if x.untyped_storage().data_ptr() == written}

    def _observe_layer(self, n: fx.Node, layer: Layer, result: Tensor) -> None:
        name = str(n.target)
        if name in self._normed_layers and isinstance(layer, nn.Linear) and result.dim() > 2:
            raise UnsupportedError(
                f"{name} gives {list(result.shape)}, whose batch norm is one of rows, not of features: write it with x.transpose(1, 2)"
            )
        if result.numel():
            self.means[name] = channel_means(layer, result)
            if self._with_moments:
                self.moments.setdefault(name, InputMoments()).add(layer, self.env[first_input(n)])

    def _observe_range(self, n: fx.Node, value: Tensor) -> None:
        low, high = (float(bound) for bound in torch.aminmax(value))
        if not -_LARGEST < low <= high < _LARGEST:
            if n.op == "placeholder":
                raise ArgumentError(f"the calibration images hold numbers from {low} to {high}: pass those that the network meets")
            self._stays_float.add(n.name)
        if value.dtype != self._dtype:  # Dequantize gives the network's
            self._stays_float.add(n.name)
        least, largest = self._ranges.get(n.name, (low, high))
        self._ranges[n.name] = min(low, least), max(high, largest)
        if self._observer != "minmax":
            self._samples.setdefault(n.name, []).append(_sample(value))

    def scales(self) -> dict[str, Scale]:
        """Return the scale of each result that can become codes, by the name of its node."""
        return {name: self._scale(name) for name in self._ranges if name not in self._stays_float}

    def _scale(self, name: str) -> Scale:
        low, high = self._ranges[name]
        match self._observer:
            case "minmax":
                return Scale.of_range(low, high)
            case "percentile":
                tail = (1 - _PERCENTILE) / 2
                ordered = torch.cat(self._samples[name]).sort().values
                last = len(ordered) - 1
                return Scale.of_range(float(ordered[round(tail * last)]), float(ordered[round((1 - tail) * last)]))
            case "mse":
                samples = torch.cat(self._samples[name])
                choices = [Scale.of_range(low * shrink, high * shrink) for shrink in _SHRINKS]
                return min(choices, key=lambda scale: float(rounding_error(samples, scale).square().sum()))
            case _:
                raise unreachable(self._observer, "the observer of a static network,")


def _sample(value: Tensor) -> Tensor:
    """Return up to `_SAMPLES` values of a tensor, float32, at random places."""
    flat = value.detach().flatten()
    return flat[random_places(flat.numel(), _SAMPLES, flat.device)].to(torch.float32, copy=True)  # later operations write in place


def rounding_error(x: Tensor, scale: Scale) -> Tensor:
    """Return dequantize(quantize(x)) − x, float32."""
    x = x.float()
    codes = (x / scale.step + scale.zero).round().clamp(LEAST, MOST)
    return (codes - scale.zero) * scale.step - x
