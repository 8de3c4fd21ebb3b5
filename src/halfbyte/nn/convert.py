"""Quantizing a model in place: the choice of modules and formats, and the report."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from halfbyte.errors import ArgumentError, UnsupportedError, check_type
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.spec import Format, as_format
from halfbyte.layouts.convolution import PackedConv, channels_last
from halfbyte.nn.calibrate import Calibration, Progress, Result, as_calibration, calibrate, check_given, unreached
from halfbyte.nn.expanded import expanded
from halfbyte.nn.experts import MixtureOfExperts, StackedExperts, stacks
from halfbyte.nn.experts import why_not as why_not_experts
from halfbyte.nn.fake_quantized import FakeQuantized, check_not_in_training
from halfbyte.nn.kinds import CONVOLUTIONS, FLOAT_MODULES, kind_of, pack_weight, quantize_weight, quantized_module
from halfbyte.nn.modules import QuantModule, check_compute, has_hooks
from halfbyte.nn.report import Report, Row, remarks
from halfbyte.nn.scaled import factor_of
from halfbyte.nn.sensitivity import measure_losses
from halfbyte.nn.static import OBSERVERS, LayerWeight, calibrated, on_codes, replace_
from halfbyte.quantizers import CALIBRATED, METHODS
from halfbyte.quantizers.mixed import allocate

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # in which the kernels take activations
NOT_A_KIND = "only Linear, Embedding, EmbeddingBag, Conv1d, Conv2d and experts are quantized"
STACKED = "it has stacked weights, and is not a module of experts as transformers builds them"
_NARROW = 16  # channels of a tap: with fewer per block, scales would take more space than codes
_ROWS = 128  # of a weight, from which its error is estimated: all would take longer than quantizing
CONFIG_ATTRIBUTE = "_halfbyte_config"  # the attribute of a model with the Config that it was quantized by
_NOTES = "_halfbyte_notes"  # and the attribute with further notes for the report

# What takes the place of a method for weights that calibration does not reach: embeddings above all.
UNCALIBRATED = {"gptq": "mse", "awq": "mse"}
# What Config.auto chooses from.
AUTO_FORMATS = ("int4_g128", "int4_g64", "q4_0", "q8_0")

# What a Config says by its format or by skip, in the words of bitsandbytes, AutoAWQ, GPTQModel, quanto and torchao.
_IN_THE_FORMAT = {"load_in_4bit", "load_in_8bit", "bits", "w_bit", "weight_bits", "weights", "group_size", "q_group_size", "quant_type"}
_IN_SKIP = {"modules_to_not_convert", "llm_int8_skip_modules", "ignore", "exclude"}

# Callbacks for each model that has been quantized or loaded (see integrations).
finished: list[Callable[[nn.Module], None]] = []


@dataclass(frozen=True)
class Config:
    """What to quantize and how.

    format      of every Linear and convolution; convolutions whose taps have under 16 channels (stems, depthwise) take int8_channel
                where this one has blocks
    embedding   of every Embedding and EmbeddingBag; None: the same as `format`
    method      how codes and scales are chosen: "absmax", "mse", "hqq", or, with calibration, "gptq" or "awq" (see docs/calibration.md)
    skip        patterns of module names that stay as they are
    overrides   pattern -> format, for modules that need another one; the first pattern that matches decides
    compute, activation   see QuantLinear and conv2d; "image" is for convolutions with one scale per channel or tensor and no zero, and
                means "row" for all other modules
    activations  "dynamic": as `compute` and `activation` say; "static": a convolutional network is traced and computes on int8 codes from
                its first layer to its last, with activation scales chosen in advance from calibration images
    calibration  as for `quantize_`, if that is given none
    observer    for "static", how a result's range is chosen: "minmax"; "percentile": without its outermost values; "mse": the one with
                the least squared error of the codes

    Patterns are shell patterns (`*`, `?`, `[…]`), matched on the whole dotted name; `*` also matches dots.
    """

    format: str | Format
    method: str = "absmax"
    skip: Sequence[str] = ()
    overrides: Mapping[str, str | Format] = field(default_factory=dict)
    compute: str = "auto"
    activation: str = "block"
    embedding: str | Format | None = "q8_0"
    activations: str = "dynamic"
    calibration: Calibration | Tensor | Iterable[Any] | None = field(default=None, repr=False, compare=False)
    observer: str = "minmax"

    def __new__(cls, *_: Any, **settings: Any) -> Config:
        check_settings(cls, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in (self.format, *self.overrides.values(), *([] if self.embedding is None else [self.embedding])):
            as_format(name)
        if isinstance(self.skip, str):
            raise ArgumentError(f"skip is a list of patterns, got a string: write skip=[{self.skip!r}]")
        if self.method not in (*METHODS, *CALIBRATED):
            raise ArgumentError(f"method is one of {', '.join((*METHODS, *CALIBRATED))}, got {self.method!r}")
        check_compute(self.compute, self.activation)
        if self.activations not in ("dynamic", "static"):
            raise ArgumentError(f"activations is one of dynamic, static, got {self.activations!r}")
        if self.observer not in OBSERVERS:
            raise ArgumentError(f"observer is one of {', '.join(OBSERVERS)}, got {self.observer!r}")

    @classmethod
    def auto(
        cls,
        model: nn.Module,
        bits: float,
        calibration: Calibration | Tensor,
        *,
        formats: Sequence[str | Format] = AUTO_FORMATS,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Config:
        """A Config with a format for each Linear and stack of experts of a language model, so that they take at most `bits` per weight.

        bits      scales and zeros included; embeddings, and a head that is tied to one, are not counted
        formats   to choose from
        progress  called with (layers measured, all of them, name)
        settings  other fields of the Config: method, skip, embedding, compute, activation

        The sensitivity of a layer is measured: the divergence (Kullback-Leibler) of the model's predictions when only that layer has the
        format with the fewest bits, scaled for the other formats by their squared error. Then the sum is minimised within the budget.
        Raises ArgumentError where no choice fits it.
        """
        choices = [as_format(fmt) for fmt in formats]
        if not choices or not 0 < bits < float("inf") or settings.keys() & {"format", "overrides"}:
            raise ArgumentError(
                f"auto chooses format and overrides among one or more formats for a positive number of bits, got {bits} bits, "
                f"{len(choices)} formats and the settings {', '.join(settings) or 'none'}"
            )
        plain = cls(str(choices[0]), **settings)
        with expanded(model, attention=True):
            found = candidates(model)
            check_patterns(plain, [candidate.name for candidate in found])
            decisions = decide(found, plain)
            names = list(_calibrated_names(model, decisions))
            if not names:
                raise ArgumentError(f"{type(model).__name__} has no Linear or experts to choose a format for that no skip pattern keeps")
            weights = {name: model.get_submodule(name).get_parameter("weight") for name in names}
            sizes = [[_stored_bytes(fmt, tuple(weight.shape)) for fmt in choices] for weight in weights.values()]
            count = sum(weight.numel() for weight in weights.values())
            if bits < (least := 8 * sum(map(min, sizes)) / count):  # before measuring, which takes minutes
                what = f"the smallest formats take {least:.2f} bits per weight, got {bits}"
                raise ArgumentError(f"{what}: allow more bits or smaller formats")
            losses = measure_losses(model, weights, choices, as_calibration(calibration), progress)
            budget = int(bits * count / 8)
            chosen = dict(zip(names, allocate(sizes, losses, budget), strict=True))
        most = max(range(len(choices)), key=list(chosen.values()).count)
        overrides = {name: str(choices[index]) for name, index in chosen.items() if index != most}
        return cls(str(choices[most]), overrides=overrides, **settings)

    def default_for(self, kind: str, *, narrow: bool = False) -> Format:
        """The format of a module of this kind without an override; `narrow`: a convolution whose taps have few channels."""
        if narrow and isinstance(as_format(self.format).block, int):
            return as_format("int8_channel")
        return as_format(self.embedding if kind in ("Embedding", "EmbeddingBag") and self.embedding is not None else self.format)


def check_settings(cls: type, settings: Mapping[str, Any]) -> None:
    """Raises ArgumentError for a setting that no Config has; `cls` is what it was given to."""
    known = [setting.name for setting in fields(Config)]
    for name, value in settings.items():
        if name not in known:
            remedy = f"the settings are {', '.join(known)}"
            if name.removeprefix("bnb_4bit_") in _IN_THE_FORMAT:
                wide = value == 8 or "8" in name or "8" in str(value)
                remedy = f'the format says that, for example {cls.__name__}("{"int8_channel" if wide else "int4_g64"}")'
            elif name in _IN_SKIP:
                remedy = 'write skip=["lm_head"] with the names to leave'
            raise ArgumentError(f"{cls.__name__} has no setting {name}, got {name}={value!r}: {remedy}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module that holds a weight, and can be quantized unless `reason` says why not.

    kind    "Linear", "Conv2d", … or another class name
    weight  equal for candidates that share one weight
    narrow  a convolution whose taps have few channels: it takes int8_channel instead of a format with blocks
    """

    name: str
    kind: str
    weight: Hashable
    reason: str | None = None
    narrow: bool = False


