"""Calibration of the stacks of experts of a decoder layer: each expert is quantized for the tokens that are routed to it.

Moments are those of linear layers (runs.py), of each expert's own inputs. They may take as much memory as the layer itself; where that is
not enough for all experts the layer runs again for the next ones. An expert that too few tokens reach is quantized by `mse` without
moments, and a note names it.

AWQ: the last rows of an expert's first product (up, below gate) are what its second product reads channel by channel, so these rows are
divided by the scale of the second one's inputs. A trial run verifies that the layer's outputs do not change, as in folding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.nn.calibration.folding import same_outputs
from halfbyte.nn.calibration.runs import Moments, Runs
from halfbyte.nn.kinds import relative_distance
from halfbyte.nn.modules.experts import up_stack_of
from halfbyte.quantizers.awq import AWQ, search_scale
from halfbyte.quantizers.check import check_scales
from halfbyte.quantizers.mse import mse

FEW = 32  # tokens: fewer are not representative of an expert's inputs

CodesOf = Callable[[str, Tensor, Moments | None], Codes]  # name of the stack, weight [N, K] of an expert, moments of its inputs


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """A quantized stack of experts: its name within the layer, its codes [E, N, K] on the CPU; `error` and `notes` as in Result."""

    name: str
    codes: Codes
    error: float
    notes: tuple[str, ...]


@torch.no_grad()
def quantize_experts(
    runs: Runs, i: int, block: nn.Module, formats: Mapping[str, Format], codes_of: CodesOf, options: AWQ | None
) -> list[Stack]:
    """Quantize the stacks of experts in `formats` of `block`, a float32 copy of decoder layer i, and store the dequantized codes there.

    options  of AWQ, if it is to scale the inputs of second products
    """
    done = []
    # Second products first, because the weights of the first ones may be divided.
    for name in sorted(formats, key=lambda name: up_stack_of(name, formats) is None):
        weight, fmt = block.get_submodule(name).get_parameter("weight"), formats[name]
        before = up_stack_of(name, formats)
        up = None if before is None or options is None else block.get_submodule(before).get_parameter("weight")
        if up is not None and not _divides(runs, i, block, up, weight):
            up = None
        if fmt.block == "tensor":
            codes = mse(weight, fmt, name).to("cpu")
            notes: tuple[str, ...] = ("one scale for all experts: mse without calibration is used",)
        else:
            codes, notes = _each(runs, i, block, name, fmt, codes_of, up, options)
        check_scales(codes, weight, name)
        done.append(Stack(name, codes, relative_distance(weight, codes.dequantize().to(weight.device)), notes))
    for stack in done:  # after all measurements
        weight = block.get_submodule(stack.name).get_parameter("weight")
        weight.data = stack.codes.dequantize().to(weight.device)
    return done


def _each(
    runs: Runs, i: int, block: nn.Module, name: str, fmt: Format, codes_of: CodesOf, up: Tensor | None, options: AWQ | None
) -> tuple[Codes, tuple[str, ...]]:
    """The codes of a stack, expert by expert; `up` is the stack whose last rows AWQ divides."""
    weight = block.get_submodule(name).get_parameter("weight")
    experts, _, k = weight.shape
    step = max(1, _floats(block) // (k * k))
    codes: list[Codes] = []
    few: list[str] = []
    for first in range(0, experts, step):
        some = range(first, min(experts, first + step))
        for e, moments in zip(some, runs.measure_experts(i, block, name, some), strict=True):
            if moments.count < FEW:
                few.append(f"{e} ({moments.count})" if moments.count else str(e))
                codes.append(codes_of(name, weight[e], None).to("cpu"))
                continue
            if up is not None and options is not None:
                scale = search_scale([(weight[e], fmt)], moments.expected(), moments.first / moments.count, options)
                _divide(up[e : e + 1], weight[e : e + 1], scale.unsqueeze(0))
                moments.divide(scale)
            codes.append(codes_of(name, weight[e], moments).to("cpu"))
    notes = (f"few calibration tokens reach experts {', '.join(few)}: mse without calibration is used",) if few else ()
    return Codes.joined(codes, torch.stack), notes


def _floats(block: nn.Module) -> int:
    return sum(p.numel() for p in block.parameters())


def _divide(up: Tensor, down: Tensor, scale: Tensor) -> None:
    """Divide the last rows of `up` [E, N, H] by a scale [E, K], and multiply the columns of `down` [E, N', K] by it."""
    up.data[:, -scale.shape[1] :] /= scale.unsqueeze(-1)
    down.data *= scale.unsqueeze(1)


def _divides(runs: Runs, i: int, block: nn.Module, up: Tensor, down: Tensor) -> bool:
    """Whether the layer's outputs stay the same when `up` is divided and `down` multiplied by the same scale."""
    generator = torch.Generator().manual_seed(0)
    # Powers of two cause no rounding, so that dividing by them again restores the weights exactly.
    scale = torch.randint(-1, 2, (down.shape[0], down.shape[2]), generator=generator, device="cpu").float().exp2().to(down.device)
    before = runs.forward(i, block, 0)
    _divide(up, down, scale)
    after = runs.forward(i, block, 0)
    _divide(up, down, 1 / scale)
    return same_outputs(after, before)
