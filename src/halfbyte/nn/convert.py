"""`quantize_`: quantizing a model in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError, FormatError, check_type
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.nn.calibration.calibrate import Calibration, Result, as_calibration, calibrate, calibrated_names, unreached
from halfbyte.nn.calibration.low_rank import Quantization, branches
from halfbyte.nn.calibration.runs import Progress
from halfbyte.nn.candidates import CUSTOM_LOADER, candidates, quantized
from halfbyte.nn.config import Config, Decisions, as_config, check_patterns, decide, formats_of, take_calibration
from halfbyte.nn.described import NOT_A_KIND, RESIDUAL, Candidate
from halfbyte.nn.kinds import FLOAT_MODULES, kind_of, pack_weight, quantize_weight, quantized_module, relative_error
from halfbyte.nn.modules.conv import fold_of
from halfbyte.nn.modules.expanded import expanded
from halfbyte.nn.modules.low_rank import placed
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.report import CONFIG_ATTRIBUTE, NOTES, add_kept, add_notes
from halfbyte.nn.static.bias_correction import Layer, LayerWeight
from halfbyte.nn.static.build import become_, build_integer_network, calibration_of
from halfbyte.nn.static.moments import InputMoments
from halfbyte.nn.training.fake_quantized import check_not_in_training

NO_RESTS: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})

# What takes the place of a method for weights that calibration does not reach: embeddings above all.
UNCALIBRATED = {"gptq": "mse", "awq": "mse"}

# Callbacks for each model that has been quantized or loaded: one for each integration, which adds it when it is imported, under Python's
# import lock. None is removed.
after_quantizing: list[Callable[[nn.Module], None]] = []


def quantize_(
    model: nn.Module,
    config: Config | Format | str,
    calibration: Calibration | Tensor | Iterable[object] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Quantize the linear layers, embeddings, convolutions and stacks of experts of a model, in place.

    These are Linear, Embedding, EmbeddingBag, Conv1d to Conv3d and ConvTranspose1d to ConvTranspose3d.

    An nn.MultiheadAttention becomes one with quantized linear layers (`nn/modules/attention.py`), except in models of transformers.

    With `activations="static"` the model itself becomes a torch.fx.GraphModule in evaluation mode, whose batch norms are folded and whose
    layers keep their names.

    `report(model)` tells what was not quantized, and why. Weights that modules share stay shared. Layers that are quantized already keep
    their codes: a model in which nothing is left to quantize is returned unchanged if each layer is as `config` asks. A module whose weight
    its format cannot hold (nearly zero, or beyond the range of the scales) stays in floating point, unless the config is strict or it is
    the only one.

    Args:
        model: The float model.
        config: What to quantize and how; or the format of all layers.
        calibration: Token ids [passages, tokens], or a Calibration: required by "gptq" and "awq", and used by "mse", if given, to weight
            its errors. The model must then consist of a list of decoder layers. With `activations="static"`: batches of images, such as a
            DataLoader yields. With `low_rank`: inputs of the model, each a tensor, a tuple of arguments or a dict of keyword arguments.
        progress: Called with (decoder layers done, all of them, name) while calibrating.

    Returns:
        `model`.

    Raises:
        ArgumentError: A layer is quantized already, but not as `config` asks; nothing can be quantized; a pattern matches nothing; a weight
            has a NaN; a method lacks its calibration. Nothing has changed then.
        FormatError: A weight does not fit its format, and the config is strict or it is the only one. Nothing has changed then.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> type(model[0]).__name__
        'QuantLinear'
    """
    config, calibration = take_calibration(as_config(config), calibration)
    check_in_place(model)
    with expanded(model, attention=config.activations != "static"):
        return _quantize_expanded_(model, config, calibration, progress)


def nothing_to_quantize(model: nn.Module, decisions: Decisions) -> ArgumentError:
    """The error for a model all of whose modules stay as they are, with the reason of one that a user would expect to be quantized."""
    kept = sorted(decisions.items(), key=lambda item: item[1] == NOT_A_KIND)
    why = f": {kept[0][0] or 'it'} stays as it is ({kept[0][1]})" if kept else ", which has no weights"
    return ArgumentError(f"there is nothing to quantize in {type(model).__name__}{why}")


