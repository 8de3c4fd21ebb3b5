"""y [M, N] = x [M, K] · Wᵀ for many rows: the whole weight is dequantized once, then torch multiplies (cuBLAS).

Any layout, bits, block and dtype of x; `layouts/gpu_tiles.py`. It wins for 8-bit weights, for float32, and where no kernel of this
room is made for the GPU's matrix units, as soon as writing and reading the weight in x's type is little beside the products.

Arithmetic: the weight is rounded once to x's type, the product is torch's, with the precision that torch is set to. A bias and a
residual are rounded to x's type, as is their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.kernels.gpu import dequantize
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu


@dataclass(frozen=True)
class Config:
    """There is one way."""


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    return (Config(),)


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] times the weight whose sections are codes, scale, zero -> out [M, N]."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    weight = torch.empty(problem.n, problem.k, dtype=problem.dtype, device=x.device)
    dequantize.write(gpu_tiles.Views(codes, scale, zero), geo, weight)
    bias = None if epilogue.bias is None else epilogue.bias.to(problem.dtype)
    addend = bias if epilogue.residual is None else epilogue.residual if bias is None else epilogue.residual + bias
    if addend is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(addend, x, weight.t(), out=out)
    if epilogue.clamps:
        out.clamp_(epilogue.low, epilogue.high)
