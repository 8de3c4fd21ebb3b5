"""Low-rank branches of the linear layers of a model, with scales of their inputs if there are samples: `Config(low_rank=...)`.

The scale of a layer is the one of a few exponents, or none, with which its outputs for some of the samples' rows are nearest to the float
layer's (SVDQuant, Li and others, arXiv:2411.05007, searches them so, too).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.errors import ArgumentError, FormatError, check_type
from halfbyte.nn.calibration.calibrate import Calibration, calibrated_names
from halfbyte.nn.calibration.runs import in_evaluation
from halfbyte.nn.modules.attention import Attention
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.nn.modules.transposed import Conv1DLinear
from halfbyte.ops.fake_quantize import fake_quantize_activation
from halfbyte.quantizers.check import check_finite
from halfbyte.quantizers.low_rank import balancing_scale

if TYPE_CHECKING:
    from halfbyte.formats.codes import Codes
    from halfbyte.formats.spec import Format

ALPHAS = (0.2, 0.35, 0.5, 0.65, 0.8)  # exponents of `balancing_scale` that are tried, after no scale
_ROWS = 128  # rows of the inputs of each layer that are kept to compare them
_BATCH = 8  # rows of a tensor that run at a time


@dataclass(frozen=True)
class Quantization:
    """How residuals are quantized: the rank of what is not, the method, and `compute` and `activation` of the products."""

    rank: int
    method: str = "absmax"
    compute: str = "auto"
    activation: str = "block"


@dataclass
class Inputs:
    """The inputs of a layer: max |x| of each channel [K], and rows that lie evenly over all calls."""

    ranges: Tensor
    rows: Tensor
    calls: int = 1

    @classmethod
    def of(cls, x: Tensor) -> Inputs:
        """Those of one call, x [M, K] with M > 0."""
        return cls(x.abs().amax(0).float(), _spread(x, _ROWS))

    def add(self, x: Tensor) -> None:
        """Add the inputs of another call, x [M, K] with M > 0."""
        self.calls += 1
        self.ranges = torch.maximum(self.ranges, x.abs().amax(0).float())
        rows = _spread(x, -(-_ROWS // self.calls))
        self.rows = torch.cat([_spread(self.rows, _ROWS - len(rows)), rows])


def _spread(rows: Tensor, count: int) -> Tensor:
    """Take at most `count` rows, evenly spread."""
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows)), dtype=torch.float64, device=rows.device).round().long()]


def branches(
    model: nn.Module, formats: Mapping[str, Format], how: Quantization, samples: object
) -> tuple[dict[str, LowRankLinear], list[str]]:
    """The modules that replace linear layers which are to be quantized, by name, and notes about those that have no branch.

    samples  inputs of the model, which find the scales: see `quantize_`; None: there are no scales

    Raises ArgumentError where no layer can have a branch, and for samples that the model does not take.
    """
    linears = {name: module for name in calibrated_names(model, formats) if isinstance(module := model.get_submodule(name), nn.Linear)}
    reasons = {name: reason for name, linear in linears.items() if (reason := _why_not(model, name, linear, how.rank)) is not None}
    for name in reasons:
        del linears[name]
    if not linears:
        what = next((f"{name} {reason}" for name, reason in reasons.items()), "none is to be quantized")
        raise ArgumentError(f"no linear layer can have a branch of low_rank={how.rank} ({what}): use a lower rank, or leave it out")
    inputs = {} if samples is None else _inputs(model, linears, samples)
    found, notes = {}, [f"low_rank: {name} has no branch, as it {reason}" for name, reason in reasons.items()]
    for name, linear in linears.items():
        check_finite(linear.weight, f"{name}.weight")
        found[name] = nearest(linear, inputs[name], formats[name], how) if name in inputs else LowRankLinear.of(linear, how.rank)
        if samples is not None and name not in inputs:
            notes.append(f"low_rank: no sample reaches {name}, whose inputs have no scale")
    return found, notes


def _why_not(model: nn.Module, name: str, linear: nn.Linear, rank: int) -> str | None:
    """Why a linear layer has no branch, or None."""
    if isinstance(linear, Conv1DLinear) or isinstance(model.get_submodule(name.rpartition(".")[0]), Attention):
        return "belongs to a Conv1D or a MultiheadAttention"
    return f"has no more than {rank} inputs or outputs" if min(linear.weight.shape) <= rank else None


@torch.no_grad()
def nearest(linear: nn.Linear, inputs: Inputs, fmt: Format, how: Quantization) -> LowRankLinear:
    """The branch of a linear layer with no scale, or the scale of one of ALPHAS, that has the least `output_error`; of equals the first."""
    weight, best, least = linear.weight.detach().float(), LowRankLinear.of(linear, how.rank), float("inf")
    for scale in (None, *(balancing_scale(inputs.ranges, weight, alpha) for alpha in ALPHAS)):
        branch = LowRankLinear.of(linear, how.rank, scale)
        try:
            codes = ops.quantize(branch.rest(), fmt, how.method)
        except FormatError:  # said by the one that stays, when it is quantized
            continue
        if (error := output_error(branch, codes, inputs.rows, how)) < least:
            best, least = branch, error
    return best


@torch.no_grad()
def output_error(branch: LowRankLinear, codes: Codes, x: Tensor, how: Quantization) -> float:
    """||y - x W^T||² in float64, with y what the branch computes with these codes of its residual; x [M, K].

    The branch's residual still has the weight W. compute="auto" counts as "int8" on CPUs, and as "float" elsewhere.
    """
    z = x if branch.input_scale is None else x * branch.input_scale.to(x.dtype)
    rounded = z.float()
    if how.compute != "float" and (how.compute != "auto" or x.device.type == "cpu"):
        rounded = fake_quantize_activation(rounded, codes.format.block_size(x.shape[-1]), how.activation)  # type: ignore[arg-type]
    y = rounded.double() @ codes.dequantize(torch.float64).mT
    y += z.double() @ branch.low_rank_in.double().mT @ branch.low_rank_out.double().mT
    return float((y - x.double() @ branch.residual.get_parameter("weight").double().mT).square().sum())


@torch.no_grad()
def _inputs(model: nn.Module, linears: Mapping[str, nn.Linear], samples: object) -> dict[str, Inputs]:
    """The inputs of the layers that samples reach."""
    found: dict[str, Inputs] = {}

    def measure(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].flatten(0, -2)
        if x.numel() and name in found:
            found[name].add(x)
        elif x.numel():
            found[name] = Inputs.of(x)

    hooks = [linear.register_forward_pre_hook(partial(measure, name)) for name, linear in linears.items()]
    try:
        with in_evaluation(model):  # no dropout, and batch norms learn nothing
            for args, named in _calls(samples):
                model(*args, **named)
    finally:
        for hook in hooks:
            hook.remove()
    if name := next((name for name, inputs in found.items() if not inputs.ranges.isfinite().all()), None):
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
