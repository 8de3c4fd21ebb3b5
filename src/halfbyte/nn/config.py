"""What a model is quantized to: formats by module, the method, and how the products are computed; and what that makes of each module."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor, nn

from halfbyte.errors import ArgumentError, UnsupportedError, check_type
from halfbyte.formats.dense import stored_bytes
from halfbyte.formats.spec import Format, as_format
from halfbyte.nn.calibration.calibrate import Calibration, as_calibration, calibrated_names, check_given
from halfbyte.nn.calibration.runs import Progress
from halfbyte.nn.calibration.sensitivity import measure_losses
from halfbyte.nn.candidates import candidates
from halfbyte.nn.described import Candidate, check_compute
from halfbyte.nn.modules.expanded import expanded
from halfbyte.quantizers import CALIBRATED, METHODS
from halfbyte.quantizers.mixed import allocate

_Class = TypeVar("_Class")

Decisions = Mapping[str, Format | str]  # of each module its format, or the reason why it is not quantized

NO_REASONS: Mapping[str, str] = MappingProxyType({})

# How the range of a result on codes is chosen.
Observer = Literal["minmax", "percentile", "mse"]  # how static networks find the scales of activations
OBSERVERS: tuple[Observer, ...] = get_args(Observer)

# What Config.auto chooses from.
AUTO_FORMATS = ("int4_g128", "int4_g64", "q4_0", "q8_0")

# What a Config says by its format or by skip, in the words of bitsandbytes, AutoAWQ, GPTQModel, quanto and torchao.
_IN_THE_FORMAT = {"load_in_4bit", "load_in_8bit", "bits", "w_bit", "weight_bits", "weights", "group_size", "q_group_size", "quant_type"}
_IN_SKIP = {"modules_to_not_convert", "llm_int8_skip_modules", "ignore", "exclude"}


def with_known_settings(cls: type[_Class]) -> type[_Class]:
    """Decorate a class that takes the settings of a Config: any other is refused with a remedy, before Python's own error."""
    init: Any = cls.__init__

    @wraps(init)
    def checked(self: _Class, *args: Any, **settings: Any) -> None:
        _check_settings(cls, settings)
        init(self, *args, **settings)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@with_known_settings