def _quantize_expanded_(
    model: nn.Module, config: Config, calibration: Calibration | Tensor | Iterable[object] | None, progress: Progress | None
) -> nn.Module:
    found, present = candidates(model), quantized(model)
    decisions = decide(found, config)
    others = _quantized_otherwise(model, present, config)
    formats = formats_of(decisions)
    if present and not formats:
        check_patterns(config, (*found, *present))
        before = getattr(model, CONFIG_ATTRIBUTE, config).method
        if not others and before != config.method:
            others = f"the model is quantized already, and stays as {before} left it where {config.method} is asked for"
        if others:
            raise ArgumentError(f"{others}, and nothing is left to quantize: load the float model again and quantize that")
        return model
    check_patterns(config, found)
    if not formats and any(candidate.reason == CUSTOM_LOADER for candidate in found):
        left = f"{type(model).__name__} is left in floating point: {next(c.name for c in found if c.reason == CUSTOM_LOADER)}"
        warnings.warn(f"{left}: {CUSTOM_LOADER}: quantize a copy of that module alone, and save it with halfbyte.save", stacklevel=3)
        setattr(model, CONFIG_ATTRIBUTE, config)
        return model
    if not formats:
        raise nothing_to_quantize(model, decisions)
    if config.activations == "static":
        return _quantize_static_(model, config, decisions, calibration)
    notes: list[str] = [others] if others else []
    if config.low_rank:
        activation = "row" if config.activation == "image" else config.activation  # see Config
        how = Quantization(config.low_rank, config.method, config.compute, activation)
        replacements, more = branches(model, formats, how, calibration)
        renamed = {f"{name}.{RESIDUAL}" if name in replacements else name: fmt for name, fmt in formats.items()}
        with placed(model, replacements):
            rests = {f"{name}.{RESIDUAL}": branch.rest for name, branch in replacements.items()}
            return _put_(model, renamed, config, None, progress, notes + more, rests)
    return _put_(model, formats, config, calibration, progress, notes)


def _put_(
    model: nn.Module,
    formats: Mapping[str, Format],
    config: Config,
    calibration: Calibration | Tensor | Iterable[object] | None,
    progress: Progress | None,
    notes: list[str],
    rests: Mapping[str, Callable[[], Tensor]] = NO_RESTS,
) -> nn.Module:
    """Quantize the modules that `formats` names. rests: the weights of residuals, each computed when it is needed."""
    results: dict[str, Result] = {}
    if calibration is not None:
        calibrated = calibrated_names(model, formats)
        results = {r.name: r for r in calibrate(model, calibrated, config.method, as_calibration(calibration), progress=progress)}
        missed = sorted(name for name in calibrated if f"{name}.weight" not in results)
        notes += [unreached(name) for name in missed] + [note for result in results.values() for note in result.notes]
    method = UNCALIBRATED.get(config.method, config.method)

    def codes_of(name: str, module: nn.Module, fmt: Format) -> tuple[Codes, float | None]:
        result, weight = results.get(f"{name}.weight"), rests[name]() if name in rests else module.get_parameter("weight")
        if result is not None and isinstance(result.value, Codes):
            return result.value, result.error
        if result is not None and result.reason is not None:
            raise FormatError(result.reason)
        codes = quantize_weight(kind_of(module), weight, fmt, method, f"{name}.weight", fold_of(module))
        return codes, relative_error(weight, codes, kind_of(module), fold_of(module))

    add_kept(model, kept := put_quantized_(model, formats, config, codes_of))
    for name in kept.keys() & rests.keys():
        residual = model.get_submodule(name)
        dtype = residual.get_parameter("weight").dtype
        residual.register_parameter("weight", nn.Parameter(rests[name]().to(dtype), requires_grad=False))
    with torch.no_grad():
        for name, result in results.items():
            if isinstance(result.value, Tensor):
                model.get_parameter(name).copy_(result.value)
    setattr(model, CONFIG_ATTRIBUTE, config)
    add_notes(model, notes)
    for finish in after_quantizing:
        finish(model)
    return model


