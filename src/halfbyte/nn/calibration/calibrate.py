"""Calibrated quantization of a language model: its layers are quantized for their inputs on real text, one decoder layer at a time.

The text's tokens go through the embeddings once. Then, for each decoder layer: a float32 copy of it is made on the device, the
inputs of its linear layers and experts are measured, these are quantized, and the hidden states go through the quantized copy to the next
layer. So each layer compensates for the errors of those before it, and memory never holds more than the model, the codes, one decoder
layer and the hidden states. Linear layers outside the decoder layers (the head) come last.

The moments of the inputs x of a linear layer, over all tokens: sum(x x^T) and sum(|x|).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError, FormatError, check_type, lookup
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.nn.calibration.calibrate_experts import FEW, quantize_experts
from halfbyte.nn.calibration.folding import Fold, find_folds
from halfbyte.nn.calibration.runs import Copy, Moments, Progress, Runs
from halfbyte.nn.kinds import relative_distance
from halfbyte.nn.modules.experts import StackedExperts
from halfbyte.quantizers.awq import AWQ, awq, search_scale
from halfbyte.quantizers.check import check_finite, check_scales
from halfbyte.quantizers.gptq import GPTQ, gptq
from halfbyte.quantizers.mse import mse

_Folds = dict[tuple[object, ...], list[Fold]]  # key: the structure of the layer, its class and the names of its linear layers


@dataclass(frozen=True, eq=False)
class Calibration:
    """The calibration data of methods that use activations, and their options.

    Attributes:
        tokens: int64 [n, t]: n passages of t tokens each, as `calibration_tokens` returns; in all at least 32, better tens of thousands.
        batch: Passages that run at a time.
        device: Where the layers run; None: where they are.
        gptq: Options of these methods.
        awq: See `gptq`.

    Example:
        >>> hb.Calibration(torch.zeros(4, 32, dtype=torch.int64), batch=2).batch
        2
    """

    tokens: Tensor
    batch: int = 8
    device: torch.device | str | None = None
    gptq: GPTQ = field(default_factory=GPTQ)
    awq: AWQ = field(default_factory=AWQ)

    def __post_init__(self) -> None:
        check_type(self.tokens, Tensor, "calibration takes token ids, a tensor", "pass calibration_tokens(tokenizer, text)")
        if self.tokens.dim() != 2 or not self.tokens.numel() or self.tokens.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(
                f"calibration takes token ids [passages, tokens], at least one, got {self.tokens.dtype} {list(self.tokens.shape)}: "
                "use calibration_tokens(tokenizer, text)"
            )
        if self.tokens.numel() < FEW:
            raise ArgumentError(
                f"calibration takes {FEW} or more tokens, got {self.tokens.numel()}, which do not show what the model meets: "
                "use a few pages of text of the kind that it will see"
            )
        if self.batch < 1:
            raise ArgumentError(f"calibration runs 1 or more passages at a time, got a batch of {self.batch}")
        try:
            torch.empty(0, device=self.device, dtype=torch.float32)
        except (RuntimeError, AssertionError) as e:  # torch raises either for an unavailable device
            raise ArgumentError(f"calibration cannot run on device {str(self.device)!r} ({str(e).splitlines()[0]}): use cpu") from e


def as_calibration(calibration: object) -> Calibration:
    """A Calibration as it is, or one of token ids alone. Raises ArgumentError."""
    return calibration if isinstance(calibration, Calibration) else Calibration(cast(Tensor, calibration))


def check_given(method: str, given: bool, *, need: Sequence[str], use: Sequence[str], other: Iterable[str]) -> None:
    """Raise ArgumentError for a method that needs calibration and has none, or has calibration and does not use it.

    need, use   methods that require calibration, and those that use it if given
    other       methods without calibration, to suggest
    """
    if method in need and not given:
        raise ArgumentError(
            f"{method} needs calibration, which was not given: pass calibration=calibration_tokens(tokenizer, text), "
            f"or use one of {', '.join(other)}"
        )
    if given and method not in use:
        raise ArgumentError(f"{method} has no use for calibration, which {', '.join(use)} learn from: leave one of the two out")


def calibration_tokens(tokenizer: object, text: str, passages: int = 128, length: int = 512) -> Tensor:
    """Tokenize passages that are spread evenly over a text, for calibration.

    Args:
        tokenizer: a transformers tokenizer, or any callable that takes a text and returns its "input_ids".
        text: The text; passages of a short one are shorter.
        passages: The most passages.
        length: Tokens of a passage.

    Returns:
        Token ids int64 [n, length] of at most `passages` passages.

    Example:
        >>> hb.calibration_tokens(lambda text: {"input_ids": list(text.encode())}, "halfbyte " * 20, passages=2, length=16).shape
        torch.Size([2, 16])
    """
    check_type(text, str, "calibration_tokens takes (tokenizer, text), the text a string", "pass the tokenizer first")
    if not callable(tokenizer):
        raise ArgumentError(f"a tokenizer is a callable, got {type(tokenizer).__name__}: pass one of transformers, and then the text")
    if passages < 1 or length < 1:
        raise ArgumentError(f"calibration takes 1 or more passages of 1 or more tokens, got {passages} of {length}")
    # transformers warns about texts longer than a model's limit, but this one is split into passages.
    quiet = {"verbose": False} if hasattr(tokenizer, "model_max_length") else {}
    ids = torch.as_tensor(tokenizer(text, **quiet)["input_ids"], dtype=torch.int64, device="cpu").flatten()
    if not len(ids):
        raise ArgumentError("the calibration text has no tokens: use a few pages of text of the kind that the model will see")
    length = min(length, len(ids))
    whole = len(ids) // length
    take = torch.linspace(0, whole - 1, min(passages, whole), dtype=torch.float32, device="cpu").round().long()
    return ids[: whole * length].reshape(whole, length)[take]


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """The codes of a weight, or the new value of a parameter that stays in floating point, by the parameter's name.

    error   ||float weight - quantized weight|| / ||float weight|| (Frobenius), of the scaled weight
    notes   remarks for the report
    reason  why a weight that was to be quantized stays in floating point
    """

    name: str
    value: Codes | Tensor
    error: float | None = None
    notes: tuple[str, ...] = ()
    reason: str | None = None


def calibrated_names(model: nn.Module, formats: Mapping[str, Format]) -> dict[str, Format]:
    """Those of the modules in `formats` that `calibrate` takes: Linears and experts that do not share their weight."""
    owners: dict[int, set[int]] = defaultdict(set)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | StackedExperts)}
    for module in modules.values():
        owners[id(module.weight)].add(id(module))
    alone = {name for name, m in modules.items() if not isinstance(m, nn.Embedding) and len(owners[id(m.weight)]) == 1}
    return {name: fmt for name, fmt in formats.items() if name in alone}


def calibrate(
    model: nn.Module,
    formats: Mapping[str, Format],
    method: str,
    calibration: Calibration,
    *,
    materialize: Copy | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Quantize the linear layers and stacks of experts (`experts.expanded`) named in `formats`, and yield their codes one by one.
    `model` is not changed.

    method       "gptq", "awq", or "mse" weighted by the inputs
    materialize  (name, module) -> a copy of a decoder layer (or of another Linear) that has data; None: a deep copy
    progress     called with (decoder layers done, all of them, name)

    AWQ also yields new values of the parameters that it divides by its scales; they belong together with the codes. A linear layer that no
    token reaches is left out; experts that few tokens reach are named in the result's notes. Raises ArgumentError for tokens outside of
    the model's vocabulary.
    """
    copy = materialize or (lambda _, module: deepcopy(module))
    runs = Runs(model, calibration.tokens, calibration.batch, calibration.device)
    folds: _Folds = {}
    for i, prefix, block, names in runs.blocks(formats, copy, progress):
        layer_formats = {name: formats[f"{prefix}.{name}"] for name in names}
        yield from _quantize_layer(runs, i, block, prefix, layer_formats, method, calibration, folds) if layer_formats else ()
    for name, moments in runs.outside(formats).items():
        linear = runs.in_float32(copy(name, model.get_submodule(name)))
        yield _quantize(linear, name, formats[name], method, moments, calibration)