@dataclass(frozen=True)
class Config:
    """What to quantize and how.

    Patterns are shell patterns (`*`, `?`, `[…]`), matched on the whole dotted name; `*` also matches dots.

    Attributes:
        format: Of every Linear and convolution; convolutions whose taps have under 16 channels (stems, depthwise) take int8_channel where
            this one has blocks.
        method: How codes and scales are chosen: "absmax", "mse", "hqq", or, with calibration, "gptq" or "awq" (docs/quality.md).
        skip: patterns of module names that stay as they are.
        overrides: Pattern -> format, for modules that need another one; the first pattern that matches decides.
        compute: See QuantLinear and conv2d; "image" is for convolutions with one scale per channel or tensor and no zero, and means "row"
            for all other modules.
        activation: See `compute`.
        embedding: Of every Embedding and EmbeddingBag; None: the same as `format`.
        activations: "dynamic": as `compute` and `activation` say; "static": a convolutional network is traced and computes on int8 codes
            from its first layer to its last, with activation scales chosen in advance from calibration images.
        calibration: As for `quantize_`, if that is given none.
        observer: For "static", how a result's range is chosen: "minmax"; "percentile": without its outermost values; "mse": the one with
            the least squared error of the codes.
        strict: Whether a weight that its format cannot hold, such as one that is nearly zero, is an error; otherwise its module stays in
            floating point, and `report` says why.
        low_rank: The rank of a product in floating point that takes the outliers of each Linear, so that the rest can have 4 bits with
            compute="int8" (SVDQuant); 0: none. With calibration, inputs of the model, scales balance inputs and weights before.
        equalize: For "static", whether weights are rescaled first so that the channels between layers have equal ranges, where the network
            then computes the same in floating point. Activations get more precise and weights less: for int8, not for int4.

    Example:
        >>> hb.Config("q4_0", skip=["*lm_head"], overrides={"*down_proj": "q8_0"}).method
        'absmax'
    """

    format: str | Format
    method: str = "absmax"
    skip: Sequence[str] = ()
    overrides: Mapping[str, str | Format] = field(default_factory=dict)
    compute: str = "auto"
    activation: str = "block"
    embedding: str | Format | None = "q8_0"
    activations: str = "dynamic"
    calibration: Calibration | Tensor | Iterable[object] | None = field(default=None, repr=False, compare=False)
    observer: Observer = "minmax"
    strict: bool = False
    low_rank: int = 0
    equalize: bool = False

    def __post_init__(self) -> None:
        check_type(self.overrides, Mapping, "overrides are a dict of patterns and formats", 'write overrides={"*.down_proj": "q8_0"}')
        for name in (self.format, *self.overrides.values(), *([] if self.embedding is None else [self.embedding])):
            as_format(name)
        if isinstance(self.skip, str):
            raise ArgumentError(f"skip is a list of patterns, got a string: write skip=[{self.skip!r}]")
        check_type(self.skip, Iterable, "skip is a list of patterns", 'write skip=["lm_head"]')
        for pattern in (*self.skip, *self.overrides):
            check_type(pattern, str, "a pattern of skip or overrides is a str, part of a module's name", 'write "layers.0.*"')
        if self.method not in (*METHODS, *CALIBRATED):
            raise ArgumentError(f"method is one of {', '.join((*METHODS, *CALIBRATED))}, got {self.method!r}")
        check_compute(self.compute, self.activation)
        if self.activations not in ("dynamic", "static"):
            raise ArgumentError(f"activations is one of dynamic, static, got {self.activations!r}")
        if self.observer not in OBSERVERS:
            raise ArgumentError(f"observer is one of {', '.join(OBSERVERS)}, got {self.observer!r}")
        if self.equalize and self.activations != "static":
            raise ArgumentError(f'equalize goes with activations="static", got {self.activations!r}: write both, or leave equalize out')
        if type(self.low_rank) is not int or self.low_rank < 0:
            raise ArgumentError(f"low_rank is a whole number, got {self.low_rank!r}: write low_rank=32, or 0 for none")
        if self.low_rank and (self.method in CALIBRATED or self.activations == "static"):
            what = f"method={self.method!r}" if self.method in CALIBRATED else 'activations="static"'
            raise ArgumentError(f"low_rank does not go together with {what}: use one of {', '.join(METHODS)} and dynamic activations")

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
            names = list(calibrated_names(model, formats_of(choose(candidates(model), plain))))
            if not names:
                raise ArgumentError(f"{type(model).__name__} has no Linear or experts to choose a format for that no skip pattern keeps")
            weights = {name: model.get_submodule(name).get_parameter("weight") for name in names}
            sizes = [[stored_bytes(fmt, tuple(weight.shape)) for fmt in choices] for weight in weights.values()]
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

    @property
    def quant_method(self) -> str:
        """What transformers asks of a `quantization_config` first."""
        raise ArgumentError("transformers takes a HalfbyteConfig, got a Config: write quantization_config=HalfbyteConfig(config)")

    def default_for(self, kind: str, *, narrow: bool = False) -> Format:
        """The format of a module of this kind without an override; `narrow`: a convolution whose taps have few channels."""
        fmt = as_format(self.format)
        if (narrow and isinstance(fmt.block, int)) or (fmt.codebook and kind.startswith("Conv")):
            return as_format("int8_channel")
        return as_format(self.embedding) if kind in ("Embedding", "EmbeddingBag") and self.embedding is not None else fmt


def _check_settings(cls: type, settings: Mapping[str, object]) -> None:
    """Raise ArgumentError for a setting that no Config has; `cls` is what it was given to."""
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