def put_quantized_(
    model: nn.Module,
    formats: Mapping[str, Format],
    config: Config,
    codes_of: Callable[[str, nn.Module, Format], tuple[Codes, float | None]],
) -> dict[str, str]:
    """Replace each module that `formats` names by its quantized form; `codes_of` returns its codes and their error, or raises FormatError.

    A module with several names stays one module, and weights that modules share stay shared. Returns the modules that stay in floating
    point, as their formats cannot hold their weights, and the reasons. Raises FormatError instead where the config is strict, or where no
    module of the model would be quantized; then nothing has changed.
    """
    kept: dict[str, str] = {}
    unfit: dict[int, FormatError] = {}  # by weight
    by_weight: dict[int, QuantModule] = {}
    by_module: dict[int, QuantModule] = {}
    replacements: list[tuple[str, QuantModule]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in formats:
            continue
        if id(module) not in by_module:
            weight = module.get_parameter("weight")
            if (tied := by_weight.get(id(weight))) is not None:
                packed, error = tied.packed, tied.error
            else:
                try:
                    if id(weight) in unfit:
                        raise unfit[id(weight)]
                    codes, error = codes_of(name, module, formats[name])
                except FormatError as e:
                    if config.strict:
                        raise
                    kept[name], unfit[id(weight)] = str(e), e
                    continue
                packed = pack_weight(module, codes, weight.device)
            quantized = quantized_module(module, packed, weight.dtype, config.compute, config.activation, error)
            by_module[id(module)] = quantized
            by_weight.setdefault(id(weight), quantized)
        replacements.append((name, by_module[id(module)]))
    if unfit and not replacements and not any(isinstance(module, QuantModule) for module in model.modules()):
        raise next(iter(unfit.values()))
    for name, replacement in replacements:
        model.set_submodule(name, replacement)
    return kept


def _quantize_static_(model: nn.Module, config: Config, decisions: Decisions, images: object) -> nn.Module:
    """`quantize_` with static activations: to a network on int8 codes."""
    check_type(images, Iterable, 'activations="static" takes batches of images', "pass a DataLoader or a list of tensors")
    for name, fmt in formats_of(decisions).items():
        layer = isinstance(model.get_submodule(name), nn.Conv1d | nn.Conv2d | nn.Linear)
        if layer and (fmt.zero != "none" or isinstance(fmt.block, int)):
            raise ArgumentError(
                f'activations="static" takes weights with a scale per channel or tensor and no zero, got {fmt} for {name}: use int8_channel'
            )

    kept: dict[str, str] = {}

    def weight_of(name: str, layer: Layer, moments: InputMoments | None) -> LayerWeight | str:
        fmt = decisions[name]
        if isinstance(fmt, str):
            return fmt
        method = UNCALIBRATED.get(config.method, config.method)
        try:
            if moments is None:
                codes = quantize_weight(kind_of(layer), layer.weight, fmt, method, name=f"{name}.weight")
            else:
                codes = moments.codes(layer, fmt, f"{name}.weight")
        except FormatError as e:
            if config.strict:
                raise
            kept[name] = str(e)
            return kept[name]
        error, bias = relative_error(layer.weight, codes), None if layer.bias is None else layer.bias.detach()
        return LayerWeight(pack_weight(layer, codes, layer.weight.device), bias, error)

    batches, with_moments = cast("Iterable[object]", images), config.method == "gptq"
    network = build_integer_network(
        model, batches, weight_of, observer=config.observer, with_moments=with_moments, equalize=config.equalize
    )
    from_ = calibration_of(network)
    assert from_ is not None
    become_(model, network)
    setattr(model, CONFIG_ATTRIBUTE, config)
    setattr(model, NOTES, from_.notes)
    add_kept(model, kept)
    for finish in after_quantizing:
        finish(model)
    return model


def _quantized_otherwise(model: nn.Module, present: Sequence[Candidate], config: Config) -> str | None:
    """The message for quantized modules `present` that are not as `config` asks; None if all are."""
    if present and config.activations == "static" and calibration_of(model) is None:
        return f'{present[0].name} is quantized already with activations="dynamic", not "static"'
    wanted = formats_of(decide(present, config))
    other = [(name, *different) for name, fmt in wanted.items() if (different := _difference(model.get_submodule(name), fmt, config))]
    if not other:
        return None
    (first, has, asked), more = other[0], f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    return f"{first} is quantized already, and stays {has} where {asked} is asked for{more}"


def _difference(module: nn.Module, fmt: Format, config: Config) -> tuple[str, str] | None:
    """The first difference of a quantized module from the request: (what it has, what is asked), or None."""
    assert isinstance(module, QuantModule)
    if module.packed.codes_format != fmt:
        return str(module.packed.codes_format), str(fmt)
    for setting in () if config.activations == "static" else ("compute", "activation"):  # of a head, which has one choice
        has, asked = getattr(module, setting, None), getattr(config, setting)
        if has not in (None, asked) and (has, asked) != ("row", "image"):  # see Config
            return f"{setting}={has!r}", f"{asked!r}"
    return None


def check_in_place(model: nn.Module) -> None:
    """Raise ArgumentError for a model whose modules cannot be replaced, or have been prepared by `prepare_qat_`."""
    check_type(model, nn.Module, "a model is a torch.nn.Module", "use halfbyte.convert for one on disk, halfbyte.quantize for a tensor")
    if isinstance(model, FLOAT_MODULES):
        raise ArgumentError(f"a lone {type(model).__name__} cannot be replaced in place: wrap it, nn.Sequential(module)")
    check_not_in_training(model)
