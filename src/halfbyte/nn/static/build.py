"""Convolutional networks that compute on int8 codes from their first layer to their last: how one is built.

    prepare.py    traces the float network (torch.fx) and folds its batch norms
    ranges.py     calibration images show the range of each result, from which its scale follows
    bias_correction.py, equalization.py, moments.py    improve the weights by the same images
    rewriter.py   convolutions and linear layers take and give codes, with their ReLU in the clamp; additions, pools and concatenations work
                  on codes; all else runs in floating point, between a Dequantize and a Quantize (their modules: integer.py)
    network.py    the module that comes of it, which runs the graph

(Jacob et al., Quantization and training of neural networks for efficient integer-arithmetic-only inference, CVPR 2018.)
Called by nn/convert.py for `Config(activations="static")`, and by checkpoint/loading.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError
from halfbyte.formats.spec import as_format
from halfbyte.nn.config import Observer
from halfbyte.nn.described import CALIBRATION_KEY, Calibrated, Scale
from halfbyte.nn.kinds import kind_of, pack_weight, quantize_weight
from halfbyte.nn.modules.quantized import keep_hooks
from halfbyte.nn.report import add_notes
from halfbyte.nn.static.bias_correction import BiasCorrector, Layer, LayerWeight, Weights
from halfbyte.nn.static.equalization import equalize_
from halfbyte.nn.static.moments import InputMoments
from halfbyte.nn.static.network import IntegerNetwork
from halfbyte.nn.static.output_noise import MAX_RELATIVE_NOISE, output_noise
from halfbyte.nn.static.prepare import prepare
from halfbyte.nn.static.ranges import RangeObserver
from halfbyte.nn.static.rewriter import GraphRewriter
from halfbyte.ops.checks import check_floats

# Quantizes the weight of a layer, given its name and the moments of its inputs (None where they are not measured); a string is the reason
# why the layer stays in floating point.
QuantizeLayer = Callable[[str, Layer, InputMoments | None], LayerWeight | str]


class _Batch(NamedTuple):
    """Calibration images, and the `channel_means` of each layer in floating point for them, by its name."""

    images: Tensor
    means: Mapping[str, Tensor]


def calibration_of(model: nn.Module) -> Calibrated | None:
    """Return the calibration record of a network on codes; None for any other model."""
    record = model.meta.get(CALIBRATION_KEY) if isinstance(model, fx.GraphModule) else None
    return record if isinstance(record, Calibrated) else None


@torch.inference_mode(False)  # inference tensors have no gradients, which output_noise.py needs
def build_integer_network(
    model: nn.Module,
    batches: Iterable[object],
    quantize_layer: QuantizeLayer,
    *,
    observer: Observer,
    with_moments: bool = False,
    equalize: bool = False,
) -> IntegerNetwork:
    """Return a copy of `model`, in evaluation, that computes on int8 codes.

    Args:
        model: The float network.
        batches: Images that show what the network meets, each a tensor or a tuple that begins with one, as a DataLoader gives them; one
            hundred images or so. A single tensor is one batch.
        quantize_layer: Returns the quantized weight of a layer.
        observer: How a result's range is chosen, see `RangeObserver`.
        with_moments: Whether `quantize_layer` takes moments.
        equalize: Whether channels get equal ranges first, by `equalize_`; for this and for moments, all batches are kept in memory.

    Raises:
        UnsupportedError: torch.fx cannot trace the model, or codes cannot reproduce what it does.
        ArgumentError: There are no images, or they are not finite.
    """
    traced, normed_layers = prepare(model)
    ranges = RangeObserver(traced, observer, normed_layers, with_moments=with_moments)
    corrector = BiasCorrector(traced, lambda name, layer: quantize_layer(name, layer, ranges.moments.get(name)))
    images: Iterable[Tensor] = map(_images_of, [batches] if isinstance(batches, Tensor) else batches)
    after_moments: list[_Batch] = []  # bias correction takes the weights, and these the moments of all batches
    sample: Tensor | None = None
    with torch.no_grad():
        if equalize:
            images = list(images)
            equalize_(traced, images)
        for x in images:
            sample = x if sample is None and x.numel() else sample
            _observe(ranges, x)
            batch = _Batch(x, dict(ranges.means))
            if with_moments:
                after_moments.append(batch)
            else:
                corrector.collect(*batch)
        for batch in after_moments:
            corrector.collect(*batch)
    if not ranges.has_seen_images or sample is None:
        raise ArgumentError("there are no calibration images of float32, bfloat16 or float16: pass at least one batch")
    count = len(normed_layers)
    notes = (f"{count} batch norm{' was' if count == 1 else 's were'} folded into the layers before",) if count else ()
    return _rewrite(traced, ranges.scales(), corrector.weights(), sample, notes)


def _rewrite(
    traced: fx.GraphModule, scales: Mapping[str, Scale], weights: Weights, images: Tensor, notes: tuple[str, ...]
) -> IntegerNetwork:
    """Return the network on int8 codes, with the activations in floating point to whose rounding the outputs are too sensitive."""
    rewriter = GraphRewriter(traced, scales, weights)
    network = rewriter.rewrite(notes)
    try:
        noise = output_noise(traced, {**scales, **rewriter.rounded}, images)
    except Exception as error:  # no derivative, no memory for gradients, no forward of one image: the network itself works
        notes += (f"how far int8 codes change the outputs was not measured: {_first_line(error)}",)
        return GraphRewriter(traced, scales, weights).rewrite(notes)
    why_float: dict[str, str] = {}
    while too_sensitive := {name: noise[name] for name in rewriter.rounded if not noise.get(name, 0.0) <= MAX_RELATIVE_NOISE}:
        for name, share in too_sensitive.items():
            why_float[name] = f"quantizing {name} to int8 would add {share:.0%} relative error to the outputs"
        scales = {name: scale for name, scale in scales.items() if name not in too_sensitive}
        rewriter = GraphRewriter(traced, scales, weights, why_float)
        network = rewriter.rewrite(notes)
    return network


def rebuild_integer_network(model: nn.Module, record: Calibrated) -> IntegerNetwork:
    """Build the network on codes of a calibration record, with weights of 0, which a checkpoint replaces.

    Args:
        model: The float network, which may be on the meta device.
        record: Of the network on codes that was made of it.

    Raises:
        UnsupportedError: As `build_integer_network`.
        ArgumentError: The record is of another model.
    """
    traced, _ = prepare(model)
    if missing := record.scales.keys() - {node.name for node in traced.graph.nodes}:
        raise ArgumentError(
            f"{type(model).__name__} has no result {min(missing)}, which the network on codes has: pass the model it was made of"
        )

    def zeros(name: str, layer: Layer) -> LayerWeight | str:
        if name in record.floats:
            return ""
        bias = None if layer.bias is None else torch.zeros(layer.bias.shape, dtype=layer.bias.dtype, device="cpu")
        weight = torch.zeros(layer.weight.shape, dtype=torch.float32, device="cpu")
        codes = quantize_weight(kind_of(layer), weight, as_format("int8_channel"), "absmax", name)
        return LayerWeight(pack_weight(layer, codes, "cpu"), bias)

    network = GraphRewriter(traced, record.scales, zeros).rewrite(())
    network.meta[CALIBRATION_KEY] = record
    add_notes(network, record.notes)
    return network


def become_(model: nn.Module, network: IntegerNetwork) -> None:
    """Turn the object `model` into `network`, so that existing references to it refer to the network on codes from now on."""
    keep_hooks(model, network)
    try:
        model.__class__ = network.__class__
    except TypeError as e:
        raise UnsupportedError(
            f"a {type(model).__name__} cannot become another module in place ({e}): wrap it, nn.Sequential(module)"
        ) from e
    model.__dict__ = network.__dict__


def _observe(ranges: RangeObserver, images: Tensor) -> None:
    """Run images through the float network.

    Raises:
        ArgumentError: It does not take their bytes.
    """
    try:
        ranges.run(images.clone())  # the network may write to its input
    except RuntimeError as error:
        if images.dtype != torch.uint8 or isinstance(error, HalfbyteError | torch.OutOfMemoryError):
            raise
        raise ArgumentError(
            f"the network fails for calibration images of {images.dtype} ({_first_line(error)}): pass what it takes, such as "
            "images.float() / 255"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _images_of(batch: object) -> Tensor:
    """Return the images of a batch, checked."""
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(images, Tensor):
        got = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
        raise ArgumentError(
            f"calibration takes batches that are tensors, or tuples that begin with one, got {got}: pass the images alone, such as "
            '(batch["pixel_values"] for batch in loader)'
        )
    if images.is_floating_point():  # others may be ids
        check_floats(images, "calibration takes images")
    return images
