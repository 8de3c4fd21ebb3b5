"""Low-rank branches of the linear layers of a model, with scales of their inputs if there are samples: `Config(low_rank=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError, check_type
from halfbyte.nn.calibration.calibrate import Calibration, calibrated_names
from halfbyte.nn.modules.attention import Attention
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.nn.modules.transposed import Conv1DLinear
from halfbyte.quantizers.check import check_finite
from halfbyte.quantizers.low_rank import balancing_scale

if TYPE_CHECKING:
    from halfbyte.formats.spec import Format

_BATCH = 8  # rows of a tensor that run at a time


def branches(model: nn.Module, formats: Mapping[str, Format], rank: int, samples: object) -> tuple[dict[str, LowRankLinear], list[str]]:
    """The modules that replace linear layers which are to be quantized, by name, and notes about those that have no branch.

    samples  inputs of the model, which find the scales: see `quantize_`; None: there are no scales

    Raises ArgumentError where no layer can have a branch, and for samples that the model does not take.
    """
    linears = {name: module for name in calibrated_names(model, formats) if isinstance(module := model.get_submodule(name), nn.Linear)}
    reasons = {name: reason for name, linear in linears.items() if (reason := _why_not(model, name, linear, rank)) is not None}
    for name in reasons:
        del linears[name]
    if not linears:
        what = next((f"{name} {reason}" for name, reason in reasons.items()), "none is to be quantized")
        raise ArgumentError(f"no linear layer can have a branch of low_rank={rank} ({what}): use a lower rank, or leave it out")
    ranges = {} if samples is None else _ranges(model, linears, samples)
    found, notes = {}, [f"low_rank: {name} has no branch, as it {reason}" for name, reason in reasons.items()]
    for name, linear in linears.items():
        check_finite(linear.weight, f"{name}.weight")
        scale = balancing_scale(ranges[name], linear.weight.detach().float()) if name in ranges else None
        found[name] = LowRankLinear.of(linear, rank, scale)
        if samples is not None and scale is None:
            notes.append(f"low_rank: no sample reaches {name}, whose inputs have no scale")
    return found, notes


def _why_not(model: nn.Module, name: str, linear: nn.Linear, rank: int) -> str | None:
    """Why a linear layer has no branch, or None."""
    if isinstance(linear, Conv1DLinear) or isinstance(model.get_submodule(name.rpartition(".")[0]), Attention):
        return "belongs to a Conv1D or a MultiheadAttention"
    return f"has no more than {rank} inputs or outputs" if min(linear.weight.shape) <= rank else None


@torch.no_grad()
def _ranges(model: nn.Module, linears: Mapping[str, nn.Linear], samples: object) -> dict[str, Tensor]:
    """max |x| of each input of the layers that samples reach."""
    found: dict[str, Tensor] = {}

    def measure(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        most = args[0].abs().flatten(0, -2).amax(0).float() if args[0].numel() else None
        if most is not None:
            found[name] = torch.maximum(found[name], most) if name in found else most

    hooks = [linear.register_forward_pre_hook(partial(measure, name)) for name, linear in linears.items()]
    modes = {module: module.training for module in model.modules()}
    model.eval()  # no dropout, and batch norms learn nothing
    try:
        for args, named in _calls(samples):
            model(*args, **named)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    if name := next((name for name, most in found.items() if not most.isfinite().all()), None):
        raise ArgumentError(f"an input of {name} is NaN or infinite with the calibration samples: pass samples as the model meets them")
    return found


def _calls(samples: object) -> Iterator[tuple[Sequence[object], Mapping[str, object]]]:
    """The positional and keyword arguments of each call of the model."""
    if isinstance(samples, Calibration):
        samples = samples.tokens.split(samples.batch)
    elif isinstance(samples, Tensor):
        samples = samples.split(_BATCH)
    check_type(samples, Iterable, "calibration for low_rank takes inputs of the model", "pass a list of tensors, tuples or dicts")
    assert isinstance(samples, Iterable)
    for sample in samples:
        if isinstance(sample, Mapping):
            yield (), sample
        else:
            yield sample if isinstance(sample, tuple | list) else (sample,), {}