def as_config(config: Config | Format | str) -> Config:
    """A Config as it is, or one of a format alone. Raises ArgumentError, FormatError."""
    if isinstance(config, Config):
        return config
    check_type(config, (Format, str), "what to quantize to is a Config or a format", 'write Config("q4_0", …), or "q4_0" alone')
    return Config(config)


def quantize_(
    model: nn.Module,
    config: Config | Format | str,
    calibration: Calibration | Tensor | Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Replaces every nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Conv1d and nn.Conv2d of `model`, and each stack of experts, by its
    quantized form, in place, and returns `model`. An nn.MultiheadAttention becomes one with linear layers of its own (`nn/attention.py`),
    except in models of transformers.

    calibration  token ids [passages, tokens], or a Calibration: required by "gptq" and "awq", and used by "mse", if given, to weight its
                 errors. The model must then consist of a list of decoder layers. With `activations="static"`: batches of images, such as
                 a DataLoader yields
    progress     called with (decoder layers done, all of them, name) while calibrating

    With `activations="static"` the model itself becomes a torch.fx.GraphModule in evaluation mode, whose batch norms are folded and
    whose layers keep their names.

    `report(model)` tells what was not quantized, and why. Weights that modules share stay shared. Layers that are quantized already keep
    their codes: a model in which nothing is left to quantize is returned unchanged if each layer is as `config` asks. Raises
    ArgumentError (a layer of such a model has another format, method, compute or activation, a pattern that matches nothing, a NaN in
    a weight, a method without its calibration) or FormatError; then nothing has changed.
    """
    config, calibration = take_calibration(as_config(config), calibration)
    check_in_place(model)
    with expanded(model, attention=config.activations != "static"):
        return _quantize_expanded_(model, config, calibration, progress)


def _quantize_expanded_(
    model: nn.Module, config: Config, calibration: Calibration | Tensor | Iterable[Any] | None, progress: Progress | None
) -> nn.Module:
    found, present = candidates(model), _quantized(model)
    decisions = decide(found, config)
    others = _quantized_otherwise(model, present, config)
    if present and not any(isinstance(decision, Format) for decision in decisions.values()):
        check_patterns(config, [candidate.name for candidate in (*found, *present)])
        before = getattr(model, CONFIG_ATTRIBUTE, config).method
        if not others and before != config.method:
            others = f"the model is quantized already, and stays as {before} left it where {config.method} is asked for"
        if others:
            raise ArgumentError(f"{others}, and nothing is left to quantize: load the float model again and quantize that")
        return model
    check_patterns(config, [candidate.name for candidate in found])
    if config.activations == "static":
        return _quantize_static_(model, config, decisions, calibration)
    results: dict[str, Result] = {}
    notes: list[str] = [others] if others else []
    if calibration is not None:
        formats = _calibrated_names(model, decisions)
        results = {r.name: r for r in calibrate(model, formats, config.method, as_calibration(calibration), progress=progress)}
        missed = sorted(name for name in formats if f"{name}.weight" not in results)
        notes += [unreached(name) for name in missed] + [note for result in results.values() for note in result.notes]
    method = UNCALIBRATED.get(config.method, config.method)

    def codes_of(name: str, module: nn.Module, fmt: Format) -> tuple[Codes, float | None]:
        result, weight = results.get(f"{name}.weight"), module.get_parameter("weight")
        if result is not None and isinstance(result.value, Codes):
            return result.value, result.error
        codes = quantize_weight(kind_of(module), weight, fmt, method, name=f"{name}.weight")
        return codes, relative_error(weight, codes, kind_of(module))

    put_quantized_(model, {name: fmt for name, fmt in decisions.items() if isinstance(fmt, Format)}, config, codes_of)
    with torch.no_grad():
        for name, result in results.items():
            if isinstance(result.value, Tensor):
                model.get_parameter(name).copy_(result.value)
    setattr(model, CONFIG_ATTRIBUTE, config)
    add_notes(model, notes)
    for tell in finished:
        tell(model)
    return model


def put_quantized_(
    model: nn.Module,
    formats: Mapping[str, Format],
    config: Config,
    codes_of: Callable[[str, nn.Module, Format], tuple[Codes, float | None]],
) -> None:
    """Replaces each module that `formats` names by its quantized form; `codes_of` returns its codes and their error.

    A module with several names stays one module, and weights that modules share stay shared.
    """
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
                codes, error = codes_of(name, module, formats[name])
                packed = pack_weight(module, codes, weight.device)
            made = quantized_module(module, packed, weight.dtype, config.compute, config.activation, error)
            by_module[id(module)] = made
            by_weight.setdefault(id(weight), made)
        replacements.append((name, by_module[id(module)]))
    for name, replacement in replacements:
        model.set_submodule(name, replacement)


def add_notes(model: nn.Module, notes: Sequence[str]) -> None:
    """Adds notes that `report` prints below its table."""
    setattr(model, _NOTES, (*getattr(model, _NOTES, ()), *notes))


def _quantize_static_(model: nn.Module, config: Config, decisions: Mapping[str, Format | str], images: Any) -> nn.Module:
    """`quantize_` with static activations: to a network on int8 codes."""
    check_type(images, Iterable, 'activations="static" takes batches of images', "pass a DataLoader or a list of tensors")
    for name, fmt in decisions.items():
        if (
            isinstance(fmt, Format)
            and isinstance(model.get_submodule(name), nn.Conv1d | nn.Conv2d | nn.Linear)
            and (fmt.zero != "none" or isinstance(fmt.block, int))
        ):
            raise ArgumentError(
                f'activations="static" takes weights with a scale per channel or tensor and no zero, got {fmt} for {name}: use int8_channel'
            )

    def weight_of(name: str, layer: nn.Conv1d | nn.Conv2d | nn.Linear) -> LayerWeight | str:
        fmt = decisions[name]
        if isinstance(fmt, str):
            return fmt
        codes = quantize_weight(kind_of(layer), layer.weight, fmt, config.method, name=f"{name}.weight")
        error, bias = relative_error(layer.weight, codes), None if layer.bias is None else layer.bias.detach()
        return LayerWeight(pack_weight(layer, codes, layer.weight.device), bias, error)

    made = on_codes(model, images, weight_of, observer=config.observer)
    from_ = calibrated(made)
    assert from_ is not None
    replace_(model, made)
    setattr(model, CONFIG_ATTRIBUTE, config)
    setattr(model, _NOTES, from_.notes)
    for tell in finished:
        tell(model)
    return model


def report(model: nn.Module) -> Report:
    """Which modules of `model` are quantized and which are not, with reasons and bytes. One row per module with parameters."""
    check_type(model, nn.Module, "report takes a model, a torch.nn.Module", "pass the model that holds it")
    with expanded(model, attention=True):
        return _report(model, getattr(model, CONFIG_ATTRIBUTE, None))


def _report(model: nn.Module, config: Config | None) -> Report:
    found = candidates(model)
    reasons: dict[str, str] = {}
    for name, decision in (decide(found, config) if config else {c.name: c.reason for c in found}).items():
        static = config is not None and config.activations == "static"
        reasons[name] = decision if isinstance(decision, str) else "there is no such layer on codes" if static else "not quantized yet"
    seen: dict[int, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    rows = tuple(_row(name, m, reasons.get(name), seen) for name, m in modules if name in reasons or isinstance(m, QuantModule))
    return Report(rows, (*getattr(model, _NOTES, ()), *remarks(model)))


def candidates(model: nn.Module, *, without_data: bool = False) -> list[Candidate]:
    """The modules of `model` with tensors of their own that are not quantized yet, under each of their names.

    without_data    weights on the meta device are candidates too
    """
    modules = list(model.named_modules(remove_duplicate=False))
    weights = {f"{name}.weight" for name, module in modules if isinstance(module, FLOAT_MODULES)}
    elsewhere = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name not in weights}
    found = []
    for name, module in modules:
        if isinstance(module, FLOAT_MODULES):
            reason = _why_not(module, without_data)
            if reason is None and (other := elsewhere.get(id(module.weight))):
                reason = f"its weight is also {other}, which is not a module that can be quantized"
            narrow = kind_of(module) in CONVOLUTIONS and module.weight.shape[1] < _NARROW
            found.append(Candidate(name, kind_of(module), id(module.weight), reason, narrow))
        elif not isinstance(module, QuantModule) and any(True for _ in own_tensors(module)):
            reason = why_not_experts(module) if stacks(module) else STACKED if _stacked(module) else NOT_A_KIND
            if isinstance(module, MixtureOfExperts):
                reason = "the biases of experts"
            elif isinstance(module, parametrize.ParametrizationList):
                reason = "what a parametrized weight is made of"
            found.append(Candidate(name, type(module).__name__, id(module), reason))
    return found


def _stacked(module: nn.Module) -> bool:
    """Whether it may be a mixture of experts with weights [experts, N, K]. Positions and class tokens are [1, tokens, K]."""
    shapes = [t.shape for _, t in own_tensors(module) if not is_lazy(t)]
    return not isinstance(module, nn.modules.conv._ConvNd) and any(len(shape) == 3 and shape[0] > 1 for shape in shapes)


def _quantized(model: nn.Module) -> list[Candidate]:
    """The modules of `model` that are quantized, as the candidates that they were."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantModule):
            narrow = isinstance(module.packed, PackedConv) and module.packed.sizes.channels < _NARROW
            found.append(Candidate(name, module.kind, id(module.packed_data), None, narrow))
    return found


def _quantized_otherwise(model: nn.Module, present: Sequence[Candidate], config: Config) -> str | None:
    """Names the quantized modules `present` that are not as `config` asks; None if all are."""
    if present and config.activations == "static" and calibrated(model) is None:
        return f'{present[0].name} is quantized already with activations="dynamic", not "static"'
    wanted = {name: fmt for name, fmt in decide(present, config).items() if isinstance(fmt, Format)}
    other = [(name, *different) for name, fmt in wanted.items() if (different := _difference(model.get_submodule(name), fmt, config))]
    if not other:
        return None
    (first, has, asked), more = other[0], f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    return f"{first} is quantized already, and stays {has} where {asked} is asked for{more}"


def _difference(module: nn.Module, fmt: Format, config: Config) -> tuple[str, str] | None:
    """The first difference of a quantized module from the request: (what it has, what is asked), or None."""
    assert isinstance(module, QuantModule)
    if module.packed.format != fmt:
        return str(module.packed.format), str(fmt)
    for setting in ("compute", "activation"):
        has, asked = getattr(module, setting, None), getattr(config, setting)
        if has not in (None, asked) and (has, asked) != ("row", "image"):  # see Config
            return f"{setting}={has!r}", f"{asked!r}"
    return None


def decide(found: Sequence[Candidate], config: Config) -> dict[str, Format | str]:
    """For each candidate its format, or the reason why it is not quantized. Those that share a weight share the decision."""
    groups: dict[Hashable, list[Candidate]] = defaultdict(list)
    for candidate in found:
        groups[candidate.weight].append(candidate)
    decisions: dict[str, Format | str] = {}
    for group in groups.values():
        reasons = {c.name: reason for c in group if (reason := c.reason or _skipped(c.name, config))}
        overrides = [fmt for c in group if (fmt := _override(c.name, config))]
        for candidate in group:
            if reasons:
                kept, why = next(iter(reasons.items()))
                decisions[candidate.name] = reasons.get(candidate.name, f"shares its weight with {kept}, which stays ({why})")
            else:
                decisions[candidate.name] = (
                    overrides[0] if overrides else config.default_for(group[0].kind, narrow=any(c.narrow for c in group))
                )
    return decisions


def check_patterns(config: Config, names: Sequence[str]) -> None:
    """Raises ArgumentError for a pattern of `config` that matches none of the modules `names`."""
    for setting, patterns in (("skip", config.skip), ("overrides", config.overrides)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or ["none"]
                raise ArgumentError(f"the {setting} pattern {pattern!r} matches no module: the closest names are {', '.join(close)}")


def check_in_place(model: nn.Module) -> None:
    """Raises ArgumentError for a model whose modules cannot be replaced, or have been prepared by `prepare_qat_`."""
    check_type(model, nn.Module, "a model is a torch.nn.Module", "use halfbyte.convert for one on disk, halfbyte.quantize for a tensor")
    if isinstance(model, FLOAT_MODULES):
        raise ArgumentError(f"a lone {type(model).__name__} cannot be replaced in place: wrap it, nn.Sequential(module)")
    check_not_in_training(model)


def take_calibration(config: Config, given: Any, *, in_memory: bool = True) -> tuple[Config, Any]:
    """The config without its calibration, and the calibration: `given`, or else the config's own.

    Raises ArgumentError for a config that needs calibration and has none, or has one that it does not use; UnsupportedError for static
    activations of a model that is not `in_memory`, as it must be traced and run.
    """
    calibration = config.calibration if given is None else given
    if config.activations != "static":
        check_given(config.method, calibration is not None, need=CALIBRATED, use=(*CALIBRATED, "mse"), other=METHODS)
    elif not in_memory:
        raise UnsupportedError('activations="static" traces a model that is in memory: use quantize_(model, config, calibration=images)')
    elif calibration is None:
        raise ArgumentError('activations="static" needs calibration, which was not given: pass calibration=images, such as a DataLoader')
    elif config.method in CALIBRATED:
        raise ArgumentError(f'activations="static" has no use for {config.method}, which learns from text: use one of {", ".join(METHODS)}')
    return replace(config, calibration=None), calibration


def relative_error(weight: Tensor, codes: Codes, kind: str = "Linear") -> float:
    """||weight - codes|| / ||weight|| (Frobenius) of the weight of a module of this kind; 0 for a weight of zeros.

    Of more than 128 rows it is an estimate from 128 of them, evenly spread.
    """
    if len(codes.shape) != weight.dim() or weight.dim() != 2:  # experts, or a convolution
        weight = (weight if kind == "Experts" else channels_last(weight, codes.format)).reshape(-1, codes.shape[-1])
        codes = codes.reshape((weight.shape[0], weight.shape[1]))
    n = codes.shape[0]
    rows = torch.linspace(0, n - 1, min(n, _ROWS), dtype=torch.float32, device=weight.device).round().long()
    w = weight.detach()[rows].float()
    rounded = codes.select(rows.to(codes.data.device)).dequantize().to(w.device)
    norm = float(w.norm())
    return float((w - rounded).norm()) / norm if norm else 0.0


def _calibrated_names(model: nn.Module, decisions: Mapping[str, Format | str]) -> dict[str, Format]:
    """The Linears and experts that are to be quantized and do not share their weight, with their formats."""
    owners: dict[int, set[int]] = defaultdict(set)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | StackedExperts)}
    for module in modules.values():
        owners[id(module.weight)].add(id(module))
    alone = {name for name, m in modules.items() if not isinstance(m, nn.Embedding) and len(owners[id(m.weight)]) == 1}
    return {name: fmt for name, fmt in decisions.items() if name in alone and isinstance(fmt, Format)}


