"""Quantization-aware training: `prepare_qat_`, then any training loop, then `convert_qat_`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError, FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.nn.candidates import candidates
from halfbyte.nn.config import Config, as_config, choose, formats_of
from halfbyte.nn.convert import after_quantizing, check_in_place, put_quantized_
from halfbyte.nn.kinds import kind_of, quantize_weight, relative_error
from halfbyte.nn.modules.conv import fold_of
from halfbyte.nn.modules.expanded import expanded
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.modules.transposed import is_transposed
from halfbyte.nn.report import CONFIG_ATTRIBUTE, add_kept, add_notes
from halfbyte.nn.training.fake_quantized import FakeQuantized, Target, can_be_trained, end_training_, start_training_
from halfbyte.quantizers import CALIBRATED, METHODS

SCALES = ("dynamic", "learned")


def prepare_qat_(model: nn.Module, config: Config | Format | str, *, scales: str = "dynamic") -> nn.Module:
    """Insert fake quantization into each module that `quantize_` with this config would replace, in place.

    The float weights remain, under their names, and are what an optimizer updates. Gradients pass the rounding unchanged (the
    straight-through estimator), except for weights beyond the ends of their grid, which get none (`ops/fake_quantize.py`).

    Fold batch norms before (`fold_batch_norms_`). Experts, EmbeddingBags, Conv3d, transposed and subclassed convolutions stay in floating
    point, which `report(model)` notes; so does a module whose weight its format cannot hold, unless the config is strict or it is the
    only one.

    Args:
        model: The float model.
        config: As for `quantize_`. With compute="int8" activations are rounded as `activation` says, otherwise not. Methods with
            calibration and activations="static" are not supported.
        scales: "dynamic": computed from the weights at each step, by `config.method`. "learned": parameters `weight_scale`, initialized by
            the method and trained with the weights (LSQ); zeros are not trained.

    Returns:
        `model`.

    Raises:
        ArgumentError: As for `quantize_`. Nothing has changed then.
        FormatError: As for `quantize_`. Nothing has changed then.

    Example:
        >>> model = hb.prepare_qat_(nn.Sequential(nn.Linear(32, 4)), "q8_0")
        >>> model(torch.randn(2, 32)).sum().backward()
    """
    config = as_config(config)
    _check(model, config, scales)
    with expanded(model):
        formats = formats_of(choose(candidates(model), config))
        others = [name for name in formats if not can_be_trained(model.get_submodule(name))]
    trained = [(name, module, formats[name]) for name, module in model.named_modules() if name in formats and name not in others]
    if not trained:
        quantized = any(isinstance(module, QuantModule) for module in model.modules())
        remedy = "prepare the float model" if quantized else "pass a model with Linears, convolutions or Embeddings, and do not skip all"
        raise ArgumentError(f"a {type(model).__name__} has nothing in floating point to train for codes: {remedy}")
    codes, kept = _first_codes(trained, config)
    grids = {weight: _first_grid(of) for weight, of in codes.items()} if scales == "learned" else {}
    for name, module, fmt in trained:
        if name in kept:
            continue
        scale, zero = grids.get(id(module.get_parameter("weight")), (None, None))
        start_training_(module, Target(name, fmt, config.method, config.compute, config.activation), scale, zero)
    setattr(model, CONFIG_ATTRIBUTE, config)
    add_kept(model, kept)
    add_notes(model, [f"{name} is not trained for {formats[name]}: quantize_ does the rest after convert_qat_" for name in others])
    return model


def convert_qat_(model: nn.Module) -> nn.Module:
    """Replace each module that `prepare_qat_` prepared by its quantized form, with the codes with which it computes, in place.

    A module whose trained weight its format cannot hold becomes a float module again, and `report(model)` says why, unless the config is
    strict or it is the only one.

    Args:
        model: Prepared by `prepare_qat_`.

    Returns:
        `model`.

    Raises:
        ArgumentError: There is no prepared module, or a weight is NaN or infinite. Nothing has changed then.
        FormatError: A weight does not fit its format, and the config is strict or it is the only one.

    Example:
        >>> type(hb.convert_qat_(hb.prepare_qat_(nn.Sequential(nn.Linear(32, 4)), "q8_0"))[0]).__name__
        'QuantLinear'
    """
    config = getattr(model, CONFIG_ATTRIBUTE, None)
    formats = {name: m.target.format for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, FakeQuantized)}
    if not isinstance(config, Config) or not formats:
        raise ArgumentError(
            f"this {type(model).__name__} was not prepared: call prepare_qat_ first, and convert the module that it was given"
        )

    def codes_of(name: str, module: nn.Module, fmt: Format) -> tuple[Codes, float]:
        assert isinstance(module, FakeQuantized)
        codes = module.codes()
        weight = module.weight.T if is_transposed(module) else module.weight
        return codes, relative_error(weight, codes, kind_of(module), fold_of(module))

    kept = put_quantized_(model, formats, config, codes_of)
    for module in list(model.modules()):
        if isinstance(module, FakeQuantized):
            end_training_(module)
    add_kept(model, kept)
    for finish in after_quantizing:
        finish(model)
    return model


def _check(model: nn.Module, config: Config, scales: str) -> None:
    check_in_place(model)
    if scales not in SCALES:
        raise ArgumentError(f"scales is one of {', '.join(SCALES)}, got {scales!r}")
    if config.method in CALIBRATED:
        raise ArgumentError(f"{config.method} needs calibration, which training does not have: use one of {', '.join(METHODS)}")
    if config.low_rank:
        raise ArgumentError(f"low_rank={config.low_rank} cannot be trained: use 0")
    if config.activations == "static":
        raise ArgumentError('activations="static" cannot be trained: use "dynamic"')


def _first_codes(trained: Sequence[tuple[str, nn.Module, Format]], config: Config) -> tuple[dict[int, Codes], dict[str, str]]:
    """The codes of each weight (by its id) before training, and the modules that stay in floating point with the reasons: formats cannot
    hold their weights. Raises FormatError instead where the config is strict, or where no module would be trained."""
    codes: dict[int, Codes] = {}
    unfit: dict[int, FormatError] = {}
    kept: dict[str, str] = {}
    for name, module, fmt in trained:
        weight = module.get_parameter("weight")
        if id(weight) not in codes and id(weight) not in unfit:
            rows = weight.T if is_transposed(module) else weight
            try:
                codes[id(weight)] = quantize_weight(kind_of(module), rows, fmt, config.method, f"{name}.weight", fold_of(module))
            except FormatError as e:
                if config.strict:
                    raise
                unfit[id(weight)] = e
        if id(weight) in unfit:
            kept[name] = str(unfit[id(weight)])
    if unfit and not codes:
        raise next(iter(unfit.values()))
    return codes, kept


def _first_grid(codes: Codes) -> tuple[nn.Parameter, Tensor | None]:
    """The initial learned scales, and the zeros. A block of zeros would have the scale 0, which no gradient changes: it gets the mean of
    the others, with which its codes mean 0 too."""
    scale = codes.scale.float()
    usual = scale[scale != 0].abs().mean() if bool((scale != 0).any()) else torch.ones((), device=scale.device, dtype=torch.float32)
    return nn.Parameter(torch.where(scale == 0, usual, scale)), codes.zero