@torch.no_grad()
def _quantize_layer(
    runs: Runs,
    i: int,
    block: nn.Module,
    prefix: str,
    formats: Mapping[str, Format],
    method: str,
    calibration: Calibration,
    folds: _Folds,
) -> list[Result]:
    """Quantize the modules of `block`, a copy of decoder layer i, that `formats` names. `folds` caches the folds per layer structure."""
    modules = {name: block.get_submodule(name) for name in formats}
    for name, module in modules.items():
        check_finite(module.get_parameter("weight"), f"{prefix}.{name}.weight")
    stacks = {name: formats[name] for name, module in modules.items() if isinstance(module, StackedExperts)}
    linears = {name: module for name, module in modules.items() if name not in stacks}
    moments = runs.measure(i, block, list(formats if method == "awq" else linears))
    results = []
    if method == "awq":
        structure = (type(block), *formats)
        if structure not in folds:
            folds[structure] = find_folds(block, list(formats), lambda copy: runs.forward(i, copy, 0))
        dtypes = {name: parameter.dtype for name, parameter in runs.layers[i].named_parameters()}
        changed = _scale(block, formats, moments, folds[structure], calibration.awq, dtypes)
        results += [Result(f"{prefix}.{name}", value.cpu()) for name, value in changed.items()]

    def codes_of(name: str, weight: Tensor, measured: Moments | None) -> Codes:
        return _codes(weight, formats[name], method, measured, calibration, f"{prefix}.{name}.weight")

    # Experts first: rounding linear layers would change their inputs.
    for done in quantize_experts(runs, i, block, stacks, codes_of, calibration.awq if method == "awq" else None):
        notes = tuple(f"{prefix}.{done.name}: {note}" for note in done.notes)
        results.append(Result(f"{prefix}.{done.name}.weight", done.codes, done.error, notes))
    for name, linear in linears.items():
        if name in moments:
            results.append(_quantize(linear, f"{prefix}.{name}", formats[name], method, moments[name], calibration))
    return results