def _stored_bytes(fmt: Format, shape: tuple[int, ...]) -> int:
    return sum(torch.Size(size).numel() * dtype.itemsize for dtype, size in stored_tensors(fmt, shape).values())


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module itself, without its children's."""
    yield from module.named_parameters(recurse=False)
    yield from ((name, b) for name, b in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set)


def _skipped(name: str, config: Config) -> str | None:
    return next((f"skip pattern {pattern!r}" for pattern in config.skip if fnmatchcase(name, pattern)), None)


def _override(name: str, config: Config) -> Format | None:
    return next((as_format(fmt) for pattern, fmt in config.overrides.items() if fnmatchcase(name, pattern)), None)


def _why_not(module: nn.Linear | nn.Embedding | nn.EmbeddingBag | nn.Conv1d | nn.Conv2d | StackedExperts, without_data: bool) -> str | None:
    """Why a module cannot be replaced by its quantized form, or None."""
    if isinstance(module, FakeQuantized):
        return f"in training for {module.target.format}, to which convert_qat_ converts it"
    weight: Tensor = module.weight
    name, base = type(module).__name__, next(base for base in FLOAT_MODULES if isinstance(module, base))
    reasons = {
        "its weight is parametrized": parametrize.is_parametrized(module),
        f"its weight is a {type(weight).__name__}": type(weight) not in (nn.Parameter, Tensor),
        f"{name} has a forward of its own": (type(module).forward is not base.forward or "forward" in vars(module)) and not _known(module),
        "it has forward hooks, which would be lost": has_hooks(module),
        "MultiheadAttention reads its weight without calling it": isinstance(module, NonDynamicallyQuantizableLinear),
        "max_norm rescales its weight as it runs": isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None,
        "its padding is not with zeros": isinstance(module, nn.Conv1d | nn.Conv2d) and module.padding_mode != "zeros",
        f"its weight is {weight.dtype}: kernels take {', '.join(map(str, FLOATS))}": weight.dtype not in FLOATS,
        "its weight has no data (meta device)": weight.is_meta and not without_data,
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or ("its weight is empty" if weight.numel() == 0 else None)


def _known(module: nn.Module) -> bool:
    """Whether its own forward computes the same as that of its base class, or is an embedding's with a factor."""
    if "forward" in vars(module):
        return False
    return type(module).__name__ == "FalconLinear" or (isinstance(module, nn.Embedding) and factor_of(module) is not None)


def _row(name: str, module: nn.Module, reason: str | None, seen: dict[int, str]) -> Row:
    """`seen`: tensor id -> the first name, where its bytes are counted."""
    others = [t for _, t in own_tensors(module)]
    extra = sum(t.nbytes for t in others if seen.setdefault(id(t), name) == name and not is_lazy(t))
    if not isinstance(module, QuantModule):
        weight = next((t for n, t in own_tensors(module) if n == "weight"), others[0])
        tied_to = owner if (owner := seen[id(weight)]) != name else None
        shape = () if is_lazy(weight) else tuple(weight.shape)
        return Row(name, type(module).__name__, shape, None, reason, extra, extra, tied_to=tied_to)
    fmt, shape = module.packed.format, module.packed.shape
    owner = seen.setdefault(id(module.packed_data), name)
    before = after = 0
    if owner == name:
        before = module.weight.nbytes
        after = _stored_bytes(fmt, module.codes_shape)
    tied_to = None if owner == name else owner
    return Row(name, module.kind, shape, fmt, None, before + extra, after + extra, module.error, tied_to, module.codes_shape[-1])
