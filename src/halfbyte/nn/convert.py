"""Quantizing a model in place: which modules, to what format, and what became of each."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.spec import Format, as_format
from halfbyte.nn.modules import QuantModule, check_compute, kind_of, quantized_form
from halfbyte.nn.report import Report, Row
from halfbyte.quantizers import METHODS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # in which the kernels take activations
NOT_A_KIND = "only Linear and Embedding are quantized"
_CHUNK = 1 << 17  # elements that are compared at a time: what stays in a core's cache
_CONFIG = "_halfbyte_config"  # the attribute by which a model remembers what quantize_ was asked for


@dataclass(frozen=True)
class Config:
    """What to quantize and how.

    format      of every Linear
    embedding   of every Embedding; None: the same as `format`
    method      "absmax" or "mse": how scales are chosen
    skip        patterns of module names that stay as they are
    overrides   pattern -> format, for modules that need another one; the first pattern that matches decides
    compute, activation   see QuantLinear

    Patterns are those of the shell (`*`, `?`, `[…]`), matched on the whole dotted name; `*` matches dots too.
    """

    format: str | Format
    method: str = "absmax"
    skip: Sequence[str] = ()
    overrides: Mapping[str, str | Format] = field(default_factory=dict)
    compute: str = "auto"
    activation: str = "block"
    embedding: str | Format | None = "q8_0"

    def __post_init__(self) -> None:
        for name in (self.format, *self.overrides.values(), *([] if self.embedding is None else [self.embedding])):
            as_format(name)
        if isinstance(self.skip, str):
            raise ArgumentError(f"skip is a list of patterns, got a string: write skip=[{self.skip!r}]")
        if self.method not in METHODS:
            raise ArgumentError(f"method is one of {', '.join(METHODS)}, got {self.method!r}")
        check_compute(self.compute, self.activation)

    def default_for(self, kind: str) -> Format:
        """The format of a module of this kind that no override names."""
        return as_format(self.embedding if kind == "Embedding" and self.embedding is not None else self.format)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that holds a weight, and may be quantized unless `reason` says why not.

    kind    "Linear", "Embedding", or what else it is
    weight  equal for candidates that share one weight
    """

    name: str
    kind: str
    weight: Hashable
    reason: str | None = None