def unreached(name: str) -> str:
    """The note for the report about a linear layer that calibration left out."""
    return f"no calibration token reaches {name}: mse without calibration is used"


def _scale(
    block: nn.Module,
    formats: Mapping[str, Format],
    moments: Mapping[str, Moments],
    folds: Sequence[Fold],
    options: AWQ,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """Scales the input channels of linear layers of a decoder layer, and their moments; returns the parameters divided in turn."""
    changed: dict[str, Tensor] = {}
    for fold in folds:
        if not all(name in moments for name in fold.consumers):
            continue
        found = moments[fold.consumers[0]]
        weights = [(block.get_submodule(name).get_parameter("weight").flatten(0, -2), formats[name]) for name in fold.consumers]
        scale = search_scale(weights, found.expected(), found.first / found.count, options, fold.channel)
        scale, parameters = fold.apply(block, scale, dtypes)
        for shared in {id(moments[name]): moments[name] for name in fold.consumers}.values():
            shared.divide(scale)
        changed |= parameters
    return changed


@torch.no_grad()
def _quantize(linear: nn.Module, name: str, fmt: Format, method: str, moments: Moments, calibration: Calibration) -> Result:
    """Quantize the weight of a float32 Linear called `name`, and replace it by its dequantized codes; one that its format cannot hold
    stays."""
    weight, full = linear.get_parameter("weight"), f"{name}.weight"
    try:
        codes = _codes(weight, fmt, method, moments, calibration, full)
        check_scales(codes, weight, full)
    except FormatError as e:
        return Result(full, weight.detach().cpu(), reason=str(e))  # AWQ may have scaled it
    rounded = codes.dequantize()
    error = relative_distance(weight, rounded)
    weight.data = rounded
    return Result(full, codes.to("cpu"), error)


def _codes(weight: Tensor, fmt: Format, method: str, moments: Moments | None, calibration: Calibration, name: str) -> Codes:
    """The codes of a float32 weight [N, K]; without moments those of `mse`."""
    if moments is None:
        return mse(weight, fmt, name, None)
    methods: dict[str, Callable[[Tensor], Codes]] = {
        "gptq": lambda expected: gptq(weight, fmt, expected, calibration.gptq, name),
        "awq": lambda expected: awq(weight, fmt, expected, calibration.awq, name),
        "mse": lambda expected: mse(weight, fmt, name, expected),
    }
    return lookup(methods, method, "the calibrated method")(moments.expected())