def as_config(config: Config | Format | str) -> Config:
    """A Config as it is, or one of a format alone. Raises ArgumentError, FormatError."""
    if isinstance(config, Config):
        return config
    check_type(config, (Format, str), "what to quantize to is a Config or a format", 'write Config("q4_0", …), or "q4_0" alone')
    return Config(config)


def take_calibration(config: Config, given: object, *, in_memory: bool = True) -> tuple[Config, Any]:
    """The config without its calibration, and the calibration: `given`, or else the config's own.

    Raises ArgumentError for a config that needs calibration and has none, or has one that it does not use; UnsupportedError for static
    activations of a model that is not `in_memory`, as it must be traced and run.
    """
    calibration = config.calibration if given is None else given
    if config.low_rank:
        if not in_memory:
            raise UnsupportedError("low_rank takes a float model that is in memory: load it, and call quantize_(model, config)")
    elif config.activations != "static":
        check_given(config.method, calibration is not None, need=CALIBRATED, use=(*CALIBRATED, "mse"), other=METHODS)
    elif not in_memory:
        raise UnsupportedError('activations="static" traces a model that is in memory: use quantize_(model, config, calibration=images)')
    elif calibration is None:
        raise ArgumentError('activations="static" needs calibration, which was not given: pass calibration=images, such as a DataLoader')
    elif config.method in CALIBRATED and config.method != "gptq":
        use = ", ".join((*METHODS, "gptq"))
        raise ArgumentError(f'activations="static" has no use for {config.method}, which learns from text: use one of {use}')
    return replace(config, calibration=None), calibration


def choose(found: Sequence[Candidate], config: Config, kept: Mapping[str, str] = NO_REASONS) -> dict[str, Format | str]:
    """`decide`, after `check_patterns`."""
    check_patterns(config, found)
    return decide(found, config, kept)


def formats_of(decisions: Decisions) -> dict[str, Format]:
    """The modules that are to be quantized."""
    return {name: fmt for name, fmt in decisions.items() if isinstance(fmt, Format)}


def decide(found: Sequence[Candidate], config: Config, kept: Mapping[str, str] = NO_REASONS) -> dict[str, Format | str]:
    """For each candidate its format, or the reason why it is not quantized. Those that share a weight share the decision.

    kept  modules whose weight turned out not to fit its format -> the reason
    """
    groups: dict[Hashable, list[Candidate]] = defaultdict(list)
    for candidate in found:
        groups[candidate.weight].append(candidate)
    decisions: dict[str, Format | str] = {}
    for group in groups.values():
        reasons = {c.name: reason for c in group if (reason := c.reason or _skipped(c.name, config) or kept.get(c.name))}
        overrides = [fmt for c in group if (fmt := _override(c.name, config))]
        for candidate in group:
            if reasons:
                stays, why = next(iter(reasons.items()))
                decisions[candidate.name] = reasons.get(candidate.name, f"shares its weight with {stays}, which stays ({why})")
            else:
                decisions[candidate.name] = (
                    overrides[0] if overrides else config.default_for(group[0].kind, narrow=any(c.narrow for c in group))
                )
    return decisions


def check_patterns(config: Config, found: Sequence[Candidate]) -> None:
    """Raise ArgumentError for a pattern of `config` that matches none of these modules."""
    names = [candidate.name for candidate in found]
    for setting, patterns in (("skip", config.skip), ("overrides", config.overrides)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or ["none"]
                raise ArgumentError(f"the {setting} pattern {pattern!r} matches no module: the closest names are {', '.join(close)}")


def _skipped(name: str, config: Config) -> str | None:
    return next((f"skip pattern {pattern!r}" for pattern in config.skip if fnmatchcase(name, pattern)), None)


def _override(name: str, config: Config) -> Format | None:
    return next((as_format(fmt) for pattern, fmt in config.overrides.items() if fnmatchcase(name, pattern)), None)