def quantize_(model: nn.Module, config: Config | Format | str) -> nn.Module:
    """Replaces every nn.Linear and nn.Embedding of `model` by its quantized form, in place, and returns `model`.

    What stays as it is, and why, `report(model)` tells. Weights that modules share stay shared. Raises ArgumentError (a
    pattern that matches nothing, a NaN in a weight) or FormatError, and then nothing has changed.
    """
    config = config if isinstance(config, Config) else Config(config)
    if isinstance(model, nn.Linear | nn.Embedding):
        raise ArgumentError(f"a lone {type(model).__name__} cannot be replaced in place: wrap it, nn.Sequential(module)")
    found = candidates(model)
    check_patterns(config, [candidate.name for candidate in found])
    decisions = decide(found, config)
    by_weight: dict[int, QuantModule] = {}
    by_module: dict[int, QuantModule] = {}  # a module that has several names stays one module
    replacements: list[tuple[str, QuantModule]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(fmt := decisions.get(name), Format):
            continue
        if id(module) not in by_module:
            weight = module.get_parameter("weight")
            if (tied := by_weight.get(id(weight))) is not None:
                packed, error = tied.packed, tied.error
            else:
                codes = ops.quantize(weight, fmt, config.method, name=f"{name}.weight")
                packed, error = ops.pack(codes), relative_error(weight, codes)
            made = quantized_form(module, packed, weight.dtype, config.compute, config.activation, error)
            by_module[id(module)] = made
            by_weight.setdefault(id(weight), made)
        replacements.append((name, by_module[id(module)]))
    for name, replacement in replacements:
        model.set_submodule(name, replacement)
    setattr(model, _CONFIG, config)
    return model


def report(model: nn.Module) -> Report:
    """What of `model` is quantized and what is not, with the reasons and the bytes. One row for each module with parameters."""
    config: Config | None = getattr(model, _CONFIG, None)
    found = candidates(model)
    reasons: dict[str, str] = {}
    for name, decision in (decide(found, config) if config else {c.name: c.reason for c in found}).items():
        reasons[name] = decision if isinstance(decision, str) else "not quantized yet"
    seen: dict[int, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    return Report(tuple(_row(name, m, reasons.get(name), seen) for name, m in modules if name in reasons or isinstance(m, QuantModule)))


def candidates(model: nn.Module, *, without_data: bool = False) -> list[Candidate]:
    """The modules of `model` with tensors of their own that are not quantized yet, under each of their names.

    without_data    weights on the meta device are candidates too
    """
    modules = list(model.named_modules(remove_duplicate=False))
    weights = {f"{name}.weight" for name, module in modules if isinstance(module, nn.Linear | nn.Embedding)}
    elsewhere = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name not in weights}
    found = []
    for name, module in modules:
        if isinstance(module, nn.Linear | nn.Embedding):
            reason = _why_not(module, without_data)
            if reason is None and (other := elsewhere.get(id(module.weight))):
                reason = f"its weight is also {other}, which is no Linear or Embedding"
            found.append(Candidate(name, kind_of(module), id(module.weight), reason))
        elif not isinstance(module, QuantModule) and any(True for _ in own_tensors(module)):
            found.append(Candidate(name, type(module).__name__, id(module), NOT_A_KIND))
    return found


def decide(found: Sequence[Candidate], config: Config) -> dict[str, Format | str]:
    """For each candidate its format, or the reason why it stays. Those that share a weight share the decision."""
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
                decisions[candidate.name] = overrides[0] if overrides else config.default_for(group[0].kind)
    return decisions


def check_patterns(config: Config, names: Sequence[str]) -> None:
    """Raises ArgumentError for a pattern of `config` that matches none of the modules `names`."""
    for setting, patterns in (("skip", config.skip), ("overrides", config.overrides)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or ["none"]
                raise ArgumentError(f"the {setting} pattern {pattern!r} matches no module: the closest names are {', '.join(close)}")


def relative_error(weight: Tensor, codes: Codes) -> float:
    """||weight - codes|| / ||weight|| (Frobenius) of a weight [N, K], a few rows at a time; 0 for a weight of zeros."""
    n, k = codes.shape
    step = max(1, _CHUNK // max(1, k))
    total = missed = 0.0
    for start in range(0, n, step):
        rows = slice(start, start + step)
        w = weight.detach()[rows].float()
        tensors = {name: t if len(t) < n else t[rows] for name, t in codes.tensors().items()}  # one scale for a tensor stays
        missing = (w - Codes.from_tensors(codes.format, (len(w), k), tensors).dequantize()).flatten()
        total += float(torch.dot(w.flatten(), w.flatten()))
        missed += float(torch.dot(missing, missing))
    return (missed / total) ** 0.5 if total else 0.0


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module itself, without its children's."""
    yield from module.named_parameters(recurse=False)
    yield from ((name, b) for name, b in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set)


def _skipped(name: str, config: Config) -> str | None:
    return next((f"skip pattern {pattern!r}" for pattern in config.skip if fnmatchcase(name, pattern)), None)


def _override(name: str, config: Config) -> Format | None:
    return next((as_format(fmt) for pattern, fmt in config.overrides.items() if fnmatchcase(name, pattern)), None)


def _why_not(module: nn.Linear | nn.Embedding, without_data: bool) -> str | None:
    """Why a module cannot be replaced by its quantized form, or None."""
    weight: Tensor = module.weight
    name, base = type(module).__name__, nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    reasons = {
        "its weight is parametrized": parametrize.is_parametrized(module),
        f"its weight is a {type(weight).__name__}": type(weight) not in (nn.Parameter, Tensor),
        f"{name} has a forward of its own": type(module).forward is not base.forward or "forward" in vars(module),
        "it has forward hooks, which would be lost": bool(module._forward_hooks or module._forward_pre_hooks),
        "MultiheadAttention reads its weight without calling it": isinstance(module, NonDynamicallyQuantizableLinear),
        "max_norm rescales its weight as it runs": isinstance(module, nn.Embedding) and module.max_norm is not None,
        f"its weight is {weight.dtype}: kernels take {', '.join(map(str, FLOATS))}": weight.dtype not in FLOATS,
        "its weight has no data (meta device)": weight.is_meta and not without_data,
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or ("its weight is empty" if weight.numel() == 0 else None)


def _row(name: str, module: nn.Module, reason: str | None, seen: dict[int, str]) -> Row:
    """`seen` says where each tensor was first met: its bytes are counted there, and only there."""
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
        after = sum(torch.Size(size).numel() * dtype.itemsize for dtype, size in stored_tensors(fmt, shape).values())
    tied_to = None if owner == name else owner
    return Row(name, module.kind, shape, fmt, None, before + extra, after + extra, module.error, tied_to)
