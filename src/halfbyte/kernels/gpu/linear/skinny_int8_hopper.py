"""y [M, N] = x [M, K] · Wᵀ on integer tensor cores with few rows M on Hopper: W8A8 and W4A8, one scale per channel and per row of x.

A first pass quantizes x (`quantize/activations.py`), and `skinny_hopper.py` multiplies: its first weights are loaded meanwhile.

Arithmetic: that of `gemm_int8.py` with one block per row of x and of the weight.
"""

from __future__ import annotations

import triton
from torch import Tensor

from halfbyte.kernels.gpu.linear import gemm_int8, skinny_hopper, skinny_hopper_config
from halfbyte.kernels.gpu.linear.skinny_hopper_config import Config
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.quantize.activations import Quantized
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_MOST_M = 64  # rows of x of a tile


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if reason := gemm_int8.supports(problem, gpu) or skinny_hopper_config.why_not(problem, gpu, _MOST_M):
        return reason
    plan = activations.plan(problem)
    if not plan.whole or plan.with_offset or problem.format.zero != "none":
        return "it multiplies rows and channels that have one scale each and no offset"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    return skinny_hopper_config.configs(problem, gpu)


def multiply(
    problem: Problem, config: Config, x: Quantized, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue, memory: Tensor
) -> None:
    """Launch the product of a quantized x."""
    static = skinny_hopper_config.compiled_for(problem, config, clamp=epilogue.clamps)
    skinny_hopper.multiply(problem, config, static, (x.q[: problem.m], x.scale), weight, out, epilogue, memory)


launch = activations.quantizing_launch(multiply, skinny_hopper_config.workspace_bytes, early=not triton.knobs.runtime.interpret)
